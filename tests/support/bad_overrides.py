"""Command lines that are wrong by construction, each with one mistake at a key that is known.

    python -m tests.support.bad_overrides --count 1000 --seed 1

Each must be refused: exit code 2, one message that names the key, no traceback, no secret, within ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest import mock

from runner.config import schema
from runner.config.settings.limits import Limits

SECRET = "hunter2"
LIMIT_SECS = 10.0
ENVIRONMENTS: Sequence[Mapping[str, str]] = (
    {}, {}, {"COLUMNS": "20"}, {"LANG": "C"}, {"SLURM_JOB_ID": "77"},
)  # fmt: skip


class Case(NamedTuple):
    """A command line with one mistake.

    Attributes:
      key: what the message has to name.
      environment: variables beside those of the process.
    """

    arguments: list[str]
    key: str
    environment: Mapping[str, str]


def keys_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any, Limits]]:
    """Yield (key, type, limits) of every setting below a dataclass of the schema."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from keys_of(hint, f"{key}.")
        else:
            yield key, hint, field.metadata.get("limits", Limits())


def bad_values(hint: Any, limits: Limits) -> list[str]:
    """Return values that a setting of this type and these limits can never have."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    values = ["???", "${nope.nope}"]
    if limits.choices and Any not in kinds:
        values += ["purple", "7.5"]
    if kinds & {int, float, bool} and not kinds & {str, Any}:
        values += ["abc", "'1 2'", "{a: b}", "1.2.3"]
    if int in kinds and float not in kinds:
        values += ["2.5", "1e400", "nan", "99999999999999999999999999"]
    if float in kinds:
        values += ["nan", "inf", "-inf"]
    if limits.minimum is not None:
        values += [str(limits.minimum - 1), "-12345"]
    return values


def cases(seed: int, count: int) -> list[Case]:
    """Return `count` command lines, always the same for a seed."""
    rng = random.Random(seed)
    settings = [
        one for one in keys_of(schema.Config) if not one[0].startswith(("hydra", "evals"))
        and ".params" not in one[0] and get_origin(one[1]) not in (dict,)
    ]  # fmt: skip
    groups = sorted(path.name for path in (Path(__file__).parents[2] / "conf").iterdir() if path.is_dir())
    secrets = [f"tracking.uri=http://me:{SECRET}@127.0.0.1:9", f"+model.params.api_key={SECRET}", ""]
    found = []
    for _ in range(count):
        key, hint, limits = rng.choice(settings)
        kind = rng.random()
        if kind < 0.75:
            value = rng.choice(bad_values(hint, limits))
            # Other keys may refer to this one, and come first.
            wrong, named = f"{key}={value}", "nope.nope" if "nope" in value else key
        elif kind < 0.9:
            place = rng.randrange(len(key.rpartition(".")[2])) + len(key) - len(key.rpartition(".")[2])
            named = key[:place] + "qz" + key[place + 1 :]
            wrong = f"{named}=1"
        else:
            named = rng.choice(groups)
            wrong = f"{named}=no_such_option"
        extra = rng.choice(secrets)
        # Of a key that is given twice the last value counts.
        arguments = [wrong, *([extra] if extra and not extra.startswith(wrong.partition("=")[0]) else [])]
        rng.shuffle(arguments)
        found.append(Case(arguments, named, rng.choice(ENVIRONMENTS)))
    return found


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def complaint(case: Case) -> str | None:
    """Run the command line in this process; return what is wrong with its refusal."""
    from runner.launch import app, supervisor
    from runner.tracking.summary import Outcome

    def accepted(*_: Any, **__: Any) -> Outcome:
        return Outcome(0, "finished")  # in place of a run

    said = io.StringIO()

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError(f"no answer within {LIMIT_SECS:.0f} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECS)
    argv = sys.argv
    sys.argv = ["runner", *case.arguments]
    try:
        with (
            _environment(case.environment),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
            mock.patch.object(supervisor, "run", accepted),
        ):
            code = app.run_command_line()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.argv = argv
    text = said.getvalue()
    if code != 2:
        return f"exit code {code}: {text[-300:]}"
    if SECRET in text:
        return f"the secret is in the message: {text}"
    if "Traceback" in text or not text.startswith("runner: "):
        return f"not one message: {text[-600:]}"
    if case.key not in text:
        return f"{case.key} is not named: {text}"
    left = [str(path) for path in Path().rglob("*") if path.is_file()]
    return f"left {left}" if left else None


def main() -> int:
    """Print what is wrong; return how many refusals were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wrong = 0
    for case in cases(arguments.seed, arguments.count):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            said = complaint(case)
        if said is not None:
            wrong += 1
            print(f"{' '.join(case.arguments)} {dict(case.environment) or ''}\n    {said}", flush=True)
    print(f"{arguments.count} command lines, {wrong} not refused as they should be")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
