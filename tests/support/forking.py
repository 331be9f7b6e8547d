"""A task server that imports nothing large: `python -m tests.support.forking <socket>`. Its children execute Python.

The first argument of a child is what it executes; it exits as a task does.
"""

from __future__ import annotations

import socket
import sys

import runner.task.__main__  # noqa: F401  (what `become` makes of a child)
from runner.system import task_server
from runner.task import server
from runner.task.main import end

if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    serving = server.Server(connection)
    task_server.send(connection, {"ready": True})
    request = serving.serve()
    if request is not None:
        shared = server.become(request)
        names: dict[str, int] = {"code": 0}
        exec(sys.argv[1], names)
        task_server.tell(request.status, task_server.INTENT, names["code"])
        end(names["code"], shared)
