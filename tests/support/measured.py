"""A model that says much in training: metrics of each kind, scalars of both kinds of summaries, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, ModeKeys, RunConfig
from tests.support.journal import journal_of, metrics_of_steps
from tests.support.line import read_events

v1 = tf.compat.v1

KINDS = ("mae", "largest", "pair", "kept")
"""Names of its metrics."""


def measured(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A weight that begins at 1 and learns y = 2x: the error of an example is about x. params: `style`."""
    predictions = features * v1.get_variable("weight", [], tf.float64, initializer=v1.constant_initializer(1.0))
    error = tf.abs(predictions - labels)
    kept = keras.metrics.Mean(name="kept", dtype="float64")
    kept.update_state(error)
    metrics = {"mae": error, "largest": tf.reduce_max(features), "pair": v1.metrics.mean(error), "kept": kept}
    if mode == ModeKeys.TRAIN:
        tf.summary.scalar("new", tf.reduce_mean(error))
        v1.summary.scalar("old", tf.reduce_mean(error))
    loss = tf.square(predictions - labels)
    if params["style"] == "native":
        optimizer = v1.train.GradientDescentOptimizer(0.001)
        return EstimatorSpec(mode, predictions, loss, optimizer=optimizer, eval_metric_ops=metrics)
    loss = tf.reduce_mean(loss)
    train_op = v1.train.GradientDescentOptimizer(0.001).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, predictions, loss, train_op, eval_metric_ops=metrics)


def wide_points(num_examples: int, batch_size: int) -> Input:
    """x = 1, 2, .. and y = 2x, in order. Args: batch_size: of all replicas."""

    def input_fn(params: Any) -> tf.data.Dataset:
        x = np.arange(1, num_examples + 1, dtype=np.float64)
        return tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(params["batch_size"])

    return Input(input_fn, params={}, batch_size=batch_size)


def train_measured(folder: Path, config: RunConfig, style: str) -> None:
    """Train on 1..23, four a step, with a journal."""
    journal = journal_of(folder / f"events.{config.cluster.worker_index}.jsonl")
    trainer = Estimator(measured, folder / "model", config, params={"style": style}, journal=journal)
    trainer.train(wide_points(23, 4))
    journal.close()


def journaled(folder: Path) -> dict[int, dict[str, float]]:
    """Return step -> what the journal of the chief has of a step whose loss is logged; not scalars of summaries."""
    found: dict[int, dict[str, float]] = {}
    for step, values in metrics_of_steps(folder / "events.0.jsonl"):
        if "train/loss" in values:
            found.setdefault(step, {}).update(values)
    return found


def summarised_values(folder: Any, tag: str) -> dict[int, Any]:
    """Return step -> value of a tag in the event files of `folder`."""
    return {event.step: event.value for event in read_events(folder) if event.tag == tag}
