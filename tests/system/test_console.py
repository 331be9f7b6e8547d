"""What a person reads: progress on a terminal and off it, and the end of a run."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from runner.system.console import (
    Epochs,
    LoopReport,
    PlainProgress,
    Progress,
    RichProgress,
    _fill_lines,
    build_progress,
    format_age,
    format_bytes,
    format_number,
    format_secs,
    print_common,
    print_job,
    print_summary,
    print_table,
)
from runner.system.start_status import StartStatus
from tests.support.messages import Messages
from tests.support.screen import line_of


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def clock(*times: float) -> Any:
    values: Iterator[float] = iter(times)
    return lambda: next(values)


def test_plain_progress_says_loss_speed_and_eta(messages: Messages) -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=clock(0, 10))
    progress.start(1000, 0)
    progress.update(LoopReport(1, 2.5, 0.5, 32.0))  # slow: it traces the graph
    progress.update(LoopReport(100, 0.25, 50.0, 3200.0))
    messages.same("screen", stream.getvalue())


def test_plain_progress_says_one_line_a_period_and_always_the_last() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, period_secs=10, clock=clock(0, 1, 9, 10, 12))
    progress.start(None, 0)
    for step in (1, 2, 3, 4, 5):
        progress.update(LoopReport(step, 1.0, 10.0, 10.0))
    progress.stop()
    progress.stop()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "4", "5"]


def test_a_message_comes_after_the_state_it_follows() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, period_secs=10, clock=clock(0, 1))
    progress.start(None, 0)
    progress.update(LoopReport(1, 1.0, 10.0, 10.0))
    progress.update(LoopReport(2, 1.0, 10.0, 10.0))
    progress.message("eval at step 2")
    progress.stop()
    assert [line[:6] for line in stream.getvalue().splitlines()] == ["step 1", "step 2", "eval a"]


def test_speeds_are_averaged_over_the_last_loops() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, period_secs=0, clock=clock(0, 1, 2))
    progress.start(None, 0)
    for step, speed in ((1, 1.0), (2, 100.0), (3, 200.0)):
        progress.update(LoopReport(step, 1.0, speed, speed))
    assert "130 steps/s" in stream.getvalue().splitlines()[-1]


def test_no_eta_where_the_end_is_not_known(messages: Messages) -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, period_secs=0, clock=clock(0, 1))
    progress.start(None, 0)
    progress.update(LoopReport(6, 1.0, 0.0, 0.0))
    progress.update(LoopReport(7, math.nan, 0.0, 0.0))
    messages.same("line", stream.getvalue().splitlines()[-1])


def test_rich_progress_shows_the_step_and_the_loss() -> None:
    stream = Terminal()
    progress = RichProgress(Console(file=stream, force_terminal=True, width=120))
    progress.start(1000, 0)
    progress.update(LoopReport(1, 2.5, 0.5, 32.0))
    progress.update(LoopReport(100, 0.25, 50.0, 3200.0))
    progress.message("[worker:1] saved")
    progress.stop()
    progress.stop()
    text = stream.getvalue()
    assert "100/1000" in text and "loss 0.25" in text and "ETA 18s" in text and "[worker:1] saved" in text


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_on_a_terminal_and_epochs_and_the_time_are_shown(width: int, messages: Messages) -> None:
    stream = Terminal()
    seconds = [0.0]
    progress = RichProgress(Console(file=stream, force_terminal=True, width=width), lambda: seconds[0])
    progress.start(123456, 0, Epochs(10, 12345.6))
    progress.update(LoopReport(1, 2.5, 0.5, 32.0))
    seconds[0] = 83.0
    progress.update(LoopReport(30000, 0.25, 5000.0, 320000.0))
    progress.stop()
    last = Text.from_ansi(stream.getvalue()).plain.splitlines()[-2:]
    for line in last:
        messages.same("line", line.rstrip(), hide="[━╸╺]+")
    assert all(len(line) <= width for line in last) and "…" not in stream.getvalue()


def test_many_facts_take_more_lines_and_none_is_divided() -> None:
    assert _fill_lines(["loss 0.25", "accuracy 0.5", "auc 1"], 24) == ["loss 0.25  accuracy 0.5", "auc 1"]
    assert _fill_lines(["a name that is wider than the screen"], 10) == ["a name that is wider than the screen"]


def test_a_phase_is_shown_with_its_time_while_it_lasts_and_leaves_nothing() -> None:
    stream = Terminal()
    progress = RichProgress(Console(file=stream, force_terminal=True, width=80), clock(0, 3, 3, 3, 3, 3))
    with progress.phase("trace"):
        pass
    assert "tracing the graph  3s" in stream.getvalue()
    assert "\x1b[2K" in stream.getvalue().rpartition("tracing")[2], "the line is erased"


def test_plain_lines_say_the_epoch(messages: Messages) -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=clock(0, 10))
    progress.start(30, 10, Epochs(3, 10.0, began=0))
    progress.update(LoopReport(11, 2.5, 0.5, 32.0))
    progress.update(LoopReport(20, 0.25, 5.0, 320.0))
    messages.same("screen", stream.getvalue())


def test_no_color_takes_the_colours_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = RichProgress(Console(file=stream, force_terminal=True, width=120))
    progress.start(10, 0)
    progress.update(LoopReport(5, 0.25, 50.0, 3200.0))
    progress.stop()
    assert "loss 0.25" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()  # the cursor still moves, but no colour is set


@pytest.mark.parametrize(
    ("mode", "stream", "kind"),
    [
        ("auto", io.StringIO(), PlainProgress),
        ("auto", Terminal(), RichProgress),
        ("plain", Terminal(), PlainProgress),
        ("rich", io.StringIO(), RichProgress),
        ("off", Terminal(), Progress),
    ],
)
def test_the_mode_and_the_stream_decide(
    mode: str, stream: io.StringIO, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert type(build_progress(mode, stream)) is kind


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(build_progress("auto", Terminal())) is PlainProgress


SUMMARY = {
    "status": "finished",
    "global_step": 1000,
    "metrics": {"eval/accuracy": 0.98765, "eval/loss": 0.05},
    "steps_per_sec": 312.44,
    "strategy": "mirrored",
    "num_replicas": 2,
    "checkpoint": "outputs/x/model.ckpt-1000",
    "mlflow_run_id": "abc",
}


def test_the_summary_off_a_terminal_is_name_and_value(messages: Messages) -> None:
    stream = io.StringIO()
    print_summary(SUMMARY, "outputs/x", stream)
    messages.same("screen", stream.getvalue())


def test_a_job_of_a_sweep_ends_in_two_lines_and_what_happened_to_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    summary = {**SUMMARY, "phases": {"build": 1.0, "train": 2.5}, "best": "step 600, eval/accuracy 0.99"}
    print_job(summary, "outputs/x", "[a=1] ")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("[a=1] finished: ") and first.endswith(
        "eval/accuracy 0.9877, eval/loss 0.05, step 1,000, 3.5 s"
    )
    assert others == ["[a=1] best: step 600, eval/accuracy 0.99", "[a=1] model_dir: outputs/x"]


def test_what_is_the_same_for_all_jobs_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_common([{**SUMMARY, "devices": "CPU, 2 cores"}, {**SUMMARY, "devices": "CPU, 4 cores"}])
    assert capsys.readouterr().out == "strategy: mirrored, 2 replicas\n"


def test_the_summary_on_a_terminal_is_a_table_with_the_same_values() -> None:
    stream = Terminal()
    print_summary(SUMMARY, "outputs/x", stream)
    assert "eval/accuracy" in stream.getvalue() and "0.9877" in stream.getvalue()


def test_the_summary_of_a_failure_says_the_error_and_nothing_it_does_not_know(messages: Messages) -> None:
    stream = io.StringIO()
    print_summary({"status": "failed", "error": "the task was killed by SIGKILL", "metrics": {}}, "x", stream)
    messages.same("screen", stream.getvalue())


@pytest.mark.parametrize(
    ("value", "text"), [(1234567, "1,234,567"), (0.123456, "0.1235"), (3.0, "3"), (math.nan, "nan"), (1e-9, "1e-09")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("secs", "text"), [(8.4, "8s"), (187, "3:07"), (7387, "2:03:07"), (math.inf, "?")])
def test_durations_read_like_a_clock(secs: float, text: str) -> None:
    assert format_secs(secs) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.2 kB"),
        (123_456, "123 kB"),
        (5e6, "5.0 MB"),
        (2.5e9, "2.5 GB"),
        (3e15, "3000 TB"),
    ],
)
def test_sizes_have_units(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (61, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (47 * 3600, "47 h"),
        (49 * 3600, "2 days"),
    ],
)
def test_ages_have_units(secs: float, text: str) -> None:
    assert format_age(secs) == text


def test_a_long_evaluation_says_how_far_it_is_and_a_short_one_nothing(messages: Messages) -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, period_secs=10, clock=clock(0, 9, 100, 105, 111, 112, 121, 200))
    for what, examples in (("eval", 5), ("eval", 10), ("eval", 5), ("eval", 10), ("eval", 1500)):
        progress.count(what, examples)
    for what, examples in (("predict", 2000), ("predict", 3000), ("eval", 3000)):
        progress.count(what, examples)
    messages.same("screen", stream.getvalue())


def test_a_live_count_goes_when_it_has_ended() -> None:
    stream = Terminal()
    progress = RichProgress(Console(file=stream, force_terminal=True, width=120))
    progress.count("predict", 70)
    progress.count("predict", 700)
    progress.message("700 predictions")
    progress.start(10, 0)
    progress.count("eval", 30)
    progress.stop()
    text = stream.getvalue()
    assert "predict" in text and "700 predictions" in text and "eval" in text


ROWS = [["dense/kernel", "[4, 10]", "40"], ["bias", "[10]", "1,000"]]


def test_a_table_off_a_terminal_is_aligned_columns_with_numbers_on_the_right(messages: Messages) -> None:
    stream = io.StringIO()
    print_table("variables", ["name", "shape", "parameters"], ROWS, stream)
    messages.same("screen", stream.getvalue())


def test_a_table_on_a_terminal_has_lines_and_the_same_cells() -> None:
    stream = Terminal()
    print_table("variables", ["name", "shape", "parameters"], ROWS, stream)
    text = stream.getvalue()
    assert "┃" in text and all(cell in text for row in ROWS for cell in row)


def test_a_table_may_have_no_header_and_no_rows() -> None:
    stream = io.StringIO()
    print_table("run", ["", ""], [["a", "b"]], stream)
    print_table("none", ["x"], [], stream)
    assert stream.getvalue().splitlines() == ["run", "a  b", "none", "x"]


def test_a_summary_on_a_narrow_terminal_keeps_numbers_and_units_together(
    monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    phases = {"import": 5.5, "build": 0.7, "trace": 0.3, "save": 0.1, "evaluate": 0.5, "train": 3.7}
    print_summary({"status": "finished", "phases": phases, "mlflow_run_id": "f" * 32}, "outputs/mine", stream)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()]
    messages.same("lines", "\n".join(lines[1:3]))


def test_the_live_line_of_a_launcher_takes_the_place_of_another_and_draws_none() -> None:
    status = StartStatus()
    status.update("jobs run under hydra/launcher=joblib")
    assert not status.say("x"), "there was none"
    status.show("reading the config")
    status.update("jobs run under hydra/launcher=joblib")
    assert status._live.tasks[0].description == "jobs run under hydra/launcher=joblib"
    status.stop()


@pytest.mark.parametrize("share", [0.384, 0.02])
def test_the_summary_says_how_much_of_training_waited_for_its_input(share: float, messages: Messages) -> None:
    stream = io.StringIO()
    print_summary({"status": "finished", "input_bound": share}, "outputs/x", stream)
    messages.same("line", line_of(stream.getvalue(), "input-bound: "))
