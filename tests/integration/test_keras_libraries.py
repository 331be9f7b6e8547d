"""keras-hub, keras-rs and TensorFlow Recommenders, as a page shows them: the same numbers on every strategy.

`make test-world` installs them into build/clients; without that these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_tutorials import blocks, follow

ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "build" / "clients"
PAGE = "../how_to/pretrained_and_recommenders"
pytestmark = [
    pytest.mark.world,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (LIBRARIES / ".installed").exists(), reason="no libraries in build/clients"),
]
ENV = {
    **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{LIBRARIES}", "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    follow(PAGE, tmp_path, Path(sys.executable).parent, ENV)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("project")
    for _, title, text in blocks(PAGE):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(text)
    return folder


def metrics(project: Path, model: str, columns: str, *words: str) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "runner", "model=custom", f"model.fn=model_fns.{model}", "input=drawn",
        f"input.train.params.columns={columns}", "train.max_steps=20", "tracking=none", "run.output=json", *words,
    ]  # fmt: skip
    env = {**ENV, "TF_USE_LEGACY_KERAS": "1"}
    ran = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)["metrics"]
    return found


@pytest.mark.parametrize(("model", "columns"), [("lora", "text"), ("bag", "ids"), ("two_towers", "pairs")])
def test_a_library_trains_to_the_same_numbers_on_every_strategy(model: str, columns: str, project: Path) -> None:
    expected = metrics(project, model, columns)
    assert expected["eval/loss"] > 0
    for words in (["strategy=mirrored", "strategy.virtual_devices=2"], ["strategy=multi_worker"]):
        assert metrics(project, model, columns, *words) == pytest.approx(expected, rel=1e-5)


def test_a_model_with_a_train_step_of_a_library_is_refused_by_name(project: Path) -> None:
    """By the way that the message names, two_towers above goes."""
    (project / "model_fns" / "returned.py").write_text(
        "from model_fns.two_towers import TwoTowers\n\ndef model_fn(features, labels, mode):\n    return TwoTowers()\n"
    )
    with pytest.raises(AssertionError, match=r"TwoTowers.*Keras 2.*EstimatorSpec"):
        metrics(project, "returned", "pairs")


def test_a_task_of_keras_hub_with_a_preprocessor_is_refused_by_name(project: Path) -> None:
    code = (project / "model_fns" / "lora.py").read_text()
    (project / "model_fns" / "preprocessed.py").write_text(
        code.replace("preprocessor=None", "preprocessor=keras.layers.Identity()")
    )
    with pytest.raises(AssertionError, match="PipelineModel defines fit, evaluate, predict"):
        metrics(project, "preprocessed", "text")
