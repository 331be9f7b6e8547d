"""Mask secrets in everything that is logged, recorded or shown.

A value is secret by the name of its key (`runner.system.secret_names`), because a config lists it (`run.secrets`), or
by its form in a text (`runner.system.secret_texts`). What a config lists is decided once, by the command that composes
it, and stands in the config that it saves: whoever reads that config masks by its list, as a `SecretList`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from runner.system.secret_names import LIST, Types, types_hidden_by, words_of
from runner.system.secret_texts import MASK, NO_SECRETS, REFERENCE, SHORTEST, masked_in, secrets_in


@dataclass(frozen=True)
class SecretList:
    """What one config lists as secret (`run.secrets`), beside what names of keys say.

    Attributes:
      names: names of keys, as `words_of` returns them.
      paths: full key, in which an index of a list is a part (`model.params.urls.0`) -> the values of environment
        variables that are the only secrets in the text at this key; none: all of the text is secret.
      values: values of the environment variables that are listed.
    """

    names: frozenset[str] = frozenset()
    paths: Mapping[str, frozenset[str]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, listed: Any, env: Mapping[str, str]) -> SecretList:
        """Return the list with the entries of `listed`, the value of `run.secrets`; what is no entry is left out.

            customer_id                   the name of a key
            $API_TOKEN                    an environment variable: its value, wherever it is
            model.params.url              a key
            model.params.url=$A,$B        a key with the values of these variables in it, and no other secret

        Args:
          listed: the value of `run.secrets`.
          env: where the values of variables are found. Without one of them, all at its keys is secret.
        """
        names: set[str] = set()
        paths: dict[str, frozenset[str]] = {}
        values: set[str] = set()
        if not isinstance(listed, list | tuple):
            return cls()
        entries = [entry for entry in listed if isinstance(entry, str)]
        for entry in entries:
            key, _, variables = entry.partition("=")
            if key.startswith("$"):
                values |= _values_of([key], env)
            elif "." in key or "[" in key:
                paths[_with_dots(key)] = _values_of(variables.split(","), env)
            else:
                names.add(words_of(key))
        return cls(frozenset(names), paths, frozenset(values))

    def __or__(self, other: SecretList) -> SecretList:
        """Return a list with the entries of both."""
        paths = {**self.paths, **other.paths}
        for key in self.paths.keys() & other.paths.keys():
            if self.paths[key] != other.paths[key]:  # then all of the text at the key is secret
                paths[key] = frozenset()
        return SecretList(self.names | other.names, paths, self.values | other.values)

    def entries(self) -> list[str]:
        """Return the names and keys, for `of`; without variables, whose values are not written anywhere."""
        return [*sorted(self.names), *self.paths]

    def at(self, key: str) -> frozenset[str] | None:
        """Return the entry of `paths` for a full key or one above it; None: there is none."""
        if not self.paths:
            return None
        parts = _with_dots(key.lstrip("+~")).split(".")
        for above in accumulate(parts, "{}.{}".format):  # model, model.params, model.params.url
            if above in self.paths:
                return self.paths[above]
        return None


NO_LIST = SecretList()
"""The list of a config that lists nothing."""


def _values_of(variables: Iterable[str], env: Mapping[str, str]) -> frozenset[str]:
    """Return the values of environment variables, written as `$NAME`. If a variable is not set, or its value is too
    short to be searched for, return no values: then all of the text is secret.
    """
    found = [env.get(name.strip().removeprefix("$"), "") for name in variables]
    if min(map(len, found)) < SHORTEST:
        return frozenset()
    return frozenset(found)


_also_secret: frozenset[str] = frozenset()
"""Names of keys that the configs of this process's command list."""

_secret_paths: Mapping[str, frozenset[str]] = {}
"""Full keys that they list."""

_secret_values: frozenset[str] = frozenset()
"""Values of environment variables that they list."""

_hidden_for_now: list[SecretList] = []
"""The lists of the contexts of `hiding` that are open, in any thread."""


def extend_secrets(names: Iterable[str], env: Mapping[str, str] = os.environ) -> None:
    """Let the messages of this process hide what `names` (the value of `run.secrets`) list, instead of what earlier
    calls have listed. This is for messages; what is recorded of a run is masked by the list of its own config.
    """
    global _also_secret, _secret_paths, _secret_values
    listed = SecretList.of(list(names), env)
    _also_secret = listed.names
    _secret_paths = listed.paths
    _secret_values = listed.values


def also_hide(listed: SecretList) -> None:
    """Let the messages of this process hide this list, too, until the next `extend_secrets`."""
    global _also_secret, _secret_paths, _secret_values
    both = list_of_process() | listed
    _also_secret = both.names
    _secret_paths = both.paths
    _secret_values = both.values


@contextmanager
def hiding(listed: SecretList) -> Iterator[None]:
    """Let the messages of this process hide this list, too, inside this context."""
    _hidden_for_now.append(listed)
    try:
        yield
    finally:
        _hidden_for_now.remove(listed)


def list_of_process() -> SecretList:
    """Return what the configs of this process list."""
    found = SecretList(_also_secret, _secret_paths, _secret_values)
    for further in tuple(_hidden_for_now):
        found |= further
    return found


def _or_list_of_process(listed: SecretList | None) -> SecretList:
    return list_of_process() if listed is None else listed


def masked(tree: Any, listed: SecretList | None = None, at: str = "") -> Any:
    """Return a copy of nested mappings and lists with `***` in place of secrets; null, true and false stay.

    Each part of a dotted key (`model.params.db.password`) is checked, as if the keys were nested.

    Args:
      tree: the mapping, list or value.
      listed: what its config lists; None: what the configs of this process list.
      at: the key at which the tree is in its config.
    """
    return _mask_tree(tree, _position_at(at, _or_list_of_process(listed)))


def secrets_of(tree: Any, listed: SecretList | None = None, at: str = "") -> set[str]:
    """Return the values that `masked` hides, as texts; of a URL, its password. Arguments as of `masked`."""
    position = _position_at(at, _or_list_of_process(listed))
    found = position.listed.values.union(_secrets_in_tree(tree, position))
    return {text for text in found if text.lower() not in NO_SECRETS}


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with `***` in place of each of `secrets` that is long enough, also where it is written as in JSON,
    URLs or base64; and of what looks like a secret.
    """
    return masked_in(text, {*secrets, *list_of_process().values})


def masked_override(text: str, listed: SecretList | None = None) -> str:
    """Return an override of the command line, `key=value`, with `***` for a secret value."""
    listed = _or_list_of_process(listed)
    key, equals, value = text.partition("=")
    # An interpolation is no secret, and the command can be repeated with it.
    is_shown = value.lower() in ("", "null", "true", "false") or REFERENCE.fullmatch(value)
    if not equals or is_shown:
        return masked_in(text, listed.values)
    hidden = hidden_by(key, listed)
    # The value is a text here, but a number in the config. Keys that hide only texts do not hide numbers.
    is_number = re.fullmatch(r"[-+\d.,e]+", value) is not None
    if object in hidden or (hidden and not is_number):
        return f"{key}={MASK}"
    if "{" in value:
        # {user: me, password: x}: if one of the keys inside is secret, mask the whole value, since parsing Hydra's
        # grammar here would be complex.
        inner = re.findall(r"([\w.-]+)['\"]?\s*:", value)
        if any(hidden_by(f"{key}.{name}", listed) for name in inner):
            return f"{key}={MASK}"
    return masked_in(text, listed.values)


def secrets_of_overrides(overrides: Iterable[str]) -> set[str]:
    """Return the values that `masked_override` hides, including single ones of a list or a sweep, for `mask_text`."""
    found: set[str] = set()
    for text in overrides:
        key, _, value = text.partition("=")
        if key.lstrip("+~") == LIST:
            continue
        inner = [(key, value), *re.findall(r"([\w.-]+)['\"]?\s*:\s*([^,{}]+)", value)]
        for name, secret in inner:
            if masked_override(f"{name}={secret}") == f"{name}={MASK}":
                found.add(secret)
                found.update(part.strip("[]'\" ") for part in secret.split(","))
        found |= set(secrets_in(value))
    return found - NO_SECRETS


def masked_value(key: str, value: Any) -> Any:
    """Return `value` as it may be shown beside its `key`."""
    return masked(value, at=key)


def hidden_by(key: str, listed: SecretList | None = None) -> Types:
    """Return the types of values that are secret under `key`, for isinstance; () if none."""
    listed = _or_list_of_process(listed)
    if key.lstrip("+~") == LIST:
        return ()
    if listed.at(key) is not None:
        return (object,)
    return _hidden_by_names(key, listed.names)


def _hidden_by_names(key: str, names: frozenset[str]) -> Types:
    """Return the types of values that the parts of a dotted key hide, each by itself.

    Args:
      names: listed names, as `words_of` returns them, which hide values of any type.
    """
    hidden: Types = ()
    for part in key.split("."):
        words = words_of(part)
        types = types_hidden_by(words)
        if words in names or object in types:
            return (object,)
        hidden = hidden or types
    return hidden


@dataclass(frozen=True)
class _ConfigPosition:
    """The position of a value in a config, and what is known to be secret there.

    Attributes:
      key: the full key.
      hidden: types of values that the names in the key hide.
      variable_values: what `SecretList.paths` has for the key or one above it: these values are secret, or without any
        all of the text; None: neither key is listed.
      listed: what the config lists.
    """

    key: str
    hidden: Types
    variable_values: frozenset[str] | None
    listed: SecretList

    def below(self, part: object) -> _ConfigPosition:
        """Return the position of the value under the key or index `part` of the mapping or list at this position."""
        key = f"{self.key}.{part}".removeprefix(".")
        variable_values = self.variable_values
        if variable_values is None:
            variable_values = self.listed.at(key)
        hidden: Types = ()
        if key != LIST:
            hidden = self.hidden + _hidden_by_names(str(part), self.listed.names)
        return _ConfigPosition(key, hidden, variable_values, self.listed)

    def hides(self, value: object) -> bool:
        """Report whether a value is secret as a whole, by a name or as that of a variable."""
        if isinstance(value, bool):
            return False
        return isinstance(value, self.hidden) or str(value) in self.listed.values

    def shown(self, value: Any) -> Any:
        """Return the value without its secrets."""
        if value is None:
            return None
        if self.hides(value):
            return MASK
        if self.variable_values is not None and not self._is_of_variables(value):
            return MASK
        if not isinstance(value, str):
            return value
        secrets = self.listed.values
        if self.variable_values is not None:
            secrets |= self.variable_values
        return masked_in(value, secrets)

    def _is_of_variables(self, value: object) -> bool:
        """Report whether the value, as text, has the values of all its listed variables. It has not if a variable was
        changed since the config was composed; then all of the text is masked.
        """
        if not self.variable_values:
            return False
        text = str(value)
        return all(secret in text for secret in self.variable_values)

    def secrets(self, value: object) -> Iterator[str]:
        """Yield what is secret of the value, as texts."""
        # The entries of `run.secrets` name secrets and are none.
        is_entry = self.key.startswith(f"{LIST}.")
        if isinstance(value, bool) or value is None or is_entry:
            return
        if self.variable_values is not None or self.hides(value):
            yield str(value)
        elif isinstance(value, str):
            yield from secrets_in(value)


def _position_at(at: str, listed: SecretList) -> _ConfigPosition:
    top = _ConfigPosition("", (), None, listed)
    return top.below(at) if at else top


def _mask_tree(tree: Any, position: _ConfigPosition) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mask_tree(value, position.below(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mask_tree(value, position.below(number)) for number, value in enumerate(tree)]
    return position.shown(tree)


def _secrets_in_tree(tree: Any, position: _ConfigPosition) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _secrets_in_tree(value, position.below(key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _secrets_in_tree(value, position.below(number))
    else:
        yield from position.secrets(tree)


def _with_dots(key: str) -> str:
    """Return a key of OmegaConf, `urls[0].user`, with the index of a list as a part: `urls.0.user`."""
    return re.sub(r"\[(\w+)\]", r".\1", key)
