"""What several tests of checkpoints share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 4 MB and yield its folder. The test is skipped where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=4m runner-test {folder} 2>/dev/null"):
        pytest.skip("no right to mount a small disk")
    yield folder
    os.system(f"umount --lazy {folder}")  # the writer has the folder open
