"""`tf.contrib.estimator`: functions that make heads, optimizers and estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic.estimator import Estimator
from runner.classic.heads.base import Head
from runner.classic.heads.regression import PoissonRegressionHead, RegressionHead
from runner.model_fn import EstimatorSpec
from runner.programs.batch_losses import batch_part
from runner.programs.optimizer_step import global_norm, scaled_down

v1 = tf.compat.v1


def regression_head(weight_column: Any = None, label_dimension: int = 1, *others: Any, **named: Any) -> Head:
    """Return `tf.estimator.RegressionHead`; the order of the first two arguments differs."""
    return RegressionHead(label_dimension, weight_column, *others, **named)


def poisson_regression_head(weight_column: Any = None, label_dimension: int = 1, *others: Any, **named: Any) -> Head:
    """Return `tf.estimator.PoissonRegressionHead`; the order of the first two arguments differs."""
    return PoissonRegressionHead(label_dimension, weight_column, *others, **named)


class _Clipped(v1.train.Optimizer):  # type: ignore[name-defined]
    """Clips the gradients, and leaves updates and slots to another optimizer."""

    def __init__(self, opt: Any, clip_norm: float) -> None:
        super().__init__(False, "ClipByNormOptimizer")
        self._opt = opt
        self._clip_norm = clip_norm
        self.compute_gradients = opt.compute_gradients
        self.variables = opt.variables
        self.get_slot = opt.get_slot
        self.get_slot_names = opt.get_slot_names

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        with_gradient = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        norm = global_norm(batch_part().global_gradients(with_gradient))
        clipped = scaled_down([gradient for gradient, _ in with_gradient], norm, self._clip_norm)
        clipped_pairs = zip(clipped, [variable for _, variable in with_gradient], strict=True)
        return self._opt.apply_gradients(clipped_pairs, global_step, name)


def clip_gradients_by_norm(optimizer: Any, clip_norm: float) -> Any:
    """Return an optimizer like `optimizer` that first clips gradients to the global norm `clip_norm`.

    As in TensorFlow 1.15, contrib/estimator/python/estimator/extenders.py: g * clip_norm / max(clip_norm, norm of all
    gradients together), where the gradients are those of the global batch, whatever the number of replicas.
    """
    return _Clipped(optimizer, clip_norm)


def TowerOptimizer(optimizer_or_optimizer_fn: Any) -> Any:  # a class in tf.contrib
    """Return the optimizer, or the result of the function that makes it. The strategy combines gradients."""
    is_optimizer = isinstance(optimizer_or_optimizer_fn, v1.train.Optimizer)
    return optimizer_or_optimizer_fn if is_optimizer else optimizer_or_optimizer_fn()


def replicate_model_fn(
    model_fn: Callable[..., EstimatorSpec], loss_reduction: str = "", devices: Sequence[str] | None = None
) -> Callable[..., EstimatorSpec]:
    """Return `model_fn` unchanged: RunConfig(train_distribute=tf.distribute.MirroredStrategy()) replicates it."""
    del loss_reduction, devices
    return model_fn


def forward_features(estimator: Estimator, keys: Any = None, sparse_default_values: Any = None) -> Estimator:
    """Return an Estimator like `estimator` whose predictions also contain features of the input.

    Args:
      estimator: the Estimator; its predictions must be a dict.
      keys: name of a feature, or a list of names; None: all features.
      sparse_default_values: fills sparse features when they become dense: name -> value, or one value for all.
    """
    names = [keys] if isinstance(keys, str) else keys
    original_model_fn = estimator._context.model_fn

    def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        given_features = dict(features)  # a copy, because the model_fn may change its dict
        spec = original_model_fn(features, labels, mode)
        predictions = spec.predictions
        if not isinstance(predictions, dict):
            raise ValueError(
                "forward_features: the predictions of the estimator are not a dict. Return a dict from its model_fn."
            )
        added = {name: _dense(name, given_features[name], sparse_default_values) for name in (names or given_features)}
        duplicates = sorted(set(added) & set(predictions))
        if duplicates:
            raise ValueError(f"forward_features: the predictions already have {duplicates}. Leave these out of keys.")
        return spec._replace(predictions={**predictions, **added})

    return Estimator(model_fn, config=estimator.config, params=estimator.params)


def _dense(name: str, feature: Any, defaults: Any) -> Any:
    if not isinstance(feature, tf.sparse.SparseTensor):
        return feature
    default = defaults.get(name) if isinstance(defaults, Mapping) else defaults
    return tf.sparse.to_dense(feature, default_value=default)


def export_all_saved_models(estimator: Estimator, *args: Any, **kwargs: Any) -> bytes:
    """Call `Estimator.experimental_export_all_saved_models`."""
    return estimator.experimental_export_all_saved_models(*args, **kwargs)
