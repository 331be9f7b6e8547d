"""The table of tf.estimator 2.15's public names: where the runner has each, or what to use instead.

This module imports none of the runner's modules that it names, so it can be used without TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from runner.classic.compat.old_modules import MODULE, Space, modules_of, within
from runner.config.error_messages import did_you_mean


def _at(module: str, *names: str, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{name}": f"runner.{module}:{name}" for name in names}


_HOOKS_OF_TENSORFLOW = (
    "CheckpointSaverHook", "CheckpointSaverListener", "FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook",
    "LoggingTensorHook", "NanLossDuringTrainingError", "NanTensorHook", "SecondOrStepTimer",
    "SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook", "StopAtStepHook",
    "SummarySaverHook",
)  # fmt: skip
_PREMADE = (
    "BaselineClassifier", "BaselineEstimator", "BaselineRegressor", "DNNClassifier", "DNNEstimator", "DNNRegressor",
    "DNNLinearCombinedClassifier", "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor", "LinearClassifier",
    "LinearEstimator", "LinearRegressor",
)  # fmt: skip
EARLY_STOPPING = (
    "make_early_stopping_hook", "stop_if_higher_hook", "stop_if_lower_hook", "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
)  # fmt: skip
_RECEIVERS = (
    "ServingInputReceiver", "TensorServingInputReceiver", "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
)  # fmt: skip
_OUTPUTS = ("ClassificationOutput", "EvalOutput", "ExportOutput", "PredictOutput", "RegressionOutput")
_TPU = ("InputPipelineConfig", "RunConfig", "TPUConfig", "TPUEstimator", "TPUEstimatorSpec")

_COMMON: Mapping[str, str] = {
    **_at("model_fn", "EstimatorSpec", "ModeKeys"),
    **_at("classic.run_config", "RunConfig"),
    **_at("classic.estimator", "Estimator", "add_metrics"),
    **_at("classic.training", "EvalSpec", "TrainSpec", "train_and_evaluate"),
    **{name: f"tensorflow.compat.v1.train:{name}" for name in _HOOKS_OF_TENSORFLOW},
    **_at("classic.hooks", "ProfilerHook"),
    **_at("classic.hooks", "InMemoryEvaluatorHook", "make_stop_at_checkpoint_step_hook", prefix="experimental."),
    **_at("classic.early_stopping", *EARLY_STOPPING, prefix="experimental."),
    **_at("export.exporters", "BestExporter", "Exporter", "FinalExporter", "LatestExporter"),
    **_at("export.receivers", *_RECEIVERS, prefix="export."),
    **_at("export.receivers", "build_raw_supervised_input_receiver_fn", prefix="experimental."),
    **_at("export.outputs", *_OUTPUTS, prefix="export."),
    **_at("classic.heads.base", "Head"),
    **_at("classic.heads.classification", "BinaryClassHead", "MultiClassHead"),
    **_at("classic.heads.multi_head", "MultiHead"),
    **_at("classic.heads.multi_label", "MultiLabelHead"),
    **_at("classic.heads.regression", "LogisticRegressionHead", "PoissonRegressionHead", "RegressionHead"),
    **_at("classic.inputs", "classifier_parse_example_spec", "regressor_parse_example_spec"),
    **_at("classic.premade.logits", "call_logit_fn", prefix="experimental."),
    **_at("classic.warm_start", "VocabInfo", "WarmStartSettings"),
}

NAMES: Mapping[str, str] = {**_COMMON, **_at("classic.premade.estimators", *_PREMADE)}
"""`tf.estimator.<name>` -> "module:attribute"."""

V1_NAMES: Mapping[str, str] = {
    **_COMMON,
    **_at("classic.premade.v1", *_PREMADE),
    **_at("classic.premade.logits", "dnn_logit_fn_builder", "linear_logit_fn_builder", prefix="experimental."),
    **_at("classic.inputs", "numpy_input_fn", "pandas_input_fn", prefix="inputs."),
    **_at("classic.tpu", *_TPU, prefix="tpu."),
}
"""`tf.compat.v1.estimator.<name>` -> "module:attribute"."""

KERAS_NAMES: Mapping[str, str] = _at("classic.model_to_estimator", "model_to_estimator")
"""`tf.keras.estimator.<name>` -> "module:attribute"."""

GONE: Mapping[str, str] = {
    "BoostedTreesClassifier": "use the package tensorflow_decision_forests; TensorFlow dropped it in 2.13",
    "BoostedTreesEstimator": "use the package tensorflow_decision_forests; TensorFlow dropped it in 2.13",
    "BoostedTreesRegressor": "use the package tensorflow_decision_forests; TensorFlow dropped it in 2.13",
    "DistributeConfig": "give RunConfig(train_distribute=, eval_distribute=); there is no standalone client mode",
    "experimental.KMeans": "use sklearn.cluster.MiniBatchKMeans, or write the update as the train_op of a model_fn",
    "experimental.LinearSDCA": "use LinearClassifier or LinearRegressor with optimizer='Ftrl'",
    "experimental.RNNClassifier": "write a model_fn with keras.layers.LSTM and tf.estimator.MultiClassHead",
    "experimental.RNNEstimator": "write a model_fn with keras.layers.LSTM and a head",
    "SequentialHead": "write a model_fn, and mask the loss with EstimatorSpec(loss_weight=)",
    "tpu.experimental.EmbeddingConfigSpec": "use tf.tpu.experimental.embedding with strategy=tpu",
}
"""Removed names -> what to do instead."""


def reason(table: Iterable[str], name: str, shown: str) -> str:
    """Return the message about `name`, which is not in the table; `shown` is the name as users write it."""
    if name in GONE:
        return f"{shown} is not available: {GONE[name]}."
    return f"there is no {shown}.{did_you_mean(name, table)}"


def _space(table: Mapping[str, str]) -> Space:
    modules = modules_of((*table, *GONE))
    return Space(
        lambda name: MODULE if name in modules else table.get(name),
        functools.partial(reason, table),
        functools.partial(within, table),
    )


V1_SPACE, _KERAS = _space(V1_NAMES), _space(KERAS_NAMES)
SPACES: Mapping[str, Space] = {
    "tensorflow.estimator": _space(NAMES),
    "tensorflow.compat.v1.estimator": V1_SPACE,
    "tensorflow.keras.estimator": _KERAS,
    "tensorflow.compat.v1.keras.estimator": _KERAS,
}
"""Dotted name of tf.estimator -> what is below it."""
