"""`python -m runner` with a model_dir in other stores than S3: gs:// and az://, by emulators on loopback."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from runner.checkpoint_files import layout  # noqa: E402
from runner.config.mistakes import ConfigError  # noqa: E402
from runner.remote import store as stores  # noqa: E402
from runner.remote.note import Note, fingerprints  # noqa: E402
from runner.remote.store import Lease, Store  # noqa: E402
from runner.remote.upload import Uploader  # noqa: E402
from tests.support import chains  # noqa: E402
from tests.support.emulators import Emulator, started  # noqa: E402
from tests.support.object_store import BUCKET, RUN, Start, catches_up, folder_in  # noqa: E402
from tests.support.processes import wait_until  # noqa: E402

pytestmark = [
    pytest.mark.world,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # of aiohttp, about gcsfs
]


@pytest.fixture(scope="module", params=["fake-gcs-server", "azurite"])
def emulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with started(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def without_conditions(tmp_path: Path) -> Iterator[Emulator]:
    with started("gcp-storage-emulator", tmp_path) as server:
        yield server


@pytest.fixture
def url(emulator: Emulator) -> str:
    emulator.mode = "ok"
    return f"{emulator.scheme}://{BUCKET}/{uuid.uuid4().hex}/run"


def test_a_machine_that_dies_is_continued_by_another_and_meanwhile_no_second_start_is_let_in(
    emulator: Emulator, url: str, tmp_path: Path
) -> None:
    words, store = (f"model_dir={url}", *RUN, "checkpoint.keep_max=2"), Store(url)
    first = Start(emulator, tmp_path / "first", *words, "train.max_steps=100000")
    try:
        wait_until(lambda: "checkpoint" in store.objects())
        second = Start(emulator, tmp_path / "second", *words)
        assert second.end() == 2 and f"process {first.popen.pid}" in second.said.read_text(), second.said.read_text()
    finally:
        first.end_of_the_machine()
    shutil.rmtree(folder_in(tmp_path / "first"))
    latest = layout.step_of(store.fs.cat_file("checkpoint").decode().split('"')[1]) or 0
    third = Start(emulator, tmp_path / "first", *words, f"train.max_steps={latest + 14}")
    undisturbed = Start(
        emulator, tmp_path / "undisturbed", "model_dir=run", *words[1:], f"train.max_steps={latest + 14}"
    )
    assert (third.end(), undisturbed.end()) == (0, 0), third.said.read_text() + undisturbed.said.read_text()
    here, whole = folder_in(tmp_path / "first"), tmp_path / "undisturbed" / "run"
    found, expected = chains.variables(here, latest + 14), chains.variables(whole, latest + 14)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    kept = {path.name for path in here.glob("model.ckpt-*.index")}
    assert kept == {name for name in store.objects() if name.startswith("model.ckpt-") and name.endswith(".index")}
    assert {layout.step_of(name.removesuffix(".index")) for name in kept} == {latest + 12, latest + 14}

    read = Start(emulator, tmp_path / "fourth", "command=evaluate", f"model_dir={url}")
    assert read.end() == 0, read.said.read_text()
    metrics = json.loads((folder_in(tmp_path / "fourth") / "summary.evaluate.json").read_text())["metrics"]
    assert metrics["eval/loss"] == json.loads((here / "summary.json").read_text())["metrics"]["eval/loss"]
    assert "summary.evaluate.json" in store.objects()


def test_a_store_that_ignores_conditions_is_refused(without_conditions: Emulator, tmp_path: Path) -> None:
    url = f"gs://{BUCKET}/run"
    start = Start(without_conditions, tmp_path, f"model_dir={url}", *RUN)
    assert start.end() == 2
    said = start.said.read_text()
    assert f"model_dir={url}" in said and "lets two runs create the same object" in said
    assert "checkpoint" not in Store(url).objects()


def test_one_start_wins_and_is_followed_when_the_store_finds_it_expired(
    emulator: Emulator, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "_renew", lambda lease: None)
    monkeypatch.setattr(stores, "_this_process", lambda: {"host": uuid.uuid4().hex, "boot": "", "pid": 1, "began": 0})
    store, taken = Store(url), list[int]()
    barrier = threading.Barrier(16)

    def start() -> None:
        barrier.wait()
        try:
            taken.append(Lease.take(store, "folder", 3).number)
        except ConfigError as error:
            assert "in use by another" in str(error)

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [1]
    with pytest.raises(ConfigError, match=r"It can be taken over in \d s"):
        Lease.take(store, "other", 3)
    time.sleep(5)  # time stamps of whole seconds
    assert Lease.take(store, "other", 3).number == 2


def test_only_what_has_changed_is_fetched_again(emulator: Emulator, url: str, tmp_path: Path) -> None:
    store, folder, got = Store(url), tmp_path / "run", list[list[str]]()
    folder.mkdir()
    for name in ("model.ckpt-1.data-00000-of-00001", "export/1/saved_model.pb", "checkpoint"):
        store.fs.pipe_file(name, os.urandom(1000))
    real = type(store.fs).get

    def get(fs: Any, names: list[str], paths: list[str]) -> None:
        got.append(names)
        real(fs, names, paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store.fs), "get", get)
        for _ in range(2):
            store.fetch(folder)
        store.fs.pipe_file("export/1/saved_model.pb", os.urandom(1000))
        store.fetch(folder)
    assert got == [["export/1/saved_model.pb", "model.ckpt-1.data-00000-of-00001"], ["export/1/saved_model.pb"]]
    assert all(store.fs.cat_file(name) == (folder / name).read_bytes() for name in fingerprints(folder))


def test_a_file_that_grows_is_sent(emulator: Emulator, url: str, tmp_path: Path) -> None:
    folder, store, stop = tmp_path / "run", Store(url), threading.Event()
    folder.mkdir()
    journal = folder / "events.chief-0.jsonl"
    journal.write_bytes(bytes(6_000_000))

    def grow() -> None:
        with open(journal, "ab", 0) as file:
            while not stop.wait(0.002):
                file.write(b"a line\n")

    Note(url, "mine").save(folder)
    uploader = Uploader(folder, Lease.take(store, "mine", 60))
    thread = threading.Thread(target=grow)
    thread.start()
    try:
        uploader.send()
    finally:
        stop.set()
        thread.join()
    assert 6_000_000 <= store.fs.info(journal.name)["size"] < journal.stat().st_size
    uploader.lease.end()


def test_without_credentials_the_reason_is_one_line(emulator: Emulator, tmp_path: Path) -> None:
    nobody = dict.fromkeys([*emulator.env], "") | {
        "PYTHONPATH": emulator.env["PYTHONPATH"],
        "FSSPEC_GS_TOKEN": "no.json",
    }
    start = Start(emulator, tmp_path, f"model_dir={emulator.scheme}://{BUCKET}/run", *RUN, env=nobody)
    assert start.end() == 2
    (line,) = start.said.read_text().splitlines()
    assert f"model_dir={emulator.scheme}://{BUCKET}/run" in line


@pytest.mark.parametrize("mode", ["away", "500", "full", "quota", "denied", "slow", "cut"])
def test_a_fault_of_the_store_passes_and_then_all_is_there(
    mode: str, emulator: Emulator, url: str, tmp_path: Path
) -> None:
    emulator.mode = mode
    catches_up(emulator, Store(url), tmp_path / "run", 2, 6_000_000)  # gcsfs sends 5 MB and more in another way
