"""Two hosts on this machine: network namespaces that only see each other. They need root, and Linux's `ip`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Host(NamedTuple):
    """A host: its address, and what goes before a command to run it there."""

    address: str
    prefix: list[str]


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two of them; this machine alone where namespaces are not allowed. They end with the processes that hold them."""
    tools = all(shutil.which(name) for name in ("ip", "unshare", "nsenter"))
    if os.geteuid() != 0 or not tools or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        yield [Host("127.0.0.1", [])]
        return
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_namespace()) for _ in range(2)]
        ends = [["netns", str(pid)] for pid in pids]
        _ip(["link", "add", "here", *ends[0], "type", "veth", "peer", "name", "here", *ends[1]])
        hosts = [Host(f"10.201.0.{number}", ["nsenter", "-t", str(pid), "-n"]) for number, pid in enumerate(pids, 1)]
        for host in hosts:
            _ip(["addr", "add", f"{host.address}/24", "dev", "here"], host)
            for device in ("lo", "here"):
                _ip(["link", "set", device, "up"], host)
        yield hosts


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """The process that holds a new namespace."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"])  # seconds: it outlives us no longer
    try:
        ours = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours:
            time.sleep(0.01)
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def _ip(words: list[str], host: Host | None = None) -> None:
    subprocess.run([*(host.prefix if host else []), "ip", *words], check=True)
