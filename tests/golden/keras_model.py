"""model_to_estimator: a functional model of Keras 2, whose checkpoints 2.15 writes by the ways to objects."""

from __future__ import annotations

import numpy as np
import tensorflow

from tests.golden import data

try:
    import tf_keras as keras  # what TensorFlow 2.15 calls tf.keras
except ImportError:
    keras = tensorflow.keras


def input_fn(mode):
    numbers = data.numbers(data.EXAMPLES, 4)
    features = {"amount": numbers, "kind": np.arange(data.EXAMPLES)[:, None] % 5}
    labels = numbers.sum(1, keepdims=True) * 0.8 + features["kind"] / 5.0
    return data.dataset(features, labels.astype("float32"), mode)


def model():
    amount, kind = keras.Input([4], name="amount"), keras.Input([1], name="kind", dtype="int64")
    hidden = keras.layers.Dense(3, activation="tanh", name="hidden")(amount)
    hidden = keras.layers.BatchNormalization(name="normal")(hidden)
    vectors = keras.layers.Flatten(name="flat")(keras.layers.Embedding(5, 2, name="kinds")(kind))
    together = keras.layers.concatenate([hidden, vectors], name="together")
    made = keras.Model([amount, kind], keras.layers.Dense(1, name="y")(together))
    made.compile(keras.optimizers.Adam(0.05, beta_1=0.8), "mse", metrics=["mae"])
    return made


def format_in(model_dir):
    """The runner writes names, which 2.15 has to be told."""
    path = tensorflow.train.latest_checkpoint(model_dir)
    is_of_names = path is not None and tensorflow.train.load_checkpoint(path).has_tensor("global_step")
    return "saver" if is_of_names else "checkpoint"


def estimator(model_dir, **config):
    return tensorflow.keras.estimator.model_to_estimator(
        model(),
        model_dir=model_dir,
        config=tensorflow.estimator.RunConfig(**config),
        checkpoint_format=format_in(model_dir),
    )
