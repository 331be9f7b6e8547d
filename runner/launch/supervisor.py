"""One run, from its config to its summary: start and watch its tasks, ship their journals, report how it ended.

This process never imports TensorFlow (except with `run.inline=true`). So it notices when a task crashes or is killed,
and each run of a sweep can configure TensorFlow's devices anew.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shlex
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits
from typing import Any

import psutil

from runner.checkpoint.retention import best_of
from runner.checkpoint_files import layout
from runner.config import model_source, parsing, saved_config, schema
from runner.config.schema import Config, StrategyConfig
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.cluster_resolver import detect
from runner.launch import start_files
from runner.launch.environment.run_code import CodeRecorder
from runner.launch.gang import GangResult
from runner.launch.rendezvous import LeaderRendezvous, Rendezvous
from runner.launch.restarts import Restarts
from runner.launch.stop_requests import StopRequests
from runner.launch.task_group import RestartingGang, error_of, say_errors
from runner.launch.task_starter import TaskStarter
from runner.launch.worker_supervisor import WorkerSupervisor, differences
from runner.remote.mirror import local_folder, mirror_of, remote_dir, url_or_path
from runner.system import console
from runner.system.exit_codes import FAILED, FINISHED, INTERRUPTED, USER_ERROR
from runner.system.files import MODEL_SUMMARY_FILE, FolderLostError, HeldFolder, StorageError, remove_half_written
from runner.system.redaction import SecretList, mask_text, masked, masked_override, secrets_of
from runner.system.standard_streams import FULL_ERROR, LATER_JOB, say
from runner.system.start_status import START_STATUS
from runner.tracking.backends.host_metrics import HostMetrics
from runner.tracking.curves import CURVES_FILE
from runner.tracking.journal import RUN_STARTED, WANTS_RUN, Journals, journal_path, note_of_run
from runner.tracking.provenance import code_files, repeat_text, tags_of_this_process
from runner.tracking.run_end import RunEnd, settle, tell_training_ended, write_end, write_end_of_command
from runner.tracking.run_lock import alone_in, wait_for_tasks
from runner.tracking.run_record import MLFLOW, RunRecord, Shipped
from runner.tracking.shipping import Shipping, write_settings
from runner.tracking.summary import (
    MLFLOW_STATUS,
    STILL_RUNNING,
    SUMMARY_FILE,
    Outcome,
    after_reading,
    facts_in,
    outcome_of,
    read_summary,
    summary_of,
    write_summary,
)
from runner.tracking.tracker import exported_models
from runner.tracking.workers import (
    LISTED_STARTS,
    Launch,
    slowest_first,
    slowest_start,
    starts_of,
    step_times_of,
    steps_of_workers,
)

_OF_MICRO_BATCHES = ("input.train.batch_size", "strategy", "cluster.num_workers")
"""Keys that decide how many examples each replica has of a batch."""

_OF_TRAINING = ("metrics", "steps_per_sec", "input_bound", "global_step", "checkpoint")
"""Results of training in a summary that a command which only reads the run keeps."""


@dataclass(frozen=True)
class RunContext:
    """What a run shares with others: its place in a sweep, and what a sweep or a session has started for all its runs.

    Attributes:
      name: the values that vary; also the run's name in MLflow.
      parent: the sweep's folder; None: the run is not part of a sweep.
      prefix: text before each line that the run prints; '' if one job runs at a time.
      starter: starts the tasks of all jobs, or of all runs of a Python session; None: the run has its own starter.
      shipping: ships the journals of all jobs, and is closed by the sweep; None: each run has its own.
      settings: the values that vary, without the seed: a tag, by which MLflow groups runs that repeat each other.
      settings_id: what the run has in common with those that repeat it, also without a sweep; None: not known.
    """

    name: str = ""
    parent: Path | None = None
    prefix: str = ""
    starter: TaskStarter | None = None
    shipping: Shipping | None = None
    settings: str = ""
    settings_id: str | None = None


def run(
    config: Config, env: Mapping[str, str], argv: Sequence[str] = (), *,
    stops: StopRequests | None = None, context: RunContext | None = None, notes: Mapping[str, str] | None = None,
) -> Outcome:  # fmt: skip
    """Run the command of `config`, in its model_dir.

    Args:
      config: a checked config with its model_dir.
      env: environment of the tasks.
      argv: the command line, for the record.
      stops: receives the signals of this command; None: this function handles signals.
      context: what the run shares with others; None: nothing.
      notes: name -> text of each file to keep in `.hydra`; they say how the config was composed.

    Returns:
      The outcome, whose exit code is one of `runner.system.exit_codes`.

    Raises:
      ConfigError: another process is using the model_dir.
    """
    context = context or RunContext()
    launch = Launch()
    is_whole_command = context.parent is None and context.starter is None
    if is_whole_command:
        launch.began = psutil.Process().create_time()
    env = model_source.environment(config.model, env)
    if config.strategy.name in schema.CLUSTER_STRATEGIES and not config.is_cluster:
        say(f"command={config.command} runs in one process, without strategy={config.strategy.name}.")
        config = dataclasses.replace(config, strategy=StrategyConfig())
    place, has_evaluator = _detect_place(config, env)
    if has_evaluator:
        config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, evaluator=True))
    handling: AbstractContextManager[StopRequests] = StopRequests()
    if stops is not None:  # the caller handles signals
        handling = nullcontext(stops)
    with handling as requests:
        supervisor = Supervisor(config, env, argv, requests, context, place, notes or {}, launch)
        try:
            if config.command in schema.UNRECORDED_COMMANDS:
                return supervisor.run_unrecorded()
            if place is not None and not place.is_chief:
                code = WorkerSupervisor(config, place, env, requests, launch).run()
                return outcome_of(code, bool(requests.came), {})
            return supervisor.run()
        except OSError as error:
            return Outcome(FAILED, "failed", supervisor.say_lost(error))


def _detect_place(config: Config, env: Mapping[str, str]) -> tuple[Cluster | None, bool]:
    """Return the place of this process in a cluster whose tasks were started from outside, and whether an evaluator is
    among them; (None, False): all tasks are started here.
    """
    if config.command not in schema.CLUSTER_COMMANDS:
        return None, False
    detected = detect(env, config.cluster, config.strategy)
    if not detected.has_others:
        return None, False
    has_evaluator = detected.has_evaluator and config.command == "train_and_evaluate"
    return detected.cluster, has_evaluator


@dataclass
class Supervisor:
    """The supervisor of one run; in a cluster whose tasks were started from outside, the chief's supervisor.

    A start that trains writes config.yaml, run.json, summary.json and `.hydra` before its tasks start. Its journal says
    what the run is, and at the end how it ended; processes of their own send that to the trackers. If the folder has a
    checkpoint, a start that fails before its first step leaves these files, and the status in MLflow, as they were. A
    new folder in which a start ends before its first step and its first checkpoint because of a mistake is removed, but
    for a job of a sweep, whose table lists it, and in a cluster, whose other supervisors still read there.

    Attributes:
      place: the chief's place in a cluster whose tasks were started from outside; None: all tasks are started here.
      config, env, argv, stops, context, notes: as in `run`.
      launch: when the command began.
    """

    config: Config
    env: Mapping[str, str]
    argv: Sequence[str]
    stops: StopRequests
    context: RunContext
    place: Cluster | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    launch: Launch = field(default_factory=Launch)
    record: RunRecord = field(default_factory=RunRecord, init=False)
    folder: HeldFolder = field(init=False)
    _earlier_files: start_files.EarlierFiles | None = field(default=None, init=False)
    _is_new: bool = field(default=False, init=False)

    @functools.cached_property
    def model_dir(self) -> Path:
        return Path(str(self.config.model_dir))

    @functools.cached_property
    def file(self) -> Path:
        """The path of the config from which the tasks run."""
        return start_files.file_of_tasks(self.model_dir, self.config.command)

    @functools.cached_property
    def listed(self) -> SecretList:
        """What the config of this run lists as secret; other runs of this process have lists of their own."""
        return SecretList.of(self.config.run.secrets, self.env)

    @functools.cached_property
    def secrets(self) -> set[str]:
        """The secrets in the config, as texts."""
        return secrets_of(schema.to_tree(self.config), self.listed)

    @property
    def trains(self) -> bool:
        return self.config.command in schema.TRAINING_RUNS

    def run(self) -> Outcome:
        """Run the tasks, recording the start and how they ended, and return the outcome, without secrets.

        lock model_dir -> note the start -> run the tasks, whose journals are shipped -> choose the outcome
        -> write how the run ended -> unlock -> wait until everything is shipped -> print the summary
        """
        # Asked before the folder is made.
        self._is_new = not self.model_dir.is_dir() or not any(self.model_dir.iterdir())
        self.model_dir.mkdir(parents=True, exist_ok=True)
        self.folder = HeldFolder(self.model_dir)
        shipping = self.context.shipping or Shipping(self.env)
        mirrors = [mirror_of(self.model_dir), mirror_of(self._export_dir())]
        try:
            for mirror in mirrors:
                mirror.begin(self.env, self.config.run)
            with alone_in(self.model_dir):
                outcome, change = self._run_alone(shipping)
        finally:
            if self.context.shipping is None:  # after the lock: a tracker that hangs must not refuse the next start
                shipping.close(self.stops.came)
            # The mirrors last, because trackers note in the folder what they have. A sweep closes mirrors at its end.
            unsent = []
            if self.context.parent is None:
                unsent = [mirror.close(self.stops.came) for mirror in mirrors]
            left = "; ".join(text for text in unsent if text)
        if left and outcome.code in (FINISHED, INTERRUPTED):
            outcome = dataclasses.replace(outcome, code=INTERRUPTED, status="upload_incomplete", error=left)
            is_lost = any(mirror.lost() for mirror in mirrors)
            if is_lost:  # this run may not write there any more
                outcome = dataclasses.replace(outcome, code=FAILED, status="failed")
            if self.trains:
                write_end_of_command(self.model_dir, self._summary_of(outcome))
        addresses: Mapping[str, str] = {}
        if not change:
            addresses = shipping.addresses(self.model_dir)
        summary = {**self._summary_of(outcome), "addresses": addresses}
        self._print(summary, outcome, change)
        outcome.facts["answer"] = {"model_dir": str(self.model_dir), **summary}
        return dataclasses.replace(outcome, error=summary["error"])

    def _export_dir(self) -> Path:
        """Return the local folder of `export.dir`; that of '' if this run exports nothing."""
        url_or_folder = ""
        if self.config.exports and self.config.export.dir:
            url_or_folder = self.config.export.dir
        return Path(local_folder("export.dir=", url_or_folder, self.config.run.local_dir))

    def _run_alone(self, shipping: Shipping) -> tuple[Outcome, str]:
        """Run the tasks while the folder is locked, as in `run`. Return the outcome, and what became of the folder if
        the start did not change it: removed or unchanged.
        """
        # A task of an earlier start may still be saving. After this call, its journal is complete.
        tasks_here = "*" if self.place is None else "chief-0"
        wait_for_tasks(self.model_dir, tasks_here)
        if self.place is None:  # otherwise tasks on other hosts may be writing
            remove_half_written(self.model_dir, self.model_dir / start_files.NOTES_FOLDER)
        # Before this start writes anything: the earlier start may have been killed while it wrote how it ended.
        settle(self.model_dir)
        earlier_summary = self._note_start()
        journals = Journals(self.model_dir).mark()  # before the first line of this start
        self._tell_start(shipping)
        tasks = self._build_tasks(self.file, self.record)
        code = FAILED  # what the other supervisors are told if an error is raised here
        change = ""
        try:
            # These recorders end before the end of the run is noted, after which trackers take nothing.
            with self._measuring_host(), self._recording_code():
                outcome = self._run_recorded(tasks, journals)
            self._keep_of_earlier(outcome, earlier_summary)
            is_unfinished = self.trains and outcome.code != FINISHED
            is_over_early = is_unfinished and not journals.events("first_step")
            if is_over_early and self._is_mistake(outcome, journals):
                # Before the folder is removed, because the processes of `shipping` write into it.
                shipping.drop()
                start_files.remove_folder(self.model_dir)
                change = "removed"
            elif is_over_early and self._earlier_files is not None:
                self._restore(self._earlier_files, outcome)
                change = "unchanged"
            else:
                outcome = self._write_end(outcome, earlier_summary)
            code = outcome.code
        finally:
            tasks.rendezvous.end(code)
        return outcome, change

    def _restore(self, files: start_files.EarlierFiles, outcome: Outcome) -> None:
        """Put the files of the earlier start back, and note that this one failed."""
        with suppress(OSError):  # the folder is lost, or the disk is full
            self.folder.check()
            files.restore()
        # Afterwards: a start that is killed before this line has left the run as it was, as run.json then says.
        with suppress(OSError):
            self.folder.check()
            write_end(self.model_dir, self._end_of_kept(outcome))

    @property
    def _has_evaluator_elsewhere(self) -> bool:
        """Whether an evaluator was started from outside; one that is started here is among the tasks."""
        return self.place is not None and self.config.cluster.evaluator

    @property
    def _is_provisional(self) -> bool:
        """Whether the folder goes if this start makes a mistake before its first step: it is new, and nobody else reads
        it.
        """
        is_read_by_others = self.context.parent is not None or self.place is not None
        return self.trains and self._is_new and not is_read_by_others

    def _is_mistake(self, outcome: Outcome, journals: Journals) -> bool:
        """Report whether a start that took no step ended because of a mistake, in a folder with nothing of value.

        What was reached decides, not how long it took: the same mistake leaves the same on a slow machine.
        """
        if not self._is_provisional or outcome.code != USER_ERROR:
            return False
        # With WANTS_RUN, user code has imported MLflow, and may have recorded something in the MLflow run.
        return not journals.events(WANTS_RUN) and layout.latest_checkpoint(self.model_dir) is None

    def run_unrecorded(self) -> Outcome:
        """Run a command that only prints something and leaves no record; return the outcome."""
        with tempfile.TemporaryDirectory(prefix="runner-") as scratch:
            if self.config.model_dir is None:
                self.config = dataclasses.replace(self.config, model_dir=str(Path(scratch) / "model"))
            file = Path(scratch) / "config.yaml"
            schema.save(self.config, file)
            ending = self._run_tasks(self._build_tasks(file, RunRecord()))
            journals = Journals(Path(scratch))
            facts = facts_in(journals.events_of())
            return outcome_of(ending.code, bool(self.stops.came), facts, error_of(ending, journals))

    def say_lost(self, error: OSError) -> str:
        """Report that the folder cannot be written, and return why: the disk is full, or it was deleted meanwhile."""
        if self.env.get(FULL_ERROR) == "1":
            traceback.print_exception(error)
        why = self._why_lost(error)
        say(f"runner: {why}")
        return why

    def _why_lost(self, error: OSError) -> str:
        try:
            self.folder.check()
        except FolderLostError as lost:  # then `error` may only say that a file in the folder is missing
            return str(lost)
        return f"model_dir={self.config.model_dir} cannot be written: {error}"

    # --- before -------------------------------------------------------------------------------------------------------

    def _note_start(self) -> dict[str, Any]:
        """Write the files that a start writes before its tasks: the config, run.json, and if it trains the summary and
        `.hydra`. Draw the seed, and report what has changed in the config.

        Returns:
          The summary of the previous start.
        """
        self.record = RunRecord.read(self.model_dir)
        if self.trains and layout.latest_checkpoint(self.model_dir) is not None:
            self._earlier_files = start_files.EarlierFiles(self.model_dir, self.notes)
        config_file = self.model_dir / saved_config.FILE if self.trains else self.file
        config_before = saved_config.read_left(config_file)
        self._draw_seed(config_before)
        if self.trains:
            self.record.gradient_accumulation = self._begin_accumulation(config_before)
        # After the seed is drawn, or null would be shown as a change of the earlier seed. Before the config is
        # replaced.
        self._say_changes(config_before)
        earlier_summary = read_summary(self.model_dir / SUMMARY_FILE)
        if self.trains:
            self.record.begin(STILL_RUNNING.status)
            start_files.write_notes(self.model_dir, self.notes)
            write_summary(self.model_dir, self._summary_of(STILL_RUNNING))
        self.record.save(self.model_dir)
        schema.save(self.config, self.file)
        return earlier_summary

    def _draw_seed(self, config_before: Mapping[str, Any]) -> None:
        """Draw one seed for all tasks and all starts of a run with `run.seed=null`.

        Otherwise each task would draw its own, and several workers would read the same data in different orders.
        """
        run = self.config.run
        if run.seed is not None:
            return
        if self.record.generation:
            seed = self.record.drawn_seed
        else:
            # Without a record, which may have been damaged, the seed stands in the config of the earlier start.
            seed = schema.value_at(config_before, "run.seed")
        if seed is None:
            seed = randbits(schema.SEED_BITS)
        if self.trains:  # a command that only reads the run does not set its seed
            self.record.drawn_seed = seed
        self.config = dataclasses.replace(self.config, run=dataclasses.replace(run, seed=seed))

    def _begin_accumulation(self, config_before: Mapping[str, Any]) -> int | None:
        """Return the number of micro-batches with which this start begins; None: the config has it.

        A resumed run begins with the number that it has come to, unless its batches or replicas are others by now.
        """
        if not self.config.train.finds_accumulation:
            return None
        known = self.record.gradient_accumulation
        config_now = schema.to_tree(self.config)
        for key in _OF_MICRO_BATCHES:
            if schema.value_at(config_before, key) != schema.value_at(config_now, key):
                known = None
        return known or 1

    def _say_changes(self, config_before: Mapping[str, Any]) -> None:
        """Report the differences if a run is resumed with another config than `config_before`."""
        if self.config.run.progress == "off" or not config_before:
            return
        try:
            parsed = parsing.parse(config_before)
        except ValueError:  # written by another version; it is about to be replaced
            return
        changes = differences(schema.to_tree(parsed), schema.to_tree(self.config))
        if changes:
            listed = ", ".join(f"{key}: {earlier} -> {now}" for key, earlier, now in changes)
            say(f"Changed since this run was last started: {listed}")

    def _tell_start(self, shipping: Shipping) -> None:
        """Note in the journal what this run is, for the trackers."""
        tracking = self.config.tracking
        # How the run is tracked is no param of the training; only the backend is shown.
        shown = dataclasses.replace(self.config, tracking=schema.TrackingConfig(backend=tracking.backend))
        params = schema.flatten(masked(schema.to_tree(shown), self.listed))
        url = remote_dir(self.model_dir)
        tags: dict[str, str] = {}
        # Finding the git revision takes two commands, so it is skipped if no tracker records it.
        if tracking.backends:
            tags |= masked(tracking.tags, self.listed, "tracking.tags")
            tags |= tags_of_this_process(self.model_dir, self.argv, url, self.listed)
            tags |= self._tag_of_accumulation()
            if self.context.settings:
                tags["settings"] = mask_text(self.context.settings, self.secrets)
        name = self.context.name or tracking.run_name or self.model_dir.name
        parent = None
        if self.context.parent is not None:
            parent = str(self.context.parent)
        generation = self.record.generation if self.trains else None
        note_of_run(
            self.model_dir,
            RUN_STARTED,
            command=self.config.command,
            name=mask_text(name, self.secrets),
            params=params,
            tags=tags,
            parent=parent,
            is_provisional=self._is_provisional,
            generation=generation,
        )
        # Before `ship`, whose process reads these settings.
        write_settings(self.model_dir, tracking, self.env, listed=self.listed)
        shipping.ship(self.model_dir)

    def _measuring_host(self) -> AbstractContextManager[object]:
        """Return a context during which the use of this host is recorded, if that is asked for."""
        tracking = self.config.tracking
        is_asked_for = tracking.system_metrics and tracking.has_mlflow
        if not (self.trains and is_asked_for):
            return nullcontext()
        host = ""
        if self.place is not None:  # the hosts of a cluster are told apart by their names
            host = platform.node()
        return HostMetrics(self.model_dir, self.env, host)

    def _recording_code(self) -> AbstractContextManager[object]:
        """Return a context during which the code of this start is recorded, if it trains."""
        if not self.trains or not self.config.run.code:
            return nullcontext()
        began = None
        if self.config.run.inline:
            # Of a notebook's process, modules may have been imported long before this start.
            began = psutil.Process().create_time()
        return CodeRecorder(
            model_dir=self.model_dir,
            run=self.record,
            journal=journal_path(self.model_dir),
            command=self._repeat_command(),
            hydra_notes=self.notes.get("hydra.yaml", ""),
            secrets=self.secrets,
            began=began,
            is_quiet=LATER_JOB in self.env,
        )

    def _build_tasks(self, file: Path, record: RunRecord) -> RestartingGang:
        """Return the tasks of this run, with what restarts them and the supervisors of tasks on other hosts.

        Args:
          file: the config from which the tasks run.
          record: counts the starts.
        """
        prefix = self.context.prefix
        limit = self.config.max_restarts
        if self.config.command in schema.UNRECORDED_COMMANDS:
            limit = 0
        restarts = Restarts(self.model_dir, limit, self.stops.came, lambda text: say(f"{prefix}{text}"))
        lost = mirror_of(self.model_dir).lost
        rendezvous = Rendezvous(lost)
        if self.place is not None:
            settings = self.config.cluster
            rendezvous = LeaderRendezvous(
                self.model_dir,
                self.place,
                settings.start_timeout_secs,
                has_evaluator=settings.evaluator,
                lost=lost,
            )
        return RestartingGang(
            config=self.config,
            file=file,
            env=self.env,
            stops=self.stops,
            restarts=restarts,
            record=record,
            prefix=prefix,
            place=self.place,
            rendezvous=rendezvous,
            starter=self.context.starter,
            launch=self.launch,
        )

    # --- the tasks ----------------------------------------------------------------------------------------------------

    def _run_tasks(self, tasks: RestartingGang) -> GangResult:
        """Run the tasks in separate processes, or with `run.inline` the only one in this process."""
        if not self.config.run.inline:
            try:
                return tasks.run()
            finally:
                START_STATUS.stop()
        START_STATUS.stop()
        from runner.task import main

        os.environ.update(model_source.environment(self.config.model, {}))
        # The command line sets FULL_ERROR for Hydra. Unless the user has set it, it is not set while the task runs, so
        # that a mistake is reported as one message.
        set_for_hydra = None
        if FULL_ERROR not in self.env:
            set_for_hydra = os.environ.pop(FULL_ERROR, None)
        try:
            code = main.main([str(tasks.file)], inline=True)
        except KeyboardInterrupt:  # the second Ctrl-C
            self.stops.came.append(signal.SIGINT)
            code = FAILED
        finally:
            if set_for_hydra is not None:
                os.environ[FULL_ERROR] = set_for_hydra
        return GangResult(code, ALONE)

    def _run_recorded(self, tasks: RestartingGang, journals: Journals) -> Outcome:
        """Run the tasks, wait for an evaluator that was started elsewhere, and return the outcome of all of them."""
        ending = self._run_tasks(tasks)
        say_errors(journals, self.context.prefix)
        is_refusal = ending.code == USER_ERROR and bool(ending.reason)
        if is_refusal and not journals.events("error"):
            # The supervisor of another host has refused its config, so no task here has printed the reason.
            say(f"{self.context.prefix}runner: {ending.reason}")
        outcome = self._outcome_after(ending, journals)
        has_finished = self.trains and ending.code == FINISHED
        if has_finished and self._has_evaluator_elsewhere:
            # Before the wait: this tells the evaluator that no further checkpoint comes.
            with suppress(OSError):  # `_write_end`, which comes next, reports the problem with the folder
                self.folder.check()
                tell_training_ended(self.model_dir, outcome.status, self.record.generation)
            ending = tasks.rendezvous.wait_for_evaluator(self.stops.came) or ending
            outcome = self._outcome_after(ending, journals)
        if tasks.tried and _ran_out_of_memory(journals):
            numbers = [*tasks.tried, self.record.gradient_accumulation]
            tried = ", ".join(str(number) for number in numbers)
            outcome.error = f"{outcome.error} (tried train.gradient_accumulation={tried})"
        if self.trains:
            outcome.facts["starts"] = starts_of(journals)
            outcome.facts["step_times"] = step_times_of(journals)
            outcome.facts["worker_steps"] = steps_of_workers(journals)
        restarts = tasks.restarts
        outcome.facts["restarts"] = restarts.total
        outcome.facts["last_restart"] = restarts.last
        outcome.facts["lost_workers"] = restarts.lost_workers
        return outcome

    def _outcome_after(self, ending: GangResult, journals: Journals) -> Outcome:
        """Return the outcome of tasks that ended in this way, with the facts that their journals have."""
        lines = journals.events_of()  # also from the evaluator, which has the last checkpoint's metrics
        for event in ("exported", "result"):
            lines += journals.events(event).get("evaluator", ())
        is_stopped = bool(self.stops.came)
        return outcome_of(ending.code, is_stopped, facts_in(lines), error_of(ending, journals))

    # --- after --------------------------------------------------------------------------------------------------------

    def _keep_of_earlier(self, outcome: Outcome, earlier_summary: Mapping[str, Any]) -> None:
        """Add results of earlier starts: exports that still exist and, if this command only reads the run (such as
        evaluate), the results of training.
        """
        facts = outcome.facts
        if not self.trains:
            for name in _OF_TRAINING:
                if facts.get(name) is None and earlier_summary.get(name):
                    facts[name] = earlier_summary[name]
        exports = dict.fromkeys([*earlier_summary.get("exports", []), *facts.get("exports", [])])
        facts["exports"] = [path for path in exports if Path(path).is_dir()]

    def _write_end(self, outcome: Outcome, earlier_summary: Mapping[str, Any]) -> Outcome:
        """Write how this start ended. Return the outcome, failed if a file cannot be written."""
        record = self.record if self.trains else None
        try:
            self.folder.check()  # a folder made anew, perhaps by an event writer, contains nothing of the run
            write_end(self.model_dir, self._end_of(outcome, earlier_summary), record)
            return outcome
        except OSError as error:
            if outcome.code != FAILED or not isinstance(error, StorageError):  # else the task has reported it
                self.say_lost(error)
            failed = Outcome(FAILED, "failed", self._why_lost(error), outcome.facts)
        end = self._end_of(failed, earlier_summary)
        with suppress(FolderLostError):
            self.folder.check()
            try:
                write_end(self.model_dir, end, record)
            except OSError:  # MLflow gets the outcome in any case: a line may fit where a file does not
                with suppress(OSError):
                    write_end(self.model_dir, dataclasses.replace(end, summaries={}))
        return failed

    def _end_of(self, outcome: Outcome, earlier_summary: Mapping[str, Any]) -> RunEnd:
        """Return the end of this start, with its summaries, files and exports.

        Args:
          earlier_summary: the summary of the previous start.
        """
        summary = self._summary_of(outcome)
        summaries = {SUMMARY_FILE: summary}
        if not self.trains:  # the status of this command is not the status of the run
            summaries = {
                f"summary.{self.config.command}.json": summary,
                SUMMARY_FILE: after_reading(earlier_summary, summary),
            }
        end = RunEnd(
            outcome.status,
            self._mlflow_status(outcome),
            summaries,
            files=[self.file.name, *summaries, MODEL_SUMMARY_FILE, CURVES_FILE],
            models=self._models_of(outcome),
        )
        if not self.trains:
            return end
        tags = self._tags_of_end(outcome, summary)
        files = [*end.files, *code_files(self.model_dir)]
        return dataclasses.replace(end, tags=tags, description=repeat_text(self.model_dir), files=files)

    def _tags_of_end(self, outcome: Outcome, summary: Mapping[str, Any]) -> dict[str, str]:
        """Return the tags that the trackers get at the end of training."""
        facts = {
            "strategy": summary["strategy"],
            "num_replicas": summary["num_replicas"],
            "lost_workers": _describe_losses(summary),
        }
        if summary["restarts"]:
            facts["restarts"] = summary["restarts"]
            facts["last_restart"] = outcome.facts.get("last_restart")
        tags = {name: str(value) for name, value in facts.items() if value is not None}
        starts = outcome.facts.get("starts", {})
        for task in slowest_first(starts)[:LISTED_STARTS]:
            name = task.replace(":", "-")
            tags[f"start.{name}"] = str(starts[task])
        return tags | self._tag_of_accumulation()

    def _tag_of_accumulation(self) -> dict[str, str]:
        """Return the tag with the number of micro-batches if the supervisor finds that number; {} if the config has it,
        which is then a param.
        """
        number = self.record.gradient_accumulation
        if number is None or not self.trains:
            return {}
        return {"gradient_accumulation": str(number)}

    def _mlflow_status(self, outcome: Outcome) -> str:
        """Return the status of an outcome for MLflow."""
        is_pruned = outcome.status == "interrupted" and not self.stops.may_go_on
        if outcome.was_killed or is_pruned:
            return "KILLED"
        return MLFLOW_STATUS[outcome.status]

    def _end_of_kept(self, outcome: Outcome) -> RunEnd:
        """Return the end of a start that failed before its first step in a folder with a checkpoint."""
        error = self._summary_of(outcome)["error"]
        what = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {outcome.status}"
        if error:
            what += f": {error}"
        return RunEnd(
            outcome.status,
            self._mlflow_status(outcome),
            tags={"last_failed_start": what},
            models=self._models_of(outcome),
            is_kept=True,
        )

    def _models_of(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Return the models that this start exported."""
        export = self.config.export
        models = exported_models(outcome.facts.get("exported", []), self._model_name(), export.register, export.alias)
        return [dataclasses.asdict(model) for model in models]

    def _summary_of(self, outcome: Outcome) -> dict[str, Any]:
        """Return the contents of summary.json for an outcome, without secrets."""
        run_id = Shipped.read(self.model_dir, MLFLOW).run_id  # the shipping process adds it if it is not known yet
        summary = summary_of(outcome, self.config, run_id, self.secrets, self.context.settings_id)
        number = self.record.gradient_accumulation or self.config.train.first_accumulation
        return {**summary, "gradient_accumulation": number}

    def _model_name(self) -> str:
        """Return the model's name from its function: digits for model_fns.digits.model_fn."""
        *modules, name = str(self.config.model.fn).split(".")
        if name == "model_fn" and modules:
            return modules[-1]
        return name

    def _print(self, summary: Mapping[str, Any], outcome: Outcome, change: str) -> None:
        """Print the summary as a user reads it.

        Args:
          change: what became of the folder, as `_run_alone` returns it.
        """
        shown = dict(summary)
        shown["resume"] = None
        if outcome.code == INTERRUPTED:
            shown["resume"] = self._resume_command()
        if not self.trains:
            # The summary has these from the training of the run, which this command only reads.
            shown["steps_per_sec"] = None
            shown["input_bound"] = None
        if self.config.strategy.name == "parameter_server":
            shown["cluster"] = self._describe_cluster()
        if outcome.code == USER_ERROR:  # the task has printed the message
            shown["error"] = None
        for name in ("checkpoint", "predictions"):
            if summary[name]:
                shown[name] = console.relative(Path(summary[name]))
        slowest = slowest_start(outcome.facts.get("starts", {}))
        shown["slowest_start"] = None
        if slowest is not None and slowest.is_told:
            shown["slowest_start"] = str(slowest)
        shown["lost_workers"] = _describe_losses(summary)
        shown["found_accumulation"] = self._tag_of_accumulation().get("gradient_accumulation")
        shown["exports"] = ", ".join(url_or_path(Path(path)) for path in summary["exports"])
        shown["best"] = self._describe_best()
        where = url_or_path(self.model_dir)
        if change:
            where += f" ({change}: this start ended before its first step)"
        if self.context.parent is None:
            console.print_summary(shown, where, prefix=self.context.prefix)
        else:
            console.print_job(shown, where, prefix=self.context.prefix)

    def _describe_cluster(self) -> list[str]:
        """Return the numbers of workers and servers, in words."""
        if self.place is None:
            workers = self.config.cluster.num_workers
            servers = self.config.cluster.num_ps
        else:
            workers = self.place.num_workers - 1  # it counts the chief
            servers = self.place.num_ps
        return [console.counted(workers, "worker"), console.counted(servers, "server")]

    def _describe_best(self) -> str | None:
        """Return the best checkpoint by `checkpoint.keep_best`, in words; None: none is kept for that."""
        if not self.trains:
            return None
        rule = self.config.checkpoint.keep_best
        found = best_of(self.model_dir, rule)
        if found is None:
            return None
        step, value = found
        return f"step {console.format_number(step)}, {rule.metric} {console.format_number(value)}"

    def _resume_command(self) -> str:
        """Return the command that resumes an interrupted run."""
        overrides = [masked_override(text, self.listed) for text in self._overrides_without_folder()]
        folder = f"model_dir={url_or_path(self.model_dir)}"
        return shlex.join(["python", "-m", "runner", *overrides, folder])

    def _repeat_command(self) -> str:
        """Return the command that trains the same in a folder of its own."""
        words = self._overrides_without_folder()
        drawn = self.record.drawn_seed
        if drawn is not None and drawn == self.config.run.seed:
            words = [text for text in words if not text.startswith("run.seed=")]
            words.append(f"run.seed={drawn}")
        overrides = [masked_override(text, self.listed) for text in words]
        return mask_text(shlex.join(["python", "-m", "runner", *overrides]), self.secrets)

    def _overrides_without_folder(self) -> list[str]:
        """Return what the user typed, but for model_dir."""
        return [text for text in self.argv[1:] if not text.lstrip("+").startswith("model_dir=")]


def _ran_out_of_memory(journals: Journals) -> bool:
    """Report whether the run has failed because a step of training ran out of memory."""
    for errors in journals.events("error").values():
        if errors[-1].get("out_of_memory"):
            return True
    return False


def _describe_losses(summary: Mapping[str, Any]) -> str | None:
    """Return for each worker that was lost for good when and why, and how many were left; None: none was lost."""
    losses = []
    for loss in summary["lost_workers"]:
        losses.append("{time} at step {step}: {reason}, {left} left".format(**loss))
    return "; ".join(losses) or None
