"""What the rest of the runner knows of a folder that is a URL: its local folder, and the mirror of that folder.

A URL that a run, a sweep or exports were written to is a place, with one lease and one uploader. What lies below it
belongs to it, such as the jobs of a sweep: their folders are in its local folder. A URL around a place is refused.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from runner.config.mistakes import ConfigError, NotAllowed
from runner.config.schema import RunSettings
from runner.distribute.cluster import ALONE, Cluster
from runner.remote import upload
from runner.remote.note import Note, fingerprints, folder_lock, is_sent_from, sending_in
from runner.remote.store import LEASES, PEERS_FOLDER, Lease, LeaseLostError, Store, reaching
from runner.system.console import format_bytes, relative
from runner.system.standard_streams import say
from runner.system.urls import is_url, url_mistake
from runner.tracking.run_lock import alone_in
from runner.tracking.shipping import ShippingProcess, finishing

SAY_SECS = 10.0
"""Seconds between two lines about what the end of a run waits for."""
_mirrors: dict[Path, Mirror] = {}
"""Local folder -> its mirror, for the URLs that this process has opened."""


def local_folder(key: str, model_dir: str, parent: str | None = None, *, is_read: bool = False) -> str:
    """Return the folder in which to work for `model_dir`: itself, or for a URL the local folder with what its bucket
    has.

    Args:
      key: the key or argument with its sign, for messages, as in `url_mistake`.
      model_dir: a folder or a URL.
      parent: the parent of local folders; None: that of the user's caches.
      is_read: this process writes nothing there; another one may, such as the supervisor of this task.

    Raises:
      ConfigError: nothing can be written to this URL, or its bucket cannot be reached.
    """
    if not is_url(model_dir):
        return model_dir
    if mistake := url_mistake(key, model_dir, may_be_store=True):
        raise NotAllowed(mistake)
    url = model_dir.rstrip("/")
    path = known_folder(url, parent)
    if mirror_of(Path(path)).has_begun:
        return path
    with reaching(f"{key}{url}"):
        # Ask at the URL itself first, so that an error is raised: `_find_place` ignores errors at what is above it.
        Store(url).highest()
        place, folder, path = _find_place(url, parent, looks_into_bucket=True)
        # A URL around a place is refused.
        opened = [mirror.url for mirror in _mirrors.values() if mirror.url.startswith(f"{place}/")]
        leased_below = [*opened, *Store(place).leased_urls()]
        if leased_below:
            what = f"in {place} is {leased_below[0]}, which has been written to"
            raise NotAllowed(f"{key}{url}: {what}. Choose another place.")
        mirror = _mirrors.get(folder) or Mirror(folder, place)
        mirror.open(key)
        if not is_read:
            _mirrors.setdefault(folder, mirror)  # another job of a sweep may have been faster
    return path


def known_folder(path: str, parent: str | None = None) -> str:
    """Return what `local_folder` has returned on this host, without a look into the bucket. Called by tasks."""
    if not is_url(path):
        return path
    _, _, folder = _find_place(path.rstrip("/"), parent)
    return folder


def _find_place(url: str, parent: str | None, *, looks_into_bucket: bool = False) -> tuple[str, Path, str]:
    """Return (the outermost place at or above `url`, or `url` itself if there is none; the local folder of this place;
    the path of `url` in this local folder).

    Args:
      parent: the parent of local folders; None: that of the user's caches.
      looks_into_bucket: also find places in the bucket; else only those that this host has opened or written to.
    """
    if not parent:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        parent = os.path.join(caches, "estimator-runner")
    parts = url.split("/")
    # From the bucket (the first three parts) down: the first place that is found contains the others.
    for end in range(3, len(parts) + 1):
        place = "/".join(parts[:end])
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        folder = Path(parent, f"{parts[end - 1]}-{digest}").absolute()
        if place == url or folder in _mirrors or Note.read(folder).folder:
            break
        with suppress(Exception):  # these credentials may be for what is below
            if looks_into_bucket and Store(place).highest():
                break
    return place, folder, f"{folder}{url.removeprefix(place)}"


def remote_dir(path: str | os.PathLike[str]) -> str | None:
    """Return the URL of a local folder, or of one in it; None: it has none."""
    path = Path(path).absolute()
    for folder in (path, *path.parents):
        url = Note.read(folder).url
        if url:
            return "/".join([url, *path.relative_to(folder).parts])
    return None


def url_or_path(folder: Path) -> str:
    """Return a folder as the user would type it here: by its URL, if it has one."""
    return remote_dir(folder) or relative(folder)


def meeting_place(model_dir: Path) -> Path:
    """Return the folder in which the supervisors of a cluster find each other's messages."""
    if remote_dir(model_dir):
        return model_dir / LEASES
    return model_dir


def writing(model_dir: str | os.PathLike[str]) -> None:
    """Begin the mirror of a script's folder, if it has one; it is closed when the process ends.

    Raises:
      ConfigError: another run holds the lease.
      LeaseLostError: another run has taken it over.
    """
    mirror = mirror_of(Path(model_dir))
    if mirror.url and not mirror.has_begun:
        mirror.begin(os.environ, RunSettings())
        atexit.register(close_all)
    lost = mirror.lost()
    if lost:
        raise LeaseLostError(lost)


def close_all(stops: Sequence[int] = ()) -> bool:
    """Close the mirrors of this process. Say which buckets do not have everything, and return whether there are any."""
    reasons = []
    for mirror in _mirrors.values():
        reason = mirror.close(stops)
        if reason:
            reasons.append(reason)
    for reason in reasons:
        say(f"remote: {reason}")
    return bool(reasons)


def mirror_of(model_dir: Path) -> Mirror:
    """Return the mirror of a folder, or of one that it is in, whose URL this process has opened; for another folder,
    one that does nothing.
    """
    for folder in (model_dir, *model_dir.parents):
        if folder in _mirrors:
            return _mirrors[folder]
    return Mirror(model_dir, "")


class Mirror:
    """A local folder and its URL.

    Attributes:
      url: the URL; '': there is none, and nothing is done.
      has_begun: this process may write to the URL.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.has_begun = False
        self._folder = folder
        self._key = "model_dir="
        self._lock = threading.Lock()
        self._lease: Lease | None = None

    def open(self, key: str) -> None:
        """Fetch what the bucket has, unless this folder has it.

        Raises:
          ConfigError: the bucket cannot be reached.
        """
        if self.has_begun:
            return
        self._key = key.rpartition("(")[2]
        with reaching(f"{key}{self.url}"):
            store = Store(self.url, self._key)
            # As private as the files with secrets that it has: a copy, and what is fetched, has no mode of its own.
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            with folder_lock(self._folder):
                if Note.read(self._folder).url != self.url:  # else only the uploader writes the note
                    Note(self.url).save(self._folder)
                # The folder is in use, and the bucket has its files from there: nothing in it is touched meanwhile.
                if is_sent_from(self._folder) or store.is_held_on_this_host(Note.read(self._folder, self.url)):
                    return
                # A worker's folder never counts as up to date, so `update` would fetch all of it. Not while its
                # supervisor holds the folder's lock.
                with suppress(ConfigError), alone_in(self._folder, timeout_secs=0):
                    store.update(self._folder)

    def begin(self, env: Mapping[str, str], settings: RunSettings, place: Cluster = ALONE) -> None:
        """Take the lease, fetch what is new since `open`, and send what changes from now on, beside this process. If
        that has begun, as by another job of a sweep, nothing is done.

        Args:
          env: environment of the process that sends.
          settings: when another may take over, and how long `close` waits.
          place: that of the worker whose folder this is, if the chief is on another host: the lease is the chief's.

        Raises:
          ConfigError: another run holds the lease or, for a worker, this folder; or the bucket cannot be reached.
        """
        with self._lock:
            if self.url and not self.has_begun:
                self._begin(env, settings, place)

    def _begin(self, env: Mapping[str, str], settings: RunSettings, place: Cluster) -> None:
        """Do what `begin` says, once. If a step fails, what was taken before it is released."""
        store = Store(self.url, self._key)
        folder = self._folder
        worker = place.worker_index
        with reaching(f"{self._key}{self.url}"), ExitStack() as exit_stack:
            if worker:  # elsewhere the supervisor locks the folder, later
                exit_stack.enter_context(alone_in(folder, "run.local_dir"))
                self._begin_as_worker(store, worker)
            else:
                self._begin_with_lease(store, settings, exit_stack)
            self._begun = exit_stack.pop_all()
        shutil.rmtree(folder / LEASES, ignore_errors=True)  # messages of an earlier start
        (folder / LEASES / PEERS_FOLDER).mkdir(parents=True)
        self.has_begun = True
        self._secs = settings.upload_secs
        # A worker's process says its place, and gets the lease from the chief.
        lease_args = [0, dataclasses.asdict(place)]
        if self._lease is not None:
            lease_args = [self._lease.number, self._lease.facts]
        python_args = ("-m", upload.MODULE, str(folder), "--lease", json.dumps(lease_args), "--secs", str(self._secs))
        self._process = ShippingProcess("", env, python_args, "remote: ")

    def _begin_with_lease(self, store: Store, settings: RunSettings, exit_stack: ExitStack) -> None:
        """Take the lease, and bring the folder to what the bucket has."""
        folder = self._folder
        note = Note.read(folder, self.url)
        is_last_writer = bool(note.folder) and store.was_last_written_by(note, store.highest())
        identity = note.folder
        if not is_last_writer:
            # The lease gets a new identity, which the note gets after fetching: if this process is killed in between,
            # the folder does not count as the last writer, because it is not up to date.
            identity = uuid.uuid4().hex
        self._lease = Lease.take(store, identity, settings.lease_secs)
        exit_stack.callback(self._lease.end)
        # The locks in this order: a process of an earlier start that still sends holds the first one, and takes the
        # second at times.
        with sending_in(folder), folder_lock(folder):
            store.update(folder, self._lease.number - 1, is_thorough=True)  # only now: until then another could write
            note = Note.read(folder, self.url)
            note.folder = identity
            note.worker = 0
            note.save(folder)

    def _begin_as_worker(self, store: Store, worker: int) -> None:
        """Fetch what the bucket has, if this folder was the chief's or another worker's."""
        with folder_lock(self._folder):
            note = Note.read(self._folder, self.url)
            if note.worker != worker:
                store.fetch(self._folder)  # everything: what this folder has sent may now be another worker's to send
                note.folder = ""
                note.files = Note.read(self._folder).files
            note.worker = worker
            note.save(self._folder)

    def lost(self) -> str:
        """Return why this run no longer may write to the URL; '' while it may."""
        if self._lease is None:
            return ""
        return self._lease.lost

    def close(self, stops: Sequence[int] = ()) -> str:
        """Wait until everything is sent, the time for it is over, or a further stop request comes into `stops`.

        Return why the bucket does not have everything; '' if it has.
        """
        if not self.has_begun:
            return ""
        self.has_begun = False
        next_line_at = SAY_SECS
        with suppress(KeyboardInterrupt):  # of a script; a command makes a stop request of it
            for waited_secs in finishing([self._process], stops):
                if waited_secs > self._secs + SAY_SECS:  # it ends after `_secs` by itself, but for one that was stopped
                    break
                if waited_secs <= next_line_at:
                    continue
                unsent = self._describe_unsent()
                if unsent:
                    next_line_at += SAY_SECS
                    say(f"remote: {unsent}, are still to be sent to {self.url}; Ctrl-C ends the run without them")
        self._process.end()
        # Look at both before the lease is given up: afterwards another run may change them.
        lost = self.lost()
        unsent = self._describe_unsent()
        self._begun.close()
        if lost or not unsent:
            return lost
        folder = relative(self._folder)
        advice = ""
        if self._lease:
            advice = f" The same command sends them, and so does: python -m {upload.MODULE} {folder}"
        return f"{unsent}, of {folder} are not in {self.url}.{advice}"

    def _describe_unsent(self) -> str:
        """Return how much the URL does not have; '': it has everything."""
        unsent = Note.read(self._folder).unsent(fingerprints(self._folder))
        if not unsent:
            return ""
        size = sum(size for size, _ in unsent.values())
        return f"{len(unsent)} files, {format_bytes(size)}"
