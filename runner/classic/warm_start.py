"""tf.estimator's `warm_start_from`: start a new model from the values of another."""

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
    """The values that a new model starts from.

    Attributes:
      ckpt_to_initialize_from: a checkpoint, a folder of checkpoints, or a SavedModel.
      vars_to_warm_start: which variables to take. A regular expression: the trainable variables whose names begin with
        a match. A list of regular expressions: all variables that match one of them, including optimizer slots and
        moving statistics. A list of variables: those with their names. None: only those in `var_name_to_vocab_info`.
        The global step is never taken.
      var_name_to_vocab_info: variable name -> `VocabInfo`, by which its rows or columns are matched.
      var_name_to_prev_var_name: variable name -> its name in the checkpoint.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[Any] | None = ".*"
    var_name_to_vocab_info: Mapping[str, Any] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None


def as_warm_start(source: str | os.PathLike[str] | WarmStartSettings) -> WarmStart:
    """Return the runner's WarmStart for `warm_start_from`. A path takes all trainable variables.

    As in tf.estimator, it is an error if the checkpoint lacks a variable that should be taken.

    Raises:
      ValueError: the source has another type or names no checkpoint, or vars_to_warm_start mixes types.
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
        # re.sub would expand group references in the new name, so escape its backslashes.
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
    """Return a regular expression for whole names that matches where `one` matches the beginning, like TensorFlow's
    collections.

    Their names end in ":0", so some users write a whole name as "name:0".
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
