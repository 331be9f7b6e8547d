"""The private names of TensorFlow that exporting needs.

Written against TensorFlow 2.21; `tests/test_bridge.py` fails first, and by name, when one moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

v1 = tf.compat.v1


@contextlib.contextmanager
def eager_values_as_constants() -> Iterator[None]:
    """While it lasts, an eager tensor that is used in a graph of a session becomes a constant of that graph.

    Anything that is no value, the handle of a variable or of a table, raises a ValueError that says what to do.
    Private: `ops._EagerTensorBase.__tf_tensor__`, by which an eager tensor enters a graph. When it moves, leave this
    out: a model_fn that uses a tensor made outside of it cannot be exported then, with TensorFlow's own message.
    """
    kind = ops._EagerTensorBase
    convert = kind.__tf_tensor__

    def as_constant(self: Any, dtype: Any = None, name: str | None = None) -> Any:
        if tf.executing_eagerly() or v1.get_default_graph().building_function:
            return convert(self, dtype, name)
        if self.dtype in (tf.resource, tf.variant):
            raise ValueError(
                "model_fn uses a variable, table or layer that was made outside of it. What is exported has only what "
                "model_fn makes: make it inside."
            )
        with tf.init_scope():
            return tf.constant(self.numpy(), dtype, name=name or "value")

    kind.__tf_tensor__ = as_constant
    try:
        yield
    finally:
        kind.__tf_tensor__ = convert
