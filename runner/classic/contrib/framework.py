"""What of `tf.contrib.framework` is about checkpoints: their values, assigned in a model_fn or by a Scaffold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

_log = logging.getLogger(__name__)


def assign_from_checkpoint(
    model_path: str, var_list: Any, ignore_missing_vars: bool = False
) -> tuple[Any, dict[Any, Any]]:
    """Return (operation, feed_dict) that give variables the values of a checkpoint.

    Args:
      model_path: of the checkpoint, as `tf.train.latest_checkpoint` returns it.
      var_list: variables, whose names are those in the checkpoint; or name in the checkpoint -> variable.
      ignore_missing_vars: those that the checkpoint does not have stay as they are; a warning names them.

    Returns: `Scaffold(init_fn=lambda scaffold, session: session.run(operation, feed_dict))` takes them. The values are
      in the graph, so feed_dict is empty.

    Raises: ValueError: a variable is not in the checkpoint, or has another shape there.
    """
    reader = tf.train.load_checkpoint(model_path)
    shapes = reader.get_variable_to_shape_map()
    assignments = []
    for name, variable in _by_name(var_list).items():
        if name not in shapes:
            text = f"Checkpoint is missing variable [{name}]"
            if not ignore_missing_vars:
                raise ValueError(text)
            _log.warning("%s: %s stays as it is.", text, variable.name)
            continue
        if not variable.shape.is_compatible_with(shapes[name]):
            raise ValueError(
                f"Total size of new array must be unchanged for {name}: lh_shape: {shapes[name]}, rh_shape: "
                f"{variable.shape.as_list()}"
            )
        assignments.append(variable.assign(reader.get_tensor(name)))
    return tf.group(*assignments), {}


def assign_from_checkpoint_fn(
    model_path: str, var_list: Any, ignore_missing_vars: bool = False, reshape_variables: bool = False
) -> Callable[..., None] | None:
    """Return a function of a session that does what `assign_from_checkpoint` says; None: there is nothing to assign.

    `Scaffold(init_fn=lambda scaffold, session: init(session))` takes it.

    Args: reshape_variables: is not served.
    """
    if reshape_variables:
        raise ValueError(
            "assign_from_checkpoint_fn(reshape_variables=True): give variables of the checkpoint's shapes."
        )
    named = _by_name(var_list)
    if ignore_missing_vars:
        there = tf.train.load_checkpoint(model_path).get_variable_to_shape_map()
        missing = [name for name in named if name not in there]
        for name in missing:
            _log.warning("Variable %s missing in checkpoint %s", name, model_path)
        named = {name: variable for name, variable in named.items() if name in there}
    if not named:
        _log.warning("No Variables to restore")
        return None
    operation, _ = assign_from_checkpoint(model_path, named)

    def assign(*given: Any) -> None:
        given[-1].run(operation)  # the session; a Scaffold gives itself before it

    return assign


def _by_name(var_list: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(var_list, Mapping):
        return dict(var_list)
    return {variable.name.partition(":")[0]: variable for variable in var_list}
