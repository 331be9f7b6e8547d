"""Describes the complete checkpoints of a model_dir, for assertions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from runner.checkpoint_files import layout, manifest
from runner.checkpoint_files.manifest import MANIFEST
from runner.system.files import RUNNER_FILES


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint on disk.

    Attributes:
      path: the prefix that Savers and Readers take.
      time: when it was written, in seconds since 1970; of one without a manifest, when its index was.
      files: their names, the index first.
      bytes: of all files together.
      input: worker -> "saved" (its iterator's state is here) or "skip" (it could not be saved); empty for TF1's.
    """

    step: int
    path: str
    time: float
    files: tuple[str, ...]
    bytes: int
    input: Mapping[str, str] = dataclasses.field(default_factory=dict)


def list_checkpoints(model_dir: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The complete checkpoints of `model_dir`, by step: ours, and those that tf.estimator or a Saver left there."""
    directory = Path(model_dir)
    infos = (_describe(directory, name) for name in layout.groups(directory))
    return sorted((info for info in infos if info), key=lambda info: info.step)


def _describe(directory: Path, name: str) -> CheckpointInfo | None:
    step = layout.step_of(name)
    if step is None or manifest.what_is_missing(directory / name) is not None:
        return None
    written = manifest.read_manifest(directory / name) or {}
    sizes = manifest.sizes_of(directory / name)
    ours = [*written.get("files", sizes), *([f"{name}{MANIFEST}"] if written else [])]
    names = sorted(ours, key=lambda file: (file != f"{name}.index", file))
    return CheckpointInfo(
        step=step,
        path=str(directory / name),
        time=manifest.time_of(directory / name) or 0.0,
        files=tuple(names),
        bytes=sum(sizes.get(file, 0) for file in names),
        input=written.get("input", {}),
    )


def move_as_before(model_dir: Path) -> None:
    """Move the runner's own files to where revision f63a0a9 wrote them: beside the checkpoints and the exports."""
    for file in (model_dir / RUNNER_FILES).iterdir():
        if file.name.startswith("exports."):
            file.replace(model_dir / "export" / file.name.split(".")[1] / "exports.json")
        else:
            file.replace(model_dir / file.name)
    (model_dir / RUNNER_FILES).rmdir()
