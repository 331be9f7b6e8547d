"""Training with evaluations in between, in one process or with an evaluator process beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from runner.checkpoint import reader, retention
from runner.config.metric_names import evaluation_of, evaluation_prefix, unknown_metric
from runner.distribute import grpc_server
from runner.estimator.early_stopping import HISTORIES, MetricHistory
from runner.estimator.estimator import Estimator
from runner.estimator.evaluator import CheckpointFollower, Evaluations, RemoteEvaluation, TrainingWatch, tell_ending
from runner.estimator.reduce_lr_on_plateau import LearningRateReductions
from runner.estimator.run_exports import RunExports
from runner.estimator.specs import EvalSpec, TrainingResult, TrainSpec
from runner.estimator.train_loop import TrainingRun
from runner.export.exporters import Exporter, checked_exporters
from runner.hooks.hook import Hook, Interrupted, Run
from runner.tracking import tensorboard
from runner.tracking.run_end import TrainingStatus, read_ending

_log = logging.getLogger(__name__)


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]
) -> TrainingResult:
    """Train and evaluate; `RunConfig.cluster` decides which part of this the process does.

    A training process evaluates checkpoints when they are saved, as often as the EvalSpecs say, and always the last
    one. With `RunConfig(has_evaluator=True)`, a separate evaluator process follows the checkpoints instead, and
    training ends when the evaluator decides to stop early.

    A run is finished if it has taken its last step, was stopped early or, without `max_steps`, has read its input to
    the end. Calling this function again for a finished run evaluates and reports it. An interrupted run ends with a
    checkpoint. If an undisturbed run would evaluate that checkpoint, the process that resumes the run does so first.

    Args:
      estimator: the model and its folder.
      train_spec: the training.
      eval_spec: the evaluation, or several.

    Returns:
      The metrics at the last checkpoint, its path and its step.

    Raises:
      ValueError: two evaluations or exporters have the same name, or a rule uses a metric of an evaluation that does
        not exist.
      tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite.
    """
    settings = {"train.max_steps": train_spec.max_steps, "train.max_epochs": train_spec.max_epochs}
    with estimator.recording("train_and_evaluate", trains=True, **settings):
        return _train_and_evaluate(estimator, train_spec, eval_spec)


def _train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]
) -> TrainingResult:
    """Do this process's part of `train_and_evaluate`: evaluate as the evaluator, serve a coordinator, or train."""
    if estimator.config.place.is_evaluator:
        return evaluate_checkpoints(estimator, train_spec, eval_spec)
    if estimator.config.place.is_server and estimator.config.train_distribute is None:
        return _serve(estimator)
    eval_specs = _checked(train_spec, eval_spec)
    if estimator.config.has_evaluator and train_spec.reduce_lr_on_plateau.metric is not None:
        raise ValueError(
            "TrainSpec(reduce_lr_on_plateau=...) with RunConfig(has_evaluator=True): an evaluator is behind training, "
            "so a resumed run would reduce its learning rate at other steps. Use has_evaluator=False."
        )
    evaluations: Evaluations
    if estimator.config.has_evaluator:
        evaluations = RemoteEvaluation(estimator, train_spec.early_stopping)
    else:
        retention.release(estimator.model_dir)  # an evaluator of an earlier start may have left its lease
        evaluations = RunEvaluations(estimator, eval_specs, train_spec)
    train = functools.partial(_train, estimator, train_spec, evaluations)
    # Only a supervisor counts starts. Without one, an evaluator may wait for the end of training although this process
    # does not know of it: a script often names the evaluator only in the evaluator's own TF_CONFIG.
    if estimator.config.has_evaluator or not estimator.config.generation:
        return tell_ending(estimator, train)
    return train()


def evaluate_checkpoints(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec | Sequence[EvalSpec],
    wait: Callable[[float], None] = time.sleep,
) -> TrainingResult:
    """Evaluate the checkpoints that other processes save in model_dir, until training ends.

    This is the evaluator's part of `train_and_evaluate`. The last checkpoint is evaluated unless training failed or was
    interrupted.

    Args:
      estimator, train_spec, eval_spec: as in `train_and_evaluate`.
      wait: called with a number of seconds between two looks for a checkpoint. Errors that it raises pass through,
        except `Interrupted` after an evaluation.

    Raises:
      ValueError: as in `train_and_evaluate`; or this is a second evaluator.
    """
    config = estimator.config
    if config.place.task_index:
        raise ValueError(f"evaluator {config.place.task_index}: a run has one evaluator, with index 0.")
    eval_specs = _checked(train_spec, eval_spec)
    watch = TrainingWatch(estimator.model_dir, config.generation)
    evaluations = RunEvaluations(estimator, eval_specs, train_spec, [watch])
    evaluations.find_histories()
    ending = TrainingStatus()
    try:
        ending = CheckpointFollower(estimator.model_dir, watch, evaluations, estimator.latest_checkpoint, wait).run()
    except Interrupted:
        if not evaluations.metrics:
            raise
    return TrainingResult(
        metrics=evaluations.metrics,
        global_step=evaluations.last_step,
        examples=0,
        steps_per_sec=0.0,
        checkpoint=evaluations.last_path,
        stopped_early=evaluations.reason_to_stop() if ending.status == "stopped_early" else None,
        exports=evaluations.exported_paths,
    )


START_TIMEOUT_SECS = 600.0
"""How long a server waits for the coordinator; the pods of a cluster may start at different times."""


def _serve(estimator: Estimator) -> TrainingResult:
    """Run a server for the coordinator until the coordinator ends.

    Called in a parameter server, and in a worker of a parameter-server run.

    Raises:
      TimeoutError: the coordinator does not join.
      RuntimeError: the coordinator ended before training did.
    """
    cluster = estimator.config.place
    model_dir = estimator.model_dir
    (address,) = cluster.tasks["chief"]
    before = read_ending(model_dir)  # left by an earlier run; read before the coordinator can begin
    with grpc_server.kept_local(cluster):
        server = grpc_server.start_server(cluster)
    _log.info("%s serves the coordinator %s until the coordinator ends.", cluster.name, address)
    grpc_server.serve_the_coordinator(
        server, cluster, START_TIMEOUT_SECS, lambda: read_ending(model_dir) not in (before, TrainingStatus())
    )
    ending = read_ending(model_dir)
    if not ending.is_complete:
        texts = {"running": "nothing says that training has ended", "interrupted": "training was interrupted"}
        status = texts.get(ending.status, "training failed")
        raise RuntimeError(
            f"The coordinator of the parameter servers, {address}, has ended, and {status} in {model_dir}."
        )
    return TrainingResult(
        {}, ending.global_step, examples=0, steps_per_sec=0.0, checkpoint=estimator.latest_checkpoint()
    )


def _train(estimator: Estimator, train_spec: TrainSpec, evaluations: Evaluations) -> TrainingResult:
    """Train, and return the result. Called in every process except evaluators and servers (`_serve`)."""
    run = None
    if not evaluations.have_ended(train_spec.max_steps):
        run = estimator.train_run(
            train_spec.input_fn,
            hooks=[*train_spec.hooks, evaluations],
            max_steps=train_spec.max_steps,
            saving_listeners=train_spec.saving_listeners,
            after_save=[evaluations.after_save],
            facts=evaluations.facts,
            once=True,
            max_epochs=train_spec.max_epochs,
        )
    checkpoint = estimator.agreed_checkpoint()
    assert checkpoint is not None
    step = reader.checkpoint_step(checkpoint)
    interrupted = run is not None and run.interrupted
    # The order matters: an interrupted run must not evaluate its last checkpoint, so that it ends soon.
    interrupted = interrupted or not evaluations.evaluate_last(step)
    reason = evaluations.stopped_early
    if reason is None and run is not None:
        reason = run.ended_early
    stopped_early = estimator.collectives.broadcast_text(reason or "") or None
    estimator.collectives.part()
    result = TrainingResult(
        metrics=evaluations.metrics,
        global_step=step,
        examples=0,
        steps_per_sec=0.0,
        checkpoint=checkpoint,
        stopped_early=stopped_early,
        exports=evaluations.exported_paths,
        interrupted=interrupted,
    )
    if run is None:
        return result
    return dataclasses.replace(
        result, examples=run.examples, steps_per_sec=run.steps_per_sec, input_bound=run.input_bound
    )


class RunEvaluations(Evaluations):
    """The evaluations of a run: before its first step, after its checkpoints and at its end.

    They may end training early, reduce its learning rate and call exporters. In a training process, this object is a
    hook, and `after_save` is called after each checkpoint. In an evaluator process, `of_checkpoint` is called.

    Args:
      estimator: the Estimator.
      specs: the evaluations.
      train_spec: the training, with the rules that depend on evaluations.
      hooks: hooks that take part in every evaluation, in addition to the evaluation's own hooks.

    Attributes:
      last_step, last_path: step and path of the checkpoint that an evaluator process evaluated last; 0 and None before.
    """

    def __init__(
        self, estimator: Estimator, specs: Sequence[EvalSpec], train_spec: TrainSpec, hooks: Sequence[Hook] = ()
    ) -> None:
        super().__init__(estimator)
        self.last_step = 0
        self.last_path: str | None = None
        self._specs = specs
        self._hooks = hooks
        self._has_begun = False
        self._evaluated_on_resume: list[EvalSpec] = []
        self._started = time.monotonic()
        self._last_start: dict[str, float] = {}
        self._last_step: dict[str, int] = {}
        self._history = MetricHistory(train_spec.early_stopping, estimator.model_dir)
        rule = train_spec.reduce_lr_on_plateau
        history_of_rate = MetricHistory(rule, estimator.model_dir)
        self._rate = LearningRateReductions(rule, history_of_rate, self._collectives, estimator.announce)
        self._histories = [history for history in (self._history, history_of_rate) if history.rule.metric is not None]
        self._exports = RunExports(estimator)

    @property
    def exported_paths(self) -> Sequence[str]:
        return self._exports.paths

    def facts(self) -> dict[str, Any]:
        contents = {history.rule.file: history.contents() for history in self._histories}
        return {HISTORIES: contents} if contents else {}

    def resume(self, step: int, path: str | None, *, is_last: bool) -> None:
        """Evaluate the checkpoint `path` if the run was killed or stopped before it did so.

        Raises:
          Interrupted: a hook ended that evaluation early.
        """
        if self._collectives.is_chief:
            for history in self._histories:
                history.resume(step, path)
        if path is None or is_last:
            return
        for spec in self._agreed(self._missing(path, step)):
            self._evaluate(spec, step)
            self._evaluated_on_resume.append(spec)
        if self._collectives.is_chief:
            self._stop_early(self._history.reason(step), step, None)

    def find_histories(self) -> None:
        """In an evaluator: go on with the histories of an earlier start."""
        latest = self._estimator.latest_checkpoint()
        if latest is not None:
            for history in self._histories:
                history.resume(reader.checkpoint_step(latest), latest)

    def begin(self, run: Run) -> None:
        """Check before training that the metrics of the rules and what hooks fetch exist, and that the learning rate
        can be reduced if a rule asks.

        Raises:
          ValueError: an evaluation lacks such a metric or value, or the learning rate cannot be reduced.
        """
        assert isinstance(run, TrainingRun)
        self._rate.check(run)
        best = self._estimator.config.keep_best
        watched = [(f"{history.rule.key}.metric", str(history.rule.metric)) for history in self._histories]
        if best is not None and best.metric is not None:
            watched.append(("checkpoint.keep_best.metric", best.metric))
        for spec in self._specs:
            self._estimator.check_evaluation_hooks(spec.input_fn, spec.name, spec.hooks)
            metrics = {key: metric for key, metric in watched if evaluation_of(metric) == spec.key}
            if not metrics:
                continue
            names = self._estimator.names_of_metrics(spec.input_fn, spec.name)
            for key, metric in metrics.items():
                # A Keras metric may have several values, whose names are known only after an evaluation.
                if names and not metric.startswith(tuple(names)):
                    raise ValueError(unknown_metric(key, metric, names))

    def before_step(self, run: Run, step: int) -> None:
        """Evaluate before the first loop, if `at_start` asks for it. A checkpoint of `step` exists by then."""
        if not self._has_begun:
            self._has_begun = True
            for spec in self._evaluated_on_resume:
                self._export(spec, None, is_final=False)
            self._exports.note_end()
            at_start = [spec for spec in self._specs if spec.at_start and spec not in self._evaluated_on_resume]
            self._evaluate_during(run, at_start, exports=False)
        assert isinstance(run, TrainingRun)
        # After the evaluation at the start, which may decide about the rate of this step.
        self._rate.apply(run)

    def after_save(self, run: TrainingRun) -> None:
        self._evaluate_during(run, self._agreed([self._due(spec) for spec in self._specs]), exports=True)

    def evaluate_last(self, step: int) -> bool:
        with contextlib.suppress(Interrupted):
            for spec in self._specs:
                if self._last_step.get(spec.key) != step:
                    self._evaluate(spec, step)
                self._export(spec, None, is_final=True)
            self._exports.note_end()
            return True
        return False

    def is_due(self) -> bool:
        """Report whether a new checkpoint would be evaluated now."""
        return any(self._is_first(spec) or self._due(spec) for spec in self._specs)

    def of_checkpoint(self, path: str, *, is_last: bool) -> Sequence[Callable[[], None]]:
        """Return the evaluations and exports that are to be done for the checkpoint `path`, as functions to call.

        An undisturbed run does not evaluate some checkpoints: one before the first step, and one where the run was
        interrupted. Such a checkpoint is evaluated only if it is the last, or the first with `at_start`.

        Args:
          path: the checkpoint.
          is_last: training has ended, so the final exports are included.
        """
        step = reader.checkpoint_step(path)
        for history in self._histories:
            history.forget_after(step)
        open_specs = [spec for spec in self._specs if self._last_step.get(spec.key) != step]
        due = [spec for spec in open_specs if is_last or self._is_first(spec)]
        due_by_time = [spec for spec in open_specs if spec not in due and self._due(spec)]
        if due_by_time and not reader.Reader(path).extra().get("evaluate"):
            due_by_time = []
        due += due_by_time
        evaluations = [functools.partial(self._evaluate, spec, step, path) for spec in due]
        # As in a training process: an evaluation at the start has no export, and at the end all have their final one.
        exported = self._specs if is_last else due_by_time
        # Evaluations first, because an exporter gets their metrics.
        return evaluations + [functools.partial(self._export, spec, path, is_final=is_last) for spec in exported]

    def _agreed(self, chosen: Sequence[bool]) -> list[EvalSpec]:
        """Return the evaluations that the chief has chosen, by its files and clock: all workers evaluate together."""
        return [spec for spec, is_so in zip(self._specs, self._collectives.broadcast(chosen), strict=True) if is_so]

    def _missing(self, path: str, step: int) -> list[bool]:
        """Report for each evaluation whether it, or its exports, are missing for the checkpoint `path`."""
        if not reader.Reader(path).extra().get("evaluate"):  # an undisturbed run would not evaluate at this step
            return [False] * len(self._specs)
        evaluated = {name.partition("/")[0] for name in retention.metrics_of(path)}
        exports_are_open = self._exports.is_open(path)
        missing = []
        for spec in self._specs:
            histories = self._histories_of(spec.key)
            if exports_are_open and spec.exporters:
                missing.append(True)
            elif histories:  # the file of each rule that depends on this evaluation says whether it was made
                missing.append(any(not history.has(step) for history in histories))
            else:
                is_marked = evaluation_prefix(spec.key) in evaluated
                missing.append(not is_marked and self._due(spec))
        return missing

    def _histories_of(self, evaluation: str) -> list[MetricHistory]:
        return [history for history in self._histories if history.rule.evaluation == evaluation]

    def reason_to_stop(self) -> str | None:
        """Return why training ends, because of evaluations made by this process; None: it continues."""
        return self._history.decided(self.last_step)

    def _is_first(self, spec: EvalSpec) -> bool:
        return spec.at_start and spec.key not in self._last_step

    def _evaluate_during(self, run: Run, specs: Sequence[EvalSpec], *, exports: bool) -> None:
        """Run evaluations of the latest checkpoint during training, and with `exports` their exporters.

        All workers must call this together. A rule may stop the run early; a hook of an evaluation may interrupt it.
        """
        assert isinstance(run, TrainingRun)
        if specs:
            run.wait_for_checkpoint()
        exported = [spec for spec in specs if spec.exporters and exports]
        if exported:
            self._exports.note_begin()
        try:
            for spec in specs:
                run.before_evaluation()
                self._evaluate(spec, run.global_step)
                run.evaluated(spec.key, self.metrics[spec.key])
                # The chief tells the other workers at the end of the loop.
                if spec.key == self._history.rule.evaluation and self._collectives.is_chief:
                    self._stop_early(self._history.reason(run.global_step), run.global_step, run)
        except Interrupted as stopped:
            run.interrupt(str(stopped))
        if exported and run.goes_on:  # otherwise this is the last checkpoint, which `evaluate_last` exports
            for spec in exported:
                self._export(spec, None, is_final=False)
            self._exports.note_end()

    def _export(self, spec: EvalSpec, path: str | None, *, is_final: bool) -> None:
        """Call the exporters of `spec` for an evaluated checkpoint; `path` None: the latest."""
        self._exports.call(spec.exporters, path, self.metrics.get(spec.key, {}), is_final=is_final)

    def _due(self, spec: EvalSpec) -> bool:
        now = time.monotonic()
        since = now - self._last_start.get(spec.key, -float("inf"))
        return now - self._started >= spec.start_delay_secs and since >= spec.throttle_secs

    def _evaluate(self, spec: EvalSpec, step: int, path: str | None = None) -> None:
        """Run one evaluation of the checkpoint of `step`; `path` None: the latest."""
        name = spec.key
        # Before the evaluation: tf.estimator's throttle_secs, too, counts from the start of the last one.
        self._last_start[name] = time.monotonic()
        try:
            self.metrics[name] = self._estimator.evaluate(
                spec.input_fn, steps=spec.steps, hooks=[*spec.hooks, *self._hooks], checkpoint_path=path, name=spec.name
            )
        except Exception as error:
            error.add_note(f"evaluating {name!r} at step {step} from {path or self._estimator.latest_checkpoint()}")
            raise
        self._last_step[name] = step
        self.last_step = step
        self.last_path = path
        self._rate.evaluated()
        if not self._collectives.is_chief:
            return
        prefix = evaluation_prefix(name)
        scalars = tensorboard.scalars(self.metrics[name])
        metrics = {f"{prefix}/{key}": value for key, value in scalars.items() if key != "global_step"}
        for history in self._histories_of(name):
            history.add(step, metrics)


def _checked(train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]) -> list[EvalSpec]:
    """Return the evaluations as a list.

    Raises:
      ValueError: as in `train_and_evaluate`.
    """
    eval_specs = [eval_spec] if isinstance(eval_spec, EvalSpec) else list(eval_spec)
    names = [spec.key for spec in eval_specs]
    if len(set(names)) < len(names):
        raise ValueError(f"train_and_evaluate: evaluations need different names, got {names}.")
    for rule in (train_spec.early_stopping, train_spec.reduce_lr_on_plateau):
        if rule.evaluation is not None and rule.evaluation not in names:
            evaluations = ", ".join(f"{evaluation_prefix(name)}/..." for name in names) or "none"
            raise ValueError(f"{rule.key}.metric={rule.metric}: there is no such evaluation. There are: {evaluations}.")
    exporters: list[Exporter] = []
    for spec in eval_specs:
        exporters += spec.exporters
    checked_exporters("train_and_evaluate", exporters)
    return eval_specs
