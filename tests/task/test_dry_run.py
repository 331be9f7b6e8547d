"""command=dry_run: what it finds and says, and that it leaves no trace."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, ModeKeys
from tests.support.jobs import run
from tests.support.line import line
from tests.support.messages import Messages
from tests.support.tiers import slow_but
from tests.support.trained import Put

v1 = tf.compat.v1


def wide(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`params.depth` Dense layers in two blocks; a native spec."""
    hidden = features[:, None]
    for index in range(params.depth):
        hidden = keras.layers.Dense(3, name=f"block{index % 2}_dense{index}")(hidden)
    prediction = keras.layers.Dense(1, name="out")(hidden)[:, 0]
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, {"y": prediction})
    metrics = {"b": prediction - labels, "a": prediction}
    optimizer = keras.optimizers.SGD(0.01, momentum=0.5)
    return EstimatorSpec(mode, {"y": prediction}, tf.square(prediction - labels), None, metrics, optimizer=optimizer)


def frozen(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    layer = keras.layers.Dense(2, name="frozen")
    hidden = layer(features[:, None])
    layer.trainable = False
    prediction = keras.layers.Dense(1, name="out")(hidden)[:, 0]
    return EstimatorSpec(mode, prediction, tf.square(prediction - labels), optimizer=keras.optimizers.SGD(0.01))


def different(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Asks for a variable in EVAL that TRAIN has not."""
    spec = line(features, labels, mode, params)
    if mode == ModeKeys.EVAL:
        v1.get_variable("only_in_eval", [2])
    return spec


def vector(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`line`, with a weight of another shape."""
    weight = v1.get_variable("weight", [2])
    loss = tf.reduce_mean(features) * tf.reduce_sum(weight)
    train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, {"y": features}, loss, train_op)


def named(params: Any) -> tf.data.Dataset:
    data = {"x": np.zeros([6, 2], np.float32), "id": np.arange(6)}, np.zeros([6], np.float32)
    return tf.data.Dataset.from_tensor_slices(data).batch(2, drop_remainder=True)


def rows(said: str) -> dict[str, list[str]]:
    """Lines of tables by their first cell."""
    cells = [[cell for cell in text.split("  ") if cell.strip()] for text in said.splitlines()]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in cells if line}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_tells_what_would_run_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = (
        "train.max_steps=1000", "checkpoint.save_steps=50", "eval.throttle_secs=30", "eval.at_start=true",
        "train.steps_per_loop=10",
    )  # fmt: skip
    assert run(tmp_path, "command=dry_run", *settings) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"task.yaml", "events.chief-0.jsonl"}  # the folder of the task
    said = capsys.readouterr().out
    found = rows(said)
    assert found["model_fn"] == ["tests.support.jobs.model_fn"]
    assert found["optimizer"] == ["train_op"] and found["log"] == found["summaries"]
    assert found["weight"] == ["[]", "float32", "yes", "1"]
    assert found["weight/Momentum"] == ["[]", "float32", "1"], "the optimizer's slots are in the list"
    messages.same("exit 0", said)


def test_tells_of_replicas_and_named_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    inputs = ("input.train.fn=tests.task.test_dry_run.named", "input.eval.fn=tests.task.test_dry_run.named")
    settings = ("model.fn=tests.task.test_dry_run.on_named", "train.max_steps=null", "input.eval.batch_size=2")
    mirrored = ("strategy=mirrored", "strategy.virtual_devices=2", "eval_strategy=default")
    assert run(tmp_path, "command=dry_run", *inputs, *settings, *mirrored) == 0
    messages.same("exit 0", capsys.readouterr().out)


def on_named(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    return line(features["x"][:, 0], labels, mode, params)


def test_a_long_list_is_cut_and_summed_by_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = ("model.fn=tests.task.test_dry_run.wide", "+model.params.depth=20")
    assert run(tmp_path, "command=dry_run", *settings) == 0
    said = capsys.readouterr().out
    for text in said.splitlines():
        if text.startswith(("... and ", "total: ")):
            messages.same("line", text)
    (total,) = [text for text in said.splitlines() if text.startswith("total: ")]
    # 21 layers of kernel and bias, a momentum of each, learning rate, counter and global step.
    parameters = 6 + 19 * 12 + 4
    assert [int(number) for number in re.findall(r"\d+", total)[:2]] == [parameters, parameters + 3]
    found = rows(said)
    assert found["block1_dense1"] == ["2", "12", "12"] and found["out"] == ["2", "4", "4"]
    assert found["optimizer"] == ["SGD"]
    messages.same("loss", *found["loss"])
    assert said.index("eval/a") < said.index("eval/b"), "metrics in the order of their names"


def test_a_frozen_layer_is_not_trainable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "command=dry_run", "model.fn=tests.task.test_dry_run.frozen") == 0
    found = rows(capsys.readouterr().out)
    assert found["frozen/kernel"] == ["[1, 2]", "float32", "2"]
    assert found["out/kernel"] == ["[2, 1]", "float32", "yes", "2"]


def test_the_checkpoint_is_restored_and_kept_as_it_is(
    put_trained: Put, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    put_trained()
    before = tree(tmp_path / "run")
    assert run(tmp_path, "command=dry_run", "train.max_steps=10") == 0
    found = rows(capsys.readouterr().out)
    messages.same("starts from", *found["starts from"])
    messages.same("steps", *found["steps"])
    assert run(tmp_path, "command=dry_run") == 0
    messages.same("steps", *rows(capsys.readouterr().out)["steps"])
    assert tree(tmp_path / "run") == before


def test_an_input_that_was_read_to_its_end_has_no_steps_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = ("train.max_steps=null", "input.train.fn=tests.support.jobs.once")
    assert run(tmp_path, *settings) == 0
    capsys.readouterr()
    assert run(tmp_path, "command=dry_run", *settings) == 0
    messages.same("steps", *rows(capsys.readouterr().out)["steps"])


@pytest.mark.parametrize(
    "model_fn",
    [
        "vector",
        "wide",
        "different",
    ],
    ids=str,
)
def test_a_model_that_does_not_fit_is_found_out(
    model_fn: str, put_trained: Put, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    put_trained()
    settings = (f"model.fn=tests.task.test_dry_run.{model_fn}", "+model.params.depth=1", "train.max_steps=8")
    assert run(tmp_path, "command=dry_run", *settings) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("runner: ")]
    messages.same("exit 2", said)


def test_a_rehearsal_changes_nothing_of_the_run_that_follows(tmp_path: Path) -> None:
    for name, commands in (("a", ["dry_run", "train"]), ("b", ["train"])):
        folder = tmp_path / name
        folder.mkdir()
        for command in commands:
            settings = ("model.fn=tests.task.test_dry_run.wide", "+model.params.depth=2", "input.eval=null")
            assert run(folder, f"command={command}", *settings) == 0
    first, second = (Estimator(line, tmp_path / name / "run") for name in ("a", "b"))
    for name in first.get_variable_names():
        np.testing.assert_array_equal(first.get_variable_value(name), second.get_variable_value(name))


def texts(params: Any) -> tf.data.Dataset:
    """`named` with labels that are strings."""
    return named(params).map(lambda features, labels: (features, tf.strings.as_string(labels)))


def of_texts(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    prediction = keras.layers.Dense(1, activation="sigmoid", name="out")(features["x"])
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, {"y": prediction})
    loss = keras.losses.binary_crossentropy(labels[:, None], prediction)
    return EstimatorSpec(mode, {"y": prediction}, loss, optimizer=keras.optimizers.SGD(0.01))


def compiled(features: Any, labels: Any, mode: str) -> keras.Model:
    """The error of what it returns is not raised in its lines."""
    inputs = keras.Input([2], name="x")
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="out")(inputs))
    model.compile("sgd", "binary_crossentropy")
    return model


def reading(fn: str, model_fn: str = "on_named") -> tuple[str, ...]:
    """Return the settings that read both inputs with `fn` of this file."""
    inputs = (f"input.{key}.fn=tests.task.test_dry_run.{fn}" for key in ("train", "eval"))
    return (*inputs, "input.eval.batch_size=2", f"model.fn=tests.task.test_dry_run.{model_fn}")


@pytest.mark.parametrize("command", ["dry_run", "train"])
@pytest.mark.parametrize("model_fn", ["of_texts", "compiled"])
def test_a_string_where_a_number_is_needed_is_one_message(
    model_fn: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = reading("texts", model_fn)
    assert run(tmp_path, f"command={command}", "train.max_steps=2", *settings) == 2
    said = capsys.readouterr().err
    of_error = said[said.index("runner: ") :].splitlines()
    assert len(of_error) <= 6 and "labels" in of_error[1]
    assert "test_dry_run.py, line " in said and f"in {model_fn}: " in said
    messages.same("exit 2", "\n".join(of_error), hide=r"/\S+test_dry_run\.py, line \d+")


@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored"], "default"))
def test_a_value_that_is_not_of_the_type_of_its_column_ends_a_dry_run(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (tmp_path / "flats.csv").write_text("size,city\n1.0,Paris\n2.0,Rome\n")
    inputs = [f"+input.{key}.params.files={tmp_path}/flats.csv" for key in ("train", "eval")]
    inputs += [f"+input.{key}.params.columns={{size: float32, city: float32}}" for key in ("train", "eval")]
    inputs += [f"+input.{key}.params.label=size" for key in ("train", "eval")]
    inputs += ["input.train.fn=input_fns.csv", "input.eval.fn=input_fns.csv"]
    model = ("model.fn=tests.task.test_dry_run.on_city", f"strategy={strategy}")
    more = ("strategy.virtual_devices=2",) if strategy == "mirrored" else ()
    assert run(tmp_path, "command=dry_run", *inputs, *model, *more) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/flats.csv line 2: column city is Paris, not a float32" in said
    messages.same("exit 2", said[said.index("runner: ") :])


def on_city(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    return line(features["city"], labels, mode, params)


def slow(params: Any) -> tf.data.Dataset:
    """`named`, whose first batch takes two seconds."""
    return named(params).map(lambda *batch: tf.nest.map_structure(wait, batch))


def wait(tensor: tf.Tensor) -> tf.Tensor:
    def waited(value: np.ndarray) -> np.ndarray:
        time.sleep(1.0)
        return value

    return tf.ensure_shape(tf.numpy_function(waited, [tensor], tensor.dtype), tensor.shape)


def test_a_batch_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.task.dry_run.TRY_SECS", 0.3)
    assert run(tmp_path, "command=dry_run", *reading("slow")) == 0
    said = capsys.readouterr().out
    messages.same("exit 0", said[said.index("input.eval: ") :])


def shuffled(params: Any) -> tf.data.Dataset:
    """`named`, of which a shuffle reads far too much before its first batch."""
    return named(params).repeat().map(lambda *batch: tf.nest.map_structure(wait, batch)).shuffle(1000)


def test_a_shuffle_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "command=dry_run", *reading("shuffled"), "input.eval.fn=tests.task.test_dry_run.named") == 0
    assert "not tried" not in capsys.readouterr().out


def without_predict(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    if mode == ModeKeys.PREDICT:
        raise ValueError("PREDICT is not written yet")
    return line(features, labels, mode, params)


def test_predict_is_traced_where_the_run_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("command=dry_run", "model.fn=tests.task.test_dry_run.without_predict")
    assert run(tmp_path, *settings) == 0
    exports = ("export.exporters=[final]", "export.receiver_fn=tests.support.jobs.serving_input_receiver_fn")
    assert run(tmp_path, *settings, *exports) == 2
    assert "PREDICT is not written yet" in capsys.readouterr().err


def by_pairs(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A loss per example, of which each compares its example with all others."""
    predictions = features * v1.get_variable("weight", [], initializer=v1.ones_initializer())
    loss = tf.reduce_mean(tf.square(predictions[:, None] - predictions[None]), 1)
    return EstimatorSpec(mode, loss=loss, optimizer=v1.train.GradientDescentOptimizer(0.1))


@pytest.mark.parametrize(("model", "is_warned"), [("by_pairs", True), ("wide", False), ("summed", False)])
def test_a_loss_that_couples_examples_is_said_on_several_replicas(
    model: str, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"model.fn=tests.task.test_dry_run.{model}", "model.params={depth: 1}", "input.train.batch_size=4")
    mirrored = ("strategy=mirrored", "strategy.virtual_devices=2", "eval_strategy=default")
    assert run(tmp_path, "command=dry_run", *words, *mirrored) == 0
    assert ("couples the examples" in capsys.readouterr().out) is is_warned
    assert run(tmp_path, "command=dry_run", *words) == 0
    assert "couples the examples" not in capsys.readouterr().out


def summed(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A loss that is a sum over the batch."""
    prediction = features * v1.get_variable("weight", [], initializer=v1.ones_initializer())
    loss = v1.losses.mean_squared_error(labels, prediction, reduction=v1.losses.Reduction.SUM)
    return EstimatorSpec(mode, loss=loss, optimizer=v1.train.GradientDescentOptimizer(0.1))
