"""The child process of a run: `python -m runner.task <config file>`. Only here is TensorFlow imported.

What happens is noted in the journal; the exit code says how it ended: 0 finished, 1 failed, 2 the user's config or code
is wrong, 3 stopped on request: the same command goes on from the last checkpoint, or does an evaluation again; 75 a
task of a cluster lost another one.

A task of a cluster finds its place in TF_CONFIG. Each has a journal; the chief alone shows how far the run is.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from runner import config as configs
from runner import errors, garbage, manifest, parsing, report, user_code
from runner.cluster import ALONE, Cluster
from runner.config import TRAINING_COMMANDS, UNRECORDED_COMMANDS, Config, ConfigError
from runner.heartbeat import Heart
from runner.hooks import Hook, Interrupted, Run
from runner.journal import Journal, NullJournal, journal_path
from runner.launcher import end_with_parent
from runner.lock import only_task_in
from runner.masking import secrets_of
from runner.outcome import FAILED, FINISHED, INTERRUPTED, PEER_LOST, USER_ERROR
from runner.output import keep_saying, say_at_once
from runner.types import StepResult


class StopRequest(Hook):
    """SIGTERM as a hook, and Ctrl-C where there is no supervisor between: training ends with a checkpoint after the
    loop that is under way; an evaluation or prediction, and all that comes before the first batch, ends at once.

    Args:
      signals: what counts as a request. After one, Ctrl-C does what it always does.
      answer: said on stderr when the first request comes while batches run.

    Attributes:
      was_heeded: whether something was left undone for it.
      journal: is told when this process was asked, and not another one that it ends with.
    """

    journal: Journal | NullJournal = NullJournal()

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,), answer: str = "") -> None:
        self.was_heeded = False
        self._signals, self._answer = signals, answer
        self._came = ""
        self._is_under_way = False
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Takes over the signals. Again after the strategy is built: TensorFlow may install a handler of its own."""
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            for number in self._signals:
                self._before.setdefault(number, signal.getsignal(number) or signal.SIG_DFL)  # None: not Python's
                signal.signal(number, self._note)

    def uninstall(self) -> None:
        """Gives the signals back to who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def begin(self, run: Run) -> None:
        self._is_under_way = True

    def after_step(self, run: Run, result: StepResult) -> None:
        self._heed(run)

    def after_batches(self, run: Run, examples: int) -> None:
        self._heed(run)

    def end(self, run: Run) -> None:
        # A worker that was asked has all of them stop.
        self.was_heeded = self.was_heeded or run.interrupted

    def note(self) -> None:
        """Tells the journal, once, where somebody has asked."""
        if self._came:
            self.journal.event("asked_to_stop", signal=self._came)
            self.journal = NullJournal()

    def _heed(self, run: Run) -> None:
        if self._came:
            self.note()
            self.was_heeded = True
            run.interrupt(self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came and number == signal.SIGINT:
            signal.default_int_handler(number, frame)  # raises KeyboardInterrupt
        self._came = signal.Signals(number).name
        if not self._is_under_way:  # nothing is lost, and tracing can take minutes
            raise Interrupted(self._came)
        say_at_once(self._answer)


class HandedOn(StopRequest):
    """SIGTERM of a server: it goes on; its supervisor has the coordinator save and end, and only then ends it."""

    def __init__(self, heart: Heart) -> None:
        super().__init__()
        self._heart = heart

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._heart.ask_to_stop()


def main(argv: Sequence[str] | None = None, *, inline: bool = False) -> int:
    """Runs the config file that `argv` names. The exit code.

    Args:
      inline: in the supervisor's process, for a debugger: Ctrl-C comes here, and nobody else watches.

    Raises:
      KeyboardInterrupt: inline, by a second Ctrl-C.
    """
    started = time.monotonic()
    (config_file,) = sys.argv[1:] if argv is None else argv
    user_code.add_to_path(Path.cwd())
    try:
        config = parsing.load(Path(config_file))
    except ConfigError as error:
        errors.report_error(error, NullJournal(), os.environ, set())
        return USER_ERROR
    if not inline:
        end_with_parent(os.environ)
        heart = Heart(os.environ)
        heart.start()
        cluster = Cluster.from_tf_config(os.environ.get("TF_CONFIG"))
        with _held(config, cluster):
            stop = HandedOn(heart) if cluster.is_server else StopRequest()
            return _run(config, cluster, stop, _progress_mode(config, cluster), started)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported
    saves = "a checkpoint is saved" if config.command in TRAINING_COMMANDS else "nothing is saved"
    stop = StopRequest((signal.SIGTERM, signal.SIGINT), f"\nStopping: {saves}. Ctrl-C once more stops at once.\n")
    # A live line and the prompt of a debugger do not go together.
    return _run(config, ALONE, stop, "plain" if config.run.progress == "auto" else config.run.progress, started)


def _progress_mode(config: Config, cluster: Cluster) -> str:
    """How this task says what happens: the live line is the chief's, and an evaluator says what it found."""
    if cluster.is_chief:
        return config.run.progress
    return "plain" if cluster.is_evaluator and config.run.progress != "off" else "off"


def _held(config: Config, cluster: Cluster) -> AbstractContextManager[None]:
    """The folder, for as long as this task writes in it."""
    if config.command in UNRECORDED_COMMANDS:
        return nullcontext()
    name = f"{cluster.role}-{cluster.task_index}"
    return only_task_in(Path(str(config.model_dir)), lambda text: print(text, file=sys.stderr, flush=True), name)


def _run(config: Config, cluster: Cluster, stop: StopRequest, progress_mode: str, started: float) -> int:
    assert config.model_dir is not None
    recorded = config.command not in UNRECORDED_COMMANDS
    path = journal_path(Path(config.model_dir), cluster.role, cluster.task_index)
    journal = Journal(path) if recorded else NullJournal()
    progress = report.build_progress(progress_mode)
    try:
        stop.journal = journal
        stop.install()
        with said_log(progress, is_quiet=progress_mode == "off"):
            journal.event("started", pid=os.getpid(), command=config.command)
            result = _do_command(config, cluster, journal, progress, stop, started)
    except Interrupted as reason:
        progress.stop()
        stop.note()
        journal.event("interrupted", reason=str(reason))
        trains = config.command in TRAINING_COMMANDS and not cluster.is_evaluator
        what = " before its first step" if trains else f": {config.command} has no result"
        print(f"Stopped by {reason}{what}.", file=sys.stderr, flush=True)
        return INTERRUPTED if not trains or manifest.latest_checkpoint(config.model_dir) else FAILED
    except KeyboardInterrupt:
        journal.event("error", error="stopped at once by Ctrl-C")
        raise
    except Exception as error:
        progress.stop()
        if errors.tells_of_a_lost_peer(error, cluster):
            journal.event("peer_lost", error=str(error))
            return PEER_LOST
        errors.report_error(error, journal, os.environ, secrets_of(configs.to_tree(config)))
        return USER_ERROR if isinstance(error, errors.USER_ERRORS) else FAILED
    finally:
        stop.uninstall()
        progress.stop()
        journal.event("ended")
        journal.close()
    # A worker that was asked has all of them give up an evaluation.
    return INTERRUPTED if stop.was_heeded or result.get("interrupted") else FINISHED


def _do_command(
    config: Config, cluster: Cluster, journal: Journal | NullJournal, progress: report.Progress, stop: StopRequest,
    started: float,
) -> Mapping[str, Any]:  # fmt: skip
    with journal.phase("import"), quiet_import(os.environ), garbage.not_searched():
        from runner import commands

        if config.model.classic is True:  # before the user's modules
            importlib.import_module("runner.classic")
            importlib.import_module("runner.classic.tensorflow1").watch_imports()
    result = commands.run(config, commands.Surroundings(journal, progress, stop, stop.install, started, cluster))
    journal.event("result", **result)
    return result


class _ProgressHandler(logging.Handler):
    """Log records as messages, so that they do not tear the progress line."""

    def __init__(self, progress: report.Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._progress.message(prefix + record.getMessage())


@contextmanager
def said_log(progress: report.Progress, *, is_quiet: bool) -> Iterator[None]:
    """Says what the runner logs while it is entered, from INFO on; from WARNING on where `is_quiet`."""
    logger = logging.getLogger("runner")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers = [_ProgressHandler(report.PlainProgress() if is_quiet else progress)]
    logger.setLevel(logging.WARNING if is_quiet else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers, logger.level, logger.propagate = before


@contextmanager
def quiet_import(env: Mapping[str, str]) -> Iterator[None]:
    """Hides what TensorFlow 2.21 writes to stderr before its log level counts; says it after all when it raises.

    Does nothing where TF_CPP_MIN_LOG_LEVEL asks for information (0 or 1).
    """
    if env.get("TF_CPP_MIN_LOG_LEVEL", "0") < "2":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except Interrupted:
            raise
        except BaseException:
            hidden.seek(0)
            os.write(kept, hidden.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def end(code: int) -> NoReturn:
    """Ends this process with `code`."""
    iterators = sys.modules.get("runner.iterators")
    if code != PEER_LOST:
        if iterators is None or iterators.have_ended():
            sys.exit(code)
        # Python would abort the process if TensorFlow came back from a deletion while it ends.
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer is lost: what ends TensorFlow in good order waits for the others


if __name__ == "__main__":
    keep_saying()
    end(main())
