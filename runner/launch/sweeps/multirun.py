"""The jobs of a sweep, one after the other or several at a time, each under its own supervisor."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config import parsing
from runner.config.hydra import RefusedJob
from runner.config.metric_names import is_of_evaluation
from runner.config.mistakes import NotAllowed
from runner.config.schema import Config, ConfigError
from runner.config.settings.limits import as_typed
from runner.launch import supervisor
from runner.launch.command import Command
from runner.launch.environment.gpus import visible_gpus
from runner.launch.stop_requests import Stoppable, StopRequests
from runner.launch.sweeps.devices import DevicePool
from runner.launch.sweeps.ranking import JobResult, rounded
from runner.launch.sweeps.sweep import NOT_STARTED, Sweep
from runner.launch.task_starter import TaskStarter, build_starter
from runner.remote.mirror import url_or_path
from runner.system import console
from runner.system.exit_codes import CODES, FAILED, FINISHED, INTERRUPTED, USER_ERROR
from runner.system.redaction import NO_LIST, SecretList, masked_override
from runner.system.standard_streams import LATER_JOB, say
from runner.system.start_status import START_STATUS
from runner.tracking.journal import journals_in, read_journal
from runner.tracking.run_end import how_run_ended
from runner.tracking.shipping import Shipping
from runner.tracking.tracker import Point, points_of

SEED = "run.seed"


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.

    Attributes:
      number: number of the job, from 0, in the order of the sweep.
      name: the values that vary in the sweep, for display.
      settings: the same with all digits, without the seed.
      settings_id: what the job has in common with those that repeat it.
      argv: the job's own command line, for the record.
      notes: notes on how the job's config was composed, as in `supervisor.run`.
    """

    number: int
    name: str
    settings: str
    settings_id: str
    config: Config
    argv: Sequence[str]
    notes: Mapping[str, str]

    @property
    def folder(self) -> Path:
        return Path(str(self.config.model_dir))

    @property
    def not_started(self) -> JobResult:
        """Return the result that the job has before it is started."""
        return JobResult(
            self.name,
            self.folder.name,
            NOT_STARTED,
            settings=self.settings,
            settings_id=self.settings_id,
            seed=self.config.run.seed,
        )


class Multirun:
    """All jobs of one command, run in the process in which Hydra's basic launcher calls them.

    Any other launcher runs each job in a process of its own, with its own Multirun. These Multiruns share
    `command.start` and the sweep's folder.

    Attributes:
      total: number of jobs of the sweep; None: not known.
      judges: number of a job -> function that is called with the job's evaluations while it runs, and returns whether
        to stop it.
      only_lists: list the jobs without running them.
      begun: number of a job -> future that completes when the job has ended, if several run at a time.
      has_run_elsewhere: a launcher has run a job of this start in another process.
    """

    def __init__(self, command: Command) -> None:
        self.total: int | None = None
        self.judges: dict[int, Callable[[Point], bool]] = {}
        self.begun: dict[int, Future[None]] = {}
        self.only_lists = False
        self.has_run_elsewhere = False
        self.command = command
        self._sweep: Sweep | None = None
        self._starter: TaskStarter | None = None
        self._refused: list[RefusedJob] = []
        self._env_of_next_job: Mapping[str, str] = command.env
        self._pool: ThreadPoolExecutor | None = None
        self._devices: DevicePool | None = None
        self._has_said_that_jobs_see_all_gpus = False

    def run(self, job: SweepJob, directory: Path, choices: Mapping[str, str]) -> float | None:
        """Run a job of the sweep in `directory`, or start it while others still run.

        Args:
          job: the job.
          directory: the folder of the sweep.
          choices: the launcher and sweeper that Hydra uses.

        Returns:
          The job's metric, for a sweeper that optimizes; None if there is none yet.

        Raises:
          ConfigError: the sweep is already running, or `sweep.parallel` is used with a launcher or sweeper that does
            not support it.
        """
        launcher = choices.get("hydra/launcher")
        sweeper = choices.get("hydra/sweeper")
        parallel = _jobs_at_a_time(job.config, launcher, sweeper)
        _check_seeds(job.config, sweeper)
        sweep = self.open(directory, job.config)
        if not self.command.is_copy:  # otherwise this process runs a single job
            if self._starter is None:
                self._starter = build_starter(job.config, 1, is_sweep=True)
            if self._devices is None:
                self._devices = DevicePool.of_sweep(job.config.sweep, visible_gpus(self.command.env))
        if parallel == 1:
            self._run_job(sweep, job, "")
            result = sweep.result_in(job.folder.name)
            return None if result is None else result.value
        START_STATUS.stop()  # each job prints its own lines
        if self._pool is None:
            self._pool = ThreadPoolExecutor(parallel, "job")
        self.begun[job.number] = self._pool.submit(self._run_job, sweep, job, f"[{job.name}] ")
        return None

    def list_job(self, number: int, name: str, folder: Path) -> None:
        """Print that the sweep would run a job, and how it ended if it was run before."""
        status = how_run_ended(folder).status or NOT_STARTED
        print(f"{self._title(number, name)} ({status}, {url_or_path(folder)})", flush=True)

    def _title(self, number: int, name: str) -> str:
        if self.total:
            return f"job {number + 1}/{self.total}: {name}"
        return f"job {number + 1}: {name}"

    def refuse(self, job: RefusedJob) -> None:
        """Record a job that is not run, because its config is wrong."""
        self._refused.append(job)
        self.command.add_exit_code(USER_ERROR)

    def end(self, directory: Path, *, failed: bool) -> None:
        """Wait for the running jobs, rank all jobs and close the sweep.

        Args:
          directory: the folder of the sweep.
          failed: something other than a job failed.
        """
        if self._pool is not None:
            self._pool.shutdown()
        if self._starter is not None:
            self._starter.close()
        failed = failed or any(begun.exception() for begun in self.begun.values())
        sweep = self._sweep or self._open_of_others(directory)
        if sweep is not None:
            for job in self._refused:
                never_started = JobResult(job.name, job.folder.name, NOT_STARTED)
                sweep.add(sweep.result_of(never_started, job.reason))
            sweep.end(stops=self.command.stops.came, failed=failed, total=self.total)
        if self.command.stops.came:
            self.command.add_exit_code(INTERRUPTED)
        # Last, because it raises the error with which a job ended.
        for begun in self.begun.values():
            begun.result()

    def open(self, directory: Path, config: Config) -> Sweep:
        """Return the sweep in `directory`. The first call opens it: it notes the start and locks the folder.

        Raises:
          ConfigError: it is already running.
        """
        if self._sweep is None:
            self._sweep = Sweep(directory, config, self.command)
        return self._sweep

    def _open_of_others(self, directory: Path) -> Sweep | None:
        """Open a sweep whose jobs ran in other processes, so that this process can close it, and add their exit codes
        to the command.

        Returns:
          The sweep; None if no job ran: configs in the folder are then of an earlier start.
        """
        configs = sorted(directory.glob("*/config.yaml"))
        if not self.has_run_elsewhere or not configs:
            return None
        # Any job's config will do: the sweep takes its settings of `sweep` and `tracking`, which all jobs share.
        sweep = self.open(directory, parsing.load(configs[0]))
        for result in sweep.results:
            self.command.add_exit_code(CODES.get(result.status, FAILED))
        return sweep

    def _run_job(self, sweep: Sweep, job: SweepJob, prefix: str) -> None:
        """Run a job whose turn has come, unless it has finished or is not to start any more, and add its result.

        Args:
          prefix: as in `RunContext`.
        """
        command = self.command
        judge = self.judges.pop(job.number, None)
        if command.stops.came:
            return
        title = self._title(job.number, job.name)
        if how_run_ended(job.folder).status == "finished":
            say(f"{title} already finished, skipped")
            sweep.add(sweep.result_of(job.not_started))
            return
        if sweep.has_failed_too_often:
            say(f"{title} not started: sweep.max_failed={job.config.sweep.max_failed} jobs have failed")
            sweep.add(sweep.left_out(job.not_started))
            return
        say(title)
        shipping: Shipping | None = sweep.shipping
        stops: StopRequests | None = command.stops
        if command.is_copy:
            # The job has this process for itself: it ships its journals, and handles the signals.
            shipping = None
            stops = None
        elif judge is not None:
            stops = JudgedJob(command.stops, job, judge)
        context = supervisor.RunContext(
            name=job.name,
            parent=sweep.directory,
            prefix=prefix,
            starter=self._starter,
            shipping=shipping,
            settings=job.settings,
            settings_id=job.settings_id,
        )
        # The jobs after the first do not repeat what is true of all jobs.
        env = self._env_of_next_job
        self._env_of_next_job = {**command.env, LATER_JOB: "1"}
        try:
            with self._devices_for(job).lent() as variables:
                of_job = {**env, **variables}
                outcome = supervisor.run(job.config, of_job, job.argv, stops=stops, context=context, notes=job.notes)
            code = outcome.code
            result = sweep.result_of(job.not_started)
        except ConfigError as error:
            code = USER_ERROR
            result = sweep.result_of(job.not_started, command.say(error))
        if isinstance(stops, JudgedJob) and stops.pruned_by is not None:
            point = stops.pruned_by
            # It may have finished before it was stopped, or the command's own signal may have stopped it.
            was_pruned = result.status == "interrupted" and not stops.came
            if was_pruned:
                say(f"{prefix}pruned: {point.name} was {console.format_number(point.value)} at step {point.step}")
                result.status = "pruned"
                code = FINISHED
        command.add_exit_code(code)
        sweep.add(result)

    def _devices_for(self, job: SweepJob) -> DevicePool:
        """Return the GPUs from which a job gets its own."""
        if self._devices is None:
            return DevicePool()
        strategy = job.config.strategy
        chooses_itself = strategy.devices is not None or strategy.num_gpus is not None
        is_automatic = job.config.sweep.devices_per_job == "auto"
        if chooses_itself and is_automatic and self._devices.is_divided:
            if not self._has_said_that_jobs_see_all_gpus:
                say("Jobs that set strategy.devices or strategy.num_gpus see all GPUs (sweep.devices_per_job=auto).")
            self._has_said_that_jobs_see_all_gpus = True
            return DevicePool()
        return self._devices


def _jobs_at_a_time(config: Config, launcher: str | None, sweeper: str | None) -> int:
    """Return how many jobs of a sweep this process runs at a time.

    Raises:
      ConfigError: `sweep.parallel` is used with a launcher or sweeper that does not support it.
    """
    parallel = config.sweep.parallel
    if sweeper == "optuna" and launcher != "basic":  # the sweeper passes sweep.parallel jobs to it at once
        return 1
    can_be_parallel = launcher == "basic" and sweeper in ("basic", "optuna")
    if parallel > 1 and not can_be_parallel:
        raise ConfigError(
            f"sweep.parallel={parallel} works with Hydra's basic launcher and the sweepers basic and optuna. "
            "Other launchers have their own setting, such as hydra.launcher.n_jobs."
        )
    return parallel


def _check_seeds(config: Config, sweeper: str | None) -> None:
    """Raise NotAllowed if `sweep.seeds` is used with another sweeper than Optuna's."""
    if config.sweep.seeds and sweeper != "optuna":
        seeds = as_typed(config.sweep.seeds)
        raise NotAllowed(
            f"sweep.seeds={seeds} is for hydra/sweeper=optuna. Instead, write "
            f"run.seed={seeds[1:-1]}: the jobs that differ only in it are ranked by their mean."
        )


class JudgedJob(StopRequests):
    """Passes stop requests to one job of a sweep: the signals of the command, and the requests of a judge that reads
    the job's evaluations.

    Attributes:
      pruned_by: the value because of which the job was stopped; None: it was not.
    """

    PERIOD_SECS = 0.5

    def __init__(self, command: StopRequests, job: SweepJob, judge: Callable[[Point], bool]) -> None:
        super().__init__()
        self.came = command.came
        self.pruned_by: Point | None = None
        self._command = command
        self._judge = judge
        self._folder = job.folder
        self._metric = job.config.sweep.metric
        self._offsets: dict[Path, int] = {}

    @property
    def may_go_on(self) -> bool:
        """Whether the job, if it is stopped, is meant to be resumed: not after it was pruned."""
        return self.pruned_by is None or bool(self.came)

    @contextmanager
    def watch(self, process: Stoppable, answer: str) -> Iterator[None]:
        """Pass the command's stop requests to `process`, and stop it when the judge prunes the job."""
        is_over = threading.Event()
        judging = threading.Thread(target=self._judge_until, args=(is_over, process), daemon=True, name="judge")
        with self._command.watch(process, answer):
            judging.start()
            try:
                yield
            finally:
                is_over.set()
                judging.join()

    def _judge_until(self, is_over: threading.Event, process: Stoppable) -> None:
        """Show new evaluations to the judge, and stop the job if it is pruned. Runs in a thread until `is_over`."""
        while not is_over.wait(self.PERIOD_SECS):
            for point in self._new_points():
                if self._judge(point):
                    self.pruned_by = point
                    process.ask_to_stop()
                    return

    def _new_points(self) -> Iterator[Point]:
        """Yield the results of evaluations since the last call."""
        for path in journals_in(self._folder):
            lines, self._offsets[path] = read_journal(path, self._offsets.get(path, 0))
            for line in lines:
                for point in points_of(line):
                    # sweep.metric=null: the metric is the loss of the evaluation that comes first.
                    if self._metric is None and _is_loss_of_evaluation(point.name):
                        self._metric = point.name
                    if point.name == self._metric:
                        yield point


def _is_loss_of_evaluation(metric: str) -> bool:
    return is_of_evaluation(metric) and metric.endswith("/loss")


def name_of_job(
    argv: Sequence[str], overrides: Sequence[str], swept: Iterable[str] = (), listed: SecretList = NO_LIST
) -> str:
    """Return the values that vary between the jobs of a sweep, without secrets: `learning_rate=0.1, strategy=mirrored`.

    Args:
      argv: command line of the sweep.
      overrides: overrides of the job.
      swept: keys that are not varied on the command line (`hydra.sweeper.params`).
      listed: what the config of the job lists as secret.
    """
    values = _values_of_job(argv, overrides, swept, listed)
    return rounded(", ".join(values.values())) or "defaults"


def settings_of_job(
    argv: Sequence[str], overrides: Sequence[str], swept: Iterable[str] = (), listed: SecretList = NO_LIST
) -> str:
    """Return what `name_of_job` returns, with all digits and without the seed."""
    values = _values_of_job(argv, overrides, swept, listed)
    values.pop(SEED, None)
    return ", ".join(values.values()) or "all seeds"


def _values_of_job(
    argv: Sequence[str], overrides: Sequence[str], swept: Iterable[str], listed: SecretList
) -> dict[str, str]:
    """Return key -> `learning_rate=0.1` of each key that varies; of all keys of the job if none does."""
    varying = _varying_keys(tuple(argv), frozenset(swept))
    # A key is shown by its last word, unless the last word of another one is the same.
    last_words = [key.rpartition(".")[2] for key in varying]
    values = {}
    for text in overrides:
        key, _, value = masked_override(text, listed).lstrip("+").partition("=")
        if not varying or key in varying:
            shown_key = key.rpartition(".")[2]
            if last_words.count(shown_key) > 1:
                shown_key = key
            values[key] = f"{shown_key}={value}"
    return values


@functools.lru_cache(maxsize=1)  # all jobs of a sweep ask the same, and a command line may be long
def _varying_keys(argv: tuple[str, ...], swept: frozenset[str]) -> frozenset[str]:
    """Return the keys that vary between the jobs of a sweep; arguments as of `name_of_job`."""
    typed = [text for text in argv if "=" in text and not text.startswith("-")]
    parsed: list[Any] = OverridesParser.create().parse_overrides(typed)
    keys = [override.key_or_group for override in parsed if override.is_sweep_override()]
    return swept.union(keys)
