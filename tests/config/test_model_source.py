"""What is found in the source of a model of the TensorFlow that it was written for, and what becomes of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from runner.config import model_source, parsing
from runner.config.schema import Config, ConfigError, InputConfig, ModelConfig, TrainInputBlock
from tests.support.messages import Messages


def config(model: str = "auto", keras: str = "auto") -> Config:
    block = TrainInputBlock(fn="data.input_fn")
    return Config(
        model=ModelConfig(fn="net.model_fn", classic=model, keras=keras), input=InputConfig(train=block, eval={})
    )


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "data.py").write_text("def input_fn(): ...\n")
    return tmp_path


def found(code: Path, text: str, *, env: dict[str, str] | None = None, **settings: str) -> tuple[object, str, str]:
    (code / "net.py").write_text(f"{text}\ndef model_fn(features): ...\n")
    decided, why = model_source.resolved(config(**settings), env or {})
    return decided.model.classic, decided.model.keras, why


@pytest.mark.parametrize(
    ("text", "classic", "keras"),
    [
        ("import tensorflow as tf\nx = tf.keras.layers.Dense(3)", False, "keras3"),
        ("import tensorflow.compat.v1 as tf\nx = tf.get_variable('x')", False, "keras3"),
        ("import tensorflow.compat.v1 as tf\ntf.layers.dense", True, "legacy"),
        ("import tensorflow as tf\ntf.compat.v1.layers.dense", True, "legacy"),
        ("import tensorflow as tf\ntf1 = tf.compat.v1\ntf1.nn.rnn_cell.LSTMCell", True, "legacy"),
        ("from tensorflow.compat import v1 as tf\ntf.layers.flatten", True, "legacy"),
        ("from tensorflow.compat.v1 import layers", True, "legacy"),
        ("import tensorflow.compat.v1\ntensorflow.compat.v1.layers.flatten", True, "legacy"),
        ("import tensorflow as tf\ntf.estimator.EstimatorSpec", True, "keras3"),
        ("import tensorflow as tf\ntf.estimator.EstimatorSpec\ntf.keras.layers.Dense", True, "legacy"),
        ("import keras\nimport tensorflow as tf\ntf.estimator.EstimatorSpec\ntf.keras.layers.Dense", True, "keras3"),
        ("from tensorflow import estimator", True, "keras3"),
        ("import tensorflow as tf\ntf.keras.layers.DenseFeatures", False, "legacy"),
        ("tf = 3\nlayers = estimator = tf", False, "keras3"),
        ("import tensorflow as tf  # tf.layers.dense\n'tf.estimator'", False, "keras3"),
    ],
)
def test_the_source_of_the_model_decides(code: Path, text: str, classic: bool, keras: str) -> None:
    assert found(code, text)[:2] == (classic, keras)


def test_what_was_found_is_said_with_its_line(code: Path, messages: Messages) -> None:
    *_, why = found(code, "import tensorflow.compat.v1 as tf\n\ntf.layers.dense")
    assert why.endswith("line 3.")
    messages.same("said", why)
    assert found(code, "import tensorflow as tf")[2] == ""


def test_files_that_the_model_imports_count_as_well(code: Path, messages: Messages) -> None:
    (code / "parts").mkdir()
    (code / "parts" / "__init__.py").write_text("")
    (code / "parts" / "blocks.py").write_text("import tensorflow.compat.v1 as tf\ntf.layers.dense\n")
    classic, keras, why = found(code, "from parts import blocks")
    assert (classic, keras) == (True, "legacy")
    assert why.endswith("line 2.")
    messages.same("said", why)


def test_settings_and_the_environment_count_more_than_the_source(code: Path) -> None:
    text = "import tensorflow.compat.v1 as tf\ntf.layers.dense"
    assert found(code, text, model=False, keras="keras3")[:2] == (False, "keras3")  # type: ignore[arg-type]
    assert found(code, "", model=True, keras="legacy")[:2] == (True, "legacy")  # type: ignore[arg-type]
    assert found(code, text, env={"TF_USE_LEGACY_KERAS": "0"})[1] == "keras3"
    assert found(code, "", env={"TF_USE_LEGACY_KERAS": "1"})[1] == "legacy"


def test_keras_2_that_is_missing_is_a_mistake_before_tensorflow_is_imported(
    code: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(metadata, "version", lambda name: "2.21.0")  # a newer one gets more advice
    with messages.raised(ConfigError) as caught:
        found(code, "import tensorflow.compat.v1 as tf\ntf.layers.dense")
    assert "line 2)" in str(caught.value)


@pytest.mark.parametrize("model", [{"classic": "yes"}, {"keras": "2"}], ids=str)
def test_values_that_mean_nothing_are_refused(model: dict[str, str], messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsing.parse({"model": {"fn": "a.b", **model}, "input": {"train": {"fn": "a.b"}, "eval": {}}})


CLASSIC = """
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def model_fn(features, labels, mode, params, config):
    x = tf.layers.dense(features["x"], params["width"], activation=tf.nn.relu)
    x = tf.layers.dropout(x, 0.5, training=mode == tf.estimator.ModeKeys.TRAIN)
    y = tf.layers.dense(x, 1)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=y)
    loss = tf.losses.mean_squared_error(labels, y)
    train_op = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    print("KERAS", tf.keras.__name__)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
"""
OLDER = """
import tensorflow as tf


def input_fn(params):
    x = tf.to_float(tf.random.stateless_uniform([32, 2], [1, 2], dtype=tf.float64))
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, :1] * 2)).repeat().batch(8)
    return dataset.make_one_shot_iterator().get_next()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_model_of_tf1_runs_unmodified_from_the_command_line(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "old.py").write_text(CLASSIC)
    (tmp_path / "older.py").write_text(OLDER)
    command = [
        sys.executable, "-m", "runner", "model=custom", "model.fn=old", "+model.params.width=4", "input=custom",
        "input.train.fn=older", "input.eval=null", "train.max_steps=4", "tracking=none", "model_dir=run",
        "strategy=mirrored", "strategy.virtual_devices=2",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    (said,) = (line for line in ran.stderr.splitlines() if "Model:" in line)
    messages.same("stderr", said)
    assert "KERAS tf_keras" in ran.stdout
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "classic: true" in written and "keras: legacy" in written
