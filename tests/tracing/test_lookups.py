"""A step reads the rows of a table that it looks up, and not the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig, build_strategy
from tests.support.tiers import slow_but

v1 = tf.compat.v1
ROWS = 977


def variable(name: str) -> Any:
    return v1.get_variable(name, [ROWS, 2], initializer=v1.random_normal_initializer())


def half_layer(ids: tf.Tensor) -> tf.Tensor:
    found: tf.Tensor = keras.layers.Embedding(ROWS, 2, dtype="mixed_bfloat16")(ids)
    assert found.dtype == tf.bfloat16
    return tf.cast(found, tf.float32)


def column(ids: tf.Tensor) -> tf.Tensor:
    of_ids = tf.feature_column.categorical_column_with_identity("id", ROWS)
    found: tf.Tensor = v1.feature_column.input_layer({"id": ids}, [tf.feature_column.embedding_column(of_ids, 2)])
    return found


LOOKUPS = {
    "keras layer": lambda ids: keras.layers.Embedding(ROWS, 2)(ids),
    "keras layer in half precision": half_layer,
    "keras layer, ragged": lambda ids: keras.layers.Embedding(ROWS, 2)(
        tf.RaggedTensor.from_row_lengths(ids, tf.ones_like(ids))
    ).to_tensor(shape=[None, 1, 2])[:, 0],
    "keras.ops.take": lambda ids: keras.ops.take(keras.Variable(tf.ones([ROWS, 2]), name="own"), ids, axis=0),
    "embedding_lookup": lambda ids: tf.nn.embedding_lookup(variable("looked_up"), ids),
    "embedding_lookup of a list": lambda ids: v1.nn.embedding_lookup([variable("listed")], ids),
    "gather": lambda ids: tf.gather(variable("gathered"), ids),
    "gather_nd": lambda ids: tf.gather_nd(variable("gathered_nd"), ids[:, None]),
    "embedding_column": column,
}  # fmt: skip


@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored", "central_storage"], "default", "mirrored"))
def test_a_step_reads_the_rows_of_a_table_that_it_looks_up_and_not_the_table(strategy: str, tmp_path: Path) -> None:
    operations: dict[str, set[str]] = {}

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        graph, found = v1.get_default_graph(), []
        for name, look_up in LOOKUPS.items():
            first = len(graph.get_operations())
            found.append(look_up(features))
            made = graph.get_operations()[first:]
            whole = {one.type for one in made for out in one.outputs if out.shape.rank and out.shape[0] == ROWS}
            operations.setdefault(name, set()).update(whole & {"ReadVariableOp", "Identity", "Cast"})
        return EstimatorSpec(mode, loss=tf.reduce_sum(tf.add_n(found), 1) - labels, optimizer=keras.optimizers.SGD(0.1))

    def input_fn() -> tf.data.Dataset:
        ids = tf.range(8, dtype=tf.int64) * 5
        return tf.data.Dataset.from_tensor_slices((ids, tf.ones([8]))).batch(4).repeat()

    devices = None if strategy == "default" else ["CPU:0", "CPU:1"]
    config = RunConfig(train_distribute=build_strategy(strategy, devices=devices))
    Estimator(model_fn, tmp_path, config).train(Input(input_fn, params={}, batch_size=4), steps=1)
    assert operations == {name: set() for name in LOOKUPS}
