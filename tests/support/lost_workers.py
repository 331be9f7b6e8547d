"""Runs of `python -m runner` that lose workers for good, compared with a restart by hand for each number of workers.

`python -m tests.support.lost_workers --runs 10 --seed 7` does 10 of them and prints each. A worker is lost for good:
whenever it starts again, it is killed or frozen again. When the run goes on with one worker less, its chief copies the
folder before it restores; the same command with that number of workers goes on in the copy, up to where the next worker
was lost. To be equal, bit for bit: variables with their slots, losses and evaluations.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from runner import Every, Hook
from runner.distribute.tf_config import read_tf_config
from tests.support import chains, journal
from tests.support.kills import END_SECS, Start
from tests.support.processes import is_gone

NUM_EXAMPLES, BATCH_SIZE, EPOCHS, SAVE_STEPS = 25, 6, 6, 4
TOTAL = 5 * EPOCHS
"""The last step of an epoch has one example: two of three workers have none."""
MODULE = "tests.support.lost_workers"
SETTINGS = (
    "model=custom", f"model.fn={MODULE}.model_fn", "input=custom", f"input.train.fn={MODULE}.train_input",
    f"input.train.batch_size={BATCH_SIZE}", "input.train.shard=examples", f"input.eval.fn={MODULE}.eval_input",
    "strategy=multi_worker", "run.seed=5", "run.progress=plain", "run.debug=replicas",
    "tracking=none", "train.log_steps=1",
    f"checkpoint.save_steps={SAVE_STEPS}", "checkpoint.keep_max=null", "run.freeze_secs=10", f"train.max_steps={TOTAL}",
    f"train.hooks=[{{fn: {MODULE}.Slow}}]", "model_dir=run",
)  # fmt: skip
METRICS = ("train/loss", "eval/loss")
MOMENTS = ("first_step", "metrics", "checkpoint", "saving", "evaluating")


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a worker for good.

    Attributes:
      victim: rank of the task that goes first, the chief's is 0; from then on it is always that of the highest rank.
      moment: of a number of workers: `secs` after the chief's journal has `count` more lines of an event (first_step,
        metrics, checkpoint), or, for the `count`th time, files of a new checkpoint are there that is not complete
        (saving), or an evaluation has begun (evaluating).
      freezes: it is stopped, not killed.
    """

    victim: int
    moment: str
    count: int
    secs: float
    freezes: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of `1 + len(losses)` workers or more, of whom each loss takes one."""

    workers: int
    losses: tuple[Loss, ...]
    max_restarts: int = 0


def draw(rng: random.Random) -> Case:
    workers = rng.choice([2, 3, 3])
    losses = []
    for left in range(workers, rng.randint(1, workers - 1), -1):
        moment = rng.choice(MOMENTS)
        count = {"first_step": 1, "metrics": rng.randint(1, 9)}.get(moment, rng.randint(1, 2))
        secs = 0.0 if moment == "saving" else rng.uniform(0, 0.2)
        losses.append(Loss(rng.randrange(left), moment, count, secs, freezes=rng.random() < 0.2))
    return Case(workers, tuple(losses), rng.choice([0, 1]))


# --- in the tasks ---------------------------------------------------------------------------------------------------


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    """Dropout, momentum, and a variable `seen` to which each step adds the share of each example in its batch.

    The share is a gradient: an `assign_add` would also count the example that stands in where a worker has none.
    """
    import tensorflow as tf

    from runner import EstimatorSpec

    v1 = tf.compat.v1
    hidden = tf.tanh(features["x"] @ v1.get_variable("hidden", [4, 3], tf.float64))
    if mode == "train":
        hidden = tf.nn.dropout(hidden, 0.3)
    seen = v1.get_variable("seen", [NUM_EXAMPLES, 1], tf.float64, v1.zeros_initializer())
    own = tf.one_hot(features["id"], NUM_EXAMPLES, dtype=tf.float64) @ seen
    errors = hidden @ v1.get_variable("out", [3, 1], tf.float64) - labels
    loss = tf.reduce_mean(tf.square(errors) + own - tf.stop_gradient(own))
    others = [variable for variable in v1.trainable_variables() if variable is not seen]
    update = v1.train.MomentumOptimizer(0.03, 0.5).minimize(loss, v1.train.get_global_step(), others)
    count = v1.train.GradientDescentOptimizer(-1.0).minimize(loss, var_list=[seen])
    return EstimatorSpec(mode, loss=loss, train_op=tf.group(count, update))


def _examples() -> tuple[dict[str, np.ndarray], np.ndarray]:
    from tests.support.models import data

    features, labels = data(NUM_EXAMPLES, "float64")
    return {"x": features, "id": np.arange(NUM_EXAMPLES)}, labels


def train_input(mode: str, params: Any, config: Any, num_epochs: int | None = None) -> Any:
    from input_fns._batches import batches_of_arrays

    return batches_of_arrays(_examples(), NUM_EXAMPLES, mode, params, config, num_epochs)


def eval_input() -> Any:
    """An evaluation that notes its beginning and takes half a second."""
    import tensorflow as tf

    def noted(number: np.ndarray) -> np.ndarray:
        if number == 0:
            with open("evaluating", "a") as file:
                file.write(".")
        time.sleep(0.1)
        return number

    batches = tf.data.Dataset.from_tensor_slices(_examples()).batch(5)
    numbers = tf.data.Dataset.range(5).map(lambda one: tf.ensure_shape(tf.numpy_function(noted, [one], tf.int64), []))
    return tf.data.Dataset.zip(batches, numbers).map(lambda batch, number: batch)


class Slow(Hook):
    """Takes a while for each step."""

    every = Every(steps=1)

    def after_step(self, run: Any, result: Any) -> None:
        time.sleep(0.03)


def copy_of(folder: Path, workers: int) -> Path:
    """Return where the run of this number of workers has left the folder as it found it."""
    return folder / f"at-{workers}"


if os.environ.get("TF_CONFIG") and Path("copies").exists():  # before the task restores
    place = read_tf_config(os.environ["TF_CONFIG"])
    if place.is_chief and not copy_of(Path.cwd(), place.num_workers).exists():
        shutil.copytree("run", copy_of(Path.cwd(), place.num_workers))


# --- the run ----------------------------------------------------------------------------------------------------------


class Reaper(threading.Thread):
    """Kills each task that starts although its worker is lost.

    Attributes:
      left: number of tasks that may live.
      number: the signal that it sends.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(daemon=True)
        self.left, self.number = workers, signal.SIGKILL
        self._folder, self._all = folder / "run", workers
        self._done: set[int] = set()
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            for rank in range(self.left, self._all):
                self.kill(rank)

    def kill(self, rank: int) -> bool:
        """Send the signal to the task that was started last with this rank, once. Returns: False if it was sent."""
        started = journal.events_in(self._folder, "started", *_role(rank))
        if not started or started[-1]["pid"] in self._done or is_gone(started[-1]["pid"]):
            return False
        self._done.add(started[-1]["pid"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[-1]["pid"], self.number)
        return True

    def close(self) -> None:
        self._is_over.set()
        self.join()


def _role(rank: int) -> tuple[str, int]:
    return ("worker", rank - 1) if rank else ("chief", 0)


class Moment:
    """Tells whether the moment of a loss has come.

    Args:
      folder: where the command was started.
      loss: the loss.
    """

    def __init__(self, folder: Path, loss: Loss) -> None:
        self._folder, self._loss = folder, loss
        self._before = self._number()

    def has_come(self) -> bool:
        return self._number() - self._before >= self._loss.count

    def _number(self) -> int:
        moment, run = self._loss.moment, self._folder / "run"
        if moment == "evaluating":
            noted = self._folder / "evaluating"
            return noted.stat().st_size if noted.exists() else 0
        if moment != "saving":
            return len([line for line in journal.recorded(run) if moment in (line.get("event"), *line)])
        whole = len(journal.events_in(run, "checkpoint"))
        begun = {path.name.split(".data")[0] for path in run.glob("model.ckpt-*") if ".index" not in path.name}
        whole_names = {path.stem for path in run.glob("model.ckpt-*.index")}
        return whole + len({name.split("_temp")[0] for name in begun} - whole_names)


def lose(folder: Path, case: Case, say: Callable[[str], None]) -> None:
    """Do the run in `folder`. Raises: AssertionError: it does not finish with the workers that are left."""
    (folder / "copies").touch()
    asked = (
        f"cluster.num_workers={case.workers}",
        "cluster.min_workers=1",
        f"cluster.max_restarts={case.max_restarts}",
    )
    start = Start(folder, (*SETTINGS, *asked))
    reaper = Reaper(folder, case.workers)
    reaper.start()
    try:
        for number, loss in enumerate(case.losses):
            if number:  # until the run goes on with those that are left
                _wait(start, lambda: len(shrinks(folder)) == number)  # noqa: B023
            moment = Moment(folder, loss)
            _wait(start, moment.has_come)
            time.sleep(loss.secs)
            reaper.number = signal.SIGSTOP if loss.freezes else signal.SIGKILL
            assert reaper.kill(loss.victim), "there is no such task"
            reaper.left -= 1
            say(f"  {loss}")
        assert start.wait() == 0, f"exit code {start.code}: {(folder / 'said.txt').read_text()[-2000:]}"
    finally:
        reaper.close()
        start.popen.terminate()
        start.wait()


def _wait(start: Start, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + END_SECS
    while not condition():
        if start.code is not None or time.monotonic() > end:
            said = (start.folder / "said.txt").read_text()[-2000:]
            raise AssertionError(f"it did not come, exit code {start.code}: {said}")
        time.sleep(0.01)


def shrinks(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the journal that say that a worker was lost for good."""
    return [line for line in journal.events_in(folder / "run", "restart", "supervisor") if "workers" in line]


# --- by hand ----------------------------------------------------------------------------------------------------------


def check(case: Case, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Do the run in `folder`, and by hand. Raises: AssertionError: they differ, or the run is not what was asked."""
    folder = folder.resolve()
    lose(folder, case, say)
    lost = shrinks(folder)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    left = [line["workers"] for line in lost]
    assert left == [case.workers - number for number in range(1, len(case.losses) + 1)]
    assert [one["left"] for one in summary["lost_workers"]] == left
    assert (summary["status"], summary["num_replicas"], summary["global_step"]) == ("finished", left[-1], TOTAL)
    # By which step the next worker was lost, and the folder then.
    ends = [(line["step"] or 0, copy_of(folder, line["workers"])) for line in lost[1:]] + [(TOTAL, folder / "run")]
    for workers, (step, expected) in zip(left, ends, strict=True):
        hand = folder / f"by-hand-{workers}"
        hand.mkdir()
        shutil.copytree(copy_of(folder, workers), hand / "run")
        if step:  # else the next worker was lost before the first checkpoint
            asked = (f"cluster.num_workers={workers}", f"train.max_steps={step}")
            assert Start(hand, (*SETTINGS, *asked)).wait() == 0, (hand / "said.txt").read_text()[-2000:]
            say(f"  by hand with {workers} up to step {step}")
            compare(expected, hand / "run", step)
    steps = {name: {step for step, one in metrics(folder / "run", TOTAL) if one == name} for name in METRICS}
    assert steps == {"train/loss": {*range(1, TOTAL + 1)}, "eval/loss": {*range(SAVE_STEPS, TOTAL, SAVE_STEPS), TOTAL}}
    shares, order = np.zeros([NUM_EXAMPLES, 1]), list[int]()
    settings = SimpleNamespace(tf_random_seed=5)
    for batch, _ in train_input("train", {"batch_size": BATCH_SIZE}, settings, EPOCHS).as_numpy_iterator():
        shares[batch["id"]] += 1 / len(batch["id"])
        order.extend(batch["id"])
    assert all(
        sorted(order[at : at + NUM_EXAMPLES]) == list(range(NUM_EXAMPLES)) for at in range(0, len(order), NUM_EXAMPLES)
    )
    np.testing.assert_allclose(chains.variables(folder / "run", TOTAL)["seen"], shares, rtol=1e-12)


def compare(found: Path, expected: Path, step: int) -> None:
    """Compare a run with one by hand, up to a step. Raises: AssertionError: they differ in a bit."""
    ours, theirs = chains.variables(found, step), chains.variables(expected, step)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    recorded, by_hand = metrics(found, step), metrics(expected, step)
    # By hand the last step is evaluated in any case.
    assert {key for key in by_hand.keys() - recorded.keys() if key[0] != step or key[1] == "train/loss"} == set()
    assert recorded == {key: value for key, value in by_hand.items() if key in recorded}


def metrics(folder: Path, last: int) -> dict[tuple[int, str], float]:
    """Return (step, name) -> the last value of each loss and evaluation."""
    return {
        (step, name): value
        for step, values in journal.metrics_of_steps(folder)
        for name, value in values.items()
        if step <= last and name in METRICS
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    failed, began = list[str](), time.monotonic()
    for number in range(arguments.first, arguments.first + arguments.runs):
        seed = f"{arguments.seed}-{number}"
        case = draw(random.Random(seed))
        print(f"run {seed}: {case.workers} workers, cluster.max_restarts={case.max_restarts}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"lost-workers-{seed}-"))
        try:
            check(case, folder, lambda text: print(text, flush=True))
            shutil.rmtree(folder)
        except Exception:
            failed.append(seed)
            traceback.print_exc(file=sys.stdout)
            print(f"run {seed} failed; its folder is {folder}", flush=True)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    print(f"seed {arguments.seed}, from {arguments.first}: {arguments.runs} runs, failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
