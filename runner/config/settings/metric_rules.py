"""The rules that follow the metric of an evaluation: when training ends early, when the learning rate is reduced, and
which checkpoints are kept.

The keys below `train.early_stopping`, `train.reduce_lr_on_plateau` and `checkpoint.keep_best` are their fields.
`runner.estimator` and `runner.checkpoint.retention` act by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from runner.config.metric_names import evaluation_of, mode_of
from runner.config.mistakes import ConfigError
from runner.config.settings.limits import check_fields, check_limits, count, is_off, limits_of, ranking, setting


def _patience(default: int) -> Any:
    return count(default, minimum=1)


def _min_delta(default: float) -> Any:
    return setting(default, minimum=0)


@dataclass(frozen=True)
class MetricRule:
    """A rule that acts when an evaluation's metric no longer improves: it ends training, or reduces the learning rate.

    Attributes:
      metric: the metric's name in the journal: `eval/loss`, `eval_<name>/accuracy`; None: the rule never acts.
      mode: "min" or "max", whether smaller or larger is better; None: decided by the metric's name.
      patience_evals: number of successive evaluations without improvement after which the rule acts.
      min_delta: an improvement counts if it is larger than this, in the unit of the metric.
      key: the rule's key in the config.
      file: name of the file in model_dir that holds the metric's values.
      has_rates: the rule sets learning rates.

    Raises:
      ValueError: a value is not allowed.
    """

    metric: str | None = None
    mode: str | None = ranking()
    patience_evals: int = _patience(1)
    min_delta: float = _min_delta(0.0)

    key: ClassVar[str]
    file: ClassVar[str]
    has_rates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.metric is not None and "/" not in self.metric:
            kind = type(self).__name__
            raise ValueError(
                f"{kind}(metric={self.metric!r}): prefix the metric with its evaluation: eval/{self.metric}."
            )
        for field in fields(self):
            self._check(field)

    def _check(self, field: Field[Any]) -> None:
        """Check a field against its limits, in the words of a script.

        Raises:
          ValueError: its value is not allowed.
        """
        value = getattr(self, field.name)
        limits = limits_of(field)
        if is_off(field, value):
            return
        written = f"{type(self).__name__}({field.name}={value!r}): {field.name}"
        try:
            check_limits(limits, value, lambda _: written)
        except ConfigError as error:
            text = str(error)
            if limits.choices:
                text = f"{written} must be {', '.join(map(repr, limits.choices))} or None."
            if limits.below is not None:
                text = f"{written} must be between {limits.above} and {limits.below}."
            raise ValueError(text) from None

    @property
    def evaluation(self) -> str | None:
        """The name of the evaluation to which the metric belongs; "" if it has no name; None if there is no metric."""
        return None if self.metric is None else evaluation_of(self.metric)

    @property
    def sign(self) -> int:
        """1 if smaller is better, -1 if larger is."""
        return -1 if mode_of(self.metric or "", self.mode) == "max" else 1

    def reason(self, values: Mapping[int, float], step: int) -> str | None:
        """Return why the rule acts at `step`; None: it does not.

        Args:
          values: step -> the metric, for the evaluations up to `step`.
          step: the global step of the last evaluation.
        """
        raise NotImplementedError

    def has_not_improved(self, evaluations: int, best: float, best_step: int | None) -> str:
        """Return a reason as text; `best_step` None: the metric was never a number."""
        best_so_far = "it was never a number" if best_step is None else f"best {best:.6g} at step {best_step}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        plural = "" if evaluations == 1 else "s"
        return f"{self.metric} has not improved{by} for {evaluations} evaluation{plural}; {best_so_far}"


@dataclass(frozen=True)
class EarlyStopping(MetricRule):
    """The rule by which training ends before its last step.

    Attributes:
      min_steps: training does not end before this global step.
    """

    min_steps: int = setting(0, minimum=0)

    key = "train.early_stopping"
    file = "early_stopping.json"

    def reason(self, values: Mapping[int, float], step: int) -> str | None:
        best = math.nan
        best_step = None
        num_waited = 0
        for eval_step in sorted(eval_step for eval_step in values if eval_step <= step):
            num_waited += 1
            is_first = best_step is None and not math.isnan(values[eval_step])
            # A comparison with NaN is false: a NaN is never the best value, and never an improvement.
            if is_first or self.sign * (best - values[eval_step]) > self.min_delta:
                best = values[eval_step]
                best_step = eval_step
                num_waited = 0
        if num_waited < self.patience_evals or step < self.min_steps:
            return None
        return self.has_not_improved(num_waited, best, best_step)


@dataclass(frozen=True)
class ReduceLROnPlateau(MetricRule):
    """The rule by which the learning rate is reduced.

    Attributes:
      factor: multiplies the rate at a reduction; between 0 and 1.
      cooldown_evals: number of evaluations after a reduction that do not count towards patience_evals.
      min_lr: lower limit of the rate.
    """

    patience_evals: int = _patience(10)
    min_delta: float = _min_delta(1e-4)
    factor: float = setting(0.1, above=0, below=1)
    cooldown_evals: int = count(0, minimum=0)
    min_lr: float = setting(0.0, minimum=0)

    key = "train.reduce_lr_on_plateau"
    file = "reduce_lr_on_plateau.json"
    has_rates = True

    def reason(self, values: Mapping[int, float], step: int) -> str | None:
        # The algorithm is that of keras.callbacks.ReduceLROnPlateau.on_epoch_end, except that a NaN is never the best
        # value, and that `min_lr` is ignored: the caller leaves a rate at that limit unchanged.
        best = math.inf
        best_step = None
        num_waited = 0
        cooldown_left = 0
        is_reduced = False
        for eval_step in sorted(eval_step for eval_step in values if eval_step <= step):
            value = self.sign * values[eval_step]
            is_reduced = False
            if cooldown_left:
                cooldown_left -= 1
                num_waited = 0
            is_first = best_step is None and not math.isnan(value)
            if is_first or value < best - self.min_delta:
                best = value
                best_step = eval_step
                num_waited = 0
            elif not cooldown_left:
                num_waited += 1
                if num_waited >= self.patience_evals:
                    is_reduced = True
                    cooldown_left = self.cooldown_evals
                    num_waited = 0
        if not is_reduced:
            return None
        return self.has_not_improved(self.patience_evals, self.sign * best, best_step)


@dataclass(frozen=True)
class KeepBest:
    """The rule by which the best checkpoints are kept, however old they are.

    Attributes:
      metric: a metric of an evaluation, as in the journal: eval/accuracy, eval_<name>/loss; None: none are kept for
        their metric.
      mode: "min" or "max", whether the smallest or the largest value is best; None: decided by the metric's name.
      max: how many to keep.

    Raises:
      ValueError: `metric` does not name its evaluation, or `mode` or `max` is not allowed.
    """

    metric: str | None
    mode: str | None = ranking()
    max: int = count(1, minimum=1)

    key: ClassVar[str] = "checkpoint.keep_best"

    def __post_init__(self) -> None:
        if self.metric is not None and "/" not in self.metric:
            raise ValueError(f"KeepBest({self.metric!r}): prefix the metric with its evaluation: eval/{self.metric}.")
        check_fields(self)
