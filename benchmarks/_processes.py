"""The runner as a process to watch from outside. Not a script."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """Imports of this checkout and of first_step/; TensorFlow as quiet as the runner makes it."""
    path = [str(HERE.parent), str(HERE / "first_step"), os.environ.get("PYTHONPATH", "")]
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def cpu_of_tree(process: psutil.Popen) -> float:
    """Seconds of CPU of a process and of all that it has started, those that have ended among them."""
    used = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it has just ended; its parent's numbers have it
        used += times.user + times.system + times.children_user + times.children_system
    return used


def kill(process: psutil.Popen) -> None:
    """SIGKILL to a process, so that it starts nothing again, and to all that it has started."""
    if process.is_running():
        children = process.children(recursive=True)
        process.kill()
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
    process.wait()
