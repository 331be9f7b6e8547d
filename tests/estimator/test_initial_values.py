"""A large variable that a checkpoint has gets no initial value before the checkpoint is read: that takes memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, ModeKeys, RunConfig
from tests.support.models import strategies, train_input
from tests.support.tiers import slow_but

v1 = tf.compat.v1
ROWS = 1 << 18  # of one float32: a megabyte


class Model:
    """A table whose initial values are 0, 1, 2 and so on; it counts how often these are computed."""

    def __init__(self, saver: Any = None) -> None:
        self.computed, self._saver = 0, saver

    def initial(self, shape: Any, dtype: Any = None, partition_info: Any = None) -> tf.Tensor:
        self.computed += 1
        return tf.reshape(tf.range(ROWS, dtype=tf.float32), shape)

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        table = v1.get_variable("table", [ROWS, 1], initializer=self.initial)
        predictions = tf.gather(table, [0, 5])[:, 0] + 0 * tf.cast(tf.reduce_sum(features), tf.float32)
        scaffold = v1.train.Scaffold(saver=self._saver({"elsewhere": table})) if self._saver else None
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions, scaffold=scaffold)
        loss = tf.reduce_mean(predictions)
        train_op = v1.train.GradientDescentOptimizer(1.0).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)


def predicted(estimator: Estimator) -> list[float]:
    return [float(one) for one in itertools.islice(estimator.predict(train_input(2, 2)), 2)]  # it has no end


@pytest.mark.parametrize("strategy", slow_but(strategies(), "default", "mirrored"))
def test_a_restored_table_has_no_initial_values_first(strategy: str, tmp_path: Path) -> None:
    config = RunConfig(train_distribute=strategies()[strategy])
    first, other = Model(), Model()
    trained = Estimator(first, tmp_path, config).train(train_input(2, 8), steps=2)
    assert first.computed >= 1
    went_on = Estimator(other, tmp_path, config)
    assert predicted(went_on) == [-1.0, 4.0]  # two steps of 0.5
    assert went_on.evaluate(train_input(2, 2), steps=1)["loss"] == 1.5
    went_on.train(train_input(2, 8), steps=2)
    assert other.computed == 0
    expected = np.arange(ROWS, dtype=np.float32)[:, None]
    expected[[0, 5]] -= 2
    np.testing.assert_array_equal(went_on.get_variable_value("table"), expected)
    assert trained.get_variable_value("global_step") == 4


class Nothing(v1.train.Saver):  # type: ignore[name-defined]
    """Restores nothing."""

    def restore(self, sess: Any, save_path: str) -> None:
        pass


def test_a_table_that_a_users_saver_leaves_out_has_its_initial_values(tmp_path: Path) -> None:
    Estimator(Model(), tmp_path, RunConfig()).train(train_input(2, 8), steps=2)
    model = Model(Nothing)
    assert predicted(Estimator(model, tmp_path, RunConfig())) == [0.0, 5.0]
    assert model.computed == 1
