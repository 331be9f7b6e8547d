"""tf.estimator's `warm_start_from`: a new model begins with values of another one."""

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
_WORDS = WarmStartWords(
    "WarmStartSettings",
    checkpoint="WarmStartSettings: ckpt_to_initialize_from",
    include="WarmStartSettings: vars_to_warm_start",
    rename="WarmStartSettings: var_name_to_prev_var_name",
    vocabularies="WarmStartSettings: var_name_to_vocab_info",
)


class WarmStartSettings(NamedTuple):
    """What a new model begins with.

    Attributes:
      ckpt_to_initialize_from: a checkpoint, a folder with some, or a SavedModel.
      vars_to_warm_start: a regular expression for beginnings of names: the trainable variables that it fits. A list of
        such expressions: all variables that one of them fits, slots of optimizers and moving statistics among them. A
        list of variables: those of their names. None: only those in `var_name_to_vocab_info`. The global step is never
        taken.
      var_name_to_vocab_info: name of a variable -> the `VocabInfo` by which its rows or columns are found again.
      var_name_to_prev_var_name: name of a variable -> its name in the checkpoint.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[Any] | None = ".*"
    var_name_to_vocab_info: Mapping[str, Any] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None


def as_warm_start(source: str | os.PathLike[str] | WarmStartSettings) -> WarmStart:
    """What `warm_start_from` means to the runner. A path alone takes the trainable variables.

    A variable that is taken and is not in the checkpoint is an error, as it was.

    Raises:
      ValueError: it is something else; it names no checkpoint; vars_to_warm_start is a list of several kinds.
    """
    words = _WORDS
    if isinstance(source, str | os.PathLike):
        source, words = WarmStartSettings(os.fspath(source)), dataclasses.replace(words, checkpoint="warm_start_from")
    if not isinstance(source, WarmStartSettings):
        raise ValueError(f"warm_start_from={source!r}: it is a path or a tf.estimator.WarmStartSettings.")
    if not source.ckpt_to_initialize_from:
        raise ValueError("WarmStartSettings: ckpt_to_initialize_from is empty. Name a checkpoint or a folder.")
    patterns = source.vars_to_warm_start
    is_list = isinstance(patterns, list | tuple)
    include = {_pattern(one): one for one in _listed(patterns)}
    previous = source.var_name_to_prev_var_name or {}
    renamed = {f"{re.escape(name)}$": name for name in previous}
    return WarmStart(
        os.fspath(source.ckpt_to_initialize_from),
        include=tuple(include),
        # Groups of an expression could stand in the new name: a backslash in it is one that was written.
        rename={rule: previous[name].replace("\\", r"\\") for rule, name in renamed.items()},
        vocabularies={name: _vocabulary(info) for name, info in (source.var_name_to_vocab_info or {}).items()},
        only_trainable=not is_list,
        optimizer_state=is_list,
        strict=True,
        words=dataclasses.replace(words, written={**include, **renamed}),
    )


def _listed(patterns: Any) -> list[Any]:
    if patterns is None:
        return []
    if isinstance(patterns, str):
        return [patterns]
    if not isinstance(patterns, list | tuple) or len({isinstance(one, str) for one in patterns}) > 1:
        raise ValueError(
            f"WarmStartSettings(vars_to_warm_start={patterns!r}): it is a regular expression, a list of them, a list "
            "of variables, or None."
        )
    return list(patterns)


def _pattern(one: Any) -> str:
    """The expression that fits a whole name where `one` fits its beginning, as collections of TensorFlow compare.

    They know variables as "name:0", so that is how some people write a whole name.
    """
    if not isinstance(one, str):
        return re.escape(one.name.partition(":")[0])
    return f"(?:{one.removesuffix(':0')})" if one.endswith(":0") else f"(?:{one}).*"


def _vocabulary(info: Any) -> Vocabulary:
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
