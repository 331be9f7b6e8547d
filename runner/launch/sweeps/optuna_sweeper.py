"""`hydra/sweeper=optuna`: a sweep whose values Optuna suggests from the results of earlier jobs.

The study is in the folder of the sweep, so the same command resumes it. Interrupted and failed trials are run first,
with the same values and in the same folders. Only this module imports Optuna.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config import parsing
from runner.config.hydra import write_privately
from runner.config.metric_names import mode_of
from runner.config.mistakes import Conflict
from runner.config.schema import Config, ConfigError
from runner.config.settings.limits import as_typed
from runner.launch.sweeps.multirun import SEED, Multirun
from runner.launch.sweeps.ranking import JobResult
from runner.launch.sweeps.sweep import Sweep
from runner.system import console
from runner.system.redaction import mask_text
from runner.system.standard_streams import say
from runner.system.suggestions import did_you_mean
from runner.tracking.curves import save_figure
from runner.tracking.run_lock import alone_in
from runner.tracking.tracker import Point, describe

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


STUDY_FILE = "study.journal"
SAMPLERS = {
    "tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler", "gp": "GPSampler", "cmaes": "CmaEsSampler",
}  # fmt: skip
PRUNERS = {
    "none": "NopPruner", "median": "MedianPruner", "percentile": "PercentilePruner", "hyperband": "HyperbandPruner",
    "successive_halving": "SuccessiveHalvingPruner", "threshold": "ThresholdPruner",
}  # fmt: skip


_RANDOM_SAMPLERS = ("tpe", "random", "gp", "cmaes")
"""Samplers that draw each trial's values at random. The others (qmc) have one sequence, which the study continues."""


@dataclass(eq=False)
class _Group:
    """The jobs of a trial: one, or one for each of `sweep.seeds`.

    Attributes:
      trials: the trial, and others that got the same values before its jobs had ended.
      seeds: values of run.seed whose jobs are not started yet; None: the job has the seed of the config.
      running: number of jobs that run.
      has_ended_first_job: its first job has ended. The others wait for that, because they are not started if the first
        one is pruned.
      folders: names of the folders of the jobs that were started.
    """

    trials: list[Trial]
    seeds: list[int | None]
    running: int = 0
    has_ended_first_job: bool = False
    folders: list[str] = field(default_factory=list)

    @property
    def may_start_a_job(self) -> bool:
        if not self.seeds:
            return False
        is_first = not self.running
        return is_first or self.has_ended_first_job

    @property
    def is_over(self) -> bool:
        return not self.seeds and not self.running


_JobToStart = tuple[_Group, int | None]
"""A job to start: the jobs of its trial, and its seed."""
_RunningJobs = dict[Future[None], tuple[_Group, str]]
"""Future that completes when a job has ended -> the jobs of its trial, and the name of its folder."""


class OptunaSweeper(Sweeper):
    """Runs the jobs of `hydra.sweeper.n_trials` trials, `sweep.parallel` at a time, with the values that a study
    suggests. A trial is one job, or with `sweep.seeds` a job for each seed, and its result the mean of theirs.

    A launcher other than Hydra's basic one gets that many jobs at once, and none of them is pruned.
    """

    def __init__(self, multirun: Multirun) -> None:
        self._multirun = multirun
        self._next_job = 0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what Hydra has composed, and build the launcher."""
        self._context = hydra_context
        self._hydra = config.hydra
        self._master = config
        self.launcher: Any = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        self._is_basic = config.hydra.runtime.choices["hydra/launcher"] == "basic"

    def sweep(self, arguments: list[str]) -> None:
        """Run the remaining trials of the study.

        Raises:
          ConfigError: Optuna is not installed, no key varies, a setting is wrong, or the sweep is already running.
        """
        optuna = _import_optuna()
        settings = self._hydra.sweeper
        params = [f"{key}={value}" for key, value in settings.params.items()]
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        parsed = parser.parse_overrides([*params, *arguments])
        # The last override of a key counts: that of the command line, if the config has the key, too.
        overrides = {override.get_key_element(): override for override in parsed}
        self._fixed = []
        space = {}
        for key, override in overrides.items():
            if override.is_sweep_override():
                space[key] = _build_distribution(override)
            else:
                self._fixed.append(str(override.input_line))
        if not space:
            raise ConfigError(
                "hydra/sweeper=optuna: no key varies. Give a key values to choose from: "
                "'model.params.learning_rate=tag(log, interval(1e-4, 0.1))' or model.params.width=16,32."
            )
        config, directory = self._config_of_all()
        _check_seeds(config.sweep.seeds, overrides)
        self._seeds: list[int | None] = [None]
        if config.sweep.seeds is not None:
            self._seeds = [*config.sweep.seeds]
        if config.command == "dry_run":
            self._print_plan(space, config, directory)
            self._multirun.only_lists = True
            return
        metric = config.sweep.metric or "eval/loss"
        directory.mkdir(parents=True, exist_ok=True)
        with alone_in(directory, "sweep.dir"):  # before the sweep is opened, so that a wrong setting does not change it
            self._sampler_seed = config.run.seed if settings.seed is None else settings.seed
            study = _open_study(settings, directory, mode_of(metric, config.sweep.mode))
            self._set_sampler(study)
            study.pruner = _build("pruner", settings.pruner or "none", PRUNERS, settings.pruner_params, None)
            _note_version(study, optuna.__version__, settings)
        write_privately(directory / "multirun.yaml", self._master)
        sweep = self._multirun.open(directory, config)
        remaining = self._resume(study, sweep, settings.n_trials)
        self._multirun.total = settings.n_trials * len(self._seeds)
        try:
            self._run(study, sweep, space, remaining, config.sweep.parallel)
        finally:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            _draw(study, metric, directory)

    def _print_plan(self, space: Mapping[str, BaseDistribution], config: Config, directory: Path) -> None:
        """Print which values a sweep would try, and how many of them."""
        for key, distribution in space.items():
            print(f"{key}: {_describe(distribution)}")
        with_seeds = ""
        if config.sweep.seeds:
            with_seeds = f", each with run.seed={as_typed(config.sweep.seeds)}"
        n_trials = self._hydra.sweeper.n_trials
        print(f"{n_trials} trials{with_seeds} in {console.relative(directory)}", flush=True)

    def _config_of_all(self) -> tuple[Config, Path]:
        """Compose the part of the config that all jobs share, and return it with the sweep's folder."""
        # This must come first: values resolved from here on are cached for all jobs.
        directory = Path(str(self._hydra.sweep.dir)).absolute()
        composed = self._context.config_loader.load_sweep_config(self._master, self._fixed)
        keys = [str(key) for key in composed if key != "hydra"]
        tree: Any = OmegaConf.to_container(OmegaConf.masked_copy(composed, keys), resolve=True)
        return parsing.parse(tree), directory

    def _resume(self, study: Study, sweep: Sweep, n_trials: int) -> int:
        """Add the jobs of earlier starts to the sweep, and queue the trials that were interrupted or failed, or whose
        jobs lack one of the seeds of this start.

        Returns:
          The number of trials that are left.
        """
        from optuna.trial import TrialState

        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)  # its process was killed
        trials = study.get_trials(deepcopy=False)
        done = [trial for trial in trials if self._is_done(trial)]
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        folders = set()
        for trial in done:
            for job in _jobs_of(trial):
                sweep.add(job)
                folders.add(job.folder)
        self._next_job = len(folders)
        # A trial that runs again is a new one in the study, whose attribute "again" has its values.
        known_params: list[Any] = [trial.params for trial in done]
        known_params += [trial.user_attrs.get("again") for trial in waiting]
        num_remaining = max(n_trials - len(done), 0)
        num_to_queue = num_remaining - len(waiting)
        for trial in trials:
            has_ended = trial.state.is_finished() and bool(trial.params)
            if has_ended and trial.params not in known_params and num_to_queue > 0:
                study.enqueue_trial(trial.params, user_attrs={"again": trial.params})
                known_params.append(trial.params)
                num_to_queue -= 1
        if not num_remaining:
            more = f"hydra.sweeper.n_trials={2 * n_trials}"
            say(f"The study has finished its {len(done)} trials. To run more, set {more}.")
        return num_remaining

    def _is_done(self, trial: FrozenTrial) -> bool:
        """Report whether the result of a trial of an earlier start holds: it has one with all seeds of this start."""
        from optuna.trial import TrialState

        if trial.state != TrialState.COMPLETE:
            return trial.state == TrialState.PRUNED
        seeds = {job.seed for job in _jobs_of(trial)}
        return self._seeds == [None] or seeds.issuperset(self._seeds)

    def _run(
        self, study: Study, sweep: Sweep, space: Mapping[str, BaseDistribution], num_due: int, parallel: int
    ) -> None:
        """Ask for values, run the jobs with them and report their result to the study, `parallel` jobs at a time.

        choose the next jobs -> start them -> if all places are taken, wait until a job ends -> report ended trials

        Args:
          num_due: number of trials to ask for.
        """
        groups: list[_Group] = []
        running: _RunningJobs = {}
        while num_due or groups:
            if self._is_to_end(sweep):
                num_due = 0
                for group in groups:
                    group.seeds.clear()  # only the running jobs are waited for
            # The basic launcher takes one job at a time, so that the next may follow from how that one ends.
            max_at_once = 1 if self._is_basic else parallel
            jobs: list[_JobToStart] = []
            while len(jobs) < max_at_once and len(running) + len(jobs) < parallel:
                # The other seeds of trials that have begun come before new trials.
                startable = next((group for group in groups if group.may_start_a_job), None)
                if startable is not None:
                    jobs.append((startable, startable.seeds.pop(0)))
                    startable.running += 1
                elif num_due:
                    num_due -= 1
                    self._ask(study, space, sweep.directory, groups)
                else:
                    break
            self._start_jobs(sweep, jobs, running)
            may_start_more = bool(jobs) and len(running) < parallel
            if running and not may_start_more:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    group, folder = running.pop(future)
                    self._end_job(sweep, group, folder)
            self._tell_of_ended(study, sweep, groups)

    def _start_jobs(self, sweep: Sweep, jobs: Sequence[_JobToStart], running: _RunningJobs) -> None:
        """Start jobs, and add those to `running` that have not ended when this returns."""
        launched = self._launch(jobs)
        for (group, _), (future, folder) in zip(jobs, launched, strict=True):
            group.folders.append(folder)
            if future is None:
                self._end_job(sweep, group, folder)
            else:
                running[future] = group, folder

    def _is_to_end(self, sweep: Sweep) -> bool:
        """Report whether no further job is started."""
        command = self._multirun.command
        is_stopped = bool(command.stops.came) or command.error is not None
        return is_stopped or sweep.has_failed_too_often

    def _tell_of_ended(self, study: Study, sweep: Sweep, groups: list[_Group]) -> None:
        """Report the results of the trials whose jobs have ended, and remove them from `groups`."""
        ended = [group for group in groups if group.is_over]
        for group in ended:
            groups.remove(group)
            self._tell(study, sweep, group)

    def _ask(self, study: Study, space: Mapping[str, BaseDistribution], directory: Path, groups: list[_Group]) -> None:
        """Ask the study for the values of a trial, and add its jobs to `groups`.

        If jobs with the same values are in `groups`, the trial is added to these. If they have ended, their result is
        reported to the study.
        """
        if self._hydra.sweeper.sampler in _RANDOM_SAMPLERS:
            self._set_sampler(study)
        try:
            trial = study.ask(dict(space))
        except ValueError as error:
            raise ConfigError(
                f"the study in {console.relative(directory)} belongs to another sweep: {describe(error)}. Set another "
                "sweep.dir."
            ) from error
        for group in groups:
            if group.trials[0].params == trial.params:
                group.trials.append(trial)
                return
        if not self._take_known_result(study, trial):
            groups.append(_Group([trial], list(self._seeds)))

    def _set_sampler(self, study: Study) -> None:
        """Give the study the sampler for its next trial.

        The sampler's seed follows from the number of trials in the study, not from what this process has asked before.
        So a study whose process was killed goes on with the values that it would have had. Trials that run again do
        not count.
        """
        settings = self._hydra.sweeper
        seed = None
        if self._sampler_seed is not None:
            new = [trial for trial in study.get_trials(deepcopy=False) if "again" not in trial.user_attrs]
            seed = self._sampler_seed + len(new)
        study.sampler = _build("sampler", settings.sampler, SAMPLERS, settings.sampler_params, seed)

    def _take_known_result(self, study: Study, trial: Trial) -> bool:
        """If an earlier trial had the same values, report its result to the study instead of running equal jobs.

        Returns:
          Whether there was such a trial, so that `trial` has ended.
        """
        from optuna.trial import TrialState

        for earlier in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            if earlier.params == trial.params and self._is_done(earlier):
                # The jobs of the earlier trial say with which seeds the result was made.
                trial.set_user_attr("jobs", [asdict(job) for job in _jobs_of(earlier)])
                # Optuna refuses the value of a trial that was pruned.
                values = earlier.values if earlier.state == TrialState.COMPLETE else None
                study.tell(trial, values, state=earlier.state)
                return True
        return False

    def _launch(self, jobs: Sequence[_JobToStart]) -> list[tuple[Future[None] | None, str]]:
        """Run jobs, and return of each the future that completes when it has ended, or None if it has ended, and the
        name of its folder.
        """
        if not jobs:
            return []
        first = self._next_job
        self._next_job += len(jobs)
        overrides = []
        for group, seed in jobs:
            params = [f"{key}={value}" for key, value in group.trials[0].params.items()]
            if seed is not None:
                params.append(f"{SEED}={seed}")
            overrides.append([*self._fixed, *params])
        if self._is_basic:  # `jobs` is a single job
            group = jobs[0][0]
            if not group.folders:  # it is the first job of its trial, the only one that may be pruned
                self._multirun.judges[first] = _Judge(group.trials[0])
        launched = []
        for number, returned in enumerate(self.launcher.launch(overrides, initial_job_idx=first), first):
            of_job: Any = returned.hydra_cfg
            folder = Path(str(of_job.hydra.runtime.output_dir)).name
            launched.append((self._multirun.begun.get(number), folder))
        return launched

    def _end_job(self, sweep: Sweep, group: _Group, folder: str) -> None:
        """Note that a job has ended. If it has not finished, the other seeds of its trial are not started."""
        group.running -= 1
        group.has_ended_first_job = True
        job = sweep.result_in(folder)
        if job is None or job.status != "finished":
            # These jobs are not run, so the sweep has fewer.
            self._multirun.total = (self._multirun.total or 0) - len(group.seeds)
            group.seeds.clear()

    def _tell(self, study: Study, sweep: Sweep, group: _Group) -> None:
        """Report the result of a trial to the study: the mean of its jobs; none if one of them has no value."""
        from optuna.trial import TrialState

        jobs = []
        values = []
        for folder in group.folders:
            job = sweep.result_in(folder)
            if job is None:  # the job never ran
                continue
            jobs.append(job)
            if job.status == "finished" and job.value is not None:
                values.append(job.value)
        is_pruned = any(job.status == "pruned" for job in jobs)
        for trial in group.trials:
            if jobs:
                trial.set_user_attr("jobs", [asdict(job) for job in jobs])
            if len(values) == len(self._seeds):
                study.tell(trial, fmean(values))
            elif is_pruned:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, state=TrialState.FAIL)


def _jobs_of(trial: FrozenTrial) -> list[JobResult]:
    """Return the results of the jobs of a trial that has ended."""
    jobs = trial.user_attrs.get("jobs", [])
    only = trial.user_attrs.get("job")  # as an earlier version of the runner noted it: a trial had one job
    if only is not None:
        jobs = [only]
    return [JobResult(**job) for job in jobs]


def _check_seeds(seeds: Sequence[int] | None, overrides: Mapping[str, Override]) -> None:
    """Raise ConfigError if the sweep sets run.seed itself."""
    typed = overrides.get(SEED)
    if typed is None:
        return
    if seeds:
        raise Conflict(f"{typed.input_line} with sweep.seeds={as_typed(seeds)}, which are the values of run.seed.")
    if typed.is_sweep_override():
        raise Conflict(
            f"{typed.input_line} with hydra/sweeper=optuna, which would look for the best seed. To repeat each trial "
            "with several seeds and optimize the mean of its results, write sweep.seeds=[1,2,3]."
        )


class _Judge:
    """Receives the evaluations of a trial's job, and decides whether to stop it."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._last_step = -1

    def __call__(self, point: Point) -> bool:
        """Report whether to stop the job."""
        if point.step <= self._last_step:  # a resumed job repeats earlier reports
            return False
        self._last_step = point.step
        self._trial.report(point.value, point.step)
        return self._trial.should_prune()


def _import_optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError("hydra/sweeper=optuna needs Optuna: pip install 'estimator-runner[optuna]'") from error
    if int(optuna.__version__.partition(".")[0]) < 4:
        raise ConfigError(
            f"hydra/sweeper=optuna needs Optuna 4 or 5, but {optuna.__version__} is installed. If hydra-optuna-sweeper "
            "brought it: pip uninstall hydra-optuna-sweeper, pip install 'estimator-runner[optuna]'."
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open_study(settings: DictConfig, directory: Path, mode: str) -> Study:
    """Return the study of this sweep: a new one, or the one of an earlier start.

    Raises:
      ConfigError: its storage cannot be opened, or it optimizes in the other direction.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    direction: Any = "minimize" if mode == "min" else "maximize"
    storage: Any = settings.storage
    try:
        if storage is None:
            file = directory / STUDY_FILE
            _drop_torn_line(file)
            storage = JournalStorage(JournalFileBackend(str(file)))
        study = optuna.create_study(
            storage=storage, study_name=directory.name, direction=direction, load_if_exists=True
        )
    except Exception as error:
        where = str(directory / STUDY_FILE)
        if settings.storage:
            where = f"hydra.sweeper.storage={settings.storage}"
        raise ConfigError(f"{mask_text(where, ())}: cannot open the study: {describe(error)}") from error
    if study.direction.name.lower() != direction:
        raise ConfigError(
            f"sweep.metric and sweep.mode ask for the {mode}, but the study in {console.relative(directory)} was "
            f"started to {study.direction.name.lower()}. Set another sweep.dir, or the earlier sweep.mode."
        )
    return study


def _note_version(study: Study, version: str, settings: DictConfig) -> None:
    """Note in the study the version of Optuna that suggests values from here on, and print a message if its earlier
    trials are of another major version.
    """
    before = study.user_attrs.get("optuna")
    if before is None:
        # Before a study notes its version it has no trials, unless an earlier version of the runner made it.
        before = "an unknown version, 4 or 5" if study.get_trials(deepcopy=False) else version
    study.set_user_attr("optuna", version)
    if before.partition(".")[0] == version.partition(".")[0]:
        return
    # The defaults of TPESampler that Optuna 5 changed.
    changed = ("multivariate", "constant_liar")
    are_set = settings.sampler_params.keys() >= {*changed}
    hint = ""
    if settings.sampler == "tpe" and not are_set:
        as_before = " ".join(f"+hydra.sweeper.sampler_params.{key}=false" for key in changed)
        hint = f" tpe has other defaults in Optuna 5; for those of Optuna 4: {as_before}"
    say(f"The study goes on with Optuna {version}; its earlier trials were suggested by {before}.{hint}")


def _drop_torn_line(file: Path) -> None:
    """Remove a last line that a killed process did not finish: Optuna would read the next line as part of it."""
    if file.exists():
        with file.open("rb+") as opened:
            data = opened.read()
            opened.truncate(data.rfind(b"\n") + 1)


def _build(kind: str, name: str, known: Mapping[str, str], params: Mapping[str, Any], seed: int | None) -> Any:
    """Return the sampler or pruner `name`: one of `known`, or a class by its dotted name.

    Args:
      kind: "sampler" or "pruner".
      params: its arguments.
      seed: its argument `seed`, if it has one; None: none is passed.

    Raises:
      ConfigError: the name is unknown, or the class does not accept `params`.
    """
    key = f"hydra.sweeper.{kind}={name}"
    module, _, last = name.rpartition(".")
    if not module and name not in known:
        raise ConfigError(f"{key}: unknown.{did_you_mean(name, known)} Available: {', '.join(known)}.")
    if not module:
        module = f"optuna.{kind}s"
        last = known[name]
    try:
        factory = getattr(importlib.import_module(module), last)
        arguments = dict(params)
        if "seed" in inspect.signature(factory).parameters and seed is not None:
            arguments.setdefault("seed", seed)
        return factory(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        with_params = ""
        if params:
            with_params = f" with hydra.sweeper.{kind}_params={dict(params)}"
        raise ConfigError(f"{key}{with_params}: {describe(error)}") from error


def _build_distribution(override: Override) -> BaseDistribution:
    """Return the values among which an override lets a key vary.

    `interval(a, b)` is continuous, `int(interval(a, b))` integer. `range(a, b, step)` ends before b, as in a sweep
    without Optuna. `tag(log, ...)` samples on a logarithmic scale. Anything else is a choice among the listed values.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep: Any = override.value()
    is_log = "log" in getattr(sweep, "tags", ())
    try:
        if override.is_interval_sweep():
            is_whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
            if is_whole:
                return IntDistribution(sweep.start, sweep.end, log=is_log)
            return FloatDistribution(sweep.start, sweep.end, log=is_log)
        values = list(override.sweep_string_iterator())
        is_range = override.is_range_sweep() and len(values) > 1
        if not is_range:
            return CategoricalDistribution(values)
        numbers = sorted(float(value) for value in values)
        low = numbers[0]
        high = numbers[-1]
        # On a logarithmic scale Optuna accepts no step: 1 (of integers) and None (of floats) mean that there is none.
        is_whole = all(number.is_integer() for number in numbers) and isinstance(sweep.step, int)
        if is_whole:
            whole_step = 1 if is_log else abs(sweep.step)
            return IntDistribution(int(low), int(high), log=is_log, step=whole_step)
        step = None if is_log else abs(sweep.step)
        return FloatDistribution(low, high, log=is_log, step=step)
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: {error}") from error


def _describe(distribution: BaseDistribution) -> str:
    """Return the values that a key may have, as a dry run shows them."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return ", ".join(str(choice) for choice in choices)
    bounds: Any = distribution
    text = f"{bounds.low} to {bounds.high}"
    if bounds.step not in (None, 1):
        text += f", step {bounds.step}"
    if bounds.log:
        text += ", by orders of magnitude"
    return text


def _draw(study: Study, metric: str, directory: Path) -> None:
    """Draw the course of the study and the importance of its keys into the sweep's folder."""
    import warnings

    import matplotlib
    from optuna.trial import TrialState
    from optuna.visualization import matplotlib as pictures

    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < 2:
        return
    matplotlib.use("agg")  # Optuna draws with pyplot, which would open windows on a screen
    for name, plot in (
        ("optimization_history.png", pictures.plot_optimization_history),
        ("param_importances.png", pictures.plot_param_importances),
    ):
        try:
            # Optuna sets matplotlib's style globally. A metric or key between two dollar signs is a name, no formula.
            with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):
                warnings.simplefilter("ignore")  # silence the warning that its matplotlib pictures are experimental
                axes: Any = plot(study, target_name=metric)
                axes.figure.set_size_inches(9, 4.5)
                axes.figure.set_layout_engine("constrained")  # names of keys are wider than the figure's margin
                save_figure(axes.figure, directory / name)
                matplotlib.pyplot.close(axes.figure)
        except Exception as error:  # all trials have the same result or the same values
            say(f"{name} was not drawn: {describe(error)}")
