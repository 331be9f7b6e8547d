"""Where files of checkpoints are: in model_dir itself only those that tf.estimator has. Names of before are read."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import BestExporter, Estimator, EvalSpec, LatestExporter, RunConfig, TrainSpec, train_and_evaluate
from runner.checkpoint.integrity import DamagedCheckpointsError, find_damage
from runner.checkpoint.reader import Reader
from runner.checkpoint.retention import metrics_of, note_metrics
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.checkpoint_files import manifest
from runner.config.validation import checkpoint_in
from runner.export.receivers import receiver_fn_of_spec
from runner.run_config import KeepBest, WarmStart
from runner.system.files import RUNNER_FILES
from runner.task.inspect_run import find_checkpoints
from tests.config.test_config import parsed
from tests.support.checkpoints import list_checkpoints, move_as_before
from tests.support.line import line, points

TF_ESTIMATORS = re.compile(r"model\.ckpt-\d+\.(index|data-\d{5}-of-\d{5}|meta)")
LISTED = (r".*\.index", r".*\.data-.*", r".*\.meta", r"model\.ckpt.*")
"""What programs look for in a model_dir of tf.estimator."""

RECEIVER = receiver_fn_of_spec(tf.TensorSpec([None], tf.float32))


def estimator(model_dir: Path, **settings: Any) -> Estimator:
    settings = {"save_checkpoints_steps": 2, "keep_checkpoint_max": 2, "keep_best": KeepBest("eval/loss"), **settings}
    return Estimator(line, model_dir, RunConfig(tensorboard=False, **settings))


def train(model_dir: Path, max_steps: int, **settings: Any) -> float:
    """Train, evaluate and export, and return the weight."""
    exporters = [BestExporter("best", RECEIVER), LatestExporter("latest", RECEIVER, exports_to_keep=1)]
    trained = estimator(model_dir, **settings)
    train_and_evaluate(trained, TrainSpec(points(repeat=True), max_steps), EvalSpec(points(), exporters=exporters))
    return float(trained.get_variable_value("weight"))


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four_steps")
    train(folder, 4)
    return folder


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory: pytest.TempPathFactory) -> float:
    return train(tmp_path_factory.mktemp("eight_steps"), 8)


def now(model_dir: Path) -> None:
    """The names of this version."""


PLACES = pytest.mark.parametrize("place", [now, move_as_before])


@pytest.fixture
def trained(four_steps: Path, tmp_path: Path, place: Callable[[Path], None]) -> Path:
    """Checkpoints of the steps 2 and 4, evaluated and exported, with the files where `place` moves them."""
    shutil.copytree(four_steps, tmp_path / "run")
    place(tmp_path / "run")
    return tmp_path / "run"


def names_like_checkpoints(model_dir: Path) -> set[str]:
    return {name for name in os.listdir(model_dir) if any(re.fullmatch(one, name) for one in LISTED)}


def test_programs_that_list_a_model_dir_or_its_exports_find_what_tf_estimator_has(four_steps: Path) -> None:
    found = names_like_checkpoints(four_steps)
    assert found and all(TF_ESTIMATORS.fullmatch(name) for name in found)
    for exporter in ("best", "latest"):
        exports = os.listdir(four_steps / "export" / exporter)
        assert exports and all(name.isdigit() for name in exports)  # so that max() of them is the newest
    own = {path.name for path in (four_steps / RUNNER_FILES).iterdir()}
    of_two = {f"model.ckpt-2{end}" for end in (".manifest.json", ".metrics.json", ".input-0.index")}
    assert own >= {"exports.best.json", "exports.latest.json", *of_two}


def test_nothing_else_looks_like_a_checkpoint_while_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        seen.update(names_like_checkpoints(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    writer, snapshot = CheckpointWriter(tmp_path, 5), Snapshot(3, {"w": tf.constant(1.0)})
    iterators = [iter(tf.data.Dataset.range(9)) for _ in range(2)]
    (state,) = writer.serialize({1: iterators[1]}).values()
    assert state is not None and writer.leave_input(snapshot, 1, state)  # as a worker does it for the chief
    seen.update(names_like_checkpoints(tmp_path))
    path = writer.write(snapshot, {**writer.serialize({0: iterators[0]}), 1: writer.left_input(3, 1)})
    seen.update(names_like_checkpoints(tmp_path))
    assert seen == {"model.ckpt-3.index", "model.ckpt-3.data-00000-of-00001"}
    assert find_damage(path) is None and Reader(path).has_iterator(0) and Reader(path).has_iterator(1)
    assert sorted(path.name for path in (tmp_path / RUNNER_FILES).glob("*.index")) == [
        "model.ckpt-3.input-0.index", "model.ckpt-3.input-1.index",
    ]  # fmt: skip


@pytest.mark.parametrize("folder", ["", RUNNER_FILES])
def test_states_of_inputs_that_no_checkpoint_took_are_deleted(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    left = tmp_path / folder / ".model.ckpt-3.input-1.index"
    left.touch()
    CheckpointWriter(tmp_path, 5).remove_left_inputs()
    assert not left.exists()


# --- names of before --------------------------------------------------------------------------------------------


@PLACES
def test_a_run_with_its_files_in_either_place_goes_on_to_the_bits(trained: Path, eight_steps: float) -> None:
    exported = {name for name in os.listdir(trained / "export" / "best") if name.isdigit()}
    assert train(trained, 8) == eight_steps
    found = names_like_checkpoints(trained)
    assert [info.step for info in list_checkpoints(trained)] == [6, 8]
    assert all(TF_ESTIMATORS.fullmatch(name) for name in found), "what lay beside 2 and 4 went with them"
    assert not list(trained.rglob("model.ckpt-[24].*"))
    best = os.listdir(trained / "export" / "best")
    assert exported < {*best} and all(name.isdigit() for name in best)
    assert len(os.listdir(trained / "export" / "latest")) == 1


@PLACES
def test_what_is_known_of_a_checkpoint_is_found_in_either_place(trained: Path) -> None:
    two, four = list_checkpoints(trained)
    assert (two.input, four.input) == ({"0": "saved"}, {"0": "saved"})
    assert Reader(four.path).has_iterator(0) and find_damage(four.path) is None
    assert {"eval/loss", "eval/mae"} <= metrics_of(four.path).keys()
    inspected = find_checkpoints(trained)
    assert [one.step for one in inspected] == [2, 4] and all(one.input_bytes for one in inspected)
    config = parsed(
        "command=evaluate", f"model_dir={trained}", "eval.checkpoint=best", "checkpoint.keep_best.metric=eval/loss"
    )
    assert checkpoint_in("eval.checkpoint", config) == four.path


@PLACES
@pytest.mark.parametrize("name", [".input-0.index", ".input-0.data-00000-of-00001", ".manifest.json"])
def test_damage_is_found_in_either_place(trained: Path, name: str) -> None:
    (file,) = trained.rglob(f"model.ckpt-4{name}")
    file.write_bytes(file.read_bytes()[:-20])
    assert f"model.ckpt-4{name}" in str(find_damage(trained / "model.ckpt-4"))
    assert estimator(trained).latest_checkpoint() == str(trained / "model.ckpt-2")


@PLACES
def test_a_step_that_is_saved_again_forgets_its_evaluation_in_either_place(trained: Path) -> None:
    path = CheckpointWriter(trained, 5).save(Snapshot(4, {"weight": tf.constant(7.0)}))
    assert metrics_of(path) == {} and not Reader(path).has_iterator(0) and find_damage(path) is None


# --- copies and deletions by the user ---------------------------------------------------------------------------


def test_a_copy_without_the_runners_files_is_a_checkpoint_of_tf_estimator(four_steps: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (*four_steps.glob("model.ckpt-4.*"), four_steps / "checkpoint"):
        shutil.copy(file, copy)
    expected = estimator(four_steps)
    assert estimator(copy).evaluate(points()) == expected.evaluate(points())
    estimator(tmp_path / "warm", warm_start=WarmStart(str(copy))).train(points(repeat=True), max_steps=1)
    weight = tf.train.load_variable(str(tmp_path / "warm" / "model.ckpt-0"), "weight")
    assert weight == expected.get_variable_value("weight")
    resumed, whole = estimator(copy), estimator(shutil.copytree(four_steps, tmp_path / "whole"))
    for one in (resumed, whole):
        one.train(points(repeat=True), max_steps=5)
    assert resumed.get_variable_value("weight") == whole.get_variable_value("weight"), "its batches are counted"
    assert [info.step for info in list_checkpoints(copy)] == [4, 5]


def test_a_checkpoint_whose_name_has_no_step_is_gone_with_its_own_files(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("weight", initializer=1.0)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(tmp_path / "model"))
    assert estimator(tmp_path).latest_checkpoint() == str(tmp_path / "model")
    note_metrics(tmp_path / "model", {"eval/loss": 1.0})
    assert metrics_of(tmp_path / "model") == {"eval/loss": 1.0}
    assert names_like_checkpoints(tmp_path) == {"model.index", "model.data-00000-of-00001", "model.meta"}
    (tmp_path / "model.index").unlink()
    with pytest.raises(DamagedCheckpointsError):
        estimator(tmp_path).latest_checkpoint()
    for name in names_like_checkpoints(tmp_path):
        (tmp_path / name).unlink()
    assert estimator(tmp_path).latest_checkpoint() is None


def test_what_is_left_of_a_checkpoint_that_the_user_deleted_is_none_and_goes(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for file in tmp_path.glob("model.ckpt-*"):
        file.unlink()
    assert list((tmp_path / RUNNER_FILES).glob("model.ckpt-4.*"))
    assert estimator(tmp_path).latest_checkpoint() is None and find_checkpoints(tmp_path) == []
    writer = CheckpointWriter(tmp_path, 2)
    for step in (11, 12, 13):
        writer.save(Snapshot(step, {"weight": tf.constant(1.0)}))
    assert {path.name.split(".")[1] for path in tmp_path.rglob("model.ckpt-*")} == {"ckpt-12", "ckpt-13"}


@pytest.mark.parametrize("bit", [1, 4, 64])
def test_no_flipped_byte_of_a_manifest_is_an_error(bit: int, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-2"
    for suffix in ("index", "data-00000-of-00001", "input-0.index"):
        Path(f"{path}.{suffix}").write_text(suffix)
    manifest.write_manifest(path, 2, 1e9, {0: "saved"}, is_mirrored=True)
    file = Path(f"{path}{manifest.MANIFEST}")
    whole = file.read_bytes()
    assert manifest.what_is_wrong(path) is None
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        assert manifest.what_is_wrong(path) != ""
        assert len(manifest.saved_inputs(path)) <= 1 and manifest.time_of(path) is not None
