"""The picture of a run: which curves are in which panel, over which points, and that it is drawn at all."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from runner.tracking import curves
from runner.tracking.curves import draw_curves, draw_jobs, panels_of, read_metrics
from tests.support.journal import Lines
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def journal(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


def drawn_figure(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The matplotlib figure that `draw_curves` saved."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *args: Any, **settings: Any) -> None:
        figures.append(self)
        save(self, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", kept)
        assert draw_curves(model_dir) == model_dir / "learning_curves.png"
    return figures[0]


def test_the_loss_of_training_and_evaluation_share_a_panel_and_speeds_come_last(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    for step in (100, 200, 300):
        journal.metrics(step, {"train/loss": 1 / step, "train/steps_per_sec": 50.0})
    journal.metrics(300, {"eval/loss": 0.5, "eval/accuracy": 0.25, "eval_holdout/loss": 0.75})
    figure = drawn_figure(tmp_path, monkeypatch)
    for axes in figure.axes:
        messages.same("title", axes.get_title())
    assert {axes.get_xlabel() for axes in figure.axes} == {"step"}
    assert figure._suptitle.get_text() == tmp_path.name
    loss, accuracy, speed = figure.axes
    assert [list(line.get_xdata()) for line in loss.lines] == [[100, 200, 300], [300], [300]]
    for text in loss.get_legend().get_texts():
        messages.same("legend", text.get_text())
    assert accuracy.lines[0].get_color() == loss.lines[1].get_color()
    assert speed.get_ylim()[0] == 0
    assert {axes.get_xlim() for axes in figure.axes} == {(94.0, 306.0)}  # the same steps in each
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_where_a_resumed_run_went_back_the_later_lines_count(tmp_path: Path, journal: Lines) -> None:
    for step in (10, 20, 30):
        journal.metrics(step, {"train/loss": 1.0, "eval/loss": 3.0})
    for step in (15, 25, 35):  # resumed at 10, with another cadence
        journal.metrics(step, {"train/loss": 2.0})
    journal.event("result", metrics={"eval/loss": 9.0})
    assert {name: list(points) for name, points in read_metrics(tmp_path).items()} == {
        "train/loss": [(10, 1.0), (15, 2.0), (25, 2.0), (35, 2.0)],
        "eval/loss": [(10, 3.0), (20, 3.0), (30, 3.0)],
    }


def test_the_journals_of_all_tasks_are_drawn(tmp_path: Path, journal: Lines) -> None:
    journal.metrics(1, {"train/loss": 1.0})
    Lines(tmp_path, "evaluator").metrics(1, {"eval/loss": 2.0})
    panels = panels_of(read_metrics(tmp_path))
    assert {title: list(curves) for title, curves in panels.items()} == {"loss": ["train", "eval"]}


def test_there_is_no_picture_of_nothing(tmp_path: Path, journal: Lines) -> None:
    journal.event("started")
    assert draw_curves(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["events.chief-0.jsonl"]


def test_a_single_point_and_one_between_gaps_are_marked(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    for step in range(100):
        journal.metrics(step, {"train/loss": 1.0 if step in (0, 50, 98, 99) else math.nan})
    journal.metrics(5, {"eval/loss": 2.0})
    train, single = drawn_figure(tmp_path, monkeypatch).axes[0].lines
    assert train.get_markevery() == [0, 50]
    assert single.get_marker() == "o"
    assert math.isnan(train.get_ydata()[1])
    messages.same("label", train.get_label())


def test_many_points_are_thinned_to_means_in_a_band(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4000):
        journal.metrics(step, {"train/loss": 1.0 + step % 2})
    axes = drawn_figure(tmp_path, monkeypatch).axes[0]
    (line,) = axes.lines
    assert len(line.get_xdata()) == curves.MAX_POINTS
    assert set(line.get_ydata()) == {1.5}
    (band,) = axes.collections
    assert (band.get_datalim(axes.transData).ymin, band.get_datalim(axes.transData).ymax) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("train/loss", (1000.0, 0.01), "log"),
        ("train/loss", (2.0, 0.5), "linear"),
        ("train/loss", (1000.0, -1.0), "linear"),
        ("eval/accuracy", (0.001, 1.0), "linear"),
        ("train/steps_per_sec", (1.0, 500.0), "linear"),
        ("train/learning_rate_loss", (1e-5, 0.1), "log"),
    ],
)
def test_the_scale_fits_the_values(
    name: str,
    values: tuple[float, float],
    scale: str,
    tmp_path: Path,
    journal: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step, value in enumerate(values):
        journal.metrics(step, {name: value})
    assert drawn_figure(tmp_path, monkeypatch).axes[0].get_yscale() == scale


@pytest.mark.parametrize(
    "metrics",
    [
        {"train/loss": math.nan},
        {"train/loss": 1e308, "eval/loss": -1e308},
        {"eval/a$x$ \\frac{": 1.0, "eval/$": 2.0},
        {"eval/_hidden": 1.0, "_/b": 1.0, "plain": 1.0, "eval/日本": 1.0},
        {"eval/\ud800": 1.0},
        {f"eval/metric_{number}": 1.0 for number in range(40)},
        {"train/steps_per_sec": 0.0},
    ],
    ids=["nan", "huge", "formulas", "names", "half a pair", "many", "still"],
)
def test_draws_whatever_there_is(
    metrics: dict[str, float], tmp_path: Path, journal: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    journal.metrics(0, metrics)
    assert draw_curves(tmp_path) is not None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("odd", ["$\\frac{$", "$$", "\ud800"], ids=["formula", "dollars", "half a pair"])
def test_odd_values_and_names_of_jobs_are_drawn_as_text(odd: str, tmp_path: Path) -> None:
    jobs = [(f"fn={odd}, b=1", 0.5, None), ("fn=other, b=2", 0.7, 0.1)]
    assert draw_jobs(jobs, f"eval/{odd}", tmp_path) is not None


@pytest.mark.slow
def test_more_metrics_than_fit_are_counted(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    journal.metrics(1, {f"eval/metric_{number}": 1.0 for number in range(40)})
    figure = drawn_figure(tmp_path, monkeypatch)
    assert len(figure.axes) == 25
    messages.same("title", figure._suptitle.get_text(), hide=re.escape(tmp_path.name))


def test_the_picture_is_replaced_whole_or_not_at_all(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.metrics(1, {"train/loss": 1.0})
    draw_curves(tmp_path)
    before = (tmp_path / "learning_curves.png").read_bytes()

    def half(self: Any, file: Any, **settings: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(OSError, match="disk full"):
        draw_curves(tmp_path)
    assert (tmp_path / "learning_curves.png").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"events.chief-0.jsonl", "learning_curves.png"}


def test_several_threads_draw_at_once(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        Lines(folder).metrics(1, {"train/loss": 1.0, "eval/accuracy": 0.5})
    threads = [threading.Thread(target=draw_curves, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder in folders:
        assert (folder / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path: Path) -> None:
    Lines(tmp_path).metrics(1, {"train/loss": 1.0})
    code = (
        "import sys; from pathlib import Path; from runner.tracking.curves import draw_curves, read_metrics\n"
        "read_metrics(Path(sys.argv[1])); assert 'matplotlib' not in sys.modules\n"
        "draw_curves(Path(sys.argv[1])); print('matplotlib.pyplot' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
