"""The disk of a run's folder."""

from __future__ import annotations

from pathlib import Path

from runner.system.files import free_bytes


def test_disk_is_counted_also_for_a_folder_that_is_not_made_yet(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < 2**30
