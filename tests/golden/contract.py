"""Calls of tf.estimator's classes, right and wrong ones, and what each comes to: a value or the type of an exception.

With TensorFlow 2.15 it is a program: `python -m tests.golden.contract NAME ...` prints name -> call -> result of these
tables, as JSON.
On the runner, `import runner.classic` comes first. tests/classic/test_contract.py holds the results of 2.15.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf
from tensorflow.python.saved_model.model_utils import export_output  # noqa: F401  # as well

est = tf.estimator
Spec, export = est.EstimatorSpec, est.export
tpu = est.tpu
numpy_input = est.inputs.numpy_input_fn
TRAIN, EVAL, PREDICT = est.ModeKeys.TRAIN, est.ModeKeys.EVAL, est.ModeKeys.PREDICT
Hook, Listener = tf.train.SessionRunHook, tf.train.CheckpointSaverListener


# --- what the calls are made of ---------------------------------------------------------------------------------------


def c(*values: float) -> Any:
    """A constant: a scalar, or a vector of several numbers."""
    return tf.constant(values[0] if len(values) == 1 else values)


def shaped(*shape: int | None) -> Any:
    return tf.placeholder(tf.float32, shape)


def elsewhere() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0)


def train(**fields: Any) -> Any:
    return Spec(TRAIN, **{"loss": c(1.0), "train_op": tf.no_op(), **fields})


def evaluated(**fields: Any) -> Any:
    return Spec(EVAL, **{"loss": c(1.0), **fields})


def predicted(**fields: Any) -> Any:
    return Spec(PREDICT, **{"predictions": {"a": c(1.0, 2.0)}, **fields})


def metric(*values: float) -> Any:
    try:
        from tf_keras.metrics import Mean  # what tf.keras was
    except ImportError:
        Mean = tf.keras.metrics.Mean
    found = Mean()
    for value in values:
        found.update_state(value)
    return found


def outputs(*names: str) -> dict[str, Any]:
    return {name: export.PredictOutput(c(1.0)) for name in names}


def in_tf_config(tree: Any, read: Callable[[Any], Any] | None = None, **arguments: Any) -> Any:
    """A RunConfig where TF_CONFIG is `tree`."""
    before, os.environ["TF_CONFIG"] = os.environ.get("TF_CONFIG"), json.dumps(tree)
    try:
        return est.RunConfig(**arguments)
    finally:
        del os.environ["TF_CONFIG"]
        if before is not None:
            os.environ["TF_CONFIG"] = before


def rows(count: int, columns: int = 1) -> Any:
    return tf.ones([count, columns])


def both() -> Any:
    return est.MultiHead([est.RegressionHead(name="a"), est.RegressionHead(name="b")])


def headed(mode: Any, **given: Any) -> Any:
    """What a head makes of two rows."""
    return est.BinaryClassHead().create_estimator_spec(
        **{"features": {"x": rows(2)}, "mode": mode, "logits": rows(2), "labels": rows(2), **given}
    )


CLUSTER = {"chief": ["h0:9"], "ps": ["h1:1", "h2:2"], "worker": ["h3:3", "h4:4", "h5:5"]}


def task(kind: str, index: Any, cluster: Any = CLUSTER, **others: Any) -> Any:
    return in_tf_config({"cluster": cluster, "task": {"type": kind, "index": index}, **others})


def place(config: Any) -> Any:
    return [
        config.task_type, config.task_id, config.is_chief, config.num_worker_replicas, config.num_ps_replicas,
        config.global_id_in_cluster, config.master, config.evaluation_master, sorted(config.cluster_spec.as_dict()),
    ]  # fmt: skip


def linear(features: Any, labels: Any, mode: str, params: Any) -> Any:
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    if mode == PREDICT:
        return Spec(mode, predictions={"y": w * features})
    loss = tf.reduce_mean(tf.square(w * features - labels))
    step = tf.train.get_or_create_global_step()
    return Spec(mode, loss=loss, train_op=tf.train.GradientDescentOptimizer(0.1).minimize(loss, step))


def data() -> Any:
    return tf.data.Dataset.from_tensors(([1.0, 2.0], [2.0, 4.0])).repeat(3)


def made(model_fn: Any = linear, *args: Any, **kwargs: Any) -> Any:
    return est.Estimator(model_fn, *args, **kwargs)


def of(model_fn: Callable[..., Any]) -> Any:
    """An Estimator of `model_fn(mode)`."""
    return est.Estimator(lambda features, labels, mode: model_fn(mode))


@functools.cache
def trained() -> Any:
    return made(linear, tempfile.mkdtemp(), params={}).train(data, steps=1)


def of_variable(read: Callable[[Any, Any], Any]) -> Any:
    """What a model_fn reads of its variable `s/w` and its graph."""
    found = []

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        variable = tf.get_variable("s/w", [2], initializer=tf.ones_initializer())
        found.append(read(variable, tf.get_default_graph()))
        step = tf.assign_add(tf.train.get_global_step(), 1)
        return Spec(mode, loss=tf.reduce_sum(variable), train_op=step)

    made(model_fn).train(data, steps=1)
    return found[-1]


def keras_2() -> Any:
    try:
        import tf_keras  # on the runner, where tf.keras may be Keras 3 by now
    except ImportError:
        return tensorflow.keras
    return tf_keras


def own_optimizer(update: Callable[[Any, Any, Any, Any], Any], steps: int = 3, rate: Any = 0.1) -> Any:
    """What is in the checkpoint of a model that an own subclass of Keras 2's optimizer trains: name -> numbers.

    Its `iterations` are the global step, and its update depends on them.
    """
    legacy = keras_2().optimizers.legacy

    class Fading(legacy.Optimizer):  # type: ignore[name-defined]
        def __init__(self, name: str = "Fading") -> None:
            super().__init__(name)
            self._set_hyper("learning_rate", rate)
            self._set_hyper("momentum", 0.5)

        def _create_slots(self, var_list: Any) -> None:
            for variable in var_list:
                self.add_slot(variable, "velocity")
            for variable in var_list:
                self.add_slot(variable, "largest", "ones")

        def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
            rate = self._decayed_lr(var.dtype.base_dtype)
            fading = 1.0 / (1.0 + tf.cast(self.iterations, var.dtype))
            velocity = self.get_slot(var, "velocity")
            moved = velocity.assign(self._get_hyper("momentum", var.dtype) * velocity + grad)
            largest = self.get_slot(var, "largest")
            seen = largest.assign(tf.maximum(largest, tf.abs(grad)))
            return tf.group(var.assign_sub(rate * fading * moved / seen), moved, seen)

        def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any, apply_state: Any = None) -> Any:
            whole = tf.scatter_nd(indices[:, None], grad, var.shape)
            return self._resource_apply_dense(whole, var)

        def get_config(self) -> Any:
            return {**super().get_config(), "learning_rate": self._serialize_hyperparameter("learning_rate")}

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        weight = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        table = tf.get_variable("table", [3, 2], initializer=tf.ones_initializer())
        rows = tf.gather(table, [0, 2])
        loss = tf.reduce_mean(tf.square(weight * features - labels)) + tf.reduce_sum(rows * rows)
        if mode != TRAIN:
            return Spec(mode, loss=loss)
        optimizer = Fading()
        optimizer.iterations = tf.train.get_or_create_global_step()
        train_op = update(optimizer, loss, [weight, table], optimizer.iterations)
        return Spec(mode, loss=loss, train_op=train_op)

    estimator = made(model_fn).train(data, steps=steps)
    names = sorted(estimator.get_variable_names())
    values = {name: np.asarray(estimator.get_variable_value(name), np.float64).round(5).tolist() for name in names}
    return [values, round(float(estimator.evaluate(data)["loss"]), 4)]


def never_saves() -> Any:
    return made(config=est.RunConfig(save_checkpoints_steps=None, save_checkpoints_secs=None))


def subclass(name: str) -> Any:
    return type("Own", (est.Estimator,), {name: lambda self, *args, **kwargs: None})(linear)


def SERVING() -> Any:
    x = tf.placeholder(tf.float32, [None])
    return export.TensorServingInputReceiver(x, x)


# --- clusters, inputs, exports ----------------------------------------------------------------------------------------

PORT0 = {**CLUSTER, "chief": ["h0:0"]}
MASTER = {"master": ["h0:0"], "ps": ["h1:1", "h2:2"], "worker": ["h3:3", "h4:4", "h5:5"]}
TYPES = {**PORT0, "other": ["h3:1", "h4:2"]}


def owned(**values: Any) -> Any:
    """A user's RunConfig, whose properties have these values."""
    own = {name: property(functools.partial(lambda value, self: value, value)) for name, value in values.items()}
    return type("OwnConfig", (est.RunConfig,), own)


def session(config: Any) -> Any:
    found = config.session_config
    rewrite = found and found.graph_options.rewrite_options
    return found and [found.allow_soft_placement, list(found.device_filters), rewrite.meta_optimizer_iterations]


def one(tensor: Any) -> Any:
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
    return [type(tensor).__name__.replace("SymbolicTensor", "Tensor"), tensor.dtype.name, shape]


def structure(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): structure(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [structure(item) for item in value]
    return value if value is None or isinstance(value, int | float | str) else one(value)


def spec(mode: str, **fields: Any) -> Any:
    step = tf.assign_add(tf.train.get_or_create_global_step(), 1)
    return Spec(mode, **{"predictions": {"y": c(1.0, 2.0)}, "loss": c(1.0), "train_op": step, **fields})


def gets(input_fn: Callable[[], Any], mode: str = "train") -> Any:
    """The features and labels that model_fn gets of `input_fn`, with the types of tensors for them."""
    seen = []

    def own(features: Any, labels: Any, mode: str) -> Any:
        seen.append([structure(features), structure(labels), mode])
        return spec(mode)

    estimator = made(own).train(input_fn, steps=1)
    if mode == "eval":
        estimator.evaluate(input_fn, steps=1)
    if mode == "infer":
        next(estimator.predict(input_fn))
    return seen[-1]


def plain(**fields: Any) -> Any:
    """A model_fn with a variable w = 1 that nothing needs."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        tf.get_variable("w", [], initializer=tf.ones_initializer())
        return spec(mode, **{name: make() for name, make in fields.items()})

    return model_fn


def fitted(**fields: Any) -> Any:
    return made(plain(**fields)).train(data, steps=1)


def warm(source: Any) -> float:
    """The value of w, which begins with 0, in a model that starts from `source`."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        tf.get_variable("w", [], initializer=tf.zeros_initializer())
        return spec(mode)

    return float(made(model_fn, warm_start_from=source).train(data, steps=1).get_variable_value("w"))


def serving() -> Any:
    x = tf.placeholder(tf.float32, [None], "request")
    return export.ServingInputReceiver({"x": x}, x)


def super_receiver() -> Any:
    return est.experimental.build_raw_supervised_input_receiver_fn({"x": shaped(None)}, shaped(None))


def mode_all(estimator: Any, modes: Any = (TRAIN, EVAL, PREDICT), base: Any = "out") -> Any:
    fns = {mode: serving if mode == PREDICT else super_receiver() for mode in modes}
    return estimator.experimental_export_all_saved_models(base, fns)


def signatures(path: bytes, tag: str = "serve") -> Any:
    with tf.Graph().as_default(), tf.Session() as session:
        found = tf.saved_model.loader.load(session, [tag], tf.compat.as_text(path)).signature_def
    return {
        name: [sorted(one.inputs), sorted(one.outputs), one.method_name.split("/", 1)[1]] for name, one in found.items()
    }


def files(path: bytes) -> list[str]:
    at = tf.compat.as_text(path)
    return sorted(os.path.relpath(os.path.join(one, name), at) for one, _, names in os.walk(at) for name in names)


def exported(exporter: Any, *results: Any, names: Any = ()) -> Any:
    """What an exporter returns for these results of a stand-in, and which of the folders `names` remain."""
    for name in ("", *names):
        os.makedirs(os.path.join("base", name))
    stand_in = mock.Mock(spec=est.Estimator, model_dir=os.getcwd())
    stand_in.export_saved_model.return_value = "p"
    returned = []
    for result, is_final in (one if isinstance(one, tuple) else (one, False) for one in results):
        checkpoint = None if result is None else "no/checkpoint"
        returned.append(exporter.export(stand_in, "base", checkpoint, result, is_final))
    return [returned, sorted(os.listdir("base")), stand_in.export_saved_model.call_count]


class Labeled:
    """A tensor with labels, which TensorFlow converts."""

    def __init__(self, value: Any) -> None:
        self.tensor = value


tf.register_tensor_conversion_function(Labeled, lambda value, dtype=None, name=None, as_ref=False: value.tensor)


def described(receiver: Any) -> Any:
    def of(part: Any) -> Any:
        return {repr(key): one(value) for key, value in part.items()} if isinstance(part, dict) else one(part)

    return [type(receiver).__name__, *(None if part is None else of(part) for part in receiver)]


def raw(features: Any, size: Any = None, fn: Any = None) -> Any:
    return described((fn or export.build_raw_serving_input_receiver_fn)(features, size)())


def supervised(features: Any, labels: Any, size: Any = None) -> Any:
    return described(est.experimental.build_raw_supervised_input_receiver_fn(features, labels, size)())


def names_of(receiver: Any) -> list[str]:
    return sorted(tensor.name for tensor in receiver.receiver_tensors.values())


# --- the tables -------------------------------------------------------------------------------------------------------

SPEC = """
Spec._fields => ["mode", "predictions", "loss", "train_op", "eval_metric_ops", "export_outputs", "training_chief_hooks", "training_hooks", "scaffold", "evaluation_hooks", "prediction_hooks"]
isinstance(train(), tuple) => true
len(train()) => 11
list(train()._asdict()) == list(Spec._fields) => true
[type(one).__name__ for one in train()[4:]] => ["dict", "NoneType", "tuple", "tuple", "Scaffold", "tuple", "tuple"]
[type(one).__name__ for one in evaluated()[3:]] => ["NoneType", "dict", "NoneType", "tuple", "tuple", "Scaffold", "tuple", "tuple"]
[type(one).__name__ for one in predicted()[2:]] => ["NoneType", "NoneType", "dict", "dict", "tuple", "tuple", "Scaffold", "tuple", "tuple"]
(lambda mode, predictions, loss, *others: mode)(*evaluated()) => "eval"
evaluated() == evaluated() => false
Spec(None).mode => null
Spec("other").mode => "other"
Spec(None, loss=c(1.0)).predictions => {}
Spec(mode=TRAIN) => raises ValueError
Spec() => raises TypeError
Spec(TRAIN, c(1.0), c(2.0), tf.no_op())[0] => "train"
Spec(TRAIN, nothing=1) => raises TypeError
Spec(TRAIN, train_op=tf.no_op()) => raises ValueError
Spec(TRAIN, loss=c(1.0)) => raises ValueError
Spec(EVAL, predictions=c(1.0)) => raises ValueError
Spec(PREDICT) => raises ValueError
Spec(PREDICT, loss=c(1.0)) => raises ValueError
train(train_op=lambda: None) => raises TypeError
train(train_op="name") => raises TypeError
train(train_op=0) => raises TypeError
train(train_op=1.0) => raises TypeError
train(train_op=[tf.no_op()]) => raises TypeError
train(train_op=c(1.0)).train_op.shape.rank => 0
evaluated(train_op="name") => raises TypeError
predicted(train_op=lambda: None) => raises TypeError
train(train_op=elsewhere().op) => raises ValueError
train(train_op=elsewhere()) => raises ValueError
train(loss=1.0) => raises TypeError
train(loss="loss") => raises TypeError
train(loss=[c(1.0)]) => raises TypeError
train(loss=c(1.0, 2.0)) => raises ValueError
train(loss=shaped(2, 3)) => raises ValueError
train(loss=tf.constant([1.0])).loss.shape.rank => 0
train(loss=tf.constant([[1.0]])).loss.shape.rank => 0
train(loss=shaped(None)).loss.shape.rank => 0
train(loss=shaped(None, 1)).loss.shape.rank => 0
train(loss=tf.placeholder(tf.float32)).loss.shape.rank => null
train(loss=tf.constant(1)).loss.dtype.name => "int32"
train(loss=tf.get_variable("v", [])).loss.shape.rank => 0
train(loss=elsewhere()) => raises ValueError
evaluated(loss=c(1.0, 2.0)) => raises ValueError
evaluated(loss=elsewhere()) => raises ValueError
predicted(loss=c(1.0, 2.0)) => raises ValueError
predicted(loss=tf.constant([1.0])).loss.shape.rank => 0
predicted(loss=1.0) => raises TypeError
train().predictions => {}
train(predictions=1.0) => raises TypeError
train(predictions=c(1.0)).predictions.shape.rank => 0
evaluated(predictions={"a": 1.0}) => raises TypeError
evaluated(predictions=[c(1.0)]) => raises TypeError
predicted(predictions=tf.SparseTensor([[0]], [1.0], [1])) => raises TypeError
predicted(predictions={"a": tf.SparseTensor([[0]], [1.0], [1])}) => raises TypeError
predicted(predictions=(c(1.0),)) => raises TypeError
predicted(predictions={"a": c(1.0), "b": None}) => raises TypeError
predicted(predictions={"a": elsewhere()}) => raises ValueError
predicted(predictions=elsewhere()) => raises ValueError
predicted(predictions=tf.get_variable("v", [])).predictions.shape.rank => raises ValueError
train(predictions=elsewhere()) => raises ValueError
predicted(predictions={}).predictions => {}
list(predicted().export_outputs) => ["serving_default"]
type(predicted().export_outputs["serving_default"]).__name__ => "PredictOutput"
list(predicted().export_outputs["serving_default"].outputs) => ["a"]
list(predicted(predictions=c(1.0)).export_outputs["serving_default"].outputs) => ["output"]
sorted(predicted(export_outputs=outputs("a")).export_outputs) => ["a", "serving_default"]
predicted(export_outputs={}) => ["infer", {"a": "SymbolicTensor"}, null, null, {}, {}, [], [], "Scaffold", [], []]
sorted(predicted(export_outputs=outputs("a", "serving_default")).export_outputs) => ["a", "serving_default"]
predicted(export_outputs=outputs("a", "b")) => raises ValueError
predicted(export_outputs=[export.PredictOutput(c(1.0))]) => raises TypeError
predicted(export_outputs={"a": c(1.0)}) => raises TypeError
predicted(export_outputs={"a": {"b": c(1.0)}}) => raises TypeError
evaluated(export_outputs={"a": 1}).export_outputs => {"a": 1}
evaluated(export_outputs=7).export_outputs => 7
train().export_outputs => null
evaluated().export_outputs => null
train(export_outputs={}).export_outputs => {}
predicted(predictions={1: c(1.0)}) => raises ValueError
evaluated().eval_metric_ops => {}
evaluated(eval_metric_ops={}).eval_metric_ops => {}
evaluated(eval_metric_ops=[]) => raises TypeError
evaluated(eval_metric_ops=(c(1.0), c(1.0))) => raises TypeError
evaluated(eval_metric_ops={"a": (c(1.0), tf.no_op())}).eval_metric_ops["a"][0].shape.rank => 0
evaluated(eval_metric_ops={"a": (c(1.0), c(1.0), c(1.0))}) => raises TypeError
evaluated(eval_metric_ops={"a": [c(1.0), c(1.0)]}) => raises TypeError
evaluated(eval_metric_ops={"a": c(1.0)}) => raises TypeError
evaluated(eval_metric_ops={"a": c(1.0, 2.0)}) => raises TypeError
evaluated(eval_metric_ops={"a": 1.0}) => raises TypeError
evaluated(eval_metric_ops={"a": "a"}) => raises TypeError
evaluated(eval_metric_ops={"a": (elsewhere(), c(1.0))}) => raises ValueError
evaluated(eval_metric_ops={"a": (c(1.0), elsewhere())}) => raises ValueError
evaluated(eval_metric_ops={"a": ((c(1.0), c(2.0)), tf.no_op())}).eval_metric_ops["a"][0][1].shape.rank => 0
evaluated(eval_metric_ops={"a": (1.0, 2.0)}) => raises AttributeError
evaluated(eval_metric_ops={"a": tf.keras.metrics.Mean}) => raises TypeError
evaluated(eval_metric_ops={"a": metric()}) => raises ValueError
list(evaluated(eval_metric_ops={"a": metric(1.0)}).eval_metric_ops) => ["a"]
evaluated(eval_metric_ops={"loss": (c(1.0), c(1.0))}).mode => "eval"
train(eval_metric_ops={"a": 1.0}) => raises TypeError
predicted(eval_metric_ops={"a": 1.0}) => raises TypeError
train().training_hooks => []
train(training_hooks=[Hook()])._asdict()["training_hooks"].__class__.__name__ => "tuple"
len(train(training_hooks=(Hook() for _ in range(2))).training_hooks) => 2
train(training_hooks=["hook"]) => raises TypeError
train(training_hooks=Hook()) => raises TypeError
train(training_hooks=[Hook]) => raises TypeError
train(training_chief_hooks=["hook"]) => raises TypeError
evaluated(evaluation_hooks=["hook"]) => raises TypeError
predicted(prediction_hooks=["hook"]) => raises TypeError
predicted(training_hooks=[object()]) => raises TypeError
type(train().scaffold).__name__ => "Scaffold"
type(predicted().scaffold).__name__ => "Scaffold"
train(scaffold="scaffold") => raises TypeError
train(scaffold=tf.train.Scaffold) => raises TypeError
train(scaffold={}).scaffold.__class__.__name__ => "Scaffold"
train()._replace(loss=c(3.0)).loss.shape.rank => 0
train()._replace(mode=TRAIN).mode => "train"
train()._replace(mode=EVAL) => raises ValueError
train()._replace(loss=None) => raises ValueError
train()._replace(loss=1.0) => raises TypeError
train()._replace(train_op="name") => raises TypeError
train()._replace(nothing=1) => ["train", {}, "SymbolicTensor", "Operation", {}, null, [], [], "Scaffold", [], []]
type(train()._replace(predictions=c(1.0))).__name__ => "EstimatorSpec"
sorted(predicted()._replace(predictions={"b": c(1.0)}).export_outputs["serving_default"].outputs) => ["a"]
train()._replace(training_hooks=[1]) => raises TypeError
Spec._make(["mode"]) => raises TypeError
"""  # noqa: E501

CONFIG = """
est.RunConfig().model_dir => null
est.RunConfig().tf_random_seed => null
est.RunConfig().save_summary_steps => 100
est.RunConfig().save_checkpoints_steps => null
est.RunConfig().save_checkpoints_secs => 600
est.RunConfig().session_config => null
est.RunConfig().keep_checkpoint_max => 5
est.RunConfig().keep_checkpoint_every_n_hours => 10000
est.RunConfig().log_step_count_steps => 100
est.RunConfig().train_distribute => null
est.RunConfig().device_fn => null
est.RunConfig().protocol => null
est.RunConfig().eval_distribute => null
est.RunConfig().experimental_max_worker_delay_secs => null
est.RunConfig().session_creation_timeout_secs => 7200
est.RunConfig().checkpoint_save_graph_def => true
est.RunConfig().service => null
place(est.RunConfig()) => ["worker", 0, true, 1, 0, 0, "", "", []]
est.RunConfig(model_dir="") => raises ValueError
est.RunConfig(model_dir=b"a").model_dir => "bytes"
est.RunConfig(model_dir=__import__("pathlib").Path("a")).model_dir => "a"
est.RunConfig(tf_random_seed=None).tf_random_seed => null
est.RunConfig(tf_random_seed=7).replace(tf_random_seed=None).tf_random_seed => null
est.RunConfig(tf_random_seed=0).tf_random_seed => 0
est.RunConfig(tf_random_seed=True).tf_random_seed => true
est.RunConfig(tf_random_seed=-5).tf_random_seed => -5
est.RunConfig(tf_random_seed=2**40).tf_random_seed => 1099511627776
est.RunConfig(tf_random_seed=1.0) => raises ValueError
est.RunConfig(tf_random_seed="1") => raises ValueError
est.RunConfig(save_summary_steps=-1) => raises ValueError
est.RunConfig(save_summary_steps=0).save_summary_steps => 0
est.RunConfig(save_summary_steps=None).save_summary_steps => null
est.RunConfig(save_summary_steps=1.5).save_summary_steps => 1.5
est.RunConfig(save_summary_steps="1") => raises TypeError
est.RunConfig(save_checkpoints_steps=-1) => raises ValueError
est.RunConfig(save_checkpoints_steps="1") => raises TypeError
est.RunConfig(save_checkpoints_steps=0).save_checkpoints_steps => 0
est.RunConfig(save_checkpoints_steps=0).save_checkpoints_secs => null
est.RunConfig(save_checkpoints_secs=0).save_checkpoints_secs => 0
est.RunConfig(save_checkpoints_secs=-1) => raises ValueError
est.RunConfig(save_checkpoints_secs="1") => raises TypeError
est.RunConfig(save_checkpoints_secs=1.5).save_checkpoints_secs => 1.5
est.RunConfig(save_checkpoints_steps=None).save_checkpoints_secs => null
est.RunConfig(save_checkpoints_secs=None).save_checkpoints_steps => null
est.RunConfig(save_checkpoints_secs=None).save_checkpoints_secs => null
est.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1) => raises ValueError
est.RunConfig(save_checkpoints_steps=0, save_checkpoints_secs=0) => raises ValueError
est.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=None).save_checkpoints_steps => 1
est.RunConfig(session_config={}) => raises ValueError
est.RunConfig(session_config=tf.ConfigProto()).session_config.allow_soft_placement => false
est.RunConfig(keep_checkpoint_max=-1) => raises ValueError
est.RunConfig(keep_checkpoint_max=0).keep_checkpoint_max => 0
est.RunConfig(keep_checkpoint_max=None).keep_checkpoint_max => null
est.RunConfig(keep_checkpoint_max="1") => raises TypeError
est.RunConfig(keep_checkpoint_every_n_hours=0) => raises ValueError
est.RunConfig(keep_checkpoint_every_n_hours=-1) => raises ValueError
est.RunConfig(keep_checkpoint_every_n_hours=0.5).keep_checkpoint_every_n_hours => 0.5
est.RunConfig(keep_checkpoint_every_n_hours=None).keep_checkpoint_every_n_hours => null
est.RunConfig(log_step_count_steps=0) => raises ValueError
est.RunConfig(log_step_count_steps=-1) => raises ValueError
est.RunConfig(log_step_count_steps=None).log_step_count_steps => null
est.RunConfig(log_step_count_steps="1") => raises TypeError
est.RunConfig(device_fn=1) => raises ValueError
est.RunConfig(device_fn=lambda: "/cpu:0") => raises ValueError
est.RunConfig(device_fn=lambda node: "/cpu:0") => raises ValueError
est.RunConfig(device_fn=lambda op, other: "/cpu:0") => raises ValueError
est.RunConfig(device_fn=lambda op: "/cpu:0").device_fn(None) => "/cpu:0"
est.RunConfig(protocol="http") => raises ValueError
est.RunConfig(protocol=1) => raises ValueError
est.RunConfig(protocol="grpc").protocol => "grpc"
est.RunConfig(protocol="grpc+verbs").protocol => "grpc+verbs"
est.RunConfig(experimental_max_worker_delay_secs=1.5) => raises ValueError
est.RunConfig(experimental_max_worker_delay_secs="1") => raises ValueError
est.RunConfig(experimental_max_worker_delay_secs=-1).experimental_max_worker_delay_secs => -1
est.RunConfig(session_creation_timeout_secs=0) => raises ValueError
est.RunConfig(session_creation_timeout_secs=-1) => raises ValueError
est.RunConfig(session_creation_timeout_secs="1") => raises TypeError
est.RunConfig(session_creation_timeout_secs=None).session_creation_timeout_secs => null
est.RunConfig(checkpoint_save_graph_def=False).checkpoint_save_graph_def => false
est.RunConfig(checkpoint_save_graph_def=0).checkpoint_save_graph_def => 0
est.RunConfig(no_such=1) => raises TypeError
est.RunConfig().replace(no_such=1) => raises ValueError
est.RunConfig().replace(master="x") => raises ValueError
est.RunConfig().replace(task_id=1) => raises ValueError
est.RunConfig().replace(cluster_spec={}) => raises ValueError
est.RunConfig().replace(is_chief=False) => raises ValueError
est.RunConfig().replace("x") => raises TypeError
est.RunConfig().replace(model_dir="x").model_dir => "x"
est.RunConfig().replace(model_dir="") => raises ValueError
est.RunConfig().replace(save_summary_steps=-1) => raises ValueError
est.RunConfig().replace(save_checkpoints_steps=1, save_checkpoints_secs=1) => raises ValueError
est.RunConfig().replace(save_checkpoints_steps=1).save_checkpoints_secs => null
est.RunConfig(save_checkpoints_steps=5).replace(save_checkpoints_secs=7).save_checkpoints_steps => null
est.RunConfig(save_checkpoints_steps=5).replace(save_checkpoints_secs=None).save_checkpoints_steps => 5
est.RunConfig(save_checkpoints_steps=5).replace(save_checkpoints_steps=None).save_checkpoints_secs => null
est.RunConfig().replace(session_config=1) => raises ValueError
est.RunConfig().replace(protocol="http") => raises ValueError
est.RunConfig().replace(device_fn=1) => raises ValueError
est.RunConfig().replace(tf_random_seed=1.5) => raises ValueError
est.RunConfig().replace(log_step_count_steps=0) => raises ValueError
est.RunConfig().replace(train_distribute=None).train_distribute => null
est.RunConfig().replace(experimental_max_worker_delay_secs=3).experimental_max_worker_delay_secs => 3
est.RunConfig().replace(session_creation_timeout_secs=3).session_creation_timeout_secs => 3
setattr(est.RunConfig(), "model_dir", "x") => raises AttributeError
setattr(est.RunConfig(), "task_id", 1) => raises AttributeError
setattr(est.RunConfig(), "own", 1) => null
est.RunConfig() == est.RunConfig() => false
len({est.RunConfig(), est.RunConfig()}) => 2
__import__("copy").deepcopy(est.RunConfig(model_dir="x")).model_dir => "x"
place(in_tf_config({})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(task("chief", 0)) => ["chief", 0, true, 4, 2, 0, "grpc://h0:9", "", ["chief", "ps", "worker"]]
place(task("worker", 1)) => ["worker", 1, false, 4, 2, 2, "grpc://h4:4", "", ["chief", "ps", "worker"]]
place(task("ps", 1)) => ["ps", 1, false, 4, 2, 5, "grpc://h2:2", "", ["chief", "ps", "worker"]]
place(task("evaluator", 0)) => ["evaluator", 0, false, 0, 0, null, "", "", []]
place(task("evaluator", 3)) => ["evaluator", 3, false, 0, 0, null, "", "", []]
place(task("worker", "1")) => ["worker", 1, false, 4, 2, 2, "grpc://h4:4", "", ["chief", "ps", "worker"]]
place(task("chief", 0, {"chief": ["h0:9"]})) => ["chief", 0, true, 1, 0, 0, "", "", ["chief"]]
place(task("master", 0, {"master": ["h0:9"], "worker": ["h1:1"]})) => ["master", 0, true, 2, 0, 0, "grpc://h0:9", "", ["master", "worker"]]
place(task("worker", 0, {"master": ["h0:9"], "worker": ["h1:1"]})) => ["worker", 0, false, 2, 0, 1, "grpc://h1:1", "", ["master", "worker"]]
place(task("worker", 0, session_master="s", eval_session_master="e")) => ["worker", 0, false, 4, 2, 1, "s", "", ["chief", "ps", "worker"]]
place(task("evaluator", 0, session_master="s", eval_session_master="e")) => ["evaluator", 0, false, 0, 0, null, "", "e", []]
place(in_tf_config({"session_master": "s", "eval_session_master": "e"})) => ["worker", 0, true, 1, 0, 0, "s", "e", []]
place(in_tf_config({"task": {"type": "worker", "index": 0}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
task("worker", 0, service={"a": 1}).service => {"a": 1}
task("worker", 0, service=3) => raises TypeError
in_tf_config({"service": 3}) => raises TypeError
task("worker", -1) => raises ValueError
task("worker", 3) => raises ValueError
task("worker", None) => raises ValueError
task("boss", 0) => raises ValueError
task("", 0) => raises ValueError
task("worker", 0, {"worker": ["h0:1"]}) => raises ValueError
task("chief", 0, {"chief": ["h0:1", "h1:1"]}) => raises ValueError
task("ps", 0, {"chief": ["h0:1"]}) => raises ValueError
task("chief", 0, {"chief": ["h0:1"], "master": ["h1:1"]}) => raises ValueError
task("evaluator", 0, {"master": ["h0:1"]}) => raises ValueError
task("evaluator", 0, {"worker": ["h0:1"]}) => raises ValueError
in_tf_config({"cluster": CLUSTER}) => raises ValueError
in_tf_config({"cluster": CLUSTER, "task": {"type": "worker"}}) => raises ValueError
in_tf_config({"cluster": CLUSTER, "task": {"index": 0}}) => raises ValueError
in_tf_config({"task": {"type": "worker", "index": 1}}) => raises ValueError
in_tf_config({"task": {"type": "chief", "index": 0}}) => raises ValueError
in_tf_config({"task": {"type": "ps", "index": 0}}) => raises ValueError
in_tf_config({"model_dir": "a"}).model_dir => "a"
in_tf_config({"model_dir": "a"}, model_dir="a").model_dir => "a"
in_tf_config({"model_dir": "a"}, model_dir="b") => raises ValueError
in_tf_config({"model_dir": ""}) => raises ValueError
in_tf_config({}, model_dir="") => raises ValueError
place(task("chief", 0, PORT0)) => ["chief", 0, true, 4, 2, 0, "grpc://h0:0", "", ["chief", "ps", "worker"]]
place(task("worker", 1, PORT0)) => ["worker", 1, false, 4, 2, 2, "grpc://h4:4", "", ["chief", "ps", "worker"]]
place(task("ps", 1, PORT0)) => ["ps", 1, false, 4, 2, 5, "grpc://h2:2", "", ["chief", "ps", "worker"]]
place(task("evaluator", 0, PORT0)) => ["evaluator", 0, false, 0, 0, null, "", "", []]
place(task("master", 0, MASTER)) => ["master", 0, true, 4, 2, 0, "grpc://h0:0", "", ["master", "ps", "worker"]]
place(task("worker", 1, MASTER)) => ["worker", 1, false, 4, 2, 2, "grpc://h4:4", "", ["master", "ps", "worker"]]
place(task("ps", 1, MASTER)) => ["ps", 1, false, 4, 2, 5, "grpc://h2:2", "", ["master", "ps", "worker"]]
place(task("chief", 0, TYPES)) => ["chief", 0, true, 4, 2, 0, "grpc://h0:0", "", ["chief", "other", "ps", "worker"]]
place(task("worker", 2, TYPES)) => ["worker", 2, false, 4, 2, 5, "grpc://h5:5", "", ["chief", "other", "ps", "worker"]]
place(task("other", 1, TYPES)) => ["other", 1, false, 4, 2, 2, "grpc://h4:2", "", ["chief", "other", "ps", "worker"]]
place(task("other", 0, TYPES)) => ["other", 0, false, 4, 2, 1, "grpc://h3:1", "", ["chief", "other", "ps", "worker"]]
place(task("ps", 1, TYPES)) => ["ps", 1, false, 4, 2, 7, "grpc://h2:2", "", ["chief", "other", "ps", "worker"]]
task("other", 2, TYPES) => raises ValueError
place(task("evaluator", 0, TYPES)) => ["evaluator", 0, false, 0, 0, null, "", "", []]
place(task("chief", 0, {"chief": ["h0:0"]})) => ["chief", 0, true, 1, 0, 0, "", "", ["chief"]]
place(task("master", 0, {"master": ["h0:0"]})) => ["master", 0, true, 1, 0, 0, "", "", ["master"]]
place(task("master", 0, MASTER, session_master="s", eval_session_master="e")) => ["master", 0, true, 4, 2, 0, "s", "", ["master", "ps", "worker"]]
place(task("other", 0, {"master": ["h0:0"], "other": ["h1:1"]})) => ["other", 0, false, 1, 0, 1, "grpc://h1:1", "", ["master", "other"]]
place(task("chief", 0, {"chief": ["h0:0"], "worker": ["h0:0"]})) => ["chief", 0, true, 2, 0, 0, "grpc://h0:0", "", ["chief", "worker"]]
place(task("worker", 0, {"chief": ["h0"], "worker": ["h1"]})) => ["worker", 0, false, 2, 0, 1, "grpc://h1", "", ["chief", "worker"]]
place(task("worker", 0, {"chief": ["h0:99999"], "worker": ["h1:1"]})) => ["worker", 0, false, 2, 0, 1, "grpc://h1:1", "", ["chief", "worker"]]
place(task("worker", 0, {"chief": {"0": "h0:1"}, "worker": {"0": "h1:1"}})) => ["worker", 0, false, 2, 0, 1, "grpc://h1:1", "", ["chief", "worker"]]
place(task("chief", 0, {"chief": ["h0:1"], "evaluator": ["h1:1"], "worker": ["h2:2"]})) => ["chief", 0, true, 2, 0, 0, "grpc://h0:1", "", ["chief", "evaluator", "worker"]]
place(task("evaluator", 0, {"chief": ["h0:1"], "evaluator": ["h1:1"], "worker": ["h2:2"]})) => ["evaluator", 0, false, 0, 0, null, "", "", []]
place(in_tf_config({"task": {"type": "worker"}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(in_tf_config({"task": {"index": 0}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(in_tf_config({"cluster": {}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(in_tf_config({"cluster": {}, "task": {}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(in_tf_config({"cluster": {}, "task": {"type": "worker", "index": "0"}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(in_tf_config({"environment": "cloud", "cluster": {}})) => ["worker", 0, true, 1, 0, 0, "", "", []]
place(in_tf_config({"task": {"type": "master", "index": 0}})) => raises ValueError
place(in_tf_config({"task": {"type": "evaluator", "index": 0}})) => raises ValueError
task("master", 0, {"worker": ["h0:1"]}) => raises ValueError
task("worker", 0, {"master": ["h0:1", "h1:1"], "worker": ["h2:2"]}) => raises ValueError
task("master", None, MASTER) => raises ValueError
task(None, 0, MASTER) => raises ValueError
task("evaluator", None, PORT0) => raises ValueError
task("evaluator", -1, PORT0) => raises ValueError
task("worker", "a", PORT0) => raises ValueError
task("chief", 0, PORT0).service => null
session(est.RunConfig()) => null
session(task("chief", 0, PORT0)) => [true, ["/job:ps", "/job:chief"], 1]
session(task("worker", 1, PORT0)) => [true, ["/job:ps", "/job:worker/task:1"], 1]
session(task("ps", 1, PORT0)) => [true, ["/job:ps", "/job:worker", "/job:chief", "/job:master"], 1]
session(task("evaluator", 0, PORT0)) => null
session(task("master", 0, MASTER)) => [true, ["/job:ps", "/job:master"], 1]
session(task("other", 0, TYPES)) => null
session(in_tf_config({"cluster": PORT0, "task": {"type": "chief", "index": 0}}, session_config=tf.ConfigProto())) => [false, [], 0]
session(in_tf_config({"cluster": PORT0, "task": {"type": "chief", "index": 0}}).replace(model_dir="a")) => [true, ["/job:ps", "/job:chief"], 1]
session(made().config) => [true, [], 1]
session(made(config=est.RunConfig(session_config=tf.ConfigProto())).config) => [false, [], 0]
made(config=task("chief", 0, {"chief": ["h0:0"]})).config.model_dir != "" => true
task("chief", 0, PORT0).replace(save_summary_steps=3).save_summary_steps => 3
place(task("worker", 1, PORT0).replace(save_summary_steps=3)) => ["worker", 1, false, 4, 2, 2, "grpc://h4:4", "", ["chief", "ps", "worker"]]
sorted(task("worker", 1, TYPES).cluster_spec.as_dict().items()) => [["chief", ["h0:0"]], ["other", ["h3:1", "h4:2"]], ["ps", ["h1:1", "h2:2"]], ["worker", ["h3:3", "h4:4", "h5:5"]]]
sorted(task("worker", 1, MASTER).cluster_spec.as_dict().items()) => [["master", ["h0:0"]], ["ps", ["h1:1", "h2:2"]], ["worker", ["h3:3", "h4:4", "h5:5"]]]
task("worker", 1, MASTER).cluster_spec.jobs => ["master", "ps", "worker"]
bool(est.RunConfig().cluster_spec) => false
est.RunConfig().cluster_spec.as_dict() => {}
in_tf_config({"model_dir": "a"}, model_dir=__import__("pathlib").Path("a")).model_dir => "a"
in_tf_config({"model_dir": "a"}, model_dir="").model_dir => raises ValueError
owned(model_dir="own")().model_dir => "own"
owned(model_dir="own")().replace(save_summary_steps=1).model_dir => "own"
made(config=owned(model_dir="own")()).model_dir => "own"
made(config=owned(model_dir="own")()).config.model_dir => "own"
made(model_dir="own", config=owned(model_dir="own")()).model_dir => "own"
made(model_dir="other", config=owned(model_dir="own")()) => raises ValueError
type(made(config=owned(model_dir="own")()).config).__name__ => "OwnConfig"
made(config=owned(task_type="evaluator")()).train(data, steps=1) => raises ValueError
made(config=owned(task_type="ps")()).train(data, steps=1) => raises ValueError
made(config=owned(task_type="worker", is_chief=True)()).train(data, steps=1).__class__.__name__ => "Estimator"
made(config=owned(num_ps_replicas=0, num_worker_replicas=1)()).train(data, steps=1).__class__.__name__ => "Estimator"
owned(is_chief=False)().is_chief => false
owned(task_id=3)().task_id => 3
owned(save_summary_steps=7)().save_summary_steps => 7
owned(save_summary_steps=-1)() => raises ValueError
owned(tf_random_seed=11)().tf_random_seed => 11
owned(keep_checkpoint_max=2)(keep_checkpoint_max=3).keep_checkpoint_max => 2
type("C", (est.RunConfig,), {"__init__": lambda self, **k: est.RunConfig.__init__(self, **k)})(model_dir="a").model_dir => "a"
type("C", (est.RunConfig,), {"__init__": lambda self, own, **k: [est.RunConfig.__init__(self, **k), setattr(self, "own", own)][0]})(3, model_dir="a").replace(save_summary_steps=1).own => 3
made(model_dir="").model_dir != "" => true
made(config=est.RunConfig(model_dir=b"a")).train(data, steps=1).model_dir => raises TypeError
made().config.tf_random_seed => null
made(config=est.RunConfig()).config.tf_random_seed => null
est.RunConfig(tf_random_seed=None).replace(model_dir="a").tf_random_seed => null
est.RunConfig(experimental_distribute=None).replace(experimental_distribute=None).train_distribute => null
made(config=owned(task_type="evaluator")()).train(data, steps=1) => raises ValueError
"""  # noqa: E501

ESTIMATOR = """
est.Estimator() => raises TypeError
made(None) => raises ValueError
made(7) => raises TypeError
made(lambda labels, mode: None) => raises ValueError
made(lambda features, labels, mode, other: None) => raises ValueError
made(lambda features, labels, mode, other=1: None) => raises ValueError
made(lambda features, labels: None, params={"a": 1}) => raises ValueError
made(lambda features, labels: None, params={}) => raises ValueError
made(lambda features, labels, params: None, params=None).params => {}
made(params={"a": 1}).params => {"a": 1}
made(params=7).params => 7
made(config="config") => raises ValueError
made(config={"model_dir": "a"}) => raises ValueError
made(config=7, model_dir="a") => raises ValueError
made(model_dir="a", config=est.RunConfig(model_dir="b")) => raises ValueError
made(model_dir="a", config=est.RunConfig(model_dir="a")).model_dir => "a"
made(model_dir="", config=est.RunConfig(model_dir="b")) => raises ValueError
made(model_dir="", config=est.RunConfig()).model_dir != "" => true
made(model_dir=__import__("pathlib").Path("a")).model_dir => "a"
made(warm_start_from=7) => raises ValueError
made(warm_start_from={}) => raises ValueError
made(warm_start_from=est.WarmStartSettings("")) => raises ValueError
est.WarmStartSettings("") => raises ValueError
est.WarmStartSettings(None) => raises ValueError
est.WarmStartSettings("a")[2:] => [{}, {}]
made(no_such=1) => raises TypeError
made().config.model_dir == made().config.model_dir => false
made().config is made().config => false
subclass("train") => raises ValueError
subclass("evaluate") => raises ValueError
subclass("predict") => raises ValueError
subclass("eval_dir") => raises ValueError
subclass("get_variable_value") => raises ValueError
subclass("export_saved_model") => raises ValueError
subclass("model_dir") => raises ValueError
subclass("config") => raises ValueError
isinstance(subclass("latest_checkpoint"), est.Estimator) => true
isinstance(subclass("own"), est.Estimator) => true
made().train(data, steps=0) => raises ValueError
made().train(data, steps=-1) => raises ValueError
made().train(data, max_steps=0) => raises ValueError
made().train(data, max_steps=-1) => raises ValueError
made().train(data, steps=1, max_steps=1) => raises ValueError
made().train(data, steps="1") => raises TypeError
made().train(data, hooks=["hook"], steps=1) => raises TypeError
made().train(data, hooks=[Hook], steps=1) => raises TypeError
made().train(data, hooks=Hook(), steps=1) => raises TypeError
made().train(data, hooks=[Listener()], steps=1) => raises TypeError
made().train(data, saving_listeners=["listener"], steps=1) => raises TypeError
made().train(data, saving_listeners=[Hook()], steps=1) => raises TypeError
made().train(data, saving_listeners=Listener(), steps=1) => raises TypeError
never_saves().train(data, saving_listeners=[Listener()], steps=1) => raises ValueError
made().train(None, steps=1) => raises TypeError
made().train(7, steps=1) => raises TypeError
made().train() => raises TypeError
made().train(data, no_such=1) => raises TypeError
isinstance(trained(), est.Estimator) => true
trained().train(data, max_steps=1).__class__.__name__ => "Estimator"
made(config=task("evaluator", 0)).train(data, steps=1) => raises ValueError
made(config=task("ps", 0)).train(data, steps=1) => raises ValueError
of(lambda mode: None).train(data, steps=1) => raises ValueError
of(lambda mode: (1, 2)).train(data, steps=1) => raises ValueError
of(lambda mode: tf.no_op()).train(data, steps=1) => raises ValueError
of(lambda mode: train(loss="a")).train(data, steps=1) => raises TypeError
of(lambda mode: train(train_op="a")).train(data, steps=1) => raises TypeError
of(lambda mode: Spec(mode)).train(data, steps=1) => raises ValueError
of(lambda mode: train(training_hooks=["a"])).train(data, steps=1) => raises TypeError
made(lambda features, mode: train()).train(data, steps=1) => raises ValueError
trained().evaluate(data, steps=0) => raises ValueError
trained().evaluate(data, steps=-1) => raises ValueError
trained().evaluate(data, steps="1") => raises TypeError
trained().evaluate(data, hooks=["hook"]) => raises TypeError
trained().evaluate(data, hooks=Hook()) => raises TypeError
trained().evaluate(None) => raises TypeError
trained().evaluate(data, checkpoint_path="no/such/model.ckpt-1") => raises ValueError
sorted(trained().evaluate(data)) => ["global_step", "loss"]
of(lambda mode: evaluated(eval_metric_ops={"loss": tf.metrics.mean(c(1.0))})).evaluate(data) => raises ValueError
of(lambda mode: evaluated(eval_metric_ops={"global_step": tf.metrics.mean(c(1.0))})).evaluate(data) => raises ValueError
next(trained().predict(data, hooks=["hook"])) => raises TypeError
next(trained().predict(data, predict_keys=["no"])) => raises ValueError
next(trained().predict(data, predict_keys="y"))["y"].shape => []
next(trained().predict(data, predict_keys=["y", "no"]))["y"].shape => []
next(trained().predict(data, predict_keys=[]))["y"].shape => []
next(trained().predict(None)) => raises TypeError
next(trained().predict(data, checkpoint_path="no/such/model.ckpt-1")) => raises ValueError
type(trained().predict(7)).__name__ => "generator"
next(trained().predict(data))["y"].shape => []
trained().get_variable_value("no") => raises NotFoundError
float(trained().get_variable_value("global_step")) => 1.0
trained().get_variable_names() => ["global_step", "w"]
made().get_variable_names() => raises ValueError
made().get_variable_value("w") => raises ValueError
made().latest_checkpoint() => null
made(model_dir="a").eval_dir() => "a/eval"
made(model_dir="a").eval_dir("b") => "a/eval_b"
made(model_dir="a").eval_dir("") => "a/eval"
trained().export_saved_model("out", None) => raises ValueError
trained().export_saved_model("out", 7) => raises TypeError
trained().export_saved_model("out", SERVING, experimental_mode="no") => raises ValueError
made().export_saved_model("out", SERVING) => raises ValueError
trained().experimental_export_all_saved_models("out", {}) => raises ValueError
trained().experimental_export_all_saved_models("out", {"no": SERVING}) => raises ValueError
trained().export_saved_model("out", SERVING, checkpoint_path="no/such/model.ckpt-1") => raises ValueError
type(trained().export_saved_model("out", SERVING)).__name__ => "bytes"
est.TrainSpec(7) => raises TypeError
est.TrainSpec(data, max_steps=0) => raises ValueError
est.TrainSpec(data, max_steps=-1) => raises ValueError
est.TrainSpec(data, hooks=["hook"]) => raises TypeError
est.TrainSpec(data, saving_listeners=["listener"]) => raises TypeError
est.EvalSpec(7) => raises TypeError
est.EvalSpec(data, steps=0) => raises ValueError
est.EvalSpec(data, name=7) => raises TypeError
est.EvalSpec(data, hooks=["hook"]) => raises TypeError
est.EvalSpec(data, exporters="a") => raises TypeError
est.EvalSpec(data, exporters=["a"]) => raises TypeError
est.EvalSpec(data, exporters=7) => raises TypeError
est.EvalSpec(data, start_delay_secs=-1) => raises ValueError
est.EvalSpec(data, throttle_secs=-1) => raises ValueError
est.train_and_evaluate("a", est.TrainSpec(data, 1), est.EvalSpec(data)) => raises TypeError
est.train_and_evaluate(made(), "a", est.EvalSpec(data)) => raises TypeError
est.train_and_evaluate(made(), est.TrainSpec(data, 1), "a") => raises TypeError
est.add_metrics(made(), lambda no_such: {}) => raises ValueError
est.add_metrics(made(), lambda features: {}).__class__.__name__ => "Estimator"
est.add_metrics("a", lambda features: {}) => raises AttributeError
made(model_dir="a").model_fn(c(1.0), c(1.0), TRAIN, None).__class__.__name__ => "EstimatorSpec"
gets(lambda: ({"x": tf.constant([1.0])}, {"a": tf.constant([1.0]), "b": tf.constant([2])})) => [{"x": ["Tensor", "float32", [1]]}, {"a": ["Tensor", "float32", [1]], "b": ["Tensor", "int32", [1]]}, "train"]
gets(lambda: ({"x": ((c(1.0, 2.0), c(3.0, 4.0)), [c(5.0, 6.0)])}, ([c(1.0, 2.0)],))) => [{"x": [[["Tensor", "float32", [2]], ["Tensor", "float32", [2]]], [["Tensor", "float32", [2]]]]}, [[["Tensor", "float32", [2]]]], "train"]
gets(lambda: (tf.constant([1.0]), None)) => [["Tensor", "float32", [1]], null, "train"]
gets(lambda: (None, None)) => [null, null, "train"]
gets(lambda: ({}, {})) => [{}, {}, "train"]
gets(lambda: ("features", "labels")) => ["features", "labels", "train"]
gets(lambda: ({"x": "a"}, 3)) => [{"x": "a"}, 3, "train"]
gets(lambda: (None, tf.constant([1.0]))) => [null, ["Tensor", "float32", [1]], "train"]
gets(lambda: ({}, tf.constant([1.0]))) => [{}, ["Tensor", "float32", [1]], "train"]
gets(lambda: 7) => [7, null, "train"]
gets(lambda: ({"x": tf.constant([1.0]), 0: tf.constant([2])}, tf.constant([1.0]))) => [{"x": ["Tensor", "float32", [1]], "0": ["Tensor", "int32", [1]]}, ["Tensor", "float32", [1]], "train"]
gets(lambda: ({"x": 1.5, "y": [1, 2]}, [3.0])) => [{"x": 1.5, "y": [1, 2]}, [3.0], "train"]
gets(lambda: None, "infer") => [null, null, "infer"]
gets(lambda: {}, "infer") => [{}, null, "infer"]
gets(lambda: ({}, {}), "eval") => [{}, {}, "eval"]
gets(lambda: None, "eval") => [null, null, "eval"]
"""  # noqa: E501

HEADS = """
est.BinaryClassHead(label_vocabulary="ab") => raises ValueError
est.BinaryClassHead(label_vocabulary=["a"]) => "BinaryClassHead"
est.BinaryClassHead(thresholds=[0.0]) => raises ValueError
est.BinaryClassHead(thresholds=[0.5, 1.5]) => raises ValueError
est.BinaryClassHead(loss_reduction="none") => raises ValueError
est.BinaryClassHead(loss_reduction="no") => raises ValueError
est.BinaryClassHead(loss_reduction=None) => raises ValueError
est.BinaryClassHead(loss_fn=lambda labels: 1) => raises ValueError
est.BinaryClassHead(loss_fn=lambda labels, logits, other: 1) => raises ValueError
est.BinaryClassHead(loss_fn=lambda labels, logits, features, loss_reduction: 1).name => null
est.BinaryClassHead(loss_fn=7) => raises TypeError
est.BinaryClassHead(name="a").name => "a"
est.BinaryClassHead().logits_dimension => 1
est.BinaryClassHead().loss_reduction => "sum_over_batch_size"
est.MultiClassHead(2) => raises ValueError
est.MultiClassHead(None) => raises ValueError
est.MultiClassHead("3") => raises TypeError
est.MultiClassHead(3, label_vocabulary="abc") => raises ValueError
est.MultiClassHead(3, label_vocabulary=["a"]) => raises ValueError
est.MultiClassHead(3).logits_dimension => 3
est.MultiLabelHead(1) => raises ValueError
est.MultiLabelHead(None) => raises ValueError
est.MultiLabelHead(2, thresholds=[2.0]) => raises ValueError
est.MultiLabelHead(3, label_vocabulary="abc") => raises ValueError
est.MultiLabelHead(3, label_vocabulary=["a"]) => raises ValueError
est.MultiLabelHead(3, classes_for_class_based_metrics=["a"]) => raises ValueError
est.MultiLabelHead(3, classes_for_class_based_metrics=[5]) => raises ValueError
est.MultiLabelHead(3, classes_for_class_based_metrics=[-1]) => raises ValueError
est.MultiLabelHead(2, label_vocabulary=["a", "b"], classes_for_class_based_metrics=["x"]) => raises ValueError
est.RegressionHead(0) => raises ValueError
est.RegressionHead(-1) => raises ValueError
est.RegressionHead(loss_reduction="no") => raises ValueError
est.RegressionHead(loss_fn=lambda labels: 1) => raises ValueError
est.MultiHead(None) => raises ValueError
est.MultiHead([]) => raises ValueError
est.MultiHead([est.RegressionHead()]) => raises ValueError
est.MultiHead([est.RegressionHead(name="a"), est.RegressionHead(name="a")]) => "MultiHead"
est.MultiHead([est.RegressionHead(name="a")], head_weights=[1.0, 2.0]) => raises ValueError
est.MultiHead([est.RegressionHead(name="a"), est.RegressionHead(name="b", loss_reduction="sum")]).loss_reduction => raises ValueError
est.MultiHead([est.RegressionHead(name="a"), est.RegressionHead(2, name="b")]).logits_dimension => 3
both().loss({"a": rows(2)}, {"a": rows(2), "b": rows(2)}) => raises ValueError
both().loss({"a": rows(2), "b": rows(2)}, {"a": rows(2)}) => raises ValueError
both().loss(rows(2), {"a": rows(2), "b": rows(2)}) => raises ValueError
both().loss({"a": rows(2), "b": rows(2)}, rows(2, 3)) => raises ValueError
both().loss({"a": rows(2), "b": rows(2)}, rows(2, 2), {}).shape.rank => 0
est.Head() => raises TypeError
est.BinaryClassHead().loss(None, rows(2)) => raises ValueError
est.BinaryClassHead().loss(rows(3), rows(2)) => raises ValueError
est.BinaryClassHead().loss(rows(2, 2), rows(2)) => raises ValueError
est.BinaryClassHead().loss(rows(2), c(1.0, 2.0)) => raises ValueError
est.BinaryClassHead().loss(rows(2), rows(2, 3)) => raises ValueError
est.BinaryClassHead().loss(c(1.0, 0.0), rows(2), {}).shape.rank => 0
est.BinaryClassHead().loss(tf.SparseTensor([[0, 0]], [1.0], [2, 1]), rows(2)) => raises ValueError
est.BinaryClassHead().loss(tf.constant([["a"], ["b"]]), rows(2)) => raises ValueError
est.BinaryClassHead(label_vocabulary=["a", "b"]).loss(rows(2), rows(2)) => raises TypeError
est.BinaryClassHead(weight_column="w").loss(rows(2), rows(2), {"x": rows(2)}) => raises ValueError
est.BinaryClassHead(weight_column="w").loss(rows(2), rows(2), {"w": rows(3)}) => raises ValueError
est.BinaryClassHead(weight_column="w").loss(rows(2), rows(2), {"w": tf.constant([["a"], ["b"]])}) => "SymbolicTensor"
est.BinaryClassHead(weight_column="w").loss(rows(2), rows(2), {"w": c(1.0, 2.0)}).shape.rank => 0
est.BinaryClassHead(weight_column=7).loss(rows(2), rows(2), {"w": rows(2)}) => raises TypeError
est.BinaryClassHead(loss_fn=lambda labels, logits: c(1.0)).loss(rows(2), rows(2), {}) => raises ValueError
est.BinaryClassHead(loss_fn=lambda labels, logits: rows(3)).loss(rows(2), rows(2), {}) => "SymbolicTensor"
est.BinaryClassHead(loss_fn=lambda labels, logits: rows(2, 2)).loss(rows(2), rows(2), {}) => "SymbolicTensor"
est.MultiClassHead(3).loss(None, rows(2, 3)) => raises ValueError
est.MultiClassHead(3).loss(rows(2), rows(2, 3)) => raises ValueError
est.MultiClassHead(3).loss(tf.constant([["a"], ["b"]]), rows(2, 3)) => raises ValueError
est.MultiClassHead(3).loss(tf.constant([[0], [2]]), rows(2, 2)) => raises ValueError
est.MultiClassHead(3).loss(tf.constant([[0, 1, 0], [1, 0, 0]]), rows(2, 3)) => raises ValueError
est.MultiClassHead(3, label_vocabulary=["a", "b", "c"]).loss(tf.constant([[0], [2]]), rows(2, 3)) => raises ValueError
est.MultiLabelHead(2).loss(None, rows(2, 2)) => raises ValueError
est.MultiLabelHead(2).loss(tf.constant([[0], [1]]), rows(2, 2)) => raises ValueError
est.MultiLabelHead(2).loss(tf.constant([[0, 1], [1, 1]]), rows(2, 3)) => raises ValueError
est.MultiLabelHead(2).loss(tf.SparseTensor([[0, 0]], ["a"], [2, 1]), rows(2, 2)) => raises TypeError
est.MultiLabelHead(2).loss(tf.SparseTensor([[0, 0]], [1.5], [2, 1]), rows(2, 2)) => raises ValueError
est.RegressionHead().loss(None, rows(2)) => raises ValueError
est.RegressionHead(2).loss(rows(2), rows(2, 2)) => raises ValueError
est.RegressionHead().loss(tf.SparseTensor([[0, 0]], [1.0], [2, 1]), rows(2)) => raises ValueError
est.RegressionHead().loss(rows(2), rows(2, 2)) => raises ValueError
est.RegressionHead(weight_column="w").loss(rows(2), rows(2), {"w": rows(3)}) => raises ValueError
est.BinaryClassHead().predictions(rows(2), keys=["no"]) => raises ValueError
est.BinaryClassHead().predictions(rows(2, 2)) => raises ValueError
sorted(est.BinaryClassHead().predictions(rows(2), keys=["logits"])) => ["logits"]
sorted(est.BinaryClassHead().predictions(rows(2))) => ["all_class_ids", "all_classes", "class_ids", "classes", "logistic", "logits", "probabilities"]
sorted(est.MultiClassHead(3).predictions(rows(2, 3))) => ["all_class_ids", "all_classes", "class_ids", "classes", "logits", "probabilities"]
sorted(est.MultiLabelHead(3).predictions(rows(2, 3))) => ["classes", "logits", "probabilities"]
sorted(est.RegressionHead().predictions(rows(2))) => ["predictions"]
sorted(est.PoissonRegressionHead().predictions(rows(2))) => ["logits", "predictions"]
headed(TRAIN) => raises ValueError
headed(TRAIN, train_op_fn=lambda loss: None) => raises ValueError
headed(TRAIN, train_op_fn=lambda loss: "name") => raises TypeError
headed(TRAIN, train_op_fn=lambda loss: tf.no_op(), optimizer=tf.keras.optimizers.SGD()) => raises ValueError
headed(TRAIN, train_op_fn=lambda loss: tf.no_op(), labels=None) => raises ValueError
headed(TRAIN, optimizer=7) => raises ValueError
headed(TRAIN, train_op_fn=lambda loss: tf.no_op(), update_ops="a") => raises ValueError
headed(TRAIN, train_op_fn=lambda loss: tf.no_op(), update_ops=[tf.no_op()]).train_op.__class__.__name__ => "Operation"
headed("no") => raises ValueError
headed(None) => raises ValueError
headed(TRAIN, train_op_fn=lambda loss: tf.no_op()).__class__.__name__ => "EstimatorSpec"
isinstance(headed(PREDICT), est.EstimatorSpec) => true
headed(TRAIN, train_op_fn=lambda loss: tf.no_op()).export_outputs => null
headed(EVAL).export_outputs => null
sorted(headed(PREDICT).export_outputs) => ["classification", "predict", "regression", "serving_default"]
headed(TRAIN, train_op_fn=lambda loss: tf.no_op()).loss.shape.rank => 0
sorted(headed(EVAL).eval_metric_ops) => ["accuracy", "accuracy_baseline", "auc", "auc_precision_recall", "average_loss", "label/mean", "precision", "prediction/mean", "recall"]
sorted(headed(EVAL).predictions) => ["all_class_ids", "all_classes", "class_ids", "classes", "logistic", "logits", "probabilities"]
headed(EVAL).train_op => null
headed(PREDICT).loss => null
headed(EVAL, regularization_losses=[c(1.0)]).loss.shape.rank => 0
"""  # noqa: E501

EXPORT = """
exported(est.LatestExporter("l", serving), {"loss": 1.0}, {"loss": 2.0}, ({"loss": 3.0}, True)) => [["p", "p", "p"], [], 3]
exported(est.LatestExporter("l", serving, exports_to_keep=2), None, names=["1000000001", "1000000002", "1000000003", "1000000004"]) => [["p"], ["1000000003", "1000000004"], 1]
exported(est.LatestExporter("l", serving, exports_to_keep=None), None, names=["1000000001", "1000000002"]) => [["p"], ["1000000001", "1000000002"], 1]
exported(est.FinalExporter("f", serving), None, (None, True), names=["1000000001", "1000000002"]) => [[null, "p"], ["1000000001", "1000000002"], 1]
exported(est.FinalExporter("f", serving), {"loss": 1.0}, ({"loss": 1.0}, True), ({"loss": 1.0}, True)) => [[null, "p", "p"], [], 2]
exported(est.BestExporter("b", serving), {"loss": 0.5}, {"loss": 0.6}, {"loss": 0.4}, {"loss": 0.4}) => [["p", null, "p", null], [], 2]
exported(est.BestExporter("b", serving), {}, names=["1000000001"]) => [["p"], ["1000000001"], 1]
exported(est.BestExporter("b", serving), {}, {}) => raises ValueError
exported(est.BestExporter("b", serving), {"loss": 1.0}, {}) => raises ValueError
exported(est.BestExporter("b", serving, exports_to_keep=2), None, names=["1000000001", "1000000002", "1000000003", "1000000004"]) => [["p"], ["1000000003", "1000000004"], 1]
exported(est.BestExporter("b", serving, exports_to_keep=1), {"loss": 0.5}, {"loss": 0.6}, {"loss": 0.4}, names=["1000000001", "1000000002"]) => [["p", null, "p"], ["1000000002"], 2]
exported(est.BestExporter("b", serving, exports_to_keep=None), None, names=["1000000001", "1000000002"]) => [["p"], ["1000000001", "1000000002"], 1]
exported(est.BestExporter("b", serving, compare_fn=lambda best_eval_result, current_eval_result: best_eval_result["a"] < current_eval_result["a"]), {"a": 1}, {"a": 0}, {"a": 2}) => [["p", null, "p"], [], 2]
exported(est.BestExporter("b", serving, event_file_pattern=None), {"loss": 0.5}, {"loss": 0.6}, {"loss": 0.4}) => [["p", null, "p"], [], 2]
exported(est.BestExporter("b", serving), None, None) => [["p", "p"], [], 2]
exported(est.BestExporter("b", serving), ({"loss": 0.5}, True), ({"loss": 0.6}, True)) => [["p", null], [], 1]
est.BestExporter(serving_input_receiver_fn=serving).name => "best_exporter"
est.BestExporter(name="n", serving_input_receiver_fn=serving).name => "n"
est.BestExporter("b", serving, compare_fn=None) => raises ValueError
est.FinalExporter("", serving).name => ""
est.FinalExporter(7, serving).name => 7
est.EvalSpec(data, exporters=est.FinalExporter("", serving)) => raises ValueError
est.EvalSpec(data, exporters=est.FinalExporter(7, serving)) => raises ValueError
trained().evaluate(data, name=7) => raises TypeError
(lambda one: one._model_dir == one.model_dir)(trained()) => true
est.BestExporter("b", serving, exports_to_keep=0) => raises ValueError
est.BestExporter("b", serving, exports_to_keep=-1) => raises ValueError
est.BestExporter("b", serving, compare_fn=lambda best_eval_result: True) => raises ValueError
est.BestExporter("b", serving, compare_fn=lambda current_eval_result: True) => raises ValueError
est.BestExporter("b", serving, compare_fn=lambda best_eval_result, current_eval_result, other: True) => raises ValueError
est.LatestExporter("l", serving, exports_to_keep=0) => raises ValueError
est.LatestExporter("l", serving, exports_to_keep=-1) => raises ValueError
est.LatestExporter(name="l", serving_input_receiver_fn=serving).name => "l"
est.LatestExporter("l", None).name => "l"
est.FinalExporter("f", None).name => "f"
est.FinalExporter(name="f", serving_input_receiver_fn=serving, assets_extra={"a": "b"}, as_text=True).name => "f"
type("E", (est.Exporter,), {"name": "n", "export": lambda self, *a: 1})().export(1, 2, 3, 4, 5) => 1
est.FinalExporter("f", SERVING).export(trained(), "base", None, None, False) => null
type(est.LatestExporter("l", SERVING).export(trained(), "base", None, None, False)).__name__ => "bytes"
type(est.LatestExporter("l", SERVING).export(trained(), b"base", None, None, False)).__name__ => "bytes"
type(est.LatestExporter("l", SERVING).export(trained(), "base", trained().latest_checkpoint(), None, False)).__name__ => "bytes"
type(est.BestExporter("b", SERVING).export(trained(), "base", None, None, False)).__name__ => "bytes"
type(est.BestExporter("b", SERVING).export(trained(), "base", trained().latest_checkpoint(), {"loss": 1.0}, False)).__name__ => "bytes"
type(est.BestExporter("b", SERVING).export(trained(), b"base", trained().latest_checkpoint(), {"loss": 1.0}, False)).__name__ => "bytes"
described(export.ServingInputReceiver({"a": c(1.0), "b": tf.SparseTensor([[0, 0]], [1.0], [1, 1])}, {"e": shaped(None)})) => ["ServingInputReceiver", {"'a'": ["Tensor", "float32", []], "'b'": ["SparseTensor", "float32", [1, 1]]}, {"'e'": ["Tensor", "float32", [null]]}, null]
described(export.ServingInputReceiver(c(1.0), shaped(None))) => ["ServingInputReceiver", {"'feature'": ["Tensor", "float32", []]}, {"'input'": ["Tensor", "float32", [null]]}, null]
described(export.ServingInputReceiver(c(1.0), shaped(None), {"a": shaped(None), "b": {"x": shaped(None)}})) => raises AttributeError
export.ServingInputReceiver(c(1.0), shaped(None)).receiver_tensors_alternatives => null
described(export.ServingInputReceiver({0: c(1.0), "a": c(2.0)}, shaped(None))) => ["ServingInputReceiver", {"0": ["Tensor", "float32", []], "'a'": ["Tensor", "float32", []]}, {"'input'": ["Tensor", "float32", [null]]}, null]
described(export.ServingInputReceiver({"r": tf.ragged.constant([[1.0], []])}, shaped(None))) => ["ServingInputReceiver", {"'r'": ["RaggedTensor", "float32", [2, null]]}, {"'input'": ["Tensor", "float32", [null]]}, null]
described(export.ServingInputReceiver(features=c(1.0), receiver_tensors=shaped(None))) => ["ServingInputReceiver", {"'feature'": ["Tensor", "float32", []]}, {"'input'": ["Tensor", "float32", [null]]}, null]
export.ServingInputReceiver(None, shaped(None)) => raises ValueError
export.ServingInputReceiver(c(1.0), None) => raises ValueError
export.ServingInputReceiver({1.5: c(1.0)}, shaped(None)) => raises ValueError
export.ServingInputReceiver({"a": [1]}, shaped(None)) => raises ValueError
export.ServingInputReceiver({"a": 1}, shaped(None)) => raises ValueError
export.ServingInputReceiver(c(1.0), {1: shaped(None)}) => raises ValueError
export.ServingInputReceiver(c(1.0), {"a": [1]}) => raises ValueError
export.ServingInputReceiver(c(1.0), shaped(None), 7) => raises ValueError
export.ServingInputReceiver(c(1.0), shaped(None), {"a": 7}) => raises ValueError
export.ServingInputReceiver(c(1.0), shaped(None), {"a": {1: c(1.0)}}) => raises ValueError
export.ServingInputReceiver({}, {}).features => {}
export.ServingInputReceiver({"a": Labeled(c(1.0))}, {"b": Labeled(c(2.0))}).features["a"].__class__.__name__ => "Labeled"
export.ServingInputReceiver(Labeled(c(1.0)), shaped(None)).features["feature"].__class__.__name__ => "Labeled"
export.ServingInputReceiver({"v": tf.get_variable("v", [])}, shaped(None)).features["v"].__class__.__name__ => raises ValueError
export.ServingInputReceiver._fields => ["features", "receiver_tensors", "receiver_tensors_alternatives"]
export.TensorServingInputReceiver._fields => ["features", "receiver_tensors", "receiver_tensors_alternatives"]
described(export.TensorServingInputReceiver(c(1.0), shaped(None))) => ["TensorServingInputReceiver", ["Tensor", "float32", []], {"'input'": ["Tensor", "float32", [null]]}, null]
described(export.TensorServingInputReceiver(tf.SparseTensor([[0, 0]], [1.0], [1, 1]), {"e": shaped(None)}, {"b": {"x": shaped(None)}})) => raises AttributeError
export.TensorServingInputReceiver(None, shaped(None)) => raises ValueError
export.TensorServingInputReceiver({"a": c(1.0)}, shaped(None)) => raises ValueError
export.TensorServingInputReceiver(c(1.0), None) => raises ValueError
export.TensorServingInputReceiver([1, 2], shaped(None)) => raises ValueError
raw({"a": tf.constant([[1.0]]), "b": tf.constant(["x"])}) => ["ServingInputReceiver", {"'a'": ["Tensor", "float32", [null, 1]], "'b'": ["Tensor", "string", [null]]}, {"'a'": ["Tensor", "float32", [null, 1]], "'b'": ["Tensor", "string", [null]]}, null]
raw({"a": tf.constant([[1.0]])}, 10) => ["ServingInputReceiver", {"'a'": ["Tensor", "float32", [10, 1]]}, {"'a'": ["Tensor", "float32", [10, 1]]}, null]
raw({"a": tf.placeholder(tf.string), "b": tf.placeholder(tf.float32)}) => ["ServingInputReceiver", {"'a'": ["Tensor", "string", null], "'b'": ["Tensor", "float32", null]}, {"'a'": ["Tensor", "string", null], "'b'": ["Tensor", "float32", null]}, null]
raw({"a": tf.constant(1.0)}) => ["ServingInputReceiver", {"'a'": ["Tensor", "float32", [null]]}, {"'a'": ["Tensor", "float32", [null]]}, null]
raw({"a": tf.Variable([1.0])}) => ["ServingInputReceiver", {"'a'": ["Tensor", "float32", [null]]}, {"'a'": ["Tensor", "float32", [null]]}, null]
raw({}) => ["ServingInputReceiver", {}, {}, null]
names_of(export.build_raw_serving_input_receiver_fn({"a": tf.constant([1.0], name="own"), "b": tf.placeholder(tf.float32, [None], name="p/q")})()) => ["own_1:0", "p/q_1:0"]
names_of(export.build_raw_serving_input_receiver_fn({"a": tf.constant([1.0])})()) => ["Const_1:0"]
raw({"x": tf.VarLenFeature(tf.int64), "y": tf.FixedLenFeature([2], tf.float32)}, None, export.build_parsing_serving_input_receiver_fn) => ["ServingInputReceiver", {"'x'": ["SparseTensor", "int64", [null, null]], "'y'": ["Tensor", "float32", [null, 2]]}, {"'examples'": ["Tensor", "string", [null]]}, null]
raw({"x": tf.VarLenFeature(tf.int64)}, 5, export.build_parsing_serving_input_receiver_fn) => ["ServingInputReceiver", {"'x'": ["SparseTensor", "int64", [null, null]]}, {"'examples'": ["Tensor", "string", [5]]}, null]
raw({}, None, export.build_parsing_serving_input_receiver_fn) => raises ValueError
names_of(export.build_parsing_serving_input_receiver_fn({"x": tf.VarLenFeature(tf.int64)})()) => ["input_example_tensor:0"]
supervised({"a": tf.constant([[1.0]])}, tf.constant([1])) => ["SupervisedInputReceiver", {"'a'": ["Tensor", "float32", [null, 1]]}, ["Tensor", "int32", [null]], {"'a'": ["Tensor", "float32", [null, 1]], "'label'": ["Tensor", "int32", [null]]}]
supervised({"a": tf.constant([[1.0]])}, {"b": tf.constant([1])}) => ["SupervisedInputReceiver", {"'a'": ["Tensor", "float32", [null, 1]]}, {"'b'": ["Tensor", "int32", [null]]}, {"'a'": ["Tensor", "float32", [null, 1]], "'b'": ["Tensor", "int32", [null]]}]
supervised(tf.constant([[1.0]]), tf.constant([1])) => ["SupervisedInputReceiver", ["Tensor", "float32", [null, 1]], ["Tensor", "int32", [null]], {"'input'": ["Tensor", "float32", [null, 1]], "'label'": ["Tensor", "int32", [null]]}]
supervised(tf.constant([[1.0]]), {"b": tf.constant([1])}, 10) => ["SupervisedInputReceiver", ["Tensor", "float32", [10, 1]], {"'b'": ["Tensor", "int32", [10]]}, {"'input'": ["Tensor", "float32", [10, 1]], "'b'": ["Tensor", "int32", [10]]}]
supervised(tf.constant([[1.0]]), {"input": tf.constant([1])}) => raises ValueError
supervised({"label": tf.constant([[1.0]])}, tf.constant([1])) => raises ValueError
supervised({"a": tf.constant([1.0])}, {"a": tf.constant([1])}) => raises ValueError
supervised({"a": tf.placeholder(tf.string)}, tf.placeholder(tf.int64)) => ["SupervisedInputReceiver", {"'a'": ["Tensor", "string", null]}, ["Tensor", "int64", null], {"'a'": ["Tensor", "string", null], "'label'": ["Tensor", "int64", null]}]
supervised(tf.constant(1.0), tf.constant(1)) => ["SupervisedInputReceiver", ["Tensor", "float32", [null]], ["Tensor", "int32", [null]], {"'input'": ["Tensor", "float32", [null]], "'label'": ["Tensor", "int32", [null]]}]
names_of(est.experimental.build_raw_supervised_input_receiver_fn({"a": tf.constant([1.0], name="own")}, tf.constant([1.0], name="lab"))()) => ["lab_1:0", "own_1:0"]
export.PredictOutput({1: c(1.0)}) => raises ValueError
export.PredictOutput({"a": 1}) => raises ValueError
export.ClassificationOutput() => raises ValueError
made(lambda features, labels, mode, config: spec(mode, predictions=c(float(config))), params=None).model_fn(c(1.0), c(1.0), TRAIN, 3.0).mode => "train"
fitted().get_variable_value("w:0") => "float32"
warm(fitted().latest_checkpoint()) => 1.0
warm(fitted().export_saved_model("out", serving)) => 1.0
warm(est.WarmStartSettings(fitted().latest_checkpoint(), vars_to_warm_start=["w"])) => 1.0
warm(b"") => raises ValueError
type(made(plain(), warm_start_from=fitted().export_saved_model("out", serving)).export_saved_model("out2", serving)).__name__ => "bytes"
est.WarmStartSettings("a", var_name_to_vocab_info=None, var_name_to_prev_var_name=None) => ["a", ".*", {}, {}]
signatures(trained().export_saved_model(b"out", SERVING)) => {"serving_default": [["input"], ["y"], "serving/predict"]}
trained().export_saved_model(b"out", SERVING).startswith(b"out/") => true
signatures(trained().export_saved_model("out", SERVING, checkpoint_path=trained().latest_checkpoint().encode())) => {"serving_default": [["input"], ["y"], "serving/predict"]}
signatures(trained().export_savedmodel(b"out", SERVING)) => {"serving_default": [["input"], ["y"], "serving/predict"]}
files(fitted().export_saved_model(b"out", serving, as_text=True)) => ["saved_model.pbtxt", "variables/variables.data-00000-of-00001", "variables/variables.index"]
sorted(name for name, _ in tf.train.list_variables(tf.compat.as_text(fitted().export_saved_model("out", serving)) + "/variables/variables")) => ["global_step", "w"]
signatures(fitted(eval_metric_ops=lambda: {"m": (tf.constant([0]), tf.no_op())}).export_saved_model("out", super_receiver(), experimental_mode="eval"), "eval") => {"eval": [["label", "x"], ["loss", "metrics/m/update_op", "metrics/m/value", "predictions/y"], "supervised/eval"]}
signatures(fitted().export_saved_model("out", super_receiver()), "serve") => {"serving_default": [["label", "x"], ["y"], "serving/predict"]}
signatures(mode_all(fitted()), "train") => {"train": [["label", "x"], ["loss", "predictions/y"], "supervised/training"]}
signatures(mode_all(fitted(), ["eval"], b"out"), "eval") => {"eval": [["label", "x"], ["loss", "predictions/y"], "supervised/eval"]}
fitted().experimental_export_all_saved_models("out", {"train": serving}) => "bytes"
files(trained().export_saved_model(b"out", SERVING, assets_extra={b"a/b": __file__.encode()})) => ["assets.extra/a/b", "saved_model.pb", "variables/variables.data-00000-of-00001", "variables/variables.index"]
"""  # noqa: E501

# Input functions of arrays, exporters, TPUs, results of evaluations, and what of a checkpoint is missing.
OTHERS = """
numpy_input({}, shuffle=False) => "function"
numpy_input({}, shuffle=False)() => raises ValueError
numpy_input(3, shuffle=False)() => raises TypeError
numpy_input(np.array([]), shuffle=False)() => raises ValueError
numpy_input({"x": np.ones(3)}, {}, shuffle=False)() => raises ValueError
numpy_input({"x": np.ones(3)}, np.ones(2), shuffle=False)() => raises ValueError
numpy_input({"x": np.ones(3)}, {"x": np.ones(3)}, shuffle=False)() => raises ValueError
numpy_input({"x": np.ones(3)}) => raises ValueError
est.BestExporter("a", receivers, compare_fn=None) => raises ValueError
est.BestExporter("a", receivers, compare_fn=3) => raises TypeError
est.BestExporter("a", receivers, compare_fn=lambda best: True) => raises ValueError
tpu.TPUEstimatorSpec(TRAIN, eval_metrics=3) => raises ValueError
tpu.TPUEstimatorSpec(TRAIN, eval_metrics=(3, [])) => raises TypeError
tpu.TPUEstimatorSpec(TRAIN, host_call=(3, [])) => raises TypeError
tpu.TPUConfig(eval_training_input_configuration=1) => raises ValueError
tpu.TPUConfig(eval_training_input_configuration=5).eval_training_input_configuration => 5
tpu.TPUConfig(input_partition_dims=[[1], [2]]) => raises ValueError
tpu.TPUConfig(input_partition_dims=[[1]], num_cores_per_replica=2) => raises ValueError
tpu.TPUConfig(input_partition_dims=[[1]], num_cores_per_replica=2, per_host_input_for_training=3).input_partition_dims => [[1]]
tpu.RunConfig().cluster => null
tpu.RunConfig(master="m").evaluation_master => "m"
tpu.RunConfig(master="m", evaluation_master="").evaluation_master => ""
tpu.RunConfig(master="m").replace(model_dir="a").master => "m"
{name: type(value).__name__ for name, value in trained().evaluate(data).items()} => {"loss": "float32", "global_step": "int64"}
export.PredictOutput is export_output.PredictOutput => true
isinstance(predicted().export_outputs["serving_default"], export_output.PredictOutput) => true
predicted(export_outputs={"a": export_output.RegressionOutput(c(1.0))}).export_outputs.__len__() => 2
made(lambda features, labels, mode, params: Spec(mode, loss=tf.get_variable("other", [])), trained().model_dir, params={}).evaluate(data) => raises NotFoundError
made(lambda features, labels, mode, params: Spec(mode, loss=tf.reduce_sum(tf.get_variable("w", [3]))), trained().model_dir, params={}).evaluate(data) => raises InvalidArgumentError
made(params={}, warm_start_from="missing").train(data, steps=1) => raises NotFoundError
made(params={}).train(lambda: (1.0, 2.0, 3.0), steps=1) => raises ValueError
made(params={}).train(lambda: (one for one in [1.0]), steps=1) => raises TypeError
"""  # noqa: E501

WRONG = """
est.TrainSpec("input") => raises TypeError
est.TrainSpec(None) => raises TypeError
est.TrainSpec(data, max_steps="3") => raises TypeError
est.TrainSpec(data, max_steps=0) => raises ValueError
est.TrainSpec(data, max_steps=-1) => raises ValueError
est.TrainSpec(data, hooks=[1]) => raises TypeError
est.TrainSpec(data, hooks=Hook()) => raises TypeError
est.TrainSpec(data, hooks=[Hook]) => raises TypeError
est.TrainSpec(data, saving_listeners=[1]) => raises TypeError
est.TrainSpec(data, saving_listeners=Listener()) => raises TypeError
est.TrainSpec() => raises TypeError
est.TrainSpec(data, steps=1) => raises TypeError
est.EvalSpec("input") => raises TypeError
est.EvalSpec(data, steps=0) => raises ValueError
est.EvalSpec(data, steps=-3) => raises ValueError
est.EvalSpec(data, steps="3") => raises TypeError
est.EvalSpec(data, name=3) => raises TypeError
est.EvalSpec(data, name="") => ["function", 100, "", [], [], 120, 600]
est.EvalSpec(data, hooks=[1]) => raises TypeError
est.EvalSpec(data, exporters=[1]) => raises TypeError
est.EvalSpec(data, exporters=7) => raises TypeError
est.EvalSpec(data, exporters="a") => raises TypeError
est.EvalSpec(data, exporters=[est.FinalExporter("a", SERVING), est.FinalExporter("a", SERVING)]) => raises ValueError
est.EvalSpec(data, start_delay_secs=-1) => raises ValueError
est.EvalSpec(data, throttle_secs=-1) => raises ValueError
est.EvalSpec(data, start_delay_secs="1") => raises TypeError
est.EvalSpec(data, throttle_secs=None) => raises TypeError
est.EvalSpec() => raises TypeError
est.train_and_evaluate(made(params={}), 1, est.EvalSpec(data)) => raises TypeError
est.train_and_evaluate(made(params={}), est.TrainSpec(data), 1) => raises TypeError
est.train_and_evaluate(1, est.TrainSpec(data, max_steps=1), est.EvalSpec(data)) => raises TypeError
est.train_and_evaluate(made(params={}), est.EvalSpec(data), est.TrainSpec(data)) => raises TypeError
est.train_and_evaluate(made(params={}), est.TrainSpec(data, max_steps=1)) => raises TypeError
est.train_and_evaluate(None, est.TrainSpec(data, max_steps=1), est.EvalSpec(data)) => raises TypeError
est.train_and_evaluate(made(params={}), None, est.EvalSpec(data)) => raises TypeError
est.train_and_evaluate(made(params={}), est.TrainSpec(data, max_steps=1), None) => raises TypeError
trained().train(data, steps=0) => raises ValueError
trained().train(data, steps=-1) => raises ValueError
trained().train(data, max_steps=0) => raises ValueError
trained().train(data, steps=1, max_steps=2) => raises ValueError
trained().train(data, steps="1") => raises TypeError
trained().train(data, max_steps="1") => raises TypeError
trained().train("data", steps=1) => raises TypeError
trained().train(None, steps=1) => raises TypeError
trained().train(steps=1) => raises TypeError
trained().train(data, hooks=[1], steps=1) => raises TypeError
trained().train(data, hooks=Hook(), steps=1) => raises TypeError
trained().train(data, hooks=["a"], steps=1) => raises TypeError
trained().train(data, saving_listeners=[1], steps=1) => raises TypeError
trained().train(data, saving_listeners=1, steps=1) => raises TypeError
trained().train(lambda mode, other: data(), steps=1) => raises TypeError
trained().train(lambda: None, steps=1) => raises ValueError
trained().train(lambda: 3, steps=1) => raises ValueError
trained().train(lambda: "a", steps=1) => raises TypeError
trained().evaluate(data, steps=0) => raises ValueError
trained().evaluate(data, steps=-1) => raises ValueError
trained().evaluate(data, steps="1") => raises TypeError
trained().evaluate(None, steps=1) => raises TypeError
trained().evaluate("data", steps=1) => raises TypeError
trained().evaluate(data, hooks=[1], steps=1) => raises TypeError
trained().evaluate(data, hooks=1, steps=1) => raises TypeError
trained().evaluate(data, checkpoint_path="missing", steps=1) => raises ValueError
trained().evaluate(data, name=3, steps=1)["global_step"] > 0 => raises TypeError
trained().evaluate(lambda: (1.0, 2.0, 3.0), steps=1) => raises ValueError
next(trained().predict(None)) => raises TypeError
next(trained().predict("data")) => raises TypeError
next(trained().predict(data, predict_keys="other")) => raises ValueError
next(trained().predict(data, predict_keys=["other"])) => raises ValueError
next(trained().predict(data, predict_keys=7)) => raises TypeError
next(trained().predict(data, hooks=[1])) => raises TypeError
next(trained().predict(data, checkpoint_path="missing")) => raises ValueError
next(trained().predict(lambda: None)) => raises ValueError
trained().get_variable_value("other") => raises NotFoundError
trained().get_variable_value(3) => raises AttributeError
trained().get_variable_value(None) => raises AttributeError
made(params={}).get_variable_value("w") => raises ValueError
made(params={}).get_variable_names() => raises ValueError
made(params={}).latest_checkpoint() => null
trained().export_saved_model("out", None) => raises ValueError
trained().export_saved_model("out", 7) => raises TypeError
trained().export_saved_model("out", lambda: None) => raises AttributeError
trained().export_saved_model("out", lambda: 7) => raises AttributeError
trained().export_saved_model("out", lambda: ({"x": c(1.0)}, {"x": c(1.0)})) => raises AttributeError
trained().export_saved_model("out", SERVING, checkpoint_path="missing") => raises ValueError
trained().export_saved_model("out", SERVING, assets_extra={"a": "missing"}) => raises NotFoundError
trained().export_saved_model("out", SERVING, assets_extra=["a"]) => raises AttributeError
trained().export_saved_model("out", SERVING, experimental_mode="other") => raises ValueError
trained().export_saved_model(None, SERVING) => raises TypeError
trained().export_saved_model(7, SERVING) => raises TypeError
made(params={}).export_saved_model("out", SERVING) => raises ValueError
trained().experimental_export_all_saved_models("out", {}) => raises ValueError
trained().experimental_export_all_saved_models("out", {"other": SERVING}) => raises ValueError
trained().experimental_export_all_saved_models("out", None) => raises AttributeError
trained().experimental_export_all_saved_models("out", [SERVING]) => raises AttributeError
of(lambda mode: None).train(data, steps=1) => raises ValueError
of(lambda mode: 7).train(data, steps=1) => raises ValueError
of(lambda mode: {"loss": c(1.0)}).train(data, steps=1) => raises ValueError
of(lambda mode: spec("eval")).train(data, steps=1)["a"] => raises TypeError
of(lambda mode: tf.nothing).train(data, steps=1) => raises AttributeError
of(lambda mode: {}["a"]).train(data, steps=1) => raises KeyError
of(lambda mode: 1 / 0).train(data, steps=1) => raises ZeroDivisionError
of(lambda mode: tf.get_variable("w", [2]) + tf.get_variable("w", [2])).train(data, steps=1) => raises ValueError
of(lambda mode: [tf.get_variable("w"), 1]).train(data, steps=1) => raises ValueError
of(lambda mode: tf.matmul(rows(2), rows(3))).train(data, steps=1) => raises ValueError
of(lambda mode: tf.ones([2]) + tf.ones([3])).train(data, steps=1) => raises ValueError
of(lambda mode: c(1.0) + tf.constant(1)).train(data, steps=1) => raises TypeError
of(lambda mode: tf.reshape(rows(2), [3, 3])).train(data, steps=1) => raises ValueError
of(lambda mode: tf.layers.dense(c(1.0), 2)).train(data, steps=1) => raises ValueError
of(lambda mode: spec(mode, loss=elsewhere())).train(data, steps=1) => raises ValueError
of(lambda mode: spec(mode, loss=tf.constant(np.nan))).train(data, steps=1) => raises NanLossDuringTrainingError
of(lambda mode: spec(mode, eval_metric_ops={"loss": tf.metrics.mean(c(1.0))})).train(data, steps=1).evaluate(data, steps=1) => raises ValueError
of(lambda mode: spec(mode, eval_metric_ops={"global_step": tf.metrics.mean(c(1.0))})).train(data, steps=1).evaluate(data, steps=1) => raises ValueError
of(lambda mode: spec(mode, training_hooks=[1])).train(data, steps=1) => raises TypeError
of(lambda mode: spec(mode, training_hooks=Hook())).train(data, steps=1) => raises TypeError
of(lambda mode: spec(mode, evaluation_hooks=[1])).train(data, steps=1) => raises TypeError
of(lambda mode: spec(mode, scaffold=1)).train(data, steps=1) => raises TypeError
of(lambda mode: spec(mode, loss=tf.check_numerics(tf.log(c(-1.0)), "bad"))).train(data, steps=1) => raises InvalidArgumentError
of(lambda mode: spec(mode, loss=tf.Print(c(1.0), [c(2.0)]) + tf.gather(c(1.0, 2.0), tf.cast(tf.random_uniform([]), tf.int32) + 5))).train(data, steps=1) => raises InvalidArgumentError
of(lambda mode: spec(mode, train_op=tf.group(tf.assign_add(tf.train.get_global_step(), 1), tf.assert_equal(tf.train.get_global_step(), tf.constant(7, tf.int64))))).train(data, steps=1) => raises InvalidArgumentError
of(lambda mode: spec(mode, train_op=tf.py_func(lambda: 1 / 0, [], tf.float32))).train(data, steps=1) => raises UnknownError
est.WarmStartSettings() => raises TypeError
est.WarmStartSettings(None) => raises ValueError
est.WarmStartSettings("") => raises ValueError
est.WarmStartSettings("a", vars_to_warm_start=7).vars_to_warm_start => 7
made(params={}, warm_start_from=7) => raises ValueError
made(params={}, warm_start_from="") => raises ValueError
made(params={}, warm_start_from={"a": 1}) => raises ValueError
made(params={}, warm_start_from=est.WarmStartSettings(7)).train(data, steps=1) => raises TypeError
made(params={}, warm_start_from=est.WarmStartSettings("missing")).train(data, steps=1) => raises NotFoundError
made(params={}, warm_start_from=est.WarmStartSettings(trained().model_dir, vars_to_warm_start=7)).train(data, steps=1) => raises ValueError
made(params={}, warm_start_from=est.WarmStartSettings(trained().model_dir, vars_to_warm_start=[7])).train(data, steps=1) => raises ValueError
made(params={}, warm_start_from=est.WarmStartSettings(trained().model_dir, var_name_to_prev_var_name={"w": "other"})).train(data, steps=1) => raises ValueError
made(params={}, warm_start_from=est.WarmStartSettings(trained().model_dir, var_name_to_prev_var_name={"other": "w"})).train(data, steps=1) => raises ValueError
made(params={}, warm_start_from=est.WarmStartSettings(trained().model_dir, var_name_to_vocab_info={"other": 1})).train(data, steps=1) => raises ValueError
est.VocabInfo() => raises TypeError
est.VocabInfo("a") => raises TypeError
est.VocabInfo("a", 1) => raises TypeError
est.VocabInfo("a", 1, 0, "b", axis=3) => raises ValueError
est.VocabInfo("a", 1, 0, "b", -1, None, 3) => raises ValueError
est.LatestExporter("a", None) => "LatestExporter"
est.LatestExporter(None, SERVING) => "LatestExporter"
est.LatestExporter("a", SERVING, exports_to_keep=0) => raises ValueError
est.LatestExporter("a", SERVING, exports_to_keep=-1) => raises ValueError
est.LatestExporter("a", SERVING, exports_to_keep="1") => raises TypeError
est.LatestExporter() => raises TypeError
est.FinalExporter(7, SERVING).name => 7
est.FinalExporter("a") => raises TypeError
est.BestExporter("a", SERVING, compare_fn=None) => raises ValueError
est.BestExporter("a", SERVING, compare_fn=7) => raises TypeError
est.BestExporter("a", SERVING, compare_fn=lambda best: True) => raises ValueError
est.BestExporter("a", SERVING, exports_to_keep=0) => raises ValueError
est.BestExporter("a", None).name => "a"
est.BestExporter(serving_input_receiver_fn=None).name => "best_exporter"
est.BestExporter("a", SERVING).export(trained(), "base", "no", None, False) => raises ValueError
est.BestExporter("a", SERVING).export(trained(), "base", "no", {}, False) => raises ValueError
est.BestExporter("a", SERVING).export(trained(), "base", "no", {"other": 1.0}, False) => raises ValueError
est.LoggingTensorHook([c(1.0)]) => raises ValueError
est.LoggingTensorHook(["a"], every_n_iter=0) => raises ValueError
est.LoggingTensorHook(["a"], every_n_iter=1, every_n_secs=1) => raises ValueError
est.LoggingTensorHook(["a"], every_n_iter=-1) => raises ValueError
est.LoggingTensorHook(7, every_n_iter=1) => raises TypeError
trained().train(data, hooks=[est.LoggingTensorHook(["missing:0"], every_n_iter=1)], steps=1) => raises KeyError
trained().train(data, hooks=[est.LoggingTensorHook({"a": "missing"}, every_n_iter=1)], steps=1) => raises KeyError
est.StopAtStepHook() => raises ValueError
est.StopAtStepHook(1, 2) => raises ValueError
est.StopAtStepHook("1") => "StopAtStepHook"
est.CheckpointSaverHook("a") => raises ValueError
est.CheckpointSaverHook("a", save_secs=1, save_steps=1) => raises ValueError
est.CheckpointSaverHook("a", save_steps=1, saver=1, scaffold=2) => raises ValueError
est.CheckpointSaverHook(save_steps=1) => raises TypeError
est.StepCounterHook(1, 2) => raises ValueError
est.StepCounterHook(None, None) => raises ValueError
est.SummarySaverHook() => raises ValueError
est.SummarySaverHook(1) => raises ValueError
est.SummarySaverHook(1, output_dir="a") => raises ValueError
est.SummarySaverHook(1, summary_op=1, scaffold=2) => raises ValueError
est.SummarySaverHook(1, 2, summary_op=1) => raises ValueError
est.NanTensorHook() => raises TypeError
est.ProfilerHook() => raises ValueError
est.ProfilerHook(1, 2) => raises ValueError
est.FeedFnHook() => raises TypeError
est.FinalOpsHook() => raises TypeError
est.GlobalStepWaiterHook() => raises TypeError
est.SecondOrStepTimer() => raises ValueError
est.SecondOrStepTimer(1, 2) => raises ValueError
est.experimental.make_early_stopping_hook(1, lambda: True) => raises TypeError
est.experimental.make_early_stopping_hook(made(), 7) => raises TypeError
est.experimental.make_early_stopping_hook(made(), lambda: True, run_every_secs=1, run_every_steps=1) => raises ValueError
est.experimental.make_early_stopping_hook(made(), lambda: True, run_every_secs=None) => raises ValueError
est.experimental.stop_if_lower_hook(1, "loss", 1) => raises AttributeError
est.experimental.stop_if_no_decrease_hook(made(), "loss") => raises TypeError
est.experimental.stop_if_higher_hook(made(), "loss", 1.0, run_every_secs=None, run_every_steps=None) => raises ValueError
est.experimental.InMemoryEvaluatorHook(made(), data, every_n_iter=0) => raises ValueError
est.experimental.InMemoryEvaluatorHook(1, data) => raises AttributeError
est.experimental.InMemoryEvaluatorHook(made(), data, hooks=[1]) => raises TypeError
est.experimental.make_stop_at_checkpoint_step_hook(1, 2) => raises AttributeError
est.DNNClassifier([4]) => raises TypeError
est.DNNClassifier(hidden_units=[4]) => raises TypeError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], n_classes=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], n_classes="3") => raises TypeError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], n_classes=0) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], label_vocabulary="ab") => raises TypeError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], label_vocabulary=["a"], n_classes=3) => "DNNClassifier"
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], loss_reduction="other") => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], optimizer="other").train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], optimizer=7).train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], ["x"]).train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], []).train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier(4, [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises TypeError
est.DNNClassifier(["a"], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], dropout="a").train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], activation_fn="other").train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.categorical_column_with_identity("x", 3)]).train(lambda: ({"x": [[1]]}, [[0]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"y": rows(2)}, [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: (rows(2), [[0], [1]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, None), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: {"x": rows(2)}, steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, [[0], [2]]), steps=1) => raises InvalidArgumentError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], n_classes=3).train(lambda: ({"x": rows(2)}, [[0], [7]]), steps=1) => raises InvalidArgumentError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], n_classes=3).train(lambda: ({"x": rows(2)}, [[0.5], [1.0]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], n_classes=3).train(lambda: ({"x": rows(2)}, [["a"], ["b"]]), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], label_vocabulary=["a", "b"]).train(lambda: ({"x": rows(2)}, [["a"], ["c"]]), steps=1) => raises InvalidArgumentError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], label_vocabulary=["a", "b"]).train(lambda: ({"x": rows(2)}, [[0], [1]]), steps=1) => raises TypeError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, rows(3)), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, rows(2, 2)), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x", shape=3)]).train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], weight_column=7) => "DNNClassifier"
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], weight_column="w").train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => raises ValueError
est.DNNClassifier([4], [tf.feature_column.numeric_column("x")], nothing=1) => raises TypeError
est.LinearClassifier([]) => "LinearClassifier"
est.LinearClassifier("x") => "LinearClassifier"
est.LinearClassifier([tf.feature_column.numeric_column("x")], sparse_combiner="other").train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => "LinearClassifier"
est.LinearRegressor([tf.feature_column.numeric_column("x")], label_dimension=0) => raises ValueError
est.LinearRegressor([tf.feature_column.numeric_column("x")], label_dimension=2).train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => raises ValueError
est.LinearRegressor([tf.feature_column.numeric_column("x")], label_dimension="2") => raises TypeError
est.LinearRegressor([tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, [["a"], ["b"]]), steps=1) => raises UnimplementedError
est.DNNLinearCombinedClassifier() => raises ValueError
est.DNNLinearCombinedClassifier(dnn_feature_columns=[tf.feature_column.numeric_column("x")]) => "DNNLinearCombinedClassifier"
est.DNNLinearCombinedClassifier(dnn_hidden_units=[4]) => raises ValueError
est.DNNRegressor() => raises TypeError
est.DNNEstimator(7, [4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => raises AttributeError
est.DNNEstimator(None, [4], [tf.feature_column.numeric_column("x")]).train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => raises AttributeError
est.LinearEstimator(est.RegressionHead(), []).train(lambda: ({"x": rows(2)}, rows(2)), steps=1) => raises ValueError
est.BaselineClassifier(n_classes=1) => raises ValueError
est.BaselineRegressor(label_dimension=0) => raises ValueError
est.BaselineClassifier().train(lambda: ({"x": rows(2)}, [[3], [4]]), steps=1) => raises InvalidArgumentError
est.inputs.numpy_input_fn({"x": np.ones(2)}, np.ones(3), shuffle=False)() => raises ValueError
est.inputs.numpy_input_fn({"x": np.ones(2)}) => raises ValueError
est.inputs.numpy_input_fn([1], shuffle=False)() => raises TypeError
est.inputs.numpy_input_fn({}, shuffle=False)() => raises ValueError
est.inputs.numpy_input_fn({"x": [1]}, shuffle=False)() => raises AttributeError
est.inputs.numpy_input_fn({"x": np.ones(2)}, {}, shuffle=False) => "function"
est.classifier_parse_example_spec([tf.feature_column.numeric_column("x")], "x") => raises ValueError
est.classifier_parse_example_spec([tf.feature_column.numeric_column("x")], None) => {"x": [[1], "DType", null], "null": [[1], "DType", null]}
est.classifier_parse_example_spec(["x"], "y") => raises ValueError
est.classifier_parse_example_spec([tf.feature_column.numeric_column("x")], "y", label_default="a") => {"x": [[1], "DType", null], "y": [[1], "DType", "a"]}
est.classifier_parse_example_spec([tf.feature_column.numeric_column("x")], "y", weight_column=7) => raises ValueError
est.regressor_parse_example_spec([tf.feature_column.numeric_column("x")], "y", label_dimension="a") => {"x": [[1], "DType", null], "y": [["a"], "DType", null]}
est.add_metrics(1, lambda: {}) => raises AttributeError
est.add_metrics(made(), 7) => raises TypeError
est.add_metrics(made(), lambda other: {}) => raises ValueError
est.add_metrics(trained(), lambda features: 7).evaluate(data, steps=1) => raises TypeError
est.add_metrics(trained(), lambda features: {"a": 7}).evaluate(data, steps=1) => raises TypeError
est.RunConfig(7) => "RunConfig"
est.RunConfig(model_dir="a", nothing=1) => raises TypeError
est.RunConfig(save_checkpoints_steps="a") => raises TypeError
est.RunConfig(save_checkpoints_steps=-1) => raises ValueError
est.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1) => raises ValueError
est.RunConfig(save_summary_steps="a") => raises TypeError
est.RunConfig(keep_checkpoint_max=-1) => raises ValueError
est.RunConfig(keep_checkpoint_max="a") => raises TypeError
est.RunConfig(keep_checkpoint_every_n_hours=0) => raises ValueError
est.RunConfig(log_step_count_steps=0) => raises ValueError
est.RunConfig(tf_random_seed=1.5) => raises ValueError
est.RunConfig(tf_random_seed="a") => raises ValueError
est.RunConfig(session_config="a") => raises ValueError
est.RunConfig(device_fn=lambda: 1) => raises ValueError
est.RunConfig(device_fn=7) => raises ValueError
est.RunConfig(protocol="other") => raises ValueError
est.RunConfig(session_creation_timeout_secs=0) => raises ValueError
est.RunConfig(experimental_max_worker_delay_secs="a") => raises ValueError
est.RunConfig(train_distribute="mirrored").train_distribute => "mirrored"
est.RunConfig().replace(nothing=1) => raises ValueError
est.RunConfig().replace(task_id=1) => raises ValueError
est.RunConfig().replace(save_checkpoints_steps=1, save_checkpoints_secs=1) => raises ValueError
est.RunConfig().replace(model_dir="") => raises ValueError
est.RunConfig().nothing => raises AttributeError
setattr(est.RunConfig(), "model_dir", "a") => raises AttributeError
est.ModeKeys.OTHER => raises AttributeError
est.ModeKeys("train") => raises TypeError
export.build_parsing_serving_input_receiver_fn(7)() => raises TypeError
export.build_parsing_serving_input_receiver_fn({"x": 7})() => raises ValueError
export.build_raw_serving_input_receiver_fn(7) => "function"
export.build_raw_serving_input_receiver_fn({"x": 7})() => raises AttributeError
export.build_raw_serving_input_receiver_fn({7: shaped(None)})() => raises ValueError
export.ClassificationOutput() => raises ValueError
export.RegressionOutput("a") => raises ValueError
export.PredictOutput(7) => raises ValueError
export.ServingInputReceiver(None, c(1.0)) => raises ValueError
export.ServingInputReceiver({"x": c(1.0)}, None) => raises ValueError
export.TensorServingInputReceiver({"x": c(1.0)}, c(1.0)) => raises ValueError
"""  # noqa: E501

OPTIMIZERS = """
own_optimizer(lambda o, loss, variables, step: o.get_updates(loss, variables)[0]) => [{"Fading/learning_rate": 0.1, "Fading/momentum": 0.5, "Fading/table/largest": [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], "Fading/table/velocity": [[3.06, 3.06], [0.0, 0.0], [3.06, 3.06]], "Fading/w/largest": 10.0, "Fading/w/velocity": -16.3875, "global_step": 3.0, "table": [[0.779, 0.779], [1.0, 1.0], [0.779, 0.779]], "w": 0.22713}, 10.2851]
own_optimizer(lambda o, loss, variables, step: o.minimize(loss, variables)) => raises ValueError
own_optimizer(lambda o, loss, variables, step: o.apply_gradients(zip(tf.gradients(loss, variables), variables))) => [{"Fading/learning_rate": 0.1, "Fading/momentum": 0.5, "Fading/table/largest": [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], "Fading/table/velocity": [[3.06, 3.06], [0.0, 0.0], [3.06, 3.06]], "Fading/w/largest": 10.0, "Fading/w/velocity": -16.3875, "global_step": 3.0, "table": [[0.779, 0.779], [1.0, 1.0], [0.779, 0.779]], "w": 0.22713}, 10.2851]
own_optimizer(lambda o, loss, variables, step: o.apply_gradients(o.get_gradients(loss, variables) and zip(o.get_gradients(loss, variables), variables), name="update")) => [{"Fading/learning_rate": 0.1, "Fading/momentum": 0.5, "Fading/table/largest": [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], "Fading/table/velocity": [[3.06, 3.06], [0.0, 0.0], [3.06, 3.06]], "Fading/w/largest": 10.0, "Fading/w/velocity": -16.3875, "global_step": 3.0, "table": [[0.779, 0.779], [1.0, 1.0], [0.779, 0.779]], "w": 0.22713}, 10.2851]
own_optimizer(lambda o, loss, variables, step: o.get_updates(loss, variables)[0], rate=keras_2().optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)) => [{"Fading/momentum": 0.5, "Fading/table/largest": [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], "Fading/table/velocity": [[2.71615, 2.71615], [0.0, 0.0], [2.71615, 2.71615]], "Fading/w/largest": 10.0, "Fading/w/velocity": -15.50502, "global_step": 3.0, "table": [[0.66281, 0.66281], [1.0, 1.0], [0.66281, 0.66281]], "w": 0.35068}, 8.5579]
own_optimizer(lambda o, loss, variables, step: tf.group(o.apply_gradients(zip(tf.gradients(loss, variables), variables))), steps=1) => [{"Fading/learning_rate": 0.1, "Fading/momentum": 0.5, "Fading/table/largest": [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], "Fading/table/velocity": [[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]], "Fading/w/largest": 10.0, "Fading/w/velocity": -10.0, "global_step": 1.0, "table": [[0.9, 0.9], [1.0, 1.0], [0.9, 0.9]], "w": 0.1}, 12.265]
own_optimizer(lambda o, loss, variables, step: tf.group(o.minimize(loss, variables), tf.assign_add(step, 1))) => raises ValueError
"""  # noqa: E501

VARIABLES = """
of_variable(lambda w, g: [w.to_proto().variable_name, w.to_proto().initializer_name, w.to_proto().snapshot_name]) => ["s/w:0", "s/w/Assign", "s/w/Read/ReadVariableOp:0"]
of_variable(lambda w, g: [w.to_proto().is_resource, w.to_proto().trainable, w.to_proto().synchronization, w.to_proto().aggregation]) => [true, true, 0, 0]
of_variable(lambda w, g: [w.to_proto("s").variable_name, w.to_proto("s/").variable_name, w.to_proto("other")]) => ["w:0", "w:0", null]
of_variable(lambda w, g: type(w.to_proto()).__name__) => "VariableDef"
of_variable(lambda w, g: [w.handle.op.name, w.handle.op.type, w.handle.name, w.handle.value_index, w.handle.graph is g]) => ["s/w", "VarHandleOp", "s/w:0", 0, true]
of_variable(lambda w, g: [w.handle.dtype.name, w.handle.shape.as_list()]) => ["resource", []]
of_variable(lambda w, g: w.handle.op == w.op) => true
of_variable(lambda w, g: [w.handle.op.node_def.name, w.handle.op.get_attr("dtype").name]) => ["s/w", "float32"]
of_variable(lambda w, g: g.get_tensor_by_name("s/w:0").dtype.name) => "resource"
of_variable(lambda w, g: tf.raw_ops.ReadVariableOp(resource=g.get_tensor_by_name("s/w:0"), dtype=tf.float32).shape.as_list()) => [2]
of_variable(lambda w, g: [g.get_operation_by_name("s/w").name, g.get_operation_by_name("s/w").type]) => ["s/w", "VarHandleOp"]
of_variable(lambda w, g: one(g.get_tensor_by_name("s/w/Read/ReadVariableOp:0"))) => ["Tensor", "float32", [2]]
of_variable(lambda w, g: g.as_graph_element("s/w:0").dtype.name) => "resource"
of_variable(lambda w, g: g.as_graph_element("s/w").name) => "s/w"
of_variable(lambda w, g: g.as_graph_element("s/w/Assign").name) => "s/w/Assign"
of_variable(lambda w, g: g.as_graph_element("s/w/Read/ReadVariableOp:0").dtype.name) => "float32"
of_variable(lambda w, g: g.get_operation_by_name("s/w/Assign").name) => "s/w/Assign"
of_variable(lambda w, g: g.get_tensor_by_name("s/v:0")) => raises KeyError
of_variable(lambda w, g: g.get_operation_by_name("s/v")) => raises KeyError
of_variable(lambda w, g: g.get_tensor_by_name("s/w")) => raises ValueError
of_variable(lambda w, g: g.get_tensor_by_name(3)) => raises TypeError
of_variable(lambda w, g: g.get_operation_by_name("s/w:0")) => raises ValueError
of_variable(lambda w, g: g.as_graph_element("s/w:1")) => raises KeyError
of_variable(lambda w, g: g.as_graph_element("s/v")) => raises KeyError
of_variable(lambda w, g: [w.name, w.op.name, w.shape.as_list(), w.get_shape().as_list(), w.dtype.name, w.trainable]) => ["s/w:0", "s/w", [2], [2], "float32", true]
of_variable(lambda w, g: [w.synchronization.name, w.aggregation.name, w.constraint, w._save_slice_info]) => ["AUTO", "NONE", null, null]
of_variable(lambda w, g: [w.op.node_def.op, w.op.node_def.name, len(w.op.inputs), len(w.op.control_inputs), len(w.op.outputs)]) => ["VarHandleOp", "s/w", 0, 0, 1]
of_variable(lambda w, g: [w.value().shape.as_list(), w.read_value().op.type, w.initial_value.shape.as_list(), w.graph is g]) => [[2], "Identity", [2], true]
of_variable(lambda w, g: [one(w.assign([1.0, 2.0])), one(w.assign_add([1.0, 1.0])), one(w.assign_sub([1.0, 1.0]))]) => [["_UnreadVariable", "float32", [2]], ["_UnreadVariable", "float32", [2]], ["_UnreadVariable", "float32", [2]]]
of_variable(lambda w, g: one(w.sparse_read([0]))) => ["Tensor", "float32", [1]]
of_variable(lambda w, g: one(w.gather_nd([[0]]))) => ["Tensor", "float32", [1]]
of_variable(lambda w, g: one(w.scatter_update(tf.IndexedSlices(c(1.0, 2.0), tf.constant([0, 1]))))) => ["_UnreadVariable", "float32", [2]]
of_variable(lambda w, g: one(w[0])) => ["Tensor", "float32", []]
of_variable(lambda w, g: len(list(w))) => raises OperatorNotAllowedInGraphError
of_variable(lambda w, g: len(w)) => raises TypeError
of_variable(lambda w, g: bool(w)) => raises OperatorNotAllowedInGraphError
of_variable(lambda w, g: float(w)) => raises AttributeError
of_variable(lambda w, g: w.numpy()) => raises NotImplementedError
of_variable(lambda w, g: w.eval()) => raises ValueError
of_variable(lambda w, g: w.count_up_to(3)) => raises TypeError
of_variable(lambda w, g: w.set_shape([3])) => raises ValueError
of_variable(lambda w, g: w.initialized_value()) => raises NotImplementedError
of_variable(lambda w, g: tf.Variable.from_proto(w.to_proto()).name) => "s/w:0"
of_variable(lambda w, g: w in tf.global_variables()) => true
of_variable(lambda w, g: one(tf.is_variable_initialized(w))[1:]) => ["bool", []]
of_variable(lambda w, g: one(tf.report_uninitialized_variables([w]))[1:]) => ["string", [null]]
of_variable(lambda w, g: [value is None for value in tf.gradients(w * 2.0, [w, w.handle])]) => [false, false]
of_variable(lambda w, g: w.nothing) => raises AttributeError
"""  # noqa: E501

TABLES = {
    "optimizers": OPTIMIZERS, "variables": VARIABLES, "wrong": WRONG, "heads": HEADS, "spec": SPEC, "config": CONFIG,
    "estimator": ESTIMATOR, "export": EXPORT, "others": OTHERS,
}  # fmt: skip


def receivers() -> Any:
    return export.build_raw_serving_input_receiver_fn({"x": tf.placeholder(tf.float32, [None])})


def expected(table: str) -> dict[str, Any]:
    """Call -> result of TensorFlow 2.15."""
    pairs = [line.rsplit(" => ", 1) for line in TABLES[table].splitlines() if line]
    return {call: text if text.startswith("raises ") else json.loads(text) for call, text in pairs}


def shown(value: Any) -> Any:
    """A result as JSON has it."""
    if isinstance(value, tuple | list):
        return [shown(one) for one in value]
    if isinstance(value, dict):
        return {key: shown(one) for key, one in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def result(call: str, names: dict[str, Any]) -> Any:
    """What a call comes to: its value, or which exception it raises, by its class of Python or TensorFlow."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        os.chdir(folder)
        try:
            return json.loads(json.dumps(shown(eval(call, names))))  # keys are texts there
        except Exception as error:
            known = (one for one in type(error).__mro__ if one.__module__.split(".")[0] in ("builtins", "tensorflow"))
            return f"raises {next(known).__name__}"
        finally:
            os.chdir(here)


def results(table: str) -> dict[str, Any]:
    return {call: result(call, globals()) for call in expected(table)}


if __name__ == "__main__":
    # A writer of events may open its file late, by a relative path, when `result` has come back to this folder.
    os.chdir(tempfile.mkdtemp())
    print(json.dumps({table: results(table) for table in sys.argv[1:]}))
