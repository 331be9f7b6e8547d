"""Random chains of starts in one model_dir, compared with a run that nobody disturbs.

`python -m tests.support.chains --chains 200 --seed 7` walks 200 of them and prints each that does not come to the same
numbers, with what it was made of. `--first 100` starts at the 101st: a chain depends on the seed and its number alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from input_fns._batches import batches_of_arrays
from runner import Estimator, EstimatorSpec, EvalSpec, Every, Hook, Input, RunConfig, TrainSpec, train_and_evaluate
from runner.checkpoint.reader import Reader
from runner.checkpoint_files.layout import latest_checkpoint
from tests.support.models import data, strategies

v1 = tf.compat.v1

NUM_STARTS, NUM_EXAMPLES, BATCH_SIZE = 6, 25, 4
STEPS_PER_EPOCH = 7
"""The last of them has one example: of two replicas one has none."""
TOTAL = 5 * STEPS_PER_EPOCH
TOLERANCE = 1e-10
STRATEGIES = ("default", "one_device", "mirrored", "central_storage")

strategy_of = functools.cache(strategies)


# --- what is trained ------------------------------------------------------------------------------------------------


def classic(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Momentum of TF 1."""
    hidden = tf.tanh(features @ v1.get_variable("hidden", [4, 3], tf.float64))
    if mode == "train" and params["dropout"]:
        hidden = tf.nn.dropout(hidden, 0.3)
    predictions = hidden @ v1.get_variable("out", [3, 1], tf.float64)
    if mode == "infer":
        return EstimatorSpec(mode, {"y": predictions})
    loss = tf.reduce_mean(tf.square(predictions - labels))
    train_op = v1.train.MomentumOptimizer(0.03, 0.5).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, {"y": predictions}, loss, train_op)


def native(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Layers and an optimizer of Keras 3."""
    hidden = keras.layers.Dense(3, activation="tanh", dtype="float64")(features)
    if params["dropout"]:
        hidden = keras.layers.Dropout(0.3, dtype="float64")(hidden, training=mode == "train")
    predictions = keras.layers.Dense(1, dtype="float64")(hidden)
    if mode == "infer":
        return EstimatorSpec(mode, {"y": predictions})
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, {"y": predictions}, loss, optimizer=keras.optimizers.SGD(0.03, momentum=0.5))


def counting(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A model whose `seen` counts how often each example was trained on."""
    zeros = v1.zeros_initializer()
    aggregation = tf.VariableAggregation.SUM
    seen = v1.get_variable("seen", [NUM_EXAMPLES], tf.float64, zeros, trainable=False, aggregation=aggregation)
    loss = tf.square(v1.get_variable("weight", [], initializer=zeros) - 1.0)
    count = seen.assign_add(tf.reduce_sum(tf.one_hot(features, NUM_EXAMPLES, dtype=tf.float64), axis=0))
    update = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, loss=loss, train_op=tf.group(count, update))


MODELS: dict[str, Callable[..., EstimatorSpec]] = {"classic": classic, "native": native}


# --- what it is trained on ------------------------------------------------------------------------------------------


def arrays() -> Any:
    return data(NUM_EXAMPLES, "float64")


def shipped(mode: str, params: Any, config: Any, num_epochs: int | None = None) -> tf.data.Dataset:
    """What the shipped input functions make of arrays: it ends after the passes that it is told, else never."""
    return batches_of_arrays(arrays(), NUM_EXAMPLES, mode, params, config, num_epochs)


def numbered(mode: str, params: Any, config: Any, num_epochs: int | None = None) -> tf.data.Dataset:
    """The same with the numbers of the examples, for `counting`."""
    numbers = np.arange(NUM_EXAMPLES)
    return batches_of_arrays((numbers, numbers), NUM_EXAMPLES, mode, params, config, num_epochs)


def one_pass(params: Any) -> tf.data.Dataset:
    """A pass, shuffled anew each time: the state of its shuffle is not always in a saved iterator."""
    return tf.data.Dataset.from_tensor_slices(arrays()).shuffle(NUM_EXAMPLES, seed=3).batch(params["batch_size"])


def in_order(params: Any) -> tf.data.Dataset:
    """A pass in order, whose iterator is saved."""
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(params["batch_size"]).prefetch(2)


def endless(params: Any) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(NUM_EXAMPLES, seed=3)
    return dataset.repeat().batch(params["batch_size"]).map(lambda x, y: (x, y), num_parallel_calls=2).prefetch(3)


def generator(params: Any) -> tf.data.Dataset:
    """No iterator over it can be saved."""
    features, labels = arrays()
    signature = (tf.TensorSpec([4], tf.float64), tf.TensorSpec([1], tf.float64))
    dataset = tf.data.Dataset.from_generator(lambda: zip(features, labels, strict=True), output_signature=signature)
    return dataset.batch(params["batch_size"])


def in_turn() -> tf.data.Dataset:
    """Batches of a replica's own, so many that an epoch ends with a step."""
    features, labels = arrays()
    return tf.data.Dataset.from_tensor_slices((features[:24], labels[:24])).batch(2)


_MADE_ENDLESS = ("endless",)
_ONE_PASS = ("one_pass", "in_order", "generator", "in_turn")
"""Without max_epochs each start reads a pass of them, as in tf.estimator, and nobody counts these passes."""
INPUTS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (shipped, one_pass, in_order, endless, generator, in_turn)
}


def train_input(name: str) -> Input:
    if name == "in_turn":
        return Input(in_turn, params={})
    return Input(INPUTS[name], params={}, batch_size=BATCH_SIZE, shard="examples")


def eval_input() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(8)


# --- chains ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a chain.

    Attributes:
      ending: limit (its limits end it), stop, interrupt or kill: at step `at`, where it comes that far.
      before: none, evaluate or predict: what somebody does with the model_dir before it.
    """

    strategy: str
    max_steps: int | None
    max_epochs: int | None
    save_steps: int
    steps_per_loop: int | None
    ending: str
    at: int
    before: str


@dataclasses.dataclass(frozen=True)
class Chain:
    """Starts in one model_dir; the last one has the limits and the strategy of the undisturbed run."""

    model: str
    input: str
    dropout: bool
    starts: tuple[Start, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the numbers are those of the undisturbed run to the bit: the strategy stays."""
        return len({start.strategy for start in self.starts}) == 1


def draw(rng: random.Random) -> Chain:
    """Return a random chain. Its limits grow and shrink, and are now of one kind, now of the other."""
    changes = rng.random() < 0.5
    kept = rng.choice(STRATEGIES)
    # Dropout draws for each replica; batches of a replica's own are others with other replicas.
    data = rng.choice([name for name in INPUTS if not changes or name != "in_turn"])
    starts = []
    for number in range(NUM_STARTS):
        is_last = number == NUM_STARTS - 1
        max_steps = rng.choice([None, rng.randint(1, TOTAL), TOTAL])
        max_epochs = rng.choice([20 if data in _ONE_PASS else None, rng.randint(1, 5), 20])
        if data in _MADE_ENDLESS:
            max_epochs = None  # refused, and documented
        if (max_steps is None and max_epochs in (None, 20)) or data == "in_turn" or is_last:
            max_steps = max_steps or TOTAL
        if is_last:
            max_steps = TOTAL
        if is_last and data not in _MADE_ENDLESS:
            max_epochs = 20
        starts.append(
            Start(
                rng.choice(STRATEGIES) if changes else kept,
                max_steps,
                max_epochs,
                rng.choice([1, 2, 3, 7, 100]),
                rng.choice([None, 1, 3, 5]),
                "limit" if is_last else rng.choice(["limit", "stop", "interrupt", "kill"]),
                rng.randint(1, TOTAL),
                rng.choice(["none", "none", "evaluate", "predict"]),
            )
        )
    return Chain(rng.choice(list(MODELS)), data, not changes and rng.random() < 0.5, tuple(starts))


class Killed(RuntimeError):
    """Stands for a process that was killed: nothing is saved any more."""


@dataclasses.dataclass(frozen=True)
class _EndsAt(Every):
    """A loop ends at each multiple, and each loop is told of."""

    at: int = 100

    def steps_until_due(self, step: int) -> float:
        return self.at - step % self.at


class Watch(Hook):
    """Notes the losses by step, those of a step that is taken again over the earlier ones; ends a start."""

    def __init__(self, losses: dict[int, float], ending: str = "limit", at: int = 0) -> None:
        self._losses, self._ending, self._at = losses, ending, at
        self.every = _EndsAt(at=at or 100)

    def after_step(self, run: Any, result: Any) -> None:
        self._losses |= zip(range(result.first_step, result.last_step + 1), result.losses.tolist(), strict=True)
        if result.last_step != self._at or self._ending == "limit":
            return
        if self._ending == "kill":
            raise Killed
        (run.request_stop if self._ending == "stop" else run.interrupt)("the chain says so")


def train(chain: Chain, start: Start, model_dir: Path, losses: dict[int, float]) -> int:
    """Do one start of a chain. Returns: the global step that it came to."""
    config = RunConfig(
        check_replicas=True,
        train_distribute=strategy_of()[start.strategy],
        save_checkpoints_steps=start.save_steps,
        steps_per_loop=start.steps_per_loop,
        tf_random_seed=5,
        tensorboard=False,
    )
    params = {"dropout": chain.dropout}
    estimator = Estimator(MODELS[chain.model], model_dir, config, params)
    if estimator.latest_checkpoint() is not None:
        if start.before == "evaluate":
            estimator.evaluate(eval_input)
        if start.before == "predict":
            assert len(list(estimator.predict(eval_input))) == NUM_EXAMPLES
    watch = Watch(losses, start.ending, start.at)
    spec = TrainSpec(train_input(chain.input), start.max_steps, hooks=[watch], max_epochs=start.max_epochs)
    evaluations = [EvalSpec(eval_input, throttle_secs=0)] if start.before == "evaluate" else []
    with contextlib.suppress(Killed):
        return train_and_evaluate(estimator, spec, evaluations).global_step
    return -1


@functools.cache
def undisturbed(model: str, input: str, dropout: bool, strategy: str) -> tuple[dict[int, float], dict[str, np.ndarray]]:
    """Return the losses by step and the variables of one start that takes all steps."""
    max_epochs = None if input in _MADE_ENDLESS else 20
    start = Start(strategy, TOTAL, max_epochs, 1000, None, "limit", 0, "none")
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        train(Chain(model, input, dropout, (start,)), start, Path(folder), losses)
        return losses, variables(folder)


def variables(model_dir: Any, total: int = TOTAL) -> dict[str, np.ndarray]:
    """Return the variables of the last checkpoint, slots included, without what the runner notes beside them."""
    path = latest_checkpoint(model_dir)
    assert path is not None and path.endswith(f"-{total}"), f"ended at {path}, not at step {total}"
    reader = Reader(path)
    return reader.get_many(name for name in reader.names() if not name.startswith("_runner"))


def check(chain: Chain, folder: Path) -> None:
    """Train the chain in `folder`. Raises: AssertionError: it does not come to the undisturbed run's numbers."""
    losses: dict[int, float] = {}
    for start in chain.starts:
        train(chain, start, folder, losses)
    found = variables(folder)
    expected_losses, expected = undisturbed(chain.model, chain.input, chain.dropout, chain.starts[-1].strategy)
    assert set(found) == set(expected)
    assert sorted(losses) == sorted(expected_losses) == list(range(1, TOTAL + 1))
    tolerance = 0.0 if chain.is_exact else TOLERANCE
    steps = range(1, TOTAL + 1)
    np.testing.assert_allclose(
        [losses[step] for step in steps], [expected_losses[step] for step in steps], rtol=tolerance, atol=tolerance
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    from runner.distribute.strategy import split_cpu

    split_cpu(2)
    failed, started = 0, time.monotonic()
    for number in range(arguments.first, arguments.first + arguments.chains):
        seed = f"{arguments.seed}-{number}"
        chain = draw(random.Random(seed))
        try:
            with tempfile.TemporaryDirectory() as folder:
                check(chain, Path(folder))
        except Exception:
            failed += 1
            print(
                f"chain {seed} failed: {chain.model}, {chain.input}, dropout={chain.dropout}", *chain.starts, sep="\n  "
            )
            traceback.print_exc()
        if number % 10 == 9:
            print(f"up to chain {number}: {failed} failed, {time.monotonic() - started:.0f} s", flush=True)
    which = f"seed {arguments.seed}, from {arguments.first}"
    print(f"{which}: {arguments.chains} chains of {NUM_STARTS} starts, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
