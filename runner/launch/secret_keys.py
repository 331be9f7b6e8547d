"""Which keys of a composed config are secret: the command decides it once, and lists them in the config that it saves.

OmegaConf itself evaluates the config, so it knows which environment variables a value came from, however it is written:
`${oc.env:'TOKEN'}`, `${oc.env:${oc.env:WHICH}}`, `${oc.decode:${oc.env:LOGIN}}`, `${model.params.login}`.

`--cfg` and `--info` show a composed config without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from runner.system.redaction import (
    NO_LIST,
    SecretList,
    hidden_by,
    mask_text,
    masked,
    masked_override,
    secrets_of,
    secrets_of_overrides,
)
from runner.system.secret_names import LIST
from runner.system.secret_texts import REFERENCE, has_one_of

SHORTEST_TYPED = 6
"""Shortest secret that is looked for in other keys if it was typed; shorter ones may be words with other meanings."""


def listed_in(composed: DictConfig, env: Mapping[str, str]) -> list[str]:
    """Return `run.secrets` of a composed config and what its secrets came from, as `SecretList.of` takes it: variables
    as `$NAME`, and the full keys of values that came from one, or have a secret of another key in them. Never a value.

    A variable is secret if its name names a secret, or is listed.
    """
    entries = entries_of(OmegaConf.select(composed, LIST, throw_on_resolution_failure=False))
    values = list(_values_of(composed, entries))
    variables: set[str] = set()
    for value in values:
        variables |= value.variables
    entries += [f"${name}" for name in sorted(variables)]
    search = _Search(entries, env, values)
    for value in values:
        entries += search.entries_for(value)
    return list(dict.fromkeys(entries))


def texts_in(composed: DictConfig, listed: SecretList) -> set[str]:
    """Return the secrets in a composed config, as texts."""
    found = set[str](listed.values)
    for value in _values_of(composed, ()):
        found |= secrets_of(value.value, listed, value.key)
    return found


def entries_of(written: Any) -> list[str]:
    """Return the entries of `run.secrets` that are valid; others are reported when the config is checked."""
    if not isinstance(written, list | ListConfig):
        return []
    entries: list[str] = []
    for index in range(len(written)):
        with suppress(OmegaConfBaseException):  # an interpolation to nothing
            entry = written[index]
            if isinstance(entry, str):
                entries.append(entry)
    return entries


@dataclass(frozen=True)
class _Value:
    """A value of the config, as OmegaConf resolved it.

    Attributes:
      key: the full key.
      value: the value; a mapping or list only if it was made of variables.
      variables: names of the secret variables that were read for it.
      is_interpolation: it was written as an interpolation.
    """

    key: str
    value: Any
    variables: frozenset[str]
    is_interpolation: bool


class _Search:
    """The search for values with secrets under keys that do not say so.

    Args:
      entries: names of keys and variables, as in `run.secrets`.
      env: where the values of variables are found.
      values: the values of the config.
    """

    def __init__(self, entries: Sequence[str], env: Mapping[str, str], values: Iterable[_Value]) -> None:
        self._listed = SecretList.of(entries, env)
        names = [entry[1:] for entry in entries if entry.startswith("$")]
        self._variables = {name: env.get(name, "") for name in names}
        typed: set[str] = set()
        for value in values:
            if not value.variables:
                typed |= secrets_of(value.value, self._listed, value.key)
        self._typed = typed - self._listed.values

    def entries_for(self, value: _Value) -> list[str]:
        """Return the entry for a value; nothing if it has no secret, or its key says so."""
        if isinstance(value.value, hidden_by(value.key, self._listed)):
            return []
        text = str(value.value)
        variables_in_text = [name for name, secret in self._variables.items() if has_one_of([secret], text)]
        has_typed = self._has_typed(value, text)
        if not (value.variables or variables_in_text or has_typed):
            return []
        # If the text has the values of all its variables unchanged, and no other secret, only these values are masked.
        # Else the whole text is: a variable may be in it in another form, such as decoded.
        is_of_variables_only = isinstance(value.value, str) and not has_typed
        has_all_variables = value.variables.issubset(variables_in_text)
        are_unchanged = all(self._variables[name] in text for name in variables_in_text)
        if is_of_variables_only and has_all_variables and are_unchanged:
            variables = ",".join(f"${name}" for name in sorted(variables_in_text))
            return [f"{value.key}={variables}"]
        return [value.key]

    def _has_typed(self, value: _Value, text: str) -> bool:
        """Report whether a text has a secret that stands elsewhere in the config."""
        if value.is_interpolation and text in self._typed:
            return True
        sought = self._typed
        if not value.is_interpolation:
            # A short one only where the text was taken from its key: as a word it has other meanings elsewhere.
            sought = {secret for secret in self._typed if len(secret) >= SHORTEST_TYPED}
        # Without what is masked under any key because it looks like a secret, such as the password of a URL.
        return has_one_of(sought, mask_text(text, ()))


def _values_of(composed: DictConfig, entries: Collection[str]) -> Iterator[_Value]:
    """Yield the values of a config. `entries` list secret variables, as `$NAME`."""
    with _noting_variables() as read:
        yield from _values_below(composed, "", entries, read)


def _values_below(node: Container, node_key: str, entries: Collection[str], read: list[str]) -> Iterator[_Value]:
    """Yield the values below `node`.

    Args:
      node_key: the full key of the node, which OmegaConf does not know of a node that an interpolation leads to.
      read: the list of `_noting_variables`.
    """
    if node._is_none() or node._is_missing():
        return
    names: Iterable[Any] = node
    if isinstance(node, ListConfig):
        names = range(len(node))
    for name in names:
        key = f"{node_key}.{name}".removeprefix(".")
        read.clear()
        try:
            value = node[name]  # OmegaConf evaluates it, and adds the variables to `read`
        except OmegaConfBaseException:  # reported when the config is checked
            continue
        if value is None or key == LIST:
            continue
        variables = frozenset(variable for variable in read if _is_secret(variable, entries))
        if not isinstance(value, Container):
            yield _Value(key, value, variables, OmegaConf.is_interpolation(node, name))
        elif variables:  # a resolver has built the mapping or list from them
            yield _Value(key, OmegaConf.to_container(value), variables, is_interpolation=True)
        else:
            yield from _values_below(value, key, entries, read)


def _is_secret(variable: str, entries: Collection[str]) -> bool:
    return f"${variable}" in entries or bool(hidden_by(variable, NO_LIST))


@contextmanager
def _noting_variables() -> Iterator[list[str]]:
    """Yield a list to which OmegaConf adds the name of each environment variable that it reads."""
    names: list[str] = []

    def read(key: str, *default: Any) -> str | None:
        names.append(key)
        return oc.env(key, *default)

    # OmegaConf 2.4 has another name for it.
    register: Any = getattr(OmegaConf, "register_new_resolver", None) or OmegaConf.register_resolver
    register("oc.env", read, replace=True)
    try:
        yield names
    finally:
        register("oc.env", oc.env, replace=True)


# --- what Hydra prints of a config ------------------------------------------------------------------------------------

_COMMENT_AND_BODY = re.compile(r"((?:#[^\n]*\n)*)(.*)", re.DOTALL)
"""The comments before YAML, and the YAML. Before a mapping or list of `--package`, Hydra prints `# @package model`."""


class PrintedConfig:
    """A composed config of which Hydra prints a part.

    Args:
      composed: the whole config.
      env: environment of the command.
      overrides: words of the command line.
    """

    def __init__(self, composed: DictConfig, env: Mapping[str, str], overrides: Sequence[str]) -> None:
        groups = [str(name) for name in composed if name != "hydra"]
        of_run = OmegaConf.masked_copy(composed, groups)
        self._listed = SecretList.of(listed_in(of_run, env), env)
        # An interpolation is shown; what it stands for is in the config.
        typed = [text for text in overrides if "${" not in text]
        self._texts = texts_in(of_run, self._listed) | secrets_of_overrides(typed)

    def masked_text(self, printed: str) -> str:
        """Return a text with secrets masked."""
        return mask_text(printed, self._texts)

    def masked_yaml(self, printed: str, package: str | None) -> str:
        """Return YAML with secrets masked; without secrets as it is.

        Args:
          printed: what Hydra printed.
          package: the key of which Hydra printed the value; None, `_global_`: the whole config.
        """
        key = (package or "").replace("_global_", "")
        comment, body = _COMMENT_AND_BODY.fullmatch(printed).groups()  # type: ignore[union-attr]
        is_tree = not key or bool(comment)
        if not is_tree:  # a single value, which Hydra prints without a comment
            value = body.strip()
            return f"{self._show_text(value, masked(value, self._listed, key))}\n"
        tree = OmegaConf.to_container(OmegaConf.create(body), resolve=False)
        # Hydra prints `${oc.env:TOKEN}` itself, not its value. So a text with an interpolation is masked only if the
        # name of its key is secret, not if its full key is listed for its value.
        listed_without_paths = SecretList(self._listed.names, {}, self._listed.values)
        shown = self._show_tree(tree, masked(tree, self._listed, key), masked(tree, listed_without_paths, key))
        if shown == tree:
            return printed
        return comment + OmegaConf.to_yaml(OmegaConf.create(shown))

    def _show_tree(self, tree: Any, by_list: Any, by_name: Any) -> Any:
        """Return the tree as it is shown.

        Args:
          by_list: the tree, with all secrets masked.
          by_name: the tree, with only those masked whose key names a secret.
        """
        if isinstance(tree, dict):
            return {name: self._show_tree(value, by_list[name], by_name[name]) for name, value in tree.items()}
        if isinstance(tree, list):
            return [self._show_tree(*values) for values in zip(tree, by_list, by_name, strict=True)]
        if not isinstance(tree, str):
            return by_list
        if REFERENCE.fullmatch(tree):  # nothing but an interpolation
            return self._show_text(tree, tree)
        if "${" in tree:
            return self._show_text(tree, by_name)
        return self._show_text(tree, by_list)

    def _show_text(self, value: str, shown: Any) -> Any:
        """Return the text `shown`, with the secrets of other keys masked in it, too.

        Args:
          value: the text as it is in the config.
          shown: the text with the secrets of its own key masked.
        """
        # A list of overrides has texts such as `tracking.password=abc`, whose key is in the text.
        if shown == value and "=" in value:
            shown = masked_override(value, self._listed)
        return mask_text(str(shown), self._texts)
