"""Names of metrics in the journal, MLflow and config keys (`eval_<name>/loss`), and which value of a metric is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from runner.system.suggestions import did_you_mean

CHECKPOINT_METRICS = ".metrics.json"
"""Suffix of the file with a checkpoint's metrics; `system.files.find_runner_file` finds it."""

LARGER_IS_BETTER = ("accuracy", "auc", "precision", "recall", "f1", "r2", "iou", "map", "bleu", "rouge", "score")


def evaluation_prefix(name: str | None) -> str:
    """Return the part of a metric's name before the slash: `eval_<name>`; or `eval` if `name` is None or ''."""
    return f"eval_{name}" if name else "eval"


def evaluation_of(metric: str) -> str:
    """Return the name of the evaluation to which `metric` belongs; '' if the run has only one, without a name."""
    return metric.partition("/")[0].removeprefix("eval").removeprefix("_")


def is_of_evaluation(metric: str) -> bool:
    """Report whether `metric` belongs to an evaluation, not to training."""
    return metric.startswith(("eval/", "eval_"))


def unknown_metric(key: str, metric: str, names: Iterable[str]) -> str:
    """Return the message for a metric at the config key `key` that is not one of `names`."""
    there = sorted(names)
    return f"{key}={metric}: there is no such metric.{did_you_mean(metric, there)} There are: {', '.join(there)}."


def metric_name(metrics: Mapping[str, float], chosen: str | None = None) -> str | None:
    """Return the metric that stands for a run with these metrics; None if it has none.

    Args:
      chosen: the metric that the user has named; None: the loss of the evaluation without a name, else of the first.
    """
    if chosen:
        return chosen
    if "eval/loss" in metrics:
        return "eval/loss"
    losses = [name for name in metrics if name.endswith("/loss")]
    return next(iter([*losses, *metrics]), None)


def rank_by(values: Mapping[str, float], metric: str, mode: str | None = None) -> list[str]:
    """Return the names in `values`, best first; equal values keep their order, and NaNs are left out.

    Args:
      values: name -> value of the metric, a float.
      metric: the metric's name.
      mode: "min" or "max", whether the smallest or largest value is best; None: decided by the metric's name.
    """
    sign = 1 if mode_of(metric, mode) == "min" else -1
    comparable = [name for name in values if not math.isnan(values[name])]
    return sorted(comparable, key=lambda name: sign * values[name])


def mode_of(metric: str, mode: str | None = None) -> str:
    """Return "min" or "max", whether the smallest or largest value of `metric` is best; `mode` if that is given."""
    if mode:
        return mode
    name = metric.rpartition("/")[2].lower()
    is_larger_better = any(word in name for word in LARGER_IS_BETTER)
    return "max" if is_larger_better else "min"
