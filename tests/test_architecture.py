"""The layers of `runner/`: who may import whom, and who must stay free of TensorFlow and MLflow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUNNER = ROOT / "runner"

# A module imports only from layers before its own. A new file needs a place here; a name may be here before it exists.
LAYERS: tuple[tuple[str, ...], ...] = (
    # 0 plain Python
    ("types", "files", "report", "journal", "user_code", "cluster", "masking", "identity", "garbage", "names"),
    ("ranking", "output", "step_range", "ending", "config_trees", "legacy_keras", "api_names"),
    ("config", "early_stopping"),  # the schema
    ("config_nodes", "export_checks", "strategy_checks", "warm_start_checks"),
    ("checks", "debugging", "local_cluster", "tf_config", "slurm", "kubernetes", "tpu"),
    ("parsing", "lock", "saved", "resolvers"),  # a tree, checked against the schema
    ("mistakes", "provenance", "cluster_info", "dialect"),
    # 1 one mechanism each
    ("cluster_bridge", "heartbeat", "loopback", "parameter_server", "server"),
    ("launcher", "run_config", "strategy", "elements", "operations", "manifest", "tracking", "iterators"),
    ("mlflow_tracker",),
    ("legacy_keras_bridge",),
    ("bridge", "v1_bridge", "keras_bridge", "random_bridge", "ps_bridge", "export_bridge"),
    ("variable_spec", "bundles", "requested_names"),
    ("seeds", "vocabularies"),
    ("mlflow_model",),
    ("outcome", "stopping", "curves", "randomness", "retention", "divided", "snapshots"),
    ("gang", "variable_bridge", "sharding", "gradients", "nan_loss", "metrics"),
    ("shipping", "checkpoints", "predictions", "errors"),
    ("batch_part",),
    ("losses",),
    ("numbered_names",),
    ("agreement", "damage", "record", "restarts", "placement", "spread"),
    ("boundary", "peers", "spares", "input_states"),
    ("tasks", "saving"),
    ("peer_run", "pipelines", "variables", "one_shot"),
    ("inputs", "traced"),
    ("compiled",),
    ("position",),
    # 2
    ("hooks",),
    # 3 the contract
    ("model_fn", "profiling", "following"),
    # 4
    ("traces", "precision", "rates", "export_outputs"),
    ("averages", "global_step", "refusals", "flops", "receivers"),
    ("updates", "export_graph"),
    ("parts", "step_loop"),
    ("steps", "warm_start", "composites"),
    ("trace_session",),
    ("event_writers", "callers", "hook_overrides"),
    ("session_hooks",),
    ("inference", "passes", "scaffold", "coordinator", "export_values"),
    ("range_loop", "range_evaluation"),
    ("model", "export"),
    ("preparation", "inspection"),
    ("run_checkpoints",),
    ("loop", "model_summary"),
    ("evaluation", "prediction", "exporters"),
    # 5
    ("stored_model",),
    ("exporting",),
    ("estimator",),
    ("exports",),
    ("elsewhere",),
    # 6
    ("training",),
    # The classic API: a package that the core never imports. `task` loads it by name.
    ("classic.classic_bridge", "classic.names", "classic.installed", "classic.source", "classic.keys"),
    ("classic.module_paths",),
    ("classic.keras_models_bridge",),
    ("classic.install", "classic.differences"),
    ("classic.tensorflow1",),
    ("classic",),  # its __init__
    (
        "classic.semantics",
        "classic.run_config",
        "classic.logged",
        "classic.hooks",
        "classic.inputs",
        "classic.warm_start",
    ),
    ("classic.columns_bridge", "classic.keras_named", "classic.optimizers_bridge", "classic.summaries"),
    ("classic.head_checks", "classic.layers", "classic.optimizers", "classic.parse_specs", "classic.column_specs"),
    ("classic.head_metrics",),
    ("classic.heads_base", "classic.logits"),
    ("classic.heads_classes", "classic.heads_labels", "classic.heads_regression", "classic.heads_multi"),
    ("classic.heads", "classic.premade"),
    ("classic.tabular",),
    ("classic.estimator",),
    ("classic.premade_linear", "classic.extenders"),
    ("classic.premade_dnn", "classic.premade_combined", "classic.premade_baseline", "classic.premade_v1"),
    ("classic.training", "classic.early_stopping", "classic.tpu", "classic.keras_models"),
    ("classic.check",),
    ("classic.__main__",),
    # 7
    ("build", "sweep"),
    ("rehearsal",),
    ("commands",),
    # 8, 9
    ("task",),
    ("standby",),
    ("supervisor", "composing"),
    ("multirun",),
    ("app",),
    ("__main__",),
)
WITHOUT_TENSORFLOW = (
    "types", "files", "report", "journal", "user_code", "cluster", "config", "parsing", "launcher", "tracking",
    "shipping", "sweep", "supervisor", "app", "masking", "garbage", "identity", "lock", "saved", "mistakes",
    "provenance", "outcome", "stopping", "composing", "multirun", "checks", "debugging", "config_trees",
    "names", "dialect", "curves", "predictions", "errors", "task", "ranking", "output", "step_range", "export_checks",
    "manifest", "retention", "local_cluster", "gang", "tf_config", "slurm", "kubernetes", "tpu", "resolvers",
    "cluster_info", "heartbeat", "loopback", "restarts", "tasks", "peers", "peer_run", "spares", "standby", "ending",
    "legacy_keras", "api_names", "mlflow_tracker", "strategy_checks", "config_nodes", "warm_start_checks",
    "classic", "classic.names", "classic.install", "classic.classic_bridge", "classic.installed",
    "classic.differences", "classic.source", "classic.tensorflow1", "classic.check",
    "classic.keys", "classic.module_paths", "classic.__main__",
)  # fmt: skip
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = {
    ".".join(path.relative_to(RUNNER).with_suffix("").parts).removesuffix(".__init__"): path
    for path in RUNNER.rglob("*.py")
    if path != RUNNER / "__init__.py"
}
MODULES = sorted(FILES)


def imported_modules(path: Path) -> set[str]:
    """The modules of `runner` that a file imports anywhere in it, except for type checkers only."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {_module(alias.name) for alias in node.names if alias.name.startswith("runner.")}
        elif isinstance(node, ast.ImportFrom) and node.module in ("runner", "runner.classic"):
            found |= {_module(f"{node.module}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("runner."):
            found.add(_module(node.module))
    return found


def _module(name: str) -> str:
    """`runner.a.b` -> a; `runner.classic.a.b` -> classic.a."""
    _, first, *rest = name.split(".")
    return f"classic.{rest[0]}" if first == "classic" and rest else first


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_layers_before_its_own(module: str) -> None:
    assert module in LAYER_OF, f"runner/{module}.py has no place in LAYERS"
    for other in imported_modules(FILES[module]):
        assert other in LAYER_OF, f"runner/{module}.py imports {other!r}, which is no module of the table"
        assert LAYER_OF[other] < LAYER_OF[module], f"runner/{module}.py imports runner.{other}, which is not below it"


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("classic")])
def test_the_core_never_imports_the_classic_api(module: str) -> None:
    assert not [other for other in imported_modules(FILES[module]) if other.startswith("classic")]


@pytest.mark.parametrize("module", [name for name in WITHOUT_TENSORFLOW if name in MODULES])
def test_never_imports_tensorflow_or_mlflow(module: str) -> None:
    code = (
        f"import sys, runner.{module}\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'tensorflow', 'keras', 'tf_keras', 'mlflow'}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


def test_only_the_tracker_names_mlflow() -> None:
    for path in RUNNER.rglob("*.py"):
        if path.stem not in ("mlflow_tracker", "mlflow_model"):  # the latter is for models that MLflow holds a copy of
            tops = {
                name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
            }
            assert "mlflow" not in tops, f"{path} imports mlflow"


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("model_fns/*.py")), *sorted(ROOT.glob("input_fns/*.py"))], ids=str)
def test_examples_use_public_names_only(path: Path) -> None:
    assert not [node for node in imported_modules(path) if node in LAYER_OF]


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in RUNNER.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_help_and_cfg_import_neither_numpy_nor_rich() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['runner', '--cfg', 'job']\n"
        "try:\n    runpy.run_module('runner', run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted({n.split('.')[0] for n in sys.modules} & {'tensorflow', 'mlflow', 'numpy', 'rich'}))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1].strip() == "LOADED"
