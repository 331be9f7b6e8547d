"""Distribution: a worker's devices, sharding a dataset by files, the number of replicas in a trace, collectives, and
whether the process can fork.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

# _AutoShardDataset: see `part_of_files`.
from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

# values, values_util: see `writes_of_replicas`.
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.distribute import values_util

# CollectiveAllReduceExtended: see `cpus_of_worker`.
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from runner.tf_private.replaced import all_replaced, replaced


def replicas_in_sync(count: int) -> contextlib.AbstractContextManager[None]:
    """Make the default strategy and its replica context report `count` replicas inside this context.

    Private: `_num_replicas_in_sync` of the default strategy's extended object, a property of its class. When it moves:
    discover variables under the real strategy.
    """
    return replaced(type(tf.distribute.get_strategy().extended), "_num_replicas_in_sync", property(lambda self: count))


_FRAMEWORKS = ("keras", "tensorflow", "tf_keras")


def strategy_seen(is_there: bool) -> contextlib.AbstractContextManager[None]:
    """If `is_there`, make `tf.distribute.has_strategy()` return True to user code under the default strategy, inside
    this context.

    TensorFlow and Keras still get the true answer: after True they would call methods of a strategy that is not there.

    Private: none; the function is replaced in the public modules, where user code looks it up.
    """
    if not is_there:
        return contextlib.nullcontext()
    has_real_strategy = tf.distribute.has_strategy

    def has_strategy() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        is_user_code = caller.partition(".")[0] not in _FRAMEWORKS
        return bool(has_real_strategy()) or is_user_code

    modules = (tf.distribute, tf.compat.v1.distribute, tf.compat.v2.distribute)
    return all_replaced(*((module, "has_strategy", has_strategy) for module in modules))


def cpus_of_worker(count: int) -> contextlib.AbstractContextManager[None]:
    """Give a MultiWorkerMirroredStrategy that is built inside this context `count` replicas per process, on logical
    CPUs, if there is no GPU. TensorFlow itself uses only the first CPU.

    Private: `CollectiveAllReduceExtended._initialize_local_devices`, which lists the devices. When it moves: refuse
    strategy.virtual_devices with strategy=multi_worker.
    """
    original = CollectiveAllReduceExtended._initialize_local_devices

    def devices(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        found, kind = original(self, cluster_resolver, worker_device)
        if kind != "CPU":
            return found, kind
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(count)), kind

    return replaced(CollectiveAllReduceExtended, "_initialize_local_devices", devices)


LARGEST_SENT = 1 << 30
"""Largest size in bytes of an initial value that the chief sends to the other workers."""


def own_initial_values(strategy: tf.distribute.Strategy, size: int) -> contextlib.AbstractContextManager[None]:
    """Let each worker compute the initial value of a variable of `size` bytes itself, if that is too large to be sent.

    A MultiWorkerMirroredStrategy gives all workers the chief's, by a broadcast that fails with more than 2 GB
    (TensorFlow 2.21: "RecvBufResponse returned 0 bytes"). Ours depend on the seed and the name, so they are equal.

    Private: `CollectiveAllReduceExtended._num_workers`, by which it decides whether there is anybody to send to. When
    it moves: the values are sent, and larger variables fail.
    """
    is_sent = size <= LARGEST_SENT or not hasattr(strategy.extended, "_num_workers")
    if is_sent:
        return contextlib.nullcontext()
    return replaced(strategy.extended, "_num_workers", 1)


def num_files(dataset: tf.data.Dataset) -> int:
    """Return the number of files that `dataset` reads, or that its source with the fewest files reads; 0 if
    `part_of_files` cannot shard a source.

    Private: `Dataset._inputs`, and `_filenames` of the datasets that read files. When they move: return 0; then only
    input functions can shard by files.
    """
    count = _num_files(dataset)
    try:
        if count:
            part_of_files(dataset, 2, 0)  # TensorFlow checks nothing for a single part
    except tf.errors.NotFoundError:  # "unshardable source dataset": e.g. file names that a function reads
        return 0
    return count


def _num_files(dataset: tf.data.Dataset) -> int:
    """Return the number of files that a dataset reads, or that its source with the fewest files reads. A dataset of
    strings counts as one of file names, which another stage may read: whether one does, `num_files` finds out.
    """
    inputs = dataset._inputs()
    if inputs:
        return min(_num_files(source) for source in inputs)
    names = getattr(dataset, "_filenames", None)
    if isinstance(names, tf.data.Dataset):
        return int(names.cardinality())
    if names is not None:
        return int(tf.size(names))
    may_be_names = dataset.element_spec == tf.TensorSpec([], tf.string)
    if not may_be_names:
        return 0
    return max(0, int(dataset.cardinality()))  # an unknown or infinite number is negative


def part_of_files(dataset: tf.data.Dataset, num_workers: int, worker_index: int) -> tf.data.Dataset:
    """Return `dataset` reading only every `num_workers`-th file, like distribute_dataset with AutoShardPolicy.FILE.

    TensorFlow rewrites the dataset: it inserts a shard before the reader, wherever that is, and keeps shuffles and
    maps. It only notices too few files when the dataset is read, hence `num_files`.

    Raises:
      tf.errors.NotFoundError: a source does not read files.

    Private: `_AutoShardDataset`. When it moves: as for `num_files`.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return _AutoShardDataset(dataset.with_options(options), num_workers, worker_index)


def chosen_cross_device_ops(strategy: tf.distribute.Strategy) -> tf.distribute.CrossDeviceOps | None:
    """Return the CrossDeviceOps that a MirroredStrategy was given; None: TensorFlow chose them.

    Private: `extended._cross_device_ops`, which has no public name. When it moves: return None;
    strategy.cross_device_ops then has no effect on CPUs.
    """
    return getattr(strategy.extended, "_cross_device_ops", None)


def writes_of_replicas(
    merge: Callable[[Any, Any, Callable[[], Any]], Any], writes_its_own: Callable[[Any], bool]
) -> contextlib.AbstractContextManager[None]:
    """Decide inside this context what a variable gets that several replicas write to.

    Args:
      merge: (values of the local replicas, the variable, what TensorFlow would do) -> what is written to all copies.
      writes_its_own: value -> whether each replica writes it to its own copy, at once.

    Private: `values_util.apply_aggregation`, which makes one value of many in cross-replica context, and
    `values._on_write_update_replica`, by which a replica writes. When they move: see what `MirroredVariable.assign`
    calls in replica context.
    """
    aggregate = values_util.apply_aggregation
    update = distributed_values._on_write_update_replica

    def merged(strategy: Any, value: Any, aggregation: Any, destinations: Any) -> Any:
        own = functools.partial(aggregate, strategy, value, aggregation, destinations)
        return merge(value, destinations, own)

    def write(variable: Any, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if writes_its_own(value):
            return update_fn(variable._get_on_device_or_primary(), value, **kwargs)
        return update(variable, update_fn, value, **kwargs)

    return all_replaced(
        (values_util, "apply_aggregation", merged), (distributed_values, "_on_write_update_replica", write)
    )


_KEYS_OF_A_SIZE = 1 << 24
"""Number of instance keys (int32) of the collectives of one size: see `Collectives.gather`."""


class Collectives(NamedTuple):
    """What one replica of this process sends to all replicas and receives from them.

    Attributes:
      gather: (vector, CommunicationOptions, number or None) -> the vectors of all replicas, in their order. They must
        give vectors of one size. A collective in a loop keeps the size of its first step (TensorFlow 2.21), so each
        size must be another collective: the number, below 127, tells sizes apart. None: all steps have one size.
      all_reduce: (tensor, None, CommunicationOptions) -> the sum over all replicas, of the same shape in each step.
      in_packs: gradients are sent in several messages, of strategy.bytes_per_pack.
    """

    gather: Callable[..., tf.Tensor]
    all_reduce: Callable[..., tf.Tensor]
    in_packs: bool


def collectives(strategy: tf.distribute.Strategy) -> list[Collectives]:
    """Return the collectives of each replica of this process. Empty unless the replicas are on CPUs of several
    processes.

    Private: the launchers of a MultiWorkerMirroredStrategy's collectives, their `_all_gather`, `all_reduce`, `_options`
    and `_next_instance_key`, by which the processes find each other. The public `ReplicaContext.all_gather` gathers the
    lengths first. When they move: return []; sparse gradients then travel dense, and sums take one more message.
    """
    launchers: Any = getattr(getattr(strategy.extended, "_cross_device_ops", None), "_launchers", ())
    names = ("_all_gather", "all_reduce", "_options", "_next_instance_key")
    for launcher in launchers:
        if not all(hasattr(launcher, name) for name in names):
            return []
    if not all("CPU" in device for device in strategy.extended.worker_devices):
        return []

    def gather(launcher: Any, vector: tf.Tensor, options: Any, size: tf.Tensor | None = None) -> tf.Tensor:
        key = launcher._next_instance_key()
        if size is not None:
            # Each size has a range of keys of its own; the first range is that of collectives without a size.
            key = key % _KEYS_OF_A_SIZE + _KEYS_OF_A_SIZE * (1 + tf.cast(size, tf.int32))
        with replaced(launcher, "_next_instance_key", lambda: key):
            return launcher._all_gather(vector, options)

    found = []
    for launcher in launchers:
        in_packs = bool(launcher._options.bytes_per_pack)
        found.append(Collectives(functools.partial(gather, launcher), launcher.all_reduce, in_packs))
    return found


def is_unused() -> bool:
    """Report whether TensorFlow is imported, but no operation has run and no device was initialized; False if unknown.

    Once it was used, its threads make the process unsafe to fork.

    Private: `context._context`, which is None or notes in `_initialized` that it has devices and threads. The public
    names (tf.executing_eagerly, tf.config) create the context. When it moves: nothing is forked, and each task imports
    TensorFlow itself.
    """
    try:
        context = sys.modules["tensorflow.python.eager.context"]._context
        return context is None or not context._initialized
    except (KeyError, AttributeError):
        return False
