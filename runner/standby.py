"""A spare process: `python -m runner.standby`. It has imported TensorFlow and waits to become a task.

What is set per process (devices, collectives, the user's modules) is left for the task to do.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

from runner import task
from runner.heartbeat import HEARTBEAT
from runner.launcher import LIFELINE, end_with_parent
from runner.output import keep_saying


def wait() -> NoReturn:
    """Imports, waits for a line on stdin that says which task to be, and is that task."""
    end_with_parent(os.environ)
    with task.quiet_import(os.environ):
        import keras  # noqa: F401  TensorFlow imports it when it is first used

        from runner import commands  # noqa: F401
    order = json.loads(sys.stdin.readline())
    own = {name: os.environ[name] for name in (LIFELINE, HEARTBEAT)}
    os.environ.clear()
    os.environ.update({**order["env"], **own})
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # as for every task
    os.close(nothing)
    task.end(task.main(order["argv"]))


if __name__ == "__main__":
    keep_saying()
    wait()
