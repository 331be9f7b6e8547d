"""Messages between the supervisors of a cluster whose tasks were started from outside, as small files in model_dir. If
that is a URL, the process of each host that sends its files there (`runner.remote.upload`) carries the messages, too.

The chief's supervisor leads. It writes `generation.json`, which has the number of this start of the run, and the phase:
gather, go (all start their tasks) or ended. Every other supervisor answers in its own file under `peers/`, with the run
and generation that it answers, and a nonce that identifies its process. A `go` names the nonces of the processes that
it is meant for, so files of earlier runs or killed supervisors have no effect.

A message has the addresses of all tasks, and a supervisor heeds only those of its own cluster, which has the chief and
itself at the same addresses: another one may run in the folder, whose lock or lease its chief has, or may have died
there. One that has the chief at the same address, but others elsewhere, was told of another cluster than the chief (by
TF_CONFIG): it answers that, and the first start fails. Later it does not count, as it may be one of new machines.
"""

from __future__ import annotations

import itertools
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.config.mistakes import ConfigError
from runner.distribute.cluster import ALONE, Cluster
from runner.launch.gang import GangResult, is_replaceable
from runner.remote.mirror import meeting_place, remote_dir
from runner.remote.store import CALL_FILE, PEERS_FOLDER
from runner.system.exit_codes import FAILED, INTERRUPTED, PEER_LOST, USER_ERROR, rank_of
from runner.system.files import read_dataclass, write_json

GLANCE_SECS = 0.2
REPLACED_SECS = 600.0
"""Seconds that the processes of a run may take to join again after a loss, while the platform replaces one of them."""
BEAT_SECS = 5.0
"""Seconds after which the evaluator's supervisor repeats its message, to show the chief's supervisor that it is alive.
"""
READ_AT_ONCE = 32
"""Largest number of answers that one look reads. On shared storage each is a call to a server of about a millisecond:
of 256 tasks a look would take longer than the time between two. So the calls of the chief's supervisor in a second do
not grow with the cluster, but the time until it has seen an answer does: to 4.5 s for 256 tasks in training.
"""
EVALUATOR = "evaluator"

_NOT_EVALUATED = "Training has finished, and its last checkpoint was not evaluated"


@dataclass(frozen=True)
class Call:
    """The message of the chief's supervisor.

    Attributes:
      run: identifies the process of that supervisor.
      generation: number of this start of the run.
      phase: gather, go or ended.
      nonces: task name -> nonce of each process that takes part.
      code: exit code of the run once it has ended.
      tasks: task type -> addresses of the cluster, without the evaluator's.
      gradient_accumulation: number of micro-batches of this start, as in `RunRecord`.
    """

    run: str = ""
    generation: int = 0
    phase: str = ""
    nonces: Mapping[str, str] = field(default_factory=dict)
    code: int = 0
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gradient_accumulation: int | None = None


@dataclass(frozen=True)
class Answer:
    """The message of another supervisor.

    Attributes:
      run, generation: those of the call that this answers.
      nonce: identifies the process of that supervisor.
      state: ready, stopping (its task was asked to stop), done, stopped, lost, failed, or differs: it knows other tasks
        than the chief.
      reason: for lost, failed and differs, the reason in words.
      code: exit code of its task if it failed or was lost.
      beat: when it was sent, on a clock of its own: another number in each message.
    """

    run: str = ""
    generation: int = 0
    nonce: str = ""
    state: str = ""
    reason: str = ""
    code: int = 0
    beat: float = 0.0


class Rendezvous:
    """The other supervisors, as the chief's supervisor sees them. This base class is for a run without others.

    Args:
      lost: returns why the run may no longer write to its folder; '' while it may.
    """

    def __init__(self, lost: Callable[[], str] = lambda: "") -> None:
        self._why_lost = lost

    def gather(
        self, generation: int, stops: Sequence[int], gradient_accumulation: int | None = None
    ) -> GangResult | None:
        """Wait until all are ready or a stop is requested, and return None; or return the reason why they never will
        be.

        Args:
          generation, gradient_accumulation: those of this start, as in `RunRecord`.
          stops: a sequence that grows when a stop is requested.
        """
        return None

    def look(self) -> GangResult | None:
        """Return an event that ends the tasks of this generation; None: there is none."""
        return GangResult(FAILED, ALONE, reason) if (reason := self._why_lost()) else None

    def reason(self, ending: GangResult) -> GangResult:
        """Return `ending` of our own task, or the end of another task that explains it."""
        return ending

    def wait_for_evaluator(self, stops: Sequence[int]) -> GangResult | None:
        """Wait until the evaluator, if any, has evaluated the last checkpoint, and return None.

        If it never will, return the reason.
        """
        return None

    def end(self, code: int) -> None:
        """Announce that the run has ended."""


class LeaderRendezvous(Rendezvous):
    """The other supervisors of a cluster, as the chief's supervisor sees them.

    Args:
      model_dir: the shared folder.
      place: the place of the chief, with the addresses of all tasks.
      timeout_secs: seconds that the others may take to join at first.
      has_evaluator: one of them evaluates; it may join later than the others.
      lost: as in `Rendezvous`.
    """

    def __init__(
        self, model_dir: Path, place: Cluster, timeout_secs: float, *, has_evaluator: bool = False,
        settle_secs: float = 5.0, clock: Callable[[], float] = time.monotonic, lost: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        super().__init__(lost)
        self._model_dir, self._place, self._clock = model_dir, place, clock
        self._folder = meeting_place(model_dir)
        self._timeout_secs, self._settle_secs, self._has_evaluator = timeout_secs, settle_secs, has_evaluator
        others = [Cluster(role, index, place.tasks) for role in place.tasks for index in range(len(place.tasks[role]))]
        self._others = {other.name: other for other in others if other != place}
        names = dict.fromkeys((*self._others, EVALUATOR))
        self._turns = itertools.cycle(names)
        self._num_read = min(len(names), READ_AT_ONCE)
        self._read: dict[str, Answer] = {}  # as of the last turn of each
        self._call = Call(run=secrets.token_hex(8), tasks=place.tasks)

    def gather(
        self, generation: int, stops: Sequence[int], gradient_accumulation: int | None = None
    ) -> GangResult | None:
        is_first = not self._call.generation
        patience = self._timeout_secs if is_first else max(self._timeout_secs, REPLACED_SECS)
        self._say(generation=generation, phase="gather", nonces={}, gradient_accumulation=gradient_accumulation)
        until = self._clock() + patience
        while not stops:
            answers = self._answers()
            failed = super().look() or self._failure(answers) or (self._difference() if is_first else None)
            missing = [other for name, other in self._others.items() if name not in answers]
            if failed or not missing:
                self._say(phase="go", nonces={name: answer.nonce for name, answer in answers.items()})
                return failed
            if self._clock() > until:
                listed = ", ".join(f"{one.name} ({one.tasks[one.task_type][one.task_index]})" for one in missing)
                reason = f"{listed} did not join within {patience:g} s. {_same_folder(self._model_dir)}"
                return GangResult(FAILED, missing[0], reason)
            time.sleep(GLANCE_SECS)
        return None

    def look(self) -> GangResult | None:
        answers = self._answers()
        # for all, since _lost also admits new supervisors
        ended = [self._lost(name, answer) for name, answer in answers.items()]
        # Soon after a task is killed, all the others have lost their connection to it, and say so.
        cause = min(filter(None, ended), key=lambda ending: rank_of(ending.code), default=None)
        return super().look() or self._failure(answers) or cause

    def reason(self, ending: GangResult) -> GangResult:
        """Wait a little for the supervisor of the lost task, which knows the reason best."""
        until = self._clock() + self._settle_secs
        while ending.code == PEER_LOST and self._clock() < until:
            time.sleep(GLANCE_SECS)
            ending = self.look() or ending
        return ending

    def wait_for_evaluator(self, stops: Sequence[int]) -> GangResult | None:
        last, until = Answer(), self._clock() + self._timeout_secs
        while self._has_evaluator and not stops:
            ending = self.look()  # also admits a new supervisor
            answer = self._answers().get(EVALUATOR, Answer())
            if answer.state == "done":
                return None
            if ending is not None and ending.place.is_evaluator:
                # Training has ended, so no restart of all tasks.
                code = FAILED if ending.is_loss else ending.code
                return replace(ending, code=code, reason=f"{ending.reason}. {_NOT_EVALUATED}")
            if answer != last:
                last, until = answer, self._clock() + self._timeout_secs
            if self._clock() > until:
                what = "gave no sign of life for" if last.state else "did not join within"
                reason = f"{EVALUATOR} {what} {self._timeout_secs:g} s. {_NOT_EVALUATED}"
                return GangResult(FAILED, self._place_of(EVALUATOR), reason)
            time.sleep(GLANCE_SECS)
        return None

    def end(self, code: int) -> None:
        self._say(phase="ended", code=code)

    def _lost(self, name: str, answer: Answer) -> GangResult | None:
        """Return what the answer of another supervisor means while tasks run. A new supervisor is admitted."""
        known = self._call.nonces.get(name)
        if known is None or (is_replaceable(self._place_of(name)) and known != answer.nonce):
            known = answer.nonce
            self._say(nonces={**self._call.nonces, name: known})
        if known != answer.nonce:
            # A task is killed with its supervisor.
            reason = f"{name} was lost, and its supervisor was started again"
            return GangResult(-signal.SIGKILL, self._place_of(name), reason)
        if answer.state == "lost":
            return GangResult(answer.code or PEER_LOST, self._place_of(name), answer.reason)
        if answer.state in ("stopping", "stopped"):
            return GangResult(INTERRUPTED, self._place_of(name), f"{name} was asked to stop")
        return None

    def _failure(self, answers: Mapping[str, Answer]) -> GangResult | None:
        for name, answer in answers.items():
            if answer.state == "failed":
                return GangResult(answer.code or FAILED, self._place_of(name), f"{name}: {answer.reason}")
        return None

    def _answers(self) -> dict[str, Answer]:
        """Read the next answers in turn. Return task name -> the last answer seen, if it is to the current message of
        this supervisor; others are left out.
        """
        for name in itertools.islice(self._turns, self._num_read):
            self._read[name] = read_dataclass(Answer, _answer_file(self._folder, name))
        found = {}
        for name, answer in self._read.items():
            if _same(answer, self._call) and answer.state != "differs":
                found[name] = answer
        return found

    def _difference(self) -> GangResult | None:
        """Return what a task says that knows other tasks than the chief; the chief need not know it."""
        answers = dict(self._read)
        for path in sorted((self._folder / PEERS_FOLDER).glob("*.json")):
            name = path.stem.replace("-", ":")
            if name not in self._others and name != EVALUATOR:  # those that the chief knows are read in turn
                answers[name] = read_dataclass(Answer, path)
        for name, answer in answers.items():
            if answer.state == "differs" and _same(answer, self._call):
                return GangResult(answer.code, self._place_of(name), f"{name}: {answer.reason}")
        return None

    def _place_of(self, name: str) -> Cluster:
        role, _, index = name.partition(":")
        return self._others.get(name, Cluster(role, int(index or 0), self._place.tasks))

    def _say(self, **changes: Any) -> None:
        self._call = replace(self._call, **changes)
        write_json(self._folder / CALL_FILE, asdict(self._call))


class FollowerRendezvous:
    """The chief's supervisor, as another supervisor sees it.

    Args:
      model_dir: the shared folder.
      place: the place of this supervisor's task.
      timeout_secs: seconds that the chief may take to join at first.

    Attributes:
      generation, gradient_accumulation: those of the start for which the task was started, as in `Call`.
      code: exit code of the run; None until the run has ended.
    """

    def __init__(
        self, model_dir: Path, place: Cluster, timeout_secs: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.generation = 0
        self.gradient_accumulation: int | None = None
        self.code: int | None = None
        self._model_dir, self._place, self._clock = model_dir, place, clock
        self._folder, self._timeout_secs = meeting_place(model_dir), timeout_secs
        self._nonce = secrets.token_hex(8)
        self._answered = self._followed = Call()
        self._difference = ""  # to the tasks that the chief of the answered call knows
        self._told = 0.0
        (self._folder / PEERS_FOLDER).mkdir(parents=True, exist_ok=True)

    def wait_for_go(self, stops: Sequence[int], *, forever: bool = False) -> bool:
        """Return True when the task is to start, False if the run has ended or a stop was requested.

        Raises:
          TimeoutError: the chief does not join, or does not return.
          ConfigError: the chief knows other tasks than this process.
        """
        patience = max(self._timeout_secs, REPLACED_SECS) if self._followed.run else self._timeout_secs
        until = self._clock() + patience
        while not stops:
            said = self._last_call()
            self._tell_apart(said)
            call = self._of_our_chief(said)
            if self._has_ended(call):
                return False
            if call.run and call.phase != "ended" and not _same(call, self._answered):
                self._answered = call
                self.tell("ready")
            means_us = call.nonces.get(self._place.name) == self._nonce
            if call.phase == "go" and means_us and not _same(call, self._followed):
                self._followed = call
                self.generation = call.generation
                self.gradient_accumulation = call.gradient_accumulation
                return True
            if self._clock() > until and not forever:
                reason = f"The chief's supervisor ({_chief(self._place)}) did not join within {patience:g} s. "
                reason += _same_folder(self._model_dir)
                if call.phase in ("gather", "go") and not call.run:
                    size = sum(map(len, call.tasks.values()))
                    reason += (
                        f" Another cluster, of {size} tasks with the chief {_chief(call)}, runs there or was killed."
                    )
                if self._difference:
                    reason += f" The last one that called knows other tasks: {self._difference}."
                raise TimeoutError(reason)
            time.sleep(GLANCE_SECS)
        return False

    def _tell_apart(self, call: Call) -> None:
        """Tell the chief if it knows other tasks than this process.

        Raises:
          ConfigError: it does, and has ended the run for that. One that was killed earlier never does.
        """
        if self._difference and call.phase == "ended" and call.run == self._answered.run:
            raise ConfigError(
                f"{self._place.name} knows other tasks than the chief: {self._difference}. Give all tasks the same "
                "cluster in TF_CONFIG."
            )
        has_our_chief = bool(self._place.tasks) and _chief(call) == _chief(self._place)
        is_new = call.phase != "ended" and not _same(call, self._answered)
        if not has_our_chief or not is_new:
            return
        self._difference = self._place.difference_to(call.tasks)
        if self._difference:
            self._answered = call
            reason = f"it knows other tasks than the chief: {self._difference}"
            self._write("differs", reason, USER_ERROR)

    def look(self) -> GangResult | None:
        """Return an event from the chief that ends the task; None: there is none."""
        if self._place.is_evaluator and self._clock() - self._told > min(BEAT_SECS, self._timeout_secs / 4):
            self.tell("ready")
        call = self._of_our_chief(self._last_call())
        if self._has_ended(call):
            return GangResult(PEER_LOST, self._place, "the run has ended")
        if call.phase and not _same(call, self._followed):  # also if another cluster goes on with the run
            return GangResult(PEER_LOST, self._place, "all tasks are started again")
        return None

    def tell(self, state: str, reason: str = "", code: int = 0) -> None:
        """Write this supervisor's answer to the chief's last message, if its file is not another cluster's by now."""
        if self._of_our_chief(self._last_call()).run:
            self._write(state, reason, code)

    def _write(self, state: str, reason: str, code: int) -> None:
        self._told = self._clock()
        call = self._answered
        answer = Answer(call.run, call.generation, self._nonce, state, reason, code, self._told)
        write_json(_answer_file(self._folder, self._place.name), asdict(answer))

    def _last_call(self) -> Call:
        return read_dataclass(Call, self._folder / CALL_FILE)

    def _of_our_chief(self, call: Call) -> Call:
        """Return a message; if it is of another cluster's chief, as that of no run."""
        # An evaluator's TF_CONFIG may have no cluster.
        return call if not self._place.tasks or self._place.is_in(call.tasks) else replace(call, run="")

    def _has_ended(self, call: Call) -> bool:
        if call.phase == "ended" and call.run and call.run in (self._followed.run, self._answered.run):
            self.code = call.code
        return self.code is not None


def _same_folder(model_dir: Path) -> str:
    where = remote_dir(model_dir) or f"{model_dir} on shared storage"
    return f"Check that all processes run with the same model_dir={where}."


def _chief(place: Cluster | Call) -> str:
    return next(iter(place.tasks.get("chief", ())), "address unknown")


def _same(one: Call | Answer, other: Call) -> bool:
    """Report whether both messages are about the same start of the same run."""
    return (one.run, one.generation) == (other.run, other.generation)


def _answer_file(folder: Path, name: str) -> Path:
    return folder / PEERS_FOLDER / f"{name.replace(':', '-')}.json"
