"""Losses, speed and summaries of a training run: in the journal, the event file and the progress line."""

from __future__ import annotations

import collections
import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.estimator.context import EstimatorContext
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import Every
from runner.model_log import StepLog
from runner.programs.train_loop import NO_RECORDS, TIMES, LoopResult, Outputs, Schedule, own_secs
from runner.programs.train_scalars import RESERVED, WINDOW, TrainWindow, over_workers
from runner.system.console import Epochs, LoopReport
from runner.tracking import tensorboard
from runner.tracking.artifacts import current
from runner.tracking.provenance import imported_files
from runner.tracking.workers import STEP_TIMES, WORKER_STEPS
from runner.types import StepResult

_log = logging.getLogger(__name__)

FEW_POINTS = 4
"""If a loop has more points than this, a graph writes them to the event file; from Python each takes 0.1 ms."""


class TrainLog:
    """The log of one call of `Estimator.train`.

    Args:
      summary_writer: writer of the training's event file.

    Attributes:
      of_hooks: the log of what hooks report.
      recorded: (step, metrics) of the last point that had metrics.
    """

    def __init__(self, context: EstimatorContext, setup: TrainSetup, summary_writer: Any) -> None:
        self._context = context
        self._config = setup.config
        self._program = setup.program
        self._input = setup.input
        self._summary_writer = summary_writer
        self._first_step = setup.model.store.global_step
        # A resumed run writes no point for its first step to the journal, so that its points are those of an
        # undisturbed run. Its summaries have such a point, because TensorFlow's SummarySaverHook writes one, too.
        self._is_new = setup.latest is None or self._first_step == 0
        self._writes_loss = "loss" not in setup.program.summaries.names  # otherwise model_fn writes it itself
        offset = self._first_step + 1 if self._config.summaries_from_first_step else 0
        self._write_every = Every(self._config.save_summary_steps or None, offset=offset)
        self._summary_every = Every()
        self._metrics_every = Every()
        self._steps_of_workers = collections.Counter[str]()  # since the last line about them
        self._times: list[np.ndarray] = []  # of the loops since the last line about them
        self._times_secs = 0.0
        self._scalars = setup.program.scalars
        self._summary_keys: Sequence[str] = []
        self._has_said_too_large = False
        self.recorded: tuple[int, Mapping[str, float]] = (0, {})
        self._speed: dict[str, float] = {}  # the speed of the last loop that measured it
        reported_names = {*RESERVED, *setup.program.reported_names, *setup.program.summaries.names}
        writer = functools.partial(tensorboard.EventWriter, summary_writer)
        self.of_hooks = StepLog("train", context.journal.metrics, writer, reported_names, context.is_chief)

    def begin(self, target: int | None) -> None:
        """Start the progress line.

        Args:
          target: the global step at which training ends; None: unknown.
        """
        steps = self._input.pipeline.remaining_steps()
        epochs = None
        num_epochs = self._input.pipeline.num_epochs
        if num_epochs and steps and math.isfinite(steps):
            began = self._first_step - self._input.num_steps_read
            epochs = Epochs(num_epochs, steps / num_epochs, began)
            end_of_input = began + int(steps)
            target = min(target or end_of_input, end_of_input)
        self._context.progress.start(target, self._first_step, epochs)
        if self._program.hides_stragglers and self._context.is_chief:
            _log.info(
                "A worker that slows the others is not named: with train.jit, train.gradient_accumulation, "
                "train.precision=mixed_float16 and run.eager no worker measures its own part of a step."
            )
        # If the chief has summaries, they split the loops of all workers, because all must run the same graph
        # functions.
        if self._context.collectives.any(bool(self._program.summaries)):
            self._summary_every = self._write_every
        # All workers use the chief's names, in its order: `over_workers` sums vectors, which have no names.
        names = json.dumps([list(self._scalars.summaries), list(self._scalars.metrics)])
        self._summary_keys, metrics = json.loads(self._context.collectives.broadcast_text(names))
        self._begin_window(metrics)
        if self._program.kept_metrics:
            self._metrics_every = Every(self._config.log_step_count_steps or None)
            self._program.kept_metrics.reset()

    def _begin_window(self, metrics: Sequence[str]) -> None:
        """Begin the window that averages the loss and `metrics`: the names of the chief's metrics, in its order."""
        self._window = TrainWindow(["loss", *metrics], self._config.log_step_count_steps or None)
        own = list(self._scalars.metrics)
        number_of = {name: number for number, name in enumerate(own)}
        # Columns of `taken.values["metrics"]`: the sums of this worker's metrics, and then their weights. `_rows`
        # appends a column of zeros, which stands for each metric of the chief that this worker lacks.
        column_of_zeros = 2 * len(own)
        self._columns_of_sums = [number_of.get(name, column_of_zeros) for name in metrics]
        self._columns_of_weights = [min(column + len(own), column_of_zeros) for column in self._columns_of_sums]
        at_step = {name for name, is_at_step in zip(own, self._scalars.is_at_step, strict=True) if is_at_step}
        flags = [False, *(name in at_step for name in metrics)]  # the loss, which is averaged, and the metrics
        # A mask over the columns of `_rows`: the numbers and then their weights.
        self._columns_not_averaged = np.array([*flags, *flags], bool)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the log; `restore` reads it. All workers must call this together."""
        return self._window.state(self._context.collectives)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on after a checkpoint. Args: facts: what it stores beside the variables."""
        self._window.restore(facts.get(WINDOW, {}), is_chief=self._context.is_chief)

    @property
    def has_summaries(self) -> bool:
        """Report whether any summaries are written."""
        return self._summary_every.steps is not None

    def schedule(self, step: int, num_steps: int, advance: int, *, in_loops: bool) -> Schedule:
        """Return which of the `num_steps` steps after `step` write summaries.

        Args:
          step: the global step before the loop.
          num_steps: number of steps of the loop.
          advance: the number that a step adds to the global step.
          in_loops: any step may write summaries; False: only the last one. If it is True, `advance` is 1: see
            `TrainSteps.records_in_loops`.
        """
        every = self._summary_every.steps
        is_first = step == self._first_step
        if every is None:
            return NO_RECORDS
        if not in_loops or is_first:
            # A run's first loop ends where summaries are due, see `steps_until_due`, unless something else ends it
            # before. It writes at its end in any case, as TensorFlow's SummarySaverHook writes a first point.
            is_due = is_first or self._summary_every.due(step, step + num_steps * advance)
            return Schedule(num_steps - 1, every, int(is_due and num_steps > 0))
        first = int(self._summary_every.steps_until_due(step)) - 1  # a place in the loop, since a step advances by 1
        return Schedule(first, every, max(0, (num_steps - 1 - first) // every + 1))

    def steps_until_due(self, step: int, *, in_loops: bool = False) -> float:
        """Return the number of steps after which a loop must end because of summaries or metrics; infinite: it need
        not.

        Args:
          step: the global step before the loop.
          in_loops: loops write summaries and need not end for them, except a run's first loop.
        """
        is_first = step == self._first_step
        due = [self._metrics_every.steps_until_due(step)]
        if is_first or not in_loops:
            due.append(self._summary_every.steps_until_due(step))
        has_first_point = self._is_new and is_first and self._metrics_every.steps is not None
        if has_first_point:
            due.append(1)  # metrics that keep a state can only be read at the end of a loop: see `_add_kept_metrics`
        return min(due)

    def log_loop(self, result: StepResult, taken: LoopResult, *, logs_speed: bool = True) -> None:
        """Log a loop of at least one step. All workers must call this together.

        Args:
          result: the loop's outcome, with the losses over all workers.
          taken: what the loop returned in this process. Its `metrics`, if there are any, are floats
            `[steps, 2 * number of metrics]`: their sums and then their weights in each step.
          logs_speed: False: the speed is not logged, because the loop had an overhead that other loops do not have. The
            progress line then repeats the speed of an earlier loop.
        """
        steps = np.linspace(result.first_step, result.last_step, result.num_steps).round().astype(int)
        # Before workers other than the chief return, because `_points_at` sums over all workers.
        points = self._points_at(steps, result, taken)
        if points:
            last = max(points)
            self.recorded = last, dict(points[last])
        if result.first_step == self._first_step + 1:  # note when the start of the run was over
            self._context.collectives.tell_waits(None)
            self._context.journal.note_waits()
            # By now the input function has been called, which may import modules, too.
            secs = round(result.secs, 4)
            self._context.journal.event("first_step", step=result.first_step, secs=secs, files=imported_files())
        self._log_times(result, taken)
        if not self._config.is_chief:
            return
        if logs_speed or not self._speed:
            self._speed = {
                "train/steps_per_sec": result.num_steps / result.secs,
                "train/examples_per_sec": result.examples / result.secs,
            }
        speed = self._speed if logs_speed else {}
        if points:
            rates = {f"train/{name}": rate for name, rate in self._program.rates().items()}
            for values in points.values():
                values.update(rates)
        self._log_points(points, speed)
        self._write_events(steps, result, points, speed)
        steps_per_sec, examples_per_sec = self._speed.values()
        loss = float(result.losses[-1])
        shown = {**self._shown(taken), **self.of_hooks.shown}
        self._context.progress.update(LoopReport(result.last_step, loss, steps_per_sec, examples_per_sec, shown))

    def _log_times(self, result: StepResult, taken: LoopResult) -> None:
        """Write a line with this worker's own times to the journal, at multiples of the log's cadence.

        It has the mean seconds of a step since the last such line, and of this worker's own part of a step: input and
        computation, without waiting for other workers. A coordinator of parameter servers writes how many steps each
        worker has taken since its last line.
        """
        for worker, steps in taken.steps_of_workers.items():
            self._steps_of_workers[f"worker:{worker}"] += steps
        is_first = result.first_step == self._first_step + 1  # that loop also traces
        if TIMES in taken.values and not is_first:
            self._times.append(taken.values[TIMES])
            self._times_secs += result.secs
        every = Every(self._config.log_step_count_steps or None)
        if not every.due(result.first_step - 1, result.last_step):
            return
        if self._steps_of_workers:
            self._context.journal.event(WORKER_STEPS, step=result.last_step, steps=dict(self._steps_of_workers))
            self._steps_of_workers.clear()
        if not self._times:
            return
        input_secs, compute_secs = own_secs(np.concatenate(self._times))
        num_steps = len(input_secs)
        self._context.journal.event(
            STEP_TIMES,
            step=result.last_step,
            steps=num_steps,
            secs=round(self._times_secs / num_steps, 7),
            input=round(float(np.mean(input_secs)), 7),
            compute=round(float(np.mean(compute_secs)), 7),
        )
        self._times = []
        self._times_secs = 0.0

    def _log_points(self, points: Mapping[int, Mapping[str, float]], speed: Mapping[str, float]) -> None:
        """Write the points of a loop to the journal; the last of them has its speed."""
        if not points:
            return
        last = max(points)
        lines = []
        for step, values in points.items():
            of_loop = speed if step == last else {}
            lines.append((step, {**values, **of_loop}))
        self._context.journal.metrics_of_steps(lines)

    def _write_events(
        self,
        steps: np.ndarray,
        result: StepResult,
        points: Mapping[int, Mapping[str, float]],
        speed: Mapping[str, float],
    ) -> None:
        """Write the losses, the speed and the points of a loop to the event file."""
        of_speed: dict[str, float] = {}
        if speed:
            of_speed["global_step/sec"] = speed["train/steps_per_sec"]
        with self._summary_writer.as_default():
            for step, loss in self._at(self._write_every, steps, result.losses, first=True):
                of_loss = {"loss": loss} if self._writes_loss else {}
                self._write_numbers({**of_speed, **of_loss}, step)
            if self._config.save_summary_steps:
                # Not the mean loss: event files have that of a step, as those of tf.estimator.
                self._write_numbers_of({step: _without_loss(values) for step, values in points.items()})

    def repeated(self, step: int, asked: int, twice: int) -> None:
        """Log that steps were requested again because a worker was lost.

        Args:
          step: the global step.
          asked: number of steps that were requested again.
          twice: how many of these the lost worker had already taken, so that their examples were trained on twice.
        """
        self._context.journal.event("repeated", step=step, asked=asked, twice=twice)
        what = "1 step was" if asked == 1 else f"{asked} steps were"
        _log.warning(
            "A worker was lost, and %s repeated. It had already taken %d of them, so their examples were trained on "
            "twice.",
            what,
            twice,
        )

    def _points_at(self, steps: np.ndarray, result: StepResult, taken: LoopResult) -> dict[int, dict[str, float]]:
        """Add the steps of a loop to the window, and return step -> train/<name> -> value for each step with a point.

        All workers must call this together, because it sums over them.

        A value is the mean since the last multiple of `train.log_steps`. The mean of the loss is over the steps,
        weighted by their numbers of examples; a loss that is a sum over examples has no such weights. The mean of a
        metric is over the examples. What model_fn logs, and what the runner reports of a step, is not averaged, but is
        the value of the point's step. Workers other than the chief have no loss.
        """
        # Here and in the arrays made of it below, the columns are the numbers, the loss first, and then their weights.
        rows = self._rows(result, taken)
        # At its first step, only a new run has a point: those of a resumed run must be those of an undisturbed one.
        has_first_point = self._is_new and result.first_step == self._first_step + 1
        to_average = np.where(self._columns_not_averaged, 0.0, rows)
        # `cut` adds the steps to the window's sums, and begins new sums after each multiple of `train.log_steps`.
        rows_with_point, sums = self._window.cut(steps, to_average, has_first_point=has_first_point)
        at_points = self._over_workers(np.where(self._columns_not_averaged, rows[rows_with_point], sums))
        totals, weights = np.split(at_points, 2, axis=1)
        points: dict[int, dict[str, float]] = {}
        for step, total, weight in zip(steps[rows_with_point].tolist(), totals.tolist(), weights.tolist(), strict=True):
            points[step] = self._means(total, weight)
        self._add_kept_metrics(points, int(steps[-1]))
        return points

    def _add_kept_metrics(self, points: Mapping[int, dict[str, float]], last: int) -> None:
        """Add the metrics that keep their state in variables to the point of `last`, the loop's last step, if it has
        one. All workers must call this together.

        The variables have the state after the loop, so no other step's value is known. `steps_until_due` ends a loop at
        each point of such metrics.
        """
        if last not in points or not self._program.kept_metrics:
            return
        kept = {name: tensorboard.plain(value) for name, value in self._program.kept_metrics.values().items()}
        self._say_too_large(tensorboard.too_large(kept))
        points[last].update({f"train/{name}": value for name, value in tensorboard.scalars(kept).items()})

    def _means(self, totals: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
        """Return train/<name> -> mean at a point; a number without any weight is left out."""
        means: dict[str, float] = {}
        for name, total, weight in zip(self._window.names, totals, weights, strict=True):
            if weight:
                means[f"train/{name}"] = total / weight
        return means

    def _rows(self, result: StepResult, taken: LoopResult) -> np.ndarray:
        """Return each step's numbers, the loss first, and then their weights: float64 `[steps, 2 * numbers]`.

        A number is a sum over what its weight counts, such as examples; a number that this worker lacks has weight 0.
        """
        weights = np.zeros([result.num_steps, 1])
        losses = np.zeros([result.num_steps, 1])
        if self._context.is_chief:  # it has the loss over all workers
            weights[:, 0] = 1.0 if self._program.loss_is_sum else taken.examples
            losses[:, 0] = result.losses.astype(np.float64) * weights[:, 0]
        packed = taken.values.get("metrics", np.zeros([result.num_steps, 0]))
        # The column of zeros that `_begin_window` has chosen for numbers that this worker lacks.
        padded = np.pad(packed, [(0, 0), (0, 1)])
        metrics = padded[:, self._columns_of_sums]
        weights_of_metrics = padded[:, self._columns_of_weights]
        return np.concatenate([losses, metrics, weights, weights_of_metrics], axis=1)

    def _over_workers(self, rows: np.ndarray) -> np.ndarray:
        """Return the sums and weights of points over all workers. All workers must call this together.

        Args:
          rows: the sums and weights of this worker, a row for each point. Those of the loss are 0 except on the chief,
            which has the loss over all workers.
        """
        collectives = self._context.collectives
        has_only_loss = len(self._window.names) == 1  # so no sum is needed
        if collectives.num_workers == 1 or has_only_loss or not len(rows):
            return rows
        return np.reshape(collectives.sum(rows.ravel().tolist()), rows.shape)

    def _say_too_large(self, metrics: Sequence[str]) -> None:
        """Say, once for a run, which metrics are not reported because of their size."""
        if metrics and not self._has_said_too_large and self._context.is_chief:
            self._has_said_too_large = True
            _log.warning(
                "Metrics of training with more than %d elements are not reported: %s.",
                tensorboard.MAX_ELEMENTS, ", ".join(metrics),
            )  # fmt: skip

    def _shown(self, taken: LoopResult) -> dict[str, float]:
        """Return the values that the progress line shows: those that model_fn logs, at one step in this process."""
        if not self._scalars.on_progress:
            return {}
        names = list(self._scalars.metrics)
        sums, weights = np.split(taken.values["metrics"][-1], 2)
        shown: dict[str, float] = {}
        for name in self._scalars.on_progress:
            number = names.index(name)
            if weights[number]:
                shown[name] = float(sums[number] / weights[number])
        return shown

    def _write_numbers(self, scalars: Mapping[str, float], step: int) -> None:
        tf.summary.experimental.write_raw_pb(_summary_of(scalars), step=step)

    def _write_numbers_of(self, points: Mapping[int, Mapping[str, float]]) -> None:
        """Write the numbers of several steps, with one graph call if there are many."""
        written = {step: scalars for step, scalars in points.items() if scalars}
        if len(written) > FEW_POINTS:
            self._write_many(np.array(list(written), np.int64), [_summary_of(scalars) for scalars in written.values()])
            return
        for step, scalars in written.items():
            self._write_numbers(scalars, step)

    @functools.cached_property
    def _write_many(self) -> Any:
        signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.string)]

        def write(steps: tf.Tensor, protos: tf.Tensor) -> None:
            def body(number: tf.Tensor) -> tf.Tensor:
                tf.summary.experimental.write_raw_pb(protos[number], step=steps[number])
                return number + 1

            with self._summary_writer.as_default():
                # One iteration at a time, so that the events are in the order of their steps.
                tf.while_loop(lambda number: number < tf.size(steps), body, [0], parallel_iterations=1)

        # A partial, not a method: TensorFlow 2.21 counts the traces of a method over all TrainLogs and would warn of
        # retracing.
        return tf.function(functools.partial(write), input_signature=signature, autograph=False)

    def summaries(self, outputs: Outputs, step: int) -> None:
        """Write the summaries of global step `step`, which returned `outputs`. All workers must call this together."""
        packed = outputs.get("scalars")
        protos_of_v1 = outputs.get("protos", ())
        totals: Mapping[str, Any] = {}
        if self._summary_keys:
            sums = {} if packed is None else self._scalars.summary_sums(packed)
            totals = over_workers(sums, self._summary_keys, self._context.collectives)
        if not self._config.is_chief:
            return
        protos: list[tuple[int, bytes]] = [(step, proto) for proto in protos_of_v1]
        self._keep_images(protos_of_v1, outputs.get("images", ()), step)
        if packed is not None:
            values_at: dict[int, list[Any]] = {}  # by step: model_fn may give a summary another step than `step`
            for at, value in self._scalars.summaries_of(packed, totals, step):
                values_at.setdefault(at, []).append(value)
            self._log_summaries(values_at, step)
            for at, values in values_at.items():
                protos.append((at, tf.compat.v1.Summary(value=values).SerializeToString()))
        with self._summary_writer.as_default():
            for at, proto in protos:
                tf.summary.experimental.write_raw_pb(proto, step=at)

    def _keep_images(self, protos_of_v1: Sequence[Any], images_of_v2: Sequence[bytes], step: int) -> None:
        """Log the images of a step as artifacts of the run, unless images of that step have been logged.

        Args:
          protos_of_v1: serialized Summaries of TensorFlow 1's functions, which may have images.
          images_of_v2: the serialized tensor of each of the program's summaries of images; empty: it was not recorded.
          step: the global step.
        """
        artifacts = current()
        if artifacts is None or not artifacts.keeps_images or self._is_only_after_resume(step):
            return
        png_of: dict[str, bytes] = {}
        for proto in protos_of_v1:
            for value in tf.compat.v1.Summary.FromString(bytes(proto)).value:
                if value.HasField("image"):
                    png_of[value.tag] = value.image.encoded_image_string
        for image, packed in zip(self._program.summaries.images, images_of_v2, strict=True):
            # Width and height come first.
            pngs = tf.io.parse_tensor(packed, tf.string).numpy()[2:] if packed else ()
            for number, png in enumerate(pngs):
                tag = f"{image.tag}/{number}" if len(pngs) > 1 else image.tag
                png_of[tag] = png
        for tag, png in png_of.items():
            artifacts.image(tag, png, step)

    def _is_only_after_resume(self, step: int) -> bool:
        """Report whether a step writes summaries only because it is the first step of a resumed run.

        An undisturbed run has no point there.
        """
        is_first_of_resumed = step == self._first_step + 1 and not self._is_new
        every = self._write_every.steps or 1
        is_due = (step - self._write_every.offset) % every == 0
        return is_first_of_resumed and not is_due

    def _log_summaries(self, values_at: Mapping[int, Sequence[Any]], step: int) -> None:
        """Write the scalars of summaries to the journal, at their steps.

        If the runner or a metric reports a value under the same name at the same step, that value is kept instead.
        """
        if self._is_only_after_resume(step):
            return
        own = {*RESERVED, *self._program.reported_names}
        for at, summaries in values_at.items():
            points: dict[str, float] = {}
            for summary in summaries:
                name = summary.tag.removeprefix("train/")
                if name not in own:
                    points[f"train/{name}"] = _number(summary)
            if points:
                self._context.journal.metrics(at, points)

    def end(self) -> None:
        """Return when all events are on disk."""
        self._summary_writer.flush()

    def _at(self, every: Every, steps: np.ndarray, losses: np.ndarray, *, first: bool) -> list[tuple[int, float]]:
        """Return (step, loss) at each step at which `every` is due and, if `first`, at the first step of this run."""
        if not every.steps:
            return []
        chosen = ((steps - every.offset) % every.steps == 0) | (first & (steps == self._first_step + 1))
        return [(int(step), float(loss)) for step, loss in zip(steps[chosen], losses[chosen], strict=True)]


def _without_loss(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name != "train/loss"}


def _summary_of(scalars: Mapping[str, float]) -> bytes:
    # All scalars are in one proto, because tf.summary.scalar takes 0.12 ms per value.
    values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
    return bytes(tf.compat.v1.Summary(value=values).SerializeToString())


def _number(value: Any) -> float:
    """Return the scalar of a Summary.Value as a float."""
    return float(tf.make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value)
