"""What native hooks fetch of each example, `Hook.fetches`: the tensors of a name, and the calls with their values."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.collectives import SINGLE_PROCESS, Collectives
from runner.model_log import logging_to
from runner.system.suggestions import did_you_mean

_DENSE = {tf.SparseTensor: "tf.sparse.to_dense(x)", tf.RaggedTensor: "x.to_tensor()"}
_ROWS = "Hooks fetch tensors with a row for each example, [batch, ...]."


def fetches_of(hook: Any) -> Sequence[str]:
    """Return the names that a hook fetches.

    Raises:
      ValueError: its `fetches` are not a sequence of names.
    """
    # Statically, because a mock of anything has every attribute.
    if inspect.getattr_static(hook, "fetches", None) is None:
        return ()
    names = hook.fetches
    is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_sequence or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{type(hook).__name__}.fetches={names!r} must be a list of names, such as "
            "('labels', 'predictions/probabilities')."
        )
    return tuple(names)


# --- the tensors of a name --------------------------------------------------------------------------------------------


def named(**kinds: Any) -> dict[str, Any]:
    """Return name -> tensor of one replica.

    Args:
      kinds: predictions, labels and features: each a tensor, a structure of tensors, or None.
    """
    found: dict[str, Any] = {}
    for kind, value in kinds.items():
        _add(kind, value, found)
    return found


def _add(name: str, value: Any, found: dict[str, Any]) -> None:
    """Add the tensors of a structure to `found`: each under `name` and the keys, indices or fields that lead to it."""
    if value is None:
        return
    items: Mapping[Any, Any]
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        items = dict(enumerate(value))
    else:
        found[name] = value
        return
    for key, item in items.items():
        # Keys of a MultiHead's predictions are (name of the head, name).
        keys = key if isinstance(key, tuple) else (key,)
        path = "/".join([name, *map(str, keys)])
        _add(path, item, found)


def check(written: str, name: str, available: Mapping[str, Any], mode: str) -> None:
    """Check that `name` is that of a tensor whose rows are examples.

    Args:
      written: who fetches the name, as the beginning of a message.
      name: the name.
      available: name -> value, as `named` returns it.
      mode: that of the step.

    Raises:
      ValueError: there is none; the message lists the names that there are.
    """
    if name not in available:
        why = f"there is no such value in {mode.upper()}."
        has_predictions = any(fetched.startswith("predictions") for fetched in available)
        if name.startswith("predictions") and not has_predictions:
            why = f"model_fn returns no predictions in {mode.upper()}."
        raise ValueError(f"{written}, but {why}{did_you_mean(name, available)} There are: {', '.join(available)}.")
    value = available[name]
    for kind, dense in _DENSE.items():
        if isinstance(value, kind):
            raise ValueError(
                f"{written}, a {kind.__name__}, and hooks get dense arrays. Return {dense} from model_fn as one of its "
                "predictions."
            )
    if not isinstance(value, tf.Tensor):
        raise ValueError(f"{written}, which is a {type(value).__name__} and no tensor.")
    if value.shape.rank == 0:
        raise ValueError(f"{written}, which is a scalar. {_ROWS}")


# --- their values -----------------------------------------------------------------------------------------------------


def joined(names: Sequence[str], counts: Sequence[int], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return name -> rows of the examples of all replicas of this process, in their order; {} if there are none.

    Args:
      names: the names.
      counts: the number of examples of each replica. One without any has a batch that stands in, which is left out.
      values: the values of all names on the first replica, then on the others.

    Raises:
      ValueError: a value has not a row for each example.
    """
    found: dict[str, np.ndarray] = {}
    for index, name in enumerate(names):
        parts = []
        for count, value in zip(counts, values[index :: len(names)], strict=True):
            if not count:
                continue
            shape = np.shape(value)
            if shape[:1] != (count,):
                raise ValueError(
                    f"A hook fetches {name!r}, which is {list(shape)} in a batch of {count} examples. {_ROWS}"
                )
            parts.append(value)
        if parts:
            found[name] = _concatenated(parts)
    return found


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of all `parts`, without a copy if there is only one."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts)


class ExampleHooks:
    """The native hooks that fetch values of examples. All workers make one of these together.

    Args:
      hooks: native hooks; those that fetch nothing are left out.
      collectives: communication between the workers, which all compute what the chief's hooks fetch.

    Attributes:
      names: what is to be fetched, the same on all workers.
    """

    def __init__(self, hooks: Sequence[Any], collectives: Collectives) -> None:
        self._collectives = collectives
        self._hooks = [hook for hook in hooks if fetches_of(hook)]
        own: dict[str, None] = {}
        for hook in self._hooks:
            own.update(dict.fromkeys(fetches_of(hook)))
        of_chief = collectives.broadcast_text(json.dumps(list(own)))
        self.names: Sequence[str] = json.loads(of_chief)

    def call(self, run: Any, values: Mapping[str, np.ndarray]) -> None:
        """Call the hooks of the chief with the rows of all workers, one worker after the other. All workers must call
        this together.

        Args:
          run: the run, as hooks see it.
          values: the rows of this worker, as `joined` returns them.
        """
        if not self.names:
            return
        of_workers = self._collectives.gather_arrays(values)
        with_rows = [rows for rows in of_workers if rows]
        if not self._collectives.is_chief or not with_rows:
            return
        together = {}
        for name in self.names:
            together[name] = _concatenated([rows[name] for rows in with_rows])
        for hook in self._hooks:
            values_of_hook = {name: together[name] for name in fetches_of(hook)}
            with logging_to(run):
                hook.after_examples(run, values_of_hook)


NO_EXAMPLE_HOOKS = ExampleHooks((), SINGLE_PROCESS)
