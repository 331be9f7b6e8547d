"""Hooks that stop training early because of evaluation results, which they read from the event files in `eval_dir`.

Unlike those of tf.estimator, they work under every strategy, store nothing in checkpoints, and read a damaged event
file up to the damage.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from runner.estimator.estimator import Estimator
from runner.hooks.hook import Every, Hook, Run
from runner.types import StepResult

_log = logging.getLogger(__name__)
_REASON = "an early stopping hook requested it"


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> Hook:
    """Return a hook that ends training when `should_stop_fn()` returns True. With several workers only the chief calls
    it.

    Args:
      estimator: the Estimator that trains.
      should_stop_fn: called without arguments, returns a bool. It is also called before the first step, so that a
        stopped run does not continue when it is started again.
      run_every_secs: call should_stop_fn every N seconds; None: by steps.
      run_every_steps: call should_stop_fn every N global steps; None: by seconds.

    Raises:
      TypeError: estimator is not an Estimator, or should_stop_fn is not callable.
      ValueError: both or neither of run_every_secs and run_every_steps are given.
    """
    if not isinstance(estimator, Estimator):
        raise TypeError(f"make_early_stopping_hook(estimator={estimator!r}): it must be an Estimator.")
    if not callable(should_stop_fn):
        raise TypeError(f"make_early_stopping_hook(should_stop_fn={should_stop_fn!r}): it must be callable.")
    if (run_every_secs is None) == (run_every_steps is None):
        raise ValueError(
            f"make_early_stopping_hook(run_every_secs={run_every_secs}, run_every_steps={run_every_steps}): give "
            "exactly one of them; None turns the other off."
        )
    return _StopWhen(should_stop_fn, Every(run_every_steps, run_every_secs), is_chief=estimator.config.is_chief)


def stop_if_higher_hook(
    estimator: Estimator, metric_name: str, threshold: float, eval_dir: str | None = None, min_steps: int = 0,
    run_every_secs: float | None = 60, run_every_steps: int | None = None,
) -> Hook:  # fmt: skip
    """Return a hook that ends training when an evaluation at global step `min_steps` or later finds a metric above
    `threshold`.

    Args:
      estimator: the Estimator that trains.
      metric_name: tag of the metric in the event files.
      threshold: stop if the metric is above this value.
      eval_dir: folder of the evaluation's event files; None: that of the evaluation without a name.
      min_steps: ignore evaluations at earlier global steps.
      run_every_secs: how often to read the event files, as in `make_early_stopping_hook`.
      run_every_steps: likewise.
    """
    find_reason = functools.partial(_first_value_beyond, threshold, operator.gt, "above")
    return _hook_on_metric(estimator, metric_name, find_reason, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_lower_hook(
    estimator: Estimator, metric_name: str, threshold: float, eval_dir: str | None = None, min_steps: int = 0,
    run_every_secs: float | None = 60, run_every_steps: int | None = None,
) -> Hook:  # fmt: skip
    """Like `stop_if_higher_hook`, but stops if the metric is below `threshold`."""
    find_reason = functools.partial(_first_value_beyond, threshold, operator.lt, "below")
    return _hook_on_metric(estimator, metric_name, find_reason, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_no_increase_hook(
    estimator: Estimator, metric_name: str, max_steps_without_increase: int, eval_dir: str | None = None,
    min_steps: int = 0, run_every_secs: float | None = 60, run_every_steps: int | None = None,
) -> Hook:  # fmt: skip
    """Return a hook that ends training when a metric has not exceeded its largest value for at least
    `max_steps_without_increase` global steps. Other arguments are as in `stop_if_higher_hook`.
    """
    find_reason = functools.partial(_old_best_value, max_steps_without_increase, operator.gt)
    return _hook_on_metric(estimator, metric_name, find_reason, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_no_decrease_hook(
    estimator: Estimator, metric_name: str, max_steps_without_decrease: int, eval_dir: str | None = None,
    min_steps: int = 0, run_every_secs: float | None = 60, run_every_steps: int | None = None,
) -> Hook:  # fmt: skip
    """Return a hook that ends training when a metric has not fallen below its smallest value for at least
    `max_steps_without_decrease` global steps. Other arguments are as in `stop_if_higher_hook`.
    """
    find_reason = functools.partial(_old_best_value, max_steps_without_decrease, operator.lt)
    return _hook_on_metric(estimator, metric_name, find_reason, eval_dir, min_steps, run_every_secs, run_every_steps)


def read_eval_metrics(eval_dir: str) -> Mapping[int, Mapping[str, float]]:
    """Return global step -> tag -> value of the scalar metrics in all event files in `eval_dir`, in order of steps."""
    found: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for path in sorted(tf.io.gfile.glob(os.path.join(eval_dir, "*.tfevents.*"))):
        for event in _events(path):
            for value in event.summary.value:
                scalar = _scalar(value)
                if scalar is not None:
                    found[event.step][value.tag] = scalar
    return {step: found[step] for step in sorted(found) if found[step]}


class _StopWhen(Hook, tf.compat.v1.train.SessionRunHook):
    """Calls `should_stop_fn` and, if it returns True, requests the stop of training.

    It is a native hook, which allows loops of many steps, and in a MonitoredSession of TensorFlow a SessionRunHook.
    """

    def __init__(self, should_stop_fn: Callable[[], bool], every: Every, *, is_chief: bool) -> None:
        self.every = Every(steps=every.steps)  # loops end at these steps; seconds are only checked between loops
        self._should_stop_fn = should_stop_fn
        self._check_cadence = every
        self._is_chief = is_chief
        self._last_check = time.monotonic()
        self._calls = 0

    def begin(self, run: Run | None = None) -> None:
        self._calls = 0
        # In a MonitoredSession there is no run; `after_run` then checks after the first step.
        if run is not None and self._should_stop():
            run.request_stop(_REASON)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._is_due(result.first_step - 1, result.last_step) and self._should_stop():
            run.request_stop(_REASON)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._calls += 1
        is_due = self._calls == 1 or self._is_due(self._calls - 1, self._calls)
        if is_due and self._should_stop():
            run_context.request_stop()

    def _is_due(self, before: int, after: int) -> bool:
        return self._check_cadence.due(before, after, time.monotonic() - self._last_check)

    def _should_stop(self) -> bool:
        """Call `should_stop_fn` on the chief, and note the time of this check."""
        self._last_check = time.monotonic()
        return self._is_chief and bool(self._should_stop_fn())


def _hook_on_metric(
    estimator: Estimator, metric: str, find_reason: Callable[[Mapping[int, float]], str], eval_dir: str | None,
    min_steps: int, run_every_secs: float | None, run_every_steps: int | None,
) -> Hook:  # fmt: skip
    """Return a hook that ends training when `find_reason` returns a reason, which it logs.

    Args:
      estimator: the Estimator that trains.
      metric: tag of the metric in the event files.
      find_reason: called with global step -> value of the metric; returns the reason to stop, or "".
      eval_dir: as in `stop_if_higher_hook`.
      min_steps: as in `stop_if_higher_hook`.
      run_every_secs: as in `make_early_stopping_hook`.
      run_every_steps: as in `make_early_stopping_hook`.
    """
    eval_dir = eval_dir or estimator.eval_dir()

    def should_stop() -> bool:
        metrics_of_steps = read_eval_metrics(eval_dir)
        tags = sorted(set().union(*metrics_of_steps.values()))
        if tags and metric not in tags:
            raise KeyError(
                f"an early stopping hook reads the metric {metric!r}, but the evaluations in {eval_dir} only have: "
                f"{', '.join(tags)}. Change metric_name."
            )
        values = {
            step: metrics[metric]
            for step, metrics in metrics_of_steps.items()
            if step >= min_steps and metric in metrics
        }
        reason = find_reason(values)
        if reason:
            _log.info("Training stops early: %s is %s.", metric, reason)
        return bool(reason)

    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def _first_value_beyond(
    threshold: float, is_beyond: Callable[[float, float], bool], word: str, values: Mapping[int, float]
) -> str:
    """Return a text about the first of `values`, global step -> value, that is beyond `threshold`; "": none is."""
    for step, value in values.items():
        if is_beyond(value, threshold):
            return f"{value:g} at step {step}, {word} {threshold:g}"
    return ""


def _old_best_value(max_steps: int, is_better: Callable[[float, float], bool], values: Mapping[int, float]) -> str:
    """Return a text about the best of `values`, global step -> value, if none was better for `max_steps`; else ""."""
    best: tuple[int, float] | None = None
    for step, value in values.items():
        if best is None or is_better(value, best[1]):
            best = step, value
        elif step - best[0] >= max_steps:
            return f"not better than {best[1]:g} at step {best[0]}"
    return ""


def _events(path: str) -> Any:
    """Yield the events of a file. If the file is damaged, or another process is still writing it, yield those before
    the damage.
    """
    try:
        yield from tf.compat.v1.train.summary_iterator(path)
    except tf.errors.DataLossError as error:
        _log.warning("%s is damaged: only the events before the damage were read (%s).", path, error.message)


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor"):
        tensor = tf.make_ndarray(value.tensor)
        if tensor.ndim == 0 and tensor.dtype.kind in "fiu":
            return float(tensor)
    return None
