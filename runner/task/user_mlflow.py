"""`mlflow.log_*` in user code: values are recorded in this run's MLflow run, never in an unrelated one.

MLflow finds its run by MLFLOW_TRACKING_URI and MLFLOW_RUN_ID. The process that ships the run's journal creates the
MLflow run; a task that imports MLflow asks for it at once, and waits for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wrapt

from runner.config.schema import UNRECORDED_COMMANDS, Config
from runner.distribute.cluster import Cluster
from runner.tracking.journal import WANTS_RUN, Journal
from runner.tracking.mlflow_tracker import tracking_uri
from runner.tracking.run_record import MLFLOW, Shipped

_log = logging.getLogger(__name__)

_watching: Journal | None = None
"""The journal of the task that asks for the MLflow run; None: no task runs in this process."""

WAIT_SECS = 60.0
"""Seconds that a task waits for the MLflow run; importing MLflow and making a database may take 9 s."""


def watch_import(config: Config, cluster: Cluster, journal: Journal) -> None:
    """Make MLflow use this run's MLflow run as soon as user code imports it.

    The values that the chief and an evaluator log are recorded. Those of other tasks, which call the same functions,
    are dropped, and so are those of a command without a record (dry_run). Without tracking in MLflow, nothing is done.

    Args:
      config: the config.
      cluster: this process's place.
      journal: tells the shipping process that the task needs the MLflow run.
    """
    global _watching
    if not config.tracking.has_mlflow:
        return
    _watching = journal
    is_recorded = config.command not in UNRECORDED_COMMANDS
    logs_for_all = cluster.is_chief or cluster.is_evaluator

    def imported(module: Any) -> None:
        if _watching is not journal:  # wrapt has no way to take a hook back
            return
        if is_recorded and logs_for_all:
            uri = tracking_uri(config.tracking, os.environ, Path.cwd())
            _join_run(Path(str(config.model_dir)), uri, journal)
        else:
            _drop_values()

    wrapt.register_post_import_hook(imported, "mlflow")


def _join_run(model_dir: Path, uri: str, journal: Journal) -> None:
    """Make MLflow record in this run's MLflow run, once there is one."""
    os.environ["MLFLOW_TRACKING_URI"] = uri
    # The shipping process otherwise waits for the first step, which waits for this import.
    journal.event(WANTS_RUN)
    until = time.monotonic() + WAIT_SECS
    shipped = Shipped.read(model_dir, MLFLOW)
    while not shipped.has_last_start(model_dir) and time.monotonic() < until:
        time.sleep(0.05)
        shipped = Shipped.read(model_dir, MLFLOW)
    if shipped.has_last_start(model_dir) and shipped.run_id:
        os.environ["MLFLOW_RUN_ID"] = shipped.run_id
    else:
        _log.warning(
            "There is no MLflow run yet: values that your code logs with mlflow.log_* now may go to a separate run."
        )


def _drop_values() -> None:
    """Make MLflow record in a temporary place that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="runner-mlflow-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = f"file://{folder}"  # else files go to ./mlruns
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        os.environ.pop(name, None)


def forget(env: Mapping[str, str | None]) -> None:
    """Watch no longer, and restore the environment, if this process does something else afterwards."""
    global _watching
    _watching = None
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
