"""run.json: what a run remembers between its starts, of itself and of what was shipped to MLflow."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config.schema import ConfigError
from runner.system.files import read_dataclass, write_json

RUN_FILE = ".mlflow_run"
"""In model_dir, while a run goes on: the id of its MLflow run, for code of the user's that logs to MLflow itself."""

_SAVING = threading.Lock()

_TYPES: Mapping[str, tuple[Any, str]] = {
    "mlflow_run_id": ((str, type(None)), "text or null"),
    "generation": (int, "a whole number"),
    "offsets": (dict, "a mapping of whole numbers"),
    "last_steps": (dict, "a mapping of whole numbers"),
    "training": ((str, type(None)), "text or null"),
}


@dataclass
class RunRecord:
    """`model_dir/run.json`.

    Attributes:
      mlflow_run_id: the MLflow run that it goes on with; None when it has none yet.
      generation: how often the run was started, the first time included.
      offsets: journal file name -> bytes of it that are shipped.
      last_steps: metric -> last global step that is shipped; a resumed run repeats steps, its curve does not.
      training: the status that its training has: running, finished, failed or interrupted.
      is_held: it is not written yet, whoever saves it: the start has not taken its first step.
      drawn_seed: what stands for `run.seed=null`; None where nothing was drawn yet.
    """

    mlflow_run_id: str | None = None
    generation: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)
    training: str | None = None
    drawn_seed: int | None = None
    is_held: bool = field(default=False, repr=False)

    @classmethod
    def read(cls, model_dir: Path) -> RunRecord:
        """Return the record of the run in `model_dir`; an empty one when there is none.

        Raises:
          ConfigError: somebody has written a value of another type into it.
        """
        record = read_dataclass(cls, model_dir / "run.json")
        for name, (wanted, words) in _TYPES.items():
            value = getattr(record, name)
            items = value.values() if isinstance(value, dict) else ()
            if not isinstance(value, wanted) or isinstance(value, bool) or not all(type(one) is int for one in items):
                raise ConfigError(
                    f"{model_dir / 'run.json'}: {name}={value!r} is not {words}. Repair it, or use a new model_dir."
                )
        return record

    def save(self, model_dir: Path) -> None:
        """Write run.json, unless it `is_held`."""
        with _SAVING:  # the supervisor counts restarts while the shipper notes what it has shipped
            if not self.is_held:
                values = asdict(self)
                del values["is_held"]
                write_json(model_dir / "run.json", values)

    def belongs_to(self, mlflow_run_id: str) -> None:
        """Go on with this MLflow run. One that is new to us has none of what was shipped to another."""
        if mlflow_run_id != self.mlflow_run_id:
            self.mlflow_run_id = mlflow_run_id
            self.offsets, self.last_steps = {}, {}
