"""README.md beside a SavedModel says what the run has recorded of it, and nothing else; its three lines load it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import runner
from runner import Estimator, EvalSpec, FinalExporter, RunConfig, TrainSpec, train_and_evaluate
from runner.export.model_card import card_of, recorded_of
from runner.export.receivers import receiver_fn_of_spec
from runner.system.files import MODEL_CARD_FILE
from tests.support.command_line import CommandLine
from tests.support.export_models import loaded_by, predicted, trained_words
from tests.support.journal import Lines, events_in, journal_of
from tests.support.models import classic, data, eval_input, train_input

RECEIVER = receiver_fn_of_spec(tf.TensorSpec([None, 4]))


def tables(card: Path | str) -> dict[str, list[list[str]]]:
    """Heading -> the rows of its table, without that of the names of columns."""
    text = card.read_text() if isinstance(card, Path) else card
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            cells = [cell.strip(" `") for cell in line.strip("|").split(" | ")]
            found.setdefault(heading, []).append(cells)
    return {name: rows[2:] for name, rows in found.items()}


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


WORDS = (
    "model_dir=run", "model.params.network=mlp", "model.params.width=8", "train.max_steps=4", "train.log_steps=2",
    "checkpoint.save_steps=2", "tracking=csv", "tracking.run_name=mine",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> Path:
    """A run with three exporters, in a repository whose only file is changed."""
    home = tmp_path_factory.mktemp("repository")
    (home / "code.py").write_text("1\n")
    git(home, "init", "-q")
    git(home, "add", "code.py")
    git(home, "commit", "-qm", "first")
    (home / "code.py").write_text("2\n")
    done = command_line(*WORDS, "export.exporters=[final,best,latest]", cwd=home)
    assert done.returncode == 0, done.stderr
    return home / "run"


def cards(run: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield (exporter, step, card) of each export."""
    for card in sorted(run.glob(f"export/*/*/{MODEL_CARD_FILE}")):
        yield card.parts[-3], int(re.findall(r"step (\d+)", card.read_text())[0]), card


@pytest.mark.processes
def test_each_exporter_writes_the_card_of_its_checkpoint(run: Path) -> None:
    exported = events_in(run, "exported")
    assert {(Path(line["path"]), line["step"]) for line in exported} == {
        (card.parent, step) for _, step, card in cards(run)
    }
    assert {(exporter, step) for exporter, step, _ in cards(run)} >= {("final", 4), ("latest", 2), ("latest", 4)}
    assert {path.name for path in (run / "export" / "latest").iterdir()} == {
        Path(line["path"]).name for line in exported if "/latest/" in line["path"]
    }, "exports only"
    evaluated = {line["step"]: line for line in events_in(run, "evaluated")}
    assert {*evaluated} == {2, 4}
    for _, step, card in cards(run):
        rows = {name: (value, at) for name, value, at in tables(card)["Metrics"]}
        found = recorded_of(str(run / f"model.ckpt-{step}"))
        assert rows == {name: (f"{value:.6g}", str(at)) for name, value, at in found.metrics}
        assert {at for name, (_, at) in rows.items() if name.startswith("eval/")} == {str(step)}
        assert rows["train/loss"][1] == str(step)


@pytest.mark.processes
def test_a_card_has_what_the_run_has_recorded(run: Path) -> None:
    (card,) = (card for exporter, _, card in cards(run) if exporter == "final")
    text = card.read_text()
    assert text.startswith("# mine, step 4\n")
    made_of = dict(tables(card)["mine, step 4"])
    assert made_of["model_fn"] == "model_fns.digits"
    assert made_of["commit"] == git(run.parent, "rev-parse", "HEAD").strip()
    assert made_of[""] == "with changes that were not committed"
    assert f"tensorflow {tf.__version__}" in made_of["trained with"]
    data_rows = {row[0]: row for row in tables(card)["Data"]}
    facts = {line["context"]: line for line in events_in(run, "dataset")}
    assert data_rows.keys() == {"train", "eval"}
    for context, row in data_rows.items():
        profile = facts[context]["profile"]
        sizes = [str(profile.get(key, "")) for key in ("num_examples", "num_batches", "batch_size")]
        assert row[1:6] == [facts[context]["name"], facts[context]["digest"], *sizes]
    (line,) = (line for line in events_in(run, "exported") if Path(line["path"]) == card.parent)
    rows = tables(card)["Signature `serving_default`"]
    assert rows == [
        [part.removesuffix("s"), name, dtype, str(["any" if size < 0 else size for size in shape]).replace("'", "")]
        for part, tensors in line["tensors"].items()
        for name, (dtype, shape) in tensors.items()
    ]


@pytest.mark.processes
def test_the_documentation_shows_a_piece_of_such_a_card(run: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "export.md").read_text()
    (shown,) = re.findall(r"^```markdown\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (card,) = (card for exporter, _, card in cards(run) if exporter == "final")
    lines = card.read_text().splitlines()
    fixed = [line for line in shown.splitlines() if line.startswith(("##", "| made of", "| input of"))]
    assert len(fixed) == 3 and {*fixed} <= {*lines}
    found = tables(card)
    for heading, rows in tables(shown).items():
        name = heading.replace("200", "4")
        assert [row[0] for row in rows] == [row[0] for row in found[name] if row[0]]


@pytest.mark.processes
def test_its_lines_load_the_model_where_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = (card for exporter, _, card in cards(run) if exporter == "final")
    monkeypatch.chdir(card.parent)
    answer = loaded_by(card)(image=tf.zeros([3, 8, 8, 1]))
    assert answer["probabilities"].shape == (3, 10)


@pytest.mark.processes
def test_a_later_export_of_an_earlier_checkpoint_has_that_ones_facts(run: Path, command_line: CommandLine) -> None:
    words = ("command=export", "model_dir=run", "export.checkpoint=2", "export.dir=served", "tracking=none")
    done = command_line(*words, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    (card,) = (run.parent / "served").glob(f"*/{MODEL_CARD_FILE}")
    (earlier,) = (card for exporter, step, card in cards(run) if (exporter, step) == ("latest", 2))
    assert card.read_text() == earlier.read_text()


# --- in a script ----------------------------------------------------------------------------------------------------


def test_a_script_that_records_nothing_gets_what_is_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = Estimator(classic, tmp_path / "model", RunConfig(tensorboard=False))
    spec = EvalSpec(eval_input(11), exporters=[FinalExporter("final", RECEIVER)])
    result = train_and_evaluate(estimator, TrainSpec(train_input(10), max_steps=3), spec)
    card = Path(result.exports[0]) / MODEL_CARD_FILE
    found = tables(card)
    assert card.read_text().startswith("# A model, step 3\n")
    assert runner.__version__ in card.read_text() and "Data" not in found and "A model, step 3" not in found
    assert {name for name, _, _ in found["Metrics"]} == {f"eval/{name}" for name in ("loss", "mae", "bias")}
    monkeypatch.chdir(card.parent)
    features, _ = data(50)
    answer = loaded_by(card)(tf.constant(features))["y"]
    np.testing.assert_array_equal(answer.numpy(), predicted(estimator, lambda: tf.data.Dataset.from_tensors(features)))


def test_a_new_model_and_a_graph_for_training_have_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = trained_words(tmp_path, journal=journal_of(tmp_path / "events.jsonl"))
    specs = {"w": tf.TensorSpec([None], tf.string), "n": tf.TensorSpec([None])}
    supervised = runner.build_raw_supervised_input_receiver_fn(specs, tf.TensorSpec([None, 1]))
    path = words.experimental_export_all_saved_models(tmp_path / "train", {"train": supervised}).decode()
    card = Path(path) / MODEL_CARD_FILE
    assert 'tags=["train"]' in card.read_text()
    assert ["input", "w", "string", "[any]"] in tables(card)["Signature `train`"]
    monkeypatch.chdir(path)
    assert "loss" in loaded_by(card).structured_outputs
    assert card_of(None, {}, ["serve"]).startswith("# A model, initial values\n")


# --- which of several -----------------------------------------------------------------------------------------------


def facts(context: str, digest: str, **source: Any) -> dict[str, Any]:
    return {"context": context, "name": "n", "digest": digest, "source": source, "profile": {}}


def test_the_facts_are_those_of_the_time_at_which_the_checkpoint_was_saved(tmp_path: Path) -> None:
    """Two starts on other data, from other commits; an evaluator of its own; a last evaluation on a test set."""
    now = iter(range(100))
    supervisor = Lines(tmp_path, "supervisor", clock=lambda: float(next(now)))
    chief = Lines(tmp_path, clock=lambda: float(next(now)))
    evaluator = Lines(tmp_path, "evaluator", clock=lambda: float(next(now)))

    def start(commit: str, command: str = "train_and_evaluate") -> None:
        tags = {"mlflow.source.git.commit": commit, "git.dirty": "false"}
        supervisor.event("run_started", name="mine", command=command, params={}, tags=tags)

    start("a" * 40)
    chief.event("dataset", **facts("train", "first"))
    chief.metrics(3, {"train/loss": 0.3, "train/steps_per_sec": 9.0})
    chief.metrics(4, {"train/loss": 0.4})
    chief.event("checkpoint", path=f"elsewhere/{tmp_path.name}/model.ckpt-3", step=3)
    evaluator.event(
        "dataset", **facts("eval", "held out", files=[{"path": "a", "bytes": 1500}, {"path": "b", "bytes": 500}])
    )
    evaluator.event("dataset", **facts("eval_other", "not of it"))
    start("b" * 40)
    chief.event("dataset", **facts("train", "second"))
    chief.metrics(4, {"train/loss": 0.5})
    chief.event("checkpoint", path="model.ckpt-4", step=4)
    start("c" * 40, "evaluate")
    metrics = tmp_path / "runner_files" / "model.ckpt-3.metrics.json"
    metrics.parent.mkdir()
    metrics.write_text('{"eval/loss": 0.25}')

    first, second = (recorded_of(str(tmp_path / f"model.ckpt-{step}")) for step in (3, 4))
    assert [recorded.tags["mlflow.source.git.commit"][0] for recorded in (first, second)] == ["a", "b"]
    assert [line["digest"] for line in first.datasets] == ["first", "held out"]
    assert [line["digest"] for line in second.datasets] == ["second"]
    assert first.metrics == [("eval/loss", 0.25, 3), ("train/loss", 0.3, 3)]
    assert second.metrics == [("train/loss", 0.5, 4)]
    card = tables(card_of(str(tmp_path / "model.ckpt-3"), {}, ["serve"]))
    assert card["Data"][1] == ["eval", "n", "held out", "", "", "", "2 (2.0 kB)"]
    assert ["", "with changes that were not committed"] not in card["mine, step 3"]


def test_of_a_journal_as_long_as_that_of_a_long_run_the_end_is_read(tmp_path: Path) -> None:
    chief = Lines(tmp_path)
    chief.event("dataset", **facts("train", "first"))
    for step in range(1, 9000):
        chief.metrics(step, {"train/loss": 1.0 / step, "train/" + "long" * 40: 1.0})
    assert (tmp_path / "events.chief-0.jsonl").stat().st_size > 2_000_000
    found = recorded_of(str(tmp_path / "model.ckpt-8999"))
    assert ("train/loss", 1.0 / 8999, 8999) in found.metrics and [one["digest"] for one in found.datasets] == ["first"]
    assert recorded_of(str(tmp_path / "model.ckpt-1")).metrics == []


def test_what_is_in_a_name_does_not_break_a_table(tmp_path: Path) -> None:
    from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef, TensorInfo

    signature = SignatureDef()
    signature.inputs["a|b\nc"].CopyFrom(TensorInfo(name="x:0", dtype=tf.float32.as_datatype_enum))
    signature.inputs["a|b\nc"].tensor_shape.unknown_rank = True
    sparse = signature.inputs["sparse"]
    sparse.dtype = tf.int64.as_datatype_enum
    sparse.coo_sparse.values_tensor_name = "v:0"
    signature.outputs["y"].CopyFrom(TensorInfo(name="y:0", dtype=tf.string.as_datatype_enum))
    text = card_of(None, {"serving_default": signature}, ["serve"])
    (row,) = (line for line in text.splitlines() if "float32" in line)
    assert row == "| input | `a\\|b c` | float32 | any |"
    assert tables(text)["Signature `serving_default`"][1:] == [
        ["input", "sparse", "int64 sparse", "[]"], ["output", "y", "string", "[]"],
    ]  # fmt: skip
