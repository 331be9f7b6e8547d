"""Free memory: of the machine, and of control groups with a limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from runner.system.memory import free_memory, peak_beyond_now, peak_memory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def process(tmp_path: Path) -> Path:
    write(tmp_path / "proc", status="Name:\tx\nVmHWM:\t    5000 kB\nVmRSS:\t    2000 kB\n")
    return tmp_path / "proc"


def test_a_limit_of_a_control_group_or_of_its_parent_counts_and_file_pages_are_free(
    tmp_path: Path, process: Path
) -> None:
    (process / "cgroup").write_text("0::/pod/main\n")
    groups = tmp_path / "groups"
    stat = "anon 500\ninactive_file 200\nactive_file 100\n"
    write(groups / "pod" / "main", memory__max="max\n", memory__current="600\n", memory__stat=stat)
    assert free_memory(process, groups) > 10_000
    write(groups / "pod", memory__max="1000\n", memory__current="900\n", memory__stat=stat)
    assert free_memory(process, groups) == 1000 - 900 + 300
    write(groups / "pod" / "main", memory__max="700\n")
    assert free_memory(process, groups) == 400  # both have 400 left
    write(groups / "pod" / "main", memory__max="650\n")
    assert free_memory(process, groups) == 350


def test_version_1_and_a_path_that_is_not_there(tmp_path: Path, process: Path) -> None:
    (process / "cgroup").write_text("3:cpu,memory:/docker/abc\n1:name=systemd:/x\n")
    stat = "inactive_file 7\ntotal_inactive_file 20\ntotal_active_file 10\n"
    write(
        tmp_path / "groups" / "memory", memory__limit_in_bytes="1000", memory__usage_in_bytes="900", memory__stat=stat
    )
    assert free_memory(process, tmp_path / "groups") == 130


def test_without_groups_it_is_that_of_the_machine(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_what_a_process_had_at_its_peak(tmp_path: Path, process: Path) -> None:
    assert peak_beyond_now(process) == 3000 * 1024
    assert peak_beyond_now(tmp_path) == 0
    assert peak_memory(process) == 5000 * 1024
    assert peak_memory(tmp_path) is None
