"""Who this process is, among whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run and this one's place among them.

    Attributes:
      task_type: worker, chief, ps or evaluator; a single process is worker 0.
      task_index: among the tasks of that type.
      tasks: task type -> addresses `host:port`; empty for a single process.
    """

    task_type: str = "worker"
    task_index: int = 0
    tasks: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and decides: the chief, or worker 0 where there is none."""
        if self.task_type == "chief":
            return True
        return self.task_type == "worker" and self.task_index == 0 and "chief" not in self.tasks

    @property
    def num_workers(self) -> int:
        """Processes that train, the chief included; 1 for a single process."""
        return len(self.tasks.get("chief", ())) + len(self.tasks.get("worker", ())) or 1

    @property
    def num_ps(self) -> int:
        return len(self.tasks.get("ps", ()))

    @property
    def worker_index(self) -> int:
        """Place among the processes that train: the chief first."""
        return self.task_index + (len(self.tasks.get("chief", ())) if self.task_type == "worker" else 0)
