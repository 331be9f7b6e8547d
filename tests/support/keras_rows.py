"""What Keras 3.15's trainer and optimizers promise, a row each: the table of docs/how_to/keras_model.md.

`tests/programs/test_keras_trainer.py` holds each row: it is what `fit` does, on one replica, and the same on several;
or it is refused by name. `python -m tests.support.keras_rows` writes the table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, metrics, ops, optimizers

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "keras_model.md"

_DRAW = np.random.default_rng(0)
X = _DRAW.normal(size=(48, 3)).astype(np.float32)
Y = (X @ [[1.0], [2.0], [3.0]]).astype(np.float32)
OTHER_Y = (X @ [[0.5], [-1.0], [1.0]]).astype(np.float32)
WEIGHTS = _DRAW.uniform(0.5, 2.0, size=48).astype(np.float32)
CLASSES = (Y[:, 0] > 0).astype(np.int32)
TOKENS, OF_TOKENS = _DRAW.integers(0, 5, size=(48, 6)), _DRAW.normal(size=(48, 6, 1)).astype(np.float32)
CLASS_WEIGHTS = {0: 1.0, 1: 3.0}

SAME = "as in `fit`"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
      name: what the user writes, in Markdown.
      says: what becomes of it.
      build: returns the compiled model.
      data: the arguments of `fit`: features, labels and perhaps sample weights.
      fit: further arguments of `fit`.
      replicas: the most on which it works; 0: it is refused.
      bound: how far the numbers of several replicas may be apart, for half precision.
    """

    name: str
    says: str
    build: Callable[[], Any]
    data: tuple[Any, ...] = (X, Y)
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicas: int = 3
    bound: float = 5e-6

    @property
    def id(self) -> str:
        return re.sub(r"[`\[\]]|\(.*?\)", "", self.name).strip()


# --- models ---------------------------------------------------------------------------------------------------------


def dense(units: int, name: str, **settings: Any) -> layers.Layer:
    return layers.Dense(units, kernel_initializer=keras.initializers.RandomNormal(seed=3), name=name, **settings)


def network(kind: type = keras.Model, hidden: Callable[[Any], Any] = lambda x: x, **settings: Any) -> Any:
    x = keras.Input((3,), name="x")
    inner = hidden(dense(4, "hidden", activation="tanh", **settings)(x))
    return kind(x, dense(1, "out", **settings)(inner))


def two_outputs(*, named: bool = False) -> Any:
    x = keras.Input((3,), name="x")
    inner = dense(4, "hidden", activation="tanh")(x)
    outputs = {"a": dense(1, "a")(inner), "b": dense(1, "b")(inner)}
    return keras.Model(x, outputs if named else list(outputs.values()))


def masked() -> Any:
    x = keras.Input((6,), dtype="int32", name="x")
    normal = keras.initializers.RandomNormal(seed=3)
    embedded = layers.Embedding(5, 3, mask_zero=True, embeddings_initializer=normal, name="embedding")(x)
    inner = layers.LSTM(3, return_sequences=True, kernel_initializer=normal, recurrent_initializer=normal)(embedded)
    return keras.Model(x, dense(1, "out")(inner))


def classes() -> Any:
    return keras.Sequential([keras.Input((3,), name="x"), dense(2, "out")])


def compiled(model: Any, optimizer: Any = None, loss: Any = "mse", **settings: Any) -> Any:
    model.compile(optimizer or optimizers.SGD(0.05), loss, **settings)
    return model


def frozen() -> Any:
    """Frozen after `compile`."""
    model = compiled(network())
    model.get_layer("hidden").trainable = False
    return model


def quantized(mode: str) -> Any:
    model = network()
    for name in ("hidden", "out"):
        model.get_layer(name).quantize(mode)
    return compiled(model)


def with_lora() -> Any:
    model = network()
    model.get_layer("hidden").enable_lora(2, a_initializer=keras.initializers.RandomNormal(seed=4))
    return compiled(model)


def in_half(**settings: Any) -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return compiled(network(), **settings)
    finally:
        keras.config.set_dtype_policy(before)


def not_decayed(**which: Any) -> Any:
    optimizer = optimizers.AdamW(0.05, weight_decay=0.2)
    optimizer.exclude_from_weight_decay(**which)
    return compiled(network(), optimizer)


class Penalty(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class OwnLoss(keras.Model):
    """`compute_loss` as it was before Keras 3.3."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return ops.mean(ops.abs(y - y_pred))


class Stopping(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.stop_training = True
        return ops.mean(ops.abs(y - y_pred))


class OwnMetrics(keras.Model):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, ops.cast(y > 0, "float32"), ops.sigmoid(y_pred), sample_weight)
        precision, recall = found["precision"], found["recall"]
        return {"f1": 2 * precision * recall / (precision + recall), "perplexity": ops.exp(found["loss"])}


class OfOneBatch(keras.Model):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"mean": ops.mean(y_pred)}


class OwnTrainStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        raise RuntimeError("train_step")


class OwnTestStep(keras.Model):
    def test_step(self, data: Any) -> Any:
        raise RuntimeError("test_step")


class OwnFit(keras.Model):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)


class InParts(optimizers.Optimizer):
    """An optimizer for each half of the variables."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.05, name="in_parts")
        self.parts = [optimizers.SGD(0.05, name="first"), optimizers.Adam(0.05, name="second")]

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.half = len(variables) // 2
        for part, of_part in zip(self.parts, self._halves(variables), strict=True):
            part.build(of_part)

    def _halves(self, values: Any) -> tuple[Any, Any]:
        return values[: self.half], values[self.half :]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables)
        if not self.built:
            self.build(variables)
        for part, *of_part in zip(self.parts, self._halves(grads), self._halves(variables), strict=True):
            part.apply(*of_part)
        self.iterations.assign_add(1)


def sgd(**settings: Any) -> Callable[[], Any]:
    return lambda: compiled(network(), optimizers.SGD(0.05, **settings))


def adam(**settings: Any) -> Callable[[], Any]:
    return lambda: compiled(network(), optimizers.Adam(0.05, **settings))


# --- the table ------------------------------------------------------------------------------------------------------

MODEL = [
    Row("`add_loss` in `call`, regularizers", SAME,
        lambda: compiled(network(hidden=Penalty(), kernel_regularizer="l2"))),
    Row("`activity_regularizer`", SAME, lambda: compiled(network(activity_regularizer="l2"))),
    Row("constraints", SAME, lambda: compiled(network(kernel_constraint="non_neg"))),
    Row("masks (`mask_zero`)", "as in `fit`: the mean over what is not masked in the batch of all replicas",
        lambda: compiled(masked(), metrics=["mae"], weighted_metrics=["mse"]), (TOKENS, OF_TOKENS)),
    Row("`compute_loss`", "called", lambda: compiled(network(OwnLoss), loss=None)),
    Row("`compute_metrics`, `get_metrics_result`", "called; what they return is reported, but for `loss`. One replica "
        "evaluates if the state of a metric is not a sum",
        lambda: compiled(network(OwnMetrics), metrics=[metrics.Precision(name="precision"),
                                                        metrics.Recall(name="recall")])),
    Row("`compute_metrics` that returns a value of one batch", "refused: `fit` would report the last batch's",
        lambda: compiled(network(OfOneBatch)), replicas=0),
    Row("`train_step` of a class", "refused, also of a class of a library: `compute_loss`, or an `EstimatorSpec`",
        lambda: compiled(network(OwnTrainStep)), replicas=0),
    Row("`test_step`, `predict_step`", "refused", lambda: compiled(network(OwnTestStep)), replicas=0),
    Row("`fit`, `evaluate`, `predict`, `make_train_function`, `train_on_batch` of a class, ...", "refused",
        lambda: compiled(network(OwnFit)), replicas=0),
    Row("`stop_training`", "refused in `compute_loss`; [a hook](hooks.md) calls `run.request_stop`",
        lambda: compiled(network(Stopping), loss=None), replicas=0),
    Row("`layer.trainable` changed after `compile`", SAME, frozen),
    Row("`dtype=\"float64\"` of layers", SAME, lambda: compiled(network(dtype="float64"))),
    Row("`dtype=\"mixed_bfloat16\"` of layers", "as in `fit`; several replicas round other sums",
        lambda: compiled(network(dtype="mixed_bfloat16")), bound=2e-2),
    Row("`enable_lora`", SAME, with_lora),
    Row("`quantize(\"int8\")` in model_fn", "refused: quantize and save the model in a script, and load it in model_fn",
        lambda: quantized("int8"), replicas=0),
    Row("`quantize(\"float8\")`", "as in `fit` on one replica; refused on several", lambda: quantized("float8"),
        replicas=1),
]  # fmt: skip

COMPILE = [
    Row("`loss`: one", SAME, lambda: compiled(network())),
    Row("`loss`: a list, `loss_weights`", SAME,
        lambda: compiled(two_outputs(), loss=["mse", "mae"], loss_weights=[1.0, 0.3]), (X, (Y, OTHER_Y))),
    Row("`loss`: a dict", SAME, lambda: compiled(two_outputs(named=True), loss={"a": "mse", "b": "mae"}),
        (X, {"a": Y, "b": OTHER_Y})),
    Row("`metrics`, `weighted_metrics`, sample weights in third place", SAME,
        lambda: compiled(network(), metrics=["mae"], weighted_metrics=["mse"]), (X, Y, WEIGHTS)),
    Row("sample weights of each output", SAME, lambda: compiled(two_outputs(), loss=["mse", "mae"]),
        (X, (Y, OTHER_Y), (WEIGHTS, WEIGHTS[::-1].copy()))),
    Row("`class_weight` of `fit`", "sample weights, [looked up from the label](tabular_data.md#class-weights)",
        lambda: compiled(classes(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        (X, CLASSES), {"class_weight": CLASS_WEIGHTS}),
    Row("`steps_per_execution`", "no effect, and a warning: the runner chooses how many steps a call takes",
        lambda: compiled(network(), steps_per_execution=4)),
    Row("`jit_compile`", "the numbers are those of `fit`; [`train.jit`](training.md#compiling-with-xla) compiles the "
        "step",
        lambda: compiled(network(), jit_compile=True)),
    Row("`run_eagerly`", "no effect, and a warning: [`run.eager`](debug.md) runs the step eagerly",
        lambda: compiled(network(), run_eagerly=True)),
    Row("`auto_scale_loss=True` where layers compute in float16",
        "refused, unless [`train.precision=mixed_float16`](training.md) scales the loss", in_half, replicas=0),
    Row("`auto_scale_loss=False`", "as in `fit`; several replicas round other sums",
        lambda: in_half(auto_scale_loss=False), bound=1e-2),
]  # fmt: skip

_AVERAGED = {"use_ema": True, "ema_momentum": 0.9}
OPTIMIZER = [
    Row("`SGD`, `Adam` and the others of `keras.optimizers`", SAME, adam()),
    Row("`weight_decay`", SAME, sgd(weight_decay=0.1)),
    Row("`exclude_from_weight_decay`", SAME, lambda: not_decayed(var_names=["bias"])),
    Row("`clipnorm`", "as in `fit` on one replica, on several too: of the gradients' sum", adam(clipnorm=0.1)),
    Row("`clipvalue`", "the same", sgd(clipvalue=0.05)),
    Row("`global_clipnorm`", "the same", sgd(global_clipnorm=0.1)),
    Row("`gradient_accumulation_steps`",
        "as in `fit` on one replica; refused on several: [`train.gradient_accumulation`](training.md)",
        sgd(gradient_accumulation_steps=2), replicas=1),
    Row("`loss_scale_factor`", SAME, sgd(loss_scale_factor=8.0)),
    Row("`use_ema`", "evaluations, predictions and exports have the averages, as after `fit`; the weights stay beside "
        "them, so that a resumed run is the undisturbed one", adam(**_AVERAGED)),
    Row("`ema_overwrite_frequency`", "the same, and the weights become the averages at these steps",
        sgd(**_AVERAGED, ema_overwrite_frequency=5)),
    Row("schedules, and a function as learning rate", SAME,
        lambda: compiled(network(), optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)))),
    Row("an optimizer that has others", SAME, lambda: compiled(network(), InParts())),
    Row("`LossScaleOptimizer`", "its inner optimizer is applied: see `auto_scale_loss`",
        lambda: compiled(network(), optimizers.LossScaleOptimizer(optimizers.SGD(0.05)))),
]  # fmt: skip

TABLES = {"A class, its layers": MODEL, "`compile` and `fit`": COMPILE, "The optimizer": OPTIMIZER}
_OTHERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adamax", "AdamW", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop",
)  # fmt: skip


def _other(name: str) -> Row:
    return Row(f"`{name}`", SAME, lambda: compiled(network(), getattr(optimizers, name)(0.03)), bound=2e-5)


OTHERS = [_other(name) for name in _OTHERS]
ROWS = [*(row for rows in TABLES.values() for row in rows), *OTHERS]

MEETING = [
    Row("masks, averages, global clip", SAME,
        lambda: compiled(masked(), optimizers.Adam(0.05, **_AVERAGED, ema_overwrite_frequency=5, global_clipnorm=0.1),
                         metrics=["mae"], weighted_metrics=["mse"]), (TOKENS, OF_TOKENS)),
    *(row for row in MODEL if row.id.startswith("compute_metrics,")),
]  # fmt: skip
"""Those whose replicas have to meet, several in one model: for three replicas, and for several workers."""


def batches(row: Row, size: int, epochs: int = 1) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(row.data).repeat(epochs).batch(size)


def table() -> str:
    """Return the tables in Markdown."""
    parts = []
    for title, rows in TABLES.items():
        lines = [f"| {title} | here |", "|---|---|", *(f"| {row.name} | {row.says} |" for row in rows)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


BEGIN, END = "<!-- the table of tests/support/keras_rows.py -->\n\n", "\n<!-- its end -->\n"


def in_page() -> str:
    """Return the tables that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(BEGIN + in_page() + END, BEGIN + table() + END))
