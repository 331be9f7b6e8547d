"""The config: every shipped file composes, and every mistake is named before TensorFlow is imported."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from runner.config import hydra, parsing, schema
from runner.config.mistakes import Conflict, Malformed, NoEffect, NotAllowed, NotFound, NotSet, UnknownKey, WrongType
from runner.config.schema import STRATEGY_OPTIONS, Config, ConfigError
from runner.config.settings.limits import as_typed
from runner.config.strategy_validation import next_accumulation
from runner.config.validation import newest_runs
from tests.support.command_line import CommandLine
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name not in ("experiment", "local")
)
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))


@functools.cache
def composer(cwd: Path) -> hydra.Composer:
    hydra.prepare()
    return hydra.Composer(str(CONF))


def composed(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What Hydra makes of the command line `overrides`, resolved."""
    config = composer(Path.cwd()).job(overrides)
    ours = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    return OmegaConf.to_container(ours, resolve=True)  # type: ignore[return-value]


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
    assert path.read_text().startswith("# ")
    if path.parent.name == "experiment":
        return
    for key, comment in _comments(path):
        # The inputs of evaluation and prediction repeat params that the train input above them explains.
        is_repeated = path.parent.name == "input" and key.startswith(("eval.params.", "predict.params."))
        assert comment or is_repeated, f"{path}: {key} has no comment"


def test_keys_outside_of_the_groups_have_comments() -> None:
    comments = dict(_comments(CONF / "runner.yaml"))
    assert all(command in comments["command"] for command in schema.COMMANDS)
    assert "null: a new directory" in comments["model_dir"]
    assert set(_written("", "runner")) - {"defaults", "hydra"} == {"command", "model_dir", "vars"}


def test_every_key_of_the_schema_is_in_a_file() -> None:
    tree = schema.to_tree(Config())
    for group in ("cluster", "run", "train", "eval", "checkpoint", "export", "predict", "sweep"):
        assert set(_leaves(_written(group, "default"))) == set(_leaves(tree[group])), group
    assert set(_leaves(_written("input", "custom")["train"])) == set(_leaves(tree["input"]["train"]))
    assert set(_leaves(_written("tracking", "mlflow"))) == set(_leaves(tree["tracking"]))
    for name, options in STRATEGY_OPTIONS.items():
        assert set(_written("strategy", name)) == {"name", *options}
    assert {key for options in STRATEGY_OPTIONS.values() for key in options} | {"name"} == set(tree["strategy"])


def test_the_files_of_every_group_hold_the_defaults_of_the_schema() -> None:
    tree = schema.to_tree(Config())
    for group in ("cluster", "run", "eval", "checkpoint", "export", "predict", "sweep"):
        assert _written(group, "default") == tree[group], group
    assert _written("train", "default") == {**tree["train"], "max_steps": 1000}  # the shipped example ends
    assert _written("tracking", "mlflow") == tree["tracking"]


def _written(group: str, option: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CONF / group / f"{option}.yaml").read_text()))


def _leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield from _leaves(value, f"{at}{key}.") if isinstance(value, dict) and value else (f"{at}{key}",)


def _comments(path: Path) -> Iterator[tuple[str, str]]:
    """(dotted key, the comment over it) of each key of a config file."""
    above: list[str] = []
    parents: list[str] = []
    for line in path.read_text().splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip("# "))
            continue
        if line.strip():
            depth = (len(line) - len(line.lstrip())) // 2
            parents = [*parents[:depth], line.strip().partition(":")[0]]
            yield ".".join(parents), " ".join(above)
        above = []


def test_the_default_config_says_what_it_trains() -> None:
    config = parsed()
    assert config.command == "train_and_evaluate"
    assert config.model_dir is None
    assert config.model.fn == "model_fns.digits"
    assert list(config.input.evals) == [""]
    assert config.input.evals[""].fn == "input_fns.digits"
    assert config.strategy.name == "default"
    assert config.eval_strategy.name is None


def test_the_schema_takes_any_parameter_of_a_model_and_an_input() -> None:
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


def test_named_evaluations_are_checked_like_a_single_one(messages: Messages) -> None:
    tree = composed()
    tree["input"]["eval"] = {"val": {"fn": "a.b", "shard": "file"}}
    with messages.raised(NotAllowed):
        parsing.parse(tree)
    tree["input"]["eval"] = {"val": 3}
    with messages.raised(UnknownKey):
        parsing.parse(tree)


def test_settings_beside_named_evaluations_hold_for_each_of_them() -> None:
    config = parsed("input.eval.val.batch_size=8", "input.eval.test.params.flat=true", "input.eval.shard=off")
    assert list(config.input.evals) == ["val", "test"]
    assert {block.fn for block in config.input.evals.values()} == {"input_fns.digits"}
    assert {block.shard for block in config.input.evals.values()} == {"off"}
    assert [block.batch_size for block in config.input.evals.values()] == [8, 256]
    assert [block.params["flat"] for block in config.input.evals.values()] == [False, True]
    assert parsing.parse(schema.to_tree(config)) == config


def test_a_run_may_have_no_evaluation(tmp_path: Path) -> None:
    config = parsed("input.eval=null")
    assert config.input.evals == {}
    schema.save(config, tmp_path / "config.yaml")
    assert parsing.load(tmp_path / "config.yaml") == config


def test_a_saved_config_loads_as_it_was(tmp_path: Path) -> None:
    config = parsed("strategy=mirrored", "strategy.virtual_devices=2", "model.params.mine=[1,2]", "train.nan=ignore")
    schema.save(config, tmp_path / "config.yaml")
    assert parsing.load(tmp_path / "config.yaml") == config


def test_flattens_to_dotted_names() -> None:
    flat = schema.flatten(schema.to_tree(parsed("model.params.deep.er=1")))
    assert flat["model.params.deep.er"] == 1
    assert flat["input.eval.batch_size"] == 256
    assert flat["strategy.name"] == "default"


@pytest.mark.slow
@pytest.mark.processes
def test_any_one_mistake_is_refused_with_a_message_that_names_its_key() -> None:
    command = [sys.executable, "-m", "tests.support.bad_overrides", "--count", "50", "--seed", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout.split()[0]) == (0, "50"), result.stdout + result.stderr


@pytest.fixture(scope="module")
def default_tree() -> dict[str, Any]:
    return composed()


def run_module(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


@pytest.mark.processes
def test_the_module_exits_with_2(tmp_path: Path, messages: Messages) -> None:
    result = run_module("++train.max_stps=5", cwd=tmp_path)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    messages.same(f"exit {result.returncode}", result.stderr)


@pytest.mark.processes
@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4",
         "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "4"},
    ],
    ids=["here", "TF_CONFIG", "Slurm"],
)  # fmt: skip
def test_a_batch_that_does_not_divide_over_the_workers_of_the_environment_is_refused(
    env: dict[str, str], tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    result = command_line("strategy=multi_worker", "input.train.batch_size=63", "model_dir=run", cwd=tmp_path, **env)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_fewer_workers_are_refused_where_the_environment_starts_them(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    given = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    asked = ("strategy=multi_worker", "cluster.min_workers=1", "input.train.shard=examples", "model_dir=run")
    result = command_line(*asked, cwd=tmp_path, TF_CONFIG=given)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "asked",
    [
        "strategy=multi_worker cluster.num_workers=4 cluster.min_workers=1 input.train.batch_size=48 "
        "input.train.shard=examples train.gradient_accumulation=2 strategy.virtual_devices=2",
        "strategy=multi_worker cluster.num_workers=4 cluster.min_workers=3 input.train.batch_size=12 "
        "input.train.shard=examples",
        "strategy=multi_worker cluster.min_workers=2",  # the default
        "command=evaluate strategy=default cluster.min_workers=1 model_dir=run",  # the config is that of a run
    ],
)
def test_a_least_number_of_workers_is_accepted_where_numbers_do_not_depend_on_theirs(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/checkpoint").write_text("")
    assert parsed(*asked.split()).cluster.min_workers is not None


@pytest.mark.parametrize(
    ("number", "batch_size", "num_replicas", "larger"),
    [
        (1, 64, 1, 2),
        (1, 64, 4, 2),
        (8, 64, 4, 16),
        (16, 64, 4, None),
        (4, 12, 1, 12),  # 8 parts would not be even
        (1, 7, 1, 7),
        (7, 7, 1, None),
        (3, 20, 2, 10),
        (1, 2, 2, None),
        (5, None, 2, 10),
    ],
)
def test_smaller_micro_batches_are_twice_as_many_or_the_next_that_are_even(
    number: int, batch_size: int | None, num_replicas: int, larger: int | None
) -> None:
    assert next_accumulation(number, batch_size, num_replicas) == larger


@pytest.mark.parametrize(
    "asked",
    [
        "train.gradient_accumulation=auto input.train.batch_size=7",
        "train.gradient_accumulation=auto strategy=parameter_server",
        "train.gradient_accumulation=auto run.inline=true command=evaluate model_dir=run",  # its config
        "train.gradient_accumulation=auto run.inline=true command=dry_run",
    ],
)
def test_the_number_of_micro_batches_may_be_left_to_the_supervisor(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/checkpoint").write_text("")
    train = parsed(*asked.split()).train
    assert train.finds_accumulation
    assert train.first_accumulation == 1
    monkeypatch.setenv("PARTS", "4")
    by_hand = parsed("train.gradient_accumulation=${oc.env:PARTS}").train
    assert (by_hand.finds_accumulation, by_hand.first_accumulation) == (False, 4)


def test_an_evaluation_on_another_input_takes_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/checkpoint").write_text("")
    schema.save(parsed("input.eval.fn=my.data", "+input.eval.params.path=val.npz"), Path("run/config.yaml"))
    asked = ("command=evaluate", "model_dir=run", "input.eval.fn=my.data")
    own, other = "+input.eval.params.path=val.npz", "+input.eval.params.path=test.npz"
    assert parsed(*asked, own, "input.eval.batch_size=7").eval.recorded_name("") == ""
    with messages.raised(ConfigError):
        parsed(*asked, other)
    with messages.raised(Conflict):
        parsed(*asked[:2], "input.eval.fn=my.other", own)
    assert parsed(*asked, other, "eval.name=test").eval.recorded_name("") == "test"
    named = ("command=evaluate", "model_dir=run", "input.eval.fn=my.data", "+input.eval.a.params.path=1")
    assert parsed(*named, "eval.name=test").eval.recorded_name("a") == "test_a"
    assert set(parsed(*named).input.evals) == {"a"}, "the run has none of that name"
    with messages.raised(NoEffect):
        parsed("eval.name=test")
    with messages.raised(Malformed):
        parsed(*asked, own, "eval.name=a/b")


def test_the_newest_runs_are_named_to_somebody_who_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(["outputs/newest", "outputs/sweeps/a/b", "outputs/older", "outputs/oldest"]):
        Path(run).mkdir(parents=True)
        state = Path(run, "checkpoint")
        state.write_text("")
        os.utime(state, (1000 - age, 1000 - age))
    Path("outputs/never_saved").mkdir()
    assert newest_runs(Path("outputs")) == [Path("outputs/newest"), Path("outputs/sweeps/a/b"), Path("outputs/older")]
    with messages.raised(NotSet):
        parsed("command=predict")
    with messages.raised(NotFound):
        parsed("command=evaluate", "model_dir=outputs/nwest")
    with messages.raised(NotFound):
        parsed("command=inspect", "model_dir=outputs/never_saved")
    assert parsed("command=inspect", "model_dir=outputs/older", "model.fn=null").model_dir == "outputs/older"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["command=train"], ["model.fn", "input.train.fn"]),
        (["command=dry_run"], ["model.fn", "input.train.fn", "input.eval.fn"]),
        (["command=profile_input"], ["model.fn", "input.train.fn"]),
        (["command=evaluate", "model_dir=."], ["model.fn", "input.eval.fn"]),
        (["command=predict", "model_dir=."], ["model.fn", "input.predict.fn"]),
        (["command=inspect", "model_dir=."], []),
    ],
    ids=["train", "dry_run", "profile_input", "evaluate", "predict", "inspect"],
)
def test_a_command_needs_the_functions_that_it_calls_and_no_others(
    overrides: list[str], keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").write_text("")
    given = [f"{key}=a.b" for key in keys]
    config = parsed("model=custom", "input=custom", *overrides, *given)
    assert [key for key, _, _ in config.functions()] == keys
    for key in keys:
        with messages.raised(NotSet):
            parsed("model=custom", "input=custom", *overrides, *(text for text in given if not text.startswith(key)))


def test_what_other_parts_implement_is_let_through() -> None:
    config = parsed(
        "eval.start_delay_secs=30", "eval.at_start=true", "tracking.tensorboard=false", "tracking.system_metrics=true",
        "run.inline=true", "sweep.metric=eval/accuracy", "sweep.mode=max", "sweep.parallel=2", "sweep.dir=/x",
        "predict.output=out.npz", "predict.keys=[classes]", "checkpoint.save_steps=5",
    )  # fmt: skip
    assert config.eval == schema.EvalConfig(start_delay_secs=30, at_start=True)
    assert (config.tracking.tensorboard, config.tracking.system_metrics) == (False, True)
    assert config.sweep == schema.SweepConfig(dir="/x", metric="eval/accuracy", mode="max", parallel=2)
    assert config.predict == schema.PredictConfig(output="out.npz", keys=["classes"])


def test_parameters_may_repeat_what_the_input_says() -> None:
    assert parsed("input.train.params.batch_size=64").input.train.batch_size == 64
    config = parsed("input.train.batch_size=null", "input.train.params.batch_size=8")  # the function's own, per replica
    assert config.input.train.params["batch_size"] == 8


@pytest.mark.processes
def test_hydras_own_launcher_and_sweeper_can_be_chosen(tmp_path: Path) -> None:
    result = run_module("hydra/launcher=basic", "hydra/sweeper=basic", "--cfg", "hydra", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    chosen = yaml.safe_load(result.stdout)["hydra"]
    assert chosen["launcher"]["_target_"].endswith("BasicLauncher")
    assert chosen["sweeper"]["_target_"].endswith("BasicSweeper")


@pytest.mark.processes
def test_hydra_full_error_adds_the_traceback(tmp_path: Path, command_line: CommandLine, messages: Messages) -> None:
    result = command_line("++train.max_stps=5", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert "Traceback" in result.stderr
    messages.same(f"exit {result.returncode}", result.stderr.splitlines()[-1])


@pytest.mark.processes
@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info", "defaults"]])
def test_questions_about_the_config_are_answered(flags: list[str], tmp_path: Path) -> None:
    result = run_module(*flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "strategy" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "place"),
    [("fn: [a\n", "line 2:"), ("fn: a: b\n", "line 1:"), ("- a\n", "mine.yaml")],
    ids=["an open list", "two values", "a list"],
)
def test_a_damaged_file_of_the_users_is_named_with_its_line(
    text: str, place: str, tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(text)
    result = command_line("model=mine", cwd=tmp_path)
    assert place in result.stderr and result.stderr.count("\n") == 1
    messages.same(f"exit {result.returncode}", result.stderr)


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    ["model: [a", "- a", "model: {fn: line}\nnewer: 1", "\udc80"],
    ids=["an open list", "a list", "a newer key", "no text"],
)
def test_a_damaged_config_of_a_run_is_named(
    text: str, tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").touch()
    (tmp_path / "run" / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    result = command_line("command=evaluate", "model_dir=run", cwd=tmp_path)
    assert "Traceback" not in result.stderr
    messages.same(f"exit {result.returncode}", result.stderr)


def test_a_number_in_place_of_a_group_is_named_by_its_key() -> None:
    for name, value in (("train", 5), ("cluster", "x"), ("run", [1])):
        with pytest.raises(WrongType) as raised:
            parsing.parse({**composed(), name: value})
        assert str(raised.value).startswith(f"{name}={as_typed(value)} ")
