"""tf.estimator's Estimator on the runner's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from runner import estimator, run_config
from runner.classic.inputs import named_only
from runner.classic.logged import LoggedJournal, LoggedProgress
from runner.classic.run_config import RunConfig
from runner.classic.semantics import as_classic, eagerly
from runner.classic.warm_start import as_warm_start
from runner.inputs import Feed, Input
from runner.loop import TrainingRun


class Estimator(estimator.Estimator):
    """As `runner.Estimator`, with the arguments and defaults that tf.estimator had.

    Args:
      model_fn: called with those of features, labels, mode, params, config that it declares.
      model_dir: folder of checkpoints and events; None: config's, or a temporary one.
      config: of this module's kind or of the runner's; None: `tf.estimator.RunConfig()`, which reads TF_CONFIG.
      params: for model_fn and input functions, a dict or any object; each call gets a copy.
      warm_start_from: path of a checkpoint or of a SavedModel, of which all trainable variables are taken, or
        `WarmStartSettings`. Only a model without a checkpoint begins with them.

    Raises:
      ValueError: config is something else; model_dir differs from config's; model_fn's arguments cannot be filled.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: run_config.RunConfig | None = None,
        params: Any = None,
        warm_start_from: Any = None,
        **engine: Any,
    ) -> None:
        config = RunConfig() if config is None else config
        if warm_start_from is not None and isinstance(config, run_config.RunConfig):
            config = config.replace(warm_start=as_warm_start(warm_start_from))
        engine.setdefault("journal", LoggedJournal())
        engine.setdefault("progress", LoggedProgress())
        super().__init__(as_classic(model_fn), model_dir, config, params, **engine)
        if isinstance(config, RunConfig):
            config.say_without_effect()

    evaluate = eagerly(estimator.Estimator.evaluate)
    experimental_export_all_saved_models = eagerly(estimator.Estimator.experimental_export_all_saved_models)
    get_variable_value = eagerly(estimator.Estimator.get_variable_value)

    def predict(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As that of the runner."""
        following = eagerly(super().predict(*args, **kwargs).__next__)
        while True:
            try:
                one = following()
            except StopIteration:
                return
            yield one

    @eagerly
    def train_run(
        self, input_fn: Any, hooks: Sequence[Any] | None = None, *args: Any, **kwargs: Any
    ) -> TrainingRun | None:
        """As that of the runner. Raises: ValueError: this process is none that trains."""
        task_type = self.config.task_type
        if task_type in ("evaluator", "ps"):
            raise ValueError(
                f"Estimator.train: TF_CONFIG says that this process is the {task_type}, which does not train. "
                "train_and_evaluate does what each process has to do."
            )
        if isinstance(self.config, RunConfig):
            self.config.check_strategy()
        return super().train_run(input_fn, hooks, *args, **kwargs)

    def _feed(self, input_fn: Any, mode: str, *args: Any, **kwargs: Any) -> Feed:
        given = input_fn if isinstance(input_fn, Input) else named_only(input_fn)
        return super()._feed(given, mode, *args, **kwargs)

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The function with its params: takes features, labels, mode and, if it wants to, config."""

        def model_fn(features: Any, labels: Any, mode: str, config: Any = None) -> Any:
            return self._model_fn(features, labels, mode)

        return model_fn
