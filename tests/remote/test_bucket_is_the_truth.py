"""What a start makes of a folder that differs from its bucket: what it fetches, sends, and leaves alone.

On a store in memory, with checkpoints as the runner saves them. Nothing in the bucket is replaced or removed because a
folder was emptied, put back from a backup, or damaged.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from runner.checkpoint.retention import Keep
from runner.checkpoint_files import layout, manifest
from runner.config.mistakes import ConfigError
from runner.config.schema import RunSettings
from runner.remote import note as notes
from runner.remote import store as stores
from runner.remote import upload
from runner.remote.mirror import Mirror
from runner.remote.note import NOTE_FILE, Note, fingerprints, sending_in
from runner.remote.store import Lease, Store
from runner.remote.upload import Uploader
from tests.remote.test_object_store import fetched, names, save
from tests.support.processes import wait_until


def contents(store: Store) -> dict[str, bytes]:
    return {name: store.fs.cat_file(name) for name in names(store)}


def start(store: Store, folder: Path) -> Mirror:
    """Begin as the supervisor of a run does."""
    mirror = Mirror(folder, store.url)
    mirror.open("model_dir=")
    mirror.begin(os.environ, RunSettings(upload_secs=20))
    return mirror


def end(store: Store, mirror: Mirror, folder: Path) -> None:
    """End as a supervisor does, and let others take the lease at once."""
    assert mirror.close() == ""
    number = store.highest()
    store.fs.pipe_file(f".lease/{number:08d}", json.dumps({**store.lease(number), "is_over": True}).encode())
    assert not Note.read(folder).unsent(fingerprints(folder))


def run(store: Store, folder: Path, *steps: int) -> None:
    """A run of these checkpoints, from its start until everything is sent."""
    mirror = start(store, folder)
    (folder / "config.yaml").write_text("name: a\nsteps: 20\n")
    (folder / "run.json").write_text("{}")
    with open(folder / "events.supervisor-0.jsonl", "a") as file:
        file.write("{}\n")
    for step in steps:
        save(folder, step)
        (folder / "run.json").write_text(json.dumps({"step": step}))
    end(store, mirror, folder)


@pytest.fixture
def folder(store: Store, tmp_path: Path) -> Path:
    """The folder of a run at step 3, of which the bucket has all."""
    folder = tmp_path / "here"
    run(store, folder, 1, 2, 3)
    return folder


def latest(folder: Path) -> str:
    path = layout.latest_checkpoint(folder)
    assert path is not None and manifest.what_is_wrong(path) is None
    return Path(path).name


def test_an_emptied_folder_gets_what_the_bucket_has(store: Store, folder: Path, tmp_path: Path) -> None:
    before = contents(store)
    for path in folder.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    Mirror(folder, store.url).open("model_dir=")  # as a command that only reads
    assert latest(folder) == "model.ckpt-3"
    run(store, folder)
    after = contents(store)
    assert before.keys() == after.keys()
    assert all(after[name] == data for name, data in before.items() if "ckpt" in name)
    assert fetched(store, tmp_path / "reader") == "model.ckpt-3"


def test_a_folder_put_back_from_a_backup_becomes_what_the_bucket_has(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, backup = tmp_path / "here", tmp_path / "backup"
    run(store, folder, 1, 2)
    shutil.copytree(folder, backup)
    run(store, folder, 3, 4, 5)
    before = contents(store)
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    Mirror(folder, store.url).open("model_dir=")
    assert latest(folder) == "model.ckpt-5" and not list(folder.glob("model.ckpt-1*"))
    assert not (folder / ".unsent").exists(), capsys.readouterr().err
    run(store, folder)
    assert {name: data for name, data in contents(store).items() if "ckpt" in name} == {
        name: data for name, data in before.items() if "ckpt" in name
    }


@pytest.mark.parametrize("with_times", [True, False])
def test_a_backup_without_hidden_files_becomes_what_the_bucket_has(
    with_times: bool, store: Store, tmp_path: Path
) -> None:
    """The note of the folder knows all, so its files have to tell: the state file names an older checkpoint."""
    folder, backup = tmp_path / "here", tmp_path / "backup"
    run(store, folder, 1, 2)
    shutil.copytree(folder, backup, ignore=shutil.ignore_patterns(".*"))
    run(store, folder, 3, 4, 5)
    before = contents(store)
    for path in folder.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    copy = shutil.copy2 if with_times else shutil.copy
    shutil.copytree(backup, folder, copy_function=copy, dirs_exist_ok=True)
    mirror = start(store, folder)
    assert latest(folder) == "model.ckpt-5"
    end(store, mirror, folder)
    after = contents(store)
    assert {name: data for name, data in after.items() if "ckpt" in name} == {
        name: data for name, data in before.items() if "ckpt" in name
    }


def test_what_was_not_sent_is_set_aside_also_if_the_bucket_has_a_file_of_its_size(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    save(folder, 4, "mine")
    mine = (folder / "model.ckpt-4.index").read_bytes()
    other = tmp_path / "other"
    mirror = start(store, other)
    save(other, 4, "ours")
    end(store, mirror, other)
    run(store, folder)
    assert (folder / ".unsent" / "model.ckpt-4.index").read_bytes() == mine
    assert (folder / "model.ckpt-4.index").read_bytes() == (other / "model.ckpt-4.index").read_bytes()


@pytest.mark.parametrize("evaluated", [False, True])
def test_what_changes_under_one_name_shows_that_a_folder_is_old(evaluated: bool, store: Store, tmp_path: Path) -> None:
    """The same checkpoints are there, but another start has written its records."""
    folder, backup = tmp_path / "here", tmp_path / "backup"
    run(store, folder, 1, 2)
    shutil.copytree(folder, backup)
    run(store, folder)
    if evaluated:
        shutil.copytree(folder, folder := tmp_path / "moved")
    there = (folder / "events.supervisor-0.jsonl").read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    assert not store.is_current(folder)
    Mirror(folder, store.url).open("model_dir=")
    assert (folder / "events.supervisor-0.jsonl").read_bytes() == there


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_unseen(path: Path) -> None:
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate, "flipped": flip, "flipped, with its old time": flip_unseen, "emptied": empty,
    "deleted": Path.unlink,
}  # fmt: skip
FILES = (
    "model.ckpt-3.data-00000-of-00001", "model.ckpt-3.index", "runner_files/model.ckpt-3.input-0.index",
    "runner_files/model.ckpt-3.manifest.json",
)  # fmt: skip


@pytest.fixture
def _checksums_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the writer of a run with a URL asks for them."""
    real = manifest.write_manifest
    monkeypatch.setattr(
        manifest, "write_manifest", lambda *args, **settings: real(*args, **{**settings, "is_mirrored": True})
    )


@pytest.mark.usefixtures("_checksums_of_data")
@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - {"flipped, with its old time"}))  # read when it is used
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_of_a_checkpoint_is_fetched_and_never_sent(
    file: str, damage: str, store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    run(store, folder, 1, 2, 3)
    before = contents(store)
    save(folder, 4)  # not sent: the run was killed
    DAMAGE[damage](folder / file)
    mirror = start(store, folder)
    assert (folder / file).read_bytes() == before[file]
    assert latest(folder) == "model.ckpt-4"
    end(store, mirror, folder)
    assert contents(store)[file] == before[file] and "model.ckpt-4.index" in names(store)


@pytest.mark.usefixtures("_checksums_of_data")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_the_newest_checkpoint_is_read_at_the_beginning(file: str, damage: str, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    run(store, folder, 1, 2, 3)
    before = contents(store)
    DAMAGE[damage](folder / file)
    mirror = start(store, folder)
    assert latest(folder) == "model.ckpt-3" and (folder / file).read_bytes() == before[file]
    end(store, mirror, folder)
    assert contents(store)[file] == before[file]


@pytest.mark.parametrize(
    "file, damage",
    [
        ("checkpoint", "truncated"), ("checkpoint", "emptied"), ("checkpoint", "deleted"),
        ("run.json", "truncated"), ("run.json", "deleted"), ("config.yaml", "truncated"), ("config.yaml", "deleted"),
        ("events.chief-0.jsonl", "truncated"), ("events.chief-0.jsonl", "flipped"),
        ("events.supervisor-0.jsonl", "deleted"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_fetched_and_never_sent(file: str, damage: str, store: Store, folder: Path) -> None:
    before = contents(store)
    DAMAGE[damage](folder / file)
    mirror = start(store, folder)
    assert (folder / file).read_bytes() == before[file] and latest(folder) == "model.ckpt-3"
    end(store, mirror, folder)
    assert contents(store) == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted"])
@pytest.mark.parametrize("file", ["saved_model.pb", "variables/variables.index", "assets/words"])
def test_an_export_is_never_written_to_again(file: str, damage: str, store: Store, tmp_path: Path) -> None:
    folder, name = tmp_path / "exports", f"final/7/{file}"
    mirror = start(store, folder)
    for one in ("saved_model.pb", "variables/variables.index", "assets/words"):
        (folder / "final" / "7" / one).parent.mkdir(parents=True, exist_ok=True)
        (folder / "final" / "7" / one).write_text(f"the {one}")
    end(store, mirror, folder)
    before = contents(store)
    DAMAGE[damage](folder / name)
    mirror = start(store, folder)
    (folder / "final" / "7" / "assets" / "more").write_text("for serving")
    end(store, mirror, folder)
    assert contents(store) == {**before, "final/7/assets/more": b"for serving"}
    assert (folder / name).read_bytes() == before[name]
    assert (folder / ".unsent" / name).exists() == (damage != "deleted")


def test_files_whose_times_have_changed_are_the_same_checkpoints(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sent = contents(store), list[str]()
    for name in fingerprints(folder):
        os.utime(folder / name, (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(type(store.fs), "put_file", lambda fs, source, name: sent.append(name))
        patch.setattr(Uploader, "_delete", lambda uploader, name: sent.append(name))
        mirror = start(store, folder)
        assert mirror.close() == ""
    assert not [name for name in sent if "ckpt" in name] and contents(store) == before


def test_by_hand_a_truncated_checkpoint_is_not_sent_over_the_good_one(store: Store, folder: Path) -> None:
    before = contents(store)
    truncate(folder / FILES[0])
    assert upload.main([str(folder)]) == 0
    assert contents(store) == before and (folder / FILES[0]).read_bytes() == before[FILES[0]]


@pytest.mark.usefixtures("_checksums_of_data")
def test_a_damaged_checkpoint_that_only_the_folder_has_is_not_sent(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    run(store, folder, 1, 2, 3)
    save(folder, 4)
    flip(folder / "model.ckpt-4.data-00000-of-00001")
    assert upload.main([str(folder)]) == 0
    assert "model.ckpt-4 was not sent and is damaged" in capsys.readouterr().err
    assert (folder / ".unsent" / "model.ckpt-4.index").exists() and latest(folder) == "model.ckpt-3"
    assert not any("ckpt-4" in name for name in names(store))
    assert fetched(store, tmp_path / "reader") == "model.ckpt-3"
    store.fs.pipe_file(".lease/00000002", json.dumps({**store.lease(2), "is_over": True}).encode())
    mirror = start(store, folder)
    save(folder, 4)  # again, from the one before it
    end(store, mirror, folder)
    assert fetched(store, tmp_path / "later") == "model.ckpt-4"


@pytest.mark.parametrize("keep", [Keep(5), Keep(None)])
def test_a_checkpoint_that_is_damaged_before_it_is_sent_holds_nothing_up(
    keep: Keep, store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.remote.test_object_store.KEEP", keep)
    reads, real = list[str](), manifest.what_is_wrong

    def what_is_wrong(path: Path) -> str | None:
        reads.append(path.name)
        return real(path)

    monkeypatch.setattr(manifest, "what_is_wrong", what_is_wrong)
    sending = Uploader(folder, Lease(store, store.highest()))
    save(folder, 4)
    flip(folder / "model.ckpt-4.index")
    sending.send()
    assert fetched(store, tmp_path / "before") == "model.ckpt-3"  # the state file names it as the latest, and waits
    for step in range(5, 9):
        save(folder, step)
        sending.send()
    while not sending.send():
        pass
    assert not any("ckpt-4." in name for name in names(store))
    assert fetched(store, tmp_path / "reader") == "model.ckpt-8"
    assert reads.count("model.ckpt-4") == 1 and sending.damaged


# --- what has expired -------------------------------------------------------------------------------------------------


def test_what_expired_before_a_kill_is_removed_and_not_fetched(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (4, 5):
        save(folder, step)  # nothing is sent
    monkeypatch.setattr(Store, "_fetch_aside", lambda *args: pytest.fail("it is fetched"))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_move_into_place", lambda *args: pytest.fail("it is fetched"))
        mirror = start(store, folder)
    end(store, mirror, folder)
    assert {name for name in names(store) if name.endswith("data-00000-of-00001") and "input" not in name} == {
        f"model.ckpt-{step}.data-00000-of-00001" for step in (4, 5)
    }


def test_an_export_that_a_run_has_deleted_while_the_store_was_away_is_removed_after_a_kill(
    store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    mirror = start(store, folder)
    for number in (7, 8):
        (folder / "export" / str(number)).mkdir(parents=True)
        (folder / "export" / str(number) / "saved_model.pb").write_text("graph")
    (folder / "run.json").write_text("{}")
    end(store, mirror, folder)
    sending = Uploader(folder, Lease(store, 1))

    def fail(number: int = 0) -> None:
        raise OSError("the store is away")

    (folder / "run.json").write_text('{"a": 1}')
    sending.lease.check = fail  # type: ignore[method-assign]
    shutil.rmtree(folder / "export" / "7")
    with pytest.raises(OSError, match="away"):
        sending.send()
    del sending
    mirror = start(store, folder)
    assert not (folder / "export" / "7").exists()
    end(store, mirror, folder)
    assert {name for name in names(store) if "export" in name} == {"export/8/saved_model.pb"}


def test_the_only_export_of_a_place_gives_way_to_the_next(store: Store, tmp_path: Path) -> None:
    """As with `exports_to_keep=1`: all that was sent is gone."""
    folder = tmp_path / "exports"
    for number in (7, 8):
        mirror = start(store, folder)
        (folder / "final" / str(number)).mkdir(parents=True)
        (folder / "final" / str(number) / "saved_model.pb").write_text(f"the {number}th")
        shutil.rmtree(folder / "final" / str(number - 1), ignore_errors=True)
        end(store, mirror, folder)
    assert names(store) == {"final/8/saved_model.pb"}


def test_results_of_a_step_that_is_saved_again_do_not_come_back(store: Store, folder: Path) -> None:
    name = "runner_files/model.ckpt-3.metrics.json"
    (folder / name).write_text("{}")
    run(store, folder)
    mirror = start(store, folder)
    (folder / name).unlink()  # as the writer does
    save(folder, 3, "other values")
    end(store, mirror, folder)
    run(store, folder)
    assert not (folder / name).exists() and name not in names(store)


@pytest.mark.parametrize("name", ["config.yaml", "graph.pbtxt", "eval/events.out.tfevents.1.host"])
def test_what_no_run_deletes_stays_in_the_bucket(name: str, store: Store, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("old\n")
    run(store, folder)
    mirror = start(store, folder)
    (folder / name).unlink()  # as what cleans caches of old files does
    end(store, mirror, folder)
    assert name in names(store)


@pytest.mark.parametrize("gone", ["checkpoint", "run.json", "events.supervisor-0.jsonl", "*"])
def test_what_somebody_deletes_during_a_run_stays_in_the_bucket(gone: str, store: Store, folder: Path) -> None:
    mirror = start(store, folder)
    (folder / "export" / "7").mkdir(parents=True)
    (folder / "export" / "7" / "saved_model.pb").write_text("graph")
    end(store, mirror, folder)
    before = contents(store)
    sending = Uploader(folder, Lease(store, store.highest()))
    for path in {*folder.glob(gone), folder / "export"}:
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for _ in range(4):
        sending.send()
    assert contents(store) == before


def test_a_checkpoint_that_somebody_deletes_during_a_run_stays_in_the_bucket(store: Store, folder: Path) -> None:
    before = contents(store)
    mirror = start(store, folder)
    for path in folder.rglob("model.ckpt-2.*"):
        path.unlink()
    wait_until(lambda: len(Note.read(folder).lost) == 5)
    save(folder, 3)  # the state file no longer names it
    end(store, mirror, folder)
    mine = {name: data for name, data in before.items() if "ckpt-2" in name}
    assert mine.items() <= contents(store).items()
    mirror = start(store, folder)
    assert all((folder / name).read_bytes() == data for name, data in mine.items())
    end(store, mirror, folder)


# --- what others write ------------------------------------------------------------------------------------------------


def test_objects_of_others_neither_make_a_folder_old_nor_are_touched(store: Store, folder: Path) -> None:
    others = {
        "notes/mine.txt": b"a person's", "events.worker-1.jsonl": b"{}", ".hidden": b"", "report.html": b"<p>",
        "runner_files/model.ckpt-9.input-1.index": b"a worker's, which was killed",
    }  # fmt: skip
    for name, data in others.items():
        store.fs.pipe_file(name, data)
    save(folder, 4)  # not sent
    assert store.is_current(folder)
    run(store, folder, 5)
    assert {name: store.fs.cat_file(name) for name in others} == others
    assert latest(folder) == "model.ckpt-5" and not (folder / ".unsent").exists()


@pytest.mark.parametrize("place", ["serving/1/saved_model.pb", "copies/model.ckpt-9.index"])
def test_an_export_or_a_checkpoint_that_a_person_puts_beside_a_run_does_not_make_its_folder_old(
    place: str, store: Store, folder: Path
) -> None:
    store.fs.pipe_file(place, b"a person's")
    save(folder, 4)  # not sent
    run(store, folder)
    assert latest(folder) == "model.ckpt-4" and not (folder / ".unsent").exists()


def test_a_saved_model_in_the_folder_itself_makes_no_other_file_a_part_of_it(store: Store, folder: Path) -> None:
    (folder / "saved_model.pb").write_text("graph")
    run(store, folder, 4)
    save(folder, 5)  # not sent
    run(store, folder)
    assert latest(folder) == "model.ckpt-5" and not (folder / ".unsent").exists()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("notes.yaml", "a: 1\n", "a: 1\nb: 2"), ("steps.json", "{}\n", "{}\n{}\n")],
)
def test_a_file_of_the_user_may_have_any_form(name: str, before: str, after: str, store: Store, folder: Path) -> None:
    (folder / name).write_text(before)
    run(store, folder)
    (folder / name).write_text(after)  # not sent
    run(store, folder)
    assert store.fs.cat_file(name).decode() == (folder / name).read_text() == after


def test_results_that_are_named_after_a_checkpoint_are_sent(store: Store, folder: Path) -> None:
    name = "predictions/model.ckpt-3.predictions.csv"
    (folder / name).parent.mkdir()
    (folder / name).write_text("1")
    run(store, folder)
    assert name in names(store)


def test_the_input_state_of_a_worker_that_was_killed_does_not_replace_that_of_a_later_save(
    store: Store, folder: Path
) -> None:
    store.fs.pipe_file("runner_files/model.ckpt-4.input-1.index", b"of a worker on another host")
    save(folder, 4)
    (folder / "runner_files/model.ckpt-4.input-1.index").write_text("of a task on this host")
    mirror = start(store, folder)
    assert (folder / "runner_files/model.ckpt-4.input-1.index").read_text() == "of a task on this host"
    end(store, mirror, folder)


def test_what_a_person_changes_in_the_bucket_is_fetched_and_not_replaced(store: Store, folder: Path) -> None:
    (folder / "notes.txt").write_text("of the run")
    run(store, folder)
    store.fs.pipe_file("notes.txt", b"a person's")
    store.fs.pipe_file("plan.txt", b"a person's")
    (folder / "notes.txt").write_text("of a later start, which was killed")
    (folder / "plan.txt").write_text("also of the run")
    run(store, folder)
    assert store.fs.cat_file("notes.txt") == store.fs.cat_file("plan.txt") == b"a person's"
    assert (folder / "notes.txt").read_text() == (folder / "plan.txt").read_text() == "a person's"
    assert (folder / ".unsent" / "notes.txt").read_text() == "of a later start, which was killed"


def test_what_a_person_removes_in_the_bucket_is_sent_again(store: Store, folder: Path, tmp_path: Path) -> None:
    store.fs.rm_file("model.ckpt-2.index")
    run(store, folder)
    assert "model.ckpt-2.index" in names(store)


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("arrives", [False, True])
def test_a_folder_whose_answers_were_lost_is_still_current(
    arrives: bool, attempts: int, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object may have come although nobody said so; and the next attempt, with more in the file, may not."""
    sending = Uploader(folder, Lease(store, store.highest()))
    real = type(store.fs).put_file
    arriving = [arrives, False]

    def lost(fs: Any, source: str, name: str) -> None:
        if arriving.pop(0):
            real(fs, source, name)
        raise ConnectionResetError

    for _ in range(attempts):
        with open(folder / "events.supervisor-0.jsonl", "a") as file:
            file.write("{}\n")
        with monkeypatch.context() as patch:
            patch.setattr(type(store.fs), "put_file", lost)
            with pytest.raises(ConnectionResetError):
                sending.send()
    save(folder, 4)
    mine = (folder / "events.supervisor-0.jsonl").read_bytes()
    assert store.is_current(folder)
    run(store, folder)
    assert latest(folder) == "model.ckpt-4" and not (folder / ".unsent").exists()
    assert store.fs.cat_file("events.supervisor-0.jsonl").startswith(mine)


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("file", ["checkpoint", "events.supervisor-0.jsonl"])
def test_an_attempt_that_arrives_late_is_known_and_replaced(
    file: str, is_answered: bool, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = Uploader(folder, Lease(store, store.highest()))
    late = list[bytes]()
    put_file, pipe_file = type(store.fs).put_file, type(store.fs).pipe_file

    def put(fs: Any, source: str, name: str) -> None:
        if name == file:
            late.append(Path(source).read_bytes())
            raise TimeoutError
        put_file(fs, source, name)

    def pipe(fs: Any, name: str, data: bytes, **settings: Any) -> None:
        if name == file:
            late.append(data)
            raise TimeoutError
        pipe_file(fs, name, data, **settings)

    for step in (99, 100):
        save(folder, step)
        with open(folder / "events.supervisor-0.jsonl", "a") as journal:
            journal.write("{}\n")
        with monkeypatch.context() as patch:
            patch.setattr(type(store.fs), "put_file", put)
            patch.setattr(type(store.fs), "pipe_file", pipe)
            with pytest.raises(TimeoutError):
                sending.send()
    if is_answered:
        while not sending.send():
            pass
    store.fs.pipe_file(file, late[0])
    save(folder, 101)  # and then the machine is lost
    assert store.is_current(folder)
    mirror = start(store, folder)
    end(store, mirror, folder)
    assert store.fs.cat_file(file) == (folder / file).read_bytes() and latest(folder) == "model.ckpt-101"


def test_a_journal_that_grows_on_a_full_disk_leaves_its_folder_current(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, journal = Uploader(folder, Lease(store, store.highest())), folder / "events.supervisor-0.jsonl"
    journal.open("a").write("{}\n")
    real = type(store.fs).put_file

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    def grow(fs: Any, source: str, name: str) -> None:
        journal.open("a").write("{}\n")
        real(fs, source, name)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        patch.setattr(type(store.fs), "put_file", grow)
        sending.send()
    save(folder, 4)
    assert store.is_current(folder)


class Killed(BaseException):
    """The process ends here."""


def test_a_fetch_of_single_files_that_was_killed_is_done_again(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(store)
    damaged = ["events.chief-0.jsonl", "model.ckpt-3.index", "runner_files/model.ckpt-2.manifest.json", "config.yaml"]
    real = os.replace
    for allowed in range(12):
        for name in damaged[:3]:
            if (folder / name).exists():
                truncate(folder / name)
        (folder / damaged[3]).unlink(missing_ok=True)
        moves = iter(range(allowed))

        def move(source: Any, target: Any, moves: Iterator[int] = moves) -> None:
            if ".fetching" in str(source) and next(moves, None) is None:
                raise Killed
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", move)
            mirror = Mirror(folder, store.url)
            try:
                mirror.open("model_dir=")
            except Killed:
                pass
        run(store, folder)
        after = contents(store)
        assert {name: after[name] for name in before if "ckpt" in name or name in damaged} == {
            name: data for name, data in before.items() if "ckpt" in name or name in damaged
        }


def test_a_folder_that_has_lost_its_note_keeps_what_it_has_not_sent(store: Store, folder: Path) -> None:
    save(folder, 4)
    (folder / NOTE_FILE).write_text("{")
    before = contents(store)
    run(store, folder)
    assert latest(folder) == "model.ckpt-3"
    assert latest(folder / ".unsent") == "model.ckpt-4"
    assert {name for name in before if "ckpt" in name} == {name for name in names(store) if "ckpt" in name}


def test_a_note_of_an_earlier_version_is_read(store: Store, folder: Path) -> None:
    values = json.loads((folder / NOTE_FILE).read_text())
    # It had no marks of what it sent, nothing of what it was about to send, and another mark of what it had fetched.
    files = {name: version[:2] for name, version in values["files"].items()}
    files["run.json"] = []
    files["checkpoint"] = [*files["checkpoint"], "another"]
    del values["gone"]
    (folder / NOTE_FILE).write_text(json.dumps({**values, "files": files}))
    save(folder, 4)
    assert store.is_current(folder)
    run(store, folder)
    assert latest(folder) == "model.ckpt-4" and not (folder / ".unsent").exists()


# --- beside others ----------------------------------------------------------------------------------------------------


def test_a_reader_takes_nothing_from_a_folder_that_is_still_sent_from(store: Store, folder: Path) -> None:
    """The process that sends outlives a run that was killed, and the note changes while it works."""
    with sending_in(folder):
        store.fs.pipe_file("model.ckpt-9.index", b"sent a moment ago")
        Mirror(folder, store.url).open("model_dir=")
        assert latest(folder) == "model.ckpt-3"
    Mirror(folder, store.url).open("model_dir=")
    assert (folder / "model.ckpt-9.index").exists()


def test_a_reader_takes_nothing_from_a_folder_in_which_a_script_saves(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script holds no lock of its folder, and the process that sends for it may not have begun yet, or have died."""
    Lease.take(store, Note.read(folder).folder, 60)
    (folder / "model.ckpt-3.index").unlink()  # the step is saved again: its files are being replaced
    Mirror(folder, store.url).open("model_dir=")
    assert not (folder / "model.ckpt-3.index").exists()
    monkeypatch.setattr(stores, "_is_dead", lambda holder: True)
    Mirror(folder, store.url).open("model_dir=")
    assert latest(folder) == "model.ckpt-3"


def test_a_start_waits_for_the_process_that_still_sends(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, release = threading.Event(), threading.Event()

    def send() -> None:
        with sending_in(folder):
            release.wait(60)
            ended.set()

    sender = threading.Thread(target=send)
    sender.start()
    while not notes.is_sent_from(folder):
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(notes, "SENDING_SECS", 0.2)
        with pytest.raises(ConfigError, match="runner.remote.upload"):
            start(store, folder)
    threading.Timer(0.5, release.set).start()
    store.fs.pipe_file(".lease/00000002", json.dumps({**store.lease(2), "is_over": True}).encode())
    mirror = start(store, folder)
    assert ended.is_set() and "still sends from" in capsys.readouterr().err
    end(store, mirror, folder)
    sender.join()


def test_a_start_lists_the_bucket_once_more_than_it_must(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings, real = list[int](), Store.objects

    def objects(store: Store) -> Any:
        listings.append(1)
        return real(store)

    monkeypatch.setattr(Store, "objects", objects)
    mirror = start(store, folder)
    assert len(listings) == 2  # before a file of it is read, and under the lease
    end(store, mirror, folder)
    assert len(listings) == 2
