"""tf.estimator's train_and_evaluate and its specs, with their defaults and return values."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from runner.estimator import estimator as engine
from runner.estimator import train_and_evaluate as training
from runner.export.exporters import Exporter
from runner.hooks.builtin_hooks import checked
from runner.tf_private.tf_estimator import eagerly


class TrainSpec(collections.namedtuple("TrainSpec", "input_fn max_steps hooks saving_listeners")):
    """The input, length and hooks of training.

    Attributes:
      input_fn: returns a tf.data.Dataset of (features, labels), or tensors.
      max_steps: train until this global step; None: until the input ends.
      hooks: `tf.estimator.SessionRunHook`s or `runner.Hook`s; None: none.
      saving_listeners: `tf.estimator.CheckpointSaverListener`s; None: none.

    Raises:
      ValueError: max_steps is not positive.
      TypeError: a hook or listener has another type.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        max_steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> TrainSpec:
        hooks = _checked("TrainSpec", input_fn, hooks)
        training.TrainSpec(input_fn, max_steps)  # which checks the number
        return super().__new__(cls, input_fn, max_steps, hooks, tuple(checked("listener", saving_listeners)))


class EvalSpec(
    collections.namedtuple("EvalSpec", "input_fn steps name hooks exporters start_delay_secs throttle_secs")
):
    """The input, length and hooks of an evaluation, with the defaults of tf.estimator.

    Attributes:
      input_fn: as in TrainSpec.
      steps: number of batches to evaluate; None: all.
      name: distinguishes several evaluations: events go to the folder `eval_<name>`. None: to `eval`.
      hooks: as in TrainSpec.
      exporters: one exporter or several, called after each evaluation; None: none.
      start_delay_secs: how many seconds an evaluator process waits before its first evaluation. A process that trains
        evaluates its first checkpoint without this delay.
      throttle_secs: minimum number of seconds between the starts of two evaluations. The last checkpoint is always
        evaluated.

    Raises:
      ValueError: a number is not allowed, or two exporters have the same name.
      TypeError: a name, hook or exporter has another type.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        steps: int | None = 100,
        name: str | None = None,
        hooks: Sequence[Any] | None = None,
        exporters: Any = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        hooks = _checked("EvalSpec", input_fn, hooks)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"EvalSpec(name={name!r}): it must be a str.")
        as_list: Any = ()
        if exporters is not None:
            as_list = exporters if isinstance(exporters, list | tuple | set) else [exporters]
        for exporter in as_list:
            if not isinstance(exporter, Exporter):
                raise TypeError(f"EvalSpec(exporters=...): {exporter!r} is not a tf.estimator.Exporter.")
        checked_spec = training.EvalSpec(
            input_fn, steps, name, (), start_delay_secs, throttle_secs, exporters=exporters
        )
        return super().__new__(
            cls, input_fn, steps, name, hooks, checked_spec.exporters, start_delay_secs, throttle_secs
        )


@eagerly()
def train_and_evaluate(
    estimator: engine.Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[Any, list[Any]]:
    """Train and evaluate. In a cluster, do what the task of this process in TF_CONFIG requires.

    Checkpoints are evaluated as they are saved, and the last one in any case: by the process that trains, or only by
    the evaluator if `cluster` in TF_CONFIG lists one. The evaluator process ends when training has ended. If training
    was finished before the call, the last checkpoint is evaluated.

    Returns:
      (metrics, results): the metrics of the last evaluation, or None if another process evaluated; and the list of the
      exporters' last results.

    Raises:
      TypeError: an argument has another type.
    """
    for value, kind in ((estimator, engine.Estimator), (train_spec, TrainSpec), (eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            raise TypeError(f"train_and_evaluate: {value!r} is not of type {kind.__name__}.")
    # Check the specs again: `_replace` of a NamedTuple does not call __new__.
    train_spec = TrainSpec(*train_spec)
    eval_spec = EvalSpec(*eval_spec)
    exporters = [_Recorded(exporter) for exporter in eval_spec.exporters]
    # Only an evaluator process waits.
    start_delay_secs = eval_spec.start_delay_secs if estimator.config.place.is_evaluator else 0
    recorded_spec = eval_spec._replace(exporters=exporters, start_delay_secs=start_delay_secs)
    result = training.train_and_evaluate(
        estimator, training.TrainSpec(**train_spec._asdict()), training.EvalSpec(**recorded_spec._asdict())
    )
    metrics = result.metrics.get(eval_spec.name or "")
    last_exports = [exporter.last for exporter in exporters]
    return None if metrics is None else dict(metrics), last_exports


class _Recorded(Exporter):
    """An exporter that calls another one and remembers its last result."""

    name = ""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.last = None
        self.name = exporter.name

    def export(self, *args: Any, **kwargs: Any) -> Any:
        self.last = self._exporter.export(*args, **kwargs)
        return self.last


def _checked(what: str, input_fn: Any, hooks: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return the hooks of a spec as a tuple. Check those types for which tf.estimator raised TypeError."""
    if not callable(getattr(input_fn, "fn", input_fn)):
        raise TypeError(f"{what}(input_fn={input_fn!r}): it must be callable.")
    return tuple(checked("hook", hooks))
