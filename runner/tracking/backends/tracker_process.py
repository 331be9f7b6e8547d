"""The process of a user's tracker class: calls its methods as `user_tracker` asks.

python -m runner.tracking.backends.tracker_process
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.config import user_code
from runner.system.child_process import end_with_parent
from runner.system.standard_streams import FULL_ERROR
from runner.system.user_frames import Frame, user_frames
from runner.tracking.backends.user_tracker import GRACE_SECS, SOCKET
from runner.tracking.tracker import MAX_LINE, DatasetFacts, ExportedModel, Point

SHOWN_FRAMES = 3

_ARGUMENTS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "log_points": lambda points: ([Point(*point) for point in points],),
    "log_file": lambda path, folder: (Path(path), folder),
    "log_image": lambda name, path, step, time: (name, Path(path), step, time),
    "log_input": lambda facts: (DatasetFacts(**facts),),
    "log_model": lambda facts: (ExportedModel(**{**facts, "path": Path(facts["path"])}),),
}
"""Method -> function that makes its arguments from JSON values."""
_METHODS = ("start", *_ARGUMENTS, "set_tags", "end", "address")
_NEEDED = ("start", "log_points", "end")


def main() -> None:
    """Make the object, then call its methods, one per input line."""
    user_code.add_to_path(Path.cwd())
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    connection.set_inheritable(False)
    end_with_parent(os.environ, GRACE_SECS)
    tracker: Any = None
    with connection, connection.makefile("rwb") as lines:
        for line in lines:
            method, *args = json.loads(line)
            value, error = None, None
            try:
                if not method:
                    tracker = _build(*args)
                    value = [one for one in _METHODS if hasattr(tracker, one)]
                else:
                    known = _ARGUMENTS[method](*args) if method in _ARGUMENTS else args
                    value = getattr(tracker, method)(*known)
            except BaseException as raised:  # also for sys.exit: a crash of the tracker must not end the run
                error = _told(method, raised)
            try:
                lines.write(json.dumps([value, error], default=str).encode() + b"\n")
                lines.flush()
            except OSError:  # the other end no longer waits for the answer
                return


def _build(name: str, params: Mapping[str, Any]) -> Any:
    tracker = user_code.load("tracking.backend", name, "Tracker")(**params)
    missing = [one for one in _NEEDED if not callable(getattr(tracker, one, None))]
    if missing:
        raise TypeError(f"a {type(tracker).__name__} lacks {', '.join(missing)}, which a tracker needs")
    return tracker


def _told(method: str, error: BaseException) -> str:
    """Return an error of the class in one line, with the user's own lines of code, innermost first."""
    if os.environ.get(FULL_ERROR) == "1":
        traceback.print_exception(error)
    frames = [Frame(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(error.__traceback__)]
    own = [str(frame) for frame in reversed(user_frames(frames))][:SHOWN_FRAMES]
    what = f"{method} raised {type(error).__name__}" if method else f"cannot be made, {type(error).__name__}"
    first = f"{what}: {' '.join(str(error).split())}"
    return "\n  ".join([first if len(first) <= MAX_LINE else f"{first[: MAX_LINE - 1]}…", *own])


if __name__ == "__main__":
    main()
