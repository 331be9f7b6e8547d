"""How several workers divide the data of one input function: `shard: auto|files|examples|input_fn|off`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.config.settings.data_service import DataService
from runner.data.replica_batches import Division, PerWorker, RoundRobin, SplitRows, full_rows
from runner.data.service import distribute
from runner.distribute.collectives import SINGLE_PROCESS, Collectives
from runner.system.console import counted
from runner.tf_private import cluster

_log = logging.getLogger(__name__)

# The first way works with every input function, the last only with those that read their index. If workers choose
# different ways, all use the first of the chosen ones in this order.
_WAYS = ("examples", "files", "input_fn")


class InputContext(tf.distribute.InputContext):
    """Like tf.distribute's InputContext, but records whether the input function read its index or the number of
    pipelines.

    Attributes:
      was_sharded: input_pipeline_id or num_input_pipelines was read. A function that calls only
        `get_per_replica_batch_size` does not divide its data.
    """

    was_sharded = False

    @property
    def input_pipeline_id(self) -> int:
        """Index of this pipeline, from 0."""
        self.was_sharded = True
        return self._input_pipeline_id

    @property
    def num_input_pipelines(self) -> int:
        """Number of pipelines that divide the data."""
        self.was_sharded = True
        return self._num_input_pipelines

    def __str__(self) -> str:
        # The base class reads the properties, which would set was_sharded. But a function that only logs its context
        # does not divide the data.
        return f"InputContext(input pipeline id {self._input_pipeline_id}, total: {self._num_input_pipelines})"


@dataclasses.dataclass(frozen=True)
class WorkerPlace:
    """The position of this process among the workers that train on the same input.

    Attributes:
      num_replicas: number of replicas of this process.
      worker_index: index of this process among the workers, from 0.
      num_workers: number of workers.
      collectives: communication between the workers; SINGLE_PROCESS in a parameter server cluster, whose workers step
        independently.
      coordinator: the ClusterCoordinator of a parameter server cluster, whose `num_workers` workers read the training
        data for this process; None: this process reads its data.
    """

    num_replicas: int = 1
    worker_index: int = 0
    num_workers: int = 1
    collectives: Collectives = SINGLE_PROCESS
    coordinator: tf.distribute.experimental.coordinator.ClusterCoordinator | None = None

    @property
    def total(self) -> int:
        return self.num_replicas * self.num_workers

    @property
    def first(self) -> int:
        return self.num_replicas * self.worker_index

    def __str__(self) -> str:
        if self.num_workers == 1:
            return f"{self.total} replicas"
        return f"{self.total} replicas ({self.num_workers} workers x {self.num_replicas} replicas)"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Arguments of the input function, and the division of its elements over the replicas.

    Attributes:
      context: the function's `input_context`.
      batch_size: the function's `params["batch_size"]`; None: not passed.
      division: divides the elements.
    """

    context: InputContext
    batch_size: int | None
    division: Division


Build = Callable[[Plan], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class ShardedInput:
    """The part of the data that one worker reads.

    Attributes:
      shard: "examples", "files", "input_fn" or "off"; "service" if a tf.data service computes the data.
      reason: why `shard` was chosen, for the log.
      division: divides the elements of `dataset` over the replicas.
      dataset: the elements that this worker reads.
      whole: returns the dataset of all workers' data, with elements like those of `dataset`.
    """

    shard: str
    reason: str
    division: Division
    dataset: tf.data.Dataset
    whole: Callable[[], tf.data.Dataset]


def choose(
    shard: str, batch_size: int | None, place: WorkerPlace, build: Build, *, training: bool
) -> ShardedInput | None:
    """Decide how the workers divide the data (`shard: auto`), and return this worker's part.

    If workers choose different ways, all use the first of the chosen ones in `_WAYS`.

    Args:
      shard: as in `Input`; "auto" decides after calling the function.
      batch_size: examples per step over all replicas; None: each batch of the function goes to one replica.
      place: this process among the workers.
      build: calls the function and returns its dataset.
      training: False: a batch is never divided; it goes whole to one replica, and batches are dealt in turn.

    Returns:
      This worker's part; None if shard="input_fn" and the function does not read its index or the number of pipelines.
    """
    # For "auto", first call the function as if there were one pipeline. That shows whether it reads its index. Most
    # functions do not, and need no second call.
    first_way = "examples" if shard == "auto" else shard
    plan = _make_plan(first_way, batch_size, place, training)
    whole_plan = _make_plan("off", batch_size, place, training)
    dataset = build(plan)
    if place.num_workers == 1 or shard in ("examples", "off"):
        reason = _why_each_reads_all(shard, place)
        return ShardedInput(first_way, reason, plan.division, dataset, lambda: dataset)
    if shard != "auto" and plan.context.was_sharded:
        return ShardedInput(shard, f"shard={shard}", plan.division, dataset, lambda: build(whole_plan))
    if shard == "input_fn":
        return None
    has_files, reason_files = _has_files_for_all(dataset, place)
    way = "examples"
    if plan.context.was_sharded:
        way = "input_fn"
    elif has_files:
        way = "files"
    way = _agree_on_way(way, place)
    if way == "input_fn":
        # The function reads its index, so call it again with the true one; the dataset for one pipeline is dropped.
        plan = _make_plan("input_fn", batch_size, place, training)
        reason = "input_fn divides its data by input_context"
        return ShardedInput("input_fn", reason, plan.division, build(plan), lambda: build(whole_plan))
    if way == "files":  # each worker reads its own files, which the runner chooses
        whole = build(whole_plan)
        own = cluster.part_of_files(whole, place.num_workers, place.worker_index)
        return ShardedInput("files", reason_files, whole_plan.division, own, lambda: whole)
    reason = f"input_fn ignores input_context, and {reason_files}"
    if shard == "files":
        _log.warning(
            "shard=files: %s. Using shard=examples instead: every worker reads all of the data and takes its rows of "
            "each batch.",
            reason_files,
        )
        reason = f"shard=files, and {reason_files}"
        plan = _make_plan("examples", batch_size, place, training)
        dataset = build(plan)
    return ShardedInput("examples", reason, plan.division, dataset, lambda: dataset)


def _why_each_reads_all(shard: str, place: WorkerPlace) -> str:
    """Return the reason for the log where each worker, or the only one, reads all of the data."""
    if shard == "auto":
        return "one worker reads all of it"
    if shard == "off" and place.num_workers > 1:
        return (
            "shard=off: every worker reads all of the data. In training, a shuffle by run.seed or shuffle_seed has "
            "a different order on each worker; without a shuffle all workers train on the same examples"
        )
    return f"shard={shard}"


def _agree_on_way(own: str, place: WorkerPlace) -> str:
    """Return the first in _WAYS that a worker has chosen. All workers call this together."""
    counts = place.collectives.sum([way == own for way in _WAYS])
    chosen = (way for way, count in zip(_WAYS, counts, strict=True) if count)
    return next(chosen)


def of_service(service: DataService, batch_size: int | None, place: WorkerPlace, build: Build) -> ShardedInput:
    """Return this worker's part of the data that `service` computes. Each element goes to one of the workers.

    Args:
      service: the tf.data service.
      batch_size: as in `choose`.
      place: as in `choose`.
      build: as in `choose`.
    """
    shard = "examples" if place.num_workers == 1 else "off"
    plan = _make_plan(shard, batch_size, place, True)
    whole = build(plan)
    dataset = distribute(service, whole, place.collectives)
    return ShardedInput("service", f"{service.address} computes the batches", plan.division, dataset, lambda: whole)


def train_division(
    sharded: ShardedInput, dataset: tf.data.Dataset, place: WorkerPlace
) -> tuple[tf.data.Dataset, Division]:
    """Return the training dataset and its division, for workers of synchronous training that each read their own data.

    All workers call this together.

    Args:
      sharded: this worker's part.
      dataset: the dataset of `sharded`, or the same repeated forever.
      place: this process among the workers.

    Returns:
      (dataset, division). If the workers' data may end at different steps, the dataset continues with placeholders
      after its end, and each element has a bool scalar as its last part: True for real elements.
    """
    is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    rows = full_rows(dataset.element_spec)
    count_here = (rows or 0) * place.num_replicas
    # How many workers have data with an end, how many have batches of no fixed size, examples of a step of all workers.
    num_ending, num_without_size, count_of_all = place.collectives.sum([not is_endless, rows is None, count_here])
    full_count = None
    if not num_ending and not num_without_size:
        full_count = int(count_of_all)
    division = PerWorker(place.num_replicas, place.collectives.sum_in_graph, full_count, ends_together=num_ending > 0)
    if not num_ending:
        return dataset, division
    # The placeholder is made from the first element. With a service, read it from the dataset that the service is to
    # compute: reading `dataset` would start a second pass over the data.
    readable = sharded.whole() if sharded.shard == "service" else dataset
    first = readable.take(1).concatenate(sharded.whole().take(1))
    return _mark_end(dataset, first), division


def _mark_end(own: tf.data.Dataset, first: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset of the elements of `own` with True, followed by a placeholder element with False forever.

    Args:
      own: this worker's data.
      first: a dataset whose first element becomes the placeholder: the first element of `own`, or of all workers' data
        if `own` is empty.
    """
    # The iterator never ends, so its state can be saved and restored like that of any other input.
    placeholder = first.take(1).cache().repeat()
    return own.map(_append(True)).concatenate(placeholder.map(_append(False)))


def _append(is_real: bool) -> Callable[..., tuple[Any, ...]]:
    return tf.autograph.experimental.do_not_convert(lambda *element: (*element, is_real))


def _has_files_for_all(dataset: tf.data.Dataset, place: WorkerPlace) -> tuple[bool, str]:
    """Return (whether each worker can read its own files, the reason)."""
    count = cluster.num_files(dataset)
    if not count:
        return False, "the data is not file-based"
    reason = f"the data has {counted(count, 'file')} for {place.num_workers} workers"
    return count >= place.num_workers, reason


def _make_plan(shard: str, batch_size: int | None, place: WorkerPlace, training: bool) -> Plan:
    """Return what the input function is told, and how its elements are divided, if workers divide the data by `shard`.

    Args:
      shard: "examples", "files", "input_fn" or "off".
      batch_size, place, training: as in `choose`.
    """
    # Outside of training a batch goes whole to one replica, whatever the number of replicas: no number of an evaluation
    # depends on how rows were divided, and no replica has a stand-in for rows that it did not get.
    dealt_in_turn = RoundRobin(place.first, place.num_replicas, place.total, reads_all=False)
    reads_own = shard in ("files", "input_fn")
    if reads_own or (shard == "off" and place.num_workers > 1):
        context = InputContext(1, 0, place.total)
        if reads_own:
            context = InputContext(place.num_workers, place.worker_index, place.total)
        if not training:
            return Plan(context, batch_size, dealt_in_turn)
        per_replica = None if batch_size is None else batch_size // place.total
        return Plan(context, per_replica, RoundRobin(0, place.num_replicas, place.num_replicas))
    # Tell the function that there is one pipeline, which reads all of the data. With a batch_size, it returns global
    # batches, so tell it of one replica. Without, it returns a batch per replica and may divide a global size of its
    # own by the number of replicas, so tell it of all.
    num_replicas = 1 if batch_size else place.total
    context = InputContext(1, 0, num_replicas)
    if not training:
        return Plan(context, batch_size, dealt_in_turn)
    kind = RoundRobin if batch_size is None else SplitRows
    division = kind(place.first, place.num_replicas, place.total)
    return Plan(context, batch_size, division)
