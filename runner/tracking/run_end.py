"""How a run ended: four files say it, `write_end` writes them, and whoever asks calls one function of this module.

Three questions have answers of their own:

- Has training ended? An evaluator asks while the run goes on, because the newest checkpoint is then the last one.
  training_ended.json says it, of a script's run too: `write_ending`, `read_ending`.
- How did the run end? run.json decides: `write_end`, `how_run_ended`. summary.json and the journal's last line repeat
  it for programs and for the trackers.
- How did this command end? One that only reads the run (such as evaluate) has a summary and a line in the journal, and
  leaves run.json as it is. So does an end at which the bucket lacks files: `write_end_of_command`.

A process may be killed between any two writes. Then summary.json still says running, or the journal has no end of its
last start. Readers go by run.json at once; `settle` writes what is missing as soon as somebody has the folder's lock.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.checkpoint_files import layout
from runner.config import saved_config
from runner.config.schema import TRAINING_RUNS, ConfigError
from runner.system.files import read_dataclass, remove, write_json
from runner.tracking.curves import CURVES_FILE
from runner.tracking.journal import RUN_ENDED, RUN_STARTED, journals_in, note_of_run, starts_and_ends
from runner.tracking.provenance import code_files, repeat_text
from runner.tracking.run_record import RunRecord
from runner.tracking.summary import MLFLOW_STATUS, STILL_RUNNING, SUMMARY_FILE, read_summary, write_summary

FILE = "training_ended.json"

GENERATION = "RUNNER_GENERATION"
"""Environment variable with the number of the run's start to which a task belongs."""

RUNNING = STILL_RUNNING.status

_KILLED_SUMMARY = {"status": "interrupted", "error": "the supervisor was killed"}
"""What summary.json says of a run whose supervisor was killed before it had decided."""


# --- has training ended? ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainingStatus:
    """The status of training: running, or how it ended.

    Attributes:
      status: running, finished, stopped_early, failed or interrupted (it can be resumed).
      global_step: step of the last checkpoint.
      generation: number of this start of the run; 0: starts are not counted.
      time: when the status was written, in seconds since 1970.
    """

    status: str = RUNNING
    global_step: int = 0
    generation: int = 0
    time: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.status != RUNNING

    @property
    def is_complete(self) -> bool:
        """Report whether training reached its end, so that its last checkpoint is final."""
        return self.status in ("finished", "stopped_early")


def write_ending(model_dir: str | os.PathLike[str], status: str, global_step: int, generation: int) -> None:
    """Write to model_dir that training has ended. The chief calls it, or its supervisor if the chief cannot."""
    ending = TrainingStatus(status, global_step, generation, time.time())
    write_json(Path(model_dir) / FILE, dataclasses.asdict(ending))


def read_ending(model_dir: str | os.PathLike[str], generation: int = 0) -> TrainingStatus:
    """Return how training in `model_dir` has ended, or that it continues.

    Args:
      generation: number of the start that is meant, or of one before it; ends of earlier starts do not count. 0: starts
        are not counted, so run.json, which may be of another command, says nothing of this training.
    """
    ending = read_dataclass(TrainingStatus, Path(model_dir) / FILE)
    has_ending_of_start = ending.is_over and ending.generation >= generation
    if has_ending_of_start or not generation:
        return ending
    record = _read_record_or_empty(Path(model_dir))
    has_ended = record.training not in (None, RUNNING) and record.generation >= generation
    if has_ended:  # the supervisor was killed after it had written run.json, before training_ended.json
        return TrainingStatus(str(record.training), _latest_step(Path(model_dir)), record.generation)
    return TrainingStatus()


def remove_ending(model_dir: str | os.PathLike[str]) -> None:
    """Remove that file, because training begins or continues."""
    remove(Path(model_dir) / FILE)


def tell_training_ended(model_dir: Path, status: str, generation: int) -> None:
    """Write that training has ended, unless the chief's task has, which knows more: it may have stopped early."""
    written = read_dataclass(TrainingStatus, model_dir / FILE)
    if not written.is_over or written.generation != generation:
        write_ending(model_dir, status, _latest_step(model_dir), generation)


def generation_in(env: Mapping[str, str]) -> int:
    """Return the number of the run's start to which a task with the environment `env` belongs; 0: not counted."""
    return int(env.get(GENERATION) or 0)


def _latest_step(model_dir: Path) -> int:
    latest = layout.latest_checkpoint(model_dir)
    step = None if latest is None else layout.step_of(latest)
    return step or 0


# --- how did the run end? ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """The end of a start, with all that the files say of it.

    Attributes:
      status: finished, failed or interrupted.
      recorded: status for MLflow: FINISHED, FAILED, SCHEDULED (interrupted, can go on) or KILLED.
      summaries: name of a file -> its contents: summary.json, and that of a command that only reads the run.
      tags, description: texts for the trackers.
      files: names of files in the folder that the trackers get.
      models: exported models that the trackers get.
      is_kept: the start failed before its first step, and the run keeps the end that it had.
      time: when it ended, in seconds since 1970.
    """

    status: str
    recorded: str
    summaries: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    description: str | None = None
    files: Sequence[str] = ()
    models: Sequence[Mapping[str, Any]] = ()
    is_kept: bool = False
    time: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True)
class RunState:
    """How a run ended, for those who only read.

    Attributes:
      status: running, finished, failed or interrupted; None: nothing was trained in the folder. A run whose supervisor
        was killed is running until somebody calls `settle`.
      summary: the contents of summary.json. Its own status is that of the last command that trained, which may be
        upload_incomplete.
      started: when its last start began, in seconds since 1970; None: not known, as of a run of an earlier version.
      secs: how long all starts took; None: not known, or it is running.
    """

    status: str | None
    summary: dict[str, Any]
    started: float | None = None
    secs: float | None = None


def write_end(folder: Path, end: RunEnd, record: RunRecord | None = None) -> None:
    """Write how a start of the run in `folder` ended.

    The order: run.json decides, and has all that the others are written from, so it comes first. Then
    training_ended.json, since other hosts wait for it, and the summary. The journal's line comes last: with it the
    trackers send the summary. (A bucket gets run.json last: what is in a bucket may be all that is left of a run, and
    there it tells that the rest is complete.)

    Args:
      record: the contents of run.json, which are changed; None: the start has none, or leaves it as it is: it was that
        of a script, of a sweep, or of a command that only reads the run.
    """
    if record is not None:
        _write_decision(folder, end, record)
        tell_training_ended(folder, end.status, record.generation)
    for name, summary in end.summaries.items():
        write_summary(folder, summary, name)
    _write_line_of_end(folder, end)


def write_end_of_command(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write that a command ended otherwise than the run that it trained: the bucket does not have everything."""
    write_summary(folder, summary)


def how_run_ended(folder: Path) -> RunState:
    """Return how the run in `folder` ended. Changes nothing there."""
    record = _read_record_or_empty(folder)
    summary = read_summary(folder / SUMMARY_FILE)
    status = _status_of_run(record, summary)
    if status != RUNNING and summary.get("status") == RUNNING:  # its writer was killed after it had written run.json
        summary = _summary_with_end(_end_from_record(record, summary), summary)
    return RunState(status, summary, record.started, record.secs)


def settle(folder: Path) -> None:
    """Write what a process that was killed has not written of the last start. The caller holds the folder's lock, and
    no task of that start runs.

    Raises:
      ConfigError: run.json contains a value of a wrong type.
    """
    settle_files(folder)
    # A journal whose last line is a start lacks its end.
    last = next(reversed(starts_and_ends(folder)), None)
    if last is not None and last["event"] == RUN_STARTED:
        _write_line_of_end(folder, _missing_end_of_start(folder, last))


def settle_files(folder: Path) -> None:
    """Complete run.json, training_ended.json and summary.json as `settle` does, but write no line into the journal: a
    process that ships the folder later writes the end there.

    Raises:
      ConfigError: run.json contains a value of a wrong type.
    """
    record = RunRecord.read(folder)
    summary = read_summary(folder / SUMMARY_FILE, is_quiet=True)
    is_decided = record.training != RUNNING
    is_written = summary.get("status") != RUNNING
    if is_decided and is_written:
        return
    status = _status_of_run(record, summary)
    end = _interrupted_end(folder, summary) if status == RUNNING else _end_from_record(record, summary)
    if not is_decided:
        _write_decision(folder, end, record)
    if record.training is not None:  # else run.json was lost, or never written
        tell_training_ended(folder, end.status, record.generation)
    if not is_written:
        write_summary(folder, _summary_with_end(end, summary))


def _write_decision(folder: Path, end: RunEnd, record: RunRecord) -> None:
    record.training = end.status
    record.ending = dataclasses.asdict(end)
    record.save(folder)


def _write_line_of_end(folder: Path, end: RunEnd) -> None:
    facts = dataclasses.asdict(end)
    del facts["summaries"]
    note_of_run(folder, RUN_ENDED, **facts)


def _read_record_or_empty(folder: Path) -> RunRecord:
    try:
        return RunRecord.read(folder)
    except ConfigError:  # the next start reports it; until then the summary answers
        return RunRecord()


def _status_of_run(record: RunRecord, summary: Mapping[str, Any]) -> str | None:
    """Return how a run ended, or that it is running; None: nothing was trained. This is the rule for all readers."""
    if record.training not in (None, RUNNING):
        return record.training
    # run.json says that the run is running, or is lost. The summary may know more: after a kill, earlier versions
    # changed the summary alone, and a start that puts back the files of the start before it writes run.json last. The
    # summary of a command that only reads the run does not count.
    is_of_training = summary.get("command", "train") in TRAINING_RUNS
    summary_status = summary.get("status") if is_of_training else None
    return summary_status or record.training


def _end_from_record(record: RunRecord, summary: Mapping[str, Any]) -> RunEnd:
    """Return the end of a run from run.json. Earlier versions wrote only the status there, which gives an end without
    tags, files and models.
    """
    names = {field.name for field in dataclasses.fields(RunEnd)}
    known = {name: value for name, value in record.ending.items() if name in names}
    if {"status", "recorded"} <= known.keys():  # these fields have no defaults
        return RunEnd(**known)
    status = str(_status_of_run(record, summary))
    return RunEnd(status, MLFLOW_STATUS.get(status, "KILLED"))


def _summary_with_end(end: RunEnd, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary with which a run ended, instead of `summary`, which says that it is running."""
    return dict(end.summaries.get(SUMMARY_FILE) or {**summary, "status": end.status, "error": None})


def _interrupted_end(folder: Path, summary: Mapping[str, Any]) -> RunEnd:
    """Return an interrupted end, for a start whose supervisor was killed before it had decided how the start ended.

    Args:
      summary: summary.json as it was written at the start; {}: there is none, and the end has no files and tags.
    """
    status = _KILLED_SUMMARY["status"]
    last_signs = [path.stat().st_mtime for path in journals_in(folder)]
    ended_at = max(last_signs, default=time.time())
    end = RunEnd(status, MLFLOW_STATUS[status], time=ended_at)
    if not summary:
        return end
    summary_of_killed: dict[str, Any] = {**summary, **_KILLED_SUMMARY}
    tags = {}
    num_micro_batches = _read_record_or_empty(folder).gradient_accumulation
    if num_micro_batches is not None:
        # The summary was written when the start began, which may have been with fewer micro-batches.
        summary_of_killed["gradient_accumulation"] = num_micro_batches
        tags["gradient_accumulation"] = str(num_micro_batches)
    files = (saved_config.FILE, SUMMARY_FILE, CURVES_FILE, *code_files(folder))
    text = repeat_text(folder)
    summaries = {SUMMARY_FILE: summary_of_killed}
    return dataclasses.replace(end, summaries=summaries, tags=tags, description=text, files=files)


def _missing_end_of_start(folder: Path, start: Mapping[str, Any]) -> RunEnd:
    """Return the end of the last start, whose process was killed before it could write a line about it.

    Args:
      start: the line about the start in the journal. It has a `generation` if the start counts in run.json; that of a
        script, a sweep or a command that only reads the run has none.
    """
    record = RunRecord.read(folder)
    summary = read_summary(folder / SUMMARY_FILE, is_quiet=True)
    number = start.get("generation")
    if number is None or record.training is None:
        return _interrupted_end(folder, summary)
    end = _end_from_record(record, summary)
    if number > record.generation:  # the start failed, and has put back the files of the start before it
        return RunEnd(end.status, end.recorded, is_kept=True)
    return end
