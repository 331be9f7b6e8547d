"""Standard output and error that never end a run."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SAYS_MUCH = """
import sys
from runner.system.standard_streams import keep_saying
keep_saying()
for number in range(100_000):
    print(number)
print(sys.stdout.isatty(), file=sys.stderr)
sys.exit(3)
"""


def run(shell: str, **streams: int) -> subprocess.CompletedProcess[str]:
    """Runs `shell`, where $SAY is a program that says much and exits with 3."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PY": sys.executable, "CODE": SAYS_MUCH}
    line = shell.replace("$SAY", '"$PY" -c "$CODE"')
    return subprocess.run(["bash", "-c", line], env=env, stderr=subprocess.PIPE, text=True, timeout=150, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize("shell", ["$SAY | head -1; exit ${PIPESTATUS[0]}", "$SAY > /dev/full", "$SAY 1>&-"])
def test_nobody_who_reads_is_no_reason_to_end(shell: str) -> None:
    ended = run(shell, stdout=subprocess.DEVNULL)
    assert (ended.returncode, ended.stderr) == (3, "False\n")


def test_a_closed_terminal_is_no_reason_to_end() -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    assert run("$SAY", stdout=theirs).returncode == 3
    os.close(theirs)


def test_what_is_said_arrives() -> None:
    ended = run("$SAY | tail -1", stdout=subprocess.PIPE)
    assert ended.stdout == "99999\n"
