"""Callbacks of Keras in training: those that read are called as `fit` calls them, on the chief.

A callback gets a stand-in for its model. What would change training is refused there by name, because no checkpoint has
it and other workers would not do it. Neither keras nor tf_keras is imported: who has a callback has imported its Keras.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from runner.config.mistakes import NotAllowed
from runner.config.settings.keras_callbacks import INSTEAD, ROOTS
from runner.data.train_input import TrainInput
from runner.hooks.hook import Every, Hook, Run
from runner.model_fn import user_code
from runner.tracking import tensorboard
from runner.types import StepResult

_log = logging.getLogger(__name__)

EPOCH = "epoch_of_callbacks"
"""Key in a checkpoint's own state: the losses of the epoch so far."""

_OF_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_OF_EPOCHS = ("on_epoch_begin", "on_epoch_end")
_NOT_CALLED = ("on_test_batch_begin", "on_test_batch_end")

_STOP = "To end training, set train.early_stopping, or write a runner.Hook that calls run.request_stop(reason)."
_RATE = (
    "For the learning rate, give the optimizer a schedule (keras.optimizers.schedules), or set "
    "train.reduce_lr_on_plateau."
)
_WEIGHTS = "What changes weights belongs in model_fn: a layer, a constraint, an optimizer."

# Methods of a keras.Model that change it, and what to write instead.
_CHANGES = {
    "set_weights": _WEIGHTS,
    "load_weights": f"{_WEIGHTS} To begin with others, set train.warm_start.",
    "compile": "model_fn compiles the model.",
    "fit": "The run trains.",
    "train_on_batch": "The run trains.",
    "reset_metrics": "The run resets its metrics.",
}


# --- which callbacks ----------------------------------------------------------------------------------------------


def _base_of(hook: Any) -> Any:
    """Return the class `keras.callbacks.Callback`, of Keras 3 or tf_keras, that `hook` derives from; None: of none."""
    for kind in type(hook).__mro__:
        is_of_keras = kind.__module__.partition(".")[0] in ROOTS
        if is_of_keras and kind.__name__ == "Callback":
            return kind
    return None


def is_callback(hook: Any) -> bool:
    """Report whether `hook` is a `keras.callbacks.Callback`, of Keras 3 or tf_keras."""
    return _base_of(hook) is not None


def _name_of(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _overrides(callback: Any, method: str) -> bool:
    """Report whether the callback's class, or the object itself (as of a LambdaCallback), defines `method`."""
    own = getattr(callback, method)
    return getattr(own, "__func__", own) is not getattr(_base_of(callback), method)


def check_callback(callback: Any) -> None:
    """Check that all that a callback does in `fit` it does here.

    Raises:
      NotAllowed: its class is one of Keras that changes training, or it has a method that would not be called.
    """
    for kind in type(callback).__mro__:
        is_of_keras = kind.__module__.partition(".")[0] in ROOTS
        if is_of_keras and kind.__name__ in INSTEAD:
            is_of_the_user = kind is not type(callback)  # a class of the user that derives from that of Keras
            of_keras = f"the callback {kind.__name__} of Keras"
            what = f"{_name_of(callback)}, which is {of_keras}" if is_of_the_user else of_keras
            raise NotAllowed(f"The runner does not call {what}. Instead, {INSTEAD[kind.__name__]}.")
    for method in _NOT_CALLED:
        if _overrides(callback, method):
            raise NotAllowed(
                f"{_name_of(callback)} has {method}, which is not called: a call of TensorFlow evaluates many batches. "
                "Instead, write a runner.Hook with after_batches, and give it to the evaluation."
            )


def check_no_callbacks(hooks: Sequence[Any]) -> None:
    """Check that no hook of an evaluation or a prediction is a callback.

    Raises:
      NotAllowed: one is.
    """
    for hook in hooks:
        if is_callback(hook):
            raise NotAllowed(
                f"The callback {_name_of(hook)} is a hook of an evaluation or a prediction, where callbacks of Keras "
                "are not called. Name it among the hooks of training, whose evaluations call on_test_begin and "
                "on_test_end; or write a runner.Hook with begin, after_batches and end."
            )


# --- what a callback sees -----------------------------------------------------------------------------------------


class Calls:
    """The calls of callbacks. A refusal ends the run, even if the callback catches it."""

    def __init__(self) -> None:
        self._caller = "A callback"
        self._refusal: Exception | None = None

    def call(self, callback: Any, method: str, *arguments: Any) -> None:
        """Call a method of a callback.

        Raises:
          ValueError: it tried to change the model.
        """
        self._caller = f"{_name_of(callback)}.{method}"
        with user_code(type(callback)):
            getattr(callback, method)(*arguments)
            if self._refusal is not None:
                raise self._refusal

    def refuse(self, what: str, instead: str) -> NoReturn:
        """Raise ValueError: the callback that is called now does `what`, which would change training."""
        refusal = ValueError(f"{self._caller} {what}: callbacks of Keras can only read here. {instead}")
        if self._refusal is None:
            self._refusal = refusal
        raise refusal


class ReadOnlyValue(np.ndarray):
    """A copy of a variable's value, an array that also has what a callback reads of a variable."""

    name: str
    path: str
    _calls: Calls

    @classmethod
    def of(cls, value: Any, name: str, calls: Calls) -> ReadOnlyValue:
        copied = np.array(value).view(cls)
        copied.flags.writeable = False
        copied.name = name.rpartition("/")[2]
        copied.path = name
        copied._calls = calls
        return copied

    def numpy(self) -> np.ndarray:
        return np.array(self)

    def assign(self, *arguments: Any, **settings: Any) -> NoReturn:
        instead = _RATE if self.name == "learning_rate" else _WEIGHTS
        self._calls.refuse(f"assigns a value to {self.path}", instead)

    assign_add = assign_sub = assign


class ReadableModel(Protocol):
    """What of the model in training callbacks can read."""

    @property
    def weights(self) -> Mapping[str, bool] | None:
        """Name -> whether it is trained, in the order in which model_fn made them; None: the runner cannot tell them
        from the optimizer's own variables.
        """

    def value(self, name: str) -> np.ndarray: ...

    @property
    def learning_rate(self) -> float:
        """The learning rate. Raises: ValueError: it is not known."""

    @property
    def global_step(self) -> int: ...


class OptimizerStandIn:
    """What a callback gets as `self.model.optimizer`."""

    def __init__(self, model: ReadableModel, calls: Calls) -> None:
        self.__dict__.update(_model=model, _calls=calls)

    @property
    def learning_rate(self) -> ReadOnlyValue:
        try:
            rate = np.float32(self._model.learning_rate)
        except ValueError as error:
            # An AttributeError would lead Python to `__getattr__`, which says something else.
            raise ValueError(f"self.model.optimizer.learning_rate is not known: {error}") from None
        return ReadOnlyValue.of(rate, "learning_rate", self._calls)

    @property
    def lr(self) -> ReadOnlyValue:
        return self.learning_rate

    @property
    def iterations(self) -> ReadOnlyValue:
        return ReadOnlyValue.of(self._model.global_step, "iterations", self._calls)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"self.model.optimizer.{name}: callbacks of Keras can read learning_rate and iterations.")

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.refuse(f"sets self.model.optimizer.{name}", _RATE)


class ModelStandIn:
    """What a callback gets as `self.model`: values of training, to read."""

    stop_training = False

    def __init__(self, model: ReadableModel, calls: Calls) -> None:
        self.__dict__.update(_model=model, _calls=calls, optimizer=OptimizerStandIn(model, calls))

    @property
    def weights(self) -> list[ReadOnlyValue]:
        return [self._weight(name) for name in self._names()]

    @property
    def trainable_weights(self) -> list[ReadOnlyValue]:
        return [self._weight(name) for name, is_trained in self._names().items() if is_trained]

    @property
    def trainable_variables(self) -> list[ReadOnlyValue]:
        return self.trainable_weights

    def get_weights(self) -> list[np.ndarray]:
        return [weight.numpy() for weight in self.weights]

    def count_params(self) -> int:
        return sum(weight.size for weight in self.weights)

    def _names(self) -> Mapping[str, bool]:
        names: Mapping[str, bool] | None = self._model.weights
        if names is None:
            raise ValueError(
                "self.model: with train_op= the runner cannot tell the weights from the variables of the optimizer. "
                "Return EstimatorSpec(optimizer=...)."
            )
        return names

    def _weight(self, name: str) -> ReadOnlyValue:
        return ReadOnlyValue.of(self._model.value(name), name, self._calls)

    def __getattr__(self, name: str) -> NoReturn:
        if name in _CHANGES:
            self._calls.refuse(f"calls self.model.{name}", _CHANGES[name])
        raise AttributeError(
            f"self.model.{name}: callbacks of Keras can read optimizer.learning_rate, optimizer.iterations, weights, "
            "trainable_weights, get_weights() and count_params() here. For predictions and metrics during training, "
            "use evaluations: input.eval."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        is_history = name == "history" and is_callback(value)  # which the callback History sets
        if is_history:
            self.__dict__[name] = value
            return
        is_stop = name == "stop_training"
        if is_stop and not value:
            return
        instead = _STOP if is_stop else "Keep values in the callback itself."
        self._calls.refuse(f"sets self.model.{name}", instead)


# --- epochs -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Epochs:
    """The passes over the training input, counted in steps of training from its beginning.

    Attributes:
      steps: steps of a pass; not an integer if two passes share a step, which then belongs to the first of them. None:
        not known, and the whole run is one epoch.
      total: number of passes.
      before: number of passes over the input in another form (`InputPosition.passes`).
    """

    steps: Fraction | None
    total: int
    before: int

    @classmethod
    def of_input(cls, train_input: TrainInput) -> Epochs:
        pipeline = train_input.pipeline
        steps = pipeline.remaining_steps()
        if steps is None or math.isinf(steps) or steps == 0:
            return cls(None, 1, 0)
        total = pipeline.num_epochs or 1
        # In elements, of which a step takes one for each replica: the steps of all passes are rounded up.
        steps_of_pass = Fraction(train_input.position.size, total * pipeline.division.elements_per_step)
        return cls(steps_of_pass, total, int(train_input.position.passes))

    def number(self, steps_read: int) -> int:
        """Return the number of the epoch, from 0, of the step that follows `steps_read` steps."""
        if self.steps is None:
            return 0
        return int(steps_read / self.steps)

    def begin(self, number: int) -> int:
        """Return the number of steps before the epoch `number`."""
        if self.steps is None:
            return 0
        return math.ceil(number * self.steps)

    def steps_to_end(self, steps_read: int) -> float:
        """Return the number of steps to the end of the epoch of the next step; infinite if not known."""
        if self.steps is None:
            return math.inf
        return self.begin(self.number(steps_read) + 1) - steps_read


@dataclasses.dataclass(frozen=True)
class EpochEnds(Every):
    """Ends loops at the end of each epoch, and one step before: the last batch may be smaller, and has its own weight.

    Attributes:
      steps_to_end: returns the number of steps to the end of the epoch.
    """

    steps_to_end: Callable[[], float] = lambda: math.inf

    def steps_until_due(self, step: int) -> float:
        return max(1, self.steps_to_end() - 1)


@dataclasses.dataclass
class EpochLoss:
    """The losses of an epoch so far, whose mean is that of `fit`: each batch weighs as much as it has examples."""

    epoch: int
    total: float = 0.0
    examples: int = 0

    def add(self, result: StepResult) -> None:
        of_each_step = result.examples / result.num_steps
        self.total += float(np.sum(result.losses, dtype=np.float64)) * of_each_step
        self.examples += result.examples

    def logs(self) -> dict[str, float]:
        if not self.examples:
            return {}
        return {"loss": self.total / self.examples}


class CalledRun(Run, Protocol):
    """A training run as `KerasCallbacks` sees it."""

    @property
    def recorded(self) -> tuple[int, Mapping[str, float]]:
        """The metrics of training that were recorded last: (global step, `train/<name>` -> value)."""


# --- the hook -----------------------------------------------------------------------------------------------------


class KerasCallbacks(Hook):
    """Calls callbacks of Keras in training, in the order of `fit`, on the chief.

        on_train_begin
        for each pass over the input:
          on_epoch_begin
          for each batch: on_train_batch_begin, on_train_batch_end     only if one defines them: loops of one step
          on_test_begin, on_test_end                                   for each evaluation, wherever it is in the epoch
          on_epoch_end
        on_train_end

    `on_epoch_end` waits until the step is saved and evaluated: it is called before the next step, or at the end.

    Args:
      callbacks: the callbacks.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._calls = Calls()
        self._batch_methods = _methods(callbacks, _OF_BATCHES)
        self._is_in_epoch = False
        self._is_epoch_over = False
        self._epoch_began_at = 0
        self._evaluation_logs: dict[str, float] = {}
        self._last_logs: dict[str, float] = {}

    def bind(
        self, model: ReadableModel, train_input: TrainInput, resumed: Mapping[str, Any], *, is_chief: bool
    ) -> None:
        """Take what a run trains. Called before `begin`.

        Args:
          model: the model.
          train_input: its input, at its position.
          resumed: what the checkpoint stores beside the variables; empty in a new run.
          is_chief: False: nothing is called.
        """
        self._model = model
        self._input = train_input
        self._is_chief = is_chief
        self._epochs = Epochs.of_input(train_input)
        number = self._epochs.number(_steps_read_of(train_input))
        saved = resumed.get(EPOCH, {"epoch": -1})
        # The checkpoint may have the loss of an epoch that ended with it.
        self._loss = EpochLoss(**saved) if saved["epoch"] == number else EpochLoss(number)
        self._saved_loss = dataclasses.replace(self._loss)  # as the newest checkpoint has it

    @property
    def every(self) -> Every:  # type: ignore[override]
        if self._batch_methods:
            return Every(steps=1)
        return EpochEnds(steps_to_end=lambda: self._epochs.steps_to_end(self._steps_read))

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the epoch, so that a resumed run goes on with its mean. Called for each
        checkpoint: the loss is kept, to go on from there after a rollback.
        """
        self._saved_loss = dataclasses.replace(self._loss)
        return {EPOCH: dataclasses.asdict(self._loss)}

    def begin(self, run: Run) -> None:
        if not self._is_chief:
            return
        self._run = cast(CalledRun, run)
        self._warn_of_costs()
        epochs = self._epochs
        steps = None if epochs.steps is None else math.ceil(epochs.steps)
        params = {"verbose": 0, "epochs": epochs.total, "steps": steps}
        for callback in self._callbacks:
            self._calls.call(callback, "set_params", params)
            self._calls.call(callback, "set_model", ModelStandIn(self._model, self._calls))
        self._call("on_train_begin")

    def before_step(self, run: Run, step: int) -> None:
        if not self._is_chief:
            return
        if self._is_epoch_over:
            self._end_epoch()
        if not self._is_in_epoch:
            self._begin_epoch(step)
        if self._batch_methods:
            self._call("on_train_batch_begin", self._batch)

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self._is_chief:
            return
        self._loss.add(result)
        if self._batch_methods:
            self._call("on_train_batch_end", self._batch - 1, self._logs())
        is_rolled_back = run.global_step < result.last_step
        if is_rolled_back:
            self._loss = dataclasses.replace(self._saved_loss)  # training goes on from the newest checkpoint
        number = self._epochs.number(self._steps_read)
        self._is_epoch_over = number > self._number

    def end(self, run: Run) -> None:
        if not self._is_chief:
            return
        # Without a known pass, the whole run is the epoch, and ends here, unless it was asked to stop: then the next
        # process goes on with it.
        is_run_over = self._epochs.steps is None and not run.interrupted
        if self._is_epoch_over or (self._is_in_epoch and is_run_over):
            self._end_epoch()
        self._call("on_train_end", self._last_logs)

    def before_evaluation(self) -> None:
        """Called before an evaluation of the run."""
        if self._is_chief:
            self._call("on_test_begin")

    def evaluated(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation of the run.

        Args:
          step: the global step.
          name: the evaluation's name; "" if it has none.
          metrics: its metrics.
        """
        if not self._is_chief:
            return
        logs = tensorboard.scalars(metrics)
        logs.pop("global_step", None)
        self._call("on_test_end", logs)
        # An evaluation before the first step of the epoch does not count for it.
        is_of_epoch = self._is_in_epoch and step > self._epoch_began_at
        if not is_of_epoch:
            return
        prefix = f"val_{name}_" if name else "val_"
        for metric, value in logs.items():
            self._evaluation_logs[f"{prefix}{metric}"] = value

    # --- parts ----------------------------------------------------------------------------------------------------

    @property
    def _steps_read(self) -> int:
        return _steps_read_of(self._input)

    @property
    def _batch(self) -> int:
        """The number of the next batch in its epoch, from 0."""
        return self._steps_read - self._epochs.begin(self._number)

    def _begin_epoch(self, step: int) -> None:
        self._number = self._epochs.number(self._steps_read)
        self._is_in_epoch = True
        self._epoch_began_at = step
        if self._loss.epoch != self._number:
            self._loss = EpochLoss(self._number)
        self._call("on_epoch_begin", self._epochs.before + self._number)

    def _end_epoch(self) -> None:
        self._last_logs = {**self._logs(), **self._evaluation_logs}
        self._is_in_epoch = False
        self._is_epoch_over = False
        self._evaluation_logs = {}
        self._call("on_epoch_end", self._epochs.before + self._number, self._last_logs)

    def _logs(self) -> dict[str, float]:
        """Return the mean loss of the epoch so far, and the metrics of training that are recorded at this step."""
        logs = self._loss.logs()
        step, values = self._run.recorded
        if step == self._run.global_step:  # those of an earlier step are not the epoch's
            for name, value in values.items():
                logs.setdefault(name.removeprefix("train/"), value)
        return logs

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            # A callback may add to its logs.
            self._calls.call(callback, method, *copy.deepcopy(arguments))

    def _warn_of_costs(self) -> None:
        """Log a warning if a callback is called for each batch, which costs time, or if the whole run is one epoch."""
        if self._batch_methods:
            _log.warning(
                "%s is called for each batch, so loops of training have one step, which makes short steps slower.",
                self._batch_methods[0],
            )
        of_epochs = _methods(self._callbacks, _OF_EPOCHS)
        if self._epochs.steps is None and of_epochs:
            _log.warning(
                "%s is called once: the number of batches of a pass over %s is not known, so the whole run is one "
                "epoch. With train.max_epochs and a dataset of a known size (no .repeat(); "
                "tf.data.experimental.assert_cardinality), each pass is one.",
                of_epochs[0],
                self._input.pipeline.name,
            )


def _steps_read_of(train_input: TrainInput) -> int:
    """Return the number of steps since the beginning of the input; its last step may have read fewer elements."""
    each = train_input.pipeline.division.elements_per_step
    return -(-train_input.position.elements // each)  # rounded up


def _methods(callbacks: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return those of the methods `names` that the callbacks define, as Class.method."""
    methods = []
    for callback in callbacks:
        for name in names:
            if _overrides(callback, name):
                methods.append(f"{type(callback).__name__}.{name}")
    return methods
