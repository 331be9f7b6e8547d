"""The gallery: each of its experiments reaches what its file promises, and leaves the pictures that its page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
PROMISE = re.compile(r"^# Reaches: (\S+) (>=|<=) (\S+)", re.MULTILINE)
PROMISES = {
    path.stem: found
    for path in sorted((ROOT / "conf" / "experiment").glob("*.yaml"))
    if (found := PROMISE.findall(path.read_text()))
}
"""Experiment -> (metric, sign, number) of each line `# Reaches: eval/accuracy >= 0.9` of its file."""

TRACKER = """
class Tracker:
    def start(self, run_id, name, params, tags):
        return "run"

    def log_points(self, points):
        pass

    def end(self, status):
        pass
"""
"""One for which pictures are made, and which is imported sooner than MLflow."""


@pytest.mark.slow
@pytest.mark.parametrize("experiment", PROMISES)
def test_an_experiment_of_the_gallery_reaches_what_it_promises(
    experiment: str, tmp_path: Path, command_line: CommandLine
) -> None:
    model_dir = f"outputs/{experiment}"
    page = (ROOT / "docs" / "gallery" / f"{experiment}.md").read_text()
    pictures = re.findall(rf"{model_dir}/(\S+?\.png)", page)
    (tmp_path / "pictures.py").write_text(TRACKER)
    # Evaluations before the last one change no number.
    settings = ["tracking.backend=pictures.Tracker", "eval.throttle_secs=1000"]
    result = command_line(f"experiment={experiment}", f"model_dir={model_dir}", *settings, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reached = json.loads((tmp_path / model_dir / "summary.json").read_text())["metrics"]
    for metric, sign, number in PROMISES[experiment]:
        assert reached[metric] >= float(number) if sign == ">=" else reached[metric] <= float(number), (metric, reached)
    for picture in pictures:
        assert (tmp_path / model_dir / picture).stat().st_size > 1000, picture


def test_there_is_something_to_reach() -> None:
    assert {"text_classification", "images", "gan", "custom_loop"} <= set(PROMISES)
