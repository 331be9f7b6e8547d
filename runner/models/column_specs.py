"""Make feature columns from their description in a config, `model.params.columns`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.system.suggestions import did_you_mean

fc = tf.feature_column


class Columns:
    """The feature columns of a config, by name.

    Args:
      written: column name -> {kind: ..., and the settings of that kind}. The setting `of` names the columns that this
        one is made of, such as those of a cross.

    Raises:
      ValueError: a kind, a setting or a column in `of` does not exist. The message names the key to change.
    """

    def __init__(self, written: Mapping[str, Mapping[str, Any]]) -> None:
        self._written = written
        self._columns: dict[str, Any] = {}
        self._being_made: list[str] = []  # the columns whose `of` led to the one that is made
        for name in written:  # make all columns, so that mistakes in any of them are found
            self[name]

    def __getitem__(self, name: str) -> Any:
        """Return the column `name`. It is made at the first call, after the columns that it is made of."""
        if name not in self._written:
            raise ValueError(f"model.params.columns has no column {name}.{_nearest(name, self._written)}")
        if name in self._being_made:
            raise ValueError(
                f"model.params.columns: {' -> '.join([*self._being_made, name])}: a column cannot be made of itself."
            )
        if name not in self._columns:
            self._being_made.append(name)
            self._columns[name] = self._make(name, dict(self._written[name]))
            self._being_made.pop()
        return self._columns[name]

    def chosen(self, names: Sequence[str] | None, key: str) -> list[Any]:
        """Return the columns with the given names.

        Args:
          names: the names; None: all columns.
          key: the key of the config that has the names, for messages.

        Raises:
          ValueError: a column does not exist.
        """
        names = list(self._written) if names is None else list(names)
        for name in names:
            if name not in self._written:
                raise ValueError(f"{key}: there is no column {name!r}.{_nearest(name, self._written)}")
        return [self[name] for name in names]

    def _make(self, name: str, settings: dict[str, Any]) -> Any:
        """Return the column `name`, made from its settings. The columns in `of` are made first."""
        key = f"model.params.columns.{name}"
        kind = settings.pop("kind", None)
        if kind not in _KINDS:
            raise ValueError(f"{key}.kind={kind!r}: there is no such kind.{_nearest(str(kind), _KINDS)}")
        make = _KINDS[kind]
        _, *parameters = inspect.signature(make).parameters.values()  # the first is the name
        allowed = [parameter.name for parameter in parameters]
        for setting in settings:
            if setting not in allowed:
                raise ValueError(
                    f"{key}.{setting}: a column of kind {kind} has no such setting.{_nearest(setting, allowed)}"
                )
        required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        missing = [name for name in required if name not in settings]
        if missing:
            raise ValueError(f"{key}: a column of kind {kind} needs {', '.join(missing)}.")
        if "of" in settings:
            of = settings["of"]
            if isinstance(of, str):
                settings["of"] = self[of]
            else:
                settings["of"] = [self._crossed_part(name_of_part) for name_of_part in of]
        return make(name, **settings)

    def _crossed_part(self, name: str) -> Any:
        """Return a part of a crossed column: a column, or the key of a feature.

        For a hashed column, return the key of its feature: a cross hashes raw values and does not accept hashed
        columns.
        """
        settings = self._written.get(name)
        if settings is None:
            return name
        if settings.get("kind") == "hashed":
            return settings.get("feature") or name
        return self[name]


def _numeric(
    name: str, feature: str | None = None, shape: Any = 1, mean: Any = 0.0, std: Any = 1.0, log: bool = False
) -> Any:
    def normalise(values: tf.Tensor) -> tf.Tensor:
        if log:
            values = tf.math.log1p(values)
        return (values - tf.constant(mean, tf.float32)) / tf.constant(std, tf.float32)

    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    return fc.numeric_column(feature or name, sizes, normalizer_fn=normalise)


def _bucketized(name: str, boundaries: Sequence[float], feature: str | None = None) -> Any:
    return fc.bucketized_column(fc.numeric_column(feature or name), [float(boundary) for boundary in boundaries])


def _vocabulary(name: str, values: Sequence[Any], feature: str | None = None, num_oov: int = 0) -> Any:
    return fc.categorical_column_with_vocabulary_list(feature or name, list(values), num_oov_buckets=num_oov)


def _hashed(name: str, buckets: int, feature: str | None = None, dtype: str = "string") -> Any:
    return fc.categorical_column_with_hash_bucket(feature or name, buckets, tf.as_dtype(dtype))


def _identity(name: str, buckets: int, feature: str | None = None, default: int | None = None) -> Any:
    return fc.categorical_column_with_identity(feature or name, buckets, default)


def _crossed(name: str, of: Sequence[Any], buckets: int) -> Any:
    return fc.crossed_column(list(of), buckets)


def _embedding(name: str, of: Any, dimension: int, combiner: str = "mean") -> Any:
    return fc.embedding_column(of, dimension, combiner)


def _indicator(name: str, of: Any) -> Any:
    return fc.indicator_column(of)


def _weighted(name: str, of: Any, weight: str) -> Any:
    return fc.weighted_categorical_column(of, weight)


_MAKE = (_numeric, _bucketized, _vocabulary, _hashed, _identity, _crossed, _embedding, _indicator, _weighted)
_KINDS: Mapping[str, Callable[..., Any]] = {make.__name__.removeprefix("_"): make for make in _MAKE}


def _nearest(name: str, names: Any) -> str:
    return f"{did_you_mean(name, names)} There are: {', '.join(names)}."
