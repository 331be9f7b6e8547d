"""Records of files that know their place, so that one which cannot be parsed is named. Shared by the shipped readers.

tf.data's own errors name neither the file nor, mostly, the record. Everything here is made of public tf.data
transformations, and their functions hold no operation that TensorFlow counts as stateful, so that the position of an
iterator can be saved. Stateful are Python functions, and what takes the elements of a dataset inside of a function
(`Dataset.reduce`, `get_single_element`): what is found in that way is here the element of a dataset itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from input_fns._batches import Epoch, batched, seed_of, shuffled
from input_fns._files import shown

DEFAULT_SHUFFLE_BUFFER = 10_000

# Reads several files at once in TRAIN, a block of each in turn: a first mix, before the shuffle buffer's.
_FILES_AT_ONCE, _BLOCK = 4, 16
_PARSERS = 4

# A record's place is one number, file * _FILE + record: a second tensor for each record costs 1 us, a name more.
_FILE = 1 << 40

Parse = Callable[[tf.Tensor], Any]
Explain = Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class Records:
    """Where records come from, and how a user counts them.

    Attributes:
      files: in the order of EVAL and PREDICT.
      read: index of a file (a scalar) -> dataset of its records, strings.
      part: (n, i): of each file only every n-th record, from the i-th on.
      counts: records of each file, where known.
      most: no more records than this in all; else None. A shuffle buffer that has room for more costs time at each
        checkpoint, which holds its empty places too (10,000 of them: 0.2 s).
      noun, first: for the errors, `data/a.csv line 2` is the first record where noun is line and first is 2.
      beside: what the files hold beside records, as the end of a sentence.
    """

    files: list[str]
    read: Callable[[tf.Tensor], tf.data.Dataset]
    part: tuple[int, int] = (1, 0)
    counts: list[int] | None = None
    most: int | None = None
    noun: str = "record"
    first: int = 0
    beside: str = ""

    def placed(self, file: tf.Tensor) -> tf.data.Dataset:
        """(place, record) of the records of one file."""
        start = file * _FILE + self.first
        count = _FILE - self.first if self.counts is None else tf.gather(tf.constant(self.counts, tf.int64), file)
        records = tf.data.Dataset.zip(tf.data.Dataset.range(start, start + count), self.read(file))
        return records if self.part[0] == 1 else records.shard(*self.part)

    def describe(self, place: tf.Tensor) -> tf.Tensor:
        """`file noun number`, a string scalar."""
        file, number = tf.gather(self.files, place // _FILE), tf.strings.as_string(place % _FILE)
        return tf.strings.join([file, f" {self.noun} ", number])

    def cardinality(self) -> int | None:
        """Records in all; None where it is not known."""
        each, first = self.part
        return None if self.counts is None else sum(len(range(first, count, each)) for count in self.counts)

    def shuffled(self, epoch: tf.Tensor, seed: int, buffer: int) -> tf.data.Dataset:
        """(place, record) of all records, in the order of an epoch of TRAIN."""
        files = tf.data.Dataset.from_tensor_slices(shuffled(tf.range(len(self.files), dtype=tf.int64), seed, epoch))
        mixed = files.interleave(self.placed, cycle_length=_FILES_AT_ONCE, block_length=_BLOCK)
        epoch_seed = tf.random.stateless_uniform([], tf.stack([seed, epoch]), None, None, tf.int64, alg="philox")
        return _shuffled_once(mixed, buffer, epoch_seed)

    def in_order(self) -> tf.data.Dataset:
        """(place, record) of all records, file by file."""
        return tf.data.Dataset.range(len(self.files)).flat_map(self.placed)


def check_not_empty(part: Records, build_whole: Callable[[], Records], mode: str) -> None:
    """Refuse data of no record, of which TRAIN would begin one epoch after another without end.

    Args:
      part: the records that this pipeline reads.
      build_whole: gives those of all pipelines; called where `part` has none.

    Raises:
      ValueError: naming the files.
    """
    if mode == "infer" or not _is_empty(part):
        return
    whole = build_whole()
    if _is_empty(whole):
        raise ValueError(f"{shown(whole.files)}: there is no {whole.noun} of data{whole.beside}.")
    if mode == "train":
        raise ValueError(
            f"{shown(whole.files)}: no {whole.noun} of data is left for one of the workers, which share them. Use "
            "fewer workers, or input.train.shard=examples."
        )


def _is_empty(records: Records) -> bool:
    number = records.cardinality()
    return not (number if number is not None else len(list(records.in_order().take(1))))


def parsed_batches(
    records: Records,
    parse: Parse,
    explain: Explain,
    mode: str,
    params: Mapping[str, Any],
    config: Any,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Batches of the parsed records.

    Args:
      records: one epoch of them.
      parse: records `[batch]` -> what the dataset holds. Fails if one of them is bad.
      explain: (place, record), scalars, of the first record that failed -> dataset of one element, whose error says
        why.
      mode, params, num_epochs: see `batched`; params.shuffle_buffer is the number of examples to draw from.
      config: has the seed where params have none.
    """
    seed, buffer = seed_of(params, config), params.get("shuffle_buffer", DEFAULT_SHUFFLE_BUFFER)
    cardinality = records.cardinality()
    most = records.most if cardinality is None else cardinality
    buffer = buffer if most is None else max(1, min(buffer, most))

    def read_epoch(epoch: Epoch) -> tf.data.Dataset:
        placed = records.in_order() if epoch is None else records.shuffled(epoch, seed, buffer)
        return placed if cardinality is None else placed.apply(tf.data.experimental.assert_cardinality(cardinality))

    batches = batched(read_epoch, mode, params, num_epochs)
    return _parsed(batches, records, parse, explain).prefetch(tf.data.AUTOTUNE)


def first_failing(records: tf.Tensor, parse: Parse) -> tf.data.Dataset:
    """One element, an int64 scalar: index of the first of `records` (`[n]`) on which `parse` fails; n if none does.

    Slow.
    """
    number = tf.size(records, tf.int64)

    def numbered(i: tf.Tensor, record: tf.Tensor) -> Any:
        # What was parsed is returned too: tf.data does not run a function for the sake of control dependencies.
        return i, parse(record[None])

    good = tf.data.Dataset.from_tensor_slices(records).enumerate().map(numbered).ignore_errors()
    numbers = good.map(lambda i, _: i).concatenate(tf.data.Dataset.from_tensors(number)).batch(number + 1)

    def first_missing(found: tf.Tensor) -> tf.Tensor:
        # The good ones come in order, the end last: those in their own place come before the first that failed.
        in_place = tf.math.count_nonzero(found == tf.range(tf.size(found, tf.int64)))
        return tf.minimum(in_place, number)

    return numbers.map(first_missing)


def fails(record: tf.Tensor, parse: Parse) -> tf.data.Dataset:
    """One element, a bool scalar: whether `parse` fails on this one record."""
    return first_failing(record[None], parse).map(lambda first: first == 0)


def assert_that(condition: tf.Tensor, *message: Any) -> tf.Operation:
    """An assertion whose error text is `message`, strings and string tensors, joined."""
    return tf.debugging.Assert(condition, [tf.strings.join([tf.convert_to_tensor(part) for part in message])])


def _shuffled_once(dataset: tf.data.Dataset, buffer: int, seed: tf.Tensor) -> tf.data.Dataset:
    """Like `dataset.shuffle(buffer, seed, reshuffle_each_iteration=False)`, in the same order.

    That hands its operation a generator of seeds, and operations that make one count as stateful. It has no use here.
    """
    # The pair that tf.data takes: TensorFlow's seed, or a number in its place, and the given one. `get_seed` would
    # fail with a tensor where TensorFlow's seed is 0: it compares it in Python.
    first, second = tf.constant(tf.compat.v1.random.get_seed(1)[0], tf.int64), seed % (2**31 - 1)
    # Two zeros would draw a seed: tf.data takes this one in their place.
    second = tf.where((first == 0) & (second == 0), tf.constant(2**31 - 1, tf.int64), second)
    spec = tf.nest.flatten(dataset.element_spec)
    shuffled = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=tf.cast(buffer, tf.int64),
        seed=first,
        seed2=second,
        reshuffle_each_iteration=False,
        output_types=[one.dtype for one in spec],
        output_shapes=[one.shape for one in spec],
    )
    return tf.data.experimental.from_variant(shuffled, dataset.element_spec)


def _parsed(batches: tf.data.Dataset, source: Records, parse: Parse, explain: Explain) -> tf.data.Dataset:
    def parse_records(places: tf.Tensor, records: tf.Tensor) -> Any:
        return parse(records)

    def find_bad_record(places: tf.Tensor, records: tf.Tensor) -> tf.data.Dataset:
        def explained(first: tf.Tensor) -> tf.data.Dataset:
            bad = tf.minimum(first, tf.size(records, tf.int64) - 1)
            return explain(source.describe(places[bad]), records[bad])

        def parse_anyway(_: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(records).map(parse)

        return first_failing(records, parse).flat_map(explained).flat_map(parse_anyway)

    def attempt(places: tf.Tensor, records: tf.Tensor) -> tf.data.Dataset:
        # try/except in tf.data: the second dataset is only made when the first, its error dropped, was empty.
        one = tf.data.Dataset.from_tensors((places, records))
        return one.map(parse_records).ignore_errors().concatenate(one.flat_map(find_bad_record)).take(1)

    parsed = batches.interleave(attempt, cycle_length=_PARSERS, num_parallel_calls=_PARSERS, deterministic=True)
    # One batch in, one out; interleave forgets that.
    cardinality = batches.cardinality()
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return parsed
    return parsed.apply(tf.data.experimental.assert_cardinality(cardinality))
