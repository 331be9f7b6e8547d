"""A chief and a worker with a folder each: what the bucket and both folders have, and when a message is delivered."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from runner.checkpoint import retention
from runner.checkpoint.retention import Keep
from runner.checkpoint_files import layout, manifest
from runner.config.mistakes import ConfigError
from runner.config.schema import RunSettings
from runner.distribute.cluster import Cluster
from runner.remote import store as stores
from runner.remote import upload
from runner.remote.mirror import Mirror
from runner.remote.note import Note, is_sent_from
from runner.remote.store import CALL_FILE, LEASES, PEERS_FOLDER, Lease, LeaseLostError, Store
from runner.remote.upload import Courier, Uploader
from runner.tracking.shipping import NOT_ALL
from tests.remote.test_object_store import fetched, names
from tests.support.control_plane import ControlPlane, Found
from tests.support.processes import wait_until

KEEP = Keep(2)
TASKS = {"chief": ["a:1"], "worker": ["b:1"]}


class Host:
    """A host of a cluster with `tasks`. Args: worker: its index; 0: the chief, which takes the lease."""

    def __init__(self, store: Store, folder: Path, worker: int = 0, tasks: Mapping[str, Sequence[str]] = TASKS) -> None:
        self.folder, self.worker, self.place, self.tasks = folder, worker, folder / LEASES, tasks
        (self.place / PEERS_FOLDER).mkdir(parents=True, exist_ok=True)
        Note(store.url, "" if worker else folder.name, Note.read(folder).files, worker).save(folder)
        lease = Lease(store, 0, {"tasks": tasks}) if worker else Lease.take(store, folder.name, 60)
        self.uploader = Uploader(folder, lease)
        self.courier = Courier(self.uploader)

    def save(self, step: int, text: str = "") -> None:
        """Save as a task of this host does: a worker's copy has the input state of that worker alone."""
        with layout.scratch(self.folder) as scratch:
            path = scratch / f"model.ckpt-{step}"
            for suffix in ("data-00000-of-00001", "index"):
                Path(f"{path}.{suffix}").write_text(f"{suffix} {step} of {self.worker}")
                Path(f"{path}.input-{self.worker}.{suffix}").write_text(f"{suffix} {step} of {self.worker} {text}")
            manifest.write_manifest(path, step, float(step), {0: "saved", 1: "saved"})
            layout.publish(path, self.folder)
        retention.expire(self.folder, f"model.ckpt-{step}", KEEP)

    def send(self) -> None:
        while not self.uploader.send():
            pass

    def say(self, **message: object) -> None:
        """Write this host's message, and send it."""
        name = f"{PEERS_FOLDER}/worker-0.json" if self.worker else CALL_FILE
        (self.place / name).write_text(json.dumps({"run": "a", "generation": 1, "tasks": self.tasks, **message}))
        self.courier.say()

    def heard(self) -> str:
        """Look for messages, and return the last that this host's supervisor sees."""
        self.courier.hear()
        path = self.place / (CALL_FILE if self.worker else f"{PEERS_FOLDER}/worker-0.json")
        message = json.loads(path.read_text()) if path.exists() else {}
        return str(message.get("phase") or message.get("state") or "")

    def checkpoints(self) -> list[str]:
        return [Path(path).name for path in layout.candidates_in(self.folder)]


@pytest.fixture
def hosts(store: Store, tmp_path: Path) -> tuple[Host, Host]:
    chief, worker = Host(store, tmp_path / "chief"), Host(store, tmp_path / "worker", 1)
    chief.say(phase="gather")
    assert worker.heard() == "gather"
    chief.say(phase="go")
    assert worker.heard() == "go"
    return chief, worker


def test_a_checkpoint_is_there_when_the_input_state_of_each_worker_is(
    hosts: tuple[Host, Host],
    store: Store,
    tmp_path: Path,
) -> None:
    chief, worker = hosts
    for host in hosts:
        host.save(1)
    chief.send()
    assert "model.ckpt-1.data-00000-of-00001" in names(store)
    assert not {"checkpoint", "model.ckpt-1.index"} & names(store) and not fetched(store, tmp_path / "early")
    worker.send()
    chief.send()
    assert fetched(store, tmp_path / "reader") == "model.ckpt-1"
    part = "runner_files/model.ckpt-1.input-1.index"
    for folder in (tmp_path / "reader", chief.folder, worker.folder):
        assert (folder / part).read_text() == "index 1 of 1 "
    assert (tmp_path / "reader" / "model.ckpt-1.index").read_text() == "index 1 of 0"


def test_what_a_host_asks_of_the_store_grows_at_most_linearly_with_the_cluster(store: Store, tmp_path: Path) -> None:
    """32 hosts beside 8, which start one after another, so that each waits for the others four times as long."""
    found: dict[int, Found] = {}
    for num_hosts in (8, 32):
        place = Store(f"{store.url}-{num_hosts}")
        found[num_hosts] = ControlPlane(num_hosts, tmp_path / str(num_hosts), apart_secs=1.0, store=place).run()
        place.fs.rm("", recursive=True)
    # What a listing names to the chief grows with the hosts and with the wait; it is one request for 1,000 answers.
    pairs = [(few, found[32].requests[name]) for name, few in found[8].requests.items()]
    # A worker asks for the chief's message alone, and is not told of the answers of all others.
    pairs += [(few, found[32].objects[name]) for name, few in found[8].objects.items() if name != "chief"]
    # In the folders: a new answer is delivered alone, not all of them once more.
    couriers = [name for name in found[8].operations if name.endswith("/courier")]
    pairs += [(found[8].operations[name], found[32].operations[name]) for name in couriers]
    assert len(couriers) == 8
    for few, many in pairs:
        assert many <= 4 * few


def test_the_chief_fetches_while_a_checkpoint_is_published(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files move into place one by one, the index last; what the bucket does not have is not removed meanwhile."""
    chief, _ = hosts
    real, looks = os.replace, list[str]()

    def replace(source: Any, target: Any) -> None:
        if str(target).endswith("model.ckpt-2.index") and not looks:
            looks.append("one")
            chief.uploader.send()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    chief.save(2)
    assert looks and manifest.what_is_wrong(chief.folder / "model.ckpt-2") is None


@pytest.mark.parametrize("what", ["no index", "another index"])
def test_a_worker_sends_the_state_of_its_input_whatever_became_of_its_copy(
    what: str, hosts: tuple[Host, Host], store: Store, tmp_path: Path
) -> None:
    chief, worker = hosts
    for host in hosts:
        host.save(1)
    index = worker.folder / "model.ckpt-1.index"
    index.unlink()
    if what == "another index":
        index.write_text("x")
    worker.send()
    chief.send()
    assert fetched(store, tmp_path / "reader") == "model.ckpt-1"


def test_a_damaged_state_of_a_worker_s_input_is_not_sent(
    hosts: tuple[Host, Host], store: Store, tmp_path: Path
) -> None:
    chief, worker = hosts
    for host in hosts:
        host.save(1)
    (worker.folder / "runner_files" / "model.ckpt-1.input-1.index").write_text("x")
    worker.send()
    chief.send()
    assert not fetched(store, tmp_path / "reader") and not any(".input-1." in name for name in names(store))


@pytest.mark.parametrize("delay", [0, 0.05])
def test_a_start_takes_over_from_the_process_of_a_chief_that_waits_for_a_worker(
    delay: float, hosts: tuple[Host, Host], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process fetches all the time, under the lock under which a start does."""
    chief, _ = hosts
    memory = type(store.fs.fs)

    def slow(real: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            time.sleep(delay)
            return real(*args, **settings)

        return call

    for name in ("find", "cat_file", "pipe_file"):
        monkeypatch.setattr(memory, name, slow(getattr(memory, name)))
    chief.save(1)
    is_last = threading.Event()
    is_last.set()
    sender = threading.Thread(
        target=upload.send_changes, args=(chief.folder, chief.uploader.lease, is_last), daemon=True
    )
    sender.start()
    wait_until(lambda: is_sent_from(chief.folder))
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)  # its supervisor was killed
    mirror = Mirror(chief.folder, store.url)
    mirror.begin(os.environ, RunSettings(upload_secs=1))
    sender.join(60)
    assert not sender.is_alive()
    mirror.close()


def test_what_expires_on_the_chief_expires_in_the_bucket_and_a_worker_removes_nothing(
    hosts: tuple[Host, Host],
    store: Store,
) -> None:
    chief, worker = hosts
    for step in (1, 2, 3):
        for host in (chief, worker):
            host.save(step)
        worker.send()
        assert f"model.ckpt-{max(1, step - 2)}.index" in names(store) or step < 3
        chief.send()
    parts = {name for name in names(store) if ".input-1.index" in name}
    assert parts == {f"runner_files/model.ckpt-{step}.input-1.index" for step in (2, 3)}
    assert not any("ckpt-1." in name for name in names(store))
    assert len(Note.read(worker.folder).files) < 6 + 2  # nothing of what has expired


def test_all_start_from_the_bucket_if_an_input_state_was_lost_with_its_machine(
    hosts: tuple[Host, Host],
    store: Store,
    tmp_path: Path,
) -> None:
    chief, worker = hosts
    for host in (chief, worker):
        host.save(1)
        host.send()
    chief.send()
    chief.save(2)
    chief.send()
    again = Host(store, tmp_path / "new machine", 1)  # without the input state of step 2
    chief.say(phase="gather", generation=2)
    assert again.heard() == "gather"
    again.say(state="ready", generation=2)
    assert chief.heard() == "ready"
    assert chief.checkpoints() == ["model.ckpt-1"]
    chief.say(phase="go", generation=2)
    assert again.heard() == "go" and again.checkpoints() == ["model.ckpt-1"]
    for host in (chief, again):
        host.save(3)
        host.send()
    chief.send()
    assert fetched(store, tmp_path / "reader") == "model.ckpt-3"


def test_what_the_chief_gives_up_leaves_nothing_in_the_bucket_for_ever(
    hosts: tuple[Host, Host],
    store: Store,
    tmp_path: Path,
) -> None:
    """The oldest checkpoint has expired by the one that is given up, and is again among those that are kept."""
    chief, worker = hosts
    for step in (1, 2):
        for host in (worker, chief):
            host.save(step)
            host.send()
    chief.save(3)  # and step 1 has expired
    chief.send()
    again = Host(store, tmp_path / "new machine", 1)  # without the input state of step 3
    chief.say(phase="gather", generation=2)
    assert again.heard() == "gather"
    again.say(state="ready", generation=2)
    assert chief.heard() == "ready"
    assert chief.checkpoints() == ["model.ckpt-2", "model.ckpt-1"]
    for path in chief.checkpoints():
        assert manifest.what_is_wrong(chief.folder / path) is None
    chief.say(phase="go", generation=2)
    assert again.heard() == "go"
    for step in (3, 4):
        for host in (again, chief):
            host.save(step)
            host.send()
    chief.send()
    in_bucket = {layout.checkpoint_of(name) for name in names(store)} - {None}
    assert in_bucket == {"model.ckpt-3", "model.ckpt-4"}


def test_before_the_last_answer_both_have_sent_what_they_have(
    hosts: tuple[Host, Host],
    store: Store,
    tmp_path: Path,
) -> None:
    chief, worker = hosts
    for host in (chief, worker):
        host.save(1)
    chief.say(phase="gather", generation=2)
    assert worker.heard() == "gather"
    worker.say(state="ready", generation=2)
    assert chief.heard() == "ready"
    assert fetched(store, tmp_path / "reader") == "model.ckpt-1"
    assert (worker.folder / "model.ckpt-1.index").read_text() == "index 1 of 1"  # its copy
    chief.say(phase="go", generation=2)
    assert worker.heard() == "go"
    assert (worker.folder / "model.ckpt-1.index").read_text() == "index 1 of 0"
    (worker.folder / "events.worker-0.jsonl").write_text("{}")
    chief.say(phase="go", generation=2, nonces={"worker:0": "new"})  # once more: its task runs
    assert worker.heard() == "go" and (worker.folder / "events.worker-0.jsonl").exists()


def test_the_worker_of_another_cluster_sends_nothing(hosts: tuple[Host, Host], store: Store, tmp_path: Path) -> None:
    chief, _ = hosts
    other = Host(store, tmp_path / "other", 1, {"chief": ["c:1"], "worker": ["d:1"]})
    other.save(1)
    before = {name: store.fs.cat_file(name) for name in store.fs.find("")}
    for phase in ("go", "gather"):
        assert other.heard() == phase  # to be said if its own chief does not come
        with pytest.raises(LeaseLostError):
            other.send()
        with pytest.raises(LeaseLostError):
            other.say(state="ready")
        assert {name: store.fs.cat_file(name) for name in store.fs.find("")} == before
        chief.say(phase="gather", generation=2)
        before = {name: store.fs.cat_file(name) for name in store.fs.find("")}


@pytest.mark.usefixtures("elsewhere")
def test_a_worker_that_was_stopped_while_others_took_over_sends_nothing(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chief, worker = Host(store, tmp_path / "chief"), Host(store, tmp_path / "worker", 1)
    chief.say(phase="go")
    assert worker.heard() == "go"
    worker.save(1)
    monkeypatch.setattr("runner.remote.store._is_dead", lambda holder: True)
    other = Host(store, tmp_path / "other")
    other.say(run="b", phase="go")
    before = {name: store.fs.cat_file(name) for name in store.fs.find("")}
    assert worker.heard() == "go" and json.loads((worker.place / CALL_FILE).read_text())["run"] == "a"
    with pytest.raises(LeaseLostError):
        worker.send()
    with pytest.raises(LeaseLostError):
        worker.say(state="lost")
    assert {name: store.fs.cat_file(name) for name in store.fs.find("")} == before
    other.say(run="b", phase="gather", generation=2)  # now it may join, with what the bucket has
    assert worker.heard() == "gather" and not worker.checkpoints()
    assert not any(".input-1." in name for name in names(store))


def test_a_state_that_the_chief_saves_while_it_fetches_stays(
    hosts: tuple[Host, Host], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)  # the first chief is lost
    _, worker = hosts
    for host in hosts:
        host.save(1)
        host.send()
    hosts[0].send()
    folder = tmp_path / "new"
    folder.mkdir()
    Note(store.url).save(folder)
    store.fetch(folder)
    chief = Host(store, folder)
    chief.say(phase="go", generation=2)
    worker.save(2)
    worker.uploader.lease = chief.uploader.lease
    worker.send()
    real, saved = Store.objects, list[int]()

    def objects(store: Store) -> dict[str, Any]:
        found = real(store)
        if len(saved) < 2:
            saved.append(1)
            if len(saved) == 2:
                chief.save(2)
        return found

    monkeypatch.setattr(Store, "objects", objects)
    chief.send()
    assert layout.latest_checkpoint(folder) == str(folder / "model.ckpt-2")
    assert fetched(store, tmp_path / "reader") == "model.ckpt-2"


def test_a_worker_hears_the_end_also_after_another_command_took_the_lease(
    hosts: tuple[Host, Host], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief, worker = hosts
    chief.say(phase="ended")
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)
    Lease.take(store, "an evaluation", 60)
    assert worker.heard() == "ended"


def test_a_worker_s_folder_is_its_own_while_it_runs(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "send_changes", lambda *args: 0)
    chief, folder = Host(store, tmp_path / "chief"), tmp_path / "worker"
    chief.save(1)
    (chief.folder / "config.yaml").write_text("a: 1")
    chief.send()
    mirror = Mirror(folder, store.url)
    mirror.open("model_dir=")
    mirror.begin(os.environ, RunSettings(upload_secs=1), Cluster("worker", 0, TASKS))
    (folder / "events.worker-1.jsonl").write_text("a line")
    (folder / "model.ckpt-2.index").write_text("not in the bucket yet")
    Mirror(folder, store.url).open("model_dir=")  # as `runner.load` of another process on this host
    assert (folder / "events.worker-1.jsonl").exists() and (folder / "model.ckpt-2.index").exists()
    with pytest.raises(ConfigError, match=f"run.local_dir={folder} is in use"):  # a home that two hosts share
        Mirror(folder, store.url).begin(os.environ, RunSettings(), Cluster("worker", 1, TASKS))
    mirror.close()
    Mirror(folder, store.url).open("model_dir=")
    assert (folder / ".unsent" / "events.worker-1.jsonl").read_text() == "a line"
    assert not (folder / "model.ckpt-2.index").exists() and (folder / "config.yaml").read_text() == "a: 1"


def test_a_worker_that_was_the_chief_of_an_earlier_start_gets_the_files_of_the_new_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "send_changes", lambda *args: 0)
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)  # the lease of the first is over
    first = Host(store, tmp_path / "first")
    (first.folder / "config.yaml").write_text("a: 1")
    first.send()
    mirror = Mirror(first.folder, store.url)
    mirror.open("model_dir=")
    mirror.begin(os.environ, RunSettings(upload_secs=1), Cluster("worker", 0, TASKS))
    chief = Host(store, tmp_path / "chief")
    chief.uploader.fetch()
    (chief.folder / "config.yaml").write_text("a: 2, of another length")
    chief.send()
    Uploader(first.folder, Lease(store, 0)).fetch()
    assert (first.folder / "config.yaml").read_text() == "a: 2, of another length"
    mirror.close()


def test_by_hand_a_checkpoint_without_the_state_of_a_worker_is_named_and_not_waited_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)  # the chief's process has ended
    chief = Host(store, tmp_path / "chief")
    chief.say(phase="gather")
    chief.save(1)
    assert upload.main([str(chief.folder)]) == NOT_ALL
    assert "model.ckpt-1.index: the state of a worker's input is missing" in capsys.readouterr().err
    assert "model.ckpt-1.data-00000-of-00001" in names(store) and not fetched(store, tmp_path / "reader")
