"""The reference is whole: a heading for each key of the schema, each public name, each page in the navigation."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

import runner
from runner.config.changed_keys import REMOVED
from runner.config.schema import Config, TrainConfig
from tests.support.messages import Messages
from tests.support.screen import line_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def made() -> Any:
    """Return docs/make_config_reference.py as a module."""
    spec = importlib.util.spec_from_file_location("make_config_reference", DOCS / "make_config_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: dict[str, str] = made().pages()


def keys_of(cls: Any, at: str = "") -> Iterator[str]:
    """Yield the keys that a class of the schema declares, those below it included."""
    hints = get_type_hints(cls)
    for setting in dataclasses.fields(cls):
        hint = hints[setting.name]
        key = f"{at}.{setting.name}".lstrip(".")
        if key == "eval_strategy":
            continue  # its files take the keys of strategy
        if dataclasses.is_dataclass(hint):
            yield from keys_of(hint, key)
        else:
            yield key


def headings(text: str) -> list[str]:
    return re.findall(r"^### `([\w.]+)`", text, re.MULTILINE)


def test_each_key_of_the_schema_has_a_heading() -> None:
    told = {key for text in PAGES.values() for key in headings(text)}
    declared = {key for key in keys_of(Config) if not key.startswith("input.")}
    missing = {key for key in declared if key not in told and not any(one.startswith(f"{key}.") for one in told)}
    assert not missing


def told_of(key: str) -> str:
    """Return what the page of `train` says of a key."""
    return PAGES["train.md"].partition(f"### `{key}`")[2].partition("\n### ")[0]


@pytest.mark.parametrize("key", [f"train.{field.name}" for field in dataclasses.fields(TrainConfig)])
def test_a_key_says_its_default_and_what_it_takes(key: str) -> None:
    body = told_of(key)
    assert re.search(r"^(Default: `|Keys of its own)", body, re.MULTILINE), body
    assert len(body.splitlines()[2]) > 20, "no comment"


@pytest.mark.parametrize("key", ["train.max_steps", "train.nan"])
def test_limits_are_those_of_the_schema(key: str, messages: Messages) -> None:
    messages.same(key, line_of(told_of(key), "Default: "))


def test_each_group_is_in_the_navigation_and_each_page_of_the_navigation_exists() -> None:
    nav = re.findall(r"[\w/]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    generated = {f"reference/config/{name}" for name in PAGES}
    assert generated <= {*nav}
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - generated
    assert written == {*nav} - generated


def test_each_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text() + (DOCS / "reference" / "hooks.md").read_text()
    assert {*re.findall(r"^::: runner\.(\w+)$", text, re.MULTILINE)} == {*runner.__all__}


def test_the_page_of_what_is_gone_names_every_removed_key() -> None:
    text = (DOCS / "reference" / "removed.md").read_text()
    assert {key for key in REMOVED if f"`{key}`" not in text} == set()


def links_of(page: str) -> set[str]:
    """Return the pages that a page links to."""
    text = PAGES[page.rpartition("/")[2]] if page.startswith("reference/config/") else (DOCS / page).read_text()
    targets = re.findall(r"\]\(([\w/.-]+\.md)(?:#[^)]*)?\)", text)
    return {os.path.normpath(os.path.join(os.path.dirname(page), target)) for target in targets}


def test_every_page_is_two_clicks_from_the_first() -> None:
    first = links_of("index.md")
    second = set().union(*map(links_of, first))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"index.md"}
    assert pages <= first | second


QUESTIONS = {
    "install it": ("tutorial/first_model.md", "pip install /path/to/checkout"),
    "install it on a GPU": ("tutorial/first_model.md", "estimator-runner[gpu]"),
    "train a first model": ("tutorial/first_model.md", "python -m runner experiment=iris"),
    "train on my own data": ("tutorial/own_data.md", "input=csv"),
    "train a Keras model that I have": ("how_to/keras_model.md", "load_model"),
    "predict": ("how_to/predict.md", "command=predict"),
    "see which run is best": ("tutorial/compare_runs.md", "command=best"),
    "work in a notebook": ("how_to/notebooks.md", "runner.run"),
    "use a table": ("how_to/tabular_data.md", "class_weights"),
    "use images in folders": ("how_to/image_folders.md", "input_fns/pictures.py"),
    "plot": ("how_to/plots.md", "pd.DataFrame"),
    "compare two runs": ("tutorial/compare_runs.md", "Compare"),
    "look at a run in TensorBoard": ("how_to/tensorboard.md", "tensorboard --logdir outputs"),
    "try many values": ("tutorial/sweep.md", "python -m runner -m"),
    "understand an error message": ("faq.md", "runner: "),
    "look up a class": ("reference/api.md", "::: runner.Estimator"),
    "resume after a crash": ("how_to/resume.md", "model_dir"),
    "know why my run is slow": ("how_to/profile.md", "input-bound"),
    "export and serve": ("how_to/export.md", "command=export"),
    "use two machines": ("tutorial/two_machines.md", "host1:2222"),
    "move from tf.estimator": ("tutorial/from_tf_estimator.md", "runner.classic"),
    "debug a NaN": ("how_to/debug_nan.md", "run.debug=nan"),
    "find my files": ("reference/files.md", "outputs/"),
}
"""What a newcomer asks -> the page with the answer, and a part of the answer."""


SEARCHED = {
    "jupyter": "how_to/notebooks.md",
    "missing values": "how_to/tabular_data.md",
    "categorical": "how_to/tabular_data.md",
    "class weights": "how_to/tabular_data.md",
    "plot": "how_to/plots.md",
    "confusion matrix": "how_to/plots.md",
}
"""What a newcomer searches -> a page that the site's search finds by it: it has the words."""


@pytest.mark.parametrize("words", SEARCHED)
def test_a_search_of_a_newcomer_finds_its_page(words: str) -> None:
    assert words in (DOCS / SEARCHED[words]).read_text().lower()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_of_a_newcomer_is_answered_one_click_from_the_first_page(question: str) -> None:
    page, answer = QUESTIONS[question]
    assert page in links_of("index.md")
    assert answer in (DOCS / page).read_text()
