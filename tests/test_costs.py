"""What tests cost is measured with the processes that they start, and the list of dear ones names tests that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cost

MEASURES = """
import sys
import pytest
from pathlib import Path
from tests.support import cost

cost.FILE = Path(sys.argv[1], "build", "cost.jsonl")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]], plugins=[cost.Cost(), cost.Summary()]))
"""
BURNS = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass\n"
TESTS = f"""
import subprocess
import sys
import time
from pathlib import Path

import pytest

BURNS = {BURNS!r}

def test_itself():
    exec(BURNS, {{}})

def test_child():
    subprocess.run([sys.executable, "-c", BURNS])

@pytest.fixture(scope="module")
def shared():
    end = time.process_time() + 1.0
    while time.process_time() < end:
        pass

def test_sharing(shared):
    pass

def test_orphan(tmp_path):
    code = BURNS + f"open({{str(tmp_path / 'done')!r}}, 'w')"
    starts = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    subprocess.run([sys.executable, "-c", starts, code])
    while not (tmp_path / "done").exists():
        time.sleep(0.05)
"""


def test_every_function_of_the_list_exists() -> None:
    for function in cost.read_list():
        file, _, name = function.partition("::")
        assert re.search(rf"(?m)^def {name}\(", (cost.ROOT / file).read_text()), (
            f"{function}: make test-all ARGS=--cost"
        )


@pytest.mark.processes
def test_a_test_costs_what_it_and_its_processes_use(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-c", MEASURES, str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # it may have --cost
    ran = subprocess.run(command, cwd=cost.ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (tmp_path / "build" / "cost.jsonl").read_text().splitlines()
    rows = {row.test.partition("::")[2]: row for row in (cost.Row(**json.loads(line)) for line in lines)}
    shared, sharing = rows["shared"], rows["test_sharing"]
    assert shared.own >= 1.0 and sharing.own < 0.5
    itself, child, orphan = (rows[f"test_{name}"] for name in ("itself", "child", "orphan"))
    assert itself.own >= 1.0 and itself.children == 0.0 and itself.starts == {}
    assert child.own < 1.0 <= child.children and child.starts == {"other Python": 1}
    assert orphan.own < 1.0 and orphan.children > 0.2  # what it used after the last look is lost
    assert orphan.starts["other Python"] >= 1  # the first of the two may have ended before a look
