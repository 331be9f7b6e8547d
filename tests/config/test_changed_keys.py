"""Keys that were removed or renamed: refused or warned of where they are written, read in silence from an old run."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config import schema
from runner.config.changed_keys import REMOVED, RENAMED
from runner.config.settings.metric_rules import EarlyStopping
from runner.launch import app
from runner.tracking.summary import Outcome
from tests.support.messages import Messages
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
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

    def run(config: schema.Config, *args: Any, **more: Any) -> Outcome:
        found.append(config)
        return Outcome(0, "finished")

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


@pytest.mark.parametrize("key", slow_but(REMOVED, "cluster.standby", "eval_strategy.communication"))
def test_a_removed_key_is_refused_with_what_to_do_instead(key: str, project: Path, messages: Messages) -> None:
    def refused(*overrides: str) -> str:
        code, said = run(*overrides)
        messages.same(f"exit {code}", said)
        return said

    value = VALUES.get(key, "x")
    said = refused(f"{key}={value}")
    assert REMOVED[key].instead in said
    assert refused(f"++{key}={value}").lower() == said.lower()  # OmegaConf has read the value: true is True
    group, _, name = key.partition(".")
    option = "default" if group == "cluster" else "mirrored"
    write(project / "conf" / group / f"{option}.yaml", f"{name}: {value}\n")
    refused(f"{group}={option}")
    shutil.rmtree(project / "conf")
    write(project / "conf" / "experiment" / "mine.yaml", f"# @package _global_\n{group}:\n  {name}: {value}\n")
    refused("experiment=mine")


def left_by_another_version(project: Path, name: str, **cluster: Any) -> None:
    """Write a run, and its user code, whose config.yaml has all removed keys at their defaults but for `cluster`, and
    lacks keys of today.
    """
    shutil.copytree(RUNS / name, project / "run")
    shutil.copy(RUNS / "small_model.py", project)
    file = project / "run" / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    for key, removed in REMOVED.items():
        group, _, setting = key.partition(".")
        tree[group][setting] = removed.default
    tree["cluster"] |= cluster
    del tree["train"]["early_stopping"], tree["run"]["eager"], tree["new"]
    file.write_text(yaml.safe_dump(tree))


@pytest.mark.parametrize("name", ["default", "mirrored", "classic"])
def test_removed_keys_at_their_defaults_in_an_old_run_are_not_mentioned(
    name: str, project: Path, configs_run: list[schema.Config]
) -> None:
    left_by_another_version(project, name)
    code, said = run("command=evaluate", "model_dir=run")
    assert code == 0
    assert "removed" not in said
    assert configs_run[0].model.fn is not None and configs_run[0].model.fn.startswith("small_model")


def test_a_key_that_an_old_run_lacks_has_its_default(project: Path, configs_run: list[schema.Config]) -> None:
    left_by_another_version(project, "default")
    assert run("command=evaluate", "model_dir=run")[0] == 0
    assert configs_run[0].train.early_stopping == EarlyStopping()
    assert configs_run[0].run.eager is False


def test_a_removed_key_with_another_value_in_an_old_run_is_dropped_with_one_line(
    project: Path, configs_run: list[schema.Config], messages: Messages
) -> None:
    left_by_another_version(project, "default", standby=True)
    code, said = run("command=evaluate", "model_dir=run")
    assert (code, len(configs_run)) == (0, 1)
    (line,) = (one for one in said.splitlines() if "removed" in one)
    messages.same("stderr", line)


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(RENAMED, "train.num_steps", "train.max_steps")
    yield


@pytest.mark.usefixtures("renamed")
def test_a_renamed_key_works_with_a_warning(
    project: Path, configs_run: list[schema.Config], messages: Messages
) -> None:
    def warned(*overrides: str) -> None:
        code, said = run(*overrides)
        (line,) = (one for one in said.splitlines() if "num_steps" in one)
        messages.same(f"exit {code}", line)

    for override in ("train.num_steps=7", "++train.num_steps=7"):
        warned(override)
    write(project / "conf" / "train" / "default.yaml", "num_steps: 8\n")
    warned()
    shutil.rmtree(project / "conf")
    write(
        project / "conf" / "experiment" / "mine.yaml",
        "# @package _global_\ntrain:\n  num_steps: ${input.train.batch_size}\n",
    )
    warned("experiment=mine", "input.train.batch_size=16")
    assert [config.train.max_steps for config in configs_run] == [7, 7, 8, 16]


@pytest.mark.usefixtures("renamed")
def test_a_renamed_key_in_an_old_run_is_read_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "config.yaml", "train:\n  num_steps: 9\n")
    assert schema.read(tmp_path / "config.yaml") == {"train": {"max_steps": 9}}
    assert capsys.readouterr().err == ""
