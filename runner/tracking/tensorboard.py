"""Results of evaluations as plain values, and as events for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from runner.tracking.plain_values import leaves

MAX_ELEMENTS = 32
"""An array with more elements is no metric of the journal and MLflow; TensorBoard's events have it."""


def plain(value: Any) -> Any:
    """Return the value of a scalar tensor as a Python float, int, bool or bytes; arrays unchanged."""
    if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0:
        return value.item()
    return value


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested metrics under joined names: `{"f1": (a, {"b": b})}` is `{"f1/0": a, "f1/1/b": b}`."""
    return dict(leaves("", metrics))


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among `metrics`, flat, without larger arrays and serialized summaries.

    The elements of an array `f1` of at most MAX_ELEMENTS numbers are `f1_0`, `f1_1`, ...; of a matrix `f1_0_0`, ....
    """
    found: dict[str, float] = {}
    elements: dict[str, float] = {}
    for name, given in flat(metrics).items():
        value = plain(given)
        if isinstance(value, (float, int)):
            found[name] = float(value)
        elif _has_numbers(value) and value.size <= MAX_ELEMENTS:
            for indices, element in np.ndenumerate(value):
                element_name = "_".join([name, *map(str, indices)])
                elements[element_name] = float(element)
    return {**elements, **found}  # a metric that has such a name itself keeps it


def too_large(metrics: Mapping[str, Any]) -> list[str]:
    """Return the names and shapes of the arrays whose elements `scalars` leaves out, such as `confusion [100, 100]`."""
    found = []
    for name, value in flat(metrics).items():
        if _has_numbers(value) and value.size > MAX_ELEMENTS:
            found.append(f"{name} {list(value.shape)}")
    return found


def _has_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "biuf"


def build_writer(folder: str, *, is_on: bool) -> Any:
    """Return a writer of event files in `folder`, which it makes at once; if not `is_on`, one that writes nothing."""
    return tf.summary.create_file_writer(folder) if is_on else tf.summary.create_noop_writer()


def write_events(writer: Any, step: int, metrics: Mapping[str, Any]) -> None:
    """Write `metrics` as tf.estimator did, in one summary.

    Numbers are a `simple_value`, arrays `[...]` of any shape and strings a `tensor`. The values in a serialized
    `tf.compat.v1.Summary` have the tags `<name>/0`, `<name>/1`, ...; bytes that are no summary are a text.
    """
    summary = tf.compat.v1.Summary()
    with writer.as_default(step=step):
        for name, value in flat(tf.nest.map_structure(plain, metrics)).items():
            if isinstance(value, bytes):
                try:
                    inner = tf.compat.v1.Summary.FromString(value).value
                except DecodeError:
                    tf.summary.text(name, value)
                    continue
                for number, inner_value in enumerate(inner):
                    inner_value.tag = f"{name}/{number}"
                summary.value.extend(inner)
            elif isinstance(value, (float, int)):
                summary.value.add(tag=name, simple_value=float(value))
            else:
                summary.value.add(tag=name, node_name=name, tensor=tf.make_tensor_proto(value))
        tf.summary.experimental.write_raw_pb(summary.SerializeToString())
    writer.flush()


class EventWriter:
    """The interface of `tf.compat.v1.summary.FileWriter` for hooks, on `writer`, one of tf.summary."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def add_summary(self, summary: Any, global_step: int | None = None) -> None:
        """Write a `tf.compat.v1.Summary`, serialized or not, at `global_step`."""
        proto = summary if isinstance(summary, bytes) else summary.SerializeToString()
        with tf.init_scope(), self.writer.as_default(step=int(global_step or 0)):
            tf.summary.experimental.write_raw_pb(proto)

    def add_session_log(self, session_log: Any, global_step: int | None = None) -> None:
        """Do nothing: session logs are not written."""

    def flush(self) -> None:
        with tf.init_scope():
            self.writer.flush()


class EventWriters:
    """The event writers of several folders. A folder has one writer, because TensorBoard follows one file at a time in
    it.

    Args:
      is_on: False: nothing is written.
      own: folder -> its existing writer of tf.summary, which stays open.
    """

    def __init__(self, *, is_on: bool, own: dict[str, Any] | None = None) -> None:
        self._is_on = is_on
        self._own = {os.path.realpath(folder): writer for folder, writer in (own or {}).items()}
        self._made: dict[str, Any] = {}

    def of(self, folder: str) -> EventWriter:
        path = os.path.realpath(folder)
        if path not in self._own and path not in self._made:
            with tf.init_scope():
                self._made[path] = build_writer(folder, is_on=self._is_on)
        writer = self._own[path] if path in self._own else self._made[path]
        return EventWriter(writer)

    def close(self) -> None:
        """Close the writers; everything is then on disk."""
        with tf.init_scope():
            for writer in self._made.values():
                writer.close()
        self._made.clear()
