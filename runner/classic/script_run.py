"""The run of a script under `python -m runner.classic`: the command's options, and the record in MLflow.

    python -m runner.classic --tracking --model-dir runs/1 --strategy mirrored train.py --learning_rate=0.1

The Estimators that the script makes get their folder, strategy and journal from `current`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

from runner.config.schema import CLUSTER_STRATEGIES, TrackingConfig
from runner.run_config import RunConfig
from runner.tracking.backends import session

_log = logging.getLogger(__name__)

STRATEGIES = ("default", "one_device", "mirrored", "central_storage", "multi_worker", "parameter_server")
"""Values of `--strategy`, with the meaning of `python -m runner strategy=`."""


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
    """Applies the options to a script's Estimators. `--tracking` is `RunConfig(tracking="mlflow")`."""

    def __init__(self, options: ScriptOptions) -> None:
        self._options = options
        self._model_dir_of_script: list[str | None] = []  # of the first Estimator; empty before there is one

    def given(self, config: Any, model_dir: Any) -> tuple[Any, Any]:
        """Return (config, model_dir) with the options applied, for an Estimator that the script makes with `config` and
        `model_dir`.
        """
        if not isinstance(config, RunConfig):  # the Estimator will refuse it
            return config, model_dir
        if self._takes_model_dir(model_dir or config.model_dir):
            model_dir = self._options.model_dir
            config = config.replace(model_dir=model_dir)
        if self._options.tracking and config.tracking is None:
            config = config.replace(tracking=TrackingConfig())
        if self._options.strategy is not None and self._strategy is not config.train_distribute:
            if config.train_distribute is not None:
                _log.warning("--strategy %s replaces RunConfig(train_distribute=...).", self._options.strategy)
            evaluates = self._options.strategy not in (*CLUSTER_STRATEGIES, "default")
            eval_distribute = self._strategy if evaluates else None
            config = config.replace(train_distribute=self._strategy, eval_distribute=eval_distribute)
        return config, model_dir

    def _takes_model_dir(self, model_dir: Any) -> bool:
        """Report whether an Estimator gets `--model-dir`, given the model_dir that the script wrote for it.

        The first Estimator gets it, and later ones with the same model_dir as the first. The first call stores the
        script's model_dir; a call for any other Estimator logs a warning.
        """
        if self._options.model_dir is None or model_dir == self._options.model_dir:
            return False
        model_dir = None if model_dir is None else os.fspath(model_dir)
        is_first = not self._model_dir_of_script
        is_same = model_dir is not None and self._model_dir_of_script == [model_dir]
        if is_first or is_same:
            self._model_dir_of_script = [model_dir]
            return True
        used_instead = model_dir or "a temporary folder"
        _log.warning(
            "--model-dir=%s applies only to the first Estimator of the script; another Estimator uses %s.",
            self._options.model_dir,
            used_instead,
        )
        return False

    @functools.cached_property
    def _strategy(self) -> Any:
        """The strategy of `--strategy`, shared by all Estimators."""
        import tensorflow as tf

        from runner.distribute.strategy import build_strategy

        if self._options.strategy == "parameter_server":
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
            return tf.distribute.ParameterServerStrategy(resolver)
        return build_strategy(str(self._options.strategy))


current = ScriptRun(ScriptOptions())
"""The script run of this process. It overrides nothing unless `python -m runner.classic` started the process."""


def begin(options: ScriptOptions) -> ScriptRun:
    """Apply `options` to the Estimators that this process makes from now on, and return their ScriptRun."""
    global current
    current = ScriptRun(options)
    # Now: the script may change the working directory.
    session.script = next(map(os.path.abspath, options.command), None)
    return current
