"""Keys that were removed or renamed: refused or warned of where they are written, read in silence from an old run."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from runner.config import changed_keys, schema
from runner.config.changed_keys import ADDED, REMOVED, RENAMED
from runner.config.job_id import job_id
from runner.launch import app
from tests.config.test_config import composed
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "data" / "runs_of_8664505"
RUNS = ROOT / "tests" / "data" / "runs_of_b5fe916"
VALUES = {"cluster.standby": "true", "eval_strategy.timeout_secs": "9", "eval_strategy.bytes_per_pack": "9"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which commands are run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def configs_run(monkeypatch: pytest.MonkeyPatch) -> list[schema.Config]:
    """The configs that would be run."""
    found: list[schema.Config] = []

    def run(config: schema.Config, *args: Any, **more: Any) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("runner.launch.supervisor.run", run)
    return found


def run(*overrides: str) -> tuple[int, str]:
    """Return the exit code of a command and what it says on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["runner", *overrides])
        return app.run_command_line(), said.getvalue()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.processes
def test_the_config_prints_the_lines_of_8664505_but_for_the_removed_keys() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner", "--cfg", "job"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before = (OLD / "cfg_job.yaml").read_text().splitlines()
    lines = done.stdout.rstrip().splitlines()
    # A group has a line, and one for each of its keys.
    stays = {key: default for key, default in ADDED.items() if key not in REMOVED}
    removed = [key for key in REMOVED if key not in ADDED]
    assert len(before) - len(removed) + sum(map(_num_lines, stays.values())) == len(lines)
    tree = yaml.safe_load("\n".join(before))
    for key in removed:
        group, _, name = key.partition(".")
        assert tree[group].pop(name) == REMOVED[key].default
    printed = yaml.safe_load(done.stdout)
    for key, default in stays.items():
        *groups, name = key.split(".")
        assert functools.reduce(dict.__getitem__, groups, printed).pop(name) == default
    assert printed == tree
    now, parents = iter(before), [""]
    for line in lines:
        name, depth = line.strip().partition(":")[0], (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name]
        keys = {".".join(parents[: end + 1]) for end in range(len(parents))}  # its own, and those of its groups
        assert keys & set(stays) or line in now, "the order is that of before"


def _num_lines(default: Any) -> int:
    """Return the lines of a key: one for it, and those of the keys below it."""
    return 1 + (sum(map(_num_lines, default.values())) if isinstance(default, dict) else 0)


@pytest.mark.parametrize("key", slow_but(REMOVED, "cluster.standby", "eval_strategy.communication"))
def test_a_removed_key_is_refused_with_what_to_do_instead(key: str, project: Path) -> None:
    value = VALUES.get(key, "x")
    answer = f"{key}={value}: this key was removed. {REMOVED[key].instead}\n"
    assert run(f"{key}={value}") == (2, f"runner: {answer}")
    code, said = run(f"++{key}={value}")  # OmegaConf has read the value: true is True
    assert (code, said.lower()) == (2, f"runner: {answer}".lower())
    group, _, name = key.partition(".")
    option = "default" if group == "cluster" else "mirrored"
    write(project / "conf" / group / f"{option}.yaml", f"{name}: {value}\n")
    code, said = run(f"{group}={option}")
    assert (code, said) == (2, f"runner: conf/{group}/{option}.yaml: {key}: this key was removed. "
                               f"{REMOVED[key].instead}\n")  # fmt: skip
    shutil.rmtree(project / "conf")
    write(project / "conf" / "experiment" / "mine.yaml", f"# @package _global_\n{group}:\n  {name}: {value}\n")
    code, said = run("experiment=mine")
    assert code == 2 and said.startswith("runner: conf/experiment/mine.yaml: ")
    assert f"{key}: this key was removed. {REMOVED[key].instead}" in said


def left_by_8664505(project: Path, name: str) -> None:
    """Write a run with the config.yaml of 8664505, and its user code, into a project."""
    shutil.copytree(RUNS / name, project / "run")
    shutil.copy(OLD / name / "config.yaml", project / "run")
    shutil.copy(RUNS / "small_model.py", project)


@pytest.mark.parametrize("name", ["default", "mirrored", "classic"])
def test_removed_keys_at_their_defaults_in_an_old_run_are_not_mentioned(
    name: str, project: Path, configs_run: list[schema.Config]
) -> None:
    left_by_8664505(project, name)
    code, said = run("command=evaluate", "model_dir=run")
    assert code == 0
    assert "removed" not in said
    assert configs_run[0].model.fn is not None and configs_run[0].model.fn.startswith("small_model")


def test_a_removed_key_with_another_value_in_an_old_run_is_dropped_with_one_line(
    project: Path, configs_run: list[schema.Config]
) -> None:
    left_by_8664505(project, "default")
    config = project / "run" / "config.yaml"
    config.write_text(config.read_text().replace("standby: false", "standby: true"))
    code, said = run("command=evaluate", "model_dir=run")
    assert (code, len(configs_run)) == (0, 1)
    instead = REMOVED["cluster.standby"].instead
    line = f"runner: run/config.yaml: cluster.standby=True is ignored, because this key was removed. {instead}"
    assert [one for one in said.splitlines() if "removed" in one] == [line]


def test_a_sweep_of_before_finds_its_jobs() -> None:
    tree = yaml.safe_load((OLD / "cfg_job.yaml").read_text().replace("${train.max_steps}", "1000"))
    now = composed()
    for group in ("cluster", "eval_strategy"):
        assert tree[group] == changed_keys.with_removed(now)[group]
    assert job_id(changed_keys.with_removed(now)) == JOB_OF_8664505


JOB_OF_8664505 = "349e78f142"
"""The name that 8664505 gave to a job of the shipped config."""


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(RENAMED, "train.num_steps", "train.max_steps")
    yield


@pytest.mark.usefixtures("renamed")
def test_a_renamed_key_works_with_a_warning(project: Path, configs_run: list[schema.Config]) -> None:
    warning = "train.num_steps is now called train.max_steps. The old name works for one more minor version."
    for override in ("train.num_steps=7", "++train.num_steps=7"):
        code, said = run(override)
        assert code == 0 and f"runner: {warning}\n" in said
    write(project / "conf" / "train" / "default.yaml", "num_steps: 8\n")
    code, said = run()
    assert code == 0 and f"runner: conf/train/default.yaml: {warning}\n" in said
    shutil.rmtree(project / "conf")
    write(
        project / "conf" / "experiment" / "mine.yaml",
        "# @package _global_\ntrain:\n  num_steps: ${input.train.batch_size}\n",
    )
    code, said = run("experiment=mine", "input.train.batch_size=16")
    assert code == 0 and f"runner: conf/experiment/mine.yaml: {warning}\n" in said
    assert [config.train.max_steps for config in configs_run] == [7, 7, 8, 16]


@pytest.mark.usefixtures("renamed")
def test_a_renamed_key_in_an_old_run_is_read_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "config.yaml", "train:\n  num_steps: 9\n")
    assert schema.read(tmp_path / "config.yaml") == {"train": {"max_steps": 9}}
    assert capsys.readouterr().err == ""
