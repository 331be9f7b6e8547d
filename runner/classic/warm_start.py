"""tf.estimator's `warm_start_from`: start a new model with values from another model's checkpoint."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.checkpoint.vocabulary import Vocabulary
from runner.run_config import WarmStart, WarmStartWords

VocabInfo = tf.compat.v1.train.VocabInfo
_NAMES_IN_MESSAGES = WarmStartWords(
    "WarmStartSettings",
    checkpoint="WarmStartSettings: ckpt_to_initialize_from",
    include="WarmStartSettings: vars_to_warm_start",
    rename="WarmStartSettings: var_name_to_prev_var_name",
    vocabularies="WarmStartSettings: var_name_to_vocab_info",
)


class _WarmStartSettings(NamedTuple):
    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[Any] | None = ".*"
    var_name_to_vocab_info: Mapping[str, Any] = {}
    var_name_to_prev_var_name: Mapping[str, str] = {}


class WarmStartSettings(_WarmStartSettings):
    """The checkpoint from which a new model starts, and the variables to load.

    Attributes:
      ckpt_to_initialize_from: path of a checkpoint, a folder of checkpoints, or a SavedModel.
      vars_to_warm_start: which variables to load. A regular expression: the trainable variables whose names begin with
        a match. A list of regular expressions: all variables whose names begin with a match of one of them, including
        optimizer slots and moving statistics. A list of variables: these variables. None: only those in
        `var_name_to_vocab_info`. The global step is never loaded.
      var_name_to_vocab_info: variable name -> `VocabInfo`, which has the tokens of its rows or columns; None: none.
      var_name_to_prev_var_name: variable name -> its name in the checkpoint; None: all names are the same.

    Raises:
      ValueError: ckpt_to_initialize_from is empty.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> WarmStartSettings:
        given = _WarmStartSettings(*args, **kwargs)
        settings = super().__new__(
            cls,
            given.ckpt_to_initialize_from,
            given.vars_to_warm_start,
            given.var_name_to_vocab_info or {},
            given.var_name_to_prev_var_name or {},
        )
        if not settings.ckpt_to_initialize_from:
            raise ValueError("WarmStartSettings: ckpt_to_initialize_from is empty. Name a checkpoint or a folder.")
        return settings


def as_warm_start(source: str | bytes | os.PathLike[str] | WarmStartSettings) -> WarmStart:
    """Return the runner's WarmStart for the argument `warm_start_from`. A path loads all trainable variables.

    A list in vars_to_warm_start may name any variable, also slots and moving statistics; a single expression only
    trainable ones.

    As in tf.estimator, it will be an error if the checkpoint lacks a variable to load.

    Raises:
      ValueError: `source` has another type or an empty path, or vars_to_warm_start has another type.
    """
    names_in_messages = _NAMES_IN_MESSAGES
    if isinstance(source, str | bytes | os.PathLike):
        source = WarmStartSettings(os.fsdecode(source))
        names_in_messages = dataclasses.replace(names_in_messages, checkpoint="warm_start_from")
    if not isinstance(source, WarmStartSettings):
        raise ValueError(f"warm_start_from={source!r}: it must be a path or a tf.estimator.WarmStartSettings.")
    patterns = source.vars_to_warm_start
    # A list may name any variable, also slots and moving statistics; a single expression only trainable ones.
    is_list = isinstance(patterns, list | tuple)
    # The runner's expression -> what the user wrote, which messages quote.
    include = {_pattern(written): written for written in _listed(patterns)}
    previous = source.var_name_to_prev_var_name
    name_of_rule = {f"{re.escape(name)}$": name for name in previous}
    return WarmStart(
        os.fsdecode(source.ckpt_to_initialize_from),
        include=tuple(include),
        # re.sub would expand group references in the new name, so escape its backslashes.
        rename={rule: previous[name].replace("\\", r"\\") for rule, name in name_of_rule.items()},
        vocabularies={name: _vocabulary(info) for name, info in source.var_name_to_vocab_info.items()},
        only_trainable=not is_list,
        optimizer_state=is_list,
        strict=True,
        # The names that the user gave to the settings and expressions: messages quote them.
        words=dataclasses.replace(names_in_messages, written={**include, **name_of_rule}),
    )


def _listed(patterns: Any) -> list[Any]:
    """Return vars_to_warm_start as a list of regular expressions or variables.

    Raises:
      ValueError: it is of another type, or a list has both.
    """
    if patterns is None:
        return []
    if isinstance(patterns, str):
        return [patterns]
    is_list = isinstance(patterns, list | tuple)
    is_mixed = is_list and len({isinstance(entry, str) for entry in patterns}) > 1
    if not is_list or is_mixed:
        raise ValueError(
            f"WarmStartSettings(vars_to_warm_start={patterns!r}): it must be a regular expression, a list of them, a "
            "list of variables, or None."
        )
    return list(patterns)


def _pattern(entry: Any) -> str:
    """Return the runner's regular expression, which must match a whole name, for an entry of vars_to_warm_start.

    An entry matches the beginning of a name, like the scopes of TensorFlow's collections. The names there end in ":0",
    so an entry that ends in ":0" stands for the whole name.
    """
    if not isinstance(entry, str):
        name = getattr(entry, "name", None)
        if name is None:
            raise ValueError(
                f"WarmStartSettings(vars_to_warm_start=[{entry!r}]): it is no variable and no name of one."
            )
        return re.escape(name.partition(":")[0])
    if entry.endswith(":0"):
        whole_name = entry.removesuffix(":0")
        return f"(?:{whole_name})"
    return f"(?:{entry}).*"


def _vocabulary(info: Any) -> Vocabulary:
    if not hasattr(info, "new_vocab"):
        raise ValueError(f"WarmStartSettings(var_name_to_vocab_info=): {info!r} is no tf.estimator.VocabInfo.")
    backup = info.backup_initializer or tf.compat.v1.zeros_initializer()
    return Vocabulary(
        new_vocab=os.fspath(info.new_vocab),
        new_vocab_size=info.new_vocab_size,
        old_vocab=os.fspath(info.old_vocab),
        old_vocab_size=None if info.old_vocab_size < 0 else info.old_vocab_size,
        num_oov_buckets=info.num_oov_buckets,
        axis=info.axis,
        initial=lambda shape, dtype: backup(shape, dtype=tf.as_dtype(dtype)),
    )
