"""Find this process's place in a cluster from its environment: TF_CONFIG, Slurm, SageMaker, Kubernetes, TPU, local."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from runner.config.schema import CLUSTER_STRATEGIES, ClusterConfig, ConfigError, StrategyConfig
from runner.distribute import kubernetes, managed_jobs, slurm, tpu
from runner.distribute.cluster import ALONE, Cluster, counted
from runner.distribute.local_cluster import task_counts
from runner.distribute.tf_config import read_tf_config


@dataclasses.dataclass(frozen=True)
class Detected:
    """The place in a cluster that was found for this process.

    Attributes:
      cluster: the place. For a strategy of several processes, `tasks` always contains a `chief` and never the
        evaluator. `ALONE`: a single process, or one that starts the other tasks.
      source: tf_config, slurm, sagemaker, kubernetes, tpu or local; local: this run starts all its tasks itself, on
        this host.
      why: a sentence that names the environment variables that were found.
      has_evaluator: a separate process evaluates.
    """

    cluster: Cluster
    source: str
    why: str
    has_evaluator: bool = False

    @property
    def has_others(self) -> bool:
        """Report whether other processes of this run were started from outside, each with its own supervisor."""
        if self.source not in ("tf_config", "slurm", "sagemaker", "kubernetes"):
            return False
        return bool(self.cluster.tasks) or self.has_evaluator or self.cluster.is_evaluator


def detect(env: Mapping[str, str], settings: ClusterConfig, strategy: StrategyConfig) -> Detected:
    """Find this process's place by `cluster.resolver`; with auto, by the first detector that finds a cluster.

    Args:
      env: the environment.
      settings: the group `cluster`.
      strategy: the group `strategy`.

    Raises:
      ConfigError: the environment describes an impossible cluster, or one that the strategy cannot use.
    """
    if strategy.name == "tpu":
        address, why = tpu.find_tpu(env, strategy.address)
        return Detected(ALONE, "tpu", f"{why} names the TPU {address!r}.")
    name = strategy.name or "default"
    if settings.resolver != "auto":
        return _DETECTORS[settings.resolver](env, settings, name)
    given = read_tf_config(env.get("TF_CONFIG", ""))
    if given.tasks or given.task_type == "evaluator":  # not only a single process
        return _from_tf_config(env, settings, name)
    if slurm.is_in_step(env):
        return _from_slurm(env, settings, name)
    hosts, _ = managed_jobs.sagemaker_hosts(env)
    if len(hosts) > 1:
        return _from_sagemaker(env, settings, name)
    if name in CLUSTER_STRATEGIES and kubernetes.is_in_set(env, settings.service):
        return _from_kubernetes(env, settings, name)
    return _local(env, settings, name)


def _from_tf_config(env: Mapping[str, str], settings: ClusterConfig, strategy: str) -> Detected:
    """Return the place that TF_CONFIG gives this process, in the form that the strategy needs.

    Raises:
      ConfigError: TF_CONFIG is not set, cannot be read, or does not fit the strategy.
    """
    if not env.get("TF_CONFIG", "").strip():
        raise ConfigError("cluster.resolver=tf_config, but TF_CONFIG is not set.")
    given = read_tf_config(env["TF_CONFIG"])
    tasks = {task_type: addresses for task_type, addresses in given.tasks.items() if task_type != "evaluator"}
    why = f"TF_CONFIG says that this is {given.task_type} {given.task_index} of {counted(tasks)}."
    if strategy in CLUSTER_STRATEGIES and "chief" not in tasks and "worker" in tasks:
        why += " It names no chief, so worker 0 is the chief, and the following workers count from 0."
    has_evaluator = settings.evaluator or given.task_type == "evaluator" or "evaluator" in given.tasks
    place = Cluster(given.task_type, given.task_index, tasks)
    return Detected(_fit_to_strategy(place, strategy, "TF_CONFIG"), "tf_config", why, has_evaluator)


def _from_slurm(env: Mapping[str, str], settings: ClusterConfig, strategy: str) -> Detected:
    rank, addresses = slurm.read_slurm(env, settings.port)
    source = f"Slurm, with {len(addresses)} tasks (srun --ntasks)"
    place = _place_by_rank(rank, addresses, settings, strategy, source)
    nodes = dict.fromkeys(address.rpartition(":")[0] for address in addresses)
    why = f"SLURM_PROCID={rank}: task {rank} of {len(addresses)} that srun started on {', '.join(nodes)}."
    return Detected(_fit_to_strategy(place, strategy, "Slurm"), "slurm", why, settings.evaluator)


def _from_sagemaker(env: Mapping[str, str], settings: ClusterConfig, strategy: str) -> Detected:
    """Return the place of this host in a SageMaker training job; hosts are ranked in the order of their names.

    Raises:
      ConfigError: this host is not in the job's list, or the hosts do not fit the strategy.
    """
    hosts, host = managed_jobs.sagemaker_hosts(env)
    if host not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST={host} is not in SM_HOSTS of a training job: {', '.join(hosts) or 'none'}.")
    port = settings.port or kubernetes.PORT
    addresses = [f"{name}:{port}" for name in hosts]
    place = _place_by_rank(hosts.index(host), addresses, settings, strategy, "SageMaker")
    why = f"SM_CURRENT_HOST={host}: one of {len(hosts)} hosts of a SageMaker training job (SM_HOSTS)."
    return Detected(_fit_to_strategy(place, strategy, "SageMaker"), "sagemaker", why, settings.evaluator)


def _from_kubernetes(env: Mapping[str, str], settings: ClusterConfig, strategy: str) -> Detected:
    """Return the place of this pod.

    If the pod's name says its role, the config says how many processes of each role there are. Else only the index
    tells the pods apart, and decides the role.

    Raises:
      ConfigError: the pod's name or labels cannot be read, its index is too large, or the pods do not fit the strategy.
    """
    pod = kubernetes.read_pod(env, settings.service)
    hostname = env["HOSTNAME"]
    trainers = task_counts(settings, strategy)
    counts = {**trainers, "evaluator": 1} if settings.evaluator else trainers
    _check_index(pod, hostname, counts, settings, strategy)
    if pod.role:
        tasks = {role: pod.addresses(role, count, settings.service, settings.port) for role, count in trainers.items()}
        place = Cluster(pod.role, pod.index, tasks)
    else:
        total = pod.total or sum(counts.values())
        addresses = pod.addresses("", total, settings.service, settings.port)
        place = _place_by_rank(pod.index, addresses, settings, strategy, "Kubernetes")
    found_by = f"HOSTNAME={hostname}"
    if "JOB_COMPLETION_INDEX" in env:
        found_by = f"JOB_COMPLETION_INDEX and {found_by}"
    if pod.replicated_job:
        found_by += f", {pod.replicated_job} of the JobSet {pod.owner}"
    if pod.total is None:
        all_pods = f"{_in_words(counts)}, as the config says ({_format_keys(settings)})"
    else:
        all_pods = str(pod.total)
    why = f"{found_by}: one pod of {all_pods}."
    return Detected(_fit_to_strategy(place, strategy, "Kubernetes"), "kubernetes", why, settings.evaluator)


def _check_index(
    pod: kubernetes.Pod, hostname: str, counts: Mapping[str, int], settings: ClusterConfig, strategy: str
) -> None:
    """Check that the index of a pod is one of those that the manifest, or else the config, has.

    Args:
      pod: this pod.
      hostname: its name.
      counts: task type -> number of processes that the config asks for, with the evaluator.
      settings: the group `cluster`.
      strategy: the name of the strategy.

    Raises:
      ConfigError: it is not.
    """
    if pod.role:
        if pod.index >= counts.get(pod.role, 0):
            raise ConfigError(
                f"Kubernetes: HOSTNAME={hostname} is {pod.role} {pod.index}, but strategy={strategy} has "
                f"{_in_words(counts)} ({_format_keys(settings)}). Set the same numbers in the manifest and the config."
            )
        return
    total = pod.total or sum(counts.values())
    if pod.index < total:
        return
    this = f"HOSTNAME={hostname} is pod {pod.index}"
    if pod.total is not None:
        raise ConfigError(
            f"Kubernetes: {this}, but the manifest says {total}, 0 to {total - 1}: set {kubernetes.PODS_PER_JOB} and "
            f"{kubernetes.NUM_JOBS} to the Jobs' completions and replicas."
        )
    raise ConfigError(
        f"Kubernetes: {this}, but strategy={strategy} has {total}, 0 to {total - 1}: {_in_words(counts)} "
        f"({_format_keys(settings)}). Set these keys to match the Job's completions."
    )


def _local(env: Mapping[str, str], settings: ClusterConfig, strategy: str) -> Detected:
    """Return the place of a run that starts all of its tasks itself, with the reason why no other cluster was found."""
    if settings.resolver == "local":
        why = "cluster.resolver=local."
    else:
        why = "there is no TF_CONFIG, no Slurm step or SageMaker job of several, and no indexed Job of Kubernetes."
    if strategy not in CLUSTER_STRATEGIES:
        why += f" strategy={strategy} trains in one process."
    elif settings.service and settings.resolver == "auto":
        why += f" cluster.service={settings.service} has no effect: HOSTNAME is not set, or does not end with an index."
    return Detected(ALONE, "local", why, settings.evaluator)


_DETECTORS: Mapping[str, Callable[[Mapping[str, str], ClusterConfig, str], Detected]] = {
    "tf_config": _from_tf_config,
    "slurm": _from_slurm,
    "sagemaker": _from_sagemaker,
    "kubernetes": _from_kubernetes,
    "local": _local,
}


def _place_by_rank(rank: int, addresses: Sequence[str], settings: ClusterConfig, strategy: str, source: str) -> Cluster:
    """Return the place of a process that is told apart only by its rank.

    Ranks are given to the chief first, then to parameter servers, workers and the evaluator.

    Args:
      rank: the rank of this process.
      addresses: the address of each process, by rank.
      settings: the group `cluster`.
      strategy: the name of the strategy.
      source: the source of these facts, for messages.

    Raises:
      ConfigError: there are too few processes.
    """
    # With an evaluator (True counts as 1), the last process is no trainer.
    trainers = list(addresses[: len(addresses) - settings.evaluator])
    num_ps = settings.num_ps if strategy == "parameter_server" else 0
    # A coordinator of parameter servers does not train itself; a chief may be the only one that trains.
    least_workers = 1 if num_ps else 0
    first_worker = 1 + num_ps
    if len(trainers) < first_worker + least_workers:
        needed = {"chief": 1, "ps": num_ps, "worker": least_workers, "evaluator": int(settings.evaluator)}
        needed = {role: count for role, count in needed.items() if count}
        raise ConfigError(
            f"{source}: strategy={strategy} needs at least {_in_words(needed)}, but there are {len(addresses)} "
            "processes."
        )
    tasks = {"chief": trainers[:1], "ps": trainers[1:first_worker], "worker": trainers[first_worker:]}
    tasks = {role: listed for role, listed in tasks.items() if listed}
    for role, listed in tasks.items():
        if rank < len(listed):
            return Cluster(role, rank, tasks)
        rank -= len(listed)
    return Cluster("evaluator", 0, tasks)


def _fit_to_strategy(place: Cluster, strategy: str, source: str) -> Cluster:
    """Return `place` in the form that `strategy` needs.

    Raises:
      ConfigError: the strategy cannot use these processes.
    """
    tasks = place.tasks
    if strategy not in CLUSTER_STRATEGIES:
        num_trainers = len(tasks.get("chief", ())) + len(tasks.get("worker", ()))
        if num_trainers > 1 or "ps" in tasks:
            fitting_strategy = "parameter_server" if "ps" in tasks else "multi_worker"
            raise ConfigError(
                f"{source} names several processes ({counted(tasks)}), but strategy={strategy} trains in one. Use "
                f"strategy={fitting_strategy}; or, to run each process independently, cluster.resolver=local."
            )
        return Cluster("evaluator", 0) if place.is_evaluator else ALONE
    if place.is_evaluator and not tasks:  # an evaluator needs only the checkpoints, not the cluster
        return place
    if strategy == "parameter_server":
        fitted = place.with_chief()
        missing = [role for role in ("chief", "worker", "ps") if role not in fitted.tasks]
        if missing:
            coordinates = "the coordinator; without a chief, worker 0 is the coordinator"
            raise ConfigError(
                f"{source} names {counted(tasks) or 'no task'}: strategy=parameter_server needs a chief "
                f"({coordinates}), workers and ps. Missing: {', '.join(missing)}."
            )
        return fitted
    if "ps" in tasks:
        # If they were ignored, they would run the same command, occupy their machines, and never get a request.
        raise ConfigError(
            f"{source} names {counted(tasks)}: strategy=multi_worker has no parameter servers. Remove ps, or use "
            "strategy=parameter_server."
        )
    if not tasks:
        raise ConfigError(f"{source} names no cluster, but strategy=multi_worker needs one. Add a chief or worker.")
    return place.with_chief()


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in counts.items())


def _format_keys(settings: ClusterConfig) -> str:
    """Return the keys that say how many processes there are, as a user writes them."""
    evaluator = str(settings.evaluator).lower()
    return (
        f"cluster.num_workers={settings.num_workers}, cluster.num_ps={settings.num_ps}, cluster.evaluator={evaluator}"
    )
