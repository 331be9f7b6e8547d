"""Stop requests (SIGTERM, Ctrl-C, a closed terminal, a batch queue's notice), which are passed on to the tasks.

The first request asks the tasks to save a checkpoint, the second kills them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from runner.system.child_process import NOTICES, STOP_SIGNALS
from runner.system.standard_streams import say_at_once

GRACE_SECS = 60.0
"""Seconds that a task may take to save after it was asked to stop."""


class Stoppable(Protocol):
    """An object that can be asked to stop, or killed: one process, or several."""

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...


class StopRequests:
    """A context in which SIGTERM, Ctrl-C, SIGHUP, SIGUSR1 and SIGUSR2 ask every watched task to stop.

    A second signal, or a minute without an end, kills the tasks. One object serves all runs of a command: after a
    request, no further run begins.

    Attributes:
      came: the signals received, in order.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._watched: list[Stoppable] = []
        self._answer = ""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def may_go_on(self) -> bool:
        """Whether a run that these requests stop is meant to be resumed."""
        return True

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            for number in (*STOP_SIGNALS, signal.SIGALRM):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # under nohup the run is meant to outlive the terminal
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Handlers of the program around this command, such as submitit's, which queues the job again.
        handled_before = [number for number in NOTICES if callable(self._before.get(number))]
        self._before = {}
        for number in handled_before:
            if number in self.came:  # they get the signal when the run has saved
                signal.raise_signal(number)

    @contextmanager
    def watch(self, process: Stoppable, answer: str) -> Iterator[None]:
        """Pass requests to `process` inside this context, including a request that came before.

        Args:
          process: the process to stop.
          answer: what the process does when it is asked to stop, as a clause for the user.
        """
        self._watched.append(process)
        self._answer = answer
        if self.came:
            self._ask(process)
        try:
            yield
        finally:
            self._watched.remove(process)
            if self._before and not self._watched:
                # The minute is for saving: what follows, such as sending it to a bucket, has a limit of its own.
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _ask(self, process: Stoppable) -> None:
        process.ask_to_stop()
        if self._before:  # otherwise nobody handles the timer's signal
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)
        # A closed terminal sends SIGHUP twice: from the kernel and from the shell.
        is_second = len(self.came) > 1 and number != signal.SIGHUP
        # SIGALRM: the minute of `_ask` is over.
        if number == signal.SIGALRM or is_second:
            for process in self._watched:
                process.kill()
            return
        if self._watched:
            say_at_once(f"\nStopping: {self._answer}. Press Ctrl-C again to quit immediately.\n")
        for process in self._watched:
            self._ask(process)
