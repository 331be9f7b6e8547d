"""`python -m runner cluster.min_workers=1` that loses workers for good, and by hand with each number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lost_workers import Case, Loss, check

# A run and the restarts by hand take a minute. tests/launch/test_gang.py has tasks that do not import TensorFlow.
pytestmark = [pytest.mark.slow, pytest.mark.alone]

CASES = {
    "mid-epoch, then during an evaluation": Case(3, (Loss(1, "metrics", 8, 0.0), Loss(0, "evaluating", 2, 0.1)), 1),
    "during an asynchronous save": Case(2, (Loss(0, "saving", 2, 0.0),)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_run_that_lost_workers_comes_to_the_bits_of_restarts_by_hand(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
