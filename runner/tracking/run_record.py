"""run.json: the facts that a run keeps between its starts, and how much has been shipped to its trackers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config.schema import ConfigError
from runner.system.files import read_dataclass, write_json

RUN_FILE = ".mlflow_run"
"""File in model_dir during a run with the id of its MLflow run, for user code that logs to MLflow itself."""

_SAVING = threading.Lock()

MLFLOW = "mlflow"
"""The tracker whose fields are at the top level of run.json, where versions without other trackers wrote them."""

_TYPES: Mapping[str, tuple[Any, str]] = {
    "mlflow_run_id": ((str, type(None)), "text or null"),
    "generation": (int, "a whole number"),
    "offsets": (dict, "a mapping of whole numbers"),
    "last_steps": (dict, "a mapping of whole numbers"),
    "training": ((str, type(None)), "text or null"),
}
_TYPES_OF_SHIPPED = {"run_id": _TYPES["mlflow_run_id"], **{name: _TYPES[name] for name in ("offsets", "last_steps")}}


@dataclass
class Shipped:
    """The record of how much of a run's journals has been shipped to one tracker.

    Attributes:
      run_id: the tracker's id of the run; None: it has none yet.
      offsets: journal file name -> number of its bytes that are shipped.
      last_steps: metric -> last global step that is shipped. A resumed run repeats steps, which are not shipped again.
    """

    run_id: str | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)

    def belongs_to(self, run_id: str) -> None:
        """Start anew if `run_id` is another run than before; nothing has been shipped to it."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.offsets, self.last_steps = {}, {}


@dataclass
class RunRecord:
    """The contents of `model_dir/run.json`.

    Attributes:
      mlflow_run_id: id of the MLflow run; None: there is none yet.
      generation: number of starts of the run so far.
      offsets, last_steps: how much has been shipped to MLflow, as in `Shipped`.
      trackers: tracker name -> how much has been shipped to it, for all other trackers.
      training: status of training: running, finished, failed or interrupted.
      is_held: do not write run.json yet, because the start has not taken its first step.
      drawn_seed: the value that was drawn for `run.seed=null`; None: none was drawn yet.
    """

    mlflow_run_id: str | None = None
    generation: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)
    training: str | None = None
    drawn_seed: int | None = None
    trackers: dict[str, Shipped] = field(default_factory=dict)
    is_held: bool = field(default=False, repr=False)

    @classmethod
    def read(cls, model_dir: Path) -> RunRecord:
        """Return the record of the run in `model_dir`; an empty record if there is none.

        Raises:
          ConfigError: the file contains a value of a wrong type.
        """
        file = model_dir / "run.json"
        record = read_dataclass(cls, file)
        _check_types(file, "", vars(record), _TYPES)
        if not isinstance(record.trackers, dict):
            raise _wrong(file, "trackers", record.trackers, "a mapping")
        for name, shipped in record.trackers.items():
            if not isinstance(shipped, dict) or not {*shipped} <= {*_TYPES_OF_SHIPPED}:
                raise _wrong(file, f"trackers.{name}", shipped, f"a mapping of {', '.join(_TYPES_OF_SHIPPED)}")
            record.trackers[name] = Shipped(**shipped)
            _check_types(file, f"trackers.{name}.", vars(record.trackers[name]), _TYPES_OF_SHIPPED)
        return record

    def of(self, tracker: str) -> Shipped | RunRecord:
        """Return the record of how much has been shipped to a tracker. Call it before anything is shipped."""
        return self if tracker == MLFLOW else self.trackers.setdefault(tracker, Shipped())

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, under the name that `Shipped` has for it."""
        return self.mlflow_run_id

    def save(self, model_dir: Path) -> None:
        """Write run.json, unless it `is_held`."""
        with _SAVING:  # the supervisor and the shipper, which are different threads, both save
            if not self.is_held:
                values = asdict(self)
                del values["is_held"]
                if not self.trackers:  # unchanged from earlier versions if MLflow is the only tracker
                    del values["trackers"]
                write_json(model_dir / "run.json", values)

    def belongs_to(self, mlflow_run_id: str) -> None:
        """Note the MLflow run; if it is another one than before, forget what was shipped to the other one."""
        if mlflow_run_id != self.mlflow_run_id:
            self.mlflow_run_id = mlflow_run_id
            self.offsets, self.last_steps = {}, {}


def _check_types(file: Path, at: str, values: Mapping[str, Any], types: Mapping[str, tuple[Any, str]]) -> None:
    for name, (wanted, words) in types.items():
        value = values[name]
        items = value.values() if isinstance(value, dict) else ()
        if not isinstance(value, wanted) or isinstance(value, bool) or not all(type(one) is int for one in items):
            raise _wrong(file, f"{at}{name}", value, words)


def _wrong(file: Path, name: str, value: Any, words: str) -> ConfigError:
    return ConfigError(f"{file}: {name}={value!r} is not {words}. Repair it, or use a new model_dir.")
