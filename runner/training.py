"""Training with evaluations along the way, in one process or with an evaluator beside those that train."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner import checkpoints, metrics, retention
from runner.early_stopping import EarlyStopping, Watched
from runner.elsewhere import EvaluatedElsewhere
from runner.ending import Ending
from runner.estimator import Estimator
from runner.exporters import Exporter, checked_exporters
from runner.exports import Exports
from runner.following import Follower, TrainingWatch
from runner.hooks import Hook, Interrupted, Run
from runner.loop import TrainingRun
from runner.stored_model import InputFn


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on.

    Attributes:
      input_fn: a function or an `Input`.
      max_steps: train until this global step; None: until the input ends.
      hooks: native and session hooks.
      saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.
      early_stopping: when `train_and_evaluate` ends training before that.
      max_epochs: train until so many passes over the input are made, if `max_steps` is not reached before.

    Raises:
      ValueError: max_steps or max_epochs is not positive.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: Sequence[Any] = ()
    saving_listeners: Sequence[Any] = ()
    early_stopping: EarlyStopping = EarlyStopping()
    max_epochs: int | None = None

    def __post_init__(self) -> None:
        _check("TrainSpec", self.input_fn, max_steps=self.max_steps, max_epochs=self.max_epochs)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on.

    Attributes:
      input_fn: a function or an `Input`.
      steps: batches; None: all examples. (tf.estimator's default was 100 batches.)
      name: where there are several evaluations; its events go to `eval_<name>`.
      hooks: native hooks.
      start_delay_secs: no evaluation before so many seconds of training, but for that of `at_start`.
      throttle_secs: at least so many seconds between the starts of two evaluations; the last checkpoint is
        evaluated all the same.
      at_start: evaluate once before the first step, the new model or what the run goes on from.
      exporters: are called after each evaluation but that of `at_start`, and at the end of training; one, or several.

    Raises:
      ValueError: steps is not positive, or a number of seconds is negative; exporters are none, or share a name.
    """

    input_fn: InputFn
    steps: int | None = None
    name: str | None = None
    hooks: Sequence[Any] = ()
    start_delay_secs: float = 0
    throttle_secs: float = 0
    at_start: bool = False
    exporters: Sequence[Exporter] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exporters", checked_exporters("EvalSpec", self.exporters))
        _check("EvalSpec", self.input_fn, steps=self.steps)
        for key in ("start_delay_secs", "throttle_secs"):
            if getattr(self, key) < 0:
                raise ValueError(f"EvalSpec({key}={getattr(self, key)}): it may not be negative.")


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a run came to.

    Attributes:
      metrics: name of the evaluation ("" where it has none) -> its metrics at the last checkpoint; of a run that was
        interrupted, the last that there are. Empty where an evaluator process has them.
      global_step: of the last checkpoint.
      examples: trained on by this call; 0 when there was nothing left to train.
      steps_per_sec: of this call's training, evaluations not counted; 0 when no step was taken.
      checkpoint: path of the last checkpoint; None: an evaluator saw none before training failed.
      stopped_early: why training ended before its last step; None: it did not.
      exports: paths of what this process exported.
      interrupted: it, or its last evaluation, was asked to stop; the same call goes on.
    """

    metrics: Mapping[str, Mapping[str, Any]]
    global_step: int
    examples: int
    steps_per_sec: float
    checkpoint: str | None
    stopped_early: str | None = None
    exports: Sequence[str] = ()
    interrupted: bool = False


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]
) -> TrainingResult:
    """Trains and evaluates; what this process does of it, is what `RunConfig.cluster` says that it is.

    A process that trains evaluates each checkpoint as it is saved, the last one always. With
    `RunConfig(has_evaluator=True)` it leaves that to the evaluator, which follows the checkpoints in a process of its
    own, and ends when that finds that training should stop early.

    A run that is finished already (its last step is taken, it was stopped early, or without `max_steps` its input was
    read to the end by an earlier process) is evaluated and reported. One that is interrupted ends with its checkpoint.

    Raises:
      ValueError: two evaluations or exporters have the same name, or early stopping watches what is not evaluated.
    """
    if estimator.config.cluster.is_evaluator:
        return follow(estimator, train_spec, eval_spec)
    eval_specs = _checked(train_spec, eval_spec)
    if estimator.config.has_evaluator:
        elsewhere = EvaluatedElsewhere(estimator, train_spec.early_stopping)
        with elsewhere.told():
            return _train(estimator, train_spec, elsewhere)
    retention.release(estimator.model_dir)  # of an evaluator that an earlier start had
    return _train(estimator, train_spec, _Evaluations(estimator, eval_specs, train_spec.early_stopping))


def follow(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec | Sequence[EvalSpec],
    wait: Callable[[float], None] = time.sleep,
) -> TrainingResult:
    """The evaluator's part of `train_and_evaluate`: evaluates what others save in model_dir, until training has ended.

    The last checkpoint is evaluated in any case, unless training failed or was interrupted.

    Args:
      wait: called with seconds between two looks; what it raises passes, but `Interrupted` after an evaluation.

    Raises:
      ValueError: as `train_and_evaluate`; there is one evaluator, and this is another.
    """
    config = estimator.config
    if config.cluster.task_index:
        raise ValueError(f"evaluator {config.cluster.task_index}: there is one evaluator in a run, of index 0.")
    eval_specs = _checked(train_spec, eval_spec)
    watch = TrainingWatch(estimator.model_dir, config.generation)
    evaluations = _Evaluations(estimator, eval_specs, train_spec.early_stopping, [watch])
    ending = Ending()
    try:
        ending = Follower(estimator.model_dir, watch, evaluations, estimator.latest_checkpoint, wait).follow()
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
        exports=evaluations.exports.paths,
    )


def _train(
    estimator: Estimator, train_spec: TrainSpec, evaluations: _Evaluations | EvaluatedElsewhere
) -> TrainingResult:
    """Trains, in a process that does."""
    run = None
    if not evaluations.have_ended(train_spec.max_steps):
        run = estimator.train_run(
            train_spec.input_fn,
            hooks=[*train_spec.hooks, evaluations],
            max_steps=train_spec.max_steps,
            saving_listeners=train_spec.saving_listeners,
            after_save=[evaluations.after_save],
            once=True,
            max_epochs=train_spec.max_epochs,
        )
    checkpoint = estimator.agreed_checkpoint()
    assert checkpoint is not None
    step = checkpoints.checkpoint_step(checkpoint)
    interrupted = run is not None and run.interrupted
    interrupted = interrupted or not evaluations.evaluate_last(step)
    return TrainingResult(
        metrics=evaluations.metrics,
        global_step=step,
        examples=0 if run is None else run.examples,
        steps_per_sec=0.0 if run is None else run.steps_per_sec,
        checkpoint=checkpoint,
        stopped_early=estimator.agreement.text_of_chief(evaluations.stopped_early or "") or None,
        exports=evaluations.exports.paths,
        interrupted=interrupted,
    )


class _Evaluations(Hook):
    """The evaluations of a run: before its first step, after its checkpoints, at its end; and what follows from them.

    In a process that trains, its methods as a hook and `after_save` are called; in an evaluator, `of_checkpoint`.

    Args:
      hooks: of every evaluation, beside its own.

    Attributes:
      metrics: name of the evaluation -> its last metrics.
      stopped_early: why training ended; None: it did not.
      last_step, last_path: of the checkpoint that was evaluated last, by a process that names them; 0 and None: none.
      exports: what was exported.
    """

    def __init__(
        self, estimator: Estimator, specs: Sequence[EvalSpec], early_stopping: EarlyStopping, hooks: Sequence[Hook] = ()
    ) -> None:
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self.stopped_early: str | None = None
        self.last_step = 0
        self.last_path: str | None = None
        self._estimator, self._specs, self._hooks = estimator, specs, hooks
        self._agreement = estimator.agreement
        self._has_begun = False
        self._started = time.monotonic()
        self._last_start: dict[str, float] = {}
        self._last_step: dict[str, int] = {}
        self._watched = Watched(early_stopping, estimator.model_dir)
        self.exports = Exports(estimator)

    def have_ended(self, max_steps: int | None) -> bool:
        """Whether the run was stopped early at its latest checkpoint. To be asked before it goes on from there.

        One that was killed before it had evaluated that checkpoint does so now.
        """
        latest = self._estimator.agreed_checkpoint()
        step = -1 if latest is None else checkpoints.checkpoint_step(latest)
        if self._agreement.is_chief:
            self._watched.goes_on_from(step)
        if latest is None or self._watched.rule.metric is None or (max_steps is not None and step >= max_steps):
            return False
        is_missing = not self._watched.has(step) and bool(checkpoints.Reader(latest).extra().get("evaluate"))
        if self._agreement.of_chief([is_missing])[0]:
            for spec in self._specs:
                if (spec.name or "") == self._watched.rule.evaluation:
                    self._evaluate(spec, step)
        self._stop_early(step)
        self.stopped_early = self._agreement.text_of_chief(self.stopped_early or "") or None
        return self.stopped_early is not None

    def before_step(self, run: Run, step: int) -> None:
        """Before the first loop: a checkpoint of `step` has been written, or the run goes on from it."""
        if not self._has_begun:
            self._has_begun = True
            self._evaluate_during(run, [spec for spec in self._specs if spec.at_start], exports=False)

    def after_save(self, run: TrainingRun) -> None:
        """Evaluates the checkpoint that was just written, where an evaluation is due."""
        due = self._agreement.of_chief([self._due(spec) for spec in self._specs])
        self._evaluate_during(
            run, [spec for spec, is_due in zip(self._specs, due, strict=True) if is_due], exports=True
        )

    def evaluate_last(self, step: int) -> bool:
        """Evaluates the checkpoint of `step`, the last one, where that has not been done, and exports it.

        Returns: whether it came to its end.
        """
        with contextlib.suppress(Interrupted):
            for spec in self._specs:
                if self._last_step.get(spec.name or "") != step:
                    self._evaluate(spec, step)
                self._export(spec, None, is_final=True)
            return True
        return False

    def is_due(self) -> bool:
        """Whether a new checkpoint would be evaluated now."""
        return any(self._is_first(spec) or self._due(spec) for spec in self._specs)

    def of_checkpoint(self, path: str, *, is_last: bool) -> Sequence[Callable[[], None]]:
        """What is due and not done of the checkpoint `path`, each to be called; of the last one, what is not done, and
        the last exports.

        A checkpoint that no run would stop at by itself (the one before the first step, or where it was interrupted)
        only counts where it is the last, or the first with `at_start`.
        """
        step = checkpoints.checkpoint_step(path)
        self._watched.forget_after(step)
        open_specs = [spec for spec in self._specs if self._last_step.get(spec.name or "") != step]
        due = [spec for spec in open_specs if is_last or self._is_first(spec)]
        others = [spec for spec in open_specs if spec not in due and self._due(spec)]
        if others and not checkpoints.Reader(path).extra().get("evaluate"):
            others = []
        due += others
        evaluations = [functools.partial(self._evaluate, spec, step, path) for spec in due]
        exported = self._specs if is_last else others
        return evaluations + [functools.partial(self._export, spec, path, is_final=is_last) for spec in exported]

    def reason_to_stop(self) -> str | None:
        """Why training ends, by the evaluations of this process; None: it goes on."""
        return self._watched.decided(self.last_step)

    def _is_first(self, spec: EvalSpec) -> bool:
        return spec.at_start and (spec.name or "") not in self._last_step

    def _evaluate_during(self, run: Run, specs: Sequence[EvalSpec], *, exports: bool) -> None:
        assert isinstance(run, TrainingRun)
        if specs:
            run.wait_for_checkpoint()
        try:
            for spec in specs:
                self._evaluate(spec, run.global_step)
                if (spec.name or "") == self._watched.rule.evaluation:
                    self._stop_early(run.global_step, run)
        except Interrupted as stopped:
            run.interrupt(str(stopped))
        for spec in specs if exports and run.goes_on else ():  # else this checkpoint is the last one: `evaluate_last`
            self._export(spec, None, is_final=False)

    def _export(self, spec: EvalSpec, path: str | None, *, is_final: bool) -> None:
        """Args: path: of the checkpoint, which has been evaluated; None: it is the latest."""
        self.exports.call(spec.exporters, path, self.metrics.get(spec.name or "", {}), is_final=is_final)

    def _due(self, spec: EvalSpec) -> bool:
        now = time.monotonic()
        since = now - self._last_start.get(spec.name or "", -float("inf"))
        return now - self._started >= spec.start_delay_secs and since >= spec.throttle_secs

    def _evaluate(self, spec: EvalSpec, step: int, path: str | None = None) -> None:
        """Args: path: of the checkpoint of `step`; None: it is the latest."""
        name = spec.name or ""
        self._last_start[name] = time.monotonic()
        try:
            self.metrics[name] = self._estimator.evaluate(
                spec.input_fn, steps=spec.steps, hooks=[*spec.hooks, *self._hooks], checkpoint_path=path, name=spec.name
            )
        except Exception as error:
            error.add_note(f"evaluating {name!r} at step {step} from {path or self._estimator.latest_checkpoint()}")
            raise
        self._last_step[name] = self.last_step = step
        self.last_path = path
        if name == self._watched.rule.evaluation and self._agreement.is_chief:
            prefix = f"eval_{name}" if name else "eval"
            scalars = metrics.scalars(self.metrics[name])
            self._watched.note(step, {f"{prefix}/{key}": v for key, v in scalars.items() if key != "global_step"})

    def _stop_early(self, step: int, run: Run | None = None) -> None:
        if not self._agreement.is_chief:  # it is told at the end of the loop
            return
        reason = self._watched.reason(step)
        if reason is None or self.stopped_early is not None:
            return
        self.stopped_early = reason
        self._estimator.announce("stopped_early", f"stopped early: {reason}", step=step)
        if run is not None:
            run.request_stop(f"stopped early: {reason}")


def _checked(train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]) -> list[EvalSpec]:
    """The evaluations. Raises: ValueError: as `train_and_evaluate`."""
    eval_specs = [eval_spec] if isinstance(eval_spec, EvalSpec) else list(eval_spec)
    names = [spec.name or "" for spec in eval_specs]
    if len(set(names)) < len(names):
        raise ValueError(f"train_and_evaluate: evaluations must differ in name, and there are {names}.")
    _check_watched(train_spec.early_stopping, names)
    checked_exporters("train_and_evaluate", [one for spec in eval_specs for one in spec.exporters])
    return eval_specs


def _check_watched(rule: EarlyStopping, names: Sequence[str]) -> None:
    if rule.evaluation is not None and rule.evaluation not in names:
        there = ", ".join(f"eval_{name}/..." if name else "eval/..." for name in names) or "none"
        raise ValueError(f"train.early_stopping.metric={rule.metric}: there is no such evaluation. There are: {there}.")


def _check(what: str, input_fn: Any, **steps: int | None) -> None:
    for name, value in steps.items():
        if value is not None and value <= 0:
            raise ValueError(f"{what}({name}={value}): it must be positive; None sets no limit.")
    if not callable(getattr(input_fn, "fn", input_fn)):
        raise ValueError(f"{what}(input_fn={input_fn!r}): it must be callable, or an Input.")
