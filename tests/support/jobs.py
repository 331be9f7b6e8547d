"""Runs of the command line inside the test's process: a config file, the functions that it names, what came of it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, TensorServingInputReceiver
from runner.config import parsing, schema
from runner.task import main
from tests.config.test_config import composed
from tests.support.journal import recorded
from tests.support.line import line

SMALL = (
    "model=custom", "model.fn=tests.support.jobs.model_fn", "input=custom", "input.train.fn=tests.support.jobs.endless",
    "input.train.batch_size=2", "input.eval.fn=tests.support.jobs.once", "input.eval.batch_size=3",
    "input.predict.fn=tests.support.jobs.once", "input.predict.batch_size=3", "train.max_steps=4", "tracking=none",
    "run.progress=plain",
)  # fmt: skip

model_fn = line


def once(params: Any) -> tf.data.Dataset:
    """x = 1 .. n and y = 2x, in order. params: `num_examples` (8)."""
    x = np.arange(1, params.get("num_examples", 8) + 1, dtype=np.float32)
    return tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(params.get("batch_size", 3))


def endless(params: Any) -> tf.data.Dataset:
    return once(params).repeat()


def endless_of_unknown_size(params: Any) -> tf.data.Dataset:
    """As `endless`, of which nobody can know that before: an evaluation on it begins."""
    return endless(params).filter(lambda *_: True)


def interrupting(params: Any) -> tf.data.Dataset:
    """As `endless_of_unknown_size`; sends this process params.signal (SIGTERM) with each batch of params.at ([5])."""

    def send(batch: Any) -> Any:
        if batch in params.get("at", [5]):
            os.kill(os.getpid(), signal.Signals[params.get("signal", "SIGTERM")])
        return batch

    def sending(index: Any, element: Any) -> Any:
        with tf.control_dependencies([tf.py_function(send, [index], tf.int64)]):
            return tf.nest.map_structure(tf.identity, element)

    return endless_of_unknown_size(params).enumerate().map(sending)


def deleting(params: Any) -> tf.data.Dataset:
    """As `endless`; with the sixth batch deletes params.folder, and makes it anew where params.anew says so, or moves
    it to params.moved_to.
    """

    def delete(batch: Any) -> Any:
        if batch == 5 and params.get("moved_to"):
            os.rename(params["folder"], params["moved_to"])
        elif batch == 5:
            shutil.rmtree(params["folder"])
            if params.get("anew"):
                os.mkdir(params["folder"])
        return batch

    def deleted(index: Any, element: Any) -> Any:
        with tf.control_dependencies([tf.py_function(delete, [index], tf.int64)]):
            return tf.nest.map_structure(tf.identity, element)

    return endless(params).enumerate().map(deleted)


def failing(params: Any) -> tf.data.Dataset:
    """As `once`, but the fifth example cannot be read."""

    def check(x: Any, y: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(x, 5.0, message="bad example")]):
            return tf.identity(x), y

    return once(params).unbatch().map(check).batch(2)


def many_kinds(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`line` with predictions of every kind."""
    spec = line(features, labels, mode, params)
    if mode != ModeKeys.PREDICT:
        return spec
    texts = tf.strings.join(["é", tf.strings.as_string(tf.cast(features, tf.int32))])
    nested = {"nan": features / 0.0 - features / 0.0, "matrix": features[:, None, None] * tf.ones([1, 2, 2])}
    return EstimatorSpec(mode, {"x": features, "text": texts, "nested": nested, "even": features % 2 == 0})


def bare(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`line` whose prediction is one tensor."""
    spec = line(features, labels, mode, params)
    return EstimatorSpec(mode, spec.predictions["y"]) if mode == ModeKeys.PREDICT else spec


def config_file(folder: Path, *overrides: str) -> Path:
    """The file of the task that `overrides` describe; its run lives in `folder/run`."""
    tree = composed([*SMALL, *overrides])
    # Of each folder on a command line Hydra would compose the config anew, for 0.2 s.
    tree["model_dir"] = tree["model_dir"] or f"{folder}/run"
    config = parsing.parse(tree)
    path = folder / "task.yaml"
    schema.save(config, path)
    return path


def run(folder: Path, *overrides: str) -> int:
    """Runs what `overrides` say in this process, as run.inline does. The exit code."""
    return main.main([str(config_file(folder, *overrides))], inline=True)


def noted(folder: Path) -> list[dict[str, Any]]:
    """The journal of the run in `folder/run`."""
    return recorded(folder / "run")


def results(folder: Path) -> list[dict[str, Any]]:
    """What the runs in `folder/run` came to, the first one first, without the time and the memory, which differ."""
    found = [event for event in noted(folder) if event.get("event") == "result"]
    without = ("time", "event", "peak_memory")
    return [{key: value for key, value in event.items() if key not in without} for event in found]


def named(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`line`, whose features have a name."""
    return line(features["x"], labels, mode, params)


def named_once(params: Any) -> tf.data.Dataset:
    """With a feature that the model does not use."""
    return once(params).map(lambda x, y: ({"x": x, "unused": x}, y))


def named_endless(params: Any) -> tf.data.Dataset:
    return named_once(params).repeat()


def rows(params: Any) -> tf.data.Dataset:
    """As `once`, but features are x and the texts id: 1, "2" ... by turns, with their quotes."""
    return once(params).map(lambda x, y: ({"x": x, "id": tf.where(x % 2 == 0, _quoted(x), _text(x))}, y))


def _text(x: Any) -> Any:
    return tf.strings.as_string(tf.cast(x, tf.int32))


def _quoted(x: Any) -> Any:
    return tf.strings.join(['"', _text(x), '"'])


def endless_rows(params: Any) -> tf.data.Dataset:
    return rows(params).repeat()


def popping(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`line`, which takes all features out of the dict, and returns one as it is and one changed."""
    popped = features.pop("id")
    spec = line(features.pop("x"), labels, mode, params)
    changed = {"id": tf.strings.upper(popped)} if params.get("clash") else {}
    return spec._replace(predictions={**spec.predictions, **changed}) if mode == ModeKeys.PREDICT else spec


def compiled(features: Any, labels: Any, mode: str, params: Any) -> keras.Model:
    """A compiled model with the input x, whose prediction is one array `[batch, 1]`."""
    x = keras.Input([], name="x")
    model = keras.Model(x, keras.layers.Dense(1, name="dense")(x[:, None]))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def serving_input_receiver_fn() -> Any:
    """Requests hold texts."""
    texts = tf.compat.v1.placeholder(tf.string, [None], "texts")
    return TensorServingInputReceiver(tf.strings.to_number(texts), {"texts": texts})
