"""Private properties of tf.data pipelines: their randomness, parallelism and buffers, and the time per element."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

# structure: see `timed`.
from tensorflow.python.data.util import structure

from runner.tf_private.random_ops import KERNEL_RANDOM

_SMALL_BYTES = 1 << 24
_UNKNOWN_ORDER = ("Parallel", "Service", "Snapshot")
"""Parts of the names of datasets whose order of elements may vary."""

_FROM_OUTSIDE = ("PyFunc", "ReadVariable", "Dequeue")
"""Parts of the types of operations whose values may change while a dataset is read."""


def stages(dataset: Any) -> list[Any]:
    """Return the dataset and all its input datasets, itself first, but not the datasets that its functions create.

    Private: `DatasetV2._inputs`, and `DatasetV1Adapter._dataset`, which wraps a dataset.

    Raises:
      AttributeError: they have moved.
    """
    found = []
    waiting = [dataset]
    while waiting:
        stage = waiting.pop()
        found.append(_without_adapter(stage))
        waiting += inputs_of(stage)
    return found


def inputs_of(dataset: Any) -> list[Any]:
    """Return the input datasets of a dataset: those of `stages`, but only one step up.

    Private: see `stages`.
    """
    return [_without_adapter(source) for source in _without_adapter(dataset)._inputs()]


def _without_adapter(dataset: Any) -> Any:
    """Return the dataset that a dataset of `tf.compat.v1.data` wraps; another one is returned as it is."""
    return getattr(dataset, "_dataset", dataset)


def without_state(dataset: Any) -> Any:
    """Mark a dataset whose iterators cannot be restored before their first element, and return it."""
    dataset.has_no_state = True
    return dataset


def has_state(dataset: Any) -> bool:
    """Report whether the state of an iterator over `dataset` can be restored: no stage is marked by `without_state`."""
    return not any(getattr(stage, "has_no_state", False) for stage in stages(dataset))


def external_state_policy(iterator: Any) -> tf.data.experimental.ExternalStatePolicy | None:
    """Return what the options of the iterator's dataset say about state that cannot be saved; None: nothing is known.

    Private: `OwnedIterator._dataset`. When it moves: None.
    """
    try:
        policy: Any = iterator._dataset.options().experimental_external_state_policy
    except AttributeError:
        return None
    return policy


def has_file_cache(dataset: Any) -> bool:
    """Report whether a stage of the dataset caches the elements in files.

    Private: `CacheDataset._filename`, a string scalar. When it moves: False.
    """
    try:
        for stage in stages(dataset):
            if type(stage).__name__ == "CacheDataset" and stage._filename.numpy():
                return True
    except AttributeError:
        pass
    return False


def shuffle_buffers(dataset: tf.data.Dataset) -> list[int]:
    """Return the buffer sizes of the dataset's shuffles, in elements; [] if unknown.

    Private: `_ShuffleDataset._buffer_size`.
    """
    try:
        random = [stage for stage in stages(dataset) if hasattr(stage, "_seed")]
        return [int(stage._buffer_size) for stage in random if hasattr(stage, "_buffer_size")]
    except (AttributeError, TypeError):
        return []


class Batching(NamedTuple):
    """The last stage of a pipeline that makes batches.

    Attributes:
      batch_size: examples of a full batch.
      drops_remainder: leaves out a batch that is not full.
      examples: number of examples that it is given; None: not known.
    """

    batch_size: int
    drops_remainder: bool
    examples: int | None


def batching(dataset: Any) -> Batching | None:
    """Return the stage that makes the batches of a dataset; None: there is none, or it is not known.

    Private: `_BatchDataset._batch_size` and `._drop_remainder`, scalars that `_ParallelBatchDataset` and
    `_PaddedBatchDataset` have, too. When they move: None; a message then says less.
    """
    try:
        batches = [stage for stage in stages(dataset) if hasattr(stage, "_drop_remainder")]
        if not batches:
            return None
        (examples_dataset,) = batches[0]._inputs()
        cardinality = int(examples_dataset.cardinality())
        drops = bool(tf.get_static_value(batches[0]._drop_remainder))
        examples = cardinality if cardinality >= 0 else None  # negative: unknown or infinite
        return Batching(int(batches[0]._batch_size), drops, examples)
    except (AttributeError, TypeError, ValueError):
        return None


def may_change_meanwhile(dataset: Any) -> bool:
    """Report whether the next element may depend on what this process does now, through a Python function or a
    variable; True if unknown.

    Private: see `why_not_repeatable`.
    """
    try:
        types = _types_in_functions(dataset)
    except (AttributeError, TypeError, tf.errors.OpError):
        return True
    for kind in types:
        if any(part in kind for part in _FROM_OUTSIDE):
            return True
    return False


def why_not_repeatable(dataset: tf.data.Dataset) -> str | None:
    """Return why another process with the same dataset might read other elements; None: it reads the same.

    If that cannot be found out, a reason is returned, too.

    Private: `_seed` and `_seed2` of random datasets; `_deterministic` of parallel ones, as passed to the operation;
    `_functions`. When they move: the answer is always "unknown".
    """
    try:
        all_stages = stages(dataset)
        if dataset.options().deterministic is False:
            return "its options say deterministic=False"
        for stage in all_stages:
            reason = _why_stage_not_repeatable(stage)
            if reason is not None:
                return reason
        return None
    except (AttributeError, TypeError, tf.errors.OpError) as error:
        return f"it is not known whether it draws random numbers ({error})"


def why_in_no_order(dataset: tf.data.Dataset) -> str | None:
    """Return why two processes are sure to read the elements of `dataset` in different orders; None: they may read them
    in one.

    Private: see `why_not_repeatable`. When it moves: None.
    """
    with contextlib.suppress(AttributeError, TypeError, tf.errors.OpError):
        for stage in stages(dataset):
            if getattr(stage, "_deterministic", None) == "false":
                return f"{_name_of(stage)} has deterministic=False"
    return why_without_a_seed(dataset)


def why_without_a_seed(dataset: tf.data.Dataset) -> str | None:
    """Return which random stage of `dataset` draws other numbers in each process; None: none is known.

    Private: see `why_not_repeatable`. When it moves: None.
    """
    with contextlib.suppress(AttributeError, TypeError, tf.errors.OpError):
        for stage in stages(dataset):
            if hasattr(stage, "_seed") and not _is_seeded(stage):
                return f"{_name_of(stage)} has no seed"
    return None


def may_draw_values(dataset: tf.data.Dataset) -> bool:
    """Report whether a function of `dataset` draws random numbers, or calls Python, which may do so; True if unknown.

    Private: see `why_not_repeatable`.
    """
    try:
        types = _types_in_functions(dataset)
    except (AttributeError, TypeError, tf.errors.OpError):
        return True
    for kind in types:
        if kind in KERNEL_RANDOM or "PyFunc" in kind or kind.startswith("StatelessRandom"):
            return True
    return False


def _why_stage_not_repeatable(stage: Any) -> str | None:
    """Return why one stage of a dataset might give other elements in another process; None: it gives the same."""
    name = _name_of(stage)
    is_random = hasattr(stage, "_seed")
    if is_random and not _is_seeded(stage):
        return f"{name} has no seed"
    if not is_random and ("Shuffle" in name or "Random" in name):
        return f"the seed of {name} is not known"
    order = getattr(stage, "_deterministic", None)
    if order is None and any(word in name for word in _UNKNOWN_ORDER):
        order = _order_in_graph(stage)
    if order not in (None, "default", "true"):
        return f"{name} has deterministic={order}"
    drawing: set[str] = set()
    for body in _bodies(stage):
        drawing.update(node.op for node in body.values() if _may_draw(node, body))
    if drawing:
        return f"a function of {name} has {', '.join(sorted(drawing))}"
    return None


def _name_of(stage: Any) -> str:
    """Return the name of a dataset's class as in the documentation: Shuffle, ParallelMap."""
    return type(stage).__name__.strip("_").removesuffix("Dataset")


def _is_seeded(stage: Any) -> bool:
    """Report whether a random dataset has a seed; with two zeros, it draws one itself."""
    return bool(int(stage._seed) or int(stage._seed2))


def _order_in_graph(stage: Any) -> str:
    """Return the `deterministic` attribute of a dataset whose Python object does not keep it.

    It is read from the dataset's graph: "true" (also if that says "default") or "false". "unknown" if no part of the
    graph has the attribute, and for large data: the graph contains the data, so it is not made then.
    """
    leaves = [leaf for leaf in stages(stage) if not leaf._inputs()]
    if sum(map(_bytes_in_memory, leaves)) > _SMALL_BYTES:
        return "unknown"
    variant = tf.nest.flatten(stage, expand_composites=True)[0]
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant)
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    orders: list[str] = [node.attr["deterministic"].s.decode() for node in graph.node if "deterministic" in node.attr]
    if not orders:
        return "unknown"
    for order in orders:
        if order not in ("default", "true"):
            return order
    return "true"


def _bytes_in_memory(leaf: tf.data.Dataset) -> int:
    """Return an estimate of the bytes of a dataset without inputs; a string counts as a path, an unknown size as 1."""
    specs = tf.nest.flatten(leaf.element_spec, expand_composites=True)
    number = int(leaf.cardinality())
    row = sum(map(_bytes_of, specs))
    return max(number, 0) * row


def _bytes_of(spec: Any) -> int:
    size: int = 256 if spec.dtype == tf.string else spec.dtype.size or 0
    num_elements: int = spec.shape.num_elements() or 1
    return size * num_elements


def _types_in_functions(dataset: Any) -> set[str]:
    """Return the types of the operations in the functions of all stages of a dataset."""
    types = set[str]()
    for stage in stages(dataset):
        for body in _bodies(stage):
            types.update(node.op for node in body.values())
    return types


def _bodies(stage: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the NodeDefs, by name, of each function of a dataset, and of those that they call."""
    for wrapper in stage._functions():
        graph = wrapper.function.graph.as_graph_def()
        yield {node.name: node for node in graph.node}
        for function in graph.library.function:
            yield {node.name: node for node in function.node_def}


def _may_draw(node: Any, body: Mapping[str, Any]) -> bool:
    """Report whether a node keeps a random state, or makes a dataset that may give other elements each time."""
    if node.op in KERNEL_RANDOM:
        return True
    if "Dataset" not in node.op:
        return False
    is_random = "Shuffle" in node.op or "Random" in node.op
    if is_random and not _has_seed(node, body):
        return True
    # `in` first: reading an attribute of a NodeDef that is not there adds it.
    if "sloppy" in node.attr and node.attr["sloppy"].b:
        return True
    return "deterministic" in node.attr and node.attr["deterministic"].s not in (b"default", b"true")


def _has_seed(node: Any, body: Mapping[str, Any]) -> bool:
    """Report whether a node of `body` shuffles by seeds that are known not to be two zeros.

    With two zeros tf.data draws a seed itself. A seed that a user gives comes from a Select that replaces two zeros.
    """
    if node.op not in ("ShuffleDataset", "ShuffleDatasetV3"):
        return False
    for name in node.input[2:4]:  # after the dataset and the buffer's size
        seed = body.get(name.partition(":")[0])
        if seed is None:
            continue
        if seed.op == "SelectV2":
            return True
        if seed.op == "Const" and tf.make_ndarray(seed.attr["value"].tensor) != 0:
            return True
    return False


def timed(iterator: tf.data.Iterator, secs: tf.Variable) -> tf.data.Dataset:
    """Return a dataset of the elements of `iterator`, which adds the seconds that each element took to `secs`.

    `secs` is a float scalar. An element is fetched only when it is requested.

    Private: `structure.to_tensor_list`, which flattens an element to the tensors of tf.data. When it moves:
    `Dataset.map` over `get_next_as_optional()`, `take_while` and `map`, which cost 220 us per element instead of 40
    (TensorFlow 2.21), because functions of `Dataset.map` run in other threads and fail at the end of the data.
    """
    spec = iterator.element_spec

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def pull(number: tf.Tensor) -> list[tf.Tensor]:
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            element = structure.to_tensor_list(spec, iterator.get_next())
        with tf.control_dependencies(element):
            took = tf.timestamp() - began
        with tf.control_dependencies([secs.assign_add(took, read_value=False)]):
            return [tf.identity(tensor) for tensor in element]

    variant = map_in_caller(tf.data.Dataset.range(tf.int64.max), pull)
    return tf.data.experimental.from_variant(variant, spec).with_options(as_it_is())


def map_in_caller(dataset: tf.data.Dataset, function: Any) -> tf.Tensor:
    """Return the variant of a dataset like `dataset.map(function)` that runs the function in the thread of the caller.

    There its operations run one after the other, a `get_next` of another iterator is a plain call, and the end of that
    iterator ends this dataset. With `Dataset.map` each operation goes through TensorFlow's thread pool (220 us per
    element instead of 40), and the end is an error.

    Args:
      dataset: the input.
      function: a tf.function with an input signature: an element of `dataset` -> list of tensors.
    """
    concrete = function.get_concrete_function()
    return tf.raw_ops.MapDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=concrete.captured_inputs,
        f=concrete,
        output_types=[output.dtype for output in concrete.outputs],
        output_shapes=[output.shape for output in concrete.outputs],
        use_inter_op_parallelism=False,  # run in the thread of the caller
        preserve_cardinality=False,  # the data may end early
    )


def as_it_is() -> tf.data.Options:
    """Return options with which TensorFlow neither tunes a dataset nor adds stages to it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    return options
