"""Start the runner as a process and watch it from outside. Not a script."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """Return environment variables for imports of this checkout and of first_step/, with TensorFlow as quiet as in
    the runner.
    """
    path = [str(HERE.parent), str(HERE / "first_step"), os.environ.get("PYTHONPATH", "")]
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def memory(name: str, pid: int | str = "self") -> int:
    """Return bytes: VmRSS for the current memory of a process, or VmHWM for its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def forget_peak(pid: int | str = "self") -> None:
    """Reset the peak of a process, so that VmHWM counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_of_tree(process: psutil.Popen) -> float:
    """Return the CPU seconds of a process and all its descendants, including those that have ended."""
    used = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it has just ended and counts in its parent's times
        used += times.user + times.system + times.children_user + times.children_system
    return used


def kill(process: psutil.Popen) -> None:
    """Send SIGKILL to a process first, so that it restarts nothing, and then to all its descendants."""
    if process.is_running():
        children = process.children(recursive=True)
        process.kill()
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
    process.wait()
