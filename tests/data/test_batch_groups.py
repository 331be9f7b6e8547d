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
            lambda index, sums: (index + 1, sums.write(taken + index, total(next(group.elements_of(index))))),
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


@tf.function(autograph=False)
def read_threes(iterator: Any, num_steps: tf.Tensor) -> Any:
    """Return (the three elements of each step, -1 for one that the data does not have; whether the data has ended)."""
    groups = BatchGroups(iterator, num_steps, per_step=3)

    def elements(group: Any, step: tf.Tensor) -> tf.Tensor:
        of_step = group.elements_of(step)
        first = next(of_step)[0]
        others = [of_step.get_next_as_optional() for _ in range(2)]
        none = tf.constant(-1, tf.int64)
        return tf.stack([first, *(tf.cond(o.has_value(), lambda o=o: o.get_value()[0], lambda: none) for o in others)])

    def body(taken: tf.Tensor, _: tf.Tensor, steps: Any) -> Any:
        group = groups.get_next()
        _, steps = tf.while_loop(
            lambda step, _: step < group.num_steps,
            lambda step, steps: (step + 1, steps.write(taken + step, elements(group, step))),
            (0, steps),
        )
        return taken + group.num_steps, group.is_last, steps

    steps = tf.TensorArray(tf.int64, 0, dynamic_size=True, element_shape=[3])
    _, ended, steps = tf.while_loop(
        lambda taken, ended, _: (taken < num_steps) & ~ended, body, (0, tf.constant(False), steps)
    )
    return steps.stack(), ended


def test_elements_of_one_step_are_in_one_group() -> None:
    iterator = iter(numbers(100))
    steps, ended = read_threes(iterator, tf.constant(12))  # two groups of 5 steps, and two steps
    assert steps.numpy().ravel().tolist() == list(range(36))
    assert not ended
    assert int(next(iterator)[0]) == 36


@pytest.mark.parametrize(
    ("count", "num_steps", "has_ended"),
    [(31, 11, False), (31, 12, True), (14, 5, False), (13, 8, True), (30, 10, False)],
)
def test_the_last_step_of_the_data_may_have_fewer_elements(count: int, num_steps: int, has_ended: bool) -> None:
    """Data has ended, for a loop over single elements too, where a step finds no first one."""
    steps, ended = read_threes(iter(numbers(count)), tf.constant(num_steps))
    assert steps.numpy().ravel().tolist() == [*range(count), *([-1] * (-count % 3))]
    assert bool(ended) is has_ended


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
