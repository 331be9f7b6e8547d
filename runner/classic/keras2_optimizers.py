"""Five optimizers of Keras 2, as tf.estimator 2 trained with them: the same updates, and the same names of their state.

The updates are those of `tf.keras.optimizers.legacy` in TensorFlow 2.15 (tests/classic/test_keras_named.py compares
them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1
ops = tf.raw_ops

Rate = float | Callable[[tf.Tensor], tf.Tensor]


class KerasNamed(v1.train.Optimizer):  # type: ignore[name-defined]
    """What the five share: their settings are variables, `training/<name>/learning_rate` and the like.

    As in Keras 2, a checkpoint brings back the settings that it was written with.

    Args:
      learning_rate: a number, or a function of the step.
      settings: name -> value, of those that are variables besides the learning rate.
      slots: name -> what each of its elements begins with.
    """

    _operation: str
    """TensorFlow's name for the update, where one operation makes it."""

    def __init__(self, name: str, learning_rate: Rate, settings: dict[str, float], slots: dict[str, float]) -> None:
        super().__init__(use_locking=False, name=name)
        self._schedule = learning_rate if callable(learning_rate) else None
        self._settings: dict[str, Any] = settings
        if self._schedule is None:
            self._settings = {"learning_rate": learning_rate, **settings}
        self._initial_slots = slots
        self._counter: Any = None
        self._factor: Any = None
        self._scope: str | None = None
        self._variables_by_name: dict[str, Any] = {}

    def count_by(self, counter: Any) -> None:
        """Sets the variable that counts the updates; None: one of its own, `training/<name>/iter`."""
        self._counter = counter

    # --- what tf.compat.v1.train.Optimizer asks of its subclasses ----------------------------------------------

    def _create_slots(self, var_list: Sequence[Any]) -> None:
        with self._variable_scope():
            self._create_settings()
            for slot, initial in self._initial_slots.items():
                for variable in var_list:
                    dtype = variable.dtype.base_dtype
                    initializer = v1.constant_initializer(initial, dtype=dtype)
                    self._get_or_make_slot_with_initializer(variable, initializer, variable.shape, dtype, slot, slot)

    def _variable_scope(self) -> Any:
        """`training/<name>`; a second optimizer of that name has `training/<name>_1`."""
        if self._scope is None:
            with v1.variable_scope(None, f"training/{self._name}", auxiliary_name_scope=False) as scope:
                self._scope = scope.name
        return v1.variable_scope(self._scope, auxiliary_name_scope=False)

    def _create_settings(self) -> None:
        if self._variables_by_name:
            return
        if self._counter is None:
            zeros = v1.zeros_initializer()
            self._variables_by_name["iter"] = v1.get_variable("iter", [], tf.int64, zeros, trainable=False)
        for name, value in self._settings.items():
            initializer = v1.constant_initializer(value)
            self._variables_by_name[name] = v1.get_variable(name, [], tf.float32, initializer, trainable=False)

    def _finish(self, update_ops: Sequence[Any], name_scope: str) -> Any:
        if "iter" not in self._variables_by_name:
            return super()._finish(update_ops, name_scope)
        with tf.control_dependencies(list(update_ops)):
            return tf.group(*update_ops, self._variables_by_name["iter"].assign_add(1, read_value=False))

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> Any:
        operation = getattr(ops, f"ResourceApply{self._operation}")
        return operation(**self._arguments(handle), grad=grad)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        operation = getattr(ops, f"ResourceSparseApply{self._operation}")
        return operation(**self._arguments(handle), grad=grad, indices=indices)

    def _arguments(self, variable: Any) -> dict[str, Any]:
        """Arguments of the operation, but for the gradient."""
        raise NotImplementedError

    # --- what the five make their updates of -------------------------------------------------------------------

    def setting(self, name: str, like: Any) -> tf.Tensor:
        """The value of a setting, in the dtype of `like`."""
        return tf.cast(self._variables_by_name[name], like.dtype.base_dtype)

    def num_updates(self, like: Any) -> tf.Tensor:
        """Updates before this one."""
        counter = self._variables_by_name.get("iter", self._counter)
        return tf.cast(counter, like.dtype.base_dtype)

    def rate(self, like: Any) -> tf.Tensor:
        """The learning rate of this update."""
        rate = self._rate(like)
        return rate if self._factor is None else rate * tf.cast(self._factor, rate.dtype)

    def scale_rate(self, factor: tf.Tensor) -> None:
        """Multiplies the learning rate; for `train.warmup_steps` and the like. The optimizer is one of this trace."""
        self._factor = factor

    def _rate(self, like: Any) -> tf.Tensor:
        if self._schedule is not None:
            return tf.cast(self._schedule(tf.cast(self.num_updates(like), tf.float32)), like.dtype.base_dtype)
        rate = self.setting("learning_rate", like)
        if "decay" not in self._settings:
            return rate
        return rate / (1 + self.setting("decay", like) * self.num_updates(like))

    def handles(self, variable: Any) -> dict[str, Any]:
        """Argument of an operation -> the resource of a slot of that name."""
        return {name: self.get_slot(variable, name).handle for name in self._initial_slots}


class SGD(KerasNamed):
    """Gradient descent, with momentum where that is not 0."""

    _operation = "KerasMomentum"

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        decay: float = 0.0,
        name: str = "SGD",
    ) -> None:
        super().__init__(
            name, learning_rate, {"decay": decay, "momentum": momentum}, {"momentum": 0.0} if momentum else {}
        )
        self._nesterov = nesterov

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> Any:
        if not self._initial_slots:
            return ops.ResourceApplyGradientDescent(var=handle.handle, alpha=self.rate(handle), delta=grad)
        return super()._resource_apply_dense(grad, handle)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        if not self._initial_slots:
            return ops.ResourceScatterAdd(resource=handle.handle, indices=indices, updates=-self.rate(handle) * grad)
        return super()._resource_apply_sparse(grad, handle, indices)

    def _arguments(self, variable: Any) -> dict[str, Any]:
        return {
            "var": variable.handle,
            "accum": self.handles(variable)["momentum"],
            "lr": self.rate(variable),
            "momentum": self.setting("momentum", variable),
            "use_nesterov": self._nesterov,
        }


class Adagrad(KerasNamed):
    """Adagrad."""

    _operation = "AdagradV2"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        decay: float = 0.0,
        name: str = "Adagrad",
    ) -> None:
        super().__init__(name, learning_rate, {"decay": decay}, {"accumulator": initial_accumulator_value})
        self._epsilon = epsilon

    def _arguments(self, variable: Any) -> dict[str, Any]:
        return {
            "var": variable.handle,
            "accum": self.handles(variable)["accumulator"],
            "lr": self.rate(variable),
            "epsilon": tf.constant(self._epsilon, variable.dtype.base_dtype),
        }


class Adam(KerasNamed):
    """Adam. Sparse gradients move all rows, since the moments of all decay."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        decay: float = 0.0,
        name: str = "Adam",
    ) -> None:
        super().__init__(
            name, learning_rate, {"decay": decay, "beta_1": beta_1, "beta_2": beta_2}, {"m": 0.0, "v": 0.0}
        )
        self._epsilon = epsilon

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> Any:
        beta1, beta2, power1, power2 = self._betas(handle)
        return ops.ResourceApplyAdam(
            var=handle.handle,
            **self.handles(handle),
            beta1_power=power1,
            beta2_power=power2,
            lr=self.rate(handle),
            beta1=beta1,
            beta2=beta2,
            epsilon=tf.constant(self._epsilon, handle.dtype.base_dtype),
            grad=grad,
        )

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        beta1, beta2, power1, power2 = self._betas(handle)
        slots = self.handles(handle)
        m = _decayed(self.get_slot(handle, "m"), slots["m"], beta1, indices, grad * (1 - beta1))
        v = _decayed(self.get_slot(handle, "v"), slots["v"], beta2, indices, tf.square(grad) * (1 - beta2))
        rate = self.rate(handle) * tf.sqrt(1 - power2) / (1 - power1)
        return handle.assign_sub(rate * m / (tf.sqrt(v) + self._epsilon), read_value=False)

    def _betas(self, variable: Any) -> tuple[tf.Tensor, ...]:
        beta1, beta2 = self.setting("beta_1", variable), self.setting("beta_2", variable)
        now = self.num_updates(variable) + 1
        return beta1, beta2, tf.pow(beta1, now), tf.pow(beta2, now)


class RMSprop(KerasNamed):
    """RMSprop, with momentum where that is not 0."""

    _operation = "RMSProp"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        decay: float = 0.0,
        name: str = "RMSprop",
    ) -> None:
        slots = {"rms": 0.0, **({"momentum": 0.0} if momentum else {})}
        super().__init__(name, learning_rate, {"decay": decay, "rho": rho, "momentum": momentum}, slots)
        self._epsilon = epsilon

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> Any:
        if "momentum" in self._initial_slots:
            return super()._resource_apply_dense(grad, handle)
        rho, rms = self.setting("rho", handle), self.get_slot(handle, "rms")
        now = rho * rms + (1 - rho) * tf.square(grad)
        written = rms.assign(now, read_value=False)
        step = self.rate(handle) * grad / (tf.sqrt(now) + self._epsilon)
        return tf.group(written, handle.assign_sub(step, read_value=False))

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        if "momentum" in self._initial_slots:
            return super()._resource_apply_sparse(grad, handle, indices)
        rho, rms = self.setting("rho", handle), self.get_slot(handle, "rms")
        now = _decayed(rms, self.handles(handle)["rms"], rho, indices, tf.square(grad) * (1 - rho))
        step = self.rate(handle) * grad / (tf.sqrt(tf.gather(now, indices)) + self._epsilon)
        return ops.ResourceScatterAdd(resource=handle.handle, indices=indices, updates=-step)

    def _arguments(self, variable: Any) -> dict[str, Any]:
        slots = self.handles(variable)
        return {
            "var": variable.handle,
            "ms": slots["rms"],
            "mom": slots["momentum"],
            "lr": self.rate(variable),
            "rho": self.setting("rho", variable),
            "momentum": self.setting("momentum", variable),
            "epsilon": tf.constant(self._epsilon, variable.dtype.base_dtype),
        }


class Ftrl(KerasNamed):
    """Follow the regularized leader."""

    _operation = "Ftrl"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        beta: float = 0.0,
        decay: float = 0.0,
        name: str = "Ftrl",
    ) -> None:
        settings = {
            "decay": decay,
            "learning_rate_power": learning_rate_power,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "beta": beta,
        }
        super().__init__(name, learning_rate, settings, {"accumulator": initial_accumulator_value, "linear": 0.0})

    def _arguments(self, variable: Any) -> dict[str, Any]:
        slots, rate = self.handles(variable), self.rate(variable)
        return {
            "var": variable.handle,
            "accum": slots["accumulator"],
            "linear": slots["linear"],
            "lr": rate,
            "l1": self.setting("l1_regularization_strength", variable),
            "l2": self.setting("l2_regularization_strength", variable) + self.setting("beta", variable) / (2 * rate),
            "lr_power": self.setting("learning_rate_power", variable),
        }


def _decayed(slot: Any, handle: Any, factor: tf.Tensor, indices: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    """The slot times `factor`, with `added` to its rows `indices`: written, and returned."""
    with tf.control_dependencies([slot.assign(slot * factor, read_value=False)]):
        scattered = ops.ResourceScatterAdd(resource=handle, indices=indices, updates=added)
    with tf.control_dependencies([scattered]):
        return slot.read_value()
