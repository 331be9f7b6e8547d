"""Files that the user's code keeps with the run: `runner.log_artifact`, `runner.log_figure`, images of summaries.

They are copied into `model_dir/artifacts`, so that they still exist when a tracker that could not be reached is back. A
line in the journal tells the supervisor of each file.
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
    """Keeps the files that one process of a run passes to `log_artifact` and `log_figure`.

    Attributes:
      is_kept: False in a worker other than the chief: it calls the same functions, but keeps no files.
      keeps_images: also keep images of summaries, which TensorBoard has in any case.
    """

    model_dir: Path
    journal: Journal | NullJournal
    is_kept: bool = True
    keeps_images: bool = True

    def copy(self, path: Path, folder: str) -> None:
        """Keep a copy of a file or a folder."""
        target = self._make_target(folder, path.name)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        elif path.resolve() != target.resolve():
            shutil.copy2(path, target)
        self._record_file(target, folder)

    def save(self, figure: Any, name: str) -> None:
        """Write a figure of matplotlib or plotly to the file `name`, which gets a suffix if it has none."""
        folder, _, file = name.rpartition("/")
        is_plotly = hasattr(figure, "write_html")
        if not Path(file).suffix:
            file += ".html" if is_plotly else ".png"
        target = self._make_target(folder, file)
        if is_plotly and target.suffix == ".html":
            figure.write_html(str(target), include_plotlyjs="cdn")
        elif is_plotly:
            figure.write_image(str(target))
        else:
            figure.savefig(target)
        self._record_file(target, folder)

    def image(self, name: str, png: bytes, step: int) -> None:
        """Keep a PNG of a step."""
        clean = re.sub(r"[^\w\-./ ]", "_", name).strip("/. ") or "image"
        target = self._make_target(f"images/{clean}", f"{step}.png")
        target.write_bytes(png)
        self.journal.event(IMAGE, name=clean, path=str(target.relative_to(self.model_dir)), step=step)

    def _make_target(self, folder: str, name: str) -> Path:
        parent = self.model_dir / FOLDER / folder
        parent.mkdir(parents=True, exist_ok=True)
        return parent / name

    def _record_file(self, target: Path, folder: str) -> None:
        self.journal.event(ARTIFACT, path=str(target.relative_to(self.model_dir)), folder=folder)


_kept: list[Artifacts] = []
"""The Artifacts of this process; the current one is last. Not a ContextVar, because TensorFlow's threads inherit none.
"""


@contextlib.contextmanager
def keeping(artifacts: Artifacts) -> Iterator[None]:
    """Keep the files of `log_artifact` and `log_figure` in `artifacts` inside this context."""
    _kept.append(artifacts)
    try:
        yield
    finally:
        _kept.remove(artifacts)


def current() -> Artifacts | None:
    """Return the object that keeps files of this process's run; None: there is none."""
    if not _kept or not _kept[-1].is_kept:
        return None
    return _kept[-1]


def log_artifact(path: str | os.PathLike[str], folder: str = "") -> None:
    """Keep a copy of a file or folder with the run: in `model_dir/artifacts`, and in MLflow.

    Call it from Python that runs: a hook, an input function, a `tf.py_function`. In a cluster, the chief and an
    evaluator keep their files; in other workers the call does nothing.

    Args:
      path: the file or folder; it is copied now, so later changes are not kept.
      folder: folder among the run's files; '': the top. A file replaces an earlier file of the same name.

    Raises:
      FileNotFoundError: `path` does not exist.
      ValueError: `folder` is not below the run's files.
    """
    artifacts = _find_artifacts("log_artifact")
    if not Path(path).exists():
        raise FileNotFoundError(f"runner.log_artifact({os.fspath(path)!r}): no such file.")
    _check_path("log_artifact", "folder", folder)
    if artifacts is not None:
        artifacts.copy(Path(path), folder)


def log_figure(figure: Any, name: str) -> None:
    """Keep a figure with the run: in `model_dir/artifacts`, and in MLflow. Where to call it: see `log_artifact`.

    Args:
      figure: a figure of matplotlib (`savefig`) or plotly (`write_html`).
      name: name of its file; the suffix selects the format, default .png, for plotly .html. A figure replaces an
        earlier one of the same name; `f"confusion/{step:06}"` keeps one per step.

    Raises:
      ValueError: `figure` is not a figure, or `name` is not a path below the run's files.
    """
    if not (hasattr(figure, "savefig") or hasattr(figure, "write_html")):
        raise ValueError(f"runner.log_figure: a {type(figure).__name__} is not a figure of matplotlib or plotly.")
    _check_path("log_figure", "name", name)
    if not name.rpartition("/")[2]:
        raise ValueError(f"runner.log_figure(name={name!r}): name must be the name of a file, such as 'confusion'.")
    artifacts = _find_artifacts("log_figure")
    if artifacts is not None:
        artifacts.save(figure, name)


def _find_artifacts(function: str) -> Artifacts | None:
    if not _kept:
        _log.warning("runner.%s has no effect outside a run (python -m runner).", function)
    return current()


def _check_path(function: str, argument: str, path: str) -> None:
    if path.startswith("/") or "\\" in path or ".." in path.split("/"):
        raise ValueError(f"runner.{function}({argument}={path!r}): {argument} must be a path below the run's files.")
