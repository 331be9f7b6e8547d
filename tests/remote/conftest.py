"""A store in memory, and leases of other hosts."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from runner.remote import mirror, upload
from runner.remote import store as stores
from runner.remote.note import Note
from runner.remote.store import Lease, Store
from runner.system import urls


class SendingThread:
    """In place of the process that sends: only this process sees a store in memory, which a run refuses for that."""

    def __init__(self, name: str, env: Mapping[str, str], words: Sequence[str], label: str) -> None:
        folder, lease, self._secs = Path(words[2]), json.loads(words[4]), float(words[6])
        self._is_last = threading.Event()
        held = Lease(Store(Note.read(folder).url), *lease)
        self._thread = threading.Thread(target=lambda: upload.send_changes(folder, held, self._is_last), daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        self._is_last.set()

    def end(self) -> None:
        self._is_last.set()
        self._thread.join(self._secs)


@pytest.fixture
def stores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    real = memory.info

    def info(fs: Any, path: str, **settings: Any) -> dict[str, Any]:  # as in its listings
        found = dict(real(fs, path, **settings))
        if isinstance(found.get("created"), datetime):
            found["created"] = found["created"].timestamp()
        return found

    monkeypatch.setattr(memory, "info", info)
    pipe_file, one_at_a_time = memory.pipe_file, threading.Lock()

    def create(fs: Any, *args: Any, **settings: Any) -> None:  # stores create an object once; this looks, and then does
        with one_at_a_time:
            pipe_file(fs, *args, **settings)

    monkeypatch.setattr(memory, "pipe_file", create)
    # A later command in this process would close the mirrors that a test leaves open, and say what became of them.
    monkeypatch.setattr(mirror, "_mirrors", {})
    monkeypatch.setattr(urls, "STORES", {**urls.STORES, "memory": "fsspec"})
    monkeypatch.setattr(mirror, "ShippingProcess", SendingThread)
    monkeypatch.setattr(upload, "GLANCE_SECS", 0.01)


@pytest.fixture
def store(stores_in_memory: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(Lease, "_renew", lambda lease: None)  # no lease is renewed while a test looks
    pytest.importorskip("fsspec")
    made = Store(f"memory://{uuid.uuid4().hex}/run")
    yield made
    if made.fs.exists(""):
        made.fs.rm("", recursive=True)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease is that of another host, so that nobody knows whether its process lives."""
    monkeypatch.setattr(stores, "_this_process", lambda: {"host": uuid.uuid4().hex, "boot": "", "pid": 1})
