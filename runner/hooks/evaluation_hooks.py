"""The hooks of one evaluation or prediction at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from runner.hooks.builtin_hooks import split_hooks
from runner.hooks.fetches import NO_EXAMPLE_HOOKS, ExampleHooks
from runner.hooks.hook import PassContext
from runner.hooks.keras_callbacks import check_no_callbacks
from runner.hooks.session_hooks import SessionHooks
from runner.hooks.trace_session import TraceSession
from runner.model_log import logging_to
from runner.tracking.tensorboard import EventWriters
from runner.types import StepRequest


class EvaluationHooks:
    """The hooks of one evaluation or prediction. Hooks that only control training (StopAtStepHook and so on) are left
    out.

    Args:
      hooks: native hooks and SessionRunHooks; a callback of Keras is refused.
      session: the session that SessionRunHooks get.
      run: the evaluation or prediction, as hooks see it.
      writers: as in SessionHooks.
      count: called with the number of examples seen so far, before each call of the hooks.
      examples: those of the hooks that fetch values of examples; of a prediction, none do.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        session: TraceSession,
        run: PassContext,
        writers: EventWriters,
        count: Callable[[int], None],
        examples: ExampleHooks = NO_EXAMPLE_HOOKS,
    ) -> None:
        check_no_callbacks(hooks)
        _, native, v1_hooks = split_hooks(hooks)
        self._examples = examples
        self.session = SessionHooks(v1_hooks, session, writers, is_training=False)
        self._hooks = native
        self._run = run
        self._count = count

    @property
    def names(self) -> Sequence[str]:
        """What native hooks fetch of each example, the same on all workers."""
        return self._examples.names

    @property
    def see_each_batch(self) -> bool:
        """Report whether each batch is to be a call of its own."""
        return bool(self.names) or not self.session.is_empty

    def start(self, take_batch: Callable[[StepRequest], Sequence[Any]]) -> None:
        """Call what precedes the first batch, after `session.begin()`. Args: take_batch: as in `TraceSession.begin`."""
        self.session.session.begin(self._run, take_batch)
        self.session.start()
        self._call("begin")

    def after_batches(self, examples: int) -> None:
        """Report the number of examples seen so far to the hooks.

        Raises:
          Interrupted: a hook ended the evaluation early.
        """
        self._count(examples)
        self._call("after_batches", examples)

    def after_examples(self, values: Mapping[str, np.ndarray]) -> None:
        """Pass the values of a batch of each replica to the hooks that fetch them. All workers must call this together.

        Args:
          values: those of this worker; {}: it had no further batch.

        Raises:
          Interrupted: a hook ended the evaluation early.
        """
        self._examples.call(self._run, values)

    def end(self) -> None:
        self.session.end()
        self._call("end")
        self.session.close()

    def _call(self, method: str, *args: Any) -> None:
        for hook in self._hooks:
            # after_batches is absent in old hooks, and other methods are in hooks that do not derive from Hook.
            if not hasattr(hook, method):
                continue
            call = getattr(hook, method)
            with logging_to(self._run):
                call(self._run, *args)
