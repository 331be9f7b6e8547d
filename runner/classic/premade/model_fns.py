"""The model functions of the premade estimators: a linear model, a network, both together, and neither."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic.heads.base import Head, HeadOfOne
from runner.classic.optimizers import minimize, optimizer_of, v1_optimizer_of
from runner.classic.premade import layers
from runner.classic.premade.logits import Deep, Wide, deep_logits, linear_logits, summarise
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.tf_private.optimizers import with_slots_in

v1 = tf.compat.v1

ModelFn = Callable[..., EstimatorSpec]


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of tf.estimator and tf.compat.v1.estimator: defaults, and names in checkpoints and events.

    Attributes:
      optimizer_of: makes an optimizer of what was given, and of a learning rate for one given by name.
      dnn_rate: that learning rate for a network alone; None: Keras's own.
      slot_folders: scope of a model -> where its optimizer's state is, below each variable.
      has_name_scopes: whether names of summaries, of losses, and of what an optimizer keeps besides slots, begin with
        the scope.
    """

    optimizer_of: Callable[..., Any]
    dnn_rate: float | None
    slot_folders: Mapping[str, str]
    has_name_scopes: bool

    def name_scope(self, scope: str) -> contextlib.AbstractContextManager[Any]:
        return v1.name_scope(scope) if self.has_name_scopes else contextlib.nullcontext()

    def update(
        self, optimizer: Any, rate: float | None, loss: tf.Tensor, variables: Sequence[Any], *, scope: str, counts: bool
    ) -> Any:
        """Build the operation of one update. Args: scope: of the model, "" where it has several parts."""
        made = self.optimizer_of(optimizer, rate)
        if not self.has_name_scopes:
            return minimize(made, loss, variables, counts=counts)
        if scope in self.slot_folders:
            made = with_slots_in(made, self.slot_folders[scope])
        with _in_head(scope):
            return minimize(made, loss, variables, counts=counts)

    def name_losses(
        self, head: Head, loss: tf.Tensor, labels: Any, logits: tf.Tensor, features: Any, scope: str
    ) -> None:
        """Give the losses of a step of training the names by which hooks ask tf.compat.v1.estimator for them."""
        if self.has_name_scopes and isinstance(head, HeadOfOne):
            average = head.average_loss(labels, logits, features)
            with _in_head(scope):
                tf.identity(loss, "weighted_loss/Sum")
                tf.identity(average, "truediv")


def _in_head(scope: str) -> contextlib.AbstractContextManager[Any]:
    return v1.name_scope(f"{scope}/head/" if scope else "head/")  # absolute, as it ends with a slash


# The documentation of tf.estimator said 0.05 for networks. Version 2 took what Keras has for the name: 0.001.
V2 = Family(optimizer_of, dnn_rate=None, slot_folders={}, has_name_scopes=False)
# The folders are what was left of `part_0` where 2.15 cut off the name of the variable, and forgot its scope.
V1 = Family(v1_optimizer_of, dnn_rate=0.05, slot_folders={"dnn": "t_0", "linear": "part_0"}, has_name_scopes=True)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Logits, and how what makes them is trained."""

    logits: tf.Tensor
    variables: Sequence[Any]
    optimizer: Any
    rate: float | None


def dnn_model_fn(head: Head, deep: Deep, optimizer: Any, family: Family) -> ModelFn:
    """Return the model_fn of DNNClassifier and the like."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layers.forget_shared_embeddings(deep.feature_columns)
        with family.name_scope("dnn"), _trained() as variables:
            logits = deep_logits(features, mode, head.logits_dimension, deep, scope="dnn/")
        part = _Part(logits, variables, optimizer, family.dnn_rate)
        return _spec(features, labels, mode, head, family, [part], "dnn")

    return model_fn


def linear_model_fn(head: Head, wide: Wide, optimizer: Any, family: Family) -> ModelFn:
    """Return the model_fn of LinearClassifier and the like."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layers.forget_shared_embeddings(wide.feature_columns)
        with family.name_scope("linear"), _trained() as variables:
            logits = linear_logits(features, head.logits_dimension, wide, scope="linear/")
        rate = 0.2 if optimizer else _rate_of_columns(0.2, wide.feature_columns)
        part = _Part(logits, variables, optimizer or "Ftrl", rate)
        return _spec(features, labels, mode, head, family, [part], "linear")

    return model_fn


def combined_model_fn(
    head: Head, wide: Wide, linear_optimizer: Any, deep: Deep, dnn_optimizer: Any, family: Family
) -> ModelFn:
    """Return the model_fn of DNNLinearCombinedClassifier and the like; a part without columns is left out.

    Raises: ValueError: neither has columns; the network has no layers.
    """
    if not wide.feature_columns and not deep.feature_columns:
        raise ValueError("give linear_feature_columns, dnn_feature_columns or both: there is nothing to predict from.")
    if deep.feature_columns and not deep.hidden_units:
        raise ValueError("dnn_hidden_units is empty: with dnn_feature_columns, give the sizes of the hidden layers.")

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layers.forget_shared_embeddings(wide.feature_columns, deep.feature_columns)
        parts = []
        if deep.feature_columns:
            with family.name_scope("dnn"), _trained() as variables:
                logits = deep_logits(features, mode, head.logits_dimension, deep, scope="dnn/")
            parts.append(_Part(logits, variables, dnn_optimizer, 0.001))
        if wide.feature_columns:
            with family.name_scope("linear"), _trained() as variables:
                logits = linear_logits(features, head.logits_dimension, wide, scope="linear/")
            with family.name_scope("linear/"):
                summarise(logits, "linear")
            rate = _rate_of_columns(0.005, wide.feature_columns)
            parts.append(_Part(logits, variables, linear_optimizer, rate))
        return _spec(features, labels, mode, head, family, parts, "")

    return model_fn


def baseline_model_fn(head: Head, optimizer: Any, family: Family) -> ModelFn:
    """Return the model_fn of BaselineClassifier and the like: logits that do not depend on the features."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        units = head.logits_dimension
        bias = layers.variable("baseline/bias", [units], v1.zeros_initializer())
        part = _Part(bias * tf.ones([_batch_size(features), units]), [bias], optimizer, 0.3)
        return _spec(features, labels, mode, head, family, [part], "")

    return model_fn


def _spec(
    features: Any, labels: Any, mode: str, head: Head, family: Family, parts: Sequence[_Part], scope: str
) -> EstimatorSpec:
    def train_op_fn(loss: tf.Tensor) -> Any:
        """The first part counts the steps."""
        updates = [
            family.update(part.optimizer, part.rate, loss, part.variables, scope=scope, counts=number == 0)
            for number, part in enumerate(parts)
        ]
        return tf.group(*updates)

    logits = tf.add_n([part.logits for part in parts])
    updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    spec = head.create_estimator_spec(features, mode, logits, labels, train_op_fn=train_op_fn, update_ops=updates)
    if mode == ModeKeys.TRAIN:
        family.name_losses(head, spec.loss, labels, logits, features, scope)
    return spec


@contextlib.contextmanager
def _trained() -> Any:
    """Yield a list; at the end of the block it holds the trainable variables that the block asked for."""
    before = {id(one) for one in v1.trainable_variables()}
    found: list[Any] = []
    yield found
    found += [one for one in v1.trainable_variables() if id(one) not in before]


def _rate_of_columns(rate: float, columns: Any) -> float:
    return min(rate, 1.0 / math.sqrt(len(layers.sorted_columns(columns))))


def _batch_size(features: Any) -> tf.Tensor:
    feature = next(iter(features.values())) if isinstance(features, Mapping) else features
    return tf.shape(feature, out_type=tf.int32)[0]
