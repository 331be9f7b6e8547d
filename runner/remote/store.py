"""The place of a run in an object store: its lease, and what a start fetches.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from runner.checkpoint_files import layout, manifest
from runner.config.mistakes import ConfigError, NotAllowed, NotFound
from runner.remote.note import (
    Fingerprints,
    Note,
    Version,
    expired_in,
    exports_in,
    fingerprint,
    fingerprints,
    folder_lock,
    is_in_export,
    is_only_appended,
    is_sent,
    mark_of,
    upload_order,
)
from runner.system.files import StorageError, find_runner_file
from runner.system.standard_streams import say
from runner.system.urls import STORES
from runner.tracking.tracker import describe

LEASES = ".lease"
UNSENT = ".unsent"
# In LEASES of a cluster of several hosts, in the bucket and on each host: the chief's message, and the others' answers.
CALL_FILE = "generation.json"
PEERS_FOLDER = "peers"
_ATTEMPTS = 5
# Only the runner's own small files are checked, since a user's file with such a suffix may have another form.
_SMALL_FILES_OF_OURS = re.compile(r"(run|sweep|summary(\..*)?|shipped\..*|model\.ckpt-.*)\.json|config(\..*)?\.yaml")
_T = TypeVar("_T")
Objects = dict[str, Mapping[str, Any]]
"""Name -> what a store says of the object."""
logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # each error, with its traceback; they are raised, too


class LeaseLostError(StorageError):
    """Another run has taken over the lease on the URL."""


@contextlib.contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn an error of a store inside this context into a message about `what`. Without its bucket no run starts: only
    the bucket says whether another run is writing, and whether the local folder is the newest.

    Raises:
      ConfigError: the store cannot be reached.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be reached: {describe(error)}") from error


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
            package = STORES[scheme]
            raise NotFound(
                f"{url}: {package} is not installed ({error}). Install it: pip install 'estimator-runner[{scheme}]'"
            ) from error
        self.url = url
        self.what = f"{key}{url}"
        self.fs = DirFileSystem(root, fs)

    def objects(self) -> Objects:
        """Return name -> what the store says of each object that a folder could have sent."""
        found = {}
        for name, info in self.fs.find("", detail=True).items():
            if info["type"] == "file" and all(map(is_sent, name.split("/"))):
                found[name] = info
        return found

    def leased_urls(self) -> list[str]:
        """Return the URLs below this one that have leases of their own."""
        inside = set()
        for name in self.fs.find(""):
            place, leases, _ = name.partition(f"/{LEASES}/")
            if leases:
                inside.add(place)
        return [f"{self.url}/{place}" for place in sorted(inside)]

    # --- the lease ------------------------------------------------------------------------------------------------

    def highest(self) -> int:
        """Return the number of the lease that holds; 0: there is none."""
        # Only this folder (maxdepth): each host asks this before each write, and a cluster has further files below.
        names = [path.rpartition("/")[2] for path in self.fs.find(LEASES, maxdepth=1)]
        numbers = [int(name) for name in names if name.isdigit()]
        return max(numbers, default=0)

    def lease(self, number: int) -> dict[str, Any]:
        """Return who holds the lease `number`; {} if there is no such lease."""
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads(self.fs.cat_file(_object_of(number))))
        return {}

    def is_held_on_this_host(self, note: Note) -> bool:
        """Report whether a process that lives on this host holds the lease for the folder with this note."""
        holder = self.lease(self.highest())
        is_for_this_folder = bool(note.folder) and holder.get("folder") == note.folder
        if not is_for_this_folder or holder.get("is_over"):
            return False
        return _is_of_this_kernel(holder) and not _is_dead(holder)

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
        """Report whether the bucket has nothing from elsewhere: `folder` was the last to write there, or nobody has,
        and the objects are those that it has written. It may still have lost files that the bucket has.

        Args:
          folder: the local folder.
          number: that of the last writer's lease; None: the highest.
        """
        return self._current_objects(folder, number) is not None

    def _current_objects(self, folder: Path, number: int | None) -> Objects | None:
        """Return what the bucket has, if `folder` is current; else None."""
        if number is None:
            number = self.highest()
        note = Note.read(folder, self.url)
        if not self.was_last_written_by(note, number):
            return None
        bucket_objects = self.objects()
        # Read again after the listing, since another process may have sent more meanwhile. The identity of the folder
        # is not enough: a backup or a snapshot of a machine brings it back with an older state. So the objects must be
        # those that the folder has written.
        note = Note.read(folder, self.url)
        is_new = not note.folder and bool(bucket_objects)
        if is_new or note.is_behind(bucket_objects) or self._has_an_older_state(folder, note, bucket_objects):
            return None
        return bucket_objects

    def _has_an_older_state(self, folder: Path, note: Note, bucket_objects: Objects) -> bool:
        """Report whether a state file in `folder` was put back from a backup, but not the note: it has changed since it
        was sent, and its latest checkpoint is older than the latest of the state file in the bucket.
        """
        local_files = fingerprints(folder)
        for name in note.files.keys() & bucket_objects.keys() & local_files.keys():
            is_state = os.path.basename(name) == layout.STATE_FILE
            if not is_state or note.is_unchanged(name, local_files[name]):
                continue
            local_state = layout.parse_state((folder / name).read_bytes())
            bucket_state = layout.parse_state(self.fs.cat_file(name))
            if local_state is not None and bucket_state is not None and _is_older(local_state, bucket_state):
                return True
        return False

    def was_last_written_by(self, note: Note, number: int) -> bool:
        """Report whether the lease `number` was that of the folder with this note, or there was none."""
        if not number:
            return True
        return bool(note.folder) and self.lease(number).get("folder") == note.folder

    def update(self, folder: Path, number: int | None = None, *, is_thorough: bool = False) -> None:
        """Bring `folder` to what the bucket has, before anything of it is used. If a run was continued elsewhere, fetch
        everything. Else fetch what this folder has lost, and keep what it has not sent.

        Args:
          folder: the local folder.
          number: as in `is_current`.
          is_thorough: also read the newest checkpoint to see whether it is damaged.
        """
        with folder_lock(folder):
            _repeat_while_it_changes(lambda: self._update(folder, number, is_thorough=is_thorough))

    def _update(self, folder: Path, number: int | None, *, is_thorough: bool) -> None:
        """Do what `update` says, once. The note in `folder` then knows of everything that was fetched."""
        # The listing comes before the note is read: the note then knows of all that is listed, also of what another
        # process sends meanwhile.
        bucket_objects = self._current_objects(folder, number)
        if bucket_objects is None:
            bucket_objects = self.fetch(folder)
        note = Note.read(folder, self.url)
        # Objects that were removed from the bucket by hand are forgotten, so that their files are sent again.
        note.files = {name: noted for name, noted in note.files.items() if name in bucket_objects}
        # The state files first: they say which of the missing checkpoints have expired.
        states = {name: info for name, info in bucket_objects.items() if _is_last_file(name)}
        self._repair(folder, note, states, set())
        self._note_times(folder, note)
        newest_checkpoints = set[str]()
        if is_thorough:
            newest_checkpoints = {os.path.basename(path) for path in layout.candidates_in(folder)[:1]}
        self._repair(folder, note, bucket_objects, newest_checkpoints)
        if is_thorough:
            # State files that name a checkpoint which was given up are replaced by the bucket's, which name the one
            # before.
            outdated = give_up_damaged(folder, note) & bucket_objects.keys()
            if outdated:
                staged = self._fetch_aside(folder, outdated)
                marks = {name: mark_of(bucket_objects[name]) for name in outdated}
                self._move_into_place(folder, note, marks, staged)
        for name, noted in note.files.items():
            is_another_mark = noted.mark not in ("", mark_of(bucket_objects[name]))
            # The object is not the one that was answered: an earlier attempt arrived after it. Send the file again.
            if noted.time is not None and is_another_mark:
                note.files[name] = noted._replace(time=None)
        # What is still missing here was deleted by the run, which ended before it could remove it from the bucket.
        note.gone = sorted(note.files.keys() - fingerprints(folder).keys())
        note.lost = []
        note.save(folder)

    def _repair(self, folder: Path, note: Note, bucket_objects: Objects, suspect_checkpoints: Collection[str]) -> None:
        """Fetch singly what `folder` has lost, what is damaged in it, and what others have changed in the bucket.

        Args:
          bucket_objects: name -> what the store says, of the objects to look at.
          suspect_checkpoints: names of checkpoints in `folder` that are read, also if they seem unchanged.
        """
        local_files = fingerprints(folder)
        noted_names = note.files.keys() & bucket_objects.keys()
        damaged = find_damaged(folder, note, local_files, noted_names, suspect_checkpoints) & noted_names
        lost = noted_names - local_files.keys()
        expired = expired_in(folder, lost) | lost.intersection(note.gone)
        expired -= set(note.lost)
        # Files that both sides have and that were never sent or fetched here, such as one put into the bucket by hand.
        # Those of a checkpoint are left alone: only workers on other hosts send them, for another save of the step.
        both_have = (bucket_objects.keys() & local_files.keys()) - noted_names
        unknown = {name for name in both_have if layout.checkpoint_of(name) is None}
        changed = {name for name in noted_names | unknown if not note.knows(name, bucket_objects[name])}
        names_to_fetch = damaged | changed | (lost - expired)
        if not names_to_fetch:
            return
        say(f"remote: {len(names_to_fetch)} files of {folder} are missing, damaged or older; they come from {self.url}")
        unsent = note.unsent(local_files)
        staging = self._fetch_aside(folder, names_to_fetch)
        # Keep local changes that are replaced, since somebody may want them; but nobody wants a damaged checkpoint.
        replaced_names = names_to_fetch & unsent.keys()
        set_aside(folder, [name for name in replaced_names if layout.checkpoint_of(name) is None])
        marks = {name: mark_of(bucket_objects[name]) for name in names_to_fetch}
        self._move_into_place(folder, note, marks, staging)

    def _note_times(self, folder: Path, note: Note) -> None:
        """Note the times of checkpoint files whose time has changed but not their contents, as after a copy of the
        folder. Otherwise they would be sent again, and the bucket would be without its newest checkpoint meanwhile.
        """
        local_files = fingerprints(folder)
        touched = set()
        for name in note.files.keys() & local_files.keys():
            is_changed = not note.is_unchanged(name, local_files[name])
            if is_changed and note.is_of_the_same_size(name, local_files[name]):
                touched.add(name)
        for checkpoint in _checkpoints_of(touched):
            if self._is_same_save_as_in_bucket(folder, checkpoint, note):
                for name in _checkpoint_files(checkpoint, touched):
                    _, time_of_change = local_files[name]
                    note.files[name] = note.files[name]._replace(time=time_of_change)

    def _is_same_save_as_in_bucket(self, folder: Path, checkpoint: str, note: Note) -> bool:
        """Report whether a checkpoint in `folder` is undamaged, and was saved when that of the bucket was."""
        file = find_runner_file(folder / f"{checkpoint}{manifest.MANIFEST}")
        name = os.path.relpath(file, folder)
        if name not in note.files or not file.exists():
            return False
        # The manifest has the time of the save and the checksums of all files. The files are read only if the manifest
        # is the same as in the bucket.
        is_same_save = self.fs.cat_file(name) == file.read_bytes()
        return is_same_save and manifest.what_is_wrong(folder / checkpoint) is None

    def fetch(self, folder: Path, replaceable: Collection[str] | None = None) -> Objects:
        """Bring `folder` to the state of the bucket, with whole checkpoints, also while another host is writing there.
        Return what the bucket had.

        What the bucket does not have is removed: it belongs to a run that was continued elsewhere. What was not sent of
        that is moved into UNSENT.

        Args:
          folder: the local folder.
          replaceable: names of files that the folder sends and that are nevertheless replaced by those of the bucket;
            the others that it sends stay as they are. None: the folder no longer sends any, so all are replaced.
        """
        with folder_lock(folder):
            return _repeat_while_it_changes(lambda: self._fetch(folder, replaceable))

    def _fetch(self, folder: Path, replaceable: Collection[str] | None) -> Objects:
        """Do what `fetch` says, once. `kept_names` are the files of which the local version stays."""
        note = Note.read(folder, self.url)
        local_files = fingerprints(folder)
        first_listing = self.objects()
        kept_names = set[str]()
        if replaceable is not None:
            kept_names = note.own_names(local_files) - {*replaceable}
        else:
            self._give_up_unsent(folder, note, local_files, first_listing)
            note.folder = ""  # no longer up to date
            note.gone = []
            note.lost = []
            note.save(folder)

        # Take LAST_FILES (such as the state files) from the first listing and read them before the second one, from
        # which the other files are taken: these are then at least as new. A state file that is unchanged is not
        # written, since a task here may be writing the next.
        bucket_objects = {name: info for name, info in first_listing.items() if _is_last_file(name)}
        states = bucket_objects.keys() - kept_names
        changed_states = _find_other_versions(states, bucket_objects, note, local_files)
        state_contents = {name: self.fs.cat_file(name) for name in changed_states}
        # Checkpoints that had expired and were deleted here are fetched again if the state files to be fetched name
        # them.
        kept_names -= _files_of_named_checkpoints(state_contents, kept_names - local_files.keys())
        second_listing = self.objects()
        bucket_objects |= {name: info for name, info in second_listing.items() if not _is_last_file(name)}
        others = bucket_objects.keys() - changed_states - kept_names
        changed_others = _find_other_versions(others, bucket_objects, note, local_files)
        staging = self._fetch_aside(folder, changed_others, state_contents)

        marks = {name: mark_of(info) for name, info in bucket_objects.items() if name not in kept_names}
        names_to_remove = local_files.keys() - marks.keys() - kept_names
        for name in sorted(names_to_remove, key=upload_order, reverse=True):  # the state files and indexes first
            (folder / name).unlink(missing_ok=True)
        files = {name: noted for name, noted in note.files.items() if name in kept_names}
        for name in note.files.keys() & marks.keys():
            # Also noted for what this folder has sent itself: from here on, another folder may send it.
            files[name] = note.files[name]._replace(is_fetched=True)
        note.files = files
        changed = changed_states | changed_others
        self._move_into_place(folder, note, {name: marks[name] for name in changed}, staging)
        return bucket_objects

    def _give_up_unsent(self, folder: Path, note: Note, local_files: Fingerprints, bucket_objects: Objects) -> None:
        """Move what was not sent of a folder that is no longer up to date into UNSENT."""
        unsent = []
        has_no_note = not note.folder and not note.worker and not note.files
        for name in note.unsent(local_files):
            size = local_files[name][0]
            noted = note.files.get(name, Version(None, None))
            is_half_fetched = noted.is_fetched and noted.time is None and noted.bytes == size
            # Nobody knows what a folder that has lost its note has sent. A file of the same size counts as sent.
            seems_sent = has_no_note and name in bucket_objects and bucket_objects[name]["size"] == size
            if not is_half_fetched and not seems_sent:
                unsent.append(name)
        if unsent:
            what = f"another has written to {self.url} since {folder} did"
            say(f"remote: {what}; its {len(unsent)} unsent files: {folder / UNSENT}")
        set_aside(folder, unsent)

    def _fetch_aside(self, folder: Path, names: Collection[str], contents: Mapping[str, bytes] = {}) -> Path:
        """Fetch objects into a folder beside the files of `folder`, and return its path.

        Args:
          contents: name -> what was read of further objects already.
        """
        staging = folder / ".fetching"
        shutil.rmtree(staging, ignore_errors=True)
        sorted_names = sorted(names)
        if sorted_names:
            staged_paths = [str(staging / name) for name in sorted_names]
            self.fs.get(sorted_names, staged_paths)  # one call: the library asks for them side by side
        for name, data in contents.items():
            target = staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return staging

    def _move_into_place(self, folder: Path, note: Note, marks: Mapping[str, str], staging: Path) -> None:
        """Move files that `_fetch_aside` fetched to their places, so that there are whole checkpoints at any time, and
        note them.

        Args:
          marks: name -> mark of each.
        """
        for name, mark in marks.items():
            # Noted as fetched before they are moved, so that what an interrupted fetch leaves does not count as a file
            # that was made here and is to be sent. The time None says that the fetch is not complete.
            size = (staging / name).stat().st_size
            note.files[name] = Version(size, None, mark, is_fetched=True)
        note.save(folder)
        for name in sorted(marks, key=upload_order, reverse=True):
            if name.endswith(".index"):
                (folder / name).unlink(missing_ok=True)  # it is no checkpoint while its files are replaced
        for name in sorted(marks, key=upload_order):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target)
            size, time_of_change = fingerprint(target)
            note.files[name] = Version(size, time_of_change, marks[name], is_fetched=True)
        note.save(folder)
        shutil.rmtree(staging, ignore_errors=True)


def _is_last_file(name: str) -> bool:
    """Report whether an object is one of LAST_FILES."""
    place_at_the_end, *_ = upload_order(name)
    return place_at_the_end > 0


def _files_of_named_checkpoints(states: Mapping[str, bytes], names: Iterable[str]) -> set[str]:
    """Return those of `names` that are files of the checkpoints which state files name.

    Args:
      states: name of a state file or another file -> its contents; the others are skipped.
    """
    checkpoints = set[str]()
    for name, contents in states.items():
        is_state = os.path.basename(name) == layout.STATE_FILE
        state = layout.parse_state(contents)
        if is_state and state is not None:
            for checkpoint in state.names:
                checkpoints.add(os.path.join(os.path.dirname(name), checkpoint))
    return {name for name in names if layout.checkpoint_of(name) in checkpoints}


def _repeat_while_it_changes(act: Callable[[], _T]) -> _T:
    """Return what `act` returns. Call it again if it finds that an object is gone: a checkpoint has expired meanwhile,
    and the next listing and state file are without it.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):
            return act()
    return act()


def _find_other_versions(
    names: Iterable[str], bucket_objects: Objects, note: Note, local_files: Fingerprints
) -> set[str]:
    """Return those of `names` that the bucket has in another version than the folder."""
    found = set()
    for name in names:
        noted = note.files.get(name)
        mark = mark_of(bucket_objects[name])
        is_version_of_folder = noted is not None and bool(mark) and noted.mark == mark
        if not is_version_of_folder or not note.is_unchanged(name, local_files.get(name, [])):
            found.add(name)
    return found


def set_aside(folder: Path, names: Collection[str]) -> None:
    """Move files that were not sent into UNSENT, in an order in which there are only whole checkpoints at any time."""
    for name in sorted(names, key=upload_order, reverse=True):
        target = folder / UNSENT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, target)


def find_damaged(
    folder: Path, note: Note, local_files: Fingerprints, names: Collection[str], suspect_checkpoints: Collection[str]
) -> set[str]:
    """Return the names of files that were damaged since both sides had them; of a checkpoint, those of all its files.

    Args:
      folder: the local folder.
      local_files: as `fingerprints` returns them.
      names: the files to look at.
      suspect_checkpoints: as in `Store._repair`.
    """
    damaged = set()
    checkpoints = {*suspect_checkpoints}
    exports = exports_in(note.files)
    for name in local_files.keys() & set(names):
        if note.is_unchanged(name, local_files[name]):
            continue
        checkpoint = layout.checkpoint_of(name)
        if checkpoint is not None:
            checkpoints.add(checkpoint)
        if is_in_export(name, exports):  # an export is never written to again
            damaged.add(name)
            continue
        size, _ = local_files[name]
        if _is_damaged(folder / name, note.files[name], size):
            damaged.add(name)
    for checkpoint in checkpoints:
        is_whole_in_bucket = f"{checkpoint}.index" in note.files
        if is_whole_in_bucket and manifest.what_is_wrong(folder / checkpoint) is not None:
            damaged |= _checkpoint_files(checkpoint, note.files.keys() | local_files.keys())
    return damaged


def give_up_damaged(folder: Path, note: Note) -> set[str]:
    """Move checkpoints that were not sent and are damaged into UNSENT, since nothing can continue from them, and say
    so. Return the names of the state files that name one of them as the latest.
    """
    outdated_states = set()
    unsent = note.unsent(fingerprints(folder))
    for checkpoint in _checkpoints_of(unsent):
        path = folder / checkpoint
        damage = manifest.what_is_wrong(path)
        if damage is None:
            continue
        say(f"remote: {path} was not sent and is damaged ({damage}); its files: {folder / UNSENT}")
        set_aside(folder, _checkpoint_files(checkpoint, unsent))
        if layout.read_state(path.parent).latest == path.name:
            outdated_states.add(os.path.relpath(path.parent / layout.STATE_FILE, folder))
    return outdated_states


def _is_older(local_state: layout.State, bucket_state: layout.State) -> bool:
    """Report whether a state file names an older checkpoint as the latest than another one."""
    local_step = layout.step_of(local_state.latest or "")
    bucket_step = layout.step_of(bucket_state.latest or "")
    if local_step is None or bucket_step is None:
        return False
    # After a rollback here, the latest is older, too, but the state file still names the later checkpoint.
    return local_step < bucket_step and bucket_state.latest not in local_state.names


def _checkpoints_of(names: Iterable[str]) -> set[str]:
    """Return the checkpoints of which files are among `names`."""
    checkpoints = map(layout.checkpoint_of, names)
    return {checkpoint for checkpoint in checkpoints if checkpoint is not None}


def _checkpoint_files(checkpoint: str, names: Iterable[str]) -> set[str]:
    """Return those of `names` that are files of a checkpoint, without the results of its evaluations."""
    files = {name for name in names if layout.checkpoint_of(name) == checkpoint}
    return {name for name in files if not name.endswith(manifest.METRICS)}


def _is_damaged(path: Path, noted: Version, size: int) -> bool:
    """Report whether a file that has changed since both sides had it seems to be damaged rather than a newer version:
    it was fetched in part, should only grow but has not, or cannot be read.

    Args:
      size: its bytes.
    """
    is_half_fetched = noted.is_fetched and noted.time is None
    was_sent = noted.bytes is not None and noted.time is not None
    has_nothing_new = was_sent and is_only_appended(path.name) and size <= (noted.bytes or 0)
    return is_half_fetched or has_nothing_new or not _can_be_read(path)


def _can_be_read(path: Path) -> bool:
    """Report whether a small file of the runner is whole as far as its format shows."""
    is_state = path.name == layout.STATE_FILE
    if not is_state and not _SMALL_FILES_OF_OURS.fullmatch(path.name):
        return True
    has_lines = is_state or path.suffix == ".yaml"
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            json.loads(data)
    except (OSError, ValueError):
        return False
    is_cut = has_lines and not data.endswith(b"\n")
    return not is_cut and (not is_state or layout.parse_state(data) is not None)


class Lease:
    """The right to write below a URL.

    Attributes:
      number: the number of its object.
      facts: who holds it, as in its object; `folder` identifies the folder of its holder.
      lost: why this run no longer may write; '' while it may.
    """

    def __init__(self, store: Store, number: int, facts: Mapping[str, Any] = {}) -> None:
        self.store = store
        self.number = number
        self.facts = dict(facts)
        self.lost = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")

    @classmethod
    def take(cls, store: Store, folder: str, secs: float) -> Lease:
        """Create the next lease on the URL of `store`, and renew it in a thread of this process until `end`.

        Args:
          folder: identifies the local folder, as in `Note`.
          secs: another may take the URL over when this lease was not renewed for so long.

        Raises:
          ConfigError: another run holds it, or the store cannot say who was first.
        """
        highest = store.highest()
        last_holder = store.lease(highest)
        if last_holder and not last_holder.get("is_over") and not _is_dead(last_holder):
            secs_left = float(last_holder["secs"]) - store.age(_object_of(highest))
            if secs_left >= 0:
                advice = f" It can be taken over in {secs_left + 1:.0f} s."
                raise ConfigError(_describe_holder(store.what, last_holder, advice))
        number = highest + 1
        facts = {"folder": folder, "secs": secs, "time": time.time(), **_this_process()}
        data = json.dumps(facts).encode()
        for _ in range(2):  # the second attempt shows whether the store refuses an object that there is
            try:
                store.fs.pipe_file(_object_of(number), data, mode="create")
            except FileExistsError:
                holder = store.lease(number)
                if holder != facts:  # another start was faster
                    raise ConfigError(_describe_holder(store.what, holder)) from None
                lease = cls(store, number, facts)  # also if an answer was lost, and the library tried again
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
            holder = self.store.lease(number)
            self.lost = _describe_holder(self.store.what, holder, " This run no longer writes there.")
            raise LeaseLostError(self.lost)

    def keep(self) -> None:
        """Renew the lease in a thread of this process until `end`. The process that sends renews it, too: it works
        until the last file is sent, and s3fs in a script no longer finds a host by name at `atexit`.
        """
        self._thread.start()

    def _renew(self) -> None:
        while not self.facts.get("is_over"):
            self.facts["is_over"] = self._ended.wait(self.facts["secs"] / 4)
            with contextlib.suppress(Exception):  # the store is away: the lease grows older; or `lost` says why
                self.check()
                self.store.fs.pipe_file(_object_of(self.number), json.dumps(self.facts).encode())

    def end(self) -> None:
        """Let others take the lease: at once, or when it expires if the store does not answer soon."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5)


def _object_of(number: int) -> str:
    """Return the name of the object that is the lease `number`."""
    return f"{LEASES}/{number:08d}"


def _this_process() -> dict[str, Any]:
    """Return what identifies this process: host, the start of its kernel, its container's processes, and itself."""
    boot = ""
    with contextlib.suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
        boot = f"{kernel} {container}"
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "ticks": _ticks_at_start(pid)}


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Report whether a holder was a process of this host that has ended."""
    if not _is_of_this_kernel(holder):
        return False
    return bool(_ticks_at_start(int(holder["pid"])) != holder["ticks"])


def _is_of_this_kernel(holder: Mapping[str, Any]) -> bool:
    """Report whether a holder is or was a process of this host, of which one can say whether it lives."""
    is_known = bool(holder["boot"]) and "ticks" in holder  # not in the leases of earlier versions
    return is_known and holder["boot"] == _this_process()["boot"]


def _ticks_at_start(pid: int) -> int | None:
    """Return when a process began, in ticks since its kernel did; None: there is no such process.

    psutil 7.2 says it by the clock, which may be set meanwhile: a process that lives would seem to be another.
    """
    with contextlib.suppress(OSError):
        # The name of its program, the second field, may have spaces and brackets.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(after_name[19])  # starttime, the 22nd of all
    return None


def _describe_holder(what: str, holder: Mapping[str, Any], end: str = "") -> str:
    began = time.localtime(float(holder.get("time", 0)))
    since = time.strftime("%Y-%m-%d %H:%M:%S", began)
    who = f"on {holder.get('host')} (process {holder.get('pid')}), since {since}"
    return f"{what} is in use by another run {who}.{end or ' Wait for it, or choose another.'}"
