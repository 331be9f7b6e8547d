"""The exports of a run: calls its exporters after evaluations and at the end of training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from runner.estimator.estimator import Estimator
from runner.export.exporters import Exporter


class RunExports:
    """Calls exporters, in the one process of a run that writes.

    Attributes:
      paths: of the SavedModels that were written and still exist, in that order.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._paths: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in self._paths if os.path.exists(path))

    def call(
        self, exporters: Sequence[Exporter], checkpoint: str | None, results: Mapping[str, Any], *, is_final: bool
    ) -> None:
        """Call each exporter with the checkpoint.

        Args:
          checkpoint: its path; None: the latest.
          results: the metrics of an evaluation; empty where nobody evaluates.
          is_final: whether training has ended.
        """
        config = self._estimator.config
        if not (config.cluster.is_evaluator or (config.is_chief and self._estimator.collectives.is_chief)):
            return
        path = checkpoint or (self._estimator.latest_checkpoint() if exporters else None)
        for exporter in exporters:
            assert path is not None
            folder = os.path.join(config.export_dir or os.path.join(self._estimator.model_dir, "export"), exporter.name)
            try:
                written = exporter.export(self._estimator, folder, path, results, is_final)
            except Exception as error:
                error.add_note(f"in the exporter {exporter.name!r}, of {path}")
                raise
            if written is not None:
                self._paths.append(os.fsdecode(written))
