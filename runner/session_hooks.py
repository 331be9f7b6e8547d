"""`tf.compat.v1.train.SessionRunHook`s on a traced step: their fetches become outputs of it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner import bridge
from runner.hooks import Every
from runner.run_config import RunConfig
from runner.traces import Trace

v1 = tf.compat.v1
_log = logging.getLogger(__name__)


class TraceSession:
    """What v1 hooks, listeners and `Scaffold.init_fn` get as `session`: `run` prunes the traced step to the fetches."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reads: dict[int, tf.Tensor] = {}

    @property
    def graph(self) -> Any:
        return self._trace.graph

    def elements(self, fetches: Any) -> list[Any]:
        """The tensors and operations that `fetches` names, flat; a variable stands for its value after the step."""
        return [self._element(fetch) for fetch in tf.nest.flatten(fetches)]

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """The values of `fetches`. What does not depend on the input can be run; assignments take effect.

        Raises:
          ValueError: a fetch depends on a batch, or something is fed: between steps there is no batch.
        """
        del options, run_metadata
        elements = self.elements(fetches)
        if feed_dict:
            raise ValueError("session.run(feed_dict=...) in a hook: the step's input comes from input_fn alone.")
        if self._trace.needs_inputs(elements):
            raise ValueError(
                f"session.run({fetches!r}) in a hook depends on a batch, and between steps there is none. "
                "Ask for it in before_run: SessionRunArgs(fetches)."
            )
        tensors = [element for element in elements if not isinstance(element, tf.Operation)]
        values = iter(self._trace.function(tensors, elements, with_inputs=False)())
        flat = [None if isinstance(element, tf.Operation) else next(values).numpy() for element in elements]
        return tf.nest.pack_sequence_as(fetches, flat)

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
    """The v1 hooks of one training run.

    TensorFlow's own are mapped to the runner's cadences and keep the loop; any other may fetch and stop at any step,
    so `every` is then one step.

    Args:
      stop: called with the reason when a hook requests to stop.
    """

    def __init__(self, hooks: Sequence[Any], trace: Trace, stop: Callable[[str], None]) -> None:
        self._hooks = list(hooks)
        self._session = TraceSession(trace)
        self._stop = stop
        self._asked: list[Any] = []
        self._step = 0

    @property
    def session(self) -> TraceSession:
        return self._session

    @property
    def every(self) -> Every:
        """Where loops must end for these hooks."""
        cadences = [_cadence(hook) for hook in self._hooks]
        steps = [cadence.steps for cadence in cadences if cadence.steps]
        return Every(steps=int(np.gcd.reduce(steps)) if steps else None)

    def begin(self, step: int) -> None:
        self._step = step
        for hook in self._hooks:
            if _cadence(hook) == Every(steps=1):
                _log.warning(
                    "%s is a hook that may fetch and stop at any step: training runs one step per loop. "
                    "A small step then takes several times as long.",
                    type(hook).__name__,
                )
            with self._session.graph.as_default():
                hook.begin()
        for hook in self._hooks:
            hook.after_create_session(self._session, None)

    def fetches(self, step: int) -> list[Any]:
        """What the hooks want of the step that ends at global step `step`, flat."""
        self._asked = []
        for hook in self._hooks:
            if isinstance(hook, v1.train.LoggingTensorHook):
                bridge.skip_iterations(hook, step - self._step - 1)
            context = v1.train.SessionRunContext(v1.train.SessionRunArgs(None), self._session)
            self._asked.append((context, hook.before_run(context)))
        self._step = step
        flat = [self._session.elements(args.fetches) for _, args in self._asked if _wants(args)]
        return [element for elements in flat for element in elements]

    def after_run(self, values: Sequence[np.ndarray]) -> None:
        """Hands out the values of `fetches`, in their order, operations left out."""
        remaining = iter(values)
        for hook, (context, args) in zip(self._hooks, self._asked, strict=True):
            results = None
            if _wants(args):
                elements = self._session.elements(args.fetches)
                flat = [None if isinstance(element, tf.Operation) else next(remaining) for element in elements]
                results = tf.nest.pack_sequence_as(args.fetches, flat)
            hook.after_run(context, v1.train.SessionRunValues(results, None, None))
            if context.stop_requested:
                self._stop(f"{type(hook).__name__} requested it")

    def end(self) -> None:
        for hook in self._hooks:
            hook.end(self._session)


def _wants(args: Any) -> bool:
    return args is not None and args.fetches is not None


def _cadence(hook: Any) -> Every:
    if isinstance(hook, v1.train.LoggingTensorHook):
        return Every(steps=bridge.logging_cadence(hook))
    return Every(steps=1)


@dataclasses.dataclass(frozen=True)
class TrainingOverrides:
    """What TensorFlow's own hooks ask for that the runner does itself.

    Attributes:
      num_steps, last_step: of StopAtStepHook.
      stop_at_nan: of NanTensorHook: whether to fail; None: not given.
      summary_steps, save_steps, save_secs, listeners: of SummarySaverHook and CheckpointSaverHook.
    """

    num_steps: int | None = None
    last_step: int | None = None
    stop_at_nan: bool | None = None
    summary_steps: int | None = None
    save_steps: int | None = None
    save_secs: float | None = None
    listeners: tuple[Any, ...] = ()

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
        taken = bridge.settings_of_hook(hook)
        if taken is not None:
            overrides = dataclasses.replace(overrides, **taken)
        elif isinstance(hook, v1.train.SessionRunHook):
            session.append(hook)
        elif callable(getattr(hook, "after_step", None)):
            native.append(hook)
        else:
            raise TypeError(f"{hook!r} is no hook: neither a runner Hook nor a tf.compat.v1.train.SessionRunHook.")
    return overrides, native, session
