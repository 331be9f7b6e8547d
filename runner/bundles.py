"""TensorFlow's bundles: named tensors in an index and shards of data, each tensor with a CRC-32C."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf


def write_bundle(path: Path, tensors: Mapping[str, Any]) -> None:
    """Writes one bundle; a tuple is written as the slices of one tensor."""
    keys: list[str] = []
    slices: list[str] = []
    values: list[tf.Tensor] = []
    with tf.init_scope(), tf.device("CPU:0"):
        for key, value in tensors.items():
            parts = [tf.convert_to_tensor(part) for part in (value if isinstance(value, tuple) else (value,))]
            keys += [key] * len(parts)
            slices += _slice_specs(parts) if isinstance(value, tuple) else [""]
            values += parts
        tf.raw_ops.SaveV2(prefix=str(path), tensor_names=keys, shape_and_slices=slices, tensors=values)


def _slice_specs(parts: list[tf.Tensor]) -> list[str]:
    """TensorFlow's words for consecutive slices along axis 0: "10 4 0,5:0,4" is rows 0-4 of a [10, 4]."""
    rows = sum(part.shape[0] for part in parts)
    whole = " ".join(str(size) for size in (rows, *parts[0].shape[1:]))
    rest = "".join(f":0,{size}" for size in parts[0].shape[1:])
    specs, start = [], 0
    for part in parts:
        specs.append(f"{whole} {start},{part.shape[0]}{rest}")
        start += part.shape[0]
    return specs


def read_bundle(path: str, dtypes: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    """Key -> tensor, read together. Raises: DataLossError: a tensor is not what its CRC-32C says."""
    if not dtypes:
        return {}
    with tf.init_scope(), tf.device("CPU:0"):
        values = tf.raw_ops.RestoreV2(
            prefix=path, tensor_names=list(dtypes), shape_and_slices=[""] * len(dtypes), dtypes=list(dtypes.values())
        )
    return dict(zip(dtypes, values, strict=True))
