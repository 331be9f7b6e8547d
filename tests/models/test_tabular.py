"""Premade models from a config: columns as they are written, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml

from input_fns import breast_cancer
from runner import Estimator, RunConfig
from runner.classic.premade.layers import dense_features
from runner.config import user_code
from runner.models import tabular
from runner.models.column_specs import Columns
from tests.support.messages import Messages

PARAMS = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / "wide_deep.yaml").read_text())["params"]


@pytest.mark.slow  # tests/integration/test_main.py: it takes two steps, and as one of tf.estimator 2.15 its numbers
def test_wide_and_deep_reaches_its_accuracy(tmp_path: Path) -> None:
    estimator = Estimator(tabular.wide_deep, tmp_path, RunConfig(tf_random_seed=1), PARAMS)

    def train() -> tf.data.Dataset:
        return breast_cancer.input_fn("train", {"batch_size": 64})

    estimator.train(train, max_steps=500)
    found = estimator.evaluate(lambda: breast_cancer.input_fn("eval", {"batch_size": 256}))
    assert found["accuracy"] >= 0.95
    assert found["auc"] >= 0.99
    assert found["accuracy_baseline"] == pytest.approx(72 / 114)


def test_numbers_are_brought_to_the_scale_that_is_written() -> None:
    columns = Columns({
        "height": {"kind": "numeric", "feature": "cm", "mean": 170, "std": 10},
        "pay": {"kind": "numeric", "log": True},
        "point": {"kind": "numeric", "shape": 2, "mean": [0, 1], "std": [1, 2]},
    })  # fmt: skip
    features = {"cm": tf.constant([180.0]), "pay": tf.constant([np.e - 1.0]), "point": tf.constant([[3.0, 5.0]])}
    found = dense_features(features, columns.chosen(None, "deep"), scope="x")
    np.testing.assert_allclose(found, [[1.0, 1.0, 3.0, 2.0]], rtol=1e-6)


@pytest.mark.parametrize(
    "written",
    [
        {"kind": "number"},
        {"kind": "hashed", "bucket": 3},
        {"kind": "hashed"},
        {"kind": "embedding", "of": "b", "dimension": 2},
        {"kind": "indicator", "of": "a"},
    ],
    ids=str,
)
def test_a_column_that_cannot_be_made_names_its_key(written: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        Columns({"a": written})


def test_a_column_that_is_not_there_is_named_where_it_is_asked_for(messages: Messages) -> None:
    columns = Columns({"radius": {"kind": "numeric"}})
    with messages.raised(ValueError):
        columns.chosen(["radios"], "model.params.wide")


@pytest.mark.parametrize("name", ["linear", "dnn", "wide_deep"])
def test_the_config_of_an_old_run_finds_its_model(name: str) -> None:
    assert user_code.load("model.fn", f"runner.classic.tabular.{name}", "model_fn") is getattr(tabular, name)
