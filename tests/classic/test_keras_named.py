"""The optimizers of premade estimators: the updates of Keras 2, and what becomes of optimizers of other families."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Input, RunConfig
from runner.classic.contrib.estimator import clip_gradients_by_norm
from runner.classic.keras2_optimizers import SGD, Adagrad, Adam, Ftrl, KerasNamed, RMSprop
from runner.classic.optimizers import InParts, minimize, optimizer_of, v1_optimizer_of
from runner.programs.learning_rate import scaled
from tests.support.messages import Messages
from tests.support.models import strategies
from tests.support.tiers import slow_but

tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
legacy = tf_keras.optimizers.legacy
v1 = tf.compat.v1

CASES: dict[str, tuple[Callable[..., KerasNamed], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (SGD, legacy.SGD, {"learning_rate": 0.1, "decay": 0.3}),
    "momentum": (SGD, legacy.SGD, {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (Adagrad, legacy.Adagrad, {"learning_rate": 0.1}),
    "adam": (Adam, legacy.Adam, {"learning_rate": 0.1, "epsilon": 1e-3}),
    "rmsprop": (RMSprop, legacy.RMSprop, {"learning_rate": 0.1, "rho": 0.8}),
    "rmsprop-momentum": (RMSprop, legacy.RMSprop, {"learning_rate": 0.1, "momentum": 0.5}),
    "ftrl": (Ftrl, legacy.Ftrl, {"learning_rate": 0.1, "l1_regularization_strength": 0.01, "beta": 0.2}),
}


def trained(optimizer: Any, counter: tf.Variable, apply: Callable[..., Any]) -> list[np.ndarray]:
    """A table with sparse gradients (two of one row) and a vector, after four updates."""
    table, vector = tf.Variable(tf.ones([4, 2]), name="table"), tf.Variable([1.0, -1.0], name="vector")
    for step in range(4):
        sparse = tf.IndexedSlices(tf.constant([[1.0, 2.0], [0.5, -1.0], [0.3, 0.1]]) * (step + 1), [0, step, 0], [4, 2])
        apply(optimizer, [(sparse, table), (tf.constant([0.2, -0.4]) * (step + 1), vector)], counter)
    return [table.numpy(), vector.numpy()]


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_keras_2(name: str) -> None:
    ours, theirs, settings = CASES[name]
    counter = tf.Variable(0, dtype=tf.int64)
    optimizer = ours(**settings)
    optimizer.iterations = counter
    found = trained(optimizer, counter, lambda one, pairs, step: one.apply_gradients(pairs, global_step=step))
    expected = trained(theirs(**settings), counter, lambda one, pairs, step: one.apply_gradients(pairs))
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-6)
    assert counter.numpy() == 4


@pytest.mark.parametrize(
    ("given", "kind", "settings"),
    [
        ("Adam", Adam, {"learning_rate": 0.001}),
        (lambda: legacy.Adam(0.3), Adam, {"learning_rate": 0.3}),
        (legacy.RMSprop(0.3, momentum=0.2), RMSprop, {"momentum": 0.2}),
        (tf_keras.optimizers.Adagrad(0.3), Adagrad, {"learning_rate": 0.3}),
        (keras.optimizers.SGD(0.3, momentum=0.5), SGD, {"learning_rate": 0.3, "momentum": 0.5}),
        (keras.optimizers.Ftrl(0.3), Ftrl, {"learning_rate": 0.3}),
    ],
)
def test_optimizers_of_keras_train_as_they_did_in_tf_estimator(given: Any, kind: Any, settings: Any) -> None:
    found: Any = optimizer_of(given)
    assert type(found) is kind
    assert found.get_name() == kind.__name__
    assert {name: found._settings[name] for name in settings} == pytest.approx(settings, rel=1e-6)


def test_a_schedule_is_asked_at_each_step() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = optimizer_of(keras.optimizers.SGD(schedule))
    counter = tf.Variable(0, dtype=tf.int64)
    optimizer.iterations = counter
    variable = tf.Variable(0.0)
    for expected in (-0.5, -0.75, -0.875):
        optimizer.apply_gradients([(tf.constant(1.0), variable)], global_step=counter)
        assert variable.numpy() == pytest.approx(expected)


def test_what_an_old_optimizer_cannot_do_is_left_to_the_new_one(messages: Messages) -> None:
    def given() -> Any:
        return keras.optimizers.Adam(0.1, clipnorm=1.0)

    keras.utils.clear_session()
    found: Any = optimizer_of(given)
    assert type(found) is keras.optimizers.Adam and found.name == "adam"
    again: Any = optimizer_of(given())
    assert type(again) is keras.optimizers.Adam and again.clipnorm == 1.0


class Untold(keras.optimizers.SGD):
    """Its `get_config` lacks an argument."""

    def __init__(self, scale: float, **settings: Any) -> None:
        super().__init__(scale, **settings)


def test_an_optimizer_that_cannot_be_made_again_is_asked_for_as_a_function(messages: Messages) -> None:
    assert type(optimizer_of(lambda: Untold(0.1))) is Untold
    with messages.raised(ValueError):
        optimizer_of(Untold(0.1))


def test_an_optimizer_of_the_users_own_class_of_a_known_name_is_not_replaced() -> None:
    own: Any = type("Adam", (legacy.Adam,), {"__module__": "users"})
    found: Any = optimizer_of(own(0.3))
    assert type(found) is own and found.get_config()["learning_rate"] == pytest.approx(0.3)


def test_the_rates_of_all_parts_of_a_model_are_scaled() -> None:
    """Those of `WideDeepModel`, whose optimizers may be TensorFlow 1's."""
    one, two = tf.Variable(1.0, name="one"), tf.Variable(1.0, name="two")
    both = InParts([v1.train.GradientDescentOptimizer(0.5), SGD(learning_rate=0.25)], [{"one"}, {"two"}])
    with scaled(both, tf.constant(0.1)):
        both.apply_gradients([(tf.constant(1.0), one), (tf.constant(1.0), two)])
    assert (one.numpy(), two.numpy()) == pytest.approx((0.95, 0.975))


def test_a_rate_that_is_a_tensor_of_the_graph_is_taken_as_it_is() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        counter, variable = v1.Variable(4, dtype=tf.int64), v1.Variable(0.0)
        rate = v1.train.exponential_decay(0.8, counter, 2, 0.5)
        optimizer = optimizer_of(lambda: legacy.SGD(rate))
        optimizer.iterations = counter
        value = optimizer.rate(variable)
        session.run(v1.global_variables_initializer())
        assert session.run(value) == pytest.approx(0.2)


def test_an_optimizer_of_v1_is_copied_for_it_keeps_slots() -> None:
    given = v1.train.AdamOptimizer(0.1)
    assert optimizer_of(given) is not given
    assert type(v1_optimizer_of("RMSProp", 0.1)) is v1.train.RMSPropOptimizer
    assert type(v1_optimizer_of(given)) is v1.train.AdamOptimizer
    with pytest.raises(ValueError, match="learning_rate"):
        v1_optimizer_of("RMSProp")


@pytest.mark.parametrize("given", ["adam", 3])
def test_what_is_no_optimizer_is_refused(given: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        optimizer_of(given)


# --- optimizers of the users' own classes -----------------------------------------------------------------------------


class OwnMomentum(legacy.Optimizer):  # type: ignore[name-defined]
    def __init__(self, rate: float, name: str = "Own") -> None:
        super().__init__(name)
        self._set_hyper("learning_rate", rate)

    def _create_slots(self, var_list: Any) -> None:
        for variable in var_list:
            self.add_slot(variable, "velocity")

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        velocity = self.get_slot(var, "velocity")
        new = velocity.assign(0.5 * velocity + grad)
        return var.assign_sub(self._get_hyper("learning_rate", var.dtype.base_dtype) * new, read_value=False)

    def get_config(self) -> dict[str, Any]:
        return super().get_config()


class OwnUpdates(OwnMomentum):
    """Its inner optimizer counts its own updates, which was all that 2.15 counted."""

    def get_updates(self, loss: Any, params: Any) -> list[Any]:
        with tf.control_dependencies(legacy.SGD(0.01).get_updates(2 * loss, params)):
            return [self.iterations.assign_add(1)]


class OwnAdam(legacy.Adam):  # type: ignore[name-defined]
    pass


class NewMomentum(tf_keras.optimizers.Optimizer):  # type: ignore[name-defined]
    """As OwnMomentum, by the methods that the newer optimizers have."""

    def __init__(self, rate: float, name: str = "Own", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._learning_rate = self._build_learning_rate(rate)

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        if not getattr(self, "velocities", None):
            self.velocities = [self.add_variable_from_reference(one, "velocity") for one in var_list]

    def update_step(self, gradient: Any, variable: Any) -> None:
        velocity = self.velocities[self._index_dict[self._var_key(variable)]]
        velocity.assign(0.5 * velocity + gradient)
        variable.assign_sub(self.learning_rate * velocity)

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "rate": self._serialize_hyperparameter(self._learning_rate)}
        config.pop("learning_rate", None)
        return config


# Weight and bias after 4 steps of TensorFlow 2.15, and the variables of its checkpoint apart from the model's. 2.15 did
# not take NewMomentum.
_OWN: dict[str, tuple[Callable[[], Any], float, float, list[str]]] = {
    "own updates of variables": (
        lambda: OwnMomentum(0.01), 0.34131318, 0.22445305,
        [*(f"Own/linear/linear_model/{one}/velocity" for one in ("bias_weights", "x/weights")), "Own/learning_rate"],
    ),
    "own get_updates": (
        lambda: OwnUpdates(0.01), 0.51908255, 0.33188778,
        [f"SGD/{one}" for one in ("decay", "iter", "learning_rate", "momentum")],
    ),
    "a class of Keras with another name": (
        lambda: OwnAdam(0.01), 0.033642642, 0.012719757,
        [*(f"Adam/{one}" for one in ("beta_1", "beta_2", "decay", "learning_rate")),
         *(f"Adam/linear/linear_model/{one}/{slot}" for one in ("bias_weights", "x/weights") for slot in "mv")],
    ),
    "clipping": (
        lambda: legacy.Adam(0.01, clipnorm=0.1), 0.039386641, 0.00030898442,
        [*(f"Adam/{one}" for one in ("beta_1", "beta_2", "decay", "learning_rate")),
         *(f"Adam/linear/linear_model/{one}/{slot}" for one in ("bias_weights", "x/weights") for slot in "mv")],
    ),
    "a newer class": (
        lambda: NewMomentum(0.01), 0.34131318, 0.22445305,
        ["iteration", "learning_rate",
         *(f"Own/velocity/linear/linear_model/{one}" for one in ("bias_weights", "x/weights"))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(_OWN, "own updates of variables", "a newer class"))
def test_optimizers_of_own_classes_train_as_in_2_15_on_any_number_of_replicas(name: str, tmp_path: Path) -> None:
    def of_line(params: Any) -> tf.data.Dataset:
        x = np.arange(19, dtype=np.float32) / 10
        return tf.data.Dataset.from_tensor_slices(({"x": x}, 3 * x - 1)).batch(params["batch_size"])

    make, weight, bias, others = _OWN[name]
    optimizer = make()
    for strategy in ("default", "mirrored"):  # the same object: it stays as it was
        config = RunConfig(train_distribute=strategies()[strategy], tensorboard=False)
        columns = [tf.feature_column.numeric_column("x")]
        estimator = tf.estimator.LinearRegressor(columns, str(tmp_path / strategy), optimizer=optimizer, config=config)
        estimator.train(Input(of_line, params={}, batch_size=6))
        found = {one: estimator.get_variable_value(one) for one in estimator.get_variable_names()}
        assert found.pop("linear/linear_model/x/weights").item() == pytest.approx(weight, rel=1e-5)
        assert found.pop("linear/linear_model/bias_weights").item() == pytest.approx(bias, rel=1e-5, abs=1e-7)
        assert found.pop("global_step") == 4
        assert sorted(found) == sorted(f"training/{one}" for one in others)


# --- clipping ---------------------------------------------------------------------------------------------------------


def named_by_2_15() -> Any:
    """The optimizer that the RNN estimators of 2.15's own code make of a name, in model_fn."""
    optimizer = optimizer_of("SGD", 0.5)
    optimizer.clipnorm, optimizer.iterations = 0.2, v1.train.get_or_create_global_step()
    return optimizer


def by_common_norm() -> Any:
    return clip_gradients_by_norm(v1.train.GradientDescentOptimizer(0.5), 0.2)


_CLIPPING: dict[str, tuple[Callable[[], Any], bool]] = {  # and whether the norm is that of all gradients together
    "by name, 2.15's code": (named_by_2_15, False),
    "contrib.estimator.clip_gradients_by_norm": (by_common_norm, True),
    "keras.optimizers": (lambda: optimizer_of(lambda: keras.optimizers.SGD(0.5, clipnorm=0.2)), False),
    "tf_keras.optimizers": (lambda: optimizer_of(lambda: tf_keras.optimizers.SGD(0.5, global_clipnorm=0.2)), True),
    "tf_keras.optimizers.legacy": (lambda: optimizer_of(lambda: legacy.SGD(0.5, clipnorm=0.2)), False),
}


@pytest.mark.parametrize("name", _CLIPPING)
def test_gradients_are_clipped_as_those_of_the_global_batch(name: str, tmp_path: Path) -> None:
    """By the norm of the sum over the replicas, in which the rows for an id that occurs several times are added."""
    make, is_common = _CLIPPING[name]
    x = np.array([[1, 0], [2, 0], [0, 4], [0, 2], [4, 2], [1, 3]], np.float32)
    ids = np.array([0, 0, 2, 2, 1, 0])

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        kernel = v1.get_variable("kernel", initializer=np.zeros(2, np.float32))
        table = v1.get_variable("table", initializer=np.zeros(3, np.float32))
        each = tf.linalg.matvec(features["x"], kernel) + tf.gather(table, features["id"])
        loss = tf.reduce_mean(each)
        return v1.estimator.EstimatorSpec(mode, loss=loss, train_op=minimize(make(), loss))

    data = tf.data.Dataset.from_tensor_slices({"x": x, "id": ids})
    gradients: dict[str, np.ndarray] = {"kernel": x.mean(0), "table": np.bincount(ids) / 6}
    norms = {one: np.linalg.norm(value) for one, value in gradients.items()}
    for strategy in ("default", "mirrored"):
        config = RunConfig(train_distribute=strategies()[strategy], tensorboard=False)
        estimator = v1.estimator.Estimator(model_fn, str(tmp_path / strategy), config)
        estimator.train(Input(lambda params: data.batch(params["batch_size"]), params={}, batch_size=6))
        for one, value in gradients.items():
            norm = math.hypot(*norms.values()) if is_common else norms[one]
            assert estimator.get_variable_value(one) == pytest.approx(-0.5 * 0.2 / norm * value, rel=1e-5), strategy
