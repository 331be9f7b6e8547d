"""command=profile_input: read the training input alone, and print what it costs and what would make it faster."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.config.schema import CLUSTER_STRATEGIES, Config
from runner.data.input_profile import Change, InputProfile, Stage, Trial, many_calls, num_cores, profile
from runner.data.inputs import EmptyInputError, Input, InputPipeline, why_empty
from runner.distribute.cluster_resolver import detect
from runner.distribute.collectives import SINGLE_PROCESS
from runner.system.console import counted, print_table
from runner.system.user_frames import Frame
from runner.task.build import Job

MIN_GAIN = 1.1
"""Smallest gain that is advice; smaller ones are within what a second measurement differs by."""

_DOES = {
    "parallel": "num_parallel_calls=tf.data.AUTOTUNE",
    "many": f"num_parallel_calls={many_calls()}: more calls than cores, for a function that waits",
    "interleave": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE) in place of .flat_map",
    "batch_first": ".batch before it, and tf.vectorized_map or a function of whole batches",
    "cache": ".cache() behind it, and both before .shuffle and .repeat",
}
_BUT = {
    "interleave": "another order of the examples",
    "cache": "from the second pass on; all elements stay in memory",
}


def profile_input(config: Config, job: Job, check: Callable[[], None]) -> dict[str, Any]:
    """Measure the training input of `job` without a model, print what was found and return it.

    Args:
      check: called often; raises Interrupted if the command is to stop.

    Raises:
      EmptyInputError: it has no examples. Errors of the user's function and data pass through.
    """
    assert job.train_spec is not None
    build = _Build(config, job)
    pipeline = build.pipeline()
    with pipeline.reading():
        try:
            found = profile(build, check)
        except tf.errors.OutOfRangeError:
            raise EmptyInputError(why_empty(pipeline, "train", SINGLE_PROCESS)) from None
    answer = {"input": _print_input(config, pipeline, found)}
    answer["stages"] = _print_stages(found)
    answer["autotune"] = _print_tuned(found)
    answer["advice"] = _print_advice(found)
    return answer


class _Build:
    """Builds the training input as the run would read it. Called: returns its dataset."""

    def __init__(self, config: Config, job: Job) -> None:
        assert job.train_spec is not None
        self._estimator = job.estimator
        self._max_epochs = job.train_spec.max_epochs
        source = job.train_spec.input_fn
        assert isinstance(source, Input)
        self._num_workers = _num_workers(config)
        if config.strategy.name == "parameter_server":
            # Each worker reads its own copy, or its own part in batches of the whole size.
            is_divided = source.shard in ("files", "input_fn")
            self._num_workers = self._num_workers if is_divided else 1
            if source.batch_size is not None:
                source = dataclasses.replace(source, batch_size=source.batch_size * self._num_workers)
        self._source = source

    def pipeline(self) -> InputPipeline:
        return self._estimator.train_pipeline(self._source, self._max_epochs, self._num_workers)

    def __call__(self) -> tf.data.Dataset:
        return self.pipeline().dataset


def _num_workers(config: Config) -> int:
    """Return the number of workers that train in the run. This command runs in one process."""
    if config.strategy.name not in CLUSTER_STRATEGIES:
        return 1
    detected = detect(os.environ, config.cluster, config.strategy)
    if detected.source == "local":
        return config.cluster.num_workers
    cluster = detected.cluster
    # The chief of parameter servers only requests the steps.
    return cluster.num_workers - 1 if cluster.num_ps else cluster.num_workers


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_input(config: Config, pipeline: InputPipeline, found: InputProfile) -> Any:
    speed = found.speed
    replicas = counted(pipeline.num_replicas, "replica")
    rows: list[tuple[str, Any]] = [
        ("function", str(config.input.train.fn)),
        ("read by", f"strategy {config.strategy.name}, {replicas}; sharding {pipeline.shard}: {pipeline.reason}"),
        ("elements per second", _rounded(speed.elements / speed.secs)),
        ("examples per second", _rounded(speed.examples / speed.secs)),
        ("bytes per second", _rounded(speed.num_bytes / speed.secs)),
        ("examples per element", _rounded(speed.examples / speed.elements)),
        ("bytes per element", _rounded(speed.num_bytes / speed.elements)),
        ("busy", f"{found.cpu:.0%} of {counted(num_cores(), 'core')}"),
    ]
    return print_table("input", ["fact", "value"], rows)


def _print_stages(found: InputProfile) -> Any:
    rows = []
    for stage in found.stages:
        up_to = "" if stage.secs_up_to is None else _rounded(1000 * stage.secs_up_to)
        name = "  " * stage.depth + stage.name
        rows.append([name, _function(stage), _place(stage), _rounded(1000 * stage.secs), f"{stage.share:.0%}", up_to])
    print()
    headers = ["stage", "function", "line", "work ms", "share", "up to here ms"]
    answer = print_table("stages, from the source to the end; milliseconds per element", headers, rows)
    for row, stage in zip(answer, found.stages, strict=True):
        row["share"] = round(stage.share, 4)
        row["stage"] = stage.name
        row["depth"] = stage.depth
    return answer


def _print_tuned(found: InputProfile) -> Any:
    print()
    if not found.tuned:
        print("AUTOTUNE has chosen nothing: no stage leaves it a value, or autotune.enabled is false.")
        return []
    rows = [[stage, name, _rounded(value)] for stage, name, value in found.tuned]
    return print_table("chosen by AUTOTUNE", ["stage", "parameter", "value"], rows)


def _print_advice(found: InputProfile) -> Any:
    rows = []
    advice = [trial for trial in found.trials if trial.gain >= MIN_GAIN]
    for trial in advice:
        rows.append(
            [_at(trial.change), _DOES[trial.change.kind], f"{trial.gain:.2f}x", _rounded(trial.examples_per_sec)]
        )
    print()
    answer: list[dict[str, Any]] = []
    if rows:
        print_table("what to try, in order of its gain", ["where", "change", "gain", "examples per second"], rows)
        answer = [_as_answer(trial) for trial in advice]
    else:
        print("Nothing that was tried makes it faster.")
    others = [trial for trial in found.trials if trial.gain < MIN_GAIN]
    for trial in others:
        print(f"tried: {_at(trial.change)}: {_DOES[trial.change.kind]}: {trial.gain:.2f}x")
    for kind, but in _BUT.items():
        if any(trial.change.kind == kind for trial in advice):
            print(f"{_DOES[kind]}: {but}.")
    print("\nNothing was written.", flush=True)
    return answer


def _as_answer(trial: Trial) -> dict[str, Any]:
    return {
        "change": trial.change.kind,
        "where": _at(trial.change),
        "function": trial.change.call.function,
        "do": _DOES[trial.change.kind],
        "gain": round(trial.gain, 3),
        "examples_per_second": _rounded(trial.examples_per_sec),
    }


def _at(change: Change) -> str:
    call = change.call
    function = call.function or "..."
    return f"{_line(call.frame)} .{call.method}({function})".strip()


def _function(stage: Stage) -> str:
    return stage.call.function if stage.call is not None else ""


def _place(stage: Stage) -> str:
    return "" if stage.call is None else _line(stage.call.frame)


def _line(frame: Frame | None) -> str:
    if frame is None:
        return ""
    path = os.path.relpath(frame.filename)
    return f"{frame.filename if path.startswith('..') else path}:{frame.lineno}"


def _rounded(value: float) -> float:
    """Return a value with four digits."""
    return float(f"{value:.4g}")
