"""The runner: trains, evaluates and predicts with a model_fn and an input_fn, on any tf.distribute strategy.

Names are loaded when they are first used, so that `import runner` brings in neither TensorFlow nor MLflow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.early_stopping import EarlyStopping
    from runner.estimator import Estimator
    from runner.export_outputs import ClassificationOutput, ExportOutput, PredictOutput, RegressionOutput
    from runner.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
    from runner.hooks import Every, Hook
    from runner.inputs import Input
    from runner.model_fn import EstimatorSpec, ModeKeys
    from runner.receivers import (
        ServingInputReceiver,
        SupervisedInputReceiver,
        TensorServingInputReceiver,
        build_parsing_serving_input_receiver_fn,
        build_raw_serving_input_receiver_fn,
        build_raw_supervised_input_receiver_fn,
    )
    from runner.run_config import RunConfig
    from runner.strategy import build_strategy
    from runner.training import EvalSpec, TrainingResult, TrainSpec, train_and_evaluate
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
    "early_stopping": ("EarlyStopping",),
    "estimator": ("Estimator",),
    "export_outputs": ("ClassificationOutput", "ExportOutput", "PredictOutput", "RegressionOutput"),
    "exporters": ("BestExporter", "Exporter", "FinalExporter", "LatestExporter"),
    "hooks": ("Every", "Hook"),
    "inputs": ("Input",),
    "model_fn": ("EstimatorSpec", "ModeKeys"),
    "receivers": (
        "ServingInputReceiver",
        "SupervisedInputReceiver",
        "TensorServingInputReceiver",
        "build_parsing_serving_input_receiver_fn",
        "build_raw_serving_input_receiver_fn",
        "build_raw_supervised_input_receiver_fn",
    ),
    "run_config": ("RunConfig",),
    "strategy": ("build_strategy",),
    "training": ("EvalSpec", "TrainSpec", "TrainingResult", "train_and_evaluate"),
    "types": ("Params", "StepResult"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runner.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
