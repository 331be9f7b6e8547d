"""Test that the input has the shapes that the model expects, and that the model learns. Run `python -m pytest`."""

from __future__ import annotations

from pathlib import Path

import pytest

import runner
from input_fns.wine import input_fn


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_batch_has_the_shapes_that_the_model_expects(mode: str) -> None:
    features, labels = next(iter(input_fn(mode, runner.Params(batch_size=8, shuffle_seed=1))))
    assert features["x"].shape == (8, 13)
    assert labels.shape == (8,)
    assert set(labels.numpy()) <= {0, 1, 2}


def test_the_model_learns(tmp_path: Path) -> None:
    # The same as: python -m runner experiment=wine model_dir=... tracking=none
    run = runner.run("experiment=wine", f"model_dir={tmp_path / 'run'}", "tracking=none")
    assert run.status == "finished"
    assert run.metrics["eval/accuracy"] > 0.9
