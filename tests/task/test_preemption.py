"""Notices of preemption: the run saves, ends with exit code 3, and goes on from there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.reader import Reader
from runner.task import preemption
from tests.support.jobs import endless, noted, results, run
from tests.support.messages import Messages

BY_GCE = "run.preemption_notice=gce"


NAME = "set_1"
"""Name of this machine, in a scale set of Azure."""


def gce(method: str, path: str, headers: Any, given: Any) -> str | int:
    if headers.get("Metadata-Flavor") != "Google":
        return 403
    return given if (method, path) == ("GET", "/computeMetadata/v1/instance/preempted") else 404


def aws(method: str, path: str, headers: Any, given: Any) -> str | int:
    if path == "/latest/api/token":
        has_life = (headers.get("X-aws-ec2-metadata-token-ttl-seconds") or "").isdigit()
        return "a token==" if method == "PUT" and has_life else 400
    if headers.get("X-aws-ec2-metadata-token") != "a token==":
        return 401
    return given if (method, path) == ("GET", "/latest/meta-data/spot/instance-action") else 404


def azure(method: str, path: str, headers: Any, given: Any) -> str | int:
    if headers.get("Metadata") != "true":
        return 400
    if path.startswith("/metadata/instance/compute/name?api-version="):
        return NAME
    return given if path.startswith("/metadata/scheduledevents?api-version=") else 404


def action(secs: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=secs)
    return json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


def events(*given: tuple[str, str, float | None]) -> str:
    """Azure's answer: events as (type, machine, seconds from now; None: it has begun)."""
    return json.dumps({"DocumentIncarnation": 2, "Events": [
        {"EventId": "e", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [machine, "set_7"],
         "EventStatus": "Started" if secs is None else "Scheduled",
         "NotBefore": "" if secs is None else
            format_datetime(datetime.now(UTC) + timedelta(seconds=secs), usegmt=True)}
        for kind, machine, secs in given
    ]})  # fmt: skip


class MetadataServer(ThreadingHTTPServer):
    """What a cloud's machines ask, on loopback: `answer` is what it says from now on, a number is a status.

    Args:
      cloud: (method, path, headers, `answer`) -> what that cloud's server answers.
    """

    def __init__(self, cloud: Callable[..., str | int], answer: str | int) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.answer, self.then = answer, answer
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.path, self.headers.get("Metadata-Flavor")))
                answer = cloud(self.command, self.path, self.headers, server.answer)
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                self.wfile.write(b"" if isinstance(answer, int) else answer.encode())

            do_PUT = do_GET

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)


served: list[MetadataServer] = []
answers: list[Any] = []


def notice() -> Any:
    """What a user's function says: the answers of the test, once training is under way."""
    answer = answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def announced(params: Any) -> Any:
    """Endless data; the machine is to be taken away from its sixth batch on."""
    import tensorflow as tf

    def announce(batch: Any) -> Any:
        if batch == 5:
            for server in served:
                server.answer = server.then
            answers[:] = answers[1:] or answers
        return batch

    def announcing(index: Any, element: Any) -> Any:
        with tf.control_dependencies([tf.py_function(announce, [index], tf.int64)]):
            return tf.nest.map_structure(tf.identity, element)

    return endless(params).enumerate().map(announcing)


SAME = (f"input.train.fn={__name__}.announced", "train.steps_per_loop=2", "+model.params.learning_rate=0.0001")
ANNOUNCED = (*SAME, "train.max_steps=1000000")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MetadataServer]]:
    """Makes this a machine of a cloud, whose metadata server answers like that: (cloud, answer)."""
    monkeypatch.setattr(preemption, "PERIOD_SECS", 0.05)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there

    def serve(cloud: Callable[..., str | int], answer: str | int) -> MetadataServer:
        server = MetadataServer(cloud, answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv(preemption.GCE_HOST, address)
        for name in (preemption.AWS_ENDPOINT, preemption.AZURE_ENDPOINT):
            monkeypatch.setenv(name, f"http://{address}/")
        served.append(server)
        return server

    yield serve
    for server in served:
        server.shutdown()
        server.server_close()
    served.clear()


def said_of(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line that says this."""
    (said,) = [line for line in capsys.readouterr().err.splitlines() if what in line]
    return said


def weights(folder: Path, step: int) -> dict[str, Any]:
    reader = Reader(f"{folder}/run/model.ckpt-{step}")
    return {name: value.tolist() for name, value in reader.get_many(reader.names()).items()}


def test_a_notice_of_gce_saves_and_the_next_start_goes_on_to_the_same_bits(
    machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    server = machine(gce, "FALSE")
    server.then = "TRUE"
    assert run(tmp_path, *ANNOUNCED, BY_GCE) == 3
    messages.same("exit 3", said_of("This machine", capsys))
    assert set(server.asked) == {("/computeMetadata/v1/instance/preempted", "Google")}
    step = results(tmp_path)[0]["global_step"]
    assert step >= 4
    (asked,) = [line["signal"] for line in noted(tmp_path) if line.get("event") == "asked_to_stop"]
    assert asked == "a preemption notice"
    assert run(tmp_path, *SAME, f"train.max_steps={step + 2}") == 0
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert run(undisturbed, *SAME, f"train.max_steps={step + 2}") == 0
    assert weights(tmp_path, step + 2) == weights(undisturbed, step + 2)


@pytest.mark.parametrize("by", ["aws", "azure", "auto"])
def test_the_checkpoint_is_on_disk_before_the_machine_is_taken_away(
    by: str, machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud, before, then = (aws, 404, action(90)) if by == "aws" else (azure, events(), events(("Preempt", NAME, 90)))
    server, deadline = machine(cloud, before), time.time() + 89
    server.then = then
    assert run(tmp_path, *ANNOUNCED, f"run.preemption_notice={by}") == 3
    said = said_of("This machine", capsys)
    assert 0 < float(said.partition(", in ")[2].partition(" s")[0]) <= 90, said
    index = tmp_path / "run" / f"model.ckpt-{results(tmp_path)[0]['global_step']}.index"
    assert index.stat().st_mtime < deadline


@pytest.mark.parametrize(
    ("by", "cloud", "answer", "expected"),
    [
        ("aws", aws, 404, None),
        ("aws", aws, action(-5), 0.0),  # the clocks differ
        ("aws", aws, 500, OSError),
        ("aws", aws, 401, OSError),
        ("aws", aws, "<html>", ValueError),
        ("aws", gce, "FALSE", OSError),
        ("azure", azure, events(("Reboot", NAME, 9), ("Freeze", NAME, 9), ("Redeploy", NAME, 9)), False),
        ("azure", azure, events(("Preempt", "set_2", 30)), False),  # another machine of the scale set
        ("azure", azure, events(("Terminate", NAME, None)), True),
        ("azure", azure, events(("Terminate", NAME, 900), ("Preempt", NAME, -9)), 0.0),
        ("azure", azure, 429, OSError),
        ("azure", aws, 404, OSError),
        ("gce", gce, 503, OSError),
        ("gce", azure, events(), OSError),
        ("auto", aws, 404, None),
        ("auto", azure, events(), False),
        ("auto", gce, "FALSE", False),
        ("auto", gce, "TRUE", True),
        ("auto", gce, 503, OSError),
    ],
    ids=map(str, range(19)),  # the answers have the time of day
)  # fmt: skip
def test_what_the_metadata_server_of_a_cloud_answers(
    by: str, cloud: Any, answer: str | int, expected: Any, machine: Any
) -> None:
    machine(cloud, answer)
    notice = preemption.notice_of(by)
    if isinstance(expected, type):
        with pytest.raises(expected):
            notice()
    else:
        answered = notice()
        assert (answered, type(answered)) == (expected, type(expected))


def test_auto_stays_with_the_cloud_that_has_answered(machine: Any) -> None:
    server, notice = machine(azure, events()), preemption.notice_of("auto")
    assert notice() is False
    server.asked.clear()
    server.answer = 500
    with pytest.raises(OSError):
        notice()
    assert [path.partition("?")[0] for path, _ in server.asked] == ["/metadata/scheduledevents"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["gce", "auto"])
def test_a_metadata_server_that_does_not_answer_is_said_once(
    by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.setattr(preemption, "PERIOD_SECS", 0.001)
    monkeypatch.setenv(preemption.GCE_HOST, "127.0.0.1:9")
    for name in (preemption.AWS_ENDPOINT, preemption.AZURE_ENDPOINT):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run(tmp_path, f"run.preemption_notice={by}", "train.max_steps=400", "train.steps_per_loop=2") == 0
    messages.same("exit 0", said_of("run.preemption_notice", capsys))


@pytest.mark.parametrize(
    "given",
    [
        [None, 0],
        [False, True],
        [OSError("busy"), 12.5],
        ["soon"],
    ],
    ids=str,
)
def test_a_function_of_the_user_says_how_many_seconds_are_left(
    given: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    messages: Messages,
) -> None:
    monkeypatch.setattr(preemption, "PERIOD_SECS", 0.001)
    answers[:] = given
    ends = given != ["soon"]
    steps = () if ends else ("train.max_steps=400",)
    code = run(tmp_path, *ANNOUNCED, *steps, f"run.preemption_notice={__name__}.notice")
    assert code == (3 if ends else 0)
    messages.same(f"exit {code}", said_of("This machine" if ends else "run.preemption_notice", capsys))
