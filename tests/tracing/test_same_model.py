"""What workers compare before they make the variables of a model: which differences are refused, and which are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.tracing import trace_step
from runner.tracing.same_model import WorkersDifferError
from tests.support.two_workers import two_workers

v1 = tf.compat.v1
Build = Callable[[tf.Tensor, int], tf.Tensor]
"""Returns the outputs `[batch, 4]` of a model for features `[batch, 3]` on the worker of that number."""
Layer = keras.layers.Dense


def data() -> tf.data.Dataset:
    features = tf.reshape(tf.range(24, dtype=tf.float32), [8, 3]) / 24
    return tf.data.Dataset.from_tensor_slices((features, features[:, 0])).batch(8)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Build], None]:
    def train_both(build: Build) -> None:
        workers = two_workers()
        for worker, collectives in enumerate(workers):
            monkeypatch.setattr(trace_step, "collectives_of", lambda strategy, one=collectives: one)

            def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str, params: int) -> EstimatorSpec:
                loss = tf.reduce_mean((build(features, params) - labels[:, None]) ** 2, 1)
                return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))

            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            config = RunConfig(train_distribute=strategy, tf_random_seed=3, tensorboard=worker == 0)
            Estimator(model_fn, tmp_path / str(worker), config, worker).train(data, max_steps=1)
        assert workers[0].said

    return train_both


# --- what differs, and is refused -------------------------------------------------------------------------------------


def other_columns(features: tf.Tensor, worker: int) -> tf.Tensor:
    columns = {"a": features[:, :1], "b": features[:, 1:2]}
    order = reversed(columns) if worker else columns
    by_name = {name: Layer(4)(columns[name]) for name in order}
    return by_name["a"] + by_name["b"]


def other_order_of_equal_tables(features: tf.Tensor, worker: int) -> tf.Tensor:
    ids = tf.cast(features * 3, tf.int32)
    names = {"user": ids[:, 0], "item": ids[:, 1]}
    tables = {name: keras.layers.Embedding(5, 4) for name in names}
    vectors = {name: tables[name](names[name]) for name in (reversed(names) if worker else names)}
    return Layer(4)(tf.concat([vectors["user"], vectors["item"]], 1))


def other_order_of_inputs(features: tf.Tensor, worker: int) -> tf.Tensor:
    parts = [features, features * 2]
    hidden = Layer(4)(tf.concat(parts[::-1] if worker else parts, 1))
    return Layer(4)(hidden)


def other_shapes(features: tf.Tensor, worker: int) -> tf.Tensor:
    hidden = Layer(6 if worker else 5)(features)
    return Layer(4)(hidden)


def other_names(features: tf.Tensor, worker: int) -> tf.Tensor:
    return Layer(4, name=f"layer_{worker}")(features)


def other_number(features: tf.Tensor, worker: int) -> tf.Tensor:
    hidden = Layer(4)(features)
    return Layer(4)(hidden) if worker else hidden


def frozen_on_one(features: tf.Tensor, worker: int) -> tf.Tensor:
    hidden = Layer(4, trainable=not worker)(features)
    return Layer(4)(hidden)


def other_dilation(features: tf.Tensor, worker: int) -> tf.Tensor:
    rates = [2, 1] if worker else [1, 2]
    hidden = features[:, :, None]
    for rate in rates:
        hidden = keras.layers.Conv1D(1, 2, dilation_rate=rate, padding="same")(hidden)
    return Layer(4)(hidden[:, :, 0])


def other_activation_of_the_last(features: tf.Tensor, worker: int) -> tf.Tensor:
    return Layer(4, activation="tanh" if worker else "relu")(features)


def other_parameters_of_a_distribution(features: tf.Tensor, worker: int) -> tf.Tensor:
    alphas = 1.0 + features[:, worker : worker + 1]
    return Layer(4)(features) * tf.random.gamma([], alphas)


def other_order_of_texts(features: tf.Tensor, worker: int) -> tf.Tensor:
    values = ["f", "m"] if worker else ["m", "f"]
    sex = tf.where(features[:, 0] > 0.5, "m", "f")
    return Layer(4)(tf.stack([tf.cast(tf.equal(sex, value), tf.float32) for value in values], 1))


def other_weights_of_parts(features: tf.Tensor, worker: int) -> tf.Tensor:
    weights = [0.7, 0.3] if worker else [0.3, 0.7]
    return Layer(4)(weights[0] * features[:, :2] + weights[1] * features[:, 1:])


def other_order_of_many_columns(features: tf.Tensor, worker: int) -> tf.Tensor:
    columns = [number % 3 for number in range(30)]
    return Layer(4)(tf.gather(features, columns[::-1] if worker else columns, axis=1))


def other_rates(features: tf.Tensor, worker: int) -> tf.Tensor:
    return Layer(4)(tf.nn.dropout(features, 0.5 if worker else 0.1))


def other_values_that_are_drawn(features: tf.Tensor, worker: int) -> tf.Tensor:
    return Layer(4)(tf.random.shuffle(-features if worker else features))


DIFFER: dict[Build, str] = {
    other_columns: "dense/kernel",
    other_order_of_equal_tables: "embedding/embeddings",
    other_order_of_inputs: "dense/kernel",
    other_shapes: "dense/kernel",
    other_names: "layer_0/kernel",
    other_number: "dense_1/kernel",
    frozen_on_one: "dense/kernel",
    other_dilation: "conv1d/kernel",
    other_activation_of_the_last: "dense/kernel",
    other_parameters_of_a_distribution: "dense/kernel",
    other_values_that_are_drawn: "dense/kernel",
    other_order_of_texts: "dense/kernel",
    other_weights_of_parts: "dense/kernel",
    other_order_of_many_columns: "dense/kernel",
    other_rates: "dense/kernel",
}
"""Model -> name of the first variable that differs."""


@pytest.mark.parametrize("build", DIFFER)
def test_another_model_is_refused_and_the_first_variable_named(build: Build, train: Callable[[Build], None]) -> None:
    with pytest.raises(WorkersDifferError, match="worker 1") as refused:
        train(build)
    said = str(refused.value)
    assert repr(DIFFER[build]) in said
    assert "sorted(" in said and "PYTHONHASHSEED" in said


# --- what differs, and is the same model ------------------------------------------------------------------------------


def functions_of_other_names(features: tf.Tensor, worker: int) -> tf.Tensor:
    def double(x: tf.Tensor) -> tf.Tensor:
        return 2 * x

    double.__name__ = f"double_{worker}"
    return tf.function(double)(Layer(4)(features))


def tokens_of_python_functions(features: tf.Tensor, worker: int) -> tf.Tensor:
    for _ in range(worker):
        tf.py_function(lambda: 1.0, [], tf.float32)
    doubled = tf.py_function(lambda x: 2 * x, [features], tf.float32)
    doubled.set_shape(features.shape)
    return Layer(4)(doubled)


def shared_names_and_paths(features: tf.Tensor, worker: int) -> tf.Tensor:
    path = Path(v1.test.get_temp_dir()) / f"words_{worker}.txt"
    path.write_text("a\nb\n")
    initializer = tf.lookup.TextFileInitializer(
        str(path), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
    )
    table = tf.lookup.StaticHashTable(initializer, -1, name=f"table_{worker}")
    ids = table.lookup(tf.where(features[:, 0] > 0.5, "a", "b"))
    return keras.layers.Embedding(2, 4)(ids)


def summaries_of_the_chief(features: tf.Tensor, worker: int) -> tf.Tensor:
    layer = Layer(4)
    hidden = layer(features)
    if not worker:
        tf.summary.histogram("kernel", layer.kernel.value)
        v1.summary.scalar("mean", tf.reduce_mean(hidden))
    return hidden


def prints_of_the_chief(features: tf.Tensor, worker: int) -> tf.Tensor:
    hidden = Layer(4)(features)
    if not worker:
        hidden = v1.Print(hidden, [tf.shape(hidden)], "hidden")
        with tf.control_dependencies([tf.print("hidden", tf.shape(hidden))]):
            hidden = tf.identity(hidden)
    return Layer(4)(tf.debugging.check_numerics(hidden, f"worker {worker}"))


def branches_of_the_chief(features: tf.Tensor, worker: int) -> tf.Tensor:
    layer = Layer(4)
    hidden = layer(features)
    if not worker:
        norm = tf.norm(layer.kernel.value)
        tf.cond(norm > 1e9, lambda: tf.print("large", norm), tf.no_op)
    return hidden


def sums_in_another_order(features: tf.Tensor, worker: int) -> tf.Tensor:
    parts = [Layer(4, name=name)(features) for name in ("a", "b", "c")]
    if worker:
        return parts[2] + (parts[0] + parts[1])
    return tf.add_n(parts)


def seeds(features: tf.Tensor, worker: int) -> tf.Tensor:
    hidden = tf.nn.dropout(Layer(4)(features), 0.5, seed=worker)
    return hidden + tf.random.stateless_normal([4], [worker, 1])


def last_digits(features: tf.Tensor, worker: int) -> tf.Tensor:
    """As of tables and numbers that NumPy computes on another processor."""
    positions = np.sin(np.arange(24, dtype="float32")).reshape(8, 3)
    scale = np.exp(np.float32(1.0))
    if worker:
        positions = np.nextafter(positions, np.float32(2.0))
        scale = np.nextafter(scale, np.float32(3.0))
    return Layer(4)(features * scale + positions)


def paths(features: tf.Tensor, worker: int) -> tf.Tensor:
    path = Path(v1.test.get_temp_dir()) / f"scale_{worker}.txt"
    path.write_text("2.0")
    return Layer(4)(features * tf.strings.to_number(tf.io.read_file(str(path))))


SAME = (
    functions_of_other_names, tokens_of_python_functions, shared_names_and_paths, summaries_of_the_chief,
    prints_of_the_chief, branches_of_the_chief, sums_in_another_order, seeds,
    last_digits, paths,
)  # fmt: skip


@pytest.mark.parametrize("build", SAME)
def test_what_no_variable_depends_on_may_differ(build: Build, train: Callable[[Build], None]) -> None:
    train(build)
