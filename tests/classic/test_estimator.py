"""tf.estimator.Estimator on the engine: what differs from `runner.Estimator`, and what TF 1 code in it may do.

Acceptance list of tf.estimator's own tests (E estimator_test, M model_fn_test), and where each is asserted:

    E train: steps, max_steps, zero and negative, saves at the end,    test_estimator.py, test_training.py
      relative paths, renamed model_dir, latest_checkpoint,
      loss summary, warm starts, injected arguments, input_fn
      arguments and tuples, labels not taken, listeners
    E constructor: model_dir conflict and '', params, arguments        test_estimator.py, test_model_fn.py
    E warm start from a path, SavedModel, settings                     tests/classic/test_warm_start.py
    E evaluate: eval_dir, scores, global_step, loss, reserved names,   test_estimator.py, test_summaries.py
      older checkpoint, wrong shape, nested metrics, summaries
    E evaluate without a checkpoint                                    below; runner.Estimator refuses it
    E predict: rows, dicts, batches, keys, sizes, checkpoint           tests/estimator/test_estimator.py
    E variables before and after training                              tests/estimator/test_estimator.py
    E hooks: training, chief only, order with NaN                      tests/hooks/test_hooks.py, below
    E export: receivers, assets, signatures                            test_saved_model.py, test_receivers.py
    E complete flow, input context                                     test_training.py, test_estimator.py
    M required fields, loss of [1], names                              tests/test_model_fn.py
    evaluator and ps do not train, config of 2.15, logging             below
"""

from __future__ import annotations

import functools
import glob
import inspect
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow
import tensorflow.compat.v1 as tf

import runner
from runner.classic.estimator import Estimator
from runner.classic.hooks import InMemoryEvaluatorHook, ProfilerHook, make_stop_at_checkpoint_step_hook
from runner.classic.run_config import RunConfig
from runner.classic.training import train_and_evaluate
from tests.support.classic_models import batches, data, dense
from tests.support.messages import Messages

TrainSpec, EvalSpec = tf.estimator.TrainSpec, tf.estimator.EvalSpec


def mirrored() -> Any:
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    """Three steps of `dense`, under two replicas."""
    config = RunConfig(train_distribute=mirrored(), save_summary_steps=1, tf_random_seed=1)
    return Estimator(dense, str(tmp_path_factory.mktemp("trained")), config, None, None).train(batches(), steps=3)  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", [None, mirrored])
def test_a_variable_has_the_attributes_that_it_has_in_a_graph(strategy: Any, tmp_path: Path) -> None:
    seen = []

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        weight = tf.get_variable("s/w", [2], initializer=tf.ones_initializer())
        graph = tf.get_default_graph()
        operation = weight.op
        found = {
            "graphs": {weight.graph, operation.graph, weight.initializer.graph, weight.value().graph} == {graph},
            "op": (operation.name, operation.type, operation.inputs, operation.get_attr("dtype")),
            "outputs": [output.dtype for output in operation.outputs],
            "initializer": isinstance(weight.initializer, tf.Operation),
            "values": [one.shape.as_list() for one in (weight.value(), weight.read_value(), weight.initial_value)],
            "handle": (weight.handle.op.name, weight.handle.name, weight.handle.graph is graph),
            "proto": (weight.to_proto().variable_name, weight.to_proto("s").variable_name, weight.to_proto("other")),
            "by name": (graph.get_tensor_by_name("s/w:0").dtype, graph.get_operation_by_name("s/w").type),
        }
        with weight.graph.as_default(), tf.control_dependencies([weight.initializer, operation, weight]):
            loss = tf.reduce_mean((weight - features) ** 2)
        seen.append(found)
        step = tf.train.get_global_step()

        def update() -> Any:
            # Slots are made eagerly, and found in the graph of a branch.
            return tf.group(tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss), tf.assign_add(step, 1))

        train_op = tf.cond(step >= 0, update, tf.no_op) if strategy is None else update()
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = RunConfig(str(tmp_path), train_distribute=strategy and strategy())
    estimator = Estimator(model_fn, config=config)
    estimator.train(lambda: tf.data.Dataset.from_tensors(([3.0, 3.0], [0.0])).repeat(), steps=2)
    assert estimator.get_variable_value("s/w") == pytest.approx([1.56, 1.56])
    assert estimator.get_variable_value("s/w/Momentum").shape == (2,)
    expected = {
        "graphs": True,
        "op": ("s/w", "VarHandleOp", (), tf.float32),
        "outputs": [tf.resource],
        "initializer": True,
        "values": [[2]] * 3,
        "handle": ("s/w", "s/w:0", True),
        "proto": ("s/w:0", "w:0", None),
        "by name": (tf.resource, "VarHandleOp"),
    }
    assert seen and all(found == expected for found in seen)


def test_a_result_of_evaluate_has_the_types_of_2_15(tmp_path: Path) -> None:
    def typed(features: Any, labels: Any, mode: str) -> Any:
        spec = dense(features, labels, mode)
        count = tf.get_local_variable("count", [], tf.int64, tf.zeros_initializer())
        ops = {
            "float": tf.metrics.mean(tf.cast(labels, tf.float64)),
            "vector": tf.metrics.precision_at_thresholds(labels > 0, tf.sigmoid(labels), [0.3, 0.5]),
            "int": (count.read_value(), count.assign_add(1)),
            "text": (tf.constant("a"), tf.no_op()),
        }
        return spec._replace(eval_metric_ops=ops)

    estimator = Estimator(typed, str(tmp_path))
    found = estimator.train(batches(), steps=1).evaluate(batches(2))
    kinds = {"loss": np.float32, "float": np.float32, "int": np.int64, "global_step": np.int64, "text": bytes}
    assert {name: type(found[name]) for name in kinds} == kinds
    assert (found["vector"].dtype, found["vector"].shape) == (np.float32, (2,))
    # They reach the readers of a run as numbers.
    metrics, _ = train_and_evaluate(estimator, TrainSpec(batches(), max_steps=2), EvalSpec(batches(2)))
    assert type(metrics["loss"]) is np.float32
    events = sorted(glob.glob(f"{estimator.eval_dir()}/events*"))[-1]
    values = [value for event in tf.train.summary_iterator(events) for value in event.summary.value]
    assert {value.tag for value in values if value.HasField("simple_value")} >= {"loss", "float", "int"}


def test_names_in_the_checkpoint_are_those_of_tf_layers(trained: Estimator) -> None:
    assert trained.get_variable_names() == ["dense/bias", "dense/kernel", "global_step", "out/bias", "out/kernel"]


def test_evaluation_is_not_distributed_unless_asked_for(trained: Estimator, tmp_path: Path) -> None:
    seen = []

    class Count(tf.train.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(1)

    result = trained.evaluate(batches(), steps=2, hooks=[Count()])
    assert len(seen) == 2
    labels, values = data()[1][:16], [one["y"] for one in trained.predict(batches(2))]
    np.testing.assert_allclose(result["mae"], np.abs(labels - values).mean(), rtol=1e-5)
    np.testing.assert_allclose(result["loss"], np.square(labels - values).mean(), rtol=1e-5)


def test_config_of_the_engine_is_taken_as_well(tmp_path: Path, messages: Messages) -> None:
    estimator = Estimator(dense, config=runner.RunConfig(model_dir=str(tmp_path), save_checkpoints_steps=2))
    assert estimator.config.save_checkpoints_steps == 2
    with messages.raised(ValueError):
        Estimator(dense, config={"model_dir": "x"})  # type: ignore[arg-type]


def test_model_fn_gets_the_config_it_was_made_with(tmp_path: Path) -> None:
    configs = []

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
        configs.append(config)
        return dense(features, labels, mode)

    config = RunConfig(session_config=tf.ConfigProto(), save_summary_steps=7)
    Estimator(model_fn, str(tmp_path), config).train(batches(), steps=1)
    assert {(one.save_summary_steps, one.task_type, one.model_dir) for one in configs} == {(7, "worker", str(tmp_path))}
    assert configs[0].session_config is config.session_config


def test_arguments_without_effect_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    Estimator(dense, str(tmp_path), RunConfig(session_config=tf.ConfigProto(), protocol="grpc"))
    messages.logged(caplog, "RunConfig(")
    assert "device_fn" not in caplog.text


@pytest.mark.parametrize("kind", ["evaluator", "ps"])
def test_an_evaluator_and_a_parameter_server_do_not_train(kind: str, tmp_path: Path, messages: Messages) -> None:
    cluster = f'"chief": ["a:1"], "{kind}": ["b:2"]'
    config = RunConfig(tf_config=f'{{"cluster": {{{cluster}}}, "task": {{"type": "{kind}", "index": 0}}}}')
    with messages.raised(ValueError):
        Estimator(dense, str(tmp_path), config).train(batches(), steps=1)


def test_a_cluster_without_a_strategy_is_refused(tmp_path: Path, messages: Messages) -> None:
    """tf.estimator trained between graphs there, by its worker processes and servers."""
    cluster = '{"cluster": {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, "task": {"type": "chief", "index": 0}}'
    estimator = Estimator(dense, str(tmp_path), RunConfig(tf_config=cluster))
    with messages.raised(ValueError):
        estimator.train(batches(), steps=1)
    with messages.raised(ValueError):
        RunConfig(train_distribute=object.__new__(tf.distribute.experimental.ParameterServerStrategy))


def test_the_model_fn_is_there_with_its_params(trained: Estimator) -> None:
    with tf.Graph().as_default():
        spec = trained.model_fn({"x": tf.zeros([1, 2])}, tf.zeros([1, 1]), "infer")
    assert set(spec.predictions) == {"y"}


def test_many_estimators_in_a_process_are_no_retracing(
    trained: Estimator, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    for _ in range(6):
        Estimator(dense, trained.model_dir).evaluate(batches(1))
    assert "retracing" not in caplog.text


def test_what_is_logged_has_tf_estimators_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    config = RunConfig(log_step_count_steps=2, save_checkpoints_steps=4)
    logger = tf.get_logger()
    before, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.INFO, logger="tensorflow"):
            estimator = Estimator(dense, str(tmp_path), config)
            estimator.train(batches(), steps=4)
            estimator.evaluate(batches(2))
    finally:
        logger.propagate = before
    lines = [record.getMessage() for record in caplog.records if record.name == "tensorflow"]
    starts = [line.split()[0] for line in lines]
    assert starts == ["loss", "global_step/sec:", "loss", "global_step/sec:", "loss", "Saving", "Loss", "Saving"]
    for line in lines:
        messages.same("INFO", line, hide=r"(?<=/sec: ).*|\d+\.\d+(e-\d+)?")


# --- operators of TF 1 ------------------------------------------------------------------------------------------


def test_an_empty_input_is_a_warning_as_in_tf_estimator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    estimator = Estimator(dense, str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        estimator.train(lambda: batches()().take(0))
    assert "Training with estimator made no steps." in caplog.text
    assert estimator.train(batches(), steps=2).get_variable_value("global_step") == 2


def test_tensors_and_variables_can_be_keys_as_in_a_graph(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = dense(features, labels, mode)
        variables = tf.trainable_variables()
        biases = [one for one in variables if one.name.endswith("bias:0")]
        kernels = [one for one in variables if one not in biases]
        names = {one: one.name for one in variables}
        assert [names[one] for one in kernels] == ["dense/kernel:0", "out/kernel:0"]
        assert {spec.loss: 1}[spec.loss] == 1 and (spec.loss == spec.loss) is True
        groups = [(0.1, kernels), (0.2, biases)]
        optimizers = [tf.train.GradientDescentOptimizer(rate) for rate, _ in groups]
        steps = [o.minimize(spec.loss, var_list=g[1]) for o, g in zip(optimizers, groups, strict=True)]
        counted = tf.assign_add(tf.train.get_global_step(), 1)
        return spec._replace(train_op=tf.group(*steps, counted))

    for strategy in (None, mirrored()):
        config = RunConfig(train_distribute=strategy)
        folder = tmp_path / ("alone" if strategy is None else "mirrored")
        estimator = Estimator(model_fn, str(folder), config).train(batches(), steps=2)
        assert estimator.get_variable_value("global_step") == 2
    equal = tf.constant([1, 2]) == tf.constant([1, 3])
    assert equal.numpy().tolist() == [True, False]  # outside of model_fn nothing has changed


def test_dimensions_have_a_value_after_disable_v2_behavior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.classic.compat import install

    monkeypatch.setattr(install, "called", set())
    widths = []

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        widths.append(getattr(features["x"].shape[1], "value", None))
        return dense(features, labels, mode)

    Estimator(model_fn, str(tmp_path / "a")).train(batches(), steps=1)
    tf.disable_v2_behavior()
    Estimator(model_fn, str(tmp_path / "b")).train(batches(), steps=1)
    assert widths == [None, 2]
    assert tf.constant([1]).shape[0] == 1 and isinstance(tf.constant([1]).shape[0], int)


def test_a_partial_keeps_what_it_has_bound(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        assert params == {"mine": 3}
        return dense(features, labels, mode)

    Estimator(functools.partial(model_fn, params={"mine": 3}), str(tmp_path)).train(batches(), steps=1)


def test_an_optimizer_of_ones_own_finds_its_state_in_the_graph(tmp_path: Path) -> None:
    """As published ones do: with the graph as key, since nothing is executed eagerly in model_fn."""

    class Fading(tf.train.Optimizer):
        def __init__(self) -> None:
            super().__init__(use_locking=False, name="Fading")

        def _create_slots(self, var_list: Any) -> None:
            self._create_non_slot_variable(0.1, "rate", var_list[0])

        def _rate(self) -> Any:
            graph = None if tf.executing_eagerly() else tf.get_default_graph()
            return self._get_non_slot_variable("rate", graph)

        def _resource_apply_dense(self, grad: Any, handle: Any) -> Any:
            return handle.assign_sub(grad * self._rate())

        def _finish(self, update_ops: Any, name_scope: str) -> Any:
            with tf.control_dependencies(update_ops):
                return tf.group(*update_ops, self._rate().assign(self._rate() / 2), name=name_scope)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = dense(features, labels, mode)
        return spec._replace(train_op=Fading().minimize(spec.loss, tf.train.get_global_step()))

    for name, strategy in {"alone": None, "mirrored": mirrored()}.items():
        estimator = Estimator(model_fn, str(tmp_path / name), RunConfig(train_distribute=strategy))
        assert estimator.train(batches(), steps=3).get_variable_value("rate") == pytest.approx(0.0125)


def test_operations_without_a_name_have_those_of_a_graph_of_tf1(tmp_path: Path) -> None:
    names = []

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        names.append([(features["x"] + 1.0).name, tf.zeros([2]).name, (features["x"] * 2.0).name])
        return dense(features, labels, mode)

    estimator = Estimator(model_fn, str(tmp_path)).train(batches(), steps=1)
    estimator.evaluate(batches(1))
    list(estimator.predict(batches(1)))
    assert names == [["add:0", "zeros:0", "mul:0"]] * 3


# --- hooks ------------------------------------------------------------------------------------------------------


class Fetch(tf.train.SessionRunHook):
    """Fetches by names, as people do who did not write the model."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs({"hidden": "dense/BiasAdd:0"})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.shapes.append(run_values.results["hidden"].shape)


def test_hooks_fetch_the_tensors_of_layers_by_name(tmp_path: Path) -> None:
    for strategy in (None, mirrored()):
        hook = Fetch()
        folder = tmp_path / ("alone" if strategy is None else "mirrored")
        Estimator(dense, str(folder), RunConfig(train_distribute=strategy)).train(batches(), hooks=[hook], steps=2)
        assert hook.shapes == [(8, 4), (8, 4)]  # under a strategy, the first replica's


def test_hooks_that_only_look_at_the_ends_keep_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    class Twice(tf.train.SessionRunHook):
        def begin(self) -> None:
            self.twice = tf.train.get_global_step() * 2

        def end(self, session: Any) -> None:
            self.value = session.run(self.twice)

    hook = Twice()
    final = tf.train.FinalOpsHook([])
    waiter = tf.train.GlobalStepWaiterHook(10)  # it would wait for ever for others
    Estimator(dense, str(tmp_path)).train(batches(), hooks=[hook, final, waiter], steps=3)
    assert hook.value == 6 and final.final_ops_values == []
    assert "loop" not in caplog.text
    messages.logged(caplog, "GlobalStepWaiterHook")


def test_a_script_may_call_it_in_a_graph_of_its_own(tmp_path: Path) -> None:
    outside = Estimator(dense, str(tmp_path / "outside"), RunConfig(tf_random_seed=1))
    expected = outside.train(batches(), steps=3).evaluate(batches(2))
    rows = [float(row["y"][0]) for row in outside.predict(batches(2))]
    with tensorflow.Graph().as_default() as graph:
        inside = Estimator(dense, str(tmp_path / "inside"), RunConfig(tf_random_seed=1))
        assert inside.train(batches(), steps=3).evaluate(batches(2)) == expected
        predictions = inside.predict(batches(2))
        found = [float(next(predictions)["y"][0])]
        assert tensorflow.constant(1).graph is graph  # between predictions, too
        assert found + [float(row["y"][0]) for row in predictions] == rows
        train = TrainSpec(batches(), max_steps=4)
        assert train_and_evaluate(inside, train, EvalSpec(batches(2)))[0]["global_step"] == 4
        assert inside.get_variable_value("global_step") == 4
    assert graph.get_operations()[0].type == "Const" and len(graph.get_operations()) == 1


def test_a_seed_that_a_script_gives_keras_2_does_not_tell_models_of_a_process_apart(tmp_path: Path) -> None:
    def trained(name: str) -> dict[str, Any]:
        estimator = Estimator(dense, str(tmp_path / name), RunConfig(tf_random_seed=1))
        return estimator.train(batches(), steps=3).evaluate(batches(2))

    expected = trained("before")
    keras_2 = pytest.importorskip("tf_keras")
    try:
        keras_2.utils.set_random_seed(3)
        generator = keras_2.src.backend._SEED_GENERATOR.generator
        state = generator.getstate()
        assert [trained("after"), trained("again")] == [expected, expected]
        assert keras_2.src.backend._SEED_GENERATOR.generator is generator and generator.getstate() == state
    finally:
        keras_2.src.backend._SEED_GENERATOR.generator = None


def test_profiler_hook_profiles_each_nth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    calls = []
    profiler = tensorflow.profiler.experimental
    monkeypatch.setattr(profiler, "start", lambda folder: calls.append(folder))
    monkeypatch.setattr(profiler, "stop", lambda: calls.append("stop"))
    hook = tf.train.ProfilerHook(save_steps=2, output_dir="there")
    assert isinstance(hook, ProfilerHook)
    Estimator(dense, str(tmp_path)).train(batches(), hooks=[hook], steps=5)
    assert calls == ["there", "stop", "there", "stop"]
    with messages.raised(ValueError):
        ProfilerHook()


def test_a_profiler_hook_of_a_graph_writes_timelines_in_its_session(tmp_path: Path) -> None:
    """TensorFlow 2.15: the same steps."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step().assign_add(1)
        hook = tf.estimator.ProfilerHook(save_steps=2, output_dir=str(tmp_path))
        with tf.train.SingularMonitoredSession(hooks=[hook]) as session:
            written = [(session.run(step), len(list(tmp_path.glob("timeline-*"))))[1] for _ in range(5)]
    assert written == [0, 1, 1, 2, 2]


def test_in_memory_evaluator_works_under_a_strategy(tmp_path: Path, messages: Messages) -> None:
    """Under Mirrored tf.estimator's failed (tensorflow issue 23525)."""
    estimator = Estimator(dense, str(tmp_path), RunConfig(train_distribute=mirrored()))
    hook = InMemoryEvaluatorHook(estimator, batches(2), name="here", every_n_iter=2)
    estimator.train(batches(), hooks=[hook], steps=5)
    assert evaluated(estimator.eval_dir("here"), "mae") == [0, 2, 4, 5]
    assert len(glob.glob(f"{estimator.eval_dir('here')}/events*")) == 1
    estimator.train(batches(), hooks=[hook], steps=2)
    assert evaluated(estimator.eval_dir("here"), "mae") == [0, 2, 4, 5, 5, 6, 7]
    with messages.raised(ValueError):
        InMemoryEvaluatorHook(estimator, batches(2), every_n_iter=0)


def test_a_hook_stops_at_the_step_of_a_checkpoint(tmp_path: Path) -> None:
    estimator = Estimator(dense, str(tmp_path))
    estimator.train(batches(), hooks=[make_stop_at_checkpoint_step_hook(estimator, 3)])
    assert estimator.get_variable_value("global_step") == 3


def test_user_hooks_see_the_nan_before_training_ends(tmp_path: Path) -> None:
    class Losses(tf.train.SessionRunHook):
        values: list[Any] = []  # noqa: RUF012

        def before_run(self, run_context: Any) -> Any:
            return tf.train.SessionRunArgs(tf.losses.get_total_loss())

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.values.append(run_values.results)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = dense(features, labels, mode)
        tf.losses.add_loss(0.0 * tf.log(2.0 - tf.cast(tf.train.get_global_step(), tf.float32)))
        return spec._replace(loss=tf.losses.get_total_loss())

    with pytest.raises(tf.train.NanLossDuringTrainingError):
        Estimator(model_fn, str(tmp_path)).train(batches(), hooks=[Losses()], steps=5)
    assert np.isfinite(Losses.values[0]) and not np.isfinite(Losses.values[-1])


def test_initializers_of_variables_may_be_in_a_scaffold(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = dense(features, labels, mode)
        init = tf.group(tf.local_variables_initializer(), tf.tables_initializer())
        scaffold = tf.train.Scaffold(
            init_op=tf.global_variables_initializer(), local_init_op=init, saver=tf.train.Saver(max_to_keep=2)
        )
        return spec._replace(scaffold=scaffold)

    assert Estimator(model_fn, str(tmp_path)).train(batches(), steps=1).get_variable_value("global_step") == 1


def evaluated(folder: str, tag: str) -> list[int]:
    """The global steps at which an evaluation has noted `tag`."""
    events = [event for path in sorted(glob.glob(os.path.join(folder, "events*")))
              for event in tf.train.summary_iterator(path)]  # fmt: skip
    return sorted(event.step for event in events for value in event.summary.value if value.tag == tag)


def test_gradients_that_an_optimizer_takes_in_a_loop_are_those_of_2_15(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        w = tf.get_variable("w", [1, 1], initializer=tf.ones_initializer())
        losses = tf.reshape(tf.square(tf.matmul(features, w) - labels), [4, 2])
        optimizer = tf.train.GradientDescentOptimizer(0.1)

        def add(number: tf.Tensor, total: tf.Tensor) -> Any:
            ((gradient, _),) = optimizer.compute_gradients(tf.reduce_mean(losses[number]), [w])
            return number + 1, total + gradient

        _, total = tf.while_loop(lambda number, _: number < 4, add, [tf.constant(0), tf.zeros([1, 1])])
        train_op = optimizer.apply_gradients([(total / 4, w)], tf.train.get_global_step())
        metrics = {"gradient": tf.metrics.mean(total)}
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(losses), train_op=train_op, eval_metric_ops=metrics)

    x = np.array([[1.0], [2.0], [3.0], [4.0]] * 2, np.float32)
    estimator = Estimator(model_fn, str(tmp_path))
    estimator.train(lambda: tf.data.Dataset.from_tensors((x, 3 * x)), steps=1)
    assert estimator.get_variable_value("w").tolist() == [[4.0]]
    assert estimator.evaluate(lambda: tf.data.Dataset.from_tensors((x, 3 * x)))["gradient"] == 60.0


def test_a_library_may_replace_the_model_fn(tmp_path: Path) -> None:
    """As neural-structured-learning does, which adds a loss to that of any Estimator and calls the one that was there
    twice."""
    numbers = {"x": np.zeros([4, 1], np.float32)}, np.ones([4, 1], np.float32)
    column = tf.feature_column.numeric_column("x")
    make = functools.partial(tf.train.GradientDescentOptimizer, 1 / 16)
    estimator: Any = tf.estimator.LinearRegressor([column], model_dir=str(tmp_path), optimizer=make)

    def bias_after_a_step() -> Any:
        estimator.train(lambda: tf.data.Dataset.from_tensors(numbers), steps=1)
        return estimator.get_variable_value("linear/linear_model/bias_weights").tolist()

    assert bias_after_a_step() == [0.5]
    inner = estimator._model_fn
    assert "config" in inspect.signature(inner).parameters

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
            spec = inner(features, labels, mode, config=config)
            if mode != tf.estimator.ModeKeys.TRAIN:
                return spec
            loss = spec.loss + inner(features, labels, mode, config=config).loss
        return spec._replace(loss=loss, train_op=make().minimize(loss, tf.train.get_global_step()))

    estimator._model_fn = model_fn
    assert bias_after_a_step() == [1.0]  # 0.75 with the loss that was there
    assert estimator.evaluate(lambda: tf.data.Dataset.from_tensors(numbers))["loss"] == 0.0
    assert estimator.get_variable_value("global_step") == 2


def weighted(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """A weight that begins at random or at params["start"], and a Scaffold that may change it."""
    start = params.get("start")
    initial = tf.random_uniform_initializer() if start is None else tf.constant_initializer(start)
    weight = tf.get_variable("w", [], initializer=initial)
    scaffold = None
    if params.get("loads"):
        scaffold = tf.train.Scaffold(init_fn=lambda scaffold, session: weight.load(7.0, session))
    predictions = {"y": weight * features}
    if mode == "infer":
        return tf.estimator.EstimatorSpec(mode, predictions=predictions, scaffold=scaffold)
    loss = tf.reduce_mean((weight * features - labels) ** 2)
    step = tf.train.get_or_create_global_step()
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    metrics = {"w": tf.metrics.mean(weight)}
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, eval_metric_ops=metrics, predictions=predictions, scaffold=scaffold
    )


def ones() -> Any:
    return tf.data.Dataset.from_tensors(([1.0], [0.0])).repeat(2)


def test_without_a_checkpoint_initial_values_are_evaluated_and_predicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(tf_random_seed=3)
    model = Estimator(weighted, str(tmp_path / "a"), config, {})
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        before = model.evaluate(ones)
    assert before["global_step"] == 0 and before["loss"] == pytest.approx(before["w"] ** 2)
    assert [found["y"] for found in model.predict(ones)] == [before["w"]] * 2
    assert "running initialization to evaluate" in caplog.text
    assert model.evaluate(ones) == before and model.latest_checkpoint() is None
    model.train(ones, steps=2)
    other = Estimator(weighted, str(tmp_path / "b"), config, {}).train(ones, steps=2)
    assert model.get_variable_value("w") == other.get_variable_value("w") == pytest.approx(before["w"] * 0.64)
    assert model.evaluate(ones)["w"] == model.get_variable_value("w")


def test_initial_values_are_those_of_a_warm_start_and_of_a_scaffold(tmp_path: Path) -> None:
    first = Estimator(weighted, str(tmp_path / "first"), None, {"start": 5.0}).train(ones, steps=1)
    warm = Estimator(weighted, str(tmp_path / "warm"), None, {"start": 2.0}, warm_start_from=first.model_dir)
    assert warm.evaluate(ones)["w"] == first.get_variable_value("w") == 4.0
    loading = Estimator(weighted, str(tmp_path / "loading"), None, {"start": 2.0, "loads": True})
    assert loading.evaluate(ones)["w"] == 7.0
    assert [found["y"] for found in loading.predict(ones)] == [7.0, 7.0]


def test_initial_values_under_a_strategy_are_those_of_one_device(tmp_path: Path) -> None:
    config = RunConfig(train_distribute=mirrored(), eval_distribute=mirrored())
    model = Estimator(weighted, str(tmp_path), config, {"start": 2.0})
    assert model.evaluate(ones)["w"] == 2.0 and model.evaluate(ones)["loss"] == 4.0
