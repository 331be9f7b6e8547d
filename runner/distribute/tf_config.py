"""Parsing of TF_CONFIG as people and platforms write it; errors name the part that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.schema import ConfigError
from runner.distribute.cluster import Cluster, counted

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

_CONTEXT = 20
"""Number of characters of an invalid TF_CONFIG that a message shows on each side of the mistake."""


def read_tf_config(text: str, *, will_connect: bool = True) -> Cluster:
    """Return the cluster in TF_CONFIG, and this process's place in it.

    The old task type `master` means the chief. An evaluator stays in `tasks` if TF_CONFIG's `cluster` names it. Without
    a `cluster`, this is a single process and `tasks` is empty.

    Args:
      text: the text of TF_CONFIG.
      will_connect: the processes will be connected. False: a RunConfig only shows the place, so types of tasks
        and addresses may be any.

    Raises:
      ConfigError: the text is not JSON, or has no task, an unknown task, an invalid address, or a sparseCluster.
    """
    tree = _parse(text)
    if will_connect and "cluster" not in tree and "sparseCluster" in tree:
        # A sparseCluster names only the parameter servers and this process, which would train alone.
        raise ConfigError(
            "TF_CONFIG has a sparseCluster, which does not name all tasks, in place of a cluster. Every task must know "
            "all others: set enableDynamicWorker: false in the Kubeflow TFJob."
        )
    tasks = _read_tasks(tree.get("cluster") or {}, will_connect)
    if not tree.get("task") and not tasks:
        return Cluster()
    task_type, index = _read_task(tree.get("task"), tasks, will_connect=will_connect)
    return Cluster(task_type, index, tasks)


def _parse(text: str) -> Mapping[str, Any]:
    """Return the JSON object in TF_CONFIG, {} for an empty text; a ConfigError shows where the text is no JSON."""
    try:
        tree = json.loads(text if text.strip() else "{}")  # `error.pos` counts in this text
    except json.JSONDecodeError as error:
        before = text[max(0, error.pos - _CONTEXT) : error.pos]
        after = text[error.pos : error.pos + _CONTEXT]
        is_at_single_quote = "'" in after[:1] or "'" in before[-1:]
        quotes = " (JSON takes double quotes)" if is_at_single_quote else ""
        raise ConfigError(
            f"TF_CONFIG is not JSON: {error.msg} at character {error.pos + 1}, here: {before}>>>{after}{quotes}"
        ) from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f'TF_CONFIG={text}: it must be an object: {{"cluster": {{...}}, "task": {{...}}}}.')
    return tree


def _read_tasks(cluster: Any, will_connect: bool) -> dict[str, Sequence[str]]:
    """Return task type -> addresses of the `cluster` in TF_CONFIG.

    Args:
      cluster: the value of `cluster`, not checked yet.
      will_connect: as in `read_tf_config`.
    """
    if not isinstance(cluster, Mapping):
        raise ConfigError(
            f'TF_CONFIG: cluster={json.dumps(cluster)} must be {{"chief": ["host:port"], "worker": [...]}}.'
        )
    if "chief" in cluster and "master" in cluster:
        raise ConfigError("TF_CONFIG: cluster names a chief and a master; master is the old name of chief. Keep one.")
    tasks: dict[str, Sequence[str]] = {}
    seen: dict[str, str] = {}  # address -> the task that has it
    for given, addresses in cluster.items():
        task_type = _read_type(given, "cluster") if will_connect else _canonical(given)
        listed = _list_addresses(given, addresses)
        if will_connect:
            _check_addresses(given, listed, seen)
        if listed:
            tasks[task_type] = tuple(listed)
    single_types = ["chief"]
    if will_connect:
        single_types.append("evaluator")
    for task_type in single_types:
        if len(tasks.get(task_type, ())) > 1:
            raise ConfigError(
                f"TF_CONFIG: cluster.{task_type}={list(tasks[task_type])}: only one {task_type} is allowed."
            )
    return tasks


def _list_addresses(task_type: str, addresses: Any) -> list[Any]:
    """Return the addresses of a task type as a list; TensorFlow also accepts a mapping index -> address."""
    if isinstance(addresses, list):
        return addresses
    if not isinstance(addresses, Mapping) or not all(str(index).isdecimal() for index in addresses):
        raise ConfigError(f'TF_CONFIG: cluster.{task_type}={json.dumps(addresses)} must be a list: ["host:port", ...].')
    by_index = {int(index): address for index, address in addresses.items()}
    indices = sorted(by_index)
    if indices != list(range(len(by_index))):
        # TensorFlow allows gaps if a task need not know its peers. Here every task must know all others.
        raise ConfigError(
            f"TF_CONFIG: cluster.{task_type} names indices {', '.join(map(str, indices))} and leaves gaps. List every "
            "task (in a Kubeflow TFJob: enableDynamicWorker: false)."
        )
    return [by_index[index] for index in indices]


def _check_addresses(task_type: str, addresses: Sequence[Any], seen: dict[str, str]) -> None:
    """Check the addresses of a task type, and add them to `seen`: address -> the task that has it."""
    for index, address in enumerate(addresses):
        task = f"{task_type} {index}"
        _check_address(f"cluster.{task_type}[{index}]", address)
        if address in seen:
            raise ConfigError(f"TF_CONFIG: {seen[address]} and {task} have the same address {address!r}.")
        seen[address] = task


def _check_address(where: str, address: Any) -> None:
    if not _is_address(address):
        raise ConfigError(
            f"TF_CONFIG: {where}={json.dumps(address)} is not an address. Write host:port, such as node1:2222."
        )


def _is_address(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    # host:port. Only an IPv6 address contains colons, and it is in brackets.
    found = re.fullmatch(r"(?:\[[^/ \t\n]*|[^/ \t\n:]+):(\d+)", value)
    return found is not None and 0 < int(found[1]) < 65536


def _read_task(task: Any, tasks: Mapping[str, Sequence[str]], *, will_connect: bool) -> tuple[str, int]:
    """Return (type, index) that TF_CONFIG gives this process."""
    if not task:
        raise ConfigError(
            f"TF_CONFIG names a cluster ({counted(tasks) or 'none'}), but not which of its tasks this process is. Add "
            '"task": {"type": "worker", "index": 0}, with the type and index of this process.'
        )
    if not isinstance(task, Mapping) or "type" not in task:
        raise ConfigError(f'TF_CONFIG: task={json.dumps(task)} must be {{"type": "worker", "index": 0}}.')
    given = task["type"]
    # If the place is only shown, `tasks` may have types that `_read_type` does not know.
    task_type = given if given in tasks else _read_type(given, "task.type")
    known = tasks.get(task_type, ())
    index = _read_index(task, is_only_one=len(known) < 2)
    if index < len(known) or _may_be_unlisted(task_type, index, tasks, will_connect=will_connect):
        return task_type, index
    if not tasks:
        raise ConfigError(
            f"TF_CONFIG: task is {task_type} {index}, but there is no cluster. Add the addresses of all tasks."
        )
    if not known:
        raise ConfigError(f"TF_CONFIG: task.type={task['type']}: cluster has no {task_type}, only {counted(tasks)}.")
    listed = ", ".join(f"{number}: {address}" for number, address in enumerate(known))
    raise ConfigError(f"TF_CONFIG: task.index={index}: there is no {task_type} {index} in cluster, only {listed}.")


def _may_be_unlisted(task_type: str, index: int, tasks: Mapping[str, Sequence[str]], *, will_connect: bool) -> bool:
    """Report whether a task needs no address in `cluster`: that of a single process, and an evaluator.

    An evaluator is not part of the cluster: TensorFlow's own examples name it only in `task`, and launchers number it
    as they like.
    """
    if not tasks:
        return index == 0 and task_type != "ps"
    return task_type == "evaluator" and (index == 0 or not will_connect)


def _read_index(task: Mapping[str, Any], *, is_only_one: bool) -> int:
    default = 0 if is_only_one else None
    given = task.get("index", default)
    if not isinstance(given, bool) and str(given).isdecimal():
        return int(given)
    raise ConfigError(f"TF_CONFIG: task.index={json.dumps(given)} must be an integer from 0.")


def _read_type(given: Any, where: str) -> str:
    task_type = _canonical(given)
    if task_type not in TASK_TYPES:
        raise ConfigError(f"TF_CONFIG: {where}: unknown task type {given!r}. Use one of: {', '.join(TASK_TYPES)}.")
    return str(task_type)


def _canonical(given: Any) -> Any:
    return "chief" if given == "master" else given
