"""training_ended.json: how training has ended, for the processes that outlive it; in model_dir from its end on."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path

from runner.system.files import read_dataclass, write_json

FILE = "training_ended.json"

GENERATION = "RUNNER_GENERATION"
"""The environment variable that tells a task which start of the run it belongs to."""

RUNNING = "running"


@dataclasses.dataclass(frozen=True)
class TrainingStatus:
    """How training has ended.

    Attributes:
      status: running, finished, stopped_early, failed or interrupted (it can go on later).
      global_step: of the last checkpoint.
      generation: which start of the run ended so; 0: nobody counts them.
      time: when, in seconds since 1970.
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
        """Report whether training came to an end of its own: its last checkpoint is what the run was for."""
        return self.status in ("finished", "stopped_early")


def write_ending(model_dir: str | os.PathLike[str], status: str, global_step: int, generation: int) -> None:
    """Note that training is over; the chief does, or its supervisor where the chief no longer could."""
    ending = TrainingStatus(status, global_step, generation, time.time())
    write_json(Path(model_dir) / FILE, dataclasses.asdict(ending))


def read_ending(model_dir: str | os.PathLike[str]) -> TrainingStatus:
    """Return how training in `model_dir` has ended, or that it continues."""
    return read_dataclass(TrainingStatus, Path(model_dir) / FILE)


def remove_ending(model_dir: str | os.PathLike[str]) -> None:
    """Note that training begins, or goes on."""
    (Path(model_dir) / FILE).unlink(missing_ok=True)


def generation_in(env: Mapping[str, str]) -> int:
    """Return which start of the run a task with the environment `env` belongs to; 0: nobody counts them."""
    return int(env.get(GENERATION) or 0)
