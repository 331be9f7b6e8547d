"""What a model_fn returns by `tf.estimator.EstimatorSpec`, trained and evaluated; test_contract.py has its checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import runner
from runner.classic.estimator import Estimator
from tests.support.classic_models import batches, dense

Spec = tf.estimator.EstimatorSpec


def points(count: int = 5) -> tf.data.Dataset:
    x = np.arange(1, count + 1, dtype=np.float32)
    return tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(3)


def test_libraries_unpack_a_spec_and_replace_its_scaffold(tmp_path: Path) -> None:
    began = []

    def wrapped(features: Any, labels: Any, mode: str) -> Any:
        spec = dense(features, labels, mode)
        _, predictions, loss, train_op, metrics, outputs, chief_hooks, hooks, scaffold, _, _ = spec
        assert (predictions, outputs, chief_hooks, hooks) == ({}, None, (), ())
        copied = tf.train.Scaffold(copy_from_scaffold=scaffold, init_fn=lambda *_: began.append(mode))
        return Spec(mode, predictions, loss, train_op, metrics)._replace(scaffold=copied)

    Estimator(wrapped, str(tmp_path)).train(batches(), steps=2)
    assert began == ["train"]


def test_the_mode_of_the_call_counts(tmp_path: Path) -> None:
    """tf.estimator never looks at that of the spec."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        return Spec(None, *dense(features, labels, mode)[1:])

    estimator = Estimator(model_fn, str(tmp_path)).train(batches(), steps=2)
    assert estimator.evaluate(batches(1))["global_step"] == 2


def test_a_train_op_that_runs_nothing_ends_training_before_a_checkpoint(tmp_path: Path) -> None:
    for spec, other in ((Spec, {}), (runner.EstimatorSpec, {"train_op": "minimize"})):

        def model_fn(features: Any, labels: Any, mode: str, spec: Any = spec, other: Any = other) -> Any:
            return spec(mode, loss=tf.constant(1.0), **{"train_op": lambda: None, **other})

        with pytest.raises(TypeError):
            Estimator(model_fn, str(tmp_path)).train(batches(), steps=2)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(("model.ckpt", "checkpoint"))]


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_loss_per_example_is_legal_in_eval_and_with_an_optimizer(replicas: int, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        losses = tf.square(w * features - labels)
        metrics = {"label": labels} if mode == "eval" else None
        return Spec(mode, loss=losses, eval_metric_ops=metrics, optimizer=keras.optimizers.SGD(0.01))

    strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])
    config = tf.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    estimator = Estimator(model_fn, str(tmp_path), config).train(points, steps=1)
    mean_square = np.mean(np.square([1, 2, 3, 4, 5][: 3 * replicas]))  # a step takes a batch of each replica
    assert estimator.get_variable_value("w") == pytest.approx(0.01 * 4 * mean_square)
    found = estimator.evaluate(points)
    assert found["label"] == pytest.approx(6.0)
    assert found["loss"] == pytest.approx((2 - estimator.get_variable_value("w")) ** 2 * 11, rel=1e-5)


def test_a_replaced_spec_keeps_what_is_no_part_of_the_tuple() -> None:
    with tf.Graph().as_default():
        optimizer, losses = object(), tf.ones([3])
        spec = Spec("train", loss=losses, optimizer=optimizer, loss_weight=losses)
        replaced = spec._replace(predictions={"y": losses})
        assert (len(replaced), replaced.optimizer, replaced.loss_weight is losses) == (11, optimizer, True)
        assert spec._replace(loss_weight=None).loss_weight is None
