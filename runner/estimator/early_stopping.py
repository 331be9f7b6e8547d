"""Early stopping: training ends when an evaluation's metric no longer improves.

The metric at each evaluated step is kept in a file in model_dir. A run that was killed and resumed therefore decides
like an undisturbed run: it uses the values up to the checkpoint from which it resumes, and evaluates later steps again.
With an evaluator process, only the evaluator writes this file, and the chief reads it (`MetricHistory.decided`).
`reduce_lr_on_plateau` keeps its metric in the same way.

Each checkpoint has the history, too, up to the evaluation before it. So a file that was damaged, lost or replaced by an
older one is made again from the checkpoint that the run resumes from, and from what the journals have.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.checkpoint.reader import Reader
from runner.config.metric_names import unknown_metric
from runner.config.mistakes import ConfigError
from runner.config.settings.metric_rules import EarlyStopping as EarlyStopping
from runner.config.settings.metric_rules import MetricRule
from runner.system.files import read_json, set_aside, write_json
from runner.system.standard_streams import say
from runner.tracking.curves import read_metrics
from runner.tracking.journal import Journals

LEARNING_RATE_REDUCED = "learning_rate_reduced"
"""The event in the journal of a reduction; fields: step, before, after."""


HISTORIES = "histories"
"""Key in a checkpoint's own state: name of the file of a rule -> what that file has."""

_CHECKSUM = "checksum"


class MetricHistory:
    """The values of a rule's metric so far, in memory and in a file of the run's model_dir.

    Args:
      rule: the rule.
      model_dir: the folder.

    Attributes:
      rates: step -> the learning rate that was set because of the evaluation of that step.
    """

    def __init__(self, rule: MetricRule, model_dir: str | Path) -> None:
        self.rule = rule
        self._model_dir = Path(model_dir)
        self._path = self._model_dir / rule.file
        self._values: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self._damage = ""
        saved = read_json(self._path, is_kept=True)
        if saved is not None:
            self._read(saved)
        elif self._path.exists():
            self._damage = "no JSON object"

    def _read(self, saved: Mapping[str, Any]) -> None:
        """Take values and rates from what the file has, or note in `_damage` what is wrong with it."""
        contents = {key: value for key, value in saved.items() if key != _CHECKSUM}
        # Files of earlier versions have no checksum.
        if saved.get(_CHECKSUM, _checksum(contents)) != _checksum(contents):
            self._damage = "its checksum is another"
            return
        try:
            self._values, self.rates = self._parsed(contents)
        except (AttributeError, TypeError, ValueError):
            self._damage = "it has no steps and values"

    def _parsed(self, contents: Mapping[str, Any]) -> tuple[dict[int, float], dict[int, float]]:
        """Return (values, rates) of what a file or a checkpoint has; empty if they are those of another metric."""
        if contents.get("metric") != self.rule.metric:
            return {}, {}
        values = {int(step): float(value) for step, value in contents.get("values", {}).items()}
        rates = {int(step): float(rate) for step, rate in contents.get("rates", {}).items()}
        return values, rates

    def contents(self) -> dict[str, Any]:
        """Return what the file has of the history, values that JSON can hold."""
        values = {str(at): repr(value) for at, value in sorted(self._values.items())}  # JSON has no NaN
        contents: dict[str, Any] = {"metric": self.rule.metric, "values": values}
        if self.rates:
            contents["rates"] = {str(at): repr(rate) for at, rate in sorted(self.rates.items())}
        return contents

    def resume(self, step: int, path: str | None) -> None:
        """Go on from the checkpoint `path` of `step`, or with None from the start. Values after `step` are dropped.

        A file that is damaged, missing or older than the checkpoint is written again, from the checkpoint and the
        journals.

        Raises:
          ConfigError: the file is damaged, and neither the checkpoint nor a journal has its values.
        """
        if self.rule.metric is None:
            return
        contents = None
        if path is not None:
            contents = Reader(path).extra().get(HISTORIES, {}).get(self.rule.file)
        values, rates = self._parsed(contents or {})
        is_old = not (values.keys() <= self._values.keys() and rates.keys() <= self.rates.keys())
        is_made_again = bool(self._damage) or is_old
        if is_made_again:
            self._take_from_journals(path, contents, last=max(values, default=-1))
        self._values |= values
        self.rates |= rates
        self.goes_on_from(step)
        if is_made_again:
            self._write()

    def _take_from_journals(self, path: str | None, contents: Any, last: int) -> None:
        """Say what is wrong with the file, and add what the journals have of the steps after `last`.

        Of the steps up to `last` the checkpoint has all values. A journal may have more there: evaluations that were no
        part of training.

        Args:
          path: the checkpoint that the run resumes from.
          contents: what the checkpoint has of the history; None: nothing.
          last: the last step of which the checkpoint has a value; -1: it has none.

        Raises:
          ConfigError: as in `resume`.
        """
        values, rates = self._in_journals()
        if self._damage and contents is None and not values:
            raise ConfigError(
                f"{self._path} is damaged ({self._damage}), and neither {path} nor a journal in {self._model_dir} "
                f"has the values of {self.rule.metric}, by which {self.rule.key} decides. Restore the file from a "
                "backup; or remove it, and the rule begins anew."
            )
        if self._damage:
            set_aside(self._path, self._damage)
            self._damage = ""
        else:
            say(f"runner: {self._path} is missing or older than {path}.")
        say(f"runner: the values of {self.rule.metric} are those of the checkpoint and the journals again.")
        for at, value in values.items():
            if at > last:
                self._values.setdefault(at, value)
        for at, rate in rates.items():
            if at > last:
                self.rates.setdefault(at, rate)

    def _in_journals(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return (values, rates) that the journals of the run have."""
        curve = read_metrics(self._model_dir).get(str(self.rule.metric), ())
        rates: dict[int, float] = {}
        if self.rule.has_rates:
            for events in Journals(self._model_dir).events(LEARNING_RATE_REDUCED).values():
                rates |= {event["step"]: event["after"] for event in events}
        return dict(curve), rates

    def reason(self, step: int) -> str | None:
        """Return why the rule applies at `step`; None: it does not."""
        return self.rule.reason(self._values, step) if step in self._values else None

    def decided(self, step: int) -> str | None:
        """Return why training ends, because of the evaluation of `step` or of an earlier step; None: it continues.

        Earlier steps count because an evaluator is behind training: it decides about a step when training is further.
        """
        reasons = (self.rule.reason(self._values, at) for at in sorted(self._values) if at <= step)
        return next((reason for reason in reasons if reason is not None), None)

    def has(self, step: int) -> bool:
        """Report whether the metric of `step` is known."""
        return step in self._values

    def goes_on_from(self, step: int) -> None:
        """Drop the values after `step`, in memory; the run takes the steps after `step` again."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self.rates = {at: rate for at, rate in self.rates.items() if at <= step}

    def forget_after(self, step: int) -> None:
        """Drop the values after `step`, in memory and in the file, which another process reads."""
        if any(at > step for at in self._values):
            self.goes_on_from(step)
            self._write()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the results of an evaluation, in memory and in the file.

        Args:
          step: the global step of the evaluation.
          metrics: name in the journal -> value.

        Raises:
          ValueError: `metrics` lacks the rule's metric.
        """
        assert self.rule.metric is not None
        if self.rule.metric not in metrics:
            raise ValueError(unknown_metric(f"{self.rule.key}.metric", self.rule.metric, metrics))
        self._values[step] = float(metrics[self.rule.metric])
        self._write()

    def add_rate(self, step: int, rate: float) -> None:
        """Add the learning rate that was set because of the evaluation of `step`."""
        self.rates[step] = rate
        self._write()

    def _write(self) -> None:
        contents = self.contents()
        write_json(self._path, {**contents, _CHECKSUM: _checksum(contents)})


def _checksum(contents: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(contents, sort_keys=True).encode()):08x}"
