"""Variables to which tf.estimator gave a number, as an operation of the input function had their name already."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import tensorflow as tf

from runner.checkpoint.reader import Reader

_log = logging.getLogger(__name__)


def numbered(reader: Reader, shapes: Mapping[str, tf.TensorShape]) -> dict[str, str]:
    """Name -> the name that it has in a checkpoint of tf.estimator, of the variables that are there under another.

    In what a run of ours wrote, `count_1` is another variable: of a model that was changed since.

    In 2.15 input and model shared a graph: after `dataset.repeat(3)`, which makes an operation `count`, a
    `tf.Variable(name="count")` was `count_1`, and its slots `count_1/Adam`.

    Args:
      shapes: of the variables of the model, by name.
    """
    if reader.is_of_a_run:
        return {}
    there = reader.names()
    missing = {name: shape for name, shape in shapes.items() if name not in there}

    def is_free(key: str, shape: tf.TensorShape) -> bool:
        return key in there and key not in shapes and shape.is_compatible_with(there[key][0])

    roots = [name for name, shape in missing.items() if is_free(f"{name}_1", shape)]
    found = {root: f"{root}_1" for root in roots}
    for root in roots:
        below = {name: f"{root}_1{name.removeprefix(root)}" for name in missing if name.startswith(f"{root}/")}
        found |= {name: key for name, key in below.items() if is_free(key, missing[name])}
    if found:
        shown = ", ".join(f"{name!r} ({key!r} there)" for name, key in found.items())
        _log.info("tf.estimator's input had operations of the same names: %s has %s.", reader.path, shown)
    return found
