"""The exports of a run: its exporters are called as it is evaluated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from runner.estimator import Estimator
from runner.exporters import Exporter


class Exports:
    """Calls exporters, in the one process of a run that writes.

    Attributes:
      paths: of what was written, in that order.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._paths: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """What was written and is still there."""
        return tuple(path for path in self._paths if os.path.exists(path))

    def call(
        self, exporters: Sequence[Exporter], checkpoint: str | None, results: Mapping[str, Any], *, is_final: bool
    ) -> None:
        """Has each of them export the checkpoint, if it wants to.

        Args:
          checkpoint: its path; None: the latest.
          results: what an evaluation found of it; empty where nobody evaluates.
          is_final: training has come to its end.
        """
        config = self._estimator.config
        if not (config.cluster.is_evaluator or (config.is_chief and self._estimator.agreement.is_chief)):
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
