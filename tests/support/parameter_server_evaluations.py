"""What the cluster of parameter_server_cases.py evaluates; each case returns plain values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Hook, ModeKeys, RunConfig
from tests.support.models import Rows, data
from tests.support.parameter_server_cases import after
from tests.support.parameter_server_models import Surroundings, counting, numbers

v1 = tf.compat.v1


def random_model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Metrics of every form, a table, and random numbers: those of TF 1, or with `dropout` those of Keras. With
    `largest` a metric whose state cannot be merged."""
    keys, values = tf.constant([0, 1], tf.int64), tf.constant([1.0, 0.5], tf.float64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1.0)
    hidden = keras.layers.Dense(4, dtype="float64")(features)
    if params.get("dropout"):
        hidden = keras.layers.Dropout(0.5, dtype="float64")(hidden, training=True)
    predictions = keras.layers.Dense(1, dtype="float64")(hidden) * table.lookup(tf.constant([1], tf.int64))
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)
    noise = v1.random.uniform([tf.shape(features)[0]], dtype=tf.float64)
    error = keras.metrics.MeanSquaredError(dtype="float64")
    error.update_state(labels, predictions)
    metrics = {
        "each": (predictions - labels)[:, 0], "noise": noise, "keras": error,
        "pair": v1.metrics.mean_absolute_error(labels, predictions),
        "auc": v1.metrics.auc(labels[:, 0] > 0, tf.sigmoid(predictions[:, 0])),
    }  # fmt: skip
    if params.get("largest"):
        local = {"trainable": False, "collections": [v1.GraphKeys.LOCAL_VARIABLES]}
        largest = v1.get_variable("largest", [], tf.float64, v1.zeros_initializer(), use_resource=True, **local)
        of_batch = tf.reduce_max(tf.abs(predictions - labels))
        metrics["largest"] = largest.read_value(), largest.assign(tf.maximum(largest.read_value(), of_batch))
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.05), eval_metric_ops=metrics)


class Watching(tf.compat.v1.train.SessionRunHook):
    """Counts the batches that it sees."""

    batches = 0

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(self.loss)

    def begin(self) -> None:
        self.loss = v1.get_default_graph().get_operations()[0].outputs[0]

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.batches += 1


def evaluation(around: Surroundings) -> Any:
    """By the workers, of the same checkpoint as in a single process: whatever is known of the data."""
    found: dict[str, Any] = {}
    features, labels = data(150, "float64")
    whole = lambda: tf.data.Dataset.from_tensor_slices((features, labels))  # noqa: E731
    sources = {
        "known": lambda: whole().shuffle(150).batch(8),
        "unknown": lambda: whole().filter(lambda x, y: y[0] < 100.0).batch(8),
        "python": lambda: tf.data.Dataset.from_generator(
            lambda: zip(features, labels, strict=True),
            output_signature=(tf.TensorSpec([4], tf.float64), tf.TensorSpec([1], tf.float64)),
        ).batch(8),
    }
    estimators = {}
    for params in ({}, {"dropout": True}, {"largest": True}):
        kind = next(iter(params), "plain")
        one = Estimator(random_model, around.folder / f"eval-{kind}", RunConfig(), params)
        one.train(lambda: whole().batch(8), steps=5)
        many = Estimator(random_model, one.model_dir, RunConfig(train_distribute=around.strategy), params)
        estimators[kind] = one, many
    for name, source in sources.items():
        around.requests.clear()
        found[name] = [each.evaluate(source) for each in estimators["plain"]]
        found[f"{name} requests"] = sum(around.requests)
    found["again"] = [estimators["plain"][1].evaluate(sources["known"]) for _ in range(2)]
    found["steps"] = [each.evaluate(sources["known"], steps=7) for each in estimators["plain"]]
    around.requests.clear()
    around.logged.clear()
    found["dropout"] = [each.evaluate(sources["known"]) for each in estimators["dropout"]]
    hook = Watching()
    found["hook"] = [estimators["plain"][1].evaluate(sources["known"], hooks=[hook]), found["known"][0]]
    found["here"] = {"requests": sum(around.requests), "batches": hook.batches, "said": around.logged[:]}
    found["largest"] = [each.evaluate(sources["known"]) for each in estimators["largest"]]
    found["largest requests"] = sum(around.requests) - found["here"]["requests"]
    of_evaluation, of_training = Rows("features", "labels"), Rows("features", "labels")
    estimators["plain"][1].evaluate(lambda: whole().batch(8), hooks=[of_evaluation])
    settings = RunConfig(train_distribute=around.strategy, log_step_count_steps=2)
    Estimator(random_model, around.folder / "fetched", settings).train(
        lambda: whole().batch(8), hooks=[of_training], steps=4
    )
    rows = {(*x, *y) for x, y in zip(features.tolist(), labels.tolist(), strict=True)}
    of_steps = zip(of_training.of("features").tolist(), of_training.of("labels").tolist(), strict=True)
    trained_on = [(*x, *y) for x, y in of_steps]
    found["fetched"] = {
        "steps": of_training.steps,
        "trained on": [len(set(trained_on)), rows.issuperset(trained_on)],
        "evaluated": [np.array_equal(of_evaluation.of(name), one) for name, one in
                      (("features", features), ("labels", labels))],
    }  # fmt: skip
    return found


def evaluation_lost(around: Surroundings) -> Any:
    """A worker dies while it evaluates: what it was asked for is asked of another one, and counted once."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = counting(1200)(features, labels, mode)
        big = tf.random.stateless_uniform([700, 700], [1, 2])
        work = tf.reduce_sum(tf.linalg.matmul(big, big)) * 0.0
        count = v1.metrics.true_positives(tf.ones_like(features), tf.ones_like(features))
        number = tf.cast(features, tf.float64) + tf.cast(work, tf.float64)
        return EstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op, eval_metric_ops={"n": count, "x": number})

    estimator = around.estimator(model_fn, "evaluation-lost", steps_per_loop=10)
    estimator.train(lambda: numbers(1200).batch(4), steps=10)
    around.logged.clear()

    class Kill(Hook):
        timer: Any = None

        def after_batches(self, run: Any, examples: int) -> None:
            if examples >= 200 and self.timer is None:
                self.timer = after(0.1, self.restart)

        def restart(self) -> None:
            around.servers.kill("worker", 1)
            around.servers.start("worker", 1)

    kill = Kill()
    metrics = estimator.evaluate(lambda: numbers(1200).batch(4), hooks=[kill])
    kill.timer.join()
    return {"metrics": metrics, "said": around.logged[:]}


CASES = {"evaluation": evaluation, "evaluation_lost": evaluation_lost}
