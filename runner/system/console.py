"""The output for the user while a run trains and when it has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from runner.system.start_status import shows_live

_UNITS = ("B", "kB", "MB", "GB", "TB")
_NUMBER = re.compile(r"[-+]?[\d,.]*(e[-+]\d+)?|nan|-?inf|-")


class LoopReport(NamedTuple):
    """What is shown of a loop of steps.

    Attributes:
      step: the global step that it has reached.
      loss: the loss of this step.
      steps_per_sec, examples_per_sec: the speed of the loop.
      logged: name -> value, for the values that model_fn logs with on_progress.
    """

    step: int
    loss: float
    steps_per_sec: float
    examples_per_sec: float
    logged: Mapping[str, float] = MappingProxyType({})


class Progress:
    """The display of training's progress; this base class shows nothing.

    `update` is called once per inner loop and must be cheap.
    """

    def start(self, total_steps: int | None, step: int, epochs: Epochs | None = None) -> None:
        """Begin to show training.

        Args:
          total_steps: the last global step; None: training continues until the input ends.
          step: the current global step.
          epochs: the passes over the data; None: they are not counted.
        """

    def update(self, loop: LoopReport) -> None:
        """Show how far training has come."""

    def count(self, what: str, examples: int) -> None:
        """Show the number of examples that the evaluation or prediction `what` has seen."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Show a phase of the journal inside this context."""
        return contextlib.nullcontext()

    def message(self, text: str) -> None:
        """Print a line above the live lines, and remove the line of `count` from them."""

    def stop(self) -> None:
        """End the display of training; may be called several times."""


class PlainProgress(Progress):
    """One line per period, for logs and pipes; the last state is always printed."""

    def __init__(
        self, stream: IO[str] | None = None, period_secs: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._period_secs = period_secs
        self._clock = clock
        self._pace = _Pace(None)
        self._printed_at: float | None = None
        self._unprinted: list[str] = []  # the last state of training, or nothing if it was printed
        self._counted: tuple[str, int] = ("", 0)  # the arguments of the last `count`
        self._counted_at = 0.0  # when a line of the current count was printed, or the count began

    def start(self, total_steps: int | None, step: int, epochs: Epochs | None = None) -> None:
        self._pace = _Pace(total_steps, epochs)
        self._printed_at = None
        self._unprinted = []

    def update(self, loop: LoopReport) -> None:
        facts = self._pace.facts(loop)  # before `time_left`, which uses the speed that `facts` averages
        epoch = self._pace.epoch(loop.step)
        left = self._pace.time_left(loop.step)
        self._unprinted = ["  ".join([self._pace.reached(loop.step), *epoch, *facts, *left])]
        now = self._clock()
        if self._printed_at is None or now - self._printed_at >= self._period_secs:
            self._printed_at = now
            self._say()

    def count(self, what: str, examples: int) -> None:
        now = self._clock()
        last_what, last_examples = self._counted
        self._counted = (what, examples)
        if what != last_what or examples < last_examples:  # another evaluation has begun
            self._counted_at = now  # print nothing if it ends within one period
        elif now - self._counted_at >= self._period_secs:
            self._counted_at = now
            self._say(f"{what}: {examples:,} examples")

    def message(self, text: str) -> None:
        self._say(text)

    def stop(self) -> None:
        self._say()

    def _say(self, *texts: str) -> None:
        """Print the last state if it was not printed yet, and then `texts`."""
        for text in (*self._unprinted, *texts):
            print(text, file=self._stream, flush=True)
        self._unprinted = []


class RichProgress(Progress):
    """Live lines on a terminal. NO_COLOR turns colours off, not the lines.

    Training has two or more lines, as many as the facts need, so that nothing is cut on a narrow terminal. An
    evaluation has one, and so has any other phase.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._live: Live | None = None
        self._pace = _Pace(None)
        self._bar: ProgressBar | None = None
        self._step = 0
        self._facts: Sequence[str] = ()
        self._began = 0.0
        self._counted: tuple[str, int, float] | None = None  # what is counted, its examples so far, when it began
        self._phases: list[tuple[str, float]] = []  # (name, when it began) of each open phase, the innermost last
        self._spinner = Spinner("dots")

    def start(self, total_steps: int | None, step: int, epochs: Epochs | None = None) -> None:
        self.stop()
        self._pace = _Pace(total_steps, epochs)
        self._step = step
        self._facts = ()
        self._began = self._clock()
        self._bar = ProgressBar(total=total_steps, completed=step, pulse=False)
        self._show()

    def update(self, loop: LoopReport) -> None:
        self._facts = self._pace.facts(loop)
        self._step = loop.step
        if self._bar is not None:
            self._bar.update(loop.step)

    def count(self, what: str, examples: int) -> None:
        if self._counted is not None and self._counted[0] == what:
            self._counted = (what, examples, self._counted[2])
            self._show()
        else:
            self._counted = (what, examples, self._clock())
            self._show(at_once=True)

    def message(self, text: str) -> None:
        self._counted = None
        self._console.print(text, markup=False, highlight=False)  # printed above the live lines

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append((name, self._clock()))
        self._show()
        try:
            yield
        finally:
            self._phases.pop()
            if not self._phases and self._bar is None and self._counted is None:
                self.stop()

    def stop(self) -> None:
        # Counts and phases leave nothing on the screen.
        self._counted = None
        self._phases = []
        if self._live is not None:
            self._live.transient = self._bar is None  # the lines of training stay on the screen
            self._live.stop()
        self._live = None
        self._bar = None

    def _show(self, *, at_once: bool = False) -> None:
        """Show the live lines; `at_once` redraws them if they are shown already."""
        if self._live is None:
            self._live = Live(
                get_renderable=self._build_live_lines,
                console=self._console,
                refresh_per_second=5,
                redirect_stdout=self._console.is_terminal,
                redirect_stderr=self._console.is_terminal,
            )
            self._live.start(refresh=True)
        elif at_once:
            self._live.refresh()

    def _build_live_lines(self) -> RenderableType:
        """Return what the live display shows: the lines of training, if it has begun, and below them a spinner with the
        count or else the innermost phase.
        """
        lines: list[RenderableType] = []
        if self._bar is not None:
            lines += self._build_training_lines(self._bar)
        now = self._clock()
        if self._counted is not None:
            what, examples, began = self._counted
            passed = format_secs(now - began)
            lines.append(self._spinner_line(f"{what}  {examples:,} examples  {passed}"))
        elif self._phases:
            name, began = self._phases[-1]
            passed = format_secs(now - began)
            lines.append(self._spinner_line(f"{_PHASE_TEXTS.get(name, name)}  {passed}"))
        return Group(*lines)

    def _build_training_lines(self, bar: ProgressBar) -> list[RenderableType]:
        """Return the line with the progress bar, and the lines with the facts below it."""
        place = "  ".join([*self._pace.epoch(self._step), self._pace.reached(self._step)])
        passed = format_secs(self._clock() - self._began)
        times = "  ".join([passed, *self._pace.time_left(self._step)])
        first = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        if self._pace.total_steps:
            first.add_row(place, bar, times)
        else:
            first.add_row(place, "", times)
        below = [Text(line) for line in _fill_lines(self._facts, self._console.width)]
        return [first, *below]

    def _spinner_line(self, text: str) -> RenderableType:
        self._spinner.update(text=Text(text))
        return self._spinner


_PHASE_TEXTS = {
    "import": "importing TensorFlow",
    "build": "building the input and the model",
    "trace": "tracing the graph",
    "restore": "restoring the checkpoint",
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
    "predict": "predicting",
    "export": "exporting",
}
"""Phase of the journal -> its text on the screen."""


def _fill_lines(facts: Sequence[str], width: int, separator: str = "  ") -> list[str]:
    """Join the facts into lines of up to `width` characters, without splitting a fact.

    Args:
      facts: the facts.
      width: the width.
      separator: stands between two facts. At the end of a line that another line follows, it has no spaces.
    """
    sign = separator.rstrip()  # such as a comma
    spaces = separator[len(sign) :]
    lines: list[str] = []
    for number, fact in enumerate(facts, start=1):
        text = fact
        if number < len(facts):
            text += sign
        if lines and len(lines[-1]) + len(spaces) + len(text) <= width:
            lines[-1] += spaces + text
        else:
            lines.append(text)
    return lines


@dataclasses.dataclass(frozen=True)
class Epochs:
    """The passes of training over its data.

    Attributes:
      total: number of passes.
      steps: steps per pass; not an integer if passes share a step.
      began: the global step before the first pass.
    """

    total: int
    steps: float
    began: int = 0

    def of(self, step: int) -> int:
        """Return the number of the pass, from 1, to which global step `step` belongs."""
        return min(self.total, max(1, math.ceil((step - self.began) / self.steps)))


class _Pace:
    """The facts shown beside a step's number; speeds are averaged over the last loops."""

    def __init__(self, total_steps: int | None, epochs: Epochs | None = None) -> None:
        self.total_steps = total_steps
        self.epochs = epochs
        self._updates = 0
        self._steps_per_sec = 0.0
        self._examples_per_sec = 0.0

    def facts(self, loop: LoopReport) -> list[str]:
        """Count one more loop in the average speeds. Return loss, logged values, steps/s and examples/s, as far as they
        are known.
        """
        self._updates += 1
        numbers = [f"loss {loop.loss:.4g}"]
        for name, value in loop.logged.items():
            numbers.append(f"{name} {value:.4g}")
        if self._updates == 1:  # the first loop traces the graph, so its speed is not representative
            return numbers
        weight = 1.0 if self._updates == 2 else 0.3  # of this loop in the average; the second loop is the first counted
        self._steps_per_sec += weight * (loop.steps_per_sec - self._steps_per_sec)
        self._examples_per_sec += weight * (loop.examples_per_sec - self._examples_per_sec)
        steps_per_sec = format_number(round(self._steps_per_sec, 1))
        examples_per_sec = format_number(round(self._examples_per_sec))
        return [*numbers, f"{steps_per_sec} steps/s", f"{examples_per_sec} examples/s"]

    def reached(self, step: int) -> str:
        """Return `step 30/100`; `step 30` if the last step is not known."""
        return f"step {step}/{self.total_steps}" if self.total_steps else f"step {step}"

    def epoch(self, step: int) -> list[str]:
        """Return `epoch 3/10`; an empty list if passes are not counted."""
        if self.epochs is None:
            return []
        return [f"epoch {self.epochs.of(step)}/{self.epochs.total}"]

    def time_left(self, step: int) -> list[str]:
        """Return `ETA 18s`; an empty list if it is not known."""
        if not self.total_steps or self._steps_per_sec <= 0 or step >= self.total_steps:
            return []
        secs = (self.total_steps - step) / self._steps_per_sec
        return [f"ETA {format_secs(secs)}"]


def build_progress(mode: str, stream: IO[str] | None = None) -> Progress:
    """Return the Progress for `run.progress`: off, plain, rich, or auto (rich on a terminal, else plain)."""
    stream = stream or sys.stderr
    if mode == "off":
        return Progress()
    if shows_live(mode, stream):
        is_terminal = True if mode == "rich" else None  # None: rich finds out
        return RichProgress(Console(file=stream, force_terminal=is_terminal))
    return PlainProgress(stream)


def print_summary(summary: Mapping[str, Any], model_dir: str, stream: IO[str] | None = None, prefix: str = "") -> None:
    """Print the end of a run: a table on a terminal, else `name: value` lines.

    Args:
      prefix: precedes each line, if several runs print at a time.
    """
    stream = stream or sys.stdout
    rows = [*_summary_rows(summary), ("model_dir", model_dir)]
    if stream.isatty() and not prefix:
        width_of_names = max(len(name) for name, _ in rows)
        max_value_width = terminal_width(stream) - width_of_names - 2
        wrapped_rows = []
        for name, value in rows:
            lines = _fill_lines(value.split(", "), max_value_width, ", ")
            wrapped_rows.append((name, "\n".join(lines)))
        table = Table(Column(style="bold"), Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
        _print_rich(table, wrapped_rows, stream)
    else:
        for name, value in rows:
            print(f"{prefix}{name}: {value}", file=stream)
    stream.flush()


def print_job(summary: Mapping[str, Any], model_dir: str, prefix: str = "") -> None:
    """Print the end of a sweep's job: two lines, and between them the rows of the summary that concern this job alone.

    Args:
      prefix: precedes each line, if several jobs run at a time.
    """
    rows = dict(_summary_rows(summary))
    facts = [f"{name} {rows[name]}" for name in summary.get("metrics", {}) if name in rows]
    facts.append(f"step {rows.get('global_step', 0)}")
    phases = summary.get("phases") or {}
    facts.append(_format_short(sum(phases.values())))
    lines = [f"{rows['status']}: {', '.join(facts)}"]
    lines += [f"{name}: {rows[name]}" for name in _ROWS_OF_A_JOB if name in rows]
    lines.append(f"model_dir: {model_dir}")
    for line in lines:
        print(f"{prefix}{line}")
    sys.stdout.flush()


def print_common(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print those of `_ROWS_COMMON_TO_JOBS` that are the same for all jobs of a sweep.

    Args:
      summaries: the summaries of the jobs.
    """
    rows = [dict(_summary_rows(summary)) for summary in summaries]
    for name in _ROWS_COMMON_TO_JOBS:
        values = {row.get(name) for row in rows}
        if len(values) == 1 and values != {None}:
            print(f"{name}: {values.pop()}")
    sys.stdout.flush()


def counted(count: int, what: str) -> str:
    """Return `1 server`, `2 servers`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_number(value: float) -> str:
    """Return a number with four significant digits; integers unchanged."""
    is_whole = isinstance(value, int)
    if not is_whole and math.isfinite(value):
        is_whole = value == int(value) and abs(value) < 1e15
    return f"{int(value):,}" if is_whole else f"{value:.4g}"


def format_secs(secs: float) -> str:
    """Return seconds as `8s`, `3:07` or `2:03:07`."""
    if not math.isfinite(secs):
        return "?"
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}" if minutes else f"{seconds}s"


def format_bytes(size: float) -> str:
    """Return a size as `512 B`, `1.5 kB` or `3.2 GB`."""
    if size < 1000:
        return f"{size:.0f} B"
    power = min(4, int(math.log10(size) // 3))
    size /= 1000**power
    return f"{size:.0f} {_UNITS[power]}" if size >= 100 else f"{size:.1f} {_UNITS[power]}"


def format_age(secs: float) -> str:
    """Return an age as `12 s`, `5 min`, `3 h` or `2 days`."""
    for unit, limit, in_next_unit in (("s", 60, 60), ("min", 60, 60), ("h", 48, 24)):
        if secs < limit:
            return f"{int(secs)} {unit}"
        secs /= in_next_unit
    return f"{int(secs)} days"


def print_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], stream: IO[str] | None = None,
    max_rows: int | None = None,
) -> Any:  # fmt: skip
    """Print a table: with lines on a terminal, else as aligned columns. Numbers are right-aligned.

    Args:
      headers: all empty: no header.
      rows: cells are texts, numbers, shapes, and truths, which are shown as yes or nothing.
      max_rows: the largest number of rows that are printed; None: all.

    Returns:
      All rows for `run.output=json`: each as header -> cell, or of two columns one object, first -> second cell. Names
      have `_` for spaces.
    """
    stream = stream or sys.stdout
    texts = [list(map(_cell_text, row)) for row in rows[:max_rows]]
    if stream.isatty():
        _print_with_lines(title, headers, texts, stream)
    else:
        _print_aligned(title, headers, texts, stream)
    stream.flush()
    if len(headers) == 2:
        return {name.replace(" ", "_"): value for name, value in rows}
    names = [name.replace(" ", "_") for name in headers]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _print_with_lines(title: str, headers: Sequence[str], texts: Sequence[Sequence[str]], stream: IO[str]) -> None:
    """Print a table with lines around its cells, for a terminal. `texts` are the rows."""
    table = Table(title=title, title_justify="left", show_header=any(headers))
    for name, *cells in zip(headers, *texts, strict=True):
        side: Literal["left", "right"] = "right" if _are_numbers(cells) else "left"
        table.add_column(name, justify=side, overflow="fold")
    _print_rich(table, texts, stream)


def _print_aligned(title: str, headers: Sequence[str], texts: Sequence[Sequence[str]], stream: IO[str]) -> None:
    """Print a table as columns that are padded with spaces. `texts` are the rows."""
    padded_columns = []
    for column in zip(headers, *texts, strict=True):
        width = max(map(len, column))
        pad = str.rjust if _are_numbers(column[1:]) else str.ljust
        padded_columns.append([pad(cell, width) for cell in column])
    header, *padded_rows = zip(*padded_columns, strict=True)
    print(title, file=stream)
    if any(headers):
        padded_rows = [header, *padded_rows]
    for row in padded_rows:
        print("  ".join(row).rstrip(), file=stream)


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(cell) for cell in cells)


def _cell_text(cell: Any) -> str:
    """Return how a cell of a table is printed."""
    if isinstance(cell, list):  # a shape
        sizes = [str(size) for size in cell]
        if cell and cell[0] is None:
            sizes[0] = "batch"
        return f"[{', '.join(sizes)}]"
    if isinstance(cell, bool):
        return "yes" if cell else ""
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell)


def _print_rich(table: Table, rows: Iterable[Sequence[str]], stream: IO[str]) -> None:
    for row in rows:
        table.add_row(*row)
    Console(file=stream, markup=False, emoji=False, highlight=False).print(table)


def terminal_width(stream: IO[str]) -> int:
    """Return the number of characters per line of the terminal `stream`."""
    return Console(file=stream).width


def table_width(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table with lines whose cells have one line each."""
    return 1 + sum(3 + max(map(len, column)) for column in zip(headers, *rows, strict=True))


def format_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table that `print_table` prints outside of a terminal."""
    stream = io.StringIO()
    print_table(title, headers, rows, stream)
    return stream.getvalue().rstrip("\n")


def relative(path: Path) -> str:
    """Return `path` as the user would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


_ROWS_OF_A_JOB = (
    "best",
    "error",
    "asked to stop",
    "stopped early",
    "repeated_steps",
    "lost workers",
    "predictions",
    "exports",
    "resume",
)
"""Rows of a summary that the end of a sweep's job has, beside its metrics."""

_ROWS_COMMON_TO_JOBS = ("strategy", "devices")
"""Rows that the end of a sweep has once, if they are the same for all jobs."""


def _summary_rows(summary: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Return the (name, value) rows of a printed summary, without those that have no value."""
    rows: list[tuple[str, Any]] = [
        ("status", summary["status"]),
        ("error", summary.get("error")),
        ("asked to stop", summary.get("interrupted_by")),
        ("stopped early", summary.get("stopped_early")),
    ]
    step = summary.get("global_step")
    if step is not None:
        rows.append(("global_step", format_number(step)))
    for name, value in summary.get("metrics", {}).items():
        rows.append((name, format_number(float(value))))  # JSON has no NaN, so it is the text "nan"
    rows.append(("best", summary.get("best")))
    for name in ("repeated_steps", "steps_per_sec"):
        if summary.get(name):
            rows.append((name, format_number(summary[name])))
    rows += [
        ("lost workers", summary.get("lost_workers")),
        ("train.gradient_accumulation", summary.get("found_accumulation")),
        ("input-bound", _input_bound_text(summary.get("input_bound"))),
        ("time", _phase_times(summary.get("phases") or {})),
        ("slowest start", summary.get("slowest_start")),
        ("strategy", _strategy(summary)),
        ("devices", summary.get("devices")),
        ("checkpoint", summary.get("checkpoint")),
        ("predictions", summary.get("predictions")),
        ("exports", summary.get("exports")),
        ("mlflow_run_id", summary.get("mlflow_run_id")),
        *(summary.get("addresses") or {}).items(),
        ("resume", summary.get("resume")),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _phase_times(phases: Mapping[str, float]) -> str:
    """Return `import 2.9 s, train 12.3 s`, without what took no time."""
    return ", ".join(f"{name} {_format_short(secs)}" for name, secs in phases.items() if secs >= 0.05)


def _strategy(summary: Mapping[str, Any]) -> str | None:
    """Return `multi_worker, 2 workers`; None if the run did not come so far."""
    replicas = summary.get("num_replicas")
    if replicas is None:
        return None
    tasks = summary.get("cluster") or [counted(replicas, "replica")]
    return ", ".join([str(summary.get("strategy")), *tasks])


def _format_short(secs: float) -> str:
    """Return a duration with tenths of a second if it is shorter than a minute."""
    return format_secs(secs) if secs >= 60 else f"{secs:.1f} s"


_MUCH_INPUT_SHARE = 0.05
"""Share of step time spent waiting for input above which the summary refers to the documentation."""


def _input_bound_text(share: float | None) -> str | None:
    """Return `38 %; what to do: runner --help training.md#input`; None if it was not measured."""
    if share is None:
        return None
    written = f"{100 * share:.0f} %"
    if share > _MUCH_INPUT_SHARE:
        written += "; what to do: runner --help training.md#input"
    return written
