"""What does not go together in a config: each setting is allowed, and all of them at once cannot work."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from runner.config.metric_names import evaluation_prefix
from runner.config.schema import (
    ENVIRONMENT_COMMANDS,
    EVALUATING_COMMANDS,
    TRAINING_COMMANDS,
    CheckpointConfig,
    Config,
    ConfigError,
    InputBlock,
    eval_key,
)
from runner.config.step_range import parse_step_range
from runner.config.strategy_validation import check_strategies
from runner.system.redaction import masked_value


def check_warm_start(config: Config) -> None:
    """Refuses what is not there and what does not compile, before minutes are spent on the way to it."""
    warm_start = config.train.warm_start
    for index, pattern in enumerate(warm_start.include or ()):
        compile_pattern(f"train.warm_start.include[{index}]", pattern)
    for new, old in warm_start.rename.items():
        groups = compile_pattern("train.warm_start.rename", new).groups
        wanted = [int(number) for number in re.findall(r"\\(\d+)", old)]
        if wanted and max(wanted) > groups:
            raise ConfigError(
                f"train.warm_start.rename: {old!r} asks for group {max(wanted)}, and {new!r} has {groups}."
            )
    if warm_start.checkpoint is None:
        for name in ("include", "rename", "vocabularies"):
            if getattr(warm_start, name):
                raise ConfigError(f"train.warm_start.{name} has no effect without train.warm_start.checkpoint.")
        return
    if warm_start.include is not None and not (warm_start.include or warm_start.vocabularies):
        raise ConfigError("train.warm_start.include=[] takes nothing. null takes every trainable variable.")
    is_fresh = not config.model_dir or not (Path(config.model_dir) / "checkpoint").exists()
    begins = is_fresh and config.command in TRAINING_COMMANDS
    for name, vocabulary in warm_start.vocabularies.items():
        for setting in ("new_vocab", "old_vocab"):
            _check_file(f"train.warm_start.vocabularies.{name}.{setting}", getattr(vocabulary, setting), begins=begins)
    path = Path(warm_start.checkpoint)
    if begins and "://" not in warm_start.checkpoint:
        if path.is_dir():
            if not (path / "checkpoint").is_file() and not any(path.glob("*.index")) and not _is_saved_model(path):
                raise ConfigError(f"train.warm_start.checkpoint={path}: there is no checkpoint in that folder.")
        elif not Path(f"{path}.index").exists():
            raise ConfigError(f"train.warm_start.checkpoint={path}: there is no such checkpoint, and no such folder.")


def compile_pattern(key: str, pattern: str, shown: str | None = None) -> re.Pattern[str]:
    """Compile a regular expression, written as `shown`, of a setting. Raises: ConfigError: it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key}: {shown or pattern!r} is no regular expression: {error}.") from error


def _is_saved_model(path: Path) -> bool:
    return (path / "variables" / "variables.index").is_file()


def _check_file(key: str, file: str | None, *, begins: bool) -> None:
    if not file:
        raise ConfigError(f"{key} is not set. It is a file with a token a line, in the order of the rows.")
    if begins and "://" not in file and not Path(file).is_file():
        raise ConfigError(f"{key}={file}: there is no such file.")


def check_export(config: Config) -> None:
    """Refuses settings that nothing reads, and the best of what is not evaluated.

    Raises: ConfigError: naming the setting and what to write.
    """
    export = config.export
    exporters = export.exporters or []
    if len(set(exporters)) < len(exporters):
        raise ConfigError(f"export.exporters=[{','.join(exporters)}] names one twice.")
    if export.exporters is not None and not exporters:
        raise ConfigError("export.exporters=[] exports nothing. null says so.")
    for name in ("metric", "mode"):
        if getattr(export.best, name) is not None and "best" not in exporters:
            raise ConfigError(
                f"export.best.{name}={getattr(export.best, name)} has no effect without best in export.exporters."
            )
    if export.checkpoint is not None and config.command in TRAINING_COMMANDS:
        raise ConfigError(
            f"export.checkpoint={export.checkpoint} is for command=export; training exports what it saves."
        )
    if export.checkpoint is not None and config.command == "export":
        checkpoint_in(export.checkpoint, Path(str(config.model_dir)))
    if config.exports and not export.receiver_fn and not config.export_input[1].fn:
        raise ConfigError(
            f"command={config.command} exports a model for requests like the features of an input, and there is none. "
            "Set input.eval.fn, or export.receiver_fn."
        )
    evaluates = config.command in EVALUATING_COMMANDS and config.input.evals
    if "best" in exporters and config.command in TRAINING_COMMANDS and not evaluates:
        raise ConfigError(f"export.exporters has best, and command={config.command} evaluates nothing.")


def checkpoint_in(checkpoint: str, model_dir: Path) -> str:
    """The path of `export.checkpoint`, which is one or a name in `model_dir`. Raises: ConfigError: it is not there."""
    for path in (Path(checkpoint), model_dir / checkpoint):
        if Path(f"{path}.index").exists():
            return str(path)
    names = sorted(file.stem for file in model_dir.glob("*.index") if ".input-" not in file.stem)
    there = ", ".join(names) or "none"
    raise ConfigError(f"export.checkpoint={checkpoint}: there is no such checkpoint. In {model_dir} are: {there}.")


SHOWN_RUNS = 3
"""How many of the newest runs are named to somebody who has to choose one."""


def check(config: Config) -> None:
    """Checks a config whose every value is allowed by itself.

    Raises:
      ConfigError: settings that exclude each other, that would have no effect, or without which the command cannot
        work.
    """
    _check_functions(config)
    _check_model_dir(config)
    check_strategies(config)
    _check_inputs(config)
    _check_evaluation(config)
    _check_checkpoint(config.checkpoint)
    _check_keep_best(config)
    check_export(config)
    if config.export.best.metric is not None:
        _check_metric("export.best.metric", config.export.best.metric, config)
    check_warm_start(config)
    _check_early_stopping(config)
    _check_evaluator(config)
    _check_prediction(config)
    _check_sweep(config)
    _check_tracking(config.tracking.uri)
    _check_profile(config)
    _check_inline(config)
    _check_jit(config)


def newest_runs(outputs: Path) -> list[Path]:
    """The runs in `outputs` that saved last, the newest first; those of sweeps included."""
    files = [*outputs.glob("*/checkpoint"), *outputs.glob("sweeps/*/*/checkpoint")]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent for file in files[:SHOWN_RUNS]]


def _check_functions(config: Config) -> None:
    """That there is a function for all that the command calls."""
    command, input = config.command, config.input
    if command in ENVIRONMENT_COMMANDS:
        return
    if command != "inspect" and not config.model.fn:
        raise ConfigError("model.fn is not set. Give package.module or package.module.function, or choose model=...")
    if command in TRAINING_COMMANDS and not input.train.fn:
        raise ConfigError(f"input.train.fn is not set, and command={command} trains. Choose input=... or set it.")
    if command == "predict" and not input.predict.fn:
        raise ConfigError("input.predict.fn is not set, and command=predict reads it. Choose input=... or set it.")
    if command == "evaluate" and not input.evals:
        raise ConfigError("input.eval is empty, and command=evaluate needs at least one evaluation.")
    for name, block in input.evals.items() if command in EVALUATING_COMMANDS else ():
        if not block.fn:
            without = "" if command == "evaluate" else " Set it, or go without evaluation: input.eval=null."
            raise ConfigError(f"{eval_key(name)}.fn is not set.{without}")


def _check_model_dir(config: Config) -> None:
    """That a command that reads a run has one to read."""
    if config.command in (*TRAINING_COMMANDS, *ENVIRONMENT_COMMANDS):
        return
    runs = ", ".join(map(str, newest_runs(Path("outputs"))))
    newest = f" The newest: {runs}." if runs else ""
    if not config.model_dir:
        raise ConfigError(f"command={config.command} reads what a run left: give model_dir=outputs/<run>.{newest}")
    directory = Path(config.model_dir)
    if not directory.is_dir():
        raise ConfigError(f"model_dir={config.model_dir}: there is no such folder.{newest}")
    if not (directory / "checkpoint").exists() and not any(directory.glob("*.index")):
        raise ConfigError(
            f"model_dir={config.model_dir}: there is no checkpoint in it for command={config.command}.{newest}"
        )


def _check_inputs(config: Config) -> None:
    """Refuses a value in `params` that the setting of the same name would replace."""
    blocks = {"input.train": config.input.train, "input.predict": config.input.predict}
    blocks |= {eval_key(name): block for name, block in config.input.evals.items()}
    for key, block in blocks.items():
        _check_block(key, block)


def _check_block(key: str, block: InputBlock) -> None:
    for name in ("batch_size", "shuffle_seed"):
        setting = getattr(block, name)
        if setting is not None and name in block.params and block.params[name] != setting:
            raise ConfigError(
                f"{key}.params.{name}={block.params[name]} has no effect: {key}.{name}={setting} takes its place. "
                f"Set {key}.{name}."
            )


def _check_evaluation(config: Config) -> None:
    for name in config.input.evals:
        if name and not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"{eval_key(name)}: a name of an evaluation is made of letters, digits, '_', '-' and '.'."
            )
    if config.eval.at_start and not config.input.evals:
        raise ConfigError("eval.at_start=true, and input.eval is empty: there is nothing to evaluate.")


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Refuses two cadences. The default of save_secs cannot be told from nothing: save_steps takes its place."""
    if checkpoint.save_steps is not None and checkpoint.save_secs not in (None, CheckpointConfig().save_secs):
        raise ConfigError(
            f"checkpoint.save_steps={checkpoint.save_steps} and checkpoint.save_secs={checkpoint.save_secs} exclude "
            "each other. Set one of them to null."
        )


def _check_keep_best(config: Config) -> None:
    best = config.checkpoint.keep_best
    if best.metric is not None:
        _check_metric("checkpoint.keep_best.metric", best.metric, config)
        return
    for name, default in (("mode", None), ("max", 1)):
        if getattr(best, name) != default:
            raise ConfigError(
                f"checkpoint.keep_best.{name}={getattr(best, name)} has no effect without checkpoint.keep_best.metric."
            )


def _check_early_stopping(config: Config) -> None:
    settings = config.train.early_stopping
    if settings.metric is None:
        for option in dataclasses.fields(settings):
            if getattr(settings, option.name) != option.default:
                raise ConfigError(
                    f"train.early_stopping.{option.name}={getattr(settings, option.name)} has no effect without "
                    "train.early_stopping.metric."
                )
        return
    if config.command == "train":
        raise ConfigError(
            f"train.early_stopping.metric={settings.metric} has no effect with command=train, which does not evaluate. "
            "Use command=train_and_evaluate."
        )
    _check_metric("train.early_stopping.metric", settings.metric, config)


def _check_evaluator(config: Config) -> None:
    """Refuses an evaluator that has nothing to do. (Commands that read a run begin with the config of its training.)"""
    if not config.cluster.evaluator:
        return
    if config.command == "train":
        raise ConfigError(
            "cluster.evaluator=true has no effect with command=train, which does not evaluate. Use "
            "command=train_and_evaluate."
        )
    if config.command == "train_and_evaluate" and not config.input.evals:
        raise ConfigError("cluster.evaluator=true, and input.eval is empty: there is nothing to evaluate.")


def _check_prediction(config: Config) -> None:
    output, keys = config.predict.output, config.predict.keys
    if output is not None and not output.endswith((".jsonl", ".npz")):
        raise ConfigError(
            f"predict.output={output}: its suffix says what is written. Use a name in .jsonl (JSON Lines) or .npz."
        )
    if keys is not None and not keys:
        raise ConfigError("predict.keys=[] leaves nothing to write. null means all that model_fn predicts.")


def _check_sweep(config: Config) -> None:
    """Refuses to rank by an evaluation that the jobs do not have."""
    if config.sweep.metric is not None:
        _check_metric("sweep.metric", config.sweep.metric, config)


def _check_metric(key: str, metric: str, config: Config) -> None:
    prefixes = [evaluation_prefix(name) for name in config.input.evals]
    prefix, slash, _ = metric.partition("/")
    if not slash:
        near = f"{prefixes[0]}/{metric}" if prefixes else f"eval/{metric}"
        raise ConfigError(f"{key}={metric}: a metric is named with what it belongs to: {near}.")
    if re.fullmatch(r"eval(_.*)?", prefix) and prefix not in prefixes:
        there = ", ".join(f"{known}/..." for known in prefixes) or "none, since input.eval is empty"
        raise ConfigError(f"{key}={metric}: there is no such evaluation. There are: {there}.")


def _check_tracking(uri: str | None) -> None:
    """Refuses the URIs that people write and MLflow cannot open."""
    if uri is None:
        return
    shown = masked_value("tracking.uri", uri)
    if uri.startswith("sqlite:") and not uri.startswith("sqlite:///"):
        raise ConfigError(f"tracking.uri={shown}: a database file is sqlite:///relative.db or sqlite:////absolute.db.")
    if "://" not in uri and uri.endswith((".db", ".sqlite", ".sqlite3")):
        raise ConfigError(
            f"tracking.uri={shown} is a path. A database file is sqlite:///{shown.removeprefix('file:')}."
        )
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        raise ConfigError(f"tracking.uri={shown} has no scheme. Use http://{shown}.")


def _check_profile(config: Config) -> None:
    """Refuses steps that cannot be, and those after the last one of training."""
    if config.run.profile is None:
        return
    try:
        steps = parse_step_range(config.run.profile)
    except ValueError as error:
        raise ConfigError(f"run.profile={config.run.profile}: {error}.") from error
    max_steps = config.train.max_steps
    if config.command in TRAINING_COMMANDS and max_steps is not None and steps.last > max_steps:
        raise ConfigError(
            f"run.profile={config.run.profile} goes beyond train.max_steps={max_steps}. Profile earlier steps."
        )


def _check_inline(config: Config) -> None:
    """Refuses several tasks in the one process of a debugger."""
    if not config.run.inline:
        return
    if config.is_cluster:
        raise ConfigError(
            f"run.inline=true with strategy={config.strategy.name}: each task is a process of its own. Leave it "
            "out, or debug with strategy=default."
        )
    if config.cluster.evaluator and config.command == "train_and_evaluate":
        raise ConfigError("run.inline=true with cluster.evaluator=true, which is a process of its own. Leave one out.")


def _check_jit(config: Config) -> None:
    """Refuses strategies on which the stages of a compiled step were not tried."""
    tried = ("default", "one_device", "mirrored", "central_storage")
    if config.train.jit and config.strategy.name not in tried:
        reason = "a TPU compiles every step" if config.strategy.name == "tpu" else "it compiles steps of one process"
        raise ConfigError(
            f"train.jit=true does not go with strategy={config.strategy.name}: {reason}. Set train.jit=false, or use "
            f"{', '.join(tried)}."
        )
