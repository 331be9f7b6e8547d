"""command=best: rank the runs in a folder by a metric of their last evaluations. Starts nothing.

Runs that repeat each other (the same settings with other seeds) have one row, with the means of their metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.metric_names import is_of_evaluation, mode_of, rank_by
from runner.config.schema import Config, ConfigError
from runner.launch.environment.runs import FoundRun, find_runs, varied_settings
from runner.launch.sweeps.repeats import Repeats, Spread, group_repeats, have_repeats
from runner.system.console import print_table, relative
from runner.system.suggestions import did_you_mean

MOST_METRICS = 3
"""Number of metrics side by side."""


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return the runs in and below the folder `model_dir` (null: outputs), best first by `sweep.metric`
    (null: the loss), each with those of its settings that not all of them have.

    Each experiment (`tracking.experiment`) has a ranking of its own. The runs without the metric stand below.

    Raises:
      ConfigError: no run there has the metric.
    """
    folder = Path(config.model_dir or "outputs")
    metric = config.sweep.metric or "eval/loss"
    runs = find_runs(folder)
    check_metric(metric, runs, folder)
    ranked: list[dict[str, Any]] = []
    others: list[FoundRun] = []
    experiments = by_experiment(runs)
    for experiment, of_experiment in experiments.items():
        ranking = RunRanking(of_experiment, metric, config.sweep.mode)
        title = f"runs in {relative(folder)}, best first by {metric} ({ranking.mode})"
        if len(experiments) > 1:
            title = f"experiment {experiment}: {title}"
        for row in ranking.print(title):
            ranked.append({"experiment": experiment, **row})
        others += ranking.others
    return {"metric": metric, "runs": ranked, "without": _print_others(metric, others)}


def by_experiment(runs: Sequence[FoundRun]) -> dict[str, list[FoundRun]]:
    """Return experiment -> its runs."""
    experiments: dict[str, list[FoundRun]] = {}
    for run in runs:
        experiments.setdefault(run.experiment, []).append(run)
    return experiments


def check_metric(metric: str, runs: Sequence[FoundRun], folder: Path) -> None:
    """Raise ConfigError if no run has the metric."""
    names: set[str] = set()
    for run in runs:
        names.update(run.metrics)
    if metric not in names:
        there = sorted(names)
        shown = ", ".join(there) or "none"
        raise ConfigError(
            f"model_dir={relative(folder)}: no run in this folder has sweep.metric={metric}."
            f"{did_you_mean(metric, there)} There are: {shown}."
        )


def _print_others(metric: str, others: Sequence[FoundRun]) -> list[dict[str, Any]]:
    """Print and return the runs that have no value of the metric."""
    if not others:
        return []
    rows = []
    for run in others:
        step: int | str | None = run.step
        if step is None:
            step = "-"
        rows.append([run.name, run.status, step])
    return list(print_table(f"without {metric}", ["model_dir", "status", "step"], rows))


@dataclass(frozen=True)
class RankedRun:
    """A run, as `repeats` ranks it.

    Attributes:
      run: the run.
      value: the metric by which it is ranked; None: it has none, or it is not finite.
    """

    run: FoundRun
    value: float | None

    @property
    def settings_id(self) -> str | None:
        return self.run.summary.get("settings_id")

    @property
    def seed(self) -> int | None:
        return self.run.summary.get("seed")


class RunRanking:
    """The runs of one experiment, by one metric.

    Args:
      runs: the runs.
      metric: the metric.
      mode: as in `rank_by`.

    Attributes:
      mode: "min" or "max".
      groups: runs that repeat each other, best mean first; without those groups none of whose runs has the metric.
      others: the runs without a finite value of the metric.
      has_repeats: a group has more than one run.
      without: keys in which the runs of a group differ.
    """

    def __init__(self, runs: Sequence[FoundRun], metric: str, mode: str | None) -> None:
        self.metric = metric
        self.mode = mode_of(metric, mode)
        found = [RankedRun(run, finite(run, metric)) for run in runs]
        # By the name of its best run, because `rank_by` ranks names.
        of_name: dict[str, Repeats[RankedRun]] = {}
        means: dict[str, float] = {}
        for group in group_repeats(found):
            mean = group.spread.mean
            if mean is not None:
                name = self.best_run(group).name
                of_name[name] = group
                means[name] = mean
        self.groups = [of_name[name] for name in rank_by(means, metric, mode)]
        self.others = [ranked.run for ranked in found if ranked.value is None]
        self.has_repeats = have_repeats(self.groups)
        self.without = []
        if self.has_repeats:
            self.without = ["run.seed"]

    def best_run(self, group: Repeats[RankedRun]) -> FoundRun:
        """Return the run of a group with the best seed."""
        return group.best(self.mode).run

    def if_repeated(self, cell: str) -> list[str]:
        """Return the cell of the column that is there only if runs repeat each other."""
        return [cell] if self.has_repeats else []

    def settings(self) -> list[list[str]]:
        """Return of each group the overrides that not all groups have."""
        return varied_settings([self.best_run(group) for group in self.groups], self.without)

    def print(self, title: str) -> list[dict[str, Any]]:
        """Print the ranking, and return its rows with the values themselves; none if no run has the metric."""
        if not self.groups:
            return []
        metrics = self.shown_metrics()
        rows = []
        ranked_groups = zip(self.groups, self.settings(), strict=True)
        for rank, (group, settings) in enumerate(ranked_groups, 1):
            best = self.best_run(group)
            count = self.if_repeated(group.count)
            values = [str(spread_of(group, name)) for name in metrics]
            rows.append([rank, best.name, *count, *values, best.step, best.status, ", ".join(settings)])
        headers = ["rank", "model_dir", *self.if_repeated("n"), *metrics, "step", "status", "settings"]
        records: list[dict[str, Any]] = print_table(title, headers, rows)
        for record, group in zip(records, self.groups, strict=True):
            for name in metrics:  # numbers as they are, not as they are shown
                record[name] = spread_of(group, name).mean
            if self.has_repeats:
                record["n"] = len(group.spread.values)
                record["sd"] = group.spread.deviation
                record["seeds"] = [ranked.seed for ranked in group.runs]
                record["runs"] = [ranked.run.name for ranked in group.runs]
        return records

    def shown_metrics(self) -> list[str]:
        """Return the names of the metrics to show: that of the ranking, the loss, and others of the best run."""
        best = self.best_run(self.groups[0]).metrics
        of_evaluations = [name for name in best if is_of_evaluation(name)]
        names = dict.fromkeys([self.metric, "eval/loss", *of_evaluations])
        return [name for name in names if name in best][:MOST_METRICS]


def spread_of(group: Repeats[RankedRun], metric: str) -> Spread:
    """Return the values of a metric in those runs that have a value of the ranking's metric."""
    values = []
    for ranked in group.with_value:
        value = finite(ranked.run, metric)
        if value is not None:
            values.append(value)
    return Spread(values)


def finite(run: FoundRun, metric: str) -> float | None:
    """Return the value of a metric of a run; None if there is none, or it is not finite."""
    value = run.metrics.get(metric, math.nan)
    return value if math.isfinite(value) else None
