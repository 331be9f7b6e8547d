"""The old place of `runner.models.tabular`. The config.yaml of old runs names its functions, such as
`runner.classic.tabular.linear`.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("runner.models.tabular"), name)
