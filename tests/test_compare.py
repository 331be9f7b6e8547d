"""benchmarks/compare.py reads what the benchmarks print."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # they import what they share from beside them
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_rows_are_read_from_the_tables_that_benchmarks_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare, rounds, startup = (loaded(name, monkeypatch) for name in ("compare", "_rounds", "startup"))
    times = rounds.Times(1234.5e-6, 2e-6)
    rounds.show(
        "a step, 20 steps a round",
        {"by hand": [times], "ours, native": [times]},
        [rounds.Ratio("ours, native", "by hand")],
    )
    startup.show("first step, digits", {"bare script": [startup.Times(2.5, 3.25)]}, 1.1)
    startup.show("first step, deep", {"bare script": [startup.Times(4.5, 5.25)]}, 1.1)
    assert compare.parse_tables(capsys.readouterr().out) == {
        "by hand": compare.Row(1234.5, 2.0),
        "ours, native": compare.Row(1234.5, 2.0),
        "first step, digits: bare script": compare.Row(2.5, 3.25),
        "first step, deep: bare script": compare.Row(4.5, 5.25),
    }


def test_rows_of_both_trees_are_shown_with_the_spread_of_their_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = loaded("compare", monkeypatch)
    row = compare.Row
    pairs = compare.Pairs([row(11, 2), row(12, 2), row(13, None)], [row(10, 1), row(10, 2), row(10, None)])
    compare.show("tiny_step", {"ours": pairs})
    header, line = capsys.readouterr().out.splitlines()[1:]
    assert header.split() == ["tiny_step", "this", "other", "ratio", "min", "max", "CPU", "ratio", "min", "max"]
    assert line.split() == ["ours", "12.00", "10.00", "1.20", "1.10", "1.30", "1.50", "1.00", "2.00", "slower"]


def test_a_verdict_needs_three_rounds_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = loaded("compare", monkeypatch)
    assert [compare.verdict(ratios) for ratios in ([1.1, 1.2], [1.1, 1.2, 0.9], [0.8, 0.9, 0.7])] == ["", "", "faster"]
