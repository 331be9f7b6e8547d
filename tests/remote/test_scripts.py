"""Scripts with a URL as model_dir: the folder is the store's, and what is deleted here continues from there."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

fsspec = pytest.importorskip("fsspec")

from runner import (  # noqa: E402
    Estimator,
    EvalSpec,
    LatestExporter,
    RunConfig,
    TensorServingInputReceiver,
    TrainSpec,
    train_and_evaluate,
)  # fmt: skip
from runner.checkpoint import reader  # noqa: E402
from runner.checkpoint_files import layout  # noqa: E402
from runner.classic.estimator import Estimator as ClassicEstimator  # noqa: E402
from runner.classic.run_config import RunConfig as ClassicRunConfig  # noqa: E402
from runner.config.mistakes import ConfigError  # noqa: E402
from runner.config.schema import RunSettings  # noqa: E402
from runner.remote.mirror import Mirror, mirror_of, remote_dir  # noqa: E402
from runner.remote.store import Lease, Store  # noqa: E402
from runner.run_config import WarmStart  # noqa: E402
from runner.system.files import StorageError  # noqa: E402
from tests.support.line import line, points  # noqa: E402

Make = Callable[[str], Any]
KINDS: dict[str, Make] = {
    "native": lambda url: Estimator(line, url, RunConfig(save_checkpoints_steps=2, tf_random_seed=1)),
    "classic": lambda url: ClassicEstimator(
        line, config=ClassicRunConfig(url, save_checkpoints_steps=2, tf_random_seed=1)
    ),
}


@pytest.fixture
def url(stores_in_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield f"memory://{uuid.uuid4().hex}/run"
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


def end(estimator: Any) -> None:
    """End the process of a script, as far as its mirror is concerned."""
    mirror = mirror_of(Path(estimator.model_dir))
    assert isinstance(mirror, Mirror) and mirror.close() == ""


def values(estimator: Any) -> dict[str, bytes]:
    names = estimator.get_variable_names()
    return {name: np.asarray(estimator.get_variable_value(name)).tobytes() for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_folder_continues_from_the_bucket_to_the_same_bits(kind: str, url: str, tmp_path: Path) -> None:
    undisturbed = KINDS[kind](str(tmp_path / "local"))
    undisturbed.train(points(repeat=True), max_steps=10)
    for steps in (4, 7, 10):
        estimator = KINDS[kind](url)
        assert Path(estimator.model_dir).is_dir() and estimator.config.remote_dir == url
        assert layout.latest_checkpoint(estimator.model_dir) is None or steps > 4
        estimator.train(points(repeat=True), max_steps=steps)
        end(estimator)
        shutil.rmtree(estimator.model_dir)
    again = KINDS[kind](url)
    assert values(again) == values(undisturbed)
    assert again.evaluate(points()) == undisturbed.evaluate(points())
    end(again)


def test_a_bucket_that_cannot_be_reached_is_a_mistake_at_each_start(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    KINDS["native"](url)
    second = KINDS["native"](url)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "highest", _is_away)
        with pytest.raises(ConfigError, match=f"^model_dir={url} cannot be reached: the network$"):
            second.train(points(repeat=True), max_steps=2)  # nobody knows whether another run writes there
    second.train(points(repeat=True), max_steps=2)
    end(second)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "highest", _is_away)
        with pytest.raises(ConfigError, match=f"{url} cannot be reached"):
            KINDS["native"](url)
    assert layout.read_state(second.model_dir).latest == "model.ckpt-2"


def _is_away(store: Store) -> int:
    raise OSError("the network")


@pytest.mark.parametrize("end_of_url, step", [("", 4), ("/model.ckpt-2", 2)])
def test_a_warm_start_reads_a_run_at_a_url(end_of_url: str, step: int, url: str) -> None:
    old = KINDS["native"](url)
    old.train(points(repeat=True), max_steps=4)
    end(old)
    expected = reader.Reader(str(Path(old.model_dir, f"model.ckpt-{step}"))).get("weight")
    shutil.rmtree(old.model_dir)
    settings: dict[str, Any] = {"params": {"learning_rate": 0.0}}
    classic = ClassicEstimator(line, "classic", warm_start_from=url + end_of_url, **settings)
    native = Estimator(line, "native", RunConfig(warm_start=WarmStart(url + end_of_url)), **settings)
    for new in (classic, native):
        new.train(points(repeat=True), max_steps=1)
        assert new.get_variable_value("weight") == expected != 0


def test_a_warm_start_from_a_url_that_cannot_be_read_names_it(url: str) -> None:
    for wrong in ("hdfs://namenode/run", url):
        estimator = Estimator(line, "new", RunConfig(warm_start=WarmStart(wrong)))
        with pytest.raises(ValueError, match=f"train.warm_start.checkpoint={wrong}"):
            estimator.train(points(repeat=True), max_steps=1)


def test_train_and_evaluate_leaves_its_events_and_results_in_the_bucket(url: str) -> None:
    estimator = KINDS["native"](url)
    train_and_evaluate(estimator, TrainSpec(points(repeat=True), 4), EvalSpec(points()))
    end(estimator)
    there = set(Store(url).objects())
    assert {"checkpoint", "model.ckpt-4.index"} <= there
    assert any(name.startswith("eval/events.out.tfevents") for name in there)
    assert json.loads(Store(url).fs.cat_file("runner_files/model.ckpt-4.metrics.json"))


def test_a_run_whose_lease_was_taken_over_ends_at_its_next_checkpoint(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = KINDS["native"](url)
    estimator.train(points(repeat=True), max_steps=2)
    end(estimator)
    estimator = KINDS["native"](url)
    mirror_of(Path(estimator.model_dir)).begin(os.environ, RunSettings(lease_secs=1, upload_secs=1))
    taken: list[Lease] = []

    def take_over() -> Any:
        if not taken:
            monkeypatch.setattr("runner.remote.store._is_dead", lambda holder: True)
            taken.append(Lease.take(Store(url), "another", 60))
            end = time.monotonic() + 120
            while not mirror_of(Path(estimator.model_dir)).lost() and time.monotonic() < end:
                time.sleep(0.05)
        return points(repeat=True)()

    with pytest.raises(StorageError, match=url):
        estimator.train(take_over, max_steps=20)
    assert layout.read_state(estimator.model_dir).latest == "model.ckpt-2"
    assert Store(url).lease(taken[0].number)["folder"] == "another"


@pytest.mark.parametrize("kind", KINDS)
def test_exports_are_in_their_own_bucket_and_go_on_being_numbered_and_counted_from_there(
    kind: str, url: str, tmp_path: Path
) -> None:
    exports = f"{url}-exports"
    names: list[str] = []
    for steps in (2, 4, 6):
        config = KINDS[kind](str(tmp_path / "run")).config.replace(export_dir=exports)
        estimator = (Estimator if kind == "native" else ClassicEstimator)(line, config=config)
        evaluations = EvalSpec(points(), exporters=[LatestExporter("latest", serving, exports_to_keep=2)])
        train_and_evaluate(estimator, TrainSpec(points(repeat=True), steps), evaluations)
        written = Path(os.fsdecode(estimator.export_saved_model(f"{exports}/asked", serving)))
        folder = str(estimator.config.export_dir)
        assert written.is_relative_to(folder) and remote_dir(written) == f"{exports}/asked/{written.name}"
        names.append(written.name)
        assert mirror_of(written).close() == ""
        shutil.rmtree(folder)
    there = {tuple(name.split("/")[:2]) for name in Store(exports).objects()}
    assert sorted(name for kind_of, name in there if kind_of == "asked") == sorted(set(names)) and len(names) == 3
    assert len([name for kind_of, name in there if kind_of == "latest"]) == 2
    assert len([name for name in Store(exports).objects() if name.endswith("saved_model.pb")]) == 5
    assert not (tmp_path / "run" / "export").exists()


def serving() -> TensorServingInputReceiver:
    placeholder = tf.compat.v1.placeholder(tf.float32, [None])
    return TensorServingInputReceiver(placeholder, {"x": placeholder})
