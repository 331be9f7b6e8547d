"""Heartbeats of a task on a pipe to its supervisor: one byte per second while its Python runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

HEARTBEAT = "RUNNER_HEARTBEAT_FD"
"""Environment variable with the file descriptor to which a child writes heartbeats."""

PERIOD_SECS = 1.0
_BEAT = b"."
_STOP = b"s"


class Heartbeat:
    """Sends a task's heartbeats; does nothing without a supervisor."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._descriptor = int(env.get(HEARTBEAT, -1))
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)  # processes that the task starts must not inherit it

    def start(self, period_secs: float = PERIOD_SECS) -> None:
        """Send heartbeats from a thread for as long as the process lives."""
        if self._descriptor >= 0:
            threading.Thread(target=self._beat, args=(period_secs,), daemon=True, name="heartbeat").start()

    def ask_to_stop(self) -> None:
        """Ask the supervisor to stop the whole run, with a checkpoint. For a server, which cannot save itself."""
        with contextlib.suppress(OSError):  # the supervisor is gone, or there is none
            os.write(self._descriptor, _STOP)

    def _beat(self, period_secs: float) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone; the lifeline ends us
            while True:
                os.write(self._descriptor, _BEAT)
                time.sleep(period_secs)


class HeartbeatMonitor:
    """Receives one task's heartbeats in its supervisor.

    Attributes:
      wants_to_stop: the task asked for the end of the run.
    """

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        os.set_blocking(descriptor, False)
        self.wants_to_stop = False
        self._descriptor = descriptor
        self._clock = clock
        self._last_heard_at = clock()  # so that a task that freezes before its first heartbeat is noticed, too

    def silent_secs(self) -> float:
        """Return the seconds since the last heartbeat, or since the task was started."""
        with contextlib.suppress(BlockingIOError):  # nothing more has come
            while True:
                heard = os.read(self._descriptor, 4096)
                if not heard:  # the task has ended
                    break
                self._last_heard_at = self._clock()
                if _STOP in heard:
                    self.wants_to_stop = True
        return self._clock() - self._last_heard_at

    def forgive(self) -> None:
        """Start counting silent seconds anew, because heartbeats were not read for a while."""
        self._last_heard_at = self._clock()

    def close(self) -> None:
        os.close(self._descriptor)
