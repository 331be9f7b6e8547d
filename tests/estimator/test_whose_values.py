"""A model knows whose values its variables have: whatever writes to them, an evaluation has those of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Hook, RunConfig

v1 = tf.compat.v1
STEPS = 4


def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A weight and its learning rate; its prediction changes the weight."""
    weight = v1.get_variable("weight", [], initializer=v1.ones_initializer())
    each = tf.ones_like(features)
    if mode == "infer":
        changed = tf.cond(tf.size(features) > 0, lambda: weight.assign_add(1.0), lambda: tf.identity(weight))
        return EstimatorSpec(mode, predictions={"y": each * changed})
    optimizer = keras.optimizers.SGD(0.1)
    metrics = {"weight": each * weight} if mode == "eval" else None
    return EstimatorSpec(mode, loss=tf.square(weight - features), optimizer=optimizer, eval_metric_ops=metrics)


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(tf.constant([3.0, 5.0])).repeat(2)


def train_input() -> tf.data.Dataset:
    return input_fn().repeat()


def build(folder: Path, **config: Any) -> Estimator:
    return Estimator(model_fn, folder, RunConfig(tf_random_seed=1, save_checkpoints_steps=2, **config))


def weight_in(folder: Path) -> float:
    return float(tf.train.load_variable(str(folder), "weight"))


class Loads(tf.compat.v1.train.SessionRunHook):
    """Writes 100 to the weight at one of its calls."""

    def __init__(self, call: str) -> None:
        self._call = call

    def begin(self) -> None:
        (self._weight,) = [one for one in v1.global_variables() if one.name == "weight:0"]
        self._assign = v1.assign(self._weight, 100.0)

    def _write(self, call: str, session: Any) -> None:
        if call == self._call == "end":
            self._weight.load(100.0, session)
        elif call == self._call:
            session.run(self._assign)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._write("after_create_session", session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._write("after_run", run_context.session)

    def end(self, session: Any) -> None:
        self._write("end", session)


class SetsRate(Hook):
    def end(self, run: Any) -> None:
        run.learning_rate = 0.5


def goes_on_training(trainer: Estimator) -> None:
    class Stops(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            raise RuntimeError("between two saves")

    with pytest.raises(RuntimeError, match="between two saves"):
        trainer.train(train_input, steps=1, hooks=[Stops()])


WRITERS: dict[str, Callable[[Estimator], Any]] = {
    "a step": goes_on_training,
    "a hook's end": lambda trainer: trainer.train(train_input, steps=2, hooks=[Loads("end")]),
    "the learning rate": lambda trainer: trainer.train(train_input, steps=2, hooks=[SetsRate()]),
    "a prediction": lambda trainer: list(trainer.predict(input_fn)),
    "a prediction's hook": lambda trainer: list(trainer.predict(input_fn, hooks=[Loads("after_run")])),
    "an evaluation's first hook": lambda trainer: trainer.evaluate(input_fn, hooks=[Loads("after_create_session")]),
    "an evaluation's hook": lambda trainer: trainer.evaluate(input_fn, hooks=[Loads("after_run")]),
    "the end of an evaluation's hook": lambda trainer: trainer.evaluate(input_fn, hooks=[Loads("end")]),
}


# An eager run takes no session hooks in training.
CASES = [(writer, eager) for writer in WRITERS for eager in (False, True) if not (eager and writer == "a hook's end")]


@pytest.mark.parametrize(("writer", "eager"), CASES)
def test_an_evaluation_has_the_values_of_its_checkpoint_whatever_wrote_before(
    writer: str, eager: bool, tmp_path: Path
) -> None:
    trainer = build(tmp_path, eager=eager).train(train_input, steps=STEPS)
    assert trainer.evaluate(input_fn)["weight"] == pytest.approx(weight_in(tmp_path))
    WRITERS[writer](trainer)
    assert trainer.evaluate(input_fn) == build(tmp_path, eager=eager).evaluate(input_fn)
    assert trainer.evaluate(input_fn)["weight"] == pytest.approx(weight_in(tmp_path))


@pytest.mark.parametrize("used", ["evaluate", "predict"])
@pytest.mark.parametrize("call", ["after_create_session", "after_run", "end"])
def test_what_an_evaluation_or_a_prediction_writes_during_training_is_not_trained_on(
    used: str, call: str, tmp_path: Path
) -> None:
    class Uses(Hook):
        """Uses the model after each save, when the variables have the values of the checkpoint."""

        def after_step(self, run: Any, result: Any) -> None:
            run.save()
            given = {"input_fn": input_fn, "hooks": [Loads(call)]}
            for _ in range(2):
                found = getattr(trainer, used)(**given)
                seen.append([float(one["y"]) for one in found] if used == "predict" else float(found["weight"]))

    seen: list[Any] = []
    undisturbed = build(tmp_path / "undisturbed").train(train_input, steps=STEPS)
    trainer = build(tmp_path / "run")
    trainer.train(train_input, steps=STEPS, hooks=[Uses()])
    assert weight_in(tmp_path / "run") == weight_in(tmp_path / "undisturbed")
    assert trainer.evaluate(input_fn) == undisturbed.evaluate(input_fn)
    assert len(seen) >= 4
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert first == second, "the second use begins with the values of the checkpoint, too"
