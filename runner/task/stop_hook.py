"""SIGTERM in a task: training ends with a checkpoint, as a hook that every loop asks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from runner.hooks.hook import Hook, Interrupted, Run
from runner.system.heartbeat import Heartbeat
from runner.system.standard_streams import say_at_once
from runner.tracking.journal import Journal, NullJournal
from runner.types import StepResult


class StopRequest(Hook):
    """SIGTERM as a hook, and Ctrl-C where there is no supervisor between: training ends with a checkpoint after the
    loop that is under way; an evaluation or prediction, and all that comes before the first batch, ends at once.

    Args:
      signals: what counts as a request. After one, Ctrl-C does what it always does.
      answer: said on stderr when the first request comes while batches run.

    Attributes:
      note_work: called when there is something to save.
      was_heeded: whether something was left undone for it.
      journal: is told when this process was asked, and not another one that it ends with.
    """

    journal: Journal | NullJournal = NullJournal()

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,), answer: str = "") -> None:
        self.was_heeded = False
        self._signals, self._answer = signals, answer
        self._came = self._because = ""
        self._is_under_way = False
        self._before: dict[signal.Signals, Any] = {}
        self.note_work: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Take over the signals. Again after the strategy is built: TensorFlow may install a handler of its own."""
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            for number in self._signals:
                self._before.setdefault(number, signal.getsignal(number) or signal.SIG_DFL)  # None: not Python's
                signal.signal(number, self._note)

    def uninstall(self, then: Any = None) -> None:
        """Give the signals back to who had them, or to the handler `then`."""
        for number, handler in self._before.items():
            signal.signal(number, handler if then is None else then)
        self._before = {}

    def request(self, reason: str) -> None:
        """Ask as SIGTERM does, from another thread of this process."""
        self._because = reason
        if signal.SIGTERM in self._before:
            os.kill(os.getpid(), signal.SIGTERM)  # what waits in the main thread is interrupted by a signal alone
        else:  # only the main thread may handle signals, and this run is in another
            self._came = reason

    def begin(self, run: Run) -> None:
        self._is_under_way = True
        self.note_work()

    def after_step(self, run: Run, result: StepResult) -> None:
        self._heed(run)

    def after_batches(self, run: Run, examples: int) -> None:
        self._heed(run)

    def end(self, run: Run) -> None:
        # A worker that was asked has all of them stop.
        self.was_heeded = self.was_heeded or run.interrupted

    def note(self) -> None:
        """Tell the journal, once, where somebody has asked."""
        if self._came:
            self.journal.event("asked_to_stop", signal=self._came)
            self.journal = NullJournal()

    def _heed(self, run: Run) -> None:
        if self._came:
            self.note()
            self.was_heeded = True
            run.interrupt(self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came and number == signal.SIGINT:
            signal.default_int_handler(number, frame)  # raises KeyboardInterrupt
        self._came = self._because or signal.Signals(number).name
        if not self._is_under_way:  # nothing is lost, and tracing can take minutes
            raise Interrupted(self._came)
        say_at_once(self._answer)


class ForwardedStop(StopRequest):
    """SIGTERM of a server: it goes on; its supervisor has the coordinator save and end, and only then ends it."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self._heartbeat = heartbeat

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._heartbeat.ask_to_stop()
