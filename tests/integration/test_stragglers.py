"""`python -m runner strategy=multi_worker` with one worker that is slower than the other: which, and for what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.distribute.tf_config import read_tf_config
from tests.support import jobs
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL
from tests.support.journal import events_in

RUN = [*SMALL, "strategy=multi_worker", "command=train", "model_dir=run"]
WORKER = "worker:0"
SLOW_SECS = 6.0


def is_worker() -> bool:
    return not read_tf_config(os.environ["TF_CONFIG"]).is_chief


def opened_slowly(params: Any) -> tf.data.Dataset:
    """As `jobs.endless`; the worker takes its time to open it."""
    time.sleep(SLOW_SECS if is_worker() else 0.0)
    return jobs.endless(params)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def test_the_start_of_each_worker_is_told_by_phase_and_the_slowest_is_named(
    tmp_path: Path, command_line: CommandLine
) -> None:
    done = command_line(*RUN, f"input.train.fn={__name__}.opened_slowly", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    starts = summary["starts"]
    assert set(starts) == {"chief", WORKER}
    for start in starts.values():
        assert {"launch", "import", "rendezvous", "build", "input", "trace", "first_step"} <= set(start["phases"])
        assert abs(sum(start["phases"].values()) - start["secs"]) < 0.1
    assert starts[WORKER]["phases"]["input"] >= SLOW_SECS
    # The other did nothing meanwhile.
    assert starts["chief"]["phases"]["waiting"] > SLOW_SECS / 2 and starts["chief"]["phases"]["input"] < SLOW_SECS / 2
    slowest = summary["slowest_start"]
    assert (slowest["task"], slowest["phase"]) == (WORKER, "input")
    for role in ("chief", "worker"):
        (first,) = events_in(tmp_path / "run", "first_step", role)
        assert first["secs"] > 0
