"""What a run and a sweep wrote, in MLflow's own pages, in a real browser.

Needs Debian's `chromium` and `chromium-driver`; `make browser` installs them. Without them these tests are skipped, or
fail when RUNNER_REQUIRE_BROWSER=1. RUNNER_SCREENSHOT=docs/mlflow.png takes the picture in docs/ anew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
TIMEOUT_SECS = 150.0
RUN = ["train.max_steps=60", "train.log_steps=5", "checkpoint.save_steps=20", "run.progress=off"]
SWEEP = ["--multirun", "model.params.learning_rate=0.1,0.01"]


def started(argv: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stopped(process: subprocess.Popen[str]) -> str:
    """Ends a process and those that it started. What it said."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=TIMEOUT_SECS)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run and a sweep ran, at the same time, on a database that did not exist."""
    if not (CHROMIUM and DRIVER):
        message = "no chromium and chromedriver: make browser (apt-get install chromium chromium-driver)"
        if os.environ.get("RUNNER_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("browser")
    commands = [
        started(["-m", "runner", *more, *RUN], folder)
        for more in (["model_dir=outputs/alone", "tracking.run_name=alone"], SWEEP)
    ]
    for command in commands:
        said, _ = command.communicate(timeout=TIMEOUT_SECS)
        assert command.returncode == 0, said
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The address of an MLflow server on what was recorded; as few processes as it can do with."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--workers": "1",
        "--backend-store-uri": f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination": str(folder / "mlartifacts"),
    }
    argv = ["-m", "mlflow", "server", *(text for pair in settings.items() for text in pair)]
    process = started(argv, folder, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + TIMEOUT_SECS
    while not answers(f"{address}/health"):
        assert process.poll() is None and time.monotonic() < deadline, stopped(process)
        time.sleep(0.1)
    yield address
    stopped(process)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


class Pages:
    """A browser on MLflow's pages. Elements are found by what a person sees of them."""

    def __init__(self, address: str, profile: Path) -> None:
        from selenium import webdriver

        os.environ["SE_OFFLINE"] = "true"  # selenium would look for drivers to download
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (
            "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic", "no-first-run",
            "disable-background-networking", "disable-component-update", "disable-sync", "window-size=1500,1250",
            f"user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(f"--{flag}")
        self._driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self._address = address

    def open(self, path: str = "") -> None:
        self._driver.get(f"{self._address}/{path}")

    def see(self, xpath: str) -> Any:
        """The element, as soon as it is there."""
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.expected_conditions import visibility_of_element_located
        from selenium.webdriver.support.wait import WebDriverWait

        wait = WebDriverWait(self._driver, TIMEOUT_SECS)
        return wait.until(visibility_of_element_located((By.XPATH, xpath)), f"no {xpath} at {self._driver.current_url}")

    def click(self, xpath: str) -> None:
        """Clicks what may be drawn anew at any moment."""
        from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException

        deadline = time.monotonic() + TIMEOUT_SECS
        while True:
            try:
                self.see(xpath).click()
                return
            except (ElementClickInterceptedException, StaleElementReferenceException):
                if time.monotonic() > deadline:
                    raise

    def run(self, script: str, *arguments: Any) -> Any:
        return self._driver.execute_script(script, *arguments)

    def keep(self, path: Path) -> None:
        self._driver.save_screenshot(str(path))

    def close(self) -> None:
        self._driver.quit()


def link(text: str) -> str:
    return f"//a[normalize-space()='{text}']"


def row(name: str, value: str) -> str:
    """A row of a table that holds both."""
    return f"//*[@role='row' and .//*[normalize-space()='{name}'] and .//*[normalize-space()='{value}']]"


@pytest.fixture(scope="module")
def pages(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(server, tmp_path_factory.mktemp("profile"))
    pages.open()
    pages.click("//*[normalize-space(text())='Model training']")
    pages.click("//button[@data-component-id='mlflow.assistant.chat_panel.close']")
    yield pages
    pages.close()


def sweep_of(folder: Path) -> tuple[str, list[str]]:
    """The name of the sweep's run and of its jobs."""
    (directory,) = (folder / "outputs" / "sweeps").iterdir()
    record = json.loads((directory / "sweep.json").read_text())
    return f"sweep {directory.name}", [job["name"] for job in record["jobs"]]


def open_run(pages: Pages, name: str, tab: str = "Overview") -> None:
    pages.open()
    pages.click(link("runner"))
    pages.click(link(name))
    pages.click(f"//*[@role='tab' and normalize-space()='{tab}']")


def curve(name: str) -> str:
    """The line of a metric in its chart."""
    card = f"//*[@data-testid='experiment-view-compare-runs-card' and contains(., '({name})')]"
    return f"{card}//*[contains(@class, 'js-plotly-plot')]//*[name()='path' and contains(@class, 'js-line')]"


def test_the_experiment_shows_the_run_and_the_sweep_with_its_jobs(pages: Pages, folder: Path, tmp_path: Path) -> None:
    sweep, jobs = sweep_of(folder)
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
    kept = Path(os.environ.get("RUNNER_SCREENSHOT") or tmp_path / "mlflow.png")
    pages.run("document.head.insertAdjacentHTML('beforeend', '<style>.modebar { display: none }</style>')")
    pages.keep(kept)
    assert kept.read_bytes().startswith(b"\x89PNG")


def test_the_page_of_a_run_shows_its_params_metrics_and_tags(pages: Pages, folder: Path) -> None:
    open_run(pages, "alone")
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
    open_run(pages, "alone", "Model metrics")
    for name, least in (("train/loss", 12), ("eval/loss", 2), ("eval/accuracy", 2), ("train/steps_per_sec", 1)):
        line = pages.see(curve(name))
        assert line.get_attribute("d").count("L") >= least, name  # so many straight pieces


def test_the_learning_curves_are_shown_as_a_picture(pages: Pages, folder: Path) -> None:
    open_run(pages, "alone", "Artifacts")
    for file in ("config.yaml", "summary.json"):
        pages.see(f"//*[normalize-space(text())='{file}']")
    pages.click("//*[normalize-space(text())='learning_curves.png']")
    picture = pages.see("//img[@alt='learning_curves.png' or contains(@class, 'rc-image-img')]")
    assert pages.run("return arguments[0].naturalWidth", picture) == 1000
