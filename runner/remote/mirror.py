"""What the rest of the runner knows of a model_dir that is a URL: its local folder, and the mirror of that folder."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.config.mistakes import NotAllowed
from runner.config.schema import RunSettings
from runner.remote import upload
from runner.remote.store import Lease, LeaseLostError, Note, Store, lock_of, reaching
from runner.system.console import format_bytes, relative
from runner.system.standard_streams import say
from runner.system.urls import is_url, url_mistake
from runner.tracking.shipping import ShippingProcess

_mirrors: dict[Path, Mirror] = {}
"""Local folder -> its mirror, for the URLs that this process has opened."""


def local_folder(key: str, model_dir: str, parent: str | None = None) -> str:
    """Return the folder in which to work for `model_dir`: itself, or for a URL the local folder with what its bucket
    has.

    Args:
      key: the key or argument with its sign, for messages, as in `url_mistake`.
      model_dir: a folder or a URL.
      parent: the parent of local folders; None: that of the user's caches.

    Raises:
      ConfigError: there can be no model_dir at this URL, or its bucket cannot be reached.
    """
    if not is_url(model_dir):
        return model_dir
    if mistake := url_mistake(key, model_dir, may_be_store=True):
        raise NotAllowed(mistake)
    url = model_dir.rstrip("/")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    folder = Path(parent or Path(caches, "estimator-runner"), name).absolute()
    _mirrors.setdefault(folder, Mirror(folder, url)).open(key)
    return str(folder)


def remote_dir(model_dir: str | os.PathLike[str]) -> str | None:
    """Return the URL of a local folder; None: it has none."""
    return Note.read(Path(model_dir)).url or None


def writing(model_dir: str | os.PathLike[str]) -> None:
    """Begin the mirror of a script's folder, if it has one; it is closed when the process ends.

    Raises:
      ConfigError: another run holds the lease.
      LeaseLostError: another run has taken it over.
    """
    mirror = mirror_of(Path(model_dir))
    if mirror.url and not mirror.has_begun:
        mirror.begin(os.environ, RunSettings())
        atexit.register(_close_at_exit, mirror)
    if lost := mirror.lost():
        raise LeaseLostError(lost)


def _close_at_exit(mirror: Mirror) -> None:
    if left := mirror.close():
        say(f"remote: {left}")


def mirror_of(model_dir: Path) -> Mirror:
    """Return the mirror of a folder whose URL this process has opened; for another folder, one that does nothing."""
    return _mirrors.get(model_dir, Mirror(model_dir, ""))


class Mirror:
    """A local folder and its URL.

    Attributes:
      url: the URL; '': there is none, and nothing is done.
      has_begun: this process holds the lease.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self.url, self.has_begun = folder, url, False
        self._lease: Lease | None = None

    def open(self, key: str) -> None:
        """Fetch what the bucket has, unless this folder has it.

        Raises:
          ConfigError: the bucket cannot be reached.
        """
        if self.has_begun:
            return
        with reaching(f"{key}{self.url}"):
            store = Store(self.url)
            self._folder.mkdir(parents=True, exist_ok=True)
            with lock_of(self._folder):
                if Note.read(self._folder).url != self.url:  # else it is the uploader's
                    Note(self.url).save(self._folder)
                if not store.is_current(self._folder):
                    store.fetch(self._folder)

    def begin(self, env: Mapping[str, str], settings: RunSettings) -> None:
        """Take the lease, fetch what is new since `open`, and send what changes from now on, beside this process.

        Args:
          env: environment of the process that sends.
          settings: when another may take over, and how long `close` waits.

        Raises:
          ConfigError: another run holds the lease, or the bucket cannot be reached.
        """
        if not self.url:
            return
        store, folder = Store(self.url), self._folder
        with reaching(f"model_dir={self.url}"), lock_of(folder):
            identity = Note.read(folder, self.url).folder or uuid.uuid4().hex
            self._lease = lease = Lease.take(store, identity, settings.lease_secs)
            if not store.is_current(folder, lease.number - 1):  # only now: until then another could write
                store.fetch(folder)
            noted = Note.read(folder, self.url).files
            # What is there, because one that was killed may have sent more, or less, than it has noted.
            Note(self.url, identity, {name: noted.get(name, []) for name in store.objects()}).save(folder)
        self.has_begun, self._secs, self._is_last = True, settings.upload_secs, threading.Event()
        if self.url.startswith("memory://"):  # only this process has it
            self._thread = threading.Thread(
                target=upload.follow, args=(folder, lease, self._is_last), daemon=True, name="upload"
            )
            self._thread.start()
            return
        words = ("-m", upload.MODULE, str(folder), "--lease", str(lease.number), "--secs", str(self._secs))
        self._process = ShippingProcess("", env, words, "remote: ")

    def lost(self) -> str:
        """Return why this run no longer may write to the URL; '' while it may."""
        return "" if self._lease is None else self._lease.lost

    def close(self, stops: Sequence[int] = ()) -> str:
        """Wait until everything is sent, the time for it is over, or a further stop request comes into `stops`.

        Return why the bucket does not have everything; '' if it has.
        """
        if not self.has_begun or self._lease is None:
            return ""
        already, self.has_begun = len(stops), False
        if self.url.startswith("memory://"):
            self._is_last.set()
            self._thread.join(self._secs)
        else:
            self._process.finish()
            while self._process.is_alive and len(stops) == already:
                time.sleep(upload.GLANCE_SECS)
            self._process.end()
        left = Note.read(self._folder).left(self._folder)
        self._lease.end()
        if self.lost() or not left:
            return self.lost()
        size = format_bytes(sum(mark[0] for mark in left.values()))
        folder = relative(self._folder)
        return (
            f"{len(left)} files, {size}, of {folder} are not in {self.url}. The same command sends them, and so does: "
            f"python -m {upload.MODULE} {folder}"
        )
