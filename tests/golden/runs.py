"""Trains and evaluates the golden models, the same on tf.estimator 2.15 and on the runner.

With TensorFlow 2.15 it is a program: `python -m tests.golden.runs write FOLDER MODEL ...` leaves model_dirs and what
came out, `... read FOLDER MODEL ...` takes up those of another. On the runner, `import runner.classic` comes first.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tests.golden import data

# What `make test` compares is written first: the process ends with the tests that ask it.
FIRST = ("layers", "partitions", "schedules", "of_tpu", "keras_model", "savers", "mixture")
MODELS = (
    *FIRST,
    "scopes",
    "premade",
    "recurrent",
    "tables",
    "columns",
    "measures",
    "optimizers",
    "beginnings",
    "objects",
    "alternating",
    "fed",
    "old",
)
OF_KERAS = "sequences"  # is trained where tf.keras is Keras 2
# Averages, moving statistics, parts, hashed names, a model of Keras.
READ_BACK = ("scopes", "layers", "partitions", "columns", "keras_model", "objects")
STEPS, MORE_STEPS = 20, 5
START = "start"  # the folder of the checkpoint that one of them begins with
VOCABULARY = ["Bern", "Oslo", "red", "blue"]


class Losses(tf.train.SessionRunHook):
    """The loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def begin(self) -> None:
        self._loss = tf.get_collection(tf.GraphKeys.LOSSES)[-1]  # tf.estimator adds that of EstimatorSpec

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen.append(float(run_values.results))


def estimator(name: str, folder: Path) -> Any:
    """The golden model `name` in `folder`, which saves every ten steps."""
    module, model_dir = importlib.import_module("tests.golden." + name), str(folder / name)
    given = {"vocabulary": str(folder / "vocabulary.txt"), "checkpoint": str(folder / START / "model.ckpt-20")}
    config = {
        "tf_random_seed": 1,
        "save_checkpoints_steps": 10,
        "keep_checkpoint_max": None,
        "save_summary_steps": 5,
        "log_step_count_steps": 10,
    }
    if hasattr(module, "estimator"):
        return module.estimator(model_dir, **config)
    params = given if "params" in inspect.signature(module.model_fn).parameters else None
    return tf.estimator.Estimator(module.model_fn, model_dir, tf.estimator.RunConfig(**config), params)


def input_fn(name: str) -> Any:
    return importlib.import_module("tests.golden." + name).input_fn


def trained(name: str, folder: Path, max_steps: int) -> list[float]:
    """The losses of training up to `max_steps`."""
    losses = Losses()
    random.seed(1)  # what Keras 2 draws the seeds of initializers from
    estimator(name, folder).train(input_fn(name), hooks=[losses], max_steps=max_steps)
    return losses.seen


def evaluated(name: str, folder: Path, checkpoint: str | None = None) -> dict[str, Any]:
    """The metrics at a checkpoint, or at the latest."""
    metrics = estimator(name, folder).evaluate(input_fn(name), checkpoint_path=checkpoint)
    return {key: np.asarray(value, np.float64).tolist() for key, value in metrics.items()}


def served(name: str, folder: Path, checkpoint: str | None = None) -> dict[str, Any]:
    """What a model that has a `receiver` predicts at a checkpoint, or at the latest, and what its export answers."""
    module, model = importlib.import_module("tests.golden." + name), estimator(name, folder)
    if not hasattr(module, "receiver"):
        return {}
    predicted = [one["y"].tolist() for one in model.predict(module.input_fn, checkpoint_path=checkpoint)]
    path = model.export_saved_model(str(folder / (name + "-export")), module.receiver, checkpoint_path=checkpoint)
    answer = tf.saved_model.load_v2(path.decode()).signatures["serving_default"]
    return {"predicted": predicted, "exported": answer(x=tf.constant(data.numbers(3, 4)))["y"].numpy().tolist()}


def write_vocabulary(folder: Path) -> None:
    (folder / "vocabulary.txt").write_text("\n".join(VOCABULARY) + "\n")


def leave(path: Path, found: dict[str, Any]) -> None:
    """Writes what was found, whole or not at all: somebody may be waiting for it."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(found))
    os.replace(scratch, path)


def write(folder: Path, *names: str) -> None:
    """Of each model that is named: a model_dir with the checkpoints of steps 0, 10 and 20, and `<name>.json`.

    A name may be one of `keras_optimizers`: then the checkpoints are of steps 0, 5 and 10.
    """
    from tests.golden import keras_optimizers

    write_vocabulary(folder)
    # The last one turns TensorFlow 2 off.
    for name in [one for one in (*MODELS[:-1], OF_KERAS, *keras_optimizers.MAKERS, MODELS[-1]) if one in names]:
        if name in keras_optimizers.MAKERS:
            leave(folder / (name + ".json"), {"losses": trained_by(name, folder, 10)})
            continue
        losses = trained(name, folder, STEPS)
        if name == "scopes":
            shutil.copytree(folder / name, folder / START)
        metrics = evaluated(name, folder)
        leave(folder / (name + ".json"), {"losses": losses, "metrics": metrics, "served": served(name, folder)})


def trained_by(name: str, folder: Path, max_steps: int) -> list[float]:
    """The losses of training a model of Keras with the optimizer `name`."""
    from tests.golden import keras_optimizers

    losses = Losses()
    keras_optimizers.estimator(name, str(folder / name)).train(
        keras_optimizers.input_fn, hooks=[losses], max_steps=max_steps
    )
    return losses.seen


def read(folder: Path, *names: str) -> None:
    """Of model_dirs in `folder`: the metrics, and the losses of training on."""
    for name in names:
        metrics = evaluated(name, folder)
        losses = trained(name, folder, STEPS + MORE_STEPS)
        leave(folder / (name + ".json"), {"losses": losses, "metrics": metrics})


def here(folder: Path) -> None:
    """On the runner: the model that wants a process of its own, in `folder`, where it has its first checkpoint."""
    importlib.import_module("runner.classic")
    losses = trained(OF_KERAS, folder, STEPS)
    leave(folder / (OF_KERAS + ".json"), {"losses": losses, "metrics": evaluated(OF_KERAS, folder)})


if __name__ == "__main__":
    {"write": write, "read": read, "here": here}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
