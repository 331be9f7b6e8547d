"""A store in memory, and leases of other hosts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from runner.remote import store as stores
from runner.remote.store import Lease, Store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(Lease, "_keep", lambda lease: None)  # no lease is renewed while a test looks
    pytest.importorskip("fsspec")
    made = Store(f"memory://{uuid.uuid4().hex}/run")
    yield made
    if made.fs.exists(""):
        made.fs.rm("", recursive=True)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease is that of another host, so that nobody knows whether its process lives."""
    monkeypatch.setattr(stores, "_this_process", lambda: {"host": uuid.uuid4().hex, "boot": "", "pid": 1, "began": 0})
