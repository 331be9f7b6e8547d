"""What the workers of tests/support/gang.py do: each case is a function of a folder that all of them share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner.distribute.strategy import build_strategy

# Before anything else of TensorFlow runs: "Collective ops must be configured at program startup".
STRATEGY = build_strategy("multi_worker", virtual_devices=int(os.environ.get("REPLICAS", "1")))

from runner import Estimator, EstimatorSpec, EvalSpec, Input, RunConfig, TrainSpec, train_and_evaluate  # noqa: E402
from runner.classic.model_to_estimator import model_to_estimator  # noqa: E402
from runner.data.inputs import EmptyInputError  # noqa: E402
from runner.data.service import DataService  # noqa: E402
from runner.distribute import reductions  # noqa: E402
from runner.distribute.tf_config import read_tf_config  # noqa: E402
from runner.estimator.early_stopping import EarlyStopping  # noqa: E402
from runner.estimator.reduce_lr_on_plateau import ReduceLROnPlateau  # noqa: E402
from runner.hooks.hook import Hook, Interrupted, Run  # noqa: E402
from runner.system.files import write_atomically  # noqa: E402
from runner.tf_private import cluster  # noqa: E402
from runner.tf_private.replaced import replaced  # noqa: E402
from runner.types import StepResult  # noqa: E402
from tests.support import worker_orders  # noqa: E402
from tests.support.adapted_models import WORDS  # noqa: E402
from tests.support.adapted_models import batches as adapted_batches  # noqa: E402
from tests.support.adapted_models import model_fn as adapted  # noqa: E402
from tests.support.gang import DIES_AT  # noqa: E402
from tests.support.keras_rows import MEETING  # noqa: E402
from tests.support.keras_rows import batches as batches_of  # noqa: E402
from tests.support.measured import journaled, summarised_values, train_measured  # noqa: E402
from tests.support.models import FETCHED, STYLES, Rows, data, eval_input, texts_beside, train_input  # noqa: E402
from tests.support.processes import wait_until  # noqa: E402
from tests.support.replica_programs import (  # noqa: E402
    BATCH_SIZE,
    MORE_OF_WORKERS,
    OF_WORKERS,
    REFUSED,
    center_loss,
    refusal,
)
from tests.support.replica_programs import trained as trained_program  # noqa: E402
from tests.support.sparse_models import SUMMED, most_rows, native_lazy_adam  # noqa: E402
from tests.support.weighted_models import model_of, of_two, weighted_input  # noqa: E402

CLUSTER = read_tf_config(os.environ["TF_CONFIG"])
WORKER, NUM_WORKERS = CLUSTER.worker_index, CLUSTER.num_workers

_CASES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def case(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    _CASES[function.__name__] = function
    return function


def run(name: str, folder: Path) -> dict[str, Any]:
    print(f"=== {name} {time.monotonic():.1f}", flush=True)
    return _CASES[name](folder / name)


def config(**changes: Any) -> RunConfig:
    return RunConfig(train_distribute=STRATEGY, cluster=CLUSTER, check_replicas=True, **changes)


def variables(estimator: Estimator) -> dict[str, np.ndarray]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


class Seen(Hook):
    """Records the losses and the number of examples of each loop."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.examples: list[int] = []
        self.reason: str | None = None

    def after_step(self, run: Run, result: StepResult) -> None:
        self.losses += [float(loss) for loss in result.losses]
        self.examples.append(result.examples)
        run.log({"seen": WORKER + result.last_step})

    def end(self, run: Any) -> None:
        self.reason = run.stop_reason


def trained(folder: Path, style: str, **changes: Any) -> dict[str, Any]:
    estimator = Estimator(STYLES[style], folder, config(save_checkpoints_steps=7, **changes))
    seen = Seen()
    result = train_and_evaluate(
        estimator,
        TrainSpec(train_input(12, dtype="float64"), max_steps=20, hooks=[seen]),
        EvalSpec(eval_input(8, dtype="float64")),
    )
    return {
        **variables(estimator),
        "losses": seen.losses,
        "examples": result.examples,
        **{f"eval/{name}": value for name, value in result.metrics[""].items()},
    }


@case
def native(folder: Path) -> dict[str, Any]:
    return trained(folder, "native")


@case
def classic(folder: Path) -> dict[str, Any]:
    return trained(folder, "classic")


@case
def callbacks(folder: Path) -> dict[str, Any]:
    """What a callback of Keras is told on this worker."""
    losses: list[float] = []
    batches: list[int] = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: losses.append(logs["loss"]),
        on_train_batch_end=lambda batch, logs: batches.append(batch),
    )
    estimator = Estimator(STYLES["native"], folder / "callbacks", config(tf_random_seed=5))
    estimator.train(eval_input(8), hooks=[callback], max_epochs=2)
    return {"losses": losses, "batches": batches}


@case
def summed(folder: Path) -> dict[str, Any]:
    """The same training with gradients that workers give each other whole, and with TensorFlow's sum over a ring."""
    found: dict[str, Any] = {}
    for style in ("native", "classic"):
        for kind, size in (("whole", reductions._GATHERED_BYTES), ("ring", 0)):
            estimator, seen = Estimator(STYLES[style], folder / style / kind, config(tf_random_seed=5)), Seen()
            with replaced(reductions, "_GATHERED_BYTES", size):
                run = estimator.train_run(train_input(12), hooks=[seen], steps=20)
            assert run is not None
            types = {one.type for one in run._setup.program.trace.graph.get_operations()}
            collectives = sorted(one for one in types if one.startswith("Collective"))
            values = {**variables(estimator), "losses": seen.losses, "collectives": collectives}
            found |= {f"{style}/{kind}/{name}": value for name, value in values.items()}
    return found


@case
def packed(folder: Path) -> dict[str, Any]:
    """How many products of matrices each message of gradients waits for, in the order in which they are sent."""
    extended: Any = STRATEGY and STRATEGY.extended
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)
    found: dict[str, Any] = {}
    for style in ("native", "classic"):
        estimator = Estimator(STYLES[style], folder / style, config())
        with (
            replaced(reductions, "_GATHERED_BYTES", 0),
            replaced(extended, "_communication_options", options),
        ):
            run = estimator.train_run(train_input(12), steps=1)
        assert run is not None
        graph = run._setup.program.trace.graph
        sent = [one for one in graph.get_operations() if one.type == "CollectiveReduceV2"]
        found[style] = [sum(before.type == "MatMul" for before in _waited_for(one)) for one in sent]
        found[f"{style}/all"] = sum(one.type == "MatMul" for one in graph.get_operations())
    return found


def _waited_for(operation: tf.Operation) -> set[tf.Operation]:
    """Return the operations that end before `operation` begins."""
    found: set[tf.Operation] = set()
    ahead = [operation]
    while ahead:
        one = ahead.pop()
        before = {*(tensor.op for tensor in one.inputs), *one.control_inputs} - found
        found |= before
        ahead += before
    return found


@case
def by_replicas(folder: Path) -> dict[str, Any]:
    """A learning rate that model_fn makes of the number of replicas: how far a weight with the gradient -1 moves."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = tf.compat.v1.get_variable("w", [], tf.float64, tf.compat.v1.zeros_initializer())
        rate = 0.1 * tf.distribute.get_strategy().num_replicas_in_sync
        return EstimatorSpec(mode, loss=-weight + 0 * features[:, 0], optimizer=keras.optimizers.SGD(rate))

    estimator = Estimator(model_fn, folder, config())
    estimator.train(train_input(12, dtype="float64"), steps=2)
    return {"w": estimator.get_variable_value("w"), "replicas": config().num_replicas_in_sync}


@case
def drawn_seed(folder: Path) -> dict[str, Any]:
    """The seed of an Estimator for which none was given."""
    return {"seed": Estimator(STYLES["native"], folder, config(tf_random_seed=None)).config.seed}


# --- who was seen -----------------------------------------------------------------------------------------------------


def ids_model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Learns nothing; its loss tells whom it saw: the mean of 2^id over the step, exact for ids below 50."""
    weight = tf.compat.v1.get_variable("w", [], tf.float64, tf.compat.v1.zeros_initializer())
    loss = 2.0 ** features[:, 0] * (1 + 0 * weight)
    return EstimatorSpec(mode, loss=loss, optimizer=tf.compat.v1.train.GradientDescentOptimizer(0.0))


class Ids(Hook):
    """Which ids each step saw, of ids_model with steps_per_loop=1."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.reason: str | None = None

    def after_step(self, run: Run, result: StepResult) -> None:
        assert len(result.losses) == 1
        bits = round(float(result.losses[0]) * result.examples)
        self.steps.append([i for i in range(50) if bits >> i & 1])
        assert len(self.steps[-1]) == result.examples, "an example was seen twice in a step"

    def end(self, run: Any) -> None:
        self.reason = run.stop_reason

    def result(self, **more: Any) -> dict[str, Any]:
        return {"ids": np.array([*self.steps, None], dtype=object), "reason": self.reason, **more}


def own(counts: list[int], batch: int, shuffle: bool = False, width: int = 1) -> Input:
    """`counts[worker]` examples of each worker, the ids in order, beside noise up to a width."""
    ids = np.arange(sum(counts), dtype=np.float64)
    starts = np.cumsum([0, *counts])

    def input_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = ids
        if input_context.num_input_pipelines > 1:
            worker = input_context.input_pipeline_id
            mine = ids[starts[worker] : starts[worker + 1]]
        noise = np.random.RandomState(0).rand(len(mine), width - 1)
        dataset = tf.data.Dataset.from_tensor_slices((np.hstack([mine[:, None], noise]), mine[:, None]))
        return (dataset.shuffle(10, seed=3) if shuffle else dataset).batch(batch)

    return Input(input_fn, shard="input_fn")


def see(
    folder: Path, input: Input, max_steps: int | None = None, max_epochs: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Trains a new Estimator on `input`, from the folder's checkpoint on."""
    seen = Ids()
    run = Estimator(ids_model, folder, config(steps_per_loop=1, **changes)).train_run(
        input, hooks=[seen], max_steps=max_steps, max_epochs=max_epochs
    )
    assert run is not None
    return seen.result(step=run.global_step)


@case
def trained_last(folder: Path) -> dict[str, Any]:
    return see(folder, own([4] * NUM_WORKERS, 2))


@case
def nothing_last(folder: Path) -> dict[str, Any]:
    """The last call finds nothing to train."""
    estimator = Estimator(ids_model, folder, config())
    for _ in range(2):
        estimator.train(own([4] * NUM_WORKERS, 2), max_steps=2)
    return {"step": 2}


@case
def evaluated_last(folder: Path) -> dict[str, Any]:
    input = own([4] * NUM_WORKERS, 2)
    estimator = Estimator(ids_model, folder, config())
    return estimator.train(input, max_steps=2).evaluate(input)


class GivesUp(Hook):
    def after_batches(self, run: Run, examples: int) -> None:
        raise Interrupted("enough")


@case
def interrupted_last(folder: Path) -> dict[str, Any]:
    """The hook of one worker ends the evaluation of all."""
    input = own([4] * NUM_WORKERS, 2)
    estimator = Estimator(ids_model, folder, config()).train(input, max_steps=2)
    with contextlib.suppress(Interrupted):
        return estimator.evaluate(input, hooks=[GivesUp()] if WORKER == 0 else [])
    return {"step": 2}


@case
def keras_weights(folder: Path) -> dict[str, Any]:
    """A Keras model is evaluated before it is trained, by all workers and by the chief alone."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full((1, 1), 2.0)])
    model.compile(optimizer="sgd", loss="mse")
    input = Input(lambda: numbers(8).batch(4))
    return {
        kind: model_to_estimator(model, model_dir=str(folder / kind), config=config(**settings)).evaluate(input)["loss"]
        for kind, settings in {"all": {}, "chief": {"eval_distribute": "default"}}.items()
    }


@case
def both_last(folder: Path) -> dict[str, Any]:
    input = own([4] * NUM_WORKERS, 2)
    result = train_and_evaluate(Estimator(ids_model, folder, config()), TrainSpec(input, max_steps=2), EvalSpec(input))
    return {"step": result.global_step}


@case
def measured(folder: Path) -> dict[str, Any]:
    """What the chief reports of training beside the loss."""
    settings = {"log_step_count_steps": 2, "save_summary_steps": 1, "train_metrics": True}
    found: dict[str, Any] = {}
    for style in ("native", "classic"):
        train_measured(folder / style, config(**settings), style)
        if WORKER == 0:
            for step, values in journaled(folder / style).items():
                found |= {f"{style}/{step}/{name}": value for name, value in values.items()}
            for tag in ("new", "old"):
                for step, value in summarised_values(folder / style / "model", tag).items():
                    found[f"{style}/{step}/{tag}"] = value
    return found


@case
def uneven(folder: Path) -> dict[str, Any]:
    return see(folder, own([7, 2, 5][:NUM_WORKERS], 2))


@case
def without_data(folder: Path) -> dict[str, Any]:
    """The first worker has nothing at all."""
    return see(folder, own([0, 5, 3][:NUM_WORKERS], 2))


@case
def nothing_at_all(folder: Path) -> dict[str, Any]:
    try:
        return see(folder, own([0] * NUM_WORKERS, 2))
    except EmptyInputError as error:
        return {"said": str(error)}


@case
def own_resumed(folder: Path) -> dict[str, Any]:
    """Shuffled data of each worker's own: at once, and in three pieces."""
    input = own([11, 6, 8][:NUM_WORKERS], 2, shuffle=True)
    whole = see(folder / "whole", input)
    pieces = [see(folder / "pieces", input, max_steps) for max_steps in (2, 4, None)]
    steps = [step for piece in pieces for step in piece["ids"][:-1]]
    return {"whole": whole["ids"], "pieces": np.array([*steps, None], dtype=object)}


@case
def own_counted(folder: Path) -> dict[str, Any]:
    """Wide data of each worker's own: at once, and in pieces whose checkpoints hold its state or a count."""
    input = own([11, 6, 8][:NUM_WORKERS], 2, shuffle=True, width=60_000)
    whole = see(folder / "whole", input, checkpoint_input_state="saved")
    starts = ((2, "auto"), (3, "saved"), (4, "counted"), (None, "auto"))
    pieces = [see(folder / "pieces", input, steps, checkpoint_input_state=choice) for steps, choice in starts]
    steps = [step for piece in pieces for step in piece["ids"][:-1]]
    return {"whole": whole["ids"], "pieces": np.array([*steps, None], dtype=object)}


@case
def own_raised(folder: Path) -> dict[str, Any]:
    """Batches of each worker's own, of which one worker has more, for one pass, and then for more passes."""
    found: dict[str, Any] = {}
    for longer, counts in {"first": [6, 4], "second": [4, 6]}.items():
        place = folder / longer
        input = own(counts, 2)
        see(place, input, max_epochs=1)
        # Begins with a count, goes on with the state of the iterator, and ends with a count.
        begin = see(place, input, 4, max_epochs=2)
        middle = see(place, input, 5, max_epochs=2, checkpoint_input_state="counted")
        end = see(place, input, max_epochs=2)
        third = see(place, input, max_epochs=3)
        second_pass = [*begin["ids"][:-1], *middle["ids"][:-1], *end["ids"][:-1]]
        third_pass = [*third["ids"][:-1]]
        found[longer] = np.array([second_pass, third_pass, None], dtype=object)
    return found


@case
def own_ended_early(folder: Path) -> dict[str, Any]:
    """The data of the chief ends before that of the other: at once, and from the count of a later step on."""
    input = own([3, 5], 2, shuffle=True)
    whole = see(folder / "whole", input, max_epochs=10)
    pieces = [see(folder / "pieces", input, max_steps, max_epochs=10) for max_steps in (25, None)]
    steps = [step for piece in pieces for step in piece["ids"][:-1]]
    return {"whole": whole["ids"], "pieces": np.array([*steps, None], dtype=object)}


@case
def of_service(folder: Path) -> dict[str, Any]:
    """A tf.data service, which the chief starts, computes the batches: at once, and in two pieces."""
    file = folder / "address"
    if WORKER == 0:
        make = tf.data.experimental.service
        dispatcher = make.DispatchServer()
        address = dispatcher.target.partition("://")[2]
        server = make.WorkerServer(make.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=100))
        SERVERS.extend([dispatcher, server])
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, dispatcher.target)
    wait_until(file.is_file)
    input = Input(lambda: numbers(11).batch(2), service=DataService(file.read_text()))
    whole = see(folder / "whole", input, max_epochs=1)
    pieces = [see(folder / "pieces", input, max_steps, max_epochs=1) for max_steps in (2, None)]
    return {"whole": whole["ids"], "pieces": np.array([*(piece["step"] for piece in pieces), None], dtype=object)}


SERVERS: list[Any] = []
"""They live as long as the process."""


def numbers(count: int) -> tf.data.Dataset:
    ids = np.arange(count, dtype=np.float64)[:, None]
    return tf.data.Dataset.from_tensor_slices((ids, ids))


@case
def unknown_length(folder: Path) -> dict[str, Any]:
    """All read the same, and nobody knows where it ends: ids that are no multiple of 3, in batches of 4."""

    def input_fn() -> tf.data.Dataset:
        return numbers(20).filter(lambda id, _: id[0] % 3 > 0).batch(4)

    return see(folder, Input(input_fn, batch_size=4))


@case
def in_turn(folder: Path) -> dict[str, Any]:
    """Batches of the function's own, one a replica: what one worker takes, another leaves out."""
    return see(folder, Input(lambda: numbers(4 * NUM_WORKERS + 1).batch(2)))


# --- what is agreed ---------------------------------------------------------------------------------------------------


class StopsAfter(Hook):
    """Requests to stop after some loops, on one worker only."""

    def __init__(self, worker: int, loops: int) -> None:
        self._left = loops if worker == WORKER else -1

    def after_step(self, run: Run, result: StepResult) -> None:
        self._left -= 1
        if not self._left:
            run.request_stop("enough")


@case
def stopped_by_one(folder: Path) -> dict[str, Any]:
    """Worker 1 alone wants to stop after its third loop: the first has one step, the others four."""
    estimator = Estimator(STYLES["native"], folder, config(steps_per_loop=4))
    run = estimator.train_run(train_input(8, dtype="float64"), hooks=[StopsAfter(1, 3)], max_steps=100)
    assert run is not None
    return {"step": run.global_step, "reason": run.stop_reason}


class Slow(Hook):
    """One worker takes its time after each loop."""

    def after_step(self, run: Run, result: StepResult) -> None:
        if WORKER == NUM_WORKERS - 1:
            time.sleep(0.1)


class EndsAtFirst(Rows):
    def after_examples(self, run: Any, values: Any) -> None:
        run.interrupt("enough")


@case
def fetched(folder: Path) -> dict[str, Any]:
    """What a hook that only the chief has fetches of the examples of all workers; no other worker's hook is called."""
    estimator = Estimator(texts_beside, folder, config(log_step_count_steps=4, tf_random_seed=1))
    in_training, in_evaluation = Rows(*FETCHED), Rows(*FETCHED)
    estimator.train(train_input(12, dtype="float64"), hooks=[in_training], steps=9)
    metrics = estimator.evaluate(eval_input(4, dtype="float64"), hooks=[in_evaluation] if WORKER == 0 else [])
    found: dict[str, Any] = {"loss": metrics["loss"], "steps": in_training.steps, "given up": ""}
    try:
        estimator.evaluate(eval_input(4, dtype="float64"), hooks=[EndsAtFirst("labels")])
    except Interrupted as stopped:
        found["given up"] = str(stopped)
    if WORKER:
        return found
    found["sizes"] = [len(batch["labels"]) for batch in in_evaluation.batches]
    for name in FETCHED:
        found[f"train/{name}"] = in_training.of(name)
        found[f"eval/{name}"] = in_evaluation.of(name)
    return found


@case
def slow_evaluation(folder: Path) -> dict[str, Any]:
    """Loops of evaluation have the length that suits each worker; v1 metrics meet at the end of it, and only there."""
    source = eval_input(8, dtype="float64")

    def input_fn(params: Any) -> tf.data.Dataset:
        def wait(number: Any) -> Any:
            time.sleep(0.16 if WORKER else 0)
            return number

        def slowed(number: tf.Tensor, element: Any) -> Any:
            with tf.control_dependencies([tf.py_function(wait, [number], tf.int64)]):
                return tf.nest.map_structure(tf.identity, element)

        return source.fn(params).repeat(3).enumerate().map(slowed)

    estimator = Estimator(STYLES["classic"], folder, config())
    estimator.train(train_input(12, dtype="float64"), steps=2)
    found = [estimator.evaluate(Input(input_fn, params={}, batch_size=8)) for _ in range(2)]
    return {
        "first": [found[0][name] for name in sorted(found[0])],
        "second": [found[1][name] for name in sorted(found[1])],
    }


@case
def slow_worker(folder: Path) -> dict[str, Any]:
    """Checkpoints by the clock, loops of automatic length."""
    estimator = Estimator(STYLES["native"], folder, config(save_checkpoints_secs=0.3, keep_checkpoint_max=None))
    run = estimator.train_run(train_input(8, dtype="float64"), hooks=[Slow()], max_steps=600)
    assert run is not None
    saved = [int(path.stem.split("-")[1]) for path in folder.glob("*.index")]
    return {**variables(estimator), "saved": sorted(saved)}


@case
def undisturbed(folder: Path) -> dict[str, Any]:
    """As slow_worker, and nobody is."""
    estimator = Estimator(STYLES["native"], folder, config())
    estimator.train(train_input(8, dtype="float64"), max_steps=600)
    return variables(estimator)


@case
def stopped_early(folder: Path) -> dict[str, Any]:
    """Nothing is learnt, so the second evaluation is no better."""
    estimator = Estimator(ids_model, folder, config(save_checkpoints_steps=2))
    result = train_and_evaluate(
        estimator,
        TrainSpec(
            Input(lambda: numbers(8).repeat().batch(4), batch_size=4),
            max_steps=20,
            early_stopping=EarlyStopping("eval/loss"),
        ),
        EvalSpec(Input(lambda: numbers(8).batch(4), batch_size=4)),
    )
    return {"step": result.global_step, "reason": result.stopped_early}


class Rates(Hook):
    """Notes the learning rate before each loop."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def before_step(self, run: Any, step: int) -> None:
        self.seen[step] = run.learning_rate

    def after_step(self, run: Any, result: Any) -> None:
        self.seen[result.last_step] = run.learning_rate


@case
def reduced_on_a_plateau(folder: Path) -> dict[str, Any]:
    """No evaluation is better by so much than the one before it."""
    estimator = Estimator(STYLES["native"], folder, config(save_checkpoints_steps=2, steps_per_loop=1))
    rates = Rates()
    train_and_evaluate(
        estimator,
        TrainSpec(
            train_input(8, dtype="float64"),
            max_steps=8,
            hooks=[rates],
            reduce_lr_on_plateau=ReduceLROnPlateau("eval/loss", factor=0.5, patience_evals=1, min_delta=1e9),
        ),
        EvalSpec(train_input(8, dtype="float64"), steps=2),
    )
    return {"rates": [rates.seen[step] for step in sorted(rates.seen)], **variables(estimator)}


@case
def not_finite(folder: Path) -> dict[str, Any]:
    """The last example of the third batch is not finite: a share of the last worker alone."""
    features, labels = data(32, "float64")
    features[23] = np.nan
    result = {}
    for style in ("native", "classic"):
        estimator = Estimator(STYLES[style], folder / style, config(steps_per_loop=4))
        try:
            estimator.train(
                Input(lambda: tf.data.Dataset.from_tensor_slices((features, labels)).batch(8).repeat(), batch_size=8),
                max_steps=8,
            )
        except tf.compat.v1.train.NanLossDuringTrainingError as error:
            result[style] = str(error)
    return result


@case
def not_finite_variables(folder: Path) -> dict[str, Any]:
    """The variable becomes NaN in step 3, the loss does not."""
    result: dict[str, Any] = {}

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = tf.compat.v1.get_variable("w", [], initializer=tf.compat.v1.ones_initializer())
        seen = tf.compat.v1.get_variable("seen", [], trainable=False, initializer=tf.compat.v1.zeros_initializer())
        loss = tf.reduce_mean(tf.where(tf.math.is_finite(features), features, 0.0) * weight)
        step = tf.compat.v1.train.get_global_step()
        value = tf.where(tf.equal(step, 2), np.nan, 1.0)
        with tf.control_dependencies([seen.assign(seen + tf.cast(value, tf.float32))]):
            train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    for policy in ("stop", "rollback"):
        estimator = Estimator(model_fn, folder / policy, config(save_checkpoints_steps=2, nan=policy))
        data = Input(lambda: tf.data.Dataset.from_tensors(tf.ones([8])).repeat(), batch_size=8)
        try:
            estimator.train(data, max_steps=6)
        except tf.compat.v1.train.NanLossDuringTrainingError as error:
            result[policy] = str(error)
        result[f"{policy}_step"] = estimator.get_variable_value("global_step")
    return result


# --- gradients --------------------------------------------------------------------------------------------------------


@case
def sparse(folder: Path) -> dict[str, Any]:
    result = {}
    for model_fn in SUMMED:
        estimator = Estimator(model_fn, folder / model_fn.__name__, config())
        run = estimator.train_run(train_input(6, 19, "float64"), max_steps=8)
        assert run is not None
        sent = [one for one in run._setup.program.trace.graph.get_operations() if one.type.startswith("Collective")]
        sizes = [one.inputs[0].shape.num_elements() or 0 for one in sent]  # the number of rows is known only in a step
        result[f"{model_fn.__name__}/largest message"] = max(sizes)
        result |= {f"{model_fn.__name__}/{name}": value for name, value in variables(estimator).items()}
    return result


@case
def dense_at_times(folder: Path) -> dict[str, Any]:
    estimator = Estimator(most_rows, folder, config())
    run = estimator.train_run(train_input(6, 19, "float64"), max_steps=12)
    assert run is not None
    functions = run._setup.program.trace.graph.as_graph_def().library.function  # branches are functions
    sent = {one.op for function in functions for one in function.node_def if one.op.startswith("Collective")}
    whole = Estimator(most_rows, folder / "without collectives", config())
    # As if the private names of collectives had moved, and as if no initial value could be sent.
    with replaced(cluster, "collectives", lambda strategy: []), replaced(cluster, "LARGEST_SENT", 0):
        whole.train(train_input(6, 19, "float64"), max_steps=12)
    moved = {f"whole/{name}": value for name, value in variables(whole).items()}
    return {**variables(estimator), **moved, "sent in branches": sorted(sent)}


class Fetched(tf.compat.v1.train.SessionRunHook):
    """Records a tensor, on the chief only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.values: list[float] = []

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._name if WORKER == 0 else None)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values += [] if run_values.results is None else [float(run_values.results)]


@case
def weighted_losses(folder: Path) -> dict[str, Any]:
    estimator, seen, asked = Estimator(model_of(of_two), folder, config()), Seen(), Fetched("aside:0")
    estimator.train(weighted_input(), hooks=[seen, asked])
    return {"kernel": estimator.get_variable_value("kernel"), "losses": seen.losses, "asked": asked.values}


def of_programs(folder: Path, programs: Sequence[Callable[..., EstimatorSpec]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for program in programs:
        name = program.__name__
        if program in REFUSED:
            found[name] = refusal(program, folder / name, config())
        else:
            values = trained_program(program, folder / name, config(), BATCH_SIZE)
            found |= {f"{name}/{variable}": value for variable, value in values.items()}
    return found


@case
def programs(folder: Path) -> dict[str, Any]:
    """What model_fn writes by itself."""
    return of_programs(folder, [*OF_WORKERS, center_loss])


@case
def more_programs(folder: Path) -> dict[str, Any]:
    return of_programs(folder, MORE_OF_WORKERS)


@case
def orders(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for program in (worker_orders.gradients, worker_orders.losses, worker_orders.metrics):
        name = program.__name__
        values = worker_orders.trained_and_evaluated(program, folder / name, config(tf_random_seed=1))
        found |= {f"{name}/{key}": value for key, value in values.items()}
    return found


@case
def keras_promises(folder: Path) -> dict[str, Any]:
    """Keras's promises for which workers have to meet, and layers that learn: each worker has other words."""
    found: dict[str, Any] = {}
    for row in MEETING:
        trainer = Estimator(
            lambda features, labels, mode, row=row: row.build(), config=config(model_dir=folder / row.id)
        )
        trainer.train(lambda row=row: batches_of(row, 12 // NUM_WORKERS, epochs=3))
        found |= {
            f"{row.id}/{name}": value for name, value in trainer.evaluate(lambda row=row: batches_of(row, 12)).items()
        }
    words = WORDS if CLUSTER.is_chief else np.array(["emu"])
    learning = Estimator(adapted, folder / "adapted", config(tf_random_seed=1), params={"words": words})
    learning.train(adapted_batches(4 // NUM_WORKERS, epochs=3))
    return {**found, "adapted": learning.evaluate(adapted_batches(4))["loss"]}


@case
def tables(folder: Path) -> dict[str, Any]:
    """With hashes of texts of each worker's own."""
    found: dict[str, Any] = {}
    for name, is_sorted in (("set", False), ("sorted", True)):
        values = worker_orders.trained_tables(folder / name, config(tf_random_seed=1), is_sorted=is_sorted)
        found |= {f"{name}/{key}": value for key, value in values.items()}
    return found


@case
def streams(folder: Path) -> dict[str, Any]:
    settings = config(eval_distribute=STRATEGY)
    found = {}
    for name, params in worker_orders.STREAMS.items():
        found[name] = worker_orders.refusal_of_stream(params, folder / name, settings)
    return found


# --- files ------------------------------------------------------------------------------------------------------------


def lines(folder: Path, **settings: Any) -> Input:
    """The ids in the files of `folder`, a line each, by a function that knows nothing of workers."""

    def input_fn(params: Any) -> tf.data.Dataset:
        files = tf.data.Dataset.list_files(str(folder / "*.txt"), shuffle=True)
        dataset = files.interleave(tf.data.TextLineDataset, cycle_length=2).shuffle(4)
        ids = dataset.map(lambda line: tf.strings.to_number(line, tf.float64)[None])
        return ids.map(lambda id: (id, id)).batch(params["batch_size"])

    return Input(input_fn, params={}, **settings)


@case
def files(folder: Path) -> dict[str, Any]:
    """Trains two epochs on the files that the test has made, and evaluates them. The disk of each worker has ids in
    the files of its own part alone.
    """
    disk = folder / f"disk of {WORKER}"
    shutil.copytree(folder.parent / "lines", disk)
    for number, file in enumerate(sorted(disk.iterdir())):
        if number % NUM_WORKERS != WORKER:
            file.write_text("no id\n")
    input = lines(disk, batch_size=6)
    found = see(folder, dataclasses.replace(input, shard="auto"), max_epochs=2)
    estimator = Estimator(ids_model, folder, config())
    metrics = estimator.evaluate(input)
    return {**found, "loss": metrics["loss"]}


@case
def files_raised(folder: Path) -> dict[str, Any]:
    """One pass over files of unequal length, and then one more."""
    input = lines(folder.parent / "lines", batch_size=4, shard="files")
    first = see(folder, input, max_epochs=1)
    second = see(folder, input, max_epochs=2)
    return {"first": first["ids"], "second": second["ids"]}


@case
def one_file(folder: Path) -> dict[str, Any]:
    """Fewer files than workers."""
    return see(folder, lines(folder.parent / "line", batch_size=6, shard="files"))


# --- steps of several programs ----------------------------------------------------------------------------------------


@case
def accumulated(folder: Path) -> dict[str, Any]:
    return trained(folder, "native", gradient_accumulation=2)


def half(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A layer of its own kind: it computes in what train.precision says. At the third step one worker overflows."""
    predictions = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(features)
    loss = tf.square(tf.cast(predictions, tf.float32) - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))


@case
def half_precision(folder: Path) -> dict[str, Any]:
    """The second half of the third batch overflows in float16: that is the last worker's share of it."""
    features, labels = data(32)
    features[20:24] *= 1e4

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(8).repeat()

    seen = Seen()
    estimator = Estimator(half, folder, config(precision="mixed_float16"))
    estimator.train(Input(input_fn, batch_size=8), hooks=[seen], max_steps=4)
    return {**variables(estimator), "losses": seen.losses}


# --- evaluation and prediction ----------------------------------------------------------------------------------------


def line_model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Metrics of all kinds, of the ids in the lines of files."""
    weight = tf.compat.v1.get_variable("w", [], tf.float64, tf.compat.v1.ones_initializer())
    predictions = features * weight
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"id": predictions[:, 0]})
    error = keras.metrics.MeanAbsoluteError(name="kept", dtype="float64")
    error.update_state(0 * labels, predictions)
    metrics = {
        "kept": error,
        "pair": tf.compat.v1.metrics.mean(predictions),
        "each": predictions[:, 0],
    }
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.0)
    return EstimatorSpec(mode, loss=predictions[:, 0], optimizer=optimizer, eval_metric_ops=metrics)


@case
def metrics_of_files(folder: Path) -> dict[str, Any]:
    """Unequal numbers of batches, metrics of all kinds; then in the chief alone, and predictions of one worker."""
    input = lines(folder.parent / "lines", batch_size=6)
    result: dict[str, Any] = {}
    for kind, settings in {"all": {}, "chief": {"eval_distribute": "default"}}.items():
        estimator = Estimator(line_model, folder, config(**settings))
        estimator.train(input, max_steps=1)
        metrics = estimator.evaluate(input)
        result |= {f"{kind}/{name}": value for name, value in metrics.items()}
    if WORKER == 1:
        result["predicted"] = sorted(float(each["id"]) for each in estimator.predict(input))
    estimator.collectives.part()
    return result


@case
def pairs(folder: Path) -> dict[str, Any]:
    """Trained by all workers; evaluated by all of them, and by the chief with each strategy of one process."""
    # As eval_strategy makes them: the devices of a task have its place in the cluster in their names.
    one: dict[str, Any] = {name: build_strategy(name) for name in ("one_device", "mirrored", "central_storage")}
    one["default"] = "default"
    estimator = Estimator(STYLES["classic"], folder, config())
    estimator.train(train_input(12, dtype="float64"), steps=6)
    result: dict[str, Any] = variables(estimator)
    for kind, strategy in {"same": None, **one}.items():
        evaluating = Estimator(STYLES["classic"], folder, config(eval_distribute=strategy))
        found = evaluating.evaluate(eval_input(8, dtype="float64"))
        result |= {f"{kind}/{name}": value for name, value in found.items()}
    return result


# --- death ------------------------------------------------------------------------------------------------------------

NUM_STEPS = 20


class Dies(Hook):
    """The last worker is killed at a step."""

    def after_step(self, run: Run, result: StepResult) -> None:
        if result.last_step == DIES_AT and WORKER == NUM_WORKERS - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Diary(Hook):
    """What the chief saw of `ids_model`, by step; it outlives the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def after_step(self, run: Run, result: StepResult) -> None:
        if WORKER == 0:
            bits = round(float(result.losses[0]) * result.examples)
            ids = [i for i in range(50) if bits >> i & 1]
            (self._folder / f"step-{result.last_step}.json").write_text(json.dumps(ids))


def lasting(folder: Path, hooks: list[Hook]) -> None:
    """To NUM_STEPS, with a checkpoint at every fourth step."""
    settings = config(save_checkpoints_steps=4, steps_per_loop=1, save_checkpoints_asynchronously=False)
    Estimator(native_lazy_adam, folder / "native", settings).train(
        train_input(8, dtype="float64"), hooks=hooks, max_steps=NUM_STEPS
    )


def read(folder: Path, hooks: list[Hook]) -> None:
    """The ids of two and a half epochs of 24, in batches of 6."""
    settings = config(save_checkpoints_steps=3, steps_per_loop=1, save_checkpoints_asynchronously=False)
    input = Input(lambda: numbers(24).shuffle(24).repeat().batch(6, drop_remainder=True), batch_size=6)
    Estimator(ids_model, folder / "ids", settings).train(input, hooks=[Diary(folder), *hooks], max_steps=12)


@case
def undying(folder: Path) -> dict[str, Any]:
    lasting(folder, [])
    return variables(Estimator(native_lazy_adam, folder / "native"))


@case
def dying(folder: Path) -> dict[str, Any]:
    """Leaves what it has trained and read so far, as it is killed: all of `lasting`'s input, then `read`'s."""
    folder.mkdir(exist_ok=True)
    read(folder, [StopsAfter(0, 7)])
    lasting(folder, [Dies()])
    return {}


@case
def resumed(folder: Path) -> dict[str, Any]:
    """Goes on where `dying` was killed."""
    folder = folder.parent / "dying"
    lasting(folder, [])
    return variables(Estimator(native_lazy_adam, folder / "native"))


@case
def read_on(folder: Path) -> dict[str, Any]:
    """Goes on with the ids of `dying`, perhaps with another number of workers."""
    read(folder.parent / "dying", [])
    return {}
