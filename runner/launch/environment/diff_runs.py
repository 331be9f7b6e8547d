"""command=diff: how runs differ, in settings, code, packages, data and results. Starts nothing.

A run has a column; what is the same in all of them is left out. `.` stands for the code of the project as it is now,
which has no settings and results.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.metric_names import is_of_evaluation, mode_of
from runner.config.mistakes import NotFound
from runner.config.schema import Config, flatten, to_tree
from runner.config.settings.limits import as_typed
from runner.config.validation import newest_runs
from runner.launch.environment.run_code import code_of_folder
from runner.launch.environment.runs import FoundRun, fetch_run, run_in
from runner.system.console import format_number, print_table
from runner.system.urls import is_url
from runner.tracking.curves import read_metrics
from runner.tracking.journal import DATASET, RUN_STARTED, iterate_journal, journals_in, starts_and_ends
from runner.tracking.provenance import PACKAGES, RunCode, compare, read_code
from runner.tracking.summary import SUMMARY_FILE

NOW = "."
"""What stands for the code of the project as it is now."""
SECTIONS = ("settings", "code", "packages", "data", "results")
UNCOMMITTED = "uncommitted changes"
_OF_SUMMARY = ("status", "global_step", "examples", "strategy", "num_replicas", "devices", "restarts", "error")


@dataclass
class Side:
    """What is compared.

    Attributes:
      name: how the user wrote it.
      facts: section -> name -> value. A section that is not there is not known.
      code: the code of its last start; None: not recorded.
    """

    name: str
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    code: RunCode | None = None


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return how the runs `diff.runs` differ.

    Raises:
      ConfigError: one of them is no run, or cannot be reached.
    """
    names = list(config.diff.runs or ())
    with tempfile.TemporaryDirectory(prefix="runner-diff-") as scratch:
        sides = []
        for number, name in enumerate(names):
            sides.append(_read_side(name, Path(scratch, str(number))))
    _add_code(sides)
    answer: dict[str, Any] = {"runs": names}
    for section in SECTIONS:
        differing = _differences(section, sides)
        answer[section] = differing
        if differing:
            rows = []
            for name, values in differing.items():
                rows.append([name, *(_format_value(value) for value in values)])
            print_table(section, ["", *names], rows)
            print()
    if not any(answer[section] for section in SECTIONS):
        print(f"No difference is known between {', '.join(names)}.", flush=True)
    return answer


def _read_side(name: str, scratch: Path) -> Side:
    """Return what `name` stands for.

    Args:
      scratch: a folder for files that must be fetched.
    """
    folder = Path(name)
    if name == NOW and not (folder / SUMMARY_FILE).exists():
        return Side(name)
    key = "diff.runs: "
    if is_url(name):
        run = fetch_run(name, key, scratch)
    else:
        run = run_in(folder)
    if not (run.folder / SUMMARY_FILE).exists():
        newest = ", ".join(map(str, newest_runs(Path("outputs"))))
        hint = ""
        if newest:
            hint = f" The newest: {newest}."
        raise NotFound(f"{key}{name}: there is no run, as it has no {SUMMARY_FILE}.{hint}")
    facts = {
        # The defaults first: a run of an earlier version lacks keys that came later.
        "settings": {**flatten(to_tree(Config())), **run.settings},
        "code": _code_of_start(run.folder),
        "data": _data_of(run.folder),
        "results": _results_of(run),
    }
    side = Side(name, facts)
    codes = read_code(run.folder)
    if codes:
        side.code = codes[-1]
    return side


def _code_of_start(folder: Path) -> dict[str, Any]:
    """Return the commit and versions in the tags of the last start. Earlier versions of the runner wrote these, too,
    but recorded no code.
    """
    tags: Mapping[str, Any] = {}
    for line in starts_and_ends(folder):
        if line["event"] == RUN_STARTED:
            tags = line.get("tags", {})
    facts = {}
    for name, value in tags.items():
        if name.startswith("version."):
            facts[name.removeprefix("version.")] = value
    if "mlflow.source.git.commit" in tags:
        facts["commit"] = tags["mlflow.source.git.commit"]
        facts[UNCOMMITTED] = tags.get("git.dirty")
    return facts


def _data_of(folder: Path) -> dict[str, Any]:
    """Return the name and digest of each dataset, by its use: training, evaluations."""
    facts: dict[str, Any] = {}
    for journal in journals_in(folder):
        for line in iterate_journal(journal, containing=b'"dataset"'):
            if line.get("event") == DATASET:
                facts[str(line["context"])] = f"{line['name']} ({line['digest']})"
    return facts


def _results_of(run: FoundRun) -> dict[str, Any]:
    """Return the values of _OF_SUMMARY, and of each metric of evaluations the last and the best one."""
    last_values = {name: run.summary.get(name) for name in _OF_SUMMARY}
    # A run that was killed has written neither its status nor its last step to its summary.
    last_values |= {"status": run.status, "global_step": run.step, **run.metrics}
    facts = {name: value for name, value in last_values.items() if value is not None}
    for name, curve in read_metrics(run.folder).items():
        if is_of_evaluation(name):
            values = [value for _, value in curve if math.isfinite(value)]
            best = min if mode_of(name) == "min" else max
            if values:
                facts[f"best {name}"] = best(values)
    return facts


def _add_code(sides: Sequence[Side]) -> None:
    """Add code and packages to the facts of each side whose code is known: of the code, only the files that differ from
    those of the first side whose code is recorded.
    """
    recorded = [side for side in sides if side.code is not None]
    if not recorded:
        return
    first = recorded[0]
    assert first.code is not None
    for side in sides:
        if side.name == NOW and side.code is None:
            # Only after `first` is known: its commit decides which files are compared.
            side.code = code_of_folder(Path(NOW), first.code)
            recorded.append(side)
    for side in recorded:
        assert side.code is not None
        facts = side.facts.setdefault("code", {})
        # Not needed here: the files show what is not committed.
        facts.pop(UNCOMMITTED, None)
        facts |= {"commit": side.code.commit, "python": side.code.python}
        facts |= compare(first.code, side.code).files
        packages = dict(side.code.packages)
        for name in PACKAGES:
            # In the section `code`, where runs have them of which nothing more is recorded.
            if name in packages:
                facts[name] = packages.pop(name).removeprefix("==")
        side.facts["packages"] = packages


def _differences(section: str, sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Return name -> its value in each side, for each fact that differs between those sides of which the section is
    known. The value is None in a side without the fact.
    """
    known = [side.facts[section] for side in sides if section in side.facts]
    names: dict[str, None] = {}
    for facts in known:
        names |= dict.fromkeys(facts)
    differing = {}
    for name in names:
        # Compared as texts, because no NaN is equal to another.
        distinct = {repr(facts.get(name)) for facts in known}
        if len(distinct) > 1:
            differing[name] = [side.facts.get(section, {}).get(name) for side in sides]
    return differing


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return format_number(value)
    return as_typed(value)
