"""What is added to an estimator that is there already."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from runner import estimator as engine
from runner.classic.estimator import Estimator
from runner.model_fn import EstimatorSpec, ModeKeys

_GIVEN = ("features", "labels", "predictions", "config")


def add_metrics(estimator: engine.Estimator, metric_fn: Callable[..., Mapping[str, Any]]) -> Estimator:
    """An estimator like this one, in the same model_dir, whose evaluation has further metrics.

    Args:
      metric_fn: called in EVAL with those of features, labels, predictions and config that it takes; gives name ->
        metric, as `EstimatorSpec.eval_metric_ops`. One of a name that is there replaces it.

    Raises:
      ValueError: metric_fn takes something else.
    """
    takes = list(inspect.signature(metric_fn).parameters)
    unknown = [name for name in takes if name not in _GIVEN]
    if unknown:
        raise ValueError(f"metric_fn takes {', '.join(unknown)}; it may take {', '.join(_GIVEN)}.")
    inner = estimator._model_fn

    def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        spec = inner(features, labels, mode)
        if mode != ModeKeys.EVAL:
            return spec
        available = {"features": features, "labels": labels, "predictions": spec.predictions, "config": config}
        added = metric_fn(**{name: available[name] for name in takes})
        return spec._replace(eval_metric_ops={**(spec.eval_metric_ops or {}), **added})

    return Estimator(model_fn, config=estimator.config, params=estimator.params)
