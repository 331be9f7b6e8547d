"""How cost grows with size: curves of time and memory, as tables, a JSON file and a picture.

    python benchmarks/growth.py [--rounds 3] [--curves layers variables ...] [--out FOLDER]

Each point is measured in its own process, so that its memory peak is its own. With several rounds a value is the
smallest, which other load on the machine disturbs least. Beside each value is its exponent: the slope of the curve from
the previous point on logarithmic axes. 1 is linear, 0 is flat; an exponent that stays above 1 deserves a question. Time
is CPU time of all threads and processes of a point unless its name says wall; memory is the peak of the resident set
(of several processes: the sum of their proportional shares).

The curves: layers and variables of a model, replicas of one process, processes of a cluster, metrics, examples of an
evaluation, bytes of a checkpoint, steps in MLflow, jobs of a sweep, and the sweep's own work on their results. Steps a
second over the rows of a table, over workers and over feature columns. Expected to be flat: the memory of each process
of a run over steps and evaluations, with one process and with several. The control plane of a cluster: supervisors of
tasks that do nothing, as threads that meet in a folder or a bucket, and as processes; the journals of so many tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import psutil
from _processes import environment
from _rounds import Times

MEGABYTE = 1 << 20
SWEEP_SETTINGS = ("tracking=none", "model.params.network=mlp", "run.progress=off", "train.max_steps=1")

Point = dict[str, float]
"""Name of a value, with its unit -> value."""


# --- one process ----------------------------------------------------------------------------------------------------


def layers(number: int) -> Point:
    """Measure a model of this many Dense layers of 16 units."""
    import keras
    import tensorflow as tf

    import runner

    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        hidden = features
        for _ in range(number):
            hidden = keras.layers.Dense(16)(hidden)
        loss = tf.reduce_mean(tf.math.squared_difference(keras.layers.Dense(1)(hidden), labels))
        return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(1e-6))

    return training(model_fn, steps=max(200, 20_000 // number))


def variables(number: int) -> Point:
    """Measure this many variables of 16 numbers, each trained separately."""
    import tensorflow as tf

    import runner

    v1 = tf.compat.v1

    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        values = [v1.get_variable(f"part_{index}", [16]) for index in range(number)]
        loss = tf.add_n([tf.reduce_sum(tf.square(value)) for value in values]) + 0.0 * tf.reduce_mean(features)
        optimizer = v1.train.GradientDescentOptimizer(1e-6)
        train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
        return runner.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return training(model_fn, steps=max(100, 20_000 // number))


def replicas(number: int) -> Point:
    """Measure the tiny MLP on this many virtual replicas in one process."""
    import runner
    from runner.distribute.strategy import split_cpu

    split_cpu(number)
    strategy = runner.build_strategy("mirrored", virtual_devices=number) if number > 1 else None
    from tiny_step import native_model_fn

    return training(native_model_fn, steps=2000, config=runner.RunConfig(train_distribute=strategy))


def metrics(number: int) -> Point:
    """Measure this many Keras metrics, which training updates as well as evaluation."""
    import keras
    import tensorflow as tf

    import runner

    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        predictions = keras.layers.Dense(1)(features)
        loss = tf.reduce_mean(tf.math.squared_difference(predictions, labels))
        found = {f"mean_{index}": keras.metrics.Mean() for index in range(number)}
        for index, metric in enumerate(found.values()):
            metric.update_state(predictions + float(index))
        return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(1e-6), eval_metric_ops=found)

    return training(model_fn, steps=1000, eval_batches=1000)


def training(model_fn: Callable[..., Any], *, steps: int, config: Any = None, eval_batches: int = 0) -> Point:
    """Measure the time to the first step, and a step in the steady state."""
    from _estimators import Stopwatch
    from tiny_step import input_fn

    import runner

    with tempfile.TemporaryDirectory() as folder:
        estimator = runner.Estimator(model_fn, folder, config)
        before = Times.now()
        estimator.train(input_fn, max_steps=1)
        built, watch = Times.now() - before, Stopwatch(min(100, steps // 10))
        estimator.train(input_fn, hooks=[watch], max_steps=1 + steps)
        point = {"to the first step, s": built.cpu, "a step, us": 1e6 * watch.spent.cpu / max(1, watch.steps)}
        if eval_batches:
            before = Times.now()
            estimator.evaluate(lambda: input_fn().take(eval_batches))
            point["evaluation of a batch, us"] = 1e6 * (Times.now() - before).cpu / eval_batches
    return point | {"peak, MB": peak()}


def examples(number: int) -> Point:
    """Measure an evaluation of this many examples, in batches of 1,000."""
    import tensorflow as tf
    from tiny_step import native_model_fn

    import runner

    def input_fn() -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(0, number, 1000)
        return numbers.map(lambda _: (tf.ones([1000, 16]), tf.ones([1000, 1])))

    with tempfile.TemporaryDirectory() as folder:
        estimator = runner.Estimator(native_model_fn, folder)
        estimator.train(lambda: input_fn().repeat(), max_steps=1)
        before = Times.now()
        estimator.evaluate(input_fn)
        return {"evaluation, s": (Times.now() - before).cpu, "peak, MB": peak()}


def checkpoint(megabytes: int) -> Point:
    """Measure saves, for which training waits, and a restore into a new model, with variables of at most 64 MB each."""
    import tensorflow as tf
    from tiny_step import input_fn as small_input_fn
    from tiny_step import native_model_fn

    import runner

    v1 = tf.compat.v1
    sizes = [min(64, megabytes - start) for start in range(0, megabytes, 64)]

    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        for index, size in enumerate(sizes):
            zeros = v1.zeros_initializer()
            v1.get_variable(f"part_{index}", [size * MEGABYTE // 4], initializer=zeros, trainable=False)
        step = v1.train.get_or_create_global_step()
        return runner.EstimatorSpec(mode, loss=tf.reduce_mean(features), train_op=step.assign_add(1))

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat()

    with tempfile.TemporaryDirectory() as folder:
        config = runner.RunConfig(save_checkpoints_asynchronously=False)
        runner.Estimator(native_model_fn, config=config).train(small_input_fn, max_steps=1)
        empty = peak()  # the baseline includes what any first training allocates
        before = Times.now()
        runner.Estimator(model_fn, folder, config).train(input_fn, max_steps=1)
        saved = Times.now() - before
        before = Times.now()
        runner.Estimator(model_fn, folder, config).train(input_fn, max_steps=2)  # restores it, and saves again
        again = Times.now() - before
        return {
            "build and two saves, wall s": saved.wall,
            "restore and a save, wall s": again.wall,
            "peak of both, times the variables": (peak() - empty) / megabytes,
        }


def mlflow_steps(number: int) -> Point:
    """Measure shipping this many steps, with one value each, from the journal to MLflow's sqlite, and the
    supervisor's end of a run.
    """
    shipping(10)  # warm up: import MLflow and create its tables
    empty = peak()
    shipped, ended = shipping(number)
    return {
        "shipping, s": shipped.cpu,
        "values a second, wall": number / shipped.wall,
        "the end, s": ended.cpu,
        "peak above that of 10, MB": peak() - empty,
    }


def shipping(number: int) -> tuple[Times, Times]:
    """Ship this many steps, and finish the journals of a run as its supervisor does."""
    from runner.config.schema import TrackingConfig
    from runner.tracking.journal import RUN_ENDED, RUN_STARTED, Journal, Journals, journal_path, note_of_run
    from runner.tracking.ship import Deadline, RunShipper
    from runner.tracking.shipping import write_settings
    from runner.tracking.summary import facts_in

    with tempfile.TemporaryDirectory() as folder:
        journals, journal = Journals(Path(folder)).mark(), Journal(journal_path(Path(folder)))
        for first in range(0, number, 1000):
            steps = range(first, min(number, first + 1000))
            journal.metrics_of_steps((step, {"train/loss": 1.0 / (1 + step)}) for step in steps)
        journal.close()
        note_of_run(Path(folder), RUN_STARTED, command="train", name="benchmark", params={}, tags={})
        write_settings(Path(folder), TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db"), {})
        shipper = RunShipper(Path(folder), "mlflow", Deadline())
        before = Times.now()
        shipper.ship()
        shipped, before = Times.now() - before, Times.now()
        facts_in(journals.events_of())
        journals.events("error")
        note_of_run(Path(folder), RUN_ENDED, status="finished", recorded="FINISHED", files=["learning_curves.png"])
        shipper.ship()  # this draws the curves
        return shipped, Times.now() - before


def job_results(number: int) -> Point:
    """Measure the work of a sweep itself, after each job and at the end, with this many jobs that take no time."""
    from runner.config.schema import SweepConfig, TrackingConfig
    from runner.launch.sweeps.ranking import JobResult
    from runner.launch.sweeps.sweep import Sweep

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        config: Any = SimpleNamespace(sweep=SweepConfig(), tracking=TrackingConfig(backend="none"))
        command: Any = SimpleNamespace(env=os.environ, start="now", argv=[], is_copy=False)
        sweep, before = Sweep(Path(folder), config, command), Times.now()
        for index in range(number):
            metrics = {f"eval/metric_{metric}": 1.0 / (1 + index) for metric in range(5)} | {"eval/loss": float(index)}
            job = Path(folder) / f"{index:016x}"
            write_summary(job, {"status": "finished", "metrics": metrics, "global_step": 1000})
            name = f"learning_rate={0.001 * (1 + index):g}, units={index % 7}"
            sweep.add(sweep.result_of(JobResult(name, job.name, "running")))
        added, before = Times.now() - before, Times.now()
        sweep.end(failed=False)
        ended = Times.now() - before
    return {"after a job, ms": 1e3 * added.cpu / number, "table and picture, s": ended.cpu, "peak, MB": peak()}


def write_summary(job: Path, summary: Mapping[str, Any]) -> None:
    job.mkdir()
    (job / "summary.json").write_text(json.dumps(summary))


def peak() -> float:
    """Return the peak resident set of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- commands -------------------------------------------------------------------------------------------------------


def processes(number: int) -> Point:
    """Measure workers of `strategy=multi_worker` on this host: the start, a step, and the end of a loop."""
    sizes = ["strategy=multi_worker", f"cluster.num_workers={number}", "input.train.batch_size=64", "command=train"]
    few, many = (command(*SWEEP_SETTINGS[:3], *sizes, f"train.max_steps={steps}") for steps in (20, 520))
    loops = command(*SWEEP_SETTINGS[:3], *sizes, "train.max_steps=520", "train.steps_per_loop=1")
    return {
        "start to the end of 20 steps, s": few["cpu"],
        "the same, wall s": few["wall"],
        "a step, us": 1e6 * (many["cpu"] - few["cpu"]) / 500,
        "a loop of one step, us": 1e6 * (loops["cpu"] - few["cpu"]) / 500,
        "peak of all, MB": many["peak"],
    }


def jobs(number: int) -> Point:
    """Measure a sweep of this many sequential jobs of one step each."""
    rates = ",".join(f"{0.001 * (1 + index):g}" for index in range(number))
    spent = command("-m", *SWEEP_SETTINGS, f"model.params.learning_rate={rates}")
    return {
        "a job, s": spent["cpu"] / number,
        "a job, wall s": spent["wall"] / number,
        "peak of all, MB": spent["peak"],
    }


TINY_RUN = (
    "model=custom", "model.fn=tiny_step.native_model_fn", "input=custom", "input.train.fn=tiny_step.input_fn",
    "input.eval.fn=tiny_step.input_fn", "eval.steps=10", "run.progress=off",
)  # fmt: skip


def steps(number: int) -> Point:
    """Measure the memory of each process over this many steps of the tiny MLP, tracked in sqlite."""
    return resident("command=train", f"train.max_steps={number}")


def evaluations(number: int) -> Point:
    """Measure memory over this many checkpoints, ten steps apart, each evaluated on ten batches and tracked in
    sqlite.
    """
    return resident(f"train.max_steps={10 * number}", "checkpoint.save_steps=10")


def gang_steps(number: int) -> Point:
    """Measure memory over this many steps of two workers, with an evaluator and a checkpoint every thousand steps."""
    gang = ("strategy=multi_worker", "cluster.num_workers=2", "cluster.evaluator=true")
    return resident(*gang, f"train.max_steps={number}", "checkpoint.save_steps=1000")


def server_steps(number: int) -> Point:
    """Measure memory over this many steps of two workers and a parameter server, evaluated every thousand steps."""
    servers = ("strategy=parameter_server", "cluster.num_workers=2", "cluster.num_ps=1")
    return resident(*servers, f"train.max_steps={number}", "checkpoint.save_steps=1000")


def resident(*overrides: str) -> Point:
    """Return the memory of each process of a run in MB: at the end, and the growth since the middle of its life."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+") as said:
        argv = [sys.executable, "-m", "runner", *TINY_RUN, *overrides]
        env = environment()
        env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
        begun = time.perf_counter()
        process = psutil.Popen(argv, env=env, stdout=said, stderr=said, cwd=folder)
        held: dict[int, list[float]] = {}
        while process.poll() is None:
            with suppress(psutil.Error):  # a process has just ended
                for one in (process, *process.children(recursive=True)):
                    held.setdefault(one.pid, []).append(one.memory_info().rss / MEGABYTE)
            time.sleep(0.25)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(argv)}: exit code {process.returncode}\n{said.read()[-3000:]}")
    long = {pid: sizes for pid, sizes in held.items() if len(sizes) >= 20}  # ignore short-lived processes
    grew = {pid: statistics.median(sizes[-len(sizes) // 10 :]) - sizes[len(sizes) // 2] for pid, sizes in long.items()}
    tasks = {pid for pid in long if pid != process.pid}
    return {
        "wall s": time.perf_counter() - begun,
        "supervisor, MB": max(held[process.pid]),
        "it grew by": grew[process.pid],
        "largest task, MB": max(max(long[pid]) for pid in tasks),
        "a task grew by": max(grew[pid] for pid in tasks),
    }


def command(*overrides: str) -> Point:
    """Measure a `python -m runner` command: wall-clock seconds, CPU seconds, and the peak memory of all its
    processes.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+") as said:
        argv = [sys.executable, "-m", "runner", *overrides]
        begun, before = time.perf_counter(), cpu_of_children()
        process = psutil.Popen(argv, env=environment(), stdout=said, stderr=said, cwd=folder)
        with memory_of_tree(process) as held:
            code = process.wait()
        if code:
            said.seek(0)
            sys.exit(f"{' '.join(argv)}: exit code {code}\n{said.read()[-3000:]}")
        spent = time.perf_counter() - begun
        return {"wall": spent, "cpu": cpu_of_children() - before, "peak": max(held, default=0.0)}


@contextmanager
def memory_of_tree(process: psutil.Popen) -> Iterator[list[float]]:
    """Yield a list that collects, twice a second, the memory of a process and its descendants in MB. Shared pages
    count once.
    """
    held: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            total = 0
            try:
                for one in (process, *process.children(recursive=True)):
                    total += one.memory_full_info().pss
            except psutil.Error:
                continue  # a process has just ended
            held.append(total / MEGABYTE)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- tables and columns ---------------------------------------------------------------------------------------------

BATCH = 2048
STRATEGIES = {
    "default": ["strategy=default"],
    "mirrored(2)": ["strategy=mirrored", "strategy.virtual_devices=2"],
    "multi_worker(2)": ["strategy=multi_worker", "cluster.num_workers=2"],
    "parameter_server(2)": ["strategy=parameter_server", "cluster.num_workers=2", "cluster.num_ps=1"],
}
TABLES = {"default": 1, "mirrored(2)": 2, "multi_worker(2)": 2, "parameter_server(2)": 1}
"""Strategy -> how many tables of all rows its processes hold."""


def rate(kind: str, batch_size: int, *overrides: str) -> float:
    """Return the steps a second of a command that trains `kind`, table or columns; NaN if memory does not suffice."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            *(sys.executable, "-m", "runner", "command=train", *SWEEP_SETTINGS[:1], "run.progress=off"),
            *(
                "model=custom",
                f"model.fn=growth_models.{kind}_model_fn",
                "input=custom",
                f"input.train.fn=growth_models.{kind}_input_fn",
            ),
            *(
                f"input.train.batch_size={batch_size}",
                "train.hooks=[{fn: growth_models.Rate}]",
                f"model_dir={folder}/model",
            ),
            *(
                "checkpoint.asynchronous=false",
                "checkpoint.save_steps=100000000",
                "train.max_steps=100000000",
                *overrides,
            ),
        ]
        env = {"GROWTH_SECS": "6", **environment()}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            sys.exit(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        return float(Path(folder, "model", "rate").read_text())


def rows(number: int) -> Point:
    """Measure steps of 2,048 ids on a table of this many rows, under each strategy for which memory suffices."""
    point, size = {}, 4 * 64 * number
    sizes = (f"model.params.rows={number}", f"input.train.params.rows={number}")
    for strategy, overrides in STRATEGIES.items():
        # of a table: itself, its initial value, and what a checkpoint's file takes in the system's memory
        fits = 4 * TABLES[strategy] * size < psutil.virtual_memory().available
        found = rate("table", BATCH, *overrides, *sizes) if fits else math.nan
        point[f"{strategy}, steps a second"] = found
    return point


def workers(number: int) -> Point:
    """Measure steps on a table of 100,000 rows by this many workers, each with 2,048 ids a step."""
    point = {}
    for strategy in ("multi_worker", "parameter_server"):
        cluster = [f"strategy={strategy}", f"cluster.num_workers={number}"]
        cluster += ["cluster.num_ps=1"] if strategy == "parameter_server" else []
        batch = BATCH * number if strategy == "multi_worker" else BATCH  # global: a step of a server's is one worker's
        sizes = ("model.params.rows=100000", "input.train.params.rows=100000")
        point[f"{strategy}, steps a second"] = rate("table", batch, *cluster, *sizes)
    return point


def columns(number: int) -> Point:
    """Measure steps of 256 examples with this many embedding columns."""
    sizes = (f"model.params.columns={number}", f"input.train.params.columns={number}")
    return {"steps a second": rate("columns", 256, *sizes)}


# --- the control plane ----------------------------------------------------------------------------------------------


def control_plane(number: int) -> Point:
    """Measure this many supervisors, four a second, of tasks that do nothing, as threads that meet in a shared folder:
    they agree, lose a task, start again and finish. Seconds are those of the simulation's clock.
    """
    from tests.support.control_plane import ControlPlane

    with tempfile.TemporaryDirectory() as folder:
        found = ControlPlane(number, Path(folder), apart_secs=0.25).run()
    return times_of(found) | {
        "chief, file operations": found.operations["chief"],
        "a worker, file operations": most_of_a_worker(found.operations),
        "chief, CPU ms": 1e3 * found.cpu_secs["chief"],
        "a worker, CPU ms": 1e3 * most_of_a_worker(found.cpu_secs),
    }


def control_plane_in_a_bucket(number: int) -> Point:
    """Measure the same with a folder for each, and messages by a bucket of moto's server."""
    from object_store import server

    from runner.remote.store import Store
    from tests.support.control_plane import ControlPlane

    with tempfile.TemporaryDirectory() as folder:
        process = server(Path(folder))
        try:
            store = Store(f"s3://bucket/run-{number}")
            found = ControlPlane(number, Path(folder, "hosts"), apart_secs=0.25, store=store).run()
        finally:
            process.kill()
    return times_of(found) | {
        "chief, requests": found.requests["chief"],
        "a worker, requests": most_of_a_worker(found.requests),
        "chief, objects named": found.objects["chief"],
        "a worker, objects named": most_of_a_worker(found.objects),
    }


def times_of(found: Any) -> Point:
    """Return how long a simulated cluster took to agree, to notice a loss, and to start again after it."""
    return {"agree, s": found.agreed[1], "notice, s": found.noticed, "start again, s": found.agreed[2]}


def most_of_a_worker(counts: Mapping[str, float]) -> float:
    """Return the largest number of a worker."""
    return max(count for name, count in counts.items() if name.startswith("worker") and "/" not in name)


def supervisors(number: int) -> Point:
    """Measure this many supervisors as processes, with tasks that do nothing, as if started by TF_CONFIG: all of them
    on this host. One task is killed.
    """
    from tests.launch.test_gang import CHIEF, LOST
    from tests.launch.test_rendezvous import Terminals

    ports = [f"127.0.0.1:{1 + index}" for index in range(number)]
    peer = "journal.event('joined')\nif generation < 2:\n    wait_for('lost1')\n    sys.exit(75)\n"
    codes = {f"worker:{index}": peer for index in range(number - 1)}
    codes[f"worker:{number - 2}"] = LOST.format(last=2, step=40)
    begun = time.perf_counter()
    before = cpu_of_children()
    with tempfile.TemporaryDirectory() as folder:
        terminals = Terminals(Path(folder), {"chief": ports[:1], "worker": ports[1:]}, start_timeout_secs=600)
        terminals.start({**codes, "chief": CHIEF.format(last=2, step=40)})
        ended, said = terminals.end()
        if any(ended.values()):
            sys.exit(f"{ended}\n{said['chief'][-3000:]}")
    spent = cpu_of_children() - before
    return {"wall s": time.perf_counter() - begun, "CPU of all, s": spent, "CPU of each, s": spent / number}


def shipped_journals(number: int) -> Point:
    """Measure a round of shipping, with a journal for each of so many tasks that has 20 new lines of its own."""
    from runner.config.schema import TrackingConfig
    from runner.tracking.journal import RUN_STARTED, Journal, journal_path, note_of_run
    from runner.tracking.ship import Deadline, RunShipper
    from runner.tracking.shipping import write_settings
    from tests.support.control_plane import Operations

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        note_of_run(folder, RUN_STARTED, command="train", name="benchmark", params={}, tags={})
        write_settings(folder, TrackingConfig(backend="csv"), {})
        shipper = RunShipper(folder, "csv", Deadline())
        shipper.ship()
        for index in range(number):
            journal = Journal(journal_path(folder, "worker", index))
            for step in range(20):
                journal.event("phase", name="input", secs=0.1, step=step)
            journal.close()
        operations, before = Operations(), Times.now()
        with operations.in_folder(folder):
            shipper.ship()
        return {"a round, CPU ms": 1e3 * (Times.now() - before).cpu, "file operations": sum(operations.counts.values())}


# --- the curves -----------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """A size, the points at which it is measured, and those for --tiny."""

    measure: Callable[[int], Point]
    sizes: Sequence[int]
    tiny: Sequence[int]

    @property
    def name(self) -> str:
        return self.measure.__name__


CURVES = {
    curve.name: curve
    for curve in (
        Curve(layers, (2, 10, 30, 100, 300, 600), (2,)),
        Curve(variables, (10, 30, 100, 300, 1000, 3000), (2,)),
        Curve(replicas, (1, 2, 4, 8), (2,)),
        Curve(metrics, (1, 10, 50, 100, 200), (2,)),
        Curve(examples, (1000, 10_000, 100_000, 1_000_000, 10_000_000), (1000,)),
        Curve(checkpoint, (1, 16, 64, 256, 1024, 4096), (1,)),
        Curve(mlflow_steps, (1000, 10_000, 100_000, 1_000_000), (10, 20)),
        Curve(processes, (1, 2, 4, 8), ()),
        Curve(jobs, (10, 30, 100, 500), ()),
        Curve(job_results, (10, 30, 100, 500, 2000), (2, 4)),
        Curve(steps, (10_000, 100_000, 1_000_000), ()),
        Curve(evaluations, (10, 100, 1000), ()),
        Curve(gang_steps, (3000, 30_000), ()),
        Curve(server_steps, (3000, 40_000), ()),
        Curve(rows, (10_000, 100_000, 1_000_000, 10_000_000), ()),
        Curve(workers, (1, 2, 3, 4), ()),
        Curve(columns, (10, 30, 100, 300), (2,)),
        Curve(control_plane, (2, 4, 16, 64, 256), (2,)),
        Curve(control_plane_in_a_bucket, (2, 4, 16, 32), (2,)),
        Curve(supervisors, (2, 4, 16, 64), ()),
        Curve(shipped_journals, (2, 4, 16, 64, 256), (2,)),
    )
}


def measured(name: str, size: int) -> Point:
    """Return a point, measured by this script in a new process."""
    argv = [sys.executable, __file__, "--point", name, str(size)]
    done = subprocess.run(argv, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    point: Point = json.loads(done.stdout.splitlines()[-1])
    return point


def exponent(before: tuple[int, float], here: tuple[int, float]) -> float:
    """Return the slope between two points on logarithmic axes."""
    if min(before[1], here[1]) <= 0:
        return math.nan
    return math.log(here[1] / before[1]) / math.log(here[0] / before[0])


def show(name: str, points: Mapping[int, Point]) -> None:
    """Print a table: a row per size, a column per value, with the exponent beside each value."""
    columns = list(next(iter(points.values())))
    widths = [max(18, len(column)) for column in columns]
    print(f"\n{name:12}" + "".join(f"{column:>{width + 2}}" for column, width in zip(columns, widths, strict=True)))
    before: tuple[int, Point] | None = None
    for size, point in points.items():
        cells = []
        for column in columns:
            slope = exponent((before[0], before[1][column]), (size, point[column])) if before else math.nan
            cells.append(f"{point[column]:.3g}" + ("       " if math.isnan(slope) else f" ({slope:+.1f})"))
        print(f"{size:<12}" + "".join(f"{cell:>{width + 2}}" for cell, width in zip(cells, widths, strict=True)))
        before = size, point
    sys.stdout.flush()


def draw(curves: Mapping[str, Mapping[int, Point]], path: Path) -> None:
    """Draw each curve on logarithmic axes, all its values relative to their first point."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"  # a tenth of the size of outlines
    from matplotlib import pyplot

    rows = math.ceil(len(curves) / 3)
    figure, axes = pyplot.subplots(rows, 3, figsize=(13, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    for axis, (name, points) in zip(axes.flat, curves.items(), strict=False):
        sizes = list(points)
        for column in next(iter(points.values())):
            here = {size: point[column] for size, point in points.items() if not math.isnan(point[column])}
            if here and min(here.values()) > 0:
                values = [value / next(iter(here.values())) for value in here.values()]
                axis.plot(list(here), values, marker="o", markersize=3, label=column)
        axis.plot(sizes, [size / sizes[0] for size in sizes], linestyle=":", color="gray", label="linear")
        axis.set(xscale="log", yscale="log", title=name, ylabel="times the first point")
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="small points alone: shows that the script works")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--largest", type=int, help="leave out larger sizes")
    parser.add_argument("--out", type=Path, help="folder for growth.json and growth.svg")
    parser.add_argument("--point", nargs=2, metavar=("CURVE", "SIZE"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.point:
        name, size = parsed.point
        print(json.dumps(CURVES[name].measure(int(size))))
        return
    if parsed.tiny:
        os.environ["GROWTH_SECS"] = "0.5"
    print(f"the smallest of {parsed.rounds} rounds; (exponent): 1 is linear, the ratio of two points' logarithms")
    found: dict[str, dict[int, Point]] = {}
    for name in parsed.curves:
        sizes = CURVES[name].tiny if parsed.tiny else CURVES[name].sizes
        points = {}
        for size in sizes:
            if parsed.largest is None or size <= parsed.largest:
                rounds = [measured(name, size) for _ in range(parsed.rounds)]
                points[size] = {column: smallest(column, rounds) for column in rounds[0]}
        if points:
            found[name] = points
            show(name, points)
    if parsed.out:
        parsed.out.mkdir(parents=True, exist_ok=True)
        (parsed.out / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(found, parsed.out / "growth.svg")


def smallest(column: str, rounds: Sequence[Point]) -> float:
    """Return the value of the least disturbed round: the smallest, or the largest of a rate."""
    values = [one[column] for one in rounds]
    return max(values) if "a second" in column else min(values)


if __name__ == "__main__":
    main()
