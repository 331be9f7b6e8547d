"""How Hydra composes the config of a command: where it finds config files and our schema, and what makes it faster.

Messages about what it refuses are in `runner.config.hydra_mistakes`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import pickle
import secrets
from collections.abc import Mapping, Sequence
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
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import KeyValidationError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

import runner
from runner.config import changed_keys, parsing, schema
from runner.config.error_messages import unknown_flag
from runner.config.job_id import job_id, sweep_id
from runner.config.mistakes import ConfigError, Malformed, NotFound, UnknownKey, WrongType
from runner.config.settings.limits import as_typed
from runner.system.files import write_atomically
from runner.system.urls import is_url

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
    register: Any
    if VERSION:
        # Hydra 1.3 copies its whole store for each look-up (0.55 s for --help), although `load` returns copies.
        ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
        register = OmegaConf.register_new_resolver
    else:
        register = OmegaConf.register_resolver  # of OmegaConf 2.4
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
    """Parse a command line with Hydra's argparse.

    Returns:
      (the parsed arguments, whose `overrides` are the words without flags; all other words: flags and their values).

    Raises:
      ConfigError: a word that begins with dashes is no flag of Hydra, or has a value that the flag does not allow.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UnknownKey(message)

    parser.error = refuse  # type: ignore[method-assign]  # argparse prints the usage and exits
    args, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        flag = unknown[0]
        after = words[words.index(flag) + 1 :]
        value = ""
        if after and "=" not in after[0] and not after[0].startswith("-"):
            value = after[0]
        raise unknown_flag(flag, value)
    return args, [word for word in words if word not in args.overrides]


def config_flags(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line that say where its config files are: `--config-dir=mine`."""
    given, _ = read_flags(words)
    values = {"path": given.config_path, "name": given.config_name, "dir": given.config_dir}
    return [f"--config-{name}={value}" for name, value in values.items() if value]


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
        # Hydra is global, and a program that calls the runner may use it as well: put its own back at the end.
        other_hydra = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        UsersConf.further = further
        try:
            if path.startswith("pkg://"):
                initialize_config_module(path.removeprefix("pkg://"), **settings)
            else:
                initialize_config_dir(str(Path(path).absolute()), **settings)
            self._loader = GlobalHydra.instance().config_loader()
        finally:
            GlobalHydra.instance().hydra = other_hydra
            UsersConf.further = None
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
            parsed = OverridesParser.create().parse_overrides(list(words))
            if any(override.is_sweep_override() for override in parsed):
                config = self._load(words, RunMode.MULTIRUN)
                if config.hydra.mode == RunMode.MULTIRUN:
                    return config
            raise
        if config.hydra.mode == RunMode.MULTIRUN:
            return self._load(words, RunMode.MULTIRUN)
        config.hydra.mode = RunMode.RUN
        return config

    def job(self, words: Sequence[str]) -> DictConfig:
        """Return the config of a run or of one job, equal to the one that Hydra composes.

        Hydra composes the words that choose groups or change which keys there are. The other words only give another
        value to a key in a group: these values are set on a copy of what Hydra composed.
        """
        parsed = OverridesParser.create().parse_overrides(list(words))
        # Hydra applies the words in their order. So a value may be set afterwards only if no word to the right of it
        # adds, deletes or merges keys.
        first_settable = 0
        for number, override in enumerate(parsed, 1):
            if override.type != OverrideType.CHANGE or isinstance(override.value(), dict):
                first_settable = number
        set_on_copy: list[Override] = []
        composed: list[str] = []
        for number, override in enumerate(parsed):
            is_value = _is_in_a_group(override) and not override.is_sweep_override()
            if is_value and number >= first_settable:
                set_on_copy.append(override)
            else:
                composed.append(str(override.input_line))
        base = self._base(tuple(composed))
        # For `declared`: the words that choose groups or set Hydra's own keys.
        self._choices = tuple(str(override.input_line) for override in parsed if not _is_in_a_group(override))
        try:
            for override in set_on_copy:
                OmegaConf.update(base, str(override.key_or_group), override.value(), merge=True)
        except (OmegaConfBaseException, AssertionError):
            return self._load(words, RunMode.RUN)  # which raises Hydra's own error
        task = [str(override.input_line) for override in parsed if not override.is_hydra_override()]
        base.hydra.overrides.task = task
        if VERSION:  # from Hydra 1.4 on computed when it is read
            _set_override_dirname(base.hydra.job, task)
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
        # Hydra would write its notes (.hydra/) into the run's folder before the run has locked it, and everybody could
        # read them.
        no_notes = "hydra.output_subdir=null"
        others = [word for word in words if word != no_notes]
        return self._loader.load_configuration(self._name, [*others, no_notes], run_mode=mode)


def _is_in_a_group(override: Override) -> bool:
    """Report whether an override is about a key in a group, and neither about a group nor Hydra's own settings."""
    key = str(override.key_or_group)
    is_nested_key = "." in key and "/" not in key
    return is_nested_key and override.package is None and not override.is_hydra_override()


def _set_override_dirname(job: DictConfig, words: Sequence[str]) -> None:
    """Set what `${hydra.job.override_dirname}` stands for, as Hydra's ConfigLoader does.

    Args:
      job: the settings `hydra.job`.
      words: the words of the command line that are not about Hydra.
    """
    naming = job.config.override_dirname
    named = [word for word in words if word.lstrip("+").partition("=")[0] not in naming.exclude_keys]
    job.override_dirname = naming.item_sep.join(sorted(named)).replace("=", naming.kv_sep)


def keep_private(config: DictConfig) -> None:
    """Restrict the folder in which submitit pickles the jobs of a sweep to its owner: a job contains its config."""
    folder_setting = OmegaConf.select(config, "hydra.launcher.submitit_folder")
    if not folder_setting:
        return
    folder = Path(str(folder_setting).partition("%")[0])  # submitit replaces %j by the job's number
    # A folder of the user's that exists already keeps its mode. The default, .submitit, is in the sweep's folder.
    is_default_or_new = not folder.exists() or folder.name == ".submitit"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_default_or_new:
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
    if (package / "conf").is_dir():
        return "pkg://runner.conf"
    return str(package.parent / "conf")


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
        header, config = read_users_file(path)
        package = package_of(name, header)
        at = "" if package == "_global_" else f"{package}."
        for text in changed_keys.rename_in(config, at):
            _warn_once(f"{schema.as_shown(path)}: {text}")
        return ConfigResult(config=config, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header)


def package_of(name: str, header: Mapping[str, str | None]) -> str:
    """Return the key below which the keys of a config file stand; `_global_`: below none.

    Args:
      name: the file's name for Hydra, `train/default`.
      header: its header.
    """
    return header["package"] or name.rpartition("/")[0].replace("/", ".")


def read_users_file(path: Path) -> tuple[dict[str, str | None], DictConfig]:
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
        raise mistake_in_yaml(error) from error
    except RecursionError as error:
        raise Malformed(
            f"{file}: its values are nested without end: an anchor (&name) has itself (*name) below it, or there are "
            "too many brackets."
        ) from error
    except KeyValidationError as error:
        at = f" below {error.full_key}" if error.full_key else ""
        raise Malformed(f"{file}: a key{at} is not text ({first_line(error)}). Write it in quotes.") from error
    except OmegaConfBaseException as error:
        raise Malformed(f"{file}: {error.full_key}: {first_line(error)}.") from error
    except (OSError, ValueError, YAMLError) as error:
        raise Malformed(f"{file} cannot be read: {first_line(error)}.") from error
    if not isinstance(config, DictConfig):
        raise Malformed(f"{file} holds a list, and not keys with values.")
    _check_own_words(config, file)
    return header, config


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
        if not users.is_dir():
            return
        runners = Path(conf_path())
        is_runners = runners.is_dir() and users.samefile(runners)
        if not is_runners:
            search_path.prepend("your ./conf", f"conf://{users}")


def run_dir(command: str, given: str | None, new: str) -> str:
    """Return Hydra's run folder: model_dir for a command that trains; the other commands do not create a folder."""
    if command not in schema.TRAINING_RUNS or is_url(given):
        return "."
    return given or new


def job_dir(*, _root_: DictConfig) -> str:
    """Return the name of a job's folder in the folder of its sweep. Called as a resolver, with the config `_root_`."""
    tree: Any = {}
    for name in _root_:
        if name == "hydra":  # its settings contain this very folder
            continue
        value = _root_[name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        tree[name] = value
    if tree.get("command") == "dry_run":  # a dry run of a sweep lists the jobs, with the folders of its training jobs
        tree["command"] = "train_and_evaluate"
    reads_a_run = tree.get("command") not in schema.TRAINING_COMMANDS
    return job_id(tree, reads_a_run=reads_a_run)


def mistake_in_yaml(error: MarkedYAMLError) -> ConfigError:
    """Return the error of YAML as a mistake that names the file and the line."""
    mark = error.problem_mark or error.context_mark
    where = "a config file"
    if mark:
        where = f"{mark.name}, line {mark.line + 1}"
    return Malformed(f"{where}: {error.problem or error.context}.")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop."""
    return str(error).splitlines()[0].rstrip(".")
