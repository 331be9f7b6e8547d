"""command=list: the runs below a folder, newest first. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.metric_names import metric_name
from runner.config.schema import Config
from runner.launch.environment.runs import FoundRun, find_runs, varied_settings
from runner.system.console import counted, format_number, format_secs, print_table, relative


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return the runs in and below the folder `model_dir` (null: outputs), newest first: also those that run,
    were interrupted or were killed.

    Each has the last value of `sweep.metric` (null: the loss of its evaluation).
    """
    folder = Path(config.model_dir or "outputs")
    runs = sorted(find_runs(folder), key=lambda run: run.started, reverse=True)
    rows = []
    answer = []
    for run, settings in zip(runs, varied_settings(runs), strict=True):
        metric = metric_name(run.metrics, config.sweep.metric)
        value = None
        if metric is not None:
            value = run.metrics.get(metric)
        cells = _cells_of(run, metric, value)
        rows.append([*cells, ", ".join(settings)])
        answer.append(_record(run, metric, value, settings))
    title = f"{counted(len(runs), 'run')} in {relative(folder)}, newest first"
    print_table(title, ["model_dir", "status", "step", "metric", "took", "started", "settings"], rows)
    return {"runs": answer}


def _cells_of(run: FoundRun, metric: str | None, value: float | None) -> list[str]:
    """Return the cells of a run, but for its settings."""
    step = "-"
    if run.step is not None:
        step = str(run.step)
    shown = "-"
    if value is not None:
        shown = f"{metric} {format_number(value)}"
    took = "-"
    if run.secs is not None:
        took = format_secs(run.secs)
    return [run.name, run.status, step, shown, took, run.started_at]


def _record(run: FoundRun, metric: str | None, value: float | None, settings: list[str]) -> dict[str, Any]:
    """Return a run as run.output=json has it, with numbers as they are."""
    return {
        "model_dir": run.name,
        "status": run.status,
        "step": run.step,
        "metric": metric,
        "value": value,
        "secs": run.secs,
        "started": run.started,
        "settings": settings,
        "error": run.summary.get("error"),
    }
