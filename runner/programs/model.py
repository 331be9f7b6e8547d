"""One model on one strategy: its variables, the programs traced for it, and the source of its values."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.checkpoint import warm_start
from runner.checkpoint.reader import OBJECT_GRAPH, Reader, keys_in
from runner.data.inputs import InputPipeline
from runner.data.sharding import WorkerPlace
from runner.distribute.collectives import collectives_of
from runner.distribute.strategy import is_parameter_server
from runner.model_fn import ModelFn
from runner.programs.eager_train import EagerTrainProgram
from runner.programs.ema import average_name, averages_in
from runner.programs.evaluate import EvalProgram
from runner.programs.mixed_precision import LossScale, with_precision
from runner.programs.predict import PredictProgram
from runner.programs.program import ModelToTrace, Program
from runner.programs.ps_programs import Coordinator, RangeEvaluation, RangeLoop
from runner.programs.train import TrainProgram
from runner.programs.train_loop import LoopResult
from runner.run_config import RunConfig, WarmStart
from runner.tf_private.replaced import replaced
from runner.tracing.adapted_layers import ADAPTED
from runner.tracing.partitioned_variable import assign, restore, update, value_of
from runner.tracing.random_state import seeded
from runner.tracing.variable_store import VariableStore
from runner.tracking.journal import Journal
from runner.types import StepRequest

_log = logging.getLogger(__name__)


class _Aside(NamedTuple):
    """Values of variables, kept while an evaluation loads others into them.

    Attributes:
      values: name -> value.
      checkpoint: (keys, values_of) of the Model that belong to these values; None: the Model's own still do, because
        only weights were replaced, by their averages.
    """

    values: Mapping[str, Any]
    checkpoint: tuple[Mapping[str, str], str | None] | None


class Model:
    """A model_fn with its variables.

    Args:
      model_fn: the user's function.
      strategy: the strategy; None: TensorFlow's default.
      config: the run's settings; the seed, the precision and the settings of the update are used.
      journal: receives the times of tracing and restoring.

    Attributes:
      keys: variable name -> its key in that checkpoint, for variables that a Scaffold's saver stores under a key other
        than their name.
      objects: (serialized object graph, variable name -> key in the checkpoint) of a Scaffold's `tf.train.Checkpoint`,
        in training; empty without one.
      shown: the evaluation program whose values the variables have, if these are not the values of `values_of`; None
        after `show_weights`.
      is_trained: whether a run is training the variables, so that possibly no checkpoint has their values.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        strategy: tf.distribute.Strategy | None,
        *,
        config: RunConfig,
        journal: Journal,
    ) -> None:
        self.strategy = strategy
        self.collectives = collectives_of(strategy)
        self.store = VariableStore(strategy, config.seed)
        self._config = config
        self._to_trace = ModelToTrace(self.store, with_precision(model_fn, config.precision), config)
        self._journal = journal
        self._coordinator = Coordinator(strategy) if is_parameter_server(strategy) else None
        self._programs: dict[Any, Any] = {}
        self._values_of: str | None = None
        self.keys: Mapping[str, str] = {}
        self.objects: tuple[bytes, Mapping[str, str]] = b"", {}
        self.shown: Any = None
        self.is_trained = False
        self._aside: _Aside | None = None

    @property
    def values_of(self) -> str | None:
        """Path of the checkpoint whose values the variables have; None: unknown.

        It is known from a save or a restore until something is handed out that can write to variables.
        """
        return self._values_of

    def place(self, *, training: bool) -> WorkerPlace:
        """Return the place of this process among those that take part in a step of training, or else of evaluation."""
        num_replicas = 1
        if self.strategy is not None and (training or not self.store.has_one_copy):
            num_replicas = len(self.strategy.extended.worker_devices)
        workers = self.collectives
        if training and self._coordinator is not None:
            readers = self._coordinator
            return WorkerPlace(num_replicas, 0, readers.num_workers, workers, readers.workers)
        return WorkerPlace(num_replicas, workers.worker_index, workers.num_workers, workers)

    def train_program(self, pipeline: InputPipeline, *, summary_writer: Any, stop_at_nan: bool) -> TrainProgram:
        """Return the training program for inputs like those of `pipeline`, traced on first use.

        Args:
          pipeline: the training input.
          summary_writer: writer for `tf.summary` inside model_fn; always the same one.
          stop_at_nan: loops end at a loss that is not finite.
        """
        kind: Callable[..., TrainProgram] = EagerTrainProgram if self._config.eager else TrainProgram
        if self._coordinator is not None:
            # The workers take the steps; this process, the coordinator, only requests them.
            loop_type = functools.partial(RangeLoop, coordinator=self._coordinator)
            kind = functools.partial(kind, loop_type=loop_type)
        kind = functools.partial(kind, summary_writer=summary_writer, stop_at_nan=stop_at_nan)
        return self._trace_once(("train", stop_at_nan), pipeline, kind)

    def eval_program(self, pipeline: InputPipeline) -> EvalProgram:
        """Return the evaluation program for inputs like those of `pipeline`; with parameter servers, workers run it."""
        if self._coordinator is not None:
            return self._trace_once(("eval",), pipeline, RangeEvaluation, self._coordinator)
        return self._trace_once(("eval",), pipeline, EvalProgram)

    def predict_program(self, pipeline: InputPipeline, *keys: Any) -> PredictProgram:
        """Return the prediction program for inputs like those of `pipeline`; `keys` as in `PredictProgram`."""
        return self._trace_once(("predict", *keys), pipeline, PredictProgram, *keys)

    def _trace_once(self, what: tuple[Any, ...], pipeline: InputPipeline, kind: Callable[..., Any], *more: Any) -> Any:
        """Return the program of the kind `kind` for inputs like those of `pipeline`, made on first use.

        Args:
          what: tells it from other programs on the same inputs.
          pipeline: the input.
          kind: makes it, given the model, the input and `more`.
        """
        key = (*what, repr(pipeline.dataset.element_spec), pipeline.division)
        if key not in self._programs:
            before = set(self.store.saved)
            with self._journal.phase("trace"):
                self._programs[key] = kind(self._to_trace, pipeline, *more)
            if set(self.store.saved) - before:
                self._values_of = None  # new variables have initial values, not the checkpoint's
        return self._programs[key]

    def training_loop(self, program: TrainProgram, request: StepRequest, **settings: bool) -> Callable[..., LoopResult]:
        """Return a loop of training steps, as `TrainProgram.loop` does, for one call: its steps write to the variables.

        It begins with the weights of training, which an evaluation may have replaced.
        """
        self.show_weights()
        self.begin_to_write()
        return program.loop(request, **settings)

    def part_of_step(self, program: TrainProgram, request: StepRequest) -> Callable[..., LoopResult]:
        """Return what computes a request of hooks on batches, as `TrainProgram.part` does, for one call: operations
        among the fetches may write to the variables.
        """
        self.begin_to_write()
        return program.part(request)

    def awaiting(self, path: str | None) -> contextlib.AbstractContextManager[None]:
        """Return a context whose programs may leave out initial values, because the checkpoint `path` is restored next.
        None: there is no checkpoint.

        What layers have learnt by `adapt` becomes that of the checkpoint. If that differs, all programs are dropped.
        """
        adapted: dict[str, Any] = {}
        # The weights of a model_to_estimator are written only when they are read.
        if path is not None and os.path.exists(f"{path}.index"):
            adapted = Reader(path).extra().get(ADAPTED, {})
        if adapted and adapted != self.store.adapted:
            self.store.adapted.clear()
            self.store.adapted.update(adapted)
            self._programs.clear()  # they were traced with what the layers had learnt before
        if path is None or self._config.eager:  # an eager run computes with initial values before it restores
            return contextlib.nullcontext()
        return replaced(self.store, "awaited", Reader(path).shape)

    @contextlib.contextmanager
    def extended(self, program: Program, path: str | None) -> Iterator[None]:
        """Make the variables that hooks request inside this context, in `begin`, variables of the model.

        Args:
          program: the program whose steps the hooks see.
          path: the checkpoint from which new variables get their values, if it has them; None: they are initialized.
        """
        before = set(self.store.saved)
        with program.trace.extended(self.store):
            yield
        new = {name: variable for name, variable in self.store.saved.items() if name not in before}
        if path is not None and new:
            reader = Reader(path)
            initialized = self._initial_values(reader, self.keys)
            restored = {name: variable for name, variable in new.items() if name not in initialized}
            restore(reader.path, restored, reader.entry)
        # The next hooks make their variables in a new graph, as in tf.estimator: under the same names.
        self._programs = {key: kept for key, kept in self._programs.items() if not kept.trace.of_hooks}

    # --- values -----------------------------------------------------------------------------------------------

    def begin_to_write(self) -> None:
        """Note that variables are about to change, so that from now on they have the values of no known checkpoint."""
        self._values_of = None

    def save(self, write: Callable[[Mapping[str, Any]], str], values: Mapping[str, Any] | None = None) -> str:
        """Let `write` write the values of the variables, by their keys, to a checkpoint, and return its path.

        Until the next step the variables have its values, so that an evaluation need not read it.

        Args:
          write: writes a checkpoint of the values that it is given, and returns its path.
          values: what `values_by_key` has just returned; None: it is called.
        """
        if values is None:
            values = self.values_by_key()
        path = write(values)
        self._values_of = path
        return path

    def restore(
        self, path: str, keys: Mapping[str, str] | None = None, *, partly: bool = False, for_a_while: bool = False
    ) -> None:
        """Load every variable from the checkpoint `path`, unless the variables already have its values.

        An evaluation during training may read the same checkpoint by other keys (such as moving averages of the
        weights). The values of training are then kept, and `show_weights` puts them back.

        Args:
          path: path of the checkpoint.
          keys: variable name -> its key in the checkpoint, if that is not its name.
          partly: variables that the checkpoint lacks keep their values; False: they raise an error.
          for_a_while: the values are loaded for an evaluation or prediction. A model that is being trained gets its own
            values back at `show_weights`.

        Raises:
          ValueError: the checkpoint lacks a variable, or has it in another shape.
          UnreadableVariableError: the checkpoint was damaged or removed meanwhile; `values_of` is None then.
        """
        # Variables that the Scaffold of this mode does not know, such as slots, keep the keys of training.
        keys = {**self.objects[1], **(keys or {})}
        # First: what is compared and set aside below must be the model's own values, not those of an evaluation.
        self.show_weights()
        if path == self._values_of and keys == self.keys:
            return
        with self._journal.phase("restore"):
            reader = Reader(path)
            new, keys_of_restored = self._match(reader, keys, partly=partly)
            if path == self._values_of or (for_a_while and self.is_trained):
                self.set_aside()
            # Before the first variable is written: if reading fails halfway, their values are those of no checkpoint.
            self.begin_to_write()
            entries = {name: reader.entry(key) for name, key in keys_of_restored.items()}
            self.read(reader.path, entries)
            # Variables that were not initialized because a checkpoint was expected to have them (`awaiting`), and that
            # are not read from it: a Scaffold may map a name that the checkpoint has to a key that it lacks.
            still_zero = self.store.begun_with_zeros - entries.keys()
            self.assign({name: self.store.initial_value(name) for name in still_zero})
            self.store.begun_with_zeros.clear()
            self._initialize(new, entries)  # afterwards, because it may copy values that were read
            self._warn_of_learning_rates(entries, path)
        self._values_of = path
        self.keys = keys

    def _match(self, reader: Reader, keys: Mapping[str, str], *, partly: bool) -> tuple[dict[str, Any], dict[str, str]]:
        """Return (initial values of the variables that a checkpoint lacks, name -> key there of the others).

        Args:
          reader: the checkpoint.
          keys, partly: as in `restore`. A variable that keeps its value has the initial value None.
        """
        shapes = {name: variable.shape for name, variable in self.store.saved.items()}
        new = self._initial_values(reader, keys)
        expected = {name: shape for name, shape in shapes.items() if name not in new}
        keys_there = keys_in(reader, expected, keys)
        if partly:
            for name in shapes:
                if not reader.has(keys_there.get(name, name)):
                    new[name] = None
        check_shapes(reader, shapes, new, keys_there)
        return new, {name: keys_there.get(name, name) for name in shapes if name not in new}

    def begin_with(self, settings: WarmStart) -> warm_start.Loaded:
        """Load the warm start into a new model.

        Raises:
          ValueError: as in `warm_start.load`.
        """
        with seeded(self._config.seed):
            return warm_start.load(settings, self.store.saved_specs, self, self.store.adapted)

    def read(self, path: str, entries: Mapping[str, tuple[str, tf.DType]]) -> None:
        """Load variables from the checkpoint `path`, in parts: name -> (key, dtype) there."""
        self.begin_to_write()
        with self.store.scope():
            restore(path, {name: self.store.saved[name] for name in entries}, entries.__getitem__)

    def update(self, name: str, places: np.ndarray, values: tf.Tensor) -> None:
        """Set slices of a variable, as in `partitioned_variable.update`."""
        self.begin_to_write()
        update(self.store.saved[name], places, values)

    def _initialize(self, new: Mapping[str, Any], read: Collection[str]) -> None:
        """Initialize variables that the checkpoint lacks.

        Args:
          new: name -> initial value, or name of the variable whose value is copied, as `_initial_values` returns.
          read: names of the variables that the checkpoint has.
        """
        saved = self.store.saved
        copied: dict[str, Any] = {}
        given: dict[str, Any] = {}
        with self.store.scope():
            for name, value in new.items():
                if isinstance(value, str):
                    if value in read:
                        copied[name] = value_of(saved[value])
                elif value is not None:
                    given[name] = value
        self.assign({**copied, **given})

    def show_averages(self, path: str) -> bool:
        """Load the moving averages of the weights from the checkpoint `path`, from which the model was restored.

        Returns:
          False if there are none: neither train.ema_decay is set, nor did the optimizer keep averages.

        Raises:
          ValueError: train.ema_decay is set, and the checkpoint has no averages.
        """
        reader = Reader(path)
        saved = self.store.saved
        averages = averages_in(reader, saved, self._config.ema_decay, "evaluate")
        if not averages:
            return False
        if self._aside is None:
            weights = {name: value_of(saved[name]) for name in averages}
            self._aside = _Aside(weights, checkpoint=None)
        # Only a model that trains has the averages as variables.
        self._put({name: value_of(saved[average]) for name, average in averages.items() if average in saved})
        with self.store.scope():
            not_variables = {name: saved[name] for name, average in averages.items() if average not in saved}
            restore(reader.path, not_variables, lambda name: reader.entry(averages[name]))
        return True

    def set_aside(self, *, in_memory: bool = True) -> None:
        """Keep the values of the variables before something writes to them; `show_weights` puts them back.

        Values that are kept already stay the ones to put back.

        Args:
          in_memory: False: they are only in a checkpoint, which the next use of the model reads again.
        """
        if self._aside is not None and self._aside.checkpoint is not None:
            return
        # Averages may be in the place of some weights. These are kept already.
        kept: Mapping[str, Any] = {}
        if self._aside is not None:
            kept = self._aside.values
        if in_memory:
            self._aside = _Aside({**self.values(), **kept}, (self.keys, self._values_of))
        else:
            self._aside = _Aside({}, (self.keys, None))

    def show_weights(self) -> None:
        """Restore the weights that `show_averages` replaced, or all values that `set_aside` kept."""
        self.shown = None
        if self._aside is None:
            return
        aside = self._aside
        self._aside = None
        self._put(aside.values)
        if aside.checkpoint is not None:
            self.keys, self._values_of = aside.checkpoint

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign values to variables on all replicas.

        Args:
          values: variable name -> value of the variable's shape.
        """
        self.begin_to_write()
        self._put(values)

    def _put(self, values: Mapping[str, Any]) -> None:
        """Assign values, as `assign` does, of which the caller knows whose they are."""
        variables = self.store.saved if values else {}
        with self.store.scope():
            for name, value in values.items():
                assign(variables[name], value)

    def values(self) -> dict[str, Any]:
        """Return name -> tensor: the value of every variable that belongs in a checkpoint, one value for all replicas.

        The value of a variable partitioned over parameter servers is a tuple of its parts, which stay on the servers.
        Nothing is copied: a tensor shares the buffer of its variable until the variable is next updated.
        """
        with self.store.scope():
            return {name: value_of(variable) for name, variable in self.store.saved.items()}

    def values_by_key(self) -> dict[str, Any]:
        """Return `values` by their keys in a checkpoint."""
        values = self.values()
        object_graph, keys_of_objects = self.objects
        keys = {**self.keys, **keys_of_objects}
        by_key = {name: value for name, value in values.items() if name not in keys}
        # The key may be another variable's name, as in a Saver that maps names.
        by_key |= {key: values[name] for name, key in keys.items() if name in values}
        if object_graph:
            by_key[OBJECT_GRAPH] = tf.constant(object_graph)
        return by_key

    def _initial_values(self, reader: Reader, keys: Mapping[str, str]) -> dict[str, Any]:
        """Return name -> initial value of the variables that the checkpoint lacks and that are initialized anew.

        These variables are state of options (train.ema_decay, mixed_float16) that were off when the checkpoint was
        written, or of hooks that the run did not have. The initial value may be the name of another variable, whose
        value is copied.
        """
        saved = self.store.saved
        averaged: dict[str, str] = {}  # name of an average -> name of its weight
        if self._config.ema_decay:
            averaged = {average_name(name): name for name in saved}
        of_hooks = [name for name, spec in self.store.saved_specs.items() if spec.of_hook]
        others = [*LossScale.NAMES, *of_hooks]
        new: dict[str, Any] = {}
        for name in (*averaged, *others):
            if name not in saved or name in keys or reader.has(name):
                continue
            new[name] = self.store.initial_value(name) if name in others else averaged[name]
        if new:
            _log.info("%s does not contain %s, which get initial values.", reader.path, ", ".join(new))
        return new

    def _warn_of_learning_rates(self, restored: Collection[str], path: str) -> None:
        """Warn if model_fn changed a learning rate that Keras keeps in a variable: the restored value applies."""
        specs = self.store.saved_specs
        for name in restored:
            initial = specs[name].initial
            is_rate = name.endswith("learning_rate")
            is_of_schedule = name.endswith("current_learning_rate")  # of tf_keras, which sets it at each update
            if not is_rate or is_of_schedule or callable(initial):  # a function has no value to compare
                continue
            with self.store.scope():
                value = value_of(self.store.saved[name]).numpy()
            if not np.allclose(initial, value):
                _log.warning(
                    "%s: the value %g of %s is kept, and model_fn's %g is ignored. Use a schedule or a new model_dir.",
                    name,
                    value,
                    path,
                    float(initial),
                )


class MissingVariableError(ValueError):
    """A checkpoint lacks a variable of the model."""


class VariableShapeError(ValueError):
    """A checkpoint has a variable of the model in another shape."""


def check_shapes(
    reader: Reader, shapes: Mapping[str, tf.TensorShape], new: Collection[str], keys: Mapping[str, str]
) -> None:
    """Check that a checkpoint has each variable of a model in the right shape.

    Args:
      reader: the checkpoint.
      shapes: variable name -> shape in the model.
      new: names of variables that are initialized anew and may be missing.
      keys: variable name -> its key, if a Scaffold's saver uses another than its name.

    Raises:
      MissingVariableError: the checkpoint lacks a variable.
      VariableShapeError: it has one in another shape.
    """
    found = {name: reader.shape(keys.get(name, name)) for name in shapes}
    missing = [name for name, shape in found.items() if shape is None and name not in new]
    renamed = [name for name in missing if name in keys]
    if renamed:
        keys_of_renamed = ", ".join(repr(keys[name]) for name in renamed)
        names_of_renamed = ", ".join(map(repr, renamed))
        raise MissingVariableError(
            f"checkpoint {reader.path} has no {keys_of_renamed}, under which the saver of model_fn's Scaffold stores "
            f"{names_of_renamed}. The checkpoint has: {', '.join(reader.names())}."
        )
    if missing:
        raise MissingVariableError(
            f"checkpoint {reader.path} has no variable {', '.join(map(repr, missing))}. "
            f"It was written by a model with: {', '.join(reader.names())}. "
            "Every mode of model_fn uses the variables of TRAIN under the same names. "
            "If you changed the model, undo the change or use a new model_dir."
        )
    for name, requested in shapes.items():
        shape = found[name]
        if shape is not None and not requested.is_compatible_with(shape):
            raise VariableShapeError(
                f"variable {name!r} is {list(shape)} in checkpoint {reader.path}, but model_fn requests "
                f"{requested.as_list()}. Undo the change, or use a new model_dir."
            )
