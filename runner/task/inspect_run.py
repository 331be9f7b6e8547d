"""command=inspect: show what a model_dir contains, without importing the user's code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
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
      kept: the reasons why it is kept, in words; empty if they are not known or nothing keeps it.
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
    answer: dict[str, Any] = {"model_dir": str(model_dir)}
    answer["run"] = _print_run(model_dir)
    answer["checkpoints"] = [asdict(checkpoint) for checkpoint in found]
    if not found:
        raise ConfigError(f"command=inspect: no checkpoint in {model_dir}.")
    undamaged = [checkpoint for checkpoint in found if checkpoint.damage is None]
    newest = max(undamaged, key=lambda checkpoint: (checkpoint.time or 0.0, checkpoint.step), default=None)
    _print_checkpoints(found, newest)
    if newest is None:
        raise ConfigError(f"command=inspect: all checkpoints in {model_dir} are damaged or incomplete.")
    answer["newest"] = newest.path
    answer["variables"] = _print_variables(newest.path)
    answer["repeat"] = _print_repeat(model_dir)
    return answer


def find_checkpoints(model_dir: Path, keep: Keep | None = None) -> list[RunInspection]:
    """Return the checkpoints of `model_dir`, ordered by step. All are read completely, to find damage."""
    reasons: Mapping[str, Sequence[str]] = {}
    if keep is not None:
        reasons = why_kept(model_dir, keep)
    found = []
    for name in layout.list_names(model_dir):
        path = str(model_dir / name)
        step = layout.step_of(name)
        assert step is not None
        input_bytes = manifest.input_size_of(path)
        # Without the input's state, a checkpoint of this runner has the number of batches that were read.
        counts_input = not input_bytes and manifest.read_manifest(path) is not None
        variable_bytes = manifest.size_of(path) - input_bytes
        kept = tuple(reasons.get(name, ()))
        checkpoint = RunInspection(
            step=step,
            path=path,
            time=manifest.time_of(path),
            variable_bytes=variable_bytes,
            input_bytes=input_bytes,
            counts_input=counts_input,
            damage=find_damage(path),
            metrics=metrics_of(path),
            kept=kept,
        )
        found.append(checkpoint)
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
    """Print the table of the checkpoints, ordered by step, with at most MAX_METRICS metrics.

    Args:
      found: the checkpoints.
      newest: the newest undamaged one, which is marked; None: all are damaged.
    """
    # Metrics of the last checkpoint come first.
    names_of_all: dict[str, None] = {}
    for checkpoint in reversed(found):
        names_of_all |= dict.fromkeys(checkpoint.metrics)
    names = list(names_of_all)
    shown = names[:MAX_METRICS]
    others = names[MAX_METRICS:]
    rows = [_cells_of(checkpoint, shown, is_newest=checkpoint is newest) for checkpoint in found]
    print()
    print_table("checkpoints", ["step", "age", "variables", "input state", *shown, "state"], rows)
    if others:
        print(f"... and {len(others)} more metrics: {', '.join(others)}")


def _cells_of(checkpoint: RunInspection, shown: Sequence[str], *, is_newest: bool) -> list[str]:
    """Return the row of a checkpoint.

    Args:
      checkpoint: the checkpoint.
      shown: the names of the metrics that have a column.
      is_newest: it is the newest undamaged checkpoint.
    """
    age = "-"
    if checkpoint.time is not None:
        age = format_age(max(0.0, time.time() - checkpoint.time))
    of_input = "-"
    if checkpoint.input_bytes:
        of_input = format_bytes(checkpoint.input_bytes)
    elif checkpoint.counts_input:
        of_input = "counted"
    metrics = []
    for name in shown:
        cell = "-"
        if name in checkpoint.metrics:
            cell = format_number(checkpoint.metrics[name])
        metrics.append(cell)
    if checkpoint.damage:
        state = f"damaged: {checkpoint.damage}"
    elif is_newest:
        state = ", ".join(["newest", *checkpoint.kept])
    else:
        state = ", ".join(checkpoint.kept)
    return [str(checkpoint.step), age, format_bytes(checkpoint.variable_bytes), of_input, *metrics, state]


def _print_variables(path: str) -> Any:
    """Print the table of the variables in the checkpoint `path`, and return it."""
    rows = []
    num_values = 0
    num_bytes = 0
    for name, (shape, dtype) in sorted(Reader(path).names().items()):
        size = math.prod(shape)
        rows.append([name, list(shape), dtype.name, size])
        num_values += size
        num_bytes += size * dtype.size
    print()
    table = print_table(f"variables of {os.path.basename(path)}", ["name", "shape", "dtype", "values"], rows)
    print(f"total: {num_values:,} values in {len(rows)} variables, {format_bytes(num_bytes)}")
    return table
