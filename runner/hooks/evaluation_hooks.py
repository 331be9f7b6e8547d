"""The hooks of one pass over data at a checkpoint: an evaluation or a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runner.hooks.builtin_hooks import split_hooks
from runner.hooks.hook import Hook, PassContext
from runner.hooks.session_hooks import SessionHooks
from runner.hooks.trace_session import TraceSession
from runner.tracking.tensorboard import EventWriters


class EvaluationHooks:
    """The hooks of one evaluation or prediction; those that only steer training (StopAtStepHook, ..) are left out.

    Args:
      writers: as of SessionHooks.
      count: called with the examples seen so far, before the hooks are.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        session: TraceSession,
        run: PassContext,
        writers: EventWriters,
        count: Callable[[int], None],
    ) -> None:
        _, native, v1_hooks = split_hooks(hooks)
        self.session = SessionHooks(v1_hooks, session, writers, in_loops=False)
        self._hooks: Sequence[Hook] = native
        self._run, self._count = run, count

    def begin(self) -> None:
        self.session.begin()
        for hook in self._hooks:
            hook.begin(self._run)

    def after_batches(self, examples: int) -> None:
        """Tell the hooks how many examples have been seen. Raises: Interrupted: one will not wait for the rest."""
        self._count(examples)
        for hook in self._hooks:
            if hasattr(hook, "after_batches"):  # a hook needs no base class, and this method is newer than the others
                hook.after_batches(self._run, examples)

    def end(self) -> None:
        self.session.end()
        for hook in self._hooks:
            hook.end(self._run)
        self.session.close()
