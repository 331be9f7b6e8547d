"""What the cluster of parameter_server_cases.py trains and evaluates; each case returns plain values."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Hook, Input, ModeKeys, RunConfig
from runner.distribute.errors import PeerLost
from runner.distribute.strategy import build_parameter_server
from runner.export.receivers import build_raw_serving_input_receiver_fn
from runner.programs.ps_programs import Coordinator
from runner.tf_private.tensor_bundle import read_entries
from tests.support import line
from tests.support.journal import events_in, journal_of
from tests.support.models import STYLES, data, train_input
from tests.support.parameter_server_cases import Servers, after

v1 = tf.compat.v1
read_events = v1.train.summary_iterator


class Surroundings:
    """The cluster, and a folder for each case."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers, self.folder = servers, folder
        self.strategy = build_parameter_server(servers.tasks, "fixed_shards")
        self.logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.logged.append(record.getMessage())  # type: ignore[method-assign]
        for name in ("runner", "tensorflow"):
            logging.getLogger(name).addHandler(handler)
        logging.getLogger("runner").setLevel(logging.INFO)
        self.requests: list[int] = []
        run = Coordinator.run

        def counted(coordinator: Coordinator, function: Any, all_arguments: Any) -> tuple[list[Any], list[int]]:
            self.requests.append(len(all_arguments))
            return run(coordinator, function, all_arguments)

        mock.patch.object(Coordinator, "run", counted).start()

    def estimator(self, model_fn: Any, name: str, **config: Any) -> Estimator:
        return Estimator(model_fn, self.folder / name, RunConfig(train_distribute=self.strategy, **config))


def alone(around: Surroundings, model_fn: Any, name: str, **config: Any) -> Estimator:
    return Estimator(model_fn, around.folder / name, RunConfig(**config))


def difference(one: Estimator, other: Estimator) -> dict[str, float]:
    """Name -> largest |a - b| / largest |b| of each variable."""
    names = one.get_variable_names()
    assert names == other.get_variable_names(), (names, other.get_variable_names())
    found = {}
    for name in names:
        a, b = one.get_variable_value(name), other.get_variable_value(name)
        found[name] = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30)) if np.any(a != b) else 0.0
    return found


def eval_input(batch_size: int = 8) -> Input:
    features, labels = data()
    return Input(lambda: tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch_size))


def same_as_alone(style: str) -> Any:
    """Both workers take steps, one after the other: a loop of one step is one request. Weights begin with the same
    values: those of a checkpoint, since a divided variable is initialised part by part."""

    def case(around: Surroundings) -> Any:
        source = train_input(8)
        expected = alone(around, STYLES[style], f"alone-{style}", steps_per_loop=1).train(source, steps=3)
        first = expected.latest_checkpoint()
        warm = around.estimator(STYLES[style], f"served-{style}", steps_per_loop=1)
        copy_checkpoint(first, around.folder / f"served-{style}")
        warm.train(source, steps=20)
        expected.train(source, steps=20)
        spec = eval_input()
        return {
            "difference": difference(warm, expected),
            "metrics": [one.evaluate(spec) for one in (warm, expected)],
            "predictions": [
                np.asarray([one["y"] if isinstance(one, dict) else one for one in each.predict(spec)]).ravel().tolist()
                for each in (warm, expected)
            ],
        }

    return case


def copy_checkpoint(path: str | None, folder: Path) -> None:
    assert path is not None
    folder.mkdir()
    for file in [*Path(path).parent.glob(f"{Path(path).name}.*"), Path(path).parent / "checkpoint"]:
        (folder / file.name).write_bytes(file.read_bytes())


def counting(num_examples: int) -> Any:
    """A model whose `seen` counts how often each example was trained on."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        seen = v1.get_variable("seen", [num_examples], tf.float32, v1.zeros_initializer(), trainable=False)
        weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
        loss = tf.square(weight - 1.0)
        step = v1.train.get_or_create_global_step()
        count = seen.scatter_add(tf.IndexedSlices(tf.ones_like(features, tf.float32), features))
        train_op = tf.group(count, v1.train.GradientDescentOptimizer(0.01).minimize(loss, step))
        return EstimatorSpec(mode, loss=loss, train_op=train_op, predictions=weight)

    return model_fn


def numbers(num_examples: int, shuffle: bool = True) -> tf.data.Dataset:
    dataset = tf.data.Dataset.range(num_examples)
    return dataset.shuffle(num_examples) if shuffle else dataset


def overtaking(num_examples: int) -> tf.data.Dataset:
    """Numbers of which each third takes longer; later ones overtake it, by an argument and by an option."""

    def work(number: tf.Tensor) -> tf.Tensor:
        size = tf.where(number % 3 == 0, 200, 2)
        matrix = tf.ones([size, size])
        return number + tf.cast(tf.reduce_sum(matrix @ matrix) * 0.0, tf.int64)

    options = tf.data.Options()
    options.deterministic = False
    by_argument = tf.data.Dataset.range(num_examples).map(work, num_parallel_calls=4, deterministic=False)
    return by_argument.map(work, num_parallel_calls=4).with_options(options)


def seen(estimator: Estimator) -> list[list[float]]:
    """How many examples were seen 0, 1, 2, .. times, as (times, examples) pairs."""
    times, examples = np.unique(estimator.get_variable_value("seen"), return_counts=True)
    return [[float(a), float(b)] for a, b in zip(times, examples, strict=True)]


def step_of(estimator: Estimator) -> int:
    return int(estimator.get_variable_value("global_step"))


# --- cases --------------------------------------------------------------------------------------------------------


def epochs(around: Surroundings) -> Any:
    """Each example once an epoch, whatever is known of the length, and when a second call goes on."""
    found = {}
    shuffled_anywhere = numbers(403)  # outside of an input function, so its shuffle gets no seed
    sources = {
        "known": lambda: numbers(403).batch(8),
        "unknown": lambda: numbers(403).filter(lambda number: number >= 0).batch(8),
        "python": lambda: tf.data.Dataset.from_generator(
            lambda: range(403), output_signature=tf.TensorSpec([], tf.int64)
        ).batch(8),
        "unordered": lambda: overtaking(403).batch(8),
        "unseeded": lambda: shuffled_anywhere.batch(8),
    }
    for name, source in sources.items():
        estimator = around.estimator(counting(403), f"epochs-{name}", steps_per_loop=12)
        estimator.train(source, max_epochs=2)
        found[name] = [seen(estimator), step_of(estimator)]
    first = around.estimator(counting(403), "epochs-resumed", steps_per_loop=7)
    first.train(sources["known"], steps=20)
    before = [seen(first), step_of(first)]
    again = around.estimator(counting(403), "epochs-resumed", steps_per_loop=7)
    again.train(sources["known"])
    return {**found, "before": before, "resumed": [seen(again), step_of(again)]}


def own_parts(around: Surroundings) -> Any:
    """shard=input_fn: workers divide the data; the parts are not of the same length."""

    def input_fn(input_context: Any, params: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(300)
        first = tf.constant(200, tf.int64)
        mine = dataset.take(first) if input_context.input_pipeline_id == 0 else dataset.skip(first)
        assert input_context.num_input_pipelines == NUM_WORKERS
        return mine.batch(params["batch_size"])

    class Logs(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            run.log({"mine": float(result.last_step)})

    estimator = around.estimator(counting(300), "own-parts", steps_per_loop=9)
    estimator.train(Input(input_fn, batch_size=8, shard="input_fn", params={}), hooks=[Logs()])
    logged = [(one.step, one.value) for one in line.read_events(estimator.model_dir) if one.tag == "train/mine"]
    return [seen(estimator), step_of(estimator), logged]


def counters(around: Surroundings) -> Any:
    """Two workers at once: no update is lost to the count, and a schedule goes by it."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = keras.layers.Dense(1)(features)
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 100, 0.5)
        loss = tf.square(predictions - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.Adam(rate), predictions=predictions)

    estimator = around.estimator(model_fn, "counters")
    before = alone(around, model_fn, "counters-alone").train(train_input(8), steps=1).evaluate(eval_input())["loss"]
    run = estimator.train_run(train_input(8), steps=600)
    assert run is not None
    return {
        "global_step": step_of(estimator),
        "iterations": int(estimator.get_variable_value("adam/iteration")),
        "examples": run.examples,
        "before": before,
        "after": estimator.evaluate(eval_input())["loss"],
    }


OPTIONS: dict[str, Any] = {
    "gradient_accumulation": 2,
    "clip_global_norm": 0.5,
    "warmup_steps": 10,
    "ema_decay": 0.9,
}
"""Each changes the numbers of the others."""


def options(around: Surroundings) -> Any:
    """What an update can be, against a single process; and what is refused."""
    found: dict[str, Any] = {}
    source = train_input(8)
    whole = alone(around, summarised, "options-alone", steps_per_loop=1, **OPTIONS).train(source, steps=3)
    copy_checkpoint(whole.latest_checkpoint(), around.folder / "options")
    served = around.estimator(summarised, "options", steps_per_loop=1, save_summary_steps=5, **OPTIONS)
    served.train(source, steps=10)
    found["difference"] = difference(served, whole.train(source, steps=10))
    for name, config in {"nan": {"nan": "rollback"}, "precision": {"precision": "mixed_float16"}}.items():
        try:
            around.estimator(STYLES["native"], f"refused-{name}", **config).train(source, steps=1)
        except ValueError as error:
            found[name] = str(error)
    averaged = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3)
    try:
        around.estimator(embedding(lambda: averaged, "keras"), "refused-ema").train(embedding_input, steps=1)
    except ValueError as error:
        found["ema_overwrite_frequency"] = str(error)
    events = [event for file in (around.folder / "options").glob("events*") for event in read_events(str(file))]
    found["summaries"] = sorted({value.tag for event in events for value in event.summary.value})
    return found


def summarised(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Summaries of both kinds, and a table that each worker looks up in."""
    keys, values = tf.constant([0, 1], tf.int64), tf.constant([1.0, 0.5])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1.0)
    predictions = keras.layers.Dense(1)(features) * table.lookup(tf.constant([1], tf.int64))
    tf.summary.scalar("new", tf.reduce_mean(predictions))
    v1.summary.scalar("old", tf.reduce_mean(predictions))
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.05), predictions=predictions)


EMBEDDING = (50, 3)


def embedding(optimizer: Any, lookup: str) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        if lookup == "keras":
            rows = keras.layers.Embedding(*EMBEDDING, name="table")(features)
        else:
            cut = v1.fixed_size_partitioner(2) if lookup == "cut" else None
            table = v1.get_variable("table", EMBEDDING, partitioner=cut)
            rows = v1.nn.embedding_lookup(table, features)  # says "mod" where nobody says anything
        predictions = tf.reduce_sum(rows, [1, 2])
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        loss = tf.square(predictions - labels)
        if lookup in ("classic", "cut"):
            loss = tf.reduce_mean(loss)
            train_op = optimizer().minimize(loss, v1.train.get_or_create_global_step())
            return EstimatorSpec(mode, loss=loss, train_op=train_op)
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer())

    return model_fn


def embedding_input() -> tf.data.Dataset:
    rng = np.random.RandomState(3)
    features = rng.randint(0, EMBEDDING[0], [40, 2])
    labels = features.sum(1).astype("float32") / 10
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)


def not_finite(around: Surroundings) -> Any:
    """A row of an embedding in two parts, of which the loss knows nothing, becomes NaN."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = embedding(lambda: v1.train.GradientDescentOptimizer(0.01), "classic")(features, labels, mode)
        seen = v1.get_variable("seen", EMBEDDING, initializer=v1.zeros_initializer(), trainable=False)
        rows = tf.IndexedSlices(tf.fill([1, EMBEDDING[1]], np.nan), [EMBEDDING[0] - 1])
        return spec._replace(train_op=tf.group(spec.train_op, seen.scatter_update(rows)))

    estimator = around.estimator(model_fn, "not_finite", steps_per_loop=1, save_checkpoints_steps=4)
    try:
        estimator.train(lambda: embedding_input().repeat(), max_steps=8)
    except v1.train.NanLossDuringTrainingError as error:
        return {"error": str(error), "step": int(estimator.get_variable_value("global_step"))}
    return {}


OPTIMIZERS: dict[str, tuple[Any, str]] = {
    "sgd": (lambda: keras.optimizers.SGD(0.1, momentum=0.5), "keras"),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.1), "keras"),
    "adam": (lambda: keras.optimizers.Adam(0.01), "keras"),
    "use_ema": (lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "keras"),
    "v1_adagrad": (lambda: v1.train.AdagradOptimizer(0.1), "classic"),
    "v1_adam": (lambda: v1.train.AdamOptimizer(0.01), "keras"),
}


QUICK_OPTIMIZERS = ("sgd", "v1_adam")


def divided(around: Surroundings) -> Any:
    return divided_with(around, QUICK_OPTIMIZERS)


def divided_more(around: Surroundings) -> Any:
    return divided_with(around, [name for name in OPTIMIZERS if name not in QUICK_OPTIMIZERS])


def divided_with(around: Surroundings, optimizers: Sequence[str]) -> Any:
    """An embedding in two parts trains as a whole one does; its checkpoint is one of a whole one, and back."""
    found: dict[str, Any] = {}
    for name in optimizers:
        optimizer, lookup = OPTIMIZERS[name]
        model_fn = embedding(optimizer, lookup)
        source = lambda: embedding_input().repeat()  # noqa: E731
        expected = alone(around, model_fn, f"whole-{name}", steps_per_loop=1).train(source, steps=2)
        copy_checkpoint(expected.latest_checkpoint(), around.folder / f"divided-{name}")
        parts = around.estimator(
            model_fn, f"divided-{name}", steps_per_loop=1, ema_decay=0.9 if name == "sgd" else None
        )
        parts.train(source, max_steps=15)
        if name == "sgd":
            expected = alone(around, model_fn, f"whole-{name}", steps_per_loop=1, ema_decay=0.9)
        expected.train(source, max_steps=15)
        found[name] = difference(parts, expected)
        if name == "use_ema":
            losses = [one.evaluate(embedding_input)["loss"] for one in (parts, expected)]
            found[name]["loss"] = abs(losses[0] - losses[1])
        if name == "sgd":
            reader = alone(around, model_fn, f"divided-{name}", ema_decay=0.9)
            found["metrics"] = [one.evaluate(embedding_input) for one in (parts, reader, expected)]
            found["shapes"] = tf.train.load_checkpoint(
                str(around.folder / f"divided-{name}")
            ).get_variable_to_shape_map()
            reader.train(source, max_steps=20)
            found["on"] = step_of(reader)
    return found


def cut_by_v1(around: Surroundings) -> Any:
    """A v1 partitioner in model_fn, with a v1 optimizer that keeps slots of its parts; the strategy divides, or not."""
    model_fn = embedding(lambda: v1.train.AdamOptimizer(0.01), "cut")
    source = lambda: embedding_input().repeat()  # noqa: E731
    found: dict[str, Any] = {}
    for divides in (False, True):
        name = f"cut-{divides}"
        expected = alone(around, model_fn, f"{name}-alone", steps_per_loop=1).train(source, steps=2)
        copy_checkpoint(expected.latest_checkpoint(), around.folder / name)
        partitioner = around.strategy.extended._variable_partitioner if divides else None
        with mock.patch.object(around.strategy.extended, "_variable_partitioner", partitioner):
            parts = around.estimator(model_fn, name, steps_per_loop=1)
            parts.train(source, max_steps=8)
            parts = around.estimator(model_fn, name, steps_per_loop=1)
            parts.train(source, max_steps=15)  # restored
        expected.train(source, max_steps=15)
        shapes = tf.train.load_checkpoint(str(around.folder / name)).get_variable_to_shape_map()
        found[str(divides)] = {"difference": difference(parts, expected), "shapes": shapes}
    return found


def large(around: Surroundings) -> Any:
    """An embedding that is larger than what the coordinator takes at its peak."""
    rows, columns = 1_500_000, 64

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        features = features["feature"] if isinstance(features, dict) else features  # a request has names
        vectors = keras.layers.Embedding(rows, columns, name="table")(features)
        predictions = keras.layers.Dense(1)(tf.reduce_mean(vectors, 1))
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        loss = tf.square(predictions - labels)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1), predictions=predictions)

    rng = np.random.RandomState(0)
    ids = rng.randint(0, rows, [64, 3])
    labels = rng.randn(64, 1).astype("float32")

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8).repeat(2)

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the peak from here on
    start = bytes_of("VmRSS")
    first = around.estimator(model_fn, "large", ema_decay=0.5).train(input_fn)
    second = around.estimator(model_fn, "large", ema_decay=0.5).train(input_fn, steps=4)  # verified, restored
    third = around.estimator(model_fn, "large", ema_decay=0.5)  # has no variables for the averages
    losses = [one.evaluate(input_fn)["loss"] for one in (second, third)]
    receiver = build_raw_serving_input_receiver_fn(tf.TensorSpec([None, 3], tf.int64))
    exported = Path(os.fsdecode(third.export_saved_model(around.folder / "large-export", receiver)))
    parts = (bytes_of("VmHWM") - start) / (rows // 2 * columns * 4)
    steps = [step_of(first), step_of(second)]
    return {"losses": losses, "steps": steps, "parts": parts, "rows": same_rows(third, exported)}


def same_rows(estimator: Estimator, exported: Path) -> list[bool]:
    """Whether the first row, two beside the border of the parts and the last are the averages of the checkpoint."""
    found = []
    for row in (0, 749_999, 750_000, 1_499_999):
        rows = f"1500000 64 {row},1:0,64"
        key = "table/embeddings"
        there = read_entries(str(exported / "variables" / "variables"), "CPU:0", [(key, rows, tf.float32)])
        key += "/ExponentialMovingAverage"
        here = read_entries(str(estimator.latest_checkpoint()), "CPU:0", [(key, rows, tf.float32)])
        found.append(bool(tf.reduce_all(tf.equal(there[0], here[0])) and tf.reduce_any(there[0] != 0)))
    return found


def bytes_of(what: str) -> int:
    """Return VmData, VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10


def worker_lost(around: Surroundings) -> Any:
    """A worker dies while it trains, and is started again at its address: training goes on without a restart."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Slow, in the graph: workers run no Python."""
        spec = counting(1200)(features, labels, mode)
        big = tf.random.stateless_uniform([700, 700], [1, 2])
        work = tf.reduce_sum(tf.linalg.matmul(big, big)) * 0.0
        return EstimatorSpec(mode, loss=spec.loss + work, train_op=tf.group(spec.train_op, work), predictions=work)

    estimator = around.estimator(model_fn, "worker-lost", steps_per_loop=50)
    around.logged.clear()

    class Kill(Hook):
        """Within the loop that follows step 100."""

        timer: Any = None

        def after_step(self, run: Any, result: Any) -> None:
            if result.last_step >= 100 and self.timer is None:
                self.timer = after(0.2, self.restart)

        def restart(self) -> None:
            around.servers.kill("worker", 1)
            around.servers.start("worker", 1)

    kill = Kill()
    estimator.train(lambda: numbers(1200).batch(4), max_epochs=1, hooks=[kill])
    kill.timer.join()
    found: dict[str, Any] = {"seen": seen(estimator), "global_step": step_of(estimator)}
    said = around.logged[:]
    estimator.train(lambda: numbers(1200).batch(4), steps=20)
    return {**found, "said": said, "later": step_of(estimator) - found["global_step"]}


def server_lost(around: Surroundings) -> Any:
    """A parameter server dies: the variables are gone, and the error says so."""
    estimator = around.estimator(counting(100), "server-lost", steps_per_loop=20)

    class Kill(Hook):
        at: float | None = None

        def after_step(self, run: Any, result: Any) -> None:
            if self.at is None:  # while the next steps are taken
                self.at = time.monotonic()
                after(0.3, lambda: around.servers.kill("ps", 1))

    kill = Kill()
    try:
        estimator.train(lambda: numbers(100).repeat().batch(4), steps=10**7, hooks=[kill])
    except PeerLost as error:
        return {"error": str(error), "secs": time.monotonic() - (kill.at or 0.0)}
    return {"error": "none"}


NUM_WORKERS = 2


def pairs(around: Surroundings) -> Any:
    """Trained with servers; evaluated with each strategy, and by a process that knows of no cluster."""
    local = "/job:chief/replica:0/task:0/device:CPU:0"
    one = {
        "default": "default",
        "one_device": tf.distribute.OneDeviceStrategy(local),
        "mirrored": tf.distribute.MirroredStrategy([local]),
        "central_storage": tf.distribute.experimental.CentralStorageStrategy([local], local),
    }
    estimator = around.estimator(STYLES["classic"], "pairs").train(train_input(8), steps=100)
    expected = alone(around, STYLES["classic"], "pairs").evaluate(eval_input())
    metrics, examples = {}, {}
    for kind, strategy in {"same": None, **one}.items():
        config = RunConfig(train_distribute=around.strategy, eval_distribute=strategy)
        file = around.folder / f"pairs-{kind}.jsonl"
        evaluator = Estimator(STYLES["classic"], around.folder / "pairs", config, journal=journal_of(file))
        metrics[kind] = evaluator.evaluate(eval_input())
        (event,) = events_in(file, "evaluated")
        examples[kind] = event["examples"]
    found = {"step": step_of(estimator), "expected": expected, "metrics": metrics}
    return {**found, "examples": examples, "num_examples": len(data()[1])}


CASES: dict[str, Callable[[Surroundings], Any]] = {
    **{f"same_{style}": same_as_alone(style) for style in STYLES},
    "epochs": epochs,
    "own_parts": own_parts,
    "counters": counters,
    "options": options,
    "divided": divided,
    "divided_more": divided_more,
    "not_finite": not_finite,
    "cut_by_v1": cut_by_v1,
    "large": large,
    "pairs": pairs,
    "worker_lost": worker_lost,
    "server_lost": server_lost,
}
SLOW_CASES = {name: CASES.pop(name) for name in ("same_keras_model", "divided_more", "pairs", "cut_by_v1", "large")}
"""For `make test-slow`, in a cluster of their own."""
