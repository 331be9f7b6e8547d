"""model_summary.txt, and the FLOPs of a step: checked against numbers made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.flops import count_flops
from runner.model_summary import flops_of_step
from tests.jobs import run
from tests.models import native, strategies, train_input

v1 = tf.compat.v1
STRATEGIES = strategies()


def products(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Two products of matrices, `[batch, 4] x [4, 8] x [8, 1]`, and next to nothing else."""
    hidden = features @ v1.get_variable("hidden", [4, 8])
    loss = (hidden @ v1.get_variable("out", [8, 1]))[:, 0]
    return EstimatorSpec(mode, {"y": loss}, loss, optimizer=keras.optimizers.SGD(0.1))


def looped(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    kernel = v1.get_variable("kernel", [4, 4])
    (out,) = tf.while_loop(lambda x: tf.reduce_sum(x) < 0, lambda x: (x @ kernel,), (features,))
    return EstimatorSpec(mode, {"y": out}, out[:, 0], optimizer=keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(("batch_size", "parts"), [(8, 1), (16, 1), (16, 2)])
@pytest.mark.parametrize("strategy", ["default", "mirrored", "central_storage"])
def test_products_of_matrices_are_counted_by_hand(strategy: str, batch_size: int, parts: int, tmp_path: Path) -> None:
    config = RunConfig(train_distribute=STRATEGIES[strategy], gradient_accumulation=parts)
    training = Estimator(products, tmp_path, config).prepare(train_input(batch_size))
    size = batch_size // config.num_replicas_in_sync // parts
    flops = count_flops(training.program.trace, training.program.spec.loss, size)
    forward = 2 * size * 4 * 8 + 2 * size * 8
    backward = 2 * size * 4 * 8 + 2 * 2 * size * 8  # of the kernels, and of what lies between them
    assert flops.forward is not None and 0 <= flops.forward - forward <= 4 * size
    step = (forward + backward) * config.num_replicas_in_sync
    # Sums over replicas, and the update of 40 numbers, are a few more.
    assert flops.step is not None and 0 <= flops.step - step < 1000
    assert not flops.not_counted
    assert f"{flops.forward:,} forward, for {size} examples" in flops_of_step(training)


def test_shapes_that_nobody_knows_are_said(tmp_path: Path) -> None:
    training = Estimator(products, tmp_path).prepare(train_input(8))
    flops = count_flops(training.program.trace, training.program.spec.loss, None)
    assert flops.forward is None and flops.step is None


def test_what_is_not_counted_is_named(tmp_path: Path) -> None:
    said = flops_of_step(Estimator(looped, tmp_path).prepare(train_input(8)))
    assert "at least 0 forward" in said and "without StatelessWhile, While, which TensorFlow does not count" in said


def test_training_leaves_a_summary_of_its_model(tmp_path: Path) -> None:
    Estimator(native, tmp_path, RunConfig()).train(train_input(8), max_steps=2)
    text = (tmp_path / "model_summary.txt").read_text()
    assert text.startswith("variables\n")
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert rows["dense/kernel"] == ["dense/kernel", "[4,", "8]", "float32", "yes", "32"]
    assert "total: 49 trainable parameters, " in text
    assert "layers\nname" in text and ["dense", "2", "40", "40"] in [line.split() for line in text.splitlines()]
    assert "forward, for 8 examples on a replica" in text.splitlines()[-1]


def test_a_rehearsal_tells_the_flops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "command=dry_run") == 0
    said = capsys.readouterr()
    assert "FLOPs of a step: " in said.out and "forward, for 2 examples on a replica" in said.out
    assert "flops stats" not in said.err
