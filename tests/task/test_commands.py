"""What each command does, in this process: results, files, numbers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from runner.checkpoint.reader import Reader
from runner.checkpoint.retention import metrics_of
from runner.config.schema import ConfigError
from runner.task.commands import flat_metrics
from tests.support.jobs import endless, noted, results, run
from tests.support.line import steps_of
from tests.support.messages import Messages
from tests.support.tiers import slow_but

MIRRORED = ("strategy=mirrored", "strategy.virtual_devices=2")


def read(folder: Path, name: str = "predictions.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run has finished. Not to be trained further."""
    folder = tmp_path_factory.mktemp("trained")
    assert run(folder, "checkpoint.save_steps=2") == 0
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- training and evaluation ----------------------------------------------------------------------------------------


def test_the_result_of_training_is_what_the_summary_tells(trained: Path) -> None:
    (result,) = results(trained)
    speed = result.pop("steps_per_sec")
    metrics = result.pop("metrics")
    assert speed > 0 and set(metrics) == {"eval/loss", "eval/mae"}
    assert result.pop("stopped_early") is None and result.pop("interrupted") is False
    assert result.pop("input_bound") is None  # in four steps nobody looks
    assert result == {"global_step": 4, "checkpoint": f"{trained}/run/model.ckpt-4", "examples": 8}


def test_all_that_takes_time_is_a_phase(trained: Path) -> None:
    phases = [line["name"] for line in noted(trained) if line.get("event") == "phase"]
    assert set(phases) == {"launch", "import", "build", "input", "trace", "train", "save", "evaluate"}
    assert phases[:3] == ["launch", "import", "build"]


def test_training_alone_has_no_metrics(tmp_path: Path) -> None:
    assert run(tmp_path, "command=train") == 0
    (result,) = results(tmp_path)
    assert result.pop("steps_per_sec") > 0 and result.pop("input_bound") is None
    assert result.pop("stopped_early") is None and result.pop("interrupted") is False
    assert result == {"global_step": 4, "checkpoint": f"{tmp_path}/run/model.ckpt-4", "metrics": {}, "examples": 8}
    assert run(tmp_path, "command=train") == 0
    assert (results(tmp_path)[1]["steps_per_sec"], results(tmp_path)[1]["examples"]) == (None, 0)


@pytest.mark.parametrize(
    "overrides",
    [(), ("train.max_steps=null", "input.train.fn=tests.support.jobs.once")],
    ids=["max_steps", "end of input"],
)
@pytest.mark.parametrize("command", slow_but(["train_and_evaluate", "train"], "train"))
def test_a_finished_run_is_not_trained_again(command: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    for _ in range(3):
        assert run(tmp_path, f"command={command}", "model.params={unheard: 1}", *overrides) == 0
    unread = [line["keys"] for line in noted(tmp_path) if line.get("event") == "unread_params"]
    assert unread == [["model.params.unheard"]]  # of the start that built the model
    first, *rest = results(tmp_path)
    assert first["global_step"] == 4 and first["examples"] == 8 and first["steps_per_sec"] > 0
    for again in rest:
        assert (again["examples"], again["steps_per_sec"]) == (0, None), "0.0 steps per second would be no speed"
        assert (again["global_step"], again["metrics"]) == (4, first["metrics"])


def constants(params: Any) -> Any:
    return tf.constant([1.0, 2.0]), tf.constant([2.0, 4.0])


@pytest.mark.slow
def test_tensors_without_end_are_refused_where_a_session_computes_them(tmp_path: Path) -> None:
    """Without model.classic they are one batch."""
    given = {"fn": f"{__name__}.constants", "batch_size": "2"}
    words = [f"input.{block}.{name}={value}" for block in ("eval", "predict") for name, value in given.items()]
    for command in ("train_and_evaluate", "evaluate", "dry_run", "predict"):
        ask = functools.partial(run, tmp_path, f"command={command}", *words)
        assert ask("model.classic=true") == 2, command
        assert ask() == 0, command
        assert command == "predict" or ask("model.classic=true", "eval.steps=3") == 0, command


def downloading(params: Any) -> Any:
    """As jobs.endless, with data that Keras fetches."""
    keras.utils.get_file("fetched.txt", params["url"], cache_dir=params["cache"])
    return endless({name: value for name, value in params.items() if name not in ("url", "cache")})


def test_downloads_of_keras_make_no_noise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "data.txt").write_text("x" * 100_000)
    words = ("input.train.fn=tests.task.test_commands.downloading", f"+input.train.params.cache={tmp_path}/cache")
    assert run(tmp_path, "command=train", *words, f"+input.train.params.url='file://{tmp_path}/data.txt'") == 0
    assert [path.stat().st_size for path in (tmp_path / "cache").rglob("*.txt")] == [100_000]
    said = capfd.readouterr()
    assert "Downloading" not in said.out + said.err and "100000/100000" not in said.out + said.err


def test_fewer_steps_than_were_taken_are_said_with_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, "command=train") == 0
    capsys.readouterr()
    assert run(tmp_path, "command=train", "train.max_steps=2") == 0
    (said,) = [text for text in capsys.readouterr().err.splitlines() if "Nothing to train" in text]
    messages.same("exit 0", said)


def test_a_run_to_the_end_of_its_input_goes_on_with_max_steps_or_another_input(tmp_path: Path) -> None:
    to_the_end = ("train.max_steps=null", "input.train.fn=tests.support.jobs.once")
    assert run(tmp_path, *to_the_end) == 0
    assert run(tmp_path, *to_the_end[1:], "train.max_steps=6") == 0
    assert run(tmp_path, *to_the_end, "+input.train.params.num_examples=4") == 0
    assert [result["global_step"] for result in results(tmp_path)] == [4, 6, 8]


def test_evaluations_may_begin_at_the_start_or_later(tmp_path: Path) -> None:
    settings = ("checkpoint.save_steps=1", "eval.start_delay_secs=1000", "eval.at_start=true")
    assert run(tmp_path, "train.max_steps=2", *settings) == 0
    assert run(tmp_path, "train.max_steps=4", *settings) == 0
    assert steps_of(tmp_path / "run" / "eval", "loss") == [0, 2, 2, 4]


def test_evaluate_reports_the_checkpoint_and_changes_nothing_else(trained: Path) -> None:
    before = files(trained)
    assert run(trained, "command=evaluate") == 0
    training, evaluated = results(trained)[0], results(trained)[-1]
    assert evaluated == {name: training[name] for name in ("global_step", "checkpoint", "metrics")}
    assert {name for name in files(trained) - before if "run/eval/" not in name} == set()


def test_named_evaluations_have_names_in_their_metrics() -> None:
    metrics: dict[str, dict[str, Any]] = {
        "": {"loss": 1.0, "global_step": 3},
        "small": {"nested": {"a": 2, "text": b"x"}},
    }
    assert flat_metrics(metrics) == {"eval/loss": 1.0, "eval_small/nested/a": 2.0}


def test_no_event_files_where_tensorboard_is_off(tmp_path: Path) -> None:
    assert run(tmp_path, "tracking.tensorboard=false") == 0
    assert not [name for name in files(tmp_path) if "tfevents" in name or name.endswith("eval")]
    assert set(results(tmp_path)[0]["metrics"]) == {"eval/loss", "eval/mae"}


# --- prediction -----------------------------------------------------------------------------------------------------


def test_predictions_are_in_the_order_of_the_input_each_example_once(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(trained, "command=predict") == 0
    path = trained / "run" / "predictions.jsonl"
    result = results(trained)[-1]
    # Those of the checkpoint, from its evaluation in training.
    assert result.pop("metrics") == results(trained)[0]["metrics"]
    assert result == {
        "global_step": 4,
        "checkpoint": f"{trained}/run/model.ckpt-4",
        "predictions": str(path),
        "examples": 8,
    }
    found = read(trained)
    assert [one["x"] for one in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    weight = found[0]["y"]
    assert weight > 0 and [one["y"] for one in found] == pytest.approx([weight * one["x"] for one in found])
    (said,) = [text for text in capsys.readouterr().err.splitlines() if str(path) in text]
    messages.same("line", said, hide=re.escape(str(trained)))
    assert "predict" in [line["name"] for line in noted(trained) if line.get("event") == "phase"]


@pytest.mark.parametrize("batch_size", slow_but(["3", "null", "1", "8"], "null", "1"))
def test_replicas_do_not_change_what_is_predicted(batch_size: str, trained: Path, tmp_path: Path) -> None:
    wanted = ["command=predict", f"input.predict.batch_size={batch_size}", "+input.predict.params.num_examples=7"]
    assert run(trained, *wanted, f"predict.output={tmp_path}/one.jsonl") == 0
    assert run(trained, *wanted, f"predict.output={tmp_path}/two.jsonl", *MIRRORED) == 0
    one, two = ((tmp_path / f"{name}.jsonl").read_text() for name in ("one", "two"))
    assert one == two and len(one.splitlines()) == 7


def test_predictions_are_one_array_a_name_in_an_npz(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "p.npz"
    assert run(trained, "command=predict", f"predict.output={output}") == 0
    with np.load(output) as found:
        assert sorted(found) == ["x", "y"] and found["x"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_predictions_of_every_kind(trained: Path) -> None:
    assert run(trained, "command=predict", "model.fn=tests.support.jobs.many_kinds") == 0
    assert read(trained)[1] == {
        "x": 2,
        "text": "é2",
        "nested": {"nan": "nan", "matrix": [[2, 2], [2, 2]]},
        "even": True,
    }
    assert (
        run(trained, "command=predict", "model.fn=tests.support.jobs.many_kinds", f"predict.output={trained}/p.npz")
        == 0
    )
    with np.load(trained / "p.npz") as found:
        assert sorted(found) == ["even", "nested/matrix", "nested/nan", "text", "x"]
        assert found["text"].tolist()[1] == "é2".encode() and found["nested/matrix"].shape == (8, 2, 2)
    (trained / "p.npz").unlink()


def test_predictions_that_are_no_dict(trained: Path) -> None:
    assert run(trained, "command=predict", "model.fn=tests.support.jobs.bare") == 0
    assert [list(one) for one in read(trained)] == [["predictions"]] * 8


def test_only_the_keys_that_are_asked_for(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(trained, "command=predict", "predict.keys=[x]") == 0
    assert read(trained)[0] == {"x": 1}
    assert run(trained, "command=predict", "predict.keys=[z]") == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("runner: ")]
    messages.same("exit 2", said)


ROWS = (
    "input.train.fn=tests.support.jobs.endless_rows", "input.eval=null", "input.predict.fn=tests.support.jobs.rows",
    "train.max_steps=1",
)  # fmt: skip
IDS = [str(number) if number % 2 else f'"{number}"' for number in range(1, 9)]


@pytest.fixture(scope="module")
def popping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on features in a dict. Not to be trained further."""
    folder = tmp_path_factory.mktemp("popping")
    assert run(folder, *ROWS, "model.fn=tests.support.jobs.popping") == 0
    return folder


@pytest.mark.parametrize("devices", [(), MIRRORED], ids=["one", "mirrored"])
def test_a_csv_has_the_features_that_are_asked_for_in_the_order_of_the_input(
    devices: Sequence[str], popping: Path, tmp_path: Path
) -> None:
    wanted = ["command=predict", "model.fn=tests.support.jobs.popping", "predict.keys=[id,x,y]", *ROWS, *devices]
    assert run(popping, *wanted, f"predict.output={tmp_path}/p.csv", "input.predict.batch_size=2") == 0
    frame = pd.read_csv(tmp_path / "p.csv", dtype={"id": str})
    assert frame.columns.tolist() == ["id", "x", "y"] and frame["id"].tolist() == IDS
    assert frame["x"].tolist() == list(range(1, 9)) and frame["y"][0] > 0
    assert frame["y"].tolist() == pytest.approx((frame["y"][0] * frame["x"]).tolist())


def test_a_compiled_model_has_features_beside_its_predictions(tmp_path: Path) -> None:
    model = "model.fn=tests.support.jobs.compiled"
    assert run(tmp_path, *ROWS, model) == 0
    predict = [*ROWS, model, "command=predict", f"predict.output={tmp_path}/p.csv"]
    assert run(tmp_path, *predict, "predict.keys=[id,predictions]") == 0
    frame = pd.read_csv(tmp_path / "p.csv", dtype={"id": str})
    assert frame.columns.tolist() == ["id", "predictions_0"] and frame["id"].tolist() == IDS
    assert run(tmp_path, *predict) == 0
    assert pd.read_csv(tmp_path / "p.csv").equals(frame[["predictions_0"]])


@pytest.mark.parametrize(
    "key", ["predict.keys=[id,y] +model.params.clash=true", "predict.keys=[idd,y]"], ids=["clash", "unknown"]
)
def test_a_key_that_names_no_one_thing_is_refused(
    key: str, popping: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    names = files(popping)
    assert run(popping, *ROWS, "model.fn=tests.support.jobs.popping", "command=predict", *key.split()) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("runner: ")]
    messages.same("exit 2", said)
    assert files(popping) == names


def test_a_failed_prediction_keeps_the_older_file(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trained, "command=predict") == 0
    before, names = (trained / "run" / "predictions.jsonl").read_bytes(), files(trained)
    assert run(trained, "command=predict", "input.predict.fn=tests.support.jobs.failing") == 2
    assert "bad example" in capsys.readouterr().err
    assert (trained / "run" / "predictions.jsonl").read_bytes() == before and files(trained) == names


def test_no_examples_are_an_empty_file_and_a_warning(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(trained, "command=predict", "+input.predict.params.num_examples=0") == 0
    assert results(trained)[-1]["examples"] == 0 and read(trained) == []
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("warning: ")]
    messages.same("exit 0", said, hide=re.escape(str(trained)))


# --- which checkpoint -----------------------------------------------------------------------------------------------

OF_LOSS = ("checkpoint.keep_best.metric=eval/loss",)
WORSENING = ("model.params.start=1.9", "model.params.learning_rate=0.08", "checkpoint.save_steps=2")
"""The weight, 1.9 at first, runs away from 2: the first evaluation, of step 2, is the best."""


@pytest.fixture(scope="module")
def worsened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worsened")
    assert run(folder, *WORSENING, *OF_LOSS, "train.max_steps=6", "checkpoint.keep_max=2") == 0
    return folder


@pytest.mark.parametrize(
    ("chosen", "step"),
    slow_but([("null", 6), ("best", 2), ("4", 4), ("model.ckpt-2", 2), ("{}/4", 4)], ("null", 6), ("best", 2)),
)
def test_a_checkpoint_is_chosen_as_the_best_by_its_step_or_path(worsened: Path, chosen: str, step: int) -> None:
    chosen = chosen.replace("{}/", f"{worsened}/run/model.ckpt-")
    path = f"{worsened}/run/model.ckpt-{step}"
    assert run(worsened, *OF_LOSS, "command=evaluate", f"eval.checkpoint={chosen}") == 0
    evaluated = results(worsened)[-1]
    assert (evaluated["checkpoint"], evaluated["global_step"]) == (path, step)
    assert evaluated["metrics"]["eval/loss"] == metrics_of(path)["eval/loss"]
    assert run(worsened, *OF_LOSS, "command=predict", f"predict.checkpoint={chosen}") == 0
    assert (results(worsened)[-1]["checkpoint"], results(worsened)[-1]["global_step"]) == (path, step)
    assert results(worsened)[-1]["metrics"] == metrics_of(path)
    first = json.loads((worsened / "run" / "predictions.jsonl").read_text().splitlines()[0])
    assert first["y"] == pytest.approx(float(Reader(path).get("weight")))
    assert run(worsened, *OF_LOSS, "command=export", f"export.checkpoint={chosen}") == 0
    assert results(worsened)[-1]["checkpoint"] == path
    assert run(worsened, *OF_LOSS, "command=export", f"export.checkpoint={chosen}") == 0
    assert results(worsened)[-1] == {"checkpoint": path, "global_step": step, "metrics": metrics_of(path)}


@pytest.mark.parametrize(
    "overrides",
    [
        ("command=evaluate", "eval.checkpoint=5"),
        ("command=predict", "predict.checkpoint=x/y"),
        ("command=evaluate", "eval.checkpoint=best"),
        ("command=export", "export.checkpoint=best", "checkpoint.keep_best.metric=eval/auc"),
        ("eval.checkpoint=2",),
        ("command=evaluate", "predict.checkpoint=2"),
    ],
    ids=" ".join,
)
def test_a_checkpoint_that_cannot_be_chosen_is_refused(
    worsened: Path, overrides: tuple[str, ...], messages: Messages
) -> None:
    with messages.raised(ConfigError, hide=re.escape(str(worsened))):
        run(worsened, *overrides)
