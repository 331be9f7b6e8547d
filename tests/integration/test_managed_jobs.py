"""`python -m runner` as in a training job of Vertex AI and SageMaker: which folders it takes.

The commands are those of docs/how_to/managed_jobs.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.distribute import managed_jobs
from tests.support.command_line import CommandLine

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "managed_jobs.md").read_text()
TRAIN, INFO, HOSTS = (command.split() for command in re.findall(r"^python -m runner (.*)$", PAGE, re.MULTILINE))
SMALL = ("input.train.batch_size=32", "tracking=none", "run.progress=plain")
NOTEBOOK = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.slow
def test_a_sagemaker_job_keeps_its_run_and_its_model_where_the_service_takes_them(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, model = tmp_path / "checkpoints", tmp_path / "model"
    monkeypatch.setattr(managed_jobs, "CHECKPOINTS", str(checkpoints))
    notebook = {**NOTEBOOK, "SM_MODEL_DIR": str(model)}
    job = {**notebook, "TRAINING_JOB_NAME": "digits"}
    words = (*TRAIN, *SMALL)
    done = command_line(*words, cwd=tmp_path, **job)
    assert done.returncode == 0, done.stderr
    assert "model.ckpt-200.index" in names(checkpoints) and len(names(model / "final")) == 1
    assert not (tmp_path / "outputs").exists()
    short = (*words, "train.max_steps=1")
    done = command_line(*short, "model_dir=mine", "export.dir=ours", cwd=tmp_path, **job)  # the command line wins
    assert done.returncode == 0 and "model.ckpt-1.index" in names(tmp_path / "mine"), done.stderr
    assert names(tmp_path / "ours") == {"final"} and len(names(model / "final")) == 1
    done = command_line(*short, cwd=tmp_path, **notebook)
    assert done.returncode == 0 and len(names(model / "final")) == 1, done.stderr
    (run,) = (tmp_path / "outputs").iterdir()
    assert "model.ckpt-1.index" in names(run)


def test_a_sweep_takes_the_folder_of_a_job_and_in_a_notebook_its_own(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_jobs, "CHECKPOINTS", str(tmp_path / "checkpoints"))
    words = ("-m", "command=dry_run", "run.seed=1,2", *SMALL)
    for env, given, folder in (
        ({**NOTEBOOK, "TRAINING_JOB_NAME": "digits"}, [], "checkpoints"),
        ({**NOTEBOOK, "TRAINING_JOB_NAME": "digits"}, ["sweep.dir=mine"], "mine"),
        (NOTEBOOK, [], "outputs/sweeps"),
    ):
        listed = command_line(*words, *given, cwd=tmp_path, **env)
        assert listed.returncode == 0 and listed.stdout.count(f"(not started, {folder}/") == 2, listed.stdout


def test_several_hosts_of_sagemaker_need_a_folder_that_they_share(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_jobs, "CHECKPOINTS", str(tmp_path / "own"))
    job = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "digits"}
    info = command_line(*INFO, "run.output=json", cwd=tmp_path, **job)
    assert json.loads(info.stdout)["tf_config"]["task"] == {"type": "worker", "index": 0}
    assert command_line(*HOSTS, "command=cluster_info", cwd=tmp_path, **job).returncode == 0
    for words in ([], [f"model_dir={tmp_path}/own"], [f"model_dir={tmp_path}/own/mine"]):
        done = command_line("strategy=multi_worker", *words, *SMALL, cwd=tmp_path, **job)
        assert done.returncode == 2 and "model_dir" in done.stderr and "SM_CURRENT_HOST=algo-2" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.world)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from tests.support import emulators
    from tests.support.object_store import BUCKET, ROOT, served

    with served() if request.param == "s3" else emulators.started("fake-gcs-server", tmp_path) as server:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        server.use(monkeypatch, XDG_CACHE_HOME=str(tmp_path / "caches"))
        yield f"{request.param}://{BUCKET}/job"


@pytest.mark.slow
def test_a_job_of_vertex_has_its_checkpoints_and_its_model_in_their_buckets(
    bucket: str, command_line: CommandLine, tmp_path: Path
) -> None:
    from runner.remote.store import Store

    notebook = {"AIP_CHECKPOINT_DIR": f"{bucket}/checkpoints/", "AIP_MODEL_DIR": f"{bucket}/model/"}
    one = {"cluster": {"chief": ["localhost:1234"]}, "task": {"type": "chief", "index": 0}, "environment": "cloud"}
    job = {**notebook, "CLUSTER_SPEC": json.dumps(one), "TF_CONFIG": json.dumps(one), "CLOUD_ML_JOB_ID": "17"}
    # With the libraries of an emulator.
    done = command_line(*TRAIN, *SMALL, cwd=tmp_path, PYTHONPATH=os.environ["PYTHONPATH"], **job)
    assert done.returncode == 0 and f"{bucket}/checkpoints" in done.stdout, done.stderr
    assert "model.ckpt-200.index" in Store(f"{bucket}/checkpoints").objects()
    assert any(name.endswith("saved_model.pb") for name in Store(f"{bucket}/model").objects())
    assert not (tmp_path / "outputs").exists()
