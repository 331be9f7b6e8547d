"""One request for a variable: name, shape, dtype and initial value."""

from __future__ import annotations

import contextlib
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


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """One request for a variable, recorded during discovery.

    Attributes:
      initial: a callable without arguments, an eager value, or a tensor of the discovery graph.
      local: not part of the model: metric accumulators and the like, reset before each use and never saved.
      of_hook: a hook made it: one variable in this process, whatever the strategy, because the operations of a hook run
        once in a step.
      says_how: the request says how to aggregate what several replicas write.
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
    says_how: bool = False
    is_random_state: bool = False

    @property
    def is_of_replica(self) -> bool:
        """Report whether each replica has a value of its own: a metric's state, or what is added up when it is read."""
        return self.local or self.synchronization == tf.VariableSynchronization.ON_READ


def is_metric(owner: Any) -> bool:
    """Report whether a Keras metric owns the variable: only metrics create variables with ON_READ."""
    return owner is not None and owner.synchronization == "on_read"


# Stands for the owner of a tf_keras metric's variable, which has no `keras.Variable`.
_METRIC_OF_TF_KERAS = types.SimpleNamespace(name="", synchronization="on_read", trainable=False)


def owner_by_request(kwargs: Mapping[str, Any]) -> Any:
    """Return the owner if a tf_keras metric requests the variable: read as a sum, and in no collection; else None."""
    is_summed = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    return _METRIC_OF_TF_KERAS if is_summed and kwargs.get("collections") == [] else None


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
    initial: Any = kwargs.get("initial_value")
    dtype, shape = kwargs.get("dtype"), kwargs.get("shape")
    if is_without_value(initial):  # as an average of tf_keras begins with its weight
        dtype = dtype or initial.dtype
        shape = initial.shape
        initial = initial.initialized_value
    if owner is not None:
        # Keras sets the shape before it initializes from a callable, but after it initializes from a value.
        shape = owner._shape if owner._shape is not None else shape
    if callable(initial) and (shape is None or dtype is None):
        with tf.init_scope():
            value = initial()
        initial, dtype, shape = value, value.dtype, value.shape
    elif not callable(initial):
        with contextlib.nullcontext() if isinstance(initial, tf.Tensor) else tf.init_scope():
            initial = tf.convert_to_tensor(initial, dtype)
        dtype, shape = dtype or initial.dtype, shape if shape is not None else initial.shape
    if kwargs.get("validate_shape") is False:
        shape = None
    trainable = kwargs.get("trainable")
    synchronization = kwargs.get("synchronization") or tf.VariableSynchronization.AUTO
    if trainable is None:
        trainable = synchronization != tf.VariableSynchronization.ON_READ
    local = (
        v1.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ())
        or is_metric(owner)
        or is_metric(owner_by_request(kwargs))
        # EVAL and PREDICT have their own random state, so an evaluation never advances the state of training, and each
        # call starts from the seed.
        or (local_random and is_seed_state(owner))
    )
    aggregation = kwargs.get("aggregation") or tf.VariableAggregation.NONE
    says_how = aggregation != tf.VariableAggregation.NONE
    if not says_how:
        is_summed = synchronization == tf.VariableSynchronization.ON_READ
        # With NONE each replica would write to its own copy. What they do write: runner/tracing/replica_writes.py.
        aggregation = tf.VariableAggregation.SUM if is_summed else tf.VariableAggregation.ONLY_FIRST_REPLICA
    return VariableSpec(
        name, tf.TensorShape(shape), tf.as_dtype(dtype), bool(trainable), initial, local, synchronization, aggregation,
        says_how=says_how, is_random_state=is_seed_state(owner),
    )  # fmt: skip


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
        self._streams: dict[Any, list[str]] = {}

    def name(self, requested: str, *, unique: bool) -> str:
        """Return the variable's name. If `unique`, `requested` is a unique name (a Keras path) and is used without the
        scope.
        """
        context = tf.distribute.get_replica_context()
        stream_id = "cross-replica" if context is None else threading.get_ident()
        stream = self._streams.setdefault(stream_id, [])
        first = next((s for key, s in self._streams.items() if key != "cross-replica"), stream)
        if context is not None and stream is not first and len(stream) < len(first):
            name = first[len(stream)]
        else:
            name = self._new_name(requested, unique=unique, cross_replica=context is None)
        stream.append(name)
        return name

    def _new_name(self, requested: str, *, unique: bool, cross_replica: bool) -> str:
        if not unique:
            # A v1 graph makes a name unique here, by comparing it with the name of every operation.
            with tf.name_scope(requested) as scope:
                requested = scope.rstrip("/")
        requested = re.sub(r"(^|/)replica_\d+(?=/)", "", requested).strip("/")
        name, number = requested, 0
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
    """Return the name without the variable scope that merge_call entered a second time: 'unet/unet/beta1_power', after
    an earlier merge_call in that scope 'unet/unet_1/beta1_power'.
    """
    parts = name.split("/")
    for size in range(len(parts) // 2, 0, -1):
        first, *others = parts[size : 2 * size]
        is_again = re.fullmatch(rf"{re.escape(parts[0])}(_\d+)?", first) and others == parts[1:size]
        if is_again and len(parts) > 2 * size:
            return "/".join([*parts[:size], *parts[2 * size :]])
    return name
