"""What a local folder knows of its bucket: the versions that both sides have, and what only one of them may have.

The note is written before each send, so it knows of everything that was ever sent from its folder. A file in the bucket
of which it does not know was written elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from runner.checkpoint_files import layout, manifest
from runner.checkpoint_files.layout import STATE_FILE
from runner.config.mistakes import ConfigError
from runner.system.files import read_dataclass, write_json
from runner.system.standard_streams import say
from runner.tracking.run_record import RUN_FILE

NOTE_FILE = ".remote.json"
"""File in the local folder with its `Note`."""
SENDING_LOCK = ".upload.lock"
"""Lock file in the local folder, held by the process that sends from it."""
SENDING_SECS = 75.0
"""Seconds to wait for the process of an earlier start, which may have a large file under way."""
LAST_FILES = (STATE_FILE, RUN_FILE, "study.journal")
"""Files that speak of others: which checkpoint is the newest, that a run or a trial is over. They are read first and
sent last."""
# The first that a store has. Google's etag also changes with what is said about an object.
_MARKS = ("ETag", "generation", "etag", "created")

# Of a checkpoint each host of a cluster has a copy, of which the chief's is the one that is sent.
_is_copy = re.compile(r"checkpoint$|runner_files/|model\.ckpt-\d+\.").match
# A worker on another host sends the state of its own input.
_IS_OF_A_WORKER = re.compile(r"\.input-[1-9]\d*\.")
# Each start of a run or a sweep writes to one of these journals, in its folder or in those of its jobs.
_IS_RECORD = re.compile(r"checkpoint|run\.json|study\.journal|events\.(chief|supervisor)-0\.jsonl")
_IS_EXPORT = re.compile(r"saved_model\.pb(txt)?")
_OF_EXPORT = re.compile(r"saved_model\.pb|variables/|assets(\.extra)?/|fingerprint\.pb$|keras_metadata\.pb$")
_STAYS = re.compile(r"config(\..*)?\.yaml|summary(\..*)?\.json|graph\.pbtxt")
_GROWS = re.compile(r"events\.(.*\.jsonl|out\.tfevents\..*)|study\.journal")


class Version(NamedTuple):
    """A file as both sides have it.

    Attributes:
      bytes: its size; None: not known, because it grew while it was sent from a full disk, or an earlier version of the
        runner was about to send it.
      time: when the local file was changed, in ns; None: it is about to be sent or fetched.
      mark: what the store says of the object, as in `mark_of`; while it is about to be sent, of the object before. '':
        there was none, or an earlier version of the runner has sent it.
      is_fetched: it was fetched, not sent.
      unanswered: sizes of further attempts to send it to which no answer came, and which may still arrive.
    """

    bytes: int | None
    time: int | None
    mark: str = ""
    is_fetched: bool = False
    unanswered: tuple[int | None, ...] = ()


@dataclass
class Note:
    """What a local folder knows of its bucket, as in NOTE_FILE.

    Attributes:
      folder: identifies the folder as the one from which the bucket was last written; '': it is not up to date, as
        while it is fetched, or always if it is a worker's.
      files: name -> the version that both sides have.
      worker: index of the worker whose folder this is, if the chief is on another host and sends the checkpoints; 0: it
        is the chief's, or that of all tasks.
      gone: names of files that a run has deleted in the folder, and that are to be removed from the bucket.
      lost: names of files that somebody else has deleted in the folder, and that stay in the bucket.
    """

    url: str = ""
    folder: str = ""
    files: dict[str, Version] = field(default_factory=dict)
    worker: int = 0
    gone: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files = {name: _version(values) for name, values in self.files.items()}

    @classmethod
    def read(cls, folder: Path, url: str = "") -> Note:
        """Return the note in `folder`; an empty one if there is none, or it is about another URL than `url`."""
        note = read_dataclass(cls, folder / NOTE_FILE)
        is_about_it = url in ("", note.url)
        return note if is_about_it else cls(url)

    def save(self, folder: Path) -> None:
        write_json(folder / NOTE_FILE, asdict(self))

    def left(self, here: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return name -> [bytes, time of change in ns] of the files that a folder sends and the bucket does not have.

        Args:
          here: as `fingerprints` returns it.
        """
        changed = self._find_changed(here)
        return {name: fingerprint for name, fingerprint in changed.items() if self._has_its_index(name, here)}

    def _find_changed(self, here: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """As `left`, with the files of checkpoints that are being saved."""
        found = {}
        for name, fingerprint in here.items():
            if self._sends(name) and not self.is_unchanged(name, fingerprint):
                found[name] = fingerprint
        return found

    def _has_its_index(self, name: str, here: Mapping[str, list[Any]]) -> bool:
        """Report whether the index is there that makes a checkpoint of its files. Without it they are none yet, or what
        an interrupted save has left. A worker sends the state of its input alone.
        """
        checkpoint = layout.checkpoint_of(name)
        if checkpoint is None:
            return True
        if self.worker:
            input_state = f".input-{self.worker}"
            stem = name.partition(f"{input_state}.")[0]
            return f"{stem}{input_state}.index" in here
        return f"{checkpoint}.index" in here

    def is_unchanged(self, name: str, fingerprint: list[Any]) -> bool:
        """Report whether a file is still the one that both sides have.

        Args:
          fingerprint: as `fingerprints` returns it.
        """
        noted = self.files.get(name)
        return noted is not None and [noted.bytes, noted.time] == fingerprint

    def is_of_the_same_size(self, name: str, fingerprint: list[Any]) -> bool:
        """Report whether a file has the size of the one that both sides have; False while nobody knows."""
        noted = self.files.get(name)
        if noted is None or noted.time is None:
            return False
        return bool(noted.bytes == fingerprint[0])

    def _sends(self, name: str) -> bool:
        """Report whether a folder sends files of this name: a worker's those that are not the chief's."""
        if not self.worker:
            return True
        is_own_input = f".input-{self.worker}." in name
        return is_own_input or not _is_copy(name)

    def own(self, here: Mapping[str, list[Any]]) -> set[str]:
        """Return the names of the files that a folder sends or has sent, or has removed, which a worker's does not."""
        sent = {name for name, noted in self.files.items() if not noted.is_fetched}
        sent |= self.files.keys() - here.keys()
        if self.worker:
            sent &= here.keys()
        return self._find_changed(here).keys() | sent

    def is_behind(self, there: Mapping[str, Mapping[str, Any]]) -> bool:
        """Report whether a run was continued elsewhere: the bucket has what only the sender of this folder writes, in a
        version of which this folder does not know.

        Args:
          there: name -> what the store says of the object.
        """
        # Folders of runs: what a person puts elsewhere, such as a copy of an export, says nothing of them.
        of_runs = {os.path.dirname(name) for name in (*there, *self.files) if is_record(name)}
        for name, info in there.items():
            if _is_of_the_sender(name, of_runs) and not self.knows(name, info):
                return True
        return False

    def knows(self, name: str, info: Mapping[str, Any]) -> bool:
        """Report whether an object is in a version that this folder has sent, was about to send, or has fetched."""
        noted = self.files.get(name)
        if noted is None:
            return False
        if noted.mark and noted.mark == mark_of(info):
            return True
        sizes = set(noted.unanswered)
        # Whoever is killed while he sends does not know the new mark.
        has_mark = bool(noted.mark) and noted.time is not None
        if not has_mark:
            sizes.add(noted.bytes)
        return None in sizes or info["size"] in sizes


def _version(values: Iterable[Any]) -> Version:
    """Return what a note holds of a file. Earlier versions had no mark of what they sent, another one of what they had
    fetched, and nothing of what they were about to send.
    """
    known = list(values)
    is_of_an_earlier_version = len(known) < 4
    if not known:
        return Version(None, None)
    if is_of_an_earlier_version:
        size, time = known[:2]
        return Version(size, time, is_fetched=len(known) == 3)
    size, time, mark, is_fetched, unanswered = known
    return Version(size, time, mark, is_fetched, tuple(unanswered))


def mark_of(info: Mapping[str, Any]) -> str:
    """Return what changes with an object's contents, of what the store says of it."""
    for key in _MARKS:
        if info.get(key):
            # A listing and a look at one object may differ in the quotes.
            return str(info[key]).strip('"')
    return ""


# --- which file is whose ----------------------------------------------------------------------------------------------


def _is_of_the_sender(name: str, of_runs: Collection[str]) -> bool:
    """Report whether only the sender of a folder writes files of this name, not a worker on another host or a person:
    records, of which each start writes one, checkpoints beside them, and exports in a place of their own.

    Args:
      of_runs: folders with records.
    """
    if is_record(name):
        return True
    file = os.path.basename(name)
    checkpoint = layout.checkpoint_of(name)
    if checkpoint is not None:
        return os.path.dirname(checkpoint) in of_runs and not _IS_OF_A_WORKER.search(file)
    return not of_runs and _IS_EXPORT.fullmatch(file) is not None


def is_record(name: str) -> bool:
    """Report whether a file is one that each start of a run writes."""
    return _IS_RECORD.fullmatch(os.path.basename(name)) is not None


def stays(name: str) -> bool:
    """Report whether a file is one that no run deletes, however old it is."""
    return only_grows(name) or _STAYS.fullmatch(os.path.basename(name)) is not None


def only_grows(name: str) -> bool:
    """Report whether a file is only appended to."""
    return _GROWS.fullmatch(os.path.basename(name)) is not None


def expired_in(folder: Path, names: Iterable[str]) -> set[str]:
    """Return those of `names` that belong to checkpoints that have expired: the state file, which is written before
    their files are deleted, no longer names them.

    Args:
      folder: the local folder, which need not have the files.
    """
    expired = set()
    kept: dict[str, tuple[str, ...]] = {}
    for name in names:
        checkpoint = layout.checkpoint_of(name)
        if checkpoint is None:
            continue
        place, checkpoint_name = os.path.split(checkpoint)
        if place not in kept:
            kept[place] = layout.read_state(folder / place).names
        # Without a state file nobody knows.
        if kept[place] and checkpoint_name not in kept[place]:
            expired.add(name)
    return expired


def deleted_by_the_run(folder: Path, missing: Collection[str], here: Collection[str]) -> set[str]:
    """Return those of the `missing` files that a run has deleted in `folder`, which has those that are `here`.

    What somebody else deletes is still in the bucket at the next start, which fetches it. So a checkpoint counts when
    the state file no longer names it; and nothing counts in a folder that is being emptied: one of its records is gone,
    or everything is.
    """
    if not here:
        return set()
    emptied = {os.path.dirname(name) for name in missing if is_record(name)}
    expired = expired_in(folder, missing)
    deleted = set()
    for name in missing:
        # A run deletes the results of evaluations when it saves the step again.
        is_part = layout.checkpoint_of(name) is not None and not name.endswith(manifest.METRICS)
        is_kept = is_part and name not in expired
        if not is_kept and not stays(name) and not is_below(name, emptied):
            deleted.add(name)
    return deleted


def exports_in(names: Iterable[str]) -> set[str]:
    """Return the folders of the SavedModels among files of these names."""
    return {os.path.dirname(name) for name in names if _IS_EXPORT.fullmatch(os.path.basename(name))}


def is_of_an_export(name: str, exports: Iterable[str]) -> bool:
    """Report whether a file is a part of a SavedModel in one of the folders `exports`."""
    for export in exports:
        inside = name.removeprefix(f"{export}/")
        is_inside = not export or inside != name
        if is_inside and _OF_EXPORT.match(inside):
            return True
    return False


def is_below(name: str, folders: Iterable[str]) -> bool:
    """Report whether a file is in one of the folders, or in a folder in it; '': that of the run."""
    for folder in folders:
        if not folder or name.startswith(f"{folder}/"):
            return True
    return False


# --- the folder -------------------------------------------------------------------------------------------------------


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """Return name -> [bytes, time of change in ns] of the files in `folder` that its bucket has, too: all but locks,
    notes and half-written ones.
    """
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = filter(is_sent, folders)  # in place: os.walk then leaves out the others
        for name in filter(is_sent, names):
            path = Path(root, name)
            size_and_time = fingerprint(path)
            if size_and_time:
                found[os.path.relpath(path, folder)] = size_and_time
    return found


def fingerprint(path: Path) -> list[Any]:
    """Return [bytes, time of change in ns] of a file; [] if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return []


def is_sent(part: str) -> bool:
    """Report whether files or folders of this name are sent; in the bucket, objects of other names are not ours."""
    return bool(part) and (not part.startswith(".") or part == ".hydra")


def upload_order(name: str) -> tuple[int, bool, bool, str]:
    """Sort names so that a reader sees whole checkpoints: an index after the data, that of a checkpoint after those of
    its input state, for it makes the checkpoint one, and a file of LAST_FILES (then the first value is not 0) after all
    others. And whole SavedModels: TensorFlow loads one without the index of its variables as one without variables.
    """
    file = os.path.basename(name)
    place_at_the_end = 0
    if file in LAST_FILES:
        place_at_the_end = 1 + LAST_FILES.index(file)
    is_index = name.endswith(".index")
    is_of_a_part = "/variables/" in name or ".input-" in name
    makes_whole = file.startswith("saved_model.pb") or (is_index and not is_of_a_part)
    return place_at_the_end, makes_whole, is_index, name


def lock_of(folder: Path) -> FileLock:
    """Return the lock of a local folder, under which the processes of a host look whether it is up to date, fetch, and
    begin to write there: a fetch removes what is new.
    """
    return FileLock(folder / f"{NOTE_FILE}.lock", is_singleton=True)  # `fetch` takes it again


@contextlib.contextmanager
def sending_in(folder: Path) -> Iterator[None]:
    """Hold a local folder for the process that sends from it, and writes its note. It may outlive its run.

    Raises:
      ConfigError: that of an earlier start does not end. It does as soon as it sees that the lease was taken over.
    """
    if is_sent_from(folder):
        say(f"remote: waiting for the process of an earlier start that still sends from {folder}")
    try:
        held = FileLock(folder / SENDING_LOCK).acquire(timeout=SENDING_SECS)
    except Timeout:
        raise ConfigError(
            f"A process of an earlier start still sends from {folder} after {SENDING_SECS:.0f} s. End that process: "
            "its command line has runner.remote.upload."
        ) from None
    with held:
        yield


def is_sent_from(folder: Path) -> bool:
    """Report whether a process sends from a local folder now: what the bucket has comes from there."""
    lock = FileLock(folder / SENDING_LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False
