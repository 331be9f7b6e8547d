"""Runs of `python -m runner` with SIGKILL of any process at any time, compared with runs that nobody disturbs.

`python -m tests.support.kills --runs 40 --seed 7` does 40 of them and prints each, with what was killed and when. A run
whose command has ended without success is started again by the same command, as a user would. `--first 20` starts at
the 21st: a run depends on the seed and its number alone, but for how fast the machine is. With `--stops` processes are
stopped for some seconds (SIGSTOP) and continued, that of a tracker too: no start may then end without success.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support import chains, journal
from tests.support.processes import is_gone, processes_in

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "model=custom", "model.fn=tests.support.chains.classic", "model.params={dropout: true}", "input=custom",
    "input.train.fn=tests.support.chains.shipped", f"input.train.batch_size={chains.BATCH_SIZE}",
    "input.train.shard=examples", "input.eval.fn=tests.support.chains.eval_input", "run.seed=5", "run.progress=plain",
    "run.debug=replicas",
    f"train.max_steps={chains.TOTAL}", "train.log_steps=1", "checkpoint.save_steps=4",
    "checkpoint.keep_best.metric=eval/loss", "model_dir=run",
)  # fmt: skip
PARAMETER_SERVER = "parameter_server"
CASES: dict[str, tuple[str, ...]] = {
    "default": ("strategy=default",),
    "mirrored": ("strategy=mirrored", "strategy.virtual_devices=2"),
    "multi_worker": ("strategy=multi_worker", "cluster.num_workers=2"),
    # Counts how often each example is seen: with asynchronous workers nothing else has one right value.
    PARAMETER_SERVER: (
        "strategy=parameter_server", "cluster.num_workers=2", "cluster.num_ps=1", "checkpoint.keep_best.metric=null",
        "model.fn=tests.support.chains.counting", "model.params={}",
        "input.train.fn=tests.support.chains.numbered", "input.eval=null",
    ),
}  # fmt: skip
VICTIMS = ("supervisor", "task", "watchdog")
"""Of several tasks or watchdogs any: the chief's, a worker's or a server's."""
SHIPPING = "shipping"
STOPPED_SECS = {"supervisor": 9.0, "task": 9.0, "watchdog": 9.0, SHIPPING: 30.0}
"""What may be stopped, and for how long at most. The end of a run waits for a tracker for 20 s."""
GONE_SECS = 70.0
"""Servers of asynchronous training go on for the 60 s in which their coordinator may save."""
END_SECS = 400.0
MAX_STARTS = 8


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, or one SIGSTOP.

    Attributes:
      victim: one of VICTIMS, or SHIPPING.
      which: of several, chosen by this number.
      moment: of a start: clock (`secs` after it began), or `secs` after its journal has `count` more lines of an event:
        first_step, metrics (any), checkpoint, result.
      waits: after the supervisor was killed: the next start comes when all others are gone, else at once.
      stopped_secs: the victim is stopped for so long; 0: it is killed.
    """

    victim: str
    which: int
    moment: str
    secs: float
    count: int
    waits: bool
    stopped_secs: float = 0.0

    def __str__(self) -> str:
        when = "" if self.moment == "clock" else f" after {self.count} {self.moment}"
        stopped = f" for {self.stopped_secs:.1f} s" if self.stopped_secs else ""
        return f"{self.victim}{when} +{self.secs:.2f}s{stopped}"


@dataclass(frozen=True)
class Case:
    """A run: its strategy and what is killed."""

    strategy: str
    kills: tuple[Kill, ...]
    has_database: bool


def draw(rng: random.Random, strategy: str, *, stops: bool = False) -> Case:
    kills = []
    # The steps of asynchronous workers take no second in all.
    longest_secs = 0.05 if strategy == PARAMETER_SERVER else 0.5
    for _ in range(rng.randint(1, 3)):
        moment = rng.choice(["clock", "first_step", "metrics", "checkpoint", "checkpoint", "result"])
        secs = rng.uniform(0, {"clock": 15.0, "result": 2.0}.get(moment, longest_secs))
        count = {"metrics": rng.randint(1, chains.TOTAL), "checkpoint": rng.randint(1, 9)}.get(moment, 1)
        victim, which, waits = rng.choice(VICTIMS), rng.randint(0, 3), rng.random() < 0.5
        stopped_secs = 0.0
        if stops:
            victim = rng.choice(list(STOPPED_SECS))
            stopped_secs = rng.uniform(1.0, STOPPED_SECS[victim])
        kills.append(Kill(victim, which, moment, secs, count, waits, stopped_secs))
    return Case(strategy, tuple(kills), rng.random() < 0.8)


# --- processes ------------------------------------------------------------------------------------------------------


class Start:
    """One start of the command, with what it says in `said.txt` of the folder."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self.folder = folder
        self._sizes = {path: path.stat().st_size for path in journal.journals(folder / "run")}
        self._began = time.monotonic()
        with open(folder / "said.txt", "a") as said:
            said.write(f"--- {time.time():.1f} {' '.join(settings)}\n")
            said.flush()
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "runner", *settings], cwd=folder, stdin=subprocess.DEVNULL, stdout=said,
                stderr=said, env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    def victims(self, kind: str) -> list[psutil.Process]:
        """Return its processes of that kind, in the order in which they were started."""
        supervisor = psutil.Process(self.popen.pid)
        if kind == "supervisor":
            return [supervisor]
        if kind == SHIPPING:
            return [child for child in supervisor.children() if "runner.tracking.ship" in child.cmdline()]
        tasks = [child for child in supervisor.children() if "runner.task" in child.cmdline()]
        if kind == "task":
            return tasks
        return [child for task in tasks for child in task.children() if "runner.task" in child.cmdline()]

    def _has_come(self, kill: Kill) -> bool:
        if kill.moment == "clock":
            return True
        path = self.folder / "run" / "events.chief-0.jsonl"
        lines = journal.recorded(path, after=self._sizes.get(path, 0))
        return len([line for line in lines if kill.moment in (line.get("event"), *line)]) >= kill.count

    def kill(self, kill: Kill) -> bool:
        """Wait for the moment and kill, or stop and continue. Returns: False where the start had ended before that."""
        while self.code is None and not self._has_come(kill):
            time.sleep(0.01)
        end = (self._began if kill.moment == "clock" else time.monotonic()) + kill.secs
        while self.code is None and time.monotonic() < end:
            time.sleep(0.01)
        while self.code is None:
            with contextlib.suppress(psutil.Error):
                if found := self.victims(kill.victim):
                    victim = found[kill.which % len(found)]
                    if kill.stopped_secs:
                        victim.suspend()
                        time.sleep(kill.stopped_secs)
                        victim.resume()
                        return True
                    victim.kill()
                    if kill.victim == "supervisor":
                        self.wait()
                    return True
            time.sleep(0.01)  # there is none yet
        return False

    def wait(self) -> int:
        try:
            return self.popen.wait(END_SECS)
        except subprocess.TimeoutExpired:
            listed = [(one.pid, one.status(), one.cmdline()[-3:]) for one in processes_in(self.folder)]
            raise AssertionError(f"it has not ended within {END_SECS:.0f} s: {listed}") from None


def wait_until_gone(processes: Sequence[psutil.Process], began: float) -> float:
    """Return how many seconds after `began` they were gone. Raises: AssertionError: not within GONE_SECS."""
    while left := [one for one in processes if one.is_running() and not is_gone(one.pid)]:
        if time.monotonic() - began > GONE_SECS:
            raise AssertionError(f"left after {GONE_SECS:.0f} s: {[(one.pid, one.cmdline()[-3:]) for one in left]}")
        time.sleep(0.05)
    return time.monotonic() - began


def live(folder: Path, case: Case, say: Callable[[str], None] = lambda text: None) -> None:
    """Start the run, kill what the case says, and start it again until it has finished."""
    settings = [*SETTINGS, *CASES[case.strategy]]
    kills = list(case.kills)
    left: list[psutil.Process] = []
    ended = 0.0
    for number in range(1, MAX_STARTS + 1):
        start, killed = Start(folder, settings), []
        if left:
            say(f"  start {number}: at once; what was left is gone after {wait_until_gone(left, ended):.1f} s")
        while kills and start.kill(kills[0]):
            killed.append(kills.pop(0))
            say(f"  start {number}: killed {killed[-1]}")
        code, ended = start.wait(), time.monotonic()
        left = processes_in(folder)
        if code != -signal.SIGKILL or killed[-1].waits:
            secs, left = wait_until_gone(left, ended), []
            say(f"  start {number}: exit code {code}; the others were gone after {secs:.1f} s")
        if code == 0:
            return
        killed = [one for one in killed if not one.stopped_secs]
        assert killed, f"start {number} has failed by itself: exit code {code}"
    raise AssertionError(f"it has not finished in {MAX_STARTS} starts")


# --- what came of it ------------------------------------------------------------------------------------------------

History = dict[str, list[tuple[int, float]]]


def recorded(folder: Path) -> tuple[str, History]:
    """Return the status of the run in MLflow and, of each metric of losses and evaluations, (step, value) in order."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "runner"]
    run_id = json.loads((folder / "run" / "shipped.mlflow.json").read_text())["run_id"]
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    others = [one for one, run in runs.items() if run.data.tags["lock"] == runs[run_id].data.tags["lock"]]
    assert others == [run_id], f"MLflow has {others} of this model_dir"
    history = {
        name: sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))
        for name in runs[run_id].data.metrics
        if name == "train/loss" or name.startswith("eval/")
    }
    return runs[run_id].info.status, history


def evaluated_steps(folder: Path) -> set[int]:
    """Return the steps whose evaluation is in the journal."""
    lines = journal.recorded(folder / "run")
    return {line["step"] for line in lines if "eval/loss" in line.get("metrics", {}) and "event" not in line}


def left_in(folder: Path) -> set[str]:
    """Return the names in model_dir, but for event files, restarts and checkpoints that came off schedule."""
    names = {path.name for path in (folder / "run").iterdir()} - {"events.supervisor-0.jsonl"}
    return {name for name in names if "tfevents" not in name and not name.startswith("model.ckpt-")}


@functools.cache
def undisturbed(strategy: str) -> Path:
    """Return the folder of a run that nobody disturbs; it is removed at the end of this process."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    live(folder, Case(strategy, (), has_database=False))
    return folder


def check(case: Case, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Do the run in `folder`. Raises: AssertionError: it does not come to what an undisturbed run has."""
    folder, whole = folder.resolve(), undisturbed(case.strategy)
    if case.has_database:  # else it is made, and perhaps killed on the way
        shutil.copy(whole / "mlflow.db", folder)
    live(folder, case, say)
    if any(kill.victim == SHIPPING for kill in case.kills):
        # The end of a run does not wait for a tracker that was stopped; its last line names this command.
        again = [sys.executable, "-m", "runner.tracking.ship", "run"]
        subprocess.run(again, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    if case.strategy == PARAMETER_SERVER:
        compare_counts(folder)
    else:
        compare(folder, whole)


def compare_counts(folder: Path) -> None:
    """Check a run of asynchronous workers. Raises: AssertionError: it has not seen each example once an epoch."""
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "finished"
    found = chains.variables(folder / "run")
    assert found["global_step"] == chains.TOTAL
    assert found["seen"].tolist() == [chains.TOTAL / chains.STEPS_PER_EPOCH] * chains.NUM_EXAMPLES
    assert recorded(folder)[0] == "FINISHED"


def compare(folder: Path, whole: Path) -> None:
    """Compare a run that was killed with one that nobody disturbed. Raises: AssertionError: they differ."""
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "finished"
    found, expected = chains.variables(folder / "run"), chains.variables(whole / "run")
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert evaluated_steps(folder) == evaluated_steps(whole)
    status, history = recorded(folder)
    assert status == "FINISHED"
    assert history.keys() == recorded(whole)[1].keys()
    for name, points in recorded(whole)[1].items():
        assert history[name] == points, f"{name}: {history[name]} in place of {points}"
    assert left_in(folder) == left_in(whole), left_in(folder) ^ left_in(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=CASES, action="append", help="only these strategies")
    parser.add_argument("--stops", action="store_true", help="stop and continue processes instead")
    parser.add_argument("--keep", type=Path, help="where the folders of failed runs are kept")
    arguments = parser.parse_args()
    failed: list[str] = []
    killed: dict[str, int] = {}
    began = time.monotonic()

    def say(text: Any) -> None:
        print(text, flush=True)
        if "killed" in text:
            victim = text.partition("killed ")[2].split()[0]
            killed[victim] = killed.get(victim, 0) + 1

    for number in range(arguments.first, arguments.first + arguments.runs):
        seed = f"{arguments.seed}-{number}"
        strategies = arguments.only or list(CASES)
        case = draw(random.Random(seed), strategies[number % len(strategies)], stops=arguments.stops)
        folder = Path(tempfile.mkdtemp(prefix=f"kills-{seed}-")).resolve()
        say(f"run {seed}: {case.strategy}")
        try:
            check(case, folder, say)
        except Exception:
            failed.append(seed)
            print(f"run {seed} failed", flush=True)
            traceback.print_exc(file=sys.stdout)
            for process in processes_in(folder):
                process.kill()
            if arguments.keep:
                shutil.copytree(folder, arguments.keep / folder.name, dirs_exist_ok=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        say(f"  {time.monotonic() - began:.0f} s")
    print(f"seed {arguments.seed}, from {arguments.first}: {arguments.runs} runs, kills {killed}, failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
