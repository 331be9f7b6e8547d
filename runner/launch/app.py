"""The command line: Hydra composes the config of each job, this module checks it, and a supervisor runs it.

This module never imports TensorFlow or MLflow, so `--help`, `--cfg job` and every mistake in the config are answered at
once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, configure_log, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.config import changed_keys, model_source, parsing, saved_config, schema, strategy_validation, user_code
from runner.config.hydra import (
    INFORMATION,
    OPTUNA,
    VERSION,
    Composer,
    RefusedJob,
    conf_path,
    config_flags,
    keep_private,
    prepare,
    read_flags,
    write_privately,
)
from runner.config.hydra_mistakes import (
    check_composed,
    check_declared_params,
    check_groups,
    file_with,
    groups_without_option,
    misfit_typed,
)
from runner.config.job_id import settings_id
from runner.config.mistakes import ConfigError, Conflict, NoEffect, NotAllowed, NotSet
from runner.config.schema import Config
from runner.distribute import cluster_resolver, managed_jobs
from runner.launch import secret_keys
from runner.launch.command import Command, say_error
from runner.launch.stop_requests import StopRequests
from runner.system.exit_codes import FAILED, FINISHED, INTERRUPTED, USER_ERROR
from runner.system.redaction import SecretList, also_hide, extend_secrets, mask_text, secrets_of_overrides
from runner.system.secret_names import LIST
from runner.system.standard_streams import FULL_ERROR, one_object, say
from runner.system.start_status import START_STATUS
from runner.system.urls import is_url

if TYPE_CHECKING:
    from runner.launch.sweeps.multirun import Multirun
    from runner.launch.task_starter import TaskStarter

MISTAKES = (ConfigError, OmegaConfBaseException, YAMLError)
"""Errors that are reported as one message, without a traceback."""


def run_command_line() -> int:
    """Run the command in sys.argv, and return the exit code: the worst of its runs, 2 if nothing could start."""
    env = dict(os.environ)
    try:
        user_code.add_to_path(Path.cwd())
    except FileNotFoundError:
        say("runner: the current directory does not exist any more. Change to another one.")
        return USER_ERROR
    words = sys.argv[1:]
    try:
        with command_of(words) as command:
            return command.run()
    except (HydraException, *MISTAKES, OSError) as error:
        with one_object("run.output=json" in words) as answer:
            answer["status"] = "failed"
            answer["error"] = say_error(error, env)
        if isinstance(error, (HydraException, *MISTAKES)):
            return USER_ERROR
        return FAILED  # another OSError is no mistake: such as a full disk under the folder of a sweep
    except Exception as error:  # a bug of the runner: show the traceback, without secrets
        trace = "".join(traceback.format_exception(error))
        say(mask_text(trace.rstrip("\n"), secrets_of_overrides(words)))
        return FAILED


@contextlib.contextmanager
def command_of(words: Sequence[str], starter: TaskStarter | None = None) -> Iterator[CommandLine]:
    """Yield the command for the words of a command line, in a process that is prepared for Hydra.

    Args:
      words: the words.
      starter: starts the tasks of its run; None: the run has its own.

    Raises:
      ConfigError: a word cannot be read.
    """
    env = dict(os.environ)
    argv = sys.argv
    # Secrets are taken from the words as typed, because Hydra may report an error before there is a config.
    names = []
    for word in words:
        names += _secrets_named_in(word)
    extend_secrets(names)
    # With this variable Hydra raises its errors, and the runner reports them. Without it Hydra prints and exits with 1.
    os.environ[FULL_ERROR] = "1"
    try:
        arguments, flags = read_flags(words)
        arguments.overrides = changed_keys.rename_overrides(arguments.overrides)
        typed = [*flags, *arguments.overrides]  # argparse expects flags first
        sys.argv = [argv[0], *typed]
        with StopRequests() as stops:
            yield CommandLine(Command(typed, env, stops, starter), arguments)
    finally:
        sys.argv = argv
        if FULL_ERROR not in env:
            del os.environ[FULL_ERROR]


class CommandLine:
    """One command: a run, or the jobs of a sweep.

    If Hydra uses a launcher other than its basic one, that launcher pickles this object for the process of each job.

    Attributes:
      command: what its jobs share.
      model_dir: folder of the run that was started last; None: no run was started.
    """

    def __init__(self, command: Command, arguments: Any = None) -> None:
        self.command = command
        self._arguments = arguments
        self.model_dir: Path | None = None
        self._runs_jobs_here = True
        self._has_begun_a_job = False  # Hydra has called `run_job`: later errors are not of composing
        self._sweep_dir = ""
        self._composer: Composer | None = None  # as in the process of another launcher
        self._sweeper: Any = None

    def __reduce__(self) -> Any:
        return CommandLine, (self.command,)

    def run(self) -> int:
        """Compose and run all jobs, and return the worst of their exit codes.

        Raises:
          HydraException, ConfigError: the config of a job cannot be composed.
        """
        failed = True  # until all jobs have run: the sweep is closed also after an error
        try:
            self._compose()
            failed = False
        finally:
            if self._sweep_dir and self.multirun.only_lists:
                _remove_if_unused(Path(self._sweep_dir), Path.cwd(), "multirun.yaml")
                if self.command.stops.came:
                    self.command.add_exit_code(INTERRUPTED)
            elif self._sweep_dir:
                self.multirun.end(Path(self._sweep_dir).absolute(), failed=failed)
                from runner.remote.mirror import close_all

                are_incomplete = close_all(self.command.stops.came)
                if are_incomplete:  # as after an interruption, the same command sends what the buckets lack
                    self.command.add_exit_code(INTERRUPTED)
        return self.command.code

    def run_job(self, composed: DictConfig) -> float | RefusedJob | Exception | None:
        """Check the composed config of a job, and run the job under a supervisor.

        Returns:
          The metric that a sweeper optimizes, if there is one.
        """
        self._has_begun_a_job = True
        if self.command.error is not None:  # the sweep failed in an earlier job, so no further job is run
            return None
        try:
            is_run = HydraConfig.get().mode == RunMode.RUN
            wants_object = is_run and OmegaConf.select(composed, "run.output") == "json"
            with one_object(wants_object) as self.answer:
                return self._run_job(composed)
        except Exception as error:  # not raised, because Hydra would print the overrides, with their secrets
            if self.command.is_copy:  # `_launch_jobs` raises it, in the process of the command
                return error
            self.command.error = error
            return None

    def _run_job(self, composed: DictConfig) -> float | RefusedJob | None:
        """As `run_job`. A mistake in the config of the job is printed; a job of a sweep is then refused, and the sweep
        goes on.
        """
        hydra_config = HydraConfig.get()
        directory = Path(hydra_config.runtime.output_dir)
        is_sweep = hydra_config.mode == RunMode.MULTIRUN
        overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
        notes = {  # in Hydra's format; Hydra itself would write them before the folder is locked
            "config.yaml": OmegaConf.to_yaml(composed),
            "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra_config})),
            "overrides.yaml": OmegaConf.to_yaml(hydra_config.overrides.task),
        }
        # What the record has of the command line, and a line that resumes or repeats the run.
        argv = ["runner", *config_flags(self.command.argv), *overrides]
        secrets = secret_keys.listed_in(composed, self.command.env)
        listed = SecretList.of(secrets, self.command.env)
        also_hide(listed)  # from here on, messages of the command
        name = ""
        settings = ""
        if is_sweep:
            self._count_jobs(composed)
            name, settings = self._varied_in(composed, overrides, listed)
        declared = None
        if self._composer is not None:
            declared = self._composer.declared
        try:
            job = ComposedJob(composed, directory, overrides, self.command.env, declared, secrets, is_sweep)
            config = _check_job(job, hydra_config)
            if is_sweep and config.command in schema.TRAINING_RUNS:
                from runner.launch.sweeps.multirun import SweepJob

                number = hydra_config.job.num
                sweep_job = SweepJob(number, name, settings, settings_id(composed), config, argv, notes)
                return self.multirun.run(
                    sweep_job, Path(hydra_config.sweep.dir).absolute(), hydra_config.runtime.choices
                )
            if is_sweep and config.command == "dry_run":
                self.multirun.list_job(hydra_config.job.num, name, directory)
                _remove_if_unused(directory, Path(hydra_config.runtime.cwd))
            elif config.command in schema.ENVIRONMENT_COMMANDS:
                self._answer_of_environment(config, is_sweep=is_sweep)
            else:
                self._run_alone(config, argv, notes, settings_id(composed))
        except MISTAKES as error:
            # The error is reported here and not raised: Hydra would add a line of its own, and end a sweep whose other
            # jobs are correct.
            _remove_if_unused(directory, Path(hydra_config.runtime.cwd))
            reason = self.command.say(error)
            self.command.add_exit_code(USER_ERROR)
            self.answer |= {"status": "failed", "error": reason}
            if is_sweep:
                refused = RefusedJob(directory, name, reason)
                if self.command.is_copy:  # the process of the command records it, in `_launch_jobs`
                    return refused
                self.multirun.refuse(refused)
        return None

    def _count_jobs(self, composed: DictConfig) -> None:
        """Tell the sweep how many jobs it has, and whether it only lists them, once the first has been composed."""
        self.multirun.only_lists = composed.get("command") == "dry_run"
        if self.multirun.total:
            return
        # Hydra's own sweeper has a list of the jobs' overrides for each launch. Optuna's sets `total` itself.
        batches = getattr(self._sweeper, "overrides", None) or ()
        number = sum(len(batch) for batch in batches)
        self.multirun.total = number or None

    def _varied_in(self, composed: DictConfig, overrides: Sequence[str], listed: SecretList) -> tuple[str, str]:
        """Return a job's name in its sweep, and its settings, as in `SweepJob`."""
        from runner.launch.sweeps.multirun import SEED, name_of_job, settings_of_job

        varied = [text for text in overrides if text != "command=dry_run"]
        # Keys that vary because of the config; `name_of_job` finds those of the command line.
        keys_of_sweeper = {*(HydraConfig.get().sweeper.get("params") or ())}
        if OmegaConf.select(composed, "sweep.seeds"):  # Optuna's sweeper sets run.seed
            keys_of_sweeper.add(SEED)
        name = name_of_job(self.command.argv, varied, keys_of_sweeper, listed)
        settings = settings_of_job(self.command.argv, varied, keys_of_sweeper, listed)
        return name, settings

    def _answer_of_environment(self, config: Config, *, is_sweep: bool) -> None:
        """Run a command that needs no run."""
        START_STATUS.stop()
        self.answer |= _show_environment(config, self.command.env, is_sweep=is_sweep)
        code = FINISHED
        if not self.answer.get("can_start", True):  # of doctor
            code = FAILED
        self.command.add_exit_code(code)

    def _run_alone(self, config: Config, argv: Sequence[str], notes: Mapping[str, str], settings: str) -> None:
        """Run a job that belongs to no sweep.

        Args:
          argv, notes: as in `supervisor.run`.
          settings: its `settings_id`.
        """
        from runner.launch import supervisor

        self.model_dir = None
        if config.model_dir:
            self.model_dir = Path(config.model_dir)
        outcome = supervisor.run(
            config,
            self.command.env,
            argv,
            stops=self.command.stops,
            context=supervisor.RunContext(starter=self.command.starter, settings_id=settings),
            notes=notes,
        )
        self.command.mistake = outcome.error or ""
        self.answer |= {"status": outcome.status, "error": outcome.error, **outcome.facts.get("answer", {})}
        self.command.add_exit_code(outcome.code)

    @functools.cached_property
    def multirun(self) -> Multirun:
        """The jobs of this command, which is a sweep."""
        from runner.launch.sweeps.multirun import Multirun

        return Multirun(self.command)

    def _compose(self) -> None:
        """Compose the config of each job, make its folder and call `run_job`."""
        given = self._arguments
        check_groups(self.command.argv)
        prepare()
        sets_subdir = any(word.lstrip("+~").startswith("hydra.output_subdir") for word in given.overrides)
        if sets_subdir:
            raise NoEffect("hydra.output_subdir has no effect: the runner writes to .hydra in model_dir.")
        try:
            wants_information = any(getattr(given, name, None) for name in INFORMATION)
            if wants_information:
                self._print_information()
                return
            self._composer = Composer(given.config_path, given.config_name, given.config_dir)
            config = self._composer.compose(given.overrides, is_sweep=given.multirun)
            check_composed(config, self.command.argv)
            folders = list(_overrides_of_folders(config, self.command.env))
            if folders:  # composed once more, as if they had been typed
                config = self._composer.compose([*given.overrides, *folders], is_sweep=given.multirun)
            self._launch(config)
            if self.command.error is not None:
                raise self.command.error
        except (OSError, AssertionError, ValueError, RecursionError) as error:
            if self._has_begun_a_job or isinstance(error, (HydraException, *MISTAKES)):
                raise
            mistake = _mistake_behind(error, self.command.argv)
            if not mistake:
                raise
            raise ConfigError(mistake) from error

    def _print_information(self) -> None:
        """Let Hydra print what a flag asks for (`--cfg job`, `--info config`), without secrets."""
        given = self._arguments
        sys.argv.append("hydra.output_subdir=null")
        print_all = hydra.main(**VERSION, config_path=conf_path(), config_name="runner")(self.run_job)
        shows_config = given.cfg is not None or given.info is not None or given.help
        if not shows_config:
            print_all()
            return
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                print_all()
        finally:  # Hydra may end the process
            text = printed.getvalue()
            if text:
                sys.stdout.write(self._masked_information(text))

    def _masked_information(self, printed: str) -> str:
        """Return what Hydra has printed, with secrets masked."""
        given = self._arguments
        try:
            # Hydra does not hand out the config that it has printed.
            composer = Composer(given.config_path, given.config_name, given.config_dir)
            composed = composer.compose(given.overrides, is_sweep=False)
        except HydraException:  # of `--info searchpath`, which needs no config
            composed = OmegaConf.create()
        config = secret_keys.PrintedConfig(composed, self.command.env, given.overrides)
        if given.cfg is None:
            return config.masked_text(printed)
        return config.masked_yaml(printed, given.package)

    def _launch(self, config: DictConfig) -> None:
        """Run the one job of `config`, or its sweep, in the order of Hydra's own `main`."""
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        callbacks = Callbacks(config)
        context = HydraContext(config_loader=self._composer, callbacks=callbacks)  # type: ignore[arg-type]
        if config.hydra.mode == RunMode.RUN:
            callbacks.on_run_start(config=config, config_name="runner")
            job = run_job(self.run_job, config, "hydra.run.dir", None, context)
            callbacks.on_run_end(config=config, config_name="runner", job_return=job)
            return
        callbacks.on_multirun_start(config=config, config_name="runner")
        keep_private(config)  # before a sweeper builds its launcher
        launcher_name = config.hydra.runtime.choices["hydra/launcher"]
        self._runs_jobs_here = launcher_name == "basic"
        if not self._runs_jobs_here:  # its jobs run in processes without a progress line
            START_STATUS.update(f"jobs run under hydra/launcher={launcher_name}")
        settings: Any = {"hydra_context": context, "task_function": self.run_job, "config": config}
        target = str(config.hydra.sweeper._target_)
        if target == OPTUNA:  # no plugin in `hydra_plugins`: every Hydra app on the machine would import it
            from runner.launch.sweeps.optuna_sweeper import OptunaSweeper

            self._sweeper = OptunaSweeper(self.multirun)
            self._sweeper.setup(**settings)
        elif "optuna" in target:
            raise NotAllowed(
                f"hydra.sweeper._target_={target} belongs to hydra-optuna-sweeper, which needs optuna<3 and "
                "always minimizes. Use hydra/sweeper=optuna instead: pip uninstall hydra-optuna-sweeper, "
                "pip install 'estimator-runner[optuna]'."
            )
        else:
            if self._runs_jobs_here:  # another one sends the composer to its processes
                context.config_loader = UntilStopped(self._composer, self.command.stops)  # type: ignore[assignment]
            write_privately(Path(config.hydra.sweep.dir) / "multirun.yaml", config)  # a sweeper writes over it
            self._sweeper = Plugins.instance().instantiate_sweeper(**settings)
        launch_jobs = functools.partial(self._launch_jobs, self._sweeper.launcher)
        self._sweeper.launcher = SimpleNamespace(launch=launch_jobs)
        self._sweep_dir = str(config.hydra.sweep.dir)
        arguments = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        with contextlib.suppress(SweepStopped):
            self._sweeper.sweep(arguments=arguments)
        callbacks.on_multirun_end(config=config, config_name="runner")

    def _launch_jobs(self, launcher: Any, *arguments: Any, **settings: Any) -> Sequence[JobReturn]:
        """Let Hydra's launcher run jobs, and take note of those that failed or were refused in other processes.

        Raises:
          Exception: the error with which a job ended.
        """
        jobs: Sequence[JobReturn] = launcher.launch(*arguments, **settings)
        for job in jobs:
            returned = job.return_value
            if isinstance(returned, Exception):
                raise returned
            if isinstance(returned, RefusedJob):
                self.multirun.refuse(returned)
                job.return_value = None
            elif not self._runs_jobs_here:
                self.multirun.has_run_elsewhere = True
        return jobs


def _mistake_behind(error: Exception, argv: Sequence[str]) -> str:
    """Return in words the user's mistake in a command line that made Hydra or OmegaConf raise an error of another kind
    than MISTAKES; '': it was no mistake, but a bug.
    """
    command = " ".join(argv)
    if isinstance(error, OSError):
        return f"cannot make the output directory: {error}. Choose another model_dir."
    if isinstance(error, RecursionError):  # Hydra follows the defaults of files without an end
        return (
            f"cannot compose {command}: the defaults of a file lead back to this file, "
            "directly or over other files. Remove one of the entries."
        )
    if str(error).startswith("Unexpected type"):  # an AssertionError of OmegaConf 2.3
        return f"cannot compose {command}: a key is set below a key that is null."
    if isinstance(error, AssertionError):
        return ""
    if str(error).startswith("Config group override"):
        typed = " ".join(groups_without_option(argv))
        return f"{typed}: {error}. A group takes the name of one of its files: strategy=mirrored."
    # Other ValueErrors: of a word whose error names no key, or of flags that cannot be combined, such as --resolve
    # alone.
    return str(misfit_typed(argv) or f"{error}.")


class SweepStopped(Exception):
    """A stop request came before the next job of a sweep was composed."""


class UntilStopped:
    """Composes the jobs of a sweep until a stop request comes: Hydra itself goes through all of them, twice.

    Args:
      composer: composes them.
      stops: the stop requests of the command.
    """

    def __init__(self, composer: Any, stops: StopRequests) -> None:
        self._composer = composer
        self._stops = stops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._composer, name)

    def load_sweep_config(self, *arguments: Any, **settings: Any) -> DictConfig:
        """Return the config of the next job.

        Raises:
          SweepStopped: a stop request has come.
        """
        if self._stops.came:
            raise SweepStopped
        config: DictConfig = self._composer.load_sweep_config(*arguments, **settings)
        return config


def _show_environment(config: Config, env: Mapping[str, str], *, is_sweep: bool) -> dict[str, Any]:
    """Run a command that needs no run (command=best, new, doctor, cluster_info), and return what it found.

    Raises:
      ConfigError: the command is not possible.
    """
    from runner.launch.environment import best_runs, cluster_info, diff_runs, doctor, list_runs, new_project, report

    for command, what in (("new", "writes one project"), ("doctor", "checks one machine")):
        if is_sweep and config.command == command:
            raise Conflict(f"command={command} with --multirun: it {what}. Remove --multirun.")
    show: Mapping[str, Callable[[Config, Mapping[str, str]], dict[str, Any]]] = {
        "list": list_runs.show,
        "best": best_runs.show,
        "diff": diff_runs.show,
        "report": report.show,
        "cluster_info": cluster_info.show,
        "doctor": doctor.show,
        "new": new_project.show,
    }
    return show[config.command](config, env)


def _overrides_of_folders(config: DictConfig, env: Mapping[str, str]) -> Iterator[str]:
    """Yield overrides for the folders of the command that the config leaves open, and begin to send those of a sweep
    in an object store.

    Raises:
      ConfigError: the folder of a sweep cannot be there, or another sweep is running there.
    """
    is_sweep = config.hydra.mode == RunMode.MULTIRUN
    chosen = {}
    for key, folder in _offered_folders(config, env, is_sweep=is_sweep).items():
        if OmegaConf.select(config, key) is None:
            chosen[key] = folder
            yield f"{key}='{folder}'"
    if not is_sweep:
        return
    sweep_dir = chosen.get("sweep.dir", config.sweep.dir)
    if is_url(sweep_dir):
        folder = _begin_sweep_in_store(config, sweep_dir, env)
        yield f"hydra.sweep.dir='{folder}'"


def _offered_folders(config: DictConfig, env: Mapping[str, str], *, is_sweep: bool) -> dict[str, str]:
    """Return key -> the folder that whoever started this process wants it to use."""
    if config.command in schema.ENVIRONMENT_COMMANDS:
        return {}
    folders = {key: folder for key, (folder, _) in managed_jobs.folders(env).items()}
    if not is_sweep:
        return folders
    if "model_dir" not in folders:
        return {}
    return {"sweep.dir": folders["model_dir"]}  # each job has its exports in its folder


def _begin_sweep_in_store(config: DictConfig, url: str, env: Mapping[str, str]) -> str:
    """Return the local folder of a sweep in an object store; unless it is only listed, its sending begins.

    Raises:
      ConfigError: the launcher runs jobs in other processes, or another sweep is running there.
    """
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    if launcher != "basic":
        raise Conflict(
            f"sweep.dir={url} with hydra/launcher={launcher}: one process sends what all jobs write. Use "
            "hydra/launcher=basic with sweep.parallel, or a shared folder."
        )
    from runner.remote.mirror import local_folder, mirror_of

    folder = local_folder("sweep.dir=", url, config.run.local_dir)
    if config.command != "dry_run":
        mirror_of(Path(folder)).begin(env, config.run)
    return folder


def _secrets_named_in(word: str) -> list[str]:
    """Return the names that an override of `run.secrets` lists."""
    key, _, value = word.lstrip("+").partition("=")
    if key != "run.secrets":
        return []
    return [name.strip(" '\"") for name in value.strip(" []").split(",")]


@dataclasses.dataclass(frozen=True)
class ComposedJob:
    """A job as Hydra composed it, before it is checked.

    Attributes:
      composed: its config.
      directory: the folder of the run, if model_dir is not set.
      overrides: the overrides of the job.
      env: environment of the command.
      declared: `composed` before the command line changed its values; None: not known.
      secrets: what `composed` lists as secret, and the keys of what it took from there.
      is_sweep: the job belongs to a sweep.
    """

    composed: DictConfig
    directory: Path
    overrides: Sequence[str]
    env: Mapping[str, str]
    declared: Mapping[str, Any] | None
    secrets: Sequence[str]
    is_sweep: bool


def _check_job(job: ComposedJob, hydra_config: Any) -> Config:
    """Return the checked config of a job, with its model_dir.

    Raises:
      ConfigError, UserCodeError: a mistake in the config, or a function that does not exist.
    """
    if hydra_config.job.chdir:
        raise NotAllowed(
            "hydra.job.chdir=true is not supported, because a run stays in the directory where it was started. "
            "Remove it."
        )
    try:
        return _build_config(job)
    except ConfigError as error:
        file = None
        if error.key:
            file = file_with(error.key, hydra_config.runtime.choices)
        if file is None or not job.declared:
            raise
        # The file is named only if the value is the one that it declares: the command line may have set another.
        is_of_file = OmegaConf.select(job.composed, error.key) == schema.value_at(job.declared, error.key)
        if not is_of_file:
            raise
        raise type(error)(f"{file}: {error}") from error


def _build_config(job: ComposedJob) -> Config:
    """As `_check_job`; a message does not name the file that has the mistake."""
    given: Any = OmegaConf.to_container(job.composed, resolve=True)
    values = _with_local_folder(job, given)
    saved = _config_of_run(values)
    config = _parse(job, values, saved)
    _check_params(job, values, saved, config)
    if job.is_sweep:
        _check_sweep(config)
    _check_functions(config)
    # After the functions, whose files it reads.
    config = _with_source_of_model(job, config)
    # Before model_dir gets its default: tasks of other hosts need one that the user has set.
    _check_cluster(job, config, given.get("model_dir"))
    return dataclasses.replace(config, model_dir=_model_dir_of(job, config))


def _with_local_folder(job: ComposedJob, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config with the local folder of a model_dir that is a URL."""
    url: Any = given.get("model_dir")
    if not is_url(url) or given.get("command") in schema.ENVIRONMENT_COMMANDS:
        return given
    from runner.remote.mirror import local_folder

    folder = local_folder("model_dir=", url, OmegaConf.select(job.composed, "run.local_dir"))
    return {**given, "model_dir": folder}


def _config_of_run(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config that the run in model_dir has saved, for a command that reads this run; else None."""
    model_dir = values.get("model_dir")
    reads_a_run = values.get("command") not in (*schema.TRAINING_COMMANDS, *schema.ENVIRONMENT_COMMANDS)
    if not model_dir or not reads_a_run:
        return None
    return saved_config.read_saved(Path(model_dir))


def _parse(job: ComposedJob, values: Mapping[str, Any], saved: Mapping[str, Any] | None) -> Config:
    """Return the config of `values`, or the saved one of the run with what the command line changes in it.

    Raises:
      ConfigError: a value is not allowed.
    """
    if saved is None:
        return parsing.parse(_with_secrets(job, values, {}))
    changed = saved_config.changed_by(saved, values, job.overrides)
    try:
        return parsing.parse(_with_secrets(job, changed, saved))
    except ConfigError as error:
        where = f"in the config of {values['model_dir']}, changed by the command line"
        raise type(error)(f"{error} ({where})") from error


def _with_secrets(job: ComposedJob, chosen: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values `chosen` with further entries in run.secrets: those of the job and of the saved config. Invalid
    values are returned as they are, and reported when they are parsed.
    """
    run_settings = chosen.get("run")
    if not isinstance(run_settings, dict):
        return chosen
    listed = run_settings.get("secrets")
    if not isinstance(listed, list | None):
        return chosen
    already_listed = listed or []
    # What was secret in the config of the run stays secret, whatever this command lists.
    listed_in_run = secret_keys.entries_of(schema.value_at(saved, LIST))
    added = dict.fromkeys([*listed_in_run, *job.secrets])
    further = [entry for entry in added if entry not in already_listed]
    if not further:
        return chosen
    return {**chosen, "run": {**run_settings, "secrets": [*already_listed, *further]}}


def _check_params(job: ComposedJob, values: Mapping[str, Any], saved: Mapping[str, Any] | None, config: Config) -> None:
    """Check that the params on the command line are declared: by the saved config, if the command reads a run."""
    if job.declared is None:
        return
    if saved is None:
        check_declared_params(job.overrides, job.declared, values)
        return
    # Of the command line only the chosen groups, such as model=mnist, declare params.
    groups = [text for text in job.overrides if "." not in text.partition("=")[0]]
    declared = saved_config.changed_by(saved, job.declared, groups)
    check_declared_params(job.overrides, declared, schema.to_tree(config))


def _check_sweep(config: Config) -> None:
    """Raise ConfigError for settings that the jobs of a sweep cannot have."""
    if config.run.output == "json":
        raise Conflict("run.output=json with --multirun: a sweep has many results; sweep.json has them all. Remove it.")
    if config.run.inline:
        raise Conflict(
            "run.inline=true with --multirun: TensorFlow can be configured only once per process. Remove "
            "run.inline=true."
        )
    if config.model_dir and config.command in schema.TRAINING_RUNS:
        raise Conflict(f"model_dir={config.model_dir} with --multirun: all jobs would write to this folder. Remove it.")


def _check_functions(config: Config) -> None:
    """Raise UserCodeError if a function or class that the config names does not exist."""
    named = list(config.functions())
    for function in named:  # its config key, dotted name and default
        if not config.run.inline:
            hint = " Or compute the run in the notebook's own process: run.inline=true."
            user_code.check_importable(*function, hint)
        user_code.locate(*function)
    if not named:  # such a command is not tracked
        return
    for tracker in config.tracking.classes():
        user_code.check_importable(*tracker)  # a tracker has a process of its own, also with run.inline
        user_code.locate(*tracker)


def _with_source_of_model(job: ComposedJob, config: Config) -> Config:
    """Return the config with what the source of its model decides, and say why."""
    config, why = model_source.resolved(config, job.env)
    if why and config.run.progress != "off" and not job.is_sweep:
        say(why)
    return config


def _check_cluster(job: ComposedJob, config: Config, model_dir: Any) -> None:
    """Check that the cluster of this process, or the one that the command starts, can run the job.

    Args:
      job: the job.
      config: its config.
      model_dir: its model_dir as the user gave it, which may be a URL.

    Raises:
      ConfigError: it cannot.
    """
    has_cluster = config.command in schema.CLUSTER_COMMANDS
    has_tpu = config.strategy.name == "tpu" and config.command != "inspect"
    if not has_cluster and not has_tpu:
        return
    found = cluster_resolver.detect(job.env, config.cluster, config.strategy)
    if found.has_others:
        _check_shared(config, found, model_dir, is_sweep=job.is_sweep)
        strategy_validation.check_batch_divides(config, found.cluster.num_workers, found.why)
        strategy_validation.check_min_workers(config, why=found.why)
        return
    strategy_validation.check_batch_divides(config, config.cluster.num_workers)
    expects_kubernetes = config.cluster.service and config.cluster.resolver == "auto"
    if expects_kubernetes and config.is_cluster:
        say(f"All tasks start on this host: {found.why}")


def _model_dir_of(job: ComposedJob, config: Config) -> str | None:
    """Return the folder of the run, absolute; None if the command has none."""
    if config.model_dir:
        folder = config.model_dir
    elif config.command in schema.TRAINING_RUNS:
        folder = str(job.directory)
    else:
        return None
    if is_url(folder):  # cluster_info shows a URL and does not open it
        return folder
    return str(Path(folder).absolute())


def _check_shared(config: Config, found: cluster_resolver.Detected, url: Any, *, is_sweep: bool) -> None:
    """Raise ConfigError for settings that processes of a cluster cannot share if they were started from outside."""
    if is_sweep:
        raise Conflict(
            f"--multirun in a cluster ({found.why}) is not possible: the processes could not be kept at the same job. "
            "Start one cluster per job, or set cluster.resolver=local."
        )
    others_use_files = config.strategy.name != "multi_worker" or found.has_evaluator
    if is_url(url) and others_use_files:
        raise NotAllowed(
            f"model_dir={url}: this process is {found.cluster.name} of a cluster ({found.why}). Servers and evaluators "
            f"write and read the files of a checkpoint themselves, so strategy={config.strategy.name} needs a folder "
            "on shared storage as its model_dir here; strategy=multi_worker without an evaluator does not."
        )
    if is_url(config.export.dir) and found.has_evaluator:
        raise NotAllowed(f"export.dir={config.export.dir}: the evaluator, on another host, cannot export there.")
    # On SageMaker each host has a folder for checkpoints of its own.
    is_in_checkpoints = f"{config.model_dir}/".startswith(f"{managed_jobs.CHECKPOINTS}/")
    is_folder_of_this_host = found.source == "sagemaker" and is_in_checkpoints
    if not config.model_dir or is_folder_of_this_host:
        raise NotSet(
            f"model_dir is not set to a shared folder, and this process is {found.cluster.name} of a cluster "
            f"({found.why}), whose tasks share one. Set the same model_dir for all of them: s3://..., gs://... or "
            "az://..., or a folder on shared storage."
        )


def _remove_if_unused(directory: Path, cwd: Path, *notes: str) -> None:
    """Remove the folder that Hydra created in `cwd` for a run or a sweep that did not start.

    Args:
      directory: the folder.
      cwd: the directory of the command.
      notes: files that Hydra may have written into the folder.
    """
    if directory == cwd:
        return
    with contextlib.suppress(OSError):  # the folder is not empty, or another task of the cluster has removed it
        names = {entry.name for entry in directory.iterdir()}
        if names <= {*notes}:
            for note in notes:
                (directory / note).unlink(missing_ok=True)
        directory.rmdir()
