"""The table of tf.estimator 2.15's public names: where the runner has each, or what to use instead.

This module imports none of the runner's modules that it names, so it can be used without TensorFlow.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from runner.classic.compat.old_modules import MODULE, Space, modules_of, places_in, within
from runner.system.suggestions import did_you_mean

EARLY_STOPPING = (
    "make_early_stopping_hook", "stop_if_higher_hook", "stop_if_lower_hook", "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
)  # fmt: skip
_PREMADE = """
    BaselineClassifier BaselineEstimator BaselineRegressor DNNClassifier DNNEstimator DNNRegressor
    DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor LinearClassifier
    LinearEstimator LinearRegressor
"""

_COMMON = places_in(f"""
. @ runner.model_fn: ModeKeys
. @ runner.classic.estimator_spec: EstimatorSpec
. @ runner.classic.run_config: RunConfig
. @ runner.classic.estimator: Estimator add_metrics
. @ runner.classic.training: EvalSpec TrainSpec train_and_evaluate
. @ tensorflow.compat.v1.train:
    CheckpointSaverHook CheckpointSaverListener FeedFnHook FinalOpsHook GlobalStepWaiterHook LoggingTensorHook
    NanLossDuringTrainingError NanTensorHook SecondOrStepTimer SessionRunArgs SessionRunContext SessionRunHook
    SessionRunValues StepCounterHook StopAtStepHook SummarySaverHook
. @ runner.classic.hooks: ProfilerHook
experimental @ runner.classic.hooks: InMemoryEvaluatorHook make_stop_at_checkpoint_step_hook
experimental @ runner.classic.early_stopping: {" ".join(EARLY_STOPPING)}
. @ runner.export.exporters: BestExporter Exporter FinalExporter LatestExporter
export @ runner.export.receivers:
    ServingInputReceiver TensorServingInputReceiver build_parsing_serving_input_receiver_fn
    build_raw_serving_input_receiver_fn
experimental @ runner.export.receivers: build_raw_supervised_input_receiver_fn
export @ runner.tf_private.v1:export_outputs:
    ClassificationOutput EvalOutput ExportOutput PredictOutput RegressionOutput
. @ runner.classic.heads.base: Head
. @ runner.classic.heads.classification: BinaryClassHead MultiClassHead
. @ runner.classic.heads.multi_head: MultiHead
. @ runner.classic.heads.multi_label: MultiLabelHead
. @ runner.classic.heads.regression: LogisticRegressionHead PoissonRegressionHead RegressionHead
. @ runner.classic.inputs: classifier_parse_example_spec regressor_parse_example_spec
experimental @ runner.classic.premade.logits: call_logit_fn
. @ runner.classic.warm_start: VocabInfo WarmStartSettings
""")

NAMES: Mapping[str, str] = {**_COMMON, **places_in(f". @ runner.classic.premade.estimators: {_PREMADE}")}
"""`tf.estimator.<name>` -> "module:attribute"."""

V1_NAMES: Mapping[str, str] = _COMMON | places_in(f"""
. @ runner.classic.premade.v1: {_PREMADE}
experimental @ runner.classic.premade.logits: dnn_logit_fn_builder linear_logit_fn_builder
inputs @ runner.classic.inputs: numpy_input_fn pandas_input_fn
tpu @ runner.classic.tpu: InputPipelineConfig RunConfig TPUConfig TPUEstimator TPUEstimatorSpec
""")
"""`tf.compat.v1.estimator.<name>` -> "module:attribute"."""

KERAS_NAMES: Mapping[str, str] = {"model_to_estimator": "runner.classic.model_to_estimator:model_to_estimator"}
"""`tf.keras.estimator.<name>` -> "module:attribute"."""

_RNN = "tensorflow_estimator.python.estimator.canned.rnn"
OF_PACKAGE: Mapping[str, str] = places_in(f"experimental @ {_RNN}: RNNClassifier RNNEstimator")
"""Names of GONE that exist with the package tensorflow-estimator -> "module:attribute"."""

NEEDS_PACKAGE = (
    "the runner runs 2.15's own code for it, which nobody maintains, if the package tensorflow-estimator 2.15.0 is "
    "installed: pip install 'estimator-runner[tf-estimator]'"
)

GONE: Mapping[str, str] = {
    "BoostedTreesClassifier": "use the package tensorflow_decision_forests; TensorFlow dropped it in 2.13",
    "BoostedTreesEstimator": "use the package tensorflow_decision_forests; TensorFlow dropped it in 2.13",
    "BoostedTreesRegressor": "use the package tensorflow_decision_forests; TensorFlow dropped it in 2.13",
    "DistributeConfig": "give RunConfig(train_distribute=, eval_distribute=); there is no standalone client mode",
    "experimental.KMeans": "use sklearn.cluster.MiniBatchKMeans, or write the update as the train_op of a model_fn",
    "experimental.LinearSDCA": "use LinearClassifier or LinearRegressor with optimizer='Ftrl'",
    "experimental.RNNClassifier": NEEDS_PACKAGE,
    "experimental.RNNEstimator": NEEDS_PACKAGE,
    "tpu.experimental.EmbeddingConfigSpec": "use tf.tpu.experimental.embedding with strategy=tpu",
}
"""Removed names -> what to do instead."""


@functools.cache
def package() -> Path | None:
    """Return the folder of the installed package tensorflow-estimator; None if there is none of version 2.15.0."""
    try:
        found = importlib.metadata.distribution("tensorflow-estimator")
    except importlib.metadata.PackageNotFoundError:
        return None
    if found.version != "2.15.0":
        return None
    return Path(str(found.locate_file("tensorflow_estimator")))


def reason(table: Iterable[str], name: str, shown: str) -> str:
    """Return the message about `name`, which is not in the table; `shown` is the name as users write it."""
    if name in GONE:
        return f"{shown} is not available: {GONE[name]}."
    return f"there is no {shown}.{did_you_mean(name, table)}"


def _space(table: Mapping[str, str], of_package: Mapping[str, str] = MappingProxyType({})) -> Space:
    """Return the Space of a table of names.

    Args:
      table: name below the space -> its place, "module:attribute".
      of_package: the same for names that exist only if the package tensorflow-estimator is installed.
    """
    modules = modules_of((*table, *GONE))

    def find(name: str) -> str | None:
        if name in modules:
            return MODULE
        if name in table:
            return table[name]
        return of_package.get(name) if package() else None

    return Space(find, functools.partial(reason, table), functools.partial(within, table))


V1_SPACE = _space(V1_NAMES)
_KERAS = _space(KERAS_NAMES)
SPACES: Mapping[str, Space] = {
    "tensorflow.estimator": _space(NAMES, OF_PACKAGE),
    "tensorflow.compat.v1.estimator": V1_SPACE,
    "tensorflow.keras.estimator": _KERAS,
    "tensorflow.compat.v1.keras.estimator": _KERAS,
}
"""Dotted name of tf.estimator -> what is below it."""
