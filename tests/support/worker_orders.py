"""Programs that go through names in another order on each worker, as through a set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.distribute.tf_config import read_tf_config
from tests.support.replica_programs import BATCH_SIZE, EXAMPLES, STEPS, batches, linear, some, spec_of

v1 = tf.compat.v1
NAMES = ("city", "item", "user")


def own_index() -> int:
    cluster = os.environ.get("TF_CONFIG")
    return 0 if cluster is None else read_tf_config(cluster).worker_index


def in_own_order(names: Iterable[str]) -> list[str]:
    return sorted(names, reverse=own_index() > 0)


def outputs(features: tf.Tensor) -> dict[str, tf.Tensor]:
    """Of three linear models with kernels of one shape."""
    kernels = {name: some(f"{name}/kernel", [4, 1]) for name in NAMES}
    return {name: tf.squeeze(features @ kernels[name], 1) * (place + 1.0) for place, name in enumerate(NAMES)}


def gradients(features: tf.Tensor, labels: tf.Tensor, mode: str) -> EstimatorSpec:
    """Its gradients are in an order of each worker's own, and so are the metrics of its evaluation."""
    of_names = outputs(features)
    losses = {name: (of_names[name] - labels) ** 2 for name in in_own_order(NAMES)}
    loss = tf.reduce_mean(sum(losses.values()))
    if mode != "train":
        return EstimatorSpec(mode, loss=loss, eval_metric_ops=losses)
    weights = {one.name: one for one in v1.trainable_variables()}
    order = in_own_order(weights)
    of_order = v1.gradients(loss, [weights[name] for name in order])
    pairs = [(gradient, weights[name]) for gradient, name in zip(of_order, order, strict=True)]
    return spec_of(mode, loss, v1.train.GradientDescentOptimizer(0.05).apply_gradients(pairs))


def losses(features: tf.Tensor, labels: tf.Tensor, mode: str) -> EstimatorSpec:
    """The sums of their weights are values that workers add up."""
    of_names = outputs(features)
    for name in in_own_order(NAMES):
        v1.losses.mean_squared_error(labels, of_names[name], tf.nn.relu(of_names[name]))
    loss = v1.losses.get_total_loss()
    return spec_of(mode, loss, v1.train.AdamOptimizer(0.05).minimize(loss))


def metrics(features: tf.Tensor, labels: tf.Tensor, mode: str) -> EstimatorSpec:
    """The states of those of TensorFlow 1 are called mean_1, mean_2, mean_3."""
    of_names = outputs(features)
    loss = tf.reduce_mean((of_names["user"] - labels) ** 2)
    found = {name: v1.metrics.mean(of_names[name]) for name in in_own_order(NAMES)}
    train = v1.train.AdamOptimizer(0.05).minimize(loss)
    return EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=found if mode == "eval" else None)


def trained_and_evaluated(program: Callable[..., EstimatorSpec], folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return name -> value of each variable and metric; {"refused": text} if it is refused."""
    estimator = Estimator(program, folder, config)
    source = Input(batches, batch_size=BATCH_SIZE, shard="examples")
    try:
        estimator.train(source, max_steps=STEPS)
        found = estimator.evaluate(Input(lambda: batches().take(-(-EXAMPLES // BATCH_SIZE))))
    except ValueError as error:
        return {"refused": str(error)}
    values = {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
    return {**values, **{name: np.float64(value) for name, value in found.items()}}


def tables(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: dict[str, Any]) -> EstimatorSpec:
    """Eight equal tables, made in the order of a set, or of its names if `params["sorted"]`."""
    names = set(TABLES)
    order = sorted(names) if params["sorted"] else names
    vectors = {name: keras.layers.Embedding(5, 2, dtype="float64")(features[name]) for name in order}
    outputs = keras.layers.Dense(1, dtype="float64")(tf.concat([vectors[name] for name in sorted(names)], 1))
    return EstimatorSpec(mode, loss=(outputs[:, 0] - labels) ** 2, optimizer=keras.optimizers.Adam(0.1))


TABLES = ("user", "item", "shop", "city", "brand", "color", "size", "year")


def ids() -> tf.data.Dataset:
    chance = np.random.default_rng(0)
    features = {name: chance.integers(0, 5, 64) for name in TABLES}
    return tf.data.Dataset.from_tensor_slices((features, chance.random(64))).batch(24).repeat()


def trained_tables(folder: Path, config: RunConfig, *, is_sorted: bool) -> dict[str, Any]:
    """Return name -> value of each variable; {"refused": text} if it is refused."""
    estimator = Estimator(tables, folder, config, {"sorted": is_sorted})
    try:
        estimator.train(Input(ids, batch_size=24, shard="examples"), max_steps=6)
    except ValueError as error:
        return {"refused": str(error)}
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


# --- inputs -----------------------------------------------------------------------------------------------------------


def examples(mode: str, params: dict[str, Any]) -> tf.data.Dataset:
    """Batches of 8 of 64 examples, whose labels tell them apart. On the second worker they are in another order in the
    mode `params["mode"]`, from the batch `params["batch"]` on; `params["augmented"]`: each worker draws its own noise.
    """
    numbers = np.arange(64)
    if own_index() and mode == params.get("mode"):
        begin = 8 * params.get("batch", 0)
        numbers[begin:] = numbers[begin:][::-1]
    x = np.random.default_rng(0).normal(size=[64, 4])[numbers]
    if params.get("augmented"):
        x = x + np.random.default_rng(own_index()).normal(size=x.shape) / 8
    dataset = tf.data.Dataset.from_tensor_slices((x, numbers)).batch(8)
    return dataset.repeat() if mode == "train" else dataset


def of_number(features: tf.Tensor, labels: tf.Tensor, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean((linear(features) - tf.cast(labels, tf.float64) / 64) ** 2)
    step = v1.train.get_global_step()
    return EstimatorSpec(mode, loss=loss, train_op=v1.train.GradientDescentOptimizer(0.05).minimize(loss, step))


STREAMS: dict[str, dict[str, Any]] = {
    "later": {"mode": "train", "batch": 3},  # that of step 4, after which is the first save
    "eval": {"mode": "eval"},
    "augmented": {"augmented": True},
}


def refusal_of_stream(params: dict[str, Any], folder: Path, config: RunConfig) -> str:
    """Train and evaluate. Return what it is refused with; '': it is not."""
    estimator = Estimator(of_number, folder, config.replace(save_checkpoints_steps=4, steps_per_loop=1))
    source = Input(examples, params, batch_size=8, shard="examples")
    try:
        estimator.train(source, max_steps=8)
        found = estimator.evaluate(Input(examples, params, shard="examples"))
    except ValueError as error:
        return f"{error} The last checkpoint: {estimator.latest_checkpoint()}"
    assert np.isfinite(found["loss"])
    return ""
