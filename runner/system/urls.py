"""URLs where a folder is meant: which a run may have for its model_dir, and why another is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runner.system.redaction import masked_value

STORES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""Schemes that `runner.remote` mirrors a folder to -> the package that speaks to this store."""


_IN_MEMORY = ("memory", "ram")


def is_url(path: Any) -> bool:
    """Report whether `path` is a URL. A run cannot write there: it locks, appends to and renames files."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path or "")) is not None


def url_mistake(key: str, path: Any, *, may_be_store: bool = False) -> str | None:
    """Return why the URL `path` cannot be the folder `key`; None if it can, or is no URL.

    Args:
      key: the key or argument with its sign, for the message: `model_dir=`, `RunConfig(model_dir=`.
      path: its value.
      may_be_store: the URL of an object store is allowed.
    """
    if not is_url(path):
        return None
    scheme, _, rest = str(path).partition("://")
    end = ")" if "(" in key else ""
    shown = masked_value(key.removesuffix("="), path)
    what = f"{key}{shown}{end}"
    if may_be_store and scheme in STORES:
        bucket = rest.partition("/")[0]
        has_bucket = bool(bucket) and "@" not in bucket
        if has_bucket and not re.search(r"//|\?|(^|/)\.\.(/|$)", rest):
            return None
        return (
            f"{what} is no place in an object store. Allowed: {scheme}://<bucket>/<path>, without credentials, which "
            f"{STORES[scheme]} reads from the environment and its own files."
        )
    rest = rest.partition("?")[0].rpartition("@")[2]  # without a password
    below = rest.strip("/") or scheme
    local = f"/mnt/{below}"
    advice = "Mount it (gcsfuse, s3fs, a volume), and use the path"
    stores = ", or use s3://, gs:// or az://" if may_be_store else ""
    if scheme == "file":
        local = "/" + rest.lstrip("/")
        advice = "Write the path"
        stores = ""
    elif scheme in _IN_MEMORY:
        advice = "Only the process that writes to it would see it. Use a path"
    return f"{what} is a URL, but a run needs a folder of the file system. {advice}: {key}{local}{end}{stores}"
