"""What hooks log with `run.log` and `runner.log`: in the journal, the event files and the run's files, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from matplotlib.figure import Figure

import runner
from runner import Estimator, EstimatorSpec, Hook, RunConfig
from runner.system.console import LoopReport, Progress
from runner.tracking.artifacts import Artifacts, keeping
from tests.support.journal import events_in, journal_of, metrics_of_steps
from tests.support.line import LINES, line, mirrored, points, read_events
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1

STRATEGIES: dict[str, Any] = {"default": lambda: None, "mirrored": mirrored}


class Everywhere(Hook):
    """Logs in each of its methods, under the method's name, with `log` if that is given instead of `run.log`."""

    def __init__(self, log: Any = None) -> None:
        self.every = runner.Every(steps=2)
        self._log = log

    def _says(self, name: str, run: Any) -> None:
        (self._log or run.log)({name: run.global_step + 0.5})

    def begin(self, run: Any) -> None:
        self._says("begin", run)

    def before_step(self, run: Any, step: int) -> None:
        self._says("before_step", run)

    def after_step(self, run: Any, result: Any) -> None:
        self._says("after_step", run)

    def after_batches(self, run: Any, examples: int) -> None:
        if examples == 8:
            self._says("after_batches", run)

    def end(self, run: Any) -> None:
        self._says("end", run)

    def close(self, run: Any) -> None:
        self._says("close", run)


class AsSession(tf.compat.v1.train.SessionRunHook):
    """Logs in the methods of a SessionRunHook: the step, and what it fetches of it."""

    def begin(self) -> None:
        runner.log({"begin": 1})

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs({"loss": "my_loss:0", "step": v1.train.get_or_create_global_step()})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        runner.log({"fetched": run_values.results["loss"]})

    def end(self, session: Any) -> None:
        runner.log({"end": 1})


def estimator(folder: Path, model_fn: Any = line, **settings: Any) -> Estimator:
    return Estimator(model_fn, folder / "model", RunConfig(**settings), journal=journal_of(folder / "events.jsonl"))


def logged(folder: Path, among: str = "") -> list[tuple[str, int, float]]:
    """Return (name, step, value) of what the journal has beside what the runner itself reports."""
    own = ("loss", "learning_rate", "steps_per_sec", "examples_per_sec", "mae", "input_bound")
    found = [
        (name, step, value)
        for step, values in metrics_of_steps(folder / "events.jsonl")
        for name, value in values.items()
        if name.split("/")[1] not in own
    ]
    return [one for one in found if one[0].startswith(among)]


def in_event_file(folder: Path, *tags: str) -> list[tuple[str, int, float]]:
    return [(one.tag, one.step, one.value) for one in read_events(folder) if one.tag in tags]


@pytest.mark.parametrize("log", [None, runner.log], ids=["run.log", "runner.log"])
@pytest.mark.parametrize(
    ("strategy", "style"), slow_but([("default", "classic"), ("mirrored", "native")], ("mirrored", "native"))
)
def test_each_method_of_a_hook_logs_once_at_the_step_of_the_run(
    strategy: str, style: str, log: Any, tmp_path: Path
) -> None:
    trainer = estimator(tmp_path, LINES[style], train_distribute=STRATEGIES[strategy]())
    trainer.train(points(repeat=True), [Everywhere(log)], max_steps=4)
    trained = [("before_step", 0), ("after_step", 2), ("before_step", 2), ("after_step", 4), ("end", 4), ("close", 4)]
    expected = [(f"train/{name}", step, step + 0.5) for name, step in [("begin", 0), *trained]]
    assert logged(tmp_path) == expected
    tags = {name for name, *_ in expected}
    assert in_event_file(tmp_path / "model", *tags) == expected

    trainer.evaluate(points(), hooks=[Everywhere(log)])
    trainer.evaluate(points(), hooks=[Everywhere(log)], name="other")
    list(trainer.predict(points(), hooks=[Everywhere(log)]))
    for label in ("eval", "eval_other", "predict"):
        values = [("begin", 4, 4.5), ("after_batches", 4, 4.5), ("end", 4, 4.5)]
        assert logged(tmp_path, f"{label}/") == [(f"{label}/{name}", *rest) for name, *rest in values]
        assert in_event_file(tmp_path / "model" / label, *(name for name, *_ in values)) == values
    assert len(logged(tmp_path)) == len(expected) + 9


def test_a_session_hook_logs_the_values_that_it_fetches(tmp_path: Path) -> None:
    trainer = estimator(tmp_path, log_step_count_steps=1)
    trainer.train(points(), [AsSession()], max_steps=3)
    losses = [
        values["train/loss"] for _, values in metrics_of_steps(tmp_path / "events.jsonl") if "train/loss" in values
    ]
    fetched = [("train/fetched", step + 1, loss) for step, loss in enumerate(losses)]
    assert len(fetched) == 3
    assert logged(tmp_path) == [("train/begin", 0, 1.0), *fetched, ("train/end", 3, 1.0)]
    trainer.evaluate(points(4, 4), hooks=[AsSession()])
    assert [(name, step) for name, step, _ in logged(tmp_path, "eval/")] == [
        ("eval/begin", 3), ("eval/fetched", 3), ("eval/end", 3),
    ]  # fmt: skip


class Pictures(Hook):
    def after_step(self, run: Any, result: Any) -> None:
        figure = Figure(figsize=(1, 1), dpi=40)
        figure.add_subplot().plot([1, 2])
        images = {"figure": figure, "grey": np.linspace(0, 1, 6).reshape(2, 3), "colour": tf.ones([4, 5, 3], tf.uint8)}
        run.log({**images, "number": tf.constant(7, tf.int64)})


def test_images_and_figures_are_files_of_the_run_and_images_of_its_event_file(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "events.jsonl")
    trainer = Estimator(line, tmp_path / "model", RunConfig(steps_per_loop=2), journal=journal)
    with keeping(Artifacts(tmp_path / "model", journal)):
        trainer.train(points(), [Pictures()], max_steps=2)
    assert logged(tmp_path) == [("train/number", 2, 7.0)]
    kept = events_in(tmp_path / "events.jsonl", "image")
    shapes = {"train/figure": (40, 40, 4), "train/grey": (2, 3, 1), "train/colour": (4, 5, 3)}
    assert [(one["name"], one["step"]) for one in kept] == [(name, 2) for name in shapes]
    for one in kept:
        png = (tmp_path / "model" / one["path"]).read_bytes()
        assert tf.io.decode_png(png).shape == shapes[one["name"]]
    grey = tf.io.decode_png((tmp_path / "model" / kept[1]["path"]).read_bytes())
    assert grey.numpy().ravel().tolist() == [0, 51, 102, 153, 204, 255]
    (file,) = (tmp_path / "model").glob("events.out.tfevents.*")
    values = [(event.step, one) for event in v1.train.summary_iterator(str(file)) for one in event.summary.value]
    images = {one.tag: (step, one.image) for step, one in values if one.HasField("image")}
    assert {tag: (step, one.height, one.width) for tag, (step, one) in images.items()} == {
        tag: (2, *shape[:2]) for tag, shape in shapes.items()
    }


def test_without_event_files_the_journal_has_the_values(tmp_path: Path) -> None:
    trainer = estimator(tmp_path, tensorboard=False)
    trainer.train(points(), [Everywhere()], max_steps=2)
    trainer.evaluate(points(), hooks=[Everywhere()])
    assert {name for name, *_ in logged(tmp_path)} >= {"train/after_step", "eval/end"}
    assert not list((tmp_path / "model").rglob("events.out.tfevents.*"))


def test_a_worker_that_is_not_the_chief_logs_nothing_and_an_evaluator_does(tmp_path: Path) -> None:
    from runner.distribute.cluster import Cluster

    estimator(tmp_path).train(points(), max_steps=1)
    tasks = {"chief": ["localhost:1"], "worker": ["localhost:2"], "evaluator": ["localhost:3"]}
    for role in ("worker", "evaluator"):
        one = estimator(tmp_path, cluster=Cluster(role, 0, tasks))
        one.evaluate(points(), hooks=[Everywhere()], name=role)
    assert {name.partition("/")[0] for name, *_ in logged(tmp_path, "eval")} == {"eval_evaluator"}


class Repeats(Hook):
    def after_step(self, run: Any, result: Any) -> None:
        run.log({"mine": 1.0})

    def end(self, run: Any) -> None:
        run.log({"mine": 2.0})


def test_a_name_is_logged_once_at_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "runner.model_log"):
        estimator(tmp_path, steps_per_loop=1).train(points(), [Repeats()], max_steps=2)
    assert logged(tmp_path) == [("train/mine", 1, 1.0), ("train/mine", 2, 1.0)]
    assert "'mine'" in caplog.text and "step 2" in caplog.text


def test_a_resumed_run_logs_the_steps_that_follow(tmp_path: Path) -> None:
    for steps in (2, 4):
        estimator(tmp_path, steps_per_loop=1).train(points(repeat=True), [Repeats()], max_steps=steps)
    assert [step for _, step, _ in logged(tmp_path)] == [1, 2, 3, 4]
    assert [step for _, step, _ in in_event_file(tmp_path / "model", "train/mine")] == [1, 2, 3, 4]


def test_the_progress_line_shows_what_hooks_log_for_it(tmp_path: Path) -> None:
    class Shows(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            run.log({"mine": 3.0}, on_progress=True)
            run.log({"quiet": 4.0})

    class Shown(Progress):
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def update(self, loop: LoopReport) -> None:
            self.logged.append(dict(loop.logged))

    progress = Shown()
    trainer = Estimator(line, tmp_path, RunConfig(steps_per_loop=1), progress=progress)
    trainer.train(points(), [Shows()], max_steps=2)
    assert progress.logged == [{}, {"mine": 3.0}]


def evaluated_inside(folder: Path, hook: Hook, model_fn: Any, input_fn: Any) -> None:
    """Train with a hook that evaluates, so that model_fn and the input are called while it is."""

    class Evaluates(Hook):
        def end(self, run: Any) -> None:
            trainer.evaluate(input_fn)

    trainer = estimator(folder, model_fn)
    trainer.train(points(), [Evaluates()], max_steps=1)


def test_model_fn_and_input_fn_that_a_hook_has_evaluated_do_not_log_to_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        runner.log({"of_model": tf.reduce_mean(features)})
        return line(features, labels, mode, params)

    def input_fn() -> tf.data.Dataset:
        runner.log({"of_input": 1.0})
        return points()()

    with caplog.at_level("WARNING", "runner.model_log"):
        evaluated_inside(tmp_path, Hook(), model_fn, input_fn)
    assert [name for name, *_ in logged(tmp_path)] == ["train/of_model"]
    assert "'of_input'" in caplog.text and "'of_model'" not in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        {"": 1.0}, {"loss": 1.0}, {"learning_rate": 1.0}, {"mine": "text"}, {"mine": None}, {"mine": [1.0, 2.0]},
        {"mine": np.zeros([2, 2], np.int64)}, {"mine": np.zeros([2, 2, 5], np.uint8)},
    ],
    ids=["no_name", "loss", "rate", "text", "none", "vector", "integers", "channels"],
)  # fmt: skip
def test_what_cannot_be_logged_is_refused(values: Any, tmp_path: Path, messages: Messages) -> None:
    class Logs(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            run.log(values)

    with messages.raised(ValueError):
        estimator(tmp_path).train(points(), [Logs()], max_steps=1)


def test_a_tensor_of_the_graph_is_refused(tmp_path: Path, messages: Messages) -> None:
    class Logs(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            runner.log({"mine": v1.train.get_global_step() + 1})

    with messages.raised(ValueError):
        estimator(tmp_path).train(points(), [Logs()], max_steps=1)
