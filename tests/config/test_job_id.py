"""The name of a sweep's job: a hash of what it computes, as far as that differs from the schema's defaults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from runner.config import schema
from runner.config.job_id import is_shown_only, job_id
from tests.config.test_config import composed

DEFAULTS = schema.to_tree(schema.Config())
SETTINGS = schema.flatten(DEFAULTS)


def with_value(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`tree` with another value of a key; the groups above it are made where they are missing."""
    changed = copy.deepcopy(dict(tree))
    owner, (*groups, name) = changed, key.split(".")
    for group in groups:
        owner = owner.setdefault(group, {})
    owner[name] = value
    return changed


def without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    changed = copy.deepcopy(dict(tree))
    owner, (*groups, name) = changed, key.split(".")
    for group in groups:
        owner = owner[group]
    del owner[name]
    return changed


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    return composed()


def test_every_setting_that_matters_is_in_the_name_and_no_other(shipped: dict[str, Any]) -> None:
    names = {key: job_id(with_value(shipped, key, "another")) for key in SETTINGS}
    shown = {key for key, name in names.items() if name == job_id(shipped)}
    assert shown == {key for key in SETTINGS if is_shown_only(key)} | {"model_dir", "vars"}
    assert len(set(names.values())) == len(SETTINGS) - len(shown) + 1
    assert {"run.progress", "run.secrets", "tracking.uri", "sweep.metric"} <= shown
    assert not {"run.seed", "run.eager", "train.hooks", "command", "new.path"} & shown


@pytest.mark.parametrize("option", ["digits", "custom", "csv"])
def test_a_setting_that_is_missing_has_the_default_of_the_schema(option: str) -> None:
    tree = composed([f"input={option}"])
    name = job_id(tree)
    at_defaults = [key for key, value in schema.flatten(tree).items() if key in SETTINGS and value == SETTINGS[key]]
    assert len(at_defaults) > 100
    for key in at_defaults:
        assert job_id(without(tree, key)) == name, key
    for key, default in schema.flatten(dataclasses.asdict(schema.InputBlock()), "input.eval.").items():
        if default not in (None, {}):  # those that the files of `input` hold
            assert job_id(without(tree, key)) == name, key


def test_a_new_key_changes_no_name_at_its_default(shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name = job_id(shipped)
    train = dataclasses.make_dataclass(
        "Train", [("new_key", int, dataclasses.field(default=3))], bases=(schema.TrainConfig,), frozen=True
    )
    config = dataclasses.make_dataclass(
        "Wider", [("train", Any, dataclasses.field(default_factory=train))], bases=(schema.Config,), frozen=True
    )
    monkeypatch.setattr(schema, "Config", config)
    assert job_id(shipped) == name
    assert job_id(with_value(shipped, "train.new_key", 3)) == name
    assert job_id(with_value(shipped, "train.new_key", 4)) != name


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("model.params.width", [64, 64.0, "64", None, True, [64], {}]),
        ("input.train.params.files", [None, "a", ["a"], {"a": None}, {}]),
        ("train.hooks", [[], [{"fn": "a.b"}], [{"fn": "a.b", "params": {"n": 1}}], [{"fn": "a.c"}]]),
        ("train.warm_start.vocabularies", [{}, {"v": {"axis": 0}}, {"v": {"axis": 1}}, {"w": {"axis": 0}}]),
        ("input.eval", [None, {"fn": "a"}, {"fn": "b"}, {"fn": "a", "batch_size": 3}, {"fn": "a", "params": {"n": 1}}]),
    ],
)
def test_free_values_are_told_apart_as_they_are_written(key: str, values: list[Any], shipped: dict[str, Any]) -> None:
    assert len({job_id(with_value(shipped, key, value)) for value in values}) == len(values)


def test_a_default_in_a_named_evaluation_is_no_default_if_the_blocks_beside_it_set_it(shipped: dict[str, Any]) -> None:
    evaluations = {"fn": "a", "batch_size": 100, "train": {"shard": "auto"}, "test": {"batch_size": None}}
    name = job_id(with_value(shipped, "input.eval", evaluations))
    assert name != job_id(with_value(shipped, "input.eval", {**evaluations, "test": {}}))
    assert name == job_id(with_value(shipped, "input.eval", {**evaluations, "shard": "auto"}))


def test_the_name_is_that_of_the_settings_however_they_were_chosen(shipped: dict[str, Any]) -> None:
    assert job_id(composed(["train.log_steps=100", "strategy=default", "run.progress=off"])) == job_id(shipped)
    assert job_id(composed(["experiment=digits_classic"])) != job_id(shipped)
    assert job_id(composed(["strategy=mirrored"])) == job_id(with_value(shipped, "strategy.name", "mirrored"))
