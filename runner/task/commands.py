"""One function per command, on the objects of its config. Each returns its part of the summary."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from runner.checkpoint import reader, retention
from runner.config.metric_names import evaluation_prefix
from runner.config.schema import Config, ConfigError
from runner.config.validation import checkpoint_in
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.devices import configure_devices, describe_devices, peak_memory
from runner.distribute.grpc_server import kept_local, serve, start_server
from runner.estimator.run_exports import RunExports
from runner.estimator.train_and_evaluate import evaluate_checkpoints, train_and_evaluate
from runner.hooks.hook import Hook, PassContext, Run
from runner.programs.predict import num_examples
from runner.system.console import Progress, counted, relative
from runner.task import dry_run, inspect_run, prediction_files, preemption, profile_input
from runner.task.build import Job, build_job, build_keep
from runner.task.stop_hook import StopRequest
from runner.tracking import tensorboard
from runner.tracking.journal import Journal

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskContext:
    """The process in which a command runs, and where the command reports.

    Attributes:
      stop: a hook that ends the current work when a stop is requested.
      started: when the task began, in seconds on the monotonic clock.
      cluster: this task's place.
    """

    journal: Journal
    progress: Progress
    stop: StopRequest
    started: float
    cluster: Cluster = ALONE


class Ready(Hook):
    """A hook that reports, once and before the first batch, how long the start took."""

    def __init__(self, context: TaskContext) -> None:
        self._context = context
        self._said = False

    def begin(self, run: Run) -> None:
        if self._said:
            return
        self._said = True
        phases = []
        for name, secs in self._context.journal.phases.items():
            if secs >= 0.05:  # else it would be shown as 0.0 s
                phases.append(f"{name} {secs:.1f} s")
        message = f"ready after {time.monotonic() - self._context.started:.1f} s"
        if phases:
            message += f": {', '.join(phases)}"
        self._context.progress.message(message)


def run(config: Config, context: TaskContext) -> dict[str, Any]:
    """Run `config.command`.

    Returns:
      The command's part of the summary: global_step, checkpoint, metrics, examples, ... Of a command that leaves no
      record: `answer`, what it printed, for run.output=json.

    Raises:
      Interrupted: an evaluation or prediction was asked to stop. If training is asked to stop, it saves and returns.
    """
    assert config.model_dir is not None
    if config.command == "inspect":
        return {"answer": inspect_run.inspect(Path(config.model_dir), keep=build_keep(config))}
    if context.cluster.is_server:
        return _serve(config, context)
    if context.cluster.is_evaluator:
        _check_evaluator(config)
    keras.config.disable_interactive_logging()  # download bars (get_file) break the live line
    with context.journal.phase("build"):
        hooks = (context.stop, Ready(context))
        job = build_job(config, context.journal, context.progress, hooks, context.cluster)
    context.stop.install()  # once more, because TensorFlow may have installed a handler with the strategy
    if config.command == "dry_run":
        return {"answer": dry_run.rehearse(config, job)}
    if config.command == "profile_input":
        check_stop = functools.partial(context.stop.after_batches, PassContext(job.estimator.model_dir, 0), 0)
        return {"answer": profile_input.profile_input(config, job, check_stop)}
    replicas = job.estimator.config.num_replicas_in_sync
    devices = describe_devices(config.strategy, replicas)
    context.journal.event("built", num_replicas=replicas, devices=devices)
    context.progress.message(_headline(config, replicas, devices, context.cluster))
    with preemption.watched(config, context.stop):
        if context.cluster.is_evaluator:
            return _evaluate_checkpoints(job, context)
        result = _COMMANDS[config.command](config, job, context)
        return {**result, "peak_memory": peak_memory()}


def _serve(config: Config, context: TaskContext) -> dict[str, Any]:
    """Run a parameter server, or a worker of a parameter-server run."""
    configure_devices(config.run)
    context.journal.event("joining")
    with context.journal.phase("rendezvous"), kept_local(context.cluster):
        server = start_server(context.cluster)
    context.journal.event("joined")
    with preemption.watched(config, context.stop):
        serve(server)
    return {}


def _check_evaluator(config: Config) -> None:
    """Raise ConfigError if this process is an evaluator but the other processes would evaluate, too."""
    if config.command != "train_and_evaluate":
        raise ConfigError(f"This process is the evaluator of its cluster, but command={config.command} needs none.")
    if not config.cluster.evaluator:
        raise ConfigError(
            "This process is the evaluator of its cluster, but with cluster.evaluator=false the training processes "
            "evaluate. Start all processes with cluster.evaluator=true."
        )


def _evaluate_checkpoints(job: Job, context: TaskContext) -> dict[str, Any]:
    """Run the evaluator."""
    assert job.train_spec is not None

    def wait(secs: float) -> None:
        time.sleep(secs)
        context.stop.after_batches(PassContext(job.estimator.model_dir, 0), 0)

    followed = evaluate_checkpoints(job.estimator, job.train_spec, job.eval_specs, wait)
    # The chief reports the other parts of the summary.
    return {"metrics": flat_metrics(followed.metrics)}


def _train_and_evaluate(config: Config, job: Job, context: TaskContext) -> dict[str, Any]:
    assert job.train_spec is not None
    trained = train_and_evaluate(job.estimator, job.train_spec, job.eval_specs)
    job.unread_params.say()
    evaluations_export = bool(job.eval_specs)
    if job.exporters and not evaluations_export and not context.stop.was_heeded:
        RunExports(job.estimator).call(job.exporters, None, {}, is_final=True)
    return {
        "global_step": trained.global_step,
        "checkpoint": trained.checkpoint,
        "metrics": flat_metrics(trained.metrics),
        "steps_per_sec": trained.steps_per_sec or None,
        "input_bound": trained.input_bound,
        "examples": trained.examples,
        "stopped_early": trained.stopped_early,
        "interrupted": trained.interrupted,
    }


def _evaluate(config: Config, job: Job, context: TaskContext) -> dict[str, Any]:
    facts = _checkpoint_of(job, checkpoint_in("eval.checkpoint", config))
    path = facts["checkpoint"]
    evaluated = {}
    for spec in job.eval_specs:
        metrics = job.estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, path, spec.name)
        evaluated[spec.name or ""] = metrics
    return {**facts, "metrics": flat_metrics(evaluated)}


def _predict(config: Config, job: Job, context: TaskContext) -> dict[str, Any]:
    """Write the predictions of a checkpoint to predict.output, and return the command's part of the summary."""
    assert job.predict_input is not None
    facts = _checkpoint_of(job, checkpoint_in("predict.checkpoint", config))
    output = Path(str(config.model_dir)) / "predictions.jsonl"
    if config.predict.output:
        output = Path(config.predict.output)
    output = output.absolute()
    examples = 0
    with context.journal.phase("predict"), prediction_files.open_predictions(output) as writer:
        batches = job.estimator.predict(
            job.predict_input, config.predict.keys, job.hooks, facts["checkpoint"], False,
            with_features=True, must_end=True,
        )  # fmt: skip
        for batch in batches:
            examples += num_examples(batch)
            writer.write(batch)
    if not examples:
        _log.warning("input.predict returned no examples: %s is empty.", relative(output))
    context.progress.message(f"{examples:,} predictions of step {facts['global_step']} in {relative(output)}")
    return {**facts, "predictions": str(output), "examples": examples}


def _export(config: Config, job: Job, context: TaskContext) -> dict[str, Any]:
    assert job.receiver_fn is not None and config.model_dir is not None
    facts = _checkpoint_of(job, checkpoint_in("export.checkpoint", config))
    folder = job.estimator.config.export_dir or str(Path(config.model_dir) / "export")
    job.estimator.export_saved_model(folder, job.receiver_fn, checkpoint_path=facts["checkpoint"])
    return facts


_COMMANDS: Mapping[str, Callable[[Config, Job, TaskContext], dict[str, Any]]] = {
    "train_and_evaluate": _train_and_evaluate,
    "train": _train_and_evaluate,  # a config of this command has no evaluations
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
}


def flat_metrics(by_eval: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return metrics by their names in the journal and in MLflow: eval/<metric>, eval_<name>/<metric>."""
    flat = {}
    for name, evaluated in by_eval.items():
        prefix = evaluation_prefix(name)
        for metric, value in tensorboard.scalars(evaluated).items():
            if metric != "global_step":
                flat[f"{prefix}/{metric}"] = value
    return flat


def _headline(config: Config, replicas: int, devices: str, cluster: Cluster) -> str:
    """Return one line with the command, the model, the devices and the number of replicas or workers."""
    if cluster.is_evaluator:
        return f"waiting for checkpoints of {config.model.fn}, on {devices}"
    facts = [f"{config.command} {config.model.fn} on {devices}; strategy {config.strategy.name}"]
    if cluster.num_ps:
        facts.append(counted(cluster.num_workers - 1, "asynchronous worker"))
        facts.append(counted(cluster.num_ps, "parameter server"))
    else:
        facts.append(counted(replicas, "replica"))
    if config.command in ("train_and_evaluate", "train"):
        size = config.input.train.batch_size
        if size:
            facts.append(f"global batch {size}")
        else:
            facts.append(f"batches of {config.input.train.fn} per replica")
        if config.run.debug:
            facts.append(f"run.debug={config.run.debug}")
    return ", ".join(facts)


def _checkpoint_of(job: Job, chosen: str | None) -> dict[str, Any]:
    """Return the checkpoint `chosen`, or the latest one, with its step and its own metrics, if it was evaluated."""
    path = chosen or job.estimator.latest_checkpoint()
    if path is None:
        return {"checkpoint": None, "global_step": None}
    return {"checkpoint": path, "global_step": reader.checkpoint_step(path), "metrics": retention.metrics_of(path)}
