"""The control plane of a cluster of up to 256 supervisors whose tasks do nothing.

Their messages, gangs and couriers are real. Each supervisor is a thread, the threads take turns, and the clock is one
that jumps to whoever wakes up next.

So nothing depends on the speed of the machine: what is counted, and the seconds, are the same each time.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from runner.distribute.cluster import Cluster
from runner.launch import gang, rendezvous
from runner.launch.gang import Gang, GangResult, Task
from runner.launch.rendezvous import FollowerRendezvous, LeaderRendezvous
from runner.remote import upload
from runner.remote.note import Note
from runner.remote.store import CALL_FILE, LEASES, PEERS_FOLDER, Lease, Store
from runner.remote.upload import Courier, Uploader
from runner.system.exit_codes import FINISHED, PEER_LOST
from runner.tracking.journal import Journal, Journals, journal_path

KILLED = -9
FILE_EVENTS = ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")
"""Operations of which CPython tells an audit hook, and that are calls to the server of a shared folder."""
NOTICE_SECS = 8.0
"""Seconds after which TensorFlow's heartbeat tells the other tasks of a loss."""
TRAIN_SECS = 5.0
"""Seconds that the tasks run before one of them is lost, and afterwards until they have finished."""


class Clock:
    """A clock that jumps to the next thread that wakes up. One thread runs at a time, in an order that is always the
    same.

    Attributes:
      now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_secs: dict[str, float] = {}
        self._due: list[tuple[float, int, threading.Event]] = []
        self._order = itertools.count()
        self._own = threading.local()
        self._yielded = threading.Event()
        self._errors: list[BaseException] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        """Let the others run, and return when it is this thread's turn after `secs`."""
        self._pause(self.now + secs)

    def start(self, name: str, act: Callable[[], None], at: float = 0.0) -> None:
        """Call `act` in a thread of this name, `at` seconds after the beginning."""
        go = threading.Event()

        def live() -> None:
            self._own.go = go
            go.wait()
            go.clear()
            try:
                act()
            except BaseException as error:
                self._errors.append(error)
            self.cpu_secs[name] = time.thread_time()
            self._yielded.set()

        threading.Thread(target=live, name=name, daemon=True).start()
        heapq.heappush(self._due, (at, next(self._order), go))

    def run(self) -> None:
        """Run until all threads have ended. Raises: what a thread raised."""
        while self._due:
            until, _, go = heapq.heappop(self._due)
            self.now = max(self.now, until)
            self._yielded.clear()
            go.set()
            self._yielded.wait()
            if self._errors:
                raise self._errors[0]

    def _pause(self, until: float) -> None:
        go = self._own.go
        heapq.heappush(self._due, (until, next(self._order), go))
        self._yielded.set()
        go.wait()
        go.clear()


class Operations:
    """Counts what each thread asks of files below a folder, and of a store, by the thread's name."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def file(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if arguments else None
        if isinstance(path, str) and path.startswith(self._folder):
            self.counts[threading.current_thread().name] += 1

    @contextmanager
    def in_folder(self, folder: Path) -> Iterator[None]:
        """Count inside this context."""
        self._folder = str(folder)
        _counting.append(self)
        try:
            yield
        finally:
            _counting.remove(self)


_counting: list[Operations] = []


def _heed(event: str, arguments: tuple[Any, ...]) -> None:
    if _counting and event in FILE_EVENTS:
        _counting[-1].file(event, arguments)


sys.addaudithook(_heed)  # no hook can be removed: it does nothing while nobody counts


class CountedStore:
    """A file system of fsspec whose calls are counted, and the objects that it names or fetches."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self.calls = Counter[str]()
        self.objects = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._fs, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            who = threading.current_thread().name.partition("/")[0]
            num_objects = len(found) if name in ("find", "cat") else 1
            self.calls[who] += num_objects if name == "cat" else 1
            self.objects[who] += num_objects
            return found

        return call


class IdleProcess:
    """A task that does nothing for some seconds, in the place of a process.

    Args:
      ends_at: when it ends, by the clock.
      code: its exit code then.
    """

    def __init__(self, clock: Clock, ends_at: Callable[[], float], code: Callable[[], int]) -> None:
        self._clock, self._ends_at, self._code, self._killed = clock, ends_at, code, False
        nothing = lambda: None  # noqa: E731
        self.monitor = SimpleNamespace(silent_secs=lambda: 0.0, forgive=nothing, wants_to_stop=False)

    def wait(self, secs: float = 0) -> int | None:
        if secs and self._result() is None:
            self._clock.sleep(secs)
        return self._result()

    def _result(self) -> int | None:
        if self._killed:
            return KILLED
        return self._code() if self._clock.now >= self._ends_at() else None

    def kill(self) -> None:
        self._killed = True

    def ask_to_stop(self) -> None:
        self.kill()

    def close(self) -> None: ...


@dataclass
class Found:
    """What a cluster did.

    Attributes:
      agreed: generation -> seconds from the last supervisor's start (a loss) until each task was started (again).
      noticed: seconds from the loss of a task until the chief knew it.
      operations: name of a supervisor -> number of its operations on the shared folder.
      cpu_secs: name of a supervisor -> seconds of CPU.
      requests, objects: name of a host -> number of its requests to the store, and of objects that these named.
    """

    agreed: dict[int, float] = field(default_factory=dict)
    noticed: float = 0.0
    operations: Mapping[str, int] = field(default_factory=dict)
    cpu_secs: Mapping[str, float] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    objects: Mapping[str, int] = field(default_factory=dict)


def places_of(num_tasks: int) -> list[Cluster]:
    """The places of a chief and workers."""
    tasks = {"chief": ["h:1"], "worker": [f"h{index}:1" for index in range(num_tasks - 1)]}
    return [Cluster("chief", 0, tasks), *(Cluster("worker", index, tasks) for index in range(num_tasks - 1))]


class ControlPlane:
    """A cluster that starts, trains, loses a worker, starts again and finishes.

    Args:
      folder: the shared folder; with `store`, the parent of the folders of all hosts.
      apart_secs: seconds between the starts of two supervisors.
      store: where the messages travel; None: in the shared folder.
    """

    def __init__(self, num_tasks: int, folder: Path, apart_secs: float = 0.0, store: Store | None = None) -> None:
        self._places, self._folder, self._apart_secs, self._store = places_of(num_tasks), folder, apart_secs, store
        self._clock, self._operations, self._found = Clock(), Operations(), Found()
        self._started = Counter[int]()
        self._lost_at = float("inf")
        self._ended: list[str] = []

    def run(self) -> Found:
        counted = CountedStore(self._store.fs) if self._store is not None else None
        if self._store is not None:
            self._store.fs = counted
        for number, place in enumerate(self._places):
            self._prepare(place)
            self._clock.start(place.name, functools.partial(self._supervise, place), self._apart_secs * number)
        with _sleeping_by(self._clock), self._operations.in_folder(self._folder):
            self._clock.run()
        found = self._found
        found.operations, found.cpu_secs = self._operations.counts, self._clock.cpu_secs
        if counted is not None:
            found.requests, found.objects = counted.calls, counted.objects
        return found

    def folder_of(self, place: Cluster) -> Path:
        return self._folder if self._store is None else self._folder / place.name

    def _prepare(self, place: Cluster) -> None:
        folder = self.folder_of(place)
        folder.mkdir(parents=True, exist_ok=True)
        if self._store is None:
            return
        (folder / LEASES / PEERS_FOLDER).mkdir(parents=True)
        Note(self._store.url, place.name if place.is_chief else "", worker=place.worker_index).save(folder)
        facts = {"task_type": place.task_type, "task_index": place.task_index, "tasks": place.tasks}
        lease = Lease.take(self._store, place.name, 600) if place.is_chief else Lease(self._store, 0, facts)
        courier = Courier(Uploader(folder, lease))
        self._clock.start(f"{place.name}/courier", lambda: self._carry(courier))

    def _carry(self, courier: Courier) -> None:
        while len(self._ended) < len(self._places):  # a supervisor that has not ended waits for a message
            upload._exchange(courier._uploader, courier, is_due=False)
            self._clock.sleep(upload.RETRY_SECS)
        if courier._uploader.is_chief:
            courier._uploader.lease.end()

    # --- the supervisors, as `RestartingGang` and `WorkerSupervisor` are ----------------------------------------------

    def _supervise(self, place: Cluster) -> None:
        if place.is_chief:
            self._lead(place)
        else:
            self._follow(place)
        self._ended.append(place.name)

    def _lead(self, place: Cluster) -> None:
        folder = self.folder_of(place)
        leader = LeaderRendezvous(folder, place, 1e6, clock=self._clock.monotonic)
        journals = Journals(folder)
        for generation in (1, 2):
            assert leader.gather(generation, ()) is None
            journals.mark()
            ending = leader.reason(self._run(place, generation, leader.look))
            if generation == 1:
                assert ending.is_loss and ending.place == self._places[-1], ending
                self._found.noticed = self._clock.now - self._lost_at
        assert ending.code == FINISHED
        leader.end(FINISHED)

    def _follow(self, place: Cluster) -> None:
        folder = self.folder_of(place)
        follower = FollowerRendezvous(folder, place, 1e6, self._clock.monotonic)
        journals = Journals(folder)
        while follower.wait_for_go((), forever=True):
            journals.mark()
            ending = self._run(place, follower.generation, follower.look)
            follower.tell("done" if ending.code == FINISHED else "lost", ending.reason, ending.code)
        assert follower.code == FINISHED

    def _run(self, place: Cluster, generation: int, look: Callable[[], GangResult | None]) -> GangResult:
        """Run the gang of a supervisor: a task that does nothing."""
        self._note_start(generation)
        is_lost = place == self._places[-1]

        def ends_at() -> float:
            if generation == 1:
                return self._lost_at + (0.0 if is_lost else NOTICE_SECS)
            return self._finishes_at

        def code() -> int:
            if generation == 1:
                return KILLED if is_lost else PEER_LOST
            return FINISHED

        journal = Journal(journal_path(self.folder_of(place), place.role, place.task_index), self._clock.monotonic)
        journal.event("joined")
        journal.close()
        process: Any = IdleProcess(self._clock, ends_at, code)
        tasks = [Task(place, (), {})]
        return Gang(start=lambda task: process, look_around=look, say=lambda text: None).run(tasks)

    def _note_start(self, generation: int) -> None:
        self._started[generation] += 1
        if self._started[generation] < len(self._places):
            return
        since = self._apart_secs * (len(self._places) - 1) if generation == 1 else self._lost_at
        self._found.agreed[generation] = self._clock.now - since
        if generation == 1:
            self._lost_at = self._clock.now + TRAIN_SECS
        else:
            self._finishes_at = self._clock.now + TRAIN_SECS

    _finishes_at = float("inf")


def gather(places: Sequence[Cluster], folder: Path, apart_secs: float) -> int:
    """Let the others join the chief, one each `apart_secs`, and return the operations of its supervisor."""
    chief, *workers = places
    (folder / PEERS_FOLDER).mkdir(parents=True)
    operations = Operations()
    clock = Clock()
    leader = LeaderRendezvous(folder, chief, 1e6, clock=clock.monotonic)

    def join(place: Cluster) -> None:
        call = json.loads((folder / CALL_FILE).read_text())
        answer = {"run": call["run"], "generation": call["generation"], "nonce": place.name, "state": "ready"}
        path = folder / PEERS_FOLDER / f"{place.name.replace(':', '-')}.json"
        path.write_text(json.dumps(answer))

    def lead() -> None:
        assert leader.gather(1, ()) is None

    with _sleeping_by(clock), operations.in_folder(folder):
        clock.start(chief.name, lead)
        for number, place in enumerate(workers, 1):
            clock.start(place.name, functools.partial(join, place), apart_secs * number)
        clock.run()
    return operations.counts[chief.name]


@contextmanager
def _sleeping_by(clock: Clock) -> Iterator[None]:
    """Inside this context the product sleeps by `clock`. Its clocks are arguments; its sleeps are not."""
    stand_in = SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic)
    with mock.patch.object(rendezvous, "time", stand_in), mock.patch.object(gang, "time", stand_in):
        yield
