"""A model of a user who logs to MLflow himself, keeps files with the run and summarises images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import runner
from runner import EstimatorSpec, ModeKeys
from tests.support.line import line

_log = logging.getLogger("mine")


class Logs(runner.Hook):
    def begin(self, run: Any) -> None:
        _log.info("my own word")
        mlflow.log_param("mine", 7)

    def after_step(self, run: Any, result: Any) -> None:
        mlflow.log_metric("own", 3.5, step=result.last_step)

    def end(self, run: Any) -> None:
        figure = Figure()
        figure.add_subplot().plot([1, 2])
        runner.log_figure(figure, "plots/line")
        run.log({"last": 1.25, "drawn": figure})
        Path("notes.txt").write_text("hello")
        runner.log_artifact("notes.txt")


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = line(features, labels, mode, params)
    if mode == ModeKeys.TRAIN:
        runner.log({"x": features}, on_progress=True)
        tf.summary.image("pictures", tf.ones([2, 4, 4, 3]) * 0.5, max_outputs=1)
        tf.compat.v1.summary.image("old", tf.constant(np.zeros([1, 4, 4, 1], np.float32)))
    return spec._replace(training_hooks=[Logs()])


def failing(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Logs to MLflow and fails before the first step."""
    mlflow.log_param("mine", 7)
    raise ValueError("the user's mistake")
