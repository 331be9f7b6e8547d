"""One run under its supervisor, with a small script in the place of the TensorFlow task."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from filelock import FileLock

from runner.config import schema
from runner.config.schema import (
    Config,
    ConfigError,
    InputBlock,
    InputConfig,
    ModelConfig,
    RunSettings,
    TrackingConfig,
    TrainInputBlock,
)
from runner.distribute.cluster import ALONE
from runner.launch import app, supervisor, task_group
from runner.launch.api import Run
from runner.launch.gang import GangResult
from runner.launch.stop_requests import StopRequests
from runner.system.child_process import NOTICES
from runner.tracking import provenance, run_lock
from runner.tracking.journal import starts_and_ends
from runner.tracking.run_end import how_run_ended, read_ending
from runner.tracking.run_record import RunRecord
from tests.support.cuts import Cuts, Killed
from tests.support.journal import Lines, events_in
from tests.support.messages import Messages
from tests.support.processes import wait_until
from tests.support.screen import line_of
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
TASK = """
import os, sys, time, signal, pathlib
from pathlib import Path
from tests.support.journal import Lines
model_dir = Path(sys.argv[1]).parent
journal = Lines(model_dir)
journal.event("built", num_replicas=2, devices="2 x NVIDIA H200")
journal.event("first_step", step=1)
"""
UNTAKEN = TASK.replace('journal.event("first_step", step=1)', "")
"""A task that never takes its first step."""
PREDICTS = InputConfig(predict=InputBlock(fn="my.input_fn"))
RESULT = "journal.event('result', global_step=7, metrics={'eval/accuracy': 0.5}, checkpoint='c', steps_per_sec=3.0)\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a supervisor whose task executes `code` after TASK."""
    monkeypatch.chdir(tmp_path)

    def run_task(code: str, argv: Sequence[str] = (), task: str = TASK, **settings: Any) -> int:
        script = tmp_path / "task.py"
        script.write_text(task + code)
        monkeypatch.setattr(task_group, "task_argv", lambda file: [sys.executable, str(script), str(file)])
        env, notes = {**os.environ, "PYTHONPATH": str(ROOT)}, settings.pop("notes", None)
        return supervisor.run(config_of(tmp_path / "run", **settings), env, argv, notes=notes).code

    return run_task


def config_of(model_dir: Path, **settings: Any) -> Config:
    train, evaluation = TrainInputBlock(fn="my.input_fn"), InputBlock(fn="my.input_fn")
    return Config(
        model_dir=str(model_dir),
        **{
            "input": InputConfig(train=train, eval={"": evaluation}),
            "model": ModelConfig(fn="my.model_fn"),
            "tracking": TrackingConfig(backend="none"),
            **settings,
        },
    )


def summary_in(model_dir: Path) -> dict[str, Any]:
    return json.loads((model_dir / "summary.json").read_text())


def test_a_task_that_finishes_is_summarised(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(RESULT) == 0
    assert summary_in(tmp_path / "run") == {
        "command": "train_and_evaluate",
        "status": "finished",
        "error": None,
        "stopped_early": None,
        "global_step": 7,
        "metrics": {"eval/accuracy": 0.5},
        "steps_per_sec": 3.0,
        "input_bound": None,
        "examples": None,
        "phases": {},
        "starts": {},
        "slowest_start": None,
        "step_times": None,
        "worker_steps": None,
        "unread_params": [],
        "strategy": "default",
        "gradient_accumulation": 1,
        "num_replicas": 2,
        "devices": "2 x NVIDIA H200",
        "peak_memory": None,
        "checkpoint": "c",
        "predictions": None,
        "exports": [],
        "restarts": 0,
        "lost_workers": [],
        "interrupted_by": None,
        "repeated_steps": 0,
        "mlflow_run_id": None,
        "seed": 1,
        "settings_id": None,
    }
    assert (tmp_path / "run" / "config.yaml").exists()
    said = capsys.readouterr().out.splitlines()
    for line in (said[0], said[-1]):
        messages.same("line", line)


@pytest.mark.parametrize(
    ("code", "exit_code", "status"),
    [
        ("raise SystemExit(1)", 1, "failed"),
        ("journal.event('error', error='ValueError: no'); sys.exit(2)", 2, "failed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "failed"),
        ("journal.event('result', global_step=3, checkpoint='c'); sys.exit(3)", 3, "interrupted"),
    ],
    ids=["exits", "fails", "is killed", "saves"],
)
def test_each_end_of_a_task_has_its_code_and_status(
    code: str, exit_code: int, status: str, run: Callable[..., int], tmp_path: Path, messages: Messages
) -> None:
    assert run(code) == exit_code
    summary = summary_in(tmp_path / "run")
    assert summary["status"] == status
    messages.same("error", str(summary["error"]))
    assert summary["num_replicas"] == 2


def test_facts_of_an_earlier_process_are_not_taken_for_this_one(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(RESULT) == 0
    assert run("raise SystemExit(1)") == 1
    assert summary_in(tmp_path / "run")["global_step"] is None
    assert RunRecord.read(tmp_path / "run").generation == 2


def test_two_runs_may_not_share_a_model_dir(run: Callable[..., int], tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), messages.raised(ConfigError, hide=r"(?<=process )\d+"):
        run(RESULT)


def test_tasks_that_are_refused_at_once_do_not_race_for_the_folder_that_hydra_made(tmp_path: Path) -> None:
    """Five of one cluster, each of which takes the folder away that nobody will use: one met what another had removed,
    and ended with a traceback."""
    folder, errors = tmp_path / "run", list[Exception]()

    def refuse() -> None:
        for _ in range(500):
            with contextlib.suppress(FileExistsError):  # Path.mkdir itself, where the folder is gone once more
                folder.mkdir(exist_ok=True)
            try:
                app._remove_if_unused(folder, tmp_path)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=refuse) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    folder.mkdir(exist_ok=True)
    (folder / "mine").touch()
    app._remove_if_unused(folder, tmp_path)
    assert (folder / "mine").exists()


HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""
TASK_THAT_WAITS = """
import sys
from runner.task import main
from runner.tracking import run_lock
run_lock.TASK_TIMEOUT_SECS = 0.1
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_task_that_does_not_give_up_the_folder_is_one_message(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    """It was a RuntimeError with its traceback, exit code 1: in the command, and in a task of a cluster."""
    monkeypatch.setattr(run_lock, "TASK_TIMEOUT_SECS", 0.1)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.ckpt-1.index").touch()
    lock = folder / run_lock.TASK_LOCK_FILE.format("chief-0")
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with messages.raised(ConfigError, hide=str(holder.pid)):
                run(RESULT)
            file = tmp_path / "config.yaml"
            schema.save(config_of(folder), file)
            task = subprocess.run(
                [sys.executable, "-c", TASK_THAT_WAITS, str(file)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=240,
            )
        finally:
            holder.kill()
    (said,) = task.stderr.splitlines()[1:]
    messages.same(f"exit {task.returncode}", said, hide=str(holder.pid))


def test_what_the_task_leaves_running_is_ended_with_it(run: Callable[..., int], tmp_path: Path) -> None:
    run("import subprocess; p = subprocess.Popen(['sleep', '600']); Path('pid').write_text(str(p.pid))")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("mlflow_database")
def test_an_mlflow_run_has_the_params_metrics_and_status(run: Callable[..., int], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    tracking = TrackingConfig(backend="mlflow", experiment="e", run_name="mine", tags={"team": "a"})
    code = "journal.metrics(5, {'train/loss': 0.25})\n(model_dir / 'model_summary.txt').write_text('layers')\n"
    assert run(code + RESULT, tracking=tracking) == 0
    run_id = summary_in(tmp_path / "run")["mlflow_run_id"]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    recorded = client.get_run(run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.info.run_name == "mine"
    assert recorded.data.params["model.fn"] == "my.model_fn"
    assert recorded.data.params["input.train.shard"] == "auto"
    assert recorded.data.metrics == {"train/loss": 0.25}
    tags = recorded.data.tags
    assert (tags["team"], tags["status"], tags["num_replicas"], tags["strategy"]) == ("a", "finished", "2", "default")
    assert tags["version.tensorflow"].startswith(("2.21", "2.22"))
    left = {"runner_files", "config.yaml", "summary.json", "model_summary.txt", "learning_curves.png"}
    assert {file.path for file in client.list_artifacts(run_id)} == left

    assert run("os.kill(os.getpid(), signal.SIGKILL)", tracking=tracking) == 1
    assert summary_in(tmp_path / "run")["mlflow_run_id"] == run_id
    assert client.get_run(run_id).info.status == "FAILED"


def test_a_tracking_server_that_is_away_does_not_fail_the_run(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = TrackingConfig(backend="mlflow", uri="http://127.0.0.1:9")
    assert run(RESULT, tracking=tracking) == 0
    assert summary_in(tmp_path / "run")["status"] == "finished"
    assert capsys.readouterr().err.count("tracking: ") == 1


SUPERVISE = """
import os, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from runner.distribute.cluster import ALONE
from runner.launch import app, supervisor, task_group
from runner.launch.api import Run
from runner.launch.gang import GangResult
from test_supervisor import config_of
from runner.config.schema import TrackingConfig
task_group.task_argv = lambda file: [sys.executable, {script!r}, str(file)]
tracking = TrackingConfig(backend="mlflow" if {uri!r} else "none", uri={uri!r})
outcome = supervisor.run(config_of(Path({model_dir!r}), tracking=tracking), {{**os.environ, "PYTHONPATH": {root!r}}})
sys.exit(outcome.code)
"""


def supervised(tmp_path: Path, code: str, tracking_uri: str | None = None) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, whose task has made the file `ready`."""
    script = tmp_path / "task.py"
    script.write_text(TASK + code)
    supervise = SUPERVISE.format(
        root=str(ROOT),
        tests=str(ROOT / "tests" / "launch"),
        script=str(script),
        model_dir=str(tmp_path / "run"),
        uri=tracking_uri,
    )
    process = subprocess.Popen([sys.executable, "-c", supervise], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


# As the real one, it only notes the signal where it comes: a second one may interrupt the first.
SAVES = (
    "asked = []\n"
    "signal.signal(signal.SIGTERM, lambda *a: asked.append(a)); Path('ready').touch()\n"
    "while not asked: time.sleep(0.02)\n"
    "journal.event('result', global_step=3, checkpoint='c'); sys.exit(3)\n"
)
# Notes that it was asked, and goes on: a test that asks twice waits for that in between, else two signals may be one.
IGNORES = "signal.signal(signal.SIGTERM, lambda *_: Path('asked').touch()); Path('ready').touch(); time.sleep(240)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda one: one.name)
def test_a_stop_lets_the_task_save_and_exits_with_3(number: signal.Signals, tmp_path: Path, messages: Messages) -> None:
    process = supervised(tmp_path, SAVES)
    process.send_signal(number)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 3
    messages.same("line", line_of(said, "Stopping"))
    assert summary_in(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.parametrize("number", NOTICES)
def test_a_notice_comes_to_a_handler_of_before_when_the_run_has_ended(number: signal.Signals) -> None:
    came: list[str] = []
    before = signal.signal(number, lambda *_: came.append("submitit"))
    try:
        with StopRequests() as stops:
            signal.raise_signal(number)
            came.append("saved")
        with StopRequests():
            pass  # no notice
    finally:
        signal.signal(number, before)
    assert (came, stops.came) == (["saved", "submitit"], [number])


class Saves:
    asked = killed = 0

    def ask_to_stop(self) -> None:
        self.asked += 1

    def kill(self) -> None:
        self.killed += 1


def test_the_minute_after_a_request_is_for_saving_and_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.launch.stop_requests.GRACE_SECS", 0.2)
    first, second = Saves(), Saves()
    with StopRequests() as stops:
        with stops.watch(first, "saving"):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)  # the upload
        assert stops.came == [signal.SIGTERM]
        with stops.watch(second, "saving"):
            time.sleep(0.5)
    assert stops.came == [signal.SIGTERM, signal.SIGALRM]
    assert (first.asked, first.killed, second.asked, second.killed) == (1, 0, 1, 1)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, messages: Messages) -> None:
    process = supervised(tmp_path, IGNORES)
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "asked").exists)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=150)
    assert process.returncode == 1
    summary = summary_in(tmp_path / "run")
    assert summary["status"] == "failed"
    messages.same("error", summary["error"])


def test_a_run_that_is_stopped_at_once_can_still_go_on_from_a_checkpoint_it_had(tmp_path: Path) -> None:
    process = supervised(tmp_path, "journal.event('checkpoint', step=40, path='ckpt-40')\n" + IGNORES)
    process.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "asked").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=150)
    assert process.returncode == 3
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["checkpoint"]) == ("interrupted", 40, "ckpt-40")


def test_the_task_gets_our_package_and_a_quiet_tensorflow() -> None:
    env = task_group.task_env({"A": "b", "TF_CONFIG": "{}"})
    bars = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    quiet = {**bars, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), "RUNNER_GENERATION": "1"}
    assert env == {"A": "b", **quiet}
    assert task_group.task_env({"TF_CPP_MIN_LOG_LEVEL": "0"})["TF_CPP_MIN_LOG_LEVEL"] == "0"
    number = "RUNNER_GRADIENT_ACCUMULATION"
    assert task_group.task_env({}, generation=2, gradient_accumulation=4)[number] == "4"
    assert number not in task_group.task_env({number: "4"}), "the code of a task that starts a run of its own"
    assert task_group.task_env({"TQDM_DISABLE": "0"})["TQDM_DISABLE"] == "0"
    assert task_group.task_env({"PYTHONPATH": "/x"})["PYTHONPATH"] == f"{ROOT}{os.pathsep}/x"


def test_the_tags_name_the_commit_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert "mlflow.source.git.commit" not in provenance.tags_of_this_process(tmp_path, [])
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    tags = provenance.tags_of_this_process(tmp_path, ["runner", "a=b c"])
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["git.dirty"] == "false"
    assert tags["command"] == "runner 'a=b c'"
    (tmp_path / "f").write_text("2")
    assert provenance.tags_of_this_process(tmp_path, [])["git.dirty"] == "true"


@pytest.mark.usefixtures("mlflow_database")
def test_secrets_reach_neither_mlflow_nor_the_summary(run: Callable[..., int], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    params = {"db_password": "hunter22", "url": "https://me:hunter22@host/x", "width": 3}
    tracking = TrackingConfig(backend="mlflow", tags={"api_key": "hunter22"})
    argv = ["runner", "model.params.db_password=hunter22", "model.params.width=3"]
    failing = "journal.event('error', error='no login with hunter22'); sys.exit(2)"
    assert run(failing, tracking=tracking, model=ModelConfig(fn="my.model_fn", params=params), argv=argv) == 2
    summary = summary_in(tmp_path / "run")
    assert summary["error"] == "no login with ***"
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    recorded = client.get_run(summary["mlflow_run_id"])
    assert recorded.data.params["model.params.db_password"] == "***"
    assert recorded.data.params["model.params.width"] == "3"
    assert recorded.data.tags["command"] == "runner 'model.params.db_password=***' model.params.width=3"
    assert "hunter22" not in str(recorded.to_dictionary())
    for file in ("config.yaml", "summary.json"):
        assert "hunter22" not in Path(client.download_artifacts(recorded.info.run_id, file, str(tmp_path))).read_text()
    kept = tmp_path / "run" / "config.yaml"
    assert "hunter22" in kept.read_text()  # the task needs it
    assert kept.stat().st_mode & 0o077 == 0  # and nobody else may read it


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_an_evaluation_leaves_what_training_left(run: Callable[..., int], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    tracking = TrackingConfig(backend="mlflow")
    killed = "journal.event('result', global_step=7, metrics={}, checkpoint='c', steps_per_sec=3.0); sys.exit(3)"
    assert run(killed, tracking=tracking) == 3
    trained = (tmp_path / "run" / "config.yaml").read_text()
    evaluated = "journal.metrics(7, {'eval/accuracy': 0.5})\n" + RESULT.replace("steps_per_sec=3.0", "")
    assert run(evaluated, tracking=tracking, command="evaluate") == 0
    assert (tmp_path / "run" / "config.yaml").read_text() == trained
    assert "command: evaluate" in (tmp_path / "run" / "config.evaluate.yaml").read_text()
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["steps_per_sec"]) == ("interrupted", 3.0)
    assert summary["metrics"] == {"eval/accuracy": 0.5}
    assert RunRecord.read(tmp_path / "run").generation == 1
    recorded = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(summary["mlflow_run_id"])
    assert recorded.info.status == "SCHEDULED"  # as training left it
    assert recorded.data.metrics["eval/accuracy"] == 0.5
    assert recorded.data.params["command"] == "train_and_evaluate"


def test_metrics_are_those_of_the_checkpoint_beside_them(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("journal.event('result', global_step=7, metrics={}, checkpoint='c')\n") == 0
    assert (
        run("journal.event('result', global_step=5, metrics={'eval/auc': 0.4}, checkpoint='b')", command="evaluate")
        == 0
    )
    assert summary_in(tmp_path / "run")["metrics"] == {}
    assert run(RESULT) == 0
    capsys.readouterr()
    assert run("journal.event('result', global_step=5, metrics={}, checkpoint='b')", command="export") == 0
    assert "accuracy" not in capsys.readouterr().out
    assert summary_in(tmp_path / "run")["metrics"] == {"eval/accuracy": 0.5}


@pytest.mark.parametrize("command", ["dry_run", "profile_input", "inspect"])
def test_a_command_that_only_tells_leaves_nothing(command: str, run: Callable[..., int], tmp_path: Path) -> None:
    said = "print(Path(sys.argv[1]).read_text())"
    assert run(said, command=command, task="import sys\nfrom pathlib import Path\n") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"task.py"}


def test_what_changed_since_the_last_start_is_said(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(RESULT) == 0
    assert "Changed" not in capsys.readouterr().err
    assert run(RESULT, model=ModelConfig(fn="my.model_fn", params={"width": 3, "token": "abcdef"})) == 0
    said = capsys.readouterr().err
    messages.same("stderr", said)
    assert "abcdef" not in said


def test_an_interrupted_run_says_how_to_go_on(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("journal.event('result', global_step=3, checkpoint='c'); sys.exit(3)", argv=["runner", "train.max_steps=9"])
    assert "resume: python -m runner train.max_steps=9 model_dir=run\n" in capsys.readouterr().out


@contextlib.contextmanager
def hangups(handling: signal.Handlers) -> Iterator[None]:
    """What processes that are started meanwhile inherit: nohup has them ignore SIGHUP, these tests' own included."""
    before = signal.signal(signal.SIGHUP, handling)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_lets_the_task_save_though_it_says_so_twice(tmp_path: Path) -> None:
    slow = SAVES.replace("journal.event(", "time.sleep(0.5); journal.event(")
    with hangups(signal.SIG_DFL):
        process = supervised(tmp_path, slow)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=150)
    assert process.returncode == 3
    assert summary_in(tmp_path / "run")["status"] == "interrupted"


def test_a_run_under_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    with hangups(signal.SIG_IGN):
        process = supervised(
            tmp_path, "Path('ready').touch()\nwhile not Path('go').exists(): time.sleep(0.02)\n" + RESULT
        )
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    process.communicate(timeout=150)
    assert (process.returncode, summary_in(tmp_path / "run")["status"]) == (0, "finished")


def test_a_stop_that_comes_while_the_command_is_suspended_is_heeded(tmp_path: Path) -> None:
    process = supervised(tmp_path, SAVES)
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):  # Ctrl-Z, kill %1
        process.send_signal(number)
    process.communicate(timeout=150)
    assert process.returncode == 3


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_a_folder_that_is_deleted_under_its_run_is_one_message_and_a_failed_run(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    from mlflow import MlflowClient

    opened = "while not (model_dir / 'shipped.mlflow.json').exists(): time.sleep(0.02)\n"
    removes = "while model_dir.exists(): shutil.rmtree(model_dir, ignore_errors=True)\n"  # what ships writes there
    assert run(f"import shutil\n{opened}{removes}{RESULT}", tracking=TrackingConfig(backend="mlflow")) == 1
    said = capsys.readouterr()
    messages.same("stderr", line_of(said.err, "runner: "))
    assert "Traceback" not in said.err
    messages.same("stdout", line_of(said.out, "status: "))
    (recorded,) = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").search_runs(["1"])
    assert recorded.info.status == "FAILED"


def test_a_folder_that_was_deleted_and_made_anew_is_not_the_folder_of_the_run(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run("import shutil; shutil.rmtree(model_dir); (model_dir / 'eval').mkdir(parents=True)\n" + RESULT) == 1
    said = capsys.readouterr()
    messages.same("stderr", line_of(said.err, "runner: "))
    for name in ("status: ", "error: "):
        messages.same("stdout", line_of(said.out, name))
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.usefixtures("mlflow_database")
def test_a_folder_that_is_moved_under_its_run_is_not_made_anew(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    code = "model_dir.rename(model_dir.parent / 'moved')\n"
    assert run(code + RESULT, tracking=TrackingConfig(backend=["csv", "mlflow"])) == 1
    said = capsys.readouterr()
    messages.same("stderr", said.err)
    for name in ("status: ", "error: "):
        messages.same("stdout", line_of(said.out, name))
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "moved" / "config.yaml").exists()


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_reader_that_fails_leaves_what_training_came_to(
    run: Callable[..., int], tmp_path: Path, command: str
) -> None:
    assert run(RESULT) == 0
    before = summary_in(tmp_path / "run")
    assert (before["command"], before["status"], before["error"]) == ("train_and_evaluate", "finished", None)
    assert run("raise SystemExit(1)", command=command, input=PREDICTS) == 1
    assert summary_in(tmp_path / "run") == before
    own = json.loads((tmp_path / "run" / f"summary.{command}.json").read_text())
    assert (own["command"], own["status"]) == (command, "failed")
    assert (own["global_step"], own["checkpoint"]) == (7, "c")
    assert RunRecord.read(tmp_path / "run").training == "finished"


def test_a_reader_adds_what_it_found_to_the_summary_of_the_run(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(RESULT + "raise SystemExit(1)") == 1
    before = summary_in(tmp_path / "run")
    assert before["status"] == "failed"
    predicted = 'journal.event("result", global_step=6, predictions="p", examples=3)'
    assert run(predicted, command="predict", input=PREDICTS) == 0
    assert summary_in(tmp_path / "run") == {**before, "predictions": "p"}


def test_the_summary_of_a_folder_in_which_nothing_was_trained_is_that_of_its_last_reader(
    run: Callable[..., int], tmp_path: Path
) -> None:
    assert run(RESULT, command="predict", input=PREDICTS) == 0
    assert summary_in(tmp_path / "run")["status"] == "finished"
    assert run("raise SystemExit(1)", command="predict", input=PREDICTS) == 1
    assert summary_in(tmp_path / "run")["status"] == "failed"


def test_a_run_whose_supervisor_was_killed_is_interrupted_once_it_is_read(
    run: Callable[..., int], tmp_path: Path, messages: Messages
) -> None:
    assert run(RESULT) == 0
    path = tmp_path / "run" / "summary.json"
    path.write_text(path.read_text().replace('"finished"', '"running"'))
    RunRecord(1, "running", gradient_accumulation=4).save(tmp_path / "run")
    assert run(RESULT, command="predict", input=PREDICTS) == 0
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["gradient_accumulation"]) == ("interrupted", 4)
    messages.same("error", summary["error"])


# --- a supervisor that is killed while it writes how the run ended -------------------------------------------------


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Cuts:
    return Cuts(monkeypatch)


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: Cuts) -> Callable[..., int]:
    """Runs a supervisor whose tasks have ended with `code`, and kills it after so many writes from then on."""

    def run_supervisor(code: int, writes: int | None, *, takes_steps: bool = True, **settings: Any) -> int:
        def end(*_: Any) -> GangResult:
            journal = Lines(tmp_path / "run")
            if takes_steps:
                journal.event("first_step", step=1)
                journal.event("result", global_step=7, metrics={"eval/accuracy": 0.5}, checkpoint="c")
            cuts.cut(writes)
            return GangResult(code, ALONE, "it broke" if code == 1 else "")

        monkeypatch.setattr(supervisor.Supervisor, "_run_tasks", end)
        try:
            # The record of the code is written by a thread, at no certain time.
            config = config_of(tmp_path / "run", run=RunSettings(code=False), **settings)
            return supervisor.run(config, dict(os.environ)).code
        finally:
            cuts.cut(None)

    return run_supervisor


def answers(folder: Path) -> set[str | None]:
    """What all say who read how the run ended, and what stands in its files but for the journal."""
    record, summary = RunRecord.read(folder), summary_in(folder)
    of_evaluator = read_ending(folder, record.generation).status
    return {record.training, how_run_ended(folder).status, Run(folder).status, of_evaluator, summary["status"]}


ENDS = {0: "finished", 1: "failed", 3: "interrupted"}


@pytest.mark.parametrize("writes", range(5))
@pytest.mark.parametrize("code", ENDS)
def test_a_supervisor_that_is_killed_while_it_writes_the_end_leaves_one_answer(
    code: int, writes: int, ends: Callable[..., int], cuts: Cuts, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        ends(code, writes)
        raise Killed  # after the last write there is nothing to cut
    folder, expected = tmp_path / "run", ENDS[code] if writes else "running"
    assert (how_run_ended(folder).status, Run(folder).status) == (expected, expected)
    assert ends(0, None, takes_steps=False, command="predict", input=PREDICTS) == 0
    expected = ENDS[code] if writes else "interrupted"
    assert answers(folder) == {expected}
    of_training, of_reader = events_in(folder, "run_ended", "supervisor")
    assert (of_training["status"], of_reader["status"]) == (expected, "finished")
    assert Run(folder).metrics == ({"eval/accuracy": 0.5} if writes else {})
    assert ends(0, None) == 0
    assert answers(folder) == {"finished"}


@pytest.mark.parametrize("writes", range(5))
def test_a_supervisor_that_is_killed_while_it_undoes_its_start_leaves_one_answer(
    writes: int, ends: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert ends(0, None) == 0
    for name in ("checkpoint", "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"):
        (folder / name).write_text('model_checkpoint_path: "model.ckpt-7"' if name == "checkpoint" else "")
    before = summary_in(folder)
    with pytest.raises(Killed):
        ends(1, writes, takes_steps=False)
        raise Killed
    is_undone = writes >= 2  # summary.json is the second file that is put back
    assert how_run_ended(folder).status == Run(folder).status == ("finished" if is_undone else "running")
    assert ends(0, None, takes_steps=False, command="predict", input=PREDICTS) == 0
    assert answers(folder) == {"finished" if is_undone else "interrupted"}
    if is_undone:
        assert {**summary_in(folder), "predictions": None} == before
    (_, of_start, _) = events_in(folder, "run_ended", "supervisor")
    assert of_start["status"] == ("finished" if is_undone else "interrupted")
    assert of_start["is_kept"] == (writes == 4)  # run.json is the last, and then counts this start no longer


@pytest.mark.alone
def test_ctrl_c_does_not_wait_for_a_server_that_never_answers(tmp_path: Path, messages: Messages) -> None:
    import socket

    with socket.socket() as server:  # takes connections and says nothing
        server.bind(("127.0.0.1", 0))
        server.listen()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = supervised(tmp_path, RESULT + "Path('ready').touch()", tracking_uri=uri)
        journal = tmp_path / "run" / "events.chief-0.jsonl"
        deadline = time.monotonic() + 120
        while "result" not in journal.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        wait_until(lambda: "run_ended" in (tmp_path / "run" / "events.supervisor-0.jsonl").read_text())
        time.sleep(3.0)  # the task has ended and the supervisor waits for the server; if not, the test is no test
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=150)
    assert process.returncode == 0
    messages.same("stderr", said)
    assert summary_in(tmp_path / "run")["status"] == "finished"


# --- before the first step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("journal.event('error', error='ValueError: no'); sys.exit(2)", 2),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 1, marks=pytest.mark.slow),
    ],
    ids=["fails", "is killed"],
)
@pytest.mark.usefixtures("mlflow_database")
def test_a_start_that_never_takes_a_step_leaves_a_run_with_a_checkpoint_as_it_was(
    code: str,
    exit_code: int,
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    messages: Messages,
) -> None:
    from mlflow import MlflowClient

    settings = {"tracking": TrackingConfig(backend="mlflow"), "notes": {"overrides.yaml": "- one\n"}}
    assert run(RESULT, **settings) == 0
    folder = tmp_path / "run"
    for name in ("checkpoint", "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"):
        text = 'model_checkpoint_path: "model.ckpt-7"' if name == "checkpoint" else ""
        (folder / name).write_text(text)
    record = (folder / "run.json", folder / "summary.json", folder / "config.yaml", folder / ".hydra/overrides.yaml")
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in record]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (earlier,) = client.search_runs(["1"])
    (folder / "training_ended.json").write_text('{"status": "finished"}')

    settings["notes"] = {"overrides.yaml": "- two\n"}
    forgets = "(model_dir / 'training_ended.json').unlink(missing_ok=True)\n"
    assert run(forgets + code, task=UNTAKEN, model=ModelConfig(fn="my.other_fn"), **settings) == exit_code
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in record] == before
    assert (folder / "training_ended.json").read_text() == '{"status": "finished"}'
    (after,) = client.search_runs(["1"])
    assert (after.info.status, after.info.end_time) == ("FINISHED", earlier.info.end_time)
    assert " failed: " in after.data.tags.pop("last_failed_start")
    assert after.data.tags == earlier.data.tags
    messages.same("line", capsys.readouterr().out.splitlines()[-1])
    bounds = starts_and_ends(folder)
    assert [line.get("status") for line in bounds] == [None, "finished", None, "failed"]
    assert run(RESULT, **settings) == 0  # and the run goes on
    assert RunRecord.read(folder).generation == 2


def test_a_fresh_start_with_a_mistake_leaves_nothing(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    tracking = TrackingConfig(backend="mlflow")
    assert run("sys.exit(2)", task=UNTAKEN, tracking=tracking, notes={"overrides.yaml": ""}) == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {"task.py"}
    messages.same("line", capsys.readouterr().out.splitlines()[-1])


def test_a_mistake_of_a_fresh_start_leaves_nothing_however_long_the_start_took(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(1)
    slow = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + 3600.0 * next(hours)})
    monkeypatch.setattr(supervisor, "time", slow)
    assert run("sys.exit(2)", task=UNTAKEN) == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {"task.py"}


@pytest.mark.parametrize(
    "kind",
    slow_but(
        ["crash", "mistake after a checkpoint", "mistake beside a file", "mistake after a word to MLflow"],
        "crash", "mistake after a checkpoint",
    ),
)  # fmt: skip
@pytest.mark.usefixtures("mlflow_database")
def test_a_fresh_start_that_fails_otherwise_is_a_failed_run(kind: str, run: Callable[..., int], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    code = "sys.exit(1)" if kind == "crash" else "sys.exit(2)"
    if kind == "mistake after a checkpoint":
        code = (
            "(model_dir / 'checkpoint').write_text('model_checkpoint_path: \"model.ckpt-0\"')\n"
            "for suffix in ('index', 'data-00000-of-00001'):\n"
            "    (model_dir / f'model.ckpt-0.{suffix}').touch()\n"
            f"{code}"
        )
    elif kind == "mistake beside a file":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mine.txt").write_text("mine")
    elif kind == "mistake after a word to MLflow":
        code = f"journal.event('wants_run'); {code}"
    settings = {"tracking": TrackingConfig(backend="mlflow"), "notes": {"overrides.yaml": "- one\n"}}
    assert run(code, task=UNTAKEN, **settings) in (1, 2)
    assert (tmp_path / "run" / "mine.txt").exists() == (kind == "mistake beside a file")
    assert {"config.yaml", ".hydra", "run.json"} < {entry.name for entry in (tmp_path / "run").iterdir()}
    summary = summary_in(tmp_path / "run")
    (recorded,) = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").search_runs(["1"])
    assert (recorded.info.status, recorded.info.run_id) == ("FAILED", summary["mlflow_run_id"])
    assert summary["status"] == recorded.data.tags["status"] == "failed"


def test_the_files_of_a_run_are_there_from_its_start(run: Callable[..., int], tmp_path: Path) -> None:
    sees = (
        "here = {path.name for path in model_dir.iterdir()}\n"
        "assert {'config.yaml', 'run.json', 'summary.json', '.hydra', '.tracking.json'} < here\n"
        "assert oct((model_dir / '.tracking.json').stat().st_mode)[-3:] == '600'\n"
        "assert oct((model_dir / '.hydra').stat().st_mode)[-3:] == '700'\n"
        "assert oct((model_dir / '.hydra/config.yaml').stat().st_mode)[-3:] == '600'\n"
        "assert '\"running\"' in (model_dir / 'summary.json').read_text()\n"
    )
    assert run(sees + RESULT, task=UNTAKEN, notes={"config.yaml": "password: hunter2\n"}) == 0


def test_a_start_that_has_nothing_to_do_is_a_finished_run(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(RESULT, task=UNTAKEN) == 0
    assert summary_in(tmp_path / "run")["status"] == "finished"
    assert (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("run.json", {"generation": "many"}),
        ("shipped.mlflow.json", {"offsets": 3}),
        ("shipped.mlflow.json", {"last_steps": {"loss": "x"}}),
    ],
    ids=str,
)
def test_a_record_with_a_value_of_another_type_is_named(
    file: str, value: dict[str, Any], run: Callable[..., int], tmp_path: Path, messages: Messages
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).write_text(json.dumps(value))
    with messages.raised(ConfigError):
        run(RESULT)


def test_values_of_another_type_in_a_summary_are_ignored_with_a_word(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"exports": 3, "metrics": "good", "command": "train"}')
    assert run(RESULT) == 0
    for line in capsys.readouterr().err.splitlines():
        messages.same("warning", line)
    assert summary_in(tmp_path / "run")["exports"] == []


def half_written(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*.tmp")]


def test_what_a_kill_left_half_written_goes_with_the_next_start(run: Callable[..., int], tmp_path: Path) -> None:
    notes = {"overrides.yaml": "[]"}
    assert run(RESULT, notes=notes) == 0
    for file in ("run.json", ".hydra/overrides.yaml"):
        script = (
            "import os, pathlib; from runner.system import files\n"
            "files.os.replace = lambda *paths: os.kill(os.getpid(), 9)\n"
            f"files.write_atomically(pathlib.Path('run/{file}'), 'half')\n"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env).returncode == -9
    assert len(half_written(tmp_path / "run")) == 2
    assert run(RESULT, notes=notes) == 0
    assert half_written(tmp_path / "run") == []
