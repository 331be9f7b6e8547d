"""The only way in which the runner replaces an attribute of TensorFlow or Keras during a trace."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace the attribute `name` of a module, class or object by `new` inside this context.

    Raises:
      AttributeError: there is no such attribute, because the private name has moved.
      RuntimeError: on leaving, a replacement that was entered later is still in place.
    """
    before = getattr(owner, name)
    # A module may load attributes lazily, and a tf.Graph has no __dict__: neither shows whether it is inherited.
    is_inherited = not isinstance(owner, types.ModuleType) and name not in getattr(owner, "__dict__", (name,))
    if isinstance(owner, type) and not is_inherited:
        before = vars(owner)[name]  # keep a staticmethod object, not its function
    setattr(owner, name, new)
    try:
        yield
    finally:
        if getattr(owner, name, None) is not new:
            owner_name = getattr(owner, "__name__", type(owner).__name__)
            raise RuntimeError(
                f"{owner_name}.{name} was replaced a second time, and the first replacement ended before the second. "
                "End them in reverse order."
            )
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def all_replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace several attributes inside this context; each is (owner, name, new), as in `replaced`."""
    with contextlib.ExitStack() as stack:
        for owner, name, new in replacements:
            stack.enter_context(replaced(owner, name, new))
        yield


class EnteredOnce:
    """A context for several threads at a time: the first thread enters it, and the last one leaves it.

    Needed because replicas take turns in the middle of a model_fn, at each sum over replicas, in any order.

    Args:
      make: makes the context.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_inside = 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._num_inside:
                self._stack.enter_context(self._make())
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._stack.close()


class Overlay:
    """An object that has some attributes itself; all others are those of `target`."""

    def __init__(self, target: Any, **own: Any) -> None:
        self._target = target
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)
