"""Private names that only make things faster: without them the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.tf_private import graphs, random_ops
from tests.support.models import strategies, train_input

v1 = tf.compat.v1
STRATEGIES = strategies()


class _Without:
    """An object or module of TensorFlow, of which some names have moved.

    Args:
      moved: names that it no longer has.
      instead: what it has under other names.
    """

    def __init__(self, of: Any, *moved: str, **instead: Any) -> None:
        self.__dict__.update(instead, _of=of, _moved=moved)

    def __getattr__(self, name: str) -> Any:
        if name in self._moved:
            raise AttributeError(name)
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._of, name)


def _moved_from_the_context(module: Any, *names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what hides `names` of the eager context from one module of ours; TensorFlow itself still needs them."""

    def move(monkeypatch: pytest.MonkeyPatch) -> None:
        real = module.context
        eager, kind = _Without(real.context(), *names), _Without(real.Context, *names)
        monkeypatch.setattr(module, "context", _Without(real, context=lambda: eager, Context=kind))

    return move


def _functions_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "atomic_function", None)


MOVED = {
    "functions made of a graph": _functions_of_graphs,
    "kernels that are kept": _moved_from_the_context(graphs, "_set_global_seed"),
    "rounds of optimisation": _moved_from_the_context(graphs, "function_call_options"),
    "functions that are noted": _moved_from_the_context(random_ops, "call_function"),
}


def native(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    hidden = keras.layers.Dense(3, "relu", dtype="float64")(tf.cast(features, tf.float64))
    hidden = keras.layers.Dropout(0.3, dtype="float64")(hidden, training=mode == "train")
    predictions = keras.layers.Dense(1, dtype="float64")(hidden)
    if mode == "infer":
        return EstimatorSpec(mode, {"y": predictions})
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, {"y": predictions}, loss, optimizer=keras.optimizers.Adam(0.03))


def classic(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    kernel = v1.get_variable("kernel", [4, 1], tf.float64, v1.random_normal_initializer())
    seen = v1.get_variable("seen", [], tf.int64, v1.zeros_initializer(), trainable=False)
    noise = tf.cast(tf.random.uniform([], seed=3), tf.float64) if mode == "train" else 0.0
    predictions = tf.cast(features, tf.float64) @ kernel
    if mode == "infer":
        return EstimatorSpec(mode, {"y": predictions})
    loss = tf.reduce_mean(tf.square(predictions + noise - labels))
    with tf.control_dependencies([v1.assign_add(seen, 1)]):
        train_op = v1.train.MomentumOptimizer(0.03, 0.9).minimize(loss, v1.train.get_global_step())
    metrics = {"seen": v1.metrics.mean(seen)}
    return EstimatorSpec(mode, {"y": predictions}, loss, train_op, eval_metric_ops=metrics)


def numbers(model_fn: Any, strategy: str, model_dir: Path, **config: Any) -> dict[str, Any]:
    """Return all variables after training, an evaluation and predictions."""
    input_fn = train_input(6, 19, "float64")
    trainer = Estimator(
        model_fn, model_dir, RunConfig(tf_random_seed=5, train_distribute=STRATEGIES[strategy], **config)
    )
    trainer.train(input_fn, steps=7)
    values = {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}
    rows = trainer.predict(input_fn)
    return {**values, **trainer.evaluate(input_fn, steps=3), "rows": [next(rows)["y"] for _ in range(4)]}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    known: dict[Any, dict[str, Any]] = {}

    def compute(model_fn: Any, strategy: str) -> dict[str, Any]:
        key = (model_fn, strategy)
        if key not in known:
            known[key] = numbers(model_fn, strategy, tmp_path_factory.mktemp("expected"))
        return known[key]

    yield compute


@pytest.mark.slow
@pytest.mark.parametrize(("model_fn", "strategy"), [(native, "default"), (classic, "mirrored")])
@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
def test_without_a_name_that_makes_it_faster_the_numbers_are_the_same(
    move: Any, model_fn: Any, strategy: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = expected(model_fn, strategy)
    move(monkeypatch)
    after = numbers(model_fn, strategy, tmp_path)
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, name)


@pytest.mark.slow
def test_what_xla_compiles_is_the_same_by_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numbers(native, "mirrored", tmp_path / "before", jit=True)
    _functions_of_graphs(monkeypatch)
    after = numbers(native, "mirrored", tmp_path / "after", jit=True)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-12, err_msg=name)
