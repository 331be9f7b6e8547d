"""The live line of a command until its task draws one: the current phase and the seconds so far.

While the task imports TensorFlow, its Python cannot draw for seconds. So the process of the command draws the line at
first, and leaves the terminal to the task when the task asks for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

SCREEN = "RUNNER_SCREEN_FD"
"""Environment variable with the file descriptor on which a task asks for the terminal."""

ANSWER_SECS = 5.0
"""Seconds that a task waits for the answer; without a limit, a stopped supervisor would block it."""


def is_for(argv: Sequence[str]) -> bool:
    """Report whether a command with these words draws a live line: it runs something, on a terminal."""
    if any(word.startswith("-") and word not in ("-m", "--multirun") for word in argv):
        return False
    mode = "auto"
    for word in argv:
        if word.startswith("run.progress="):  # the last one counts
            mode = word.removeprefix("run.progress=")
    return shows_live(mode, sys.stderr)


def shows_live(mode: str, stream: Any) -> bool:
    """Report whether `run.progress` means a live line on `stream`."""
    if mode != "auto":
        return mode == "rich"
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


class StartStatus:
    """A spinner with a phase and the time since the first one. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._live: Any = None
        self._task: Any = None

    def show(self, phase: str) -> None:
        """Show `phase` instead of the previous one."""
        with self._lock:
            if self._live is not None:
                self._live.update(self._task, description=phase)
                return
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._live.add_task(phase, total=None)
            self._live.start()

    def update(self, phase: str) -> None:
        """Show `phase`, if a phase is shown already."""
        with self._lock:
            if self._live is not None:
                self.show(phase)

    def say(self, text: str) -> bool:
        """Print a line above the spinner. Return False if no spinner is shown, and nothing was printed."""
        with self._lock:
            if self._live is None:
                return False
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return True

    def stop(self) -> None:
        """Remove the line; may be called several times."""
        with self._lock:
            live = self._live
            self._live = None
            if live is not None:
                live.stop()

    def lend(self, phase: str) -> dict[str, str]:
        """Show `phase` until a task asks for the terminal, or ends.

        Returns:
          Environment variables for that task; {}: nothing is shown. The file descriptor that they name belongs to the
          task, so close it in this process once the task has started.
        """
        with self._lock:
            if self._live is None:
                return {}
            self.show(phase)
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._listen, args=(ours,), daemon=True, name="screen").start()
        return {SCREEN: str(theirs.detach())}

    def _listen(self, task: socket.socket) -> None:
        with task, contextlib.suppress(OSError):
            task.recv(1)  # b"": the task has ended
            self.stop()
            task.sendall(b".")


START_STATUS = StartStatus()
"""The live line of this process, which has one terminal."""


def take_terminal(env: MutableMapping[str, str]) -> None:
    """Return when the supervisor has removed its live line; at once if there is none."""
    descriptor = env.pop(SCREEN, None)
    if descriptor is not None:
        with contextlib.suppress(OSError), socket.socket(fileno=int(descriptor)) as supervisor:
            supervisor.settimeout(ANSWER_SECS)
            supervisor.sendall(b".")
            supervisor.recv(1)
