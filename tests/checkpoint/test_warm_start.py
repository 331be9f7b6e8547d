"""A new model begins with values of another checkpoint: ours, tf.estimator's, or one of tf.train.Checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, ModeKeys, RunConfig
from runner.checkpoint.reader import Reader
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.config.schema import ConfigError
from runner.run_config import WarmStart
from runner.system.console import PlainProgress
from tests.config.test_config import parsed
from tests.support.journal import events_in, journal_of
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1

ROOT = Path(__file__).parents[2]
RNG = np.random.RandomState(3)
HIDDEN, BIAS, OUT = RNG.randn(4, 8), RNG.randn(8), RNG.randn(8, 1)


def native(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Layers `hidden`, `norm` and `out`; Keras 3 Adam."""
    hidden = keras.layers.Dense(8, name="hidden", dtype="float64")(features)
    hidden = keras.layers.BatchNormalization(name="norm", dtype="float64")(hidden, training=mode == ModeKeys.TRAIN)
    predictions = keras.layers.Dense(params.get("outputs", 1), name="out", dtype="float64")(hidden)
    return EstimatorSpec(
        mode, predictions, tf.reduce_mean((predictions - labels) ** 2), optimizer=keras.optimizers.Adam(0.0)
    )


def classic(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """The same shapes with get_variable; v1 Adam."""
    with v1.variable_scope("hidden", dtype=tf.float64):
        features = features @ v1.get_variable("kernel", [4, 8]) + v1.get_variable("bias", [8])
    with v1.variable_scope("out", dtype=tf.float64):
        predictions = features @ v1.get_variable("kernel", [8, params.get("outputs", 1)])
    loss = tf.reduce_mean((predictions - labels) ** 2)
    train_op = v1.train.AdamOptimizer(0.0).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, predictions, loss, train_op)


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.ones([8, 4]), np.ones([8, 1]))).batch(2).repeat()


def ours(folder: Path, prefix: str = "") -> str:
    tensors: dict[str, Any] = {
        f"{prefix}hidden/kernel": HIDDEN, f"{prefix}hidden/bias": BIAS, f"{prefix}out/kernel": OUT,
        f"{prefix}hidden/kernel/Adam": HIDDEN, "global_step": np.int64(700),
    }  # fmt: skip
    return CheckpointWriter(folder, 5).save(Snapshot(700, tensors))


def tf1(folder: Path) -> str:
    with tf.Graph().as_default(), v1.Session() as session:
        for name, value in {"hidden/kernel": HIDDEN, "hidden/bias": BIAS, "out/kernel": OUT}.items():
            v1.get_variable(name, initializer=value)
        step = v1.train.get_or_create_global_step()
        session.run(v1.global_variables_initializer())
        return str(v1.train.Saver().save(session, str(folder / "model.ckpt"), global_step=step))


def object_based(folder: Path) -> str:
    layers = [keras.layers.Dense(8, name="hidden", dtype="float64"), keras.layers.Dense(1, name="out", dtype="float64")]
    model = keras.Sequential(layers, name="net")
    model.build((None, 4))
    model.set_weights([HIDDEN, BIAS, OUT, np.zeros(1)])
    return str(tf.train.Checkpoint(model=model).save(str(folder / "ckpt")))


def started(
    model_dir: Path, source: str, model_fn: Any = classic, params: Any = None, journal: Any = None, **settings: Any
) -> dict[str, np.ndarray]:
    """The variables at step 0 of a run that begins so."""
    config = RunConfig(warm_start=WarmStart(source, **settings), tensorboard=False)
    Estimator(model_fn, model_dir, config, params or {}, journal=journal).train(data, max_steps=1)
    reader = Reader(model_dir / "model.ckpt-0")
    return reader.get_many(reader.names())


@pytest.mark.parametrize("write", [ours, tf1, object_based])
@pytest.mark.parametrize("as_folder", slow_but([False, True], False))
def test_every_kind_of_checkpoint_is_read(tmp_path: Path, write: Any, as_folder: bool) -> None:
    path = write(tmp_path / "old") if write is ours else None
    if path is None:
        (tmp_path / "old").mkdir()
        path = write(tmp_path / "old")
    values = started(tmp_path / "new", str(tmp_path / "old") if as_folder else path)
    np.testing.assert_array_equal(values["hidden/kernel"], HIDDEN)
    np.testing.assert_array_equal(values["hidden/bias"], BIAS)
    np.testing.assert_array_equal(values["out/kernel"], OUT)
    assert values["global_step"] == 0 and not values["hidden/kernel/Adam"].any(), "neither step nor slots"


def test_the_table_and_the_journal_say_what_became_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ours(tmp_path / "old", prefix="bert/")
    journal = journal_of(tmp_path / "journal.jsonl")
    config = RunConfig(warm_start=WarmStart(path, rename={"hidden/": "bert/hidden/"}), tensorboard=False)
    progress = PlainProgress()
    Estimator(native, tmp_path / "new", config, {}, journal=journal, progress=progress).train(data, max_steps=1)
    (event,) = events_in(tmp_path / "journal.jsonl", "warm_start")
    assert event["loaded"] == {"hidden/kernel": "bert/hidden/kernel", "hidden/bias": "bert/hidden/bias"}
    assert sorted(event["not_found"]) == ["norm/beta", "norm/gamma", "out/bias", "out/kernel"]
    assert event["skipped"]["norm/moving_mean"] == "not trainable"
    assert event["skipped"]["global_step"] == "the global step"
    slots = {name for name, why in event["skipped"].items() if why == "state of the optimizer"}
    assert {"adam/iteration", "adam/learning_rate", "adam/hidden_kernel_momentum"} <= slots and len(slots) == 14
    said = capsys.readouterr().err
    assert f"warm start from {path}\n" in said
    rows = {line.split()[0]: line for line in said.partition("warm start")[2].splitlines()[2:] if line.strip()}
    assert rows["hidden/kernel"].endswith("[4, 8]  loaded from bert/hidden/kernel")
    assert rows["out/kernel"].endswith("not found: initial value")
    assert rows["norm/moving_mean"].endswith("skipped: not trainable")


def test_include_takes_what_matches_trainable_or_not(tmp_path: Path) -> None:
    moving = RNG.randn(8)
    tensors = {"hidden/kernel": HIDDEN, "norm/moving_mean": moving, "out/kernel": OUT}
    path = CheckpointWriter(tmp_path / "old", 5).save(Snapshot(1, tensors))
    values = started(tmp_path / "new", path, native, include=[r"norm/.*", "hidden/kernel"])
    np.testing.assert_array_equal(values["norm/moving_mean"], moving)
    np.testing.assert_array_equal(values["hidden/kernel"], HIDDEN)
    assert not np.array_equal(values["out/kernel"], OUT)


def test_rename_takes_names_expressions_and_prefixes(tmp_path: Path) -> None:
    path = ours(tmp_path / "old", prefix="bert/")
    rename = {r"(\w+)/kernel": r"bert/\1/kernel", "hidden/bias": "bert/hidden/bias"}
    values = started(tmp_path / "new", path, rename=rename)
    for name, value in {"hidden/kernel": HIDDEN, "hidden/bias": BIAS, "out/kernel": OUT}.items():
        np.testing.assert_array_equal(values[name], value)


def test_the_empty_prefix_renames_all(tmp_path: Path) -> None:
    values = started(tmp_path / "new", ours(tmp_path / "old", prefix="bert/"), rename={"": "bert/"})
    np.testing.assert_array_equal(values["out/kernel"], OUT)


def test_values_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    path = CheckpointWriter(tmp_path / "old", 5).save(Snapshot(1, {"hidden/kernel": HIDDEN.astype(np.float32)}))
    assert started(tmp_path / "new", path)["hidden/kernel"].dtype == np.float64


def test_a_run_that_resumes_keeps_its_own_values(tmp_path: Path) -> None:
    path = ours(tmp_path / "old")
    started(tmp_path / "new", path, include=["hidden/bias"])
    config = RunConfig(warm_start=WarmStart(path), tensorboard=False)
    resumed = Estimator(classic, tmp_path / "new", config, {}).train(data, max_steps=2)
    assert not np.array_equal(resumed.get_variable_value("out/kernel"), OUT)


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({}, {"outputs": 3}),
        ({"include": ["hiden/.*"]}, {}),
        ({"include": ["out/kernel"], "rename": {"out/kernel": "head/kernel"}}, {}),
        ({"rename": {"encoder/": "bert/"}}, {}),
        ({"rename": {"(.*)": r"x/\1"}}, {}),
        ({"include": ["("]}, {}),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_first_step(
    tmp_path: Path, settings: Any, params: Any, messages: Messages
) -> None:
    with messages.raised(ValueError):
        started(tmp_path / "new", ours(tmp_path / "old"), params=params, **settings)
    assert not list((tmp_path).glob("new/model.ckpt-*"))


def test_a_variable_of_another_shape_can_be_left_out(tmp_path: Path) -> None:
    values = started(tmp_path / "new", ours(tmp_path / "old"), params={"outputs": 3}, include=["(?!out/).*"])
    np.testing.assert_array_equal(values["hidden/kernel"], HIDDEN)
    assert values["out/kernel"].shape == (8, 3)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, messages: Messages) -> None:
    path = ours(tmp_path / "old")
    Path(f"{path}.data-00000-of-00001").write_bytes(b"short")
    with messages.raised(ValueError):
        started(tmp_path / "new", path)
    with messages.raised(ValueError):
        started(tmp_path / "new", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("overrides", [
    ["checkpoint=/nowhere/model.ckpt-3"],
    ["checkpoint=conf"],
    ["include=['(']"],
    ["include=['a']"],
    ["rename={a: b}"],
    ["checkpoint=conf", "include=[]"],
    ["rename={a: 'b\\2'}"],
    ["vocabularies={a/b: {axis: 1}}"],
    ["checkpoint=conf", "vocabularies={a/b: {axis: 2}}"],
    ["checkpoint=conf", "vocabularies={a/b: {old_vocab_size: 0}}"],
    ["checkpoint=conf", "vocabularies={a/b: {num_oov_buckets: few}}"],
    ["checkpoint=conf", "vocabularies={a/b: x}"],
    ["checkpoint=conf", "vocabularies={a/b: {new_vocb: x}}"],
    ["checkpoint=conf", "vocabularies={a/b: {old_vocab: x}}"],
    ["checkpoint=conf", "vocabularies={a/b: {new_vocab: /no, old_vocab: x}}"],
], ids=" ".join)  # fmt: skip
def test_a_config_that_cannot_work_is_refused(overrides: list[str], messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsed(*(f"train.warm_start.{override}" for override in overrides))


def test_a_config_takes_the_folder_of_a_saved_model(tmp_path: Path) -> None:
    (tmp_path / "variables").mkdir()
    (tmp_path / "variables" / "variables.index").touch()
    assert parsed(f"train.warm_start.checkpoint={tmp_path}").train.warm_start.checkpoint == str(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_rows_go_with_their_tokens_by_a_config(tmp_path: Path) -> None:
    table = np.array([[1, 10], [2, 20], [3, 30]], np.float32)
    CheckpointWriter(tmp_path / "old", 5).save(Snapshot(40, {"in/table": table, "global_step": np.int64(40)}))
    (tmp_path / "abc").write_text("a\nb\nc\n")
    (tmp_path / "cxab").write_text("c\nx\na\nb\n")
    (tmp_path / "mine.py").write_text(MODEL_OF_TOKENS)
    vocabulary = "{new_vocab: cxab, new_vocab_size: 3, num_oov_buckets: 1, old_vocab: abc}"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "runner", "command=train", "model=custom", "input=custom"),
            *("model.fn=mine.model_fn", "input.train.fn=mine.input_fn", "input.train.batch_size=1"),
            *("train.max_steps=1", "tracking=none"),
            *("model_dir=new", "train.warm_start.checkpoint=old", "train.warm_start.include=[]"),
            f"train.warm_start.vocabularies={{in/table: {vocabulary}}}",
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert Reader(tmp_path / "new" / "model.ckpt-1").get("in/table").tolist() == [[3, 30], [8, 8], [1, 10], [8, 8]]
    assert "loaded, 2 tokens" in result.stdout + result.stderr


MODEL_OF_TOKENS = """
import tensorflow as tf
from runner import EstimatorSpec

v1 = tf.compat.v1


def model_fn(features, labels, mode):
    table = v1.get_variable("in/table", [4, 2], initializer=v1.constant_initializer(8.0))
    loss = 0.0 * tf.reduce_sum(tf.gather(table, features))
    train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, features, loss, train_op)


def input_fn(params):
    return tf.data.Dataset.from_tensor_slices([0, 1]).batch(params["batch_size"]).repeat()
"""


def test_preparing_a_run_gives_the_values_and_writes_no_checkpoint(tmp_path: Path) -> None:
    config = RunConfig(model_dir=str(tmp_path / "new"), warm_start=WarmStart(ours(tmp_path / "old")))
    preparation = Estimator(classic, config=config).prepare(Input(data))
    np.testing.assert_array_equal(preparation.model.store["hidden/kernel"], HIDDEN)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").glob("model.ckpt-*"))
