"""Report an error of a task on the screen and in the journal, with the lines of the user's own code."""

from __future__ import annotations

import bdb
import contextlib
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.config.schema import ConfigError
from runner.system.exit_codes import BY_USER, CAN_SPLIT, USER_ERROR, code_of_error, is_out_of_memory
from runner.system.files import StorageError, is_disk_full
from runner.system.redaction import mask_text
from runner.system.standard_streams import FULL_ERROR
from runner.system.user_frames import FRAME, Frame, defined_at, frames_in, user_frames
from runner.tracking.journal import Journal

QUIET_ERRORS = "RUNNER_QUIET_ERRORS"
"""Environment variable of a task whose errors the supervisor prints, because several tasks may have the same."""

NO_DEBUGGER = (
    "a breakpoint, but training runs in a process without a terminal. Set run.inline=true to debug in this process "
    "(run.eager=true: tensors of model_fn have values), or PYTHONBREAKPOINT for a debugger that needs no terminal."
)


# What an error says first if it comes from reading a group of batches, a map of the runner itself
# (runner/data/batch_groups.py): the user has not written that map.
_OF_GROUPS = r"Error in user-defined function passed to \S+ transformation with iterator: \S+::Concatenate\[\d\]::Map: "


class Explained(NamedTuple):
    """An error in words for the user.

    Attributes:
      said: what is wrong.
      frames: frames of the user's own code, innermost last.
      operation: the graph operation that failed, which `frames` created; '': the error is not that of an operation.
    """

    said: str
    frames: Sequence[Frame] = ()
    operation: str = ""


def report_error(error: Exception, journal: Journal, env: Mapping[str, str], secrets: set[str]) -> None:
    """Report an error to the user and to the journal.

    Some errors need no traceback of the runner: a user's mistake, a failed operation of the user, a folder that can no
    longer be written. They are reported as one message with the lines of the user's code. All others come with a
    traceback, and with HYDRA_FULL_ERROR=1 every error does. If the supervisor prints the errors, only the journal is
    written here.

    Args:
      error: the error.
      journal: the journal of this task.
      env: the environment.
      secrets: texts to mask.
    """
    found = explain(error)
    said = mask_text(found.said, secrets)
    facts = _facts(error, said, secrets)
    is_of_user = _is_clear(error) or bool(found.operation and found.frames)
    is_short = is_of_user and env.get(FULL_ERROR) != "1"
    if is_short:
        lines = [f"runner: {said}"]
        lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    else:
        lines = [facts["traceback"].rstrip("\n")]  # it ends with the message
    lines += _places_of(error, found)
    if is_out_of_memory(error):
        lines.append("  This process got no more memory. Its limits: ulimit -a, and those of its container or job.")
    if is_short and (found.frames or found.operation):
        lines.append("  HYDRA_FULL_ERROR=1 shows the whole traceback.")
    lines = [mask_text(line, secrets) for line in lines]
    if env.get(QUIET_ERRORS):
        journal.event("error", **facts, said="\n".join(lines))
        return
    with contextlib.suppress(OSError):  # the disk is full; the user still gets the message
        journal.event("error", **facts)
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _is_clear(error: Exception) -> bool:
    """Report whether the message of an error says all that its user needs."""
    is_nan = any(kind.__name__ == "NanLossDuringTrainingError" for kind in type(error).__mro__)
    if is_nan or hasattr(error, "is_clear"):
        return True
    if code_of_error(error) == USER_ERROR:
        return True
    is_of_storage = isinstance(error, StorageError) or is_disk_full(error)
    return is_of_storage or is_out_of_memory(error)


def _places_of(error: Exception, found: Explained) -> list[str]:
    """Return lines with the places in the user's code to which an error belongs."""
    if isinstance(error, SyntaxError) and error.text:  # the file never ran, so it has no frame
        return [f"  in {error.filename}, line {error.lineno}: {error.text.strip()}"]
    places = [f"  in {frame}" for frame in found.frames]
    if found.operation and found.frames:
        return [f"  operation {found.operation}, made", *places]
    return places


def note_out_of_memory(error: Exception, journal: Journal, secrets: set[str]) -> None:
    """Note the error of a step for which this task is started again, in smaller parts: its supervisor prints it."""
    said = mask_text(explain(error).said, secrets)
    journal.event("out_of_memory", **_facts(error, said, secrets))


def _facts(error: Exception, said: str, secrets: set[str]) -> dict[str, Any]:
    """Return what the journal says of an error."""
    trace = mask_text("".join(traceback.format_exception(error)), secrets)
    facts: dict[str, Any] = {"error": textwrap.shorten(said, 300, placeholder="..."), "traceback": trace}
    if hasattr(error, CAN_SPLIT):
        facts["out_of_memory"] = True
    return facts


def explain(error: BaseException) -> Explained:
    """Return the message of an error and the lines of the user's code that belong to it."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Keras makes parts of its messages bold
    frames = user_frames(traceback.extract_tb(error.__traceback__))
    if isinstance(error, ConfigError):
        return Explained(said, frames)
    if isinstance(error, bdb.BdbQuit):  # the user quit, or stdin is not a terminal and so at its end
        is_typed = sys.stdin is not None and sys.stdin.isatty()
        why = "the debugger was quit." if is_typed else NO_DEBUGGER
        return Explained(why, frames[-1:])
    kind = type(error).__name__
    # An error of what the function returned (a compiled model, a spec) is not raised in its lines.
    frames = frames or defined_at(getattr(error, BY_USER, None))
    if type(error).__module__.startswith("tensorflow.") and hasattr(error, "node_def"):
        return _explain_operation(said, kind, frames)
    if "in user code:" in said:  # autograph puts the frames into the message
        before, _, of_user = said.partition("in user code:")
        inner = user_frames(frames_in(of_user))
        paragraphs = re.split(r"\n\s*\n", textwrap.dedent(of_user).strip())
        kind_in_front = re.compile(rf"^\s*(\w+\.)*{kind}: ")
        what = kind_in_front.sub("", textwrap.dedent(paragraphs[-1])).strip()
        return Explained(f"{kind}: {before}{what}", inner or frames)
    return Explained(f"{kind}: {said}", frames)


def refuse_breakpoint(*arguments: Any, **keywords: Any) -> None:
    """Replace `breakpoint()` if stdin is not a terminal: pdb would read the end of its input, and quit."""
    raise bdb.BdbQuit


def _explain_operation(said: str, kind: str, calling: Sequence[Frame]) -> Explained:
    """Explain the error of a graph operation that failed while it ran.

    Its text is "Graph execution error: Detected at node X defined at (most recent call last): <frames> <message>
    [[{{node X}}]] [[<nodes that waited for it>]]". If a Python function failed, the message has its error and frames.

    Args:
      calling: the user's frames that called it, if it ran eagerly, or else the place of the user's function.
    """
    node = re.search(r"\{\{node ([^}]+)\}\}|Detected at node '?([^' ]+)'? defined at", said)
    frames = user_frames(frames_in(said)) or calling
    # If several replicas failed, each has its frames, and then the first error says what the others say.
    text = re.sub(r"\A.*?Detected at node.*defined at \(most recent call last\):\n", "", said, flags=re.DOTALL)
    text = re.sub(r"\{\{function_node [^}]*\}\} ?|<stack traces.*>\n|\d+ root error.*\n.*0\) \w+: +", "", text)
    # After the message come the nodes that waited for it. If a Python function failed, its traceback is in the message.
    text, _, of_python = text.partition("\n\t [[")[0].partition("Traceback (most recent call last):")
    text = re.sub(r" ?\[Op:\w+\].*\Z", "", FRAME.sub("", text), flags=re.DOTALL)
    text = re.sub(_OF_GROUPS, "", text, count=1)
    text = re.sub(r"Error in user-defined function passed to (\w+?)(Dataset)?:\d+ transformation with iterator: \S+ ",
                  r"in Dataset.\1: ", text)  # fmt: skip
    text = " ".join(text.split())
    if of_python:
        return Explained(text, frames)
    operation = ""
    if node is not None:
        operation = node[1] or node[2]
    return Explained(f"{kind}: {text}", frames, operation)
