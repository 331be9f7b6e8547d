"""The pods of a run on Kubernetes, found from the name of this pod. They form an indexed Job, or StatefulSets.

Kubernetes tells a pod its own name, but not the number of pods. The config has these numbers (`cluster.num_workers`,
`cluster.num_ps`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.config.schema import ConfigError
from runner.distribute.tf_config import TASK_TYPES

PORT = 2222
"""Default of `cluster.port`. All tasks can use the same port, because each pod has its own address."""


@dataclass(frozen=True)
class Pod:
    """This pod, from its host name `<owner>-<index>`.

    Attributes:
      owner: name of the Job or StatefulSet, without the role.
      role: the task type if the owner's name ends in one (`digits-ps`); '': the index alone decides.
      index: index among the owner's pods.
    """

    owner: str
    role: str
    index: int

    def addresses(self, role: str, count: int, service: str | None, port: int | None) -> Sequence[str]:
        """Return the addresses of the first `count` pods of the owner with `role`."""
        name = f"{self.owner}-{role}" if role else self.owner
        return [f"{name}-{index}.{service or self.owner}:{port or PORT}" for index in range(count)]


def is_in_set(env: Mapping[str, str], service: str | None) -> bool:
    """Report whether this process is in a pod of an indexed Job, or of a StatefulSet whose pods train together.

    A notebook's pod may belong to a StatefulSet, too. So a StatefulSet counts only if `cluster.service` is set.

    Raises:
      ConfigError: the pod looks like one of a StatefulSet but would train alone: `cluster.service` is set and the host
        name ends in an index, but Kubernetes' own variable is not set.
    """
    is_ordinal = bool(service) and re.fullmatch(r".+-\d+", env.get("HOSTNAME", "")) is not None
    is_there = "JOB_COMPLETION_INDEX" in env or ("KUBERNETES_SERVICE_HOST" in env and is_ordinal)
    if is_ordinal and not is_there:
        raise ConfigError(
            f"cluster.service={service} and HOSTNAME={env['HOSTNAME']} look like a pod of a StatefulSet, but "
            "KUBERNETES_SERVICE_HOST is not set. Set cluster.resolver=kubernetes to join the other pods, or "
            "cluster.resolver=local to train on this host alone."
        )
    return is_there


def read_pod(env: Mapping[str, str]) -> Pod:
    """Return the pod in which this process runs, from its host name.

    Raises:
      ConfigError: the host name does not end in an index.
    """
    name = env.get("HOSTNAME", "")
    match = re.fullmatch(r"(.+)-(\d+)", name)
    index = env.get("JOB_COMPLETION_INDEX")
    if match is None or (index is not None and index != match[2]):
        ends = f"-{index} (JOB_COMPLETION_INDEX)" if index is not None else "-<index>"
        raise ConfigError(
            f"Kubernetes: HOSTNAME={name} does not end in {ends}, so the names of the other pods are not known. Use a "
            "Job with completionMode: Indexed, or a StatefulSet, without hostNetwork: true (see deploy/README.md)."
        )
    owner, dash, role = match[1].rpartition("-")
    if dash and role in TASK_TYPES:
        return Pod(owner, role, int(match[2]))
    return Pod(match[1], "", int(match[2]))
