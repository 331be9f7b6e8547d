"""Writers of event files for hooks of TensorFlow 1, on those of tf.summary."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from runner import metrics


class EventWriter:
    """What a hook expects of a `tf.compat.v1.summary.FileWriter`, on a writer of tf.summary."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add_summary(self, summary: Any, global_step: int | None = None) -> None:
        """Writes a `tf.compat.v1.Summary`, serialised or not, at `global_step`."""
        proto = summary if isinstance(summary, bytes) else summary.SerializeToString()
        with tf.init_scope(), self._writer.as_default(step=int(global_step or 0)):
            tf.summary.experimental.write_raw_pb(proto)

    def add_session_log(self, session_log: Any, global_step: int | None = None) -> None:
        """Nothing: sessions are not told of."""

    def flush(self) -> None:
        with tf.init_scope():
            self._writer.flush()


class EventWriters:
    """Writers by folder. TensorBoard follows one file of a folder at a time, so a folder has one.

    Args:
      is_on: else nothing is written.
      own: folder -> the writer of tf.summary that it has already, and that stays open.
    """

    def __init__(self, *, is_on: bool, own: dict[str, Any] | None = None) -> None:
        self._is_on = is_on
        self._own = {os.path.realpath(folder): writer for folder, writer in (own or {}).items()}
        self._made: dict[str, Any] = {}

    def of(self, folder: str) -> EventWriter:
        path = os.path.realpath(folder)
        if path not in self._own and path not in self._made:
            with tf.init_scope():
                self._made[path] = metrics.build_writer(folder, is_on=self._is_on)
        return EventWriter(self._own[path] if path in self._own else self._made[path])

    def close(self) -> None:
        """What was written is on the disk when this returns."""
        with tf.init_scope():
            for writer in self._made.values():
                writer.close()
        self._made.clear()
