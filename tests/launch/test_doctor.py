"""command=doctor: what it tells of this machine, and what it advises where something is wrong."""

from __future__ import annotations

import http.server
import io
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner.config import parsing
from runner.config.schema import TrackingConfig
from runner.launch.environment import doctor
from runner.launch.environment.doctor import Probe, Section
from tests.config.test_config import composed
from tests.support.command_line import CommandLine

GB = 2**30
FACTS: dict[str, Any] = {
    "import_secs": 4.0, "tensorflow": "2.21.0", "keras": "3.15.1", "keras_backend": "tensorflow", "tf_keras": "3.15.1",
    "cuda": "12.5.1", "cudnn": "9", "rocm": False,
    "devices": [{"name": "CPU:0", "kind": "CPU", "error": None, "model": None, "compute_capability": None}],
}  # fmt: skip
GPU = {"name": "GPU:0", "kind": "GPU", "error": None, "model": "NVIDIA H200", "compute_capability": [9, 0]}


def tracking(*overrides: str) -> TrackingConfig:
    return parsing.parse(composed(["command=doctor", *overrides])).tracking


def advice(section: Section) -> list[tuple[bool, str, str]]:
    return [(one.is_fatal, one.what, one.do) for one in section.problems]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> tuple[int, str, Path]:
    """(exit code, output, folder) of the command, in an empty folder."""
    home = tmp_path_factory.mktemp("home")
    result = command_line("command=doctor", cwd=home, CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")
    assert result.stderr == ""
    return result.returncode, result.stdout, home


def test_it_tells_of_tensorflow_devices_and_mlflow(told: tuple[int, str, Path]) -> None:
    code, said, home = told
    assert (code, said.splitlines()[-1]) == (0, "A run can start here.")
    assert f"TensorFlow  {tf.__version__}, built for " in said
    assert f"Keras       {keras.__version__}; tf.keras is 3." in said
    assert "\nCPU:0       computes\n" in said and "\nGPU         none: " in said
    assert f"runs go to        sqlite:///{home}/mlflow.db" in said
    assert "reachable         yes: the first run creates the file" in said


def test_it_leaves_nothing_and_warns_of_slow_imports(told: tuple[int, str, Path]) -> None:
    _, said, home = told
    assert list(home.iterdir()) == []
    assert "warning  PYTHONDONTWRITEBYTECODE is set, so each start " in said
    assert said.rstrip().splitlines()[-3].endswith("unset PYTHONDONTWRITEBYTECODE")


def test_a_machine_without_tensorflow_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_probe", lambda env: Probe(None, "exited with 1", "ImportError: no libfoo\n"))
    screen = io.StringIO()
    assert not doctor.show(tracking(), {}, screen)
    said = screen.getvalue()
    assert said.endswith("No run can start here: see the errors above.\n")
    assert "exited with 1: ImportError: no libfoo" in said and "error  " in said


@pytest.mark.parametrize(
    ("failure", "said", "env", "do"),
    [
        ("exited with 1", "Unknown flag in XLA_FLAGS: --x", {"XLA_FLAGS": "--x"}, "unset XLA_FLAGS, or correct it"),
        ("was killed by SIGILL", "", {}, "this processor lacks instructions"),
        ("was killed by SIGKILL (by the system)", "", {}, "give this machine or container more memory"),
    ],
)
def test_a_tensorflow_that_cannot_be_used_comes_with_advice(
    failure: str, said: str, env: dict[str, str], do: str
) -> None:
    ((is_fatal, what, advised),) = advice(doctor.check_tensorflow(Probe(None, failure, said), env))
    assert is_fatal and failure in what and advised.startswith(do)


def test_a_probe_that_hangs_or_crashes_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck, crash = tmp_path / "stuck", tmp_path / "crash"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    crash.write_text("#!/bin/sh\necho bad >&2\nkill -ILL $$\n")
    for script in (stuck, crash):
        script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    assert doctor.run_probe({}, timeout_secs=0.3).failure == "has not finished within 0 s"
    monkeypatch.setattr(sys, "executable", str(crash))
    found = doctor.run_probe({"PATH": "/bin:/usr/bin"})
    assert (found.facts, found.said) == (None, "bad\n") and found.failure.startswith("was killed by SIGILL")


@pytest.mark.parametrize(
    ("files", "changes", "env", "said", "why", "problem"),
    [
        ([], {}, {}, "", "this machine has no NVIDIA GPU", None),
        (["nvidia0"], {}, {"CUDA_VISIBLE_DEVICES": "-1"}, "", "CUDA_VISIBLE_DEVICES='-1' hides", "unset CUDA_VISIBLE"),
        (["nvidia0"], {"cuda": None}, {}, "", "built for CPUs only", "pip install 'tf-runner[gpu]'"),
        (
            ["nvidia0"], {}, {}, "W0000 1 gpu_device.cc:1] Cannot dlopen some GPU libraries. Skipping registering",
            "Cannot dlopen some GPU libraries.", "pip install 'tf-runner[gpu]'",
        ),
    ],
)  # fmt: skip
def test_it_says_why_there_is_no_gpu(
    files: list[str], changes: dict[str, Any], env: dict[str, str], said: str, why: str, problem: str | None,
    tmp_path: Path,
) -> None:  # fmt: skip
    for name in files:
        (tmp_path / name).touch()
    section = doctor.check_tensorflow(Probe({**FACTS, **changes}, said=said), env, tmp_path)
    shown = dict(section.rows)["GPU"]
    assert shown.startswith("none: ") and why in shown
    assert [do.startswith(str(problem)) for _, _, do in advice(section)] == ([True] if problem else [])
    assert not any(is_fatal for is_fatal, _, _ in advice(section)), "it trains on the CPU"


def test_a_gpu_is_named_and_one_that_does_not_compute_is_a_problem(tmp_path: Path) -> None:
    section = doctor.check_tensorflow(Probe({**FACTS, "devices": [*FACTS["devices"], GPU]}), {}, tmp_path)
    assert dict(section.rows)["GPU:0"] == "NVIDIA H200, compute capability 9.0"
    assert section.problems == []
    broken = {**GPU, "error": "no kernel image"}
    section = doctor.check_tensorflow(Probe({**FACTS, "devices": [*FACTS["devices"], broken]}), {}, tmp_path)
    assert [(fatal, what) for fatal, what, _ in advice(section)] == [(False, "GPU:0 does not compute: no kernel image")]


def test_little_memory_and_disk_are_problems(tmp_path: Path) -> None:
    plenty = doctor.check_machine(tmp_path, 40 * GB, {tmp_path: 50 * GB})
    assert plenty.problems == []
    section = doctor.check_machine(tmp_path, GB, {tmp_path: 10 * 2**20})
    assert section.rows == [("memory", "1.1 GB free"), ("disk", f"10.5 MB free at {tmp_path}")]
    assert [is_fatal for is_fatal, _, _ in advice(section)] == [False, True]


def test_packages_of_other_versions_are_named() -> None:
    section = doctor.check_python({}, ["numpy>=99", "nobody-has-this>=1", "keras>=3", "optuna>=99; extra == 'optuna'"])
    assert [(fatal, do) for fatal, _, do in advice(section)] == [
        (False, "pip install 'numpy>=99'"),
        (True, "pip install 'nobody-has-this>=1'"),
    ]


# --- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server without experiments, which asks for credentials at /closed; its URL, and the requests that came."""
    came: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append({"path": self.path, "auth": self.headers.get("Authorization", "")})
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(401 if self.path.startswith("/closed/") else 200)
            self.end_headers()
            self.wfile.write(b"" if self.path.startswith("/closed/") else b'{"experiments": []}')

        def log_message(self, format: str, *args: Any) -> None:
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"127.0.0.1:{running.server_port}", came
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_tracking_server_is_asked(server: tuple[str, list[dict[str, str]]], tmp_path: Path) -> None:
    host, came = server
    section = doctor.check_tracking(tracking(f"tracking.uri=http://me:secret99@{host}/"), {}, tmp_path)
    assert (dict(section.rows)["reachable"], section.problems) == ("yes", [])
    assert {one["auth"] for one in came} == {"Basic bWU6c2VjcmV0OTk="}
    assert {one["path"].rpartition("/")[2] for one in came} == {"search"}, "only reads"
    assert "secret99" not in str(section)
    section = doctor.check_tracking(tracking(), {"MLFLOW_TRACKING_URI": f"http://{host}/closed"}, tmp_path)
    ((is_fatal, what, do),) = advice(section)
    assert not is_fatal and "asks for credentials (HTTP 401)" in what and "MLFLOW_TRACKING_TOKEN" in do


def test_a_tracking_server_that_is_away_stops_nothing(tmp_path: Path) -> None:
    section = doctor.check_tracking(tracking("tracking.uri=http://me:secret99@127.0.0.1:1"), {}, tmp_path)
    ((is_fatal, what, do),) = advice(section)
    assert not is_fatal and "127.0.0.1:1 cannot be reached: Connection refused." in what and "secret99" not in what
    assert "is recorded later" in do


def test_a_database_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE runs (run_uuid TEXT)")
        connection.execute("INSERT INTO runs VALUES ('a')")
    connection.close()
    assert dict(doctor.check_tracking(tracking(), {}, tmp_path).rows)["reachable"] == "yes: a database with 1 run"
    file.write_text("no database at all, but a text that is long enough to be read as a header" * 20)
    ((_, what, _),) = advice(doctor.check_tracking(tracking(), {}, tmp_path))
    assert what.startswith(f"runs cannot be recorded in sqlite:///{file}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_run_without_mlflow_needs_none(tmp_path: Path) -> None:
    section = doctor.check_tracking(tracking("tracking=csv"), {}, tmp_path)
    assert (section.rows, section.problems) == ([("tracking.backend", "csv")], [])


# --- Keras -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [Probe(FACTS), Probe(None, "exited with 1", "No module named 'jax'")])
def test_a_keras_that_no_model_can_use_is_an_error(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    section = doctor.check_tensorflow(probe, {"KERAS_BACKEND": "jax", "TF_USE_LEGACY_KERAS": "1"})
    first, second = advice(section)[:2]
    assert first == (True, "KERAS_BACKEND=jax: a model_fn needs Keras on TensorFlow", "unset KERAS_BACKEND")
    assert second[0] and second[2].startswith("pip install 'tf-runner[classic]'")
    assert doctor.check_tensorflow(Probe(FACTS), {"KERAS_BACKEND": "tensorflow"}).problems == []
