"""The place of a run in an object store: its lease, what a start fetches, and the note of what both sides have.

A lease is an object `.lease/<number>`, created conditionally; the highest number holds. Its holder writes it again
every few seconds, so the store's own time stamps say how old it is. Nobody deletes another's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from runner.config.mistakes import ConfigError, NotAllowed, NotFound
from runner.system.files import StorageError, read_dataclass, write_atomically, write_json
from runner.system.standard_streams import say
from runner.system.urls import STORES
from runner.tracking.run_record import RUN_FILE
from runner.tracking.tracker import describe

NOTE_FILE = ".remote.json"
"""File in the local folder: its URL, `folder` (identifies the folder as the one that the bucket was last written from
or fetched to; absent: it is not up to date), and `files`: name -> [bytes, time of change in ns, the object's mark]."""
STATE_FILE = "checkpoint"
LAST_FILES = (STATE_FILE, RUN_FILE, "study.journal")
"""Files that speak of others: which checkpoint is the newest, that a run or a trial is over. They are read first and
sent last."""
LEASES, UNSENT = ".lease", ".unsent"
# In LEASES of a cluster of several hosts, in the bucket and on each host: the chief's message, and the others' answers.
CALL_FILE, PEERS_FOLDER = "generation.json", "peers"
_ATTEMPTS = 5
_MARKS = ("ETag", "etag", "md5Hash", "created")
logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # each error, with its traceback; they are raised, too
_is_copy = re.compile(r"checkpoint$|runner_files/|model\.ckpt-\d+\.").match


class LeaseLostError(StorageError):
    """Another run has taken over the lease on the URL."""


@contextlib.contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn an error of a store inside this context into a message about `what`. Without its bucket no run starts: only
    there stands whether another is writing, and whether the local folder is the newest.

    Raises:
      ConfigError: the store cannot be reached.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be reached: {describe(error)}") from error


@dataclass
class Note:
    """What a local folder knows of its bucket, as in NOTE_FILE.

    Attributes:
      files: as in NOTE_FILE. What this folder has sent has no mark, and what it was about to send is [].
      worker: index of the worker whose folder this is, if the chief is on another host and sends the checkpoints; 0: it
        is the chief's, or that of all tasks.
    """

    url: str = ""
    folder: str = ""
    files: dict[str, list[Any]] = field(default_factory=dict)
    worker: int = 0

    @classmethod
    def read(cls, folder: Path, url: str = "") -> Note:
        """Return the note in `folder`; an empty one if there is none, or it is about another URL than `url`."""
        note = read_dataclass(cls, folder / NOTE_FILE)
        return note if url in ("", note.url) else cls(url)

    def save(self, folder: Path) -> None:
        write_json(folder / NOTE_FILE, asdict(self))

    def left(self, here: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return name -> [bytes, time of change in ns] of the files that a folder sends and the bucket does not have.

        Args:
          here: as `fingerprints` returns it.
        """
        # Of a checkpoint, of which each host has a copy, a worker sends the state of its own input.
        mine = f".input-{self.worker}."
        sent = {name: mark for name, mark in here.items() if not self.worker or mine in name or not _is_copy(name)}
        return {name: mark for name, mark in sent.items() if self.files.get(name, [])[:2] != mark}

    def own(self, here: Mapping[str, list[Any]]) -> set[str]:
        """Return the names of the files that a folder sends or has sent, or has removed, which a worker's does not."""
        sent = {name for name, noted in self.files.items() if len(noted) < 3 or name not in here}
        return self.left(here).keys() | (sent & here.keys() if self.worker else sent)


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """Return name -> [bytes, time of change in ns] of the files in `folder` that its bucket has, too: all but locks,
    notes and half-written ones.
    """
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = filter(_is_sent, folders)
        for path in (Path(root, name) for name in filter(_is_sent, names)):
            if mark := fingerprint(path):
                found[os.path.relpath(path, folder)] = mark
    return found


def lock_of(folder: Path) -> FileLock:
    """Return the lock of a local folder, under which the processes of a host look whether it is up to date, fetch, and
    begin to write there: a fetch removes what is new.
    """
    return FileLock(folder / f"{NOTE_FILE}.lock", is_singleton=True)  # `fetch` takes it again


def fingerprint(path: Path) -> list[Any]:
    """Return [bytes, time of change in ns] of a file; [] if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return []


def _is_sent(part: str) -> bool:
    """Report whether files or folders of this name are sent; in the bucket, objects of other names are not ours."""
    return bool(part) and (not part.startswith(".") or part == ".hydra")


def upload_order(name: str) -> tuple[int, bool, bool, str]:
    """Sort names so that a reader sees whole checkpoints: an index after the data, that of a checkpoint after those of
    its input state, for it makes the checkpoint one, and a file of LAST_FILES (then the first value is not 0) after all
    others. And whole SavedModels: TensorFlow loads one without the index of its variables as one without variables.
    """
    is_index, last = name.endswith(".index"), os.path.basename(name)
    place = 1 + LAST_FILES.index(last) if last in LAST_FILES else 0
    makes_whole = last.startswith("saved_model.pb") or (
        is_index and "/variables/" not in name and ".input-" not in name
    )
    return place, makes_whole, is_index, name


class Store:
    """The objects below a URL.

    Args:
      url: the URL.
      key: the key or argument with its sign, for messages.

    Raises:
      ConfigError: the package for the scheme is not installed.
    """

    def __init__(self, url: str, key: str = "model_dir=") -> None:
        scheme = url.partition("://")[0]
        try:
            import fsspec
            from fsspec.implementations.dirfs import DirFileSystem

            # Without its cache of listings, which would not show what other hosts write.
            fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            extra = "s3" if scheme == "memory" else scheme
            raise NotFound(
                f"{url}: {STORES[scheme]} is not installed ({error}). Install it: "
                f"pip install 'estimator-runner[{extra}]'"
            ) from error
        self.url, self.what, self.fs = url, f"{key}{url}", DirFileSystem(root, fs)

    def objects(self) -> dict[str, Mapping[str, Any]]:
        """Return name -> what the store says of each object that a folder could have sent."""
        found = self.fs.find("", detail=True)
        return {
            name: info for name, info in found.items() if info["type"] == "file" and all(map(_is_sent, name.split("/")))
        }

    def places(self) -> list[str]:
        """Return the URLs below this one that have leases of their own."""
        inside = {name.partition(f"/{LEASES}/")[0] for name in self.fs.find("") if f"/{LEASES}/" in name}
        return [f"{self.url}/{name}" for name in sorted(inside)]

    # --- the lease ------------------------------------------------------------------------------------------------

    def highest(self) -> int:
        """Return the number of the lease that holds; 0: there is none."""
        names = [path.rpartition("/")[2] for path in self.fs.find(LEASES)]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def lease(self, number: int) -> dict[str, Any]:
        """Return who holds the lease `number`; {} if there is no such lease."""
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads(self.fs.cat_file(_name_of(number))))
        return {}

    def age(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""
        probe = f"{LEASES}/clock-{uuid.uuid4().hex}"
        self.fs.pipe_file(probe, b"now")
        try:
            return float((self.fs.modified(probe) - self.fs.modified(name)).total_seconds())
        finally:
            self.fs.rm_file(probe)

    # --- fetching -------------------------------------------------------------------------------------------------

    def is_current(self, folder: Path, number: int | None = None) -> bool:
        """Report whether `folder` has all that the bucket has: it was the last to write there, or nobody has.

        Args:
          folder: the local folder.
          number: that of the last writer's lease; None: the highest.
        """
        note, number = Note.read(folder, self.url), self.highest() if number is None else number
        if not note.folder:
            return not number and not self.objects()
        return not number or self.lease(number).get("folder") == note.folder

    def fetch(self, folder: Path, but: Collection[str] | None = None) -> None:
        """Bring `folder` to the state of the bucket, with whole checkpoints, also while another host is writing there.

        What the bucket does not have is removed: it belongs to a run that was continued elsewhere. What was not sent of
        that is moved into UNSENT.

        Args:
          folder: the local folder.
          but: the folder sends files, too, which stay as they are, but for these; None: it no longer sends any.
        """
        with lock_of(folder):
            for _ in range(_ATTEMPTS - 1):
                with contextlib.suppress(FileNotFoundError):  # an expired checkpoint; the state file no longer names it
                    return self._fetch(folder, but)
            self._fetch(folder, but)

    def _fetch(self, folder: Path, but: Collection[str] | None) -> None:
        staging, unsent = folder / ".fetching", folder / UNSENT
        shutil.rmtree(staging, ignore_errors=True)
        note, here = Note.read(folder, self.url), fingerprints(folder)
        kept = set() if but is None else note.own(here) - {*but}
        # Not of a folder that an interrupted fetch has left: there it is what was fetched.
        left = note.left(here) if but is None and (note.folder or note.worker) else {}
        if left:
            say(f"remote: another has written to {self.url} since {folder} did; its {len(left)} unsent files: {unsent}")
        for name in sorted(left, key=upload_order, reverse=True):
            (unsent / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, unsent / name)
        note.folder = note.folder if but is not None else ""  # no longer up to date
        note.save(folder)
        before = note.files

        def marks() -> dict[str, str]:
            return {name: mark_of(info) for name, info in self.objects().items() if name not in kept}

        def unchanged(marks: Mapping[str, str]) -> set[str]:
            return {name for name, mark in marks.items() if mark and before.get(name) == [*here.get(name, []), mark]}

        # The state files before the others, which are then at least as new. One that is unchanged is not written: a
        # task here may be writing the next.
        first = marks()
        of_states = {name: mark for name, mark in first.items() if upload_order(name)[0]}
        states = {name: self.fs.cat_file(name) for name in of_states.keys() - unchanged(first)}
        there = {name: mark for name, mark in marks().items() if not upload_order(name)[0]} | of_states
        same = unchanged(there)
        wanted = sorted(there.keys() - states.keys() - same)
        if wanted:
            self.fs.get(wanted, [str(staging / name) for name in wanted])
        for name in sorted(here.keys() - there.keys() - kept, key=upload_order, reverse=True):
            (folder / name).unlink(missing_ok=True)  # the state files and indexes first
        for name in sorted({*wanted, *states}, key=upload_order):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name in states:
                write_atomically(folder / name, states[name])
            else:
                os.replace(staging / name, folder / name)
        shutil.rmtree(staging, ignore_errors=True)
        note.files = {name: noted for name, noted in before.items() if name in kept}
        for name, mark in there.items():
            note.files[name] = [*(here[name] if name in same else fingerprint(folder / name)), mark]
        note.save(folder)


def mark_of(info: Mapping[str, Any]) -> str:
    """Return what changes with an object's contents, of what the store says of it."""
    return next((str(info[key]) for key in _MARKS if info.get(key)), "")


class Lease:
    """The right to write below a URL.

    Attributes:
      number: the number of its object.
      facts: who holds it, as in its object; `folder` identifies the folder of its holder.
      lost: why this run no longer may write; '' while it may.
    """

    def __init__(self, store: Store, number: int, facts: Mapping[str, Any] = {}) -> None:
        self.store, self.number, self.lost = store, number, ""
        self.facts, self._ended = dict(facts), threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")

    @classmethod
    def take(cls, store: Store, folder: str, secs: float) -> Lease:
        """Create the next lease on the URL of `store`, and renew it in a thread of this process until `end`.

        Args:
          folder: identifies the local folder, as in `Note`.
          secs: another may take the URL over when this lease was not renewed for so long.

        Raises:
          ConfigError: another run holds it, or the store cannot say who was first.
        """
        number = store.highest()
        before = store.lease(number)
        if before and not before.get("is_over") and not _is_dead(before):
            left = float(before["secs"]) - store.age(_name_of(number))
            if left >= 0:
                raise ConfigError(_in_use(store.what, before, f" It can be taken over in {left + 1:.0f} s."))
        facts = {"folder": folder, "secs": secs, "time": time.time(), **_this_process()}
        for _ in range(2):
            try:
                store.fs.pipe_file(_name_of(number + 1), json.dumps(facts).encode(), mode="create")
            except FileExistsError:
                if (holder := store.lease(number + 1)) != facts:  # another start was faster
                    raise ConfigError(_in_use(store.what, holder)) from None
                lease = cls(store, number + 1, facts)  # also if an answer was lost, and the library tried again
                lease.keep()
                return lease
        raise NotAllowed(
            f"{store.what}: this store lets two runs create the same object, so it cannot keep them apart. "
            "Use one with conditional writes (S3, GCS, Azure and MinIO have them), or a mounted folder."
        )

    def check(self) -> None:
        """Check that no other run has taken the lease over. Called before each write.

        Raises:
          LeaseLostError: another run has.
        """
        number = self.store.highest()
        if number > self.number:
            self.lost = _in_use(self.store.what, self.store.lease(number), " This run no longer writes there.")
            raise LeaseLostError(self.lost)

    def keep(self) -> None:
        """Renew it in a thread of this process until `end`. The process that sends does so, too: it works until the
        last file, and s3fs in a script no longer finds a host by name at `atexit`.
        """
        self._thread.start()

    def _keep(self) -> None:
        while not self.facts.get("is_over"):
            self.facts["is_over"] = self._ended.wait(self.facts["secs"] / 4)
            with contextlib.suppress(Exception):  # the store is away: the lease grows older; or `lost` says why
                self.check()
                self.store.fs.pipe_file(_name_of(self.number), json.dumps(self.facts).encode())

    def end(self) -> None:
        """Let others take the lease: at once, or when it expires if the store does not answer soon."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5)


def _name_of(number: int) -> str:
    return f"{LEASES}/{number:08d}"


def _this_process() -> dict[str, Any]:
    """Return what identifies this process: host, the start of its kernel, its container's processes, and itself."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    me = psutil.Process()
    return {"host": socket.gethostname(), "boot": boot, "pid": me.pid, "began": me.create_time()}


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Report whether a holder was a process of this host that has ended."""
    if not holder["boot"] or holder["boot"] != _this_process()["boot"]:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(int(holder["pid"])).create_time() != holder["began"])
    return True


def _in_use(what: str, holder: Mapping[str, Any], end: str = "") -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(holder.get("time", 0))))
    who = f"on {holder.get('host')} (process {holder.get('pid')}), since {since}"
    return f"{what} is in use by another run {who}.{end or ' Wait for it, or choose another.'}"
