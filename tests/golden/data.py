"""The examples of the golden models: made of formulas, the same on every version of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

BATCH = 8
# Five batches: whoever begins again after ten steps or twenty, as tf.estimator does, sees what one that goes on sees.
EXAMPLES = 40


def numbers(*shape: int, phase: float = 0.0) -> np.ndarray:
    """Values of float32 between -1 and 1 that do not repeat."""
    count = int(np.prod(shape))
    return np.sin(np.arange(count) * 0.7321 + np.arange(count) ** 2 * 0.0137 + phase).astype(np.float32).reshape(shape)


def dataset(features: Any, labels: Any, mode: str) -> Any:
    """Batches of `BATCH`, in order: for ever in TRAIN, once elsewhere."""
    batches = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH, drop_remainder=True)
    return batches.repeat() if mode == "train" else batches


def regression(mode: str, width: int = 4) -> Any:
    """Features `[8, width]` and labels `[8, 1]`."""
    features = numbers(EXAMPLES, width)
    labels = features.sum(1, keepdims=True) * 0.8 + 0.3
    return dataset(features, labels.astype(np.float32), mode)
