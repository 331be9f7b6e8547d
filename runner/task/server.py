"""`python -m runner.task.server <socket>`: forks tasks from a process that has imported TensorFlow but not used it.

A task spends 4 of its first 5 seconds on imports. Here they are done once: TensorFlow, Keras and everything that a task
imports before it reads its config. No user function is imported, and no TensorFlow function is called.

A process can be forked safely if no other thread can hold a lock at that moment. After these imports there are threads
of OpenBLAS (NumPy and SciPy), which it ends before each fork and restarts on demand, and one of jemalloc (pyarrow),
which takes its locks before each fork and does without the thread in the child. The server checks that there are no
others: it forks a first child without work, and refuses to serve if another thread exists.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from runner.config import parsing
from runner.system import gc_pause, task_server
from runner.system.child_process import STOP_SIGNALS, Descriptors
from runner.system.standard_streams import keep_saying
from runner.system.task_server import ChildRequest
from runner.task.main import end, main, quiet_import

THREADS_THAT_KNOW_FORKS = ("jemalloc_bg_thd",)
"""Names (in the operating system) of threads that may exist while a child is forked."""

ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio")
"""Device files that a child cannot use if its parent has opened them."""


def preload() -> None:
    """Import what each task imports whatever its config, at its beginning or later, and build the schema of configs."""
    with quiet_import(os.environ), gc_pause.not_searched():
        import tensorboard.summary.v2  # noqa: F401  (by the first `tf.summary.scalar`: 96 modules)

        import runner.task.__main__
        import runner.task.commands  # noqa: F401

        parsing.schema_node()


def describe_unfit() -> str:
    """Return why a child of this process might hang or fail, in words; '' if it can be forked."""
    from runner.tf_private import cluster

    if not cluster.is_unused():
        return "importing TensorFlow has used it"
    if threading.active_count() > 1:
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"the imports started Python threads: {', '.join(names)}"
    child = _fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    others = sorted(_thread_names() - set(THREADS_THAT_KNOW_FORKS))
    if others:
        return f"the imports started threads that do not end for a fork: {', '.join(others)}"
    opened = sorted(path for path in _open_paths() if path.startswith(ACCELERATORS))
    if opened:
        return f"the imports opened {', '.join(opened)}"
    return ""


class Server:
    """Forks a child for each request, and reports how each child ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (process id, status pipe)
        # Ignore SIGTERM: the server ends with the process that it serves, after the children. A system that shuts down
        # or a batch queue sends SIGTERM to all processes, and the exit codes are still needed then.
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}

    def serve(self) -> ChildRequest | None:
        """Fork a child for each request, and tell the supervisor of each child's exit code.

        Returns:
          None in the server, when the other end is closed and no child is left. In each forked child: its request.
        """
        events = select.poll()
        events.register(self._connection, select.POLLIN)
        is_open = True
        while is_open or self._children:
            for ready, _ in events.poll():
                if ready in self._children:
                    events.unregister(ready)
                    child, status = self._children.pop(ready)
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    task_server.tell(status, task_server.EXIT, code)
                    os.close(status)
                    os.close(ready)  # the pidfd last: once it is closed, the status pipe is closed, too
                    continue
                try:
                    # The files are those of `ChildRequest.open_files`, in its order.
                    message, (*of_child, directory, status) = task_server.receive(self._connection)
                except OSError:
                    events.unregister(self._connection)
                    is_open = False
                    continue
                request = ChildRequest(message["argv"], message["env"], Descriptors(*of_child), directory, status)
                pidfd = self._fork(request)
                if pidfd is None:
                    return request
                if pidfd >= 0:
                    events.register(pidfd, select.POLLIN)
        return None

    def _fork(self, request: ChildRequest) -> int | None:
        """Fork a child and answer the request. Return its pidfd; -1: the system allows no more processes; None: in the
        child.

        The request is answered when the child leads its own session, because then it can be killed by its group.
        """
        read_end, write_end = os.pipe()
        try:
            child = _fork()
        except OSError as error:
            task_server.send(self._connection, {"error": f"fork failed: {error.strerror}"})
            for descriptor in (read_end, write_end, *request.open_files):
                os.close(descriptor)
            return -1
        if not child:
            os.setsid()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._connection.close()
            for pidfd, (_, status) in self._children.items():
                os.close(pidfd)
                os.close(status)
            os.close(read_end)
            os.close(write_end)
            return None
        os.close(write_end)
        os.read(read_end, 1)  # returns when the child has closed its end of the pipe after `setsid`, or has ended
        os.close(read_end)
        pidfd = os.pidfd_open(child)
        self._children[pidfd] = (child, request.status)
        for descriptor in (*request.descriptors, request.directory):  # a pipe ends when the child ends
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the other side has ended, so the child's lifeline ends it
            task_server.send(self._connection, {"pid": child}, [pidfd])
        return pidfd


def become(request: ChildRequest) -> frozenset[str]:
    """Turn this forked child into a process like one started by `request`.

    Returns:
      Names of the modules whose objects the server made. `end` keeps Python from deleting these objects.
    """
    made_by_server = frozenset(sys.modules)  # before this child imports anything
    _take_streams(request)
    _take_environment(request)
    _reseed()
    return made_by_server


def _take_streams(request: ChildRequest) -> None:
    """Write to the standard output and error of the request, and close their descriptors."""
    for standard, descriptor in ((1, request.descriptors.stdout), (2, request.descriptors.stderr)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    # Keep the objects, since log handlers write to them, with the buffering that Python starts with.
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]


def _take_environment(request: ChildRequest) -> None:
    """Take the working directory, the environment variables, the arguments and the main module of the request."""
    os.fchdir(request.directory)
    os.close(request.directory)
    os.environ.clear()
    # With LIFELINE and HEARTBEAT, the numbers of the descriptors.
    os.environ.update(request.descriptors.added_to(request.env))
    sys.argv[:] = [str(sys.modules["runner.task.__main__"].__file__), *request.argv]
    sys.modules["__main__"] = sys.modules["runner.task.__main__"]  # processes that multiprocessing spawns import it


def _reseed() -> None:
    """Seed what draws random numbers; otherwise all children would draw the same."""
    # After `preload` the server has both modules, so these imports only name them.
    import multiprocessing

    import numpy as np

    random.seed()
    np.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of any other thread; `describe_unfit` has checked which threads there are.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _thread_names() -> set[str]:
    """Return the names of all threads but this."""
    names = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if thread.name != str(os.getpid()):
                names.add((thread / "comm").read_text().strip())
    return names


def _open_paths() -> set[str]:
    paths = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return paths


def start(connection: socket.socket) -> ChildRequest | None:
    """Import, report readiness, and serve. In a child: return its request."""
    server = Server(connection)
    try:
        preload()
        unfit = describe_unfit()
    except Exception as error:
        unfit = f"{type(error).__name__}: {error}"
    answer: dict[str, Any] = {"ready": True}
    if unfit:
        answer = {"error": unfit}
    with contextlib.suppress(OSError):  # the other end was closed; `serve` will notice
        task_server.send(connection, answer)
    if unfit:
        return None
    return server.serve()


if __name__ == "__main__":
    keep_saying()
    request = start(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        # Outside of the server's frames, so that none of their code runs when the task ends.
        made_by_server = become(request)
        code = main()
        task_server.tell(request.status, task_server.INTENT, code)
        end(code, made_by_server)
    os._exit(0)  # nothing was used that needs an orderly end
