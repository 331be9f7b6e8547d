"""Types of values that the runner's packages pass to each other: plain Python, no TensorFlow."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

type_of_tensor = Any
"""A tf.Tensor; not named directly, so that this file does not import TensorFlow."""

Features = Any
"""A tensor, or a nest (dict, tuple) of tensors, each `[batch, ...]`."""

Labels = Any
"""Like Features; None if the input has no labels."""

ONLY_KEY = "predictions"
"""The name of predictions that are not a dict, in files and in predict.keys."""


class WeightedLabels(NamedTuple):
    """The labels of an input function that yields (features, labels, sample_weight), until model_fn is called.

    Attributes:
      labels: what model_fn gets as its labels.
      sample_weight: weights `[batch]`, or a structure of them for several outputs, for a compiled Keras model.
    """

    labels: Labels
    sample_weight: Any


class ParamReads:
    """A record of which params a user's function has read, over all copies that it was given.

    Args:
      names: the params that the config sets.

    Attributes:
      is_used: whether any function has been given a copy.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.is_used = False
        self._unread = dict.fromkeys(names)

    @property
    def unread(self) -> list[str]:
        """Return the names that were never read; an empty list if no function was called."""
        if not self.is_used:
            return []
        return list(self._unread)

    def mark_read(self, name: Any) -> None:
        self._unread.pop(name, None)

    def mark_all_read(self) -> None:
        self._unread.clear()


NO_READS = ParamReads(())
"""The reads of Params that nobody watches."""


class Params(dict[str, Any]):
    """The parameters of a model or an input: a dict whose items are attributes, too.

    `params["width"]` and `params.width` are the same value. Nested dicts become Params as well; subclasses of dict stay
    as they are. The values are copied, so a model_fn that changes its params does not change its caller's. A name that
    is also a method of dict (`items`) is reached as an item only.

    Raises:
      KeyError, AttributeError: there is no such name; the message lists the names that exist.
    """

    _reads = NO_READS

    def __init__(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        super().__init__(_nested(copy.deepcopy({**dict(values or {}), **named})))

    def watched(self, reads: ParamReads) -> Params:
        """Return these params; `reads` notes every later read, including reads of copies made by `copied_params`."""
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

    # --- which params count as read: an item that is asked for; every item if the whole dict is passed on

    def __getitem__(self, key: Any) -> Any:
        self._reads.mark_read(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._reads.mark_read(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # Names are not values. Because `__iter__` is defined, Python expands `**params` by `params[name]`, which is
        # noted.
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._reads.mark_read(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._reads.mark_read(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._reads.mark_read(key)
        return super().setdefault(key, default)

    def items(self) -> Any:
        self._reads.mark_all_read()
        return super().items()

    def values(self) -> Any:
        self._reads.mark_all_read()
        return super().values()

    def copy(self) -> dict[str, Any]:
        self._reads.mark_all_read()
        return super().copy()

    def __or__(self, other: Any) -> Any:
        self._reads.mark_all_read()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self._reads.mark_all_read()
        return super().__ror__(other)

    def __reduce__(self) -> Any:
        # Copies and pickles do not note reads. Items are passed separately, so an object that occurs twice stays one
        # object.
        return type(self), (), None, None, iter(super().items())

    def merged(self, **values: Any) -> Params:
        """Return these parameters updated with `values`."""
        return Params({**self, **values})

    def _said(self, key: Any) -> str:
        return f"no parameter {key!r}; there are: {', '.join(map(str, self)) or 'none'}"


def _nested(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `values` with its plain dicts as Params. Subclasses of dict (defaultdict) stay as they are."""
    found: dict[Any, Any] = {}
    for key, value in values.items():
        is_other_mapping = isinstance(value, Mapping) and not isinstance(value, dict)
        becomes_params = type(value) is dict or is_other_mapping
        found[key] = value
        if becomes_params:
            # Not by the constructor, which would copy the values once more.
            found[key] = Params.__new__(Params)
            dict.update(found[key], _nested(value))
    return found


def plain_params(values: Any) -> Any:
    """Return watched Params as the plain dict of the config, and any other object unchanged. Nothing counts as read."""
    if not isinstance(values, Params) or values._reads is NO_READS:
        return values

    def plain(value: Any) -> Any:
        if not isinstance(value, Params):
            return value
        return {key: plain(item) for key, item in dict.items(value)}  # not those of Params, which note reads

    return plain(values)


def copied_params(values: Any, **more: Any) -> Any:
    """Return the params that a user's function receives: a dict as Params, any other object as a copy.

    tf.estimator accepted any object as params.

    Args:
      values: the params as the user gave them.
      more: items to add. An object without items (argparse's Namespace) gets them as attributes.
    """
    if values is None or type(values) in (dict, Params):
        reads = values._reads if isinstance(values, Params) else NO_READS
        reads.is_used = True
        items: dict[str, Any] = {}
        for key in values or ():
            items[key] = dict.__getitem__(values, key)  # unlike `values[key]`, this notes no read
        given = Params(items).merged(**more)
        if reads is NO_READS:
            return given
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
    """The outcome of one call of the training loop: `num_steps` updates, read back from the device at once.

    Attributes:
      first_step: global step of the call's first update; the first update of a model is 1.
      last_step: global step after the call; `last_step - first_step + 1 == len(losses)`.
      losses: floats `[num_steps]`, for each step the mean loss over the global batch.
      examples: number of training examples that the call consumed, over all replicas.
      secs: wall time of the call in seconds, waiting for input included.
      values: name -> other results of the steps, each `[num_steps, ...]`.
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
    """The `initializer` of a TensorFlow 1 iterator, which a hook runs before the first step.

    Attributes:
      placeholders: the placeholders from which the input function builds its dataset, each with the variable that holds
        the value fed for it.
    """

    placeholders: Sequence[tuple[type_of_tensor, Any]] = ()


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """The request of a hook for one step, in addition to the step itself; falsy if it requests nothing.

    Attributes:
      fetches: tensors and operations of the step's trace to evaluate.
      feeds: placeholders of the step's trace to feed.
      values: the tensors for `feeds`, in the same order.
      names: what native hooks fetch of each example of all replicas, such as `predictions/probabilities`.
    """

    fetches: Sequence[type_of_tensor] = ()
    feeds: Sequence[type_of_tensor] = ()
    values: Sequence[type_of_tensor] = ()
    names: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.fetches or self.names)

    @property
    def key(self) -> tuple[tuple[Any, ...], ...]:
        """Return a key that is equal for requests that differ only in `values`."""
        fetches = tuple(map(id, self.fetches))
        feeds = tuple(map(id, self.feeds))
        return fetches, feeds, tuple(self.names)
