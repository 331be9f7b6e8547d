"""The hooks of one evaluation or prediction at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runner.hooks.builtin_hooks import split_hooks
from runner.hooks.hook import Hook, PassContext
from runner.hooks.session_hooks import SessionHooks
from runner.hooks.trace_session import TraceSession
from runner.tracking.tensorboard import EventWriters


class EvaluationHooks:
    """The hooks of one evaluation or prediction. Hooks that only control training (StopAtStepHook and so on) are left
    out.

    Args:
      hooks: native hooks and SessionRunHooks.
      session: the session that SessionRunHooks get.
      run: the evaluation or prediction, as hooks see it.
      writers: as in SessionHooks.
      count: called with the number of examples seen so far, before each call of the hooks.
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
        """Report the number of examples seen so far to the hooks.

        Raises:
          Interrupted: a hook ended the evaluation early.
        """
        self._count(examples)
        for hook in self._hooks:
            if hasattr(hook, "after_batches"):  # absent in old hooks and in hooks that do not derive from Hook
                hook.after_batches(self._run, examples)

    def end(self) -> None:
        self.session.end()
        for hook in self._hooks:
            hook.end(self._run)
        self.session.close()
