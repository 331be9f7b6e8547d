"""The config: every shipped file composes, and every mistake is named before TensorFlow is imported."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from runner import config as configs
from runner import parsing
from runner.config import Config, ConfigError

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name not in ("experiment", "local")
)
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))


def composed(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What Hydra makes of the command line `overrides`, resolved."""
    configs.register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("runner", list(overrides)), resolve=True)  # type: ignore[return-value]


def parsed(*overrides: str) -> Config:
    return parsing.parse(composed(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    needed = ["model.fn=a.b", "input.train.fn=a.b", "input.eval.fn=a.b"] if option == "custom" else []
    assert isinstance(parsed(f"{group}={option}", *needed), Config)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    config = parsed(f"experiment={experiment}")
    assert config.model.fn


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_field_has_a_comment_over_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#")
    free = path.parent.name in ("experiment", "eval_strategy")
    for before, line in itertools.pairwise(lines):
        is_field = line.strip() and not line.strip().startswith(("#", "-", "}", "]"))
        is_only_a_group = line.rstrip().endswith(":") and line.strip() in ("params:", "defaults:")
        if is_field and not free and not is_only_a_group and not _inside_explained_block(path, line):
            assert before.strip().startswith("#"), f"{path}: {line!r} has no comment"


def _inside_explained_block(path: Path, line: str) -> bool:
    """Evaluation inputs repeat keys that the train input above them explains."""
    return path.parent.name == "input" and line.startswith("    ")


def test_every_key_of_the_schema_is_in_a_file_or_belongs_to_another_option() -> None:
    for group in ("run", "train", "eval", "checkpoint"):
        written = yaml.safe_load((CONF / group / "default.yaml").read_text())
        assert set(written) == set(composed()[group]), group


def test_the_default_config_says_what_it_trains() -> None:
    config = parsed()
    assert config.command == "train_and_evaluate"
    assert config.model_dir is None
    assert config.model.fn == "model_fns.digits"
    assert list(config.input.evals) == [""]
    assert config.input.evals[""].fn == "input_fns.digits"
    assert config.strategy.name == "default"
    assert config.eval_strategy.name is None


def test_any_parameter_may_be_added_to_a_model_and_an_input_without_a_plus() -> None:
    config = parsed(
        "model.params.mine.deep=3", "input.train.params.path=/x", "input.eval.params.n=1", "tracking.tags.a=b"
    )
    assert config.model.params["mine"] == {"deep": 3}
    assert config.input.train.params["path"] == "/x"
    assert config.input.evals[""].params["n"] == 1
    assert config.tracking.tags == {"a": "b"}


def test_several_named_evaluations() -> None:
    tree = composed()
    block = tree["input"]["eval"]
    tree["input"]["eval"] = {"val": block, "test": {**block, "batch_size": 8}}
    config = parsing.parse(tree)
    assert list(config.input.evals) == ["val", "test"]
    assert config.input.evals["test"].batch_size == 8
    assert [key for key, _, _ in config.functions()] == [
        "model.fn", "input.train.fn", "input.eval.val.fn", "input.eval.test.fn",
    ]  # fmt: skip


def test_named_evaluations_are_checked_like_a_single_one() -> None:
    tree = composed()
    tree["input"]["eval"] = {"val": {"fn": "a.b", "shard": "file"}}
    with pytest.raises(ConfigError, match=r"^input.eval.val.shard=file is not allowed. Did you mean 'files'\? Allowed"):
        parsing.parse(tree)
    tree["input"]["eval"] = {"val": 3}
    with pytest.raises(ConfigError, match=r"^input.eval.val=3 is neither a setting of an input"):
        parsing.parse(tree)


def test_a_run_may_have_no_evaluation(tmp_path: Path) -> None:
    config = parsed("input.eval=null")
    assert config.input.evals == {}
    configs.save(config, tmp_path / "config.yaml")
    assert parsing.load(tmp_path / "config.yaml") == config


def test_a_saved_config_loads_as_it_was(tmp_path: Path) -> None:
    config = parsed("strategy=mirrored", "strategy.virtual_devices=2", "model.params.mine=[1,2]", "train.nan=ignore")
    configs.save(config, tmp_path / "config.yaml")
    assert parsing.load(tmp_path / "config.yaml") == config


def test_flattens_to_dotted_names() -> None:
    flat = configs.flatten(parsed("model.params.deep.er=1"))
    assert flat["model.params.deep.er"] == 1
    assert flat["input.eval.batch_size"] == 256
    assert flat["strategy.name"] == "default"


BAD = [
    # misspelt keys, with and without Hydra's ways round the schema
    (["train.max_stps=5"], "train.max_stps=5: there is no key 'train.max_stps'. Did you mean 'train.max_steps'?"),
    (["+train.max_stps=5"], "train.max_stps=5: there is no key 'train.max_stps'. Did you mean 'train.max_steps'?"),
    (["++train.max_stps=5"], "train.max_stps=5: there is no key 'train.max_stps'. Did you mean 'train.max_steps'?"),
    (["strategy.num_gpu=2"], "there is no key 'strategy.num_gpu'. Did you mean 'strategy.num_gpus'?"),
    (["input.eval.bacth_size=3"], "there is no key 'input.eval.bacth_size'. Did you mean 'input.eval.batch_size'?"),
    (["++input.eval.bacth_size=3"], "there is no key 'input.eval.bacth_size'. Did you mean 'input.eval.batch_size'?"),
    (["stratgy=mirrored"], "stratgy=mirrored: there is no key 'stratgy'. Did you mean 'strategy'?"),
    (["batch_size=3"], "there is no key 'batch_size'. Did you mean 'input.train.batch_size'?"),
    (["learning_rate=3"], "there is no key 'learning_rate'. A parameter of the model is model.params.learning_rate."),
    (["++foo.bar=1"], "there is no key 'foo'."),
    (["checkpoint.keep=3"], "there is no key 'checkpoint.keep'."),
    # wrong types
    (["train.max_steps=abc"], "train.max_steps=abc is neither a whole number nor null."),
    (["++train.max_steps=abc"], "train.max_steps=abc is neither a whole number nor null."),
    (["train.max_steps=1.5"], "train.max_steps=1.5 is neither a whole number nor null."),
    (["run.deterministic=maybe"], "run.deterministic=maybe is not true or false."),
    (["model.params=3"], "model.params=3 is not a group of settings."),
    (["strategy=mirrored", "strategy.devices=gpu"], "strategy.devices=gpu is neither a list nor null."),
    (["++input.eval.batch_size=x"], "input.eval.batch_size=x is neither a whole number nor null."),
    (["train.steps_per_loop=fast"], "train.steps_per_loop='fast' is neither 'auto' nor a whole number."),
    (["train.steps_per_loop=1.5"], "train.steps_per_loop=1.5 is neither 'auto' nor a whole number."),
    (["checkpoint.save_secs=${nope}"], "checkpoint.save_secs: Interpolation key 'nope' not found"),
    (["train=5"], "Config group override must be a string or a list. Got int."),
    # values that are not allowed
    (["command=trian"], "command=trian is not allowed. Did you mean 'train'? Allowed: train_and_evaluate, train, eval"),
    (["input.train.shard=file"], "input.train.shard=file is not allowed. Did you mean 'files'? Allowed: auto, files"),
    (["train.nan=stopp"], "train.nan=stopp is not allowed. Did you mean 'stop'? Allowed: stop, ignore."),
    (["run.progress=loud"], "run.progress=loud is not allowed. Allowed: auto, rich, plain, off."),
    (["strategy.name=mirored"], "strategy.name=mirored is not allowed. Did you mean 'mirrored'?"),
    (["train.max_steps=0"], "train.max_steps=0 must be at least 1."),
    (["train.steps_per_loop=0"], "train.steps_per_loop=0 must be at least 1."),
    (["input.train.batch_size=-1"], "input.train.batch_size=-1 must be at least 1."),
    (["input.eval.batch_size=0"], "input.eval.batch_size=0 must be at least 1."),
    (["checkpoint.keep_max=0"], "checkpoint.keep_max=0 must be at least 1."),
    (["strategy=mirrored", "strategy.virtual_devices=0"], "strategy.virtual_devices=0 must be at least 1."),
    # options that are not there
    (
        ["strategy=mirored"],
        "strategy=mirored: no 'mirored' in conf/strategy. Did you mean 'mirrored'? Available: centr",
    ),
    (["experiment=nope"], "experiment=nope: no 'nope' in conf/experiment. Available: "),
    (
        ["tracking=mlfow"],
        "tracking=mlfow: no 'mlfow' in conf/tracking. Did you mean 'mlflow'? Available: mlflow, none.",
    ),
    # what does not go together
    (["strategy.num_packs=2"], "strategy.num_packs=2 has no effect with strategy=default. Its options: none."),
    (["strategy=one_device", "strategy.num_gpus=2"], "strategy.num_gpus=2 has no effect with strategy=one_device."),
    (["eval_strategy.virtual_devices=2"], "eval_strategy.virtual_devices=2 has no effect with eval_strategy=same."),
    (["strategy=one_device", "strategy.devices=[a,b]"], "strategy.devices=['a', 'b']: one_device takes exactly one."),
    (
        ["strategy=mirrored", "strategy.devices=[a]", "strategy.num_gpus=1"],
        "strategy.devices and strategy.num_gpus exclude each other",
    ),
    (
        ["strategy=mirrored", "strategy.virtual_devices=2", "input.train.batch_size=25"],
        "input.train.batch_size=25 does not divide over 2 replicas. Use 24 or 26.",
    ),
    (
        ["strategy=central_storage", "strategy.virtual_devices=4", "input.train.batch_size=3"],
        "input.train.batch_size=3 does not divide over 4 replicas. Use 4.",
    ),
    # what cannot be read
    (["train.max_steps=[1"], "cannot read 'train.max_steps=[1'"),
    (["train.max_steps=1,2"], "train.max_steps=1,2 gives several values. Add --multirun to try each"),
    # functions that are missing
    (["model=custom"], "model.fn is not set. Give package.module or package.module.function"),
    (["input=custom"], "input.train.fn is not set, and command=train_and_evaluate trains."),
    (["~train.max_steps"], "Error merging override ~train.max_steps ("),
    (["model.fn=null"], "model.fn is not set. Give package.module or package.module.function"),
    (["input.train.fn=null"], "input.train.fn is not set, and command=train_and_evaluate trains."),
    (["input.eval.fn=null"], "input.eval.fn is not set."),
    (["command=evaluate", "input.eval=null"], "input.eval is empty, and command=evaluate needs at least one"),
    (["model.fn=nope.model"], "model.fn=nope.model: no module 'nope' in "),
    (["model.fn=model_fns.digts"], "model.fn=model_fns.digts: no 'digts' in model_fns ("),
    (["model.fn=model_fns"], "model.fn=model_fns is a package. Name a module in it: digits, digits_classic"),
    (["model.fn=model_fns.digits.modelfn"], "defines no 'modelfn'. Did you mean 'model_fn'?"),
    (["input.train.fn=input_fns.digit"], "no 'digit' in input_fns ("),
    (["input.eval.fn=input fns.x"], "input.eval.fn=input fns.x is not a dotted name. Use package.module or"),
    (["model_dir=/proc/nope"], "cannot make the output directory: "),
    (["-m", "model_dir=x", "train.max_steps=1,2"], "model_dir=x with --multirun: the runs would overwrite each other."),
]


REFUSE_ALL = """
import contextlib, io, json, os, pathlib, sys
from runner import app

results = []
for number, arguments in enumerate(json.load(sys.stdin)):
    pathlib.Path(str(number)).mkdir()
    os.chdir(str(number))
    sys.argv = ["runner", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = app.run_command_line()
    left = [str(path) for path in pathlib.Path(".").rglob("outputs/*")]
    results.append((code, said.getvalue(), left, [name for name in ("tensorflow", "mlflow") if name in sys.modules]))
    os.chdir("..")
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, list[str], list[str]]]:
    """What became of each of BAD: exit code, stderr, directories left behind, heavy modules imported.

    All in one fresh process: a start for each would take half a minute, and in this one TensorFlow may be loaded.
    """
    cases = json.dumps([arguments for arguments, _ in BAD])
    result = subprocess.run(
        [sys.executable, "-c", REFUSE_ALL], cwd=tmp_path_factory.mktemp("bad"), input=cases, capture_output=True,
        text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return [tuple(case) for case in json.loads(result.stdout.splitlines()[-1])]  # after what Hydra says of a sweep


@pytest.mark.parametrize("number", range(len(BAD)), ids=[" ".join(arguments) for arguments, _ in BAD])
def test_a_bad_config_is_refused_with_one_message(
    number: int, refusals: list[tuple[int, str, list[str], list[str]]]
) -> None:
    arguments, message = BAD[number]
    code, said, left, imported = refusals[number]
    assert code == 2
    assert message in said
    assert all(line.startswith("runner: ") for line in said.splitlines())  # nothing but the message
    assert imported == []
    if "-m" not in arguments:
        assert left == []  # no directory for a run that never was


def run_module(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


def test_the_module_exits_with_2_and_is_fast(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run_module("++train.max_stps=5", cwd=tmp_path)
    assert time.monotonic() - began < 3.0  # 0.4 s on a quiet machine
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


def test_hydra_full_error_adds_the_traceback(tmp_path: Path) -> None:
    result = run_module("++train.max_stps=5", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("runner: train.max_stps=5: there is no key")


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info", "defaults"]])
def test_questions_about_the_config_are_answered(flags: list[str], tmp_path: Path) -> None:
    result = run_module(*flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "strategy" in result.stdout
    assert not list(tmp_path.iterdir())
