"""Numbers that training reports: its loss, scalars of summaries, metrics of TRAIN, logged values.

Each number is kept as two sums, of values and of weights, so that replicas, workers and steps can be added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.collectives import Collectives
from runner.model_log import LoggedValues
from runner.programs.evaluate import in_float64, sum_and_weight
from runner.tf_private.summaries import SummaryImage, SummaryScalar
from runner.tracing.trace_step import Replica

# Names that the runner itself reports as train/<name>.
RESERVED = ("loss", "steps_per_sec", "examples_per_sec", "input_bound")

WINDOW = "window"
"""The key, among the facts that a checkpoint stores beside the variables, of the sums since the last multiple."""

Sum = tuple[Any, Any]
"""(sum over examples, sum of their weights): float64 scalar tensors."""

Pair = tuple[float, float]
"""Like Sum, as Python numbers."""


@dataclasses.dataclass(frozen=True)
class ReplicaScalars:
    """The numbers of one replica, scalar tensors of the traced graph. Another replica may have only some of them.

    Attributes:
      summary_sums: key of a scalar summary -> its sum.
      metric_sums: name -> sum, of metrics that are tensors.
      metrics: name -> metric, of all metrics that are reported.
      left_out: name -> how model_fn wrote it, of what is not reported because the runner itself reports that name.
      logged_sums: name -> sum, of values that model_fn logs.
      on_progress: names that the progress line shows.
    """

    summary_sums: Mapping[str, Sum] = dataclasses.field(default_factory=dict)
    metric_sums: Mapping[str, Sum] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    logged_sums: Mapping[str, Sum] = dataclasses.field(default_factory=dict)
    on_progress: Sequence[str] = ()

    @property
    def step_sums(self) -> Mapping[str, Sum]:
        """The sums that each step has, with or without summaries."""
        return {**self.metric_sums, **self.logged_sums}


def replica_scalars(
    summaries: Sequence[SummaryScalar], metrics: Mapping[str, Any] | None, logged: LoggedValues | None, replica: Replica
) -> ReplicaScalars:
    """Return the numbers of a replica. Must be called in the replica's graph, after model_fn.

    Args:
      summaries: the scalar summaries of the replica.
      metrics: `eval_metric_ops` of TRAIN; None: metrics are not reported.
      logged: values that model_fn logs; None: they are not reported.
      replica: the replica.

    Raises:
      ValueError: model_fn logs a value under the name of a metric.
    """
    metrics = metrics or {}
    values: Mapping[str, Any] = {}
    shown: Iterable[str] = ()
    if logged is not None:
        values = logged.values
        shown = logged.on_progress
    if not summaries and not metrics and not values:
        return ReplicaScalars()
    _check_names_differ(metrics, values)
    reported_metrics = _without_reserved(metrics)
    reported_values = _without_reserved(values)
    count = tf.cast(replica.weights.counts[replica.index], tf.float64)
    summary_sums: dict[str, Sum] = {}
    for summary in summaries:
        summary_sums[summary.key] = _sum_of_scalar(summary.value, count, replica)
    metric_sums: dict[str, Sum] = {}
    for name, metric in reported_metrics.items():
        if tf.is_tensor(metric):
            metric_sums[name] = _sum_of_metric(metric, count)
    logged_sums: dict[str, Sum] = {}
    for name, value in reported_values.items():
        if value.shape.rank == 0:
            logged_sums[name] = _sum_of_scalar(value, count, replica)
        else:
            logged_sums[name] = _sum_of_metric(value, count)
    return ReplicaScalars(
        summary_sums=summary_sums,
        metric_sums=metric_sums,
        metrics=reported_metrics,
        left_out=_reserved_among(metrics, values),
        logged_sums=logged_sums,
        on_progress=[name for name in shown if name in reported_values],
    )


def _check_names_differ(metrics: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError if a logged value has the name of a metric."""
    for name in values:
        if name in metrics:
            raise ValueError(
                f"runner.log({{{name!r}: ...}}): eval_metric_ops has a metric of this name, and both are reported as "
                f"train/{name}. Rename one of them."
            )


def _without_reserved(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in RESERVED}


def _reserved_among(metrics: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> how model_fn wrote it, of metrics and logged values whose name the runner itself reports."""
    written: dict[str, str] = {}
    for name in RESERVED:
        if name in metrics:
            written[name] = f"eval_metric_ops[{name!r}]"
        elif name in values:
            written[name] = f"runner.log({{{name!r}: ...}})"
    return written


def _sum_of_scalar(value: tf.Tensor, count: tf.Tensor, replica: Replica) -> Sum:
    """Return the sum of a scalar that stands for each of the replica's `count` examples."""
    value = tf.cast(value, tf.float64)
    if replica.num_replicas == 1:
        return tf.reshape(value, []), tf.ones([], tf.float64)  # divided by weight 1, so the value stays the same
    return _sum_if_present(value * count, count, count)


def _sum_of_metric(metric: tf.Tensor, count: tf.Tensor) -> Sum:
    """Return the sum of a metric, one value or one for each of the replica's `count` examples."""
    total, weight = sum_and_weight(metric, count)
    return _sum_if_present(tf.cast(total, tf.float64), tf.cast(weight, tf.float64), count)


def _sum_if_present(total: tf.Tensor, weight: tf.Tensor, count: tf.Tensor) -> Sum:
    """Return the sum with weight 0 if the replica has no example, because its batch is then a placeholder."""
    # Chosen, not multiplied by 0: a value of the placeholder may be NaN, and stays NaN then.
    zero = tf.zeros([], tf.float64)
    present_total = tf.where(count > 0, tf.reshape(total, []), zero)
    present_weight = tf.where(count > 0, tf.reshape(weight, []), zero)
    return present_total, present_weight


@dataclasses.dataclass(frozen=True)
class StepSummaries:
    """What the first replica of this process summarizes in a step.

    Attributes:
      scalars: scalars whose values are added over the replicas. The runner writes them.
      protos: serialized `tf.compat.v1.Summary`s, which the runner writes.
      images: images of `tf.summary` that are kept as artifacts, too.
      has_others: further operations of `tf.summary` write by themselves.
      names: the names of the scalars, as far as they are constants.
    """

    scalars: Sequence[SummaryScalar] = ()
    protos: Sequence[Any] = ()
    images: Sequence[SummaryImage] = ()
    has_others: bool = False
    names: Set[str] = frozenset()

    def __bool__(self) -> bool:
        """Report whether there is any summary."""
        return bool(self.scalars or self.protos or self.has_others)


class StepScalars:
    """The numbers of a step of this process: the tensors that a loop fetches, and their use on the host.

    Args:
      replicas: numbers of this process's replicas. A replica that lacks a number counts with weight 0.
      summaries: the summaries of the first replica that are to be written.
      values: name -> scalar that is the same on all replicas. It is ignored if model_fn itself reports that name.
      nan_means_missing: a NaN among `values` means that the step has no such value, which is then not reported.

    Attributes:
      summaries: key -> summary.
      metrics: names of the metrics that are tensors, then of logged values, then of `values`.
      is_at_step: for each of `metrics`, whether the value of one step is reported, as for logged values and `values`;
        metrics are averaged over steps.
      on_progress: names of `metrics` that the progress line shows.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaScalars],
        summaries: Sequence[SummaryScalar],
        values: Mapping[str, tf.Tensor],
        *,
        nan_means_missing: bool = False,
    ) -> None:
        first = replicas[0]
        self._replicas = replicas
        self._nan_means_missing = nan_means_missing
        self.summaries: Mapping[str, SummaryScalar] = {summary.key: summary for summary in summaries}
        of_model_fn = {**first.metrics, **first.logged_sums}
        self.values: Mapping[str, tf.Tensor] = {
            name: value for name, value in values.items() if name not in of_model_fn
        }
        self._summed = list(first.step_sums)
        self.metrics: Sequence[str] = [*self._summed, *self.values]
        self.is_at_step = np.array([name not in first.metric_sums for name in self.metrics], bool)
        self.on_progress: Sequence[str] = first.on_progress

    # --- in graph -------------------------------------------------------------------------------------------------

    @property
    def summary_tensors(self) -> list[Any]:
        """Return what a step with summaries fetches for them: sums of the replicas, conditions, and steps.

        A summary without a condition or a step of its own has None there.
        """
        sums = _sums_of_replicas(self.summaries, [scalars.summary_sums for scalars in self._replicas])
        conditions = []
        steps = []
        for summary in self.summaries.values():
            conditions.append(summary.condition)
            steps.append(summary.step)
        return [sums, conditions, steps]

    @property
    def metric_tensors(self) -> list[Any]:
        """Return what each step fetches: sums of the replicas, and `values`."""
        sums = _sums_of_replicas(self._summed, [scalars.step_sums for scalars in self._replicas])
        return [sums, list(self.values.values())]

    def packed_summaries(self, fetched: Sequence[Any]) -> tf.Tensor:
        """Return the values of `summary_tensors` as one float64 vector: sums, weights, conditions, steps."""
        sums, conditions, steps = fetched
        totals, weights = _add_replicas(sums)
        is_recorded = [_in_float64_or(condition, 1.0) for condition in conditions]
        at_step = [_in_float64_or(step, -1.0) for step in steps]
        return tf.stack([*totals, *weights, *is_recorded, *at_step])

    def packed_metrics(self, fetched: Sequence[Any]) -> tf.Tensor:
        """Return the values of `metric_tensors` as one float64 vector: sums, then weights."""
        totals, weights = _add_replicas(fetched[0])
        values = in_float64(fetched[1])
        one = tf.constant(1.0, tf.float64)
        zero = tf.constant(0.0, tf.float64)
        is_there = [one] * len(values)
        if self._nan_means_missing:
            is_there = [tf.where(tf.math.is_nan(value), zero, one) for value in values]
            values = [tf.where(tf.math.is_nan(value), zero, value) for value in values]
        return tf.stack([*totals, *values, *weights, *is_there])

    # --- on the host ----------------------------------------------------------------------------------------------

    def summary_sums(self, packed: np.ndarray) -> dict[str, tuple[float, float]]:
        """Return key -> (sum, weight), unpacked from the vector that `packed_summaries` made."""
        totals, weights, _, _ = np.split(packed, 4)
        sums: dict[str, tuple[float, float]] = {}
        for key, total, weight in zip(self.summaries, totals, weights, strict=True):
            sums[key] = (float(total), float(weight))
        return sums

    def summaries_of(
        self, packed: np.ndarray, totals: Mapping[str, tuple[float, float]], step: int
    ) -> list[tuple[int, tf.compat.v1.Summary.Value]]:
        """Return (step, Summary.Value to write) for each scalar that is recorded in a step.

        Args:
          packed: the vector of this process. It says for each scalar whether, and at which step, it is recorded.
          totals: key -> (sum, weight) over all workers.
          step: global step of the step; a summary that names no step is recorded there.
        """
        _, _, conditions, steps = np.split(packed, 4)
        recorded = []
        for number, (key, summary) in enumerate(self.summaries.items()):
            total, weight = totals[key]
            if not conditions[number] or not weight:
                continue
            at_step = int(steps[number])
            if at_step < 0:  # the summary names no step
                at_step = step
            recorded.append((at_step, _summary_value(summary, total / weight)))
        return recorded


class Fetched:
    """The outputs of a step beside its loss, by name: see `train_loop.Outputs`.

    Args:
      scalars: the numbers of the step.
      summaries: the summaries that the step writes; None: it writes none.
      fetches: what session hooks fetch.
      examples: what native hooks fetch of the examples.

    Attributes:
      tensors: name -> structure of tensors of the traced graph that the step fetches to compute the output.
      specs: name -> TensorSpecs of the output.
    """

    def __init__(
        self,
        scalars: StepScalars,
        summaries: StepSummaries | None,
        fetches: Sequence[tf.Tensor],
        examples: Sequence[tf.Tensor],
    ) -> None:
        self._pack = {"metrics": scalars.packed_metrics, "scalars": scalars.packed_summaries}
        tensors_of: dict[str, list[Any]] = {
            "metrics": scalars.metric_tensors,
            "fetches": list(fetches),
            "examples": list(examples),
        }
        if summaries is not None:
            tensors_of["scalars"] = scalars.summary_tensors
            tensors_of["protos"] = list(summaries.protos)
            tensors_of["images"] = [image.value for image in summaries.images]
        self.tensors = {name: tensors for name, tensors in tensors_of.items() if tf.nest.flatten(tensors)}
        sizes = {"metrics": 2 * len(scalars.metrics), "scalars": 4 * len(scalars.summaries)}
        self.specs: dict[str, Any] = {}
        for name, tensors in self.tensors.items():
            if name in sizes:
                self.specs[name] = tf.TensorSpec([sizes[name]], tf.float64)
            else:
                self.specs[name] = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    def packed(self, values: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, Any]:
        """Return the outputs of the step; `values` has the step's value of each of `tensors`."""
        outputs: dict[str, Any] = {}
        for name, tensors in values.items():
            pack = self._pack.get(name)
            outputs[name] = tensors if pack is None else pack(tensors)
        return outputs


def _sums_of_replicas(keys: Iterable[str], replicas: Sequence[Mapping[str, Sum]]) -> list[list[Sum]]:
    """Return for each key the sums of those replicas that have it."""
    sums_of_keys: list[list[Sum]] = []
    for key in keys:
        sums_of_keys.append([sums[key] for sums in replicas if key in sums])
    return sums_of_keys


def _add_replicas(sums_of_keys: Sequence[Sequence[Sum]]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return (totals, weights) over the replicas, given for each number the sums of those replicas that have it."""
    totals: list[tf.Tensor] = []
    weights: list[tf.Tensor] = []
    for sums in sums_of_keys:
        own_totals, own_weights = zip(*sums, strict=True)
        totals.append(tf.add_n(in_float64(own_totals)))
        weights.append(tf.add_n(in_float64(own_weights)))
    return totals, weights


def _in_float64_or(value: Any, default: float) -> tf.Tensor:
    """Return a scalar of the graph as a float64 one; `default` in place of None."""
    if value is None:
        return tf.constant(default, tf.float64)
    return in_float64(value)


def _summary_value(summary: SummaryScalar, value: float) -> tf.compat.v1.Summary.Value:
    if not summary.metadata:
        return tf.compat.v1.Summary.Value(tag=summary.tag, simple_value=value)
    metadata = tf.compat.v1.SummaryMetadata.FromString(summary.metadata)
    tensor = tf.make_tensor_proto(value, tf.float32)
    return tf.compat.v1.Summary.Value(tag=summary.tag, metadata=metadata, tensor=tensor)


def over_workers(sums: Mapping[str, Pair], keys: Sequence[str], collectives: Collectives) -> Mapping[str, Pair]:
    """Return the sums over all workers; all workers must call this together.

    Args:
      sums: key -> (sum, weight) of this worker.
      keys: the chief's keys, the same on all workers. A key that a worker lacks counts there with weight 0.
      collectives: communication between the workers.
    """
    if collectives.num_workers == 1:
        return sums
    flat: list[float] = []
    for key in keys:
        flat += sums.get(key, (0.0, 0.0))
    over_all = collectives.sum(flat)
    totals = over_all[::2]
    weights = over_all[1::2]
    return dict(zip(keys, zip(totals, weights, strict=True), strict=True))


class TrainWindow:
    """Adds the numbers of steps, and cuts the sums where a point is due: at each multiple of `every`.

    A checkpoint between two multiples holds the sums so far, so the points of a resumed run are those of an undisturbed
    one.

    Args:
      names: the numbers of a step, the same on all workers.
      every: number of global steps from one point to the next; None: there are no points.

    Attributes:
      names: the numbers of a step.
    """

    def __init__(self, names: Sequence[str], every: int | None) -> None:
        self.names = names
        self._every = every
        self._sums = self._zeros()  # all sums, then all weights

    def _zeros(self) -> np.ndarray:
        return np.zeros(2 * len(self.names))

    def cut(self, steps: np.ndarray, rows: np.ndarray, *, has_first_point: bool) -> tuple[list[int], np.ndarray]:
        """Add steps, and return the sums at each step at which a point is due.

        Args:
          steps: the global step after each of the steps, ascending.
          rows: float64 `[steps, 2 * names]`: the numbers of each step, and then their weights.
          has_first_point: a point is due at the first of these steps, too. It ends no sum.

        Returns:
          (the places in `steps` of those with a point, float64 `[points, 2 * names]`).
        """
        if self._every is None:
            return [], np.zeros([0, rows.shape[1]])
        # A step that changed nothing (its loss scale was too large) has the number of the step before it.
        # Only the last of these steps ends the sums of that number.
        is_last_of_number = np.append(steps[1:] != steps[:-1], True)
        ends = np.flatnonzero((steps % self._every == 0) & is_last_of_number)
        with_rest = np.concatenate([self._sums[None], rows])  # what was added before is one row more
        # 1 for the row more, and 1 because a slice does not include its end.
        sums = _sums_up_to(with_rest, ends + 2)
        first_left = ends[-1] + 2 if len(ends) else 0
        num_left = len(with_rest) - first_left
        self._sums = _sums_up_to(with_rest[first_left:], np.array([num_left]))[0]
        places = ends.tolist()
        if has_first_point and 0 not in places:
            return [0, *places], np.concatenate([rows[:1], sums])
        return places, sums

    def state(self, collectives: Collectives) -> dict[str, Any]:
        """Return the sums since the last multiple, over all workers, as values that JSON can hold: `restore` reads
        them. Empty at a multiple. All workers must call this together: it moves their sums to the chief.
        """
        if self._every is None:
            return {}
        if collectives.num_workers > 1:
            totals = np.array(collectives.sum(self._sums.tolist()))
            # The chief then has the sums of all workers, as after a resume, so that the sums of a resumed run are the
            # same to the last bit.
            self._sums = totals if collectives.is_chief else self._zeros()
        sums, weights = np.split(self._sums, 2)
        numbers: dict[str, list[float]] = {}
        for name, total, weight in zip(self.names, sums.tolist(), weights.tolist(), strict=True):
            if weight:
                numbers[name] = [total, weight]
        if not numbers:
            return {}
        return {"every": self._every, "numbers": numbers}

    def restore(self, state: Mapping[str, Any], *, is_chief: bool) -> None:
        """Go on with the sums of a checkpoint; the chief has those of all workers.

        Args:
          state: as `state` returned it; empty: the checkpoint has none. Sums that were cut at other steps are left out.
          is_chief: this worker is the chief.
        """
        self._sums = self._zeros()
        is_cut_alike = bool(state) and state["every"] == self._every
        if not is_chief or not is_cut_alike:
            return
        for place, name in enumerate(self.names):
            total, weight = state["numbers"].get(name, (0.0, 0.0))
            self._sums[place] = total
            self._sums[len(self.names) + place] = weight


def _sums_up_to(rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sums of rows[:ends[0]], rows[ends[0]:ends[1]] and so on: float64 `[ends, columns]`.

    Each sum is added up row by row, so that it does not depend, to the last bit, on the length of loops.
    """
    lengths = np.diff(ends, prepend=0)
    longest = max(lengths, default=0)
    is_row = np.arange(longest) < lengths[:, None]
    # A first row of zeros, so that there is a last sum even of no rows.
    padded = np.zeros([len(ends), 1 + longest, rows.shape[1]])
    padded[:, 1:][is_row] = rows[: lengths.sum()]
    return np.cumsum(padded, axis=1)[:, -1]
