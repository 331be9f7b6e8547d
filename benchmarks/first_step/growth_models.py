"""The models of the curves of steps a second of growth.py, and the hook that measures them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import runner

v1 = tf.compat.v1
WIDTH = 64


def table_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """A table, of which a step looks rows up; SGD."""
    vectors = keras.layers.Embedding(params["rows"], WIDTH)(features)
    loss = tf.square(tf.reduce_sum(vectors, 1) - labels)
    return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))


def table_input_fn(params: Any) -> Any:
    rng, size = np.random.RandomState(0), params["batch_size"]
    ids, labels = rng.randint(0, params["rows"], [16 * size]), rng.randn(16 * size).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(size, drop_remainder=True).repeat()


def columns_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """An embedding column for each of `params.columns` texts, summed; v1's Adagrad."""
    column = tf.feature_column
    hashed = [column.categorical_column_with_hash_bucket(name, 1000) for name in sorted(features)]
    inputs = v1.feature_column.input_layer(features, [column.embedding_column(one, 8) for one in hashed])
    loss = tf.reduce_mean(tf.square(tf.reduce_sum(inputs, 1) - labels))
    train_op = v1.train.AdagradOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return runner.EstimatorSpec(mode, loss=loss, train_op=train_op)


def columns_input_fn(params: Any) -> Any:
    rng, size = np.random.RandomState(0), params["batch_size"]
    texts = np.array([f"text{number}" for number in range(5000)])
    features = {f"column{number}": texts[rng.randint(0, 5000, [8 * size])] for number in range(params["columns"])}
    data = tf.data.Dataset.from_tensor_slices((features, rng.randn(8 * size).astype(np.float32)))
    return data.batch(size, drop_remainder=True).cache().repeat()


class Rate(runner.Hook):
    """Ends training after some seconds, and writes its steps a second, from loop to loop, to a file."""

    def __init__(self) -> None:
        self._secs, self._loops, self._begun = float(os.environ["GROWTH_SECS"]), 0, 0.0
        self._first: tuple[int, float] | None = None

    def after_step(self, run: Any, result: Any) -> None:
        now, self._loops = time.perf_counter(), self._loops + 1
        self._begun = self._begun or now
        if self._first is None:
            if self._loops > 2 and now - self._begun > self._secs / 3:  # loops have grown
                self._first = result.last_step, now
            return
        step, started = self._first
        if now - started > self._secs:
            Path(run.model_dir, "rate").write_text(str((result.last_step - step) / (now - started)))
            run.request_stop("measured")
