"""Head, which makes an EstimatorSpec from logits and labels, and the code common to its subclasses."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic import summaries
from runner.classic.estimator_spec import EstimatorSpec
from runner.classic.heads import checks
from runner.classic.heads.metrics import Metrics, add, in_pairs, mean
from runner.classic.optimizers import minimize, optimizer_of
from runner.export.outputs import PredictOutput
from runner.model_fn import ModeKeys
from runner.programs.batch_losses import batch_part

v1 = tf.compat.v1

Losses = Sequence[tf.Tensor] | None
"""Regularization losses; None: there are none, and no metric for them."""

DEFAULT_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


class Head(abc.ABC):
    """Computes loss, predictions and metrics from a model's logits, and makes the EstimatorSpec.

    Subclasses implement the abstract members and may override `export_outputs`.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str | None:
        """The suffix of each metric's name, `accuracy/<name>`; None: no suffix."""

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """The size of the last dimension of the logits."""

    @property
    @abc.abstractmethod
    def loss_reduction(self) -> str:
        """How the losses of a batch are reduced to a scalar: a value of tf.keras.losses.Reduction or
        tf.compat.v1.losses.Reduction.
        """

    @abc.abstractmethod
    def loss(
        self,
        labels: Any,
        logits: Any,
        features: Any = None,
        mode: str | None = None,
        regularization_losses: Losses = None,
    ) -> tf.Tensor:
        """Return the loss to minimize, a float scalar that includes `regularization_losses`.

        Args:
          labels: `[batch, ...]`; the docstring of the head's class says which dtype and shape it takes.
          logits: float `[batch, ..., logits_dimension]`.
          features: name -> tensor, for the weight column.
          mode: one of ModeKeys.
          regularization_losses: float scalars.
        """

    @abc.abstractmethod
    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[Any, tf.Tensor]:
        """Return key -> prediction, a tensor `[batch, ...]`.

        Args:
          logits: float `[batch, ..., logits_dimension]`.
          keys: the predictions to return; None: all.
        """

    @abc.abstractmethod
    def metrics(self, regularization_losses: Losses = None) -> dict[str, Any]:
        """Return name -> new Keras metric. With `regularization_losses`, there is a metric for their sum, too."""

    @abc.abstractmethod
    def update_metrics(
        self,
        eval_metrics: dict[str, Any],
        features: Any,
        logits: Any,
        labels: Any,
        mode: str | None = None,
        regularization_losses: Losses = None,
    ) -> dict[str, Any]:
        """Add a batch to `eval_metrics`, the result of `metrics`, and return them. Other arguments are as in `loss`."""

    def loss_weight(self, labels: Any, logits: Any, features: Any) -> Any:
        """Return the weight of a batch's loss in an evaluation's mean over batches, a scalar. None: the weight is the
        number of examples in the batch. Arguments are as in `loss`.
        """
        return None

    def export_outputs(self, predictions: Mapping[Any, tf.Tensor]) -> dict[str, Any]:
        """Return signature name -> ExportOutput for the exported model, from the result of `predictions`."""
        output = PredictOutput(predictions)
        return {DEFAULT_SIGNATURE: output, "predict": output}

    def create_estimator_spec(
        self,
        features: Any,
        mode: str,
        logits: Any,
        labels: Any = None,
        optimizer: Any = None,
        trainable_variables: Sequence[Any] | None = None,
        train_op_fn: Callable[[tf.Tensor], Any] | None = None,
        update_ops: Sequence[Any] | None = None,
        regularization_losses: Losses = None,
    ) -> EstimatorSpec:
        """Return the EstimatorSpec for model_fn to return.

        Args:
          features: name -> tensor `[batch, ...]`.
          mode: one of ModeKeys.
          logits: float `[batch, ..., logits_dimension]`.
          labels: `[batch, ...]`; not needed in PREDICT.
          optimizer: for TRAIN: a Keras or `tf.compat.v1.train` optimizer, or its name (see `optimizer_of`). Its update
            also advances the global step.
          trainable_variables: the variables to train; None: all trainable variables of the model.
          train_op_fn: for TRAIN, instead of `optimizer`: called with the loss, returns the train_op.
          update_ops: operations to run with each update, such as those of moving averages.
          regularization_losses: float scalars that are added to the loss.

        Raises:
          ValueError: the mode is TRAIN and not exactly one of optimizer and train_op_fn is given; logits or labels
            have wrong shapes; or update_ops is no list.
        """
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions, export_outputs=self.export_outputs(predictions))
        loss = self.loss(labels, logits, features, mode, regularization_losses)
        if mode == ModeKeys.EVAL:
            metrics = self.metrics(regularization_losses)
            metrics = self.update_metrics(
                metrics, features, logits, labels, mode=mode, regularization_losses=regularization_losses
            )
            weight = self.loss_weight(labels, logits, features)
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=in_pairs(metrics), loss_weight=weight)
        if (optimizer is None) == (train_op_fn is None):
            given = "both" if optimizer is not None else "neither"
            raise ValueError(
                f"create_estimator_spec: TRAIN needs exactly one of optimizer and train_op_fn, but got {given}."
            )
        if update_ops is not None and not isinstance(update_ops, list | tuple):
            raise ValueError(f"create_estimator_spec(update_ops={update_ops!r}): it must be a list or a tuple.")
        # The names of optimizer variables in tf.estimator's checkpoints contain this scope.
        with v1.name_scope(None), v1.name_scope("training"):
            if train_op_fn is not None:
                train_op = train_op_fn(loss)
            else:
                train_op = minimize(optimizer_of(optimizer), loss, trainable_variables)
            if update_ops:
                train_op = tf.group(train_op, *update_ops)
        self._summarise(labels, logits, features)
        if self._summary_key("loss") != "loss" or summaries.is_of_session():  # the runner itself writes "loss"
            summaries.scalar(self._summary_key("loss"), loss)
        if regularization_losses is not None:
            summaries.scalar(self._summary_key("regularization_loss"), tf.add_n(list(regularization_losses)))
        return EstimatorSpec(mode, predictions, loss, train_op=train_op)

    def _summarise(self, labels: Any, logits: Any, features: Any) -> None:  # noqa: B027
        """Write summaries of a training batch."""

    def _summary_key(self, metric: str) -> str:
        return self._key(metric)

    def _key(self, metric: str) -> str:
        return f"{metric}/{self.name}" if self.name else metric


class HeadOfOne(Head):
    """Base class of all heads but MultiHead. Subclasses define labels, losses, predictions and metrics.

    Args:
      logits_dimension: size of the last axis of the logits.
      weight_column: as in BinaryClassHead.
      loss_reduction: as in BinaryClassHead.
      loss_fn: as in BinaryClassHead.
      name: as in BinaryClassHead.
    """

    name: str | None = None
    logits_dimension = 1
    loss_reduction = "sum_over_batch_size"
    _prediction_keys: tuple[str, ...] = ()
    _loss_dimension = 1
    _weights_may_differ_in_one_example = False

    def __init__(
        self, logits_dimension: int, weight_column: Any, loss_reduction: str, loss_fn: Any, name: str | None
    ) -> None:
        checks.check_reduction(loss_reduction)
        checks.check_loss_fn(loss_fn)
        self.name = name
        self.logits_dimension = logits_dimension
        self.loss_reduction = loss_reduction
        self._weight_column = weight_column
        self._loss_fn = loss_fn

    @abc.abstractmethod
    def _labels(self, labels: Any, logits: tf.Tensor) -> tf.Tensor:
        """Return the checked labels as numbers, with the rank of the logits."""

    @abc.abstractmethod
    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Return the loss of each example, `[batch, ..., 1]`, or of each logit `[batch, ..., logits_dimension]`."""

    def _weights(self, features: Any, logits: tf.Tensor) -> tf.Tensor | None:
        may_differ = self._weights_may_differ_in_one_example
        return checks.example_weights(features, self._weight_column, logits, one_each_logit=may_differ)

    def _all_losses(self, labels: tf.Tensor, logits: tf.Tensor, features: Any) -> tf.Tensor:
        """Return the losses of a batch as in `_losses`, by the user's loss_fn if there is one."""
        if self._loss_fn is None:
            return self._losses(labels, logits)
        if "features" in checks.arguments(self._loss_fn):
            losses = self._loss_fn(labels=labels, logits=logits, features=features)
        else:
            losses = self._loss_fn(labels=labels, logits=logits)
        return checks.checked_losses(losses, logits, self._loss_dimension)

    @property
    def _is_v1(self) -> bool:
        """Whether this is a head of tf.compat.v1.estimator: its reduction is one of tf.compat.v1.losses."""
        return self.loss_reduction.startswith("weighted_")

    def _summarise(self, labels: Any, logits: Any, features: Any) -> None:
        if self.loss_reduction == "weighted_sum":  # a sum says little, so report the average, too
            summaries.scalar(self._key("average_loss"), self.average_loss(labels, logits, features))

    def loss(
        self,
        labels: Any,
        logits: Any,
        features: Any = None,
        mode: str | None = None,
        regularization_losses: Losses = None,
    ) -> tf.Tensor:
        losses, weights = self._losses_and_weights(labels, logits, features)
        loss = checks.reduced(losses, weights, self.loss_reduction, batch_part())
        return with_regularization(loss, regularization_losses)

    def average_loss(self, labels: Any, logits: Any, features: Any) -> tf.Tensor:
        """Return the weighted mean of a batch's losses, a float scalar, whatever `loss_reduction` is."""
        losses, weights = self._losses_and_weights(labels, logits, features)
        return checks.reduced(losses, weights, "weighted_mean")

    def loss_weight(self, labels: Any, logits: Any, features: Any) -> Any:
        """Return the weight of a batch's loss in an evaluation's mean over batches, a scalar.

        If losses are summed, all batches have the weight 1, as in tf.estimator; each replica returns its share of the
        batch, and these add up to 1. If losses are averaged by weights, the weight is the divisor of that mean. For
        other reductions the result is None: the weight is the number of examples in the batch.
        """
        if checks.is_sum(self.loss_reduction):
            return batch_part().share(tf.float64)
        if checks.is_weighted_mean(self.loss_reduction):
            losses, weights = self._losses_and_weights(labels, logits, features)
            return checks.divisor(losses, weights, self.loss_reduction)
        return None

    def _losses_and_weights(self, labels: Any, logits: Any, features: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return (losses of all examples, weights of the examples or None)."""
        logits = checks.checked_logits(logits, self.logits_dimension)
        losses = self._all_losses(self._labels(labels, logits), logits, features)
        return losses, self._weights(features, logits)

    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[Any, tf.Tensor]:
        unknown = [key for key in keys or () if key not in self._prediction_keys]
        if unknown:
            raise ValueError(
                f"predictions(keys={keys}): {unknown} are unknown. This head has {', '.join(self._prediction_keys)}."
            )
        logits = checks.checked_logits(logits, self.logits_dimension)
        wanted = keys or self._prediction_keys
        return {key: self._prediction(key, logits) for key in self._prediction_keys if key in wanted}

    def _prediction(self, key: str, logits: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def metrics(self, regularization_losses: Losses = None) -> dict[str, Any]:
        makers = {"average_loss": mean}
        if regularization_losses is not None:
            makers["regularization_loss"] = mean
        for name, (make, _) in self._metrics().items():
            makers[name] = make
        return {self._key(name): make(name) for name, make in makers.items()}

    def update_metrics(
        self,
        eval_metrics: dict[str, Any],
        features: Any,
        logits: Any,
        labels: Any,
        mode: str | None = None,
        regularization_losses: Losses = None,
    ) -> dict[str, Any]:
        logits = checks.checked_logits(logits, self.logits_dimension)
        labels = self._labels(labels, logits)
        weights = self._weights(features, logits)
        add(eval_metrics[self._key("average_loss")], self._all_losses(labels, logits, features), weights=weights)
        for name, (_, metric_inputs) in self._metrics().items():
            add(eval_metrics[self._key(name)], *metric_inputs(labels, logits), weights=weights)
        if regularization_losses is not None:
            add(eval_metrics[self._key("regularization_loss")], tf.add_n(list(regularization_losses)), weights=None)
        # These are pairs (value, update) instead of Keras metrics.
        for name, operations in self._v1_metrics(labels, logits, weights).items():
            eval_metrics[self._key(name)] = operations
        return eval_metrics

    @abc.abstractmethod
    def _metrics(self) -> Metrics:
        """Return the head's metrics except `average_loss` and `regularization_loss`."""

    def _v1_metrics(self, labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | None) -> dict[str, Any]:
        """Return name -> (value, update) for metrics of tf.compat.v1.estimator that Keras would compute differently."""
        return {}


def with_regularization(loss: tf.Tensor, regularization_losses: Losses) -> tf.Tensor:
    if regularization_losses is None:
        return loss
    return loss + tf.cast(tf.add_n(list(regularization_losses)), loss.dtype)


def exported(predictions: Mapping[Any, tf.Tensor], **output: Any) -> dict[str, Any]:
    """Return signature name -> ExportOutput. The predictions are `predict`. `output` is one keyword argument, such as
    `regression=RegressionOutput(...)`, which becomes the signature of this name and `serving_default`.
    """
    ((name, default),) = output.items()
    return {DEFAULT_SIGNATURE: default, name: default, "predict": PredictOutput(predictions)}


def repeated_for_each_example(values: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return `[batch, classes]`: `values`, `[classes]`, repeated for each example of `logits`."""
    return tf.tile(tf.expand_dims(values, 0), [tf.shape(logits)[0], 1])


def names_of_classes(num_classes: int, label_vocabulary: Sequence[Any] | None) -> tf.Tensor:
    """Return the names of the classes, `[num_classes]`: `label_vocabulary`, or the ids as strings if there is none."""
    if label_vocabulary:
        return tf.convert_to_tensor(list(label_vocabulary))
    return tf.strings.as_string(tf.range(num_classes))


def ids_of_labels(labels: tf.Tensor, label_vocabulary: Sequence[Any], head: str) -> tf.Tensor:
    """Return the ids (int64) of `labels` in the vocabulary, with the labels' shape. A step fails if a label is not in
    the vocabulary.

    Args:
      labels: entries of the vocabulary, of any shape.
      label_vocabulary: the labels in the order of their ids.
      head: name of the head's class, for messages.

    Raises:
      TypeError, of MultiClassHead ValueError, as in tf.estimator: labels and vocabulary have different dtypes.
    """
    keys = tf.convert_to_tensor(list(label_vocabulary))
    if labels.dtype != keys.dtype:
        message = (
            f"{head}: labels are {labels.dtype.name}, but label_vocabulary={label_vocabulary} is {keys.dtype.name}."
        )
        if head == "MultiClassHead":
            raise ValueError(message)
        raise TypeError(message)
    ids_of_keys = tf.range(len(label_vocabulary), dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, ids_of_keys), default_value=-1)
    ids = table.lookup(labels)
    unknown = tf.gather_nd(labels, tf.where(ids < 0))
    message = f"labels must be in label_vocabulary={list(label_vocabulary)[:20]}; not in it:"
    return checks.after(tf.debugging.Assert(tf.reduce_all(ids >= 0), [message, unknown], summarize=10), ids)
