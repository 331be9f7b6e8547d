"""A plugin of pytest for `make canary`: skips what fails for want of a package that demands an older TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from canary import MODULES


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _absent_module(error: BaseException) -> str | None:
    """Return which of MODULES an error is about; None: it is about something else."""
    found = (getattr(one, "name", None) or "" for one in _causes(error) if isinstance(one, ModuleNotFoundError))
    return next((name.partition(".")[0] for name in found if name.partition(".")[0] in MODULES), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    try:
        return (yield)
    except Exception as error:
        if module := _absent_module(error):
            pytest.skip(f"needs {module}, which demands an older TensorFlow")
        raise
