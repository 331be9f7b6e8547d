"""The promises of the engine: names, session semantics, resume, checkpoints, memory, NaN."""

from __future__ import annotations

import functools
import gc
import hashlib
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, Input, ModeKeys, RunConfig
from tests.support.messages import Messages
from tests.support.models import STYLES, classic, eval_input, native, strategies, train_input
from tests.support.tiers import slow_but

v1 = tf.compat.v1
STRATEGIES = strategies()

GOLDEN_NAMES = {
    "native": [
        "dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel", "global_step", "sgd/dense_1_bias_momentum",
        "sgd/dense_1_kernel_momentum", "sgd/dense_bias_momentum", "sgd/dense_kernel_momentum", "sgd/iteration",
        "sgd/learning_rate",
    ],
    "classic": [
        "global_step", "hidden/bias", "hidden/bias/Momentum", "hidden/kernel", "hidden/kernel/Momentum", "out/kernel",
        "out/kernel/Momentum",
    ],
    "keras_model": [
        "global_step", "sequential/dense/bias", "sequential/dense/kernel", "sequential/dense_1/bias",
        "sequential/dense_1/kernel", "sgd/iteration", "sgd/learning_rate", "sgd/sequential_dense_1_bias_momentum",
        "sgd/sequential_dense_1_kernel_momentum", "sgd/sequential_dense_bias_momentum",
        "sgd/sequential_dense_kernel_momentum",
    ],
}  # fmt: skip


def config(strategy: str = "default", **changes: Any) -> RunConfig:
    return RunConfig(train_distribute=STRATEGIES[strategy], **changes)


def variables(trainer: Estimator) -> dict[str, np.ndarray]:
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


def in_memory(trainer: Estimator) -> dict[str, str]:
    """Hash of every variable that the estimator holds, all replicas of it."""
    hashes = {}
    for model in trainer._models._by_strategy.values():
        for name, variable in model.store.saved.items():
            copies = getattr(variable, "values", None) or [variable]
            hashes[name] = hashlib.sha256(b"".join(copy.numpy().tobytes() for copy in copies)).hexdigest()
    return hashes


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "strategy"),
    slow_but(
        [("native", "default"), ("native", "mirrored"), ("native", "central_storage"), ("classic", "mirrored"),
         ("classic", "central_storage"), ("keras_model", "mirrored"), ("keras_model", "one_device")],
        ("keras_model", "mirrored"), ("native", "default"), ("classic", "central_storage"),
    ),
)  # fmt: skip
def test_names_of_variables_are_the_golden_ones(style: str, strategy: str, tmp_path: Path) -> None:
    trainer = Estimator(STYLES[style], tmp_path, config(strategy)).train(train_input(8), steps=1)
    assert trainer.get_variable_names() == GOLDEN_NAMES[style]
    trainer.evaluate(eval_input(8))
    list(trainer.predict(eval_input(8)))
    (model,) = trainer._models._by_strategy.values()
    assert sorted(model.store.saved) == GOLDEN_NAMES[style], "evaluation and prediction asked for other names"


def test_a_keras_model_of_the_user_does_not_shift_names(tmp_path: Path) -> None:
    keras.layers.Dense(3)
    Estimator(native, tmp_path).train(train_input(8), steps=1)
    assert keras.layers.Dense(3).name.startswith("dense_"), "the user's own counters go on"
    assert Estimator(native, tmp_path).get_variable_names() == GOLDEN_NAMES["native"]


def test_a_name_has_one_shape_in_all_modes(tmp_path: Path, messages: Messages) -> None:
    def wide_in_eval(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        size = 4 if mode == ModeKeys.TRAIN else 2
        predictions = features[:, :size] @ v1.get_variable("dense/kernel", [size, 1])
        loss = tf.reduce_mean(tf.square(predictions - labels))
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))

    trainer = Estimator(wide_in_eval, tmp_path).train(train_input(8), steps=1)
    with messages.raised(ValueError):
        trainer.evaluate(eval_input(8))
    with messages.raised(ValueError):
        Estimator(wide_in_eval, tmp_path).evaluate(eval_input(8))


def test_a_variable_that_train_never_made_is_named(tmp_path: Path, messages: Messages) -> None:
    def more_in_eval(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = features @ v1.get_variable("kernel", [4, 1])
        if mode == ModeKeys.EVAL:
            predictions += v1.get_variable("late", [1])
        return EstimatorSpec(mode, loss=tf.square(predictions - labels)[:, 0], optimizer=keras.optimizers.SGD(0.1))

    trainer = Estimator(more_in_eval, tmp_path).train(train_input(8), steps=1)
    with messages.raised(ValueError):
        trainer.evaluate(eval_input(8))


def test_initial_values_are_a_function_of_seed_and_name(tmp_path: Path) -> None:
    found = {}
    for strategy in STRATEGIES:
        trainer = Estimator(classic, tmp_path / strategy, config(strategy, tf_random_seed=3))
        trainer.train(train_input(8), steps=1)
        found[strategy] = Estimator(classic, tmp_path / strategy).get_variable_value("hidden/kernel")
    first = tf.train.load_checkpoint(str(tmp_path / "default/model.ckpt-0")).get_tensor("hidden/kernel")
    for strategy in STRATEGIES:
        reader = tf.train.load_checkpoint(str(tmp_path / strategy / "model.ckpt-0"))
        np.testing.assert_array_equal(reader.get_tensor("hidden/kernel"), first)
    other = Estimator(classic, tmp_path / "other", config(tf_random_seed=4)).train(train_input(8), steps=1)
    assert not np.array_equal(other.get_variable_value("hidden/kernel"), found["default"])


def test_symbolic_initial_values_are_computed_once(tmp_path: Path) -> None:
    def symbolic(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        start = tf.Variable(tf.random.normal([4, 1], seed=1) * 0 + 2.0, name="start")
        twice = tf.Variable(tf.fill([1], 3.0), name="twice", trainable=False)
        loss = tf.reduce_mean(tf.square(features @ start + twice - labels))
        train_op = v1.train.GradientDescentOptimizer(0.0).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    for strategy in STRATEGIES:
        trainer = Estimator(symbolic, tmp_path / strategy, config(strategy)).train(train_input(8), steps=2)
        np.testing.assert_array_equal(trainer.get_variable_value("start"), np.full([4, 1], 2.0))
        np.testing.assert_array_equal(trainer.get_variable_value("twice"), [3.0])


# --- session semantics ----------------------------------------------------------------------------------------


def with_normalization(style: str) -> Any:
    """A model_fn with BatchNorm and Dropout that are always on (`training=True`), also in EVAL and PREDICT."""

    def native_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8)(features), training=True)
        predictions = keras.layers.Dense(1)(keras.layers.Dropout(0.3)(hidden, training=True))
        optimizer = keras.optimizers.Adam(0.01)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        return EstimatorSpec(mode, predictions, tf.square(predictions - labels)[:, 0], optimizer=optimizer)

    def classic_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        hidden = keras.layers.BatchNormalization()(features, training=True)
        predictions = hidden @ v1.get_variable("kernel", [4, 1])
        labels = tf.zeros_like(predictions) if labels is None else labels
        loss = tf.reduce_mean(tf.square(predictions - labels))
        average = v1.get_variable("average", [], trainable=False, initializer=v1.zeros_initializer())
        v1.assign_add(average, tf.reduce_sum(loss))  # built, and fetched by nobody
        train_op = v1.train.AdamOptimizer(0.01).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, predictions, loss, train_op)

    def keras_fn(features: Any, labels: Any, mode: str) -> keras.Model:
        class Always(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.normalization, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)
                self.dropout = keras.layers.Dropout(0.3)

            def call(self, inputs: Any, training: bool = False) -> Any:
                return self.dense(self.dropout(self.normalization(inputs, training=True), training=True))

        model = Always()
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        return model

    return {"native": native_fn, "classic": classic_fn, "keras_model": keras_fn}[style]


@pytest.mark.parametrize(
    ("style", "strategy"),
    slow_but(
        [("native", "default"), ("native", "mirrored"), ("classic", "mirrored"), ("classic", "central_storage"),
         ("keras_model", "mirrored")],
        ("native", "default"), ("classic", "mirrored"),
    ),
)  # fmt: skip
def test_evaluate_and_predict_change_no_variable(style: str, strategy: str, tmp_path: Path) -> None:
    trainer = Estimator(with_normalization(style), tmp_path, config(strategy)).train(train_input(8), steps=3)
    trainer.evaluate(eval_input(8))
    list(trainer.predict(eval_input(8)))
    before = in_memory(trainer)
    metrics = trainer.evaluate(eval_input(8))
    first = [np.asarray(tf.nest.flatten(p)[0]) for p in trainer.predict(eval_input(8))]
    second = [np.asarray(tf.nest.flatten(p)[0]) for p in trainer.predict(eval_input(8))]
    assert in_memory(trainer) == before
    assert metrics["global_step"] == 3
    np.testing.assert_array_equal(first, second, "random state restarts from the seed at each call")
    assert trainer.evaluate(eval_input(8))["loss"] == metrics["loss"]
    if style == "classic":
        assert trainer.get_variable_value("average") == 0, "what nobody fetches does not run"
    moving = next(name for name in trainer.get_variable_names() if name.endswith("moving_mean"))
    assert np.abs(trainer.get_variable_value(moving)).max() > 0, "in training, Keras updates its own statistics"


def test_plain_batch_normalization_averages_by_examples(tmp_path: Path) -> None:
    """Its statistics are per replica; the moving mean is their example-weighted mean, that of the whole batch."""
    means = {}
    for strategy in ("default", "mirrored"):
        trainer = Estimator(with_normalization("classic"), tmp_path / strategy, config(strategy))
        trainer.train(train_input(6, num_examples=19), steps=8)  # the last batch of an epoch is one example
        means[strategy] = trainer.get_variable_value("batch_normalization/moving_mean")
    np.testing.assert_allclose(means["mirrored"], means["default"], rtol=1e-5, atol=1e-7)


def test_native_effects_run_in_program_order(tmp_path: Path) -> None:
    def counting(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        total = tf.Variable(0.0, trainable=False, name="total")
        seen = tf.Variable(0.0, trainable=False, name="seen")
        total.assign_add(1.0)
        seen.assign(total.read_value() * 10)
        tf.cond(total > 2.0, lambda: total.assign_add(0.5), lambda: total.read_value())
        predictions = keras.layers.Dense(1)(features)
        return EstimatorSpec(mode, loss=tf.square(predictions - labels)[:, 0], optimizer=keras.optimizers.SGD(0.01))

    trainer = Estimator(counting, tmp_path).train(train_input(8), steps=4)
    # After each step: 1, 2, 3 (+ 0.5), 4.5 (+ 0.5); seen is taken before the branch.
    assert trainer.get_variable_value("total") == 5.0
    assert trainer.get_variable_value("seen") == 45.0


@pytest.mark.parametrize("strategy", slow_but(STRATEGIES, "default", "mirrored"))
def test_classic_example_of_tf_estimator(strategy: str, tmp_path: Path) -> None:
    """get_variable, GradientDescentOptimizer, minimize(loss, global_step): the gradient is the mean over examples."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        w = v1.get_variable("w", [], initializer=v1.zeros_initializer())
        predictions = w * features
        loss = v1.losses.mean_squared_error(labels, predictions)
        optimizer = v1.train.GradientDescentOptimizer(params["learning_rate"])
        train_op = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        metrics = {"mae": v1.metrics.mean_absolute_error(labels, predictions)}
        return EstimatorSpec(mode, predictions, loss, train_op, metrics)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((tf.ones([4]), tf.fill([4], 2.0))).repeat()

    trainer = Estimator(model_fn, tmp_path, config(strategy), params={"learning_rate": 0.1})
    trainer.train(Input(input_fn, batch_size=4), steps=1)
    assert trainer.get_variable_value("w") == pytest.approx(0.4), "SUM over replicas would give 0.8"
    trainer.train(Input(input_fn, batch_size=4), steps=1)
    assert trainer.get_variable_value("w") == pytest.approx(0.72)
    found = trainer.evaluate(Input(input_fn, batch_size=4), steps=2)
    assert found == {"loss": pytest.approx(1.28**2), "mae": pytest.approx(1.28), "global_step": 2}


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_keras_optimizer_in_a_train_op_trains_plain_variables(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        kernel = v1.get_variable("kernel", [4, 1], initializer=v1.zeros_initializer())
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(features @ kernel - labels))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.apply(tape.gradient(loss, [kernel]), [kernel])
        return EstimatorSpec(mode, loss=loss, train_op=v1.assign_add(v1.train.get_global_step(), 1))

    trainer = Estimator(model_fn, tmp_path / strategy, config(strategy)).train(train_input(6, num_examples=19), steps=5)
    alone = Estimator(model_fn, tmp_path / "alone").train(train_input(6, num_examples=19), steps=5)
    expected = alone.get_variable_value("kernel")
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(trainer.get_variable_value("kernel"), expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_of_a_train_op_that_does_not_count_are_counted(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = tf.reduce_mean(tf.square(features @ v1.get_variable("kernel", [4, 1]) - labels))
        return EstimatorSpec(mode, loss=loss, train_op=v1.train.GradientDescentOptimizer(0.1).minimize(loss))

    trainer = Estimator(model_fn, tmp_path, config(strategy)).train(train_input(8), max_steps=3)
    assert trainer.get_variable_value("global_step") == 3
    messages.logged(caplog, "train_op")


def test_train_op_that_never_advances_the_global_step_in_its_branch_is_refused(
    tmp_path: Path, messages: Messages
) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = tf.reduce_mean(tf.square(features @ v1.get_variable("kernel", [4, 1]) - labels))
        step = v1.train.get_global_step()
        train_op = tf.cond(loss < 0, lambda: step.assign_add(1, read_value=False), tf.no_op)
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    with messages.raised(ValueError):
        Estimator(model_fn, tmp_path).train(train_input(8), steps=3)


# --- examples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_example_is_trained_on_once_per_epoch(strategy: str, tmp_path: Path) -> None:
    """Ids recorded inside model_fn, by the replicas that saw them."""

    def recording(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        counts = tf.Variable(tf.zeros([23], tf.int32), name="counts", trainable=False,
                             synchronization=tf.VariableSynchronization.ON_READ,
                             aggregation=tf.VariableAggregation.SUM)  # fmt: skip
        one_hot = tf.reduce_sum(tf.one_hot(features["id"], 23, dtype=tf.int32), 0)
        counts.assign_add(one_hot)
        predictions = keras.layers.Dense(1)(features["x"])
        return EstimatorSpec(mode, loss=tf.square(predictions - labels)[:, 0], optimizer=keras.optimizers.SGD(0.01))

    def input_fn() -> tf.data.Dataset:
        features = {"id": np.arange(23), "x": np.ones([23, 2], np.float32)}
        dataset = tf.data.Dataset.from_tensor_slices((features, np.ones([23, 1], np.float32)))
        return dataset.shuffle(23, seed=2).batch(5 if strategy == "default" else 6).repeat(3)

    batch_size = 5 if strategy == "default" else 6
    trainer = Estimator(recording, tmp_path, config(strategy)).train(Input(input_fn, batch_size=batch_size))
    np.testing.assert_array_equal(trainer.get_variable_value("counts"), np.full(23, 3))


# --- resume and checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "strategy"),
    slow_but(
        [("native", "mirrored"), ("classic", "default"), ("classic", "mirrored"), ("keras_model", "default")],
        ("classic", "mirrored"), ("keras_model", "default"),
    ),
)  # fmt: skip
def test_stopping_and_resuming_changes_no_bit(style: str, strategy: str, tmp_path: Path) -> None:
    model_fn = with_normalization(style)
    through = Estimator(model_fn, tmp_path / "through", config(strategy)).train(train_input(8), max_steps=40)
    Estimator(model_fn, tmp_path / "resumed", config(strategy)).train(train_input(8), max_steps=20)
    resumed = Estimator(model_fn, tmp_path / "resumed", config(strategy)).train(train_input(8), max_steps=40)
    expected, found = variables(through), variables(resumed)
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("style", slow_but(STYLES, "classic"))
def test_a_checkpoint_moves_between_strategies(style: str, tmp_path: Path) -> None:
    for step, strategy in enumerate([*STRATEGIES, "default"], start=1):
        trainer = Estimator(STYLES[style], tmp_path, config(strategy)).train(train_input(8), steps=1)
        assert trainer.get_variable_value("global_step") == step
    through = Estimator(STYLES[style], tmp_path / "through").train(train_input(8), steps=5)
    for name, value in variables(trainer).items():
        np.testing.assert_allclose(value, through.get_variable_value(name), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("style", slow_but(STYLES, "classic"))
def test_a_plain_saver_reads_the_checkpoint_of_mirrored(style: str, tmp_path: Path) -> None:
    trainer = Estimator(STYLES[style], tmp_path, config("mirrored")).train(train_input(8), steps=3)
    expected = variables(trainer)
    with tf.Graph().as_default(), v1.Session() as session:
        targets = {n: v1.get_variable(n, value.shape, tf.as_dtype(value.dtype)) for n, value in expected.items()}
        v1.train.Saver(targets).restore(session, trainer.latest_checkpoint())
        for name, value in session.run(targets).items():
            np.testing.assert_array_equal(value, expected[name])


# --- long runs ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored"], "mirrored"))
def test_fifty_evaluations_and_predictions_trace_nothing_and_leak_nothing(strategy: str, tmp_path: Path) -> None:
    """tf.estimator built each anew and lost up to 500 MB by it (tensorflow issues 13895, 31021, 32052)."""
    trainer = Estimator(native, tmp_path, config(strategy)).train(train_input(8), steps=3)

    def both() -> None:
        trainer.evaluate(eval_input(8))
        list(trainer.predict(eval_input(8)))

    for _ in range(5):
        both()
    (model,) = trainer._models._by_strategy.values()
    gc.collect()
    traces, before = len(model._programs), psutil.Process().memory_info().rss
    functions = [function for program in _inference(model) for function in _functions(program)]
    counts = [function.experimental_get_tracing_count() for function in functions]
    for _ in range(50):
        both()
    gc.collect()
    assert len(model._programs) == traces
    assert [function.experimental_get_tracing_count() for function in functions] == counts == [1, 1]
    assert psutil.Process().memory_info().rss - before < 20e6


class GivesNumbers(Hook):
    """Gives TensorFlow other numbers at each step, as hooks do that write events, and notes the memory in bytes."""

    every = Every(steps=1)

    def __init__(self) -> None:
        self.rss: list[int] = []

    def after_step(self, run: Any, result: Any) -> None:
        for number in range(20_000):
            tf.constant(result.last_step * 20_000 + number, tf.int64)
        self.rss.append(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_numbers_that_hooks_give_to_tensorflow_are_not_kept(tmp_path: Path) -> None:
    """TensorFlow keeps a tensor of each number for ever: 15 MB of those of a step here."""
    hook = GivesNumbers()
    trainer = Estimator(native, tmp_path, config("default"))
    trainer.train(train_input(8), hooks=[hook], max_steps=12)
    assert hook.rss[-1] - hook.rss[1] < 75e6  # 150 MB if they were kept


def _functions(program: Any) -> list[Any]:
    return [program._loop] if hasattr(program, "_loop") else list(program._fetching.values())


def _inference(model: Any) -> list[Any]:
    return [program for key, program in model._programs.items() if key[0] != "train"]


@pytest.mark.parametrize("style", slow_but(STYLES, "classic"))
def test_nan_is_named_at_its_exact_step(style: str, tmp_path: Path, messages: Messages) -> None:
    poisoned = 437

    def input_fn(params: Any) -> tf.data.Dataset:
        dataset = train_input(8).fn(params=params).enumerate(start=1)

        def plant(step: tf.Tensor, batch: Any) -> Any:
            features, labels = batch
            # The last row: that of the second replica.
            rows = tf.range(tf.shape(labels)[0])[:, None] == tf.shape(labels)[0] - 1
            return features, tf.where((step == poisoned) & rows, float("nan"), labels)

        return dataset.map(plant)

    trainer = Estimator(STYLES[style], tmp_path, config("mirrored", steps_per_loop=1000))
    with messages.raised(v1.train.NanLossDuringTrainingError) as caught:
        trainer.train(Input(input_fn, params={}, batch_size=8), steps=1000)
    kernel = next(name for name in GOLDEN_NAMES[style] if name.endswith("kernel"))
    assert kernel in str(caught.value), "it names what became NaN"
    assert trainer.latest_checkpoint() == str(tmp_path / "model.ckpt-0"), "no broken state is saved"


class _Loops(Hook):
    """Where loops ended."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.ends.append(result.last_step)


def test_loops_grow_and_end_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    trainer = Estimator(native, tmp_path, config(save_checkpoints_steps=30, keep_checkpoint_max=None))
    trainer.train(train_input(8), hooks=[loops := _Loops()], max_steps=100)
    assert {30, 60, 90, 100} <= set(loops.ends)
    assert len(loops.ends) < 20, "loops hold many steps"
    saved = sorted(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("*.index"))
    assert saved == [0, 30, 60, 90, 100]


def test_a_finite_input_of_unknown_length_ends_training(tmp_path: Path) -> None:
    def input_fn(params: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((np.ones([10, 4], np.float32), np.ones([10, 1], np.float32)))
        return dataset.filter(lambda *_: True).batch(params["batch_size"])

    source = Input(input_fn, params={}, batch_size=4)
    for strategy in ("default", "mirrored"):
        trainer = Estimator(native, tmp_path / strategy, config(strategy)).train(source)
        assert trainer.get_variable_value("global_step") == 3
        trainer.train(source)
        assert trainer.get_variable_value("global_step") == 6, "the next call starts from the beginning"


def points(first: int = 0) -> tf.data.Dataset:
    """Five batches of two, then the end; the feature tells which example it is."""
    x = np.arange(first, first + 10, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((np.repeat(x, 4, axis=1), x)).batch(2)


def recording(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Keeps the label of the last example that it trained on."""
    last = tf.Variable(-1.0, trainable=False, name="last")
    last.assign(labels[-1, 0])
    loss = tf.square(keras.layers.Dense(1)(features) - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.0))


def test_epochs_are_trained_by_calls(tmp_path: Path) -> None:
    trainer = Estimator(recording, tmp_path)
    steps = [trainer.train(points, steps=5).get_variable_value("global_step") for _ in range(3)]
    assert steps == [5, 10, 15]
    steps = [trainer.train(points, steps=3).get_variable_value("global_step") for _ in range(2)]
    assert steps == [18, 21]
    assert trainer.get_variable_value("last") == 5


def test_a_new_process_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    Estimator(recording, tmp_path).train(points, steps=3)
    trainer = Estimator(recording, tmp_path).train(points)
    assert trainer.get_variable_value("global_step") == 5
    assert Estimator(recording, tmp_path).train(points).get_variable_value("global_step") == 10


def test_an_input_of_unknown_length_that_was_read_to_its_end_starts_again(tmp_path: Path) -> None:
    def unknown() -> tf.data.Dataset:
        return points().filter(lambda *_: True)

    Estimator(recording, tmp_path).train(unknown, steps=5)
    assert Estimator(recording, tmp_path).train(unknown).get_variable_value("global_step") == 10


def test_another_input_function_starts_from_its_own_beginning(tmp_path: Path) -> None:
    trainer = Estimator(recording, tmp_path)
    for first, expected in ((0, 3), (100, 103)):
        trainer.train(functools.partial(points, first), steps=2)
        assert trainer.get_variable_value("last") == expected
    other = Estimator(recording, tmp_path).train(functools.partial(points, 200), steps=1)
    assert other.get_variable_value("last") == 201, "a partial is told from another by what is bound to it"


def test_an_emptied_model_dir_is_a_new_model(tmp_path: Path) -> None:
    trainer = Estimator(recording, tmp_path / "run").train(points, steps=5)
    shutil.rmtree(tmp_path / "run")
    assert trainer.train(points, steps=2).get_variable_value("global_step") == 2


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_metrics_of_any_dtype_and_rank_are_means_over_examples(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = native(features, labels, mode)
        squared = tf.square(labels[:, 0])
        metrics = {
            "scalar": tf.reduce_mean(squared),
            "each": squared,
            "bool": labels[:, 0] > 0,
            "bytes": tf.fill(tf.shape(squared), tf.constant(100, tf.uint8)),
        }
        return spec._replace(eval_metric_ops=metrics if mode == ModeKeys.EVAL else None)

    trainer = Estimator(model_fn, tmp_path, config(strategy)).train(train_input(8), steps=1)
    labels = np.concatenate([y for _, y in eval_input(22).fn(params={"batch_size": 22})])[:, 0]
    for batch_size in (4, 22):
        found = trainer.evaluate(eval_input(batch_size))
        assert found["each"] == pytest.approx(np.mean(labels**2), rel=1e-6)
        assert found["scalar"] == pytest.approx(np.mean(labels**2), rel=1e-6)
        assert found["bool"] == pytest.approx(np.mean(labels > 0)) and found["bytes"] == 100


@pytest.mark.parametrize("wrap", ["function", "branch"])
def test_evaluation_leaves_what_layers_write_in_a_branch(wrap: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layer = keras.layers.BatchNormalization()
        layer.build(features.shape)
        if wrap == "function":
            hidden = tf.function(lambda x: layer(x, training=True), autograph=False)(features)
        else:
            hidden = tf.cond(tf.reduce_sum(labels) > -1e9, lambda: layer(features, training=True), lambda: features)
        loss = tf.square(keras.layers.Dense(1)(hidden) - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))

    trainer = Estimator(model_fn, tmp_path).train(train_input(8), steps=3)
    before = variables(trainer)
    assert np.abs(before["batch_normalization/moving_mean"]).max() > 0
    first = trainer.evaluate(eval_input(8))
    hashes = in_memory(trainer)
    assert trainer.evaluate(eval_input(8)) == first
    assert in_memory(trainer) == hashes


def test_dropout_differs_between_replicas_and_not_between_runs(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        dropped = keras.layers.Dropout(0.5)(tf.ones_like(features), training=True)
        masks = tf.Variable(tf.zeros([2, 4]), trainable=False, name="masks",
                            synchronization=tf.VariableSynchronization.ON_READ,
                            aggregation=tf.VariableAggregation.SUM)  # fmt: skip
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        masks.assign(tf.one_hot(replica, 2)[:, None] * dropped[0])
        loss = tf.square(keras.layers.Dense(1)(dropped) - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))

    found = []
    for name in ("one", "two"):
        trainer = Estimator(model_fn, tmp_path / name, config("mirrored")).train(train_input(8), steps=3)
        found.append(trainer.get_variable_value("masks"))
    assert not np.array_equal(found[0][0], found[0][1])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_moving_averages_of_v1_start_at_the_initial_values(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        kernel = v1.get_variable("kernel", [4, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.square(features @ kernel - labels))
        minimize = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        with tf.control_dependencies([minimize]):
            train_op = v1.train.ExponentialMovingAverage(0.5).apply([kernel])
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    trainer = Estimator(model_fn, tmp_path, config(strategy)).train(train_input(8), steps=1)
    kernel = trainer.get_variable_value("kernel")
    average = trainer.get_variable_value("kernel/ExponentialMovingAverage")
    np.testing.assert_allclose(average, (1 + kernel) / 2, rtol=1e-6)


def test_a_learning_rate_that_the_checkpoint_overrides_is_said(tmp_path: Path, caplog: Any, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        loss = tf.square(keras.layers.Dense(1)(features) - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(params["rate"]))

    Estimator(model_fn, tmp_path, params={"rate": 0.1}).train(train_input(8), steps=1)
    Estimator(model_fn, tmp_path, params={"rate": 0.5}).train(train_input(8), steps=1)
    messages.logged(caplog, "sgd/learning_rate")


def test_what_cannot_be_in_a_branch_on_replicas_is_explained(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layer, optimizer = keras.layers.Dense(1), keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(features) - labels))
        gradients = tape.gradient(loss, layer.trainable_weights)
        optimizer.build(layer.trainable_weights)
        tf.cond(loss > 0, lambda: optimizer.apply(gradients), lambda: None)
        return EstimatorSpec(mode, loss=loss, train_op=loss)

    Estimator(model_fn, tmp_path / "default").train(train_input(8), steps=2)
    with pytest.raises(RuntimeError, match="merge_call") as caught:
        Estimator(model_fn, tmp_path / "mirrored", config("mirrored")).train(train_input(8), steps=2)
    assert "train.gradient_accumulation" in caught.value.__notes__[0]
