"""When exporters are called, and what they export: tf.estimator's rules, without its defects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from runner import (
    BestExporter,
    EarlyStopping,
    Estimator,
    EvalSpec,
    Exporter,
    FinalExporter,
    Hook,
    LatestExporter,
    RunConfig,
    TrainSpec,
    build_raw_serving_input_receiver_fn,
    train_and_evaluate,
)
from runner.distribute.cluster import Cluster
from runner.estimator.train_and_evaluate import evaluate_checkpoints
from runner.export.exporters import better
from runner.export.saved_model import exports_in
from runner.hooks.hook import Interrupted
from runner.system.files import RUNNER_FILES
from runner.tracking.run_end import write_ending
from tests.support.messages import Messages
from tests.support.models import classic, eval_input, train_input

RECEIVER = build_raw_serving_input_receiver_fn({"x": tf.TensorSpec([None, 4])})


class FakeEstimator:
    """Makes folders in place of SavedModels."""

    def __init__(self) -> None:
        self.exported: list[str] = []

    def export_saved_model(self, base: str, receiver_fn: Any, **arguments: Any) -> bytes:
        assert arguments.keys() == {"assets_extra", "as_text", "checkpoint_path"}
        path = Path(base) / str(1000 + len(self.exported))
        path.mkdir(parents=True)
        self.exported.append(Path(arguments["checkpoint_path"]).name)
        return str(path).encode()


def checkpoint(folder: Path, step: int | str) -> str:
    """The path of a checkpoint that is there."""
    (folder / f"model.ckpt-{step}.index").touch()
    return str(folder / f"model.ckpt-{step}")


class Recording(Exporter):
    """Notes what it is called with."""

    def __init__(self, name: str = "recording") -> None:
        self._name = name
        self.calls: list[tuple[str, int, bool]] = []
        self.paths: set[str] = set()

    @property
    def name(self) -> str:
        return self._name

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> None:
        self.paths.add(export_path)
        self.calls.append((Path(checkpoint_path).name, eval_result["global_step"], is_the_final_export))


def test_the_best_is_exported_and_nothing_worse_after_a_restart(tmp_path: Path) -> None:
    estimator, base = FakeEstimator(), str(tmp_path / "best")
    for attempt, losses in enumerate(([0.5, 0.6, 0.4], [0.45, 0.4, 0.39])):  # each list is a process of its own
        exporter = BestExporter(serving_input_receiver_fn=RECEIVER)
        for step, loss in enumerate(losses):
            exporter.export(estimator, base, checkpoint(tmp_path, f"{attempt}{step}"), {"loss": loss}, False)
    assert estimator.exported == ["model.ckpt-00", "model.ckpt-02", "model.ckpt-12"]
    known = json.loads((tmp_path / RUNNER_FILES / "exports.best_exporter.json").read_text())["exports"]
    assert [known[name]["metrics"] for name in sorted(known)] == [{"loss": "0.5"}, {"loss": "0.4"}, {"loss": "0.39"}]


def test_the_best_by_another_metric_and_nan(messages: Messages) -> None:
    accuracy, smaller_loss, nan = better("accuracy", "max"), better("loss", "min"), float("nan")
    assert accuracy({"accuracy": 0.5}, {"accuracy": 0.6}) and not accuracy({"accuracy": 0.6}, {"accuracy": 0.6})
    assert smaller_loss({"loss": nan}, {"loss": 9.0}) and not smaller_loss({"loss": 9.0}, {"loss": nan})
    with messages.raised(ValueError):
        smaller_loss({"accuracy": 1.0}, {"accuracy": 1.0})


def test_a_comparison_gets_its_results_by_name_in_whatever_order(tmp_path: Path, messages: Messages) -> None:
    def more_accurate(current_eval_result: Any, best_eval_result: Any) -> bool:
        return bool(current_eval_result["accuracy"] > best_eval_result["accuracy"])

    estimator = FakeEstimator()
    exporter = BestExporter(serving_input_receiver_fn=RECEIVER, compare_fn=more_accurate)
    for step, accuracy in enumerate((0.5, 0.4, 0.6)):
        exporter.export(estimator, str(tmp_path), checkpoint(tmp_path, step), {"accuracy": accuracy}, False)
    assert estimator.exported == ["model.ckpt-0", "model.ckpt-2"]
    with messages.raised(ValueError, hide="0x[0-9a-f]+"):
        BestExporter(serving_input_receiver_fn=RECEIVER, compare_fn=lambda result: True)  # type: ignore[arg-type, misc]


def test_the_latest_keeps_so_many_and_exports_a_checkpoint_once(tmp_path: Path) -> None:
    estimator, exporter = FakeEstimator(), LatestExporter("latest", RECEIVER, exports_to_keep=2)
    for step in (1, 2, 2, 3):
        exporter.export(estimator, str(tmp_path), checkpoint(tmp_path, step), {"loss": 1.0}, step == 3)
    exporter.export(estimator, str(tmp_path), checkpoint(tmp_path, 3), {"loss": 2.0}, True)  # trained anew
    assert estimator.exported == [f"model.ckpt-{step}" for step in (1, 2, 3, 3)]
    assert [Path(path).name for path in exports_in(str(tmp_path))] == ["1002", "1003"]


def test_the_final_one_waits_for_the_end(tmp_path: Path) -> None:
    estimator, exporter = FakeEstimator(), FinalExporter("final", RECEIVER)
    assert exporter.export(estimator, str(tmp_path), checkpoint(tmp_path, 1), {}, False) is None
    assert exporter.export(estimator, str(tmp_path), checkpoint(tmp_path, 2), {}, True) is not None
    again = FinalExporter("final", RECEIVER)
    assert again.export(estimator, str(tmp_path), checkpoint(tmp_path, 2), {}, True) is None
    assert estimator.exported == ["model.ckpt-2"]


def test_a_stand_in_for_an_estimator_is_called_as_by_tf_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.15 exports 0.5 and 0.4, gives back what the estimator gave, and writes nothing itself."""
    monkeypatch.chdir(tmp_path)
    estimator = mock.Mock(model_dir=str(tmp_path))
    estimator.export_saved_model.return_value = "somewhere"
    best = BestExporter(serving_input_receiver_fn=RECEIVER, assets_extra={"a": "b"})
    losses = (0.5, 0.6, 0.4)
    found = [best.export(estimator, "base", "checkpoint", {"loss": loss}, False) for loss in losses]
    assert found == ["somewhere", None, "somewhere"]
    expected = {"assets_extra": {"a": "b"}, "as_text": False, "checkpoint_path": "checkpoint"}
    estimator.export_saved_model.assert_called_with("base", RECEIVER, **expected)
    latest, final = LatestExporter("latest", RECEIVER), FinalExporter("final", RECEIVER)
    assert latest.export(estimator, "base", None, None, False) == "somewhere"  # type: ignore[arg-type]
    assert final.export(estimator, "base", None, None, True) == "somewhere"  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


MISTAKES: dict[str, Callable[[], Any]] = {
    "none to keep": lambda: LatestExporter("a", RECEIVER, exports_to_keep=0),
    "no receiver": lambda: BestExporter(),
    "a path for a name": lambda: EvalSpec(eval_input(9), exporters=[FinalExporter("a/b", RECEIVER)]),
    "one name twice": lambda: EvalSpec(eval_input(9), exporters=[Recording("a"), Recording("a")]),
    "no exporter": lambda: EvalSpec(eval_input(9), exporters=["a"]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        MISTAKES[mistake]()


def test_exporters_follow_evaluations_and_the_last_call_is_the_final_one(tmp_path: Path) -> None:
    """22 steps, saved every 10: three exports, one of them final; tf.estimator's rule."""
    estimator = Estimator(classic, tmp_path, RunConfig(save_checkpoints_steps=10, tensorboard=False))
    first, second = Recording("first"), Recording("second")
    specs = [
        EvalSpec(eval_input(11), exporters=first, at_start=True),  # type: ignore[arg-type]
        EvalSpec(eval_input(11), name="other", exporters=[second, LatestExporter("latest", receiver, None, False, 1)]),
    ]
    result = train_and_evaluate(estimator, TrainSpec(train_input(10), max_steps=22), specs)
    expected = [("model.ckpt-10", 10, False), ("model.ckpt-20", 20, False), ("model.ckpt-22", 22, True)]
    assert first.calls == expected and second.calls == expected
    assert first.paths == {str(tmp_path / "export" / "first")}
    (kept,) = result.exports
    assert Path(kept).parent == tmp_path / "export" / "latest" and (Path(kept) / "saved_model.pb").exists()
    again = train_and_evaluate(estimator, TrainSpec(train_input(10), max_steps=22), specs)  # a finished run
    assert first.calls[3:] == [("model.ckpt-22", 22, True)] and again.exports == ()


class Ending(Hook):
    """Ends the first evaluation that it sees, as SIGTERM does."""

    def after_batches(self, run: Any, examples: int) -> None:
        raise Interrupted("SIGTERM")


class Failing(Recording):
    """Ends the process in its first export, as SIGKILL does."""

    def export(self, *arguments: Any) -> None:
        raise RuntimeError("killed")


@pytest.mark.parametrize("ending", ["killed in an export", "stopped in the evaluation after it"])
def test_exports_that_did_not_come_to_their_end_are_made_by_the_run_that_resumes(ending: str, tmp_path: Path) -> None:
    def train(exporter: Recording, *hooks: Hook) -> Any:
        estimator = Estimator(classic, tmp_path, RunConfig(save_checkpoints_steps=10, tensorboard=False))
        specs = [EvalSpec(eval_input(11), exporters=[exporter]), EvalSpec(eval_input(11), name="other", hooks=hooks)]
        return train_and_evaluate(estimator, TrainSpec(train_input(10), max_steps=22), specs)

    if ending == "killed in an export":
        with pytest.raises(RuntimeError, match="killed"):
            train(Failing())
    else:
        stopped = Recording()
        assert train(stopped, Ending()).interrupted
        assert stopped.calls == []
    resumed = Recording()
    train(resumed)
    assert resumed.calls == [("model.ckpt-10", 10, False), ("model.ckpt-20", 20, False), ("model.ckpt-22", 22, True)]
    assert not (tmp_path / "exporting.json").exists()


def test_the_end_of_the_input_and_an_early_stop_are_final_too(tmp_path: Path) -> None:
    """tf.estimator, without max_steps, never told an exporter that it was the last time."""

    def few() -> Any:
        return train_input(10).fn(params={"batch_size": 10}).take(7)

    config = RunConfig(save_checkpoints_steps=5, tensorboard=False)
    ended, stopped = Recording(), Recording()
    estimator = Estimator(classic, tmp_path / "ended", config)
    train_and_evaluate(estimator, TrainSpec(few), EvalSpec(eval_input(11), exporters=[ended]))
    assert ended.calls == [("model.ckpt-5", 5, False), ("model.ckpt-7", 7, True)]
    rule = EarlyStopping("eval/loss", min_delta=1e9)
    spec = TrainSpec(train_input(10), max_steps=100, early_stopping=rule)
    train_and_evaluate(Estimator(classic, tmp_path / "s", config), spec, EvalSpec(eval_input(11), exporters=[stopped]))
    assert stopped.calls == [("model.ckpt-5", 5, False), ("model.ckpt-10", 10, True)]


def test_an_evaluator_exports_what_it_follows_and_the_last_one_when_training_has_ended(tmp_path: Path) -> None:
    """The checkpoint is evaluated, and exported, before anybody knows that it is the last one."""
    Estimator(classic, tmp_path, RunConfig(tensorboard=False)).train(train_input(10), steps=3)
    recording, latest = Recording(), LatestExporter("latest", receiver)
    place = Cluster("evaluator", 0, {"chief": ["host:1"], "worker": ["host:2"]})
    estimator = Estimator(classic, tmp_path, RunConfig(cluster=place, tensorboard=False))
    spec = EvalSpec(eval_input(11), exporters=[recording, latest])
    result = evaluate_checkpoints(
        estimator, TrainSpec(train_input(10)), spec, wait=lambda secs: write_ending(tmp_path, "finished", 3, 0)
    )
    assert recording.calls == [("model.ckpt-3", 3, False), ("model.ckpt-3", 3, True)]
    assert [Path(path).parent for path in result.exports] == [tmp_path / "export" / "latest"]


def receiver() -> Any:
    from runner.export.receivers import receiver_fn_of_spec

    return receiver_fn_of_spec(tf.TensorSpec([None, 4]))()
