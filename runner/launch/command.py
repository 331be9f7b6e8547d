"""What the jobs of a command share: its words, environment, stop requests and exit code."""

from __future__ import annotations

import secrets
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config import user_code
from runner.config.hydra import prepare
from runner.config.hydra_mistakes import mistake_in
from runner.launch.stop_requests import StopRequests
from runner.launch.task_starter import TaskStarter
from runner.system.exit_codes import FINISHED
from runner.system.redaction import mask_text, secrets_of_overrides
from runner.system.standard_streams import FULL_ERROR, say


@dataclass
class Command:
    """One command. A launcher other than Hydra's basic one pickles it for the process of each job.

    Attributes:
      argv: the command line, for the record.
      env: environment of the tasks.
      stops: receives the signals of the command.
      starter: starts the tasks of a run; None: each run has its own starter, and a sweep one for its jobs.
      start: identifies this start of a sweep.
      is_copy: this process runs one job, for another launcher.
      code: the worst exit code of its jobs so far.
      error: the error of a job that ends the command, and with it a sweep; None: there was none.
      mistake: the message about the last job's config, or the error with which it ended.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    stops: StopRequests = field(default_factory=StopRequests)
    starter: TaskStarter | None = None
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    is_copy: bool = False
    code: int = FINISHED
    error: Exception | None = None
    mistake: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {"argv": self.argv, "env": self.env, "start": self.start}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state, is_copy=True)  # type: ignore[misc]
        user_code.add_to_path(Path.cwd())
        prepare()

    def add_exit_code(self, code: int) -> None:
        """Take the exit code of a job into account."""
        self.code = max(self.code, code)

    def say(self, error: Exception) -> str:
        """Report an error of a job, and return the message. Jobs of a sweep with the same mistake report it once."""
        self.mistake = say_error(error, self.env, self.mistake)
        return self.mistake


def say_error(error: Exception, env: Mapping[str, str], already: str = "") -> str:
    """Print an error as one message on stderr and return it; with HYDRA_FULL_ERROR=1 also print the traceback.

    Args:
      already: the previous message. It is not printed twice in a row.
    """
    if env.get(FULL_ERROR) == "1":
        trace = "".join(traceback.format_exception(error))
        say(mask_text(trace.rstrip("\n"), secrets_of_overrides(sys.argv[1:])))
    mistake = str(mistake_in(error, sys.argv[1:]))
    message = mask_text(mistake, secrets_of_overrides(sys.argv[1:]))
    if message != already:
        say(f"runner: {message}")
    return message
