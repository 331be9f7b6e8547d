"""`model_to_estimator`, which makes an Estimator from a compiled model of Keras 3 or tf_keras."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from runner.checkpoint.reader import GLOBAL_STEP
from runner.checkpoint_files.layout import latest_checkpoint
from runner.classic import run_config
from runner.classic.estimator import Estimator
from runner.classic.optimizers import InParts, clipped_as_before
from runner.export.outputs import DEFAULT, PredictOutput
from runner.model_fn import EstimatorSpec, MissingFeatureError, ModeKeys
from runner.programs.model import Model
from runner.programs.program import Program
from runner.run_config import RunConfig, WarmStart, with_model_dir
from runner.tf_private import keras_models, tensor_bundle, tf_estimator
from runner.tf_private.keras3 import keras_trace
from runner.tf_private.optimizers import renewed_in

v1 = tf.compat.v1

_CHECKPOINT_FORMATS = ("checkpoint", "saver", None)
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
    """Return an Estimator that trains as `keras_model.fit` would, under any strategy.

    The Estimator starts from the current weights of the model, if the model is built. They are in the checkpoint
    `model_dir/keras/keras_model.ckpt`, which is also evaluated and exported if no training came first: at once if the
    model is functional or sequential, else when the Estimator is first used. The optimizer starts with fresh state.
    `keras_model` itself is not changed. If input_fn yields features as a dict `{"features": .., "sample_weights": ..}`,
    the sample weights apply to the losses and the `weighted_metrics`.

    Args:
      keras_model: a compiled model: functional, sequential, or of a class with `get_config` and `from_config`.
      keras_model_path: path of a saved model, instead of keras_model; it is loaded with `tf.keras.models.load_model`.
      custom_objects: name -> class or function, for loading keras_model_path and for copying the model.
      model_dir: as in `Estimator`.
      config: a RunConfig of tf.estimator or of the runner; None: `tf.estimator.RunConfig()`.
      checkpoint_format: ignored. New checkpoints have variable names as keys ("saver"); a model_dir of TensorFlow 2.15
        can be resumed in this format and in the format "checkpoint", which a model of the user's class cannot have.
      metric_names_map: name of each metric given to `compile` -> its name in the results of evaluations.
      export_outputs: name of an output -> class of its signature, such as `tf.estimator.export.RegressionOutput`; or
        signature name -> ExportOutput. In addition to the predictions.

    Raises:
      ValueError: both or neither of keras_model and keras_model_path are given, the model is not compiled, its class
        has no config, or checkpoint_format is unknown. When model_fn is called: metric_names_map has other names than
        those of the metrics, or sample weights do not fit the outputs.
      Exception: what Keras raises if the model cannot be rebuilt from its config.
      KeyError: when model_fn is called: features, labels or export_outputs lack, or have, other names than the model.
    """
    if (keras_model is None) == (not keras_model_path):
        raise ValueError("model_to_estimator: give exactly one of keras_model and keras_model_path.")
    if checkpoint_format not in _CHECKPOINT_FORMATS:
        raise ValueError(
            f"model_to_estimator(checkpoint_format={checkpoint_format!r}): it must be 'checkpoint', 'saver' or None."
        )
    if keras_model_path is not None:
        keras_model = tf.keras.models.load_model(os.fspath(keras_model_path), custom_objects=dict(custom_objects or {}))
    family = _family_of(keras_model)
    if not family.is_compiled(keras_model):
        raise ValueError(
            f"model_to_estimator: {keras_model.name!r} is not compiled. Call model.compile(optimizer=, loss=) first."
        )
    if checkpoint_format == "checkpoint" and not isinstance(keras_model, family.classes_with_layers):
        raise ValueError(
            f"model_to_estimator(checkpoint_format='checkpoint'): {keras_model.name!r} is of a class of your own, "
            "which needs the format 'saver'."
        )
    if config is None:
        config = run_config.RunConfig()
    template = _Template(family, keras_model, metric_names_map or {}, export_outputs or {}, custom_objects or {})
    return _KerasEstimator(template, with_model_dir(model_dir, config))


class _KerasEstimator(Estimator):
    """An Estimator whose model starts from the weights of a Keras model."""

    def __init__(self, template: _Template, config: RunConfig) -> None:
        path = os.path.join(str(config.model_dir), _WEIGHTS)
        super().__init__(template.model_fn, config=config.replace(warm_start=WarmStart(path, include=(".*",))))
        self._template = template
        if template.weights and self.config.place.is_chief and latest_checkpoint(self.model_dir) is None:
            self._write({GLOBAL_STEP: np.array(0, np.int64), **template.weights})

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
        """Write a checkpoint with the weights of the Keras model, from which the traced `model` can be restored. The
        chief writes it; all workers call this together.
        """
        values = {**model.values(), **self._template.weights}
        if self.collectives.is_chief:
            self._write(values)
        model.collectives.sum([])  # a barrier of all that have this model: the file exists once it returns

    def _write(self, values: Mapping[str, np.ndarray]) -> None:
        path = Path(self.model_dir, _WEIGHTS)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensor_bundle.write_bundle(path, values)
        v1.train.update_checkpoint_state(str(path.parent), str(path))


@dataclasses.dataclass(eq=False)
class _Template:
    """A Keras model; each call of `model_fn` builds a copy of it.

    Attributes:
      weights: variable name in a trace -> value in the given model; {} until a built copy has shown the names.
    """

    _family: _Family
    _model: Any
    _metric_names: Mapping[str, str]
    _export_outputs: Mapping[str, Any]
    _custom_objects: Mapping[str, Any]
    weights: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._make_legacy_optimizers = self._family.legacy_optimizers_maker(self._model)
        optimizer_to_compile = self._model.optimizer
        if self._make_legacy_optimizers is not None:
            optimizer_to_compile = (
                self._family.keras.optimizers.legacy.SGD()
            )  # `compile` requires one; this makes no variables
        self._compile_makers = _makers_of_compile_arguments(self._model, optimizer_to_compile)
        self._values: list[np.ndarray] = []
        if self._model.built:
            self._values = [np.array(weight) for weight in self._model.weights]
        # As in tf.estimator, a model that cannot be rebuilt is refused at once. In a graph this makes no values.
        with tf.Graph().as_default() as graph, keras_trace(graph), self._family.tracing():
            self._store_weights(self._rebuild())

    def model_fn(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Return the EstimatorSpec of a new copy of the model. The first call may also set `weights`."""
        sample_weights = None
        if isinstance(features, Mapping) and set(features) == {"features", "sample_weights"}:
            sample_weights = features["sample_weights"]
            features = features["features"]
        with self._family.tracing():
            model = self._rebuild()
            inputs = _as_model_inputs(model, features)
            model = self._family.with_known_input(model, inputs)
            model.compile(**{name: make() for name, make in self._compile_makers.items()})
            outputs = model(inputs, training=mode == ModeKeys.TRAIN)
            self._store_weights(model)
            predictions = dict(zip(_output_names(model, outputs), tf.nest.flatten(outputs), strict=True))
            spec = EstimatorSpec(mode, predictions, export_outputs=self._signatures(predictions))
            if mode == ModeKeys.PREDICT:
                return spec
            labels = _in_structure_of_outputs(model, outputs, labels)
            sample_weights = _in_structure_of_outputs(model, outputs, sample_weights, are_weights=True)
            keras_3_arguments: dict[str, Any] = {}
            if self._family.loss_takes_training:
                keras_3_arguments["training"] = mode == ModeKeys.TRAIN
            loss = model.compute_loss(features, labels, outputs, sample_weights, **keras_3_arguments)
            if mode == ModeKeys.TRAIN:
                if self._metric_names:  # checked in each mode, as in tf.estimator
                    self._metrics(model, labels, outputs)
                return spec._replace(loss=loss, optimizer=self._optimizer_of(model))
            model.compute_metrics(features, labels, outputs, sample_weights)
            return spec._replace(loss=loss, eval_metric_ops=self._metrics(model, labels, outputs))

    def _signatures(self, predictions: Mapping[str, Any]) -> dict[str, Any]:
        """Return signature name -> ExportOutput for `export_outputs` and the predictions; {} if none were given."""
        if not self._export_outputs:
            return {}
        classes = [name for name, output in self._export_outputs.items() if isinstance(output, type)]
        _values_by_name(predictions, classes, "export_outputs: the outputs of the model")  # for its error
        signatures: dict[str, Any] = {DEFAULT: PredictOutput(dict(predictions))}
        for name, output in self._export_outputs.items():
            signatures[name] = output(predictions[name]) if name in classes else output
        return signatures

    def _optimizer_of(self, model: Any) -> Any:
        """Return the optimizer of the trainable variables of a copy of the model, or one for each of its parts."""
        optimizers = [model.optimizer] if self._make_legacy_optimizers is None else list(self._make_legacy_optimizers())
        parts = [model]
        if len(optimizers) > 1:
            # The only models with several optimizers are those of the class WideDeepModel, which has one for each part.
            parts = [model.linear_model, model.dnn_model]
        names = [self._names_of_trained(part) for part in parts]
        # tf_keras makes the variables of a frozen layer trainable, too.
        trainable = {variable.name.partition(":")[0] for variable in v1.trainable_variables()}
        if len(names) == 1 and names[0] >= trainable:  # no variable has to be left out
            return optimizers[0]
        return InParts(optimizers, names)

    def _names_of_trained(self, model: Any) -> set[str]:
        return {self._family.name(weight) for weight in model.trainable_weights}

    def _rebuild(self) -> Any:
        """Return a copy of the given model with new variables."""
        try:
            with self._family.keras.utils.custom_object_scope(dict(self._custom_objects)):
                if isinstance(self._model, self._family.classes_with_layers):
                    return self._family.clone(self._model)
                return type(self._model).from_config(self._model.get_config())
        except Exception as error:
            hint = (
                f"model_to_estimator: a {type(self._model).__name__} cannot be rebuilt from its config. Define "
                "get_config and from_config in its class, give custom_objects=, or build the model in a model_fn."
            )
            if isinstance(error, NotImplementedError):
                raise ValueError(hint) from error
            error.add_note(hint)
            raise

    def _store_weights(self, model: Any) -> None:
        """Set `weights` by the names that a copy of the model has, unless they are set, or the copy is not built yet.

        Raises:
          ValueError: the weights of the copy have other shapes than those of the given model.
        """
        if self.weights or not self._values or not model.built:
            return
        rebuilt_shapes = [tuple(weight.shape) for weight in model.weights]
        given_shapes = [tuple(value.shape) for value in self._values]
        if rebuilt_shapes != given_shapes:
            raise ValueError(
                f"model_to_estimator: when {self._model.name!r} is rebuilt, its weights have the shapes "
                f"{rebuilt_shapes} instead of {given_shapes}. Call the model on a batch first, so that all weights "
                "exist."
            )
        names = [self._family.name(weight) for weight in model.weights]
        self.weights = dict(zip(names, self._values, strict=True))

    def _metrics(self, model: Any, labels: Any, outputs: Any) -> dict[str, Any]:
        metric_by_name = self._family.metrics(model, labels, outputs)
        names = self._metric_names
        if names and metric_by_name and set(names) != set(metric_by_name):
            raise ValueError(
                f"metric_names_map names {[*names]}, but the metrics given to compile are {[*metric_by_name]}."
            )
        return {names.get(name, name): metric for name, metric in metric_by_name.items()}


class _Family:
    """The operations that differ between Keras 3 and tf_keras, for Keras 3."""

    loss_takes_training = True

    def __init__(self, keras: Any) -> None:
        self.keras = keras
        some_input = keras.Input([1])
        self.classes_with_layers = (keras.Sequential, type(keras.Model(some_input, some_input)))

    def is_compiled(self, model: Any) -> bool:
        return bool(model.compiled)

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        # Keras 3 was never written for TensorFlow 1: after tf.disable_v2_behavior() its losses fail at the dimensions.
        return tf_estimator.dimensions_of_tf2()

    def name(self, weight: Any) -> str:
        """Return the name that a weight has in the checkpoint."""
        return str(weight.path)

    def legacy_optimizers_maker(self, model: Any) -> Callable[[], Sequence[Any]] | None:
        """Return a function that makes the optimizers with which tf.estimator trained this model. None: the model's own
        optimizer is used.

        Args:
          model: a compiled model.
        """
        return None

    def metrics(self, model: Any, labels: Any, outputs: Any) -> dict[str, Any]:
        """Return name in `fit` -> metric, of those given to `compile`."""
        # Keras keeps the metrics given to `compile` in one object, which has a list `metrics` itself.
        compiled_metrics = next((metric for metric in model.metrics if hasattr(metric, "metrics")), None)
        if compiled_metrics is None:
            return {}
        if not compiled_metrics.built:
            compiled_metrics.build(labels, outputs)
        return dict(zip(compiled_metrics.result(), compiled_metrics.metrics, strict=True))

    def with_known_input(self, model: Any, inputs: Any) -> Any:
        """Return the copy of a model, ready to be called on `inputs`: `model` itself, or a new model of its layers."""
        return model

    def clone(self, model: Any) -> Any:
        """Return an uncompiled model with copies of the layers."""
        # clone_model would also copy the compilation, which reads eager values.
        with mock.patch.object(model, "compiled", False):
            return self.keras.models.clone_model(model, clone_function=self._clone_layer)

    def _clone_layer(self, layer: Any) -> Any:
        if isinstance(layer, self.keras.layers.Lambda):  # safe: it was made in this process, not loaded from a file
            return type(layer).from_config(layer.get_config(), safe_mode=False)
        return type(layer).from_config(layer.get_config())


class _Keras2(_Family):
    """The operations that differ between Keras 3 and tf_keras, for tf_keras.

    tf.estimator trained such models with the optimizers that are now in `optimizers.legacy`, even if they were compiled
    with another class. The runner does so, too, because tf.estimator's checkpoints have the names of their variables.
    """

    loss_takes_training = False

    def legacy_optimizers_maker(self, model: Any) -> Callable[[], Sequence[Any]] | None:
        own_optimizers = model.optimizer if isinstance(model.optimizer, list | tuple) else [model.optimizer]
        makers = [self._legacy_optimizer_maker(optimizer) for optimizer in own_optimizers]
        if makers == [None]:  # the model's only optimizer has no counterpart
            return None

        def make_all() -> list[Any]:
            optimizers = []
            for make, optimizer in zip(makers, own_optimizers, strict=True):
                if make is None:
                    make = _copy_maker(optimizer)
                optimizers.append(make())
            return optimizers

        return make_all

    def _legacy_optimizer_maker(self, optimizer: Any) -> Callable[[], Any] | None:
        """Return a function that makes the optimizer with which tf.estimator trained; None: there is none."""
        wrapped = getattr(optimizer, "optimizer", None)  # `compile` wraps an optimizer of TensorFlow 1
        if isinstance(wrapped, v1.train.Optimizer):
            return lambda: renewed_in(wrapped, "training")
        return clipped_as_before(optimizer)

    def is_compiled(self, model: Any) -> bool:
        return model.compiled_loss is not None

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return keras_models.as_in_a_function()

    def name(self, weight: Any) -> str:
        return str(weight.name).partition(":")[0]

    def metrics(self, model: Any, labels: Any, outputs: Any) -> dict[str, Any]:
        if not model.compiled_metrics.built:
            model.compiled_metrics.build(outputs, labels)
        return {metric.name: metric for metric in model.compiled_metrics.metrics}

    def with_known_input(self, model: Any, inputs: Any) -> Any:
        # As in tf.estimator, names in a sequential model have no scope, even if it learns its input only here.
        learns_its_input = isinstance(model, self.keras.Sequential) and not model.built
        if not learns_its_input or not isinstance(inputs, tf.Tensor):
            return model
        keras_input = self.keras.Input(inputs.shape[1:], dtype=inputs.dtype)
        return self.keras.Sequential([keras_input, *model.layers], name=model.name)

    def clone(self, model: Any) -> Any:
        return self.keras.models.clone_model(model)


def _family_of(model: Any) -> _Family:
    for name, family in (("keras", _Family), ("tf_keras", _Keras2)):
        if name in sys.modules and isinstance(model, sys.modules[name].Model):
            return family(sys.modules[name])
    if any(base.__module__.startswith("tensorflow.python.keras") for base in type(model).__mro__):
        raise ValueError(
            f"model_to_estimator: {type(model).__name__} is a model of tensorflow.python.keras, which only works in a "
            "model_fn: import its layers and models from tensorflow.keras."
        )
    raise ValueError(f"model_to_estimator: {model!r} is not a model of Keras 3 or tf_keras.")


def _as_model_inputs(model: Any, features: Any) -> Any:
    """Return the features in the form in which the model takes its inputs.

    Features in a dict are found by the names of the inputs. Features in a list or tuple are in the order of the inputs.
    Other features are returned unchanged.

    Raises:
      KeyError: the dict lacks the name of an input.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs or not isinstance(features, Mapping | list | tuple):
        return features
    names = [tensor.name.partition(":")[0] for tensor in inputs]
    # A model with a dict of inputs takes a dict.
    if len(names) > 1 and isinstance(features, Mapping) and isinstance(model.input, Mapping):
        return {name: features[name] for name in names}
    given = _values_by_name(features, names, "the features of input_fn")
    is_single = len(names) == 1 and len(given) == 1
    return given[0] if is_single else given


def _in_structure_of_outputs(model: Any, outputs: Any, given: Any, *, are_weights: bool = False) -> Any:
    """Return labels or sample weights in the structure of the model's outputs.

    Values in a dict are found by the names of the outputs. Values in a list or tuple are in the order of the outputs.
    Other values are returned unchanged. An output without sample weights gets None.

    Raises:
      KeyError: the dict lacks the name of an output.
      ValueError: sample weights have other names, or another number.
    """
    if not isinstance(given, Mapping | list | tuple) or isinstance(outputs, Mapping):
        return given
    names = _output_names(model, outputs)
    if are_weights:
        _check_weights(given, names)
        if isinstance(given, Mapping):
            given = {**dict.fromkeys(names), **given}
    return tf.nest.pack_sequence_as(outputs, _values_by_name(given, names, "the labels of input_fn"))


def _check_weights(given: Any, names: Sequence[str]) -> None:
    if isinstance(given, Mapping):
        fits = set(given) <= set(names)
        described = str([*given])
    else:
        fits = len(given) == len(names)
        described = f"{len(given)} tensors"
    if not fits:
        raise ValueError(f"model_to_estimator: sample_weights has {described}, but the model has the outputs {names}.")


def _values_by_name(given: Any, names: Iterable[str], what: str) -> list[Any]:
    """Return the values of a dict by their names, those of a list or tuple as they are.

    Raises:
      KeyError: the dict lacks a name.
    """
    if not isinstance(given, Mapping):
        return list(given)
    missing = [name for name in names if name not in given]
    if missing:
        raise MissingFeatureError(f"model_to_estimator: {what} lack {missing}; there are {[*given]}.")
    return [given[name] for name in names]


def _output_names(model: Any, outputs: Any) -> list[str]:
    flat_outputs = tf.nest.flatten(outputs)
    names = list(getattr(model, "output_names", None) or [])
    if len(names) == len(flat_outputs):
        return names
    return [f"output_{number + 1}" for number in range(len(flat_outputs))]


def _makers_of_compile_arguments(model: Any, optimizer: Any) -> dict[str, Callable[[], Any]]:
    """Return argument of `compile` -> function that makes a new value for it, with fresh state."""
    given = {**keras_models.compile_arguments(model), "optimizer": optimizer}
    makers: dict[str, Callable[[], Any]] = {}
    for name in ("optimizer", "metrics", "weighted_metrics"):
        if given.get(name) is not None:
            makers[name] = _copy_maker(given[name])
    for name in ("loss", "loss_weights"):
        if given.get(name) is not None:
            makers[name] = functools.partial(given.get, name)
    return makers


def _copy_maker(nest: Any) -> Callable[[], Any]:
    """Return a function that returns a copy of `nest` in which optimizers and metrics are new objects, made from their
    present configs. Other values are reused.
    """
    if isinstance(nest, Mapping):
        by_name = {name: _copy_maker(value) for name, value in nest.items()}
        return lambda: {name: make() for name, make in by_name.items()}
    if isinstance(nest, list | tuple):
        makers = [_copy_maker(value) for value in nest]
        return lambda: [make() for make in makers]
    if hasattr(nest, "get_config") and not isinstance(nest, type):
        config = _without_number(type(nest), nest.get_config())
        return lambda: type(nest).from_config(dict(config))  # a copy: a metric of tf_keras removes entries
    return lambda: nest


def _without_number(kind: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without its name if that is numbered, such as `sgd_1`. Keras 3 gives this name to the second SGD
    of a process, and it would become part of variable names.
    """
    name = str(config.get("name"))
    base, _, number = name.rpartition("_")
    is_numbered = number.isdigit() and base.replace("_", "") == kind.__name__.lower()
    if not is_numbered:
        return dict(config)
    return {key: value for key, value in config.items() if key != "name"}
