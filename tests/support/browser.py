"""MLflow's pages in Chromium: a server on what was recorded, and a browser that finds what a person sees.

Needs Debian's `chromium` and `chromium-driver`; `make browser` installs them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.distribute.local_cluster import free_ports

ROOT = Path(__file__).parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no chromium and chromedriver: make browser (apt-get install chromium chromium-driver)"
TIMEOUT_SECS = 150.0


def started(argv: Sequence[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
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


def mlflow_app(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return what `mlflow server` starts to serve what is recorded in `folder`, without a process that waits for it:
    the words after `python`, and the environment.
    """
    words = ["-m", "uvicorn", "mlflow.server.fastapi_app:app", "--host", "127.0.0.1", "--port", str(port)]
    env = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'mlflow.db'}",
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "mlartifacts"),
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    return words, env


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Serve what was recorded in `folder`, in one process. Yields the address."""
    (port,) = free_ports(1)
    argv, env = mlflow_app(folder, port)
    process = started(argv, folder, **env)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + TIMEOUT_SECS
    try:
        while not answers(f"{address}/health"):
            assert process.poll() is None and time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        yield address
    finally:
        stopped(process)


def answers(address: str) -> bool:
    """Return whether something answers at `address` that all is well."""
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
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
        self.address = address

    def resize(self, width: int = 1500, height: int = 1250) -> None:
        self._driver.set_window_size(width, height)

    def open(self, path: str = "") -> None:
        self._driver.get(f"{self.address}/{path}")

    def open_file(self, path: Path) -> None:
        self._driver.get(path.as_uri())

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

    def open_run(self, name: str, tab: str = "Overview", experiment: str = "runner") -> None:
        self.open()
        self.click(link(experiment))
        self.click(link(name))
        self.click(f"//*[@role='tab' and normalize-space()='{tab}']")

    def group_by(self, tag: str) -> None:
        """Group the runs of the page by a tag."""
        from selenium.webdriver.common.keys import Keys

        self.click("//button[contains(., 'Group by')]")
        self.see("//input[@placeholder='Search']").send_keys(tag)
        self.click(f"//*[@role='menuitemcheckbox' and normalize-space()='{tag}']")
        self.see("//*[contains(normalize-space(), 'Group: ')]")
        self._driver.find_element("xpath", "//body").send_keys(Keys.ESCAPE)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._driver.execute_script(script, *arguments)

    def keep(self, path: Path) -> None:
        self._driver.save_screenshot(str(path))

    def close(self) -> None:
        self._driver.quit()


@contextmanager
def browser(address: str, profile: Path) -> Iterator[Pages]:
    """Open a browser on the server at `address`, past what MLflow shows to those who come for the first time."""
    pages = Pages(address, profile)
    try:
        pages.open()
        pages.click("//*[normalize-space(text())='Model training']")
        pages.click("//button[@data-component-id='mlflow.assistant.chat_panel.close']")
        yield pages
    finally:
        pages.close()


def link(text: str) -> str:
    return f"//a[normalize-space()='{text}']"


def row(name: str, value: str) -> str:
    """A row of a table that holds both."""
    return f"//*[@role='row' and .//*[normalize-space()='{name}'] and .//*[normalize-space()='{value}']]"


def sweep_in(folder: Path) -> tuple[str, list[str]]:
    """The name of the sweep's run and of its jobs."""
    (directory,) = (folder / "outputs" / "sweeps").iterdir()
    record = json.loads((directory / "sweep.json").read_text())
    return f"sweep {directory.name}", [job["name"] for job in record["jobs"]]


def curve(name: str) -> str:
    """The line of a metric in its chart."""
    card = f"//*[@data-testid='experiment-view-compare-runs-card' and contains(., '({name})')]"
    return f"{card}//*[contains(@class, 'js-plotly-plot')]//*[name()='path' and contains(@class, 'js-line')]"
