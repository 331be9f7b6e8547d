"""`python -m runner.classic check`: report the uses of TensorFlow 1 and tf.estimator in a program that are unchanged,
changed and unsupported on this runner, and whether the program runs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import json
import operator
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from runner.classic.compat import estimator_paths, names, packages, python2, removed_names
from runner.classic.compat.differences import CHANGED, REMOVED, RULES, UNSUPPORTED, WITHOUT_FIX, WRITES, Rule
from runner.classic.compat.installed_names import OF_EVERY_MODULE, Installed
from runner.classic.compat.old_modules import space_of, text_of
from runner.classic.compat.source import ARGUMENTS_OF_CONTRIB, Use, uses
from runner.classic.compat.tf1_imports import as_version_1, signs
from runner.classic.contrib import names as contrib
from runner.config.source_names import V1, imported_files
from runner.system.suggestions import did_you_mean
from runner.tf_private import legacy_keras

UNCHANGED = "unchanged"
VERSION = "2.21"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding about one use of a name.

    Attributes:
      file: path of the source, as the user gave it.
      line: line of the use, from 1.
      column: column of the use, from 1.
      verdict: "unchanged", "changed" or "unsupported".
      name: the name as users write it: `tf.train.Saver`, `.predict`.
      text: the reason and the fix; "" for "unchanged".
    """

    file: str
    line: int
    column: int
    verdict: str
    name: str
    text: str


def check_source(text: str, file: str, installed: Installed) -> list[Finding]:
    """Return the findings about a source. Each name is reported once per line.

    Args:
      text: the source.
      file: path of the source, for messages and to find the user's modules in its folder.
      installed: the names of the installed TensorFlow.

    Raises:
      SyntaxError: the source is not valid Python 3.
    """
    findings: dict[tuple[int, str, str], Finding] = {}
    tree = ast.parse(text, file)
    lines_for_other_versions = _lines_for_other_versions(tree)
    condition_of_line = _conditions_of_lines(tree)
    for finding in _findings_besides_names(tree, file, lines_for_other_versions, condition_of_line):
        findings[finding.line, finding.name, finding.text] = finding
    for line, column, name, reason in removed_names.gone_later(tree):
        findings.setdefault((line, name, reason), Finding(file, line, column, CHANGED, name, reason))
    version_signs = signs(tree, installed)
    if version_signs.are_of_1 and version_signs.first_use_of_1 is not None:
        use = version_signs.first_use_of_1
        # Line 0 keeps this key apart from those of names, which have lines from 1.
        findings[0, "", ""] = Finding(file, use.line, use.column, CHANGED, use.as_written, _WRITTEN_FOR_1)
        as_version_1(tree)  # so that the names below are judged as those of tensorflow.compat.v1
    for finding in _findings_about_names(tree, file, installed, lines_for_other_versions):
        findings.setdefault((finding.line, finding.name, finding.text), finding)
    return [_weakened_by_condition(finding, condition_of_line) for finding in findings.values()]


def _findings_besides_names(
    tree: ast.AST, file: str, lines_for_other_versions: Collection[int], condition_of_line: Mapping[int, str]
) -> Iterator[Finding]:
    """Yield the findings about problems other than TensorFlow names, such as Python 2 and missing packages.

    A problem that several lines have is reported at the first of them, with the numbers of the other lines. In code
    that runs only under a condition, each line is reported, because each has its own condition.
    """
    problems = [
        problem
        for problem in sorted(_problems_besides_names(tree, Path(file)))
        if problem[0] not in lines_for_other_versions
    ]
    lines_of: dict[str, list[int]] = collections.defaultdict(list)
    for line, _, name, _ in problems:
        if line not in condition_of_line:
            lines_of[name].append(line)
    for line, column, name, reason in problems:
        if line in condition_of_line:
            yield Finding(file, line, column, UNSUPPORTED, name, reason)
            continue
        first, *others = lines_of[name]
        if line != first:
            continue
        if others:
            plural = "s" if len(others) > 1 else ""
            reason += f" (also in line{plural} {', '.join(map(str, others))})"
        yield Finding(file, line, column, UNSUPPORTED, name, reason)


def _findings_about_names(
    tree: ast.AST, file: str, installed: Installed, lines_for_other_versions: Collection[int]
) -> Iterator[Finding]:
    """Yield the findings about each use of a name of TensorFlow."""
    used = uses(tree)
    positions_of_imports = {_position(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    names_version_1 = any(use.name.startswith(f"{V1}.") for use in used)
    # Which value reaches which call is not followed: any text of the program may be what gfile opens.
    texts = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    has_urls = any(text.startswith(("s3://", "gs://", "az://")) for text in texts)
    for use in used:
        judgements = _judge(use, installed)
        is_there = all(verdict != UNSUPPORTED for verdict, _, _ in judgements)
        if is_there and has_urls and ".gfile." in use.name:
            judgements = [(CHANGED, _AT_A_URL, use.as_written)]
        # A program that names tensorflow.compat.v1 may have its dataset from there, which has this method.
        if use.name == ".make_one_shot_iterator" and not names_version_1:
            judgements = [(UNSUPPORTED, _NO_ITERATOR, use.as_written)]
        for verdict, reason, name in judgements:
            if verdict == UNSUPPORTED:
                is_import = (use.line, use.column) in positions_of_imports
                verdict, reason = _unsupported(use, reason, Path(file), lines_for_other_versions, is_import=is_import)
            yield Finding(file, use.line, use.column, verdict, name, reason)


def _unsupported(
    use: Use, reason: str, file: Path, lines_for_other_versions: Collection[int], *, is_import: bool
) -> tuple[str, str]:
    """Return (verdict, text) about a name that does not exist, according to the code around its use.

    The program runs on, so that the verdict is CHANGED, if the code handles other versions of TensorFlow, or if the use
    is an import, and only uses of the imported name are refused.
    """
    if use.line in lines_for_other_versions:
        return CHANGED, f"{reason}; the code around it supports several versions"
    if is_import and _is_refused_late(use):
        return CHANGED, f"only its use raises an error, not this import: {reason}"
    users_path = packages.of_the_users_own(use.name, file)
    if users_path is not None:
        return (
            UNSUPPORTED,
            f"Python looks for it in the installed TensorFlow, not in your {users_path}: rename your folder",
        )
    return UNSUPPORTED, reason


def _weakened_by_condition(finding: Finding, condition_of_line: Mapping[int, str]) -> Finding:
    """Return the finding. If it is UNSUPPORTED in a line that runs only under a condition, return it as CHANGED, with
    the condition in its text: the program may run without that line.
    """
    if finding.verdict != UNSUPPORTED or finding.line not in condition_of_line:
        return finding
    return dataclasses.replace(
        finding, verdict=CHANGED, text=f"only if {condition_of_line[finding.line]}: {finding.text}"
    )


def _position(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset + 1


def _problems_besides_names(tree: ast.AST, file: Path) -> Iterator[python2.Found]:
    """Yield each problem other than a TensorFlow name: Python 2, NumPy, missing packages, and a user's module that
    hides TensorFlow.
    """
    for statement, package, reason in packages.missing(tree, file):
        yield *_position(statement), package, reason
    found: set[tuple[int, int, str]] = set()
    for line, column, name, reason in (*python2.idioms(tree), *removed_names.gone(tree)):
        if (line, column, name) not in found:  # both find some names: report what python2 says, which has the fix
            found.add((line, column, name))
            yield line, column, name, reason
    own = packages.in_place_of_tensorflow(file)
    if own is None:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and "tensorflow" in ast.unparse(node):
            yield *_position(node), "tensorflow", f"Python imports your {own} instead of TensorFlow: rename it"


def _conditions_of_lines(tree: ast.AST) -> dict[int, str]:
    """Return line number -> condition, for the lines that run only under a condition.

    Left out are conditions that hold at some time in every program (`mode == PREDICT`, `__name__ == "__main__"`),
    conditions on a version, and those on a flag whose default value meets them.
    """
    condition_of_line: dict[int, str] = {}
    defaults = _defaults_of_flags(tree)
    for node in ast.walk(tree):  # outer conditions first, so that the innermost one is named
        if (
            not isinstance(node, ast.If)
            or {"mode", "ModeKeys", "__name__"} & _last_parts(node.test)
            or _tests_version(node.test)
        ):
            continue
        flag = node.test
        is_negated = isinstance(flag, ast.UnaryOp) and isinstance(flag.op, ast.Not)
        if isinstance(flag, ast.UnaryOp) and is_negated:
            flag = flag.operand
        default = defaults.get(getattr(flag, "attr", ""))
        condition = textwrap.shorten(ast.unparse(node.test), 60, placeholder="...")
        # (statements, the value of the flag with which they run, the condition as text)
        for body, value_to_enter, text in (
            (node.body, not is_negated, condition),
            (node.orelse, is_negated, f"not ({condition})"),
        ):
            if body and default is not value_to_enter:
                lines = range(body[0].lineno, (body[-1].end_lineno or 0) + 1)
                condition_of_line.update(dict.fromkeys(lines, text))
    return condition_of_line


def _defaults_of_flags(tree: ast.AST) -> dict[str, bool]:
    """Return whether the default value of each flag of `DEFINE_...("name", value, help)` is true."""
    defaults: dict[str, bool] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        name, default = node.args[:2]
        defines = ast.unparse(node.func).rpartition(".")[2].startswith("DEFINE_")
        if defines and isinstance(name, ast.Constant) and isinstance(default, ast.Constant):
            defaults[str(name.value)] = bool(default.value)
    return defaults


_NAMES_IN_VERSION_TESTS = frozenset({"__version__", "VERSION", "hasattr", "version_info", "PY2", "PY3"})
_ERRORS_OF_MISSING_NAMES = frozenset(
    {"ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "Exception", "BaseException"}
)


def _lines_for_other_versions(tree: ast.AST) -> set[int]:
    """Return the line numbers of code that handles several versions: in `try: ... except ImportError:` and the
    like, and in conditions on a version.
    """
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            handles = _tests_version(node.test)
        elif isinstance(node, ast.Try):
            handles = any(_handles_missing(handler) for handler in node.handlers)
        else:
            continue
        if handles:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _handles_missing(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool(_ERRORS_OF_MISSING_NAMES & _last_parts(handler.type))


def _tests_version(test: ast.expr) -> bool:
    return bool(_NAMES_IN_VERSION_TESTS & _last_parts(test))


def _last_parts(tree: ast.AST) -> set[str]:
    """Return the last part of each dotted name in `tree`: `__version__` for `tf.__version__`."""
    return {str(getattr(node, "attr", getattr(node, "id", ""))) for node in ast.walk(tree)}


def _judge(use: Use, installed: Installed) -> list[tuple[str, str, str]]:
    """Return (verdict, text, name) for each finding about one use of a name.

    A name has at least one finding, UNCHANGED if there is nothing to say. A method such as `.train` may have none.
    """
    reason = _reason_why_missing(use, installed)
    if reason is not None:
        return [(UNSUPPORTED, reason, use.as_written)]
    reason_of_dataset = _missing_in_dataset(use, installed)
    if reason_of_dataset is not None:
        return [(UNSUPPORTED, reason_of_dataset, use.as_written)]
    findings = list(_known_differences(use))
    is_method = use.name.startswith(".")
    if not findings and not is_method:
        return [(UNCHANGED, "", use.as_written)]
    return findings


def _missing_in_dataset(use: Use, installed: Installed) -> str | None:
    """Return the reason why a call of a dataset's method fails; None if it works, or `use` is no such call."""
    method = use.name.removeprefix(".")
    if method == "map" and ARGUMENTS_OF_CONTRIB & {*use.keywords}:
        return _MAP_OF_CONTRIB
    methods = installed.methods_of_datasets()
    if not use.is_of_dataset or not methods:
        return None
    if method not in methods:
        return f"a tf.data.Dataset of TensorFlow {VERSION} has no such method.{did_you_mean(method, [*methods])}"
    accepted = methods[method]
    if accepted is None:  # the method takes any keyword
        return None
    unknown = sorted({*use.keywords} - accepted)
    return f"a tf.data.Dataset's {method} has no argument {unknown[0]!r}" if unknown else None


def _known_differences(use: Use) -> Iterable[tuple[str, str, str]]:
    """Yield (verdict, text, name) for what is known to differ about a use of a name that exists; often nothing."""
    if estimator_paths.is_of_source(use.name):
        yield CHANGED, _OWN_CODE, use.as_written
    elif space_of(estimator_paths.SPACES, use.name):
        yield (
            CHANGED,
            "a private module of tf.estimator: what was public under tf.estimator is the runner's",
            use.as_written,
        )
    elif use.is_private:
        only = _ONLY_IN_MODEL_FN if use.name.startswith("tensorflow.python.keras.") else ""
        yield CHANGED, f"a private name: TensorFlow {VERSION} has it, but any release may move it{only}", use.as_written
    for rule in RULES:
        if _applies(rule, use):
            shown = f"{use.as_written}({rule.argument}=)" if rule.argument else use.as_written
            yield rule.verdict, rule.text, shown
    if use.is_base and use.api_name.endswith(".SessionRunHook"):
        yield CHANGED, _OWN_HOOK, use.as_written
    if use.is_base and use.api_name.endswith("train.Optimizer"):
        yield CHANGED, f"an optimizer with updates of its own: {WRITES}", use.as_written
    if use.is_base and use.api_name.endswith(".CheckpointSaverHook"):
        yield UNSUPPORTED, _OWN_SAVER, use.as_written


def _applies(rule: Rule, use: Use) -> bool:
    """Report whether a rule applies to a use."""
    # `keywords` has, for each argument that the call names, whether its value is None.
    if rule.argument and use.keywords.get(rule.argument) is not False:
        return False
    if rule.only_in not in ("", use.place) or _passes_argument(use, rule.without, rule.num_arguments):
        return False
    return rule.fits(use.api_name) or rule.fits(use.name.removeprefix("tensorflow."))


_MAP_OF_CONTRIB = (
    "only datasets of tf.contrib.data had num_threads= and output_buffer_size=: write num_parallel_calls=, and "
    ".prefetch() after it"
)
_OWN_CODE = (
    "TensorFlow 2.15's own code (Apache 2.0, no longer maintained) runs, of the package tensorflow-estimator, on the "
    "runner's Estimator"
)
_ONLY_IN_MODEL_FN = (
    "; its layers and models work in a model_fn, but not in fit and model_to_estimator: import from tensorflow.keras"
)
_WRITTEN_FOR_1 = (
    "this file is written for TensorFlow 1: under `python -m runner.classic`, `tensorflow` means tensorflow.compat.v1 "
    "in it; to start it otherwise, write `import tensorflow.compat.v1 as tf`"
)
_NO_ITERATOR = (
    "a tf.data.Dataset of TensorFlow 2 has no such method: use tf.compat.v1.data.make_one_shot_iterator(dataset), or "
    "return the dataset from input_fn"
)
_AT_A_URL = (
    "TensorFlow opens a URL itself, if it can; a run whose model_dir is a URL writes to the local folder "
    "config.model_dir, which is sent to config.remote_dir"
)
_OWN_SAVER = (
    "a subclass does not work, because there is no Saver in the graph. Give saving_listeners, or a "
    "tf.train.CheckpointSaverListener in CheckpointSaverHook(listeners=)"
)
_OWN_HOOK = (
    "your hook is called at every step, since it may fetch anything and stop at any step. So each loop on the devices "
    "has only one step, which is slower; a runner.Hook with Every(steps=) is called once per loop"
)


def _passes_argument(use: Use, argument: str, num_arguments: int) -> bool:
    """Report whether a use passes `argument`, by name or as the `num_arguments`-th positional one. A rule with
    `without=argument` then does not apply.

    For argument "" this is false. For a use that is not a call it is true, since what will be passed is not known.
    """
    if not argument:
        return False
    has_fewer = 0 <= use.num_arguments < num_arguments  # a use that is no call has -1
    return argument in use.keywords or not has_fewer


def _reason_why_missing(use: Use, installed: Installed) -> str | None:
    """Return the reason why the name does not exist; None if it does."""
    name = use.name
    top, _, rest = name.partition(".")
    space, below = space_of(estimator_paths.SPACES, name) or (None, "")
    if space is not None:
        # Texts of findings have no period at the end.
        return None if space.serves(below) else space.reason(below, "it").removesuffix(".")
    if top != "tensorflow" or not rest:
        return None
    part, _, of_contrib = name.removeprefix(f"{V1}.").removeprefix("tensorflow.").partition(".")
    if part == "contrib":
        is_served = contrib.SPACE.serves(of_contrib)
        return None if is_served else contrib.instead_of(contrib.public(of_contrib))
    if use.is_private:
        return _reason_why_private_is_missing(name, rest, installed)
    reason = _why_not_in_estimator(name)
    if reason is not None:
        return reason or None
    if not installed.is_there or installed.has(name):
        return None
    hint = _hint_about(use, rest, installed)
    if not hint:
        return f"TensorFlow {VERSION} has no such name"
    return f"TensorFlow {VERSION} has no such name: {hint}"


def _reason_why_private_is_missing(name: str, rest: str, installed: Installed) -> str | None:
    if installed.has_private(name) or not installed.is_there:
        return None
    instead = text_of(REMOVED, rest)
    if not instead:
        is_of_keras = "keras" in name or "estimator" in name
        instead = "use tf.keras or tf.estimator" if is_of_keras else "use the public name"
    return f"a private name that TensorFlow {VERSION} does not have: {instead}"


def _hint_about(use: Use, rest: str, installed: Installed) -> str:
    """Return what to use in place of a public name that TensorFlow does not have; "": not known."""
    hint = text_of(REMOVED, use.api_name)
    if hint:
        return hint
    if not use.name.startswith(V1) and installed.has(f"{V1}.{rest}"):
        return f"use tf.compat.v1.{rest}, or `import tensorflow.compat.v1 as tf` for all names of TensorFlow 1"
    if installed.lacks_keras_2(f"{V1}.{use.api_name}"):
        return f"it is in Keras 2, the package tf_keras: {legacy_keras.installation()}"
    return ""


def _is_refused_late(use: Use) -> bool:
    space, _ = space_of(estimator_paths.SPACES, use.name) or (contrib.SPACE, "")
    return space.is_refused_late and (space is not contrib.SPACE or use.api_name.partition(".")[0] == "contrib")


def _why_not_in_estimator(name: str) -> str | None:
    """Return the reason why a name of tf.estimator does not exist; "" if it exists, and None if `name` is not below
    tf.estimator.
    """
    # A space is the table of what the runner has below one of the names of tf.estimator, such as tf.keras.estimator.
    space, rest = space_of(names.SPACES, name) or (None, "")
    if space is None:
        return None
    if rest in OF_EVERY_MODULE or space.serves(rest):
        return ""
    if rest in names.GONE:
        return names.GONE[rest]
    if names.V1_SPACE.serves(rest):
        return f"a name of TensorFlow 1: use tf.compat.v1.estimator.{rest}"
    module, _, last = rest.rpartition(".")
    # Texts of findings have no period at the end.
    return f"tf.estimator never had this name.{did_you_mean(last, space.listed(module))}".removesuffix(".")


# --- what is printed --------------------------------------------------------------------------------------------------


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text, one per line in the format of compilers: `file:line: verdict: name: text`. All
    unchanged names of a line of source are in one line.
    """
    unchanged_names: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    lines: list[tuple[str, int, str]] = []
    for finding in findings:
        if finding.verdict == UNCHANGED:
            unchanged_names[finding.file, finding.line].append(finding.name)
        else:
            lines.append((finding.file, finding.line, f"{finding.verdict}: {finding.name}: {finding.text}"))
    for (file, line), names_of_line in unchanged_names.items():
        lines.append((file, line, f"{UNCHANGED}: {', '.join(names_of_line)}"))
    lines.sort(key=operator.itemgetter(0, 1))
    return "".join(f"{file}:{line}: {text}\n" for file, line, text in lines)


def summary(findings: Sequence[Finding]) -> str:
    """Return one line about a program: whether it runs here, and the number of findings of each verdict."""
    counts = collections.Counter(finding.verdict for finding in findings)
    if not findings:
        return "no use of TensorFlow"
    unsupported = [finding for finding in findings if finding.verdict == UNSUPPORTED]
    no_fix = next((finding for finding in unsupported if finding.text.endswith(WITHOUT_FIX)), None)
    if no_fix is not None:
        verdict = f"cannot run here, for {no_fix.name} in {no_fix.file}, line {no_fix.line}: {no_fix.text}"
    elif unsupported:
        verdict = "runs after the changes that the unsupported lines name"
    else:
        verdict = "runs"
        num_conditional = sum(finding.text.startswith("only if ") for finding in findings)
        if num_conditional:
            verdict += f", unless it comes to one of the {num_conditional} uses marked `only if`"
    return f"{verdict} ({counts[UNCHANGED]} unchanged, {counts[CHANGED]} changed, {counts[UNSUPPORTED]} unsupported)"


def _sources(path: Path) -> Iterator[Path]:
    """Yield the source files of a program: a file or those of a folder, and what these import from the folder beside
    `path` and from the current one.
    """
    folders = dict.fromkeys((path.parent, Path()))  # where Python looks for modules; each once
    unread = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    done = set[Path]()
    while unread:
        file = unread.pop(0)
        if file.resolve() in done:
            continue
        done.add(file.resolve())
        yield file
        with contextlib.suppress(OSError, ValueError, SyntaxError):  # whoever reads the file next reports the error
            tree = ast.parse(file.read_bytes())
            unread += imported_files(tree, file, folders)


def main(arguments: Sequence[str]) -> int:
    """Print the findings about the given programs.

    Returns:
      exit code. 0: nothing is unsupported; 1: something is; 2: a file cannot be read or is not Python.
    """
    parser = argparse.ArgumentParser(prog="python -m runner.classic check", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files (with what they import), or folders of .py files")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one per finding")
    options = parser.parse_args(arguments)
    installed = Installed()
    findings = list[Finding]()
    unreadable = list[Path]()
    for path in options.paths:
        of_program = list[Finding]()
        for file in _sources(path):
            try:
                of_program += check_source(file.read_text(), str(file), installed)
            except (OSError, UnicodeDecodeError) as error:
                unreadable.append(path)
                print(f"runner.classic check: {error}", file=sys.stderr)
            except SyntaxError as error:
                unreadable.append(path)
                message = f"{error.msg} ({python2.fix_of_syntax(error)})"
                print(f"{error.filename}:{error.lineno}: {message}", file=sys.stderr)
        if not options.json:
            verdict = "not judged, since a file could not be read" if path in unreadable else summary(of_program)
            print(f"{report(of_program)}{path}: {verdict}")
        findings += of_program
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    if unreadable:
        return 2
    return int(any(finding.verdict == UNSUPPORTED for finding in findings))
