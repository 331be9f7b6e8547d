"""What Hydra composes from: the user's ./conf before ours, and the config that a run left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import MissingConfigException
from omegaconf import Container, DictConfig, OmegaConf

from runner.config import hydra, hydra_mistakes, saved_config
from runner.config.help import answer
from runner.config.mistakes import Malformed
from runner.config.schema import Config
from runner.launch import app
from runner.tracking.summary import Outcome
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=150)


def ask(*arguments: str, cwd: Path) -> str:
    result = run(*arguments, cwd=cwd)
    return result.stdout + result.stderr


def refused(messages: Messages, *arguments: str, cwd: Path) -> None:
    result = run(*arguments, cwd=cwd)
    assert result.stdout == ""
    messages.same(f"exit {result.returncode}", result.stderr)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.processes
def test_options_in_the_users_conf_are_found_without_flags(tmp_path: Path, messages: Messages) -> None:
    write(tmp_path / "conf" / "model" / "mine.yaml", "fn: model_fns.digits\nparams: {width: 7}\n")
    write(
        tmp_path / "conf" / "experiment" / "night.yaml",
        "# @package _global_\ndefaults:\n  - override /model: mine\ntrain:\n  max_steps: 9\n",
    )
    tree = yaml.safe_load(ask("experiment=night", "--cfg", "job", cwd=tmp_path))
    assert tree["model"]["params"] == {"width": 7}
    assert tree["train"]["max_steps"] == 9
    refused(messages, "model=mien", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_the_users_file_wins_over_ours_and_is_checked_like_it(tmp_path: Path, messages: Messages) -> None:
    write(tmp_path / "conf" / "train" / "default.yaml", "max_steps: 77\n")
    write(tmp_path / "conf" / "config.yaml", "not: ours\n")  # of another program in the same project
    assert yaml.safe_load(ask("--cfg", "job", cwd=tmp_path))["train"]["max_steps"] == 77
    write(tmp_path / "conf" / "train" / "default.yaml", "max_stepps: 77\n")
    refused(messages, cwd=tmp_path)
    write(tmp_path / "conf" / "train" / "default.yaml", "max_steps: many\n")
    refused(messages, cwd=tmp_path)
    write(tmp_path / "conf" / "train" / "default.yaml", "max_steps: 0\n")
    write(tmp_path / "conf" / "experiment" / "night.yaml", "# @package _global_\nrun: {seed: -4}\n")
    for words in (
        [],
        ["train.max_steps=-1"],
        ["train.max_steps=1", "experiment=night"],
        ["train.max_steps=1", "experiment=night", "run.seed=-5"],
    ):
        refused(messages, *words, cwd=tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "offered"),
    [("runner strategy=mir", "strategy=mirrored"), ("runner train.max_st", "train.max_steps="),
     ("runner experiment=nig", "experiment=night"), ("runner command=ev", "command=evaluate"),
     ("runner train.nan=", "train.nan=stop train.nan=rollback train.nan=ignore"),
     ("runner strategy=mirrored model.fn=", "model.fn=model_fns.mine"),
     ("runner input.train.fn=mod", "input.train.fn=model_fns.mine")],
)  # fmt: skip
def test_a_shell_completes_groups_keys_values_and_what_is_the_users_own(
    line: str, offered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "conf" / "experiment" / "night.yaml", "# @package _global_\ntrain:\n  max_steps: 9\n")
    write(tmp_path / "model_fns" / "mine.py", "")
    write(tmp_path / "tests" / "test_mine.py", "")
    monkeypatch.setitem(ENV, "COMP_LINE", line)
    monkeypatch.setitem(ENV, "COMP_POINT", str(len(line)))
    assert ask("-sc", "query=bash", cwd=tmp_path) == f"{offered}\n"


EXPERIMENTS = {
    "neither package nor override": "train: {max_steps: 9}\n",
    "no package": "defaults:\n  - override /input: custom\ntrain: {max_steps: 9}\n",
    "no override": "# @package _global_\ndefaults:\n  - input: custom\n",
    "no override, a slash": "# @package _global_\ndefaults:\n  - /input: custom\n",
    "no slash": "# @package _global_\ndefaults:\n  - override input: custom\n",
}


@pytest.mark.parametrize("case", EXPERIMENTS)
def test_a_mistake_in_an_experiment_file_says_the_line_to_write(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    write(tmp_path / "conf" / "experiment" / "mine.yaml", EXPERIMENTS[case])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", "experiment=mine"])
    code = app.run_command_line()
    messages.same(f"exit {code}", capsys.readouterr().err)


TRAIN, EXPERIMENT = "conf/train/default.yaml", "conf/experiment/mine.yaml"
GLOBAL = b"# @package _global_\n"
UNREADABLE: dict[str, tuple[str, bytes]] = {
    "hydra is null": ("conf/runner.yaml", b"hydra: null\n"),
    "hydra is a list": (EXPERIMENT, GLOBAL + b"hydra: [1]\n"),
    "hydra.sweeper is null": (EXPERIMENT, GLOBAL + b"hydra: {sweeper: null}\n"),
    "a number alone": (TRAIN, b"5\n"),
    "UTF-16": (TRAIN, "max_steps: 3\n".encode("utf-16")),
    "Latin-1": (TRAIN, "# gr\u00fc\u00dfe\nmax_steps: 3\n".encode("latin-1")),
    "a raw NUL": (TRAIN, b"max_steps: \0\n"),
    "a null key": (TRAIN, b"null: 3\n"),
    "a null key below": (EXPERIMENT, GLOBAL + b"model: {params: {null: 3}}\n"),
    "@package alone": (EXPERIMENT, b"# @package\n"),
    "an anchor in itself": (EXPERIMENT, GLOBAL + b"model: {params: &a {b: *a}}\n"),
    "an open interpolation": (TRAIN, b"max_steps: ${nothing\n"),
    "a long number": (TRAIN, b"max_steps: " + 5000 * b"9" + b"\n"),
    "defaults are no list": (TRAIN, b"defaults: {model: linear}\n"),
    "an entry of defaults": (TRAIN, b"defaults: [5]\n"),
    "a mapping for a list": (TRAIN, b"hooks: {a: 1}\n"),
    "a list for a mapping": (EXPERIMENT, GLOBAL + b"tracking: {tags: [1]}\n"),
    "a mapping for a number": (TRAIN, b"max_steps: {a: 1}\n"),
    "a group is null": (EXPERIMENT, GLOBAL + b"train: null\n"),
    "an interpolation to nothing": (TRAIN, b"max_steps: ${nothing}\n"),
    "interpolations in a circle": (TRAIN, b"max_steps: ${train.max_epochs}\nmax_epochs: ${train.max_steps}\n"),
    "model_dir leads to nothing": (EXPERIMENT, GLOBAL + b"model_dir: ${nothing}\n"),
    "NUL in model_dir": (EXPERIMENT, GLOBAL + b'model_dir: "a\\0b"\n'),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_file_and_key(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    name, text = UNREADABLE[case]
    write(tmp_path / name, "")
    (tmp_path / name).write_bytes(text)
    monkeypatch.chdir(tmp_path)
    words = ["experiment=mine"] if name == EXPERIMENT else []
    monkeypatch.setattr(sys, "argv", ["runner", *words])
    code = app.run_command_line()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    messages.same(f"exit {code}", said)
    assert not [*tmp_path.glob("outputs/*")]


@pytest.mark.parametrize(
    "word",
    ["++run.inline.extra=1", "++train.hooks.a=1", "train.hooks={a:1}", "tracking.tags=[1]", "train=null",
     "hydra.sweeper=null", "hydra.verbose={a:1}", "run.secrets=${a}", "run.secrets=[${a}]", "model_dir=${a}",
     "model_dir='a\0b'", "export.dir='a\0b'"],
)  # fmt: skip
def test_a_word_that_cannot_be_merged_or_resolved_is_named_with_its_key(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", word])
    code = app.run_command_line()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    messages.same(f"exit {code}", said)
    assert not [*tmp_path.glob("outputs/*")]


def test_a_file_of_config_dir_is_read_and_named_like_one_of_the_users_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "more" / "train" / "default.yaml"
    for text in (b"\xff\xfe", b"hooks: {a: 1}\n"):
        write(file, "")
        file.write_bytes(text)
        monkeypatch.setattr(sys, "argv", ["runner", "--config-dir", "more"])
        code = app.run_command_line()
        messages.same(f"exit {code}", capsys.readouterr().err)


def test_a_byte_order_mark_before_a_config_file_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / EXPERIMENT, "\ufeff# @package _global_\ntrain: {max_steps: 9}\n")
    monkeypatch.chdir(tmp_path)
    hydra.prepare()
    assert hydra.Composer().compose(["experiment=mine"], is_sweep=False).train.max_steps == 9


def test_help_names_a_config_file_that_is_not_in_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    write(tmp_path / TRAIN, "")
    (tmp_path / TRAIN).write_bytes("# gr\u00fc\u00dfe\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    with messages.raised(Malformed):
        answer(["--help", "train"])


@pytest.fixture
def compositions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Overrides of each config that Hydra composes from now on."""
    composed: list[list[str]] = []
    load = ConfigLoaderImpl.load_configuration

    def noted(loader: ConfigLoaderImpl, config_name: Any, overrides: list[str], *more: Any, **settings: Any) -> Any:
        composed.append(list(overrides))
        return load(loader, config_name, overrides, *more, **settings)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", noted)
    monkeypatch.chdir(tmp_path)
    return composed


def test_a_run_is_composed_once(compositions: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Config] = []

    def run(config: Config, *arguments: Any, **settings: Any) -> Outcome:
        given.append(config)
        return Outcome(0, "finished")

    monkeypatch.setattr("runner.launch.supervisor.run", run)
    monkeypatch.setattr(sys, "argv", ["runner", "model_dir=x", "run.seed=3"])
    assert app.run_command_line() == 0
    assert compositions == [["model_dir=x", "hydra.output_subdir=null"]]
    assert given[0].run.seed == 3


@pytest.mark.parametrize("asked", ["in a file", "on the command line"])
def test_a_sweep_may_be_asked_for_by_hydra_mode(
    asked: str, compositions: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      run.seed: 1,2\n"
    write(Path("conf/experiment/seeds.yaml"), text)
    words = {"in a file": ["experiment=seeds"], "on the command line": ["hydra.mode=MULTIRUN", "run.seed=1,2"]}
    monkeypatch.setattr(sys, "argv", ["runner", "command=dry_run", *words[asked]])
    assert app.run_command_line() == 0
    said = capsys.readouterr().out
    assert "job 1/2: " in said and "job 2/2: " in said and "seed=2" in said


CHOICES = [
    ["model.params.learning_rate=0.1", "train.max_steps=5"],
    ["model.params.learning_rate=0.2", "run.seed=4"],
    ["+model.params.new=[1,2]", "~model.params.learning_rate"],
    ["+input.train.params.nested={a:{b:1}}", "++train.max_steps=7", "model_dir=${run.seed}"],
    ["train.max_steps=5", "++train.max_steps=7"],
    ["++train.max_steps=7", "train.max_steps=5", "run.seed=4", "model.params={learning_rate: 0.3}", "run.seed=5"],
    ["model.params.learning_rate=0.3", "model.params={learning_rate: 0.4}", "model.params.learning_rate=0.5"],
    ["model=linear", "strategy=mirrored"],
    ["model=linear", "strategy=mirrored", "strategy.virtual_devices=2"],
    ["strategy=mirrored", "model=linear"],
    ["experiment=mine"],
    ["train.max_steps=5", "experiment=mine"],
    ["experiment=mine", "model=digits", "hydra.sweep.dir=elsewhere"],
    ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3"],
    ["hydra.searchpath=[file://more]", "model=other"],
    ["hydra.searchpath=[file://more]", "model=other", "model.params.width=3"],
]


def test_jobs_that_share_their_files_get_the_config_that_hydra_composes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    night = "# @package _global_\ndefaults:\n  - override /model: linear\ntrain:\n  max_steps: 9\n"
    write(tmp_path / "conf" / "experiment" / "mine.yaml", night)
    write(tmp_path / "more" / "model" / "other.yaml", "fn: model_fns.digits\nparams: {width: 7}\n")
    hydra.prepare()
    composer = hydra.Composer()
    by_hydra = []
    for overrides in CHOICES:
        with initialize_config_dir(hydra.conf_path(), job_name="runner", **hydra.VERSION):
            words = [*overrides, "hydra.output_subdir=null"]
            config = compose("runner", words, return_hydra_config=True)
        by_hydra.append(all_of(config))
    for number in (*range(len(CHOICES)), *reversed(range(len(CHOICES)))):
        config = composer.job([*CHOICES[number], "hydra.output_subdir=null"])
        assert all_of(config) == by_hydra[number]
        OmegaConf.set_struct(config, False)
        OmegaConf.update(config, "train.max_steps", -1)  # a job changes its own config only


def all_of(config: DictConfig) -> Any:
    """Return the text of a config, and the flags and types of each of its nodes."""
    return OmegaConf.to_yaml(config), list(nodes_of(config))


def nodes_of(node: Any) -> Iterator[Any]:
    metadata = {**vars(node._metadata), "resolver_cache": None}  # it has the time
    yield str(node._get_full_key("")), type(node), metadata
    if isinstance(node, Container) and not node._is_none() and not node._is_missing() and not node._is_interpolation():
        for key in node if isinstance(node, DictConfig) else range(len(node)):  # type: ignore[arg-type]
            yield from nodes_of(node._get_node(key))


def test_the_jobs_of_a_sweep_compose_their_files_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    composed = []
    compose = ConfigLoaderImpl._compose_config_from_defaults_list

    def noted(loader: ConfigLoaderImpl, *arguments: Any, **settings: Any) -> DictConfig:
        composed.append(loader)
        return compose(loader, *arguments, **settings)

    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", noted)
    monkeypatch.setattr(sys, "argv", ["runner", "-m", "command=dry_run", "run.seed=1,2,3", "model=digits,linear"])
    monkeypatch.setattr("runner.launch.supervisor.run", lambda *arguments, **settings: Outcome(0, "finished"))
    assert app.run_command_line() == 0
    assert capsys.readouterr().out.count("job ") >= 6
    assert len(composed) == 1 + 2  # the sweep's own, and one for each model


def test_a_mistake_is_composed_no_more_often_than_by_hydra(
    compositions: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    messages: Messages,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["runner", "run.sed=3"])
    code = app.run_command_line()
    messages.same(f"exit {code}", capsys.readouterr().err)
    assert len(compositions) == 2


SAVED: dict[str, Any] = {
    "command": "train",
    "model_dir": "/x",
    "model": {"fn": "mine", "params": {"width": 7}},
    "eval": {"steps": 5, "throttle_secs": 1},
    "strategy": {"name": "mirrored", "virtual_devices": 2},
    "run": {"seed": 3, "progress": "off", "inline": True},
    "sweep": {"parallel": 4},
}
COMPOSED: dict[str, Any] = {
    "command": "evaluate",
    "model_dir": "x",
    "model": {"fn": "ours", "params": {"depth": 1}},
    "eval": {"steps": None, "throttle_secs": 0},
    "strategy": {"name": "one_device", "virtual_devices": None},
    "run": {"seed": 1, "progress": "auto", "inline": False},
    "sweep": {"parallel": 1},
}


def test_what_is_not_said_stays_as_the_run_left_it() -> None:
    tree = saved_config.changed_by(SAVED, COMPOSED, ["command=evaluate", "model_dir=x"])
    assert tree == {
        **SAVED,
        "command": "evaluate",
        "model_dir": "x",
        "run": {"seed": 3, "progress": "auto", "inline": False},
        "sweep": {"parallel": 1},
    }
    assert SAVED["run"]["progress"] == "off"  # not changed in place


@pytest.mark.parametrize(
    ("override", "group", "expected"),
    [
        ("eval.steps=null", "eval", {"steps": None, "throttle_secs": 1}),
        ("++model.params.depth=1", "model", {"fn": "mine", "params": {"width": 7, "depth": 1}}),
        ("~model.params.width", "model", {"fn": "mine", "params": {}}),
        ("strategy=one_device", "strategy", {"name": "one_device", "virtual_devices": None}),
    ],
)
def test_what_is_said_is_taken(override: str, group: str, expected: Any) -> None:
    assert saved_config.changed_by(SAVED, COMPOSED, [override])[group] == expected


def test_an_experiment_replaces_what_the_run_left() -> None:
    assert saved_config.changed_by(SAVED, COMPOSED, ["experiment=mine"]) == COMPOSED


@pytest.mark.processes
def test_hydra_writes_no_notes_of_its_own_whatever_a_users_conf_asks_for(tmp_path: Path, messages: Messages) -> None:
    text = (ROOT / "conf" / "runner.yaml").read_text()
    for number, asked in enumerate(("${run_files:${command}}", ".hydra")):  # ours of before; Hydra's default
        write(
            tmp_path / str(number) / "conf" / "runner.yaml",
            text.replace("\nhydra:\n", f"\nhydra:\n  output_subdir: {asked}\n"),
        )
        assert "output_subdir: null" in ask("--cfg", "hydra", cwd=tmp_path / str(number))
    refused(messages, "hydra.output_subdir=notes", cwd=tmp_path)


def test_a_launcher_that_is_not_installed_is_named_with_its_package(messages: Messages) -> None:
    missing = MissingConfigException("", missing_cfg_file="hydra/launcher/joblib", options=["basic"])
    messages.same("said", hydra_mistakes._text_on_missing_option(missing))


@pytest.mark.parametrize("words", [[], ["--cfg", "job"], ["--multirun", "run.seed=1,2"]], ids=" ".join)
def test_defaults_that_lead_back_to_their_own_file_are_a_mistake(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "conf" / "experiment" / "a.yaml", "# @package _global_\ndefaults: [b]\n")
    write(tmp_path / "conf" / "experiment" / "b.yaml", "# @package _global_\ndefaults: [a]\n")
    write(tmp_path / "conf" / "experiment" / "e.yaml", "# @package _global_\ndefaults: [e]\n")
    monkeypatch.chdir(tmp_path)
    for name in ("e", "a"):
        monkeypatch.setattr(sys, "argv", ["runner", f"experiment={name}", *words])
        assert app.run_command_line() == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("runner: ") and f"experiment={name}" in said and "defaults" in said
