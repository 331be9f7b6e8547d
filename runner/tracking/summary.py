"""The outcome of a run, and summary.json: the facts that users and sweeps read, in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config.schema import TRAINING_RUNS, Config
from runner.system.child_process import describe_exit
from runner.system.exit_codes import FAILED, FINISHED, INTERRUPTED, USER_ERROR
from runner.system.files import read_json, write_json
from runner.system.redaction import mask_text
from runner.system.standard_streams import say
from runner.tracking.workers import Start, slowest_start, step_times_summary

SUMMARY_FILE = "summary.json"

_TYPES = {
    "metrics": dict,
    "phases": dict,
    "starts": dict,
    "exports": list,
    "unread_params": list,
    "checkpoint": str,
    "status": str,
    "global_step": int,
    "command": str,
    "error": str,
    "settings_id": str,
    "seed": int,
}

_FIELDS_OF_READERS = ("metrics", "predictions", "exports", "mlflow_run_id")
"""Fields of the run's summary that a command may add although it only reads the run."""

_FIELDS_OF_RESULT = ("global_step", "metrics", "steps_per_sec", "input_bound", "examples", "num_replicas", "devices",
              "peak_memory", "checkpoint", "predictions", "stopped_early", "error", "answer")  # fmt: skip

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "SCHEDULED", "running": "RUNNING"}
"""Status of a run -> MLflow's status of it. MLflow draws KILLED as a failure (a red cross, as FAILED), and SCHEDULED as
a run that goes on later, which an interrupted one does."""


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
      code: its exit code.
      status: running, finished, failed or interrupted (resumable).
      error: the error in one line; None if there was none.
      facts: what the tasks noted in their journals, from `facts_in`; `answer` is the object of run.output=json.
      was_killed: the run failed because it was asked to stop before it could save; MLflow calls it KILLED.
    """

    code: int
    status: str
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    was_killed: bool = False


STILL_RUNNING = Outcome(FAILED, "running")


def outcome_of(code: int, stop_requested: bool, facts: Mapping[str, Any], reason: str = "") -> Outcome:
    """Return the outcome of a run from the exit code of the task that decided it.

    Args:
      code: that exit code.
      stop_requested: the run was asked to stop.
      facts: facts from the journals; `error` is the last error that a task noted.
      reason: what went wrong, or who was asked to stop, if known; '': taken from the journal or the exit code.
    """
    facts = dict(facts)
    noted = facts.pop("error", None)
    if code == FINISHED:
        return Outcome(FINISHED, "finished", None, facts)
    if code == INTERRUPTED:
        return Outcome(INTERRUPTED, "interrupted", None, {**facts, "interrupted_by": reason or None})
    if stop_requested and facts.get("checkpoint"):  # the task failed while it stopped, but the run can be resumed
        return Outcome(INTERRUPTED, "interrupted", None, facts)
    if stop_requested:
        return Outcome(FAILED, "failed", noted or "stopped before it could save", facts, was_killed=True)
    error = reason or noted
    if code == USER_ERROR:
        return Outcome(USER_ERROR, "failed", error, facts)
    return Outcome(FAILED, "failed", error or f"the task {describe_exit(code)}", facts)


def facts_in(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary's facts from a run's journals: global_step, checkpoint, metrics, phases, ...

    `exported` holds the lines about exports, `error` the last error, `answer` what an unrecorded command found. Of
    several lines about the same fact, the last one counts; phases and repeated steps are added.
    """
    facts: dict[str, Any] = {"phases": {}, "exported": []}
    for line in lines:
        match line.get("event"):
            case "checkpoint":  # a run that failed may have no `result`
                facts.update(global_step=line.get("step"), checkpoint=line.get("path"))
            case "repeated":
                facts["repeated_steps"] = facts.get("repeated_steps", 0) + int(line["twice"])
            case "unread_params":
                facts["unread_params"] = line["keys"]
            case "exported":
                facts["exported"].append(line)
            case "phase":
                name = str(line["name"])
                secs = facts["phases"].get(name, 0.0) + float(line["secs"])
                facts["phases"][name] = round(secs, 3)
            case "built" | "result" | "error":
                facts.update({name: line[name] for name in _FIELDS_OF_RESULT if name in line})
    facts["exports"] = [str(line["path"]) for line in facts["exported"]]
    return facts


def summary_of(
    outcome: Outcome, config: Config, run_id: str | None, secrets: set[str], settings_id: str | None = None
) -> dict[str, Any]:
    """Return the summary of a run, without its secrets.

    Args:
      run_id: MLflow's id of the run; None: not known yet.
      settings_id: what it has in common with runs that repeat it; None: not known.
    """
    facts = outcome.facts
    starts: Mapping[str, Start] = facts.get("starts", {})
    slowest = slowest_start(starts)
    return {
        "command": config.command,
        "status": outcome.status,
        "error": mask_text(outcome.error, secrets) if outcome.error else None,
        "interrupted_by": facts.get("interrupted_by"),
        "stopped_early": facts.get("stopped_early"),
        "global_step": facts.get("global_step"),
        "metrics": facts.get("metrics", {}),
        "steps_per_sec": facts.get("steps_per_sec"),
        "input_bound": facts.get("input_bound"),
        "examples": facts.get("examples"),
        "phases": facts.get("phases", {}),
        "starts": {task: asdict(start) for task, start in starts.items()},
        "slowest_start": asdict(slowest) if slowest is not None else None,
        "step_times": step_times_summary(facts.get("step_times", {})),
        "worker_steps": facts.get("worker_steps"),
        "unread_params": facts.get("unread_params", []),
        "settings_id": settings_id,
        "seed": config.run.seed,
        "strategy": config.strategy.name,
        "num_replicas": facts.get("num_replicas"),
        "devices": facts.get("devices"),
        "peak_memory": facts.get("peak_memory"),
        "checkpoint": facts.get("checkpoint"),
        "predictions": facts.get("predictions"),
        "exports": facts.get("exports", []),
        "restarts": facts.get("restarts", 0),
        "repeated_steps": facts.get("repeated_steps", 0),
        "lost_workers": facts.get("lost_workers", []),
        "mlflow_run_id": run_id,
    }


def after_reading(run_summary: Mapping[str, Any], reader_summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run that a command has read: the run's own, with the results of that command.

    Args:
      run_summary: the run's summary so far; empty if nothing was trained in its folder.
      reader_summary: the summary of the command.
    """
    if run_summary.get("command") not in TRAINING_RUNS:
        return dict(reader_summary)
    found = {name: reader_summary[name] for name in _FIELDS_OF_READERS if reader_summary.get(name) is not None}
    metrics = run_summary.get("metrics") or {}
    is_same = _name_of(run_summary.get("checkpoint")) == _name_of(reader_summary.get("checkpoint"))
    # Results for another checkpoint stay out of the run's summary; they are in the command's own summary.
    if is_same or not run_summary.get("checkpoint"):
        metrics = {**metrics, **found.get("metrics", {})}
    found["metrics"] = metrics
    return {**run_summary, **found}


def _name_of(checkpoint: Any) -> str:
    return Path(str(checkpoint)).name


def read_summary(path: Path, *, is_quiet: bool = False) -> dict[str, Any]:
    """Return the summary in the file `path`; {} if there is none. Values of a wrong type are left out, with a message.

    Args:
      is_quiet: print no message, because another reader of the file does.
    """
    summary = read_json(path) or {}
    for name, expected_type in _TYPES.items():
        value = summary.get(name)
        if value is None:
            continue
        is_right = isinstance(value, expected_type)
        if name == "exports" and is_right:
            is_right = all(isinstance(export, str) for export in value)
        if not is_right:
            if not is_quiet:
                say(f"{path}: {name}={value!r} is ignored, because a run writes no value of this type there.")
            del summary[name]
    return summary


def write_summary(model_dir: Path, summary: Mapping[str, Any], name: str = SUMMARY_FILE) -> None:
    """Write a summary into the run's folder."""
    write_json(model_dir / name, summary)
