"""A classifier with one hidden layer. Change it to your own model."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Build the model for one mode: "train", "eval" or "infer".

    Args:
      features: what input_fn yields: `x`, float32 `[batch, num_features]`.
      labels: int64 `[batch]`, 0 .. num_classes - 1; None in prediction.
      mode: "train", "eval" or "infer".
      params: `model.params` of conf/experiment/wine.yaml.
    """
    x = keras.layers.Dense(params.width, activation="relu", name="hidden")(features["x"])
    x = keras.layers.Dropout(params.dropout)(x, training=mode == ModeKeys.TRAIN)
    logits = keras.layers.Dense(params.num_classes, name="logits")(x)
    classes = tf.argmax(logits, axis=1)
    predictions = {"class": classes, "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    # One loss per example, not their mean: the runner averages over all replicas and workers.
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=losses,
        optimizer=keras.optimizers.Adam(params.learning_rate),
        eval_metric_ops={"accuracy": tf.cast(tf.equal(classes, labels), tf.float32)},
    )
