"""Libraries that were built on tf.estimator, as PyPI has them: their pipelines come to the numbers of TensorFlow 2.15.

`make test-world` installs them into build/clients; without that these tests are skipped. Where `.venv-2.15` is missing,
too, (`make golden`), the pipelines run, and nothing is compared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden import clients
from tests.integration.test_golden import PYTHON, ROOT, assert_same

LIBRARIES = ROOT / "build" / "clients"
pytestmark = [
    pytest.mark.world,
    pytest.mark.timeout(3600),  # the first waits for all the pipelines in both TensorFlows
    pytest.mark.skipif(not (LIBRARIES / ".installed").exists(), reason="no libraries in build/clients"),
]


def run(python: Path | str, folder: Path, names: Sequence[str]) -> None:
    """Run pipelines in a process of `python`, each in a folder of its own in `folder`."""
    paths = f"{ROOT}{os.pathsep}{LIBRARIES}"
    subprocess.run(
        [python, "-m", "tests.golden.clients", folder, *names],
        cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What TensorFlow 2.15 left, and the runner: from the same data and initial values."""
    theirs, ours = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours"))
    asked = {name for name in clients.CASES for item in request.session.items if f"[{name}]" in item.nodeid}
    asked |= {"gan_wasserstein"} if "latent_gan" in asked else set()
    names = [name for name in clients.CASES if name in asked]
    if PYTHON.exists():
        run(PYTHON, theirs, [name for name in names if name not in clients.OF_PANDAS])
    for folder in (one for one in theirs.iterdir() if (one / "model.ckpt-0.index").exists()):
        (ours / folder.name).mkdir()
        for file in folder.glob("model.ckpt-0.*"):
            shutil.copy(file, ours / folder.name)
        (ours / folder.name / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')
    run(sys.executable, ours, names)
    return theirs, ours


def found(folder: Path, name: str) -> dict[str, Any]:
    error = folder / f"{name}.error"
    assert not error.exists(), error.read_text()
    numbers: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return numbers


@pytest.mark.parametrize("name", clients.CASES)
def test_a_pipeline_trains_evaluates_predicts_and_exports(name: str, folders: tuple[Path, Path]) -> None:
    ours = found(folders[1], name)
    assert len(ours["/losses"]) == clients.STEPS and all(np.isfinite(one).all() for one in ours.values())
    if not PYTHON.exists() or name in clients.OF_PANDAS:
        return
    theirs = found(folders[0], name)
    assert ours.keys() == theirs.keys()
    # TensorFlow Ranking draws the order of documents with equal scores: `ndcg` and `ndcg_10` of lists of five differ.
    same = [key for key in ours if re.search(clients.DRAW.get(name, ""), key) and "ndcg" not in key]
    tolerance = 1e-3  # a mean of logits is near 0
    assert_same({key: ours[key] for key in same}, {key: theirs[key] for key in same}, tolerance)


@pytest.fixture(scope="module")
def on_replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runner left on two replicas and on one device."""
    folder = tmp_path_factory.mktemp("replicas")
    run(sys.executable, folder, [f"{name}_on_{devices}" for name in clients.ON_REPLICAS for devices in ("two", "one")])
    return folder


@pytest.mark.parametrize("name", clients.ON_REPLICAS)
def test_two_replicas_come_to_the_numbers_of_one_device(name: str, on_replicas: Path) -> None:
    two, one = (found(on_replicas, f"{name}_on_{devices}") for devices in ("two", "one"))
    # A hook sees the loss of the first replica.
    same = [key for key in one if key != "/losses"]
    assert len(same) > 5
    assert_same({key: two[key] for key in same}, {key: one[key] for key in same}, 1e-3)
