"""Build the trackers of `tracking.backend`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.config.schema import TrackingConfig
from runner.tracking.backends.csv_tracker import CsvTracker
from runner.tracking.backends.user_tracker import UserTracker
from runner.tracking.mlflow_tracker import build_tracker as build_mlflow
from runner.tracking.tracker import Tracker


def build_tracker(
    backend: str, settings: TrackingConfig, model_dir: Path, name: str, env: Mapping[str, str], started_at: float
) -> Tracker:
    """Return the tracker `backend` of `settings`. Creates nothing yet.

    Args:
      name: name of the run.
      env: MLflow's variables are read from it.
      started_at: when the run started, in seconds since 1970; the tracker may be built later.
    """
    if backend == "mlflow":
        return build_mlflow(settings, env, Path.cwd(), started_at)
    if backend == "csv":
        return CsvTracker(model_dir)
    return UserTracker(next(one for one in settings.backends if one.name == backend), name)
