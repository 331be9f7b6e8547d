"""What a model is made of: its variables by layer, and what a step of it costs. `model_summary.txt` in model_dir."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import tensorflow as tf

from runner.divided import part_name
from runner.files import MODEL_SUMMARY_FILE
from runner.flops import Flops, count_flops
from runner.hooks import Hook, Run
from runner.preparation import Preparation
from runner.report import format_bytes, print_table
from runner.types import StepResult

MAX_ROWS = 40
"""Of a table of variables on a screen; what is more is summed up."""

MAX_OPERATIONS = 2000
"""Of a step whose FLOPs training counts by itself: 490 take 0.07 to 0.1 s here (0.2 ms each)."""


class ModelSummary(Hook):
    """Writes `model_summary.txt`: the variables before the first step, the FLOPs after it.

    They are counted then, as it takes longer than all else that is done before a small model's first step.
    """

    def __init__(self, training: Preparation) -> None:
        self._training, self._is_whole = training, False

    def begin(self, run: Run) -> None:
        self._write(run, "")

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._is_whole:
            return
        self._is_whole = True
        num_operations = len(self._training.program.trace.graph.get_operations())
        if num_operations <= MAX_OPERATIONS:
            self._write(run, flops_of_step(self._training))
        else:
            self._write(run, f"FLOPs of a step: {num_operations:,} operations; command=dry_run counts them")

    def _write(self, run: Run, flops: str) -> None:
        stream = io.StringIO()
        print_variables(self._training, stream, max_rows=None)
        text = stream.getvalue().lstrip("\n") + (f"\n{flops}\n" if flops else "")
        os.makedirs(run.model_dir, exist_ok=True)
        Path(run.model_dir, MODEL_SUMMARY_FILE).write_text(text, encoding="utf-8")


def flops_of_step(training: Preparation) -> str:
    """What a step of training costs, in a line."""
    feed, trace = training.feed, training.program.trace
    size = feed.global_batch_size
    if size is not None:
        size = -(-size // (training.config.num_replicas_in_sync * feed.num_parts))
    try:
        flops = count_flops(trace, training.program.spec.loss, size)
    except (ValueError, TypeError, tf.errors.OpError):  # a graph that cannot be copied: nobody needs the number so much
        flops = Flops(None, None)
    left_out = f"; without {', '.join(flops.not_counted)}, which TensorFlow does not count" if flops.not_counted else ""
    at_least = "at least " if left_out and flops.step is not None else ""
    of = "a step" if feed.num_parts == 1 else f"one of the {feed.num_parts} parts of a step"
    batch = "a batch" if size is None else f"{size:,} example{'' if size == 1 else 's'}"
    replicas = f"{feed.num_replicas} replica{'' if feed.num_replicas == 1 else 's'}"
    return (
        f"FLOPs of {of}: {at_least}{_number(flops.forward)} forward, for {batch} on a replica; "
        f"{at_least}{_number(flops.step)} in all, on {replicas} (a multiplication and its addition are 2){left_out}"
    )


def _number(flops: int | None) -> str:
    return "unknown (a shape is not known before it runs)" if flops is None else f"{flops:,}"


@dataclass(frozen=True)
class _Variable:
    name: str
    shape: tf.TensorShape
    dtype: tf.DType
    trainable: bool

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return int(self.shape.num_elements() or 0)


def print_variables(training: Preparation, stream: IO[str], max_rows: int | None = MAX_ROWS) -> None:
    """Prints a table of the variables with their sum, and one of the layers where the first does not hold them all.

    Args:
      max_rows: None: all variables, and the layers too.
    """
    trainable = training.program.trace.served.trainable
    variables = [
        _Variable(name, one.shape, one.dtype, name in trainable or part_name(name, 0) in trainable)
        for name, one in training.model.store.saved.items()
    ]
    rows = [
        [one.name, shape_text(one), one.dtype.name, "yes" if one.trainable else "", f"{one.parameters:,}"]
        for one in variables[:max_rows]
    ]
    print(file=stream)
    print_table("variables", ["name", "shape", "dtype", "trainable", "parameters"], rows, stream)
    rest = variables[len(rows) :]
    if rest:
        print(
            f"... and {len(rest)} more variables with {sum(one.parameters for one in rest):,} parameters", file=stream
        )
    learned = sum(one.parameters for one in variables if one.trainable)
    others = sum(one.parameters for one in variables) - learned
    size = sum(one.parameters * one.dtype.size for one in variables)
    print(
        f"total: {learned:,} trainable parameters, {others:,} others (optimizer, moving averages, counters), "
        f"{format_bytes(size)} on each replica",
        file=stream,
    )
    if rest or max_rows is None:
        _print_layers(variables, stream, max_rows)


def _print_layers(variables: Sequence[_Variable], stream: IO[str], max_rows: int | None) -> None:
    """Sums by the first part of the names that tells them apart."""
    common = os.path.commonpath([one.name for one in variables if one.trainable] or [""])
    depth = 1 + len([part for part in common.split("/") if part])
    layers: dict[str, list[_Variable]] = {}
    for one in variables:
        layers.setdefault("/".join(one.name.split("/")[:-1][:depth]) or one.name, []).append(one)
    rows = [
        [
            name,
            str(len(members)),
            f"{sum(one.parameters for one in members if one.trainable):,}",
            f"{sum(one.parameters for one in members):,}",
        ]
        for name, members in layers.items()
    ]
    print(file=stream)
    print_table("layers", ["name", "variables", "trainable", "parameters"], rows[:max_rows], stream)
    if rows[:max_rows] != rows:
        print(f"... and {len(rows) - len(rows[:max_rows])} more layers", file=stream)


def shape_text(spec: Any) -> str:
    """`[batch, 10]` for `[None, 10]`."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank is None:
        return "unknown"
    return "[" + ", ".join("batch" if i == 0 and size is None else str(size) for i, size in enumerate(shape)) + "]"
