"""One run from its config to its summary: starts the task, watches it, ships what it notes, says how it ended.

This process never imports TensorFlow: a task that crashes or is killed is always seen, and each run of a sweep can
configure TensorFlow's devices afresh.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import runner
from runner import config as configs
from runner import report
from runner.config import Config, ConfigError
from runner.files import write_json
from runner.journal import journal_path, read_journal
from runner.launcher import Process, describe_exit, start_process
from runner.shipping import RunRecord, Shipper
from runner.tracking import build_tracker

FINISHED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 3
"""Exit codes of the task and of the whole command."""

GRACE_SECS = 60.0
"""How long a task may take to save after it was asked to stop."""


@dataclass
class Outcome:
    """How the task ended.

    Attributes:
      code: our exit code.
      status: finished, failed or interrupted (resumable).
      mlflow_status: FINISHED, FAILED or KILLED.
      error: one line; None when there was none.
      facts: what the task noted in its journal: global_step, metrics, steps_per_sec, strategy, num_replicas, ...
    """

    code: int
    status: str
    mlflow_status: str
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def run(config: Config, env: Mapping[str, str], argv: Sequence[str] = ()) -> int:
    """Runs `config` in its model_dir, which must be set.

    Args:
      env: the environment of the task.
      argv: the command line, for the record.

    Returns: 0 finished, 1 failed, 2 the user's config or code is wrong, 3 interrupted and resumable.
    Raises:
      ConfigError: another process is using the model_dir.
    """
    assert config.model_dir is not None
    model_dir = Path(config.model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    with _alone_in(model_dir):
        record = RunRecord.read(model_dir)
        record.generation += 1
        record.save(model_dir)
        configs.save(config, model_dir / "config.yaml")
        offset = _size(journal_path(model_dir))
        process = start_process(task_argv(model_dir), task_env(env))
        shipper = _build_shipper(config, model_dir, record, env, argv)
        with _stop_requests(process) as requests:
            shipper.start()
            process.wait()
        process.kill()  # what the task may have left running
        code = process.close()
        outcome = _outcome(code, bool(requests), read_journal(journal_path(model_dir), offset)[0])
        return _finish(outcome, config, model_dir, shipper)


def task_argv(model_dir: Path) -> list[str]:
    """The command of the task that runs `model_dir/config.yaml`."""
    # -P: a `runner.py` in the user's directory must not take our place; the task adds the directory itself, later.
    return [sys.executable, "-P", "-m", "runner.task", str(model_dir / "config.yaml")]


def task_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a task: `env`, a quiet TensorFlow unless asked otherwise, and this very `runner` package."""
    result = {"TF_CPP_MIN_LOG_LEVEL": "3", **env}
    home = Path(runner.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):  # a checkout that is not installed
        result["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), env.get("PYTHONPATH"))))
    return result


@contextmanager
def _alone_in(model_dir: Path) -> Iterator[None]:
    """Holds the run's lock; two runs that write the same checkpoints destroy both."""
    lock = FileLock(model_dir / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"model_dir={model_dir} is in use by another run. Wait for it, or choose another.") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stop_requests(process: Process) -> Iterator[list[int]]:
    """While it lasts, SIGTERM and Ctrl-C ask the task to stop; a second one, or a minute, kills it.

    Yields: the signals that came, in order.
    """
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield requests
        return

    def handle(number: int, frame: Any) -> None:
        requests.append(number)
        if number == signal.SIGALRM or len(requests) > 1:
            process.kill()
            return
        print("\nStopping: the task saves a checkpoint. Once more to stop at once.", file=sys.stderr, flush=True)
        process.ask_to_stop()
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECS)

    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.signal(number, handle) for number in handled]
    try:
        yield requests
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def _outcome(code: int, stop_requested: bool, lines: Sequence[Mapping[str, Any]]) -> Outcome:
    """Reads the end of a task from its exit code and from what it noted."""
    facts: dict[str, Any] = {}
    for line in lines:
        if line.get("event") == "checkpoint":  # what a run that never comes to its result leaves
            facts.update(global_step=line.get("step"), checkpoint=line.get("path"))
        elif line.get("event") in ("built", "result", "error"):
            facts.update({name: value for name, value in line.items() if name not in ("event", "time")})
    error = facts.pop("error", None)
    if code == FINISHED:
        return Outcome(FINISHED, "finished", "FINISHED", None, facts)
    if code == INTERRUPTED:
        return Outcome(INTERRUPTED, "interrupted", "KILLED", None, facts)
    if stop_requested and facts.get("checkpoint"):
        return Outcome(INTERRUPTED, "interrupted", "KILLED", None, facts)
    if stop_requested:
        return Outcome(FAILED, "failed", "KILLED", error or "stopped before it could save", facts)
    if code == USER_ERROR:
        return Outcome(USER_ERROR, "failed", "FAILED", error, facts)
    return Outcome(FAILED, "failed", "FAILED", error or f"the task {describe_exit(code)}", facts)


def _finish(outcome: Outcome, config: Config, model_dir: Path, shipper: Shipper) -> int:
    run_id = shipper.drain()
    summary = {
        "status": outcome.status,
        "error": outcome.error,
        "global_step": outcome.facts.get("global_step"),
        "metrics": outcome.facts.get("metrics", {}),
        "steps_per_sec": outcome.facts.get("steps_per_sec"),
        "strategy": config.strategy.name,
        "num_replicas": outcome.facts.get("num_replicas"),
        "checkpoint": outcome.facts.get("checkpoint"),
        "mlflow_run_id": run_id,
    }
    write_json(model_dir / "summary.json", summary)
    tags = {name: str(summary[name]) for name in ("status", "strategy", "num_replicas") if summary[name] is not None}
    shipper.close(outcome.mlflow_status, tags, [model_dir / "config.yaml", model_dir / "summary.json"])
    shown = {**summary, "checkpoint": summary["checkpoint"] and _relative(Path(summary["checkpoint"]))}
    report.print_summary(shown, _relative(model_dir))
    return outcome.code


def _build_shipper(
    config: Config, model_dir: Path, record: RunRecord, env: Mapping[str, str], argv: Sequence[str]
) -> Shipper:
    tracking = config.tracking
    return Shipper(
        model_dir,
        build_tracker(tracking.backend, tracking.uri, tracking.experiment, env, Path.cwd()),
        record,
        name=tracking.run_name or model_dir.name,
        params=configs.flatten(dataclasses.replace(config, tracking=configs.TrackingConfig(backend=tracking.backend))),
        tags={**_facts_of_this_process(model_dir, argv), **tracking.tags},
        warn=lambda text: print(text, file=sys.stderr, flush=True),
    )


def _facts_of_this_process(model_dir: Path, argv: Sequence[str]) -> dict[str, str]:
    """Tags that say where a run came from; MLflow sets none of them for a run that a client makes."""
    tags = {
        "mlflow.source.name": "runner",
        "mlflow.source.type": "LOCAL",
        "command": shlex.join(argv),
        "model_dir": str(model_dir),
        "version.python": platform.python_version(),
    }
    for package in ("tensorflow", "keras", "mlflow", "tf-runner"):
        try:
            tags[f"version.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    if commit:
        tags["mlflow.source.git.commit"] = commit
        tags["git.dirty"] = str(bool(_git("status", "--porcelain", "--untracked-files=no"))).lower()
    return tags


def _git(*arguments: str) -> str | None:
    """What git says about the working directory; None without git or outside a repository."""
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
