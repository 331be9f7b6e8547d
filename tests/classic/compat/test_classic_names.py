"""The names of tf.estimator 2.15 on today's TensorFlow."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import runner.classic
from runner.classic.compat import install, names
from runner.classic.compat.old_modules import load
from tests.support.messages import Messages

v1 = tf.compat.v1


def names_of(version: str) -> set[str]:
    """The public names of tf.estimator 2.15, as its package lists them."""
    package = names.package()
    assert package is not None, "the extra 'test' brings tensorflow-estimator"
    found: set[str] = set()
    root = package / "_api" / version / "estimator"
    for file in root.rglob("__init__.py"):
        module = "".join(f"{part}." for part in file.parent.relative_to(root).parts)
        imports = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom))
        aliases = [alias for node in imports if "_api" not in str(node.module) for alias in node.names]
        found |= {f"{module}{alias.asname or alias.name}" for alias in aliases if alias.asname != "_module_wrapper"}
    return found


@pytest.mark.parametrize(("version", "table"), [("v2", names.NAMES), ("v1", names.V1_NAMES)])
def test_every_public_name_of_2_15_is_there_or_says_what_to_use(version: str, table: Mapping[str, str]) -> None:
    there = names_of(version)
    assert set(table) <= there and len(there) > 70
    assert there <= {*table, *names.GONE} and not set(table) & set(names.GONE)


@pytest.mark.parametrize("table", [names.NAMES, names.V1_NAMES, names.KERAS_NAMES])
def test_every_name_leads_to_something(table: Mapping[str, str]) -> None:
    assert [name for name, place in table.items() if load(place, name) is None] == []


def test_names_are_those_of_the_runner() -> None:
    assert tf.estimator.EstimatorSpec is v1.estimator.EstimatorSpec
    assert tf.estimator.ModeKeys.PREDICT == "infer"
    assert issubclass(tf.estimator.Estimator, runner.Estimator)
    assert v1.estimator.Estimator is tf.compat.v2.estimator.Estimator is tf.estimator.Estimator
    assert tf.estimator.LoggingTensorHook is v1.train.LoggingTensorHook
    assert "train_and_evaluate" in dir(tf.estimator) and "make_early_stopping_hook" in dir(tf.estimator.experimental)


def test_names_can_be_imported() -> None:
    import tensorflow.compat.v1 as tf1
    from tensorflow.compat.v1 import estimator

    assert tf.compat.v1.layers is tf1.layers
    assert estimator.RunConfig is tf1.estimator.RunConfig is tf.estimator.RunConfig
    assert tf1.estimator.inputs.numpy_input_fn.__module__ == "runner.classic.inputs"
    assert tf1.estimator.tpu.TPUConfig().iterations_per_loop == 2


def test_a_name_that_is_gone_says_what_to_use_instead(messages: Messages) -> None:
    with messages.raised(AttributeError):
        tf.estimator.BoostedTreesClassifier  # noqa: B018
    with messages.raised(AttributeError):
        tf.estimator.experimental.LinearSDCA  # noqa: B018


def test_a_misspelt_name_gets_the_nearest_one(messages: Messages) -> None:
    with messages.raised(AttributeError):
        tf.estimator.EstimatorSpecs  # noqa: B018
    assert not hasattr(tf.estimator, "inputs")  # 2.15 had that on tf.compat.v1 only


def test_layers_and_cells_are_those_of_tf_keras() -> None:
    assert v1.layers.dense.__module__ == "tf_keras.src.legacy_tf_layers.core"
    assert v1.layers.BatchNormalization.__module__.startswith("tf_keras.")
    assert v1.nn.rnn_cell.LSTMCell.__module__.startswith("tf_keras.")


def test_layers_without_tf_keras_name_the_extra(monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    monkeypatch.delitem(vars(v1.layers), "separable_conv1d", raising=False)  # a test before may have used it
    for name in [name for name in sys.modules if name.split(".")[0] == "tf_keras"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with messages.raised(ImportError):
        v1.layers.separable_conv1d  # noqa: B018


def test_switches_of_tf1_leave_the_engine_as_it_is_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    monkeypatch.setattr(install, "called", set(install.SHAPES))  # a source that takes the `value` of dimensions
    monkeypatch.setattr(install, "_warned", set())
    v1.disable_v2_behavior()
    v1.disable_eager_execution()
    assert tf.executing_eagerly()
    assert len(caplog.messages) == 1
    messages.logged(caplog, "disable_v2_behavior")


@pytest.mark.parametrize("name", ["distribute", "nn", "tpu", "train"])
def test_modules_that_have_our_names_are_not_loaded_once_more_by_an_import(name: str) -> None:
    """As by `from tensorflow.compat.v1.train import SessionRunHook`, which has TensorFlow make a second one."""
    before = getattr(v1, name)
    assert importlib.import_module(f"tensorflow.compat.v1.{name}") is before is getattr(v1, name)


@pytest.mark.parametrize("way", [
    "tf.compat.v1.compat.v1", "tf.compat.v2.compat.v1", "tf.compat.v1.compat.v2.compat.v1.compat.v1",
    "importlib.import_module('tensorflow.compat.v1.compat.v1')",
    "importlib.import_module('tensorflow.compat.v2.compat.v1.compat.v1')",
    "importlib.import_module('tensorflow.compat.v1.compat').v1",
])  # fmt: skip
def test_nested_modules_have_the_same_names(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 1.13 to 1.15, whose `tf` is `tensorflow.compat.v1` here, say `tf.compat.v1.estimator` as well."""
    monkeypatch.setattr(install, "called", set())
    nested = eval(way, {"tf": tf, "importlib": importlib})
    assert nested.estimator is v1.estimator and nested.layers.dense is v1.layers.dense
    assert nested.train.ProfilerHook is v1.train.ProfilerHook
    nested.disable_v2_behavior()
    assert tf.executing_eagerly() and nested.placeholder(tf.float32, [None, 2]).shape.as_list() == [None, 2]
    assert nested.compat.v2.estimator is tf.estimator and nested.compat.v1.estimator is v1.estimator


def test_names_can_be_imported_from_nested_modules() -> None:
    from tensorflow.compat.v1.compat.v1.estimator import EstimatorSpec
    from tensorflow.compat.v1.compat.v1.train import SessionRunHook
    from tensorflow.compat.v1.compat.v2 import estimator

    assert (EstimatorSpec, estimator) == (v1.estimator.EstimatorSpec, tf.estimator)
    assert SessionRunHook is v1.train.SessionRunHook
    module = sys.modules["tensorflow.compat.v1"]
    assert module.__spec__ is not None and module.__spec__.name == module.__name__


def test_placeholders_can_be_made_outside_of_a_graph_after_a_switch_of_tf1(
    monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    """As scripts do for what `build_raw_serving_input_receiver_fn` is given."""
    monkeypatch.setattr(install, "called", set())
    with messages.raised(RuntimeError):
        v1.placeholder(tf.float32, [None, 2])
    v1.disable_eager_execution()
    features = {"x": v1.placeholder(tf.float32, [None, 2]), "s": v1.sparse_placeholder(tf.int64, [8, 3])}
    with tf.Graph().as_default() as graph:
        assert v1.placeholder(tf.float32).graph is graph
        receiver = v1.estimator.export.build_raw_serving_input_receiver_fn(features)()
        assert {name: one.shape.as_list() for name, one in receiver.features.items()} == {
            "x": [None, 2],
            "s": [None, 3],
        }


SCRIPT = """
import sys
import runner.classic
assert "tensorflow" not in sys.modules
import tensorflow.compat.v1 as tf

def model_fn(features, labels, mode):
  layer = tf.layers.Dense(1)
  logits = layer(features)

  if mode == tf.estimator.ModeKeys.PREDICT:
    predictions = {"logits": logits}
    return tf.estimator.EstimatorSpec(mode, predictions=predictions)

  def loss_fn():
    return tf.losses.mean_squared_error(
        labels=labels, predictions=tf.reshape(logits, []))

  loss = loss_fn()

  if mode == tf.estimator.ModeKeys.EVAL:
    return tf.estimator.EstimatorSpec(mode, loss=loss)

  if mode == tf.estimator.ModeKeys.TRAIN:
    train_op = tf.train.GradientDescentOptimizer(0.2).minimize(loss_fn())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
  features = tf.data.Dataset.from_tensors([[1.]]).repeat(100)
  labels = tf.data.Dataset.from_tensors(1.).repeat(100)
  return tf.data.Dataset.zip((features, labels))

from runner.distribute.strategy import split_cpu
split_cpu(2)
tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)
distribution = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
config = tf.estimator.RunConfig(train_distribute=distribution)
classifier = tf.estimator.Estimator(model_fn=model_fn, config=config)
classifier.train(input_fn=input_fn)
print(classifier.evaluate(input_fn=input_fn))
print(classifier.get_variable_names())
print(next(classifier.predict(input_fn=input_fn)))
print(tf.keras.layers.Dense.__module__, tf.keras.estimator.__name__)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_example_of_the_distribution_strategy_guide_runs_as_a_script(tmp_path: Path) -> None:
    """The guide of TensorFlow 1.12, its typing errors mended (`dataset_ops`, and a `loss_fn` that was nowhere defined);
    `tf.contrib.distribute` has become `tf.distribute`, on two CPUs in place of GPUs."""
    script = tmp_path / "guide.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    result, variables, predicted, keras = ran.stdout.splitlines()
    assert (
        result == "{'loss': np.float32(0.0), 'global_step': np.int64(50)}"
    )  # 100 batches, each step takes one for each of two replicas
    assert variables == "['dense/bias', 'dense/kernel', 'global_step']"
    assert predicted == "{'logits': array([1.], dtype=float32)}"
    assert keras.startswith("tf_keras.src.layers") and keras.endswith("tensorflow.keras.estimator")
    for line in ("loss = ", "step = 1", "Saving checkpoints for 50 into", "Loss for final step: ", "Saving dict for"):
        assert line in ran.stderr


def found_at(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("name", "public"), [
    ("tensorflow.python.estimator.model_fn.ModeKeys", "estimator.ModeKeys"),
    ("tensorflow_estimator.python.estimator.estimator.Estimator", "estimator.Estimator"),
    ("tensorflow_estimator.python.estimator.estimator.EstimatorV2", "estimator.Estimator"),
    ("tensorflow_estimator.python.estimator.estimator_lib.LinearClassifier", "compat.v1.estimator.LinearClassifier"),
    ("tensorflow_estimator.python.estimator.estimator_lib.LinearClassifierV2", "estimator.LinearClassifier"),
    ("tensorflow_estimator.python.estimator.head.binary_class_head.BinaryClassHead", "estimator.BinaryClassHead"),
    ("tensorflow.python.estimator.inputs.numpy_io.numpy_input_fn", "compat.v1.estimator.inputs.numpy_input_fn"),
    ("tensorflow_estimator.python.estimator.run_config.RunConfig", "estimator.RunConfig"),
    ("tensorflow_estimator.python.estimator.tpu.tpu_config.RunConfig", "compat.v1.estimator.tpu.RunConfig"),
    ("tensorflow_estimator.estimator", "compat.v1.estimator"),
])  # fmt: skip
def test_modules_that_were_not_public_give_what_was_public_elsewhere(name: str, public: str) -> None:
    found: Any = tf
    for part in public.split("."):
        found = getattr(found, part)
    assert found_at(name) is found


@pytest.mark.parametrize("name", [
    "tensorflow.estimator.export.ServingInputReceiver",
    "tensorflow.estimator.experimental.InMemoryEvaluatorHook",
    "tensorflow.compat.v1.estimator.inputs.numpy_input_fn",
    "tensorflow.compat.v1.estimator.tpu.experimental.EmbeddingConfigSpec",
    "tensorflow.compat.v2.estimator.Estimator",
])  # fmt: skip
def test_modules_of_tf_estimator_can_be_imported(name: str, messages: Messages) -> None:
    """`from tensorflow.estimator.export import ServingInputReceiver`."""
    parts = name.split(".")
    assert importlib.import_module(".".join(parts[:-1])).__name__.endswith(parts[-2])
    if "EmbeddingConfigSpec" in name:
        with messages.raised(AttributeError):
            found_at(name)
    else:
        assert found_at(name).__name__ == parts[-1]


def test_keys_optimizers_and_the_base_of_heads_are_where_they_were() -> None:
    canned = "tensorflow.python.estimator.canned"
    assert found_at(f"{canned}.metric_keys.MetricKeys").AUC_PR == "auc_precision_recall"
    assert found_at(f"{canned}.prediction_keys.PredictionKeys").CLASS_IDS == "class_ids"
    optimizer = found_at(f"{canned}.optimizers.get_optimizer_instance")("Adam", learning_rate=0.1)
    assert isinstance(optimizer, v1.train.AdamOptimizer)
    assert type("Own", (found_at(f"{canned}.head._Head"),), {})()


@pytest.mark.slow
@pytest.mark.processes
def test_names_are_there_where_somebody_asked_before_where_tensorflow_is() -> None:
    source = """
import importlib.util
import runner.classic
assert importlib.util.find_spec("tensorflow") is not None
import tensorflow as tf
tf.estimator.RunConfig, tf.compat.v1.estimator.inputs
"""
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", ["keras.estimator", "compat.v1.layers", "compat.v1.nn.rnn_cell", "compat.v1"])
def test_an_import_does_not_replace_what_was_put_on_tensorflow(name: str) -> None:
    """TensorFlow and tf_keras have files of these names, which cannot train or are second modules."""
    before = importlib.import_module("tensorflow")
    for part in name.split("."):
        before = getattr(before, part)
    assert importlib.import_module(f"tensorflow.{name}") is before
    if name == "keras.estimator":
        assert tf.keras.estimator.model_to_estimator.__module__ == "runner.classic.model_to_estimator"


def test_all_names_of_such_a_module_can_be_imported() -> None:
    names_of: dict[str, Any] = {}
    exec("from tensorflow.estimator import *\nfrom tensorflow_estimator.python.estimator.model_fn import *", names_of)
    assert names_of["Estimator"] is tf.estimator.Estimator and "numpy_input_fn" in names_of
