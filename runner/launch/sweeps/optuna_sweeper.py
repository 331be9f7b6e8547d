"""`hydra/sweeper=optuna`: a sweep whose values Optuna suggests from the results of earlier jobs.

The study is in the folder of the sweep, so the same command resumes it. Interrupted and failed trials are run first,
with the same values and in the same folders. Only this module imports Optuna.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from pathlib import Path
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
from runner.config.schema import Config, ConfigError
from runner.launch.sweeps.multirun import Multirun
from runner.launch.sweeps.sweep import JobResult, Sweep
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


STUDY_FILE = "study.journal"
SAMPLERS = {
    "tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler", "gp": "GPSampler", "cmaes": "CmaEsSampler",
}  # fmt: skip
PRUNERS = {
    "none": "NopPruner", "median": "MedianPruner", "percentile": "PercentilePruner", "hyperband": "HyperbandPruner",
    "successive_halving": "SuccessiveHalvingPruner", "threshold": "ThresholdPruner",
}  # fmt: skip


class OptunaSweeper(Sweeper):
    """Runs `hydra.sweeper.n_trials` jobs, `sweep.parallel` at a time, with the values that a study suggests.

    A launcher other than Hydra's basic one gets that many jobs at once, and none of them is pruned.
    """

    def __init__(self, multirun: Multirun) -> None:
        self._multirun = multirun
        self._next_job = 0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what Hydra has composed, and build the launcher."""
        self._context, self._hydra = hydra_context, config.hydra
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
        overrides = {each.get_key_element(): each for each in parser.parse_overrides([*params, *arguments])}
        self._fixed = [str(each.input_line) for each in overrides.values() if not each.is_sweep_override()]
        space = {key: _distribution(each) for key, each in overrides.items() if each.is_sweep_override()}
        if not space:
            raise ConfigError(
                "hydra/sweeper=optuna: no key varies. Give a key values to choose from: "
                "'model.params.learning_rate=tag(log, interval(1e-4, 0.1))' or model.params.width=16,32."
            )
        config, directory = self._config_of_all()
        if config.command == "dry_run":
            for key, each in space.items():
                print(f"{key}: {_described(each)}")
            print(f"{settings.n_trials} trials in {console.relative(directory)}", flush=True)
            self._multirun.only_lists = True
            return
        directory.mkdir(parents=True, exist_ok=True)
        with alone_in(directory, "sweep.dir"):  # before the sweep is opened, so that a wrong setting does not change it
            seed = config.run.seed if settings.seed is None else settings.seed
            study = _open_study(settings, directory, mode_of(config.sweep.metric or "eval/loss", config.sweep.mode))
            study.sampler = _build("sampler", settings.sampler, SAMPLERS, settings.sampler_params, study, seed)
            study.pruner = _build("pruner", settings.pruner or "none", PRUNERS, settings.pruner_params, study, seed)
            _note_version(study, optuna.__version__, settings)
        write_privately(directory / "multirun.yaml", self._master)
        sweep = self._multirun.open(directory, config)
        remaining = self._take_up(study, sweep, settings.n_trials)
        self._multirun.total = settings.n_trials
        try:
            self._run(study, sweep, space, remaining, config.sweep.parallel)
        finally:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            _draw(study, config.sweep.metric or "eval/loss", directory)

    def _config_of_all(self) -> tuple[Config, Path]:
        """Compose the part of the config that all jobs share, and return it with the sweep's folder."""
        # This must come first: values resolved from here on are cached for all jobs.
        directory = Path(str(self._hydra.sweep.dir)).absolute()
        composed = self._context.config_loader.load_sweep_config(self._master, self._fixed)
        tree: Any = OmegaConf.to_container(
            OmegaConf.masked_copy(composed, [str(k) for k in composed if k != "hydra"]), resolve=True
        )
        return parsing.parse(tree), directory

    def _take_up(self, study: Study, sweep: Sweep, n_trials: int) -> int:
        """Add the jobs of earlier starts to the study, and queue those that were interrupted or failed.

        Returns:
          The number of trials that are left.
        """
        from optuna.trial import TrialState

        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)  # its process was killed
        trials = study.get_trials(deepcopy=False)
        done = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        for trial in done:
            job = trial.user_attrs.get("job")
            if job is not None:
                sweep.add(JobResult(**job))
        self._next_job = len(done)
        tried: list[Any] = [trial.params for trial in done]
        tried += [trial.user_attrs.get("again") for trial in trials if trial.state == TrialState.WAITING]
        remaining = max(n_trials - len(done), 0)
        room = remaining - sum(trial.state == TrialState.WAITING for trial in trials)
        for trial in trials:
            if trial.state == TrialState.FAIL and trial.params not in tried and trial.params and room > 0:
                study.enqueue_trial(trial.params, user_attrs={"again": trial.params})
                tried.append(trial.params)
                room -= 1
        if not remaining:
            more = f"hydra.sweeper.n_trials={2 * n_trials}"
            say(f"The study has finished its {len(done)} trials. To run more, set {more}.")
        return remaining

    def _run(self, study: Study, sweep: Sweep, space: Mapping[str, BaseDistribution], due: int, parallel: int) -> None:
        """Ask for values, run a job with them and report its result to the study, `parallel` at a time."""
        running: dict[Future[None], list[tuple[Trial, str]]] = {}
        while due or running:
            is_stopped = self._multirun.command.stops.came or self._multirun.command.error is not None
            if is_stopped or sweep.has_failed_too_often:
                due = 0
            trials: list[Trial] = []
            while due and len(running) + len(trials) < parallel:
                due -= 1
                trial = self._ask(study, space, sweep.directory)
                twin = next((same for same in running.values() if same[0][0].params == trial.params), None)
                if twin is not None:
                    twin.append((trial, twin[0][1]))
                elif not self._is_known(study, trial):
                    trials.append(trial)
                    if self._is_basic:
                        break
            for trial, future, folder in self._launch(trials):
                if future is None:
                    _tell(study, trial, sweep.result_in(folder))
                else:
                    running[future] = [(trial, folder)]
            if due and len(running) < parallel:
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                for trial, folder in running.pop(future):
                    _tell(study, trial, sweep.result_in(folder))

    def _ask(self, study: Study, space: Mapping[str, BaseDistribution], directory: Path) -> Trial:
        try:
            return study.ask(dict(space))
        except ValueError as error:
            raise ConfigError(
                f"the study in {console.relative(directory)} belongs to another sweep: {describe(error)}. Set another "
                "sweep.dir."
            ) from error

    def _is_known(self, study: Study, trial: Trial) -> bool:
        """If an earlier trial had the same values, report its result to the study instead of running an equal job.

        Returns:
          Whether there was such a trial.
        """
        from optuna.trial import TrialState

        for earlier in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            if earlier.params == trial.params:
                values = earlier.values if earlier.state == TrialState.COMPLETE else None
                study.tell(trial, values, state=earlier.state)
                return True
        return False

    def _launch(self, trials: Sequence[Trial]) -> list[tuple[Trial, Future[None] | None, str]]:
        """Run a job for each trial, and return (trial, future that completes when the job has ended, or None if it has
        ended, name of its folder).
        """
        if not trials:
            return []
        first = self._next_job
        self._next_job += len(trials)
        if self._is_basic:
            self._multirun.judges[first] = _Judge(trials[0])
        jobs = [[*self._fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
        launched = []
        all_returned = self.launcher.launch(jobs, initial_job_idx=first)
        for number, (trial, returned) in enumerate(zip(trials, all_returned, strict=True), first):
            of_job: Any = returned.hydra_cfg
            folder = Path(str(of_job.hydra.runtime.output_dir)).name
            launched.append((trial, self._multirun.begun.get(number), folder))
        return launched


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


def _tell(study: Study, trial: Trial, job: JobResult | None) -> None:
    """Report a job's result to the study; None: the job never ran."""
    from optuna.trial import TrialState

    if job is not None:
        trial.set_user_attr("job", asdict(job))
    if job is not None and job.status == "finished" and job.value is not None:
        study.tell(trial, job.value)
    else:
        is_pruned = job is not None and job.status == "pruned"
        study.tell(trial, state=TrialState.PRUNED if is_pruned else TrialState.FAIL)


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
        where = f"hydra.sweeper.storage={settings.storage}" if settings.storage else str(directory / STUDY_FILE)
        raise ConfigError(f"{mask_text(where, ())}: cannot open the study: {describe(error)}") from error
    if study.direction.name.lower() != direction:
        raise ConfigError(
            f"sweep.metric and sweep.mode ask for the {mode}, but the study in {console.relative(directory)} was "
            f"started to {study.direction.name.lower()}. Set another sweep.dir, or the earlier sweep.mode."
        )
    return study


def _note_version(study: Study, version: str, settings: DictConfig) -> None:
    """Note in the study which Optuna suggests from here on, and say if another one has done so until here."""
    before = study.user_attrs.get(
        "optuna", "an unknown version, 4 or 5" if study.get_trials(deepcopy=False) else version
    )
    study.set_user_attr("optuna", version)
    if before.partition(".")[0] == version.partition(".")[0]:
        return
    # The defaults of TPESampler that Optuna 5 changed.
    old = ("multivariate", "constant_liar")
    is_other = settings.sampler == "tpe" and not settings.sampler_params.keys() >= {*old}
    as_before = " ".join(f"+hydra.sweeper.sampler_params.{key}=false" for key in old)
    hint = f" tpe has other defaults in Optuna 5; for those of Optuna 4: {as_before}" if is_other else ""
    say(f"The study goes on with Optuna {version}; its earlier trials were suggested by {before}.{hint}")


def _drop_torn_line(file: Path) -> None:
    """Remove a last line that a killed process did not finish: Optuna would read the next line as part of it."""
    if file.exists():
        with file.open("rb+") as opened:
            data = opened.read()
            opened.truncate(data.rfind(b"\n") + 1)


def _build(
    kind: str, name: str, known: Mapping[str, str], params: Mapping[str, Any], study: Study, seed: int | None
) -> Any:
    """Return the sampler or pruner `name`: one of `known`, or a class by its dotted name.

    A start that resumes a study gets another seed, because the same one would suggest the same values again.

    Raises:
      ConfigError: the name is unknown, or the class does not accept `params`.
    """
    key = f"hydra.sweeper.{kind}={name}"
    module, _, last = name.rpartition(".")
    if not module and name not in known:
        raise ConfigError(f"{key}: unknown.{did_you_mean(name, known)} Available: {', '.join(known)}.")
    try:
        factory = getattr(importlib.import_module(module or f"optuna.{kind}s"), last if module else known[name])
        arguments = dict(params)
        if "seed" in inspect.signature(factory).parameters and seed is not None:
            arguments.setdefault("seed", seed + len(study.get_trials(deepcopy=False)))
        return factory(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        shown = f" with hydra.sweeper.{kind}_params={dict(params)}" if params else ""
        raise ConfigError(f"{key}{shown}: {describe(error)}") from error


def _distribution(override: Override) -> BaseDistribution:
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
            return (IntDistribution if is_whole else FloatDistribution)(sweep.start, sweep.end, log=is_log)
        values = list(override.sweep_string_iterator())
        if override.is_range_sweep() and len(values) > 1:
            numbers = sorted(map(float, values))
            if all(value.is_integer() for value in numbers) and isinstance(sweep.step, int):
                step = 1 if is_log else abs(sweep.step)
                return IntDistribution(int(numbers[0]), int(numbers[-1]), log=is_log, step=step)
            return FloatDistribution(numbers[0], numbers[-1], log=is_log, step=None if is_log else abs(sweep.step))
        return CategoricalDistribution(values)
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: {error}") from error


def _described(distribution: BaseDistribution) -> str:
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return ", ".join(map(str, choices))
    bounds: Any = distribution
    step = f", step {bounds.step}" if bounds.step not in (None, 1) else ""
    return f"{bounds.low} to {bounds.high}{step}{', by orders of magnitude' if bounds.log else ''}"


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
