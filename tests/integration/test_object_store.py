"""`python -m runner` with a model_dir on an S3 server: what is there at the end, who may write, and what fails how."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto")

import runner  # noqa: E402
from runner.checkpoint import layout  # noqa: E402
from runner.remote.store import Note, Store  # noqa: E402
from tests.support import chains  # noqa: E402
from tests.support.command_line import CommandLine  # noqa: E402
from tests.support.object_store import BUCKET, RUN, S3, Start, catches_up, folder_in, kills, served  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "object_store.md").read_text()


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with served() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.mode = "ok"
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # an instance keeps the environment in which it was made
    for name, value in {**server.env, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


def place(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}/run"


@pytest.mark.slow
def test_a_run_is_in_its_bucket_and_is_read_from_another_machine(command_line: CommandLine, tmp_path: Path) -> None:
    ((override, url),) = re.findall(r"^python -m runner (model_dir=(s3://\S+))$", PAGE, re.MULTILINE)
    done = command_line(override, *RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert url in done.stdout
    here = folder_in(tmp_path)
    other = tmp_path / "other"
    words = ("command=evaluate", f"model_dir={url}", "run.output=json")
    read = command_line(*words, cwd=tmp_path, XDG_CACHE_HOME=str(other))
    answer = json.loads(read.stdout)
    assert read.returncode == 0 and answer["status"] == "finished", read.stderr
    assert answer["metrics"]["eval/loss"] == json.loads((here / "summary.json").read_text())["metrics"]["eval/loss"]
    assert chains.variables(folder_in(other)).keys() == chains.variables(here).keys()
    assert "summary.evaluate.json" in Store(url).objects()
    run = runner.load(url)  # here, where the folder is older
    assert run.status == "finished" and (run.model_dir / "summary.evaluate.json").exists()
    assert not [path for path in tmp_path.rglob("*") if ":" in path.name]


@pytest.mark.slow
def test_a_machine_that_dies_is_continued_by_another_and_meanwhile_no_second_start_is_let_in(
    server: S3, tmp_path: Path, request: pytest.FixtureRequest, command_line: CommandLine
) -> None:
    url = place(request)
    first = Start(server, tmp_path / "first", f"model_dir={url}", *RUN, "train.max_steps=100000")
    end = time.monotonic() + 120
    while "checkpoint" not in Store(url).objects() and time.monotonic() < end:
        time.sleep(0.2)
    second = command_line(f"model_dir={url}", *RUN, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "second"))
    assert second.returncode == 2 and f"process {first.popen.pid}" in second.stderr, second.stderr
    first.end_of_the_machine()
    shutil.rmtree(folder_in(tmp_path / "first"))
    latest = layout.step_of(Store(url).fs.cat_file("checkpoint").decode().split('"')[1]) or 0
    third = command_line(
        f"model_dir={url}", *RUN, f"train.max_steps={latest + 4}", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "third")
    )
    assert third.returncode == 0, third.stderr
    undisturbed = command_line("model_dir=run", *RUN, f"train.max_steps={latest + 4}", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    found, expected = (
        chains.variables(folder_in(tmp_path / "third"), latest + 4),
        chains.variables(tmp_path / "run", latest + 4),
    )
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


@pytest.mark.slow
def test_what_is_not_sent_in_time_is_code_3_and_the_same_command_or_a_person_sends_it(
    command_line: CommandLine, server: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = place(request)
    words = (f"model_dir={url}", *RUN, "run.upload_secs=1", "run.lease_secs=4", "run.output=json")
    stop = threading.Event()

    def take_away() -> None:
        while "checkpoint" not in Store(url).objects() and not stop.wait(0.1):
            pass
        server.mode = "away"

    thread = threading.Thread(target=take_away)
    thread.start()
    done = command_line(*words, cwd=tmp_path)
    stop.set()
    thread.join()
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["status"]) == (3, "upload_incomplete"), done.stderr
    assert answer["global_step"] == chains.TOTAL
    assert json.loads((folder_in(tmp_path) / "summary.json").read_text())["status"] == "upload_incomplete"
    again = command_line(*words, cwd=tmp_path)
    assert again.returncode == 2 and f"model_dir={url} cannot be reached" in again.stderr, again.stderr
    server.mode = "ok"
    by_hand = [sys.executable, "-m", "runner.remote.upload", str(folder_in(tmp_path))]
    assert (
        subprocess.run(by_hand, env={**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}).returncode == 0
    )
    assert f"model.ckpt-{chains.TOTAL}" in Store(url).fs.cat_file("checkpoint").decode()
    done = command_line(*words, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "finished", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "denied"])
def test_a_run_goes_on_while_its_store_takes_nothing_and_then_sends_everything(
    mode: str, command_line: CommandLine, server: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = place(request)
    stop = threading.Event()

    def fail_for_a_while() -> None:
        while not list(tmp_path.glob("estimator-runner/*/[!.]*")) and not stop.wait(0.1):  # it has begun
            pass
        server.mode = mode
        while not list(tmp_path.glob("estimator-runner/*/summary.json")) and not stop.wait(0.1):
            pass
        stop.wait(3)
        server.mode = "ok"

    thread = threading.Thread(target=fail_for_a_while)
    thread.start()
    done = command_line(f"model_dir={url}", *RUN, cwd=tmp_path)
    stop.set()
    thread.join()
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "training continues" in line]
    assert line.startswith("remote: ") and url in line
    here = folder_in(tmp_path)
    assert not Note.read(here).left(here)
    assert f"model.ckpt-{chains.TOTAL}" in Store(url).fs.cat_file("checkpoint").decode()


@pytest.mark.parametrize("mode", ["away", "500", "denied", "nobody"])
def test_a_bucket_that_cannot_be_reached_at_the_first_start_is_a_mistake(
    mode: str, command_line: CommandLine, server: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    server.mode = "ok" if mode == "nobody" else mode
    env = dict(re.findall(r"`(AWS_MAX_ATTEMPTS)=(\d)`", PAGE)) | (nobody if mode == "nobody" else {})
    began = time.monotonic()
    done = command_line(f"model_dir={place(request)}", *RUN, cwd=tmp_path, **env)
    assert done.returncode == 2 and time.monotonic() < began + 30  # 40 s without AWS_MAX_ATTEMPTS
    (line,) = done.stderr.strip().splitlines()
    assert place(request) in line


LARGE = 110_000_000
"""Bytes of a file that s3fs sends in parts."""


@pytest.mark.parametrize(
    "mode, secs, size",
    [(mode, 2, 300_000) for mode in ("away", "500", "full", "quota", "denied", "slow", "cut")]
    + [
        pytest.param("away", 60, 300_000, marks=pytest.mark.slow),
        pytest.param("cut", 5, LARGE, marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_the_store_passes_and_then_all_is_there(
    mode: str, secs: int, size: int, server: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server.mode = mode
    catches_up(server, Store(place(request)), tmp_path / "run", secs, size)


@pytest.mark.slow
def test_runs_that_are_killed_with_their_folders_come_to_the_same_bits(server: S3, tmp_path: Path) -> None:
    assert kills(server, tmp_path, 3)


@pytest.mark.slow
def test_of_16_starts_at_once_one_wins(server: S3, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = place(request)
    starts = [
        Start(server, tmp_path / str(number), f"model_dir={url}", *RUN, "train.max_steps=100000")
        for number in range(16)
    ]
    end = time.monotonic() + 300
    while sum(start.popen.poll() is None for start in starts) > 1 and time.monotonic() < end:
        time.sleep(0.2)
    (winner,) = [start for start in starts if start.popen.poll() is None]
    for start in starts:
        if start is not winner:
            assert start.popen.returncode == 2 and f"model_dir={url} is in use" in start.said.read_text()
    assert Store(url).lease(Store(url).highest())["pid"] == winner.popen.pid
    winner.end_of_the_machine()


@pytest.mark.slow
def test_a_holder_that_is_stopped_past_the_expiry_and_continued_sends_nothing(
    server: S3, tmp_path: Path, request: pytest.FixtureRequest, command_line: CommandLine
) -> None:
    url = place(request)
    store = Store(url)
    words = (f"model_dir={url}", *RUN, "run.lease_secs=4")
    first = Start(server, tmp_path / "first", *words, "train.max_steps=100000")
    end = time.monotonic() + 120
    while "checkpoint" not in store.objects() and time.monotonic() < end:
        time.sleep(0.2)
    supervisor = psutil.Process(first.popen.pid)
    stopped = [supervisor, *supervisor.children(recursive=True)]
    for process in stopped:
        process.suspend()
    time.sleep(6)
    latest = layout.step_of(store.fs.cat_file("checkpoint").decode().split('"')[1]) or 0
    second = command_line(
        *words, f"train.max_steps={latest + 4}", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "second")
    )
    assert second.returncode == 0, second.stderr
    there = {name: (info["ETag"], info["LastModified"]) for name, info in store.objects().items()}
    for process in stopped:
        process.resume()
    assert first.popen.wait(120) == 1, first.said.read_text()
    assert f"model_dir={url} is in use by another run" in first.said.read_text()
    assert {name: (info["ETag"], info["LastModified"]) for name, info in store.objects().items()} == there
