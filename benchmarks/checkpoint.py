"""256 MB of float32 variables: what saving adds to training, and the times of a write, a read and a check.

    python benchmarks/checkpoint.py [--rounds 21] [--dir DIR] [--threads N] [--tiny]
    python benchmarks/checkpoint.py --peaks [--gigabytes 4] [--dir DIR] [--tiny]

Training: all cases use one hand-written loop of a compute-bound step, 20 steps with a save after the first; the time
ends when the checkpoint is durable. "Added" is relative to the same steps without saving, in the same round. The runner
fsyncs, writes a manifest and moves the state file; the others do none of these. Slow rounds are due to the machine's
page cache: look at the median and the minimum. Ratios are those of medians, since what is added is a difference of two
noisy times.

If a step uses every core, none is left to the writer, so its work is always added. With --threads=1 one is left on a
machine with two cores, as with steps on an accelerator.

--peaks: the peak memory of training with an Estimator, as a multiple of its variables, for each value of
checkpoint.asynchronous: while building, while taking steps and saving, and while a new process restores. Every case is
a separate process. Variables are 64 MB each, start from a tensor, and are updated as a whole or, half of them, by rows,
like embeddings. It needs three times their size in memory and on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from _processes import environment, forget_peak, memory

from runner.checkpoint.async_saver import Saver
from runner.checkpoint.integrity import find_damage
from runner.checkpoint.reader import Reader
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.checkpoint_files import layout
from runner.tf_private import tensor_bundle

PEER = "tf.train.CheckpointManager"
STEPS = 20


class Model:
    """Layers of 8 MB; each has its own step."""

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
    """Return the seconds of a save and the steps after it until the checkpoint is durable, and of the slowest step
    with its save.
    """
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
    """Return case -> (what it does after a step, what it does at the end)."""
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
        for name in cases if round_number else ():  # warm up: trace, and fill memory and caches
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
    """Return case -> a function that does one thing alone, without training."""
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


# --- peaks of memory ------------------------------------------------------------------------------------------------

MODES = {"false": False, "true": True, "auto": "auto"}
AIMS = {"false": 1.15, "true": 2.0, "auto": 2.0}
"""Allowance for a save, in addition to one part if there is a copy."""

PART = tensor_bundle.PART_BYTES


def measure_peaks(gigabytes: float, directory: Path) -> None:
    size = max(PART, int(gigabytes * (1 << 30)))
    print(f"{size >> 20} MB of variables in parts of {PART >> 20} MB; memory at its peak, ratio to the variables")
    columns = ("built", "saving", "aim", "restoring", "aim", "a save s", "trained meanwhile", "restore s")
    print(f"{'checkpoint.asynchronous':24}" + "".join(f"{column:>{len(column) + 2}}" for column in columns))
    for mode, aim in AIMS.items():
        folder = directory / mode
        found: dict[str, Any] = {}
        for what in ("save", "restore"):
            argv = [sys.executable, __file__, "--peak", what, mode, str(size), str(folder)]
            done = subprocess.run(argv, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
            found |= json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(folder)
        saving = aim + (PART / size if aim > 1.5 else 0.0)
        cells = [
            *(f"{value:.2f}" for value in (found["built"], found["saving"], saving, found["restoring"], 1.15)),
            f"{found['save_secs']:.1f}", "yes" if found["asynchronous"] else "no", f"{found['restore_secs']:.1f}",
        ]  # fmt: skip
        print(f"{mode:24}" + "".join(f"{cell:>{len(name) + 2}}" for cell, name in zip(cells, columns, strict=True)))


def measure_peak(what: str, mode: str, size: int, folder: Path) -> None:
    """Print as JSON the memory peaks of a process that trains and saves, or of one that restores that checkpoint."""
    from tiny_step import input_fn, native_model_fn

    import runner
    from runner.tracking.journal import Journal, read_journal

    config = runner.RunConfig(save_checkpoints_steps=2, steps_per_loop=1, save_checkpoints_asynchronously=MODES[mode])
    # so that the baseline includes what any training allocates
    runner.Estimator(native_model_fn, config=config).train(input_fn, max_steps=2)
    empty = memory("VmRSS")
    peaks: list[float] = []

    class Peaks(runner.Hook):
        """A hook that notes the peak before the first step and after the last."""

        def after_step(self, run: Any, result: Any) -> None:
            if not peaks:
                self.note()

        def note(self) -> None:
            peaks.append((memory("VmHWM") - empty) / size)
            forget_peak()

    forget_peak()
    journal, hook = Journal(folder / f"{what}.jsonl"), Peaks()
    estimator = runner.Estimator(large_model(size // PART), folder / "model", config, journal=journal)
    estimator.train(small_input, max_steps=5 if what == "save" else 6, hooks=[hook])
    hook.note()
    if what == "restore":
        print(json.dumps({"restoring": peaks[0], "restore_secs": journal.phases["restore"]}))
        return
    saved = [line for line in read_journal(folder / "save.jsonl")[0] if line.get("event") == "checkpoint"]
    secs = max(one["copy_secs"] + one["write_secs"] for one in saved)
    said = {"save_secs": secs, "asynchronous": saved[0]["asynchronous"]}
    print(json.dumps({"built": peaks[0], "saving": peaks[1], **said}))


def large_model(number: int) -> Callable[..., Any]:
    """Return a model_fn with this many variables of PART bytes; each step updates a row of one and all of the next,
    in turn.
    """
    import runner

    v1 = tf.compat.v1
    shape = [PART // 4096, 1024]

    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        loss, updates = tf.reduce_mean(features), []
        for index in range(number):
            variable = tf.Variable(tf.zeros(shape), name=f"part_{index}", trainable=False)
            # one after the other, since the memory of a step does not matter here
            with tf.control_dependencies(updates[-1:]):
                if index % 2:
                    updates.append(variable.assign_add(tf.fill(shape, loss), read_value=False))
                else:
                    row = tf.IndexedSlices(tf.fill([1, 1024], loss), tf.constant([index]), tf.constant(shape))
                    updates.append(variable.scatter_add(row))
        step = v1.train.get_or_create_global_step()
        return runner.EstimatorSpec(mode, loss=loss, train_op=tf.group(*updates, step.assign_add(1)))

    return model_fn


def small_input() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tiny", action="store_true", help="two layers instead of 32: shows that the script works")
    parser.add_argument("--threads", type=int, default=0, help="of a step; default: one a core")
    parser.add_argument("--dir", help="where to write; default: a temporary directory")
    parser.add_argument("--peaks", action="store_true", help="the memory that saves and restores take")
    parser.add_argument("--gigabytes", type=float, default=4, help="of variables, for --peaks")
    parser.add_argument("--peak", nargs=4, metavar=("WHAT", "MODE", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        what, mode, size, folder = arguments.peak
        measure_peak(what, mode, int(size), Path(folder))
        return
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        if arguments.peaks:
            measure_peaks(0 if arguments.tiny else arguments.gigabytes, directory)
            return
        model = Model(2 if arguments.tiny else 32)
        measure_training(model, directory, arguments.rounds)
        measure_alone(model, directory, arguments.rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
