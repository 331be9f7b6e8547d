"""A task of a cluster that something else started, other than the chief: it starts when the chief's supervisor says so.

This one writes neither config nor summary nor an MLflow run: the chief's supervisor does.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner import config as configs
from runner.cluster import Cluster
from runner.config import Config, ConfigError
from runner.gang import Ending, Gang, Task
from runner.identity import is_shown_only
from runner.masking import masked
from runner.outcome import FAILED, FINISHED, INTERRUPTED, PEER_LOST
from runner.peers import Follower
from runner.report import relative
from runner.restarts import Restarts
from runner.spares import Spares
from runner.stopping import StopRequests
from runner.tasks import Journals, build_spares, error_of


@dataclass
class PeerRun:
    """One supervisor of a cluster, but for the chief's.

    Args:
      place: its task.
      argv: the command of the task that does what a config file says.
      env: the environment of the task at a place, for a generation.
    """

    config: Config
    place: Cluster
    argv: Callable[[Path], Sequence[str]]
    env: Callable[[Cluster, int], Mapping[str, str]]
    stops: StopRequests

    def run(self) -> int:
        """Follows the chief's supervisor to the end of the run. The exit code.

        Raises:
          ConfigError: the chief's config is another one.
        """
        model_dir = Path(str(self.config.model_dir))
        follower = Follower(model_dir, self.place, self.config.cluster.start_timeout_secs)
        _say(f"This is {self.place.name}. The run is the chief's; what comes of it is in {relative(model_dir)}.")
        with tempfile.TemporaryDirectory(prefix="runner-") as scratch:
            file = Path(scratch) / "config.yaml"
            configs.save(self.config, file)
            try:
                code = self._follow(follower, model_dir, self.argv(file))
            except TimeoutError as error:
                _say(f"runner: {error}")
                return FAILED
        if code == FINISHED:
            _say(f"{self.place.name}: the run has finished; see summary.json in {relative(model_dir)}.")
        return code

    def _follow(self, follower: Follower, model_dir: Path, argv: Sequence[str]) -> int:
        restarts = Restarts(model_dir, self.config.max_restarts, self.stops.came, _say, name=self.place.name)
        journals = Journals(model_dir)
        has_finished = False
        spares = build_spares(self.config, journals)
        gang = self._gang(follower, restarts, spares)
        with self.stops.watch(gang, "all tasks save a checkpoint"), contextlib.closing(spares):
            while follower.wait_for_go(self.stops.came, forever=has_finished):
                self._check_config(follower, model_dir)
                journals.mark()
                self._task = Task(self.place, argv, self.env(self.place, follower.generation))
                ending = gang.run([self._task], self.stops.came)
                has_finished = ending.code == FINISHED
                if has_finished:
                    follower.tell("done")
                elif ending.code == INTERRUPTED:
                    follower.tell("stopped")
                    return INTERRUPTED
                elif ending.is_loss:
                    if ending.code != PEER_LOST:  # else it is the chief's to say who was lost
                        _say(f"runner: {ending.reason}")
                    follower.tell("lost", ending.reason)
                else:
                    follower.tell(
                        "failed", error_of(ending, journals).removeprefix(f"{self.place.name}: "), ending.code
                    )
                    return ending.code
        if follower.code is None:
            follower.tell("stopped")
        return INTERRUPTED if follower.code is None else follower.code

    def _gang(self, follower: Follower, restarts: Restarts, spares: Spares) -> Gang:
        def look_around() -> Ending | None:
            spares.tend([self._task])
            if self.place.is_server and (gang.stop_wanted or self.stops.came):
                gang.stop_wanted = False
                follower.tell("stopping")  # the coordinator saves, with our help
            return follower.look(self._task)

        gang = Gang(
            may_replace=lambda ending: restarts.allow(ending, alone=True), look_around=look_around, launch=spares.launch
        )
        return gang

    def _check_config(self, follower: Follower, model_dir: Path) -> None:
        """Refuses to take part in a run with another config than its chief has."""
        name = "config.yaml" if self.config.command in configs.TRAINING_RUNS else f"config.{self.config.command}.yaml"
        differing = differences(configs.read(model_dir / name), configs.to_tree(self.config))
        if differing:
            follower.tell("failed", f"another config than the chief's: {', '.join(differing)}", 2)
            raise ConfigError(
                f"{self.place.name} has another config than the chief of {relative(model_dir)}: {', '.join(differing)}."
                " Start all tasks of a cluster with the same command."
            )


def differences(theirs: Mapping[str, object], ours: Mapping[str, object]) -> list[str]:
    """What differs between the chief's config and ours, but for where and how the run is shown."""
    flat_theirs, flat_ours = configs.flatten(masked(theirs)), configs.flatten(masked(ours))
    return [
        f"{key}={flat_ours.get(key)} here, {flat_theirs.get(key)} there"
        for key in sorted({*flat_theirs, *flat_ours})
        if flat_theirs.get(key) != flat_ours.get(key) and key != "model_dir" and not is_shown_only(key)
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
