"""Exports from the command line: what is written where, and what is said of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner.config import parsing
from runner.config.schema import ConfigError
from runner.export.saved_model import exports_in
from tests.config.test_config import composed
from tests.support.jobs import SMALL, noted, run
from tests.support.messages import Messages

NAMED = (
    "model.fn=tests.support.jobs.named", "input.train.fn=tests.support.jobs.named_endless",
    "input.eval.fn=tests.support.jobs.named_once",
    "input.predict.fn=tests.support.jobs.once",  # which gives other features
)  # fmt: skip


def exported(folder: Path) -> list[str]:
    """What the journal says was exported, by the folder that it lies in."""
    paths = [line["path"] for line in noted(folder) if line.get("event") == "exported"]
    return [str(Path(path).parent.relative_to(folder)) for path in paths]


def signature(path: str) -> Any:
    return tf.saved_model.load(path).signatures["serving_default"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all exporters, evaluated at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    exporters = ("export.exporters=[final,latest,best]", "export.best.metric=eval/loss", "export.keep=1")
    assert run(folder, *NAMED, "checkpoint.save_steps=2", *exporters) == 0
    return folder


def test_exporters_of_the_config_write_into_folders_of_their_names(trained: Path) -> None:
    assert exported(trained) == [
        "run/export/latest",
        "run/export/best",
        *(f"run/export/{n}" for n in ("final", "latest", "best")),
    ]
    for name in ("final", "latest", "best"):
        (path,) = exports_in(str(trained / "run" / "export" / name))
        ((name, spec),) = signature(path).structured_input_signature[1].items()
        assert name == "x" and spec.shape.as_list() == [None]  # of input.eval what is used, any number of examples
    (line,) = [line for line in noted(trained) if line.get("event") == "exported" and "final" in line["path"]]
    assert line["tensors"]["inputs"] == {"x": ["float32", [-1]]} and line["checkpoint"].endswith("model.ckpt-4")


def test_a_finished_run_exports_nothing_again(trained: Path) -> None:
    before = len(exported(trained))
    options = ("export.exporters=[final,latest,best]", "export.best.metric=eval/loss", "export.keep=1")
    assert run(trained, *NAMED, "checkpoint.save_steps=2", *options) == 0
    assert len(exported(trained)) == before


def test_the_command_exports_a_checkpoint_for_requests_of_the_users_own(
    trained: Path, tmp_path: Path, capsys: Any, messages: Messages
) -> None:
    options = (
        "command=export",
        f"export.dir={tmp_path}",
        "export.receiver_fn=tests.support.jobs.serving_input_receiver_fn",
    )
    assert run(trained, *options) == 0
    assert run(trained, *options, "export.checkpoint=model.ckpt-2") == 0
    said = capsys.readouterr().err
    first, second = exports_in(str(tmp_path))
    (line,) = [line for line in said.splitlines() if first in line]
    messages.same("line", line, hide=Path(first).name)
    x = tf.constant(["1", "2"])
    assert set(signature(first)(x)) == set(signature(second)(x))
    noted_checkpoints = [Path(line["checkpoint"]).name for line in noted(trained) if line.get("event") == "exported"]
    assert noted_checkpoints[-2:] == ["model.ckpt-4", "model.ckpt-2"]


def test_training_that_nobody_evaluates_exports_its_end(tmp_path: Path) -> None:
    assert run(tmp_path, "command=train", "export.exporters=[final]") == 0
    assert exported(tmp_path) == ["run/export/final"]
    (path,) = exports_in(str(tmp_path / "run" / "export" / "final"))
    assert signature(path).structured_input_signature[1]["input"].dtype == tf.float32
    (tmp_path / "none").mkdir()
    assert run(tmp_path / "none", "input.eval=null", "export.exporters=[latest]") == 0
    assert exported(tmp_path / "none") == ["run/export/latest"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["export.exporters=[final,final]"],
        ["export.exporters=[]"],
        ["export.best.metric=eval/loss"],
        ["export.exporters=[best]", "export.best.metric=loss"],
        ["export.exporters=[best]", "export.best.metric=eval_x/loss"],
        ["export.exporters=[best]", "command=train"],
        ["export.checkpoint=a"],
        ["export.exporters=[last]"],
        ["export.keep=0"],
    ],
    ids=" ".join,
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsing.parse(composed([*SMALL, *overrides]))


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(trained: Path, messages: Messages) -> None:
    with messages.raised(ConfigError, hide=re.escape(str(trained))):
        run(trained, "command=export", "export.checkpoint=model.ckpt-3")
