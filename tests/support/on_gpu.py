"""What tests/integration/test_gpu.py trains, and on which devices: two logical GPUs of one card, or two logical CPUs.

`python -m tests.support.on_gpu folder` trains with deterministic kernels; with `--killed` it ends by SIGKILL half way.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, Input, RunConfig

KIND = os.environ.get("RUNNER_GPU_TESTS_ON", "GPU")
"""The kind of device that the tests train on. CPU: a rehearsal, where no GPU is at hand."""
FIRST = f"{KIND}:0"
SECOND = f"{KIND}:1"
LOGICAL_MB = 8 << 10
"""Memory of a logical GPU. The rest of the card is for the processes that the tests start."""
MAX_STEPS = 16
KILLED_AT = 9
ROWS = 200


def split_card() -> None:
    """Make two logical GPUs of the first card. tests/conftest.py has split the CPU.

    Raises:
      RuntimeError: TensorFlow is already in use.
    """
    if KIND == "CPU":
        return
    card = tf.config.list_physical_devices("GPU")[0]
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=LOGICAL_MB) for _ in range(2)]
    tf.config.set_logical_device_configuration(card, halves)


def examples(number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return features, of which `image` is `[n, 8, 8, 3]` and `ids` `[n, 5]`, and labels `[n, 1]`: always the same."""
    random = np.random.default_rng(3)
    image = random.normal(size=(number, 8, 8, 3)).astype(np.float32)
    ids = random.integers(ROWS, size=(number, 5))
    labels = image.mean(axis=(1, 2, 3))[:, None] + (ids[:, :1] / ROWS).astype(np.float32)
    return {"image": image, "ids": ids}, labels


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A convolution and a table that is looked up, and dense layers on both.

    params: `batch_norm` and `recurrent` (False) add such a layer, which do not compute the same over two replicas, or
    with XLA; `dropout` (0.0); `adam` (False: SGD).
    """
    training = mode == "train"
    image = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(features["image"])
    if params.get("batch_norm"):
        image = keras.layers.BatchNormalization()(image, training=training)
    image = keras.layers.Flatten()(keras.layers.MaxPooling2D(2)(image))
    words = keras.layers.Embedding(ROWS, 4)(features["ids"])
    if params.get("recurrent"):
        words = keras.layers.LSTM(6, return_sequences=True)(words)
    hidden = keras.layers.Dense(16, activation="tanh")(tf.concat([image, keras.layers.Flatten()(words)], 1))
    hidden = keras.layers.Dropout(params.get("dropout", 0.0))(hidden, training=training)
    predictions = tf.cast(keras.layers.Dense(1)(hidden), tf.float32)
    if mode == "infer":
        computed_in = tf.fill([tf.shape(hidden)[0]], hidden.dtype.as_datatype_enum)
        return EstimatorSpec(mode, predictions={"y": predictions, "dtype": computed_in})
    optimizer = keras.optimizers.SGD(0.03, momentum=0.5)
    if params.get("adam"):
        optimizer = keras.optimizers.Adam(0.01)
    error = keras.metrics.MeanAbsoluteError(name="mae")
    error.update_state(labels, predictions)
    return EstimatorSpec(
        mode,
        predictions={"y": predictions},
        loss=tf.square(predictions - labels)[:, 0],
        optimizer=optimizer,
        eval_metric_ops={"mae": error, "bias": (predictions - labels)[:, 0]},
    )


def train_input(batch_size: int = 6, ahead: int | None = None) -> Input:
    """19 shuffled examples without end: with batches of 6 the last of an epoch has one, and a second replica none."""

    def input_fn(params: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(examples(19)).shuffle(19, seed=5).batch(params["batch_size"]).repeat()

    return Input(input_fn, params={}, batch_size=batch_size, prefetch_to_device=ahead)


def eval_input() -> Input:
    """22 examples in batches of 8."""

    def input_fn(params: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(examples(22)).batch(params["batch_size"])

    return Input(input_fn, params={}, batch_size=8)


def values_of(trainer: Estimator) -> dict[str, np.ndarray]:
    """Return the value of each variable in the newest checkpoint."""
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


# --- a life with deterministic kernels ------------------------------------------------------------------------------


class EndAt(Hook):
    """Ends this process by SIGKILL at a step."""

    def __init__(self, step: int) -> None:
        self.every = Every(steps=step)
        self._step = step

    def after_step(self, run: Any, result: Any) -> None:
        if result.last_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, *options: str) -> None:
    tf.config.experimental.enable_op_determinism()
    config = RunConfig(tf_random_seed=5, save_checkpoints_steps=4)
    params = {"batch_norm": True, "dropout": 0.3, "adam": True}
    hooks = [EndAt(KILLED_AT)] if "--killed" in options else []
    Estimator(model_fn, folder, config, params).train(train_input(), hooks=hooks, max_steps=MAX_STEPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
