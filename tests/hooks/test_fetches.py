"""Values of examples that native hooks fetch: those of all replicas, in order, each once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, EvalSpec, Hook, Input, ModeKeys, RunConfig, TrainSpec, train_and_evaluate
from runner.distribute.collectives import _packed, _unpacked
from runner.hooks.hook import Interrupted
from runner.types import StepResult
from tests.support.line import mirrored
from tests.support.messages import Messages
from tests.support.models import STYLES, data, eval_input, train_input

NAMES = ("features/id", "labels", "predictions/twice", "predictions/text")


class Fetches(Hook):
    """Keeps what it gets, and when."""

    def __init__(self, *names: str) -> None:
        self.fetches = names
        self.batches: list[dict[str, np.ndarray]] = []
        self.calls: list[Any] = []

    def after_examples(self, run: Any, values: Mapping[str, np.ndarray]) -> None:
        self.batches.append(dict(values))
        self.calls.append(run.global_step)

    def after_step(self, run: Any, result: StepResult) -> None:
        self.calls.append((result.first_step, result.last_step))

    def end(self, run: Any) -> None:
        self.calls.append("end")

    def rows(self, name: str) -> np.ndarray:
        return np.concatenate([batch[name] for batch in self.batches])


def numbered(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Learns nothing; removes its feature, and predicts it in other dtypes."""
    ids = features.pop("id")
    weight = tf.compat.v1.get_variable("w", [], initializer=tf.compat.v1.zeros_initializer())
    loss = tf.cast(ids, tf.float32) * (1 + 0 * weight)
    predictions = {"twice": 2 * ids[:, None], "text": tf.strings.as_string(ids)}
    if mode != ModeKeys.PREDICT:
        predictions["dict"] = {"a": ids, "none": None}
    return EstimatorSpec(mode, predictions, loss, optimizer=keras.optimizers.SGD(0.0))


def ids_input(num_examples: int, batch_size: int, *, repeat: bool = False) -> Input:
    def input_fn(params: Any) -> tf.data.Dataset:
        ids = np.arange(num_examples)
        dataset = tf.data.Dataset.from_tensor_slices(({"id": ids}, -ids)).batch(params["batch_size"])
        return dataset.repeat() if repeat else dataset

    return Input(input_fn, params={}, batch_size=batch_size)


def config(strategy: str, **changes: Any) -> RunConfig:
    return RunConfig(train_distribute=mirrored() if strategy == "mirrored" else None, tf_random_seed=1, **changes)


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
@pytest.mark.parametrize(("num_examples", "steps"), [(22, None), (9, None), (3, None), (22, 3)])
def test_an_evaluation_passes_each_example_once_in_order(
    strategy: str, num_examples: int, steps: int | None, tmp_path: Path
) -> None:
    estimator = Estimator(numbered, tmp_path, config(strategy))
    estimator.train(ids_input(8, 4), steps=1)
    hook = Fetches(*NAMES)
    loss = estimator.evaluate(ids_input(num_examples, 4), steps=steps, hooks=[hook])["loss"]
    seen = num_examples if steps is None else 4 * steps
    ids = np.arange(seen)
    np.testing.assert_array_equal(hook.rows("features/id"), ids)
    np.testing.assert_array_equal(hook.rows("labels"), -ids)
    np.testing.assert_array_equal(hook.rows("predictions/twice"), 2 * ids[:, None])
    assert hook.rows("predictions/text").tolist() == [b"%d" % id for id in ids]
    assert hook.calls == [1] * len(hook.batches) + ["end"]
    sizes = [len(batch["labels"]) for batch in hook.batches]
    each = 8 if strategy == "mirrored" else 4
    assert sizes == [min(each, seen - first) for first in range(0, seen, each)], "a batch of each replica at a time"
    assert loss == pytest.approx(ids.mean())


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "summaries": {"save_summary_steps": 2},
    "eager": {"eager": True},
    "jit": {"jit": True},
    "half": {"precision": "mixed_float16"},
    "accumulated": {"gradient_accumulation": 2},
}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*(("default", kind) for kind in KINDS), *(("mirrored", kind) for kind in KINDS if kind not in ("eager", "jit"))],
)
def test_training_passes_the_global_batch_at_the_steps_that_log(strategy: str, kind: str, tmp_path: Path) -> None:
    names = [name for name in NAMES if kind != "jit" or "text" not in name]  # XLA has no strings
    hook = Fetches(*names)
    changes = {"save_summary_steps": None, "log_step_count_steps": 3, **KINDS[kind]}
    estimator = Estimator(numbered, tmp_path, config(strategy, **changes))
    estimator.train(ids_input(23, 4, repeat=True), hooks=[hook], steps=10)
    batches = {3: [8, 9, 10, 11], 6: [20, 21, 22], 9: [8, 9, 10, 11]}
    if kind == "accumulated":  # the last micro-batch of each replica
        batches = {3: [10, 11], 6: [22], 9: [10, 11]}
        if strategy == "mirrored":
            batches = {3: [9, 11], 6: [21], 9: [9, 11]}
    assert [call for call in hook.calls if isinstance(call, int)] == list(batches)
    assert [batch["features/id"].tolist() for batch in hook.batches] == list(batches.values())
    ids = hook.rows("features/id")
    np.testing.assert_array_equal(hook.rows("labels"), -ids)
    np.testing.assert_array_equal(hook.rows("predictions/twice"), 2 * ids[:, None])
    if kind != "jit":
        assert hook.rows("predictions/text").tolist() == [b"%d" % id for id in ids]
    last_steps = [call[1] for call in hook.calls if isinstance(call, tuple)]
    assert {3, 6, 9} <= set(last_steps), "a loop ends at each of these steps"
    for step in batches:
        told = next(call for call in hook.calls if isinstance(call, tuple) and call[1] == step)
        assert hook.calls.index(step) + 1 == hook.calls.index(told)


@pytest.mark.parametrize("style", STYLES)
def test_two_devices_pass_what_one_does(style: str, tmp_path: Path) -> None:
    name = "predictions" if style == "keras_model" else "predictions/y"
    of_training, of_evaluation = {}, {}
    for strategy in ("default", "mirrored"):
        hook, of_eval = Fetches("features", "labels", name), Fetches("features", "labels", name)
        settings = config(strategy, log_step_count_steps=4)
        estimator = Estimator(STYLES[style], tmp_path / strategy, settings)
        estimator.train(train_input(6, dtype="float64"), hooks=[hook], steps=9)
        estimator.evaluate(eval_input(4, dtype="float64"), hooks=[of_eval])
        of_training[strategy], of_evaluation[strategy] = hook, of_eval
    for one in (name, "features", "labels"):
        for both in (of_training, of_evaluation):
            np.testing.assert_allclose(both["default"].rows(one), both["mirrored"].rows(one), rtol=1e-9)
    features, labels = data(22, "float64")
    np.testing.assert_array_equal(of_evaluation["mirrored"].rows("features"), features)
    np.testing.assert_array_equal(of_evaluation["mirrored"].rows("labels"), labels)
    assert len(of_training["default"].rows(name)) == 12


def test_an_evaluation_of_one_replica_passes_all_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = numbered(features, labels, mode)
        total = tf.compat.v1.get_local_variable("total", [], initializer=tf.compat.v1.zeros_initializer())
        metric = total.read_value(), total.assign(tf.cast(labels[0], tf.float32) + 2 * total)
        return spec if mode != ModeKeys.EVAL else spec._replace(eval_metric_ops={"odd": metric})

    caplog.set_level(logging.INFO)
    estimator = Estimator(model_fn, tmp_path, config("mirrored"))
    estimator.train(ids_input(8, 4), steps=1)
    hook = Fetches("labels")
    estimator.evaluate(ids_input(9, 4), hooks=[hook])
    assert "One replica of one process evaluates all batches" in caplog.text
    assert [batch["labels"].tolist() for batch in hook.batches] == [[0, -1, -2, -3], [-4, -5, -6, -7], [-8]]


def test_beside_session_hooks_both_get_their_values(tmp_path: Path) -> None:
    class Session(tf.compat.v1.train.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return tf.compat.v1.train.SessionRunArgs("w:0")

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_values.results)

    for strategy in ("default", "mirrored"):
        seen: list[float] = []
        hook, of_eval = Fetches("labels"), Fetches("labels")
        estimator = Estimator(numbered, tmp_path / strategy, config(strategy, log_step_count_steps=2))
        estimator.train(ids_input(23, 4, repeat=True), hooks=[Session(), hook], steps=5)
        assert seen == [0.0] * 5
        assert [batch["labels"].tolist() for batch in hook.batches] == [[-4, -5, -6, -7], [-12, -13, -14, -15]]
        estimator.evaluate(ids_input(9, 4), hooks=[of_eval, Session()])
        np.testing.assert_array_equal(of_eval.rows("labels"), -np.arange(9))


def test_two_hooks_get_what_they_name_and_only_they(tmp_path: Path) -> None:
    estimator = Estimator(numbered, tmp_path, config("default", log_step_count_steps=None))
    one, other, none = Fetches("labels"), Fetches("predictions/twice", "labels"), Fetches()
    estimator.train(ids_input(8, 4), steps=2, hooks=[one])
    assert one.batches == [], "without train.log_steps there is no step that logs"
    one = Fetches("labels")
    estimator.evaluate(ids_input(4, 4), hooks=[one, other, none])
    assert [set(batch) for batch in one.batches + other.batches] == [{"labels"}, {"predictions/twice", "labels"}]
    assert none.batches == []
    estimator.evaluate(ids_input(8, 4), hooks=[none])
    list(estimator.predict(ids_input(8, 4), hooks=[one]))
    assert len(one.batches) == 1, "a prediction gives its values itself"


def test_a_hook_ends_an_evaluation_early(tmp_path: Path) -> None:
    class Ends(Fetches):
        def after_examples(self, run: Any, values: Mapping[str, np.ndarray]) -> None:
            super().after_examples(run, values)
            run.interrupt("enough")

    estimator = Estimator(numbered, tmp_path, config("default"))
    estimator.train(ids_input(8, 4), steps=1)
    hook = Ends("labels")
    with pytest.raises(Interrupted, match="enough"):
        estimator.evaluate(ids_input(8, 4), hooks=[hook])
    assert len(hook.batches) == 1


def many_kinds(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    spec = numbered(features, labels, mode)
    if mode == ModeKeys.TRAIN:
        return spec._replace(predictions=None)
    more = {
        "scalar": tf.constant(1.0),
        "sparse": tf.sparse.from_dense(labels[:, None]),
        "ragged": tf.RaggedTensor.from_tensor(labels[:, None]),
        "short": labels[:1],
        ("head", "logits"): labels,
    }
    return spec._replace(predictions={**spec.predictions, **more})


@pytest.mark.parametrize(
    "name", ["predictions", "predictions/twise", "label", "predictions/sparse", "predictions/ragged",
             "predictions/scalar", "predictions/short"],
)  # fmt: skip
def test_what_cannot_be_fetched_is_refused_before_the_first_batch(
    name: str, tmp_path: Path, messages: Messages
) -> None:
    estimator = Estimator(many_kinds, tmp_path, config("default"))
    estimator.train(ids_input(8, 4), steps=1)
    hook = Fetches(name)
    with messages.raised(ValueError):
        estimator.evaluate(ids_input(8, 4), hooks=[hook])
    assert hook.calls == []
    hook = Fetches("predictions/head/logits", "predictions/dict/a")
    estimator.evaluate(ids_input(8, 4), hooks=[hook])
    np.testing.assert_array_equal(hook.rows("predictions/head/logits"), -hook.rows("predictions/dict/a"))


def test_what_training_does_not_predict_is_refused_before_the_first_step(tmp_path: Path, messages: Messages) -> None:
    estimator = Estimator(many_kinds, tmp_path, config("default"))
    with messages.raised(ValueError):
        estimator.train(ids_input(8, 4), steps=1, hooks=[Fetches("predictions/twice")])
    with messages.raised(ValueError):
        estimator.train(ids_input(8, 4), steps=1, hooks=[Fetches(*"label")])
    hook = Fetches()
    hook.fetches = "labels"
    with messages.raised(ValueError):
        estimator.train(ids_input(8, 4), steps=1, hooks=[hook])
    assert not list(tmp_path.glob("model.ckpt*"))


def test_a_run_refuses_what_its_evaluation_lacks_before_the_first_step(tmp_path: Path, messages: Messages) -> None:
    estimator = Estimator(numbered, tmp_path, config("default"))
    evaluation = EvalSpec(ids_input(8, 4), hooks=[Fetches("predictions/twise")])
    with messages.raised(ValueError):
        train_and_evaluate(estimator, TrainSpec(ids_input(8, 4), max_steps=2), evaluation)
    assert not list(tmp_path.glob("model.ckpt*"))


def test_arrays_of_any_dtype_travel_between_workers() -> None:
    arrays = {
        "text": np.array([b"x", b"y\0", b""], object),
        "numbers": np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros([0, 4], np.float16),
        "half": tf.constant([1.5, 2.5], tf.bfloat16).numpy(),
        "flags": np.array([[True], [False]]),
        "large": np.array([2**63 + 1], np.uint64),
    }
    got = _unpacked(_packed(arrays))
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)
