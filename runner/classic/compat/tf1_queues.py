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

_DEFAULT_GRAPH_SEED = 87654321
"""The seed of a TensorFlow 1 graph for operations with a seed of their own."""


class Queue:
    """The elements of a queue, each of which goes to one of the places that take from it.

    Places share the elements in turn. In TensorFlow 1 their threads took them as they came.

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
        self._places: list[Taken] = []

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

    def take(self, spec: Any, made_of: Callable[[tf.data.Dataset], tf.data.Dataset]) -> Any:
        """Return an element of the dataset that `made_of` makes of the elements of one place."""
        number = len(self._places)

        def dataset() -> tf.data.Dataset:
            used = [index for index, place in enumerate(self._places) if place.is_used]
            elements = self._elements()
            if len(used) > 1:
                elements = elements.shard(len(used), used.index(number))
            return made_of(elements)

        element = self._graph.take(spec, dataset, self._sources)
        self._places.append(self._graph.taken[-1])
        return element


# --- producers --------------------------------------------------------------------------------------------------------


def input_producer(
    input_tensor: Any,
    element_shape: Any = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    summary_name: str | None = None,
    name: str | None = None,
    cancel_op: Any = None,
) -> Queue:
    """Return a queue of the rows of a tensor, `num_epochs` times, each time in another order if they are shuffled.

    Raises:
      ValueError: the shape of a row is not known, or num_epochs is not positive.
    """
    graph = input_graph()
    rows = _as_tensor(input_tensor)
    shape = rows.shape[1:].merge_with(element_shape)
    if not shape.is_fully_defined():
        raise ValueError(
            f"input_producer: the shape of a row of {input_tensor!r} is {shape}. Give element_shape, or a tensor whose "
            "shape is known."
        )
    _check_epochs(num_epochs)
    sources = graph.sources(rows)
    seeds = _seeds(graph, seed) if shuffle else None

    def elements() -> tf.data.Dataset:
        of_epochs = graph.computed((rows,), sources).enumerate()
        if num_epochs is not None:
            of_epochs = of_epochs.take(num_epochs)

        @tf.autograph.experimental.do_not_convert
        def of_epoch(epoch: tf.Tensor, made: Any) -> tf.data.Dataset:
            order = tf.range(tf.shape(made[0], tf.int64)[0]) if seeds is None else _order(made[0], epoch, seeds)
            return tf.data.Dataset.from_tensor_slices(order).map(lambda row: tf.gather(made[0], row))

        dataset = of_epochs.flat_map(of_epoch)
        if num_epochs is None:
            return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        number = rows.shape[0]
        if number is None or sources:
            return dataset
        return dataset.apply(tf.data.experimental.assert_cardinality(number * num_epochs))

    return Queue(graph, tf.TensorSpec(shape, rows.dtype), elements, sources)


def string_input_producer(
    string_tensor: Any,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    name: str | None = None,
    cancel_op: Any = None,
) -> Queue:
    """Return a queue of strings, usually names of files; the arguments are those of `input_producer`.

    Raises:
      ValueError: there are no strings.
    """
    if not tf.is_tensor(string_tensor) and not len(string_tensor):
        raise ValueError("string_input_producer: there are no strings. Give the names of the files.")
    graph = input_graph()
    strings = _as_tensor(string_tensor, tf.string)
    if not graph.sources(strings) and strings.shape.rank == 1 and strings.shape[0] is None:
        with tf.control_dependencies(
            [v1.Assert(tf.size(strings) > 0, ["string_input_producer: there are no strings"])]
        ):
            strings = tf.identity(strings)
    return input_producer(strings, [], num_epochs, shuffle, seed)


def range_input_producer(
    limit: Any,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    name: str | None = None,
) -> Queue:
    """Return a queue of the integers below `limit`; the other arguments are those of `input_producer`."""
    input_graph()
    return input_producer(tf.range(limit), [], num_epochs, shuffle, seed)


def slice_input_producer(
    tensor_list: Sequence[Any],
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Return a row of each tensor, the same row of all; the other arguments are those of `input_producer`.

    Raises:
      ValueError: there are no tensors.
    """
    if not len(tensor_list):
        raise ValueError("slice_input_producer: there are no tensors. Give at least one.")
    input_graph()
    tensors = [_as_tensor(one) for one in tensor_list]
    row = range_input_producer(tf.shape(tensors[0])[0], num_epochs, shuffle, seed).dequeue()
    return [tf.gather(one, row) for one in tensors]


def limit_epochs(tensor: Any, num_epochs: int | None = None, name: str | None = None) -> tf.Tensor:
    """Return a tensor that can be computed `num_epochs` times, after which the data ends; None: always.

    Raises:
      ValueError: num_epochs is not positive.
    """
    if num_epochs is None:
        return tensor
    _check_epochs(num_epochs)
    graph = input_graph()
    epoch = graph.take(tf.TensorSpec([], tf.int64), lambda: tf.data.Dataset.range(num_epochs))
    with tf.control_dependencies([tf.identity(epoch)]):
        return tf.identity(tensor)


def match_filenames_once(pattern: Any, name: str | None = None) -> tf.Tensor:
    """Return the sorted names of the files that match a pattern or a list of patterns."""
    with tf.init_scope():
        return tf.io.matching_files(pattern)


def start_queue_runners(*args: Any, **kwargs: Any) -> list[Any]:
    """Return an empty list: there are no threads to start."""
    return []


def _check_epochs(num_epochs: int | None) -> None:
    if num_epochs is not None and num_epochs <= 0:
        raise ValueError(f"num_epochs={num_epochs} must be positive, or None for no end.")


def _as_tensor(value: Any, dtype: tf.DType | None = None) -> tf.Tensor:
    """Return a value as a tensor; an array is not copied into the graph."""
    if tf.is_tensor(value):
        return tf.convert_to_tensor(value, dtype)
    with tf.init_scope():
        return tf.convert_to_tensor(value, dtype)


def _seeds(graph: InputGraph, seed: int | None) -> tuple[int, int]:
    """Return the two seeds of a shuffle in a TensorFlow 1 graph; without a seed those of a new operation here."""
    if seed is not None:
        return _DEFAULT_GRAPH_SEED if graph.seed is None else graph.seed, seed
    with tf.init_scope():
        found = v1.random.get_seed(None)
    return (found[0] or 0, found[1] or 0)


def _order(rows: tf.Tensor, epoch: tf.Tensor, seeds: tuple[int, int]) -> tf.Tensor:
    """Return the numbers of rows in the order of `tf.random_shuffle` at its run number `epoch` in a session.

    The algorithm is that of TensorFlow's kernel (core/kernels/random_shuffle_op.cc): Fisher and Yates's, with numbers
    of Philox. The kernel keeps its generator; here it is computed from the epoch, so that a resumed run goes on with
    the same order.
    """
    size = tf.shape(rows, tf.int64)[0]
    last = tf.maximum(size - 1, 0)
    # A run takes whole groups of four numbers.
    group = tf.cast(epoch * ((last + 3) // 4), tf.uint64)
    key = tf.constant([seeds[0] % 2**64], tf.uint64)
    counter = tf.stack([group, tf.constant(seeds[1] % 2**64, tf.uint64)])
    drawn = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.expand_dims(last, 0), key=key, counter=counter, alg=1, dtype=tf.uint32
    )
    first = tf.range(last)
    other = first + tf.cast(drawn, tf.int64) % (size - first)
    order = tf.TensorArray(tf.int64, tf.cast(size, tf.int32), clear_after_read=False).unstack(tf.range(size))

    def swap(place: tf.Tensor, order: tf.TensorArray) -> Any:
        with_place = tf.cast(other[place], tf.int32)
        value = order.read(place)
        order = order.write(place, order.read(with_place))
        return place + 1, order.write(with_place, value)

    _, order = tf.while_loop(
        lambda place, _: place < tf.cast(last, tf.int32), swap, (tf.constant(0), order), parallel_iterations=1
    )
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
        return self._of(queue, None).dequeue()

    def read_up_to(self, queue: Queue, num_records: int, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next records of a file, at most `num_records`, as (keys, records)."""
        return self._of(queue, _static("read_up_to", "num_records", num_records)).dequeue()

    def _of(self, queue: Queue, num_records: int | None) -> Queue:
        if not isinstance(queue, Queue):
            raise ValueError(
                f"{queue!r} is no queue that the runner knows: give a reader what string_input_producer returns, or "
                "return a tf.data.Dataset."
            )
        found = self._queues.get((id(queue), num_records))
        if found is None:
            found = self._queues[id(queue), num_records] = _records_of(queue, self._records, num_records)
        return found


def _records_of(files: Queue, records: Callable[[tf.Tensor], tf.data.Dataset], num_records: int | None) -> Queue:
    graph = input_graph()
    file = files.dequeue()
    (taken,) = graph.sources(file)

    @tf.autograph.experimental.do_not_convert
    def of_file(name: tf.Tensor) -> tf.data.Dataset:
        found = records(name)
        return found if num_records is None else found.batch(num_records)

    spec = tf.TensorSpec([] if num_records is None else [None], tf.string)
    return Queue(graph, (spec, spec), lambda: taken.dataset().flat_map(of_file), [taken])


def text_line_reader(skip_header_lines: int | None = None, name: str | None = None) -> Reader:
    """Return a reader of the lines of text files, like `tf.TextLineReader`."""
    first = skip_header_lines or 0

    def records(file: tf.Tensor) -> tf.data.Dataset:
        lines = tf.data.TextLineDataset(file).enumerate(1).skip(first)
        return lines.map(lambda number, line: (_key(file, number), line))

    return Reader(records)


def tf_record_reader(name: str | None = None, options: Any = None) -> Reader:
    """Return a reader of TFRecords, like `tf.TFRecordReader`."""
    compression = None if options is None else v1.io.TFRecordOptions.get_compression_type_string(options)

    def following(begin: tf.Tensor, record: tf.Tensor) -> Any:
        # A record is stored with its length, 8 bytes, and two checksums of 4.
        return begin + 16 + tf.cast(tf.strings.length(record), tf.int64), (begin, record)

    def records(file: tf.Tensor) -> tf.data.Dataset:
        found = tf.data.TFRecordDataset(file, compression).scan(tf.constant(0, tf.int64), following)
        return found.map(lambda begin, record: (_key(file, begin), record))

    return Reader(records)


def whole_file_reader(name: str | None = None) -> Reader:
    """Return a reader whose records are whole files, like `tf.WholeFileReader`."""
    return Reader(lambda file: tf.data.Dataset.from_tensors(file).map(lambda name: (name, tf.io.read_file(name))))


def identity_reader(name: str | None = None) -> Reader:
    """Return a reader whose records are the elements of the queue, like `tf.IdentityReader`."""
    return Reader(lambda element: tf.data.Dataset.from_tensors((element, element)))


def fixed_length_record_reader(
    record_bytes: int,
    header_bytes: int | None = None,
    footer_bytes: int | None = None,
    hop_bytes: int | None = None,
    name: str | None = None,
    encoding: str | None = None,
) -> Reader:
    """Return a reader of records of one length, which begin every `hop_bytes`, like `tf.FixedLengthRecordReader`."""
    header = header_bytes or 0
    footer = footer_bytes or 0
    hop = hop_bytes or record_bytes

    def records(file: tf.Tensor) -> tf.data.Dataset:
        content = tf.io.read_file(file)
        if encoding:
            content = tf.io.decode_compressed(content, encoding)
        room = tf.cast(tf.strings.length(content), tf.int64) - header - footer - record_bytes
        number = tf.where(room < 0, tf.constant(0, tf.int64), room // hop + 1)

        def record(index: tf.Tensor) -> Any:
            return _key(file, index), tf.strings.substr(content, header + index * hop, record_bytes)

        return tf.data.Dataset.range(number).map(record)

    return Reader(records)


def _key(file: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    return tf.strings.join([file, ":", tf.strings.as_string(number)])


# --- batches ----------------------------------------------------------------------------------------------------------


def batches(function: str, given: Mapping[str, Any]) -> Any:
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
    is_shuffled = "min_after_dequeue" in given
    if is_shuffled and given["capacity"] <= given["min_after_dequeue"]:
        raise ValueError(
            f"{function}: capacity={given['capacity']} must be greater than "
            f"min_after_dequeue={given['min_after_dequeue']}."
        )
    in_lists = given["tensors_list"] if "tensors_list" in given else [given["tensors"]]
    lists = [_tensors(function, tensors) for tensors in in_lists]
    if not lists:
        raise ValueError(f"{function}: there are no lists of tensors. Give at least one.")
    examples = _Examples(function, graph, lists, given)
    size = _static(function, "batch_size", given["batch_size"])
    is_full = not given["allow_smaller_final_batch"]

    def dataset() -> tf.data.Dataset:
        found = examples.dataset()
        if is_shuffled:
            # The next example is drawn from at least so many.
            found = found.shuffle(max(given["min_after_dequeue"], 1), given["seed"])
        if given.get("dynamic_pad"):
            return found.padded_batch(size, tuple(examples.shapes), drop_remainder=is_full)
        return found.batch(size, drop_remainder=is_full)

    number = size if is_full else None
    spec = tuple(_spec_of_batch(number, one, shape) for one, shape in zip(lists[0], examples.shapes, strict=True))
    batch = graph.take(spec, dataset, examples.sources)
    if isinstance(in_lists[0], Mapping):
        return dict(zip(sorted(in_lists[0]), batch, strict=True))
    return batch[0] if len(batch) == 1 else list(batch)


class _Examples:
    """The examples that go into batches.

    Args:
      function: as in `batches`.
      graph: the graph of the input function.
      lists: the tensors of an example, or of several if `enqueue_many`; of several lists in turn.
      given: as in `batches`.

    Attributes:
      shapes: shapes of the tensors of an example.
    """

    def __init__(
        self, function: str, graph: InputGraph, lists: Sequence[Sequence[Any]], given: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._graph = graph
        self._lists = lists
        self._given = given
        self._in_rows = given["enqueue_many"]
        dtypes = [[one.dtype for one in tensors] for tensors in lists]
        if any(of_list != dtypes[0] for of_list in dtypes):
            raise TypeError(f"{function}: the lists have tensors of different types: {dtypes}.")
        self._keep = _kept(function, given.get("keep_input", True), in_rows=self._in_rows)
        self.shapes = self._common_shapes()
        self._sources = [graph.sources((tensors, self._keep)) for tensors in lists]

    @property
    def sources(self) -> list[Taken]:
        return [source for of_list in self._sources for source in of_list]

    def dataset(self) -> tf.data.Dataset:
        """Return the dataset of examples, tuples of tensors."""
        made = [self._of(tensors, sources) for tensors, sources in zip(self._lists, self._sources, strict=True)]
        if len(made) == 1:
            return made[0]
        turns = tf.data.Dataset.range(len(made)).repeat()
        return tf.data.Dataset.choose_from_datasets(made, turns, stop_on_empty_dataset=False)

    def _common_shapes(self) -> list[tf.TensorShape]:
        given = self._given["shapes"]
        if given is not None:
            return [tf.TensorShape(shape) for shape in given]
        shapes = []
        for tensors in zip(*self._lists, strict=True):
            shape = self._shape_of(tensors[0])
            for other in tensors[1:]:
                shape.merge_with(self._shape_of(other))
                shape = shape.most_specific_compatible_shape(self._shape_of(other))
            self._check_known(tensors[0], shape)
            shapes.append(shape)
        return shapes

    def _shape_of(self, tensor: Any) -> tf.TensorShape:
        return tensor.shape.with_rank_at_least(1)[1:] if self._in_rows else tensor.shape

    def _check_known(self, tensor: Any, shape: tf.TensorShape) -> None:
        is_padded = self._given.get("dynamic_pad", False) and shape.rank is not None
        if not (is_padded or isinstance(tensor, tf.SparseTensor) or shape.is_fully_defined()):
            raise ValueError(
                f"{self._function}: the shape of {tensor.name} is {shape}, which is not fully known. Set it "
                "(tensor.set_shape), give shapes=, or use tf.train.batch(..., dynamic_pad=True)."
            )

    def _of(self, tensors: Sequence[Any], sources: Sequence[Taken]) -> tf.data.Dataset:
        keep = self._keep
        parts = (tuple(tensors),) if keep is None else (tuple(tensors), keep)
        dataset = self._graph.computed(parts, sources, num_threads=self._given.get("num_threads", 1))
        if keep is not None and keep.shape.rank == 0:
            dataset = dataset.filter(lambda example, is_kept: is_kept).map(lambda example, is_kept: (example,))
        if self._in_rows:
            dataset = dataset.unbatch()
        if keep is not None and keep.shape.rank == 1:
            dataset = dataset.filter(lambda example, is_kept: is_kept)
        return dataset.map(self._with_shapes)

    @tf.autograph.experimental.do_not_convert
    def _with_shapes(self, example: Sequence[Any], *_: Any) -> tuple[Any, ...]:
        shaped = []
        for tensor, shape in zip(example, self.shapes, strict=True):
            is_known = isinstance(tensor, tf.SparseTensor) or tensor.shape.is_fully_defined()
            shaped.append(tensor if is_known else tf.ensure_shape(tensor, shape))
        return tuple(shaped)


def _tensors(function: str, tensors: Any) -> list[Any]:
    values = [tensors[key] for key in sorted(tensors)] if isinstance(tensors, Mapping) else list(tensors)
    if not values:
        raise ValueError(f"{function}: there are no tensors. Give at least one.")
    return [value if isinstance(value, tf.SparseTensor) else _as_tensor(value) for value in values]


def _kept(function: str, keep_input: Any, *, in_rows: bool) -> tf.Tensor | None:
    """Return `keep_input` as a tensor; None: all examples are kept."""
    if keep_input is True:
        return None
    keep = _as_tensor(keep_input)
    rank = keep.shape.rank
    if rank is None or rank > 1 or (rank == 1 and not in_rows):
        raise ValueError(
            f"{function}: keep_input has shape {keep.shape}. It must be a scalar, or a vector if enqueue_many=True."
        )
    return keep


def _static(function: str, argument: str, value: Any) -> int:
    number = tf.get_static_value(value)
    if number is None:
        raise ValueError(f"{function}: {argument}={value!r} must be a number that does not change between steps.")
    return int(number)


def _batch_spec(number: int | None, spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(tf.TensorShape([number]).concatenate(spec.shape), spec.dtype)


def _spec_of_batch(number: int | None, example: Any, shape: tf.TensorShape) -> Any:
    if not isinstance(example, tf.SparseTensor):
        return _batch_spec(number, tf.TensorSpec(shape, example.dtype))
    rank = shape.rank
    return tf.SparseTensorSpec(None if rank is None else [None] * (rank + 1), example.dtype)
