"""command=profile_input: which stage is slow, which change helps, and that no model is built and nothing is written."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner.data.input_profile import profile as input_profile
from runner.data.input_profile import timing
from runner.data.input_profile.reading import Reading
from runner.data.input_profile.recorder import Call, Change, recording
from tests.support.jobs import run
from tests.support.journal import recorded

HERE = "tests.task.test_profile_input"


def model_fn(features: Any, labels: Any, mode: str) -> None:
    raise AssertionError("no model is built")


def _wait(value: Any) -> Any:
    time.sleep(0.003)
    return value


def waiting(value: tf.Tensor) -> tf.Tensor:
    waited = tf.py_function(_wait, [value], tf.float32)
    waited.set_shape([])
    return waited


def doubled(value: tf.Tensor) -> Any:
    return {"x": value}, 2 * value


def slow(params: Any) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(64).map(lambda number: tf.cast(number, tf.float32))
    return numbers.shuffle(8).repeat().map(waiting).map(doubled).batch(params.batch_size)


def parsed(params: Any) -> tf.data.Dataset:
    """Rows of a few numbers, each computed by itself."""
    rows = tf.data.Dataset.from_tensors(tf.range(8)).repeat(1000)
    return rows.map(to_numbers).repeat().batch(params.batch_size)


def to_numbers(row: tf.Tensor) -> Any:
    numbers = tf.cast(row, tf.float32)
    for _ in range(10):
        numbers = tf.math.sin(numbers) + 1
    return numbers, tf.reduce_sum(numbers)


def two_sources(params: Any) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(50).map(lambda number: tf.cast(number, tf.float32)).repeat()
    return tf.data.Dataset.zip((numbers.shuffle(5), numbers.map(waiting))).batch(params.batch_size)


def empty(params: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices([1.0]).filter(lambda value: value > 2).batch(params.batch_size)


def cached_in_files(params: Any) -> tf.data.Dataset:
    return slow(params).take(4).cache(params.path).repeat()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"WARM_UP_SECS": 0.2, "ROUNDS": 3, "ROUND_SECS": 0.15, "DRAIN_SECS": 0.02, "CUT_SECS": 0.1}
    for name, value in {**short, "CACHE_SECS": 0.2, "FILL_SECS": 0.2, "SETTLE_SECS": 0.1}.items():
        monkeypatch.setattr(timing, name, value)


def answer(folder: Path, input_fn: str, *settings: str) -> dict[str, Any]:
    words = (f"model.fn={HERE}.model_fn", f"input.train.fn={HERE}.{input_fn}", *settings)
    assert run(folder, "command=profile_input", *words) == 0
    assert {path.name for path in folder.iterdir()} == {"task.yaml", "events.chief-0.jsonl"}  # the folder of the task
    (result,) = [event for event in recorded(folder) if event.get("event") == "result"]
    found: dict[str, Any] = json.loads(json.dumps(result["answer"]))
    return found


def stage_of(found: dict[str, Any], function: str) -> dict[str, Any]:
    (stage,) = [stage for stage in found["stages"] if stage["function"] == function]
    return stage


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_the_slow_stage_is_named_and_the_change_that_helps_comes_first(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = ("strategy=mirrored", "strategy.virtual_devices=2") if strategy == "mirrored" else ()
    found = answer(tmp_path, "slow", *replicas)
    stage = stage_of(found, "waiting")
    assert stage["share"] > 0.5 and stage["share"] == max(one["share"] for one in found["stages"])
    assert stage["line"].startswith("tests/task/test_profile_input.py:")
    assert [one["function"] for one in found["stages"]][-2:] == ["doubled", ""]
    assert stage["work_ms"] > 2 * 3 * 0.9  # two examples per element, each of which waits 3 ms
    facts = found["input"]
    assert facts["examples_per_element"] == 2 and facts["bytes_per_element"] == 16
    assert facts["examples_per_second"] < 1000 / 3 * 1.1
    first = found["advice"][0]
    assert first["function"] == "waiting" and first["change"] in ("parallel", "many")
    assert first["gain_min"] <= first["gain"] <= first["gain_max"] and first["rounds_faster"] in (2, 3)
    reasons = {(one["function"], one["change"]): one["reason"] for one in found["not_tried"]}
    assert reasons["waiting", "batch_first"] == "no .batch follows the map directly"
    assert not any(one["gain"] >= 1.2 and one["rounds_faster"] >= 2 for one in found["no_clear_gain"])
    assert "Nothing was written." in capsys.readouterr().out
    assert ("2 replicas" in facts["read_by"]) == (strategy == "mirrored")


def test_a_function_of_single_examples_that_whole_batches_make_faster(tmp_path: Path) -> None:
    found = answer(tmp_path, "parsed", "input.train.batch_size=64")
    changes = [one["change"] for one in found["advice"] if one["function"] == "to_numbers"]
    assert {"batch_first", "cache"} <= set(changes)
    assert [one["gain"] for one in found["advice"]] == sorted((one["gain"] for one in found["advice"]), reverse=True)


def trial(*gains: float) -> input_profile.Trial:
    change = Change("cache", Call(0, "map", "", None, True, False, None))
    return input_profile.Trial(change, [input_profile.Round(100, 100 * gain, 100) for gain in gains])


@pytest.mark.parametrize(
    ("gains", "is_clear"),
    [
        ([1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3], True),
        ([0.5, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3], True),
        ([0.5, 0.9, 9.0, 9.0, 9.0, 9.0, 9.0], False),
        ([1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1], False),
    ],
    ids=["all", "all_but_one", "too_few_rounds", "too_little"],
)
def test_a_gain_is_clear_if_it_is_large_and_there_in_nearly_all_rounds(gains: list[float], is_clear: bool) -> None:
    assert trial(*gains).is_clear is is_clear
    assert trial(*gains).gain == pytest.approx(sorted(gains)[3])


def test_inputs_that_are_equally_fast_are_rarely_a_clear_gain() -> None:
    random = np.random.RandomState(0)
    change = trial(1.0).change
    num_clear = 0
    for _ in range(5000):
        speeds = random.lognormal(sigma=1.0, size=[7, 3])  # a machine whose speed doubles and halves all the time
        num_clear += input_profile.Trial(change, [input_profile.Round(*three) for three in speeds]).is_clear
    assert 0 < num_clear / 5000 < 0.012


class Params:
    batch_size = 2


def test_a_change_that_cannot_be_tried_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    num_built = 0

    def build() -> tf.data.Dataset:
        nonlocal num_built
        num_built += 1
        if num_built == 2:
            raise KeyError("only once")
        return parsed(Params)

    monkeypatch.setattr(timing, "FILL_SECS", 1000.0)
    monkeypatch.setattr(timing, "MAX_FILL_SECS", 0.0)
    monkeypatch.setattr(timing, "ROUND_SECS", 0.0)
    found = input_profile.profile(build, lambda: None)
    errors = {(left.change.call.function, left.change.kind): left.error for left in found.untried}
    assert [error.args for error in errors.values() if isinstance(error, KeyError)] == [("only once",)]
    assert isinstance(errors["to_numbers", "cache"], input_profile.CannotTryError)
    changes = [left.change for left in found.untried] + [trial.change for trial in found.trials]
    assert num_built == 1 + len(changes) == 1 + len(set(changes))


def test_a_change_whose_input_fails_while_it_is_timed_is_left_out() -> None:
    def ends(number: tf.Tensor) -> tf.Tensor:
        return 1 // tf.maximum(30 - number, 0)  # an error in the element 30

    whole = tf.data.Dataset.range(10**6).batch(2)
    good, bad = (dataclasses.replace(trial(1.0).change, kind=kind) for kind in ("many", "parallel"))
    read = {good: Reading(whole, lambda: None), bad: Reading(whole.map(ends), lambda: None)}
    untried: dict[Change, Exception] = {}
    unchanged, rounds = input_profile._read_in_turn(Reading(whole, lambda: None), read, untried)
    assert list(untried) == [bad] and isinstance(untried[bad], tf.errors.InvalidArgumentError)
    assert len(rounds[good]) == 3 and rounds[bad] == [] and len(unchanged) == 6


def test_inputs_of_two_sources_have_the_stages_of_both(tmp_path: Path) -> None:
    found = answer(tmp_path, "two_sources")
    names = [stage["stage"] for stage in found["stages"]]
    assert names.count("ForeverRepeat") == 2 and "Zip" in names
    assert stage_of(found, "waiting")["share"] > 0.5


def test_no_cache_is_written_and_an_input_without_examples_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    answer(tmp_path / "first", "cached_in_files", f"+input.train.params.path={tmp_path}/cache")
    assert {path.name for path in tmp_path.iterdir()} == {"first"}
    words = (f"model.fn={HERE}.model_fn", f"input.train.fn={HERE}.empty")
    (tmp_path / "second").mkdir()
    assert run(tmp_path / "second", "command=profile_input", *words) == 2


@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_the_input_is_that_of_one_worker_of_the_run(strategy: str, tmp_path: Path) -> None:
    words = (f"strategy={strategy}", "cluster.num_workers=2", "input.train.shard=off", "input.train.batch_size=4")
    found = answer(tmp_path, "slow", *words)
    # Workers of parameter servers step independently, each with a batch of the whole size.
    assert found["input"]["examples_per_element"] == (2 if strategy == "multi_worker" else 4)


def test_the_same_call_has_the_same_number() -> None:
    with recording() as recorder:
        slow(Params)
    before = recorder.calls
    (waits,) = [call for call in before if call.function == "waiting"]
    with recording(Change("parallel", waits)) as changed:
        slow(Params)
    assert changed.calls == before and changed.was_changed
    assert waits.is_own and not waits.is_parallel
