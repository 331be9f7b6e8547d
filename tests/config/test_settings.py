"""The classes that are a group of keys and an object of a script: what one refuses, the other refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner.config.mistakes import ConfigError
from runner.config.settings.limits import limits_of
from runner.config.settings.metric_rules import EarlyStopping, KeepBest, ReduceLROnPlateau
from tests.config.test_config import parsed

RULES = (EarlyStopping, ReduceLROnPlateau, KeepBest)


def values_beyond(setting: dataclasses.Field[Any]) -> list[Any]:
    """Return values that the limits of a field exclude."""
    limits = limits_of(setting)
    beyond: list[Any] = ["nothing"] if limits.choices else []
    beyond += [limits.minimum - 1] if limits.minimum is not None else []
    beyond += [limits.maximum + 1] if setting.type == "int" else []
    beyond += [bound for bound in (limits.above, limits.below) if bound is not None]
    beyond += [float("nan"), float("inf")] if setting.type == "float" else []
    return beyond


CASES = [
    pytest.param(rule, setting.name, value, id=f"{rule.__name__}-{setting.name}-{value}")
    for rule in RULES
    for setting in dataclasses.fields(rule)
    for value in values_beyond(setting)
]


@pytest.mark.parametrize(("rule", "name", "value"), CASES)
def test_the_key_and_the_object_have_the_same_limits(rule: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as of_key:
        parsed(f"{rule.key}.metric=eval/loss", f"{rule.key}.{name}={value}")
    assert of_key.value.key == f"{rule.key}.{name}"
    assert str(of_key.value).startswith(of_key.value.key)
    with pytest.raises(ValueError, match=rf"^{rule.__name__}\({name}="):
        rule("eval/loss", **{name: value})


def test_a_config_has_the_objects_of_a_script() -> None:
    config = parsed(
        "train.early_stopping.metric=eval/loss",
        "train.early_stopping.patience_evals=3",
        "train.reduce_lr_on_plateau.metric=eval/loss",
        "train.reduce_lr_on_plateau.factor=0.5",
        "checkpoint.keep_best.metric=eval/accuracy",
    )
    assert config.train.early_stopping == EarlyStopping("eval/loss", patience_evals=3)
    assert config.train.reduce_lr_on_plateau == ReduceLROnPlateau("eval/loss", factor=0.5)
    assert config.checkpoint.keep_best == KeepBest("eval/accuracy")
