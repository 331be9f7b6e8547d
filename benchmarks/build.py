"""Seconds from a model_fn with many layers to its first steps and first evaluation: the Estimator, and by hand.

    python benchmarks/build.py [--rounds 5] [--layers 300] [--steps 50]
    python benchmarks/build.py --layers 120 --profile

Dense layers of 64 units (first_step/deep.py) with Adam on batches of 64; `--steps` training steps in one tf.function,
then an evaluation of as many batches. By hand: layers, optimizer variables and a `tf.range` loop over a raw iterator;
for the evaluation another loop over the same layers. TensorFlow is already imported; every round builds everything
again.

The Estimator's times include the checkpoints of step 0 and of the last step, like a whole call of `train`. CPU seconds
are those of all threads. Garbage is collected only before each case, because a collection walks the objects of all
rounds and would fall into a random case. `--profile` prints the costs of one build by the Estimator instead.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import os
import pstats
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _rounds import Case, Ratio, Times, arguments, measure, show

sys.path.insert(0, str(Path(__file__).parent / "first_step"))
import deep

import runner

BATCH, WIDTH = 64, 64
COSTS = 25


def input_fn() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    images = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    batch = {"image": images}, random.integers(10, size=BATCH)
    return tf.data.Dataset.from_tensors(batch).repeat().prefetch(2)


@contextlib.contextmanager
def timed(rows: dict[str, Times], name: str) -> Iterator[None]:
    """Add the times of the code inside this context to `rows`."""
    gc.collect()
    gc.disable()
    started = Times.now()
    try:
        yield
        rows[name] = Times.now() - started
    finally:
        gc.enable()


def ours(layers: int, steps: int, directory: Path) -> Case:
    """Return a case: a new Estimator in its own folder, `train`, then `evaluate`."""

    def case() -> dict[str, Times]:
        deep.NUM_HIDDEN = layers
        rows: dict[str, Times] = {}
        with timed(rows, f"{layers} layers, ours"):
            estimator = runner.Estimator(deep.model_fn, tempfile.mkdtemp(dir=directory))
            estimator.train(input_fn, steps=steps)
        with timed(rows, f"{layers} layers, evaluation, ours"):
            estimator.evaluate(input_fn, steps=steps)
        return rows

    return case


def by_hand(layers: int, steps: int) -> Case:
    """Return a case: the same as a user would write it. Everything is built before the only trace."""

    def case() -> dict[str, Times]:
        deep.NUM_HIDDEN = layers
        rows: dict[str, Times] = {}
        with timed(rows, f"{layers} layers, by hand"):
            built = _built()
            variables = [variable for layer in built for variable in layer.trainable_variables]
            optimizer = keras.optimizers.Adam(0.001)
            optimizer.build(variables)
            _train_loop(built, variables, optimizer)(iter(input_fn()), tf.constant(steps)).numpy()
        with timed(rows, f"{layers} layers, evaluation, by hand"):
            _eval_loop(built)(iter(input_fn()), tf.constant(steps)).numpy()
        return rows

    return case


def _built() -> list[keras.layers.Layer]:
    shape: tuple[int | None, ...] = (None, WIDTH)
    built = deep.layers()
    for layer in built:
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    return built


def _losses(layers: Sequence[keras.layers.Layer], element: tuple[dict[str, tf.Tensor], tf.Tensor]) -> tf.Tensor:
    features, labels = element
    x = features["image"]
    for layer in layers:
        x = layer(x)
    return deep.loss_of(x, labels)


def _train_loop(layers: Sequence[keras.layers.Layer], variables: list, optimizer: keras.Optimizer) -> Callable:
    @tf.function
    def loop(iterator: tf.data.Iterator, steps: tf.Tensor) -> tf.Tensor:
        found = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(_losses(layers, next(iterator)))
            optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
            found = found.write(step, loss)
        return found.stack()

    return loop


def _eval_loop(layers: Sequence[keras.layers.Layer]) -> Callable:
    @tf.function
    def loop(iterator: tf.data.Iterator, steps: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for _ in tf.range(steps):
            total += tf.reduce_sum(_losses(layers, next(iterator)))
        return total

    return loop


def profile(case: Case) -> None:
    """Print where one build spends its time in Python. TensorFlow's C++ time appears in the calls that wait for it."""
    case()  # work that is done once per process
    recorded = cProfile.Profile()
    recorded.runcall(case)
    pstats.Stats(recorded).sort_stats("tottime").print_stats(COSTS).sort_stats("cumtime").print_stats(3 * COSTS)


def main() -> None:
    sys.argv, with_profile = [one for one in sys.argv if one != "--profile"], "--profile" in sys.argv
    parsed = arguments(
        __doc__, 5, layers=(300, 3, "Dense layers of the model"), steps=(50, 2, "steps of training and of evaluation")
    )
    with tempfile.TemporaryDirectory() as folder:
        mine = ours(parsed.layers, parsed.steps, Path(folder))
        if with_profile:
            profile(mine)
            return
        rows = measure([by_hand(parsed.layers, parsed.steps), mine], parsed.rounds)
        name = f"{parsed.layers} layers"
        ratios = [
            Ratio(f"{name}, ours", f"{name}, by hand", 1.05),
            Ratio(f"{name}, evaluation, ours", f"{name}, evaluation, by hand", 1.0),
        ]
        show(f"build and {parsed.steps} steps", rows, ratios, "s")


if __name__ == "__main__":
    main()
