"""What there is of a model_fn: its checkpoints in model_dir, and the model on each strategy that it runs under."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from runner import checkpoints, evaluation, manifest, metrics
from runner.agreement import Agreement, agreement_of, check_evaluation
from runner.damage import WholeCheckpoints
from runner.inputs import Feed, Input, build_feed
from runner.journal import Journal, NullJournal
from runner.model import Model
from runner.model_fn import ModeKeys, ModelFn
from runner.report import NullProgress, Progress
from runner.run_config import RunConfig, config_in
from runner.seeds import seeded

_log = logging.getLogger(__name__)

InputFn = Callable[..., Any] | Input


class StoredModel:
    """A model_fn with its settings and its `model_dir`: what all methods of an Estimator share. It is made as one."""

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        *,
        journal: Journal | NullJournal | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config = config_in(model_dir, config)
        self._params = copy.deepcopy({} if params is None else params)
        self._model_fn = ModelFn(model_fn, self._params, self._config)
        self._journal = journal or NullJournal()
        self._progress = progress or NullProgress()
        check_evaluation(self._config.train_distribute, self._config.eval_distribute)
        self._agreement = agreement_of(self._config.train_distribute)
        self._models: dict[int, Model] = {}  # by their strategy
        self._checkpoints = WholeCheckpoints(self.model_dir)
        self._said: set[str] = set()

    @property
    def model_dir(self) -> str:
        assert self._config.model_dir is not None
        return self._config.model_dir

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def params(self) -> Any:
        """A copy of the parameters."""
        return copy.deepcopy(self._params)

    @property
    def _is_chief(self) -> bool:
        """Whether the hooks, summaries and events of the chief are those of this process."""
        return self._agreement.is_chief and self._config.is_chief

    @property
    def agreement(self) -> Agreement:
        """Of the workers that train together."""
        return self._agreement

    # --- what is there ----------------------------------------------------------------------------------------

    def agreed_checkpoint(self) -> str | None:
        """As `latest_checkpoint`, the chief's on all workers, which call it together.

        Raises: RuntimeError: this worker does not see it.
        """
        found = self._checkpoints.latest() if self._agreement.is_chief else None
        name = self._agreement.text_of_chief("" if found is None else os.path.basename(found))
        return manifest.awaited(os.path.join(self.model_dir, name)) if name else None

    def latest_checkpoint(self) -> str | None:
        """Path of the newest whole checkpoint in model_dir; None when there is none.

        Raises: DamagedCheckpointsError: there are some, and all of them are damaged.
        """
        return self._checkpoints.latest()

    def get_variable_names(self) -> list[str]:
        """Names of the variables in the latest checkpoint, optimizer slots and global_step among them."""
        return sorted(checkpoints.Reader(self._checkpoint(self.latest_checkpoint(), "get_variable_names")).names())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Value of a variable in the latest checkpoint. Raises: KeyError: there is none of that name."""
        return checkpoints.Reader(self._checkpoint(self.latest_checkpoint(), "get_variable_value")).get(name)

    def eval_dir(self, name: str | None = None) -> str:
        """Where the events of an evaluation go."""
        return os.path.join(self.model_dir, evaluation.prefix(name))

    def announce(self, kind: str, text: str, **fields: Any) -> None:
        """Says `text` to the person who watches, and notes an event of this kind."""
        self._progress.message(text)
        self._journal.event(kind, text=text, **fields)

    # --- parts ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _writer(self) -> Any:
        """Of training's events. It makes a file at once: not before training is prepared."""
        is_on = self._config.tensorboard and self._is_chief
        return metrics.build_writer(self.model_dir, is_on=is_on)

    def _model(self, *, training: bool) -> Model:
        """The model on the strategy of training, or on that of evaluation where it is another one."""
        strategy = self._config.train_distribute
        if not training and self._config.eval_distribute is not None:
            strategy = None if self._config.eval_distribute == "default" else self._config.eval_distribute
        return self._model_on(strategy)

    def _model_on(self, strategy: tf.distribute.Strategy | None) -> Model:
        if id(strategy) not in self._models:
            self._models[id(strategy)] = Model(self._model_fn, strategy, config=self._config, journal=self._journal)
        return self._models[id(strategy)]

    def _feed(self, input_fn: InputFn, mode: str, model: Model, num_epochs: int | None = None, **place: int) -> Feed:
        # As tf.estimator seeded the graph before input_fn was called: what shuffles in it, shuffles the same way.
        together = model.agreement
        place = {"worker_index": together.worker_index, "num_workers": together.num_workers} | place
        with seeded(self._config.seed):
            feed = build_feed(
                input_fn,
                mode=mode,
                params=self._params,
                config=self._config,
                num_replicas=model.num_replicas(training=mode == ModeKeys.TRAIN),
                agreement=together,
                num_parts=self._config.gradient_accumulation if mode == ModeKeys.TRAIN else 1,
                num_epochs=num_epochs,
                **place,
            )
        self._say_once(f"Input ({mode}): sharding {feed.shard}: {feed.reason}")
        return feed

    def _say_once(self, text: str) -> None:
        """Logs what would be the same for each evaluation."""
        if text not in self._said:
            self._said.add(text)
            _log.info("%s", text)

    def _checkpoint(self, path: str | None, command: str) -> str:
        if path is None:
            raise ValueError(
                f"{command}: there is no checkpoint in {self.model_dir}. Train first, or give the model_dir of a model "
                "that was trained."
            )
        return path
