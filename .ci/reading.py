"""How much a reader has to hold in mind at each statement of a package, whatever its formatting.

    python .ci/reading.py                  a row for each package of runner/, then the whole
    python .ci/reading.py --since REV      the same of the statements on lines that were added since REV
    python .ci/reading.py --worst 20       also the statements and functions that ask most of a reader
    python .ci/reading.py --check          fails where a package has become worse: `make lint`
    python .ci/reading.py --write          takes what is so now as what may not become worse

nodes/stmt: nodes of the syntax tree in a statement, without those of statements inside it: mean and 90th percentile.
Of 100 statements: assignments of several values (tuple=), conditional expressions (if-else), comprehensions (comp),
comments. nested: one conditional expression or comprehension in another, and `:=` in the condition of a `while`.
complex: functions of a cyclomatic complexity above 15.

Other code that models are trained with, measured in November 2026: kauldron has 6.9 nodes a statement (p90 13), 0.1
tuples, 1.1 conditional expressions, 3.0 comprehensions; submitit 6.4 (13), 0.2, 1.3, 3.7, and 21 comments.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runner"
BASELINE = Path(__file__).with_name("reading.json")

COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
FOLDS = (ast.IfExp, *COMPREHENSIONS)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.With,
    ast.Assert,
    ast.comprehension,
    ast.BoolOp,
    ast.match_case,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_COMPLEX = 15

GOALS = {"nodes": 7.5, "tuples": 0.4, "if_else": 3.0, "comprehensions": 5.5, "nested": 0, "complex": 0}
"""What a package may always have. A figure above its goal may stay as it is in BASELINE, and not grow."""


@dataclass
class Reading:
    """The figures of some Python text.

    Attributes:
      sizes: (nodes, place) of each statement.
      complex: (complexity, place) of each function above MOST_COMPLEX.
    """

    sizes: list[tuple[int, str]] = field(default_factory=list)
    complex: list[tuple[int, str]] = field(default_factory=list)
    tuples: int = 0
    if_else: int = 0
    comprehensions: int = 0
    nested: int = 0
    comments: int = 0

    def add(self, text: str, name: str, lines: set[int] | None = None) -> None:
        """Add a file; with `lines`, only what begins on one of them."""
        for node in ast.walk(ast.parse(text)):
            if lines is None or getattr(node, "lineno", None) in lines:
                self._add_node(node, name)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_meant = lines is None or token.start[0] in lines
            if token.type == tokenize.COMMENT and is_meant:
                self.comments += 1

    def _add_node(self, node: ast.AST, name: str) -> None:
        if _is_docstring(node) or isinstance(node, ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.stmt):
            self.sizes.append((_own_nodes(node), f"{name}:{node.lineno}"))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            self.tuples += any(isinstance(target, ast.Tuple) for target in node.targets)
        if isinstance(node, ast.IfExp):
            self.if_else += 1
        if isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
        if isinstance(node, FOLDS):
            self.nested += any(isinstance(inner, FOLDS) for inner in _within(node))
        if isinstance(node, ast.While):
            self.nested += any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test))
        if isinstance(node, FUNCTIONS):
            complexity = _complexity(node)
            if complexity > MOST_COMPLEX:
                self.complex.append((complexity, f"{name}:{node.lineno} {node.name}"))

    def rate(self, number: int) -> float:
        """Return how many of 100 statements `number` is."""
        return 100 * number / len(self.sizes)

    def figures(self) -> dict[str, float]:
        """Return what GOALS and BASELINE hold."""
        return {
            "nodes": round(self.mean_size(), 2),
            "tuples": round(self.rate(self.tuples), 2),
            "if_else": round(self.rate(self.if_else), 2),
            "comprehensions": round(self.rate(self.comprehensions), 2),
            "nested": self.nested,
            "complex": len(self.complex),
        }

    def mean_size(self) -> float:
        return sum(size for size, _ in self.sizes) / len(self.sizes)

    def row(self, name: str) -> str:
        if not self.sizes:
            return f"{name:18} no statements"
        sizes = sorted(size for size, _ in self.sizes)
        p90 = sizes[int(0.9 * (len(sizes) - 1))]
        return (
            f"{name:18} {len(sizes):6,} statements  nodes/stmt {self.mean_size():4.1f} (p90 {p90:2})"
            f"  tuple= {self.rate(self.tuples):4.1f}  if-else {self.rate(self.if_else):4.1f}"
            f"  comp {self.rate(self.comprehensions):4.1f}  nested {self.nested:3}"
            f"  comments {self.rate(self.comments):4.1f}  complex {len(self.complex):2}"
        )


def _is_docstring(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _within(node: ast.AST) -> Iterator[ast.AST]:
    return (inner for inner in ast.walk(node) if inner is not node)


def _own_nodes(statement: ast.stmt) -> int:
    """Count the nodes of a statement, without those of statements inside it."""
    count = 0
    todo: list[ast.AST] = [statement]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if not isinstance(child, ast.stmt | ast.expr_context):
                count += 1
                todo.append(child)
    return count


def _complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function, without that of functions inside it."""
    total = 1
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, BRANCHES):
            total += 1
        todo.extend(ast.iter_child_nodes(node))
    return total


def _package_of(path: Path) -> str:
    parts = path.relative_to(FOLDER).parts
    return parts[0] if len(parts) > 1 else "*.py"


def read_packages() -> dict[str, Reading]:
    """Return the figures of each package of runner/."""
    packages: dict[str, Reading] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        reading = packages.setdefault(_package_of(path), Reading())
        reading.add(path.read_text(), str(path.relative_to(ROOT)))
    return packages


def read_added(revision: str) -> Reading:
    """Return the figures of what was added since a revision."""
    reading = Reading()
    for name, lines in _added_lines(revision).items():
        path = ROOT / name
        if path.exists():
            reading.add(path.read_text(), name, lines)
    return reading


def _added_lines(revision: str) -> dict[str, set[int]]:
    """Return the numbers of the lines of each file that were added since a revision."""
    command = ["git", "diff", "--unified=0", "--no-color", revision, "--", str(FOLDER)]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    added: dict[str, set[int]] = {}
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif line.startswith("@@") and name.endswith(".py"):
            start, _, length = line.split("+")[1].split(" ")[0].partition(",")
            last = int(start) + int(length or 1)
            added.setdefault(name, set()).update(range(int(start), last))
    return added


def whole_of(packages: Iterable[Reading]) -> Reading:
    """Return the sum of several."""
    whole = Reading()
    for reading in packages:
        whole.sizes += reading.sizes
        whole.complex += reading.complex
        whole.tuples += reading.tuples
        whole.if_else += reading.if_else
        whole.comprehensions += reading.comprehensions
        whole.nested += reading.nested
        whole.comments += reading.comments
    return whole


def check(packages: dict[str, Reading]) -> int:
    """Say where a package has become worse than in BASELINE, and return the exit code."""
    baseline = json.loads(BASELINE.read_text())
    worse = []
    for package, reading in packages.items():
        before = baseline.get(package, GOALS)
        for name, figure in reading.figures().items():
            limit = max(GOALS[name], before[name])
            if figure > limit:
                worse.append(f"runner/{package}: {name} {figure:g}, and may be {limit:g}")
    for line in worse:
        print(line, file=sys.stderr)
    if worse:
        print("`.ci/reading.py --worst 20` shows where; CONTRIBUTING.md says what it counts.", file=sys.stderr)
    return 1 if worse else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="REV")
    parser.add_argument("--worst", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    packages = read_packages()
    if arguments.check:
        return check(packages)
    if arguments.write:
        figures = {name: reading.figures() for name, reading in packages.items()}
        BASELINE.write_text(json.dumps(figures, indent=1) + "\n")
        return 0
    if arguments.since:
        shown = read_added(arguments.since)
        print(shown.row("added"))
    else:
        for name, reading in packages.items():
            print(reading.row(name))
        shown = whole_of(packages.values())
        print(shown.row("whole"))
    for title, found in (("statements", shown.sizes), ("functions", shown.complex)):
        worst = sorted(found, reverse=True)[: arguments.worst]
        if worst:
            print(f"\nthe {title} that ask most:")
        for size, place in worst:
            print(f"{size:6}  {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
