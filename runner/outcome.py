"""How a run ended: its exit code, its status, and the summary that stays in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config import TRAINING_RUNS, Config
from runner.files import write_json
from runner.launcher import describe_exit
from runner.masking import mask_text

FINISHED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 3
"""Exit codes of the task and of the whole command."""

PEER_LOST = 75
"""Exit code of a task that lost a peer, or its connection to one: it is not at fault, and all are started again."""

SUMMARY_FILE = "summary.json"

_OF_READERS = ("metrics", "predictions", "exports", "mlflow_run_id")
"""What a command that reads a run adds to the run's summary."""

_OF_RESULT = ("built", "result", "error")
_FACTS = ("global_step", "metrics", "steps_per_sec", "examples", "num_replicas", "checkpoint", "predictions",
          "stopped_early")  # fmt: skip


@dataclass
class Outcome:
    """How a task ended.

    Attributes:
      code: our exit code.
      status: running, finished, failed or interrupted (resumable).
      mlflow_status: FINISHED, FAILED or KILLED.
      error: one line; None when there was none.
      facts: what the task noted in its journal: global_step, metrics, steps_per_sec, num_replicas, phases, ...;
        `exported`: its lines on what it exported.
    """

    code: int
    status: str
    mlflow_status: str
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


STILL_RUNNING = Outcome(FAILED, "running", "RUNNING")


def read_outcome(code: int, stop_requested: bool, lines: Sequence[Mapping[str, Any]], reason: str = "") -> Outcome:
    """The end of a run, from the exit code of the task that decided it and from the lines of the chief's journal.

    Args:
      reason: what went wrong, where that is known; '': what the journal or the exit code says. Of an interruption: who
        was asked to stop.
    """
    facts: dict[str, Any] = {"phases": {}, "exported": []}
    for line in lines:
        if line.get("event") == "checkpoint":  # what a run that never comes to its result leaves
            facts.update(global_step=line.get("step"), checkpoint=line.get("path"))
        elif line.get("event") == "repeated":
            facts["repeated_steps"] = facts.get("repeated_steps", 0) + int(line["twice"])
        elif line.get("event") == "exported":
            facts["exported"].append(line)
        elif line.get("event") == "phase":
            name = str(line["name"])
            facts["phases"][name] = round(facts["phases"].get(name, 0.0) + float(line["secs"]), 3)
        elif line.get("event") in _OF_RESULT:
            facts.update({name: value for name, value in line.items() if name in (*_FACTS, "error")})
    facts["exports"] = [str(line["path"]) for line in facts["exported"]]
    noted = facts.pop("error", None)
    error = reason or noted
    if code == FINISHED:
        return Outcome(FINISHED, "finished", "FINISHED", None, facts)
    if code == INTERRUPTED:
        return Outcome(INTERRUPTED, "interrupted", "KILLED", None, {**facts, "interrupted_by": reason or None})
    if stop_requested and facts.get("checkpoint"):
        return Outcome(INTERRUPTED, "interrupted", "KILLED", None, facts)
    if stop_requested:
        return Outcome(FAILED, "failed", "KILLED", noted or "stopped before it could save", facts)
    if code == USER_ERROR:
        return Outcome(USER_ERROR, "failed", "FAILED", error, facts)
    return Outcome(FAILED, "failed", "FAILED", error or f"the task {describe_exit(code)}", facts)


def summary_of(outcome: Outcome, config: Config, run_id: str | None, secrets: set[str]) -> dict[str, Any]:
    """What a person and a sweep want to know of a run. No secret is in it."""
    return {
        "command": config.command,
        "status": outcome.status,
        "error": mask_text(outcome.error, secrets) if outcome.error else None,
        "interrupted_by": outcome.facts.get("interrupted_by"),
        "stopped_early": outcome.facts.get("stopped_early"),
        "global_step": outcome.facts.get("global_step"),
        "metrics": outcome.facts.get("metrics", {}),
        "steps_per_sec": outcome.facts.get("steps_per_sec"),
        "examples": outcome.facts.get("examples"),
        "phases": outcome.facts.get("phases", {}),
        "strategy": config.strategy.name,
        "num_replicas": outcome.facts.get("num_replicas"),
        "checkpoint": outcome.facts.get("checkpoint"),
        "predictions": outcome.facts.get("predictions"),
        "exports": outcome.facts.get("exports", []),
        "restarts": outcome.facts.get("restarts", 0),
        "repeated_steps": outcome.facts.get("repeated_steps", 0),
        "mlflow_run_id": run_id,
    }


def after_reading(of_run: Mapping[str, Any], of_reader: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run that a command has read: as training left it, with what that command has come to.

    Args:
      of_run: so far.
      of_reader: of the command. It is that of the run where nothing was trained, so that the run has none of its own.
    """
    if of_run.get("command") not in TRAINING_RUNS:
        return dict(of_reader)
    found = {name: of_reader[name] for name in _OF_READERS if of_reader.get(name) is not None}
    return {**as_killed(of_run), **found}


def as_killed(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary whose supervisor no longer lives: one that says running could not say otherwise."""
    if summary.get("status") != STILL_RUNNING.status:
        return dict(summary)
    return {**summary, "status": "interrupted", "error": "the supervisor was killed"}


def write_summary(model_dir: Path, summary: Mapping[str, Any], name: str = SUMMARY_FILE) -> None:
    """Leaves a summary in the run's folder."""
    write_json(model_dir / name, summary)
