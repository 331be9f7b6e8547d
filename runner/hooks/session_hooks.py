"""Calls of `tf.compat.v1.train.SessionRunHook`s at traced steps; the hooks' fetches become outputs of the step.

`SessionHooks` has all hooks of a run. A `Caller` decides at which steps one hook is called: most hooks at every step,
TensorFlow's own hooks only when they are due, as in a session.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.hooks.trace_session import TraceSession, values_of_elements
from runner.tf_private import v1 as v1_bridge
from runner.tracking.tensorboard import EventWriters
from runner.types import StepRequest

v1 = tf.compat.v1
_log = logging.getLogger(__name__)

# TensorFlow's hooks look in this collection for a tensor that reads the global step; without one they add their own.
_GLOBAL_STEP_READ = "global_step_read_op_cache"


class SessionHooks:
    """The SessionRunHooks of one run. As in a session, the traced graph is the default graph while a hook is called.

    TensorFlow's own hooks allow loops of many steps. Any other hook may fetch and stop at any step, so with such a hook
    every loop has one step.

    Args:
      hooks: the hooks.
      session: the session that hooks get.
      writers: the event file writers of SummarySaverHooks; closed at the end of the run.
      is_training: the steps are training steps, which run in loops if the hooks allow it. False: the steps are batches
        of an evaluation or prediction, and hooks are called for each batch.

    Attributes:
      stop_requested: a hook has requested that this was the last step.
    """

    def __init__(
        self, hooks: Sequence[Any], session: TraceSession, writers: EventWriters, *, is_training: bool
    ) -> None:
        self.session = session
        self._callers = [caller_of(hook, session.tensor, writers.of, is_training=is_training) for hook in hooks]
        self._writers = writers
        self._is_training = is_training
        self.stop_requested = False
        self._calls: list[_Call] = []
        self._step = 0

    @property
    def max_steps_per_loop(self) -> int | None:
        """The largest number of steps per loop that these hooks allow; None: any."""
        limits = [caller.steps for caller in self._callers if caller.steps is not None]
        return min(limits, default=None)

    def steps_until_due(self, step: int) -> float:
        """Return the number of steps from global step `step` after which a loop must end; infinite: any."""
        return min((caller.steps_until_due(step) for caller in self._callers), default=math.inf)

    @property
    def is_empty(self) -> bool:
        return not self._callers

    def begin(self) -> None:
        """Call `begin` of the hooks, inside `Model.extended`, and warn of hooks that allow only one step per loop."""
        self._offer_global_step()
        for caller in self._callers:
            if self._is_training and caller.forces_loops_of_one_step:
                _log.warning(
                    "The hook %s may fetch or stop at any step, so training runs one step per loop. Short steps then "
                    "take several times as long.",
                    type(caller.hook).__name__,
                )
            with self.session.entered():
                caller.begin()

    def start(self, request_stop: Callable[[str], None] = lambda reason: None) -> None:
        """Call `after_create_session` of the hooks before the first step.

        Args:
          request_stop: called with the reason when a hook requests a stop; `stop_requested` tells it, too.
        """
        self._request_stop = request_stop
        with self.session.entered():
            for caller in self._callers:
                caller.hook.after_create_session(self.session, None)

    def request(self, step: int) -> StepRequest:
        """Call `before_run` of the hooks that are due, and return what they request of the step that ends at global
        step `step`; falsy if no hook is called.

        Raises:
          ValueError: a hook requests something that a traced step does not have.
        """
        self._calls = []
        self._step = step
        feeds: list[tuple[tf.Tensor, tf.Tensor]] = []
        with self.session.entered():
            for caller in self._callers:
                if not caller.is_due(step):
                    continue
                context = v1.train.SessionRunContext(v1.train.SessionRunArgs(None), self.session)
                args = caller.before_run(context)
                elements: list[Any] = []
                if args.fetches is not None:
                    elements = self.session.elements(args.fetches)
                if args.options is not None and args.options.trace_level:
                    raise ValueError(
                        f"The hook {type(caller.hook).__name__} requests a trace of the step "
                        "(SessionRunArgs(options=...)), which only a session can make. Use tf.profiler.experimental."
                    )
                self._calls.append(_Call(caller, context, args.fetches, elements))
                if args.feed_dict:
                    feeds += self.session.feeds(args.feed_dict.items())
            fetches = self._fetched_elements()
            if self._calls and not fetches:
                # A hook without fetches is called after its step as well, so a loop must end with that step, too.
                fetches = self.session.elements(v1.train.get_global_step())
        placeholders = [placeholder for placeholder, _ in feeds]
        names = collections.Counter(placeholder.name for placeholder in placeholders)
        if len(names) < len(placeholders):
            ((twice, _),) = names.most_common(1)
            raise ValueError(f"Two hooks feed the same tensor: {twice!r}.")
        return StepRequest(fetches, placeholders, [value for _, value in feeds])

    def after_run(self, values: Sequence[np.ndarray]) -> None:
        """Call `after_run` of the hooks that were called before the step, with the values that they requested.

        Args:
          values: NumPy values in the order of the last request; operations have no value.
        """
        elements = self._fetched_elements()
        of_elements = values_of_elements(elements, iter(values))
        self.session.remember(elements, of_elements)
        remaining = iter(of_elements)
        for call in self._calls:
            results = None
            if call.fetches is not None:
                results = self.session.packed(call.fetches, remaining)
            with self.session.entered():
                run_values = v1.train.SessionRunValues(results, v1.RunOptions(), v1.RunMetadata())
                call.caller.after_run(call.context, run_values, self._step)
            if call.context.stop_requested:
                self.stop_requested = True
                self._request_stop(f"{type(call.caller.hook).__name__} requested it")

    def _fetched_elements(self) -> list[Any]:
        elements: list[Any] = []
        for call in self._calls:
            elements += call.elements
        return elements

    def end(self) -> None:
        """Call `end` of the hooks."""
        self.session.end()
        with self.session.entered():
            for caller in self._callers:
                caller.hook.end(self.session)

    def close(self) -> None:
        """Release what the hooks hold, however the run ended."""
        for caller in self._callers:
            caller.close()
        self._writers.close()

    def _offer_global_step(self) -> None:
        """Add the tensor from which TensorFlow's hooks read the global step; otherwise they need a v1 variable."""
        graph = self.session.graph
        if not graph.get_collection(_GLOBAL_STEP_READ):
            with graph.as_default():
                step = v1.train.get_global_step().read_value()
                graph.add_to_collection(_GLOBAL_STEP_READ, tf.identity(step))


class _Call(NamedTuple):
    """The call of a hook at one step.

    Attributes:
      caller: calls the hook.
      context: the SessionRunContext that its `before_run` got.
      fetches: what it requested; None: nothing.
      elements: the tensors and operations of `fetches`.
    """

    caller: Caller
    context: Any
    fetches: Any
    elements: Sequence[Any]


# --- at which steps a hook is called ---------------------------------------------------------------------------------


class Caller:
    """Calls a hook at every step, because it may fetch and stop at any step.

    Args:
      hook: a SessionRunHook.
      resolve: returns the graph tensor for a name, a variable or a tensor.
      writer_of: returns the event file writer of a folder.

    Attributes:
      steps: largest number of steps per loop; None: any number.
    """

    steps: int | None = 1
    forces_loops_of_one_step = True

    def __init__(self, hook: Any, resolve: Callable[[Any], Any], writer_of: Callable[[str], Any]) -> None:
        self.hook = hook
        self._resolve = resolve
        self._writer_of = writer_of
        self._until_end = contextlib.ExitStack()

    def steps_until_due(self, step: int) -> float:
        """Return the number of steps from global step `step` after which a loop must end."""
        return 1

    def is_due(self, step: int) -> bool:
        """Report whether the hook takes part in the step that ends at `step`."""
        return True

    def begin(self) -> None:
        """Call `begin` of the hook, with the runner's writer of event files, and tensors in place of their names."""
        # Not isinstance: a mock says that it is of the class of its spec, and lacks what only objects have.
        if issubclass(type(self.hook), v1.train.SummarySaverHook):
            self._until_end.enter_context(v1_bridge.writer_given(self.hook, self._writer_of))
        with contextlib.ExitStack() as stack:
            if issubclass(type(self.hook), v1.train.LoggingTensorHook):
                stack.enter_context(v1_bridge.tensors_resolved(self.hook, self._find))
            self.hook.begin()

    def _find(self, tensor: Any) -> Any:
        try:
            return self._resolve(tensor)
        except ValueError:
            if type(self.hook) is v1.train.LoggingTensorHook:
                raise
            return tensor  # not found: a subclass may override `begin` and never use it

    def before_run(self, context: Any) -> Any:
        """Return the hook's SessionRunArgs. Tensors that the hook will log at the end are fetched while there is a
        batch.
        """
        args = self.hook.before_run(context)
        if args is None:
            args = v1.train.SessionRunArgs(v1_bridge.tensors_logged_at_end(self.hook))
        return args

    def after_run(self, context: Any, values: Any, step: int) -> None:
        self.hook.after_run(context, values)

    def close(self) -> None:
        """Release what the hook holds, however the run ended."""
        self._until_end.close()


class _AtTheEnds(Caller):
    """Calls a hook only before the first step and after the last: FinalOpsHook, hooks without a method for steps."""

    steps = None
    forces_loops_of_one_step = False

    def steps_until_due(self, step: int) -> float:
        return math.inf

    def is_due(self, step: int) -> bool:
        return False


class _AtItsTurn(Caller):
    """Calls one of TensorFlow's own hooks when its timer is due.

    Such a hook counts steps, and decides by its count whether to log or save. It misses the steps between its calls, so
    its count is first set to what it would be after a call at each step.
    """

    forces_loops_of_one_step = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps, self._secs = v1_bridge.cadence_of_timer(self.hook)
        # The last step at which the hook was called, and its count after that call.
        self._last_call: tuple[int, int] | None = None

    def steps_until_due(self, step: int) -> float:
        if self._last_call is None:
            has_timer = self.steps is not None or self._secs is not None
            return 1 if has_timer else math.inf  # the hook is first due at the first step
        last_turn = v1_bridge.last_turn(self.hook)
        if self.steps is None or last_turn is None:
            return math.inf
        called_at, count = self._last_call
        # The step after `called_at` has the number `count` in the hook's own count.
        next_turn = called_at + 1 + (last_turn + self.steps - count)
        return max(1, next_turn - step)

    def is_due(self, step: int) -> bool:
        """Report whether the hook takes part in the step that ends at `step`, after setting the count of the hook."""
        if self._last_call is not None:
            called_at, count = self._last_call
            v1_bridge.set_count(self.hook, count + step - called_at - 1)
        # A SummarySaverHook has no count before its first step. A hook that logs at the end keeps the values of a call.
        is_without_count = v1_bridge.count_of(self.hook) is None
        if is_without_count or v1_bridge.tensors_logged_at_end(self.hook) is not None:
            return True
        return v1_bridge.is_turn(self.hook)

    def after_run(self, context: Any, values: Any, step: int) -> None:
        super().after_run(context, values, step)
        count = v1_bridge.count_of(self.hook)
        assert count is not None
        self._last_call = step, count


def caller_of(
    hook: Any, resolve: Callable[[Any], Any], writer_of: Callable[[str], Any], *, is_training: bool = True
) -> Caller:
    """Return the Caller that calls `hook` least often.

    It never calls a hook at steps if the hook overrides neither `before_run` nor `after_run`. It calls the Logging and
    SummarySaver hooks of TensorFlow when they are due, and any other hook at every step.

    Args:
      hook: a SessionRunHook.
      resolve, writer_of: as in Caller.
      is_training: as in SessionHooks.
    """
    # Methods of the object, not of its class: they may be set on an object, and a mock has no others.
    before_run = _function_of(hook.before_run)
    after_run = _function_of(hook.after_run)

    def has_methods_of(kind: Any) -> bool:
        return before_run == kind.before_run and after_run == kind.after_run

    if has_methods_of(v1.train.SessionRunHook):
        return _AtTheEnds(hook, resolve, writer_of)
    # In an evaluation the global step, by which a SummarySaverHook counts, stands still. The hook must then see and
    # count each batch, as in a session.
    is_summary_hook_of_training = is_training and has_methods_of(v1.train.SummarySaverHook)
    if has_methods_of(v1.train.LoggingTensorHook) or is_summary_hook_of_training:
        return _AtItsTurn(hook, resolve, writer_of)
    return Caller(hook, resolve, writer_of)


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", method)
