"""Names of metrics in journal, MLflow and config keys (`eval_<name>/loss`), and which value is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from runner.config.error_messages import did_you_mean

CHECKPOINT_METRICS = ".metrics.json"
"""Suffix of the file with a checkpoint's metrics, beside the checkpoint."""

LARGER_IS_BETTER = ("accuracy", "auc", "precision", "recall", "f1", "r2", "iou", "map", "bleu", "rouge", "score")


def evaluation_prefix(name: str | None) -> str:
    """Return the part before the slash in metrics of the evaluation `name`; None or '': the only evaluation."""
    return f"eval_{name}" if name else "eval"


def evaluation_of(metric: str) -> str:
    """Return the name of the evaluation to which `metric` belongs; '': the only one."""
    return metric.partition("/")[0].removeprefix("eval").removeprefix("_")


def is_of_evaluation(metric: str) -> bool:
    """Report whether `metric` belongs to an evaluation, not to training."""
    return metric.startswith(("eval/", "eval_"))


def unknown_metric(key: str, metric: str, names: Iterable[str]) -> str:
    """Return the message for a metric at the config key `key` that is not one of `names`."""
    there = sorted(names)
    return f"{key}={metric}: there is no such metric.{did_you_mean(metric, there)} There are: {', '.join(there)}."


def rank_by(values: Mapping[str, float], metric: str, mode: str | None = None) -> list[str]:
    """Return the names in `values`, best first; equal ones in the given order. Values that are not numbers are left
    out.

    Args:
      values: name -> value of the metric, a float.
    """
    sign = 1 if mode_of(metric, mode) == "min" else -1
    return sorted((name for name in values if not math.isnan(values[name])), key=lambda name: sign * values[name])


def mode_of(metric: str, mode: str | None = None) -> str:
    """Return min or max: `mode`, or if that is None, decided by the metric's name."""
    name = metric.rpartition("/")[2].lower()
    return mode or ("max" if any(word in name for word in LARGER_IS_BETTER) else "min")
