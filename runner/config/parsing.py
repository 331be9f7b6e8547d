"""Convert the tree that Hydra composed to a checked `Config`: every mistake is found before TensorFlow is imported.

Hydra's schema check is not enough: `++key=value` bypasses it, and it knows types but no limits.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from omegaconf import Container, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from runner.config import schema
from runner.config.error_messages import unknown_key, wrong_type
from runner.config.mistakes import ConfigError, Conflict, Malformed, NotSet, UnknownKey, WrongType
from runner.config.schema import Config, HookConfig, InputBlock, RunSettings, VocabularyConfig, WarmStartConfig
from runner.config.settings.keras_callbacks import check_class
from runner.config.settings.limits import check_limits, limits_of
from runner.config.settings.step_range import parse_step_range
from runner.config.validation import check, check_metric_names
from runner.system.redaction import SecretList, hiding, masked_override
from runner.system.secret_names import LIST
from runner.system.suggestions import did_you_mean, nearest

FAST_DEV_STEPS = 2

_MISSING = "???"
"""Hydra's text for a value that is not set."""

_VOCABULARIES = "train.warm_start.vocabularies"


def parse(tree: Mapping[str, Any]) -> Config:
    """Return the config in `tree` (plain, resolved), with every value checked.

    Raises:
      ConfigError: a key does not exist, a value has the wrong type or is out of range, or settings exclude each other.
    """
    # First, because messages about mistakes must not show secrets.
    with hiding(SecretList.of(schema.value_at(tree, LIST), os.environ)):
        return _parse(tree)


def key_with_nul(tree: Mapping[str, Any]) -> str | None:
    """Return the first key whose value has a NUL, which no path and no variable of an environment can have."""
    for key, value in schema.flatten(tree).items():
        if "\0" in str(value):
            return key
    return None


def has_nul(key: str, value: Any, at: str = "") -> ConfigError:
    """Return the error for a value with a NUL; `at`: the file that sets it, as the beginning of a message."""
    shown = masked_override(f"{key}={value}").replace("\0", "\\0")
    return Malformed(f"{at}{shown}: a value cannot have a NUL (\\0). Remove it.")


def _parse(tree: Mapping[str, Any]) -> Config:
    """Return the checked config, as `parse` does; messages about mistakes may show secrets."""
    key = key_with_nul(tree)
    if key is not None:
        raise has_nul(key, schema.flatten(tree)[key])
    for key, value in schema.flatten(tree).items():
        if value == _MISSING or (isinstance(value, list) and _MISSING in value):
            raise NotSet(f"{key} is required, but not set: a config file has ??? for it. Set {key}=...")
    settings = _merge_typed(Config, tree, "")
    _read_numbers(Config, settings)
    values: Any = OmegaConf.to_container(settings)
    _check_limits(RunSettings, values["run"], "run")  # first, because checks of other keys use run.seed
    _check_limits(Config, values, "")
    evals = _evals(values["input"]["eval"] or {})
    check_metric_names(values, evals)
    config: Config = OmegaConf.to_object(settings)  # type: ignore[assignment]
    # OmegaConf leaves what stands below free names as plain mappings: evaluations, vocabularies, hooks.
    inputs = dataclasses.replace(config.input, eval=evals)
    secrets = _with_inherited_secrets(config.run.secrets, evals)
    vocabularies = _vocabularies(config.train.warm_start)
    warm_start = dataclasses.replace(config.train.warm_start, vocabularies=vocabularies)
    train_hooks = _hooks("train.hooks", config.train.hooks)
    eval_hooks = _hooks("eval.hooks", config.eval.hooks)
    run = dataclasses.replace(config.run, secrets=secrets)
    train = dataclasses.replace(config.train, warm_start=warm_start, hooks=train_hooks)
    evaluation = dataclasses.replace(config.eval, hooks=eval_hooks)
    config = dataclasses.replace(config, input=inputs, run=run, train=train, eval=evaluation)
    check(config)
    return debugged(config)


def load(path: Path) -> Config:
    """Return the config in a `config.yaml` that `save` wrote."""
    return parse(schema.read(path))


@functools.cache  # it takes 30 ms (OmegaConf 2.3), and a process may run several commands
def schema_node() -> Any:
    """Return the schema for OmegaConf. The callers share it and must not change it.

    Every key is declared, except below `vars`, `params`, `tags` and variable names, where any key is allowed.
    """
    node = thawed(OmegaConf.structured(Config))
    inputs = node.input
    warm_start = node.train.warm_start
    for mapping in (
        node.vars,
        node.model.params,
        inputs.train.params,
        inputs.eval,
        inputs.predict.params,
        node.tracking.tags,
        warm_start.rename,
        warm_start.vocabularies,
    ):
        OmegaConf.set_struct(mapping, False)
    return node


def thawed(node: Any) -> Any:
    """Make `node` writable and return it. OmegaConf makes nodes of frozen dataclasses read-only; Hydra changes them."""
    OmegaConf.set_readonly(node, None)
    if node._is_none():
        return node
    for key in node:
        child = node._get_node(key)
        if isinstance(child, Container):
            thawed(child)
    return node


def _merge(cls: type, tree: Mapping[str, Any], at: str) -> Any:
    """Return `tree` as an instance of the dataclass `cls`; `at` is the key of the tree, for messages."""
    settings = _merge_typed(cls, tree, at)
    _check_limits(cls, OmegaConf.to_container(settings), at)
    return OmegaConf.to_object(settings)


def _merge_typed(cls: type, tree: Mapping[str, Any], at: str) -> Any:
    """Return the settings of the dataclass `cls` for OmegaConf: the defaults, with `tree` merged over them.

    Args:
      cls: the dataclass.
      tree: the settings that are set.
      at: the key of the tree, for messages.

    Raises:
      ConfigError: a key does not exist, or a value has a type that the key does not take.
    """
    try:
        return OmegaConf.merge(_node(cls), tree)
    except OmegaConfBaseException as error:
        _raise_mistake(error, cls, tree, at)


def _node(cls: type) -> Any:
    """Return the schema of a dataclass of the config for OmegaConf."""
    if cls is Config:
        return schema_node()
    node = thawed(OmegaConf.structured(cls))
    if cls in (InputBlock, HookConfig):
        OmegaConf.set_struct(node.params, False)
    return node


def _evals(tree: Mapping[str, Any]) -> dict[str, InputBlock]:
    """Return name -> evaluation input from `input.eval`, which is one block or several blocks by name.

    Settings beside named blocks apply to every block that does not set them itself. So if an override or experiment
    adds named blocks to the one block of an input's file, they inherit the settings of that block.
    """
    settings = _keys_of(InputBlock)
    # The names in `input.eval` are settings of one block, names of blocks, or both.
    common = {name: value for name, value in tree.items() if name in settings}
    named = {str(name): block for name, block in tree.items() if name not in settings}
    if common and not named:
        return {"": _merge(InputBlock, common, schema.eval_key(""))}
    for name, block in named.items():
        # Beside settings of the one block, a name like one of them was meant as a setting, and not as an evaluation.
        is_misspelt = bool(nearest(name, settings, cutoff=0.8))
        if common and (is_misspelt or not isinstance(block, Mapping)):
            raise unknown_key(schema.eval_key(name), block)
        if not isinstance(block, Mapping):
            shown = masked_override(f"{schema.eval_key(name)}={block!r}")
            hint = did_you_mean(name, settings)
            raise UnknownKey(
                f"{shown} is neither a setting of an input ({', '.join(settings)}) nor a block of settings.{hint}"
            )
    evals: dict[str, InputBlock] = {}
    for name, block in named.items():
        inherited: Any = OmegaConf.to_container(OmegaConf.merge(common, block))
        evals[name] = _merge(InputBlock, inherited, schema.eval_key(name))
    return evals


def _with_inherited_secrets(secrets: list[str] | None, evals: Mapping[str, Any]) -> list[str] | None:
    """Return `run.secrets` with the keys under which an inherited secret of `input.eval` stands, too.

    A key beside named evaluations (`input.eval.params.token`) is inherited by each of them
    (`input.eval.<name>.params.token`). So if it is listed, its keys in the evaluations are added.
    """
    if secrets is None:
        return None
    entries = dict.fromkeys(secrets)
    for entry in secrets:
        inherited_key = entry.removeprefix("input.eval.")  # unchanged if the entry is the key of something else
        first = inherited_key.partition(".")[0]
        is_common = inherited_key != entry and first not in evals
        for name in evals:
            if is_common and name:
                entries[f"input.eval.{name}.{inherited_key}"] = None
    return list(entries)


def _hooks(key: str, blocks: Sequence[Any]) -> list[HookConfig]:
    for place, block in enumerate(blocks):
        if not isinstance(block, Mapping) or not block.get("fn"):
            shown = masked_override(f"{key}[{place}]={block!r}")
            raise Malformed(f"{shown} is not a hook. Write {key}=[{{fn: package.module.Class, params: {{}}}}]")
        check_class(f"{key}[{place}].fn={block['fn']}", str(block["fn"]))
    return [_merge(HookConfig, block, f"{key}[{place}]") for place, block in enumerate(blocks)]


def _vocabularies(settings: WarmStartConfig) -> dict[str, VocabularyConfig]:
    for name, block in settings.vocabularies.items():
        if not isinstance(block, Mapping):
            keys = ", ".join(_keys_of(VocabularyConfig))
            raise WrongType(f"{_VOCABULARIES}.{name}={block!r} must be a mapping with the keys {keys}.")
    blocks = settings.vocabularies.items()
    return {name: _merge(VocabularyConfig, block, f"{_VOCABULARIES}.{name}") for name, block in blocks}


def _raise_mistake(error: OmegaConfBaseException, cls: type, tree: Mapping[str, Any], at: str) -> NoReturn:
    """Raise a ConfigError for an error of OmegaConf; the arguments are those of `_merge_typed`."""
    key = str(error.full_key or "")
    full_key = f"{at}.{key}".strip(".")
    if isinstance(error, ConfigKeyError):
        raise unknown_key(full_key, schema.value_at(tree, key)) from error
    found = misfit(cls, tree)  # OmegaConf does not name each key, such as a group for which a scalar stands
    if found is not None:
        wrong_key, value = found
        raise wrong_type(f"{at}.{wrong_key}".strip("."), value) from error
    raise ConfigError(f"{full_key or 'config'}: {error.msg or error}") from error


def misfit(cls: type, tree: Mapping[str, Any], at: str = "") -> tuple[str, Any] | None:
    """Return the first key of a tree whose value has a type that the schema does not take, and the value.

    Keys that the schema does not have are left out: they are another mistake.

    Args:
      cls: the dataclass of the tree.
      tree: the tree.
      at: the key in `cls` below which the tree stands.

    Returns:
      The key and its value; None if each value fits.
    """
    for name, value in tree.items():
        key = f"{at}.{name}".lstrip(".")
        if _fits(cls, key, value):
            continue
        # A group that takes keys, but not all of these: look for the first wrong one below it.
        takes_keys = isinstance(value, Mapping) and _fits(cls, key, {})
        if not takes_keys:
            return key, value
        found = misfit(cls, value, key)
        if found is not None:
            return found
    return None


def _fits(cls: type, key: str, value: Any) -> bool:
    """Report whether a key takes a value, or is none of the schema."""
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    try:
        OmegaConf.merge(_node(cls), tree)
    except ConfigKeyError:
        return True  # no key of the schema
    except (OmegaConfBaseException, ValueError):
        return False
    return True


def _keys_of(cls: type) -> list[str]:
    return [setting.name for setting in dataclasses.fields(cls)]


def _read_numbers(cls: type, settings: Any) -> None:
    """Replace, in place, a text that is a number where a key takes a number or auto.

    An interpolation such as `${oc.env:N}` gives a text. OmegaConf itself converts it where a key takes only a number.

    Args:
      cls: the dataclass of the settings.
      settings: the settings for OmegaConf.
    """
    hints = get_type_hints(cls)
    for setting in dataclasses.fields(cls):
        value = settings[setting.name]
        if dataclasses.is_dataclass(hints[setting.name]):
            _read_numbers(hints[setting.name], value)
        elif limits_of(setting).auto and isinstance(value, str) and value.isdecimal():
            settings[setting.name] = int(value)


def _check_limits(cls: type, values: Any, at: str) -> None:
    """Check the settings of a dataclass, and of those nested in it, against the limits that their fields declare.

    The values are still plain ones. The constructors, called later, check the same limits, but cannot name the keys.

    Args:
      cls: the dataclass.
      values: name of each setting -> its value.
      at: the key of the settings.
    """
    hints = get_type_hints(cls)
    for setting in dataclasses.fields(cls):
        key = f"{at}.{setting.name}".lstrip(".")
        value = values[setting.name]
        limits = limits_of(setting)
        if dataclasses.is_dataclass(hints[setting.name]):
            _check_limits(hints[setting.name], value, key)
        elif value is not None or limits.auto:
            try:
                check_limits(limits, value, f"{key}={{}}".format)
            except ConfigError as error:
                error.key = key
                raise


# --- run.debug ------------------------------------------------------------------------------------------------------


def debugged(config: Config) -> Config:
    """Return `config` with the changes that `run.debug` makes; applying it again changes nothing.

    fast_dev: two steps of training, one batch of each evaluation, and no tracking. overfit: every step trains on the
    first batch, for `train.max_steps` steps; `runner.task.build` repeats the batch.

    Raises:
      ConfigError: overfit without train.max_steps, or fast_dev with run.profile for steps that fast_dev does not take.
    """
    train = config.train
    if config.run.debug == "fast_dev":
        if config.run.profile is not None and parse_step_range(config.run.profile).last > FAST_DEV_STEPS:
            raise Conflict(
                f"run.profile={config.run.profile}: run.debug=fast_dev takes no more than {FAST_DEV_STEPS} steps. "
                "Set one of them to null."
            )
        max_steps = min(train.max_steps or FAST_DEV_STEPS, FAST_DEV_STEPS)
        return dataclasses.replace(
            config,
            train=dataclasses.replace(train, max_steps=max_steps),
            eval=dataclasses.replace(config.eval, steps=1),
            tracking=dataclasses.replace(config.tracking, backend="none"),
        )
    if config.run.debug == "overfit":
        if train.max_steps is None:
            raise Conflict(
                "run.debug=overfit repeats one batch without end, so train.max_steps=null would never end it. Set "
                "train.max_steps."
            )
        return dataclasses.replace(config, train=dataclasses.replace(train, max_epochs=None))
    return config
