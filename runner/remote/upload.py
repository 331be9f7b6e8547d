"""Send what is new in the local folder of a run to its bucket: `python -m runner.remote.upload <folder>`.

Who starts a run with a URL starts one such process (`runner.remote.mirror`), which follows the folder. It may be ended
at any time, and started again by anyone: the note in the folder says what the bucket has.
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

from runner.config.schema import ConfigError, RunSettings
from runner.remote.store import Lease, LeaseLostError, Note, Store, fingerprint, local_files, reaching, upload_order
from runner.system.child_process import STOP_SIGNALS
from runner.system.files import FolderLostError, HeldFolder
from runner.system.standard_streams import keep_saying, say
from runner.tracking.exit_codes import FINISHED, USER_ERROR
from runner.tracking.shipping import NOT_ALL
from runner.tracking.tracker import describe

MODULE = "runner.remote.upload"
PERIOD_SECS, RETRY_SECS, GLANCE_SECS = 3.0, 1.0, 0.2


class Uploader:
    """Sends the files of a folder, and notes which it has sent.

    Args:
      folder: the local folder.
      lease: the lease on its URL.
    """

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self.lease, self._store = folder, lease, lease.store
        self._note = Note.read(folder, self._store.url)
        self._held, self._gone = HeldFolder(folder), set[str]()

    def send(self) -> bool:
        """Send what has changed since the last call, and remove what is gone. Return whether that is all.

        The state files are read first, and written last. What they name is then in the folder, and is held by links
        until it is sent: training may delete a checkpoint meanwhile. Other files may grow meanwhile, and are copied:
        gcsfs 2026.10 cannot send a file of 5 MB that grows.

        Raises:
          LeaseLostError: another run has taken over.
          FolderLostError: the folder was deleted; nothing is removed from the bucket for that.
          OSError, and errors of the store: something is left; the next call sends it.
        """
        found = sorted(local_files(self.folder).items(), key=lambda item: upload_order(item[0]), reverse=True)
        states = {name: (fingerprint(path), path.read_bytes()) for name, path in found if upload_order(name)[0]}
        left, held = self._note.left(self.folder), self.folder / ".sending"
        shutil.rmtree(held, ignore_errors=True)
        for name in left.keys() - states.keys():
            (held / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                (os.link if ".data-" in name else shutil.copyfile)(self.folder / name, held / name)
            except OSError:  # it is gone; the disk has no links, or is full
                (held / name).unlink(missing_ok=True)
        sources = {name: (held if (held / name).exists() else self.folder) / name for name in left}
        changed = sorted((name for name in left if name in states or sources[name].exists()), key=upload_order)
        for name in reversed(changed):
            if name.endswith(".index"):
                self._remove(name)  # its files may be replaced: it is no checkpoint until they are all there
        for name in changed:
            self.lease.check()
            if name in states:
                left[name], data = states[name]  # it may have changed since
                self._store.fs.pipe_file(name, data)
            else:
                self._store.fs.put_file(str(sources[name]), name)  # it may have changed: then it is sent again
            self._note.files[name] = left[name]
            self._note.save(self.folder)
        gone = self._note.files.keys() - local_files(self.folder).keys()
        self._held.check()
        # Only at the second look: somebody may be deleting the whole folder.
        for name in sorted(gone & self._gone, key=upload_order, reverse=True):
            self._remove(name)
        self._gone = gone
        self._note.save(self.folder)
        shutil.rmtree(held, ignore_errors=True)
        return not changed and not gone & self._note.files.keys()

    def _remove(self, name: str) -> None:
        self.lease.check()
        with suppress(FileNotFoundError):
            self._store.fs.rm_file(name)
        self._note.files.pop(name, None)


def follow(folder: Path, lease: Lease, is_last: threading.Event) -> int:
    """Send what is new in `folder` every few seconds, until `is_last` is set and everything is sent.

    Returns:
      0: everything is sent; NOT_ALL: another run has the lease, or the folder is gone.
    """
    uploader, is_behind = Uploader(folder, lease), False
    while True:
        ends = is_last.is_set()
        try:
            if uploader.send() and ends:
                return FINISHED
            wait, is_behind = GLANCE_SECS if ends else PERIOD_SECS, False
        except (LeaseLostError, FolderLostError) as error:
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
    parser.add_argument("--lease", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--secs", type=float, default=RunSettings.upload_secs, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    keep_saying()
    folder, is_last = options.folder.absolute(), threading.Event()
    if options.lease is not None:
        # It outlives its starter, to send how the run ended. The end of its input tells it to finish.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_finish, args=(is_last, options.secs), daemon=True).start()
        return follow(folder, Lease(Store(Note.read(folder).url), options.lease), is_last)
    try:
        lease = _lease_of(folder)
    except ConfigError as error:
        say(f"upload: {error}")
        return USER_ERROR
    is_last.set()
    code = follow(folder, lease, is_last)
    lease.end()
    return code


def _lease_of(folder: Path) -> Lease:
    note = Note.read(folder)
    with reaching(note.url):
        if not note.folder or not (store := Store(note.url)).is_current(folder):
            raise ConfigError(f"{folder} was not the last to write to {note.url or 'a URL'}, so nothing is sent.")
        return Lease.take(store, note.folder, RunSettings.lease_secs)


def _finish(is_last: threading.Event, secs: float) -> None:
    """Set `is_last` when the starter says so or is gone, and end this process if something is left after `secs`."""
    while sys.stdin.readline().strip():
        pass
    is_last.set()
    time.sleep(secs)
    os._exit(NOT_ALL)  # a file may be under way


if __name__ == "__main__":
    sys.exit(main())
