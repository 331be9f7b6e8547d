"""A sweep: its folder, its MLflow run, the results of its jobs, and their ranking.

Each job is a run in a folder of the sweep, under its own supervisor. Running the same command again resumes a sweep:
finished jobs are skipped, others are resumed. When a job ends, its result is appended to a journal. `sweep.json` has
all results at the end, and is also updated now and then before.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock

from runner.config.metric_names import mode_of
from runner.config.schema import Config, SweepConfig
from runner.launch.command import Command
from runner.launch.sweeps.repeats import Repeats, group_repeats, have_repeats
from runner.remote.mirror import remote_dir, url_or_path
from runner.system import console
from runner.system.files import read_json, write_json
from runner.system.redaction import list_of_process, mask_text, masked, secrets_of
from runner.system.standard_streams import say
from runner.system.start_status import START_STATUS
from runner.tracking.curves import JOBS_FILE, draw_jobs
from runner.tracking.journal import RUN_STARTED, SUPERVISOR, Journal, journal_path, note_of_run, read_journal
from runner.tracking.provenance import tags_of_this_process
from runner.tracking.run_end import RUNNING, RunEnd, how_run_ended, write_end
from runner.tracking.run_lock import alone_in
from runner.tracking.run_record import MLFLOW, Shipped
from runner.tracking.shipping import SETTINGS_FILE, Shipping, write_settings
from runner.tracking.summary import MLFLOW_STATUS
from runner.tracking.tracker import describe

SWEEP_FILE = "sweep.json"
RESULTS_FILE = "sweep.results.jsonl"
"""File with the results that may not be in sweep.json yet; removed at the end."""
WRITE_AFTER_SECS_PER_BYTE = 5e-6
"""sweep.json is rewritten only if it is older than its size in bytes times this number of seconds.

Writing takes 3.3e-8 s a byte (measured), so it takes less than a percent of the sweep's time, however many jobs there
are. With 100 jobs it is rewritten after each job that takes longer than 0.3 s.
"""
NOT_STARTED = "not started"
DESCRIPTION_BEGINS = "Jobs, best first by"
MAX_DESCRIBED = 30
"""Largest number of jobs in the description of the sweep's MLflow run."""


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
        """Return `name`, which is the job's or that of its settings, followed by the params that no function read:
        `lrr=0.5 (not read: lrr)`.
        """
        varied = [part.partition("=")[0] for part in name.split(", ")]
        unread = [key for key in varied if any(f".{read}".endswith(f".{key}") for read in self.unread_params)]
        return f"{name} (not read: {', '.join(unread)})" if unread else name


class Sweep:
    """The sweep in a folder, as one of its processes sees it. Several threads of a process may add results.

    Hydra's basic launcher runs all jobs in one process. Other launchers (joblib, submitit) run each job in a process of
    its own, which joins the sweep with the same `start`.

    Args:
      directory: the folder.
      config: config of a job; `sweep` and `tracking` are the same for all jobs.
      command: the command. Results of a start other than `command.start` are ignored. Unless `command.is_copy`, this
        process runs all jobs, and no other process may run the same sweep.

    Raises:
      ConfigError: the same sweep is already running.
    """

    def __init__(self, directory: Path, config: Config, command: Command) -> None:
        self.directory = directory
        self._journal = directory / RESULTS_FILE
        self._settings: SweepConfig = config.sweep
        self.shipping = Shipping(command.env)
        self._held = ExitStack()
        # Guards sweep.json and the journal; a FileLock counts for each thread of its own.
        self._lock = FileLock(directory / ".sweep.lock")
        self._start, self._is_copy = command.start, command.is_copy
        self._results: dict[str, JobResult] = {}  # by folder, in the order in which the jobs ended
        self._read = 0  # number of bytes of the journal that have been read
        self._later: threading.Timer | None = None
        if not command.is_copy:
            self._held.enter_context(alone_in(directory, "sweep.dir"))
        with self._lock:
            record = read_json(directory / SWEEP_FILE) or {}
            if record.get("start") != self._start:
                self._tell_start(config, command)
                self._save([])
                self._journal.unlink(missing_ok=True)
        if not command.is_copy:
            self.shipping.follow(directory)

    @property
    def results(self) -> list[JobResult]:
        """Return the results of the jobs so far, in the order in which they ended."""
        with self._lock:
            lines, self._read = read_journal(self._journal, self._read)
            for line in lines:
                # A start that was killed leaves its lines in the journal; which the next start removes.
                if line.get("start") == self._start:
                    result = JobResult(**line["result"])
                    # If a job has ended twice, its second end gives its place in the order.
                    self._results.pop(result.folder, None)
                    self._results[result.folder] = result
            return list(self._results.values())

    def result_in(self, folder: str) -> JobResult | None:
        """Return the result of the job in the folder of this name; None if it has none yet."""
        return next((job for job in self.results if job.folder == folder), None)

    @property
    def has_failed_too_often(self) -> bool:
        """Report whether `sweep.max_failed` jobs of this start have failed, so that no further one is started."""
        limit = self._settings.max_failed
        return limit is not None and sum(job.status == "failed" for job in self.results) >= limit

    def left_out(self, job: JobResult) -> JobResult:
        """Return the result of a job that this start leaves out: that of an earlier start, if it has one."""
        was_run = how_run_ended(self.directory / job.folder).status is not None
        return self.result_of(job) if was_run else job

    def result_of(self, job: JobResult, error: str | None = None) -> JobResult:
        """Return the result of a job from its summary.

        Args:
          job: the job, as it was before it was started.
          error: why it was never started; None: it was started.
        """
        summary = {} if error else how_run_ended(self.directory / job.folder).summary
        metrics = summary.get("metrics") or {}
        number = float(metrics.get(self._metric_name(metrics) or "", math.nan))
        status = summary.get("status", "failed")
        return replace(
            job,
            status="failed" if status == RUNNING else status,  # running: it ended without writing its status
            value=number if math.isfinite(number) else None,
            metrics=metrics,
            global_step=summary.get("global_step"),
            error=error or summary.get("error"),
            unread_params=summary.get("unread_params") or (),
        )

    def add(self, result: JobResult) -> None:
        """Write a job's result, replacing an earlier one."""
        with self._lock:
            with closing(Journal(self._journal)) as journal:
                journal.event("job", start=self._start, result=asdict(result))
            wait = self._secs_until_due()
            if wait <= 0:
                self._save(self.results)
            elif not self._is_copy and (self._later is None or not self._later.is_alive()):
                self._later = threading.Timer(wait, self._save_later)
                self._later.daemon = True
                self._later.start()

    def end(self, *, stops: Sequence[int] = (), failed: bool, total: int | None = None) -> None:
        """Print the ranking, draw it, and close the sweep's MLflow run: FAILED if a job or the sweep failed.

        The best job comes first, then pruned ones; jobs without the metric come last, in the order in which they ended.

        Args:
          stops: the stop requests so far; a further one ends the wait for the trackers.
          failed: the sweep failed.
          total: number of jobs of the sweep; None: not known.
        """
        interrupted = bool(stops)
        ranked = self._rank_jobs(self.results)
        groups = self._rank_groups(ranked)
        with self._lock:
            if self._later is not None:
                self._later.cancel()
                self._later = None
            self._save(ranked)
            # Not before: until sweep.json is written, only the journal may have some of the results.
            self._journal.unlink(missing_ok=True)
        self._print(ranked, groups)
        if interrupted or self.has_failed_too_often:
            remaining = 0 if total is None else total - sum(job.status in ("finished", "pruned") for job in ranked)
            what = f"{remaining} of {total} jobs are left. " if remaining > 0 else ""
            print(f"{what}Run the same command again to resume this sweep.", flush=True)
        try:
            self._draw(groups, self._shown_metric(ranked))
        except Exception as error:
            say(f"no {JOBS_FILE}: {describe(error)}")
        failed = failed or any(job.status == "failed" for job in ranked)
        status = "finished"
        if interrupted:
            status = "interrupted"
        elif failed:
            status = "failed"
        self._tell_end(groups, status)
        self._held.close()
        for job in ranked:  # an earlier start, or the process of a job, may not have reached the tracker
            if (self.directory / job.folder / SETTINGS_FILE).exists():
                self.shipping.follow(self.directory / job.folder)
        self.shipping.close(stops)
        for name, address in self.shipping.addresses(self.directory).items():
            print(f"{name}: {address}", flush=True)

    def _rank_jobs(self, results: Sequence[JobResult]) -> list[JobResult]:
        """Return the jobs, best first: pruned ones after the others, those without the metric last."""
        sign = 1 if self._mode(results) == "min" else -1
        return sorted(results, key=lambda job: (job.value is None, job.status == "pruned", sign * (job.value or 0.0)))

    def _rank_groups(self, ranked: Sequence[JobResult]) -> list[Repeats[JobResult]]:
        """Return the jobs that repeat each other as groups, best mean first; arguments and order as of `_rank_jobs`."""
        sign = 1 if self._mode(ranked) == "min" else -1

        def key(group: Repeats[JobResult]) -> tuple[bool, bool, float]:
            mean = group.spread.mean
            is_pruned = any(job.status == "pruned" for job in group.runs)
            return mean is None, is_pruned, sign * (mean or 0.0)

        return sorted(group_repeats(ranked), key=key)

    def _tell_end(self, groups: Sequence[Repeats[JobResult]], status: str) -> None:
        """Note in the journal how the sweep ended: its ranking, and its best job or the means of the best settings."""
        best = groups[0] if groups and groups[0].spread.values else None
        if best is not None:
            path = journal_path(self.directory, SUPERVISOR)
            step = best.best(self._mode(best.runs)).global_step or 0
            values = {f"best/{name}": value for name, value in _means(best).items()}
            lines = [(line["step"], line["metrics"]) for line in read_journal(path)[0] if "metrics" in line]
            if lines[-1:] != [(step, values)]:  # an earlier start ended with another best job
                with closing(Journal(path)) as journal:
                    journal.metrics(step, values)
        pictures = [path.name for path in sorted(self.directory.glob("*.png"))]
        end = RunEnd(
            status,
            MLFLOW_STATUS[status],
            tags={"best": _name_of(best, have_repeats(groups))} if best is not None else {},
            description=self._description(groups),
            files=[SWEEP_FILE, *pictures],
        )
        write_end(self.directory, end)

    def _description(self, groups: Sequence[Repeats[JobResult]]) -> str:
        """Return the ranking as Markdown, for the page of the sweep's MLflow run."""
        jobs = [job for group in groups for job in group.runs]
        metric = self._shown_metric(jobs)
        has_repeats = have_repeats(groups)
        counted = ["n"] if has_repeats else []
        rows = [["job", *counted, metric, "status"], ["---", *("---:" for _ in counted), "---:", "---"]]
        for group in groups[:MAX_DESCRIBED]:
            count = [group.count] if has_repeats else []
            rows.append([_name_of(group, has_repeats), *count, str(group.spread), _status_of(group)])
        lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
        if len(groups) > MAX_DESCRIBED:
            lines += ["", f"{len(groups) - MAX_DESCRIBED} more are in sweep.json."]
        return "\n".join([f"{DESCRIPTION_BEGINS} {metric} ({self._mode(jobs)})", "", *lines])

    def _draw(self, groups: Sequence[Repeats[JobResult]], metric: str) -> None:
        """Draw a line for each job, or for the mean of those that repeat each other."""
        has_repeats = have_repeats(groups)
        lines = []
        for group in groups:
            name = group.runs[0].settings if has_repeats else group.runs[0].name
            lines.append((name, group.spread.mean, group.spread.deviation))
        if has_repeats:
            counts = sorted({len(group.spread.values) for group in groups if group.spread.values})
            metric = f"{metric}\nmean ± sd, n = {' or '.join(map(str, counts))}"
        draw_jobs(lines, metric, self.directory)

    def _tell_start(self, config: Config, command: Command) -> None:
        """Note in the journal what the sweep's run is, for the trackers."""
        words, url = ["runner", *command.argv], remote_dir(self.directory)
        listed = list_of_process()  # those of all its jobs
        name = config.tracking.run_name or f"sweep {self.directory.name}"
        name = mask_text(name, secrets_of(asdict(config.tracking), listed, "tracking"))
        tags = masked(config.tracking.tags, listed, "tracking.tags")
        tags |= tags_of_this_process(self.directory, words, url, listed)
        if command.is_copy:  # no process holds the lock that shows whether the sweep is running
            tags = {key: value for key, value in tags.items() if key not in ("host", "lock")}
        params = {"sweep.metric": config.sweep.metric} if config.sweep.metric else {}
        note_of_run(self.directory, RUN_STARTED, command="sweep", name=name, params=params, tags=tags)
        write_settings(self.directory, replace(config.tracking, system_metrics=False), command.env, listed=listed)

    def _metric_name(self, metrics: Mapping[str, float]) -> str | None:
        if self._settings.metric or "eval/loss" in metrics:
            return self._settings.metric or "eval/loss"
        losses = [name for name in metrics if name.endswith("/loss")]
        return next(iter([*losses, *metrics]), None)

    def _shown_metric(self, results: Sequence[JobResult]) -> str:
        return next((str(self._metric_name(job.metrics)) for job in results if job.metrics), "eval/loss")

    def _mode(self, results: Sequence[JobResult]) -> str:
        """Return "min" or "max", which value is best; if the config has null, the metric's name decides."""
        return mode_of(self._shown_metric(results), self._settings.mode)

    def _secs_until_due(self) -> float:
        """Return the seconds until sweep.json may be rewritten; 0 or less: now."""
        with suppress(FileNotFoundError):
            written = (self.directory / SWEEP_FILE).stat()
            return written.st_mtime + written.st_size * WRITE_AFTER_SECS_PER_BYTE - time.time()
        return 0.0

    def _save_later(self) -> None:
        """Write the results that came while sweep.json was too young to be rewritten."""
        with self._lock:
            if self._later is not None and self.directory.is_dir():
                self._save(self.results)

    def _save(self, results: Sequence[JobResult]) -> None:
        record = {
            "start": self._start,
            "mlflow_run_id": Shipped.read(self.directory, MLFLOW).run_id,
            "metric": self._shown_metric(results),
            "mode": self._mode(results),
            "jobs": [asdict(job) for job in results],
        }
        groups = self._rank_groups(results)
        if have_repeats(groups):
            record["settings"] = [self._as_record(group) for group in groups]
        write_json(self.directory / SWEEP_FILE, record)

    def _as_record(self, group: Repeats[JobResult]) -> dict[str, Any]:
        """Return the entry of sweep.json for jobs that repeat each other."""
        return {
            "settings": group.runs[0].settings,
            "mean": group.spread.mean,
            "sd": group.spread.deviation,
            "n": len(group.spread.values),
            "seeds": [job.seed for job in group.runs],
            "folders": [job.folder for job in group.runs],
            "best_folder": group.best(self._mode(group.runs)).folder,
        }

    def _print(self, ranked: Sequence[JobResult], groups: Sequence[Repeats[JobResult]]) -> None:
        START_STATUS.stop()  # it is still shown if all jobs had already finished
        metric = self._shown_metric(ranked)
        mode = self._mode(ranked)
        where = url_or_path(self.directory)
        has_repeats = have_repeats(groups)
        counted = ["n"] if has_repeats else []
        headers = ["rank", "job", *counted, "status", metric, "step", "model_dir"]
        rows = []
        for rank, group in enumerate(groups, 1):
            best = group.best(mode)
            count = [group.count] if has_repeats else []
            name = _name_of(group, has_repeats)
            step = "-" if best.global_step is None else console.format_number(best.global_step)
            rows.append([str(rank), name, *count, _status_of(group), str(group.spread), step, f"{where}/{best.folder}"])
        if sys.stdout.isatty() and console.table_width(headers, rows) > console.terminal_width(sys.stdout):
            headers[-1] = "folder"
            for row in rows:
                row[-1] = row[-1].removeprefix(f"{where}/")
        what = console.counted(len(ranked), "job")
        by = metric
        if has_repeats:
            what = f"{what} of {console.counted(len(groups), 'setting')}"
            by = f"the mean of {metric}"
        console.print_table(f"sweep {where}: {what}, best first by {by} ({mode})", headers, rows)
        summaries = [how_run_ended(self.directory / job.folder).summary for job in ranked]
        console.print_common([summary for summary in summaries if summary])  # a job that was never started has none
        for job in ranked:
            if job.error:
                print(f"{job.name}: {job.error}", flush=True)
        names = sorted({name for job in ranked for name in job.metrics})
        if names and metric not in names:
            say(f"sweep.metric={metric}: no job has it. There are: {', '.join(names)}.")


def rounded(settings: str) -> str:
    """Return `learning_rate=0.1234` of `learning_rate=0.1234321`: numbers with many digits, for display.

    All digits are in the params of the job's run.
    """
    return re.sub(r"(?<==)-?\d*\.\d{6,}(e[+-]?\d+)?(?=, |$)", lambda found: f"{float(found[0]):.4g}", settings)


def _name_of(group: Repeats[JobResult], has_repeats: bool) -> str:
    """Return the name of jobs that repeat each other, in a sweep that has repeats; else that of the only job."""
    first = group.runs[0]
    is_known = has_repeats and first.settings
    return first.shown(rounded(first.settings) if is_known else first.name)


def _status_of(group: Repeats[JobResult]) -> str:
    """Return the status that all jobs have, or `2 finished, 1 failed`."""
    numbers = Counter(job.status for job in group.runs)
    if len(numbers) == 1:
        return group.runs[0].status
    return ", ".join(f"{number} {status}" for status, number in numbers.most_common())


def _means(group: Repeats[JobResult]) -> dict[str, float]:
    """Return the mean of each metric over the jobs that have the ranking's one."""
    values: dict[str, list[float]] = {}
    for job in group.with_value:
        for name, value in job.metrics.items():
            values.setdefault(name, []).append(float(value))
    return {name: fmean(of_jobs) for name, of_jobs in values.items()}
