"""What a run and a sweep wrote, in MLflow's own pages, in a real browser.

Needs Debian's `chromium` and `chromium-driver`; `make browser` installs them. Without them these tests are skipped, or
fail when RUNNER_REQUIRE_BROWSER=1. `docs/make_screenshots.py` takes the pictures of docs/images/.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import (
    CHROMIUM,
    DRIVER,
    MISSING,
    Pages,
    browser,
    curve,
    link,
    mlflow_server,
    row,
    sweep_in,
)
from tests.support.command_line import CommandLine

pytestmark = pytest.mark.slow

RUN = ["train.max_steps=60", "train.log_steps=5", "checkpoint.save_steps=20", "run.progress=off"]
SWEEP = ["--multirun", "model.params.learning_rate=0.1,0.01"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path, command_line: CommandLine) -> Path:
    """Where a run, a sweep and a report of both were made."""
    if not (CHROMIUM and DRIVER):
        if os.environ.get("RUNNER_REQUIRE_BROWSER") == "1":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("browser")
    shutil.copy(empty_mlflow_database, folder / "mlflow.db")
    for words in (
        ["model_dir=outputs/alone", "tracking.run_name=alone", *RUN],
        [*SWEEP, *RUN],
        ["command=report", "model_dir=outputs"],
    ):
        done = command_line(*words, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    with mlflow_server(folder) as address, browser(address, tmp_path_factory.mktemp("profile")) as pages:
        yield pages


def test_the_experiment_shows_the_run_and_the_sweep_with_its_jobs(pages: Pages, folder: Path) -> None:
    sweep, jobs = sweep_in(folder)
    assert sorted(jobs) == ["learning_rate=0.01", "learning_rate=0.1"]
    pages.open()
    pages.click(link("runner"))
    pages.see(link("alone"))
    pages.click(f"//*[@role='gridcell' and .{link(sweep)}]//button")
    for job in jobs:
        pages.see(link(job))
    pages.click("//label[.//input[@value='CHART']]")  # the curves of all of them, beside their names
    pages.see("//input[@placeholder='Search metric charts']").send_keys("^eval|^train/loss")
    for name in ("eval/loss", "eval/accuracy", "train/loss"):
        pages.see(curve(name))


def test_the_address_of_the_last_lines_shows_the_best_run_first(pages: Pages, folder: Path) -> None:
    path = json.loads((folder / "outputs" / "alone" / "shipped.mlflow.json").read_text())["address"].split(":5000/")[1]
    summaries = [*folder.glob("outputs/alone/summary.json"), *folder.glob("outputs/sweeps/*/*/summary.json")]
    losses = {one.parent.name: json.loads(one.read_text())["metrics"]["eval/loss"] for one in summaries}
    sweep = json.loads(next(folder.glob("outputs/sweeps/*/sweep.json")).read_text())
    names = {"alone": "alone", **{job["folder"]: job["name"] for job in sweep["jobs"]}}
    first, *_ = sorted(losses, key=losses.__getitem__)
    for width in (1280, 1920):
        pages.resize(width)
        pages.open(path)
        pages.see(f"//*[@role='row' and @row-index='0']{link(names[first])}")
        for metric in ("eval/loss", "train/loss"):
            header = pages.see(f"//*[@role='columnheader' and contains(., '{metric}')]")
            right = pages.run("return arguments[0].getBoundingClientRect().right", header)
            assert right < width, "in sight without scrolling"
    pages.resize()  # as the other tests have it


def test_the_page_of_a_run_shows_its_params_metrics_and_tags(pages: Pages, folder: Path) -> None:
    pages.open_run("alone")
    pages.see("//*[normalize-space(text())='Finished']")
    for name, value in (("train.max_steps", "60"), ("train.log_steps", "5"), ("model.fn", "model_fns.digits")):
        pages.see(row(name, value))
    metrics = json.loads((folder / "outputs" / "alone" / "summary.json").read_text())["metrics"]
    pages.see(row("eval/accuracy", str(metrics["eval/accuracy"])))
    for name in ("eval/loss", "train/loss", "train/steps_per_sec", "train/examples_per_sec"):
        pages.see(f"//*[@role='row']{link(name)}")
    for tag in ("strategy", "num_replicas", "status", "command", "version.tensorflow"):
        pages.see(f"//*[normalize-space(text())='{tag}']")


def test_the_metrics_of_a_run_are_drawn_as_curves(pages: Pages, folder: Path) -> None:
    pages.open_run("alone", "Model metrics")
    # Of 13 points; the page draws points on a line as one piece.
    for name, least in (("train/loss", 8), ("eval/loss", 2), ("eval/accuracy", 2), ("train/steps_per_sec", 1)):
        line = pages.see(curve(name))
        assert line.get_attribute("d").count("L") >= least, name  # so many straight pieces


def test_the_learning_curves_are_shown_as_a_picture(pages: Pages, folder: Path) -> None:
    pages.open_run("alone", "Artifacts")
    for file in ("config.yaml", "summary.json"):
        pages.see(f"//*[normalize-space(text())='{file}']")
    pages.click("//*[normalize-space(text())='learning_curves.png']")
    picture = pages.see("//img[@alt='learning_curves.png' or contains(@class, 'rc-image-img')]")
    assert pages.run("return arguments[0].naturalWidth", picture) == 1000


@pytest.mark.parametrize("width", [390, 1920])
def test_the_report_fits_the_window_and_sorts_by_a_column(width: int, pages: Pages, folder: Path) -> None:
    pages.resize(width)
    pages.open_file(folder / "report.html")
    picture = pages.see("//*[local-name()='svg' and contains(@aria-label, 'model.params.learning_rate')]")
    assert 300 < pages.run("return arguments[0].getBoundingClientRect().width", picture) < width
    assert pages.run("return document.documentElement.scrollWidth <= innerWidth"), "only tables scroll to the side"
    of_losses = "return [...document.querySelectorAll('table')[0].tBodies[0].rows].map(row => row.cells[2].textContent)"
    best_first = pages.run(of_losses)
    assert len(best_first) == 3
    assert best_first == sorted(best_first, key=float)
    head = pages.see("//table[1]//th[normalize-space()='eval/loss']")
    pages.run("arguments[0].click()", head)
    pages.run("arguments[0].click()", head)
    assert pages.run(of_losses) == best_first[::-1]
    pages.resize()  # as the other tests have it


def test_the_jobs_of_a_sweep_are_grouped_by_their_settings(pages: Pages) -> None:
    pages.open()
    pages.click(link("runner"))
    pages.see(link("alone"))
    pages.group_by("settings")  # the page keeps this for its user: it is the last test
    for rate in ("0.1", "0.01"):
        pages.see(f"//*[contains(normalize-space(), 'Group: learning_rate={rate}')]")
