"""Mistakes in the words of a command line and in config files, as the user is told of them.

The first part has the checks that Hydra does not make: it would compose something else than what was meant. The second
part turns errors of Hydra into messages that name what was typed, its value and what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError

from runner.config import parsing, schema
from runner.config.error_messages import unknown_key, wrong_type
from runner.config.hydra import first_line, mistake_in_yaml, package_of, read_flags, read_users_file
from runner.config.mistakes import ConfigError, Malformed, NotAllowed, NotFound, UnknownKey, WrongType
from runner.config.settings.limits import as_typed
from runner.system.redaction import masked_override
from runner.system.suggestions import did_you_mean, nearest

_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""Launcher -> the package that provides it."""


# --- what Hydra lets through ----------------------------------------------------------------------------------------


def check_composed(config: DictConfig, argv: Sequence[str]) -> None:
    """Check what Hydra itself uses of a composed config.

    Before a job checks all of its config, Hydra makes the folder of the run, and builds its launcher and its sweeper.

    Args:
      config: the composed config.
      argv: the words of the command line.

    Raises:
      ConfigError: a text has a NUL, or a setting of Hydra from which it builds the command has another type.
    """
    choices = config.hydra.runtime.choices
    tree: Any = OmegaConf.to_container(config, resolve=False)
    # Hydra's own settings repeat the words of the command line, and a NUL is to be reported with the user's key.
    settings = tree.pop("hydra")
    key = parsing.key_with_nul(tree)
    if key:
        raise parsing.has_nul(key, schema.flatten(tree)[key], _origin(key, choices, argv))
    for name in ("launcher", "sweeper"):
        key = f"hydra.{name}"
        if not isinstance(settings.get(name), dict):
            origin = _origin(key, choices, argv)
            raise WrongType(
                f"{origin}{key}={as_typed(settings.get(name))} is not a group of settings. Write hydra/{name}=basic."
            )
    key = "hydra.verbose"
    if isinstance(settings["verbose"], dict):
        origin = _origin(key, choices, argv)
        raise WrongType(
            f"{origin}{key}={as_typed(settings['verbose'])} is neither true, false, nor the names of loggers."
        )


def file_with(key: str, choices: Mapping[str, Any]) -> Path | None:
    """Return the user's file that sets `key`, `conf/train/default.yaml`; None: one of the runner's, or none, sets it.

    Args:
      key: the key.
      choices: group -> chosen option.
    """
    group = key.partition(".")[0]
    # File -> what its keys begin with in the whole config. The file that is merged last comes first.
    files_and_prefixes = {
        f"experiment/{choices.get('experiment')}": "",
        "runner": "",
        f"{group}/{choices.get(group)}": f"{group}.",
    }
    for name, prefix in files_and_prefixes.items():
        file = Path("conf", f"{name}.yaml")
        if not file.is_file():
            continue
        tree: Any = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(tree, dict) and key in schema.flatten(tree, prefix):
            return file
    return None


def _origin(key: str, choices: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Return the user's file that sets a key, as the beginning of a message; '' if the command line sets it."""
    if _values_typed(argv, key):
        return ""
    file = file_with(key, choices)
    return f"{file}: " if file else ""


def check_groups(overrides: Sequence[str]) -> None:
    """Check that no group is given a list of options; Hydra would merge these options one over the other.

    Raises:
      ConfigError: a group is given a list; the message says what to write.
    """
    groups = {setting.name for setting in dataclasses.fields(schema.Config) if schema.class_at(setting.name)}
    # Parse only words with a bracket: parsing one word by Hydra's grammar takes 1.5 ms (measured), at each start.
    with_bracket = [text for text in overrides if "[" in text]
    for _, override in _parse_overrides(with_bracket):
        options = _list_of_options(override)
        group = str(override.key_or_group)
        is_group = group in groups or group == "experiment" or "/" in group  # hydra/launcher
        if options is None or not is_group:
            continue
        names = [str(option) for option in options]
        written = f"{group}=[{','.join(names)}]"
        if group in groups:
            instead = _instead_of_options(group, names)
            raise NotAllowed(f"{written}: a run takes one option of the group {group!r}. {instead}.")
        # A list of other options is allowed: Hydra merges several experiments one over the other.
        if not all(isinstance(option, str | QuotedString) for option in options):
            raise NotAllowed(f"{written}: a group takes the names of its files.")


def _list_of_options(override: Override) -> list[Any] | None:
    """Return the list that an override gives, or the first one in a sweep over several values; None: it gives none."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    for given in values:
        if isinstance(given, list):
            return given
    return None


def _instead_of_options(group: str, names: Sequence[str]) -> str:
    """Return what to write in place of the list `names` of options of a group, without the full stop."""
    joined = ",".join(names)
    if group == "tracking":
        return f"Several trackers are tracking.backend=[{joined}]"
    first = names[0] if names else "default"
    return f"Write {group}={first}; to try each, -m {group}={joined}"


def groups_without_option(argv: Sequence[str]) -> list[str]:
    """Return the words of the command line that give a group something else than the name of an option."""
    words = []
    for text, override in _parse_overrides(argv):
        is_group = "." not in str(override.key_or_group)
        if is_group and not isinstance(override.value(), str | list):
            words.append(text)
    return words


def misfit_typed(argv: Sequence[str]) -> ConfigError | None:
    """Return the mistake of the first word of the command line whose value has a type that its key does not take; None:
    there is none.
    """
    for _, override in _parse_overrides(argv):
        # The schema takes no value from a deletion, from the list of a sweep, or for one of Hydra's own keys.
        if override.is_delete() or override.is_sweep_override() or override.is_hydra_override():
            continue
        tree: Any = override.value()
        for part in reversed(str(override.key_or_group).split(".")):
            tree = {part: tree}
        misfit = parsing.misfit(schema.Config, tree)
        if misfit is not None:
            return wrong_type(*misfit)
    return None


# --- params and vars: the command line may set only those that a group or an experiment declares ---------------------

_PARAMS = re.compile(r"((?:model|input\.(?:train|predict|eval(?:\.(?!params\.)[^.]+)?))\.params|vars)\.(.+)")

_HANDED_OVER = ("batch_size", "shuffle_seed")
"""Names in an input's params that are keys of the input itself; `runner.config.validation` reports them."""


def check_declared_params(overrides: Sequence[str], declared: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    """Check that the params on the command line are declared by the chosen group, experiment or saved run.

    Otherwise a misspelt param would be passed to a model_fn that never reads it. These params are not checked: those of
    a function whose group declares none (`params: {}`), those of a function that the command line itself names, and
    entries of tables such as `columns`, whose keys are free names.

    Args:
      overrides: the words of the command line.
      declared: the config before the command line changed its values.
      final: the config after that.

    Raises:
      ConfigError: a param is not declared, and its override does not begin with `+`.
    """
    added: list[str] = []  # keys after `+`: what stands below them is not checked either
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        if override.is_delete():
            continue
        for key, value in schema.flatten({str(override.key_or_group): override.value()}).items():
            if override.is_add() or override.is_force_add():
                added.append(key)
            elif not any(f"{key}.".startswith(f"{parent}.") for parent in added):
                _check_declared(key, value, declared, final)


def _check_declared(key: str, value: Any, declared: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    """Check one key of the command line, if it stands below `vars` or `params`; see `check_declared_params`."""
    match = _PARAMS.fullmatch(key)
    if match is None:
        return
    mapping_key = match[1]  # `model.params`, `input.eval.test.params` or `vars`
    if mapping_key == "vars":
        _check_path(key, value, mapping_key, schema.value_at(declared, mapping_key) or {}, "the config")
        return
    block = mapping_key.removesuffix(".params")
    blocks = [block]
    if block.startswith("input.eval."):
        blocks.append("input.eval")  # a named evaluation inherits its function and its params
    params: Mapping[str, Any] = {}
    for inherited in reversed(blocks):
        params = {**params, **(schema.value_at(declared, f"{inherited}.params") or {})}
    is_of_another_function = _function_of(blocks, declared) != _function_of(blocks, final)
    is_handed_over = match[2].partition(".")[0] in _HANDED_OVER and block != "model"
    if is_of_another_function or is_handed_over:
        return
    _check_path(key, value, mapping_key, params, f"the chosen {block.partition('.')[0]}")


def _function_of(blocks: Sequence[str], tree: Mapping[str, Any]) -> str | None:
    """Return the function of the first of `blocks` in a config that has one; None: none of them has."""
    for block in blocks:
        function: str | None = schema.value_at(tree, f"{block}.fn")
        if function:
            return function
    return None


def _check_path(key: str, value: Any, mapping_key: str, node: Any, owner_in_words: str) -> None:
    """Check that a key of the command line is declared in a mapping for which the schema allows any names.

    Args:
      key, value: the key, and its value.
      mapping_key: the key of the mapping: `model.params`.
      node: the mapping before the command line changed it. One that is empty declares nothing, and allows every key.
      owner_in_words: the part of the config that declares the mapping, for the message.

    Raises:
      UnknownKey: the mapping declares other keys, but not this one.
    """
    names = key.removeprefix(f"{mapping_key}.").split(".")
    for depth, name in enumerate(names):
        if not isinstance(node, Mapping) or not node:
            return
        # Params that only hold mappings, such as `columns`, are tables: the names in them are the user's.
        is_table = depth > 0 and all(isinstance(entry, Mapping) for entry in node.values())
        if is_table:
            return
        if name not in node:
            owner = ".".join([mapping_key, *names[:depth]])
            shown = masked_override(f"{key}={as_typed(value)}")
            hint = did_you_mean(name, node)
            known = ", ".join(map(str, node))
            raise UnknownKey(
                f"{shown}: {owner} of {owner_in_words} has no {name!r}.{hint} Declared: {known}. To add one, write "
                f"+{key}=..."
            )
        node = node[name]


# --- Hydra's errors, in our words -----------------------------------------------------------------------------------


def mistake_in(error: Exception, argv: Sequence[str]) -> Exception:
    """Return an error of Hydra as a mistake that says what the user typed, its value and what is allowed.

    Args:
      error: the error.
      argv: the words of the command line.
    """
    if isinstance(error, ConfigError):
        return error
    return _mistake_in_reading(error, argv) or _mistake_in_values(_innermost(error), argv)


def _mistake_in_reading(error: Exception, argv: Sequence[str]) -> ConfigError | None:
    """Return the mistake in a word or a file that Hydra could not read; None if it has read all of them."""
    if isinstance(error, HydraException):
        # The words by which such an error is told may be in the message of its cause.
        text = _text_on_defaults(f"{error}\n{error.__cause__}", argv)
        if text:
            return Malformed(text)
    if isinstance(error, MissingConfigException):
        return NotFound(_text_on_missing_option(error))
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0]
        return Malformed(_text_on_unreadable(str(error.override), reason, argv))
    if isinstance(error, MarkedYAMLError):
        return mistake_in_yaml(error)
    names_file = str(error).startswith("In '")
    if names_file and isinstance(error.__context__, OmegaConfBaseException):
        file = str(error).split("'")[1]
        return _mistake_in_file(file, error.__context__, argv)
    return None


def _innermost(error: Exception) -> Exception:
    """Return the innermost of the ConfigCompositionExceptions that Hydra has raised from each other; any other error
    is returned itself.
    """
    while isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, ConfigCompositionException):
        error = error.__cause__
    return error


def _mistake_in_values(error: Exception, argv: Sequence[str]) -> ConfigError:
    """Return the mistake in a value that Hydra has read and cannot use; if the kind of error is not known here, in
    Hydra's words.
    """
    cause = error.__cause__
    said = str(error)
    is_of_composition = isinstance(error, ConfigCompositionException)
    if is_of_composition:
        mistake = _mistake_at_key(said, cause, argv)
        if mistake is not None:
            return mistake
    if said.startswith("BasicSweeper does not support sweep type"):
        return NotAllowed(
            "interval(...) in a sweep: Hydra's own sweeper needs a list of values. Add hydra/sweeper=optuna, or write "
            "a list of values."
        )
    if said.startswith("Ambiguous value for argument '"):
        return _several_values(said, argv)
    if "does not support deletion" in str(cause):
        key = said.partition("~")[2]
        return NotAllowed(f"~{key}: {key} cannot be deleted. Use {key}=null to unset it.")
    if isinstance(error, InterpolationResolutionError):
        return _unresolved(error, argv)
    if is_of_composition and isinstance(cause, OmegaConfBaseException):
        return misfit_typed(argv) or ConfigError(f"{error} ({first_line(cause)})")
    if isinstance(error, OmegaConfBaseException):
        key = error.full_key or "config"
        return ConfigError(f"{key}: {said.splitlines()[0]}")
    hint = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
    words = said or str(cause)
    return ConfigError(words.strip().replace(hint, ""))


def _mistake_at_key(said: str, cause: BaseException | None, argv: Sequence[str]) -> ConfigError | None:
    """Return the mistake in the value of a key that Hydra could not set: the schema has no such key, or the value has
    another type.

    Args:
      said: Hydra's message.
      cause: what OmegaConf said of it.
      argv: the words of the command line.

    Returns:
      The mistake; None if neither message names a key.
    """
    key = said.partition("Could not override '")[2].partition("'")[0]
    is_misfit = False
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        key = str(cause.full_key)
    elif isinstance(cause, ValidationError) and cause.full_key:
        key = str(cause.full_key)
        is_misfit = True
    if not key:
        return None
    typed = _values_typed(argv, key)
    # If the key is given twice, find the value that the error is about: Hydra sets the values in order.
    blamed = [value for value in typed if f"'{_unquoted(value)}'" in str(cause)]
    value = next(iter(blamed or typed), None)
    if is_misfit and value is None:
        # No word sets this very key: a word may set it below a group (`train={max_steps: x}`), or a file does.
        return misfit_typed(argv) or wrong_type(key, value)
    if is_misfit:
        return wrong_type(key, value)
    if value is not None:
        return unknown_key(key, value)
    # The message shows the word that sets something below the unknown key: `train.foo.bar=1` for `train.foo`.
    words = [word.lstrip("+") for word in argv]
    words_below = [word for word in words if word.startswith(f"{key}.")]
    return unknown_key(key, None, next(iter(words_below), ""))


def _several_values(said: str, argv: Sequence[str]) -> ConfigError:
    """Return the mistake in a word with several values where one is expected, from Hydra's message."""
    override = said.partition("'")[2].partition("'")[0]
    advice = ". Add --multirun to try each of them, or write a list as [1,2]."
    if {"-m", "--multirun"} & {*argv}:
        advice = ", and what is printed is one config. Give it one value."
    return NotAllowed(f"{override} has several values{advice}")


def _text_on_defaults(said: str, argv: Sequence[str]) -> str | None:
    """Return the message for a mistake in an experiment's file that Hydra finds through its defaults list, or for a
    group that `+group=option` adds although it exists.

    Args:
      said: Hydra's message.
      argv: the words of the command line.

    Returns:
      The message; None if `said` is another error.
    """
    twice = re.search(r"Multiple values for ([\w/]+)\. To override a value use 'override [\w/]+: (.*)'", said)
    if twice and f"+{twice[1]}={twice[2]}" in argv:
        return f"+{twice[1]}={twice[2]}: the group {twice[1]!r} exists already. Write {twice[1]}={twice[2]}."
    file = "the experiment's file"
    chosen = _values_typed(argv, "experiment")
    if chosen:
        file = f"conf/experiment/{_unquoted(chosen[-1])}.yaml"
    if twice:
        line = f"'- override /{twice[1]}: {twice[2]}'"
        return f"{file}: write {line} in its defaults, because the group {twice[1]!r} exists already."
    if re.search(r"(?:override|Default for) '[\w/]+@experiment\.", said):  # in the words of Hydra 1.3 and 1.4
        return _text_on_package(file)
    relative = re.search(r"(?:Could not override|Default for) 'experiment/([\w/]+)@", said)
    if relative:
        return f"{file}: write '- override /{relative[1]}: ...' in its defaults, with the slash."
    missing = re.search(r"In '(experiment/.+)': Could not find 'experiment/([\w/]+)/(\w+)'", said)
    if missing:
        file, group, name = missing.groups()
        return (
            f"conf/{file}.yaml: write '- override /{group}: {name}' in its defaults. '- {group}: {name}' means a file "
            f"in conf/experiment/{group}."
        )
    return None


def _text_on_package(file: str) -> str:
    return f"{file}: its first line must be '# @package _global_'. Without it, its keys would begin with experiment."


def _text_on_unreadable(override: str, reason: str, argv: Sequence[str]) -> str:
    """Return the message for an override that Hydra's grammar does not accept, for `reason`."""
    key, equals, value = override.partition("=")
    if not equals:
        return _text_on_word(override, argv)
    shown = masked_override(override)
    if "=" in value and _is_flat_list(value):
        texts = [f"'{text.strip()}'" for text in value[1:-1].split(",")]
        quoted = masked_override(f"{key}=[{','.join(texts)}]")
        return f'cannot read {shown!r}: quote the texts of a list that have an equals sign: "{quoted}".'
    # To quote all of such a value would change what it means, and Hydra's own reason says more.
    is_structured = "${" in value or value.startswith(("[", "{", "'", '"')) or value.endswith(",")
    if is_structured:
        return f"cannot read {shown!r}: {reason}"
    quoted = masked_override(f'{key}="{value}"')
    return (
        f"cannot read {shown!r}: quote values with characters other than a-z, A-Z, 0-9 and /-\\+.$%*@?|, inside the "
        f"shell's quotes: '{quoted}'."
    )


def _text_on_word(word: str, argv: Sequence[str]) -> str:
    """Return the message for a word without an equals sign: a command, or a key whose value is the next word."""
    if word in schema.COMMANDS:
        return f"cannot read {word!r}: a command is written command={word}."
    meant = nearest(word, schema.COMMANDS)
    if meant:
        return f"cannot read {word!r}: write key=value. Did you mean command={meant[0]}?"
    advice = f"cannot read {word!r}: write key=value, without spaces around the equals sign"
    words_after: Sequence[str] = ()
    if word in argv:  # else Hydra was given another word than the user typed, such as the new name of a key
        words_after = argv[list(argv).index(word) + 1 :]
    is_value_next = bool(words_after) and "=" not in words_after[0] and not words_after[0].startswith("-")
    if is_value_next:
        return f"{advice}: {masked_override(f'{word}={words_after[0]}')}"
    return f"{advice}."


def _is_flat_list(value: str) -> bool:
    """Report whether a text is one list whose elements are plain: neither nested, nor quoted, nor interpolated."""
    ends_with_list = value.find("]") == len(value) - 1  # the first bracket that closes is the last character
    return value.startswith("[") and ends_with_list and not re.search(r"[\[{'\"$]", value[1:])


def _mistake_in_file(name: str, error: OmegaConfBaseException, argv: Sequence[str]) -> ConfigError:
    """Return the mistake in a config file, such as `train/default`, that Hydra could not merge with the others."""
    path = Path("conf", f"{name}.yaml")
    # The files of --config-dir take precedence over those of ./conf.
    config_dir = read_flags(argv)[0].config_dir
    if config_dir and Path(config_dir, f"{name}.yaml").is_file():
        path = Path(config_dir, f"{name}.yaml")
    file = schema.as_shown(path)
    key = str(error.full_key or "")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        if key.partition(".")[0] == "experiment":
            return Malformed(_text_on_package(file))
        return UnknownKey(f"{file}: {unknown_key(key)}")
    misfit = _misfit_in_file(path, name)
    if misfit is not None:
        return WrongType(f"{file}: {wrong_type(*misfit)}")
    return ConfigError(f"{file}: {key or 'its keys'}: {first_line(error)}")


def _misfit_in_file(path: Path, name: str) -> tuple[str, Any] | None:
    """Return the key of a user's config file whose value has a type that the schema does not take, and the value.

    Args:
      path: the file.
      name: its name for Hydra, `train/default`.

    Returns:
      The key and its value; None if the file fits the schema, or is not there.
    """
    if not path.is_file():
        return None
    header, config = read_users_file(path)
    package = package_of(name, header)
    tree: Any = OmegaConf.to_container(config, resolve=False)
    # Hydra's own keys are not in the schema, and `defaults` is none of a config.
    settings = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    if package != "_global_":
        for part in reversed(package.split(".")):
            settings = {part: settings}
    return parsing.misfit(schema.Config, settings)


def _unresolved(error: InterpolationResolutionError, argv: Sequence[str]) -> ConfigError:
    """Return the mistake of the interpolation (`${...}`) that has no value.

    OmegaConf names the key that was read first. The cause may be in another, to which that key leads.
    """
    key = str(error.full_key or "").partition("[")[0]  # without the place in a list
    root: Any = None
    if error.parent_node is not None:
        root = error.parent_node._get_root()
    if not isinstance(root, DictConfig):
        return ConfigError(f"{key or 'config'}: {first_line(error)}.")
    tree: Any = OmegaConf.to_container(root, resolve=False)
    texts = {name: str(value) for name, value in schema.flatten(tree).items() if "${" in str(value)}
    key = _last_unresolved(root, key, texts)
    choices = schema.value_at(tree, "hydra.runtime.choices")
    # A job gets its config without Hydra's own settings.
    if not choices and HydraConfig.initialized():
        choices = HydraConfig.get().runtime.choices
    origin = _origin(key, choices or {}, argv)
    shown = masked_override(f"{key}={texts.get(key)}")
    return ConfigError(f"{origin}{shown}: {first_line(error)}.")


def _last_unresolved(root: DictConfig, key: str, texts: Mapping[str, str]) -> str:
    """Follow interpolations from a key that has no value to the last key on the way that has none, and return that.

    Args:
      root: the config.
      key: the first key.
      texts: key -> its text, of each key with an interpolation.
    """
    seen: list[str] = []
    following: str | None = key
    while following is not None:  # until a key leads to no other, or back
        key = following
        seen.append(key)
        following = None
        for other in texts:
            is_read = f"${{{other}}}" in texts.get(key, "")
            if is_read and other not in seen and not _resolves(root, other):
                following = other
    return key


def _resolves(root: DictConfig, key: str) -> bool:
    """Report whether the value of a key, or each of its list, can be read."""
    try:
        value = OmegaConf.select(root, key)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:
        return False
    return True


def _text_on_missing_option(error: MissingConfigException) -> str:
    """Return the message for an option that does not exist (`strategy=mirored`), with the nearest and all existing
    ones.
    """
    missing = str(error.missing_cfg_file or "")
    options = list(error.options or ())
    group, _, name = missing.rpartition("/")
    if not options:
        return str(error).strip().splitlines()[0]
    hint = did_you_mean(name, options)
    if group == "hydra/launcher" and name in _PLUGINS:
        hint = f" It is a plugin of Hydra: pip install {_PLUGINS[name]}."
    return f"{group}={name}: no {name!r} in conf/{group}.{hint} Available: {', '.join(sorted(options))}."


# --- the words of a command line ------------------------------------------------------------------------------------


def _values_typed(argv: Sequence[str], key: str) -> list[str]:
    """Return the values that the command line gives to `key`, in order."""
    return [text.partition("=")[2] for text, override in _parse_overrides(argv) if override.key_or_group == key]


def _parse_overrides(words: Iterable[str]) -> Iterator[tuple[str, Override]]:
    """Yield those of `words` that are overrides. Hydra itself reports a word that it cannot parse."""
    for text in words:
        with contextlib.suppress(HydraException, ValueError):
            yield text, OverridesParser.create().parse_override(text)


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value
