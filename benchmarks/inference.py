"""Examples per second of evaluation and prediction: the Estimator, and Keras `evaluate` and `predict`.

    python benchmarks/inference.py [--rounds 9] [--batches 400]

The same network (64-128-10), loss and accuracy, with batches of 128 from the same tf.data pipeline. The Estimator's
times are of whole calls: it calls the input function, looks for the checkpoint (and reads it if it is not in memory),
and writes results to the event file. Keras starts with its model and dataset in memory.

Evaluations with an AUC and a MeanIoU of Keras on mirrored(2) and mirrored(4) virtual CPUs: of many small batches, and
of three large ones.

The writers are those of command=predict. They are compared with what a user would write after Keras' `predict`:
`json.dumps` of each example for JSON Lines, and `np.savez` for .npz.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _rounds import Case, Ratio, arguments, measure, show, timed

import runner
from runner.distribute.strategy import split_cpu
from runner.task.prediction_files import open_predictions

BATCH, DISTINCT, LARGE = 128, 40, 16_384


def input_fn(batches: int) -> tf.data.Dataset:
    random = np.random.default_rng(1)
    features = random.normal(size=(DISTINCT, BATCH, 64)).astype(np.float32)
    labels = random.integers(10, size=(DISTINCT, BATCH))
    return tf.data.Dataset.from_tensor_slices((features, labels)).repeat().take(batches).prefetch(2)


def build_layers() -> list[keras.layers.Layer]:
    return [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    logits = features
    for layer in build_layers():
        logits = layer(logits)
    if mode == runner.ModeKeys.PREDICT:
        return runner.EstimatorSpec(mode, predictions={"probabilities": tf.nn.softmax(logits)})
    correct = tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    optimizer = keras.optimizers.SGD(0.01)
    return runner.EstimatorSpec(mode, loss=losses, optimizer=optimizer, eval_metric_ops={"accuracy": correct})


def ours(batches: int, directory: Path) -> list[Case]:
    estimator = runner.Estimator(model_fn, directory / "model")
    estimator.train(lambda: input_fn(batches), steps=1)
    examples = batches * BATCH

    def data() -> tf.data.Dataset:
        return input_fn(batches)

    def predict(single: bool) -> None:
        seen = sum(1 if single else len(one["probabilities"]) for one in _predicted(single))
        assert seen == examples

    def _predicted(single: bool) -> Any:
        return estimator.predict(data, yield_single_examples=single)

    def write(suffix: str) -> None:
        with open_predictions(directory / f"predictions{suffix}") as writer:
            for batch in _predicted(single=False):
                writer.write(batch)

    return [
        timed("evaluate, ours", examples, lambda: estimator.evaluate(data)),
        timed("predict, ours, batches", examples, lambda: predict(single=False)),
        timed("predict, ours, examples", examples, lambda: predict(single=True)),
        timed("write, ours, .jsonl", examples, lambda: write(".jsonl")),
        timed("write, ours, .npz", examples, lambda: write(".npz")),
        timed("write, ours, .parquet", examples, lambda: write(".parquet")),
        timed("write, ours, .tfrecord", examples, lambda: write(".tfrecord")),
    ]


def counting_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    spec = model_fn(features, labels, mode)
    if mode != runner.ModeKeys.EVAL:
        return spec
    correct = spec.eval_metric_ops["accuracy"]
    metrics = {"auc": keras.metrics.AUC(), "iou": keras.metrics.MeanIoU(2)}
    for metric in metrics.values():
        metric.update_state(labels % 2 == 0, correct)
    return spec._replace(eval_metric_ops={"accuracy": correct, **metrics})


def on_replicas(batches: int, directory: Path) -> list[Case]:
    cases = []
    for number in (1, 2, 4):
        strategy = runner.build_strategy("mirrored", devices=[f"CPU:{index}" for index in range(number)])
        config = runner.RunConfig(train_distribute=strategy)
        estimator = runner.Estimator(counting_model_fn, directory / f"mirrored_{number}", config)
        for size, count in ((BATCH, batches), (LARGE, 3)):
            data = runner.Input(lambda size=size, count=count: of_size(size, count), params={}, batch_size=size)
            if size == BATCH:
                estimator.train(data, steps=1)
            name = f"evaluate {'many small' if size == BATCH else 'three large'}, mirrored({number})"
            cases.append(timed(name, size * count, lambda estimator=estimator, data=data: estimator.evaluate(data)))
    return cases


def of_size(size: int, count: int) -> tf.data.Dataset:
    random = np.random.default_rng(2)
    features, labels = random.normal(size=(size, 64)).astype(np.float32), random.integers(10, size=size)
    return tf.data.Dataset.from_tensors((features, labels)).repeat(count).prefetch(2)


def by_keras(batches: int, directory: Path, steps_per_execution: int) -> list[Case]:
    model = keras.Sequential([keras.Input([64]), *build_layers(), keras.layers.Softmax()])
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps_per_execution)
    dataset, examples, name = input_fn(batches), batches * BATCH, f"Keras({steps_per_execution})"

    def predict() -> np.ndarray:
        return model.predict(dataset, verbose=0)

    def write_json() -> None:
        with open(directory / "keras.jsonl", "w") as file:
            for row in predict():
                file.write(json.dumps({"probabilities": row.tolist()}) + "\n")

    cases = [
        timed(f"evaluate, {name}", examples, lambda: model.evaluate(dataset, verbose=0)),
        timed(f"predict, {name}", examples, predict),
    ]
    if steps_per_execution == 1:
        return cases
    return [
        *cases,
        timed(f"write, {name}, json.dumps", examples, write_json),
        timed(f"write, {name}, np.savez", examples, lambda: np.savez(directory / "keras.npz", probabilities=predict())),
    ]


def ratios() -> list[Ratio]:
    return [
        *(Ratio("evaluate, ours", f"evaluate, Keras({number})") for number in (1, 50)),
        *(
            Ratio(f"predict, ours, {what}", f"predict, Keras({number})", promise)
            for what, promises in (("batches", (None, 1.1)), ("examples", (None, 1.5)))
            for number, promise in zip((1, 50), promises, strict=True)
        ),
        Ratio("write, ours, .jsonl", "write, Keras(50), json.dumps", 1.0),
        Ratio("write, ours, .npz", "write, Keras(50), np.savez", 1.3),
    ]


def main() -> None:
    parsed = arguments(__doc__, 9, batches=(400, 2, "batches of one pass"))
    split_cpu(4)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        cases = ours(parsed.batches, directory)
        for number in (1, 50):
            cases += by_keras(parsed.batches, directory, number)
        title = f"an example of {parsed.batches} batches; Keras(steps_per_execution)"
        show(title, measure(cases, parsed.rounds), ratios())
        cases = on_replicas(parsed.batches, directory)
        show("an example on several replicas", measure(cases, parsed.rounds), [])


if __name__ == "__main__":
    main()
