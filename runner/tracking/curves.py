"""Pictures of a run's learning curves, from its journals, and of a sweep's jobs: parallel coordinates, one line per job
through its values and its result. matplotlib is imported when there is something to draw.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.system.files import write_atomically
from runner.tracking.journal import is_of_host, iterate_journal, journals_in
from runner.tracking.tracker import points_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "learning_curves.png"
JOBS_FILE = "parallel_coordinates.png"
MAX_PANELS = 25
MAX_POINTS = 400
"""A curve with more points than this is drawn as means, with a band from minimum to maximum."""
FEW_POINTS = 40
"""A curve with at most this many points has a mark at each point."""
MAX_VALUE = 1e100
"""Larger values are drawn as infinite, because the axes would overflow."""
LOG_RATIO = 100.0
"""A panel whose values span more than this is drawn on a log scale."""
MAX_MARKS = 6
"""Largest number of values that are labelled on an axis of a sweep's picture."""
COLOURS = ("#1f6fb4", "#e4761b", "#2a9d5c", "#c23b3b", "#7d5bb5", "#8a6150", "#d36bb0", "#6b7075", "#a8a51f", "#1fa5b8")

Points = Sequence[tuple[int, float]]
Curves = Mapping[str, Points]
"""The metrics of one panel, such as the loss of training and of each evaluation: name of the curve (`train`) -> its
points."""


def draw_curves(model_dir: Path) -> Path | None:
    """Draw the metrics of a run over its steps into `model_dir/learning_curves.png`.

    Returns:
      The file; None if the run has no metrics.
    """
    panels = panels_of(read_metrics(model_dir))
    if not panels:
        return None
    path = model_dir / CURVES_FILE
    save_figure(_figure_of_curves(panels, model_dir.name), path)
    return path


def draw_jobs(jobs: Sequence[tuple[str, float | None, float | None]], metric: str, directory: Path) -> Path | None:
    """Draw the values and the metric of each job into `directory`, and return the file.

    Args:
      jobs: (`learning_rate=0.1, strategy=mirrored` as in the sweep's table, the metric or None, its standard deviation
        over jobs that repeat each other or None).
      metric: the title of the metric's axis.

    Returns:
      The file; None if fewer than two jobs have the metric, or none has a setting in its name.
    """
    settings: list[dict[str, str]] = []
    results: list[tuple[float, float]] = []
    for name, value, deviation in jobs:
        if value is not None and math.isfinite(value):
            assignments = [part.split("=", 1) for part in name.split(", ") if "=" in part]
            settings.append(dict(assignments))
            results.append((value, deviation or 0.0))
    names: dict[str, None] = {}
    for varied in settings:
        names |= dict.fromkeys(varied)
    if len(results) < 2 or not names:
        return None
    columns = []
    for name in names:
        columns.append([varied.get(name, "-") for varied in settings])
    path = directory / JOBS_FILE
    save_figure(_figure_of_jobs(list(names), columns, metric, results), path)
    return path


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` as a PNG file, whole or not at all."""
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font lacks characters of a name
        figure.savefig(png, format="png", dpi=100)
    write_atomically(path, png.getvalue())


class Curve(Sequence[tuple[int, float]]):
    """The (step, value) points of one metric, in 16 bytes each, since a run may log millions."""

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        self._steps = array("q")
        self._values = array("d")
        for step, value in points:
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Add a point, and drop points at this step or later: a run that was rolled back takes these steps again."""
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._values.pop()
        self._steps.append(step)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, place: Any) -> Any:
        return self._steps[place], self._values[place]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._steps, self._values, strict=True)


def read_metrics(model_dir: Path) -> Curves:
    """Return metric -> its (step, value) points, by step. After a rollback, later values replace earlier ones."""
    metrics: dict[str, Curve] = {}
    step_journals = [path for path in journals_in(model_dir) if not is_of_host(path)]
    for path in step_journals:
        file_metrics: dict[str, Curve] = {}
        for line in iterate_journal(path, containing=b'"metrics"'):
            for point in points_of(line):
                file_metrics.setdefault(point.name, Curve()).add(point.step, point.value)
        for name, curve in file_metrics.items():
            if name in metrics:  # another task logs the same metric
                merged = {**dict(metrics[name]), **dict(curve)}
                curve = Curve(sorted(merged.items()))
            metrics[name] = curve
    return metrics


def panels_of(metrics: Curves) -> dict[str, Curves]:
    """Return title -> curves of each panel of the picture: the loss first, speeds last, the others in the order in
    which they came.
    """
    families: dict[str, dict[str, Points]] = {}
    for name, points in metrics.items():
        curve, _, family = name.partition("/")
        if not family:
            family = curve
            curve = ""
        families.setdefault(family, {})[curve] = points
    order = sorted(families, key=lambda family: (family != "loss", _is_speed(family)))
    return {family: families[family] for family in order}


def import_matplotlib() -> None:
    """Import matplotlib in advance: it takes 0.4 s, or seconds at its first use, when it looks for fonts."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends import backend_agg  # noqa: F401
    from matplotlib.figure import Figure  # noqa: F401


def _empty_figure(width: float, height: float) -> Figure:
    import_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def plain_text(text: str) -> str:
    """Return any text, such as a metric's name, as matplotlib shows it: between two dollar signs it would read a
    formula, and it fails at half of a surrogate pair.
    """
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")


# --- learning curves -------------------------------------------------------------------------------------------------


def _figure_of_curves(panels: Mapping[str, Curves], run_name: str) -> Figure:
    """Return the figure: the first panel over the whole width, the others in rows below it, all with the same steps."""
    shown = dict(list(panels.items())[:MAX_PANELS])
    num_lower_panels = len(shown) - 1
    columns = 3
    if num_lower_panels <= 3:
        columns = max(1, num_lower_panels)
    elif num_lower_panels == 4:
        columns = 2
    rows_below = math.ceil(num_lower_panels / columns)
    figure = _empty_figure(max(10.0, 4.2 * columns), 3.9 + 2.7 * rows_below)
    heights = [3.6] + [2.6] * rows_below
    grid = figure.add_gridspec(1 + rows_below, columns, height_ratios=heights)
    title_of_all = plain_text(run_name)
    if len(shown) < len(panels):
        title_of_all += f"   ({len(panels) - len(shown)} more metrics are not shown)"
    figure.suptitle(title_of_all, fontsize=12, fontweight="bold", x=0.01, ha="left")
    colours: dict[str, str] = {}  # a curve has the same colour in all panels
    end_steps: list[int] = []
    for curves in shown.values():
        for name, points in curves.items():
            colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
            end_steps += [points[0][0], points[-1][0]]
    step_range = (min(end_steps), max(end_steps))
    for number, (title, curves) in enumerate(shown.items()):
        cell = grid[0, :]
        if number > 0:
            row, column = divmod(number - 1, columns)
            cell = grid[1 + row, column]
        _draw_panel(figure.add_subplot(cell), title, curves, colours, step_range)
    return figure


def _draw_panel(
    axes: Axes, title: str, curves: Curves, colours: Mapping[str, str], step_range: tuple[int, int]
) -> None:
    """Draw the curves of one panel.

    Args:
      title: name of the metric, without the name of a curve.
      colours: name of a curve -> its colour.
      step_range: the first and the last step of all panels.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    values: list[float] = []
    for name, points in curves.items():
        _draw_curve(axes, points, colours[name], _label_of(name, points))
        values += [value for _, value in points if _is_finite(value)]
    first, last = step_range
    margin = 0.03 * (last - first) or 1
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if last >= 100_000 else "{x:,.0f}")
    if _needs_log_scale(title, values):
        axes.set_yscale("log")
    elif _is_speed(title):
        top = 1.15 * max(values, default=1)
        axes.set_ylim(0, top or 1)
    largest = max(map(abs, values), default=0)
    if 1000 <= largest < 1e7 and axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter("{x:,.0f}")
    words = title.replace("_per_sec", " per second").replace("_", " ")
    axes.set_title(plain_text(words), fontsize=11)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=True, framealpha=0.8, edgecolor="none")


def _draw_curve(axes: Axes, points: Points, colour: str, label: str) -> None:
    """Draw a line through `points`, with gaps where values are not finite."""
    steps: list[float] = []
    values: list[float] = []
    for step, value in points:
        steps.append(step)
        values.append(value if _is_finite(value) else math.nan)
    if len(points) > MAX_POINTS:
        steps, values, least, greatest = _group_points(steps, values)
        axes.fill_between(steps, least, greatest, color=colour, alpha=0.18, linewidth=0)
    # A line needs two points, so mark points without a neighbour: is_missing is True, False, True before, at and after
    # such a point. It begins and ends with True, because nothing is before the first value and after the last.
    is_missing = [True, *map(math.isnan, values), True]
    isolated = [number for number in range(len(values)) if is_missing[number : number + 3] == [True, False, True]]
    marked_points = None if len(points) <= FEW_POINTS else isolated
    axes.plot(
        steps, values, color=colour, label=label, linewidth=1.6,
        marker="o", markersize=3.5, markevery=marked_points, solid_joinstyle="round",
    )  # fmt: skip


def _group_points(steps: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """Return [middle steps, means, minima, maxima] of MAX_POINTS groups of points; NaN if no value of a group is
    finite.
    """
    bounds = [round(len(steps) * number / MAX_POINTS) for number in range(MAX_POINTS + 1)]
    groups = []
    for first, end in pairwise(bounds):
        finite = [value for value in values[first:end] if not math.isnan(value)]
        if not finite:
            finite = [math.nan]
        middle = (steps[first] + steps[end - 1]) / 2
        mean = math.fsum(finite) / len(finite)
        groups.append((middle, mean, min(finite), max(finite)))
    return [list(column) for column in zip(*groups, strict=True)]


def _label_of(name: str, points: Points) -> str:
    """Return the label of a curve: its name, its last value, and the number of values that are not finite."""
    words = name.replace("_", " ").strip() or "value"
    last = points[-1][1]
    number = f"{last:,.0f}" if 1000 <= abs(last) < 1e7 else f"{last:.4g}"
    label = f"{words}  {number}"
    lost = sum(not _is_finite(value) for _, value in points)
    if lost:
        label += f"  ({lost} of {len(points)} not finite)"
    return plain_text(label)


def _needs_log_scale(title: str, values: Sequence[float]) -> bool:
    if not values or min(values) <= 0 or _is_speed(title):
        return False
    is_share = max(values) <= 1 and "loss" not in title  # such as an accuracy
    return max(values) / min(values) >= LOG_RATIO and not is_share


def _is_speed(family: str) -> bool:
    return family.endswith("_per_sec")


def _is_finite(value: float) -> bool:
    return abs(value) <= MAX_VALUE


# --- the jobs of a sweep ---------------------------------------------------------------------------------------------


def _figure_of_jobs(
    names: Sequence[str], columns: Sequence[Sequence[str]], metric: str, results: Sequence[tuple[float, float]]
) -> Figure:
    """Return the figure.

    Args:
      names: the axes, but for that of the metric.
      columns: the values of the jobs on each of these axes.
      metric: title of the last axis.
      results: (value of the metric, its standard deviation or 0) of each job.
    """
    from matplotlib import colormaps

    figure = _empty_figure(max(9.0, 2.2 * (len(names) + 1)), 4.5)
    axes = figure.add_subplot()
    values = []
    lows = []
    highs = []
    for value, deviation in results:
        values.append(value)
        if deviation:
            lows.append(value - deviation)
            highs.append(value + deviation)
    positions = [_position_on_axis(column) for column in columns]  # of each axis: (heights of the jobs, its ticks)
    # The axis of the metric also has the ends of the bars, so that it is long enough for them: its heights are those of
    # the jobs, then the lows, then the highs.
    positions.append(_position_on_axis([repr(value) for value in [*values, *lows, *highs]]))
    metric_heights = positions[-1][0]
    bar_heights = metric_heights[len(values) :]
    for job in range(len(values)):
        line = [heights[job] for heights, _ in positions]
        colour = colormaps["viridis"](0.9 * line[-1])  # without the last tenth, which is too light on white
        axes.plot(range(len(positions)), line, color=colour, alpha=0.8, linewidth=1.5)
    for low, high in zip(bar_heights[: len(lows)], bar_heights[len(lows) :], strict=True):
        axes.plot([len(columns)] * 2, [low, high], color="#444444", alpha=0.6, linewidth=3, solid_capstyle="butt")
    for number, (_, ticks) in enumerate(positions):
        axes.axvline(number, color="#999999", linewidth=0.8)
        for height, text in ticks:
            axes.annotate(
                plain_text(text), (number, height), (5, 0), textcoords="offset points", fontsize=8, va="center",
                bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )  # fmt: skip
    axes.set_xticks(range(len(positions)), [plain_text(text) for text in (*names, metric)], fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(positions) - 0.6)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return figure


def _position_on_axis(texts: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return (height of each value from 0 to 1, marks of the axis).

    Numbers are placed to scale, logarithmically if they span more than an order of magnitude; names are stacked.
    """
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    if numbers and all(map(math.isfinite, numbers)):
        return _position_to_scale(numbers)
    names = sorted(set(texts))
    intervals = max(len(names) - 1, 1)
    heights = {name: number / intervals for number, name in enumerate(names)}
    return [heights[text] for text in texts], [(height, name) for name, height in heights.items()]


def _position_to_scale(numbers: Sequence[float]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the same as `_position_on_axis`, for numbers."""
    is_log = min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    scaled = list(numbers)
    if is_log:
        scaled = [math.log(number) for number in numbers]
    # Heights go from 0 for the least to 1 for the greatest number.
    least = min(scaled)
    span = max(scaled) - least
    heights = [0.5] * len(numbers)  # all are the same
    if span:
        heights = [(on_scale - least) / span for on_scale in scaled]
    height_of = dict(zip(numbers, heights, strict=True))
    marks = [(height, number) for number, height in height_of.items()]
    if len(marks) > MAX_MARKS:  # then label round heights, not the numbers themselves
        marks = []
        for height in (0.0, 0.25, 0.5, 0.75, 1.0):
            on_scale = least + span * height
            marks.append((height, math.exp(on_scale) if is_log else on_scale))
    return heights, [(height, f"{number:.4g}") for height, number in sorted(marks)]
