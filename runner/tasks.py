"""The tasks of one run: who they are, how they are started, and started again when one of them is lost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.cluster import Cluster
from runner.config import TRAINING_RUNS, Config
from runner.ending import read_ending, remove_ending, write_ending
from runner.errors import QUIET_ERRORS
from runner.gang import Ending, Gang, Task
from runner.journal import journal_path, read_journal
from runner.local_cluster import local_places
from runner.outcome import FAILED, INTERRUPTED, Outcome
from runner.peers import NoPeers, Peers
from runner.restarts import Restarts, latest_step
from runner.shipping import RunRecord
from runner.spares import NoSpares, Spares, Standby
from runner.stopping import StopRequests


@dataclass
class Journals:
    """What the tasks of a run noted since `mark`."""

    model_dir: Path
    _sizes: Mapping[Path, int] = field(default_factory=dict)

    def mark(self) -> Journals:
        """From now on."""
        self._sizes = {path: path.stat().st_size for path in self.model_dir.glob("events.*.jsonl")}
        return self

    def lines(self, role: str = "chief", index: int = 0) -> list[dict[str, Any]]:
        path = journal_path(self.model_dir, role, index)
        return read_journal(path, self._sizes.get(path, 0))[0]

    def of_event(self, role: str, event: str, index: int = 0) -> list[dict[str, Any]]:
        """The lines of `event`."""
        return [line for line in self.lines(role, index) if line.get("event") == event]

    def names_of(self, event: str) -> list[str]:
        """Names of all tasks that have noted `event`."""
        return [place.name for place in self.places() if self.of_event(place.role, event, place.task_index)]

    def places(self) -> list[Cluster]:
        """Whose journals there are."""
        parts = [path.name.split(".")[1].rpartition("-") for path in sorted(self.model_dir.glob("events.*.jsonl"))]
        return [Cluster(role, int(index), {"chief": ("",)}) for role, _, index in parts]

    def has(self, task: Task, event: str) -> bool:
        """Whether `task` has noted `event`."""
        return bool(self.of_event(task.place.role, event, task.place.task_index))


@dataclass
class Tasks:
    """The tasks of one run.

    Args:
      argv: the command of each; the same, since TF_CONFIG says who it is.
      env: the environment of the task at a place, for a generation.
      prefix: of all that they say.
      record: counts the starts.
      place: the task of this process, in a cluster that something else started; None: all tasks are started here.
      peers: the supervisors of its other tasks.
    """

    config: Config
    argv: Sequence[str]
    env: Callable[[Cluster, int], Mapping[str, str]]
    stops: StopRequests
    restarts: Restarts
    record: RunRecord
    prefix: str = ""
    place: Cluster | None = None
    peers: Peers = field(default_factory=NoPeers)

    def run(self, answer: str) -> Ending:
        """Runs them to their end.

        Args:
          answer: what they do when they are asked to stop, for the person who asked.
        """
        started = Journals(self.restarts.model_dir)
        tasks: list[Task] = []

        def look_around() -> Ending | None:
            spares.tend(tasks)
            return self.peers.look()

        gang = Gang(
            start_timeout_secs=self.config.cluster.start_timeout_secs,
            has_joined=lambda task: started.has(task, "joined"),
            may_replace=lambda ending: self.restarts.allow(ending, alone=True),
            look_around=look_around,
            launch=lambda task: spares.launch(task),
        )
        with self.stops.watch(gang, answer), contextlib.closing(build_spares(self.config, started)) as spares:
            while True:
                tasks = self._tasks()
                failed = self.peers.gather(self.record.generation, self.stops.came)
                if failed is not None:
                    return failed
                if self.stops.came:  # asked to stop before there was anything to stop
                    return Ending(FAILED, tasks[0])
                if self.config.command in TRAINING_RUNS:
                    remove_ending(self.restarts.model_dir)
                started.mark()
                ending = self.peers.reason(gang.run(tasks, self.stops.came))
                if ending.code == INTERRUPTED:
                    return replace(ending, reason=self._who_was_asked(gang, started))
                if not ending.is_loss or not self.restarts.allow(ending):
                    return ending
                self.record.generation += 1
                self.record.save(self.restarts.model_dir)

    def _who_was_asked(self, gang: Gang, journals: Journals) -> str:
        """Who was asked to stop, and the others with it; '' where the whole run was."""
        if self.stops.came:
            return ""
        # Those that we asked in turn have noted it, too.
        return ", ".join(sorted(gang.asked_to_stop or journals.names_of("asked_to_stop")))

    def _tasks(self) -> list[Task]:
        # At each start other ports: the old ones may be in use for a while.
        places = local_places(self.config) if self.place is None else [self.place]
        return [Task(place, self.argv, self._env(place), self._prefix(place)) for place in places]

    def _env(self, place: Cluster) -> Mapping[str, str]:
        env = self.env(place, self.record.generation)
        return env if place.is_chief else {**env, QUIET_ERRORS: "1"}

    def _prefix(self, place: Cluster) -> str:
        """The chief talks to the terminal itself, as a single process does."""
        return self.prefix if place.is_chief else f"{self.prefix}[{place.name}] "


def build_spares(config: Config, started: Journals) -> Spares:
    """The spares that `cluster.standby` asks for."""
    if not (config.cluster.standby and config.max_restarts):
        return NoSpares()
    return Standby(spare_argv(), lambda: bool(started.of_event("chief", "first_step")))


def spare_argv() -> list[str]:
    """The command of a spare process."""
    return [sys.executable, "-P", "-m", "runner.standby"]


def say_errors(journals: Journals, prefix: str = "") -> None:
    """Says the errors of all tasks, those that the chief has said left out and each once."""
    said = {line["error"] for line in journals.of_event("chief", "error")}
    for place in journals.places():
        for line in journals.of_event(place.role, "error", place.task_index):
            if line["error"] not in said and line.get("said"):
                said.add(line["error"])
                for text in str(line["said"]).splitlines():
                    print(f"{prefix}[{place.name}] {text}", file=sys.stderr, flush=True)


def error_of(ending: Ending, journals: Journals) -> str:
    """Why a run ended, in one line; '' when it finished."""
    place = ending.task.place
    noted = journals.of_event(place.role, "error", place.task_index)
    if noted and not ending.is_loss:
        return f"{'' if place.is_chief else f'{place.name}: '}{noted[-1]['error']}"
    return ending.reason


def note_ending(model_dir: Path, outcome: Outcome, generation: int) -> None:
    """Says that training is over, where the chief's task could not any more: an evaluator waits for it."""
    known = read_ending(model_dir)
    if not known.is_over or known.generation != generation:
        write_ending(model_dir, outcome.status, latest_step(model_dir) or 0, generation)
