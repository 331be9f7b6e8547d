"""The one way in which an attribute of TensorFlow or Keras is replaced for the length of a trace."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Put `new` in the place of the attribute `name` of a module, a class or an object while entered.

    Raises:
      AttributeError: there is no such attribute: the private name has moved.
      RuntimeError: on leaving, another replacement is in place, which was entered later and has to be left first.
    """
    before = getattr(owner, name)
    # A module may load its names when they are asked for; a tf.Graph has no __dict__. What these have is their own.
    is_inherited = not isinstance(owner, types.ModuleType) and name not in getattr(owner, "__dict__", (name,))
    if isinstance(owner, type) and not is_inherited:
        before = vars(owner)[name]  # a staticmethod, and not the function in it
    setattr(owner, name, new)
    try:
        yield
    finally:
        if getattr(owner, name, None) is not new:
            raise RuntimeError(
                f"{getattr(owner, '__name__', type(owner).__name__)}.{name} was replaced a second time, and the first "
                "replacement is left before the second. Replacements are left in the opposite order of entering."
            )
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class EnteredOnce:
    """A context for several threads at a time: the first that comes enters it, the last that goes leaves it.

    Replicas take turns in the middle of a model_fn, where one sums over all of them, and go in any order.

    Args:
      make: makes the context.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make, self._lock, self._inside, self._stack = make, threading.Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._stack.enter_context(self._make())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._stack.close()


class Overlay:
    """An object with some attributes of its own; all others are those of `target`."""

    def __init__(self, target: Any, **own: Any) -> None:
        self._target = target
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)
