"""`mlflow.log_*` in user code: values are recorded in this run's MLflow run, never in an unrelated one.

MLflow finds its run by MLFLOW_TRACKING_URI and MLFLOW_RUN_ID. The supervisor creates the MLflow run only when there is
something to record, because a start that fails early is not recorded. A task that imports MLflow asks for the run at
once, and waits for it.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from runner.config.schema import UNRECORDED_COMMANDS, Config
from runner.distribute.cluster import Cluster
from runner.tracking.journal import WANTS_RUN, Journal, NullJournal
from runner.tracking.mlflow_tracker import tracking_uri
from runner.tracking.run_record import RUN_FILE

_log = logging.getLogger(__name__)

_MODULE = "mlflow"
WAIT_SECS = 60.0
"""Seconds that a task waits for the MLflow run; the supervisor may need 9 s to import MLflow and create a database."""


def watch_import(config: Config, cluster: Cluster, journal: Journal | NullJournal, *, inline: bool) -> None:
    """Make MLflow use this run's MLflow run as soon as user code imports it.

    The values that the chief and an evaluator log are recorded. Those of other tasks, which call the same functions,
    are dropped, and so are those of a command without a record (dry_run). Without tracking in MLflow, nothing is done.

    Args:
      config: the config.
      cluster: this process's place.
      journal: tells the supervisor that the task needs the MLflow run.
      inline: the supervisor is in this process and also imports MLflow, so waiting would never end. Instead, the
        environment names the run as soon as it exists.
    """
    if not config.tracking.has_mlflow:
        return
    if config.command in UNRECORDED_COMMANDS or not (cluster.is_chief or cluster.is_evaluator):
        _on_import(_drop, lambda: None)
        return
    run_file = Path(str(config.model_dir)) / RUN_FILE

    def ask() -> None:
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri(config.tracking, os.environ, Path.cwd())
        journal.event(WANTS_RUN)

    def join() -> None:
        run_id = _wait_for(run_file, WAIT_SECS)
        if run_id:
            os.environ["MLFLOW_RUN_ID"] = run_id
        elif not inline:
            _log.warning(
                "There is no MLflow run yet: values that your code logs with mlflow.log_* now may go to a separate run."
            )

    def join_beside() -> None:
        threading.Thread(target=join, name="joins MLflow", daemon=True).start()

    _on_import(ask, join_beside if inline else join)


def _wait_for(file: Path, secs: float) -> str | None:
    until = time.monotonic() + secs
    while True:
        try:
            return file.read_text()
        except FileNotFoundError:
            if time.monotonic() >= until:
                return None
        time.sleep(0.05)


def _drop() -> None:
    """Make MLflow record in a temporary place that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="runner-mlflow-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = f"file://{folder}"  # else files go to ./mlruns
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        os.environ.pop(name, None)


def _on_import(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` when MLflow's import begins, and `after` when it is done."""
    if _MODULE in sys.modules:
        before()
        after()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(before, after))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MLflow as Python would, with a loader that reports its import. Finding it does not import it."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def run(self, load: Callable[[], None]) -> None:
        """Call `before`, import MLflow and call `after`. Later imports are Python's own."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._before()
        load()
        self._after()


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:  # resources, source code
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._finder.run(lambda: self._loader.exec_module(module))


def forget(env: Mapping[str, str | None]) -> None:
    """Restore the environment, if this process does something else afterwards."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
