"""A sweep: its folder, its run in MLflow, what became of each of its jobs, and which was best.

Each job is a run of its own in a folder of the sweep, under a supervisor of its own. What the sweep knows is in
`sweep.json`, so the same command again goes on with it: finished jobs are skipped, broken ones resumed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from runner import report
from runner.config import Config, SweepConfig
from runner.files import read_json, write_json
from runner.lock import alone_in
from runner.masking import masked
from runner.mlflow_tracker import build_tracker
from runner.outcome import SUMMARY_FILE
from runner.provenance import tags_of_this_process
from runner.ranking import mode_of
from runner.shipping import RunRecord
from runner.tracking import Point, Tracker, describe

SWEEP_FILE = "sweep.json"


@dataclass
class JobResult:
    """What became of one job.

    Attributes:
      name: what varied: `learning_rate=0.1, strategy=mirrored`.
      status: finished, failed or interrupted.
      value: of the sweep's metric; None when the job has none, or none that is finite.
      metrics, global_step, error: as in its summary.json.
    """

    name: str
    folder: str
    status: str
    value: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    global_step: int | None = None
    error: str | None = None


class Sweep:
    """The sweep that lives in `directory`, as one process of it sees it.

    Hydra's basic launcher runs all jobs in one process; others (joblib, submitit) run each in a process of its own,
    which join the sweep that has the same `start`.

    Args:
      config: of a job; `sweep` and `tracking` are the same for all.
      argv: the command line, for the record.
      start: names this start of the sweep; the results of an earlier one do not count.
      alone: this process runs all jobs, and no other may.

    Raises:
      ConfigError: the same sweep is running already.
    """

    def __init__(
        self, directory: Path, config: Config, env: Mapping[str, str], argv: Sequence[str], start: str, *, alone: bool
    ) -> None:
        self.directory = directory
        self._settings: SweepConfig = config.sweep
        self._parent: Tracker = _tracker_of(config, env)
        self._held = ExitStack()
        self._lock = FileLock(directory / ".sweep.lock")  # of sweep.json; threads have a lock object of their own
        if alone:
            self._held.enter_context(alone_in(directory, "sweep.dir"))
        with self._lock:
            record = read_json(directory / SWEEP_FILE) or {}
            self.parent_run_id: str | None = record.get("mlflow_run_id")
            if record.get("start") != start:
                self.parent_run_id = self._open_parent(config, argv, alone=alone)
                self._save(start, [])

    @property
    def results(self) -> list[JobResult]:
        """What became of the jobs so far, in the order in which they ended."""
        return [JobResult(**job) for job in (read_json(self.directory / SWEEP_FILE) or {}).get("jobs", ())]

    def result_of(self, folder: Path, name: str, error: str | None = None) -> JobResult:
        """Notes in sweep.json what became of the job in `folder`, from its summary.

        Args:
          error: why the job never started; None: it did.
        """
        summary = {} if error else read_json(folder / SUMMARY_FILE) or {}
        metrics = summary.get("metrics") or {}
        if summary.get("status") == "running":  # it ended, and could not say how
            summary["status"] = "failed"
        result = JobResult(
            name,
            folder.name,
            summary.get("status", "failed"),
            _value_of(metrics, self._metric_name(metrics)),
            metrics,
            summary.get("global_step"),
            error or summary.get("error"),
        )
        with self._lock:
            record = read_json(self.directory / SWEEP_FILE) or {}
            self._save(record.get("start"), [*self.results, result])
        return result

    @staticmethod
    def is_finished(folder: Path) -> bool:
        """Whether the job in `folder` has nothing left to do."""
        return RunRecord.read(folder).training == "finished"

    def ranked(self) -> list[JobResult]:
        """The jobs, the best first; those without the metric last, in the order in which they ended."""
        results = self.results
        sign = 1 if self._mode(results) == "min" else -1
        return sorted(results, key=lambda job: math.inf if job.value is None else sign * job.value)

    def end(self, *, interrupted: bool, failed: bool) -> None:
        """Says the ranking and closes the sweep's run in MLflow: FAILED where a job failed, or the sweep itself."""
        ranked = self.ranked()
        with self._lock:
            self._save((read_json(self.directory / SWEEP_FILE) or {}).get("start"), ranked)
        self._print(ranked)
        if interrupted:
            print("The same command goes on with this sweep.", flush=True)
        failed = failed or any(job.status == "failed" for job in ranked)
        try:
            self._close_parent(ranked, "KILLED" if interrupted else "FAILED" if failed else "FINISHED")
        except Exception as error:
            _warn(error)
        self._held.close()

    def _close_parent(self, ranked: Sequence[JobResult], status: str) -> None:
        if self.parent_run_id is None or not self._parent.join(self.parent_run_id):
            return
        best = ranked[0] if ranked and ranked[0].value is not None else None
        if best is not None:
            now = time.time()
            self._parent.log_points(
                [
                    Point(f"best/{name}", float(value), best.global_step or 0, now)
                    for name, value in best.metrics.items()
                ]
            )
            self._parent.set_tags({"best": best.name})
        self._parent.log_file(self.directory / SWEEP_FILE)
        self._parent.end(status)

    def _open_parent(self, config: Config, argv: Sequence[str], *, alone: bool) -> str | None:
        """The sweep's run in MLflow: the one that an earlier start made, or a new one."""
        known = (read_json(self.directory / SWEEP_FILE) or {}).get("mlflow_run_id")
        name = config.tracking.run_name or f"sweep {self.directory.name}"
        tags = {**masked(config.tracking.tags), **tags_of_this_process(self.directory, argv)}
        if not alone:  # no process holds the lock that says whether the sweep lives
            tags = {key: value for key, value in tags.items() if key not in ("host", "lock")}
        try:
            return self._parent.start(known, name, {}, tags)
        except Exception as error:
            _warn(error)
            return None

    def _metric_name(self, metrics: Mapping[str, float]) -> str | None:
        if self._settings.metric or "eval/loss" in metrics:
            return self._settings.metric or "eval/loss"
        losses = [name for name in metrics if name.endswith("/loss")]
        return next(iter([*losses, *metrics]), None)

    def _shown_metric(self, results: Sequence[JobResult]) -> str:
        return next((str(self._metric_name(job.metrics)) for job in results if job.metrics), "eval/loss")

    def _mode(self, results: Sequence[JobResult]) -> str:
        """min or max; where the config leaves it open, by what the metric's name says."""
        return mode_of(self._shown_metric(results), self._settings.mode)

    def _save(self, start: str | None, results: Sequence[JobResult]) -> None:
        record = {
            "start": start,
            "mlflow_run_id": self.parent_run_id,
            "metric": self._shown_metric(results),
            "mode": self._mode(results),
            "jobs": [asdict(job) for job in results],
        }
        write_json(self.directory / SWEEP_FILE, record)

    def _print(self, ranked: Sequence[JobResult]) -> None:
        metric = self._shown_metric(ranked)
        where = report.relative(self.directory)
        jobs = f"{len(ranked)} job{'' if len(ranked) == 1 else 's'}"
        title = f"sweep {where}: {jobs}, best first by {metric} ({self._mode(ranked)})"
        rows = [
            (
                str(rank),
                job.name,
                job.status,
                "-" if job.value is None else report.format_number(job.value),
                "-" if job.global_step is None else report.format_number(job.global_step),
                f"{where}/{job.folder}",
            )
            for rank, job in enumerate(ranked, 1)
        ]
        report.print_table(title, ("rank", "job", "status", metric, "step", "model_dir"), rows)
        for job in ranked:
            if job.error:
                print(f"{job.name}: {job.error}", flush=True)
        known = sorted({name for job in ranked for name in job.metrics})
        if known and metric not in known:
            print(f"sweep.metric={metric}: no job has it. There are: {', '.join(known)}.", file=sys.stderr, flush=True)


def _tracker_of(config: Config, env: Mapping[str, str]) -> Tracker:
    tracking = config.tracking
    return build_tracker(tracking.backend, tracking.uri, tracking.experiment, env, Path.cwd())


def _value_of(metrics: Mapping[str, Any], name: str | None) -> float | None:
    value = float(metrics.get(name or "", math.nan))
    return value if math.isfinite(value) else None


def _warn(error: Exception) -> None:
    print(f"tracking: {describe(error)} (the sweep goes on without a run of its own)", file=sys.stderr, flush=True)
