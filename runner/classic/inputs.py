"""Input functions over arrays and data frames in memory, and parse specs of tf.train.Examples."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.dataset_adapter import calls_input_fn
from runner.data.inputs import ARGUMENTS


def numpy_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
) -> Callable[[], Any]:
    """Return an input function over NumPy arrays, whose datasets have elements (features, labels), each `[batch, ...]`.

    Called in another input function of a `tf.estimator` model or in a graph, it returns (features, labels) as tensors,
    which have the values of the next batch in each step.

    Args:
      x: the features: an array `[examples, ...]`, or a dict of arrays.
      y: the labels: an array or a dict of arrays; None: the dataset has only features.
      batch_size: examples per batch. A batch may have examples of two epochs; the last batch may be smaller.
      num_epochs: passes over the arrays; None: repeat forever.
      shuffle: shuffle all examples, in a new order in each epoch. Required.
      queue_capacity: ignored; there are no queues.
      num_threads: ignored; there are no queues.

    Raises:
      ValueError: shuffle is not given. The function raises it if x is empty, x and y have a key in common, or arrays
        differ in their number of examples.
      TypeError: the function raises it if x is neither an array nor a dict.
    """
    del queue_capacity, num_threads
    _check_shuffle(shuffle, "numpy_input_fn")
    return _input_fn(lambda: _checked_arrays(x, y), batch_size, num_epochs, bool(shuffle))


def _checked_arrays(x: Any, y: Any) -> tuple[Any, Any]:
    """Return (features, labels) as arrays; tf.estimator checked them when the input function was called.

    Raises:
      ValueError, TypeError: as `numpy_input_fn` says.
    """
    if not isinstance(x, Mapping | np.ndarray):
        raise TypeError(f"numpy_input_fn(x=...): x must be an array or a dict of arrays, not {type(x).__name__}.")
    size = len(x) if isinstance(x, Mapping) else x.size
    if not size:
        raise ValueError("numpy_input_fn(x=...): x is empty.")
    if isinstance(y, Mapping) and not y:
        raise ValueError("numpy_input_fn(y={}): y is empty. Use y=None if there are no labels.")
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        common = [key for key in y if key in x]
        if common:
            quoted = ", ".join(map(repr, common))
            raise ValueError(f"numpy_input_fn: x and y have the same key: {quoted}. Rename it in one.")
    features = _arrays(x)
    labels = None if y is None else _arrays(y)
    sizes = {**_sizes("x", features), **_sizes("y", labels)}
    if len(set(sizes.values())) > 1:
        different = ", ".join(f"{part} {size}" for part, size in sizes.items())
        raise ValueError(f"numpy_input_fn: arrays differ in their number of examples: {different}.")
    return features, labels


def _sizes(part: str, values: Any) -> dict[str, int]:
    """Return name of an array -> number of its examples."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        return {part: len(values)}
    return {f"{part}[{key!r}]": len(value) for key, value in values.items()}


def pandas_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
    target_column: str = "target",
) -> Callable[[], Any]:
    """Return an input function over a pandas DataFrame, whose columns are the features, each `[batch]`. Like that of
    `numpy_input_fn`, it returns tensors in another input function.

    Args:
      x: the DataFrame.
      y: the labels: a Series, or a DataFrame for a dict of labels; None: no labels. Its index must equal that of `x`.
      batch_size: as in `numpy_input_fn`.
      num_epochs: as in `numpy_input_fn`.
      shuffle: as in `numpy_input_fn`.
      queue_capacity: ignored, as in `numpy_input_fn`.
      num_threads: ignored, as in `numpy_input_fn`.
      target_column: with labels, must not be the name of a column of x; otherwise ignored.

    Raises:
      ValueError: shuffle is not given, x and y have different indexes, or x has a column `target_column`.
      TypeError: x is not a DataFrame, or target_column is not a text.
    """
    del queue_capacity, num_threads
    _check_shuffle(shuffle, "pandas_input_fn")
    if not isinstance(target_column, str):
        raise TypeError(f"pandas_input_fn(target_column={target_column!r}): target_column must be a text.")
    if not hasattr(x, "columns"):
        raise TypeError(f"pandas_input_fn(x=...): x must be a DataFrame, not {type(x).__name__}.")
    labels: Any = None
    if y is not None:
        if target_column in x:
            raise ValueError(
                f"pandas_input_fn(target_column={target_column!r}): x has a column of that name. Use another name."
            )
        if not np.array_equal(x.index, y.index):
            raise ValueError("pandas_input_fn: x and y have different indexes. Align them: y = y.loc[x.index].")
        labels = _columns(y) if hasattr(y, "columns") else _array(y)
    features = _columns(x)
    return _input_fn(lambda: (features, labels), batch_size, num_epochs, bool(shuffle))


def classifier_parse_example_spec(
    feature_columns: Any,
    label_key: str,
    label_dtype: tf.DType = tf.int64,
    label_default: Any = None,
    weight_column: Any = None,
) -> dict[str, Any]:
    """Return key -> feature spec for tf.io.parse_example: the features, label and weight of a classifier.

    Args:
      feature_columns: the feature columns of the model.
      label_key: key of the label, which is parsed as `[1]`.
      label_dtype: int64 for class ids, string for entries of a vocabulary.
      label_default: the label of examples without a label; None: such an example is an error.
      weight_column: key of the weight, or a numeric_column; None: no weights.

    Raises:
      ValueError: the label or weight has the key of a feature, or weight_column has another type.
    """
    return _parse_spec(feature_columns, label_key, (1,), label_dtype, label_default, weight_column)


def regressor_parse_example_spec(
    feature_columns: Any,
    label_key: str,
    label_dtype: tf.DType = tf.float32,
    label_default: Any = None,
    label_dimension: int = 1,
    weight_column: Any = None,
) -> dict[str, Any]:
    """Like `classifier_parse_example_spec`, but for a regressor: labels are parsed as `[label_dimension]`, by default
    of float32.
    """
    return _parse_spec(feature_columns, label_key, (label_dimension,), label_dtype, label_default, weight_column)


def _parse_spec(
    feature_columns: Any, label_key: str, shape: tuple[int, ...], dtype: tf.DType, default: Any, weight_column: Any
) -> dict[str, Any]:
    """Return the parse spec of features, label and weight. `shape`, `dtype` and `default` are those of the label."""
    spec: dict[str, Any] = dict(tf.feature_column.make_parse_example_spec(feature_columns))
    _check_new(spec, label_key, "label_key")
    spec[label_key] = tf.io.FixedLenFeature(shape, dtype, default)
    if weight_column is None:
        return spec
    if isinstance(weight_column, str):
        weight_column = tf.feature_column.numeric_column(weight_column)
    if not hasattr(weight_column, "normalizer_fn"):
        raise ValueError(f"weight_column must be a key or a numeric_column, not {type(weight_column).__name__}.")
    _check_new(spec, weight_column.key, "weight_column")
    return {**spec, **weight_column.parse_example_spec}


def _check_new(spec: dict[str, Any], key: str, what: str) -> None:
    if key in spec:
        raise ValueError(f"{what}={key!r} is also the key of a feature. The features are: {', '.join(spec)}.")


def named_only(input_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `input_fn` without its `**kwargs`, so that the runner passes only named arguments, as in
    tf.estimator. A decorated input_fn often has `**kwargs` that it cannot handle.

    Raises:
      TypeError: `input_fn` cannot be called, or requires other arguments, as in tf.estimator.
    """
    # An input function of this module returns tensors in a graph; the runner wants its dataset.
    input_fn = getattr(input_fn, "as_dataset", input_fn)
    if not callable(input_fn):
        raise TypeError(f"input_fn={input_fn!r} is not a function.")
    try:
        signature = inspect.signature(input_fn)
    except (TypeError, ValueError):  # some builtins have no signature
        return input_fn
    bound_keywords = input_fn.keywords if isinstance(input_fn, functools.partial) else {}
    parameters = list(signature.parameters.values())
    missing: list[str] = []
    for parameter in parameters:
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_required = parameter.default is parameter.empty and not takes_any
        if is_required and parameter.name not in ARGUMENTS:
            missing.append(parameter.name)
    if missing:
        raise TypeError(f"input_fn requires {', '.join(missing)}, but gets no more than {', '.join(ARGUMENTS)}.")
    without_kwargs = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if len(without_kwargs) == len(parameters):
        return input_fn
    # `inspect` still lists the keywords that a partial has set.
    named_parameters = [parameter for parameter in without_kwargs if parameter.name not in bound_keywords]

    @functools.wraps(getattr(input_fn, "func", input_fn))
    def called(**arguments: Any) -> Any:
        return input_fn(**arguments)

    called.__signature__ = signature.replace(parameters=named_parameters)  # type: ignore[attr-defined]
    return called


def _input_fn(
    data: Callable[[], tuple[Any, Any]], batch_size: int, num_epochs: int | None, shuffle: bool
) -> Callable[[], Any]:
    """Return an input function over the arrays that `data` returns, (features, labels); None: there are no labels."""

    def as_dataset() -> tf.data.Dataset:
        features, labels = data()
        arrays = features if labels is None else (features, labels)
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        if shuffle:
            dataset = dataset.shuffle(int(dataset.cardinality()))
        return dataset.repeat(num_epochs).batch(batch_size)

    def input_fn() -> Any:
        # As in TensorFlow 1, a caller in a graph gets tensors.
        is_graph_of_user = not tf.executing_eagerly() and not tf.inside_function()
        if is_graph_of_user or calls_input_fn(in_session=True):
            return tf.compat.v1.data.make_one_shot_iterator(as_dataset()).get_next()
        return as_dataset()

    input_fn.as_dataset = as_dataset  # type: ignore[attr-defined]  # what `named_only` lets the runner call
    return input_fn


def _check_shuffle(shuffle: Any, name: str) -> None:
    if not isinstance(shuffle, bool | np.bool_):
        raise ValueError(
            f"{name}(shuffle={shuffle!r}): shuffle is required: True for training, False for evaluation and prediction."
        )


def _arrays(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    return {name: np.asarray(values) for name, values in given.items()}


def _columns(frame: Any) -> dict[str, np.ndarray]:
    return {name: _array(frame[name]) for name in frame.columns}


def _array(series: Any) -> np.ndarray:
    """Return the values of a Series as an array `[examples]`. Text becomes NumPy strings, because tf.convert_to_tensor
    does not accept all string types of pandas.
    """
    values = series.to_numpy()
    return values.astype(str) if values.dtype == object else values
