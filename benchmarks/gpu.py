"""Milliseconds per step of models that keep a GPU busy: the Estimator, a loop by hand and Keras fit.

    python benchmarks/gpu.py [--rounds 5] [--steps 20] [--only transformer cnn table]

  transformer  103 million parameters, sequences of 512 tokens, bfloat16, Adam; without and with XLA
  cnn          ResNet-50 on images of 224 x 224, bfloat16, SGD with momentum
  table        10 million rows of 64, of which a batch looks up 213 thousand, and dense layers; Adagrad

Each way trains on one batch, again and again, so that no input is waited for. It runs all its rounds, and is then
forgotten: the memory is that of one way alone. FLOP are estimated: products of matrices and convolutions, and twice as
many for the gradients as for the values. Only by `make bench ONLY=gpu`; without a GPU only --tiny ends.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _processes import forget_peak, memory
from _rounds import Ratio, Times, arguments, show

import runner

layers = keras.layers
OURS = "ours"
BY_HAND = "by hand"
FIT = "Keras fit"
GPUS = tf.config.list_physical_devices("GPU")


@dataclass(frozen=True)
class Workload:
    """A model and the batch that it trains on.

    Attributes:
      build: makes the model, from features to logits.
      losses_of: labels and logits -> losses, `[batch]`.
      batch: features and labels.
      flops: FLOP of a training step on one example, of a model that was built.
      precision: the policy of the layers.
      jits: whether XLA compiles the step; one comparison for each.
    """

    name: str
    build: Callable[[], keras.Model]
    losses_of: Callable[[Any, Any], tf.Tensor]
    build_optimizer: Callable[[], keras.optimizers.Optimizer]
    batch: tuple[np.ndarray, np.ndarray]
    flops: Callable[[keras.Model], float]
    precision: str = "mixed_bfloat16"
    jits: tuple[bool, ...] = (False,)

    @property
    def batch_size(self) -> int:
        return len(self.batch[1])

    def input_fn(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(self.batch).repeat()

    def build_in_precision(self) -> keras.Model:
        """Build the model as `train.precision` would."""
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.precision)
        try:
            return self.build()
        finally:
            keras.config.set_dtype_policy(before)


# --- models -----------------------------------------------------------------------------------------------------------


class Positions(layers.Layer):
    """Adds a vector for each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.vectors = self.add_weight(shape=shape[1:], initializer="normal", name="vectors")

    def call(self, x: Any) -> Any:
        return x + self.vectors


def build_transformer(vocabulary: int, length: int, width: int, heads: int, depth: int) -> keras.Model:
    """Blocks of attention to what came before and of two dense layers, each behind a normalization."""
    ids = keras.Input([length], dtype="int32")
    x = Positions()(layers.Embedding(vocabulary, width)(ids))
    for _ in range(depth):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normal))
    return keras.Model(ids, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


def transformer(tiny: bool) -> Workload:
    vocabulary, length, width, heads, depth = (50, 8, 8, 2, 1) if tiny else (16_384, 512, 768, 12, 11)
    random = np.random.default_rng(1)
    batch_size = 2 if tiny else 32
    ids = random.integers(vocabulary, size=(batch_size, length + 1)).astype(np.int32)

    def flops(model: keras.Model) -> float:
        # Of each token: two for each weight that it meets, and the scores of all tokens and their weighted sum.
        looked_up = vocabulary * width + length * width
        forward = 2 * (model.count_params() - looked_up) + 4 * depth * width * length
        return 3.0 * length * forward

    return Workload(
        "transformer",
        functools.partial(build_transformer, vocabulary, length, width, heads, depth),
        lambda labels, logits: tf.reduce_mean(cross_entropy(labels, logits), 1),
        lambda: keras.optimizers.Adam(1e-4),
        (ids[:, :-1], ids[:, 1:]),
        flops,
        jits=(False, True),
    )


def cross_entropy(labels: Any, logits: Any) -> tf.Tensor:
    labels = tf.cast(labels, tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.cast(logits, tf.float32))


def build_bottleneck(x: Any, filters: int, stride: int) -> Any:
    """Three convolutions beside a way around them."""
    around = x
    if stride != 1 or x.shape[-1] != 4 * filters:
        around = layers.BatchNormalization()(layers.Conv2D(4 * filters, 1, stride, use_bias=False)(x))
    x = layers.Conv2D(filters, 1, use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(4 * filters, 1, use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x) + around)


def build_cnn(size: int, depths: tuple[int, ...], filters: int, classes: int) -> keras.Model:
    images = keras.Input([size, size, 3])
    x = layers.Conv2D(filters, 7, 2, padding="same", use_bias=False)(images)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, depth in enumerate(depths):
        for number in range(depth):
            is_smaller = stage > 0 and number == 0
            x = build_bottleneck(x, filters << stage, 2 if is_smaller else 1)
    return keras.Model(images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def cnn(tiny: bool) -> Workload:
    size, depths, filters, classes = (16, (1, 1), 2, 10) if tiny else (224, (3, 4, 6, 3), 64, 1000)
    random = np.random.default_rng(2)
    batch_size = 2 if tiny else 256
    images = random.normal(size=(batch_size, size, size, 3)).astype(np.float32)

    def flops(model: keras.Model) -> float:
        forward = 0
        for layer in model.layers:
            if isinstance(layer, layers.Conv2D):
                _, height, width, _ = layer.output.shape
                forward += 2 * height * width * int(np.prod(layer.kernel.shape))
        return 3.0 * forward

    return Workload(
        "cnn",
        functools.partial(build_cnn, size, depths, filters, classes),
        cross_entropy,
        lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        (images, random.integers(classes, size=batch_size)),
        flops,
    )


def build_table(rows: int, width: int, columns: int) -> keras.Model:
    ids = keras.Input([columns], dtype="int32")
    x = layers.Flatten()(layers.Embedding(rows, width)(ids))
    x = layers.Dense(512, activation="relu")(x)
    x = layers.Dense(256, activation="relu")(x)
    return keras.Model(ids, layers.Dense(1)(x))


def table(tiny: bool) -> Workload:
    rows, width, columns = (100, 4, 3) if tiny else (10_000_000, 64, 26)
    random = np.random.default_rng(3)
    batch_size = 4 if tiny else 8192
    ids = random.integers(rows, size=(batch_size, columns)).astype(np.int32)

    def losses_of(labels: Any, logits: Any) -> tf.Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)[:, 0]

    return Workload(
        "table",
        functools.partial(build_table, rows, width, columns),
        losses_of,
        lambda: keras.optimizers.Adagrad(0.01),
        (ids, random.integers(2, size=(batch_size, 1)).astype(np.float32)),
        lambda model: 6.0 * (model.count_params() - rows * width),
        precision="float32",
    )


WORKLOADS = {"transformer": transformer, "cnn": cnn, "table": table}


# --- ways to train them -----------------------------------------------------------------------------------------------


class Laps(runner.Hook):
    """Notes the end of each loop of `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.ends: list[Times] = []
        self._steps = steps

    def after_step(self, run: Any, result: runner.StepResult) -> None:
        if result.num_steps == self._steps:
            self.ends.append(Times.now())


def train_ours(workload: Workload, jit: bool, steps: int, rounds: int) -> list[Times]:
    """Train with the Estimator, in one call, whose loops are the rounds."""

    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        logits = workload.build()(features, training=mode == "train")
        losses = workload.losses_of(labels, logits)
        return runner.EstimatorSpec(mode, loss=losses, optimizer=workload.build_optimizer())

    folder = tempfile.mkdtemp(prefix="benchmark-")
    config = runner.RunConfig(
        precision=workload.precision,
        jit=jit,
        steps_per_loop=steps,
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        tensorboard=False,
    )
    laps = Laps(steps)
    runner.Estimator(model_fn, folder, config).train(workload.input_fn, hooks=[laps], steps=steps * (rounds + 2))
    shutil.rmtree(folder)
    return laps.ends


def train_by_hand(workload: Workload, jit: bool, steps: int, rounds: int) -> list[Times]:
    """Train with a function of one step, called in a Python loop; the loss is read at the end of a round."""
    model = workload.build_in_precision()
    optimizer = workload.build_optimizer()
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit or None)
    def step(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(workload.losses_of(labels, model(features, training=True)))
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
        return loss

    ends = []
    batches = iter(workload.input_fn())
    for _ in range(rounds + 2):
        for _ in range(steps):
            loss = step(*next(batches))
        assert np.isfinite(loss.numpy())
        ends.append(Times.now())
    return ends


def train_with_fit(workload: Workload, jit: bool, steps: int, rounds: int) -> list[Times]:
    """Train with Keras; an epoch is a round."""
    ends = []
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(Times.now()))
    model = workload.build_in_precision()
    model.compile(workload.build_optimizer(), workload.losses_of, jit_compile=jit)
    model.fit(workload.input_fn(), steps_per_epoch=steps, epochs=rounds + 2, verbose=0, callbacks=[noting])
    return ends


WAYS = {OURS: train_ours, BY_HAND: train_by_hand, FIT: train_with_fit}


# --- what is measured -------------------------------------------------------------------------------------------------


def forget_peak_memory() -> None:
    """Have the peak count from now on, and without what the way before has left."""
    keras.backend.clear_session()
    gc.collect()
    if GPUS:
        tf.config.experimental.reset_memory_stats("GPU:0")
    else:
        forget_peak()


def peak_memory() -> int:
    """Return bytes: of the GPU, or without one of this process."""
    if GPUS:
        peak: int = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        return peak
    return memory("VmHWM")


def compare(workload: Workload, jit: bool, steps: int, rounds: int) -> None:
    """Run all ways and print their times, speeds and memory."""
    rows = {}
    peaks = {}
    for way, train in WAYS.items():
        forget_peak_memory()
        ends = train(workload, jit, steps, rounds)
        # The first round traces and compiles, and the second still took longer than the others: neither is counted.
        times = [(end - before) / steps for before, end in itertools.pairwise(ends)]
        rows[way] = times[-rounds:]
        peaks[way] = peak_memory()
    compiled = " with XLA" if jit else ""
    title = f"a step of the {workload.name}{compiled}, {workload.batch_size} examples, {steps} steps a round"
    show(title, rows, [Ratio(OURS, BY_HAND), Ratio(OURS, FIT)])

    model = workload.build()
    flops = workload.flops(model) * workload.batch_size
    print(f"\n{model.count_params() / 1e6:.1f} million parameters, {flops / 1e12:.3g} TFLOP a step")
    print(f"{'':12}{'ms a step':>12}{'stdev':>10}{'examples/s':>14}{'TFLOP/s':>10}{'peak GB':>10}")
    for way, times in rows.items():
        walls = [one.wall for one in times]
        secs = statistics.median(walls)
        spread = statistics.stdev(walls) if len(walls) > 1 else 0.0
        print(f"{way:12}{1e3 * secs:12.2f}{1e3 * spread:10.2f}{workload.batch_size / secs:14,.0f}", end="")
        print(f"{flops / secs / 1e12:10.1f}{peaks[way] / 1e9:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    chosen, others = parser.parse_known_args()
    sys.argv[1:] = others
    parsed = arguments(__doc__, 5, steps=(20, 2, "steps of one round"))
    for gpu in GPUS[:1]:
        print(tf.config.experimental.get_device_details(gpu).get("device_name"))
    for name in chosen.only:
        workload = WORKLOADS[name](parsed.tiny)
        for jit in workload.jits:
            compare(workload, jit, parsed.steps, parsed.rounds)


if __name__ == "__main__":
    main()
