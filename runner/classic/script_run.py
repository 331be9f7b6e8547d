"""The run of a script under `python -m runner.classic`: the command's options, and the record in MLflow.

    python -m runner.classic --tracking --model-dir runs/1 --strategy mirrored train.py --learning_rate=0.1

The Estimators that the script makes get their folder, strategy and journal from `current`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runner.config.schema import TrackingConfig
from runner.run_config import RunConfig
from runner.system.standard_streams import say
from runner.tracking.exit_codes import FINISHED, INTERRUPTED, MLFLOW_STATUS
from runner.tracking.journal import Journal, journal_path
from runner.tracking.mlflow_tracker import build_tracker
from runner.tracking.provenance import tags_of_this_process
from runner.tracking.run_lock import alone_in
from runner.tracking.run_record import RunRecord
from runner.tracking.shipper import Shipper
from runner.tracking.tracker import RunDescription

_log = logging.getLogger(__name__)

STRATEGIES = ("default", "one_device", "mirrored", "central_storage", "multi_worker", "parameter_server")
"""Values of `--strategy`, with the meaning of `python -m runner strategy=`."""

CLUSTER_STRATEGIES = ("multi_worker", "parameter_server")


@dataclasses.dataclass(frozen=True)
class ScriptOptions:
    """The command line of `python -m runner.classic`.

    Attributes:
      command: the script, or `-m` and the module, and its arguments.
      model_dir: overrides the script's model_dir; None: the script decides.
      strategy: one of STRATEGIES, overrides the script's; None: the script decides.
      tracking: record parameters and metrics in MLflow.
    """

    command: Sequence[str] = ()
    model_dir: str | None = None
    strategy: str | None = None
    tracking: bool = False


class ScriptRun:
    """Applies the options to a script's Estimators, and records their training if `--tracking` is given."""

    def __init__(self, options: ScriptOptions) -> None:
        self._options = options
        self._written: list[str | None] = []
        self._recordings: dict[Path, Recording] = {}

    def given(self, config: Any, model_dir: Any) -> tuple[Any, Any]:
        """Return (config, model_dir) with the options applied, for an Estimator that the script makes with `config` and
        `model_dir`.
        """
        if not isinstance(config, RunConfig):  # the Estimator will refuse it
            return config, model_dir
        written = model_dir or config.model_dir
        if self._options.model_dir is not None and written != self._options.model_dir:
            written = None if written is None else os.fspath(written)
            if not self._written or (written is not None and written == self._written[0]):
                self._written = [written]
                config, model_dir = config.replace(model_dir=self._options.model_dir), self._options.model_dir
            else:
                _log.warning(
                    "--model-dir=%s applies only to the first Estimator of the script; another Estimator uses %s.",
                    self._options.model_dir, written or "a temporary folder",
                )  # fmt: skip
        if self._options.strategy is not None and self._strategy is not config.train_distribute:
            if config.train_distribute is not None:
                _log.warning("--strategy %s replaces RunConfig(train_distribute=...).", self._options.strategy)
            evaluates = self._options.strategy not in (*CLUSTER_STRATEGIES, "default")
            config = config.replace(
                train_distribute=self._strategy, eval_distribute=self._strategy if evaluates else None
            )
        return config, model_dir

    @functools.cached_property
    def _strategy(self) -> Any:
        """The strategy of `--strategy`, shared by all Estimators."""
        import tensorflow as tf

        from runner.distribute.strategy import build_strategy

        if self._options.strategy == "parameter_server":
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
            return tf.distribute.ParameterServerStrategy(resolver)
        return build_strategy(str(self._options.strategy))

    def recording_of(self, estimator: Any) -> Recording | None:
        """Return the record of an Estimator's model_dir; None without `--tracking`, and in processes other than the
        chief.
        """
        if not self._options.tracking or not estimator.config.cluster.is_chief:
            return None
        folder = Path(estimator.model_dir).absolute()
        if folder not in self._recordings:
            self._recordings[folder] = Recording(folder, _described(folder, self._options, estimator))
        return self._recordings[folder]

    def end(self, code: int) -> None:
        """End all records. `code` is the exit code of the script."""
        for recording in self._recordings.values():
            recording.end(code, [Path(one) for one in self._options.command[:1]])


def _described(folder: Path, options: ScriptOptions, estimator: Any) -> RunDescription:
    """Return what MLflow records of an Estimator: the name of the run, parameters and tags."""
    params = estimator.params
    params = params if isinstance(params, dict) else getattr(params, "values", lambda: params)()
    given = params if isinstance(params, dict) else {"params": params}
    config = estimator.config
    settings = {name: getattr(config, name) for name in ("tf_random_seed", "save_checkpoints_steps")}
    return RunDescription(
        folder.name,
        {
            "script": " ".join(options.command),
            **{f"model.params.{name}": value for name, value in given.items()},
            **{f"RunConfig.{name}": value for name, value in settings.items()},
        },
        {
            **tags_of_this_process(folder, [sys.executable, "-m", "runner.classic", *options.command]),
            "strategy": type(config.train_distribute).__name__ if config.train_distribute else "default",
            "num_replicas": str(config.num_replicas_in_sync),
        },
    )


class Recording:
    """The record of one model_dir: a journal in that folder, and a thread that sends the journal to MLflow. Recording
    begins with the first access to `journal`.
    """

    def __init__(self, folder: Path, described: RunDescription) -> None:
        self._folder, self._described = folder, described
        self._held = ExitStack()
        self._shipper: Shipper | None = None

    @functools.cached_property
    def journal(self) -> Journal:
        """The journal of the run in the folder. The first access locks the folder for this process.

        Raises:
          ConfigError: another run uses the folder.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(alone_in(self._folder))
        record = RunRecord.read(self._folder)
        record.generation += 1
        self._shipper = Shipper(
            self._folder,
            build_tracker(TrackingConfig(), os.environ, Path.cwd()),
            record,
            self._described,
            warn=say,
            patience_secs=math.inf,
        )
        self._shipper.start()
        return Journal(journal_path(self._folder))

    def end(self, code: int, files: Sequence[Path]) -> None:
        """Send the rest of the journal to MLflow, and end the MLflow run.

        Args:
          code: exit code of the script.
          files: files to log as artifacts.
        """
        if self._shipper is None:
            return
        self.journal.close()
        status = {FINISHED: "finished", INTERRUPTED: "interrupted"}.get(code, "failed")
        self._shipper.record.training = status
        self._shipper.drain()
        self._shipper.record.save(self._folder)
        self._shipper.close(MLFLOW_STATUS[status], {"status": status}, files)
        if address := self._shipper.address():
            say(f"mlflow: {address}")
        self._held.close()


current = ScriptRun(ScriptOptions())
"""The script run of this process. It overrides nothing unless `python -m runner.classic` started the process."""


def begin(options: ScriptOptions) -> ScriptRun:
    """Apply `options` to the Estimators that this process makes from now on, and return their ScriptRun."""
    global current
    current = ScriptRun(options)
    return current
