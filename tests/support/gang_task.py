"""A task of a gang without TensorFlow; started by tests/launch/test_gang.py: `python gang_task.py <config file>`.

What each does is Python code in `./<name>.py`, run with the names below; its model_dir is ./run. It beats, holds the
lock and notes like the task of `runner.task`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from runner.distribute.tf_config import read_tf_config
from runner.system.child_process import end_with_parent
from runner.system.heartbeat import Heartbeat
from runner.tracking.run_lock import only_task_in
from tests.support.journal import journal_of

end_with_parent(os.environ)
heart = Heartbeat(os.environ)
heart.start(0.05)
place = read_tf_config(os.environ.get("TF_CONFIG", ""))
folder = Path.cwd()
model_dir = folder / "run"
generation = int(os.environ["RUNNER_GENERATION"])
journal = journal_of(model_dir, place.role, place.task_index)


def fail(text: str, code: int) -> None:
    """Ends as a task whose user made a mistake."""
    from runner.task.error_report import report_error

    report_error(ValueError(text), journal, os.environ, set())
    sys.exit(code)


def save(step: int) -> None:
    """Leaves what looks like a checkpoint; its index, for which tasks wait, comes last."""
    for name in (f"model.ckpt-{step}.data-00000-of-00001", f"model.ckpt-{step}.index"):
        (model_dir / name).write_text("x")
    (model_dir / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')
    journal.event("checkpoint", step=step, path=f"model.ckpt-{step}")


def on_sigterm(code: int) -> None:
    """From now on SIGTERM ends the task with `code`."""

    def end(*_: Any) -> None:
        (folder / f"{place.name}.asked").touch()
        sys.exit(code)

    signal.signal(signal.SIGTERM, end)


def finish(**facts: Any) -> None:
    journal.event("result", **facts)
    sys.exit(0)


def wait_for(name: str, secs: float = 120) -> None:
    """Until `folder/name` is there."""
    end = time.monotonic() + secs
    while not (folder / name).exists():
        assert time.monotonic() < end, f"{place.name} waited for {name}"
        time.sleep(0.02)


def started() -> None:
    """Leaves the process id, for the test."""
    path = folder / f"{place.name}.pid"
    path.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), "generation": generation}))
    path.with_suffix(".new").rename(path)


with only_task_in(model_dir, f"{place.role}-{place.task_index}"):
    journal.event("joining")
    journal.event("first_step", step=1)
    exec((folder / f"{place.name}.py").read_text())
