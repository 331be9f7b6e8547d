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

from runner.config import (
    STRATEGY_OPTIONS,
    Config,
    ConfigError,
    InputBlock,
    InputConfig,
    StrategyConfig,
    eval_key,
    schema,
    thawed,
)


def parse(tree: Mapping[str, Any]) -> Config:
    """The config in `tree` (plain, resolved), with every value checked.

    Raises:
      ConfigError: a key that does not exist, a value of the wrong type or out of range, settings that
        exclude each other.
    """
    config: Config = _merge(Config, tree, "")
    config = dataclasses.replace(config, input=dataclasses.replace(config.input, eval=_evals(config.input.eval or {})))
    _check_limits(config, "")
    for name, block in config.input.evals.items():
        _check_limits(block, eval_key(name))
    _check_functions(config)
    _check_strategy("strategy", config.strategy)
    _check_strategy("eval_strategy", config.eval_strategy)
    _check_virtual_devices(config)
    _check_batches(config)
    return config


def load(path: Path) -> Config:
    """The config in a `config.yaml` that `save` wrote."""
    return parse(OmegaConf.to_container(OmegaConf.load(path), resolve=True))  # type: ignore[arg-type]


def unknown_key(key: str, value: Any = None) -> ConfigError:
    """The error for a key that the schema does not have; says the nearest one, also when it lives in another group."""
    parent, _, name = key.rpartition(".")
    siblings = _keys_of(_class_at(parent))
    everywhere = list(_all_keys(Config, ""))
    close = difflib.get_close_matches(name, siblings, n=1)
    nearest = f"{parent}.{close[0]}".lstrip(".") if close else ""
    if not nearest:
        same_name = [other for other in everywhere if other.rpartition(".")[2] == name]
        nearest = same_name[0] if same_name else next(iter(difflib.get_close_matches(key, everywhere, n=1)), "")
    shown = f"{key}={value}" if value is not None else key
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
    return ConfigError(f"{key}={value} is {claim}.")


def _merge(cls: type, tree: Mapping[str, Any], at: str) -> Any:
    """`tree` as an instance of the dataclass `cls`; `at` is where it sits, for the error."""
    node = schema() if cls is Config else thawed(OmegaConf.structured(cls))
    if cls is not Config:
        OmegaConf.set_struct(node.params, False)
    try:
        return OmegaConf.to_object(OmegaConf.merge(node, tree))
    except OmegaConfBaseException as error:
        _translate(error, tree, at)


def _evals(tree: Mapping[str, Any]) -> dict[str, InputBlock]:
    """The evaluation inputs by name, from `input.eval`: one block, or blocks by name."""
    if set(tree) & set(_keys_of(InputBlock)):
        return {"": _merge(InputBlock, tree, eval_key(""))}
    for name, block in tree.items():
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{eval_key(name)}={block!r} is neither a setting of an input "
                f"({', '.join(_keys_of(InputBlock))}) nor a block of them.{_nearest(name, _keys_of(InputBlock))}"
            )
    return {name: _merge(InputBlock, block, eval_key(name)) for name, block in tree.items()}


def _translate(error: OmegaConfBaseException, tree: Mapping[str, Any], at: str) -> NoReturn:
    key = str(error.full_key or "")
    full_key = f"{at}.{key}".strip(".")
    value = _value_at(tree, key)
    if isinstance(error, ConfigKeyError):
        raise unknown_key(full_key, value) from error
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
        choices, minimum = setting.metadata.get("choices"), setting.metadata.get("minimum")
        if setting.metadata.get("auto") and found == "auto":
            continue
        if setting.metadata.get("auto") and (not isinstance(found, int) or isinstance(found, bool)):
            raise ConfigError(f"{key}={found!r} is neither 'auto' nor a whole number.")
        if choices and found is not None and found not in choices:
            hint = _nearest(found, list(choices))
            raise ConfigError(f"{key}={found} is not allowed.{hint} Allowed: {', '.join(choices)}.")
        if minimum is not None and found is not None and found < minimum:
            raise ConfigError(f"{key}={found} must be at least {minimum}.")


def _check_functions(config: Config) -> None:
    if not config.model.fn:
        raise ConfigError("model.fn is not set. Give package.module or package.module.function, or choose model=...")
    if config.command != "evaluate" and not config.input.train.fn:
        raise ConfigError(
            f"input.train.fn is not set, and command={config.command} trains. Choose input=... or set it."
        )
    if config.command == "evaluate" and not config.input.evals:
        raise ConfigError("input.eval is empty, and command=evaluate needs at least one evaluation.")
    for name, block in config.input.evals.items():
        if not block.fn:
            raise ConfigError(f"{eval_key(name)}.fn is not set.")


def _check_strategy(key: str, strategy: StrategyConfig) -> None:
    """Refuses options that the chosen strategy would ignore."""
    allowed = STRATEGY_OPTIONS.get(strategy.name or "", ())
    for option in _keys_of(StrategyConfig):
        value = getattr(strategy, option)
        if option != "name" and value is not None and option not in allowed:
            raise ConfigError(
                f"{key}.{option}={value} has no effect with {key}={strategy.name or 'same'}. "
                f"Its options: {', '.join(allowed) or 'none'}."
            )
    if strategy.name == "one_device" and strategy.devices and len(strategy.devices) != 1:
        raise ConfigError(
            f"{key}.devices={strategy.devices}: one_device takes exactly one. Use {key}=mirrored for more."
        )
    if strategy.devices and strategy.num_gpus is not None:
        raise ConfigError(f"{key}.devices and {key}.num_gpus exclude each other: name the devices, or count them.")


def _check_virtual_devices(config: Config) -> None:
    train, evaluation = config.strategy.virtual_devices, config.eval_strategy.virtual_devices
    if train is not None and evaluation is not None and train != evaluation:
        raise ConfigError(
            f"strategy.virtual_devices={train} and eval_strategy.virtual_devices={evaluation} differ; "
            "the CPU of a process is split once. Give both the same number."
        )


def _check_batches(config: Config) -> None:
    """Refuses a train batch that does not divide, where the number of replicas is known without TensorFlow."""
    size, strategy = config.input.train.batch_size, config.strategy
    replicas = strategy.virtual_devices if strategy.name in ("mirrored", "central_storage") else 1
    if size is None or not replicas or strategy.devices or strategy.num_gpus is not None or size % replicas == 0:
        return
    below, above = size // replicas * replicas, (size // replicas + 1) * replicas
    use = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(f"input.train.batch_size={size} does not divide over {replicas} replicas. Use {use}.")
