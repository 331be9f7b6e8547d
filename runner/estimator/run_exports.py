"""The exports of a run, which follow evaluations and the end of training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.estimator.estimator import Estimator
from runner.export.exporters import Exporter
from runner.system.files import read_json, remove, write_json

FILE = "exporting.json"
"""File in model_dir that names the checkpoint that is being evaluated and exported."""


class RunExports:
    """Calls the exporters in the one process of a run that writes.

    Attributes:
      paths: paths of the SavedModels that were written and still exist, oldest first.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._paths: list[str] = []
        self._file = Path(estimator.model_dir) / FILE

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in self._paths if os.path.exists(path))

    @property
    def _is_chief(self) -> bool:
        return self._estimator.config.is_chief and self._estimator.collectives.is_chief

    def note_begin(self) -> None:
        """Note in model_dir that the latest checkpoint will be evaluated and exported.

        If the run is killed before `note_end`, it does both when it resumes.
        """
        if self._is_chief:
            write_json(self._file, {"checkpoint": os.path.basename(self._estimator.latest_checkpoint() or "")})

    def note_end(self) -> None:
        """Remove the note of `note_begin`, because the checkpoint was exported."""
        if self._is_chief:
            remove(self._file)

    def is_open(self, checkpoint: str) -> bool:
        """Report whether exports of this checkpoint began and were not completed."""
        return (read_json(self._file) or {}).get("checkpoint") == os.path.basename(checkpoint)

    def call(
        self, exporters: Sequence[Exporter], checkpoint: str | None, results: Mapping[str, Any], *, is_final: bool
    ) -> None:
        """Call each exporter with the checkpoint.

        Args:
          exporters: the exporters.
          checkpoint: path of the checkpoint; None: the latest.
          results: metrics of an evaluation; empty if there was none.
          is_final: training has ended.
        """
        config = self._estimator.config
        if not (config.place.is_evaluator or self._is_chief):
            return
        if not exporters:
            return
        path = checkpoint or self._estimator.latest_checkpoint()
        assert path is not None
        parent = config.export_dir or os.path.join(self._estimator.model_dir, "export")
        for exporter in exporters:
            folder = os.path.join(parent, exporter.name)
            try:
                written = exporter.export(self._estimator, folder, path, results, is_final)
            except Exception as error:
                error.add_note(f"while the exporter {exporter.name!r} exported {path}")
                raise
            if written is not None:
                self._paths.append(os.fsdecode(written))
