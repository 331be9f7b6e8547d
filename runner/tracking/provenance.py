"""Tags that say where a run came from. MLflow does not set them for runs that are created by MlflowClient."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from runner.system.redaction import NO_LIST, SecretList, mask_text, masked_override
from runner.tracking.run_lock import LOCK_FILE


def tags_of_this_process(
    directory: Path, argv: Sequence[str], url: str | None = None, listed: SecretList = NO_LIST
) -> dict[str, str]:
    """Return the tags of a run in `directory` (that of `url`) that was started by `argv`, with secrets masked.

    The tags `host` and `lock` let another process find out whether this one is alive.

    Args:
      listed: what the config of the run lists as secret.
    """
    command = shlex.join(masked_override(argument, listed) for argument in argv)
    tags = {
        "mlflow.source.name": "runner",
        "mlflow.source.type": "LOCAL",
        "command": mask_text(command, listed.values),  # once more, because a script may have `--password x`
        "model_dir": url or str(directory),
        "host": platform.node(),
        "lock": str(directory / LOCK_FILE),
        "version.python": platform.python_version(),
    }
    for package in ("tensorflow", "keras", "mlflow", "estimator-runner"):
        with suppress(metadata.PackageNotFoundError):
            tags[f"version.{package}"] = metadata.version(package)
    commit = _git("rev-parse", "HEAD")
    if commit:
        tags["mlflow.source.git.commit"] = commit
        tags["git.dirty"] = str(bool(_git("status", "--porcelain", "--untracked-files=no"))).lower()
    return tags


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the working directory; None without git or outside of a repository."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None
