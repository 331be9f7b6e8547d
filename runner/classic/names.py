"""Every public name of tf.estimator 2.15: where it is, or what to use instead. Imports nothing by itself."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any


def _at(module: str, *names: str, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{name}": f"runner.{module}:{name}" for name in names}


_HOOKS = (
    "CheckpointSaverHook", "CheckpointSaverListener", "FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook",
    "LoggingTensorHook", "NanLossDuringTrainingError", "NanTensorHook", "ProfilerHook", "SecondOrStepTimer",
    "SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook", "StopAtStepHook",
    "SummarySaverHook",
)  # fmt: skip
_HEADS = (
    "BinaryClassHead", "Head", "LogisticRegressionHead", "MultiClassHead", "MultiHead", "MultiLabelHead",
    "PoissonRegressionHead", "RegressionHead",
)  # fmt: skip
_EARLY_STOPPING = (
    "make_early_stopping_hook", "stop_if_higher_hook", "stop_if_lower_hook", "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
)  # fmt: skip

_COMMON: Mapping[str, str] = {
    **_at("model_fn", "EstimatorSpec", "ModeKeys"),
    **_at("classic.run_config", "RunConfig"),
    **_at("classic.estimator", "Estimator"),
    **_at("classic.training", "EvalSpec", "TrainSpec", "train_and_evaluate"),
    **_at("classic.hooks", *_HOOKS),
    **_at("classic.hooks", "InMemoryEvaluatorHook", "make_stop_at_checkpoint_step_hook", prefix="experimental."),
    **_at("classic.early_stopping", *_EARLY_STOPPING, prefix="experimental."),
    **_at("exporters", "BestExporter", "Exporter", "FinalExporter", "LatestExporter"),
    **_at(
        "receivers",
        "ServingInputReceiver",
        "TensorServingInputReceiver",
        "build_parsing_serving_input_receiver_fn",
        "build_raw_serving_input_receiver_fn",
        prefix="export.",
    ),
    **_at("receivers", "build_raw_supervised_input_receiver_fn", prefix="experimental."),
    **_at(
        "export_outputs",
        "ClassificationOutput",
        "EvalOutput",
        "ExportOutput",
        "PredictOutput",
        "RegressionOutput",
        prefix="export.",
    ),
    **_at("classic.heads", *_HEADS),
    **_at("classic.extenders", "add_metrics"),
    **_at("classic.parse_specs", "classifier_parse_example_spec", "regressor_parse_example_spec"),
    **_at("classic.logits", "call_logit_fn", prefix="experimental."),
    **_at("classic.warm_start", "VocabInfo", "WarmStartSettings"),
}

NAMES: Mapping[str, str] = {
    **_COMMON,
    **_at("classic.premade_baseline", "BaselineClassifier", "BaselineEstimator", "BaselineRegressor"),
    **_at("classic.premade_dnn", "DNNClassifier", "DNNEstimator", "DNNRegressor"),
    **_at(
        "classic.premade_combined",
        "DNNLinearCombinedClassifier",
        "DNNLinearCombinedEstimator",
        "DNNLinearCombinedRegressor",
    ),
    **_at("classic.premade_linear", "LinearClassifier", "LinearEstimator", "LinearRegressor"),
}
"""`tf.estimator.<name>` -> "module:attribute"."""

V1_NAMES: Mapping[str, str] = {
    **_COMMON,
    **_at(
        "classic.premade_v1",
        *("BaselineClassifier", "BaselineEstimator", "BaselineRegressor"),
        *("DNNClassifier", "DNNEstimator", "DNNRegressor"),
        *("DNNLinearCombinedClassifier", "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor"),
        *("LinearClassifier", "LinearEstimator", "LinearRegressor"),
    ),
    **_at("classic.logits", "dnn_logit_fn_builder", "linear_logit_fn_builder", prefix="experimental."),
    **_at("classic.inputs", "numpy_input_fn", "pandas_input_fn", prefix="inputs."),
    **_at(
        "classic.tpu",
        "InputPipelineConfig",
        "RunConfig",
        "TPUConfig",
        "TPUEstimator",
        "TPUEstimatorSpec",
        prefix="tpu.",
    ),
}
"""`tf.compat.v1.estimator.<name>` -> "module:attribute"."""

KERAS_NAMES: Mapping[str, str] = _at("classic.keras_models", "model_to_estimator")
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
"""Names that are not there -> what to do instead."""


def lookup(table: Mapping[str, str], name: str, shown: str) -> Any:
    """The object of a public name.

    Args:
      name: as in the table.
      shown: what the user wrote, for messages.

    Raises:
      AttributeError: there is no such name, or not any more; the message says what to use instead.
    """
    if name in GONE:
        raise AttributeError(f"{shown} is not available: {GONE[name]}.")
    if name not in table:
        raise AttributeError(f"there is no {shown}.{_nearest(name, table)}")
    module, _, attribute = table[name].partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # something that it imports is missing
            raise
        raise AttributeError(f"{shown} is not available in this version of the runner: there is no {module}.") from None
    return getattr(found, attribute)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]}?" if close else ""
