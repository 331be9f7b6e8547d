"""Names and texts in the form that MLflow takes."""

from __future__ import annotations

import posixpath
import re

import pytest

from runner.tracking.mlflow_tracker import UniqueNames, clean_name, clean_text


def test_names_are_made_of_what_mlflow_takes() -> None:
    assert clean_name("eval_val/accuracy@k#1") == "eval_val/accuracy_k_1"
    assert clean_name("model.params.a b:c") == "model.params.a b:c"


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("", "_"),
        (".", "_"),
        ("..", "__"),
        ("../x", "__/x"),
        ("..x", "__x"),
        ("/a", "_/a"),
        ("a//b", "a/_/b"),
        ("a/", "a/_"),
    ],
)
def test_a_name_is_a_path_that_means_itself(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@pytest.mark.parametrize("name", ["/" * 400, "a/" * 125 + "b", "./" * 200, "x" * 249 + "//", "é" * 300, "\n"])
def test_names_of_any_length_pass(name: str) -> None:
    clean = clean_name(name)
    assert 0 < len(clean) <= 250
    assert posixpath.normpath(clean) == clean and not clean.startswith(("..", "/"))
    assert re.fullmatch(r"[/\w.\- :]*", clean)


def test_two_names_never_become_one() -> None:
    names = UniqueNames()
    first, second = names.clean("a@b"), names.clean("a#b")
    assert first == "a_b" and re.fullmatch(r"a_b-[0-9a-f]{8}", second)
    assert (names.clean("a@b"), names.clean("a#b")) == (first, second)
    longs = {names.clean("x" * 300 + str(number)) for number in range(3)}
    assert len(longs) == 3 and max(map(len, longs)) == 250


def test_a_name_with_a_suffix_keeps_it_in_a_later_process() -> None:
    before = UniqueNames()
    made = {name: before.clean(name) for name in ("a@b", "a#b")}
    later = UniqueNames(made.values())
    assert {name: later.clean(name) for name in ("a#b", "a@b")} == made


def test_texts_are_cut_and_hold_what_every_database_takes() -> None:
    assert clean_text(None, 9) == "None"
    assert clean_text("a\nb", 9) == "a\nb"
    assert clean_text("\udc80\0", 9) == "?\\0"
    assert clean_text("x" * 11, 10) == "x" * 9 + "…"
