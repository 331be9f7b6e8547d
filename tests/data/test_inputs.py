from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner.data.dataset_adapter import tensors
from runner.data.inputs import Input, InputContext, InputPipeline, build_input_pipeline
from runner.data.replica_batches import ReplicaBatch
from runner.data.sharding import WorkerPlace
from tests.support.messages import Messages

EXPECTED_ROWS = {
    # rows in a batch, replicas: the count of each
    (1, 2): [1, 0],
    (2, 2): [1, 1],
    (3, 2): [2, 1],
    (4, 2): [2, 2],
    (5, 2): [3, 2],
    (6, 2): [3, 3],
    (7, 2): [4, 3],
    (1, 3): [1, 0, 0],
    (2, 3): [1, 1, 0],
    (3, 3): [1, 1, 1],
    (4, 3): [2, 1, 1],
    (5, 3): [2, 2, 1],
    (6, 3): [2, 2, 2],
    (7, 3): [3, 2, 2],
}


def examples(n: int) -> tf.data.Dataset:
    ids = np.arange(n, dtype=np.int64)
    return tf.data.Dataset.from_tensor_slices(({"x": ids.astype(np.float32) * 10, "id": ids}, ids + 100))


def feed_of(fn: Any, mode: str = "eval", num_replicas: int = 1, **options: Any) -> InputPipeline:
    place = {name: options.pop(name) for name in ("worker_index", "num_workers") if name in options}
    given = {"params": {}} | {name: options.pop(name) for name in ("params", "config") if name in options}
    return build_input_pipeline(Input(fn, **options), mode, WorkerPlace(num_replicas, **place), **given)


def by_rows(fn: Any, batch_size: int, num_replicas: int = 1, **options: Any) -> InputPipeline:
    """A training input with batches of `batch_size` examples, which need not divide evenly, like a last batch."""
    given = inspect.signature(fn).parameters

    def input_fn(params: Any, input_context: Any) -> Any:
        offered = {"params": {**params, "batch_size": batch_size}, "input_context": input_context}
        return fn(**{name: value for name, value in offered.items() if name in given})

    total = num_replicas * options.get("num_workers", 1)
    whole = -(-batch_size // total) * total
    return feed_of(input_fn, "train", num_replicas, batch_size=whole, **options)


def pull(feed: InputPipeline, iterator: Any) -> tuple[ReplicaBatch, ...]:
    """One step as the training loop takes it: in graph."""

    @tf.function
    def step() -> tuple[ReplicaBatch, ...]:
        return feed.division.replica_batches(next(iterator), iterator)[0]

    return step()


def steps(feed: InputPipeline) -> list[tuple[ReplicaBatch, ...]]:
    """All steps of one pass; the first pull is the caller's, as an Optional."""
    iterator = iter(feed.dataset)

    @tf.function
    def step() -> tuple[tuple[ReplicaBatch, ...], tf.Tensor]:
        first = iterator.get_next_as_optional()
        has = first.has_value()
        spec = tf.nest.map_structure(lambda s: tf.zeros([1] + list(s.shape[1:]), s.dtype), feed.dataset.element_spec)
        element = tf.cond(has, first.get_value, lambda: spec)
        return feed.division.replica_batches(element, iterator)[0], has

    results: list[tuple[ReplicaBatch, ...]] = []
    while True:
        shares, has = step()
        if not has:
            return results
        results.append(shares)


def ids(share: ReplicaBatch) -> list[int]:
    return share.features["id"].numpy()[: int(share.count)].tolist()


def batched(n: int, **kwargs: Any) -> Any:
    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        return examples(n).batch(params["batch_size"], **kwargs)

    return input_fn


# How a global batch is divided by rows.


@pytest.mark.parametrize("rows, replicas", EXPECTED_ROWS)
def test_rows_go_to_the_replicas_contiguously_and_evenly(rows: int, replicas: int) -> None:
    feed = by_rows(batched(rows), num_replicas=replicas, batch_size=rows)
    shares = pull(feed, iter(feed.dataset))
    assert [int(share.count) for share in shares] == EXPECTED_ROWS[rows, replicas]
    assert [i for share in shares for i in ids(share)] == list(range(rows))
    for share in shares:
        assert share.count.dtype == tf.int64 and share.count.shape == []
        np.testing.assert_array_equal(share.labels, share.features["id"] + 100)
        np.testing.assert_array_equal(share.features["x"], tf.cast(share.features["id"] * 10, tf.float32))


def test_a_replica_without_rows_gets_the_first_row_and_count_0() -> None:
    feed = by_rows(batched(1), num_replicas=3, batch_size=3)
    for share in pull(feed, iter(feed.dataset))[1:]:
        assert int(share.count) == 0
        assert share.features["id"].numpy().tolist() == [0]
        assert share.labels.numpy().tolist() == [100]


@pytest.mark.parametrize("batch_size", [4, 10, 22])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_one_pass_counts_every_example_once_at_any_batch_size(batch_size: int, replicas: int) -> None:
    feed = by_rows(batched(22), num_replicas=replicas, batch_size=batch_size)
    all_steps = steps(feed)
    assert [i for shares in all_steps for share in shares for i in ids(share)] == list(range(22))
    assert len(all_steps) == feed.remaining_steps() == math.ceil(22 / batch_size)


def test_one_replica_gets_the_element_itself_and_no_operation_but_the_count() -> None:
    feed = feed_of(batched(5), batch_size=5)
    spec = feed.dataset.element_spec

    @tf.function(input_signature=[spec])
    def share(element: Any) -> Any:
        (only,) = feed.division.replica_batches(element, None)[0]
        assert only.features is element[0] and only.labels is element[1]
        return only.count

    graph = share.get_concrete_function().graph
    work = {op.type for op in graph.get_operations()} - {"Placeholder", "Const", "Identity", "NoOp"}
    assert work == {"Shape", "StridedSlice"}  # the number of rows


def test_one_replica_and_a_static_batch_costs_a_constant() -> None:
    feed = feed_of(batched(6, drop_remainder=True), batch_size=3)

    @tf.function(input_signature=[feed.dataset.element_spec])
    def share(element: Any) -> Any:
        return feed.division.replica_batches(element, None)[0][0].count

    graph = share.get_concrete_function().graph
    assert {op.type for op in graph.get_operations()} <= {"Placeholder", "Const", "Identity", "NoOp"}


def test_the_static_shape_is_kept_where_it_divides() -> None:
    feed = by_rows(batched(12, drop_remainder=True), num_replicas=2, batch_size=6)
    features, labels = feed.replica_spec
    assert features["x"].shape == [3] and labels.shape == [3]

    @tf.function(input_signature=[feed.dataset.element_spec])
    def shapes(element: Any) -> Any:
        shares = feed.division.replica_batches(element, None)[0]
        assert [share.features["x"].shape.as_list() for share in shares] == [[3], [3]]
        assert [tf.get_static_value(share.count) for share in shares] == [3, 3]
        return [share.features["id"] for share in shares]

    assert [part.numpy().tolist() for part in shapes(next(iter(feed.dataset)))] == [[0, 1, 2], [3, 4, 5]]


def test_the_other_dimensions_are_kept_where_it_does_not_divide() -> None:
    image = tf.data.Dataset.from_tensor_slices(np.zeros([10, 8, 8, 1], np.float32))
    feed = by_rows(lambda params: image.batch(params["batch_size"]), num_replicas=2, batch_size=4)
    assert feed.replica_spec[0].shape.as_list() == [None, 8, 8, 1]
    assert [share.features.shape.as_list() for share in steps(feed)[-1]] == [[1, 8, 8, 1], [1, 8, 8, 1]]


def test_every_worker_takes_its_rows_of_the_same_batch() -> None:
    for size in (7, 8):
        got = []
        for worker in range(2):
            feed = by_rows(batched(size), num_replicas=2, worker_index=worker, num_workers=2, batch_size=size)
            assert feed.shard == "examples"
            got += [ids(share) for share in pull(feed, iter(feed.dataset))]
        assert got == {7: [[0, 1], [2, 3], [4, 5], [6]], 8: [[0, 1], [2, 3], [4, 5], [6, 7]]}[size]


# Structures.


@pytest.mark.parametrize(
    "element, features, labels",
    [
        ({"a": [1, 2, 3, 4]}, {"a": [1, 2]}, None),
        ([1, 2, 3, 4], [1, 2], None),
        (([1, 2, 3, 4], [4, 5, 6, 7]), [1, 2], [4, 5]),
        (
            ({"a": {"b": [1, 2, 3, 4]}}, {"y": [4, 5, 6, 7], "z": [7, 8, 9, 10]}),
            {"a": {"b": [1, 2]}},
            {"y": [4, 5], "z": [7, 8]},
        ),
        (((([1, 2, 3, 4]), [4, 5, 6, 7]), [7, 8, 9, 10]), ([1, 2], [4, 5]), [7, 8]),
        (({"a": [1, 2, 3, 4]}, None), {"a": [1, 2]}, None),
    ],
    ids=["dict", "tensor", "tensor+labels", "nested", "tuple+labels", "labels None"],
)
@pytest.mark.parametrize("as_tensors", [True, False], ids=["tensors", "dataset"])
def test_every_structure_of_features_and_labels(element: Any, features: Any, labels: Any, as_tensors: bool) -> None:
    if isinstance(element, list):
        element = tf.constant(element)
    if isinstance(element, tuple):
        element = tuple(tf.constant(part) if isinstance(part, list) else part for part in element)

    def input_fn() -> Any:
        return element if as_tensors else tf.data.Dataset.from_tensors(element)

    feed = by_rows(input_fn, num_replicas=2, batch_size=4)
    share = pull(feed, iter(feed.dataset))[0]
    as_lists = tf.nest.map_structure(lambda t: t.numpy().tolist(), share.features)
    assert str(as_lists) == str(features)
    assert (share.labels is None) == (labels is None) == (feed.replica_spec[1] is None)
    if labels is not None:
        assert tf.nest.map_structure(lambda t: t.numpy().tolist(), share.labels) == labels


@pytest.mark.parametrize("rows, replicas", [(1, 2), (3, 2), (4, 2), (5, 3)])
def test_sparse_and_ragged_tensors_are_divided_by_row(rows: int, replicas: int) -> None:
    dense = np.arange(rows * 4).reshape(rows, 4) % 3
    ragged = tf.ragged.constant([[i] * (i % 3) for i in range(rows)], dtype=tf.int64)

    def input_fn() -> Any:
        slices = tf.data.Dataset.from_tensor_slices({"s": tf.sparse.from_dense(dense), "r": ragged})
        return slices.batch(rows)

    feed = by_rows(input_fn, num_replicas=replicas, batch_size=rows)
    shares = pull(feed, iter(feed.dataset))
    assert [int(share.count) for share in shares] == EXPECTED_ROWS[rows, replicas]
    start = 0
    for share in shares:
        count = int(share.count)
        first = start if count else 0
        expected = slice(first, first + max(count, 1))
        np.testing.assert_array_equal(tf.sparse.to_dense(share.features["s"]), dense[expected])
        assert share.features["r"].to_list() == ragged[expected].to_list()
        start += count
    assert isinstance(feed.replica_spec[0]["s"], tf.SparseTensorSpec)
    assert isinstance(feed.replica_spec[0]["r"], tf.RaggedTensorSpec)


def test_tensors_are_one_batch_in_eval_and_every_batch_in_train(
    caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    def input_fn() -> Any:
        return {"id": tf.range(22)}, tf.range(22)

    assert feed_of(input_fn).remaining_steps() == 1
    assert not caplog.records
    assert feed_of(input_fn, mode="train").remaining_steps() == math.inf
    messages.logged(caplog)


# Batches taken in turn.


def test_without_a_batch_size_the_replicas_take_batches_in_turn() -> None:
    feed = feed_of(lambda: examples(10).batch(2), num_replicas=2)
    got = [[(ids(share), int(share.count)) for share in shares] for shares in steps(feed)]
    assert got == [[([0, 1], 2), ([2, 3], 2)], [([4, 5], 2), ([6, 7], 2)], [([8, 9], 2), ([], 0)]]
    assert feed.remaining_steps() == 3 and feed.global_batch_size is None


def test_at_the_end_of_data_a_replica_gets_the_first_element_of_the_step_and_count_0() -> None:
    feed = feed_of(lambda: examples(7).batch(2), num_replicas=3)
    last = steps(feed)[-1]
    assert [int(share.count) for share in last] == [1, 0, 0]
    assert [share.features["id"].numpy().tolist() for share in last] == [[6], [6], [6]]


def test_data_without_end_is_taken_in_turn_without_a_test() -> None:
    feed = feed_of(lambda: examples(3).batch(1).repeat(), mode="train", num_replicas=2)
    assert feed.remaining_steps() == math.inf
    iterator = iter(feed.dataset)

    @tf.function
    def step() -> Any:
        return feed.division.replica_batches(next(iterator), iterator)[0]

    assert [[ids(share) for share in step()] for _ in range(3)] == [[[0], [1]], [[2], [0]], [[1], [2]]]
    types = {op.type for op in step.get_concrete_function().graph.get_operations()}
    assert "If" not in types and "StatelessIf" not in types


def test_sparse_batches_are_taken_in_turn_to_the_odd_end() -> None:
    dense = np.eye(5, dtype=np.int64)

    def input_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(dense)).batch(2)

    feed = feed_of(input_fn, num_replicas=2)
    iterator = iter(feed.dataset)
    first, second = pull(feed, iterator), pull(feed, iterator)
    assert [int(share.count) for share in first + second] == [2, 2, 1, 0]
    np.testing.assert_array_equal(tf.sparse.to_dense(second[0].features), dense[4:])


def test_workers_take_batches_in_turn_and_agree_on_the_end() -> None:
    feeds = [
        feed_of(lambda: examples(9).batch(1), "train", 2, worker_index=worker, num_workers=2) for worker in range(2)
    ]
    got = [[[ids(share) for share in shares] for shares in steps(feed)] for feed in feeds]
    assert got == [[[[0], [1]], [[4], [5]], [[8], []]], [[[2], [3]], [[6], [7]], [[], []]]]
    assert [feed.remaining_steps() for feed in feeds] == [3, 3]


def test_a_batch_of_scalars_counts_as_one_example() -> None:
    feed = feed_of(lambda: tf.data.Dataset.range(3))
    assert int(pull(feed, iter(feed.dataset))[0].count) == 1


@pytest.mark.parametrize("element", [[1.0], ([1.0], None)])
def test_the_number_of_steps_is_known_of_features_alone_of_tf1(element: Any) -> None:
    dataset = tf.compat.v1.data.Dataset.from_tensors(element)
    assert feed_of(lambda: dataset.repeat()).remaining_steps() == math.inf
    assert feed_of(lambda: dataset.repeat(3)).remaining_steps() == 3


def test_the_number_of_steps_is_unknown_where_the_cardinality_is() -> None:
    assert feed_of(lambda: examples(9).filter(lambda *_: True).batch(1)).remaining_steps() is None


# Resuming.


@pytest.mark.parametrize("batch_size, replicas", [(4, 1), (4, 2), (None, 2)])
def test_the_iterator_continues_mid_epoch_where_shares_left_it(
    tmp_path: Path, batch_size: int | None, replicas: int
) -> None:
    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        # Not shuffle().batch().repeat(), whose next order TensorFlow 2.21 may lose: see input_fns._batches.
        return examples(11).shuffle(11, seed=params["shuffle_seed"]).repeat().batch(4)

    def new_feed() -> InputPipeline:
        # Of its own dataset, as in a new process: the iterators of one dataset share the state of its shuffle.
        return feed_of(input_fn, mode="train", num_replicas=replicas, batch_size=batch_size, shuffle_seed=7)

    def run(feed: InputPipeline, iterator: Any, num_steps: int) -> list[list[int]]:
        @tf.function
        def step() -> Any:
            return feed.division.replica_batches(next(iterator), iterator)[0]

        return [[i for share in step() for i in ids(share)] for _ in range(num_steps)]

    feed = new_feed()
    straight = run(feed, iter(feed.dataset), 12)
    feed = new_feed()
    iterator = iter(feed.dataset)
    before = run(feed, iterator, 5)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "input"))
    feed = new_feed()
    resumed = iter(feed.dataset)
    tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
    assert before + run(feed, resumed, 7) == straight


# How the function is called.


def returning(seen: dict[str, Any], **arguments: Any) -> tf.data.Dataset:
    seen.update(arguments)
    return examples(4).batch(2)


def test_a_function_gets_what_it_declares() -> None:
    seen: dict[str, Any] = {}
    config = object()
    functions = [
        (lambda: returning(seen), set()),
        (lambda mode: returning(seen, mode=mode), {"mode"}),
        (lambda params, config: returning(seen, params=params, config=config), {"params", "config"}),
        (lambda input_context=None, *, mode=None: returning(seen, i=input_context, mode=mode), {"i", "mode"}),
        (lambda **kwargs: returning(seen, **kwargs), {"mode", "params", "config", "input_context"}),
        (lambda mode, other=3, *args: returning(seen, mode=mode, other=other), {"mode", "other"}),
    ]
    for fn, names in functions:
        seen.clear()
        feed_of(fn, params={"width": 3}, config=config)
        assert set(seen) == names
        assert seen.get("mode", "eval") == "eval"
        assert seen.get("config", config) is config
        assert seen.get("other", 3) == 3
        assert seen.get("params", {"width": 3})["width"] == 3


def test_partials_callable_objects_and_bound_methods_are_called_by_their_signature() -> None:
    seen: dict[str, Any] = {}

    class Source:
        def __call__(self, mode: str) -> tf.data.Dataset:
            return returning(seen, mode=mode)

        def method(self, params: Mapping[str, Any]) -> tf.data.Dataset:
            return returning(seen, params=params)

    def fn(path: str, mode: str, params: Mapping[str, Any]) -> tf.data.Dataset:
        return returning(seen, path=path, mode=mode, params=params)

    feed_of(Source())
    assert seen == {"mode": "eval"}
    seen.clear()
    feed_of(Source().method, params={"a": 1})
    assert dict(seen["params"]) == {"a": 1} and "mode" not in seen
    feed_of(functools.partial(fn, "x.csv"), params={"a": 1})
    assert seen["path"] == "x.csv" and seen["mode"] == "eval"
    feed_of(functools.partial(fn, path="y.csv", params={"own": 1}), params={"a": 1})
    assert seen["path"] == "y.csv" and seen["params"] == {"own": 1}  # what is bound is not overridden
    feed_of(functools.partial(functools.partial(fn, "z.csv"), mode="mine"))
    assert seen["path"] == "z.csv" and seen["mode"] == "mine"


def test_params_are_the_inputs_own_or_the_estimators_with_batch_size_and_seed() -> None:
    seen: dict[str, Any] = {}

    def fn(params: Any) -> tf.data.Dataset:
        return returning(seen, params=params)

    feed_of(fn, params={"width": 3, "batch_size": 9})
    assert dict(seen["params"]) == {"width": 3, "batch_size": 9}
    feed_of(fn, params={"width": 3, "batch_size": 9}, batch_size=2, shuffle_seed=5)
    assert dict(seen["params"]) == {"width": 3, "batch_size": 2, "shuffle_seed": 5}
    assert seen["params"].batch_size == 2
    build_input_pipeline(Input(fn, params={"own": 1}, batch_size=2), "eval", WorkerPlace(), params={"width": 3})
    assert dict(seen["params"]) == {"own": 1, "batch_size": 2, "shuffle_seed": None}


@pytest.mark.parametrize("mode", ["train", "eval", "infer"])
def test_params_of_an_input_have_a_shuffle_seed_in_every_mode(mode: str) -> None:
    seen: dict[str, Any] = {}

    def fn(params: Any) -> tf.data.Dataset:
        return returning(seen, seed=params.shuffle_seed)

    build_input_pipeline(Input(fn, params={}), mode, WorkerPlace())
    assert seen["seed"] is None
    build_input_pipeline(Input(fn, params={"shuffle_seed": 3}), mode, WorkerPlace())
    assert seen["seed"] == 3
    build_input_pipeline(Input(fn, params={}, shuffle_seed=5), mode, WorkerPlace())
    assert seen["seed"] == 5


def test_a_bare_function_is_an_input_without_a_batch_size() -> None:
    feed = build_input_pipeline(lambda: examples(4).batch(2), "eval", WorkerPlace(), params={})
    assert (feed.global_batch_size, feed.shard, feed.num_replicas) == (None, "examples", 1)


# Who divides the data among workers.


def sharding(params: Mapping[str, Any], input_context: tf.distribute.InputContext) -> tf.data.Dataset:
    shard = examples(16).shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return shard.batch(params["batch_size"])


def test_a_context_remembers_whether_the_place_among_pipelines_was_read(messages: Messages) -> None:
    context = InputContext(3, 1, 6)
    assert isinstance(context, tf.distribute.InputContext)
    assert context.num_replicas_in_sync == 6 and context.get_per_replica_batch_size(12) == 2
    messages.same("str", str(context))
    assert not context.was_sharded
    assert context.input_pipeline_id == 1 and context.was_sharded
    context = InputContext(3, 1, 6)
    assert context.num_input_pipelines == 3 and context.was_sharded


def test_auto_leaves_the_division_to_a_function_that_read_its_place(messages: Messages) -> None:
    got = []
    for worker in range(2):
        feed = feed_of(sharding, mode="train", num_replicas=2, batch_size=8, worker_index=worker, num_workers=2)
        assert feed.shard == "input_fn" and feed.global_batch_size == 8
        messages.same("reason", feed.reason)
        got.append([ids(share) for share in pull(feed, iter(feed.dataset))])
    assert got == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]  # two a replica


def test_auto_in_one_process_divides_by_rows_whatever_the_function_read(messages: Messages) -> None:
    feed = by_rows(sharding, num_replicas=2, batch_size=8)
    assert feed.shard == "examples"
    messages.same("reason", feed.reason)
    assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_context_declared_for_the_batch_size_alone_does_not_divide_the_data() -> None:
    sizes = []

    def fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        sizes.append(input_context.get_per_replica_batch_size(8))
        return examples(16).batch(sizes[-1])

    feed = feed_of(fn, mode="train", num_replicas=2, batch_size=8, worker_index=1, num_workers=2)
    assert feed.shard == "examples" and sizes == [8]
    assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[4, 5], [6, 7]]


def test_files_gives_the_function_its_place_and_per_replica_batches() -> None:
    feed = feed_of(sharding, mode="train", num_replicas=2, batch_size=8, worker_index=1, num_workers=2, shard="files")
    assert (feed.shard, feed.reason) == ("files", "shard=files")
    assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[1, 3], [5, 7]]


def test_examples_hides_the_other_pipelines() -> None:
    feed = feed_of(
        sharding, mode="train", num_replicas=1, batch_size=8, worker_index=1, num_workers=2, shard="examples"
    )
    assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[4, 5, 6, 7]]


def test_off_gives_every_worker_all_of_the_data() -> None:
    for worker in range(2):
        feed = feed_of(
            batched(16), mode="train", num_replicas=2, batch_size=8, worker_index=worker, num_workers=2, shard="off"
        )
        assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[0, 1], [2, 3]]
        assert feed.remaining_steps() == 4


@pytest.mark.parametrize("batch_size", [2, None])
def test_in_evaluation_whole_batches_are_dealt_to_the_replicas_of_all_workers(batch_size: int | None) -> None:
    feeds = [
        feed_of(lambda: examples(9).batch(2), num_replicas=2, batch_size=batch_size, worker_index=worker, num_workers=2)
        for worker in range(2)
    ]
    got = [[[ids(share) for share in shares] for shares in steps(feed)] for feed in feeds]
    assert got == [[[[0, 1], [2, 3]], [[8], []]], [[[4, 5], [6, 7]]]]


def test_every_way_of_sharding_gives_an_evaluation_its_whole_batch_size() -> None:
    for shard in ("input_fn", "files"):
        feed = feed_of(sharding, num_replicas=2, batch_size=3, worker_index=1, num_workers=2, shard=shard)
        assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[1, 3, 5], [7, 9, 11]]
    for shard in ("off", "examples"):
        feed = feed_of(batched(16), num_replicas=2, batch_size=3, worker_index=0, num_workers=2, shard=shard)
        assert [ids(share) for share in pull(feed, iter(feed.dataset))] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "fn, shard, of_workers",
    [
        (batched(16), "examples", [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]]),
        ("sharding", "input_fn", [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7]]),
    ],
)
def test_a_number_of_batches_is_that_of_the_whole_input(fn: Any, shard: str, of_workers: list[list[int]]) -> None:
    for worker in range(2):
        source = Input(sharding if fn == "sharding" else fn, params={}, batch_size=2, shard=shard)
        feed = build_input_pipeline(source, "eval", WorkerPlace(2, worker, 2), num_batches=5)
        assert [i for shares in steps(feed) for share in shares for i in ids(share)] == of_workers[worker]


def test_a_function_that_should_divide_and_does_not_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        feed_of(batched(16), num_replicas=1, batch_size=8, num_workers=2, shard="input_fn")


# What is refused.


@pytest.mark.parametrize("size, replicas, workers", [(100, 4, 2), (7, 2, 1), (1, 2, 1)])
def test_a_train_batch_that_does_not_divide_is_refused(
    size: int, replicas: int, workers: int, messages: Messages
) -> None:
    with messages.raised(ValueError):
        feed_of(batched(200), mode="train", num_replicas=replicas, num_workers=workers, batch_size=size)


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_other_modes_take_any_batch_size(mode: str) -> None:
    assert feed_of(batched(200), mode=mode, num_replicas=2, batch_size=7).global_batch_size == 7


def some_input_fn(result: Any) -> Any:
    return result


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ((1, 2, 3, 4), ValueError), ([1], ValueError), (None, ValueError), (generator(), TypeError),
        (generator, ValueError),
    ],
    ids=["tuple of 4", "list of 1", "None", "generator", "function"],
)  # fmt: skip
def test_what_is_not_data_is_refused(result: Any, error: type[Exception], messages: Messages) -> None:
    with messages.raised(error):
        feed_of(functools.partial(some_input_fn, result))


def test_a_dataset_of_four_parts_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        feed_of(functools.partial(some_input_fn, tf.data.Dataset.from_tensors((1, 2, 3, 4))))


@pytest.mark.parametrize("labels", [np.arange(5.0), None], ids=["labels", "no labels"])
@pytest.mark.parametrize("weights", [np.arange(5.0), None], ids=["weights", "no weights"])
def test_a_third_part_is_the_weight_of_each_example(labels: Any, weights: Any) -> None:
    data = tf.data.Dataset.from_tensors((np.arange(5.0), labels, weights))
    feed = feed_of(lambda: data.unbatch().batch(4), mode="eval")
    assert [name for name, _ in tensors(feed.dataset.element_spec)] == [
        "features",
        *["labels"] * (labels is not None),
        *["sample_weight"] * (weights is not None),
    ]
    (_, weighted), _ = feed.dataset
    for found, given in zip(weighted, (labels, weights), strict=True):
        assert (found is None) if given is None else (found.numpy().tolist() == given[:4].tolist())


def test_a_weight_that_is_no_row_per_example_is_refused(messages: Messages) -> None:
    data = (np.zeros([4, 2]), np.zeros([4]), np.zeros([3]))
    with messages.raised(ValueError):
        feed_of(functools.partial(some_input_fn, data), batch_size=4)


def test_an_iterator_is_refused(messages: Messages) -> None:
    with messages.raised(TypeError):
        feed_of(functools.partial(some_input_fn, iter(tf.data.Dataset.range(3))))


def test_an_object_that_does_not_become_tensors_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        feed_of(functools.partial(some_input_fn, object()))


def test_an_input_without_tensors_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        feed_of(functools.partial(some_input_fn, {}))


def test_a_dataset_that_is_not_batched_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        feed_of(functools.partial(some_input_fn, examples(4)), batch_size=2)


def test_a_function_that_ignores_the_batch_size_is_refused_in_train(messages: Messages) -> None:
    fn = functools.partial(some_input_fn, examples(40).batch(4, drop_remainder=True))
    with messages.raised(ValueError):
        feed_of(fn, mode="train", batch_size=8)
    assert feed_of(fn, mode="eval", batch_size=8).remaining_steps() == 10


def test_tensors_of_other_rows_than_the_batch_size_are_refused_in_train(messages: Messages) -> None:
    arrays = ({"x": np.arange(100.0)[:, None]}, np.arange(100))
    fn = functools.partial(some_input_fn, arrays)
    with messages.raised(ValueError):
        feed_of(fn, mode="train", batch_size=10)
    for size in (100, None):
        assert feed_of(fn, mode="train", batch_size=size).element_spec[1].shape == [100]
    assert feed_of(fn, mode="eval", batch_size=10).remaining_steps() == 1


def test_parts_of_different_sizes_are_refused(messages: Messages) -> None:
    dataset = tf.data.Dataset.from_tensors(({"a": [1, 2, 3]}, [1, 2]))
    with messages.raised(ValueError):
        feed_of(functools.partial(some_input_fn, dataset), batch_size=3)


def test_an_argument_that_the_runner_does_not_give_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        feed_of(some_input_fn)


def test_an_error_says_in_which_function_and_keeps_its_type(messages: Messages) -> None:
    def fails(params: Mapping[str, Any]) -> None:
        raise KeyError("x")

    with messages.raised(KeyError) as error:
        feed_of(fails, mode="train")
    (note,) = error.value.__notes__
    messages.same("note", note)


@pytest.mark.parametrize(
    "options", [{"shard": "rows"}, {"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": True}], ids=str
)
def test_an_input_checks_its_settings(options: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        Input(some_input_fn, **options)
