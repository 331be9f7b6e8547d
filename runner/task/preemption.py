"""Preemption notices: a run saves and ends before its machine is taken away."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from runner.config import user_code
from runner.config.schema import CLOUDS, TRAINING_RUNS, Config
from runner.task.stop_hook import StopRequest

_log = logging.getLogger(__name__)

PERIOD_SECS = 1.0
TIMEOUT_SECS = 2.0
GCE_HOST = "GCE_METADATA_HOST"
AWS_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
AZURE_ENDPOINT = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
"""Environment variables with another address of a metadata server, which the clouds' own libraries also read."""
_ENDPOINT = "http://169.254.169.254"
"""The link-local address of the metadata server of a machine of AWS or Azure."""

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
    text = _read(url, {"Metadata-Flavor": "Google"})
    if text not in ("TRUE", "FALSE"):
        raise ValueError(f"{url} returned {text!r}, expected TRUE or FALSE")
    return text == "TRUE"


def interruption_by_aws() -> float | None:
    """Ask EC2's metadata service (IMDSv2) whether this Spot instance is about to be interrupted.

    The service announces an interruption two minutes before, and hibernation when it begins.

    Returns:
      The seconds until the interruption; None: there is no notice.

    Raises:
      OSError: no such service answers.
      ValueError: the answer is not that of the service.
    """
    endpoint = os.environ.get(AWS_ENDPOINT, _ENDPOINT).rstrip("/")
    # A token for each check, which is never too old: IMDSv2 answers an expired one with 401.
    token = _read(f"{endpoint}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    url = f"{endpoint}/latest/meta-data/spot/instance-action"
    try:
        action = json.loads(_read(url, {"X-aws-ec2-metadata-token": token}))
    except HTTPError as error:
        if error.code == 404:  # the document exists only after a notice
            return None
        raise
    return _seconds_until(datetime.fromisoformat(action["time"]))


def eviction_by_azure() -> bool | float:
    """Ask Azure's Scheduled Events whether this machine is about to be evicted or deleted.

    Scheduled Events announce the eviction of a Spot machine about 30 s before. Other events (a reboot, a freeze, a move
    to another host) are ignored, because the machine stays. Azure takes up to two minutes for its first answer, so the
    first checks may time out.

    Returns:
      The seconds until the eviction or deletion, True if it has begun; False: there is no notice.

    Raises:
      OSError: no such service answers.
      ValueError: the answer is not that of the service.
    """
    endpoint = os.environ.get(AZURE_ENDPOINT, _ENDPOINT).rstrip("/")
    header = {"Metadata": "true"}
    answer = json.loads(_read(f"{endpoint}/metadata/scheduledevents?api-version=2020-07-01", header))
    ends = [event for event in answer["Events"] if event["EventType"] in ("Preempt", "Terminate")]
    if not ends:
        return False
    # All machines of a scale set or availability set are told of the events of each.
    name = _read(f"{endpoint}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
    remaining: list[bool | float] = []
    for event in ends:
        if name not in event["Resources"]:
            continue
        if event["NotBefore"]:
            remaining.append(_seconds_until(parsedate_to_datetime(event["NotBefore"])))
        else:
            remaining.append(True)  # it has begun; `min` takes True as 1 s, so it comes before later events
    return min(remaining, default=False)


_SOURCES: Mapping[str, Notice] = {"aws": interruption_by_aws, "azure": eviction_by_azure, "gce": is_preempted_by_gce}


def notice_of(cloud: str) -> Notice:
    """Return the function that asks the metadata server of `cloud`; of "auto": that of the first cloud that answers."""
    if cloud in _SOURCES:
        return _SOURCES[cloud]
    answered: list[Notice] = []  # the cloud that has answered; the others are not asked any more

    def ask() -> bool | float | None:
        for notice in answered or _SOURCES.values():
            try:
                answer = notice()
            except (OSError, ValueError, LookupError):
                if answered:
                    raise
                continue
            answered[:] = [notice]
            return answer
        raise OSError(f"no metadata server answers ({', '.join(_SOURCES)})")

    return ask


def _read(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    opener = build_opener(ProxyHandler({}))  # connect directly, ignoring proxies of the environment
    try:
        with opener.open(Request(url, headers=dict(headers), method=method), timeout=TIMEOUT_SECS) as response:
            return str(response.read(1_000_000).decode().strip())
    except HTTPError as error:
        error.close()  # it is the answer, too: Python 3.14 warns of one that stays open
        raise


def _seconds_until(time: datetime) -> float:
    return max(0.0, round((time - datetime.now(UTC)).total_seconds(), 1))


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
    notice: Notice
    if name in CLOUDS:
        notice = notice_of(name)
    else:
        notice = user_code.load(*config.notice_function(name))
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(name, notice, stop, ended), name="preemption", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join(TIMEOUT_SECS)  # a later notice would stop whatever this process does next


def _watch(name: str, notice: Notice, stop: StopRequest, ended: threading.Event) -> None:
    """Ask `notice` periodically until it announces a preemption, and request a stop then; end when `ended` is set."""
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
            left = f", in {secs:g} s"
            if secs is True:  # the time is not known
                left = ""
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
