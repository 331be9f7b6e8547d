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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.collectives import Collectives, collectives_of
from runner.tracing.graph_operations import changes_state, needed, operations
from runner.tracing.trace import Trace
from runner.tracing.variable_store import LocalVariable, VariableStore

State = Mapping[str, np.ndarray]
"""Name of a variable -> its value on one replica."""

_ADDS = frozenset(
    {"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd"}
)
_SUMS = frozenset({"AddV2", "Add", "Sub"})
_SAME = frozenset({"Identity", "Cast"})

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
      ValueError: the value of a (value, update) pair depends on one batch.
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
                    f"eval_metric_ops[{name!r}]: its value depends on one batch. A (value, update) pair must keep its "
                    "state in variables, like tf.compat.v1.metrics; for a mean over examples return a [batch] tensor."
                )
        self._values: Callable[[], dict[str, Any]] = trace.function(values, with_inputs=False) if values else dict
        # In TRAIN an update may wait for train_op, which changes the model.
        handles, own = trace.handles(replica=0), set(self._variables)
        self._handles = {
            handle: name for handle, name in handles.items() if name in own or not trace.requested.training
        }
        written = {name: self._written(metric) for name, metric in self._metrics.items()}
        self._states = list(dict.fromkeys(one for names in written.values() for one in names if one in own))
        self.unmerged = [name for name, metric in self._metrics.items() if not self._can_merge(metric)]
        self.changes_model = any(one not in own for names in written.values() for one in names)

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def values(self, *, of_one_replica: bool = False) -> dict[str, Any]:
        """Return name -> NumPy value over all replicas and workers; all workers must call this together.

        Args:
          of_one_replica: only the chief's first replica has seen batches.
        """
        with self.set_aside():
            # The graph and the Keras metrics read the first replica's variables.
            for name, value in self._merged_over_workers(of_one_replica).items():
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
    def _initial(self) -> State:
        return {name: np.asarray(self._store.initial_value(name)) for name in self._states}

    def _merged_over_workers(self, of_one_replica: bool) -> State:
        """Return the state over all replicas and workers; empty if there is only one replica."""
        copies = {name: self._store.copies(name) for name in self._states}
        num_copies = 1 if of_one_replica else max(map(len, copies.values()), default=1)
        if not copies or (num_copies == 1 and self._collectives.num_workers == 1):
            return {}
        states = [{name: copies[name][index].numpy() for name in self._states} for index in range(num_copies)]
        all_states = self._gathered(self.merged(states))
        return all_states[0] if of_one_replica else self.merged(all_states)

    def _gathered(self, state: State) -> list[State]:
        """Return the states of all workers, each of which passes its own."""
        collectives = self._collectives
        if collectives.num_workers == 1:
            return [state]
        flat = np.concatenate([np.zeros(0), *(state[name].astype(np.float64).ravel() for name in self._states)])
        rows = np.zeros([collectives.num_workers, flat.size])
        rows[collectives.worker_index] = flat
        rows = np.asarray(collectives.sum(rows.ravel().tolist())).reshape(rows.shape)
        ends = np.cumsum([state[name].size for name in self._states])[:-1]
        parts = [np.split(row, ends) for row in rows]
        return [
            {
                name: one.reshape(state[name].shape).astype(state[name].dtype)
                for name, one in zip(self._states, row, strict=True)
            }
            for row in parts
        ]

    def merged(self, states: Sequence[State]) -> State:
        """Return the state of all examples, given the states of several parts of them, all begun anew."""
        if len(states) == 1:
            return states[0]
        merged = {}
        for name, initial in self._initial.items():
            wide = np.float64 if initial.dtype.kind == "f" else np.int64  # a narrow sum would lose digits
            first = initial.astype(wide)
            merged[name] = first + sum(state[name].astype(wide) - first for state in states)
        for scope in self._covariances:
            merged |= _covariance(scope, states)
        for metric in self._metrics.values():
            if _merges_itself(metric):
                merged |= self._by_merge_state(metric, states)
        return merged

    def _by_merge_state(self, metric: Any, states: Sequence[State]) -> State:
        """Return the state that the metric's own `merge_state` makes of several."""
        names = self._names_of(metric)
        others = [{id(one): _variable_like(one, state[name]) for one, name in names} for state in states[1:]]
        for variable, name in names:
            variable.assign(states[0][name])
        metric.merge_state([_with_variables(metric, new) for new in others])
        return {name: np.asarray(variable.numpy()) for variable, name in names}

    # --- what the graph says --------------------------------------------------------------------------------------

    @property
    def _covariances(self) -> list[str]:
        """The scopes of contrib's covariances, with a slash at their end."""
        scopes = [name.removesuffix("comoment") for name in self._states if name.endswith("/comoment")]
        return [scope for scope in scopes if all(scope + part in self._states for part in _OF_COVARIANCE)]

    def _names_of(self, metric: Any) -> list[tuple[Any, str]]:
        """Return (variable, its name in the store) of the variables of a Keras metric."""
        requests = self._trace.requested.requests.items()
        names = {id(one): name for name, (_, owner) in requests for one in (owner, self._store.copies(name)[0])}
        return [(one, names[id(one)]) for one in metric.variables if id(one) in names]

    def _updates(self, metric: Any) -> list[tf.Operation]:
        """Return the operations that update a metric, with all on which they depend."""
        if is_pair(metric):
            return needed(self._trace.graph, operations([metric[1]]))
        own = {name for _, name in self._names_of(metric)}
        writes = self._trace.writes_of_keras(metrics_only=True, replica=0)
        return [one for one in writes if own.intersection(self._variables_of(one))]

    def _variables_of(self, operation: tf.Operation) -> list[str]:
        return [self._handles[tensor.name] for tensor in operation.inputs if tensor.name in self._handles]

    def _written(self, metric: Any) -> list[str]:
        """Return the names of the variables that updating a metric writes."""
        return [name for one in self._updates(metric) if changes_state(one) for name in self._variables_of(one)]

    def _can_merge(self, metric: Any) -> bool:
        if _merges_itself(metric):
            return True
        known = {scope + part for scope in self._covariances for part in _OF_COVARIANCE}
        writes = [one for one in self._updates(metric) if changes_state(one) and self._variables_of(one)]
        return all(self._adds(one) or known.issuperset(self._variables_of(one)) for one in writes)

    def _adds(self, write: tf.Operation) -> bool:
        """Report whether a write adds to a local variable what depends on no metric's state.

        A write in a branch, a loop or a nested function counts as one that does not.
        """
        (name,) = {*self._variables_of(write)} if len({*self._variables_of(write)}) == 1 else ("",)
        if name not in self._variables:
            return False
        if write.type in _ADDS:
            return not self._reads_state(write.inputs[1:])
        if write.type != "AssignVariableOp":
            return False
        total = _through(write.inputs[1].op)  # Keras writes variable = variable + number
        if total.type not in _SUMS:
            return False
        own = [self._variables_of(one) == [name] and one.type == "ReadVariableOp" for one in map(_source, total.inputs)]
        if total.type == "Sub":
            own[1] = False
        return any(own) and not self._reads_state([total.inputs[1 - own.index(True)]])

    def _reads_state(self, tensors: Iterable[tf.Tensor]) -> bool:
        """Report whether the values of tensors depend on a metric's state."""
        found: set[tf.Operation] = set()
        stack = [tensor.op for tensor in tensors]
        while stack:
            one = stack.pop()
            if one in found:
                continue
            found.add(one)
            if set(self._variables_of(one)).intersection(self._variables):
                return True
            stack += [tensor.op for tensor in one.inputs]
        return False


def _through(operation: tf.Operation) -> tf.Operation:
    """Return the operation whose value `operation` has."""
    while operation.type in _SAME:
        operation = operation.inputs[0].op
    return operation


def _source(tensor: tf.Tensor) -> tf.Operation:
    return _through(tensor.op)


def _assign(variables: Sequence[LocalVariable], index: int, values: Sequence[tf.Tensor]) -> tf.Operation:
    for variable, value in zip(variables, values, strict=True):
        variable.values[index].assign(value, read_value=False)
    return tf.no_op()


def _covariance(scope: str, states: Sequence[State]) -> dict[str, np.ndarray]:
    """Return the state of contrib's `streaming_covariance` over all examples.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979; here
    for all samples at once.

    Args:
      scope: scope of its variables.
      states: states of the replicas.
    """
    parts = [np.array([state[scope + part] for state in states], np.float64) for part in _OF_COVARIANCE]
    counts, predictions, labels, comoments = parts
    total = counts.sum()
    prediction, label = (float((counts * one).sum() / total) if total else 0.0 for one in (predictions, labels))
    comoment = (comoments + counts * (predictions - prediction) * (labels - label)).sum()
    merged = (total, prediction, label, comoment)
    return {scope + part: np.asarray(value) for part, value in zip(_OF_COVARIANCE, merged, strict=True)}


def _merges_itself(metric: Any) -> bool:
    """Report whether the class of a Keras metric, not a base class of Keras, defines `merge_state`."""
    own = (kind for kind in type(metric).__mro__ if kind.__module__.partition(".")[0] not in ("keras", "tf_keras"))
    return is_keras_metric(metric) and any("merge_state" in vars(kind) for kind in own)


def _variable_like(variable: Any, value: np.ndarray) -> Any:
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
