"""Variables by name: discover what a model_fn requests, create it once, and pass it to every trace.

A model_fn builds its layers and requests its variables anew each time it is called, as in tf.estimator. Here it is
first called to *discover*: every request is recorded (name, shape, dtype, initial value) and answered with a variable
that has a handle but no memory. Then the real variables are *materialised* in the strategy's scope, and every later
trace gets them by name. Names are those of a v1 graph, and for Keras 3 `Variable.path`; they equal those that
tf.estimator wrote to checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.reductions import local_replica
from runner.distribute.strategy import is_parameter_server
from runner.tf_private import graphs, random_ops
from runner.tf_private.cluster import own_initial_values
from runner.tf_private.keras3 import KerasTrace
from runner.tf_private.parameter_server import ShardedVariable
from runner.tf_private.variables import (
    VariablePart,
    belongs_to,
    constrain,
    created_under,
    initial_of,
    loadable,
    named,
    same_slice,
    slices_of,
    uninitialized_variable,
)
from runner.tracing.graph_operations import handles
from runner.tracing.partitioned_variable import (
    LARGE,
    ParameterServers,
    PartitionedVariable,
    Unpartitioned,
    folded,
    part_name,
    part_specs,
    size_of,
    specs_of,
)
from runner.tracing.random_state import drawing_from, seeded
from runner.tracing.variable_request import (
    RequestedNames,
    VariableSpec,
    is_metric,
    is_seed_state,
    owner_by_request,
    spec_of,
)

v1 = tf.compat.v1
_KEYS = v1.GraphKeys

GLOBAL_STEP = "global_step"


class NotFed(ValueError):
    """A variable starts from a placeholder that is not fed."""

    def __init__(self, placeholder: tf.Tensor) -> None:
        super().__init__(
            f"You must feed a value for placeholder tensor {placeholder.op.name!r} with dtype {placeholder.dtype.name} "
            f"and shape {placeholder.shape}"
        )


@dataclasses.dataclass
class RequestedVariables:
    """The variables that one trace requested, by name in order of request, and which of them belong to Keras.

    Attributes:
      keras: what Keras did during the trace.
      training: Keras' random state is part of the model; False: the evaluation has its own.
      requests: name -> (variable or LocalVariable, the requesting `keras.Variable` or None), as the first replica
        requested it.
    """

    keras: KerasTrace
    training: bool
    requests: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> list[Any]:
        """Return the variables, in order of request."""
        return [variable for variable, _ in self.requests.values()]

    @property
    def trainable(self) -> dict[str, tuple[tf.Variable, Any]]:
        """Return name -> (variable, owner) to optimize.

        The owner (a Keras 3 variable) decides, or the tf_keras layer that made the variable: both may have been frozen
        later. A partitioned variable is represented by its parts.
        """
        trainable: dict[str, tuple[tf.Variable, Any]] = {}
        for whole, (variable, owner) in self.requests.items():
            is_layer_trained = getattr(self.keras.tf_keras_layers.get(whole), "trainable", True)
            for name, part, is_part in _parts_of(whole, variable):
                decisive = part if owner is None else owner
                if decisive.trainable and is_layer_trained:
                    # The owner stands for the whole variable, so a part has none.
                    trainable[name] = (part, None) if is_part else (part, owner)
        return trainable

    def keras_variables(self, *, metrics_only: bool = False) -> list[tf.Variable]:
        """Return the variables that Keras created.

        Args:
          metrics_only: only those of metrics (the only ones with ON_READ).
        """
        variables = []
        for variable, owner in self.requests.values():
            is_wanted = is_metric(owner) or not metrics_only
            if owner is not None and is_wanted:
                variables.append(variable)
        return variables


class LocalVariable:
    """A variable that is not part of the model, such as a metric's state: a plain variable for each local replica.

    A strategy's own variable would add its copies whenever it is read, whether or not they are sums, and in the
    replicas of a CentralStorageStrategy there would be only one.

    Attributes:
      values: the variables, in replica order; one is on its replica's device.
    """

    trainable = False

    def __init__(self, values: Sequence[tf.Variable]) -> None:
        self.values = values

    def assign(self, value: Any) -> None:
        """Assign a value of the variable's shape to the variable of each replica."""
        for copy in self.values:
            copy.assign(value)


class VariableStore:
    """The variables of one model under one strategy, by name.

    Args:
      strategy: the strategy under which they are created; None: the default strategy, which uses the variables of
        discovery themselves.
      seed: an initial value depends only on this seed and the variable's name, not on strategy and order.

    Attributes:
      num_replicas: number of replicas in one update, over all workers.
      not_fed: name of a variable that starts from a placeholder that is not fed -> the message about it.
      awaited: function from a name to the shape that a variable has in the checkpoint that is restored next; None: the
        checkpoint does not have it, or none is restored.
      begun_with_zeros: names of variables that have zeros in place of their initial values, because that checkpoint has
        their values.
      adapted: what layers of Keras have learnt by `adapt`, as in `adapted_layers`.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None, seed: int) -> None:
        self.strategy = strategy
        self.seed = seed
        self.num_replicas = 1 if strategy is None else int(strategy.num_replicas_in_sync)
        self.specs: dict[str, VariableSpec] = {}
        self._variables: dict[str, Any] = {}
        self._discovered: dict[str, tf.Variable] = {}
        self.placement = ParameterServers(strategy) if is_parameter_server(strategy) else Unpartitioned()
        self.not_fed: dict[str, NotFed] = {}
        self.awaited: Callable[[str], Sequence[int] | None] = lambda name: None
        self.begun_with_zeros: set[str] = set()
        self.adapted: dict[str, Any] = {}
        self._wholes: set[str] = set()  # names of variables partitioned over parameter servers
        self._parts: dict[str, VariablePart] = {}  # names of their parts
        # CentralStorage and parameter servers keep one copy, which a trace without a strategy can use directly.
        # Evaluation and prediction use it.
        has_central_storage = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
        self.has_one_copy = has_central_storage or isinstance(self.placement, ParameterServers)
        # The runner's own variable. Counts updates atomically, once for all replicas.
        self.declare(GLOBAL_STEP, tf.constant(0, tf.int64))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the variables are assigned."""
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def copies(self, name: str) -> list[tf.Variable]:
        """Return the variables of this process that hold the variable `name`: one for each replica, or only one."""
        variable = self[name]
        copies = getattr(variable, "values", None)
        return list(copies) if copies else [variable]

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    @property
    def saved(self) -> dict[str, Any]:
        """Return name -> variable, or PartitionedVariable, of all that belong in a checkpoint, in order of creation."""
        variables = {name: variable for name, variable in self._variables.items() if not self.specs[name].local}
        for name in self._wholes:
            del variables[name]
        parts = self._parts | slices_of(self._discovered)
        if not parts:
            return variables
        return folded(variables, parts)

    def names_in_checkpoint(self) -> dict[str, str]:
        """Return name of a variable -> name under which it is in a checkpoint: for a part, that of the whole."""
        names: dict[str, str] = {}
        for whole, variable in self.saved.items():
            parts = variable.names if isinstance(variable, PartitionedVariable) else [whole]
            names |= dict.fromkeys(parts, whole)
        return names

    @property
    def saved_specs(self) -> dict[str, VariableSpec]:
        """Return name -> spec of each variable of `saved`."""
        return specs_of(self.saved, self.specs)

    def reset_local(self, names: Iterable[str]) -> None:
        """Reset those of `names` that are not part of the model: metrics, evaluation's random state."""
        for name in names:
            spec = self.specs[name]
            if spec.local:
                self._variables[name].assign(self._initial_value(spec))

    def says_how_to_aggregate(self, variable: Any) -> bool:
        """Report whether it is known how the values become one that several replicas write to a variable."""
        spec = self.specs.get(variable.name.partition(":")[0])
        return spec is not None and (spec.says_how_to_aggregate or spec.is_random_state)

    def own_states(self) -> set[int]:
        """Return the ids of the handles of what is not the same on all replicas: metrics, states of generators."""
        ids = set[int]()
        for name, spec in self.specs.items():
            if spec.is_of_replica or spec.is_random_state:
                ids.update(id(handle) for handle in handles(self[name]))
        return ids

    def forget_hooks(self) -> None:
        """Forget the variables that hooks made; those of the next run make theirs anew, from the checkpoint."""
        names = [name for name, spec in self.specs.items() if spec.of_hook]
        for name in names:
            del self.specs[name]
            del self._variables[name]
            del self._discovered[name]

    @property
    def global_step(self) -> int:
        """Return the number of updates of the model so far."""
        return int(self._variables[GLOBAL_STEP].numpy())

    def discovery_variable(self, name: str) -> tf.Variable:
        """Return the variable that a trace under the default strategy uses in place of the variable `name`."""
        return self._discovered[name]

    def declare(self, name: str, initial: tf.Tensor) -> None:
        """Make a variable that no model_fn requests: state of the runner, the same on all replicas."""
        if name in self._variables:
            return
        discovered = uninitialized_variable(name, initial.shape, initial.dtype, False)
        # The variable of discovery needs its value, too: random initial values in a trace use the global step as time.
        with tf.init_scope():
            discovered.assign(initial)
        self._discovered[name] = discovered
        spec = VariableSpec(name, initial.shape, initial.dtype, trainable=False, initial=initial)
        self._materialise(spec, initial)

    def initial_value(self, name: str) -> Any:
        """Return the initial value of the variable `name`, computed again: an array or tensor of its shape and
        dtype.
        """
        graphs.drop_kernels()  # with the same seed as the first time
        spec = self.specs[name]
        initial = initial_of(self._discovered[name])  # an eager model_fn sets it after the variable is made
        if initial is not None:
            spec = dataclasses.replace(spec, initial=initial)
        return self._initial_value(spec)

    # --- the three phases -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def discovering(self, requested: RequestedVariables, *, of_hook: bool = False) -> Iterator[list[VariableSpec]]:
        """While tracing under the default strategy, record unknown names and answer them with variables without memory.

        Args:
          requested: records the requests.
          of_hook: hooks make the requests, under any strategy.

        Yields:
          The list that fills with the specs of new variables; pass it to `materialise` after the trace.
        """
        new: list[VariableSpec] = []

        def make(name: str, kwargs: Mapping[str, Any], owner: Any) -> tf.Variable:
            spec = spec_of(name, kwargs, owner, local_random=not requested.training)
            spec = dataclasses.replace(spec, of_hook=of_hook)
            is_of_model = not (spec.local or of_hook)
            rows = self.placement.parts(spec) if is_of_model else ()
            if not rows:
                return make_undivided(spec)
            self._wholes.add(name)
            specs = part_specs(spec, rows)
            for number, part in enumerate(specs):
                self._parts[part.name] = VariablePart(name, number)
            return add(spec, ShardedVariable([make_undivided(part) for part in specs], name))

        def make_undivided(spec: VariableSpec) -> tf.Variable:
            devices = self._replica_devices(spec)
            device = devices[0] if devices else None
            new_variable = self._uninitialized(spec, device)
            if spec.shape.rank == 0 and hasattr(spec.initial, "numpy"):
                # A number may be read before it is materialised: a tf_keras optimizer with a schedule computes its
                # first rate, outside of the trace, from the counter that it has just made.
                with tf.init_scope():
                    new_variable.assign(spec.initial)
            return add(spec, new_variable)

        def add(spec: VariableSpec, variable: tf.Variable) -> tf.Variable:
            new.append(spec)
            self.specs[spec.name] = spec
            self._discovered[spec.name] = variable
            return variable

        with graphs.creator_scope(self._creator(self._discovered, make, requested, of_hook=of_hook)):
            yield new

    def serving(self, requested: RequestedVariables) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Answer every request of a trace under the strategy with the real variable of that name.

        Returns:
          A function that makes the context. Enter it inside `strategy.scope()` (v1 slots are made in cross-replica
          context), and again in each replica, where the strategy's own creator would otherwise come first.
        """

        def refuse(name: str, kwargs: Mapping[str, Any], owner: Any) -> tf.Variable:
            raise RuntimeError(
                f"model_fn requested variable {name!r} in one call, but not in another. It must request the same "
                "variables, under the same names, in each call."
            )

        return functools.partial(graphs.creator_scope, self._creator(self._variables, refuse, requested))

    def making(self, requested: RequestedVariables) -> contextlib.AbstractContextManager[None]:
        """Answer every request of an eager call; a new variable has its initial value at once.

        Only for the default strategy, whose variables are those of discovery.
        """

        def make(name: str, kwargs: Mapping[str, Any], owner: Any) -> tf.Variable:
            with drawing_from(None):
                spec = spec_of(name, kwargs, owner, local_random=not requested.training)
                self.specs[name] = spec
                self._discovered[name] = self._uninitialized(spec)
                self._materialise(spec, spec.initial)
            return self._variables[name]

        return graphs.creator_scope(self._creator(self._variables, make, requested))

    def asked_for_in_a_graph(
        self, requested: RequestedVariables, make: Callable[[VariableSpec], tf.Variable]
    ) -> Callable[..., Any]:
        """Return a variable creator for a graph with its own variables (an exported one), under the names of this
        store.

        Args:
          requested: records the requests.
          make: makes a variable in that graph; called once per name.
        """
        variables: dict[str, tf.Variable] = {}

        def make_new(name: str, kwargs: Mapping[str, Any], owner: Any) -> tf.Variable:
            spec = spec_of(name, kwargs, owner, local_random=True)
            self.specs[name] = spec
            variables[name] = make(spec)
            return variables[name]

        return self._creator(variables, make_new, requested)

    def materialise(self, new: Sequence[VariableSpec], evaluate: Callable[[Any], Any], *, on_one_device: bool) -> None:
        """Create the real variables of `new`, in order.

        Args:
          new: their specs.
          evaluate: returns the value of a tensor of the discovery graph, or of a callable inside that graph.
          on_one_device: the discovery trace is the one that runs, so its local variables need no strategy.
        """
        with graphs.kernels_kept():  # each name has its own seed
            for spec in new:
                initial = initial_of(self._discovered[spec.name])
                if initial is None:
                    initial = spec.initial
                is_of_graph = isinstance(initial, tf.Tensor) and not hasattr(initial, "numpy")
                # Of a partitioned variable the parts have initial values.
                if is_of_graph and spec.name not in self._wholes:
                    initial = self._evaluate_initial(spec, evaluate, initial)
                try:
                    self._materialise(spec, initial, on_one_device=on_one_device)
                except (TypeError, ValueError):  # the latter is also the class of TensorFlow's InaccessibleTensorError
                    if not callable(initial):
                        raise
                    # The initializer uses tensors of the trace, so run it there.
                    value = self._evaluate_initial(spec, evaluate, initial)
                    self._materialise(spec, value, on_one_device=on_one_device)
        # After `kernels_kept`: this drops the kernels that have kept the seeds of single variables.
        random_ops.set_seed(self.seed)
        self._forget_initial_values(new)

    def _forget_initial_values(self, new: Sequence[VariableSpec]) -> None:
        """Release the initial values of large variables, which would otherwise stay in memory beside their current
        values.

        A later request for the initial value gets the variable's current value, as from `initialized_value` of TF 1.
        """
        for requested in new:
            if requested.local or size_of(requested) < LARGE:
                continue
            name = requested.name
            spec = self.specs[name]
            # The initializer of a part may hold the value of the whole variable, from which it cuts its rows.
            if not callable(spec.initial) or name in self._parts:
                current = functools.partial(tf.convert_to_tensor, self._variables[name])
                self.specs[name] = dataclasses.replace(spec, initial=current)

    def _evaluate_initial(self, spec: VariableSpec, evaluate: Callable[[Any], Any], initial: Any) -> Any:
        """Return the initial value of a variable; if a placeholder is not fed, note that in `not_fed` and return
        zeros.
        """
        try:
            return evaluate(initial)
        except NotFed as error:
            self.not_fed[spec.name] = error
            return tf.zeros(spec.smallest_shape, spec.dtype)

    def check_fed(self) -> None:
        """Check that all variables of a new model have a value.

        Raises:
          NotFed: a variable starts from a placeholder that is not fed.
        """
        for name, error in self.not_fed.items():
            error.add_note(
                f"variable {name!r} starts from it: EstimatorSpec(scaffold=tf.train.Scaffold(init_feed_dict="
                "{placeholder: value})). A resumed model reads the value from the checkpoint."
            )
            raise error

    def _materialise(self, spec: VariableSpec, initial: Any, *, on_one_device: bool = False) -> None:
        """Create the real variable of a spec, where it belongs."""
        spec = dataclasses.replace(spec, initial=initial)
        self.specs[spec.name] = spec
        is_of_one_device = on_one_device and spec.local
        replica_devices = self._replica_devices(spec)
        if spec.name in self._wholes:
            self._join_parts(spec)
        elif self.strategy is None or spec.of_hook or is_of_one_device:
            self._use_discovered(spec)
        elif replica_devices:
            self._create_on_replicas(spec, replica_devices)
        elif isinstance(self.placement, ParameterServers):
            self._create_on_server(spec, self.placement)
        else:
            self._create_by_strategy(spec, self.strategy)

    def _join_parts(self, spec: VariableSpec) -> None:
        """Create a variable that is partitioned over parameter servers from its parts, which exist."""
        parts = [self._variables[name] for name, part in self._parts.items() if part.whole == spec.name]
        whole = ShardedVariable(parts, spec.name)
        self._variables[spec.name] = whole
        self._discovered[spec.name] = whole

    def _use_discovered(self, spec: VariableSpec) -> None:
        """Give the variable of discovery a value: without a strategy it is the real one."""
        discovered = self._discovered[spec.name]
        self._variables[spec.name] = discovered
        with tf.init_scope():
            discovered.assign(self._first_value(spec))

    def _create_on_replicas(self, spec: VariableSpec, devices: Sequence[str]) -> None:
        """Create a LocalVariable. The variable of discovery, on the first device, serves the first replica."""
        copies = [self._discovered[spec.name]]
        for device in devices[1:]:
            copies.append(self._uninitialized(spec, device))
        local = LocalVariable([created_under(variable, self.strategy) for variable in copies])
        self._variables[spec.name] = local
        with tf.init_scope():
            local.assign(self._first_value(spec))

    def _create_on_server(self, spec: VariableSpec, servers: ParameterServers) -> None:
        """Create a variable, or a part of one, on a parameter server."""
        # v1 optimizers read `op` and the slice info of a part that a v1 partitioner made.
        variable = named(servers.variable(spec), functools.partial(self._initial_of, spec.name))
        same_slice(variable, self._discovered[spec.name])
        self._variables[spec.name] = variable
        self._discovered[spec.name] = variable
        with tf.init_scope(), tf.device(variable.device):  # computed on the server of the part
            variable.assign(self._first_value(spec), read_value=False)

    def _create_by_strategy(self, spec: VariableSpec, strategy: tf.distribute.Strategy) -> None:
        """Create a variable in the scope of the strategy, which makes its copies."""
        copies: list[tf.Variable] = []

        def record(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
            copy = named(next_creator(**kwargs), functools.partial(self._initial_of, spec.name))
            copies.append(copy)
            return copy

        computed = own_initial_values(strategy, size_of(spec))
        # Enter `record` before the scope, so that the strategy calls it for each copy.
        with tf.init_scope(), v1.name_scope(None), computed, tf.variable_creator_scope(record), strategy.scope():
            of_strategy = tf.Variable(
                lambda: self._first_value(spec),
                dtype=spec.dtype,
                shape=spec.shape,
                name=spec.name,
                trainable=spec.trainable,
                synchronization=spec.synchronization,
                aggregation=spec.aggregation,
            )
        self._variables[spec.name] = loadable(of_strategy)
        if self.has_one_copy:
            same_slice(copies[0], self._discovered[spec.name])
            self._discovered[spec.name] = copies[0]

    def _replica_devices(self, spec: VariableSpec) -> Sequence[str]:
        """Return the devices of a LocalVariable, in replica order; (): the variable is no LocalVariable."""
        is_state = spec.local and not spec.trainable
        if self.strategy is None or isinstance(self.placement, ParameterServers) or not is_state:
            return ()
        return [str(device) for device in self.strategy.extended.worker_devices]

    def _uninitialized(self, spec: VariableSpec, device: str | None = None) -> tf.Variable:
        """Make a variable that has a handle, but no memory for a value yet."""
        initial = functools.partial(self._initial_of, spec.name)
        return uninitialized_variable(spec.name, spec.shape, spec.dtype, spec.trainable, initial, device)

    def _initial_of(self, name: str) -> Any:
        return self._initial_value(self.specs[name])

    def _initial_value(self, spec: VariableSpec) -> Any:
        if not callable(spec.initial):
            return tf.cast(spec.initial, spec.dtype)
        # A checksum, because Python's `hash` of a text differs in each process.
        with seeded(zlib.crc32(f"{self.seed}/{spec.name}".encode())):
            value = spec.initial()
        random_ops.set_seed(self.seed)  # `seeded` restores only Python's and NumPy's state
        return tf.cast(value, spec.dtype)

    def _first_value(self, spec: VariableSpec) -> Any:
        """Return the value that a new variable begins with.

        A large variable begins with zeros, and its name is added to `begun_with_zeros`, if the checkpoint that is about
        to be restored has a value for it: the operations of an initializer take up to three times the memory of their
        value.
        """
        is_of_model = not (spec.local or spec.of_hook)
        is_costly = callable(spec.initial) and size_of(spec) >= LARGE
        if is_of_model and is_costly:
            shape_in_checkpoint = self.awaited(spec.name)
            if shape_in_checkpoint is not None and list(shape_in_checkpoint) == spec.shape.as_list():
                self.begun_with_zeros.add(spec.name)
                return tf.zeros(spec.shape, spec.dtype)
        return self._initial_value(spec)

    # --- answering a request ----------------------------------------------------------------------------------

    def _creator(
        self,
        variables: Mapping[str, Any],
        make: Callable[[str, Mapping[str, Any], Any], tf.Variable],
        requested: RequestedVariables,
        of_hook: bool = False,
    ) -> Callable[..., tf.Variable]:
        """Return the variable creator that answers the requests of one trace.

        Args:
          variables: name -> the variable to return, or the LocalVariable with one for each replica.
          make: called with (name, arguments of the creator, owner) for a name that `variables` lacks; returns the
            variable.
          requested: records the requests.
          of_hook: hooks make the requests.
        """
        names = RequestedNames(self.specs)

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> tf.Variable:
            if of_hook and tf.distribute.has_strategy():
                return next_creator(**kwargs)  # in `begin`, a hook trains another model, whose variables are its own
            owner = requested.keras.owners.variable
            if owner is None:
                name = names.name(kwargs.get("name") or "Variable", unique=False)
            else:
                name = names.name(owner.path, unique=True)
                if is_seed_state(owner) and not requested.training:
                    name = f"_evaluation/{name}"  # its own random state: evaluating must not advance that of training
            of_replicas = variables.get(name)
            if of_replicas is None:
                of_replicas = make(name, kwargs, owner)
            variable = of_replicas
            if isinstance(of_replicas, LocalVariable):
                variable = of_replicas.values[local_replica()]
            shape = kwargs.get("shape") if owner is None else owner.shape
            _check_shape(name, variable, shape)
            _collect(variable, self.specs[name], kwargs.get("collections"))
            if "constraint" in kwargs:
                constrain(variable, kwargs["constraint"])
            if owner is not None:  # a Keras 3 layer sets a constraint after it gets the variable
                belongs_to(variable, owner)
            else:
                owner = owner_by_request(kwargs)
            requested.requests.setdefault(name, (of_replicas, owner))
            return variable

        return create


def _check_shape(name: str, variable: tf.Variable, requested: Any) -> None:
    if requested is None or variable.shape.is_compatible_with(requested):
        return
    raise ValueError(
        f"variable {name!r} is {variable.shape.as_list()} but was requested as {tf.TensorShape(requested).as_list()}. "
        "Every mode must request the same shape for a name."
    )


def _collect(variable: tf.Variable, spec: VariableSpec, requested: Any) -> None:
    """Add `variable` to the graph's collections, as v1 does when it makes one."""
    if requested is None:
        requested = [_KEYS.GLOBAL_VARIABLES]
    names = [name for name in requested if name != _KEYS.TRAINABLE_VARIABLES]
    if spec.trainable:
        names.append(_KEYS.TRAINABLE_VARIABLES)
    graph = v1.get_default_graph()
    parts = _parts_of(spec.name, variable)
    for name in names:
        for _, part, _ in parts:
            # wrap_function's holder may have added it already. `map` compares thousands of ids without Python bytecode
            # for each.
            if id(part) not in map(id, graph.get_collection_ref(name)):
                graph.add_to_collection(name, part)


def _parts_of(name: str, variable: Any) -> list[tuple[str, tf.Variable, bool]]:
    """Return (name, variable, whether it is a part) of each part of a variable, or of the variable itself."""
    if not isinstance(variable, ShardedVariable):
        return [(name, variable, False)]
    return [(part_name(name, number), part, True) for number, part in enumerate(variable.variables)]
