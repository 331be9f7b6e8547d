"""command=best: rank the runs in a folder by a metric of their last evaluations. Starts nothing.

Runs that repeat each other (the same settings with other seeds) have one row, with the means of their metrics.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.config import saved_config
from runner.config.metric_names import is_of_evaluation, mode_of, rank_by
from runner.config.schema import Config, ConfigError, read, value_at
from runner.launch.start_files import read_overrides
from runner.launch.sweeps.repeats import Repeats, Spread, group_repeats, have_repeats
from runner.system.console import print_table, relative
from runner.system.redaction import NO_LIST, SecretList, masked_override
from runner.system.secret_names import LIST
from runner.system.suggestions import did_you_mean
from runner.tracking.run_end import how_run_ended
from runner.tracking.summary import SUMMARY_FILE

_MOST_METRICS = 3
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
    files = sorted(folder.glob(f"**/{SUMMARY_FILE}"))
    # Without copies, as those in .unsent.
    found = [file.parent for file in files if "/." not in f"/{file.relative_to(folder)}"]
    runs = {relative(run): how_run_ended(run).summary for run in found}
    _check_metric(metric, runs, folder)
    of_experiments: dict[str, list[str]] = {}
    for run in runs:
        of_experiments.setdefault(_experiment_of(Path(run)), []).append(run)
    ranked: list[dict[str, Any]] = []
    others: list[str] = []
    for experiment, names in of_experiments.items():
        ranking = Ranking({run: runs[run] for run in names}, metric, config.sweep.mode)
        title = f"runs in {relative(folder)}, best first by {metric} ({mode_of(metric, config.sweep.mode)})"
        if len(of_experiments) > 1:
            title = f"experiment {experiment}: {title}"
        for row in ranking.print(title):
            ranked.append({"experiment": experiment, **row})
        others += ranking.others
    return {"metric": metric, "runs": ranked, "without": _print_others(metric, others, runs)}


def _print_others(metric: str, others: Sequence[str], runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Print and return the runs that have no value of the metric."""
    if not others:
        return []
    rows = []
    for run in others:
        summary = runs[run]
        rows.append([run, summary.get("status", "-"), summary.get("global_step", "-")])
    return list(print_table(f"without {metric}", ["model_dir", "status", "step"], rows))


@dataclass(frozen=True)
class RankedRun:
    """A run, as `repeats` ranks it.

    Attributes:
      folder: its model_dir.
      summary: the contents of its summary.json.
      value: the metric by which it is ranked; None: it has none, or it is not finite.
    """

    folder: str
    summary: Mapping[str, Any]
    value: float | None

    @property
    def settings_id(self) -> str | None:
        return self.summary.get("settings_id")

    @property
    def seed(self) -> int | None:
        return self.summary.get("seed")


class Ranking:
    """The runs of one experiment, by one metric.

    Args:
      runs: model_dir -> summary.
      metric: the metric.
      mode: as in `rank_by`.

    Attributes:
      others: the runs without a finite value of the metric.
    """

    def __init__(self, runs: Mapping[str, Mapping[str, Any]], metric: str, mode: str | None) -> None:
        self._metric = metric
        self._mode = mode_of(metric, mode)
        found = [RankedRun(folder, summary, _value(summary, metric)) for folder, summary in runs.items()]
        of_group: dict[str, Repeats[RankedRun]] = {}
        means: dict[str, float] = {}
        for group in group_repeats(found):
            best = group.best(self._mode).folder
            of_group[best] = group
            if group.spread.mean is not None:
                means[best] = group.spread.mean
        self._ranked = [of_group[folder] for folder in rank_by(means, metric, mode)]
        self.others = [run.folder for run in found if run.value is None]

    def print(self, title: str) -> list[dict[str, Any]]:
        """Print the ranking, and return its rows with the values themselves; none if no run has the metric."""
        if not self._ranked:
            return []
        has_repeats = have_repeats(self._ranked)
        typed = {}
        for group in self._ranked:
            typed[group] = _shown_overrides(Path(group.best(self._mode).folder))
            if has_repeats:
                typed[group] = [text for text in typed[group] if not text.startswith("run.seed=")]
        common = set.intersection(*map(set, typed.values()))
        metrics = self._shown_metrics()
        counted = ["n"] if has_repeats else []
        rows = []
        for rank, group in enumerate(self._ranked, 1):
            best = group.best(self._mode)
            count = [group.count] if has_repeats else []
            shown = [str(_spread(group, name)) for name in metrics]
            differs = [text for text in typed[group] if text not in common]
            summary = best.summary
            rows.append(
                [rank, best.folder, *count, *shown, summary["global_step"], summary["status"], ", ".join(differs)]
            )
        headers = ["rank", "model_dir", *counted, *metrics, "step", "status", "settings"]
        table: list[dict[str, Any]] = print_table(title, headers, rows)
        for row, group in zip(table, self._ranked, strict=True):
            for name in metrics:  # numbers as they are, not as they are shown
                row[name] = _spread(group, name).mean
            if has_repeats:
                row |= {"n": len(group.spread.values), "sd": group.spread.deviation}
                row |= {"seeds": [run.seed for run in group.runs], "runs": [run.folder for run in group.runs]}
        return table

    def _shown_metrics(self) -> list[str]:
        """Return the names of the metrics to show: that of the ranking, the loss, and others of the best run."""
        best = self._ranked[0].best(self._mode).summary["metrics"]
        of_evaluations = [name for name in best if is_of_evaluation(name)]
        names = dict.fromkeys([self._metric, "eval/loss", *of_evaluations])
        return [name for name in names if name in best][:_MOST_METRICS]


def _spread(group: Repeats[RankedRun], metric: str) -> Spread:
    """Return the values of a metric in the runs that have that of the ranking."""
    values = [_value(run.summary, metric) for run in group.with_value]
    return Spread([value for value in values if value is not None])


def _value(summary: Mapping[str, Any], metric: str) -> float | None:
    metrics = summary.get("metrics") or {}
    value = float(metrics.get(metric, math.nan))
    return value if math.isfinite(value) else None


def _check_metric(metric: str, runs: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Raise ConfigError if no run has the metric."""
    names: set[str] = set()
    for summary in runs.values():
        names.update(summary.get("metrics") or ())
    if metric not in names:
        there = f"{did_you_mean(metric, sorted(names))} There are: {', '.join(sorted(names)) or 'none'}."
        raise ConfigError(f"model_dir={relative(folder)}: no run in this folder has sweep.metric={metric}.{there}")


def _experiment_of(run: Path) -> str:
    """Return the experiment of a run, by its config; `runner` if that names none."""
    file = run / saved_config.FILE
    text = file.read_text(errors="replace") if file.exists() else ""
    # Reading all of it takes 20 ms. The runner has written it, with the keys of a group in lines of their own.
    _, _, tracking = text.partition("\ntracking:\n")
    written = re.search(r"^  experiment: (.*)$", tracking, re.MULTILINE)
    name = yaml.safe_load(written.group(1)) if written else None
    return str(name or "runner")


def _shown_overrides(run: Path) -> list[str]:
    """Return the overrides of a run, without what its own config lists as secret."""
    listed = _list_of(run / saved_config.FILE)
    return [masked_override(text, listed) for text in read_overrides(run)]


def _list_of(config: Path) -> SecretList:
    if not config.exists():
        return NO_LIST
    with suppress(ConfigError):  # damaged, which concerns who reads the run
        text = config.read_text(errors="replace")
        if "\n  secrets: null\n" not in text:  # as in most; reading all of it takes 20 ms
            return SecretList.of(value_at(read(config), LIST), os.environ)
    return NO_LIST
