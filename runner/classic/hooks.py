"""The hooks of tf.estimator: TensorFlow's own, which the engine runs, and those that only tf.estimator had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.estimator import Estimator
from runner.hooks import Every, Hook, Run
from runner.loop import TrainingRun
from runner.types import StepResult

_train = tf.compat.v1.train

CheckpointSaverHook = _train.CheckpointSaverHook
CheckpointSaverListener = _train.CheckpointSaverListener
FeedFnHook = _train.FeedFnHook
FinalOpsHook = _train.FinalOpsHook
GlobalStepWaiterHook = _train.GlobalStepWaiterHook
LoggingTensorHook = _train.LoggingTensorHook
NanLossDuringTrainingError = _train.NanLossDuringTrainingError
NanTensorHook = _train.NanTensorHook
ProfilerHook = _train.ProfilerHook
SecondOrStepTimer = _train.SecondOrStepTimer
SessionRunArgs = _train.SessionRunArgs
SessionRunContext = _train.SessionRunContext
SessionRunHook = _train.SessionRunHook
SessionRunValues = _train.SessionRunValues
StepCounterHook = _train.StepCounterHook
StopAtStepHook = _train.StopAtStepHook
SummarySaverHook = _train.SummarySaverHook


class InMemoryEvaluatorHook(Hook):
    """Evaluates while training goes on, in the same process and under any strategy.

    What is evaluated is a checkpoint, which is written for it.

    Args:
      estimator: the one that trains.
      input_fn, steps, hooks, name: as of `Estimator.evaluate`.
      every_n_iter: at each multiple of so many global steps, and at the end.

    Raises:
      ValueError: every_n_iter is not positive, or this is no process that evaluates what it trains.
      TypeError: no Estimator.
    """

    def __init__(
        self,
        estimator: Estimator,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        name: str | None = None,
        every_n_iter: int = 100,
    ) -> None:
        if not isinstance(estimator, Estimator):
            raise TypeError(f"InMemoryEvaluatorHook(estimator={estimator!r}): it must be an Estimator.")
        if every_n_iter is None or every_n_iter <= 0:
            raise ValueError(f"InMemoryEvaluatorHook(every_n_iter={every_n_iter}): it must be positive.")
        if estimator.config.num_ps_replicas:
            raise ValueError(
                "InMemoryEvaluatorHook: the variables are on parameter servers. Use train_and_evaluate with EvalSpec."
            )
        self.every = Every(steps=every_n_iter)
        self._evaluate = functools.partial(estimator.evaluate, input_fn, steps=steps, hooks=hooks, name=name)
        self._evaluated: int | None = None

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.every.due(result.first_step - 1, result.last_step):
            assert isinstance(run, TrainingRun)
            run.save()
            self._evaluate()
            self._evaluated = run.global_step

    def end(self, run: Run) -> None:
        if self._evaluated != run.global_step:
            self._evaluate()


def make_stop_at_checkpoint_step_hook(
    estimator: Estimator, last_step: int, wait_after_file_check_secs: float = 30
) -> tf.compat.v1.train.StopAtStepHook:
    """A hook that ends training at the global step `last_step`.

    tf.estimator had workers without a common step wait for the chief's checkpoint; workers stop together here, so
    there is nothing to wait for.
    """
    del estimator, wait_after_file_check_secs
    return _train.StopAtStepHook(last_step=last_step)
