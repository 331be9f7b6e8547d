"""The results of the jobs of a sweep, best first. Jobs that differ only in their seed are ranked as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from runner.config.metric_names import metric_name, mode_of
from runner.config.schema import SweepConfig
from runner.launch.sweeps.repeats import Repeats, group_repeats, have_repeats
from runner.system import console

DESCRIPTION_BEGINS = "Jobs, best first by"
MAX_DESCRIBED = 30
"""Largest number of rows in the description of the sweep's MLflow run."""


@dataclass
class JobResult:
    """The result of one job.

    Attributes:
      name: the values that vary: `learning_rate=0.1, strategy=mirrored`.
      status: finished, failed, interrupted, pruned (stopped because it was unlikely to become the best) or not started
        (too many others had failed).
      value: the job's value of the sweep's metric; None: the job has no value, or it is not finite.
      metrics, global_step, error, unread_params: as in the job's summary.json.
      settings: the values that vary, with all digits and without the seed; '': not known.
      settings_id, seed: as in `repeats.Repeat`.
    """

    name: str
    folder: str
    status: str
    value: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    global_step: int | None = None
    error: str | None = None
    unread_params: Sequence[str] = ()
    settings: str = ""
    settings_id: str | None = None
    seed: int | None = None

    def shown(self, name: str) -> str:
        """Return `name`, the name of the job or of its settings, followed by the params that no function has read:
        `lrr=0.5 (not read: lrr)`.
        """
        # A name has the last word of a key, or more of its end, so the ends of the unread keys are compared.
        ends = tuple(f".{key}" for key in self.unread_params)
        unread = []
        for part in name.split(", "):
            key = part.partition("=")[0]
            if any(end.endswith(f".{key}") for end in ends):
                unread.append(key)
        if not unread:
            return name
        return f"{name} (not read: {', '.join(unread)})"


class Ranking:
    """The jobs of a sweep, and the groups of them that repeat each other; a group may be a single job.

    The best comes first, then pruned ones; those without the metric come last, in the order in which they ended.

    Args:
      results: the jobs, in the order in which they ended.
      settings: says which metric ranks them, and whether its smallest or its largest value is best.

    Attributes:
      metric, mode: the metric, and "min" or "max".
      jobs: each job by itself, ranked.
      groups: the groups, ranked by their means.
      has_repeats: a group has more than one job.
    """

    def __init__(self, results: Sequence[JobResult], settings: SweepConfig) -> None:
        self.results = results
        # `sweep.metric` may be null: the metrics of a job say which one is then meant.
        with_metrics = next((job for job in results if job.metrics), None)
        self.metric = "eval/loss"
        if with_metrics is not None:
            self.metric = str(metric_name(with_metrics.metrics, settings.metric))
        self.mode = mode_of(self.metric, settings.mode)
        # After `metric` and `mode`, by which both sorts rank.
        self.jobs = sorted(results, key=self._sort_key_of_job)
        self.groups = sorted(group_repeats(self.jobs), key=self._sort_key_of_group)
        self.has_repeats = have_repeats(self.groups)

    def _sort_key_of_job(self, job: JobResult) -> tuple[bool, bool, float]:
        return self._sort_key(job.value, [job])

    def _sort_key_of_group(self, group: Repeats[JobResult]) -> tuple[bool, bool, float]:
        return self._sort_key(group.spread.mean, group.runs)

    def _sort_key(self, value: float | None, jobs: Sequence[JobResult]) -> tuple[bool, bool, float]:
        """Return (has no value, is pruned, value with the sign by which the smallest is best)."""
        sign = 1 if self.mode == "min" else -1
        is_pruned = any(job.status == "pruned" for job in jobs)
        if value is None:
            return True, is_pruned, 0.0
        return False, is_pruned, sign * value

    @property
    def best(self) -> Repeats[JobResult] | None:
        """Return the best group; None if no job has the metric."""
        if not self.groups:
            return None
        first = self.groups[0]
        return first if first.spread.values else None

    def best_job(self, group: Repeats[JobResult]) -> JobResult:
        """Return the job of a group with the best seed."""
        return group.best(self.mode)

    def name_of(self, group: Repeats[JobResult]) -> str:
        """Return the name of a group: what varies, with the seed only if no job repeats another."""
        first = group.runs[0]
        if self.has_repeats and first.settings:
            return first.shown(rounded(first.settings))
        return first.shown(first.name)

    def title(self) -> str:
        """Return what the table shows: `6 jobs of 2 settings, best first by the mean of eval/loss (min)`."""
        jobs = console.counted(len(self.jobs), "job")
        if not self.has_repeats:
            return f"{jobs}, best first by {self.metric} ({self.mode})"
        settings = console.counted(len(self.groups), "setting")
        return f"{jobs} of {settings}, best first by the mean of {self.metric} ({self.mode})"

    def table(self, where: str) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows of the table.

        Args:
          where: the folder of the sweep, as the last column shows it.
        """
        headers = ["rank", "job", *self._if_repeated("n"), "status", self.metric, "step", "model_dir"]
        rows = []
        for rank, group in enumerate(self.groups, 1):
            best = self.best_job(group)
            step = "-"
            if best.global_step is not None:
                step = console.format_number(best.global_step)
            name = self.name_of(group)
            count = self._if_repeated(group.count)
            status = _status_of(group)
            value = str(group.spread)
            folder = f"{where}/{best.folder}"
            rows.append([str(rank), name, *count, status, value, step, folder])
        return headers, rows

    def as_markdown(self) -> str:
        """Return the table for the page of the sweep's MLflow run."""
        rows = [["job", *self._if_repeated("n"), self.metric, "status"]]
        rows.append(["---", *self._if_repeated("---:"), "---:", "---"])
        for group in self.groups[:MAX_DESCRIBED]:
            count = self._if_repeated(group.count)
            value = str(group.spread)
            rows.append([self.name_of(group), *count, value, _status_of(group)])
        lines = [f"{DESCRIPTION_BEGINS} {self.metric} ({self.mode})", ""]
        for row in rows:
            cells = [text.replace("|", "\\|") for text in row]
            lines.append(f"| {' | '.join(cells)} |")
        num_others = len(self.groups) - MAX_DESCRIBED
        if num_others > 0:
            lines += ["", f"{num_others} more are in sweep.json."]
        return "\n".join(lines)

    def lines(self) -> tuple[list[tuple[str, float | None, float | None]], str]:
        """Return what `draw_jobs` draws: (name, mean, standard deviation) of each group, and the title of the metric's
        axis. A mean or deviation is None if there is none.
        """
        lines = []
        for group in self.groups:
            first = group.runs[0]
            name = first.settings if self.has_repeats else first.name
            lines.append((name, group.spread.mean, group.spread.deviation))
        if not self.has_repeats:
            return lines, self.metric
        numbers = {len(group.spread.values) for group in self.groups if group.spread.values}
        shown = " or ".join(str(number) for number in sorted(numbers))
        return lines, f"{self.metric}\nmean ± sd, n = {shown}"

    def settings_as_records(self) -> list[dict[str, Any]]:
        """Return the groups as sweep.json has them."""
        return [self._record_of(group) for group in self.groups]

    def _record_of(self, group: Repeats[JobResult]) -> dict[str, Any]:
        spread = group.spread
        seeds = [job.seed for job in group.runs]
        folders = [job.folder for job in group.runs]
        return {
            "settings": group.runs[0].settings,
            "mean": spread.mean,
            "sd": spread.deviation,
            "n": len(spread.values),
            "seeds": seeds,
            "folders": folders,
            "best_folder": self.best_job(group).folder,
        }

    def _if_repeated(self, cell: str) -> list[str]:
        """Return the cell of the column that is there only if jobs repeat each other."""
        return [cell] if self.has_repeats else []


def means_of(group: Repeats[JobResult]) -> dict[str, float]:
    """Return the mean of each metric over the jobs that have the one by which they are ranked."""
    values: dict[str, list[float]] = {}
    for job in group.with_value:
        for name, value in job.metrics.items():
            values.setdefault(name, []).append(float(value))
    return {name: fmean(of_jobs) for name, of_jobs in values.items()}


def rounded(settings: str) -> str:
    """Return `learning_rate=0.1234` of `learning_rate=0.1234321`: numbers with many digits, for display.

    All digits are in the params of the job's run.
    """
    return _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.4g}", settings)


_LONG_NUMBER = re.compile(r"(?<==)-?\d*\.\d{6,}(e[+-]?\d+)?(?=, |$)")
"""The whole value of a key, with six digits after its point or more."""


def _status_of(group: Repeats[JobResult]) -> str:
    """Return the status that all jobs of a group have, or `2 finished, 1 failed`."""
    numbers = Counter(job.status for job in group.runs)
    if len(numbers) == 1:
        return group.runs[0].status
    return ", ".join(f"{number} {status}" for status, number in numbers.most_common())
