"""The command line: `python -m runner.classic check script.py` reports on a script, `python -m runner.classic
script.py` runs it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence

from runner.system.exit_codes import FINISHED
from runner.system.standard_streams import hidden_stderr

_USAGE = """python -m runner.classic check [--json] PATH ...
       python -m runner.classic [OPTION ...] SCRIPT [ARGUMENT ...]
       python -m runner.classic [OPTION ...] -m MODULE [ARGUMENT ...]"""
_COMMANDS = """check    reports what in a script is unchanged, changed and unsupported here; runs nothing
SCRIPT   runs the script as `python SCRIPT` does, with the names of tf.estimator on TensorFlow
MODULE   runs the module as `python -m MODULE` does"""


def main() -> int:
    """Run the command line and return its exit code."""
    if sys.argv[1:2] == ["check"]:
        from runner.classic.compat import check

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it does other programs
        return check.main(sys.argv[2:])
    parser = _parser()
    options = parser.parse_args()
    is_module = options.module is not None
    command: list[str] = options.module if is_module else options.script
    if not command:
        parser.error("no script or module given: name a script, or a module after -m")
    if not is_module and not os.path.isfile(command[0]):
        parser.error(f"there is no script {command[0]}")
    if options.strategy == "parameter_server" and not os.environ.get("TF_CONFIG"):
        parser.error(
            "--strategy parameter_server needs a cluster: start this command once per task, each with its own TF_CONFIG"
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # must be set before TensorFlow is imported
    from runner.classic import script_run
    from runner.classic.compat import install
    from runner.remote.mirror import local_folder

    try:
        model_dir = options.model_dir and local_folder("--model-dir ", options.model_dir)
    except ValueError as error:
        parser.error(str(error))

    install.importing_tensorflow = lambda: hidden_stderr(os.environ)
    script_run.begin(script_run.ScriptOptions(command, model_dir, options.strategy, tracking=options.tracking))
    return _run_command(command, is_module=is_module)


def _parser() -> argparse.ArgumentParser:
    from runner.classic.script_run import STRATEGIES

    parser = argparse.ArgumentParser(
        prog="python -m runner.classic",
        usage=_USAGE,
        description=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tracking", action="store_true", help="record parameters and metrics in MLflow")
    parser.add_argument("--model-dir", metavar="DIR", help="folder of the script's Estimator, whatever it says")
    parser.add_argument("--strategy", choices=STRATEGIES, help="tf.distribute strategy, whatever the script says")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _run_command(command: Sequence[str], *, is_module: bool) -> int:
    """Run the script or module `command` with its arguments, and return the exit code."""
    from runner.classic.compat import tf1_imports

    sources = tf1_imports.watch_imports(command[0] if is_module else "__main__")
    sys.argv = list(command)
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            _run_as_main(command[0], sources.script(command[0]))
    except (AttributeError, ImportError) as error:
        # A missing package of another name (tensorflow_datasets) never was a name in TensorFlow.
        package = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else "tensorflow"
        if "tensorflow" in str(error) and str(package).partition(".")[0] == "tensorflow":
            error.add_note(f"`python -m runner.classic check {sys.argv[0]}` says what to use instead.")
        raise
    return FINISHED


def _run_as_main(script: str, code: types.CodeType) -> None:
    """Run the code as the main module, where absl and TensorFlow look for `main`."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    raise SystemExit(main())
