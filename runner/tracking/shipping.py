"""Starting and ending the processes that ship journals (`runner.tracking.ship`), one for each tracker.

The supervisor of a run, a sweep, and an Estimator in a script use it alike: they write `run_started` and `run_ended`
into a journal, name the folder here, and wait at the end.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from runner.config.schema import TRACKERS, ConfigError, TrackingConfig
from runner.system.child_process import STOP_SIGNALS, describe_exit, pipe, start_pump
from runner.system.console import relative
from runner.system.files import read_json, write_atomically
from runner.system.heartbeat import HEARTBEAT, PERIOD_SECS, Heartbeat, HeartbeatMonitor
from runner.system.redaction import NO_LIST, SecretList, secrets_of
from runner.system.standard_streams import say
from runner.tracking.mlflow_tracker import experiment_name, tracking_uri
from runner.tracking.run_lock import holder_of
from runner.tracking.run_record import MLFLOW, Shipped, wrong_fields

MODULE = "runner.tracking.ship"
SETTINGS_FILE = ".tracking.json"
"""File in a run's folder with the settings of its trackers. It may contain secrets; only its owner can read it."""
NOT_ALL = 75
"""Exit code of a shipping process that could not ship everything."""
ANSWER_SECS = 20
"""Seconds that the end of a run waits for a tracker that does not answer: a frozen server or a locked database."""
MAX_DEATHS = 3
"""Number of times that a tracker's process may die with less than STEADY_SECS in between. Then it is not restarted: its
imports slow training down.
"""
STEADY_SECS = 600.0
GLANCE_SECS = 0.05
LAST_WORDS_SECS = 1.0
"""Seconds to wait for the last output of a process that has ended."""
END_SECS = 5.0
"""Seconds to wait for a process that was killed."""
MAX_NAMED = 5
"""Largest number of runs that are named in a message."""


@dataclass(frozen=True)
class ShipSettings:
    """What a shipping process knows of a run.

    Attributes:
      tracking: the trackers, with MLflow's uri and experiment.
      path: where a user's class is found.
      listed: what the run's config lists as secret.
    """

    tracking: TrackingConfig
    path: Sequence[str]
    listed: SecretList

    def secret_texts(self) -> set[str]:
        """Return the secrets in the settings."""
        return secrets_of(asdict(self.tracking), self.listed, "tracking")


def write_settings(
    folder: Path, settings: TrackingConfig, env: Mapping[str, str], path: Sequence[str] = (),
    listed: SecretList = NO_LIST,
) -> None:  # fmt: skip
    """Write where the run in `folder` is recorded, for the shipping processes of this start and later ones.

    Args:
      env: MLflow's variables are read from it now, since another shell may not have them.
      path: where a user's class is found, besides the working directory.
      listed: what the run's config lists as secret.
    """
    if settings.has_mlflow:
        experiment = experiment_name(settings, env)
        settings = replace(settings, uri=tracking_uri(settings, env, Path.cwd()), experiment=experiment)
    values = {"settings": asdict(settings), "path": [*path, os.getcwd()], "secrets": listed.entries()}
    write_atomically(folder / SETTINGS_FILE, json.dumps(values, default=str), mode=0o600)


def read_settings(folder: Path) -> ShipSettings:
    """Return what `write_settings` wrote, in this version or an earlier one.

    Raises:
      ConfigError: nothing in the folder says how the run is recorded, or a value there has a wrong type.
    """
    file = folder / SETTINGS_FILE
    values = read_json(file)
    if values is None:
        raise ConfigError(f"{folder} has no {SETTINGS_FILE}: it is not the folder of a run. Run its command again.")
    settings = values.get("settings")
    path = values.get("path", [])
    # Without the values, which may be secret.
    advice = "Run the command of the run again, which writes the file anew."
    has_folders = isinstance(path, list) and all(isinstance(folder, str) for folder in path)
    if not isinstance(settings, dict) or not has_folders:
        raise ConfigError(f"{file}: settings is not a mapping, or path is not a list of texts. {advice}")
    names = {field.name for field in fields(TrackingConfig)}
    known = {name: value for name, value in settings.items() if name in names}  # another version may have other keys
    tracking = TrackingConfig(**known)
    wrong = wrong_fields(tracking) or _wrong_backends(tracking)
    for name, expected in wrong.items():
        raise ConfigError(f"{file}: settings.{name} is not {expected}. {advice}")
    # The environment may be another than that of the run's command.
    return ShipSettings(tracking, path, SecretList.of(values.get("secrets"), {}))


def _wrong_backends(tracking: TrackingConfig) -> dict[str, str]:
    """Return the field and what it should be, if `backend` is not what a command writes."""
    wrong = {"backend": "a tracker's name, {fn: name, params: {}} or a list of them"}
    with suppress(AttributeError, KeyError, TypeError):
        for backend in tracking.backends:
            is_backend = isinstance(backend.name, str) and isinstance(backend.params, Mapping)
            if not is_backend:
                return wrong
        return {}
    return wrong


class Shipping:
    """The shipping processes of this process, and the folders that they follow.

    Args:
      env: environment of the shipping processes.
      classes: the users' classes that may be imported; None: all, because this command itself wrote the settings of the
        folders. Those of a folder that came from elsewhere may name any code.

    Attributes:
      left_out: name of a class that may not be imported -> folders that are not recorded completely there.
    """

    def __init__(self, env: Mapping[str, str], classes: Collection[str] | None = None) -> None:
        self.left_out: dict[str, list[Path]] = {}
        self._env = env
        self._classes = classes
        self._processes: dict[str, ShippingProcess] = {}

    def ship(self, folder: Path) -> None:
        """Ship the journals of `folder` from now on, to each tracker of its settings.

        Raises:
          ConfigError: a file in the folder has a value of a wrong type. The other trackers get the journals.
        """
        errors: list[ConfigError] = []
        for backend in read_settings(folder).tracking.backends:
            name = backend.name
            try:
                shipped = Shipped.read(folder, name)
            except ConfigError as error:
                errors.append(error)
                continue
            if self._classes is not None and name not in (*TRACKERS, *self._classes):
                if not shipped.is_complete(folder):
                    self.left_out.setdefault(name, []).append(folder)
                continue
            if name not in self._processes:
                self._processes[name] = ShippingProcess(name, self._env)
            self._processes[name].ship(folder)
        if errors:
            raise errors[0]

    def close(self, stops: Sequence[int] = ()) -> bool:
        """Wait until everything is shipped, the trackers no longer answer, or a further stop request comes into
        `stops`. Say which runs a tracker does not have, and how to ship them; return whether there are none.
        """
        last_check_secs = 0.0
        for waited_secs in finishing(self._processes.values(), stops):
            # A gap between two checks: this process or its machine was stopped, so it has read no heartbeats.
            if waited_secs - last_check_secs > PERIOD_SECS:
                for process in self._processes.values():
                    process.forgive()
            last_check_secs = waited_secs
            for process in self._processes.values():
                # A process that runs ends itself if its tracker does not answer. One that is stopped or frozen cannot.
                if process.is_alive and process.silent_secs() > ANSWER_SECS:
                    process.end_frozen()
        for process in self._processes.values():
            if process.is_alive:
                say(f"{label_of(process.name)}it does not answer; the run ends without waiting for it.")
            process.end()
        is_complete = True
        for process in self._processes.values():
            if process.say_unshipped_runs():
                is_complete = False
        return is_complete

    def drop(self) -> None:
        """End the processes, because the run is not recorded."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def addresses(self, folder: Path) -> dict[str, str]:
        """Return tracker name -> the address at which the user finds the run of `folder`; `<name>_runs` -> a second
        line of it.
        """
        found = {}
        for name, process in self._processes.items():
            if folder in process.folders:
                address = Shipped.read(folder, name).address or ""
                for number, line in enumerate(address.splitlines()):
                    found[name + "_runs" * number] = line
        return found

    def say_addresses(self) -> None:
        """Say where the user finds each run."""
        folders: dict[Path, None] = {}
        for process in self._processes.values():
            folders |= dict.fromkeys(process.folders)
        lines: dict[str, None] = {}  # each once: jobs of a sweep may have the same address
        for folder in folders:
            for name, address in self.addresses(folder).items():
                lines[f"{name}: {address}"] = None
        for line in lines:
            say(line)


class ShippingProcess:
    """The process that ships to one tracker, started again when it dies. `runner.remote` has its process of the same
    kind, which follows a folder and sends it to a bucket.

    Args:
      name: name of the tracker.
      env: environment of the process.
      python_args: arguments of Python; (): those of a tracker's process.
      label: what the lines begin with that it prints; '': the label of the tracker.

    Attributes:
      name: name of the tracker.
      folders: the folders that it follows.
    """

    def __init__(self, name: str, env: Mapping[str, str], python_args: Sequence[str] = (), label: str = "") -> None:
        self.folders: list[Path] = []
        self.name = name
        self._env = env
        self._python_args = python_args or ("-m", MODULE, "--to", name)
        self._label = label or label_of(name)
        self._is_finishing = False
        self._ended = threading.Event()  # `end` was called: the process is not started again
        self._lock = threading.Lock()  # guards the input of the process, its heartbeats, and which process it is
        self._monitor: HeartbeatMonitor | None = None
        self._child = self._start()
        self._restarting_thread = threading.Thread(
            target=self._run_and_close_monitor, daemon=True, name=f"ships to {name or label}"
        )
        self._restarting_thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is started again, and was not ended."""
        return self._restarting_thread.is_alive() and not self._ended.is_set()

    def ship(self, folder: Path) -> None:
        with self._lock:
            if folder not in self.folders:
                self.folders.append(folder)
            self._send_line(str(folder))

    def finish(self) -> None:
        """Let the process end when it has shipped everything."""
        with self._lock:
            self._is_finishing = True
            # The end of its input would not do: a process forked from this one may keep the pipe open.
            self._send_line("")

    def silent_secs(self) -> float:
        """Return the seconds since the last heartbeat of the process; 0 if it has ended for good."""
        with self._lock:
            if self._monitor is None:
                return 0.0
            return self._monitor.silent_secs()

    def forgive(self) -> None:
        """Start counting silent seconds anew."""
        with self._lock:
            if self._monitor is not None:
                self._monitor.forgive()

    def end_frozen(self) -> None:
        """Say that the process sends no heartbeats, and end it."""
        say(
            f"{self._label}its process {self._child.pid} is stopped or frozen: no heartbeat for {ANSWER_SECS} s; "
            "the run ends it, and does not wait for it."
        )
        self.end()

    def end(self) -> None:
        """End the process, whether or not everything is shipped."""
        with self._lock:
            self._ended.set()  # before the kill, after which `_restart_until_ended` would start it again
            self._child.kill()
        self._restarting_thread.join(END_SECS)  # a call to a file system that hangs may keep a killed process

    def say_unshipped_runs(self) -> bool:
        """Say which runs the tracker does not have, and the command that ships them. Return whether there is one."""
        unshipped = []
        problem: str | None = None  # the first
        for folder in self.folders:
            if folder.is_dir():
                shipped = Shipped.read(folder, self.name)
                if not shipped.is_complete(folder):
                    unshipped.append(folder)
                    problem = problem or shipped.problem
        if not unshipped:
            return False
        holder = holder_of(*(lock_file(folder, self.name) for folder in unshipped))
        if holder:  # our process could not even try, so a problem that an earlier process noted is not the reason
            problem = f"it is shipped by {holder}"
        runs = ", ".join(relative(folder) for folder in unshipped[:MAX_NAMED])
        if len(unshipped) > MAX_NAMED:
            runs += f" and {len(unshipped) - MAX_NAMED} more"
        are = "is" if len(unshipped) == 1 else "are"
        # In the command, a sweep's folder stands for the folders of its jobs.
        folders_to_ship = [folder for folder in unshipped if folder.parent not in unshipped]
        what = (
            f"{runs} {are} not recorded completely. Nothing is lost: the journals have everything; "
            f"ship later with: {ship_command(self.name, folders_to_ship)}"
        )
        first, *lines = (problem or "").split("\n")
        if first:
            what = f"{first} ({what})"
        say(label_of(self.name) + "\n".join([what, *lines]))
        return True

    def _start(self) -> subprocess.Popen[str]:
        """Start the process, with a new pipe for its heartbeats and a thread that prints its output."""
        with ExitStack() as child_ends, ExitStack() as own_ends:
            heartbeat_source, heartbeat = pipe(own_ends, child_ends)
            child = subprocess.Popen(
                [sys.executable, "-u", *self._python_args],  # -u: its lines come at once, although they go into a pipe
                # Unbuffered: a line that the process did not read before it died is not kept. Python 3.13 would print
                # an error about it.
                bufsize=0,
                env={**self._env, HEARTBEAT: str(heartbeat)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="surrogateescape",
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
                pass_fds=(heartbeat,),
            )
            own_ends.pop_all()  # these stay open; `with` closes the child's
        self._close_monitor()
        self._monitor = HeartbeatMonitor(heartbeat_source)
        assert child.stdout is not None
        self._output_thread = start_pump(child.stdout, say)
        return child

    def _close_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _send_line(self, line: str) -> None:
        assert self._child.stdin is not None
        with suppress(OSError):  # it has died, and its successor is told everything
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()

    def _run_and_close_monitor(self) -> None:
        try:
            self._restart_until_ended()
        finally:
            with self._lock:
                self._close_monitor()

    def _restart_until_ended(self) -> None:
        """Start the process again each time it dies, until it ends for good."""
        deaths = 0
        while True:
            began = time.monotonic()
            code = self._child.wait()
            was_steady = time.monotonic() - began > STEADY_SECS
            deaths = 1 if was_steady else deaths + 1
            self._output_thread.join(LAST_WORDS_SECS)  # a process that a user's class started may keep the pipe open
            if self._ended.is_set() or (self._is_finishing and code in (0, NOT_ALL)):
                return
            if code == -signal.SIGALRM:
                say(f"{self._label}no answer for {ANSWER_SECS} s; the run ends without waiting for it.")
                return
            if deaths == 1:  # further deaths in short succession are not said
                what_continues = "training continues; the journals have everything"
                say(f"{self._label}its process {describe_exit(code)} ({what_continues})")
            if deaths == MAX_DEATHS:
                say(f"{self._label}its process has ended {deaths} times and is not restarted.")
                return
            with self._lock:
                if self._ended.is_set():  # in the meantime: nobody would kill a child that starts now
                    return
                self._child = self._start()
                for folder in self.folders:
                    self._send_line(str(folder))
                if self._is_finishing:
                    self._send_line("")


def finishing(processes: Collection[ShippingProcess], stops: Sequence[int]) -> Iterator[float]:
    """Let processes end when they have shipped everything, side by side. Yield the seconds since then, at every
    glance, until they have ended, or there is a further stop request in `stops`.
    """
    num_stops_before = len(stops)
    began_at = time.monotonic()
    for process in processes:
        process.finish()
    while any(process.is_alive for process in processes) and len(stops) == num_stops_before:
        time.sleep(GLANCE_SECS)
        yield time.monotonic() - began_at


def ship_command(tracker: str, folders: Sequence[Path]) -> str:
    """Return the command that ships the runs in `folders` later, to a user's class only because it names it."""
    words = ["python", "-m", MODULE]
    if tracker not in TRACKERS:
        words += ["--tracker", tracker]
    words += [relative(folder) for folder in folders]
    return shlex.join(words)


def lock_file(folder: Path, tracker: str) -> Path:
    """Return the lock that a process holds while it ships the run in `folder` to `tracker`."""
    return folder / f".ship.{tracker}.lock"


def heed_starter(on_line: Callable[[str], None]) -> None:
    """Begin to follow the starter of this process, which a `ShippingProcess` started: send it heartbeats, ignore stop
    signals, so that this process outlives it and sends how the run ended, and read its lines.

    Args:
      on_line: called in a thread with each line of the starter. '' is the last: the starter waits for the end of this
        process, or is dead.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Heartbeat(os.environ).start()

    def hear() -> None:
        while True:
            line = sys.stdin.readline().rstrip("\n")
            on_line(line)
            if not line:  # '' also at the end of the input: the starter is dead
                break

    threading.Thread(target=hear, daemon=True).start()


def label_of(tracker: str) -> str:
    """Return what a message about a tracker begins with; MLflow is not named."""
    return "tracking: " if tracker == MLFLOW else f"tracking: {tracker}: "
