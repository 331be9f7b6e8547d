"""Tracking servers that go away, freeze or never answer: no run waits for them, and all of it is recorded in the end.

The task of a run is a small script; the servers are MLflow's, and what they have is read back through MlflowClient.
`KILLS=20 SEED=7 make test-slow ARGS="-s -k killed_again_and_again"` kills as many processes of one run, as drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from mlflow import MlflowClient

from runner.distribute.local_cluster import free_ports
from runner.tracking.run_record import Shipped
from tests.support.browser import answers, mlflow_app
from tests.support.journal import metrics_of_steps, recorded
from tests.support.messages import Messages
from tests.support.processes import STARTED, processes_in, wait_until

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.processes, pytest.mark.slow]

APP = """
import sys
from runner.launch import app, task_group
from runner.launch.sweeps import multirun
from runner.launch.task_starter import TaskStarter
multirun.build_starter = lambda *args, **settings: TaskStarter(forks=False)
task_group.task_argv = lambda file: [sys.executable, "task.py", str(file)]
sys.exit(app.run_command_line())
"""
TASK = """
import os, sys, time
from pathlib import Path
from runner.system.child_process import end_with_parent
from tests.support.journal import Lines
end_with_parent(os.environ)
journal = Lines(Path(sys.argv[1]).parent)
journal.event("built", num_replicas=1)
for step in range(1, {steps} + 1):
    journal.metrics(step, {{"train/loss": 1.0 / step}})
    if step == 1:
        journal.event("first_step", step=1)
    time.sleep({secs})
while Path("hold").exists():  # the test has something to do before the end
    time.sleep(0.02)
journal.event("result", global_step={steps}, metrics={{"eval/loss": 0.5}}, checkpoint="c")
"""


class Server:
    """An MLflow server on loopback that can be killed, frozen and started again. Tests share it, not its experiments.

    Attributes:
      experiment: name of that of the test that runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_frozen = False
        self.experiment = ""

    @property
    def words(self) -> list[str]:
        """What a command needs to be recorded there."""
        return [f"tracking.uri={self.address}", f"tracking.experiment={self.experiment}"]

    def start(self) -> None:
        words, env = mlflow_app(self.folder, self.port)
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        STARTED.discard(self.process)  # a test that fails leaves it to the others
        wait_until(lambda: answers(f"{self.address}/health"))

    def be_well(self) -> None:
        """Answer, whatever an earlier test has done."""
        if self.process is None:
            self.start()
        elif self.is_frozen:
            self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        assert self.process is not None
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        self.is_frozen = number == signal.SIGSTOP
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None

    def runs(self) -> Mapping[str, Any]:
        """Name -> run."""
        client = MlflowClient(self.address)
        experiment = client.get_experiment_by_name(self.experiment)
        runs = client.search_runs([experiment.experiment_id])
        names = {run.info.run_name: run for run in runs}
        assert len(names) == len(runs), "a run stands twice"
        return names

    def points(self, name: str) -> list[int]:
        """The steps of the loss of a run, in the order in which MLflow has them."""
        history = MlflowClient(self.address).get_metric_history(self.runs()[name].info.run_id, "train/loss")
        return [metric.step for metric in history]


@pytest.fixture(scope="module")
def server_of_all(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_mlflow_database, folder / "mlflow.db")
    server = Server(folder)
    yield server
    if server.process is not None:
        server.signal(signal.SIGKILL)


@pytest.fixture
def server(server_of_all: Server, request: pytest.FixtureRequest) -> Server:
    server_of_all.experiment = request.node.name
    server_of_all.be_well()
    return server_of_all


@pytest.fixture
def silent() -> Iterator[str]:
    """The word that names a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield f"tracking.uri=http://127.0.0.1:{listening.getsockname()[1]}"


def command(tmp_path: Path, *words: str, steps: int = 40, secs: float = 0.05, task: str = TASK, **env: str) -> Any:
    """Start a command whose task takes this many steps."""
    (tmp_path / "task.py").write_text(task.format(steps=steps, secs=secs))
    return subprocess.Popen(
        [sys.executable, "-c", APP, *words], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def printed_command(said: str) -> list[str]:
    """The command that ships what is left, as the last line names it."""
    (last,) = [line.partition("ship later with: ")[2] for line in said.splitlines() if "ship later with: " in line]
    return [sys.executable, *shlex.split(last.removesuffix(")"))[1:]]


def shipped(tmp_path: Path, argv: list[str]) -> int:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=tmp_path, env=env, timeout=240).returncode


SWEEP = ("-m", "model.params.learning_rate=0.1,0.2,0.3", "sweep.dir=s")


def is_in_the_second_job(folder: Path) -> bool:
    """Say whether the first job of a sweep is over. The second is held before its end, then."""
    is_over = any((folder / "s").glob("*/summary.json"))
    if is_over:
        (folder / "hold").touch()
    return is_over


def test_a_sweep_whose_server_was_away_is_completed_by_the_same_command_or_by_the_printed_one(
    server: Server, tmp_path: Path
) -> None:
    folders = [tmp_path / "same", tmp_path / "printed"]
    sweeps = []
    for folder in folders:
        folder.mkdir()
        server.experiment = folder.name
        sweeps.append(command(folder, *server.words, *SWEEP, steps=50))
    wait_until(lambda: all([is_in_the_second_job(folder) for folder in folders]))
    server.signal(signal.SIGKILL)
    for folder in folders:
        (folder / "hold").unlink()
    for sweep in sweeps:
        out, said = sweep.communicate(timeout=240)
        assert sweep.returncode == 0, said
        assert out.count("finished: ") == 3
    server.start()
    assert shipped(folders[1], printed_command(said)) == 0
    server.experiment = "same"
    again = command(folders[0], *server.words, *SWEEP)
    _, said = again.communicate(timeout=240)
    assert (again.returncode, said.count("skipped")) == (0, 3), said
    assert "tracking: " not in said
    for folder in folders:
        server.experiment = folder.name
        check_that_all_is_there(folder / "s", server)


def check_that_all_is_there(sweep: Path, server: Server) -> None:
    runs = server.runs()
    assert {run.info.status for run in runs.values()} == {"FINISHED"} and len(runs) == 4
    (parent,) = (run for run in runs.values() if "mlflow.parentRunId" not in run.data.tags)
    client = MlflowClient(server.address)
    for name, run in runs.items():
        files = {file.path for file in client.list_artifacts(run.info.run_id)}
        if run is parent:
            assert {"sweep.json", "parallel_coordinates.png"} <= files
            assert len(client.get_metric_history(run.info.run_id, "best/eval/loss")) == 1
            continue
        assert {"config.yaml", "summary.json", "learning_curves.png"} <= files
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["status"] == "finished" and name.startswith("learning_rate=0.")
        assert server.points(name) == list(range(1, 51))
        folder = Path(run.data.tags["model_dir"])
        assert json.loads((folder / "summary.json").read_text())["mlflow_run_id"] == run.info.run_id
    assert json.loads((sweep / "sweep.json").read_text())["mlflow_run_id"] == parent.info.run_id


def test_the_last_lines_say_which_runs_a_server_does_not_have(
    server: Server, tmp_path: Path, messages: Messages
) -> None:
    (tmp_path / "hold").touch()
    run = command(tmp_path, *server.words, "model_dir=mine")
    wait_until(lambda: (tmp_path / "mine" / "shipped.mlflow.json").exists())
    server.signal(signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, said = run.communicate(timeout=240)
    assert run.returncode == 0
    for line in said.splitlines()[-2:]:
        messages.same("stderr", line, hide=r"(?<=127\.0\.0\.1:)\d+|(?<= reached: )[^.]*")
    assert shipped(tmp_path, printed_command(said)) == 75, "it is still away"
    server.start()
    assert shipped(tmp_path, printed_command(said)) == 0
    assert server.points("mine") == list(range(1, 41)) and server.runs()["mine"].info.status == "FINISHED"


def test_files_whose_bucket_was_away_are_sent_by_the_printed_command(
    tmp_path: Path, mlflow_database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moto")
    from tests.support.object_store import CREDENTIALS, served

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("in the bucket", artifact_location="s3://bucket/files")
    with served() as bucket:
        bucket.mode = "away"
        for name, value in {**CREDENTIALS, "MLFLOW_S3_ENDPOINT_URL": bucket.address, "AWS_MAX_ATTEMPTS": "1"}.items():
            monkeypatch.setenv(name, value)
        run = command(tmp_path, f"tracking.uri={uri}", "model_dir=mine", "tracking.experiment='in the bucket'", steps=5)
        _, said = run.communicate(timeout=240)
        assert run.returncode == 0, said
        (at_the_end,) = client.search_runs([experiment])
        assert at_the_end.info.status == "FINISHED" and "endpoint URL" in said
        bucket.mode = "ok"
        assert shipped(tmp_path, printed_command(said)) == 0
        files = {file.path for file in client.list_artifacts(at_the_end.info.run_id)}
    assert {"config.yaml", "summary.json", "learning_curves.png"} <= files
    history = client.get_metric_history(at_the_end.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4, 5]
    assert client.get_run(at_the_end.info.run_id).info.status == "FINISHED"


def test_the_import_of_mlflow_does_not_count_as_no_answer(server: Server, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time, wrapt\nwrapt.register_post_import_hook(lambda module: time.sleep(22), 'mlflow')\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = command(tmp_path, *server.words, "model_dir=mine", steps=3, PYTHONPATH=path)
    _, said = run.communicate(timeout=240)
    assert run.returncode == 0 and "tracking: " not in said
    assert server.points("mine") == [1, 2, 3] and server.runs()["mine"].info.status == "FINISHED"


@pytest.mark.alone
def test_a_server_that_never_answers_delays_no_job(silent: str, tmp_path: Path) -> None:
    began = time.time()
    sweep = command(tmp_path, silent, "-m", "model.params.learning_rate=0.1,0.2", "sweep.dir=s", steps=10)
    _, said = sweep.communicate(timeout=240)
    assert sweep.returncode == 0, said
    times = []
    for journal in (tmp_path / "s").glob("*/events.chief-0.jsonl"):
        times.append([line["time"] for line in recorded(journal)])
    (first, second) = sorted(times)
    assert first[0] - began < 10 and second[0] - first[-1] < 10, "33 s before"
    assert max(after - before for one in times for before, after in pairwise(one)) < 2
    assert time.time() - second[-1] < 60, "the 20 s are spent once"
    assert said.count("no answer for 20 s") == 1 and "runner.tracking.ship s" in said


SCRIPT = """
import sys, time
from pathlib import Path
from runner.config.schema import TrackingConfig
from runner.tracking.backends.session import ScriptRecord
from tests.support.journal import journal_of
folder = Path("run").absolute()
journal = journal_of(folder)
tracking = TrackingConfig("mlflow", uri=sys.argv[1], experiment=sys.argv[2])
record = ScriptRecord(tracking, folder, journal, {}, {}, "m", "chief")
with record.recording("train", trains=True):
    journal.event("first_step", step=1)
    for step in range(int(sys.argv[3]), int(sys.argv[3]) + 5):
        journal.metrics(step, {"train/loss": 1.0})
    while Path("hold").exists():
        time.sleep(0.02)
print("done", flush=True)
"""


def test_a_frozen_server_does_not_refuse_the_next_start(server: Server, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(first_step: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "train.py", server.address, server.experiment, str(first_step)],
            cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    (tmp_path / "hold").touch()
    first = start(1)
    wait_until(lambda: (tmp_path / "run" / "shipped.mlflow.json").exists())
    server.signal(signal.SIGSTOP)
    (tmp_path / "hold").unlink()
    assert first.stdout is not None and first.stdout.readline() == "done\n"
    with FileLock(tmp_path / "run" / ".lock", timeout=1.0):  # as the next start takes it
        assert first.poll() is None, "it still waits for the server"
    second = start(6)
    time.sleep(1.0)
    server.signal(signal.SIGCONT)
    for script in (first, second):
        assert "in use" not in script.communicate(timeout=240)[1]
    wait_until(lambda: server.runs()["run"].info.status == "FINISHED")
    assert server.points("run") == list(range(1, 11))


def has_more(folder: Path, step: int) -> bool:
    return Shipped.read(folder, "mlflow").last_steps.get("train/loss", 0) > step


@pytest.mark.alone
def test_a_run_whose_shipping_process_is_killed_is_recorded_once(server: Server, tmp_path: Path) -> None:
    run = command(tmp_path, *server.words, "model_dir=mine", steps=100, secs=0.1)
    known = 0
    for _ in range(2):
        wait_until(partial(has_more, tmp_path / "mine", known))
        known = Shipped.read(tmp_path / "mine", "mlflow").last_steps["train/loss"]
        children = psutil.Process(run.pid).children()
        (shipper,) = (child for child in children if "runner.tracking.ship" in child.cmdline())
        shipper.kill()
    _, said = run.communicate(timeout=240)
    assert run.returncode == 0 and said.count("was killed by SIGKILL") == 1
    assert server.points("mine") == list(range(1, 101)) and server.runs()["mine"].info.status == "FINISHED"
    times = [line["time"] for line in recorded(tmp_path / "mine")]
    assert max(after - before for before, after in pairwise(times)) < 2, "training never notices"


# --- processes of a run are killed, and its server comes and goes -----------------------------------------------------

RESUMED = """
import os, sys, time
from pathlib import Path
from runner.system.child_process import end_with_parent
from runner.tracking.run_lock import only_task_in
from tests.support.journal import Lines, metrics_of_steps
end_with_parent(os.environ)
model_dir = Path(sys.argv[1]).parent
newest = model_dir / "checkpoint"

def save(step):
    name = f"model.ckpt-{{step}}"
    for suffix in (".index", ".data-00000-of-00001"):
        (model_dir / (name + suffix)).touch()
    new = model_dir / "checkpoint.new"
    new.write_text(f'model_checkpoint_path: "{{name}}"')
    new.rename(newest)

with only_task_in(model_dir):
    step = int(newest.read_text().rpartition("-")[2][:-1]) if newest.exists() else 0
    journal = Lines(model_dir)
    journal.event("built", num_replicas=1)
    first, last = step + 1, max((step for step, _ in metrics_of_steps(model_dir)), default=0)
    while step <= last or not Path("enough").exists():
        step += 1
        journal.metrics(step, {{"train/loss": time.time()}})  # a step that is repeated has another value
        if step == first:
            journal.event("first_step", step=step)
        if step % 20 == 0:
            save(step)
        time.sleep({secs})
    save(step)
    journal.event("result", global_step=step, metrics={{"eval/loss": 0.5}}, checkpoint=f"model.ckpt-{{step}}")
"""
"""It goes on from the newest checkpoint beyond what earlier starts have noted, until the file `enough` is there."""

VICTIMS = {"supervisor": "", "task": "task.py", "shipping": "runner.tracking.ship"}
"""Name -> a word of its command."""


def has_killed(run: subprocess.Popen[str], victim: str) -> bool:
    """Kill a process of a run. Returns: whether there was one."""
    with contextlib.suppress(psutil.Error):
        supervisor = psutil.Process(run.pid)
        for process in [supervisor] if victim == "supervisor" else supervisor.children():
            if victim == "supervisor" or VICTIMS[victim] in process.cmdline():
                process.kill()
                return True
    return False


def changed(server: Server, draw: random.Random) -> str:
    """Freeze, wake, kill or start a server. Returns: which of them."""
    if server.process is None:
        server.start()
        return "started"
    what = draw.choice(("woken" if server.is_frozen else "frozen", "killed"))
    server.signal({"woken": signal.SIGCONT, "frozen": signal.SIGSTOP, "killed": signal.SIGKILL}[what])
    return what


def lived(folder: Path, server: Server, draw: random.Random, kills: int) -> list[str]:
    """Start a run again until it has finished after so many of its processes were killed. Returns: what was done."""
    done: list[str] = []
    left = [name for _ in range(0, kills, len(VICTIMS)) for name in draw.sample(list(VICTIMS), len(VICTIMS))][:kills]
    enough = folder / "enough"
    while True:
        run = command(folder, *server.words, "model_dir=mine", secs=0.02, task=RESUMED)
        done.append("start")
        while run.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.communicate(timeout=draw.uniform(0.0, 3.0))
                break
            if draw.random() < 0.5:
                done.append(f"server {changed(server, draw)}")
            elif left and has_killed(run, left[0]):
                done.append(f"{left.pop(0)} killed")
            if len(left) <= draw.choice((0, 0, 1)):  # the last may be killed while the run ends
                enough.touch()
        if run.returncode == 0 and not left:
            return done
        assert run.returncode in (0, 1, -signal.SIGKILL) and done.count("start") < 3 * kills + 5, done
        enough.unlink(missing_ok=True)
        if draw.random() < 0.5:
            wait_until(lambda: not processes_in(folder))


def test_a_run_that_is_killed_again_and_again_while_its_server_comes_and_goes_is_recorded_once(
    server: Server, tmp_path: Path
) -> None:
    kills, seed = int(os.environ.get("KILLS", 3)), os.environ.get("SEED", "1")
    done = lived(tmp_path, server, random.Random(seed), kills)
    print(f"seed {seed}: {dict(Counter(done))}: {', '.join(done)}")
    if server.is_frozen:
        server.signal(signal.SIGCONT)
    elif server.process is None:
        server.start()
    wait_until(lambda: not processes_in(tmp_path))  # what ships for a supervisor that was killed
    assert shipped(tmp_path, [sys.executable, "-m", "runner.tracking.ship", "mine"]) == 0

    written = metrics_of_steps(tmp_path / "mine")
    last = max(step for step, _ in written)
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["global_step"]) == ("finished", last)
    client = MlflowClient(server.address)
    (run,) = server.runs().values()
    assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "finished")
    history = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    values = {step: metrics["train/loss"] for step, metrics in reversed(written)}  # the first of each step
    assert sorted(history) == sorted(values.items()), "each value once"
    assert sorted(values) == list(range(1, last + 1))
