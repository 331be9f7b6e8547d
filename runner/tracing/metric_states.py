"""Metrics that keep a state in variables, and how the states of several replicas become one.

Each replica has a state of its own. The states are merged on the host, and only where the runner knows how:

- a state that is only added to is summed,
- the means and comoments of contrib's `streaming_covariance` by the formula for two samples,
- a Keras metric whose class defines `merge_state`, by that.

Whether a state is only added to is read from the traced graph. For any other state (a maximum, a last value), one
replica must evaluate all batches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.collectives import Collectives, collectives_of
from runner.tracing.graph_operations import changes_state, needed, operations
from runner.tracing.trace import Trace
from runner.tracing.variable_store import LocalVariable, VariableStore

States = Mapping[str, np.ndarray]
"""Name of a variable -> its values in several states, `[states, ...]`."""

_ADDS = frozenset(
    {"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd"}
)

_OF_COVARIANCE = ("count", "mean_prediction", "mean_label", "comoment")
"""Names of the variables of contrib's streaming_covariance, below its scope."""


class KeptMetrics:
    """The metrics that keep their state in variables: (value, update) pairs and Keras metrics.

    Args:
      trace: the trace of model_fn.
      store: the variables.
      metrics: name -> metric, as returned by the trace's first replica; metrics of other kinds are ignored.

    Attributes:
      unmerged: names of the metrics whose states cannot be merged.
      changes_model: updating a metric writes to variables of the model.

    Raises:
      ValueError: the value of a (value, update) pair depends on one batch, or in EVAL a Keras metric is not updated.
    """

    def __init__(self, trace: Trace, store: VariableStore, metrics: Mapping[str, Any]) -> None:
        self._store, self._trace = store, trace
        self._collectives: Collectives = collectives_of(store.strategy)
        self._variables = [name for name in trace.requested.requests if store.specs[name].local]
        self._metrics = {name: one for name, one in metrics.items() if is_pair(one) or is_keras_metric(one)}
        values = {
            name: metric[0]
            for name, metric in self._metrics.items()
            if is_pair(metric) and not isinstance(metric[0], tf.Variable)
        }
        for name, value in values.items():
            if trace.needs_inputs(value):
                raise ValueError(
                    f"eval_metric_ops[{name!r}]: its value depends on one batch. A (value, update) pair, or what "
                    "compute_metrics of a keras.Model returns, must be computed from state in variables, like that of "
                    "tf.compat.v1.metrics and keras.metrics; in eval_metric_ops, a [batch] tensor has a mean over "
                    "examples."
                )
        self._values: Callable[[], dict[str, Any]] = trace.function(values, with_inputs=False) if values else dict
        # In TRAIN an update may wait for train_op, which changes the model.
        own, is_eval = set(self._variables), not trace.requested.training
        self._handles = {handle.name: name for handle, name in trace.handles(replica=0) if name in own or is_eval}
        writes = {name: self._writes(metric) for name, metric in self._metrics.items()}
        for name, metric in self._metrics.items():
            if is_eval and is_keras_metric(metric) and not writes[name]:  # an eager step has no writes to look at
                what = f"eval_metric_ops[{name!r}]: the {type(metric).__name__} is not updated"
                raise ValueError(f"{what}. Call its update_state in model_fn, and not in tf.cond or a tf.function.")
        written = list(
            dict.fromkeys(name for of_metric in writes.values() for one in of_metric for name in self._on(one))
        )
        self._states = [name for name in written if name in own]
        self.unmerged = [name for name, of_metric in writes.items() if not self._can_merge(metrics[name], of_metric)]
        self.changes_model = len(self._states) < len(written)

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def values(self, *, of_one_replica: bool = False) -> dict[str, Any]:
        """Return name -> NumPy value over all replicas and workers; all workers must call this together.

        Args:
          of_one_replica: only the chief's first replica has seen batches.
        """
        with self.set_aside():
            # The graph and the Keras metrics read the first replica's variables.
            for name, value in self._over_workers(of_one_replica).items():
                copy = self._store.copies(name)[0]
                copy.assign(tf.cast(value, copy.dtype))
            values = tf.nest.map_structure(lambda tensor: tensor.numpy(), self._values())
            for name, metric in self._metrics.items():
                if is_keras_metric(metric):
                    values[name] = tf.nest.map_structure(lambda value: value.numpy(), metric.result())
                elif isinstance(metric[0], tf.Variable):
                    values[name] = metric[0].read_value().numpy()
        return values

    def reset(self) -> None:
        """Reset the metrics."""
        self._store.reset_local(self._variables)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Restore the metrics' state at the end of this context, in which an evaluation uses variables of the same
        names.
        """
        copies = [copy for name in self._variables if self._metrics for copy in self._store.copies(name)]
        values = [copy.read_value() for copy in copies]
        yield
        for copy, value in zip(copies, values, strict=True):
            copy.assign(value)

    def keeping(self, function: Callable[..., Any], counts: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> Any:
        """Return `function` of a step, in the graph; it leaves the state of a replica without examples as it was.

        Args:
          function: the step; its arguments are the flat inputs, and maybe more.
          counts: returns the numbers of examples of the local replicas, int64 `[replicas]`, from these arguments.
        """
        variables = [self._store[name] for name in self._states if isinstance(self._store[name], LocalVariable)]
        if not variables:
            return function

        def kept(*arguments: tf.Tensor) -> Any:
            of_replicas = tf.unstack(counts(arguments))
            before = [[one.values[index].read_value() for one in variables] for index in range(len(of_replicas))]
            result = function(*arguments)
            for index, count in enumerate(of_replicas):
                # A stand-in example is counted nowhere, but its rows have passed through the updates.
                tf.cond(count > 0, tf.no_op, functools.partial(_assign, variables, index, before[index]))
            return result

        return kept

    # --- one state of many ----------------------------------------------------------------------------------------

    @functools.cached_property
    def _initial(self) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(self._store.initial_value(name)) for name in self._states}

    def _over_workers(self, of_one_replica: bool) -> Mapping[str, np.ndarray]:
        """Return the state over all replicas and workers; empty if there is only one replica."""
        copies = {name: self._store.copies(name)[: 1 if of_one_replica else None] for name in self._states}
        if self._collectives.num_workers == 1 and all(len(of_name) == 1 for of_name in copies.values()):
            return {}
        mine = self.merged({name: np.stack([copy.numpy() for copy in of_name]) for name, of_name in copies.items()})
        states = {name: self._gathered(mine[name]) for name in sorted(mine)}
        return {name: of_name[0] for name, of_name in states.items()} if of_one_replica else self.merged(states)

    def _gathered(self, value: np.ndarray) -> np.ndarray:
        """Return the values of all workers, `[workers, ...]`."""
        # Each worker fills its own row, so that the sum over the workers has the rows of all.
        rows = np.zeros([self._collectives.num_workers, *value.shape])
        rows[self._collectives.worker_index] = value
        return np.reshape(self._collectives.sum(rows.ravel().tolist()), rows.shape).astype(value.dtype)

    def merged(self, states: States) -> dict[str, np.ndarray]:
        """Return the state of all examples, given the states of several parts of them, all begun anew."""
        if all(len(of_name) == 1 for of_name in states.values()):
            return {name: of_name[0] for name, of_name in states.items()}
        result = {}
        for name, initial in self._initial.items():
            wide = np.float64 if initial.dtype.kind == "f" else np.int64  # a narrow sum would lose digits
            # Each state begins with the initial value, which must count only once.
            result[name] = initial + (states[name].astype(wide) - initial.astype(wide)).sum(0)
        for scope in self._covariances:
            result |= _covariance(scope, states)
        for metric in self._metrics.values():
            if _merges_itself(metric):
                result |= self._by_merge_state(metric, states)
        return result

    def _by_merge_state(self, metric: Any, states: States) -> dict[str, np.ndarray]:
        """Return the state that the metric's own `merge_state` makes of several."""
        variables = self._variables_of(metric)
        number = len(next(iter(states.values())))
        others = [{id(one): _like(one, states[name][n]) for name, one in variables.items()} for n in range(1, number)]
        # The metric itself gets the first state; `merge_state` adds the others to it.
        for name, variable in variables.items():
            variable.assign(states[name][0])
        metric.merge_state([_with_variables(metric, new) for new in others])
        return {name: np.asarray(variable) for name, variable in variables.items()}

    # --- what the graph says --------------------------------------------------------------------------------------

    @property
    def _covariances(self) -> list[str]:
        """The scopes of contrib's covariances, with a slash at their end."""
        scopes = [name.removesuffix("comoment") for name in self._states if name.endswith("/comoment")]
        return [scope for scope in scopes if all(scope + part in self._states for part in _OF_COVARIANCE)]

    def _variables_of(self, metric: Any) -> dict[str, Any]:
        """Return name in the store -> variable of a Keras metric."""
        requests = self._trace.requested.requests.items()
        names = {id(one): name for name, (_, owner) in requests for one in (owner, self._store.copies(name)[0])}
        return {names[id(one)]: one for one in metric.variables if id(one) in names}

    def _on(self, operation: tf.Operation) -> list[str]:
        """Return the names of the variables that an operation reads or writes."""
        return [self._handles[tensor.name] for tensor in operation.inputs if tensor.name in self._handles]

    def _writes(self, metric: Any) -> list[tf.Operation]:
        """Return the writes to variables that update a metric."""
        if is_pair(metric):
            running = needed(self._trace.graph, operations([metric[1]]))
            return [one for one in running if changes_state(one) and self._on(one)]
        own = self._variables_of(metric)
        writes = self._trace.writes_of_keras(metrics_only=True, replica=0)
        return [one for one in writes if not own.keys().isdisjoint(self._on(one))]

    def _can_merge(self, metric: Any, writes: Sequence[tf.Operation]) -> bool:
        names = {scope + part for scope in self._covariances for part in _OF_COVARIANCE}
        return _merges_itself(metric) or all(names.issuperset(self._on(one)) or self._adds(one) for one in writes)

    @functools.cached_property
    def _dependent(self) -> set[tf.Operation]:
        """The operations whose values depend on a state."""
        users: set[tf.Operation] = set()
        for one in self._trace.operations:  # in the order in which they were made, inputs first
            if any(tensor.op in users for tensor in one.inputs) or not set(self._on(one)).isdisjoint(self._variables):
                users.add(one)
        return users

    def _adds(self, write: tf.Operation) -> bool:
        """Report whether a write adds to a local variable what depends on no state.

        A write in a branch, a loop or a nested function counts as one that does not.
        """
        if not set(self._variables).issuperset(self._on(write)):
            return False
        if write.type in _ADDS:
            return self._dependent.isdisjoint(tensor.op for tensor in write.inputs[1:])
        if write.type != "AssignVariableOp":
            return False
        total = _source(write.inputs[1])  # Keras writes variable = variable + number
        parts = [_source(tensor) for tensor in total.inputs]
        own = [one.type == "ReadVariableOp" and one.inputs[0] is write.inputs[0] for one in parts]
        is_sum = total.type in ("AddV2", "Add") or (total.type == "Sub" and own[0])
        return is_sum and any(own) and parts[1 - own.index(True)] not in self._dependent


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation whose value `tensor` is, perhaps in another dtype."""
    return _source(tensor.op.inputs[0]) if tensor.op.type in ("Identity", "Cast") else tensor.op


def _assign(variables: Sequence[LocalVariable], index: int, values: Sequence[tf.Tensor]) -> tf.Operation:
    for variable, value in zip(variables, values, strict=True):
        variable.values[index].assign(value, read_value=False)
    return tf.no_op()


def _covariance(scope: str, states: States) -> dict[str, np.ndarray]:
    """Return the state of contrib's `streaming_covariance` over all examples.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979; here
    for any number of samples at once.

    Args:
      scope: scope of its variables.
      states: states of parts of the examples.
    """
    counts, predictions, labels, comoments = (states[scope + part].astype(np.float64) for part in _OF_COVARIANCE)
    total = counts.sum()
    prediction, label = ((counts * one).sum() / (total or 1.0) for one in (predictions, labels))
    comoment = (comoments + counts * (predictions - prediction) * (labels - label)).sum()
    return dict(zip((scope + part for part in _OF_COVARIANCE), (total, prediction, label, comoment), strict=True))


def _merges_itself(metric: Any) -> bool:
    """Report whether the class of a Keras metric, not a base class of Keras, defines `merge_state`."""
    own = (kind for kind in type(metric).__mro__ if kind.__module__.partition(".")[0] not in ("keras", "tf_keras"))
    return is_keras_metric(metric) and any("merge_state" in vars(kind) for kind in own)


def _like(variable: Any, value: np.ndarray) -> Any:
    kind = tf.Variable if isinstance(variable, tf.Variable) else type(variable)
    return kind(value, dtype=variable.dtype, trainable=False)


def _with_variables(part: Any, new: Mapping[int, Any]) -> Any:
    """Return a Keras metric, or a part of one, with other variables.

    Args:
      part: the metric; it stays as it is.
      new: id of a variable of the metric -> the variable to use instead.
    """
    if id(part) in new:
        return new[id(part)]
    if isinstance(part, list | tuple):
        return [_with_variables(one, new) for one in part]
    if isinstance(part, dict):
        return {name: _with_variables(one, new) for name, one in part.items()}
    if not is_keras_metric(part):
        return part
    copy = object.__new__(type(part))  # copy.copy would save the metric to a file, and load it
    vars(copy).update(_with_variables(vars(part), new))
    return copy


def is_pair(metric: Any) -> bool:
    """Report whether a metric is (value, update)."""
    return isinstance(metric, tuple | list)


def is_keras_metric(metric: Any) -> bool:
    """Report whether a metric is one of Keras."""
    return hasattr(metric, "result") and hasattr(metric, "update_state")
