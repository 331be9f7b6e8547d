"""`python -m runner.classic check code.py`, and `python -m runner.classic code.py ...`, which runs it."""

from __future__ import annotations

import os
import runpy
import sys
import types

_USAGE = """usage: python -m runner.classic check [--json] PATH ...
       python -m runner.classic SCRIPT [ARGUMENT ...]
       python -m runner.classic -m MODULE [ARGUMENT ...]

check    what of a source will work here, what will differ, and what cannot; nothing is run
SCRIPT   runs it as `python SCRIPT` does, with the names of tf.estimator on TensorFlow
MODULE   runs it as `python -m MODULE` does"""


def main() -> int:
    """Returns: the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help") or sys.argv[1:] == ["-m"]:
        print(_USAGE)
        return 0 if len(sys.argv) > 1 and sys.argv[1] != "-m" else 2
    if sys.argv[1] == "check":
        from runner.classic.compat import check

        return check.main(sys.argv[2:])
    from runner.classic.compat import tf1_imports

    is_module = sys.argv[1] == "-m"
    sources = tf1_imports.watch_imports(sys.argv[2] if is_module else "__main__")
    try:
        if is_module:
            sys.argv = sys.argv[2:]
            sys.path[0] = os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            return 0
        script = sys.argv[1]
        if not os.path.isfile(script):
            print(f"runner.classic: there is no script {script}\n{_USAGE}", file=sys.stderr)
            return 2
        sys.argv = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        _run(script, sources.script(script))
    except (AttributeError, ImportError) as error:
        if "tensorflow" in str(error):
            error.add_note(f"`python -m runner.classic check {sys.argv[0]}` says what to use instead.")
        raise
    return 0


def _run(script: str, code: types.CodeType) -> None:
    """Runs it as the main module, in which absl and TensorFlow look for `main`."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    raise SystemExit(main())
