"""Chains of starts of `python -m runner` in one model_dir, some of them killed, over one process and several."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support import chains
from tests.support.processes import end_all_of

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


def start(folder: Path, strategy: str, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *SETTINGS, f"strategy={strategy}", *STRATEGIES[strategy], *settings],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the supervisor and its tasks at once; the next start finds the folder free."""
    end_all_of(process)
    process.communicate()


def walk(folder: Path, rng: random.Random, strategies: Sequence[str], *settings: str) -> None:
    """Do a chain: each start with a random one of `strategies`, the last with the first of them, which finishes."""
    for number in range(chains.NUM_STARTS):
        is_last = number == chains.NUM_STARTS - 1
        strategy = strategies[0] if is_last else rng.choice(strategies)
        max_steps = chains.TOTAL if is_last else rng.randint(1, chains.TOTAL)
        max_epochs = None if is_last else rng.choice([None, rng.randint(1, 5), 20])
        limits = f"train.max_steps={max_steps}", f"train.max_epochs={'null' if max_epochs is None else max_epochs}"
        process = start(folder, strategy, *settings, *limits, f"checkpoint.save_steps={rng.choice([1, 3, 7])}")
        ending, secs = rng.choice(["limit", "limit", "kill", "stop"]), rng.uniform(0, 15)
        if not is_last and ending != "limit":
            time.sleep(secs)
        if not is_last and ending == "kill" and process.poll() is None:
            kill(process)
            continue
        if not is_last and ending == "stop" and process.poll() is None:
            process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=240)[1]
        # Stopped before it could save, 1: the start after it goes on all the same.
        assert process.returncode in ((0,) if is_last or ending == "limit" else (0, 1, 3, -signal.SIGTERM)), said


@pytest.mark.parametrize("seed", range(2))
def test_a_chain_of_real_starts_comes_to_the_undisturbed_run(seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"processes-{seed}")
    kept = None if seed % 2 else rng.choice(["default", "mirrored"])  # None: the strategy changes
    synchronous = [name for name in STRATEGIES if name != "parameter_server"]
    walk(tmp_path, rng, [kept] if kept else synchronous, *EXACT)
    found = chains.variables(tmp_path / "run")
    expected = chains.undisturbed("classic", "shipped", False, kept or "default")[1]
    assert set(found) == set(expected)
    tolerance = 0.0 if kept else chains.TOLERANCE
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_chain_with_parameter_servers_trains_on_each_example_once_an_epoch(tmp_path: Path) -> None:
    # Of two replicas the one without an example computes on a copy of one, which `counting` would count.
    strategies = ["parameter_server", "default", "one_device"]
    walk(tmp_path, random.Random("servers-1"), strategies, *COUNTED)
    found = chains.variables(tmp_path / "run")
    assert found["global_step"] == chains.TOTAL
    assert found["seen"].tolist() == [chains.TOTAL / chains.STEPS_PER_EPOCH] * chains.NUM_EXAMPLES
