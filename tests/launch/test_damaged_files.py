"""A small file of a run that is empty, cut, binary or a folder: it is named and left aside, and the run goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from runner.config import schema
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL

ROOT = Path(__file__).parents[2]
WORDS = (
    *SMALL, "tracking=csv", "train.early_stopping.metric=eval/loss", "train.early_stopping.patience_evals=9",
    "train.reduce_lr_on_plateau.metric=eval/loss", "checkpoint.keep_best.metric=eval/loss", "export.exporters=[best]",
    "model.fn=tests.support.line.native_line",
)  # fmt: skip
FILES = (
    "config.yaml", "checkpoint", ".tracking.json", "reduce_lr_on_plateau.json", "early_stopping.json",
    "shipped.csv.json", "runner_files/model.ckpt-4.metrics.json", "summary.json", "training_ended.json",
    "runner_files/exports.best.json",
)  # fmt: skip
"""Files that are damaged before the same start. run.json is not: the seed is in config.yaml and in run.json."""


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:10])


def binary(file: Path) -> None:
    file.write_bytes(bytes(range(128, 256)))


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> Path:
    model_dir = tmp_path_factory.mktemp("damaged") / "run"
    result = command_line(*WORDS, f"model_dir={model_dir}", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return model_dir


@pytest.fixture(scope="module")
def undamaged(
    trained: Path, tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine
) -> dict[str, np.ndarray]:
    """The variables of the run that goes on undisturbed."""
    model_dir = shutil.copytree(trained, tmp_path_factory.mktemp("undamaged") / "run")
    result = command_line(*WORDS, "train.max_steps=6", f"model_dir={model_dir}", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "is damaged" not in result.stderr
    return variables(model_dir)


def variables(model_dir: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(model_dir / "model.ckpt-6"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "runner" not in name}


DAMAGES = (emptied, cut, binary, folder)
CASES = {
    "of run.json": [("run.json", cut)],
    # Each file meets each damage.
    **{
        f"of the others, {first}": [(file, DAMAGES[(first + number) % 4]) for number, file in enumerate(FILES)]
        for first in range(4)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_damaged_files_are_named_and_left_aside(
    case: str, trained: Path, undamaged: dict[str, np.ndarray], tmp_path: Path, command_line: CommandLine
) -> None:
    damaged = CASES[case]
    model_dir = shutil.copytree(trained, tmp_path / "run")
    for file, damage in damaged:
        damage(model_dir / file)
    result = command_line(*WORDS, "train.max_steps=6", f"model_dir={model_dir}", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((model_dir / "summary.json").read_text())["global_step"] == 6
    seeds = [schema.read(folder / "config.yaml")["run"]["seed"] for folder in (trained, model_dir)]
    assert seeds[0] == seeds[1]
    for name, value in variables(model_dir).items():
        np.testing.assert_array_equal(value, undamaged[name], err_msg=name)
    for file, damage in damaged:
        # A start replaces or removes these before anything reads them.
        if file not in (".tracking.json", "training_ended.json") or damage is folder:
            assert f"{model_dir / file} is damaged (" in result.stderr, (file, result.stderr)
            assert list((model_dir / file).parent.glob(f"{Path(file).name}.*.damaged")), file
