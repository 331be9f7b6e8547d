"""What went wrong in a task: whose mistake it is, and what is said of it on the screen and in the journal."""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Mapping
from pathlib import Path

import runner
from runner.config.schema import ConfigError
from runner.config.user_code import UserCodeError
from runner.system.files import StorageError, is_disk_full
from runner.system.redaction import mask_text
from runner.system.standard_streams import FULL_ERROR
from runner.tracking.exit_codes import USER_ERRORS
from runner.tracking.journal import Journal, NullJournal

QUIET_ERRORS = "RUNNER_QUIET_ERRORS"
"""The environment variable of a task whose errors its supervisor says: several may say the same."""


def report_error(error: Exception, journal: Journal | NullJournal, env: Mapping[str, str], secrets: set[str]) -> None:
    """Say what went wrong, to the person and to the journal.

    A mistake of the user's, and a folder that can no longer be written in, is one message and the line of their code;
    anything else comes with its traceback, and so does everything with HYDRA_FULL_ERROR=1. Where the supervisor is to
    say it, only the journal is told.
    """
    said = str(error) if isinstance(error, ConfigError | UserCodeError) else f"{type(error).__name__}: {error}"
    said = mask_text(re.sub(r"\x1b\[[0-9;]*m", "", said), secrets)  # Keras makes parts of its messages bold
    trace = mask_text("".join(traceback.format_exception(error)), secrets)
    is_clear = isinstance(error, (*USER_ERRORS, StorageError)) or is_disk_full(error) or hasattr(error, "is_clear")
    if is_clear and env.get(FULL_ERROR) != "1":
        lines = [f"runner: {said}", *(mask_text(note, secrets) for note in getattr(error, "__notes__", ()))]
    else:
        lines = [trace.rstrip("\n")]  # it ends with the message
    frame = user_frame(error)
    if isinstance(error, SyntaxError) and error.text:  # of a file that never ran: no frame is in it
        lines.append(f"  in {error.filename}, line {error.lineno}: {error.text.strip()}")
    elif frame is not None:
        lines.append(f"  in {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}")
    facts = {"error": textwrap.shorten(said, 300, placeholder="..."), "traceback": trace}
    if env.get(QUIET_ERRORS):
        journal.event("error", **facts, said="\n".join(lines))
        return
    with contextlib.suppress(OSError):  # the disk is full: the person hears of it all the same
        journal.event("error", **facts)
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost line of the user's own code in an error's traceback; None when there is none."""
    ours = str(Path(runner.__file__).parent)
    installed = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, *installed, "<")) and Path(frame.filename).exists()
    ]
    return frames[-1] if frames else None
