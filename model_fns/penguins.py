"""A classifier of tabular data: categories, missing numbers, class weights, and names as predictions."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from input_fns import penguins
from runner import EstimatorSpec, ModeKeys, Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Recognise the species of a penguin.

    Args:
      features: as `input_fns.penguins` returns them; the model scales and encodes them itself, so that a served model
        accepts them as they are in a file.
      labels: int64 `[batch]`, places in params.species; None in PREDICT.
      mode: one of ModeKeys.
      params: species, islands, sexes (names), class_weights (of each species), hidden_units, learning_rate.
    """
    numbers = tf.stack([features[name] for name in penguins.MEASUREMENTS], axis=1)
    is_missing = tf.math.is_nan(numbers)
    scale = keras.layers.Normalization(name="scale")
    if mode == ModeKeys.TRAIN:  # checkpoints hold mean and variance, so nothing else reads the training data
        scale.adapt(_without_missing(penguins.read(held_out=False)[0]))
    x = [tf.where(is_missing, 0.0, scale(numbers)), tf.cast(is_missing, tf.float32)]  # 0 is the mean
    for name, known in (("island", params.islands), ("sex", params.sexes)):
        x.append(keras.layers.StringLookup(vocabulary=known, output_mode="one_hot", name=name)(features[name]))
    hidden = tf.concat([tf.cast(part, tf.float32) for part in x], axis=1)
    for i, units in enumerate(params.hidden_units):
        hidden = keras.layers.Dense(units, activation="relu", name=f"hidden{i}")(hidden)
    logits = keras.layers.Dense(len(params.species), name="logits")(hidden)

    classes = tf.argmax(logits, axis=1)
    name_of = keras.layers.StringLookup(vocabulary=params.species, num_oov_indices=0, invert=True)
    predictions = {"species": name_of(classes), "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)
    weights = tf.gather(tf.constant(params.class_weights), labels)
    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=weights * tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits),
        loss_weight=weights,  # the loss of a batch is divided by the sum of its weights
        optimizer=keras.optimizers.Adam(params.learning_rate),
        eval_metric_ops={
            "accuracy": tf.cast(tf.equal(classes, labels), tf.float32),
            "recall": tf.compat.v1.metrics.mean_per_class_accuracy(labels, classes, len(params.species)),
        },
    )


def _without_missing(features: dict[str, np.ndarray]) -> np.ndarray:
    """Return the measurements, float32 `[n, 4]`, with the mean of its column for each missing one."""
    numbers = np.stack([features[name] for name in penguins.MEASUREMENTS], axis=1)
    return np.where(np.isnan(numbers), np.nanmean(numbers, axis=0), numbers)
