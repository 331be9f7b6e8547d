"""The disk of a run's folder, and the modes of files in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.system.files import FolderLostError, HeldFolder, free_bytes, replacing, write_atomically, write_json
from tests.support.messages import Messages


def test_disk_is_counted_also_for_a_folder_that_is_not_made_yet(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < 2**30


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_held_folder_that_is_moved_is_named_with_its_new_place(
    is_replaced: bool, tmp_path: Path, messages: Messages
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    held = HeldFolder(folder)
    folder.rename(tmp_path / "moved")
    if is_replaced:
        folder.mkdir()
    with messages.raised(FolderLostError):
        held.check()
    (tmp_path / "moved").rename(tmp_path / "back")
    if is_replaced:
        folder.rmdir()
    (tmp_path / "back").rename(folder)
    held.check()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_mode_of_the_umask_or_the_one_that_is_asked_for(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "open.json", {"a": 1})
        write_atomically(tmp_path / "private", "x", mode=0o600)
        write_atomically(tmp_path / "as_it_was", "x", mode=0o664)
        with replacing(tmp_path / "seen") as file:
            assert Path(file.name).stat().st_mode & 0o777 == mode, "also while it is written"
        with replacing(tmp_path / "kept", 0o644) as file:
            assert Path(file.name).stat().st_mode & 0o777 == 0o600, "it may have a secret"
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"open.json": mode, "private": 0o600, "as_it_was": 0o664, "seen": mode, "kept": 0o644}
