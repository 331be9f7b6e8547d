"""Where the training inputs of several workers stand, on their way into one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from runner.agreement import Agreement
from runner.checkpoints import CheckpointWriter

_NONE, _SKIPPED, _SAVED = 0, 1, 2


class InputStates(Protocol):
    """See `OfOne` and `OfEach`."""

    def of_others(self, step: int, iterators: Mapping[int, Any]) -> Mapping[int, Path | None]:
        """For `CheckpointWriter.write`, what other workers have left for the chief. All workers call it together.

        Args:
          iterators: of this worker, by its index.
        """


class OfOne:
    """All workers read the same: the chief's input stands where all of them stand."""

    def of_others(self, step: int, iterators: Mapping[int, Any]) -> Mapping[int, Path | None]:
        return {}


class OfEach:
    """Each worker reads data of its own, and leaves where it stands to the chief before that writes the rest."""

    def __init__(self, writer: CheckpointWriter, agreement: Agreement) -> None:
        self._writer, self._agreement = writer, agreement
        if agreement.is_chief:
            writer.remove_left_inputs()

    def of_others(self, step: int, iterators: Mapping[int, Any]) -> Mapping[int, Path | None]:
        kinds = [float(_NONE)] * self._agreement.num_workers
        if not self._agreement.is_chief:
            for worker, state in self._writer.serialize(iterators).items():
                kinds[worker] = _SKIPPED if state is None else _SAVED
                if state is not None:
                    self._writer.leave_input(step, worker, state)
        found = dict(enumerate(self._agreement.sum(kinds)))
        return {
            worker: self._writer.left_input(step, worker) if kind == _SAVED else None
            for worker, kind in found.items()
            if kind != _NONE
        }
