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
from runner.tracing.partitioned_variable import part_name, size_of
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
    variables: list[VariableSpec] = []
    for name, spec in store.saved_specs.items():
        # `trainable` has the parts of a partitioned variable in place of the whole one.
        is_trainable = name in trainable or part_name(name, 0) in trainable
        variables.append(dataclasses.replace(spec, trainable=is_trainable))
    rows = []
    for variable in variables:
        shape = variable.shape.as_list()
        rows.append([variable.name, shape, variable.dtype.name, variable.trainable, _count_values([variable])])
    print(file=stream)
    table = print_table("variables", ["name", "shape", "dtype", "trainable", "values"], rows, stream, max_rows)
    cut_off = variables[max_rows:] if max_rows else []
    if cut_off:
        print(f"... and {len(cut_off)} more variables with {_count_values(cut_off):,} values", file=stream)
    num_trained = _count_values(_trainable(variables))
    others = _count_values(variables) - num_trained
    size = sum(size_of(variable) for variable in variables)
    print(
        f"total: {num_trained:,} trainable parameters, {others:,} other values (optimizer, moving averages, counters), "
        f"{format_bytes(size)} on each replica",
        file=stream,
    )
    if cut_off or max_rows is None:
        _print_layers(variables, stream, max_rows)
    return table


def _print_layers(variables: Sequence[VariableSpec], stream: IO[str], max_rows: int | None) -> None:
    """Print the totals of each layer: variables are grouped by the first part of their names that differs."""
    # Scopes that all trainable variables share name no layer, so `depth` is one more than their number.
    names = [variable.name for variable in _trainable(variables)]
    common = os.path.commonpath(names) if names else ""
    depth = 1 + len([part for part in common.split("/") if part])
    layers: dict[str, list[VariableSpec]] = {}
    for variable in variables:
        *scopes, _ = variable.name.split("/")
        layer = "/".join(scopes[:depth]) or variable.name
        layers.setdefault(layer, []).append(variable)
    rows = []
    for name, members in layers.items():
        num_trained = _count_values(_trainable(members))
        rows.append([name, str(len(members)), f"{num_trained:,}", f"{_count_values(members):,}"])
    print(file=stream)
    print_table("layers", ["name", "variables", "parameters", "values"], rows, stream, max_rows)
    num_hidden = len(rows) - len(rows[:max_rows])
    if num_hidden:
        print(f"... and {num_hidden} more layers", file=stream)


def _trainable(variables: Sequence[VariableSpec]) -> list[VariableSpec]:
    return [variable for variable in variables if variable.trainable]


def _count_values(variables: Sequence[VariableSpec]) -> int:
    """Return the total number of elements of the variables."""
    return sum(int(variable.shape.num_elements() or 0) for variable in variables)


def shape_of(spec: Any) -> Any:
    """Return the shape of a spec as a list, for a table; `unknown` if it has none."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank is None:
        return "unknown"
    return shape.as_list()
