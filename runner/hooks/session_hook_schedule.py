"""The steps that a `SessionRunHook` is called at: most at each one, TensorFlow's own at their turn, as in a session."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.tf_private import v1 as v1_bridge

v1 = tf.compat.v1


class Caller:
    """Calls a hook that may fetch and stop at any step: at each.

    Args:
      resolve: the tensor of the graph that a name, a variable or a tensor stands for.
      writer_of: the writer of event files in a folder.

    Attributes:
      steps: the most that a loop may have; None: any number.
    """

    steps: int | None = 1
    costs_the_loop = True

    def __init__(self, hook: Any, resolve: Callable[[Any], Any], writer_of: Callable[[str], Any]) -> None:
        self.hook, self._resolve, self._writer_of = hook, resolve, writer_of
        self._until_end = contextlib.ExitStack()

    def steps_until_due(self, step: int) -> float:
        """Return the steps from global step `step` to where a loop must end."""
        return 1

    def is_due(self, step: int) -> bool:
        """Report whether the step that ends at `step` is to be taken with the hook."""
        return True

    def begin(self) -> None:
        if isinstance(self.hook, v1.train.SummarySaverHook):
            self._until_end.enter_context(v1_bridge.writer_given(self.hook, self._writer_of))
        with contextlib.ExitStack() as stack:
            if isinstance(self.hook, v1.train.LoggingTensorHook):
                stack.enter_context(v1_bridge.tensors_resolved(self.hook, self._found))
            self.hook.begin()

    def _found(self, tensor: Any) -> Any:
        try:
            return self._resolve(tensor)
        except ValueError:
            if type(self.hook) is v1.train.LoggingTensorHook:
                raise
            return tensor  # a subclass may have another begin

    def before_run(self, context: Any) -> Any:
        """Return its SessionRunArgs. Tensors that it logs at the end are fetched while there is a batch."""
        args = self.hook.before_run(context)
        return v1.train.SessionRunArgs(v1_bridge.tensors_logged_at_end(self.hook)) if args is None else args

    def after_run(self, context: Any, values: Any, step: int) -> None:
        self.hook.after_run(context, values)

    def close(self) -> None:
        """Give back what the hook holds, however the run ended."""
        self._until_end.close()


class _AtTheEnds(Caller):
    """Calls a hook that has nothing to do while steps are taken: FinalOpsHook, and whoever only looks at both ends."""

    steps = None
    costs_the_loop = False

    def steps_until_due(self, step: int) -> float:
        return math.inf

    def is_due(self, step: int) -> bool:
        return False


class _AtItsTurn(Caller):
    """Calls one of TensorFlow's own, which counts the calls: it is told of the steps between them."""

    costs_the_loop = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps, self._secs = v1_bridge.cadence_of_timer(self.hook)
        self._called: tuple[int, int] | None = None  # the last step that it saw, and its count after that

    def steps_until_due(self, step: int) -> float:
        if self._called is None:  # its first turn is the first step
            return math.inf if self.steps is None and self._secs is None else 1
        last = v1_bridge.last_turn(self.hook)
        if self.steps is None or last is None:
            return math.inf
        at, count = self._called
        return max(1, last + self.steps - count + at + 1 - step)

    def is_due(self, step: int) -> bool:
        if self._called is not None:
            at, count = self._called
            v1_bridge.set_count(self.hook, count + step - at - 1)
        if v1_bridge.count_of(self.hook) is None or v1_bridge.tensors_logged_at_end(self.hook) is not None:
            return True
        return v1_bridge.is_turn(self.hook)

    def after_run(self, context: Any, values: Any, step: int) -> None:
        super().after_run(context, values, step)
        count = v1_bridge.count_of(self.hook)
        assert count is not None
        self._called = step, count


def caller_of(
    hook: Any, resolve: Callable[[Any], Any], writer_of: Callable[[str], Any], *, in_loops: bool = True
) -> Caller:
    """Return the caller that fits `hook`.

    Args:
      in_loops: the steps are those of training. Else the global step stays where it is, and each batch is seen: a
        SummarySaverHook counts as it does in a session.
    """
    base, kind = v1.train.SessionRunHook, type(hook)
    if kind.before_run is base.before_run and kind.after_run is base.after_run:
        return _AtTheEnds(hook, resolve, writer_of)
    counts = v1.train.LoggingTensorHook, *((v1.train.SummarySaverHook,) if in_loops else ())
    if any(kind.before_run is one.before_run and kind.after_run is one.after_run for one in counts):
        return _AtItsTurn(hook, resolve, writer_of)
    return Caller(hook, resolve, writer_of)
