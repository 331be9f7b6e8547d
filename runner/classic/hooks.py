"""The hooks that only tf.estimator had. compat/names.py lists where TensorFlow has the others."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.estimator.estimator import Estimator
from runner.estimator.specs import check_positive
from runner.estimator.train_loop import TrainingRun
from runner.hooks.builtin_hooks import checked
from runner.hooks.hook import Every, Hook, Run
from runner.tf_private.v1 import SessionProfilerHook
from runner.tracking.tensorboard import EventWriters
from runner.types import StepResult


@dataclasses.dataclass(frozen=True)
class _EachNth(Every):
    """A cadence that is due before and after each N-th step, so that this step runs in a loop of its own."""

    def due(self, before: int, after: int, elapsed_secs: float = 0.0) -> bool:
        return super().due(before + 1, after + 1) or super().due(before, after, elapsed_secs)

    def steps_until_due(self, step: int) -> float:
        return min(super().steps_until_due(step), super().steps_until_due(step + 1))


class ProfilerHook(Hook, tf.compat.v1.train.SessionRunHook):
    """Profiles single steps for TensorBoard. The hook of tf.estimator wrote timelines of session runs instead; made in
    a graph of TensorFlow 1, it is TensorFlow's own, for a MonitoredSession.

    Args:
      save_steps: profile each global step that is a multiple of this number; None: by seconds.
      save_secs: profile a loop of steps every N seconds; None: by steps.
      output_dir: write profiles to `plugins/profile` in this folder; "": in model_dir.
      show_dataflow, show_memory: options of timelines.

    Raises:
      ValueError: both or neither of save_steps and save_secs are given.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or tf.inside_function():
            return super().__new__(cls)
        return SessionProfilerHook(*args, **kwargs)

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
    ) -> None:
        del show_dataflow, show_memory
        if (save_steps is None) == (save_secs is None):
            raise ValueError(f"ProfilerHook(save_steps={save_steps}, save_secs={save_secs}): give exactly one of them.")
        self.every = _EachNth(steps=save_steps)
        self._every_steps = save_steps
        self._every_secs = save_secs
        self._folder = output_dir
        self._last_profile = time.monotonic()
        self._is_running = False

    def before_step(self, run: Run, step: int) -> None:
        if self._every_steps:
            is_due = (step + 1) % self._every_steps == 0
        else:
            is_due = time.monotonic() - self._last_profile >= (self._every_secs or 0)
        if is_due:
            tf.profiler.experimental.start(self._folder or run.model_dir)
            self._is_running = True

    def after_step(self, run: Run, result: StepResult) -> None:
        self.close(run)

    def close(self, run: Run) -> None:
        if self._is_running:
            self._is_running = False
            self._last_profile = time.monotonic()
            tf.profiler.experimental.stop()


class InMemoryEvaluatorHook(Hook, tf.compat.v1.train.SessionRunHook):
    """Evaluates during training in the same process: saves a checkpoint and evaluates it.

    Args:
      estimator: the Estimator that trains.
      input_fn: as in `Estimator.evaluate`.
      steps: as in `Estimator.evaluate`.
      hooks: as in `Estimator.evaluate`.
      name: as in `Estimator.evaluate`.
      every_n_iter: evaluate at global steps that are multiples of this number; also before the first step and at the
        end of training.

    Raises:
      ValueError: every_n_iter or steps is not positive, or the variables are on parameter servers.
      AttributeError: estimator is not an Estimator.
      TypeError: a hook is none.
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
            raise AttributeError(f"InMemoryEvaluatorHook(estimator={estimator!r}): it must be an Estimator.")
        if every_n_iter is None or every_n_iter <= 0:
            raise ValueError(f"InMemoryEvaluatorHook(every_n_iter={every_n_iter}): it must be positive.")
        if estimator.config.num_ps_replicas:
            raise ValueError(
                "InMemoryEvaluatorHook does not work with parameter servers. Use train_and_evaluate with EvalSpec."
            )
        check_positive("InMemoryEvaluatorHook({})", steps=steps)
        hooks = checked("hook", hooks)
        self.every = Every(steps=every_n_iter)
        self._estimator = estimator
        self._call_evaluate = functools.partial(estimator.evaluate, input_fn, steps=steps, hooks=hooks, name=name)
        self._evaluated_step: int | None = None
        self._writers = EventWriters(is_on=estimator.config.tensorboard)

    def _evaluate(self) -> None:
        with self._estimator.events_in(self._writers):
            self._call_evaluate()

    def begin(self, run: Run) -> None:
        self._evaluated_step = None

    def before_step(self, run: Run, step: int) -> None:
        if self._evaluated_step is None:  # before the first step of this call of train
            assert isinstance(run, TrainingRun)
            run.wait_for_checkpoint()  # the one that `evaluate` reads
            self._evaluate()
            self._evaluated_step = step

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.every.due(result.first_step - 1, result.last_step):
            assert isinstance(run, TrainingRun)
            run.save()
            self._evaluate()
            self._evaluated_step = run.global_step

    def end(self, run: Run) -> None:
        if self._evaluated_step != run.global_step:
            self._evaluate()

    def close(self, run: Run) -> None:
        self._writers.close()


def make_stop_at_checkpoint_step_hook(
    estimator: Estimator, last_step: int, wait_after_file_check_secs: float = 30
) -> tf.compat.v1.train.StopAtStepHook:
    """Return a hook that ends training at the global step `last_step`.

    In tf.estimator, each worker took its own steps and waited for a checkpoint of that step. Here all workers stop at
    the same step, so the other arguments are ignored.

    Raises:
      AttributeError: estimator is not an Estimator.
    """
    del wait_after_file_check_secs
    if not hasattr(estimator, "config"):
        raise AttributeError(f"make_stop_at_checkpoint_step_hook(estimator={estimator!r}): it must be an Estimator.")
    return tf.compat.v1.train.StopAtStepHook(last_step=last_step)
