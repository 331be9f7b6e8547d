"""Build the graph of an exported model: call model_fn on placeholders and keep what the signatures need.

This is a TensorFlow 1 graph for a session, as in tf.estimator, because TensorFlow's SavedModel builder, its loaders and
TensorFlow Serving support its placeholders, lookup tables and their files. It is built outside of any strategy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.collectives import SINGLE_PROCESS
from runner.distribute.reductions import without_duplicates
from runner.export.outputs import EvalOutput, ExportOutput, PredictOutput, TrainOutput, outputs_of, signatures_of
from runner.export.receivers import ServingInputReceiver, SupervisedInputReceiver
from runner.export.session_values import Piece, SessionValues, read_in_parts
from runner.hooks.scaffold import ModelScaffold
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.optimizer_step import adds_duplicate_rows, apply_gradients
from runner.tf_private.graphs import eager_values_as_constants
from runner.tf_private.keras3 import keras_trace
from runner.tf_private.random_ops import functions_of
from runner.tf_private.variables import slices_of
from runner.tracing.adapted_layers import adapting_once
from runner.tracing.graph_operations import changes_state, needed, operations
from runner.tracing.partitioned_variable import PartitionedVariable, folded, specs_of
from runner.tracing.variable_request import VariableSpec
from runner.tracing.variable_store import GLOBAL_STEP, RequestedVariables, VariableStore

v1 = tf.compat.v1
_KEYS = v1.GraphKeys

Receiver = ServingInputReceiver | SupervisedInputReceiver


@dataclasses.dataclass(frozen=True)
class ExportGraph:
    """The exported graph of one mode.

    Attributes:
      graph: the graph.
      specs: variable name -> spec, of all variables that model_fn requested and that belong in a checkpoint.
      variables: variable name -> variable of `graph`, for those of `specs` that the signatures need. A list of parts if
        a v1 partitioner divided the variable.
      signatures: name -> SignatureDef.
      assets: string scalar tensors with the paths of files that fill lookup tables.
      init_op: fills lookup tables and initializes variables that do not belong in a checkpoint.
      saveables: key -> tensor of `graph`, of what the receiver function put into SAVEABLE_OBJECTS, such as a table.
      saver_def: saves and restores `variables` and `saveables`; None: there are no saveables.
      keys: variable name -> its key in the checkpoint, for variables that the Scaffold's saver stores under another
        name.
      restore: a function that runs the `restore` that the user's class of saver overrides; None: it does not override
        it. Called with (path of a checkpoint, dicts name -> value of the variables found by name, names), it yields
        dicts name -> value for `names`.
      adapted: what layers of Keras have learnt, as in `adapted_layers`.
    """

    graph: tf.Graph
    specs: Mapping[str, VariableSpec]
    variables: Mapping[str, Any]
    signatures: Mapping[str, Any]
    assets: Sequence[tf.Tensor]
    init_op: tf.Operation
    _: dataclasses.KW_ONLY
    saveables: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    saver_def: Any = None
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restore: Callable[[str, Iterator[Mapping[str, Any]], Iterable[str]], Iterator[dict[str, Any]]] | None = None
    adapted: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def build_graph(
    model_call: Callable[..., EstimatorSpec],
    receiver_fn: Callable[[], Receiver],
    mode: str,
    *,
    seed: int,
    with_initial_values: bool,
    adapted: Mapping[str, Any],
) -> ExportGraph:
    """Call model_fn in `mode` on the tensors of `receiver_fn`, and return the graph.

    Args:
      model_call: calls model_fn: (features, labels, mode) -> EstimatorSpec.
      receiver_fn: returns a ServingInputReceiver in PREDICT, a SupervisedInputReceiver in TRAIN and EVAL.
      mode: one of ModeKeys.
      seed: seed of the graph.
      with_initial_values: give all variables their own initial values, to export a new model. False: variables that a
        checkpoint will overwrite start with zeros.
      adapted: what layers of Keras have learnt, as in `adapted_layers`.

    Raises:
      ValueError: receiver_fn returned another type, or model_fn's result cannot be exported.
    """
    store = VariableStore(None, seed)
    store.adapted.update(adapted)
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(seed)
        with _variables_of(graph, store, with_initial_values) as made_variables:
            receiver = _call_receiver_fn(receiver_fn, mode)
            # Read before model_fn adds its own elements to the same collections.
            collected_by_receiver = _CollectedByReceiver.collected()
            spec = model_call(receiver.features, receiver.labels, mode)
            outputs, train_op = _build_outputs(spec, made_variables)
            default_output = PredictOutput(spec.predictions) if mode == ModeKeys.PREDICT else None
            alternatives = receiver.receiver_tensors_alternatives or {}
            signatures = signatures_of(outputs, receiver.receiver_tensors, alternatives, default_output)
        if not receiver.asks_for_all:
            for signature in signatures.values():
                _leave_out_unused(graph, signature)
        scaffold = ModelScaffold(spec.scaffold, graph, made_variables.requested)
        exported = _cut_out(
            graph,
            made_variables,
            signatures,
            train_op,
            _initializers(spec),
            collected_by_receiver,
            whole=receiver.asks_for_all,
        )
        restore = functools.partial(_restore, made_variables, scaffold.saver) if scaffold.restores else None
        return dataclasses.replace(exported, keys=scaffold.keys, restore=restore, adapted=store.adapted)


# --- the context in which model_fn runs ---------------------------------------------------------------------------


@dataclasses.dataclass
class _MadeVariables:
    """The variables made in a graph.

    Attributes:
      store: has the specs of the variables.
      requested: the variables that model_fn requested.
      variables: name -> variable; each part of a partitioned variable is one.
      protos: name -> VariableDef of the variable when it was made.
    """

    store: VariableStore
    requested: RequestedVariables
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    # From the time of making, because init_from_checkpoint changes the initializers of variables later.
    protos: dict[str, Any] = dataclasses.field(default_factory=dict)

    def is_local(self, name: str) -> bool:
        return self.store.specs[name].local

    @property
    def saved(self) -> dict[str, Any]:
        """Return name -> variable, or PartitionedVariable, for all that belong in a checkpoint."""
        variables = {name: variable for name, variable in self.variables.items() if not self.is_local(name)}
        return folded(variables, slices_of(variables))

    def proto(self, name: str) -> Any:
        """Return the VariableDef of a variable, with the initializer that it was made with."""
        proto = self.variables[name].to_proto()
        proto.initializer_name = self.protos[name].initializer_name
        proto.initial_value_name = self.protos[name].initial_value_name
        return proto


@dataclasses.dataclass(frozen=True)
class _CollectedByReceiver:
    """What a receiver function put into the graph's collections. It is exported whether an output uses it or not.

    Attributes:
      assets: tensors with the paths of files.
      initializers: operations that fill tables.
      saveables: SaveableObjects, such as those of mutable tables.
    """

    assets: Sequence[tf.Tensor]
    initializers: Sequence[tf.Operation]
    saveables: Sequence[Any]

    @classmethod
    def collected(cls) -> _CollectedByReceiver:
        """Return what the collections of the default graph hold."""
        assets = v1.get_collection(_KEYS.ASSET_FILEPATHS)
        initializers = operations(v1.get_collection(_KEYS.TABLE_INITIALIZERS))
        saveables = v1.get_collection(_KEYS.SAVEABLE_OBJECTS)
        return cls(assets, initializers, saveables)

    def tensors(self) -> dict[str, tf.Tensor]:
        """Return key -> tensor of what the saveables save."""
        tensors: dict[str, tf.Tensor] = {}
        for saveable in self.saveables:
            for spec in saveable.specs:
                tensors[spec.name] = spec.tensor
        return tensors


@contextlib.contextmanager
def _variables_of(graph: tf.Graph, store: VariableStore, with_initial_values: bool) -> Iterator[_MadeVariables]:
    """Inside this context, make the variables that model_fn requests in `graph`, with the names that they have in
    checkpoints.
    """
    # `make` calls tf.Variable, which asks `create` below. Such a variable must not be requested from the store again.
    is_making = False

    def make(spec: VariableSpec) -> Any:
        nonlocal is_making

        def zeros() -> tf.Tensor:
            return tf.zeros(spec.shape, spec.dtype)

        initial = spec.initial if with_initial_values or spec.local else zeros
        is_making = True
        try:
            with v1.name_scope(None), tf.control_dependencies(None), tf.init_scope():
                made_variables.variables[spec.name] = tf.Variable(
                    initial, trainable=spec.trainable, name=_exact_name(graph, spec.name), dtype=spec.dtype,
                    shape=spec.shape,
                )  # fmt: skip
        finally:
            is_making = False
        made_variables.protos[spec.name] = made_variables.variables[spec.name].to_proto()
        return made_variables.variables[spec.name]

    with contextlib.ExitStack() as stack:
        stack.enter_context(adapting_once(graph, store.adapted, SINGLE_PROCESS))
        requested = RequestedVariables(stack.enter_context(keras_trace(graph)), training=False)
        made_variables = _MadeVariables(store, requested)
        creator = store.asked_for_in_a_graph(requested, make)

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            if is_making:
                return next_creator(**kwargs)
            return creator(next_creator, **kwargs)

        stack.enter_context(tf.variable_creator_scope(create))
        stack.enter_context(eager_values_as_constants())
        graph.add_to_collection(_KEYS.GLOBAL_STEP, make(store.specs[GLOBAL_STEP]))
        stack.enter_context(tf.summary.record_if(False))
        yield made_variables


def _exact_name(graph: tf.Graph, name: str) -> str:
    """Return the argument `name` that gives a new variable exactly this name, even if a name scope has it. If an
    operation has it, TensorFlow appends a number.
    """
    name = name.lstrip("_")  # the names of evaluation's random state begin with "_", which a graph does not allow
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return f"{name}/"
    return name


def _call_receiver_fn(receiver_fn: Callable[[], Any], mode: str) -> Receiver:
    receiver = receiver_fn()
    if not isinstance(receiver, Receiver):
        expected: Any = ServingInputReceiver if mode == ModeKeys.PREDICT else SupervisedInputReceiver
        raise ValueError(
            f"the receiver function for mode {mode!r} returned a {type(receiver).__name__}. Return a "
            f"{expected.__name__}, as the functions build_..._input_receiver_fn do."
        )
    return receiver


def _build_outputs(
    spec: EstimatorSpec, made_variables: _MadeVariables
) -> tuple[dict[str, ExportOutput], tf.Operation | None]:
    """Return (signature name -> outputs, the training operation or None)."""
    if spec.mode == ModeKeys.PREDICT:
        return outputs_of(spec.predictions, spec.export_outputs), None
    loss = tf.reduce_mean(spec.loss)
    metrics = _metric_pairs(spec, made_variables)
    if spec.mode == ModeKeys.TRAIN:
        of_training = TrainOutput(loss, spec.predictions, metrics)
        return {spec.mode: of_training}, _build_train_op(spec, loss, made_variables)
    return {spec.mode: EvalOutput(loss, spec.predictions, metrics)}, None


def _metric_pairs(spec: EstimatorSpec, made_variables: _MadeVariables) -> dict[str, tuple[Any, Any]]:
    """Return name -> (value, update), tensors, for all kinds of metrics in `spec.eval_metric_ops`."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name, metric in (spec.eval_metric_ops or {}).items():
        if isinstance(metric, tuple | list):
            given_value, given_update = metric
            value = _tensor_or_operation(given_value)
            update = _tensor_or_operation(given_update)
        elif tf.is_tensor(metric):
            value, update = v1.metrics.mean(metric)
        else:
            # A Keras metric, whose update is all writes to its variables.
            owners = {id(variable) for variable in metric.variables}
            own = [variable for variable, owner in made_variables.requested.requests.values() if id(owner) in owners]
            value = metric.result()
            with tf.control_dependencies(_writes_to(made_variables, own)):
                update = tf.identity(metric.result())
        pairs[name] = value, update
    return pairs


def _tensor_or_operation(part: Any) -> tf.Tensor | tf.Operation:
    """Return the value or the update of a metric as an element of a graph; an update may be an operation."""
    return part if isinstance(part, tf.Operation) else tf.convert_to_tensor(part)


def _build_train_op(spec: EstimatorSpec, loss: tf.Tensor, made_variables: _MadeVariables) -> tf.Operation:
    """Return the operation that takes a training step.

    An `optimizer` is applied directly, without options of the runner such as train.clip_global_norm.
    """
    if spec.train_op is not None:
        return tf.group(spec.train_op, *_writes_to(made_variables, made_variables.requested.keras_variables()))
    step = v1.train.get_global_step()
    pairs = list(made_variables.requested.trainable.values())
    gradients = tf.gradients(loss, [variable for variable, _ in pairs])
    if not adds_duplicate_rows(spec.optimizer):
        gradients = [without_duplicates(gradient) for gradient in gradients]
    applied = []
    for gradient, (variable, owner) in zip(gradients, pairs, strict=True):
        if gradient is not None:
            applied.append((gradient, variable, owner))
    apply_gradients(spec.optimizer, applied)
    writes = _writes_to(made_variables, made_variables.variables.values())
    return tf.group(*writes, step.assign_add(1))


def _writes_to(made_variables: _MadeVariables, variables: Iterable[Any]) -> list[tf.Operation]:
    """Return the operations that write to `variables`, without those that initialize them."""
    handles = {variable.handle.name for variable in variables}
    initializers = {proto.initializer_name for proto in made_variables.protos.values()}
    writes = []
    for operation in v1.get_default_graph().get_operations():
        if not changes_state(operation) or operation.name in initializers:
            continue
        if any(tensor.name in handles for tensor in operation.inputs):
            writes.append(operation)
    return writes


def _initializers(spec: EstimatorSpec) -> list[tf.Operation]:
    """Return the operations that fill lookup tables, and the Scaffold's local_init_op."""
    # A SavedModel of TensorFlow 2 that is loaded into a graph collects tensors.
    of_tables = v1.get_collection(_KEYS.TABLE_INITIALIZERS)
    local_init_op = getattr(spec.scaffold, "local_init_op", None)
    return operations([*of_tables, local_init_op])


def _restore(
    made_variables: _MadeVariables, saver: Any, path: str, parts: Iterator[Mapping[str, Any]], names: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Restore a checkpoint in a session with the user's saver, and return an iterator over the variables' values.

    Args:
      made_variables: the variables of the graph.
      saver: the saver, whose class overrides `restore`.
      path: path of the checkpoint.
      parts: dicts name -> value of the variables that were found by name; assigned before `saver` runs.
      names: the variables whose values are returned.

    Returns:
      An iterator over dicts name -> value.
    """
    saved = made_variables.saved
    graph = made_variables.variables[GLOBAL_STEP].graph

    def piece(name: str) -> Piece:
        proto = made_variables.protos[name]
        return Piece(made_variables.variables[name], proto.initializer_name, proto.initial_value_name)

    pieces: dict[str, list[Piece]] = {}
    for name, variable in saved.items():
        pieces[name] = [piece(part) for part in _names_of_parts(name, variable)]
    # The session is closed here after an error, and else when the iterator that is returned ends.
    with contextlib.ExitStack() as open_session:
        values = SessionValues(graph, pieces, specs_of(saved, made_variables.store.specs))
        open_session.callback(values.close)
        for part in parts:
            values.assign(part)
            del part  # before the next one is read
        with graph.as_default(), values.session.as_default():
            saver.restore(values.session, path)
        return read_in_parts(dict.fromkeys(names, values), open_session.pop_all())


# --- the exported part of the graph -------------------------------------------------------------------------------


def _cut_out(
    graph: tf.Graph,
    made_variables: _MadeVariables,
    signatures: Mapping[str, Any],
    train_op: tf.Operation | None,
    initializers: Iterable[tf.Operation],
    collected_by_receiver: _CollectedByReceiver,
    whole: bool,
) -> ExportGraph:
    """Return the part of `graph` that the signatures, the training operation and what the receiver function collected
    need. Everything else is left out, such as summaries, and optimizer slots outside of TRAIN.

    Args:
      graph: the graph in which model_fn was called.
      made_variables: its variables.
      signatures: name -> SignatureDef.
      train_op: the training operation; None outside of TRAIN.
      initializers: operations that fill tables; kept only if the exported part uses one of their operations.
      collected_by_receiver: what the receiver function collected.
      whole: keep all trainable variables, used or not: those that a warm start from the SavedModel loads.
    """
    wanted = _wanted_operations(graph, signatures, train_op)
    saved_tensors = collected_by_receiver.tensors()
    wanted += operations([*collected_by_receiver.assets, *collected_by_receiver.initializers, *saved_tensors.values()])
    running = set(needed(graph, wanted))
    used_initializers = []
    for initializer in initializers:
        # A tf.group has no inputs, so look at the operations that it runs.
        its_operations = needed(graph, [initializer])
        if not running.isdisjoint(its_operations):
            used_initializers.append(initializer)
    running |= set(needed(graph, used_initializers))
    used = _used_variables(made_variables, running, whole)
    saved = _parts_of_saved(made_variables, used)
    local = [name for name in made_variables.variables if name in used and made_variables.is_local(name)]
    local_initializers = [graph.get_operation_by_name(made_variables.protos[name].initializer_name) for name in local]
    init_op = tf.group(*used_initializers, *local_initializers, name="init_exported")
    kept = [*itertools.chain.from_iterable(saved.values()), *local]
    protos = {name: made_variables.proto(name) for name in kept}
    # Also what the VariableDefs name and no output depends on: a variable's initializer, its read.
    variable_operations = _operations_of_variables(graph, protos)
    saver_def = None
    if saved_tensors:
        saver_def = _build_saver_def(
            _variables_or_parts(made_variables.variables, saved), collected_by_receiver.saveables
        )
        saver_names = (saver_def.filename_tensor_name, saver_def.save_tensor_name, saver_def.restore_op_name)
        variable_operations += operations([graph.as_graph_element(name) for name in saver_names])
    exported_part = set(needed(graph, [*wanted, init_op, *variable_operations]))

    exported = tf.Graph()
    with exported.as_default():
        tf.graph_util.import_graph_def(_build_graph_def(graph, exported_part), name="")
        variables = {name: type(made_variables.variables[name]).from_proto(proto) for name, proto in protos.items()}
        _collect_variables(exported, variables, local, train_op)
    assets = _collect_files_and_tables(exported, graph, exported_part)
    return ExportGraph(
        exported,
        specs_of(made_variables.saved, made_variables.store.specs),
        _variables_or_parts(variables, saved),
        signatures,
        assets,
        exported.get_operation_by_name(init_op.name),
        saveables={key: exported.get_tensor_by_name(tensor.name) for key, tensor in saved_tensors.items()},
        saver_def=saver_def,
    )


def _build_saver_def(variables: Mapping[str, Any], saveables: Sequence[Any]) -> Any:
    """Return the SaverDef of a saver, in the default graph, of variables and SaveableObjects. The exported part of the
    graph takes it over, because a SaveableObject cannot be made anew in another graph.
    """
    saved = dict(variables)
    for saveable in saveables:
        saved[saveable.name] = saveable
    return v1.train.Saver(saved, sharded=True).as_saver_def()


def _wanted_operations(
    graph: tf.Graph, signatures: Mapping[str, Any], train_op: tf.Operation | None
) -> list[tf.Operation]:
    """Return the operations of the inputs and outputs of the signatures, and the training operation."""
    infos: list[Any] = []
    for signature in signatures.values():
        infos += [*signature.inputs.values(), *signature.outputs.values()]
    wanted = _operations_of(graph, infos)
    if train_op is not None:
        wanted.append(train_op)
    return wanted


def _used_variables(made_variables: _MadeVariables, running: set[tf.Operation], whole: bool) -> set[str]:
    """Return the names of the variables that `running` operations use, of the global step and, if `whole`, of all
    trainable variables.
    """
    used = {GLOBAL_STEP}
    for name, variable in made_variables.variables.items():
        is_loaded = whole and variable.trainable
        if is_loaded or variable.handle.op in running:
            used.add(name)
    return used


def _parts_of_saved(made_variables: _MadeVariables, used: set[str]) -> dict[str, Sequence[str]]:
    """Return name -> names of the parts of each variable that belongs in a checkpoint and has a part in `used`. A
    variable that no partitioner divided is its only part.
    """
    parts: dict[str, Sequence[str]] = {}
    for name, variable in made_variables.saved.items():
        names = _names_of_parts(name, variable)
        if used.intersection(names):
            parts[name] = names
    return parts


def _names_of_parts(name: str, variable: Any) -> Sequence[str]:
    """Return the names of the parts of a variable that belongs in a checkpoint under `name`."""
    return variable.names if isinstance(variable, PartitionedVariable) else (name,)


def _operations_of_variables(graph: tf.Graph, protos: Mapping[str, Any]) -> list[tf.Operation]:
    """Return the operations that the VariableDefs `protos` name."""
    ends: list[Any] = []
    for proto in protos.values():
        ends += [graph.as_graph_element(name) for name in _names_in(proto)]
    return operations(ends)


def _collect_variables(
    graph: tf.Graph, variables: Mapping[str, Any], local: Sequence[str], train_op: tf.Operation | None
) -> None:
    """Add the variables and the training operation to the collections of the exported `graph`.

    Args:
      graph: the exported graph.
      variables: name -> its variables.
      local: names of those that do not belong in a checkpoint.
      train_op: the training operation of the graph in which model_fn was called; None outside of TRAIN.
    """
    for name, variable in variables.items():
        if name in local:
            graph.add_to_collection(_KEYS.LOCAL_VARIABLES, variable)
            continue
        graph.add_to_collection(_KEYS.GLOBAL_VARIABLES, variable)
        if variable.trainable:
            graph.add_to_collection(_KEYS.TRAINABLE_VARIABLES, variable)
    graph.add_to_collection(_KEYS.GLOBAL_STEP, variables[GLOBAL_STEP])
    if train_op is not None:  # tf.estimator put it into this collection
        graph.add_to_collection(_KEYS.TRAIN_OP, graph.get_operation_by_name(train_op.name))


def _collect_files_and_tables(exported: tf.Graph, graph: tf.Graph, part: set[tf.Operation]) -> list[tf.Tensor]:
    """Add to the collections of the exported graph what `part` has of those of the graph in which model_fn was called.

    Returns:
      The tensors of the exported graph with the paths of files that fill tables.
    """
    assets = []
    for tensor in dict.fromkeys(graph.get_collection(_KEYS.ASSET_FILEPATHS)):  # each once and in order
        if tensor.op in part:
            asset = exported.get_tensor_by_name(tensor.name)
            exported.add_to_collection(_KEYS.ASSET_FILEPATHS, asset)
            assets.append(asset)
    for operation in operations(graph.get_collection(_KEYS.TABLE_INITIALIZERS)):
        if operation in part:
            exported.add_to_collection(_KEYS.TABLE_INITIALIZERS, exported.get_operation_by_name(operation.name))
    return assets


def _variables_or_parts(variables: Mapping[str, Any], parts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return name -> variable, or the list of its parts if it has several."""
    found: dict[str, Any] = {}
    for name, names in parts.items():
        found[name] = variables[names[0]]
        if len(names) > 1:
            found[name] = [variables[part] for part in names]
    return found


def _leave_out_unused(graph: tf.Graph, signature: Any) -> None:
    """Remove the inputs on which no output depends, since every request would have to provide them. Keep all inputs if
    no output depends on any.
    """
    used = set(needed(graph, _operations_of(graph, signature.outputs.values())))
    unused = []
    for name, info in signature.inputs.items():
        if used.isdisjoint(_operations_of(graph, [info])):
            unused.append(name)
    if len(unused) == len(signature.inputs):
        return
    for name in unused:
        del signature.inputs[name]


def _operations_of(graph: tf.Graph, infos: Iterable[Any]) -> list[tf.Operation]:
    """Return the operations that compute the tensors of `infos` (TensorInfo protos)."""
    return operations(v1.saved_model.get_tensor_from_tensor_info(info, graph) for info in infos)


def _names_in(proto: Any) -> list[str]:
    """Return the names of tensors and operations in a VariableDef."""
    names = (proto.variable_name, proto.initializer_name, proto.initial_value_name, proto.snapshot_name)
    return [name for name in names if name]


def _build_graph_def(graph: tf.Graph, running: set[tf.Operation]) -> Any:
    """Return the GraphDef of the operations in `running` and of the functions that they call."""
    whole = graph.as_graph_def()
    names = {operation.name for operation in running}
    part = v1.GraphDef(versions=whole.versions)
    part.node.extend(node for node in whole.node if node.name in names)
    for node in part.node:
        places = [name.decode().removeprefix("loc:@") for name in node.attr["_class"].list.s]
        if not places or not names.issuperset(places):  # drop a colocation with an operation that is not exported
            del node.attr["_class"]
    functions = {function.signature.name: function for function in whole.library.function}
    called = _functions_called_by(part.node)
    while called:
        function = functions.pop(called.pop(), None)
        if function is not None:
            part.library.function.append(function)
            called |= _functions_called_by(function.node_def)
    return part


def _functions_called_by(nodes: Iterable[Any]) -> set[str]:
    """Return the names of the functions in the attributes of NodeDefs."""
    names: set[str] = set()
    for node in nodes:
        names.update(functions_of(node))
    return names
