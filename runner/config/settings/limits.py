"""How a setting is declared: its default, the values that it may have, and what else the readers of a key need to know.

The limits are checked for both users: `runner.config.parsing` names the key, and the constructor of a class that
scripts make (`check_fields`) names the argument.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.config.mistakes import NotAllowed, OutOfRange, WrongType
from runner.system.redaction import masked_value
from runner.system.suggestions import did_you_mean

MOST_COUNTED = 2**31 - 1
"""Largest number of things or of seconds: TensorFlow's loops and waits have 32 bits."""


@dataclass(frozen=True)
class Limits:
    """The values that a setting may have; `check_limits` checks them.

    Attributes:
      choices: allowed values of the setting, or of each element of a list; (): any.
      minimum, maximum: the smallest and largest number, both allowed. TensorFlow counts in 64 bits, hence the default.
      above, below: exclusive bounds of a number.
      auto: the word "auto" is allowed in place of an integer.
    """

    choices: tuple[Any, ...] = ()
    minimum: int | None = None
    maximum: int = 2**63 - 1
    above: float | None = None
    below: float | None = None
    auto: bool = False


def setting(
    default: Any, *, shown_only: bool = False, needs_optimizer: str | Mapping[Any, str] = "",
    not_eager: bool = False, **limits: Any,
) -> Any:  # fmt: skip
    """Declare a field with its `Limits` and what else its readers need to know.

    Args:
      default: the default, which a config without the key has.
      shown_only: the key changes only how a run is shown, watched, ranked or recorded, and not what it computes.
      needs_optimizer: why only the default works with train_op=, as the end of a sentence: "train_op=, which ..."; or
        such a reason for each value that does not work.
      not_eager: only the default works in an eager step (`run.eager`).
      limits: arguments of `Limits`.
    """
    marks = {"shown_only": shown_only, "needs_optimizer": needs_optimizer, "not_eager": not_eager}
    return field(default=default, metadata={"limits": Limits(**limits), **marks})


def count(default: Any, **limits: Any) -> Any:
    """Declare a field for a number of things or of seconds."""
    return setting(default, **{"maximum": MOST_COUNTED, **limits})


def ranking() -> Any:
    """Declare the field `mode` beside a field `metric`: min, max, or None to decide by the metric's name."""
    return setting(None, choices=("min", "max"))


def limits_of(setting: dataclasses.Field[Any]) -> Limits:
    """Return the limits that a field declares; empty limits if it declares none."""
    limits: Limits = setting.metadata.get("limits", Limits())
    return limits


def as_typed(value: Any) -> str:
    """Return a value as on the command line, without secrets."""
    if isinstance(value, Mapping):
        entries = [f"{name}:{as_typed(masked_value(name, entry))}" for name, entry in value.items()]
        return "{" + ",".join(entries) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def check_limits(limits: Limits, value: Any, written: Callable[[Any], str]) -> None:
    """Check a value, or each value of a list, against the limits of its field.

    Args:
      limits: the limits.
      value: the value.
      written: returns the setting as the user would write it, "key=value", for a value.

    Raises:
      ConfigError: a value is not allowed.
    """
    if limits.auto and value == "auto":
        return
    if limits.auto and (not isinstance(value, int) or isinstance(value, bool)):
        shown = "null" if value is None else repr(value)
        raise WrongType(f"{written(shown)} is neither 'auto' nor a whole number.")
    elements = value if isinstance(value, list) else [value]
    for element in elements:
        if limits.choices and element not in limits.choices:
            choices = [as_typed(choice) for choice in limits.choices]
            hint = did_you_mean(element, choices)
            raise NotAllowed(f"{written(element)} is not allowed.{hint} Allowed: {', '.join(choices)}.")
    for element in elements:
        _check_bounds(limits, element, written)
        _check_size(limits, element, written)


def _check_bounds(limits: Limits, value: Any, written: Callable[[Any], str]) -> None:
    """Check one value against `minimum`, `above` and `below`; `_check_size` checks `maximum`."""
    # The comparisons are written so that they refuse NaN, for which every comparison is false.
    if limits.minimum is not None and not value >= limits.minimum:
        raise OutOfRange(f"{written(value)} must be at least {limits.minimum}.")
    above = limits.above
    below = limits.below
    is_above = above is None or value > above
    is_below = below is None or value < below
    if not (is_above and is_below):
        bounds = f"more than {above}" if below is None else f"more than {above} and less than {below}"
        raise OutOfRange(f"{written(value)} must be {bounds}.")


def _check_size(limits: Limits, value: Any, written: Callable[[Any], str]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OutOfRange(f"{written(value)} is not finite. Use a number, or null if that is allowed.")
    if isinstance(value, int) and abs(value) > limits.maximum:
        shown = value if value.bit_length() <= 80 else f"a number of {value.bit_length()} bits"
        raise OutOfRange(f"{written(shown)} is too large: at most {limits.maximum}.")


def check_fields(values: Any) -> None:
    """Check the fields of a dataclass that a script has made against the limits that they declare.

    Raises:
      ConfigError: a value is not allowed.
    """
    for argument in dataclasses.fields(values):
        value = getattr(values, argument.name)
        if not is_off(argument, value):
            check_limits(limits_of(argument), value, f"{type(values).__name__}({argument.name}={{!r}})".format)


def is_off(setting: dataclasses.Field[Any], value: Any) -> bool:
    """Report whether `value` turns a setting off, which its limits do not concern: None, or 0 where that means None."""
    takes_none = "None" in str(setting.type)
    takes_zero = bool(setting.metadata.get("zero"))
    return (value is None and takes_none) or (value == 0 and takes_zero)
