"""Hooks and a time limit of training from the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import Every, Hook
from runner.config import parsing, schema, user_code
from runner.config.schema import ConfigError
from runner.config.user_code import UserCodeError
from tests.config.test_config import composed
from tests.support.jobs import results, run
from tests.support.messages import Messages

HERE = "tests.task.test_config_hooks"
CALLS: list[Any] = []


class Watch(Hook):
    def __init__(self, every: int, label: str = "watch") -> None:
        self.every, self._label = Every(steps=every), label

    def after_step(self, run: Any, result: Any) -> None:
        CALLS.append((self._label, result.first_step, result.last_step))


class Examples(Hook):
    """Notes which of the examples x = 1, 2, ... it gets, and that it is another object."""

    def __init__(self, name: str = "features") -> None:
        self.fetches = (name,)

    def after_examples(self, run: Any, values: Any) -> None:
        CALLS.append((id(self), run.global_step, values["features"].tolist()))


class Session(tf.compat.v1.train.SessionRunHook):
    def after_create_session(self, session: Any, coord: Any) -> None:
        CALLS.append("session")


def stop_at(step: int) -> Any:
    return tf.compat.v1.train.StopAtStepHook(last_step=step)


def no_hook() -> Any:
    return "hook"


@pytest.fixture(autouse=True)
def calls() -> Any:
    CALLS.clear()


def test_hooks_of_every_kind_are_called(tmp_path: Path) -> None:
    watch = f"{{fn: {HERE}.Watch, params: {{every: 2, label: mine}}}}"
    hooks = f"train.hooks=[{watch}, {{fn: {HERE}.Session}}, {{fn: {HERE}.stop_at, params: {{step: 5}}}}]"
    assert run(tmp_path, hooks, "train.max_steps=8", "train.steps_per_loop=1") == 0
    assert ["session", ("mine", 1, 2), ("mine", 3, 4)] == CALLS
    assert results(tmp_path)[0]["global_step"] == 5
    config = parsing.parse(composed([hooks]))
    assert parsing.parse(schema.to_tree(config)) == config, "as config.yaml has them"


def test_hooks_of_evaluations_are_called_in_each_of_them_and_are_its_own(tmp_path: Path) -> None:
    hooks = f"eval.hooks=[{{fn: {HERE}.Examples}}]"
    named = "input.eval={a: {params: {num_examples: 5}}, b: {params: {num_examples: 4}}, fn: tests.support.jobs.once}"
    assert run(tmp_path, hooks, named, "input.eval.batch_size=3", "checkpoint.save_steps=2") == 0
    owners = list(dict.fromkeys(owner for owner, *_ in CALLS))
    seen = [(owners.index(owner), step, values) for owner, step, values in CALLS]
    of_step = lambda step: [(0, step, [1, 2, 3]), (0, step, [4, 5]), (1, step, [1, 2, 3]), (1, step, [4])]  # noqa: E731
    assert seen == [*of_step(2), *of_step(4)]
    CALLS.clear()
    assert run(tmp_path, hooks, named, "input.eval.batch_size=5", "command=evaluate") == 0
    assert [values for _, _, values in CALLS] == [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    config = parsing.parse(composed([hooks]))
    assert parsing.parse(schema.to_tree(config)) == config, "as config.yaml has them"


@pytest.mark.parametrize("command", ["train_and_evaluate", "evaluate", "dry_run"])
def test_an_evaluation_that_lacks_what_a_hook_fetches_is_refused_before_the_first_step(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    if command == "evaluate":
        assert run(tmp_path) == 0
        capsys.readouterr()
    hooks = f"eval.hooks=[{{fn: {HERE}.Examples, params: {{name: feature}}}}]"
    assert run(tmp_path, hooks, f"command={command}") == 2
    said = capsys.readouterr().err
    messages.same("exit 2", said[said.index("runner: ") :].splitlines()[0])
    assert command == "evaluate" or not list(tmp_path.glob("run/model.ckpt*"))


def test_training_ends_at_the_limit_and_the_same_command_goes_on(tmp_path: Path) -> None:
    limits = ("train.max_secs=1e-6", "train.steps_per_loop=2")
    assert run(tmp_path, *limits) == 0 and results(tmp_path)[0]["global_step"] == 2
    assert "eval/loss" in results(tmp_path)[0]["metrics"]
    assert run(tmp_path, *limits) == 0 and results(tmp_path)[1]["global_step"] == 4


@pytest.mark.parametrize(
    "hook",
    [
        f"{{fn: {HERE}.no_hook}}",
        f"{{fn: {HERE}.Watch, params: {{evry: 2}}}}",
    ],
    ids=["no hook", "unknown param"],
)
def test_what_is_no_hook_is_named_with_its_key(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, f"train.hooks=[{hook}]") == 2
    said = capsys.readouterr().err
    message, note = said[said.index("runner: ") :].splitlines()
    messages.same("exit 2", message)
    messages.same("note", note)
    assert ("'evry'" in message) == ("evry" in hook)


@pytest.mark.parametrize(
    "hooks",
    [
        "[mine.Hook]",
        "[{params: {a: 1}}]",
        "[{fn: a.B, parms: {}}]",
    ],
    ids=str,
)
def test_a_hook_that_is_written_wrong_is_refused(hooks: str, messages: Messages) -> None:
    for key in ("train.hooks", "eval.hooks"):
        with messages.raised(ConfigError):
            parsing.parse(composed([f"{key}={hooks}"]))


def test_a_name_that_leads_nowhere_is_found_without_tensorflow(messages: Messages) -> None:
    for key in ("train.hooks", "eval.hooks"):
        config = parsing.parse(composed([f"{key}=[{{fn: {HERE}.Wach}}]"]))
        named = next(entry for entry in config.functions() if entry[0] == f"{key}[0].fn")
        with messages.raised(UserCodeError):
            user_code.locate(*named)
