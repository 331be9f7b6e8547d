"""A Slurm of two nodes on this machine, with its own munge: Debian's slurmctld and slurmd, which need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.processes import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")


@contextlib.contextmanager
def slurm() -> Iterator[Mapping[str, str]]:
    """Start a Slurm and yield the environment for its commands. The test is skipped where it cannot be started.

    The nodes are called by their addresses: the runner takes names that resolve.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"Slurm needs root and {', '.join(missing or PROGRAMS)}: apt-get install slurm-wlm munge")
    folder = Path(f"/tmp/slurm-{os.getpid()}")  # the path of a socket has at most 107 characters
    folder.mkdir()
    host, ports = socket.gethostname().partition(".")[0], _free_ports(3)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
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
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=60
NodeName=127.0.0.[1-2] NodeHostname={host} Port=[{ports[1]},{ports[2]}] CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP
""")
    munged = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"]
    munged += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [subprocess.Popen(["munged", *munged], stderr=subprocess.DEVNULL)]
    try:
        wait_until((folder / "munge.socket").exists)
        for command in (["slurmctld"], ["slurmd", "-N", "127.0.0.1"], ["slurmd", "-N", "127.0.0.2"]):
            daemons.append(subprocess.Popen([*command, "-D"], env=env, stderr=subprocess.DEVNULL))
        wait_until(lambda: ask(env, "sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"])
        yield env
    finally:
        for daemon in reversed(daemons):  # munged last: the others say goodbye through it
            daemon.terminate()
            daemon.wait(30)
        shutil.rmtree(folder)


def ask(env: Mapping[str, str], *command: str) -> str:
    """Return what a command of Slurm prints, also one that fails because the controller is not there yet."""
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
