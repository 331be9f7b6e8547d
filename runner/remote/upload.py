"""Send what is new in the local folder of a run to its bucket: `python -m runner.remote.upload <folder>`.

Who starts a run with a URL starts one such process (`runner.remote.mirror`), which follows the folder. It may be ended
at any time, and started again by anyone: the note in the folder says what the bucket has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.checkpoint_files import layout, manifest
from runner.checkpoint_files.layout import STATE_FILE
from runner.config.schema import ConfigError, RunSettings
from runner.distribute.cluster import ALONE, Cluster
from runner.remote.note import (
    Note,
    Version,
    deleted_by_the_run,
    fingerprint,
    fingerprints,
    mark_of,
    sending_in,
    upload_order,
)
from runner.remote.store import CALL_FILE, LEASES, PEERS_FOLDER, Lease, LeaseLostError, Store, reaching
from runner.system.exit_codes import FINISHED, USER_ERROR
from runner.system.files import FolderLostError, HeldFolder, find_runner_file, write_atomically
from runner.system.standard_streams import keep_saying, say
from runner.tracking.shipping import NOT_ALL, heed_starter
from runner.tracking.tracker import describe

MODULE = "runner.remote.upload"
MAX_ATTEMPTS = 50
"""Number of attempts to send one file whose sizes are remembered."""
SENDING = ".sending"
"""Folder in the local folder with the links and copies that are being sent."""
PERIOD_SECS = 3.0
"""Seconds between two looks into the folder."""
RETRY_SECS = 1.0
"""Seconds until what has failed is tried again, and between two looks for messages of other hosts."""
GLANCE_SECS = 0.2
"""Seconds between two looks while somebody waits for the end."""
StateFiles = Mapping[str, tuple[list[Any], bytes]]
"""Name of a state file -> its fingerprint and its contents, as they were read."""


class Uploader:
    """Sends the files of a folder, and notes which it has sent.

    In a cluster of several hosts, each has a folder and an uploader. The chief's sends the checkpoints, when they have
    the input states of all workers, and fetches what the others send.

    Args:
      folder: the local folder.
      lease: the lease on its URL; a worker's has the number 0, and says its place, until the chief calls.

    Attributes:
      held: names of files that wait for an input state of a worker on another host.
      damaged: names of files of damaged checkpoints, which are not sent.
    """

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder = folder
        self.lease = lease
        self._store = lease.store
        self._note = Note.read(folder, self._store.url)
        self._existing = HeldFolder(folder)
        self.held = set[str]()
        self.damaged = set[str]()
        self.is_chief = not self._note.worker
        self._verified: dict[str, tuple[Any, str | None]] = {}

    @property
    def has_others(self) -> bool:
        """Whether other hosts send, too."""
        return not self.is_chief or (self.folder / LEASES / CALL_FILE).exists()

    def fetch(self, replaceable: Collection[str] | None = ()) -> None:
        """Fetch what other hosts have sent, as in `Store.fetch`."""
        self._store.fetch(self.folder, replaceable)
        self._note = Note.read(self.folder, self._store.url)

    def send(self, before_each: Callable[[], None] = lambda: None) -> bool:
        """Send what has changed since the last call, and remove what is gone. Return whether that is all.

        The state files are read first, and written last. What they name is then in the folder, and is kept by links
        until it is sent: training may delete a checkpoint meanwhile. Other files may grow meanwhile, and are copied:
        gcsfs 2026.10 cannot send a file of 5 MB that grows.

        Args:
          before_each: called before each file is sent.

        Raises:
          LeaseLostError: another run has taken over.
          FolderLostError: the folder was deleted; nothing is removed from the bucket for that.
          OSError, and errors of the store: something is left; the next call sends it.
        """
        self._existing.check()
        # Before the first look into the store, which may be away: if this process is killed meanwhile, the next start
        # then knows what has expired.
        gone = self._note_deletions()
        if self.is_chief and self.has_others:
            self.lease.check()
            self.fetch()
        state_files = self._read_states()
        unsent = self._note.unsent(fingerprints(self.folder))
        unverified = self._verify(unsent)  # of checkpoints that are damaged, or changing now
        copies_folder = self._copy(unsent.keys() - state_files.keys() - unverified)
        unverified |= self._find_replaced(unsent)  # after copying: a copy may have parts of two versions
        self.held = {name for name in unsent if self._waits_for_an_input(name)}
        # A state file waits for the checkpoint that it names as the latest.
        if self.held:
            self.held.add(STATE_FILE)
        waiting = self.held | self._find_early_states(unverified, state_files)
        # A state file is sent as it was read, so it cannot vanish.
        vanished = {name for name in unsent.keys() - state_files.keys() if not self._choose_source(name).exists()}
        names_to_send = sorted(unsent.keys() - vanished - waiting - unverified, key=upload_order)
        replaced = [name for name in names_to_send if name in self._note.files]
        self._note_attempts(names_to_send, state_files)
        # A checkpoint of which files are replaced in the bucket is none until all are there, so its index goes first.
        for name in reversed(replaced):
            if name.endswith(".index"):
                self._delete(name)
        for name in names_to_send:
            before_each()
            self._send_file(name, unsent[name], state_files)
        self._existing.check()
        if not waiting:
            self._remove(gone - unsent.keys())  # not of a step that was saved again meanwhile
        self._note.save(self.folder)
        shutil.rmtree(copies_folder, ignore_errors=True)
        is_changing = bool(unverified - self.damaged)
        if names_to_send or is_changing:  # another look shows whether more has changed meanwhile
            return False
        # Files that wait are not for this process to complete. While there are any, nothing is removed either.
        return bool(waiting) or not self._note.gone

    def _remove(self, names: Collection[str]) -> None:
        """Remove files from the bucket, those of the newest checkpoint first."""
        for name in sorted(names, key=upload_order, reverse=True):
            self._delete(name)
            del self._note.files[name]
            self._note.gone.remove(name)

    def _note_deletions(self) -> set[str]:
        """Note which files the run has deleted. Return those that had been deleted at the last look already, which may
        be removed from the bucket: one look may come while somebody is deleting the whole folder.
        """
        note = self._note
        missing = {name for name in note.files if not os.path.lexists(self.folder / name)}
        if not self.is_chief:  # only the chief removes files from the bucket
            note.files = {name: noted for name, noted in note.files.items() if name not in missing}
            return set()
        before = set(note.gone)
        gone = set[str]()
        if missing:  # else it need not walk the folder, every few seconds
            gone = deleted_by_the_run(self.folder, missing, fingerprints(self.folder)) - set(note.lost)
        lost = missing - gone
        if gone != before or lost != set(note.lost):
            note.gone = sorted(gone)
            note.lost = sorted(lost)
            note.save(self.folder)
        return gone & before

    def _read_states(self) -> dict[str, tuple[list[Any], bytes]]:
        """Return name -> (fingerprint, contents) of each of LAST_FILES, in the reverse order of sending: a file that
        names others is read before them.
        """
        names = [name for name in fingerprints(self.folder) if upload_order(name)[0]]
        state_files = {}
        for name in sorted(names, key=upload_order, reverse=True):
            path = self.folder / name
            state_files[name] = (fingerprint(path), path.read_bytes())
        return state_files

    def _verify(self, unsent: Collection[str]) -> set[str]:
        """Return those of the files to send that belong to checkpoints which are damaged, or are changing now. Say
        which are damaged, and set `damaged`. A checkpoint is read once, and again when one of its files has changed.
        """
        # The results of its evaluations are no part of a checkpoint.
        parts = (name for name in unsent if not name.endswith(manifest.METRICS))
        suspect = {checkpoint for checkpoint in map(layout.checkpoint_of, parts) if checkpoint is not None}
        before = self._verified
        self._verified = {}
        damaged = set[str]()
        for checkpoint in sorted(suspect):
            path = self.folder / checkpoint
            found = manifest.fingerprint(path)
            known, damage = before.get(checkpoint, ((), None))
            if known != found:  # it was not read yet, or has changed since
                damage = self._what_is_wrong(path)
                if manifest.fingerprint(path) != found:
                    continue  # it is being replaced or deleted
                if damage is not None:
                    say(f"remote: {path} is damaged, so it is not sent: {damage}")
            self._verified[checkpoint] = (found, damage)
            if damage is not None:
                damaged.add(checkpoint)
        self.damaged = _files_of(damaged, unsent)
        changing = suspect - self._verified.keys()
        return _files_of(changing | damaged, unsent)

    def _what_is_wrong(self, path: Path) -> str | None:
        """Return what is wrong with what this folder sends of a checkpoint."""
        if self._note.worker:
            return manifest.what_is_wrong_with_input(path, self._note.worker)
        return manifest.what_is_wrong(path)

    def _find_replaced(self, unsent: Collection[str]) -> set[str]:
        """Return those of the files to send that belong to checkpoints that were replaced since they were verified."""
        replaced = set()
        for checkpoint, (found, _) in self._verified.items():
            if manifest.fingerprint(self.folder / checkpoint) != found:
                replaced.add(checkpoint)
        return _files_of(replaced, unsent)

    def _find_early_states(self, unverified: Collection[str], state_files: StateFiles) -> set[str]:
        """Return the names of the state files that must wait: files of their latest checkpoint are `unverified`, and
        the bucket does not have this checkpoint.
        """
        waiting = set()
        checkpoints = set(map(layout.checkpoint_of, unverified))
        for name, (_, data) in state_files.items():
            if os.path.basename(name) != STATE_FILE:
                continue
            state = layout.parse_state(data)
            if state is None or state.latest is None:
                continue
            latest = os.path.join(os.path.dirname(name), state.latest)
            if latest in checkpoints and f"{latest}.index" not in self._note.files:
                waiting.add(name)
        return waiting

    def _copy(self, names: Collection[str]) -> Path:
        """Link or copy files to a folder of their own, and return its path."""
        copies = self.folder / SENDING
        shutil.rmtree(copies, ignore_errors=True)
        for name in names:
            copy = copies / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                if ".data-" in name:
                    os.link(self.folder / name, copy)
                else:
                    shutil.copyfile(self.folder / name, copy)
            except OSError:  # it is gone; the disk has no links, or is full
                copy.unlink(missing_ok=True)
        return copies

    def _choose_source(self, name: str) -> Path:
        """Return what is sent as `name`: its link or copy, or the file itself, if there was no room for one."""
        copy = self.folder / SENDING / name
        if copy.exists():
            return copy
        return self.folder / name

    def _note_attempts(self, names: Collection[str], state_files: StateFiles) -> None:
        """Note that files are about to be sent: if this process is killed, the bucket may have them, and nobody here
        knows their mark.
        """
        for name in names:
            size = self._size_to_send(name, state_files)
            self._note.files[name] = self._version_until_answer(name, size)
        if names:
            self._note.save(self.folder)

    def _size_to_send(self, name: str, state_files: StateFiles) -> int | None:
        """Return how many bytes are going to be sent; None: not known, because the disk had no room for a copy, and the
        file itself may grow.
        """
        if name in state_files:
            _, data = state_files[name]
            return len(data)
        source = self._choose_source(name)
        if source == self.folder / name:
            return None
        return source.stat().st_size

    def _version_until_answer(self, name: str, size: int | None) -> Version:
        """Return the version to note for an object before `size` bytes are sent. It counts until the answer comes."""
        noted = self._note.files.get(name)
        if noted is None:
            return Version(size, None)
        is_answered = noted.time is not None or noted.is_fetched
        if is_answered:
            return Version(size, None, noted.mark)
        # No answer came to an earlier attempt. The attempt may have arrived, or arrive later.
        mark = noted.mark
        with suppress(FileNotFoundError):
            info = self._store.fs.info(name)
            if self._note.knows(name, info):
                mark = mark_of(info)
        sizes = list(dict.fromkeys([*noted.unanswered, noted.bytes]))  # each once, in their order
        return Version(size, None, mark, unanswered=tuple(sizes[-MAX_ATTEMPTS:]))

    def _send_file(self, name: str, noticed_fingerprint: list[Any], state_files: StateFiles) -> None:
        """Send a file, and note it.

        Args:
          noticed_fingerprint: the fingerprint with which the file was found to have changed.
        """
        self.lease.check()
        if name in state_files:
            noticed_fingerprint, data = state_files[name]  # it may have changed since
            self._store.fs.pipe_file(name, data)
        else:
            self._store.fs.put_file(str(self._choose_source(name)), name)  # it may have changed: then it is sent again
        mark = mark_of(self._store.fs.info(name))
        size, time_of_change = noticed_fingerprint
        unanswered = self._note.files[name].unanswered
        self._note.files[name] = Version(size, time_of_change, mark, unanswered=unanswered)
        self._note.save(self.folder)

    def _waits_for_an_input(self, name: str) -> bool:
        """Report whether `name` is the index of a checkpoint without the input state of a worker on another host."""
        if not name.endswith(".index") or not self.has_others:
            return False
        path = self.folder / name.removesuffix(".index")
        for worker in manifest.saved_inputs(path):
            if not find_runner_file(Path(f"{path}.input-{worker}.index")).exists():
                return True
        return False

    def _delete(self, name: str) -> None:
        self.lease.check()
        with suppress(FileNotFoundError):
            self._store.fs.rm_file(name)


def _files_of(checkpoints: Collection[str | None], names: Collection[str]) -> set[str]:
    """Return those of `names` that are files of one of the checkpoints."""
    return {name for name in names if layout.checkpoint_of(name) in checkpoints}


class Courier:
    """Carries the messages of `runner.launch.rendezvous` between the folders of the hosts of a cluster, by the bucket.

    A message is delivered after the files that it is about, so that every start of the tasks begins from what the
    bucket has. A call `gather` is delivered after this host has sent its files, the last answer after the chief has
    sent its files, too, and a call `go` after this host has fetched them. So the supervisors, which wait for the
    messages, need not know of the bucket.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._store = uploader.lease.store
        self._folder = uploader.folder / LEASES
        self._cluster_place = ALONE
        if not uploader.is_chief:
            self._cluster_place = Cluster(**uploader.lease.facts)
        self._delivered_marks: dict[str, str] = {}  # name -> mark of each message that was delivered
        self._answers: dict[str, tuple[str, int]] = {}  # name -> run and generation that each answer is to
        self._sent: dict[Path, bytes] = {}

    def say(self) -> None:
        """Send the messages of this host that are new.

        Raises:
          LeaseLostError: another run has taken over.
          OSError, and errors of the store: the next call tries again.
        """
        pattern = CALL_FILE if self._uploader.is_chief else f"{PEERS_FOLDER}/*.json"
        for path in self._folder.glob(pattern):
            data = path.read_bytes()
            if data != self._sent.get(path):
                self._uploader.lease.check()
                self._store.fs.pipe_file(os.path.relpath(path, self._uploader.folder), data)
                self._sent[path] = data

    def hear(self) -> None:
        """Deliver the messages of others that are new.

        Raises:
          OSError, and errors of the store: the next call tries again.
        """
        changed = {}
        for path, info in self._messages_of_others().items():
            mark = mark_of(info)
            if self._delivered_marks.get(path) != mark:
                changed[path] = mark
        if not changed:
            return
        # One call for all of them: the library asks for them side by side, and not one after the other.
        new = self._store.fs.cat(list(changed))
        if self._uploader.is_chief:
            self._deliver_answers(new)
        else:
            (call,) = new.values()
            self._heed_call(call)
        self._delivered_marks.update(changed)

    def _messages_of_others(self) -> dict[str, Mapping[str, Any]]:
        """Return name -> what the store says of each. A worker looks at the chief's alone: if each listed the
        answers of all, the store would say n x n of them in a second.
        """
        if self._uploader.is_chief:
            found = self._store.fs.find(f"{LEASES}/{PEERS_FOLDER}", detail=True)
            return {name: info for name, info in found.items() if name.endswith(".json")}
        call = f"{LEASES}/{CALL_FILE}"
        with suppress(FileNotFoundError):
            return {call: self._store.fs.info(call)}
        return {}

    def _deliver_answers(self, new: Mapping[str, bytes]) -> None:
        """On the chief: deliver the new answers. If the last of all is among them, send what is here first. A
        checkpoint that still waits for the input state of a worker, which was lost with its machine, is then replaced
        by the one in the bucket.
        """
        call = json.loads((self._folder / CALL_FILE).read_bytes())
        for name, data in new.items():
            answer = json.loads(data)
            self._answers[name] = (answer["run"], answer["generation"])
        answered = list(self._answers.values())
        num_answers = answered.count((call["run"], call["generation"]))
        num_tasks = sum(map(len, call["tasks"].values()))
        have_all_answered = num_answers >= num_tasks - 1  # all but the chief
        if call["phase"] == "gather" and have_all_answered:
            self._send_all()
            self._uploader.fetch(self._uploader.held)
        for name, data in new.items():
            write_atomically(self._uploader.folder / name, data)

    def _heed_call(self, data: bytes) -> None:
        """On another host: do what the chief's call asks for, and deliver it. A call in which this host has no place is
        of another cluster, and is only delivered.
        """
        uploader = self._uploader
        path = self._folder / CALL_FILE
        call = json.loads(data)
        if not self._cluster_place.is_in(call.get("tasks", {})):
            write_atomically(path, data)
            return
        phase = call["phase"]
        number = self._store.highest()
        lease = Lease(self._store, number, self._store.lease(number))
        own_lease = uploader.lease
        # The call comes from another lease than the one that this process has followed: others took the URL over while
        # it was stopped. Only a call to gather asks it to join them.
        was_passed_over = own_lease.number not in (0, lease.number) and phase != "gather"
        if was_passed_over and phase == "go":
            return
        if self._is_new(call):
            if phase == "go":
                uploader.fetch()
            elif phase == "gather" and own_lease.number:
                has_moved = own_lease.facts.get("folder") != lease.facts.get("folder")
                if has_moved:  # the chief has continued elsewhere, from what the bucket has
                    uploader.fetch(None)
            uploader.lease = lease  # under which this host sends
            if phase == "gather":
                self._send_all()
        uploader.lease = own_lease if was_passed_over else lease
        write_atomically(path, data)

    def _is_new(self, call: Mapping[str, Any]) -> bool:
        """Report whether a call asks for something else than the one that was delivered before it."""
        path = self._folder / CALL_FILE
        if not path.exists():
            return True
        known = json.loads(path.read_bytes())
        asks_for = ("run", "generation", "phase")
        return any(known.get(key) != call[key] for key in asks_for)

    def _send_all(self) -> None:
        """Send until nothing is left, and the messages of this host meanwhile."""
        while not self._uploader.send(self.say):
            pass


def send_changes(folder: Path, lease: Lease, is_last: threading.Event, *, is_alone: bool = False) -> int:
    """Send what is new in `folder` every few seconds, until `is_last` is set and everything is sent.

    Args:
      is_alone: no other host sends now, so nothing more comes for a checkpoint without the state of a worker's input.

    Returns:
      0: everything is sent; NOT_ALL: another run has the lease, the folder is gone, or such a checkpoint is left.
    """
    with sending_in(folder):
        code = _send_until_last(Uploader(folder, lease), is_last, is_alone=is_alone)
    if code is not None:
        return code
    # Another has the lease or the folder is gone. It is for who started this process to say how the run ends.
    is_last.wait()
    return NOT_ALL


def _send_until_last(uploader: Uploader, is_last: threading.Event, *, is_alone: bool) -> int | None:
    """Do what `send_changes` says, and return its exit code; None: nothing more may be sent, because another run has
    the lease, or the folder is gone.
    """
    courier = Courier(uploader)
    is_behind = False
    next_send_at = 0.0
    while True:
        is_ending = is_last.is_set()
        wait_secs = _secs_between_looks(uploader, is_ending=is_ending)
        is_due = is_ending or time.monotonic() >= next_send_at
        try:
            is_all = _exchange(uploader, courier, is_due=is_due)
            waits_for_others = bool(uploader.held) and not is_alone
            if is_ending and is_all and not waits_for_others:
                return _code_of_end(uploader)
            if is_due:
                next_send_at = time.monotonic() + PERIOD_SECS
            is_behind = False
        except (LeaseLostError, FolderLostError) as error:
            waits_for_the_chief = isinstance(error, LeaseLostError) and not uploader.is_chief and not is_ending
            if not waits_for_the_chief:
                say(f"remote: {error}")
                return None
            wait_secs = RETRY_SECS
        except Exception as error:  # the store is away, full, or refuses: try again
            if not is_behind:  # say it once
                what = f"training continues; {uploader.lease.store.url} is behind the folder {uploader.folder}"
                say(f"remote: {describe(error)} ({what})")
            is_behind = True
            wait_secs = RETRY_SECS
        if is_ending:
            time.sleep(wait_secs)
        else:
            is_last.wait(wait_secs)


def _exchange(uploader: Uploader, courier: Courier, *, is_due: bool) -> bool:
    """Carry the messages that are new, and send if it is time to. Return whether that was all there is to send."""
    if uploader.has_others:
        courier.hear()  # first: what the chief calls may come with another lease
        courier.say()
    return is_due and uploader.send(courier.say)


def _secs_between_looks(uploader: Uploader, *, is_ending: bool) -> float:
    if is_ending:
        return GLANCE_SECS
    if uploader.has_others:
        return RETRY_SECS
    return PERIOD_SECS


def _code_of_end(uploader: Uploader) -> int:
    """Return the exit code when everything is sent that can be, and say what cannot."""
    if uploader.held:
        names = ", ".join(sorted(uploader.held))
        say(f"remote: {names}: the state of a worker's input is missing")
    is_all = not uploader.held and not uploader.damaged
    return FINISHED if is_all else NOT_ALL


def main(argv: Sequence[str] | None = None) -> int:
    """Send what is left of a folder; with `--lease`, follow it until standard input ends or has an empty line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Send a run's folder to its bucket.")
    parser.add_argument("folder", type=Path, help="the local folder of a run with a URL as model_dir")
    parser.add_argument("--lease", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--secs", type=float, default=RunSettings.upload_secs, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    keep_saying()
    folder = options.folder.absolute()
    is_last = threading.Event()
    is_by_hand = options.lease is None
    if is_by_hand:
        try:
            lease = _take_lease(folder)
        except ConfigError as error:
            say(f"upload: {error}")
            return USER_ERROR
        is_last.set()
    else:
        lease = Lease(Store(Note.read(folder).url), *options.lease)
        if lease.number:  # it is the chief's
            lease.keep()
        _end_with_starter(lease, is_last, options.secs)
    code = send_changes(folder, lease, is_last, is_alone=is_by_hand)
    lease.end()
    return code


def _take_lease(folder: Path) -> Lease:
    """Take the lease for a folder that was the last to write to its URL.

    Raises:
      ConfigError: it was not; another run holds the lease; or the bucket cannot be reached.
    """
    note = Note.read(folder)
    with reaching(note.url):
        store = Store(note.url)
        if not note.folder or not store.is_current(folder):
            where = note.url or "a URL"
            raise ConfigError(f"{folder} was not the last to write to {where}, so nothing is sent.")
        lease = Lease.take(store, note.folder, RunSettings.lease_secs)
        # Under the lease, as at each start: what was lost or damaged here is not sent, but comes from there.
        with sending_in(folder):
            store.update(folder, lease.number - 1, is_thorough=True)
    return lease


def _end_with_starter(lease: Lease, is_last: threading.Event, secs: float) -> None:
    """Set `is_last` when the process that started this one says so or ends; `secs` later end this process."""

    def on_line(line: str) -> None:
        if line:
            return
        is_last.set()
        ends_at = time.monotonic() + secs
        while time.monotonic() < ends_at and not lease.lost:  # the next start waits for this process
            time.sleep(GLANCE_SECS)
        lease.end()
        os._exit(NOT_ALL)  # a file may be under way

    heed_starter(on_line)


if __name__ == "__main__":
    sys.exit(main())
