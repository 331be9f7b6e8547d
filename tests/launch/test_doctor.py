"""command=doctor: what it tells of this machine, and what it advises where something is wrong."""

from __future__ import annotations

import http.server
import re
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner.config import parsing
from runner.config.schema import Config, TrackingConfig
from runner.launch.environment import doctor
from runner.launch.environment.doctor import Probe, Problem, Section
from runner.system.child_process import describe_exit
from runner.tf_private import legacy_keras
from tests.config.test_config import composed
from tests.support.command_line import CommandLine
from tests.support.messages import Messages
from tests.support.screen import line_of

GB = 2**30
FACTS: dict[str, Any] = {
    "import_secs": 4.0, "tensorflow": "2.21.0", "keras": "3.15.1", "tf_keras": "3.15.1",
    "cuda": "12.5.1", "cudnn": "9", "rocm": False,
    "devices": [{"name": "CPU:0", "kind": "CPU", "error": None, "model": None, "compute_capability": None}],
}  # fmt: skip
GPU = {"name": "GPU:0", "kind": "GPU", "error": None, "model": "NVIDIA H200", "compute_capability": [9, 0]}


def doctors(*overrides: str) -> Config:
    return parsing.parse(composed(["command=doctor", *overrides]))


def tracking(*overrides: str) -> TrackingConfig:
    return doctors(*overrides).tracking


def advice(section: Section) -> list[tuple[bool, str, str]]:
    return [(one.is_fatal, one.what, one.do) for one in section.problems]


def compare(problems: Sequence[Problem], messages: Messages, *, hide: str = "") -> list[bool]:
    """Compare what is wrong and what to do with the messages of the test; return which problems are fatal."""
    for one in problems:
        messages.same("error" if one.is_fatal else "warning", f"{one.what}\n{one.do}", hide=hide)
    return [one.is_fatal for one in problems]


def row(said: str, name: str) -> str:
    """Return what the tables say of a name."""
    return line_of(said, f"{name}  ").removeprefix(name).strip()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> tuple[int, str, Path]:
    """(exit code, output, folder) of the command, in an empty folder."""
    home = tmp_path_factory.mktemp("home")
    result = command_line("command=doctor", cwd=home, CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")
    assert result.stderr == ""
    return result.returncode, result.stdout, home


@pytest.mark.slow
def test_it_tells_of_tensorflow_devices_and_mlflow(told: tuple[int, str, Path], messages: Messages) -> None:
    code, said, home = told
    messages.same(f"exit {code}", said.splitlines()[-1])
    for name, version in (("TensorFlow", tf.__version__), ("Keras", keras.__version__)):
        assert row(said, name).startswith(version)
        messages.same(name, row(said, name), hide=r"(?<=\d)\.[^\s,;]+|(?<=built for ).*")
    messages.same("GPU", row(said, "GPU"), hide="(?<=none: ).*")
    messages.same("runs go to", row(said, "runs go to"), hide=re.escape(str(home)))
    for name in ("CPU:0", "reachable"):
        messages.same(name, row(said, name))


def test_it_leaves_nothing_and_warns_of_slow_imports(told: tuple[int, str, Path], messages: Messages) -> None:
    _, said, home = told
    assert list(home.iterdir()) == []
    messages.same("line", " ".join(said.rstrip().splitlines()[-3].split()))


def test_a_machine_without_tensorflow_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_probe", lambda env: Probe(None, "exited with 1", "ImportError: no libfoo\n"))
    assert not doctor.show(doctors(), {})["can_start"]
    said = capsys.readouterr().out
    messages.same("line", said.splitlines()[-1])
    messages.same("line", " ".join(line_of(said, "libfoo").split()))


@pytest.mark.parametrize(
    ("code", "said", "env"),
    [
        (1, "Unknown flag in XLA_FLAGS: --x", {"XLA_FLAGS": "--x"}),
        (-signal.SIGILL, "", {}),
        (-signal.SIGKILL, "", {}),
    ],
    ids=["XLA_FLAGS", "SIGILL", "SIGKILL"],
)
def test_a_tensorflow_that_cannot_be_used_comes_with_advice(
    code: int, said: str, env: dict[str, str], messages: Messages
) -> None:
    section = doctor.check_tensorflow(Probe(None, describe_exit(code), said), env)
    assert compare(section.problems, messages) == [True]


def test_a_probe_that_hangs_or_crashes_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, messages: Messages
) -> None:
    stuck, crash = tmp_path / "stuck", tmp_path / "crash"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    crash.write_text("#!/bin/sh\necho bad >&2\nkill -ILL $$\n")
    for script in (stuck, crash):
        script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    messages.same("failure", doctor.run_probe({}, timeout_secs=0.3).failure)
    monkeypatch.setattr(sys, "executable", str(crash))
    found = doctor.run_probe({"PATH": "/bin:/usr/bin"})
    assert (found.facts, found.said) == (None, "bad\n")
    messages.same("failure", found.failure)


@pytest.mark.parametrize(
    ("files", "changes", "env", "said"),
    [
        ([], {}, {}, ""),
        (["nvidia0"], {}, {"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        (["nvidia0"], {"cuda": None}, {}, ""),
        (["nvidia0"], {}, {}, "W0000 1 gpu_device.cc:1] Cannot dlopen some GPU libraries. Skipping registering"),
    ],
    ids=["no GPU", "hidden", "CPU build", "no libraries"],
)
def test_it_says_why_there_is_no_gpu(
    files: list[str], changes: dict[str, Any], env: dict[str, str], said: str, tmp_path: Path, messages: Messages
) -> None:
    for name in files:
        (tmp_path / name).touch()
    section = doctor.check_tensorflow(Probe({**FACTS, **changes}, said=said), env, tmp_path)
    messages.same("GPU", dict(section.rows)["GPU"])
    assert compare(section.problems, messages) == [False] * len(files), "it trains on the CPU"


def test_a_gpu_is_named_and_one_that_does_not_compute_is_a_problem(tmp_path: Path, messages: Messages) -> None:
    section = doctor.check_tensorflow(Probe({**FACTS, "devices": [*FACTS["devices"], GPU]}), {}, tmp_path)
    messages.same("GPU:0", dict(section.rows)["GPU:0"])
    assert section.problems == []
    broken = {**GPU, "error": "no kernel image"}
    section = doctor.check_tensorflow(Probe({**FACTS, "devices": [*FACTS["devices"], broken]}), {}, tmp_path)
    assert compare(section.problems, messages) == [False]


def test_little_memory_and_disk_are_problems(tmp_path: Path) -> None:
    plenty = doctor.check_machine(tmp_path, 40 * GB, {tmp_path: 50 * GB})
    assert plenty.problems == []
    section = doctor.check_machine(tmp_path, GB, {tmp_path: 10 * 2**20})
    assert section.rows == [("memory", "1.1 GB free"), (f"disk of {tmp_path}", "10.5 MB free")]
    assert [is_fatal for is_fatal, _, _ in advice(section)] == [False, True]


def test_packages_of_other_versions_are_named() -> None:
    section = doctor.check_python({}, ["numpy>=99", "nobody-has-this>=1", "keras>=3", "optuna>=99; extra == 'optuna'"])
    assert [(fatal, do) for fatal, _, do in advice(section)] == [
        (False, "pip install 'numpy>=99'"),
        (True, "pip install 'nobody-has-this>=1'"),
    ]


def test_a_tensorflow_that_tf_keras_has_no_release_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tf_keras")
    monkeypatch.setattr(metadata, "version", lambda name: "2.99.0" if name == "tensorflow" else "2.21.0")
    (problem,) = doctor.find_tf_keras_problems()
    assert not problem.is_fatal and "TensorFlow 2.99.0" in problem.what and "in another environment" in problem.do
    monkeypatch.setattr(metadata, "version", lambda name: "2.21.0")
    assert doctor.find_tf_keras_problems() == []


def test_an_installation_under_the_former_name_is_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = tmp_path / "tf_runner-0.1.0.dist-info"
    former.mkdir()
    (former / "METADATA").write_text("Metadata-Version: 2.1\nName: tf-runner\nVersion: 0.1.0\n")
    assert advice(doctor.check_python({}, [])) == []
    monkeypatch.syspath_prepend(tmp_path)
    ((is_fatal, what, do),) = advice(doctor.check_python({}, []))
    assert not is_fatal and what.startswith("tf-runner,") and do.startswith("pip uninstall tf-runner")


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


def test_a_tracking_server_is_asked(
    server: tuple[str, list[dict[str, str]]], tmp_path: Path, messages: Messages
) -> None:
    host, came = server
    section = doctor.check_tracking(tracking(f"tracking.uri=http://me:secret99@{host}/"), {}, tmp_path)
    assert (dict(section.rows)["reachable"], section.problems) == ("yes", [])
    assert {one["auth"] for one in came} == {"Basic bWU6c2VjcmV0OTk="}
    assert {one["path"].rpartition("/")[2] for one in came} == {"search"}, "only reads"
    assert "secret99" not in str(section)
    section = doctor.check_tracking(tracking(), {"MLFLOW_TRACKING_URI": f"http://{host}/closed"}, tmp_path)
    assert compare(section.problems, messages, hide=re.escape(host)) == [False]


def test_a_tracking_server_that_is_away_stops_nothing(tmp_path: Path, messages: Messages) -> None:
    section = doctor.check_tracking(tracking("tracking.uri=http://me:secret99@127.0.0.1:1"), {}, tmp_path)
    assert compare(section.problems, messages) == [False]
    assert "secret99" not in str(section.problems)


def test_a_database_is_opened(tmp_path: Path, messages: Messages) -> None:
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE runs (run_uuid TEXT)")
        connection.execute("INSERT INTO runs VALUES ('a')")
    connection.close()
    messages.same("reachable", dict(doctor.check_tracking(tracking(), {}, tmp_path).rows)["reachable"])
    file.write_text("no database at all, but a text that is long enough to be read as a header" * 20)
    ((_, what, _),) = advice(doctor.check_tracking(tracking(), {}, tmp_path))
    messages.same("warning", what)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_run_without_mlflow_needs_none(tmp_path: Path) -> None:
    section = doctor.check_tracking(tracking("tracking=csv"), {}, tmp_path)
    assert (section.rows, section.problems) == ([("tracking.backend", "csv")], [])


# --- Keras -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe", [Probe(FACTS), Probe(None, "exited with 1", "No module named 'jax'")], ids=["imports", "does not import"]
)
def test_a_keras_that_no_model_can_use_is_an_error(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(metadata, "version", lambda name: "2.21.0")  # a newer one gets more advice
    section = doctor.check_tensorflow(probe, {"KERAS_BACKEND": "jax", "TF_USE_LEGACY_KERAS": "1"})
    assert compare(section.problems[:2], messages) == [True, True]
    assert doctor.check_tensorflow(Probe(FACTS), {"KERAS_BACKEND": "tensorflow"}).problems == []


def test_the_extra_classic_is_said_to_take_a_newer_tensorflow_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for version in ("2.21.0", "2.22.0rc0", "3.0.0"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        said[version] = legacy_keras.installation()
    assert said.pop("2.21.0") == "pip install 'estimator-runner[classic]'"
    assert all(text.endswith(f"it takes TensorFlow {version} back to 2.21") for version, text in said.items())
