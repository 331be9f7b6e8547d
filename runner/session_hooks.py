"""`tf.compat.v1.train.SessionRunHook`s on a traced step: their fetches become outputs of it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner import v1_bridge
from runner.hooks import Every
from runner.run_config import RunConfig
from runner.traced import Trace

v1 = tf.compat.v1
_log = logging.getLogger(__name__)

# The collection in which TensorFlow's hooks look for the read of the global step, and would put their own.
_GLOBAL_STEP_READ = "global_step_read_op_cache"


class TraceSession:
    """What v1 hooks, listeners and `Scaffold.init_fn` get as `session`: `run` prunes the traced step to the fetches."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reads: dict[int, tf.Tensor] = {}
        self._last: dict[int, Any] = {}

    @property
    def graph(self) -> Any:
        return self._trace.graph

    def remember(self, elements: Sequence[Any], values: Sequence[Any]) -> None:
        """Notes what the last recorded step gave, for hooks that ask once more at the end."""
        self._last = {id(element): value for element, value in zip(elements, values, strict=True)}

    def elements(self, fetches: Any) -> list[Any]:
        """The tensors and operations that `fetches` names, flat; a variable stands for its value after the step."""
        return [self._element(fetch) for fetch in tf.nest.flatten(fetches)]

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """The values of `fetches`. What does not depend on the input can be run; assignments take effect.

        Args:
          feed_dict: placeholder that model_fn made, or its name -> value.

        Raises:
          ValueError: a fetch depends on a batch, or another tensor than a placeholder is fed.
        """
        del options, run_metadata
        elements = self.elements(fetches)
        feeds = [(self._placeholder(key), value) for key, value in (feed_dict or {}).items()]
        if self._trace.needs_inputs(elements):
            if all(id(element) in self._last for element in elements):
                return tf.nest.pack_sequence_as(fetches, [self._last[id(element)] for element in elements])
            raise ValueError(
                f"session.run({fetches!r}) in a hook depends on a batch, and between steps there is none. "
                "Ask for it in before_run: SessionRunArgs(fetches)."
            )
        tensors = [element for element in elements if not isinstance(element, tf.Operation)]
        with tf.init_scope():  # hooks are called with the traced graph as default, which must not call itself
            function = self._trace.function(tensors, elements, with_inputs=False, feeds=[key for key, _ in feeds])
            given = [tf.convert_to_tensor(value, key.dtype) for key, value in feeds]
            values = iter(function(*given))
        flat = [None if isinstance(element, tf.Operation) else next(values).numpy() for element in elements]
        return tf.nest.pack_sequence_as(fetches, flat)

    def _placeholder(self, key: Any) -> Any:
        tensor = self._element(key)
        is_one = getattr(tensor, "op", None) is not None and tensor.op.type.startswith("Placeholder")
        if not is_one or any(tensor is one for one in self._trace.inputs):
            raise ValueError(
                f"session.run(feed_dict={{{key!r}: ...}}) in a hook: only a placeholder that model_fn made can be fed; "
                "the step's input comes from input_fn alone."
            )
        return tensor

    def _element(self, fetch: Any) -> Any:
        if isinstance(fetch, str | bytes):
            name = fetch.decode() if isinstance(fetch, bytes) else fetch
            return self.graph.as_graph_element(name)
        if hasattr(fetch, "read_value"):
            if id(fetch) not in self._reads:
                with self.graph.as_default():
                    self._reads[id(fetch)] = fetch.read_value()
            return self._reads[id(fetch)]
        return fetch


class SessionHooks:
    """The v1 hooks of one training run. Each is called with the traced graph as default, as in a session.

    TensorFlow's own are mapped to the runner's cadences and keep the loop; any other may fetch and stop at any step,
    so `every` is then one step.

    Args:
      stop: called with the reason when a hook requests to stop.
    """

    def __init__(self, hooks: Sequence[Any], trace: Trace, stop: Callable[[str], None]) -> None:
        self._hooks = list(hooks)
        self._session = TraceSession(trace)
        self._stop = stop
        self._asked: list[tuple[Any, Any, Any]] = []
        self._iterations: dict[Any, int] = {}

    @property
    def session(self) -> TraceSession:
        return self._session

    @property
    def every(self) -> Every:
        """Where loops must end for these hooks."""
        cadences = [_cadence(hook) for hook in self._hooks]
        steps = [cadence.steps for cadence in cadences if cadence.steps]
        return Every(steps=int(np.gcd.reduce(steps)) if steps else None)

    def listeners(self, listeners: Sequence[Any]) -> list[Any]:
        """`listeners`, those of v1 with the traced graph as default."""
        is_v1 = v1.train.CheckpointSaverListener
        return [
            _SessionListener(one, self._session, self._stop) if isinstance(one, is_v1) else one for one in listeners
        ]

    @property
    def is_empty(self) -> bool:
        return not self._hooks

    def begin(self, *, in_loops: bool = True) -> None:
        """Before the first step. `in_loops`: steps would run in loops but for these hooks: says what that costs."""
        self._offer_global_step()
        for hook in self._hooks:
            if in_loops and _cadence(hook) == Every(steps=1):
                _log.warning(
                    "%s is a hook that may fetch and stop at any step: training runs one step per loop. "
                    "A small step then takes several times as long.",
                    type(hook).__name__,
                )
            with self._session.graph.as_default():
                hook.begin()
        with self._session.graph.as_default():
            for hook in self._hooks:
                hook.after_create_session(self._session, None)

    def fetches(self, step: int) -> list[Any]:
        """What the hooks want of the step that ends at global step `step`, flat; empty when none is to be called."""
        self._asked = []
        with self._session.graph.as_default():
            for hook in self._hooks:
                if _is_passive(hook):
                    continue
                is_logger = isinstance(hook, v1.train.LoggingTensorHook)
                if is_logger:
                    self._set_iteration(hook, step)
                context = v1.train.SessionRunContext(v1.train.SessionRunArgs(None), self._session)
                args = hook.before_run(context)
                if is_logger and args is None:
                    args = _wanted_at_the_end(hook)
                _check_args(hook, args)
                if args is not None or not is_logger:
                    self._asked.append((hook, context, args))
            flat = [self._session.elements(args.fetches) for _, _, args in self._asked if _wants(args)]
            # A hook without fetches is called after the step all the same: its step is fetched on its own, too.
            flat += [self._session.elements(v1.train.get_global_step())] if self._asked and not flat else []
        return [element for elements in flat for element in elements]

    def after_run(self, values: Sequence[np.ndarray]) -> None:
        """Hands out the values of `fetches`, in their order, operations left out."""
        remaining = iter(values)
        for hook, context, args in self._asked:
            results = None
            if _wants(args):
                elements = self._session.elements(args.fetches)
                flat = [None if isinstance(element, tf.Operation) else next(remaining) for element in elements]
                self._session.remember(elements, flat)
                results = tf.nest.pack_sequence_as(args.fetches, flat)
            with self._session.graph.as_default():
                hook.after_run(context, v1.train.SessionRunValues(results, v1.RunOptions(), v1.RunMetadata()))
            if hook in self._iterations:
                self._iterations[hook] += 1
            if context.stop_requested:
                self._stop(f"{type(hook).__name__} requested it")

    def end(self) -> None:
        with self._session.graph.as_default():
            for hook in self._hooks:
                hook.end(self._session)

    def _offer_global_step(self) -> None:
        """The tensor that TensorFlow's hooks read the global step from; their own way needs a v1 variable."""
        graph = self._session.graph
        if not graph.get_collection(_GLOBAL_STEP_READ):
            with graph.as_default():
                graph.add_to_collection(_GLOBAL_STEP_READ, tf.identity(v1.train.get_global_step().read_value()))

    def _set_iteration(self, hook: Any, step: int) -> None:
        """A LoggingTensorHook counts its calls, and is called once per loop: it is told the multiple it crossed."""
        every = v1_bridge.logging_cadence(hook)
        iteration = step // every * every if every else step
        v1_bridge.skip_iterations(hook, iteration - self._iterations.get(hook, 0))
        self._iterations[hook] = iteration


@dataclasses.dataclass(frozen=True)
class _SessionListener:
    """A `CheckpointSaverListener`, called as in a session."""

    listener: Any
    session: TraceSession
    stop: Callable[[str], None]

    def begin(self) -> None:
        with self.session.graph.as_default():
            self.listener.begin()

    def before_save(self, session: Any, global_step: int) -> None:
        with self.session.graph.as_default():
            self.listener.before_save(session, global_step)

    def after_save(self, session: Any, global_step: int) -> None:
        with self.session.graph.as_default():
            wants_to_stop = self.listener.after_save(session, global_step)
        if wants_to_stop:
            self.stop(f"{type(self.listener).__name__} requested it")

    def end(self, session: Any, global_step: int) -> None:
        with self.session.graph.as_default():
            self.listener.end(session, global_step)


def _check_args(hook: Any, args: Any) -> None:
    if args is None:
        return
    if args.feed_dict:
        raise ValueError(
            f"{type(hook).__name__}: SessionRunArgs(feed_dict=...): the step's input comes from input_fn alone."
        )
    if args.options is not None and args.options.trace_level:
        raise ValueError(
            f"{type(hook).__name__}: it asks for a trace of the step, which there is only in a session. "
            "Use tf.profiler.experimental."
        )


def _wanted_at_the_end(hook: Any) -> Any:
    """What a LoggingTensorHook(at_end=True) will ask for when there is no batch any more."""
    tensors = v1_bridge.tensors_logged_at_end(hook)
    return None if tensors is None else v1.train.SessionRunArgs(tensors)


def _wants(args: Any) -> bool:
    return args is not None and args.fetches is not None


def _is_passive(hook: Any) -> bool:
    """Whether it has nothing to do while steps are taken: FinalOpsHook, and whoever only looks at both ends."""
    base, kind = v1.train.SessionRunHook, type(hook)
    return kind.before_run is base.before_run and kind.after_run is base.after_run


def _cadence(hook: Any) -> Every:
    if _is_passive(hook):
        return Every()
    if isinstance(hook, v1.train.LoggingTensorHook):
        return Every(steps=v1_bridge.logging_cadence(hook))
    return Every(steps=1)


@dataclasses.dataclass(frozen=True)
class TrainingOverrides:
    """What TensorFlow's own hooks ask for that the runner does itself.

    Attributes:
      num_steps, last_step: of StopAtStepHook.
      stop_at_nan: of NanTensorHook: whether to fail; None: not given.
      summary_steps, save_steps, save_secs, listeners: of SummarySaverHook and CheckpointSaverHook.
      notes: on hooks that have no effect.
    """

    num_steps: int | None = None
    last_step: int | None = None
    stop_at_nan: bool | None = None
    summary_steps: int | None = None
    save_steps: int | None = None
    save_secs: float | None = None
    listeners: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def and_those_of(self, taken: Mapping[str, Any]) -> TrainingOverrides:
        """With the settings of one more hook: the earliest end counts, listeners add up, the rest replaces."""
        changes = dict(taken)
        for name in ("num_steps", "last_step"):
            given = [value for value in (getattr(self, name), taken.get(name)) if value is not None]
            changes[name] = min(given, default=None)
        for name in ("listeners", "notes"):
            changes[name] = (*getattr(self, name), *taken.get(name, ()))
        return dataclasses.replace(self, **changes)

    def nan(self, configured: str) -> str:
        return configured if self.stop_at_nan is None else "stop"

    def config(self, config: RunConfig) -> RunConfig:
        """`config` with these cadences."""
        changes: dict[str, Any] = {}
        if self.save_steps or self.save_secs:
            changes.update(save_checkpoints_steps=self.save_steps, save_checkpoints_secs=self.save_secs)
        if self.summary_steps:
            changes["save_summary_steps"] = self.summary_steps
        return config.replace(nan=self.nan(config.nan), **changes)

    def target(self, step: int, steps: int | None, max_steps: int | None) -> float:
        """The global step at which training from `step` ends; infinite when nothing says so."""
        targets = [
            math.inf if steps is None else step + steps,
            math.inf if max_steps is None else max_steps,
            math.inf if self.num_steps is None else step + self.num_steps,
            math.inf if self.last_step is None else self.last_step,
        ]
        return min(targets)


def split_hooks(hooks: Sequence[Any]) -> tuple[TrainingOverrides, list[Any], list[Any]]:
    """Hooks by who runs them: (what the runner takes over, native hooks, session hooks).

    Raises:
      TypeError: something is no hook.
    """
    overrides, native, session = TrainingOverrides(), [], []
    for hook in hooks:
        taken = v1_bridge.settings_of_hook(hook)
        if taken is not None:
            overrides = overrides.and_those_of(taken)
        elif isinstance(hook, v1.train.SessionRunHook):
            session.append(hook)
        elif callable(getattr(hook, "after_step", None)):
            native.append(hook)
        else:
            raise TypeError(f"{hook!r} is no hook: neither a runner Hook nor a tf.compat.v1.train.SessionRunHook.")
    return overrides, native, session
