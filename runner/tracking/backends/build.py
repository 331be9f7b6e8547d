"""Build the trackers of `tracking.backend`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.config.schema import TrackingConfig
from runner.tracking.backends.csv_tracker import CsvTracker
from runner.tracking.backends.user_tracker import UserTracker
from runner.tracking.mlflow_tracker import build_tracker
from runner.tracking.tracker import Tracker


def build_trackers(
    settings: TrackingConfig, model_dir: Path, name: str, env: Mapping[str, str], cwd: Path
) -> dict[str, Tracker]:
    """Return name -> tracker for each of `settings.backends`. Starts and creates nothing yet.

    Args:
      name: name of the run.
      env: environment of the process of a user's class; MLflow's variables are read from it.
    """
    found: dict[str, Tracker] = {}
    for backend in settings.backends:
        if backend.is_users:
            found[backend.name] = UserTracker(backend, name, env)
        else:
            found[backend.name] = CsvTracker(model_dir) if backend.name == "csv" else build_tracker(settings, env, cwd)
    return found
