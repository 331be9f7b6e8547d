"""Warm start: load values from another model's checkpoint into a new model, and report which variables were loaded."""

from __future__ import annotations

import dataclasses
import itertools
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
from runner.tracing.adapted_layers import ADAPTED
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
            outcome = "loaded"
            if source != name:
                outcome += f" from {source}"
            if name in self.tokens:
                outcome += f", {self.tokens[name]} tokens"
            rows.append([name, str(list(self.shapes[name])), outcome])
        for name, source in self.not_found.items():
            where = "" if source == name else f" as {source}"
            rows.append([name, "", f"not found{where}: initial value"])
        for name, why in self.skipped.items():
            rows.append([name, "", f"skipped: {why}"])
        return rows

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


def load(settings: WarmStart, specs: Mapping[str, VariableSpec], values: Values, adapted: Mapping[str, Any]) -> Loaded:
    """Load the values of a warm start in parts of bounded size; a larger tensor is read alone.

    Args:
      settings: the checkpoint, and which variables to load.
      specs: name -> spec (shape and dtype) of the model's variables.
      values: sets them.
      adapted: what layers of the new model have learnt by `adapt`, as in `adapted_layers`.

    Raises:
      ValueError: there is no such checkpoint; a variable has another shape there; a variable named in full in `include`
        is missing, or with `strict` any; an expression matches no variable; nothing is loaded; or a layer learnt
        something else there, and a variable may have a row for each value that it learnt.
    """
    path = _find_checkpoint(settings.checkpoint, settings.words.checkpoint)
    source = Reader(path)
    # Which variables to load, and under which names to look for them.
    candidates, skipped = _choose(settings, specs)
    names_to_find: dict[str, str] = {}
    used_rules = set[str]()
    for name in candidates:
        names_to_find[name], rule = _apply_rename(name, settings.rename)
        used_rules.add(rule)
    sources: dict[str, str] = {}
    not_found: dict[str, str] = {}
    for name, name_there in names_to_find.items():
        found = _find_name(source, name_there)
        if found is None:
            not_found[name] = name_there
        else:
            sources[name] = found
    _check_rules(settings, specs, candidates, used_rules)
    _check_found(settings, source, sources, not_found)
    _check_shapes(settings, source, sources, specs)
    _check_adapted(settings, source, sources, specs, adapted)
    # Variables without a vocabulary, all at once.
    shapes: dict[str, Sequence[int]] = {}
    entries: dict[str, tuple[str, tf.DType]] = {}
    for name, name_in_checkpoint in sources.items():
        if name not in settings.vocabularies:
            shapes[name] = source.shape(name_in_checkpoint) or ()
            entries[name] = source.entry(name_in_checkpoint)
    values.read(source.path, entries)
    # Variables with a vocabulary, one by one.
    tokens: dict[str, int] = {}
    for name, name_in_checkpoint in sources.items():
        if name in entries:
            continue
        tokens[name] = _load_tokens(settings.vocabularies[name], source, name_in_checkpoint, specs[name], values)
        shapes[name] = specs[name].shape.as_list()
    return Loaded(source.path, sources, shapes, not_found, skipped, tokens)


def _load_tokens(
    vocabulary: Vocabulary, source: Reader, name_in_checkpoint: str, spec: VariableSpec, values: Values
) -> int:
    """Load the rows or columns of the tokens that the checkpoint has, in parts; return the number of these tokens."""
    shape = tuple(spec.shape.as_list())
    axis = vocabulary.axis
    places_here, places_there = vocabulary.places(spec.name, shape, source.shape(name_in_checkpoint) or ())
    if vocabulary.initial is not None:
        # No name for the initial values: they are as large as the variable, and would be kept while it is loaded.
        values.assign({spec.name: tf.cast(vocabulary.initial(shape, spec.dtype.as_numpy_dtype), spec.dtype)})
    # The whole tensor: TensorFlow 2.21 reads all of a tensor that is stored whole, also for one of its rows.
    key, dtype = source.entry(name_in_checkpoint)
    old_values = tensor_bundle.read_bundle(source.path, {key: dtype})[key]
    # With axis=0, only the rows of tokens are updated; with axis=1 all rows, of each the columns of tokens.
    num_rows = len(places_here)
    row_bytes = tensor_bundle.size_of(shape[1:], spec.dtype)
    if axis == 1:
        num_rows = int(old_values.shape[0])
        row_bytes += 16 * len(places_here)  # of each column its place: a row and a column, int64
    rows_per_piece = max(1, tensor_bundle.PART_BYTES // max(1, row_bytes))
    for first in range(0, num_rows, rows_per_piece):
        piece = slice(first, first + rows_per_piece)
        if axis == 0:
            places = places_here[piece, None]
            values_of_tokens = tf.gather(old_values, places_there[piece])
        else:
            rows = np.arange(num_rows)[piece]
            places = _pair_all(rows, places_here)
            columns = tf.gather(old_values[piece], places_there, axis=1)
            values_of_tokens = tf.reshape(columns, [len(places), *shape[2:]])
        values.update(spec.name, places, tf.cast(values_of_tokens, spec.dtype))
    return len(places_here)


def _pair_all(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return each row with each column, `[rows * columns, 2]`, row by row."""
    grid = np.meshgrid(rows, columns, indexing="ij")
    return np.stack(grid, -1).reshape(-1, 2)


def _find_name(source: Reader, wanted: str) -> str | None:
    """Return the name in the checkpoint of the variable `wanted`; None if there is none. In a tf.train.Checkpoint, this
    may be the only path that ends in `/<wanted>`.
    """
    names = source.names()
    if wanted in names:
        return wanted
    longer = [name for name in names if name.endswith(f"/{wanted}")]
    is_clear = len(longer) == 1 and source.is_of_objects
    return longer[0] if is_clear else None


def _find_checkpoint(where: str, setting: str) -> str:
    """Return the path of the checkpoint to load.

    Args:
      where: a checkpoint, a folder of checkpoints, or a SavedModel. It is fetched from a URL that TensorFlow cannot
        read.
      setting: the user's name for this setting, for messages.

    Raises:
      ValueError: there is none, or it is damaged, or its URL cannot be read.
    """
    path_or_folder = where
    scheme = where.partition("://")[0]
    if is_url(where) and scheme not in tf.io.gfile.get_registered_schemes():
        # A folder, and the name of a checkpoint in it if there is one: [folder] or [folder, name].
        folder, *checkpoint = re.split(r"/(?=[^/]*ckpt-\d+$)", where)
        path_or_folder = os.path.join(local_folder(f"{setting}=", folder, is_read=True), *checkpoint)
    if not tf.io.gfile.isdir(path_or_folder):
        if not os.path.exists(f"{path_or_folder}.index"):
            raise MissingCheckpointError(f"{setting}={where}: there is no such checkpoint or folder.")
        damage = find_damage(path_or_folder)
        if damage is not None:
            raise ValueError(f"{setting}={where}: {damage}.")
        return path_or_folder
    if tf.io.gfile.exists(os.path.join(path_or_folder, f"{_SAVED_MODEL}.index")):
        return os.path.join(path_or_folder, _SAVED_MODEL)
    latest = VerifiedCheckpoints(Path(path_or_folder)).latest() or tf.train.latest_checkpoint(path_or_folder)
    if latest is None:
        raise ValueError(f"{setting}={where}: there is no checkpoint in that folder.")
    return str(latest)


def _choose(settings: WarmStart, specs: Mapping[str, VariableSpec]) -> tuple[list[str], dict[str, str]]:
    """Return (names of the variables to load, name of each other variable -> why it is not loaded)."""
    state = optimizer_state(specs)
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    for name, spec in specs.items():
        if spec.local:
            continue
        why = _why_skipped(settings, name, spec, is_of_optimizer=name in state)
        if why is None:
            chosen.append(name)
        else:
            skipped[name] = why
    return chosen, skipped


def _why_skipped(settings: WarmStart, name: str, spec: VariableSpec, *, is_of_optimizer: bool) -> str | None:
    """Return why a variable is not to be loaded; None: it is."""
    if name == GLOBAL_STEP:
        return "the global step"
    if is_of_optimizer and not settings.optimizer_state:
        return "state of the optimizer"
    takes_only_trainable = settings.include is None or settings.only_trainable
    if takes_only_trainable and not spec.trainable:
        return "not trainable"
    if settings.include is None:
        return None
    is_included = any(re.fullmatch(pattern, name) for pattern in settings.include)
    if not settings.include:  # []: only the variables with a vocabulary
        is_included = name in settings.vocabularies
    return None if is_included else "not in include"


def optimizer_state(specs: Mapping[str, VariableSpec]) -> set[str]:
    """Return the names of the optimizer's variables among `specs`, as v1, tf_keras and Keras 3 name them.

    Examples: `dense/kernel/Adam` and `beta1_power` (v1, tf_keras); `adam/dense_kernel_momentum` and `adam/iteration`
    (Keras 3).
    """
    # v1 and tf_keras put slots below the variable, Keras 3 into the optimizer's folder. Such a folder is known by the
    # variables `iteration` and `learning_rate` in it.
    weights = [name for name, spec in specs.items() if spec.trainable]
    others = [name for name, spec in specs.items() if not spec.trainable and not spec.local]
    folders_of_slots = tuple(f"{weight}/" for weight in weights)
    starts_of_slots = tuple(weight.replace("/", "_") + "_" for weight in weights)
    of_every_optimizer = ("iteration", "learning_rate")
    folders_of_optimizers = set()
    for name in others:
        folder, _, last = name.rpartition("/")
        if last in of_every_optimizer:
            folders_of_optimizers.add(folder)
    names_of_state = set()
    for name in others:
        if name.startswith(folders_of_slots) or re.search(r"(^|/)beta[12]_power(_\d+)?$", name):  # v1 and tf_keras
            names_of_state.add(name)
        folder, _, last = name.rpartition("/")
        is_part = last.startswith(starts_of_slots) or last in of_every_optimizer
        if is_part and folder and folder in folders_of_optimizers:  # Keras 3
            names_of_state.add(name)
    return names_of_state


def _apply_rename(name: str, rename: Mapping[str, str]) -> tuple[str, str]:
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
    """Raise ValueError if an entry of `include`, `vocabularies` or `rename` applies to no variable.

    Args:
      candidates: names of the variables to load.
      used: the keys of `rename` that apply to one of them.
    """
    words = settings.words
    names = [name for name, spec in specs.items() if not spec.local]
    for pattern in settings.include or ():
        if not any(re.fullmatch(pattern, name) for name in names):
            shown = words.of(pattern)
            raise ValueError(f"{words.include}: {shown!r} matches no variable.{_suggest(str(shown), names)}")
    for name in settings.vocabularies:
        if name not in candidates:
            raise ValueError(f"{words.vocabularies}: {name!r} is not a variable to load.{_suggest(name, candidates)}")
    for rule in settings.rename:
        if rule not in used:
            shown = words.of(rule)
            raise ValueError(
                f"{words.rename}: {shown!r} matches no variable to load, neither as a name nor as a prefix "
                f"or regular expression.{_suggest(shown, names)}"
            )


def _check_found(settings: WarmStart, source: Reader, sources: Mapping[str, str], not_found: Mapping[str, str]) -> None:
    """Raise ValueError if nothing is loaded, or if a variable is missing that must be there: one that the settings
    name, or with `strict` any.

    Args:
      sources, not_found: as in `Loaded`.
    """
    words = settings.words
    for name, wanted in not_found.items():
        is_named = name in (settings.include or ()) or name in settings.rename or name in settings.vocabularies
        if settings.strict or is_named:
            hint = _suggest(wanted, list(source.names()))
            raise ValueError(f"{words.settings}: {source.path} has no variable {wanted!r} for {name!r}.{hint}")
    if not sources:
        there = ", ".join(source.names())
        looked_for = ", ".join(not_found.values()) or "none"
        raise ValueError(
            f"{words.settings}: nothing was loaded from {source.path}. It has {there}; the model looked for "
            f"{looked_for}. Map names of the model to names in the checkpoint with {words.rename}."
        )


def _check_shapes(
    settings: WarmStart, source: Reader, sources: Mapping[str, str], specs: Mapping[str, VariableSpec]
) -> None:
    """Raise ValueError if variables have another shape in the checkpoint. Those with a vocabulary may."""
    words = settings.words
    there = source.names()
    wrong = []
    for name, found in sources.items():
        if name in settings.vocabularies:
            continue
        here = specs[name].shape
        stored, _ = there[found]
        if not here.is_compatible_with(stored):
            wrong.append(f"{name!r} is {here.as_list()} in the model and {list(stored)} in the checkpoint")
    if wrong:
        raise ValueError(
            f"{words.settings}: shapes differ from those in {source.path}: {'; '.join(wrong)}. Exclude these variables "
            f"with a regular expression in {words.include}; (?!head/).* means all but those in head/."
        )


def _check_adapted(
    settings: WarmStart,
    source: Reader,
    sources: Mapping[str, str],
    specs: Mapping[str, VariableSpec],
    adapted: Mapping[str, Any],
) -> None:
    """Raise ValueError if rows may be loaded that belong to other words than here, in silence: a layer of the same name
    has learnt other words, or other bounds of bins.

    Args:
      sources: as in `Loaded`.
      adapted: as in `load`.
    """
    words = settings.words
    adapted_there = source.extra().get(ADAPTED, {})
    for layer, learnt in adapted.items():
        learnt_there = adapted_there.get(layer, learnt)
        if learnt_there == learnt:
            continue
        (values_here,) = learnt.values()  # the vocabulary, or the bounds
        (values_there,) = learnt_there.values()
        is_mapped = False
        for vocabulary in settings.vocabularies.values():
            is_mapped |= vocabulary.has_all(values_here)
        if is_mapped:
            continue
        # Which variables depend on the layer is not known. One that is smaller has no row for each value.
        num_values = min(len(values_here), len(values_there))
        suspects: list[str] = []
        for name in sources:
            longest = max(specs[name].shape.as_list(), default=0)
            if name not in settings.vocabularies and longest >= num_values:
                suspects.append(name)
        if suspects:
            value_there, value_here = _first_difference(values_there, values_here)
            raise ValueError(
                f"{words.settings}: by adapt, the layer {layer!r} learnt something else in {source.path} than here: "
                f"the first value that differs is {value_there} there and {value_here} here. So the rows of "
                f"{', '.join(suspects)} may be those of other values. Adapt the layer to the same data as there, map "
                f"the rows with {words.vocabularies}, or exclude the variables with {words.include}. If they do not "
                "depend on the layer, give it another name here."
            )


def _first_difference(there: Sequence[Any], here: Sequence[Any]) -> tuple[str, str]:
    """Return the first values in which two lists differ, for a message."""
    for value_there, value_here in itertools.zip_longest(there, here):
        if value_there != value_here:
            break
    shown_there = "missing" if value_there is None else repr(value_there)
    shown_here = "missing" if value_here is None else repr(value_here)
    return shown_there, shown_here


def _suggest(name: str, names: list[str]) -> str:
    return did_you_mean(name, names, n=3) or f" There are: {', '.join(names)}."
