"""How several workers divide the data of one input function: `shard: auto|files|examples|input_fn|off`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.data.replica_batches import Division, PerWorker, RoundRobin, SplitRows, full_rows
from runner.data.service import DataService
from runner.distribute.collectives import SINGLE_PROCESS, Collectives
from runner.tf_private import cluster

_log = logging.getLogger(__name__)

# Ordered by how much they ask of the function, least first. If the workers find different ways, all of them use the
# first of those in this order.
_WAYS = ("examples", "files", "input_fn")


class InputContext(tf.distribute.InputContext):
    """tf.distribute's InputContext; it notes whether the function read its index among the input pipelines."""

    def __init__(self, num_input_pipelines: int = 1, input_pipeline_id: int = 0, num_replicas_in_sync: int = 1) -> None:
        super().__init__(num_input_pipelines, input_pipeline_id, num_replicas_in_sync)
        self._was_sharded = False

    @property
    def input_pipeline_id(self) -> int:
        """Index of this pipeline, from 0."""
        self._was_sharded = True
        return self._input_pipeline_id

    @property
    def num_input_pipelines(self) -> int:
        """Number of pipelines that divide the data."""
        self._was_sharded = True
        return self._num_input_pipelines

    @property
    def was_sharded(self) -> bool:
        """Whether one of the two was read. Reading only the batch size does not divide the data."""
        return self._was_sharded

    def __str__(self) -> str:
        # The base class prints the properties, which would count as reading them: logging a context does not divide the
        # data.
        return f"InputContext(input pipeline id {self._input_pipeline_id}, total: {self._num_input_pipelines})"


@dataclasses.dataclass(frozen=True)
class WorkerPlace:
    """The place of this process among those that train together on the same input.

    Attributes:
      num_replicas: number of replicas of this process.
      collectives: collectives of those processes. A coordinator's workers have none and step independently.
    """

    num_replicas: int = 1
    worker_index: int = 0
    num_workers: int = 1
    collectives: Collectives = SINGLE_PROCESS

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
    """The arguments of the input function, and the division of its elements.

    Attributes:
      batch_size: the function's `params["batch_size"]`; None: not passed.
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
      reason: why, for the log.
      is_own: other workers read other examples, or the same ones in steps of their own; False: all read the same.
      whole: returns the undivided data, with elements like the dataset's.
    """

    shard: str
    reason: str
    division: Division
    dataset: tf.data.Dataset
    is_own: bool
    whole: Callable[[], tf.data.Dataset]


def choose(shard: str, batch_size: int | None, place: WorkerPlace, build: Build) -> ShardedInput | None:
    """Decide how the workers divide the data (`shard: auto`), and return this worker's part.

    If the workers come to different decisions, all use the first of them in `_WAYS`.

    Args:
      shard: that of `Input`; "auto" decides after calling the function.
      batch_size: examples per step over all replicas; None: each batch of the function goes to one replica.
      place: this process among the workers.
      build: calls the function and returns its dataset.

    Returns:
      This worker's part; None if shard="input_fn" and the function does not read its index.
    """
    if place.num_workers == 1 or shard in ("examples", "off"):
        reason = "one worker reads all of it" if shard == "auto" else f"shard={shard}"
        shard = "examples" if shard == "auto" else shard
        plan = _plan(shard, batch_size, place)
        dataset = build(plan)
        is_own = shard == "off" and place.num_workers > 1
        if is_own:
            reason = (
                "shard=off: every worker reads all of the data. What shuffles by run.seed or shuffle_seed has an order "
                "of its own on each worker in training; without a shuffle all of them train on the same examples"
            )
        return ShardedInput(shard, reason, plan.division, dataset, is_own, lambda: dataset)
    # For "auto", build the whole data first: most functions ignore their index, and this call is then the only one.
    plan = _plan("examples" if shard == "auto" else shard, batch_size, place)
    undivided = _plan("off", batch_size, place)
    dataset = build(plan)
    if shard != "auto" and plan.context.was_sharded:
        return ShardedInput(shard, f"shard={shard}", plan.division, dataset, True, lambda: build(undivided))
    if shard == "input_fn":
        return None
    files, found = _files(dataset, place)
    way = "input_fn" if plan.context.was_sharded else "files" if files else "examples"
    counts = place.collectives.sum([way == one for one in _WAYS])
    way = next(one for one, count in zip(_WAYS, counts, strict=True) if count)
    if way == "input_fn":
        # It reads its index, so call it again with the true one; the dataset built for "one pipeline" is dropped.
        plan = _plan("input_fn", batch_size, place)
        reason = "the function read its place among the input pipelines"
        return ShardedInput("input_fn", reason, plan.division, build(plan), True, lambda: build(undivided))
    if way == "files":  # each worker reads its own files, which the runner chooses
        whole = build(undivided)
        own = cluster.part_of_files(whole, place.num_workers, place.worker_index)
        return ShardedInput("files", found, undivided.division, own, True, lambda: whole)
    reason = f"the function did not read its place among the input pipelines, and {found}"
    if shard == "files":
        _log.warning(
            "shard=files: %s. Using shard=examples instead: every worker reads all of the data and takes its rows of "
            "each batch.",
            found,
        )
        reason = f"shard=files, and {found}"
        plan = _plan("examples", batch_size, place)
        dataset = build(plan)
    return ShardedInput("examples", reason, plan.division, dataset, False, lambda: dataset)


def of_service(service: DataService, batch_size: int | None, place: WorkerPlace, build: Build) -> ShardedInput:
    """Return this worker's part of data that `service` computes: each element goes to one of the workers.

    Args:
      service: the tf.data service.
      batch_size, place, build: as in `choose`.
    """
    plan = _plan("examples" if place.num_workers == 1 else "off", batch_size, place)
    whole = build(plan)
    dataset = service.distribute(whole, place.collectives)
    is_own = place.num_workers > 1
    return ShardedInput(
        "service", f"{service.address} computes the batches", plan.division, dataset, is_own, lambda: whole
    )


def train_division(
    sharded: ShardedInput, dataset: tf.data.Dataset, place: WorkerPlace
) -> tuple[tf.data.Dataset, Division]:
    """Return the training dataset and its division if each worker reads its own data.

    Args:
      sharded: this worker's part.
      dataset: the dataset of `sharded`, perhaps repeated without end.
      place: this process among the workers.

    Returns:
      (dataset, division). If the workers' data may end at different steps, each element has a bool scalar as its last
      part: whether the element is real.
    """
    is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    rows = full_rows(dataset.element_spec)
    ends, differs, count = place.collectives.sum([not is_endless, rows is None, (rows or 0) * place.num_replicas])
    full_count = None if ends or differs else int(count)
    division = PerWorker(place.num_replicas, place.collectives.sum_in_graph, full_count, ends_together=ends > 0)
    if not ends:
        return dataset, division
    # Not a second read for the first element: the service would start a second pass.
    of_own = sharded.whole() if sharded.shard == "service" else dataset
    return _marked(dataset, of_own.take(1).concatenate(sharded.whole().take(1))), division


def _marked(own: tf.data.Dataset, first: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset of the elements of `own` with True, followed without end by one placeholder element with False.

    Args:
      own: this worker's data.
      first: its first element is the placeholder, so that it fits the model: the first element of `own`, or that of the
        whole data if `own` is empty.
    """
    # The iterator never ends, so its state can be saved and restored like that of any other input.
    placeholder = first.take(1).cache().repeat()
    return own.map(_saying(True)).concatenate(placeholder.map(_saying(False)))


def _saying(is_real: bool) -> Callable[..., tuple[Any, ...]]:
    return tf.autograph.experimental.do_not_convert(lambda *element: (*element, is_real))


def _files(dataset: tf.data.Dataset, place: WorkerPlace) -> tuple[bool, str]:
    """Return (whether each worker can read its own files, the reason)."""
    count = cluster.num_files(dataset)
    if not count:
        return False, "its data is not read from files that TensorFlow can divide"
    found = f"it reads {count} file{'' if count == 1 else 's'}"
    return count >= place.num_workers, f"{found} and there are {place.num_workers} workers"


def _plan(shard: str, batch_size: int | None, place: WorkerPlace) -> Plan:
    if shard in ("files", "input_fn") or (shard == "off" and place.num_workers > 1):
        is_told = shard != "off"
        context = InputContext(place.num_workers if is_told else 1, place.worker_index if is_told else 0, place.total)
        # EVAL accepts any global size. Rounded down, so that a step never holds more examples than the user allowed.
        per_replica = None if batch_size is None else max(1, batch_size // place.total)
        return Plan(context, per_replica, RoundRobin(0, place.num_replicas, place.num_replicas))
    # One pipeline and one replica: the function returns global batches. Without a batch_size its batches are per
    # replica, so it must be able to divide its own size by the number of replicas.
    kind = RoundRobin if batch_size is None else SplitRows
    context = InputContext(1, 0, 1 if batch_size else place.total)
    return Plan(context, batch_size, kind(place.first, place.num_replicas, place.total))
