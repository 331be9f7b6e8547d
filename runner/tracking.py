"""The record of a run in MLflow. The only file that imports mlflow, and only when a run is tracked.

The supervisor talks to this from a thread of its own; the tasks write journals and know nothing of MLflow. All calls
go through MlflowClient with an explicit run id: the fluent API would end the run when its block is left.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

MAX_METRICS = 1000
"""Metrics in one request; MLflow's own limit."""

LOCK_TIMEOUT_SECS = 120.0
"""How long to wait for another process that is creating the database (measured: 1.4-4.1 s)."""


@dataclass(frozen=True)
class Point:
    """One value of one metric. `time` is in seconds since the epoch."""

    name: str
    value: float
    step: int
    time: float


class Tracker(Protocol):
    """Where a run is recorded. Every method may raise what the backend raises; nothing is retried here."""

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        """Makes the run, or goes on with `run_id`. Its id; None when nothing is recorded."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Records metrics, in order."""

    def set_tags(self, tags: Mapping[str, str]) -> None: ...

    def log_file(self, path: Path) -> None:
        """Keeps a copy of a file with the run."""

    def end(self, status: str) -> None:
        """Closes the run as FINISHED, FAILED or KILLED."""


class NullTracker:
    """Records nothing."""

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        return None

    def log_points(self, points: Sequence[Point]) -> None: ...

    def set_tags(self, tags: Mapping[str, str]) -> None: ...

    def log_file(self, path: Path) -> None: ...

    def end(self, status: str) -> None: ...


class MlflowTracker:
    """Records in an MLflow server or database.

    Args:
      uri: tracking URI; a sqlite database is created when it is not there.
      experiment: name of the MLflow experiment; created when it is not there.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._run_id: str | None = None

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        database = sqlite_path(self.uri)
        if database is None:
            self._open(run_id, name, params, tags)
        else:
            database.parent.mkdir(parents=True, exist_ok=True)
            # Several first starts on one fresh sqlite database crash one another (MLflow 3.17 migrates without a lock).
            with FileLock(f"{database}.lock", timeout=LOCK_TIMEOUT_SECS):
                self._open(run_id, name, params, tags)
        return self._run_id

    def log_points(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(clean_name(p.name), p.value, int(p.time * 1000), p.step) for p in points]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_METRICS])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self._run_id, name, value)

    def log_file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=status)

    def _open(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        # MLflow's default of 7 retries means 247 s per call when the server is away (measured).
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # "Creating initial database tables" and the like
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        self._client = MlflowClient(tracking_uri=self.uri)
        if run_id is not None:
            try:
                known = self._client.get_run(run_id).data.params
                self._client.update_run(run_id, status="RUNNING")
                self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
                self._run_id = run_id
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                run_id = None  # another database, or the run was deleted
        if run_id is None:
            known = {}
            self._run_id = self._client.create_run(
                self._experiment_id(), run_name=name, tags={**tags, "mlflow.user": _user()}
            ).info.run_id
        self._log_params(known, params)

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        database = sqlite_path(self.uri)
        # Explicit and absolute: MLflow's default for sqlite is relative to wherever the reader happens to be.
        location = None
        if database is not None:
            location = (database.parent / "mlartifacts" / re.sub(r"\W", "_", self._experiment)).as_uri()
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self._experiment, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run on the same server was faster
                raise
            return str(self._client.get_experiment_by_name(self._experiment).experiment_id)

    def _log_params(self, known: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """New parameters are logged; one that a resumed run changed becomes a tag, since MLflow refuses the change."""
        from mlflow.entities import Param, RunTag

        texts = {clean_name(name): str(value) for name, value in params.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        changed = [
            RunTag(f"changed.{name}", f"{known[name]} -> {text}")
            for name, text in texts.items()
            if name in known and known[name] != text
        ]
        for first in range(0, len(new), 100):  # 100: MLflow's limit for one request
            self._client.log_batch(self._run_id, params=new[first : first + 100])
        if changed:
            self._client.log_batch(self._run_id, tags=changed[:100])


def build_tracker(backend: str, uri: str | None, experiment: str | None, env: Mapping[str, str], cwd: Path) -> Tracker:
    """The tracker that `tracking.backend` names. Creates nothing yet.

    Args:
      uri: None means MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db` in `cwd`.
      experiment: None means MLFLOW_EXPERIMENT_NAME, else `runner`.
    """
    if backend == "none":
        return NullTracker()
    uri = uri or env.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = sqlite_path(uri)
    if path is not None:
        uri = f"sqlite:///{cwd / path}"
    return MlflowTracker(uri, experiment or env.get("MLFLOW_EXPERIMENT_NAME") or "runner")


def points_of(line: Mapping[str, Any]) -> list[Point]:
    """The metrics in one line of a journal; none in a line that notes an event."""
    if "event" in line:
        return []
    return [Point(name, value, line["step"], line["time"]) for name, value in line.get("metrics", {}).items()]


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI (`sqlite:///relative`, `sqlite:////absolute`); None for any other."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def clean_name(name: str) -> str:
    """`name` in the characters that MLflow takes: letters, digits, `_ - . space : /`."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
