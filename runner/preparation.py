"""A run of training before its first step: traced, restored, at its place in the input. Nothing is written yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from runner.hook_overrides import TrainingOverrides
from runner.inputs import Feed
from runner.model import Model
from runner.position import Position
from runner.run_config import RunConfig
from runner.session_hooks import SessionHooks
from runner.steps import TrainProgram


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What a run of training begins with.

    Attributes:
      iterator: over the training input.
      position: where it stands there.
      latest: path of the checkpoint that the run goes on from; None: a new model.
      config: the Estimator's, with what TensorFlow's own hooks ask for.
      hooks, session_hooks: native ones, and those of v1.
      overrides: what else TensorFlow's own hooks ask for.
    """

    model: Model
    program: TrainProgram
    feed: Feed
    iterator: Any
    position: Position
    latest: str | None
    config: RunConfig
    hooks: Sequence[Any]
    session_hooks: SessionHooks
    overrides: TrainingOverrides

    def target(self, steps: int | None = None, max_steps: int | None = None) -> float:
        """The global step at which training ends; infinite: with its input."""
        return self.overrides.target(self.model.store.global_step, steps, max_steps)
