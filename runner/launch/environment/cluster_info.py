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

_STARTERS = {name.lower(): name for name in ("Slurm", "SageMaker", "Kubernetes")}
_STARTERS["tf_config"] = "whoever set TF_CONFIG"


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return what `runner.distribute.cluster_resolver.detect` finds for `config` in `env`.

    The last line is the TF_CONFIG of this process's task, if it has one.

    Raises:
      ConfigError: the environment describes an impossible cluster, or one that the strategy cannot use.
    """
    found = detect(env, config.cluster, config.strategy)
    run = dataclasses.replace(config, command="train_and_evaluate")
    places = local_places(run, ports=range) if found.source == "local" else []
    this, starts = _this_process(found, places)
    facts = [
        ["strategy", str(config.strategy.name)],
        ["source", f"{found.source} (cluster.resolver={config.cluster.resolver})"],
        ["because", found.why],
        ["this is", this],
        ["starts here", starts],
        ["evaluator", "a process of its own" if found.has_evaluator else "none: those that train evaluate"],
    ]
    given = {"model_dir": config.model_dir, "export.dir": config.export.dir}
    for key, (folder, source) in managed_jobs.folders(env).items():
        facts.append([key, f"{given[key]} (the config)" if given[key] else f"{folder} ({source})"])
    answer: dict[str, Any] = print_table("cluster", ["setting", "value"], facts)
    print()
    answer["tasks"] = print_table("tasks", ["role", "index", "address", "process"], list(_rows(found, places)))
    if found.cluster.tasks:
        print(f"\nTF_CONFIG of this task: {found.cluster.tf_config}", flush=True)
        answer["tf_config"] = json.loads(found.cluster.tf_config)
    return answer


def _this_process(found: Detected, places: Sequence[Cluster]) -> tuple[str, str]:
    """Return what this process is, and what it starts."""
    if len(places) > 1:
        return "the process that starts all tasks", ", ".join(place.name for place in places)
    others = f"; {_STARTERS[found.source]} starts the others" if found.source in _STARTERS else ""
    return "a single process" if found.cluster == ALONE else found.cluster.name, f"one task{others}"


def _rows(found: Detected, places: Sequence[Cluster]) -> Iterator[list[Any]]:
    """Yield a row for each task. Tasks that this run starts listen on ports that are free at the start."""
    this = found.cluster
    for role, addresses in this.tasks.items():
        for index, address in enumerate(addresses):
            is_this = (role, index) == (this.task_type, this.task_index)
            yield [role, index, address, "this process" if is_this else ""]
    for place in places:
        address = f"{HOST}:<free port>" if place.tasks and place.task_type != "evaluator" else "-"
        yield [place.role, place.task_index, address, ""]
    if not this.tasks and not places and this.is_chief:
        yield ["chief", 0, "-", "this process"]
    if found.has_evaluator and not places:
        yield ["evaluator", 0, "-", "this process" if this.task_type == "evaluator" else ""]
