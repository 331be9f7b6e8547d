"""What is known, from the graph, of the tensors of a replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from runner.distribute.replica_values import Kind, ReplicaValues

v1 = tf.compat.v1
SAME, ROWS, MEAN, SUM, OF_MEANS, OF_SUMS, OWN = (
    Kind.SAME, Kind.ROWS, Kind.MEAN, Kind.SUM, Kind.OF_MEANS, Kind.OF_SUMS, Kind.OWN,
)  # fmt: skip


def kind_of(function: Callable[..., Any]) -> Kind:
    """What is known of the result of a function of x `[batch, 6]`, y `[batch]` and a variable `[6]` of the model."""
    found: list[Kind] = []
    weights = tf.Variable(tf.ones([6]))

    def traced(x: tf.Tensor, y: tf.Tensor, counts: tf.Tensor) -> None:
        values = ReplicaValues([x, y], counts, own_states=())
        found.append(values.kind(function(x, y, weights)))

    floats = [tf.TensorSpec([None, 6]), tf.TensorSpec([None])]
    v1.wrap_function(traced, [*floats, tf.TensorSpec([2], tf.int64)])
    return found[0]


def shifted(x: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    mean = tf.reduce_mean(x, 0)
    return tf.reduce_mean(tf.math.squared_difference(x, tf.stop_gradient(mean)), 0)


CASES: dict[str, tuple[Callable[..., Any], Kind]] = {
    "a constant": (lambda x, y, w: tf.constant(3.0), SAME),
    "a variable": (lambda x, y, w: w * 2.0, SAME),
    "a shape beyond the batch": (lambda x, y, w: tf.shape(x)[1], SAME),
    "the shape of a mean": (lambda x, y, w: tf.shape(tf.reduce_mean(x, 0)), SAME),
    "examples": (lambda x, y, w: tf.tanh(x @ w[:, None] + 1.0), ROWS),
    "a loss": (lambda x, y, w: tf.square(tf.reduce_sum(x, 1) - y), ROWS),
    "a mean": (lambda x, y, w: tf.reduce_mean(x, 0), MEAN),
    "a mean over all axes": (lambda x, y, w: tf.reduce_mean(x), MEAN),
    "a mean over rows and columns": (lambda x, y, w: tf.reduce_mean(tf.reshape(x, [-1, 3]), 0), MEAN),
    "a moving average": (lambda x, y, w: 0.9 * w + 0.1 * tf.reduce_mean(x, 0), OF_MEANS),
    "statistics of a batch": (shifted, MEAN),
    "a variance of moments": (lambda x, y, w: tf.nn.moments(x, [0])[1], OF_MEANS),
    "a sum": (lambda x, y, w: tf.reduce_sum(x, 0), SUM),
    "the number of examples": (lambda x, y, w: tf.shape(x)[0], SUM),
    "the size of a tensor": (lambda x, y, w: tf.size(x), SUM),
    "a mean by hand": (lambda x, y, w: tf.reduce_sum(y) / tf.cast(tf.shape(y)[0], tf.float32), OF_SUMS),
    "a weighted mean": (lambda x, y, w: tf.reduce_sum(x * y[:, None], 0) / tf.reduce_sum(y), OF_SUMS),
    "sums by class": (lambda x, y, w: tf.math.unsorted_segment_sum(x, tf.cast(y, tf.int32), 3), SUM),
    "a product of matrices of examples": (lambda x, y, w: tf.matmul(x, x, transpose_a=True), SUM),
    "the same, transposed before": (lambda x, y, w: tf.matmul(tf.transpose(x), x), SUM),
    "the same by einsum": (lambda x, y, w: tf.einsum("bi,bj->ij", x, x), SUM),
    "einsum by example": (lambda x, y, w: tf.einsum("bi,ij->bj", x, tf.ones([6, 2])), ROWS),
    "a maximum of the batch": (lambda x, y, w: tf.reduce_max(x, 0), OWN),
    "a maximum by example": (lambda x, y, w: tf.reduce_max(x, 1), ROWS),
    "the last example": (lambda x, y, w: x[-1], OWN),
    "some examples": (lambda x, y, w: tf.reduce_mean(x[:4], 0), OWN),
    "a part of each example": (lambda x, y, w: tf.reduce_mean(x[:, 2:4], 0), MEAN),
    "the last part of each": (lambda x, y, w: tf.reduce_mean(x[..., -1]), MEAN),
    "a mean over chosen examples": (lambda x, y, w: tf.reduce_mean(tf.boolean_mask(x, y > 0), 0), OWN),
    "sorted examples": (lambda x, y, w: tf.sort(y), OWN),
    "pairs of examples": (lambda x, y, w: tf.matmul(x, x, transpose_b=True), OWN),
    "differences of examples": (lambda x, y, w: y[:, None] - y[None, :], OWN),
    "the softmax over the batch": (lambda x, y, w: tf.nn.softmax(y), OWN),
    "the softmax by example": (lambda x, y, w: tf.nn.softmax(x), ROWS),
    "examples side by side": (lambda x, y, w: tf.concat([x, x], 1), ROWS),
    "one behind the other": (lambda x, y, w: tf.concat([x, x], 0), OWN),
    "stacked by example": (lambda x, y, w: tf.stack([y, y], 1), ROWS),
    "examples divided by their sum": (lambda x, y, w: tf.reduce_mean(y / tf.reduce_sum(y)), OWN),
    "several examples in a row": (lambda x, y, w: tf.reshape(x, [-1, 12]), OWN),
    "random numbers by example": (lambda x, y, w: tf.nn.dropout(x, 0.5), OWN),
    "a Python function": (lambda x, y, w: tf.numpy_function(lambda: 1.0, [], tf.float32), OWN),
    "a branch over constants": (lambda x, y, w: tf.cond(w[0] > 0, lambda: w, lambda: -w), SAME),
    "a branch over examples": (lambda x, y, w: tf.cond(y[0] > 0, lambda: w, lambda: -w), OWN),
    "a branch over a mean": (lambda x, y, w: tf.where(tf.reduce_mean(y) > 0, 1.0, 2.0), OF_MEANS),
    "a lookup": (lambda x, y, w: tf.gather(w, tf.cast(y, tf.int32)), ROWS),
    "a padded batch": (lambda x, y, w: tf.pad(x, [[0, 1], [0, 0]]), OWN),
}


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_is_known_by_what_it_is_computed_from(case: str) -> None:
    function, expected = CASES[case]
    assert kind_of(function) is expected
