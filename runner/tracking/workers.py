"""How the workers of a run differ: what each took from the command to its first step, and what its steps take.

Training goes at the pace of the slowest worker, and the wall time of each is the same, because all wait for it. So
what a worker did itself is told apart from what it waited for others. All comes from the workers' journals.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.tracking.journal import Journal, Journals

LAUNCH = "RUNNER_LAUNCH"
"""Environment variable of a task with the `Launch` of its supervisor."""

RENDEZVOUS = "rendezvous"
WAITING = "waiting"
FIRST_STEP = "first_step"
"""Phases in which a worker waits for others: until all processes are there, until all have come as far as this one, and
in the collectives of the first step."""

STEP_TIMES = "step_times"
"""Event: what the steps since the last such line took on this worker, as `StepTimes`."""

WORKER_STEPS = "worker_steps"
"""Event of the coordinator of parameter servers: how many steps each worker has taken since the last such line."""

DIGITS = 7
"""Digits of seconds after the point that are kept: a tenth of a microsecond."""

LOOK_SECS = 60.0
"""Seconds between two looks for a straggler."""

SLOWER_SHARE = 0.1
SLOWER_SECS = 0.001
"""A straggler is told if it loses more than this share of a step, and more than so many seconds, on the others."""

LISTED_STARTS = 10
"""Number of workers, the slowest, whose starts the trackers get; summary.json has all."""

SHOWN_SECS = 0.05
"""Shorter phases are left out of a text."""

MUCH_SLOWER = 1.5
MUCH_SLOWER_SECS = 5.0
"""A start is told to the user if it took so many times what those of the others did, and so much longer."""


@dataclass
class Launch:
    """What a supervisor did before it started its tasks.

    Attributes:
      began: when the command began, in seconds since 1970; of a restart, when the tasks before had ended.
      phases: name -> seconds.
    """

    began: float = field(default_factory=time.time)
    phases: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure how long this context takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started

    def begin_again(self) -> None:
        """Begin anew, because all tasks are started again."""
        self.began = time.time()
        self.phases = {}

    @property
    def env(self) -> dict[str, str]:
        """The environment variable by which a task learns of this."""
        return {LAUNCH: json.dumps(asdict(self))}

    @classmethod
    def of_task(cls, env: Mapping[str, str]) -> Launch:
        """Return what the supervisor of this task did; without a supervisor, one that begins now."""
        text = env.get(LAUNCH)
        if not text:
            return cls()
        return cls(**json.loads(text))

    def write_to(self, journal: Journal) -> float:
        """Write these phases to the journal of a task, and what was left for starting it: `launch`.

        Returns:
          The seconds since the command began.
        """
        secs = max(0.0, time.time() - self.began)
        journal.took("launch", max(0.0, secs - sum(self.phases.values())))
        for name, phase_secs in self.phases.items():
            if phase_secs >= SHOWN_SECS:  # a phase is shorter if, for example, there was no other host to wait for
                journal.took(name, phase_secs)
        return secs


@dataclass
class Start:
    """The start of one worker.

    Attributes:
      secs: from the command to the end of its first step; of a parameter server and its workers, until it serves.
      phases: name -> seconds; they add up to `secs`.
    """

    secs: float
    phases: dict[str, float]

    @property
    def own_secs(self) -> float:
        """Seconds in which it did not wait for others."""
        return sum(secs for name, secs in self.phases.items() if name not in (RENDEZVOUS, WAITING, FIRST_STEP))

    def __str__(self) -> str:
        """Return `9.1 s: launch 0.9 s, import 3.1 s, ...`."""
        phases = []
        for name, secs in self.phases.items():
            if secs >= SHOWN_SECS:
                phases.append(f"{name} {secs:.1f} s")
        return f"{self.secs:.1f} s: {', '.join(phases)}"


def starts_of(journals: Journals) -> dict[str, Start]:
    """Return name of a task -> its start, of all tasks that have one in `journals`."""
    starts = {}
    for task in journals.tasks:
        start = start_in(journals.events_of(task))
        if start is not None:
            starts[task] = start
    return starts


def slowest_first(starts: Mapping[str, Start]) -> list[str]:
    """Return the names of the tasks, those first that took longest for what they did themselves."""
    return sorted(starts, key=lambda task: -starts[task].own_secs)


def start_in(lines: Iterable[Mapping[str, Any]]) -> Start | None:
    """Return the last start of a worker that reached its first step. If no start did, return the last one that has
    joined its cluster, as a parameter server does. None: there is neither, or it is not known when the start began.

    Args:
      lines: the events in its journal. A process that is started again writes on in the same one.
    """
    last_start = None
    joined_start = None
    began: float | None = None
    phases: dict[str, float] = {}
    for line in lines:
        event = line.get("event")
        if event == "started":
            began = line.get("began")
            phases = {}
        elif began is None:  # a worker of an earlier version, or a later call of `train` in the same process
            continue
        elif event == "phase":
            name = str(line["name"])
            phases[name] = phases.get(name, 0.0) + float(line["secs"])
        elif event == "joined":
            joined_start = _build_start(line["time"] - began, phases)
        elif event == "first_step":
            phases[FIRST_STEP] = float(line.get("secs", 0.0))
            last_start = _build_start(line["time"] - began, phases)
            began = None
    return last_start or joined_start


def _build_start(secs: float, phases: Mapping[str, float]) -> Start:
    """Return a start that took `secs`, with a phase `other` for the seconds that `phases` does not have."""
    known = {name: round(phase_secs, 3) for name, phase_secs in phases.items()}
    other = max(0.0, secs - sum(known.values()))
    return Start(round(secs, 3), {**known, "other": round(other, 3)})


@dataclass(frozen=True)
class Slowest:
    """The worker that took longest for what it did itself.

    Attributes:
      task: its name, as in `journal.task_of`.
      secs, others: its seconds, and the median of the others'.
      phase: the phase in which it lost most.
      phase_secs, phase_others: its seconds in this phase, and the median of the others'.
    """

    task: str
    secs: float
    others: float
    phase: str
    phase_secs: float
    phase_others: float

    @property
    def is_told(self) -> bool:
        """Report whether it took so much longer that the user is told."""
        lost = self.secs - self.others
        return self.secs > MUCH_SLOWER * self.others and lost > MUCH_SLOWER_SECS

    def __str__(self) -> str:
        """Return `worker:0, 14.2 s (others 2.1 s), most of it in input: 12.3 s (others 0.1 s)`."""
        lost = f"{self.phase} {self.phase_secs:.1f} s (others {self.phase_others:.1f} s)"
        return f"{self.task}, {self.secs:.1f} s (others {self.others:.1f} s); {lost}"


def slowest_start(starts: Mapping[str, Start]) -> Slowest | None:
    """Return the worker whose start took longest; None: there are not several.

    Args:
      starts: name of a task -> its start.
    """
    if len(starts) < 2:
        return None
    task = slowest_first(starts)[0]
    others = [start for name, start in starts.items() if name != task]

    def of_others(phase: str) -> float:
        return statistics.median(start.phases.get(phase, 0.0) for start in others)

    slowest = starts[task]
    candidates = [name for name in slowest.phases if name not in (RENDEZVOUS, WAITING, FIRST_STEP)]
    phase = max(candidates, key=lambda name: slowest.phases[name] - of_others(name))
    median = statistics.median(start.own_secs for start in others)
    return Slowest(
        task,
        secs=round(slowest.own_secs, 3),
        others=round(median, 3),
        phase=phase,
        phase_secs=round(slowest.phases[phase], 3),
        phase_others=round(of_others(phase), 3),
    )


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass
class StepTimes:
    """What a step takes on one worker, in seconds, as the mean over `steps` steps.

    Attributes:
      secs: the whole step; nearly the same on all workers, which wait for each other in it.
      input: waiting for this worker's own input.
      compute: computing, from the batch up to the first collectives.
    """

    steps: int = 0
    secs: float = 0.0
    input: float = 0.0
    compute: float = 0.0

    @property
    def own_secs(self) -> float:
        """Seconds of a step in which it did not wait for others."""
        return self.input + self.compute


def step_times_in(lines: Iterable[Mapping[str, Any]]) -> StepTimes | None:
    """Return the mean over the lines STEP_TIMES in a worker's journal; None: there are none."""
    found = [line for line in lines if line.get("event") == STEP_TIMES]
    steps = sum(int(line["steps"]) for line in found)
    if not steps:
        return None

    def mean(name: str) -> float:
        total = sum(float(line[name]) * line["steps"] for line in found)
        return round(total / steps, DIGITS)

    return StepTimes(steps, mean("secs"), mean("input"), mean("compute"))


def step_times_of(journals: Journals) -> dict[str, StepTimes]:
    """Return name of a task -> what its steps took, of the tasks that have noted it."""
    found = {}
    for task, lines in journals.events(STEP_TIMES).items():
        times = step_times_in(lines)
        if times is not None:
            found[task] = times
    return found


@dataclass(frozen=True)
class Straggler:
    """The worker whose steps take longest for what it does itself.

    Attributes:
      task: its name.
      secs, median: its seconds per step, and the median of the others'.
      cause: `input` or `compute`, in which it loses more.
      cause_secs, cause_others: its seconds in that, and the median of the others'.
      is_told: it slows the others so much that the user is told.
    """

    task: str
    secs: float
    median: float
    cause: str
    cause_secs: float
    cause_others: float
    is_told: bool

    def __str__(self) -> str:
        """Return `worker:2 is 1.8x slower than the median (input 41 ms, others 3 ms)`."""
        ratio = self.secs / max(self.median, 1e-6)
        own_ms = 1000 * self.cause_secs
        others_ms = 1000 * self.cause_others
        lost = f"{self.cause} {own_ms:.3g} ms, others {others_ms:.3g} ms"
        return f"{self.task} is {ratio:.1f}x slower than the median ({lost})"


def straggler_in(times: Mapping[str, StepTimes]) -> Straggler | None:
    """Return the slowest worker; None: there are not several."""
    if len(times) < 2:
        return None
    task = max(times, key=lambda name: times[name].own_secs)
    slowest = times[task]
    others = [step_times for name, step_times in times.items() if name != task]
    median = _median(others, "own_secs")
    # Name of a cause -> seconds per step that the slowest worker loses on the others by it.
    lost_by = {name: getattr(slowest, name) - _median(others, name) for name in ("input", "compute")}
    cause = max(lost_by, key=lambda name: lost_by[name])
    lost = slowest.own_secs - median
    is_much_slower = slowest.own_secs > MUCH_SLOWER * median
    loses_much = lost > max(SLOWER_SECS, SLOWER_SHARE * slowest.secs)
    return Straggler(
        task,
        secs=round(slowest.own_secs, DIGITS),
        median=median,
        cause=cause,
        cause_secs=getattr(slowest, cause),
        cause_others=_median(others, cause),
        is_told=is_much_slower and loses_much,
    )


def _median(times: Sequence[StepTimes], name: str) -> float:
    median = statistics.median(getattr(step_times, name) for step_times in times)
    return round(median, DIGITS)


def step_times_summary(times: Mapping[str, StepTimes]) -> dict[str, Any] | None:
    """Return what summary.json has of the steps of several workers; None: they were not measured."""
    straggler = straggler_in(times)
    if straggler is None:
        return None
    fastest = min(times.values(), key=lambda step_times: step_times.own_secs)
    return {
        "min": round(fastest.own_secs, DIGITS),
        "median": _median(list(times.values()), "own_secs"),
        "max": straggler.secs,
        "slowest": asdict(straggler),
        "workers": {task: asdict(step_times) for task, step_times in times.items()},
    }


class StragglerWatch:
    """Tells the user of a straggler while the run goes on: at most once in LOOK_SECS, and each worker and cause once.

    Args:
      model_dir: the folder of the run, with the journals of its workers.
      say: prints a line.
      clock: returns seconds.
    """

    def __init__(
        self, model_dir: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._journals = Journals(model_dir)
        self._journals.mark()
        self._say = say
        self._clock = clock
        self._looks_at = clock() + LOOK_SECS
        self._said: set[tuple[str, str]] = set()

    def look(self) -> None:
        """Read what the workers have noted since the last look, if it is time to."""
        if self._clock() < self._looks_at:
            return
        self._looks_at = self._clock() + LOOK_SECS
        straggler = straggler_in(step_times_of(self._journals))
        self._journals.mark()
        if straggler is None or not straggler.is_told:
            return
        what = (straggler.task, straggler.cause)
        if what not in self._said:
            self._said.add(what)
            self._say(str(straggler))


def steps_of_workers(journals: Journals) -> dict[str, int] | None:
    """Return name of a worker -> steps that it took for the coordinator of parameter servers; None: there are none."""
    found: dict[str, int] = {}
    for line in journals.events(WORKER_STEPS).get("chief", ()):
        for task, steps in line["steps"].items():
            found[task] = found.get(task, 0) + int(steps)
    return found or None
