"""Spare processes that take the place of tasks that are started again (`cluster.standby`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runner.gang import Task
from runner.launcher import Process, start_process

LOOK_SECS = 0.5


class Spares(Protocol):
    """Where the processes of tasks come from."""

    def launch(self, task: Task) -> Process:
        """A process that does what `task` says."""

    def tend(self, tasks: Sequence[Task]) -> None:
        """Called often while `tasks` run."""

    def close(self) -> None:
        """Ends the spares that were not needed."""


class NoSpares:
    """Each task is a new process."""

    def launch(self, task: Task) -> Process:
        return start_process(task.argv, task.env, task.prefix)

    def tend(self, tasks: Sequence[Task]) -> None: ...

    def close(self) -> None: ...


class Standby:
    """One spare for each task; they are started when training has taken its first step, to stay out of its way.

    Args:
      argv: the command of a spare.
      trains: whether the tasks of this start have taken their first step.
    """

    def __init__(self, argv: Sequence[str], trains: Callable[[], bool]) -> None:
        self._argv, self._trains = argv, trains
        self._waiting: dict[str, Process] = {}
        self._started: set[str] = set()
        self._looked = 0.0

    def launch(self, task: Task) -> Process:
        name = task.place.name
        self._started.discard(name)
        spare = self._waiting.pop(name, None)
        if spare is None:
            return start_process(task.argv, task.env, task.prefix)
        if spare.wait(0) is not None or not spare.order(_order(task)):
            spare.kill()
            spare.close()
            return start_process(task.argv, task.env, task.prefix)
        return spare

    def tend(self, tasks: Sequence[Task]) -> None:
        due = [task for task in tasks if task.place.name not in self._started]
        if not due or time.monotonic() - self._looked < LOOK_SECS:
            return
        self._looked = time.monotonic()
        if self._trains():
            for task in due:
                self._started.add(task.place.name)  # once: one that dies is not needed to train
                self._waiting[task.place.name] = start_process(self._argv, _quiet(task.env), task.prefix, orders=True)

    def close(self) -> None:
        for spare in self._waiting.values():
            spare.kill()
        for spare in self._waiting.values():
            spare.close()
        self._waiting = {}


def _order(task: Task) -> str:
    """What a spare is told; a task is its config file, after the command that starts Python."""
    return json.dumps({"argv": list(task.argv[-1:]), "env": dict(task.env)})


def _quiet(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a spare: it is no task yet."""
    return {name: value for name, value in env.items() if name not in ("TF_CONFIG", "RUNNER_GENERATION")}
