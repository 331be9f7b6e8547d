"""`model_to_estimator`: the numbers of Keras's own `fit` and `evaluate`, for Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner.classic.compat import install
from runner.classic.model_to_estimator import model_to_estimator
from runner.classic.run_config import RunConfig
from runner.export.outputs import PredictOutput, RegressionOutput
from runner.export.receivers import build_raw_serving_input_receiver_fn
from runner.tf_private import keras_models
from tests.support.messages import Messages
from tests.support.tiers import slow_but

tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
FAMILIES = {"keras": keras, "tf_keras": tf_keras}

RNG = np.random.RandomState(0)
X, Y = RNG.randn(24, 4).astype(np.float32), RNG.randn(24, 1).astype(np.float32)
WEIGHTS = RNG.rand(24).astype(np.float32)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param]


@pytest.fixture(autouse=True)
def other_names() -> Iterator[None]:
    """Names of the models begin anew."""
    yield
    for one in FAMILIES.values():
        one.backend.clear_session()


def build(family: Any, kind: str = "functional", **more: Any) -> Any:
    """Always with the same weights."""
    layers = family.layers
    family.utils.set_random_seed(3)
    if kind == "functional":
        inputs = family.Input([4], name="x")
        outputs = layers.Dense(1, name="y")(layers.Dense(3, activation="tanh", name="hidden")(inputs))
        model = family.Model(inputs, outputs)
    elif kind == "sequential":
        model = family.Sequential([layers.Dense(3, activation="tanh"), layers.BatchNormalization(), layers.Dense(1)])
        model(X[:1])
    else:
        model = Own[family](3)
        model(X[:1])
    arguments = {"loss": "mse", "metrics": ["mae", family.metrics.MeanSquaredError(name="squares")], **more}
    model.compile(family.optimizers.SGD(0.1, momentum=0.5), **arguments)
    return model


def own_of(family: Any) -> Any:
    class OwnModel(family.Model):
        """A class of the user's own."""

        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.units = units
            self.hidden = family.layers.Dense(units, activation="relu", kernel_regularizer="l2")
            self.out = family.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.out(self.hidden(inputs))

        def get_config(self) -> dict[str, Any]:
            return {"units": self.units}

    return OwnModel


Own = {family: own_of(family) for family in FAMILIES.values()}


def batches(size: int = 8, x: Any = X) -> Any:
    return lambda: tf.data.Dataset.from_tensor_slices((x, Y)).batch(size)


def rows(found: dict[str, Any], *names: str) -> list[float]:
    return [float(found[name]) for name in names]


# --- the numbers of Keras ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but(["functional", "sequential", "own"], "own"))
def test_train_and_evaluate_do_what_fit_and_evaluate_do(family: Any, kind: str, tmp_path: Path) -> None:
    model, fitted = build(family, kind), build(family, kind)
    before = model.get_weights()
    estimator = model_to_estimator(model, model_dir=tmp_path)
    found = estimator.evaluate(batches())
    assert found["global_step"] == 0, "evaluated with the weights of the model that was given"
    names = ("loss", "mae", "squares")
    np.testing.assert_allclose(rows(found, *names), model.evaluate(X, Y, batch_size=8, verbose=0), rtol=1e-6)
    fitted.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for _ in range(2):
        estimator.train(batches())
    expected = fitted.evaluate(X, Y, batch_size=8, verbose=0)
    for _ in range(2):  # metrics begin anew each time
        np.testing.assert_allclose(rows(estimator.evaluate(batches()), *names), expected, rtol=1e-5)
    predicted = [one for row in estimator.predict(batches(5)) for one in row.values()]
    np.testing.assert_allclose(predicted, fitted.predict(X, verbose=0), rtol=1e-4, atol=1e-6)
    for value, expected_value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected_value, "the given model is not changed")
    assert (tmp_path / "keras" / "keras_model.ckpt.index").exists()


def test_two_replicas_come_to_the_same(family: Any, tmp_path: Path) -> None:
    model, fitted = build(family), build(family)
    config = RunConfig(train_distribute=tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]), tf_random_seed=1)
    estimator = model_to_estimator(model, model_dir=tmp_path, config=config).train(batches(4))
    fitted.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert estimator.get_variable_value("global_step") == 3
    for name, expected in zip(
        ("hidden/kernel", "hidden/bias", "y/kernel", "y/bias"), fitted.get_weights(), strict=True
    ):
        np.testing.assert_allclose(estimator.get_variable_value(name), expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_weights_of_examples_are_a_feature(family: Any, tmp_path: Path) -> None:
    more: dict[str, Any] = {"metrics": [], "weighted_metrics": ["mae"]}
    model, fitted = build(family, **more), build(family, **more)
    estimator = model_to_estimator(model, model_dir=tmp_path)
    weighted = batches(x={"features": X, "sample_weights": WEIGHTS})
    estimator.train(weighted)
    fitted.fit(X, Y, sample_weight=WEIGHTS, batch_size=8, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(estimator.get_variable_value("y/kernel"), fitted.get_weights()[2], rtol=1e-5)
    expected = fitted.evaluate(X, Y, sample_weight=WEIGHTS, batch_size=8, verbose=0)
    found = estimator.evaluate(weighted)
    assert found["mae"] == pytest.approx(expected[1], rel=1e-5)


# --- names ------------------------------------------------------------------------------------------------------------


def test_variables_features_predictions_and_metrics_have_their_names(
    family: Any, tmp_path: Path, messages: Messages
) -> None:
    names = {"mae": "error", "squares": "squares"}
    estimator = model_to_estimator(build(family), model_dir=tmp_path, metric_names_map=names)
    estimator.train(batches(x={"x": X, "unused": WEIGHTS}), steps=1)
    assert {"hidden/kernel", "hidden/bias", "y/kernel", "y/bias", "global_step"} <= {*estimator.get_variable_names()}
    assert not [name for name in estimator.get_variable_names() if "total" in name or "count" in name]
    assert {*estimator.evaluate(batches())} == {"loss", "error", "squares", "global_step"}
    assert [*next(iter(estimator.predict(batches())))] == ["y"]
    with messages.raised(KeyError):
        estimator.train(batches(x={"z": X}), steps=1)


# --- several inputs and outputs ---------------------------------------------------------------------------------------


A, B = RNG.randn(8, 2).astype(np.float32), RNG.randn(8, 3).astype(np.float32)
OUT1, OUT2 = A[:, :1] * 2, B[:, :1] * 3
DICTS = ({"a": A, "b": B, "c": A}, {"o1": OUT1, "o2": OUT2, "o3": OUT1})


def of_two(family: Any) -> Any:
    a, b = family.Input([2], name="a"), family.Input([3], name="b")
    both = family.layers.Concatenate(name="both")([a, b])
    half = family.initializers.Constant(0.5)
    outputs = [family.layers.Dense(1, name=name, kernel_initializer=half)(both) for name in ("o1", "o2")]
    model = family.Model([a, b], outputs)
    model.compile(family.optimizers.SGD(0.1), loss=["mse", "mae"], metrics=[["mae"], ["mae"]])
    return model


def rows_of(structure: Any) -> Any:
    return lambda: tf.data.Dataset.from_tensor_slices(structure).batch(4)


STRUCTURES: dict[str, Any] = {
    "tuples": rows_of(((A, B), (OUT1, OUT2))),
    "dicts": rows_of(DICTS),
    "lists of tensors": lambda: ([tf.constant(A), tf.constant(B)], [tf.constant(OUT1), tf.constant(OUT2)]),
    "tuples of tensors": lambda: ((tf.constant(A), tf.constant(B)), (tf.constant(OUT1), tf.constant(OUT2))),
}


# loss, o1_mae, o2_mae and the first predictions of tf.estimator 2.15: in two batches, and of all rows as one batch.
IN_TWO = [2.268739, 0.594052, 1.867882, -1.041666, -1.494837]
AS_ONE = [2.510572, 0.723941, 1.850265, -1.115370, -1.455476]


@pytest.mark.parametrize("structure", slow_but(STRUCTURES, "dicts", "tuples of tensors"))
def test_inputs_and_outputs_are_in_order_or_have_names(family: Any, structure: str, tmp_path: Path) -> None:
    fn = STRUCTURES[structure]
    estimator = model_to_estimator(of_two(family), model_dir=tmp_path).train(fn, steps=2)
    found, predicted = estimator.evaluate(fn, steps=2), next(estimator.predict(fn))
    assert {*found} == {"loss", "o1_mae", "o2_mae", "global_step"}
    values = [*rows(found, "loss", "o1_mae", "o2_mae"), *predicted["o1"], *predicted["o2"]]
    np.testing.assert_allclose(values, AS_ONE if "of tensors" in structure else IN_TWO, rtol=1e-5)


def test_a_program_that_turns_tensorflow_2_off_trains_the_same(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its model_fn each dimension of a shape has a `value`, of which Keras 3 knows nothing."""
    monkeypatch.setattr(install, "called", {"disable_v2_behavior"})
    fn = STRUCTURES["tuples"]  # batches have no static size
    estimator = model_to_estimator(of_two(family), model_dir=tmp_path).train(fn, steps=2)
    found, predicted = estimator.evaluate(fn, steps=2), next(estimator.predict(fn))
    values = [*rows(found, "loss", "o1_mae", "o2_mae"), *predicted["o1"], *predicted["o2"]]
    np.testing.assert_allclose(values, IN_TWO, rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "names", "error"),
    [
        (rows_of(({"a": A}, DICTS[1])), None, KeyError),
        (rows_of((DICTS[0], {"o1": OUT1})), None, KeyError),
        (rows_of(DICTS), {"o1_mae": "x"}, ValueError),
        (rows_of(DICTS), {"o1_mae": "x", "o2_mae": "y", "o3_mae": "z"}, ValueError),
    ],
    ids=["an input is missing", "an output is missing", "a metric is missing", "no metric has the name"],
)
def test_names_that_the_model_does_not_have_are_refused(
    family: Any, fn: Any, names: Any, error: type[Exception], tmp_path: Path, messages: Messages
) -> None:
    estimator = model_to_estimator(of_two(family), model_dir=tmp_path, metric_names_map=names)
    with messages.raised(error):
        estimator.train(fn, steps=1)
    with pytest.raises(error):
        estimator.evaluate(fn, steps=1)


def test_an_output_has_a_signature_of_its_class(family: Any, tmp_path: Path, messages: Messages) -> None:
    classes = {"o1": RegressionOutput, "o2": PredictOutput}
    names = {"o1_mae": "x", "o2_mae": "y"}
    estimator = model_to_estimator(
        of_two(family), model_dir=tmp_path, export_outputs=classes, metric_names_map=names
    ).train(rows_of(DICTS), steps=1)
    assert {*estimator.evaluate(rows_of(DICTS))} == {"loss", "x", "y", "global_step"}
    specs = {"a": tf.TensorSpec([None, 2]), "b": tf.TensorSpec([None, 3])}
    path = estimator.export_saved_model(tmp_path / "export", build_raw_serving_input_receiver_fn(specs)).decode()
    assert {*tf.saved_model.load(path).signatures} == {"o2", "serving_default"}, "o1 takes serialized examples alone"
    with messages.raised(KeyError):
        unknown = model_to_estimator(of_two(family), model_dir=tmp_path / "2", export_outputs={"o3": classes["o1"]})
        unknown.train(rows_of(DICTS), steps=1)


def test_a_saved_model_of_keras_is_read(tmp_path: Path) -> None:
    model = tf.keras.models.clone_model(build(tf.keras))
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    estimator = model_to_estimator(keras_model_path=tmp_path / "model.keras", model_dir=tmp_path / "run")
    expected = np.ravel(model.evaluate(X, Y, verbose=0))[0]
    assert estimator.evaluate(batches())["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_second_estimator_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    model_to_estimator(build(keras), model_dir=tmp_path).train(batches())
    again = model_to_estimator(build(keras), model_dir=tmp_path).train(batches())
    assert again.get_variable_value("global_step") == 6


def test_a_model_whose_weights_are_not_made_yet_begins_with_initial_values(family: Any, tmp_path: Path) -> None:
    model = family.Sequential([family.layers.Dense(3), family.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert model_to_estimator(model, model_dir=tmp_path).train(batches()).evaluate(batches())["global_step"] == 3


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.5, "clipnorm": 0.01}, "Adagrad": {"clipvalue": 0.01}, "Adam": {"beta_1": 0.8},
    "RMSprop": {"momentum": 0.5, "global_clipnorm": 0.01}, "Ftrl": {},
    "Adadelta": {"rho": 0.8}, "Adamax": {"beta_1": 0.8}, "Adam amsgrad": {"amsgrad": True},
    "RMSprop centered": {"centered": True}, "RMSprop centered momentum": {"centered": True, "momentum": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "Adam", "RMSprop centered momentum"))
def test_state_of_optimizers_of_tf_keras_has_the_names_of_2_15(name: str, tmp_path: Path) -> None:
    model, rate = build(tf_keras), tf_keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.05])
    model.compile(getattr(tf_keras.optimizers, name.split()[0])(rate, **OPTIMIZERS[name]), "mse")
    fitted = tf_keras.models.clone_model(model)
    fitted.compile(getattr(tf_keras.optimizers.legacy, name.split()[0])(rate, **OPTIMIZERS[name]), "mse")
    fitted.set_weights(model.get_weights())
    fitted.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    estimator = model_to_estimator(model, model_dir=tmp_path).train(batches())
    state = {f"training/{one.name.partition(':')[0]}": one.numpy() for one in fitted.optimizer.weights[1:]}
    assert state, "the first is iterations, which is global_step"
    for name, value in {**state, "y/kernel": fitted.get_weights()[2], "global_step": 3}.items():
        np.testing.assert_allclose(estimator.get_variable_value(name), value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert not [name for name in estimator.get_variable_names() if "iter" in name]


def test_an_optimizer_that_2_15_did_not_know_is_what_it_is(tmp_path: Path) -> None:
    model = build(tf_keras)
    model.compile(tf_keras.optimizers.AdamW(0.1), "mse")
    fitted = tf_keras.models.clone_model(model)
    fitted.compile(tf_keras.optimizers.AdamW(0.1), "mse")
    fitted.set_weights(model.get_weights())
    fitted.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    estimator = model_to_estimator(model, model_dir=tmp_path).train(batches())
    np.testing.assert_allclose(estimator.get_variable_value("y/kernel"), fitted.get_weights()[2], rtol=1e-5)


def test_the_rate_of_a_model_of_tf_keras_warms_up(tmp_path: Path) -> None:
    def change(**options: Any) -> np.ndarray:
        model = build(tf_keras)
        config = RunConfig(**options)
        estimator = model_to_estimator(model, model_dir=tmp_path / str(len(options)), config=config)
        return estimator.train(batches(), steps=1).get_variable_value("y/kernel") - model.get_weights()[2]

    np.testing.assert_allclose(change(warmup_steps=4) * 4, change(), rtol=1e-5)


# --- as in 2.15; the numbers are its own ------------------------------------------------------------------------------


def with_fixed_weights(model: Any) -> Any:
    for number, one in enumerate(model.weights):
        one.assign(np.random.RandomState(number).randn(*one.shape) * 0.3)
    return model


def wide_deep() -> Any:
    ones, layers = "ones", tf_keras.layers
    deep = tf_keras.Sequential([layers.Dense(2, kernel_initializer=ones), layers.Dense(1, kernel_initializer=ones)])
    return tf_keras.experimental.WideDeepModel(tf_keras.experimental.LinearModel(), deep)


def simple() -> Any:
    return with_fixed_weights(build(tf_keras))


V1 = tf.compat.v1.train
WIDE, DEEP = "wide_deep_model/linear_model", "wide_deep_model/sequential"
# Case -> model, its optimizers, whether `fit` trains it before; loss before and after three steps, names of variables.
LIKE_2_15: dict[str, tuple[Any, Any, bool, list[float], set[str]]] = {
    "an optimizer of TensorFlow 1": (
        simple, lambda: V1.AdamOptimizer(0.01), False, [1.1400994, 1.1012753],
        {"y/kernel/Adam", "y/kernel/Adam_1", "training/beta1_power", "training/beta2_power"},
    ),
    "an optimizer of TensorFlow 1 that has state": (
        simple, lambda: V1.AdamOptimizer(0.01), True, [1.1012753, 1.0732797], {"y/kernel/Adam", "training/beta1_power"},
    ),
    "metrics that have been updated": (simple, lambda: "sgd", True, [1.1261921, 1.1137704], {"training/SGD/momentum"}),
    "two optimizers": (
        wide_deep, lambda: [tf_keras.optimizers.legacy.SGD(0.01), tf_keras.optimizers.legacy.Adagrad(0.05)], False,
        [20.967878, 11.853931],
        {f"{WIDE}/kernel", f"{DEEP}/dense_1/kernel", f"training/Adagrad/{DEEP}/dense/bias/accumulator"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", slow_but(LIKE_2_15, "an optimizer of TensorFlow 1 that has state", "metrics that have been updated")
)
def test_what_2_15_trained_is_trained_alike(case: str, tmp_path: Path) -> None:
    make, optimizers, is_fitted, losses, names = LIKE_2_15[case]
    model, x = make(), (X, X) if make is wide_deep else X
    model.compile(optimizers(), "mse", metrics=["mae"])
    if is_fitted:
        model.fit(x, Y, batch_size=8, shuffle=False, verbose=0)
    estimator = model_to_estimator(model, model_dir=tmp_path)
    found = [estimator.evaluate(batches(x=x))["loss"], estimator.train(batches(x=x)).evaluate(batches(x=x))["loss"]]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert names <= {*estimator.get_variable_names()}


def test_a_model_is_exported_before_it_is_trained(family: Any, tmp_path: Path) -> None:
    model = build(family)
    model.fit(X, Y, verbose=0)
    estimator = model_to_estimator(model, model_dir=tmp_path)
    assert tf.train.latest_checkpoint(tmp_path / "keras") == str(tmp_path / "keras/keras_model.ckpt")
    receiver_fn = build_raw_serving_input_receiver_fn({"x": tf.TensorSpec([None, 4])})
    path = estimator.export_saved_model(tmp_path / "export", receiver_fn).decode()
    served = tf.saved_model.load(path).signatures["serving_default"](x=tf.constant(X))
    np.testing.assert_allclose(served["y"], model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_frozen_layer_keeps_its_weights(family: Any, tmp_path: Path) -> None:
    model = build(family)
    model.get_layer("hidden").trainable = False
    model.compile("sgd", "mse")
    estimator = model_to_estimator(model, model_dir=tmp_path).train(batches())
    before = model.get_layer("hidden").get_weights()[0]
    np.testing.assert_array_equal(estimator.get_variable_value("hidden/kernel"), before)
    assert np.any(estimator.get_variable_value("y/kernel") != model.get_layer("y").get_weights()[0])


@pytest.mark.parametrize(("given", "error"), [
    ({"o1": WEIGHTS[:8]}, None), ((WEIGHTS[:8], WEIGHTS[:8]), None),
    ({"o1": WEIGHTS[:8], "o9": WEIGHTS[:8]}, ValueError), ((WEIGHTS[:8],), ValueError),
], ids=["of one output", "of both", "of an unknown one", "too few"])  # fmt: skip
def test_outputs_have_sample_weights(given: Any, error: type[Exception] | None, tmp_path: Path) -> None:
    estimator = model_to_estimator(of_two(tf_keras), model_dir=tmp_path)
    fn = rows_of(({"features": {"a": A, "b": B}, "sample_weights": given}, (OUT1, OUT2)))
    if error is not None:
        with pytest.raises(error):
            estimator.evaluate(fn)
        return
    model, both = of_two(tf_keras), list(given.values()) + [np.ones(8)] if isinstance(given, dict) else list(given)
    expected = model.evaluate([A, B], [OUT1, OUT2], sample_weight=both, batch_size=4, verbose=0)[0]
    assert estimator.evaluate(fn)["loss"] == pytest.approx(expected, rel=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


class WithoutConfig(keras.Model):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.function(self.out(inputs))


def test_what_cannot_be_is_refused(family: Any, tmp_path: Path, messages: Messages) -> None:
    model = build(family)
    with messages.raised(ValueError):
        model_to_estimator(model, tmp_path)
    with messages.raised(ValueError):
        model_to_estimator()
    with messages.raised(ValueError):
        model_to_estimator(model, checkpoint_format="h5")
    with messages.raised(ValueError):
        model_to_estimator("model")
    with messages.raised(ValueError):
        model_to_estimator(family.Sequential([family.layers.Dense(1)]))
    with messages.raised(ValueError):
        model_to_estimator(build(family, "own"), model_dir=tmp_path, checkpoint_format="checkpoint")


def twice(x: Any) -> Any:
    return x * 2


def test_a_model_that_cannot_be_rebuilt_is_refused_at_once(family: Any, tmp_path: Path) -> None:
    model = family.Sequential([family.Input([4]), family.layers.Dense(1, activation=twice)])
    model.compile("sgd", "mse")
    with pytest.raises((TypeError, ValueError)) as caught:
        model_to_estimator(model, model_dir=tmp_path / "1")
    assert "custom_objects" in caught.value.__notes__[-1]
    model_to_estimator(model, model_dir=tmp_path / "2", custom_objects={"twice": twice}).train(batches(), steps=1)


def test_models_of_the_copy_of_keras_in_tensorflow_are_refused(messages: Messages) -> None:
    from tensorflow.python.keras import layers, models

    model = models.Sequential([layers.Dense(1, input_shape=(4,))])
    with messages.raised(ValueError):
        model_to_estimator(model)


def test_a_class_without_a_config_is_refused(tmp_path: Path, messages: Messages) -> None:
    model = WithoutConfig(np.tanh)
    model(X[:1])
    model.compile("sgd", "mse")
    with messages.raised(ValueError):
        model_to_estimator(model, model_dir=tmp_path)


def test_tf_keras_is_as_it_was_when_replicas_leave_in_another_order_than_they_came() -> None:
    from tf_keras.src.utils import version_utils

    before, replicas = version_utils.should_use_v2, [keras_models.as_in_a_function() for _ in range(2)]
    for replica in replicas:
        replica.__enter__()
    assert version_utils.should_use_v2 is not before
    for replica in replicas:
        replica.__exit__(None, None, None)
    assert version_utils.should_use_v2 is before


def test_the_arguments_of_compile_are_kept(family: Any) -> None:
    assert build(family)._compile_config.config["loss"] == "mse"
