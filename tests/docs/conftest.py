"""The scripts of `.ci` as modules: its name is no package's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[2] / ".ci"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return _loaded("install")


@pytest.fixture(scope="module")
def gpu_bundle() -> ModuleType:
    return _loaded("gpu_bundle")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return _loaded("release")


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
