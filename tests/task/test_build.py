"""From config to a run, in this process: the shipped inputs on real files, the strategy of evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import EstimatorSpec, train_and_evaluate
from runner.config import parsing
from runner.data.inputs import build_input_pipeline
from runner.data.sharding import WorkerPlace
from runner.system.console import Progress
from runner.task.build import Job, build_job
from runner.tracking.journal import NullJournal
from tests.config.test_config import composed


def line(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A line through the points of x and y; what `model.fn=tests.task.test_build.line` names."""
    prediction = keras.layers.Dense(1)(tf.reshape(features["x"], [-1, 1]))[:, 0]
    if labels is None:
        return EstimatorSpec(mode, predictions=prediction)
    loss = tf.square(prediction - tf.reshape(labels, [-1]))
    return EstimatorSpec(mode, prediction, loss, optimizer=keras.optimizers.SGD(0.1))


def job(*overrides: str) -> Job:
    config = parsing.parse(composed(["model=custom", "model.fn=tests.task.test_build.line", *overrides]))
    return build_job(config, NullJournal(), Progress())


def points(count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1, 1, count, dtype=np.float32)
    return x, 2 * x + 1


def write_csv(path: Path, count: int) -> None:
    path.write_text("x,y\n" + "".join(f"{x},{y}\n" for x, y in zip(*points(count), strict=True)))


def write_npz(path: Path, count: int) -> None:
    x, y = points(count)
    np.savez(path, x=x, y=y)


def write_tfrecord(path: Path, count: int) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for x, y in zip(*points(count), strict=True):
            floats = {name: tf.train.Feature(float_list={"value": [value]}) for name, value in (("x", x), ("y", y))}
            writer.write(tf.train.Example(features={"feature": floats}).SerializeToString())


COLUMNS = "input.train.params.columns={x: float32, y: float32}"
FEATURES = "input.train.params.features={x: {dtype: float32, shape: []}, y: {dtype: float32, shape: []}}"


@pytest.mark.parametrize(
    ("kind", "write", "declared"),
    [
        ("csv", write_csv, [COLUMNS]),
        ("npz", write_npz, []),
        pytest.param("tfrecord", write_tfrecord, [FEATURES], marks=pytest.mark.slow),
    ],
)
def test_a_shipped_input_trains_on_files_that_config_names(
    kind: str, write: Any, declared: list[str], tmp_path: Path
) -> None:
    write(tmp_path / f"train.{kind}", 30)
    write(tmp_path / f"eval.{kind}", 11)
    found = job(
        f"input={kind}",
        f"model_dir={tmp_path}/run",
        f"input.train.params.files={tmp_path}/train.*",
        f"input.eval.params.files={tmp_path}/eval.*",
        "input.train.params.label=y",
        "input.train.batch_size=8",
        "input.eval.batch_size=4",
        "train.max_steps=120",
        *declared,
    )
    assert found.train_spec is not None
    result = train_and_evaluate(found.estimator, found.train_spec, found.eval_specs)
    assert result.global_step == 120
    assert result.examples == 30 * 30, "120 steps are 30 epochs of 8, 8, 8 and 6"
    assert result.metrics[""]["loss"] < 1e-3
    assert found.estimator.get_variable_value("dense/kernel")[0, 0] == pytest.approx(2, abs=0.05)


@pytest.mark.slow
def test_evaluation_may_have_a_strategy_of_its_own(tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz", 11)
    overrides = [
        "input=npz",
        f"input.train.params.files={tmp_path}/data.npz",
        f"input.eval.params.files={tmp_path}/data.npz",
        "input.train.params.label=y",
        "input.train.batch_size=4",
        "input.eval.batch_size=4",
        "train.max_steps=5",
        "strategy=mirrored",
        "strategy.virtual_devices=2",
    ]
    losses = {}
    for eval_strategy in ("same", "default", "one_device"):
        found = job(f"model_dir={tmp_path}/{eval_strategy}", f"eval_strategy={eval_strategy}", *overrides)
        assert found.train_spec is not None
        result = train_and_evaluate(found.estimator, found.train_spec, found.eval_specs)
        losses[eval_strategy] = result.metrics[""]["loss"]
        assert found.estimator._models.for_training.place(training=True).num_replicas == 2
        assert found.estimator._models.for_evaluation.place(training=False).num_replicas == (
            2 if eval_strategy == "same" else 1
        )
    assert losses["default"] == pytest.approx(losses["same"], rel=1e-6)
    assert losses["one_device"] == pytest.approx(losses["same"], rel=1e-6)


def test_the_options_of_an_update_reach_the_run(tmp_path: Path) -> None:
    options = {
        "clip_global_norm": 0.5,
        "gradient_accumulation": 4,
        "learning_rate_scaling": "sqrt",
        "warmup_steps": 7,
        "precision": "mixed_bfloat16",
        "jit": True,
        "ema_decay": 0.99,
    }
    built = job(f"model_dir={tmp_path}", "input=digits", "train.max_epochs=3",
                *(f"train.{name}={value}" for name, value in options.items()))  # fmt: skip
    assert {name: getattr(built.estimator.config, name) for name in options} == options
    assert built.train_spec is not None and built.train_spec.max_epochs == 3


def with_options_of_its_own(params: Any) -> tf.data.Dataset:
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    options.autotune.cpu_budget = 2
    return tf.data.Dataset.from_tensor_slices({"x": points(6)[0]}).batch(2).with_options(options)


def test_options_take_the_place_of_those_of_the_function_and_null_leaves_them() -> None:
    names = ["input=custom", "input.train.fn=tests.task.test_build.with_options_of_its_own", "input.eval=null"]
    spec = job(*names, "tracking=none").train_spec
    assert spec is not None and getattr(spec.input_fn, "options", 0) is None
    found = job(
        *names,
        "tracking=none",
        "input.train.options.private_threadpool_size=5",
        "input.train.options.deterministic=true",
        "input.train.options.autotune.ram_budget=1000000",
    )
    assert found.train_spec is not None
    pipeline = build_input_pipeline(found.train_spec.input_fn, "train", WorkerPlace())
    options = pipeline.dataset.options()
    assert (options.threading.private_threadpool_size, options.threading.max_intra_op_parallelism) == (5, None)
    assert (options.autotune.cpu_budget, options.autotune.ram_budget, options.autotune.enabled) == (2, 1_000_000, None)
    assert options.deterministic is True
