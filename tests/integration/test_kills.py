"""`python -m runner` with SIGKILL of its supervisor, tasks and watchdogs; `python -m tests.support.kills` does many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kills import Case, Kill, check

pytestmark = [pytest.mark.slow, pytest.mark.alone]

CASES = {
    "default": (
        Kill("supervisor", 0, "first_step", 0.1, 1, waits=False),
        Kill("watchdog", 0, "checkpoint", 0.0, 1, waits=True),
        Kill("task", 0, "checkpoint", 0.05, 2, waits=True),
        Kill("supervisor", 0, "result", 0.2, 1, waits=True),
    ),
    "mirrored": (
        Kill("task", 0, "metrics", 0.05, 3, waits=True),
        Kill("supervisor", 0, "checkpoint", 0.1, 4, waits=True),
        Kill("supervisor", 0, "clock", 4.0, 1, waits=False),
    ),
    "multi_worker": (
        Kill("task", 1, "checkpoint", 0.05, 2, waits=True),
        Kill("watchdog", 1, "first_step", 0.0, 1, waits=True),
        Kill("task", 0, "checkpoint", 0.1, 5, waits=True),
        Kill("supervisor", 0, "metrics", 0.1, 20, waits=False),
    ),
}


@pytest.mark.parametrize("strategy", CASES)
def test_a_run_that_is_killed_comes_to_all_that_an_undisturbed_run_has(strategy: str, tmp_path: Path) -> None:
    check(Case(strategy, CASES[strategy], has_database=strategy != "default"), tmp_path)
