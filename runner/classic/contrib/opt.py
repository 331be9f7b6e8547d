"""`tf.contrib.opt`: optimizers that TensorFlow 1.15 had only in contrib."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1


class DecoupledWeightDecayExtension:
    """Decays weights separately from the gradient: before each update, `variable -= weight_decay * variable`.

    The classes that `extend_with_decoupled_weight_decay` makes inherit from it and from an optimizer. As in TensorFlow
    1.15, contrib/opt/python/training/weight_decay_optimizers.py, after Loshchilov and Hutter, arXiv:1711.05101.

    Args:
      weight_decay: a number, a scalar tensor, or a function that returns one; it is not multiplied by the learning
        rate.
      **kwargs: arguments of the optimizer.
    """

    def __init__(self, weight_decay: Any, **kwargs: Any) -> None:
        self._decay_var_list: frozenset[Any] | None = None
        self._weight_decay = weight_decay
        super().__init__(**kwargs)

    def minimize(self, *args: Any, decay_var_list: Iterable[Any] | None = None, **kwargs: Any) -> Any:
        """Like `minimize` of the optimizer without weight decay.

        Args:
          decay_var_list: the variables to decay; None: those last given here or to `apply_gradients`, or else all.
        """
        self._choose_decayed(decay_var_list)
        return super().minimize(*args, **kwargs)  # type: ignore[misc]

    def apply_gradients(self, *args: Any, decay_var_list: Iterable[Any] | None = None, **kwargs: Any) -> Any:
        """Like `apply_gradients` of the optimizer without weight decay.

        Args:
          decay_var_list: the variables to decay; None: those last given here or to `minimize`, or else all.
        """
        self._choose_decayed(decay_var_list)
        return super().apply_gradients(*args, **kwargs)  # type: ignore[misc]

    def _choose_decayed(self, variables: Iterable[Any] | None) -> None:
        if variables:
            self._decay_var_list = frozenset(_key(variable) for variable in variables)

    def _prepare(self) -> None:
        decay = self._weight_decay() if callable(self._weight_decay) else self._weight_decay
        self._weight_decay_tensor = tf.convert_to_tensor(decay, name="weight_decay")
        super()._prepare()  # type: ignore[misc]

    def _build_decay(self, variable: Any, rows: Any = None) -> Any:
        """Build the operation that decays a variable; with `rows` (integers `[n]`), only these rows."""
        if self._decay_var_list is not None and _key(variable) not in self._decay_var_list:
            return tf.no_op()
        rate = tf.cast(self._weight_decay_tensor, variable.dtype.base_dtype)
        if rows is None:
            return variable.assign_sub(rate * variable)
        return variable.scatter_sub(tf.IndexedSlices(rate * tf.gather(variable, rows), rows))

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        with tf.control_dependencies([self._build_decay(var)]):
            return super()._resource_apply_dense(grad, var)  # type: ignore[misc]

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> Any:
        with tf.control_dependencies([self._build_decay(var, indices)]):
            return super()._resource_apply_sparse(grad, var, indices)  # type: ignore[misc]


def _key(variable: Any) -> str:
    return str(variable.name).partition(":")[0]  # replicas have different objects with the same name


def extend_with_decoupled_weight_decay(base_optimizer: type) -> type:
    """Return a subclass of `base_optimizer` with decoupled weight decay; `weight_decay` is its first argument."""
    return type(
        f"{base_optimizer.__name__}WithDecoupledWeightDecay", (DecoupledWeightDecayExtension, base_optimizer), {}
    )


class AdamWOptimizer(DecoupledWeightDecayExtension, v1.train.AdamOptimizer):  # type: ignore[name-defined]
    """Adam with decoupled weight decay. Slots are `<variable>/AdamW` and `<variable>/AdamW_1`."""

    def __init__(
        self,
        weight_decay: Any,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "AdamW",
    ) -> None:
        super().__init__(
            weight_decay, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon,
            use_locking=use_locking, name=name,
        )  # fmt: skip


class MomentumWOptimizer(DecoupledWeightDecayExtension, v1.train.MomentumOptimizer):  # type: ignore[name-defined]
    """Momentum with decoupled weight decay. Slots are `<variable>/MomentumW`."""

    def __init__(
        self,
        weight_decay: Any,
        learning_rate: Any,
        momentum: Any,
        use_locking: bool = False,
        name: str = "MomentumW",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(
            weight_decay, learning_rate=learning_rate, momentum=momentum, use_locking=use_locking, name=name,
            use_nesterov=use_nesterov,
        )  # fmt: skip


class _DenseOnly:
    """Applies a sparse gradient as a dense one: every row of the variable is updated."""

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> Any:
        dense = tf.tensor_scatter_nd_add(tf.zeros_like(var), indices[:, None], grad)
        return self._resource_apply_dense(dense, var)  # type: ignore[attr-defined]


class _Adam(v1.train.AdamOptimizer):  # type: ignore[name-defined]
    def _update_constants(self, var: Any) -> tuple[tf.Tensor, ...]:
        """Return (beta1, beta2, rate sqrt(1 - beta2^t) / (1 - beta1^t), epsilon), scalars of the variable's dtype."""
        dtype = var.dtype.base_dtype
        beta1_power, beta2_power = self._get_beta_accumulators()
        beta1_power = tf.cast(beta1_power, dtype)
        beta2_power = tf.cast(beta2_power, dtype)
        beta1 = tf.cast(self._beta1_t, dtype)
        beta2 = tf.cast(self._beta2_t, dtype)
        rate = tf.cast(self._lr_t, dtype)
        corrected = rate * tf.sqrt(1 - beta2_power) / (1 - beta1_power)
        return beta1, beta2, corrected, tf.cast(self._epsilon_t, dtype)


class LazyAdamOptimizer(_Adam):
    """Adam in which a sparse gradient updates the moments of only its own rows.

    As in TensorFlow 1.15, contrib/opt/python/training/lazy_adam_optimizer.py: for each row, m = beta1 m + (1 - beta1)
    g, v = beta2 v + (1 - beta2) g^2, row -= rate sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon).
    """

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> Any:
        beta1, beta2, rate, epsilon = self._update_constants(var)
        m = self.get_slot(var, "m")
        v = self.get_slot(var, "v")
        m_rows = beta1 * tf.gather(m, indices) + (1 - beta1) * grad
        v_rows = beta2 * tf.gather(v, indices) + (1 - beta2) * tf.square(grad)
        step = rate * m_rows / (tf.sqrt(v_rows) + epsilon)
        return tf.group(
            m.scatter_update(tf.IndexedSlices(m_rows, indices)),
            v.scatter_update(tf.IndexedSlices(v_rows, indices)),
            var.scatter_sub(tf.IndexedSlices(step, indices)),
        )


class NadamOptimizer(_DenseOnly, _Adam):
    """Adam with Nesterov momentum, after Dozat (2015).

    As in TensorFlow 1.15, contrib/opt/python/training/nadam_optimizer.py: the op ApplyAdam with use_nesterov, which
    updates by beta1 m + (1 - beta1) g, where m is the new first moment. Slots have Adam's names.
    """

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        beta1, beta2, rate, epsilon = self._update_constants(var)
        m = self.get_slot(var, "m")
        v = self.get_slot(var, "v")
        new_m = m.assign(beta1 * m + (1 - beta1) * grad)
        new_v = v.assign(beta2 * v + (1 - beta2) * tf.square(grad))
        nesterov_moment = beta1 * new_m + (1 - beta1) * grad
        return var.assign_sub(rate * nesterov_moment / (tf.sqrt(new_v) + epsilon))


class LARSOptimizer(_DenseOnly, v1.train.Optimizer):  # type: ignore[name-defined]
    """Layer-wise adaptive rate scaling (LARS): momentum with a rate per variable; after You et al., arXiv:1708.03888.

    As in TensorFlow 1.15, contrib/opt/python/training/lars_optimizer.py: the rate of a variable w is multiplied by eeta
    |w| / (|g| + weight_decay |w| + epsilon) if both norms are positive, and the momentum accumulates g + weight_decay
    w. Variables whose names contain an entry of `skip_list` get plain momentum. Slots are `<variable>/<name>`.
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.9,
        weight_decay: float = 0.0001,
        eeta: float = 0.001,
        epsilon: float = 0.0,
        name: str = "LARSOptimizer",
        skip_list: Collection[str] | None = None,
        use_nesterov: bool = False,
    ) -> None:
        if momentum < 0.0:
            raise ValueError(f"LARSOptimizer(momentum={momentum}): it must not be negative.")
        if weight_decay < 0.0:
            raise ValueError(f"LARSOptimizer(weight_decay={weight_decay}): it must not be negative.")
        super().__init__(use_locking=False, name=name)
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._eeta = eeta
        self._epsilon = epsilon
        self._skip_list = skip_list
        self._use_nesterov = use_nesterov

    def _create_slots(self, var_list: Iterable[Any]) -> None:
        for variable in var_list:
            self._zeros_slot(variable, "momentum", self._name)

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        rate = self._learning_rate() if callable(self._learning_rate) else self._learning_rate
        rate = tf.cast(rate, var.dtype)
        is_skipped = any(part in var.name for part in self._skip_list or ())
        if not is_skipped:
            norm_of_weights = tf.norm(var)
            norm_of_gradient = tf.norm(grad)
            rate_factor = (
                self._eeta * norm_of_weights / (norm_of_gradient + self._weight_decay * norm_of_weights + self._epsilon)
            )
            rate *= tf.where((norm_of_weights > 0) & (norm_of_gradient > 0), rate_factor, 1.0)
            grad = grad + self._weight_decay * var
        return tf.raw_ops.ResourceApplyMomentum(
            var=var.handle, accum=self.get_slot(var, "momentum").handle, lr=rate, grad=grad,
            momentum=tf.cast(self._momentum, var.dtype), use_nesterov=self._use_nesterov,
        )  # fmt: skip


class AdaMaxOptimizer(_DenseOnly, v1.train.AdamOptimizer):  # type: ignore[name-defined]
    """Adam with the infinity norm, after Kingma and Ba, arXiv:1412.6980, section 7.1.

    As in TensorFlow 1.15, contrib/opt/python/training/adamax.py: v = max(beta2 v, |g|), w -= rate / (1 - beta1^t) m /
    (v + epsilon). Slots are `<variable>/AdaMax` and `<variable>/AdaMax_1`; the variable `beta1_power` holds
    beta1^t.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "AdaMax",
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)

    def _create_slots(self, var_list: Iterable[Any]) -> None:
        variables = list(var_list)
        first = min(variables, key=lambda variable: variable.name)
        self._create_non_slot_variable(initial_value=self._beta1, name="beta1_power", colocate_with=first)
        for variable in variables:
            self._zeros_slot(variable, "m", self._name)
            self._zeros_slot(variable, "v", self._name)

    def _beta1_power(self) -> Any:
        graph = None if tf.executing_eagerly() else v1.get_default_graph()
        return self._get_non_slot_variable("beta1_power", graph)

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        dtype = var.dtype.base_dtype
        beta1 = tf.cast(self._beta1_t, dtype)
        beta2 = tf.cast(self._beta2_t, dtype)
        m = self.get_slot(var, "m")
        v = self.get_slot(var, "v")
        new_m = m.assign(beta1 * m + (1 - beta1) * grad)
        new_v = v.assign(tf.maximum(beta2 * v, tf.abs(grad)))
        rate = tf.cast(self._lr_t, dtype) / (1 - tf.cast(self._beta1_power(), dtype))
        return var.assign_sub(rate * new_m / (new_v + tf.cast(self._epsilon_t, dtype)))

    def _finish(self, update_ops: Any, name_scope: str) -> Any:
        with tf.control_dependencies(update_ops):
            update_of_power = self._beta1_power().assign(self._beta1_power() * self._beta1_t)
        return tf.group(*update_ops, update_of_power, name=name_scope)
