"""run.debug: what it changes in a config, and what the run then does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, Input, RunConfig
from runner.config import parsing, schema
from runner.config.schema import Config, ConfigError
from runner.estimator.train_and_evaluate import train_and_evaluate
from runner.system.console import Progress
from runner.task.build import build_job
from runner.tracking.journal import NullJournal
from tests.config.test_config import composed
from tests.integration.test_exactness import LossRecorder
from tests.support.messages import Messages
from tests.support.models import data, native, strategies
from tests.support.tiers import slow_but

STRATEGIES = strategies()


def config(*overrides: str) -> Config:
    return parsing.parse(composed(list(overrides)))


def test_fast_dev_changes_the_length_of_everything_and_nothing_else() -> None:
    plain, debugged = schema.to_tree(config()), schema.to_tree(config("run.debug=fast_dev"))
    changed = {
        f"{group}.{key}": (value, debugged[group][key])
        for group, settings in plain.items()
        if isinstance(settings, dict)
        for key, value in settings.items()
        if value != debugged[group][key]
    }
    assert changed == {
        "run.debug": (None, "fast_dev"),
        "train.max_steps": (1000, 2),
        "eval.steps": (None, 1),
        "tracking.backend": ("mlflow", "none"),
    }
    assert config("run.debug=fast_dev", "train.max_steps=1").train.max_steps == 1
    assert config("run.debug=fast_dev", "train.max_steps=null").train.max_steps == 2


def test_a_config_that_was_written_by_a_debugged_run_reads_the_same() -> None:
    debugged = config("run.debug=fast_dev")
    assert parsing.parse(schema.to_tree(debugged)) == debugged


def test_fast_dev_takes_two_steps_and_evaluates_one_batch(tmp_path: Path) -> None:
    job = build_job(config("run.debug=fast_dev", f"model_dir={tmp_path}"), NullJournal(), Progress())
    assert job.train_spec is not None
    result = train_and_evaluate(job.estimator, job.train_spec, job.eval_specs)
    assert result.global_step == 2 and result.examples == 2 * 64
    assert result.metrics[""]["accuracy"] * 256 == pytest.approx(round(result.metrics[""]["accuracy"] * 256), abs=1e-3)


def test_overfit_needs_an_end(messages: Messages) -> None:
    with messages.raised(ConfigError):
        config("run.debug=overfit", "train.max_steps=null", "train.max_epochs=3")
    assert config("run.debug=overfit", "train.max_epochs=3").train.max_epochs is None


def shuffled(params: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data(50)).shuffle(50).batch(params["batch_size"]).repeat()


@pytest.mark.parametrize(
    ("strategy", "batch_size"),
    slow_but(
        itertools.product(["default", "mirrored", "central_storage"], [16, None]), ("default", None), ("mirrored", 16)
    ),
)
def test_overfit_sees_the_first_batch_again_and_again(strategy: str, batch_size: int | None, tmp_path: Path) -> None:
    params = {"batch_size": 8} if batch_size is None else {}
    data = Input(shuffled, params=params, batch_size=batch_size, first_batch_only=True)
    recorder = LossRecorder()
    for max_steps in (150, 300):  # a resumed run has the same batch
        trainer = Estimator(native, tmp_path, RunConfig(train_distribute=STRATEGIES[strategy], tf_random_seed=3))
        trainer.train(data, hooks=[recorder], max_steps=max_steps)
    losses = np.concatenate(recorder.losses)
    assert len(losses) == 300 and losses[-1] < 0.01 * losses[0]
    assert np.all(np.diff(losses[20:]) < 1e-4), "one batch: the loss goes down, step by step"


def test_overfit_of_a_config_trains_on_one_batch(tmp_path: Path) -> None:
    job = build_job(
        config("run.debug=overfit", f"model_dir={tmp_path}", "train.max_steps=60", "input.eval=null"),
        NullJournal(),
        Progress(),
    )
    assert job.train_spec is not None
    recorder = LossRecorder()
    job.estimator.train(job.train_spec.input_fn, hooks=[recorder], max_steps=60)
    losses = np.concatenate(recorder.losses)
    assert losses[-1] < 0.4 * losses[0]
