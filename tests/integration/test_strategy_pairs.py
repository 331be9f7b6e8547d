"""Every allowed pair of strategies of training and evaluation gives the numbers of one device; others are refused.

Pairs in several processes: tests/integration/test_multi_process.py and tests/integration/test_parameter_server.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf

from runner import Estimator, RunConfig
from runner.config import parsing
from runner.config.schema import ConfigError
from tests.config.test_config import composed, parsed
from tests.support.journal import events_in, journal_of
from tests.support.messages import Messages
from tests.support.models import STYLES, eval_input, strategies, train_input
from tests.support.tiers import slow_but

STRATEGIES = strategies()
MODELS = ("classic", "keras_model")
EVALUATIONS: dict[str, Any] = {**STRATEGIES, "default": "default", "same": None}
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    """The loss of a compiled keras.Model has Keras's default dtype, whatever its parts have."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns the folder of a model after its steps with a strategy; each is trained once, when it is first needed."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train(model: str, strategy: str) -> Path:
        config = RunConfig(train_distribute=STRATEGIES[strategy], steps_per_loop=1, tensorboard=False)
        estimator = Estimator(STYLES[model], folder / model / strategy, config)
        estimator.train(train_input(12, dtype="float64"), steps=STEPS)
        return folder / model / strategy

    return train


PAIRS = slow_but(itertools.product(MODELS, STRATEGIES), ("classic", "mirrored"), ("keras_model", "central_storage"))


def evaluated(model: str, train: str, evaluation: str, folder: Path, journal: Path) -> tuple[dict[str, Any], int]:
    """The metrics of 22 examples in batches of 8, and how many examples were counted."""
    config = RunConfig(
        train_distribute=STRATEGIES[train], eval_distribute=EVALUATIONS[evaluation], tensorboard=False
    )  # fmt: skip
    estimator = Estimator(STYLES[model], folder, config, journal=journal_of(journal))
    metrics = estimator.evaluate(eval_input(8, dtype="float64"))
    (event,) = events_in(journal, "evaluated")
    return metrics, event["examples"]


@pytest.fixture(scope="module")
def of_one_device(
    trained: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Returns the metrics of a model that is trained and evaluated on one device."""
    folder = tmp_path_factory.mktemp("expected")
    return functools.cache(lambda model: evaluated(model, "default", "same", trained(model, "default"), folder / model))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "train"), PAIRS)
def test_metrics_of_every_pair_are_those_of_one_device(
    model: str, train: str, of_one_device: Callable[[str], Any], trained: Any, tmp_path: Path
) -> None:
    """Of these 22 examples tf.estimator counted 20 or 22 under two replicas (tensorflow issue 25284)."""
    expected, _ = of_one_device(model)
    assert expected["global_step"] == STEPS
    for evaluation in EVALUATIONS:
        if train == evaluation or (train == "default" and evaluation == "same"):
            continue  # the same again
        found, examples = evaluated(model, train, evaluation, trained(model, train), tmp_path / evaluation)
        assert examples == 22
        assert set(found) == set(expected)
        for name, value in expected.items():
            tolerance = 1e-6 if (model, name) == ("classic", "mae") else 1e-10  # v1 metrics are float32
            assert found[name] == pytest.approx(value, rel=tolerance), (evaluation, name)


# --- what is refused --------------------------------------------------------------------------------------------------

JOINED = ("multi_worker", "parameter_server", "tpu")


@pytest.mark.parametrize(("train", "evaluation"), [*itertools.product((*STRATEGIES, *JOINED), JOINED)])
def test_evaluation_under_another_strategy_of_several_processes_is_refused(
    train: str, evaluation: str, messages: Messages
) -> None:
    with messages.raised(ConfigError):
        parsed(f"strategy={train}", f"eval_strategy.name={evaluation}")


@functools.cache
def composed_once(override: str) -> dict[str, Any]:
    return composed([override])


@pytest.mark.parametrize(("train", "evaluation"), [*itertools.product((*STRATEGIES, *JOINED), (*STRATEGIES, None))])
def test_every_pair_that_is_promised_is_a_config(train: str, evaluation: str | None) -> None:
    of_evaluation = composed_once(f"eval_strategy={evaluation or 'same'}")
    config = parsing.parse({**composed_once(f"strategy={train}"), "eval_strategy": of_evaluation["eval_strategy"]})
    assert (config.strategy.name, config.eval_strategy.name) == (train, evaluation)


def test_an_estimator_refuses_a_second_strategy_of_several_processes(tmp_path: Path, messages: Messages) -> None:
    others = tf.distribute.MultiWorkerMirroredStrategy.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    with mock.patch("runner.distribute.collectives.WorkerCollectives") as together:
        together.return_value.num_workers = 2
        with messages.raised(ValueError):
            Estimator(STYLES["classic"], tmp_path, RunConfig(eval_distribute=others))
        Estimator(STYLES["classic"], tmp_path, RunConfig(train_distribute=others, eval_distribute=others))
