"""Programs in wide use whose model_fn writes to its variables by itself, each in the form that is copied around.

Each is a classic model_fn on float64 batches `(x [batch, 4], y [batch])`. On several replicas it comes to the numbers
of one device (EQUAL), or is refused (REFUSED).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import runner
from runner import Estimator, EstimatorSpec, Input, RunConfig

v1 = tf.compat.v1
BATCH_SIZE, EXAMPLES, STEPS = 12, 37, 7
"""The fourth batch of an epoch has one example, so that all replicas but one have none."""


def batches(mode: str | None = None) -> tf.data.Dataset:
    chance = np.random.default_rng(0)
    x = chance.normal(size=[EXAMPLES, 4])
    y = x @ [1.0, -2.0, 0.5, 0.0] + chance.normal(size=EXAMPLES) / 8
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE).repeat()


def variable(name: str, shape: Any = (), start: float = 0.0, **more: Any) -> tf.Variable:
    return v1.get_variable(name, shape, tf.float64, v1.constant_initializer(start), **more)


def some(name: str, shape: Any, **more: Any) -> tf.Variable:
    """A variable that begins with numbers that are not all the same."""
    start = np.linspace(-0.4, 0.5, int(np.prod(shape))).reshape(shape)
    return v1.get_variable(name, shape, tf.float64, v1.constant_initializer(start), **more)


def linear(x: tf.Tensor) -> tf.Tensor:
    kernel, bias = some("kernel", [4, 1]), variable("bias", [1])
    return tf.squeeze(x @ kernel + bias, 1)


def spec_of(mode: str, loss: tf.Tensor, *updates: Any) -> EstimatorSpec:
    """The step counts itself, after the updates."""
    with tf.control_dependencies([tf.group(*updates)]):
        return EstimatorSpec(mode, loss=loss, train_op=v1.assign_add(v1.train.get_global_step(), 1))


class AdamWeightDecay(v1.train.Optimizer):  # type: ignore[name-defined]
    """As google-research/bert's optimization.py: an apply_gradients of its own, no bias correction."""

    def __init__(self, rate: float, decay: float = 0.01, scale_of: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__(False, "AdamWeightDecay")
        self._rate, self._decay, self._scale_of = rate, decay, scale_of

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        updates = []
        for gradient, weights in grads_and_vars:
            if gradient is None:
                continue
            slot = weights.name.partition(":")[0]
            m = variable(f"{slot}/adam_m", weights.shape, trainable=False)
            v = variable(f"{slot}/adam_v", weights.shape, trainable=False)
            next_m = 0.9 * m + 0.1 * gradient
            next_v = 0.999 * v + 0.001 * tf.square(gradient)
            update = next_m / (tf.sqrt(next_v) + 1e-6) + self._decay * weights
            ratio = 1.0 if self._scale_of is None else self._scale_of(weights, update)
            updates += [weights.assign(weights - self._rate * ratio * update), m.assign(next_m), v.assign(next_v)]
        return tf.group(*updates, name=name)


def bert(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    weights = v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(v1.gradients(loss, weights), 1.0)
    return spec_of(mode, loss, AdamWeightDecay(0.01).apply_gradients(zip(gradients, weights, strict=True)))


def lamb(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean(tf.square(linear(features) - labels))

    def ratio(weights: Any, update: Any) -> Any:
        of_weights, of_update = tf.norm(weights), tf.norm(update)
        return tf.where(of_weights > 0, tf.where(of_update > 0, of_weights / of_update, 1.0), 1.0)

    weights = v1.trainable_variables()
    pairs = zip(v1.gradients(loss, weights), weights, strict=True)
    return spec_of(mode, loss, AdamWeightDecay(0.05, scale_of=ratio).apply_gradients(pairs))


def lookahead(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Every third step the slow weights go half of the way, and the weights start from there."""
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    step = v1.train.get_global_step()
    weights = v1.trainable_variables()
    slow = [variable(f"slow/{one.op.name}", one.shape, trainable=False) for one in weights]
    inner = v1.train.AdamOptimizer(0.05).minimize(loss)

    def synchronize() -> tf.Operation:
        moved = []
        for before, now in zip(slow, weights, strict=True):
            halfway = before + 0.5 * (now - before)
            moved += [before.assign(halfway), now.assign(halfway)]
        return tf.group(*moved)

    with tf.control_dependencies([inner]):
        outer = tf.cond(tf.equal((step + 1) % 3, 0), synchronize, tf.no_op)
    return spec_of(mode, loss, outer)


def accumulation(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Gradients of three steps are added up by hand, and applied in a branch."""
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    step = v1.train.get_global_step()
    optimizer = v1.train.AdamOptimizer(0.05)
    pairs = optimizer.compute_gradients(loss)
    sums = [variable(f"sum/{one.op.name}", one.shape, trainable=False) for _, one in pairs]
    added = [total.assign_add(gradient) for total, (gradient, _) in zip(sums, pairs, strict=True)]

    def apply() -> tf.Operation:
        means = [(total / 3.0, one) for total, (_, one) in zip(sums, pairs, strict=True)]
        applied = optimizer.apply_gradients(means)
        with tf.control_dependencies([applied]):
            return tf.group(*[total.assign(tf.zeros_like(total)) for total in sums])

    with tf.control_dependencies(added):
        applied = tf.cond(tf.equal((step + 1) % 3, 0), apply, tf.no_op)
    return spec_of(mode, loss, applied)


def k_means(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """The centroids become the means of their members."""
    centroids = some("centroids", [3, 4])
    distances = tf.reduce_sum(tf.square(features[:, None] - centroids[None]), -1)
    nearest = tf.argmin(distances, 1)
    members = tf.one_hot(nearest, 3, dtype=tf.float64)
    number = tf.reduce_sum(members, 0)[:, None]
    means = tf.matmul(members, features, transpose_a=True) / tf.maximum(number, 1.0)
    loss = tf.reduce_mean(tf.reduce_min(distances, 1))
    return spec_of(mode, loss, centroids.assign(tf.where(number > 0, means, centroids)))


def word2vec(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Negative sampling by hand: one word of the batch's own is drawn by its position."""
    words, contexts = some("words", [8, 4]), some("contexts", [8, 4])
    word = tf.cast(tf.math.floormod(tf.math.floor(features[:, 0] * 4), 8), tf.int32)
    context = tf.cast(tf.math.floormod(tf.math.floor(labels * 4), 8), tf.int32)
    negative = tf.math.floormod(context + 3, 8)
    vector = tf.nn.embedding_lookup(words, word)
    near = tf.reduce_sum(vector * tf.nn.embedding_lookup(contexts, context), 1)
    far = tf.reduce_sum(vector * tf.nn.embedding_lookup(contexts, negative), 1)
    loss = tf.reduce_mean(tf.nn.softplus(-near) + tf.nn.softplus(far))
    train = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
    norm = variable("mean_norm", trainable=False)
    return spec_of(mode, loss, train, norm.assign(0.9 * norm + 0.1 * tf.reduce_mean(tf.norm(vector, axis=1))))


def ema(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Moving averages by hand: of the loss, of the features' mean and variance, of the weights."""
    predicted = linear(features)
    loss = tf.reduce_mean(tf.square(predicted - labels))
    train = v1.train.GradientDescentOptimizer(0.05).minimize(loss)
    of_loss, mean, variance = variable("loss_ema"), variable("mean", [4]), variable("variance", [4], 1.0)
    now, spread = tf.reduce_mean(features, 0), tf.reduce_mean(tf.square(features), 0)
    updates = [
        of_loss.assign(0.9 * of_loss + 0.1 * loss),
        mean.assign_sub(0.1 * (mean - now)),
        variance.assign(0.9 * variance + 0.1 * (spread - tf.square(now))),
    ]
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([train]):
        updates.append(average.apply([one for one in v1.trainable_variables() if one.op.name in ("kernel", "bias")]))
    return spec_of(mode, loss, *updates)


def spectral_norm(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    kernel = some("kernel", [4, 3])
    u = some("u", [1, 3], trainable=False)
    v = tf.nn.l2_normalize(tf.matmul(u, kernel, transpose_b=True))
    new_u = tf.nn.l2_normalize(tf.matmul(v, kernel))
    v, new_u = tf.stop_gradient(v), tf.stop_gradient(new_u)
    sigma = tf.squeeze(tf.matmul(tf.matmul(v, kernel), new_u, transpose_b=True))
    loss = tf.reduce_mean(tf.square(tf.reduce_sum(features @ (kernel / sigma), 1) - labels))
    train = v1.train.AdamOptimizer(0.05).minimize(loss)
    return spec_of(mode, loss, train, u.assign(new_u))


def target_network(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Soft updates of reinforcement learning: the target follows the weights."""
    kernel, target = some("kernel", [4, 1]), some("target", [4, 1])
    wanted = labels + 0.9 * tf.stop_gradient(tf.squeeze(features @ target, 1))
    loss = tf.reduce_mean(tf.square(tf.squeeze(features @ kernel, 1) - wanted))
    train = v1.train.AdamOptimizer(0.05).minimize(loss, var_list=[kernel])
    with tf.control_dependencies([train]):
        soft = target.assign(0.8 * target + 0.2 * kernel.read_value())
    return spec_of(mode, loss, soft)


def gradient_penalty(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Two networks in turn, of which one has a penalty for the gradient with respect to its input."""
    generator, critic = some("generator", [4, 4]), some("critic", [4, 1])
    fake = tf.tanh(features @ generator)
    middle = 0.3 * features + 0.7 * fake
    slope = v1.gradients(tf.square(middle @ critic), middle)[0]
    penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
    of_critic = tf.reduce_mean(fake @ critic) - tf.reduce_mean(features @ critic) + 10.0 * penalty
    of_generator = -tf.reduce_mean(fake @ critic)
    first = v1.train.AdamOptimizer(0.01).minimize(of_critic, var_list=[critic])
    second = v1.train.AdamOptimizer(0.02, name="Second").minimize(of_generator, var_list=[generator])
    return spec_of(mode, of_critic, first, second)


def vq_vae(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A codebook that follows moving averages of sums, as sonnet's VectorQuantizerEMA."""
    encoder, codebook = some("encoder", [4, 2]), some("codebook", [3, 2], trainable=False)
    size, total = variable("size", [3], 1.0, trainable=False), some("total", [3, 2], trainable=False)
    code = features @ encoder
    distances = (
        tf.reduce_sum(tf.square(code), 1, keepdims=True)
        - 2.0 * tf.matmul(code, codebook, transpose_b=True)
        + tf.reduce_sum(tf.square(codebook), 1)[None]
    )
    members = tf.one_hot(tf.argmin(distances, 1), 3, dtype=tf.float64)
    quantized = tf.matmul(members, codebook)
    loss = tf.reduce_mean(tf.square(tf.stop_gradient(quantized) - code)) + tf.reduce_mean(
        tf.square(tf.reduce_sum(code, 1) - labels)
    )
    train = v1.train.AdamOptimizer(0.05).minimize(loss, var_list=[encoder])
    new_size = size.assign(0.9 * size + 0.1 * tf.reduce_sum(members, 0))
    new_total = total.assign(0.9 * total + 0.1 * tf.matmul(members, tf.stop_gradient(code), transpose_a=True))
    number = tf.reduce_sum(new_size)
    smoothed = (new_size + 1e-5) / (number + 3e-5) * number
    return spec_of(mode, loss, train, codebook.assign(new_total / smoothed[:, None]))


def counter(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """The rate falls with the number of examples, not of steps."""
    seen = v1.get_variable("seen", [], tf.int64, v1.zeros_initializer(), trainable=False)
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    rate = 0.1 / (1.0 + tf.cast(seen, tf.float64) / 20.0)
    train = v1.train.GradientDescentOptimizer(rate).minimize(loss)
    with tf.control_dependencies([train]):
        return spec_of(mode, loss, seen.assign_add(tf.shape(features, out_type=tf.int64)[0]))


def counter_with_sum(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    seen = v1.get_variable(
        "seen", [], tf.int64, v1.zeros_initializer(), trainable=False, aggregation=tf.VariableAggregation.SUM
    )
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    return spec_of(mode, loss, seen.assign_add(tf.shape(features, out_type=tf.int64)[0]))


def mean_with_mean(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """As the statistics of tf.layers.batch_normalization, which say so themselves."""
    mean = variable("moving_mean", [4], trainable=False, aggregation=tf.VariableAggregation.MEAN)
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    train = v1.train.GradientDescentOptimizer(0.05).minimize(loss)
    return spec_of(mode, loss, train, mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(features, 0)))


def center_loss(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Each example pulls the center of its class."""
    centers = some("centers", [3, 4], trainable=False)
    kind = tf.cast(tf.math.floormod(tf.math.floor(labels), 3), tf.int32)
    own = tf.gather(centers, kind)
    loss = tf.reduce_mean(tf.square(linear(features) - labels)) + 0.1 * tf.reduce_mean(tf.square(features - own))
    train = v1.train.AdamOptimizer(0.05).minimize(loss, var_list=v1.trainable_variables())
    return spec_of(mode, loss, train, v1.scatter_sub(centers, kind, 0.1 * (own - features)))


def stateful_lstm(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    state = variable("state", [4], trainable=False)
    output = tf.tanh(features + state)
    loss = tf.reduce_mean(tf.square(linear(output) - labels))
    return spec_of(mode, loss, v1.train.AdamOptimizer(0.05).minimize(loss), state.assign(output[-1]))


def running_max(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    largest = variable("largest", [4], 1.0, trainable=False)
    loss = tf.reduce_mean(tf.square(linear(features / largest) - labels))
    train = v1.train.AdamOptimizer(0.05).minimize(loss)
    return spec_of(mode, loss, train, largest.assign(tf.maximum(largest, tf.reduce_max(tf.abs(features), 0))))


def bank_of_rows(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A memory of the last rows, written by slices, of which each replica has its own."""
    bank = variable("bank", [BATCH_SIZE, 4], 1.0, trainable=False)
    loss = tf.reduce_mean(tf.square(linear(features * tf.reduce_mean(bank, 0)) - labels))
    train = v1.train.AdamOptimizer(0.05).minimize(loss)
    return spec_of(mode, loss, train, bank[0].assign(features[-1]))


def bank_of_all_rows(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """As bank_of_rows, of the global batch; its first row counts the steps."""
    bank = variable("bank", [BATCH_SIZE + 1, 4], 1.0, trainable=False)
    loss = tf.reduce_mean(tf.square(linear(features * tf.reduce_mean(bank[1:], 0)) - labels))
    train = v1.train.AdamOptimizer(0.05).minimize(loss)
    rows = runner.all_gather(features)
    return spec_of(mode, loss, train, bank[0].assign(bank[0] + 1.0), bank[1 : 1 + tf.shape(rows)[0]].assign(rows))


def table_of_counts(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Counts in a lookup table, to which each replica adds."""
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.0, name="table_of_counts")
    keys = tf.cast(tf.round(features[:, 0]), tf.int64)
    seen = counts.lookup(keys)
    loss = tf.reduce_mean(tf.square(linear(features) - labels - seen))
    return spec_of(mode, loss, v1.train.AdamOptimizer(0.05).minimize(loss), counts.insert(keys, seen + 1.0))


def clipped(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean(tf.square(linear(features) - labels))
    weights = v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, weights), 0.5)
    train = v1.train.AdamOptimizer(0.05).apply_gradients(zip(gradients, weights, strict=True))
    return spec_of(mode, loss, train)


def by_tape(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Keras 3 layers; the gradients of a tape are clipped, and written by hand."""
    layer = keras.layers.Dense(1, dtype="float64", kernel_initializer="ones", name="dense")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.squeeze(layer(features), 1) - labels))
    weights = layer.trainable_variables
    gradients = [tf.clip_by_norm(one, 0.1) for one in tape.gradient(loss, weights)]
    updates = [one.assign_sub(0.5 * gradient) for gradient, one in zip(gradients, weights, strict=True)]
    return spec_of(mode, loss, *[operation for operation in updates if operation is not None])


def loss_of_negatives(features: Any, labels: Any) -> tf.Tensor:
    """A recommender's losses: the answers of all other examples are the wrong ones."""
    queries = features @ some("query", [4, 3])
    answers = tf.stack([labels, tf.square(labels), tf.ones_like(labels)], 1) @ some("answer", [3, 3])
    rows = tf.shape(queries)[0]
    scores = tf.matmul(queries, runner.all_gather(answers), transpose_b=True)
    right = runner.replica_offset(rows) + tf.range(rows)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(right, scores)


def in_batch_negatives(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean(loss_of_negatives(features, labels))
    return spec_of(mode, loss, v1.train.GradientDescentOptimizer(0.1).minimize(loss))


def in_batch_negatives_native(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    return EstimatorSpec(mode, loss=loss_of_negatives(features, labels), optimizer=optimizer)


def greatest_of_all(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """As running_max, of the global batch."""
    largest = variable("largest", [4], 1.0, trainable=False)
    loss = tf.reduce_mean(tf.square(linear(features / largest) - labels))
    train = v1.train.AdamOptimizer(0.05).minimize(loss)
    of_all = tf.reduce_max(tf.abs(runner.all_gather(features)), 0)
    return spec_of(mode, loss, train, largest.assign(tf.maximum(largest, of_all)))


EQUAL = (
    bert, lamb, lookahead, accumulation, k_means, word2vec, ema, spectral_norm, target_network, gradient_penalty,
    vq_vae, counter, counter_with_sum, mean_with_mean, clipped, by_tape, in_batch_negatives, in_batch_negatives_native,
    greatest_of_all, bank_of_all_rows,
)  # fmt: skip
"""Their numbers are those of one device."""

REFUSED = {center_loss: "centers", stateful_lstm: "state", running_max: "largest", bank_of_rows: "bank"}
"""Program -> the variable that the refusal names."""

FIRST = (
    bert, accumulation, ema, vq_vae, counter_with_sum, mean_with_mean, in_batch_negatives, by_tape, bank_of_all_rows,
)  # fmt: skip
"""Of these, those that show most."""

OF_WORKERS = (bert, accumulation, vq_vae, in_batch_negatives)
"""Of these, those that two workers train in `make test`."""

MORE_OF_WORKERS = (word2vec, counter_with_sum, mean_with_mean, by_tape, bank_of_all_rows)
"""And in `make test-slow`: what is merged in other ways."""


def trained(
    program: Callable[..., EstimatorSpec], folder: Path, config: RunConfig, batch_size: int | None = None
) -> dict[str, np.ndarray]:
    """Train for STEPS steps. Return name -> value of each variable.

    Args:
      batch_size: of the global batch, which is divided over the replicas; None: one replica has it.
    """
    estimator = Estimator(program, folder, config)
    estimator.train(Input(batches, batch_size=batch_size, shard="examples"), max_steps=STEPS)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def refusal(program: Callable[..., EstimatorSpec], folder: Path, config: RunConfig) -> str:
    """Return what the program is refused with; '': it is not."""
    try:
        trained(program, folder, config, BATCH_SIZE)
    except ValueError as error:
        return str(error)
    return ""
