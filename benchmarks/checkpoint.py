"""256 MB of float32 variables: what saving adds to training, and what a write, a read and a check take.

    python benchmarks/checkpoint.py [--rounds 21] [--dir DIR] [--threads N] [--tiny]

Training: one hand-written loop of a compute-bound step for all cases, 20 steps with a save after the first; what is
saved is durable when the time is taken. Added: to the same steps without saving, in the same round. Ours fsyncs, writes
a manifest and moves the state file; the peers do none of these. The page cache of the machine decides the slow rounds:
look at the median and the minimum. Ratios are those of medians: what is added is a difference of two noisy times.

A step that uses every core leaves none to the writer, whose work is then added in any case; --threads=1 leaves one on
a machine of two cores, as a step on an accelerator does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from runner.checkpoint import layout
from runner.checkpoint.async_saver import Saver
from runner.checkpoint.integrity import find_damage
from runner.checkpoint.reader import Reader
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter

PEER = "tf.train.CheckpointManager"
STEPS = 20


class Model:
    """Layers of 8 MB, each with a step of its own."""

    def __init__(self, num_layers: int) -> None:
        self.variables = {f"layer_{i}/kernel": tf.Variable(tf.random.normal([1024, 2048])) for i in range(num_layers)}
        self._inputs = tf.random.normal([24, 1024])

    @tf.function
    def step(self) -> None:
        for variable in self.variables.values():
            outputs = tf.tanh(self._inputs @ variable)
            variable.assign_sub(1e-6 * tf.matmul(self._inputs, outputs, transpose_a=True))

    def snapshot(self, step: int) -> Snapshot:
        return Snapshot(step, {name: variable.read_value() for name, variable in self.variables.items()})


def train(model: Model, save: Callable[[int], None], finish: Callable[[], object], step: int) -> tuple[float, float]:
    """Seconds of a checkpoint and the steps after it until it is durable, and of the slowest step with its save."""
    started, worst = time.perf_counter(), 0.0
    for number in range(STEPS):
        begun = time.perf_counter()
        model.step()
        if not number:
            save(step)
        worst = max(worst, time.perf_counter() - begun)
    finish()
    return time.perf_counter() - started, worst


def build_savers(model: Model, directory: Path) -> dict[str, tuple[Callable[[int], None], Callable[[], object]]]:
    """Case -> what it does after a step, and at the end."""
    peer = tf.train.Checkpoint(**{name.replace("/", "_"): variable for name, variable in model.variables.items()})
    manager = tf.train.CheckpointManager(peer, str(directory / "peer"), max_to_keep=2)

    def ours(name: str, *, asynchronous: bool) -> tuple[Callable[[int], None], Callable[[], object]]:
        saver = Saver(CheckpointWriter(directory / name, keep_max=2))

        def save(step: int) -> None:
            saver.wait()
            saver.begin(model.snapshot(step), {}, asynchronous=asynchronous)

        return save, saver.wait

    return {
        "no checkpoint": (lambda step: None, lambda: None),
        PEER: (lambda step: manager.save(step), lambda: None),
        "ours, checkpoint.asynchronous=false": ours("sync", asynchronous=False),
        "ours, checkpoint.asynchronous=true": ours("async", asynchronous=True),
    }


def measure_training(model: Model, directory: Path, rounds: int) -> None:
    cases = build_savers(model, directory)
    added: dict[str, list[float]] = {name: [] for name in cases}
    worst: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 1):
        secs = {name: train(model, *case, round_number) for name, case in cases.items()}
        for name in cases if round_number else ():  # the first round traces, and fills memory and caches
            added[name].append(secs[name][0] - secs["no checkpoint"][0])
            worst[name].append(secs[name][1])
    step = statistics.median(worst["no checkpoint"])
    print(f"training, {STEPS} steps and a checkpoint; the worst step without one takes {step:.3f} s")
    print(f"{'':40} {'added s/save':>12} {'min':>7} {'max':>7} {'ratio':>7} {'worst step s':>13} {'ratio':>7}")
    for name in list(cases)[1:]:
        middle, slow = statistics.median(added[name]), statistics.median(worst[name])
        ratio, worst_ratio = middle / statistics.median(added[PEER]), slow / statistics.median(worst[PEER])
        print(
            f"{name:40} {middle:12.3f} {min(added[name]):7.3f} {max(added[name]):7.3f} {ratio:7.2f} "
            f"{slow:13.3f} {worst_ratio:7.2f}"
        )


def build_cases(variables: Mapping[str, tf.Variable], directory: Path) -> dict[str, Callable[[], object]]:
    """What is done alone, with nothing beside it."""
    peer = tf.train.Checkpoint(**{name.replace("/", "_"): variable for name, variable in variables.items()})
    writer = CheckpointWriter(directory / "ours", keep_max=2)
    step = 0

    def ours() -> None:
        nonlocal step
        step += 1
        writer.save(Snapshot(step, {name: variable.read_value() for name, variable in variables.items()}))

    def latest() -> str:
        path = layout.latest_checkpoint(directory / "ours")
        assert path is not None
        return path

    def crc32_of_the_data() -> None:
        value = 0
        with open(f"{latest()}.data-00000-of-00001", "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                value = zlib.crc32(block, value)

    return {
        "tf.train.Checkpoint.write": lambda: peer.write(str(directory / "peer_once")),
        "ours: CheckpointWriter.save": ours,
        "ours: Reader.get_many (restore)": lambda: Reader(latest()).get_many(variables),
        "ours: find_damage (read in full)": lambda: find_damage(latest()),
        "ours: latest_checkpoint (sizes only)": latest,
        "zlib.crc32 of the data file (not done)": crc32_of_the_data,
    }


def measure_alone(model: Model, directory: Path, rounds: int) -> None:
    cases = build_cases(model.variables, directory)
    secs: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            secs[name].append(time.perf_counter() - start)
    base = statistics.median(secs["tf.train.Checkpoint.write"])
    print(f"\n{'alone':40} {'median s':>9} {'min':>7} {'max':>7} {'ratio':>7}")
    for name, values in secs.items():
        median = statistics.median(values)
        print(f"{name:40} {median:9.4f} {min(values):7.4f} {max(values):7.4f} {median / base:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tiny", action="store_true", help="two layers instead of 32: shows that the script works")
    parser.add_argument("--threads", type=int, default=0, help="of a step; default: one a core")
    parser.add_argument("--dir", help="where to write; default: a temporary directory")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        model = Model(2 if arguments.tiny else 32)
        measure_training(model, directory, arguments.rounds)
        measure_alone(model, directory, arguments.rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
