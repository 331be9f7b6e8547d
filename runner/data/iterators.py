"""Iterators over datasets whose deletion does not block, and their owner in a process: `OPEN`."""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
import weakref
from typing import Any

import tensorflow as tf

_GLANCE_SECS = 0.05
_LAST_SECS = 2.0
"""How long to wait for a deletion, which takes from milliseconds to a minute."""

_OURS = 2
"""Reference count of a handle that only its list holds: one, plus the argument of sys.getrefcount."""


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """Return the resource tensor (scalar) that stands for the iterator in TensorFlow's operations."""
    return tf.nest.flatten(iterator, expand_composites=True)[0]


class OpenIterators:
    """The iterators of a process. Threads delete them, and the end of the process does not wait for them.

    TensorFlow 2.21: the autotuning thread of an iterator sleeps 10 ms between two looks, then twice as long each time,
    up to 60 s. Deleting the iterator wakes the thread before it sets the flag that tells it to end
    (CancellationManager). If the thread looks in between, it sleeps again and the deletion waits for it. Of 30
    iterators that were 6 s old, 10 took 4 to 60 s to delete, and so did the end of their process.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._is_ending = threading.Event()
        self._is_registered = False

    def iterate(self, dataset: Any) -> Any:
        """Return an iterator over `dataset` that a thread deletes; if `dataset` is not a tf.data.Dataset, return its
        own iterator.

        Args:
          dataset: a tf.data.Dataset of any element spec, or another iterable.
        """
        iterator = iter(dataset)
        if not isinstance(dataset, tf.data.Dataset):
            return iterator
        weakref.finalize(iterator, self._drop, [handle_of(iterator)])
        if not self._is_registered:
            self._is_registered = True
            # After the first `weakref.finalize`: Python calls exit functions in reverse order of registration.
            atexit.register(self._end)
        return iterator

    def have_ended(self) -> bool:
        """Report whether all deletions have ended, after a short wait. No further iterator is deleted from now on.

        Called when the process ends.
        """
        self._end()
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self) -> None:
        """Wait for running deletions, for a limited time, before Python ends.

        Before Python 3.14, a daemon thread that returns from TensorFlow while Python ends is unwound inside
        TensorFlow's destructors, and the process is aborted ("FATAL: exception not rethrown").
        """
        self._is_ending.set()
        last = time.monotonic() + _LAST_SECS
        for thread in list(self._threads):
            thread.join(max(0.0, last - time.monotonic()))

    def _drop(self, handles: list[tf.Tensor]) -> None:
        if self._is_ending.is_set():
            self._leave(handles)
            return
        # A daemon thread, so that the end of the process need not wait for it.
        thread = threading.Thread(target=self._drop_last, args=(handles,), name="iterator-end", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _drop_last(self, handles: list[tf.Tensor]) -> None:
        """Drop the last reference; the iterator object that is about to be deleted still holds its own."""
        while sys.getrefcount(handles[0]) > _OURS and not self._is_ending.is_set():
            time.sleep(_GLANCE_SECS)
        if self._is_ending.is_set():
            self._leave(handles)
        handles.clear()
        self._threads.discard(threading.current_thread())

    @staticmethod
    def _leave(handles: list[tf.Tensor]) -> None:
        """Keep the iterator from ever being deleted: the process is ending and need not wait for it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handles[0]))


OPEN = OpenIterators()
"""The open iterators of this process. `task.main.end` asks whether Python can end normally."""

iterate = OPEN.iterate
