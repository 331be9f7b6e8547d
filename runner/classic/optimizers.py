"""Make the optimizers of premade estimators and heads, which users give by name or as an object.

tf.estimator 2 trained with Keras 2 optimizers. Its checkpoints have names such as
`training/Adagrad/<variable>/accumulator` and `training/Adagrad/learning_rate`. The optimizers of `keras2_optimizers`
have the same updates and names, and work with every strategy and with the runner's weighting of replicas.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic import keras2_optimizers as keras2
from runner.tf_private.optimizers import forget_earlier_step, made_apart, schedule_of

v1 = tf.compat.v1

_BY_NAME: Mapping[str, Any] = {
    "Adagrad": keras2.Adagrad, "Adam": keras2.Adam, "Ftrl": keras2.Ftrl, "RMSProp": keras2.RMSprop, "SGD": keras2.SGD,
}  # fmt: skip
# Name of a Keras class -> (setting that must be on or None, the optimizer); used only by model_to_estimator.
_ONLY_IN_KERAS_MODELS: Mapping[str, tuple[str | None, Any]] = {
    "Adadelta": (None, keras2.Adadelta), "Adamax": (None, keras2.Adamax),
    "Adam": ("amsgrad", keras2.AmsgradAdam), "RMSprop": ("centered", keras2.CenteredRMSprop),
}  # fmt: skip
_V1_BY_NAME = {name: getattr(v1.train, f"{name.replace('SGD', 'GradientDescent')}Optimizer") for name in _BY_NAME}
_CLIPS = ("clipvalue", "clipnorm", "global_clipnorm")  # in the order in which Keras clips
# _WITHOUT_MEANING: settings of a Keras optimizer that do not change its updates. _DEFAULTS: settings that a KerasNamed
# does not have -> the value with which they change nothing.
_WITHOUT_MEANING = {"name", "is_legacy_optimizer", "jit_compile", "ema_momentum", "ema_overwrite_frequency"}
_DEFAULTS: Mapping[str, Any] = {"amsgrad": False, "centered": False, "l2_shrinkage_regularization_strength": 0.0}


def optimizer_of(given: Any, learning_rate: float | None = None) -> Any:
    """Return a new optimizer for one call of a model_fn.

    Args:
      given: a name (Adagrad, Adam, Ftrl, RMSProp, SGD), an optimizer of tf.compat.v1.train, Keras 3 or tf_keras, of a
        class of theirs or of the user's, or a function without arguments that makes one.
      learning_rate: used with a name; None: Keras's default, 0.001 (0.01 for SGD).

    Raises:
      ValueError: there is no optimizer of that name; `given` has another type; or it is an optimizer of Keras whose
        class cannot make it again from its `get_config`.
    """
    if isinstance(given, str):
        if given not in _BY_NAME:
            raise ValueError(f"optimizer={given!r} is unknown. Use {', '.join(_BY_NAME)}, or an optimizer object.")
        if learning_rate is None:
            return _BY_NAME[given]()
        return _BY_NAME[given](learning_rate=learning_rate)
    if isinstance(given, v1.train.Optimizer) and getattr(given, "iterations", None) is not None:
        return given  # a model function of TensorFlow 2.15 has made it, in this call
    is_maker = _makes_optimizer(given)
    made = made_apart(given) if is_maker else given
    is_v1 = isinstance(made, v1.train.Optimizer)
    counterpart = None if is_v1 else counterpart_of_keras(made)
    if counterpart is not None:
        return counterpart
    is_keras_2 = hasattr(made, "get_updates")
    if is_v1 or is_keras_2:
        if is_maker:
            return made  # it makes its variables later, when it is applied
        forget_earlier_step(given)
        # Copy the user's object, because it would keep the slots of this trace. The copy shares the object's variables,
        # such as `iterations`.
        variables = {id(variable): variable for variable in _variables()}
        return copy.deepcopy(made, variables)
    if not hasattr(made, "get_config"):
        raise ValueError(
            f"optimizer={made!r} is not an optimizer of Keras or tf.compat.v1.train, the name of one, or a function "
            "that makes one."
        )
    if is_maker:
        return given()  # called again, so that the variables of this optimizer belong to the model
    return _remade(made)


def _remade(optimizer: Any) -> Any:
    """Return an optimizer of Keras like `optimizer`, whose variables will be made in this call of model_fn."""
    try:
        with tf.init_scope():
            settings = optimizer.get_config()
        return type(optimizer).from_config(settings)
    except Exception as error:
        kind = type(optimizer).__name__
        raise ValueError(
            f"optimizer={type(optimizer).__module__}.{kind}: its variables must be made in model_fn, but from_config("
            f"get_config()) fails: {error!r}. Give a function that makes it instead: optimizer=lambda: {kind}(...)."
        ) from error


def v1_optimizer_of(given: Any, learning_rate: float | None = None) -> Any:
    """Like `optimizer_of`, but a name means an optimizer of tf.compat.v1.train, which needs a learning rate. Used by
    tf.compat.v1.estimator.
    """
    if isinstance(given, str) and given in _V1_BY_NAME:
        if not learning_rate:
            raise ValueError(f"optimizer={given!r}: learning_rate={learning_rate}; with a name, give a rate above 0.")
        return _V1_BY_NAME[given](learning_rate)
    return optimizer_of(given)


def show_global_step(given: Any) -> None:
    """Make the global step the `iterations` of the Keras 2 optimizer that the user gave, as tf.estimator did.

    A copy of it trains here, but what reads `optimizer.iterations` after `train` finds the variable that counted.
    """
    forget_earlier_step(given)
    with contextlib.suppress(RuntimeError):  # raised if the user has set them already
        given.iterations = v1.train.get_global_step()


def minimize(
    optimizer: Any, loss: tf.Tensor, variables: Sequence[Any] | None = None, *, advances_global_step: bool = True
) -> Any:
    """Return an operation that updates variables once.

    Args:
      optimizer: a result of `optimizer_of`.
      loss: float scalar.
      variables: the variables to update; None: all trainable variables. An optimizer of tf.compat.v1.train is then
        given the global step alone, and else the variables alone.
      advances_global_step: also advance the global step. False: the optimizer counts its updates in a variable of
        its own.
    """
    global_step = v1.train.get_global_step()
    is_keras_2 = hasattr(optimizer, "get_updates")
    if isinstance(optimizer, v1.train.Optimizer) and not is_keras_2:
        return _minimize_v1(optimizer, loss, variables, global_step if advances_global_step else None)
    variables = [_as_tf_variable(variable) for variable in variables or v1.trainable_variables()]
    # An optimizer of Keras 2, or of a user's class with this method. Its `iterations` are a variable.
    if is_keras_2:
        if advances_global_step and global_step is not None:
            with contextlib.suppress(RuntimeError):  # raised if model_fn has set them already
                optimizer.iterations = global_step
        return optimizer.get_updates(loss, variables)[0]
    gradients = tf.gradients(loss, variables)
    pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
    # A Keras optimizer returns no operation; the runner finds its writes in the trace.
    optimizer.apply_gradients(pairs)
    if advances_global_step and global_step is not None:
        return tf.group(global_step.assign_add(1, read_value=False))
    return tf.no_op()


def _minimize_v1(optimizer: Any, loss: tf.Tensor, variables: Sequence[Any] | None, global_step: Any) -> Any:
    """Like `minimize`, for an optimizer of tf.compat.v1.train. Args: global_step: None: it is not advanced."""
    # By keyword, and no more than tf.estimator gave: `minimize` of a user's class may have no other arguments.
    if variables is None:
        return optimizer.minimize(loss, global_step=global_step)
    update = optimizer.minimize(loss, var_list=[_as_tf_variable(variable) for variable in variables])
    if global_step is None:
        return update
    with tf.control_dependencies([update]):
        return global_step.assign_add(1, read_value=False)


class Clipped:
    """Clips gradients and applies them with an optimizer of `keras2_optimizers`. For `EstimatorSpec(optimizer=)`: the
    runner calls it with the gradients of the global batch.

    Args:
      optimizer: applies the clipped gradients.
      keras_optimizer: the Keras optimizer that has the limits: `clipvalue`, `clipnorm`, `global_clipnorm`.
    """

    def __init__(self, optimizer: keras2.KerasNamed, keras_optimizer: Any) -> None:
        self._optimizer = optimizer
        self._limits = [getattr(keras_optimizer, name) for name in _CLIPS]
        self.scale_rate = optimizer.scale_rate

    def apply_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        value, norm, global_norm = self._limits
        if value is not None:
            gradients = tuple(tf.clip_by_value(gradient, -value, value) for gradient in gradients)
        if norm is not None:
            gradients = tuple(tf.clip_by_norm(gradient, norm) for gradient in gradients)
        if global_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, global_norm)
        return self._optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))


class InParts:
    """Applies each of several optimizers to its own part of the variables; others are not updated.

    Attributes:
      optimizers: the optimizers.
      names: for each of them, the names of its variables.
    """

    def __init__(self, optimizers: Sequence[Any], names: Sequence[Collection[str]]) -> None:
        self.optimizers = optimizers
        self._names = names

    def apply_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> None:
        for optimizer, names in zip(self.optimizers, self._names, strict=True):
            own = [pair for pair in grads_and_vars if pair[1].name.partition(":")[0] in names]
            optimizer.apply_gradients(own)


def clipped_as_before(optimizer: Any) -> Callable[[], Any] | None:
    """Return a function that makes the counterpart of a Keras optimizer in `keras2_optimizers`, with its clipping.
    None if there is no counterpart that supports its settings.

    Args:
      optimizer: an optimizer of Keras 3 or tf_keras.
    """
    counterpart = counterpart_of_keras(optimizer, ignored=frozenset(_CLIPS))
    # Some classes have a counterpart only here, or only if a setting such as `amsgrad` is on.
    setting, kind = _ONLY_IN_KERAS_MODELS.get(type(optimizer).__name__, (None, None))
    if counterpart is None and kind is not None:
        has_counterpart = setting is None or getattr(optimizer, setting, False)
        if has_counterpart:
            counterpart = counterpart_of_keras(optimizer, {*_CLIPS, setting}, kind)
    if counterpart is None:
        return None

    def make() -> Any:
        keras2_optimizer = optimizer_of(counterpart)
        keras2_optimizer.iterations = v1.train.get_global_step()
        has_no_limits = all(getattr(optimizer, name, None) is None for name in _CLIPS)
        return keras2_optimizer if has_no_limits else Clipped(keras2_optimizer, optimizer)

    return make


def counterpart_of_keras(optimizer: Any, ignored: Collection[Any] = (), kind: Any = None) -> Any:
    """Return the counterpart of a Keras optimizer in `keras2_optimizers`, with the same settings. None if there is no
    counterpart that supports them.

    Args:
      optimizer: an optimizer of Keras 3 or tf_keras.
      ignored: names of settings that the caller handles.
      kind: class of the result; None: the class with the name of the optimizer's class.
    """
    name = type(optimizer).__name__
    if kind is None:
        by_name = {counterpart.__name__: counterpart for counterpart in _BY_NAME.values()}
        kind = by_name.get(name)
    package = type(optimizer).__module__.partition(".")[0]
    if kind is None or package not in ("keras", "tf_keras", "tensorflow"):
        return None
    rate = schedule_of(optimizer)
    with tf.init_scope():
        settings = optimizer.get_config()
    arguments = {name: settings[name] for name in ("name", "decay", *kind.defaults) if name in settings}
    other_settings = {
        name: settings[name] for name in settings if name not in {*arguments, *ignored, *_WITHOUT_MEANING}
    }
    # A setting that the counterpart lacks must have the value with which it changes nothing.
    if any(value not in (None, False, _DEFAULTS.get(name)) for name, value in other_settings.items()):
        return None
    if rate is not None:
        arguments["learning_rate"] = rate
    # Keras 3 has the default name in lower case, and checkpoints of tf.estimator have that of the class.
    if str(settings.get("name")).lower() == name.lower():
        arguments["name"] = name
    return kind(**arguments)


def _makes_optimizer(given: Any) -> bool:
    return isinstance(given, type) or (callable(given) and not hasattr(given, "apply_gradients"))


def _variables() -> list[Any]:
    return [*v1.global_variables(), v1.train.get_global_step()]


def _as_tf_variable(variable: Any) -> Any:
    """Return the tf.Variable of a keras.Variable; other variables unchanged."""
    if isinstance(variable, tf.Variable):
        return variable
    return getattr(variable, "value", variable)
