"""Hooks that draw what a model predicts, for each evaluation or during training: `ConfusionMatrix` and `ScorePlots`.

matplotlib and scikit-learn are imported when something is drawn. A picture that cannot be drawn, because the examples
are of one class only, or scores are not numbers, ends no run: a warning says so once.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runner.hooks.hook import Every, Hook, Run
from runner.types import StepResult

_log = logging.getLogger(__name__)

_MAX_CLASSES_WITH_NUMBERS = 20
"""Largest number of classes for which a confusion matrix shows its numbers."""


class Drawing(Hook, abc.ABC):
    """Base class: draws the examples of each evaluation at its end.

    In training these are the examples of the steps that log, since the last picture.

    Args:
      steps: in training, draw every so many steps; None: at its end. An evaluation ignores it.
      prefix: the beginning of the names of the pictures, for two hooks of one class.
    """

    def __init__(self, steps: int | None = None, prefix: str = "") -> None:
        self.every = Every(steps=steps)
        self._prefix = prefix
        self._said: set[str] = set()
        self._clear()

    def begin(self, run: Run) -> None:
        self._clear()

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.every.steps:
            self._draw(run)

    def end(self, run: Run) -> None:
        self._draw(run)

    def _draw(self, run: Run) -> None:
        figures = {f"{self._prefix}{name}": figure for name, figure in self._figures().items()}
        # Before the call, so that a picture holds no example twice even if it cannot be logged.
        self._clear()
        if figures:
            run.log(figures)

    @abc.abstractmethod
    def _clear(self) -> None:
        """Forget all examples."""

    @abc.abstractmethod
    def _figures(self) -> dict[str, Any]:
        """Return name -> figure of the examples since `_clear`; {} without examples."""

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s: %s", type(self).__name__, text)


class ConfusionMatrix(Drawing):
    """Draws how often the model takes one class for another, as `confusion_matrix`.

    Labels and predictions are classes `[batch]` or `[batch, 1]`: numbers, or names as strings. Or they have a column
    for each class, `[batch, classes]`, and the largest value counts: probabilities, logits, one-hot labels. Numbers in
    one column that are no integers are probabilities of class 1.

    Args:
      labels, predictions: their names, as in `Hook.fetches`.
      names: of the classes, in the order of their numbers. None: the numbers themselves.
      title: what a class is, beside the axis of the labels.
      steps, prefix: as in Drawing.
    """

    def __init__(
        self,
        labels: str = "labels",
        predictions: str = "predictions/probabilities",
        names: Sequence[str] | None = None,
        title: str = "label",
        steps: int | None = None,
        prefix: str = "",
    ) -> None:
        self.fetches = (labels, predictions)
        self._names = [str(name) for name in names or ()]
        self._title = title
        super().__init__(steps, prefix)

    def after_examples(self, run: Run, values: Mapping[str, np.ndarray]) -> None:
        labels_name, predictions_name = self.fetches
        labels = self._classes(labels_name, values[labels_name])
        predictions = self._classes(predictions_name, values[predictions_name])
        for pair in zip(labels, predictions, strict=True):
            if None not in pair:
                self._counts[pair] = self._counts.get(pair, 0) + 1

    def _classes(self, name: str, values: np.ndarray) -> list[str | None]:
        """Return the class of each example as text; None: its values are not numbers."""
        if values.ndim > 2:
            raise ValueError(
                f"ConfusionMatrix: {name} is {list(values.shape)}. It draws classes, [examples] or [examples, 1], or "
                "a value for each class, [examples, classes]."
            )
        columns = values.reshape(len(values), -1)
        if columns.dtype == object:  # strings, as bytes
            return [text.decode(errors="replace") for text in columns[:, 0]]
        numbers = columns.astype(np.float64)
        has_nan = np.asarray(np.isnan(numbers).any(axis=1))
        if has_nan.any():
            self._warn_once(f"{name} has NaN; these examples are left out.")
            numbers[has_nan] = 0  # only until their texts are replaced by None below
        classes: np.ndarray = numbers[:, 0]
        if numbers.shape[1] > 1:
            classes = numbers.argmax(axis=1)
        elif (classes != classes.round()).any():  # one column that is no integers: probabilities of class 1
            classes = classes > 0.5
        texts: list[str | None] = [self._name_of(number) for number in classes.astype(int).tolist()]
        for index in np.flatnonzero(has_nan):
            texts[index] = None
        return texts

    def _name_of(self, number: int) -> str:
        if 0 <= number < len(self._names):
            return self._names[number]
        return str(number)

    def _clear(self) -> None:
        self._counts: dict[Any, int] = {}

    def _figures(self) -> dict[str, Any]:
        if not self._counts:
            return {}
        found = set[str]()
        for pair in self._counts:
            found.update(pair)
        names = [*self._names, *sorted(found - set(self._names), key=_in_order)]
        counts = np.zeros([len(names), len(names)], int)
        for (label, prediction), count in self._counts.items():
            counts[names.index(label), names.index(prediction)] = count
        return {"confusion_matrix": _matrix(counts, names, self._title)}


def _in_order(name: str) -> tuple[bool, int, str]:
    """Sort key: numbers by their size, before other names."""
    is_number = name.removeprefix("-").isdecimal()
    number = int(name) if is_number else 0
    return not is_number, number, name


def _matrix(counts: np.ndarray, names: Sequence[str], title: str) -> Any:
    """Return the figure of a confusion matrix; each row is coloured by its shares."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5.4), layout="constrained")
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= _MAX_CLASSES_WITH_NUMBERS:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "k"
            axes.text(column, row, str(count), ha="center", va="center", color=color)
    positions = range(len(names))
    axes.set_xlabel("model says")
    # Names as they are: `$x$` is no formula.
    axes.set_ylabel(title, parse_math=False)
    axes.set_yticks(positions, names, parse_math=False)
    axes.set_xticks(positions, names, parse_math=False, rotation=40, ha="right")
    return figure


class ScorePlots(Drawing):
    """Draws how well scores tell two classes apart: `roc`, `precision_recall`, `calibration` and `scores`, a histogram.

    The scores are probabilities of the positive class, `[batch]` or `[batch, 1]`, or of both classes, `[batch, 2]`.
    Scores outside of 0 to 1, such as logits, have no calibration. The hook keeps two numbers for each example.

    Args:
      labels, scores: their names, as in `Hook.fetches`. Labels are `[batch]` or `[batch, 1]`, or one-hot `[batch, 2]`.
      positive: the label of the positive class, a number or a string.
      bins: number of bins of the calibration, with as many examples in each, and of the histogram of each class.
      steps: as in Drawing.
      prefix: as in Drawing.
    """

    def __init__(
        self,
        labels: str = "labels",
        scores: str = "predictions/probabilities",
        positive: float | str = 1,
        bins: int = 10,
        steps: int | None = None,
        prefix: str = "",
    ) -> None:
        self.fetches = (labels, scores)
        self._positive = positive.encode() if isinstance(positive, str) else positive
        self._bins = bins
        super().__init__(steps, prefix)

    def after_examples(self, run: Run, values: Mapping[str, np.ndarray]) -> None:
        labels_name, scores_name = self.fetches
        labels = _column_of_positive_class(labels_name, values[labels_name])
        is_positive = labels == self._positive
        if values[labels_name].shape[1:] == (2,):  # one-hot
            is_positive = labels > 0.5
        scores = _column_of_positive_class(scores_name, values[scores_name])
        self._labels.append(is_positive)
        self._scores.append(scores.astype(np.float64))

    def _clear(self) -> None:
        self._labels: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []

    def _figures(self) -> dict[str, Any]:
        if not self._scores:
            return {}
        labels = np.concatenate(self._labels)
        scores = np.concatenate(self._scores)
        is_finite = np.isfinite(scores)
        if not is_finite.all():
            self._warn_once(f"{self.fetches[1]} has scores that are not finite; these examples are left out.")
            labels = labels[is_finite]
            scores = scores[is_finite]
        if not len(scores):
            return {}
        figures = {"scores": _histogram(labels, scores, self._bins)}
        if labels.all() or not labels.any():
            kind = "positive" if labels.any() else "negative"
            self._warn_once(f"all examples are {kind}, so only the histogram of their scores is drawn.")
            return figures
        figures |= {"roc": _roc(labels, scores), "precision_recall": _precision_recall(labels, scores)}
        if _are_probabilities(scores):
            figures["calibration"] = _calibration(labels, scores, self._bins)
        else:
            self._warn_once(f"{self.fetches[1]} has scores outside of 0 to 1, so no calibration is drawn.")
        return figures


def _are_probabilities(scores: np.ndarray) -> bool:
    return bool(scores.min() >= 0 and scores.max() <= 1)


def _column_of_positive_class(name: str, values: np.ndarray) -> np.ndarray:
    """Return the values of the positive class, `[examples]`: the only column, or the second of two."""
    columns = values.reshape(len(values), -1)
    if values.ndim > 2 or columns.shape[1] > 2:
        raise ValueError(
            f"ScorePlots: {name} is {list(values.shape)}. It draws two classes: [examples], [examples, 1] or "
            "[examples, 2]. For more classes there is runner.ConfusionMatrix."
        )
    last: np.ndarray = columns[:, -1]
    return last


def _axes(xlabel: str, ylabel: str) -> tuple[Any, Any]:
    """Return a new figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _roc(labels: np.ndarray, scores: np.ndarray) -> Any:
    from sklearn import metrics

    figure, axes = _axes("false positive rate", "true positive rate")
    false, true, _ = metrics.roc_curve(labels, scores)
    axes.plot(false, true, label=f"area {metrics.auc(false, true):.3f}")
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
    axes.legend(loc="lower right")
    return figure


def _precision_recall(labels: np.ndarray, scores: np.ndarray) -> Any:
    from sklearn import metrics

    figure, axes = _axes("recall", "precision")
    precision, recall, _ = metrics.precision_recall_curve(labels, scores)
    average = metrics.average_precision_score(labels, scores)
    axes.plot(recall, precision, drawstyle="steps-post", label=f"average precision {average:.3f}")
    axes.axhline(labels.mean(), color="grey", linestyle="--", linewidth=1, label=f"positive {labels.mean():.3g}")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="best")
    return figure


def _calibration(labels: np.ndarray, scores: np.ndarray, bins: int) -> Any:
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import brier_score_loss

    figure, axes = _axes("score, the mean of a bin", "share of positive examples")
    # As many examples in each bin: if positive ones are rare, all scores are small, and would be in one bin of equal
    # width.
    shares, means = calibration_curve(labels, scores, n_bins=bins, strategy="quantile")
    largest = max(*means, *shares)
    axes.plot([0, largest], [0, largest], color="grey", linestyle="--", linewidth=1)
    axes.plot(means, shares, marker="o", label=f"Brier score {brier_score_loss(labels, scores):.3g}")
    axes.legend(loc="best")
    return figure


def _histogram(labels: np.ndarray, scores: np.ndarray, bins: int) -> Any:
    figure, axes = _axes("score", "share of the class")
    edges = np.histogram_bin_edges(scores, bins)
    # Each class by itself: of all examples, rare positive ones could not be seen.
    for name, of_class in (("negative", scores[~labels]), ("positive", scores[labels])):
        number = len(of_class)
        shares = np.full(number, 1 / max(1, number))
        axes.hist(of_class, edges, weights=shares, alpha=0.5, label=f"{name} ({number})")
    axes.legend(loc="best")
    return figure
