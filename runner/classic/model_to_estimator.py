"""`model_to_estimator`: a compiled Keras model, of Keras 3 or tf_keras, becomes an Estimator."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from runner.checkpoint.layout import latest_checkpoint
from runner.checkpoint.reader import Reader
from runner.classic import run_config
from runner.classic.estimator import Estimator
from runner.classic.optimizers import clipped_as_before
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.model import Model
from runner.programs.program import Program
from runner.run_config import RunConfig, WarmStart, with_model_dir
from runner.tf_private import keras_models, tensor_bundle

v1 = tf.compat.v1

_FORMATS = ("checkpoint", "saver", None)
_WEIGHTS = os.path.join("keras", "keras_model.ckpt")


def model_to_estimator(
    keras_model: Any = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    checkpoint_format: str | None = None,
    metric_names_map: Mapping[str, str] | None = None,
    export_outputs: Mapping[str, Any] | None = None,
) -> Estimator:
    """An Estimator that trains what `keras_model.fit` would train, under any strategy.

    Weights begin as those of the model are now, if it has any; they are written to `model_dir/keras`, and an evaluation
    before any training has them. The optimizer begins anew. The given model itself is not changed. Of a dict
    `{"features": .., "sample_weights": ..}` the second weights the losses and the `weighted_metrics`.

    Args:
      keras_model: compiled; functional, sequential, or a class of the user's own with `get_config` and `from_config`.
      keras_model_path: of a saved model, in its place; `tf.keras` loads it, with `custom_objects`.
      config: of `tf.estimator`, or of the runner.
      checkpoint_format: "checkpoint" or "saver", as 2.15 wrote: either goes on here. What is written is what "saver"
        wrote there, and reads: its keys are names of variables.
      metric_names_map: name of a metric in Keras -> its name in the results.
      export_outputs: name -> `tf.estimator.export.ExportOutput`; None: the predictions.

    Raises:
      ValueError: neither or both of model and path; the model is not compiled, or cannot be built again.
    """
    if (keras_model is None) == (keras_model_path is None):
        raise ValueError("model_to_estimator: set either keras_model or keras_model_path.")
    if checkpoint_format not in _FORMATS:
        raise ValueError(f"model_to_estimator(checkpoint_format={checkpoint_format!r}): 'checkpoint' or 'saver'.")
    if keras_model_path is not None:
        keras_model = tf.keras.models.load_model(os.fspath(keras_model_path), custom_objects=dict(custom_objects or {}))
    family = _family_of(keras_model)
    if not family.is_compiled(keras_model):
        raise ValueError(
            f"model_to_estimator: {keras_model.name!r} is not compiled. Call model.compile(optimizer=, loss=) first."
        )
    config = with_model_dir(model_dir, run_config.RunConfig() if config is None else config)
    optimizer = family.optimizer_of_before(keras_model, among_all=not _has_state_of_keras(str(config.model_dir)))
    template = _Template(family, keras_model, optimizer, metric_names_map or {}, export_outputs or {})
    return _KerasEstimator(template, config)


def _has_state_of_keras(model_dir: str) -> bool:
    """Report whether the checkpoints have no state of an optimizer under tf.estimator's names: runs of before the
    runner knew all of these optimizers go on with that of Keras.
    """
    latest = latest_checkpoint(model_dir)
    return latest is not None and not any(name.startswith("training/") for name in Reader(latest).names())


class _KerasEstimator(Estimator):
    """An Estimator whose model begins with the weights of a Keras model."""

    def __init__(self, template: _Template, config: RunConfig) -> None:
        path = os.path.join(str(config.model_dir), _WEIGHTS)
        super().__init__(template.model_fn, config=config.replace(warm_start=WarmStart(path, include=(".*",))))
        self._template = template

    def _warm_start(self, model: Model) -> None:
        self._write_weights(model)
        super()._warm_start(model)

    def _checkpoint(self, path: str | None, command: str) -> str:
        return path or os.path.join(self.model_dir, _WEIGHTS)

    @contextlib.contextmanager
    def _restored(self, model: Model, program: Program, path: str) -> Iterator[None]:
        if path.endswith(_WEIGHTS):
            self._write_weights(model)
        with super()._restored(model, program, path):
            yield

    def _write_weights(self, model: Model) -> None:
        """A checkpoint of step 0 that `model`, which has been traced, can be restored from: the chief's, for all."""
        path = Path(self.model_dir, _WEIGHTS)
        values = {**model.values(), **self._template.weights}
        if self.collectives.is_chief:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensor_bundle.write_bundle(path, values)
        self.collectives.sum([])  # it is there now


class _Template:
    """A Keras model that is built anew in each trace."""

    def __init__(
        self,
        family: _Family,
        model: Any,
        optimizer: Callable[[], Any] | None,
        metric_names: Mapping[str, str],
        export_outputs: Mapping[str, Any],
    ) -> None:
        self._family, self._model = family, model
        self._metric_names, self._export_outputs = metric_names, export_outputs
        self._compile_with = _compiled_with(model)
        self._optimizer = optimizer
        if self._optimizer is not None:  # `compile` wants one all the same; this makes no variables
            self._compile_with["optimizer"] = family.keras.optimizers.legacy.SGD
        self.weights: dict[str, np.ndarray] = {}
        """Name in the trace -> value in the given model; known once a model has been built in a trace."""

    def model_fn(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        features, sample_weights = _split(features)
        with self._family.tracing():
            model = self._rebuilt()
            model.compile(**{name: make() for name, make in self._compile_with.items()})
            outputs = model(_named(model, features), training=mode == ModeKeys.TRAIN)
            self._note_weights(model)
            predictions = dict(zip(_output_names(model, outputs), tf.nest.flatten(outputs), strict=True))
            spec = EstimatorSpec(mode, predictions, export_outputs=self._export_outputs)
            if mode == ModeKeys.PREDICT:
                return spec
            training = {"training": mode == ModeKeys.TRAIN} if self._family.loss_takes_training else {}
            loss = model.compute_loss(features, labels, outputs, sample_weights, **training)
            if mode == ModeKeys.TRAIN:
                return spec._replace(loss=loss, optimizer=self._optimizer_of(model))
            model.compute_metrics(features, labels, outputs, sample_weights)
            return spec._replace(loss=loss, eval_metric_ops=self._metrics(model))

    def _optimizer_of(self, model: Any) -> Any:
        if self._optimizer is None:
            return model.optimizer
        optimizer = self._optimizer()
        optimizer.count_by(v1.train.get_global_step())
        return optimizer

    def _rebuilt(self) -> Any:
        """A model like the given one, with variables of its own."""
        if isinstance(self._model, self._family.of_layers):
            return self._family.clone(self._model)
        try:
            return type(self._model).from_config(self._model.get_config())
        except (NotImplementedError, TypeError) as error:
            raise ValueError(
                f"model_to_estimator: a {type(self._model).__name__} cannot be built again from its config: "
                f"{' '.join(str(error).split())} Give the class get_config and from_config, or build it inside a "
                "model_fn that returns it."
            ) from error

    def _note_weights(self, model: Any) -> None:
        if self.weights or not self._model.built:
            return
        ours, theirs = list(model.weights), list(self._model.weights)
        if [tuple(one.shape) for one in ours] != [tuple(one.shape) for one in theirs]:
            raise ValueError(
                f"model_to_estimator: {self._model.name!r} has other weights when it is rebuilt: "
                f"{[tuple(one.shape) for one in ours]} instead of {[tuple(one.shape) for one in theirs]}. Call it on "
                "a batch first, so that all weights exist."
            )
        with tf.init_scope():
            values = {self._family.name(one): np.array(other) for one, other in zip(ours, theirs, strict=True)}
        self.weights = values

    def _metrics(self, model: Any) -> dict[str, Any]:
        flat = [inner for metric in model.metrics for inner in (getattr(metric, "metrics", None) or [metric])]
        return {self._metric_names.get(one.name, one.name): one for one in flat if one.name != "loss"}


class _Family:
    """What Keras 3 and tf_keras call by the same names; here Keras 3."""

    loss_takes_training = True

    def __init__(self, keras: Any) -> None:
        self.keras = keras
        one = keras.Input([1])
        self.of_layers = (keras.Sequential, type(keras.Model(one, one)))

    def is_compiled(self, model: Any) -> bool:
        return bool(model.compiled)

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def name(self, weight: Any) -> str:
        """In the checkpoint."""
        return str(weight.value.name).partition(":")[0]

    def optimizer_of_before(self, model: Any, *, among_all: bool) -> Callable[[], Any] | None:
        """Makes what tf.estimator trained such a model with, in place of its optimizer; None: that itself.

        Args:
          among_all: as of `clipped_as_before`.
        """
        return None

    def clone(self, model: Any) -> Any:
        """A model of such layers; not compiled."""
        with mock.patch.object(model, "compiled", False):  # it would be compiled from its config, by eager values
            return self.keras.models.clone_model(model, clone_function=self._cloned)

    def _cloned(self, layer: Any) -> Any:
        if isinstance(layer, self.keras.layers.Lambda):  # it is in this process already: nothing is loaded from a file
            return type(layer).from_config(layer.get_config(), safe_mode=False)
        return type(layer).from_config(layer.get_config())


class _Keras2(_Family):
    """tf_keras.

    tf.estimator trained its models with what is `optimizers.legacy` today, whichever they were compiled with: so do we,
    by the names that the state of these has in its checkpoints.
    """

    loss_takes_training = False

    def optimizer_of_before(self, model: Any, *, among_all: bool) -> Callable[[], Any] | None:
        return clipped_as_before(model.optimizer, among_all=among_all)

    def is_compiled(self, model: Any) -> bool:
        return model.compiled_loss is not None

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return keras_models.as_in_a_function()

    def name(self, weight: Any) -> str:
        return str(weight.name).partition(":")[0]

    def clone(self, model: Any) -> Any:
        return self.keras.models.clone_model(model)


def _family_of(model: Any) -> _Family:
    for name, family in (("keras", _Family), ("tf_keras", _Keras2)):
        if name in sys.modules and isinstance(model, sys.modules[name].Model):
            return family(sys.modules[name])
    raise ValueError(f"model_to_estimator: {model!r} is no model of Keras 3 or tf_keras.")


def _split(features: Any) -> tuple[Any, Any]:
    """(features, weights of the examples) as an input_fn for a Keras model gives them."""
    if isinstance(features, Mapping) and set(features) == {"features", "sample_weights"}:
        return features["features"], features["sample_weights"]
    return features, None


def _named(model: Any, features: Any) -> Any:
    """Of a dict of features those that the inputs of the model name, in their order."""
    inputs = getattr(model, "inputs", None)
    if not isinstance(features, Mapping) or not inputs:
        return features
    names = [tensor.name.partition(":")[0] for tensor in inputs]
    missing = [name for name in names if name not in features]
    if missing:
        raise ValueError(
            f"model_to_estimator: {model.name!r} has the inputs {', '.join(names)}; input_fn gives "
            f"{', '.join(map(str, features))}. Name its features as the inputs, or give a tensor."
        )
    given = {name: features[name] for name in names}
    if len(names) == 1:
        return given[names[0]]
    return given if isinstance(model.input, Mapping) else list(given.values())


def _output_names(model: Any, outputs: Any) -> list[str]:
    flat = tf.nest.flatten(outputs)
    names = list(getattr(model, "output_names", None) or [])
    return names if len(names) == len(flat) else [f"output_{number + 1}" for number in range(len(flat))]


def _compiled_with(model: Any) -> dict[str, Callable[[], Any]]:
    """Argument of `compile` -> makes it once more, with state of its own."""
    given = {**keras_models.compile_arguments(model), "optimizer": model.optimizer}
    renewed, kept = ("optimizer", "metrics", "weighted_metrics"), ("loss", "loss_weights")
    return {
        name: _recipe(given[name]) if name in renewed else functools.partial(given.get, name)
        for name in (*renewed, *kept)
        if given.get(name) is not None
    }


def _recipe(nest: Any) -> Callable[[], Any]:
    """Makes optimizers and metrics of a nest anew; names and functions are what they are. Configs are read now."""
    if isinstance(nest, Mapping):
        inner = {name: _recipe(one) for name, one in nest.items()}
        return lambda: {name: make() for name, make in inner.items()}
    if isinstance(nest, list | tuple):
        makers = [_recipe(one) for one in nest]
        return lambda: [make() for make in makers]
    if hasattr(nest, "get_config") and not isinstance(nest, type):
        return functools.partial(type(nest).from_config, _without_number(type(nest), nest.get_config()))
    return lambda: nest


def _without_number(kind: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the name `sgd_1` that Keras 3 gave to the second SGD of a process: variables are named by it."""
    name = str(config.get("name"))
    base, _, number = name.rpartition("_")
    is_counted = number.isdigit() and base.replace("_", "") == kind.__name__.lower()
    return {key: value for key, value in config.items() if key != "name" or not is_counted}
