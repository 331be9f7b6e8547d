"""`tf.contrib.summary`: the functions of `tf.summary` with their names before TensorFlow 2.0."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

v1 = tf.compat.v1

_writers: dict[str, Any] = {}
"""Folder -> its writer. They are kept here because a writer made in model_fn would be closed after the call."""


def create_file_writer(
    logdir: str | None,
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> Any:
    """Return the event file writer of a folder. All calls for a folder return the same writer.

    Args:
      logdir: the folder; None: return a writer that writes nothing.
      max_queue: as in `tf.summary.create_file_writer`.
      flush_millis: as in `tf.summary.create_file_writer`.
      filename_suffix: as in `tf.summary.create_file_writer`.
      name: as in `tf.summary.create_file_writer`.
    """
    if logdir is None:
        return tf.summary.create_noop_writer()
    if logdir not in _writers:
        with tf.init_scope():
            _writers[logdir] = tf.summary.create_file_writer(logdir, max_queue, flush_millis, filename_suffix, name)
    return _writers[logdir]


def always_record_summaries() -> Any:
    """Return a context in which summaries are written."""
    return tf.summary.record_if(True)


def never_record_summaries() -> Any:
    """Return a context in which no summaries are written."""
    return tf.summary.record_if(False)


def record_summaries_every_n_global_steps(n: int, global_step: Any = None) -> Any:
    """Return a context in which summaries are written at global steps that are multiples of `n`."""
    step = _step(global_step)
    return tf.summary.record_if(lambda: tf.equal(step % n, 0))


def scalar(name: str, tensor: Any, family: str | None = None, step: Any = None) -> Any:
    """Write a scalar summary of `tensor`, a numeric scalar."""
    return tf.summary.scalar(_named(name, family), tensor, _step(step))


def histogram(name: str, tensor: Any, family: str | None = None, step: Any = None) -> Any:
    """Write a histogram summary of `tensor`, numeric, of any shape."""
    return tf.summary.histogram(_named(name, family), tensor, _step(step))


def image(
    name: str, tensor: Any, bad_color: Any = None, max_images: int = 3, family: str | None = None, step: Any = None
) -> Any:
    """Write an image summary of `tensor`, `[batch, height, width, channels]`, uint8, or float from 0 to 1."""
    del bad_color
    return tf.summary.image(_named(name, family), tensor, _step(step), max_outputs=max_images)


def _named(name: str, family: str | None) -> str:
    return name if family is None else f"{family}/{name}"


def _step(step: Any) -> Any:
    if step is None:
        step = v1.train.get_or_create_global_step()
    return tf.cast(step, tf.int64)
