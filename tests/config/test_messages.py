"""Every mistake in a config is refused before TensorFlow is imported, with its kind and one message.

mistakes.txt holds the commands, and the kind and the message of each: a text that changes, changes there alone.
`python -m tests.config.test_messages` (`make messages`) writes it anew; read its diff.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from tests.support.mutations import mutations
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("mistakes.txt")
KIND = "    "
"""Begins the line with the kind and the message of the command above it.

A message that ends in "..." goes on with the words of another package.
"""


class Refusal(NamedTuple):
    """What became of a command."""

    code: int
    said: str
    kind: str
    left: list[str]
    imported: list[str]

    @property
    def line(self) -> str:
        said = self.said.removeprefix("runner: ").rstrip()
        return f"{self.kind}: {said.replace(sysconfig.get_path('stdlib'), '<standard library>')}"


REFUSE_ALL = """
import contextlib, gc, io, json, os, pathlib, sys
import yaml
yaml.SafeLoader = yaml.CSafeLoader  # the same of our own files, and ten times as fast
from runner.config.hydra import Composer
from runner.launch import app, command, supervisor
from runner.tracking.summary import Outcome

class Sharing(Composer):
    composed = {}

    def __init__(self, *places):
        super().__init__(*places)
        self._bases = self.composed.setdefault(places, {})  # as the jobs of a sweep share them

    def _base(self, words):
        base = super()._base(words)
        base.hydra.runtime.cwd = os.getcwd()  # it was composed in that of another command
        return base

def noted(error, argv, mistake_in=command.mistake_in):
    mistake = mistake_in(error, argv)
    kinds.append(type(mistake).__name__)
    return mistake

gc.disable()  # a tenth of the time, for 50 MB
supervisor.run = lambda *args, **kwargs: Outcome(0, "accepted")  # nothing trains here
command.mistake_in = noted
app.Composer = Sharing
results = []
for number, arguments in enumerate(json.load(sys.stdin)):
    pathlib.Path(str(number)).mkdir()
    os.chdir(str(number))
    sys.argv, kinds = ["runner", *arguments], ["none"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = app.run_command_line()
    shown = said.getvalue().replace(os.getcwd(), "<here>").replace(os.environ["PYTHONPATH"], "<runner>")
    left = [str(path) for path in pathlib.Path(".").rglob("outputs/*")]
    imported = [name for name in ("tensorflow", "mlflow") if name in sys.modules]
    results.append((code, shown, kinds[-1], left, imported))
    os.chdir("..")
json.dump(results, sys.stdout)
"""


def refused(commands: Sequence[Sequence[str]]) -> list[Refusal]:
    """Return what becomes of each command, in a fresh process: in this one TensorFlow may be loaded."""
    with TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-c", REFUSE_ALL], cwd=folder, capture_output=True, input=json.dumps(commands), text=True,
            check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    last = result.stdout.splitlines()[-1]  # after what Hydra says of a sweep
    return [Refusal(*case) for case in json.loads(last)]


def read_messages() -> list[tuple[list[str], str]]:
    """Return (arguments, line with the kind and the message) of each command of the file."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    return [(shlex.split(command), line.strip()) for command, line in zip(lines[::2], lines[1::2], strict=True)]


MESSAGES = read_messages()


MUTATIONS = mutations(30, 33)


@pytest.fixture(scope="module")
def refusals(request: pytest.FixtureRequest) -> dict[tuple[str, ...], Refusal]:
    """What became of the commands that are tested now."""
    items: list[Any] = request.session.items
    commands = []
    for item in items:
        asking = getattr(item, "originalname", "")
        if asking == test_a_mistake_is_refused_with_its_kind_and_one_message.__name__:
            commands.append(MESSAGES[item.callspec.params["number"]][0])
        elif asking == test_a_random_value_of_a_random_key_is_refused_with_one_message_or_accepted.__name__:
            commands.append(MUTATIONS[item.callspec.params["number"]])
    return dict(zip(map(tuple, commands), refused(commands), strict=True))


@pytest.mark.processes
@pytest.mark.parametrize(
    "number",
    # Three of four are left to `make test-slow`.
    slow_but(range(len(MESSAGES)), *range(0, len(MESSAGES), 4)),
    ids=[" ".join(arguments) for arguments, _ in MESSAGES],
)
def test_a_mistake_is_refused_with_its_kind_and_one_message(
    number: int, refusals: dict[tuple[str, ...], Refusal]
) -> None:
    arguments, line = MESSAGES[number]
    refusal = refusals[tuple(arguments)]
    assert refusal.code == 2
    assert refusal.line.startswith(line.removesuffix("...")) if line.endswith("...") else refusal.line == line
    said = refusal.said.splitlines()
    assert len(said) == 1 and said[0].startswith("runner: ")  # nothing but the message
    assert "hunter2" not in refusal.said
    assert refusal.imported == []  # nobody waits for TensorFlow to read of a mistake
    if "-m" not in arguments:
        assert refusal.left == []  # no directory for a run that never was


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_a_random_value_of_a_random_key_is_refused_with_one_message_or_accepted(
    number: int, refusals: dict[tuple[str, ...], Refusal]
) -> None:
    refusal = refusals[tuple(MUTATIONS[number])]
    said = refusal.said.splitlines()
    assert "Traceback" not in refusal.said, MUTATIONS[number]
    assert refusal.imported == []
    if refusal.code:
        assert refusal.code == 2
        assert len([line for line in said if line.startswith("runner: ")]) == 1 and refusal.kind != "none"


def write_messages() -> None:
    """Write the file anew: the same commands, with the kinds and messages of today."""
    answers = iter(zip(MESSAGES, refused([arguments for arguments, _ in MESSAGES]), strict=True))
    lines = []
    for line in FILE.read_text().splitlines():
        if not line.startswith(KIND):
            lines.append(line)
            continue
        (_, before), now = next(answers)
        is_same = before.endswith("...") and now.line.startswith(before.removesuffix("..."))
        lines.append(KIND + (before if is_same else now.line))
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_messages()
