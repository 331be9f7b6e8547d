"""Many tasks of one task server: `python -m tests.support.served_tasks <folder> [--starts 200 --kills 40]`.

The server is the one of `python -m runner`, the tasks are real. `--starts` end at once, with a mistake in their config:
the memory of the server is printed after each quarter of them. `--kills` train, two at a time, and are killed at a
moment of their lives that is drawn, by SIGKILL, SIGTERM or SIGABRT; nothing that they started is left then. Prints one
line of JSON, which says what went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from runner.config import parsing, schema
from runner.distribute.cluster import ALONE
from runner.launch import task_group
from runner.launch.gang import Task
from runner.launch.task_starter import TaskStarter
from runner.system.exit_codes import FAILED, INTERRUPTED, USER_ERROR
from tests.config.test_config import composed
from tests.support.jobs import SMALL
from tests.support.processes import is_gone, pidfds_of, wait_until

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
LONGEST_SECS = 6.0
ENDS = {
    signal.SIGKILL: (-signal.SIGKILL,),
    signal.SIGABRT: (-signal.SIGABRT,),
    # Before its handler is there; before its first step or checkpoint; after it.
    signal.SIGTERM: (-signal.SIGTERM, FAILED, INTERRUPTED),
}


def task_of(folder: Path) -> Task:
    """A task that trains for long."""
    settings = [one for one in SMALL if not one.startswith("train.max_steps")]
    folder.mkdir(parents=True)
    config = parsing.parse(composed([*settings, "train.max_steps=100000000", f"model_dir={folder}/run"]))
    (folder / "run").mkdir()
    schema.save(config, folder / "task.yaml")
    return Task(ALONE, task_group.task_argv(folder / "task.yaml"), task_group.task_env(ENV))


def start_many(starter: TaskStarter, server: psutil.Process, number: int) -> dict[str, Any]:
    wrong = Task(ALONE, task_group.task_argv(Path("/nowhere/task.yaml")), {**task_group.task_env(ENV), "RUNNER_": "1"})
    memory, codes = [], []
    for count in range(number):
        codes.append(starter.start(wrong).close())
        if count % max(1, number // 4) == number // 4 - 1 or count == 0:
            wait_until(lambda: not pidfds_of(server))  # it lets go of a task just after it has told how that ended
            full = server.memory_full_info()
            memory.append((round(full.uss / 2**20, 1), server.num_fds(), server.num_threads()))
    return {"lost codes": [code for code in codes if code != USER_ERROR], "server: USS MB, files, threads": memory}


def kill_many(starter: TaskStarter, folder: Path, number: int, seed: int) -> dict[str, Any]:
    rng, wrong, counts = random.Random(seed), [], dict.fromkeys((one.name for one in ENDS), 0)
    for count in range(0, number, 2):
        running = [starter.start(task_of(folder / str(count + beside))) for beside in range(2)]
        waits = sorted(rng.uniform(0, LONGEST_SECS) ** 2 / LONGEST_SECS for _ in running)
        families = []
        for process, wait, before in zip(running, waits, [0.0, waits[0]], strict=True):
            time.sleep(wait - before)
            families.append([process.pid, *(child.pid for child in psutil.Process(process.pid).children(True))])
            number_of = rng.choice(list(ENDS))
            os.kill(process.pid, number_of)
            code = process.wait(300)
            process.kill()
            process.close()
            counts[number_of.name] += 1
            if code not in ENDS[number_of]:
                wrong.append((count, number_of.name, round(wait, 2), code))
        wait_until(lambda families=families: all(is_gone(pid) for family in families for pid in family))  # type: ignore[misc]
    return {"kills": counts, "wrong codes": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    starter = TaskStarter()
    starter.prepare([Task(ALONE, task_group.task_argv(asked.folder), task_group.task_env(ENV))])
    starter.wait([])
    assert starter.server is not None, "there is no server"
    server = psutil.Process(starter.server.pid)
    found = start_many(starter, server, asked.starts)
    found |= kill_many(starter, asked.folder, asked.kills, asked.seed)
    assert starter.server is not None, "the server was lost"
    time.sleep(0.5)
    found["left"] = [child.status() for child in server.children(recursive=True)]
    starter.close()
    found["server is gone"] = not psutil.pid_exists(server.pid)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
