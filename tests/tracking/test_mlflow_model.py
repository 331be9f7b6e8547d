"""An exported model in MLflow: with a signature, and loaded by somebody who has MLflow and TensorFlow only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

from runner.config.mistakes import ConfigError
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.tracker import ExportedModel, Tracker, exported_models
from tests.support.export_models import NUMBERS, WORDS, loaded_by, predicted, raw_receiver, trained_words, words_once
from tests.support.journal import events_in, journal_of

LOADING = """
import json, sys, mlflow, numpy as np, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
words, numbers = json.loads(sys.argv[3])
inputs = {"w": np.array(words, object), "n": np.array(numbers, "float32")}
answers = [model.predict(inputs), model.predict(pd.DataFrame(inputs))]
assert "runner" not in sys.modules
print(json.dumps([answer["y"].tolist() for answer in answers]))
"""


def same_card_but_for_the_path(one: Path, other: Path) -> bool:
    return re.sub(r'load\("[^"]+"', "", one.read_text()) == re.sub(r'load\("[^"]+"', "", other.read_text())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("mlflow_database")
def test_an_exported_model_is_one_of_mlflow_with_a_signature_and_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = trained_words(tmp_path, journal=journal_of(tmp_path / "events.jsonl"))
    words.export_saved_model(tmp_path / "export" / "best", raw_receiver())
    words.export_saved_model(tmp_path / "export" / "best", raw_receiver())
    lines = events_in(tmp_path / "events.jsonl", "exported")
    (model,) = exported_models(lines)  # the newest of its folder
    assert model.name == "best" and model.path == Path(lines[1]["path"])
    tracker = MlflowTracker(f"sqlite:///{tmp_path}/mlflow.db", "models")
    run_id = tracker.start(None, "run", {}, {})
    tracker.log_model(model)
    tracker.end("FINISHED", time.time())

    client = MlflowClient(tracking_uri=tracker.uri)
    (output,) = client.get_run(run_id).outputs.model_outputs
    logged = client.get_logged_model(output.model_id)
    assert output.step == words.get_variable_value("global_step") > 0
    assert (logged.name, logged.source_run_id, str(logged.status)) == ("best", run_id, "READY")
    uri = f"models:/{output.model_id}"
    (example,) = (tmp_path / "mlartifacts").rglob("serving_input_example.json")
    assert json.loads(example.read_text()) == {"inputs": {"n": [0.0], "w": [""]}}
    (folder,) = {path.parent for path in (tmp_path / "mlartifacts").rglob("MLmodel")}
    assert same_card_but_for_the_path(folder / "README.md", model.path / "README.md")
    assert logged.tags["mlflow.note.content"] == (folder / "README.md").read_text(), "what its page shows"
    monkeypatch.chdir(folder)
    assert loaded_by(folder / "README.md").structured_outputs.keys() == {"y"}
    result = subprocess.run(
        [sys.executable, "-I", "-c", LOADING, tracker.uri, uri, json.dumps([WORDS, NUMBERS])],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for answer in json.loads(result.stdout.splitlines()[-1]):
        np.testing.assert_array_equal(np.array(answer, "float32"), predicted(words, words_once))


@pytest.mark.usefixtures("mlflow_database")
@pytest.mark.parametrize("fails", ["log_model_artifacts", "log_outputs", "create_model_version"])
def test_a_model_that_is_sent_once_more_because_nobody_answered_stands_there_once(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "saved_model.pb").write_bytes(b"a model")
    tensors = {"x": ("float32", [-1])}
    model = ExportedModel("best", tmp_path / "export", tensors, tensors, 7, "digits", "champion")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another.db")  # a setting of the run is before it

    def tracker(run_id: str | None) -> MlflowTracker:
        tracker = MlflowTracker(f"sqlite:///{tmp_path}/mlflow.db", "models")
        tracker.start(run_id, "run", {}, {})
        return tracker

    def away(*arguments: Any, **settings: Any) -> None:
        raise MlflowException("away", error_code=TEMPORARILY_UNAVAILABLE)

    first = tracker(None)
    run_id = first._run_id
    with monkeypatch.context() as patch, pytest.raises(MlflowException) as raised:
        patch.setattr(MlflowClient, fails, away)
        first.log_model(model)
    assert not first.is_refusal(raised.value)
    tracker(run_id).log_model(model)
    shutil.rmtree(model.path)  # what the run has whole is not read again
    tracker(run_id).log_model(model)

    client = MlflowClient(tracking_uri=first.uri)
    (output,) = client.get_run(str(run_id)).outputs.model_outputs
    (logged,) = client.search_logged_models([client.get_run(str(run_id)).info.experiment_id])
    assert (logged.model_id, str(logged.status), output.step) == (output.model_id, "READY", 7)
    (version,) = client.search_model_versions("name='digits'")
    assert version.source == f"models:/{logged.model_id}"
    assert client.get_model_version_by_alias("digits", "champion").version == version.version
    (copy,) = (tmp_path / "mlartifacts").rglob("saved_model.pb")
    assert copy.read_bytes() == b"a model"


def test_what_a_store_that_is_away_full_or_closed_says_is_no_refusal(
    tmp_path: Path, mlflow_database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moto")
    from tests.support.object_store import CREDENTIALS, served

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    MlflowClient(tracking_uri=uri).create_experiment("in the bucket", artifact_location="s3://bucket/files")
    tracker = MlflowTracker(uri, "in the bucket")
    (tmp_path / "file.txt").touch()
    with served() as server:
        for name, value in {**CREDENTIALS, "MLFLOW_S3_ENDPOINT_URL": server.address, "AWS_MAX_ATTEMPTS": "1"}.items():
            monkeypatch.setenv(name, value)
        run_id = tracker.start(None, "run", {}, {})
        for server.mode in ("away", "500", "full", "quota", "denied"):
            with pytest.raises(Exception) as raised:
                tracker.log_file(tmp_path / "file.txt")
            assert not tracker.is_refusal(raised.value), server.mode
        server.mode = "ok"
        tracker.log_file(tmp_path / "file.txt")
        assert [file.path for file in MlflowClient(tracking_uri=uri).list_artifacts(str(run_id))] == ["file.txt"]
    with pytest.raises(MlflowException) as refused:
        for value in "ab":  # MLflow refuses the change of a param
            MlflowClient(tracking_uri=uri).log_param(str(run_id), "name", value)
    assert tracker.is_refusal(refused.value)
    for mistake in (ValueError(), ConfigError("config.yaml is damaged"), PackageNotFoundError(), RuntimeError()):
        assert tracker.is_refusal(mistake), "of the code that prepares what is sent"
    for status, is_refusal in ((413, True), (404, True), (429, False), (503, False)):
        response = requests.Response()
        response.status_code = status
        assert tracker.is_refusal(requests.HTTPError(response=response)) == is_refusal


def test_what_is_gone_or_has_no_default_signature_is_left_out(tmp_path: Path) -> None:
    there, gone = tmp_path / "latest" / "2", tmp_path / "latest" / "1"
    there.mkdir(parents=True)
    tensors: dict[str, Any] = {"inputs": {"x": ["float32", [-1]]}, "outputs": {}}
    lines = [{"path": str(there), "tensors": tensors}, {"path": str(gone), "tensors": tensors}]
    assert exported_models(lines) == [ExportedModel("latest", there, {"x": ["float32", [-1]]}, {})]  # type: ignore[dict-item]
    assert exported_models([{"path": str(there), "tensors": {}}]) == []
    Tracker().log_model(exported_models(lines)[0])
