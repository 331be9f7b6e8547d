"""The modules of the package tensorflow-estimator 2.15.0, with and without it; what runs of its own code."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import runner.classic  # noqa: F401
from runner.classic.compat import estimator_paths, names
from runner.classic.compat.check import CHANGED, UNCHANGED, UNSUPPORTED, check_source
from runner.classic.compat.installed_names import Installed, defined_in
from runner.classic.compat.old_modules import MODULE, SOURCE, NotServed, OldModules
from runner.distribute.strategy import split_cpu
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1
ESTIMATOR = "tensorflow_estimator.python.estimator"
PACKAGE = names.package()
assert PACKAGE is not None, "the extra 'test' brings tensorflow-estimator"
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
keras_2 = pytest.mark.skipif(not os.environ.get("TF_USE_LEGACY_KERAS"), reason="test_with_keras_2 runs it")
REFUSED = ("canned.kmeans", "canned.timeseries", "canned.saved_model_estimator")
IN_A_MAIN = {f"{ESTIMATOR}.tools.checkpoint_converter.{name}" for name in ("FLAGS", "parser", "unparsed")}


@pytest.fixture
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[OldModules]:
    """A finder with new modules."""
    monkeypatch.setattr(names, "package", lambda: None)
    yield OldModules(estimator_paths.SPACES)


def test_every_module_can_be_imported_and_none_is_executed_by_it() -> None:
    finder = OldModules(estimator_paths.SPACES)
    for name in FILES:
        assert isinstance(importlib.import_module(name), types.ModuleType), name
        if name.startswith(f"{ESTIMATOR}.") and ".api" not in name:
            assert "tf" not in vars(finder.module(name)), name
            old = importlib.import_module(name.replace("tensorflow_estimator", "tensorflow"))
            assert dir(old) == dir(importlib.import_module(name))
    assert importlib.import_module("tensorflow_estimator._api.v2.estimator.export") is tf.estimator.export
    assert importlib.import_module(f"{ESTIMATOR}.api._v1.estimator") is v1.estimator
    # The import of `api._v2.estimator.inputs` has set it on tf.estimator, as in 2.15; other tests expect it not there.
    vars(tf.estimator).pop("inputs", None)


@keras_2
def test_every_name_is_there_or_says_why_not() -> None:
    """All that a module of 2.15 defines or imports, and so also what its other modules import of it."""
    lacking = {}
    for module, file in FILES.items():
        if module.startswith(f"{ESTIMATOR}.") and ".api" not in module and file.name != "__init__.py":
            for name in defined_in(file) - {"*"}:
                try:
                    getattr(importlib.import_module(module), name)
                except AttributeError as error:
                    lacking[f"{module}.{name}"] = error
    refused = {name for name in lacking if name.startswith(tuple(f"{ESTIMATOR}.{one}." for one in REFUSED))}
    assert {*lacking} == refused | IN_A_MAIN
    assert all(isinstance(lacking[name], NotServed) for name in refused)
    assert f"{ESTIMATOR}.canned.kmeans.KMeansClustering" in refused


@pytest.mark.slow
@pytest.mark.processes
def test_with_keras_2() -> None:
    """As it is in a script, where `import runner.classic` comes before TensorFlow. What trains no model of Keras and
    takes seconds is left to this process.
    """
    chosen = "not with_keras_2 and not heads_of_tensorflow_1 and not baseline"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    env = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout


# What TF-Ranking, TF-GAN, DeepCTR and TF's own tests import.
@pytest.mark.parametrize("statement", [
    "from tensorflow.python.estimator.canned.head import _Head",
    "from tensorflow.python.estimator.canned.optimizers import get_optimizer_instance",
    "from tensorflow_estimator.python.estimator.canned.optimizers import get_optimizer_instance_v2",
    "from tensorflow_estimator.python.estimator import early_stopping, gc, util, run_config, training, exporter",
    "from tensorflow_estimator.python.estimator.head import head_utils, sequential_head",
    "from tensorflow_estimator.python.estimator.export import export, export_lib",
    "from tensorflow_estimator.python.estimator.inputs.queues import feeding_functions",
    "from tensorflow_estimator.python.estimator.tools.checkpoint_converter import _convert_names",
    "from tensorflow_estimator.python.estimator.training import _TrainingExecutor",
    "from tensorflow_estimator.python.estimator.exporter import _SavedModelExporter",
    "from tensorflow_estimator.python.estimator.canned.kmeans import KMeansClustering",
    "from tensorflow_estimator.python.estimator.canned.timeseries.estimators import LSTMAutoRegressor",
    "from tensorflow_estimator.python.estimator.tpu.error_handling import ErrorRendezvous",
    "from tensorflow.python.tpu.tpu_embedding import AdagradParameters",
])  # fmt: skip
def test_imports_of_libraries_succeed(statement: str) -> None:
    exec(statement, {})


def test_what_is_refused_is_refused_when_it_is_used(messages: Messages) -> None:
    from tensorflow_estimator.python.estimator.canned.kmeans import KMeansClustering
    from tensorflow_estimator.python.estimator.canned.linear import LinearSDCA
    from tensorflow_estimator.python.estimator.training import _TrainingExecutor

    with messages.raised(NotServed):
        KMeansClustering(2)
    with messages.raised(NotServed):
        _TrainingExecutor(None, None, None)
    with messages.raised(NotServed):
        LinearSDCA("id")


@pytest.mark.skipif(bool(os.environ.get("TF_USE_LEGACY_KERAS")), reason="it is for Keras 3")
def test_models_of_keras_2_are_refused_with_keras_3(messages: Messages) -> None:
    column = tf.feature_column.sequence_numeric_column("s")
    model = importlib.import_module(f"{ESTIMATOR}.canned.rnn").RNNClassifier([column], units=[2])
    with messages.raised(NotServed):
        model.train(lambda: sequences(8))
    assert issubclass(importlib.import_module(f"{ESTIMATOR}.canned.dnn")._DNNModelV2, tf.keras.Model)


def test_one_object_under_both_names_of_a_module() -> None:
    from tensorflow.python.estimator.run_config import TaskType as Old
    from tensorflow_estimator.python.estimator.run_config import TaskType

    assert Old is TaskType and TaskType.CHIEF == "chief"
    assert pickle.loads(pickle.dumps(TaskType)) is TaskType
    gc = importlib.import_module(f"{ESTIMATOR}.gc")
    paths = [gc.Path(str(number), number) for number in range(5)]
    assert [one.export_version for one in gc._largest_export_versions(2)(paths)] == [3, 4]


def test_the_names_of_the_tables_are_the_same_without_the_package(
    without_the_package: OldModules, messages: Messages
) -> None:
    space = estimator_paths.SPACES[ESTIMATOR]
    for module in (name.removeprefix(f"{ESTIMATOR}.") for name in FILES if name.startswith(f"{ESTIMATOR}.")):
        if not module.startswith("api"):
            assert space.find(module) == MODULE, module
            for name in space.listed("gc"):
                assert space.find(f"{module}.{name}") not in (SOURCE, None), (module, name)
    assert space.find("gc.negation") is None
    with messages.raised(NotServed):
        _ = without_the_package.module(f"{ESTIMATOR}.gc")._negation
    with messages.raised(NotServed):
        _ = tf.estimator.experimental.RNNClassifier
    assert check_source(USES, "uses.py", Installed())[0].verdict == CHANGED  # the import raises nothing
    assert {one.verdict for one in check_source(USES, "uses.py", Installed())[1:]} == {UNSUPPORTED, CHANGED}


@pytest.mark.parametrize(("version", "is_used"), [("2.15.0", True), ("2.14.0", False), ("", False)])
def test_exactly_one_version_is_used(version: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        if not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return types.SimpleNamespace(version=version, locate_file=Path("/site-packages").joinpath)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    found = names.package.__wrapped__()
    assert found == (Path("/site-packages/tensorflow_estimator") if is_used else None)


USES = """
from tensorflow_estimator.python.estimator.head import sequential_head
import tensorflow as tf
tf.estimator.experimental.RNNClassifier
sequential_head.SequentialHeadWrapper
sequential_head.Estimator
"""


def test_check_says_whose_code_runs(messages: Messages) -> None:
    judged = {one.name: one for one in check_source(USES, "uses.py", Installed())}
    rnn = judged["tf.estimator.experimental.RNNClassifier"]
    wrapper = judged["tensorflow_estimator.python.estimator.head.sequential_head.SequentialHeadWrapper"]
    assert (rnn.verdict, rnn.text) == (CHANGED, wrapper.text)
    messages.same("own code", rnn.text)
    assert UNCHANGED not in {one.verdict for one in judged.values()}


# --- the numbers of 2.15's own code -----------------------------------------------------------------------------------

CELL = {"bias": [8], "kernel": [1, 8], "recurrent_kernel": [2, 8]}
WEIGHTS = {
    "rnn_model/logits/bias": [1],
    "rnn_model/logits/kernel": [2, 1],
    **{f"rnn_model/rnn/lstm_cell/{name}": shape for name, shape in CELL.items()},
}


def sequences(batch: int, *, of_steps: bool = False) -> tf.data.Dataset:
    mask = np.arange(4) < np.array([1 + index % 4 for index in range(23)])[:, None]
    values = np.sin(np.arange(23 * 4)).reshape(23, 4).astype(np.float32)
    labels, weights = np.int64(values[:, 0] > 0), np.float32(30 * (1 + np.arange(23) % 3))

    def in_a_batch(mask: Any, values: Any, weights: Any, labels: Any) -> Any:
        at = tf.where(mask)
        shape = [tf.shape(mask, tf.int64)[0], tf.reduce_max(at[:, 1]) + 1]
        given = tf.gather_nd(values, at)
        of_each = tf.SparseTensor(at, tf.cast(given > 0, tf.int64), shape)
        return {"s": tf.SparseTensor(at, given, shape), "w": weights}, of_each if of_steps else labels

    return tf.data.Dataset.from_tensor_slices((mask, values, weights, labels)).batch(batch).map(in_a_batch)


def started(folder: Path, optimizer: str = "") -> str:
    """A model_dir with a checkpoint of step 0."""
    folder.mkdir()
    values: dict[str, Any] = {"global_step": np.int64(0)}
    values |= {name: np.float32(np.cos(np.arange(np.prod(at))).reshape(at)) for name, at in WEIGHTS.items()}
    if optimizer:
        values |= {f"{optimizer}/{name}/accumulator": np.full(at, 0.1, np.float32) for name, at in WEIGHTS.items()}
        values |= {f"{optimizer}/decay": np.float32(0), f"{optimizer}/learning_rate": np.float32(0.05)}
    slices = [""] * len(values)
    tf.raw_ops.SaveV2(
        prefix=str(folder / "model.ckpt-0"), tensor_names=[*values], shape_and_slices=slices, tensors=[*values.values()]
    )
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"')
    return str(folder)


def on(replicas: int) -> Any:
    split_cpu(2)
    devices = [f"/cpu:{index}" for index in range(replicas)]
    return tf.estimator.RunConfig(train_distribute=tf.distribute.MirroredStrategy(devices) if replicas > 1 else None)


@keras_2
@pytest.mark.parametrize("replicas", [1, 2])
def test_rnn_classifier_has_the_numbers_of_2_15(replicas: int, tmp_path: Path) -> None:
    """Its optimizer is a name, and its summed gradients are longer than 5, to which it then clips them."""
    column = tf.feature_column.sequence_numeric_column("s")
    model = tf.estimator.experimental.RNNClassifier(
        [column], units=[2], cell_type="lstm", weight_column="w", loss_reduction="sum",
        model_dir=started(tmp_path / "model", "training/Adagrad"), config=on(replicas),
    )  # fmt: skip
    assert isinstance(model, tf.estimator.Estimator)
    metrics = model.train(lambda: sequences(8 // replicas)).evaluate(lambda: sequences(8))
    # 2.15's results, from the same checkpoint and data, on one device.
    expected = {"loss": 305.42562866, "average_loss": 0.67872363, "auc": 0.66700405, "prediction/mean": 0.66198921}
    tolerance = 1e-6 if replicas == 1 else 1e-5
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, tolerance)
    kernel = model.get_variable_value("rnn_model/logits/kernel")
    assert kernel.ravel() == pytest.approx([1.0736047, 0.53461528], tolerance)
    assert metrics["accuracy_baseline"] == pytest.approx(0.57777780)


@keras_2
@pytest.mark.parametrize("kind", ["classifier", "sequential"])
def test_rnn_estimators_are_the_same_on_two_replicas(kind: str, tmp_path: Path) -> None:
    rnn = importlib.import_module(f"{ESTIMATOR}.canned.rnn")
    wrapper = importlib.import_module(f"{ESTIMATOR}.head.sequential_head").SequentialHeadWrapper
    column = tf.feature_column.sequence_numeric_column("s")
    sgd = lambda: v1.train.GradientDescentOptimizer(0.01)  # noqa: E731

    def trained(replicas: int, reduction: str) -> dict[str, Any]:
        folder = tmp_path / f"{replicas}{reduction}"
        shared = {"units": [2], "cell_type": "lstm", "optimizer": sgd, "config": on(replicas)}
        if kind == "classifier":
            model = rnn.RNNClassifier([column], model_dir=started(folder), weight_column="w", **shared)
        else:
            head = wrapper(tf.estimator.BinaryClassHead(loss_reduction=reduction), sequence_length_mask="mask")
            model = rnn.RNNEstimator(head, [column], model_dir=started(folder), return_sequences=True, **shared)
        of_steps = kind == "sequential"
        model.train(lambda: sequences(8 // replicas, of_steps=of_steps))
        return model.evaluate(lambda: sequences(8, of_steps=of_steps))

    reduction = v1.losses.Reduction.MEAN if kind == "sequential" else "sum_over_batch_size"
    assert trained(2, reduction) == pytest.approx(trained(1, reduction), rel=1e-5)
    if kind == "sequential":
        assert trained(1, "sum_over_batch_size")["loss"] > 0  # one device divides by the steps of its whole batch
        with pytest.raises(ValueError, match="loss_reduction="):
            trained(2, "sum_over_batch_size")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("baseline._baseline_model_fn_v2", {"optimizer": "SGD"}),
        pytest.param(
            "dnn_linear_combined._dnn_linear_combined_model_fn_v2",
            {"linear_optimizer": "SGD", "dnn_optimizer": "SGD"},
            marks=keras_2,
        ),
    ],
)
def test_private_model_functions_are_the_same_on_two_replicas(name: str, arguments: Any) -> None:
    module, _, function = name.partition(".")
    of_source = getattr(importlib.import_module(f"{ESTIMATOR}.canned.{module}"), function)
    x = np.sin(np.arange(23, dtype=np.float32))
    if len(arguments) == 2:
        column = tf.feature_column.numeric_column("x")
        of_dnn = {"dnn_feature_columns": [column], "dnn_hidden_units": [2]}
        arguments = {**arguments, "linear_feature_columns": [column], **of_dnn}

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
        return of_source(features, labels, mode, tf.estimator.RegressionHead(), config=config, **arguments)

    def results(replicas: int) -> dict[str, Any]:
        model = tf.estimator.Estimator(model_fn, config=on(replicas).replace(tf_random_seed=3))
        data = tf.data.Dataset.from_tensor_slices(({"x": x}, 2 * x + 1))
        model.train(lambda: data.batch(8 // replicas))
        return {name: model.get_variable_value(name) for name in model.get_variable_names()}

    alone, both = results(1), results(2)
    assert alone["global_step"] == 3 and any("kernel" in one or "bias" in one for one in alone)
    assert {*alone} == {*both}
    for one, value in alone.items():
        np.testing.assert_allclose(both[one], value, rtol=1e-5, err_msg=one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "loss"), slow_but([("SUM", 5.3630004), ("SUM_BY_NONZERO_WEIGHTS", None)], ("SUM", 5.3630004))
)
def test_heads_of_tensorflow_1_are_the_same_on_two_replicas(reduction: str, loss: float | None) -> None:
    heads = importlib.import_module(f"{ESTIMATOR}.canned.head")
    x = np.sin(np.arange(46)).reshape(23, 2).astype(np.float32)
    y, w = np.int64(x[:, :1] > 0), (1 + np.arange(23) % 3).astype(np.float32)[:, None]

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        head = heads._binary_logistic_head_with_sigmoid_cross_entropy_loss(
            weight_column="w", loss_reduction=getattr(v1.losses.Reduction, reduction)
        )
        logits = v1.layers.dense(features["x"], 1, kernel_initializer=v1.ones_initializer())
        step = v1.train.get_or_create_global_step()
        train = lambda loss: v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)  # noqa: E731
        return head.create_estimator_spec(features, mode, logits, labels, train_op_fn=train)

    def results(replicas: int) -> dict[str, Any]:
        model = tf.estimator.Estimator(model_fn, config=on(replicas))
        data = tf.data.Dataset.from_tensor_slices(({"x": x, "w": w}, y))
        model.train(lambda: data.batch(8 // replicas))
        assert {one["logits"].shape for one in model.predict(lambda: data.batch(8))} == {(1,)}
        return model.evaluate(lambda: data.batch(8))

    alone = results(1)
    assert results(2) == pytest.approx(alone, rel=1e-5)
    if loss is not None:  # 2.15's: the mean of the batches' sums
        assert alone["loss"] == pytest.approx(loss, rel=1e-5)
