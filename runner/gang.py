"""The tasks of one start of a run: started together, watched together, and none outlives the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.cluster import Cluster
from runner.launcher import Process, start_process
from runner.outcome import FINISHED, INTERRUPTED, PEER_LOST

POLL_SECS = 0.1
SETTLE_SECS = 5.0
"""How long the others may take to end by themselves after one has failed: what they say may be the reason."""
SAVE_SECS = 60.0
"""How long the others may take after one was asked to stop, and has done so."""


@dataclass(frozen=True, eq=False)
class Task:
    """A process to be started.

    Attributes:
      place: who it is.
      argv, env: its command and whole environment.
      prefix: of each line that it says; '': it talks to our terminal.
      serves: it does what others ask it to, and ends when it is told to.
    """

    place: Cluster
    argv: Sequence[str]
    env: Mapping[str, str]
    prefix: str = ""
    serves: bool = False


@dataclass(frozen=True)
class Ending:
    """How a gang ended.

    Attributes:
      code: the exit code of the task that decided; negative: the signal that killed it.
      task: that task.
    """

    code: int
    task: Task


class Gang:
    """The processes of `tasks`, the chief first. `run` starts them and returns when none is left."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._running: dict[Task, Process] = {}
        self._ended: list[tuple[Task, int]] = []
        self._decided: tuple[Task, int] | None = None
        self._until = float("inf")

    def start(self) -> None:
        """Starts all."""
        for task in self._tasks:
            self._running[task] = start_process(task.argv, task.env, task.prefix)

    def wait(self) -> Ending:
        """Returns when all have ended, by themselves or because one of them did."""
        while self._waits_for_somebody():
            self._collect()
            if time.monotonic() > self._until:
                break
            time.sleep(POLL_SECS)
        self.kill()
        self._close()
        task, code = self._decided or (self._tasks[0], FINISHED)
        return Ending(code, task)

    def ask_to_stop(self) -> None:
        """Asks those that train or evaluate to save and end; servers are needed for that."""
        for task, process in self._running.items():
            if not task.serves:
                process.ask_to_stop()

    def kill(self) -> None:
        """SIGKILL to all that is left. Safe in a signal handler."""
        for process in list(self._running.values()):
            process.kill()

    def _waits_for_somebody(self) -> bool:
        return any(not task.serves for task in self._running)

    def _collect(self) -> None:
        for task, process in list(self._running.items()):
            code = process.wait(0)
            if code is None:
                continue
            process.kill()  # what the task may have left running
            process.close()
            del self._running[task]
            self._note(task, code)

    def _note(self, task: Task, code: int) -> None:
        """One has ended: what becomes of the others."""
        if code == FINISHED:
            return
        if self._decided is None:
            self._until = time.monotonic() + (SAVE_SECS if code == INTERRUPTED else SETTLE_SECS)
            if code == INTERRUPTED:
                self.ask_to_stop()
        if self._decided is None or self._decided[1] == PEER_LOST:  # who lost a peer is not the reason
            self._decided = (task, code)

    def _close(self) -> None:
        for process in self._running.values():
            process.close()
        self._running = {}
