"""The hooks that draw: what their pictures hold, where the pictures go, and examples of which nothing can be drawn."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from runner import ConfusionMatrix, Every, ScorePlots
from runner.hooks.hook import Hook
from runner.types import StepResult
from tests.support.messages import Messages

FOUR = {"roc", "precision_recall", "calibration", "scores"}


class Log:
    """A run that keeps what is logged."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}

    def log(self, figures: Any) -> None:
        self.figures = figures


def drawn(hook: Hook, *batches: tuple[Any, Any]) -> dict[str, Figure]:
    """What a hook logs of an evaluation with batches of (labels, predictions)."""
    run: Any = Log()
    hook.begin(run)
    for batch in batches:
        values = dict(zip(hook.fetches, map(np.asarray, batch), strict=True))
        hook.after_examples(run, values)
    hook.end(run)
    for figure in run.figures.values():
        figure.canvas.draw()
    figures: dict[str, Figure] = run.figures
    return figures


def matrix(figures: dict[str, Figure]) -> tuple[list[str], list[list[int]]]:
    """The classes and the numbers of a confusion matrix."""
    (axes,) = figures["confusion_matrix"].axes
    names = [one.get_text() for one in axes.get_yticklabels()]
    numbers = [int(one.get_text()) for one in axes.texts]
    return names, np.reshape(numbers, [len(names), len(names)]).tolist()


PROBABILITIES = [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.6, 0.3]]
ROWS = [[1, 0, 0], [0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [
        ([0, 1, 2], PROBABILITIES),
        ([[0], [1], [2]], [[0], [1], [1]]),
        ([0.0, 1.0, 2.0], [0, 1, 1]),
        (np.eye(3), PROBABILITIES),
        ([0, 1, 2], np.array([b"0", b"1", b"1"], object)),
        (np.array([b"0", b"1", b"2"], object), np.array([[b"0"], [b"1"], [b"1"]], object)),
    ],
    ids=["probabilities", "columns", "floats", "one-hot", "names", "strings"],
)
def test_a_confusion_matrix_counts_classes_however_they_are_written(labels: Any, predictions: Any) -> None:
    half = len(labels) // 2
    figures = drawn(ConfusionMatrix(), (labels[:half], predictions[:half]), (labels[half:], predictions[half:]))
    assert matrix(figures) == (["0", "1", "2"], ROWS)


def test_a_confusion_matrix_has_the_names_of_the_classes_and_those_that_come_beside_them() -> None:
    hook = ConfusionMatrix("labels", "predictions/class", names=["cat", "dog", "$x$"])
    assert matrix(drawn(hook, ([0, 1, 0], [1, 1, 0]))) == (["cat", "dog", "$x$"], [[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    assert matrix(drawn(hook, ([0, 12], [9, 0])))[0] == ["cat", "dog", "$x$", "9", "12"], "forgets the last evaluation"
    assert matrix(drawn(ConfusionMatrix(), ([0, 1, 1], [0.2, 0.9, 0.4]))) == (["0", "1"], [[1, 0], [1, 1]])


def test_two_hooks_have_names_of_their_own() -> None:
    assert set(drawn(ConfusionMatrix(prefix="head/"), ([0, 1], [0, 1]))) == {"head/confusion_matrix"}
    assert set(drawn(ScorePlots(prefix="b_"), ([0, 1], [0.1, 0.7]))) == {f"b_{name}" for name in FOUR}


def test_many_classes_are_drawn_without_numbers() -> None:
    (axes,) = drawn(ConfusionMatrix(), (np.arange(30), np.arange(30)))["confusion_matrix"].axes
    assert not axes.texts and len(axes.get_xticklabels()) == 30


@pytest.mark.parametrize("form", ["[n]", "[n, 1]", "[n, 2]", "one-hot", "strings"])
def test_scores_are_drawn_in_four_pictures_whose_numbers_are_those_of_scikit_learn(form: str) -> None:
    from sklearn import metrics

    rng = np.random.RandomState(0)
    true = rng.rand(400) < 0.3
    probability = np.clip(0.3 * true + 0.6 * rng.rand(400), 0, 1)
    labels: Any = true.astype(np.int64)
    scores = probability if form == "[n]" else probability[:, None]
    if form in ("[n, 2]", "one-hot"):
        scores = np.stack([1 - probability, probability], 1)
    if form == "one-hot":
        labels = np.stack([~true, true], 1).astype(np.float32)
    if form == "strings":
        labels = np.array([b"yes" if one else b"no" for one in true], object)
    hook = ScorePlots(positive="yes" if form == "strings" else 1, bins=8)
    figures = drawn(hook, (labels[:150], scores[:150]), (labels[150:], scores[150:]))
    assert set(figures) == FOUR
    said = {}
    for name, figure in figures.items():
        legend = figure.axes[0].get_legend()
        assert legend is not None
        said[name] = [one.get_text() for one in legend.texts]
    assert said["roc"] == [f"area {metrics.roc_auc_score(true, probability):.3f}"]
    assert said["precision_recall"][0] == f"average precision {metrics.average_precision_score(true, probability):.3f}"
    assert said["calibration"] == [f"Brier score {metrics.brier_score_loss(true, probability):.3g}"]
    bars: list[Any] = list(figures["scores"].axes[0].patches)
    assert sum(bar.get_height() for bar in bars) == pytest.approx(2), "each class by itself"
    assert said["scores"] == [f"negative ({(~true).sum()})", f"positive ({true.sum()})"]
    means, shares = map(np.asarray, figures["calibration"].axes[0].lines[1].get_data())
    assert len(means) == 8 and np.mean(means) == pytest.approx(probability.mean()), "as many examples in each bin"
    assert np.mean(shares) == pytest.approx(true.mean())


@pytest.mark.parametrize(
    ("labels", "scores", "pictures"),
    [
        ([0, 0, 0], [0.1, 0.2, 0.3], {"scores"}),
        ([1, 1], [0.1, 0.2], {"scores"}),
        ([0, 1, 1], [0.1, np.nan, 0.3], FOUR),
        ([0, 1], [np.nan, np.inf], set()),
        ([0, 1, 0], [-2.0, 3.0, 0.5], FOUR - {"calibration"}),
        ([0, 1, 0], [0.5, 0.5, 0.5], FOUR),
    ],
    ids=["negative", "positive", "some NaN", "all NaN", "logits", "one score"],
)
def test_what_cannot_be_drawn_is_said_once_and_ends_no_run(
    labels: Any, scores: Any, pictures: set[str], caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    hook = ScorePlots()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert set(drawn(hook, (labels, scores))) == pictures
    for record in caplog.records:
        messages.same("log", record.getMessage())


def test_without_examples_nothing_is_drawn(caplog: pytest.LogCaptureFixture) -> None:
    assert drawn(ScorePlots()) == drawn(ConfusionMatrix()) == {}
    assert drawn(ConfusionMatrix(), ([0], [[np.nan, 0.5]])) == {}
    assert caplog.text.count("NaN") == 1


def test_values_of_another_shape_are_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        drawn(ScorePlots(), ([0, 1], [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]))
    with messages.raised(ValueError):
        drawn(ConfusionMatrix(), ([[[0]]], [[0.5]]))


def test_in_training_a_picture_is_of_the_steps_since_the_last() -> None:
    run: Any = Log()
    hook = ConfusionMatrix("labels", "predictions/class", steps=20)
    assert hook.every == Every(steps=20)
    result = StepResult(1, 20, np.zeros(20), 40, 1.0)
    sizes = []
    for labels in ([0, 1], [0, 0, 1]):
        hook.after_examples(run, {"labels": np.array(labels), "predictions/class": np.array(labels)})
        hook.after_step(run, result)
        sizes.append(sum(map(sum, matrix(run.figures)[1])))
    assert sizes == [2, 3]
    at_end = ScorePlots()
    at_end.after_examples(run, {"labels": np.array([0, 1]), "predictions/probabilities": np.array([0.1, 0.7])})
    run.figures = {}
    at_end.after_step(run, result)
    assert run.figures == {}
    at_end.end(run)
    assert set(run.figures) == FOUR
