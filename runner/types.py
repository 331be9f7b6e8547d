"""The values that travel between layers: plain Python, no TensorFlow."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

type_of_tensor = Any
"""A tf.Tensor; spelt so that layer 0 does not import TensorFlow."""

Features = Any
"""A tensor, or a nest (dict, tuple) of tensors, each `[batch, ...]`."""

Labels = Any
"""Like Features, or None where the input has no labels."""


class ParamReads:
    """Which params a user's function has read, over all copies that it was given.

    Args:
      names: of the params that the config gives.

    Attributes:
      is_used: a function has been given a copy.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.is_used = False
        self._unread = dict.fromkeys(names)

    @property
    def unread(self) -> list[str]:
        """The names that nobody has read; none where no function was called."""
        return list(self._unread) if self.is_used else []

    def note(self, name: Any) -> None:
        self._unread.pop(name, None)

    def note_all(self) -> None:
        self._unread.clear()


class Params(dict[str, Any]):
    """A model's or an input's parameters: a dict whose items are attributes, too.

    `params["width"]` and `params.width` are the same value; nested mappings are Params too, but for subclasses of dict.
    The values are copied, so what a model_fn changes in its own does not reach its caller. What has the name of a
    method of dict (`items`) is an item only.

    Raises:
      KeyError, AttributeError: a name that is not there; the message lists those that are.
    """

    _reads: ParamReads | None = None

    def __init__(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        super().__init__(_nested(copy.deepcopy({**dict(values or {}), **named})))

    def watched(self, reads: ParamReads) -> Params:
        """These params, of which `reads` notes what is read from now on; also of copies by `copied_params`."""
        object.__setattr__(self, "_reads", reads)
        return self

    def __missing__(self, key: Any) -> Any:
        raise KeyError(self._said(key))

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        if key not in self:
            raise AttributeError(self._said(key))
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __repr__(self) -> str:
        return f"Params({super().__repr__()})"

    # --- what counts as read: a value that is asked for, and all of them where they are passed on --------------------

    def _note(self, key: Any) -> None:
        if self._reads is not None:
            self._reads.note(key)

    def _note_all(self) -> None:
        if self._reads is not None:
            self._reads.note_all()

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # Names alone are not values. That it is defined has Python make `**params` by `params[name]`, not behind us.
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().setdefault(key, default)

    def items(self) -> Any:
        self._note_all()
        return super().items()

    def values(self) -> Any:
        self._note_all()
        return super().values()

    def copy(self) -> dict[str, Any]:
        self._note_all()
        return super().copy()

    def __or__(self, other: Any) -> Any:
        self._note_all()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self._note_all()
        return super().__ror__(other)

    def __reduce__(self) -> Any:
        # Copies and pickles know nothing of who reads. The items are given apart: what is one object stays one.
        return type(self), (), None, None, iter(super().items())

    def merged(self, **values: Any) -> Params:
        """These parameters with `values` set over them."""
        return Params({**self, **values})

    def _said(self, key: Any) -> str:
        return f"no parameter {key!r}; there are: {', '.join(map(str, self)) or 'none'}"


def _nested(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """`values` with Params in place of the mappings among them. A defaultdict and its like stay what they are."""
    found: dict[Any, Any] = {}
    for key, value in values.items():
        becomes_params = type(value) is dict or (isinstance(value, Mapping) and not isinstance(value, dict))
        found[key] = value
        if becomes_params:
            found[key] = Params.__new__(Params)
            dict.update(found[key], _nested(value))
    return found


def plain_params(values: Any) -> Any:
    """Return params that are watched as the dict that the config has; any other object as it is. Nothing is read."""
    if not isinstance(values, Params) or values._reads is None:
        return values

    def plain(value: Any) -> Any:
        return {key: plain(one) for key, one in dict.items(value)} if isinstance(value, Params) else value

    return plain(values)


def copied_params(values: Any, **more: Any) -> Any:
    """What a function gets as params: Params of a dict, a copy of any other object, with the items `more` in it.

    tf.estimator's took any object; one of argparse or of a class of the user's own has attributes in place of items.
    """
    if values is None or type(values) in (dict, Params):
        reads = values._reads if isinstance(values, Params) else None
        given = Params(values and {key: dict.__getitem__(values, key) for key in values}).merged(**more)  # not a read
        if reads is None:
            return given
        reads.is_used = True
        return given.watched(reads)
    values = copy.deepcopy(values)
    for name, value in more.items():
        if hasattr(values, "__setitem__"):
            values[name] = value
        else:
            setattr(values, name, value)
    return values


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one call of the inner loop did: `num_steps` updates, read back in one go.

    Attributes:
      first_step: global step of the first update of the loop (the first ever is 1).
      last_step: global step after the loop; `last_step - first_step + 1 == len(losses)`.
      losses: `[num_steps]` float, the mean over the global batch of each step.
      examples: training examples consumed by the loop, over all replicas.
      secs: wall time of the loop, with its input.
      values: what else the step returned, by name, each stacked `[num_steps, ...]`.
    """

    first_step: int
    last_step: int
    losses: np.ndarray
    examples: int
    secs: float
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.losses)


class IteratorInitializer:
    """Stands for the `initializer` of an iterator of TensorFlow 1, which hooks run before the first step.

    Attributes:
      placeholders: of an input function, of which it makes its dataset: each with the variable that holds what is fed.
    """

    def __init__(self) -> None:
        self.placeholders: Sequence[tuple[type_of_tensor, Any]] = ()


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """What is asked of one step beside the step itself. False: nothing.

    Attributes:
      fetches: tensors and operations of its trace.
      feeds: placeholders of its trace.
      values: of `feeds`, tensors.
    """

    fetches: Sequence[type_of_tensor] = ()
    feeds: Sequence[type_of_tensor] = ()
    values: Sequence[type_of_tensor] = ()

    def __bool__(self) -> bool:
        return bool(self.fetches)

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """The same for requests that differ in nothing but `values`."""
        return tuple(map(id, self.fetches)), tuple(map(id, self.feeds))
