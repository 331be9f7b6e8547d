"""The values that travel between layers: plain Python, no TensorFlow."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

type_of_tensor = Any
"""A tf.Tensor; spelt so that layer 0 does not import TensorFlow."""

Features = Any
"""A tensor, or a nest (dict, tuple) of tensors, each `[batch, ...]`."""

Labels = Any
"""Like Features, or None where the input has no labels."""

Scalars = Mapping[str, float]
"""Name -> Python float."""


class Params(Mapping[str, Any]):
    """A read-only view of a model's or an input's parameters, by item and by attribute.

    `params["width"]` and `params.width` are the same value; nested mappings are Params too.
    The values are copied, so a model_fn cannot change its caller's.

    Raises:
      KeyError, AttributeError: a name that is not there; the message lists those that are.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = {
            key: Params(value) if isinstance(value, Mapping) else copy.deepcopy(value)
            for key, value in (values or {}).items()
        }

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise KeyError(f"no parameter {key!r}; there are: {', '.join(self._values) or 'none'}") from None

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        try:
            return self._values[key]
        except KeyError:
            raise AttributeError(f"no parameter {key!r}; there are: {', '.join(self._values) or 'none'}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Params({self._values!r})"

    def merged(self, **values: Any) -> Params:
        """These parameters with `values` set over them."""
        return Params({**self._values, **values})


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
