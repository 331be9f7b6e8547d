"""From what Hydra composed to a checked `Config`; all mistakes are found here, before TensorFlow is imported.

Hydra's own schema check is not enough: `++key=value` gets around it, and it knows types but no limits.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from runner.checks import check
from runner.config import (
    Config,
    ConfigError,
    InputBlock,
    InputConfig,
    VocabularyConfig,
    WarmStartConfig,
    eval_key,
    read,
)
from runner.config_nodes import schema, thawed
from runner.debugging import debugged
from runner.masking import masked_override

_VOCABULARIES = "train.warm_start.vocabularies"


def parse(tree: Mapping[str, Any]) -> Config:
    """The config in `tree` (plain, resolved), with every value checked.

    Raises:
      ConfigError: a key that does not exist, a value of the wrong type or out of range, what this version cannot do
        yet, settings that exclude each other.
    """
    config: Config = _merge(Config, tree, "")
    config = dataclasses.replace(config, input=dataclasses.replace(config.input, eval=_evals(config.input.eval or {})))
    warm_start = dataclasses.replace(config.train.warm_start, vocabularies=_vocabularies(config.train.warm_start))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, warm_start=warm_start))
    _check_limits(config, "")
    for name, vocabulary in warm_start.vocabularies.items():
        _check_limits(vocabulary, f"{_VOCABULARIES}.{name}")
    for name, block in config.input.evals.items():
        _check_limits(block, eval_key(name))
    check(config)
    return debugged(config)


def load(path: Path) -> Config:
    """The config in a `config.yaml` that `save` wrote."""
    return parse(read(path))


def unknown_key(key: str, value: Any = None) -> ConfigError:
    """The error for a key that the schema does not have; says the nearest one, also when it lives in another group."""
    parent, _, name = key.rpartition(".")
    siblings = _keys_of(_class_at(parent))
    everywhere = list(_all_keys(Config, ""))
    close = difflib.get_close_matches(name, siblings, n=1)
    nearest = f"{parent}.{close[0]}".lstrip(".") if close else ""
    if not nearest:
        same_name = [other for other in everywhere if other.rpartition(".")[2] == name]
        close = same_name or difflib.get_close_matches(key, everywhere, n=1, cutoff=0.7)
        nearest = close[0] if close else ""
    shown = masked_override(f"{key}={value}") if value is not None else key
    hint = (
        f" Did you mean {nearest!r}?"
        if nearest
        else ""
        if parent
        else f" A parameter of the model is model.params.{name}."
    )
    where = f"Keys of {parent}" if parent else "Groups and keys"
    return ConfigError(f"{shown}: there is no key {key!r}.{hint} {where}: {', '.join(siblings)}.")


def wrong_type(key: str, value: Any) -> ConfigError:
    """The error for a value that the schema cannot take."""
    parent, _, name = key.rpartition(".")
    owner = _class_at(parent)
    hint = get_type_hints(owner).get(name) if owner else None
    words = _in_words(hint)
    claim = f"neither {words.removesuffix(' or null')} nor null" if words.endswith(" or null") else f"not {words}"
    shown = "null" if value is None else value
    return ConfigError(f"{masked_override(f'{key}={shown}')} is {claim}.")


def _merge(cls: type, tree: Mapping[str, Any], at: str) -> Any:
    """`tree` as an instance of the dataclass `cls`; `at` is where it sits, for the error."""
    node = schema() if cls is Config else thawed(OmegaConf.structured(cls))
    if cls is InputBlock:
        OmegaConf.set_struct(node.params, False)
    try:
        return OmegaConf.to_object(OmegaConf.merge(node, tree))
    except OmegaConfBaseException as error:
        _translate(error, tree, at)


def _evals(tree: Mapping[str, Any]) -> dict[str, InputBlock]:
    """The evaluation inputs by name, from `input.eval`: one block, or blocks by name.

    Settings beside named blocks hold for each of them that has none of its own: what a command line or an experiment
    says is added to the one block that the input's own file has.
    """
    settings = _keys_of(InputBlock)
    common = {name: value for name, value in tree.items() if name in settings}
    named = {str(name): block for name, block in tree.items() if name not in settings}
    if common and not named:
        return {"": _merge(InputBlock, common, eval_key(""))}
    for name, block in named.items():
        is_misspelt = bool(difflib.get_close_matches(name, settings, n=1, cutoff=0.8))
        if common and (is_misspelt or not isinstance(block, Mapping)):
            raise unknown_key(eval_key(name), block)
        if not isinstance(block, Mapping):
            shown = masked_override(f"{eval_key(name)}={block!r}")
            raise ConfigError(
                f"{shown} is neither a setting of an input ({', '.join(settings)}) nor a block of them."
                f"{_nearest(name, settings)}"
            )
    blocks = {name: OmegaConf.to_container(OmegaConf.merge(common, block)) for name, block in named.items()}
    return {name: _merge(InputBlock, block, eval_key(name)) for name, block in blocks.items()}  # type: ignore[arg-type]


def _vocabularies(settings: WarmStartConfig) -> dict[str, VocabularyConfig]:
    for name, block in settings.vocabularies.items():
        if not isinstance(block, Mapping):
            keys = ", ".join(_keys_of(VocabularyConfig))
            raise ConfigError(f"{_VOCABULARIES}.{name}={block!r} is not a block of settings: {keys}.")
    return {
        name: _merge(VocabularyConfig, block, f"{_VOCABULARIES}.{name}")
        for name, block in settings.vocabularies.items()
    }


def _translate(error: OmegaConfBaseException, tree: Mapping[str, Any], at: str) -> NoReturn:
    key = str(error.full_key or "")
    full_key = f"{at}.{key}".strip(".")
    value = _value_at(tree, key)
    if isinstance(error, ConfigKeyError):
        raise unknown_key(full_key, value) from error
    if value == "???":
        raise ConfigError(f"{full_key} is not set: a config file leaves it open (???). Give {full_key}=...") from error
    if key:
        raise wrong_type(full_key, value) from error
    for name, child in tree.items():  # a scalar where a group belongs: OmegaConf does not say which
        if dataclasses.is_dataclass(_class_at(f"{at}.{name}".strip("."))) and not isinstance(child, Mapping):
            raise ConfigError(f"{name}={child!r} is not a group of settings.") from error
    raise ConfigError(f"{at or 'config'}: {error.msg or error}") from error


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _class_at(key: str) -> type | None:
    """The dataclass that holds the settings under `key`; None where anything goes (`model.params`)."""
    cls: Any = Config
    for part in filter(None, key.split(".")):
        if cls is InputConfig and part == "eval":
            return InputBlock
        if cls is WarmStartConfig and part == "vocabularies":
            return VocabularyConfig
        cls = get_type_hints(cls).get(part) if dataclasses.is_dataclass(cls) else None
    return cls if dataclasses.is_dataclass(cls) else None  # type: ignore[return-value]


def _keys_of(cls: type | None) -> list[str]:
    return [setting.name for setting in dataclasses.fields(cls)] if cls else []


def _all_keys(cls: type, at: str) -> Iterator[str]:
    for name, hint in get_type_hints(cls).items():
        key = f"{at}.{name}".lstrip(".")
        yield key
        if dataclasses.is_dataclass(hint):
            yield from _all_keys(hint, key)  # type: ignore[arg-type]


def _in_words(hint: Any) -> str:
    text = str(getattr(hint, "__name__", hint)) if hint in (int, float, bool, str) else str(hint)
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "text",
        "list[str]": "a list",
    }
    for name, word in words.items():
        if text == name or text.startswith(f"{name} |"):
            return f"{word} or null" if "None" in text else word
    return "a group of settings" if "dict" in text or dataclasses.is_dataclass(hint) else "allowed here"


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _check_limits(value: Any, at: str) -> None:
    """Checks the choices and minima that the fields declare, at every depth."""
    for setting in dataclasses.fields(value):
        key, found = f"{at}.{setting.name}".lstrip("."), getattr(value, setting.name)
        if dataclasses.is_dataclass(found):
            _check_limits(found, key)
            continue
        if setting.metadata and (found is not None or setting.metadata["auto"]):
            _check_value(key, found, setting.metadata)


def _check_value(key: str, found: Any, limits: Mapping[str, Any]) -> None:
    """Checks one value, or each of a list, against the limits that its field declares."""
    if limits["auto"] and found == "auto":
        return
    if limits["auto"] and (not isinstance(found, int) or isinstance(found, bool)):
        shown = "null" if found is None else repr(found)
        raise ConfigError(f"{key}={shown} is neither 'auto' nor a whole number.")
    for one in found if isinstance(found, list) else [found]:
        if limits["choices"] and one not in limits["choices"]:
            choices = [str(one).lower() if isinstance(one, bool) else str(one) for one in limits["choices"]]
            hint = _nearest(one, choices)
            raise ConfigError(f"{key}={one} is not allowed.{hint} Allowed: {', '.join(choices)}.")
    minimum, above, below = limits["minimum"], limits["above"], limits["below"]
    # Each the right way round to refuse NaN, which is neither.
    if minimum is not None and not found >= minimum:
        raise ConfigError(f"{key}={found} must be at least {minimum}.")
    if (above is not None and not found > above) or (below is not None and not found < below):
        bounds = f"more than {above}" if below is None else f"more than {above} and less than {below}"
        raise ConfigError(f"{key}={found} must be {bounds}.")
