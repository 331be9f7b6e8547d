"""The part that all components of an Estimator share: settings, journal, progress, and the model on each strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.config.metric_names import evaluation_prefix
from runner.data.dataset_adapter import as_given
from runner.data.dataset_facts import dataset_facts
from runner.data.inputs import Input, InputPipeline, build_input_pipeline
from runner.data.sharding import WorkerPlace
from runner.distribute.collectives import Collectives
from runner.estimator.specs import InputFn
from runner.model_fn import ModeKeys, ModelFn
from runner.model_log import logging_to
from runner.programs.model import Model
from runner.run_config import RunConfig
from runner.system.console import Progress, build_progress
from runner.tracing.random_state import seeded
from runner.tracking.backends.session import ScriptRecord
from runner.tracking.journal import DATASET, Journal, NullJournal, journal_path

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EstimatorContext:
    """The settings of an Estimator, and the places to which it reports.

    Attributes:
      config: the Estimator's config. (`TrainSetup.config` has in addition the settings of TensorFlow's own hooks.)
      params: passed to model_fn, and to input functions without params of their own.
      journal: receives every event; the supervisor reads it.
      progress: shows the run on the screen.
      collectives: communication between the workers that train together.
    """

    config: RunConfig
    params: Any
    model_fn: ModelFn
    journal: Journal
    progress: Progress
    collectives: Collectives

    @property
    def model_dir(self) -> str:
        assert self.config.model_dir is not None
        return self.config.model_dir

    @property
    def is_chief(self) -> bool:
        """Report whether this process runs the chief's hooks and writes its summaries and events."""
        return self.collectives.is_chief and self.config.is_chief


def script_journal(config: RunConfig, collectives: Collectives, progress: Progress) -> Journal:
    """Return the journal of this process, for a script whose runs are recorded; `progress` shows its phases."""
    role, index = _task_of_script(config, collectives)
    return Journal(journal_path(Path(str(config.model_dir)), role, index), show_phase=progress.phase)


def _task_of_script(config: RunConfig, collectives: Collectives) -> tuple[str, int]:
    """Return (task type, task index) of this process.

    The strategy is asked first, because a script may configure workers of which `RunConfig.cluster` does not know.
    """
    if config.is_chief and not collectives.is_chief:
        return "worker", collectives.worker_index
    return config.place.role, config.place.task_index


def script_progress(config: RunConfig) -> Progress:
    """Return the progress display of a script, which looks like the command line's; only the chief shows one."""
    if config.is_chief:
        return build_progress(config.progress)
    is_shown = config.place.is_evaluator and config.progress != "off"
    return build_progress("plain" if is_shown else "off")


def record_of_script(context: EstimatorContext) -> ScriptRecord:
    """Return the object that records the runs of a script's Estimator."""
    config = context.config
    values = context.params
    if not isinstance(values, Mapping):
        values = getattr(values, "__dict__", {})
    params = {f"model.params.{name}": value for name, value in values.items()}
    for field in dataclasses.fields(config):
        if "key" in field.metadata:
            params[field.metadata["key"]] = getattr(config, field.name)
    params["run.seed"] = config.seed
    if config.keep_best is not None:
        params |= {f"checkpoint.keep_best.{name}": value for name, value in vars(config.keep_best).items()}
    strategy = config.train_distribute
    name_of_strategy = "default" if strategy is None else type(strategy).__name__
    tags = {"strategy": name_of_strategy, "num_replicas": str(config.num_replicas_in_sync)}
    return ScriptRecord(
        config.tracking,
        Path(context.model_dir).absolute(),
        context.journal,
        params,
        tags,
        model_name=_model_name(context.model_fn.name),
        role=_task_of_script(config, context.collectives)[0],
    )


def _model_name(function: str) -> str:
    """Return a name for an exported model, taken from model_fn's dotted name: `digits` for digits.model_fn."""
    path, _, name = function.rpartition(".")
    module = path.rpartition(".")[2]
    says_nothing = module in ("", "__main__", "<locals>")
    return module if name == "model_fn" and not says_nothing else name


class Models:
    """The model on each strategy, built on first use.

    Args:
      context: the Estimator's settings.
      as_input: returns the function to call in place of an input function, given that function and the mode.
    """

    def __init__(self, context: EstimatorContext, as_input: Callable[[InputFn, str], InputFn]) -> None:
        self._context = context
        self._as_input = as_input
        self._by_strategy: dict[int, Model] = {}
        self._logged: set[str] = set()

    @property
    def for_training(self) -> Model:
        return self._on(self._context.config.train_distribute)

    @property
    def for_evaluation(self) -> Model:
        return self._on(self._context.config.evaluation_strategy)

    @property
    def for_prediction(self) -> Model:
        """The model on the strategy of evaluation; but if that has several workers, a model on this process alone.

        Otherwise a worker that predicts would wait for the other workers.
        """
        model = self.for_evaluation
        return self._on(None) if model.collectives.num_workers > 1 else model

    def clear(self) -> None:
        """Drop all models and their values."""
        self._by_strategy.clear()

    def build_pipeline(
        self,
        input_fn: InputFn,
        mode: str,
        model: Model,
        num_epochs: int | None = None,
        eval_name: str | None = None,
        num_batches: float = math.inf,
        place: WorkerPlace | None = None,
    ) -> InputPipeline:
        """Call the input function and build this process's input pipeline.

        Args:
          input_fn: an input function or an Input.
          mode: train, eval or infer.
          model: the model that reads the input.
          num_epochs: passes over the examples; None: as many as the function's dataset makes.
          eval_name: name of the evaluation, if there are several.
          num_batches: as in `build_input_pipeline`.
          place: this process among those that read the input; None: the place on the model's strategy.
        """
        config = self._context.config
        if place is None:
            place = model.place(training=mode == ModeKeys.TRAIN)
        source = self._as_input(input_fn, mode)
        if mode == ModeKeys.TRAIN and isinstance(source, Input) and source.shard == "off":
            # Every worker reads all of the data. If all read it in the same order, a step would compute one gradient
            # many times.
            # Of the same type, because a DrawnSeed is handled in another way than a seed that the user has set.
            config = config.replace(tf_random_seed=type(config.seed)(config.seed + place.worker_index))
            if source.shuffle_seed is not None:
                source = dataclasses.replace(source, shuffle_seed=source.shuffle_seed + place.worker_index)
        # tf.estimator set the graph's seed before it called input_fn. With the same seed, shuffles have the same order.
        # `logging_to(None)`: input_fn of an evaluation during training does not log to the training run.
        with seeded(config.seed), logging_to(None):
            pipeline = self._pipeline(source, mode, place, config, num_epochs=num_epochs, num_batches=num_batches)
        if place.num_workers > 1 or pipeline.shard == "service":  # one worker alone divides nothing
            self.log_once(f"Input ({mode}): sharding {pipeline.shard}: {pipeline.reason}")
        context_of_mode = {ModeKeys.EVAL: evaluation_prefix(eval_name), ModeKeys.PREDICT: "predict"}
        self._note_dataset(source, pipeline, context_of_mode.get(mode, mode))
        return dataclasses.replace(pipeline, model_fn=self._context.model_fn.fn, input=input_fn)

    def _note_dataset(self, source: InputFn, pipeline: InputPipeline, context: str) -> None:
        """Write facts about the input's dataset to the journal, once."""
        if self._context.is_chief and not isinstance(self._context.journal, NullJournal):
            facts = dataset_facts(source, pipeline, context)
            key = f"{context} {facts['name']} {facts['digest']}"
            if key not in self._logged:
                self._logged.add(key)
                self._context.journal.event(DATASET, **facts)

    def features_spec(self, input_fn: InputFn, mode: str) -> Any:
        """Call an input function and return the TensorSpecs of its features; no strategy is used."""
        config = self._context.config
        with seeded(config.seed):
            return as_given(self._pipeline(input_fn, mode, WorkerPlace(1), config).replica_spec[0])

    def _pipeline(
        self, source: InputFn, mode: str, place: WorkerPlace, config: RunConfig, **more: Any
    ) -> InputPipeline:
        # Only a model_fn of tf.estimator has operators, those of its time. Then tensors are those of a session, too.
        is_classic = self._context.model_fn.operators is not contextlib.nullcontext
        params = self._context.params
        return build_input_pipeline(source, mode, place, params=params, config=config, as_in_session=is_classic, **more)

    def log_once(self, text: str) -> None:
        """Log a text once, although every evaluation would log it."""
        if text not in self._logged:
            self._logged.add(text)
            _log.info("%s", text)

    def _on(self, strategy: Any) -> Model:
        context = self._context
        # The config keeps its strategies alive, so an id is not used again.
        if id(strategy) not in self._by_strategy:
            model = Model(context.model_fn, strategy, config=context.config, journal=context.journal)
            self._by_strategy[id(strategy)] = model
        return self._by_strategy[id(strategy)]
