"""command=cluster_info: show which cluster this process would be part of, and why. Starts nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.config.schema import Config
from runner.distribute import managed_jobs
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.cluster_resolver import Detected, detect
from runner.distribute.local_cluster import HOST, local_places
from runner.system.console import print_table

_STARTERS = {
    "slurm": "Slurm",
    "sagemaker": "SageMaker",
    "kubernetes": "Kubernetes",
    "tf_config": "whoever set TF_CONFIG",
}
"""Source of a cluster -> who starts its other processes."""


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return what `runner.distribute.cluster_resolver.detect` finds for `config` in `env`.

    The last line is the TF_CONFIG of this process's task, if it has one.

    Raises:
      ConfigError: the environment describes an impossible cluster, or one that the strategy cannot use.
    """
    found = detect(env, config.cluster, config.strategy)
    places: Sequence[Cluster] = []
    if found.source == "local":
        run = dataclasses.replace(config, command="train_and_evaluate")
        # Free ports are looked for when tasks start: here any numbers do, as none is shown.
        places = local_places(run, ports=range)
    this_process, started_here = _describe_process(found, places)
    evaluator = "none: those that train evaluate"
    if found.has_evaluator:
        evaluator = "a process of its own"
    facts = [
        ["strategy", str(config.strategy.name)],
        ["source", f"{found.source} (cluster.resolver={config.cluster.resolver})"],
        ["because", found.why],
        ["this is", this_process],
        ["starts here", started_here],
        ["evaluator", evaluator],
    ]
    given = {"model_dir": config.model_dir, "export.dir": config.export.dir}
    for key, (folder, source) in managed_jobs.folders(env).items():
        if given[key]:
            facts.append([key, f"{given[key]} (the config)"])
        else:
            facts.append([key, f"{folder} ({source})"])
    answer: dict[str, Any] = print_table("cluster", ["setting", "value"], facts)
    print()
    tasks = list(_rows_of_tasks(found, places))
    answer["tasks"] = print_table("tasks", ["role", "index", "address", "process"], tasks)
    if found.cluster.tasks:
        print(f"\nTF_CONFIG of this task: {found.cluster.tf_config}", flush=True)
        answer["tf_config"] = json.loads(found.cluster.tf_config)
    return answer


def _describe_process(found: Detected, places: Sequence[Cluster]) -> tuple[str, str]:
    """Return what this process is, and what it starts."""
    if len(places) > 1:
        return "the process that starts all tasks", ", ".join(place.name for place in places)
    starts = "one task"
    if found.source in _STARTERS:
        starts = f"one task; {_STARTERS[found.source]} starts the others"
    if found.cluster == ALONE:
        return "a single process", starts
    return found.cluster.name, starts


def _rows_of_tasks(found: Detected, places: Sequence[Cluster]) -> Iterator[list[Any]]:
    """Yield a row for each task. Tasks that this run starts listen on ports that are free at the start."""
    this = found.cluster
    for role, addresses in this.tasks.items():
        for index, address in enumerate(addresses):
            is_this = (role, index) == (this.task_type, this.task_index)
            yield [role, index, address, _mark(is_this)]
    # Tasks that this process starts: they have no addresses yet.
    for place in places:
        listens = bool(place.tasks) and place.task_type != "evaluator"
        address = f"{HOST}:<free port>" if listens else "-"
        yield [place.role, place.task_index, address, ""]
    if places:
        return
    # Tasks that no list of addresses has: a single process, and an evaluator that was started from outside.
    if this.is_chief and not this.tasks:
        yield ["chief", 0, "-", _mark(True)]
    if found.has_evaluator:
        yield ["evaluator", 0, "-", _mark(this.task_type == "evaluator")]


def _mark(is_this: bool) -> str:
    return "this process" if is_this else ""
