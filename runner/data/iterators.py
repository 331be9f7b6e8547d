"""Iterators over datasets. Threads delete them, since a deletion can take a minute; `OPEN` owns those of a process.

An iterator that caches its elements in files (`Dataset.cache(path)`) holds a lock file beside them until it is deleted.
So at the end of the process such iterators give it up, and the process waits for that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
import time
import weakref

import tensorflow as tf

from runner.tf_private import datasets

_POLL_SECS = 0.05
_LAST_SECS = 2.0
"""How long the end of the process waits for deletions, each of which takes from milliseconds to a minute."""
_LAST_SECS_FOR_FILES = 65.0
"""How long it waits for iterators to give up the lock files of their caches."""

_OURS = 2
"""Reference count of a handle that only its list holds: one, plus the argument of sys.getrefcount."""


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """Return the resource tensor (scalar) that stands for the iterator in TensorFlow's operations."""
    return tf.nest.flatten(iterator, expand_composites=True)[0]


class OpenIterators:
    """The iterators of a process. Threads delete them, so that neither the run nor the end of the process is delayed.

    In TensorFlow 2.21, an iterator's autotuning thread sleeps between two passes, 10 ms at first and then twice as long
    each time, up to 60 s. Deleting the iterator wakes this thread before setting the flag that tells it to end
    (CancellationManager). If the thread reads the flag in between, it sleeps again, and the deletion waits for it. Of
    30 iterators that were 6 s old, 10 took 4 to 60 s to delete, and so did the end of their process.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._with_files: list[tuple[weakref.ref[tf.Tensor], tf.data.Dataset]] = []
        self._is_ending = threading.Event()
        self._is_registered = False

    def iterate(self, dataset: tf.data.Dataset) -> tf.data.Iterator:
        """Return an iterator over `dataset`; a thread will delete it."""
        iterator = iter(dataset)
        handle = handle_of(iterator)
        weakref.finalize(iterator, self._drop, [handle])
        if datasets.has_file_cache(dataset):
            self._with_files.append((weakref.ref(handle), dataset.take(0)))
        if not self._is_registered:
            self._is_registered = True
            # Register this after the first `weakref.finalize`, because Python calls exit functions in reverse order.
            atexit.register(self._end)
        return iterator

    def have_ended(self) -> bool:
        """Wait up to _LAST_SECS for running deletions and report whether all have ended. From now on no further
        iterator is deleted.

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
        self._give_up_files()
        last = time.monotonic() + _LAST_SECS
        for thread in list(self._threads):
            thread.join(max(0.0, last - time.monotonic()))

    def _give_up_files(self) -> None:
        """Let the iterators that cache their elements in files delete the lock files, and what is incomplete."""
        threads = []
        for reference, empty in self._with_files:
            handle = reference()
            if handle is not None:
                threads.append(threading.Thread(target=self._begin_anew, args=(handle, empty), daemon=True))
        self._with_files.clear()
        self._threads.update(threads)
        for thread in threads:
            thread.start()
        last = time.monotonic() + _LAST_SECS_FOR_FILES
        for thread in threads:
            thread.join(max(0.0, last - time.monotonic()))

    @staticmethod
    def _begin_anew(handle: tf.Tensor, empty: tf.data.Dataset) -> None:
        """Let the iterator begin anew over a dataset without elements: Python may hold references to it that nobody can
        drop, and its state ends all the same.
        """
        with contextlib.suppress(tf.errors.OpError):
            tf.raw_ops.MakeIterator(dataset=tf.data.experimental.to_variant(empty), iterator=handle)

    def leave_files(self) -> None:
        """Leave the files of all caches as they are, because they may be another process's: an iterator that gives up
        deletes every file of its cache, also those that it has not made.
        """
        for reference, _ in self._with_files:
            handle = reference()
            if handle is not None:
                self._leave([handle])
        self._with_files.clear()

    def _drop(self, handles: list[tf.Tensor]) -> None:
        if self._is_ending.is_set():
            self._leave(handles)
            return
        # A daemon thread, so that the end of the process need not wait for it.
        threading.Thread(target=self._drop_last, args=(handles,), name="iterator-end", daemon=True).start()

    def _drop_last(self, handles: list[tf.Tensor]) -> None:
        """Delete the iterator by dropping the last reference to its handle, once the Python iterator has dropped its
        own.
        """
        # By itself, since only a started thread can be joined. It comes before the look at `_is_ending`: so either
        # `_end` finds this thread, or this thread finds that the process ends and deletes nothing.
        self._threads.add(threading.current_thread())
        while sys.getrefcount(handles[0]) > _OURS and not self._is_ending.is_set():
            time.sleep(_POLL_SECS)
        if self._is_ending.is_set():
            self._leave(handles)
        handles.clear()
        self._threads.discard(threading.current_thread())

    @staticmethod
    def _leave(handles: list[tf.Tensor]) -> None:
        """Add a reference that is never dropped, so that the iterator is not deleted while the process ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handles[0]))


OPEN = OpenIterators()
"""The open iterators of this process. `task.main.end` asks whether Python can end normally."""

iterate = OPEN.iterate
