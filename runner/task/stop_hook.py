"""A hook for SIGTERM and a batch queue's notice in a task: training ends with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from runner.hooks.hook import Hook, Interrupted, Run
from runner.system.child_process import NOTICES
from runner.system.heartbeat import Heartbeat
from runner.system.standard_streams import say_at_once
from runner.tracking.journal import Journal, NullJournal
from runner.types import StepResult


class StopRequest(Hook):
    """A hook for SIGTERM, SIGUSR1 and SIGUSR2, and for Ctrl-C if there is no supervisor.

    Training ends with a checkpoint after the current loop. An evaluation or prediction ends at once, and so does
    anything before the first batch.

    Args:
      journal: records that this process, and not another one, was asked to stop.
      signals: the signals that request a stop. After the first of them, Ctrl-C has its usual effect.
      answer: text that is printed on stderr at the first request while batches run.
      note_work: called when there is something to save.

    Attributes:
      was_heeded: because of a request, some work was left undone.
    """

    def __init__(
        self,
        journal: Journal,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, *NOTICES),
        answer: str = "",
        note_work: Callable[[], None] = lambda: None,
    ) -> None:
        self.was_heeded = False
        self._journal = journal
        self._signals = signals
        self._answer = answer
        self._note_work = note_work
        self._request = ""  # the signal or other reason for which a stop was requested; "": none was
        self._reason_of_own_signal = ""  # why this process sends SIGTERM to itself
        self._is_under_way = False
        self._earlier_handlers: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the signal handlers. Call it again after the strategy is built, because TensorFlow may install its
        own.
        """
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            for number in self._signals:
                before = signal.getsignal(number)  # None: not Python's, such as faulthandler's
                is_free = before in (signal.SIG_DFL, self._handle)
                if number in NOTICES and not is_free:
                    continue  # user code has another use for it
                # `setdefault`: at a second call, `before` is this object's own handler.
                self._earlier_handlers.setdefault(number, before or signal.SIG_DFL)
                signal.signal(number, self._handle)

    def uninstall(self, then: Any = None) -> None:
        """Restore the earlier signal handlers, or install `then`."""
        for number, before in self._earlier_handlers.items():
            handler = before if then is None else then
            signal.signal(number, handler)
        self._earlier_handlers = {}

    def request(self, reason: str) -> None:
        """Request a stop like SIGTERM, from another thread of this process."""
        self._reason_of_own_signal = reason
        if signal.SIGTERM in self._earlier_handlers:
            os.kill(os.getpid(), signal.SIGTERM)  # only a signal interrupts a wait in the main thread
        else:  # only the main thread may handle signals, and this run is in another
            self._request = reason

    def begin(self, run: Run) -> None:
        self._is_under_way = True
        self._note_work()

    def after_step(self, run: Run, result: StepResult) -> None:
        self._heed(run)

    def after_batches(self, run: Run, examples: int) -> None:
        self._heed(run)

    def end(self, run: Run) -> None:
        # If one worker was asked to stop, all workers stop.
        self.was_heeded = self.was_heeded or run.interrupted

    def write_request(self) -> None:
        """Note a request in the journal, if there was one. Only the first call writes."""
        if self._request:
            self._journal.event("asked_to_stop", signal=self._request)
            self._journal = NullJournal()

    def _heed(self, run: Run) -> None:
        if self._request:
            self.write_request()
            self.was_heeded = True
            run.interrupt(self._request)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._request and number == signal.SIGINT:
            signal.default_int_handler(number, frame)  # raises KeyboardInterrupt
        self._request = self._reason_of_own_signal or signal.Signals(number).name
        if not self._is_under_way:  # nothing would be lost, and tracing can take minutes, so stop at once
            raise Interrupted(self._request)
        say_at_once(self._answer)


class ForwardedStop(StopRequest):
    """The handler for SIGTERM in a server: the server continues and tells its supervisor.

    The supervisor lets the coordinator save and end, and then ends the server.
    """

    def __init__(self, journal: Journal, heartbeat: Heartbeat) -> None:
        super().__init__(journal)
        self._heartbeat = heartbeat

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._heartbeat.ask_to_stop()
