"""Damaged checkpoints: found before they are used, by whoever uses them, and the one before takes their place."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import Estimator, RunConfig
from runner.checkpoint import integrity
from runner.checkpoint.integrity import DamagedCheckpointsError
from runner.system.files import find_runner_file
from tests.support.checkpoints import list_checkpoints
from tests.support.jobs import run
from tests.support.line import line, points
from tests.support.messages import Messages
from tests.support.trained import Put


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garbled(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x5A
    file.write_bytes(content)


def removed(file: Path) -> None:
    file.unlink()


FILES = [
    ".index", ".data-00000-of-00001", ".input-0.index", ".input-0.data-00000-of-00001", ".manifest.json",
]  # fmt: skip
DAMAGES = [
    (how, name)
    for how in (truncated, garbled, removed)
    for name in FILES
    # Without its manifest it looks like one of tf.estimator, whole and without a position of the input.
    if (how, name) != (removed, ".manifest.json")
]


FOUND = r"\d+ bytes instead of \d+|crc32:\w+|(?<=cannot be read: ).*?\[Op:RestoreV2\]"
"""Sizes and checksums, which depend on the versions that wrote a file, and words of TensorFlow."""


def estimator(model_dir: Path) -> Estimator:
    return Estimator(line, model_dir, RunConfig(save_checkpoints_steps=2, tensorboard=False))


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("six_steps")
    estimator(folder).train(points(repeat=True), max_steps=6)
    return folder


@pytest.fixture
def trained(six_steps: Path, tmp_path: Path) -> Path:
    """Checkpoints of the steps 0, 2, 4 and 6, of which nothing is known to this process."""
    shutil.copytree(six_steps, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(("how", "name"), DAMAGES, ids=[f"{how.__name__}{name}" for how, name in DAMAGES])
def test_a_damaged_newest_gives_way_to_the_one_before_with_one_warning(
    trained: Path, how: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    expected = estimator(trained).get_variable_value("weight")
    how(find_runner_file(trained / f"model.ckpt-6{name}"))
    caplog.clear()
    resumed = estimator(trained)
    assert resumed.latest_checkpoint() == f"{trained}/model.ckpt-4"
    # The byte in the middle of a manifest, which holds the time, is not always part of the same value.
    messages.logged(caplog, hide=r"(?<=: model\.ckpt-6).*(?=\. Using)" if how is garbled and "json" in name else FOUND)
    resumed.train(points(repeat=True), max_steps=6)
    assert resumed.get_variable_value("weight") == expected, "the input went on from where it was at step 4"
    assert integrity.find_damage(f"{trained}/model.ckpt-6") is None, "step 6 was saved again"
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_evaluating_and_predicting_take_the_one_before(
    trained: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = estimator(trained)
    whole = reader.evaluate(points(), checkpoint_path=f"{trained}/model.ckpt-4")
    garbled(trained / "model.ckpt-6.data-00000-of-00001")
    if command == "evaluate":
        assert reader.evaluate(points()) == whole
    else:
        first = next(iter(estimator(trained).predict(points())))
        second = next(iter(estimator(trained).predict(points(), checkpoint_path=f"{trained}/model.ckpt-4")))
        assert first == second
    assert len([one for one in caplog.records if "Damaged" in one.getMessage()]) == 1


def test_two_damaged_ones_are_both_named(trained: Path, caplog: pytest.LogCaptureFixture, messages: Messages) -> None:
    garbled(trained / "model.ckpt-6.data-00000-of-00001")
    truncated(trained / "model.ckpt-4.index")
    assert estimator(trained).latest_checkpoint() == f"{trained}/model.ckpt-2"
    assert len(caplog.records) == 1
    messages.logged(caplog, hide=FOUND)


def test_when_all_are_damaged_they_are_listed_and_nothing_is_trained(trained: Path, messages: Messages) -> None:
    for index in trained.glob("model.ckpt-?.index"):
        truncated(index)
    before = sorted(os.listdir(trained))
    with messages.raised(DamagedCheckpointsError, hide=FOUND):
        estimator(trained).train(points(repeat=True), max_steps=8)
    assert sorted(os.listdir(trained)) == before


def test_a_run_whose_checkpoints_are_all_damaged_fails(
    put_trained: Put, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    put_trained()
    for index in (tmp_path / "run").glob("model.ckpt-?.index"):
        truncated(index)
    assert run(tmp_path, "train.max_steps=8") == 1
    shown = capsys.readouterr().err
    messages.same("stderr", shown[shown.index("every checkpoint") :], hide=FOUND)


def test_a_folder_that_was_emptied_but_for_the_state_file_begins_anew(trained: Path) -> None:
    for file in trained.glob("model.ckpt-*"):
        file.unlink()
    assert estimator(trained).latest_checkpoint() is None


def test_what_this_process_wrote_is_not_read_again_and_another_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = integrity.find_damage

    def noted(path: str) -> str | None:
        read.append(os.path.basename(path))
        return original(path)

    monkeypatch.setattr(integrity, "find_damage", noted)
    trainer = estimator(tmp_path)
    trainer.train(points(repeat=True), max_steps=4)
    trainer.evaluate(points())
    assert read == []
    other = estimator(tmp_path)
    for _ in range(3):
        other.evaluate(points())
    assert read == ["model.ckpt-4"]
    assert [info.step for info in list_checkpoints(tmp_path)] == [0, 2, 4]
