"""Checkpoints: a model's variables, the runner's own state and where the input stood, of one step, on disk.

What lies on disk, and how it is safe there, is told in runner/manifest.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner import manifest
from runner.manifest import CheckpointInfo, latest_checkpoint, list_checkpoints

__all__ = [
    "CheckpointInfo",
    "CheckpointWriter",
    "Reader",
    "Snapshot",
    "checkpoint_step",
    "find_damage",
    "latest_checkpoint",
    "list_checkpoints",
    "restore_iterator",
    "serialize_iterator",
]

GLOBAL_STEP = "global_step"
EXTRA = "_runner/"

_ITERATOR = "iterator"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold; nobody changes these tensors while they are written.

    Attributes:
      tensors: by variable name: a tensor or array, or a tuple of them, the slices of one variable along axis 0.
      extra: state of the runner: arrays, or whatever JSON can hold.
    """

    step: int
    tensors: Mapping[str, Any]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointWriter:
    """Writes the checkpoints of one model_dir; one process has it.

    Args:
      keep_max: how many stay, the newest; None or 0: all.
      clock: seconds since 1970.
    """

    def __init__(
        self, model_dir: str | os.PathLike[str], keep_max: int | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.model_dir = Path(model_dir)
        self.keep_max = keep_max
        self._clock = clock
        self._warned = False

    def save(self, snapshot: Snapshot, iterators: Mapping[int, tf.data.Iterator] | None = None) -> str:
        """The path of the checkpoint of `snapshot`, durable and the latest when this returns.

        Args:
          iterators: by worker. Of one that cannot be saved the checkpoint says "skip", and the log, once, what that
            costs.
        """
        return self.write(snapshot, self.serialize(iterators or {}))

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

    def write(self, snapshot: Snapshot, inputs: Mapping[int, tf.Tensor | None]) -> str:
        """The path of the checkpoint; for any thread. Whenever it fails, the latest checkpoint stays what it was.

        In a scratch folder: the bundle, the input of each worker, the manifest. Then they are moved to model_dir, the
        state file follows, and what is too old goes.
        """
        name = f"{manifest.PREFIX}{snapshot.step}"
        path = self.model_dir / name
        try:
            with manifest.scratch(self.model_dir) as folder:
                _write_bundle(folder / name, _tensors_of(snapshot))
                for worker, state in inputs.items():
                    if state is not None:
                        _write_bundle(_input_path(folder / name, worker), {_ITERATOR: state})
                kinds = {worker: "skip" if state is None else "saved" for worker, state in inputs.items()}
                manifest.write_manifest(folder / name, snapshot.step, self._clock(), kinds)
                manifest.publish(folder / name, self.model_dir)
            manifest.keep_newest(self.model_dir, name, self.keep_max)
        except Exception as error:
            error.add_note(f"while saving {path}; the checkpoints before it are as they were")
            raise
        return str(path)

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
    """Reads one checkpoint: ours, or one that a Saver or tf.estimator wrote.

    Args:
      path: the prefix, as from latest_checkpoint. It is opened by the first question.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def names(self) -> dict[str, tuple[tuple[int, ...], tf.DType]]:
        """Variable name -> (shape, dtype), slices of one variable as one, without the runner's own state."""
        return {name: facts for name, facts in self._entries.items() if not name.startswith(EXTRA)}

    def has(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> np.ndarray:
        """The value of `name`. Raises: KeyError: it is not there; the message says what is."""
        return self.get_many([name])[name]

    def get_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Name -> value, read together, which is faster than one by one. Raises: as `get`."""
        names = list(names)
        for name in names:
            if name not in self._entries:
                raise KeyError(self._not_there(name))
        values = _read_bundle(self.path, {name: self._entries[name][1] for name in names})
        return {name: value.numpy() for name, value in values.items()}

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


def find_damage(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with the checkpoint `path`, after reading all of it; None when it is whole."""
    path = os.fspath(path)
    damage = manifest.what_is_missing(path) or manifest.what_has_changed(path)
    if damage is not None:
        return damage
    bundles = [path]
    for worker, how in ((manifest.read_manifest(path) or {}).get("input") or {}).items():
        bundles += [str(_input_path(Path(path), int(worker)))] if how == "saved" else []
    for bundle in bundles:
        try:
            dtypes = tf.train.load_checkpoint(bundle).get_variable_to_dtype_map()
            for name, dtype in dtypes.items():  # one by one: a checkpoint may be larger than half the memory
                _read_bundle(bundle, {name: dtype})
        except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
            return f"{os.path.basename(bundle)} cannot be read: {getattr(error, 'message', error)}"
    return None


# --- iterators ------------------------------------------------------------------------------------------------------


def serialize_iterator(iterator: tf.data.Iterator) -> tf.Tensor:
    """Where `iterator` stands, with what its shuffle and prefetch buffers hold: a variant tensor for a bundle.

    Raises: FailedPreconditionError, UnimplementedError: a source or a function of the dataset has state of its own.
    """
    fail = tf.data.experimental.ExternalStatePolicy.FAIL.value  # rather than lose state without a word
    # What tf.train.Checkpoint(iterator=...) does, without its object graph: 0.5 ms and not 4, and the writing can wait.
    return tf.raw_ops.SerializeIterator(resource_handle=_handle(iterator), external_state_policy=fail)


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
    state = _read_bundle(str(_input_path(path, worker)), {_ITERATOR: tf.variant})[_ITERATOR]
    try:
        tf.raw_ops.DeserializeIterator(resource_handle=_handle(iterator), serialized=state)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"the training input is not built as when {path} was saved, so its position cannot be restored. Use the "
            f"input function of that run, or remove {_input_path(path, worker).name}.* and the manifest to start the "
            "input anew."
        ) from error
    return True


def _handle(iterator: tf.data.Iterator) -> tf.Tensor:
    return tf.nest.flatten(iterator, expand_composites=True)[0]


def _input_path(path: Path, worker: int) -> Path:
    return path.with_name(f"{path.name}.input-{worker}")


# --- bundles --------------------------------------------------------------------------------------------------------


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


def _write_bundle(path: Path, tensors: Mapping[str, Any]) -> None:
    """One TensorFlow bundle; a tuple is written as the slices of one tensor."""
    keys: list[str] = []
    slices: list[str] = []
    values: list[tf.Tensor] = []
    with tf.init_scope(), tf.device("CPU:0"):
        for key, value in tensors.items():
            parts = [tf.convert_to_tensor(part) for part in (value if isinstance(value, tuple) else (value,))]
            keys += [key] * len(parts)
            slices += _slice_specs(parts) if isinstance(value, tuple) else [""]
            values += parts
        tf.raw_ops.SaveV2(prefix=str(path), tensor_names=keys, shape_and_slices=slices, tensors=values)


def _slice_specs(parts: list[tf.Tensor]) -> list[str]:
    """TensorFlow's words for consecutive slices along axis 0: "10 4 0,5:0,4" is rows 0-4 of a [10, 4]."""
    rows = sum(part.shape[0] for part in parts)
    whole = " ".join(str(size) for size in (rows, *parts[0].shape[1:]))
    rest = "".join(f":0,{size}" for size in parts[0].shape[1:])
    specs, start = [], 0
    for part in parts:
        specs.append(f"{whole} {start},{part.shape[0]}{rest}")
        start += part.shape[0]
    return specs


def _read_bundle(path: str, dtypes: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    if not dtypes:
        return {}
    with tf.init_scope(), tf.device("CPU:0"):
        values = tf.raw_ops.RestoreV2(
            prefix=path, tensor_names=list(dtypes), shape_and_slices=[""] * len(dtypes), dtypes=list(dtypes.values())
        )
    return dict(zip(dtypes, values, strict=True))
