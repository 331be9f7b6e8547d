"""command=dry_run: build and trace everything that training would, print it, and try it on a batch in memory."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing.pool
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.config.metric_names import evaluation_prefix
from runner.config.schema import Config, eval_key
from runner.data.dataset_adapter import tensors
from runner.data.inputs import InputPipeline, step_devices
from runner.data.replica_batches import any_rows, num_rows
from runner.estimator.evaluation import EvalSetup, check_ends
from runner.estimator.specs import EvalSpec
from runner.estimator.train_setup import TrainSetup
from runner.hooks.model_summary import print_variables, shape_of
from runner.programs.model import Model
from runner.programs.train_loop import Steps
from runner.run_config import RunConfig
from runner.system.console import counted, print_table
from runner.task.build import Job
from runner.tf_private.replaced import replaced
from runner.tracking.plain_values import leaves
from runner.types import ONLY_KEY

TRY_SECS = 60.0
"""Seconds to wait for the first batch of an input, and for what is computed of it."""


Evaluations = Sequence[tuple[EvalSpec, EvalSetup]]
"""The evaluations of a dry run."""


def rehearse(config: Config, job: Job) -> dict[str, Any]:
    """Build and trace what `job` would train and evaluate, restore its checkpoint, print and return a description, and
    compute with the first batch of each input, in memory.

    Raises:
      ValueError: the checkpoint does not fit the model, or an evaluation requests a variable that training does not
        have. Errors of the user's functions and data pass through.
    """
    assert job.train_spec is not None
    # A shuffle may read for minutes before its first batch. A checkpoint has its state, so a resumed run needs it.
    unshuffled = replaced(tf.data.Dataset, "shuffle", lambda dataset, *_, **__: dataset)
    with unshuffled if job.estimator.latest_checkpoint() is None else contextlib.nullcontext():
        training = job.estimator.prepare(job.train_spec.input_fn, job.train_spec.hooks, job.train_spec.max_epochs)
        trained = set(training.model.store.saved)
        evaluations = [(spec, job.estimator.prepare_evaluation(spec.input_fn)) for spec in job.eval_specs]
    for spec, setup in evaluations:
        check_ends(setup.pipeline, math.inf if spec.steps is None else spec.steps, spec.hooks)
        setup.program.check_fetches(spec.hooks)
        _check_variables(setup, trained)
        if training.latest is not None:
            setup.model.restore(training.latest)
    if job.receiver_fn is not None:
        job.estimator.prepare_prediction(lambda: training.input.pipeline.given.map(lambda features, *_: features))
    answer = {"run": _print_run(config, training, evaluations), **_print_inputs(config, training, evaluations)}
    answer |= {
        "variables": print_variables(training.model.store, training.program.trace, sys.stdout),
        "outputs": _print_outputs(training, evaluations),
    }
    is_divided = training.model.store.num_replicas > 1 and training.input.pipeline.global_batch_size is not None
    if is_divided and evaluations:
        _try_in_halves(job, training.input.pipeline)
    # Last, because a step changes the values in memory.
    for spec, setup in evaluations:
        _try(eval_key(spec.name or ""), setup.pipeline, setup.program.run, 0, 1)
    _try("input.train", training.input.pipeline, training.program.loop(), Steps(1, may_end=True))
    print("\nNothing was written.", flush=True)
    return answer


def _try(key: str, pipeline: InputPipeline, compute: Callable[..., Any], *arguments: Any) -> None:
    """Compute with the first batch of an input for at most TRY_SECS, unless a hook or a service has the data."""
    with contextlib.suppress(multiprocessing.TimeoutError), multiprocessing.pool.ThreadPool(1) as pool:
        if pipeline.why_no_state is None:
            pool.apply_async(compute, (pipeline.open(), *arguments)).get(TRY_SECS)
        return
    print(f"\n{key}: its first batch was not computed within {TRY_SECS:g} s, so its values were not tried.")


def _try_in_halves(job: Job, pipeline: InputPipeline) -> None:
    """Warn if the loss of the first global batch is neither the mean nor the sum of the losses of its halves.

    In inference mode, in which BatchNormalization does not use the batch's statistics and dropout drops nothing.
    """
    losses: list[float] = []
    with contextlib.suppress(multiprocessing.TimeoutError), multiprocessing.pool.ThreadPool(1) as pool:
        if pipeline.why_no_state is None:
            losses = pool.apply_async(_losses_of_parts, (job, pipeline)).get(TRY_SECS)
    if not losses:
        return
    whole, first, second = losses
    mean = (first + second) / 2
    is_close = functools.partial(math.isclose, whole, rel_tol=1e-4, abs_tol=1e-6)
    if is_close(mean) or is_close(first + second) or math.isnan(whole):
        return
    print(
        f"\nThe loss of the first batch is {whole:.6g}, and {mean:.6g} as the mean over its halves: it couples the "
        "examples of a batch. On several replicas, each has the loss of its own part of the batch. For the loss of the "
        "whole batch, give it the rows of all replicas: runner.all_gather(tensor)."
    )


def _losses_of_parts(job: Job, pipeline: InputPipeline) -> list[float]:
    """Return the losses of the first global batch and of its two halves, equally large; empty: it has one example."""
    with pipeline.reading():
        batch = next(iter(pipeline.given))
    half = int(num_rows(batch)) // 2
    if half == 0:
        return []
    losses = []
    for first, end in ((0, 2 * half), (0, half), (half, 2 * half)):
        part = tf.nest.map_structure(functools.partial(_rows_of, first, end), batch)
        elements = functools.partial(iter, [part])
        dataset = tf.data.Dataset.from_generator(elements, output_signature=any_rows(pipeline.given.element_spec))
        # One structure for all, so that the model is traced once.
        setup = job.estimator.prepare_evaluation(functools.partial(_as_it_is, dataset))
        setup.program.reset()
        losses.append(setup.program.run(setup.pipeline.open(), 0, 1).means()["loss"])
    return losses


def _rows_of(first: int, end: int, leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        sizes = [end - first, *leaf.dense_shape.numpy()[1:]]
        return tf.sparse.slice(leaf, [first, *[0] * (len(sizes) - 1)], sizes)
    return leaf[first:end] if leaf.shape.rank else leaf


def _as_it_is(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


def _check_variables(setup: EvalSetup, trained: set[str]) -> None:
    for name in (one for one in setup.model.store.saved if one not in trained):
        raise ValueError(
            f"variable {name!r} is requested in EVAL but not in TRAIN, so training's checkpoints do not have it. "
            "Every mode of model_fn uses the variables of TRAIN under the same names."
        )


# --- the run ----------------------------------------------------------------------------------------------------------


def _print_run(config: Config, training: TrainSetup, evaluations: Evaluations) -> Any:
    rows = [
        ("model_dir", str(config.model_dir) if os.path.isdir(str(config.model_dir)) else "a new one"),
        ("model_fn", str(config.model.fn)),
        ("strategy", f"{config.strategy.name}, {_devices(training.model, training.input.pipeline)}"),
    ]
    if evaluations and (setup := evaluations[0][1]).model is not training.model:
        rows.append(("eval_strategy", f"{config.eval_strategy.name}, {_devices(setup.model, setup.pipeline)}"))
    rows += [
        ("global batch", _batch(training.input.pipeline)),
        ("starts from", _start(training)),
        ("steps", _steps(training, config.train.max_steps)),
        ("optimizer", type(training.program.spec.optimizer).__name__ if training.program.is_native else "train_op"),
        ("loss", _loss(training)),
        *_cadences(config, training.config, evaluations),
        ("steps per loop", _loop_length(training)),
    ]
    return print_table("run", ["setting", "value"], rows)


def _devices(model: Model, feed: InputPipeline) -> str:
    names = [tf.DeviceSpec.from_string(device) for device in step_devices(model.strategy)]
    count = feed.num_replicas
    return f"{counted(count, 'replica')}: " + ", ".join(
        f"{device.device_type}:{device.device_index or 0}" for device in names[:count]
    )


def _batch(feed: InputPipeline) -> str:
    size, replicas = feed.global_batch_size, feed.num_replicas
    if size is None:
        return "batch_size=null: the function's own batches, one for each replica"
    if size % replicas:
        return f"{size}, divided over {replicas} replicas as evenly as possible"
    return f"{size}, {size // replicas} per replica"


def _start(training: TrainSetup) -> str:
    if training.latest is None:
        return "step 0: there is no checkpoint"
    batches = training.input.num_steps_read
    place = f"batch {batches + 1} of its input" if batches else "the beginning of its input"
    return f"step {training.model.store.global_step}: {os.path.basename(training.latest)}, at {place}"


def _steps(training: TrainSetup, max_steps: int | None) -> str:
    start, target = training.model.store.global_step, training.target(max_steps=max_steps)
    if start >= target:
        return f"none: the run is already at step {start} of {int(target)}"
    if math.isinf(target) and training.input.was_at_its_end:
        return "none: the training input was read to its end"
    epoch = training.input.pipeline.remaining_steps()
    if epoch is None:
        length = "the end of the input is not known"
    elif math.isinf(epoch):
        length = "the input has no end"
    else:
        passes = training.input.pipeline.num_epochs
        length = f"{int(epoch):,} steps " + ("per epoch" if passes is None else f"in {passes} epochs")
        target = min(target, start + training.input.remaining_steps)
    if math.isinf(target):
        return f"from {start} on; {length}"
    return f"from {start} to {int(target):,}; {length}"


def _loss(training: TrainSetup) -> str:
    rank = training.program.spec.loss.shape.rank
    return "one per example" if rank == 1 else "a scalar: the mean over the batch of a replica"


def _cadences(config: Config, run: RunConfig, evaluations: Evaluations) -> list[tuple[str, str]]:
    """Return (name, value) rows about when the run logs, saves and evaluates.

    Args:
      config: the config.
      run: the RunConfig with the requests of the model's own hooks, but without event files, which a dry run does not
        write.
      evaluations: the evaluations.
    """
    steps, secs = run.save_checkpoints_steps, run.save_checkpoints_secs
    save = f"every {steps:,} steps" if steps else f"every {secs:g} s" if secs else "never before the end"
    keep = f"the newest {run.keep_checkpoint_max}" if run.keep_checkpoint_max else "all"
    rows = [
        ("save", f"{save}, and at the end; {keep} are kept"),
        ("log", _every(run.log_step_count_steps)),
        ("summaries", _every(config.train.summary_steps if config.tracking.tensorboard else None)),
    ]
    return rows + [(evaluation_prefix(spec.name), _evaluation_cadence(spec)) for spec, _ in evaluations]


def _every(steps: int | None) -> str:
    return f"every {steps:,} steps" if steps else "never"


def _evaluation_cadence(spec: EvalSpec) -> str:
    facts = [f"{spec.steps} batches" if spec.steps else "all examples", "of each checkpoint"]
    facts += [f"at least {spec.throttle_secs:g} s apart"] if spec.throttle_secs else []
    facts += [f"not in the first {spec.start_delay_secs:g} s"] if spec.start_delay_secs else []
    facts += ["and before the first step"] if spec.at_start else []
    return " ".join(facts[:2]) + "".join(f", {fact}" for fact in facts[2:])


def _loop_length(training: TrainSetup) -> str:
    longest = training.session_hooks.max_steps_per_loop
    if longest:
        return f"at most {longest}: session hooks look at the steps"
    return str(training.config.steps_per_loop or "auto: until a loop takes about a second")


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def _print_inputs(config: Config, training: TrainSetup, evaluations: Evaluations) -> dict[str, Any]:
    feeds = [("train", "input.train", config.input.train.fn, training.input.pipeline)]
    for spec, setup in evaluations:
        name = spec.name or ""
        feeds.append((evaluation_prefix(name), eval_key(name), config.input.evals[name].fn, setup.pipeline))
    print()
    rows = [[key, str(fn), _batch(feed), f"{feed.shard}: {feed.reason}"] for _, key, fn, feed in feeds]
    inputs = print_table("inputs", ["input", "function", "batch", "sharding"], rows)
    print()
    rows = [
        [label, name, spec.dtype.name if hasattr(spec, "dtype") else type(spec).__name__, shape_of(spec)]
        for label, _, _, feed in feeds
        for name, spec in tensors(feed.dataset.element_spec)
    ]
    return {"inputs": inputs, "data": print_table("features and labels", ["input", "name", "dtype", "shape"], rows)}


def _print_outputs(training: TrainSetup, evaluations: Evaluations) -> Any:
    spec = (evaluations[0][1] if evaluations else training).program.spec
    predictions = spec.predictions
    named = {} if predictions is None else predictions if isinstance(predictions, dict) else {ONLY_KEY: predictions}
    rows = [["prediction", name, value.dtype.name, shape_of(value)] for name, value in leaves("", named)]
    for eval_spec, setup in evaluations:
        names = ["loss", *sorted(setup.program.spec.eval_metric_ops or {})]
        rows += [["metric", f"{evaluation_prefix(eval_spec.name)}/{name}", "", ""] for name in names]
    print()
    return print_table("outputs", ["output", "name", "dtype", "shape"], rows)
