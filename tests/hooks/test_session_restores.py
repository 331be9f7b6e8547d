"""Restores that a model_fn's own graph does: in parts, with the values that a session would have left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.checkpoint.reader import Reader
from runner.classic.contrib.framework import assign_from_checkpoint, assign_from_checkpoint_fn
from runner.hooks import session_restores
from runner.tf_private import tensor_bundle

v1 = tf.compat.v1

KERNELS = [f"kernel_{number}" for number in range(6)]
NAMES = [*KERNELS, "divided", "whole", "name"]
CONFIG: dict[str, Any] = {"tensorboard": False, "save_checkpoints_asynchronously": False}


class OwnRestore(v1.train.Saver):  # type: ignore[name-defined]
    """A saver whose `restore` is its own, so that the runner calls it: it adds one to a variable."""

    def restore(self, sess: Any, save_path: str) -> None:
        super().restore(sess, save_path)
        first = next(one for one in v1.global_variables() if one.op.name == "kernel_0")
        sess.run(v1.assign_add(first, tf.ones_like(first)))


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((np.ones([2, 4], np.float32), np.ones([2], np.float32))).repeat()


def model_fn_of(scaffold_of: Callable[[list[Any]], Any]) -> Callable[..., EstimatorSpec]:
    """Return a model_fn whose variables an optimizer would leave as they are."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        kernels = [v1.get_variable(name, [4, 8]) for name in KERNELS]
        divided = v1.get_variable("divided", [4, 6], partitioner=v1.fixed_size_partitioner(2, axis=1))
        count = v1.get_variable("whole", [], tf.int64, initializer=v1.zeros_initializer(), trainable=False)
        v1.get_variable("name", initializer=tf.constant([b"a", b"bc"]), trainable=False)
        read = [tf.convert_to_tensor(divided), *kernels]
        y = tf.add_n([tf.reduce_sum(features @ one) for one in read]) + tf.cast(count, tf.float32)
        step = v1.train.get_or_create_global_step().assign_add(1)
        return EstimatorSpec(mode, {"y": y[None]}, y, step, scaffold=scaffold_of(v1.global_variables()))

    return model_fn


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint of a model with random values."""
    folder = tmp_path_factory.mktemp("trained")
    estimator = Estimator(model_fn_of(lambda variables: None), folder, RunConfig(tf_random_seed=5, **CONFIG))
    estimator.train(input_fn, steps=1)
    return str(estimator.latest_checkpoint())


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part that is read; parts have up to 300 bytes."""
    monkeypatch.setattr(tensor_bundle, "PART_BYTES", 300)
    sizes, read = [], tensor_bundle.read_entries

    def counted(*arguments: Any) -> list[tf.Tensor]:
        values = read(*arguments)
        sizes.append(sum(value.numpy().nbytes for value in values if value.dtype != tf.string))
        return values

    monkeypatch.setattr(session_restores, "read_entries", counted)
    return sizes


def values_in(path: str | None) -> dict[str, np.ndarray]:
    reader = Reader(str(path))
    return reader.get_many({name: None for name in NAMES})


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], *, first_plus: float = 0.0) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value + np.float32(first_plus) if name == "kernel_0" else value)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("mirrored", {}), (None, {"restore_sequentially": True}), (None, {"sharded": True}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            (None, {}), ("mirrored", {"restore_sequentially": True}), ("mirrored", {"sharded": True}),
        ]),
    ],
)  # fmt: skip
def test_a_savers_own_restore_reads_in_parts(
    settings: dict[str, bool], strategy: str | None, trained: str, tmp_path: Path, read_bytes: list[int]
) -> None:
    model_fn = model_fn_of(lambda variables: v1.train.Scaffold(saver=OwnRestore(**settings)))
    found = tf.distribute.MirroredStrategy(["CPU:0"]) if strategy else None
    estimator = Estimator(model_fn, Path(trained).parent, RunConfig(train_distribute=found, **CONFIG))
    with_two_steps = Estimator(model_fn, tmp_path, RunConfig(train_distribute=found, **CONFIG))
    for file in Path(trained).parent.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with_two_steps.train(input_fn, steps=1)
    assert_equal(values_in(with_two_steps.latest_checkpoint()), values_in(trained), first_plus=1.0)
    assert len(read_bytes) >= 3 and max(read_bytes) <= 300 and sum(read_bytes) >= 6 * 128 + 96
    loss = estimator.evaluate(input_fn, steps=1)["loss"]
    there = values_in(trained)
    total = sum(2 * float(there[name].sum()) for name in (*KERNELS, "divided")) + 2 * 4 * 8
    assert loss == pytest.approx(total, rel=1e-5)


def by_operation(path: str, variables: list[Any]) -> Any:
    operation, feed_dict = assign_from_checkpoint(path, variables)
    return v1.train.Scaffold(init_fn=lambda scaffold, session: session.run(operation, feed_dict))


def by_function(path: str, variables: list[Any]) -> Any:
    return v1.train.Scaffold(init_fn=assign_from_checkpoint_fn(path, variables))


def by_init_op(path: str, variables: list[Any]) -> Any:
    return v1.train.Scaffold(init_op=assign_from_checkpoint(path, variables)[0])


@pytest.mark.parametrize("scaffold_of", [by_operation, by_function, by_init_op])
def test_assign_from_checkpoint_reads_in_parts(
    scaffold_of: Callable[..., Any], trained: str, tmp_path: Path, read_bytes: list[int]
) -> None:
    def of_whole(variables: list[Any]) -> Any:
        return scaffold_of(trained, [one for one in variables if one.op.name in {*KERNELS, "whole", "name"}])

    estimator = Estimator(model_fn_of(of_whole), tmp_path, RunConfig(tf_random_seed=6, **CONFIG))
    estimator.train(input_fn, steps=1)
    expected, found = values_in(trained), values_in(estimator.latest_checkpoint())
    assert not np.array_equal(found["divided"], expected.pop("divided"))
    assert_equal(found, expected)
    assert len(read_bytes) >= 3 and max(read_bytes) <= 300


def test_a_value_of_another_dtype_is_converted(trained: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        kernel = v1.get_variable("half", [4, 8], tf.float64)
        operation, _ = assign_from_checkpoint(trained, {"kernel_0": kernel})
        y = tf.reduce_sum(kernel)
        step = v1.train.get_or_create_global_step().assign_add(1)
        scaffold = v1.train.Scaffold(init_fn=lambda scaffold, session: session.run(operation))
        return EstimatorSpec(mode, {"y": y[None]}, y, step, scaffold=scaffold)

    estimator = Estimator(model_fn, tmp_path, RunConfig(**CONFIG))
    estimator.train(input_fn, steps=1)
    np.testing.assert_array_equal(estimator.get_variable_value("half"), values_in(trained)["kernel_0"])


def test_only_groups_of_independent_assignments_are_divided(trained: str) -> None:
    with tf.Graph().as_default():
        one, two = (v1.get_variable(name, [4, 8], use_resource=True) for name in KERNELS[:2])
        (value,) = tf.raw_ops.RestoreV2(
            prefix=trained, tensor_names=["kernel_0"], shape_and_slices=[""], dtypes=[tf.float32]
        )
        first = v1.assign(one, value).op
        assert list(session_restores.reads_of([tf.group(first)])) == [first]
        assert not session_restores.reads_of([value])  # a tensor is fetched
        assert not session_restores.reads_of([v1.assign(two, tf.zeros([4, 8])).op])  # nothing is read
        drawn = v1.assign(two, value + tf.random.uniform([])).op
        assert not session_restores.reads_of([tf.group(first, drawn)])  # a number is drawn once
        with tf.control_dependencies([first]):
            second = v1.assign(two, value).op
        assert not session_restores.reads_of([tf.group(first, second)])  # one comes after the other
