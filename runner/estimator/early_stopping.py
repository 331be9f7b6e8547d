"""Early stopping: training ends when an evaluation's metric no longer improves.

What the metric was at each step is kept in model_dir, so that a run that was killed decides as an undisturbed one: by
the evaluations up to its checkpoint, those after it being done again. Where an evaluator process evaluates, it alone
writes them, and the chief reads them (`MetricHistory.decided`). `reduce_lr_on_plateau` keeps its metric so, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from runner.config.metric_names import evaluation_of, mode_of, unknown_metric
from runner.system.files import read_json, write_json

FILE = "early_stopping.json"


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The rule by which training ends before its last step.

    Attributes:
      metric: its name in the journal: `eval/loss`, `eval_<name>/accuracy`; None: training never ends early.
      mode: "min" or "max", the better value; None: by the metric's name.
      patience_evals: evaluations in a row without improvement after which training ends.
      min_delta: least improvement that counts, in the metric's own unit.
      min_steps: training does not end before this global step.

    Raises:
      ValueError: a value is not allowed.
    """

    metric: str | None = None
    mode: str | None = None
    patience_evals: int = 1
    min_delta: float = 0.0
    min_steps: int = 0

    key: ClassVar[str] = "train.early_stopping"
    file: ClassVar[str] = FILE

    def __post_init__(self) -> None:
        check_rule(self, patience_evals=1, min_delta=0, min_steps=0)

    @property
    def evaluation(self) -> str | None:
        """Name of the evaluation that the metric belongs to; "" is the one without a name; None: there is no metric."""
        return None if self.metric is None else evaluation_of(self.metric)

    def reason(self, values: Mapping[int, float], step: int) -> str | None:
        """Return why training ends at `step`, by the `values` of the metric at the steps up to it; None: it goes on."""
        best, best_step, without = math.nan, None, 0
        sign = -1 if mode_of(self.metric or "", self.mode) == "max" else 1
        for at in sorted(at for at in values if at <= step):
            without += 1
            is_first = best_step is None and not math.isnan(values[at])
            if is_first or sign * (best - values[at]) > self.min_delta:
                best, best_step, without = values[at], at, 0
        if without < self.patience_evals or step < self.min_steps:
            return None
        known = "it was never a number" if best_step is None else f"best {best:.6g} at step {best_step}"
        evaluations = f"{without} evaluation{'' if without == 1 else 's'}"
        return f"{self.metric} has not improved by {self.min_delta:g} for {evaluations}; {known}"


class Rule(Protocol):
    """What is decided by the values of a metric: that training ends, or that its learning rate is reduced.

    Attributes:
      key: of the config.
      file: in model_dir, which holds the values.
    """

    key: ClassVar[str]
    file: ClassVar[str]

    @property
    def metric(self) -> str | None: ...

    @property
    def mode(self) -> str | None: ...

    @property
    def evaluation(self) -> str | None: ...

    def reason(self, values: Mapping[int, float], step: int) -> str | None: ...


def check_rule(rule: Rule, **least: float) -> None:
    """Check the fields of a rule. Args: least: the smallest value of each number. Raises: ValueError: one is wrong."""
    kind = type(rule).__name__
    if rule.metric is not None and "/" not in rule.metric:
        raise ValueError(f"{kind}(metric={rule.metric!r}): name it with its evaluation: eval/{rule.metric}.")
    if rule.mode not in (None, "min", "max"):
        raise ValueError(f"{kind}(mode={rule.mode!r}): allowed are 'min', 'max' and None.")
    for name, smallest in least.items():
        if getattr(rule, name) < smallest:
            raise ValueError(f"{kind}({name}={getattr(rule, name)}): it must be at least {smallest}.")


class MetricHistory:
    """The values of a rule's metric so far, in memory and in the model_dir of one run.

    Attributes:
      rates: step -> the learning rate that the evaluation of that step led to, where it reduced it.
    """

    def __init__(self, rule: Rule, model_dir: str | Path) -> None:
        self.rule = rule
        self._path = Path(model_dir) / rule.file
        known = read_json(self._path) or {}
        known = known if known.get("metric") == rule.metric else {}  # none where there is no metric
        self._values = {int(step): float(value) for step, value in known.get("values", {}).items()}
        self.rates = {int(step): float(rate) for step, rate in known.get("rates", {}).items()}

    def reason(self, step: int) -> str | None:
        """Return why the rule applies at `step`; None: it does not."""
        return self.rule.reason(self._values, step) if step in self._values else None

    def decided(self, step: int) -> str | None:
        """Return why training, which is at `step`, ends by an evaluation of that step or an earlier one; None: it
        goes on.

        An evaluator is behind training: a decision about a step holds for all steps after it.
        """
        reasons = (self.rule.reason(self._values, at) for at in sorted(self._values) if at <= step)
        return next((reason for reason in reasons if reason is not None), None)

    def has(self, step: int) -> bool:
        """Report whether the metric at `step` is known."""
        return step in self._values

    def goes_on_from(self, step: int) -> None:
        """Forget what came after `step`: the run takes these steps again."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self.rates = {at: rate for at, rate in self.rates.items() if at <= step}

    def forget_after(self, step: int) -> None:
        """Forget what came after `step`, also in the file, which another process reads."""
        if any(at > step for at in self._values):
            self.goes_on_from(step)
            self._write()

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note an evaluation; `metrics` by their names in the journal. Raises: ValueError: the metric is not there."""
        assert self.rule.metric is not None
        if self.rule.metric not in metrics:
            raise ValueError(unknown_metric(f"{self.rule.key}.metric", self.rule.metric, metrics))
        self._values[step] = float(metrics[self.rule.metric])
        self._write()

    def note_rate(self, step: int, rate: float) -> None:
        """Note the learning rate that the evaluation of `step` led to."""
        self.rates[step] = rate
        self._write()

    def _write(self) -> None:
        values = {str(at): repr(value) for at, value in sorted(self._values.items())}  # JSON has no NaN
        rates = {str(at): repr(rate) for at, rate in sorted(self.rates.items())}
        write_json(self._path, {"metric": self.rule.metric, "values": values} | ({"rates": rates} if rates else {}))
