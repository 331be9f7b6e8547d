"""An input whose elements are cached in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


def input_fn(mode: str, params: Mapping[str, Any]) -> tf.data.Dataset:
    """Return 500 examples of y = 2x, cached in params.folder. If it has a file `signal`, the process gets the signal of
    that number, once, when it reads an example in the middle.
    """
    signal = Path(params["folder"], "signal")

    def read(number: int) -> np.float32:
        if mode == "train" and number == 400 and signal.exists():
            text = signal.read_text()
            signal.unlink()
            os.kill(os.getpid(), int(text))
        return np.float32(number / 500)

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.numpy_function(read, [number], tf.float32)
        x.set_shape([])
        return x, 2 * x

    data = tf.data.Dataset.range(500).map(example).cache(str(Path(params["folder"], mode)))
    return data.batch(4).repeat() if mode == "train" else data.batch(4)
