"""A hook that stops training where a test wants to do something to it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import runner

HELD = "train.hooks=[{fn: tests.support.hold.Hold}]"


class Hold(runner.Hook):
    """Stops at the step in the file `hold` of the working directory, until the file is gone or names another.

    Meanwhile there is a file `held-<process id>`.
    """

    def after_step(self, run: Any, result: Any) -> None:
        held = Path(f"held-{os.getpid()}")
        while (step := _held_at()) is not None and result.last_step >= step:
            held.touch()
            time.sleep(0.05)
        held.unlink(missing_ok=True)


def _held_at() -> int | None:
    try:
        return int(Path("hold").read_text() or 0)
    except FileNotFoundError:
        return None
