"""`tf.train.batch`, `slice_input_producer` and their like: the queues of TensorFlow 1, as datasets.

In TensorFlow 1, threads of queue runners filled queues, and each step took a batch from the last of them. Here a queue
is the dataset of its elements in their order, and what an input function computes between two queues is the function of
a `Dataset.map`. So such an input has an end, can be divided over workers, and has a position that checkpoints hold.
Only one thread reads: the order is that of `num_threads=1`.

These functions serve an input function while it is called. In a graph of the user's own TensorFlow's functions do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.data.dataset_adapter import InputGraph, Taken, input_graph

v1 = tf.compat.v1

_PHILOX = 1
"""The number of the algorithm that TensorFlow's kernels draw with."""

_DEFAULT_GRAPH_SEED = 87654321
"""The seed of a TensorFlow 1 graph for operations with a seed of their own."""


class Queue:
    """A queue as the dataset of its elements. Each element goes to one of the calls that take from the queue.

    If an input function takes in several places, these get the elements in turn. In TensorFlow 1 their threads took
    elements as they came.

    Args:
      graph: the graph of the input function.
      spec: TensorSpecs of an element.
      elements: returns the dataset of all elements; it must be the same at each call.
      sources: what `elements` is computed from.
    """

    name = "queue"

    def __init__(
        self,
        graph: InputGraph,
        spec: Any,
        elements: Callable[[], tf.data.Dataset],
        sources: Sequence[Taken] = (),
    ) -> None:
        self._graph = graph
        self.spec = spec
        self._elements = elements
        self._sources = sources
        self._takers: list[Taken] = []

    @property
    def dtypes(self) -> list[tf.DType]:
        return [spec.dtype for spec in tf.nest.flatten(self.spec)]

    @property
    def shapes(self) -> list[tf.TensorShape]:
        return [spec.shape for spec in tf.nest.flatten(self.spec)]

    def dequeue(self, name: str | None = None) -> Any:
        """Return the next element."""
        return self.take(self.spec, lambda elements: elements)

    def dequeue_many(self, n: int, name: str | None = None) -> Any:
        """Return the next `n` elements, `[n, ...]`; the data ends where there are fewer."""
        spec = tf.nest.map_structure(functools.partial(_batch_spec, n), self.spec)
        return self.take(spec, lambda elements: elements.batch(n, drop_remainder=True))

    def dequeue_up_to(self, n: int, name: str | None = None) -> Any:
        """Return the next `n` elements, or at the end of the data those that are left."""
        spec = tf.nest.map_structure(functools.partial(_batch_spec, None), self.spec)
        return self.take(spec, lambda elements: elements.batch(n))

    def take(self, spec: Any, transform: Callable[[tf.data.Dataset], tf.data.Dataset]) -> Any:
        """Return an element of the dataset that `transform` makes of the elements that fall to this call.

        This call gets every k-th element, if k calls take elements that are used. How many do is known only when the
        dataset is built, after the input function has returned.
        """
        taker_index = len(self._takers)

        def dataset() -> tf.data.Dataset:
            used_takers = [index for index, taker in enumerate(self._takers) if taker.is_used]
            elements = self._elements()
            if len(used_takers) > 1:
                elements = elements.shard(len(used_takers), used_takers.index(taker_index))
            return transform(elements)

        element = self._graph.take(spec, dataset, self._sources)
        self._takers.append(self._graph.taken[-1])
        return element


# --- producers --------------------------------------------------------------------------------------------------------
#
# `given` is name -> value, for all arguments of the function of tf.train. Arguments about queues and threads, such as
# `capacity`, are ignored.

Given = Mapping[str, Any]


def input_producer(given: Given) -> Queue:
    """Return a queue of the rows of `input_tensor`, `num_epochs` times, each time in another order if `shuffle`.

    Raises:
      ValueError: the shape of a row is not known, or num_epochs is not positive.
    """
    input_graph()
    return _rows(_as_tensor(given["input_tensor"]), given["element_shape"], given)


def string_input_producer(given: Given) -> Queue:
    """Return a queue of `string_tensor`, usually names of files, like `input_producer`.

    Raises:
      ValueError: there are no strings.
      tf.errors.InvalidArgumentError: there are none in a tensor.
    """
    strings = given["string_tensor"]
    if not tf.is_tensor(strings) and not len(strings):
        raise ValueError(f"{_NO_STRINGS}. Give the names of the files.")
    input_graph()
    strings = _as_tensor(strings, tf.string)
    # Without an end of the epochs, a step would wait for ever.
    number = strings.shape.num_elements()
    if number == 0:
        raise tf.errors.InvalidArgumentError(None, None, f"{_NO_STRINGS}: does a pattern match no files?")
    if number is None:  # check at run time only then: an input with an assertion has no position that can be saved
        with tf.control_dependencies([tf.debugging.Assert(tf.size(strings) > 0, [_NO_STRINGS])]):
            strings = tf.identity(strings)
    return _rows(strings, [], given)


def range_input_producer(given: Given) -> Queue:
    """Return a queue of the integers below `limit`, like `input_producer`."""
    input_graph()
    return _rows(tf.range(given["limit"]), [], given)


def slice_input_producer(given: Given) -> list[tf.Tensor]:
    """Return a row of each tensor of `tensor_list`, the same row of all, like `input_producer`.

    Raises:
      ValueError: there are no tensors.
    """
    if not len(given["tensor_list"]):
        raise ValueError("slice_input_producer: there are no tensors. Give at least one.")
    input_graph()
    tensors = [_as_tensor(tensor) for tensor in given["tensor_list"]]
    row_numbers = tf.range(tf.shape(tensors[0])[0])
    row_number = _rows(row_numbers, [], given).dequeue()
    return [tf.gather(tensor, row_number) for tensor in tensors]


def limit_epochs(given: Given) -> tf.Tensor:
    """Return `tensor`, which can be computed `num_epochs` times, after which the data ends; None: always.

    Raises:
      ValueError: num_epochs is not positive.
    """
    tensor = given["tensor"]
    num_epochs = given["num_epochs"]
    if num_epochs is None:
        return tensor
    _check_epochs(num_epochs)
    graph = input_graph()
    epoch = graph.take(tf.TensorSpec([], tf.int64), lambda: tf.data.Dataset.range(num_epochs))
    with tf.control_dependencies([tf.identity(epoch)]):
        return tf.identity(tensor)


def match_filenames_once(given: Given) -> tf.Tensor:
    """Return the sorted names of the files that match `pattern`, which may be a list of several."""
    with tf.init_scope():
        return tf.io.matching_files(given["pattern"])


def start_queue_runners(given: Given) -> list[Any]:
    """Return an empty list: there are no threads to start."""
    del given
    return []


_NO_STRINGS = "string_input_producer: there are no strings"


def _rows(tensor: tf.Tensor, element_shape: Any, given: Given) -> Queue:
    """Return a queue of the rows of `tensor`: all rows of the first epoch, then those of the next.

    The tensor is computed anew for each epoch, as by the enqueue operation of TensorFlow 1. `given` has `num_epochs`,
    `shuffle` and `seed`.
    """
    graph = input_graph()
    shape = tensor.shape[1:].merge_with(element_shape)
    if not shape.is_fully_defined():
        raise ValueError(
            f"input_producer: the shape of a row of {tensor!r} is {shape}. Give element_shape, or a tensor whose "
            "shape is known."
        )
    num_epochs = given["num_epochs"]
    _check_epochs(num_epochs)
    sources = graph.sources(tensor)
    seeds: tuple[int, int] | None = None
    if given["shuffle"]:
        seeds = _seeds(graph, given["seed"])

    @tf.autograph.experimental.do_not_convert
    def rows_of_epoch(epoch: tf.Tensor, tensors: Any) -> tf.data.Dataset:
        (rows,) = tensors
        order = tf.range(tf.shape(rows, tf.int64)[0])
        if seeds is not None:
            order = _order(rows, epoch, seeds)
        return tf.data.Dataset.from_tensor_slices(order).map(lambda row: tf.gather(rows, row))

    def elements() -> tf.data.Dataset:
        epochs = graph.computed((tensor,), sources).enumerate()
        if num_epochs is None:
            return epochs.flat_map(rows_of_epoch).apply(_with_cardinality(tf.data.INFINITE_CARDINALITY))
        dataset = epochs.take(num_epochs).flat_map(rows_of_epoch)
        num_rows = tensor.shape[0]
        # What the tensor is computed from may end before `num_epochs`.
        is_size_known = num_rows is not None and not sources
        return dataset.apply(_with_cardinality(num_rows * num_epochs)) if is_size_known else dataset

    return Queue(graph, tf.TensorSpec(shape, tensor.dtype), elements, sources)


_with_cardinality = tf.data.experimental.assert_cardinality


def _check_epochs(num_epochs: int | None) -> None:
    if num_epochs is not None and num_epochs <= 0:
        raise ValueError(f"num_epochs={num_epochs} must be positive, or None for no end.")


def _as_tensor(value: Any, dtype: tf.DType | None = None) -> Any:
    """Return a value as a tensor, if it is no sparse one; an array is not copied into the graph."""
    if isinstance(value, tf.SparseTensor):
        return value
    if tf.is_tensor(value):
        return tf.convert_to_tensor(value, dtype)
    with tf.init_scope():
        return tf.convert_to_tensor(value, dtype)


def _seeds(graph: InputGraph, seed: int | None) -> tuple[int, int]:
    """Return the two seeds of a shuffle in a TensorFlow 1 graph; without a seed those of a new operation here."""
    if seed is None:
        with tf.init_scope():
            graph_seed, seed = v1.random.get_seed(None)
        return graph_seed or 0, seed or 0
    if graph.seed is None:
        return _DEFAULT_GRAPH_SEED, seed
    return graph.seed, seed


def _order(rows: tf.Tensor, epoch: tf.Tensor, seeds: tuple[int, int]) -> tf.Tensor:
    """Return the numbers of rows in the order of `tf.random_shuffle` at its run number `epoch` in a session.

    The algorithm is that of TensorFlow's kernel (core/kernels/random_shuffle_op.cc): Fisher and Yates's, with numbers
    of Philox. The kernel keeps its generator; here it is computed from the epoch, so that a resumed run goes on with
    the same order.
    """
    size = tf.shape(rows, tf.int64)[0]
    last = tf.maximum(size - 1, 0)
    num_swaps = tf.cast(last, tf.int32)
    # Each earlier epoch drew `last` numbers, and Philox makes groups of four: the rest of its last group was not used.
    num_groups_before = epoch * ((last + 3) // 4)
    key = tf.constant([seeds[0] % 2**64], tf.uint64)
    second_seed = tf.constant(seeds[1] % 2**64, tf.uint64)
    counter = tf.stack([tf.cast(num_groups_before, tf.uint64), second_seed])
    random_numbers = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.expand_dims(last, 0), key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )
    indices = tf.range(last)
    swapped_with = tf.cast(indices + tf.cast(random_numbers, tf.int64) % (size - indices), tf.int32)
    order = tf.TensorArray(tf.int64, num_swaps + 1, dynamic_size=True, clear_after_read=False)
    order = order.unstack(tf.range(size))

    def swap(index: tf.Tensor, order: tf.TensorArray) -> Any:
        value = order.read(index)
        order = order.write(index, order.read(swapped_with[index]))
        return index + 1, order.write(swapped_with[index], value)

    _, order = tf.while_loop(lambda index, _: index < num_swaps, swap, (tf.constant(0), order), parallel_iterations=1)
    return order.stack()


# --- readers ----------------------------------------------------------------------------------------------------------


class Reader:
    """Reads the records of the files whose names a queue holds.

    Args:
      records: returns the dataset of (key, record) of a file, for its name.
    """

    supports_serialize = False

    def __init__(self, records: Callable[[tf.Tensor], tf.data.Dataset]) -> None:
        self._records = records
        self._queues: dict[tuple[int, int | None], Queue] = {}

    def read(self, queue: Queue, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next record as (key, record), two scalar strings."""
        return self._records_of(queue, None).dequeue()

    def read_up_to(self, queue: Queue, num_records: int, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next records of a file, at most `num_records`, as (keys, records)."""
        return self._records_of(queue, _static("read_up_to", "num_records", num_records)).dequeue()

    def _records_of(self, files: Queue, num_records: int | None) -> Queue:
        """Return the queue of the records of `files`; with `num_records`, of batches of so many of one file."""
        if not isinstance(files, Queue):
            raise ValueError(
                f"{files!r} is no queue that the runner knows: give a reader what string_input_producer returns, or "
                "return a tf.data.Dataset."
            )
        # All calls of `read` with the same files share one queue, so that each record is read once.
        key = (id(files), num_records)
        if key not in self._queues:
            self._queues[key] = self._make_queue(files, num_records)
        return self._queues[key]

    def _make_queue(self, files: Queue, num_records: int | None) -> Queue:
        """Return a new queue as `_records_of` does. This takes the names from the queue `files`."""
        graph = input_graph()
        (names,) = graph.sources(files.dequeue())

        @tf.autograph.experimental.do_not_convert
        def records_of_file(name: tf.Tensor) -> tf.data.Dataset:
            records = self._records(name)
            return records if num_records is None else records.batch(num_records)

        record = tf.TensorSpec([], tf.string)
        if num_records is not None:
            record = _batch_spec(None, record)
        return Queue(graph, (record, record), lambda: names.dataset().flat_map(records_of_file), [names])


def text_line_reader(given: Given) -> Reader:
    """Return a reader of the lines of text files, like `tf.TextLineReader`."""
    num_skipped = given["skip_header_lines"] or 0

    def records(file: tf.Tensor) -> tf.data.Dataset:
        lines = tf.data.TextLineDataset(file).enumerate(1).skip(num_skipped)
        return lines.map(lambda number, line: (_key(file, number), line))

    return Reader(records)


def tf_record_reader(given: Given) -> Reader:
    """Return a reader of TFRecords, like `tf.TFRecordReader`."""
    compression: str | None = None
    if given["options"] is not None:
        compression = v1.io.TFRecordOptions.get_compression_type_string(given["options"])

    def with_offset(offset: tf.Tensor, record: tf.Tensor) -> Any:
        # A record is stored with its length, 8 bytes, and two checksums of 4.
        size = 16 + tf.cast(tf.strings.length(record), tf.int64)
        return offset + size, (offset, record)

    def records(file: tf.Tensor) -> tf.data.Dataset:
        offsets_and_records = tf.data.TFRecordDataset(file, compression).scan(tf.constant(0, tf.int64), with_offset)
        return offsets_and_records.map(lambda offset, record: (_key(file, offset), record))

    return Reader(records)


def whole_file_reader(given: Given) -> Reader:
    """Return a reader whose records are whole files, like `tf.WholeFileReader`."""
    del given

    def records(file: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(file).map(lambda name: (name, tf.io.read_file(name)))

    return Reader(records)


def identity_reader(given: Given) -> Reader:
    """Return a reader whose records are the elements of the queue, like `tf.IdentityReader`."""
    del given
    return Reader(lambda element: tf.data.Dataset.from_tensors((element, element)))


def fixed_length_record_reader(given: Given) -> Reader:
    """Return a reader of records of one length, which begin every `hop_bytes`, like `tf.FixedLengthRecordReader`."""
    size = given["record_bytes"]
    header = given["header_bytes"] or 0
    footer = given["footer_bytes"] or 0
    hop = given["hop_bytes"] or size

    def records(file: tf.Tensor) -> tf.data.Dataset:
        content = tf.io.read_file(file)
        if given["encoding"]:
            content = tf.io.decode_compressed(content, given["encoding"])
        last_start = tf.cast(tf.strings.length(content), tf.int64) - header - footer - size
        num_records = tf.where(last_start < 0, tf.constant(0, tf.int64), last_start // hop + 1)

        def record(index: tf.Tensor) -> Any:
            return _key(file, index), tf.strings.substr(content, header + index * hop, size)

        return tf.data.Dataset.range(num_records).map(record)

    return Reader(records)


def _key(file: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    return tf.strings.join([file, ":", tf.strings.as_string(number)])


# --- batches ----------------------------------------------------------------------------------------------------------


def batches(function: str, given: Given) -> Any:
    """Return batches like one of `tf.train.batch`, `batch_join`, `shuffle_batch`, `shuffle_batch_join` and `maybe_...`.

    Args:
      function: its name.
      given: its arguments: name -> value.

    Returns:
      A tensor, list or dict of batches, in the form of the tensors of an example.

    Raises:
      ValueError: there are no tensors, their shapes are not known, or arguments contradict each other.
      TypeError: the lists of tensors have different types.
    """
    graph = input_graph()
    min_after_dequeue = given.get("min_after_dequeue")
    if min_after_dequeue is not None and given["capacity"] <= min_after_dequeue:
        raise ValueError(
            f"{function}: capacity={given['capacity']} must be greater than min_after_dequeue={min_after_dequeue}."
        )
    tensors_by_list = given.get("tensors_list")
    if tensors_by_list is None:
        tensors_by_list = [given["tensors"]]
    examples = _Examples(function, graph, tensors_by_list, given)
    size = _static(function, "batch_size", given["batch_size"])
    drops_remainder = not given["allow_smaller_final_batch"]

    def dataset() -> tf.data.Dataset:
        elements = examples.dataset()
        if min_after_dequeue is not None:  # only the functions that shuffle have min_after_dequeue
            elements = elements.shuffle(max(min_after_dequeue, 1), given["seed"])
        if given.get("dynamic_pad"):
            return elements.padded_batch(size, tuple(examples.shapes), drop_remainder=drops_remainder)
        return elements.batch(size, drop_remainder=drops_remainder)

    # A batch that may be smaller has no static size.
    batch = graph.take(examples.batch_spec(size if drops_remainder else None), dataset, examples.sources)
    if isinstance(tensors_by_list[0], Mapping):
        return dict(zip(sorted(tensors_by_list[0]), batch, strict=True))
    return batch[0] if len(batch) == 1 else list(batch)


class _Examples:
    """The examples that go into batches.

    Args:
      function: as in `batches`.
      graph: the graph of the input function.
      tensors_by_list: lists or dicts, each with the tensors of an example, or of several examples if `enqueue_many`.
        Examples come from each of the lists in turn.
      given: as in `batches`.

    Attributes:
      shapes: shapes of the tensors of an example.
    """

    def __init__(self, function: str, graph: InputGraph, tensors_by_list: Sequence[Any], given: Given) -> None:
        self._function = function
        self._graph = graph
        self._given = given
        self._lists = [_tensors(function, tensors) for tensors in tensors_by_list]
        if not self._lists:
            raise ValueError(f"{function}: there are no lists of tensors. Give at least one.")
        self._check_types()
        self._has_many_examples = given["enqueue_many"]
        self._keep = self._checked_keep_input(given.get("keep_input", True))
        self.shapes = self._common_shapes()
        self._sources = [graph.sources((tensors, self._keep)) for tensors in self._lists]

    @property
    def sources(self) -> list[Taken]:
        """What the examples of all lists are computed from."""
        sources: list[Taken] = []
        for of_list in self._sources:
            sources += of_list
        return sources

    def batch_spec(self, number: int | None) -> tuple[Any, ...]:
        """Return the specs of a batch of `number` examples; None: of any number."""
        specs = []
        for tensor, shape in zip(self._lists[0], self.shapes, strict=True):
            spec = _batch_spec(number, tf.TensorSpec(shape, tensor.dtype))
            if isinstance(tensor, tf.SparseTensor):
                spec = tf.SparseTensorSpec([None, *spec.shape[1:]], tensor.dtype)
            specs.append(spec)
        return tuple(specs)

    def dataset(self) -> tf.data.Dataset:
        """Return the dataset of examples, tuples of tensors."""
        datasets = list(map(self._examples_of_list, self._lists, self._sources))
        if len(datasets) == 1:
            return datasets[0]
        turns = tf.data.Dataset.range(len(datasets)).repeat()
        return tf.data.Dataset.choose_from_datasets(datasets, turns, stop_on_empty_dataset=False)

    def _check_types(self) -> None:
        first = [tensor.dtype for tensor in self._lists[0]]
        for tensors in self._lists[1:]:
            found = [tensor.dtype for tensor in tensors]
            if found != first:
                raise TypeError(f"{self._function}: the lists have tensors of different types: {first} and {found}.")

    def _checked_keep_input(self, keep_input: Any) -> tf.Tensor | None:
        """Return `keep_input` as a tensor; None: all examples are kept."""
        if keep_input is True:
            return None
        keep = _as_tensor(keep_input)
        ranks = (0, 1) if self._has_many_examples else (0,)
        if keep.shape.rank not in ranks:
            raise ValueError(
                f"{self._function}: keep_input has shape {keep.shape}. It must be a scalar, or a vector if "
                "enqueue_many=True."
            )
        return keep

    def _common_shapes(self) -> list[tf.TensorShape]:
        """Return the shape of each tensor of an example, which must fit the tensors of all lists.

        Raises:
          ValueError: the lists' shapes contradict each other, or a shape must be known and is not.
        """
        given = self._given["shapes"]
        if given is not None:
            return [tf.TensorShape(shape) for shape in given]
        shapes = []
        for tensors in zip(*self._lists, strict=True):
            shape = self._shape_of(tensors[0])
            for other in tensors[1:]:
                shape.merge_with(self._shape_of(other))  # called for its error, if the shapes contradict each other
                shape = shape.most_specific_compatible_shape(self._shape_of(other))
            self._check_known(tensors[0], shape)
            shapes.append(shape)
        return shapes

    def _shape_of(self, tensor: Any) -> tf.TensorShape:
        return tensor.shape.with_rank_at_least(1)[1:] if self._has_many_examples else tensor.shape

    def _check_known(self, tensor: Any, shape: tf.TensorShape) -> None:
        is_padded = self._given.get("dynamic_pad", False) and shape.rank is not None
        needs_no_shape = is_padded or isinstance(tensor, tf.SparseTensor)
        if not needs_no_shape and not shape.is_fully_defined():
            raise ValueError(
                f"{self._function}: the shape of {tensor.name} is {shape}, which is not fully known. Set it "
                "(tensor.set_shape), give shapes=, or use tf.train.batch(..., dynamic_pad=True)."
            )

    def _examples_of_list(self, tensors: Sequence[Any], sources: Sequence[Taken]) -> tf.data.Dataset:
        """Return the dataset of the kept examples of one list.

        Args:
          tensors: the tensors of the list.
          sources: what they are computed from.
        """
        num_threads = self._given.get("num_threads", 1)
        if self._keep is None:
            dataset = self._graph.computed((tuple(tensors),), sources, num_threads=num_threads)
            return (dataset.unbatch() if self._has_many_examples else dataset).map(self._with_shapes)
        dataset = self._graph.computed((tuple(tensors), self._keep), sources, num_threads=num_threads)
        if self._has_many_examples and self._keep.shape.rank == 1:  # keep_input has a value for each row
            return dataset.unbatch().filter(_is_kept).map(self._with_shapes)
        # One value of keep_input keeps or drops all rows, so filter before they are divided.
        dataset = dataset.filter(_is_kept).map(_without_flag)
        return (dataset.unbatch() if self._has_many_examples else dataset).map(self._with_shapes)

    @tf.autograph.experimental.do_not_convert
    def _with_shapes(self, example: Sequence[Any], *_: Any) -> tuple[Any, ...]:
        shaped = []
        for tensor, shape in zip(example, self.shapes, strict=True):
            is_known = isinstance(tensor, tf.SparseTensor) or tensor.shape.is_fully_defined()
            shaped.append(tensor if is_known else tf.ensure_shape(tensor, shape))
        return tuple(shaped)


def _is_kept(example: Any, is_kept: tf.Tensor) -> tf.Tensor:
    return is_kept


def _without_flag(example: Any, is_kept: tf.Tensor) -> tuple[Any]:
    return (example,)


def _tensors(function: str, tensors: Any) -> list[Any]:
    values = list(tensors)
    if isinstance(tensors, Mapping):
        values = [tensors[key] for key in sorted(tensors)]
    if not values:
        raise ValueError(f"{function}: there are no tensors. Give at least one.")
    return list(map(_as_tensor, values))


def _static(function: str, argument: str, value: Any) -> int:
    number = tf.get_static_value(value)
    if number is None:
        raise ValueError(f"{function}: {argument}={value!r} must be a number that does not change between steps.")
    return int(number)


def _batch_spec(number: int | None, spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(tf.TensorShape([number]).concatenate(spec.shape), spec.dtype)
