"""The packages of `runner/`: who may import whom, who stays free of TensorFlow, and where private names live."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUNNER = ROOT / "runner"

# A package imports only from packages before its own. "contract" is what lies in `runner/` itself.
PACKAGES = (
    "system", "tf_private", "config", "checkpoint_files", "distribute", "tracking", "remote", "contract", "tracing",
    "data", "hooks", "checkpoint", "programs", "export", "estimator", "classic", "models", "task", "launch",
)  # fmt: skip

# Modules and whole packages that neither TensorFlow nor MLflow is imported by: what answers before a task starts.
WITHOUT_TENSORFLOW = (
    "system", "config", "launch", "types", "tf_private.legacy_keras", "tracking.curves", "tracking.journal",
    "tracking.mlflow_tracker", "tracking.plain_values", "tracking.provenance",
    "tracking.run_end", "tracking.run_lock", "tracking.run_record", "tracking.ship", "tracking.shipping",
    "tracking.summary", "tracking.tracker", "tracking.backends.csv_tracker",
    "tracking.backends.session", "tracking.backends.user_tracker", "checkpoint_files.layout",
    "checkpoint_files.manifest", "checkpoint.retention", "distribute.cluster",
    "distribute.cluster_resolver", "distribute.errors", "distribute.kubernetes", "distribute.local_cluster",
    "distribute.managed_jobs", "distribute.slurm", "distribute.tf_config", "distribute.tpu", "hooks.hook",
    "hooks.plots", "task.main",
    "task.error_report", "task.prediction_files", "task.stop_hook", "classic", "classic.__main__", "classic.keys",
    "classic.compat.check", "classic.compat.differences", "classic.compat.install", "classic.compat.installed_names",
    "classic.compat.estimator_paths", "classic.compat.names", "classic.compat.old_modules", "classic.compat.source",
    "classic.compat.tf1_imports", "classic.contrib.names", "remote.mirror", "remote.store", "remote.upload",
    "tf_private.tf_estimator",
)  # fmt: skip

FILES = {
    ".".join(path.relative_to(RUNNER).with_suffix("").parts).removesuffix(".__init__"): path
    for path in RUNNER.rglob("*.py")
    if path != RUNNER / "__init__.py"
}


def package_of(module: str) -> str:
    """`checkpoint.writer` -> checkpoint; `types` -> contract."""
    first = module.partition(".")[0]
    return first if (RUNNER / first).is_dir() else "contract"


def import_nodes(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports anywhere in a file, those for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def imported_names(path: Path) -> set[str]:
    """Return the dotted names that a file imports: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`."""
    names: set[str] = set()
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_modules(path: Path) -> set[str]:
    """Return the modules of `runner` that a file imports, without the `runner.`; public names count as none."""
    ours = {name.removeprefix("runner.") for name in imported_names(path) if name.startswith("runner.")}
    return {name if name in FILES else name.rpartition(".")[0] for name in ours} - {""}


IMPORTS = {module: imported_modules(path) for module, path in FILES.items()}


def test_a_room_imports_only_from_rooms_before_its_own() -> None:
    rank = {package: number for number, package in enumerate(PACKAGES)}
    assert {package_of(module) for module in FILES} == set(PACKAGES)
    upward = [
        f"runner.{module} imports runner.{other}"
        for module, others in IMPORTS.items()
        for other in others
        if rank[package_of(other)] > rank[package_of(module)]
        and module != "__main__"  # `python -m runner` starts the command
    ]
    assert upward == []


def test_no_file_is_imported_by_what_it_imports() -> None:
    tuple(graphlib.TopologicalSorter(IMPORTS).static_order())  # a CycleError names the files


def test_the_command_reads_of_checkpoints_and_tasks_only_what_is_free_of_tensorflow() -> None:
    beyond = {other for module in FILES if package_of(module) == "launch" for other in IMPORTS[module]}
    beyond = {
        other for other in beyond if package_of(other) in PACKAGES[PACKAGES.index("tracing") : PACKAGES.index("launch")]
    }
    assert beyond <= {"checkpoint_files.layout", "checkpoint.retention", "task.main", "task.error_report"}


def test_a_room_has_a_page_about_itself_and_imports_nothing() -> None:
    for package in (
        *PACKAGES,
        "classic.compat",
        "classic.contrib",
        "classic.heads",
        "classic.premade",
        "tracking.backends",
        "launch.environment",
        "launch.sweeps",
    ):
        if package in ("contract", "classic"):  # `import runner.classic` puts its names on TensorFlow
            continue
        page = FILES[package]
        assert ast.get_docstring(ast.parse(page.read_text())), f"{page} says nothing about the package"
        assert not list(import_nodes(page)), f"{page} imports something"


def test_a_room_is_small_enough_to_look_through() -> None:
    folders = {path.parent for path in FILES.values()} - {RUNNER}
    files = {folder: [one for one in folder.glob("*.py") if not one.stem.startswith("__")] for folder in folders}
    assert {str(folder): len(found) for folder, found in files.items() if len(found) > 16} == {}


@pytest.mark.processes
def test_what_answers_before_a_task_starts_imports_neither_tensorflow_nor_mlflow() -> None:
    modules = sorted(
        module
        for module in FILES
        if module in WITHOUT_TENSORFLOW or module.split(".")[0] in ("system", "config", "launch")
    )
    assert set(WITHOUT_TENSORFLOW) <= {*FILES}
    # In one process, one after the other: the first that loads one of them is named.
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(f'runner.{name}')\n"
        "    loaded = {n.split('.')[0] for n in sys.modules} & {'tensorflow', 'keras', 'tf_keras', 'mlflow'}\n"
        "    if loaded:\n        sys.exit(f'runner.{name} imports {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_private_names_of_tensorflow_are_imported_in_one_room() -> None:
    private = (
        "tensorflow.python.",
        "tensorflow.core.",
        "tensorflow.compat.v2.__internal__",
        "keras.src.",
        "tf_keras.src.",
    )
    elsewhere = {
        f"runner.{module} imports {name}"
        for module, path in FILES.items()
        if package_of(module) != "tf_private"
        for name in imported_names(path)
        if f"{name}.".startswith(private)
    }
    assert elsewhere == set()


def test_the_core_never_imports_the_classic_api() -> None:
    core = [module for module in FILES if package_of(module) not in ("classic", "models")]  # models: its premade models
    assert [
        f"runner.{module}" for module in core if any(package_of(other) == "classic" for other in IMPORTS[module])
    ] == []


def test_only_the_tracker_names_mlflow() -> None:
    # mlflow_model is for models that MLflow holds a copy of.
    allowed = {"tracking.mlflow_tracker", "tracking.mlflow_model"}
    naming = {module for module, path in FILES.items() if "mlflow" in {n.split(".")[0] for n in imported_names(path)}}
    assert naming <= allowed


def test_examples_use_public_names_only() -> None:
    for path in (*ROOT.glob("model_fns/*.py"), *ROOT.glob("input_fns/*.py"), *ROOT.glob("project_template/**/*.py")):
        assert imported_modules(path) <= {"classic"}, path


@pytest.mark.processes
def test_help_and_cfg_import_neither_numpy_nor_rich() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['runner', '--cfg', 'job']\n"
        "try:\n    runpy.run_module('runner', run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted({n.split('.')[0] for n in sys.modules} & {'tensorflow', 'mlflow', 'numpy', 'rich'}))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1].strip() == "LOADED"
