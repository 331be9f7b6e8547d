"""Write a checkpoint: variables, the runner's own state and the input position of one step.

`runner.checkpoint_files.layout` describes the files, and why a crash leaves the latest checkpoint intact.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from runner.checkpoint import retention
from runner.checkpoint.reader import EXTRA, GLOBAL_STEP, ITERATOR, input_path
from runner.checkpoint.retention import Keep
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint_files import layout, manifest
from runner.data.iterators import handle_of
from runner.system.console import format_bytes
from runner.system.files import RUNNER_FILES, DiskFullError, HeldFolder, find_runner_file, free_bytes, is_disk_full
from runner.tf_private import datasets, tensor_bundle

_log = logging.getLogger(__name__)


Inputs = Mapping[int, tf.Tensor | Path | None]

_Policy: TypeAlias = tf.data.experimental.ExternalStatePolicy
_NOT_SAVED = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError)


class CheckpointWriter:
    """Writes the checkpoints of one model_dir, in one process.

    Args:
      model_dir: the folder; it is made if it does not exist.
      keep_max: number of newest checkpoints to keep; None or 0: all. Or a `Keep`, with further reasons.
      clock: returns seconds since 1970.
      written: called with the path of each checkpoint that has become durable, in the thread that wrote it.
      keeps_input: called in the same thread with (bytes of a written input state, bytes of the variables); if it
        returns False, the state is deleted again.
      meta_graph: contents of each checkpoint's `.meta` file, a serialized MetaGraphDef; empty: it has no such file.
      is_mirrored: model_dir is sent to an object store, as in `write_manifest`.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        keep_max: int | Keep | None,
        clock: Callable[[], float] = time.time,
        written: Callable[[str], None] = lambda path: None,
        keeps_input: Callable[[int, int], bool] = lambda state, variables: True,
        meta_graph: bytes = b"",
        *,
        is_mirrored: bool = False,
    ) -> None:
        self.model_dir = Path(model_dir)
        self.keep = keep_max if isinstance(keep_max, Keep) else Keep(keep_max)
        self._clock = clock
        self._call_when_written = written
        self._keeps_input = keeps_input
        self._meta_graph = meta_graph
        self._last_meta = self.model_dir  # a folder until the first save: it cannot be linked
        self._is_mirrored = is_mirrored
        self._has_logged_input = False  # that the state of an input cannot be saved, or only in part
        self._folder: HeldFolder | None = None
        if self.model_dir.is_dir():
            self._folder = HeldFolder(self.model_dir)

    def save(self, snapshot: Snapshot, iterators: Mapping[int, tf.data.Iterator] | None = None) -> str:
        """Write the checkpoint of `snapshot` and return its path; it is then durable and the latest.

        Args:
          snapshot: the values.
          iterators: worker index -> iterator. If the state of one cannot be saved, the manifest says "skip" for it, and
            a warning says once what happens on resume.
        """
        return self.write(snapshot, self.serialize(iterators or {}))

    def path_of(self, step: int) -> str:
        """Return the path that the checkpoint of `step` has or will have."""
        return str(self.model_dir / f"{layout.PREFIX}{step}")

    def serialize(self, iterators: Mapping[int, tf.data.Iterator]) -> dict[int, tf.Tensor | None]:
        """Return worker index -> state of its iterator, a scalar variant tensor; None if it cannot be saved."""
        states: dict[int, tf.Tensor | None] = {}
        for worker, iterator in iterators.items():
            try:
                states[worker] = serialize_iterator(iterator)
            except _NOT_SAVED as error:
                states[worker] = self._serialize_as_asked(iterator, error)
        return states

    def _serialize_as_asked(self, iterator: tf.data.Iterator, error: tf.errors.OpError) -> tf.Tensor | None:
        """Return the state of an iterator whose dataset has external state, as `error` says.

        If the dataset's `experimental_external_state_policy` is WARN or IGNORE, return the state without the external
        part; else None. Log once what this means for a resumed run.
        """
        policy = datasets.external_state_policy(iterator)
        if policy is None or policy == _Policy.FAIL:
            self._warn_of_input(error)
            return None
        try:
            state = serialize_iterator(iterator, policy)
        except _NOT_SAVED as second_error:
            self._warn_of_input(second_error)
            return None
        if not self._has_logged_input:
            self._has_logged_input = True
            level = logging.INFO if policy == _Policy.IGNORE else logging.WARNING
            _log.log(
                level,
                "The position in the training input is saved without the state that TensorFlow cannot save (%s), as "
                "asked by experimental_external_state_policy=%s in the dataset's options. A resumed run may read other "
                "values than an uninterrupted one; set checkpoint.input_state=counted to read the batches again "
                "instead.",
                _reason_of(error), policy.name,
            )  # fmt: skip
        return state

    def leave_input(self, snapshot: Snapshot, worker: int, state: tf.Tensor) -> bool:
        """Write the state of this worker's input to a file, for the chief to move into the checkpoint.

        Args:
          snapshot: the values of the checkpoint.
          worker: index of this worker.
          state: a result of `serialize`.

        Returns:
          False if `keeps_input` did not keep the state.

        Raises:
          DiskFullError: there is not enough space.
        """
        self._hold_folder()
        path = self.left_input(snapshot.step, worker)
        free = free_bytes(self.model_dir)
        try:
            return self._write_input(path, state, snapshot)
        except Exception as error:
            if not is_disk_full(error):
                raise
            remove_bundle(path)
            size = format_bytes(_size_of(state))
            needs = f"the state of the training input of worker {worker}, which takes {size}"
            message = f"no space left in {self.model_dir} for {needs}; {format_bytes(free)} were free."
            raise DiskFullError(message) from error

    def _write_input(self, path: Path, state: tf.Tensor, snapshot: Snapshot) -> bool:
        """Write the state of an input; delete it again if `keeps_input` returns False. Return whether it is kept."""
        tensor_bundle.write_bundle(path, {ITERATOR: state})
        if self._keeps_input(manifest.size_of(path), snapshot.bytes):
            return True
        remove_bundle(path)
        return False

    def left_input(self, step: int, worker: int) -> Path:
        """Return the path to which `leave_input` writes and from which `write` moves the state."""
        return input_path(self.model_dir / RUNNER_FILES / f"{layout.LEFT}{step}", worker)  # TensorFlow makes the folder

    def remove_left_inputs(self) -> None:
        """Delete the files of `leave_input` for checkpoints that were never written."""
        for file, place in manifest.files_in(self.model_dir):
            if file.startswith(layout.LEFT):
                (self.model_dir / place).unlink(missing_ok=True)

    def write(self, snapshot: Snapshot, inputs: Inputs, *, is_evaluated: bool = False) -> str:
        """Write a checkpoint and return its path. If this fails, the latest checkpoint is still the one before.

        Bundle, input states and manifest are written to a scratch folder and then moved to model_dir. Then the state
        file is written, and checkpoints that no reason keeps are deleted. Any thread may call this.

        Args:
          snapshot: the values.
          inputs: worker index -> the state of its input, the path of a file with the state, or None if it cannot be
            saved.
          is_evaluated: a checkpoint of this step exists with the same values, so results of its evaluations stay valid.

        Raises:
          DiskFullError: there is not enough space.
          FolderLostError: model_dir was deleted since this object was made.
        """
        self._hold_folder()
        path = self.path_of(snapshot.step)
        name = os.path.basename(path)
        free = free_bytes(self.model_dir)
        try:
            with layout.scratch(self.model_dir) as folder:
                self._write_files(folder / name, snapshot, inputs)
                if not is_evaluated:
                    # Before the files are replaced, so that the new values never stand beside results of the old ones.
                    metrics = Path(f"{path}{manifest.METRICS}")
                    for file in (find_runner_file(metrics), metrics):  # `metrics` is where an earlier version wrote it
                        file.unlink(missing_ok=True)
                layout.publish(folder / name, self.model_dir)
                self._last_meta = Path(f"{path}.meta")
                self._call_when_written(path)
            # After `publish`: the state file, which this writes, names only complete checkpoints.
            retention.expire(self.model_dir, name, self.keep)
            self._hold_folder()  # an error if model_dir was deleted meanwhile and created again
        except Exception as error:
            if is_disk_full(error):
                raise DiskFullError(self._describe_full_disk(path, snapshot, inputs, free)) from error
            self._hold_folder()  # raises the clearer error if the folder was deleted meanwhile
            error.add_note(f"while saving {path}; earlier checkpoints are unchanged")
            raise
        return path

    def _hold_folder(self) -> None:
        """Create model_dir if it has not existed before.

        A deleted folder is not created again, because it would lack the run's config, journals and earlier checkpoints.

        Raises:
          FolderLostError: the folder existed and was deleted.
        """
        if self._folder is None:
            self.model_dir.mkdir(parents=True, exist_ok=True)
            self._folder = HeldFolder(self.model_dir)
        self._folder.check()

    def _write_files(self, path: Path, snapshot: Snapshot, inputs: Inputs) -> None:
        """Write the files of a checkpoint to its path in the scratch folder: the bundle, the states of inputs, the
        manifest and the graph.
        """
        tensor_bundle.write_bundle(path, _tensors_of(snapshot))
        kinds_of_inputs = {}
        for worker, state in inputs.items():
            if state is None:
                kinds_of_inputs[worker] = "skip"
            elif isinstance(state, Path):
                # Another worker has written it, to files whose names begin with a dot (`left_input`).
                for file in state.parent.glob(f"{state.name}.*"):
                    os.replace(file, path.parent / file.name.removeprefix("."))
                kinds_of_inputs[worker] = "saved"
            elif self._write_input(input_path(path, worker), state, snapshot):
                kinds_of_inputs[worker] = "saved"
        manifest.write_manifest(path, snapshot.step, self._clock(), kinds_of_inputs, is_mirrored=self._is_mirrored)
        if self._meta_graph:  # not in the manifest: a checkpoint whose graph is damaged or removed is as good as before
            try:
                os.link(self._last_meta, f"{path}.meta")
            except OSError:  # this is the first, the last one has expired, or the disk has no links
                Path(f"{path}.meta").write_bytes(self._meta_graph)

    def _describe_full_disk(self, path: str, snapshot: Snapshot, inputs: Inputs, free: int) -> str:
        latest = layout.latest_checkpoint(self.model_dir)
        size_of_inputs = sum(map(_size_of, inputs.values()))
        and_input = ""
        if size_of_inputs:
            and_input = f", the state of its input {format_bytes(size_of_inputs)}"
        return (
            f"no space left for the checkpoint {path}: its variables need {format_bytes(snapshot.bytes)}{and_input}, "
            f"but only {format_bytes(free)} were free in {self.model_dir}. Earlier checkpoints are unchanged; the "
            f"latest is {latest or 'none'}. Free some space, or keep fewer checkpoints (now "
            f"checkpoint.keep_max={self.keep.newest}), and run the same command again to resume."
        )

    def _warn_of_input(self, error: tf.errors.OpError) -> None:
        """Warn once that the state of an input cannot be saved, and what this means for a resumed run."""
        if self._has_logged_input:
            return
        self._has_logged_input = True
        _log.warning(
            "The position in the training input cannot be saved: %s A resumed run will read and drop all batches "
            "up to its step before it continues. Datasets over files and arrays can be saved, but not "
            "from_generator, py_function and stateful tf.random operations.",
            _reason_of(error),
        )


def _reason_of(error: tf.errors.OpError) -> str:
    """Return TensorFlow's message, such as `RandomUniform is stateful.`, without the name of the operation."""
    text = str(error.message).split(" [Op:")[0]
    _, _, reason = text.rpartition("}} ")
    return reason


def serialize_iterator(iterator: tf.data.Iterator, policy: Any = _Policy.FAIL) -> tf.Tensor:
    """Return the state of `iterator`, including its shuffle and prefetch buffers, as a scalar variant tensor.

    Args:
      iterator: an iterator over a tf.data.Dataset.
      policy: a tf.data.experimental.ExternalStatePolicy. FAIL: raise an error if part of the state is outside of the
        iterator, such as that of a Python generator.

    Raises:
      FailedPreconditionError, UnimplementedError: the dataset has state outside of the iterator.
    """
    # tf.train.Checkpoint(iterator=...) would also build an object graph (4 ms instead of 0.5 ms), and write at once.
    return tf.raw_ops.SerializeIterator(resource_handle=handle_of(iterator), external_state_policy=policy.value)


def remove_bundle(path: Path) -> None:
    """Delete the files of the bundle `path`, if there are any."""
    for name in manifest.sizes_of(path):
        (path.parent / name).unlink(missing_ok=True)


def _size_of(state: tf.Tensor | Path | None) -> int:
    """Return the size of an input's state in bytes, on disk or estimated."""
    if state is None:
        return 0
    if isinstance(state, Path):
        return manifest.size_of(state)
    serialized = tf.io.serialize_tensor(state)
    return int(tf.strings.length(serialized))


def _tensors_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return key in the bundle -> tensor, or tuple of slices: the variables, and the runner's own state."""
    tensors = dict(snapshot.tensors)
    tensors.setdefault(GLOBAL_STEP, np.int64(snapshot.step))
    for key, value in snapshot.extra.items():
        try:
            tensors[EXTRA + key] = json.dumps(value)
        except TypeError as error:
            error.add_note(f"in the state {key!r} of the checkpoint: it must be a value that JSON can hold")
            raise
    return tensors
