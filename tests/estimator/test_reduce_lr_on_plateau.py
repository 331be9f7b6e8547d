"""The learning rate is reduced on a plateau: as by Keras' callback, and after a kill as in an undisturbed run."""

from __future__ import annotations

import json
import math
import random
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, EvalSpec, ReduceLROnPlateau, RunConfig, TrainSpec, train_and_evaluate
from tests.estimator.test_early_stopping import DAMAGES, Interrupter, Killer, refuses
from tests.support import jobs
from tests.support.journal import events_in, journal_of, recorded
from tests.support.line import mirrored, native_line, points
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_is_reduced_where_the_callback_of_keras_reduces_it(mode: str, seed: int) -> None:
    draw = random.Random(seed)
    settings: dict[str, Any] = {
        "factor": 0.5, "patience": draw.randint(1, 3), "min_delta": draw.choice([0.0, 0.3]),
        "cooldown": draw.randint(0, 3),
    }  # fmt: skip
    callback = keras.callbacks.ReduceLROnPlateau(monitor="loss", mode=mode, **settings)
    model = types.SimpleNamespace(optimizer=keras.optimizers.SGD(1.0))
    callback.set_model(model)
    callback.on_train_begin()
    evals = {f"{name}_evals": settings.pop(name) for name in ("patience", "cooldown")}
    rule = ReduceLROnPlateau("eval/loss", mode=mode, **settings, **evals)
    rate, values, num_reduced = 1.0, dict[int, float](), 0
    for step in range(60):
        values[step] = draw.choice([math.nan if step else 1.0, *(draw.uniform(0, 2) for _ in range(9))])
        callback.on_epoch_end(step, {"loss": values[step]})
        if rule.reason(values, step) is not None:
            rate, num_reduced = rate * 0.5, num_reduced + 1
        assert float(model.optimizer.learning_rate) == rate, f"{step}: {values}"
    assert num_reduced > 3


def test_the_reason_names_the_best(messages: Messages) -> None:
    rule = ReduceLROnPlateau("eval/loss", patience_evals=2)
    values = {200: 0.5, 400: 0.12, 600: 0.2, 800: 0.12, 1000: 0.3}
    assert rule.reason(values, 600) is None
    messages.same("reason", str(rule.reason(values, 800)))
    assert rule.reason(values, 1000) is None


def around_six(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`native_line` with a metric that is best at step 6."""
    spec = native_line(features, labels, mode, params)
    if mode != "eval":
        return spec
    distance = tf.abs(tf.cast(v1.train.get_global_step(), tf.float32) - 6.0)
    return spec._replace(eval_metric_ops={"distance": distance * tf.ones_like(features)})


def scheduled(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.5)
    return native_line(features, labels, mode, {"learning_rate": schedule})


def of_v1(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = native_line(features, labels, mode, params)
    return spec._replace(optimizer=v1.train.AdamOptimizer(0.01))


RULE = ReduceLROnPlateau("eval/distance", factor=0.5, patience_evals=2, min_lr=0.002)
FILE = RULE.file
RATES = {2: 0.01, 4: 0.01, 6: 0.01, 8: 0.01, 10: 0.01, 12: 0.005, 14: 0.005, 16: 0.0025, 18: 0.0025, 20: 0.002,
         22: 0.002, 24: 0.002}  # fmt: skip
"""Of the step: those after the evaluations of the steps 10, 14 and 18 are smaller."""


def run(
    folder: Path,
    max_steps: int = 24,
    *,
    rule: ReduceLROnPlateau = RULE,
    killer: Any = None,
    stop: Any = None,
    **of: Any,
) -> dict[str, Any]:
    """Train `around_six`; return the values of its variables."""
    settings = RunConfig(**{"save_checkpoints_steps": 2, "steps_per_loop": 1, "log_step_count_steps": 1} | of)
    trainer = Estimator(around_six, folder, settings, journal=journal_of(folder))
    spec = TrainSpec(points(repeat=True), max_steps, [] if stop is None else [stop], reduce_lr_on_plateau=rule)
    train_and_evaluate(trainer, spec, EvalSpec(points(), hooks=[] if killer is None else [killer]))
    return {name: trainer.get_variable_value(name).tolist() for name in trainer.get_variable_names()}


def logged(folder: Path, name: str = "train/learning_rate") -> dict[int, float]:
    """Return step -> value, the later line of a step."""
    lines = recorded(folder)
    return {one["step"]: one["metrics"][name] for one in lines if name in one.get("metrics", {})}


def said(folder: Path) -> list[dict[str, Any]]:
    return events_in(folder, "learning_rate_reduced")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("undisturbed"))


def check(folder: Path, values: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    rates = logged(folder)
    assert {step: rates[step] for step in RATES} == pytest.approx(RATES)
    assert [(one["step"], one["before"], one["after"]) for one in said(folder)] == [
        (10, pytest.approx(0.01), pytest.approx(0.005)),
        (14, pytest.approx(0.005), pytest.approx(0.0025)),
        (18, pytest.approx(0.0025), 0.002),
    ]
    assert values == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("step", slow_but([8, 10, 12], 10))
def test_a_run_that_was_killed_comes_to_the_bits_of_an_undisturbed_one(
    step: int, evaluated: bool, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, killer=Killer(step, evaluated=evaluated))
    check(tmp_path, run(tmp_path), undisturbed)
    kept = json.loads((tmp_path / FILE).read_text())
    assert list(kept["rates"]) == ["10", "14", "18"] and kept["values"]["6"] == "0.0"


@pytest.mark.parametrize("step", [10, 11])
def test_so_does_one_that_was_interrupted(step: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, stop=Interrupter(step))
    check(tmp_path, run(tmp_path), undisturbed)


@pytest.mark.parametrize("step", [12, 16])
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
def test_so_does_one_whose_file_was_lost(damage: str, step: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, stop=Interrupter(step))
    DAMAGES[damage](tmp_path / FILE, 60)
    check(tmp_path, run(tmp_path), undisturbed)


def test_it_is_reduced_once_where_training_ends_and_is_prolonged(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    (rate,) = [value for name, value in run(tmp_path, 10).items() if name.endswith("learning_rate")]
    assert rate == pytest.approx(0.01)
    check(tmp_path, run(tmp_path), undisturbed)


@pytest.mark.slow
def test_two_replicas_have_the_rate_of_one(tmp_path: Path) -> None:
    run(tmp_path, train_distribute=mirrored())
    rates = logged(tmp_path)
    assert {step: rates[step] for step in RATES} == pytest.approx(RATES)


def test_a_warm_up_and_a_scaled_rate_are_multiplied_as_well(tmp_path: Path) -> None:
    scaled: dict[str, Any] = {"learning_rate_scaling": "linear", "warmup_steps": 4, "log_step_count_steps": 2}
    run(tmp_path, 12, train_distribute=mirrored(), **scaled)
    rates = logged(tmp_path)
    assert (rates[10], rates[12]) == (pytest.approx(0.02), pytest.approx(0.01))


def bad_batch() -> tf.data.Dataset:
    """The batch of step 11 holds a NaN."""
    x = np.ones([60, 2], np.float32)
    x[10, 0] = np.nan
    return tf.data.Dataset.from_tensor_slices((x, 2 * x))


def test_a_rollback_keeps_the_rate_that_followed_the_checkpoint(tmp_path: Path) -> None:
    settings = RunConfig(save_checkpoints_steps=2, steps_per_loop=1, log_step_count_steps=1, nan="rollback")
    trainer = Estimator(around_six, tmp_path, settings, journal=journal_of(tmp_path))
    spec = TrainSpec(bad_batch, 13, reduce_lr_on_plateau=RULE)
    train_and_evaluate(trainer, spec, EvalSpec(points()))
    assert [one["back_to"] for one in events_in(tmp_path, "rollback")] == [10]
    rates = logged(tmp_path)
    assert (rates[10], rates[11], rates[13]) == (pytest.approx(0.01), pytest.approx(0.005), pytest.approx(0.005))


OVERRIDES = (
    "model.fn=tests.estimator.test_reduce_lr_on_plateau.around_six", "checkpoint.save_steps=2",
    "train.reduce_lr_on_plateau.metric=eval/distance", "train.log_steps=2", "train.max_steps=12",
)  # fmt: skip


def test_a_config_that_asks_for_it_gets_it_and_hears_of_it(tmp_path: Path, capfd: Any, messages: Messages) -> None:
    settings = ("train.reduce_lr_on_plateau.patience_evals=2", "train.reduce_lr_on_plateau.factor=0.5")
    assert jobs.run(tmp_path, *OVERRIDES, *settings) == 0
    rates = logged(tmp_path / "run")
    assert (rates[10], rates[12]) == (pytest.approx(0.01), pytest.approx(0.005))
    for text in capfd.readouterr().err.splitlines():
        if " -> " in text:
            messages.same("line", text)


@pytest.mark.parametrize(
    "override",
    [
        "model.fn=tests.estimator.test_reduce_lr_on_plateau.scheduled",
        "model.fn=tests.support.jobs.model_fn",
        "model.fn=tests.estimator.test_reduce_lr_on_plateau.of_v1",
        "train.reduce_lr_on_plateau.metric=eval/los",
    ],
    ids=str,
)
def test_what_has_no_rate_to_reduce_is_refused_before_the_first_save(
    override: str, tmp_path: Path, capfd: Any, messages: Messages
) -> None:
    assert jobs.run(tmp_path, *OVERRIDES, "train.reduce_lr_on_plateau.metric=eval/loss", override) == 2
    (said,) = [text for text in capfd.readouterr().err.splitlines() if text.startswith("runner: ")]
    messages.same("exit 2", said)
    assert not list((tmp_path / "run").glob("model.ckpt*"))


@pytest.mark.parametrize(
    "settings",
    [
        {"metric": "loss"},
        {"factor": 1.0},
        {"patience_evals": 0},
        {"min_lr": -1.0},
    ],
    ids=str,
)
def test_a_rule_that_makes_no_sense_is_refused(settings: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        ReduceLROnPlateau(**settings)


def test_an_evaluator_process_cannot_decide(messages: Messages) -> None:
    key = "train.reduce_lr_on_plateau"
    refuses(["cluster.evaluator=true", f"{key}.metric=eval/loss"], messages)
    refuses([f"{key}.factor=1", f"{key}.metric=eval/loss"], messages)
    refuses([f"{key}.min_lr=0.1"], messages)
    refuses(["command=train", f"{key}.metric=eval/loss"], messages)
