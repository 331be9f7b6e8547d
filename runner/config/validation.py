"""Checks of settings that are each allowed but cannot work together.

Each check yields its mistakes, the most important one for the user first; `check` raises the first of all.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.config import schema
from runner.config.metric_names import CHECKPOINT_METRICS, evaluation_prefix, is_of_evaluation, rank_by
from runner.config.mistakes import (
    ConfigError,
    Conflict,
    Empty,
    Malformed,
    NoEffect,
    NotAllowed,
    NotFound,
    NotSet,
    OutOfRange,
    Twice,
)  # fmt: skip
from runner.config.saved_config import FILE
from runner.config.schema import PREDICTION_FORMATS, Config, WarmStartConfig
from runner.config.settings.limits import as_typed
from runner.config.settings.metric_rules import EarlyStopping, KeepBest, ReduceLROnPlateau
from runner.config.settings.step_range import parse_step_range
from runner.config.strategy_validation import check_strategies
from runner.system.files import find_runner_file, read_json
from runner.system.redaction import masked_value
from runner.system.suggestions import did_you_mean
from runner.system.urls import url_mistake

SHOWN_RUNS = 3
"""How many of the newest runs a message lists."""


def check(config: Config) -> None:
    """Check a config whose values have each been checked alone.

    Raises:
      ConfigError: settings exclude each other or would have no effect, or the command lacks a setting that it needs.
    """
    for find_mistakes in (
        _check_folders,
        _check_new,
        _check_diff,
        _check_functions,
        _check_model_dir,
        check_strategies,
        _check_inputs,
        _check_train_input,
        _check_evaluation,
        _check_checkpoint,
        _check_tracking,
        _check_chosen_checkpoint,
        _check_export,
        _check_warm_start,
        _check_rules,
        _check_evaluator,
        _check_prediction,
        _check_profile,
        _check_inline,
        _check_training,
        _check_debug,
        _check_eager,
    ):
        for mistake in find_mistakes(config):
            raise mistake


def check_metric_names(values: Mapping[str, Any], evaluations: Iterable[str]) -> None:
    """Check that the metric of each rule names its evaluation. The rule's constructor, which comes next, checks this,
    too, but knows neither the key nor the evaluations of the run.

    Args:
      values: the tree of a config.
      evaluations: names of the run's evaluations.

    Raises:
      ConfigError: a metric does not.
    """
    for rule in (EarlyStopping.key, ReduceLROnPlateau.key, KeepBest.key):
        key = f"{rule}.metric"
        metric = schema.value_at(values, key)
        if metric is not None and "/" not in metric:
            raise _without_evaluation(key, metric, evaluations)


def newest_runs(outputs: Path) -> list[Path]:
    """Return the newest runs in `outputs`, sweeps' jobs included, ordered by their last save, newest first."""
    files = [*outputs.glob("*/checkpoint"), *outputs.glob("sweeps/*/*/checkpoint")]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent for file in files[:SHOWN_RUNS]]


def compile_pattern(key: str, pattern: str, shown: str | None = None) -> re.Pattern[str]:
    """Compile a regular expression.

    Args:
      key: the setting, for messages.
      pattern: the expression.
      shown: the expression as the user wrote it; None: `pattern`.

    Raises:
      ConfigError: the expression does not compile.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise Malformed(f"{key}: {shown or pattern!r} is not a regular expression: {error}.") from error


def checkpoint_in(key: str, config: Config) -> str | None:
    """Return the path of the checkpoint that a command is to read; None: the newest.

    Args:
      key: eval.checkpoint, predict.checkpoint or export.checkpoint.
      config: the config.

    Raises:
      ConfigError: the checkpoint does not exist.
    """
    chosen: str | None = operator.attrgetter(key)(config)
    if chosen is None:
        return None
    model_dir = Path(str(config.model_dir))
    by_step = _checkpoints_by_step(model_dir)
    if chosen == "best":
        return str(model_dir / _best_in(key, config, list(by_step.values())))
    candidates = [Path(chosen), model_dir / chosen]
    if chosen.isdecimal() and int(chosen) in by_step:
        # First: a number is a step, even where a file has that name.
        candidates.insert(0, model_dir / by_step[int(chosen)])
    for path in candidates:
        if Path(f"{path}.index").is_file():
            return str(path)
    listed = ", ".join(by_step.values()) or "none"
    raise NotFound(
        f"{key}={chosen}: there is no such checkpoint. {model_dir} has: {listed}. Allowed: null (the newest), best, "
        "a step, a path."
    )


_CHECKPOINTS = {"eval.checkpoint": "evaluate", "predict.checkpoint": "predict", "export.checkpoint": "export"}
"""Key -> the command that reads it."""


def _checkpoints_by_step(model_dir: Path) -> dict[int, str]:
    """Return global step -> name of its checkpoint in `model_dir`, the oldest first."""
    names: dict[int, str] = {}
    for file in model_dir.glob("*.index"):
        name = file.stem
        if re.fullmatch(r"[^.]*\.ckpt-\d+", name):
            names[int(name.rpartition("-")[2])] = name
    return dict(sorted(names.items()))


def _best_in(key: str, config: Config, names: Sequence[str]) -> str:
    """Return the best of the checkpoints `names` (oldest first) by the metric of `checkpoint.keep_best`.

    Raises:
      ConfigError: that metric is not set, or no checkpoint has it.
    """
    rule = config.checkpoint.keep_best
    model_dir = Path(str(config.model_dir))
    values: dict[str, float] = {}
    listed: list[str] = []
    for name in names:
        metrics = read_json(find_runner_file(model_dir / f"{name}{CHECKPOINT_METRICS}")) or {}
        if rule.metric in metrics:
            values[name] = metrics[rule.metric]
        listed.append(f"{name} ({', '.join(sorted(metrics)) or 'not evaluated'})")
    there = f"In {model_dir} are: {'; '.join(listed) or 'none'}."
    if rule.metric is None:
        raise NotSet(f"{key}=best needs checkpoint.keep_best.metric, which is null. Set it, or use a step. {there}")
    ranked = rank_by(values, rule.metric, rule.mode)
    if not ranked:
        raise NotFound(f"{key}=best: no checkpoint has the metric {rule.metric} (checkpoint.keep_best.metric). {there}")
    return ranked[0]


def _check_folders(config: Config) -> Iterator[ConfigError]:
    """Yield a message for each URL that cannot be written to: `hdfs://bucket` would become a folder named `hdfs:`."""
    # The folders of a run may be in an object store; those of other commands are on this machine.
    is_of_a_run = config.command not in schema.ENVIRONMENT_COMMANDS or config.command == "cluster_info"
    for key in ("model_dir", "export.dir", "sweep.dir", "predict.output", "new.path"):
        may_be_in_store = key in ("model_dir", "export.dir", "sweep.dir") and is_of_a_run
        folder = operator.attrgetter(key)(config)
        mistake = url_mistake(f"{key}=", folder, may_be_store=may_be_in_store)
        if mistake:
            yield NotAllowed(mistake)


def _check_new(config: Config) -> Iterator[ConfigError]:
    """Yield a message about command=new without new.path, or new.path without command=new."""
    path = config.new.path
    if config.command == "new" and not path:
        yield NotSet("command=new needs the folder of the new project. Set new.path=my_project")
    if config.command != "new" and path is not None:
        yield NoEffect(
            f"new.path={path} has no effect with command={config.command}, only with command=new. Remove it."
        )


def _check_diff(config: Config) -> Iterator[ConfigError]:
    """Yield a message about command=diff without diff.runs, or diff.runs without command=diff."""
    runs = config.diff.runs
    if config.command == "diff" and len(runs or ()) < 2:
        two = newest_runs(Path("outputs"))[:2]
        example = "outputs/a,outputs/b"
        if len(two) == 2:
            example = ",".join(map(str, two))
        yield NotSet(f"command=diff compares two runs or more. Set diff.runs=[{example}]")
    if config.command != "diff" and runs is not None:
        yield NoEffect(f"diff.runs={as_typed(runs)} has no effect without command=diff.")


def _check_functions(config: Config) -> Iterator[ConfigError]:
    """Yield a message for each function that the command calls and that is not set."""
    command = config.command
    inputs = config.input
    if command in schema.ENVIRONMENT_COMMANDS:
        return
    if command != "inspect" and not config.model.fn:
        yield NotSet("model.fn is not set. Use package.module or package.module.function, or choose model=...")
    if command in schema.TRAINING_COMMANDS and not inputs.train.fn:
        yield NotSet(f"input.train.fn is not set, but command={command} trains. Choose input=... or set it.")
    if command == "predict" and not inputs.predict.fn:
        yield NotSet("input.predict.fn is not set, but command=predict needs it. Choose input=... or set it.")
    if command == "evaluate" and not inputs.evals:
        yield NotSet("input.eval is empty, but command=evaluate needs at least one evaluation.")
    if command not in schema.EVALUATING_COMMANDS:
        return
    advice = "" if command == "evaluate" else " Set it, or turn evaluation off: input.eval=null."
    for name, block in inputs.evals.items():
        if not block.fn:
            yield NotSet(f"{schema.eval_key(name)}.fn is not set.{advice}")


def _check_model_dir(config: Config) -> Iterator[ConfigError]:
    """Yield a message about a missing or wrong model_dir, for commands that read an earlier run."""
    if config.command in (*schema.TRAINING_COMMANDS, *schema.ENVIRONMENT_COMMANDS):
        return
    runs = ", ".join(map(str, newest_runs(Path("outputs"))))
    newest = f" The newest: {runs}." if runs else ""
    if not config.model_dir:
        yield NotSet(f"command={config.command} reads an earlier run. Set model_dir=outputs/<run>.{newest}")
    directory = Path(str(config.model_dir))
    shown = f"model_dir={config.model_dir}"
    if not directory.is_dir():
        yield NotFound(f"{shown}: there is no such folder.{newest}")
    if not (directory / "checkpoint").exists() and not any(directory.glob("*.index")):
        yield NotFound(f"{shown}: it has no checkpoint for command={config.command}.{newest}")


def _check_inputs(config: Config) -> Iterator[ConfigError]:
    """Yield a message for each value in an input's `params` that the input's own key of the same name would replace."""
    blocks = {"input.train": config.input.train, "input.predict": config.input.predict}
    blocks |= {schema.eval_key(name): block for name, block in config.input.evals.items()}
    for key, block in blocks.items():
        for name in ("batch_size", "shuffle_seed"):
            setting = getattr(block, name)
            if setting is not None and block.params.get(name, setting) != setting:
                yield NoEffect(
                    f"{key}.params.{name}={block.params[name]} has no effect, because {key}.{name}={setting} replaces "
                    f"it. Set {key}.{name} instead."
                )


def _check_train_input(config: Config) -> Iterator[ConfigError]:
    """Yield messages about settings that contradict a requested exact resume, or that the strategy does not support."""
    yield from _check_data_service(config)
    if config.command not in schema.TRAINING_COMMANDS:
        return
    block = config.input.train
    if block.options.deterministic is False:
        # The saved state of an iterator goes on with the order of its start; a count needs one order in all starts.
        for key, value in _settings_that_need_order(config, "counted"):
            yield Conflict(
                f"input.train.options.deterministic=false with {key}={value}: the examples come in a different order "
                "each time. Unset one of them."
            )
    if block.prefetch_to_device is None:
        return
    given = f"input.train.prefetch_to_device={block.prefetch_to_device}"
    if config.checkpoint.input_state == "saved":
        yield Conflict(
            f"{given} with checkpoint.input_state=saved: the state of batches on a device cannot be saved. Unset one "
            "of them."
        )
    strategy = config.strategy.name
    if strategy not in ("default", "one_device"):
        yield Conflict(f"{given} does not work with strategy={strategy}, whose replicas share one batch. Unset it.")


def _settings_that_need_order(config: Config, input_state: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each setting that asks for an exact resume, which an input whose order varies cannot give.

    Args:
      config: the config.
      input_state: the value of `checkpoint.input_state` that counts as such.
    """
    if config.run.deterministic:
        yield "run.deterministic", "true"
    if config.checkpoint.input_state == input_state:
        yield "checkpoint.input_state", input_state


def _check_data_service(config: Config) -> Iterator[ConfigError]:
    """Yield messages about a tf.data service that cannot be reached, or does not work with other settings."""
    block = config.input.train
    service = block.service
    if service.address is None:
        yield from _check_unused("input.train.service", service, "input.train.service.address")
    elif not re.fullmatch(r"[\w+]+://(\[[^\]\s]+\]|[^\s:/\[\]]+):\d+", service.address):
        yield Malformed(
            f"input.train.service.address={service.address} is not the address of a dispatcher. Write protocol, host "
            "and port: grpc://host:5050"
        )
    if service.job_name == "":
        yield Empty("input.train.service.job_name='' is empty. Use a name, or null.")
    if not service.address or config.command not in schema.TRAINING_COMMANDS:
        return
    # input_state=counted is allowed: the service warns that a resumed run may skip other batches.
    for key, value in _settings_that_need_order(config, "saved"):
        yield Conflict(
            f"input.train.service.address={service.address} with {key}={value}: a service returns elements in no "
            "fixed order, and has no position to save. Unset one of them."
        )
    if config.strategy.name in ("parameter_server", "tpu"):
        yield Conflict(
            f"input.train.service.address={service.address} does not work with strategy={config.strategy.name}. Unset "
            "it, or use another strategy."
        )
    if block.shard != "auto":
        yield NoEffect(
            f"input.train.shard={block.shard} has no effect with input.train.service.address: the service distributes "
            "the elements among the workers. Set input.train.shard=auto."
        )


def _check_evaluation(config: Config) -> Iterator[ConfigError]:
    """Yield messages about names of evaluations, and about settings of evaluations that the run does not have."""
    names = {schema.eval_key(name): name for name in config.input.evals if name}
    if config.eval.name is not None:
        names[f"eval.name={config.eval.name}"] = config.eval.name
    for shown, name in names.items():
        if not re.fullmatch(r"[\w.-]+", name):
            yield Malformed(f"{shown}: the name of an evaluation may contain letters, digits, '_', '-' and '.'.")
    yield from _check_evaluation_name(config)
    if config.eval.at_start and not config.input.evals:
        yield NoEffect("eval.at_start=true, but input.eval is empty: there is nothing to evaluate.")
    if config.eval.hooks and not config.input.evals:
        yield NoEffect("eval.hooks is set, but input.eval is empty: there is nothing to evaluate.")


def _check_evaluation_name(config: Config) -> Iterator[ConfigError]:
    """Yield messages about an `eval.name` without effect, and evaluations of other data that would replace the run's
    metrics.
    """
    name = config.eval.name
    if name is not None and config.command != "evaluate":
        yield NoEffect(
            f"eval.name={name} works with command=evaluate only; training names an evaluation by its block: "
            f"input.eval.{name}."
        )
    if config.command != "evaluate":
        return
    evaluations_of_run = _evaluations_of_run(Path(str(config.model_dir)))
    for own_name, block in config.input.evals.items():
        recorded = config.eval.recorded_name(own_name)
        block_of_run = evaluations_of_run.get(recorded)
        if block_of_run is None:
            continue
        changed = [key for key in ("fn", "params") if block_of_run.get(key) != getattr(block, key)]
        if changed:
            yield Conflict(
                f"{schema.eval_key(own_name)}.{changed[0]} differs from the setting of the run in {config.model_dir}, "
                f"so the new metrics would replace the run's own {evaluation_prefix(recorded)}/... Choose a name that "
                "the run does not have, such as eval.name=test"
            )


def _evaluations_of_run(model_dir: Path) -> Mapping[str, Any]:
    """Return name -> block of `input.eval` in the config.yaml of the run in `model_dir`; {} if it has none."""
    # Not `read_saved`: the command has already read the file by it, and its warnings would be printed twice.
    file = model_dir / FILE
    if not file.is_file():
        return {}
    saved: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    evals: Mapping[str, Any] = (saved.get("input") or {}).get("eval") or {}
    # An evaluation may itself have the name `fn`: then a block stands there, and no function.
    is_one_block = "fn" in evals and not isinstance(evals["fn"], Mapping)
    return {"": evals} if is_one_block else evals


def _check_checkpoint(config: Config) -> Iterator[ConfigError]:
    """Yield messages about save_steps and save_secs that are both set, and settings of keep_best without a metric.

    An explicit save_secs that equals its default cannot be noticed.
    """
    steps = config.checkpoint.save_steps
    secs = config.checkpoint.save_secs
    if steps is not None and secs not in (None, schema.CheckpointConfig().save_secs):
        yield Conflict(
            f"checkpoint.save_steps={steps} and checkpoint.save_secs={secs} exclude each other. "
            "Set one of them to null."
        )
    yield from _check_metric_of("checkpoint.keep_best", config.checkpoint.keep_best, config)


def _check_chosen_checkpoint(config: Config) -> Iterator[ConfigError]:
    """Yield a message about a chosen checkpoint that does not exist, or that the command does not read."""
    for key, command in _CHECKPOINTS.items():
        chosen = operator.attrgetter(key)(config)
        if config.command == command:
            checkpoint_in(key, config)
        elif chosen is not None:
            instead = f", not with {config.command}"
            if config.command in schema.TRAINING_COMMANDS:
                instead = "; training resumes from the newest checkpoint"
            yield NoEffect(f"{key}={chosen} works with command={command} only{instead}.")


def _check_export(config: Config) -> Iterator[ConfigError]:
    """Yield messages about export settings that have no effect, or do not work with others."""
    yield from _check_exporters(config)
    yield from _check_registration(config)
    if config.export.best.metric is not None:
        yield from _check_metric("export.best.metric", config.export.best.metric, config)


def _check_exporters(config: Config) -> Iterator[ConfigError]:
    """Yield messages about a wrong list of exporters, and about what they export and by which evaluation."""
    export = config.export
    exporters = export.exporters or []
    if len(set(exporters)) < len(exporters):
        yield Twice(f"export.exporters=[{','.join(exporters)}] names an exporter twice. Remove one of them.")
    if export.exporters is not None and not exporters:
        yield Empty("export.exporters=[] exports nothing. Use null.")
    if "best" not in exporters:
        yield from _check_unused("export.best", export.best, "best in export.exporters")
    if config.exports and not export.receiver_fn and not config.export_input[1].fn:
        yield NotSet(
            f"command={config.command} exports a model whose requests have the features of an input, but no input is "
            "set. Set input.eval.fn, or export.receiver_fn."
        )
    evaluates = config.command in schema.EVALUATING_COMMANDS and config.input.evals
    if "best" in exporters and config.command in schema.MODEL_COMMANDS and not evaluates:
        yield Conflict(
            f"export.exporters contains best, but command={config.command} does not evaluate. Remove it, or use "
            "command=train_and_evaluate."
        )


def _check_registration(config: Config) -> Iterator[ConfigError]:
    """Yield messages about the name and the alias under which MLflow's registry is to have the exported models."""
    name = config.export.register
    alias = config.export.alias
    if name is not None and not config.tracking.has_mlflow:
        yield Conflict(
            f"export.register={name} is a name in MLflow's registry, but "
            f"tracking.backend={as_typed(config.tracking.backend)} does not record in MLflow. Set tracking=mlflow, or "
            "export.register=null."
        )
    if name is not None and not config.exports and config.command in schema.MODEL_COMMANDS:
        yield NoEffect(f"export.register={name} has no effect without export.exporters, such as [final].")
    if alias is None:
        return
    if name is None:
        yield NoEffect(f"export.alias={alias} has no effect without export.register, the name of the registered model.")
    if alias == "latest" or re.fullmatch(r"v\d+", alias):
        yield NotAllowed(f"export.alias={alias}: MLflow reserves this name. Use another one, such as champion.")


def _check_warm_start(config: Config) -> Iterator[ConfigError]:
    """Yield messages about a warm start from a missing checkpoint, and regular expressions that do not compile."""
    warm_start = config.train.warm_start
    yield from _check_warm_start_patterns(warm_start)
    if warm_start.checkpoint is None:
        for name in ("include", "rename", "vocabularies"):
            if getattr(warm_start, name):
                yield NoEffect(f"train.warm_start.{name} has no effect without train.warm_start.checkpoint.")
        return
    if warm_start.include is not None and not (warm_start.include or warm_start.vocabularies):
        yield Empty("train.warm_start.include=[] selects nothing. Use null for every trainable variable.")
    # A run that resumes does not read these files, which may be gone.
    is_new = not config.model_dir or not (Path(config.model_dir) / "checkpoint").exists()
    reads_files = is_new and config.command in schema.TRAINING_COMMANDS
    yield from _check_vocabularies(warm_start, reads_files=reads_files)
    if reads_files:
        yield from _check_warm_start_checkpoint(warm_start.checkpoint)


def _check_warm_start_patterns(warm_start: WarmStartConfig) -> Iterator[ConfigError]:
    """Yield messages about replacements that use groups which their patterns do not have.

    Raises:
      ConfigError: a pattern does not compile.
    """
    for index, pattern in enumerate(warm_start.include or ()):
        compile_pattern(f"train.warm_start.include[{index}]", pattern)
    for new, old in warm_start.rename.items():
        groups = compile_pattern("train.warm_start.rename", new).groups
        used = [int(number) for number in re.findall(r"\\(\d+)", old)]
        largest = max(used, default=0)
        if largest > groups:
            yield Malformed(f"train.warm_start.rename: {old!r} uses group {largest}, but {new!r} has {groups} groups.")


def _check_vocabularies(warm_start: WarmStartConfig, *, reads_files: bool) -> Iterator[ConfigError]:
    """Yield messages about files of tokens that are not set, or not there although this command `reads_files`."""
    for name, vocabulary in warm_start.vocabularies.items():
        for setting in ("new_vocab", "old_vocab"):
            key = f"train.warm_start.vocabularies.{name}.{setting}"
            file = getattr(vocabulary, setting)
            if not file:
                yield NotSet(f"{key} is not set. It must be a file with one token per line, in the order of the rows.")
            if reads_files and "://" not in file and not Path(file).is_file():
                yield NotFound(f"{key}={file}: there is no such file.")


def _check_warm_start_checkpoint(checkpoint: str) -> Iterator[ConfigError]:
    """Yield a message about a checkpoint that does not exist; one in an object store is not looked for."""
    if "://" in checkpoint:
        return
    path = Path(checkpoint)
    if path.is_dir():
        if not _has_checkpoint(path):
            yield NotFound(f"train.warm_start.checkpoint={path}: there is no checkpoint in that folder.")
    elif not Path(f"{path}.index").exists():
        yield NotFound(f"train.warm_start.checkpoint={path}: there is no such checkpoint, and no such folder.")


def _has_checkpoint(folder: Path) -> bool:
    """Report whether a folder is a model_dir, or has a checkpoint or the variables of a SavedModel."""
    for pattern in ("checkpoint", "*.index", "variables/variables.index"):
        if any(file.is_file() for file in folder.glob(pattern)):
            return True
    return False


def _check_rules(config: Config) -> Iterator[ConfigError]:
    """Yield messages about metrics of early stopping, reduce_lr_on_plateau and a sweep that do not exist, or come too
    late.
    """
    for rule in (config.train.early_stopping, config.train.reduce_lr_on_plateau):
        if rule.metric is not None and config.command == "train":
            yield NoEffect(f"{rule.key}.metric={rule.metric} {_NOT_EVALUATED}")
        yield from _check_metric_of(rule.key, rule, config)
    if config.sweep.metric is not None:
        yield from _check_metric("sweep.metric", config.sweep.metric, config, of_training=True)
    seeds = config.sweep.seeds
    if seeds is not None and not seeds:
        yield Empty("sweep.seeds=[]: there is no seed. Set sweep.seeds=[1,2,3], or null for run.seed alone.")
    if seeds and len(set(seeds)) < len(seeds):
        yield Twice(f"sweep.seeds={as_typed(seeds)}: a seed is there twice. Each repeats the run with another one.")
    metric = config.train.reduce_lr_on_plateau.metric
    if metric is not None and config.cluster.evaluator and config.command == "train_and_evaluate":
        yield Conflict(
            f"train.reduce_lr_on_plateau.metric={metric} with cluster.evaluator=true: an evaluator is behind "
            "training, so a resumed run would reduce its learning rate at other steps. Set cluster.evaluator=false."
        )


def _check_evaluator(config: Config) -> Iterator[ConfigError]:
    """Yield a message if cluster.evaluator would have nothing to evaluate.

    The commands that read a run are not checked: their config is that of the run's training.
    """
    if config.cluster.evaluator and config.command == "train":
        yield NoEffect(f"cluster.evaluator=true {_NOT_EVALUATED}")
    if config.cluster.evaluator and config.command == "train_and_evaluate" and not config.input.evals:
        yield NoEffect("cluster.evaluator=true, but input.eval is empty: there is nothing to evaluate.")


def _check_prediction(config: Config) -> Iterator[ConfigError]:
    """Yield messages about a file of predictions without a known format, and an empty list of predictions."""
    output = config.predict.output
    keys = config.predict.keys
    if output is not None and not output.endswith(tuple(PREDICTION_FORMATS)):
        known = ", ".join(f"{suffix} ({name})" for suffix, name in PREDICTION_FORMATS.items())
        yield Malformed(f"predict.output={output}: its suffix selects the format. Use one of {known}.")
    if keys is not None and not keys:
        yield Empty("predict.keys=[] leaves nothing to write. Use null for all predictions.")


def _check_tracking(config: Config) -> Iterator[ConfigError]:
    """Yield messages about unknown trackers, and a tracking.uri that MLflow cannot open."""
    yield from check_backend("tracking.backend=", config.tracking.backend)
    uri = config.tracking.uri or ""
    shown = masked_value("tracking.uri", uri)
    if uri.startswith("sqlite:") and not uri.startswith("sqlite:///"):
        yield Malformed(
            f"tracking.uri={shown}: write a database file as sqlite:///relative.db or sqlite:////absolute.db."
        )
    if "://" not in uri and uri.endswith((".db", ".sqlite", ".sqlite3")):
        yield Malformed(
            f"tracking.uri={shown} is a path, not a URI. Write a database file as sqlite:///{shown.removeprefix('file:')}."
        )
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        yield Malformed(f"tracking.uri={shown} has no scheme. Use http://{shown}.")


def check_backend(written: str, value: Any, end: str = "") -> Iterator[ConfigError]:
    """Yield the mistakes in a `tracking.backend`.

    Args:
      written: the text of the user's setting up to the value: `tracking.backend=`.
      value: the value.
      end: the text after the value, such as a closing parenthesis.
    """
    shown = f"{written}{as_typed(value)}{end}"
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        yield Empty(f"{shown} names no tracker. Use none to record only in model_dir.")
    names: list[str] = []
    for entry in entries:
        if not _is_tracker(entry):
            yield Malformed(f"{shown}: {as_typed(entry)} is not a tracker. {_TRACKERS_IN_WORDS}")
            return
        takes_params = isinstance(entry, Mapping)
        name = entry["fn"] if takes_params else entry
        names.append(name)
        if "." in name:
            continue
        if takes_params:
            said = f"{name} is not the dotted name of a class, and only a class takes params."
            yield Malformed(f"{shown}: {said} {_TRACKERS_IN_WORDS}")
        elif name not in schema.TRACKERS:
            hint = did_you_mean(name, schema.TRACKERS)
            yield NotAllowed(f"{written}{name}{end} is not allowed.{hint} {_TRACKERS_IN_WORDS}")
    if "none" in names and len(names) > 1:
        yield Conflict(f"{shown}: none cannot be combined with other trackers. Remove it.")
    if len({*names}) < len(names):
        yield Twice(f"{shown} names a tracker twice. Remove one of them.")


def _is_tracker(entry: Any) -> bool:
    """Report whether an entry of `tracking.backend` is a name, or {fn: name, params: {}}."""
    if isinstance(entry, str):
        return True
    if not isinstance(entry, Mapping) or not {*entry} <= {"fn", "params"}:
        return False
    return isinstance(entry.get("fn"), str) and isinstance(entry.get("params"), Mapping | None)


_TRACKERS_IN_WORDS = (
    "Allowed: mlflow, csv, none, the dotted name of a class, {fn: package.module.Class, params: {}}, or a list of them."
)


def _check_profile(config: Config) -> Iterator[ConfigError]:
    """Yield a message about a run.profile that is not a range of steps, or lies beyond the last step of training."""
    profile = config.run.profile
    max_steps = config.train.max_steps
    if profile is None:
        return
    try:
        last = parse_step_range(profile).last
    except ValueError as error:
        raise Malformed(f"run.profile={profile}: {error}.") from error
    if config.command in schema.TRAINING_COMMANDS and max_steps is not None and last > max_steps:
        yield OutOfRange(f"run.profile={profile} goes beyond train.max_steps={max_steps}. Profile earlier steps.")


def _check_inline(config: Config) -> Iterator[ConfigError]:
    """Yield messages about settings that need several processes, if run.inline allows only one."""
    if config.run.inline and config.is_cluster:
        yield Conflict(
            f"run.inline=true with strategy={config.strategy.name}: each task needs its own process. Unset "
            "run.inline, or debug with strategy=default."
        )
    if config.run.inline and config.run.freeze_secs is not None:
        yield Conflict(
            f"run.inline=true with run.freeze_secs={config.run.freeze_secs}: no other process can notice that it is "
            "frozen. Unset one of them."
        )
    if config.run.inline and config.cluster.evaluator and config.command == "train_and_evaluate":
        yield Conflict(
            "run.inline=true with cluster.evaluator=true: the evaluator needs its own process. Unset one of them."
        )


def _check_training(config: Config) -> Iterator[ConfigError]:
    """Yield messages about a strategy with which train.jit is not supported, and a norm that is not logged."""
    if config.train.jit and config.strategy.name not in _OF_ONE_PROCESS:
        reason = "it compiles steps of one process"
        if config.strategy.name == "tpu":
            reason = "a TPU compiles every step"
        yield Conflict(
            f"train.jit=true does not work with strategy={config.strategy.name}: {reason}. Set train.jit=false, or use "
            f"{', '.join(_OF_ONE_PROCESS)}."
        )
    if config.train.log_gradient_norm and config.train.log_steps is None:
        yield NoEffect("train.log_gradient_norm=true has no effect with train.log_steps=null. Set train.log_steps=100.")


def _check_debug(config: Config) -> Iterator[ConfigError]:
    """Yield messages about settings with which run.debug=nan cannot work.

    They make values infinite on purpose, or they hide operations from the check.
    """
    if config.run.debug != "nan" or config.command not in schema.TRAINING_COMMANDS:
        return
    if config.train.jit:
        yield Conflict("run.debug=nan with train.jit=true: XLA replaces the operations to check. Set train.jit=false.")
    if config.train.precision == "mixed_float16":
        yield Conflict(
            "run.debug=nan with train.precision=mixed_float16: finding its loss scale produces gradients that are not "
            "finite. Set train.precision=float32."
        )
    if config.strategy.name not in _OF_ONE_PROCESS:
        yield Conflict(
            f"run.debug=nan does not work with strategy={config.strategy.name}, because it checks the steps of one "
            f"process only. Use {', '.join(_OF_ONE_PROCESS)}."
        )


def _check_eager(config: Config) -> Iterator[ConfigError]:
    """Yield messages about settings that an eager step does not support."""
    if not config.run.eager or config.command not in schema.TRAINING_COMMANDS:
        return
    if config.strategy.name != "default":
        yield Conflict(
            f"run.eager=true with strategy={config.strategy.name}: eager steps use one device. Use strategy=default."
        )
    if config.run.debug == "nan":
        yield Conflict("run.eager=true with run.debug=nan, which needs the graph of a step. Unset one of them.")
    for setting in dataclasses.fields(config.train):
        key = f"train.{setting.name}"
        value = getattr(config.train, setting.name)
        if setting.metadata.get("not_eager") and value != setting.default:
            works = f"{key}={as_typed(setting.default)}"
            yield Conflict(f"run.eager=true with {key}={as_typed(value)}, which needs a graph. Set {works}.")


_OF_ONE_PROCESS = ("default", "one_device", "mirrored", "central_storage")
"""Strategies with which `train.jit` and `run.debug=nan` work."""


# --- parts that several checks share ---------------------------------------------------------------------------------

_NOT_EVALUATED = "has no effect with command=train, which does not evaluate. Use command=train_and_evaluate."


def _check_metric_of(key: str, settings: Any, config: Config) -> Iterator[ConfigError]:
    """Yield messages about a metric that no evaluation reports, or settings that need the metric if it is not set."""
    if settings.metric is None:
        yield from _check_unused(key, settings, f"{key}.metric")
    else:
        yield from _check_metric(f"{key}.metric", settings.metric, config)


def _check_unused(key: str, settings: Any, needed: str) -> Iterator[ConfigError]:
    """Yield a message for each of `settings` that is set; they have no effect because `needed` is not set."""
    for setting in dataclasses.fields(settings):
        value = getattr(settings, setting.name)
        # A field without a default is the needed one: a script must give it, a config has null.
        if setting.default is not dataclasses.MISSING and value != setting.default:
            yield NoEffect(f"{key}.{setting.name}={value} has no effect without {needed}.")


def _check_metric(key: str, metric: str, config: Config, *, of_training: bool = False) -> Iterator[ConfigError]:
    """Yield a message about the name of a metric that the run does not report.

    Args:
      key: the key that holds the name, for messages.
      metric: the name.
      config: the config, whose evaluations are searched.
      of_training: a metric of training is allowed, too: `train/loss`.
    """
    prefixes = [evaluation_prefix(name) for name in config.input.evals]
    prefix, slash, quantity = metric.partition("/")
    if not slash:
        yield _without_evaluation(key, metric, config.input.evals)
    elif not is_of_evaluation(metric) and not of_training:
        first = prefixes[0] if prefixes else "eval"
        yield NotFound(f"{key}={metric}: {prefix!r} is not an evaluation. Write {first}/{quantity}.")
    elif re.fullmatch(r"eval(_.*)?", prefix) and prefix not in prefixes:
        there = ", ".join(f"{known}/..." for known in prefixes) or "none, since input.eval is empty"
        yield NotFound(f"{key}={metric}: there is no such evaluation. There are: {there}.")


def _without_evaluation(key: str, metric: str, evaluations: Iterable[str]) -> NotFound:
    """Return the error for a metric without its evaluation; it suggests the first of the run's `evaluations`."""
    prefix = evaluation_prefix(next(iter(evaluations), ""))
    near = metric.removeprefix("val_")  # Keras' name for metrics of an evaluation
    return NotFound(f"{key}={metric}: prefix the metric with its evaluation: {prefix}/{near}.")
