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

from runner.config.schema import ConfigError, RunSettings
from runner.distribute.cluster import ALONE, Cluster
from runner.remote.store import (
    CALL_FILE,
    LEASES,
    PEERS_FOLDER,
    STATE_FILE,
    Lease,
    LeaseLostError,
    Note,
    Store,
    fingerprint,
    fingerprints,
    mark_of,
    reaching,
    upload_order,
)  # fmt: skip
from runner.system.files import FolderLostError, HeldFolder, place_of, read_json, write_atomically
from runner.system.standard_streams import keep_saying, say
from runner.tracking.exit_codes import FINISHED, USER_ERROR
from runner.tracking.shipping import NOT_ALL, heed_starter
from runner.tracking.tracker import describe

MODULE = "runner.remote.upload"
PERIOD_SECS, RETRY_SECS, GLANCE_SECS = 3.0, 1.0, 0.2


class Uploader:
    """Sends the files of a folder, and notes which it has sent.

    In a cluster of several hosts, each has a folder and an uploader. The chief's sends the checkpoints, when they have
    the input states of all workers, and fetches what the others send.

    Args:
      folder: the local folder.
      lease: the lease on its URL; a worker's has the number 0, and says its place, until the chief calls.

    Attributes:
      held: names of files that wait for an input state of a worker on another host.
      before_each: called before each file is sent.
    """

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self.lease, self._store = folder, lease, lease.store
        self._note = Note.read(folder, self._store.url)
        self._existing, self._gone, self.held = HeldFolder(folder), set[str](), set[str]()
        self.is_chief = not self._note.worker
        self.before_each: Callable[[], None] = lambda: None

    @property
    def has_others(self) -> bool:
        """Whether other hosts send, too."""
        return not self.is_chief or (self.folder / LEASES / CALL_FILE).exists()

    def fetch(self, but: Collection[str] | None = ()) -> None:
        """Fetch what other hosts have sent, as in `Store.fetch`."""
        self._store.fetch(self.folder, but)
        self._note = Note.read(self.folder, self._store.url)

    def send(self) -> bool:
        """Send what has changed since the last call, and remove what is gone. Return whether that is all.

        The state files are read first, and written last. What they name is then in the folder, and is kept by links
        until it is sent: training may delete a checkpoint meanwhile. Other files may grow meanwhile, and are copied:
        gcsfs 2026.10 cannot send a file of 5 MB that grows.

        Raises:
          LeaseLostError: another run has taken over.
          FolderLostError: the folder was deleted; nothing is removed from the bucket for that.
          OSError, and errors of the store: something is left; the next call sends it.
        """
        if self.is_chief and self.has_others:
            self.lease.check()
            self.fetch()
        last = [name for name in fingerprints(self.folder) if upload_order(name)[0]]
        paths = {name: self.folder / name for name in sorted(last, key=upload_order, reverse=True)}
        states = {name: (fingerprint(path), path.read_bytes()) for name, path in paths.items()}
        left, copies = self._note.left(fingerprints(self.folder)), self.folder / ".sending"
        shutil.rmtree(copies, ignore_errors=True)
        for name in left.keys() - states.keys():
            (copies / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                (os.link if ".data-" in name else shutil.copyfile)(self.folder / name, copies / name)
            except OSError:  # it is gone; the disk has no links, or is full
                (copies / name).unlink(missing_ok=True)
        sources = {name: (copies if (copies / name).exists() else self.folder) / name for name in left}
        self.held = {name for name in left if self._is_incomplete(name)}
        self.held |= {STATE_FILE} if self.held else set()
        there = {name for name in left if name in states or sources[name].exists()}
        changed = sorted(there - self.held, key=upload_order)
        if changed:
            self._note.files |= {name: [] for name in changed}  # one that is killed may have sent them
            self._note.save(self.folder)
        for name in reversed(changed):
            if name.endswith(".index"):
                self._remove(name)  # its files may be replaced: it is no checkpoint until they are all there
        for name in changed:
            self.before_each()
            self.lease.check()
            if name in states:
                left[name], data = states[name]  # it may have changed since
                self._store.fs.pipe_file(name, data)
            else:
                self._store.fs.put_file(str(sources[name]), name)  # it may have changed: then it is sent again
            self._note.files[name] = left[name]
            self._note.save(self.folder)
        gone = {name for name in self._note.files if not os.path.lexists(self.folder / name)}
        self._existing.check()
        if not self.is_chief:  # it is the chief's to remove
            self._note.files = {name: noted for name, noted in self._note.files.items() if name not in gone}
        if not self.is_chief or self.held:  # the newest checkpoint first
            gone = set()
        # Only at the second look: somebody may be deleting the whole folder.
        for name in sorted(gone & self._gone, key=upload_order, reverse=True):
            self._remove(name)
        self._gone = gone
        self._note.save(self.folder)
        shutil.rmtree(copies, ignore_errors=True)
        return not changed and not gone & self._note.files.keys()

    def _is_incomplete(self, name: str) -> bool:
        """Report whether `name` is the index of a checkpoint without the input state of a worker on another host."""
        path = self.folder / name.removesuffix(".index")
        if not name.endswith(".index") or not self.has_others:
            return False
        inputs = (read_json(place_of(Path(f"{path}.manifest.json")), is_kept=True) or {}).get("input") or {}
        saved = [worker for worker, how in inputs.items() if how == "saved"]
        return not all(place_of(Path(f"{path}.input-{worker}.index")).exists() for worker in saved)

    def _remove(self, name: str) -> None:
        self.lease.check()
        with suppress(FileNotFoundError):
            self._store.fs.rm_file(name)
        self._note.files.pop(name, None)


class Courier:
    """Carries the messages of `runner.launch.rendezvous` between the folders of the hosts of a cluster, by the bucket.

    Each is delivered after what it is about, so that every start of the tasks begins from what the bucket has: `gather`
    after this host has sent what it has, the last answer after the chief has, too, and `go` after this host has fetched
    it. So the supervisors wait for the files, and not for the bucket.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader, self._store = uploader, uploader.lease.store
        self._folder = uploader.folder / LEASES
        self._place = ALONE if uploader.is_chief else Cluster(**uploader.lease.facts)
        self._heard: dict[str, tuple[str, bytes]] = {}
        self._said: dict[Path, bytes] = {}

    def say(self) -> None:
        """Send the messages of this host that are new.

        Raises:
          LeaseLostError: another run has taken over.
          OSError, and errors of the store: the next call tries again.
        """
        is_chief = self._uploader.is_chief
        for path in self._folder.glob(CALL_FILE if is_chief else f"{PEERS_FOLDER}/*.json"):
            if (data := path.read_bytes()) != self._said.get(path):
                self._uploader.lease.check()
                self._store.fs.pipe_file(os.path.relpath(path, self._uploader.folder), data)
                self._said[path] = data

    def hear(self) -> None:
        """Deliver the messages of others that are new.

        Raises:
          OSError, and errors of the store: the next call tries again.
        """
        is_chief, heard = self._uploader.is_chief, dict(self._heard)
        for path, info in self._store.fs.find(LEASES, detail=True).items():
            name, mark = os.path.relpath(path, LEASES), mark_of(info)
            is_for_us = name.endswith(".json") and name.startswith(PEERS_FOLDER) == is_chief
            if is_for_us and heard.get(name, ("",))[0] != mark:
                heard[name] = mark, self._store.fs.cat_file(path)
        if heard != self._heard:
            (self._gather if is_chief else self._follow)(heard)
        self._heard = heard

    def _gather(self, heard: Mapping[str, tuple[str, bytes]]) -> None:
        """On the chief: deliver the answers. Before the last of them, send what is here; a checkpoint without the input
        state of a worker, which was lost with its machine, then gives way to the one in the bucket.
        """
        call = json.loads((self._folder / CALL_FILE).read_bytes())
        answers = [json.loads(data) for _, data in heard.values()]
        same = [answer for answer in answers if all(answer[key] == call[key] for key in ("run", "generation"))]
        if call["phase"] == "gather" and len(same) >= sum(map(len, call["tasks"].values())) - 1:
            while not self._uploader.send():
                pass
            self._uploader.fetch(self._uploader.held)
        for name, (_, data) in heard.items():
            write_atomically(self._folder / name, data)

    def _follow(self, heard: Mapping[str, tuple[str, bytes]]) -> None:
        """On another host: do what the chief's call asks for, and deliver it. Another cluster's asks nothing of it."""
        ((_, data),) = heard.values()
        path, call, uploader = self._folder / CALL_FILE, json.loads(data), self._uploader
        if not self._place.is_in(call.get("tasks", {})):
            return write_atomically(path, data)
        number, before = self._store.highest(), uploader.lease
        lease = Lease(self._store, number, self._store.lease(number))
        phase, known = call["phase"], json.loads(path.read_bytes()) if path.exists() else {}
        is_passed = before.number not in (0, lease.number) and phase != "gather"
        if is_passed and phase == "go":
            return  # it does not mean this process, which was stopped while others took over
        if any(known.get(key) != call[key] for key in ("run", "generation", "phase")):
            if phase == "go":
                uploader.fetch()
            elif phase == "gather" and before.number and before.facts.get("folder") != lease.facts.get("folder"):
                uploader.fetch(None)  # the chief has continued elsewhere, from what the bucket has
            uploader.lease = lease
            while phase == "gather" and not uploader.send():
                pass
        uploader.lease = before if is_passed else lease
        write_atomically(path, data)


def follow(folder: Path, lease: Lease, is_last: threading.Event, *, is_alone: bool = False) -> int:
    """Send what is new in `folder` every few seconds, until `is_last` is set and everything is sent.

    Args:
      is_alone: no other host sends now, so nothing more comes for a checkpoint without the state of a worker's input.

    Returns:
      0: everything is sent; NOT_ALL: another run has the lease, the folder is gone, or such a checkpoint is left.
    """
    uploader, is_behind = Uploader(folder, lease), False
    courier = Courier(uploader)
    uploader.before_each, sends_at = courier.say, 0.0
    while True:
        ends = is_last.is_set()
        try:
            if uploader.has_others:
                courier.hear()  # first: what the chief calls may come with another lease
                courier.say()
            if ends or time.monotonic() >= sends_at:
                if uploader.send() and ends and (is_alone or not uploader.held):
                    if uploader.held:
                        say(f"remote: {', '.join(sorted(uploader.held))}: the state of a worker's input is missing")
                    return NOT_ALL if uploader.held else FINISHED
                sends_at = time.monotonic() + PERIOD_SECS
            wait, is_behind = GLANCE_SECS if ends else RETRY_SECS if uploader.has_others else PERIOD_SECS, False
        except (LeaseLostError, FolderLostError) as error:
            if not (uploader.is_chief or ends or isinstance(error, FolderLostError)):
                is_last.wait(RETRY_SECS)  # until the chief calls
                continue
            say(f"remote: {error}")
            is_last.wait()
            return NOT_ALL
        except Exception as error:  # the store is away, full, or refuses: it is tried again
            if not is_behind:
                what = f"training continues; {lease.store.url} is behind the folder {folder}"
                say(f"remote: {describe(error)} ({what})")
            wait, is_behind = RETRY_SECS, True
        time.sleep(wait) if ends else is_last.wait(wait)


def main(argv: Sequence[str] | None = None) -> int:
    """Send what is left of a folder; with `--lease`, follow it until standard input ends or has an empty line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Send a run's folder to its bucket.")
    parser.add_argument("folder", type=Path, help="the local folder of a run with a URL as model_dir")
    parser.add_argument("--lease", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--secs", type=float, default=RunSettings.upload_secs, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    keep_saying()
    folder, is_last = options.folder.absolute(), threading.Event()
    note = Note.read(folder)
    if options.lease is not None:
        lease = Lease(Store(note.url), *options.lease)
        if lease.number:  # it is the chief's
            lease.keep()

        def heard(line: str) -> None:
            if not line:
                is_last.set()
                time.sleep(options.secs)
                lease.end()
                os._exit(NOT_ALL)  # a file may be under way

        heed_starter(heard)
    else:
        try:
            with reaching(note.url):
                if not note.folder or not (store := Store(note.url)).is_current(folder):
                    where = note.url or "a URL"
                    raise ConfigError(f"{folder} was not the last to write to {where}, so nothing is sent.")
                lease = Lease.take(store, note.folder, RunSettings.lease_secs)
        except ConfigError as error:
            say(f"upload: {error}")
            return USER_ERROR
        is_last.set()
    code = follow(folder, lease, is_last, is_alone=options.lease is None)
    lease.end()
    return code


if __name__ == "__main__":
    sys.exit(main())
