"""`strategy=multi_worker` with tasks started on two hosts that share no folder, and a model_dir on an S3 server."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto")

from runner.remote.store import Store
from tests.support import chains, networks
from tests.support.command_line import CommandLine
from tests.support.object_store import BUCKET, S3, Hosts, Start, folder_in, served
from tests.support.processes import wait_until

MAX_STEPS, SAVE_STEPS, KEEP = 200, 25, 3
RUN = (
    "model=custom", "model.fn=tests.support.object_store.delayed", "model.params={dropout: true}", "input=custom",
    "input.train.fn=tests.support.object_store.own_part", "input.train.batch_size=4",
    "input.eval.fn=tests.support.chains.eval_input", "run.seed=5", "run.progress=plain", "strategy=multi_worker",
    f"train.max_steps={MAX_STEPS}", f"checkpoint.save_steps={SAVE_STEPS}",
    f"checkpoint.keep_max={KEEP}", "eval.start_delay_secs=1000", "tracking.backend=none", "run.lease_secs=6",
)  # fmt: skip
PART = re.compile(r"runner_files/model\.ckpt-(\d+)\.input-(\d)\.index")


@pytest.fixture(scope="module")
def server(command_line: CommandLine) -> Iterator[S3]:
    with served(command_line=command_line) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.use(monkeypatch, XDG_CACHE_HOME=str(tmp_path))


def step_there(store: Store) -> int:
    """The step that the bucket's state file names; 0: there is none."""
    try:
        return int(store.fs.cat_file("checkpoint").decode().split('"')[1].rpartition("-")[2])
    except FileNotFoundError:
        return 0


def wait_for_steps(store: Store, number: int) -> None:
    until = step_there(store) + number
    wait_until(lambda: step_there(store) >= until, period_secs=0.5)


def bits(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in chains.variables(folder, MAX_STEPS).items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> dict[str, bytes]:
    """Of the same two workers in one folder."""
    folder = tmp_path_factory.mktemp("shared")
    done = command_line("model_dir=run", "cluster.num_workers=2", *RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    return bits(folder / "run")


def whole(store: Store) -> bool:
    """Check that a reader who now begins finds what the state file names, with the input states of both workers."""
    step = step_there(store)
    there = store.objects()
    names = (f"model.ckpt-{step}.index", *(f"runner_files/model.ckpt-{step}.input-{one}.index" for one in (0, 1)))
    return not step or all(name in there for name in names) or step != step_there(store)


@pytest.mark.slow
def test_hosts_without_a_common_folder_come_to_the_bits_of_those_with_one(
    server: S3, tmp_path: Path, command_line: CommandLine, expected: dict[str, bytes]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "object_store.md").read_text()
    (url,) = set(re.findall(r"^python -m runner strategy=multi_worker model_dir=(s3://\S+)$", page, re.MULTILINE))
    store, incomplete = Store(url), list[int]()

    def look(method: str, path: str) -> None:
        """Look as a reader who begins when the state file has just been written, or something was deleted."""
        if (method != "PUT" or path.endswith("/checkpoint")) and not whole(store):
            incomplete.append(step_there(store))

    server.refused = r"\.input-1\."
    server.watch = look
    try:
        with Hosts(server, tmp_path, f"model_dir={url}", *RUN, step_secs=0.2) as hosts:
            data = re.compile(r"model\.ckpt-\d+\.data-00000-of-00001")
            wait_until(lambda: sum(data.fullmatch(name) is not None for name in store.objects()) > 1, period_secs=0.5)
            assert step_there(store) == 0  # the worker's input is missing
            server.refused = ""
            wait_until(lambda: step_there(store) >= 2 * SAVE_STEPS, period_secs=0.5)
            hosts.worker.end_of_the_machine()
            assert hosts.chief.popen.poll() is None
            shutil.rmtree(hosts.folder("worker"))
            hosts.worker = hosts.start("worker")
            assert hosts.wait() == [0, 0], hosts.chief.said.read_text() + hosts.worker.said.read_text()
    finally:
        server.refused = ""
        server.watch = lambda method, path: None
    assert "all tasks are started again from step" in hosts.chief.said.read_text()
    assert not incomplete
    folders = [hosts.folder(name) for name in ("chief", "worker")]
    assert not Path(os.path.commonpath(folders)).is_relative_to(tmp_path / "chief")
    assert bits(folders[0]) == expected
    parts = {match.groups() for name in store.objects() if (match := PART.fullmatch(name))}
    steps = [str(MAX_STEPS - age * SAVE_STEPS) for age in range(KEEP)]
    assert parts == {(step, worker) for step in steps for worker in "01"}
    for folder in folders:
        assert len(list((folder / "runner_files").glob("*.input-1.index"))) == KEEP
    assert {"events.chief-0.jsonl", "events.worker-0.jsonl"} <= store.objects().keys()
    read_there = command_line(
        "command=evaluate", f"model_dir={url}", "run.output=json", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "third")
    )
    answer = json.loads(read_there.stdout)
    assert read_there.returncode == 0 and answer["global_step"] == MAX_STEPS, read_there.stderr
    assert bits(folder_in(tmp_path / "third")) == expected


@pytest.mark.slow
def test_new_machines_go_on_from_the_bucket_to_the_same_bits(
    server: S3, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    url = f"s3://{BUCKET}/resumed/run"
    for name, steps in (("first", MAX_STEPS // 2), ("second", MAX_STEPS)):
        with Hosts(server, tmp_path / name, f"model_dir={url}", *RUN, f"train.max_steps={steps}") as hosts:
            assert hosts.wait() == [0, 0], hosts.chief.said.read_text() + hosts.worker.said.read_text()
        if name == "first":
            shutil.rmtree(tmp_path / name)
    assert bits(hosts.folder("chief")) == expected


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_second_cluster_at_the_url_does_not_disturb_the_first(
    server: S3, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    url = f"s3://{BUCKET}/twice/run"
    with Hosts(server, tmp_path / "first", f"model_dir={url}", *RUN, step_secs=0.2) as first:
        wait_until(lambda: step_there(Store(url)) >= SAVE_STEPS, period_secs=0.5)
        with Hosts(server, tmp_path / "second", f"model_dir={url}", *RUN) as second:
            assert second.chief.end() == 2 and "is in use by another run" in second.chief.said.read_text()
            heard = "worker/estimator-runner/*/.lease/generation.json"
            wait_until(lambda: any((tmp_path / "second").glob(heard)))
            wait_for_steps(Store(url), SAVE_STEPS)  # while a worker is there that could answer
            second.worker.popen.terminate()
            assert second.worker.end() == 3, second.worker.said.read_text()
        assert first.chief.popen.poll() is None
        assert first.wait() == [0, 0], first.chief.said.read_text() + first.worker.said.read_text()
    assert "started again" not in first.chief.said.read_text()
    assert bits(first.folder("chief")) == expected


@pytest.mark.world
@pytest.mark.skipif(bool(networks.MISSING), reason=networks.MISSING)
@pytest.mark.timeout(900)
def test_hosts_of_a_sagemaker_job_lose_a_worker_and_then_the_chief_and_come_to_the_same_bits(
    tmp_path: Path, command_line: CommandLine
) -> None:
    names, url = ["algo-1", "algo-2", "algo-3"], f"s3://{BUCKET}/sagemaker/run"
    job = {"TRAINING_JOB_NAME": "digits", "SM_HOSTS": json.dumps(names), "STEP_SECS": "0.1"}
    words, starts, store = (*RUN, "input.train.batch_size=6"), dict[str, Start](), Store(url)
    with networks.networks(names) as on, served(networks.HERE) as server:

        def start(name: str) -> None:
            home = tmp_path / name
            (home / "tmp").mkdir(parents=True)
            own = {**job, "SM_CURRENT_HOST": name, "HOME": str(home), "TMPDIR": str(home / "tmp")}
            starts[name] = Start(server, home, f"model_dir={url}", *words, env={**server.env, **own}, on=on[name])

        try:
            for name in names:
                start(name)
            for lost in ("algo-3", "algo-1"):
                wait_for_steps(store, 2 * SAVE_STEPS)
                starts[lost].end_of_the_machine()
                shutil.rmtree(tmp_path / lost)
                start(lost)
            assert [starts[name].end() for name in names] == [0, 0, 0]
        finally:
            said = {name: one.said.read_text() for name, one in starts.items()}
            for one in starts.values():
                one.end_of_the_machine()
    assert said["algo-2"].count("training runs one step per loop") == 3, said  # three starts of its task
    done = command_line("model_dir=run", "cluster.num_workers=3", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert bits(folder_in(tmp_path / "algo-1")) == bits(tmp_path / "run")


@pytest.mark.parametrize(
    "words, cluster",
    [
        (["strategy=parameter_server"], {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}),
        (["strategy=multi_worker"], {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}),
    ],
)
def test_what_needs_a_common_folder_is_refused_by_name(
    words: list[str], cluster: dict[str, list[str]], command_line: CommandLine, tmp_path: Path
) -> None:
    place = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    url = f"s3://{BUCKET}/refused/run"
    done = command_line(f"model_dir={url}", *RUN, *words, cwd=tmp_path, TF_CONFIG=place)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and line.startswith(f"runner: model_dir={url}: this process is chief"), line
