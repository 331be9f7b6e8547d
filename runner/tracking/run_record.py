"""run.json: what a run remembers between its starts, of itself and of what was shipped to MLflow."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runner.system.files import read_dataclass, write_json

_SAVING = threading.Lock()


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
        """Return the record of the run in `model_dir`; an empty one when there is none."""
        return read_dataclass(cls, model_dir / "run.json")

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
