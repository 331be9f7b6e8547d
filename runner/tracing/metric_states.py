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

_ADDING_WRITES = frozenset(
    {"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd"}
)
"""Types of operations that add to a variable, or subtract from it, what their other inputs say."""

_COVARIANCE_VARIABLES = ("count", "mean_prediction", "mean_label", "comoment")
"""Names of the variables of contrib's streaming_covariance, below its scope."""


class KeptMetrics:
    """The metrics that keep their state in variables: (value, update) pairs and Keras metrics.

    Args:
      trace: the trace of model_fn.
      store: the variables.
      metrics: name -> metric, as returned by the trace's first replica; metrics of other kinds are ignored.
      compute_pairs: returns name -> tensor, the current values of the (value, update) pairs; None: they are computed in
        the graph of the trace.

    Attributes:
      unmerged: names of the metrics whose states cannot be merged.
      changes_model: updating a metric writes to variables of the model.

    Raises:
      ValueError: the value of a (value, update) pair depends on one batch, or in EVAL a Keras metric is not updated.
    """

    def __init__(
        self,
        trace: Trace,
        store: VariableStore,
        metrics: Mapping[str, Any],
        compute_pairs: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._store = store
        self._trace = trace
        self._collectives: Collectives = collectives_of(store.strategy)
        self._variables = [name for name in trace.requested.requests if store.specs[name].local]
        self._metrics: dict[str, Any] = {}
        for name, metric in metrics.items():
            if is_pair(metric) or is_keras_metric(metric):
                self._metrics[name] = metric
        self._compute_pairs = compute_pairs or self._function_of_pairs()
        local_names = set(self._variables)
        is_evaluation = not trace.requested.training
        self._handles: dict[str, str] = {}
        for handle, name in trace.handles(replica=0):
            # In TRAIN, writes to the model do not count: an update may wait for train_op, which changes the model.
            if is_evaluation or name in local_names:
                self._handles[handle.name] = name
        # Name of a metric -> the operations of the first replica that update it.
        writes = {name: self._writes(metric) for name, metric in self._metrics.items()}
        if is_evaluation:  # an eager step has no writes to look at
            self._check_updated(writes)
        written = self._written_by(writes)
        self._states = [name for name in written if name in local_names]  # names of variables
        self.unmerged = [name for name, updates in writes.items() if not self._can_merge(metrics[name], updates)]
        self.changes_model = len(self._states) < len(written)

    def _function_of_pairs(self) -> Callable[[], Mapping[str, Any]]:
        """Return a function that computes the values of (value, update) pairs in the graph: name -> tensor. Values that
        are variables are left out.

        Raises:
          ValueError: a value depends on one batch.
        """
        values: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            if is_pair(metric) and not isinstance(metric[0], tf.Variable):
                values[name] = metric[0]
        for name, value in values.items():
            if self._trace.needs_inputs(value):
                raise ValueError(
                    f"eval_metric_ops[{name!r}]: its value depends on one batch. A (value, update) pair, or what "
                    "compute_metrics of a keras.Model returns, must be computed from state in variables, like that of "
                    "tf.compat.v1.metrics and keras.metrics; in eval_metric_ops, a [batch] tensor has a mean over "
                    "examples."
                )
        if not values:
            return dict
        return self._trace.function(values, with_inputs=False)

    def _check_updated(self, writes: Mapping[str, Sequence[tf.Operation]]) -> None:
        """Check that all Keras metrics are updated.

        Args:
          writes: name of a metric -> the writes that update it.

        Raises:
          ValueError: one is not.
        """
        for name, metric in self._metrics.items():
            if is_keras_metric(metric) and not writes[name]:
                what = f"eval_metric_ops[{name!r}]: the {type(metric).__name__} is not updated"
                raise ValueError(f"{what}. Call its update_state in model_fn, and not in tf.cond or a tf.function.")

    def _written_by(self, writes: Mapping[str, Sequence[tf.Operation]]) -> list[str]:
        """Return the names of the variables to which updates write, each once, in order."""
        written: dict[str, None] = {}
        for of_metric in writes.values():
            for write in of_metric:
                written |= dict.fromkeys(self._variables_on(write))
        return list(written)

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def values(self, *, of_one_replica: bool = False) -> dict[str, Any]:
        """Return name -> NumPy value over all replicas and workers; all workers must call this together.

        Args:
          of_one_replica: only the chief's first replica has seen batches.
        """
        with self.restoring_state():
            # The graph and the Keras metrics read the first replica's variables, so these get the merged state for now.
            for name, value in self._merge_over_workers(of_one_replica).items():
                copy = self._store.copies(name)[0]
                copy.assign(tf.cast(value, copy.dtype))
            found: dict[str, Any] = {}
            for name, value in self._compute_pairs().items():
                found[name] = tf.nest.map_structure(lambda tensor: tensor.numpy(), value)
            for name, metric in self._metrics.items():
                if is_keras_metric(metric):
                    found[name] = tf.nest.map_structure(lambda value: value.numpy(), metric.result())
                elif isinstance(metric[0], tf.Variable):  # no tensor of the graph, so `_compute_pairs` leaves it out
                    found[name] = metric[0].read_value().numpy()
        return found

    def reset(self) -> None:
        """Reset the metrics."""
        self._store.reset_local(self._variables)

    @contextlib.contextmanager
    def restoring_state(self) -> Iterator[None]:
        """Restore the metrics' state at the end of this context, which changes it: an evaluation inside it uses
        variables of the same names.
        """
        copies: list[tf.Variable] = []
        if self._metrics:
            for name in self._variables:
                copies += self._store.copies(name)
        values = [copy.read_value() for copy in copies]
        yield
        for copy, value in zip(copies, values, strict=True):
            copy.assign(value)

    def keeping(self, function: Callable[..., Any], counts: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> Any:
        """Return `function`, changed so that it puts back the state of each replica that has no examples in the step.

        Args:
          function: the step, called in a graph; its arguments are the flat inputs, and maybe more.
          counts: returns the numbers of examples of the local replicas, int64 `[replicas]`, from these arguments.
        """
        variables: list[LocalVariable] = []
        for name in self._states:
            variable = self._store[name]
            if isinstance(variable, LocalVariable):
                variables.append(variable)
        if not variables:
            return function

        def kept(*arguments: tf.Tensor) -> Any:
            counts_of_replicas = tf.unstack(counts(arguments))
            values_before = [_read_values(variables, index) for index in range(len(counts_of_replicas))]
            returned = function(*arguments)
            for index, count in enumerate(counts_of_replicas):
                # A replica without examples gets a stand-in batch, whose rows have passed through the updates.
                tf.cond(count > 0, tf.no_op, functools.partial(_assign, variables, index, values_before[index]))
            return returned

        return kept

    # --- one state of many ----------------------------------------------------------------------------------------

    @functools.cached_property
    def _initial(self) -> Mapping[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name in self._states:
            initial = tf.convert_to_tensor(self._store.initial_value(name))
            # In TensorFlow 2.21, `np.asarray` raises ValueError for a scalar tensor of bfloat16.
            found[name] = np.asarray(initial.numpy())
        return found

    def _merge_over_workers(self, of_one_replica: bool) -> Mapping[str, np.ndarray]:
        """Return the state over all replicas and workers; empty if there is only one replica. All workers must call
        this together.
        """
        copies = {name: self._store.copies(name) for name in self._states}
        if of_one_replica:
            copies = {name: of_name[:1] for name, of_name in copies.items()}
        is_one_replica = all(len(of_name) == 1 for of_name in copies.values())
        if self._collectives.num_workers == 1 and is_one_replica:
            return {}
        of_replicas: dict[str, np.ndarray] = {}
        for name, of_name in copies.items():
            of_replicas[name] = np.stack([copy.numpy() for copy in of_name])
        mine = self.merged(of_replicas)
        # By name: all workers must gather the variables in the same order.
        of_workers = {name: self._gather(mine[name]) for name in sorted(mine)}
        if of_one_replica:
            return {name: values[0] for name, values in of_workers.items()}
        return self.merged(of_workers)

    def _gather(self, value: np.ndarray) -> np.ndarray:
        """Return the values of all workers, `[workers, ...]`. All workers must call this together."""
        # Each worker fills its own row, so that the sum over the workers has the rows of all.
        rows = np.zeros([self._collectives.num_workers, *value.shape])
        rows[self._collectives.worker_index] = value
        numbers = self._collectives.sum(rows.ravel().tolist())
        return np.reshape(numbers, rows.shape).astype(value.dtype)

    def merged(self, states: States) -> dict[str, np.ndarray]:
        """Return the state of all examples, given the states of several parts of them, each begun with the initial
        value.
        """
        if all(len(of_name) == 1 for of_name in states.values()):
            return {name: of_name[0] for name, of_name in states.items()}
        total: dict[str, np.ndarray] = {}
        for name, initial in self._initial.items():
            wide = _wide_type(initial.dtype)
            # Each state begins with the initial value, which must count only once.
            added = states[name].astype(wide) - initial.astype(wide)
            total[name] = initial + added.sum(0)
        # These states are not sums: they replace what the loop has added up.
        for scope in self._covariances:
            total |= _merge_covariance(scope, states)
        for metric in self._metrics.values():
            if _merges_itself(metric):
                total |= self._merge_by_metric(metric, states)
        return total

    def _merge_by_metric(self, metric: Any, states: States) -> dict[str, np.ndarray]:
        """Return the state that the metric's own `merge_state` makes of several states, and leave it in the metric."""
        variables = self._variables_of(metric)
        num_states = len(next(iter(states.values())))
        others = []
        for number in range(1, num_states):
            own_variables: dict[int, Any] = {}
            for name, variable in variables.items():
                own_variables[id(variable)] = _variable_like(variable, states[name][number])
            others.append(_with_variables(metric, own_variables))
        # The metric itself gets the first state; `merge_state` adds the others to it.
        for name, variable in variables.items():
            variable.assign(states[name][0])
        metric.merge_state(others)
        return {name: np.asarray(variable) for name, variable in variables.items()}

    # --- what the graph says --------------------------------------------------------------------------------------

    @property
    def _covariances(self) -> list[str]:
        """The scopes of contrib's covariances, with a slash at their end."""
        scopes = []
        for name in self._states:
            scope = name.removesuffix("comoment")
            names = {scope + part for part in _COVARIANCE_VARIABLES}
            if name.endswith("/comoment") and names.issubset(self._states):
                scopes.append(scope)
        return scopes

    def _variables_of(self, metric: Any) -> dict[str, Any]:
        """Return name in the store -> variable of a Keras metric."""
        names: dict[int, str] = {}
        for name, (_, owner) in self._trace.requested.requests.items():
            names[id(owner)] = name
            # A metric of Keras 3 has the owner, a metric of tf_keras the variable itself.
            names[id(self._store.copies(name)[0])] = name
        return {names[id(variable)]: variable for variable in metric.variables if id(variable) in names}

    def _variables_on(self, operation: tf.Operation) -> list[str]:
        """Return the names of the variables that an operation reads or writes."""
        return [self._handles[tensor.name] for tensor in operation.inputs if tensor.name in self._handles]

    def _writes(self, metric: Any) -> list[tf.Operation]:
        """Return the writes to variables that update a metric."""
        if is_pair(metric):
            running = needed(self._trace.graph, operations([metric[1]]))
            changing = [operation for operation in running if changes_state(operation)]
            return [operation for operation in changing if self._variables_on(operation)]
        own = self._variables_of(metric)
        writes = self._trace.writes_of_keras(metrics_only=True, replica=0)
        return [write for write in writes if not own.keys().isdisjoint(self._variables_on(write))]

    def _can_merge(self, metric: Any, writes: Sequence[tf.Operation]) -> bool:
        """Report whether the states of several replicas can become one; `writes` are the updates of the metric."""
        if _merges_itself(metric):
            return True
        of_covariances = set[str]()
        for scope in self._covariances:
            of_covariances.update(scope + part for part in _COVARIANCE_VARIABLES)
        for write in writes:
            is_of_covariance = of_covariances.issuperset(self._variables_on(write))
            if not is_of_covariance and not self._only_adds(write):
                return False
        return True

    @functools.cached_property
    def _dependent(self) -> set[tf.Operation]:
        """The operations whose values depend on a state."""
        dependent: set[tf.Operation] = set()
        for operation in self._trace.operations:  # in the order in which they were made, inputs first
            uses_state = not set(self._variables_on(operation)).isdisjoint(self._variables)
            if uses_state or any(tensor.op in dependent for tensor in operation.inputs):
                dependent.add(operation)
        return dependent

    def _only_adds(self, write: tf.Operation) -> bool:
        """Report whether a write adds to a local variable what depends on no state.

        A write in a branch, a loop or a nested function counts as one that does not.
        """
        if not set(self._variables).issuperset(self._variables_on(write)):
            return False
        if write.type in _ADDING_WRITES:
            return self._dependent.isdisjoint(tensor.op for tensor in write.inputs[1:])
        if write.type != "AssignVariableOp":
            return False
        # Keras writes variable = variable + number, or variable - number: one operand reads the variable itself.
        total = _source(write.inputs[1])
        operands = [_source(tensor) for tensor in total.inputs]
        read_variable = [part.type == "ReadVariableOp" and part.inputs[0] is write.inputs[0] for part in operands]
        is_sum = total.type in ("AddV2", "Add") or (total.type == "Sub" and read_variable[0])
        if not is_sum or True not in read_variable:
            return False
        added = operands[1 - read_variable.index(True)]
        return added not in self._dependent


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation whose value `tensor` is, perhaps in another dtype."""
    operation = tensor.op
    while operation.type in ("Identity", "Cast"):
        operation = operation.inputs[0].op
    return operation


def _read_values(variables: Sequence[LocalVariable], index: int) -> list[tf.Tensor]:
    """Read the copies of variables on a local replica."""
    return [variable.values[index].read_value() for variable in variables]


def _assign(variables: Sequence[LocalVariable], index: int, values: Sequence[tf.Tensor]) -> tf.Operation:
    for variable, value in zip(variables, values, strict=True):
        variable.values[index].assign(value, read_value=False)
    return tf.no_op()


def _merge_covariance(scope: str, states: States) -> dict[str, np.ndarray]:
    """Return the state of contrib's `streaming_covariance` over all examples.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979; here
    for any number of samples at once.

    Args:
      scope: scope of its variables.
      states: states of parts of the examples.
    """
    counts, predictions, labels, comoments = (states[scope + part].astype(np.float64) for part in _COVARIANCE_VARIABLES)
    total = counts.sum()
    divisor = total or 1.0  # without examples the means are 0
    prediction = (counts * predictions).sum() / divisor
    label = (counts * labels).sum() / divisor
    comoment = (comoments + counts * (predictions - prediction) * (labels - label)).sum()
    names = [scope + part for part in _COVARIANCE_VARIABLES]
    return dict(zip(names, (total, prediction, label, comoment), strict=True))


def _wide_type(dtype: np.dtype) -> type[np.number]:
    """Return the type in which states are added up: in a narrow one the sum would lose digits."""
    if dtype.kind in "iu":
        return np.int64
    if dtype.kind == "c":
        return np.complex128
    return np.float64  # also for bfloat16, whose kind in NumPy is "V"


def _merges_itself(metric: Any) -> bool:
    """Report whether the class of a Keras metric, not a base class of Keras, defines `merge_state`."""
    if not is_keras_metric(metric):
        return False
    # That of the base class in tf_keras adds up all variables, whatever they mean.
    for kind in type(metric).__mro__:
        package, _, _ = kind.__module__.partition(".")
        if package not in ("keras", "tf_keras") and "merge_state" in vars(kind):
            return True
    return False


def _variable_like(variable: Any, value: np.ndarray) -> Any:
    # tf_keras has variables of a private subclass of tf.Variable; Keras 3 has keras.Variables.
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
        return [_with_variables(member, new) for member in part]
    if isinstance(part, dict):
        return {name: _with_variables(member, new) for name, member in part.items()}
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
