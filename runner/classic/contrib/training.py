"""`tf.contrib.training.HParams`: typed hyperparameters as attributes."""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ASSIGNMENT = re.compile(
    r"\s*(?P<name>[A-Za-z]\w*)(?:\[(?P<index>\d+)\])?\s*=\s*(?:\[(?P<list>[^\]]*)\]|(?P<one>[^,\[]*))\s*(?:,|$)"
)


class HParams:
    """Hyperparameters, given by name; each keeps the type of its first value.

        hparams = HParams(learning_rate=0.1, units=[8, 4], activation="relu")
        hparams.parse("learning_rate=0.3,units=[16,8]")

    An Estimator accepts it as `params`.
    """

    def __init__(self, hparam_def: Any = None, model_structure: Any = None, **kwargs: Any) -> None:
        if hparam_def is not None:
            raise ValueError("HParams(hparam_def=...) is not supported: give hyperparameters as name=value.")
        self._hparam_types: dict[str, tuple[type, bool]] = {}
        self._model_structure = model_structure
        for name, value in kwargs.items():
            self.add_hparam(name, value)

    def add_hparam(self, name: str, value: Any) -> None:
        """Add a new hyperparameter. The type of a list is that of its first element.

        Raises:
          ValueError: the name is taken, or the value is an empty list.
        """
        if getattr(self, name, None) is not None:
            raise ValueError(f"Hyperparameter name is reserved: {name}")
        is_list = isinstance(value, list | tuple)
        if is_list and not value:
            raise ValueError(f"Multi-valued hyperparameters cannot be empty: {name}")
        kind = type(value[0]) if is_list else type(value)
        self._hparam_types[name] = (kind, is_list)
        setattr(self, name, list(value) if isinstance(value, tuple) else value)

    def set_hparam(self, name: str, value: Any) -> None:
        """Change a value. An int is accepted for a float, and converted.

        Raises:
          KeyError: there is no such hyperparameter.
          ValueError: the value has another type, or is a list although the first value was not, or the reverse.
        """
        kind, is_list = self._hparam_types[name]
        if isinstance(value, list) != is_list:
            wanted = "multi-valued" if is_list else "single-valued"
            raise ValueError(f"Hyperparameter {name!r} is {wanted}, and cannot be set to {value!r}.")
        if is_list:
            converted = [_cast(name, kind, item) for item in value]
        else:
            converted = _cast(name, kind, value)
        setattr(self, name, converted)

    def del_hparam(self, name: str) -> None:
        """Remove a hyperparameter, if it exists."""
        if self._hparam_types.pop(name, None) is not None:
            delattr(self, name)

    def parse(self, values: str) -> HParams:
        """Set values from a text such as `name=value,name=[1,2],name[1]=3`, and return this object.

        Raises:
          ValueError: the text has another form, or an unknown name.
        """
        for assignment in _assignments(values):
            self._set_from_text(assignment, values)
        return self

    def _set_from_text(self, assignment: re.Match[str], values: str) -> None:
        """Set the value of one assignment in a text: `name=value`, `name=[1,2]` or `name[1]=3`.

        Args:
          assignment: a match of _ASSIGNMENT.
          values: the whole text, for messages.
        """
        name = assignment["name"]
        text = assignment["one"]
        if name not in self._hparam_types:
            raise ValueError(f"Unknown hyperparameter type for {name}")
        kind, is_list = self._hparam_types[name]
        parse = _parser(kind)
        try:
            if assignment["index"] is not None:
                if not is_list:
                    raise ValueError("it is single-valued, and has no elements")
                changed = list(getattr(self, name))
                index = int(assignment["index"])
                changed += [None] * (index + 1 - len(changed))  # a list that is too short grows
                changed[index] = parse(text.strip())
                setattr(self, name, changed)
            elif assignment["list"] is not None:
                self.set_hparam(name, _parsed_list(parse, assignment["list"]))
            else:
                parsed = parse(text.strip())
                self.set_hparam(name, [parsed] if is_list else parsed)  # a list may be given as one value
        except ValueError as error:
            raise ValueError(f"Could not parse hparam {name} in {values!r}: {error}") from None

    def override_from_dict(self, values_dict: Mapping[str, Any]) -> HParams:
        """Set the values of a dict, and return this object."""
        for name, value in values_dict.items():
            self.set_hparam(name, value)
        return self

    def set_model_structure(self, model_structure: Any) -> None:
        self._model_structure = model_structure

    def get_model_structure(self) -> Any:
        return self._model_structure

    def to_json(self, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        """Return all values as JSON, without functions."""
        values = {name: value for name, value in self.values().items() if not callable(value)}
        return json.dumps(values, indent=indent, separators=separators, sort_keys=sort_keys)

    def parse_json(self, values_json: str) -> HParams:
        """Set the values of a JSON object, and return this object."""
        return self.override_from_dict(json.loads(values_json))

    def values(self) -> dict[str, Any]:
        """Return the hyperparameters, name -> value."""
        return {name: getattr(self, name) for name in self._hparam_types}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` if there is none.

        Raises:
          ValueError: `default` has another type than the hyperparameter.
        """
        if key not in self._hparam_types:
            return default
        kind, is_list = self._hparam_types[key]
        if default is not None:
            if isinstance(default, list) != is_list:
                raise ValueError(
                    f"get({key!r}, default={default!r}): the default has another type than the hyperparameter, "
                    f"{getattr(self, key)!r}."
                )
            for value in default if is_list else [default]:
                _cast(key, kind, value)  # called only for its error, if the type is another
        return getattr(self, key)

    def __contains__(self, key: str) -> bool:
        return key in self._hparam_types

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HParams) and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(sorted(self.values().items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"


_ACCEPTED: Mapping[type, Any] = {bool: bool, float: numbers.Number, int: numbers.Integral, str: str}


def _cast(name: str, kind: type, value: Any) -> Any:
    """Return the value converted to the hyperparameter's type.

    Raises:
      ValueError: the conversion would lose information.
    """
    if value is None or kind is type(None) or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    # A bool is an int, too, so it comes first.
    accepted = next((taken for base, taken in _ACCEPTED.items() if issubclass(kind, base)), ())
    if not isinstance(value, accepted) or isinstance(value, bool) != issubclass(kind, bool):
        raise ValueError(f"Could not cast hparam {name!r} of type {kind.__name__} from value {value!r}")
    return kind(value)


def _parser(kind: type) -> Callable[[str], Any]:
    return _as_bool if kind is bool else kind


def _as_bool(text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise ValueError(f"{text!r} is not a bool: use true or false")


def parse_values(values: str, type_map: Mapping[str, type]) -> dict[str, Any]:
    """Return name -> value from a text such as `a=1,b=[2,3]`. Of elements (`c[0]=4,c[2]=5`) it is index -> value.

    Args:
      values: the text.
      type_map: name -> type of each allowed name.

    Raises:
      ValueError: the text has another form, a name that is not allowed, a value of another type, or two values for a
        name.
    """
    parsed: dict[str, Any] = {}
    for assignment in _assignments(values):
        name = assignment["name"]
        if name not in type_map:
            raise ValueError(f"Malformed hyperparameter value: {values[assignment.start() :]}")
        parse = _parser(type_map[name])
        items = assignment["list"]
        if items is None:
            value = parse(assignment["one"].strip())
        else:
            value = _parsed_list(parse, items)
        if assignment["index"] is None:
            _add_once(parsed, name, value, values)
            continue
        if items is not None:
            raise ValueError(f"Assignment of a list to an element of {name} in {values!r}")
        elements = parsed.setdefault(name, {})
        if not isinstance(elements, dict):
            raise ValueError(f"Multiple assignments to variable {name!r} in {values!r}")
        _add_once(elements, int(assignment["index"]), value, values)
    return parsed


def _add_once(parsed: dict[Any, Any], key: Any, value: Any, values: str) -> None:
    if key in parsed:
        raise ValueError(f"Multiple assignments to variable {key!r} in {values!r}")
    parsed[key] = value


def _assignments(values: str) -> Iterator[re.Match[str]]:
    """Yield the assignments of a text such as `a=1,b=[2,3]`.

    Raises:
      ValueError: the text has another form.
    """
    position = 0
    while position < len(values):
        assignment = _ASSIGNMENT.match(values, position)
        if assignment is None:
            raise ValueError(f"Malformed hyperparameter value: {values[position:]}")
        position = assignment.end()
        yield assignment


def _parsed_list(parse: Callable[[str], Any], text: str) -> list[Any]:
    return [parse(item.strip()) for item in text.split(",") if item.strip()]
