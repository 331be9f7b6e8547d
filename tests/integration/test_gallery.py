"""The gallery: each of its experiments reaches what its file promises, and leaves the pictures that its page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISE = re.compile(r"^# Reaches: (\S+) (>=|<=) (\S+)", re.MULTILINE)
PROMISES = {
    path.stem: found
    for path in sorted((ROOT / "conf" / "experiment").glob("*.yaml"))
    if (found := PROMISE.findall(path.read_text()))
}
"""Experiment -> (metric, sign, number) of each line `# Reaches: eval/accuracy >= 0.9` of its file."""


@pytest.mark.slow
@pytest.mark.parametrize("experiment", PROMISES)
@pytest.mark.usefixtures("mlflow_database")
def test_an_experiment_of_the_gallery_reaches_what_it_promises(experiment: str, tmp_path: Path) -> None:
    model_dir = f"outputs/{experiment}"
    command = [sys.executable, "-m", "runner", f"experiment={experiment}", f"model_dir={model_dir}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    reached = json.loads((tmp_path / model_dir / "summary.json").read_text())["metrics"]
    for metric, sign, number in PROMISES[experiment]:
        assert reached[metric] >= float(number) if sign == ">=" else reached[metric] <= float(number), (metric, reached)
    page = (ROOT / "docs" / "gallery" / f"{experiment}.md").read_text()
    for picture in re.findall(rf"{model_dir}/(\S+?\.png)", page):
        assert (tmp_path / model_dir / picture).stat().st_size > 1000, picture


def test_there_is_something_to_reach() -> None:
    assert {"text_classification", "images", "gan", "custom_loop"} <= set(PROMISES)
