"""command=report: the runs below a folder as one HTML file, which needs no network. Starts nothing.

It has the ranking, the curves, each setting that varies against the metric, and a table of all runs with their errors,
folders and ids in MLflow. Its pictures are SVG, in the colours of the page, which is light or dark as the browser asks.
"""

from __future__ import annotations

import html
import io
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.metric_names import is_of_evaluation
from runner.config.schema import Config
from runner.launch.environment.best_runs import RunRanking, by_experiment, check_metric, finite, spread_of
from runner.launch.environment.runs import FoundRun, find_runs, varied_settings
from runner.system.console import counted, format_number, format_secs, relative
from runner.system.files import write_atomically
from runner.tracking.curves import COLOURS, Curves, Points, import_matplotlib, plain_text, read_metrics
from runner.tracking.run_record import MLFLOW, Shipped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CURVES = 6
"""Largest number of metrics whose curves an experiment shows."""
MOST_SETTINGS = 12
"""Largest number of settings that an experiment shows against the metric."""
MOST_NAMES = 8
"""Largest number of runs that a picture of curves names."""
MOST_MARKS = 5
"""Largest number of values of a setting that are all marked on its axis."""
POINTS_OF_ALL = 12_000
"""Largest number of points of a picture; each takes 15 bytes of the page."""
INK = "#010203"
"""Colour of texts and axes in a picture until the page's own colour takes its place."""

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9de; --faint: #667; --head: #f3f5f7; }
@media (prefers-color-scheme: dark) { :root { --line: #3a4048; --faint: #9aa3ad; --head: #23282e; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 1800px; background: Canvas;
  color: CanvasText; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
p, .faint { color: var(--faint); }
.wide { overflow: auto; max-height: 36rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.text { white-space: normal; min-width: 16rem; max-width: 40rem; overflow-wrap: anywhere; }
td.number { text-align: right; }
th { background: var(--head); position: sticky; top: 0; cursor: pointer; user-select: none; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 1rem; }
.pictures figure { margin: 0; } .pictures svg { width: 100%; height: auto; }
"""
_SCRIPT = """
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const table = head.closest("table"), place = head.cellIndex, body = table.tBodies[0];
  const sign = head.dataset.sign = head.dataset.sign === "1" ? "-1" : "1";
  const key = row => row.cells[place].dataset.value ?? row.cells[place].textContent;
  const rows = [...body.rows].sort((a, b) => {
    const x = key(a), y = key(b), both = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
    return sign * (both ? x - y : x.localeCompare(y));
  });
  body.append(...rows);
};
"""


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Write the runs in and below the folder `model_dir` (null: outputs) into the file `report.path`.

    Raises:
      ConfigError: no run there has the metric `sweep.metric` (null: the loss).
    """
    folder = Path(config.model_dir or "outputs")
    path = Path(config.report.path)
    metric = config.sweep.metric or "eval/loss"
    runs = find_runs(folder)
    check_metric(metric, runs, folder)
    experiments = []
    for name, of_experiment in by_experiment(runs).items():
        ranking = RunRanking(of_experiment, metric, config.sweep.mode)
        experiments.append(_build_experiment(name, ranking))
    parts = [_build_overview(runs), *experiments, _build_table_of_all(runs, metric)]
    page = _build_page(f"Runs in {relative(folder)}", parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    print(f"{path}: {counted(len(runs), 'run')} of {relative(folder)}", flush=True)
    return {"path": str(path.absolute()), "runs": len(runs)}


# --- the page ---------------------------------------------------------------------------------------------------------


def _build_page(title: str, parts: Sequence[str]) -> str:
    shown = html.escape(title)
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{shown}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{shown}</h1>",
        *parts,
        f"<script>{_SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(lines)


def _build_overview(runs: Sequence[FoundRun]) -> str:
    number_of_runs = counted(len(runs), "run")
    numbers = Counter(run.status for run in runs)
    statuses = ", ".join(f"{number} {status}" for status, number in numbers.most_common())
    now = time.strftime("%Y-%m-%d %H:%M")
    return f"<p>{number_of_runs}: {html.escape(statuses)}. Written on {now}.</p>"


def _build_experiment(name: str, ranking: RunRanking) -> str:
    """Return the part of one experiment; '' if none of its runs has the metric."""
    if not ranking.groups:
        return ""
    metric = html.escape(ranking.metric)
    parts = [f"<h2>Experiment {html.escape(name)}, best first by {metric} ({ranking.mode})</h2>"]
    parts.append(_build_ranking(ranking))
    runs = []
    for group in ranking.groups:
        # The run with the best seed first, as the table names it.
        best = ranking.best_run(group)
        others = [ranked.run for ranked in group.with_value if ranked.run is not best]
        runs += [best, *others]
    pictures = _draw_curves(runs, ranking.metric)
    if pictures:
        parts += ["<h3>Curves</h3>", _build_grid(pictures)]
    # `without` is the seed, if runs repeat each other: it is no setting then.
    pictures = _draw_settings(runs, ranking.metric, ranking.without)
    if pictures:
        parts += [f"<h3>Settings against {metric}</h3>", _build_grid(pictures)]
    return "\n".join(parts)


def _build_ranking(ranking: RunRanking) -> str:
    """Return the table of the groups of runs, best first."""
    metrics = ranking.shown_metrics()
    headers = ["rank", "run", *ranking.if_repeated("n"), *metrics, "step", "status", "settings"]
    rows = []
    ranked = zip(ranking.groups, ranking.settings(), strict=True)
    for rank, (group, settings) in enumerate(ranked, 1):
        best = ranking.best_run(group)
        row = [_build_cell(rank), _build_cell(best.name)]
        row += [_build_cell(count) for count in ranking.if_repeated(group.count)]
        for name in metrics:
            spread = spread_of(group, name)
            row.append(_build_cell(str(spread), spread.mean))
        row.append(_build_cell(best.step))
        row.append(_build_cell(best.status))
        row.append(_build_cell(", ".join(settings), is_text=True))
        rows.append(row)
    return _build_table(headers, rows)


def _build_table_of_all(runs: Sequence[FoundRun], metric: str) -> str:
    """Return the table of all runs, newest first, with what leads to them."""
    headers = ["run", "status", metric, "step", "started", "took", "error", "MLflow run", "folder"]
    rows = []
    for run in sorted(runs, key=lambda run: run.started, reverse=True):
        value = run.metrics.get(metric)
        value_text = ""
        if value is not None:
            value_text = format_number(value)
        duration_text = ""
        if run.secs is not None:
            duration_text = format_secs(run.secs)
        row = [_build_cell(run.name), _build_cell(run.status)]
        row.append(_build_cell(value_text, value))
        row.append(_build_cell(run.step))
        row.append(_build_cell(run.started_at, run.started))
        row.append(_build_cell(duration_text, run.secs))
        row.append(_build_cell(run.summary.get("error"), is_text=True))
        row.append(_build_cell(Shipped.read(run.folder, MLFLOW).run_id))
        row.append(_build_cell(run.folder.absolute()))
        rows.append(row)
    return "<h2>All runs, newest first</h2>\n" + _build_table(headers, rows)


def _build_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _build_cell(shown: Any, value: float | None = None, *, is_text: bool = False) -> str:
    """Return a cell of a table.

    Args:
      shown: what it shows; None: nothing.
      value: the number by which it is sorted; None: what it shows.
      is_text: it is a long text, which is broken into lines.
    """
    kind = "text" if is_text else ""
    if value is not None or isinstance(shown, int | float):
        kind = "number"
    sorted_by = ""
    if value is not None:
        sorted_by = f' data-value="{value!r}"'
    text = ""
    if shown is not None:
        text = html.escape(str(shown))
    return f'<td class="{kind}"{sorted_by}>{text}</td>'


def _build_grid(pictures: Sequence[str]) -> str:
    figures = "\n".join(f"<figure>{picture}</figure>" for picture in pictures)
    return f'<div class="pictures">{figures}</div>'


# --- pictures ---------------------------------------------------------------------------------------------------------


def _draw_curves(ranked: Sequence[FoundRun], metric: str) -> list[str]:
    """Return a picture of each metric that has curves: that of the ranking first, and the loss of training last."""
    curves = [read_metrics(run.folder) for run in ranked]
    names = {metric: None}
    for of_run in curves:
        names |= {name: None for name in of_run if is_of_evaluation(name)}
    shown = [*list(names)[: MOST_CURVES - 1], "train/loss"]
    pictures = []
    for name in shown:
        # A point alone is no curve.
        if any(len(of_run.get(name, ())) > 1 for of_run in curves):
            pictures.append(_draw_curves_of(name, ranked, curves))
    return pictures


def _draw_curves_of(name: str, ranked: Sequence[FoundRun], curves: Sequence[Curves]) -> str:
    """Return the picture with the curves of a metric of all runs. Of few runs, each has its colour and its name; of
    many, only the best run has.

    Args:
      name: the metric.
      ranked: the runs, best first.
      curves: the curves of each.
    """
    figure, axes = _build_axes()
    are_all_named = len(ranked) <= MOST_NAMES
    names = _names_of(ranked)
    max_points = max(POINTS_OF_ALL // len(ranked), 20)
    # From the worst to the best, which is then drawn above the others.
    for rank, of_run in reversed(list(enumerate(curves))):
        points = _thin_out(of_run.get(name, ()), max_points)
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        is_best = rank == 0
        if are_all_named:
            colour = COLOURS[rank]
        elif is_best:
            colour = COLOURS[1]
        else:
            colour = COLOURS[0]
        label = None
        opacity = 0.3
        if are_all_named or is_best:
            label = plain_text(names[rank])
            opacity = 1.0
        width = 2.0 if is_best else 1.2
        axes.plot(steps, values, color=colour, alpha=opacity, linewidth=width, label=label)
    axes.set_title(plain_text(name), fontsize=11)
    axes.set_xlabel("step")
    handles, labels = axes.get_legend_handles_labels()
    # Below the picture, where it covers nothing; best run first, which was drawn last.
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower left", fontsize=7, frameon=False, ncols=2, labelcolor=INK
    )
    return _as_svg(figure, f"curves of {name}")


def _thin_out(curve: Points, most: int) -> Points:
    """Return the finite points of a curve, or every so many of them and the last one."""
    points = [point for point in curve if math.isfinite(point[1])]
    stride = math.ceil(len(points) / most) or 1  # 1 without a point, too
    return points[::stride] + points[-1:]


def _names_of(runs: Sequence[FoundRun]) -> list[str]:
    """Return the last parts of the folders' names, or all of them if two have the same."""
    lasts = [run.folder.name for run in runs]
    if len(set(lasts)) == len(lasts):
        return lasts
    return [run.name for run in runs]


def _draw_settings(ranked: Sequence[FoundRun], metric: str, without: Sequence[str]) -> list[str]:
    """Return a picture of each setting that varies, but for those `without`, with a point for each run."""
    settings_of_runs = []
    keys: dict[str, None] = {}
    for typed in varied_settings(ranked, without):
        settings = dict(text.lstrip("+").split("=", 1) for text in typed if "=" in text)
        settings_of_runs.append(settings)
        keys |= dict.fromkeys(settings)
    # NaN for a run without the metric: matplotlib leaves out its point.
    values = []
    for run in ranked:
        value = finite(run, metric)
        if value is None:
            value = math.nan
        values.append(value)
    pictures = []
    for key in list(keys)[:MOST_SETTINGS]:
        texts = [settings.get(key, "-") for settings in settings_of_runs]
        pictures.append(_draw_setting(key, texts, metric, values))
    return pictures


def _draw_setting(key: str, texts: Sequence[str], metric: str, values: Sequence[float]) -> str:
    """Return a picture of the metric over one setting. Its values are positions on an axis if all are numbers, else
    they stand beside each other.

    Args:
      texts: the setting of each run, as it was typed.
      values: the metric of each run.
    """
    figure, axes = _build_axes()
    positions = _parse_numbers(texts)
    if positions is None:
        names = sorted(set(texts))
        positions = [float(names.index(text)) for text in texts]
        axes.set_xticks(range(len(names)), [plain_text(_shorten(name)) for name in names])
        if len(names) > 4:
            axes.tick_params(axis="x", labelrotation=30)
        axes.set_xlim(-0.5, len(names) - 0.5)
    else:
        # Over a factor of 10 or more, points on a linear scale would lie on each other.
        is_log = min(positions) > 0 and max(positions) >= 10 * min(positions)
        scale = "log" if is_log else "linear"
        axes.set_xscale(scale)
        marks = sorted(set(positions))
        if len(marks) <= MOST_MARKS:  # else matplotlib chooses
            axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
            axes.minorticks_off()
    axes.scatter(positions, values, s=22, color="#2f83c9", alpha=0.75)
    axes.set_title(plain_text(key), fontsize=11)
    axes.set_ylabel(plain_text(metric))
    return _as_svg(figure, f"{metric} over {key}")


def _shorten(text: str) -> str:
    if len(text) <= 20:
        return text
    return f"{text[:19]}…"


def _parse_numbers(texts: Sequence[str]) -> list[float] | None:
    """Return the texts as numbers; None if one is no finite number."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    are_finite = all(math.isfinite(number) for number in numbers)
    return numbers if are_finite else None


def _build_axes() -> tuple[Figure, Axes]:
    """Return an empty picture of the page's kind, and its axes."""
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(colors=INK, labelsize=8)
    axes.spines[:].set_color(INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#888888", alpha=0.25, linewidth=0.6)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(INK)
    return figure, axes


def _as_svg(figure: Figure, description: str) -> str:
    """Return a picture as a part of the page, with the page's colour of text."""
    import matplotlib

    file = io.StringIO()
    # Texts stay texts; the ids in a picture come from the salt.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    document = file.getvalue()
    # Without the head of an XML file, which has no place in a page.
    svg = document[document.index("<svg") :].replace(INK, "currentColor")
    tag = f'<svg role="img" aria-label="{html.escape(description)}"'
    return svg.replace("<svg", tag, 1)
