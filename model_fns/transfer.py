"""A classifier that starts from a trained Keras model: all layers except the last, and a new last layer."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params

FIRST_CLASS, NUM_CLASSES = 5, 5


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Classify images.

    Args:
      features: `image` float32 `[batch, 8, 8, 1]` in 0..1.
      labels: int64 `[batch]`, 5..9.
      mode: one of ModeKeys.
      params: pretrained (path of the Keras model), last_layer (name of its last layer to use), frozen (do not train its
        weights), from_scratch (use its layers but not its weights), learning_rate.
    """
    body = _body(params)
    x = body(features["image"], training=mode == ModeKeys.TRAIN)
    logits = keras.layers.Dense(NUM_CLASSES, name="new_logits")(x)
    classes = FIRST_CLASS + tf.argmax(logits, axis=1)
    predictions = {"class": classes, "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels - FIRST_CLASS, logits),  # per example
        optimizer=keras.optimizers.Adam(params.learning_rate),
        eval_metric_ops={"accuracy": tf.cast(tf.equal(classes, labels), tf.float32)},
    )


def _body(params: Params) -> keras.Model:
    """Return the first layers of the pretrained model: from images `[batch, 8, 8, 1]` to activations `[batch,
    units]`.
    """
    model = keras.models.load_model(params.pretrained, compile=False)
    if params.from_scratch:
        model = keras.models.clone_model(model)
    body = keras.Model(model.inputs, model.get_layer(params.last_layer).output)
    body.trainable = not params.frozen
    return body
