"""What tf.estimator logged while it trained and evaluated, on TensorFlow's logger and in its words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from runner.system.console import NullProgress
from runner.tracking.journal import NullJournal


class LoggedJournal(NullJournal):
    """Says what happens on `tf.get_logger()`, where `tf.logging.set_verbosity` decides who hears it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[int, float] | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self._say_loss(step, values["train/loss"])
        evaluations: dict[str, dict[str, str]] = {}
        for name, value in values.items():
            evaluation, _, metric = name.partition("/")
            if evaluation.startswith("eval"):
                evaluations.setdefault(evaluation, {"global_step": str(step)})[metric] = f"{value:.7g}"
        for metrics in evaluations.values():
            text = ", ".join(f"{name} = {metrics[name]}" for name in sorted(metrics))
            tf.get_logger().info("Saving dict for global step %d: %s", step, text)

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "checkpoint":
            tf.get_logger().info("Saving checkpoints for %s into %s.", fields.get("step"), fields.get("path"))
        elif kind == "first_step":
            self._last = None

    def _say_loss(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if self._last is None:
            tf.get_logger().info("loss = %.7g, step = %d", loss, step)
        else:
            steps, secs = step - self._last[0], now - self._last[1]
            tf.get_logger().info("global_step/sec: %.6g", steps / secs if secs else 0.0)
            tf.get_logger().info("loss = %.7g, step = %d (%.3f sec)", loss, step, secs)
        self._last = step, now


class LoggedProgress(NullProgress):
    """Says the loss of the last step when training ends."""

    _loss: float | None = None

    def update(self, step: int, loss: float, *speeds: float) -> None:
        self._loss = loss

    def stop(self) -> None:
        if self._loss is not None:
            tf.get_logger().info("Loss for final step: %.7g.", self._loss)
        self._loss = None
