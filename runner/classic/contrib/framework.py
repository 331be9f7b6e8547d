"""The functions of `tf.contrib.framework` that assign values from checkpoints, for the init_fn of a Scaffold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

_log = logging.getLogger(__name__)


def assign_from_checkpoint(
    model_path: str, var_list: Any, ignore_missing_vars: bool = False
) -> tuple[Any, dict[Any, Any]]:
    """Return (operation, feed_dict) that assign the values of a checkpoint to variables.

    Use it as `Scaffold(init_fn=lambda scaffold, session: session.run(operation, feed_dict))`. The feed_dict is empty,
    since the operation reads the values itself, in parts, so that they are never all in memory twice.

    Args:
      model_path: path of the checkpoint, as returned by `tf.train.latest_checkpoint`.
      var_list: variables, which have the same names in the checkpoint; or a dict name in the checkpoint -> variable.
      ignore_missing_vars: if the checkpoint lacks a variable, leave it unchanged and log a warning.

    Raises:
      ValueError: the checkpoint lacks a variable, or has it with another shape.
    """
    return tf.group(*_assignments(model_path, var_list, ignore_missing_vars)), {}


def _assignments(model_path: str, var_list: Any, ignore_missing_vars: bool) -> list[Any]:
    """Return operations that read values of a checkpoint and assign them. Arguments are as in `assign_from_checkpoint`.

    Each variable that the checkpoint lacks is logged, if `ignore_missing_vars`.
    """
    reader = tf.train.load_checkpoint(model_path)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    assignments = []
    for name, variable in _variables_by_name(var_list).items():
        if name not in shapes:
            text = f"Checkpoint is missing variable [{name}]"
            if not ignore_missing_vars:
                raise ValueError(text)
            _log.warning("%s: %s is unchanged.", text, variable.name)
            continue
        if not variable.shape.is_compatible_with(shapes[name]):
            raise ValueError(
                f"Total size of new array must be unchanged for {name}: lh_shape: {shapes[name]}, rh_shape: "
                f"{variable.shape.as_list()}"
            )
        with tf.device("CPU:0"):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=model_path, tensor_names=[name], shape_and_slices=[""], dtypes=[dtypes[name]]
            )
        value = tf.ensure_shape(value, shapes[name])
        if value.dtype != variable.dtype:
            value = tf.cast(value, variable.dtype)
        assignments.append(variable.assign(value))
    return assignments


def assign_from_checkpoint_fn(
    model_path: str, var_list: Any, ignore_missing_vars: bool = False, reshape_variables: bool = False
) -> Callable[..., None] | None:
    """Return a function that assigns the values of a checkpoint in a session; None if there is nothing to assign.

    Use the returned function `init` as `Scaffold(init_fn=lambda scaffold, session: init(session))`.

    Args:
      model_path: as in `assign_from_checkpoint`.
      var_list: as in `assign_from_checkpoint`.
      ignore_missing_vars: as in `assign_from_checkpoint`.
      reshape_variables: must be False; True is not supported.

    Raises:
      ValueError: as in `assign_from_checkpoint`, or reshape_variables is True.
    """
    if reshape_variables:
        raise ValueError(
            "assign_from_checkpoint_fn(reshape_variables=True) is not supported: give variables with the shapes of the "
            "checkpoint."
        )
    assignments = _assignments(model_path, var_list, ignore_missing_vars)
    if not assignments:
        _log.warning("No Variables to restore")
        return None
    operation = tf.group(*assignments)

    def assign(*arguments: Any) -> None:
        arguments[-1].run(operation)  # the session is last; a Scaffold passes itself first

    return assign


def _variables_by_name(var_list: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(var_list, Mapping):
        return dict(var_list)
    return {variable.name.partition(":")[0]: variable for variable in var_list}
