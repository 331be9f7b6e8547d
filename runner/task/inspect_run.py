"""command=inspect: show what a model_dir contains, without importing the user's code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint.integrity import find_damage
from runner.checkpoint.reader import Reader
from runner.checkpoint.retention import Keep, metrics_of, why_kept
from runner.checkpoint_files import layout, manifest
from runner.config.schema import ConfigError
from runner.system.console import format_age, format_bytes, format_number, print_table
from runner.tracking.provenance import repeat_lines
from runner.tracking.run_end import how_run_ended

MAX_METRICS = 6
"""Largest number of columns for metrics in the table."""

_FACTS = ("command", "status", "error", "global_step", "strategy", "num_replicas", "mlflow_run_id")


@dataclass(frozen=True)
class RunInspection:
    """One checkpoint, complete or not.

    Attributes:
      time: when it was written, in seconds since 1970; None: not known.
      variable_bytes: size of the files with its variables and of the runner's notes beside them.
      input_bytes: size of the training input's state; 0: the checkpoint has none.
      counts_input: the checkpoint has only the number of batches that were read, not the input's state.
      metrics: metrics (`eval/accuracy`) of its evaluations.
      damage: what is wrong with it; None: it is undamaged.
      kept: why it is kept, in words; '' if that is not known or nothing keeps it.
    """

    step: int
    path: str
    time: float | None
    variable_bytes: int
    input_bytes: int
    counts_input: bool
    damage: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    kept: tuple[str, ...] = ()


def inspect(model_dir: Path, keep: Keep | None = None) -> dict[str, Any]:
    """Print and return the facts of the run in `model_dir`, its checkpoints, the variables of the newest one that is
    undamaged, and the lines that repeat the run.

    Args:
      model_dir: the folder.
      keep: which checkpoints the run keeps; None: not known.

    Raises:
      ConfigError: there is no checkpoint, or all are damaged.
    """
    found = find_checkpoints(model_dir, keep)
    answer = {"model_dir": str(model_dir), "run": _print_run(model_dir), "checkpoints": [asdict(one) for one in found]}
    if not found:
        raise ConfigError(f"command=inspect: no checkpoint in {model_dir}.")
    whole = [one for one in found if one.damage is None]
    newest = max(whole, key=lambda one: (one.time or 0.0, one.step), default=None)
    _print_checkpoints(found, newest)
    if newest is None:
        raise ConfigError(f"command=inspect: all checkpoints in {model_dir} are damaged or incomplete.")
    variables = _print_variables(newest.path)
    return {**answer, "newest": newest.path, "variables": variables, "repeat": _print_repeat(model_dir)}


def find_checkpoints(model_dir: Path, keep: Keep | None = None) -> list[RunInspection]:
    """Return the checkpoints of `model_dir`, ordered by step. All are read completely, to find damage."""
    reasons = {} if keep is None else why_kept(model_dir, keep)
    found = []
    for name in layout.list_names(model_dir):
        path, step, kept = str(model_dir / name), layout.step_of(name), tuple(reasons.get(name, ()))
        assert step is not None
        of_input = manifest.input_size_of(path)
        is_counted = not of_input and manifest.read_manifest(path) is not None
        facts = manifest.time_of(path), manifest.size_of(path) - of_input, of_input, is_counted, find_damage(path)
        found.append(RunInspection(step, path, *facts, metrics_of(path), kept))
    return found


def _print_run(model_dir: Path) -> dict[str, Any]:
    """Print the run's summary.json, and return what was printed."""
    summary = how_run_ended(model_dir).summary
    print(f"model_dir: {model_dir}")
    if not summary:
        print("no summary.json in this folder")
    facts = {name: summary[name] for name in _FACTS if summary.get(name) is not None}
    for name, value in facts.items():
        print(f"{name}: {value}")
    return facts


def _print_repeat(model_dir: Path) -> list[str]:
    """Print and return the lines that repeat the run, if its code was recorded."""
    lines = repeat_lines(model_dir)
    if lines:
        print("\nto repeat this run in a clone of its project:")
    for line in lines:
        print(line)
    return lines


def _print_checkpoints(found: Sequence[RunInspection], newest: RunInspection | None) -> None:
    names = list(dict.fromkeys(name for one in reversed(found) for name in one.metrics))
    shown = names[:MAX_METRICS]
    rows = []
    for one in found:
        age = "-" if one.time is None else format_age(max(0.0, time.time() - one.time))
        metrics = [format_number(one.metrics[name]) if name in one.metrics else "-" for name in shown]
        marks = [*(["newest"] if one is newest else []), *one.kept]
        state = f"damaged: {one.damage}" if one.damage else ", ".join(marks)
        of_input = format_bytes(one.input_bytes) if one.input_bytes else "counted" if one.counts_input else "-"
        rows.append([str(one.step), age, format_bytes(one.variable_bytes), of_input, *metrics, state])
    print()
    print_table("checkpoints", ["step", "age", "variables", "input state", *shown, "state"], rows)
    if len(names) > len(shown):
        print(f"... and {len(names) - len(shown)} more metrics: {', '.join(names[len(shown) :])}")


def _print_variables(path: str) -> Any:
    variables = sorted(Reader(path).names().items())
    rows = [[name, list(shape), dtype.name, math.prod(shape)] for name, (shape, dtype) in variables]
    parameters = sum(math.prod(shape) for _, (shape, _) in variables)
    num_bytes = sum(math.prod(shape) * dtype.size for _, (shape, dtype) in variables)
    print()
    table = print_table(f"variables of {os.path.basename(path)}", ["name", "shape", "dtype", "values"], rows)
    print(f"total: {parameters:,} values in {len(rows)} variables, {format_bytes(num_bytes)}")
    return table
