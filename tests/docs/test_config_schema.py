"""conf/schema/: editors know every key, accept what the runner accepts, and find what it would refuse."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from referencing import Registry, Resource

from runner.config import parsing
from runner.config.mistakes import ConfigError
from runner.config.schema import Config, class_at, setting_at
from runner.config.settings.limits import check_limits, limits_of
from runner.launch.environment.new_project import write_project

ROOT = Path(__file__).parents[2]
FILES = {path.name: path.read_text() for path in (ROOT / "conf" / "schema").glob("*.json")}
SCHEMAS = {name: json.loads(text) for name, text in FILES.items()}
# Each file is found by its name beside the file that refers to it, as on disk.
REGISTRY: Any = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items())


def mistakes(name: str, tree: Any) -> list[str]:
    """Return the messages about a tree that is checked with the schema of a group, or with that of the whole config."""
    validator = jsonschema.Draft7Validator(SCHEMAS[f"{name}.json"], registry=REGISTRY)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tree)]


def read(text: str) -> Any:
    """Return what is in a config file, as Hydra reads it."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def schema_of(text: str, group: str) -> str:
    """Return the name of the schema for a file of a group."""
    return "config" if "# @package _global_" in text or group == "conf" else group


def made() -> Any:
    """Return docs/make_config_schema.py as a module."""
    path = ROOT / "docs" / "make_config_schema.py"
    spec = importlib.util.spec_from_file_location("make_config_schema", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keys_of(cls: Any, at: str = "") -> Iterator[str]:
    """Yield the keys that a class of the schema declares and that have no keys below them."""
    hints = get_type_hints(cls)
    for setting in dataclasses.fields(cls):
        key = f"{at}.{setting.name}".lstrip(".")
        if dataclasses.is_dataclass(hints[setting.name]):
            yield from keys_of(hints[setting.name], key)
        else:
            yield key


KEYS = [*keys_of(Config), *(f"input.eval.{name}" for name in ("fn", "batch_size", "shard", "shuffle_seed"))]


def tree_of(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


# --- the files ------------------------------------------------------------------------------------------------------


def test_the_files_are_made_from_the_schema_and_conf() -> None:
    assert made().texts() == FILES, "run `make schema`"


def test_each_file_is_a_schema() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft7Validator.check_schema(schema)


def test_each_key_is_described_and_says_its_limits() -> None:
    properties = SCHEMAS["train.json"]["properties"]
    assert properties["max_steps"]["description"].startswith("Train up to this global step.")
    assert (properties["max_steps"]["minimum"], properties["max_steps"]["default"]) == (1, 1000)
    for key in KEYS:
        node: Any = SCHEMAS["config.json"]
        for part in key.split("."):
            node = node["properties"][part]
            if "allOf" in node:
                node = SCHEMAS[node["allOf"][0]["$ref"]]
        assert node.get("description"), key


def test_a_group_offers_its_options() -> None:
    entry = SCHEMAS["config.json"]["properties"]["defaults"]["items"]["anyOf"][1]
    offered = entry["properties"]["override /strategy"]["anyOf"][0]["enum"]
    assert offered == sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml"))


# --- what is right is accepted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_our_files_have_no_mistake(path: Path) -> None:
    text = path.read_text()
    assert mistakes(schema_of(text, path.parent.name), read(text)) == []


def test_the_files_of_a_new_project_name_a_schema_that_is_there_and_have_no_mistake(tmp_path: Path) -> None:
    write_project(tmp_path)
    files = list(tmp_path.rglob("*.yaml"))
    assert files
    for path in files:
        text = path.read_text()
        named = re.search(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
        assert named is not None, path
        schema = path.parent / named[1]
        assert schema.read_text() == FILES[schema.name]
        assert schema.stem == schema_of(text, path.parent.name)
        assert mistakes(schema.stem, read(text)) == []
    assert {path.name for path in (tmp_path / "conf" / "schema").iterdir()} == set(FILES)


PAGE = (ROOT / "docs" / "how_to" / "config.md").read_text().partition("### In an editor\n")[2].partition("\n## ")[0]


@pytest.mark.processes
def test_a_project_gets_the_schemas_as_the_page_says(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": path}, check=True)
    assert {file.name: file.read_text() for file in (tmp_path / "conf" / "schema").iterdir()} == FILES
    (mapping,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for schema, files in json.loads(mapping)["yaml.schemas"].items():
        assert (tmp_path / schema).is_file()
        assert {schema_of(file.read_text(), file.parent.name) for file in ROOT.glob(files)} == {Path(schema).stem}


IN_NO_FILE = {
    "docs/how_to/kubernetes.md": "of a pod",
    "CONTRIBUTING.md": "a key that is made there as an example",
}


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield (page, the sentence above, text) of each block of YAML in the documentation."""
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        for block in re.finditer(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if page not in IN_NO_FILE:
                yield page, text[: block.start()].rstrip().rpartition("\n")[2], block[1]


@pytest.mark.parametrize(("page", "above", "text"), blocks())
def test_the_documentation_has_no_mistake(page: str, above: str, text: str) -> None:
    if any(text.strip() in path.read_text() for path in (ROOT / "conf").rglob("*.yaml")):
        return  # a piece of one of our files
    named = re.search(r"conf/(\w+)/\w+\.yaml", f"{text}{above}")
    tree = read(text)
    group = named[1] if named else "input" if "train" in tree and "fn" in tree["train"] else "experiment"
    assert mistakes(schema_of(text, group), tree) == []


ADDED = """
defaults:
  - mine
  - override /model: mine
  - /optimizer@model.params.optimizer: adam
  - optional local: machine
  - override hydra/launcher: joblib
  - custom_group: [a, b]
  - _self_
hydra: {job: {name: mine}}
vars: {data_dir: "${oc.env:DATA,data}", more: {any: [1, 2]}}
model: {fn: mine.net, params: {width: 3, nested: {list: [1, a, null]}}}
input:
  train: {params: "${model.params}", batch_size: "${vars.size}", fn: "???"}
  eval:
    batch_size: 64
    test: {fn: mine.test, params: {path: x}}
    validation: "${input.eval.test}"
train:
  warm_start: {rename: {encoder/: "bert/encoder/"}, vocabularies: {embedding: {new_vocab: a.txt, axis: 0}}}
  hooks: [{fn: mine.Hook, params: {every: 3}}, "${vars.hook}"]
  steps_per_loop: auto
tracking: {tags: {team: vision, year: 2026}, backend: [mlflow, {fn: mine.Tracker, params: {}}], run_name: 7}
"""


def test_what_is_the_users_own_is_allowed() -> None:
    assert mistakes("config", read(ADDED)) == []
    assert mistakes("model", {"defaults": ["wide_deep", {"/optimizer@params.optimizer": "adam"}], "params": {}}) == []
    assert mistakes("train", None) == [], "a file of comments only"


# --- what is wrong is found -----------------------------------------------------------------------------------------


def test_a_misspelt_key_is_found() -> None:
    unseen = []
    for key in KEYS:
        parent, _, name = key.rpartition(".")
        group, _, below = key.partition(".")
        tree = tree_of(f"{parent}.{name}x".lstrip("."), 1)
        if not mistakes("config", tree) or (below and not mistakes(group, tree[group])):
            unseen.append(key)
    assert unseen == []


VALUES = [
    None,
    True,
    0,
    1,
    -1,
    7,
    0.5,
    -0.5,
    1.5,
    10**10,
    "some text",
    "auto",
    "min",
    [],
    ["a"],
    ["best"],
    {},
    {"a": 1},
]
COMPOSED = ["${train.max_steps}", "${oc.env:HOME}", "???"]


@functools.cache
def node_of(cls: type) -> Any:
    """Return the runner's own settings of a class, into which it merges a config."""
    return parsing._node(cls)


def refuses(key: str, value: Any) -> bool:
    """Report whether the runner refuses a value of a key, for its type or its limits."""
    parent, _, name = key.rpartition(".")
    cls, setting = class_at(parent), setting_at(key)
    assert cls is not None and setting is not None
    limits = limits_of(setting)
    try:
        held: Any = OmegaConf.to_container(OmegaConf.merge(node_of(cls), {name: value}))
        if value is not None or limits.auto:
            check_limits(limits, held[name], str)  # as held: a number is text where the key takes text
    except (OmegaConfBaseException, ConfigError):
        return True
    return False


def is_taken_for_another(key: str, value: Any) -> bool:
    """Report whether the runner takes what no file should have: 7 for true, null or an empty list for a choice."""
    kind = str(getattr(setting_at(key), "type", ""))
    is_number = isinstance(value, int) and not isinstance(value, bool)
    has_choices = kind == "Any" and (value in (None, []) or is_number)
    return has_choices or (is_number and kind.startswith("bool"))


OF_MANY_SHAPES = ("input.eval", "tracking.backend", "train.hooks", "eval.hooks", "train.warm_start.vocabularies")
"""Keys whose values are not checked by the types of the schema; the tests below have them."""
TYPED = {(class_at(key.rpartition(".")[0]), key.rpartition(".")[2]): key for key in KEYS if key not in OF_MANY_SHAPES}
"""Class and name of a setting -> a key with it."""


@pytest.mark.parametrize("key", TYPED.values())
def test_it_refuses_the_types_and_numbers_that_the_runner_refuses(key: str) -> None:
    found = {}
    for value in VALUES:
        refused = refuses(key, value)
        finds = bool(mistakes("config", tree_of(key, value)))
        if finds != refused and not (finds and is_taken_for_another(key, value)):
            found[repr(value)] = "the runner refuses it" if refused else "the schema refuses it"
    assert found == {}


def test_what_hydra_composes_may_stand_anywhere() -> None:
    found = [message for key in KEYS for value in COMPOSED for message in mistakes("config", tree_of(key, value))]
    assert found == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input.eval", {"batch_size": 3, "tset": 4}),
        ("input.eval", {"test": {"batch_siez": 3}}),
        ("input.eval", [1]),
        ("train.hooks", [{"fnn": "x"}]),
        ("train.hooks", ["x"]),
        ("eval.hooks", {"fn": "x"}),
        ("tracking.backend", {"params": {}}),
        ("tracking.backend", 3),
        ("train.warm_start.vocabularies", {"embedding": "tokens.txt"}),
        ("train.warm_start.vocabularies", {"embedding": {"axis": 2}}),
        ("train", None),
        ("train", {"defaults": ["mine"]}),
        ("defaults", {"model": "mine"}),
        ("defaults", [{"model": "a", "input": "b"}]),
        ("experiment", "wine"),
    ],
)
def test_a_wrong_shape_is_found(key: str, value: Any) -> None:
    assert mistakes("config", tree_of(key, value))
