"""The config: every shipped file composes, and every mistake is named before TensorFlow is imported."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from omegaconf import OmegaConf

from runner.config import hydra, parsing, schema
from runner.config.schema import STRATEGY_OPTIONS, Config, ConfigError
from runner.config.validation import newest_runs
from tests.support.command_line import CommandLine
from tests.support.tiers import slow_but

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


@pytest.mark.long
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


def test_command_and_model_dir_have_comments() -> None:
    comments = dict(_comments(CONF / "runner.yaml"))
    assert all(command in comments["command"] for command in schema.COMMANDS)
    assert "null: a new directory" in comments["model_dir"]
    assert set(_written("", "runner")) - {"defaults", "hydra"} == {"command", "model_dir"}


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


def test_named_evaluations_are_checked_like_a_single_one() -> None:
    tree = composed()
    tree["input"]["eval"] = {"val": {"fn": "a.b", "shard": "file"}}
    with pytest.raises(ConfigError, match=r"^input.eval.val.shard=file is not allowed. Did you mean 'files'\? Allowed"):
        parsing.parse(tree)
    tree["input"]["eval"] = {"val": 3}
    with pytest.raises(ConfigError, match=r"^input.eval.val=3 is neither a setting of an input"):
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


BAD = [
    (["run.profile=10-5"], "run.profile=10-5: step 5 comes before step 10."),
    (["run.profile=0-5"], "run.profile=0-5: the first step is 1."),
    (["run.profile=a-b"], "run.profile=a-b: steps are written as 100-110, or 100 for one."),
    (["run.profile=990-1001"], "run.profile=990-1001 goes beyond train.max_steps=1000. Profile earlier steps."),
    (["run.profile=3", "run.debug=fast_dev"], "run.profile=3: run.debug=fast_dev takes no more than 2 steps."),
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
    (["train.steps_per_loop=null"], "train.steps_per_loop=null is neither 'auto' nor a whole number."),
    (["train.steps_per_loop=1.5"], "train.steps_per_loop=1.5 is neither 'auto' nor a whole number."),
    (["checkpoint.save_secs=${nope}"], "checkpoint.save_secs: Interpolation key 'nope' not found"),
    (["train=5"], "Config group override must be a string or a list. Got int."),
    # values that are not allowed
    (["command=trian"], "command=trian is not allowed. Did you mean 'train'? Allowed: train_and_evaluate, train, eval"),
    (["input.train.shard=file"], "input.train.shard=file is not allowed. Did you mean 'files'? Allowed: auto, files"),
    (["train.nan=stopp"], "train.nan=stopp is not allowed. Did you mean 'stop'? Allowed: stop, rollback,"),
    (["run.progress=loud"], "run.progress=loud is not allowed. Allowed: auto, rich, plain, off."),
    (["strategy.name=mirored"], "strategy.name=mirored is not allowed. Did you mean 'mirrored'?"),
    (["train.max_steps=0"], "train.max_steps=0 must be at least 1."),
    (["cluster.num_workers=200000"], "cluster.num_workers=200000 is too large: at most 10000."),
    (["cluster.num_ps=10001"], "cluster.num_ps=10001 is too large: at most 10000."),
    (["train.steps_per_loop=0"], "train.steps_per_loop=0 must be at least 1."),
    (["input.train.batch_size=-1"], "input.train.batch_size=-1 must be at least 1."),
    (["input.eval.batch_size=0"], "input.eval.batch_size=0 must be at least 1."),
    (["checkpoint.keep_max=0"], "checkpoint.keep_max=0 must be at least 1."),
    (["strategy=mirrored", "strategy.virtual_devices=0"], "strategy.virtual_devices=0 must be at least 1."),
    (["train.clip_global_norm=inf"], "train.clip_global_norm=inf is not finite."),
    (["train.clip_global_norm=nan"], "train.clip_global_norm=nan must be more than 0."),
    (["train.early_stopping.min_delta=inf"], "train.early_stopping.min_delta=inf is not finite."),
    (["checkpoint.keep_every_hours=inf"], "checkpoint.keep_every_hours=inf is not finite."),
    (["train.max_steps=9223372036854775808"], "train.max_steps=9223372036854775808 is too large: at most 92233720368"),
    (["run.seed=1" + "0" * 400], "run.seed=a number of 1329 bits is too large: at most 9223372036854775807."),
    (["cluster.start_timeout_secs=99999999999"], "cluster.start_timeout_secs=99999999999 is too large: at most 2147"),
    (["input.eval.batch_size=99999999999"], "input.eval.batch_size=99999999999 is too large: at most 2147483647."),
    (["train.nan='???'"], "train.nan is required, but not set: a config file has ??? for it. Set train.nan=..."),
    (["cluster.num_workers='???'"], "cluster.num_workers is required, but not set: a config file has ???"),
    (["input.eval.shard='???'"], "input.eval.shard is required, but not set: a config file has ???"),
    (
        ["model_dir=gs://b/x"],
        "model_dir=gs://b/x is a URL, but a run needs a folder of the file system. Mount it (gcsfuse, s3fs, a volume"
        "), and use the path: model_dir=/mnt/b/x",
    ),
    (["model_dir=s3://me:pw@b/x", "command=evaluate"], "model_dir=s3://***@b/x is a URL, but a run needs a folder"),
    (["model_dir=file:///tmp/x"], "Write the path: model_dir=/tmp/x"),
    (["export.dir=hdfs://n/x"], "export.dir=hdfs://n/x is a URL"),
    (["-m", "sweep.dir=gs://b", "train.max_steps=1"], "sweep.dir=gs://b is a URL"),
    # in Hydra's own words once, with a traceback
    (["--resolve"], "runner: The --resolve flag can only be used in conjunction with --cfg or --help."),
    (["--multirun", "--cfg", "job"], "runner: Only one of --run, --multirun, --cfg, --info and"),
    (["-m", "run.seed=1,2", "--help"], "run.seed=1,2 has several values, and what is printed is one config."),
    (["experiment=[1]"], "experiment=[1]: a group takes the names of its files."),
    (["hydra/launcher=[1]"], "hydra/launcher=[1]: a group takes the names of its files."),
    (["input.eval=null", "input.eval.x=3"], "input.eval.x=3"),
    (["strategy=[1,2]"], "strategy=[1,2]: a run takes one option of the group 'strategy'."),
    (["train.max_steps=5", "train.max_steps=abc"], "train.max_steps=abc is neither a whole number nor null."),
    (["train.max_steps=abc", "train.max_steps=5"], "train.max_steps=abc is neither a whole number nor null."),
    # options that are not there
    (
        ["strategy=mirored"],
        "strategy=mirored: no 'mirored' in conf/strategy. Did you mean 'mirrored'? Available: centr",
    ),
    (["experiment=nope"], "experiment=nope: no 'nope' in conf/experiment. Available: "),
    (
        ["tracking=mlfow"],
        "tracking=mlfow: no 'mlfow' in conf/tracking. Did you mean 'mlflow'? Available: csv, mlflow, none.",
    ),
    (
        ["tracking=[mlflow,csv]"],
        "tracking=[mlflow,csv]: a run takes one option of the group 'tracking'. Several trackers are "
        "tracking.backend=[mlflow,csv].",
    ),
    (
        ["strategy=[default,mirrored]"],
        "strategy=[default,mirrored]: a run takes one option of the group 'strategy'. Write strategy=default; to try "
        "each, -m strategy=default,mirrored.",
    ),
    (["-m", "model=[digits,dnn],linear"], "model=[digits,dnn]: a run takes one option of the group 'model'."),
    # what does not go together
    (["strategy.num_packs=2"], "strategy.num_packs=2 has no effect with strategy=default. Its options: none."),
    (["strategy=one_device", "strategy.num_gpus=2"], "strategy.num_gpus=2 has no effect with strategy=one_device."),
    (["eval_strategy.virtual_devices=2"], "eval_strategy.virtual_devices=2 has no effect with eval_strategy=same."),
    (["strategy=one_device", "strategy.devices=[a,b]"], "strategy.devices=['a', 'b']: one_device takes exactly one"),
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
    (["strategy.name=null"], "strategy.name=null: name a strategy, such as default."),
    (["strategy=mirrored", "strategy.devices=[a,a]"], "strategy.devices=['a', 'a'] names a device twice."),
    (["strategy=mirrored", "strategy.devices=[]"], "strategy.devices=[] names no device. Use null for all devices."),
    (
        ["strategy=mirrored", "strategy.num_gpus=2", "strategy.virtual_devices=2"],
        "strategy.num_gpus=2 and strategy.virtual_devices=2 exclude each other. Set one of them to null.",
    ),
    (
        ["strategy=mirrored", "strategy.num_packs=2"],
        "strategy.num_packs=2 has no effect with strategy.cross_device_ops=null. Use cross_device_ops=nccl",
    ),
    (
        ["strategy=mirrored", "strategy.devices=[/gpu:0,/gpu:1,/gpu:2]"],
        "input.train.batch_size=64 does not divide over 3 replicas. Use 63 or 66.",
    ),
    (
        ["strategy=multi_worker", "cluster.resolver=local", "cluster.num_workers=3", "strategy.virtual_devices=2"],
        "input.train.batch_size=64 does not divide over 6 replicas. Use 60 or 66.",
    ),
    (
        [
            "strategy=mirrored",
            "strategy.virtual_devices=2",
            "eval_strategy=mirrored",
            "eval_strategy.virtual_devices=3",
        ],
        "strategy.virtual_devices=2 and eval_strategy.virtual_devices=3 differ, but TensorFlow splits the CPU of a ",
    ),
    (
        ["input.eval=null", "eval.at_start=true"],
        "eval.at_start=true, but input.eval is empty: there is nothing to eval",
    ),
    (
        ["checkpoint.save_steps=5", "checkpoint.save_secs=30"],
        "checkpoint.save_steps=5 and checkpoint.save_secs=30 exclude each other. Set one of them to null.",
    ),
    (
        ["input.train.params.batch_size=32"],
        "input.train.params.batch_size=32 has no effect, because input.train.batch_size=64 replaces it. Set input",
    ),
    (
        ["input.train.params.shuffle_seed=3"],
        "input.train.params.shuffle_seed=3 has no effect, because input.train.shuffle_seed=1 replaces it.",
    ),
    (
        ["input.train.service.address=localhost"],
        "input.train.service.address=localhost is not the address of a dispatcher. Write protocol, host a",
    ),
    (["input.train.service.job_name=x"], "input.train.service.job_name=x has no effect without input.train.service.a"),
    (
        ["input.train.service.address=grpc://h:1", "run.deterministic=true"],
        "input.train.service.address=grpc://h:1 with run.deterministic=true: a service returns",
    ),
    (
        ["input.train.service.address=grpc://h:1", "checkpoint.input_state=saved"],
        "input.train.service.address=grpc://h:1 with checkpoint.input_state=saved: a service returns",
    ),
    (
        ["input.train.service.address=grpc://h:1", "strategy=parameter_server"],
        "input.train.service.address=grpc://h:1 does not work with strategy=parameter_server. Unset it",
    ),
    (
        ["input.train.service.address=grpc://h:1", "input.train.shard=files"],
        "input.train.shard=files has no effect with input.train.service.address: the service distrib",
    ),
    (
        ["input.train.options.deterministic=false", "run.deterministic=true"],
        "input.train.options.deterministic=false with run.deterministic=true: the examples come in a",
    ),
    (
        ["input.train.options.deterministic=false", "checkpoint.input_state=counted"],
        "input.train.options.deterministic=false with checkpoint.input_state=counted: the examples",
    ),
    (["input.train.options.autotune.cpu_budget=0"], "input.train.options.autotune.cpu_budget=0 must be at least 1."),
    (["input.eval.options.private_threadpool_size=0"], "input.eval.options.private_threadpool_size=0 must be at least"),
    (["input.train.prefetch_to_device=0"], "input.train.prefetch_to_device=0 must be at least 1."),
    (
        ["input.train.prefetch_to_device=2", "strategy=mirrored"],
        "input.train.prefetch_to_device=2 does not work with strategy=mirrored, whose replicas share",
    ),
    (["input.eval.'a b'.fn=x.y"], "cannot read"),
    (
        ["+input.eval={a b: {fn: x.y}}"],
        "input.eval.a b: the name of an evaluation may contain letters, digits, '_', '-' an",
    ),
    (["sweep.metric=accuracy"], "sweep.metric=accuracy: prefix the metric with its evaluation: eval/accuracy."),
    (["sweep.metric=eval_x/loss"], "sweep.metric=eval_x/loss: there is no such evaluation. There are: eval/...."),
    (
        ["sweep.metric=eval/loss", "input.eval.val.batch_size=3"],
        "sweep.metric=eval/loss: there is no such evaluation. There are: eval_val/....",
    ),
    (["sweep.metric=eval/loss", "input.eval=null"], "There are: none, since input.eval is empty."),
    (["sweep.mode=mx"], "sweep.mode=mx is not allowed. Did you mean 'max'? Allowed: min, max."),
    (["sweep.parallel=0"], "sweep.parallel=0 must be at least 1."),
    (["tracking.uri=localhost:5000"], "tracking.uri=localhost:5000 has no scheme. Use http://localhost:5000."),
    (
        ["tracking.uri=sqlite://x.db"],
        "tracking.uri=sqlite://x.db: write a database file as sqlite:///relative.db or sqlite:///",
    ),
    (
        ["tracking.backend=mlfow"],
        "tracking.backend=mlfow is not allowed. Did you mean 'mlflow'? Allowed: mlflow, csv, none, the dotted name",
    ),
    (["tracking.backend=[mlflow,cvs]"], "tracking.backend=cvs is not allowed. Did you mean 'csv'? Allowed: mlflow,"),
    (["tracking.backend=null"], "tracking.backend=null: null is not a tracker. Allowed: mlflow, csv, none, the dotted"),
    (["tracking.backend=[]"], "tracking.backend=[] names no tracker. Use none to record only in model_dir"),
    (["tracking.backend=[none,csv]"], "tracking.backend=[none,csv]: none cannot be combined with other trackers."),
    (["tracking.backend=[csv,csv]"], "tracking.backend=[csv,csv] names a tracker twice."),
    (
        ["tracking.backend={fn: csv, params: {}}"],
        "tracking.backend={fn:csv,params:{}}: csv is not the dotted name of a class, and only a class takes params.",
    ),
    (
        ["tracking.backend=[{name: a.b}]"],
        "tracking.backend=[{name:a.b}]: {name:a.b} is not a tracker. Allowed: mlflow, c",
    ),
    (["tracking.backend=nowhere.Mine"], "tracking.backend=nowhere.Mine: no module 'nowhere' in "),
    (["tracking.backend=[csv,{fn: json.Mine}]"], "tracking.backend=json.Mine: "),
    (
        ["export.exporters=[final]", "export.register=m", "tracking.backend=[csv]"],
        "export.register=m is a name in MLflow's registry, but tracking.backend=[csv] does not record in MLflow. Set",
    ),
    # commands that read a run, and what they read
    (["command=evaluate"], "command=evaluate reads an earlier run. Set model_dir=outputs/<run>."),
    (["command=predict"], "command=predict reads an earlier run. Set model_dir=outputs/<run>."),
    (["command=inspect"], "command=inspect reads an earlier run. Set model_dir=outputs/<run>."),
    (["command=inspect", "model_dir=nope"], "model_dir=nope: there is no such folder."),
    (["command=evaluate", "model_dir=."], "model_dir=.: it has no checkpoint for command=evaluate."),
    (["command=predict", "model_dir=.", "input=custom"], "input.predict.fn is not set, but command=predict needs it."),
    (
        ["predict.output=x.csv"],
        "predict.output=x.csv: its suffix selects the format. Use one of .jsonl (JSON Lines",
    ),
    (["predict.keys=[]"], "predict.keys=[] leaves nothing to write. Use null for all predictions."),
    (["predict.keys=classes"], "predict.keys=classes is neither a list nor null."),
    (
        ["input.predict.shard=file"],
        "input.predict.shard=file is not allowed. Did you mean 'files'? Allowed: auto, files",
    ),
    (["++input.predict.batch_size=0"], "input.predict.batch_size=0 must be at least 1."),
    (["++input.predict=3"], "input.predict=3 is not a group of settings."),
    (["input.eval.parms.files=x"], "there is no key 'input.eval.parms'. Did you mean 'input.eval.params'?"),
    (
        ["input.eval.val.batch_sze=3"],
        "there is no key 'input.eval.val.batch_sze'. Did you mean 'input.eval.val.batch_siz",
    ),
    # limits of what comes later are checked all the same
    (["train.ema_decay=1.5"], "train.ema_decay=1.5 must be more than 0 and less than 1."),
    (["train.ema_decay=nan"], "train.ema_decay=nan must be more than 0 and less than 1."),
    (["train.clip_global_norm=0"], "train.clip_global_norm=0.0 must be more than 0."),
    (["train.clip_global_norm=abc"], "train.clip_global_norm=abc is neither a number nor null."),
    (
        ["train.precision=float16"],
        "train.precision=float16 is not allowed. Did you mean 'float32'? Allowed: float32, mixed_bfloat16, mixed_",
    ),
    (
        ["train.early_stopping.mode=mx"],
        "train.early_stopping.mode=mx is not allowed. Did you mean 'max'? Allowed: min,",
    ),
    (["train.early_stopping=5"], "train.early_stopping=5 is not a group of settings."),
    (["++train.early_stopping=5"], "train.early_stopping=5 is not a group of settings."),
    (["train.early_stopping=null"], "train.early_stopping=null is not a group of settings."),
    (
        ["export.exporters=[final,bst]"],
        "export.exporters=bst is not allowed. Did you mean 'best'? Allowed: final, late",
    ),
    (["export.exporters=final"], "export.exporters=final is neither a list nor null."),
    (
        ["cluster.resolver=slrm"],
        "cluster.resolver=slrm is not allowed. Did you mean 'slurm'? Allowed: auto, local, tf_config, slurm, kub",
    ),
    (
        ["eval_strategy.name=tpu"],
        "eval_strategy=tpu with strategy=default: a run can use only one strategy that needs several processes or a T",
    ),
    (
        ["train.gradient_accumulation=3"],
        "input.train.batch_size=64 does not divide over 1 x 3 parts (train.gradient_accumulation=3). Use 63 or 66.",
    ),
    (["run.debug=overfit", "train.max_steps=null"], "train.max_steps=null would never end it. Set train.max_steps."),
    (
        ["strategy=multi_worker", "run.inline=true"],
        "run.inline=true with strategy=multi_worker: each task needs its own",
    ),
    (["run.freeze_secs=60", "run.inline=true"], "run.inline=true with run.freeze_secs=60: no other process can notice"),
    (["run.freeze_secs=5"], "run.freeze_secs=5"),
    (["cluster.evaluator=true", "run.inline=true"], "run.inline=true with cluster.evaluator=true: the evaluator needs"),
    (["cluster.evaluator=true", "command=train"], "cluster.evaluator=true has no effect with command=train"),
    (
        ["cluster.evaluator=true", "input.eval=null"],
        "cluster.evaluator=true, but input.eval is empty: there is nothing",
    ),
    # clusters
    (["cluster.resolver=tpu"], "cluster.resolver=tpu works with strategy=tpu only, not with strategy=default."),
    (["strategy=tpu", "cluster.resolver=slurm"], "cluster.resolver=slurm with strategy=tpu: use auto or"),
    (
        ["cluster.port=80", "cluster.resolver=local"],
        "cluster.port=80 has no effect with cluster.resolver=local, only with slurm and kubernetes.",
    ),
    (
        ["cluster.service=x", "cluster.resolver=slurm"],
        "cluster.service=x has no effect with cluster.resolver=slurm, only",
    ),
    (["cluster.port=70000"], "cluster.port=70000 must be more than 0 and less than 65536."),
    (
        ["strategy=tpu"],
        "strategy=tpu: no TPU is named: strategy.address is null, and none of KUBE_GOOGLE_CLOUD_TPU_ENDPOI",
    ),
    # secrets are not repeated
    (["++tracking.password=hunter2"], "tracking.password=***: there is no key 'tracking.password'."),
    (["tracking.api_key=hunter2"], "tracking.api_key=***: there is no key 'tracking.api_key'."),
    (["++foo={password: hunter2}"], "foo=***: there is no key 'foo'."),
    (["input.eval={token: hunter2}"], "input.eval.token=***: there is no key 'input.eval.token'."),
    (["tracking.tags.password=[hunter2"], "cannot read 'tracking.tags.password=***'"),
    (["tracking.tags.password=hunter2,hunter3"], "tracking.tags.password=*** has several values."),
    (["tracking.uri=[http://me:hunter2@x"], "cannot read 'tracking.uri=[http://***@x'"),
    (["tracking.uri=sqlite://me:hunter2@x"], "tracking.uri=sqlite://***@x: write a database file as"),
    # what cannot be read
    (["train.max_steps=[1"], "cannot read 'train.max_steps=[1'"),
    (["train.max_steps=1,2"], "train.max_steps=1,2 has several values. Add --multirun to try each"),
    # functions that are missing
    (["model=custom"], "model.fn is not set. Use package.module or package.module.function"),
    (["input=custom"], "input.train.fn is not set, but command=train_and_evaluate trains."),
    (["model.fn=null"], "model.fn is not set. Use package.module or package.module.function"),
    (["input.train.fn=null"], "input.train.fn is not set, but command=train_and_evaluate trains."),
    (["input.eval.fn=null"], "input.eval.fn is not set. Set it, or turn evaluation off: input.eval=null."),
    (
        ["command=evaluate", "model_dir=.", "input.eval=null"],
        "input.eval is empty, but command=evaluate needs at least one",
    ),
    (["model.fn=nope.model"], "model.fn=nope.model: no module 'nope' in "),
    (["model.fn=model_fns.digts"], "model.fn=model_fns.digts: no 'digts' in model_fns ("),
    (["model.fn=model_fns"], "model.fn=model_fns is a package. Name a module in it: custom_loop, digits,"),
    (["input.train.fn=input_fns"], "input.train.fn=input_fns is a package. Name a module in it: breast_cancer, csv,"),
    (["model.fn=model_fns/digits.py"], "model.fn=model_fns/digits.py is not a dotted name. Did you mean 'model_fns.d"),
    (["model.fn=model_fns.digits:model_fn"], "is not a dotted name. Did you mean 'model_fns.digits.model_fn'? Use pac"),
    (
        ["run.preemption_notice=model_fns.digits.notice"],
        "digits.py does not define 'notice'. Use model_fns.digits.<func",
    ),
    (["model.fn=model_fns.digits.modelfn"], "does not define 'modelfn'. Did you mean 'model_fn'?"),
    (["input.train.fn=input_fns.digit"], "no 'digit' in input_fns ("),
    (["input.eval.fn=input fns.x"], "input.eval.fn=input fns.x is not a dotted name. Use package.module or"),
    (["model_dir=/proc/nope"], "cannot make the output directory: "),
    (["-m", "model_dir=x", "train.max_steps=1,2"], "model_dir=x with --multirun: all jobs would write to this folder."),
]

# What Hydra's grammar does not take, and its ways to take away.
BAD += [
    (["train.max_steps"], "cannot read 'train.max_steps': write key=value, without spaces around the equals sign."),
    (["model.params.x=a=b"], """inside the shell's quotes: 'model.params.x="a=b"'."""),
    (["model_dir=\u00fcn\u00ef"], """inside the shell's quotes: 'model_dir="\u00fcn\u00ef"'."""),
    (["model.params.db_password=hunter2=x"], "cannot read 'model.params.db_password=***'"),
    (["model.params.x=[1,2"], "cannot read 'model.params.x=[1,2': "),
    (["~train.max_steps"], "train.max_steps cannot be deleted. Use train.max_steps=null to unset it."),
    (["model.params.path='???'"], "model.params.path is required, but not set: a config file has ??? for it."),
    (["hydra.job.chdir=true"], "hydra.job.chdir=true is not supported, because a run stays in the directory"),
    (["tracking.uri=mlflow.db"], "tracking.uri=mlflow.db is a path, not a URI. Write a database file as sqlite:///mlflow.db."),
]  # fmt: skip

# What people bring along from other tools: each message says what to write here.
BAD += [
    (["seed=3"], "seed=3: there is no key 'seed'. Did you mean 'run.seed'?"),
    (["early_stopping.metric=val_loss"], "metric=val_loss: there is no key 'early_stopping'. Did you mean 'train.e"),
    (["train.early_stopping.metric=val_loss"], "prefix the metric with its evaluation: eval/loss."),
    (["checkpoint.keep_best.metric=accuracy"], "prefix the metric with its evaluation: eval/accuracy."),
    (["checkpoint.keep_best.metric=val/acc"], "keep_best.metric=val/acc: 'val' is not an evaluation. Write eval/acc."),
    (["train"], "cannot read 'train': a command is written command=train."),
    (["evalute"], "cannot read 'evalute': write key=value. Did you mean command=evaluate?"),
    (["model_dir", "foo"], "write key=value, without spaces around the equals sign: model_dir=foo"),
    (["--model-dir=foo"], "--model-dir=foo: keys are written without dashes: model_dir=foo."),
    (["--max_steps", "3"], "--max_steps: keys are written without dashes: train.max_steps=3."),
    (["--seed=3", "train.max_steps=2"], "--seed=3: keys are written without dashes: run.seed=3."),
    (["--model.params.password=hunter2"], "keys are written without dashes: model.params.password=***."),
    (["--gpus=2"], "--gpus=2: there is no such option. Did you mean strategy.num_gpus? Keys are"),
    (["--cfg", "jobs"], "argument --cfg/-c: invalid choice: 'jobs'"),
    (["+experiment=wide_deep"], "+experiment=wide_deep: the group 'experiment' exists already. Write experiment=wi"),
    (["+strategy=mirrored"], "+strategy=mirrored: the group 'strategy' exists already. Write strategy=mirrored."),
]  # fmt: skip

# At each depth, with Hydra's way round its own schema.
BAD += [
    ([f"++{key}=1"], f"{key}=1: there is no key '{key}'.")
    for key in (
        "nope", "model.nope", "input.train.nope", "strategy.nope", "train.early_stopping.nope", "tracking.nope",
    )
]  # fmt: skip


class Refusal(NamedTuple):
    """What became of one of BAD."""

    code: int
    said: str
    left: list[str]
    imported: list[str]


REFUSE_ALL = """
import contextlib, gc, io, json, os, pathlib, sys
import yaml
yaml.SafeLoader = yaml.CSafeLoader  # the same of our own files, and ten times as fast
from runner.launch import app, supervisor

gc.disable()  # a tenth of the time, for 50 MB
supervisor.run = None  # a config that is accepted fails, and does not train here
results = []
for number, arguments in enumerate(json.load(sys.stdin)):
    pathlib.Path(str(number)).mkdir()
    os.chdir(str(number))
    sys.argv = ["runner", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = app.run_command_line()
    left = [str(path) for path in pathlib.Path(".").rglob("outputs/*")]
    imported = [name for name in ("tensorflow", "mlflow") if name in sys.modules]
    results.append((code, said.getvalue(), left, imported))
    os.chdir("..")
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def refusals(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Refusal]:
    """What became of those of BAD that are tested now, by number.

    In two fresh processes: a start for each would take a minute, and in this one TensorFlow may be loaded.
    """

    def refused(cases: Sequence[tuple[list[str], str]]) -> list[Refusal]:
        result = subprocess.run(
            [sys.executable, "-c", REFUSE_ALL], cwd=tmp_path_factory.mktemp("bad"), capture_output=True,
            input=json.dumps([arguments for arguments, _ in cases]), text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        said = result.stdout.splitlines()[-1]  # after what Hydra says of a sweep
        return [Refusal(*case) for case in json.loads(said)]

    items: list[Any] = request.session.items
    name = test_a_bad_config_is_refused_with_one_message.__name__
    chosen = sorted(item.callspec.params["number"] for item in items if getattr(item, "originalname", "") == name)
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(refused, ([BAD[number] for number in chosen[part::2]] for part in (0, 1)))
    return {number: one for part, half in enumerate(halves) for number, one in zip(chosen[part::2], half, strict=True)}


@pytest.mark.processes
@pytest.mark.parametrize(
    "number",
    # A start takes 0.2 s: every second one is left to `make test-slow`.
    slow_but(range(len(BAD)), *range(0, len(BAD), 2)),
    ids=[" ".join(arguments) for arguments, _ in BAD],
)
def test_a_bad_config_is_refused_with_one_message(number: int, refusals: dict[int, Refusal]) -> None:
    arguments, message = BAD[number]
    refusal = refusals[number]
    assert refusal.code == 2
    assert message in refusal.said
    said = refusal.said.splitlines()
    assert all(line.startswith("runner: ") for line in said)  # nothing but the message
    assert len(said) == len(set(said))
    assert "hunter2" not in refusal.said
    assert refusal.imported == []  # nobody waits for TensorFlow to read of a mistake
    if "-m" not in arguments:
        assert refusal.left == []  # no directory for a run that never was


@pytest.mark.processes
@pytest.mark.parametrize("count", slow_but((20, 200), 20))
def test_any_one_mistake_is_refused_with_a_message_that_names_its_key(count: int) -> None:
    command = [sys.executable, "-m", "tests.support.bad_overrides", "--count", str(count), "--seed", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == f"{count} command lines, 0 not refused as they should be\n", result.stdout + result.stderr


@pytest.fixture(scope="module")
def default_tree() -> dict[str, Any]:
    return composed()


def run_module(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


@pytest.mark.processes
def test_the_module_exits_with_2(tmp_path: Path) -> None:
    result = run_module("++train.max_stps=5", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "input.train.batch_size=63 does not divide over 2 replicas. Use 62 or 64."),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'},
            "input.train.batch_size=63 does not divide over 2 replicas. Use 62 or 64. TF_CONFIG says that this is",
        ),
        (
            {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4",
             "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "4"},
            "input.train.batch_size=63 does not divide over 4 replicas. Use 60 or 64. SLURM_PROCID=0: task 0 of 4",
        ),
    ],
    ids=["here", "TF_CONFIG", "Slurm"],
)  # fmt: skip
def test_a_batch_that_does_not_divide_over_the_workers_of_the_environment_is_refused(
    env: dict[str, str], message: str, tmp_path: Path, command_line: CommandLine
) -> None:
    result = command_line("strategy=multi_worker", "input.train.batch_size=63", "model_dir=run", cwd=tmp_path, **env)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_an_evaluation_on_another_input_takes_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/checkpoint").write_text("")
    schema.save(parsed("input.eval.fn=my.data", "+input.eval.params.path=val.npz"), Path("run/config.yaml"))
    asked = ("command=evaluate", "model_dir=run", "input.eval.fn=my.data")
    own, other = "+input.eval.params.path=val.npz", "+input.eval.params.path=test.npz"
    assert parsed(*asked, own, "input.eval.batch_size=7").eval.recorded_name("") == ""
    said = (
        "input.eval.params differs from the setting of the run in run, so the new metrics would replace the run's own "
        r"eval/... Choose a name that the run does not have, such as eval.name=test$"
    )
    with pytest.raises(ConfigError, match=said):
        parsed(*asked, other)
    with pytest.raises(ConfigError, match="input.eval.fn differs from the setting of the run in run"):
        parsed(*asked[:2], "input.eval.fn=my.other", own)
    assert parsed(*asked, other, "eval.name=test").eval.recorded_name("") == "test"
    named = ("command=evaluate", "model_dir=run", "input.eval.fn=my.data", "+input.eval.a.params.path=1")
    assert parsed(*named, "eval.name=test").eval.recorded_name("a") == "test_a"
    assert set(parsed(*named).input.evals) == {"a"}, "the run has none of that name"
    with pytest.raises(
        ConfigError, match="eval.name=test works with command=evaluate only; training names an evaluation by"
    ):
        parsed("eval.name=test")
    with pytest.raises(ConfigError, match="eval.name=a/b: the name of an evaluation may contain letters"):
        parsed(*asked, own, "eval.name=a/b")


def test_the_newest_runs_are_named_to_somebody_who_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(["outputs/newest", "outputs/sweeps/a/b", "outputs/older", "outputs/oldest"]):
        Path(run).mkdir(parents=True)
        state = Path(run, "checkpoint")
        state.write_text("")
        os.utime(state, (1000 - age, 1000 - age))
    Path("outputs/never_saved").mkdir()
    assert newest_runs(Path("outputs")) == [Path("outputs/newest"), Path("outputs/sweeps/a/b"), Path("outputs/older")]
    named = "The newest: outputs/newest, outputs/sweeps/a/b, outputs/older.$"
    with pytest.raises(ConfigError, match=f"Set model_dir=outputs/<run>. {named}"):
        parsed("command=predict")
    with pytest.raises(ConfigError, match=f"^model_dir=outputs/nwest: there is no such folder. {named}"):
        parsed("command=evaluate", "model_dir=outputs/nwest")
    with pytest.raises(ConfigError, match=f"it has no checkpoint for command=inspect. {named}"):
        parsed("command=inspect", "model_dir=outputs/never_saved")
    assert parsed("command=inspect", "model_dir=outputs/older", "model.fn=null").model_dir == "outputs/older"


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["command=train"], ["model.fn", "input.train.fn"]),
        (["command=dry_run"], ["model.fn", "input.train.fn", "input.eval.fn"]),
        (["command=evaluate", "model_dir=."], ["model.fn", "input.eval.fn"]),
        (["command=predict", "model_dir=."], ["model.fn", "input.predict.fn"]),
        (["command=inspect", "model_dir=."], []),
    ],
)
def test_a_command_needs_the_functions_that_it_calls_and_no_others(
    overrides: list[str], keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").write_text("")
    given = [f"{key}=a.b" for key in keys]
    config = parsed("model=custom", "input=custom", *overrides, *given)
    assert [key for key, _, _ in config.functions()] == keys
    for key in keys:
        with pytest.raises(ConfigError, match=f"^{key} is not set"):
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
def test_hydra_full_error_adds_the_traceback(tmp_path: Path, command_line: CommandLine) -> None:
    result = command_line("++train.max_stps=5", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("runner: train.max_stps=5: there is no key")


@pytest.mark.processes
@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info", "defaults"]])
def test_questions_about_the_config_are_answered(flags: list[str], tmp_path: Path) -> None:
    result = run_module(*flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "strategy" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fn: [a\n", "/conf/model/mine.yaml, line 2: "),
        ("fn: a: b\n", "/conf/model/mine.yaml, line 1: "),
        ("- a\n", "conf/model/mine.yaml holds no keys with values."),
    ],
)
def test_a_damaged_file_of_the_users_is_named_with_its_line(
    text: str, message: str, tmp_path: Path, command_line: CommandLine
) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(text)
    result = command_line("model=mine", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("runner: ") and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [a", "config.yaml cannot be read: while parsing a flow sequence"),
        ("- a", "config.yaml does not contain a config."),
        ("model: {fn: line}\nnewer: 1", "there is no key 'newer'."),
        ("\udc80", "config.yaml cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_damaged_config_of_a_run_is_named(text: str, message: str, tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").touch()
    (tmp_path / "run" / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    result = command_line("command=evaluate", "model_dir=run", cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    if "newer" in text:
        assert result.stderr.endswith("(in the config of run, changed by the command line)\n")
