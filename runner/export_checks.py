"""What does not go together in the settings of exports."""

from __future__ import annotations

from pathlib import Path

from runner.config import EVALUATING_COMMANDS, TRAINING_COMMANDS, Config, ConfigError


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
