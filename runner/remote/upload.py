"""Send what is new in the local folder of a run to its bucket: `python -m runner.remote.upload <folder>`.

Who starts a run with a URL starts one such process (`runner.remote.mirror`), which renews the lease and follows the
folder. It may be ended at any time, and started again by anyone: the note in the folder says what the bucket has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.config.schema import ConfigError
from runner.remote.store import STATE_FILE, Lease, LeaseLostError, Note, Store, fingerprint, local_files, upload_order
from runner.system.console import format_bytes, relative
from runner.system.files import FolderLostError, HeldFolder
from runner.system.standard_streams import keep_saying, say
from runner.tracking.exit_codes import FINISHED, USER_ERROR
from runner.tracking.shipping import NOT_ALL
from runner.tracking.tracker import describe

MODULE = "runner.remote.upload"
PERIOD_SECS, RETRY_SECS, GLANCE_SECS = 3.0, 1.0, 0.2
LOST = 76
"""Exit code: another run has taken over the lease."""
LEASE_SECS, UPLOAD_SECS = 60.0, 600.0
"""Defaults of `run.lease_secs` and `run.upload_secs`."""
NOTE_SECS = 2.0
SENDING = ".sending"
_AT_ONCE = 16_000_000
"""Largest number of bytes of a file that is read before it is sent: it may grow meanwhile."""


class Uploader:
    """Sends the files of a folder, and notes which it has sent.

    Args:
      folder: the local folder.
      lease: the lease on its URL.
    """

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self.lease, self._store = folder, lease, lease.store
        self._note = Note.read(folder, self._store.url)
        self._saved_at, self._held, self._gone = 0.0, HeldFolder(folder), set[str]()

    def send(self) -> bool:
        """Send what has changed since the last call, and remove what is gone. Return whether that is all.

        The state files are read first, and written last. What they name is then in the folder, and is held by links
        until it is sent: training may delete a checkpoint meanwhile.

        Raises:
          LeaseLostError: another run has taken over.
          FolderLostError: the folder was deleted; nothing is removed from the bucket for that.
          OSError, and errors of the store: something is left; the next call sends it.
        """
        states = [path for path in self.folder.rglob(STATE_FILE) if path.is_file()]
        names = {os.path.relpath(path, self.folder): path.read_bytes() for path in states}
        marks, held = {}, self.folder / SENDING
        shutil.rmtree(held, ignore_errors=True)
        for name, path in local_files(self.folder).items():
            with suppress(FileNotFoundError):  # half-written or expired; then no state file that was read names it
                marks[name] = fingerprint(path)
                if self._has(name, marks[name]) or name in names:
                    continue
                (held / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(PermissionError, NotImplementedError):  # a disk without links
                    os.link(path, held / name)
        changed = sorted((name for name in marks if not self._has(name, marks[name])), key=upload_order)
        for name in changed:
            if name.endswith(".index") and name in self._note.files:
                self._remove(name)  # its files are replaced: it is no checkpoint until they are all there
        for name in changed:
            if name in names:  # these are the last ones
                self.lease.renew()
                self._store.fs.pipe_file(self._store.path(name), names[name])
            else:
                source = held / name
                self._put(name, source if source.exists() else self.folder / name, marks[name][0])
            self._note.files[name] = [*marks[name], ""]
            if time.monotonic() > self._saved_at + NOTE_SECS:
                self._save()
        gone = set(self._note.files) - set(marks)
        self._held.check()
        # Only at the second look: somebody may be deleting the whole folder.
        for name in sorted(gone & self._gone, key=upload_order, reverse=True):
            self._remove(name)
        self._gone = gone
        self._save()
        shutil.rmtree(held, ignore_errors=True)
        return not changed and not gone & set(self._note.files)

    def left(self) -> tuple[int, int]:
        """Return how many files, and bytes, the bucket does not have."""
        marks = {name: fingerprint(path) for name, path in local_files(self.folder).items()}
        sizes = [mark[0] for name, mark in marks.items() if not self._has(name, mark)]
        return len(sizes), sum(sizes)

    def _has(self, name: str, mark: list[int]) -> bool:
        return self._note.files.get(name, [])[:2] == mark

    def _put(self, name: str, source: Path, size: int) -> None:
        self.lease.check()
        if size <= _AT_ONCE:
            self._store.fs.pipe_file(self._store.path(name), source.read_bytes())
        else:
            self._store.fs.put_file(str(source), self._store.path(name))

    def _remove(self, name: str) -> None:
        self.lease.check()
        with suppress(FileNotFoundError):
            self._store.fs.rm_file(self._store.path(name))
        self._note.files.pop(name, None)

    def _save(self) -> None:
        self._note.save(self.folder)
        self._saved_at = time.monotonic()


def follow(folder: Path, lease: Lease, may_begin: threading.Event, is_last: threading.Event, secs: float) -> int:
    """Send what is new in `folder` every few seconds, until `is_last` is set and everything is sent.

    Args:
      may_begin: set when the folder has been fetched.
      secs: how long to try after `is_last` was set.

    Returns:
      0: everything is sent; NOT_ALL: something is left; LOST: another run has the lease.
    """
    lease.keep()
    may_begin.wait()
    if Note.read(folder).folder != lease.folder:  # its starter died while it was fetching: the bucket has more
        lease.end()
        return NOT_ALL
    uploader, said, until = Uploader(folder, lease), "", float("inf")
    while True:
        ends = is_last.is_set()
        until = min(until, time.monotonic() + secs) if ends else until
        try:
            is_all = uploader.send()
            if ends and is_all:
                lease.end()
                return FINISHED
            wait, said = PERIOD_SECS if not ends else GLANCE_SECS, ""
        except (LeaseLostError, FolderLostError) as error:
            say(f"runner: {error}")
            return LOST
        except Exception as error:  # the store is away, full, or refuses: it is tried again
            wait, reason = RETRY_SECS, describe(error)
            if not said:
                said = reason
                say(f"remote: {reason} (training continues; {lease.store.url} is behind the folder {folder})")
        if time.monotonic() > until:
            files, size = uploader.left()
            say(
                f"remote: {files} files, {format_bytes(size)}, of {relative(folder)} are not in {lease.store.url}. The "
                f"same command sends them, and so does: python -m {MODULE} {relative(folder)}"
            )
            with suppress(Exception):
                lease.end()
            return NOT_ALL
        is_last.wait(wait) if not ends else time.sleep(wait)


def main(argv: Sequence[str] | None = None) -> int:
    """Send what is left of a folder; with `--lease`, follow it until standard input ends, whose first line begins."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Send a run's folder to its bucket.")
    parser.add_argument("folder", type=Path, help="the local folder of a run with a URL as model_dir")
    parser.add_argument("--lease", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lease-secs", type=float, default=LEASE_SECS, help=argparse.SUPPRESS)
    parser.add_argument("--secs", type=float, default=UPLOAD_SECS, help="give up after this time")
    options = parser.parse_args(argv)
    keep_saying()
    folder, may_begin, is_last = options.folder.absolute(), threading.Event(), threading.Event()
    if options.lease is None:
        try:
            lease = _lease_of(folder, options.lease_secs)
        except ConfigError as error:
            say(f"upload: {error}")
            return USER_ERROR
        may_begin.set()
        is_last.set()
        return follow(folder, lease, may_begin, is_last, options.secs)
    # It outlives its starter, to send how the run ended. The end of its input tells it to finish.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_read, args=(may_begin, is_last), daemon=True).start()
    lease = Lease(Store(Note.read(folder).url), options.lease, options.lease_secs)
    return follow(folder, lease, may_begin, is_last, options.secs)


def _lease_of(folder: Path, secs: float) -> Lease:
    note = Note.read(folder)
    if not note.url:
        raise ConfigError(f"{folder} is not the folder of a run with a URL as model_dir.")
    store = Store(note.url)
    if not note.folder or not store.is_current(folder):
        raise ConfigError(f"{note.url} was written by another host since {folder} was, so nothing is sent.")
    return Lease.take(store, note.folder, secs)


def _read(may_begin: threading.Event, is_last: threading.Event) -> None:
    for line in iter(sys.stdin.readline, ""):
        if line == "\n":
            break
        may_begin.set()
    is_last.set()
    may_begin.set()  # the starter died while it was fetching


if __name__ == "__main__":
    sys.exit(main())
