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
    shuffling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if job.estimator.latest_checkpoint() is None:
        # A shuffle may read for minutes before its first batch. A checkpoint has its state, so a resumed run needs it.
        shuffling = replaced(tf.data.Dataset, "shuffle", lambda dataset, *_, **__: dataset)
    with shuffling:
        training = job.estimator.prepare(job.train_spec.input_fn, job.train_spec.hooks, job.train_spec.max_epochs)
        trained = set(training.model.store.saved)
        evaluations = [(spec, job.estimator.prepare_evaluation(spec.input_fn)) for spec in job.eval_specs]
    for spec, setup in evaluations:
        steps = math.inf if spec.steps is None else spec.steps
        check_ends(setup.pipeline, steps, spec.hooks)
        setup.program.check_fetches(spec.hooks)
        _check_variables(setup, trained)
        if training.latest is not None:
            setup.model.restore(training.latest)
    if job.receiver_fn is not None:
        # Trace model_fn as an export would, in PREDICT and with features alone, to find its mistakes here.
        job.estimator.prepare_prediction(lambda: training.input.pipeline.given.map(lambda features, *_: features))
    pipeline = training.input.pipeline
    answer: dict[str, Any] = {}
    answer["run"] = _print_run(config, training, evaluations)
    answer |= _print_inputs(config, training, evaluations)
    answer["variables"] = print_variables(training.model.store, training.program.trace, sys.stdout)
    answer["outputs"] = _print_outputs(training, evaluations)
    is_divided = training.model.store.num_replicas > 1 and pipeline.global_batch_size is not None
    if is_divided and evaluations:
        _try_in_halves(job, pipeline)
    # Last, because a step changes the values in memory.
    for spec, setup in evaluations:
        _try(eval_key(spec.name or ""), setup.pipeline, setup.program.run, 0, 1)
    _try("input.train", pipeline, training.program.loop(), Steps(1, may_end=True))
    print("\nNothing was written.", flush=True)
    return answer


def _try(key: str, pipeline: InputPipeline, compute: Callable[..., Any], *arguments: Any) -> None:
    """Compute with the first batch of an input, and say so if that takes longer than TRY_SECS.

    Nothing is computed from an input whose iterator cannot be saved (`why_no_state`): a hook feeds it, a service
    computes it, or it writes a cache.
    """
    with contextlib.suppress(multiprocessing.TimeoutError), multiprocessing.pool.ThreadPool(1) as pool:
        if pipeline.why_no_state is None:
            pool.apply_async(compute, (pipeline.open(), *arguments)).get(TRY_SECS)
        return
    # After a TimeoutError.
    print(f"\n{key}: its first batch was not computed within {TRY_SECS:g} s, so its values were not tried.")


def _try_in_halves(job: Job, pipeline: InputPipeline) -> None:
    """Warn if the loss of the first global batch is neither the mean nor the sum of the losses of its halves.

    The losses are those of EVAL, in which BatchNormalization does not use the batch's statistics and dropout drops
    nothing.
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
    is_mean_or_sum = is_close(mean) or is_close(first + second)
    if is_mean_or_sum or math.isnan(whole):
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
        # All three datasets have the same element_spec, so that the model is traced once.
        setup = job.estimator.prepare_evaluation(functools.partial(_as_it_is, dataset))
        setup.program.reset()
        losses.append(setup.program.run(setup.pipeline.open(), 0, 1).means()["loss"])
    return losses


def _rows_of(first: int, end: int, leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        size_of_a_row = leaf.dense_shape.numpy()[1:]
        begin = [first] + [0] * len(size_of_a_row)
        return tf.sparse.slice(leaf, begin, [end - first, *size_of_a_row])
    if not leaf.shape.rank:  # a scalar belongs to the whole batch
        return leaf
    return leaf[first:end]


def _as_it_is(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


def _check_variables(setup: EvalSetup, trained: set[str]) -> None:
    for name in setup.model.store.saved:
        if name not in trained:
            raise ValueError(
                f"variable {name!r} is requested in EVAL but not in TRAIN, so training's checkpoints do not have it. "
                "Every mode of model_fn uses the variables of TRAIN under the same names."
            )


# --- the run ----------------------------------------------------------------------------------------------------------


def _print_run(config: Config, training: TrainSetup, evaluations: Evaluations) -> Any:
    """Print the table of the run's settings, and return it."""
    pipeline = training.input.pipeline
    model_dir = str(config.model_dir)
    if not os.path.isdir(model_dir):
        model_dir = "a new one"
    optimizer = "train_op"
    if training.program.is_native:
        optimizer = type(training.program.spec.optimizer).__name__
    rows = [("model_dir", model_dir), ("model_fn", str(config.model.fn))]
    rows.append(("strategy", f"{config.strategy.name}, {_describe_devices(training.model, pipeline)}"))
    if evaluations:
        _, setup = evaluations[0]
        if setup.model is not training.model:
            devices = _describe_devices(setup.model, setup.pipeline)
            rows.append(("eval_strategy", f"{config.eval_strategy.name}, {devices}"))
    rows.append(("global batch", _describe_batch(pipeline)))
    rows.append(("starts from", _describe_start(training)))
    rows.append(("steps", _describe_steps(training, config.train.max_steps)))
    rows.append(("optimizer", optimizer))
    rows.append(("loss", _describe_loss(training)))
    rows += _describe_cadences(config, training.config, evaluations)
    rows.append(("steps per loop", _describe_loop_length(training)))
    return print_table("run", ["setting", "value"], rows)


def _describe_devices(model: Model, pipeline: InputPipeline) -> str:
    count = pipeline.num_replicas
    names = []
    for name in step_devices(model.strategy)[:count]:
        device = tf.DeviceSpec.from_string(name)
        names.append(f"{device.device_type}:{device.device_index or 0}")
    return f"{counted(count, 'replica')}: {', '.join(names)}"


def _describe_batch(pipeline: InputPipeline) -> str:
    size = pipeline.global_batch_size
    replicas = pipeline.num_replicas
    if size is None:
        return "batch_size=null: the function's own batches, one for each replica"
    if size % replicas:
        return f"{size}, divided over {replicas} replicas as evenly as possible"
    return f"{size}, {size // replicas} per replica"


def _describe_start(training: TrainSetup) -> str:
    if training.latest is None:
        return "step 0: there is no checkpoint"
    place = "the beginning of its input"
    batches = training.input.num_steps_read
    if batches:
        place = f"batch {batches + 1} of its input"
    return f"step {training.model.store.global_step}: {os.path.basename(training.latest)}, at {place}"


def _describe_steps(training: TrainSetup, max_steps: int | None) -> str:
    """Return from which step to which the run would train, and how many steps its input has, in words."""
    start = training.model.store.global_step
    target = training.target(max_steps=max_steps)
    if start >= target:
        return f"none: the run is already at step {start} of {int(target)}"
    if math.isinf(target) and training.input.was_at_its_end:
        return "none: the training input was read to its end"
    steps_of_input = training.input.pipeline.remaining_steps()
    if steps_of_input is None:
        length = "the end of the input is not known"
    elif math.isinf(steps_of_input):
        length = "the input has no end"
    else:
        length = f"{int(steps_of_input):,} steps {_describe_passes(training.input.pipeline)}"
        target = min(target, start + training.input.remaining_steps)
    if math.isinf(target):
        return f"from {start} on; {length}"
    return f"from {start} to {int(target):,}; {length}"


def _describe_passes(pipeline: InputPipeline) -> str:
    if pipeline.num_epochs is None:
        return "per epoch"
    return f"in {pipeline.num_epochs} epochs"


def _describe_loss(training: TrainSetup) -> str:
    if training.program.spec.loss.shape.rank == 1:
        return "one per example"
    return "a scalar: the mean over the batch of a replica"


def _describe_cadences(config: Config, run: RunConfig, evaluations: Evaluations) -> list[tuple[str, str]]:
    """Return (name, value) rows about when the run logs, saves and evaluates.

    Args:
      config: the config.
      run: the RunConfig with the requests of the model's own hooks, but without event files, which a dry run does not
        write.
      evaluations: the evaluations.
    """
    keep = "all"
    if run.keep_checkpoint_max:
        keep = f"the newest {run.keep_checkpoint_max}"
    summary_steps = None
    if config.tracking.tensorboard:
        summary_steps = config.train.summary_steps
    rows = [("save", f"{_describe_saves(run)}, and at the end; {keep} are kept")]
    rows.append(("log", _describe_period(run.log_step_count_steps)))
    rows.append(("summaries", _describe_period(summary_steps)))
    for spec, _ in evaluations:
        rows.append((evaluation_prefix(spec.name), _describe_evaluation(spec)))
    return rows


def _describe_saves(run: RunConfig) -> str:
    if run.save_checkpoints_steps:
        return f"every {run.save_checkpoints_steps:,} steps"
    if run.save_checkpoints_secs:
        return f"every {run.save_checkpoints_secs:g} s"
    return "never before the end"


def _describe_period(steps: int | None) -> str:
    if not steps:
        return "never"
    return f"every {steps:,} steps"


def _describe_evaluation(spec: EvalSpec) -> str:
    """Return how much of its input an evaluation reads and when it is made, in words."""
    amount = "all examples"
    if spec.steps:
        amount = f"{spec.steps} batches"
    facts = [f"{amount} of each checkpoint"]
    if spec.throttle_secs:
        facts.append(f"at least {spec.throttle_secs:g} s apart")
    if spec.start_delay_secs:
        facts.append(f"not in the first {spec.start_delay_secs:g} s")
    if spec.at_start:
        facts.append("and before the first step")
    return ", ".join(facts)


def _describe_loop_length(training: TrainSetup) -> str:
    longest = training.session_hooks.max_steps_per_loop
    if longest:
        return f"at most {longest}: session hooks look at the steps"
    return str(training.config.steps_per_loop or "auto: until a loop takes about a second")


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def _print_inputs(config: Config, training: TrainSetup, evaluations: Evaluations) -> dict[str, Any]:
    """Print the tables of the inputs and of their features and labels, and return both."""
    rows = [_row_of_input("input.train", config.input.train.fn, training.input.pipeline)]
    for spec, setup in evaluations:
        name = spec.name or ""
        rows.append(_row_of_input(eval_key(name), config.input.evals[name].fn, setup.pipeline))
    print()
    inputs = print_table("inputs", ["input", "function", "batch", "sharding"], rows)
    tensor_rows = _rows_of_tensors("train", training.input.pipeline)
    for spec, setup in evaluations:
        tensor_rows += _rows_of_tensors(evaluation_prefix(spec.name), setup.pipeline)
    print()
    data = print_table("features and labels", ["input", "name", "dtype", "shape"], tensor_rows)
    return {"inputs": inputs, "data": data}


def _row_of_input(key: str, function: str | None, pipeline: InputPipeline) -> list[str]:
    return [key, str(function), _describe_batch(pipeline), f"{pipeline.shard}: {pipeline.reason}"]


def _rows_of_tensors(label: str, pipeline: InputPipeline) -> list[list[Any]]:
    """Return a row for each tensor of an input."""
    rows = []
    for name, spec in tensors(pipeline.dataset.element_spec):
        dtype = type(spec).__name__  # of a spec without a dtype
        if hasattr(spec, "dtype"):
            dtype = spec.dtype.name
        rows.append([label, name, dtype, shape_of(spec)])
    return rows


def _print_outputs(training: TrainSetup, evaluations: Evaluations) -> Any:
    """Print the table of the model's predictions and of the metrics of all evaluations, and return it."""
    spec = training.program.spec
    if evaluations:  # their specs are more likely to have predictions, which TRAIN does not need
        _, first = evaluations[0]
        spec = first.program.spec
    predictions = spec.predictions
    if predictions is None:
        predictions = {}
    elif not isinstance(predictions, dict):
        predictions = {ONLY_KEY: predictions}
    rows = [["prediction", name, value.dtype.name, shape_of(value)] for name, value in leaves("", predictions)]
    for eval_spec, setup in evaluations:
        prefix = evaluation_prefix(eval_spec.name)
        for metric in ["loss", *sorted(setup.program.spec.eval_metric_ops or {})]:
            rows.append(["metric", f"{prefix}/{metric}", "", ""])
    print()
    return print_table("outputs", ["output", "name", "dtype", "shape"], rows)
