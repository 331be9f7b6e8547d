"""Train, evaluate and predict with a model_fn and an input_fn, on any tf.distribute strategy.

Each public name is imported when it is first used, so `import runner` loads neither TensorFlow nor MLflow.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The public names: type checkers read them here, and so does `_HOMES`.
if TYPE_CHECKING:
    from runner.config.schema import TrackingConfig as TrackingConfig
    from runner.config.settings.metric_rules import EarlyStopping as EarlyStopping
    from runner.config.settings.metric_rules import ReduceLROnPlateau as ReduceLROnPlateau
    from runner.data.inputs import Input as Input
    from runner.distribute.strategy import build_strategy as build_strategy
    from runner.estimator.estimator import Estimator as Estimator
    from runner.estimator.specs import EvalSpec as EvalSpec
    from runner.estimator.specs import TrainingResult as TrainingResult
    from runner.estimator.specs import TrainSpec as TrainSpec
    from runner.estimator.train_and_evaluate import train_and_evaluate as train_and_evaluate
    from runner.export.exporters import BestExporter as BestExporter
    from runner.export.exporters import Exporter as Exporter
    from runner.export.exporters import FinalExporter as FinalExporter
    from runner.export.exporters import LatestExporter as LatestExporter
    from runner.export.outputs import ClassificationOutput as ClassificationOutput
    from runner.export.outputs import ExportOutput as ExportOutput
    from runner.export.outputs import PredictOutput as PredictOutput
    from runner.export.outputs import RegressionOutput as RegressionOutput
    from runner.export.receivers import ServingInputReceiver as ServingInputReceiver
    from runner.export.receivers import SupervisedInputReceiver as SupervisedInputReceiver
    from runner.export.receivers import TensorServingInputReceiver as TensorServingInputReceiver
    from runner.export.receivers import (
        build_parsing_serving_input_receiver_fn as build_parsing_serving_input_receiver_fn,
    )
    from runner.export.receivers import build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn
    from runner.export.receivers import build_raw_supervised_input_receiver_fn as build_raw_supervised_input_receiver_fn
    from runner.hooks.hook import Every as Every
    from runner.hooks.hook import Hook as Hook
    from runner.hooks.plots import ConfusionMatrix as ConfusionMatrix
    from runner.hooks.plots import ScorePlots as ScorePlots
    from runner.launch.api import Run as Run
    from runner.launch.api import RunError as RunError
    from runner.launch.api import load as load
    from runner.launch.api import run as run
    from runner.model_fn import EstimatorSpec as EstimatorSpec
    from runner.model_fn import ModeKeys as ModeKeys
    from runner.model_log import log as log
    from runner.programs.batch_losses import all_gather as all_gather
    from runner.programs.batch_losses import replica_offset as replica_offset
    from runner.run_config import RunConfig as RunConfig
    from runner.tracking.artifacts import log_artifact as log_artifact
    from runner.tracking.artifacts import log_figure as log_figure
    from runner.tracking.backends.user_tracker import RunTracker as RunTracker
    from runner.types import Params as Params
    from runner.types import StepResult as StepResult

    __version__: str


def _read_homes() -> dict[str, str]:
    """Return public name -> its module, from the imports above."""
    tree = ast.parse(Path(__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            homes[node.names[0].name] = node.module
    return homes


_HOMES = _read_homes()

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("estimator-runner")
        except metadata.PackageNotFoundError:  # a checkout that is on the path and not installed
            return "unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
