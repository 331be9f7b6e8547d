"""Opens a checkpoint: values by name, the runner's own state, and the positions of iterators."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint import layout, manifest
from runner.config.error_messages import did_you_mean
from runner.data.iterators import handle_of
from runner.tf_private import graphs, tensor_bundle

GLOBAL_STEP = "global_step"
EXTRA = "_runner/"
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of a checkpoint of objects: which variable each of its other keys is."""

ITERATOR = "iterator"

_log = logging.getLogger(__name__)


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
        own = {name: facts for name, facts in self._entries.items() if not name.startswith(EXTRA)}
        if not self.is_of_objects:
            return own
        of_objects = {name: self._entries[key] for name, key in self._keys_of_objects.items()}
        if not self.is_of_a_run:
            return of_objects
        # A run whose Scaffold has a tf.train.Checkpoint: what no object has goes by its name.
        taken = {OBJECT_GRAPH, *self._keys_of_objects.values()}
        return {name: facts for name, facts in own.items() if name not in taken} | of_objects

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

    def entry(self, name: str) -> tuple[str, tf.DType]:
        """Return the key of `name` in the bundle, and its type."""
        key = self.key(name)
        return key, self._entries[key][1]

    def get(self, name: str) -> np.ndarray:
        """The value of `name`. Raises: KeyError: it is not there; the message says what is."""
        return self.get_many([name])[name]

    def get_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Name -> value, read together, which is faster than one by one. Raises: as `get`."""
        keys = {name: self.key(name) for name in names}
        for name, key in keys.items():
            if key not in self._entries:
                hint = did_you_mean(name, self.names(), n=3) or f" It has: {', '.join(self.names())}."
                raise KeyError(f"no variable {name!r} in {self.path}.{hint}")
        values = tensor_bundle.read_bundle(self.path, {key: self._entries[key][1] for key in keys.values()})
        return {name: values[key].numpy() for name, key in keys.items()}

    def in_parts(self, sources: Mapping[str, str]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the values of a part of the checkpoint at a time, by other names.

        Args:
          sources: name -> its name in the checkpoint.
        """
        sizes = {name: tensor_bundle.size_of(*self._entries[self.key(there)]) for name, there in sources.items()}
        for names in tensor_bundle.in_parts(sources, sizes.__getitem__):
            yield self._by_other_names({name: sources[name] for name in names})  # nothing here keeps the part

    def _by_other_names(self, sources: Mapping[str, str]) -> dict[str, np.ndarray]:
        values = self.get_many(set(sources.values()))
        return {name: values[there] for name, there in sources.items()}

    def entries_in_parts(self, sources: Mapping[str, str]) -> Iterator[list[tensor_bundle.Entry]]:
        """Yield the values of a part of the checkpoint at a time, for a bundle that has them by other names.

        A variable that parameter servers wrote in parts may be larger than the memory: it comes in parts of rows.

        Args:
          sources: name -> its name in the checkpoint.
        """
        servers = max(1, manifest.num_shards(self.path) - 1)  # one of those who wrote is the coordinator
        asked: list[tuple[str, tuple[str, str, tf.DType], int]] = []
        for name, there in sources.items():
            key = self.key(there)
            shape, dtype = self._entries[key]
            size = tensor_bundle.size_of(shape, dtype)
            pieces = tensor_bundle.pieces(tf.TensorShape(shape), servers if size > tensor_bundle.PART_BYTES else 1)
            asked += [(name, (key, rows, dtype), size // len(pieces)) for rows in pieces]
        for part in tensor_bundle.in_parts(asked, lambda one: one[2]):
            yield self._entries_of([(name, entry) for name, entry, _ in part])

    def _entries_of(self, asked: Sequence[tuple[str, tuple[str, str, tf.DType]]]) -> list[tensor_bundle.Entry]:
        values = tensor_bundle.read_entries(self.path, "CPU:0", [entry for _, entry in asked])
        return [
            tensor_bundle.Entry(name, rows, value) for (name, (_, rows, _)), value in zip(asked, values, strict=True)
        ]

    def extra(self) -> dict[str, Any]:
        """What Snapshot.extra held: arrays as arrays, the rest as JSON gives it back; {} of another's checkpoint."""
        values = self.get_many(name for name in self._entries if name.startswith(EXTRA))
        return {
            name.removeprefix(EXTRA): json.loads(value) if isinstance(value, bytes) else value
            for name, value in values.items()
        }

    @functools.cached_property
    def _entries(self) -> dict[str, tuple[tuple[int, ...], tf.DType]]:
        if not os.path.exists(f"{self.path}.index"):
            folder = Path(self.path).parent
            there = [name for name in layout.list_names(folder) if manifest.what_is_missing(folder / name) is None]
            raise ValueError(f"no checkpoint {self.path}. Its directory has: {', '.join(there) or 'none'}.")
        reader = tensor_bundle.open_reader(self.path)
        dtypes = reader.get_variable_to_dtype_map()
        return {name: (tuple(shape), dtypes[name]) for name, shape in reader.get_variable_to_shape_map().items()}

    @functools.cached_property
    def _keys_of_objects(self) -> dict[str, str]:
        graph = tensor_bundle.read_bundle(self.path, {OBJECT_GRAPH: tf.string})[OBJECT_GRAPH]
        return graphs.names_in_object_graph(graph.numpy())


def checkpoint_step(path: str | os.PathLike[str]) -> int:
    """The global step of the checkpoint `path`: what its global_step says, else its name.

    Raises: ValueError: neither says so, or there is no such checkpoint.
    """
    reader = Reader(path)
    if reader.has(GLOBAL_STEP):
        return int(reader.get(GLOBAL_STEP))
    step = layout.step_of(reader.path)
    if step is None:
        raise ValueError(
            f"the step of {reader.path} is not known: it has no global_step and its name does not end in one"
        )
    return step


def numbered(reader: Reader, shapes: Mapping[str, tf.TensorShape]) -> dict[str, str]:
    """Name -> the name that it has in a checkpoint of tf.estimator, of the variables that are there under another.

    In what a run of ours wrote, `count_1` is another variable: of a model that was changed since. Earlier versions gave
    what is made in a branch the name of its scope: `cond/beta1_power`.

    In 2.15 input and model shared a graph: after `dataset.repeat(3)`, which makes an operation `count`, a
    `tf.Variable(name="count")` was `count_1`, and its slots `count_1/Adam`.

    Args:
      shapes: of the variables of the model, by name.
    """
    there = reader.names()
    missing = {name: shape for name, shape in shapes.items() if name not in there}
    if reader.is_of_a_run:
        return _named_by_branches(reader, shapes, missing)

    def is_free(key: str, shape: tf.TensorShape) -> bool:
        return key in there and key not in shapes and shape.is_compatible_with(there[key][0])

    roots = [name for name, shape in missing.items() if is_free(f"{name}_1", shape)]
    found = {root: f"{root}_1" for root in roots}
    for root in roots:
        below = {name: f"{root}_1{name.removeprefix(root)}" for name in missing if name.startswith(f"{root}/")}
        found |= {name: key for name, key in below.items() if is_free(key, missing[name])}
    if found:
        shown = ", ".join(f"{name!r} ({key!r} there)" for name, key in found.items())
        _log.info("tf.estimator's input had operations of the same names: %s has %s.", reader.path, shown)
    return found


def _named_by_branches(
    reader: Reader, shapes: Mapping[str, tf.TensorShape], missing: Mapping[str, tf.TensorShape]
) -> dict[str, str]:
    """Name -> the name that an earlier version gave it: with the scope of the `tf.cond` that it was made in."""
    there, found = reader.names(), {}
    for name, shape in missing.items():
        scoped = [
            key
            for key, (size, _) in there.items()
            if key.endswith(f"/{name}") and key not in shapes and _BRANCH.search(key) and shape.is_compatible_with(size)
        ]
        if len(scoped) == 1:
            found[name] = scoped[0]
    return found


_BRANCH = re.compile(r"(^|/)(cond|while)(_\d+)?/")


def has_iterator(path: str | os.PathLike[str], worker: int) -> bool:
    """Report whether the checkpoint `path` holds where the iterator of `worker` stood."""
    return ((manifest.read_manifest(path) or {}).get("input") or {}).get(str(worker)) == "saved"


def restore_iterator(path: str | os.PathLike[str], worker: int, iterator: tf.data.Iterator) -> bool:
    """Sets `iterator` to where that of `worker` stood when the checkpoint `path` was written.

    Returns: False when it holds no such state, and `iterator` is as it was.
    Raises: ValueError: the dataset is not built like the one that was saved; `iterator` is then of no use.
    """
    path = Path(path)
    if not has_iterator(path, worker):
        return False
    state = tensor_bundle.read_bundle(str(input_path(path, worker)), {ITERATOR: tf.variant})[ITERATOR]
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
