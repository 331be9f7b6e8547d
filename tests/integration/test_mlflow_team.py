"""docs/how_to/mlflow_team.md on this machine: its server, users and runs, while server and database come and go."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.tracking.run_record import Shipped
from tests.docs.test_tutorials import blocks
from tests.support.hold import HELD
from tests.support.processes import processes_in, wait_until
from tests.support.team import MISSING, Team

pytestmark = [pytest.mark.world, pytest.mark.timeout(1800), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

COMMANDS = [line for language, _, text in blocks("../how_to/mlflow_team") if not language for line in text.splitlines()]
DOCTOR, TRAIN, SWEEP, EVALUATE, EXPORT = (shlex.split(line)[3:] for line in COMMANDS)
SMALL = ["model.params.network=mlp", "checkpoint.save_steps=50", "train.log_steps=10"]
STEPS = 200
SECS = 500.0  # a machine may be busy


@pytest.fixture(scope="module", params=["proxied", "direct"])
def team(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """The servers, and a folder for ana's work."""
    with Team(request.param == "direct") as team:
        team.work = tmp_path_factory.mktemp(request.param)
        yield team
        (team.work / "hold").unlink(missing_ok=True)
        for process in processes_in(team.work):  # of a test that failed
            process.kill()


class Command:
    """A command of ana's, or of another user's, that runs."""

    def __init__(self, team: Team, words: list[str], **env: str) -> None:
        self._said = open(team.work / f"said-{len(list(team.work.glob('said-*')))}.txt", "w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=team.work, env={**team.env, **env}, text=True, stdout=self._said,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end(self) -> tuple[int, str]:
        """Wait for the end. Return the exit code, and what it said."""
        code = self.process.wait(500)
        self._said.seek(0)
        return code, self._said.read()


def start(team: Team, words: list[str], *more: str, **env: str) -> Command:
    return Command(team, ["runner", *words, *SMALL, *more], **env)


def ship(team: Team, folder: str, **env: str) -> tuple[int, str]:
    return Command(team, ["runner.tracking.ship", folder], **env).end()


def has_step(folder: Path, step: int) -> bool:
    return Shipped.read(folder, "mlflow").last_steps.get("train/loss", 0) >= step


FACTS = """
import json
from mlflow import MlflowClient
client, runs = MlflowClient(), {}
for run in client.search_runs([client.get_experiment_by_name("digits").experiment_id]):
    assert run.info.run_name not in runs, "a run stands twice"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    runs[run.info.run_name] = {
        "id": run.info.run_id, "status": run.info.status, "parent": run.data.tags.get("mlflow.parentRunId"),
        "steps": [one.step for one in history], "uri": run.info.artifact_uri,
        "evaluations": len(client.get_metric_history(run.info.run_id, "eval/loss")),
        "files": [one.path for one in client.list_artifacts(run.info.run_id)],
        "inputs": len(run.inputs.dataset_inputs),
    }
found = client.search_model_versions("name='digits'")
champion = client.get_model_version_by_alias("digits", "champion").version if found else None
versions = sorted([one.version, one.run_id, one.tags["step"], one.version == champion] for one in found)
print(json.dumps([runs, versions]))
"""


def recorded(team: Team) -> tuple[dict[str, Any], list[Any]]:
    """Return the runs of the experiment, by name, and the versions of the registered model."""
    runs, versions = json.loads(team.python(FACTS))
    return runs, versions


def test_runs_are_recorded_once_and_completely_while_server_and_database_come_and_go(team: Team) -> None:
    mine, rates = team.work / "outputs" / "mine", team.work / "outputs" / "rates"
    hold, held = team.work / "hold", [f"train.max_steps={STEPS}", HELD]

    code, said = start(team, DOCTOR).end()
    assert code == 0 and "reachable" in said, said

    # The database is away in the middle of training, then the server, which comes back before the end.
    hold.write_text("50")
    training = start(team, TRAIN, *held)
    wait_until(lambda: has_step(mine, 50), SECS)
    team.database.stop()
    hold.write_text("100")
    wait_until(lambda: "HTTP 503" in (Shipped.read(mine, "mlflow").problem or ""), SECS)
    team.server.stop()
    hold.write_text("150")
    wait_until(lambda: "cannot be reached" in (Shipped.read(mine, "mlflow").problem or ""), SECS)
    team.database.start()
    team.server.start()
    hold.unlink()
    code, said = training.end()
    assert code == 0 and "ship later" not in said, said

    # The database goes away during a sweep and comes back after its end.
    hold.write_text("50")
    sweep = start(team, SWEEP, *held)
    wait_until(lambda: any(has_step(one, 50) for one in rates.glob("*/")), SECS)
    team.database.stop()
    hold.unlink()
    code, said = sweep.end()
    assert code == 0 and "ship later" in said, said
    team.database.start()
    assert ship(team, "outputs/rates")[0] == 0

    # The server is away during an evaluation and an export, which an evaluation makes good for.
    team.server.stop()
    assert start(team, EVALUATE).end()[0] == 0
    assert start(team, EXPORT).end()[0] == 0
    team.server.start()
    code, said = start(team, EVALUATE).end()
    assert code == 0 and "ship later" not in said, said

    runs, versions = recorded(team)
    assert set(runs) == {"mine", "sweep rates", "learning_rate=0.1", "learning_rate=0.01"}
    assert {run["status"] for run in runs.values()} == {"FINISHED"}
    logged = [1, *range(10, STEPS + 1, 10)]
    for name, run in runs.items():
        assert run["uri"].startswith("s3://team-mlflow/" if team.is_direct else "mlflow-artifacts:/")
        if name == "sweep rates":
            assert {"sweep.json", "parallel_coordinates.png"} <= set(run["files"])
            continue
        assert sorted(run["steps"]) == logged, name
        assert {"config.yaml", "summary.json", "learning_curves.png"} <= set(run["files"])
        assert run["parent"] == (None if name == "mine" else runs["sweep rates"]["id"])
        assert run["inputs"] == 2
    assert runs["mine"]["evaluations"] == runs["learning_rate=0.1"]["evaluations"] + 2
    mine_at_the_end = [runs["mine"]["id"], str(STEPS)]
    # The later export takes the settings of the run, and with them its alias.
    assert versions == [["1", *mine_at_the_end, False], ["2", *mine_at_the_end, True]]


LOADED = """
import mlflow, numpy
model = mlflow.pyfunc.load_model("models:/digits@champion")
(one,) = model.metadata.get_input_schema().inputs
answer = model.predict({one.name: numpy.zeros([2, *one.shape[1:]], one.type)})
assert all(len(value) == 2 for value in answer.values()) and answer
"""


def test_a_registered_model_is_loaded_from_the_server_and_answers(team: Team) -> None:
    argv = [sys.executable, "-c", LOADED]
    done = subprocess.run(argv, cwd=team.work, env=team.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REFUSED = {
    "a wrong password": ("ana", "nobody", "digits", r"HTTP 401.*MLFLOW_TRACKING_PASSWORD"),
    "a read-only user": ("guest", "guest", "digits", r"HTTP 403.*may only read"),
    "a deleted experiment": ("ana", "ana", "deleted", r"'deleted' is deleted in .*experiments restore"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_said_with_its_reason_in_one_line_and_training_finishes(name: str, team: Team) -> None:
    user, password_of, experiment, reason = REFUSED[name]
    env = {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": team.passwords[password_of]}
    if experiment == "deleted":
        make = "client = MlflowClient(); client.delete_experiment(client.create_experiment('deleted'))"
        team.python(f"from mlflow import MlflowClient; {make}")
    folder = "outputs/" + name.replace(" ", "-")
    words = [f"model_dir={folder}", f"tracking.experiment={experiment}"]
    code, said = start(team, words, "train.max_steps=5", **env).end()
    assert code == 0 and json.loads((team.work / folder / "summary.json").read_text())["status"] == "finished", said
    lines = [line for line in said.splitlines() if line.startswith("tracking: ")]
    assert lines and all(re.search(reason, line) for line in lines), said
    assert "no answer" not in said and "cannot be reached" not in said
    assert "ship later" in lines[-1]
    if experiment == "digits":
        assert ship(team, folder)[0] == 0, "once it is mended"
        assert recorded(team)[0][Path(folder).name]["status"] == "FINISHED"


def test_without_boto3_one_line_says_to_install_it(team: Team) -> None:
    if not team.is_direct:
        pytest.skip("files go by the server, which has it")
    words = ["model_dir=outputs/without", "tracking.experiment=digits"]
    code, said = start(team, words, "train.max_steps=5", PYTHONPATH=team.bare).end()
    assert code == 0 and re.search(r"^tracking: .*pip install boto3.*ship later", said, re.MULTILINE), said
    assert ship(team, "outputs/without")[0] == 0
    assert "config.yaml" in recorded(team)[0]["without"]["files"]


def test_no_password_is_in_a_file_of_a_run_on_the_screen_or_on_the_servers(team: Team) -> None:
    texts = {str(path): path.read_bytes() for path in team.work.rglob("*") if path.is_file()}
    assert any("said-" in name for name in texts) and any(name.endswith(".tracking.json") for name in texts)
    texts["the servers"] = team.everything().encode()
    for name, text in texts.items():
        found = [user for user, password in team.passwords.items() if password.encode() in text]
        assert not found, f"{name} has the password of {found}"
