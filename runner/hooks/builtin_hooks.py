"""TensorFlow's own training hooks that the runner replaces: their settings, and the hooks left to call."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.hooks.hook import Hook
from runner.hooks.keras_callbacks import KerasCallbacks, check_callback, is_callback
from runner.run_config import RunConfig
from runner.tf_private import v1 as v1_bridge

v1 = tf.compat.v1

_KINDS: Mapping[str, tuple[tuple[type, ...], str, str]] = {
    "hook": (
        (Hook, v1.train.SessionRunHook),
        "after_step",
        "a runner.Hook, a tf.compat.v1.train.SessionRunHook or, in training, a keras.callbacks.Callback",
    ),
    "listener": ((v1.train.CheckpointSaverListener,), "after_save", "a tf.compat.v1.train.CheckpointSaverListener"),
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

    def and_those_of(self, taken: Mapping[str, Any]) -> TrainingOverrides:
        """Return these settings and those of one more hook.

        The earliest end of training counts, listeners and notes add up, and other settings replace earlier ones.

        Args:
          taken: name of an attribute -> value, from the hook.
        """
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
        """Return `config` with the save cadence and the NaN policy that the hooks ask for."""
        changes: dict[str, Any] = {}
        if self.save_steps or self.save_secs:
            changes.update(save_checkpoints_steps=self.save_steps, save_checkpoints_secs=self.save_secs)
        return config.replace(nan=self.nan(config.nan), **changes)

    def target(self, step: int, steps: int | None, max_steps: int | None) -> float:
        """Return the global step at which training from `step` ends; infinite if nothing limits it."""
        from_here = [number for number in (steps, self.num_steps) if number is not None]
        ends = [end for end in (max_steps, self.last_step) if end is not None]
        return min([*(step + number for number in from_here), *ends], default=math.inf)


def split_hooks(hooks: Sequence[Any]) -> tuple[TrainingOverrides, list[Any], list[Any]]:
    """Split hooks into (settings that the runner applies itself, native hooks, session hooks).

    Callbacks of Keras become one native hook, the last.

    Raises:
      TypeError: an object is not a hook.
      NotAllowed: a callback changes training.
    """
    overrides, native, session = TrainingOverrides(), list[Any](), list[Any]()
    callbacks: list[Any] = []
    for hook in checked("hook", hooks):
        if is_callback(hook):
            check_callback(hook)
            callbacks.append(hook)
            continue
        taken = v1_bridge.settings_of_hook(hook)
        if taken is not None:
            overrides = overrides.and_those_of(taken)
        else:
            # A hook that is both is one of TensorFlow's sessions only outside of a run.
            is_session = isinstance(hook, v1.train.SessionRunHook) and not isinstance(hook, Hook)
            (session if is_session else native).append(hook)
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
    found, (kinds, method, expected) = list(given or ()), _KINDS[what]
    for one in found:
        # Statically, because a mock of anything has every method.
        is_known = isinstance(one, kinds) or (what == "hook" and is_callback(one))
        if not is_known and inspect.getattr_static(one, method, None) is None:
            raise TypeError(f"{one!r} is not a {what}: expected {expected}.")
    return found
