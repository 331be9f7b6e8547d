"""What a failed composition means to the person who typed the command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError

from runner import parsing
from runner.masking import masked_override

_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""Launchers that work as they are, once they are installed."""


def in_words(error: Exception, argv: Sequence[str]) -> str:
    """One message for `error`, in terms of what was typed, its value and what is allowed."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override), error.message.splitlines()[0])
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a config file"
        return f"{where}: {error.problem or error.context}."
    if str(error).startswith("In '") and isinstance(error.__context__, OmegaConfBaseException):
        return _in_a_file(str(error).split("'")[1], error.__context__)
    if isinstance(error, ConfigCompositionException):
        while isinstance(cause, ConfigCompositionException):  # Hydra wraps its own error once more
            error, cause = cause, cause.__cause__
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            key = str(cause.full_key)
            return str(parsing.unknown_key(key, _value_typed(argv, key)))
        if isinstance(cause, ValidationError) and cause.full_key:
            key = str(cause.full_key)
            return str(parsing.wrong_type(key, _value_typed(argv, key)))
        key = str(error).partition("Could not override '")[2].partition("'")[0]
        if key:
            return str(parsing.unknown_key(key, _value_typed(argv, key)))
    if str(error).startswith("Ambiguous value for argument '"):
        override = str(error).partition("'")[2].partition("'")[0]
        return f"{override} gives several values. Add --multirun to try each; a list is written [1,2]."
    if "does not support deletion" in str(cause):
        key = str(error).partition("~")[2]
        return f"~{key}: {key} is a key of every run, and cannot be taken away. Set it: {key}=null is nothing."
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return f"{error} ({str(cause).splitlines()[0]})"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'config'}: {str(error).splitlines()[0]}"
    text = str(error) or str(cause)
    return text.strip().replace("\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "")


def _unreadable(override: str, reason: str) -> str:
    """An override that Hydra's grammar does not take, for what it calls `reason`."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"cannot read {override!r}: write key=value, without spaces around the equals sign."
    shown = masked_override(override)
    if "${" in value or value.startswith(("[", "{", "'", '"')) or value.endswith(","):
        return f"cannot read {shown!r}: {reason}"
    quoted = masked_override(f'{key}="{value}"')
    return (
        f"cannot read {shown!r}: a value with other characters than a-z, A-Z, 0-9 and /-\\+.$%*@?| "
        f"goes in quotes, and these in those of the shell: '{quoted}'."
    )


def _in_a_file(name: str, error: OmegaConfBaseException) -> str:
    """A mistake in a config file: `train/default`."""
    key = str(error.full_key or "")
    if not key and isinstance(error, ValidationError):
        return f"conf/{name}.yaml holds no keys with values."
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"conf/{name}.yaml: {parsing.unknown_key(key)}"
    if isinstance(error, ValidationError):
        value = str(error.msg).partition("Value '")[2].partition("'")[0]
        return f"conf/{name}.yaml: {parsing.wrong_type(key, value)}"
    return f"conf/{name}.yaml: {key}: {str(error).splitlines()[0]}"


def _missing_option(error: MissingConfigException) -> str:
    """`strategy=mirored`: names the option, the nearest and all that exist."""
    missing, options = str(error.missing_cfg_file or ""), list(error.options or ())
    group, _, name = missing.rpartition("/")
    if not options:
        return str(error).strip().splitlines()[0]
    close = difflib.get_close_matches(name, options, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if group == "hydra/launcher" and name in _PLUGINS:
        hint = f" It is a plugin of Hydra: pip install {_PLUGINS[name]}."
    return f"{group}={name}: no {name!r} in conf/{group}.{hint} Available: {', '.join(sorted(options))}."


def _value_typed(argv: Sequence[str], key: str) -> Any:
    """The value that the command line gives to `key`; None when it does not."""
    for text in argv:
        try:
            override = OverridesParser.create().parse_override(text)
        except (HydraException, ValueError):
            continue
        if override.key_or_group == key:
            return text.partition("=")[2]
    return None
