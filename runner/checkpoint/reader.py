"""Read a checkpoint: values by variable name, the runner's own state, and iterator states."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint_files import layout, manifest
from runner.data.iterators import handle_of
from runner.system.files import find_runner_file
from runner.system.suggestions import did_you_mean
from runner.tf_private import graphs, tensor_bundle

GLOBAL_STEP = "global_step"
EXTRA = "_runner/"
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of the object graph in a checkpoint of tf.train.Checkpoint, which maps the other keys to variables."""

ITERATOR = "iterator"

_log = logging.getLogger(__name__)


class Reader:
    """Reads one checkpoint of the runner, of tf.estimator or a Saver, or of tf.train.Checkpoint.

    The keys of tf.train.Checkpoint are paths of objects: `layer_with_weights-0/kernel/.ATTRIBUTES/VARIABLE_VALUE`. The
    methods take these keys, too, as well as variable names: `dense/kernel`.

    Args:
      path: the checkpoint's prefix, as returned by latest_checkpoint. The first call of a method opens the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def names(self) -> dict[str, tuple[tuple[int, ...], tf.DType]]:
        """Return variable name -> (shape, dtype), without the runner's own state. A variable that is stored in slices
        has its whole shape.
        """
        by_key = {name: facts for name, facts in self._entries.items() if not name.startswith(EXTRA)}
        if not self.is_of_objects:
            return by_key
        of_objects = {name: self._entries[key] for name, key in self._keys_of_objects.items()}
        if not self.is_of_a_run:
            return of_objects
        # If a Scaffold has a tf.train.Checkpoint, the runner stores variables that none of its objects holds by name.
        keys_of_objects = {OBJECT_GRAPH, *self._keys_of_objects.values()}
        by_name = {name: facts for name, facts in by_key.items() if name not in keys_of_objects}
        return by_name | of_objects

    @property
    def is_of_objects(self) -> bool:
        """Whether the checkpoint's keys are object paths, as tf.train.Checkpoint writes them, not variable names."""
        return OBJECT_GRAPH in self._entries

    @property
    def is_of_a_run(self) -> bool:
        """Whether the runner wrote the checkpoint: it then has the runner's own state."""
        return any(name.startswith(EXTRA) for name in self._entries)

    def key(self, name: str) -> str:
        """Return the key of `name` in the bundle."""
        if not self.is_of_objects:
            return name
        return self._keys_of_objects.get(name, name)

    def has(self, name: str) -> bool:
        return self.key(name) in self._entries

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of `name`; None: the checkpoint does not have it."""
        key = self.key(name)
        if key not in self._entries:
            return None
        shape, _ = self._entries[key]
        return shape

    def entry(self, name: str) -> tuple[str, tf.DType]:
        """Return (key of `name` in the bundle, dtype)."""
        key = self.key(name)
        _, dtype = self._entries[key]
        return key, dtype

    def get(self, name: str) -> np.ndarray:
        """Return the value of variable `name`, an array of its shape and dtype.

        Raises:
          KeyError: the checkpoint has no such variable; the message lists similar names.
        """
        return self.get_many([name])[name]

    def get_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return name -> value of each variable in `names`. One call is faster than one per variable.

        Raises:
          KeyError: as in `get`.
        """
        keys = {name: self.key(name) for name in names}
        for name, key in keys.items():
            if key not in self._entries:
                there = self.names()
                hint = did_you_mean(name, there, n=3) or f" It has: {', '.join(there)}."
                raise KeyError(f"no variable {name!r} in {self.path}.{hint}")
        dtypes = {key: self._entries[key][1] for key in keys.values()}
        values = tensor_bundle.read_bundle(self.path, dtypes)
        return {name: values[key].numpy() for name, key in keys.items()}

    def in_parts(self, sources: Mapping[str, str]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the values of variables in parts of bounded size, each a dict name -> array.

        Args:
          sources: name in the result -> variable name in the checkpoint.
        """
        sizes = {}
        for name, source in sources.items():
            shape, dtype = self._entries[self.key(source)]
            sizes[name] = tensor_bundle.size_of(shape, dtype)
        for names in tensor_bundle.in_parts(sources, sizes.__getitem__):
            yield self._read_by_other_names({name: sources[name] for name in names})  # nothing here keeps the part

    def _read_by_other_names(self, sources: Mapping[str, str]) -> dict[str, np.ndarray]:
        values = self.get_many(set(sources.values()))
        return {name: values[source] for name, source in sources.items()}

    def entries_in_parts(self, sources: Mapping[str, str] | None = None) -> Iterator[list[tensor_bundle.Entry]]:
        """Yield the values of variables in parts of bounded size, as entries for a new bundle.

        A variable that parameter servers wrote may be larger than this host's memory, so it comes in slices of rows.

        Args:
          sources: name in the new bundle -> name in the checkpoint; None: all that the checkpoint has, by their keys.
        """
        keys = {key: key for key in self._entries}
        if sources is not None:
            keys = {name: self.key(source) for name, source in sources.items()}
        num_servers = max(1, manifest.num_shards(self.path) - 1)  # the coordinator wrote one of the shards
        # (name in the new bundle, (key, rows, dtype) here, size in bytes)
        pieces_to_read: list[tuple[str, tuple[str, str, tf.DType], int]] = []
        for name, key in keys.items():
            shape, dtype = self._entries[key]
            size = tensor_bundle.size_of(shape, dtype)
            num_pieces = num_servers if size > tensor_bundle.PART_BYTES else 1
            pieces = tensor_bundle.pieces(tf.TensorShape(shape), num_pieces)
            pieces_to_read += [(name, (key, rows, dtype), size // len(pieces)) for rows in pieces]
        for part in tensor_bundle.in_parts(pieces_to_read, lambda piece: piece[2]):
            yield self._read_entries([(name, entry) for name, entry, _ in part])

    def _read_entries(self, requests: Sequence[tuple[str, tuple[str, str, tf.DType]]]) -> list[tensor_bundle.Entry]:
        """Return the entries for a new bundle.

        Args:
          requests: of each entry, (its name in the new bundle, (its key, rows, dtype) in this checkpoint).
        """
        values = tensor_bundle.read_entries(self.path, "CPU:0", [entry for _, entry in requests])
        entries = []
        for (name, (_, rows, _)), value in zip(requests, values, strict=True):
            entries.append(tensor_bundle.Entry(name, rows, value))
        return entries

    def extra(self) -> dict[str, Any]:
        """Return the runner's own state, `Snapshot.extra`: arrays, and values as JSON returns them. {} if another
        program wrote the checkpoint.
        """
        values = self.get_many(name for name in self._entries if name.startswith(EXTRA))
        extra: dict[str, Any] = {}
        for name, value in values.items():
            key = name.removeprefix(EXTRA)
            if isinstance(value, bytes):
                extra[key] = json.loads(value)
            else:
                extra[key] = value
        return extra

    def has_iterator(self, worker: int) -> bool:
        """Report whether the checkpoint holds the state of the iterator of `worker`."""
        return worker in manifest.saved_inputs(self.path)

    def restore_iterator(self, worker: int, iterator: tf.data.Iterator) -> None:
        """Restore into `iterator` the state that the iterator of `worker` has in the checkpoint (`has_iterator`).

        Raises:
          ValueError: the dataset is not built like the saved one; `iterator` can then no longer be used.
        """
        path = Path(self.path)
        bundle = input_path(path, worker)
        state = tensor_bundle.read_bundle(str(bundle), {ITERATOR: tf.variant})[ITERATOR]
        try:
            tf.raw_ops.DeserializeIterator(resource_handle=handle_of(iterator), serialized=state)
        except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
            file = find_runner_file(Path(f"{path}{manifest.MANIFEST}"))
            raise ValueError(
                f"the training input is built differently than when {path} was saved, so its position cannot be "
                f"restored. Use the input function of that run; or delete {bundle}.* and {file} to read the input from "
                "its beginning."
            ) from error

    @functools.cached_property
    def _entries(self) -> dict[str, tuple[tuple[int, ...], tf.DType]]:
        if not os.path.exists(f"{self.path}.index"):
            folder = Path(self.path).parent
            complete = [name for name in layout.list_names(folder) if manifest.what_is_missing(folder / name) is None]
            there = ", ".join(complete) or "none"
            raise ValueError(f"no checkpoint {self.path}. Checkpoints in its folder: {there}.")
        reader = tf.train.load_checkpoint(tensor_bundle.literal(self.path))
        dtypes = reader.get_variable_to_dtype_map()
        shapes = reader.get_variable_to_shape_map()
        return {name: (tuple(shape), dtypes[name]) for name, shape in shapes.items()}

    @functools.cached_property
    def _keys_of_objects(self) -> dict[str, str]:
        graph = tensor_bundle.read_bundle(self.path, {OBJECT_GRAPH: tf.string})[OBJECT_GRAPH]
        return graphs.names_in_object_graph(graph.numpy())


def checkpoint_step(path: str | os.PathLike[str]) -> int:
    """Return the global step of the checkpoint `path`: the value of its variable global_step, else the number at the
    end of its name.

    Raises:
      ValueError: the checkpoint has neither, or does not exist.
    """
    reader = Reader(path)
    if reader.has(GLOBAL_STEP):
        return int(reader.get(GLOBAL_STEP))
    step = layout.step_of(reader.path)
    if step is None:
        raise ValueError(
            f"the global step of {reader.path} is unknown: the checkpoint has no variable global_step, and its name "
            "does not end in a number."
        )
    return step


def keys_in(reader: Reader, shapes: Mapping[str, tf.TensorShape], keys: Mapping[str, str]) -> dict[str, str]:
    """Return name -> key in the checkpoint, for variables of the model that are not stored under their name there.

    Args:
      reader: the checkpoint.
      shapes: variable name -> shape, of the model's variables.
      keys: variable name -> key, by a Scaffold's saver.
    """
    key_of_name = {}
    for name, key in keys.items():
        # A checkpoint that was written before the Scaffold had a `tf.train.Checkpoint` has no paths of objects. Then
        # the variable is found by its name.
        is_path_of_object = key.endswith(graphs.VALUE)
        if not is_path_of_object or reader.has(key):
            key_of_name[name] = key
    others = {name: shape for name, shape in shapes.items() if name not in key_of_name}
    return {**_find_numbered(reader, others), **key_of_name}


def _find_numbered(reader: Reader, shapes: Mapping[str, tf.TensorShape]) -> dict[str, str]:
    """Return name -> name in the checkpoint, for variables of the model that have another name there.

    In a checkpoint of tf.estimator, the name may end in `_1`. Input and model shared a graph in TensorFlow 2.15, and
    `dataset.repeat(3)` made an operation `count`. So a `tf.Variable(name="count")` was named `count_1`, and its slots
    `count_1/Adam`. In a checkpoint of the runner, `count_1` is another variable, and is not considered.

    Args:
      reader: the checkpoint.
      shapes: variable name -> shape, of the model's variables.
    """
    if reader.is_of_a_run:
        return {}
    names_there = reader.names()
    missing = {name: shape for name, shape in shapes.items() if name not in names_there}

    def is_free(key: str, shape: tf.TensorShape) -> bool:
        """Report whether the checkpoint has `key` with this shape, and no variable of the model has this name."""
        if key not in names_there or key in shapes:
            return False
        stored, _ = names_there[key]
        return bool(shape.is_compatible_with(stored))

    # A variable that is missing, and whose slots may have the same other name.
    roots = [name for name, shape in missing.items() if is_free(f"{name}_1", shape)]
    found = {root: f"{root}_1" for root in roots}
    for root in roots:
        slots = [name for name in missing if name.startswith(f"{root}/")]
        for name in slots:
            key = f"{root}_1{name.removeprefix(root)}"
            if is_free(key, missing[name]):
                found[name] = key
    if found:
        shown = ", ".join(f"{name!r} ({key!r} there)" for name, key in found.items())
        _log.info(
            "These variables have another name in %s, because operations of tf.estimator's input had their names: %s.",
            reader.path,
            shown,
        )
    return found


def input_path(path: Path, worker: int) -> Path:
    """Return the path of the bundle of the checkpoint `path` with the state of the input of `worker`. While the
    checkpoint is written, this is beside it.
    """
    index = path.with_name(f"{path.name}.input-{worker}.index")
    return find_runner_file(index).with_suffix("")
