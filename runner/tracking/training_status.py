"""training_ended.json in model_dir: how training ended, for processes that continue after it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path

from runner.system.files import read_dataclass, remove, write_json

FILE = "training_ended.json"

GENERATION = "RUNNER_GENERATION"
"""Environment variable with the number of the run's start to which a task belongs."""

RUNNING = "running"


@dataclasses.dataclass(frozen=True)
class TrainingStatus:
    """The status of training: running, or how it ended.

    Attributes:
      status: running, finished, stopped_early, failed or interrupted (it can be resumed).
      global_step: step of the last checkpoint.
      generation: number of this start of the run; 0: starts are not counted.
      time: when the status was written, in seconds since 1970.
    """

    status: str = RUNNING
    global_step: int = 0
    generation: int = 0
    time: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.status != RUNNING

    @property
    def is_complete(self) -> bool:
        """Report whether training reached its end, so that its last checkpoint is final."""
        return self.status in ("finished", "stopped_early")


def write_ending(model_dir: str | os.PathLike[str], status: str, global_step: int, generation: int) -> None:
    """Write to model_dir that training has ended. The chief calls it, or its supervisor if the chief cannot."""
    ending = TrainingStatus(status, global_step, generation, time.time())
    write_json(Path(model_dir) / FILE, dataclasses.asdict(ending))


def read_ending(model_dir: str | os.PathLike[str]) -> TrainingStatus:
    """Return how training in `model_dir` has ended, or that it continues."""
    return read_dataclass(TrainingStatus, Path(model_dir) / FILE)


def remove_ending(model_dir: str | os.PathLike[str]) -> None:
    """Remove that file, because training begins or continues."""
    remove(Path(model_dir) / FILE)


def generation_in(env: Mapping[str, str]) -> int:
    """Return the number of the run's start to which a task with the environment `env` belongs; 0: not counted."""
    return int(env.get(GENERATION) or 0)
