"""The contract with the user: the arguments and the return value of a model_fn."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from runner import keras_model
from runner.model_log import logging_to
from runner.system.exit_codes import BY_USER
from runner.system.suggestions import did_you_mean
from runner.system.user_frames import Frame, failed_expression, name_of, user_frames, without_partials
from runner.tf_private.feature_columns import naming_repeated_tokens
from runner.types import WeightedLabels, copied_params

_ACCEPTED = ("features", "labels", "mode", "params", "config", "sample_weight")
_RESERVED_METRICS = ("loss", "global_step")


class ModeKeys:
    """The modes in which model_fn is called, with tf.estimator's values."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """The return value of a model_fn: what to run and what to report.

    Attributes:
      mode: one of ModeKeys, the mode that model_fn was called with.
      predictions: a tensor or a dict of tensors, each `[batch, ...]`. Required in PREDICT.
      loss: a float scalar, the mean over the batch; or `[batch]`, one loss per example, whose exact mean over the
        global batch the runner then computes. Required in TRAIN and EVAL.
      train_op: an op or tensor that updates the model, as in tf.estimator. Only what it depends on runs. If it does not
        advance the global step (`minimize(loss)` without `global_step`), the runner counts one step per run.
      optimizer: a Keras 3, tf_keras or `tf.compat.v1.train` optimizer, in place of `train_op`. The runner computes the
        gradient of the loss over the global batch, applies it and advances the global step.
      eval_metric_ops: metric name -> a `(value, update)` pair of `tf.compat.v1.metrics`; or a Keras metric that
        model_fn has updated; or a tensor `[batch]`, one value per example, whose exact mean over all examples is
        reported. A scalar is taken as the mean of its batch and weighted by the batch's number of examples.
      loss_weight: the denominator of the loss if that is not the number of examples: a scalar, or weights `[batch]`
        (masked tokens, sample weights). With a loss per example, `sum(loss) / sum(loss_weight)` is reported.
      export_outputs: signature name -> ExportOutput, the signatures of the exported model.
      training_hooks, training_chief_hooks, evaluation_hooks, prediction_hooks: hooks that run in that mode.
      scaffold: a `tf.compat.v1.train.Scaffold`; its `init_fn` runs before the first step of a new model.

    Raises:
      ValueError: `mode` is not one of ModeKeys.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, Any] | None = None
    training_chief_hooks: Sequence[Any] = ()
    training_hooks: Sequence[Any] = ()
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] = ()
    prediction_hooks: Sequence[Any] = ()
    optimizer: Any = None
    loss_weight: Any = None

    def __post_init__(self) -> None:
        if self.mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT):
            raise ValueError(
                f"EstimatorSpec(mode={self.mode!r}): mode must be {ModeKeys.TRAIN!r}, {ModeKeys.EVAL!r} or "
                f"{ModeKeys.PREDICT!r}; pass on the mode that model_fn was called with."
            )
        for name in ("eval_metric_ops", "export_outputs"):
            object.__setattr__(self, name, dict(getattr(self, name) or {}))
        for name in ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))

    def _asdict(self) -> dict[str, Any]:
        """Return the fields by name and in order, as tf.estimator's namedtuple does."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _replace(self, **changes: Any) -> EstimatorSpec:
        """Return a copy with `changes`, as tf.estimator's namedtuple does.

        Raises:
          ValueError: `changes` contain another `mode`.
        """
        if changes.get("mode", self.mode) != self.mode:
            raise ValueError(f"EstimatorSpec._replace(mode={changes['mode']!r}): the mode of a spec may not change.")
        return dataclasses.replace(self, **changes)


@contextlib.contextmanager
def user_code(function: Any = None) -> Iterator[None]:
    """Mark errors raised inside this context as the user's mistakes: exit code 2.

    Args:
      function: the user's function that is called, or whose result is used; None: not known.
    """
    try:
        yield
    except Exception as error:
        setattr(error, BY_USER, function)
        raise


@dataclasses.dataclass(frozen=True)
class ModelFn:
    """A user's model_fn, checked once and called with the arguments that it declares.

    Args:
      fn: a function, partial or callable object that takes `features` and any of labels, mode, params, config,
        sample_weight.
      params: passed to `fn` as a copy, and a dict as `Params`. Must be empty if `fn` declares no `params`.

    Raises:
      ValueError: `fn` has required arguments that the runner does not fill, or no `features`.
    """

    fn: Callable[..., Any]
    params: Any
    config: Any

    def __post_init__(self) -> None:
        declared = declared_arguments(self.fn)
        unknown = [name for name in declared if name not in _ACCEPTED]
        if "features" not in declared:
            taken = ", ".join(declared) or "nothing"
            raise ValueError(f"{self.name} takes no argument 'features'; it takes: {taken}.")
        if unknown:
            raise ValueError(
                f"{self.name} takes arguments that the runner does not fill: {', '.join(unknown)}. "
                f"Allowed are {', '.join(_ACCEPTED)}; give others a default, or put them into params."
            )
        if self.params and "params" not in declared:
            given = repr(self.params)
            if isinstance(self.params, Mapping):
                given = ", ".join(map(str, self.params))
            raise ValueError(f"{self.name} has no argument 'params', but params were given: {given}. Add the argument.")

    @property
    def name(self) -> str:
        """`module.function`, for messages."""
        return name_of(self.fn)

    @property
    def operators(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a function that makes the context in which hooks and other user code outside model_fn run.

        The context is model_fn's attribute `operators`, which a TensorFlow 1 model_fn has; for any other model_fn the
        context does nothing.
        """
        return getattr(without_partials(self.fn), "operators", contextlib.nullcontext)

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Return the spec for one batch.

        Args:
          features: tensors `[batch, ...]` in any structure, as input_fn returns them.
          labels: like `features`; None: the input has none. The sample weights of WeightedLabels are for model_fn's
            argument `sample_weight`, and for the compiled keras.Model that it returns.
          mode: one of ModeKeys.

        Raises:
          ValueError: model_fn returned something else, or a spec that lacks what `mode` needs; or the input has labels
            or sample weights and model_fn takes none.
          MissingFeatureError: model_fn reads a feature that the input does not have.
        """
        declared = declared_arguments(self.fn)
        sample_weight = None
        if isinstance(labels, WeightedLabels):
            labels, sample_weight = labels
        if labels is not None and "labels" not in declared and mode != ModeKeys.PREDICT:
            raise ValueError(
                f"The input function returns (features, labels), but {self.name} has no argument 'labels'. Add it, or "
                "return features only."
            )
        available = {
            "features": features,
            "labels": labels,
            "mode": mode,
            "params": copied_params(self.params),
            "config": self.config,
            "sample_weight": sample_weight,
        }
        arguments = {name: available[name] for name in declared}
        takes_weights = sample_weight is None or "sample_weight" in declared
        explaining_inputs = self._explaining_inputs(features, labels, mode, "labels" in declared)
        explaining_weights = self._explaining_weights(takes_weights=takes_weights)
        logs: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if mode != ModeKeys.TRAIN:
            # A hook of training may evaluate or export the model. Then model_fn does not log to that training run.
            logs = logging_to(None)
        with user_code(self.fn), logs:
            with naming_repeated_tokens(), explaining_inputs, explaining_weights:
                returned = self.fn(**arguments)
            if hasattr(returned, "as_runner_spec"):  # a spec of tf.estimator, which may call functions of the model
                with self.operators():
                    returned = returned.as_runner_spec(mode)
            if "keras" in sys.modules and isinstance(returned, sys.modules["keras"].Model):
                returned = spec_of_keras_model(returned, features, labels, mode, sample_weight)
            elif not takes_weights:
                raise self._without_weights(f", which returns {type(returned).__name__},")
            return _checked_spec(returned, mode, self.name)

    @contextlib.contextmanager
    def _explaining_weights(self, *, takes_weights: bool) -> Iterator[None]:
        """Say that model_fn does not take the sample weights, if it fails and is given some."""
        try:
            yield
        except Exception as error:
            if takes_weights:
                raise
            raise self._without_weights("") from error

    def _without_weights(self, what: str) -> ValueError:
        return ValueError(
            f"The input function returns (features, labels, sample_weight), but {self.name}{what} has no argument "
            "'sample_weight'. Add it, and use the weights in the loss: loss=losses * sample_weight. With "
            "loss_weight=sample_weight, too, the loss is divided by the sum of the weights instead of the number of "
            "examples."
        )

    @contextlib.contextmanager
    def _explaining_inputs(self, features: Any, labels: Any, mode: str, takes_labels: bool) -> Iterator[None]:
        """Explain an error of model_fn that comes from a feature or labels that the input does not return."""
        try:
            yield
        except KeyError as error:
            if isinstance(features, Mapping) and _reads_item_of(features, error):
                name = error.args[0]
                names = ", ".join(map(str, features))
                hint = did_you_mean(str(name), map(str, features))
                missing = MissingFeatureError(
                    f"{self.name} reads features[{name!r}], which the input does not return.{hint} It returns: {names}."
                )
                raise missing.with_traceback(error.__traceback__) from error
            raise
        except Exception as error:
            lacks_labels = labels is None and takes_labels and mode != ModeKeys.PREDICT
            # Labels may be None on purpose (an autoencoder), so the error is the user's own, and this only a remark.
            if lacks_labels and _uses_missing_labels(error):
                error.add_note(
                    f"labels is None here: the input returns features without labels in mode {mode!r}. If {self.name} "
                    "needs labels, make each element of the input function's dataset a pair (features, labels)."
                )
            raise


class MissingFeatureError(KeyError):
    """A KeyError that prints as a plain sentence: model_fn reads a feature that the input does not return."""

    def __str__(self) -> str:
        return str(self.args[0])


def _reads_item_of(features: Mapping[Any, Any], error: KeyError) -> bool:
    """Report whether `error` was raised by `features[...]` or `features.pop(...)` in Python code, whatever name the
    variable has there.
    """
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None or not error.args or error.args[0] in features:
        return False
    source = failed_expression(innermost)
    names = [name for name, value in innermost.tb_frame.f_locals.items() if value is features]
    return any(re.match(rf"{re.escape(name)}\s*(\[|\.pop\()", source) for name in names)


def _uses_missing_labels(error: Exception) -> bool:
    """Report whether `error` may come from labels that are None: an expression of model_fn, or of a function that it
    calls, has the name `labels`, and the innermost expression of the user's code has a name that is None.
    """
    has_labels = False
    innermost: set[str] = set()
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if user_frames([Frame(code.co_filename, entry.tb_lineno, code.co_name)]):
            innermost = _names_of_none(entry)
            has_labels = has_labels or "labels" in innermost
        entry = entry.tb_next
    return has_labels and bool(innermost)


def _names_of_none(entry: TracebackType) -> set[str]:
    """Return the names in the failed expression of a frame whose value there is None; none of a statement (`raise`)."""
    try:
        expression = ast.parse(f"({failed_expression(entry)})", mode="eval")
    except SyntaxError:
        return set()
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    values = entry.tb_frame.f_locals
    return {name for name in names if name in values and values[name] is None}


def declared_arguments(fn: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of `fn` that a caller has to consider: those of model_fn's contract (labels,
    mode, ...), and any others that are required.

    Arguments that a partial has bound are left out, and so are other optional arguments, which keep their defaults.
    """
    names = []
    bound = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in bound:
            continue
        if name in _ACCEPTED or parameter.default is parameter.empty:
            names.append(name)
    return names


def spec_of_keras_model(model: Any, features: Any, labels: Any, mode: str, sample_weight: Any = None) -> EstimatorSpec:
    """Return the spec of a compiled `keras.Model` that a model_fn built and returned.

    The loss is what `compute_loss` returns: if the model does not define it, the compiled loss plus the losses of its
    layers. The metrics are those that `fit` would report, by their names there. If `features` is a dict, a functional
    model gets the entries that its inputs name.

    Args:
      model: the model; it is called once, on `features`.
      features: tensors `[batch, ...]` in a structure that the model takes.
      labels: tensors `[batch, ...]` that the compiled loss takes; None in PREDICT.
      mode: one of ModeKeys.
      sample_weight: weights `[batch]` for the compiled loss and the `weighted_metrics`; None: none.

    Raises:
      ValueError: the mode is TRAIN or EVAL and the model is not compiled, or its class defines a method that would not
        be called.
    """
    is_training = mode == ModeKeys.TRAIN
    keras_model.check_methods(model)
    predictions = model(keras_model.features_for_inputs(model, features), training=is_training)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)
    if not model.compiled:
        raise ValueError(
            f"model_fn returned the keras.Model {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer=..., loss=..., metrics=[...]) before returning it."
        )
    batch = keras_model.Batch(features, labels, predictions, sample_weight)
    if is_training:
        keras_model.say_what_has_no_effect(model)
    loss, metrics = keras_model.loss_and_metrics(model, batch, training=is_training)
    of_user = {name: metric for name, metric in metrics.items() if name not in _RESERVED_METRICS}
    spec = EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=of_user)
    if is_training:
        return spec._replace(optimizer=model.optimizer)
    return spec


def _checked_spec(spec: Any, mode: str, name: str) -> EstimatorSpec:
    """Return what a model_fn returned, with its loss and its predictions as tensors.

    Args:
      spec: the returned object.
      mode: the mode that the model_fn was called with.
      name: the name of the model_fn, for messages.

    Raises:
      ValueError: it is no EstimatorSpec, or lacks what the mode needs.
      TypeError: its `train_op` runs nothing.
    """
    if not isinstance(spec, EstimatorSpec):
        raise _without_spec(spec, name)
    if spec.mode != mode:
        raise ValueError(f"{name} was called with mode={mode!r} and returned a spec of mode {spec.mode!r}.")
    if mode == ModeKeys.PREDICT:
        return dataclasses.replace(spec, predictions=_checked_predictions(spec.predictions, name))
    if spec.loss is None:
        needs = "loss and train_op or optimizer" if mode == ModeKeys.TRAIN else "loss"
        raise ValueError(f"{name} returned loss=None in {mode.upper()}. {mode.upper()} needs {needs}.")
    if mode == ModeKeys.TRAIN:
        _check_update(spec, name)
    else:
        _check_metrics(spec.eval_metric_ops or {}, name)
    return dataclasses.replace(spec, loss=_checked_loss(spec.loss, mode, name))


def _without_spec(returned: Any, name: str) -> ValueError:
    """Return the error for what a model_fn `name` returned in place of a spec."""
    if "tf_keras" in sys.modules and isinstance(returned, sys.modules["tf_keras"].Model):
        return ValueError(
            f"{name} returned the {type(returned).__name__} {returned.name!r}, a model of Keras 2 (tf_keras). Call it, "
            "or its compute_loss, in model_fn and return an EstimatorSpec with its loss; or pass a compiled one to "
            "tf.keras.estimator.model_to_estimator."
        )
    return ValueError(
        f"{name} returned {type(returned).__name__}. It must return an EstimatorSpec or a compiled keras.Model."
    )


def _checked_predictions(predictions: Any, name: str) -> Any:
    if predictions is None:
        raise ValueError(f"{name} returned predictions=None in PREDICT. PREDICT needs predictions.")
    predictions = tf.nest.map_structure(_value_of_variable, predictions)
    wrong = {type(value).__name__ for value in tf.nest.flatten(predictions) if not tf.is_tensor(value)}
    if wrong:
        raise ValueError(
            f"{name} returned predictions of type {', '.join(sorted(wrong))} in PREDICT. "
            "Return a tensor or a dict of tensors, each [batch, ...]."
        )
    return predictions


def _check_update(spec: EstimatorSpec, name: str) -> None:
    """Check what a spec has for the update of the model: `train_op` or `optimizer`."""
    if spec.train_op is None and spec.optimizer is None:
        raise ValueError(f"{name} returned train_op=None in TRAIN. TRAIN needs loss and train_op or optimizer.")
    if spec.train_op is not None and spec.optimizer is not None:
        raise ValueError(f"{name} returned both train_op and optimizer in TRAIN. Return only one of them.")
    for value in tf.nest.flatten(spec.train_op, expand_composites=True):
        if value is not None and not runs(value):
            raise TypeError(
                f"{name} returned train_op={spec.train_op!r} in TRAIN, which runs nothing. Return an operation or a "
                "tensor, such as the result of minimize(loss, tf.compat.v1.train.get_global_step())."
            )


def _value_of_variable(value: Any) -> Any:
    """Return the value of a tf.Variable or keras.Variable, which a prediction may be as in tf.estimator; anything else
    unchanged.
    """
    is_variable = tf.is_tensor(value) and hasattr(value, "assign")
    return tf.convert_to_tensor(value) if is_variable else value


def runs(value: Any) -> bool:
    """Report whether `value` is something to run: an operation, a tensor or a variable."""
    return isinstance(value, tf.Operation | tf.Tensor | tf.Variable)


def _checked_loss(loss: Any, mode: str, name: str) -> tf.Tensor:
    """Return the loss that the model_fn `name` returned as a tensor: a scalar, or one loss per example, `[batch]`.

    Raises:
      ValueError: it is neither.
    """
    problem = ""
    if isinstance(loss, (tf.Tensor, tf.Variable, float, int, np.ndarray, np.generic)):
        loss = tf.convert_to_tensor(loss)
        if (loss.shape.rank or 0) > 1:
            problem = f"of shape {loss.shape}"
    else:
        problem = f"that is a {type(loss).__name__}"
    if problem:
        raise ValueError(
            f"{name} returned a loss {problem} in {mode.upper()}. Return a scalar, or one loss per example, [batch]."
        )
    # tf.estimator accepted both as a scalar: unknown rank (tf.py_func), and [1], which is the loss of a batch of one.
    is_scalar = loss.shape.rank is None or loss.shape == [1]
    return tf.reshape(loss, []) if is_scalar else loss


def _check_metrics(metrics: Mapping[str, Any], name: str) -> None:
    for key, metric in metrics.items():
        if key in _RESERVED_METRICS:
            raise ValueError(f"{name} returned a metric {key!r}, a name that the runner itself reports. Rename it.")
        is_pair = isinstance(metric, (tuple, list)) and len(metric) == 2
        is_keras = hasattr(metric, "result") and hasattr(metric, "update_state") and not isinstance(metric, type)
        if not (is_pair or is_keras or tf.is_tensor(metric)):
            raise ValueError(
                f"{name} returned metric {key!r} of type {type(metric).__name__}. Allowed are a (value, update) pair "
                "of tf.compat.v1.metrics, a Keras metric updated inside model_fn, and a per-example tensor [batch]."
            )
