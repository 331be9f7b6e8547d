"""Command lines with a random value for a random key: keys and types come from the schema, values from a seed.

`python -m tests.support.mutations 400 SEED` runs that many with a small model and prints a tally. A command line is
refused with one message and exit code 2, or it runs; anything else is a fault, and is printed. Command lines that are
wrong by construction are those of tests/support/bad_overrides.py.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner.config import schema
from runner.config.settings.limits import Limits
from tests.support.bad_overrides import keys_of

ROOT = Path(__file__).parents[2]
SECS = 45.0
"""A run that is not over then is one that runs."""

EXTREMES = (
    "0", "-1", "1", "2", "1.5", "-0.0", "1e308", "1e999", "nan", "-inf", "9223372036854775807", "9223372036854775808",
    "1000000000000000000000", "''", '" "', "null", "true", "???", "[]", "[1,2]", "[a,[b]]", "{}", "{a:b}", "{a:{b:1}}",
    "ü", "日本", "😀", "a b", "a,b", "x" * 5000, "'a=b'", "a/../b", "/proc/nowhere", "gs://bucket/x", "..", "a\\tb",
    "${run.seed}", "${nope}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:HOME}", "${", "${model.params}", "1:2", "0x10",
    "1_000", "on", "~", "@x", "model_fns.digits", "os.system", "range(1,3)", "choice(1,2)",
)  # fmt: skip


def value_of(hint: Any, limits: Limits, chance: random.Random) -> str:
    """Return a value that fits the key's type more or less, or any other."""
    if chance.random() < 0.6:
        return chance.choice(EXTREMES)
    if limits.choices and chance.random() < 0.7:
        return f"{chance.choice(limits.choices)}{chance.choice(['', '', 'x'])}".lower()
    if "bool" in str(hint):
        return chance.choice(["true", "false", "yes", "1"])
    if "str" in str(hint):
        return chance.choice(["eval/loss", "auto", "best", "model.ckpt-1", "a.b.c", "latest", "none", "[a]"])
    bounds = [one for one in (limits.minimum, limits.above, limits.below, limits.maximum) if one is not None]
    return str(chance.choice([*bounds, 3])) + chance.choice(["", "0", ".5"])


def misspelt(key: str, chance: random.Random) -> str:
    at = chance.randrange(len(key))
    return chance.choice([key[:at] + key[at + 1 :], key[:at] + "_" + key[at:], f"{key}.more", key.upper()])


def mutations(number: int, seed: int) -> list[list[str]]:
    """Return the words of so many command lines, the same for the same seed."""
    chance, keys = random.Random(seed), list(keys_of(schema.Config))
    cases: list[list[str]] = []
    while len(cases) < number:
        words = []
        for _ in range(chance.choice([1, 1, 1, 2])):
            key, hint, limits = chance.choice(keys)
            written = misspelt(key, chance) if chance.random() < 0.1 else key
            sign = chance.choice(["", "", "", "", "", "+", "++", "~"])
            words.append(
                sign + written + ("" if sign == "~" and chance.random() < 0.5 else f"={value_of(hint, limits, chance)}")
            )
        if not any(word.endswith(("command=doctor", "run.progress=rich")) for word in words):
            cases.append(words)
    return cases


BASE = (
    "model=custom", "model.fn=tests.support.jobs.model_fn", "input=custom", "input.train.fn=tests.support.jobs.endless",
    "input.train.batch_size=2", "input.eval.fn=tests.support.jobs.once", "input.eval.batch_size=3",
    "input.predict.fn=tests.support.jobs.once", "input.predict.batch_size=3", "train.max_steps=2", "tracking=none",
)  # fmt: skip


def outcome_of(words: list[str]) -> str:
    """Run a command line in an empty folder; return `refused`, `runs`, or what is wrong."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "runner", *BASE, *words]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=SECS)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "runs"
    messages = [line for line in said.splitlines() if line.startswith("runner: ")]
    if "Traceback" in said or process.returncode not in (0, 2) or (process.returncode == 2 and not messages):
        return f"exit {process.returncode}: {said[-2000:]}"
    return "runs" if process.returncode == 0 else "refused"


def main() -> None:
    number, seed = map(int, sys.argv[1:])
    tally: collections.Counter[str] = collections.Counter()
    for count, words in enumerate(mutations(number, seed), 1):
        outcome = outcome_of(words)
        tally[outcome if outcome in ("runs", "refused") else "faults"] += 1
        if outcome not in ("runs", "refused"):
            print(f"{words}: {outcome}", flush=True)
        print(f"{count}/{number} {dict(tally)}", file=sys.stderr, end="\r", flush=True)
    print(f"seed {seed}: {dict(tally)}")


if __name__ == "__main__":
    main()
