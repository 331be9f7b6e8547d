"""The tasks of a Slurm job step, from the variables that `srun` sets."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from runner.config.schema import MAX_TASKS, ConfigError

# The ports of tasks, from above Linux's ephemeral ports to 65535. Each job step that shares a node uses its own slot.
FIRST_PORT = 61440
SLOTS = 256
PORTS_PER_SLOT = 16


def is_in_step(env: Mapping[str, str]) -> bool:
    """Report whether `srun` started this process as one of several tasks.

    A batch script also has SLURM_PROCID=0 and SLURM_NTASKS; only a step has the variables of a step.
    """
    return "SLURM_PROCID" in env and _read_number(env, "SLURM_STEP_NUM_TASKS", _num_tasks_of_job(env), default=1) > 1


def read_slurm(env: Mapping[str, str], port: int | None) -> tuple[int, Sequence[str]]:
    """Return (rank of this process in its step, address of each task by rank).

    Args:
      env: the environment.
      port: port of the first task on each node; None: derived from the job id.

    Raises:
      ConfigError: a variable is missing, cannot be read, or contradicts another.
    """
    if "SLURM_PROCID" not in env:
        raise ConfigError("cluster.resolver=slurm, but SLURM_PROCID is not set. Start the tasks with srun.")
    count = _read_number(env, "SLURM_STEP_NUM_TASKS", _num_tasks_of_job(env))
    rank = _read_number(env, "SLURM_PROCID")
    if rank >= count:
        raise ConfigError(f"SLURM_PROCID={rank}: the step has {count} tasks, 0 to {count - 1}.")
    if count > MAX_TASKS:
        raise ConfigError(f"the Slurm step has {count} tasks (srun --ntasks). Use at most {MAX_TASKS}.")
    name, nodelist = _first_set(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = expand_nodes(nodelist, name)
    tasks_per_node = _tasks_per_node(env, nodes, count)
    is_cyclic = env.get("SLURM_DISTRIBUTION", "block").startswith("cyclic")
    places = _list_places(tasks_per_node, is_cyclic=is_cyclic)
    if len(places) != count:
        raise ConfigError(
            f"Slurm's variables differ: {name}={nodelist} holds {len(places)} tasks, but the step has {count}."
        )
    _check_own_place(env, places[rank], nodes, rank)
    first_port = _first_port(env, port, most=max(tasks_per_node))
    return rank, [f"{nodes[node]}:{first_port + local}" for node, local in places]


def expand_nodes(nodelist: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Return the nodes in Slurm's short form: `node[01-03,07],gpu5` means node01, node02, node03, node07, gpu5.

    Args:
      nodelist: the short form.
      name: the environment variable that has it, for messages.

    Raises:
      ConfigError: the text cannot be read, or names too many nodes.
    """
    nodes: list[str] = []
    for part in re.split(r",(?![^\[]*\])", nodelist):
        pieces = re.split(r"\[([\d,-]+)\]", part)  # text, ranges, text, ranges, ..., text
        texts = pieces[::2]
        has_stray_brackets = any("[" in text or "]" in text for text in texts)
        if not part or has_stray_brackets:
            raise ConfigError(f"{name}={nodelist}: {part!r} is not a list of nodes. Write it like node[01-03,07],gpu5.")
        ranges_of_pieces = [list(_read_ranges(piece, name, nodelist)) for piece in pieces[1::2]]
        # Count before listing: a few characters can name more nodes than fit into memory.
        count = len(nodes) + math.prod(_count_numbers(ranges) for ranges in ranges_of_pieces)
        if count > MAX_TASKS:
            raise ConfigError(f"{name}={nodelist} names {count} nodes. At most {MAX_TASKS} are allowed.")
        choices = [texts[:1]]
        for ranges, text in zip(ranges_of_pieces, texts[1:], strict=True):
            choices += [_list_numbers(ranges), [text]]
        nodes += ["".join(chosen) for chosen in itertools.product(*choices)]
    return nodes


def _read_ranges(ranges: str, name: str, nodelist: str) -> Iterator[tuple[range, int]]:
    """Yield each range in `01-03,07`, with the number of digits of its first number."""
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{name}={nodelist}: {part!r} is not a range. Write it like node[01-03,07],gpu5.")
        first = match[1]
        last = match[2] or first
        yield range(int(first), int(last) + 1), len(first)


def _count_numbers(ranges: Sequence[tuple[range, int]]) -> int:
    return sum(len(numbers) for numbers, _ in ranges)


def _list_numbers(ranges: Sequence[tuple[range, int]]) -> list[str]:
    """Return the numbers of all ranges as text, with leading zeros up to the digits of the first."""
    listed: list[str] = []
    for numbers, digits in ranges:
        listed += [str(number).zfill(digits) for number in numbers]
    return listed


def _tasks_per_node(env: Mapping[str, str], nodes: Sequence[str], count: int) -> list[int]:
    """Return the number of tasks of each node: `2(x3),1` -> 2, 2, 2, 1."""
    # With one node, or one task on each node, the numbers follow without the variable of the whole job, which may
    # differ.
    if len(nodes) in (1, count) and "SLURM_STEP_TASKS_PER_NODE" not in env:
        return [count // len(nodes)] * len(nodes)
    name, text = _first_set(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:\(x(\d{1,18})\))?", part)
        if match is None:
            raise ConfigError(f"{name}={text}: {part!r} is not a number of tasks. Write it like 2(x3),1.")
        counts.append((int(match[1]), int(match[2] or 1)))
    # Count before listing: a few digits can mean more tasks than fit into memory.
    num_nodes = sum(times for _, times in counts)
    num_tasks = sum(tasks * times for tasks, times in counts)
    if num_nodes != len(nodes):
        raise ConfigError(f"Slurm's variables differ: {name}={text} describes {num_nodes} nodes, not {len(nodes)}.")
    if num_tasks > MAX_TASKS:
        raise ConfigError(f"{name}={text} describes {num_tasks} tasks. At most {MAX_TASKS} are allowed.")
    tasks_per_node: list[int] = []
    for tasks, times in counts:
        tasks_per_node += [tasks] * times
    return tasks_per_node


def _list_places(tasks_per_node: Sequence[int], *, is_cyclic: bool) -> list[tuple[int, int]]:
    """Return (number of the node, position on that node) of each rank."""
    places: list[tuple[int, int]] = []
    for node, count in enumerate(tasks_per_node):
        places += [(node, local) for local in range(count)]
    if is_cyclic:  # the first task of each node, then the second of each
        places.sort(key=lambda place: (place[1], place[0]))
    return places


def _check_own_place(env: Mapping[str, str], place: tuple[int, int], nodes: Sequence[str], rank: int) -> None:
    """Check that Slurm put this task where the addresses assume it; otherwise all addresses would be wrong."""
    if "SLURM_NODEID" not in env or "SLURM_LOCALID" not in env:
        return
    node, local = place
    actual_node = _read_number(env, "SLURM_NODEID")
    actual_local = _read_number(env, "SLURM_LOCALID")
    if (actual_node, actual_local) != place:
        raise ConfigError(
            f"Slurm's variables differ: task {rank} is number {actual_local} on node {actual_node}, but by "
            f"SLURM_STEP_TASKS_PER_NODE it is number {local} on node {node} ({nodes[node]}). Start the "
            "tasks with srun --distribution=block."
        )


def _first_port(env: Mapping[str, str], port: int | None, most: int) -> int:
    """Return the first port: the same for all tasks of a job step, and different for steps that share a node.

    Args:
      env: the environment.
      port: `cluster.port`; None: derived from the job id.
      most: largest number of tasks on one node.

    Raises:
      ConfigError: the ports would exceed 65535.
    """
    last = 65536 - most
    if port is None:
        job = _read_number(env, "SLURM_JOB_ID", env.get("SLURM_JOBID"), default=0)
        slot = (31 * job + _read_number(env, "SLURM_STEP_ID", default=0)) % SLOTS
        return min(FIRST_PORT + slot * PORTS_PER_SLOT, last)
    if port > last:
        raise ConfigError(f"cluster.port={port} with {most} tasks on a node exceeds port 65535. Use at most {last}.")
    return port


def _num_tasks_of_job(env: Mapping[str, str]) -> str | None:
    """Return the number of tasks of the whole job, but only if this process is certainly in a step."""
    return env.get("SLURM_NTASKS") if "SLURM_STEP_NODELIST" in env else None


def _read_number(env: Mapping[str, str], name: str, instead: str | None = None, default: int | None = None) -> int:
    text = env.get(name, instead)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or len(text) > 18:
        shown = "is not set" if text is None else f"is {text!r}, and no number"
        raise ConfigError(f"{name} {shown}: start the tasks with srun, which sets it.")
    return int(text)


def _first_set(env: Mapping[str, str], *names: str) -> tuple[str, str]:
    for name in names:
        if env.get(name):
            return name, env[name]
    raise ConfigError(f"{names[0]} is not set: start the tasks with srun, which sets it.")
