"""Notices of preemption: the run saves, ends with exit code 3, and goes on from there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.reader import Reader
from runner.task import preemption
from tests.support.jobs import endless, noted, results, run
from tests.support.messages import Messages

BY_GCE = "run.preemption_notice=gce"


class MetadataServer(ThreadingHTTPServer):
    """What Compute Engine's machines ask, on loopback: `answer` is what it says from now on."""

    answer = "FALSE"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.path, self.headers.get("Metadata-Flavor")))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(server.answer.encode())

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
                server.answer = "TRUE"
            answers[:] = answers[1:] or answers
        return batch

    def announcing(index: Any, element: Any) -> Any:
        with tf.control_dependencies([tf.py_function(announce, [index], tf.int64)]):
            return tf.nest.map_structure(tf.identity, element)

    return endless(params).enumerate().map(announcing)


SAME = (f"input.train.fn={__name__}.announced", "train.steps_per_loop=2", "+model.params.learning_rate=0.0001")
ANNOUNCED = (*SAME, "train.max_steps=1000000")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    monkeypatch.setattr(preemption, "PERIOD_SECS", 0.05)
    with MetadataServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(preemption.GCE_HOST, f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
        served[:] = [server]
        yield server
        served.clear()
        server.shutdown()


def said_of(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line that says this."""
    (said,) = [line for line in capsys.readouterr().err.splitlines() if what in line]
    return said


def weights(folder: Path, step: int) -> dict[str, Any]:
    reader = Reader(f"{folder}/run/model.ckpt-{step}")
    return {name: value.tolist() for name, value in reader.get_many(reader.names()).items()}


def test_a_notice_of_gce_saves_and_the_next_start_goes_on_to_the_same_bits(
    server: MetadataServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
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


def test_a_metadata_server_that_does_not_answer_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.setattr(preemption, "PERIOD_SECS", 0.001)
    monkeypatch.setenv(preemption.GCE_HOST, "127.0.0.1:9")
    assert run(tmp_path, BY_GCE, "train.max_steps=400", "train.steps_per_loop=2") == 0
    said = said_of("run.preemption_notice", capsys)
    messages.same("exit 0", said)
    assert "refused" in said


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
