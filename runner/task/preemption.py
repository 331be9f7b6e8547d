"""Preemption notices: a run saves and ends before its machine is taken away."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import ProxyHandler, Request, build_opener

from runner.config import user_code
from runner.config.schema import GCE, TRAINING_RUNS, Config
from runner.task.stop_hook import StopRequest

_log = logging.getLogger(__name__)

PERIOD_SECS = 1.0
TIMEOUT_SECS = 2.0
GCE_HOST = "GCE_METADATA_HOST"
"""Environment variable with another address of the metadata server, which Google's libraries also read."""

Notice = Callable[[], bool | float | None]
"""Function that returns the seconds until preemption, or True if they are unknown; None or False: no notice."""


def is_preempted_by_gce() -> bool:
    """Ask Compute Engine's metadata server whether this machine is about to be preempted.

    The server announces the preemption of a Spot or preemptible machine about 30 s before. It also announces
    maintenance, up to an hour before; this is ignored, because a run that is restarted on the same machine would end at
    once.

    Raises:
      OSError: no such server answers.
      ValueError: the answer is not that of a metadata server.
    """
    host = os.environ.get(GCE_HOST, "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/preempted"
    # Connect directly, ignoring proxies of the environment.
    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, headers={"Metadata-Flavor": "Google"}), timeout=TIMEOUT_SECS) as response:
        text = response.read(100).decode().strip()
    if text not in ("TRUE", "FALSE"):
        raise ValueError(f"{url} returned {text!r}, expected TRUE or FALSE")
    return bool(text == "TRUE")


@contextmanager
def watched(config: Config, stop: StopRequest) -> Iterator[None]:
    """Check `run.preemption_notice` once per second inside this context; a notice ends the run like SIGTERM.

    Raises:
      UserCodeError: the function of the config does not exist.
    """
    name = config.run.preemption_notice
    if name is None or config.command not in TRAINING_RUNS:
        yield
        return
    notice: Notice = is_preempted_by_gce if name == GCE else user_code.load(*config.notice_function(name))
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(name, notice, stop, ended), name="preemption", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join(TIMEOUT_SECS)  # a later notice would stop whatever this process does next


def _watch(name: str, notice: Notice, stop: StopRequest, ended: threading.Event) -> None:
    is_said = False
    while not ended.wait(PERIOD_SECS):
        try:
            secs = _seconds_left(notice())
        except Exception as error:  # a restarting server, or user code: training continues
            if not is_said:
                _log.warning("run.preemption_notice=%s failed; training continues: %s", name, error)
            is_said = True
            continue
        if secs is not None and not ended.is_set():
            left = "" if secs is True else f", in {secs:g} s"
            _log.warning("This machine is about to be taken away%s (run.preemption_notice=%s).", left, name)
            stop.request("a preemption notice")
            return


def _seconds_left(answer: bool | float | None) -> float | None:
    """Return the seconds until preemption, True if not given; None: there is no notice."""
    if answer is None or answer is False:
        return None
    if not isinstance(answer, int | float):
        raise TypeError(f"it returned {answer!r}; expected True, the seconds that are left, or None")
    return answer
