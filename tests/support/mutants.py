"""Faults put into the code one at a time: which of them do tests find?

    python -m tests.support.mutants list --seed 2 --number 50 build/fresh.json    draw them
    python -m tests.support.mutants probe build/fresh.json                        note who reaches them from now on
    python -m tests.support.mutants run build/fresh.json                          run the tests that reach each

All three work on the checkout that they stand in: use a worktree of its own. `probe` has each place note the test that
reaches it, also in processes that the test starts, in REACHED: run the tests (`make test-all ARGS=--cost`), then
`git checkout runner`. `run` writes what killed each mutant into a copy of the list, and leaves those of a list out
whose outcome stands there already. A mutant is found again by its module, function, text and place among equal ones,
so a list holds for later code.

tests/support/mutants.json has the 100 that seed 1 drew from 189a7836, with what killed each. Of those that survived,
numbers 3 and 18 have tests since; the others change nothing that is promised: a rhythm, a boundary of a clock, a
default for files of before, an attribute whose value nobody reads, an import ahead of time.

Of 50 more that seed 2 drew from 73a28121, tests find 46, one of them ("_2" after a name that comes twice) by a test
since, and an error in a set-up that nobody read two more; two change nothing.

(tests/support/mutations.py is another thing: command lines with random values.)
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REACHED = ROOT / "build" / "reached"
MODULES = {
    "runner/distribute/reductions.py": "tests/distribute",
    "runner/programs/optimizer_step.py": "tests/programs",
    "runner/programs/batch_losses.py": "tests/programs",
    "runner/data/train_input.py": "tests/data",
    "runner/data/input_identity.py": "tests/data",
    "runner/data/input_state.py": "tests/data",
    "runner/checkpoint/writer.py": "tests/checkpoint",
    "runner/checkpoint/integrity.py": "tests/checkpoint",
    "runner/tracking/ship.py": "tests/tracking",
    "runner/tracking/journal.py": "tests/tracking",
    "runner/launch/rendezvous.py": "tests/launch",
    "runner/config/parsing.py": "tests/config",
    "runner/config/validation.py": "tests/config",
    "runner/tracing/variable_request.py": "tests/tracing",
}
"""Module -> the tests of its package."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
BATCH = 8
"""Tests that are tried first: the cheapest that reach a mutant."""
SECS = 900


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: `before` in a function of a module becomes `after`.

    Attributes:
      number: which of equal texts in the function.
    """

    module: str
    function: str
    before: str
    after: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.module}:{self.function}: {self.before!r} #{self.number} -> {self.after!r}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a mutant is in a source: characters of the text, and the line of the statement."""

    begin: int
    end: int
    line: int
    indent: int


def mutants_of(module: str) -> dict[Mutant, Place]:
    """Return all mutants of a module, in the order of its text."""
    source = (ROOT / module).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def offset(line: int, column: int) -> int:  # columns of the syntax tree count bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: dict[Mutant, Place] = {}
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for function, statement, node, after in _changes(ast.parse(source)):
        begin = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or 0, node.end_col_offset or 0)
        key = function, source[begin:end], after
        place = Place(begin, end, statement.lineno, statement.col_offset)
        found[Mutant(module, *key, counts[key])] = place
        counts[key] += 1
    return found


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.expr, str]]:
    """Yield (function, statement, expression in it, what stands in its place) of each change in a function."""
    todo: list[tuple[ast.AST, str, ast.stmt | None]] = [(tree, "", None)]
    while todo:
        node, function, statement = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        elif isinstance(node, ast.stmt) and not isinstance(node, ast.ExceptHandler):
            statement = node
        is_text = isinstance(node, ast.JoinedStr)  # before Python 3.12 its parts have no places
        if is_text or isinstance(node, ast.arg | ast.Global | ast.Import | ast.ImportFrom):
            continue
        if function and statement is not None:
            yield from ((function, statement, expression, after) for expression, after in _variants(node))
        children = [child for name, child in _children(node) if name not in ("annotation", "returns", "decorator_list")]
        todo.extend((child, function, statement) for child in reversed(children))


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def _variants(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node.value, "None"  # the call is deleted
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = ast.Compare(node.left, [OPERATORS[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
        yield node, f"({ast.unparse(changed)})"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield node, f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    if isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(ast.BoolOp(OPERATORS[type(node.op)](), node.values))})"  # type: ignore[arg-type]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield node, repr(not node.value if isinstance(node.value, bool) else node.value + 1)


def draw(seed: int, number: int) -> list[Mutant]:
    """Return so many mutants, the same for the same seed and code, about as many of each module."""
    chance = random.Random(seed)
    drawn = []
    for place, module in enumerate(MODULES):
        share = number * (place + 1) // len(MODULES) - number * place // len(MODULES)
        found = list(mutants_of(module))
        drawn += chance.sample(found, min(share, len(found)))
    return drawn


PROBE = '''
"""Made by tests/support/mutants.py: notes which test reaches which mutant."""
import os

_known = set()


def reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (test, number) not in _known:
        _known.add((test, number))
        with open({file!r}, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
'''


def probe(mutants: list[Mutant]) -> None:
    """Have the place of each mutant note who reaches it."""
    REACHED.parent.mkdir(exist_ok=True)
    (ROOT / "runner" / "reached_by.py").write_text(PROBE.format(file=str(REACHED)).lstrip())
    for module in MODULES:
        places = mutants_of(module)
        lines = (ROOT / module).read_text().splitlines(keepends=True)
        wanted = [(places[mutant], number) for number, mutant in enumerate(mutants) if mutant.module == module]
        for place, number in sorted(wanted, key=lambda pair: -pair[0].line):
            line = lines[place.line - 1]
            begins_here = line[: place.indent].strip() == ""
            # `elif` is a statement whose place is the one of its condition: noted before the whole `if`.
            at = place.line - 1
            while not begins_here or lines[at].lstrip().startswith(("elif", "else", "except", "finally")):
                at -= 1
                indent = len(lines[at]) - len(lines[at].lstrip())
                begins_here = lines[at].lstrip().startswith(("if ", "try")) and indent <= place.indent
            indent = len(lines[at]) - len(lines[at].lstrip())
            lines.insert(at, " " * indent + f"__import__('runner.reached_by').reached_by.reached({number})\n")
        text = "".join(lines)
        ast.parse(text)
        (ROOT / module).write_text(text)


def run(mutants: list[Mutant], reached: dict[int, list[str]], numbers: list[int]) -> Iterator[tuple[int, str]]:
    """Yield (number, the first test that fails or `survived`) of each mutant."""
    for number in numbers:
        mutant = mutants[number]
        place = mutants_of(mutant.module)[mutant]
        file = ROOT / mutant.module
        source = file.read_text()
        file.write_text(source[: place.begin] + mutant.after + source[place.end :])
        try:
            yield number, first_failure(reached.get(number, []))
        finally:
            file.write_text(source)


def first_failure(tests: list[str]) -> str:
    """Return the first test that fails, the cheapest first; `survived` if none does."""
    for some in (tests[:BATCH], tests[BATCH : 8 * BATCH], tests[8 * BATCH :]):
        if not some:
            break
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=300", *some]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=SECS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "a hang"
        if process.returncode:
            lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            if not lines:
                return f"exit {process.returncode}: {said[-300:]}"
            return lines[0].partition(" ")[2].partition(" - ")[0]
    return "survived"


def cheapest_first(mutants: list[Mutant], costs: dict[str, float]) -> dict[int, list[str]]:
    """Return mutant -> the tests that reach it. Args: costs: CPU seconds of each test."""
    reached: dict[int, set[str]] = collections.defaultdict(set)
    for line in REACHED.read_text().splitlines():
        word, _, test = line.partition(" ")
        if test in costs:
            reached[int(word)].add(test)
    ordered = {}
    for number, mutant in enumerate(mutants):
        package = MODULES[mutant.module]
        tests = reached[number]
        in_a_class = mutant.function.rpartition(".")[2][0].isupper()
        if in_a_class or not tests:  # it is reached when the module is imported, or by nobody
            tests = tests | {test for test in costs if test.startswith(f"{package}/")}
        # Those of the package's own first, if they are not dear.
        ordered[number] = sorted(tests, key=lambda test: costs[test] - 2 * test.startswith(f"{package}/"))
    return ordered


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("verb", choices=["list", "probe", "run"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--part", default="1/1", help="which part of the list `run` runs, such as 2/2")
    words = parser.parse_args()
    if words.verb == "list":
        drawn = draw(words.seed, words.number)
        words.file.write_text(json.dumps([dataclasses.asdict(mutant) for mutant in drawn], indent=1))
        return
    rows = json.loads(words.file.read_text())
    fields = [field.name for field in dataclasses.fields(Mutant)]
    mutants = [Mutant(**{name: row[name] for name in fields}) for row in rows]
    if words.verb == "probe":
        probe(mutants)
        return
    from tests.support.cost import read_rows

    reached = cheapest_first(mutants, {row.test: row.cpu for row in read_rows()})
    part, parts = map(int, words.part.split("/"))
    waiting = [number for number, row in enumerate(rows) if "outcome" not in row]
    for number, outcome in run(mutants, reached, waiting[part - 1 :: parts]):
        rows[number]["outcome"] = outcome
        rows[number]["tests"] = len(reached.get(number, []))
        print(f"{number} {mutants[number].key}: {outcome}", flush=True)
        words.file.with_suffix(f".{part}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
