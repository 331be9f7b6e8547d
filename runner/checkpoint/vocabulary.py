"""A vocabulary has changed: rows of a variable are found again by the tokens that they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the rows of a variable stand for, here and in the checkpoint that it begins with. Names are VocabInfo's.

    Attributes:
      new_vocab: file of the tokens of the variable, one a line, in the order of its rows.
      new_vocab_size: so many of its lines; None: all.
      old_vocab, old_vocab_size: the same of the variable in the checkpoint.
      num_oov_buckets: rows after those of the tokens, for what is in no vocabulary. They begin anew.
      axis: 0: the rows; 1: the columns, as of a kernel whose units are classes.
      initial: makes values of that shape and dtype for what the checkpoint does not have; None: the model's own.

    Raises:
      ValueError: axis is something else, or a number is negative.
    """

    new_vocab: str
    old_vocab: str
    new_vocab_size: int | None = None
    old_vocab_size: int | None = None
    num_oov_buckets: int = 0
    axis: int = 0
    initial: Callable[[tuple[int, ...], np.dtype[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if self.axis not in (0, 1):
            raise ValueError(f"axis={self.axis} of a vocabulary: it is 0 (rows) or 1 (columns).")
        for name in ("new_vocab_size", "old_vocab_size", "num_oov_buckets"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} of a vocabulary: it may not be negative.")

    def remapped(self, name: str, new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, int]:
        """The value of a variable that begins with what its tokens had.

        Args:
          name: of the variable, for messages.
          new: its initial value.
          old: its value in the checkpoint.

        Returns: the value, and how many tokens were found.

        Raises:
          ValueError: a vocabulary does not fit its variable; a file is not there, has too few lines or a token twice.
        """
        axis = self.axis
        tokens = _tokens(self.new_vocab, self.new_vocab_size)
        places = {token: place for place, token in enumerate(_tokens(self.old_vocab, self.old_vocab_size))}
        self._check(name, new, old, len(tokens), len(places))
        value = new.copy() if self.initial is None else np.array(self.initial(new.shape, new.dtype), new.dtype)
        here = [place for place, token in enumerate(tokens) if token in places]
        there = [places[tokens[place]] for place in here]
        np.moveaxis(value, axis, 0)[here] = np.moveaxis(old, axis, 0)[there]
        return value, len(here)

    def _check(self, name: str, new: np.ndarray, old: np.ndarray, tokens: int, old_tokens: int) -> None:
        what = f"the vocabulary of variable {name!r}"
        if new.ndim <= self.axis or new.shape[self.axis] != tokens + self.num_oov_buckets:
            raise ValueError(
                f"{what}: {self.new_vocab} gives {tokens} tokens and {self.num_oov_buckets} buckets for others, and "
                f"the variable is {list(new.shape)} (axis {self.axis})."
            )
        others = [np.delete(value.shape, self.axis).tolist() for value in (new, old)]
        if old.ndim != new.ndim or others[0] != others[1]:
            raise ValueError(f"{what}: it is {list(new.shape)} here and {list(old.shape)} in the checkpoint.")
        if old.shape[self.axis] < old_tokens:
            raise ValueError(
                f"{what}: {self.old_vocab} gives {old_tokens} tokens, and the variable in the checkpoint is "
                f"{list(old.shape)} (axis {self.axis})."
            )


def _tokens(file: str, size: int | None) -> list[str]:
    """The first `size` lines of a file."""
    if not tf.io.gfile.exists(file):
        raise ValueError(f"there is no vocabulary file {file}.")
    with tf.io.gfile.GFile(file, "rb") as lines:
        tokens = lines.read().decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    if size is not None and len(tokens) < size:
        raise ValueError(f"the vocabulary {file} has {len(tokens)} lines, and its first {size} are asked for.")
    tokens = tokens[:size]
    if len(set(tokens)) < len(tokens):
        twice = next(token for place, token in enumerate(tokens) if token in tokens[:place])
        raise ValueError(f"the vocabulary {file} has {twice!r} twice.")
    return tokens
