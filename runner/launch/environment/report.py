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
from runner.tracking.curves import COLOURS, Curves, import_matplotlib, plain_text, read_metrics
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
    parts = []
    for name, of_experiment in by_experiment(runs).items():
        parts.append(_experiment(name, RunRanking(of_experiment, metric, config.sweep.mode)))
    page = _page(f"Runs in {relative(folder)}", [_overview(runs), *parts, _all_runs(runs, metric)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    print(f"{path}: {counted(len(runs), 'run')} of {relative(folder)}", flush=True)
    return {"path": str(path.absolute()), "runs": len(runs)}


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            *parts,
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _overview(runs: Sequence[FoundRun]) -> str:
    numbers = Counter(run.status for run in runs)
    statuses = ", ".join(f"{number} {status}" for status, number in numbers.most_common())
    now = time.strftime("%Y-%m-%d %H:%M")
    return f"<p>{counted(len(runs), 'run')}: {html.escape(statuses)}. Written on {now}.</p>"


def _experiment(name: str, ranking: RunRanking) -> str:
    """Return the part of one experiment; '' if none of its runs has the metric."""
    if not ranking.groups:
        return ""
    parts = [f"<h2>Experiment {html.escape(name)}, best first by {html.escape(ranking.metric)} ({ranking.mode})</h2>"]
    parts.append(_ranking_table(ranking))
    ranked = []
    for group in ranking.groups:
        # The best seed first, as the table names it.
        best = ranking.best_run(group)
        others = [ranked.run for ranked in group.with_value if ranked.run is not best]
        ranked += [best, *others]
    pictures = _pictures_of_curves(ranked, ranking.metric)
    if pictures:
        parts += ["<h3>Curves</h3>", _grid(pictures)]
    # Runs that repeat each other differ in nothing but their seed.
    pictures = _pictures_of_settings(ranked, ranking.metric, ranking.without)
    if pictures:
        parts += [f"<h3>Settings against {html.escape(ranking.metric)}</h3>", _grid(pictures)]
    return "\n".join(parts)


def _ranking_table(ranking: RunRanking) -> str:
    metrics = ranking.shown_metrics()
    headers = ["rank", "run", *ranking.if_repeated("n"), *metrics, "step", "status", "settings"]
    rows = []
    for rank, (group, settings) in enumerate(zip(ranking.groups, ranking.settings(), strict=True), 1):
        best = ranking.best_run(group)
        row = [_cell(rank), _cell(best.name), *map(_cell, ranking.if_repeated(group.count))]
        for name in metrics:
            spread = spread_of(group, name)
            row.append(_cell(str(spread), spread.mean))
        row += [_cell(best.step), _cell(best.status), _cell(", ".join(settings), is_text=True)]
        rows.append(row)
    return _table(headers, rows)


def _all_runs(runs: Sequence[FoundRun], metric: str) -> str:
    """Return the table of all runs, newest first, with what leads to them."""
    headers = ["run", "status", metric, "step", "started", "took", "error", "MLflow run", "folder"]
    rows = []
    for run in sorted(runs, key=lambda run: run.started, reverse=True):
        value = run.metrics.get(metric)
        shown = "" if value is None else format_number(value)
        took = "" if run.secs is None else format_secs(run.secs)
        row = [_cell(run.name), _cell(run.status), _cell(shown, value), _cell(run.step)]
        row.append(_cell(run.started_at, run.started))
        row.append(_cell(took, run.secs))
        row.append(_cell(run.summary.get("error"), is_text=True))
        row.append(_cell(Shipped.read(run.folder, MLFLOW).run_id))
        row.append(_cell(run.folder.absolute()))
        rows.append(row)
    return "<h2>All runs, newest first</h2>\n" + _table(headers, rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(shown: Any, value: float | None = None, *, is_text: bool = False) -> str:
    """Return a cell of a table.

    Args:
      shown: what it shows; None: nothing.
      value: the number by which it is sorted; None: what it shows.
      is_text: it is a long text, which is broken into lines.
    """
    kind = "text" if is_text else ""
    if value is not None or isinstance(shown, int | float):
        kind = "number"
    sorted_by = "" if value is None else f' data-value="{value!r}"'
    text = "" if shown is None else html.escape(str(shown))
    return f'<td class="{kind}"{sorted_by}>{text}</td>'


def _grid(pictures: Sequence[str]) -> str:
    return '<div class="pictures">' + "\n".join(f"<figure>{picture}</figure>" for picture in pictures) + "</div>"


# --- pictures ---------------------------------------------------------------------------------------------------------


def _pictures_of_curves(ranked: Sequence[FoundRun], metric: str) -> list[str]:
    """Return a picture of each metric that has curves: that of the ranking first, and the loss of training last."""
    curves = [read_metrics(run.folder) for run in ranked]
    names = {metric: None}
    for of_run in curves:
        names |= {name: None for name in of_run if is_of_evaluation(name)}
    pictures = []
    for name in [*list(names)[: MOST_CURVES - 1], "train/loss"]:
        if any(len(of_run.get(name, ())) > 1 for of_run in curves):
            pictures.append(_picture_of_curves(ranked, curves, name))
    return pictures


def _picture_of_curves(ranked: Sequence[FoundRun], curves: Sequence[Curves], name: str) -> str:
    """Return the curves of a metric of all runs: few in colours of their own, of many the best run in one."""
    figure, axes = _empty()
    are_named = len(ranked) <= MOST_NAMES
    names = _names_of(ranked)
    most = max(POINTS_OF_ALL // len(ranked), 20)
    # From the worst to the best, which is then drawn above the others.
    for place, of_run in reversed(list(enumerate(curves))):
        points = [point for point in of_run.get(name, ()) if math.isfinite(point[1])]
        # Every so many points, and the last one.
        thinned = points[:: math.ceil(len(points) / most) or 1] + points[-1:]
        steps = [step for step, _ in thinned]
        values = [value for _, value in thinned]
        is_best = place == 0
        colour = COLOURS[1] if is_best else COLOURS[0]
        if are_named:
            colour = COLOURS[place]
        axes.plot(
            steps,
            values,
            color=colour,
            alpha=1.0 if are_named or is_best else 0.3,
            linewidth=2.0 if is_best else 1.2,
            label=plain_text(names[place]) if are_named or is_best else None,
        )
    axes.set_title(plain_text(name), fontsize=11)
    axes.set_xlabel("step")
    handles, labels = axes.get_legend_handles_labels()
    # Below the picture, where it covers nothing.
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower left", fontsize=7, frameon=False, ncols=2, labelcolor=INK
    )
    return _svg(figure, f"curves of {name}")


def _names_of(runs: Sequence[FoundRun]) -> list[str]:
    """Return the last parts of the folders' names, or all of them if two have the same."""
    lasts = [run.folder.name for run in runs]
    if len(set(lasts)) == len(lasts):
        return lasts
    return [run.name for run in runs]


def _pictures_of_settings(ranked: Sequence[FoundRun], metric: str, without: Sequence[str]) -> list[str]:
    """Return a picture of each setting that varies, but for those `without`, with a point for each run."""
    of_runs = []
    for typed in varied_settings(ranked, without):
        of_runs.append(dict(text.lstrip("+").split("=", 1) for text in typed if "=" in text))
    values = [finite(run, metric) for run in ranked]
    keys: dict[str, None] = {}
    for settings in of_runs:
        keys |= dict.fromkeys(settings)
    pictures = []
    for key in list(keys)[:MOST_SETTINGS]:
        pictures.append(_picture_of_setting(key, [settings.get(key, "-") for settings in of_runs], metric, values))
    return pictures


def _picture_of_setting(key: str, texts: Sequence[str], metric: str, values: Sequence[float | None]) -> str:
    """Return the metric over one setting: on an axis if all its values are numbers, else beside each other."""
    figure, axes = _empty()
    places = _numbers(texts)
    if places is None:
        names = sorted(set(texts))
        places = [float(names.index(text)) for text in texts]
        axes.set_xticks(range(len(names)), [plain_text(_short(name)) for name in names])
        if len(names) > 4:
            axes.tick_params(axis="x", labelrotation=30)
        axes.set_xlim(-0.5, len(names) - 0.5)
    else:
        is_log = min(places) > 0 and max(places) >= 10 * min(places)
        axes.set_xscale("log" if is_log else "linear")
        values_of_key = sorted(set(places))
        if len(values_of_key) <= MOST_MARKS:  # else matplotlib chooses
            axes.set_xticks(values_of_key, [f"{value:g}" for value in values_of_key])
            axes.minorticks_off()
    axes.scatter(places, [math.nan if value is None else value for value in values], s=22, color="#2f83c9", alpha=0.75)
    axes.set_title(plain_text(key), fontsize=11)
    axes.set_ylabel(plain_text(metric))
    return _svg(figure, f"{metric} over {key}")


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:19]}…"


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Return the texts as numbers; None if one is no finite number."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _empty() -> tuple[Figure, Axes]:
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


def _svg(figure: Figure, description: str) -> str:
    """Return a picture as a part of the page, with the page's colour of text."""
    import matplotlib

    file = io.StringIO()
    # Texts stay texts; the ids in a picture come from the salt.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"', 1)
