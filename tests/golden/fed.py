"""What hooks and a Scaffold feed: arrays to the iterator of the input, a placeholder that a variable begins with."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


class IteratorInitializerHook(tf.train.SessionRunHook):
    """Runs the initializer that input_fn leaves here."""

    def after_create_session(self, session, coord):
        self.iterator_initializer_func(session)


HOOKS = {"train": IteratorInitializerHook(), "eval": IteratorInitializerHook()}


def input_fn(mode):
    x = data.numbers(data.EXAMPLES, 4)
    y = (x.sum(1, keepdims=True) * 0.8 + 0.3).astype("float32")
    features_placeholder = tf.placeholder(x.dtype, x.shape)
    labels_placeholder = tf.placeholder(y.dtype, [None, 1])
    dataset = tf.data.Dataset.from_tensor_slices((features_placeholder, labels_placeholder))
    dataset = dataset.map(lambda features, labels: (features * 2.0, labels)).batch(data.BATCH, drop_remainder=True)
    iterator = tf.data.make_initializable_iterator(dataset.repeat() if mode == "train" else dataset)
    feed_dict = {features_placeholder: x, labels_placeholder: y}
    HOOKS[mode].iterator_initializer_func = lambda session: session.run(iterator.initializer, feed_dict=feed_dict)
    features, labels = iterator.get_next()
    return features / 2.0, labels


class Decays(tf.train.SessionRunHook):
    """Loads what it makes of a value, before each step."""

    def __init__(self, variable):
        self.variable = variable

    def before_run(self, run_context):
        session = run_context.session
        self.variable.load(self.variable.eval(session=session) * 0.9, session)


def model_fn(features, labels, mode):
    matrix, offset = data.numbers(4, 3, phase=2.0), data.numbers(3, phase=1.0)
    given, added = tf.placeholder(tf.float32, [4, 3]), tf.placeholder(tf.float32, [3])
    kernel = tf.get_variable("kernel", initializer=given)
    bias = tf.Variable(added * 2.0, name="bias", trainable=False)
    loaded = tf.get_variable("loaded", [3], initializer=tf.zeros_initializer(), trainable=False)
    scale = tf.get_variable("scale", [], initializer=tf.ones_initializer(), trainable=False)
    hidden = tf.tanh(tf.matmul(features, kernel) + bias + loaded)
    predictions = scale * tf.layers.dense(hidden, 1, name="out")
    loss = tf.losses.mean_squared_error(labels, predictions)
    with tf.name_scope("update"):
        train_op = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    scaffold = tf.train.Scaffold(
        init_feed_dict={given: matrix, added: offset}, init_fn=lambda _, session: loaded.load(offset / 2, session)
    )
    metrics = {"error": tf.metrics.mean_absolute_error(labels, predictions)}
    return tf.estimator.EstimatorSpec(
        mode, predictions, loss, train_op, metrics,
        scaffold=scaffold if mode == "train" else None,
        training_hooks=[HOOKS["train"], Decays(scale)], evaluation_hooks=[HOOKS["eval"]],
    )  # fmt: skip
