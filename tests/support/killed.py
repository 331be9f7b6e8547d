"""Lives of runs that end by SIGKILL: `python -m tests.support.killed folder case`, what they left to be read by
tests/integration/test_kill.py.

Each life is a process of its own, forked after the import of TensorFlow and before its first use, which saves 4 s each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, Input, RunConfig, build_strategy
from tests.support.journal import journal_of

v1 = tf.compat.v1

MAX_STEPS, SAVE_STEPS = 24, 4
DELAY_SECS = 0.1
"""Between reaching the place where a life ends and its end: whatever else is under way goes on."""

CASES = ("default", "mirrored-synchronous")
"""Strategy, and whether a checkpoint is written while training goes on, as it is unless told otherwise. A mirrored run
that writes meanwhile is killed by tests/integration/test_kills.py.
"""


def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Classic, with dropout and noise of TF 1, and Adam."""
    flat = tf.reshape(features, [-1, 16]) + tf.random.normal([16], stddev=0.01)
    hidden = tf.tanh(flat @ v1.get_variable("hidden", [16, 8]) + v1.get_variable("bias", [8]))
    dropped = tf.nn.dropout(hidden, 0.4) if mode == "train" else hidden
    predictions = dropped @ v1.get_variable("out", [8, 1])
    loss = tf.reduce_mean(tf.square(predictions - labels))
    train_op = v1.train.AdamOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, predictions, loss, train_op)


def write_records(folder: Path) -> list[str]:
    """Four files of ten examples each."""
    rng, names = np.random.RandomState(0), []
    for number in range(4):
        names.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for _ in range(10):
                writer.write(rng.randn(17).astype(np.float32).tobytes())
    return names


def input_fn(params: Any) -> tf.data.Dataset:
    """Interleaved files, shuffled, repeated, augmented at random, batched, prefetched."""

    def augmented(record: tf.Tensor, number: tf.Tensor) -> Any:
        values = tf.io.decode_raw(record, tf.float32)
        image = tf.reshape(values[:16], [4, 4, 1])
        seed = tf.stack([tf.constant(7, tf.int64), number])
        image = tf.image.stateless_random_flip_left_right(image, seed)
        return image + tf.random.stateless_normal([4, 4, 1], seed, stddev=0.1), values[16:]

    files = tf.data.Dataset.from_tensor_slices(params["files"]).shuffle(4, seed=1)
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2, deterministic=True)
    numbered = tf.data.Dataset.zip((records.shuffle(16, seed=2).repeat(), tf.data.Dataset.counter()))
    return numbered.map(augmented, num_parallel_calls=2).batch(params["batch_size"]).prefetch(2)


# --- ends -----------------------------------------------------------------------------------------------------------


def end() -> None:
    time.sleep(DELAY_SECS)
    os.kill(os.getpid(), signal.SIGKILL)


class EndAt(Hook):
    """Ends at a step."""

    def __init__(self, step: int) -> None:
        self.every, self._step = Every(steps=step), step

    def after_step(self, run: Any, result: Any) -> None:
        if result.last_step == self._step:
            end()


class EndAfter(Hook):
    """Ends some time after the first loop, wherever the run is then."""

    def __init__(self, secs: float) -> None:
        self._timer = threading.Timer(secs, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def after_step(self, run: Any, result: Any) -> None:
        if not self._timer.is_alive():
            self._timer.start()
            time.sleep(0.2)


def end_in_write(step: int) -> None:
    """Ends when the bundle of `step` is half on the disk."""
    save = tf.raw_ops.SaveV2

    def half(prefix: Any, **arguments: Any) -> Any:
        written = save(prefix=prefix, **arguments)
        if str(prefix).endswith(f"model.ckpt-{step}"):
            (data,) = Path(prefix).parent.glob(f"model.ckpt-{step}.data-*")
            os.truncate(data, data.stat().st_size // 2)
            end()
        return written

    tf.raw_ops.SaveV2 = half


def end_before_move(step: int, name: str) -> None:
    """Ends before the file `name` (of the checkpoint of `step`) takes its place in model_dir."""
    replace, seen = os.replace, []

    def watched(source: Any, target: Any, **arguments: Any) -> None:
        seen.append(Path(target).name)
        if seen[-1] == name and any(one.startswith(f"model.ckpt-{step}.") for one in seen):
            end()
        replace(source, target, **arguments)

    os.replace = watched  # type: ignore[assignment]


def endings(rng: random.Random) -> list[Callable[[], list[Hook]]]:
    """How the lives of one run end, in order; each is a checkpoint further, or not at all."""

    def patched(patch: Callable[..., None], *arguments: Any) -> Callable[[], list[Hook]]:
        return lambda: patch(*arguments) or []  # type: ignore[func-returns-value]

    first, moment, last = rng.randint(5, 7), rng.uniform(0.0, 0.2), rng.randint(21, 23)
    return [
        lambda: [EndAt(first)],
        patched(end_in_write, 8),
        patched(end_before_move, 12, "model.ckpt-12.manifest.json"),
        patched(end_before_move, 16, "checkpoint"),
        lambda: [EndAfter(moment)],
        lambda: [EndAt(last)],
        lambda: [],
    ]


# --- lives ----------------------------------------------------------------------------------------------------------


def train(folder: Path, case: str, files: list[str], ending: Callable[[], list[Hook]]) -> None:
    strategy = build_strategy("mirrored", virtual_devices=2) if case.startswith("mirrored") else None
    config = RunConfig(
        check_replicas=True,
        train_distribute=strategy,
        save_checkpoints_steps=SAVE_STEPS,
        save_checkpoints_asynchronously=not case.endswith("synchronous"),
        log_step_count_steps=1,
    )
    trainer = Estimator(model_fn, folder, config, journal=journal_of(folder))
    trainer.train(Input(input_fn, params={"files": files}, batch_size=6), hooks=ending(), max_steps=MAX_STEPS)


def live(*arguments: Any) -> int:
    """One life in a process of its own. The signal that ended it; 0 when it came to its end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            train(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "a life failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main(folder: Path, case: str) -> None:
    files = write_records(folder)
    live(folder / "undisturbed", case, files, lambda: [])
    print(*(live(folder / "killed", case, files, ending) for ending in endings(random.Random(case))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
