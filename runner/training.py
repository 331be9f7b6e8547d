"""Training with evaluations along the way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from runner import checkpoints
from runner.estimator import Estimator, InputFn
from runner.loop import TrainingRun


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on.

    Attributes:
      input_fn: a function or an `Input`.
      max_steps: train until this global step; None: until the input ends.
      hooks: native and session hooks.
      saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.

    Raises:
      ValueError: max_steps is not positive.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: Sequence[Any] = ()
    saving_listeners: Sequence[Any] = ()

    def __post_init__(self) -> None:
        _check("TrainSpec", self.input_fn, max_steps=self.max_steps)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on.

    Attributes:
      input_fn: a function or an `Input`.
      steps: batches; None: all examples. (tf.estimator's default was 100 batches.)
      name: where there are several evaluations; its events go to `eval_<name>`.
      hooks: native hooks.
      start_delay_secs: no evaluation before so many seconds of training.
      throttle_secs: at least so many seconds between the starts of two evaluations; the last checkpoint is
        evaluated all the same.

    Raises:
      ValueError: steps is not positive, or a number of seconds is negative.
    """

    input_fn: InputFn
    steps: int | None = None
    name: str | None = None
    hooks: Sequence[Any] = ()
    start_delay_secs: float = 0
    throttle_secs: float = 0

    def __post_init__(self) -> None:
        _check("EvalSpec", self.input_fn, steps=self.steps)
        for key in ("start_delay_secs", "throttle_secs"):
            if getattr(self, key) < 0:
                raise ValueError(f"EvalSpec({key}={getattr(self, key)}): it may not be negative.")


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a run came to.

    Attributes:
      metrics: name of the evaluation ("" where it has none) -> its metrics at the last checkpoint.
      global_step: of that checkpoint.
      examples: trained on by this call; 0 when there was nothing left to train.
      steps_per_sec: of this call's training, evaluations not counted.
      checkpoint: path of the last checkpoint.
    """

    metrics: Mapping[str, Mapping[str, Any]]
    global_step: int
    examples: int
    steps_per_sec: float
    checkpoint: str


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]
) -> TrainingResult:
    """Trains, and evaluates each checkpoint as it is saved, the last one always.

    A run that is finished already is evaluated and reported. One that is interrupted ends with its checkpoint.

    Raises:
      ValueError: two evaluations have the same name.
    """
    eval_specs = [eval_spec] if isinstance(eval_spec, EvalSpec) else list(eval_spec)
    names = [spec.name or "" for spec in eval_specs]
    if len(set(names)) < len(names):
        raise ValueError(f"train_and_evaluate: evaluations must differ in name, and there are {names}.")
    evaluations = _Evaluations(estimator, eval_specs)
    run = estimator.train_run(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=train_spec.saving_listeners,
        after_save=[evaluations.after_save],
    )
    checkpoint = estimator.latest_checkpoint()
    assert checkpoint is not None
    step = checkpoints.checkpoint_step(checkpoint)
    if run is None or not run.interrupted:
        evaluations.evaluate_last(step)
    return TrainingResult(
        metrics=evaluations.metrics,
        global_step=step,
        examples=0 if run is None else run.examples,
        steps_per_sec=0.0 if run is None else run.steps_per_sec,
        checkpoint=checkpoint,
    )


class _Evaluations:
    """The evaluations of a run."""

    def __init__(self, estimator: Estimator, specs: Sequence[EvalSpec]) -> None:
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self._estimator, self._specs = estimator, specs
        self._started = time.monotonic()
        self._last_start: dict[str, float] = {}
        self._last_step: dict[str, int] = {}

    def after_save(self, run: TrainingRun) -> None:
        """Evaluates the checkpoint that was just written, where an evaluation is due."""
        for spec in self._specs:
            if self._due(spec):
                self._evaluate(spec, run.global_step)

    def evaluate_last(self, step: int) -> None:
        """Evaluates the checkpoint of `step` where that has not been done."""
        for spec in self._specs:
            if self._last_step.get(spec.name or "") != step:
                self._evaluate(spec, step)

    def _due(self, spec: EvalSpec) -> bool:
        now = time.monotonic()
        since = now - self._last_start.get(spec.name or "", -float("inf"))
        return now - self._started >= spec.start_delay_secs and since >= spec.throttle_secs

    def _evaluate(self, spec: EvalSpec, step: int) -> None:
        name = spec.name or ""
        self._last_start[name], self._last_step[name] = time.monotonic(), step
        try:
            self.metrics[name] = self._estimator.evaluate(
                spec.input_fn, steps=spec.steps, hooks=spec.hooks, name=spec.name
            )
        except Exception as error:
            error.add_note(f"evaluating {name!r} at step {step} from {self._estimator.latest_checkpoint()}")
            raise


def _check(what: str, input_fn: Any, **steps: int | None) -> None:
    for name, value in steps.items():
        if value is not None and value <= 0:
            raise ValueError(f"{what}({name}={value}): it must be positive; None sets no limit.")
    if not callable(getattr(input_fn, "fn", input_fn)):
        raise ValueError(f"{what}(input_fn={input_fn!r}): it must be callable, or an Input.")
