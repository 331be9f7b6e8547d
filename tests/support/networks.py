"""Hosts on this machine that each have a network of their own, and so all ports: network namespaces at one bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

MISSING = "" if os.geteuid() == 0 and shutil.which("ip") else "needs root and the command ip (apt-get install iproute2)"
BRIDGE, NETWORK = "hosts0", "10.77.0"
HERE = f"{NETWORK}.254"
"""The address of this process in the network of the hosts."""


@contextlib.contextmanager
def networks(names: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Make a host for each of `names`, by which they find each other.

    Yields:
      name -> the words before a command that run it on this host.
    """
    folders = {name: Path("/etc/netns", name) for name in names}
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    with contextlib.ExitStack() as undo:
        ip(f"link add {BRIDGE} type bridge")
        undo.callback(ip, f"link del {BRIDGE}")
        ip(f"addr add {HERE}/24 dev {BRIDGE}")
        ip(f"link set {BRIDGE} up")
        for number, (name, address) in enumerate(addresses.items(), 1):
            ip(f"netns add {name}")
            undo.callback(ip, f"netns del {name}")
            ip(f"link add hosts{number} type veth peer name eth0 netns {name}")
            ip(f"link set hosts{number} master {BRIDGE} up")
            ip(f"-n {name} addr add {address}/24 dev eth0")
            for device in ("lo", "eth0"):
                ip(f"-n {name} link set {device} up")
            folders[name].mkdir(parents=True)
            undo.callback(shutil.rmtree, folders[name])
            lines = ["127.0.0.1 localhost", *(f"{known} {other}" for other, known in addresses.items())]
            (folders[name] / "hosts").write_text("\n".join([*lines, ""]))
        yield {name: ["ip", "netns", "exec", name] for name in names}


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
