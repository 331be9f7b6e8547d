"""No secret reaches the screen when the supervisor itself fails, nor a file that others may read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = """
import sys
from runner.launch import app, supervisor
def fail(*args, **kwargs):
    raise RuntimeError("cannot log in with hunter22")
supervisor.run = fail
sys.exit(app.run_command_line())
"""
WATCHED = """
import os, pathlib, sys
from runner.launch import app, task_group
task_group.task_argv = lambda file: [sys.executable, "-c", "print('in the place of the task')"]
modes = set()
def watch(event, args):
    if event == "os.rename":  # a file gets its name with the mode that it keeps
        modes.add((pathlib.Path(args[1]).name, oct(os.stat(args[0]).st_mode & 0o777)))
    if event == "open" and isinstance(args[1], str) and "w" in args[1] and str(args[0]).endswith(".yaml"):
        modes.add((str(args[0]), "opened"))
sys.addaudithook(watch)
code = app.run_command_line()
print(*sorted(modes), sep="\\n")
sys.exit(code)
"""
SECRETS = ("+model.params.db_password=hunter22", "run.secrets=[customer_id]", "+model.params.customer_id=cust4711")


def run(code: str, cwd: Path, *arguments: str, typed: tuple[str, ...] = SECRETS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *typed, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("more", [[], ["train.max_stps=3", "+model.params.customer_id=other"]])
def test_a_supervisor_that_fails_shows_no_secret(more: list[str], tmp_path: Path) -> None:
    result = run(BROKEN, tmp_path, "model_dir=run", *more)
    assert result.returncode == (2 if more else 1)
    assert more or "RuntimeError: cannot log in with ***" in result.stderr
    assert "hunter22" not in result.stdout + result.stderr
    assert "cust4711" not in result.stdout + result.stderr


def test_notes_of_a_run_and_of_a_sweep_are_private_from_the_first_moment(tmp_path: Path) -> None:
    result = run(WATCHED, tmp_path, "model_dir=run", "train.max_steps=1", "tracking=none")
    assert result.returncode == 0, result.stderr
    assert "('config.yaml', '0o600')" in result.stdout
    assert "('.tracking.json', '0o600')" in result.stdout  # it may have a server's password
    assert "hunter22" not in (tmp_path / "run" / "events.supervisor-0.jsonl").read_text()
    # Hydra writes its notes in a temporary folder that is its owner's alone; nothing is opened for writing elsewhere.
    assert [line for line in result.stdout.splitlines() if "opened" in line and "/runner-" not in line] == []
    notes = tmp_path / "run" / ".hydra"
    assert notes.stat().st_mode & 0o777 == 0o700
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in notes.iterdir()} == {
        "config.yaml": "0o600", "hydra.yaml": "0o600", "overrides.yaml": "0o600",
    }  # fmt: skip
    swept = run(BROKEN, tmp_path, "-m", "train.max_steps=1,2", "tracking=none")
    (note,) = tmp_path.glob("outputs/sweeps/*/multirun.yaml")
    assert note.stat().st_mode & 0o777 == 0o600
    assert "hunter22" not in swept.stdout + swept.stderr


LAUNCHER = """
import pathlib, pickle
from dataclasses import dataclass, field
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

@dataclass
class Settings:
    _target_: str = "hydra_plugins.elsewhere.Elsewhere"
    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"

ConfigStore.instance().store(group="hydra/launcher", name="elsewhere", node=Settings)

class Elsewhere(Launcher):  # as submitit and joblib do it, but in this process
    def __init__(self, submitit_folder):
        self.folder = pathlib.Path(submitit_folder.replace("%j", "7"))
    def setup(self, *, hydra_context, task_function, config):
        self.context, self.function, self.config = hydra_context, task_function, config
    def launch(self, job_overrides, initial_job_idx):
        self.folder.mkdir(parents=True, exist_ok=True)
        pathlib.Path("mode").write_text(oct(self.folder.parent.stat().st_mode & 0o777))
        results = []
        for number, overrides in enumerate(job_overrides):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            config.hydra.job.num, config.hydra.job.id = number, str(number)
            HydraConfig.instance().set_config(config)
            results.append(run_job(
                hydra_context=self.context, config=config, task_function=pickle.loads(pickle.dumps(self.function)),
                job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir"))
        return results

@dataclass
class SweeperSettings:
    _target_: str = "hydra_plugins.elsewhere.EachWord"
    params: dict = field(default_factory=dict)

ConfigStore.instance().store(group="hydra/sweeper", name="each_word", node=SweeperSettings)

class EachWord(Sweeper):  # as a plugin of somebody else
    def __init__(self, params):
        pass
    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)
    def sweep(self, arguments):
        folder = pathlib.Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        (several,) = [word for word in arguments if "," in word]
        key, _, values = several.partition("=")
        same = [word for word in arguments if word != several]
        jobs = self.launcher.launch([[*same, f"{key}={value}"] for value in values.split(",")], initial_job_idx=0)
        return [job.return_value for job in jobs]
"""


@pytest.mark.parametrize("sweeper", ["basic", "each_word"])
def test_jobs_of_another_launcher_show_no_secret_and_are_pickled_in_a_private_folder(
    sweeper: str, tmp_path: Path
) -> None:
    """Hydra printed the overrides of a job that failed; submitit's pickles could be read by everybody."""
    plugin = tmp_path / "hydra_plugins" / "elsewhere.py"
    plugin.parent.mkdir()
    plugin.write_text(LAUNCHER)
    words = ("-m", "hydra/launcher=elsewhere", f"hydra/sweeper={sweeper}", "tracking=none")
    result = run(BROKEN, tmp_path, *words, "train.max_steps=1,2")
    assert result.returncode == 1
    assert "RuntimeError: cannot log in with ***" in result.stderr
    assert "hunter22" not in result.stdout + result.stderr
    assert "cust4711" not in result.stdout + result.stderr
    assert (tmp_path / "mode").read_text() == "0o700"
    folder = next(tmp_path.glob("outputs/sweeps/*/.submitit"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder.parent / "multirun.yaml").stat().st_mode & 0o777 == 0o600

    plain = "import sys; from runner.launch import app; sys.exit(app.run_command_line())"
    refused = run(plain, tmp_path, *words, "train.max_steps=-1,-2")
    assert refused.returncode == 2, "it was 0"
    said = [f"runner: train.max_steps={steps} must be at least 1." for steps in (-1, -2)]
    assert [line for line in refused.stderr.splitlines() if line.startswith("runner:")] == said


def test_what_an_interpolation_took_from_the_environment_is_hidden_by_the_name_of_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "fromenv99")
    monkeypatch.setenv("REGION", "europe-west4")
    words = [
        "+model.params.x=${oc.env:API_TOKEN}",
        "+model.params.y=at ${oc.env:API_TOKEN}",
        "+model.params.z=${oc.env:REGION}",
    ]
    result = run(WATCHED, tmp_path, "model_dir=run", "train.max_steps=1", "tracking=none", *words)
    assert result.returncode == 0, result.stderr
    assert "('config.yaml', '0o600')" in result.stdout
    record = (tmp_path / "run" / "events.supervisor-0.jsonl").read_text()
    assert "fromenv99" not in record + result.stdout + result.stderr
    assert '"model.params.x": "***"' in record and '"model.params.y": "at ***"' in record
    assert '"model.params.z": "europe-west4"' in record  # its name is no secret's
    assert "fromenv99" in (tmp_path / "run" / "config.yaml").read_text()  # the tasks need it
    failed = run(BROKEN.replace("hunter22", "fromenv99"), tmp_path, "model_dir=other", *words)
    assert failed.returncode == 1 and "cannot log in with ***" in failed.stderr


def test_each_start_masks_by_the_list_of_its_own_config_and_of_the_run_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of an earlier start, which is read to say what has changed, replaced the list of this one."""
    words = ["model_dir=run", "train.max_steps=1", "tracking=none", "+model.params.seat=seat4711"]
    monkeypatch.setenv("A_TOKEN", "fromenv99")
    taken = ["+model.params.x=${oc.env:A_TOKEN}", "+model.params.y={deep: ['${oc.env:A_TOKEN}', 1]}"]
    earlier = run(WATCHED, tmp_path, *words, "+model.params.old=1")
    assert earlier.returncode == 0, earlier.stderr
    journal = tmp_path / "run" / "events.supervisor-0.jsonl"
    assert "seat4711" in journal.read_text()
    journal.unlink()
    later = run(WATCHED, tmp_path, *words, *taken, "run.secrets=[customer_id,seat]")
    assert later.returncode == 0, later.stderr
    assert "Changed since this run was last started" in later.stdout + later.stderr
    assert "model.params.x: None -> ***" in later.stdout + later.stderr
    monkeypatch.delenv("A_TOKEN")
    (tmp_path / "run" / "checkpoint").touch()
    read = run(WATCHED, tmp_path, "model_dir=run", "command=evaluate", "tracking=none", "run.secrets=[width]")
    assert read.returncode == 0, read.stderr
    record = journal.read_text()
    assert record.count('"model.params.x": "***"') == 2 and record.count('"model.params.seat": "***"') == 2
    assert record.count('"model.params.y.deep": ["***", 1]') == 2
    assert record.count('"model.params.width": "***"') == 1
    shown = record + later.stdout + later.stderr + read.stdout + read.stderr
    assert [secret for secret in ("seat4711", "cust4711", "hunter22", "fromenv99") if secret in shown] == []
    assert (tmp_path / "run" / "config.evaluate.yaml").stat().st_mode & 0o777 == 0o600


def test_what_a_config_file_lists_is_not_in_the_name_of_the_first_job(tmp_path: Path) -> None:
    conf = tmp_path / "conf" / "experiment"
    conf.mkdir(parents=True)
    (conf / "listed.yaml").write_text("# @package _global_\nrun: {secrets: [seat]}\nmodel: {params: {seat: a}}\n")
    swept = ("-m", "experiment=listed", "model.params.seat=seat4711,seat4712", "train.max_steps=1", "tracking=none")
    result = run(WATCHED.replace("sys.executable", "'/bin/true'"), tmp_path, *swept, typed=())
    said = result.stdout + result.stderr
    assert "job 1/2: seat=***" in said and "seat471" not in said
    (record,) = tmp_path.glob("outputs/sweeps/*/sweep.json")
    assert "seat471" not in record.read_text()
