"""Messages between the supervisors of a cluster whose tasks were started from outside, as small files in model_dir. If
that is a URL, the process of each host that sends its files there (`runner.remote.upload`) carries the messages, too.

The chief's supervisor leads. It writes `generation.json`, which has the number of this start of the run, and the phase:
gather, go (all start their tasks) or ended. Every other supervisor answers in its own file under `peers/`, with the run
and generation that it answers, and a nonce that identifies its process. A `go` names the nonces of the processes that
it is meant for, so files of earlier runs or killed supervisors have no effect.

A message has the addresses of all tasks. A supervisor heeds only messages of its own cluster, which have the chief and
itself at the addresses that it knows: another cluster may run in the folder, whose lock or lease its chief has, or may
have died there. A supervisor that knows the chief at the same address, but other tasks elsewhere, was told of another
cluster than the chief (by TF_CONFIG). It answers that, and the first start fails. In later starts that answer does not
count, as the supervisor may be on one of new machines.
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
      beat: when it was sent, on the clock of its sender. It differs in each message, which shows that the sender is
        alive.
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
        """Wait until all supervisors are ready or a stop is requested, and return None; or return the reason why they
        never will be ready.

        Args:
          generation, gradient_accumulation: those of this start, as in `RunRecord`.
          stops: a sequence that grows when a stop is requested.
        """
        return None

    def look(self) -> GangResult | None:
        """Return an event that ends the tasks of this generation; None: there is none."""
        reason = self._why_lost()
        if not reason:
            return None
        return GangResult(FAILED, ALONE, reason)

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
        self._model_dir = model_dir
        self._place = place
        self._clock = clock
        self._folder = meeting_place(model_dir)
        self._timeout_secs = timeout_secs
        self._settle_secs = settle_secs
        self._has_evaluator = has_evaluator
        self._others: dict[str, Cluster] = {}
        for role, addresses in place.tasks.items():
            for index in range(len(addresses)):
                other = Cluster(role, index, place.tasks)
                if other != place:
                    self._others[other.name] = other
        # The evaluator of TF_CONFIG need not be among the addresses, and it may join at any time.
        names = dict.fromkeys((*self._others, EVALUATOR))
        self._names_in_turn = itertools.cycle(names)
        self._num_read_at_once = min(len(names), READ_AT_ONCE)
        self._last_answers: dict[str, Answer] = {}  # task name -> its answer when its file was last read
        self._call = Call(run=secrets.token_hex(8), tasks=place.tasks)

    def gather(
        self, generation: int, stops: Sequence[int], gradient_accumulation: int | None = None
    ) -> GangResult | None:
        is_first = not self._call.generation
        patience = self._timeout_secs
        if not is_first:  # the platform may be replacing a machine
            patience = max(patience, REPLACED_SECS)
        self._say(generation=generation, phase="gather", nonces={}, gradient_accumulation=gradient_accumulation)
        until = self._clock() + patience
        while not stops:
            answers = self._read_answers()
            failed = super().look() or self._find_failure(answers)
            if failed is None and is_first:  # later, a task that differs may be one of new machines
                failed = self._find_difference()
            if failed is not None:
                return failed
            missing = [other for name, other in self._others.items() if name not in answers]
            if not missing:
                nonces = {name: answer.nonce for name, answer in answers.items()}
                self._say(phase="go", nonces=nonces)
                return None
            if self._clock() > until:
                names = [f"{other.name} ({_address_of(other)})" for other in missing]
                reason = f"{', '.join(names)} did not join within {patience:g} s. {_same_folder(self._model_dir)}"
                return GangResult(FAILED, missing[0], reason)
            time.sleep(GLANCE_SECS)
        return None

    def look(self) -> GangResult | None:
        answers = self._read_answers()
        # All answers, not only those up to the first that ends the tasks: this also admits new supervisors.
        endings = [self._admit_or_judge(name, answer) for name, answer in answers.items()]
        failed = super().look() or self._find_failure(answers)
        if failed is not None:
            return failed
        # Soon after a task is killed, all the others have lost their connection to it, and say so.
        causes = [ending for ending in endings if ending is not None]
        return min(causes, key=lambda ending: rank_of(ending.code), default=None)

    def reason(self, ending: GangResult) -> GangResult:
        """Wait a little for the supervisor of the lost task, which knows the reason best."""
        until = self._clock() + self._settle_secs
        while ending.code == PEER_LOST and self._clock() < until:
            time.sleep(GLANCE_SECS)
            ending = self.look() or ending
        return ending

    def wait_for_evaluator(self, stops: Sequence[int]) -> GangResult | None:
        last = Answer()
        until = self._clock() + self._timeout_secs
        while self._has_evaluator and not stops:
            ending = self.look()  # also admits a new supervisor
            answer = self._read_answers().get(EVALUATOR, Answer())
            if answer.state == "done":
                return None
            if ending is not None and ending.place.is_evaluator:
                # Training has ended, so no restart of all tasks.
                code = FAILED if ending.is_loss else ending.code
                return replace(ending, code=code, reason=f"{ending.reason}. {_NOT_EVALUATED}")
            if answer != last:  # each message has another beat: it is alive
                last = answer
                until = self._clock() + self._timeout_secs
            if self._clock() > until:
                what = "gave no sign of life for" if last.state else "did not join within"
                reason = f"{EVALUATOR} {what} {self._timeout_secs:g} s. {_NOT_EVALUATED}"
                return GangResult(FAILED, self._place_of(EVALUATOR), reason)
            time.sleep(GLANCE_SECS)
        return None

    def end(self, code: int) -> None:
        self._say(phase="ended", code=code)

    def _admit_or_judge(self, name: str, answer: Answer) -> GangResult | None:
        """Return the event that the answer of another supervisor reports while tasks run; None: there is none.

        A supervisor that joins late is admitted: its nonce is added to the message of this one.
        """
        place = self._place_of(name)
        known_nonce = self._call.nonces.get(name)
        is_another = known_nonce != answer.nonce
        if known_nonce is None or (is_another and is_replaceable(place)):
            self._say(nonces={**self._call.nonces, name: answer.nonce})
        elif is_another:
            # A task is killed with its supervisor.
            return GangResult(-signal.SIGKILL, place, f"{name} was lost, and its supervisor was started again")
        if answer.state == "lost":
            return GangResult(answer.code or PEER_LOST, place, answer.reason)
        if answer.state in ("stopping", "stopped"):
            return GangResult(INTERRUPTED, place, f"{name} was asked to stop")
        return None

    def _find_failure(self, answers: Mapping[str, Answer]) -> GangResult | None:
        """Return the failure that the first failed task reports; None: no task has failed."""
        for name, answer in answers.items():
            if answer.state == "failed":
                return GangResult(answer.code or FAILED, self._place_of(name), f"{name}: {answer.reason}")
        return None

    def _read_answers(self) -> dict[str, Answer]:
        """Read the files of the next tasks in turn. Return task name -> its last answer, of all tasks.

        An answer to an earlier message of this supervisor is left out. So is one of a task that was told of another
        cluster: it does not take part.
        """
        for name in itertools.islice(self._names_in_turn, self._num_read_at_once):
            self._last_answers[name] = read_dataclass(Answer, _answer_file(self._folder, name))
        found = {}
        for name, answer in self._last_answers.items():
            if _are_of_same_start(answer, self._call) and answer.state != "differs":
                found[name] = answer
        return found

    def _find_difference(self) -> GangResult | None:
        """Return the failure that a task reports because it was told of another cluster than the chief. The task need
        not be one of the chief's.
        """
        answers = dict(self._last_answers)
        for path in sorted((self._folder / PEERS_FOLDER).glob("*.json")):
            name = _task_of_file(path)
            # `_read_answers` reads those that the chief knows. The evaluator is one of them, though not in `_others`.
            is_read_in_turn = name in self._others or name == EVALUATOR
            if not is_read_in_turn:
                answers[name] = read_dataclass(Answer, path)
        for name, answer in answers.items():
            if answer.state == "differs" and _are_of_same_start(answer, self._call):
                return GangResult(answer.code, self._place_of(name), f"{name}: {answer.reason}")
        return None

    def _place_of(self, name: str) -> Cluster:
        role, _, index = name.partition(":")
        return self._others.get(name, Cluster(role, int(index or 0), self._place.tasks))

    def _say(self, **changes: Any) -> None:
        """Change fields of this supervisor's message, and write it for the others."""
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
        self._model_dir = model_dir
        self._place = place
        self._clock = clock
        self._folder = meeting_place(model_dir)
        self._timeout_secs = timeout_secs
        self._nonce = secrets.token_hex(8)
        self._answered = Call()  # the last message that was answered
        self._followed = Call()  # the last message for which the task was started
        self._difference_to_chief = ""  # to the tasks that the chief of the answered message knows
        self._told_at = 0.0  # when the last answer was written
        (self._folder / PEERS_FOLDER).mkdir(parents=True, exist_ok=True)

    def wait_for_go(self, stops: Sequence[int], *, forever: bool = False) -> bool:
        """Return True when the task is to start, False if the run has ended or a stop was requested.

        Raises:
          TimeoutError: the chief does not join, or does not return.
          ConfigError: the chief knows other tasks than this process.
        """
        patience = self._timeout_secs
        if self._followed.run:
            patience = max(patience, REPLACED_SECS)
        until = self._clock() + patience
        while not stops:
            said = self._last_call()
            self._tell_difference(said)
            call = self._as_of_our_chief(said)
            if self._has_ended(call):
                return False
            if call.run and self._is_unanswered(call):
                self._answered = call
                self.tell("ready")
            if self._starts_our_task(call):
                self._followed = call
                self.generation = call.generation
                self.gradient_accumulation = call.gradient_accumulation
                return True
            if self._clock() > until and not forever:
                raise TimeoutError(self._why_not_joined(call, patience))
            time.sleep(GLANCE_SECS)
        return False

    def _is_unanswered(self, call: Call) -> bool:
        return call.phase != "ended" and not _are_of_same_start(call, self._answered)

    def _starts_our_task(self, call: Call) -> bool:
        """Report whether a message tells this process, and no earlier one of its name, to start its task once more."""
        means_us = call.nonces.get(self._place.name) == self._nonce
        is_new = not _are_of_same_start(call, self._followed)
        return call.phase == "go" and means_us and is_new

    def _why_not_joined(self, call: Call, patience: float) -> str:
        """Return what is known about a chief that did not join.

        Args:
          call: the last message in the folder.
          patience: seconds that were waited.
        """
        reason = f"The chief's supervisor ({_address_of_chief(self._place)}) did not join within {patience:g} s. "
        reason += _same_folder(self._model_dir)
        if call.phase in ("gather", "go") and not call.run:
            size = sum(len(addresses) for addresses in call.tasks.values())
            chief = _address_of_chief(call)
            reason += f" Another cluster, of {size} tasks with the chief {chief}, runs there or was killed."
        if self._difference_to_chief:
            reason += f" The last one that called knows other tasks: {self._difference_to_chief}."
        return reason

    def _tell_difference(self, call: Call) -> None:
        """Tell the chief if its message has other tasks than this process knows.

        Raises:
          ConfigError: the message has, and the chief has ended the run because of that. A chief that was killed earlier
            never ends its run.
        """
        if self._difference_to_chief and call.phase == "ended" and call.run == self._answered.run:
            raise ConfigError(
                f"{self._place.name} knows other tasks than the chief: {self._difference_to_chief}. Give all tasks the "
                "same cluster in TF_CONFIG."
            )
        has_our_chief = bool(self._place.tasks) and _address_of_chief(call) == _address_of_chief(self._place)
        if not has_our_chief or not self._is_unanswered(call):
            return
        self._difference_to_chief = self._place.difference_to(call.tasks)
        if self._difference_to_chief:
            self._answered = call
            reason = f"it knows other tasks than the chief: {self._difference_to_chief}"
            self._write("differs", reason, USER_ERROR)

    def look(self) -> GangResult | None:
        """Return an event from the chief that ends the task; None: there is none. The evaluator's supervisor also
        repeats its message when that is due.
        """
        if self._place.is_evaluator:  # the chief waits for it without end while it shows that it is alive
            beat_secs = min(BEAT_SECS, self._timeout_secs / 4)
            if self._clock() - self._told_at > beat_secs:
                self.tell("ready")
        call = self._as_of_our_chief(self._last_call())
        if self._has_ended(call):
            return GangResult(PEER_LOST, self._place, "the run has ended")
        # This is so, too, of a message of another cluster, from which `_as_of_our_chief` has removed the id of its run:
        # that cluster has taken over this model_dir.
        if call.phase and not _are_of_same_start(call, self._followed):
            return GangResult(PEER_LOST, self._place, "all tasks are started again")
        return None

    def tell(self, state: str, reason: str = "", code: int = 0) -> None:
        """Write this supervisor's answer to the chief's last message, if its file is not another cluster's by now."""
        call = self._as_of_our_chief(self._last_call())
        if call.run:
            self._write(state, reason, code)

    def _write(self, state: str, reason: str, code: int) -> None:
        self._told_at = self._clock()
        call = self._answered
        answer = Answer(call.run, call.generation, self._nonce, state, reason, code, self._told_at)
        write_json(_answer_file(self._folder, self._place.name), asdict(answer))

    def _last_call(self) -> Call:
        return read_dataclass(Call, self._folder / CALL_FILE)

    def _as_of_our_chief(self, call: Call) -> Call:
        """Return `call` as it is if it is from the chief of this cluster. Else return it without its run, so that it
        is not answered.
        """
        # An evaluator's TF_CONFIG may have no cluster.
        if not self._place.tasks or self._place.is_in(call.tasks):
            return call
        return replace(call, run="")

    def _has_ended(self, call: Call) -> bool:
        """Report whether the run has ended, and store its exit code once a message has it."""
        if call.run and call.phase == "ended":
            is_ours = call.run in (self._followed.run, self._answered.run)
            if is_ours:
                self.code = call.code
        return self.code is not None


def _same_folder(model_dir: Path) -> str:
    where = remote_dir(model_dir) or f"{model_dir} on shared storage"
    return f"Check that all processes run with the same model_dir={where}."


def _address_of(place: Cluster) -> str:
    return place.tasks[place.task_type][place.task_index]


def _address_of_chief(place: Cluster | Call) -> str:
    return next(iter(place.tasks.get("chief", ())), "address unknown")


def _are_of_same_start(message: Call | Answer, call: Call) -> bool:
    """Report whether both messages are about the same start of the same run."""
    return (message.run, message.generation) == (call.run, call.generation)


def _answer_file(folder: Path, name: str) -> Path:
    """Return the file with the answer of the supervisor of the task `name`."""
    return folder / PEERS_FOLDER / f"{name.replace(':', '-')}.json"


def _task_of_file(path: Path) -> str:
    """Return the name of the task whose `_answer_file` is `path`."""
    return path.stem.replace("-", ":")
