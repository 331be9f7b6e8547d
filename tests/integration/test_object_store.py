"""`python -m runner` with a model_dir on an S3 server: what is there at the end, who may write, and what fails how."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto")

import runner
from runner.checkpoint_files import layout
from runner.config.schema import RunSettings
from runner.remote.mirror import local_folder, mirror_of
from runner.remote.note import Note, fingerprints
from runner.remote.store import Store
from tests.support import chains, store_damage
from tests.support.command_line import CommandLine
from tests.support.object_store import BUCKET, RUN, S3, Start, catches_up, folder_in, kills, served
from tests.support.processes import wait_until

LONG = (*RUN, "model.fn=tests.support.object_store.delayed", "train.max_steps=100000")
"""A run that is killed before its end; its steps take $STEP_SECS."""
PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "object_store.md").read_text()


@pytest.fixture(scope="module")
def server(command_line: CommandLine) -> Iterator[S3]:
    with served(command_line=command_line) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.use(monkeypatch, XDG_CACHE_HOME=str(tmp_path))


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
    first = Start(server, tmp_path / "first", f"model_dir={url}", *LONG, env={**server.env, "STEP_SECS": "0.05"})
    server.wait_for_checkpoint(url)
    second = command_line(f"model_dir={url}", *RUN, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "second"))
    assert second.returncode == 2 and f"process {first.popen.pid}" in second.stderr, second.stderr
    first.end_of_the_machine()
    shutil.rmtree(folder_in(tmp_path / "first"))
    latest = layout.step_of(Store(url).fs.cat_file("checkpoint").decode().split('"')[1]) or 0
    third = command_line(
        f"model_dir={url}", *LONG, f"train.max_steps={latest + 4}", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "third")
    )
    assert third.returncode == 0, third.stderr
    undisturbed = command_line("model_dir=run", *LONG, f"train.max_steps={latest + 4}", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    found, expected = (
        chains.variables(folder_in(tmp_path / "third"), latest + 4),
        chains.variables(tmp_path / "run", latest + 4),
    )
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


SHORT_STEPS, STEPS = 10, 200
SWEEP = (
    "-m", *RUN, "model.fn=tests.support.object_store.delayed", f"train.max_steps={SHORT_STEPS},{STEPS}",
    f"checkpoint.save_steps={SHORT_STEPS}", "tracking.backend=csv",
)  # fmt: skip


@pytest.mark.slow
def test_a_sweep_that_dies_with_its_machine_goes_on_elsewhere_and_a_job_is_a_run_of_its_own(
    server: S3, tmp_path: Path, request: pytest.FixtureRequest, command_line: CommandLine
) -> None:
    url = place(request)
    words = (*SWEEP, f"sweep.dir={url}")
    # On the first machine the second job takes more than a minute, so that it is killed within it.
    first = Start(server, tmp_path / "first", *words, env={**server.env, "STEP_SECS": "0.4"})
    wait_until(lambda: {"finished", "running"} <= set(_status_of_jobs(url).values()), period_secs=0.5)
    refused = command_line(*words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "refused"))
    assert refused.returncode == 2 and f"sweep.dir={url} is in use" in refused.stderr, refused.stderr
    first.end_of_the_machine()
    shutil.rmtree(folder_in(tmp_path / "first"))
    status = _status_of_jobs(url)
    assert sorted(status.values()) == ["finished", "running"]
    states = {said: Store(url).fs.cat_file(f"{job}/checkpoint").decode() for job, said in status.items()}
    latest = {said: layout.step_of(state.split('"')[1]) for said, state in states.items()}
    assert latest["finished"] == SHORT_STEPS
    assert latest["running"] in range(0, STEPS, SHORT_STEPS)  # as far as it came meanwhile

    again = command_line(*words, "sweep.parallel=2", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "second"))
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("already finished, skipped") == 1 and f"sweep {url}: 2 jobs" in again.stdout
    assert not Note.read(folder_in(tmp_path / "second")).unsent(fingerprints(folder_in(tmp_path / "second")))
    here = command_line(*SWEEP, "sweep.dir=here", cwd=tmp_path)
    assert here.returncode == 0, here.stderr
    jobs = sorted(path.parent.name for path in (tmp_path / "here").glob("*/run.json"))
    assert len(jobs) == 2
    for job in jobs:
        steps = json.loads((tmp_path / "here" / job / "summary.json").read_text())["global_step"]
        found = chains.variables(folder_in(tmp_path / "second") / job, steps)
        expected = chains.variables(tmp_path / "here" / job, steps)
        assert {name: value.tobytes() for name, value in found.items()} == {
            name: value.tobytes() for name, value in expected.items()
        }

    # A job is read, and written to, on a third machine, under the lease of the sweep, which has all of that.
    read = ("command=evaluate", f"model_dir={url}/{jobs[0]}", "run.output=json")
    third = command_line(*read, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "third"))
    assert third.returncode == 0 and json.loads(third.stdout)["global_step"] in (SHORT_STEPS, STEPS), third.stderr
    last = command_line(*words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "second"))
    assert last.returncode == 0 and last.stderr.count("already finished, skipped") == 2, last.stderr
    assert f"{jobs[0]}/summary.evaluate.json" in Store(url).objects() and not Store(url).leased_urls()
    assert (folder_in(tmp_path / "second") / jobs[0] / "summary.evaluate.json").exists()
    assert not [path for path in tmp_path.rglob("*") if ":" in path.name]


def _status_of_jobs(url: str) -> dict[str, str]:
    """Return job -> status of its training, of the jobs at `url` that have a checkpoint and, sent later, a status."""
    store = Store(url)
    objects = store.objects()
    jobs = [name.removesuffix("/run.json") for name in objects if name.endswith("/run.json")]
    jobs = [job for job in jobs if f"{job}/checkpoint" in objects]
    return {job: json.loads(store.fs.cat_file(f"{job}/run.json"))["training"] for job in jobs}


def test_a_dry_run_of_the_sweep_of_the_page_lists_its_jobs_at_their_urls(
    command_line: CommandLine, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "object_store.md").read_text()
    ((words, url),) = re.findall(r"^python -m runner (-m .*sweep.dir=(s3://\S+))$", page, re.MULTILINE)
    done = command_line(*words.split(), "command=dry_run", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count(f"(not started, {url}/") == 2, done.stderr
    assert Store(url).objects() == {} and not Store(url).highest()


@pytest.mark.slow
def test_exports_of_a_run_are_in_their_own_bucket_which_two_machines_write_to_in_turn(
    tmp_path: Path, request: pytest.FixtureRequest, command_line: CommandLine
) -> None:
    url, kept = place(request), []
    words = (*RUN, f"export.dir={url}", "export.exporters=[final]", "train.max_steps=2")
    for machine in ("first", "second"):
        done = command_line(*words, f"model_dir={machine}", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / machine / "c"))
        assert done.returncode == 0, done.stderr
        assert f"{url}/final/" in done.stdout
        kept.append({name.split("/")[1] for name in Store(url).objects() if name.endswith("saved_model.pb")})
    assert [len(names) for names in kept] == [1, 2] and kept[0] < kept[1]
    (folder,) = (tmp_path / "second" / "c" / "estimator-runner").iterdir()
    assert {path.name for path in (folder / "final").iterdir()} == kept[1]  # what was there is here
    read = ("command=export", "model_dir=first", f"export.dir={url}", "run.output=json")
    (path,) = json.loads(command_line(*read, cwd=tmp_path).stdout)["exports"][-1:]
    assert {f"{Path(path).name}/{name}" for name in ("saved_model.pb", "README.md")} <= {*Store(url).objects()}


@pytest.mark.slow
def test_what_is_not_sent_in_time_is_code_3_and_the_same_command_or_a_person_sends_it(
    command_line: CommandLine, server: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = place(request)
    words = (
        f"model_dir={url}", *RUN, "model.fn=tests.support.object_store.delayed", "run.upload_secs=1",
        "run.lease_secs=4", "run.output=json",
    )  # fmt: skip
    # A process, with whose end its lease does, and the one here whose task and command are started cold. Its steps
    # after the first checkpoint take longer than it is looked for.
    first = Start(server, tmp_path, *words, env={**server.env, "STEP_SECS": "0.5"}, is_cold=True)
    server.wait_for_checkpoint(url)
    server.mode = "away"
    assert first.end() == 3, first.said.read_text()
    summary = json.loads((folder_in(tmp_path) / "summary.json").read_text())
    assert (summary["status"], summary["global_step"]) == ("upload_incomplete", chains.TOTAL)
    again = command_line(*words, cwd=tmp_path)
    assert again.returncode == 2 and f"model_dir={url} cannot be reached" in again.stderr, again.stderr
    server.mode = "ok"
    by_hand = [sys.executable, "-m", "runner.remote.upload", str(folder_in(tmp_path))]
    assert (
        subprocess.run(by_hand, env={**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}).returncode == 0
    )
    assert f"model.ckpt-{chains.TOTAL}" in Store(url).fs.cat_file("checkpoint").decode()
    # With time for it: a busy machine takes more than a second for its files.
    done = command_line(*words, "run.upload_secs=100", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "finished", done.stderr


def test_objects_that_no_run_could_have_sent_are_neither_fetched_nor_removed(
    server: S3, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    boto3 = pytest.importorskip("boto3")
    url, client = place(request), boto3.client("s3")
    key = url.removeprefix(f"s3://{BUCKET}/")
    # Folders of the S3 console, hidden files of others, and a name that would lead out of the local folder.
    foreign = {f"{key}/{name}" for name in ("", "export/", ".keep", "data/.gitkeep", "notes//x", "a/../../../out.txt")}
    for name in (*foreign, f"{key}/export/7/words"):
        client.put_object(Bucket=BUCKET, Key=name, Body=b"" if name.endswith("/") else b"theirs")
    folder = Path(local_folder("model_dir=", url, str(tmp_path / "caches")))
    mirror = mirror_of(folder)
    mirror.begin({**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}, RunSettings())
    (folder / "config.yaml").write_text("a: 1")
    assert mirror.close() == ""
    there = {one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=key)["Contents"]}
    assert there == {*foreign, *(f"{key}/{name}" for name in ("config.yaml", "export/7/words", ".lease/00000001"))}
    local = {path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert local == {"config.yaml", "words"} and folder.stat().st_mode & 0o077 == 0


def test_a_script_holds_its_lease_until_its_last_file_is_sent_and_then_ends_it(
    server: S3, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url, by_name = place(request), server.address.replace("127.0.0.1", "localhost")  # as all real stores
    script = "from runner.remote import mirror\nfolder = mirror.local_folder('model_dir=', {0!r})\n"
    script += "mirror.writing(folder)\nopen(folder + '/notes.txt', 'w').write('mine')\n"
    env = {**os.environ, "AWS_ENDPOINT_URL": by_name, "PYTHONPATH": str(Path(runner.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script.format(url)], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Store(url).lease(1)["is_over"] and Store(url).fs.cat_file("notes.txt") == b"mine"


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["its time is over", "Ctrl-C in a script"])
def test_the_end_says_what_it_waits_for_and_ends_also_if_the_process_that_sends_is_stopped(
    is_interrupted: bool, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, env, said = place(request), {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}, list[str]()

    def say(text: str) -> None:
        said.append(text)
        if is_interrupted and len(said) == 3:
            raise KeyboardInterrupt  # what SIGINT is where no handler makes a stop request of it

    def sending() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if "runner.remote.upload" in one.cmdline()]

    monkeypatch.setattr("runner.remote.mirror.SAY_SECS", 0.5)
    monkeypatch.setattr("runner.remote.mirror.say", say)
    folder = Path(local_folder("model_dir=", url, str(tmp_path)))
    mirror = mirror_of(folder)
    mirror.begin(env, RunSettings(upload_secs=100 if is_interrupted else 2))
    wait_until(lambda: bool(sending()))
    (sends,) = sending()
    sends.suspend()
    (folder / "notes.txt").write_text("mine")
    began = time.monotonic()
    assert url in mirror.close() and time.monotonic() - began < 50
    assert len(said) >= 3 and {f"1 files, 4 B, are still to be sent to {url}" in text for text in said} == {True}
    assert not sends.is_running() and not Store(url).objects()
    mirror.begin(env, RunSettings())
    assert mirror.close() == "" and Store(url).fs.cat_file("notes.txt") == b"mine"


@pytest.mark.slow
def test_a_run_goes_on_while_its_store_takes_nothing_and_then_sends_everything(
    server: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whatever the reason: `test_a_fault_of_the_store_passes_and_then_all_is_there` has all of them."""
    url = place(request)
    start = Start(server, tmp_path, f"model_dir={url}", *RUN)
    wait_until(lambda: bool(list(tmp_path.glob("estimator-runner/*/[!.]*"))))  # it has begun
    server.mode = "denied"
    wait_until(lambda: bool(list(tmp_path.glob("estimator-runner/*/summary.json"))))
    wait_until(lambda: "training continues" in start.said.read_text())
    server.mode = "ok"
    assert start.end() == 0, start.said.read_text()
    (line,) = [line for line in start.said.read_text().splitlines() if "training continues" in line]
    assert line.startswith("remote: ") and url in line
    here = folder_in(tmp_path)
    assert not Note.read(here).unsent(fingerprints(here))
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
    assert kills(server, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damage_between_starts_costs_the_bucket_nothing(command_line: CommandLine) -> None:
    """The costliest kinds; `python -m tests.support.store_damage` draws from all."""
    kinds = ("empty", "snapshot", "truncate newest", "by hand", "second machine, unsent", "killed uploader")
    words = [word for kind in kinds for word in ("--only", kind)]
    assert store_damage.main(["--starts", "4", "--seed", "2", *words], command_line) == 0


@pytest.mark.slow
def test_of_4_starts_at_once_one_wins(server: S3, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url, env = place(request), {**server.env, "STEP_SECS": "0.05"}
    starts = [Start(server, tmp_path / str(number), f"model_dir={url}", *LONG, env=env) for number in range(4)]
    wait_until(lambda: sum(start.popen.poll() is None for start in starts) <= 1)
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
    words = (f"model_dir={url}", *LONG, "run.lease_secs=4")
    first = Start(server, tmp_path / "first", *words, env={**server.env, "STEP_SECS": "0.05"})
    server.wait_for_checkpoint(url)
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
