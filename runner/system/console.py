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
from typing import IO, Any, NamedTuple

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
        self._said_at: float | None = None
        self._unsaid: list[str] = []
        self._counted: tuple[str, int] = ("", 0)
        self._counted_at = 0.0

    def start(self, total_steps: int | None, step: int, epochs: Epochs | None = None) -> None:
        self._pace, self._said_at, self._unsaid = _Pace(total_steps, epochs), None, []

    def update(self, loop: LoopReport) -> None:
        step, facts = loop.step, self._pace.facts(loop)
        total = f"/{self._pace.total_steps}" if self._pace.total_steps else ""
        epoch, left = self._pace.epoch(step), self._pace.time_left(step)
        self._unsaid = ["  ".join([f"step {step}{total}", *epoch, *facts, *left])]
        now = self._clock()
        if self._said_at is None or now - self._said_at >= self._period_secs:
            self._said_at = now
            self._say()

    def count(self, what: str, examples: int) -> None:
        now, (last_what, last_examples) = self._clock(), self._counted
        self._counted = (what, examples)
        if what != last_what or examples < last_examples:
            self._counted_at = now  # a new evaluation: print nothing if it ends within one period
        elif now - self._counted_at >= self._period_secs:
            self._counted_at = now
            self._say(f"{what}: {examples:,} examples")

    def message(self, text: str) -> None:
        self._say(text)

    def stop(self) -> None:
        self._say()

    def _say(self, *texts: str) -> None:
        """Print the last state if it was not printed yet, and then `texts`."""
        for text in (*self._unsaid, *texts):
            print(text, file=self._stream, flush=True)
        self._unsaid = []


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
        self._counted: tuple[str, int, float] | None = None
        self._phases: list[tuple[str, float]] = []
        self._spinner = Spinner("dots")

    def start(self, total_steps: int | None, step: int, epochs: Epochs | None = None) -> None:
        self.stop()
        self._pace, self._step, self._facts, self._began = _Pace(total_steps, epochs), step, (), self._clock()
        self._bar = ProgressBar(total=total_steps, completed=step, pulse=False)
        self._show()

    def update(self, loop: LoopReport) -> None:
        self._facts, self._step = self._pace.facts(loop), loop.step
        if self._bar is not None:
            self._bar.update(loop.step)

    def count(self, what: str, examples: int) -> None:
        is_new = self._counted is None or self._counted[0] != what
        began = self._clock() if self._counted is None or is_new else self._counted[2]
        self._counted = (what, examples, began)
        self._show(at_once=is_new)

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
        self._counted, self._phases = None, []  # counts and phases leave nothing on the screen
        if self._live is not None:
            self._live.transient = self._bar is None
            self._live.stop()
        self._live = self._bar = None

    def _show(self, *, at_once: bool = False) -> None:
        """Show the live lines; `at_once` redraws them if they are shown already."""
        if self._live is not None:
            if at_once:
                self._live.refresh()
        else:
            self._live = Live(
                get_renderable=self._lines, console=self._console, refresh_per_second=5,
                redirect_stdout=self._console.is_terminal, redirect_stderr=self._console.is_terminal,
            )  # fmt: skip
            self._live.start(refresh=True)

    def _lines(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._bar is not None:
            lines += self._training(self._bar)
        now = self._clock()
        if self._counted is not None:
            what, examples, began = self._counted
            lines.append(self._spinning(f"{what}  {examples:,} examples  {format_secs(now - began)}"))
        elif self._phases:
            name, began = self._phases[-1]
            lines.append(self._spinning(f"{_PHASES.get(name, name)}  {format_secs(now - began)}"))
        return Group(*lines)

    def _training(self, bar: ProgressBar) -> list[RenderableType]:
        """Return the line with the progress bar, and the lines with the facts below it."""
        total = self._pace.total_steps
        first = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        place = "  ".join([*self._pace.epoch(self._step), f"step {self._step}{f'/{total}' if total else ''}"])
        secs = format_secs(self._clock() - self._began)
        first.add_row(place, bar if total else "", "  ".join([secs, *self._pace.time_left(self._step)]))
        return [first, *(Text(line) for line in _filled(self._facts, self._console.width))]

    def _spinning(self, text: str) -> RenderableType:
        self._spinner.update(text=Text(text))
        return self._spinner


_PHASES = {
    "import": "importing TensorFlow", "build": "building the input and the model", "trace": "tracing the graph",
    "restore": "restoring the checkpoint", "save": "saving a checkpoint", "evaluate": "evaluating",
    "predict": "predicting", "export": "exporting",
}  # fmt: skip
"""Phase of the journal -> its text on the screen."""


def _filled(facts: Sequence[str], width: int, between: str = "  ") -> list[str]:
    """Join the facts into lines of up to `width` characters, without splitting a fact.

    Args:
      facts: the facts.
      width: the width.
      between: separates two facts. At the end of a line that another line follows, it stands without its spaces.
    """
    lines: list[str] = []
    for number, fact in enumerate(facts):
        end = between.rstrip() if number < len(facts) - 1 else ""
        if lines and len(lines[-1]) + len(between) - len(between.rstrip()) + len(fact) + len(end) <= width:
            lines[-1] += f"{between[len(between.rstrip()) :]}{fact}{end}"
        else:
            lines.append(f"{fact}{end}")
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
        self.total_steps, self.epochs = total_steps, epochs
        self._updates = 0
        self._steps_per_sec = self._examples_per_sec = 0.0

    def facts(self, loop: LoopReport) -> list[str]:
        """Return loss, logged values, steps/s and examples/s, as far as they are known."""
        self._updates += 1
        numbers = [f"loss {loop.loss:.4g}", *(f"{name} {value:.4g}" for name, value in loop.logged.items())]
        if self._updates == 1:  # the first loop traces the graph, so its speed is not representative
            return numbers
        weight = 1.0 if self._updates == 2 else 0.3
        self._steps_per_sec += weight * (loop.steps_per_sec - self._steps_per_sec)
        self._examples_per_sec += weight * (loop.examples_per_sec - self._examples_per_sec)
        return [
            *numbers,
            f"{format_number(round(self._steps_per_sec, 1))} steps/s",
            f"{format_number(round(self._examples_per_sec))} examples/s",
        ]

    def epoch(self, step: int) -> list[str]:
        """Return `epoch 3/10`; an empty list if passes are not counted."""
        return [f"epoch {self.epochs.of(step)}/{self.epochs.total}"] if self.epochs else []

    def time_left(self, step: int) -> list[str]:
        """Return `ETA 18s`; an empty list if it is not known."""
        if not self.total_steps or self._steps_per_sec <= 0 or step >= self.total_steps:
            return []
        return [f"ETA {format_secs((self.total_steps - step) / self._steps_per_sec)}"]


def build_progress(mode: str, stream: IO[str] | None = None) -> Progress:
    """Return the Progress for `run.progress`: off, plain, rich, or auto (rich on a terminal, else plain)."""
    stream = stream or sys.stderr
    if mode == "off":
        return Progress()
    if shows_live(mode, stream):
        return RichProgress(Console(file=stream, force_terminal=True if mode == "rich" else None))
    return PlainProgress(stream)


def print_summary(summary: Mapping[str, Any], model_dir: str, stream: IO[str] | None = None, prefix: str = "") -> None:
    """Print the end of a run: a table on a terminal, else `name: value` lines.

    Args:
      prefix: precedes each line, if several runs print at a time.
    """
    stream = stream or sys.stdout
    rows = [*_summary_rows(summary), ("model_dir", model_dir)]
    if stream.isatty() and not prefix:
        columns = Column(style="bold"), Column(overflow="fold")
        room = terminal_width(stream) - max(len(name) for name, _ in rows) - 2
        filled = [(name, "\n".join(_filled(value.split(", "), room, ", "))) for name, value in rows]
        _print_rich(Table(*columns, show_header=False, box=None, pad_edge=False), filled, stream)
    else:
        for name, value in rows:
            print(f"{prefix}{name}: {value}", file=stream)
    stream.flush()


def print_job(summary: Mapping[str, Any], model_dir: str, prefix: str = "") -> None:
    """Print the end of a sweep's job in two lines, and what happened to this job alone.

    Args:
      prefix: precedes each line, if several jobs run at a time.
    """
    rows = dict(_summary_rows(summary))
    found = [f"{name} {rows[name]}" for name in summary.get("metrics", {}) if name in rows]
    secs = sum((summary.get("phases") or {}).values())
    facts = [", ".join(found), f"step {rows.get('global_step', 0)}", _format_short(secs)]
    lines = [f"{rows['status']}: {', '.join(filter(None, facts))}"]
    lines += [f"{name}: {rows[name]}" for name in _OF_ONE_JOB if name in rows]
    for line in (*lines, f"model_dir: {model_dir}"):
        print(f"{prefix}{line}")
    sys.stdout.flush()


def print_common(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print what is the same for all jobs of a sweep."""
    rows = [dict(_summary_rows(summary)) for summary in summaries]
    for name in _OF_ALL_JOBS:
        values = {one.get(name) for one in rows}
        if len(values) == 1 and values != {None}:
            print(f"{name}: {values.pop()}")
    sys.stdout.flush()


def counted(count: int, what: str) -> str:
    """Return `1 server`, `2 servers`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def format_number(value: float) -> str:
    """Return a number with four significant digits; integers unchanged."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


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
    for unit, length in (("s", 60), ("min", 60), ("h", 48)):
        if secs < length:
            return f"{int(secs)} {unit}"
        secs /= 60 if unit != "h" else 24
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
    texts = [[_text_of(cell) for cell in row] for row in rows[:max_rows]]
    columns = list(zip(headers, *texts, strict=True))
    is_numeric = [all(_NUMBER.fullmatch(cell) for cell in cells) for _, *cells in columns]
    if stream.isatty():
        table = Table(title=title, title_justify="left", show_header=any(headers))
        for name, is_right in zip(headers, is_numeric, strict=True):
            table.add_column(name, justify="right" if is_right else "left", overflow="fold")
        _print_rich(table, texts, stream)
    else:
        sides = [str.rjust if is_right else str.ljust for is_right in is_numeric]
        widths = [max(map(len, column)) for column in columns]
        print(title, file=stream)
        for row in (headers, *texts) if any(headers) else texts:
            cells = (pad(cell, width) for pad, cell, width in zip(sides, row, widths, strict=True))
            print("  ".join(cells).rstrip(), file=stream)
    stream.flush()
    if len(headers) == 2:
        return {name.replace(" ", "_"): value for name, value in rows}
    return [dict(zip([name.replace(" ", "_") for name in headers], row, strict=True)) for row in rows]


def _text_of(cell: Any) -> str:
    if isinstance(cell, list):
        return "[" + ", ".join("batch" if i == 0 and size is None else str(size) for i, size in enumerate(cell)) + "]"
    return ("yes" if cell else "") if isinstance(cell, bool) else f"{cell:,}" if isinstance(cell, int) else str(cell)


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
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


_OF_ONE_JOB = (
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

_OF_ALL_JOBS = ("strategy", "devices")
"""Those that the end of a sweep has, where they are the same for all jobs."""


def _summary_rows(summary: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Return (name, value) rows for the summary."""
    step, replicas = summary.get("global_step"), summary.get("num_replicas")
    tasks = [counted(replicas, "replica")] if replicas is not None and not summary.get("cluster") else []
    strategy = ", ".join([str(summary.get("strategy")), *(summary.get("cluster") or tasks)])
    phases = {name: secs for name, secs in (summary.get("phases") or {}).items() if secs >= 0.05}
    rows: list[tuple[str, Any]] = [
        ("status", summary["status"]),
        ("error", summary.get("error")),
        ("asked to stop", summary.get("interrupted_by")),
        ("stopped early", summary.get("stopped_early")),
        ("global_step", None if step is None else format_number(step)),
        # JSON has no NaN, so it is the text "nan".
        *((name, format_number(float(value))) for name, value in summary.get("metrics", {}).items()),
        ("best", summary.get("best")),
        *((name, summary.get(name) and format_number(summary[name])) for name in ("repeated_steps", "steps_per_sec")),
        ("lost workers", summary.get("lost_workers")),
        ("train.gradient_accumulation", summary.get("found_accumulation")),
        ("input-bound", _input_bound(summary.get("input_bound"))),
        ("time", ", ".join(f"{name} {_format_short(secs)}" for name, secs in phases.items())),
        ("slowest start", summary.get("slowest_start")),
        ("strategy", None if replicas is None else strategy),
        ("devices", summary.get("devices")),
        *((name, summary.get(name)) for name in ("checkpoint", "predictions", "exports", "mlflow_run_id")),
        *(summary.get("addresses") or {}).items(),
        ("resume", summary.get("resume")),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _format_short(secs: float) -> str:
    """Return a duration with tenths of a second if it is shorter than a minute."""
    return format_secs(secs) if secs >= 60 else f"{secs:.1f} s"


_INPUT_BOUND = 0.05
"""Share of step time spent waiting for input above which the summary refers to the documentation."""


def _input_bound(share: float | None) -> str | None:
    """Return `38 %; what to do: runner --help training.md#input`; None if it was not measured."""
    if share is None:
        return None
    written = f"{100 * share:.0f} %"
    return f"{written}; what to do: runner --help training.md#input" if share > _INPUT_BOUND else written
