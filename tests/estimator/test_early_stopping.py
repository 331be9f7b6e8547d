"""Training ends when an evaluation's metric no longer improves; a run that was killed ends where it would have."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import (
    EarlyStopping,
    Estimator,
    EstimatorSpec,
    EvalSpec,
    Hook,
    RunConfig,
    TrainingResult,
    TrainSpec,
    train_and_evaluate,
)
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.config.schema import ConfigError
from runner.estimator.early_stopping import MetricHistory
from runner.tracking.journal import Journal, journal_path, journals_in
from tests.config.test_config import parsed
from tests.support import jobs
from tests.support.journal import events_in, journal_of
from tests.support.line import line, points
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("settings", "values", "ends_at"),
    [
        ({}, [5, 4, 3, 3, 2], 4),
        ({}, [5, 4, 3, 2, 1], None),
        ({"patience_evals": 2}, [5, 6, 4, 4, 5, 1], 5),
        ({"patience_evals": 2}, [5, 6, 4, 5, 3, 2], None),
        ({"min_delta": 0.5}, [5, 4.6, 4.4, 4.2, 4.0], 2),
        ({"min_delta": 0.5}, [5, 4.4, 3.8, 3.2], None),
        ({"min_steps": 4}, [5, 6, 7, 8, 9], 4),
        ({"min_steps": 4}, [5, 6, 7, 8, 4], 4),  # at step 4 nothing had improved for three
        ({"mode": "max"}, [1, 2, 3, 3], 4),
        ({"metric": "eval/accuracy"}, [1, 2, 3, 2], 4),
        ({"metric": "eval/accuracy", "mode": "min"}, [1, 2], 2),
        ({"patience_evals": 2}, [math.nan, math.nan, 1], 2),
        ({"patience_evals": 2}, [math.nan, 5, 4, math.nan, 3, math.nan, math.nan], 7),
    ],
)
def test_it_ends_after_so_many_evaluations_without_an_improvement(
    settings: dict[str, Any], values: list[float], ends_at: int | None
) -> None:
    rule = EarlyStopping(**{"metric": "eval/loss", **settings})
    seen: dict[int, float] = {}
    for step, value in enumerate(values, start=1):
        seen[step] = value
        if rule.reason(seen, step) is not None:
            assert step == ends_at
            return
    assert ends_at is None


def test_the_reason_names_the_best(messages: Messages) -> None:
    rule = EarlyStopping("eval/loss", patience_evals=3)
    values = {200: 0.5, 400: 0.12, 600: 0.2, 800: 0.12, 1000: 0.3}
    assert rule.reason(values, 800) is None
    messages.same("reason", str(rule.reason(values, 1000)))
    messages.same("reason", str(EarlyStopping("eval/loss").reason({1: math.nan}, 1)))


def around_six(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """`line` with a metric that is best at step 6."""
    spec = line(features, labels, mode, params)
    if mode != "eval":
        return spec
    distance = tf.abs(tf.cast(v1.train.get_global_step(), tf.float32) - 6.0)
    return spec._replace(eval_metric_ops={"distance": distance * tf.ones_like(features)})


RULE = EarlyStopping("eval/distance", patience_evals=2)
FILE = RULE.file


class Killer(Hook):
    """Ends the process, as far as the run can tell, before or after the evaluation at a step."""

    def __init__(self, step: int, *, evaluated: bool) -> None:
        self._step, self._evaluated = step, evaluated

    def begin(self, run: Any) -> None:
        if run.global_step == self._step and not self._evaluated:
            raise KeyboardInterrupt

    def end(self, run: Any) -> None:
        if run.global_step == self._step and self._evaluated:
            raise KeyboardInterrupt


class Interrupter(Hook):
    """As SIGTERM: the run saves after this step, and ends."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: Any, result: Any) -> None:
        if result.last_step == self._step:
            run.interrupt("SIGTERM")


def run(
    folder: Path, rule: EarlyStopping = RULE, max_steps: int = 40, killer: Any = None, stop: Any = None
) -> TrainingResult:
    journal = journal_of(folder)
    trainer = Estimator(around_six, folder, RunConfig(save_checkpoints_steps=2, steps_per_loop=1), journal=journal)
    hooks = [] if stop is None else [stop]
    spec = TrainSpec(points(repeat=True), max_steps, hooks, early_stopping=rule)
    return train_and_evaluate(trainer, spec, EvalSpec(points(), hooks=[] if killer is None else [killer]))


def said(folder: Path) -> list[str]:
    return [line["text"] for line in events_in(folder, "stopped_early")]


REASON = "eval/distance has not improved for 2 evaluations; best 0 at step 6"


def test_it_ends_says_why_and_does_not_train_on(tmp_path: Path, messages: Messages) -> None:
    result = run(tmp_path)
    assert (result.global_step, result.stopped_early) == (10, REASON)
    for text in said(tmp_path):
        messages.same("stopped_early", text)
    again = run(tmp_path)
    assert (again.global_step, again.examples, again.stopped_early) == (10, 0, REASON)
    # More patience is another question.
    assert run(tmp_path, EarlyStopping("eval/distance", patience_evals=3)).global_step == 12
    assert run(tmp_path, EarlyStopping(), max_steps=15).global_step == 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "evaluated"),
    slow_but(itertools.product([2, 6, 8, 10], [True, False]), (2, False), (8, True), (10, False)),
)
def test_a_run_that_was_killed_ends_where_an_undisturbed_one_does(step: int, evaluated: bool, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, killer=Killer(step, evaluated=evaluated))
    result = run(tmp_path)
    assert (result.global_step, result.stopped_early) == (10, REASON)
    values = json.loads((tmp_path / FILE).read_text())["values"]
    assert {int(at): float(value) for at, value in values.items()} == {2: 4, 4: 2, 6: 0, 8: 2, 10: 4}


@pytest.mark.parametrize("step", [3, 8, 9])
def test_a_run_that_was_interrupted_ends_where_an_undisturbed_one_does(step: int, tmp_path: Path) -> None:
    interrupted = run(tmp_path, stop=Interrupter(step))
    assert (interrupted.global_step, interrupted.stopped_early) == (step, None)
    result = run(tmp_path)
    assert (result.global_step, result.stopped_early) == (10, REASON)


# --- a file that is not what it was -----------------------------------------------------------------------------------


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(bytes(data))


def delete(file: Path, place: int) -> None:
    file.unlink()


def cut(file: Path, place: int) -> None:
    file.write_bytes(file.read_bytes()[:place])


def empty(file: Path, place: int) -> None:
    file.write_text(json.dumps({"metric": "eval/distance", "values": {}}))


DAMAGES = {"flipped": flip, "deleted": delete, "cut": cut, "of another day": empty}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_file_lost_is_in_the_checkpoint(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    file = tmp_path / FILE
    for number, step in enumerate((2, 4, 8)):
        run(tmp_path, max_steps=step)
        DAMAGES[damage](file, 40 + 9 * number)
    for journal in journals_in(tmp_path):
        journal.unlink()
    capfd.readouterr()
    result = run(tmp_path)
    assert (result.global_step, result.stopped_early) == (10, REASON)
    values = json.loads(file.read_text())["values"]
    assert {int(at): float(value) for at, value in values.items()} == {2: 4, 4: 2, 6: 0, 8: 2, 10: 4}
    about = [line for line in capfd.readouterr().err.splitlines() if line.startswith("runner: ")]
    messages.same("said", "\n".join(about), hide=r"(?<=json\.)\d+")


def test_each_byte_of_the_file_counts(tmp_path: Path) -> None:
    """None that is flipped changes a value, or ends in another error than the one that names the file."""
    history = MetricHistory(RULE, tmp_path)
    history.add(2, {"eval/distance": 4.0})
    history.add(4, {"eval/distance": 2.5})
    whole = (tmp_path / FILE).read_bytes()
    for place in range(len(whole)):
        (tmp_path / FILE).write_bytes(whole)
        flip(tmp_path / FILE, place)
        read = MetricHistory(RULE, tmp_path)
        assert read.contents() == history.contents() or (not read.has(2) and not read.has(4)), place


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"metric": "eval/distance", "values": {"2": "4.0"}}')
    assert MetricHistory(RULE, tmp_path).has(2)


def test_a_damaged_file_of_an_earlier_version_is_made_of_the_journals_or_refused(
    tmp_path: Path, messages: Messages
) -> None:
    """The checkpoints of that version have no history."""
    journal = Journal(journal_path(tmp_path))
    checkpoint = tmp_path / "model.ckpt-6"
    CheckpointWriter(tmp_path, None).write(Snapshot(6, {}), {})
    (tmp_path / FILE).write_text('{"metric": "eval/distance", "values": {"2": "4.0"')
    with messages.raised(ConfigError):
        MetricHistory(RULE, tmp_path).resume(6, str(checkpoint))
    for step in (2, 4, 6, 8):
        journal.metrics(step, {"eval/distance": abs(step - 6.0)})
    history = MetricHistory(RULE, tmp_path)
    history.resume(6, str(checkpoint))
    assert history.contents()["values"] == {"2": "4.0", "4": "2.0", "6": "0.0"}


def test_steps_that_are_taken_again_are_judged_again(tmp_path: Path) -> None:
    run(tmp_path, max_steps=8)
    for path in tmp_path.glob("model.ckpt-8*"):
        path.unlink()
    for path in tmp_path.glob("model.ckpt-6*"):
        path.unlink()
    (tmp_path / "checkpoint").unlink()
    assert run(tmp_path).global_step == 10


def test_a_metric_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        run(tmp_path / "a", EarlyStopping("eval/distanse"))
    with messages.raised(ValueError):
        run(tmp_path / "b", EarlyStopping("eval_big/loss"))


@pytest.mark.parametrize(
    "settings",
    [
        {"metric": "loss"},
        {"mode": "least"},
        {"patience_evals": 0},
        {"min_delta": -1.0},
    ],
    ids=str,
)
def test_a_rule_that_makes_no_sense_is_refused(settings: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        EarlyStopping(**settings)


def refuses(overrides: list[str], messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsed(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["metric=loss"],
        ["metric=eval_x/loss"],
        ["patience_evals=3"],
    ],
    ids=" ".join,
)
def test_the_config_is_checked(overrides: list[str], messages: Messages) -> None:
    refuses([f"train.early_stopping.{one}" for one in overrides], messages)


def test_command_train_does_not_evaluate(messages: Messages) -> None:
    refuses(["command=train", "train.early_stopping.metric=eval/loss"], messages)


def test_a_config_that_asks_for_it_gets_it(tmp_path: Path, capfd: Any, messages: Messages) -> None:
    overrides = (
        "model.fn=tests.estimator.test_early_stopping.around_six", "train.early_stopping.metric=eval/distance",
        "train.early_stopping.patience_evals=2", "checkpoint.save_steps=2", "train.max_steps=40",
        "train.steps_per_loop=1",
    )  # fmt: skip
    assert jobs.run(tmp_path, *overrides) == 0
    (result,) = jobs.results(tmp_path)
    assert (result["global_step"], result["stopped_early"]) == (10, REASON)
    (text,) = [text for text in capfd.readouterr().err.splitlines() if REASON in text]
    messages.same("line", text)
