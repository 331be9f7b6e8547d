"""Exit codes, the status that belongs to each, and who chooses them.

| code | status in summary.json | MLflow | chosen by |
|---|---|---|---|
| 0 | finished | FINISHED | the task (`runner.task.main`): its command is complete |
| 1 | failed | FAILED | the task, by `code_of_error`; its supervisor, if the task could not report the reason |
| 2 | failed | FAILED | the task, by `code_of_error`; for a wrong config the command (`runner.launch.app`) |
| 3 | interrupted | KILLED | the task: it was asked to stop, and the same command resumes |
| 75 | (all tasks start again) | | the task, for its supervisor only: it lost another task of its cluster |

If there are several tasks, `runner.launch.gang` decides whose code counts, and `outcome_of` derives the run's code from
it. The command exits with the worst code of its runs.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.system.child_process import STOP_SIGNALS, describe_exit
from runner.system.files import StorageError, is_disk_full

FINISHED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 3
PEER_LOST = 75

CODES = {"finished": FINISHED, "failed": FAILED, "interrupted": INTERRUPTED}
"""Status of a run -> exit code, for a job of a sweep that ran in another process."""

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}

USER_ERRORS = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, SyntaxError, FileNotFoundError,
    NotImplementedError, AssertionError,
)  # fmt: skip
"""Errors that mean a mistake in a config, model_fn or input_fn; `user_code` marks other errors raised in these."""


ENVIRONMENT_ERRORS = (
    "ResourceExhaustedError", "UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError",
    "InternalError", "DataLossError",
)  # fmt: skip
"""Names of TensorFlow's errors that are not mistakes of the code that raised them."""

BY_USER = "_runner_raised_by_user"
"""Attribute of an error that a user's function caused: the function, or None."""


@contextlib.contextmanager
def user_code(function: Any = None) -> Iterator[None]:
    """Mark errors raised inside this context as the user's mistakes: exit code 2.

    Args:
      function: the user's function that is called, or whose result is used; None: not known.
    """
    try:
        yield
    except Exception as error:
        setattr(error, BY_USER, function)
        raise


def is_out_of_memory(error: BaseException | None) -> bool:
    """Report whether an error, or what it came from, says that this process got no more memory or threads.

    Where the address space is limited (`ulimit -v`), an import ends with an ImportError that has the text of the C
    library, and a thread with a RuntimeError.
    """
    while error is not None:
        is_of_kind = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if is_of_kind or any(text in str(error) for text in ("failed to map segment", "can't start new thread")):
            return True
        error = error.__cause__ or error.__context__
    return False


def code_of_error(error: Exception) -> int:
    """Return the exit code of a task that ends with `error`."""
    if is_out_of_memory(error):  # before the kinds of errors: the same line works on a larger machine
        return FAILED
    if isinstance(error, (*USER_ERRORS, BdbQuit)):
        return USER_ERROR
    is_environment = isinstance(error, StorageError) or type(error).__name__ in ENVIRONMENT_ERRORS
    return USER_ERROR if hasattr(error, BY_USER) and not is_environment and not is_disk_full(error) else FAILED


def comes_from_input(error: Exception) -> bool:
    """Report whether an operation of the input's dataset failed while a step read it."""
    return re.search(r"IteratorGetNext|Iterator::", str(error)) is not None


def is_loss(code: int) -> bool:
    """Report whether a task with this exit code was lost for a reason outside of it, so that a restart may help."""
    return code == PEER_LOST or (code < 0 and -code not in STOP_SIGNALS)


def rank_of(code: int) -> int:
    """Return the rank of a task's exit code among those of its gang. The lowest rank is the likely cause of the others.

    SIGKILL has the lowest rank, because no task sends it.
    """
    return {-signal.SIGKILL: 0, FAILED: 1, USER_ERROR: 1, INTERRUPTED: 2, PEER_LOST: 4}.get(code, 3)


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
      code: its exit code.
      status: running, finished, failed or interrupted (resumable).
      error: the error in one line; None if there was none.
      facts: what the tasks noted in their journals, from `runner.tracking.summary.facts_in`; `answer` is the object of
        run.output=json.
      was_killed: the run failed because it was asked to stop before it could save; MLflow calls it KILLED.
    """

    code: int
    status: str
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    was_killed: bool = False


STILL_RUNNING = Outcome(FAILED, "running")


def outcome_of(code: int, stop_requested: bool, facts: Mapping[str, Any], reason: str = "") -> Outcome:
    """Return the outcome of a run from the exit code of the task that decided it.

    Args:
      code: that exit code.
      stop_requested: the run was asked to stop.
      facts: facts from the journals; `error` is the last error that a task noted.
      reason: what went wrong, or who was asked to stop, if known; '': taken from the journal or the exit code.
    """
    facts = dict(facts)
    noted = facts.pop("error", None)
    if code == FINISHED:
        return Outcome(FINISHED, "finished", None, facts)
    if code == INTERRUPTED:
        return Outcome(INTERRUPTED, "interrupted", None, {**facts, "interrupted_by": reason or None})
    if stop_requested and facts.get("checkpoint"):
        return Outcome(INTERRUPTED, "interrupted", None, facts)
    if stop_requested:
        return Outcome(FAILED, "failed", noted or "stopped before it could save", facts, was_killed=True)
    error = reason or noted
    if code == USER_ERROR:
        return Outcome(USER_ERROR, "failed", error, facts)
    return Outcome(FAILED, "failed", error or f"the task {describe_exit(code)}", facts)
