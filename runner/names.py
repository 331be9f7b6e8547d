"""Names and texts in the form that MLflow takes. What it refuses was tried on MLflow 3.17."""

from __future__ import annotations

import hashlib
import re
from typing import Any

MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 8000
"""Characters in a name, in the value of a parameter and in that of a tag; MLflow's own limits."""


class UniqueNames:
    """Clean names that stay different: the second of two names that would become one gets a suffix."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    def clean(self, name: str) -> str:
        clean = clean_name(name)
        if self._owners.setdefault(clean, name) == name:
            return clean
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{clean[: MAX_NAME - 9]}-{digest[:8]}"


def clean_name(name: str) -> str:
    """`name` as MLflow takes it: of letters, digits, `_ - . space : /`, and a path that means itself."""
    parts = re.sub(r"[^\w\-. :/]", "_", name)[:MAX_NAME].split("/")
    text = "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in parts)
    return re.sub(r"^\.\.", "__", text)[:MAX_NAME].rstrip("/")


def clean_text(value: Any, limit: int) -> str:
    """`value` as text that every database takes, cut to `limit` characters."""
    # A command line in another encoding holds lone surrogates, which sqlite refuses; PostgreSQL refuses NUL.
    text = str(value).encode("utf-8", "replace").decode().replace("\0", "\\0")
    return text if len(text) <= limit else text[: limit - 1] + "…"
