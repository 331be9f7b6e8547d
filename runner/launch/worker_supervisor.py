"""The supervisor of a task other than the chief, in a cluster whose tasks were started from outside.

It starts its task when the chief's supervisor says so. Only the chief's supervisor writes a config, a summary and an
MLflow run.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.config import schema
from runner.config.job_id import is_shown_only
from runner.config.schema import Config, ConfigError
from runner.distribute.cluster import Cluster
from runner.launch import start_files, task_group
from runner.launch.gang import Gang, GangResult, Task
from runner.launch.rendezvous import FollowerRendezvous
from runner.launch.restarts import Restarts
from runner.launch.stop_requests import StopRequests
from runner.launch.task_starter import TaskStarter, build_starter
from runner.remote.mirror import mirror_of, remote_dir, url_or_path
from runner.system.exit_codes import FAILED, FINISHED, INTERRUPTED, OUT_OF_MEMORY, PEER_LOST, USER_ERROR
from runner.system.redaction import SecretList, masked
from runner.system.secret_names import LIST
from runner.system.standard_streams import say
from runner.tracking.backends.host_metrics import HostMetrics
from runner.tracking.journal import Journals
from runner.tracking.workers import RENDEZVOUS, Launch


@dataclass
class WorkerSupervisor:
    """The supervisor of one task other than the chief.

    Attributes:
      place: the place of its task.
      env: environment of the command, which the task inherits.
      launch: what was done before the task of this start was started.
    """

    config: Config
    place: Cluster
    env: Mapping[str, str]
    stops: StopRequests
    launch: Launch = field(default_factory=Launch)

    def run(self) -> int:
        """Follow the chief's supervisor until the run ends, and return the exit code.

        Raises:
          ConfigError: the chief has another config.
        """
        model_dir = Path(str(self.config.model_dir))
        where = url_or_path(model_dir)
        mirror = mirror_of(model_dir)
        mirror.begin(self.env, self.config.run, self.place)
        rendezvous = FollowerRendezvous(model_dir, self.place, self.config.cluster.start_timeout_secs)
        say(f"This is {self.place.name}. The chief records the run and its results in {where}.")
        scratches = tempfile.TemporaryDirectory(prefix="runner-")
        try:
            with (
                scratches as scratch,
                closing(build_starter(self.config, 1)) as starter,
                self._measuring_host(model_dir),
            ):
                code = self._run_with_chief(rendezvous, model_dir, Path(scratch) / "config.yaml", starter)
        except TimeoutError as error:
            say(f"runner: {error}")
            return FAILED
        finally:
            left = mirror.close(self.stops.came)
        if code != FINISHED:
            return code
        if left:
            say(f"remote: {left}")
            return INTERRUPTED
        say(f"{self.place.name}: the run has finished; see summary.json in {where}.")
        return FINISHED

    def _measuring_host(self, model_dir: Path) -> AbstractContextManager[object]:
        """Return a context beside which the use of this host is recorded, if that is asked for, where the chief finds
        it: in a folder that all hosts share.
        """
        tracking = self.config.tracking
        trains = self.config.command in schema.TRAINING_RUNS
        is_asked_for = tracking.system_metrics and tracking.has_mlflow
        is_shared = remote_dir(model_dir) is None
        if not (trains and is_asked_for and is_shared):
            return nullcontext()
        model_dir.mkdir(parents=True, exist_ok=True)  # this host may be the first
        return HostMetrics(model_dir, self.env, platform.node())

    def _run_with_chief(self, rendezvous: FollowerRendezvous, model_dir: Path, file: Path, starter: TaskStarter) -> int:
        """Start the task whenever the chief's supervisor says so, and report to it how the task ended.

        Args:
          file: path for the config of the task.

        Returns:
          The exit code.
        """
        restarts = Restarts(model_dir, self.config.max_restarts, self.stops.came, say, name=self.place.name)
        journals = Journals(model_dir)
        has_finished = False

        def look_around() -> GangResult | None:
            is_asked_to_stop = bool(gang.asked_to_stop) or bool(self.stops.came)
            if self.place.is_server and is_asked_to_stop:
                gang.asked_to_stop.clear()
                rendezvous.tell("stopping")  # the coordinator still needs this task to save
            return rendezvous.look()

        gang = Gang(
            freeze_secs=self.config.run.freeze_secs,
            start=starter.start,
            may_replace=lambda ending: restarts.allow(ending, alone=True),
            look_around=look_around,
        )
        argv = task_group.task_argv(file)
        task = Task(self.place, argv, task_group.task_env(self.env, self.place))
        starter.prepare([task])  # while the chief gathers
        with self.stops.watch(gang, "all tasks save a checkpoint"):
            # Without a limit once this task has finished: the chief or the evaluator may still be at work.
            while self._wait_for_go(rendezvous, forever=has_finished):
                self._check_config(rendezvous, model_dir)
                schema.save(self.config, file)
                journals.mark()
                with self.launch.phase("import"):
                    starter.wait(self.stops.came)
                number = rendezvous.gradient_accumulation
                env = task_group.task_env(self.env, self.place, rendezvous.generation, number)
                task = Task(self.place, argv, {**env, **self.launch.env})
                ending = gang.run([task], self.stops.came)
                self.launch.begin_again()
                has_finished = ending.code == FINISHED
                is_over = self._tell_end(rendezvous, ending, journals)
                if is_over:
                    return ending.code
        if rendezvous.code is None:
            rendezvous.tell("stopped")
            return INTERRUPTED
        return rendezvous.code

    def _tell_end(self, rendezvous: FollowerRendezvous, ending: GangResult, journals: Journals) -> bool:
        """Report to the chief's supervisor how the task ended, and return whether it is not started again."""
        if ending.code == FINISHED:
            rendezvous.tell("done")
            return False
        if ending.code == INTERRUPTED:
            rendezvous.tell("stopped")
            return True
        if ending.is_loss:
            if ending.code != PEER_LOST:  # after a PEER_LOST the chief reports which task was lost
                say(f"runner: {ending.reason}")
            rendezvous.tell("lost", ending.reason, ending.code)
            return False
        # Without the name of the task: the chief's supervisor puts it before the reason.
        if ending.code == OUT_OF_MEMORY:  # the chief's supervisor starts all tasks again, with smaller micro-batches
            reason = task_group.reason_of(ending, journals).removeprefix(f"{self.place.name} ")
            rendezvous.tell("failed", reason, ending.code)
            return False
        error = task_group.error_of(ending, journals).removeprefix(f"{self.place.name}: ")
        rendezvous.tell("failed", error, ending.code)
        return True

    def _wait_for_go(self, rendezvous: FollowerRendezvous, *, forever: bool) -> bool:
        """As `FollowerRendezvous.wait_for_go`. The wait counts as a phase of this start."""
        with self.launch.phase(RENDEZVOUS):
            return rendezvous.wait_for_go(self.stops.came, forever=forever)

    def _check_config(self, rendezvous: FollowerRendezvous, model_dir: Path) -> None:
        """Check that this task has the chief's config, and use the seed that the chief drew.

        Raises:
          ConfigError: the configs differ.
        """
        file = start_files.file_of_tasks(model_dir, self.config.command)
        if not file.exists():  # the run has ended meanwhile, which the task will be told
            return
        theirs = schema.read(file)
        if self.config.run.seed is None:
            seed = (theirs.get("run") or {}).get("seed")
            self.config = replace(self.config, run=replace(self.config.run, seed=seed))
        differing = ", ".join(differences_to_chief(theirs, schema.to_tree(self.config)))
        if differing:
            rendezvous.tell("failed", f"another config than the chief's: {differing}", USER_ERROR)
            raise ConfigError(
                f"{self.place.name} has another config than the chief of {url_or_path(model_dir)}: {differing}. Start "
                "all tasks of a cluster with the same command."
            )


def differences_to_chief(theirs: Mapping[str, object], ours: Mapping[str, object]) -> list[str]:
    """Return the differences between the chief's config and ours, except in keys that only concern display."""
    texts = []
    for key, value_there, value_here in differences(theirs, ours):
        if not is_shown_only(key):
            texts.append(f"{key}={value_here} here, {value_there} there")
    return texts


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return (key, value before, value now) for each key that differs between two configs, but for the run's folder,
    without secrets.
    """
    # What one config lists is secret in both: the other may be of an earlier version, which did not list it.
    listed = _list_of(before) | _list_of(now)
    shown_before = schema.flatten(masked(before, listed))
    shown_now = schema.flatten(masked(now, listed))
    keys = {*shown_before, *shown_now} - {"model_dir", LIST}
    found = []
    for key in sorted(keys):
        value_before = shown_before.get(key)
        value_now = shown_now.get(key)
        if value_before != value_now:
            found.append((key, value_before, value_now))
    return found


def _list_of(tree: Mapping[str, object]) -> SecretList:
    return SecretList.of(schema.value_at(tree, LIST), {})
