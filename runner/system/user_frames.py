"""Find the lines of the user's own code in tracebacks, and in texts of them."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)
"""Matches a frame in the text of a traceback, of autograph's "in user code" or TensorFlow's "Detected at node"."""

_MADE_BY_AUTOGRAPH = "__autograph_generated_file"


class Frame(NamedTuple):
    """A line of code that was running, or that made a failed operation."""

    filename: str
    lineno: int
    name: str

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.lineno).strip()
        return f"{self.filename}, line {self.lineno}, in {self.name}: {source}"


def user_frames(frames: Iterable[Any]) -> list[Frame]:
    """Return those of `frames` (innermost last) that are in the user's own code, not in the runner or a package.

    Code that calls the runner (a script, a test) is left out.

    Args:
      frames: each with the attributes of a Frame, as those of a traceback or of an operation have them.
    """
    runner_folder = str(Path(__file__).parents[1])
    other_prefixes = (*_folders_of_packages(), "<")  # of packages, and of code without a file, such as <string>
    found: list[Frame] = []
    was_in_runner = False
    for frame in frames:
        if frame.filename.startswith(runner_folder):
            if not was_in_runner:
                found = []  # the frames so far called the runner
            was_in_runner = True
        elif not frame.filename.startswith(other_prefixes) and _MADE_BY_AUTOGRAPH not in frame.filename:
            if Path(frame.filename).exists():
                found.append(Frame(frame.filename, frame.lineno or 0, frame.name))
    return found


def defined_at(function: Any) -> list[Frame]:
    """Return the place where the user defined a function, also below a partial and decorators; [] if not known."""
    if not callable(function):
        return []
    innermost = inspect.unwrap(without_partials(function))
    code = getattr(innermost, "__code__", None)
    if not code:
        return []
    return user_frames([Frame(code.co_filename, code.co_firstlineno, code.co_name)])


def without_partials(function: Any) -> Any:
    """Return what a functools.partial, or a partial of one, calls; anything else unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Return the dotted name of a function, of a partial's function, or of a callable object's class."""
    function = without_partials(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None) or "?"
    return f"{module}.{named.__qualname__}"


def failed_expression(entry: TracebackType) -> str:
    """Return the source of the expression that was computed in a frame of a traceback; "" if it is not known.

    It is not known where the source cannot be read, or Python was started with `-X no_debug_ranges`.
    """
    place = traceback.extract_tb(entry, limit=1)[0]
    if place.lineno is None or place.end_lineno is None:
        return ""
    if place.colno is None or place.end_colno is None:
        return ""
    numbers = range(place.lineno, place.end_lineno + 1)
    lines = [linecache.getline(place.filename, number).encode() for number in numbers]
    # Columns are counted in bytes. Cut the end first: if there is only one line, its end is counted from the beginning
    # of the whole line.
    lines[-1] = lines[-1][: place.end_colno]
    lines[0] = lines[0][place.colno :]
    return b"".join(lines).decode(errors="replace")


@functools.cache
def _folders_of_packages() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def frames_in(text: str) -> list[Frame]:
    """Return all frames in the text of a traceback."""
    return [Frame(found["file"], int(found["line"]), found["name"]) for found in FRAME.finditer(text)]
