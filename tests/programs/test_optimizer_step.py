"""Between the gradients and the variables: clipping and accumulation, equal to one device and to the big batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.config import parsing
from runner.config.schema import ConfigError
from tests.config.test_config import composed
from tests.support.line import line, points, read_events
from tests.support.messages import Messages
from tests.support.models import data, strategies, train_input
from tests.support.tiers import slow_but

v1 = tf.compat.v1
STRATEGIES = strategies()
SEVERAL = ("mirrored", "central_storage")


def model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """An embedding (sparse gradients, rows that examples share) and a dense layer. params: `loss`, `optimizer`."""
    buckets = tf.cast(tf.abs(features[:, 0]) * 3, tf.int32) % 7
    embedded = keras.layers.Embedding(7, 3, dtype="float64")(buckets)
    predictions = keras.layers.Dense(1, dtype="float64")(tf.concat([embedded, features], 1))
    error = tf.square(predictions - labels)[:, 0]
    mask = tf.cast(labels[:, 0] > 0, error.dtype)
    losses = {
        "per example": (error, None),
        "scalar": (tf.reduce_mean(error), None),
        "weighted": (error * mask, mask),
        "weighted scalar": (tf.math.divide_no_nan(tf.reduce_sum(error * mask), tf.reduce_sum(mask)), mask),
    }
    loss, weight = losses[params.get("loss", "per example")]
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
        "sgd, clipped by Keras": lambda: keras.optimizers.SGD(0.1, momentum=0.5, global_clipnorm=0.3),
        "adam": lambda: keras.optimizers.Adam(0.05),
        "v1": lambda: v1.train.MomentumOptimizer(0.1, 0.5),
    }
    optimizer = optimizers[params.get("optimizer", "sgd")]()
    return EstimatorSpec(mode, predictions, loss, optimizer=optimizer, loss_weight=weight)


def trained(
    model_dir: Path,
    strategy: str = "default",
    *,
    batch_size: int = 6,
    examples: int = 19,
    params: Any = None,
    **config: Any,
) -> dict[str, np.ndarray]:
    """What 12 steps come to. 19 examples in batches of 6: the last of an epoch has one, so that a replica has none."""
    run_config = RunConfig(train_distribute=STRATEGIES[strategy], tf_random_seed=5, **config)
    trainer = Estimator(model, model_dir, run_config, params or {})
    trainer.train(train_input(batch_size, num_examples=examples, dtype="float64"), steps=12)
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str = "") -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-12, err_msg=f"{what} {name}")


# --- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "v1"])
def test_the_global_gradient_is_clipped_the_same_on_every_strategy(optimizer: str, tmp_path: Path) -> None:
    params = {"optimizer": optimizer}
    expected = trained(tmp_path / "default", params=params, clip_global_norm=0.3)
    free = trained(tmp_path / "free", params=params)
    assert not np.allclose(expected["dense/kernel"], free["dense/kernel"]), "nothing was clipped"
    for strategy in SEVERAL:
        found = trained(tmp_path / strategy, strategy, params=params, clip_global_norm=0.3)
        assert_equal(found, expected, strategy)


def dense(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    predictions = keras.layers.Dense(1, dtype="float64")(features)
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=params["by_keras"])
    return EstimatorSpec(mode, predictions, tf.square(predictions - labels)[:, 0], optimizer=optimizer)


def test_clipping_is_that_of_a_keras_optimizer_with_global_clipnorm(tmp_path: Path) -> None:
    found = {}
    for by_keras, by_runner in ((0.3, None), (None, 0.3)):
        config = RunConfig(tf_random_seed=5, clip_global_norm=by_runner)
        trainer = Estimator(dense, tmp_path / str(by_keras), config, {"by_keras": by_keras})
        trainer.train(train_input(6, num_examples=19, dtype="float64"), steps=12)
        found[by_keras] = {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}
    assert_equal(found[None], found[0.3])


# --- sparse gradients -----------------------------------------------------------------------------------------


def table(params: Any) -> tuple[Any, Any]:
    """A table of eight rows of one number, each 1, and its rows for eight examples: (variable, looked up)."""
    variable = v1.get_variable("table", [8, 1], tf.float64, v1.ones_initializer())
    return variable, tf.gather(variable, params)


REPEATED: dict[str, Any] = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
}


@pytest.mark.parametrize("optimizer", REPEATED)
def test_an_optimizer_sees_one_row_for_an_id_that_occurs_often(optimizer: str, tmp_path: Path) -> None:
    """So a table that is looked up is trained like one that is multiplied, whose gradient is dense."""
    ids = tf.constant([3, 3, 3, 5])

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        variable, rows = table(ids)
        if params["dense"]:
            rows = tf.one_hot(ids, 8, dtype=tf.float64) @ variable
        loss = tf.reduce_mean(tf.square(rows)) + 0 * tf.reduce_sum(features)
        if params["classic"]:  # model_fn calls the optimizer itself
            made = REPEATED[optimizer]()
            made.apply(tf.gradients(loss, [variable]), [variable])
            return EstimatorSpec(mode, loss=loss, train_op=v1.train.get_global_step().assign_add(1))
        return EstimatorSpec(mode, loss=loss, optimizer=REPEATED[optimizer]())

    def table_of(name: str, strategy: str = "default", *, dense: bool = False, classic: bool = False) -> np.ndarray:
        config = RunConfig(train_distribute=STRATEGIES[strategy])
        trainer = Estimator(model_fn, tmp_path / name, config, {"dense": dense, "classic": classic})
        trainer.train(train_input(6, num_examples=7, dtype="float64"), steps=4)
        return trainer.get_variable_value("table")

    expected = table_of("dense", dense=True)
    assert expected[3] != 1
    np.testing.assert_allclose(table_of("sparse"), expected, rtol=1e-7)
    np.testing.assert_allclose(table_of("mirrored", "mirrored"), expected, rtol=1e-7)
    if optimizer == "adam":  # the optimizer's own clip comes before it sums over replicas
        for strategy in ("default", "mirrored"):
            np.testing.assert_allclose(table_of(f"by {strategy}", strategy, classic=True), expected, rtol=1e-7)


@pytest.mark.parametrize("kind", ["native", "classic", "jit", "parts"])
def test_a_replica_without_an_example_touches_no_row(kind: str, tmp_path: Path) -> None:
    """Momentum of v1 moves the rows that a sparse gradient has, even by a gradient of 0."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rows = tf.fill([tf.shape(features)[0]], tf.cast(replica, tf.int32))
        loss = tf.square(table(rows)[1])[:, 0]
        optimizer = v1.train.MomentumOptimizer(0.1, 0.5)
        if kind == "classic":
            train_op = optimizer.minimize(tf.reduce_mean(loss), v1.train.get_global_step())
            return EstimatorSpec(mode, loss=tf.reduce_mean(loss), train_op=train_op)
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer)

    def input_fn() -> tf.data.Dataset:  # the second step has one example
        return tf.data.Dataset.range(5).map(lambda x: (tf.cast(x, tf.float64)[None], x)).batch(4)

    options: dict[str, Any] = {"jit": kind == "jit", "gradient_accumulation": 2 if kind == "parts" else 1}
    trainer = Estimator(model_fn, tmp_path, RunConfig(train_distribute=STRATEGIES["mirrored"], **options))
    trainer.train(Input(input_fn, params={}, batch_size=4), steps=2)
    first = 0.1 * 2 * 2 / 4  # of each replica's row: rate, derivative, its share of the batch
    second = 0.1 * (0.5 * 1 + 2 * (1 - first))
    np.testing.assert_allclose(trainer.get_variable_value("table")[:3, 0], [1 - first - second, 1 - first, 1])


# --- the loss scale of an optimizer -----------------------------------------------------------------------------


SCALED: dict[str, Any] = {
    "SGD": lambda factor: keras.optimizers.SGD(0.1, loss_scale_factor=factor),
    "Adam": lambda factor: keras.optimizers.Adam(0.1, loss_scale_factor=factor),
    "clips by itself": lambda factor: keras.optimizers.SGD(0.1, global_clipnorm=0.5, loss_scale_factor=factor),
    "wrapped": lambda factor: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=factor)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_global_norm": 0.3, "log_gradient_norm": True},
    "parts": {"gradient_accumulation": 2},
    "mixed": {"precision": "mixed_float16"},
    "eager": {"eager": True},
    "jit": {"jit": True},
}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [*((name, "plain") for name in SCALED), *(("SGD", name) for name in SETTINGS if name != "plain")],
)
def test_a_loss_scale_factor_changes_nothing_but_rounding(optimizer: str, options: str, tmp_path: Path) -> None:
    """It is a power of two: not even that."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        embedded = keras.layers.Embedding(5, 4)(tf.cast(tf.abs(features[:, 0]), tf.int32))
        predictions = tf.cast(
            keras.layers.Dense(1)(tf.concat([embedded, tf.cast(features, embedded.dtype)], 1)), tf.float32
        )
        made = SCALED[optimizer](params["factor"])
        return EstimatorSpec(mode, loss=tf.square(predictions - labels)[:, 0], optimizer=made)

    found = []
    for factor in (None, 4.0):
        trainer = Estimator(
            model_fn, tmp_path / str(factor), RunConfig(tf_random_seed=5, **SETTINGS[options]), {"factor": factor}
        )
        trainer.train(train_input(6, num_examples=19), steps=4)
        found.append({name: trainer.get_variable_value(name) for name in trainer.get_variable_names()})
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value, name)


def test_a_loss_scale_factor_keeps_small_gradients_from_zero(tmp_path: Path) -> None:
    """The backward pass of float16 sees the loss multiplied, as in Keras's `fit`."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        weight = v1.get_variable("weight", [], tf.float32, v1.zeros_initializer())
        loss = tf.cast(tf.cast(weight, tf.float16) * tf.ones([2], tf.float16), tf.float32) * 1e-9
        optimizer = keras.optimizers.SGD(1e9, loss_scale_factor=params["factor"])
        return EstimatorSpec(mode, loss=loss + 0 * tf.reduce_sum(features), optimizer=optimizer)

    for factor, expected in ((None, 0.0), (1e6, -1.0)):
        trainer = Estimator(model_fn, tmp_path / str(factor), RunConfig(), {"factor": factor})
        trainer.train(train_input(2), steps=1)
        assert trainer.get_variable_value("weight") == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    "config",
    [
        {"clip_global_norm": 1.0},
        {"gradient_accumulation": 2},
        {"log_gradient_norm": True},
        {"precision": "mixed_float16"},
        {"learning_rate_scaling": "linear"},
        {"warmup_steps": 3},
    ],
    ids=str,
)
def test_what_needs_the_gradients_is_refused_for_a_train_op_before_the_first_step(
    config: Any, tmp_path: Path, messages: Messages
) -> None:
    trainer = Estimator(line, tmp_path, RunConfig(**config), {})
    with messages.raised(ValueError):
        trainer.train(points(), steps=1)
    assert trainer.latest_checkpoint() is None


# --- accumulation -------------------------------------------------------------------------------------------------


LOSSES = ("per example", "scalar", "weighted", "weighted scalar")
PARTS = {"default": 3, "mirrored": 2, "central_storage": 3}


@pytest.mark.parametrize("loss", slow_but(LOSSES, "weighted"))
def test_parts_of_a_batch_come_to_the_update_of_the_whole_batch(loss: str, tmp_path: Path) -> None:
    params = {"loss": loss, "optimizer": "adam" if loss == "per example" else "sgd"}
    # 25 examples in batches of 12: the last of an epoch has one, so that parts and a replica have none.
    expected = trained(tmp_path / "whole", batch_size=12, examples=25, params=params)
    for strategy, parts in PARTS.items():
        found = trained(
            tmp_path / strategy,
            strategy,
            batch_size=12,
            examples=25,
            params=params,
            gradient_accumulation=parts,
        )
        assert_equal(found, expected, strategy)


def test_parts_run_one_after_the_other(tmp_path: Path) -> None:
    """The backward pass of a part is over before the next part is begun: its memory is free by then."""
    order: list[str] = []

    def note(what: str, value: tf.Tensor) -> tf.Tensor:
        def append(x: tf.Tensor) -> tf.Tensor:
            order.append(what)
            return x

        noted = tf.py_function(append, [value], value.dtype)
        noted.set_shape(value.shape)
        return noted

    @tf.custom_gradient
    def watched(value: tf.Tensor) -> Any:
        return note("forward", value), lambda upstream: note("backward", upstream)

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = watched(keras.layers.Dense(1)(features))
        assert features.shape[0] in (None, 2)
        return EstimatorSpec(mode, predictions, tf.square(predictions - labels)[:, 0], optimizer=keras.optimizers.SGD())

    Estimator(model_fn, tmp_path, RunConfig(gradient_accumulation=4)).train(train_input(8, num_examples=16), steps=2)
    assert order == ["forward", "backward"] * 8


def test_the_step_that_a_part_reads_is_the_one_before_the_update(tmp_path: Path) -> None:
    """Its random operations go by it."""
    seen: list[int] = []

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        step = v1.train.get_global_step().read_value()

        class Look(tf.compat.v1.train.SessionRunHook):
            def before_run(self, context: Any) -> Any:
                return v1.train.SessionRunArgs(step)

            def after_run(self, context: Any, values: Any) -> None:
                seen.append(int(values.results))

        predictions = tf.nn.dropout(keras.layers.Dense(1)(features), 0.1)
        loss = tf.square(predictions - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01), training_hooks=[Look()])

    config = RunConfig(tf_random_seed=5, gradient_accumulation=3)
    Estimator(model_fn, tmp_path, config).train(train_input(6, num_examples=19), steps=12)
    assert seen == list(range(12))


def test_steps_are_updates_and_hooks_and_summaries_see_the_last_part(tmp_path: Path) -> None:
    seen: list[Any] = []

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = keras.layers.Dense(1)(features)
        size = tf.shape(features)[0]
        tf.summary.scalar("rows", size)

        class Look(tf.compat.v1.train.SessionRunHook):
            def before_run(self, context: Any) -> Any:
                return v1.train.SessionRunArgs(size)

            def after_run(self, context: Any, values: Any) -> None:
                seen.append(int(values.results))

        optimizer = keras.optimizers.SGD()
        loss = tf.square(predictions - labels)[:, 0]
        return EstimatorSpec(mode, predictions, loss, optimizer=optimizer, training_hooks=[Look()])

    trainer = Estimator(model_fn, tmp_path, RunConfig(gradient_accumulation=4, save_summary_steps=1))
    run = trainer.train_run(train_input(8, num_examples=15), steps=4)  # batches of 8 and 7
    assert run is not None and run.global_step == 4 and run.examples == 30
    assert seen == [2, 1, 2, 1]
    assert [event.value for event in read_events(tmp_path) if event.tag == "rows"] == [2, 1, 2, 1]


def test_batch_normalization_takes_the_statistics_of_each_part(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        hidden = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")(features, training=mode == "train")
        predictions = keras.layers.Dense(1, dtype="float64")(hidden)
        loss = tf.square(predictions - labels)[:, 0]
        return EstimatorSpec(mode, predictions, loss, optimizer=keras.optimizers.SGD(0.0))

    for strategy in ("default", "mirrored"):
        config = RunConfig(gradient_accumulation=2, train_distribute=STRATEGIES[strategy])
        trainer = Estimator(model_fn, tmp_path / strategy, config)
        trainer.train(lambda: tf.data.Dataset.from_tensors(data(16, "float64")).unbatch().batch(8), steps=1)
        rows = data(16, "float64")[0]
        # default: one batch of 8 in parts of 4; mirrored: a batch of 8 for each replica, in parts of 4.
        parts = (
            [[rows[0:4]], [rows[4:8]]] if strategy == "default" else [[rows[0:4], rows[8:12]], [rows[4:8], rows[12:]]]
        )
        mean = np.zeros(4)
        for replicas in parts:
            mean = 0.5 * mean + 0.5 * np.mean([part.mean(0) for part in replicas], 0)
        np.testing.assert_allclose(trainer.get_variable_value("batch_normalization/moving_mean"), mean, rtol=1e-10)


def test_a_batch_that_does_not_divide_into_parts_is_refused_with_the_two_nearest(
    tmp_path: Path, messages: Messages
) -> None:
    config = RunConfig(gradient_accumulation=3, train_distribute=STRATEGIES["mirrored"])
    with messages.raised(ValueError):
        Estimator(model, tmp_path, config, {}).train(train_input(8, dtype="float64"), steps=1)


def test_a_batch_that_does_not_divide_into_parts_is_refused_at_config_time(messages: Messages) -> None:
    overrides = ["strategy=mirrored", "strategy.virtual_devices=2", "train.gradient_accumulation=4"]
    with messages.raised(ConfigError):
        parsing.parse(composed([*overrides, "input.train.batch_size=20"]))
    assert parsing.parse(composed([*overrides, "input.train.batch_size=16"])).train.gradient_accumulation == 4


# --- all of them --------------------------------------------------------------------------------------------------

TOGETHER: dict[str, Any] = {"clip_global_norm": 0.3, "warmup_steps": 5, "ema_decay": 0.9, "precision": "mixed_float16"}
"""But for learning_rate_scaling, which is there to make a difference between numbers of replicas."""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "v1"])
def test_all_options_together_are_equal_on_every_strategy(optimizer: str, tmp_path: Path) -> None:
    params = {"optimizer": optimizer}
    expected = trained(tmp_path / "whole", batch_size=12, examples=25, params=params, **TOGETHER)
    for strategy in ("default", *SEVERAL):
        found = trained(
            tmp_path / strategy,
            strategy,
            batch_size=12,
            examples=25,
            params=params,
            gradient_accumulation=3,
            **TOGETHER,
        )
        assert_equal(found, expected, strategy)


@pytest.mark.parametrize("strategy", slow_but(SEVERAL, "mirrored"))
def test_a_resumed_run_with_all_options_is_bitwise_the_undisturbed_one(strategy: str, tmp_path: Path) -> None:
    config = RunConfig(
        train_distribute=STRATEGIES[strategy],
        gradient_accumulation=3,
        learning_rate_scaling="sqrt",
        **TOGETHER,
    )
    found = {}
    for folder, stops in (("whole", [8]), ("parts", [3, 8])):
        for stop in stops:
            trainer = Estimator(model, tmp_path / folder, config, {"optimizer": "adam"})
            trainer.train(train_input(12, num_examples=25, dtype="float64"), max_steps=stop)
        found[folder] = {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}
    for name, value in found["whole"].items():
        np.testing.assert_array_equal(found["parts"][name], value, err_msg=name)
