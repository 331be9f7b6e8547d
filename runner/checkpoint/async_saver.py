"""Save while training continues: copy the values in memory, and write the copy in a thread."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.checkpoint.snapshot import Snapshot, SnapshotMemory
from runner.checkpoint.writer import CheckpointWriter
from runner.checkpoint_files import manifest
from runner.distribute.collectives import SINGLE_PROCESS, Collectives
from runner.system.console import format_bytes
from runner.system.memory import free_memory, peak_beyond_now

# What became of the state of a worker's input. Each worker sets its own element of a vector to one of these numbers.
# The sum of the vectors then has the numbers of all workers.
_NO_STATE = 0
_SKIPPED = 1
_SAVED = 2

_log = logging.getLogger(__name__)

# A save that waits longer than this for the previous checkpoint logs a message.
_SAY_AFTER_SECS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was saved, and the time it took. It is durable and the latest once `Saver` has returned it.

    Attributes:
      step: its global step.
      path: its path.
      bytes: size of its files.
      copy_secs: seconds for which training stopped to copy the values.
      input_secs: seconds for which training stopped to save the input's position.
      write_secs: seconds of writing; training continued meanwhile if `asynchronous`.
      waited_secs: seconds for which training then waited for the checkpoint to become durable: before the next save,
        an evaluation, or the end.
      asynchronous: a thread wrote it while training continued.
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
        """Return the fields of the `checkpoint` event in the run's journal."""
        facts = dataclasses.asdict(self)
        for name, value in facts.items():
            if isinstance(value, float):
                facts[name] = round(value, 4)
        return facts


class Saver:
    """Saves one checkpoint at a time, on the chief, in a thread or at once.

    The chief's checkpoint is that of all workers. If each worker reads its own data, the other workers write the states
    of their inputs to files, which the chief adds to the checkpoint.

    Args:
      writer: writes the checkpoints.
      collectives: communication between the workers.
      inputs_differ: each worker reads its own data; False: all inputs have the same position as the chief's.
      is_apart: this process is a worker without the chief's folder. It saves a copy of each checkpoint in its own, to
        read it during the run, and the state of its input, which its host sends into the chief's checkpoint.
    """

    def __init__(
        self, writer: CheckpointWriter, collectives: Collectives = SINGLE_PROCESS, *,
        inputs_differ: bool = False, is_apart: bool = False,
    ) -> None:  # fmt: skip
        self._writer = writer
        self._collectives = collectives
        self._inputs_differ = inputs_differ
        self._writes_here = collectives.is_chief or is_apart
        self._memory = SnapshotMemory()
        self._write: _Write | None = None
        self._has_warned = False
        if inputs_differ and self._writes_here:
            writer.remove_left_inputs()

    @property
    def is_busy(self) -> bool:
        """Whether `begin` was called and neither `poll` nor `wait` has returned its checkpoint yet."""
        return self._write is not None

    def fits(self, snapshot: Snapshot, reserve: int | None = None) -> bool:
        """Report whether a copy of `snapshot` fits into free memory. The first time that it does not, log a warning.

        True if this object already holds the memory, and on workers that copy nothing.

        Args:
          snapshot: the values to copy.
          reserve: bytes that must stay free for the steps; None: the most they have used so far beyond the current use.
        """
        if not self._writes_here:
            return True
        missing = self._memory.missing(snapshot)
        if not missing:
            return True
        free = free_memory()
        if reserve is None:
            reserve = peak_beyond_now()
        free -= reserve
        if missing > free and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Training waits while checkpoints are written: a copy of the variables needs %s, but only %s of "
                "memory are free beside what the steps need (checkpoint.asynchronous=auto).",
                format_bytes(missing),
                format_bytes(max(0, free)),
            )
        return missing <= free

    def begin(
        self, snapshot: Snapshot, iterators: Mapping[int, Any], *, asynchronous: bool, is_evaluated: bool = False
    ) -> str:
        """Begin to save and return the path that the checkpoint will have; `poll` or `wait` returns it when it is
        durable.

        `wait` or `poll` must have returned the previous checkpoint. All workers call this together.

        Args:
          snapshot: the values. It may share tensors with the variables, which may change once this returns.
          iterators: worker index -> iterator, for the inputs that this process reads.
          asynchronous: copy the values and write in a thread; False: write before this returns, without a copy.
          is_evaluated: as in CheckpointWriter.write.
        """
        assert self._write is None
        if not self._writes_here:
            # Also here, because all workers must call this together.
            self._gather_inputs(snapshot, iterators)
            return self._writer.path_of(snapshot.step)
        started = time.perf_counter()
        if asynchronous:
            snapshot = self._memory.copy(snapshot)
        copied = time.perf_counter()
        inputs: dict[int, Any] = {}
        if self._collectives.is_chief:
            inputs.update(self._writer.serialize(iterators))
        inputs.update(self._gather_inputs(snapshot, iterators))
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

    def _gather_inputs(self, snapshot: Snapshot, iterators: Mapping[int, Any]) -> Mapping[int, Path | None]:
        """Write the state of this worker's input to a file, unless this worker is the chief. All workers call this
        together.

        Args:
          snapshot: the values to save.
          iterators: as in `begin`.

        Returns:
          Worker index -> the file with the state of its input, or None if it cannot be saved; for all workers but the
          chief. {} if all workers' inputs have the same position.
        """
        if not self._inputs_differ:
            return {}
        kinds = [float(_NO_STATE)] * self._collectives.num_workers
        if not self._collectives.is_chief:  # the chief has its state in memory, and writes it into the checkpoint
            for worker, state in self._writer.serialize(iterators).items():
                if state is None:
                    kinds[worker] = _SKIPPED
                elif self._writer.leave_input(snapshot, worker, state):
                    kinds[worker] = _SAVED
        # Also a barrier: after it, the files of all workers exist and the chief may move them.
        kinds_of_all = self._collectives.sum(kinds)
        inputs: dict[int, Path | None] = {}
        for worker, kind in enumerate(kinds_of_all):
            if kind == _SAVED:
                inputs[worker] = self._writer.left_input(snapshot.step, worker)
            elif kind != _NO_STATE:
                inputs[worker] = None
        return inputs

    def poll(self) -> Saved | None:
        """Return the checkpoint that was begun, if it is durable by now; else None.

        Raises:
          The error with which writing failed, such as DiskFullError.
        """
        if self._write is None or self._write.is_alive():
            return None
        return self.wait()

    def wait(self) -> Saved | None:
        """Wait until the checkpoint that was begun is durable and return it; None if none was begun.

        Raises:
          The error with which writing failed, such as DiskFullError.
        """
        started = time.perf_counter()
        write = self._write
        if write is None:
            return None
        # A write that did not run in a thread is not alive, and has ended.
        if write.is_alive():
            write.join(_SAY_AFTER_SECS)
        if write.is_alive():
            _log.info("Waiting for %s, which is still being written.", os.path.basename(write.saved.path))
            write.join()
        self._write = None  # before the error, which is raised only once
        if write.error is not None:
            raise write.error
        return dataclasses.replace(write.saved, waited_secs=time.perf_counter() - started)


class _Write(threading.Thread):
    """A daemon thread that writes a checkpoint. If the process ends during the write, the next save removes the
    incomplete files.
    """

    def __init__(self, saved: Saved, write: Callable[[], object]) -> None:
        super().__init__(name="checkpoint-writer", daemon=True)
        self.saved = saved
        self._write = write
        self.error: BaseException | None = None

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._write()
            secs = time.perf_counter() - started
            size = manifest.size_of(self.saved.path)
            self.saved = dataclasses.replace(self.saved, bytes=size, write_secs=secs)
        except BaseException as error:  # raised later by `wait` or `poll`
            self.error = error
