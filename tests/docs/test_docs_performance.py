"""docs/explanation/performance.md tells the truth: its optimizer of tables by rows trains and goes on as shown."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import runner
from tests.support.models import strategies, train_input

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "performance.md").read_text()
(SNIPPET,) = [code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "LazyAdamOptimizer" in code]
MODEL_FN: dict[str, Any] = {}
exec(f"import tensorflow as tf\nimport runner\ndef spec_of(mode, loss):\n{textwrap.indent(SNIPPET, '    ')}", MODEL_FN)


def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
    ids = tf.cast(tf.abs(features[:, 0]) * 3, tf.int64) % 7
    found = keras.layers.Embedding(9, 2, dtype="float64", name="embedding")(ids)
    predictions = keras.layers.Dense(1, dtype="float64")(tf.concat([found, features], 1))
    return MODEL_FN["spec_of"](mode, tf.reduce_mean(tf.square(predictions - labels)))


@pytest.mark.slow
def test_two_optimizers_share_a_model_and_go_on_from_a_checkpoint_under_each_strategy(tmp_path: Path) -> None:
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, strategy in strategies().items():
        for steps in ((8,), (3, 8)):
            folder = tmp_path / name / str(len(steps))
            for one in steps:  # a second Estimator goes on
                trained = runner.Estimator(model_fn, folder, runner.RunConfig(train_distribute=strategy))
                trained.train(train_input(6, 19, "float64"), max_steps=one)
            found[f"{name} {steps}"] = {key: trained.get_variable_value(key) for key in trained.get_variable_names()}
    expected = found["default (8,)"]
    (table,) = [value for key, value in expected.items() if key.endswith("embedding/embeddings")]
    slots = [value for key, value in expected.items() if "embedding" in key and value.shape == table.shape]
    assert table.shape == (9, 2) and len(slots) == 3  # the table, and two slots of LazyAdam
    for which, values in found.items():
        for key, value in expected.items():
            np.testing.assert_allclose(values[key], value, 1e-10, 1e-10, err_msg=f"{which} {key}")
            np.testing.assert_array_equal(values[key], found[f"{which.partition(' ')[0]} (8,)"][key], f"{which} {key}")
