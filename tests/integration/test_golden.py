"""The runner beside a real tf.estimator 2.15: the same model_fn from the same checkpoint comes to the same numbers.

The models are in tests/golden/, each a file that both run as it stands; tests/golden/constructs.py says which construct
is in which. One process of TensorFlow 2.15 trains all of them while this one compares, a second one takes up what the
runner left. It needs `.venv-2.15`, which `make golden` builds; without it these tests are skipped, or fail when
RUNNER_REQUIRE_GOLDEN=1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import runner.classic  # noqa: F401  (tf.estimator, tf.layers)
from runner.checkpoint.reader import Reader
from tests.golden import contract, keras_optimizers, runs
from tests.golden.constructs import CONSTRUCTS, FAMILIES
from tests.support.line import read_events
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("RUNNER_GOLDEN_PYTHON", ROOT / ".venv-2.15" / "bin" / "python"))
TIMEOUT_SECS = 400.0
MODELS = slow_but(runs.MODELS, *runs.FIRST)


class Golden:
    """A process at work, and what it has left so far.

    Args:
      verb: of `python -m tests.golden.runs`.
      names: of models, if not all.
      python: that of TensorFlow 2.15, if no other.
    """

    def __init__(
        self, verb: str, folder: Path, python: str | Path = PYTHON, names: Sequence[str] = (), **env: str
    ) -> None:
        self.folder = folder
        self._log = folder / f"{verb}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "tests.golden.runs", verb, folder, *names],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def found(self, name: str) -> dict[str, Any]:
        """Losses and metrics of a model, as soon as they are there."""
        path, deadline = self.folder / f"{name}.json", time.monotonic() + TIMEOUT_SECS
        while not path.exists():
            assert self._process.poll() in (None, 0) and time.monotonic() < deadline, self._log.read_text()[-5000:]
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def require_golden() -> None:
    """Skip the test without TensorFlow 2.15; fail where it is required."""
    if PYTHON.exists():
        return
    message = f"no TensorFlow 2.15 at {PYTHON}: make golden"
    if os.environ.get("RUNNER_REQUIRE_GOLDEN") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    require_golden()
    golden = Golden("write", tmp_path_factory.mktemp("golden"), names=sorted(trained_by(request.session.items)))
    yield golden
    golden.end()


def trained_by(items: Sequence[pytest.Item]) -> set[str]:
    """Return the names of the golden models that the tests of this file among `items` ask for."""
    found = {"layers"}  # of those that have no parameter
    for item in items:
        if item.path == Path(__file__) and "golden" in getattr(item, "fixturenames", ()):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            found.add(runs.OF_KERAS if "tf_keras" in item.name else params.get("name", "layers"))
    return found | {"scopes"} if "beginnings" in found else found  # which begins with a checkpoint of it


class Ours:
    """What the runner makes of the golden models, each trained once: from tf.estimator's first checkpoint."""

    def __init__(self, golden: Golden, folder: Path) -> None:
        self._golden, self.folder = golden, folder
        self._losses: dict[str, list[float]] = {}
        runs.write_vocabulary(folder)

    def losses(self, name: str) -> list[float]:
        """Of twenty steps."""
        if name not in self._losses:
            self._golden.found(name)
            if name == "beginnings":  # it says itself what it begins with
                _copy(self._golden.folder / runs.START, self.folder / runs.START, step=20)
            else:
                _copy(self._golden.folder / name, self.folder / name, step=0)
            self._losses[name] = runs.trained(name, self.folder, runs.STEPS)
        return self._losses[name]


def _copy(source: Path, target: Path, step: int) -> None:
    """The checkpoint of a step, as the latest one of a model_dir."""
    target.mkdir(exist_ok=True)
    for file in source.glob(f"model.ckpt-{step}.*"):
        shutil.copy(file, target)
    (target / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')


@pytest.fixture(scope="module")
def ours(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Ours:
    return Ours(golden, tmp_path_factory.mktemp("ours"))


def values(path: Path) -> dict[str, np.ndarray]:
    """Variable name -> value of a checkpoint, whoever wrote it."""
    reader = Reader(path)
    return reader.get_many(sorted(reader.names()))


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """The same names, and values that differ by no more than `tolerance` of the largest of each."""
    assert sorted(found) == sorted(expected)
    differences = {}
    for name, value in found.items():
        scale = max(float(np.max(np.abs(expected[name]), initial=0.0)), 1e-6)
        differences[name] = float(np.max(np.abs(np.subtract(value, expected[name])), initial=0.0)) / scale
    assert not {name: one for name, one in differences.items() if not one <= tolerance}


@pytest.mark.parametrize("name", MODELS)
def test_twenty_losses_are_those_of_tf_estimator(name: str, golden: Golden, ours: Ours) -> None:
    losses = ours.losses(name)
    np.testing.assert_allclose(losses, golden.found(name)["losses"], rtol=1e-5)
    assert len(losses) == 20 and losses[0] != losses[-1]


@pytest.mark.parametrize("name", MODELS)
def test_variables_slots_and_averages_are_those_of_tf_estimator(name: str, golden: Golden, ours: Ours) -> None:
    ours.losses(name)
    expected = values(golden.folder / name / "model.ckpt-20")
    assert_same(values(ours.folder / name / "model.ckpt-20"), expected, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_metrics_of_its_checkpoint_are_those_of_tf_estimator(name: str, golden: Golden, ours: Ours) -> None:
    ours.losses(name)
    metrics = runs.evaluated(name, ours.folder, str(golden.folder / name / "model.ckpt-20"))
    assert_same(metrics, golden.found(name)["metrics"], 1e-6)


@pytest.mark.parametrize("name", ["savers"])
def test_predictions_and_export_of_its_checkpoint_are_those_of_tf_estimator(
    name: str, golden: Golden, ours: Ours
) -> None:
    expected = golden.found(name)["served"]
    assert_same(runs.served(name, ours.folder, str(golden.folder / name / "model.ckpt-20")), expected, 1e-5)


@pytest.mark.parametrize("name", slow_but(["layers", "schedules", "scopes"], "layers", "schedules"))
def test_summaries_and_their_steps_are_those_of_tf_estimator(name: str, golden: Golden, ours: Ours) -> None:
    """Every fifth step, from the first one on: 1, 6, 11, 16."""
    ours.losses(name)
    found, expected = (
        {(event.tag, event.step): event.value for event in read_events(root / name)}
        for root in (ours.folder, golden.folder)
    )
    # A measurement, an image and a histogram, which TensorFlow 2 writes in its own way.
    others = ("global_step/sec", "first/image", "logits_seen")
    points = [point for point, value in expected.items() if isinstance(value, float) and point[0] not in others]
    assert {step for _, step in points} == {1, 6, 11, 16} and len(points) > 8
    np.testing.assert_allclose([found[point] for point in points], [expected[point] for point in points], rtol=1e-5)
    assert {step for tag, step in found if tag == "loss"} == {1, 6, 11, 16}


@pytest.mark.slow
def test_models_of_tf_keras_come_to_the_same_where_tf_keras_is_keras_2(golden: Golden, tmp_path: Path) -> None:
    """As in a task of the runner: TF_USE_LEGACY_KERAS=1 before TensorFlow is imported."""
    name = runs.OF_KERAS
    expected = golden.found(name)
    runs.write_vocabulary(tmp_path)
    _copy(golden.folder / name, tmp_path / name, step=0)
    here = Golden("here", tmp_path, sys.executable, TF_USE_LEGACY_KERAS="1")
    try:
        found = here.found(name)
    finally:
        here.end()
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    assert_same(found["metrics"], expected["metrics"], 1e-5)
    variables = values(tmp_path / name / "model.ckpt-20")
    assert_same(variables, values(golden.folder / name / "model.ckpt-20"), 1e-5)
    for layer in ("batch_normalization", "sequential/batch_normalization_1"):
        assert np.all(variables[f"{layer}/moving_mean"]), "get_updates_for was not heeded"


# --- checkpoints both ways ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", slow_but(["layers", "partitions", "scopes", "keras_model", "objects"], "layers", "keras_model")
)
def test_goes_on_from_a_model_dir_of_tf_estimator(name: str, golden: Golden, tmp_path: Path) -> None:
    """As it lies there after ten of twenty steps, with graph.pbtxt, .meta files and events."""
    expected = golden.found(name)["losses"]
    shutil.copytree(golden.folder / name, tmp_path / name)
    _copy(golden.folder / name, tmp_path / name, step=10)
    np.testing.assert_allclose(runs.trained(name, tmp_path, runs.STEPS), expected[10:], rtol=1e-5)
    assert_same(values(tmp_path / name / "model.ckpt-20"), values(golden.folder / name / "model.ckpt-20"), 1e-5)


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, ours: Ours, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """A process of tf.estimator that goes on from our checkpoints."""
    items: list[Any] = request.session.items
    asking = test_tf_estimator_goes_on_from_our_checkpoints.__name__
    chosen = {item.callspec.params["name"] for item in items if getattr(item, "originalname", "") == asking}
    names = [name for name in runs.READ_BACK if name in chosen]
    for name in names:
        ours.losses(name)
    folder = tmp_path_factory.mktemp("theirs") / "both"
    shutil.copytree(ours.folder, folder)
    theirs = Golden("read", folder, names=names)
    yield theirs
    theirs.end()


@pytest.mark.parametrize("name", slow_but(runs.READ_BACK, "layers"))
def test_tf_estimator_goes_on_from_our_checkpoints(name: str, ours: Ours, theirs: Golden) -> None:
    """It reads ours as its own: the same metrics, and the same losses of five further steps."""
    metrics = runs.evaluated(name, ours.folder)
    losses = runs.trained(name, ours.folder, runs.STEPS + runs.MORE_STEPS)
    found = theirs.found(name)
    assert_same(metrics, found["metrics"], 1e-6)
    np.testing.assert_allclose(losses, found["losses"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", keras_optimizers.MAKERS)
def test_goes_on_from_model_dirs_of_keras_models_whatever_their_optimizer(
    name: str, golden: Golden, tmp_path: Path
) -> None:
    """After five of ten steps, with slots and settings of optimizers that only such models were trained with."""
    expected = golden.found(name)["losses"]
    shutil.copytree(golden.folder / name, tmp_path / name)
    _copy(golden.folder / name, tmp_path / name, step=5)
    np.testing.assert_allclose(runs.trained_by(name, tmp_path, 10), expected[5:], rtol=1e-5)
    assert_same(values(tmp_path / name / "model.ckpt-10"), values(golden.folder / name / "model.ckpt-10"), 1e-5)


@pytest.mark.slow
def test_starts_with_the_initial_values_of_tf_estimator_as_the_guide_says(golden: Golden, tmp_path: Path) -> None:
    """The same seed alone gives others: docs/how_to/migrating.md says how to take theirs."""
    name, guide = "layers", (ROOT / "docs" / "how_to" / "migrating.md").read_text()
    (command,) = re.findall(r"^mkdir -p ours.*$", guide, re.MULTILINE)
    expected = golden.found(name)["losses"]
    (tmp_path / "theirs").symlink_to(golden.folder / name)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    (tmp_path / "ours").rename(tmp_path / name)
    np.testing.assert_allclose(runs.trained(name, tmp_path, 2), expected[:2], rtol=1e-5)
    (fresh,) = runs.trained(name, tmp_path / "fresh", 1)
    assert abs(fresh / expected[0] - 1) > 1e-3


# --- the table ------------------------------------------------------------------------------------------------------


def source(name: str) -> str:
    return (ROOT / "tests" / "golden" / f"{name}.py").read_text()


def test_each_construct_is_in_the_model_that_the_table_names() -> None:
    assert set(CONSTRUCTS) == {*runs.MODELS, runs.OF_KERAS}
    missing = {(name, text) for name, texts in CONSTRUCTS.items() for text in texts if text not in source(name)}
    assert not missing


@pytest.mark.parametrize(("family", "pattern", "name", "before"), FAMILIES)
def test_every_member_of_a_family_is_in_its_model(family: str, pattern: str, name: str, before: str) -> None:
    module = tf.compat.v1
    for part in family.split(".")[1:]:
        module = getattr(module, part)
    public = [one for one in dir(module) if re.fullmatch(pattern, one) and not one.startswith("_")]
    members = [one for one in public if callable(getattr(module, one))]
    assert len(members) > 4
    assert not [one for one in members if f"{before}{one}(" not in source(name)]


@pytest.mark.slow
def test_calls_of_the_contract_come_to_what_is_written_there() -> None:
    """tests/classic/test_contract.py makes the same calls of the runner."""
    require_golden()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(PYTHON), "-m", "tests.golden.contract", *contract.TABLES]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True, timeout=TIMEOUT_SECS)
    assert json.loads(found.stdout) == {table: contract.expected(table) for table in contract.TABLES}
