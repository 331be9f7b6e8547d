"""A Slurm of two nodes on this machine, with its own munge: Debian's slurmctld and slurmd, which need root."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.hosts import two_hosts
from tests.support.processes import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
CONTROLLER, NODE = 6817, 6818  # ports, in a network of its own


@dataclass
class Slurm:
    """A running Slurm.

    Attributes:
      prefix: what goes before a command to run it where the controller is.
      nodes: number of nodes.
      env: the environment of commands.
    """

    prefix: list[str]
    nodes: int
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def ask(self, *command: str) -> str:
        """Return what a command prints, also one that fails because the controller is not there yet."""
        words = [*self.prefix, *command]
        return subprocess.run(words, env=self.env, capture_output=True, text=True, check=False).stdout

    def facts(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """Start a Slurm. The test is skipped where it cannot be started.

    Each node is a network of its own: TensorFlow listens on all addresses, and the nodes of a job on the same port.
    They are called by their addresses, since the runner takes names that resolve. Where networks cannot be made, there
    is one.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"Slurm needs root and {', '.join(missing or PROGRAMS)}: apt-get install slurm-wlm munge")
    folder = Path(f"/tmp/slurm-{os.getpid()}")  # the path of a socket has at most 107 characters
    folder.mkdir()
    host = socket.gethostname().partition(".")[0]
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    munged = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"]
    munged += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
    daemons = [subprocess.Popen(["munged", *munged], stderr=subprocess.DEVNULL)]
    try:
        wait_until((folder / "munge.socket").exists)
        with two_hosts() as hosts:
            running = Slurm(hosts[0].prefix, len(hosts))
            running.env["SLURM_CONF"] = str(folder / "slurm.conf")
            nodes = "\n".join(
                f"NodeName={one} NodeAddr={one} NodeHostname={host}-{one} CPUs=2 RealMemory=4000"
                for one in (each.address for each in hosts)
            )
            (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}({hosts[0].address})
SlurmctldPort={CONTROLLER}
SlurmdPort={NODE}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SelectType=select/linear
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
""")
            commands = [[*running.prefix, "slurmctld", "-D"]]
            commands += [[*one.prefix, "slurmd", "-D", "-N", one.address] for one in hosts]
            daemons += [subprocess.Popen(one, env=running.env, stderr=subprocess.DEVNULL) for one in commands]
            idle = ["idle", str(len(hosts))]
            wait_until(lambda: running.ask("sinfo", "--noheader", "--format=%T %D").split() == idle)
            yield running
            for daemon in reversed(daemons[1:]):  # munged last: the others say goodbye through it
                daemon.terminate()
                daemon.wait(30)
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder)
