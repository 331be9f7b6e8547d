"""Parts of feature columns without a public name in TensorFlow 2.21, needed because Keras 3 has no DenseFeatures; and
the vocabulary files from which their tables, and other tables, are filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

# The building blocks of feature layers, exported for Keras.
# When they move: they are in tensorflow.python.feature_column.feature_column_v2.
_fc = tf.__internal__.feature_column

DenseColumn = _fc.DenseColumn


class Columns(_fc.StateManager):  # type: ignore[name-defined]
    """The variables and tables of feature columns in one call of a model_fn.

    Args:
      make: called with (column, name of the variable) and the arguments of `tf.compat.v1.get_variable`.
    """

    def __init__(self, make: Any) -> None:
        super().__init__(layer=None, trainable=True)
        self._make = make
        self._made: dict[tuple[Any, str], Any] = {}

    def create_variable(self, feature_column: Any, name: str, shape: Any, **kwargs: Any) -> Any:
        wanted = ("dtype", "trainable", "initializer")
        arguments = {key: value for key, value in kwargs.items() if key in wanted and value is not None}
        variable = self._make(feature_column, name, shape=shape, **arguments)
        self._made[feature_column, name] = variable
        return variable

    def get_variable(self, feature_column: Any, name: str) -> Any:
        return self._made[feature_column, name]


def cache_of(features: Mapping[str, Any]) -> Any:
    """Return a cache that transforms each feature (name -> tensor `[batch, ...]`) once for all columns."""
    return _fc.FeatureTransformationCache(features)


def dense_tensor(column: Any, features: Mapping[str, Any]) -> tf.Tensor:
    """Return the values of a column without variables, float `[batch, ...]`."""
    return column.get_dense_tensor(cache_of(features), None)


def forget_shared_embeddings(columns: Any) -> None:
    """Make columns of `shared_embeddings` request their variable again, as each replica must do in each trace.

    Private: `SharedEmbeddingColumnCreator._embedding_weights`, which caches it by graph. When it moves: leave this out;
    a second replica then requests one variable fewer, and variable names no longer match.
    """
    for column in columns:
        creator = getattr(column, "shared_embedding_column_creator", None)
        if creator is not None:
            creator._embedding_weights.clear()


# --- vocabulary files, one token a line -----------------------------------------------------------------------------


def read_tokens(file: str) -> list[str]:
    """Return the lines of a vocabulary file; bytes that are not UTF-8 stay distinguishable."""
    with tf.io.gfile.GFile(file, "rb") as lines:
        return lines.read().decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")


def name_repeated_token(file: str, tokens: Sequence[str]) -> str | None:
    """Return a sentence with the first token that `file` repeats and its two lines; None: each token is there once."""
    lines: dict[str, int] = {}
    for line, token in enumerate(tokens, start=1):
        if token in lines:
            return f"the vocabulary {file} has {token!r} twice, in lines {lines[token]} and {line}. Remove one of them."
        lines[token] = line
    return None


@contextlib.contextmanager
def naming_repeated_tokens(tables: Sequence[tf.Operation] = ()) -> Iterator[None]:
    """Add the file and the lines to the error of a table that cannot be filled, because its file has a token twice.

    TensorFlow 2.21 names the token alone: "HashTable has different value for same key. Key b has 1 and trying to add
    value 3".

    Private: `TextFileInitializer._filename`, a `tf.saved_model.Asset`, since TF 1.15. When it moves: the error stays
    without this note.

    Args:
      tables: operations that fill tables inside this context; those of tables that are filled eagerly are in the
        traceback.
    """
    try:
        yield
    except tf.errors.FailedPreconditionError as error:
        if "different value for same key" in str(error):
            of_operations = [table.inputs[1] for table in tables if table.type == "InitializeTableFromTextFileV2"]
            for path in [*_paths_in(error.__traceback__), *of_operations]:
                _note_repeated_token(error, path)
        raise


def _paths_in(entry: TracebackType | None) -> Iterator[tf.Tensor]:
    """Yield the path of each file from which a table was being filled eagerly, a string scalar."""
    while entry is not None:
        initializer = entry.tb_frame.f_locals.get("self")
        is_of_file = isinstance(initializer, tf.lookup.TextFileInitializer)
        is_filling = is_of_file and entry.tb_frame.f_code.co_name == "initialize"
        asset: Any = getattr(initializer, "_filename", None)
        if is_filling and hasattr(asset, "asset_path"):
            yield asset.asset_path
        entry = entry.tb_next


def _note_repeated_token(error: Exception, path: tf.Tensor) -> None:
    value = tf.get_static_value(path)
    if value is None:  # a name that only the step knows
        return
    file = tf.compat.as_str_any(np.asarray(value).item())
    with contextlib.suppress(tf.errors.OpError):  # another task has read it
        repeated = name_repeated_token(file, read_tokens(file))
        if repeated is not None:
            error.add_note(repeated)
