"""command=report writes one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import Config, ConfigError, ReportConfig, SweepConfig
from runner.launch.environment import report
from tests.support.journal import Lines


class Page(HTMLParser):
    """What is in a page: the rows of its tables, how many pictures, what it would load, and its texts."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures = 0
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.text = file.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "svg":
            self.pictures += 1
        for name, value in attrs:
            is_outside = name in ("src", "href", "xlink:href") and not str(value).startswith("#")
            if is_outside:
                self.loads.append(value)

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("td", "th"):
            self.rows[-1][-1] += data.strip()


def write_run(folder: Path, rate: float, seed: int, error: str | None = None, **settings: str) -> float:
    """Write a run whose loss follows from its rate and seed, or that has failed; return its loss."""
    (folder / ".hydra").mkdir(parents=True)
    typed = [f"model.params.rate={rate}", f"run.seed={seed}", *(f"{key}={value}" for key, value in settings.items())]
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(typed))
    loss = abs(math.log10(rate) + 2) + seed / 10
    metrics = {} if error else {"eval/loss": loss}
    if not error:
        journal = Lines(folder)
        for step in (10, 20, 30):
            journal.metrics(step, {"eval/loss": loss + 1 / step, "train/loss": loss + 2 / step})
    summary = {"command": "train", "global_step": 30, "metrics": metrics, "error": error}
    summary |= {"status": "failed" if error else "finished", "settings_id": f"id{rate}", "seed": seed}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "shipped.mlflow.json").write_text(json.dumps({"run_id": f"run-{folder.name}"}))
    return loss


def written(home: Path, **settings: Any) -> Page:
    config = Config(command="report", model_dir=str(home / "outputs"), **settings)
    answer = report.show(config, {})
    return Page(Path(answer["path"]))


def test_it_has_the_ranking_curves_settings_and_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rate in (0.1, 0.01, 0.001):
        for seed in (1, 2):
            write_run(tmp_path / "outputs" / f"r{rate}-{seed}", rate, seed)
    write_run(tmp_path / "outputs" / "broken", 0.01, 3, "ValueError: <script>alert(1)</script> & more")
    page = written(tmp_path)
    assert page.loads == [], "one file, without network"
    assert page.pictures == 3, "two metrics, and the rate; the seed is no setting of a group"
    ranking = page.rows[1:4]
    assert page.rows[0] == ["rank", "run", "n", "eval/loss", "step", "status", "settings"]
    assert [row[:4] for row in ranking] == [
        ["1", "outputs/r0.01-1", "2 of 3", "0.15 ± 0.071"],
        ["2", "outputs/r0.001-1", "2", "1.15 ± 0.071"],
        ["3", "outputs/r0.1-1", "2", "1.15 ± 0.071"],
    ]
    assert ranking[0][-1] == "model.params.rate=0.01"
    everything = page.rows[5:]
    assert len(everything) == 7
    broken = next(row for row in everything if row[0] == "outputs/broken")
    assert broken[1] == "failed"
    assert "<script>alert(1)</script> & more" in broken[6], "as text"
    assert page.text.count("<script") == 1, "its own"
    assert broken[7:] == ["run-broken", str(tmp_path / "outputs" / "broken")]


@pytest.mark.parametrize("number", [1, 300])
def test_it_takes_one_run_and_many(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(number):
        write_run(tmp_path / "outputs" / f"{index:03}", 0.001 + index / 1000, 1)
    page = written(tmp_path, report=ReportConfig("deep/in/a/folder/page.html"))
    assert len(page.rows) == 2 * (number + 1)
    assert page.pictures == (2 if number == 1 else 3), "nothing varies in a single run"
    assert len(page.text) < 2_000_000
    assert "outputs/000" in page.text


def test_names_that_look_like_markup_or_formulas_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["<b>x</b>", "$\\frac{$", "&amp;"]):
        write_run(tmp_path / "outputs" / f"a{number}", 0.01, 1, **{"+model.params.$a<i>": name})
    page = written(tmp_path)
    assert {"b", "i"}.isdisjoint(page.tags)
    assert "$a&lt;i&gt;" in page.text


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        write_run(tmp_path / "outputs" / f"a{number}", 0.01, 1, **{"model.params.db_password": f"swordfish{number}"})
    page = written(tmp_path)
    assert "swordfish" not in page.text


def test_a_metric_that_no_run_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "outputs" / "a", 0.01, 1)
    with pytest.raises(ConfigError, match="eval/accuracy"):
        written(tmp_path, sweep=SweepConfig(metric="eval/accuracy"))
    assert not (tmp_path / "report.html").exists()
