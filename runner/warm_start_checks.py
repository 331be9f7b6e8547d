"""What of `train.warm_start` cannot work, as far as that can be told without TensorFlow."""

from __future__ import annotations

import re
from pathlib import Path

from runner.config import TRAINING_COMMANDS, Config, ConfigError


def check_warm_start(config: Config) -> None:
    """Refuses what is not there and what does not compile, before minutes are spent on the way to it."""
    warm_start = config.train.warm_start
    for index, pattern in enumerate(warm_start.include or ()):
        _compiled(f"train.warm_start.include[{index}]", pattern)
    for new, old in warm_start.rename.items():
        groups = _compiled("train.warm_start.rename", new).groups
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


def _compiled(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key}: {pattern!r} is no regular expression: {error}.") from error


def _is_saved_model(path: Path) -> bool:
    return (path / "variables" / "variables.index").is_file()


def _check_file(key: str, file: str | None, *, begins: bool) -> None:
    if not file:
        raise ConfigError(f"{key} is not set. It is a file with a token a line, in the order of the rows.")
    if begins and "://" not in file and not Path(file).is_file():
        raise ConfigError(f"{key}={file}: there is no such file.")
