"""Real files in tmp_path, read by us and by TensorFlow's own tools."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner.checkpoint.integrity import find_damage
from runner.checkpoint.reader import Reader, checkpoint_step
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter, DiskFullError
from runner.checkpoint_files import layout, manifest
from runner.checkpoint_files.layout import latest_checkpoint
from runner.system.files import RUNNER_FILES, find_runner_file
from runner.tf_private import tensor_bundle
from tests.support.checkpoints import list_checkpoints
from tests.support.messages import Messages

v1 = tf.compat.v1

KERNEL = np.arange(12, dtype=np.float32).reshape(4, 3)
TENSORS = {"dense/kernel": KERNEL, "dense/kernel/Adam": KERNEL * 2, "global_step": np.int64(5)}
REASON = "(?<=cannot be saved: ).*?(?= A resumed)"
"""The words of TensorFlow in a message."""


def save(model_dir: Path, *steps: int, keep_max: int | None = 5, **kwargs: Any) -> CheckpointWriter:
    writer = CheckpointWriter(model_dir, keep_max)
    for step in steps:
        writer.save(Snapshot(step, {**TENSORS, "global_step": np.int64(step)}), **kwargs)
    return writer


def steps(model_dir: Path) -> list[int]:
    return [info.step for info in list_checkpoints(model_dir)]


def files(model_dir: Path) -> list[str]:
    """The paths of all files, relative to `model_dir`."""
    return sorted(str(path.relative_to(model_dir)) for path in model_dir.rglob("*") if path.is_file())


def write_with_tf1(model_dir: Path, *steps: int, name: str = "model.ckpt") -> None:
    """What tf.estimator left behind: a v1 graph, a session, a Saver; slots and global_step."""
    with tf.Graph().as_default(), v1.Session() as session:
        kernel = v1.get_variable("dense/kernel", initializer=KERNEL)
        global_step = v1.train.get_or_create_global_step()
        v1.train.MomentumOptimizer(0.0, 0.9).minimize(tf.reduce_sum(kernel), global_step)
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(save_relative_paths=True)
        for step in steps:
            session.run(global_step.assign(step))
            saver.save(session, str(model_dir / name), global_step=step)


# --- what is written ------------------------------------------------------------------------------------------------


def test_keys_are_the_variable_names(tmp_path: Path) -> None:
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS))
    assert path == str(tmp_path / "model.ckpt-5")
    assert sorted(tf.train.load_checkpoint(path).get_variable_to_shape_map()) == sorted(TENSORS)
    assert Reader(path).names() == {
        "dense/kernel": ((4, 3), tf.float32),
        "dense/kernel/Adam": ((4, 3), tf.float32),
        "global_step": ((), tf.int64),
    }
    assert files(tmp_path) == [
        "checkpoint",
        "model.ckpt-5.data-00000-of-00001",
        "model.ckpt-5.index",
        "runner_files/model.ckpt-5.manifest.json",
    ]


def test_tensorflows_own_tools_read_it(tmp_path: Path) -> None:
    save(tmp_path, 4, 5)
    path = tf.train.latest_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "model.ckpt-5") == latest_checkpoint(tmp_path)
    kernel = tf.Variable(tf.zeros([4, 3]))
    v1.train.Saver({"dense/kernel": kernel}).restore(None, path)
    np.testing.assert_array_equal(kernel, KERNEL)
    np.testing.assert_array_equal(tf.train.load_variable(str(tmp_path), "dense/kernel/Adam"), KERNEL * 2)
    with tf.Graph().as_default(), v1.Session() as session:
        kernel = v1.get_variable("dense/kernel", shape=[4, 3])
        v1.train.Saver().restore(session, path)
        np.testing.assert_array_equal(session.run(kernel), KERNEL)


def test_global_step_is_written_when_the_model_has_none(tmp_path: Path) -> None:
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(7, {"w": KERNEL}))
    assert Reader(path).get("global_step") == 7
    assert tf.train.load_variable(path, "global_step").dtype == np.int64


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint8", "float16", "bfloat16", "float64", "complex64"])
def test_every_dtype_round_trips(tmp_path: Path, dtype: str) -> None:
    value = tf.cast(tf.constant([[0, 1, 2], [3, 4, 5]]), dtype)
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(1, {"x": value, "scalar": value[0, 1], "none": value[:0]}))
    reader = Reader(path)
    assert reader.names()["x"] == ((2, 3), value.dtype)
    for name, expected in [("x", value), ("scalar", value[0, 1]), ("none", value[:0])]:
        assert reader.get(name).dtype == value.dtype.as_numpy_dtype
        np.testing.assert_array_equal(reader.get(name), expected.numpy())


def test_strings_round_trip(tmp_path: Path) -> None:
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(1, {"s": np.array(["x", "yé"]), "t": tf.constant(b"\xff")}))
    assert list(Reader(path).get("s")) == [b"x", "yé".encode()]
    assert Reader(path).get("t") == b"\xff"


def test_variables_are_taken_as_they_are(tmp_path: Path) -> None:
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(1, {"w": tf.Variable(KERNEL)}))
    np.testing.assert_array_equal(Reader(path).get("w"), KERNEL)


def test_slices_of_a_variable_are_read_as_one_tensor(tmp_path: Path) -> None:
    table = np.arange(35, dtype=np.float32).reshape(7, 5)
    bias = np.arange(7, dtype=np.int64)
    parts = {"table": (table[:3], table[3:6], table[6:]), "bias": (bias[:4], bias[4:])}
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(1, parts))
    assert Reader(path).names()["table"] == ((7, 5), tf.float32)
    np.testing.assert_array_equal(Reader(path).get("table"), table)
    np.testing.assert_array_equal(tf.train.load_variable(path, "table"), table)
    np.testing.assert_array_equal(tf.train.load_variable(path, "bias"), bias)
    whole = tf.Variable(tf.zeros([7, 5]))
    v1.train.Saver({"table": whole}).restore(None, path)
    np.testing.assert_array_equal(whole, table)
    with tf.Graph().as_default(), v1.Session() as session:  # cut in another way
        cut = v1.get_variable("table", shape=[7, 5], partitioner=v1.fixed_size_partitioner(2))
        v1.train.Saver().restore(session, path)
        np.testing.assert_array_equal(session.run(list(cut)[1]), table[4:])


def test_extras_round_trip_beside_the_variables(tmp_path: Path) -> None:
    extra = {
        "best": {"metric": "accuracy", "value": 0.75, "step": None},
        "stopped": False,
        "text": "größer",
        "nan": float("nan"),
    }
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS, extra))
    restored = Reader(path).extra()
    assert sorted(Reader(path).names()) == sorted(TENSORS)
    assert sorted(restored) == sorted(extra)
    assert restored["best"] == extra["best"] and restored["stopped"] is False and restored["text"] == "größer"
    assert np.isnan(restored["nan"])
    assert "_runner/best" in tf.train.load_checkpoint(path).get_variable_to_shape_map()


def test_an_extra_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS, {"early_stopping": object()}))
    assert any("'early_stopping'" in note for note in caught.value.__notes__)


# --- the manifest ---------------------------------------------------------------------------------------------------


def test_manifest_has_size_and_checksum_of_every_file(tmp_path: Path) -> None:
    iterator = iter(tf.data.Dataset.range(9))
    CheckpointWriter(tmp_path, 5, clock=lambda: 1234.5).save(Snapshot(5, TENSORS), {0: iterator})
    written = json.loads((tmp_path / RUNNER_FILES / "model.ckpt-5.manifest.json").read_text())
    assert (written["format"], written["step"], written["time"], written["input"]) == (1, 5, 1234.5, {"0": "saved"})
    others = {"checkpoint", "model.ckpt-5.manifest.json"}
    assert set(written["files"]) == {os.path.basename(file) for file in files(tmp_path)} - others
    for name, facts in written["files"].items():
        content = find_runner_file(tmp_path / name).read_bytes()
        assert facts["bytes"] == len(content)
        assert facts["checksum"] == ("tensors" if ".data-" in name else f"crc32:{zlib.crc32(content):08x}")


def test_list_tells_step_size_time_and_files(tmp_path: Path) -> None:
    CheckpointWriter(tmp_path, 5, clock=lambda: 1234.5).save(Snapshot(5, TENSORS))
    (info,) = list_checkpoints(tmp_path)
    assert (info.step, info.path, info.time, info.input) == (5, str(tmp_path / "model.ckpt-5"), 1234.5, {})
    assert info.files[0] == "model.ckpt-5.index"
    assert {*info.files, "checkpoint"} == {os.path.basename(file) for file in files(tmp_path)}
    assert info.bytes == sum(find_runner_file(tmp_path / name).stat().st_size for name in info.files)


def test_no_model_dir_has_no_checkpoints(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    assert list_checkpoints(tmp_path / "none") == []
    assert latest_checkpoint(tmp_path) is None


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"])
@pytest.mark.parametrize("part", ["", ".input-0"])
def test_damage_is_found(tmp_path: Path, name: str, part: str) -> None:
    name = name.replace("-5", f"-5{part}")
    iterator = iter(tf.data.Dataset.range(50).shuffle(20, seed=1))
    next(iterator)
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS), {0: iterator})
    assert find_damage(path) is None
    file = find_runner_file(tmp_path / name)
    whole = file.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 20)):
        flip(file, at)
        assert "model.ckpt-5" in str(find_damage(path)), at
        file.write_bytes(whole)
    file.write_bytes(whole[:-1])
    assert find_damage(path) == f"{name} has {len(whole) - 1} bytes instead of {len(whole)}"
    file.unlink()
    assert find_damage(path) == f"{name} is missing"


# --- which one is the latest ----------------------------------------------------------------------------------------


def test_renamed_model_dir_still_works(tmp_path: Path) -> None:
    save(tmp_path / "old", 4, 5)
    os.rename(tmp_path / "old", tmp_path / "new")
    assert latest_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "model.ckpt-5")
    assert tf.train.latest_checkpoint(str(tmp_path / "new")) == str(tmp_path / "new" / "model.ckpt-5")
    save(tmp_path / "new", 6, keep_max=2)
    assert steps(tmp_path / "new") == [5, 6]
    assert str(tmp_path) not in (tmp_path / "new" / "checkpoint").read_text()


def test_relative_model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("runs/a"), 3)
    assert latest_checkpoint("runs/a") == "runs/a/model.ckpt-3" == tf.train.latest_checkpoint("runs/a")
    assert checkpoint_step("runs/a/model.ckpt-3") == 3


def test_a_state_file_edited_by_hand_rules(tmp_path: Path) -> None:
    save(tmp_path, 4, 5, 6)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-4"\n')
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-4")


def test_without_a_state_file_the_newest_is_the_latest(tmp_path: Path) -> None:
    save(tmp_path, 4, 10)
    (tmp_path / "checkpoint").unlink()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-10")


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001", ".manifest.json"])
def test_an_incomplete_latest_gives_way_to_the_one_before(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 4, 5, 6)
    file = find_runner_file(tmp_path / f"model.ckpt-6{suffix}")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-5")
    assert steps(tmp_path) == [4, 5]
    (message,) = caplog.messages
    assert f"model.ckpt-6{suffix}" in message and str(tmp_path / "model.ckpt-5") in message


def test_an_incomplete_latest_never_gives_way_to_an_abandoned_later_one(tmp_path: Path) -> None:
    save(tmp_path, 50, 100)
    save(tmp_path, 60)  # after going back to 50
    (tmp_path / "model.ckpt-60.index").unlink()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-50")


def test_non_ascii_and_escaped_names_in_the_state_file(tmp_path: Path) -> None:
    write_with_tf1(tmp_path, 3, name='mo"déll')
    assert latest_checkpoint(tmp_path) == tf.train.latest_checkpoint(str(tmp_path))
    save(tmp_path, 4)
    assert [
        os.path.basename(path) for path in tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths
    ] == [
        'mo"déll-3',
        "model.ckpt-4",
    ]


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_keep_max_removes_every_file_of_a_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_max=2, iterators={0: iter(tf.data.Dataset.range(3))})
    assert {name.split(".")[1] for name in files(tmp_path) if name != "checkpoint"} == {"ckpt-3", "ckpt-4"}
    assert len(files(tmp_path)) == 1 + 2 * 5
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert [os.path.basename(path) for path in state.all_model_checkpoint_paths] == ["model.ckpt-3", "model.ckpt-4"]
    assert os.path.basename(state.model_checkpoint_path) == "model.ckpt-4"


@pytest.mark.parametrize("keep_max", [None, 0])
def test_keep_max_none_and_0_keep_all(tmp_path: Path, keep_max: int | None) -> None:
    save(tmp_path, *range(8), keep_max=keep_max)
    assert steps(tmp_path) == list(range(8))
    assert len(tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths) == 8


def test_what_is_saved_after_going_back_outlives_the_abandoned(tmp_path: Path) -> None:
    save(tmp_path, 50, 100, 150)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-50"\n')
    save(tmp_path, 60, keep_max=2)
    assert steps(tmp_path) == [60, 150]
    save(tmp_path, 70, keep_max=2)
    assert steps(tmp_path) == [60, 70]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-70")


def test_checkpoints_of_somebody_else_stay(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_with_tf1(tmp_path / "elsewhere", 1)
    for file in (tmp_path / "elsewhere").glob("model.ckpt-1.*"):
        shutil.copy(file, tmp_path)
    save(tmp_path, 2, 3, 4, keep_max=1)
    assert steps(tmp_path) == [1, 4]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4, 5, iterators={0: iter(tf.data.Dataset.range(3))})
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, {"dense/kernel": -KERNEL}))
    assert steps(tmp_path) == [4, 5]
    np.testing.assert_array_equal(Reader(path).get("dense/kernel"), -KERNEL)
    assert find_damage(path) is None
    assert not Reader(path).has_iterator(0)


# --- checkpoints of tf.estimator ------------------------------------------------------------------------------------


def test_tf1_checkpoints_are_listed_and_read(tmp_path: Path) -> None:
    write_with_tf1(tmp_path, 10, 20)
    assert steps(tmp_path) == [10, 20]
    path = latest_checkpoint(tmp_path)
    assert path == str(tmp_path / "model.ckpt-20")
    assert checkpoint_step(path) == 20
    reader = Reader(path)
    assert sorted(reader.names()) == ["dense/kernel", "dense/kernel/Momentum", "global_step"]
    np.testing.assert_array_equal(reader.get("dense/kernel"), KERNEL)
    assert reader.extra() == {} and find_damage(path) is None
    assert not Reader(path).has_iterator(0)


def test_tf1_checkpoints_are_continued_and_expire_with_all_their_files(tmp_path: Path) -> None:
    write_with_tf1(tmp_path, 10, 20)
    save(tmp_path, 30, keep_max=2)
    assert steps(tmp_path) == [20, 30]
    assert not list(tmp_path.glob("model.ckpt-10.*"))
    save(tmp_path, 40, keep_max=2)
    assert steps(tmp_path) == [30, 40]
    assert not list(tmp_path.glob("*.meta"))


def test_tf1_checkpoint_without_a_shard_is_not_complete(tmp_path: Path) -> None:
    write_with_tf1(tmp_path, 10, 20)
    (tmp_path / "model.ckpt-20.data-00000-of-00001").unlink()
    assert steps(tmp_path) == [10]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-10")


def test_absolute_paths_of_a_moved_tf1_model_dir_are_found(tmp_path: Path) -> None:
    write_with_tf1(tmp_path, 10)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/gone/model.ckpt-10"\n')
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-10")


def test_a_saver_with_another_name_is_listed_when_the_state_file_names_it(tmp_path: Path) -> None:
    write_with_tf1(tmp_path, 10, name="vgg")
    assert steps(tmp_path) == [10]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "vgg-10")


# --- errors of the reader -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_objects_is_read_by_the_names_of_its_variables_and_by_its_keys(
    tmp_path: Path, messages: Messages
) -> None:
    """What tf.train.Checkpoint writes, and 2.15's model_to_estimator did."""
    twins = [tf.Variable(2.0, name="same"), tf.Variable(3.0, name="same")]
    path = tf.train.Checkpoint(
        layer=tf.Variable([1.0], name="dense/kernel"),
        step=tf.Variable(7, dtype=tf.int64, name="global_step"),
        twins=twins,
    ).write(str(tmp_path / "model.ckpt-8"))
    reader, end = Reader(path), ".ATTRIBUTES/VARIABLE_VALUE"
    assert reader.is_of_objects
    assert set(reader.names()) == {"dense/kernel", "global_step", f"twins/0/{end}", f"twins/1/{end}"}
    assert reader.names()["dense/kernel"] == ((1,), tf.float32)
    assert reader.get("dense/kernel") == reader.get(f"layer/{end}") == [1.0]
    assert reader.has("global_step") and reader.has(f"step/{end}") and not reader.has("same")
    assert checkpoint_step(path) == 7 and reader.extra() == {}
    with messages.raised(KeyError):
        reader.get("dense/kernal")


def test_unknown_variable_is_answered_with_the_nearest_name(tmp_path: Path, messages: Messages) -> None:
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS))
    with messages.raised(KeyError):
        Reader(path).get("dense/kernl")
    assert not Reader(path).has("dense/kernl")


def test_unknown_checkpoint_is_answered_with_those_that_are_there(tmp_path: Path, messages: Messages) -> None:
    save(tmp_path, 4, 5)
    with messages.raised(ValueError):
        Reader(tmp_path / "model.ckpt-6").names()


def test_step_of_a_checkpoint_without_global_step(tmp_path: Path, messages: Messages) -> None:
    tf.raw_ops.SaveV2(prefix=str(tmp_path / "a-12"), tensor_names=["w"], shape_and_slices=[""], tensors=[KERNEL])
    assert checkpoint_step(tmp_path / "a-12") == 12
    tf.raw_ops.SaveV2(prefix=str(tmp_path / "a"), tensor_names=["w"], shape_and_slices=[""], tensors=[KERNEL])
    with messages.raised(ValueError):
        checkpoint_step(tmp_path / "a")


# --- where the input stood ------------------------------------------------------------------------------------------


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(100).shuffle(30, seed=3).repeat().batch(7).prefetch(4)


def mapped() -> tf.data.Dataset:
    def noisy(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32) + tf.random.stateless_uniform([], tf.stack([1, x]))

    return tf.data.Dataset.range(100).shuffle(30, seed=3).map(noisy, num_parallel_calls=2).repeat().batch(7).prefetch(2)


def interleaved() -> tf.data.Dataset:
    files = tf.data.Dataset.range(4)
    return (
        files.interleave(lambda i: tf.data.Dataset.range(i * 100, i * 100 + 9), num_parallel_calls=2).repeat().batch(4)
    )


def globally_seeded() -> tf.data.Dataset:
    tf.random.set_seed(7)
    return tf.data.Dataset.range(100).shuffle(30).repeat().batch(7)


@pytest.mark.parametrize("build", [shuffled, mapped, interleaved, globally_seeded])
@pytest.mark.parametrize("pulled", [0, 3, 50])
def test_input_continues_at_the_very_next_element(
    tmp_path: Path, build: Callable[[], tf.data.Dataset], pulled: int
) -> None:
    iterator = iter(build())
    for _ in range(pulled):
        next(iterator)
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(pulled, TENSORS), {0: iterator})
    expected = [next(iterator).numpy() for _ in range(40)]
    resumed = iter(build())
    next(resumed)  # wherever it stood
    assert Reader(path).has_iterator(0)
    Reader(path).restore_iterator(0, resumed)
    for batch in expected:
        np.testing.assert_array_equal(next(resumed), batch)


def test_each_worker_has_its_own_input(tmp_path: Path) -> None:
    iterators = {0: iter(tf.data.Dataset.range(9)), 3: iter(tf.data.Dataset.range(10, 19))}
    next(iterators[3])
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS), iterators)
    resumed = iter(tf.data.Dataset.range(10, 19))
    Reader(path).restore_iterator(3, resumed)
    assert next(resumed) == 11 and Reader(path).has_iterator(3) and not Reader(path).has_iterator(1)
    assert list_checkpoints(tmp_path)[0].input == {"0": "saved", "3": "saved"}


def from_generator() -> tf.data.Dataset:
    spec = tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(lambda: iter(range(9)), output_signature=spec)


def with_stateful_random() -> tf.data.Dataset:
    return tf.data.Dataset.range(9).map(lambda x: tf.cast(x, tf.float32) + tf.random.uniform([], seed=1))


@pytest.mark.parametrize("build", [from_generator, with_stateful_random])
def test_input_that_cannot_be_saved_is_said_once_and_marked(
    tmp_path: Path, build: Callable[[], tf.data.Dataset], caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    iterator = iter(build())
    next(iterator)
    save(tmp_path, 4, 5, iterators={0: iterator})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    messages.logged(caplog, hide=REASON)
    assert [info.input for info in list_checkpoints(tmp_path)] == [{"0": "skip"}, {"0": "skip"}]
    assert not [name for name in files(tmp_path) if "input" in name]
    path = latest_checkpoint(tmp_path)
    assert path is not None and not Reader(path).has_iterator(0)
    assert find_damage(path) is None


@pytest.mark.parametrize("policy, level", [("IGNORE", logging.INFO), ("WARN", logging.WARNING), ("FAIL", None)])
def test_options_of_the_dataset_say_whether_it_is_saved_without_its_external_state(
    policy: str, level: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    options = tf.data.Options()
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy[policy]

    def build() -> tf.data.Dataset:
        numbers = with_stateful_random().map(lambda x: tf.cast(x, tf.int64))  # the place in the data, without the draw
        return numbers.with_options(options).prefetch(1)

    iterator, resumed = iter(build()), iter(build())
    for _ in range(4):
        next(iterator)
    with caplog.at_level(logging.INFO, logger="runner"):
        save(tmp_path, 3, 4, iterators={0: iterator})
    assert Reader(tmp_path / "model.ckpt-4").has_iterator(0) == (policy != "FAIL")
    if policy != "FAIL":
        Reader(tmp_path / "model.ckpt-4").restore_iterator(0, resumed)
    if level is None:
        messages.logged(caplog, "training input", hide=REASON)
        return
    assert next(resumed) == 4
    (said,) = (record for record in caplog.records if "training input" in record.getMessage())
    assert said.levelno == level
    assert "RandomUniform" in said.getMessage()
    messages.same(said.levelname, said.getMessage(), hide=r"(?<=\()RandomUniform.*?(?=\))")


def test_another_pipeline_is_refused(tmp_path: Path, messages: Messages) -> None:
    path = CheckpointWriter(tmp_path, 5).save(Snapshot(5, TENSORS), {0: iter(shuffled())})
    with messages.raised(ValueError):
        Reader(path).restore_iterator(0, iter(tf.data.Dataset.range(100).map(lambda x: (x, x)).batch(5)))


def test_writing_needs_nothing_of_the_live_iterator(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 5)
    iterator = iter(shuffled())
    states = writer.serialize({0: iterator})
    first = next(iterator)  # training goes on before a thread writes
    path = writer.write(Snapshot(5, TENSORS), states)
    resumed = iter(shuffled())
    assert Reader(path).has_iterator(0)
    Reader(path).restore_iterator(0, resumed)
    np.testing.assert_array_equal(next(resumed), first)


# --- crashes --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing runs after it."""


def kill_at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, before: bool) -> list[int]:
    """`owner.name` kills at its `call`th call, before or after doing its work; nothing is tidied up any more."""
    original = getattr(owner, name)
    calls: list[int] = []

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        deadly_now = len(calls) - 1 == call
        if not (deadly_now and before):
            result = original(*args, **kwargs)
        if deadly_now:
            monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            raise Killed
        return result

    monkeypatch.setattr(owner, name, deadly)
    return calls


STAGES: list[tuple[Any, str, int]] = [
    *[(tensor_bundle, "write_bundle", call) for call in range(2)],  # the variables, the input
    (manifest, "write_manifest", 0),
    (layout, "publish", 0),
    *[(os, "replace", call) for call in range(7)],  # manifest, 5 files into model_dir, state file
    (layout, "write_state", 0),
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name", "call"), STAGES, ids=[f"{name}-{call}" for _, name, call in STAGES])
def test_killed_while_saving_the_one_before_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, before: bool
) -> None:
    iterators = {0: iter(shuffled())}
    save(tmp_path, 4, 5, iterators=iterators)
    with monkeypatch.context() as patch:
        calls = kill_at_call(patch, owner, name, call, before=before)
        with pytest.raises(Killed):
            save(tmp_path, 6, keep_max=2, iterators=iterators)
    assert len(calls) == call + 1
    state_moved = not before and (name, call) in {("replace", 6), ("write_state", 0)}
    latest = tmp_path / ("model.ckpt-6" if state_moved else "model.ckpt-5")
    assert latest_checkpoint(tmp_path) == str(latest) == tf.train.latest_checkpoint(str(tmp_path))
    assert find_damage(latest) is None
    # Whoever sees an index, we or TensorFlow, sees a whole checkpoint.
    has_index = v1.train.checkpoint_exists(str(tmp_path / "model.ckpt-6"))
    assert steps(tmp_path) == ([4, 5, 6] if has_index else [4, 5])
    assert not has_index or find_damage(tmp_path / "model.ckpt-6") is None
    # The next run saves as ever, and nothing of the broken save remains.
    save(tmp_path, 6, 7, keep_max=2, iterators=iterators)
    assert steps(tmp_path) == [6, 7]
    assert len(files(tmp_path)) == 1 + 2 * 6 - 2


def test_killed_while_saving_the_first_time_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in range(3):
        with monkeypatch.context() as patch:
            kill_at_call(patch, os, "replace", call, before=True)
            with pytest.raises(Killed):
                save(tmp_path, 1)
        assert latest_checkpoint(tmp_path) is None and list_checkpoints(tmp_path) == []


def test_killed_while_replacing_a_step_falls_back_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4, 5)
    with monkeypatch.context() as patch:
        kill_at_call(patch, os, "replace", 2, before=True)
        with pytest.raises(Killed):
            save(tmp_path, 5)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-4")


def test_killed_while_removing_old_ones_the_next_save_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2, 3)
    with monkeypatch.context() as patch:
        # Path.unlink: of the metrics of 4, in two places, and of its index, which are not there; of the index of 1; of
        # its data.
        kill_at_call(patch, Path, "unlink", 4, before=True)
        with pytest.raises(Killed):
            save(tmp_path, 4, keep_max=2)
    assert steps(tmp_path) == [2, 3, 4]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-4")
    save(tmp_path, 5, keep_max=2)
    assert steps(tmp_path) == [4, 5]
    assert len(files(tmp_path)) == 1 + 2 * 3


def test_leftovers_of_a_broken_save_go_when_their_age_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 4, 5)
    with monkeypatch.context() as patch:
        kill_at_call(patch, os, "replace", 3, before=True)
        with pytest.raises(Killed):
            save(tmp_path, 6)
    assert list(tmp_path.glob("model.ckpt-6.*"))
    save(tmp_path, 7, 8, keep_max=2)  # never step 6 again
    assert {name.split(".")[1] for name in files(tmp_path) if name != "checkpoint"} == {"ckpt-7", "ckpt-8"}


def test_a_failed_save_leaves_no_litter_and_says_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    save(tmp_path, 5)
    before = files(tmp_path)

    def disk_full(*args: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(tensor_bundle, "write_bundle", disk_full)
    with messages.raised(DiskFullError, hide=r"[\d.,]+ \w+(?= were free)"):
        save(tmp_path, 6)
    assert files(tmp_path) == before


def test_another_failure_keeps_its_type_and_says_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    def broken(*args: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(tensor_bundle, "write_bundle", broken)
    with pytest.raises(PermissionError) as caught:
        save(tmp_path, 6)
    for note in caught.value.__notes__:
        messages.same("note", note)


def test_a_checkpoint_of_another_process_is_waited_for(tmp_path: Path) -> None:
    path, waits = str(tmp_path / "model.ckpt-5"), []

    def wait(secs: float) -> None:
        waits.append(secs)
        if len(waits) == 3:
            (tmp_path / "model.ckpt-5.index").touch()

    assert layout.awaited(path, wait=wait) == path and len(waits) == 3


def test_a_folder_that_is_not_shared_is_said_to_be_none(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(RuntimeError):
        layout.awaited(str(tmp_path / "model.ckpt-5"), wait=lambda secs: None)
