"""What an evaluation came to: plain values, and the events that TensorBoard shows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def plain(value: Any) -> Any:
    """The value of a scalar tensor as Python's own float, int, bool or bytes; arrays as they are."""
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0 else value


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Nested metrics under joined names: `{"f1": (a, {"b": b})}` is `{"f1/0": a, "f1/1/b": b}`."""
    return dict(leaf for name, value in metrics.items() for leaf in _leaves(name, value))


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among `metrics`, flat; arrays and serialised summaries are left out."""
    return {name: float(value) for name, value in flat(metrics).items() if isinstance(value, (float, int))}


def build_writer(folder: str, *, is_on: bool) -> Any:
    """A writer of event files in `folder`, which it makes at once; one that writes nothing where `is_on` is False."""
    return tf.summary.create_file_writer(folder) if is_on else tf.summary.create_noop_writer()


def write_events(writer: Any, step: int, metrics: Mapping[str, Any]) -> None:
    """Adds `metrics` to the event files of `writer`: numbers, arrays, serialised `tf.compat.v1.Summary`s."""
    with writer.as_default(step=step):
        for name, value in flat(metrics).items():
            if isinstance(value, bytes):
                _write_bytes(name, value)
            elif isinstance(value, (float, int)):
                tf.summary.scalar(name, float(value))
            else:
                tf.summary.write(name, value)
    writer.close()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        members = list(value.items())
    elif isinstance(value, (tuple, list)):
        members = list(enumerate(value))
    else:
        yield name, value
        return
    for key, member in members:
        yield from _leaves(f"{name}/{key}", member)


def _write_bytes(name: str, value: bytes) -> None:
    try:
        tf.summary.experimental.write_raw_pb(value)
    except (tf.errors.InvalidArgumentError, tf.errors.DataLossError):  # a string, not a serialised summary
        tf.summary.text(name, value)
