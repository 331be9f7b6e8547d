"""The memory and cores that a control group leaves, read from folders that look like the system's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from runner.system.resources import Memory, find_cores, find_memory, free_bytes

GB = 2**30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GB, of which 40 are free."""
    memory = type("memory", (), {"total": 64 * GB, "available": 40 * GB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def found(tmp_path: Path, lines: str) -> tuple[Memory, float | None]:
    (tmp_path / "of_process").write_text(lines)
    groups = tmp_path / "groups"
    return find_memory(groups, tmp_path / "of_process"), find_cores(groups, tmp_path / "of_process")[1]


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    write(tmp_path / "groups", memory__max="max", cpu__max="max 100000")
    assert found(tmp_path, "0::/\n") == (Memory(64 * GB, 40 * GB, None), None)
    assert found(tmp_path, "") == (Memory(64 * GB, 40 * GB, None), None)


def test_a_container_has_what_its_group_leaves(tmp_path: Path) -> None:
    limits = {"memory__max": str(8 * GB), "memory__current": str(7 * GB), "memory__stat": f"anon 1\ninactive_file {GB}"}
    write(tmp_path / "groups", cpu__max="150000 100000", **limits)
    # The path is one of the host; the container sees its own group at the root.
    assert found(tmp_path, "0::/docker/1234\n") == (Memory(64 * GB, 2 * GB, 8 * GB), 1.5)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    write(tmp_path / "groups" / "slurm", memory__max=str(4 * GB), memory__current="0", cpu__max="400000 100000")
    write(tmp_path / "groups" / "slurm" / "step", memory__max=str(6 * GB), memory__current="0", cpu__max="max 100000")
    assert found(tmp_path, "0::/slurm/step\n") == (Memory(64 * GB, 4 * GB, 4 * GB), 4.0)


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    usage = {"memory__limit_in_bytes": str(2 * GB), "memory__usage_in_bytes": str(GB)}
    write(tmp_path / "groups" / "memory" / "job", **usage)
    write(tmp_path / "groups" / "memory", memory__limit_in_bytes=str(2**63 - 4096))
    write(tmp_path / "groups" / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert found(tmp_path, "4:memory:/job\n1:cpu:/\n0::/\n") == (Memory(64 * GB, GB, 2 * GB), None)
    write(tmp_path / "groups" / "cpu", cpu__cfs_quota_us="200000")
    assert found(tmp_path, "1:cpu:/\n")[1] == 2.0


def test_cores_are_those_that_this_process_may_run_on() -> None:
    assert find_cores()[0] == len(os.sched_getaffinity(0))


def test_disk_is_counted_also_for_a_folder_that_is_not_made_yet(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < GB
