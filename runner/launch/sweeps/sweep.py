"""A sweep: its folder, its MLflow run, the results of its jobs, and their ranking.

Each job is a run in a folder of the sweep, under its own supervisor. Running the same command again resumes a sweep:
finished jobs are skipped, others are resumed. When a job ends, its result is appended to a journal. `sweep.json` has
all results at the end, and is also updated now and then before.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from runner.config.metric_names import metric_name
from runner.config.schema import Config, SweepConfig
from runner.launch.command import Command
from runner.launch.sweeps.ranking import JobResult, Ranking, means_of
from runner.launch.sweeps.repeats import Repeats
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
        self._folder_lock = ExitStack()
        # Guards sweep.json and the journal, also between threads: only its own thread may take a FileLock again.
        self._lock = FileLock(directory / ".sweep.lock")
        self._start = command.start
        self._is_copy = command.is_copy
        self._results: dict[str, JobResult] = {}  # by folder, in the order in which the jobs ended
        self._num_bytes_read = 0  # of the journal
        self._save_timer: threading.Timer | None = None
        if not command.is_copy:
            self._folder_lock.enter_context(alone_in(directory, "sweep.dir"))
        with self._lock:
            record = read_json(directory / SWEEP_FILE) or {}
            # Only the first process of a start does this; the processes of other jobs join the sweep.
            if record.get("start") != self._start:
                self._tell_start(config, command)
                self._save(Ranking([], self._settings))
                self._journal.unlink(missing_ok=True)
        if not command.is_copy:
            self.shipping.ship(directory)

    @property
    def results(self) -> list[JobResult]:
        """Return the results of the jobs so far, in the order in which they ended."""
        with self._lock:
            lines, self._num_bytes_read = read_journal(self._journal, self._num_bytes_read)
            for line in lines:
                # A start that was killed leaves its lines in the journal until the next start removes it.
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
        if limit is None:
            return False
        failed = [job for job in self.results if job.status == "failed"]
        return len(failed) >= limit

    def left_out(self, job: JobResult) -> JobResult:
        """Return the result of a job that this start does not run: its result in an earlier start, if it ran there."""
        was_run = how_run_ended(self.directory / job.folder).status is not None
        if was_run:
            return self.result_of(job)
        return job

    def result_of(self, job: JobResult, error: str | None = None) -> JobResult:
        """Return the result of a job from its summary.

        Args:
          job: the job, as it was before it was started.
          error: why it was never started; None: it was started.
        """
        summary: Mapping[str, Any] = {}
        if not error:
            summary = how_run_ended(self.directory / job.folder).summary
        metrics = summary.get("metrics") or {}
        value = self._value_in(metrics)
        status = summary.get("status", "failed")
        if status == RUNNING:  # it ended without writing its status
            status = "failed"
        return replace(
            job,
            status=status,
            value=value,
            metrics=metrics,
            global_step=summary.get("global_step"),
            error=error or summary.get("error"),
            unread_params=summary.get("unread_params") or (),
        )

    def _value_in(self, metrics: Mapping[str, Any]) -> float | None:
        """Return a job's value of the sweep's metric; None: it has none, or it is not finite."""
        name = metric_name(metrics, self._settings.metric)
        if name is None or name not in metrics:
            return None
        value = float(metrics[name])
        return value if math.isfinite(value) else None

    def add(self, result: JobResult) -> None:
        """Write a job's result, replacing an earlier one."""
        with self._lock:
            with closing(Journal(self._journal)) as journal:
                journal.event("job", start=self._start, result=asdict(result))
            wait_secs = self._secs_until_due()
            is_scheduled = self._save_timer is not None and self._save_timer.is_alive()
            if wait_secs <= 0:
                self._save(Ranking(self.results, self._settings))
            elif not self._is_copy and not is_scheduled:  # the process of a single job ends before the timer
                self._save_timer = threading.Timer(wait_secs, self._save_later)
                self._save_timer.daemon = True
                self._save_timer.start()

    def end(self, *, stops: Sequence[int] = (), failed: bool, total: int | None = None) -> None:
        """Print the ranking, draw it, and close the sweep's MLflow run: FAILED if a job or the sweep failed.

        The best job comes first, then pruned ones; jobs without the metric come last, in the order in which they ended.

        Args:
          stops: the stop requests so far; a further one ends the wait for the trackers.
          failed: the sweep failed.
          total: number of jobs of the sweep; None: not known.
        """
        # Stored, because `stops` may grow: a stop that comes later ends only the wait for the trackers.
        is_interrupted = bool(stops)
        ranking = Ranking(self.results, self._settings)
        with self._lock:
            if self._save_timer is not None:
                self._save_timer.cancel()
                self._save_timer = None
            self._save(ranking, is_ranked=True)
            # Not before: until sweep.json is written, only the journal may have some of the results.
            self._journal.unlink(missing_ok=True)
        self._print(ranking)
        if is_interrupted or self.has_failed_too_often:
            self._print_how_to_resume(ranking, total)
        try:
            draw_jobs(*ranking.lines(), self.directory)
        except Exception as error:
            say(f"no {JOBS_FILE}: {describe(error)}")
        status = "finished"
        if is_interrupted:
            status = "interrupted"
        elif failed or any(job.status == "failed" for job in ranking.jobs):
            status = "failed"
        self._tell_end(ranking, status)
        self._folder_lock.close()
        self._ship_rest(ranking, stops)

    def _print_how_to_resume(self, ranking: Ranking, total: int | None) -> None:
        """Print how many jobs are left, if that is known, and how to run them."""
        left = ""
        if total is not None:
            done = [job for job in ranking.jobs if job.status in ("finished", "pruned")]
            remaining = total - len(done)
            if remaining > 0:
                left = f"{remaining} of {total} jobs are left. "
        print(f"{left}Run the same command again to resume this sweep.", flush=True)

    def _ship_rest(self, ranking: Ranking, stops: Sequence[int]) -> None:
        """Wait until the trackers have everything, and print where they show it."""
        for job in ranking.jobs:  # an earlier start, or the process of a job, may not have reached the tracker
            folder = self.directory / job.folder
            if (folder / SETTINGS_FILE).exists():
                self.shipping.ship(folder)
        self.shipping.close(stops)
        for name, address in self.shipping.addresses(self.directory).items():
            print(f"{name}: {address}", flush=True)

    def _tell_end(self, ranking: Ranking, status: str) -> None:
        """Note in the journal how the sweep ended: its ranking, and its best job or the means of the best settings."""
        best = ranking.best
        tags = {}
        if best is not None:
            tags["best"] = ranking.name_of(best)
            self._note_best(ranking, best)
        pictures = [path.name for path in sorted(self.directory.glob("*.png"))]
        end = RunEnd(
            status,
            MLFLOW_STATUS[status],
            tags=tags,
            description=ranking.as_markdown(),
            files=[SWEEP_FILE, *pictures],
        )
        write_end(self.directory, end)

    def _note_best(self, ranking: Ranking, best: Repeats[JobResult]) -> None:
        """Note the metrics of the best job in the journal, unless an earlier start has ended with the same ones."""
        path = journal_path(self.directory, SUPERVISOR)
        step = ranking.best_job(best).global_step or 0
        values = {f"best/{name}": value for name, value in means_of(best).items()}
        lines, _ = read_journal(path)
        last_noted: tuple[int, dict[str, float]] = (0, {})
        for line in lines:
            if "metrics" in line:
                last_noted = (line["step"], line["metrics"])
        if last_noted != (step, values):
            with closing(Journal(path)) as journal:
                journal.metrics(step, values)

    def _tell_start(self, config: Config, command: Command) -> None:
        """Note in the journal what the sweep's run is, for the trackers."""
        words = ["runner", *command.argv]
        url = remote_dir(self.directory)
        listed = list_of_process()  # what the configs of all jobs list as secret
        name = config.tracking.run_name or f"sweep {self.directory.name}"
        secrets = secrets_of(asdict(config.tracking), listed, "tracking")
        name = mask_text(name, secrets)
        tags = masked(config.tracking.tags, listed, "tracking.tags")
        tags |= tags_of_this_process(self.directory, words, url, listed)
        if command.is_copy:  # no process holds the lock that shows whether the sweep is running
            tags = {key: value for key, value in tags.items() if key not in ("host", "lock")}
        params = {}
        if config.sweep.metric:
            params["sweep.metric"] = config.sweep.metric
        note_of_run(self.directory, RUN_STARTED, command="sweep", name=name, params=params, tags=tags)
        write_settings(self.directory, config.tracking, command.env, listed=listed)

    def _secs_until_due(self) -> float:
        """Return the seconds until sweep.json may be rewritten; 0 or less: now."""
        with suppress(FileNotFoundError):
            written = (self.directory / SWEEP_FILE).stat()
            due = written.st_mtime + written.st_size * WRITE_AFTER_SECS_PER_BYTE
            return due - time.time()
        return 0.0

    def _save_later(self) -> None:
        """Write the results that came while sweep.json was too young to be rewritten."""
        with self._lock:
            if self._save_timer is not None and self.directory.is_dir():
                self._save(Ranking(self.results, self._settings))

    def _save(self, ranking: Ranking, *, is_ranked: bool = False) -> None:
        """Write sweep.json: the jobs in the order in which they ended, or, at the end, best first."""
        jobs = ranking.jobs if is_ranked else ranking.results
        record = {
            "start": self._start,
            "mlflow_run_id": Shipped.read(self.directory, MLFLOW).run_id,
            "metric": ranking.metric,
            "mode": ranking.mode,
            "jobs": [asdict(job) for job in jobs],
        }
        if ranking.has_repeats:
            record["settings"] = ranking.settings_as_records()
        write_json(self.directory / SWEEP_FILE, record)

    def _print(self, ranking: Ranking) -> None:
        """Print the table of the ranking, what all runs have in common, and the errors of jobs."""
        START_STATUS.stop()  # it is still shown if all jobs had already finished
        where = url_or_path(self.directory)
        headers, rows = ranking.table(where)
        if sys.stdout.isatty():
            is_too_wide = console.table_width(headers, rows) > console.terminal_width(sys.stdout)
            if is_too_wide:
                headers[-1] = "folder"
                for row in rows:
                    row[-1] = row[-1].removeprefix(f"{where}/")
        console.print_table(f"sweep {where}: {ranking.title()}", headers, rows)
        summaries = []
        for job in ranking.jobs:
            summary = how_run_ended(self.directory / job.folder).summary
            if summary:  # a job that was never started has none
                summaries.append(summary)
        console.print_common(summaries)
        names: set[str] = set()
        for job in ranking.jobs:
            names.update(job.metrics)
            if job.error:
                print(f"{job.name}: {job.error}", flush=True)
        if names and ranking.metric not in names:
            say(f"sweep.metric={ranking.metric}: no job has it. There are: {', '.join(sorted(names))}.")
