"""Record a run in a user's class. It is called in a process of its own (`runner.tracking.ship --to <its name>`), so it
may crash, hang, print or call sys.exit.
"""

from __future__ import annotations

import os
import secrets
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from runner.config import user_code
from runner.config.schema import TrackingBackend
from runner.system.standard_streams import FULL_ERROR
from runner.system.user_frames import user_frames
from runner.tracking.tracker import MAX_LINE, DatasetFacts, ExportedModel, Point, Tracker, TrackerError

SHOWN_FRAMES = 3
_NEEDED = ("start", "log_points", "end")


@runtime_checkable
class RunTracker(Protocol):
    """The interface of a user's class that records runs: `tracking.backend=my_pkg.trackers.Mine`.

    An object of the class is created in a separate process, with its `params` as keyword arguments. Its methods are
    called there, one at a time. If a method raises an error, the error is reported with your line of code, training
    continues, and the call is repeated later. The class may also have the methods `set_tags(tags)`, `log_file(path,
    folder)`, `log_image(name, path, step, time)`, `log_input(dataset)`, `log_model(model)` and `address()`, which are
    described in `runner.tracking.tracker.Tracker`.
    """

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        """Begin a run, or continue one.

        Args:
          run_id: the value that `start` returned for this run earlier; None: the run is new.
          name: name of the run.
          params, tags: facts about the run; empty for a command that only reads it (evaluate, predict, export).

        Returns:
          An id that identifies the run when it is continued; None: the runner chooses one.
        """
        ...

    def log_points(self, points: Sequence[Point]) -> None:
        """Record metrics, each a `Point(name, value, step, time)`, in order.

        Each point is passed once, with one exception: if a process is killed between a call and its note in
        shipped.<tracker>.json, the points of that call are passed again, with equal values.
        """
        ...

    def end(self, status: str) -> None:
        """End the run with the status FINISHED, FAILED, SCHEDULED (interrupted, and can go on) or KILLED.

        No other method is called afterwards.
        """
        ...


class UserTracker(Tracker):
    """Calls the methods of a user's class that it has.

    Args:
      backend: the class and its params.
      name: name of the run, for a command that only reads it.
    """

    def __init__(self, backend: TrackingBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._object: Any = None

    def prepare(self) -> None:
        if self._object is None:
            self._object = self._call_user_code("", self._build)

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        self.prepare()
        chosen = self._call_method("start", run_id, name, params, tags)
        return str(chosen or run_id or secrets.token_hex(8))

    def join(self, run_id: str) -> bool:
        self.start(run_id, self._name, {}, {})
        return True

    def log_points(self, points: Sequence[Point]) -> None:
        self._call_method("log_points", points)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._call_method("set_tags", tags)

    def log_file(self, path: Path, folder: str = "") -> None:
        self._call_method("log_file", path, folder)

    def log_image(self, name: str, path: Path, step: int, time: float) -> None:
        self._call_method("log_image", name, path, step, time)

    def log_input(self, dataset: DatasetFacts) -> None:
        self._call_method("log_input", dataset)

    def log_model(self, model: ExportedModel) -> None:
        self._call_method("log_model", model)

    def end(self, status: str, time: float) -> None:
        self._call_method("end", status)

    leave = end

    def address(self) -> str | None:
        address = self._call_method("address")
        return None if address is None else str(address)

    def _build(self) -> Any:
        users_class = user_code.load("tracking.backend", self._backend.name, "Tracker")
        tracker = users_class(**self._backend.params)
        missing = [method for method in _NEEDED if not callable(getattr(tracker, method, None))]
        if missing:
            raise TypeError(f"a {type(tracker).__name__} lacks {', '.join(missing)}, which a tracker needs")
        return tracker

    def _call_method(self, method: str, *args: Any) -> Any:
        return self._call_user_code(method, getattr(self._object, method, lambda *args: None), *args)

    def _call_user_code(self, method: str, function: Any, *args: Any) -> Any:
        """Call user code.

        Raises:
          TrackerError: it failed; also for sys.exit. The message has the user's own lines of code, innermost first.
        """
        try:
            return function(*args)
        except BaseException as error:
            if os.environ.get(FULL_ERROR) == "1":
                traceback.print_exception(error)
            frames = user_frames(traceback.extract_tb(error.__traceback__))
            own_lines = [str(frame) for frame in reversed(frames)][:SHOWN_FRAMES]
            kind = type(error).__name__
            what = f"{method} raised {kind}" if method else f"cannot be made, {kind}"
            message = " ".join(str(error).split())
            first_line = f"{what}: {message}"
            if len(first_line) > MAX_LINE:
                first_line = f"{first_line[: MAX_LINE - 1]}…"
            raise TrackerError("\n  ".join([first_line, *own_lines])) from error
