"""An input function and what becomes of it: one dataset a process, and its examples divided over the replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from runner.data import sharding
from runner.data.dataset_adapter import as_dataset, call_input_fn, check_batches, none_spec
from runner.data.iterators import iterate
from runner.data.replica_batches import Division, RoundRobin, any_rows, part_spec
from runner.data.service import DataService
from runner.data.sharding import InputContext, Plan, ShardedInput, WorkerPlace
from runner.run_config import RunConfig
from runner.tf_private import datasets
from runner.tracking.exit_codes import comes_from_input, user_code
from runner.types import copied_params

__all__ = ["Input", "InputContext", "InputPipeline", "build_input_pipeline"]

SHARD_CHOICES = ("auto", "files", "examples", "input_fn", "off")
ARGUMENTS = ("mode", "params", "config", "input_context", "num_epochs")
_BLOCKS = {"train": "input.train", "eval": "input.eval", "infer": "input.predict"}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Input:
    """An input function and how its examples reach the replicas.

    Attributes:
      fn: called with those of mode, params, config, input_context that it declares. Returns a tf.data.Dataset of
        (features, labels) or of features, or these as tensors. One that declares num_epochs ends after so many
        passes where training is limited to them (train.max_epochs), and is not given it elsewhere.
      params: what `fn` gets as params; None: the Estimator's (tf.estimator's rule).
      batch_size: examples of one step over all replicas; in TRAIN it divides evenly by their number. None: the
        function's own batches are per replica and taken in turn, as in tf.estimator.
      shard: how several workers share the data.
        examples: all run the same pipeline, each takes its rows of each global batch (step k is then the same at any
          number of workers). files: each opens its own part of the files only; where there are fewer than workers,
          or none, it is examples. input_fn: the function divides the data by its input_context. off: nobody divides,
          every worker trains on all of it. auto: input_fn where the function reads `input_context.input_pipeline_id`
          or `num_input_pipelines`, else files where it reads enough of them, else examples.
      shuffle_seed: given to `fn` as params["shuffle_seed"]; None: not given.
      first_batch_only: the batch of the first step comes again and again, without end.
      options: a tf.data.Options, whose settings take the place of those of the function's dataset; None: none do.
      prefetch_to_device: in TRAIN so many batches are copied to the GPU before their steps; None: none.
      service: in TRAIN a tf.data service computes the batches; workers share them, whatever `shard` says.

    Raises:
      ValueError: a batch_size that is not a positive int, or an unknown shard.
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
            raise ValueError(f"an input needs a function, got {self.fn!r}.")
        if self.shard not in SHARD_CHOICES:
            raise ValueError(f"shard={self.shard!r} of {_describe(self.fn)} is not one of {', '.join(SHARD_CHOICES)}.")
        size = self.batch_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"batch_size={size!r} of {_describe(self.fn)} is not a number of examples (1 or more).")


@dataclasses.dataclass(frozen=True)
class DevicePrefetch:
    """Batches that are copied to a device before their steps: `number` of them."""

    device: str
    number: int


@dataclasses.dataclass(frozen=True)
class InputPipeline:
    """This process's input: a dataset and how one step's examples are divided over the local replicas.

    Attributes:
      dataset: elements are (features,) or (features, labels).
      num_replicas: replicas of this process.
      global_batch_size: examples of one step over all replicas; None: whatever the function's batches hold.
      shard: examples, files, input_fn, off or service; never auto.
      reason: why, for the log.
      division: does the dividing.
      num_micro_batches: a replica computes its batch in so many parts, one after the other.
      num_epochs: the dataset is so many passes over the examples; None: nobody counts.
      given: the dataset without what the runner has added to it.
      is_chief: whether what is to be said of the input is said here, and not by another worker.
      name: of the input function, for messages.
      seed: what shuffles without a seed of its own follows it; a `DrawnSeed`: another process has another one.
      num_pipelines, pipeline_index: processes that read data of their own, and which of them this is; 1 and 0 where
        there is one, or all read the same.
      service: computes the dataset; None: this process does.
      prefetch: None: a step's batch is copied in the step.
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
    is_chief: bool = True
    num_pipelines: int = 1
    pipeline_index: int = 0
    name: str = "the input function"
    seed: int | None = None
    service: DataService | None = None
    prefetch: DevicePrefetch | None = None

    def open(self, skipped: int = 0) -> Any:
        """Return an iterator over the dataset without its first `skipped` elements."""
        dataset = self.dataset.skip(skipped) if skipped else self.dataset
        if self.prefetch is not None:
            # The last stage, as TensorFlow demands: nothing can be skipped behind it.
            dataset = dataset.apply(tf.data.experimental.prefetch_to_device(self.prefetch.device, self.prefetch.number))
        return iterate(dataset)

    @property
    def why_no_state(self) -> str | None:
        """Why no checkpoint can hold the state of its iterator, but the count of what was read; None: one can."""
        if not isinstance(self.dataset, tf.data.Dataset):
            return "workers read the data, each on its own"
        if self.service is not None:
            return "a tf.data service computes the data"
        if not datasets.has_state(self.given):
            return "a hook feeds the data"
        return None if self.prefetch is None else "its batches are copied to the device before their steps"

    @property
    def is_timeable(self) -> bool:
        """Report whether a `WaitTimer` can time its iterator: it is one of this process, on the host."""
        return isinstance(self.dataset, tf.data.Dataset) and self.prefetch is None

    @property
    def may_read_ahead(self) -> bool:
        """Report whether several batches may be read before the step on the first of them, with the same numbers.

        Not where a batch may depend on that step, as of a Python function, or somebody else would get it.
        """
        is_alone = self.service is None and not self.division.ends_together and self.division.elements_per_step == 1
        return is_alone and self.is_timeable and not datasets.may_change_meanwhile(self.dataset)

    @property
    def element_spec(self) -> Any:
        """Of `given`; where workers read data of their own, as it is at any number of them."""
        spec = self.given.element_spec
        return spec if self.num_pipelines == 1 else any_rows(spec)

    @property
    def replica_spec(self) -> tuple[Any, Any]:
        """(features, labels or None) of TensorSpecs, as a replica sees them, one part at a time.

        The leading dimension is None unless it is static and divides; the others are the dataset's.
        """
        spec = tf.nest.map_structure(none_spec, self.dataset.element_spec)
        spec = part_spec(self.division.replica_spec(spec), self.num_micro_batches)
        return spec[0], (spec[1] if len(spec) > 1 else None)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Say of an error of the data, while steps that read it run, whose data it is: a mistake of the user's."""
        try:
            yield
        except tf.errors.OutOfRangeError:  # the end of the data
            raise
        except tf.errors.OpError as error:
            if comes_from_input(error):
                error.add_note(f"in the data of {self.name}")
                with user_code():
                    raise
            raise

    def remaining_steps(self, elements: int = 0) -> float | None:
        """Steps to the end of the dataset, of which `elements` have been read: an int; math.inf if it has none; None if
        nobody knows.
        """
        cardinality = int(self.given.cardinality())
        if self.division.ends_together or cardinality == tf.data.UNKNOWN_CARDINALITY:
            return None
        if cardinality == tf.data.INFINITE_CARDINALITY:
            return math.inf
        return math.ceil((cardinality - elements) / self.division.elements_per_step)


def say_small_batches(pipeline: InputPipeline, num_steps: int, examples: int) -> None:
    """Log it where the first batches of training hold fewer examples than `batch_size`, by which a person reckons steps
    and learning rates. They are trained on: data may have no more, and the last batch of a pass seldom has.

    Args:
      num_steps, examples: of the first loop. One of several steps may have read the ends of passes, so it is named only
        where the batches are at most half as large.
    """
    size = pipeline.global_batch_size
    if size is None or not examples or not pipeline.is_chief:
        return
    if examples >= num_steps * size or (num_steps > 1 and 2 * examples > num_steps * size):
        return
    each = f"{examples / num_steps:.1f}".removesuffix(".0")
    first = "the first step had" if num_steps == 1 else f"the first {num_steps} steps had"
    _log.warning(
        "input.train.batch_size=%d, but the batches of %s hold fewer: %s %s examples%s. Use params[\"batch_size\"] in "
        ".batch(), or set batch_size=null to keep its own size, unless the data has no more.",
        size, pipeline.name, first, each, "" if num_steps == 1 else " each",
    )  # fmt: skip


def check_examples(pipeline: InputPipeline, num_steps: int, examples: int) -> None:
    """Check that steps of training had no more examples than `batch_size` allows.

    A dataset of `.batch(32)` without drop_remainder does not say how many its batches hold: only its examples do.

    Args:
      num_steps, examples: of one loop.

    Raises:
      ValueError: there were more; the message has both numbers.
    """
    size = pipeline.global_batch_size
    if size is None or examples <= num_steps * size:
        return
    each = f"{examples / num_steps:.1f}".removesuffix(".0")
    raise ValueError(
        f"input.train.batch_size={size}, but the batches of {pipeline.name} hold more: {num_steps} "
        f'{"step" if num_steps == 1 else "steps"} had {examples} examples, {each} a step. Use params["batch_size"] in '
        ".batch(), or set batch_size=null to keep its own size."
    )


def build_input_pipeline(
    input: Input | Callable[..., Any],
    mode: str,
    place: WorkerPlace,
    *,
    params: Any = None,
    config: RunConfig | None = None,
    num_epochs: int | None = None,
) -> InputPipeline:
    """Call the input function and make its result this process's InputPipeline.

    Args:
      input: an Input, or the bare function (no batch_size, shard auto).
      mode: train, eval or infer.
      params: the Estimator's; used where the Input has none of its own.
      place: this process among those that train together; all call this with the same input.
      config: handed to the function as it is; in TRAIN its `gradient_accumulation` divides a replica's batch.
      num_epochs: passes over the examples; None: as many as the function makes.

    Raises:
      ValueError: the batch size does not divide (TRAIN), the function cannot be called or returned something else
        than data; the message names the function or the setting.
    """
    source = input if isinstance(input, Input) else Input(input)
    num_micro_batches = config.gradient_accumulation if config is not None and mode == "train" else 1
    _check_batch_size(source, mode, place, num_micro_batches)
    name = _describe(source.fn)

    def build(plan: Plan) -> tf.data.Dataset:
        result = _call(source, plan, mode, params, config, num_epochs)
        dataset = _passes(as_dataset(result, name, mode), source.fn, num_epochs)
        if source.options is not None:
            dataset = dataset.with_options(source.options)
        if source.batch_size is not None:
            # EVAL may hold any batches: all are counted right. In TRAIN the size is part of what is trained.
            setting, expected = f"{_BLOCKS[mode]}.batch_size={source.batch_size}", plan.batch_size
            is_dataset = isinstance(result, tf.data.Dataset)
            check_batches(
                dataset.element_spec, name, setting, expected if mode == "train" else None, is_dataset=is_dataset
            )
        return dataset

    service = source.service if mode == "train" else None
    if service is not None:
        sharded: ShardedInput | None = sharding.of_service(service, source.batch_size, place, build)
    else:
        sharded = sharding.choose(source.shard, source.batch_size, place, build)
    if sharded is None:
        raise ValueError(
            f"{_BLOCKS[mode]}.shard=input_fn leaves it to {name} to take its part of the data, but that reads neither "
            "input_context.input_pipeline_id nor num_input_pipelines. Read them, or use shard=examples."
        )
    given, division = sharded.dataset, sharded.division
    if source.first_batch_only:
        given = given.take(division.elements_per_step).cache().repeat()
    if isinstance(division, RoundRobin):
        division = dataclasses.replace(division, endless=int(given.cardinality()) == tf.data.INFINITE_CARDINALITY)
    dataset = given
    # Evaluation counts what each worker has, and adds it up at the end; workers of a coordinator take their own steps.
    if sharded.is_own and mode == "train" and place.collectives.num_workers > 1:
        dataset, division = sharding.train_division(sharded, given, place)
    elif place.num_workers > 1:
        if source.options is not None and source.options.deterministic is False and place.worker_index == 0:
            _log.warning(
                "%s.options.deterministic=false has no effect: the workers read the same batches, each its rows.",
                _BLOCKS[mode],
            )
        options = tf.data.Options()
        options.deterministic = True  # all workers see the same elements at the same place
        dataset = given.with_options(options)
    return InputPipeline(
        dataset,
        place.num_replicas,
        source.batch_size,
        sharded.shard,
        sharded.reason,
        division,
        num_micro_batches,
        num_epochs,
        given=given,
        name=name,
        seed=getattr(config, "seed", None),
        is_chief=place.worker_index == 0,
        num_pipelines=place.num_workers if sharded.is_own else 1,
        pipeline_index=place.worker_index if sharded.is_own else 0,
        service=service,
        prefetch=_device_prefetch(source.prefetch_to_device, place, config) if mode == "train" else None,
    )


def _device_prefetch(number: int | None, place: WorkerPlace, config: RunConfig | None) -> DevicePrefetch | None:
    """Return where batches are copied to before their steps: the device of the only replica, where that is a GPU."""
    if number is None:
        return None
    if place.total > 1:
        raise ValueError(
            f"input.train.prefetch_to_device={number} is for one replica, and there are {place}, which divide a batch. "
            "Leave it out, or use strategy=default or one_device."
        )
    device = step_device(getattr(config, "train_distribute", None))
    if "GPU" in device:
        return DevicePrefetch(device, number)
    _log.info("input.train.prefetch_to_device=%d has no effect: training runs on %s.", number, device)
    return None


def step_device(strategy: tf.distribute.Strategy | None) -> str:
    """Return the name of the device that the only replica computes its steps on."""
    if strategy is not None:
        return str(strategy.extended.worker_devices[0])
    gpus = tf.config.list_logical_devices("GPU")
    return str(gpus[0].name if gpus else "/device:CPU:0")


def _passes(dataset: tf.data.Dataset, fn: Any, num_epochs: int | None) -> tf.data.Dataset:
    """`num_epochs` passes over what one call of `fn` gave; as it is where nobody counts, or `fn` has done it."""
    if num_epochs is None or int(dataset.cardinality()) == 0:  # of nothing, any number of passes is nothing
        return dataset
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"train.max_epochs={num_epochs}: {_describe(fn)} gives data without end, of which nobody can count the "
            "passes. Leave out its repeat(); or let it take an argument num_epochs and end after so many; or set "
            "train.max_steps, and train.max_epochs=null."
        )
    return dataset if "num_epochs" in _declared(fn) else dataset.repeat(num_epochs)


def _call(source: Input, plan: Plan, mode: str, params: Any, config: Any, num_epochs: int | None) -> Any:
    """Calls the function with those of ARGUMENTS that it declares."""
    settings = {"batch_size": plan.batch_size, "shuffle_seed": source.shuffle_seed}
    given = {name: value for name, value in settings.items() if value is not None}
    values = copied_params(params if source.params is None else source.params, **given)
    offered = {"mode": mode, "params": values, "config": config, "input_context": plan.context}
    if num_epochs is not None or _must_be_given(source.fn, "num_epochs"):  # else its own default holds
        offered["num_epochs"] = num_epochs
    arguments = {name: offered[name] for name in _declared(source.fn) if name in offered}
    try:
        with user_code():
            return call_input_fn(lambda: source.fn(**arguments), _describe(source.fn), training=mode == "train")
    except Exception as error:
        with_what = ", ".join(arguments) or "nothing"
        error.add_note(f"in {_describe(source.fn)}, called for {_BLOCKS[mode]} with {with_what}")
        raise


def _must_be_given(fn: Callable[..., Any], name: str) -> bool:
    return name in _declared(fn) and inspect.signature(fn).parameters[name].default is inspect.Parameter.empty


def _declared(fn: Callable[..., Any]) -> list[str]:
    """Those of ARGUMENTS that `fn` takes by name; not those that a functools.partial already binds."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some builtins have none
        return []
    bound = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    free = [parameter for name, parameter in parameters.items() if name not in bound]
    by_name = {one.name for one in free if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in free)
    required = [
        one.name
        for one in free
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one.name not in by_name.intersection(ARGUMENTS)
    ]
    if required:
        raise ValueError(
            f"{_describe(fn)} needs {', '.join(map(repr, required))}. An input function is given, by name: "
            f"{', '.join(ARGUMENTS)}. Bind the rest with functools.partial, or take it from params."
        )
    # To one that takes anything, num_epochs may mean nothing: it is for those who say that they end.
    return [name for name in ARGUMENTS if name in by_name or (takes_all and name not in bound and name != "num_epochs")]


def _check_batch_size(source: Input, mode: str, place: WorkerPlace, num_micro_batches: int) -> None:
    size, total = source.batch_size, place.total * num_micro_batches
    if mode != "train" or size is None or size % total == 0:
        return
    below = size // total * total
    use = f"{below} or {below + total}" if below else f"{total}"
    over = str(place)
    if num_micro_batches > 1:
        over += f", {num_micro_batches} parts each (train.gradient_accumulation)"
    raise ValueError(f"{_BLOCKS[mode]}.batch_size={size} does not divide over {over}. Use {use}.")


def _describe(fn: Any) -> str:
    """The dotted name of a function, of the function in a partial, or of the class of a callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', None) or '?'}.{named.__qualname__}"
