"""Standard output and error that cannot end a run: results matter more than messages."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from runner.system.start_status import START_STATUS

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable that shows all errors with their traceback."""

LATER_JOB = "RUNNER_LATER_JOB"
"""Environment variable of the tasks of a sweep's job before which another one was started: what is the same in all
jobs, and asks for nothing, was said by that one."""

_GONE = (errno.EPIPE, errno.EIO)
"""Error numbers of streams without a reader: a closed pipe or terminal."""


class SteadyStream:
    """A text stream whose writes never fail: `| head -1`, a closed terminal, a log on a full disk."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._call_without_failing(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._call_without_failing(self._stream.flush)

    def _call_without_failing(self, call: Callable[..., object], *args: str) -> None:
        try:
            call(*args)
        except OSError as error:
            if error.errno in _GONE:
                # Nobody reads this stream any more. Redirect the descriptor as well: Python when it ends, and
                # TensorFlow's libraries write there directly.
                with contextlib.suppress(OSError, ValueError):
                    _redirect_to_nowhere(self._stream.fileno())


def keep_saying() -> None:
    """Make this process's stdout and stderr a SteadyStream each; what is written to a closed one is discarded."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise the next file to be opened would get this descriptor, and the messages.
            _redirect_to_nowhere(descriptor)
            stream = os.fdopen(descriptor, "w", closefd=False)
        setattr(sys, name, SteadyStream(stream))


@contextlib.contextmanager
def hidden_stderr(env: Mapping[str, str], but_for: type[BaseException] | None = None) -> Iterator[None]:
    """Hide what TensorFlow 2.21 writes to stderr before its log level applies; print it if the body raises an error.

    Does nothing if TF_CPP_MIN_LOG_LEVEL asks for information (0 or 1).

    Args:
      but_for: errors for which it stays hidden.
    """
    if env.get("TF_CPP_MIN_LOG_LEVEL", "0") < "2":
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as hidden, _redirected(2, hidden.fileno()) as kept:
        try:
            yield
        except BaseException as error:
            if but_for is None or not isinstance(error, but_for):
                hidden.seek(0)
                os.write(kept, hidden.read())
            raise


@contextlib.contextmanager
def _redirected(descriptor: int, target: int) -> Iterator[int]:
    """Redirect what is written to `descriptor` to `target` inside this context. Yield a descriptor of the file or
    terminal to which it was written before.
    """
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield kept
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def say(text: str) -> None:
    """Print a line on stderr, where messages for the user go; stdout is for results."""
    if not START_STATUS.say(text):
        # In one write, so that lines of several threads do not mix.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_object(is_wanted: bool) -> Iterator[dict[str, Any]]:
    """Yield the object that the command answers with, and if it `is_wanted` print it on stdout after this context.

    What this process, and those that it starts, write to stdout inside this context then goes to stderr.
    """
    answer: dict[str, Any] = {}
    if not is_wanted:
        yield answer
        return
    with _redirected(1, 2), contextlib.redirect_stdout(sys.stderr):
        yield answer
    print(json.dumps(answer, indent=2, default=str), flush=True)


def say_at_once(text: str) -> None:
    """Print `text` on stderr from a signal handler, where print might interrupt another print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _redirect_to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)
