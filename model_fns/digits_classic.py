"""The digits classifier as it was written for tf.estimator: variables, optimizer and metrics of tf.compat.v1."""

from __future__ import annotations

import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params

tf1 = tf.compat.v1


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Classify images.

    Args:
      features: `image` float32 `[batch, 8, 8, 1]` in 0..1.
      labels: int64 `[batch]`, 0..9.
      mode: one of ModeKeys.
      params: width, learning_rate, label_smoothing.
    """
    x = tf.reshape(features["image"], [-1, 64])
    x = tf.nn.relu(_dense("hidden", x, params.width))
    logits = _dense("logits", x, 10)
    classes = tf.argmax(logits, axis=1)
    predictions = {"class": classes, "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    smoothing = params.label_smoothing if mode == ModeKeys.TRAIN else 0.0
    loss = tf1.losses.softmax_cross_entropy(tf.one_hot(labels, 10), logits, label_smoothing=smoothing)
    accuracy = tf1.metrics.accuracy(labels=labels, predictions=classes)
    optimizer = tf1.train.AdamOptimizer(params.learning_rate)
    train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
    return EstimatorSpec(
        mode, predictions=predictions, loss=loss, train_op=train_op, eval_metric_ops={"accuracy": accuracy}
    )


def _dense(name: str, x: tf.Tensor, units: int) -> tf.Tensor:
    with tf1.variable_scope(name):
        kernel = tf1.get_variable("kernel", [x.shape[-1], units], initializer=tf1.glorot_uniform_initializer())
        bias = tf1.get_variable("bias", [units], initializer=tf1.zeros_initializer())
        return tf.matmul(x, kernel) + bias
