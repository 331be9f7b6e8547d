"""One run from its config to its summary: starts its tasks, watches them, ships what they note, says how it ended.

This process never imports TensorFlow (but for `run.inline=true`): a task that crashes or is killed is always seen, and
each run of a sweep can configure TensorFlow's devices afresh.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runner
from runner import config as configs
from runner import dialect, report
from runner.cluster import ALONE, Cluster
from runner.config import Config, StrategyConfig
from runner.files import MODEL_SUMMARY_FILE, read_json
from runner.gang import Ending, Task
from runner.lock import alone_in, wait_for_tasks
from runner.masking import mask_text, masked, masked_override, secrets_of
from runner.mlflow_tracker import build_tracker
from runner.outcome import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    STILL_RUNNING,
    SUMMARY_FILE,
    Outcome,
    after_reading,
    read_outcome,
    summary_of,
    write_summary,
)
from runner.peer_run import PeerRun
from runner.peers import Leader
from runner.provenance import tags_of_this_process
from runner.resolvers import detect
from runner.restarts import Restarts
from runner.shipping import RunRecord, Shipper
from runner.stopping import StopRequests
from runner.tasks import Journals, Tasks, error_of, note_ending, say_errors
from runner.tracking import exported_models

PATIENCE_SECS = 30.0
"""How long a run that trains may take to its first step before it shows up in MLflow."""


@dataclass(frozen=True)
class Member:
    """What a run is in a sweep.

    Attributes:
      name: what varied; the run's name in MLflow.
      parent_run_id: the sweep's run in MLflow; None when there is none.
      prefix: of each line that is said; '' where one job runs at a time.
    """

    name: str = ""
    parent_run_id: str | None = None
    prefix: str = ""


def run(
    config: Config, env: Mapping[str, str], argv: Sequence[str] = (), *,
    stops: StopRequests | None = None, member: Member | None = None,
) -> int:  # fmt: skip
    """Does what `config` says, in its model_dir.

    Args:
      config: a checked one, with its model_dir.
      env: the environment of the task.
      argv: the command line, for the record.
      stops: where the signals of this command arrive; None: handled here.
      member: None: the run is no part of a sweep.

    Returns: 0 finished, 1 failed, 2 the user's config or code is wrong, 3 interrupted and resumable.
    Raises:
      ConfigError: another process is using the model_dir.
    """
    member = member or Member()
    env = dialect.environment(config.model, env)
    if config.strategy.name in configs.CLUSTER_STRATEGIES and not config.is_cluster:
        print(
            f"command={config.command} runs in one process, without strategy={config.strategy.name}.", file=sys.stderr
        )
        config = dataclasses.replace(config, strategy=StrategyConfig())
    place = None
    if config.command in configs.CLUSTER_COMMANDS:
        found = detect(env, config.cluster, config.strategy)
        if found.has_others:
            place, config = found.cluster, _with_evaluator(config, found.has_evaluator)
    with StopRequests() if stops is None else nullcontext(stops) as requests:
        try:
            if config.command in configs.UNRECORDED_COMMANDS:
                return _run_unrecorded(config, env, requests, member)
            if place is not None and not place.is_chief:
                return PeerRun(config, place, task_argv, functools.partial(task_env, env), requests).run()
            return _run_recorded(config, env, argv, requests, member, place)
        except OSError as error:
            _say_lost(config, env, error)
            return FAILED


def _with_evaluator(config: Config, has_evaluator: bool) -> Config:
    """`config` of a run that something else has started an evaluator for."""
    if not has_evaluator or config.command != "train_and_evaluate":
        return config
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, evaluator=True))


def _run_unrecorded(config: Config, env: Mapping[str, str], stops: StopRequests, member: Member) -> int:
    """A command that only tells something: nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="runner-") as scratch:
        if config.model_dir is None:
            config = dataclasses.replace(config, model_dir=str(Path(scratch) / "model"))
        file = Path(scratch) / "config.yaml"
        configs.save(config, file)
        tasks = _build_tasks(config, file, env, stops, member, Restarts(Path(scratch), 0), RunRecord())
        return read_outcome(_run_tasks(tasks, file).code, bool(stops.came), ()).code


def _run_recorded(
    config: Config, env: Mapping[str, str], argv: Sequence[str], stops: StopRequests, member: Member,
    place: Cluster | None,
) -> int:  # fmt: skip
    assert config.model_dir is not None
    model_dir = Path(config.model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    trains = config.command in configs.TRAINING_RUNS
    file = model_dir / ("config.yaml" if trains else f"config.{config.command}.yaml")
    with alone_in(model_dir):
        _say_changes(config, file)
        record = RunRecord.read(model_dir)
        if trains:
            record.generation += 1
            record.training = STILL_RUNNING.status
        record.save(model_dir)
        configs.save(config, file)
        secrets = secrets_of(configs.to_tree(config))
        earlier = read_json(model_dir / SUMMARY_FILE) or {}
        if trains:  # nobody would repair it after a reader that was killed
            write_summary(model_dir, summary_of(STILL_RUNNING, config, record.mlflow_run_id, secrets))
        wait_for_tasks(model_dir, _say, "*" if place is None else "chief-0")
        journals = Journals(model_dir).mark()
        shipper = _build_shipper(config, model_dir, record, env, argv, member)
        shipper.start()
        restarts = Restarts(model_dir, config.max_restarts, stops.came, lambda text: _say(f"{member.prefix}{text}"))
        tasks = _build_tasks(config, file, env, stops, member, restarts, record)
        if place is not None:
            settings = config.cluster
            leader = Leader(model_dir, place, settings.start_timeout_secs, has_evaluator=settings.evaluator)
            tasks = dataclasses.replace(tasks, place=place, peers=leader)
        code = FAILED
        try:
            outcome = _outcome_of(tasks, file, journals, member)
            if not trains:
                _keep_of_training(outcome, earlier)
            _keep_exports(outcome, earlier)
            code = _finish(outcome, config, file, shipper, env, argv, member, stops, earlier)
        finally:
            tasks.peers.end(code)
        return code


def _outcome_of(tasks: Tasks, file: Path, journals: Journals, member: Member) -> Outcome:
    """Runs the tasks, and tells those that outlive them how training has ended."""
    ending = _run_tasks(tasks, file)
    say_errors(journals, member.prefix)
    came = tasks.stops.came

    def read(ending: Ending) -> Outcome:
        lines = journals.lines()  # and of the evaluator, which has the last checkpoint's metrics
        lines += [*journals.of_event("evaluator", "exported"), *journals.of_event("evaluator", "result")]
        return read_outcome(ending.code, bool(came), lines, error_of(ending, journals))

    outcome = read(ending)
    if tasks.config.command in configs.TRAINING_RUNS:
        with suppress(OSError):  # the summary, which comes next, says what is wrong with the folder
            note_ending(journals.model_dir, outcome, tasks.record.generation)
        if ending.code == FINISHED:
            outcome = read(tasks.peers.wait_for_evaluator(came) or ending)
        tasks.record.training = outcome.status
    outcome.facts.update(restarts=tasks.restarts.total, last_restart=tasks.restarts.last)
    return outcome


def _build_tasks(
    config: Config, file: Path, env: Mapping[str, str], stops: StopRequests, member: Member, restarts: Restarts,
    record: RunRecord,
) -> Tasks:  # fmt: skip
    return Tasks(config, task_argv(file), functools.partial(task_env, env), stops, restarts, record, member.prefix)


def _run_tasks(tasks: Tasks, file: Path) -> Ending:
    """Runs the tasks on `file`, in processes of their own or, with `run.inline`, the only one in this."""
    if tasks.config.run.inline:
        os.environ.update(dialect.environment(tasks.config.model, {}))
        return Ending(_run_inline(file, tasks.stops), Task(ALONE, (), {}))
    saves = tasks.config.command in configs.TRAINING_RUNS
    return tasks.run("the task saves a checkpoint" if saves else "nothing is saved")


def _run_inline(file: Path, stops: StopRequests) -> int:
    from runner import task

    try:
        return task.main([str(file)], inline=True)
    except KeyboardInterrupt:  # the second Ctrl-C
        stops.came.append(signal.SIGINT)
        return FAILED


def task_argv(file: Path) -> list[str]:
    """The command of the task that does what the config in `file` says."""
    # -P: a `runner.py` in the user's directory must not take our place; the task adds the directory itself, later.
    return [sys.executable, "-P", "-m", "runner.task", str(file)]


def task_env(env: Mapping[str, str], place: Cluster = ALONE, generation: int = 1) -> dict[str, str]:
    """The environment of a task: `env`, a quiet TensorFlow unless asked otherwise, and this very `runner` package.

    Args:
      place: who it is; TF_CONFIG says so to a task of several.
      generation: how often the run was started, this time included.
    """
    result = {"TF_CPP_MIN_LOG_LEVEL": "3", **env, "TF_CONFIG": place.tf_config, "RUNNER_GENERATION": str(generation)}
    if not place.tf_config:
        del result["TF_CONFIG"]
    home = Path(runner.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):  # a checkout that is not installed
        result["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), env.get("PYTHONPATH"))))
    return result


def _say_changes(config: Config, file: Path) -> None:
    """A run that goes on with another config than it had says what differs."""
    if config.run.progress == "off" or not file.exists():
        return
    from runner import parsing

    try:
        before, now = (configs.flatten(masked(configs.to_tree(known))) for known in (parsing.load(file), config))
    except ValueError:  # of another version; it is about to be replaced
        return
    changes = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and key != "model_dir"
    ]
    if changes:
        print(f"Changed since this run was last started: {', '.join(changes)}", file=sys.stderr, flush=True)


def _keep_of_training(outcome: Outcome, earlier: Mapping[str, Any]) -> None:
    """What an evaluation or prediction does not know stays as training left it."""
    for name in ("metrics", "steps_per_sec", "global_step", "checkpoint"):
        if outcome.facts.get(name) is None and earlier.get(name):
            outcome.facts[name] = earlier[name]


def _keep_exports(outcome: Outcome, earlier: Mapping[str, Any]) -> None:
    """All that the run has exported so far and that is still there."""
    paths = dict.fromkeys([*earlier.get("exports", []), *outcome.facts.get("exports", [])])
    outcome.facts["exports"] = [path for path in paths if Path(path).is_dir()]


def _finish(
    outcome: Outcome, config: Config, file: Path, shipper: Shipper, env: Mapping[str, str], argv: Sequence[str],
    member: Member, stops: StopRequests, earlier: Mapping[str, Any],
) -> int:  # fmt: skip
    """Args: earlier: the summary that there was."""
    already = len(stops.came)
    run_id = shipper.drain(lambda: len(stops.came) > already)
    model_dir = Path(str(config.model_dir))
    tree = configs.to_tree(config)
    summaries = [SUMMARY_FILE]
    try:
        shipper.record.save(model_dir)
        summary = summary_of(outcome, config, run_id, secrets_of(tree))
        if config.command not in configs.TRAINING_RUNS:  # how it ended is not how the run did
            summaries.append(f"summary.{config.command}.json")
            write_summary(model_dir, summary, summaries[-1])
            summary = after_reading(earlier, summary)
        write_summary(model_dir, summary)
    except OSError as error:  # MLflow is told all the same
        _say_lost(config, env, error)
        outcome = Outcome(FAILED, "failed", "FAILED", _lost(config, error), outcome.facts)
    summary = summary_of(outcome, config, run_id, secrets_of(tree))
    told = {**summary, "last_restart": outcome.facts.get("last_restart")}
    names = ("status", "strategy", "num_replicas", *(("restarts", "last_restart") if summary["restarts"] else ()))
    tags = {name: str(told[name]) for name in names if told[name] is not None}
    with tempfile.TemporaryDirectory(prefix="runner-") as scratch:
        copy = Path(scratch) / file.name
        copy.write_text(configs.as_yaml(masked(tree)))
        files = [copy, *(model_dir / name for name in (*summaries, MODEL_SUMMARY_FILE))]
        shipper.close(outcome.mlflow_status, tags, files, exported_models(outcome.facts.get("exported", [])))
    shown = {**summary, "resume": _resume_command(argv, model_dir) if outcome.code == INTERRUPTED else None}
    for name in ("checkpoint", "predictions"):
        shown[name] = summary[name] and report.relative(Path(summary[name]))
    shown["exports"] = ", ".join(report.relative(Path(path)) for path in summary["exports"])
    report.print_summary(shown, report.relative(model_dir), prefix=member.prefix)
    return outcome.code


def _lost(config: Config, error: OSError) -> str:
    """A full disk, or a folder that was deleted under its run."""
    return f"model_dir={config.model_dir} cannot be written: {error}"


def _say_lost(config: Config, env: Mapping[str, str], error: OSError) -> None:
    if env.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    print(f"runner: {_lost(config, error)}", file=sys.stderr, flush=True)


def _resume_command(argv: Sequence[str], model_dir: Path) -> str:
    """What to type to go on with an interrupted run."""
    kept = [masked_override(text) for text in argv[1:] if not text.lstrip("+").startswith("model_dir=")]
    return shlex.join(["python", "-m", "runner", *kept, f"model_dir={report.relative(model_dir)}"])


def _build_shipper(
    config: Config, model_dir: Path, record: RunRecord, env: Mapping[str, str], argv: Sequence[str], member: Member
) -> Shipper:
    tracking = config.tracking
    tree = configs.to_tree(dataclasses.replace(config, tracking=configs.TrackingConfig(backend=tracking.backend)))
    tags = {**masked(tracking.tags), **tags_of_this_process(model_dir, argv)}
    if member.parent_run_id:
        tags["mlflow.parentRunId"] = member.parent_run_id
    secrets = secrets_of(configs.to_tree(config))
    return Shipper(
        model_dir,
        build_tracker(
            tracking.backend, tracking.uri, tracking.experiment, env, Path.cwd(),
            system_metrics=tracking.system_metrics,
        ),
        record,
        name=member.name or tracking.run_name or model_dir.name,
        params=configs.flatten(masked(tree)),
        tags=tags,
        warn=lambda text: print(mask_text(text, secrets), file=sys.stderr, flush=True),
        is_reader=config.command not in configs.TRAINING_RUNS,
        patience_secs=PATIENCE_SECS if config.command in configs.TRAINING_RUNS else 0.0,
    )  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
