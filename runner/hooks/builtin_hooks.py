"""TensorFlow's own training hooks that the runner replaces: their settings, and the hooks left to call."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.hooks.hook import Hook
from runner.hooks.keras_callbacks import KerasCallbacks, check_callback, is_callback
from runner.run_config import RunConfig
from runner.tf_private import v1 as v1_bridge

v1 = tf.compat.v1


class _Kind(NamedTuple):
    """How an object of the user is recognized as a hook or a listener.

    Attributes:
      classes: base classes of such objects.
      method: an object of any other class counts as well if it has this method.
      expected: the classes in words, for a message.
    """

    classes: tuple[type, ...]
    method: str
    expected: str


_KINDS: Mapping[str, _Kind] = {
    "hook": _Kind(
        (Hook, v1.train.SessionRunHook),
        "after_step",
        "a runner.Hook, a tf.compat.v1.train.SessionRunHook or, in training, a keras.callbacks.Callback",
    ),
    "listener": _Kind(
        (v1.train.CheckpointSaverListener,),
        "after_save",
        "a tf.compat.v1.train.CheckpointSaverListener",
    ),
}


@dataclasses.dataclass(frozen=True)
class TrainingOverrides:
    """The settings of TensorFlow's own hooks that the runner replaces by its own training loop.

    Attributes:
      num_steps, last_step: those of StopAtStepHook.
      stop_at_nan: fail_on_nan_loss of NanTensorHook; None: there is no such hook.
      save_steps, save_secs, listeners: those of CheckpointSaverHook.
      notes: sentences about hooks that have no effect.
    """

    num_steps: int | None = None
    last_step: int | None = None
    stop_at_nan: bool | None = None
    save_steps: int | None = None
    save_secs: float | None = None
    listeners: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def and_those_of(self, settings: Mapping[str, Any]) -> TrainingOverrides:
        """Return these settings and those of one more hook.

        The earliest end of training counts, listeners and notes add up, and other settings replace earlier ones.

        Args:
          settings: name of an attribute -> value, from the hook.
        """
        changes = dict(settings)
        for name in ("num_steps", "last_step"):
            ends = (getattr(self, name), settings.get(name))
            changes[name] = min(_given(ends), default=None)
        for name in ("listeners", "notes"):
            changes[name] = (*getattr(self, name), *settings.get(name, ()))
        return dataclasses.replace(self, **changes)

    def nan(self, configured: str) -> str:
        """Return the NaN policy; `configured` if no hook has one."""
        return configured if self.stop_at_nan is None else "stop"

    def config(self, config: RunConfig) -> RunConfig:
        """Return `config` with the save cadence and the NaN policy that the hooks ask for."""
        changes: dict[str, Any] = {}
        if self.save_steps or self.save_secs:
            changes.update(save_checkpoints_steps=self.save_steps, save_checkpoints_secs=self.save_secs)
        return config.replace(nan=self.nan(config.nan), **changes)

    def target(self, step: int, steps: int | None, max_steps: int | None) -> float:
        """Return the global step at which training from `step` ends; infinite if nothing limits it."""
        ends = _given((max_steps, self.last_step))
        for number in _given((steps, self.num_steps)):
            ends.append(step + number)
        return min(ends, default=math.inf)


def _given(values: Sequence[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def split_hooks(hooks: Sequence[Any]) -> tuple[TrainingOverrides, list[Any], list[Any]]:
    """Split hooks into (settings that the runner applies itself, native hooks, session hooks).

    Native hooks are called by the runner between loops of steps: each `runner.Hook`, and objects of other classes that
    have its methods. Session hooks are SessionRunHooks, called as by a session of TensorFlow 1. Callbacks of Keras
    become one native hook, the last.

    Raises:
      TypeError: an object is not a hook.
      NotAllowed: a callback changes training.
    """
    overrides = TrainingOverrides()
    native: list[Any] = []
    session: list[Any] = []
    callbacks: list[Any] = []
    for hook in checked("hook", hooks):
        if is_callback(hook):
            check_callback(hook)
            callbacks.append(hook)
            continue
        settings = v1_bridge.settings_of_hook(hook)
        if settings is not None:
            overrides = overrides.and_those_of(settings)
            continue
        # A class may derive from both SessionRunHook and runner.Hook, so that it also works in a plain session; here it
        # is called as a Hook.
        is_session_hook = isinstance(hook, v1.train.SessionRunHook) and not isinstance(hook, Hook)
        if is_session_hook:
            session.append(hook)
        else:
            native.append(hook)
    if callbacks:
        native.append(KerasCallbacks(callbacks))
    return overrides, native, session


def checked(what: str, given: Sequence[Any] | None) -> list[Any]:
    """Return hooks or listeners as a list.

    Args:
      what: "hook" or "listener".
      given: objects of TensorFlow's or the runner's classes, or of others that have their methods; None: none.

    Raises:
      TypeError: an object is something else.
    """
    kind = _KINDS[what]
    objects = list(given or ())
    for hook in objects:
        is_known = isinstance(hook, kind.classes) or (what == "hook" and is_callback(hook))
        # Statically, because a mock of anything has every method.
        if not is_known and inspect.getattr_static(hook, kind.method, None) is None:
            raise TypeError(f"{hook!r} is not a {what}: expected {kind.expected}.")
    return objects
