"""model_summary.txt: the variables of a model by name and by layer."""

from __future__ import annotations

from pathlib import Path

from runner import Estimator, RunConfig
from tests.support.messages import Messages
from tests.support.models import native, train_input


def test_training_leaves_a_summary_of_its_model(tmp_path: Path, messages: Messages) -> None:
    Estimator(native, tmp_path, RunConfig()).train(train_input(8), max_steps=2)
    text = (tmp_path / "model_summary.txt").read_text()
    assert text.startswith("variables\n")
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert rows["dense/kernel"] == ["dense/kernel", "[4,", "8]", "float32", "yes", "32"]
    (total,) = [line for line in text.splitlines() if line.startswith("total: ")]
    messages.same("line", total)
    assert "layers\nname" in text and ["dense", "2", "40", "40"] in [line.split() for line in text.splitlines()]
