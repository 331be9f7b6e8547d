"""The tasks of one run: their number and kinds, how they start, and their restart when one is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import runner
from runner.config.schema import TRAINING_RUNS, Config
from runner.config.strategy_validation import next_accumulation
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.local_cluster import local_places
from runner.launch.gang import Gang, GangResult, Task
from runner.launch.rendezvous import Rendezvous
from runner.launch.restarts import Restarts, latest_step
from runner.launch.stop_requests import StopRequests
from runner.launch.task_starter import TASK_COMMAND, TaskStarter, build_starter
from runner.system.exit_codes import FAILED, INTERRUPTED, OUT_OF_MEMORY
from runner.system.standard_streams import say
from runner.system.start_status import START_STATUS, shows_live
from runner.task.error_report import QUIET_ERRORS
from runner.tracking.journal import Journals
from runner.tracking.run_end import GENERATION, remove_ending
from runner.tracking.run_record import FOUND_ACCUMULATION, RunRecord
from runner.tracking.workers import RENDEZVOUS, Launch, StragglerWatch


@dataclass
class RestartingGang:
    """The tasks of one run: they start together, and start again when one is lost that the others cannot do without.

    Attributes:
      file: the config that each task reads; a task learns its place from TF_CONFIG.
      env: environment of the command, which each task inherits.
      record: counts the starts, and has their number of micro-batches.
      prefix: text before everything that the tasks print.
      place: place of this process's task, in a cluster whose tasks were started from outside; None: all tasks are
        started here.
      rendezvous: the supervisors of that cluster's other tasks; the base class if there are none.
      starter: starts the tasks of all jobs of a sweep, or of all runs of a Python session; None: this run has its own
        starter.
      launch: what was done before the tasks of this start were started.
      tried: numbers of micro-batches with which a step ran out of memory.
    """

    config: Config
    file: Path
    env: Mapping[str, str]
    stops: StopRequests
    restarts: Restarts
    record: RunRecord
    prefix: str = ""
    place: Cluster | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    starter: TaskStarter | None = None
    launch: Launch = field(default_factory=Launch)
    tried: list[int] = field(default_factory=list, init=False)

    def run(self) -> GangResult:
        """Run the tasks to their end: gather all supervisors, start, watch, and restart lost tasks."""
        tasks = self._build_tasks()
        starting: AbstractContextManager[TaskStarter]
        if self.starter is not None and self.config.run.preload == "auto":
            starting = nullcontext(self.starter)  # whoever made it closes it
        else:
            starting = closing(build_starter(self.config, len(tasks)))
        with starting as starter:
            return self._run(tasks, starter)

    def _run(self, tasks: list[Task], starter: TaskStarter) -> GangResult:
        """Start and watch the tasks, again and again while that is allowed.

        gather the other supervisors -> wait until TensorFlow is imported -> run the tasks -> decide whether to go on
        """
        journals = Journals(self.restarts.model_dir)
        gang = self._build_gang(starter, journals)
        answer = "saving a checkpoint" if self._trains else "nothing is saved"
        with self.stops.watch(gang, answer):
            while True:
                starter.prepare(tasks)  # meanwhile the other supervisors join
                record = self.record
                with self.launch.phase(RENDEZVOUS):
                    failed = self.rendezvous.gather(record.generation, self.stops.came, record.gradient_accumulation)
                if failed is not None:
                    return failed
                with self.launch.phase("import"):  # by the server, from which tasks are forked
                    starter.wait(self.stops.came)
                if self.stops.came:  # before any task was started
                    return self._result_without_a_step(tasks[0].place)
                if self._trains:
                    remove_ending(self.restarts.model_dir)
                journals.mark()  # who joined in an earlier start has not joined in this one
                launched = [replace(task, env={**task.env, **self.launch.env}) for task in tasks]
                ending = gang.run(launched, self.stops.came)
                ending = self.rendezvous.reason(ending)
                if ending.code == INTERRUPTED:
                    names = self._asked_to_stop(gang, journals)
                    return replace(ending, reason=", ".join(sorted(names)))
                if not self._prepare_restart(ending, journals):
                    return ending
                self.launch.begin_again()
                self.record.generation += 1
                self.record.save(self.restarts.model_dir)
                tasks = self._build_tasks()

    @property
    def _trains(self) -> bool:
        return self.config.command in TRAINING_RUNS

    def _build_gang(self, starter: TaskStarter, journals: Journals) -> Gang:
        """Return a gang without tasks, whose looks around also report slow workers and end it with the cluster."""
        watch = StragglerWatch(self.restarts.model_dir, lambda text: say(f"{self.prefix}{text}"))

        def look_around() -> GangResult | None:
            watch.look()
            return self.rendezvous.look()

        return Gang(
            start_timeout_secs=self.config.cluster.start_timeout_secs,
            freeze_secs=self.config.run.freeze_secs,
            start=starter.start,
            say=lambda text: say(f"{self.prefix}runner: {text}"),
            joined=lambda: journals.events("joined"),
            may_replace=lambda ending: self.restarts.allow(ending, alone=True),
            look_around=look_around,
        )

    def _result_without_a_step(self, place: Cluster) -> GangResult:
        """Return the result of a start that was stopped before its tasks started: failed if it trains and there is no
        checkpoint to resume from, else interrupted. A task that is stopped before its first step ends in the same way.
        """
        has_nothing = self._trains and latest_step(self.restarts.model_dir) is None
        code = FAILED if has_nothing else INTERRUPTED
        return GangResult(code, place)

    def _asked_to_stop(self, gang: Gang, journals: Journals) -> Collection[str]:
        """Return the names of the tasks that were asked to stop; () if the whole run was."""
        if self.stops.came:
            return ()
        if gang.asked_to_stop:
            return gang.asked_to_stop
        return journals.events("asked_to_stop")  # a single task that was asked has noted that itself

    def _prepare_restart(self, ending: GangResult, journals: Journals) -> bool:
        """Report whether all tasks are to be started again. If so, first log and note the restart, and wait as long as
        it has to wait.
        """
        if self._prepare_restart_in_parts(ending, journals):
            return True
        if ending.is_loss and self.restarts.allow(ending):
            return True
        return self._prepare_restart_without(ending)

    def _prepare_restart_in_parts(self, ending: GangResult, journals: Journals) -> bool:
        """If a step ran out of memory, set a larger number of micro-batches for the next start and log it.

        Returns:
          Whether the number was set, so that all tasks are to be started again.
        """
        number = self.record.gradient_accumulation
        if ending.code != OUT_OF_MEMORY or number is None or self.stops.came:
            return False
        built = journals.events("built")["chief"][-1]
        larger = next_accumulation(number, self.config.input.train.batch_size, built["num_replicas"])
        assert larger is not None, "the task has smaller micro-batches, as its exit code says"
        self.tried.append(number)
        self.record.gradient_accumulation = larger
        # The journals here have the error of a task of this supervisor. The supervisor of another one has sent it.
        if self.place in (None, ending.place):
            ending = replace(ending, reason=reason_of(ending, journals))
        self.restarts.go_on_in_parts(ending, larger)
        return True

    def _prepare_restart_without(self, ending: GangResult) -> bool:
        """If the run may go on with one worker less, set that number for the next start and log it.

        Returns:
          Whether the number was set, so that all tasks are to be started again.
        """
        settings = self.config.cluster
        least = settings.min_workers or settings.num_workers
        is_gang = self.config.strategy.name == "multi_worker" and self.place is None
        is_lost = ending.is_loss or ending.did_not_start
        is_of_a_worker = is_lost and not ending.place.is_evaluator
        can_go_on = is_gang and is_of_a_worker and settings.num_workers > least
        if self.stops.came or not can_go_on:
            return False
        # The config's file keeps the full number, with which a later start of the same command begins again.
        self.config = replace(self.config, cluster=replace(settings, num_workers=settings.num_workers - 1))
        self.restarts.go_on_without(ending, self.config.cluster)
        return True

    def _build_tasks(self) -> list[Task]:
        """Return the tasks of the next start. If the chief writes to this terminal, say there that TensorFlow is being
        imported.
        """
        if self.place is None:
            # Each start uses new ports, because the old ones may stay in use for a while.
            places = local_places(self.config)
        else:
            places = [self.place]
        tasks = []
        for place in places:
            prefix = self.prefix
            env = task_env(self.env, place, self.record.generation, self.record.gradient_accumulation)
            # The chief writes to the terminal itself, like a single process, unless its job is one of several.
            if not place.is_chief:
                env[QUIET_ERRORS] = "1"
                prefix = f"{prefix}[{place.name}] "
            elif not prefix and shows_live(self.config.run.progress, sys.stderr):
                START_STATUS.show("importing TensorFlow")
            tasks.append(Task(place, task_argv(self.file), env, prefix))
        return tasks


def task_argv(file: Path) -> list[str]:
    """Return the command of a task that runs from the config in `file`."""
    return [sys.executable, *TASK_COMMAND, str(file)]


_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment variables that turn off TensorFlow's log and the download bars of user code."""


def task_env(
    env: Mapping[str, str], place: Cluster = ALONE, generation: int = 1, gradient_accumulation: int | None = None
) -> dict[str, str]:
    """Return the environment of a task: `env`, with library messages turned off unless `env` asks for them.

    The task imports the same `runner` package as this process.

    Args:
      env: environment of the command.
      place: the task's place; one task of several gets its place in TF_CONFIG.
      generation, gradient_accumulation: those of this start of the run, as in `RunRecord`.
    """
    of_task = {**_QUIET, **env, GENERATION: str(generation)}
    # `env` may be the environment of a task whose code starts another run, and then has the variables of that task. A
    # TF_CONFIG of the user is in `place` already.
    of_task.pop("TF_CONFIG", None)
    of_task.pop(FOUND_ACCUMULATION, None)
    if place.tf_config:
        of_task["TF_CONFIG"] = place.tf_config
    if gradient_accumulation is not None:
        of_task[FOUND_ACCUMULATION] = str(gradient_accumulation)
    home = Path(runner.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):  # the package is a checkout that is not installed
        search_path = [str(home)]
        if env.get("PYTHONPATH"):
            search_path.append(env["PYTHONPATH"])
        of_task["PYTHONPATH"] = os.pathsep.join(search_path)
    return of_task


def say_errors(journals: Journals, prefix: str = "") -> None:
    """Print the errors of all tasks, each error once, except those that the chief has printed."""
    errors = journals.events("error")
    # A task with QUIET_ERRORS prints nothing, and its event has the lines as `said`. The chief prints its own error.
    shown = {line["error"] for line in errors.get("chief", ())}
    for task, lines in errors.items():
        for line in lines:
            is_new = line["error"] not in shown
            if is_new and line.get("said"):
                shown.add(line["error"])
                for text in str(line["said"]).splitlines():
                    say(f"{prefix}[{task}] {text}")


def reason_of(ending: GangResult, journals: Journals) -> str:
    """Return why a task ended that ran out of memory: what happened to it, and its error."""
    errors = journals.events("out_of_memory")[ending.place.name]
    return f"{ending.reason} ({errors[-1]['error']})"


def error_of(ending: GangResult, journals: Journals) -> str:
    """Return why a run ended, in one line; '' if it finished."""
    place = ending.place
    errors = journals.events("error").get(place.name)
    if ending.is_loss or not errors:
        return ending.reason
    error = str(errors[-1]["error"])
    if place.is_chief:
        return error
    return f"{place.name}: {error}"
