"""The table of tf.estimator 2.15's public names: where the runner has each, or what to use instead.

This module imports none of the runner's modules that it names, so it can be used without TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

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

NAMES: Mapping[str, str] = {
    **_COMMON,
    **_at("classic.premade.estimators", *_PREMADE),
}
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


def leads_to(table: Mapping[str, str], name: str) -> bool:
    """Report whether `name` is in the table, is a module of names in the table, or is an attribute of one of them."""
    return any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in table)


def lookup(table: Mapping[str, str], name: str, shown: str) -> Any:
    """Return the object of a public name.

    Args:
      table: name -> "module:attribute".
      name: a name in the table.
      shown: the name as the user wrote it, for messages.

    Raises:
      AttributeError: the name does not exist, or was removed; the message says what to use instead.
    """
    if name in GONE:
        raise AttributeError(f"{shown} is not available: {GONE[name]}.")
    if name not in table:
        raise AttributeError(f"there is no {shown}.{did_you_mean(name, table)}")
    module, _, attribute = table[name].partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # a module that it imports is missing
            raise
        raise AttributeError(f"{shown} is not available: this version of the runner has no module {module}.") from None
    return getattr(found, attribute)
