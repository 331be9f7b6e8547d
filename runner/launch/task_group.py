"""The tasks of one run: their number and kinds, how they start, and their restart when one is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext
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
        tasks = self._tasks()
        shared = self.starter if self.config.run.preload == "auto" else None
        with closing(build_starter(self.config, len(tasks))) if shared is None else nullcontext(shared) as starter:
            return self._run(tasks, starter)

    def _run(self, tasks: list[Task], starter: TaskStarter) -> GangResult:
        journals = Journals(self.restarts.model_dir)
        watch = StragglerWatch(self.restarts.model_dir, lambda text: say(f"{self.prefix}{text}"))

        def look_around() -> GangResult | None:
            watch.look()
            return self.rendezvous.look()

        gang = Gang(
            start_timeout_secs=self.config.cluster.start_timeout_secs,
            freeze_secs=self.config.run.freeze_secs,
            start=starter.start,
            say=lambda text: say(f"{self.prefix}runner: {text}"),
            joined=lambda: journals.events("joined"),
            may_replace=lambda ending: self.restarts.allow(ending, alone=True),
            look_around=look_around,
        )
        trains = self.config.command in TRAINING_RUNS
        with self.stops.watch(gang, "saving a checkpoint" if trains else "nothing is saved"):
            while True:
                starter.prepare(tasks)  # meanwhile the other supervisors join
                record = self.record
                with self.launch.phase(RENDEZVOUS):
                    failed = self.rendezvous.gather(record.generation, self.stops.came, record.gradient_accumulation)
                if failed is not None:
                    return failed
                with self.launch.phase("import"):  # by the server, from which tasks are forked
                    starter.wait(self.stops.came)
                if self.stops.came:  # before any task was started; the result is that of a task that has taken no step
                    has_nothing = trains and latest_step(self.restarts.model_dir) is None
                    return GangResult(FAILED if has_nothing else INTERRUPTED, tasks[0].place)
                if trains:
                    remove_ending(self.restarts.model_dir)
                journals.mark()  # who joined in an earlier start has not joined in this one
                launched = [replace(task, env={**task.env, **self.launch.env}) for task in tasks]
                ending = self.rendezvous.reason(gang.run(launched, self.stops.came))
                if ending.code == INTERRUPTED:
                    # '' if the whole run was asked to stop. If a single task was asked, the task has noted that itself.
                    names = () if self.stops.came else gang.asked_to_stop or journals.events("asked_to_stop")
                    return replace(ending, reason=", ".join(sorted(names)))
                if not self._goes_on(ending, journals):
                    return ending
                self.launch.begin_again()
                self.record.generation += 1
                self.record.save(self.restarts.model_dir)
                tasks = self._tasks()

    def _goes_on(self, ending: GangResult, journals: Journals) -> bool:
        """Report whether all tasks are to be started again, after a pause; log and note the restart."""
        if self._goes_on_in_parts(ending, journals):
            return True
        if ending.is_loss and self.restarts.allow(ending):
            return True
        return self._goes_on_without(ending)

    def _goes_on_in_parts(self, ending: GangResult, journals: Journals) -> bool:
        """Report whether the run goes on with smaller micro-batches, because a step ran out of memory."""
        number = self.record.gradient_accumulation
        if ending.code != OUT_OF_MEMORY or number is None or self.stops.came:
            return False
        built = journals.events("built")["chief"][-1]
        larger = next_accumulation(number, self.config.input.train.batch_size, built["num_replicas"])
        assert larger is not None, "the task has smaller micro-batches, as its exit code says"
        self.tried.append(number)
        self.record.gradient_accumulation = larger
        if self.place in (None, ending.place):  # else the supervisor of that task has said it
            ending = replace(ending, reason=reason_of(ending, journals))
        self.restarts.go_on_in_parts(ending, larger)
        return True

    def _goes_on_without(self, ending: GangResult) -> bool:
        """Report whether the run goes on with one worker less, as if it was started again with that number."""
        settings = self.config.cluster
        is_gang = self.config.strategy.name == "multi_worker" and self.place is None
        is_lost = (ending.is_loss or ending.did_not_start) and not ending.place.is_evaluator
        is_enough = settings.num_workers > (settings.min_workers or settings.num_workers)
        if not (is_gang and is_lost and is_enough) or self.stops.came:
            return False
        # Its file keeps the full number, with which a later start of the same command begins again.
        self.config = replace(self.config, cluster=replace(settings, num_workers=settings.num_workers - 1))
        self.restarts.go_on_without(ending, self.config.cluster)
        return True

    def _tasks(self) -> list[Task]:
        # Each start uses new ports, because the old ones may stay in use for a while.
        places = local_places(self.config) if self.place is None else [self.place]
        tasks = []
        for place in places:
            prefix = self.prefix
            env = task_env(self.env, place, self.record.generation, self.record.gradient_accumulation)
            if place.is_chief and not prefix and shows_live(self.config.run.progress, sys.stderr):
                START_STATUS.show("importing TensorFlow")
            if not place.is_chief:  # the chief writes to the terminal itself, like a single process
                env, prefix = {**env, QUIET_ERRORS: "1"}, f"{prefix}[{place.name}] "
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
    result = {**_QUIET, **env, "TF_CONFIG": place.tf_config, GENERATION: str(generation)}
    if not place.tf_config:
        del result["TF_CONFIG"]
    result.pop(FOUND_ACCUMULATION, None)  # `env` is that of a task, if its code starts another run
    if gradient_accumulation is not None:
        result[FOUND_ACCUMULATION] = str(gradient_accumulation)
    home = Path(runner.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):  # the package is a checkout that is not installed
        result["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), env.get("PYTHONPATH"))))
    return result


def say_errors(journals: Journals, prefix: str = "") -> None:
    """Print the errors of all tasks, each error once, except those that the chief has printed."""
    errors = journals.events("error")
    shown = {line["error"] for line in errors.get("chief", ())}
    for task, lines in errors.items():
        for line in lines:
            if line["error"] not in shown and line.get("said"):
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
    if errors and not ending.is_loss:
        return f"{'' if place.is_chief else f'{place.name}: '}{errors[-1]['error']}"
    return ending.reason
