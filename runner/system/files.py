"""Small files that other processes read: always whole, never half written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

MODEL_SUMMARY_FILE = "model_summary.txt"
"""In model_dir: tables of the model's variables and layers, for a person."""


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces `path` in one move; a reader sees the old text or the new one, also after a crash."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes `values` as an indented JSON object."""
    write_atomically(path, json.dumps(values, indent=2, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None when there is no such file or it holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def read_dataclass(cls: type[_T], path: Path) -> _T:
    """Return the `cls` whose fields the JSON object in `path` holds; its defaults when there is none.

    What other versions wrote and `cls` does not know is passed over.
    """
    known = read_json(path) or {}
    return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})  # type: ignore[attr-defined]
