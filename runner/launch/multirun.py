"""The jobs of a sweep, one after the other or some at a time, each under a supervisor of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config import parsing
from runner.config.schema import Config, ConfigError
from runner.launch import supervisor
from runner.launch.sweep import Sweep
from runner.system.redaction import masked_override
from runner.system.standard_streams import say
from runner.system.start_status import START_STATUS
from runner.tracking.exit_codes import CODES, FAILED, FINISHED, INTERRUPTED, USER_ERROR
from runner.tracking.run_record import RunRecord

if TYPE_CHECKING:
    from runner.launch.app import CommandLine


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.

    Attributes:
      number: from 0, in the order of the sweep.
      name: what varied.
      argv: its own command line, for the record.
      notes: of how its config was composed, as of `supervisor.run`.
    """

    number: int
    name: str
    config: Config
    argv: Sequence[str]
    notes: Mapping[str, str]

    @property
    def folder(self) -> Path:
        return Path(str(self.config.model_dir))


class Multirun:
    """All jobs of one command, in the process that Hydra's basic launcher runs them in.

    Another launcher runs each job in a process of its own, which has an object of its own. What they have in common is
    `command.start` and the sweep's folder.

    Attributes:
      code: the worst exit code of the jobs so far.
    """

    def __init__(self, command: CommandLine) -> None:
        self.code = FINISHED
        self._command = command
        self._sweep: Sweep | None = None
        self._refused: list[tuple[Path, str, str]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[float | None]] = []

    def run(self, job: SweepJob, directory: Path, choices: Mapping[str, str]) -> float | None:
        """Runs `job` of the sweep in `directory`, or lets it run beside others.

        Args:
          choices: which launcher and sweeper Hydra uses.

        Returns: its metric, for a sweeper that optimises; None where there is none (yet).
        Raises:
          ConfigError: the sweep is running already; `sweep.parallel` with another launcher or sweeper than Hydra's own.
        """
        parallel = job.config.sweep.parallel
        if parallel > 1 and {choices.get("hydra/launcher"), choices.get("hydra/sweeper")} != {"basic"}:
            raise ConfigError(
                f"sweep.parallel={parallel} is for Hydra's basic launcher and sweeper. "
                "Others have a setting of their own (hydra.launcher.n_jobs)."
            )
        sweep = self._open(directory, job.config)
        if parallel == 1:
            return self._take_turn(sweep, job, "")
        START_STATUS.stop()  # each job has its own lines
        self._pool = self._pool or ThreadPoolExecutor(parallel, "job")
        self._pending.append(self._pool.submit(self._take_turn, sweep, job, f"[{job.name}] "))
        return None

    def refuse(self, folder: Path, name: str, reason: str) -> None:
        """Notes a job whose config is wrong: it never runs."""
        self._refused.append((folder, name, reason))
        self._note(USER_ERROR)

    def end(self, directory: Path, *, failed: bool) -> None:
        """Waits for the jobs that are under way, ranks all and closes the sweep in `directory`.

        Args:
          failed: something went wrong beside the jobs.
        """
        if self._pool is not None:
            self._pool.shutdown()
        failed = failed or any(job.exception() for job in self._pending)
        sweep = self._sweep or self._open_of_others(directory)
        if sweep is not None:
            for refused in self._refused:
                sweep.result_of(*refused)
            sweep.end(interrupted=bool(self._command.stops.came), failed=failed)
        if self._command.stops.came:
            self._note(INTERRUPTED)
        for job in self._pending:
            job.result()

    def _open(self, directory: Path, config: Config) -> Sweep:
        if self._sweep is None:
            self._sweep = Sweep(directory, config, self._command)
        return self._sweep

    def _open_of_others(self, directory: Path) -> Sweep | None:
        """The sweep whose jobs ran in other processes, for its end; None when none ran."""
        configs = [] if self._refused else sorted(directory.glob("*/config.yaml"))
        if not configs:
            return None
        sweep = self._open(directory, parsing.load(configs[0]))
        for result in sweep.results:
            self._note(CODES.get(result.status, FAILED))
        return sweep

    def _take_turn(self, sweep: Sweep, job: SweepJob, prefix: str) -> float | None:
        command = self._command
        if command.stops.came:
            return None
        if RunRecord.read(job.folder).training == "finished":
            say(f"job {job.number + 1}: {job.name} is finished already")
            return sweep.result_of(job.folder, job.name).value
        say(f"job {job.number + 1}: {job.name}")
        member = supervisor.Member(job.name, sweep.parent_run_id, prefix)
        stops = None if command.is_copy else command.stops
        try:
            code = supervisor.run(job.config, command.env, job.argv, stops=stops, member=member, notes=job.notes)
            self._note(code)
        except ConfigError as error:
            self._note(USER_ERROR)
            return sweep.result_of(job.folder, job.name, command.say(error)).value
        return sweep.result_of(job.folder, job.name).value

    def _note(self, code: int) -> None:
        self.code = max(self.code, code)


def name_of_job(argv: Sequence[str], overrides: Sequence[str], swept: Iterable[str] = ()) -> str:
    """What varies between the jobs of a sweep: `learning_rate=0.1, strategy=mirrored`. No secret is in it.

    Args:
      argv: the command line of the sweep.
      overrides: those of the job.
      swept: keys that a config file makes vary (`hydra.sweeper.params`).
    """
    typed = [text for text in argv if "=" in text and not text.startswith("-")]
    parsed: list[Any] = OverridesParser.create().parse_overrides(typed)
    varying = {override.key_or_group for override in parsed if override.is_sweep_override()} | set(swept)
    last_words = [key.rpartition(".")[2] for key in varying]
    words = []
    for text in overrides:
        key, _, value = masked_override(text).lstrip("+").partition("=")
        last = key.rpartition(".")[2]
        if not varying or key in varying:
            words.append(f"{last if last_words.count(last) <= 1 else key}={value}")
    return ", ".join(words) or "defaults"
