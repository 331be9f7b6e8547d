"""Find damaged checkpoints, and the undamaged one to use instead."""

from __future__ import annotations

import collections
import logging
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.checkpoint.reader import Reader, input_path
from runner.checkpoint_files import layout, manifest

_log = logging.getLogger(__name__)


class DamagedCheckpointsError(RuntimeError):
    """Raised when a model_dir has checkpoints, but all of them are damaged.

    Attributes:
      is_clear: True: the text says enough, so no traceback is shown.
    """

    is_clear = True


class VerifiedCheckpoints:
    """Finds the latest undamaged checkpoint of a model_dir.

    Before this process uses a checkpoint that it did not write, it reads its files in full, once. This takes a third of
    the time of restoring the checkpoint (benchmarks/README.md), and the bytes are then in the system's
    cache. Damage found only while restoring would be found too late: the global step and the input position have been
    taken from the checkpoint by then. If a file has changed since, the checkpoint is read again.
    """

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        self._model_dir = Path(model_dir)
        self._known_damage: dict[str, tuple[Any, str | None]] = {}  # path -> (fingerprint when read, damage or None)
        self._last_warning: dict[str, str] = {}  # path -> damage, as the last warning named them

    def latest(self) -> str | None:
        """Return the path of the checkpoint to continue from; None if there is none. Warn about damaged ones that are
        skipped.

        Raises:
          DamagedCheckpointsError: all checkpoints are damaged.
        """
        damaged: dict[str, str] = {}
        for path in layout.candidates_in(self._model_dir):
            fingerprint = manifest.fingerprint(path)
            known_fingerprint, damage = self._known_damage.get(path, (None, None))
            if known_fingerprint != fingerprint:
                damage = find_damage(path)
                self._known_damage[path] = (fingerprint, damage)
            if damage is None:
                self._warn_once(damaged, path)
                return path
            damaged[path] = damage
        if damaged:
            listed = "".join(f"\n  {os.path.basename(path)}: {damage}" for path, damage in damaged.items())
            raise DamagedCheckpointsError(
                f"every checkpoint in {self._model_dir} is damaged:{listed}\n"
                "Copy one of them from a backup, or use a new model_dir to start over."
            )
        return None

    def trust(self, path: str) -> None:
        """Record that this process wrote the checkpoint `path`, so that `latest` need not verify it."""
        self._known_damage[path] = (manifest.fingerprint(path), None)

    def _warn_once(self, damaged: dict[str, str], path: str) -> None:
        """Warn about damaged checkpoints, unless the last warning was about the same ones."""
        if not damaged or damaged == self._last_warning:
            return
        self._last_warning = damaged
        found = "; ".join(f"{name}: {damage}" for name, damage in damaged.items())
        _log.warning("Damaged checkpoint: %s. Using %s instead.", found, path)


def find_damage(path: str | os.PathLike[str]) -> str | None:
    """Read all files of the checkpoint `path` and return what is wrong with it; None if it is undamaged.

    Raises:
      tf.errors.ResourceExhaustedError: there is not enough memory for one of its tensors.
    """
    path = os.fspath(path)
    damage = manifest.what_is_wrong(path)
    if damage is not None:
        return damage
    inputs = [str(input_path(Path(path), worker)) for worker in manifest.saved_inputs(path)]
    for part in (path, *inputs):
        try:
            collections.deque(Reader(part).entries_in_parts(), maxlen=0)  # reads each part, and keeps none
        except tf.errors.ResourceExhaustedError as error:
            error.add_note(f"while reading {part} tensor by tensor to find damage: a tensor does not fit into memory")
            raise
        except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
            return f"{os.path.basename(part)} cannot be read: {getattr(error, 'message', error)}"
    return None
