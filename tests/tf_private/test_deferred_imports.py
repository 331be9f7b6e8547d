"""A deferred module is executed when one of its names is first used, and then is as any other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from runner.tf_private.legacy_keras import KERAS_WRAPPERS, DeferredImports

USES = ("from {0} import used as found", "import {0} as m; found = m.used", "from {0} import *")


@pytest.mark.parametrize("use", USES)
def test_is_executed_when_a_name_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "deferred_one.py").write_text(f"open({str(runs)!r}, 'a').write('x'); used = found = 5")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [DeferredImports(["deferred_one"]), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "deferred_one", raising=False)
    module = importlib.import_module("deferred_one")
    assert not hasattr(module, "__wrapped__")
    assert not runs.exists()
    names: dict[str, int] = {}
    exec(use.format("deferred_one"), names)
    assert (names["found"], module.used, runs.read_text()) == (5, 5, "x")
    with pytest.raises(AttributeError):
        module.missing  # noqa: B018


@pytest.mark.parametrize("name", KERAS_WRAPPERS)
def test_the_deferred_modules_of_keras_are_there(name: str) -> None:
    module = importlib.import_module(name)
    assert module.SKLearnClassifier.__module__.startswith("keras.src.wrappers")
