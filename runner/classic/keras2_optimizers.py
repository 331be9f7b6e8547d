"""The Keras 2 optimizers with which tf.estimator 2 trained: the same updates, and the same variable names.

The classes are `tf.compat.v1.train.Optimizer`s, so they need no tf_keras and support parameter servers. The updates are
those of `tf.keras.optimizers.legacy` in TensorFlow 2.15 (tests/classic/test_keras_named.py compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

v1 = tf.compat.v1
ops = tf.raw_ops


class KerasNamed(v1.train.Optimizer):  # type: ignore[name-defined]
    """Base class of the optimizers. Settings such as the learning rate are variables, `training/<name>/learning_rate`.

    As in Keras 2, restoring a checkpoint also restores the settings that it was saved with. The learning rate is a
    number, or a function from the number of updates (a float scalar) to a float scalar.

    Args:
      name: name of the optimizer, which is part of variable names; None: the name of the class.
      **given: the arguments in `defaults`, and `decay`: rate = learning_rate / (1 + decay * number of updates).

    Attributes:
      operation: name of TensorFlow's op for the update, such as "Adam" for ResourceApplyAdam.
      defaults: name of an argument -> its default.
      settings: the arguments that are variables, besides the learning rate and its decay.
      slots: name of a slot -> argument of the op. Slots start with `initial_<slot>_value`, or else 0. A slot "momentum"
        exists only if the momentum is not 0.
      iterations: the variable that counts updates, such as the global step; None: this optimizer makes its own,
        `training/<name>/iter`. `apply_gradients` advances only its own.
      clipnorm: the norm to which the gradient of each variable is clipped, which model functions of 2.15 set; None: no
        clipping.
    """

    iterations: Any = None
    clipnorm: float | None = None
    operation: str
    defaults: ClassVar[Mapping[str, Any]]
    settings: tuple[str, ...] = ()
    slots: ClassVar[Mapping[str, str]]

    def __init__(self, name: str | None = None, **given: Any) -> None:
        super().__init__(use_locking=False, name=name or type(self).__name__)
        self._values = {"decay": 0.0, **self.defaults, **given}
        rate = self._values["learning_rate"]
        self._schedule: Callable[[tf.Tensor], tf.Tensor] | None = rate if callable(rate) else None
        variables = ["decay", *self.settings]
        if self._schedule is None:
            variables.insert(0, "learning_rate")
        self._settings = {setting: self._values[setting] for setting in variables}
        self._initial_slots: dict[str, float] = {}
        for slot in self.slots:
            is_unused = slot == "momentum" and not self._values["momentum"]
            if not is_unused:
                self._initial_slots[slot] = self._values.get(f"initial_{slot}_value", 0.0)
        self._factor: Any = None
        self._scope: str | None = None
        self._variables_by_name: dict[str, Any] = {}
        self._rates: dict[Any, tf.Tensor] = {}

    def get_updates(self, loss: tf.Tensor, params: Sequence[Any]) -> list[Any]:
        """Return a list of one operation, which updates the variables `params` once and counts the update."""
        return [self.minimize(loss, self.iterations, params)]

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        # Choose the name of the scope in the replica: where replicas meet, TensorFlow forgets which names are taken, so
        # a second optimizer of the class would get the first one's.
        self._variable_scope()
        return super().apply_gradients(*args, **kwargs)

    # --- methods that tf.compat.v1.train.Optimizer calls --------------------------------------------------------

    def _create_slots(self, var_list: Sequence[Any]) -> None:
        with self._variable_scope():
            self._create_settings()
            for slot, initial in self._initial_slots.items():
                for variable in var_list:
                    dtype = variable.dtype.base_dtype
                    initializer = v1.constant_initializer(initial, dtype=dtype)
                    self._get_or_make_slot_with_initializer(variable, initializer, variable.shape, dtype, slot, slot)

    def _variable_scope(self) -> Any:
        """Return a context manager that enters the variable scope `training/<name>`, or `training/<name>_1` for the
        second optimizer with this name.
        """
        if self._scope is None:
            with v1.variable_scope(None, f"training/{self._name}", auxiliary_name_scope=False) as scope:
                self._scope = scope.name
        return v1.variable_scope(self._scope, auxiliary_name_scope=False)

    def _create_settings(self) -> None:
        """Make the variables of the settings and `iter`, unless they exist. Call this inside `_variable_scope()`."""
        if self._variables_by_name:
            return
        if self.iterations is None:
            zeros = v1.zeros_initializer()
            self._variables_by_name["iter"] = v1.get_variable("iter", [], tf.int64, zeros, trainable=False)
        for name, value in self._settings.items():
            initializer = v1.constant_initializer(value)
            self._variables_by_name[name] = v1.get_variable(name, [], tf.float32, initializer, trainable=False)

    def _prepare(self) -> None:
        self._rates = {}

    def _finish(self, update_ops: Sequence[Any], name_scope: str) -> Any:
        if "iter" not in self._variables_by_name:
            return super()._finish(update_ops, name_scope)
        with tf.control_dependencies(list(update_ops)):
            return tf.group(*update_ops, self._variables_by_name["iter"].assign_add(1, read_value=False))

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> Any:
        return self._apply(self._clipped(grad), handle)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        return self._apply_rows(self._clipped(grad), handle, indices)

    def _clipped(self, grad: tf.Tensor) -> tf.Tensor:
        """Return the gradient of the global batch, clipped: TensorFlow has summed it over the replicas."""
        return grad if self.clipnorm is None else tf.clip_by_norm(grad, self.clipnorm)

    # --- what subclasses override -------------------------------------------------------------------------------

    def _apply(self, grad: tf.Tensor, handle: Any) -> Any:
        return getattr(ops, f"ResourceApply{self.operation}")(**self._arguments(handle), grad=grad)

    def _apply_rows(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        operation = getattr(ops, f"ResourceSparseApply{self.operation}")
        return operation(**self._arguments(handle), grad=grad, indices=indices)

    def _arguments(self, variable: Any) -> dict[str, Any]:
        """Return the arguments of the op for `variable`, except the gradient."""
        slots = {argument: self.get_slot(variable, slot).handle for slot, argument in self.slots.items()}
        given = {"var": variable.handle, "lr": self.rate(variable), **slots, **self._of_settings(variable)}
        if "epsilon" in self._values:
            given["epsilon"] = tf.constant(self._values["epsilon"], variable.dtype.base_dtype)
        return given

    def _of_settings(self, variable: Any) -> dict[str, Any]:
        """Return the arguments of the op that depend on the settings, by default the settings under their own names."""
        return {name: self.setting(name, variable) for name in self.settings}

    # --- values for the updates of subclasses -------------------------------------------------------------------

    def setting(self, name: str, like: Any) -> tf.Tensor:
        """Return the value of a setting, a scalar with the dtype of the variable `like`."""
        return tf.cast(self._variables_by_name[name], like.dtype.base_dtype)

    def num_updates(self, like: Any) -> tf.Tensor:
        """Return the number of updates before this one, a scalar with the dtype of the variable `like`."""
        counter = self._variables_by_name.get("iter", self.iterations)
        return tf.cast(counter, like.dtype.base_dtype)

    def rate(self, like: Any) -> tf.Tensor:
        """Return the learning rate of this update, a scalar with the dtype of the variable `like`. It is one tensor for
        all variables of a dtype and device, so that it is reported once.
        """
        key = v1.get_default_graph(), like.device, like.dtype.base_dtype
        if key not in self._rates:
            if self._schedule is not None:
                rate = tf.cast(self._schedule(tf.cast(self.num_updates(like), tf.float32)), like.dtype.base_dtype)
            else:
                rate = self.setting("learning_rate", like) / (1 + self.setting("decay", like) * self.num_updates(like))
            self._rates[key] = rate if self._factor is None else rate * tf.cast(self._factor, rate.dtype)
        return self._rates[key]

    def scale_rate(self, factor: tf.Tensor) -> None:
        """Multiply the learning rate by the float scalar `factor`, for `train.warmup_steps` and the like."""
        self._factor = factor


class SGD(KerasNamed):
    """Gradient descent, with momentum if that is not 0."""

    operation = "KerasMomentum"
    defaults: ClassVar = {"learning_rate": 0.01, "momentum": 0.0, "nesterov": False}
    settings = ("momentum",)
    slots: ClassVar = {"momentum": "accum"}

    def _apply(self, grad: tf.Tensor, handle: Any) -> Any:
        if not self._initial_slots:
            return ops.ResourceApplyGradientDescent(var=handle.handle, alpha=self.rate(handle), delta=grad)
        return super()._apply(grad, handle)

    def _apply_rows(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        if not self._initial_slots:
            return ops.ResourceScatterAdd(resource=handle.handle, indices=indices, updates=-self.rate(handle) * grad)
        return super()._apply_rows(grad, handle, indices)

    def _of_settings(self, variable: Any) -> dict[str, Any]:
        return super()._of_settings(variable) | {"use_nesterov": self._values["nesterov"]}


class Adagrad(KerasNamed):
    """Adagrad, after Duchi et al. (2011)."""

    operation = "AdagradV2"
    defaults: ClassVar = {"learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7}
    slots: ClassVar = {"accumulator": "accum"}


class Adam(KerasNamed):
    """Adam, after Kingma and Ba, arXiv:1412.6980. With a sparse gradient, the moments of all rows decay, so all rows
    are updated.
    """

    operation = "Adam"
    defaults: ClassVar = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
    settings = ("beta_1", "beta_2")
    slots: ClassVar = {"m": "m", "v": "v"}

    def _of_settings(self, variable: Any) -> dict[str, Any]:
        return dict(zip(("beta1", "beta2", "beta1_power", "beta2_power"), self._betas(variable), strict=True))

    def _apply_rows(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        beta1, beta2, power1, power2 = self._betas(handle)
        m = _decay_and_add(self.get_slot(handle, "m"), beta1, indices, grad * (1 - beta1))
        v = _decay_and_add(self.get_slot(handle, "v"), beta2, indices, tf.square(grad) * (1 - beta2))
        assignments: list[Any] = []
        if "vhat" in self.slots:  # AmsgradAdam divides by the largest v so far
            largest_v = self.get_slot(handle, "vhat")
            v = tf.maximum(largest_v.read_value(), v)
            assignments.append(largest_v.assign(v, read_value=False))
        rate = self.rate(handle) * tf.sqrt(1 - power2) / (1 - power1)
        step = rate * m / (tf.sqrt(v) + self._values["epsilon"])
        return tf.group(*assignments, handle.assign_sub(step, read_value=False))

    def _betas(self, variable: Any) -> tuple[tf.Tensor, ...]:
        """Return (beta_1, beta_2, and these to the power of the number of this update, from 1), scalars."""
        beta1 = self.setting("beta_1", variable)
        beta2 = self.setting("beta_2", variable)
        update_number = self.num_updates(variable) + 1
        return beta1, beta2, tf.pow(beta1, update_number), tf.pow(beta2, update_number)


class AmsgradAdam(Adam):
    """Keras's Adam(amsgrad=True), after Reddi et al., "On the Convergence of Adam and Beyond" (2018)."""

    operation = "AdamWithAmsgrad"
    slots: ClassVar = {"m": "m", "v": "v", "vhat": "vhat"}


class Adamax(Adam):
    """Adamax, after Kingma and Ba, arXiv:1412.6980, section 7.1. A sparse gradient updates only its own rows."""

    operation = "AdaMax"

    def _of_settings(self, variable: Any) -> dict[str, Any]:
        return {name: value for name, value in super()._of_settings(variable).items() if name != "beta2_power"}

    def _apply_rows(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        beta1, beta2, power1, _ = self._betas(handle)
        m = self.get_slot(handle, "m")
        v = self.get_slot(handle, "v")
        new_m = tf.gather(m, indices) * beta1 + grad * (1 - beta1)
        new_v = tf.maximum(tf.gather(v, indices) * beta2, tf.abs(grad))
        step = -self.rate(handle) / (1 - power1) * new_m / (new_v + self._values["epsilon"])
        return tf.group(
            ops.ResourceScatterUpdate(resource=m.handle, indices=indices, updates=new_m),
            ops.ResourceScatterUpdate(resource=v.handle, indices=indices, updates=new_v),
            ops.ResourceScatterAdd(resource=handle.handle, indices=indices, updates=step),
        )


class Adadelta(KerasNamed):
    """Adadelta, after Zeiler, arXiv:1212.5701."""

    operation = "Adadelta"
    defaults: ClassVar = {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7}
    settings = ("rho",)
    slots: ClassVar = {"accum_grad": "accum", "accum_var": "accum_update"}


class RMSprop(KerasNamed):
    """RMSprop, with momentum if that is not 0."""

    operation = "RMSProp"
    defaults: ClassVar = {"learning_rate": 0.001, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7}
    settings = ("rho", "momentum")
    slots: ClassVar = {"rms": "ms", "momentum": "mom"}

    def _apply(self, grad: tf.Tensor, handle: Any) -> Any:
        # As in Keras 2, without momentum epsilon is added to the root. TensorFlow's op adds it below the root.
        if "momentum" in self._initial_slots:
            return super()._apply(grad, handle)
        rho = self.setting("rho", handle)
        rms = self.get_slot(handle, "rms")
        variance = rho * rms + (1 - rho) * tf.square(grad)
        assignments = [rms.assign(variance, read_value=False)]
        if "mg" in self.slots:  # CenteredRMSprop subtracts the square of the mean gradient
            mg = self.get_slot(handle, "mg")
            mean = rho * mg + (1 - rho) * grad
            variance -= tf.square(mean)
            assignments.append(mg.assign(mean, read_value=False))
        step = self.rate(handle) * grad / (tf.sqrt(variance) + self._values["epsilon"])
        return tf.group(*assignments, handle.assign_sub(step, read_value=False))

    def _apply_rows(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        if "momentum" in self._initial_slots:
            return super()._apply_rows(grad, handle, indices)
        rho = self.setting("rho", handle)
        square = _decay_and_add(self.get_slot(handle, "rms"), rho, indices, tf.square(grad) * (1 - rho))
        variance = tf.gather(square, indices)
        if "mg" in self.slots:
            mean = _decay_and_add(self.get_slot(handle, "mg"), rho, indices, grad * (1 - rho))
            variance -= tf.square(tf.gather(mean, indices))
        step = self.rate(handle) * grad / (tf.sqrt(variance) + self._values["epsilon"])
        return ops.ResourceScatterAdd(resource=handle.handle, indices=indices, updates=-step)


class CenteredRMSprop(RMSprop):
    """Keras's RMSprop(centered=True): divides by an estimate of the gradient's standard deviation."""

    operation = "CenteredRMSProp"
    slots: ClassVar = {"rms": "ms", "momentum": "mom", "mg": "mg"}


class Ftrl(KerasNamed):
    """Follow the regularized leader (FTRL-Proximal), after McMahan et al. (2013)."""

    operation = "Ftrl"
    defaults: ClassVar = {
        "learning_rate": 0.001,
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "beta": 0.0,
    }
    settings = ("learning_rate_power", "l1_regularization_strength", "l2_regularization_strength", "beta")
    slots: ClassVar = {"accumulator": "accum", "linear": "linear"}

    def _of_settings(self, variable: Any) -> dict[str, Any]:
        power, l1, l2, beta = (self.setting(name, variable) for name in self.settings)
        return {"l1": l1, "l2": l2 + beta / (2 * self.rate(variable)), "lr_power": power}


def _decay_and_add(slot: Any, factor: tf.Tensor, indices: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    """Multiply a slot by `factor`, add `added` to its rows `indices`, and return its value after both.

    Args:
      slot: a variable `[rows, ...]`.
      factor: float scalar.
      indices: integers `[n]`, rows of the slot.
      added: `[n, ...]`.
    """
    with tf.control_dependencies([slot.assign(slot * factor, read_value=False)]):
        scattered = ops.ResourceScatterAdd(resource=slot.handle, indices=indices, updates=added)
    with tf.control_dependencies([scattered]):
        return slot.read_value()
