"""Journal lines: what is written is what is read, also while they grow and after a crash."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from runner.tracking.journal import Journal, NullJournal, journal_path, read_journal


def test_reads_metrics_and_events_in_the_order_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path, clock=iter([1.0, 2.5]).__next__)
    journal.metrics(100, {"train/loss": 0.5})
    journal.event("result", global_step=100)
    journal.close()
    lines, offset = read_journal(path)
    assert lines == [
        {"time": 1.0, "step": 100, "metrics": {"train/loss": 0.5}},
        {"time": 2.5, "event": "result", "global_step": 100},
    ]
    assert offset == path.stat().st_size


def test_goes_on_from_the_offset(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.event("a")
    _, offset = read_journal(tmp_path / "j")
    journal.event("b")
    lines, _ = read_journal(tmp_path / "j", offset)
    assert [line["event"] for line in lines] == ["b"]


def test_a_half_written_last_line_is_left_for_the_next_call(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"time": 1, "event": "a"}\n{"time": 2, "ev')
    lines, offset = read_journal(path)
    assert [line["event"] for line in lines] == ["a"]
    with path.open("a") as file:
        file.write('ent": "b"}\n')
    assert read_journal(path, offset)[0] == [{"time": 2, "event": "b"}]


def test_a_writer_after_a_crash_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"time": 1, "event": "a"}\n{"time": 2, "ev')
    Journal(path).event("b")
    assert [line["event"] for line in read_journal(path)[0]] == ["a", "b"]


def test_a_journal_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none", 0) == ([], 0)


def test_numbers_that_json_lacks_come_back(tmp_path: Path) -> None:
    Journal(tmp_path / "j").metrics(1, {"a": math.nan, "b": -math.inf, "c": np.float64(0.5)})
    for line in (tmp_path / "j").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest_fail(name))
    metrics = read_journal(tmp_path / "j")[0][0]["metrics"]
    assert math.isnan(metrics["a"]) and metrics["b"] == -math.inf and metrics["c"] == 0.5


def pytest_fail(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_lines_of_steps_are_those_that_json_writes_of_each(tmp_path: Path) -> None:
    steps: list[tuple[int, dict[str, float]]] = [
        (1, {"a%d": 0.1, 'b"c\\': 1e300, "d\u00e9": -0.0}),
        (2, {"d\u00e9": 3, 'b"c\\': 1e-9, "a%d": np.float64(0.1)}),  # the same names in another order
        (3, {"a%d": 1e308, 'b"c\\': 1e308}),  # a sum that overflows
        (4, {"a%d": 0.5, 'b"c\\': math.nan}),
        (np.int64(5), {}),  # type: ignore[list-item]
    ]
    Journal(tmp_path / "j", clock=lambda: 1763647000.125).metrics_of_steps(steps)
    shown = [{name: "nan" if one != one else float(one) for name, one in values.items()} for _, values in steps]
    assert (tmp_path / "j").read_text().splitlines() == [
        json.dumps({"time": 1763647000.125, "step": number, "metrics": values})
        for number, values in enumerate(shown, 1)
    ]


def test_events_take_numpy_values_and_paths(tmp_path: Path) -> None:
    Journal(tmp_path / "j").event(
        "e", step=np.int64(3), values=[np.float64(1.5)], path=Path("x"), nested={"a": math.nan}
    )
    (line,) = read_journal(tmp_path / "j")[0]
    assert (line["step"], line["values"], line["path"], line["nested"]) == (3, [1.5], "x", {"a": "nan"})


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")

    def write(name: str) -> None:
        for step in range(200):
            journal.metrics(step, {name: step})

    threads = [threading.Thread(target=write, args=(f"m{n}",)) for n in range(4)]
    [thread.start() for thread in threads]  # type: ignore[func-returns-value]
    [thread.join() for thread in threads]  # type: ignore[func-returns-value]
    lines, _ = read_journal(tmp_path / "j")
    assert len(lines) == 800


def test_the_null_journal_takes_everything() -> None:
    journal = NullJournal()
    journal.metrics(1, {"a": 1.0})
    journal.event("x", y=1)
    with journal.phase("build"):
        journal.took("trace", 1.0)
    assert journal.phases == {}
    journal.close()


def timed(path: Path, *times: float) -> Journal:
    """A journal whose timer says these times."""
    return Journal(path, timer=iter(times).__next__)


def phases_in(path: Path) -> list[tuple[str, float]]:
    return [(line["name"], line["secs"]) for line in read_journal(path)[0] if line["event"] == "phase"]


def test_a_phase_is_noted_when_it_is_left(tmp_path: Path) -> None:
    journal = timed(tmp_path / "j", 10.0, 11.5, 20.0, 20.25)
    with journal.phase("build"):
        assert phases_in(tmp_path / "j") == []
    with journal.phase("build"):
        pass
    assert phases_in(tmp_path / "j") == [("build", 1.5), ("build", 0.25)]
    assert journal.phases == {"build": 1.75}


def test_a_phase_that_fails_is_noted_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), timed(tmp_path / "j", 0.0, 2.0).phase("trace"):
        raise KeyError
    assert phases_in(tmp_path / "j") == [("trace", 2.0)]


def test_phases_inside_a_phase_do_not_count_twice(tmp_path: Path) -> None:
    journal = timed(tmp_path / "j", 0.0, 1.0, 1.5, 2.5, 4.0, 9.0)
    with journal.phase("evaluate"):  # from 0 to 9
        with journal.phase("build"):  # from 1 to 4
            with journal.phase("trace"):  # from 1.5 to 2.5
                pass
        journal.took("train", 2.0)  # measured elsewhere: part of no other phase
    assert phases_in(tmp_path / "j") == [("trace", 1.0), ("build", 2.0), ("train", 2.0), ("evaluate", 6.0)]


def test_each_task_has_a_journal_of_its_own(tmp_path: Path) -> None:
    assert journal_path(tmp_path).name == "events.chief-0.jsonl"
    assert journal_path(tmp_path, "worker", 2).name == "events.worker-2.jsonl"
