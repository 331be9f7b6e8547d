"""Parts of contrib and heads with shapes that are known before a step, partly, or not at all, in files for TensorFlow 1
(a dimension has a `value`) and 2 (it is a number or None): the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401
from runner.tf_private.tf_estimator import dimensions_of_tf1

contrib: Any = tf.contrib
seq2seq = contrib.seq2seq
cells = tf.nn.rnn_cell

X = np.random.RandomState(0).rand(2, 5, 3).astype(np.float32)
Y = np.array([[1, 2, 0, 3, 1], [2, 2, 1, 0, 3]])
LENGTHS = np.array([5, 3], np.int32)

STATIC = ([2, 5, 3], [2, 5], [2])
SHAPES: dict[str, Any] = {
    "batch alone": ([2, None, 3], [2, None], [2]),
    "size alone": ([None, None, 3], [None, None], [None]),
}
UNKNOWN = (None, None, None)


def attention(x: tf.Tensor, y: tf.Tensor, lengths: tf.Tensor) -> list[Any]:
    mechanisms = [seq2seq.LuongAttention(4, x), seq2seq.BahdanauAttention(4, x, lengths, normalize=True)]
    cell = seq2seq.AttentionWrapper(cells.LSTMCell(4), mechanisms, [5, 3], alignment_history=True)
    batch = tf.shape(x)[0]
    decoder = seq2seq.BasicDecoder(cell, seq2seq.TrainingHelper(x, lengths), cell.zero_state(batch, tf.float32))
    outputs, state, _ = seq2seq.dynamic_decode(decoder)
    return [outputs.rnn_output, state.alignments[0], state.alignment_history[1].stack()]


def context_alone(x: tf.Tensor, y: tf.Tensor, lengths: tf.Tensor) -> list[Any]:
    cell = seq2seq.AttentionWrapper(cells.GRUCell(4), seq2seq.LuongAttention(4, x, lengths))
    decoder = seq2seq.BasicDecoder(
        cell, seq2seq.TrainingHelper(x, lengths), cell.zero_state(tf.shape(x)[0], tf.float32), tf.layers.Dense(6)
    )
    outputs, _, found = seq2seq.dynamic_decode(decoder, impute_finished=True)
    weights = tf.sequence_mask(lengths, tf.shape(x)[1], tf.float32)
    return [outputs.rnn_output, found, seq2seq.sequence_loss(outputs.rnn_output, y, weights)]


def beams(x: tf.Tensor, y: tf.Tensor, lengths: tf.Tensor) -> list[Any]:
    memory = seq2seq.tile_batch(x, 2)
    mechanism = seq2seq.LuongAttention(4, memory, seq2seq.tile_batch(lengths, 2))
    cell = seq2seq.AttentionWrapper(cells.LSTMCell(4), mechanism, 4)
    batch = tf.shape(x)[0]
    decoder = seq2seq.BeamSearchDecoder(
        cell, tf.get_variable("embedding", [6, 3]), tf.fill([batch], 1), 0, cell.zero_state(batch * 2, tf.float32), 2,
        output_layer=tf.layers.Dense(6),
    )  # fmt: skip
    outputs, _, _ = seq2seq.dynamic_decode(decoder, maximum_iterations=4)
    return [outputs.predicted_ids, outputs.beam_search_decoder_output.scores]


def networks(x: tf.Tensor, y: tf.Tensor, lengths: tf.Tensor) -> list[Any]:
    normed, _ = tf.nn.dynamic_rnn(contrib.rnn.LayerNormBasicLSTMCell(4), x, lengths, dtype=tf.float32)
    over_time = tf.transpose(x, [1, 0, 2])
    fused = contrib.rnn.LSTMBlockFusedCell(4)
    whole, _ = contrib.rnn.TimeReversedFusedRNN(fused)(over_time, dtype=tf.float32, sequence_length=lengths)
    both, _, _ = contrib.rnn.stack_bidirectional_dynamic_rnn(
        [cells.GRUCell(2)], [cells.GRUCell(2)], x, dtype=tf.float32, sequence_length=lengths
    )
    return [normed, whole, both]


def fields(x: tf.Tensor, y: tf.Tensor, lengths: tf.Tensor) -> list[Any]:
    transitions = tf.get_variable("transitions", [3, 3])
    likelihood, _ = contrib.crf.crf_log_likelihood(x, y % 3, lengths, transitions)
    return [likelihood, *contrib.crf.crf_decode(x, transitions, lengths)]


def losses_of_heads(x: tf.Tensor, y: tf.Tensor, lengths: tf.Tensor) -> list[Any]:
    def loss(head: Any, labels: Any) -> tf.Tensor:
        return head.create_estimator_spec({}, "eval", x[:, 0], labels=labels).loss

    classes = tf.estimator.MultiClassHead(3)
    numbers = tf.estimator.RegressionHead(3)
    both = tf.estimator.MultiHead([tf.estimator.BinaryClassHead(name="a"), tf.estimator.RegressionHead(2, name="b")])
    targets = tf.cast(y, tf.float32)
    in_parts = {"a": y[:, 0] % 2, "b": targets[:, :2]}
    return [loss(classes, y[:, 0] % 3), loss(numbers, targets[:, :3]), loss(both, in_parts)]


def spread(shape: Any, dtype: Any, partition_info: Any = None) -> tf.Tensor:
    """Return the initial value of a variable: numbers from -1 to 1."""
    sizes = tf.TensorShape(shape).as_list()
    return tf.constant(np.linspace(-1, 1, int(np.prod(sizes))).reshape(sizes), dtype)


def values(build: Callable[..., list[Any]], shapes: Any, *, of_tf1: bool) -> list[np.ndarray]:
    """Return what `build` computes in a graph from tensors of which no more than `shapes` is known."""
    dimensions = dimensions_of_tf1() if of_tf1 else contextlib.nullcontext()
    with tf.Graph().as_default(), dimensions, tf.Session() as session:
        tf.set_random_seed(1)
        given = zip((X, Y, LENGTHS), shapes, strict=True)
        tensors = [tf.placeholder_with_default(array, shape) for array, shape in given]
        with tf.variable_scope("model", initializer=spread):
            fetched = build(*tensors)
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session.run(fetched)


@functools.cache
def expected_of(build: Callable[..., list[Any]]) -> list[np.ndarray]:
    return values(build, STATIC, of_tf1=False)


@pytest.mark.parametrize(("shapes", "of_tf1"), [("batch alone", True), ("size alone", True), ("size alone", False)])
@pytest.mark.parametrize("build", [attention, context_alone, beams, networks, fields, losses_of_heads])
def test_numbers_do_not_depend_on_what_is_known_of_a_shape(build: Any, shapes: str, of_tf1: bool) -> None:
    expected = expected_of(build)
    found = values(build, SHAPES[shapes], of_tf1=of_tf1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("of_tf1", [False, True])
def test_nor_if_nothing_is_known(of_tf1: bool) -> None:
    for one, other in zip(values(fields, UNKNOWN, of_tf1=of_tf1), expected_of(fields), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
