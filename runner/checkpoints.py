"""Checkpoints: a model's variables, the runner's own state and where the input stood, of one step, on disk.

What lies on disk, and how it is safe there, is told in runner/manifest.py.
"""

from __future__ import annotations

import difflib
import errno
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner import bridge, bundles, manifest, retention
from runner.iterators import handle_of
from runner.manifest import CheckpointInfo, latest_checkpoint, list_checkpoints
from runner.report import format_bytes
from runner.retention import Keep
from runner.snapshots import Snapshot

__all__ = [
    "CheckpointInfo",
    "CheckpointWriter",
    "DiskFullError",
    "Reader",
    "Snapshot",
    "checkpoint_step",
    "latest_checkpoint",
    "list_checkpoints",
    "restore_iterator",
    "serialize_iterator",
]

GLOBAL_STEP = "global_step"
EXTRA = "_runner/"
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The key by which a checkpoint of objects says what its other keys are."""

_ITERATOR = "iterator"

_log = logging.getLogger(__name__)


class DiskFullError(RuntimeError):
    """A checkpoint does not fit on the disk."""


Inputs = Mapping[int, tf.Tensor | Path | None]


class CheckpointWriter:
    """Writes the checkpoints of one model_dir; one process has it.

    Args:
      keep_max: how many stay, the newest; None or 0: all. A `Keep` says which others do.
      clock: seconds since 1970.
      written: called with the path of each checkpoint that has become durable, in the thread that wrote it.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        keep_max: int | Keep | None,
        clock: Callable[[], float] = time.time,
        written: Callable[[str], None] = lambda path: None,
    ) -> None:
        self.model_dir = Path(model_dir)
        self.keep = keep_max if isinstance(keep_max, Keep) else Keep(keep_max)
        self._clock, self._written = clock, written
        self._warned = False

    def save(self, snapshot: Snapshot, iterators: Mapping[int, tf.data.Iterator] | None = None) -> str:
        """The path of the checkpoint of `snapshot`, durable and the latest when this returns.

        Args:
          iterators: by worker. Of one that cannot be saved the checkpoint says "skip", and the log, once, what that
            costs.
        """
        return self.write(snapshot, self.serialize(iterators or {}))

    def path_of(self, step: int) -> str:
        """Where the checkpoint of `step` is, or will be."""
        return str(self.model_dir / f"{manifest.PREFIX}{step}")

    def serialize(self, iterators: Mapping[int, tf.data.Iterator]) -> dict[int, tf.Tensor | None]:
        """Where each iterator stands now, for `write`; None for one that cannot tell."""
        states: dict[int, tf.Tensor | None] = {}
        for worker, iterator in iterators.items():
            try:
                states[worker] = serialize_iterator(iterator)
            except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
                states[worker] = None
                self._warn(error)
        return states

    def leave_input(self, step: int, worker: int, state: tf.Tensor) -> None:
        """Writes where the input of `worker` stands, for the process that will `write` the checkpoint of `step`."""
        self.model_dir.mkdir(parents=True, exist_ok=True)
        bundles.write_bundle(self.left_input(step, worker), {_ITERATOR: state})

    def left_input(self, step: int, worker: int) -> Path:
        """Where `leave_input` leaves it; one of the `inputs` of `write`."""
        return input_path(self.model_dir / f"{manifest.LEFT}{step}", worker)

    def remove_left_inputs(self) -> None:
        """Removes what was left for checkpoints that nobody has written."""
        for file in self.model_dir.glob(f"{manifest.LEFT}*"):
            file.unlink(missing_ok=True)

    def write(self, snapshot: Snapshot, inputs: Inputs, *, is_evaluated: bool = False) -> str:
        """The path of the checkpoint; for any thread. Whenever it fails, the latest checkpoint stays what it was.

        In a scratch folder: the bundle, the input of each worker, the manifest. Then they are moved to model_dir, the
        state file follows, and what nothing keeps goes.

        Args:
          inputs: by worker, where its input stands: its state, the path of that, or None for one that cannot tell.
          is_evaluated: a checkpoint of this step is there with the same values: what evaluations found of it holds.

        Raises:
          DiskFullError: it does not fit.
        """
        path = self.path_of(snapshot.step)
        name, free = os.path.basename(path), _free_bytes(self.model_dir)
        try:
            with manifest.scratch(self.model_dir) as folder:
                self._write_files(folder / name, snapshot, inputs)
                if not is_evaluated:
                    Path(f"{path}{manifest.METRICS}").unlink(missing_ok=True)
                manifest.publish(folder / name, self.model_dir)
                self._written(path)
            retention.expire(self.model_dir, name, self.keep)
        except Exception as error:
            if _is_disk_full(error):
                raise DiskFullError(self._disk_full(path, snapshot, free)) from error
            error.add_note(f"while saving {path}; the checkpoints before it are as they were")
            raise
        return path

    def _write_files(self, path: Path, snapshot: Snapshot, inputs: Inputs) -> None:
        bundles.write_bundle(path, _tensors_of(snapshot))
        for worker, state in inputs.items():
            if isinstance(state, Path):
                for file in state.parent.glob(f"{state.name}.*"):
                    os.replace(file, path.parent / file.name.removeprefix("."))
            elif state is not None:
                bundles.write_bundle(input_path(path, worker), {_ITERATOR: state})
        kinds = {worker: "skip" if state is None else "saved" for worker, state in inputs.items()}
        manifest.write_manifest(path, snapshot.step, self._clock(), kinds)

    def _disk_full(self, path: str, snapshot: Snapshot, free: int) -> str:
        latest = manifest.latest_checkpoint(self.model_dir)
        return (
            f"no space left for the checkpoint {path}: its variables need {format_bytes(snapshot.bytes)}, and "
            f"{format_bytes(free)} were free in {self.model_dir}. The checkpoints before it are as they were, the "
            f"latest is {latest or 'none'}. Make space, or keep fewer (checkpoint.keep_max={self.keep.newest}), and "
            "run the same again: it goes on from there."
        )

    def _warn(self, error: tf.errors.OpError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "The position in the training input cannot be saved (%s) A run that resumes has to read and drop every "
                "batch up to its step before it trains on. Files and arrays can be saved; from_generator, py_function "
                "and tf.random ops that are not stateless cannot.",
                error.message.split(" [Op:")[0].rpartition("}} ")[2],
            )


class Reader:
    """Reads one checkpoint: ours, one that a Saver or tf.estimator wrote, or one of objects (tf.train.Checkpoint).

    The keys of objects are the way to them: `layer_with_weights-0/kernel/.ATTRIBUTES/VARIABLE_VALUE`. Their variables
    go by the names that they have in a graph, `dense/kernel`, as everybody else's; values can be had by either.

    Args:
      path: the prefix, as from latest_checkpoint. It is opened by the first question.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def names(self) -> dict[str, tuple[tuple[int, ...], tf.DType]]:
        """Variable name -> (shape, dtype), slices of one variable as one, without the runner's own state."""
        if self.is_of_objects:
            return {name: self._entries[key] for name, key in self._keys_of_objects.items()}
        return {name: facts for name, facts in self._entries.items() if not name.startswith(EXTRA)}

    @property
    def is_of_objects(self) -> bool:
        """Whether its keys are ways to objects, and not names."""
        return OBJECT_GRAPH in self._entries

    @property
    def is_of_a_run(self) -> bool:
        """Whether a run of ours wrote it, with state of its own."""
        return any(name.startswith(EXTRA) for name in self._entries)

    def key(self, name: str) -> str:
        """By which `name` is found in the bundle."""
        return self._keys_of_objects.get(name, name) if self.is_of_objects else name

    def has(self, name: str) -> bool:
        return self.key(name) in self._entries

    def get(self, name: str) -> np.ndarray:
        """The value of `name`. Raises: KeyError: it is not there; the message says what is."""
        return self.get_many([name])[name]

    def get_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Name -> value, read together, which is faster than one by one. Raises: as `get`."""
        keys = {name: self.key(name) for name in names}
        for name, key in keys.items():
            if key not in self._entries:
                raise KeyError(self._not_there(name))
        values = bundles.read_bundle(self.path, {key: self._entries[key][1] for key in keys.values()})
        return {name: values[key].numpy() for name, key in keys.items()}

    def extra(self) -> dict[str, Any]:
        """What Snapshot.extra held: arrays as arrays, the rest as JSON gives it back; {} of another's checkpoint."""
        values = self.get_many(name for name in self._entries if name.startswith(EXTRA))
        return {name.removeprefix(EXTRA): _decode(value) for name, value in values.items()}

    @functools.cached_property
    def _entries(self) -> dict[str, tuple[tuple[int, ...], tf.DType]]:
        if not os.path.exists(f"{self.path}.index"):
            there = [os.path.basename(info.path) for info in list_checkpoints(os.path.dirname(self.path) or ".")]
            raise ValueError(f"no checkpoint {self.path}. Its directory has: {', '.join(there) or 'none'}.")
        reader = tf.train.load_checkpoint(self.path)
        dtypes = reader.get_variable_to_dtype_map()
        return {name: (tuple(shape), dtypes[name]) for name, shape in reader.get_variable_to_shape_map().items()}

    @functools.cached_property
    def _keys_of_objects(self) -> dict[str, str]:
        graph = bundles.read_bundle(self.path, {OBJECT_GRAPH: tf.string})[OBJECT_GRAPH]
        return bridge.names_in_object_graph(graph.numpy())

    def _not_there(self, name: str) -> str:
        similar = difflib.get_close_matches(name, self.names(), n=3)
        hint = f"Did you mean {' or '.join(map(repr, similar))}?" if similar else f"It has: {', '.join(self.names())}."
        return f"no variable {name!r} in {self.path}. {hint}"


def checkpoint_step(path: str | os.PathLike[str]) -> int:
    """The global step of the checkpoint `path`: what its global_step says, else its name.

    Raises: ValueError: neither says so, or there is no such checkpoint.
    """
    reader = Reader(path)
    if reader.has(GLOBAL_STEP):
        return int(reader.get(GLOBAL_STEP))
    step = manifest.step_of(reader.path)
    if step is None:
        raise ValueError(
            f"the step of {reader.path} is not known: it has no global_step and its name does not end in one"
        )
    return step


# --- iterators ------------------------------------------------------------------------------------------------------


def serialize_iterator(iterator: tf.data.Iterator) -> tf.Tensor:
    """Where `iterator` stands, with what its shuffle and prefetch buffers hold: a variant tensor for a bundle.

    Raises: FailedPreconditionError, UnimplementedError: a source or a function of the dataset has state of its own.
    """
    fail = tf.data.experimental.ExternalStatePolicy.FAIL.value  # rather than lose state without a word
    # What tf.train.Checkpoint(iterator=...) does, without its object graph: 0.5 ms and not 4, and the writing can wait.
    return tf.raw_ops.SerializeIterator(resource_handle=handle_of(iterator), external_state_policy=fail)


def has_iterator(path: str | os.PathLike[str], worker: int) -> bool:
    """Whether the checkpoint `path` holds where the iterator of `worker` stood."""
    return ((manifest.read_manifest(path) or {}).get("input") or {}).get(str(worker)) == "saved"


def restore_iterator(path: str | os.PathLike[str], worker: int, iterator: tf.data.Iterator) -> bool:
    """Sets `iterator` to where that of `worker` stood when the checkpoint `path` was written.

    Returns: False when it holds no such state, and `iterator` is as it was.
    Raises: ValueError: the dataset is not built like the one that was saved; `iterator` is then of no use.
    """
    path = Path(path)
    if not has_iterator(path, worker):
        return False
    state = bundles.read_bundle(str(input_path(path, worker)), {_ITERATOR: tf.variant})[_ITERATOR]
    try:
        tf.raw_ops.DeserializeIterator(resource_handle=handle_of(iterator), serialized=state)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"the training input is not built as when {path} was saved, so its position cannot be restored. Use the "
            f"input function of that run, or remove {input_path(path, worker).name}.* and the manifest to start the "
            "input anew."
        ) from error
    return True


def input_path(path: Path, worker: int) -> Path:
    """The bundle beside the checkpoint `path` that says where the input of `worker` stood."""
    return path.with_name(f"{path.name}.input-{worker}")


def _free_bytes(directory: Path) -> int:
    """Free on the disk that `directory` is on, or will be."""
    there = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def _is_disk_full(error: BaseException) -> bool:
    """TensorFlow 2.21 has no code of its own for it: it is a ResourceExhausted or an Unknown error with the text."""
    words = ("No space left on device", "Disk quota exceeded")
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in words)


# --- the keys of a bundle --------------------------------------------------------------------------------------------


def _tensors_of(snapshot: Snapshot) -> dict[str, Any]:
    """Key -> tensors of the bundle."""
    tensors = dict(snapshot.tensors)
    tensors.setdefault(GLOBAL_STEP, np.int64(snapshot.step))
    for key, value in snapshot.extra.items():
        tensors[EXTRA + key] = _encode(key, value)
    return tensors


def _encode(key: str, value: Any) -> Any:
    """Arrays as they are, the rest as JSON in a scalar string."""
    if isinstance(value, np.ndarray | np.generic | tf.Tensor) and not (
        value.shape == () and tf.as_dtype(value.dtype) == tf.string
    ):
        return value
    try:
        return json.dumps(value)
    except TypeError as error:
        error.add_note(f"in the runner's state {key!r}: a checkpoint holds arrays and what JSON can hold")
        raise


def _decode(value: Any) -> Any:
    return json.loads(value) if isinstance(value, bytes) else value
