"""One request for a variable: name, shape, dtype and initial value."""

from __future__ import annotations

import dataclasses
import re
import threading
import types
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from runner.tf_private.variables import is_without_value

v1 = tf.compat.v1

# Random state of a Keras SeedGenerator; its variable has this name in Keras 3.15.
_SEED_STATE = "seed_generator_state"
# Stands for the thread of a replica where a request is made outside of all replicas.
_CROSS_REPLICA = "cross-replica"


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """One request for a variable, recorded during discovery.

    Attributes:
      initial: a callable without arguments, an eager value, or a tensor of the discovery graph.
      local: not part of the model: metric accumulators and the like, reset before each use and never saved.
      of_hook: a hook made it: one variable in this process, whatever the strategy, because the operations of a hook run
        once in a step.
      says_how_to_aggregate: the request says what becomes of the values that several replicas write.
      is_random_state: the state of a generator of Keras: each replica draws other numbers with it, and all advance it
        alike.
    """

    name: str
    shape: tf.TensorShape
    dtype: tf.DType
    trainable: bool
    initial: Any
    local: bool = False
    synchronization: tf.VariableSynchronization = tf.VariableSynchronization.AUTO
    aggregation: tf.VariableAggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    of_hook: bool = False
    says_how_to_aggregate: bool = False
    is_random_state: bool = False

    @property
    def is_of_replica(self) -> bool:
        """Report whether each replica has a value of its own: a metric's state, or what is added up when it is read."""
        return self.local or self.synchronization == tf.VariableSynchronization.ON_READ

    @property
    def smallest_shape(self) -> list[int]:
        """Return the shape with 0 for each size that is not known; [] if the rank is not known."""
        if self.shape.rank is None:
            return []
        return [size or 0 for size in self.shape]


def is_metric(owner: Any) -> bool:
    """Report whether a Keras metric owns the variable: only metrics create variables with ON_READ."""
    return owner is not None and owner.synchronization == "on_read"


# Stands for the owner of a tf_keras metric's variable, which has no `keras.Variable`.
_METRIC_OF_TF_KERAS = types.SimpleNamespace(name="", synchronization="on_read", trainable=False)


def owner_by_request(kwargs: Mapping[str, Any]) -> Any:
    """Return the owner if a tf_keras metric requests the variable: read as a sum, and in no collection; else None."""
    is_summed = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    is_in_no_collection = kwargs.get("collections") == []
    return _METRIC_OF_TF_KERAS if is_summed and is_in_no_collection else None


def is_seed_state(owner: Any) -> bool:
    """Report whether a Keras SeedGenerator owns the variable."""
    return owner is not None and owner.name == _SEED_STATE


def spec_of(name: str, kwargs: Mapping[str, Any], owner: Any, *, local_random: bool) -> VariableSpec:
    """Return the request for a variable named `name`.

    Args:
      name: its name.
      kwargs: arguments of the variable creator.
      owner: the requesting `keras.Variable`; None: not Keras.
      local_random: Keras' random state is not part of the model.
    """
    initial, dtype, shape = _initial_of_request(kwargs, owner)
    if kwargs.get("validate_shape") is False:
        shape = None
    synchronization = kwargs.get("synchronization") or tf.VariableSynchronization.AUTO
    is_summed = synchronization == tf.VariableSynchronization.ON_READ
    trainable = kwargs.get("trainable")
    if trainable is None:
        trainable = not is_summed
    is_random_state = is_seed_state(owner)
    is_in_local_collection = v1.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ())
    is_of_metric = is_metric(owner) or is_metric(owner_by_request(kwargs))
    # EVAL and PREDICT have their own random state, so an evaluation never advances the state of training, and each call
    # starts from the seed.
    is_local_random_state = local_random and is_random_state
    aggregation = kwargs.get("aggregation") or tf.VariableAggregation.NONE
    says_how_to_aggregate = aggregation != tf.VariableAggregation.NONE
    if not says_how_to_aggregate:
        # With NONE each replica would write to its own copy. What they do write: runner/tracing/replica_writes.py.
        aggregation = tf.VariableAggregation.SUM if is_summed else tf.VariableAggregation.ONLY_FIRST_REPLICA
    return VariableSpec(
        name,
        tf.TensorShape(shape),
        tf.as_dtype(dtype),
        bool(trainable),
        initial,
        local=is_in_local_collection or is_of_metric or is_local_random_state,
        synchronization=synchronization,
        aggregation=aggregation,
        says_how_to_aggregate=says_how_to_aggregate,
        is_random_state=is_random_state,
    )


def _initial_of_request(kwargs: Mapping[str, Any], owner: Any) -> tuple[Any, Any, Any]:
    """Return (initial value, dtype, shape) of a requested variable; as in `spec_of`."""
    initial: Any = kwargs.get("initial_value")
    dtype = kwargs.get("dtype")
    shape = kwargs.get("shape")
    # The initial value is itself a variable of discovery, which has no memory: a moving average of tf_keras begins with
    # the weight of which it is the average. Take that variable's initializer.
    if is_without_value(initial):
        dtype = dtype or initial.dtype
        shape = initial.shape
        initial = initial.initialized_value
    if owner is not None and owner._shape is not None:
        # Keras sets the shape before it initializes from a callable, but after it initializes from a value.
        shape = owner._shape
    if callable(initial):
        if shape is not None and dtype is not None:
            return initial, dtype, shape
        # Only the value tells the dtype and the shape.
        with tf.init_scope():
            value = initial()
        return value, value.dtype, value.shape
    if isinstance(initial, tf.Tensor):
        initial = tf.convert_to_tensor(initial, dtype)
    else:
        with tf.init_scope():
            initial = tf.convert_to_tensor(initial, dtype)
    if shape is None:
        shape = initial.shape
    return initial, dtype or initial.dtype, shape


class RequestedNames:
    """The names of the variables that one trace requests.

    Each replica's k-th request gets the name of the first replica's k-th, because its own scope ("replica_1/") would
    give another name.

    Args:
      known: name -> spec requested by earlier traces.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self._used: set[str] = set()
        self._names: dict[Any, list[str]] = {}  # thread of a replica, or _CROSS_REPLICA -> names in order

    def name(self, requested: str, *, unique: bool) -> str:
        """Return the variable's name. If `unique`, `requested` is a unique name (a Keras path) and is used without the
        scope.
        """
        is_cross_replica = tf.distribute.get_replica_context() is None
        replica = _CROSS_REPLICA if is_cross_replica else threading.get_ident()
        names = self._names.setdefault(replica, [])
        first_names = self._names_of_first_replica(names)
        is_behind_first = names is not first_names and len(names) < len(first_names)
        if is_behind_first and not is_cross_replica:
            name = first_names[len(names)]
        else:
            name = self._new_name(requested, unique=unique, cross_replica=is_cross_replica)
        names.append(name)
        return name

    def _names_of_first_replica(self, default: list[str]) -> list[str]:
        for replica, names in self._names.items():
            if replica != _CROSS_REPLICA:
                return names
        return default

    def _new_name(self, requested: str, *, unique: bool, cross_replica: bool) -> str:
        if not unique:
            # A v1 graph makes a name unique here, by comparing it with the name of every operation.
            with tf.name_scope(requested) as scope:
                requested = scope.rstrip("/")
        requested = re.sub(r"(^|/)replica_\d+(?=/)", "", requested).strip("/")
        name = requested
        number = 0
        while name in self._used:
            number += 1
            name = f"{requested}_{number}"
        self._used.add(name)
        if cross_replica and name not in self._known:
            # TensorFlow's zero_debias enters the scope twice in every TensorFlow, and its names stay:
            # 'BatchNorm/BatchNorm/moving_mean/biased'.
            if not re.search(r"/moving_\w+/(biased|local_step)$", name):
                name = _without_second_scope(name)
        return name


def _without_second_scope(name: str) -> str:
    """Return the name without the variable scope that merge_call entered a second time: 'unet/beta1_power' for
    'unet/unet/beta1_power', or for 'unet/unet_1/beta1_power' after an earlier merge_call in that scope.
    """
    parts = name.split("/")
    # Compare the first `size` scopes with the `size` scopes after them.
    for size in range(len(parts) // 2, 0, -1):
        first, *others = parts[size : 2 * size]
        is_same = re.fullmatch(rf"{re.escape(parts[0])}(_\d+)?", first) and others == parts[1:size]
        has_more = len(parts) > 2 * size
        if is_same and has_more:
            return "/".join([*parts[:size], *parts[2 * size :]])
    return name
