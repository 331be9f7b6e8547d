"""The memory, cores and disk that this process may use, with the limits of its control group."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes.

    Attributes:
      total: memory of the machine.
      available: memory that a process here may still use, limits considered.
      limit: limit of the control group (a container, a Slurm job); None: there is none.
    """

    total: int
    available: int
    limit: int | None


def find_memory(groups: Path = CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> Memory:
    """Return this machine's memory, and what this process's control group leaves of it.

    Args:
      groups: where control groups are mounted.
      of_process: the system's file with the group of this process.
    """
    machine = psutil.virtual_memory()
    total, available, smallest = int(machine.total), int(machine.available), None
    for folder in _folders(groups, of_process, "memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= total:  # version 1 has a very large number for "no limit"
            continue
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        # The page cache counts as used, but the kernel frees it on demand.
        cache = _fields(folder / "memory.stat").get("inactive_file", 0)
        available = min(available, max(limit - used + cache, 0))
        smallest = min(limit, smallest or limit)
    return Memory(total, available, smallest)


def find_cores(groups: Path = CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> tuple[int, float | None]:
    """Return (cores on which this process may run, cores whose time its control group allows; None: all of them)."""
    granted: list[float] = []
    for folder in _folders(groups, of_process, "cpu"):
        quota, period = _read(folder / "cpu.max").split() or ["max", ""] if (folder / "cpu.max").is_file() else (
            _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        )  # fmt: skip
        if quota.isdecimal() and period.isdecimal():  # "max", or -1: no limit
            granted.append(int(quota) / int(period))
    return len(os.sched_getaffinity(0)), min(granted, default=None)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, which need not exist."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free


def _folders(groups: Path, of_process: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control group and its parents, whose limits all apply."""
    found: list[Path] = []
    for line in _read(of_process).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", controller) and controller not in controllers.split(","):
            continue
        base = groups / controller if controllers else groups
        inner = base / path.lstrip("/")
        # In a container the file has a path of the host; the container's group is the root of the mount.
        found += [one for one in (inner, *inner.parents) if one.is_relative_to(base) and one.is_dir()]
    return found


def _number(folder: Path, *names: str) -> int | None:
    texts = (_read(folder / name) for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
