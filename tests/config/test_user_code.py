"""Dotted names in the config: found without running the user's code, and said well when they lead nowhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.config.user_code import Location, UserCodeError, add_to_path, load, locate
from tests.support.messages import Messages


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of user code on sys.path; what it imported is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("up_"):
            del sys.modules[name]
    importlib.invalidate_caches()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_module_means_its_default_function(project: Path) -> None:
    write(project / "up_a.py", "def model_fn(): return 7")
    assert locate("model.fn", "up_a", "model_fn") == Location("up_a", "model_fn", project / "up_a.py")
    assert load("model.fn", "up_a", "model_fn")() == 7


def test_a_function_in_a_namespace_package(project: Path) -> None:
    write(project / "up_pkg" / "nets" / "wide.py", "def build(): return 8")
    assert load("model.fn", "up_pkg.nets.wide.build", "model_fn")() == 8


def test_a_callable_object_or_an_imported_name_will_do(project: Path) -> None:
    write(
        project / "up_b.py", "import functools\nfrom os.path import join as model_fn\nfn = functools.partial(int, '3')"
    )
    assert load("model.fn", "up_b.fn", "model_fn")() == 3
    assert locate("model.fn", "up_b", "model_fn").attribute == "model_fn"


def test_a_package_may_define_the_function_itself(project: Path) -> None:
    write(project / "up_c" / "__init__.py", "def model_fn(): return 9")
    assert load("model.fn", "up_c", "model_fn")() == 9


def test_looking_does_not_run_the_code(project: Path) -> None:
    write(project / "up_d" / "__init__.py", "raise SystemExit('ran')")
    write(project / "up_d" / "nets.py", "raise SystemExit('ran')\ndef model_fn(): ...")
    assert locate("model.fn", "up_d.nets", "model_fn").file == project / "up_d" / "nets.py"
    assert "up_d" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        "up_nope.x", "up_modls.wide", "up_models.wid", "up_models.wide.modl_fn", "up_models.deep", "up_models",
        "up_models/wide.py", "up_models..wide",
    ],
)  # fmt: skip
def test_says_what_it_looked_for(name: str, project: Path, messages: Messages) -> None:
    write(project / "up_models" / "wide.py", "def model_fn(): ...")
    write(project / "up_models" / "deep.py", "def net(): ...")
    with messages.raised(UserCodeError):
        locate("model.fn", name, "model_fn")


def test_what_only_running_can_tell_is_told_when_it_is_loaded(project: Path, messages: Messages) -> None:
    write(project / "up_e.py", "def outer():\n    def model_fn(): ...\n")
    locate("model.fn", "up_e", "model_fn")
    with messages.raised(UserCodeError):
        load("model.fn", "up_e", "model_fn")
    write(project / "up_f.py", "model_fn = 3")
    with messages.raised(UserCodeError):
        load("model.fn", "up_f", "model_fn")


def test_a_star_import_or_broken_source_is_left_to_the_import(project: Path) -> None:
    write(project / "up_g.py", "from os.path import *")
    assert load("model.fn", "up_g.join", "model_fn")("a", "b") == "a/b"
    write(project / "up_h.py", "def model_fn(:")
    locate("model.fn", "up_h", "model_fn")
    with pytest.raises(SyntaxError):
        load("model.fn", "up_h", "model_fn")


def test_adds_a_directory_to_the_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_to_path(tmp_path)
    add_to_path(tmp_path)
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
