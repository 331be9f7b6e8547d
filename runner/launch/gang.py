"""The tasks of one start of a run: they are started, watched and ended together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from runner.distribute.cluster import ALONE, Cluster
from runner.system.child_process import Process, describe_exit, start_process
from runner.system.exit_codes import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    PEER_LOST,
    USER_ERROR,
    is_loss,
    rank_of,
)  # fmt: skip
from runner.system.heartbeat import PERIOD_SECS
from runner.system.start_status import START_STATUS

POLL_SECS = 0.1
LOOK_SECS = 0.5
"""Seconds between two looks around, which read small files on shared storage."""
SETTLE_SECS = 5.0
"""Seconds that other tasks may take to end after one failed; their messages may show the reason."""
NOTICE_SECS = 1.0
"""Like SETTLE_SECS, after a task was killed: other tasks may need more than 5 s to notice it."""
SAVE_SECS = 60.0
"""Seconds that other tasks may take after one was asked to stop and has saved, or after the chief has finished."""
SILENCE_SECS = 60.0
"""Seconds without a heartbeat after which a task counts as frozen. Imports may block heartbeats for some seconds."""
SAID_SILENCE_SECS = 30.0
"""Seconds without a heartbeat after which a message reports a task for which no other task waits."""
FROZEN_GRACE_SECS = 5.0
"""Seconds that a frozen task may take to save after it was asked to stop."""
SLEPT_SECS = 5.0
"""If the tasks were last checked this many seconds ago, this process itself was stopped, or the machine slept."""

_REASONS = {
    PEER_LOST: "lost its connection to a peer",
    OUT_OF_MEMORY: "ran out of memory in a step of training",
}
"""Exit code that a task has for its supervisor only -> what it says."""


@dataclass(frozen=True, eq=False)
class Task:
    """A process to start.

    Attributes:
      place: the process's place in the cluster.
      argv, env: its command and its whole environment.
      prefix: text before each line that it prints; '': it writes to this terminal directly.
    """

    place: Cluster
    argv: Sequence[str]
    env: Mapping[str, str]
    prefix: str = ""


def is_replaceable(place: Cluster) -> bool:
    """Report whether the other tasks continue without this one until it is started again."""
    return place.is_evaluator or (place.is_server and place.task_type == "worker")


def _joins_others(place: Cluster) -> bool:
    """Report whether a task connects to the others; an evaluator only reads their checkpoints."""
    return bool(place.tasks) and place.task_type != "evaluator"


def start_cold(task: Task) -> Process:
    """Start `task` by its command, in a process that imports TensorFlow itself."""
    env = dict(task.env)
    if not task.prefix:
        # This process keeps the terminal until the task, which has no prefix if it draws a live line, asks for it.
        env |= START_STATUS.lend("importing TensorFlow")
    return start_process(task.argv, env, task.prefix)


@dataclass(frozen=True)
class GangResult:
    """The way in which a gang ended.

    Attributes:
      code: exit code of the task that decided the end; negative: the signal that killed it.
      place: the place of that task.
      reason: what happened to that task, in words; '' if all tasks have finished.
      did_not_start: the task could not be started, or did not connect to the others.
    """

    code: int
    place: Cluster
    reason: str = ""
    did_not_start: bool = False

    @property
    def is_loss(self) -> bool:
        """Report whether a task was lost for a reason outside of it, so that starting all tasks again may help."""
        return is_loss(self.code)


@dataclass(eq=False, kw_only=True)
class Gang:
    """The processes of some tasks, the chief's first.

    Attributes:
      start_timeout_secs: seconds that the tasks of a cluster may take to connect.
      freeze_secs: seconds without a heartbeat after which a task is killed (`run.freeze_secs`); None: SILENCE_SECS if
        other tasks wait for it, else it is not killed.
      start: starts a task.
      say: prints a message.
      joined: returns the names of the tasks that have connected to the others; None: all have.
      may_replace: called when a task is lost without which the others can continue; reports whether to start it again,
        and may wait before.
      look_around: called every LOOK_SECS; returns an event outside of this gang that ends its tasks. If the event is an
        interruption, the tasks are asked to stop.
      asked_to_stop: names of tasks that were asked to stop, of servers and of tasks outside of this gang.
    """

    start_timeout_secs: float = float("inf")
    freeze_secs: float | None = None
    start: Callable[[Task], Process] = start_cold
    say: Callable[[str], None] = print
    joined: Callable[[], Collection[str] | None] = lambda: None
    may_replace: Callable[[GangResult], bool] = lambda ending: False
    look_around: Callable[[], GangResult | None] = lambda: None
    asked_to_stop: set[str] = field(default_factory=set, init=False)
    _running: dict[Task, Process] = field(default_factory=dict, init=False)
    _asked_at: float = field(default=float("inf"), init=False)

    def run(self, tasks: Sequence[Task], stops: Sequence[int] = ()) -> GangResult:
        """Start `tasks`, wait until all have ended, and return how they ended.

        Args:
          tasks: the tasks.
          stops: a sequence that grows when a stop is requested; a request that comes while tasks start reaches all of
            them.
        """
        self._reset(tasks)
        for task in tasks:
            try:
                self._running[task] = self.start(task)
            except OSError as error:  # there is no memory, or no process, for it
                self._give_up([task], f"could not be started: {error}")
                break
        if stops:
            self.ask_to_stop()
        serves_only = all(task.place.is_server for task in tasks)
        # When no other task is left, the servers are no longer needed.
        while any(serves_only or not task.place.is_server for task in self._running):
            self._check_tasks()
            remaining = list(self._running.values())
            if remaining:
                remaining[0].wait(POLL_SECS)  # the chief while it runs; the other tasks end with it
        self.kill()
        for process in self._running.values():
            process.close()
        self._running = {}
        return self._ending or GangResult(FINISHED, tasks[0].place)

    def ask_to_stop(self) -> None:
        """Ask the tasks that train or evaluate to save and end, but not the servers, which are needed for saving."""
        self._asked_at = min(self._asked_at, time.monotonic())
        for task, process in list(self._running.items()):
            if not task.place.is_server:
                process.ask_to_stop()

    def kill(self) -> None:
        """Send SIGKILL to all remaining processes. Safe in a signal handler."""
        for process in list(self._running.values()):
            process.kill()

    def _reset(self, tasks: Sequence[Task]) -> None:
        """Set the state of a start in which no task runs yet."""
        self._ending: GangResult | None = None  # how this gang ends; None: nothing has decided that
        self._deadlines: dict[Task, float] = {}  # task -> when it is killed
        now = time.monotonic()
        self._checked_at = now
        self._looks_around_at = now
        self._join_until = now + self.start_timeout_secs
        self._joining = [task for task in tasks if _joins_others(task.place)]
        self._has_others = [task.place for task in tasks] != [ALONE]
        self._is_silent = False
        self._asked_at = float("inf")

    def _check_tasks(self) -> None:
        """Check all tasks once: which have ended, are frozen or have not connected."""
        now = time.monotonic()
        has_slept = now - self._checked_at > SLEPT_SECS
        self._checked_at = now
        silences: dict[Task, float] = {}
        for task, process in list(self._running.items()):
            code = process.wait(0)
            monitor = process.monitor
            if has_slept:  # this process could not hear them
                monitor.forgive()
            silent_secs = monitor.silent_secs()
            if code is not None:
                self._end(task, code)
            # Also those that are nearly silent too long: `_end_silent` chooses among all that fell silent together.
            elif silent_secs > self._longest_silence(now) - 2 * PERIOD_SECS:
                silences[task] = silent_secs
            elif now > self._deadlines.get(task, float("inf")):
                self._end_overdue(task, silent_secs)
            elif monitor.wants_to_stop:
                monitor.wants_to_stop = False
                self.asked_to_stop.add(task.place.name)
                self.ask_to_stop()
            elif not self._has_others:
                self._say_if_silent(silent_secs)
        if max(silences.values(), default=0.0) > self._longest_silence(now):
            self._end_silent(silences)
        if now >= self._looks_around_at:
            self._looks_around_at = now + LOOK_SECS
            self._look_around()
        if self._joining and now > self._join_until:
            self._check_joined()

    def _look_around(self) -> None:
        """End this gang if something outside of it is a reason to."""
        elsewhere = self.look_around()
        if elsewhere is None or self._ending is not None:
            return
        if elsewhere.code == INTERRUPTED:
            self.asked_to_stop.add(elsewhere.place.name)
        self._end_others(elsewhere)

    def _longest_silence(self, now: float) -> float:
        """Return the seconds without a heartbeat after which a task is killed; infinity: it is not killed for that."""
        if self._has_others:
            return self.freeze_secs or SILENCE_SECS
        # A task alone that is known to be silent and was asked to stop does not stop: the user wants it to end.
        ignores_stop = self._is_silent and now - self._asked_at > FROZEN_GRACE_SECS
        if ignores_stop:
            return SAID_SILENCE_SECS
        return self.freeze_secs or float("inf")

    def _say_if_silent(self, silent_secs: float) -> None:
        """Print a message when a task for which no other task waits freezes, and when it runs again.

        Without `freeze_secs` the task is not killed, because it may be in a debugger, or the laptop may have slept; the
        user decides.
        """
        if silent_secs > SAID_SILENCE_SECS and not self._is_silent:
            self._is_silent = True
            text = f"the task has sent no heartbeat for {silent_secs:.0f} s"
            if self.freeze_secs is None:
                text += (
                    ": it is suspended, waits for memory, or is in native code that blocks Python. It is not killed; "
                    "with run.freeze_secs=60 it would be, and started again from its newest checkpoint"
                )
            else:
                text += f"; it is killed after run.freeze_secs={self.freeze_secs:g}"
            self.say(f"{text}.")
        elif silent_secs < SAID_SILENCE_SECS / 2 and self._is_silent:
            self._is_silent = False
            self.say("the task sends heartbeats again.")

    def _end(self, task: Task, code: int, reason: str = "") -> None:
        """Remove a task that has ended, and decide what happens to the others."""
        self._remove(task)
        if code == FINISHED:
            if task.place.is_chief:  # the evaluator, if any, gets the last checkpoint from the chief before this
                # The evaluator may take longer, to evaluate this checkpoint.
                others = [other for other in self._running if other.place.task_type != "evaluator"]
                self._limit_time(SAVE_SECS, others)
            return
        name = task.place.name if self._has_others else "the task"
        reason = reason or _REASONS.get(code) or describe_exit(code)
        ending = GangResult(code, task.place, f"{name} {reason}")
        if self._ending is None:
            is_dispensable = ending.is_loss and is_replaceable(task.place)
            if is_dispensable and self.may_replace(ending):
                self._running[task] = self.start(task)
                return
            self._end_others(ending)
        # Of several tasks that end, the one whose end is most likely the cause of the others' decides.
        if self._ending is None or rank_of(ending.code) < rank_of(self._ending.code):
            self._ending = ending

    def _end_others(self, ending: GangResult) -> None:
        """End the other tasks because of the end of one task: by a stop request if it was interrupted, else by a limit
        of seconds.
        """
        if ending.code != INTERRUPTED:
            # At once: nothing is saved, for which servers would be needed.
            self._limit_time(0, [task for task in self._running if task.place.is_server])
            self._ending = ending
        elif not self._deadlines:  # else the others already end
            self.ask_to_stop()
        settle_secs = SETTLE_SECS
        if ending.code == INTERRUPTED:
            settle_secs = SAVE_SECS
        elif ending.code == -signal.SIGKILL:
            settle_secs = NOTICE_SECS
        self._limit_time(settle_secs, self._running)

    def _end_silent(self, silences: Mapping[Task, float]) -> None:
        """Kill one of the tasks that send no heartbeats; the others may only wait for it.

        Args:
          silences: task -> seconds without a heartbeat.
        """
        # A coordinator waits for a frozen worker in TensorFlow, and sends no heartbeats: the worker goes first.
        task = max(silences, key=lambda task: (is_replaceable(task.place), silences[task]))
        # The others may have been silent only because they waited for this task.
        for process in self._running.values():
            process.monitor.forgive()
        self._kill_frozen(task, silences[task])

    def _kill_frozen(self, task: Task, silent_secs: float) -> None:
        """Kill a frozen task, and treat it like a killed one."""
        self._running[task].kill()
        self._end(task, -signal.SIGKILL, f"froze: no heartbeat for {silent_secs:.0f} s")

    def _end_overdue(self, task: Task, silent_secs: float) -> None:
        """Kill a task that did not end after another task had ended.

        If this task sends no heartbeats, it is taken for the reason why the other ended, unless a task reported an
        error. A task that imports TensorFlow also sends no heartbeats.
        """
        has_error = self._ending is not None and self._ending.code in (FAILED, USER_ERROR, OUT_OF_MEMORY)
        if silent_secs > SETTLE_SECS / 2 and not has_error:
            self._kill_frozen(task, silent_secs)  # its silence is the reason why the others ended
        else:
            self._remove(task)

    def _remove(self, task: Task) -> None:
        """Kill what is left of a task, and do not watch it any more."""
        process = self._running.pop(task)
        process.kill()  # also a task that has ended: it may have left processes behind
        process.close()

    def _limit_time(self, secs: float, tasks: Iterable[Task]) -> None:
        """Limit the time in which these tasks must end by themselves. A task that has a limit keeps it."""
        for task in tasks:
            self._deadlines.setdefault(task, time.monotonic() + secs)

    def _check_joined(self) -> None:
        """End this gang if a task has not connected to the others in the time that it had for that."""
        joined = self.joined()  # once for all tasks: it reads the journals of all of them
        missing = []
        for task in self._joining:
            if joined is not None and task.place.name not in joined:
                missing.append(task)
        if missing and self._ending is None:
            limit = f"cluster.start_timeout_secs={self.start_timeout_secs:g}"
            self._give_up(missing, f"did not connect to the other tasks within {limit}")
        self._joining = []

    def _give_up(self, missing: Sequence[Task], reason: str) -> None:
        """End all tasks, because those that are missing cannot be started."""
        names = ", ".join(task.place.name for task in missing)
        self._ending = GangResult(FAILED, missing[0].place, f"{names} {reason}", did_not_start=True)
        self._limit_time(0, self._running)
