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
Fingerprints = Mapping[str, list[Any]]
"""Name of a file in a local folder -> [bytes, time of change in ns], as `fingerprints` returns it."""
# The first of these that a store has is its mark. Google's etag comes after its generation, because the etag also
# changes with an object's metadata.
_MARK_KEYS = ("ETag", "generation", "etag", "created")

# Each host of a cluster has a copy of a checkpoint; the chief's copy is the one that is sent.
_is_file_of_chief = re.compile(r"checkpoint$|runner_files/|model\.ckpt-\d+\.").match
# A worker on another host sends the state of its own input.
_WORKER_INPUT_NAME = re.compile(r"\.input-[1-9]\d*\.")
# Each start of a run or a sweep writes to one of these journals, in its folder or in those of its jobs.
_RECORD_NAME = re.compile(r"checkpoint|run\.json|study\.journal|events\.(chief|supervisor)-0\.jsonl")
_SAVED_MODEL_NAME = re.compile(r"saved_model\.pb(txt)?")
_EXPORT_PATH = re.compile(r"saved_model\.pb|variables/|assets(\.extra)?/|fingerprint\.pb$|keras_metadata\.pb$")
_KEPT_NAME = re.compile(r"config(\..*)?\.yaml|summary(\..*)?\.json|graph\.pbtxt")
_APPENDED_NAME = re.compile(r"events\.(.*\.jsonl|out\.tfevents\..*)|study\.journal")


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
        self.files = {name: _version_from_json(values) for name, values in self.files.items()}

    @classmethod
    def read(cls, folder: Path, url: str = "") -> Note:
        """Return the note in `folder`; an empty one if there is none, or it is about another URL than `url`."""
        note = read_dataclass(cls, folder / NOTE_FILE)
        is_about_it = url in ("", note.url)
        return note if is_about_it else cls(url)

    def save(self, folder: Path) -> None:
        write_json(folder / NOTE_FILE, asdict(self))

    def unsent(self, local_files: Fingerprints) -> dict[str, list[Any]]:
        """Return the fingerprints of those `local_files` that the folder sends and the bucket does not have. The files
        of a checkpoint without an index are left out, because it is being saved.
        """
        changed = self._find_changed(local_files)
        return {name: fingerprint for name, fingerprint in changed.items() if self._has_its_index(name, local_files)}

    def _find_changed(self, local_files: Fingerprints) -> dict[str, list[Any]]:
        """As `unsent`, with the files of checkpoints that are being saved."""
        found = {}
        for name, fingerprint in local_files.items():
            if self._sends(name) and not self.is_unchanged(name, fingerprint):
                found[name] = fingerprint
        return found

    def _has_its_index(self, name: str, local_files: Fingerprints) -> bool:
        """Report whether the index is there that makes a checkpoint of its files. Without it, they are of a save that
        goes on, or that was interrupted. A worker sends only the state of its input, which has an index of its own.
        """
        checkpoint = layout.checkpoint_of(name)
        if checkpoint is None:
            return True
        if self.worker:
            input_state = f".input-{self.worker}"
            stem = name.partition(f"{input_state}.")[0]
            return f"{stem}{input_state}.index" in local_files
        return f"{checkpoint}.index" in local_files

    def is_unchanged(self, name: str, fingerprint: list[Any]) -> bool:
        """Report whether a file is still the one that both sides have.

        Args:
          fingerprint: as `fingerprints` returns it.
        """
        noted = self.files.get(name)
        return noted is not None and [noted.bytes, noted.time] == fingerprint

    def is_of_the_same_size(self, name: str, fingerprint: list[Any]) -> bool:
        """Report whether a file has the size of the one that both sides have. False for a file that is about to be sent
        or fetched: nobody knows which version the other side has.
        """
        noted = self.files.get(name)
        if noted is None or noted.time is None:
            return False
        return bool(noted.bytes == fingerprint[0])

    def _sends(self, name: str) -> bool:
        """Report whether a folder sends files of this name: a worker's those that are not the chief's."""
        if not self.worker:
            return True
        is_own_input = f".input-{self.worker}." in name
        return is_own_input or not _is_file_of_chief(name)

    def own_names(self, local_files: Fingerprints) -> set[str]:
        """Return the names of the files that are this folder's to send: those that have changed, those that it has
        sent, and those that it has removed since. A worker's folder removes none.
        """
        sent = {name for name, noted in self.files.items() if not noted.is_fetched}
        sent |= self.files.keys() - local_files.keys()
        if self.worker:
            sent &= local_files.keys()
        return self._find_changed(local_files).keys() | sent

    def is_behind(self, bucket_objects: Mapping[str, Mapping[str, Any]]) -> bool:
        """Report whether a run was continued elsewhere: the bucket has what only the sender of this folder writes, in a
        version of which this folder does not know.

        Args:
          bucket_objects: name -> what the store says of the object.
        """
        # Only objects in folders of runs count. What a person puts elsewhere, such as a copy of an export, says
        # nothing.
        run_folders = {os.path.dirname(name) for name in (*bucket_objects, *self.files) if is_record(name)}
        for name, info in bucket_objects.items():
            if _is_written_by_sender_only(name, run_folders) and not self.knows(name, info):
                return True
        return False

    def knows(self, name: str, info: Mapping[str, Any]) -> bool:
        """Report whether an object is in a version that this folder has sent, was about to send, or has fetched."""
        noted = self.files.get(name)
        if noted is None:
            return False
        if noted.mark and noted.mark == mark_of(info):
            return True
        # An attempt to send the file may have arrived without an answer, which would have had the new mark. Then only
        # the size shows that the object is from here. A size of None was not known, so any object may be.
        sizes = set(noted.unanswered)
        has_mark = bool(noted.mark) and noted.time is not None
        if not has_mark:
            sizes.add(noted.bytes)
        return None in sizes or info["size"] in sizes


def _version_from_json(values: Iterable[Any]) -> Version:
    """Return what a note holds of a file, from its list in the file.

    Args:
      values: the fields of a `Version`; of earlier versions of the runner, [] for a file about to be sent, [size, time]
        for one that was sent, and [size, time, another mark] for one that was fetched.
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
    for key in _MARK_KEYS:
        if info.get(key):
            # A listing and a look at one object may differ in the quotes.
            return str(info[key]).strip('"')
    return ""


# --- which file is whose ----------------------------------------------------------------------------------------------


def _is_written_by_sender_only(name: str, run_folders: Collection[str]) -> bool:
    """Report whether only the sender of a folder writes files of this name, not a worker on another host or a person.
    These are records, of which each start writes one; checkpoints in a folder with a record; and exports, if no folder
    has a record.

    Args:
      run_folders: folders with records.
    """
    if is_record(name):
        return True
    file = os.path.basename(name)
    checkpoint = layout.checkpoint_of(name)
    if checkpoint is not None:
        return os.path.dirname(checkpoint) in run_folders and not _WORKER_INPUT_NAME.search(file)
    return not run_folders and _SAVED_MODEL_NAME.fullmatch(file) is not None


def is_record(name: str) -> bool:
    """Report whether a file is one that each start of a run writes."""
    return _RECORD_NAME.fullmatch(os.path.basename(name)) is not None


def is_never_deleted(name: str) -> bool:
    """Report whether a file is one that no run deletes, however old it is."""
    return is_only_appended(name) or _KEPT_NAME.fullmatch(os.path.basename(name)) is not None


def is_only_appended(name: str) -> bool:
    """Report whether a file is only appended to."""
    return _APPENDED_NAME.fullmatch(os.path.basename(name)) is not None


def expired_in(folder: Path, names: Iterable[str]) -> set[str]:
    """Return those of `names` that belong to checkpoints that have expired: the state file, which is written before
    their files are deleted, no longer names them.

    Args:
      folder: the local folder, which need not have the files.
    """
    expired = set()
    names_in_state: dict[str, tuple[str, ...]] = {}
    for name in names:
        checkpoint = layout.checkpoint_of(name)
        if checkpoint is None:
            continue
        parent, checkpoint_name = os.path.split(checkpoint)
        if parent not in names_in_state:
            names_in_state[parent] = layout.read_state(folder / parent).names
        # Without a state file, which has no names then, nobody knows whether the checkpoint has expired.
        if names_in_state[parent] and checkpoint_name not in names_in_state[parent]:
            expired.add(name)
    return expired


def deleted_by_the_run(folder: Path, missing: Collection[str], local_files: Collection[str]) -> set[str]:
    """Return those of the `missing` files that a run has deleted in `folder`, so that they go from the bucket, too.

    What somebody else deletes is still in the bucket at the next start, which fetches it. So the files of a checkpoint
    count only when the state file no longer names it. And nothing counts in a folder that is being emptied: one of its
    records is gone, or everything is.

    Args:
      local_files: the names of the files that `folder` has.
    """
    if not local_files:
        return set()
    emptied_folders = {os.path.dirname(name) for name in missing if is_record(name)}
    expired = expired_in(folder, missing)
    deleted = set()
    for name in missing:
        # A run deletes the results of evaluations when it saves the step again.
        is_part = layout.checkpoint_of(name) is not None and not name.endswith(manifest.METRICS)
        is_kept = is_part and name not in expired
        if not is_kept and not is_never_deleted(name) and not is_below(name, emptied_folders):
            deleted.add(name)
    return deleted


def exports_in(names: Iterable[str]) -> set[str]:
    """Return the folders of the SavedModels among files of these names."""
    return {os.path.dirname(name) for name in names if _SAVED_MODEL_NAME.fullmatch(os.path.basename(name))}


def is_in_export(name: str, exports: Iterable[str]) -> bool:
    """Report whether a file is a part of a SavedModel in one of the folders `exports`."""
    for export in exports:
        inside = name.removeprefix(f"{export}/")
        is_inside = not export or inside != name
        if is_inside and _EXPORT_PATH.match(inside):
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
    """Return the key by which names are sorted, so that whoever reads the bucket at any time sees whole checkpoints and
    SavedModels.

    An index comes after the data. The index of a checkpoint comes after the indexes of its input states, because it
    makes a checkpoint of the files. saved_model.pb comes after the index of its variables, without which TensorFlow
    loads a SavedModel without variables. LAST_FILES come after all others.

    Returns:
      (0, or the place among LAST_FILES from 1; whether the file makes its checkpoint or SavedModel whole; whether it is
      an index; the name).
    """
    file = os.path.basename(name)
    place_at_the_end = 0
    if file in LAST_FILES:
        place_at_the_end = 1 + LAST_FILES.index(file)
    is_index = name.endswith(".index")
    is_of_a_part = "/variables/" in name or ".input-" in name
    makes_whole = file.startswith("saved_model.pb") or (is_index and not is_of_a_part)
    return place_at_the_end, makes_whole, is_index, name


def folder_lock(folder: Path) -> FileLock:
    """Return the lock of a local folder, under which the processes of a host look whether it is up to date, fetch, and
    begin to write there: a fetch would remove what another process has begun to write.
    """
    # A singleton, which its holder may take again: `fetch` does inside `update`.
    return FileLock(folder / f"{NOTE_FILE}.lock", is_singleton=True)


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
