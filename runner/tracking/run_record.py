"""The facts that a run keeps between its starts: run.json, and how much of its journals each tracker has."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from runner.config.schema import ConfigError
from runner.system.files import read_dataclass, write_json
from runner.tracking.journal import RUN_STARTED, SUPERVISOR, has_end_of_line, journal_path, starts_and_ends

MLFLOW = "mlflow"
RUN_FILE = "run.json"

FOUND_ACCUMULATION = "RUNNER_GRADIENT_ACCUMULATION"
"""Environment variable of a task with `RunRecord.gradient_accumulation`, which stands for auto in its config."""

_TYPE_TEXTS: Mapping[Any, str] = {
    int: "a whole number",
    int | None: "a whole number or null",
    float: "a number",
    float | None: "a number or null",
    str | None: "text or null",
    bool: "true or false",
    dict[str, int]: "a mapping of whole numbers",
    dict[str, str]: "a mapping",
    dict[str, Any]: "a mapping",
    list[str]: "a list of texts",
}
"""Type of a field -> what its value must be, for messages. Fields of other types are not checked."""

_T = TypeVar("_T")


@dataclass
class RunRecord:
    """The contents of `model_dir/run.json`, which only the supervisor writes.

    Attributes:
      generation: number of starts of the run so far.
      training: how the run ended, or that it is running: running, finished, failed or interrupted. It decides, as
        `runner.tracking.run_end` says; None: nothing was trained.
      drawn_seed: the value that was drawn for `run.seed=null`; None: none was drawn yet.
      ending: what the other files say of that end, which are written from it; {}: the run is running, or was of an
        earlier version.
      started: when the last start began, in seconds since 1970; None: it was of an earlier version.
      secs_before: seconds that the starts before it took.
      gradient_accumulation: number of micro-batches with which the last start trained with
        `train.gradient_accumulation=auto`, and the next begins; None: that start had a number of its own.
    """

    generation: int = 0
    training: str | None = None
    drawn_seed: int | None = None
    ending: dict[str, Any] = field(default_factory=dict)
    started: float | None = None
    secs_before: float = 0.0
    gradient_accumulation: int | None = None

    @property
    def secs(self) -> float | None:
        """Return the seconds that all starts took; None: one runs, or was of an earlier version."""
        ended = self.ending.get("time")
        if self.started is None or not isinstance(ended, int | float):
            return None
        # The clock may have been set back meanwhile.
        return self.secs_before + max(ended - self.started, 0.0)

    def begin(self, status: str) -> None:
        """Note that another start begins, with the status of one that runs."""
        self.secs_before = self.secs or self.secs_before
        self.started = time.time()
        self.generation += 1
        self.training = status
        self.ending = {}

    @classmethod
    def read(cls, model_dir: Path) -> RunRecord:
        """Return the record of the run in `model_dir`; an empty record if there is none.

        Raises:
          ConfigError: the file contains a value of a wrong type.
        """
        return _read_checked(cls, model_dir / RUN_FILE)

    def save(self, model_dir: Path) -> None:
        write_json(model_dir / RUN_FILE, asdict(self))


@dataclass
class Shipped:
    """How much of a run's journals one tracker has: `shipped.<tracker>.json`, which only its shipping process writes.

    Attributes:
      run_id: the tracker's id of the run; None: it has none yet.
      address: where the user finds the run; None: nowhere.
      problem: why the tracker does not have everything yet; None: nothing is known to be wrong.
      started: offset of the line about the start that the tracker has open; None: the tracker has no start open.
      status: status with which the last start ended there, as in `RunEnd.recorded`; None: no start has ended.
      models: paths of the models that were sent at the end of that start.
      offsets: journal file name -> number of its bytes that are shipped.
      last_steps: metric -> last global step that is shipped. A resumed run repeats steps, which are not shipped again.
    """

    run_id: str | None = None
    address: str | None = None
    problem: str | None = None
    started: int | None = None
    status: str | None = None
    models: list[str] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, tracker: str) -> Shipped:
        """Return the record of the run in `folder`; an empty record if there is none.

        Raises:
          ConfigError: the file contains a value of a wrong type.
        """
        record = _read_checked(cls, _file_of(folder, tracker))
        record._forget_lost_lines(folder)
        return record

    def save(self, folder: Path, tracker: str) -> None:
        write_json(_file_of(folder, tracker), asdict(self))

    def _forget_lost_lines(self, folder: Path) -> None:
        """Forget the offsets at which a journal has no end of a line, so that it is read from the beginning.

        Such a journal lost its end in a power cut, or was put back from an older backup, and has grown since. By now it
        may be longer than the offset, so its size does not show the loss: but an offset that is still right is at the
        end of a line. What is sent again does no harm: points up to `last_steps` are left out, and files, texts and
        starts replace those sent before.
        """
        lost = [name for name, offset in self.offsets.items() if not has_end_of_line(folder / name, offset)]
        for name in lost:
            del self.offsets[name]
        supervisor_journal = journal_path(folder, SUPERVISOR)
        size = supervisor_journal.stat().st_size if supervisor_journal.exists() else 0
        # The line of the start that is open may be lost, too. Then the journal is read again from its beginning, and
        # the first start there is opened.
        if supervisor_journal.name in lost or (self.started is not None and self.started >= size):
            self.started = None

    def assign_to_run(self, run_id: str) -> None:
        """Note that the tracker's run is `run_id`. If it had another one before, forget what was shipped to that."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.offsets = {}
            self.last_steps = {}
            self.models = []

    def has_last_start(self, folder: Path) -> bool:
        """Report whether the start that the tracker has open is the newest start of the run."""
        if self.started is None:
            return False
        starts = [line for line in starts_and_ends(folder, self.started) if line["event"] == RUN_STARTED]
        return len(starts) == 1

    def is_complete(self, folder: Path) -> bool:
        """Report whether the tracker has all starts of the run, and each has ended there."""
        journal = journal_path(folder, SUPERVISOR)
        size = journal.stat().st_size if journal.exists() else 0
        return self.started is None and size <= self.offsets.get(journal.name, 0)


def _file_of(folder: Path, tracker: str) -> Path:
    return folder / f"shipped.{tracker}.json"


def _read_checked(cls: type[_T], file: Path) -> _T:
    record = read_dataclass(cls, file)
    for name, expected in wrong_fields(record).items():
        value = getattr(record, name)
        raise ConfigError(f"{file}: {name}={value!r} is not {expected}. Repair it, or use a new model_dir.")
    return record


def wrong_fields(record: Any) -> dict[str, str]:
    """Return name -> what it should be, of the fields of a dataclass that have another type than they declare."""
    kind_of_record: Any = type(record)
    wrong = {}
    for name, kind in _kinds_of(kind_of_record).items():
        if not _has_type(getattr(record, name), kind):
            wrong[name] = _TYPE_TEXTS[kind]
    return wrong


@functools.cache  # it takes 0.1 ms, and a folder may have a thousand runs
def _kinds_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _has_type(value: Any, kind: Any) -> bool:
    """Report whether a value has the type `kind`, as a field declares it. Types without a text in `_TYPE_TEXTS` are not
    checked.
    """
    if kind not in _TYPE_TEXTS:
        return True
    if kind is bool or isinstance(value, bool):  # before the numbers: for Python a bool is an int
        return kind is bool and isinstance(value, bool)
    if kind == dict[str, int]:
        return isinstance(value, dict) and all(type(item) is int for item in value.values())
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind in (float, float | None):
        return isinstance(value, int | float) or (value is None and kind is not float)
    if kind in (dict[str, str], dict[str, Any]):
        return isinstance(value, dict)
    return isinstance(value, kind)
