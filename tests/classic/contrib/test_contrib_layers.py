"""An Estimator made of tf.contrib.layers: names and numbers of TensorFlow 1.15, on one device and on two replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401

pytest.importorskip("tf_slim", reason="the extra 'classic' brings it")

layers, framework = tf.contrib.layers, tf.contrib.framework

X = np.random.RandomState(0).rand(16, 2).astype(np.float32)
IDS = np.arange(16, dtype=np.int64)[:, None] % 3
DECAY = 0.9


def data(batch_size: int = 16) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(({"x": X, "ids": IDS}, X[:, :1])).batch(batch_size).repeat()


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    norm = {"is_training": mode == tf.estimator.ModeKeys.TRAIN, "decay": DECAY}
    constant = tf.constant_initializer(0.5)
    with framework.arg_scope(
        [layers.conv2d, layers.fully_connected],
        weights_initializer=constant,
        weights_regularizer=layers.l2_regularizer(0.1),
        normalizer_fn=layers.batch_norm,
        normalizer_params=norm,
    ):
        image = layers.conv2d(tf.reshape(features["x"], [-1, 1, 2, 1]), 3, [1, 2], padding="VALID", scope="conv")
        dense = layers.fully_connected(features["x"], 2)
    embedded = layers.embed_sequence(features["ids"], 3, 2, initializer=constant)
    joined = tf.concat([layers.flatten(image), dense, layers.flatten(embedded)], 1)
    joined = layers.dropout(layers.layer_norm(joined), 1.0, is_training=norm["is_training"])
    y = layers.fully_connected(joined, 1, activation_fn=None, scope="out")
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"y": y})
    loss = tf.losses.mean_squared_error(labels, y) + tf.losses.get_regularization_loss()
    train_op = layers.optimize_loss(
        loss, framework.get_global_step(), 0.1, "Adam", clip_gradients=5.0, summaries=["loss", "gradient_norm"]
    )
    metrics = {"mean": tf.contrib.metrics.streaming_mean(y)}
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


WEIGHTS = (
    "EmbedSequence/embeddings", "LayerNorm/beta", "LayerNorm/gamma", "conv/BatchNorm/beta", "conv/weights",
    "fully_connected/BatchNorm/beta", "fully_connected/weights", "out/biases", "out/weights",
)  # fmt: skip
NAMES = sorted(
    [
        *WEIGHTS,
        *(f"OptimizeLoss/{name}/{slot}" for name in WEIGHTS for slot in ("Adam", "Adam_1")),
        *(f"OptimizeLoss/{name}" for name in ("beta1_power", "beta2_power", "learning_rate")),
        *(f"{name}/BatchNorm/moving_{of}" for name in ("conv", "fully_connected") for of in ("mean", "variance")),
        "global_step",
    ]
)


@pytest.fixture(scope="module", params=[1, 2], ids=["default", "mirrored"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int]:
    """One step, on so many replicas."""
    devices = [f"/cpu:{index}" for index in range(request.param)]
    strategy = tf.distribute.MirroredStrategy(devices) if request.param > 1 else None
    config = tf.estimator.RunConfig(train_distribute=strategy, tf_random_seed=1, save_summary_steps=1)
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path_factory.mktemp("contrib")), config)
    return estimator.train(lambda: data(16 // request.param), steps=1), request.param


def test_variables_have_the_names_of_tensorflow_1(trained: tuple[Any, int]) -> None:
    assert sorted(trained[0].get_variable_names()) == NAMES


def test_moving_averages_are_those_of_the_fused_kernel(trained: tuple[Any, int]) -> None:
    """contrib/layers/python/layers/layers.py of 1.15: m = decay m + (1 - decay) mean; of the variance the unbiased
    one, n / (n - 1), from 1. Of replicas the mean of what each has. Both layers get 0.5 (x0 + x1)."""
    estimator, num_replicas = trained
    values = 0.5 * X.sum(1).reshape(num_replicas, -1)
    mean, variance = values.mean(1).mean(), values.var(1, ddof=1).mean()
    for layer in ("conv", "fully_connected"):
        moving = [estimator.get_variable_value(f"{layer}/BatchNorm/moving_{of}") for of in ("mean", "variance")]
        np.testing.assert_allclose(moving[0], (1 - DECAY) * mean, rtol=1e-5)
        np.testing.assert_allclose(moving[1], DECAY + (1 - DECAY) * variance, rtol=1e-5)


def test_evaluation_normalizes_by_the_moving_averages(trained: tuple[Any, int]) -> None:
    estimator, _ = trained
    value = estimator.get_variable_value
    normed = []
    for layer in ("conv", "fully_connected"):
        at, weights = f"{layer}/BatchNorm", value(f"{layer}/weights")
        pre = X @ weights.reshape(2, -1)
        pre = (pre - value(f"{at}/moving_mean")) / np.sqrt(value(f"{at}/moving_variance") + 0.001)
        normed.append(np.maximum(pre + value(f"{at}/beta"), 0))
    joined = np.concatenate([*normed, value("EmbedSequence/embeddings")[IDS[:, 0]]], 1)
    joined = (joined - joined.mean(1, keepdims=True)) / np.sqrt(joined.var(1, keepdims=True) + 1e-12)
    joined = joined * value("LayerNorm/gamma") + value("LayerNorm/beta")
    y = joined @ value("out/weights") + value("out/biases")
    result = estimator.evaluate(data, steps=1)
    l2 = sum(0.1 * 0.5 * np.square(value(f"{name}/weights")).sum() for name in ("conv", "fully_connected"))
    np.testing.assert_allclose(result["mean"], y.mean(), rtol=1e-4)
    np.testing.assert_allclose(result["loss"], np.square(X[:, :1] - y).mean() + l2, rtol=1e-4)


def test_what_is_exported_answers_by_the_moving_averages(trained: tuple[Any, int], tmp_path: Path) -> None:
    estimator, _ = trained
    receiver = tf.estimator.export.build_raw_serving_input_receiver_fn(
        {"x": tf.TensorSpec([None, 2]), "ids": tf.TensorSpec([None, 1], tf.int64)}
    )
    path = estimator.export_saved_model(str(tmp_path), receiver)
    predict = tf.contrib.predictor.from_saved_model(path.decode() if isinstance(path, bytes) else path)
    expected = [one["y"] for one in estimator.predict(lambda: data().take(1))]
    np.testing.assert_allclose(predict({"x": X, "ids": IDS})["y"], expected, rtol=1e-5)


def test_optimize_loss_writes_its_summaries(trained: tuple[Any, int]) -> None:
    estimator, _ = trained
    tags: set[str] = set()
    for path in Path(estimator.model_dir).glob("events*"):
        for event in tf.train.summary_iterator(str(path)):
            tags |= {value.tag for value in event.summary.value}
    assert {"OptimizeLoss/loss", "OptimizeLoss/gradient_norm/out/weights_0"} <= tags


def test_zero_debias_has_the_names_and_numbers_of_tensorflow_1(tmp_path: Path) -> None:
    def debiased(features: Any, labels: Any, mode: str) -> Any:
        x = tf.cast(features, tf.float32) if not isinstance(features, dict) else tf.cast(features["x"], tf.float32)
        y = tf.contrib.layers.batch_norm(x, decay=0.9, is_training=mode == "train", zero_debias_moving_mean=True)
        loss = tf.reduce_mean(tf.square(y - 1.0))
        train_op = tf.contrib.training.create_train_op(loss, tf.train.GradientDescentOptimizer(0.1))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    values = np.array([[1.0], [3.0], [2.0], [6.0]], np.float32)
    estimator = tf.estimator.Estimator(debiased, str(tmp_path))
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((values, values)).batch(2))
    found = {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
    biased = 0.9 * (0.1 * 2.0) + 0.1 * 4.0  # TensorFlow 1.15, python/training/moving_averages.py, _zero_debias
    nested = "BatchNorm/BatchNorm/moving_mean"
    assert set(found) == {
        "BatchNorm/beta", "BatchNorm/moving_mean", "BatchNorm/moving_variance", f"{nested}/biased",
        f"{nested}/local_step", "global_step",
    }  # fmt: skip
    assert found[f"{nested}/local_step"] == 2
    np.testing.assert_allclose(found[f"{nested}/biased"], [biased], rtol=1e-6)
    np.testing.assert_allclose(found["BatchNorm/moving_mean"], [biased / (1 - 0.9**2)], rtol=1e-6)
