"""The pods of a run on Kubernetes, found from the name of this pod. They form an indexed Job, StatefulSets or a JobSet.

Kubernetes tells a pod its own name, but not the number of pods. The config has these numbers (`cluster.num_workers`,
`cluster.num_ps`), or the manifest of a JobSet sets them. The pods of a JobSet, and of a Kubeflow TrainJob, which makes
one, are named `<JobSet>-<replicated job>-<index of the Job>-<index of the pod>`. Which part of that is which, only the
labels of the pod say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.config.schema import ConfigError
from runner.distribute.tf_config import TASK_TYPES

PORT = 2222
"""Default of `cluster.port`. All tasks can use the same port, because each pod has its own address."""

JOB_SET = {
    "JOBSET_NAME": "jobset-name", "JOBSET_REPLICATED_JOB": "replicatedjob-name", "JOBSET_JOB_INDEX": "job-index",
}  # fmt: skip
"""Environment variable that the manifest of a JobSet sets -> the label of the pod that it is set to."""
PODS_PER_JOB = "JOBSET_PODS_PER_JOB"
"""Environment variable with a number of the manifest: `completions` of the replicated job."""
NUM_JOBS = "JOBSET_REPLICAS"
"""Environment variable with a number of the manifest: `replicas` of the replicated job."""
_SMALLEST_NUMBERS = {PODS_PER_JOB: 1, NUM_JOBS: 1, "JOBSET_JOB_INDEX": 0, "JOB_COMPLETION_INDEX": 0}
"""Environment variable that holds a number -> the smallest number that it can have."""


@dataclass(frozen=True)
class Pod:
    """This pod, from its host name `<owner>-<index>`, or from the labels of a JobSet.

    Attributes:
      owner: name of the Job or StatefulSet, without the role; of a JobSet.
      role: the task type if the owner's name ends in one (`digits-ps`), or that is the name of the replicated job; '':
        the index alone decides.
      index: index among the owner's pods.
      replicated_job: name of the replicated job in a JobSet; '': this pod is in none.
      per_job: number of pods in each Job of the replicated job; None: all its pods are in one.
      total: number of pods of the replicated job; None: the config says it.
    """

    owner: str
    role: str
    index: int
    replicated_job: str = ""
    per_job: int | None = None
    total: int | None = None

    def addresses(self, role: str, count: int, service: str | None, port: int | None) -> Sequence[str]:
        """Return the addresses of the first `count` pods of the owner with `role`."""
        name = "-".join(filter(None, (self.owner, role or self.replicated_job)))
        subdomain = service or self.owner
        per_job = self.per_job or count
        addresses = []
        for index in range(count):
            place = f"{index // per_job}-{index % per_job}" if self.replicated_job else str(index)
            addresses.append(f"{name}-{place}.{subdomain}:{port or PORT}")
        return addresses


def is_in_set(env: Mapping[str, str], service: str | None) -> bool:
    """Report whether this process is in a pod of an indexed Job, or of a StatefulSet whose pods train together.

    A notebook's pod may belong to a StatefulSet, too. So a StatefulSet counts only if `cluster.service` is set.

    Raises:
      ConfigError: the pod looks like one of a StatefulSet but would train alone: `cluster.service` is set and the host
        name ends in an index, but Kubernetes' own variable is not set.
    """
    is_ordinal = bool(service) and re.fullmatch(r".+-\d+", env.get("HOSTNAME", "")) is not None
    is_in_job = not env.keys().isdisjoint(("JOB_COMPLETION_INDEX", *JOB_SET))
    is_on_kubernetes = is_in_job or "KUBERNETES_SERVICE_HOST" in env
    if is_ordinal and not is_on_kubernetes:
        raise ConfigError(
            f"cluster.service={service} and HOSTNAME={env['HOSTNAME']} look like a pod of a StatefulSet, but "
            "KUBERNETES_SERVICE_HOST is not set. Set cluster.resolver=kubernetes to join the other pods, or "
            "cluster.resolver=local to train on this host alone."
        )
    return is_in_job or (is_ordinal and is_on_kubernetes)


def read_pod(env: Mapping[str, str], service: str | None) -> Pod:
    """Return the pod in which this process runs, from its host name and, in a JobSet, from its labels.

    Raises:
      ConfigError: the host name does not end in an index, or seems to be that of a JobSet whose manifest does not pass
        the labels on.
    """
    name = env.get("HOSTNAME", "")
    pod = _pod_of_job_set(env, name, service)
    if pod is not None:
        return pod
    match = re.fullmatch(r"(.+)-(\d+)", name)
    index = env.get("JOB_COMPLETION_INDEX")
    ends = "-<index>" if index is None else f"-{index} (JOB_COMPLETION_INDEX)"
    if match is None or index not in (None, match[2]):
        raise ConfigError(
            f"Kubernetes: HOSTNAME={name} does not end in {ends}, so the names of the other pods are not known. Use a "
            "Job with completionMode: Indexed, or a StatefulSet, without hostNetwork: true (see deploy/README.md)."
        )
    owner, dash, role = match[1].rpartition("-")
    if dash and role in TASK_TYPES:
        return Pod(owner, role, int(match[2]))
    return Pod(match[1], "", int(match[2]))


def _pod_of_job_set(env: Mapping[str, str], hostname: str, service: str | None) -> Pod | None:
    """Return the pod that the variables of JOB_SET describe; None if it is not one of a JobSet.

    Raises:
      ConfigError: the variables are missing, or contradict each other or the host name, or the number of pods is not
        known.
    """
    missing = [variable for variable in JOB_SET if not env.get(variable)]
    index = env.get("JOB_COMPLETION_INDEX", "")
    if missing:
        _check_needs_no_labels(hostname, index, service, missing)
        return None
    owner = env["JOBSET_NAME"]
    replicated_job = env["JOBSET_REPLICATED_JOB"]
    job = env["JOBSET_JOB_INDEX"]
    expected = f"{owner}-{replicated_job}-{job}-{index or '<index>'}"
    if hostname != expected:
        raise ConfigError(
            f"Kubernetes: HOSTNAME={hostname} is not {expected}, as {', '.join(JOB_SET)} and JOB_COMPLETION_INDEX say. "
            "Use completionMode: Indexed, without hostNetwork."
        )
    for variable, least in _SMALLEST_NUMBERS.items():
        _check_number(env, variable, least)
    is_in_first_job = int(job) == 0
    in_other_job = f"Kubernetes: HOSTNAME={hostname} is in Job {job} of {replicated_job}."
    if replicated_job in TASK_TYPES:
        if not is_in_first_job:
            raise ConfigError(
                f"{in_other_job} Let {replicated_job} have one Job, with its pods as completions and parallelism: "
                "replicas: 1."
            )
        return Pod(owner, replicated_job, int(index), replicated_job)
    if PODS_PER_JOB not in env:
        if not is_in_first_job:
            raise ConfigError(
                f"{in_other_job} Add to env, with the number of pods of each Job (completions): {{name: "
                f'{PODS_PER_JOB}, value: "..."}}, and {{name: {NUM_JOBS}, value: "..."}}.'
            )
        return Pod(owner, "", int(index), replicated_job)
    per_job = int(env[PODS_PER_JOB])
    total = per_job * int(env.get(NUM_JOBS, 1))
    return Pod(owner, "", int(job) * per_job + int(index), replicated_job, per_job, total)


def _check_needs_no_labels(hostname: str, index: str, service: str | None, missing: Sequence[str]) -> None:
    """Check that a pod without all variables of JOB_SET is not one of a JobSet, whose labels alone say its place.

    A pod `digits-7-0` may be that of a JobSet, or of a Job of its own named `digits-7`. It is taken for the latter if
    the config names a Service, which a JobSet does not need, and there is no role before the number.

    Args:
      hostname: the name of the pod.
      index: JOB_COMPLETION_INDEX; '': not set.
      service: `cluster.service`.
      missing: the variables of JOB_SET that are not set.

    Raises:
      ConfigError: the pod has some of these variables, or the name of a JobSet's pod.
    """
    has_some_labels = len(missing) < len(JOB_SET)
    name_of_job_set = re.fullmatch(rf"(.+?)-\d+-{re.escape(index)}", hostname) if index else None
    has_role = name_of_job_set is not None and name_of_job_set[1].rpartition("-")[2] in TASK_TYPES
    is_named_like_one = name_of_job_set is not None and (has_role or not service)
    if not has_some_labels and not is_named_like_one:
        return
    env_entries = []
    for variable in missing:
        field = f"metadata.labels['jobset.sigs.k8s.io/{JOB_SET[variable]}']"
        env_entries.append(f'  - {{name: {variable}, valueFrom: {{fieldRef: {{fieldPath: "{field}"}}}}}}')
    env_lines = "\n".join(env_entries)
    if_alone = ""
    if name_of_job_set is not None and not has_role:
        job = hostname.rpartition("-")[0]
        if_alone = f"\nIf it is a Job named {job}, set cluster.service={job}, its Service."
    raise ConfigError(
        f"Kubernetes: HOSTNAME={hostname} seems to be a pod of a JobSet or TrainJob, whose manifest does not say "
        f"which. Add to the container of each replicated job:\nenv:\n{env_lines}{if_alone}"
    )


def _check_number(env: Mapping[str, str], variable: str, smallest: int) -> None:
    if variable not in env:
        return
    text = env[variable]
    is_number = re.fullmatch("[0-9]+", text) is not None
    if not is_number or int(text) < smallest:
        raise ConfigError(f"Kubernetes: {variable}={text} is not a number of {smallest} or more.")
