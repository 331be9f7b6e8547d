"""What all tests share."""

from __future__ import annotations

import os
import sys
import time

# Before anything imports MLflow or starts a process that does.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "HYDRA_FULL_ERROR"):
    os.environ.pop(name, None)

# Before any test makes a tensor: two CPUs to mirror over, in the one process that all tests share.
from runner.strategy import split_cpu  # noqa: E402

split_cpu(2)


def pytest_unconfigure() -> None:
    """Waits for the iterators of all tests to be deleted: `task.end` would not, and has the process end at once."""
    iterators = sys.modules.get("runner.iterators")
    last = time.monotonic() + 90
    while iterators is not None and not iterators.have_ended() and time.monotonic() < last:
        time.sleep(0.1)
