"""Damage to a run with a URL as model_dir, done between its starts: to its local folder, to its bucket, and meanwhile.

`python -m tests.support.store_damage --starts 40 --seed 1` does 40 starts. Before each, one or two attacks are drawn.
After each, what the bucket has is compared with what it had, and with a run that nobody disturbs. A run has
STARTS_OF_A_RUN of them, or ends with the first that fails; the next begins where all began. What is drawn depends on
the seed and the number of the run: `--first 3 --starts 8` does the fourth run again.

`--only snapshot` (more often: one of them) draws nothing else, `--each 1` does a run of one start, or several, for each
attack, `--list` says what there is, and `--requests 2000` counts the requests of a start beside 2,000 objects.

It knows the command line, the files of the local folder, the objects of the bucket and what a checkpoint holds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from runner.checkpoint.integrity import DamagedCheckpointsError, VerifiedCheckpoints, find_damage
from runner.checkpoint.reader import Reader
from runner.checkpoint_files.layout import step_of
from tests.support.object_store import BUCKET, CREDENTIALS, ROOT, RUN, S3, Start, folder_in
from tests.support.processes import processes_in

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

PLACE = "run"
"""Of the run in the bucket."""
KEEP_MAX, SAVE_STEPS = 3, 4
BASE_STEPS = (8, 20)
"""Where the two starts end with which each run begins."""
STARTS_OF_A_RUN = 8
TOTAL = BASE_STEPS[-1] + 2 * SAVE_STEPS * STARTS_OF_A_RUN
"""Steps of the undisturbed run; no other comes farther."""
WORDS = (
    f"model_dir=s3://{BUCKET}/{PLACE}", *RUN, "model.fn=tests.support.object_store.delayed",
    f"checkpoint.save_steps={SAVE_STEPS}", f"checkpoint.keep_max={KEEP_MAX}", "run.upload_secs=60",
)  # fmt: skip
END_SECS = 300.0
DAY_SECS = 24 * 60 * 60
WRITES = 70
"""About so many objects are written or deleted in a start."""
LATENCY_SECS = 0.2
"""Of each request while the store is slow."""
QUIET_SECS = 1.5
"""A start that says nothing for so long has trained."""


# --- the store ------------------------------------------------------------------------------------------------------


class Server(S3):
    """Counts the requests that reach the store, by what they are for; each takes LATENCY_SECS while it is slow.

    Attributes:
      requests: kind -> how many.
      changes: what was written and removed, in order: (name below the URL of the run, its contents or None).
    """

    def __init__(self) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self.changes: list[tuple[str, bytes | None]] = []
        self._noting = threading.Lock()
        super().__init__()

    @property
    def behind(self) -> str:
        """The URL of the store itself, which has no faults and does not count."""
        return f"http://{self._behind}"

    def _request(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, list[Any], bytes]:
        with self._noting:
            self.requests[kind_of(method, path)] += 1
        if self.mode == "slow":
            time.sleep(LATENCY_SECS)
        answer = super()._request(method, path, data, headers)
        if answer[0] < 300:
            with self._noting:
                self.changes += changes_by(method, path, data)
        return answer


def kind_of(method: str, path: str) -> str:
    """Return what a request of S3 does: list, get, put, head, delete or another method, and whether to a lease."""
    is_listing = method == "GET" and "list-type=" in path
    kind = "list" if is_listing else method.lower()
    return f"{kind} .lease" if ".lease" in path else kind


def changes_by(method: str, path: str, data: bytes) -> list[tuple[str, bytes | None]]:
    """Return (name, contents or None) of each object of the run that a request writes or removes."""
    place, _, query = urllib.parse.unquote(path).partition("?")
    if method == "POST" and query.startswith("delete"):
        keys = [urllib.parse.unquote(key.decode()) for key in re.findall(rb"<Key>(.*?)</Key>", data)]
        return [(key.removeprefix(f"{PLACE}/"), None) for key in keys]
    if method not in ("PUT", "DELETE"):
        return []
    return [(place.removeprefix(f"/{BUCKET}/{PLACE}/"), data if method == "PUT" else None)]


class Bucket:
    """The objects of the run, by their names below its URL."""

    def __init__(self, server: Server) -> None:
        boto3 = importlib.import_module("boto3")  # it has no types
        self._client = boto3.client(
            "s3", endpoint_url=server.behind, region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip

    def marks(self) -> dict[str, str]:
        """Return name -> the checksum of its contents."""
        found = {}
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{PLACE}/"):
            for item in page.get("Contents", ()):
                found[item["Key"].removeprefix(f"{PLACE}/")] = item["ETag"]
        return found

    def get(self, name: str) -> bytes:
        answer = self._client.get_object(Bucket=BUCKET, Key=f"{PLACE}/{name}")
        data: bytes = answer["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{PLACE}/{name}", Body=data)

    def remove(self, name: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=f"{PLACE}/{name}")

    def all(self) -> dict[str, bytes]:
        return {name: self.get(name) for name in self.marks()}

    def become(self, objects: Mapping[str, bytes]) -> None:
        """Make these the only objects."""
        for name in self.marks():
            self.remove(name)
        for name, data in objects.items():
            self.put(name, data)


@dataclass
class Seen:
    """What the bucket has, as somebody finds it who fetches it.

    Attributes:
      marks: name -> the checksum of each object.
      newest: the step from which a machine without a folder would continue; 0: there is none.
      whole: steps of the checkpoints that are undamaged, in order.
      broken: step of each other checkpoint with an index -> what is wrong with it.
      others: step of each whole checkpoint with other values than the undisturbed run -> their names.
      named: steps in the state file.
    """

    marks: dict[str, str]
    newest: int = 0
    whole: list[int] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)
    others: dict[int, list[str]] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)


Values = Mapping[str, np.ndarray]


def values_of(path: Path) -> Values:
    """Return the variables of a checkpoint, slots included, without what the runner notes beside them."""
    reader = Reader(path)
    return reader.get_many(name for name in reader.names() if not name.startswith("_runner"))


def differing(found: Values, expected: Values) -> list[str]:
    """Return the names of the variables that are not bitwise the same, or that one side lacks."""
    names = sorted(found.keys() | expected.keys())
    return [
        name
        for name in names
        if name not in found or name not in expected or found[name].tobytes() != expected[name].tobytes()
    ]


def indexes(names: Iterable[str]) -> list[int]:
    """Return the steps of the checkpoints whose index is among `names`, in order."""
    matches = (re.fullmatch(r"model\.ckpt-(\d+)\.index", name) for name in names)
    return sorted(int(match.group(1)) for match in matches if match)


def look(bucket: Bucket, expected: Mapping[int, Values]) -> Seen:
    """Fetch all checkpoints of the bucket into a scratch folder, and read them in full."""
    seen = Seen(bucket.marks())
    with tempfile.TemporaryDirectory() as scratch:
        for name in seen.marks:
            if name == "checkpoint" or os.path.basename(name).startswith("model.ckpt-"):
                path = Path(scratch, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(bucket.get(name))
        for step in indexes(seen.marks):
            path = Path(scratch, f"model.ckpt-{step}")
            damage = find_damage(path)
            if f"runner_files/{path.name}.manifest.json" not in seen.marks:
                damage = damage or "it has no manifest"  # it would pass for one of tf.estimator
            if damage:
                seen.broken[step] = damage
                continue
            seen.whole.append(step)
            if names := differing(values_of(path), expected.get(step, {})):
                seen.others[step] = names
        if "checkpoint" in seen.marks:
            text = Path(scratch, "checkpoint").read_text()
            seen.named = [int(step) for step in re.findall(r'^all_model.*"model\.ckpt-(\d+)"$', text, re.MULTILINE)]
        with contextlib.suppress(DamagedCheckpointsError):
            seen.newest = step_of(VerifiedCheckpoints(scratch).latest() or "") or 0
    return seen


# --- the machines, and a start on one of them -------------------------------------------------------------------------


@dataclass
class Machine:
    """A machine, as far as its caches are concerned.

    Attributes:
      caches: its folder of caches.
      folder: the local folder of the run.
      snapshots: copies of the local folder after earlier starts, in order: (when, path).
    """

    caches: Path
    folder: Path
    snapshots: list[tuple[str, Path]] = field(default_factory=list)

    def files(self, pattern: str = r"(runner_files/)?model\.ckpt-\d+\..*") -> list[Path]:
        """Return the files whose names in the local folder match, without results of evaluations."""
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        names = [str(path.relative_to(self.folder)) for path in found]
        return [
            self.folder / name for name in names if re.fullmatch(pattern, name) and not name.endswith(".metrics.json")
        ]

    def steps(self) -> list[int]:
        return indexes(path.name for path in self.files())

    def keep_snapshot(self, when: str, folder: Path) -> None:
        if self.folder.is_dir():
            path = folder / uuid.uuid4().hex
            shutil.copytree(self.folder, path, symlinks=True)
            self.snapshots.append((when, path))


Act = Callable[[Start, float], None]
"""What happens during a start: called every 10 ms with the start and the seconds since it began."""


@dataclass
class Plan:
    """The next start.

    Attributes:
      machine: where it is.
      does: train, evaluate or by hand (`runner.remote.upload`).
      acts: what happens meanwhile.
      step_secs: how long a step takes.
      may_be_refused: the store is away when it begins, so it may end with code 2, and say why.
      changes: as in `Server`, of this start.
    """

    machine: Machine
    does: str = "train"
    acts: list[Act] = field(default_factory=list)
    step_secs: float = 0
    may_be_refused: bool = False
    changes: list[tuple[str, bytes | None]] = field(default_factory=list)


@dataclass
class Outcome:
    """How a start ended.

    Attributes:
      code: its exit code; -9: it was killed.
      said: all that it said.
    """

    code: int
    said: str

    @property
    def began(self) -> int | None:
        """The lowest step from which it trained; None: it did not train."""
        return min((int(step) - 1 for step in re.findall(r"^step (\d+)/\d+", self.said, re.MULTILINE)), default=None)

    @property
    def evaluated(self) -> int | None:
        """The step that `command=evaluate` reported."""
        steps = re.findall(r"^global_step: (\d+)$", self.said, re.MULTILINE)
        return int(steps[-1]) if steps else None


def start_on(server: Server, plan: Plan, target: int) -> Outcome:
    """Do the start that is planned, and wait until all its processes are gone."""
    server.mode, caches = "ok", plan.machine.caches
    caches.mkdir(parents=True, exist_ok=True)
    said = caches / "said.txt"
    said.touch()
    before = said.stat().st_size
    env = {**server.env, "STEP_SECS": str(plan.step_secs)}
    if plan.does == "by hand":
        words = [sys.executable, "-m", "runner.remote.upload", str(plan.machine.folder)]
        with open(said, "a") as output:
            sending = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=caches,
                env={**os.environ, **env, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(caches)},
            )  # fmt: skip
            try:
                code = sending.wait(END_SECS)
            except subprocess.TimeoutExpired:
                sending.kill()
                sending.wait()
                code = 1
        return Outcome(code, said.read_text()[before:])
    command = ("command=evaluate",) if plan.does == "evaluate" else (f"train.max_steps={target}",)
    start = Start(server, caches, *WORDS, *command, env=env)
    began = time.monotonic()
    while start.popen.poll() is None:
        secs = time.monotonic() - began
        for act in plan.acts:
            act(start, secs)
        if secs > END_SECS:
            start.end_of_the_machine()
            return Outcome(1, f"{said.read_text()[before:]}\nIt has not ended within {END_SECS:.0f} s.")
        time.sleep(0.01)
    server.mode = "ok"
    while processes_in(caches):  # who was killed may have left some, which go on for a while
        if time.monotonic() > began + END_SECS:
            return Outcome(1, f"{said.read_text()[before:]}\nIts processes are there after {END_SECS:.0f} s.")
        time.sleep(0.1)
    return Outcome(start.end(), said.read_text()[before:])


class Scene:
    """A run, and what its attacks need to know.

    Attributes:
      rng: draws.
      plan: the next start, which the attacks before it change.
      strangers: objects that are no file of the run: name -> contents.
      target: the step to which the last start trained.
      route: machines of the starts after the next, where an attack has said them.
    """

    def __init__(self, rng: random.Random, server: Server, bucket: Bucket, machines: Sequence[Machine]) -> None:
        self.rng, self.server, self.bucket, self.machines = rng, server, bucket, machines
        self.strangers: dict[str, bytes] = {}
        self.target = BASE_STEPS[-1]
        self.route: list[Machine] = []
        self.plan = Plan(machines[0])

    @property
    def here(self) -> Machine:
        return self.plan.machine

    @property
    def other(self) -> Machine:
        return self.machines[1] if self.here is self.machines[0] else self.machines[0]


# --- the attacks: each returns what it has done; "": it could do nothing ----------------------------------------------

Attack = Callable[[Scene], str]
ATTACKS: dict[str, Attack] = {}
MOVES = ("second machine", "second machine, unsent", "evaluate elsewhere")
JOURNALS = ("events.chief-0.jsonl", "events.supervisor-0.jsonl")


def attack(name: str) -> Callable[[Attack], Attack]:
    """Make a function an attack of that name."""

    def add(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return add


@attack("empty")
def _empty(scene: Scene) -> str:
    if not scene.here.folder.is_dir():
        return ""
    for path in scene.here.folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return "all but dotfiles is removed"


@attack("empty whole")
def _empty_whole(scene: Scene) -> str:
    shutil.rmtree(scene.here.folder, ignore_errors=True)
    return "the folder is deleted"


@attack("snapshot")
def _snapshot(scene: Scene) -> str:
    earlier = scene.here.snapshots[:-1]  # the last one is what is there
    if not earlier:
        return ""
    when, path = scene.rng.choice(earlier)
    shutil.rmtree(scene.here.folder, ignore_errors=True)
    shutil.copytree(path, scene.here.folder, symlinks=True)
    return f"the folder as it was {when}"


def _chosen(scene: Scene, *, newest: bool) -> Path | None:
    """Return a file of a checkpoint, or of the newest one, of the local folder; None: there is none."""
    steps = scene.here.steps()
    if not steps:
        return None
    step = steps[-1] if newest else scene.rng.choice(steps)
    return scene.rng.choice(scene.here.files(rf"(runner_files/)?model\.ckpt-{step}\..*"))


def _truncate(scene: Scene, *, newest: bool) -> str:
    path = _chosen(scene, newest=newest)
    if path is None:
        return ""
    size = scene.rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} has {size} bytes"


def _flip(scene: Scene, *, newest: bool, keeps_time: bool) -> str:
    path = _chosen(scene, newest=newest)
    if path is None or not path.stat().st_size:
        return ""
    facts, data = path.stat(), bytearray(path.read_bytes())
    place = scene.rng.randrange(len(data))
    data[place] ^= 1 << scene.rng.randrange(8)
    path.write_bytes(data)
    if keeps_time:
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    return f"byte {place} of {path.name} has changed"


def _delete(scene: Scene, path: Path | None) -> str:
    if path is None or not path.exists():
        return ""
    path.unlink()
    return f"{path.name} is deleted"


ATTACKS |= {
    "truncate": lambda scene: _truncate(scene, newest=False),
    "truncate newest": lambda scene: _truncate(scene, newest=True),
    "flip": lambda scene: _flip(scene, newest=False, keeps_time=True),
    "flip newest": lambda scene: _flip(scene, newest=True, keeps_time=True),
    "flip newest, new time": lambda scene: _flip(scene, newest=True, keeps_time=False),
    "delete a file": lambda scene: _delete(scene, _chosen(scene, newest=False)),
    "delete a file of newest": lambda scene: _delete(scene, _chosen(scene, newest=True)),
    "delete state file": lambda scene: _delete(scene, scene.here.folder / "checkpoint"),
    "delete run.json": lambda scene: _delete(scene, scene.here.folder / "run.json"),
    "delete journal": lambda scene: _delete(scene, scene.here.folder / scene.rng.choice(JOURNALS)),
}


def _set_times(scene: Scene, time_ns: Callable[[int], int]) -> int:
    """Set the time of change of all files, made from the one that it has. Return how many there are."""
    paths = [path for path in scene.here.folder.rglob("*") if path.is_file()]
    for path in paths:
        mtime = time_ns(path.stat().st_mtime_ns)
        os.utime(path, ns=(mtime, mtime))
    return len(paths)


@attack("old clock")
def _old_clock(scene: Scene) -> str:
    days = scene.rng.choice([-1, 1])
    count = _set_times(scene, lambda mtime: mtime + days * DAY_SECS * 10**9)
    return f"{count} files are of {'yesterday' if days < 0 else 'tomorrow'}" if count else ""


@attack("same time")
def _same_time(scene: Scene) -> str:
    yesterday = int(time.time() - DAY_SECS) * 10**9
    count = _set_times(scene, lambda _: yesterday)
    return f"{count} files are of the same second" if count else ""


@attack("touch")
def _touch(scene: Scene) -> str:
    count = _set_times(scene, lambda _: time.time_ns())
    return f"{count} files are of now" if count else ""


@attack("note damaged")
def _note_damaged(scene: Scene) -> str:
    notes = [path for path in scene.here.folder.glob(".remote*") if path.is_file() and path.suffix != ".lock"]
    if not notes:
        return ""
    path, how = scene.rng.choice(notes), scene.rng.choice(["half", "garbage", "empty", "gone", "of another form"])
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        made = {"half": data[: len(data) // 2], "garbage": os.urandom(300), "empty": b"", "of another form": b"[1]\n"}
        path.write_bytes(made[how])
    return f"{path.name} is {how}"


@attack("leftovers")
def _leftovers(scene: Scene) -> str:
    if not scene.here.folder.is_dir():
        return ""
    for name in (".sending", ".fetching", ".saving"):
        folder = scene.here.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-96"\n')
        for path in scene.here.files():
            (folder / path.name).write_bytes(b"left")
        (folder / "model.ckpt-96.index").write_bytes(b"left")
    return "half-written files in .sending, .fetching and .saving"


@attack("killed uploader")
def _killed_uploader(scene: Scene) -> str:
    count = scene.rng.randint(1, 3)
    writes = sorted(scene.server.writes + scene.rng.randrange(WRITES) for _ in range(count))
    scene.plan.step_secs = 0.1

    def act(start: Start, secs: float) -> None:
        if not writes or scene.server.writes < writes[0]:
            return
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(start.popen.pid).children(recursive=True):
                if "runner.remote.upload" in process.cmdline():
                    process.kill()
                    writes.pop(0)
                    return

    scene.plan.acts.append(act)
    return f"the process that sends is killed after {[write - scene.server.writes for write in writes]} writes"


@attack("killed start")
def _killed_start(scene: Scene) -> str:
    last, is_whole = scene.server.writes + scene.rng.randrange(WRITES), scene.rng.random() < 0.7
    scene.plan.step_secs = 0.1

    def act(start: Start, secs: float) -> None:
        if scene.server.writes < last:
            return
        if is_whole:
            start.end_of_the_machine()
        else:
            start.popen.kill()
            start.popen.wait()

    scene.plan.acts.append(act)
    return f"{'all of it' if is_whole else 'the command'} is killed after {last - scene.server.writes} writes"


@attack("killed with unsent files")
def _killed_unsent(scene: Scene) -> str:
    """The store is away from the first step on, and the machine dies when it has nothing more to say."""
    scene.plan.step_secs = 0.1
    size = _size_of(scene.here.caches / "said.txt")
    heard, quiet_since = "", 0.0

    def act(start: Start, secs: float) -> None:
        nonlocal heard, quiet_since
        said = start.said.read_text()[size:]
        if said != heard:
            heard, quiet_since = said, secs
        if re.search(r"^(step \d+/|Nothing to train)", said, re.MULTILINE):
            scene.server.mode = "away"
            if secs > quiet_since + QUIET_SECS:
                start.end_of_the_machine()

    scene.plan.acts.append(act)
    return "what it trains is not sent, and its machine dies"


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@attack("object deleted")
def _object_deleted(scene: Scene) -> str:
    names = scene.bucket.marks()
    older = indexes(names)[:-1]
    if not older:
        return ""
    step = scene.rng.choice(older)
    files = [name for name in names if f"model.ckpt-{step}." in name and not name.endswith(".metrics.json")]
    name = scene.rng.choice(files)
    scene.bucket.remove(name)
    return f"{name} is deleted in the bucket"


STRANGERS = {
    "stranger": ("notes/mine.txt", "export/theirs/words.txt", "model.ckpt-notes.txt", "a file with spaces.txt"),
    "hidden stranger": (".hidden", "notes/.keep", ".other/mine.txt"),
    "object of another": ("events.worker-1.jsonl", "eval/events.out.tfevents.1.other.1.0.v2", "summary.predict.json"),
}


def _put_stranger(scene: Scene, kind: str) -> str:
    name = scene.rng.choice(STRANGERS[kind])
    data = b'{"time": 1.0, "event": "started", "pid": 1, "command": "train"}\n' if ".jsonl" in name else b"theirs"
    scene.strangers[name] = data
    scene.bucket.put(name, data)
    return f"{name} is put into the bucket"


ATTACKS |= {kind: functools.partial(_put_stranger, kind=kind) for kind in STRANGERS}


@attack("lease of the dead")
def _lease_of_the_dead(scene: Scene) -> str:
    """A holder on another host has died without ending its lease, and may have been the last to write."""
    leases = sorted(name for name in scene.bucket.marks() if re.fullmatch(r"\.lease/\d+", name))
    if not leases:
        return ""
    facts = json.loads(scene.bucket.get(leases[-1]))
    others = {"host": "elsewhere", "boot": "another one", "pid": 7, "began": 1.0, "secs": 1.0, "time": 1.0}
    facts |= {name: value for name, value in others.items() if name in facts}
    facts.pop("is_over", None)
    is_same = scene.rng.random() < 0.5
    if not is_same and "folder" in facts:
        facts["folder"] = uuid.uuid4().hex
    name = f".lease/{int(leases[-1].rpartition('/')[2]) + 1:08d}"
    scene.bucket.put(name, json.dumps(facts).encode())
    time.sleep(2.5)  # it is older than its seconds
    return f"{name} of {'this folder' if is_same else 'another folder'}, by a dead one elsewhere"


@attack("left in .lease")
def _left_in_lease(scene: Scene) -> str:
    names = (f".lease/clock-{uuid.uuid4().hex}", ".lease/generation.json", ".lease/peers/worker-1.json")
    name = scene.rng.choice(names)
    scene.bucket.put(name, b'{"phase": "gather", "run": "0", "generation": 1, "tasks": {}}')
    return f"{name} is in the bucket"


def _fault(scene: Scene, mode: str) -> str:
    begins, secs = scene.rng.uniform(0, 9), scene.rng.uniform(1, 5)
    scene.plan.step_secs = 0.1
    scene.plan.may_be_refused = mode != "slow"

    def act(start: Start, now: float) -> None:
        is_within = begins <= now < begins + secs
        scene.server.mode = mode if is_within else "ok"

    scene.plan.acts.append(act)
    return f"the store is {mode} from {begins:.1f} s for {secs:.1f} s"


ATTACKS |= {f"store {mode}": functools.partial(_fault, mode=mode) for mode in ("away", "500", "slow", "cut")}


@attack("second machine")
def _second_machine(scene: Scene) -> str:
    """The next start, and those after it, are on the other machine; the same attack brings them back."""
    scene.plan.machine = scene.other
    return f"the start is on machine {scene.machines.index(scene.here) + 1}"


@attack("second machine, unsent")
def _second_machine_unsent(scene: Scene) -> str:
    """The next start leaves files unsent, the one after it is on the other machine, the third is back."""
    scene.route = [scene.other, scene.here]
    return f"{_killed_unsent(scene)}; the next start is elsewhere, the one after it here"


@attack("evaluate")
def _evaluate(scene: Scene) -> str:
    scene.plan.does = "evaluate"
    return "command=evaluate"


@attack("evaluate elsewhere")
def _evaluate_elsewhere(scene: Scene) -> str:
    scene.plan.does, scene.plan.machine = "evaluate", scene.other
    return f"command=evaluate on machine {scene.machines.index(scene.here) + 1}"


@attack("by hand")
def _by_hand(scene: Scene) -> str:
    """After what makes it dangerous: a file that is cut short, a flipped byte, or an older folder."""
    first = scene.rng.choice(["truncate newest", "flip newest", "snapshot", "empty", "delete a file"])
    done = ATTACKS[first](scene)
    if not done:
        return ""
    scene.plan.does = "by hand"
    return f"{done}; runner.remote.upload by hand"


# --- what is checked ------------------------------------------------------------------------------------------------


def problems(before: Seen, after: Seen, plan: Plan, outcome: Outcome, target: int, strangers: Mapping[str, bytes],
             contents: Callable[[str], bytes]) -> list[str]:  # fmt: skip
    """Return what is wrong after a start; each begins with the number of the invariant, or with `retention`."""
    found = [*_lost(before, after, plan, outcome), *_changed(before, after), *_meanwhile(before, plan.changes)]
    for name, data in strangers.items():
        if name not in after.marks:
            found.append(f"4: {name} of another is gone")
        elif contents(name) != data:
            found.append(f"4: {name} of another has changed")
    for name in after.marks.keys() - before.marks.keys():
        hidden = [part for part in name.split("/") if part.startswith(".") and part not in (".lease", ".hydra")]
        if hidden:
            found.append(f"4: {name} went up")
    refused = outcome.code == 2 and "cannot be reached" in outcome.said and plan.may_be_refused
    is_by_hand = plan.does == "by hand" and outcome.code in (2, 3)
    is_killed = outcome.code == -9 and bool(plan.acts)
    if outcome.code not in (0, 3) and not (refused or is_by_hand or is_killed):
        found.append(f"5: exit code {outcome.code}")
    if outcome.code == 0:
        found += _at_the_end(before, after, plan, outcome, target)
    return found


def _lost(before: Seen, after: Seen, plan: Plan, outcome: Outcome) -> Iterator[str]:
    if after.newest < before.newest:
        yield f"1: the newest in the bucket was {before.newest}, is {after.newest}"
    if outcome.began is not None and outcome.began < before.newest:
        yield f"1: it trained from step {outcome.began}, and the bucket had {before.newest}"
    if plan.does == "evaluate" and outcome.code == 0:
        reported = outcome.evaluated or 0
        if reported < before.newest or reported != after.newest:
            yield f"1: it evaluated step {reported}; the bucket had {before.newest}, has {after.newest}"


def _meanwhile(before: Seen, changes: Iterable[tuple[str, bytes | None]]) -> Iterator[str]:
    """Yield what somebody met who looked during the start: the newest checkpoint was not whole, or not the newest, or
    a file of another had other bytes.
    """
    newest, marks, said = before.newest, dict(before.marks), set[str]()
    for name, data in changes:
        mark = None if data is None else f'"{hashlib.md5(data).hexdigest()}"'
        problem = ""
        number = re.search(r"model\.ckpt-(\d+)\.(?!metrics)", name)
        step_of_file = int(number.group(1)) if number else 0
        is_other = name in marks and marks[name] != mark
        if name == "checkpoint" and data is not None:  # without it, the newest that is whole is taken
            match = re.search(rb'^model_checkpoint_path: "model\.ckpt-(\d+)"', data)
            step = int(match.group(1)) if match else 0
            if step < newest:
                problem = f"1: meanwhile the state file named step {step} after {newest}"
            newest = step
        elif number and step_of_file == newest and is_other:
            what = "removed" if data is None else "replaced"
            problem = f"1: meanwhile of the newest, model.ckpt-{newest}, a file was {what}"
        elif data is not None and step_of_file in before.whole and is_other:
            problem = f"2: meanwhile {name} had other bytes"
        if problem and problem not in said:
            said.add(problem)
            yield problem
        if mark is not None:  # the same bytes may come again after a removal
            marks[name] = mark


def _changed(before: Seen, after: Seen) -> Iterator[str]:
    for step, names in after.others.items():
        if step not in before.others:
            yield f"2: model.ckpt-{step} has other values than the undisturbed run: {names}"
    for step in before.whole:
        files = [name for name in before.marks if f"model.ckpt-{step}." in name and not name.endswith(".metrics.json")]
        changed = [name for name in files if after.marks.get(name, before.marks[name]) != before.marks[name]]
        if changed and step not in after.whole:
            yield f"2: model.ckpt-{step} was whole; {changed} have changed: {after.broken.get(step, 'it has no index')}"


def _at_the_end(before: Seen, after: Seen, plan: Plan, outcome: Outcome, target: int) -> Iterator[str]:
    for step, damage in after.broken.items():
        since = ", as before" if step in before.broken else ""
        yield f"3: model.ckpt-{step} in the bucket is damaged{since}: {damage}"
    if without := sorted(set(after.named) - set(after.whole) - after.broken.keys()):
        yield f"3: the state file names {without}, which are not there"
    saved: set[int] = set()
    if plan.does == "train":
        if after.newest != target:
            yield f"5: it trained to {target}, and the newest in the bucket is {after.newest}"
        saved = {step for step in range(SAVE_STEPS, target + 1, SAVE_STEPS) if step > (outcome.began or target)}
    there = set(after.whole) | after.broken.keys()
    known = sorted(there | saved | set(before.whole))[-KEEP_MAX:]
    if extra := sorted(there - set(known)):
        yield f"retention: {extra} are there beside {known}"
    if gone := sorted(set(known) - there):
        yield f"retention: {gone} are gone"


# --- runs -----------------------------------------------------------------------------------------------------------


class Base:
    """Two starts that nobody disturbs, with which each run begins, and one that tells what each step has to be.

    Attributes:
      expected: step -> variables of the undisturbed run.
    """

    def __init__(self, server: Server, scratch: Path) -> None:
        self._scratch, self.server, self.bucket = scratch, server, Bucket(server)
        whole = Start(
            server, scratch / "whole", *WORDS, "model_dir=whole", "checkpoint.keep_max=null", f"train.max_steps={TOTAL}"
        )
        assert whole.end() == 0, whole.said.read_text()
        steps = range(SAVE_STEPS, TOTAL + 1, SAVE_STEPS)
        self.expected = {step: values_of(scratch / "whole" / "whole" / f"model.ckpt-{step}") for step in steps}
        self._caches = [scratch / name for name in ("first", "second")]
        self._copy, self._snapshots = scratch / "base", scratch / "snapshots"
        machine = Machine(self._caches[0], self._caches[0])
        self._base_snapshots: list[tuple[str, Path]] = []
        for target in BASE_STEPS:
            outcome = start_on(server, Plan(machine), target)
            assert outcome.code == 0, outcome.said
            machine.folder = folder_in(machine.caches)
            machine.keep_snapshot(f"at step {target}", self._snapshots)
        self._base_snapshots, self._folder = machine.snapshots, machine.folder.name
        shutil.copytree(machine.caches, self._copy, symlinks=True)
        self._objects = self.bucket.all()

    def scene(self, rng: random.Random) -> Scene:
        """Return a run as it was after the two starts. An earlier one is gone."""
        self.bucket.become(self._objects)
        for caches in self._caches:
            shutil.rmtree(caches, ignore_errors=True)
        shutil.copytree(self._copy, self._caches[0], symlinks=True)
        for path in self._snapshots.iterdir():
            if path not in [kept for _, kept in self._base_snapshots]:
                shutil.rmtree(path)
        machines = [Machine(caches, caches / "estimator-runner" / self._folder) for caches in self._caches]
        machines[0].snapshots = list(self._base_snapshots)
        return Scene(rng, self.server, self.bucket, machines)

    def attack(self, scene: Scene, names: Sequence[str], report: Report) -> list[str]:
        """Do the attacks and a start, and return what is wrong."""
        scene.plan = Plan(scene.here)
        if scene.route:
            scene.plan.machine = scene.route.pop(0)
            names = [name for name in names if name not in MOVES]
        done = [(name, ATTACKS[name](scene)) for name in names]
        before = look(self.bucket, self.expected)
        target = scene.target
        if scene.plan.does == "train":
            target = min(target + SAVE_STEPS * scene.rng.choice([0, 1, 1, 2, 2]), TOTAL)
        self.server.changes.clear()
        outcome = start_on(self.server, scene.plan, target)
        scene.plan.changes = list(self.server.changes)
        after = look(self.bucket, self.expected)
        scene.target = target
        number = report.begin(done, target, scene, outcome)
        wrong = problems(before, after, scene.plan, outcome, target, scene.strangers, self.bucket.get)
        if outcome.code == 0 and scene.plan.does == "train":
            path = scene.here.folder / f"model.ckpt-{target}"
            is_there = Path(f"{path}.index").exists() and find_damage(path) is None
            if not is_there or differing(values_of(path), self.expected[target]):
                wrong.append(f"5: {path.name} of the local folder is not that of the undisturbed run")
        scene.here.keep_snapshot(f"after start {number}", self._snapshots)
        report.end(wrong, outcome)
        return wrong


class Report:
    """Prints what is done and what is wrong, and counts.

    Args:
      keep: where to put what a start that failed had said; None: nowhere.
    """

    def __init__(self, keep: Path | None) -> None:
        self._keep, self._began = keep, time.monotonic()
        self.number = 0
        self.damages: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []
        self._run = ""

    def begin_run(self, run: str) -> None:
        self._run = run

    def begin(self, done: Sequence[tuple[str, str]], target: int, scene: Scene, outcome: Outcome) -> int:
        """Count a start; return its number."""
        self.number += 1
        self.damages.update(name for name, what in done if what)
        said = "; ".join(f"{name} ({what or 'nothing to do'})" for name, what in done) or "no attack"
        does = f"trained to {target}" if scene.plan.does == "train" else scene.plan.does
        came = f"from {outcome.began}, " if outcome.began is not None else ""
        where = scene.machines.index(scene.here) + 1
        secs = time.monotonic() - self._began
        print(f"{secs:5.0f} s  start {self.number} of run {self._run}, machine {where}: {said}: {does}, {came}"
              f"exit code {outcome.code}", flush=True)  # fmt: skip
        self._names = "+".join(name for name, what in done if what) or "no attack"
        return self.number

    def end(self, wrong: Sequence[str], outcome: Outcome) -> None:
        if not wrong:
            return
        self.failed.append(f"run {self._run} start {self.number} {self._names}")
        for problem in wrong:
            print(f"         FAILED  {problem}", flush=True)
        if self._keep:
            self._keep.mkdir(parents=True, exist_ok=True)
            (self._keep / f"{self._run}-{self.number}.txt").write_text(outcome.said)


def attack_runs(base: Base, report: Report, seed: int, first: int, starts: int, names: Sequence[str]) -> None:
    """Do so many starts with attacks that are drawn of `names`."""
    run = first
    while report.number < starts:
        scene = base.scene(random.Random(f"{seed}-{run}"))
        report.begin_run(f"{seed}-{run}")
        for _ in range(min(STARTS_OF_A_RUN, starts - report.number)):
            count = min(scene.rng.randint(1, 2), len(names))
            if base.attack(scene, scene.rng.sample(list(names), count), report):
                break
        run += 1


def attack_each(base: Base, report: Report, seed: int, starts: int, names: Sequence[str]) -> None:
    """Do a run of `starts` starts for each attack alone."""
    for name in names:
        scene = base.scene(random.Random(f"{seed}-{name}"))
        report.begin_run(f"{seed}-{name}")
        for _ in range(starts):
            if base.attack(scene, [name], report):
                break


# --- requests -------------------------------------------------------------------------------------------------------


def count_requests(base: Base, objects: int) -> None:
    """Print how many requests reach the store, by kind, during starts beside so many small objects of the run."""
    scene = base.scene(random.Random(0))
    kept = len(scene.bucket.marks())
    for number in range(objects - kept):
        scene.bucket.put(f"export/{number // 10}/variables/part-{number % 10}", b"part of a model")
    second, first = scene.machines[1], scene.machines[0]
    end = BASE_STEPS[-1]
    starts = (
        ("resume on another machine, nothing to train", Plan(second), end),
        ("resume where it was, nothing to train", Plan(second), end),
        (f"resume where it was, {2 * SAVE_STEPS} steps", Plan(second), end + 2 * SAVE_STEPS),
        ("evaluate where it was", Plan(second, "evaluate"), end),
        ("evaluate on the first machine", Plan(first, "evaluate"), end),
    )
    rows: list[tuple[str, Mapping[str, int]]] = []
    for what, plan, target in starts:
        base.server.requests.clear()
        began = time.monotonic()
        outcome = start_on(base.server, plan, target)
        assert outcome.code == 0, outcome.said
        rows.append((f"{what} ({time.monotonic() - began:.0f} s)", dict(base.server.requests)))
    kinds = sorted(set().union(*(counts for _, counts in rows)))
    print(f"{len(scene.bucket.marks())} objects; a listing is a request for each 1,000")
    print("| start |", " | ".join(kinds), "| all |")
    print("|---" * (len(kinds) + 2) + "|")
    for what, counts in rows:
        print(f"| {what} |", " | ".join(str(counts.get(kind, 0)) for kind in kinds), f"| {sum(counts.values())} |")


def main(argv: Sequence[str] | None = None, command_line: CommandLine | None = None) -> int:
    """Do what `argv` says. `command_line` forks the starts; None: they are cold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="draw this attack, or these")
    parser.add_argument("--but", action="append", choices=ATTACKS, default=[], help="do not draw this attack, or these")
    parser.add_argument("--each", type=int, help="a run of so many starts for each attack")
    parser.add_argument("--list", action="store_true", help="say what attacks there are")
    parser.add_argument("--requests", type=int, help="count requests beside so many objects, and do no attack")
    parser.add_argument("--keep", type=Path, help="where to write what starts said that failed")
    arguments = parser.parse_args(argv)
    names = [name for name in arguments.only or ATTACKS if name not in arguments.but]
    if arguments.list:
        print(*names, sep="\n")
        return 0
    server = Server()
    server.command_line = command_line
    try:
        with tempfile.TemporaryDirectory() as scratch:
            base, report = Base(server, Path(scratch)), Report(arguments.keep)
            if arguments.requests:
                count_requests(base, arguments.requests)
                return 0
            if arguments.each:
                attack_each(base, report, arguments.seed, arguments.each, names)
            else:
                attack_runs(base, report, arguments.seed, arguments.first, arguments.starts, names)
    finally:
        server.close()
    print(f"seed {arguments.seed}: {report.number} starts, damages {dict(report.damages)}, failed: {report.failed}")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
