"""Damaged checkpoints: what is wrong with one, and which whole one takes its place."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.checkpoint import layout, manifest
from runner.checkpoint.reader import input_path
from runner.tf_private import tensor_bundle

_log = logging.getLogger(__name__)


class DamagedCheckpointsError(RuntimeError):
    """There are checkpoints, and none of them can be used."""


class VerifiedCheckpoints:
    """The checkpoints of one model_dir that can be used; each is read once by a process to know that.

    Sizes are compared each time, which costs nothing. The contents of one that this process did not write are read in
    full before it is used for the first time: that is a third of what restoring it takes
    (docs/explanation/performance.md), and the bytes are in the system's cache afterwards. To find the damage while
    restoring would cost nothing and be too late: the global step and the input would have been taken from it by then.
    """

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        self._model_dir = Path(model_dir)
        self._known: dict[str, tuple[Any, str | None]] = {}
        self._said: dict[str, str] = {}

    def latest(self) -> str | None:
        """The path of the checkpoint to continue from; None when there is none. One warning names those passed over.

        Raises: DamagedCheckpointsError: there are some, and all are damaged.
        """
        damaged: dict[str, str] = {}
        for path in layout.candidates_in(self._model_dir):
            fingerprint = manifest.fingerprint(path)
            if path not in self._known or self._known[path][0] != fingerprint:
                self._known[path] = (fingerprint, find_damage(path))
            damage = self._known[path][1]
            if damage is None:
                self._say(damaged, path)
                return path
            damaged[path] = damage
        if damaged:
            listed = "".join(f"\n  {os.path.basename(path)}: {damage}" for path, damage in damaged.items())
            raise DamagedCheckpointsError(
                f"every checkpoint in {self._model_dir} is damaged:{listed}\n"
                "Restore one of them from a backup, or give another model_dir to begin anew."
            )
        return None

    def trust(self, path: str) -> None:
        """Notes that this process wrote `path`, and knows it to be whole."""
        self._known[path] = (manifest.fingerprint(path), None)

    def _say(self, damaged: dict[str, str], path: str) -> None:
        if damaged and damaged != self._said:
            self._said = damaged
            found = "; ".join(f"{name}: {damage}" for name, damage in damaged.items())
            _log.warning("Damaged: %s. %s is used instead.", found, path)


def find_damage(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with the checkpoint `path`, after reading all of it; None when it is whole.

    Raises: tf.errors.ResourceExhaustedError: there is no memory for one of its tensors.
    """
    path = os.fspath(path)
    damage = manifest.what_is_missing(path) or manifest.what_has_changed(path)
    if damage is not None:
        return damage
    parts = [path]
    for worker, how in ((manifest.read_manifest(path) or {}).get("input") or {}).items():
        parts += [str(input_path(Path(path), int(worker)))] if how == "saved" else []
    for part in parts:
        try:
            _read(part)
        except tf.errors.ResourceExhaustedError as error:
            error.add_note(f"while {part} was read to see whether it is whole, a tensor at a time: there is no memory")
            raise
        except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
            return f"{os.path.basename(part)} cannot be read: {getattr(error, 'message', error)}"
    return None


def _read(path: str) -> None:
    """Reads all of a bundle: tensor by tensor, as it may be larger than half the memory, and one that parameter servers
    wrote part by part, as it may be larger than all of it.
    """
    reader = tensor_bundle.open_reader(path)
    shapes, writers = reader.get_variable_to_shape_map(), manifest.num_shards(path)
    for name, dtype in reader.get_variable_to_dtype_map().items():
        for rows in tensor_bundle.pieces(tf.TensorShape(shapes[name]), max(1, writers - 1)):  # one is the coordinator
            tensor_bundle.read_entries(path, "CPU:0", [(name, rows, dtype)])
