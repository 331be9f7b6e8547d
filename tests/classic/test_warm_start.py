"""`warm_start_from` takes what it took in tf.estimator 2.15; the numbers here are those that 2.15.1 gave."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.checkpoint.reader import Reader
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.vocabulary import Vocabulary
from runner.checkpoint.writer import CheckpointWriter
from runner.classic.warm_start import VocabInfo, WarmStartSettings, as_warm_start
from runner.export.receivers import receiver_fn_of_spec
from runner.programs import model
from runner.run_config import WarmStart
from runner.tf_private import tensor_bundle
from runner.tracing import partitioned_variable
from tests.support.messages import Messages

v1 = tf.compat.v1

OLD: dict[str, Any] = {
    "table": [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [9.0, 90.0]],  # a b c, and a bucket
    "table/Momentum": [[0.5, 0.5]] * 4,
    "out/kernel": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],  # classes: no maybe yes
    "out/bias": [-1.0, -2.0, -3.0],
    "out/bias/Momentum": [0.25, 0.25, 0.25],
    "mean": 7.0,
    "global_step": np.int64(40),
}


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A table of tokens, an output of classes, and a moving statistic; initial values are 8."""
    with v1.variable_scope("", initializer=v1.constant_initializer(8.0), dtype=tf.float32):
        table = v1.get_variable("table", [params.get("tokens", 4), 2])
        kernel = v1.get_variable("out/kernel", [2, params.get("classes", 3)])
        bias = v1.get_variable("out/bias", [params.get("classes", 3)])
        v1.get_variable("mean", [], trainable=False)
    loss = tf.reduce_sum(tf.gather(table, features) @ kernel + bias) * 0.0
    train_op = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, predictions=features, loss=loss, train_op=train_op)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of step 40 in `old`, and vocabularies beside it."""
    tensors = {name: np.asarray(value, None if name == "global_step" else np.float32) for name, value in OLD.items()}
    CheckpointWriter(tmp_path / "old", 5).save(Snapshot(40, tensors))
    for name, tokens in {"abc": "abc", "cxab": "cxab", "ca": "ca", "no_maybe_yes": ("no", "maybe", "yes")}.items():
        (tmp_path / name).write_text("".join(f"{token}\n" for token in tokens))
    (tmp_path / "yes_other_no").write_text("yes\nother\nno")  # without an end of line
    return tmp_path


def started(folder: Path, source: Any, **params: Any) -> dict[str, Any]:
    """The variables at step 0 of a model that begins so."""
    config = RunConfig(warm_start=as_warm_start(source), tensorboard=False)
    data = tf.data.Dataset.from_tensors(np.zeros([1], np.int32)).repeat()
    Estimator(model_fn, folder / "new", config, params).train(lambda: data, max_steps=1)
    reader = Reader(folder / "new" / "model.ckpt-0")
    return {name: value.tolist() for name, value in reader.get_many(reader.names()).items()}


def taken(values: dict[str, Any]) -> set[str]:
    return {name for name, value in values.items() if name in OLD and np.array_equal(value, OLD[name])}


WEIGHTS = {"table", "out/kernel", "out/bias"}
SLOTS = {"table/Momentum", "out/bias/Momentum"}


@pytest.mark.parametrize(("patterns", "expected"), [
    (".*", WEIGHTS),
    ("out", {"out/kernel", "out/bias"}),  # the beginning of a name is enough
    ("out/bias:0", {"out/bias"}),
    ("[^/]*$", {"table"}),
    (["table", "mean"], {"table", "table/Momentum", "mean"}),
    (["out/bias/Momentum"], {"out/bias/Momentum"}),
    ([v1.Variable(0.0, name="out/bias", use_resource=True)], {"out/bias"}),
    # 2.15 compared with "out/bias:0", and took nothing, without a word.
    (["out/bias$"], {"out/bias"}),
    # 2.15 took the step, too: the new model was then at step 40.
    (["mean", "global_step"], {"mean"}),
])  # fmt: skip
def test_a_string_takes_trainable_variables_and_a_list_takes_all(patterns: Any, expected: set[str], old: Path) -> None:
    values = started(old, WarmStartSettings(str(old / "old"), patterns))
    assert taken(values) == expected
    assert values["global_step"] == 0


def test_a_path_takes_trainable_variables(old: Path) -> None:
    assert taken(started(old, old / "old")) == WEIGHTS


def test_names_of_the_checkpoint_may_be_others(old: Path) -> None:
    settings = WarmStartSettings(str(old / "old"), "out/bias", None, {"out/bias": "out/bias/Momentum"})
    assert started(old, settings)["out/bias"] == OLD["out/bias/Momentum"]


def test_the_variables_of_a_saved_model_are_read(old: Path) -> None:
    module = tf.Module()
    with tf.name_scope("out"):
        module.bias = tf.Variable([4.0, 5.0, 6.0], name="bias")
    tf.saved_model.save(module, str(old / "saved"))
    assert started(old, WarmStartSettings(str(old / "saved"), "out/bias"))["out/bias"] == [4.0, 5.0, 6.0]


def test_the_saved_model_of_a_v1_program_is_read_by_the_names_of_its_variables(old: Path) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("out/bias", initializer=[4.0, 5.0, 6.0])
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(old / "saved"))
        builder.add_meta_graph_and_variables(session, ["serve"])
        builder.save()
    assert started(old, WarmStartSettings(str(old / "saved"), "out/bias"))["out/bias"] == [4.0, 5.0, 6.0]


# --- vocabularies -----------------------------------------------------------------------------------------------------

HALF = v1.constant_initializer(0.5)


@pytest.mark.parametrize(("name", "info", "params", "expected"), [
    ("table", ("cxab", 4, 0, "abc"), {}, [[3, 30], [0, 0], [1, 10], [2, 20]]),
    ("table", ("ca", 2, 2, "abc"), {}, [[3, 30], [1, 10], [0, 0], [0, 0]]),
    ("table", ("cxab", 4, 0, "abc", 2), {}, [[0, 0], [0, 0], [1, 10], [2, 20]]),  # the first two of the old
    ("table", ("cxab", 3, 1, "abc"), {}, [[3, 30], [0, 0], [1, 10], [0, 0]]),  # the first three of the new
    ("out/kernel", ("yes_other_no", 3, 0, "no_maybe_yes", -1, None, 1), {}, [[3, 0, 1], [6, 0, 4]]),
    # 2.15 failed with constant initializers, and for variables of one dimension
    ("table", ("cxab", 4, 1, "abc", -1, HALF), {"tokens": 5}, [[3, 30], [0.5, 0.5], [1, 10], [2, 20], [0.5, 0.5]]),
    ("out/kernel", ("yes_other_no", 3, 1, "no_maybe_yes", -1, HALF, 1), {"classes": 4},
     [[3, 0.5, 1, 0.5], [6, 0.5, 4, 0.5]]),
    ("out/bias", ("yes_other_no", 3, 0, "no_maybe_yes"), {}, [-3, 0, -1]),
])  # fmt: skip
def test_rows_and_columns_go_with_their_tokens(name: str, info: Any, params: Any, expected: Any, old: Path) -> None:
    new_file, size, buckets, old_file, *others = info
    vocabulary = VocabInfo(str(old / new_file), size, buckets, str(old / old_file), *others)
    for patterns in (name, None):
        values = started(old, WarmStartSettings(str(old / "old"), patterns, {name: vocabulary}), **params)
        assert values[name] == expected
        assert values["mean"] == 8.0, "nothing else was taken"
        shutil.rmtree(old / "new")


@pytest.mark.parametrize("placed", ["one device", "mirrored", "cut by rows", "cut by columns"])
def test_a_table_takes_the_rows_of_its_tokens_in_parts(
    placed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part is larger than PART_BYTES, wherever the rows are; what the checkpoint lacks keeps its own values."""
    rng, tokens = np.random.RandomState(0), np.arange(40)
    values = {"table": rng.randn(30, 4), "out": rng.randn(4, 30)}
    CheckpointWriter(tmp_path / "old", 5).save(Snapshot(1, {name: np.float32(one) for name, one in values.items()}))
    new = rng.permutation(tokens)
    for file, some in (("old.txt", tokens[:30]), ("new.txt", new)):
        (tmp_path / file).write_text("".join(f"{token}\n" for token in some))
    partitioner = {
        "cut by rows": v1.fixed_size_partitioner(3, 0), "cut by columns": v1.fixed_size_partitioner(2, 1),
    }.get(placed)  # fmt: skip

    def tables(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        with v1.variable_scope("", initializer=v1.constant_initializer(8.0), partitioner=partitioner):
            table, out = v1.get_variable("table", [42, 4]), v1.get_variable("out", [4, 42])
        loss = 0.0 * (tf.reduce_sum(tf.convert_to_tensor(table)) + tf.reduce_sum(tf.convert_to_tensor(out)))
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    parts: list[int] = []

    def counted(variable: Any, places: np.ndarray, found: tf.Tensor) -> None:
        parts.append(found.dtype.size * int(tf.size(found)))
        update(variable, places, found)

    update = partitioned_variable.update
    monkeypatch.setattr(model, "update", counted)
    monkeypatch.setattr(tensor_bundle, "PART_BYTES", 160)
    vocabularies = {
        name: Vocabulary(str(tmp_path / "new.txt"), str(tmp_path / "old.txt"), num_oov_buckets=2, axis=axis)
        for axis, name in enumerate(("table", "out"))
    }
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if placed == "mirrored" else None
    config = RunConfig(
        warm_start=WarmStart(str(tmp_path / "old"), (), vocabularies=vocabularies), train_distribute=strategy
    )
    data = tf.data.Dataset.from_tensors(np.zeros([2], np.int32)).repeat()
    estimator = Estimator(tables, tmp_path / "new", config).train(lambda: data, max_steps=1)
    expected = np.full([42, 4], 8.0, np.float32), np.full([4, 42], 8.0, np.float32)
    for place, token in enumerate(new):
        if token < 30:
            expected[0][place], expected[1][:, place] = values["table"][token], values["out"][:, token]
    for name, one in zip(("table", "out"), expected, strict=True):
        np.testing.assert_array_equal(estimator.get_variable_value(name), one)
    assert max(parts) <= 160 and sum(parts) == 2 * 30 * 4 * 4


def test_without_an_initializer_the_runner_keeps_the_models_own_initial_values(old: Path) -> None:
    vocabulary = Vocabulary(str(old / "cxab"), str(old / "abc"))
    config = RunConfig(warm_start=WarmStart(str(old / "old"), (), vocabularies={"table": vocabulary}))
    data = tf.data.Dataset.from_tensors(np.zeros([1], np.int32))
    estimator = Estimator(model_fn, old / "new", config).train(lambda: data)
    assert estimator.get_variable_value("table").tolist() == [[3, 30], [8, 8], [1, 10], [2, 20]]


def test_a_new_model_is_exported_with_the_rows_of_its_tokens(old: Path) -> None:
    def gathering(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = model_fn(features, labels, mode, params)
        (table,) = (one for one in v1.trainable_variables() if one.name == "table:0")
        return spec._replace(predictions=tf.gather(table, features))

    vocabulary = Vocabulary(str(old / "cxab"), str(old / "abc"))
    config = RunConfig(warm_start=WarmStart(str(old / "old"), (), vocabularies={"table": vocabulary}))
    receiver = receiver_fn_of_spec(tf.TensorSpec([None], tf.int32))
    path = Estimator(gathering, old / "new", config).export_saved_model(old / "export", receiver).decode()
    assert Reader(f"{path}/variables/variables").get("table").tolist() == [[3, 30], [8, 8], [1, 10], [2, 20]]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patterns", "vocabularies", "names", "params"), [
    (["out"], {}, {}, {}),
    (".*", {}, {"table": "tab"}, {}),
    (".*", {}, {"tabl": "table"}, {}),
    ("nothing", {}, {}, {}),
    ("table", {}, {}, {"tokens": 5}),
    ("out", {"table": ("cxab", 4, 0, "abc")}, {}, {}),
    ("table", {"table": ("ca", 4, 0, "abc")}, {}, {}),
    ("table", {"table": ("ca", 2, 1, "abc")}, {}, {}),
    ("out/kernel", {"out/kernel": ("ca", 2, 0, "cxab")}, {}, {}),
    ("out/kernel", {"out/kernel": ("ca", 2, 0, "ca")}, {}, {"classes": 5}),
    ("table", {"table": ("nowhere", 4, 0, "abc")}, {}, {}),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused(
    patterns: Any, vocabularies: Any, names: Any, params: Any, old: Path, messages: Messages
) -> None:
    infos = {
        name: VocabInfo(str(old / new), size, n, str(old / file)) for name, (new, size, n, file) in vocabularies.items()
    }
    with messages.raised(ValueError):
        started(old, WarmStartSettings(str(old / "old"), patterns, infos, names), **params)
    assert not list(old.glob("new/model.ckpt-*"))


@pytest.mark.parametrize("source", [
    "",
    WarmStartSettings("x", cast(Any, 3)),
    WarmStartSettings("x", ["a", v1.Variable(0.0, use_resource=True)]),
    WarmStartSettings("x", "("),
    3,
], ids=["no checkpoint", "no names", "names and variables", "no expression", "no path"])  # fmt: skip
def test_settings_that_say_nothing_are_refused(source: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        as_warm_start(source)


def test_a_checkpoint_that_is_not_there_is_named_as_it_was_written(tmp_path: Path, messages: Messages) -> None:
    for source in ("nowhere", WarmStartSettings("nowhere")):
        with messages.raised(ValueError):
            started(tmp_path, source)
