"""`Input`, and the input pipeline of a process: one dataset, whose examples are divided over the replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from runner.config.settings.data_service import DataService
from runner.data import sharding
from runner.data.dataset_adapter import as_dataset, call_input_fn, check_batches, none_spec, tensors
from runner.data.iterators import OPEN, iterate
from runner.data.ps_ranges import PsDataset, RangeIterator, in_order
from runner.data.replica_batches import Division, RoundRobin, SplitRows, any_rows, part_spec
from runner.data.sharding import InputContext, Plan, ShardedInput, WorkerPlace
from runner.data.shared_stream import NOT_SHARED, SharedStream, Stream
from runner.distribute.collectives import Collectives
from runner.model_fn import user_code
from runner.run_config import RunConfig
from runner.system.console import counted
from runner.system.user_frames import name_of
from runner.tf_private import datasets
from runner.tracing.random_state import seeded
from runner.types import copied_params

__all__ = ["Input", "InputContext", "InputPipeline", "build_input_pipeline"]

SHARD_CHOICES = ("auto", "files", "examples", "input_fn", "off")
ARGUMENTS = ("mode", "params", "config", "input_context", "num_epochs")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BLOCKS = {"train": "input.train", "eval": "input.eval", "infer": "input.predict"}

_LOCKED = (
    "The lock file is of a process that was killed while it cached its input: delete it. Or it is of one that still "
    "runs: several workers, or trainings at a time, need a name each, such as "
    '.cache(f"{folder}/worker-{config.cluster.worker_index}") in input_fn(..., config).'
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Input:
    """An input function and how its examples are divided over workers and replicas.

    Attributes:
      fn: gets those of mode, params, config and input_context that it declares. Returns a tf.data.Dataset whose
        elements are (features, labels) or features, or these as tensors; each tensor is `[batch, ...]` of any dtype.
        For a compiled keras.Model, the elements may be (features, labels, sample_weight), with weights `[batch]`. If it
        declares num_epochs, it gets the number of passes (train.max_epochs) and must end its data after them.
      params: the params passed to `fn`; None: the Estimator's params, as in tf.estimator.
      batch_size: examples per step over all replicas; in TRAIN a multiple of their number. None: each batch of `fn`
        goes to one replica, in turn, as in tf.estimator.
      shard: how several workers divide the data.
        "examples": all workers run the same pipeline, and each takes its rows of each global batch; the global batches
        are then the same at any number of workers. "files": each worker opens its own files; with fewer files than
        workers, it falls back to "examples". "input_fn": the function divides the data by its input_context. "off":
        every worker trains on all of the data. "auto": "input_fn" if the function reads
        `input_context.input_pipeline_id` or `num_input_pipelines`; else "files" if it reads enough files; else
        "examples".
      shuffle_seed: passed to `fn` as params["shuffle_seed"]; with `params` of the input's own also if it is None.
      first_batch_only: train on the batch of the first step in all steps.
      options: a tf.data.Options whose settings replace those of the function's dataset; None: no change.
      prefetch_to_device: in TRAIN, number of batches to copy to the GPU ahead of their steps; None: no copies ahead.
      service: in TRAIN, the tf.data service that computes the batches; the workers share them, whatever `shard` says.
        None: this process computes them.

    Raises:
      ValueError: `fn` is not callable, `batch_size` is not a positive int, or `shard` is unknown.
    """

    fn: Callable[..., Any]
    params: Any = None
    batch_size: int | None = None
    shard: str = "auto"
    shuffle_seed: int | None = None
    first_batch_only: bool = False
    options: tf.data.Options | None = None
    prefetch_to_device: int | None = None
    service: DataService | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"Input(fn={self.fn!r}): fn must be a function.")
        if self.shard not in SHARD_CHOICES:
            raise ValueError(f"shard={self.shard!r} of {name_of(self.fn)} is not one of {', '.join(SHARD_CHOICES)}.")
        size = self.batch_size
        if size is None:
            return
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if not is_int or size < 1:
            raise ValueError(f"batch_size={size!r} of {name_of(self.fn)} must be a positive int or None.")


@dataclasses.dataclass(frozen=True)
class DevicePrefetch:
    """The device to which batches are copied ahead of their steps, and how many batches (`number`) ahead."""

    device: str
    number: int


@dataclasses.dataclass(frozen=True)
class InputPipeline:
    """The input of this process: a dataset, and how the examples of one step are divided over the local replicas.

    Attributes:
      dataset: its elements are (features,) or (features, labels), tensors `[batch, ...]`; labels may be WeightedLabels.
      num_replicas: number of replicas of this process.
      global_batch_size: examples per step over all replicas; None: as many as the function's batches hold.
      shard: "examples", "files", "input_fn", "off" or "service"; never "auto".
      reason: why `shard` was chosen, for the log.
      division: divides each element over the replicas.
      num_micro_batches: number of parts of a replica's batch, which the replica computes one after the other.
      num_epochs: number of passes over the examples after which the dataset ends; None: not limited by passes.
      given: like dataset, but without what the division over workers has added (options, placeholder elements).
      build_given: calls the input function again, for another number of passes, and returns its `given`. All workers
        that train together call it together.
      is_chief: this process logs messages about the input; others stay silent.
      name: the input function's name, for messages.
      seed: the seed of shuffles without a seed of their own; a `DrawnSeed` differs in each process.
      num_pipelines: number of processes that read different data; 1 if all read the same.
      pipeline_index: index of this process among them; 0 if all read the same.
      max_steps: largest number of steps of an evaluation; infinite: as many as the dataset has.
      service: the tf.data service that computes the dataset; None: this process does.
      prefetch: batches copied to a device ahead of their steps; None: each batch is copied in its step.
      model_fn: the function that computes with the batches, for messages.
      input: the input function or the Input from which it was built, as the user gave it.
      stream: notes what this process reads, and compares it with other workers.
    """

    dataset: tf.data.Dataset
    num_replicas: int
    global_batch_size: int | None
    shard: str
    reason: str
    division: Division
    num_micro_batches: int = 1
    num_epochs: int | None = None
    _: dataclasses.KW_ONLY
    given: tf.data.Dataset
    build_given: Callable[[int | None], tf.data.Dataset]
    is_chief: bool = True
    num_pipelines: int = 1
    pipeline_index: int = 0
    name: str = "the input function"
    seed: int | None = None
    max_steps: float = math.inf
    service: DataService | None = None
    prefetch: DevicePrefetch | None = None
    model_fn: Any = None
    input: Any = None
    stream: Stream = NOT_SHARED

    @property
    def function(self) -> Any:
        """The user's input function."""
        return getattr(self.input, "fn", self.input)

    def open(self, skipped: int = 0) -> Any:
        """Return an iterator over the dataset without its first `skipped` elements; a RangeIterator of a PsDataset."""
        dataset = self.dataset.skip(skipped) if skipped else self.dataset
        if isinstance(dataset, PsDataset):
            return RangeIterator(dataset)
        if self.prefetch is not None:
            # TensorFlow requires this to be the last transformation, so `skip` comes before it.
            copy_ahead = tf.data.experimental.prefetch_to_device(self.prefetch.device, self.prefetch.number)
            dataset = dataset.apply(copy_ahead)
        return iterate(dataset)

    @property
    def why_no_state(self) -> str | None:
        """The reason why a checkpoint can hold only a count of the batches read, not the iterator's state; None: it
        can.
        """
        if not isinstance(self.dataset, tf.data.Dataset):
            return "the workers of the parameter server cluster read the data"
        if self.service is not None:
            return "a tf.data service computes the data"
        if not datasets.has_state(self.given):
            return "a hook feeds the data"
        if datasets.has_file_cache(self.given):
            # Such a state is of use only with the files that were there when it was saved, and TensorFlow 2.21 then
            # leaves their lock file for ever.
            return "its elements are cached in files"
        if self.prefetch is not None:
            return "its batches are copied to the device before their steps"
        return None

    @property
    def is_timeable(self) -> bool:
        """Whether a `WaitTimer` can time the iterator: it belongs to this process and is on the host."""
        return isinstance(self.dataset, tf.data.Dataset) and self.prefetch is None

    @property
    def may_read_ahead(self) -> bool:
        """Whether several batches may be read before the step on the first of them without changing any result.

        False if a batch can depend on that step, for instance through a Python function; if a tf.data service computes
        the batches; or if the workers' data ends at different steps.
        """
        if self.service is not None or self.division.ends_together:
            return False
        return self.is_timeable and not datasets.may_change_meanwhile(self.dataset)

    @property
    def element_spec(self) -> Any:
        """The spec of an element of `given`. If each worker reads its own data, the batch dimension is None, so that
        the spec does not depend on the number of workers.
        """
        spec = self.given.element_spec
        if self.num_pipelines == 1:
            return spec
        return any_rows(spec)

    @property
    def num_in_turn(self) -> int:
        """The number of replicas of all processes to which the batches of EVAL and PREDICT are dealt in turn."""
        if isinstance(self.division, RoundRobin):
            return self.division.total
        return 1

    @property
    def replica_spec(self) -> tuple[Any, Any]:
        """The TensorSpecs (features, labels or None) of one replica's micro-batch; `as_given` makes of them what
        model_fn gets.

        The leading dimension is None unless it is static and divides evenly; the other dimensions and the dtypes are
        the dataset's.
        """
        of_element = tf.nest.map_structure(none_spec, self.dataset.element_spec)
        of_replica = self.division.replica_spec(of_element)
        spec = part_spec(of_replica, self.num_micro_batches)
        labels = spec[1] if len(spec) > 1 else None
        return spec[0], labels

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Report errors of the data, and types that model_fn cannot compute with, as user errors inside this context,
        with the name of the input function.
        """
        try:
            yield
        except tf.errors.OutOfRangeError:  # the end of the data
            raise
        except tf.errors.OpError as error:
            if isinstance(error, tf.errors.AlreadyExistsError) and "cache lockfile" in str(error):
                OPEN.leave_files()  # they may be another process's
                error.add_note(_LOCKED)
            texts = [name for name, spec in tensors(self.element_spec) if getattr(spec, "dtype", None) == tf.string]
            is_of_input = comes_from_input(error)
            if is_of_input:
                error.add_note(f"while reading the data of {self.name}")
            elif texts and isinstance(error, tf.errors.UnimplementedError):  # a cast of strings to numbers, or the like
                error.add_note(f"{self.name} returns strings as {', '.join(texts)}")
            else:
                raise
            function = None if is_of_input else self.model_fn
            with user_code(function):
                raise

    def remaining_steps(self, elements: int = 0) -> float | None:
        """Return how many steps the dataset still provides after `elements` of its elements have been read.

        Returns:
          An int; math.inf for an endless dataset; None if its size is unknown.
        """
        cardinality = int(self.given.cardinality())
        if self.division.ends_together or cardinality == tf.data.UNKNOWN_CARDINALITY:
            return None
        if cardinality == tf.data.INFINITE_CARDINALITY:
            return math.inf
        return math.ceil((cardinality - elements) / self.division.elements_per_step)


def comes_from_input(error: Exception) -> bool:
    """Report whether an operation of the input's dataset failed while a step read it."""
    return re.search(r"IteratorGetNext|Iterator::", str(error)) is not None


def check_examples(pipeline: InputPipeline, num_steps: int, examples: int, *, are_first: bool) -> None:
    """Check that training steps had no more examples than `batch_size` allows, and warn if the first ones had fewer.

    `.batch(32)` without drop_remainder leaves the static batch size unknown, so a wrong size is seen only when batches
    have been read. Users choose the number of steps and the learning rate for `batch_size`. Smaller batches are not an
    error: the data may have no more examples, and the last batch of a pass is often smaller.

    Args:
      pipeline: the training input.
      num_steps: number of steps of one loop.
      examples: number of examples of these steps.
      are_first: these are the first steps of the input. Several steps may include a smaller batch at the end of a pass,
        so they are reported only if their batches hold on average at most half of `batch_size`.

    Raises:
      ValueError: there were more examples than `num_steps` batches of `batch_size`.
    """
    size = pipeline.global_batch_size
    if size is None or not examples:
        return
    each = f"{examples / num_steps:.1f}".removesuffix(".0")
    if examples > num_steps * size:
        raise ValueError(
            f"input.train.batch_size={size}, but the batches of {pipeline.name} hold more: "
            f"{counted(num_steps, 'step')} had {examples} examples, {each} per step. Write "
            '.batch(params["batch_size"]), or set batch_size=null to keep these batches.'
        )
    if num_steps == 1:
        are_small = examples < size
        first = "the first step had"
        per_step = ""
    else:
        are_small = 2 * examples <= num_steps * size
        first = f"the first {num_steps} steps had"
        per_step = " each"
    if are_first and are_small and pipeline.is_chief:
        _log.warning(
            "input.train.batch_size=%d, but the batches of %s hold fewer: %s %s examples%s. Unless the data has no "
            'more examples, write .batch(params["batch_size"]), or set batch_size=null to keep these batches.',
            size, pipeline.name, first, each, per_step,
        )  # fmt: skip


class EmptyInputError(ValueError):
    """An input that has no examples, on any worker."""


def why_empty(pipeline: InputPipeline, mode: str, collectives: Collectives) -> str:
    """Return a message about an input that has returned no examples on any worker, with what is known of its batches.

    All workers must call this together, before they raise EmptyInputError.
    """
    num_workers = collectives.num_workers
    facts = []
    if num_workers > 1:
        facts.append(f"0 over {num_workers} workers")
    if pipeline.global_batch_size is not None:
        facts.append(f"{_BLOCKS[mode]}.batch_size={pipeline.global_batch_size}")
    batching = datasets.batching(pipeline.given)
    examples = None if batching is None else batching.examples
    num_workers_that_know, total = collectives.sum([float(examples is not None), float(examples or 0)])
    is_number_known = num_workers_that_know == num_workers
    if pipeline.num_pipelines == 1:  # all workers read the same, so the sum would count each example several times
        total = float(examples or 0)
    advice = "See from which files it reads, and what it leaves out."
    if batching is not None:
        of_examples = f" of {counted(int(total), 'example')}" if is_number_known else ""
        facts.append(f".batch({batching.batch_size}, drop_remainder={batching.drops_remainder}){of_examples}")
        if batching.drops_remainder and not is_number_known:
            advice += " drop_remainder=True leaves out a batch that is not full."
        elif batching.drops_remainder and total:
            advice = "drop_remainder=True leaves out a batch that is not full: use False, or a smaller batch size."
    collectives.part()  # the caller raises an error, and this process ends: the sum must have reached all workers
    facts_in_brackets = ""
    if facts:
        facts_in_brackets = f" ({', '.join(facts)})"
    return f"{pipeline.name} returned no examples{facts_in_brackets}. {advice}"


def build_input_pipeline(
    input: Input | Callable[..., Any],
    mode: str,
    place: WorkerPlace,
    *,
    params: Any = None,
    config: RunConfig | None = None,
    num_epochs: int | None = None,
    num_batches: float = math.inf,
    as_in_session: bool = False,
) -> InputPipeline:
    """Call the input function and return this process's InputPipeline.

    Args:
      input: an Input; or a function, which stands for Input(function).
      mode: train, eval or infer.
      place: this process among those that train together; all of them make this call with the same input.
      params: the Estimator's params, used if the Input has none.
      config: passed to the function unchanged; in TRAIN its `gradient_accumulation` splits each replica's batch.
      num_epochs: number of passes over the examples; None: the function decides.
      num_batches: number of batches of the whole input in EVAL and PREDICT; without a batch size, of each replica.
      as_in_session: as in `call_input_fn`.

    Raises:
      ValueError: the batch size does not divide over the replicas (TRAIN), or the function cannot be called or does not
        return data.
    """
    source = input if isinstance(input, Input) else Input(input)
    if place.coordinator is not None:
        common_arguments = {
            "params": params,
            "config": config,
            "num_epochs": num_epochs,
            "as_in_session": as_in_session,
        }
        build_for_worker = functools.partial(build_input_pipeline, mode=mode, **common_arguments)
        seed = 0 if config is None else config.seed
        return _build_for_servers(source, place, build_for_worker, seed)
    is_training = mode == "train"
    num_micro_batches = 1
    if is_training and config is not None:
        num_micro_batches = config.gradient_accumulation
    _check_batch_size(source, mode, place, num_micro_batches)
    call = _InputCall(source, mode, params, config, num_epochs, as_in_session)
    service = source.service if is_training else None
    sharded = _choose_part(call, place, service)
    given = sharded.dataset
    name = name_of(source.fn)
    # True: this worker reads its data independently of the others. False: all read the same elements in the same order.
    reads_own_data = sharded.shard != "examples" and place.num_workers > 1
    num_pipelines = 1
    pipeline_index = 0
    if reads_own_data:
        num_pipelines = place.num_workers
        pipeline_index = place.worker_index
    stream: Stream = NOT_SHARED
    if not reads_own_data and place.collectives.num_workers > 1:
        stream = _build_stream(given, name, mode, place)
    if source.first_batch_only:
        # Cached, so that a shuffle does not give another batch in each pass.
        given = given.take(sharded.division.elements_per_step).cache().repeat()
    dataset, division = _divide_steps(call, sharded, given, place)
    pipeline = InputPipeline(
        dataset,
        place.num_replicas,
        source.batch_size,
        sharded.shard,
        sharded.reason,
        division,
        num_micro_batches,
        num_epochs,
        given=given,
        build_given=functools.partial(_build_given, call, place, service),
        name=name,
        seed=getattr(config, "seed", None),
        is_chief=place.worker_index == 0,
        num_pipelines=num_pipelines,
        pipeline_index=pipeline_index,
        service=service,
        input=input,
        stream=stream,
    )
    if isinstance(division, RoundRobin):
        pipeline = _deal_batches(pipeline, division, mode, place, num_batches)
    if not is_training:
        return pipeline
    prefetch = _choose_prefetch(source.prefetch_to_device, place, config)
    return dataclasses.replace(pipeline, prefetch=prefetch)


def _choose_part(call: _InputCall, place: WorkerPlace, service: DataService | None) -> ShardedInput:
    """Return this worker's part of the data.

    Args:
      call: calls the input function.
      place: this process among the workers.
      service: the tf.data service that computes the data; None: this process does.

    Raises:
      ValueError: the function was to divide the data, and did not.
    """
    source = call.source
    if service is not None:
        return sharding.of_service(service, source.batch_size, place, call.dataset)
    is_training = call.mode == "train"
    sharded = sharding.choose(source.shard, source.batch_size, place, call.dataset, training=is_training)
    if sharded is None:
        raise ValueError(
            f"{_BLOCKS[call.mode]}.shard=input_fn: {name_of(source.fn)} must divide the data, but it reads neither "
            "input_context.input_pipeline_id nor num_input_pipelines. Read them, or use shard=examples."
        )
    return sharded


def _build_given(
    call: _InputCall, place: WorkerPlace, service: DataService | None, num_epochs: int | None
) -> tf.data.Dataset:
    """Return this worker's part of the data of `num_epochs` passes; the arguments are those of `_choose_part`."""
    of_passes = dataclasses.replace(call, num_epochs=num_epochs)
    return _choose_part(of_passes, place, service).dataset


def _divide_steps(
    call: _InputCall, sharded: ShardedInput, given: tf.data.Dataset, place: WorkerPlace
) -> tuple[tf.data.Dataset, Division]:
    """Return the dataset that this worker reads, and how a step divides its elements.

    All workers of synchronous training call this together.

    Args:
      call: the call of the input function.
      sharded: this worker's part of the data.
      given: the dataset of `sharded`, or its first batch repeated forever.
      place: this process among the workers.
    """
    if place.num_workers == 1:
        return given, sharded.division
    # Only synchronous training needs a division common to all workers: evaluation adds up the workers' counts at its
    # end, and the workers of a parameter server cluster step independently.
    are_synchronous = call.mode == "train" and place.collectives.num_workers > 1
    if are_synchronous and sharded.shard != "examples":
        return sharding.train_division(sharded, given, place)
    chosen = call.source.options
    if chosen is not None and chosen.deterministic is False and place.worker_index == 0:
        _log.warning(
            "%s.options.deterministic=false has no effect: all workers read the same batches and each takes its "
            "part, so the order must be the same.",
            _BLOCKS[call.mode],
        )
    return in_order(given), sharded.division  # each element must be the same on all workers


def _deal_batches(
    pipeline: InputPipeline, division: RoundRobin, mode: str, place: WorkerPlace, num_batches: float
) -> InputPipeline:
    """Return a pipeline whose replicas get whole batches in turn, with those of this process only.

    Args:
      pipeline: the pipeline before they are dealt.
      division: its division.
      mode: as in `build_input_pipeline`.
      place: as in `build_input_pipeline`.
      num_batches: as in `build_input_pipeline`.
    """
    dataset = pipeline.dataset
    reads_own_data = pipeline.num_pipelines > 1
    max_steps = math.inf
    if math.isfinite(num_batches):
        num_of_all = int(num_batches)
        if pipeline.global_batch_size is None:  # they are counted for each replica
            num_of_all *= place.total
        num_own = division.share(num_of_all)
        max_steps = math.ceil(num_own / place.num_replicas)
        # This counts the batches of the whole input, so it comes before `division.own`, which leaves those of this
        # process. With one element a step `max_steps` is enough, and `take` would be wrong: a session hook may take
        # batches that are no steps.
        if division.elements_per_step > 1:
            num_taken = num_own if reads_own_data else num_of_all
            dataset = dataset.take(num_taken)
    if not reads_own_data:
        dataset = division.own(dataset, pipeline.stream)
    if mode == "infer" and datasets.may_change_meanwhile(dataset):
        # The next batch may depend on the predictions of this one, so a step reads one batch only.
        division = RoundRobin(0, 1, 1)
    is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    division = dataclasses.replace(division, endless=is_endless)
    return dataclasses.replace(pipeline, dataset=dataset, division=division, max_steps=max_steps)


def _build_stream(dataset: tf.data.Dataset, name: str, mode: str, place: WorkerPlace) -> SharedStream:
    """Return the stream of a dataset whose examples the workers divide.

    Args:
      name: the input function's name.

    Raises:
      ValueError: the workers are sure to read it in different orders.
    """
    block = _BLOCKS[mode]
    reason = datasets.why_in_no_order(dataset)
    if reason is not None:
        raise ValueError(
            f"{block}.shard=examples: each worker reads all of the data of {name} and takes its rows of each batch, "
            f"but the order differs between them: {reason}. Give every shuffle a seed, and leave deterministic=False "
            "out; or divide the data by input_context with shard=input_fn, or by files."
        )
    why = functools.partial(datasets.why_not_repeatable, dataset)
    draws = functools.partial(datasets.may_draw_values, dataset)
    return SharedStream(dataset.element_spec, name, block, place.collectives, why, draws)


def _build_for_servers(
    source: Input, place: WorkerPlace, build_for_worker: Callable[..., InputPipeline], seed: int
) -> InputPipeline:
    """Return the training input of a parameter server cluster, whose workers read it. One batch is always one update.

    Each worker reads its own copy of the dataset, or, with `shard` files or input_fn, its own part of the data.

    Args:
      source: the input.
      place: the place of this process, the coordinator of the workers.
      build_for_worker: builds the pipeline of one worker from an Input and the worker's place.
      seed: the seed with which each call of the function begins.
    """
    are_divided = source.shard in ("files", "input_fn")
    num_parts = place.num_workers if are_divided else 1
    if source.batch_size is not None:
        # Workers that step together share a global batch. These do not: a part has batches of the whole size.
        source = dataclasses.replace(source, batch_size=source.batch_size * num_parts)
    pipelines = []
    for index in range(num_parts):
        part = dataclasses.replace(place, worker_index=index, num_workers=num_parts, coordinator=None)
        with seeded(seed):  # else a shuffle's order would depend on the number of calls before this one
            pipelines.append(build_for_worker(source, place=part))
    dataset = PsDataset([pipeline.dataset for pipeline in pipelines], place.coordinator)
    return dataclasses.replace(pipelines[0], dataset=dataset, given=dataset, division=SplitRows(0, 1, 1))


def _choose_prefetch(number: int | None, place: WorkerPlace, config: RunConfig | None) -> DevicePrefetch | None:
    """Return the prefetch to the device of the only replica if that is a GPU, else None.

    Args:
      number: number of batches to copy ahead; None: no prefetch.
      place: this process among the workers.
      config: its train_distribute determines the device.

    Raises:
      ValueError: there are several replicas.
    """
    if number is None:
        return None
    if place.total > 1:
        raise ValueError(
            f"input.train.prefetch_to_device={number} works with one replica only, but there are {place}. Unset it, "
            "or use strategy=default or one_device."
        )
    (device,) = step_devices(getattr(config, "train_distribute", None))
    if "GPU" in device:
        return DevicePrefetch(device, number)
    _log.info("input.train.prefetch_to_device=%d has no effect: training runs on %s.", number, device)
    return None


def step_devices(strategy: tf.distribute.Strategy | None) -> list[str]:
    """Return the names of the devices on which the replicas of this process compute their steps."""
    if strategy is not None:
        return list(map(str, strategy.extended.worker_devices))
    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        return [str(gpus[0].name)]
    return ["/device:CPU:0"]


def _repeat_passes(dataset: tf.data.Dataset, fn: Any, num_epochs: int | None) -> tf.data.Dataset:
    """Return a dataset of `num_epochs` passes over `dataset`, the result of `fn`. If `num_epochs` is None, or if `fn`
    declares the argument num_epochs and so ends its data itself, return `dataset` unchanged.

    Raises:
      ValueError: the dataset is infinite.
    """
    if num_epochs is None:
        return dataset
    cardinality = int(dataset.cardinality())
    if cardinality == 0:  # repeating an empty dataset leaves it empty
        return dataset
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"train.max_epochs={num_epochs}: {name_of(fn)} returns an infinite dataset, whose passes cannot be "
            "counted. Remove .repeat(); or add an argument num_epochs to the function and end after that many passes; "
            "or set train.max_steps and train.max_epochs=null."
        )
    if "num_epochs" in _list_declared(fn):
        return dataset
    return dataset.repeat(num_epochs)


@dataclasses.dataclass(frozen=True)
class _InputCall:
    """The call of an input function, which `sharding` makes with one plan or another.

    Attributes:
      source: the input function and its settings.
      mode, params, config, num_epochs, as_in_session: as in `build_input_pipeline`.
    """

    source: Input
    mode: str
    params: Any
    config: RunConfig | None
    num_epochs: int | None
    as_in_session: bool

    def dataset(self, plan: Plan) -> tf.data.Dataset:
        """Call the function and return its dataset, with the passes and options of the Input.

        Raises:
          ValueError: its batches are not those of the Input, or there is no end to its passes.
        """
        source = self.source
        name = name_of(source.fn)
        is_training = self.mode == "train"
        result = self._call_function(plan)
        dataset = as_dataset(result, name, endless=is_training or self.as_in_session)
        dataset = _repeat_passes(dataset, source.fn, self.num_epochs)
        if source.options is not None:
            dataset = dataset.with_options(source.options)
        if source.batch_size is not None:
            setting = f"{_BLOCKS[self.mode]}.batch_size={source.batch_size}"
            # Only TRAIN depends on the batch size: evaluation counts batches of any size exactly.
            expected = plan.batch_size if is_training else None
            is_dataset = isinstance(result, tf.data.Dataset)
            check_batches(dataset.element_spec, name, setting, expected, is_dataset=is_dataset)
        return dataset

    def _call_function(self, plan: Plan) -> Any:
        """Call the function with those of ARGUMENTS that it declares."""
        source = self.source
        offered = {
            "mode": self.mode,
            "params": self._params(plan),
            "config": self.config,
            "input_context": plan.context,
        }
        if self.num_epochs is not None or _must_be_given(source.fn, "num_epochs"):  # else the function's own default
            offered["num_epochs"] = self.num_epochs
        declared = _list_declared(source.fn)
        arguments = {name: offered[name] for name in declared if name in offered}
        name = name_of(source.fn)
        try:
            bound_function = functools.partial(source.fn, **arguments)
            with user_code(source.fn):
                return call_input_fn(
                    bound_function,
                    name,
                    training=self.mode == "train",
                    as_in_session=self.as_in_session,
                    graph_seed=getattr(self.config, "tf_random_seed", None),
                )
        except Exception as error:
            with_what = ", ".join(arguments) or "nothing"
            error.add_note(f"in {name}, called for {_BLOCKS[self.mode]} with {with_what}")
            raise

    def _params(self, plan: Plan) -> Any:
        """Return the params for the function, with the batch size and the seed of the Input. Params of the input's own
        have a seed in any case, perhaps None.
        """
        source = self.source
        added: dict[str, Any] = {}
        # One function serves all modes: it may read params.shuffle_seed also where none is set.
        if isinstance(source.params, Mapping) and "shuffle_seed" not in source.params:
            added["shuffle_seed"] = None
        if plan.batch_size is not None:
            added["batch_size"] = plan.batch_size
        if source.shuffle_seed is not None:
            added["shuffle_seed"] = source.shuffle_seed
        if source.params is None:
            return copied_params(self.params, **added)
        return copied_params(source.params, **added)


def _must_be_given(fn: Callable[..., Any], name: str) -> bool:
    if name not in _list_declared(fn):
        return False
    parameter = inspect.signature(fn).parameters[name]
    return parameter.default is inspect.Parameter.empty


def _list_declared(fn: Callable[..., Any]) -> list[str]:
    """Return those of ARGUMENTS that `fn` takes by name and that no functools.partial has bound."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some builtins have no signature
        return []
    bound = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    free = [parameter for name, parameter in parameters.items() if name not in bound]
    taken_by_name = {parameter.name for parameter in free if parameter.kind in _BY_NAME}
    takes_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in free)
    required = [parameter.name for parameter in free if _lacks_an_argument(parameter)]
    if required:
        raise ValueError(
            f"{name_of(fn)} requires {', '.join(map(repr, required))}, which the runner does not pass. It passes, by "
            f"name: {', '.join(ARGUMENTS)}. Bind other arguments with functools.partial, or use params."
        )
    declared = []
    for name in ARGUMENTS:
        # **kwargs does not promise to end after num_epochs passes: only a declared argument does.
        is_taken_by_kwargs = takes_kwargs and name not in bound and name != "num_epochs"
        if name in taken_by_name or is_taken_by_kwargs:
            declared.append(name)
    return declared


def _lacks_an_argument(parameter: inspect.Parameter) -> bool:
    """Report whether a function needs this argument and the runner does not pass it by name."""
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if is_variadic or parameter.default is not parameter.empty:
        return False
    is_passed = parameter.kind in _BY_NAME and parameter.name in ARGUMENTS
    return not is_passed


def _check_batch_size(source: Input, mode: str, place: WorkerPlace, num_micro_batches: int) -> None:
    """Check that the batch of TRAIN divides over the micro-batches of all replicas. Other modes take any size.

    Raises:
      ValueError: it does not divide.
    """
    size = source.batch_size
    total = place.total * num_micro_batches
    if mode != "train" or size is None or size % total == 0:
        return
    below = size // total * total
    use = f"{total}"
    if below:
        use = f"{below} or {below + total}"
    over = str(place)
    if num_micro_batches > 1:
        over += f" with {num_micro_batches} micro-batches each (train.gradient_accumulation)"
    raise ValueError(f"{_BLOCKS[mode]}.batch_size={size} does not divide over {over}. Use {use}.")
