"""Copy the rows of a variable from a checkpoint with another vocabulary, matched by their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.tf_private.feature_columns import name_repeated_token, read_tokens


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a variable's rows, in the new model and in the checkpoint that it starts from.

    The attributes have the names of `tf.compat.v1.train.VocabInfo`.

    Attributes:
      new_vocab: file of the variable's tokens, one per line, in the order of its rows.
      new_vocab_size: number of lines to use, counted from the first; None: all.
      old_vocab: file of the tokens of the variable in the checkpoint.
      old_vocab_size: like new_vocab_size, for old_vocab.
      num_oov_buckets: number of rows for unknown tokens, after the tokens' rows. They get initial values.
      axis: 0: tokens are rows; 1: tokens are columns, as in the kernel of a layer with a unit per class.
      initial: function (shape, dtype) -> values for tokens that the checkpoint lacks; None: the model's own initial
        values.

    Raises:
      ValueError: `axis` is not 0 or 1, or a number is negative.
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
            raise ValueError(f"axis={self.axis} of a vocabulary: must be 0 (rows) or 1 (columns).")
        for name in ("new_vocab_size", "old_vocab_size", "num_oov_buckets"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ValueError(f"{name}={number} of a vocabulary: must not be negative.")

    def has_all(self, words: Iterable[Any]) -> bool:
        """Return whether all `words`, texts or numbers, are tokens of the new model."""
        tokens = _read_tokens(self.new_vocab, self.new_vocab_size)
        return set(map(str, words)) <= set(tokens)

    def places(self, name: str, new: Sequence[int], old: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (places here, places in the checkpoint), int64 `[n]`, of the n tokens that both vocabularies have.

        Args:
          name: the variable's name, for messages.
          new: the variable's shape, [tokens + num_oov_buckets, ...] along `axis`.
          old: its shape in the checkpoint, with at least one row per token of the old vocabulary along `axis`; its
            other dimensions are those of `new`.

        Raises:
          ValueError: a vocabulary does not fit its variable, or a file is missing, is too short or has a token twice.
        """
        new_tokens = _read_tokens(self.new_vocab, self.new_vocab_size)
        old_tokens = _read_tokens(self.old_vocab, self.old_vocab_size)
        self._check(name, new, old, len(new_tokens), len(old_tokens))
        places_of_old = {token: place for place, token in enumerate(old_tokens)}
        pairs = [(place, places_of_old[token]) for place, token in enumerate(new_tokens) if token in places_of_old]
        places_here, places_there = np.array(pairs, np.int64).reshape(-1, 2).T
        return places_here, places_there

    def _check(self, name: str, new: Sequence[int], old: Sequence[int], num_tokens: int, num_old_tokens: int) -> None:
        """Raise ValueError if the shapes `new` and `old` do not fit each other and the numbers of tokens."""
        what = f"the vocabulary of variable {name!r}"
        if len(new) <= self.axis or new[self.axis] != num_tokens + self.num_oov_buckets:
            raise ValueError(
                f"{what}: {self.new_vocab} has {num_tokens} tokens plus {self.num_oov_buckets} buckets, but the "
                f"variable's shape is {list(new)} (axis {self.axis})."
            )
        others = np.delete(new, self.axis).tolist()
        old_others = np.delete(old, self.axis).tolist()
        if len(old) != len(new) or others != old_others:
            raise ValueError(f"{what}: its shape is {list(new)} here and {list(old)} in the checkpoint.")
        # More rows than tokens are allowed: those of the old variable's buckets.
        if old[self.axis] < num_old_tokens:
            raise ValueError(
                f"{what}: {self.old_vocab} has {num_old_tokens} tokens, but the variable's shape in the checkpoint is "
                f"{list(old)} (axis {self.axis})."
            )


def _read_tokens(file: str, size: int | None) -> list[str]:
    """Return the first `size` lines of a file; all lines if `size` is None."""
    if not tf.io.gfile.exists(file):
        raise ValueError(f"there is no vocabulary file {file}.")
    tokens = read_tokens(file)
    if size is not None and len(tokens) < size:
        raise ValueError(f"the vocabulary {file} has {len(tokens)} lines, fewer than the requested {size}.")
    tokens = tokens[:size]
    repeated = name_repeated_token(file, tokens)
    if repeated is not None:
        raise ValueError(repeated)
    return tokens
