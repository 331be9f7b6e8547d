"""The runner: trains, evaluates and predicts with a model_fn and an input_fn, on any tf.distribute strategy.

Names are loaded when they are first used, so that `import runner` brings in neither TensorFlow nor MLflow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.data.inputs import Input
    from runner.distribute.strategy import build_strategy
    from runner.estimator.early_stopping import EarlyStopping
    from runner.estimator.estimator import Estimator
    from runner.estimator.specs import EvalSpec, TrainingResult, TrainSpec
    from runner.estimator.train_and_evaluate import train_and_evaluate
    from runner.export.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
    from runner.export.outputs import ClassificationOutput, ExportOutput, PredictOutput, RegressionOutput
    from runner.export.receivers import (
        ServingInputReceiver,
        SupervisedInputReceiver,
        TensorServingInputReceiver,
        build_parsing_serving_input_receiver_fn,
        build_raw_serving_input_receiver_fn,
        build_raw_supervised_input_receiver_fn,
    )
    from runner.hooks.hook import Every, Hook
    from runner.model_fn import EstimatorSpec, ModeKeys
    from runner.run_config import RunConfig
    from runner.types import Params, StepResult

__all__ = [
    "BestExporter",
    "ClassificationOutput",
    "EarlyStopping",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Every",
    "ExportOutput",
    "Exporter",
    "FinalExporter",
    "Hook",
    "Input",
    "LatestExporter",
    "ModeKeys",
    "Params",
    "PredictOutput",
    "RegressionOutput",
    "RunConfig",
    "ServingInputReceiver",
    "StepResult",
    "SupervisedInputReceiver",
    "TensorServingInputReceiver",
    "TrainSpec",
    "TrainingResult",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
    "build_raw_supervised_input_receiver_fn",
    "build_strategy",
    "train_and_evaluate",
]

_HOMES = {
    "estimator.early_stopping": ("EarlyStopping",),
    "estimator.estimator": ("Estimator",),
    "export.outputs": ("ClassificationOutput", "ExportOutput", "PredictOutput", "RegressionOutput"),
    "export.exporters": ("BestExporter", "Exporter", "FinalExporter", "LatestExporter"),
    "hooks.hook": ("Every", "Hook"),
    "data.inputs": ("Input",),
    "model_fn": ("EstimatorSpec", "ModeKeys"),
    "export.receivers": (
        "ServingInputReceiver",
        "SupervisedInputReceiver",
        "TensorServingInputReceiver",
        "build_parsing_serving_input_receiver_fn",
        "build_raw_serving_input_receiver_fn",
        "build_raw_supervised_input_receiver_fn",
    ),
    "run_config": ("RunConfig",),
    "distribute.strategy": ("build_strategy",),
    "estimator.specs": ("EvalSpec", "TrainSpec", "TrainingResult"),
    "estimator.train_and_evaluate": ("train_and_evaluate",),
    "types": ("Params", "StepResult"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runner.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
