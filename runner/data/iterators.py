"""Iterators over datasets whose end nobody waits for, and their owner in a process: `OPEN`."""

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
"""A deletion takes some milliseconds, or up to a minute."""

_OURS = 2
"""References to a handle that only its list has: that one, and the argument of sys.getrefcount."""


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """Return the tensor that the iterator is for TensorFlow's operations."""
    return tf.nest.flatten(iterator, expand_composites=True)[0]


class OpenIterators:
    """The iterators of a process, which are deleted in threads, and what becomes of them when it ends.

    TensorFlow 2.21: autotuning sleeps between two looks, 10 ms first and each time twice as long, up to 60 s. Who
    deletes the iterator wakes it, but only then notes that it is to end (CancellationManager): where it looks in
    between, it sleeps on, and the deletion waits for it. Of 30 iterators that were 6 s old 10 took 4 to 60 s; a process
    that ends waits, too.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._is_ending = threading.Event()
        self._is_registered = False

    def iterate(self, dataset: Any) -> Any:
        """Return an iterator over `dataset` that a thread of its own deletes; over no tf.data.Dataset, its own."""
        iterator = iter(dataset)
        if not isinstance(dataset, tf.data.Dataset):
            return iterator
        weakref.finalize(iterator, self._drop, [handle_of(iterator)])
        if not self._is_registered:
            self._is_registered = True
            # After the first `weakref.finalize`: what is registered last is called first when Python ends.
            atexit.register(self._end)
        return iterator

    def have_ended(self) -> bool:
        """Report whether no iterator is being deleted any more, after a short wait; from here on no other is.

        Called when the process ends.
        """
        self._end()
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self) -> None:
        """Let no deletion go on while Python ends, as far as that can be waited for.

        A daemon thread that comes back from TensorFlow then is ended by Python inside of TensorFlow's destructors, and
        the process is aborted (Python before 3.14: "FATAL: exception not rethrown").
        """
        self._is_ending.set()
        last = time.monotonic() + _LAST_SECS
        for thread in list(self._threads):
            thread.join(max(0.0, last - time.monotonic()))

    def _drop(self, handles: list[tf.Tensor]) -> None:
        if self._is_ending.is_set():
            self._leave(handles)
            return
        # A daemon: a process that ends leaves the thread, and the iterator, behind.
        thread = threading.Thread(target=self._drop_last, args=(handles,), name="iterator-end", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _drop_last(self, handles: list[tf.Tensor]) -> None:
        """Drop the last reference; the iterator object, which is about to be deleted, still has its own."""
        while sys.getrefcount(handles[0]) > _OURS and not self._is_ending.is_set():
            time.sleep(_GLANCE_SECS)
        if self._is_ending.is_set():
            self._leave(handles)
        handles.clear()
        self._threads.discard(threading.current_thread())

    @staticmethod
    def _leave(handles: list[tf.Tensor]) -> None:
        """Have an iterator never deleted: the process ends, and need not wait for that."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handles[0]))


OPEN = OpenIterators()
"""Those of this process. `task.main.end` asks it whether Python may end in good order."""

iterate = OPEN.iterate
