"""What all parts of an Estimator share: its settings, whom they report to, and the workers that train together."""

from __future__ import annotations

import dataclasses
from typing import Any

from runner.distribute.collectives import Collectives
from runner.model_fn import ModelFn
from runner.run_config import RunConfig
from runner.system.console import NullProgress, Progress
from runner.tracking.journal import Journal, NullJournal


@dataclasses.dataclass(frozen=True)
class EstimatorContext:
    """The settings of an Estimator and its surroundings.

    Attributes:
      config: the Estimator's; `TrainSetup.config` also has what TensorFlow's own hooks ask for.
      params: for model_fn, and for input functions that bring none of their own.
      journal: told of every event, for the supervisor.
      progress: what a person watches.
      collectives: of the workers that train together.
    """

    config: RunConfig
    params: Any
    model_fn: ModelFn
    journal: Journal | NullJournal
    progress: Progress | NullProgress
    collectives: Collectives

    @property
    def model_dir(self) -> str:
        assert self.config.model_dir is not None
        return self.config.model_dir

    @property
    def is_chief(self) -> bool:
        """Report whether this process runs the chief's hooks and writes its summaries and events."""
        return self.collectives.is_chief and self.config.is_chief
