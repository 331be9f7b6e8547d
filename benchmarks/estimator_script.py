"""Seconds of `train` of one and the same script of tf.estimator: on TensorFlow 2.15 and on ours.

    python benchmarks/estimator_script.py [--rounds 5] [--steps 5000]

The script is first_step/estimator_script.py, an MLP of tf.layers. It calls `train(steps=...)` twice in a process, which
is timed by the script itself, so imports do not count. The first call builds the graph; the second one goes on from
the checkpoint. TensorFlow 2.15 is that of `make golden`, or of the Python that RUNNER_GOLDEN_PYTHON names. Without
it only ours is measured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from _processes import HERE, environment
from _rounds import Ratio, Times, arguments, show

SCRIPT = str(HERE / "first_step" / "estimator_script.py")
TOOK = re.compile(r"^train took (\S+) s, (\S+) s of CPU$", re.MULTILINE)


def took(command: list[str], steps: int) -> list[Times]:
    """Return the times of both calls of `train`."""
    ran = subprocess.run([*command, SCRIPT, str(steps)], env=environment(), capture_output=True, text=True, check=False)
    found = [Times(float(wall), float(cpu)) for wall, cpu in TOOK.findall(ran.stdout)]
    if len(found) != 2:
        raise SystemExit(f"{' '.join(command)}: {ran.stderr[-3000:]}")
    return found


def main() -> None:
    parsed = arguments(__doc__, 5, steps=(5000, 20, "steps of a call of train"))
    other = Path(os.environ.get("RUNNER_GOLDEN_PYTHON", HERE.parent / ".venv-2.15" / "bin" / "python"))
    commands = {"ours": [sys.executable, "-m", "runner.classic"]}
    if other.exists():
        commands["2.15"] = [str(other)]
    else:
        print(f"There is no {other}, so TensorFlow 2.15 is not measured: make golden.")
    rows: dict[str, list[Times]] = {}
    for _ in range(parsed.rounds):
        for name, command in commands.items():
            for call, times in zip(("first", "second"), took(command, parsed.steps), strict=True):
                rows.setdefault(f"{name}, {call} call", []).append(times)
    calls = ("first", "second") if len(commands) == 2 else ()
    show(
        f"train(steps={parsed.steps})",
        rows,
        [Ratio(f"ours, {call} call", f"2.15, {call} call", 0.2) for call in calls],
        "s",
    )


if __name__ == "__main__":
    main()
