"""The lease, the sending and the fetching, on a store in memory: what a reader sees at any time, and who may write."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

fsspec = pytest.importorskip("fsspec")

from runner.checkpoint import retention  # noqa: E402
from runner.checkpoint.retention import Keep  # noqa: E402
from runner.checkpoint_files import layout, manifest  # noqa: E402
from runner.config.mistakes import ConfigError, NotAllowed  # noqa: E402
from runner.config.schema import RunSettings  # noqa: E402
from runner.launch.sweeps.optuna_sweeper import STUDY_FILE  # noqa: E402
from runner.remote import store as stores  # noqa: E402
from runner.remote.mirror import Mirror  # noqa: E402
from runner.remote.note import LAST_FILES, NOTE_FILE, Note, fingerprints, upload_order  # noqa: E402
from runner.remote.store import Lease, LeaseLostError, Store  # noqa: E402
from runner.remote.upload import Uploader  # noqa: E402
from runner.system.files import FolderLostError  # noqa: E402
from runner.tracking.run_record import RUN_FILE  # noqa: E402

KEEP = Keep(2)


class Killed(BaseException):
    """The process ends here."""


def save(folder: Path, step: int, text: str = "") -> None:
    """Write a checkpoint as the runner does, and let old ones expire."""
    folder.mkdir(exist_ok=True)
    with layout.scratch(folder) as scratch:
        path = scratch / f"model.ckpt-{step}"
        for suffix in ("data-00000-of-00001", "index", "input-0.data-00000-of-00001", "input-0.index"):
            Path(f"{path}.{suffix}").write_text(f"{suffix} {step} {text}" * 50)
        manifest.write_manifest(path, step, float(step), {0: "saved"})
        layout.publish(path, folder)
    (folder / "events.chief-0.jsonl").open("a").write(f"{step}\n")
    retention.expire(folder, f"model.ckpt-{step}", KEEP)


def uploader(store: Store, folder: Path, secs: float = 60) -> Uploader:
    note = Note.read(folder, store.url)
    note.folder = note.folder or uuid.uuid4().hex
    note.save(folder)
    return Uploader(folder, Lease.take(store, note.folder, secs))


def fetched(store: Store, folder: Path) -> str:
    """Return the latest checkpoint that another machine gets, whose files are checked; "": there is none, and nothing
    that looks like one.
    """
    folder.mkdir()
    store.fetch(folder)
    path = layout.latest_checkpoint(folder)
    if path is None:
        assert not layout.candidates_in(folder)
        return ""
    assert manifest.what_is_missing(path) is None and manifest.what_has_changed(path) is None
    return Path(path).name


def names(store: Store) -> set[str]:
    return set(store.objects())


def test_what_is_sent_is_fetched_and_what_expires_here_expires_there(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    for step in (1, 2):
        save(folder, step)
    (folder / "export" / "7").mkdir(parents=True)
    (folder / "export" / "7" / "saved_model.pb").write_text("graph")
    for hidden in (".lock", ".tracking.json", ".task.chief-0.lock"):
        (folder / hidden).write_text("secret")
    sending = uploader(store, folder)
    while not sending.send():
        pass
    save(folder, 3)
    while not sending.send():
        pass
    there = names(store)
    assert {"checkpoint", "model.ckpt-3.index", "export/7/saved_model.pb", "events.chief-0.jsonl"} <= there
    assert not any("ckpt-1." in name or name.startswith(".") for name in there)
    assert fetched(store, tmp_path / "there") == "model.ckpt-3"
    mine, theirs = (
        {name: (one / name).read_bytes() for name in fingerprints(one)} for one in (folder, tmp_path / "there")
    )
    assert theirs == mine


def test_a_reader_finds_a_whole_checkpoint_wherever_the_sending_is_killed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls, last = tmp_path / "here", 0, 0
    folder.mkdir()
    first, kills = uploader(store, folder), 0
    for step in (1, 2, 3, 3, 4):  # one of them is saved again
        save(folder, step, text=str(kills))
        there = {name: store.fs.cat_file(name) for name in names(store)}
        noted = (folder / NOTE_FILE).read_bytes()
        for allowed in range(60):
            calls = 0
            for name in names(store) - there.keys():
                store.fs.rm_file(name)
            for name, data in there.items():
                store.fs.pipe_file(name, data)
            (folder / NOTE_FILE).write_bytes(noted)

            def dying(name: str, allowed: int = allowed) -> Any:
                real = getattr(type(store.fs), name)

                def call(fs: Any, *arguments: Any, **settings: Any) -> Any:
                    nonlocal calls
                    if fs.path != store.fs.path:  # a lease of an earlier test is renewed
                        return real(fs, *arguments, **settings)
                    calls += 1
                    if calls > allowed:
                        raise Killed
                    return real(fs, *arguments, **settings)

                return call

            again = Uploader(folder, first.lease)  # a killed one has left its note
            with monkeypatch.context() as patch:
                for name in ("pipe_file", "rm_file", "put_file"):
                    patch.setattr(type(store.fs), name, dying(name))
                try:
                    while not again.send():
                        pass
                    is_over = True
                except Killed:
                    is_over, kills = False, kills + 1
            number = layout.step_of(fetched(store, tmp_path / f"{step}-{allowed}-{kills}")) or 0
            assert number in (last, step, step - 1)
            again = Uploader(folder, first.lease)
            while not again.send():
                pass
            assert fetched(store, tmp_path / f"{step}-{allowed}-{kills}-after") == f"model.ckpt-{step}"
            if is_over:
                assert number == step
                break
        last = step
    assert kills >= 40


def test_what_says_that_a_run_is_over_is_sent_after_its_last_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(LAST_FILES) == {layout.STATE_FILE, RUN_FILE, STUDY_FILE}
    folder, sent = tmp_path / "sweep", list[str]()
    folder.mkdir()
    sending = uploader(store, folder)
    save(folder / "3", 1)
    (folder / "3" / RUN_FILE).write_text("finished")
    (folder / STUDY_FILE).write_text("complete")
    for kind, place in (("pipe_file", 0), ("put_file", 1)):
        real = getattr(type(store.fs), kind)

        def call(fs: Any, *arguments: Any, real: Any = real, place: int = place, **settings: Any) -> Any:
            sent.append(arguments[place])
            return real(fs, *arguments, **settings)

        monkeypatch.setattr(type(store.fs), kind, call)
    sending.send()
    assert sent[-3:] == ["3/checkpoint", f"3/{RUN_FILE}", STUDY_FILE] and "3/model.ckpt-1.index" in sent[:-3]


def test_a_state_that_changes_while_it_is_read_is_sent_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "here", Note.unsent
    save(folder, 1)
    sending = uploader(store, folder)

    def left(note: Note, of: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        if not layout.read_state(folder).latest == "model.ckpt-2":
            save(folder, 2)
        return real(note, of)

    monkeypatch.setattr(Note, "unsent", left)
    while not sending.send():
        pass
    assert fetched(store, tmp_path / "there") == "model.ckpt-2"


def test_training_goes_on_while_a_checkpoint_is_sent(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "here", type(store.fs).put_file
    save(folder, 1)
    steps = iter(range(2, 9))

    def slow(fs: Any, source: str, name: str) -> Any:
        if ".data-" in name and (step := next(steps, None)):
            save(folder, step)  # the checkpoint that is being sent expires
        return real(fs, source, name)

    monkeypatch.setattr(type(store.fs), "put_file", slow)
    sending = uploader(store, folder)
    for number in range(5):
        sending.send()
        fetched(store, tmp_path / str(number))
    while not sending.send():
        pass
    assert fetched(store, tmp_path / "end") == "model.ckpt-8"


def test_a_file_that_is_gone_when_it_is_to_be_sent_is_left_out(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "here", shutil.copyfile
    save(folder, 1)
    (folder / "temporary").write_text("of a task")

    def copy(source: Path, target: Path) -> None:
        if source.name == "temporary":
            source.unlink()
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy)
    sending = uploader(store, folder)
    sending.send()
    assert sending.send()
    assert "model.ckpt-1.index" in names(store) and "temporary" not in names(store)


def test_what_is_sent_does_not_grow_meanwhile(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real, sent = tmp_path / "here", type(store.fs).put_file, list[str]()
    save(folder, 1)
    journal = folder / "events.chief-0.jsonl"

    def growing(fs: Any, source: str, name: str) -> None:
        before = Path(source).read_bytes()
        journal.open("a").write("another line\n")
        assert Path(source).read_bytes() == before
        sent.append(name)
        real(fs, source, name)

    sending = uploader(store, folder)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.fs), "put_file", growing)
        assert not sending.send()
    assert journal.name in sent and "model.ckpt-1.index" in names(store)
    while not sending.send():
        pass
    assert store.fs.cat_file(journal.name) == journal.read_bytes()


@pytest.mark.parametrize("error", [PermissionError(), OSError(errno.EOPNOTSUPP, "no links"), OSError(errno.ENOSPC, "")])
def test_a_disk_without_links_or_space_is_sent_from_too(
    error: OSError, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise error

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfile", fail)
    save(tmp_path / "here", 1)
    sending = uploader(store, tmp_path / "here")
    while not sending.send():
        pass
    assert fetched(store, tmp_path / "there") == "model.ckpt-1"


def test_deleting_the_local_folder_removes_nothing_from_the_bucket(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    save(folder, 1)
    sending = uploader(store, folder)
    sending.send()
    before = names(store)
    for path in folder.glob("model*"):  # halfway through rm -r
        path.unlink()
    sending.send()
    assert names(store) == before
    shutil.rmtree(folder)
    with pytest.raises(FolderLostError):
        sending.send()
    assert names(store) == before


def test_the_last_writer_keeps_its_folder_and_any_other_takes_the_buckets(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, 1)
    sending = uploader(store, first)
    while not sending.send():
        pass
    save(first, 2)  # not sent
    assert store.is_current(first)
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)  # the machine of the first is lost
    second.mkdir()
    assert not store.is_current(second)
    store.fetch(second)
    save(second, 5)
    other = uploader(store, second)
    while not other.send():
        pass
    assert store.is_current(second) and not store.is_current(first)
    (first / "of_the_first").write_text("not sent")
    store.fetch(first)
    assert [Path(path).name for path in layout.candidates_in(first)] == ["model.ckpt-5", "model.ckpt-1"]
    assert fingerprints(first).keys() == names(store)


def test_a_process_that_fetches_removes_nothing_of_one_that_begins_meanwhile(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "elsewhere", 4)
    sending = uploader(store, tmp_path / "elsewhere")
    while not sending.send():
        pass
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)
    folder, has_looked, real = tmp_path / "here", threading.Event(), Store.objects
    reader, writer = (Mirror(folder, store.url) for _ in range(2))

    def slow(store: Store) -> dict[str, Mapping[str, Any]]:
        found = real(store)
        if threading.current_thread() is reading and not has_looked.is_set():
            has_looked.set()
            time.sleep(1)
        return found

    monkeypatch.setattr(Store, "objects", slow)
    reading = threading.Thread(target=reader.open, args=("model_dir=",))
    reading.start()
    assert has_looked.wait(60)
    writer.open("model_dir=")
    writer.begin(os.environ, RunSettings())
    save(folder, 8)
    reading.join()
    assert Path(layout.latest_checkpoint(folder) or "").name == "model.ckpt-8"
    assert Note.read(folder).folder and store.is_current(folder)
    writer.close()


# --- the lease --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("elsewhere")
def test_what_was_not_sent_is_set_aside_when_another_has_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    save(folder, 1)
    sending = uploader(store, folder)
    while not sending.send():
        pass
    save(folder, 2)
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)  # the machine of the first is lost
    other = tmp_path / "other"
    other.mkdir()
    store.fetch(other)
    save(other, 3)
    uploader(store, other).send()
    mine = (folder / "model.ckpt-2.index").read_bytes()
    real, calls = type(store.fs).get, list[int]()

    def get(fs: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise FileNotFoundError if len(calls) == 1 else ConnectionResetError
        real(fs, *args)

    monkeypatch.setattr(type(store.fs), "get", get)  # what is fetched expires, and then the store fails
    with pytest.raises(ConfigError, match="cannot be reached"):
        Mirror(folder, store.url).open("model_dir=")
    Mirror(folder, store.url).open("model_dir=")
    assert layout.latest_checkpoint(folder) == str(folder / "model.ckpt-3") and not list(folder.glob("model.ckpt-2*"))
    assert (folder / ".unsent" / "model.ckpt-2.index").read_bytes() == mine
    assert layout.latest_checkpoint(folder / ".unsent") == str(folder / ".unsent" / "model.ckpt-2")
    assert str(folder / ".unsent") in capsys.readouterr().err
    said = names(store)
    Mirror(folder, store.url).open("model_dir=")
    assert not capsys.readouterr().err and names(store) == said


@pytest.mark.usefixtures("stores_in_memory")
def test_a_start_whose_fetch_fails_holds_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    store, folder = Store(f"memory://{uuid.uuid4().hex}/run"), tmp_path / "here"
    store.fs.pipe_file("events.chief-0.jsonl", b"")
    folder.mkdir()
    monkeypatch.setattr(Store, "fetch", fail)
    with pytest.raises(ConfigError, match="full"):
        Mirror(folder, store.url).begin(os.environ, RunSettings())
    Lease.take(store, "next", 60).end()


def test_a_run_that_is_wholly_sent_has_not_lost_its_lease(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "here").mkdir()
    mirror = Mirror(folder, store.url)
    mirror.begin(os.environ, RunSettings())
    monkeypatch.setattr(Lease, "end", lambda lease: setattr(lease, "lost", "another began a second later"))
    assert mirror.close() == ""


def test_a_saved_model_is_sent_after_its_variables_and_removed_before_them() -> None:
    files = ["saved_model.pb", "variables/variables.data-00000-of-00001", "variables/variables.index", "assets/words"]
    there = sorted((f"export/7/{name}" for name in files), key=upload_order)
    assert there[-2:] == ["export/7/variables/variables.index", "export/7/saved_model.pb"]


def test_of_16_starts_at_once_one_wins(store: Store) -> None:
    ends: list[str] = []
    barrier = threading.Barrier(16)

    def start() -> None:
        barrier.wait()
        try:
            Lease.take(store, uuid.uuid4().hex, 60)
            ends.append("won")
        except ConfigError:
            ends.append("refused")

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["refused"] * 15 + ["won"]


@pytest.mark.usefixtures("elsewhere")
def test_an_expired_lease_is_taken_over_and_its_holder_then_sends_nothing(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    save(folder, 1)
    sending = uploader(store, folder, secs=2)
    sending.send()
    holder = store.lease(1)
    with pytest.raises(ConfigError, match=f"{store.url} is in use by another run on {holder['host']}"):
        Lease.take(store, "other", 60)
    time.sleep(2.2)  # stopped by SIGSTOP
    assert Lease.take(store, "other", 60).number == 2
    before = {name: store.fs.cat_file(name) for name in names(store)}
    save(folder, 2)
    for _ in range(2):
        with pytest.raises(LeaseLostError):
            sending.send()
    assert {name: store.fs.cat_file(name) for name in names(store)} == before
    assert store.lease(1) == holder


def test_a_renewed_lease_does_not_expire_and_an_ended_one_is_free_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    lease = Lease.take(store, "mine", 2)
    time.sleep(2.5)
    with pytest.raises(ConfigError):
        Lease.take(store, "other", 60)
    lease.end()
    other = Lease.take(store, "other", 60)
    assert other.number == 2
    other.end()


def test_a_process_of_this_host_that_has_ended_holds_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stores._this_process
    with monkeypatch.context() as patch:
        patch.setattr(stores, "_this_process", lambda: {**real(), "ticks": 1})  # an earlier process of this number
        Lease.take(store, "mine", 60)
    assert Lease.take(store, "other", 60).number == 2
    with pytest.raises(ConfigError):  # this process lives
        Lease.take(store, "third", 60)


@pytest.mark.parametrize("jump", [-86400.0, 1.0])
def test_a_clock_that_jumps_does_not_make_a_holder_a_dead_one(
    jump: float, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lease.take(store, "mine", 60)
    # What the kernel then says of when it began, by the clock.
    real = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: real() + jump)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    with pytest.raises(ConfigError, match="in use by another run"):
        Lease.take(store, "other", 60)


@pytest.mark.parametrize("by_another", [False, True])
def test_a_lease_whose_answer_is_lost_is_ours_unless_another_has_it(
    by_another: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(store.fs).pipe_file

    def creating_twice(fs: Any, path: str, data: bytes, mode: str = "overwrite") -> None:  # as libraries try again
        real(fs, path, b'{"host": "another"}' if by_another else data, mode=mode)
        real(fs, path, data, mode=mode)

    monkeypatch.setattr(type(store.fs), "pipe_file", creating_twice)
    if by_another:
        with pytest.raises(ConfigError, match="in use by another run on another"):
            Lease.take(store, "mine", 60)
    else:
        assert Lease.take(store, "mine", 60).number == 1


def test_a_store_that_creates_an_object_twice_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(store.fs).pipe_file
    monkeypatch.setattr(type(store.fs), "pipe_file", lambda fs, path, data, mode="": real(fs, path, data))
    with pytest.raises(NotAllowed, match=f"model_dir={store.url}"):
        Lease.take(store, "mine", 60)
