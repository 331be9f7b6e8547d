"""All code that depends on Hydra: where Hydra finds configs, what makes it faster, and clearer texts for its errors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import pickle
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra import initialize_config_dir, initialize_config_module
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    KeyValidationError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError

import runner
from runner.config import changed_keys, parsing, schema
from runner.config.error_messages import unknown_flag, unknown_key, wrong_type
from runner.config.job_id import job_id, sweep_id
from runner.config.mistakes import ConfigError, Malformed, NotAllowed, NotFound, UnknownKey, WrongType
from runner.config.settings.limits import as_typed
from runner.system.files import write_atomically
from runner.system.redaction import masked_override
from runner.system.suggestions import did_you_mean, nearest
from runner.system.urls import is_url

_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
"""Launcher -> the package that provides it."""

VERSION: Mapping[str, str] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
"""Hydra 1.4 no longer has other behaviours to choose from."""

OPTUNA = "runner.launch.sweeps.optuna_sweeper.OptunaSweeper"


def _allow_help_that_is_no_string() -> None:
    """Let argparse take the help of Hydra 1.3's `--shell-completion`, an object that becomes a text when it is shown.

    Python 3.14 reads the help of each argument when it is added, and refuses this one ("badly formed help string"), for
    `hydra.main` as for `get_args_parser`. Other arguments are checked as before. Older Pythons have no such check.
    """
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        return

    @functools.wraps(check)
    def check_a_string(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    argparse.ArgumentParser._check_help = check_a_string  # type: ignore[attr-defined]


_allow_help_that_is_no_string()


@dataclass
class OptunaSettings:
    """The settings of `hydra/sweeper=optuna`.

    The sweeper is registered here and not as a plugin in `hydra_plugins`, because every Hydra app on the machine would
    import such a plugin.

    Attributes:
      n_trials: number of jobs of the sweep, including those of earlier starts.
      sampler, sampler_params: the class that suggests values (tpe, random, qmc, gp, cmaes, or a dotted name), and its
        arguments.
      pruner, pruner_params: the class that stops jobs early because of their evaluations (median, percentile,
        hyperband, successive_halving, threshold, or a dotted name), and its arguments; None: no pruning.
      seed: the sampler's seed; None: run.seed.
      storage: URL of Optuna's storage; None: a file in the sweep's folder.
      params: key -> values to choose from, written as on the command line.
    """

    _target_: str = OPTUNA
    n_trials: int = 20
    sampler: str = "tpe"
    sampler_params: dict[str, Any] = field(default_factory=dict)
    pruner: str | None = None
    pruner_params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    storage: str | None = None
    params: dict[str, str] = field(default_factory=dict)


@functools.cache
def prepare() -> None:
    """Register the schema, resolvers, the search path and the reader of the user's files with Hydra."""

    def sweep_dir(given: str | None, overrides: Any) -> str:
        texts: Any = OmegaConf.to_container(overrides, resolve=False)
        return given or f"outputs/sweeps/{sweep_id(texts)}"

    store = ConfigStore.instance().store  # conf/runner.yaml starts from schema/config
    store(group="schema", name="config", node=parsing.schema_node(), package="_global_", provider="runner")
    store(group="hydra/sweeper", name="optuna", node=OptunaSettings, package="hydra.sweeper", provider="runner")
    if VERSION:  # Hydra 1.3 copies its whole store for each look-up (0.55 s for --help), although `load` returns copies
        ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    register: Any = OmegaConf.register_new_resolver if VERSION else OmegaConf.register_resolver  # of OmegaConf 2.4
    Plugins.instance().register(UsersConf)
    Plugins.instance().register(UsersFiles)
    for name, resolver, is_cached in (
        ("new_name", lambda: secrets.token_hex(2), True),
        ("run_dir", run_dir, False),
        ("sweep_dir", sweep_dir, True),  # cached, so that jobs get the folder of the whole sweep
        ("job_dir", job_dir, False),
    ):
        register(name, resolver, use_cache=is_cached, replace=True)


@dataclasses.dataclass(frozen=True)
class RefusedJob:
    """Returned by a job of a sweep that did not run, because its config has a mistake.

    The launcher ran the job in another process, which has printed the reason.
    """

    folder: Path
    name: str
    reason: str


def read_flags(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return a command line as Hydra's argparse reads it, with `overrides`, and the words that are none: `--cfg job`.

    Raises:
      ConfigError: a word that begins with dashes is no flag of Hydra, or has a value that the flag does not allow.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UnknownKey(message)

    parser.error = refuse  # type: ignore[method-assign]  # argparse prints the usage and exits
    args, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        after = words[words.index(unknown[0]) + 1 :]
        value = after[0] if after and "=" not in after[0] and not after[0].startswith("-") else ""
        raise unknown_flag(unknown[0], value)
    return args, [word for word in words if word not in args.overrides]


def config_flags(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line that say where its config files are: `--config-dir=mine`."""
    given = read_flags(words)[0]
    named = {"path": given.config_path, "name": given.config_name, "dir": given.config_dir}
    return [f"--config-{name}={value}" for name, value in named.items() if value]


INFORMATION = ("help", "resolve", "hydra_help", "cfg", "info", "shell_completion", "experimental_rerun")
"""Flags with which Hydra only prints something, and does so itself."""

MOST_KEPT = 256
"""Choices of groups that are kept composed at a time, 25 kB each."""


class Composer:
    """Composes the configs of a command. Hydra does so once for each choice of groups; values are set on copies.

    It stands in for Hydra's ConfigLoader, so that sweepers and launchers compose their jobs with it.

    Args:
      path: folder of the config files, or `pkg://` and a package; None: the runner's.
      name: the file to start from.
      further: folder of further config files, which take precedence (`--config-dir`).
    """

    def __init__(self, path: str | None = None, name: str | None = None, further: str | None = None) -> None:
        path = path or conf_path()
        settings: Any = {"job_name": "runner", **VERSION}
        # Hydra is global, and a program that calls the runner may use it as well.
        held = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        UsersConf.further = further
        try:
            if path.startswith("pkg://"):
                initialize_config_module(path.removeprefix("pkg://"), **settings)
            else:
                initialize_config_dir(str(Path(path).absolute()), **settings)
            self._loader = GlobalHydra.instance().config_loader()
        finally:
            GlobalHydra.instance().hydra, UsersConf.further = held, None
        self._name = name or "runner"
        self._bases: dict[tuple[str, ...], bytes] = {}
        self._choices: tuple[str, ...] = ()  # of the last job

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled, in the process of another launcher
            raise AttributeError(name)
        return getattr(self._loader, name)

    def compose(self, words: Sequence[str], *, is_sweep: bool) -> DictConfig:
        """Return the config of a run; or that of a sweep as a whole, if a flag or a config file asks for one."""
        if is_sweep:
            return self._load([*words, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        try:
            config = self.job(words)
        except ConfigCompositionException:  # several values of a key are a mistake in a run only
            if any(one.is_sweep_override() for one in OverridesParser.create().parse_overrides(list(words))):
                config = self._load(words, RunMode.MULTIRUN)
                if config.hydra.mode == RunMode.MULTIRUN:
                    return config
            raise
        if config.hydra.mode == RunMode.MULTIRUN:
            return self._load(words, RunMode.MULTIRUN)
        config.hydra.mode = RunMode.RUN
        return config

    def job(self, words: Sequence[str]) -> DictConfig:
        """Return the config of a run or of one job, equal to the one that Hydra composes."""
        parsed = OverridesParser.create().parse_overrides(list(words))
        # A value is set after the groups, but not before a word to the left that adds, deletes or merges keys.
        changing = [one.type != OverrideType.CHANGE or isinstance(one.value(), dict) for one in parsed]
        first = max((number for number, changes in enumerate(changing, 1) if changes), default=0)
        values = [one for one in parsed[first:] if _is_in_a_group(one) and not one.is_sweep_override()]
        set_later = {id(one) for one in values}
        base = self._base(tuple(str(one.input_line) for one in parsed if id(one) not in set_later))
        self._choices = tuple(str(one.input_line) for one in parsed if not _is_in_a_group(one))
        try:
            for override in values:
                OmegaConf.update(base, str(override.key_or_group), override.value(), merge=True)
        except (OmegaConfBaseException, AssertionError):
            return self._load(words, RunMode.RUN)  # which raises Hydra's own error
        task = [str(one.input_line) for one in parsed if not one.is_hydra_override()]
        base.hydra.overrides.task = task
        if VERSION:  # from Hydra 1.4 on computed when it is read
            job = base.hydra.job
            of_name = job.config.override_dirname
            keyed = [word for word in task if word.lstrip("+").partition("=")[0] not in of_name.exclude_keys]
            job.override_dirname = of_name.item_sep.join(sorted(keyed)).replace("=", of_name.kv_sep)
        return base

    @property
    def declared(self) -> dict[str, Any]:
        """The config of the last job, before values on its command line changed it."""
        tree: Any = OmegaConf.to_container(self._base(self._choices))
        return {name: value for name, value in tree.items() if name != "hydra"}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Return the config of a job of a sweep, as Hydra's method of this name does."""
        config = self.job([*master_config.hydra.overrides.hydra, *sweep_overrides])
        # The same folder and time for all jobs: Hydra keeps in the sweep's config what its resolvers returned.
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    def _base(self, words: tuple[str, ...]) -> DictConfig:
        """Return what Hydra composes of `words`. The caller may change it."""
        if words not in self._bases:
            if len(self._bases) >= MOST_KEPT:
                del self._bases[next(iter(self._bases))]
            self._bases[words] = pickle.dumps(self._load(words, RunMode.RUN))
        base: DictConfig = pickle.loads(self._bases[words])  # half the time of copy.deepcopy
        return base

    def _load(self, words: Sequence[str], mode: RunMode) -> DictConfig:
        # Hydra would write its notes there before the run has locked its folder, readable by everybody.
        quiet = "hydra.output_subdir=null"
        return self._loader.load_configuration(
            self._name, [*(word for word in words if word != quiet), quiet], run_mode=mode
        )


def _is_in_a_group(override: Override) -> bool:
    """Report whether an override is about a key in a group, and neither about a group nor Hydra's own settings."""
    key = str(override.key_or_group)
    return "." in key and "/" not in key and override.package is None and not override.is_hydra_override()


def keep_private(config: DictConfig) -> None:
    """Restrict the folder in which submitit pickles the jobs of a sweep to its owner: a job contains its config."""
    given = OmegaConf.select(config, "hydra.launcher.submitit_folder")
    if given:
        folder = Path(str(given).partition("%")[0])  # submitit replaces %j by the job's number
        is_ours = not folder.exists() or folder.name == ".submitit"  # the default is in the sweep's folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours:
            folder.chmod(0o700)


def write_privately(path: Path, config: DictConfig) -> None:
    """Write the config of a sweep, which may contain secrets, to a file that at no time others can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, OmegaConf.to_yaml(config), mode=0o600)


def conf_path() -> str:
    """Return the path of the runner's `conf/`: in a wheel the package `runner.conf`, in a checkout the folder beside
    it.
    """
    package = Path(runner.__file__).parent
    return "pkg://runner.conf" if (package / "conf").is_dir() else str(package.parent / "conf")


class UsersFiles(FileConfigSource):
    """The files in the user's ./conf and in --config-dir; renamed keys get their new names, with a warning.

    What cannot be read is reported here, where the file is known: Hydra's own errors do not say which one it was.
    """

    @staticmethod
    def scheme() -> str:
        return "conf"

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml")
        path = Path(self.path, f"{name}.yaml")
        header, config = _read_users_file(path)
        package = header["package"] or name.rpartition("/")[0].replace("/", ".")
        at = "" if package == "_global_" else f"{package}."
        for text in changed_keys.rename_in(config, at):
            _warn_once(f"{schema.as_shown(path)}: {text}")
        return ConfigResult(config=config, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header)


def _read_users_file(path: Path) -> tuple[dict[str, str | None], DictConfig]:
    """Return the header of a config file (its `# @package`), and its keys.

    Raises:
      ConfigError: the file cannot be read, or what it holds are not keys with values.
    """
    file = schema.as_shown(path)
    try:
        text = schema.text_of(path)
        header = ConfigSource._get_header_dict(text[:512])  # as much as Hydra's own source reads
        stream = io.StringIO(text)
        stream.name = file  # YAML's errors name it
        config = OmegaConf.load(stream)
    except ConfigError:
        raise
    except MarkedYAMLError as error:
        raise _in_yaml(error) from error
    except RecursionError as error:
        raise Malformed(
            f"{file}: its values are nested without end: an anchor (&name) has itself (*name) below it, or there are "
            "too many brackets."
        ) from error
    except KeyValidationError as error:
        at = f" below {error.full_key}" if error.full_key else ""
        raise Malformed(f"{file}: a key{at} is not text ({_first_line(error)}). Write it in quotes.") from error
    except OmegaConfBaseException as error:
        raise Malformed(f"{file}: {error.full_key}: {_first_line(error)}.") from error
    except (OSError, ValueError, YAMLError) as error:
        raise Malformed(f"{file} cannot be read: {_first_line(error)}.") from error
    if not isinstance(config, DictConfig):
        raise Malformed(f"{file} holds a list, and not keys with values.")
    _check_own_words(config, file)
    return header, config


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _check_own_words(config: DictConfig, file: str) -> None:
    """Check the two words of a config file that mean something to Hydra itself: `defaults` and `hydra`.

    Raises:
      ConfigError: one has a value of another type; Hydra would not say in which file.
    """
    tree: Any = OmegaConf.to_container(config, resolve=False)
    defaults = tree.get("defaults", [])
    if not isinstance(defaults, list) or not all(map(_is_in_defaults, defaults)):
        raise Malformed(
            f"{file}: defaults={as_typed(defaults)} is not a list of options. Write each as '- group: option' or "
            "'- file'."
        )
    own = tree.get("hydra", {})
    if not isinstance(own, dict):
        raise WrongType(f"{file}: hydra={as_typed(own)} is not a group of settings. Remove it, or write keys below it.")


def _is_in_defaults(entry: Any) -> bool:
    """Report whether an entry of a defaults list is a file, or one group with its option."""
    return isinstance(entry, str) or (isinstance(entry, dict) and len(entry) == 1)


_warn_once = functools.cache(changed_keys.warn)  # Hydra loads a file several times


class UsersConf(SearchPathPlugin):
    """Adds the user's `./conf` to Hydra's search path before the runner's.

    It may add options to every group, and its files take precedence over the runner's.
    """

    further: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.further is not None:
            if not Path(self.further).is_dir():
                raise NotFound(f"--config-dir={self.further}: there is no such folder.")
            search_path.prepend("command-line", f"conf://{Path(self.further).absolute()}")
        users = Path.cwd() / "conf"
        if users.is_dir() and not (Path(conf_path()).is_dir() and users.samefile(conf_path())):
            search_path.prepend("your ./conf", f"conf://{users}")


def file_with(key: str, choices: Mapping[str, Any]) -> Path | None:
    """Return the user's file that sets `key`, `conf/train/default.yaml`; None: one of the runner's, or none, sets it.

    Args:
      key: the key.
      choices: group -> chosen option.
    """
    group = key.partition(".")[0]
    files = {f"experiment/{choices.get('experiment')}": "", "runner": "", f"{group}/{choices.get(group)}": f"{group}."}
    for name, at in files.items():  # that which is merged last comes first
        file = Path("conf", f"{name}.yaml")
        found: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else None
        if isinstance(found, dict) and key in schema.flatten(found, at):
            return file
    return None


def _origin(key: str, choices: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Return the user's file that sets a key, as the beginning of a message; '' if the command line sets it."""
    file = None if _values_typed(argv, key) else file_with(key, choices)
    return f"{file}: " if file else ""


def run_dir(command: str, given: str | None, new: str) -> str:
    """Return Hydra's run folder: model_dir for a command that trains; the other commands do not create a folder."""
    return (given or new) if command in schema.TRAINING_RUNS and not is_url(given) else "."


def job_dir(*, _root_: DictConfig) -> str:
    """Return the folder of a job in its sweep."""
    tree: Any = {}
    for name in _root_:
        if name != "hydra":
            value = _root_[name]
            is_node = OmegaConf.is_config(value)
            tree[name] = OmegaConf.to_container(value, resolve=True) if is_node else value
    if tree.get("command") == "dry_run":  # a dry run of a sweep lists the jobs, with the folders of its training jobs
        tree["command"] = "train_and_evaluate"
    reads_a_run = tree.get("command") not in schema.TRAINING_COMMANDS
    return job_id(tree, reads_a_run=reads_a_run)


def check_composed(config: DictConfig, argv: Sequence[str]) -> None:
    """Check what is used of a config before a job checks all of it: Hydra makes the folder of a run before that.

    Raises:
      ConfigError: a text has a NUL, or a setting of Hydra from which it builds the command has another type.
    """
    choices = config.hydra.runtime.choices
    tree: Any = OmegaConf.to_container(config, resolve=False)
    own = tree.pop("hydra")  # it repeats the words of the command line
    key = parsing.key_with_nul(tree)
    if key:
        raise parsing.has_nul(key, schema.flatten(tree)[key], _origin(key, choices, argv))
    for name in ("launcher", "sweeper"):
        key = f"hydra.{name}"
        if not isinstance(own.get(name), dict):
            at = _origin(key, choices, argv)
            raise WrongType(
                f"{at}{key}={as_typed(own.get(name))} is not a group of settings. Write hydra/{name}=basic."
            )
    key = "hydra.verbose"
    if isinstance(own["verbose"], dict):
        at = _origin(key, choices, argv)
        raise WrongType(f"{at}{key}={as_typed(own['verbose'])} is neither true, false, nor the names of loggers.")


def check_groups(overrides: Sequence[str]) -> None:
    """Check that no group is given a list of options; Hydra would merge these options one over the other.

    Raises:
      ConfigError: a group is given a list; the message says what to write.
    """
    groups = {setting.name for setting in dataclasses.fields(schema.Config) if schema.class_at(setting.name)}
    # Parse only words with a bracket: parsing one word by Hydra's grammar takes 1.5 ms (measured), at each start.
    for _, override in _parsed(text for text in overrides if "[" in text):
        value = override.value()
        options = value.list if isinstance(value, ChoiceSweep) else [value]
        listed = next((option for option in options if isinstance(option, list)), None)
        group = str(override.key_or_group)
        if listed is None or not (group in groups or group == "experiment" or "/" in group):
            continue
        names = [str(name) for name in listed]
        written = f"{group}=[{','.join(names)}]"
        if group not in groups:
            if not all(isinstance(name, str | QuotedString) for name in listed):
                raise NotAllowed(f"{written}: a group takes the names of its files.")
            continue
        if group == "tracking":
            write = f"Several trackers are tracking.backend=[{','.join(names)}]"
        else:
            write = f"Write {group}={names[0] if names else 'default'}; to try each, -m {group}={','.join(names)}"
        raise NotAllowed(f"{written}: a run takes one option of the group {group!r}. {write}.")


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
    added: list[str] = []
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        if override.is_delete():
            continue
        for key, value in schema.flatten({str(override.key_or_group): override.value()}).items():
            if override.is_add() or override.is_force_add():
                added.append(key)
            elif not any(f"{key}.".startswith(f"{one}.") for one in added):
                _check_declared(key, value, declared, final)


def _check_declared(key: str, value: Any, declared: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    match = _PARAMS.fullmatch(key)
    if match is None:
        return
    at, path = match[1], match[2].split(".")
    if at == "vars":
        _check_path(key, value, at, schema.value_at(declared, at) or {}, "the config")
        return
    block = at.removesuffix(".params")
    # A named evaluation inherits the params of input.eval.
    blocks = [block, *(["input.eval"] if block.startswith("input.eval.") else [])]
    function = next(filter(None, (schema.value_at(declared, f"{one}.fn") for one in blocks)), None)
    given = next(filter(None, (schema.value_at(final, f"{one}.fn") for one in blocks)), None)
    node: Any = {}
    for one in reversed(blocks):
        node = {**node, **(schema.value_at(declared, f"{one}.params") or {})}
    if function != given or (path[0] in _HANDED_OVER and block != "model"):
        return
    _check_path(key, value, at, node, f"the chosen {block.partition('.')[0]}")


def _check_path(key: str, value: Any, at: str, node: Any, where: str) -> None:
    """Check that a mapping that any names are allowed in has a key of the command line.

    Args:
      key, value: the key, and its value.
      at: the key of the mapping.
      node: the mapping, as it was before.
      where: whose it is, for the message.

    Raises:
      UnknownKey: the mapping has others, but not this one.
    """
    path = key.removeprefix(f"{at}.").split(".")
    for depth, name in enumerate(path):
        is_table = depth > 0 and isinstance(node, Mapping) and all(isinstance(each, Mapping) for each in node.values())
        if not isinstance(node, Mapping) or not node or is_table:
            return
        if name not in node:
            owner = ".".join([at, *path[:depth]])
            raise UnknownKey(
                f"{masked_override(f'{key}={as_typed(value)}')}: {owner} of {where} has no {name!r}."
                f"{did_you_mean(name, node)} Declared: {', '.join(map(str, node))}. To add one, write +{key}=..."
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
    return _in_words_and_files(error, argv) or _in_values(_innermost(error), argv)


def _in_words_and_files(error: Exception, argv: Sequence[str]) -> ConfigError | None:
    """Return the mistake in a word or a file that Hydra could not read; None if it has read all of them."""
    if isinstance(error, HydraException):
        in_defaults = _in_defaults(f"{error}\n{error.__cause__}", argv)
        if in_defaults:
            return Malformed(in_defaults)
    if isinstance(error, MissingConfigException):
        return NotFound(_missing_option(error))
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0]
        return Malformed(_unreadable(str(error.override), reason, argv))
    if isinstance(error, MarkedYAMLError):
        return _in_yaml(error)
    names_file = str(error).startswith("In '")
    if names_file and isinstance(error.__context__, OmegaConfBaseException):
        file = str(error).split("'")[1]
        return _in_a_file(file, error.__context__, argv)
    return None


def _innermost(error: Exception) -> Exception:
    """Return the first of the errors about a composition that Hydra has wrapped in one another, or another error."""
    while isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, ConfigCompositionException):
        error = error.__cause__
    return error


def _in_values(error: Exception, argv: Sequence[str]) -> ConfigError:
    """Return the mistake in a value that Hydra has read and cannot use; in Hydra's words if they are not known here."""
    cause = error.__cause__
    said = str(error)
    is_of_composition = isinstance(error, ConfigCompositionException)
    if is_of_composition:
        at_key = _at_key(said, cause, argv)
        if at_key is not None:
            return at_key
    if said.startswith("BasicSweeper does not support sweep type"):
        return NotAllowed(
            "interval(...) in a sweep: Hydra's own sweeper needs a list of values. Add hydra/sweeper=optuna, or write "
            "a list of values."
        )
    if said.startswith("Ambiguous value for argument '"):
        return _with_several_values(said, argv)
    if "does not support deletion" in str(cause):
        key = said.partition("~")[2]
        return NotAllowed(f"~{key}: {key} cannot be deleted. Use {key}=null to unset it.")
    if isinstance(error, InterpolationResolutionError):
        return _unresolved(error, argv)
    if is_of_composition and isinstance(cause, OmegaConfBaseException):
        return misfit_typed(argv) or ConfigError(f"{error} ({_first_line(cause)})")
    if isinstance(error, OmegaConfBaseException):
        key = error.full_key or "config"
        return ConfigError(f"{key}: {said.splitlines()[0]}")
    hint = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
    words = said or str(cause)
    return ConfigError(words.strip().replace(hint, ""))


def _at_key(said: str, cause: BaseException | None, argv: Sequence[str]) -> ConfigError | None:
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
        return misfit_typed(argv) or wrong_type(key, value)
    if is_misfit:
        return wrong_type(key, value)
    if value is not None:
        return unknown_key(key, value)
    words = [word.lstrip("+") for word in argv]
    below = [word for word in words if word.startswith(f"{key}.")]
    return unknown_key(key, None, next(iter(below), ""))


def _with_several_values(said: str, argv: Sequence[str]) -> ConfigError:
    """Return the mistake in a word with several values where one is expected, from Hydra's message."""
    override = said.partition("'")[2].partition("'")[0]
    advice = ". Add --multirun to try each of them, or write a list as [1,2]."
    if {"-m", "--multirun"} & {*argv}:
        advice = ", and what is printed is one config. Give it one value."
    return NotAllowed(f"{override} has several values{advice}")


def _in_defaults(said: str, argv: Sequence[str]) -> str | None:
    """Return the message for a group that is chosen twice, on the command line or in an experiment's defaults list.

    Args:
      said: Hydra's message.
      argv: the words of the command line.

    Returns:
      The message; None if `said` is another error.
    """
    match = re.search(r"Multiple values for ([\w/]+)\. To override a value use 'override [\w/]+: (.*)'", said)
    if match and f"+{match[1]}={match[2]}" in argv:
        return f"+{match[1]}={match[2]}: the group {match[1]!r} exists already. Write {match[1]}={match[2]}."
    chosen = _values_typed(argv, "experiment")
    file = f"conf/experiment/{_unquoted(chosen[-1])}.yaml" if chosen else "the experiment's file"
    if match:
        line = f"'- override /{match[1]}: {match[2]}'"
        return f"{file}: write {line} in its defaults, because the group {match[1]!r} exists already."
    if re.search(r"(?:override|Default for) '[\w/]+@experiment\.", said):  # in the words of Hydra 1.3 and 1.4
        return _without_package(file)
    if match := re.search(r"(?:Could not override|Default for) 'experiment/([\w/]+)@", said):
        return f"{file}: write '- override /{match[1]}: ...' in its defaults, with the slash."
    if match := re.search(r"In '(experiment/.+)': Could not find 'experiment/([\w/]+)/(\w+)'", said):
        file, group, name = match.groups()
        return (
            f"conf/{file}.yaml: write '- override /{group}: {name}' in its defaults. '- {group}: {name}' means a file "
            f"in conf/experiment/{group}."
        )
    return None


def _without_package(file: str) -> str:
    return f"{file}: its first line must be '# @package _global_'. Without it, its keys would begin with experiment."


def _unreadable(override: str, reason: str, argv: Sequence[str]) -> str:
    """Return the message for an override that Hydra's grammar does not accept, for `reason`."""
    key, equals, value = override.partition("=")
    if not equals:
        if override in schema.COMMANDS:
            return f"cannot read {override!r}: a command is written command={override}."
        meant = nearest(override, schema.COMMANDS)
        if meant:
            return f"cannot read {override!r}: write key=value. Did you mean command={meant[0]}?"
        rest = argv[list(argv).index(override) + 1 :] if override in argv else []
        joined = masked_override(f"{override}={rest[0]}") if rest and "=" not in rest[0] else ""
        return (
            f"cannot read {override!r}: write key=value, without spaces around the equals sign"
            f"{f': {joined}' if joined else '.'}"
        )
    shown = masked_override(override)
    is_flat_list = (
        value.startswith("[") and value.find("]") == len(value) - 1 and not re.search(r"[\[{'\"$]", value[1:])
    )
    if is_flat_list and "=" in value:
        texts = [f"'{text.strip()}'" for text in value[1:-1].split(",")]
        quoted = masked_override(f"{key}=[{','.join(texts)}]")
        return f'cannot read {shown!r}: quote the texts of a list that have an equals sign: "{quoted}".'
    if "${" in value or value.startswith(("[", "{", "'", '"')) or value.endswith(","):
        return f"cannot read {shown!r}: {reason}"
    quoted = masked_override(f'{key}="{value}"')
    return (
        f"cannot read {shown!r}: quote values with characters other than a-z, A-Z, 0-9 and /-\\+.$%*@?|, inside the "
        f"shell's quotes: '{quoted}'."
    )


def _in_yaml(error: MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark else "a config file"
    return Malformed(f"{where}: {error.problem or error.context}.")


def _in_a_file(name: str, error: OmegaConfBaseException, argv: Sequence[str]) -> ConfigError:
    """Return the mistake in a config file, such as `train/default`, that Hydra could not merge with the others."""
    path = Path("conf", f"{name}.yaml")
    further = read_flags(argv)[0].config_dir
    if further and Path(further, f"{name}.yaml").is_file():
        path = Path(further, f"{name}.yaml")
    file = schema.as_shown(path)
    key = str(error.full_key or "")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        if key.partition(".")[0] == "experiment":
            return Malformed(_without_package(file))
        return UnknownKey(f"{file}: {unknown_key(key)}")
    misfit = _misfit_in_file(path, name)
    if misfit is not None:
        return WrongType(f"{file}: {wrong_type(*misfit)}")
    return ConfigError(f"{file}: {key or 'its keys'}: {_first_line(error)}")


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
    header, config = _read_users_file(path)
    package = header["package"] or name.rpartition("/")[0].replace("/", ".")
    tree: Any = OmegaConf.to_container(config, resolve=False)
    # Hydra's own keys are not in the schema, and `defaults` is none of a config.
    own = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    for part in reversed([] if package == "_global_" else package.split(".")):
        own = {part: own}
    return parsing.misfit(schema.Config, own)


def groups_without_option(argv: Sequence[str]) -> list[str]:
    """Return the words of the command line that give a group something else than the name of an option."""
    return [text for text, override in _parsed(argv)
            if "." not in str(override.key_or_group) and not isinstance(override.value(), str | list)]  # fmt: skip


def misfit_typed(argv: Sequence[str]) -> ConfigError | None:
    """Return the mistake of the first word of the command line whose value has a type that its key does not take."""
    for _, override in _parsed(argv):
        if override.is_delete() or override.is_sweep_override() or override.is_hydra_override():
            continue
        tree: Any = override.value()
        for part in reversed(str(override.key_or_group).split(".")):
            tree = {part: tree}
        misfit = parsing.misfit(schema.Config, tree)
        if misfit is not None:
            return wrong_type(*misfit)
    return None


def _unresolved(error: InterpolationResolutionError, argv: Sequence[str]) -> ConfigError:
    """Return the mistake of the interpolation (`${...}`) that has no value.

    OmegaConf names the key that was read first. The cause may be in another, to which that key leads.
    """
    key = str(error.full_key or "").partition("[")[0]  # without the place in a list
    root: Any = error.parent_node._get_root() if error.parent_node is not None else None
    if not isinstance(root, DictConfig):
        return ConfigError(f"{key or 'config'}: {_first_line(error)}.")
    tree: Any = OmegaConf.to_container(root, resolve=False)
    texts = {name: str(value) for name, value in schema.flatten(tree).items() if "${" in str(value)}
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
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    chosen = schema.value_at(tree, "hydra.runtime.choices") or choices
    at = _origin(key, chosen, argv)
    return ConfigError(f"{at}{masked_override(f'{key}={texts.get(key)}')}: {_first_line(error)}.")


def _resolves(root: DictConfig, key: str) -> bool:
    """Report whether the value of a key, or each of its list, can be read."""
    try:
        value = OmegaConf.select(root, key)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:
        return False
    return True


def _missing_option(error: MissingConfigException) -> str:
    """Return the message for an option that does not exist (`strategy=mirored`), with the nearest and all existing
    ones.
    """
    missing, options = str(error.missing_cfg_file or ""), list(error.options or ())
    group, _, name = missing.rpartition("/")
    if not options:
        return str(error).strip().splitlines()[0]
    hint = did_you_mean(name, options)
    if group == "hydra/launcher" and name in _PLUGINS:
        hint = f" It is a plugin of Hydra: pip install {_PLUGINS[name]}."
    return f"{group}={name}: no {name!r} in conf/{group}.{hint} Available: {', '.join(sorted(options))}."


def _values_typed(argv: Sequence[str], key: str) -> list[str]:
    """Return the values that the command line gives to `key`, in order."""
    return [text.partition("=")[2] for text, override in _parsed(argv) if override.key_or_group == key]


def _parsed(words: Iterable[str]) -> Iterator[tuple[str, Override]]:
    """Yield those of `words` that are overrides. Hydra itself reports a word that it cannot parse."""
    for text in words:
        with contextlib.suppress(HydraException, ValueError):
            yield text, OverridesParser.create().parse_override(text)


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
