"""The command line: Hydra composes the config, this module checks it and hands it to the supervisor.

Never imports TensorFlow or MLflow: `--help`, `--cfg job` and every mistake in the config are answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import secrets
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from runner import config as configs
from runner import parsing, user_code
from runner.config import Config, ConfigError
from runner.user_code import UserCodeError

FULL_ERROR = "HYDRA_FULL_ERROR"
USER_ERROR = 2


def main() -> None:
    """Runs the command line and exits with its code."""
    sys.exit(run_command_line())


def run_command_line() -> int:
    """Runs what sys.argv says. The exit code: the worst of the runs it started, 2 when there was nothing to start."""
    user_code.add_to_path(Path.cwd())
    configs.register_schema()
    OmegaConf.register_new_resolver("new_name", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("run_dir", lambda given, new: given or new, replace=True)
    codes: list[int] = []
    env = dict(os.environ)
    # Hydra otherwise prints what went wrong in its own words and exits with 1; so it raises, and we say it.
    os.environ[FULL_ERROR] = "1"
    try:
        _compose_and(lambda composed: codes.append(_run(composed, env)))
    except (ConfigError, UserCodeError, HydraException, OmegaConfBaseException) as error:
        _say(error, env)
        return USER_ERROR
    finally:
        if FULL_ERROR not in env:
            del os.environ[FULL_ERROR]
    return max(codes, default=0)


def _compose_and(call: Callable[[DictConfig], None]) -> None:
    """Lets Hydra compose the config of each job and make its directory, then calls `call` with it.

    Raises:
      ConfigError: what Hydra says with an exception of no type of its own. What `call` raises passes.
    """
    called = False

    def job(composed: DictConfig) -> None:
        nonlocal called
        called = True
        call(composed)

    try:
        hydra.main(version_base="1.3", config_path=_conf_path(), config_name="runner")(job)()
    except OSError as error:
        if called or isinstance(error, HydraException):
            raise
        raise ConfigError(f"cannot make the output directory: {error}. Choose another model_dir.") from error
    except ValueError as error:
        if called or not str(error).startswith("Config group override"):
            raise
        raise ConfigError(f"{error}. A group takes the name of one of its files: strategy=mirrored.") from error


def _run(composed: DictConfig, env: dict[str, str]) -> int:
    """One job: checks the composed config and runs it under a supervisor."""
    job = HydraConfig.get()
    directory = Path(job.runtime.output_dir)
    try:
        config = _checked(composed, directory, is_sweep=job.mode == RunMode.MULTIRUN)
        from runner import supervisor

        return supervisor.run(config, env, ["runner", *job.overrides.task])
    except (ConfigError, UserCodeError, OmegaConfBaseException) as error:
        # Said here, not raised: Hydra would add a line of its own, and end a sweep whose other jobs are fine.
        _remove_if_unused(directory)
        _say(error, env)
        return USER_ERROR


def _say(error: Exception, env: Mapping[str, str]) -> None:
    """One message on stderr; with HYDRA_FULL_ERROR=1 also where it came from."""
    if env.get(FULL_ERROR) == "1":
        traceback.print_exception(error)
    print(f"runner: {_in_words(error, sys.argv[1:])}", file=sys.stderr)


def _checked(composed: DictConfig, directory: Path, *, is_sweep: bool) -> Config:
    tree: Any = OmegaConf.to_container(composed, resolve=True)
    config = parsing.parse(tree)
    if config.model_dir and is_sweep:
        raise ConfigError(
            f"model_dir={config.model_dir} with --multirun: the runs would overwrite each other. Leave it out."
        )
    for key, name, default in config.functions():
        user_code.locate(key, name, default)
    return dataclasses.replace(config, model_dir=str(Path(config.model_dir or directory).absolute()))


def _conf_path() -> str:
    """Where our `conf/` is: packed as `runner.conf` in an installed wheel, beside the package in a checkout."""
    here = Path(__file__).parent
    return "pkg://runner.conf" if (here / "conf").is_dir() else str(here.parent / "conf")


def _remove_if_unused(directory: Path) -> None:
    """Takes away the output directory that Hydra made for a run that never started."""
    if directory.is_dir() and {entry.name for entry in directory.iterdir()} <= {".hydra"}:
        shutil.rmtree(directory)


def _in_words(error: Exception, argv: Sequence[str]) -> str:
    """What a failed composition means to the person who typed `argv`."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {error.message.splitlines()[0]}"
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
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return f"{error} ({str(cause).splitlines()[0]})"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'config'}: {str(error).splitlines()[0]}"
    text = str(error) or str(cause)
    return text.strip().replace("\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "")


def _missing_option(error: MissingConfigException) -> str:
    """`strategy=mirored`: names the option, the nearest and all that exist."""
    missing, options = str(error.missing_cfg_file or ""), list(error.options or ())
    group, _, name = missing.rpartition("/")
    if not options:
        return str(error).strip().splitlines()[0]
    close = difflib.get_close_matches(name, options, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
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
