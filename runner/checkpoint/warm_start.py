"""Warm start: load values from another model's checkpoint into a new model, and report which variables were loaded."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from runner.checkpoint.integrity import VerifiedCheckpoints, find_damage
from runner.checkpoint.reader import GLOBAL_STEP, Reader
from runner.checkpoint.vocabulary import Vocabulary
from runner.remote.mirror import local_folder
from runner.run_config import WarmStart
from runner.system.suggestions import did_you_mean
from runner.system.urls import is_url
from runner.tf_private import tensor_bundle
from runner.tracing.variable_request import VariableSpec

_SAVED_MODEL = os.path.join("variables", "variables")


class MissingCheckpointError(ValueError):
    """There is no checkpoint where one is named."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The outcome of a warm start.

    Attributes:
      path: path of the checkpoint.
      sources: name of each loaded variable -> its name in the checkpoint.
      shapes: name of each loaded variable -> its shape.
      not_found: variable name -> the name that the checkpoint lacks.
      skipped: name of each variable that was not to be loaded -> why.
      tokens: name of each variable with a vocabulary -> how many of its tokens the checkpoint has.
    """

    path: str
    sources: Mapping[str, str]
    shapes: Mapping[str, Sequence[int]]
    not_found: Mapping[str, str]
    skipped: Mapping[str, str]
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> list[list[str]]:
        """Return the rows of a table: name, shape, outcome."""
        rows = []
        for name, source in self.sources.items():
            said = "loaded" if source == name else f"loaded from {source}"
            said += f", {self.tokens[name]} tokens" if name in self.tokens else ""
            rows.append([name, str(list(self.shapes[name])), said])
        for name, source in self.not_found.items():
            where = "" if source == name else f" as {source}"
            rows.append([name, "", f"not found{where}: initial value"])
        return rows + [[name, "", f"skipped: {why}"] for name, why in self.skipped.items()]

    @property
    def facts(self) -> dict[str, object]:
        """Return the fields of the `warm_start` event in the run's journal."""
        return {
            "checkpoint": self.path,
            "loaded": dict(self.sources),
            "not_found": list(self.not_found),
            "skipped": dict(self.skipped),
        }


class Values(Protocol):
    """The values of a new model's variables, as a warm start sets them."""

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign values: name -> tensor or array of the variable's shape."""

    def read(self, path: str, entries: Mapping[str, tuple[str, tf.DType]]) -> None:
        """Load variables from the checkpoint `path`: name -> (key, dtype) there."""

    def update(self, name: str, places: np.ndarray, values: tf.Tensor) -> None:
        """Set slices of a variable to `values`, `[n, ...]`. `places`: rows, or rows and columns, `[n, 1 or 2]`."""


def load(settings: WarmStart, specs: Mapping[str, VariableSpec], values: Values) -> Loaded:
    """Load the values of a warm start in parts of bounded size; a larger tensor is read alone.

    Args:
      settings: the checkpoint, and which variables to load.
      specs: name -> spec (shape and dtype) of the model's variables.
      values: sets them.

    Raises:
      ValueError: there is no such checkpoint; a variable has another shape there; a variable named in full in `include`
        is missing, or with `strict` any; an expression matches no variable; or nothing is loaded.
    """
    source = Reader(_checkpoint(settings.checkpoint, settings.words.checkpoint))
    candidates, skipped = _chosen(settings, specs)
    wanted = {name: _renamed(name, settings.rename) for name in candidates}
    found = {name: _name_in(source, there) for name, (there, _) in wanted.items()}
    sources = {name: there for name, there in found.items() if there is not None}
    not_found = {name: wanted[name][0] for name, there in found.items() if there is None}
    _check_rules(settings, specs, candidates, {rule for _, rule in wanted.values()})
    _check_found(settings, source, sources, not_found)
    _check_shapes(settings, source, sources, specs)
    whole = {name: there for name, there in sources.items() if name not in settings.vocabularies}
    values.read(source.path, {name: source.entry(there) for name, there in whole.items()})
    shapes: dict[str, Sequence[int]] = {name: source.shape(there) or () for name, there in whole.items()}
    tokens: dict[str, int] = {}
    for name in [name for name in sources if name not in whole]:
        tokens[name] = _load_tokens(settings.vocabularies[name], source, sources[name], specs[name], values)
        shapes[name] = specs[name].shape.as_list()
    return Loaded(source.path, sources, shapes, not_found, skipped, tokens)


def _load_tokens(vocabulary: Vocabulary, source: Reader, there: str, spec: VariableSpec, values: Values) -> int:
    """Load the rows or columns of the tokens that the checkpoint has, in parts; return the number of these tokens."""
    (key, dtype), axis, shape = source.entry(there), vocabulary.axis, tuple(spec.shape.as_list())
    here, at = vocabulary.places(spec.name, shape, source.shape(there) or ())
    if vocabulary.initial is not None:
        values.assign({spec.name: tf.cast(vocabulary.initial(shape, spec.dtype.as_numpy_dtype), spec.dtype)})
    # At once: TensorFlow 2.21 reads all of a tensor that is stored whole, also for one of its rows.
    old = tensor_bundle.read_bundle(source.path, {key: dtype})[key]
    number, size = len(here), tensor_bundle.size_of(shape[1:], spec.dtype)
    if axis == 1:  # a place is a row and a column, int64
        number, size = int(old.shape[0]), size + 16 * len(here)
    step = max(1, tensor_bundle.PART_BYTES // max(1, size))
    for part in (slice(first, first + step) for first in range(0, number, step)):
        if axis == 0:
            places, found = here[part, None], tf.gather(old, at[part])
        else:
            rows = np.arange(number)[part]
            places = np.stack(np.meshgrid(rows, here, indexing="ij"), -1).reshape(-1, 2)
            found = tf.reshape(tf.gather(old[part], at, axis=1), [len(places), *shape[2:]])
        values.update(spec.name, places, tf.cast(found, spec.dtype))
    return len(here)


def _name_in(source: Reader, wanted: str) -> str | None:
    """Return the name in the checkpoint of the variable `wanted`; None if there is none. In a tf.train.Checkpoint, this
    may be the only path that ends in `/<wanted>`.
    """
    names = source.names()
    if wanted in names:
        return wanted
    longer = [name for name in names if name.endswith(f"/{wanted}")]
    return longer[0] if len(longer) == 1 and source.is_of_objects else None


def _checkpoint(where: str, setting: str) -> str:
    """Return the path of the checkpoint to load.

    Args:
      where: a checkpoint, a folder of checkpoints, or a SavedModel. It is fetched from a URL that TensorFlow cannot
        read.
      setting: the user's name for this setting, for messages.

    Raises:
      ValueError: there is none, or it is damaged, or its URL cannot be read.
    """
    place = where
    if is_url(where) and where.partition("://")[0] not in tf.io.gfile.get_registered_schemes():
        folder, *checkpoint = re.split(r"/(?=[^/]*ckpt-\d+$)", where)
        place = os.path.join(local_folder(f"{setting}=", folder, is_read=True), *checkpoint)
    if not tf.io.gfile.isdir(place):
        if not os.path.exists(f"{place}.index"):
            raise MissingCheckpointError(f"{setting}={where}: there is no such checkpoint or folder.")
        damage = find_damage(place)
        if damage is not None:
            raise ValueError(f"{setting}={where}: {damage}.")
        return place
    if tf.io.gfile.exists(os.path.join(place, f"{_SAVED_MODEL}.index")):
        return os.path.join(place, _SAVED_MODEL)
    path = VerifiedCheckpoints(Path(place)).latest() or tf.train.latest_checkpoint(place)
    if path is None:
        raise ValueError(f"{setting}={where}: there is no checkpoint in that folder.")
    return str(path)


def _chosen(settings: WarmStart, specs: Mapping[str, VariableSpec]) -> tuple[list[str], dict[str, str]]:
    """Return (names of the variables to load, name of each other variable -> why it is not loaded)."""
    state = optimizer_state(specs)
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    for name, spec in specs.items():
        if spec.local:
            continue
        if name == GLOBAL_STEP:
            skipped[name] = "the global step"
        elif name in state and not settings.optimizer_state:
            skipped[name] = "state of the optimizer"
        elif (settings.include is None or settings.only_trainable) and not spec.trainable:
            skipped[name] = "not trainable"
        elif settings.include is not None and not (
            any(re.fullmatch(one, name) for one in settings.include)
            or (not settings.include and name in settings.vocabularies)
        ):
            skipped[name] = "not in include"
        else:
            chosen.append(name)
    return chosen, skipped


def optimizer_state(specs: Mapping[str, VariableSpec]) -> set[str]:
    """Return the names of the optimizer's variables among `specs`, as v1, tf_keras and Keras 3 name them.

    Examples: `dense/kernel/Adam` and `beta1_power` (v1, tf_keras); `adam/dense_kernel_momentum` and `adam/iteration`
    (Keras 3).
    """
    weights = [name for name, spec in specs.items() if spec.trainable]
    flat = [weight.replace("/", "_") for weight in weights]
    others = [name for name, spec in specs.items() if not spec.trainable and not spec.local]
    found = {name for name in others if any(name.startswith(f"{weight}/") for weight in weights)}
    found |= {name for name in others if re.search(r"(^|/)beta[12]_power(_\d+)?$", name)}
    folders = {name.rpartition("/")[0] for name in others if name.rpartition("/")[2] in ("iteration", "learning_rate")}
    for name in others:
        folder, _, last = name.rpartition("/")
        is_slot = any(last.startswith(f"{weight}_") for weight in flat)
        if folder and (is_slot or last in ("iteration", "learning_rate")) and folder in folders:
            found.add(name)
    return found


def _renamed(name: str, rename: Mapping[str, str]) -> tuple[str, str]:
    """Return (name in the checkpoint, key of `rename` that applies, "" if none does).

    A key that equals the name comes first, then a regular expression that matches all of the name, then the longest
    prefix of the name.
    """
    if name in rename:
        return rename[name], name
    for pattern, replacement in rename.items():
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement), pattern
    for prefix in sorted(rename, key=len, reverse=True):
        if name.startswith(prefix):
            return rename[prefix] + name[len(prefix) :], prefix
    return name, ""


def _check_rules(settings: WarmStart, specs: Mapping[str, VariableSpec], candidates: list[str], used: set[str]) -> None:
    names, words = [name for name, spec in specs.items() if not spec.local], settings.words
    for pattern in settings.include or ():
        if not any(re.fullmatch(pattern, name) for name in names):
            shown = words.of(pattern)
            raise ValueError(f"{words.include}: {shown!r} matches no variable.{_nearest(str(shown), names)}")
    for name in settings.vocabularies:
        if name not in candidates:
            raise ValueError(f"{words.vocabularies}: {name!r} is not a variable to load.{_nearest(name, candidates)}")
    for rule in settings.rename:
        if rule not in used:
            raise ValueError(
                f"{words.rename}: {words.of(rule)!r} matches no variable to load, neither as a name nor as a prefix "
                f"or regular expression.{_nearest(words.of(rule), names)}"
            )


def _check_found(settings: WarmStart, source: Reader, sources: Mapping[str, str], not_found: Mapping[str, str]) -> None:
    words = settings.words
    for name, wanted in not_found.items():
        is_named = name in (settings.include or ()) or name in settings.rename or name in settings.vocabularies
        if settings.strict or is_named:
            raise ValueError(
                f"{words.settings}: {source.path} has no variable {wanted!r} for {name!r}."
                f"{_nearest(wanted, list(source.names()))}"
            )
    if not sources:
        raise ValueError(
            f"{words.settings}: nothing was loaded from {source.path}. It has {', '.join(source.names())}; the model "
            f"looked for {', '.join(not_found.values()) or 'none'}. Map names of the model to names in the checkpoint "
            f"with {words.rename}."
        )


def _check_shapes(
    settings: WarmStart, source: Reader, sources: Mapping[str, str], specs: Mapping[str, VariableSpec]
) -> None:
    words, there = settings.words, source.names()
    wrong = [
        f"{name!r} is {specs[name].shape.as_list()} in the model and {list(there[found][0])} in the checkpoint"
        for name, found in sources.items()
        if name not in settings.vocabularies and not specs[name].shape.is_compatible_with(there[found][0])
    ]
    if wrong:
        raise ValueError(
            f"{words.settings}: shapes differ from those in {source.path}: {'; '.join(wrong)}. Exclude these variables "
            f"with a regular expression in {words.include}; (?!head/).* means all but those in head/."
        )


def _nearest(name: str, names: list[str]) -> str:
    return did_you_mean(name, names, n=3) or f" There are: {', '.join(names)}."
