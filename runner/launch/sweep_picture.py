"""A picture of a sweep: parallel coordinates, one line per job through its values and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.tracking.curves import DRAWING, import_matplotlib, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JOBS_FILE = "parallel_coordinates.png"
MAX_MARKS = 6
"""Largest number of values that are labelled on an axis."""


def draw_jobs(jobs: Sequence[tuple[str, float | None]], metric: str, directory: Path) -> Path | None:
    """Draw the values and the metric of each job into `directory`, and return the file.

    Args:
      jobs: (`learning_rate=0.1, strategy=mirrored` as in the sweep's table, the metric or None).

    Returns:
      The file; None if fewer than two jobs have the metric.
    """
    rows = [(dict(part.split("=", 1) for part in name.split(", ") if "=" in part), value) for name, value in jobs]
    rows = [(varied, value) for varied, value in rows if value is not None and math.isfinite(value)]
    names = list(dict.fromkeys(name for varied, _ in rows for name in varied))
    if len(rows) < 2 or not names:
        return None
    columns = [[varied.get(name, "-") for varied, _ in rows] for name in names]
    values = [float(value) for _, value in rows if value is not None]
    path = directory / JOBS_FILE
    with DRAWING:
        save_figure(_figure(names, columns, metric, values), path)
    return path


def _figure(names: Sequence[str], columns: Sequence[Sequence[str]], metric: str, values: Sequence[float]) -> Figure:
    import_matplotlib()
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(9.0, 2.2 * (len(names) + 1)), 4.5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    places = [_placed(column) for column in [*columns, [repr(value) for value in values]]]
    for job in range(len(values)):
        heights = [heights[job] for heights, _ in places]
        colour = colormaps["viridis"](0.9 * heights[-1])  # without the last tenth, which is too light on white
        axes.plot(range(len(places)), heights, color=colour, alpha=0.8, linewidth=1.5)
    for number, (_, ticks) in enumerate(places):
        axes.axvline(number, color="#999999", linewidth=0.8)
        for height, text in ticks:
            axes.annotate(
                text, (number, height), (5, 0), textcoords="offset points", fontsize=8, va="center",
                bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )  # fmt: skip
    axes.set_xticks(range(len(places)), [text.replace("$", r"\$") for text in (*names, metric)], fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(places) - 0.6)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return figure


def _placed(texts: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return (height of each value from 0 to 1, marks of the axis).

    Numbers are placed to scale, logarithmically if they span more than an order of magnitude; names are stacked.
    """
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        names = sorted(set(texts))
        heights = {name: number / max(len(names) - 1, 1) for number, name in enumerate(names)}
        return [heights[text] for text in texts], [(heights[name], name) for name in names]
    is_log = min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    scaled = [math.log(number) if is_log else number for number in numbers]
    least, span = min(scaled), max(scaled) - min(scaled)
    heights_of = {number: (each - least) / span if span else 0.5 for number, each in zip(numbers, scaled, strict=True)}
    marks = [(height, number) for number, height in heights_of.items()]
    if len(marks) > MAX_MARKS:
        between = [(part / 4, least + span * part / 4) for part in range(5)]
        marks = [(height, math.exp(each) if is_log else each) for height, each in between]
    return [heights_of[number] for number in numbers], [(height, f"{number:.4g}") for height, number in sorted(marks)]
