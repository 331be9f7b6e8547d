"""Chains of starts of `python -m runner` in one model_dir, some of them killed, over one process and several.

Chains in one process, at random: tests/checkpoint/test_chains.py. The bits of runs that are killed: test_kill.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support import chains
from tests.support.command_line import CommandLine
from tests.support.processes import end_all_of, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STRATEGIES = {
    "default": (),
    "one_device": (),
    "mirrored": ("strategy.virtual_devices=2",),
    "central_storage": ("strategy.virtual_devices=2",),
    "multi_worker": ("cluster.num_workers=2",),
    "parameter_server": ("cluster.num_workers=2", "cluster.num_ps=1"),
}
SETTINGS = (
    "model=custom", "input=custom", f"input.train.batch_size={chains.BATCH_SIZE}", "input.train.shard=examples",
    "input.eval=null", "run.seed=5", "tracking=none", "run.progress=plain", "model_dir=run",
)  # fmt: skip
EXACT = (
    "model.fn=tests.support.chains.classic", "model.params={dropout: false}",
    "input.train.fn=tests.support.chains.shipped",
)  # fmt: skip
COUNTED = ("model.fn=tests.support.chains.counting", "input.train.fn=tests.support.chains.numbered")


def words(strategy: str, *settings: str) -> Sequence[str]:
    return *SETTINGS, f"strategy={strategy}", *STRATEGIES[strategy], *settings


def last_saved(folder: Path) -> int:
    return max((int(file.stem.rpartition("-")[2]) for file in folder.glob("run/model.ckpt-*.index")), default=0)


def disturb(folder: Path, ending: str, command: Sequence[str]) -> None:
    """Kill a start (`kill`: the supervisor and its tasks at once), or ask it to stop (`stop`), when it has saved."""
    before = last_saved(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", *command],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: process.poll() is not None or last_saved(folder) > before, secs=240)
    if ending == "kill":
        end_all_of(process)
        process.communicate()
        return
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=240)[1]
    assert process.returncode in (0, 3), said


def walk(
    folder: Path, rng: random.Random, starts: Sequence[tuple[str, str]], command_line: CommandLine, *settings: str
) -> None:
    """Do a chain. Args: starts: (strategy, how it ends); the last takes all steps that are left."""
    for number, (strategy, ending) in enumerate(starts):
        save = f"checkpoint.save_steps={rng.choice([1, 3, 7])}"
        if ending != "limit":
            disturb(folder, ending, words(strategy, *settings, "train.max_steps=30", save))
            continue
        is_last = number == len(starts) - 1
        max_steps = chains.TOTAL if is_last else rng.randint(1, chains.TOTAL)
        max_epochs = None if is_last else rng.choice([None, rng.randint(1, 5), 20])
        limits = f"train.max_steps={max_steps}", f"train.max_epochs={'null' if max_epochs is None else max_epochs}"
        ran = command_line(*words(strategy, *settings, *limits, save), cwd=folder)
        assert ran.returncode == 0, ran.stderr


def test_a_chain_of_real_starts_comes_to_the_undisturbed_run(tmp_path: Path, command_line: CommandLine) -> None:
    starts = (
        ("multi_worker", "kill"), ("mirrored", "limit"), ("central_storage", "stop"), ("multi_worker", "limit"),
        ("one_device", "limit"), ("default", "limit"),
    )  # fmt: skip
    walk(tmp_path, random.Random("processes-1"), starts, command_line, *EXACT)
    found = chains.variables(tmp_path / "run")
    expected = chains.undisturbed("classic", "shipped", False, "default")[1]
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=chains.TOLERANCE, atol=chains.TOLERANCE, err_msg=name)


def test_a_chain_with_parameter_servers_trains_on_each_example_once_an_epoch(
    tmp_path: Path, command_line: CommandLine
) -> None:
    # Of two replicas the one without an example computes on a copy of one, which `counting` would count.
    starts = ("parameter_server", "kill"), ("default", "limit"), ("parameter_server", "limit")
    walk(tmp_path, random.Random("servers-9"), starts, command_line, *COUNTED)
    found = chains.variables(tmp_path / "run")
    assert found["global_step"] == chains.TOTAL
    assert found["seen"].tolist() == [chains.TOTAL / chains.STEPS_PER_EPOCH] * chains.NUM_EXAMPLES
