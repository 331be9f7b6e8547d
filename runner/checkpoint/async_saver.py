"""Saving while training goes on: a copy in memory, and a thread that writes it."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from runner.checkpoint import manifest
from runner.checkpoint.snapshot import Snapshot, SnapshotMemory
from runner.checkpoint.writer import CheckpointWriter
from runner.distribute.collectives import Collectives

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

    def __init__(self, writer: CheckpointWriter, collectives: Collectives) -> None:
        self._writer, self._collectives = writer, collectives
        if collectives.is_chief:
            writer.remove_left_inputs()

    def of_others(self, step: int, iterators: Mapping[int, Any]) -> Mapping[int, Path | None]:
        kinds = [float(_NONE)] * self._collectives.num_workers
        if not self._collectives.is_chief:
            for worker, state in self._writer.serialize(iterators).items():
                kinds[worker] = _SKIPPED if state is None else _SAVED
                if state is not None:
                    self._writer.leave_input(step, worker, state)
        found = dict(enumerate(self._collectives.sum(kinds)))
        return {
            worker: self._writer.left_input(step, worker) if kind == _SAVED else None
            for worker, kind in found.items()
            if kind != _NONE
        }


_log = logging.getLogger(__name__)

# Who saves again while the last checkpoint is still being written is told so after this long.
_SAY_AFTER_SECS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is durable and the latest, and what it cost.

    Attributes:
      copy_secs, input_secs: training stood still for the copy of the values, and for the position of its input.
      write_secs: writing took so long, beside training where it is asynchronous.
      waited_secs: somebody stood still so long until it was durable: the next save, an evaluation, the end.
    """

    step: int
    path: str
    bytes: int = 0
    copy_secs: float
    input_secs: float
    write_secs: float = 0.0
    waited_secs: float = 0.0
    asynchronous: bool

    @property
    def facts(self) -> dict[str, Any]:
        """For the journal."""
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in dataclasses.asdict(self).items()}


class Saving(Protocol):
    """Where the checkpoints of a run go; see `Saver` and `SavedElsewhere`."""

    @property
    def is_busy(self) -> bool: ...

    def begin(
        self, snapshot: Snapshot, iterators: Mapping[int, Any], *, asynchronous: bool, is_evaluated: bool = False
    ) -> str: ...

    def poll(self) -> Saved | None: ...

    def wait(self) -> Saved | None: ...


class SavedElsewhere:
    """Of a worker that is not the chief: what the chief writes is the checkpoint of all."""

    is_busy = False

    def __init__(self, writer: CheckpointWriter, states: InputStates) -> None:
        self._writer, self._states = writer, states

    def begin(
        self, snapshot: Snapshot, iterators: Mapping[int, Any], *, asynchronous: bool, is_evaluated: bool = False
    ) -> str:
        """The path that the checkpoint will have. Where this worker's input stands is left to the chief."""
        self._states.of_others(snapshot.step, iterators)
        return self._writer.path_of(snapshot.step)

    def poll(self) -> Saved | None:
        return None

    def wait(self) -> Saved | None:
        return None


class Saver:
    """Saves one checkpoint at a time, each in a thread of its own.

    Args:
      states: where the inputs of other workers stand.
    """

    def __init__(self, writer: CheckpointWriter, states: InputStates) -> None:
        self._writer, self._states = writer, states
        self._memory = SnapshotMemory()
        self._write: _Write | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint was begun that `poll` and `wait` have not yet told of."""
        return self._write is not None

    def begin(
        self, snapshot: Snapshot, iterators: Mapping[int, Any], *, asynchronous: bool, is_evaluated: bool = False
    ) -> str:
        """The path that the checkpoint will have; when it is durable, `poll` or `wait` tell.

        The one before must have been settled by `wait` or `poll`.

        Args:
          snapshot: shares its tensors with variables; they may change when this returns.
          asynchronous: False writes at once, without a copy.
          is_evaluated: as for CheckpointWriter.write.
        """
        assert self._write is None
        started = time.perf_counter()
        if asynchronous:
            snapshot = self._memory.copy(snapshot)
        copied = time.perf_counter()
        inputs = {**self._writer.serialize(iterators), **self._states.of_others(snapshot.step, iterators)}
        saved = Saved(
            step=snapshot.step,
            path=self._writer.path_of(snapshot.step),
            copy_secs=copied - started,
            input_secs=time.perf_counter() - copied,
            asynchronous=asynchronous,
        )
        self._write = _Write(saved, lambda: self._writer.write(snapshot, inputs, is_evaluated=is_evaluated))
        if asynchronous:
            self._write.start()
        else:
            self._write.run()
        return saved.path

    def poll(self) -> Saved | None:
        """The checkpoint that has become durable since it was begun; None: none has. Raises: as `wait`."""
        return None if self._write is None or self._write.is_alive() else self.wait()

    def wait(self) -> Saved | None:
        """The checkpoint that was begun, when it is durable; None where none is under way.

        Raises: what went wrong while it was written; DiskFullError among that.
        """
        write, started = self._write, time.perf_counter()
        if write is None:
            return None
        if write.is_alive():
            write.join(_SAY_AFTER_SECS)
        if write.is_alive():
            _log.info("Waiting for %s, which is still being written.", os.path.basename(write.saved.path))
            write.join()
        self._write = None
        if write.error is not None:
            raise write.error
        return dataclasses.replace(write.saved, waited_secs=time.perf_counter() - started)


class _Write(threading.Thread):
    """One checkpoint on its way to the disk. Daemonic: who stops at once does not wait for it, and what it leaves is
    the litter of a killed process, which the next save removes."""

    def __init__(self, saved: Saved, write: Callable[[], object]) -> None:
        super().__init__(name="checkpoint-writer", daemon=True)
        self.saved, self._write = saved, write
        self.error: BaseException | None = None

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._write()
            secs = time.perf_counter() - started
            self.saved = dataclasses.replace(self.saved, bytes=manifest.size_of(self.saved.path), write_secs=secs)
        except BaseException as error:  # for whoever waits; a thread has nobody to raise it to
            self.error = error
