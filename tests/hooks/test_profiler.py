"""run.profile: which steps are profiled, what is written and said, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, RunConfig
from runner.config.settings.step_range import StepRange, parse_step_range
from runner.distribute.cluster import Cluster
from runner.hooks.hook import Hook, Run
from runner.hooks.profiler import Profiling
from runner.types import StepResult
from tests.support.jobs import noted, run
from tests.support.line import line, points
from tests.support.messages import Messages
from tests.support.models import native, strategies, train_input

STRATEGIES = strategies()


class RecordingProfiler:
    """Notes at which global step of a run it is started and stopped."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.step = 0

    def start(self, folder: str) -> None:
        self.said.append(("start", self.step))

    def stop(self) -> None:
        self.said.append(("stop", self.step))


class Steps(Hook):
    """Tells the profiler the step, and fails at one of them."""

    def __init__(self, profiler: RecordingProfiler, fails_at: int | None = None, error: type = RuntimeError) -> None:
        self._profiler, self._fails_at, self._error = profiler, fails_at, error
        self.loops: list[tuple[int, int]] = []

    def before_step(self, run: Run, step: int) -> None:
        self._profiler.step = step

    def after_step(self, run: Run, result: StepResult) -> None:
        self._profiler.step = result.last_step
        self.loops.append((result.first_step, result.last_step))
        if self._fails_at is not None and result.last_step >= self._fails_at:
            raise self._error("the hook failed")


def profiled(folder: Path, steps: str, max_steps: int) -> tuple[Any, Any, list[str]]:
    """(what the profiler was asked for, the loops, what was announced) of a run to `max_steps`."""
    profiler, said = RecordingProfiler(), list[str]()
    around = Steps(profiler)
    hook = Profiling(parse_step_range(steps), lambda kind, text, **fields: said.append(text), profiler)
    estimator = Estimator(line, folder, RunConfig(steps_per_loop=100, save_summary_steps=None), {})
    estimator.train(points(repeat=True), hooks=[around, hook], max_steps=max_steps)
    return profiler.said, around.loops, said


def test_a_range_is_two_steps_or_one(messages: Messages) -> None:
    assert parse_step_range("100-110") == StepRange(100, 110) and str(StepRange(100, 110)) == "100-110"
    assert parse_step_range("7") == StepRange(7, 7) and str(StepRange(7, 7)) == "7"
    for text in ("", "-", "3-", "-3", "1.5", "1-2-3", "0", "5-4"):
        with messages.raised(ValueError):
            parse_step_range(text)


def test_loops_end_exactly_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    asked, loops, _ = profiled(tmp_path, "31-45", 100)
    assert asked == [("start", 30), ("stop", 45)]
    assert loops == [(1, 30), (31, 45), (46, 100)]


@pytest.mark.parametrize(("steps", "expected"), [("1-2", [0, 2]), ("5", [4, 5]), ("10", [9, 10])])
def test_the_first_step_one_step_and_the_last_step_can_be_profiled(
    steps: str, expected: list[int], tmp_path: Path
) -> None:
    asked, _, _ = profiled(tmp_path, steps, 10)
    assert asked == [("start", expected[0]), ("stop", expected[1])]


def test_a_run_that_ends_or_goes_on_within_the_range_profiles_its_part_of_it(tmp_path: Path) -> None:
    asked, _, _ = profiled(tmp_path, "5-20", 12)
    assert asked == [("start", 4), ("stop", 12)]
    asked, loops, _ = profiled(tmp_path, "5-20", 30)
    assert asked == [("start", 12), ("stop", 20)] and loops == [(13, 20), (21, 30)]


def test_steps_that_are_not_taken_are_told_of_at_the_end(tmp_path: Path, messages: Messages) -> None:
    asked, _, said = profiled(tmp_path, "15-20", 10)
    assert asked == [] and len(said) == 1
    messages.same("said", said[0])
    asked, _, said = profiled(tmp_path, "3-10", 20)
    assert asked == [] and len(said) == 1
    messages.same("said", said[0])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_and_a_second_ctrl_c_stop_the_profiler(error: type, tmp_path: Path) -> None:
    profiler = RecordingProfiler()
    hook = Profiling(StepRange(3, 20), lambda *_, **__: None, profiler)
    with pytest.raises(error, match="the hook failed"):
        Estimator(line, tmp_path, RunConfig(steps_per_loop=1), {}).train(
            points(repeat=True), hooks=[Steps(profiler, 5, error), hook], max_steps=30
        )
    assert profiler.said == [("start", 2), ("stop", 5)]


def test_a_run_that_is_asked_to_stop_ends_its_profile_and_profiles_the_rest_when_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = ("run.profile=3-20", "train.max_steps=20", "train.steps_per_loop=1")
    assert run(tmp_path, "input.train.fn=tests.support.jobs.interrupting", *settings) == 3
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "run.profile" in line]
    messages.same("line", said, hide=r"(?<=steps 3-)\d+|\d+(_\d+){5}")
    assert run(tmp_path, *settings) == 0
    stopped, resumed = (event for event in noted(tmp_path) if event.get("event") == "profile")
    assert stopped["first_step"] == 3 and stopped["last_step"] < 20
    assert (resumed["first_step"], resumed["last_step"]) == (stopped["last_step"] + 1, 20)


class Broken:
    """A profiler that somebody else is using, or whose disk is full."""

    def __init__(self, at: str) -> None:
        self._at = at

    def start(self, folder: str) -> None:
        if self._at == "start":
            raise tf.errors.AlreadyExistsError(None, None, "Another profiler is running.")

    def stop(self) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


@pytest.mark.parametrize("at", ["start", "stop"])
def test_a_profiler_that_fails_does_not_end_training(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    hook = Profiling(StepRange(2, 3), lambda *_, **__: None, Broken(at))
    estimator = Estimator(line, tmp_path, RunConfig(), {}).train(points(repeat=True), hooks=[hook], max_steps=5)
    assert estimator.get_variable_value("global_step") == 5
    messages.logged(caplog, "run.profile")


def test_a_run_writes_a_profile_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, "run.profile=2-3", "train.max_steps=6") == 0
    (profile,) = (tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert profile.stat().st_size > 1000
    (said,) = [line for line in capsys.readouterr().err.splitlines() if str(profile.parent) in line]
    messages.same("line", said, hide=profile.parent.name)
    (event,) = [event for event in noted(tmp_path) if event.get("event") == "profile"]
    assert (event["first_step"], event["last_step"], event["path"]) == (2, 3, str(profile.parent))
    assert run(tmp_path, "run.profile=2-3", "train.max_steps=8") == 0  # it is resumed after these steps
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "run.profile" in line]
    messages.same("line", said)
    assert len(list(profile.parent.parent.iterdir())) == 1


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_profiling_changes_no_bit(strategy: str, tmp_path: Path) -> None:
    def values(name: str, steps: StepRange | None) -> dict[str, np.ndarray]:
        settings = RunConfig(train_distribute=STRATEGIES[strategy], profile_steps=steps)
        estimator = Estimator(native, tmp_path / name, settings)
        estimator.train(train_input(8), max_steps=30)
        return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}

    plain, with_profile = values("plain", None), values("profiled", StepRange(4, 17))
    assert list((tmp_path / "profiled" / "plugins" / "profile").glob("*/*.xplane.pb"))
    assert plain.keys() == with_profile.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(value, with_profile[name], err_msg=name)


def test_only_the_chief_is_profiled_and_writes_a_summary(tmp_path: Path) -> None:
    def train(folder: str, cluster: Cluster) -> Path:
        settings = RunConfig(profile_steps=StepRange(1, 2), cluster=cluster, tensorboard=False)
        Estimator(line, tmp_path / folder, settings, {}).train(points(repeat=True), max_steps=3)
        return tmp_path / folder

    chief = train("chief", Cluster())
    assert (chief / "plugins").exists() and (chief / "model_summary.txt").exists()
    other = train("other", Cluster(task_type="worker", task_index=1))
    assert not (other / "plugins").exists() and not (other / "model_summary.txt").exists()
