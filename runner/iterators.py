"""Iterators over datasets whose end nobody waits for."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

import tensorflow as tf

_GLANCE_SECS = 0.05
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
    return iterator


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """The tensor that the iterator is for TensorFlow's operations."""
    return tf.nest.flatten(iterator, expand_composites=True)[0]


def _drop(handles: list[tf.Tensor]) -> None:
    # A daemon: a process that ends leaves the thread, and the iterator, behind.
    threading.Thread(target=_drop_last, args=(handles,), name="iterator-end", daemon=True).start()


def _drop_last(handles: list[tf.Tensor]) -> None:
    """Drops the last reference; the iterator object, which is about to be deleted, still has its own."""
    while sys.getrefcount(handles[0]) > _OURS:
        time.sleep(_GLANCE_SECS)
    handles.clear()
