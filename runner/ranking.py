"""Which of two values of a metric is the better one."""

from __future__ import annotations

LARGER_IS_BETTER = ("accuracy", "auc", "precision", "recall", "f1", "r2", "iou", "map", "bleu", "rouge", "score")


def mode_of(metric: str, mode: str | None = None) -> str:
    """min or max: `mode`, and where that is None what the metric's name says."""
    name = metric.rpartition("/")[2].lower()
    return mode or ("max" if any(word in name for word in LARGER_IS_BETTER) else "min")
