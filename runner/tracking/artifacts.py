"""Files that a user's code keeps with the run: `runner.log_artifact`, `runner.log_figure`, images of summaries.

They are copied into `model_dir/artifacts`, so that they are there when a tracker that was away comes back, and the
journal tells the supervisor of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.tracking.journal import ARTIFACT, IMAGE, Journal, NullJournal

_log = logging.getLogger(__name__)

FOLDER = "artifacts"


@dataclass(frozen=True)
class Artifacts:
    """Where a process keeps files of its run.

    Attributes:
      is_kept: False in a worker that is not the chief, which calls the same functions.
      keeps_images: those of summaries, too, which TensorBoard has anyway.
    """

    model_dir: Path
    journal: Journal | NullJournal
    is_kept: bool = True
    keeps_images: bool = True

    def copy(self, path: Path, folder: str) -> None:
        """Keep a copy of a file or a folder."""
        target = self._place(folder, path.name)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        elif path.resolve() != target.resolve():
            shutil.copy2(path, target)
        self._note(target, folder)

    def save(self, figure: Any, name: str) -> None:
        """Write a figure of matplotlib or plotly."""
        folder, _, file = name.rpartition("/")
        is_plotly = hasattr(figure, "write_html")
        target = self._place(folder, file if Path(file).suffix else f"{file}{'.html' if is_plotly else '.png'}")
        if is_plotly and target.suffix == ".html":
            figure.write_html(str(target), include_plotlyjs="cdn")
        elif is_plotly:
            figure.write_image(str(target))
        else:
            figure.savefig(target)
        self._note(target, folder)

    def image(self, name: str, png: bytes, step: int) -> None:
        """Keep a PNG of a step."""
        clean = re.sub(r"[^\w\-./ ]", "_", name).strip("/. ") or "image"
        target = self._place(f"images/{clean}", f"{step}.png")
        target.write_bytes(png)
        self.journal.event(IMAGE, name=clean, path=str(target.relative_to(self.model_dir)), step=step)

    def _place(self, folder: str, name: str) -> Path:
        place = self.model_dir / FOLDER / folder
        place.mkdir(parents=True, exist_ok=True)
        return place / name

    def _note(self, target: Path, folder: str) -> None:
        self.journal.event(ARTIFACT, path=str(target.relative_to(self.model_dir)), folder=folder)


_kept: list[Artifacts] = []
"""Of this process: a list, since threads of TensorFlow inherit no ContextVar. The last one counts."""


@contextlib.contextmanager
def keeping(artifacts: Artifacts) -> Iterator[None]:
    """Meanwhile the files of `log_artifact` and `log_figure` go there."""
    _kept.append(artifacts)
    try:
        yield
    finally:
        _kept.remove(artifacts)


def current() -> Artifacts | None:
    """Return where this process keeps files of its run; None where it keeps none."""
    return _kept[-1] if _kept and _kept[-1].is_kept else None


def log_artifact(path: str | os.PathLike[str], folder: str = "") -> None:
    """Keep a copy of a file, or of a folder, with the run: in `model_dir/artifacts`, and in MLflow.

    Call it where Python runs: in a hook, an input function, a `tf.py_function`. In a cluster the chief keeps what it is
    given, and an evaluator; in other workers the call does nothing.

    Args:
      path: of what is there now; a later change of it is not seen.
      folder: of the run's files; '': the top. A file of the same name takes the place of an earlier one.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: the folder is none below the run's.
    """
    artifacts = _artifacts("log_artifact")
    if not Path(path).exists():
        raise FileNotFoundError(f"runner.log_artifact({os.fspath(path)!r}): there is no such file.")
    _check("log_artifact", "folder", folder)
    if artifacts is not None:
        artifacts.copy(Path(path), folder)


def log_figure(figure: Any, name: str) -> None:
    """Keep a figure with the run: in `model_dir/artifacts`, and in MLflow. See `log_artifact` for where to call it.

    Args:
      figure: of matplotlib (`savefig`) or plotly (`write_html`).
      name: of its file; a suffix says the format, else it is .png, of plotly .html. One of the same name takes the
        place of an earlier one: `f"confusion/{step:06}"` keeps one a step.

    Raises:
      ValueError: it is no figure, or the name is no path below the run's files.
    """
    if not (hasattr(figure, "savefig") or hasattr(figure, "write_html")):
        raise ValueError(f"runner.log_figure: a {type(figure).__name__} is no figure of matplotlib or plotly.")
    _check("log_figure", "name", name)
    if not name.rpartition("/")[2]:
        raise ValueError(f"runner.log_figure(name={name!r}): give the name of a file, such as 'confusion'.")
    artifacts = _artifacts("log_figure")
    if artifacts is not None:
        artifacts.save(figure, name)


def _artifacts(function: str) -> Artifacts | None:
    if not _kept:
        _log.warning("runner.%s has no effect here: it is for code that a run calls (python -m runner).", function)
    return current()


def _check(function: str, argument: str, path: str) -> None:
    if path.startswith("/") or "\\" in path or ".." in path.split("/"):
        raise ValueError(f"runner.{function}({argument}={path!r}): give a path below the run's files.")
