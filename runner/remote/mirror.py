"""What the rest of the runner knows of a model_dir that is a URL: its local folder, and the mirror of that folder."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.config.mistakes import ConfigError, NotAllowed
from runner.remote import upload
from runner.remote.store import Lease, LeaseLostError, Note, Store
from runner.system.console import relative
from runner.system.standard_streams import say
from runner.system.urls import is_url, url_mistake
from runner.tracking.exit_codes import FINISHED
from runner.tracking.shipping import NOT_ALL, ShippingProcess
from runner.tracking.tracker import describe

_mirrors: dict[Path, Mirror] = {}
"""Local folder -> its mirror, for the URLs that this process has opened."""


def local_folder(key: str, model_dir: str, parent: str | None = None, *, end: str = "") -> str:
    """Return the folder in which to work for `model_dir`: itself, or for a URL the local folder with what its bucket
    has.

    Args:
      key: the key or argument with its sign, for messages.
      model_dir: a folder or a URL.
      parent: the parent of local folders; None: that of the user's caches.
      end: text after the value in messages.

    Raises:
      ConfigError: there can be no model_dir at this URL, or its bucket cannot be reached.
    """
    if not is_url(model_dir):
        return model_dir
    if mistake := url_mistake(key, model_dir, may_be_store=True, end=end):
        raise NotAllowed(mistake)
    url = model_dir.rstrip("/")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    folder = Path(parent or Path(caches, "estimator-runner"), name).absolute()
    mirror = _mirrors.setdefault(folder, Mirror(folder, url))
    mirror.open(key)
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
    mirror = _mirrors.get(Path(model_dir))
    if mirror is not None and not mirror.has_begun:
        mirror.begin(os.environ)
        atexit.register(mirror.close)
    if mirror is not None and (lost := mirror.lost()):
        raise LeaseLostError(lost)


def mirror_of(model_dir: Path) -> Mirror | NullMirror:
    """Return the mirror of a folder whose URL this process has opened; for another folder, one that does nothing."""
    return _mirrors.get(model_dir, NullMirror())


class NullMirror:
    """The mirror of a folder without a URL."""

    url, has_begun = "", False

    def begin(self, env: Mapping[str, str], lease_secs: float = 0, upload_secs: float = 0) -> None: ...

    def lost(self) -> str:
        return ""

    def close(self, stops: Sequence[int] = ()) -> str:
        return ""


class Mirror(NullMirror):
    """A local folder and its URL.

    Attributes:
      url: the URL.
      has_begun: this process holds the lease.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self.url = folder, url
        self._process: ShippingProcess | None = None
        self._thread: threading.Thread | None = None
        self._code, self.has_begun = NOT_ALL, False
        self._may_begin, self._is_last = threading.Event(), threading.Event()

    def open(self, key: str) -> None:
        """Fetch what the bucket has, unless this folder has it.

        Raises:
          ConfigError: the bucket cannot be reached.
        """
        if self.has_begun:
            return
        try:
            store = Store(self.url)
            self._folder.mkdir(parents=True, exist_ok=True)
            if not Note.read(self._folder, self.url).folder or not store.is_current(self._folder):
                store.fetch(self._folder)
        except ConfigError:
            raise
        except Exception as error:
            if Note.read(self._folder, self.url).folder:  # it has been written from here: the run may go on
                say(f"remote: {describe(error)} ({self.url} cannot be reached; its local folder is used)")
                return
            reason = describe(error).splitlines()[0]
            raise ConfigError(f"{key}{self.url} cannot be reached: {reason}") from error

    def begin(
        self, env: Mapping[str, str], lease_secs: float = upload.LEASE_SECS, upload_secs: float = upload.UPLOAD_SECS
    ) -> None:
        """Take the lease, fetch what is new since `open`, and send what changes from now on, beside this process.

        Raises:
          ConfigError: another run holds the lease.
        """
        store, folder = Store(self.url), self._folder
        identity = Note.read(folder, self.url).folder or uuid.uuid4().hex
        lease = Lease.take(store, identity, lease_secs)
        is_current = store.is_current(folder, lease.number - 1)  # only now: until then another could write
        self.has_begun, self._may_begin, self._is_last = True, threading.Event(), threading.Event()
        if self.url.startswith("memory://"):  # only this process has it

            def run() -> None:
                self._code = upload.follow(folder, lease, self._may_begin, self._is_last, upload_secs)

            self._thread = threading.Thread(target=run, daemon=True, name="upload")
            self._thread.start()
        else:
            words = ("-m", upload.MODULE, str(folder), "--lease", str(lease.number), "--lease-secs", str(lease_secs))
            self._process = ShippingProcess(
                "", env, (*words, "--secs", str(upload_secs)), "remote: ", (FINISHED, NOT_ALL, upload.LOST)
            )
        if not is_current:
            store.fetch(folder)
        Note(self.url, identity, Note.read(folder, self.url).files).save(folder)
        self._may_begin.set()
        if self._process is not None:
            self._process.follow(folder)

    def lost(self) -> str:
        """Return why this run no longer may write to the URL; '' while it may."""
        code = self._code if self._process is None else self._process.code
        return f"the lease on {self.url} was taken over by another run" if code == upload.LOST else ""

    def close(self, stops: Sequence[int] = ()) -> str:
        """Wait until everything is sent, the time for it is over, or a further stop request comes into `stops`.

        Return why the bucket does not have everything; '' if it has.
        """
        if not self.has_begun:
            return ""
        already, process = len(stops), self._process
        self._is_last.set()
        if process is not None:
            process.finish()
            process.wait(lambda: len(stops) > already)
            self._code = NOT_ALL if process.code is None else process.code
        elif self._thread is not None:
            self._thread.join()
        self.has_begun, self._process, self._thread = False, None, None
        if self._code == FINISHED:
            return ""
        return self.lost() or f"{relative(self._folder)} is not completely in {self.url}"
