"""Saving while training goes on: a copy in memory, and a thread that writes it."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from runner import manifest
from runner.checkpoints import CheckpointWriter, Inputs
from runner.input_states import InputStates
from runner.snapshots import Snapshot, SnapshotMemory

_log = logging.getLogger(__name__)

# Who saves again while the last checkpoint is still being written is told so after this long.
_SAY_AFTER_SECS = 1.0


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable and the latest, and what it cost.

    Attributes:
      copy_secs, input_secs: training stood still for the copy of the values, and for the position of its input.
      write_secs: writing took so long, beside training where it is asynchronous.
      waited_secs: somebody stood still so long until it was durable: the next save, an evaluation, the end.
    """

    step: int
    path: str
    bytes: int
    copy_secs: float
    input_secs: float
    write_secs: float
    waited_secs: float
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
        timing = (copied - started, time.perf_counter() - copied)
        self._write = _Write(self._writer, snapshot, inputs, timing, asynchronous, is_evaluated)
        if asynchronous:
            self._write.start()
        else:
            self._write.run()
        return self._writer.path_of(snapshot.step)

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
            _log.info("Waiting for %s, which is still being written.", os.path.basename(write.path))
            write.join()
        self._write = None
        if write.error is not None:
            raise write.error
        return write.saved(time.perf_counter() - started)


class _Write(threading.Thread):
    """One checkpoint on its way to the disk. Daemonic: who stops at once does not wait for it, and what it leaves is
    the litter of a killed process, which the next save removes."""

    def __init__(
        self,
        writer: CheckpointWriter,
        snapshot: Snapshot,
        inputs: Inputs,
        timing: tuple[float, float],
        asynchronous: bool,
        is_evaluated: bool,
    ) -> None:
        super().__init__(name="checkpoint-writer", daemon=True)
        self.path = writer.path_of(snapshot.step)
        self.error: BaseException | None = None
        self._writer, self._snapshot, self._inputs = writer, snapshot, inputs
        self._timing, self._asynchronous, self._is_evaluated = timing, asynchronous, is_evaluated
        self._secs, self._bytes = 0.0, 0

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._writer.write(self._snapshot, self._inputs, is_evaluated=self._is_evaluated)
            self._bytes = manifest.size_of(self.path)
        except BaseException as error:  # for whoever waits; a thread has nobody to raise it to
            self.error = error
        self._secs = time.perf_counter() - started

    def saved(self, waited_secs: float) -> Saved:
        """Args: waited_secs: of whoever asked."""
        return Saved(
            step=self._snapshot.step,
            path=self.path,
            bytes=self._bytes,
            copy_secs=self._timing[0],
            input_secs=self._timing[1],
            write_secs=self._secs,
            waited_secs=waited_secs,
            asynchronous=self._asynchronous,
        )
