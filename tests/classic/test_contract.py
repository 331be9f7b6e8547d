"""tf.estimator's classes to the letter: what calls of them come to, right ones and wrong ones, is 2.15's result.

The calls and 2.15's results are in tests/golden/contract.py; tests/integration/test_golden.py asks 2.15 itself.
"""

from __future__ import annotations

from typing import Any

import pytest

import runner.classic  # noqa: F401  (tf.estimator)
from tests.golden import contract

ANY: Any = object()
VARIABLES = ["variables/variables.data-00000-of-00001", "variables/variables.index"]

DIFFERS: dict[str, Any] = {
    # The runner takes more: a loss for each example where it can tell what that means, and a metric for each.
    "train(loss=shaped(None)).loss.shape.rank": 1,
    "evaluated(loss=c(1.0, 2.0))": ANY,
    'evaluated(eval_metric_ops={"a": c(1.0, 2.0)})': ANY,
    'predicted(predictions=tf.get_variable("v", [])).predictions.shape.rank': 0,
    # Other arguments of model_fn keep their default; a checkpoint is written at the end of training in any case.
    "made(lambda features, labels, mode, other=1: None)": "Estimator",
    "never_saves().train(data, saving_listeners=[Listener()], steps=1)": "Estimator",
    # 0 turns a cadence off, and so both may be 0. Workers without a chief may have an evaluator.
    "est.RunConfig(save_checkpoints_steps=0, save_checkpoints_secs=0)": "RunConfig",
    'task("evaluator", 0, {"worker": ["h0:1"]})': "RunConfig",
    # An evaluator needs no cluster; a task needs a type.
    'place(in_tf_config({"task": {"type": "evaluator", "index": 0}}))': ["evaluator", 0, False, 0, 0, None, "", "", []],
    'place(in_tf_config({"task": {"index": 0}}))': "raises ValueError",
    # tf.estimator says that this is a TypeError, and stumbles over it.
    'evaluated(eval_metric_ops={"a": (1.0, 2.0)})': "raises TypeError",
    # Seen when model_fn has been traced, in which a metric of Keras 3 can be seen to be updated or not.
    'evaluated(eval_metric_ops={"a": metric()})': ANY,
    # With a model card.
    'files(fitted().export_saved_model(b"out", serving, as_text=True))': ["README.md", "saved_model.pbtxt", *VARIABLES],
    'files(trained().export_saved_model(b"out", SERVING, assets_extra={b"a/b": __file__.encode()}))': [
        "README.md", "assets.extra/a/b", "saved_model.pb", *VARIABLES,
    ],
    # In a graph of a session it is the value, which programs from before 2.0 ask for.
    "of_variable(lambda w, g: w.initialized_value())": "SymbolicTensor",
    # Hooks look for all of their names in one way, and 2.15's in two.
    'trained().train(data, hooks=[est.LoggingTensorHook(["missing:0"], every_n_iter=1)], steps=1)': "raises ValueError",
    'trained().train(data, hooks=[est.LoggingTensorHook({"a": "missing"}, every_n_iter=1)], steps=1)': (
        "raises ValueError"
    ),
    # The estimators of tf.compat.v1 have the heads of TensorFlow 2.
    'est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], label_vocabulary="ab")': "raises ValueError",
    'est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], label_vocabulary=["a"], n_classes=3)': (
        "raises ValueError"
    ),
    # A list of numbers is taken for an array, and a key that is a number for its text.
    'est.inputs.numpy_input_fn({"x": [1]}, shuffle=False)()': {"x": "SymbolicTensor"},
    "export.build_raw_serving_input_receiver_fn({7: shaped(None)})()": ANY,
    # Mistakes that tf.estimator met later, or never.
    'est.BestExporter("a", None).name': "raises ValueError",
    "est.BestExporter(serving_input_receiver_fn=None).name": "raises ValueError",
    'est.DNNLinearCombinedClassifier(dnn_feature_columns=[tf.feature_column.numeric_column("x")])': "raises ValueError",
    "est.RunConfig(7)": "raises TypeError",
    'est.BinaryClassHead(label_vocabulary=["a"])': "raises ValueError",
    'est.MultiHead([est.RegressionHead(name="a"), est.RegressionHead(name="a")])': "raises ValueError",
}  # fmt: skip
"""Call -> what it comes to on the runner where that is, on purpose, not what it came to in 2.15."""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of events may open its file late, by a relative path, when `contract.result` has come back."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(
    ("call", "of_2_15"), [pair for table in contract.TABLES for pair in contract.expected(table).items()]
)
def test_a_call_comes_to_what_it_came_to(call: str, of_2_15: Any) -> None:
    found, expected = contract.result(call, vars(contract)), DIFFERS.get(call, of_2_15)
    assert found == expected or (expected is ANY and not str(found).startswith("raises "))
    assert call not in DIFFERS or found != of_2_15, "it is 2.15's now: remove it from DIFFERS"
