"""Tables of a model's variables and layers: `model_summary.txt` in model_dir, and the screen of a dry run."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from runner.hooks.hook import Hook, Run
from runner.system.console import format_bytes, print_table
from runner.system.files import MODEL_SUMMARY_FILE
from runner.tracing.partitioned_variable import part_name
from runner.tracing.trace import Trace
from runner.tracing.variable_request import VariableSpec
from runner.tracing.variable_store import VariableStore

MAX_ROWS = 40
"""Largest number of rows of a table on the screen; one more line sums up the other rows."""


class ModelSummary(Hook):
    """Writes `model_summary.txt` before the first step. Args: as of `print_variables`."""

    def __init__(self, store: VariableStore, trace: Trace) -> None:
        self._store = store
        self._trace = trace

    def begin(self, run: Run) -> None:
        stream = io.StringIO()
        print_variables(self._store, self._trace, stream, max_rows=None)
        os.makedirs(run.model_dir, exist_ok=True)
        Path(run.model_dir, MODEL_SUMMARY_FILE).write_text(stream.getvalue().lstrip("\n"), encoding="utf-8")


def print_variables(store: VariableStore, trace: Trace, stream: IO[str], max_rows: int | None = MAX_ROWS) -> Any:
    """Print a table of the variables with their total; if that table is cut, also print a table of the layers.

    Args:
      store: the variables.
      trace: the trace of model_fn in TRAIN.
      stream: where to print.
      max_rows: largest number of rows of each table; None: all variables and all layers.

    Returns:
      The table of all variables for `run.output=json`.
    """
    trainable = trace.requested.trainable
    variables = [
        dataclasses.replace(one, trainable=name in trainable or part_name(name, 0) in trainable)
        for name, one in store.saved_specs.items()
    ]
    rows = [[one.name, one.shape.as_list(), one.dtype.name, bool(one.trainable), _values(one)] for one in variables]
    print(file=stream)
    table = print_table("variables", ["name", "shape", "dtype", "trainable", "values"], rows, stream, max_rows)
    rest = variables[max_rows:] if max_rows else []
    if rest:
        print(f"... and {len(rest)} more variables with {_values(*rest):,} values", file=stream)
    learned = _values(*(one for one in variables if one.trainable))
    others = _values(*variables) - learned
    size = sum(_values(one) * one.dtype.size for one in variables)
    print(
        f"total: {learned:,} trainable parameters, {others:,} other values (optimizer, moving averages, counters), "
        f"{format_bytes(size)} on each replica",
        file=stream,
    )
    if rest or max_rows is None:
        _print_layers(variables, stream, max_rows)
    return table


def _print_layers(variables: Sequence[VariableSpec], stream: IO[str], max_rows: int | None) -> None:
    """Print the totals of each layer: variables are grouped by the first part of their names that differs."""
    common = os.path.commonpath([one.name for one in variables if one.trainable] or [""])
    depth = 1 + len([part for part in common.split("/") if part])
    layers: dict[str, list[VariableSpec]] = {}
    for one in variables:
        layers.setdefault("/".join(one.name.split("/")[:-1][:depth]) or one.name, []).append(one)
    rows = [
        [name, str(len(members)), f"{_values(*learned):,}", f"{_values(*members):,}"]
        for name, members in layers.items()
        for learned in [[one for one in members if one.trainable]]
    ]
    print(file=stream)
    print_table("layers", ["name", "variables", "parameters", "values"], rows, stream, max_rows)
    if rows[:max_rows] != rows:
        print(f"... and {len(rows) - len(rows[:max_rows])} more layers", file=stream)


def _values(*variables: VariableSpec) -> int:
    """Return the total number of elements of the variables."""
    return sum(int(one.shape.num_elements() or 0) for one in variables)


def shape_of(spec: Any) -> Any:
    """Return the shape of a spec as a list, for a table; `unknown` if it has none."""
    shape = getattr(spec, "shape", None)
    return "unknown" if shape is None or shape.rank is None else shape.as_list()
