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
MAX_DEATHS, STEADY_SECS = 3, 600.0
"""Number of times that a tracker's process may die with less than STEADY_SECS in between. Then it is not restarted: its
imports slow training down.
"""
GLANCE_SECS, LAST_WORDS_SECS = 0.05, 1.0
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
    settings, path = values.get("settings"), values.get("path", [])
    # Without the values, which may be secret.
    advice = "Run the command of the run again, which writes the file anew."
    if not isinstance(settings, dict) or not isinstance(path, list) or not all(isinstance(one, str) for one in path):
        raise ConfigError(f"{file}: settings is not a mapping, or path is not a list of texts. {advice}")
    # A key that TrackingConfig does not have is one of another version.
    names = {one.name for one in fields(TrackingConfig)}
    tracking = TrackingConfig(**{name: value for name, value in settings.items() if name in names})
    wrong = wrong_fields(tracking) or _wrong_backends(tracking)
    for name, words in wrong.items():
        raise ConfigError(f"{file}: settings.{name} is not {words}. {advice}")
    # The environment may be another than that of the run's command.
    return ShipSettings(tracking, path, SecretList.of(values.get("secrets"), {}))


def _wrong_backends(tracking: TrackingConfig) -> dict[str, str]:
    """Return the field and what it should be, if `backend` is not what a command writes."""
    with suppress(AttributeError, KeyError, TypeError):
        backends = tracking.backends
        if all(isinstance(one.name, str) and isinstance(one.params, Mapping) for one in backends):
            return {}
    return {"backend": "a tracker's name, {fn: name, params: {}} or a list of them"}


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
        self._env, self._classes = env, classes
        self._processes: dict[str, ShippingProcess] = {}

    def follow(self, folder: Path) -> None:
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
            self._processes[name].follow(folder)
        if errors:
            raise errors[0]

    def close(self, stops: Sequence[int] = ()) -> bool:
        """Wait until everything is shipped, the trackers no longer answer, or a further stop request comes into
        `stops`. Say which runs a tracker does not have, and how to ship them; return whether there are none.
        """
        glanced_at = 0.0
        for waited in finishing(self._processes.values(), stops):
            if waited - glanced_at > PERIOD_SECS:  # this process was stopped itself, or its machine: it heard nobody
                for process in self._processes.values():
                    process.forgive()
            glanced_at = waited
            for process in self._processes.values():
                # One that runs ends itself when its tracker does not answer. One that is stopped, or frozen, cannot.
                if process.is_alive and process.silent_secs() > ANSWER_SECS:
                    process.end_frozen()
        for process in self._processes.values():
            if process.is_alive:
                say(f"tracking: {of(process.name)}it does not answer; the run ends without waiting for it.")
            process.end()
        # A list, because `any` would end a generator at the first process that has something left.
        return not any([process.says_left() for process in self._processes.values()])

    def drop(self) -> None:
        """End the processes, because the run is not recorded."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def addresses(self, folder: Path) -> dict[str, str]:
        """Return tracker name -> the address at which the user finds the run of `folder`; `<name>_runs` -> a second
        line of it.
        """
        following = [name for name, process in self._processes.items() if folder in process.folders]
        found = {name: Shipped.read(folder, name).address or "" for name in following}
        return {name + "_runs" * i: line for name, text in found.items() for i, line in enumerate(text.splitlines())}

    def say_addresses(self) -> None:
        """Say where the user finds each run."""
        folders = dict.fromkeys(folder for process in self._processes.values() for folder in process.folders)
        lines = [f"{name}: {line}" for folder in folders for name, line in self.addresses(folder).items()]
        for line in dict.fromkeys(lines):
            say(line)


class ShippingProcess:
    """The process that ships to one tracker, started again when it dies; or another that follows folders.

    Args:
      name: the tracker's.
      env: environment of the process.
      words: arguments of Python; (): those of the tracker's process.
      label: what its lines begin with; '': those of the tracker.

    Attributes:
      name: the tracker's.
      folders: the folders that it follows.
    """

    def __init__(self, name: str, env: Mapping[str, str], words: Sequence[str] = (), label: str = "") -> None:
        self.folders: list[Path] = []
        self.name, self._env = name, env
        self._words = words or ("-m", MODULE, "--to", name)
        self._label = label or f"tracking: {of(name)}"
        self._is_finishing = False
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards the input of the process, its heartbeats, and which process it is
        self._monitor: HeartbeatMonitor | None = None
        self._child = self._start()
        self._tender = threading.Thread(target=self._tend, daemon=True, name=f"ships to {name or label}")
        self._tender.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is started again, and was not ended."""
        return self._tender.is_alive() and not self._ended.is_set()

    def follow(self, folder: Path) -> None:
        with self._lock:
            if folder not in self.folders:
                self.folders.append(folder)
            self._tell(str(folder))

    def finish(self) -> None:
        """Let the process end when it has shipped everything."""
        with self._lock:
            self._is_finishing = True
            self._tell("")  # the end of its input would not do: a process forked from this one may keep the pipe open

    def silent_secs(self) -> float:
        """Return the seconds since the last heartbeat of the process; 0 if it has ended for good."""
        with self._lock:
            return self._monitor.silent_secs() if self._monitor is not None else 0.0

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
            self._ended.set()  # before the kill, after which `_tend` would start it again
            self._child.kill()
        self._tender.join(END_SECS)  # a call to a file system that hangs may keep a killed process

    def says_left(self) -> bool:
        """Say which runs the tracker does not have, and the command that ships them. Return whether there is one."""
        rest = [one for one in self.folders if one.is_dir() and not Shipped.read(one, self.name).is_complete(one)]
        if not rest:
            return False
        problem = next((problem for one in rest if (problem := Shipped.read(one, self.name).problem)), None)
        holder = holder_of(*(lock_file(folder, self.name) for folder in rest))
        if holder:  # no process of ours could try: so whatever kept an earlier one is not the reason
            problem = f"it is shipped by {holder}"
        names = [relative(folder) for folder in rest]
        runs = ", ".join(names[:MAX_NAMED]) + (f" and {len(rest) - MAX_NAMED} more" if len(rest) > MAX_NAMED else "")
        tops = [one for one in rest if one.parent not in rest]  # a sweep's folder stands for those of its jobs
        command = ship_command(self.name, tops)
        what = (
            f"{runs} {'is' if len(rest) == 1 else 'are'} not recorded completely. Nothing is lost: the journals have "
            f"everything; ship later with: {command}"
        )
        first, *lines = problem.split("\n") if problem else [""]
        say("\n".join([f"tracking: {of(self.name)}{f'{first} ({what})' if first else what}", *lines]))
        return True

    def _start(self) -> subprocess.Popen[str]:
        # -u: its lines come at once, although they go into a pipe. Its own session: Ctrl-C in the terminal does not
        # reach it. bufsize: a line that a dead process did not read is not kept, and from Python 3.13 on complained of.
        with ExitStack() as theirs, ExitStack() as ours:
            heard, heartbeat = pipe(ours, theirs)
            child = subprocess.Popen(
                [sys.executable, "-u", *self._words], bufsize=0, env={**self._env, HEARTBEAT: str(heartbeat)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="surrogateescape", start_new_session=True, pass_fds=(heartbeat,),
            )  # fmt: skip
            ours.pop_all()
        self._close_monitor()
        self._monitor = HeartbeatMonitor(heard)
        assert child.stdout is not None
        self._repeating = start_pump(child.stdout, say)
        return child

    def _close_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with suppress(OSError):  # it has died, and its successor is told everything
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()

    def _tend(self) -> None:
        try:
            self._start_again()
        finally:
            with self._lock:
                self._close_monitor()

    def _start_again(self) -> None:
        """Start the process again each time it dies, until it ends for good."""
        deaths = 0
        while True:
            began, code = time.monotonic(), self._child.wait()
            deaths = 1 if time.monotonic() - began > STEADY_SECS else deaths + 1
            self._repeating.join(LAST_WORDS_SECS)  # a process that a user's class started may keep the pipe open
            if self._ended.is_set() or (self._is_finishing and code in (0, NOT_ALL)):
                return
            if code == -signal.SIGALRM:
                say(f"{self._label}no answer for {ANSWER_SECS} s; the run ends without waiting for it.")
                return
            if deaths == 1:
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
                    self._tell(str(folder))
                if self._is_finishing:
                    self._tell("")


def finishing(processes: Collection[ShippingProcess], stops: Sequence[int]) -> Iterator[float]:
    """Let processes end when they have shipped everything, side by side. Yield the seconds since then, at every
    glance, until they have ended, or there is a further stop request in `stops`.
    """
    already, began = len(stops), time.monotonic()
    for process in processes:
        process.finish()
    while any(process.is_alive for process in processes) and len(stops) == already:
        time.sleep(GLANCE_SECS)
        yield time.monotonic() - began


def ship_command(tracker: str, folders: Sequence[Path]) -> str:
    """Return the command that ships the runs in `folders` later, to a user's class only because it names it."""
    named = [] if tracker in TRACKERS else ["--tracker", tracker]
    return shlex.join(["python", "-m", MODULE, *named, *(relative(folder) for folder in folders)])


def lock_file(folder: Path, tracker: str) -> Path:
    """Return the lock that a process holds while it ships the run in `folder` to `tracker`."""
    return folder / f".ship.{tracker}.lock"


def heed_starter(heard: Callable[[str], None]) -> None:
    """In a process of `ShippingProcess`: pass on each line of its starter, and '' when no more comes, which tells it to
    finish. It outlives its starter, to send how the run ended. Until then it sends heartbeats.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Heartbeat(os.environ).start()

    def hear() -> None:
        while line := sys.stdin.readline().rstrip("\n"):  # '' also at the end of the input: the starter is dead
            heard(line)
        heard("")

    threading.Thread(target=hear, daemon=True).start()


def of(tracker: str) -> str:
    """Return what precedes a message about a tracker: nothing for MLflow."""
    return "" if tracker == MLFLOW else f"{tracker}: "
