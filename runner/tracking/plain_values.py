"""Values of models as text and in files: names of nested values, and values as JSON. No TensorFlow."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each leaf of a structure; `{"f1": (x, {"b": y})}` has the leaves `f1/0` and `f1/1/b`."""
    if isinstance(value, Mapping):
        members = list(value.items())
    elif isinstance(value, list | tuple):
        members = list(enumerate(value))
    else:
        yield name, value
        return
    for key, member in members:
        yield from leaves(f"{name}/{key}" if name else str(key), member)


def json_value(value: Any) -> Any:
    """Return `value` in a form that JSON can hold.

    Arrays become lists; bytes become text if they are UTF-8, else base64; numbers that JSON lacks become "nan", "inf"
    and "-inf". Other types are left for `json.dumps(default=str)`.
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(member) for key, member in value.items()}
    if isinstance(value, bytes):
        return _text_of_bytes(value)
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):  # a NumPy array, recognized without importing NumPy
        return _list_of_array(value)
    if isinstance(value, list | tuple):
        return [json_value(member) for member in value]
    if hasattr(value, "item"):
        return json_value(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _text_of_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()


def _list_of_array(array: Any) -> Any:
    kind = array.dtype.kind
    is_finite = kind in "iub" or (kind == "f" and math.isfinite(abs(array).max(initial=0)))
    if is_finite:  # JSON has all of its numbers
        return array.tolist()
    return [json_value(member) for member in array]
