"""The memory that this process has used, and may still use by the machine and its control groups (containers, batch
jobs).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PROCESS = Path("/proc/self")
_GROUPS = Path("/sys/fs/cgroup")


def free_memory(process: Path = _PROCESS, groups: Path = _GROUPS) -> int:
    """Return the bytes available without swapping: the machine's, or fewer if a control group has a limit.

    Args:
      process, groups: the kernel's folders about this process and about control groups (version 1 or 2).
    """
    return min([int(psutil.virtual_memory().available), *_bytes_left_in_groups(process, groups)])


def peak_beyond_now(process: Path = _PROCESS) -> int:
    """Return the process's peak memory minus its current memory, in bytes; 0 if not known."""
    sizes = _sizes_of(process)
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))


def peak_memory(process: Path = _PROCESS) -> int | None:
    """Return the largest resident memory that the process has had, in bytes; None if not known."""
    return _sizes_of(process).get("VmHWM")


def _sizes_of(process: Path) -> dict[str, int]:
    """Return the kernel's name of the process's peak and current memory -> bytes; {} without /proc."""
    with contextlib.suppress(OSError):
        status = (process / "status").read_text()
        found = re.findall(r"^(VmHWM|VmRSS):\s*(\d+) kB$", status, re.MULTILINE)
        return {name: 1024 * int(size) for name, size in found}
    return {}


def _bytes_left_in_groups(process: Path, groups: Path) -> Iterator[int]:
    """Yield the remaining bytes of each control group of this process that has a limit."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # the line of version 2 names none
            files = _VERSION_2
            top = groups
        elif "memory" in controllers.split(","):
            files = _VERSION_1
            top = groups / "memory"
        else:
            continue
        own_group = top / path.lstrip("/")
        # Limits of parent groups also apply. In a container the path may be the host's, which does not exist here.
        for folder in (own_group, *own_group.parents):
            bytes_left = _bytes_left_in(folder, files)
            if bytes_left is not None:
                yield bytes_left
            if folder == top:
                break


class _GroupFiles(NamedTuple):
    """The names of what a control group says of its memory.

    Attributes:
      limit, used: its files with numbers of bytes.
      cached: matches the entries of cached file pages in its file memory.stat.
    """

    limit: str
    used: str
    cached: str


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file")
_VERSION_2 = _GroupFiles("memory.max", "memory.current", "(?:in)?active_file")


def _bytes_left_in(group: Path, files: _GroupFiles) -> int | None:
    """Return the bytes that a control group may still use; None: no limit. Cached file pages count as free, because the
    kernel reclaims them.
    """
    with contextlib.suppress(OSError, ValueError):  # int("max") is a ValueError
        limit = int((group / files.limit).read_text())
        used = int((group / files.used).read_text())
        statistics = (group / "memory.stat").read_text()
        cached = re.findall(rf"^{files.cached} (\d+)$", statistics, re.MULTILINE)
        return max(0, limit - used + sum(map(int, cached)))
    return None
