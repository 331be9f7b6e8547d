"""run.debug=nan: the operation that made the first value that is not finite is named, with the line of model_fn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.config import parsing
from runner.config.schema import ConfigError
from tests.config.test_config import composed
from tests.support.jobs import endless, results, run
from tests.support.line import line
from tests.support.messages import Messages

HERE = "tests.tracing.test_numeric_checks"
INPUTS = r"(?<=finite inputs )\(.*\)"
"""The names that TensorFlow gave them."""
v1 = tf.compat.v1


def logarithm(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """NaN in the second batch; a mask, and a logarithm that is left out, are not finite from the first on."""
    spec = line(features, labels, mode, params)
    masked = tf.nn.softmax(tf.stack([features, tf.fill(tf.shape(features), float("-inf"))]), 0)
    left_out = tf.where(features > 100.0, tf.math.log(-features), 0.0)
    logged = tf.math.log(3.5 - features)
    return spec._replace(loss=spec.loss + 0 * tf.reduce_sum(logged * masked[0] + tf.stop_gradient(left_out)))


def root(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """The loss is finite, its gradient is not."""
    weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
    predicted = tf.sqrt(weight * features)
    loss = tf.reduce_mean((predicted - labels) ** 2)
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    if params.get("classic"):
        return EstimatorSpec(mode, predicted, loss, optimizer.minimize(loss, v1.train.get_global_step()))
    return EstimatorSpec(mode, predicted, loss, optimizer=optimizer)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What a run that failed has shown from the start of the message on."""
    shown = capsys.readouterr().err
    return shown[shown.index("runner: ") :]


def test_names_the_operation_the_line_and_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, f"model.fn={HERE}.logarithm", "run.debug=nan", "input.eval=null") == 1
    messages.same("stderr", said(capsys), hide=INPUTS)


@pytest.mark.parametrize("classic", [False, True])
def test_names_the_operation_whose_gradient_it_was(
    classic: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = (f"model.fn={HERE}.root", "run.debug=nan", "input.eval=null", f"+model.params.classic={classic}")
    assert run(tmp_path, *settings) == 1
    messages.same("stderr", said(capsys), hide=f"{INPUTS}|(?<=operation )'.*?'")


def test_changes_no_number(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "a") == run(tmp_path / "b", "run.debug=nan") == 0
    (plain,), (checked,) = results(tmp_path / "a"), results(tmp_path / "b")
    assert checked["metrics"] == plain["metrics"] and checked["examples"] == plain["examples"]


def test_works_on_several_replicas(tmp_path: Path, messages: Messages) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    config = RunConfig(str(tmp_path), train_distribute=strategy, check_numerics=True)
    estimator = Estimator(root, config=config, params={})
    with pytest.raises(tf.compat.v1.train.NanLossDuringTrainingError, match="SqrtGrad") as raised:
        estimator.train(Input(endless, params={}, batch_size=4), max_steps=2)
    (note,) = (note for note in raised.value.__notes__ if "sqrt" in note)
    messages.same("note", note)


@pytest.mark.parametrize("override", ["train.jit=true", "train.precision=mixed_float16", "strategy=parameter_server"])
def test_what_it_cannot_check_is_refused(override: str, messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsing.parse(composed(["run.debug=nan", override]))
