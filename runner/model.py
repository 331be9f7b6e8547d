"""One model under one strategy: its variables, the programs traced for it, and where its values come from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner import warm_start
from runner.agreement import agreement_of
from runner.averages import average_name
from runner.checkpoints import Reader
from runner.coordinator import Coordinator
from runner.divided import assign, read_on_servers, value_of
from runner.inference import EvalProgram, PredictProgram
from runner.inputs import Feed, Input
from runner.journal import Journal, NullJournal
from runner.model_fn import ModelFn
from runner.numbered_names import numbered
from runner.parameter_server import is_parameter_server
from runner.placement import Servers
from runner.precision import LossScale, with_precision
from runner.range_evaluation import RangeEvaluation
from runner.range_loop import RangeLoop
from runner.run_config import RunConfig, WarmStart
from runner.seeds import seeded
from runner.sharding import Rows
from runner.spread import Spread
from runner.steps import TrainProgram
from runner.variables import VariableStore

_log = logging.getLogger(__name__)


class Model:
    """A model_fn with variables.

    Args:
      strategy: None is TensorFlow's default.
      config: the seed, the precision, and what happens between gradients and variables.
      journal: told how long tracing and restoring took.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        strategy: tf.distribute.Strategy | None,
        *,
        config: RunConfig,
        journal: Journal | NullJournal,
    ) -> None:
        self.strategy = strategy
        self.agreement = agreement_of(strategy)
        self.store = VariableStore(strategy, config.seed)
        self.num_traces = 0
        self._config = config
        self._model_fn = with_precision(model_fn, config.precision)
        self._journal = journal
        self._coordinator = Coordinator(strategy) if is_parameter_server(strategy) else None
        self._programs: dict[Any, Any] = {}
        self._values_of: str | None = None
        self._weights: dict[str, Any] = {}

    def num_replicas(self, *, training: bool) -> int:
        """Replicas of this process that a step of training, or of evaluation, runs on."""
        if self.strategy is None or (self.store.has_one_copy and not training):
            return 1
        return len(self.strategy.extended.worker_devices)

    def train_program(self, feed: Feed, *, summary_writer: Any, stop_at_nan: bool) -> TrainProgram:
        """The training step for inputs like `feed`'s; traced the first time it is asked for.

        Args:
          summary_writer: where `tf.summary` inside model_fn goes; always the same one.
        """

        def build() -> TrainProgram:
            return TrainProgram(
                self.store,
                self._model_fn,
                feed,
                self._config,
                summary_writer=summary_writer,
                stop_at_nan=stop_at_nan,
                loop_type=self._loop_type,
            )

        return self._program(("train", stop_at_nan), feed, build)

    def training_feed(self, input_fn: Any, build: Callable[..., Feed]) -> Feed:
        """The training input, as those who train read it.

        Under parameter servers each worker has a copy of the dataset, or, where `shard` says that they divide the data
        themselves, a dataset of its own. A batch is one update in any case.

        Args:
          build: called with the input function, and the place of a worker among several; gives its Feed.
        """
        if self._coordinator is None:
            return build(input_fn)
        workers = self._coordinator.num_workers
        if isinstance(input_fn, Input) and input_fn.shard in ("files", "input_fn"):
            size = input_fn.batch_size
            own = dataclasses.replace(input_fn, batch_size=None if size is None else size * workers)  # it is divided
            feeds = [build(own, worker_index=worker, num_workers=workers) for worker in range(workers)]
        else:
            feeds = [build(input_fn)]
        spread = Spread([feed.dataset for feed in feeds], self._coordinator.workers)
        return dataclasses.replace(feeds[0], dataset=spread, given=spread, division=Rows(0, 1, 1))

    @property
    def _loop_type(self) -> Callable[..., Any] | None:
        """What takes the steps; None: this process does."""
        return None if self._coordinator is None else functools.partial(RangeLoop, coordinator=self._coordinator)

    def eval_program(self, feed: Feed) -> EvalProgram:
        """The evaluation step for inputs like `feed`'s; a coordinator has its workers take it."""

        def build() -> EvalProgram:
            if self._coordinator is None:
                return EvalProgram(self.store, self._model_fn, feed)
            return RangeEvaluation(self.store, self._model_fn, feed, self._coordinator)

        return self._program(("eval",), feed, build)

    def predict_program(self, feed: Feed) -> PredictProgram:
        """The prediction step for inputs like `feed`'s."""
        return self._program(("predict",), feed, lambda: PredictProgram(self.store, self._model_fn, feed))

    def _program(self, kind: tuple[Any, ...], feed: Feed, build: Callable[[], Any]) -> Any:
        key = (*kind, repr(feed.dataset.element_spec), feed.division)
        if key not in self._programs:
            known = set(self.store.saved)
            with self._journal.phase("trace"):
                self._programs[key] = build()
            self.num_traces += 1
            if set(self.store.saved) - known:
                self._values_of = None  # new variables have their initial values, not the checkpoint's
        return self._programs[key]

    # --- values -----------------------------------------------------------------------------------------------

    def restore(self, path: str) -> None:
        """Gives every variable its value in the checkpoint `path`, unless it has it already.

        Raises:
          ValueError: the checkpoint lacks a variable, or has it in another shape.
        """
        self.show_weights()
        if path == self._values_of:
            return
        with self._journal.phase("restore"):
            reader = Reader(path)
            new = self._beginnings(reader)
            self._check(reader, new)
            self._values_of = None
            values = self._read(reader, [name for name in self.store.saved if name not in new])
            values |= {name: values[start] if isinstance(start, str) else start for name, start in new.items()}
            self._warn_of_learning_rates(values, path)
            self.assign(values)
        self._values_of = path

    def begin_with(self, settings: WarmStart) -> warm_start.Loaded:
        """Gives a new model the values that it begins with. Raises: ValueError: see `warm_start.load`."""
        with seeded(self._config.seed):
            loaded = warm_start.load(settings, self.store.saved_specs, self._value)
        self.assign(loaded.values)
        return loaded

    def _value(self, name: str) -> np.ndarray:
        """Of a variable that belongs in a checkpoint, whole."""
        with self._scope():
            parts = tf.nest.flatten(value_of(self.store.saved[name]))
        return np.concatenate([np.atleast_1d(part.numpy()) for part in parts], 0)

    def _read(self, reader: Reader, names: Sequence[str]) -> dict[str, Any]:
        if isinstance(self.store.placement, Servers):
            saved = self.store.saved
            return read_on_servers(reader.path, {name: saved[name] for name in names}, reader.key)
        return {**reader.get_many(names)}

    def show_averages(self, path: str) -> None:
        """Gives the weights the values of their averages in the checkpoint `path`, whose values the model has.

        Raises: ValueError: there are none in it.
        """
        if self._weights:
            return
        reader = Reader(path)
        names = [name for name in self.store.saved if reader.has(average_name(name))]
        if not names:
            raise ValueError(
                f"train.ema_decay={self._config.ema_decay}: {path} has no moving averages of the weights to evaluate. "
                "It was trained without; set train.ema_decay=null."
            )
        saved = self.store.saved
        self._weights = {name: value_of(saved[name]) for name in names}
        self.assign({name: self._average(name, reader) for name in names})

    def show_weights(self) -> None:
        """Takes back `show_averages`."""
        weights, self._weights = self._weights, {}
        self.assign(weights)

    def _average(self, name: str, reader: Reader) -> Any:
        there = average_name(name)
        saved = self.store.saved
        return value_of(saved[there]) if there in saved else reader.get(there)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Gives variables these values, by name, on all replicas."""
        variables = self.store.saved if values else {}
        with self._scope():
            for name, value in values.items():
                assign(variables[name], value)

    def values(self) -> dict[str, Any]:
        """Name -> value of every variable that belongs in a checkpoint, replicas collapsed; of one that is divided over
        parameter servers a tuple of the values of its parts. What is on a server stays there.

        It costs no copy: a tensor shares the buffer of its variable, until an update of that makes a new one.
        """
        with self._scope():
            return {name: value_of(variable) for name, variable in self.store.saved.items()}

    def has_values_of(self, path: str) -> None:
        """Notes that the variables are what the checkpoint `path` holds."""
        self._values_of = path

    def is_stale(self, path: str) -> bool:
        """Whether the variables have other values by now than the checkpoint `path`."""
        return self._values_of != path

    def has_new_values(self) -> None:
        """Notes that the variables are about to change."""
        self._values_of = None

    def not_finite(self) -> list[str]:
        """Names of the variables that hold a value that is not finite."""
        return [name for name, value in self.values().items() if not all(map(_is_finite, tf.nest.flatten(value)))]

    def _beginnings(self, reader: Reader) -> dict[str, Any]:
        """What the checkpoint does not have under its name -> its value, or the name of whose it takes.

        That is state for which its run had no option, and what tf.estimator named otherwise.
        """
        saved = self.store.saved
        averages = {average_name(name): name for name in saved} if self._config.ema_decay else {}
        starts = {
            **averages,
            **{name: self.store.initial_value(name) for name in LossScale.NAMES if name in self.store},
        }
        new = {name: start for name, start in starts.items() if name in saved and not reader.has(name)}
        if new:
            _log.info("%s has no %s: they begin here.", reader.path, ", ".join(new))
        shapes = {name: variable.shape for name, variable in saved.items() if name not in new}
        return new | {name: reader.get(key) for name, key in numbered(reader, shapes).items()}

    def _check(self, reader: Reader, new: Mapping[str, Any]) -> None:
        there = reader.names()
        missing = [name for name in self.store.saved if name not in there and name not in new]
        if missing:
            raise ValueError(
                f"checkpoint {reader.path} has no variable {', '.join(map(repr, missing))}. "
                f"It was written by a model with: {', '.join(there)}. "
                "Every mode of model_fn uses the variables of TRAIN under the same names; "
                "a changed model needs a model_dir of its own."
            )
        for name, variable in self.store.saved.items():
            shape = there[name][0] if name in there else variable.shape
            if not variable.shape.is_compatible_with(shape):
                raise ValueError(
                    f"variable {name!r} is {list(shape)} in checkpoint {reader.path} and was requested as "
                    f"{variable.shape.as_list()}. A name has one shape in all modes."
                )

    def _warn_of_learning_rates(self, values: Mapping[str, Any], path: str) -> None:
        """Keras keeps the learning rate in a variable: a new one in model_fn has no effect on a model that goes on."""
        specs = self.store.saved_specs
        for name, value in values.items():
            initial = specs[name].initial
            if name.endswith("learning_rate") and not callable(initial) and not np.allclose(initial, value):
                _log.warning(
                    "%s is %g in %s, and stays so; model_fn sets %g. A schedule, or a new model_dir, changes it.",
                    name,
                    value,
                    path,
                    float(initial),
                )

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope() if self.strategy is not None else contextlib.nullcontext()


def _is_finite(value: tf.Tensor) -> bool:
    with tf.device(value.device):  # a parameter server's is not fetched for this
        return not value.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(value)))
