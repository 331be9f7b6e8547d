"""Elements of an iterator in groups: which they are, and where the iterator stands afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from runner.data.batch_groups import GROUP_SIZE, BatchGroups, are_small


@tf.function(autograph=False)
def read(iterator: Any, number: tf.Tensor) -> Any:
    """Return (the sum of each element of the groups, how many each group has, whether the data has ended)."""
    groups = BatchGroups(iterator, number)
    counts = tf.TensorArray(tf.int32, 0, dynamic_size=True, element_shape=[])
    sums = tf.TensorArray(tf.int64, 0, dynamic_size=True, element_shape=[])

    def body(taken: tf.Tensor, turn: tf.Tensor, _: tf.Tensor, counts: Any, sums: Any) -> Any:
        group = groups.get_next()
        _, sums = tf.while_loop(
            lambda index, _: index < group.count,
            lambda index, sums: (index + 1, sums.write(taken + index, total(group.element(index)))),
            (0, sums),
        )
        return taken + group.count, turn + 1, group.is_last, counts.write(turn, group.count), sums

    *_, ended, counts, sums = tf.while_loop(
        lambda taken, turn, ended, *_: (taken < number) & ~ended, body, (0, 0, tf.constant(False), counts, sums)
    )
    return sums.stack(), counts.stack(), ended


def total(element: tuple[Any, ...]) -> tf.Tensor:
    (leaf,) = [one for one in tf.nest.flatten(element) if one is not None]
    leaf = leaf.values if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) else leaf
    return tf.reduce_sum(leaf)


def numbers(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).map(lambda number: (number,))


def test_gives_each_element_once_in_order_and_reads_no_further() -> None:
    iterator = iter(numbers(100))
    sums, counts, ended = read(iterator, tf.constant(2 * GROUP_SIZE + 3))
    assert sums.numpy().tolist() == list(range(2 * GROUP_SIZE + 3))
    assert counts.numpy().tolist() == [GROUP_SIZE, GROUP_SIZE, 1, 1, 1]
    assert not ended
    assert int(next(iterator)[0]) == 2 * GROUP_SIZE + 3
    assert read(iterator, tf.constant(0))[0].shape == [0]
    assert int(next(iterator)[0]) == 2 * GROUP_SIZE + 4


@pytest.mark.parametrize("count", [GROUP_SIZE - 3, GROUP_SIZE, GROUP_SIZE + 1])
def test_says_where_the_data_ends(count: int) -> None:
    sums, _, ended = read(iter(numbers(count)), tf.constant(3 * GROUP_SIZE))
    assert sums.numpy().tolist() == list(range(count))
    assert ended


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.range(50).batch(4).map(lambda rows: (rows, None)),  # the last batch has two rows
        tf.data.Dataset.range(13).map(lambda number: ({"x": tf.sparse.from_dense(number[None])},)),
        tf.data.Dataset.range(13).map(lambda number: (tf.RaggedTensor.from_row_lengths(number[None], [1, 0]),)),
    ],
)
def test_elements_have_any_structure(dataset: tf.data.Dataset) -> None:
    sums, _, _ = read(iter(dataset), tf.constant(13))
    assert sums.numpy().tolist() == [int(total(element)) for element in dataset]


def test_an_error_of_the_data_is_raised_and_names_its_cause() -> None:
    dataset = numbers(100).map(lambda number: (tf.debugging.check_numerics(1 / (number - 20), "record 20"),))
    dataset = dataset.map(lambda number: (tf.cast(number, tf.int64),))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)record 20.*IteratorGetNext"):
        read(iter(dataset), tf.constant(64))


def test_only_small_elements_are_grouped() -> None:
    assert are_small((tf.TensorSpec([None, 16]), tf.TensorSpec([None, 1])), rows=32)
    assert not are_small((tf.TensorSpec([None, 16]),), rows=2000)
    assert not are_small((tf.TensorSpec([32, 224, 224, 3]),), rows=32)
    assert are_small((tf.TensorSpec([None], tf.string), None), rows=32)
    assert not are_small((tf.TensorSpec([None, None]),), rows=32)
    assert not are_small((tf.RaggedTensorSpec([None, None]),), rows=32)
