"""`python -m runner.classic check code.py`, and `python -m runner.classic code.py ...`, which runs it."""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = """usage: python -m runner.classic check [--json] PATH ...
       python -m runner.classic SCRIPT [ARGUMENT ...]

check    what of a source will work here, what will differ, and what cannot; nothing is run
SCRIPT   runs it as `python SCRIPT` does, with the names of tf.estimator on TensorFlow"""


def main() -> int:
    """Returns: the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_USAGE)
        return 0 if len(sys.argv) > 1 else 2
    if sys.argv[1] == "check":
        from runner.classic import check

        return check.main(sys.argv[2:])
    script = sys.argv[1]
    if not os.path.exists(script):
        print(f"runner.classic: there is no script {script}\n{_USAGE}", file=sys.stderr)
        return 2
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
