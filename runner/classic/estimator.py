"""tf.estimator's Estimator on the runner's engine. It logs the same lines as tf.estimator, on TensorFlow's logger."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner import run_config
from runner.checkpoint.reader import GLOBAL_STEP
from runner.checkpoint.warm_start import MissingCheckpointError
from runner.classic import script_run
from runner.classic.compat.tf1_operators import as_classic, as_classic_input
from runner.classic.estimator_spec import EstimatorSpec
from runner.classic.inputs import named_only
from runner.classic.run_config import RunConfig, default_session_config
from runner.classic.warm_start import as_warm_start
from runner.data.inputs import EmptyInputError, Input
from runner.estimator import estimator as engine
from runner.estimator.train_loop import TrainingRun
from runner.hooks.scaffold import ModelScaffold
from runner.hooks.trace_session import TraceSession
from runner.model_fn import ModeKeys, declared_arguments
from runner.programs.model import MissingVariableError, Model, VariableShapeError
from runner.programs.program import Program
from runner.system.console import LoopReport, Progress
from runner.tf_private import tensor_bundle
from runner.tf_private.tf_estimator import eagerly
from runner.tracking.journal import Journal, NullJournal

_METRIC_FN_ARGUMENTS = ("features", "labels", "predictions", "config")


class Estimator(engine.Estimator):
    """`runner.Estimator` with the arguments and defaults that tf.estimator had.

    Args:
      model_fn: called with those of features, labels, mode, params and config that it declares.
      model_dir: folder of checkpoints and events; None: that of config, or a temporary folder.
      config: a RunConfig of tf.estimator or of the runner; None: `tf.estimator.RunConfig()`, which reads TF_CONFIG.
      params: passed to model_fn and input functions, a dict or any object; each call gets a copy.
      warm_start_from: path of a checkpoint or SavedModel, from which all trainable variables are loaded; or
        `WarmStartSettings`. Ignored if model_dir has a checkpoint. None: no warm start.

    Raises:
      ValueError: config has another type, model_dir is not that of config, model_fn declares other arguments, or a
        subclass overrides a member of Estimator.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: run_config.RunConfig | None = None,
        params: Any = None,
        warm_start_from: Any = None,
        **others: Any,
    ) -> None:
        type(self)._assert_members_are_not_overridden(self)  # AdaNet replaces it with a staticmethod of one argument
        if model_fn is None:
            raise ValueError("Estimator(model_fn=None): it must be a function.")
        # The engine, whose params are never None, takes {} for none.
        if "params" not in declared_arguments(model_fn) and params is not None:
            raise ValueError(f"Estimator(params={params!r}): model_fn has no argument 'params'. Add it.")
        if model_dir in ("", b"") and getattr(config, "model_dir", None) is None:
            model_dir = None
        config = RunConfig() if config is None else config
        if isinstance(config, RunConfig) and config.session_config is None:
            config = config.replace(session_config=default_session_config())
        config, model_dir = script_run.current.given(config, model_dir)
        if warm_start_from is not None and isinstance(config, run_config.RunConfig):
            config = config.replace(warm_start=as_warm_start(warm_start_from))
        others.setdefault("progress", LoggedProgress())
        self._initial_values: Path | None = None  # their checkpoint, in a folder that goes with this object
        super().__init__(as_classic(model_fn), model_dir, config, params, **others)
        if isinstance(config, RunConfig):
            config.say_without_effect()
            config.say_who_evaluates()

    def _assert_members_are_not_overridden(self) -> None:
        """Check that the user's class leaves the methods of Estimator as they are. It may override this one, which has
        its name from tf.estimator.

        Raises:
          ValueError: it does not.
        """
        own = {name for name in vars(engine.Estimator) if not name.startswith("_")} - {"latest_checkpoint"}
        changed = sorted(own.intersection(vars(type(self))))
        if changed and not type(self).__module__.startswith("runner."):
            raise ValueError(
                f"{type(self).__name__} overrides {', '.join(changed)}, and a subclass of Estimator may not. Change "
                "what model_fn, hooks or the input function do, or call the Estimator from another class."
            )

    @eagerly()
    def evaluate(
        self,
        input_fn: Any,
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Like `runner.Estimator.evaluate`.

        Returns:
          Metric name -> NumPy value of the metric's dtype, with `loss` (float32) and `global_step` (int64).
        """
        # On a worker that did not evaluate, the numbers came without their types.
        with _errors_of_restoring():
            metrics = super().evaluate(input_fn, steps, hooks, checkpoint_path, name)
        return {name: tf.nest.map_structure(_as_numpy, value) for name, value in metrics.items()}

    def _returned(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
        return {**metrics, "global_step": step}

    @eagerly()
    def experimental_export_all_saved_models(
        self,
        export_dir_base: str | bytes | os.PathLike[str],
        input_receiver_fn_map: Mapping[str, Callable[[], Any]],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> bytes:
        """Like `runner.Estimator.experimental_export_all_saved_models`, which `export_saved_model` calls.

        Raises:
          AttributeError: a receiver function returns something else than a receiver.
          tf.errors.NotFoundError: a file of assets_extra does not exist.
        """
        files = assets_extra.values() if isinstance(assets_extra, Mapping) else ()
        missing = [file for file in files if not tf.io.gfile.exists(file)]
        if missing:
            raise tf.errors.NotFoundError(None, None, f"assets_extra: there is no file {missing[0]!r}.")
        functions = input_receiver_fn_map
        if isinstance(functions, Mapping):
            functions = {mode: _returning_receivers(function) for mode, function in functions.items()}
        return super().experimental_export_all_saved_models(
            export_dir_base, functions, assets_extra, as_text, checkpoint_path
        )

    @eagerly()
    def get_variable_value(self, name: str) -> np.ndarray:
        """Like `runner.Estimator.get_variable_value`.

        Raises:
          tf.errors.NotFoundError: the checkpoint has no variable of that name.
        """
        try:
            return super().get_variable_value(name.removesuffix(":0"))
        except KeyError as error:
            raise tf.errors.NotFoundError(None, None, error.args[0]) from None

    def predict(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Like `runner.Estimator.predict`."""
        following = eagerly()(super().predict(*args, **kwargs).__next__)
        while True:
            try:
                with _errors_of_restoring():
                    prediction = following()
            except StopIteration:
                return
            yield prediction

    @eagerly()
    def train_run(
        self, input_fn: Any, hooks: Sequence[Any] | None = None, *args: Any, **kwargs: Any
    ) -> TrainingRun | None:
        """Like `runner.Estimator.train_run`.

        Raises:
          ValueError: this process does not train.
          TypeError: a hook or listener has another type.
        """
        cluster = self.config.place
        # A worker of a parameter server cluster is a server, to which the coordinator sends the steps.
        is_asked = cluster.is_server and self.config.train_distribute is None
        kind = self.config.task_type  # a subclass of RunConfig may say what it is
        if is_asked or kind in ("evaluator", "ps"):
            beside = " beside parameter servers" if kind == "worker" else ""
            raise ValueError(
                f"Estimator.train: in TF_CONFIG, this process is the {kind}{beside}, which does not "
                "train. Call train_and_evaluate in every process: it does what the task of the process requires."
            )
        if isinstance(self.config, RunConfig):
            self.config.check_strategy()
        try:
            with _errors_of_restoring():
                return super().train_run(input_fn, hooks, *args, **kwargs)
        except EmptyInputError as error:  # tf.estimator trained on nothing, with a warning
            tf.get_logger().warning("Training with estimator made no steps. %s", error)
            return None

    def _checkpoint(self, path: str | None, command: str) -> str:
        """Return `path`; if it is None, for an evaluation or prediction, that of a checkpoint to be of initial values,
        as tf.estimator took them. Several workers would have to see the same file: they need a trained model.
        """
        is_shown = command in ("evaluate", "predict")
        if path is not None or not is_shown or self.collectives.num_workers > 1:
            return super()._checkpoint(path, command)
        tf.get_logger().warning(
            "Could not find trained model in model_dir: %s, running initialization to %s: its numbers are those of "
            "initial values.",
            self.model_dir,
            command,
        )
        if self._initial_values is None:
            folder = tempfile.mkdtemp(prefix="initial_values-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._initial_values = Path(folder, "model.ckpt-0")
            # Without the variables, which are known after the trace: it computes their initial values.
            tensor_bundle.write_bundle(self._initial_values, {GLOBAL_STEP: np.array(0, np.int64)})
        return str(self._initial_values)

    @contextlib.contextmanager
    def _restored(self, model: Model, program: Program, path: str) -> Iterator[None]:
        is_initial = self._initial_values is not None and path == str(self._initial_values)
        if is_initial and model.values_of != path:
            self._begin(model, program, path)
        with super()._restored(model, program, path):
            yield

    def _begin(self, model: Model, program: Program, path: str) -> None:
        """Give the model the values with which training would begin, and write them to the checkpoint `path`.

        Raises:
          ValueError: the model has the values of a checkpoint that is gone, which are no initial values.
        """
        if model.values_of is not None:
            command = {ModeKeys.EVAL: "evaluate", ModeKeys.PREDICT: "predict"}[program.spec.mode]
            super()._checkpoint(None, command)  # raises the error
        self._warm_start(model)
        scaffold = ModelScaffold(program.spec.scaffold, program.trace.graph, program.trace.requested)
        model.keys = scaffold.keys
        scaffold.begin(TraceSession(program.trace, self._context.model_fn.operators, model.begin_to_write))

        def write(values: Mapping[str, Any]) -> str:
            tensor_bundle.write_bundle(Path(path), values)
            return path

        model.save(write)

    def _own_journal(self, config: Any, collectives: Any, progress: Progress) -> LoggedJournal:
        return LoggedJournal(super()._own_journal(config, collectives, progress), progress)

    def _as_input(self, input_fn: Any, mode: str) -> Any:
        if isinstance(input_fn, Input):
            return input_fn
        return as_classic_input(named_only(input_fn))

    @property
    def model_fn(self) -> Callable[..., Any]:
        """A function (features, labels, mode, config=None) that calls the user's model_fn with its params."""

        def model_fn(features: Any, labels: Any, mode: str, config: Any = None) -> Any:
            called = self._context.model_fn
            if config is not None:
                called = dataclasses.replace(called, config=config)
            spec = called(features, labels, mode)
            return EstimatorSpec(**{**spec._asdict(), "export_outputs": spec.export_outputs or None})

        return model_fn

    @property
    def _model_dir(self) -> str:  # subclasses read it
        return self.model_dir

    @property
    def _model_fn(self) -> Callable[..., Any]:  # neural-structured-learning replaces it
        return self._context.model_fn.fn

    @_model_fn.setter
    def _model_fn(self, model_fn: Callable[..., Any]) -> None:
        changed = dataclasses.replace(self._context.model_fn, fn=as_classic(model_fn))
        self._use(dataclasses.replace(self._context, model_fn=changed))


def _returning_receivers(function: Any) -> Any:
    """Return a receiver function that raises AttributeError where `function` returns something else."""
    if not callable(function):
        return function

    @functools.wraps(function)
    def receive(*args: Any, **kwargs: Any) -> Any:
        receiver = function(*args, **kwargs)
        if not hasattr(receiver, "receiver_tensors"):
            raise AttributeError(
                f"The receiver function returned {receiver!r}, which has no receiver_tensors: return a "
                "tf.estimator.export.ServingInputReceiver."
            )
        return receiver

    return receive


@contextlib.contextmanager
def _errors_of_restoring() -> Iterator[None]:
    """Raise what a session raised where a checkpoint does not have the variables of the model."""
    try:
        yield
    except (MissingVariableError, MissingCheckpointError) as error:
        raise tf.errors.NotFoundError(None, None, str(error)) from error
    except VariableShapeError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error


def _as_numpy(value: Any) -> Any:
    """Return a Python number as a NumPy scalar of the type that tf.estimator gave; other values unchanged."""
    if type(value) is float:
        return np.float32(value)
    if type(value) is int:
        return np.int64(value)
    return value


def add_metrics(estimator: engine.Estimator, metric_fn: Callable[..., Mapping[str, Any]]) -> Estimator:
    """Return an Estimator like `estimator`, in the same model_dir, whose evaluations have additional metrics.

    Args:
      estimator: the Estimator.
      metric_fn: called in EVAL with those of features, labels, predictions and config that it declares; returns name ->
        metric, as in `EstimatorSpec.eval_metric_ops`. A metric replaces that of model_fn with the same name.

    Raises:
      ValueError: metric_fn declares other arguments.
      TypeError: in an evaluation, metric_fn returns something else.
    """
    bound = getattr(metric_fn, "keywords", {})  # of a partial
    takes = []
    for name, parameter in inspect.signature(metric_fn).parameters.items():
        if name not in bound and "VAR" not in parameter.kind.name:
            takes.append(name)
    unknown = [name for name in takes if name not in _METRIC_FN_ARGUMENTS]
    if unknown:
        raise ValueError(
            f"metric_fn declares {', '.join(unknown)}, but only {', '.join(_METRIC_FN_ARGUMENTS)} can be passed to it."
        )
    inner = estimator._context.model_fn

    def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> Any:
        spec = inner(features, labels, mode)
        if mode != ModeKeys.EVAL:
            return spec
        available = {"features": features, "labels": labels, "predictions": spec.predictions, "config": config}
        added = metric_fn(**{name: available[name] for name in takes})
        if spec.loss is not None:
            EstimatorSpec(mode, loss=spec.loss, eval_metric_ops=added)  # which checks them
        return spec._replace(eval_metric_ops={**(spec.eval_metric_ops or {}), **added})

    return Estimator(model_fn, config=estimator.config, params=estimator.params)


# --- log as tf.estimator did -----------------------------------------------------------------------------------------


class LoggedJournal(NullJournal):
    """A journal that logs events on `tf.get_logger()`, whose level `tf.logging.set_verbosity` sets.

    Args:
      journal: the journal that gets all events, too.
      progress: shows the phases.
    """

    def __init__(self, journal: Journal | NullJournal, progress: Progress) -> None:
        super().__init__(progress.phase)
        self._journal = journal
        self._last: tuple[int, float] | None = None

    def metrics_of_steps(self, points: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        points = list(points)
        for step, values in points:
            self._say_metrics(step, values)
        self._journal.metrics_of_steps(points)

    def _say_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self._say_loss(step, values["train/loss"])
        evaluations: dict[str, dict[str, str]] = {}
        for name, value in values.items():
            evaluation, _, metric = name.partition("/")
            if evaluation.startswith("eval"):
                evaluations.setdefault(evaluation, {"global_step": str(step)})[metric] = f"{value:.7g}"
        for metrics in evaluations.values():
            text = ", ".join(f"{name} = {metrics[name]}" for name in sorted(metrics))
            tf.get_logger().info("Saving dict for global step %d: %s", step, text)

    def event(self, kind: str, **fields: Any) -> None:
        self._journal.event(kind, **fields)
        if kind == "checkpoint":
            tf.get_logger().info("Saving checkpoints for %s into %s.", fields.get("step"), fields.get("path"))
        elif kind == "first_step":
            self._last = None

    def _say_loss(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if self._last is None:
            tf.get_logger().info("loss = %.7g, step = %d", loss, step)
        else:
            steps = step - self._last[0]
            secs = now - self._last[1]
            speed = steps / secs if secs else 0.0
            tf.get_logger().info("global_step/sec: %.6g", speed)
            tf.get_logger().info("loss = %.7g, step = %d (%.3f sec)", loss, step, secs)
        self._last = step, now


class LoggedProgress(Progress):
    """Logs the loss of the last step when training ends."""

    _loss: float | None = None

    def update(self, loop: LoopReport) -> None:
        self._loss = loop.loss

    def stop(self) -> None:
        if self._loss is not None:
            tf.get_logger().info("Loss for final step: %.7g.", self._loss)
        self._loss = None
