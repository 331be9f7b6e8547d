"""command=profile_input: read the training input alone, and print what it costs and what would make it faster."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.config.schema import CLUSTER_STRATEGIES, Config
from runner.data.input_profile.profile import CannotTryError, InputProfile, Trial, Untried, profile
from runner.data.input_profile.recorder import Change, many_calls, num_cores
from runner.data.inputs import EmptyInputError, Input, InputPipeline, why_empty
from runner.distribute.cluster_resolver import detect
from runner.distribute.collectives import SINGLE_PROCESS
from runner.system.console import counted, print_table
from runner.system.user_frames import Frame
from runner.task.build import Job
from runner.task.error_report import explain

_WHAT_TO_WRITE = {
    "parallel": "num_parallel_calls=tf.data.AUTOTUNE",
    "many": f"num_parallel_calls={many_calls()}: more calls than cores, for a function that waits",
    "interleave": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE) in place of .flat_map",
    "batch_first": ".batch before it, and tf.vectorized_map or a function of whole batches",
    "cache": ".cache() behind it, and both before .shuffle and .repeat",
}
_DRAWBACKS = {
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
    advice = [trial for trial in found.trials if trial.is_clear]
    others = [trial for trial in found.trials if not trial.is_clear]
    if not advice:
        print("\nNothing that was tried makes it clearly faster.")
    answer["advice"] = _print_trials("what to try, in order of its gain", advice, found)
    advised = {trial.change.kind for trial in advice}
    for kind, drawback in _DRAWBACKS.items():
        if kind in advised:
            print(f"{_WHAT_TO_WRITE[kind]}: {drawback}.")
    answer["no_clear_gain"] = _print_trials("tried, no clear gain", others, found)
    answer["not_tried"] = _print_untried(found.untried)
    print("\nNothing was written.", flush=True)
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
            if not is_divided:
                self._num_workers = 1
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
    if cluster.num_ps:
        return cluster.num_workers - 1  # the chief of parameter servers only requests the steps
    return cluster.num_workers


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_input(config: Config, pipeline: InputPipeline, found: InputProfile) -> Any:
    speed = found.speed
    replicas = counted(pipeline.num_replicas, "replica")
    strategy = config.strategy.name
    rows: list[tuple[str, Any]] = [("function", str(config.input.train.fn))]
    rows.append(("read by", f"strategy {strategy}, {replicas}; sharding {pipeline.shard}: {pipeline.reason}"))
    rows.append(("elements per second", _rounded(speed.elements / speed.secs)))
    rows.append(("examples per second", _rounded(speed.examples / speed.secs)))
    rows.append(("bytes per second", _rounded(speed.num_bytes / speed.secs)))
    rows.append(("examples per element", _rounded(speed.examples / speed.elements)))
    rows.append(("bytes per element", _rounded(speed.num_bytes / speed.elements)))
    rows.append(("busy", f"{found.cpu:.0%} of {counted(num_cores(), 'core')}"))
    return print_table("input", ["fact", "value"], rows)


def _print_stages(found: InputProfile) -> Any:
    rows = []
    for stage in found.stages:
        function = ""
        line = ""
        if stage.call is not None:
            function = stage.call.function
            line = _describe_line(stage.call.frame)
        up_to: Any = ""
        if stage.secs_up_to is not None:
            up_to = _rounded(1000 * stage.secs_up_to)
        name = "  " * stage.depth + stage.name
        rows.append([name, function, line, _rounded(1000 * stage.secs), f"{stage.share:.0%}", up_to])
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


def _print_trials(title: str, trials: Sequence[Trial], found: InputProfile) -> list[dict[str, Any]]:
    """Print a table of trials, if there are any, and return them."""
    before = found.speed.examples / found.speed.secs
    rows = []
    answer = []
    for trial in trials:
        gains = [turn.gain for turn in trial.rounds]
        with_change = _rounded(trial.gain * before)
        record = _record_of(trial.change)
        record["gain"] = round(trial.gain, 3)
        record["gain_min"] = round(min(gains), 3)
        record["gain_max"] = round(max(gains), 3)
        record["rounds_faster"] = trial.num_faster
        record["rounds"] = len(gains)
        record["examples_per_second"] = with_change
        answer.append(record)
        spread = f"{min(gains):.2f} to {max(gains):.2f}"
        faster = f"{trial.num_faster} of {len(gains)}"
        rows.append([record["where"], record["do"], f"{trial.gain:.2f}x", spread, faster, with_change])
    if rows:
        print()
        print_table(title, ["where", "change", "gain", "of each round", "faster in", "examples per second"], rows)
    return answer


def _print_untried(untried: Sequence[Untried]) -> list[dict[str, Any]]:
    """Print a table of the changes that could not be tried, if there are any, and return them."""
    answer = []
    for left in untried:
        record = _record_of(left.change)
        record["reason"] = _reason_of(left)
        answer.append(record)
    if answer:
        rows = [[record["where"], record["do"], record["reason"]] for record in answer]
        print()
        print_table("could not be tried", ["where", "change", "reason"], rows)
    return answer


def _reason_of(left: Untried) -> str:
    if isinstance(left.error, CannotTryError):
        return str(left.error)
    return textwrap.shorten(explain(left.error).said, 200)


def _record_of(change: Change) -> dict[str, Any]:
    """Return a change as run.output=json has it."""
    return {
        "change": change.kind,
        "where": _describe_call(change),
        "function": change.call.function,
        "do": _WHAT_TO_WRITE[change.kind],
    }


def _describe_call(change: Change) -> str:
    call = change.call
    function = call.function or "..."
    return f"{_describe_line(call.frame)} .{call.method}({function})".strip()


def _describe_line(frame: Frame | None) -> str:
    if frame is None:
        return ""
    path = os.path.relpath(frame.filename)
    if path.startswith(".."):
        path = frame.filename
    return f"{path}:{frame.lineno}"


def _rounded(value: float) -> float:
    """Return a value with four digits."""
    return float(f"{value:.4g}")
