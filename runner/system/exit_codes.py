"""Exit codes, the status that belongs to each, and who chooses them.

| code | status in summary.json | MLflow | chosen by |
|---|---|---|---|
| 0 | finished | FINISHED | the task (`runner.task.main`): its command is complete |
| 1 | failed | FAILED | the task, by `code_of_error`; its supervisor, if the task could not report the reason |
| 2 | failed | FAILED | the task, by `code_of_error`; for a wrong config the command (`runner.launch.app`) |
| 3 | interrupted | SCHEDULED | the task: it was asked to stop, and the same command resumes |
| 75 | (all tasks start again) | | the task, for its supervisor only: it lost another task of its cluster |
| 76 | (all tasks start again) | | the task, for its supervisor only: a step of training needs smaller micro-batches |

If there are several tasks, `runner.launch.gang` decides whose code counts, and `runner.tracking.summary.outcome_of`
derives the run's code from it. The command exits with the worst code of its runs.
"""

from __future__ import annotations

import errno
import signal
from bdb import BdbQuit

from runner.system.child_process import STOP_SIGNALS
from runner.system.files import StorageError, is_disk_full

FINISHED = 0
FAILED = 1
USER_ERROR = 2
INTERRUPTED = 3
PEER_LOST = 75
OUT_OF_MEMORY = 76

CODES = {"finished": FINISHED, "failed": FAILED, "interrupted": INTERRUPTED}
"""Status of a run -> exit code, for a job of a sweep that ran in another process."""

USER_ERRORS = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, SyntaxError, FileNotFoundError,
    NotImplementedError, AssertionError,
)  # fmt: skip
"""Errors that mean a mistake in a config, model_fn or input_fn; `BY_USER` marks other errors raised in these."""

ENVIRONMENT_ERRORS = (
    "ResourceExhaustedError", "UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError",
    "InternalError", "DataLossError",
)  # fmt: skip
"""Names of TensorFlow's errors that are not mistakes of the code that raised them."""

BY_USER = "_runner_raised_by_user"
"""Attribute of an error that a user's function caused, set by `runner.model_fn.user_code`: the function, or None."""

CAN_SPLIT = "_runner_can_split_batch"
"""Attribute of an error of a training step that ran out of memory: whether the same step with more micro-batches
(`train.gradient_accumulation`) has smaller ones."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Report whether an error, or what it came from, says that this process got no more memory or threads.

    Where the address space is limited (`ulimit -v`), an import ends with an ImportError that has the text of the C
    library, and a thread with a RuntimeError.
    """
    while error is not None:
        is_of_kind = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if is_of_kind:
            return True
        text = str(error)
        if "failed to map segment" in text or "can't start new thread" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def code_of_error(error: Exception) -> int:
    """Return the exit code of a task that ends with `error`."""
    if is_out_of_memory(error):  # before the kinds of errors: the same line works on a larger machine
        return FAILED
    if isinstance(error, (*USER_ERRORS, BdbQuit)):
        return USER_ERROR
    if not hasattr(error, BY_USER):  # raised outside of the user's functions, and of no kind that a user causes
        return FAILED
    is_environment = isinstance(error, StorageError) or type(error).__name__ in ENVIRONMENT_ERRORS
    return FAILED if is_environment or is_disk_full(error) else USER_ERROR


def is_loss(code: int) -> bool:
    """Report whether a task with this exit code was lost for a reason outside of it, so that a restart may help."""
    return code == PEER_LOST or (code < 0 and -code not in STOP_SIGNALS)


def rank_of(code: int) -> int:
    """Return the rank of a task's exit code among those of its gang. The lowest rank is the likely cause of the others.

    SIGKILL has the lowest rank, because no task sends it. A step that ran out of memory comes before other errors: it
    breaks off the steps of other tasks, whose errors may not look like those of a lost peer.
    """
    ranks = {-signal.SIGKILL: 0, OUT_OF_MEMORY: 1, FAILED: 2, USER_ERROR: 2, INTERRUPTED: 3, PEER_LOST: 5}
    return ranks.get(code, 4)
