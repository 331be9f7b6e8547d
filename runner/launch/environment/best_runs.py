"""command=best: rank the runs in a folder by a metric of their last evaluations. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.config import saved_config
from runner.config.metric_names import mode_of, rank_by
from runner.config.schema import Config, ConfigError, read, value_at
from runner.launch.start_files import read_overrides
from runner.system.console import format_number, print_table, relative
from runner.system.redaction import NO_LIST, SecretList, masked_override
from runner.system.secret_names import LIST
from runner.system.suggestions import did_you_mean
from runner.tracking.run_end import how_run_ended
from runner.tracking.summary import SUMMARY_FILE


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return the runs in and below the folder `model_dir` (null: outputs), best first by `sweep.metric`
    (null: the loss), each with those of its settings that not all of them have.

    Raises:
      ConfigError: no run there has the metric.
    """
    folder, metric = Path(config.model_dir or "outputs"), config.sweep.metric or "eval/loss"
    files = sorted(folder.glob(f"**/{SUMMARY_FILE}"))
    # Without copies, as those in .unsent.
    found = [file.parent for file in files if "/." not in f"/{file.relative_to(folder)}"]
    summaries = {relative(run): how_run_ended(run).summary for run in found}
    runs = {run: summary for run, summary in summaries.items() if summary.get("metrics")}
    values = {run: float(one["metrics"][metric]) for run, one in runs.items() if metric in one["metrics"]}
    if not values:
        names = sorted({name for one in runs.values() for name in one["metrics"]})
        there = f"{did_you_mean(metric, names)} There are: {', '.join(names) or 'none'}."
        raise ConfigError(f"model_dir={relative(folder)}: no run in this folder has sweep.metric={metric}.{there}")
    typed = {run: _shown_overrides(Path(run)) for run in values}
    common = set.intersection(*map(set, typed.values()))
    rows = []
    for rank, run in enumerate(rank_by(values, metric, config.sweep.mode), 1):
        facts = [format_number(values[run]), runs[run]["global_step"], runs[run]["status"]]
        rows.append([rank, run, *facts, ", ".join(text for text in typed[run] if text not in common)])
    title = f"runs in {relative(folder)}, best first by {metric} ({mode_of(metric, config.sweep.mode)})"
    table = print_table(title, ["rank", "model_dir", metric, "step", "status", "settings"], rows)
    return {"metric": metric, "runs": [{**row, metric: values[row["model_dir"]]} for row in table]}


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
