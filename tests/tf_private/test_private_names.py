"""Every private name of TensorFlow and Keras that the engine leans on is still there, and does what it did."""

from __future__ import annotations

import importlib
import inspect
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner.tf_private import cluster, graphs, keras3, parameter_server, variables
from runner.tf_private import v1 as tf1
from runner.tf_private.replaced import replaced
from runner.tracing.graph_operations import needed
from tests.support.messages import Messages

v1 = tf.compat.v1

PRIVATE_NAMES = [
    "tensorflow.python.eager.context:_context",
    "tensorflow.python.pywrap_tfe:TFE_ClearScalarCache",
    "tensorflow.python.data.util.structure:to_tensor_list",
    "tensorflow.core.function.polymorphism.function_type:from_structured_signature",
    "tensorflow.python.distribute.distribute_lib:_DefaultDistributionExtended._num_replicas_in_sync",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._all_gather",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._next_instance_key",
    "tensorflow.python.distribute.values:DistributedVariable._get",
    "tensorflow.python.eager.context:Context._set_global_seed",
    "tensorflow.python.client.session:SessionInterface",
    "tensorflow.python.saved_model.model_utils.export_output:ExportOutput",
    "tensorflow.python.framework.func_graph:FuncGraph",
    "tensorflow.python.framework.func_graph:override_func_graph_name_scope",
    "tensorflow.python.training.saver:Saver.restore",
    "tensorflow.python.checkpoint.graph_view:ObjectGraphView",
    "tensorflow.python.checkpoint.save_util_v1:_fill_object_graph_proto",
    "tensorflow.python.checkpoint.util:objects_ids_and_slot_variables_and_paths",
    "tensorflow.python.checkpoint.util:add_checkpoint_values_check",
    "tensorflow.python.eager.context:Context.call_function",
    "tensorflow.python.eager.context:Context.function_call_options",
    "tensorflow.python.eager.polymorphic_function.atomic_function:from_func_graph",
    "tensorflow.python.framework.kernels:get_all_registered_kernels",
    "tensorflow.python.framework.ops:Graph._variable_creator_scope",
    "tensorflow.python.framework.ops:Operation._add_control_inputs",
    "tensorflow.python.framework.ops:_EagerTensorBase.__tf_tensor__",
    "tensorflow.python.framework.ops:Operation._remove_all_control_inputs",
    "tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value",
    "tensorflow.python.ops.embedding_ops:_embedding_lookup_and_transform",
    "tensorflow.python.ops.embedding_ops:compat.forward_compatible",
    "tensorflow.python.ops.gen_candidate_sampling_ops:pywrap_tfe.TFE_Py_FastPathExecute",
    "tensorflow.python.ops.gen_image_ops:pywrap_tfe.TFE_Py_FastPathExecute",
    "tensorflow.python.ops.gen_nn_ops:pywrap_tfe.TFE_Py_FastPathExecute",
    "tensorflow.python.ops.gen_random_ops:pywrap_tfe.TFE_Py_FastPathExecute",
    "tensorflow.python.ops.losses.losses_impl:compute_weighted_loss",
    "tensorflow.python.ops.embedding_ops:array_ops.unique",
    "tensorflow.python.ops.metrics_impl:_aggregate_across_replicas",
    "tensorflow.python.ops.resource_variable_ops:UninitializedVariable",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._set_save_slice_info",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable.constraint",
    "tensorflow.python.ops.summary_ops_v2:_summary_state.writer",
    "tensorflow.python.ops.script_ops:_internal_py_func",
    "tensorflow.python.ops.script_ops:py_func_common",
    "tensorflow.python.summary.summary:_should_invoke_v2_op",
    "tensorflow.python.training.checkpoint_utils:_set_checkpoint_initializer",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue.put_back",
    "tensorflow.python.eager.context:anonymous_name",
    "tensorflow.compat.v2:__internal__.distribute.ShardedVariable",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended",
    "tensorflow.core.protobuf.trackable_object_graph_pb2:TrackableObjectGraph",
    "tensorflow.python.framework.tensor:Tensor._USE_EQUALITY",
    "tensorflow.python.framework.tensor_shape:_TENSORSHAPE_V2_OVERRIDE",
    "tensorflow.python.util.lazy_loader:LazyLoader._load",
    "tensorflow.python.data.ops.dataset_ops:DatasetV1._make_one_shot_iterator",
    "tensorflow.python.data.ops.dataset_ops:DatasetV1._make_initializable_iterator",
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs",
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._functions",
    "tf_keras.api._v1.keras.__internal__.legacy.layers:dense",
    "tf_keras.api._v1.keras.__internal__.legacy.rnn_cell:LSTMCell",
    "tensorflow.compat.v2:__internal__.feature_column.DenseColumn",
    "tensorflow.compat.v2:__internal__.feature_column.FeatureTransformationCache",
    "tensorflow.compat.v2:__internal__.feature_column.StateManager.create_variable",
    "keras.src.backend.tensorflow.core:Variable._initialize",
    "keras.src.backend.tensorflow.core:Variable._initialize_with_initializer",
    "keras.src.backend.tensorflow.core:Variable._maybe_autocast",
    "keras.src.backend.tensorflow.numpy:take",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._clip_gradients",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer.assign",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer.assign_add",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer.assign_sub",
    "keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER",
    "keras.src.backend.common.stateless_scope:in_stateless_scope",
    "keras.src.layers.preprocessing.index_lookup:IndexLookup.vocabulary_size",
    "keras.src.layers.preprocessing.index_lookup:IndexLookup._token_start_index",
    "keras.src.legacy.saving.legacy_h5_format:_set_weights",
    "keras.src.losses.loss:reduce_values",
    "keras.src.losses.loss:scale_loss_for_distribution",
    "keras.src.losses.loss:unscale_loss_for_distribution",
    "keras.src.saving.saving_lib:_load_state",
    "tf_keras.src.backend:_SEED_GENERATOR",
    "tf_keras.src.utils.losses_utils:reduce_weighted_loss",
    "tf_keras.src.engine.base_layer_utils:tf1.executing_eagerly_outside_functions",
    "tf_keras.src.engine.base_layer_v1:Layer.add_weight",
    "tf_keras.src.engine.base_layer_utils:tf.compat.v1.executing_eagerly_outside_functions",
    "tf_keras.src.legacy_tf_layers.base:tf",
    "tf_keras.src.optimizers.legacy.optimizer_v2:OptimizerV2._aggregate_gradients",
    "tf_keras.src.optimizers.optimizer:Optimizer._apply_weight_decay",
    "tf_keras.src.optimizers.optimizer:Optimizer._compute_current_learning_rate",
    "tf_keras.src.optimizers.optimizer:Optimizer._distributed_apply_gradients_fn",
    "tf_keras.src.engine.base_layer_utils:_UNSAFE_GRAPH_OP_LAYER_CREATION",
]


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_name_is_there(name: str) -> None:
    module, _, path = name.partition(":")
    target = importlib.import_module(module)
    for part in path.split("."):
        assert hasattr(target, part), (
            f"{name} has moved: see what the file of runner/tf_private that names it says about it"
        )
        target = getattr(target, part)


def test_a_process_that_has_used_tensorflow_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.eager import context

    tf.constant(1)
    assert not cluster.is_unused()
    fresh = context.Context()
    monkeypatch.setattr(context, "_context", fresh)
    assert cluster.is_unused()
    monkeypatch.delattr(fresh, "_initialized")  # it has moved: nobody can know, and nothing is forked
    assert not cluster.is_unused()


def test_graphs_keep_their_attributes() -> None:
    graph = v1.wrap_function(lambda: tf.constant(1), []).graph
    assert isinstance(graph._collections, dict)
    assert graph._add_control_dependencies is False


def test_shared_embeddings_keep_their_variable_by_graph() -> None:
    with tf.Graph().as_default():
        column = tf.feature_column.categorical_column_with_identity("a", 3)
        (shared,) = tf.feature_column.shared_embeddings([column], 2)
    assert shared.shared_embedding_column_creator._embedding_weights == {}


def test_an_uninitialized_variable_takes_no_memory_until_it_is_assigned() -> None:
    variable = variables.uninitialized_variable("dense/kernel", tf.TensorShape([3]), tf.float32, True)
    assert variable.name == "dense/kernel:0" and variable._shared_name == "dense/kernel"
    assert not tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
    variable.assign([1.0, 2.0, 3.0])
    assert variable.numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_divided_variable_begins_with_the_rows_of_each_part() -> None:
    sizes = {"table/part_0": 2, "table/part_1": 1}
    parts = [variables.uninitialized_variable(k, tf.TensorShape([n, 2]), tf.float32, True) for k, n in sizes.items()]
    variables.begin_with(types.SimpleNamespace(variables=parts), np.arange(6.0).reshape(3, 2))
    begun = [variables.initial_of(part) for part in parts]
    assert [one().numpy().tolist() for one in begun if one is not None] == [[[0, 1], [2, 3]], [[4, 5]]]


def test_keras_variables_and_writes_are_watched_and_left_as_they_were() -> None:
    from keras.src.backend.tensorflow.core import Variable

    before = Variable._initialize
    owners = []

    traces: list[keras3.KerasTrace] = []

    def creator(next_creator, **kwargs):
        owner = traces[0].owners.variable
        owners.append(owner.path)
        shape = owner._shape if owner._shape is not None else kwargs["initial_value"].shape
        return variables.uninitialized_variable(owner.path, tf.TensorShape(shape), tf.as_dtype(owner.dtype), True)

    def step() -> None:
        with keras3.keras_trace(v1.get_default_graph()) as trace, tf.variable_creator_scope(creator):
            traces.append(trace)
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.apply([tf.ones([2, 1]), tf.ones([1])], layer.trainable_variables)

    keras.layers.Dense(1)
    v1.wrap_function(step, [])
    assert owners[:2] == ["dense/kernel", "dense/bias"], "counters of names are fresh in a trace"
    assert "sgd/learning_rate" in owners
    assert {operation.type for operation in traces[0].written} >= {"AssignSubVariableOp"}
    assert Variable._initialize is before


def test_control_inputs_are_taken_back() -> None:
    def build() -> None:
        tf.constant(1, name="first")
        tf.constant(2, name="second")

    graph = v1.wrap_function(build, []).graph
    first, second = (graph.get_operation_by_name(name) for name in ("first", "second"))
    with graphs.control_inputs({second: [first]}):
        assert list(second.control_inputs) == [first]
    assert list(second.control_inputs) == []


def test_arguments_of_tensorflows_own_hooks_are_found() -> None:
    assert tf1.settings_of_hook(v1.train.StopAtStepHook(num_steps=3)) == {"num_steps": 3}
    assert tf1.settings_of_hook(v1.train.StopAtStepHook(last_step=9)) == {"last_step": 9}
    assert tf1.settings_of_hook(v1.train.StepCounterHook(output_dir="x")) == {}
    assert tf1.settings_of_hook(v1.train.NanTensorHook("loss")) == {"stop_at_nan": True}
    saver = v1.train.CheckpointSaverHook("x", save_steps=7, saver=object())
    assert tf1.settings_of_hook(saver) == {"save_steps": 7, "save_secs": None, "listeners": ()}
    assert tf1.settings_of_hook(v1.train.SessionRunHook()) is None


def test_hooks_that_count_their_calls_are_told_of_others(tmp_path: Path) -> None:
    logs = v1.train.LoggingTensorHook(["a"], every_n_iter=5)
    saves = v1.train.SummarySaverHook(save_secs=7, output_dir=str(tmp_path), summary_op="b")
    ends = v1.train.LoggingTensorHook(["a"], at_end=True)
    assert [tf1.cadence_of_timer(one) for one in (logs, saves, ends)] == [(5, None), (None, 7), (None, None)]
    with tf.Graph().as_default(), tf1.tensors_resolved(logs, lambda name: tf.constant(1)):
        logs.begin()
    assert tf1.count_of(logs) == 0 and tf1.count_of(saves) is None and tf1.is_turn(logs)
    logs._timer.update_last_triggered_step(0)
    tf1.set_count(logs, 4)
    assert not tf1.is_turn(logs) and tf1.last_turn(logs) == 0 and logs._iter_count == 4
    with tf1.writer_given(saves, lambda folder: folder):
        assert saves._summary_writer == str(tmp_path)
    assert saves._summary_writer is None


def test_a_part_of_a_graph_is_a_function_that_runs_what_it_needs_and_nothing_else() -> None:
    counter = tf.Variable(0)
    made: dict[str, Any] = {}

    def trace(x: tf.Tensor) -> None:
        made.update(double=2 * x, seven=tf.constant(7), one=counter.assign_add(1).op, ten=counter.assign_add(10).op)

    graph = v1.wrap_function(trace, [tf.TensorSpec([], tf.float32)]).graph
    fetches, effects = [made["double"]], [made["ten"]]
    running = needed(graph, [made["double"].op, *effects])
    part = graphs.function_of_part(graphs.Part(graph, running, graph.inputs[:1], fetches, effects))
    assert part(tf.constant(4.0))[0].numpy() == 8.0
    assert counter.numpy() == 10
    assert tf.function(lambda x: part(x)[0] + 1)(tf.constant(4.0)).numpy() == 9.0
    assert counter.numpy() == 20


def test_a_part_of_a_graph_that_lacks_its_input_is_refused(messages: Messages) -> None:
    made: list[tf.Tensor] = []
    graph = v1.wrap_function(lambda x: made.append(2 * x), [tf.TensorSpec([], tf.float32)]).graph
    with messages.raised(ValueError):
        graphs.function_of_part(graphs.Part(graph, needed(graph, [made[0].op]), [], made))


def test_seeds_are_set_as_ever_while_kernels_are_kept() -> None:
    def draw(seed: int) -> float:
        tf.random.set_seed(seed)
        return float(tf.random.uniform([]))

    expected = [draw(1), draw(2)]
    tf.random.set_seed(0)
    with graphs.kernels_kept():
        assert [draw(1), draw(2)] == expected
        graphs.drop_kernels()
        assert draw(1) == expected[0]  # a kernel that was kept would have drawn on
    assert [draw(1), draw(2)] == expected


def test_operations_of_xla_are_known() -> None:
    known = graphs.operations_of_xla("CPU")
    assert {"MatMul", "StatelessRandomUniformV2", "While"} <= known
    assert not {"PyFunc", "AsString", "StatelessShuffle"} & known


def test_a_round_of_optimisation_is_asked_for_only_meanwhile() -> None:
    from tensorflow.python.eager import context

    def rounds() -> int:
        options = context.context().function_call_options.config_proto_serialized
        return int(v1.ConfigProto.FromString(options).graph_options.rewrite_options.meta_optimizer_iterations)

    before = rounds()
    with graphs.optimised_once():
        assert rounds() == 1
    assert rounds() == before


def test_the_object_graph_of_a_checkpoint_names_its_keys(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(2, name="hidden")], name="net")
    model.build((None, 3))
    path = tf.train.Checkpoint(model=model, step=tf.Variable(3, name="step")).write(str(tmp_path / "object"))
    reader = tf.train.load_checkpoint(path)
    names = graphs.names_in_object_graph(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    assert {"net/hidden/kernel", "net/hidden/bias", "step"} <= set(names)
    assert reader.get_tensor(names["net/hidden/kernel"]).shape == (3, 2)


@pytest.mark.parametrize(
    "optimizer", [v1.train.GradientDescentOptimizer, v1.train.AdamOptimizer, v1.train.FtrlOptimizer]
)
def test_v1_optimizers_keep_their_rate_where_it_can_be_scaled(optimizer: Any) -> None:
    with tf.Graph().as_default():
        one = optimizer(0.1)
        assert tf1.scale_rate_of_v1(one, tf.constant(3.0, tf.float64))
        one._prepare()
        rate = getattr(one, "_lr_t", None)
        rate = getattr(one, "_learning_rate_tensor", None) if rate is None else rate
        assert v1.Session().run(rate) == pytest.approx(0.3)


@pytest.mark.parametrize("num_loops", [1, 2])
def test_gradients_in_loops_reach_variables_that_are_read_outside(num_loops: int) -> None:
    variable, other = tf.Variable(2.0), tf.Variable(3.0)

    def in_loops(depth: int, found: Callable[[], tf.Tensor]) -> tf.Tensor:
        body = found if depth == 1 else lambda: in_loops(depth - 1, found)
        return tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, body()), [tf.constant(0), tf.zeros([3])])[1]

    def trace() -> tf.Tensor:
        outside = variable * variable
        return in_loops(num_loops, lambda: tf.stack([
            *v1.gradients(outside * other + 5 * variable, [variable, other]), *v1.gradients(6 * variable, variable),
        ]))  # fmt: skip

    with tf1.gradients_in_loops():
        graph_function = tf.function(trace, autograph=False)
        assert graph_function().numpy().tolist() == [17.0, 4.0, 6.0]


def test_gradients_in_loops_of_rows_are_rows() -> None:
    table = tf.Variable(tf.ones([3, 1]))

    def trace() -> tf.Tensor:
        outside = tf.reduce_sum(tf.gather(table, [0, 1]) ** 2)

        def body(i: tf.Tensor, _: tf.Tensor) -> Any:
            (rows,) = v1.gradients(outside + tf.reduce_sum(tf.gather(table, [1, 2]) ** 2), table)
            assert isinstance(rows, tf.IndexedSlices)
            return i + 1, tf.convert_to_tensor(rows)

        return tf.while_loop(lambda i, _: i < 1, body, [tf.constant(0), tf.zeros([3, 1])])[1]

    with tf1.gradients_in_loops():
        assert tf.function(trace, autograph=False)().numpy().tolist() == [[2.0], [4.0], [2.0]]


def test_an_optimizer_of_ones_own_may_keep_it_elsewhere() -> None:
    assert not tf1.scale_rate_of_v1(object(), tf.constant(3.0))


def test_attributes_of_a_parameter_server_strategy_have_their_names() -> None:
    kind = tf.distribute.experimental.ParameterServerStrategy
    source = Path(inspect.getfile(kind)).read_text()
    for name in (
        "self._cluster_resolver = ",
        "self._variable_partitioner = ",
        "self._allow_run_without_coordinator = ",
    ):
        assert name in source, f"{name} has moved: see what runner/tf_private/parameter_server.py says about it"


def test_a_coordinator_tells_of_losses_in_the_words_that_are_looked_for() -> None:
    kind = tf.distribute.experimental.coordinator.ClusterCoordinator
    source = Path(inspect.getfile(kind)).read_text()
    words = parameter_server.LossInALine
    for text in (
        "self._cluster = ", "self.closure_queue = ", "self._args = ", f'"{words.LOST}"', f'"{words.INTERRUPTED}\\n"',
        f'"{words.WAITING}"', '" /job:worker/task:%d encountered the following error when "',
    ):  # fmt: skip
        assert text in source, f"{text} has changed: see what runner/tf_private/parameter_server.py says about it"


def test_a_variable_without_a_name_is_new_each_time_that_its_graph_runs() -> None:
    @tf.function
    def counted() -> tf.Tensor:
        handle = parameter_server.anonymous_variable([], tf.float64)
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(1.0, tf.float64))
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.constant(2.0, tf.float64))
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)

    assert [float(counted()) for _ in range(2)] == [3.0, 3.0]


def test_of_tensorflows_words_on_a_lost_worker_one_line_stays(caplog: Any, messages: Messages) -> None:
    caplog.set_level("WARNING")
    log, error = logging.getLogger("tensorflow"), tf.errors.UnavailableError(None, None, "pages of it")
    before = list(log.filters)
    parameter_server.say_losses_in_a_line(logging.getLogger("runner"))
    try:
        log.error(parameter_server.LossInALine.LOST, "/job:worker/replica:0/task:1", error, error)
        log.error(parameter_server.LossInALine.WAITING, error)
        log.error(f"{parameter_server.LossInALine.RAISED} closure: %r:%s", 1, error, error)
        log.error(f"{parameter_server.LossInALine.RAISED} closure: %r:%s", 1, ValueError("mine"), ValueError("mine"))
        log.error("something else: %s", "seen")
    finally:
        log.filters[:] = before
    first, second, third = (record.getMessage() for record in caplog.records)
    messages.same(caplog.records[0].levelname, first)
    assert "mine" in second and third == "something else: seen"


def test_rows_of_a_divided_variable_are_found_by_their_number() -> None:
    table = parameter_server.ShardedVariable([tf.Variable([[0.0], [1.0], [2.0]]), tf.Variable([[3.0], [4.0]])])

    @tf.function
    def looked_up(ids: tf.Tensor) -> tuple[tf.Tensor, ...]:
        by_default = v1.nn.embedding_lookup(table, ids)  # "mod" where nobody says anything
        listed = v1.nn.embedding_lookup([table], ids, max_norm=9.0)
        return by_default, listed, tf.nn.embedding_lookup(table, ids), parameter_server.lookup_by_rows(table, ids)

    for rows in looked_up(tf.constant([4, 1, 3])):
        assert rows[:, 0].numpy().tolist() == [4.0, 1.0, 3.0]


def test_files_are_found_behind_readers_and_divided(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}a\n{number}b\n")
    names = [str(tmp_path / f"{number}.txt") for number in range(3)]
    listed = tf.data.Dataset.list_files(names, shuffle=False)
    for dataset in (tf.data.TextLineDataset(names), listed.interleave(tf.data.TextLineDataset, cycle_length=1)):
        assert cluster.num_files(dataset) == 3
        parts = [cluster.part_of_files(dataset.batch(2), 2, worker) for worker in range(2)]
        lines = [[line.decode() for batch in part.as_numpy_iterator() for line in batch] for part in parts]
        assert lines == [["0a", "0b", "2a", "2b"], ["1a", "1b"]]


def test_what_reads_no_files_that_can_be_divided_has_none() -> None:
    names = tf.data.Dataset.from_tensor_slices(["a", "b"])
    assert cluster.num_files(tf.data.Dataset.range(4).batch(2)) == 0
    assert cluster.num_files(names.map(tf.io.read_file)) == 0
    assert cluster.num_files(tf.data.Dataset.zip((names, tf.data.Dataset.range(2)))) == 0


def test_the_devices_of_a_worker_are_named_by_one_method() -> None:
    extended = cluster.CollectiveAllReduceExtended
    original = extended._initialize_local_devices
    assert list(inspect.signature(original).parameters) == ["self", "cluster_resolver", "worker_device"]
    with cluster.cpus_of_worker(2):
        assert extended._initialize_local_devices is not original
    assert extended._initialize_local_devices is original


class _Owner:
    kept = 1


def test_what_is_replaced_is_put_back_after_an_exception() -> None:
    one = _Owner()
    with pytest.raises(KeyError), replaced(_Owner, "kept", 2), replaced(one, "kept", 3):
        assert (_Owner.kept, one.kept) == (2, 3)
        raise KeyError
    assert _Owner.kept == 1 and not vars(one), "what an object inherits is inherited again"


def test_replacements_of_one_name_are_left_in_the_opposite_order_of_entering(messages: Messages) -> None:
    first, second = replaced(_Owner, "kept", 2), replaced(_Owner, "kept", 3)
    first.__enter__()
    second.__enter__()
    with messages.raised(RuntimeError):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    _Owner.kept = 1


def test_a_name_that_has_moved_is_not_replaced() -> None:
    with pytest.raises(AttributeError, match="moved"), replaced(_Owner, "moved", 2):
        raise AssertionError
