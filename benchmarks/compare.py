"""Compare the speed of this tree with another revision: ratios of each row of each benchmark.

    python benchmarks/compare.py REVISION [--rounds 5] [--only tiny_step,startup] [-- arguments of the scripts]
    make bench COMPARE=REVISION [ROUNDS=5] [ONLY="tiny_step startup"] [ARGS="--steps 5000"]

Checks out REVISION into a temporary git worktree. Each round runs each script once from this tree and once from the
other, with the `benchmarks/` and `runner` of that tree, in the same virtual environment, so that other load on the
machine slows both. Rows of the same name in the printed tables are compared; a ratio of 1.10 means that this tree takes
10 % longer. A row is marked "slower" or "faster" if all of at least three rounds agree. Everything else is noise or
needs more rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLUMNS = re.compile(r"\s{2,}")
NUMBER = re.compile(r"-?[\d,]+(\.\d+)?$")


@dataclass(frozen=True)
class Row:
    """Medians of one row of a table, in the unit of its header; `cpu` is None if the table has no such column."""

    wall: float
    cpu: float | None


@dataclass
class Pairs:
    """Times of one row from this tree and the other, in the same rounds."""

    this: list[Row] = field(default_factory=list)
    other: list[Row] = field(default_factory=list)

    def ratios(self, kind: str) -> list[float]:
        pairs = ((getattr(a, kind), getattr(b, kind)) for a, b in zip(self.this, self.other, strict=True))
        return [a / b for a, b in pairs if a is not None and b]


def parse_tables(text: str) -> dict[str, Row]:
    """Return row name -> row for all tables of times that a script printed; tables of ratios are skipped.

    If two tables of a script have rows of the same name, the name begins with the title of the table.
    """
    rows: list[tuple[str, str, Row]] = []
    title, columns = "", []  # of the current table; empty: outside of tables
    for line in text.splitlines():
        name, *cells = COLUMNS.split(line.rstrip())
        if len(cells) > 1 and not any(NUMBER.match(cell) for cell in cells):
            title, columns = name.strip(), [] if name == "ratio" else cells
        elif columns and len(cells) == len(columns) and all(NUMBER.match(cell) for cell in cells):
            numbers = [float(cell.replace(",", "")) for cell in cells]
            cpu = next((number for number, column in zip(numbers, columns, strict=True) if column[:3] == "CPU"), None)
            rows.append((title, name.strip(), Row(numbers[0], cpu)))
        elif line.strip():
            columns = []
    count = Counter(name for _, name, _ in rows)
    return {name if count[name] == 1 else f"{title}: {name}": row for title, name, row in rows}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary git worktree of `revision`."""
    git = ["git", "-C", str(HERE.parent)]
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def run_script(tree: Path, script: str, arguments: Sequence[str]) -> dict[str, Row] | None:
    """Run a benchmark of `tree` for one round and return its rows; None, after printing its last line, if it failed."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each start would compile all sources
    argv = [sys.executable, str(tree / "benchmarks" / f"{script}.py"), "--rounds", "1", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        print(f"{script} of {tree.name} failed: {said}", flush=True)
        return None
    return parse_tables(done.stdout)


def compare(script: str, trees: Sequence[Path], rounds: int, arguments: Sequence[str]) -> dict[str, Pairs] | None:
    """Return the pairs of each row that both trees have; None if the script failed in one of them."""
    pairs: dict[str, Pairs] = {}
    for _ in range(rounds):
        this, other = (run_script(tree, script, arguments) for tree in trees)
        if this is None or other is None:
            return None
        for name in [name for name in this if name in other]:
            pair = pairs.setdefault(name, Pairs())
            pair.this.append(this[name])
            pair.other.append(other[name])
        for name in sorted(this.keys() ^ other.keys()):
            print(f"{script}: only one of the two has the row {name!r}")
    return pairs


def verdict(ratios: Sequence[float]) -> str:
    """Return "slower" or "faster" if all of at least three rounds agree, else ""."""
    if len(ratios) < 3:
        return ""
    return "slower" if min(ratios) > 1 else "faster" if max(ratios) < 1 else ""


def show(script: str, pairs: Mapping[str, Pairs]) -> None:
    """Print one line per row: the ratio of this tree to the other."""
    width = max((len(name) for name in (script, *pairs)), default=0) + 2
    print(
        f"\n{script:{width}}{'this':>10}{'other':>10}"
        f"{'ratio':>8}{'min':>8}{'max':>8}{'CPU ratio':>11}{'min':>8}{'max':>8}"
    )
    for name, pair in pairs.items():
        wall, cpu = pair.ratios("wall"), pair.ratios("cpu")
        print(f"{name:{width}}", end="")
        for rows in (pair.this, pair.other):
            print(f"{statistics.median(row.wall for row in rows):10.2f}", end="")
        for ratios, first in ((wall, 8), (cpu, 11)):
            numbers = [statistics.median(ratios), min(ratios), max(ratios)] if ratios else []
            print("".join(f"{number:{first if not place else 8}.2f}" for place, number in enumerate(numbers)), end="")
        print(f"  {verdict(wall)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what this tree is compared with: a commit, a branch, a tag")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each script in each tree")
    parser.add_argument("--only", help="names of scripts, by commas or spaces; default: all that both trees have")
    # Arguments after "--" are for every script; argparse would interpret them.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    parsed = parser.parse_args(own)
    chosen = re.split(r"[,\s]+", parsed.only.strip()) if parsed.only else []
    failed = []
    with checked_out(parsed.revision) as other:
        trees = (HERE.parent, other)
        have = [{path.stem for path in (tree / "benchmarks").glob("[a-z]*.py")} - {"compare"} for tree in trees]
        if missing := set(chosen) - (have[0] & have[1]):
            parser.error(f"not a benchmark of both trees: {', '.join(sorted(missing))}")
        for tree in trees:  # compile now, not in the first round
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "runner")], check=True)
        load = os.getloadavg()[0]
        print(
            f"this tree / {parsed.revision}, {parsed.rounds} rounds, {os.cpu_count()} cores, load {load:.1f}",
            flush=True,
        )
        for script in chosen or sorted(have[0] & have[1]):
            pairs = compare(script, trees, parsed.rounds, arguments)
            if pairs is None:
                failed.append(script)
            else:
                show(script, pairs)
    if failed:
        sys.exit(f"not compared: {', '.join(failed)}")


if __name__ == "__main__":
    main()
