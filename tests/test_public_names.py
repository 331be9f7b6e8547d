"""What `import runner` offers, and what it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import runner

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", runner.__all__)
def test_public_name_resolves(name: str) -> None:
    value = getattr(runner, name)
    assert value.__name__ == name and value.__doc__
    assert name in dir(runner)
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'runner' has no attribute 'Estimater'"):
        runner.Estimater  # noqa: B018


@pytest.mark.processes
def test_importing_runner_imports_no_tensorflow() -> None:
    heavy = ("tensorflow", "keras", "mlflow", "numpy")
    code = f"import sys, runner; runner.__all__; dir(runner); print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.processes
def test_config_and_results_are_had_without_tensorflow() -> None:
    code = (
        "import sys; from runner import Every, Hook, Params, RunConfig, StepResult; print('tensorflow' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
