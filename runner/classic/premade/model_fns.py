"""The model functions of the premade estimators: linear, network, both, and baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.classic.estimator_spec import EstimatorSpec
from runner.classic.heads.base import Head, HeadOfOne
from runner.classic.optimizers import minimize, optimizer_of, show_global_step, v1_optimizer_of
from runner.classic.premade import layers
from runner.classic.premade.logits import Baseline, Deep, Wide, summarise
from runner.classic.premade.signatures import V1_SIGNATURES, V2_SIGNATURES, Signatures
from runner.model_fn import ModeKeys

v1 = tf.compat.v1

ModelFn = Callable[..., EstimatorSpec]


@dataclasses.dataclass(frozen=True)
class Family:
    """Settings in which tf.estimator and tf.compat.v1.estimator differ: defaults, and names in checkpoints and events.

    Attributes:
      signatures: class name -> signature of its constructor.
      optimizer_of: makes an optimizer from (the user's argument, learning rate for an optimizer given by name).
      dnn_rate: learning rate of a DNN estimator's optimizer that is given by name; None: Keras's default.
      has_scopes: names of summaries, losses and optimizer variables begin with the scope of a model ("dnn", "linear"),
        and variables are divided into parts, often only one.
    """

    signatures: Signatures
    optimizer_of: Callable[..., Any]
    dnn_rate: float | None
    has_scopes: bool

    @contextlib.contextmanager
    def scope(self, name: str, num_servers: int = 0) -> Iterator[None]:
        """Enter the scope in which a part of a model makes its logits; large variables are divided over the servers."""
        if not self.has_scopes or not name:
            yield
            return
        partitioner = v1.min_max_variable_partitioner(max_partitions=max(1, num_servers), min_slice_size=64 << 20)
        with layers.divided_by(partitioner), v1.name_scope(name):
            yield

    def update(
        self,
        optimizer: Any,
        rate: float | None,
        loss: tf.Tensor,
        variables: Sequence[Any] | None,
        *,
        scope: str,
        advances_global_step: bool,
    ) -> Any:
        """Build the operation that updates the variables of one part of a model, and return it.

        Args:
          optimizer: the user's argument.
          rate: learning rate of an optimizer given by name; None: Keras's default.
          loss: float scalar.
          variables: those to update; None: all trainable variables.
          scope: "dnn" or "linear" for a model that is only that; "" for others.
          advances_global_step: the update also advances the global step.
        """
        optimizer_object = self.optimizer_of(optimizer, rate)
        if advances_global_step and hasattr(optimizer, "get_updates"):
            show_global_step(optimizer)
        if not self.has_scopes:
            return minimize(optimizer_object, loss, variables, advances_global_step=advances_global_step)
        # The slots of a part are made in the variable scope, too: `dnn/dnn/kernel/part_0/Adam`. TensorFlow cuts their
        # name in checkpoints from the wrong place: `dnn/kernel/t_0/Adam`.
        variable_scope = v1.variable_scope(scope, auxiliary_name_scope=False) if scope else contextlib.nullcontext()
        with variable_scope, _in_head(scope):
            return minimize(optimizer_object, loss, variables, advances_global_step=advances_global_step)

    def name_losses(
        self, head: Head, loss: tf.Tensor, labels: Any, logits: tf.Tensor, features: Any, scope: str
    ) -> None:
        """Add tensors with the losses of a training step to the graph, under their names in tf.compat.v1.estimator,
        which users' hooks fetch. Do nothing for tf.estimator.
        """
        if self.has_scopes and isinstance(head, HeadOfOne):
            average = head.average_loss(labels, logits, features)
            with _in_head(scope):
                tf.identity(loss, "weighted_loss/Sum")
                tf.identity(average, "truediv")


def _in_head(scope: str) -> contextlib.AbstractContextManager[Any]:
    return v1.name_scope(f"{scope}/head/" if scope else "head/")  # a name that ends with a slash is absolute


# tf.estimator's documentation said 0.05 for a DNN's named optimizer, but its code used Keras's default, 0.001.
V2 = Family(V2_SIGNATURES, optimizer_of, dnn_rate=None, has_scopes=False)
V1 = Family(V1_SIGNATURES, v1_optimizer_of, dnn_rate=0.05, has_scopes=True)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a model, and how it is trained.

    Attributes:
      builder: computes the part's logits.
      optimizer: the user's argument.
      rate: learning rate of an optimizer given by name; None: Keras's default.
      has_rate_by_columns: the learning rate is at most 1 / sqrt(number of columns).
    """

    builder: Wide | Deep | Baseline
    optimizer: Any
    rate: float | None
    has_rate_by_columns: bool = False

    def learning_rate(self) -> float | None:
        if self.rate is None or not self.has_rate_by_columns:
            return self.rate
        return min(self.rate, 1.0 / math.sqrt(len(layers.sorted_columns(self.builder.feature_columns))))


def dnn_model_fn(head: Head, deep: Deep, optimizer: Any, family: Family) -> ModelFn:
    """Return the model_fn of DNNEstimator and its subclasses."""
    return _model_fn(head, [_Part(deep, optimizer, family.dnn_rate)], family, "dnn")


def linear_model_fn(head: Head, wide: Wide, optimizer: Any, family: Family) -> ModelFn:
    """Return the model_fn of LinearEstimator and its subclasses."""
    return _model_fn(head, [_Part(wide, optimizer or "Ftrl", 0.2, has_rate_by_columns=not optimizer)], family, "linear")


def combined_model_fn(
    head: Head, wide: Wide, linear_optimizer: Any, deep: Deep, dnn_optimizer: Any, family: Family
) -> ModelFn:
    """Return the model_fn of DNNLinearCombinedEstimator and its subclasses. A part without feature columns is left out.

    Raises:
      ValueError: no part has feature columns, or the network has feature columns but no hidden layers.
    """
    if not wide.feature_columns and not deep.feature_columns:
        raise ValueError("linear_feature_columns and dnn_feature_columns are both empty: give at least one of them.")
    if deep.feature_columns and not deep.hidden_units:
        raise ValueError("dnn_hidden_units is empty: with dnn_feature_columns, give the sizes of the hidden layers.")
    parts = [_Part(deep, dnn_optimizer, 0.001), _Part(wide, linear_optimizer, 0.005, has_rate_by_columns=True)]
    used = [part for part in parts if part.builder.feature_columns]
    return _model_fn(head, used, family, is_combined=True)


def baseline_model_fn(head: Head, optimizer: Any, family: Family) -> ModelFn:
    """Return the model_fn of BaselineEstimator and its subclasses."""
    return _model_fn(head, [_Part(Baseline(), optimizer, 0.3)], family)


def _model_fn(
    head: Head, parts: Sequence[_Part], family: Family, scope: str = "", *, is_combined: bool = False
) -> ModelFn:
    """Return the model_fn that adds the logits of `parts`, and trains each of them with its own optimizer.

    Args:
      head: computes loss, metrics and predictions from the logits.
      parts: at least one.
      family: how tf.estimator or tf.compat.v1.estimator did it.
      scope: as in `Family.update`.
      is_combined: the model is a DNNLinearCombinedEstimator, also if one of its parts has no feature columns.
    """
    # In tf.compat.v1.estimator the one optimizer of a model trained all variables, also those of a loss_fn; in
    # tf.estimator those of the logits. The optimizers of a combined model train the variables of their parts.
    trains_all_variables = family.has_scopes and not is_combined

    def model_fn(features: Any, labels: Any, mode: str, config: Any = None) -> EstimatorSpec:
        layers.forget_shared_embeddings(*(part.builder.feature_columns for part in parts))
        logits_of_parts = []
        trained_parts = []  # of (part, its learning rate, its variables)
        for part in parts:
            name = part.builder.name
            ids_before = {id(variable) for variable in v1.trainable_variables()}
            with family.scope(name, getattr(config, "num_ps_replicas", 0)):
                logits_of_parts.append(part.builder.logits(features, mode, head.logits_dimension, scope=f"{name}/"))
            variables = [variable for variable in v1.trainable_variables() if id(variable) not in ids_before]
            # tf.estimator wrote this summary only for the linear part of a combined model.
            if name == "linear" and not scope:
                with family.scope("linear/"):
                    summarise(logits_of_parts[-1], "linear")
            trained_parts.append((part, part.learning_rate(), variables))

        def train_op_fn(loss: tf.Tensor) -> Any:
            """Return the operation that updates all parts. The update of the first one advances the global step."""
            updates = []
            for index, (part, rate, variables) in enumerate(trained_parts):
                update = family.update(
                    part.optimizer,
                    rate,
                    loss,
                    None if trains_all_variables else variables,
                    scope=scope,
                    advances_global_step=index == 0,
                )
                updates.append(update)
            return tf.group(*updates)

        logits = tf.add_n(logits_of_parts)
        arguments = {"features": features, "mode": mode, "logits": logits, "labels": labels, "train_op_fn": train_op_fn}
        # A head that was written for tf.compat.v1.estimator runs them by itself, and has no such argument.
        is_foreign_v1_head = family.has_scopes and not isinstance(head, Head)
        if not is_foreign_v1_head:
            arguments["update_ops"] = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        spec = head.create_estimator_spec(**arguments)
        if mode == ModeKeys.TRAIN:
            family.name_losses(head, spec.loss, labels, logits, features, scope)
        return spec

    return model_fn
