"""The child process of a run: `python -m runner.task <config file>`. Only this process imports TensorFlow.

It notes events in the journal. Its exit code says how it ended, as listed in `runner.system.exit_codes`. A task of a
cluster learns its place from TF_CONFIG. Each task has its own journal; only the chief shows progress.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import importlib
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from runner.checkpoint_files import layout
from runner.config import parsing, schema, user_code
from runner.config.schema import TRAINING_COMMANDS, UNRECORDED_COMMANDS, Config, ConfigError
from runner.distribute import errors
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.tf_config import read_tf_config
from runner.hooks.hook import Interrupted
from runner.system import console, gc_pause
from runner.system.child_process import NOTICES, end_with_parent
from runner.system.exit_codes import (
    CAN_SPLIT,
    FAILED,
    FINISHED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    PEER_LOST,
    USER_ERROR,
    code_of_error,
)  # fmt: skip
from runner.system.files import FolderLostError, HeldFolder
from runner.system.heartbeat import Heartbeat
from runner.system.redaction import SecretList, hiding, secrets_of
from runner.system.standard_streams import hidden_stderr, say
from runner.system.start_status import take_terminal
from runner.task import user_mlflow
from runner.task.error_report import note_out_of_memory, refuse_breakpoint, report_error
from runner.task.stop_hook import ForwardedStop, StopRequest
from runner.tracking.artifacts import Artifacts, keeping
from runner.tracking.journal import Journal, NullJournal, journal_path
from runner.tracking.run_lock import only_task_in
from runner.tracking.run_record import FOUND_ACCUMULATION
from runner.tracking.workers import Launch

BuildStop = Callable[[Journal], StopRequest]


def main(argv: Sequence[str] | None = None, *, inline: bool = False) -> int:
    """Run the config file in `argv`, and return the exit code.

    Args:
      argv: the arguments of the command line; None: those of this process.
      inline: this is the supervisor's process, so that a debugger works: the function handles Ctrl-C itself, and no
        supervisor watches it.

    Raises:
      KeyboardInterrupt: with `inline`, at a second Ctrl-C.
    """
    started = time.monotonic()
    (config_file,) = sys.argv[1:] if argv is None else argv
    user_code.add_to_path(Path.cwd())
    try:
        config = parsing.load(Path(config_file))
    except ConfigError as error:
        take_terminal(os.environ)
        report_error(error, NullJournal(), os.environ, set())
        return USER_ERROR
    config = _with_found_accumulation(config, os.environ)  # before anybody asks whether the model supports it
    with hiding(SecretList.of(config.run.secrets, os.environ)):
        return _start(config, Path(config_file), started, inline=inline)


def _with_found_accumulation(config: Config, env: Mapping[str, str]) -> Config:
    """Return `config` with the number of micro-batches of this start, if its supervisor finds that."""
    if not config.train.finds_accumulation:
        return config
    number = int(env.get(FOUND_ACCUMULATION) or 1)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, gradient_accumulation=number))


def _start(config: Config, config_file: Path, started: float, *, inline: bool) -> int:
    """Run the command in this process, and return the exit code.

    Unless `inline`, this process first takes what a supervisor expects of a task: it ends with the supervisor, sends
    heartbeats, and keeps another process from being the same task in model_dir.
    """
    if inline:
        return _start_inline(config, config_file, started)
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = refuse_breakpoint
    watchdog = end_with_parent(os.environ)  # must be first, because it forks
    heartbeat = Heartbeat(os.environ)
    heartbeat.start()
    cluster = read_tf_config(os.environ.get("TF_CONFIG", ""))
    progress_mode = config.run.progress
    if cluster.is_evaluator:  # it prints its results, but only the chief draws a live line
        progress_mode = "off" if progress_mode == "off" else "plain"
    elif not cluster.is_chief:
        progress_mode = "off"
    is_recorded = config.command not in UNRECORDED_COMMANDS
    name = f"{cluster.role}-{cluster.task_index}"
    with ExitStack() as held:
        try:
            if is_recorded:
                held.enter_context(only_task_in(Path(str(config.model_dir)), name))
        except ConfigError as error:  # another process uses the folder, and its journal
            report_error(error, NullJournal(), {}, set())
            return USER_ERROR
        build_stop: BuildStop = partial(StopRequest, note_work=watchdog.note_work)
        if cluster.is_server:
            watchdog.note_work()  # the coordinator needs this server to save
            build_stop = partial(ForwardedStop, heartbeat=heartbeat)
        return _run(config, cluster, build_stop, progress_mode, started, config_file.parent)


def _start_inline(config: Config, config_file: Path, started: float) -> int:
    """Run the command in the supervisor's process, where a debugger works, and return the exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported
    saves = "saving a checkpoint" if config.command in TRAINING_COMMANDS else "nothing is saved"
    build_stop = partial(
        StopRequest,
        signals=(signal.SIGTERM, signal.SIGINT, *NOTICES),
        answer=f"\nStopping: {saves}. Press Ctrl-C again to quit immediately.\n",
    )
    progress_mode = config.run.progress
    if progress_mode == "auto":  # a live line and a debugger's prompt would disturb each other
        progress_mode = "plain"
    return _run(config, ALONE, build_stop, progress_mode, started, config_file.parent, process_goes_on=True)


def _run(
    config: Config, cluster: Cluster, build_stop: BuildStop, progress_mode: str, started: float, scratch: Path, *,
    process_goes_on: bool = False,
) -> int:  # fmt: skip
    """Run the command, note in the journal how it ended, and return the exit code.

    Args:
      build_stop: makes the handler of requests to stop, which notes them in the journal.
      scratch: the folder for the journal of a command that leaves no record, which has only its result or error.
      process_goes_on: this process does something else afterwards, so its signal handlers and its environment are
        restored.
    """
    assert config.model_dir is not None
    is_recorded = config.command not in UNRECORDED_COMMANDS
    progress = console.build_progress(progress_mode)
    journal: Journal
    if is_recorded:
        path = journal_path(Path(config.model_dir), cluster.role, cluster.task_index)
        journal = Journal(path, show_phase=progress.phase)
        folder = HeldFolder(config.model_dir)
    else:
        path = journal_path(scratch, cluster.role, cluster.task_index)
        journal = NullJournal(progress.phase)
        folder = None
    stop = build_stop(journal)
    mlflow_env = {name: os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")}
    try:
        stop.install()
        files = _keeping_files(config, cluster, journal)
        with said_logs(config.run.log_level, progress, is_quiet=progress_mode == "off"), files:
            env: Mapping[str, str] = os.environ
            if process_goes_on:  # run inline, no supervisor has started this process
                env = {}
            launch = Launch.of_task(env)
            journal.event("started", pid=os.getpid(), command=config.command, began=launch.began)
            started -= launch.write_to(journal)
            user_mlflow.watch_import(config, cluster, journal)
            commands = _import_commands(config, journal)
            context = commands.TaskContext(journal, progress, stop, started, cluster)
            result = commands.run(config, context)
            journal = _journal_of_outcome(journal, path)
            journal.event("result", **result)
    except Interrupted as reason:
        take_terminal(os.environ)
        progress.stop()
        stop.write_request()
        journal.event("interrupted", reason=str(reason))
        return _report_interruption(reason, config, cluster)
    except KeyboardInterrupt:
        journal.event("error", error="stopped immediately by Ctrl-C")
        raise
    except Exception as error:
        progress.stop()
        if errors.tells_of_a_lost_peer(error, cluster):
            journal.event("peer_lost", error=str(error))
            return PEER_LOST
        journal = _journal_of_outcome(journal, path)
        error = _cause_of(error, folder)
        secrets = secrets_of(schema.to_tree(config), SecretList.of(config.run.secrets, os.environ))
        return _report(error, journal, secrets)
    finally:
        if process_goes_on:
            stop.uninstall()
            user_mlflow.forget(mlflow_env)
        else:
            # Everything is reported and saved. Python and TensorFlow take a while to end; a stop request in that time
            # must not turn a finished task into a killed one.
            stop.uninstall(signal.SIG_IGN)
        progress.stop()
        with suppress(OSError):  # the disk is full, which was reported
            journal.event("ended")
        journal.close()
    # A worker that is asked to stop makes all workers end an evaluation.
    if stop.was_heeded or result.get("interrupted"):
        return INTERRUPTED
    return FINISHED


def _keeping_files(config: Config, cluster: Cluster, journal: Journal) -> AbstractContextManager[None]:
    """Return a context in which the files that user code logs are kept; of a command without a record, nowhere."""
    if config.command in UNRECORDED_COMMANDS:
        return nullcontext()
    is_kept = cluster.is_chief or cluster.is_evaluator
    return keeping(Artifacts(Path(str(config.model_dir)), journal, is_kept, config.tracking.takes_files))


def _journal_of_outcome(journal: Journal, path: Path) -> Journal:
    """Return the journal for a command's result or error: the file of one without a record has only that, which its
    supervisor hands on.
    """
    if isinstance(journal, NullJournal):
        return Journal(path)
    return journal


def _report_interruption(reason: Interrupted, config: Config, cluster: Cluster) -> int:
    """Say that a command was stopped at once, and return the exit code."""
    trains = config.command in TRAINING_COMMANDS and not cluster.is_evaluator
    if not trains:
        say(f"Stopped by {reason}: {config.command} has no result.")
        return INTERRUPTED
    say(f"Stopped by {reason} before its first step.")
    has_checkpoint = bool(layout.latest_checkpoint(str(config.model_dir)))
    return INTERRUPTED if has_checkpoint else FAILED


def _report(error: Exception, journal: Journal, secrets: set[str]) -> int:
    """Report an error, and return the exit code. The supervisor reports one after which it starts this task again."""
    finds_accumulation = bool(os.environ.get(FOUND_ACCUMULATION))
    if finds_accumulation and getattr(error, CAN_SPLIT, False):
        note_out_of_memory(error, journal, secrets)
        return OUT_OF_MEMORY
    report_error(error, journal, os.environ, secrets)
    return code_of_error(error)


def _cause_of(error: Exception, folder: HeldFolder | None) -> Exception:
    """Return the error that explains `error`: files that are not found may have gone with their folder."""
    if folder is None:
        return error
    try:
        folder.check()
    except FolderLostError as lost:
        lost.__cause__ = error
        return lost
    return error


def _import_commands(config: Config, journal: Journal) -> Any:
    """Import TensorFlow, and with it `runner.task.commands`."""
    started = time.perf_counter()
    try:
        with quiet_import(os.environ), gc_pause.not_searched():
            from runner.task import commands

            if config.model.classic is True:  # before the user's modules
                importlib.import_module("runner.classic")
                importlib.import_module("runner.classic.compat.tf1_imports").watch_imports()
    finally:
        journal.took("import", time.perf_counter() - started)  # the supervisor shows this phase
        take_terminal(os.environ)  # from here on this process prints messages
    return commands


class _ProgressHandler(logging.Handler):
    """Prints log records as messages, so that they do not break the progress line."""

    def __init__(self, progress: console.Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        prefix = ""
        if record.levelno > logging.INFO:
            prefix = f"{record.levelname.lower()}: "
        self._progress.message(prefix + record.getMessage())


class _OfUser(logging.Filter):
    """Lets log messages of the user's own code pass, and warnings of installed packages.

    Args:
      level: the lowest level to pass.
    """

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level
        paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._installed = tuple(os.path.join(path, "") for path in paths)

    def filter(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger.parent is not None:
            if logger.handlers:  # another handler shows it already
                return False
            logger = logger.parent
        level = self._level
        if record.pathname.startswith(self._installed):
            level = max(level, logging.WARNING)
        return record.levelno >= level


@contextmanager
def said_logs(level_name: str, progress: console.Progress, *, is_quiet: bool) -> Iterator[None]:
    """Print log messages inside this context.

    The runner's own are printed from INFO on, those of the user's code from the level `run.log_level` on. If
    `is_quiet`, only warnings and errors of both are printed.
    """
    level_of_user: int = getattr(logging, level_name.upper())
    level_of_runner = logging.INFO
    shown = progress
    if is_quiet:
        level_of_user = max(level_of_user, logging.WARNING)
        level_of_runner = logging.WARNING
        shown = console.PlainProgress()
    level_of_user = max(level_of_user, logging.DEBUG)
    ours = logging.getLogger("runner")  # whose messages do not reach the root logger, which prints those of the user
    root = logging.getLogger()
    ours_before = (ours.handlers, ours.propagate, ours.level)
    root_level_before = root.level
    ours.handlers = [_ProgressHandler(shown)]
    ours.propagate = False
    ours.setLevel(level_of_runner)
    of_user = _ProgressHandler(shown)
    of_user.addFilter(_OfUser(level_of_user))
    root.addHandler(of_user)
    root.setLevel(min(level_of_user, root.level or level_of_user))
    try:
        yield
    finally:
        root.removeHandler(of_user)
        ours.handlers, ours.propagate, ours.level = ours_before
        root.setLevel(root_level_before)


@contextmanager
def quiet_import(env: Mapping[str, str]) -> Iterator[None]:
    """Hide TensorFlow's output during import, and its log below errors from then on.

    Does nothing if TF_CPP_MIN_LOG_LEVEL asks for information (0 or 1).
    """
    with hidden_stderr(env, but_for=Interrupted):
        yield
    if env.get("TF_CPP_MIN_LOG_LEVEL", "0") >= "2":
        logging.getLogger("tensorflow").setLevel(logging.ERROR)


def end(code: int, shared: Collection[str] = ()) -> NoReturn:
    """End this process with `code`.

    Args:
      shared: names of the modules that a forked process shares with its server; Python does not delete their objects.
    """
    iterators = sys.modules.get("runner.data.iterators")
    # Also if a peer is lost: the next start needs the lock files of the input's caches.
    have_ended = iterators is None or iterators.OPEN.have_ended()
    if code != PEER_LOST:
        if have_ended:
            if shared:
                _keep_modules(shared)
            sys.exit(code)
        # Python would abort the process if TensorFlow returned from a deletion while it ends.
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer is lost: TensorFlow's orderly shutdown would wait for the others


def _keep_modules(names: Collection[str]) -> None:
    """Hide the installed packages among the modules `names` from Python's end.

    Python deletes the objects of all modules one by one. In a forked process, each page with a deleted object must
    first be copied: 22,000 pages and 0.15 s of CPU for TensorFlow and Keras. All other modules end as always: the
    user's objects are deleted, and the user's open files are written.
    """
    # What Python does first when it ends: both may still import from these modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    own = (*sys.stdlib_module_names, "__main__")  # Python's end uses some of them
    kept = {}
    for name in names:
        is_own = name.partition(".")[0] in own
        if name in sys.modules and not is_own:
            kept[name] = sys.modules[name]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # it is never deleted, nor what it holds
    for name in kept:
        del sys.modules[name]
