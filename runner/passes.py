"""A pass over data at one checkpoint, an evaluation or a prediction, as its hooks see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from runner.event_writers import EventWriters
from runner.hook_overrides import split_hooks
from runner.hooks import Hook, PassRun
from runner.session_hooks import SessionHooks
from runner.traced import Trace


class Pass:
    """The hooks of one pass; those that only steer training (StopAtStepHook, ..) have no part in it.

    Args:
      operators, writers: as of SessionHooks.
      count: called with the examples seen so far, before the hooks are.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        trace: Trace,
        operators: Callable[[], contextlib.AbstractContextManager[None]],
        run: PassRun,
        writers: EventWriters,
        count: Callable[[int], None],
    ) -> None:
        _, native, session = split_hooks(hooks)
        self.session = SessionHooks(session, trace, operators, _refuse, writers, in_loops=False)
        self._hooks: Sequence[Hook] = native
        # A hook needs no base class, and this method is newer than the others.
        self._told = [hook.after_batches for hook in native if hasattr(hook, "after_batches")]
        self._run, self._count = run, count

    def begin(self) -> None:
        self.session.begin()
        for hook in self._hooks:
            hook.begin(self._run)

    def after_batches(self, examples: int) -> None:
        """So many have been seen. Raises: Interrupted: a hook will not wait for the rest."""
        self._count(examples)
        for told in self._told:
            told(self._run, examples)

    def end(self) -> None:
        self.session.end()
        for hook in self._hooks:
            hook.end(self._run)
        self.session.close()


def _refuse(reason: str) -> None:
    raise RuntimeError(f"{reason}: only training can be stopped; give evaluate(steps=).")
