"""Finished runs of tests.support.jobs, each trained once a process: for tests that need one only to begin with."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support import jobs

Put = Callable[..., None]


def build_put(new_folder: Callable[[str], Path]) -> Callable[[Path], Put]:
    """Return folder -> put: `put(*overrides)` leaves in the folder what `jobs.run(folder, *overrides) == 0` leaves.

    It is a copy, which the test may change. Paths in its journal, and in its config, are those of another folder.
    """

    @functools.cache
    def trained(overrides: tuple[str, ...]) -> Path:
        folder = new_folder("trained")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            assert jobs.run(folder, *overrides) == 0, said.getvalue()
        return folder

    def put(folder: Path, *overrides: str) -> None:
        shutil.copytree(trained(overrides), folder, dirs_exist_ok=True)

    return lambda folder: functools.partial(put, folder)
