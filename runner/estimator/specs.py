"""Arguments and result of `train_and_evaluate`: TrainSpec, EvalSpec, TrainingResult."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.config.settings.metric_rules import EarlyStopping, ReduceLROnPlateau
from runner.data.inputs import Input
from runner.export.exporters import Exporter, checked_exporters
from runner.hooks.keras_callbacks import check_no_callbacks

InputFn = Callable[..., Any] | Input


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of a run.

    Attributes:
      input_fn: a function or an `Input`.
      max_steps: train until this global step; None: until the input ends.
      hooks: native and session hooks, and callbacks of Keras that read.
      saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.
      early_stopping: the rule by which `train_and_evaluate` ends training early.
      max_epochs: train for this many passes over the input, or until `max_steps` if that comes first; None: no limit.
      reduce_lr_on_plateau: the rule by which `train_and_evaluate` reduces the learning rate.

    Raises:
      ValueError: max_steps or max_epochs is not positive.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: Sequence[Any] = ()
    saving_listeners: Sequence[Any] = ()
    early_stopping: EarlyStopping = EarlyStopping()
    max_epochs: int | None = None
    reduce_lr_on_plateau: ReduceLROnPlateau = ReduceLROnPlateau()

    def __post_init__(self) -> None:
        check_positive("TrainSpec({})", max_steps=self.max_steps, max_epochs=self.max_epochs)
        _check_input_fn("TrainSpec", self.input_fn)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """One evaluation of a run.

    Attributes:
      input_fn: a function or an `Input`.
      steps: number of batches to evaluate; None: all. (tf.estimator's default was 100 batches.)
      name: distinguishes several evaluations; its events go to `eval_<name>`.
      hooks: native and session hooks.
      start_delay_secs: seconds of training before the first evaluation; `at_start` does not wait.
      throttle_secs: least number of seconds between the starts of two evaluations. The last checkpoint is evaluated in
        any case.
      at_start: also evaluate before the first step: the new model, or the checkpoint that the run resumes from.
      exporters: an exporter or several. They are called after each evaluation, except the one of `at_start`, and at the
        end of training.

    Raises:
      ValueError: steps is not positive, a number of seconds is negative, an exporter is not an Exporter, or two
        exporters have the same name.
    """

    input_fn: InputFn
    steps: int | None = None
    name: str | None = None
    hooks: Sequence[Any] = ()
    start_delay_secs: float = 0
    throttle_secs: float = 0
    at_start: bool = False
    exporters: Sequence[Exporter] = ()

    @property
    def key(self) -> str:
        """The name under which results are kept; "" if there is none."""
        return self.name or ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exporters", checked_exporters("EvalSpec", self.exporters))
        check_positive("EvalSpec({})", steps=self.steps)
        _check_input_fn("EvalSpec", self.input_fn)
        check_no_callbacks(self.hooks)
        for key in ("start_delay_secs", "throttle_secs"):
            if getattr(self, key) < 0:
                raise ValueError(f"EvalSpec({key}={getattr(self, key)}): must not be negative.")


class Metrics(dict[str, Any]):
    """The metrics of a run's evaluations: name of the evaluation ("" if it has none) -> its metrics.

    If there is only one evaluation, its metrics are also found by their own names: `metrics["accuracy"]`.

    Raises:
      KeyError: there is no evaluation of that name, nor a metric of the only evaluation.
    """

    def __missing__(self, name: str) -> Any:
        only: Mapping[str, Any] = {}
        if len(self) == 1:
            (only,) = self.values()
        if name not in only:
            there = ", ".join(map(repr, [*self, *only])) or "none"
            raise KeyError(f"no evaluation or metric {name!r}; there are: {there}")
        return only[name]


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The outcome of a run in this process.

    Attributes:
      metrics: name of the evaluation ("" if it has none) -> its metrics at the last checkpoint, or the newest metrics
        if the run was interrupted. Empty if an evaluator process evaluates. If there is only one evaluation, its
        metrics are also found by their own names: `metrics["accuracy"]`.
      global_step: step of the last checkpoint.
      examples: number of examples that this call trained on; 0 if there was nothing left to train.
      steps_per_sec: training speed of this call, without evaluations and the first loop of steps, which traces the
        graph; 0 if no step was taken.
      checkpoint: path of the last checkpoint; None: training failed before the evaluator saw a checkpoint.
      stopped_early: the reason why training ended before its last step; None: it did not.
      exports: paths of the SavedModels that this process exported.
      interrupted: training or its last evaluation was asked to stop; the same call resumes it.
      input_bound: the share of step time that was spent waiting for input, from 0 to 1; None: training was too short to
        measure it, or another process measured it.
    """

    metrics: Mapping[str, Any]
    global_step: int
    examples: int
    steps_per_sec: float
    checkpoint: str | None
    stopped_early: str | None = None
    exports: Sequence[str] = ()
    interrupted: bool = False
    input_bound: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Metrics(self.metrics))


def check_positive(written: str = "{}", **arguments: int | None) -> None:
    """Check that numbers of steps or epochs are positive.

    Args:
      written: the user's setting, with {} in place of `name=value`, for messages.
      arguments: name -> number; None is allowed.

    Raises:
      ValueError: a number is not positive.
    """
    for name, value in arguments.items():
        if value is not None and value <= 0:
            raise ValueError(f"{written.format(f'{name}={value}')}: must be positive; None means no limit.")


def _check_input_fn(what: str, input_fn: Any) -> None:
    if not callable(getattr(input_fn, "fn", input_fn)):
        raise ValueError(f"{what}(input_fn={input_fn!r}): it must be callable, or an Input.")
