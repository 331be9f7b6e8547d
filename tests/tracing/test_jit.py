"""`train.jit`: XLA compiles the gradients; the numbers stay, and what cannot be compiled is refused with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.config import validation
from runner.config.schema import ConfigError, StrategyConfig
from tests.config.test_config import parsed
from tests.programs.test_optimizer_step import assert_equal, trained
from tests.support.line import line, points
from tests.support.messages import Messages
from tests.support.models import native, strategies, train_input
from tests.support.tiers import slow_but

v1 = tf.compat.v1
STRATEGIES = strategies()
layers = keras.layers


def values_of(trainer: Estimator) -> dict[str, np.ndarray]:
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


def model_of(body: Callable[[Any, bool], Any]) -> Callable[..., EstimatorSpec]:
    """A model_fn in float64 whose predictions are `body(features, training)` and a dense layer."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = layers.Dense(1, dtype="float64")(body(features, mode == "train"))
        optimizer = keras.optimizers.SGD(0.03, momentum=0.5)
        return EstimatorSpec(mode, predictions, tf.square(predictions - labels)[:, 0], optimizer=optimizer)

    return model_fn


def run(model_fn: Any, model_dir: Path, strategy: str = "default", *, steps: int = 7, **config: Any) -> Estimator:
    """19 examples in batches of 6: the last of an epoch has one, so that a replica has none."""
    run_config = RunConfig(tf_random_seed=5, train_distribute=STRATEGIES[strategy], **config)
    return Estimator(model_fn, model_dir, run_config).train(train_input(6, 19, "float64"), steps=steps)


# --- the numbers --------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clipped parts with averages": {"gradient_accumulation": 3, "clip_global_norm": 0.3, "ema_decay": 0.9},
    "a weighted loss with Adam": {"params": {"loss": "weighted", "optimizer": "adam"}},
}


@pytest.mark.parametrize("options", slow_but(OPTIONS, "clipped parts with averages"))
def test_numbers_are_those_of_a_step_that_is_not_compiled(options: str, tmp_path: Path) -> None:
    """An embedding with sparse gradients, uneven batches, replicas without an example."""
    chosen = OPTIONS[options]
    expected = trained(tmp_path / "expected", **chosen)
    for strategy in ("default", "mirrored") if chosen else STRATEGIES:
        assert_equal(trained(tmp_path / strategy, strategy, jit=True, **chosen), expected, strategy)


@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored"], "default"))
def test_a_loss_scale_is_that_of_a_step_that_is_not_compiled(strategy: str, tmp_path: Path) -> None:
    found, expected = (
        values_of(run(native, tmp_path / str(jit), strategy, jit=jit, precision="mixed_float16"))
        for jit in (True, False)
    )
    assert found["loss_scale/step_counter"] == 7
    assert_equal(found, expected)


def test_bfloat16_is_compiled(tmp_path: Path) -> None:
    """Layers that are given no dtype compute in it; XLA rounds at other places."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        hidden = layers.Dense(8, activation="tanh")(features)
        assert hidden.dtype == tf.bfloat16
        loss = tf.square(tf.cast(layers.Dense(1)(hidden), labels.dtype) - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.03))

    found, expected = (
        values_of(run(model_fn, tmp_path / str(jit), jit=jit, precision="mixed_bfloat16")) for jit in (True, False)
    )
    assert found["dense/kernel"].dtype == np.float32
    np.testing.assert_allclose(found["dense/kernel"], expected["dense/kernel"], atol=0.02)


class Seen(tf.compat.v1.train.SessionRunHook):
    """What a hook fetched: an activation of each step, and the loss."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        graph = run_context.session.graph
        return v1.train.SessionRunArgs([graph.get_tensor_by_name("seen:0"), graph.get_tensor_by_name("total:0")])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values.append(run_values.results)


def with_everything(features: Any, training: bool) -> Any:
    """State that the layers move (moving averages), checks, summaries, a branch, a loop, a function."""
    x = layers.Dense(4, dtype="float64")(features)
    x = tf.identity(layers.BatchNormalization(dtype="float64")(x, training=training), "seen")
    total = tf.reduce_sum(x, name="total")
    tf.debugging.assert_all_finite(x, "not finite")
    tf.summary.scalar("total", total)
    v1.summary.histogram("activation", x)
    x = tf.cond(tf.reduce_sum(features) > 0, lambda: x * 2.0, lambda: x)
    _, x = tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.tanh(x)), [0, x], maximum_iterations=3)
    x = tf.function(tf.nn.softplus)(x)
    return layers.Flatten(dtype="float64")(layers.Conv1D(3, 2, dtype="float64")(x[:, :, None]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored"], "default"))
def test_what_else_a_step_does_is_done_with_the_values_of_the_compiled_step(strategy: str, tmp_path: Path) -> None:
    found: dict[bool, Any] = {}
    for jit in (True, False):
        hook = Seen()
        config = RunConfig(tf_random_seed=5, train_distribute=STRATEGIES[strategy], jit=jit, save_summary_steps=2)
        trainer = Estimator(model_of(with_everything), tmp_path / str(jit), config)
        trainer.train(train_input(6, 19, "float64"), steps=7, hooks=[hook])
        found[jit] = (values_of(trainer), hook.values)
    assert_equal(found[True][0], found[False][0])
    assert not np.allclose(found[True][0]["batch_normalization/moving_mean"], 0)
    assert len(found[True][1]) == 7
    for ours, expected in zip(found[True][1], found[False][1], strict=True):
        for one, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def with_draws(features: Any, training: bool) -> Any:
    x = layers.Dropout(0.5, dtype="float64")(layers.Dense(8, dtype="float64")(features), training=training)
    return tf.nn.dropout(x, 0.3) + tf.random.normal(tf.shape(x), stddev=0.1, dtype=x.dtype)


@pytest.mark.slow
def test_draws_are_a_function_of_seed_and_step_and_a_resumed_run_is_bitwise_the_undisturbed_one(tmp_path: Path) -> None:
    model_fn = model_of(with_draws)
    whole = values_of(run(model_fn, tmp_path / "whole", jit=True, steps=6))
    run(model_fn, tmp_path / "resumed", jit=True, steps=3)
    resumed = values_of(run(model_fn, tmp_path / "resumed", jit=True, steps=3))
    other = values_of(run(model_fn, tmp_path / "other", jit=True, steps=3))
    assert all(np.array_equal(resumed[name], value) for name, value in whole.items())
    assert not np.array_equal(other["dense/kernel"], whole["dense/kernel"])


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_xla_compiles_one_function_a_replica_and_nothing_else_of_the_model(strategy: str, tmp_path: Path) -> None:
    trainer = Estimator(native, tmp_path, RunConfig(jit=True, train_distribute=STRATEGIES[strategy]))
    run = trainer.train_run(train_input(6, 19), max_steps=2)
    assert run is not None
    library = {function.signature.name: function for function in tf_library(trainer)}
    compiled = [one for one in library.values() if one.attr["_XlaMustCompile"].b]
    assert len(compiled) == {"default": 1, "mirrored": 2}[strategy]
    assert all("MatMul" in {node.op for node in one.node_def} for one in compiled)
    others = [node.op for one in library.values() if one not in compiled for node in one.node_def]
    assert "MatMul" not in others and "ReadVariableOp" in others


def tf_library(trainer: Estimator) -> Any:
    """The functions of the training loop."""
    (program,) = (one for key, one in trainer._models.for_training._programs.items() if key[0] == "train")
    loop = program.loop()._bounded
    return loop._list_all_concrete_functions()[0].graph.as_graph_def().library.function


# --- what is refused ----------------------------------------------------------------------------------------------


def in_python(features: Any, training: bool) -> Any:
    doubled = tf.py_function(lambda x: x * 2, [features], tf.float64)
    doubled.set_shape(features.shape)
    return doubled


def of_strings(features: Any, training: bool) -> Any:
    buckets = tf.strings.to_hash_bucket_fast(tf.strings.as_string(features[:, 0]), 7)
    return tf.concat([features, tf.one_hot(buckets, 7, dtype=tf.float64)], 1)


def recurrent(features: Any, training: bool) -> Any:
    return layers.LSTM(4, dtype="float64")(features[:, :, None])


def without_an_end(features: Any, training: bool) -> Any:
    x = layers.Dense(4, dtype="float64")(features)
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.tanh(x)), [0, x])[1]


def synchronized(features: Any, training: bool) -> Any:
    return layers.BatchNormalization(synchronized=True, dtype="float64")(
        layers.Dense(4, dtype="float64")(features), training=training
    )


def reading_what_it_wrote(features: Any, training: bool) -> Any:
    x = layers.Dense(4, dtype="float64")(features)
    mean = v1.get_variable("mean", [4], tf.float64, trainable=False)
    with tf.control_dependencies([mean.assign(tf.reduce_mean(x, 0))]):
        return x - mean.read_value()


@pytest.mark.parametrize(
    ("body", "strategy"),
    [
        (in_python, "default"),
        (of_strings, "mirrored"),
        (recurrent, "default"),
        (without_an_end, "default"),
        (synchronized, "mirrored"),
        (reading_what_it_wrote, "default"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_xla_cannot_compile_is_refused_before_the_first_update(
    body: Any, strategy: str, tmp_path: Path, messages: Messages
) -> None:
    with messages.raised(ValueError, hide=r"(?<=')dense\w*|(?<=of this model: ).*(?=\. Set train)"):
        run(model_of(body), tmp_path, strategy, jit=True)
    assert not list(tmp_path.glob("model.ckpt-[1-9]*"))


def test_a_train_op_is_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        Estimator(line, tmp_path, RunConfig(jit=True), {}).train(points(), steps=1)


def test_strategies_on_which_it_was_not_tried_are_refused(messages: Messages) -> None:
    tried = parsed("strategy=mirrored", "strategy.virtual_devices=2", "train.jit=true")
    assert tried.train.jit
    with messages.raised(ConfigError):
        validation.check(dataclasses.replace(tried, strategy=StrategyConfig(name="multi_worker")))
