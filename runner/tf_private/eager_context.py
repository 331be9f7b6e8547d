"""Whether TensorFlow has been used in this process: a process that has is not fit to fork from."""

from __future__ import annotations

import sys


def is_untouched() -> bool:
    """Report whether no operation has run here and no device was looked at. False where nobody can know.

    Private: `context._context`, None or an object that notes in `_initialized` that it has devices and threads. The
    public names (tf.executing_eagerly, tf.config) make the context that they are asked about. When it moves: nothing is
    forked, and each task imports TensorFlow itself.
    """
    try:
        context = sys.modules["tensorflow.python.eager.context"]._context
        return context is None or not context._initialized
    except (KeyError, AttributeError):
        return False
