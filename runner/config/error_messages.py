"""Messages about wrong keys of the config and values of a wrong type.

Messages about what Hydra itself refuses are in `runner.config.hydra_mistakes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from runner.config.changed_keys import REMOVED
from runner.config.mistakes import ConfigError, UnknownKey, WrongType
from runner.config.schema import Config, class_at, setting_at
from runner.config.settings.limits import MOST_COUNTED, Limits, as_typed, limits_of
from runner.system.redaction import masked_override
from runner.system.suggestions import nearest, suggestion

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[str]": "a list",
    "list[Any]": "a list",
}
_GROUP = "a group of settings"
_ANYTHING = "allowed here"


def unknown_key(key: str, value: Any = None, typed: str = "") -> ConfigError:
    """Return the error for a key that the schema does not have, or no longer has.

    The message suggests the nearest key, which may be in another group.

    Args:
      key: the key, dotted.
      value: the value that the user gave it.
      typed: the override as the user typed it, if it sets something below `key`; '': it sets `key`.
    """
    shown = key
    if typed or value is not None:
        shown = masked_override(typed or f"{key}={value}")
    if key in REMOVED:
        return UnknownKey(f"{shown}: this key was removed. {REMOVED[key].instead}")
    parent, _, name = key.rpartition(".")
    group_class = class_at(parent)
    siblings: list[str] = []  # none in Hydra's own groups, whose keys are not known here
    if group_class:
        siblings = [setting.name for setting in dataclasses.fields(group_class)]
    hint = suggestion(_meant_keys(key, siblings))
    if not hint and not parent:
        hint = f" A parameter of the model is model.params.{name}."
    known = ""
    if siblings:
        where = f"Keys of {parent}" if parent else "Groups and keys"
        known = f" {where}: {', '.join(siblings)}."
    return UnknownKey(f"{shown}: there is no key {key!r}.{hint}{known}")


def _meant_keys(key: str, siblings: Sequence[str]) -> list[str]:
    """Return the keys that were probably meant by one that the schema does not have; []: none is near.

    Args:
      key: the key, dotted.
      siblings: the names of the keys in its group.
    """
    parent, _, name = key.rpartition(".")
    all_keys = list(_all_keys(Config, ""))
    similar = [f"{parent}.{sibling}".lstrip(".") for sibling in nearest(name, siblings)]
    # `epochs` means train.max_epochs, `workers` means cluster.num_workers.
    same_name = [other for other in all_keys if other.rpartition(".")[2] in (name, f"max_{name}", f"num_{name}")]
    if parent:
        likely = similar or same_name
    else:
        # A key without a group was probably meant for some group: `seed` means run.seed, not a misspelt `sweep`.
        likely = same_name or similar
    return likely[:1] or nearest(key, all_keys, cutoff=0.7)


def unknown_flag(flag: str, value: str = "") -> ConfigError:
    """Return the error for a word that begins with dashes and is no flag: `--max_steps=3`, or `--max_steps 3`.

    Args:
      flag: the word.
      value: the word after it; '' if it does not look like a value.
    """
    name, _, value_in_flag = flag.lstrip("-").partition("=")
    key = name.replace("-", "_")
    all_keys = list(_all_keys(Config, ""))
    same_name = [other for other in all_keys if other == key or other.rpartition(".")[2] == key]
    known = [key] if ".params." in key else same_name
    shown = f"--{masked_override(flag.lstrip('-'))}"
    if known:
        written = masked_override(f"{known[0]}={value_in_flag or value or '...'}")
        return UnknownKey(f"{shown}: keys are written without dashes: {written}.")
    by_name = {other.rpartition(".")[2]: other for other in reversed(all_keys)}
    hint = "".join(f" Did you mean {by_name[close]}?" for close in nearest(key, by_name))
    return UnknownKey(f"{shown}: there is no such option.{hint} Keys are written key=value, flags are in --help.")


def wrong_type(key: str, value: Any) -> ConfigError:
    """Return the error for a value of a type that the schema does not allow."""
    words = _type_in_words(key)
    shown = masked_override(f"{key}={as_typed(value)}")
    if words.endswith(" or null"):
        return WrongType(f"{shown} is neither {words.removesuffix(' or null')} nor null.")
    return WrongType(f"{shown} is not {words}.")


def choices_of(key: str) -> list[str]:
    """Return the values that a key may have, as the user types them; []: they are not listed, or there is no key."""
    setting = setting_at(key)
    if setting is None:
        return []
    choices = [as_typed(choice) for choice in limits_of(setting).choices]
    if choices and "None" in str(setting.type):
        choices.append("null")
    return choices


def limits_in_words(key: str) -> str:
    """Return the values that a key allows: `A whole number or null, at least 1.`; '' if anything is allowed."""
    setting = setting_at(key)
    limits = limits_of(setting) if setting else Limits()
    if limits.choices:
        return f"Allowed: {', '.join(choices_of(key))}."
    words = "a whole number or auto" if limits.auto else _type_in_words(key)
    if words in (_GROUP, _ANYTHING):
        return ""
    parts = [words]
    if limits.minimum is not None:
        parts.append(f"at least {limits.minimum}")
    if limits.maximum < MOST_COUNTED:  # that of TensorFlow's integers is not worth a word
        parts.append(f"at most {limits.maximum}")
    if limits.above is not None:
        parts.append(f"more than {limits.above}")
    if limits.below is not None:
        parts.append(f"less than {limits.below}")
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _all_keys(cls: type, at: str) -> Iterator[str]:
    hints = get_type_hints(cls)
    for setting in dataclasses.fields(cls):
        hint = hints[setting.name]
        key = f"{at}.{setting.name}".lstrip(".")
        yield key
        if dataclasses.is_dataclass(hint):
            yield from _all_keys(hint, key)  # type: ignore[arg-type]


def _type_in_words(key: str) -> str:
    """Return the type of a key's values: "a whole number or null", _GROUP, or _ANYTHING for all other types."""
    setting = setting_at(key)
    text = str(setting.type) if setting else ""
    for name, words in _TYPES.items():
        if text == name or text.startswith(f"{name} |"):
            takes_null = "None" in text
            return f"{words} or null" if takes_null else words
    if "dict" in text or class_at(key):
        return _GROUP
    return _ANYTHING
