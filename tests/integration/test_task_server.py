"""`python -m runner` with tasks that are forked from a task server: the same numbers, errors and exit codes as without.

Restarts and a gang are in test_recovery.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.checkpoint.reader import Reader
from runner.checkpoint_files.layout import latest_checkpoint
from tests.support.jobs import SMALL
from tests.support.journal import events_in, recorded
from tests.support.messages import Messages
from tests.support.processes import is_gone, wait_until
from tests.support.screen import line_of

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
SETTINGS = ("tracking=none", "train.max_steps=5", "run.progress=plain")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a sweep of two jobs from one server, the second of which begins after the first; what it said."""
    folder = tmp_path_factory.mktemp("swept")
    command = [
        sys.executable,
        "-m",
        "runner",
        "-m",
        *SETTINGS,
        "model.params.network=mlp,conv",
        "hydra.sweep.dir=sweep",
    ]
    done = subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "sweep", done.stdout + done.stderr


def values(model_dir: Path) -> dict[str, bytes]:
    path = latest_checkpoint(model_dir)
    assert path is not None
    reader = Reader(path)
    return {name: value.tobytes() for name, value in reader.get_many(reader.names()).items()}


@pytest.mark.slow
def test_the_jobs_of_a_sweep_come_to_the_bits_of_runs_that_import_tensorflow_themselves(
    swept: tuple[Path, str], tmp_path: Path
) -> None:
    folder, said = swept
    assert "task server" not in said and "DeprecationWarning" not in said
    jobs = [path for path in folder.iterdir() if (path / "summary.json").exists()]
    assert len(jobs) == 2
    imports = [line["secs"] for job in jobs for line in recorded(job) if line.get("name") == "import"]
    # Each task's own, and how long the first supervisor waited for the server's.
    assert len(imports) >= 2 and sum(secs >= 0.5 for secs in imports) <= 1
    (job,) = [path for path in jobs if "network: conv" in (path / "config.yaml").read_text()]  # the second one
    command = [sys.executable, "-m", "runner", *SETTINGS, "model_dir=run"]
    subprocess.run(command, cwd=tmp_path, env=ENV, check=True, capture_output=True, timeout=240)
    assert values(tmp_path / "run") == values(job)
    alone, forked = (json.loads((one / "summary.json").read_text()) for one in (tmp_path / "run", job))
    assert alone["metrics"] == forked["metrics"] and alone["global_step"] == forked["global_step"] == 5


@pytest.mark.slow
def test_tasks_of_one_server_leave_nothing_behind_and_its_memory_is_flat(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.served_tasks", str(tmp_path), "--starts", "40", "--kills", "6"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["lost codes"] == found["wrong codes"] == found["left"] == []
    assert sum(found["kills"].values()) == 6 and found["server is gone"]
    first, *_, last = found["server: USS MB, files, threads"]
    assert last[1:] == first[1:] and last[0] < first[0] + 5


@pytest.mark.slow
def test_a_run_whose_task_and_server_are_killed_starts_cold_says_so_once_and_resumes(
    tmp_path: Path, messages: Messages
) -> None:
    settings = [one for one in SMALL if not one.startswith("train.max_steps")]
    command = [
        sys.executable, "-m", "runner", *settings, "train.max_steps=1000000", "checkpoint.save_steps=500",
        "eval.start_delay_secs=1000", "train.steps_per_loop=20", "cluster.max_restarts=3", "model_dir=run",
    ]  # fmt: skip
    process = psutil.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def noted(event: str) -> list[dict[str, Any]]:
        return events_in(tmp_path / "run", event)

    def wait_for_start(number: int) -> int:
        wait_until(lambda: len(noted("first_step")) == number and len(noted("checkpoint")) >= number)
        return noted("started")[-1]["pid"]

    first = wait_for_start(1)
    (server,) = process.children()
    assert [child.pid for child in server.children()] == [first]
    os.kill(first, signal.SIGKILL)
    second = wait_for_start(2)
    assert [child.pid for child in server.children()] == [second]  # and the first is no zombie
    server.kill()
    wait_until(lambda: is_gone(server.pid))
    os.kill(second, signal.SIGKILL)  # the server is not there to say so
    third = wait_for_start(3)
    assert psutil.Process(third).ppid() == process.pid
    process.terminate()
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 3, said
    messages.same("stderr", line_of(said, "run.preload"))
    for line in said.splitlines():
        if "; all tasks" in line:
            messages.same("stderr", line, hide=r"(?<=from step )\d+|(?<=restart )\d")
    wait_until(lambda: all(map(is_gone, (first, second, third))))
