"""Iterators over datasets whose end nobody waits for."""

from __future__ import annotations

import atexit
import ctypes
import functools
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


def iterate(dataset: Any) -> Any:
    """An iterator over `dataset` that is deleted in a thread of its own; over what is no tf.data.Dataset, its own.

    TensorFlow 2.21: autotuning sleeps between two looks, 10 ms first and each time twice as long, up to 60 s. Who
    deletes the iterator wakes it, but only then notes that it is to end (CancellationManager): where it looks in
    between, it sleeps on, and the deletion waits for it. Of 30 iterators that were 6 s old 10 took 4 to 60 s; a process
    that ends waits, too.
    """
    iterator = iter(dataset)
    if not isinstance(dataset, tf.data.Dataset):
        return iterator
    weakref.finalize(iterator, _drop, [handle_of(iterator)])
    _end_in_good_order()
    return iterator


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """The tensor that the iterator is for TensorFlow's operations."""
    return tf.nest.flatten(iterator, expand_composites=True)[0]


def have_ended() -> bool:
    """Whether no iterator is being deleted any more, after a short wait. No other is from here on: the process ends."""
    _end()
    return not any(thread.is_alive() for thread in _threads)


_threads: set[threading.Thread] = set()
_is_ending = threading.Event()


@functools.cache
def _end_in_good_order() -> None:
    """Once, and after the first `weakref.finalize`: what is registered last is called first when Python ends."""
    atexit.register(_end)


def _end() -> None:
    """Lets no deletion go on while Python ends, as far as that can be waited for.

    A daemon thread that comes back from TensorFlow then is ended by Python inside of TensorFlow's destructors, and the
    process is aborted (Python before 3.14: "FATAL: exception not rethrown").
    """
    _is_ending.set()
    last = time.monotonic() + _LAST_SECS
    for thread in list(_threads):
        thread.join(max(0.0, last - time.monotonic()))


def _drop(handles: list[tf.Tensor]) -> None:
    if _is_ending.is_set():
        _leave(handles[0])
        return
    # A daemon: a process that ends leaves the thread, and the iterator, behind.
    thread = threading.Thread(target=_drop_last, args=(handles,), name="iterator-end", daemon=True)
    _threads.add(thread)
    thread.start()


def _drop_last(handles: list[tf.Tensor]) -> None:
    """Drops the last reference; the iterator object, which is about to be deleted, still has its own."""
    while sys.getrefcount(handles[0]) > _OURS and not _is_ending.is_set():
        time.sleep(_GLANCE_SECS)
    if _is_ending.is_set():
        _leave(handles[0])
    handles.clear()
    _threads.discard(threading.current_thread())


def _leave(handle: tf.Tensor) -> None:
    """Has it never deleted: the process ends, and need not wait for that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
