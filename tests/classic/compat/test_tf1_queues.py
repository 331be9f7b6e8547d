"""Input functions of queues (2016, 2017): the batches of TensorFlow 2.15, whose own queues gave those in this file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from runner.classic.estimator import Estimator
from runner.classic.run_config import RunConfig
from runner.data.inputs import build_input_pipeline
from runner.data.sharding import WorkerPlace
from tests.support.messages import Messages

X = np.arange(10, dtype=np.float32)


def read(input_fn: Callable[[], Any], config: Any = None) -> list[Any]:
    """Return the batches of an input function, as lists."""
    pipeline = build_input_pipeline(input_fn, "train", WorkerPlace(), config=config, as_in_session=True)
    batches = []
    for batch in pipeline.dataset.as_numpy_iterator():
        parts = [part.tolist() for part in tf.nest.flatten(batch)]
        batches.append(parts[0] if len(parts) == 1 else parts)
    return batches


def slices(num_epochs: int | None = 2, shuffle: bool = False, seed: int | None = None, **of_batch: Any) -> Any:
    def input_fn() -> Any:
        x, y = tf.train.slice_input_producer([X, X * 10], num_epochs, shuffle, seed)
        return tuple(tf.train.batch([x + 0, y], 4, **of_batch))

    return input_fn


# --- order, epochs and the last batch ---------------------------------------------------------------------------------


def test_rows_come_in_order_epoch_after_epoch_without_the_rest() -> None:
    found = read(slices(num_epochs=1))
    assert found == [[[0, 1, 2, 3], [0, 10, 20, 30]], [[4, 5, 6, 7], [40, 50, 60, 70]]]
    assert [x for x, _ in read(slices())][2] == [8, 9, 0, 1]


def test_a_smaller_last_batch_has_an_unknown_size_and_only_then_comes() -> None:
    assert [x for x, _ in read(slices(1, allow_smaller_final_batch=True))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sizes = []
    for smaller in (False, True):
        dataset = build_input_pipeline(
            slices(allow_smaller_final_batch=smaller), "train", WorkerPlace(), as_in_session=True
        ).dataset
        sizes.append(dataset.element_spec[0].shape.as_list())
    assert sizes == [[4], [None]]


def test_a_seed_gives_the_order_of_a_session_in_each_epoch() -> None:
    found = [x for x, _ in read(slices(3, shuffle=True, seed=5))]
    assert found == [
        [1, 3, 2, 7], [6, 9, 0, 5], [8, 4, 8, 4], [7, 1, 9, 6], [0, 5, 3, 2], [3, 5, 2, 4], [0, 1, 7, 8],
    ]  # fmt: skip


@pytest.mark.parametrize("graph_seed", [None, 11])
def test_the_order_is_that_of_the_kernel_with_the_seed_of_the_graph(graph_seed: int | None) -> None:
    found = [x for x, _ in read(slices(2, shuffle=True, seed=5), RunConfig(tf_random_seed=graph_seed))]
    with tf.Graph().as_default(), tf.Session() as session:
        if graph_seed is not None:
            tf.set_random_seed(graph_seed)
        shuffled = tf.random_shuffle(tf.range(10.0), seed=5)
        rows = np.concatenate([session.run(shuffled) for _ in range(2)])
    assert np.concatenate(found).tolist() == rows.tolist()


def test_without_epochs_there_is_no_end_and_each_epoch_has_each_row_once() -> None:
    pipeline = build_input_pipeline(slices(None, shuffle=True), "train", WorkerPlace(), as_in_session=True)
    assert int(pipeline.dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    rows = np.concatenate([x for x, _ in pipeline.dataset.take(10).as_numpy_iterator()])
    epochs = rows.reshape(4, 10)
    assert (np.sort(epochs) == X).all()
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_limit_epochs_counts_what_is_enqueued() -> None:
    def input_fn() -> Any:
        rows = tf.train.limit_epochs(tf.constant(X), 3)
        return tf.train.batch([rows], 7, enqueue_many=True, allow_smaller_final_batch=True)

    found = read(input_fn)
    assert [len(batch) for batch in found] == [7, 7, 7, 7, 2]
    assert found[1] == [7, 8, 9, 0, 1, 2, 3]


def test_two_producers_end_with_the_first_of_them() -> None:
    def input_fn() -> Any:
        number = tf.train.input_producer(X, num_epochs=2, seed=7).dequeue()
        text = tf.train.string_input_producer(["p", "q", "r"], seed=3).dequeue()
        return tuple(tf.train.batch([number, text], 4))

    assert read(input_fn)[:2] == [[[7, 2, 0, 9], [b"r", b"p", b"q", b"r"]], [[8, 4, 5, 1], [b"q", b"p", b"q", b"r"]]]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_dict_stays_one_and_examples_are_padded_to_the_longest() -> None:
    def input_fn() -> Any:
        size = tf.train.range_input_producer(5, num_epochs=1, shuffle=False).dequeue()
        return tf.train.batch({"v": tf.range(size), "n": size}, 3, dynamic_pad=True, allow_smaller_final_batch=True)

    first, last = read(input_fn)
    assert first == [[0, 1, 2], [[0, 0], [0, 0], [0, 1]]]
    assert last == [[3, 4], [[0, 1, 2, 0], [0, 1, 2, 3]]]


def test_sparse_tensors_are_batched() -> None:
    def input_fn() -> Any:
        size = tf.train.range_input_producer(4, num_epochs=1, shuffle=False).dequeue()
        sparse = tf.sparse.from_dense(tf.ones([size], tf.int32))
        sizes, batch = tf.train.batch([size, sparse], 2)
        return {"n": sizes, "v": tf.sparse.to_dense(batch)}

    assert read(input_fn) == [[[0, 1], [[0], [1]]], [[2, 3], [[1, 1, 0], [1, 1, 1]]]]


@pytest.mark.parametrize("in_rows", [False, True])
def test_keep_input_leaves_examples_out(in_rows: bool) -> None:
    def input_fn() -> Any:
        queue = tf.train.range_input_producer(20, num_epochs=1, shuffle=False)
        number = queue.dequeue_many(5) if in_rows else queue.dequeue()
        return tf.train.maybe_batch([number], tf.equal(number % 3, 0), 2, enqueue_many=in_rows)

    assert read(input_fn) == [[0, 3], [6, 9], [12, 15]]


def test_a_batch_of_batches() -> None:
    def input_fn() -> Any:
        pairs = tf.train.batch(tf.train.slice_input_producer([X, X * 2], num_epochs=1, shuffle=False), 2)
        return tuple(tf.train.batch(pairs, 3, enqueue_many=True, allow_smaller_final_batch=True))

    assert [x for x, _ in read(input_fn)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


@pytest.mark.parametrize("in_lists", [False, True])
def test_shuffled_batches_have_each_example_once_an_epoch_in_an_order_of_the_seed(in_lists: bool) -> None:
    def input_fn() -> Any:
        queue = tf.train.range_input_producer(9, num_epochs=2, shuffle=False)
        if in_lists:
            lists = [[queue.dequeue()] for _ in range(3)]
            return tf.train.shuffle_batch_join(lists, 4, 20, 5, seed=2, allow_smaller_final_batch=True)
        return tf.train.shuffle_batch([queue.dequeue()], 4, 20, 5, seed=2, allow_smaller_final_batch=True)

    found = [row for batch in read(input_fn) for row in batch]
    assert sorted(found) == sorted([*range(9), *range(9)])
    assert found != [*range(9), *range(9)]
    config = RunConfig(tf_random_seed=1)
    assert read(input_fn, config) == read(input_fn, config)


def test_lists_of_batch_join_are_read_in_turn() -> None:
    def input_fn() -> Any:
        queue = tf.train.string_input_producer([str(number) for number in range(9)], num_epochs=2, seed=4)
        lists = [[tf.string_to_number(tf.IdentityReader().read(queue)[1])] for _ in range(3)]
        return tf.train.batch_join(lists, 4)

    assert read(input_fn) == [[4, 0, 7, 6], [1, 3, 2, 5], [8, 3, 0, 6], [2, 1, 8, 5]]


def test_what_is_not_in_the_batch_takes_nothing_from_the_queue() -> None:
    def input_fn() -> Any:
        queue = tf.train.range_input_producer(6, num_epochs=1, shuffle=False)
        queue.dequeue()
        return tf.train.batch([queue.dequeue()], 2)

    assert read(input_fn) == [[0, 1], [2, 3], [4, 5]]


def test_queues_take_from_iterators_and_iterators_come_after_queues() -> None:
    def input_fn() -> Any:
        features, labels = tf.estimator.inputs.numpy_input_fn({"a": X}, X * 2, 3, num_epochs=2, shuffle=False)()
        first = tf.train.batch([features["a"], labels], 4, enqueue_many=True)
        return {"first": first[0], "later": tf.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()}

    assert read(input_fn) == [[[0, 1, 2, 3], 0], [[4, 5, 6, 7], 1], [[8, 9, 0, 1], 2]]


# --- readers ----------------------------------------------------------------------------------------------------------


def of_files(paths: list[str], reader: Callable[[], Any], num_records: int | None = None) -> Any:
    def input_fn() -> Any:
        queue = tf.train.string_input_producer(paths, num_epochs=1, shuffle=False)
        if num_records is not None:
            keys, records = reader().read_up_to(queue, num_records)
        else:
            keys, records = reader().read(queue)
        names = tf.strings.regex_replace(keys, ".*/", "")
        batch = tf.train.batch(
            [names, records], 4, enqueue_many=num_records is not None, allow_smaller_final_batch=True
        )
        return tuple(batch)

    return [pair for keys, records in read(input_fn) for pair in zip(keys, records, strict=True)]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{name}.csv") for name in "ab"]
    for path, number in zip(paths, (3, 1), strict=True):
        Path(path).write_text("".join(["head\n", *(f"line {index}\n" for index in range(number))]))
    return paths


def test_lines_come_with_their_file_and_number(texts: list[str]) -> None:
    expected = [(b"a.csv:2", b"line 0"), (b"a.csv:3", b"line 1"), (b"a.csv:4", b"line 2"), (b"b.csv:2", b"line 0")]
    assert of_files(texts, lambda: tf.TextLineReader(skip_header_lines=1)) == expected
    assert of_files(texts, lambda: tf.TextLineReader(skip_header_lines=1), 2) == expected
    assert of_files(texts, tf.WholeFileReader)[1] == (b"b.csv", b"head\nline 0\n")


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_records_come_with_their_file_and_place(compression: str, tmp_path: Path) -> None:
    path = str(tmp_path / "r")
    with tf.io.TFRecordWriter(path, compression) as writer:
        for record in (b"abc", b"", b"defgh"):
            writer.write(record)
    options = tf.io.TFRecordOptions(compression) if compression else None
    assert of_files([path], lambda: tf.TFRecordReader(options=options)) == [
        (b"r:0", b"abc"), (b"r:19", b""), (b"r:35", b"defgh"),
    ]  # fmt: skip


def test_records_of_one_length_come_with_their_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"H" + struct.pack("6B", *b"abcdef") + b"end")
    found = of_files([str(path)], lambda: tf.FixedLengthRecordReader(2, header_bytes=1, footer_bytes=3))
    assert found == [(b"f:0", b"ab"), (b"f:1", b"cd"), (b"f:2", b"ef")]
    found = of_files([str(path)], lambda: tf.FixedLengthRecordReader(4, 1, 3, hop_bytes=2))
    assert found == [(b"f:0", b"abcd"), (b"f:1", b"cdef")]


def test_files_of_a_pattern_are_read_in_their_order(texts: list[str]) -> None:
    def input_fn() -> Any:
        names = tf.train.match_filenames_once(f"{Path(texts[0]).parent}/*.csv")
        queue = tf.train.string_input_producer(names, num_epochs=1, shuffle=False)
        return tf.train.batch([tf.WholeFileReader().read(queue)[0]], 2)

    assert read(input_fn) == [[path.encode() for path in texts]]
    with pytest.raises(tf.errors.InvalidArgumentError):
        read(lambda: tf.train.string_input_producer(tf.train.match_filenames_once("/nowhere/*")).dequeue())


# --- training ---------------------------------------------------------------------------------------------------------


def shuffled(num_threads: int = 1) -> Any:
    x, y = tf.train.slice_input_producer([X, X * 2], num_epochs=None, shuffle=True, seed=1)
    x, y = tf.train.shuffle_batch([x / 10, y], 3, 8, 4, num_threads=num_threads, seed=2)
    return {"x": x}, y


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    weight = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean((weight * features["x"] - labels) ** 2)
    step = tf.train.get_global_step()
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=tf.train.GradientDescentOptimizer(0.01).minimize(loss, step)
    )


def of_lines(texts: list[str]) -> Any:
    names = tf.train.string_input_producer(tf.constant(texts), seed=1)
    _, line = tf.TextLineReader(skip_header_lines=1).read(names)
    x = tf.strings.to_number(tf.strings.substr(line, 5, 1)) / 10
    return tf.train.batch([x, x + 1], 3)


@pytest.mark.parametrize("reads_files", [False, True])
def test_training_in_parts_sees_what_training_at_once_sees(
    reads_files: bool, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def input_fn() -> Any:
        if not reads_files:
            return shuffled()
        x, y = of_lines(texts)
        return {"x": x}, y

    caplog.set_level("INFO")
    weights = []
    for name, parts in {"once": [7], "parts": [2, 4, 7]}.items():
        for max_steps in parts:  # each part with an Estimator of its own, as after a restart
            config = RunConfig(str(tmp_path / name), tf_random_seed=3)
            estimator = Estimator(model_fn, config=config).train(input_fn, max_steps=max_steps)
        weights.append(estimator.get_variable_value("w"))
        assert estimator.get_variable_value("global_step") == 7
    assert weights[0] == weights[1] != 0
    assert "cannot be saved" not in caplog.text  # no batch is read again to find the position


def test_an_evaluation_reads_queues(tmp_path: Path) -> None:
    estimator = Estimator(model_fn, str(tmp_path))
    estimator.train(shuffled, steps=1)

    def input_fn() -> Any:
        x, y = slices(1)()
        return {"x": x}, y

    assert estimator.evaluate(input_fn)["global_step"] == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def two_batches() -> Any:
    x, y = tf.train.slice_input_producer([X, X * 10], num_epochs=2)
    return tf.train.batch([x], 2), tf.train.batch([y], 2)


def own_runner() -> Any:
    queue = tf.FIFOQueue(10, [tf.float32], shapes=[[]])
    tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(tf.constant(1.0))]))
    return queue.dequeue_many(2)


def no_runner() -> Any:
    tf.train.range_input_producer(6)
    return tf.FIFOQueue(10, [tf.float32], shapes=[[]]).dequeue_many(2)


def unknown_shape() -> Any:
    text = tf.train.string_input_producer(["1 2"], num_epochs=1).dequeue()
    return tf.train.batch([tf.string_split([text]).values], 2)


def two_types() -> Any:
    queue = tf.train.range_input_producer(6)
    return tf.train.batch_join([[queue.dequeue()], [tf.cast(queue.dequeue(), tf.float32)]], 2)


def after_two_iterators() -> Any:
    for _ in range(2):
        tf.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
    return tf.train.batch([tf.train.range_input_producer(6).dequeue()], 2)


REFUSED = {
    "two batches of one dequeue": two_batches,
    "a queue runner": own_runner,
    "a queue that nothing fills": no_runner,
    "a shape that is not known": unknown_shape,
    "no epochs": slices(0),
    "a queue that cannot shuffle": lambda: tf.train.shuffle_batch(
        [tf.train.range_input_producer(6).dequeue()], 2, 4, 4
    ),
    "no strings": lambda: tf.train.string_input_producer([]).dequeue(),
    "no tensors": lambda: tf.train.batch([], 2),
    "no slices": lambda: tf.train.slice_input_producer([]),
    "a vector of what to keep": lambda: tf.train.maybe_batch(
        [tf.train.range_input_producer(6).dequeue()], [True, False], 2
    ),
    "queues after two iterators": after_two_iterators,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_queue_cannot_do_is_refused(case: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        read(REFUSED[case])


def test_lists_of_different_types_are_refused(messages: Messages) -> None:
    with messages.raised(TypeError):
        read(two_types)


def test_queues_of_a_model_fn_are_refused_before_training(tmp_path: Path, messages: Messages) -> None:
    def with_queue(features: Any, labels: Any, mode: str) -> Any:
        x = tf.train.batch([tf.train.range_input_producer(6).dequeue()], 2)
        return model_fn({"x": tf.cast(x, tf.float32)}, labels[:2], mode)

    with messages.raised(ValueError):
        Estimator(with_queue, str(tmp_path)).train(lambda: tf.data.Dataset.from_tensors(({"x": X}, X)))
    assert not list(tmp_path.glob("model.ckpt*"))


def test_a_graph_of_the_users_own_has_queues_with_threads() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        batch = tf.train.batch([tf.train.range_input_producer(6, shuffle=False).dequeue()], 3)
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(session, coordinator)
        assert session.run(batch).tolist() == [0, 1, 2]
        coordinator.request_stop()
        coordinator.join(threads)
