"""The memory that operations on a large table take at their peak, as a multiple of the variables.

    python benchmarks/table_memory.py [--megabytes 2048] [--cases training evaluation ...] [--dir DIR]

A table of [rows, 64] and Adam's two slots: the three together have --megabytes. Each case is a process of its own,
which first does the same with a tiny table; its peak (VmHWM) counts beyond what it had then. A model without its slots
takes a third. With parameter servers (two, and a worker; the table is cut in two) it is the peak of each process. It
takes up to four times --megabytes of memory, and twice of disk. `make bench ONLY=table_memory` runs it, `make bench`
alone does not. TensorFlow 2.21 keeps memory that it has freed, so a peak counts all that the process did before, too.

v1's Adam and Keras's move the whole table in each step, and take memory for it. LazyAdam moves the rows of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _processes import environment, forget_peak, memory

import runner
from runner.classic.contrib.opt import LazyAdamOptimizer
from runner.classic.warm_start import WarmStartSettings, as_warm_start
from runner.distribute.local_cluster import free_ports
from runner.distribute.strategy import build_parameter_server
from runner.run_config import WarmStart

v1 = tf.compat.v1

WIDTH, BATCH, PARTS, TINY_ROWS = 64, 1024, 3, 1000
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "LazyAdam": LazyAdamOptimizer, "v1's Adam": v1.train.AdamOptimizer, "Keras's Adam": keras.optimizers.Adam,
}  # fmt: skip


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> runner.EstimatorSpec:
    shape = [params["rows"], WIDTH]
    if params["optimizer"] == "Keras's Adam":
        vectors = keras.layers.Embedding(*shape, name="table")(features["ids"])
    else:
        table = v1.get_variable("table", shape, initializer=v1.random_uniform_initializer(-0.05, 0.05))
        vectors = tf.nn.embedding_lookup(table, features["ids"])
    predictions = tf.reduce_sum(vectors, 1)
    if mode == runner.ModeKeys.PREDICT:
        return runner.EstimatorSpec(mode, predictions=predictions)
    loss = tf.reduce_mean(tf.square(predictions - labels))
    optimizer = OPTIMIZERS[params["optimizer"]]()
    if not isinstance(optimizer, v1.train.Optimizer):
        return runner.EstimatorSpec(mode, loss=loss, optimizer=optimizer)
    train_op = optimizer.minimize(loss, v1.train.get_global_step()) if mode == runner.ModeKeys.TRAIN else None
    return runner.EstimatorSpec(mode, loss=loss, train_op=train_op)


class Measured:
    """The peaks of processes, as multiples of the size of a table with its slots.

    Args:
      folder: where models are.
      size: bytes of the variables; 0: a tiny table, to warm up.
      pids: name -> process; "self" is this one.
      strategy: for training.
    """

    def __init__(self, folder: Path, size: int, pids: Mapping[str, int | str], strategy: Any) -> None:
        self.rows = max(TINY_ROWS, size // (PARTS * WIDTH * 4))
        self.folder, self.bytes = folder / f"{self.rows}", self.rows * WIDTH * 4 * PARTS
        self.folder.mkdir(exist_ok=True)
        self.peaks: dict[str, dict[str, float]] = {}
        self._pids, self._strategy = pids, strategy
        self._empty = {name: memory("VmRSS", pid) for name, pid in pids.items()}
        self.note("")

    def note(self, what: str) -> None:
        """Note the peaks since the last call; "": of nothing that is shown."""
        for name, pid in self._pids.items():
            if what:
                before = self.peaks.setdefault(what, {}).get(name, 0.0)
                self.peaks[what][name] = max(before, (memory("VmHWM", pid) - self._empty[name]) / self.bytes)
            forget_peak(pid)

    def estimator(self, optimizer: str = "LazyAdam", folder: str = "model", **options: Any) -> runner.Estimator:
        given = {"save_checkpoints_asynchronously": False, "save_checkpoints_steps": 2, "steps_per_loop": 1, **options}
        config = runner.RunConfig(train_distribute=self._strategy, **given)
        return runner.Estimator(model_fn, self.folder / folder, config, {"rows": self.rows, "optimizer": optimizer})

    def batches(self) -> tf.data.Dataset:
        rng = np.random.RandomState(0)
        ids, labels = rng.randint(0, self.rows, [4, BATCH]), rng.randn(4, BATCH).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices(({"ids": ids}, labels))

    def forever(self) -> tf.data.Dataset:
        return self.batches().repeat()

    def vocabulary(self, first: int) -> str:
        """Return a file with a token for each row, from token number `first` on."""
        path = self.folder / f"tokens_from_{first}"
        path.write_text("".join(f"token{number}\n" for number in range(first, first + self.rows)))
        return str(path)


class Between(runner.Hook):
    """Notes the peak until the first step, that of the steps, and that between two steps."""

    def __init__(self, note: Callable[[str], None], first: str, steps: str, between: str) -> None:
        self._note, self._next, self._steps, self._between = note, first, steps, between

    def before_step(self, run: Any, step: int) -> None:
        self._note(self._next)
        self._next = self._between

    def after_step(self, run: Any, result: Any) -> None:
        self._note(self._steps)


# --- the cases ------------------------------------------------------------------------------------------------------


def training(found: Measured, optimizer: str, *, asynchronous: bool = False) -> None:
    """Train and save, from the first step on."""
    noted = ("", f"{optimizer}: steps", f"{optimizer}: saves, checkpoint.asynchronous=false")
    if asynchronous:  # a step, and a save before it that goes on
        noted = ("", *2 * [f"{optimizer}: steps and saves, checkpoint.asynchronous=true"])
    estimator = found.estimator(optimizer, "trained", save_checkpoints_asynchronously=asynchronous)
    estimator.train(found.forever, hooks=[Between(found.note, *noted)], max_steps=6)
    found.note("")
    shutil.rmtree(estimator.model_dir)


def evaluation(found: Measured, *, hooked: bool) -> None:
    """Evaluate between the steps of training, with a session hook or without."""
    what = f"evaluation between steps{', a session hook' if hooked else ''}"

    def batches() -> tf.data.Dataset:
        found.note("")  # the save before
        return found.batches()

    estimator = found.estimator(folder="trained")
    train_spec = runner.TrainSpec(found.forever, max_steps=6, hooks=[Between(found.note, "", "", what)])
    hooks = [v1.train.SessionRunHook()] if hooked else []
    eval_spec = runner.EvalSpec(batches, hooks=hooks, start_delay_secs=0, throttle_secs=0)
    runner.train_and_evaluate(estimator, train_spec, eval_spec)
    found.note("")
    shutil.rmtree(estimator.model_dir)


def checkpoint(found: Measured) -> None:
    """Write the checkpoint that the cases after it read."""
    found.estimator().train(found.forever, max_steps=1)
    found.note("")


def restore(found: Measured) -> None:
    what = "a resumed run: restore, steps, saves"
    shutil.copytree(found.folder / "model", found.folder / "resumed")
    hook = Between(found.note, what, what, what)
    found.estimator(folder="resumed").train(found.forever, hooks=[hook], steps=2)
    found.note(what)
    shutil.rmtree(found.folder / "resumed")


def evaluator(found: Measured, *, hooked: bool) -> None:
    found.estimator().evaluate(found.batches, hooks=[v1.train.SessionRunHook()] if hooked else [])
    found.note(f"evaluation by another process{', a session hook' if hooked else ''}")


def predict(found: Measured) -> None:
    for _ in found.estimator().predict(found.batches):
        pass
    found.note("predict")


def export(found: Measured) -> None:
    receiver = runner.build_raw_serving_input_receiver_fn({"ids": tf.TensorSpec([None], tf.int64)})
    found.estimator().export_saved_model(found.folder / "export", receiver)
    found.note("export")
    shutil.rmtree(found.folder / "export")


def warm_start(found: Measured, *, vocabulary: bool) -> None:
    """Start a table from the old one; half of its tokens are new."""
    settings = WarmStart(str(found.folder / "model"))
    if vocabulary:
        new, old, backup = found.vocabulary(found.rows // 2), found.vocabulary(0), v1.random_uniform_initializer()
        tokens = v1.train.VocabInfo(new, found.rows, 0, old, -1, backup)
        settings = as_warm_start(WarmStartSettings(settings.checkpoint, var_name_to_vocab_info={"table": tokens}))
    what = f"warm start{', another vocabulary' if vocabulary else ''}: until the first step"
    estimator = found.estimator(folder="started", warm_start=settings)
    estimator.train(found.forever, hooks=[Between(found.note, what, "", "")], max_steps=1)
    found.note("")
    shutil.rmtree(estimator.model_dir)


def servers(found: Measured, *, resumed: bool) -> None:
    """Train on parameter servers; or resume that, and evaluate."""
    what = f"parameter servers: {'restore, ' if resumed else ''}steps, saves"
    estimator = found.estimator(folder="on_servers")
    estimator.train(found.forever, hooks=[Between(found.note, *3 * [what])], max_steps=6 if resumed else 4)
    found.note(what)
    if resumed:
        estimator.evaluate(found.batches)
        found.note("parameter servers: evaluation between")


CASES: dict[str, Callable[[Measured], None]] = {
    **{f"training of {name}": partial(training, optimizer=name) for name in OPTIMIZERS},
    **{f"asynchronous training of {name}": partial(training, optimizer=name, asynchronous=True) for name in OPTIMIZERS},
    "evaluation": partial(evaluation, hooked=False),
    "evaluation with a hook": partial(evaluation, hooked=True),
    "checkpoint": checkpoint,
    "restore": restore,
    "evaluator": partial(evaluator, hooked=False),
    "evaluator with a hook": partial(evaluator, hooked=True),
    "predict": predict,
    "export": export,
    "warm start": partial(warm_start, vocabulary=False),
    "warm start with a vocabulary": partial(warm_start, vocabulary=True),
    "servers": partial(servers, resumed=False),
    "servers again": partial(servers, resumed=True),
}

TINY = ("training of LazyAdam", "evaluation with a hook", "export", "warm start with a vocabulary")

SERVE = "import os; from runner.distribute.tf_config import read_tf_config; "
SERVE += "from runner.distribute.grpc_server import serve, start_server; "
SERVE += "serve(start_server(read_tf_config(os.environ['TF_CONFIG'])))"


@contextmanager
def cluster() -> Iterator[tuple[dict[str, int | str], Any]]:
    """Yield (name -> process id, strategy) of a worker and two parameter servers that run inside this context."""
    chief, worker, *servers = (f"127.0.0.1:{port}" for port in free_ports(4))
    tasks = {"chief": [chief], "worker": [worker], "ps": servers}
    started = {}
    for kind, index in (("worker", 0), ("ps", 0), ("ps", 1)):
        task = {"cluster": tasks, "task": {"type": kind, "index": index}}
        env = {**environment(), "TF_CONFIG": json.dumps(task)}
        started[f"{kind} {index}"] = subprocess.Popen([sys.executable, "-c", SERVE], env=env)
    try:
        pids = {name: one.pid for name, one in started.items()}
        yield {"coordinator": "self", **pids}, build_parameter_server(tasks, "fixed_shards")
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def measure(case: str, folder: Path, size: int) -> None:
    """Print the peaks of a case as JSON: what was done -> process -> multiple of the variables."""
    with cluster() if case.startswith("servers") else nullcontext(({"": "self"}, None)) as (pids, strategy):
        for bytes_ in (0, size):
            found = Measured(folder, bytes_, pids, strategy)
            CASES[case](found)
        print(json.dumps(found.peaks), flush=True)
    os._exit(0)  # TensorFlow would log for every function that its workers are gone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="shown is the largest peak")
    parser.add_argument("--tiny", action="store_true", help="2 MB: shows that the script works")
    parser.add_argument("--megabytes", type=int, default=2048, help="of the table and its two slots")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dir", help="where to write; default: a temporary directory")
    parser.add_argument("--case", nargs=3, metavar=("CASE", "FOLDER", "BYTES"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.case:
        case, folder, size = parsed.case
        measure(case, Path(folder), int(size))
    size = (2 if parsed.tiny else parsed.megabytes) << 20
    wanted = {*(TINY if parsed.tiny and parsed.cases == list(CASES) else parsed.cases), "checkpoint"}
    print(f"{size >> 20} MB of variables; peaks of memory, ratio to the variables")
    with tempfile.TemporaryDirectory(dir=parsed.dir) as folder:
        for case in (one for one in CASES if one in wanted):
            argv, peaks = [sys.executable, __file__, "--case", case, folder, str(size)], dict[str, dict[str, float]]()
            for _ in range(parsed.rounds):
                done = subprocess.run(argv, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
                for what, found in json.loads(done.stdout.splitlines()[-1]).items():
                    before = peaks.setdefault(what, {})
                    before |= {name: max(value, before.get(name, 0.0)) for name, value in found.items()}
            for what, found in peaks.items():
                shown = ", ".join(f"{name} {value:.2f}".strip() for name, value in found.items())
                print(f"{what:66} {shown}", flush=True)


if __name__ == "__main__":
    main()
