"""The cluster of a run, and this process's place in it."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, and this process's place among them.

    Attributes:
      task_type: worker, chief, ps or evaluator; a single process is worker 0. An evaluator takes no part in training
        and counts as a single process.
      task_index: index among the tasks of that type.
      tasks: task type -> addresses `host:port`; empty for a single process.
    """

    task_type: str = "worker"
    task_index: int = 0
    tasks: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def tf_config(self) -> str:
        """The text of TF_CONFIG for this place, which `read_tf_config` reads; '' for a single process."""
        if self == Cluster():
            return ""
        cluster = {name: list(addresses) for name, addresses in self.tasks.items()}
        task = {"type": self.task_type, "index": self.task_index}
        return json.dumps({"cluster": cluster, "task": task})

    def with_chief(self) -> Cluster:
        """Return the same processes with a chief. If there is none, worker 0 becomes it and the others move up."""
        workers = self.tasks.get("worker", ())
        if "chief" in self.tasks or not workers:
            return self
        tasks = {"chief": workers[:1]}
        for task_type, addresses in self.tasks.items():
            remaining = workers[1:] if task_type == "worker" else addresses
            if remaining:
                tasks[task_type] = remaining
        if self.task_type != "worker":
            return Cluster(self.task_type, self.task_index, tasks)
        if self.task_index == 0:
            return Cluster("chief", 0, tasks)
        return Cluster("worker", self.task_index - 1, tasks)

    def is_in(self, tasks: Mapping[str, Sequence[str]]) -> bool:
        """Report whether `tasks`, those of another process, have the chief and this place at the same addresses."""
        for task_type, index in (("chief", 0), (self.task_type, self.task_index)):
            # A slice has one address, or none where the type has none of this index.
            ours = list(self.tasks.get(task_type, ()))[index : index + 1]
            theirs = list(tasks.get(task_type, ()))[index : index + 1]
            if ours != theirs:
                return False
        return True

    def difference_to(self, tasks: Mapping[str, Sequence[str]]) -> str:
        """Return in words how the tasks that this process knows differ from those that another one knows, here first;
        '': they do not. Evaluators do not count: they take no part in training.
        """
        own = dict(self.tasks)
        theirs = dict(tasks)
        own.pop("evaluator", None)
        theirs.pop("evaluator", None)
        if counted(own) != counted(theirs):
            return f"{counted(own)} here, {counted(theirs)} there"
        for name, addresses in own.items():
            for index, (here, there) in enumerate(zip(addresses, theirs[name], strict=True)):
                if here != there:
                    return f"{name} {index} at {here} here, at {there} there"
        return ""

    @property
    def role(self) -> str:
        """The name of the task's journal: its task type; a single process is called chief."""
        return "chief" if self.is_chief else self.task_type

    @property
    def name(self) -> str:
        """The readable name of the task: chief, worker:1, ps:0, evaluator."""
        if self.role in ("chief", "evaluator"):
            return self.role
        return f"{self.task_type}:{self.task_index}"

    @property
    def is_chief(self) -> bool:
        """Report whether this process writes checkpoints and decides for all: the chief, or else worker 0."""
        if self.task_type == "chief":
            return True
        return self.task_type == "worker" and self.task_index == 0 and "chief" not in self.tasks

    @property
    def is_server(self) -> bool:
        """Report whether this process only serves a coordinator: a parameter server, or a worker of its cluster."""
        return self.task_type == "ps" or (self.task_type == "worker" and "ps" in self.tasks)

    @property
    def is_evaluator(self) -> bool:
        """Report whether this process only evaluates."""
        return self.task_type == "evaluator"

    @property
    def num_workers(self) -> int:
        """The number of processes that train, the chief included; 1 for a single process."""
        if self.is_evaluator:
            return 1
        num_listed = len(self.tasks.get("chief", ())) + len(self.tasks.get("worker", ()))
        return max(1, num_listed)

    @property
    def num_ps(self) -> int:
        return len(self.tasks.get("ps", ()))

    @property
    def worker_index(self) -> int:
        """The index among the processes that train; the chief is 0."""
        if self.task_type != "worker":
            return self.task_index
        num_before = len(self.tasks.get("chief", ()))
        return num_before + self.task_index


def counted(tasks: Mapping[str, Sequence[str]]) -> str:
    """Return how many processes of each type there are, in words: `1 chief, 2 worker`; '' for none."""
    return ", ".join(f"{len(addresses)} {task_type}" for task_type, addresses in tasks.items())


def answers(address: str, timeout_secs: float) -> bool:
    """Report whether a process accepts connections at `address`, host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_secs).close()
    except OSError:
        return False
    return True


ALONE = Cluster()
"""The place of a process that trains alone."""
