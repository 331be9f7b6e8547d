"""Decide, without TensorFlow, which checkpoints to keep: the newest, the best by a metric, and one every N hours.

The results of evaluations are in a file of the checkpoint, `model.ckpt-<step>.metrics.json`, so they survive a restart
and are deleted with the checkpoint. The time of a checkpoint is in its manifest. The time of the first save is in the
state file, because the first checkpoint may be deleted.

A checkpoint that an evaluator process is reading is not deleted: the evaluator holds a lease on it until its metrics
are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from runner.checkpoint_files import layout, manifest
from runner.config.metric_names import rank_by, unknown_metric
from runner.config.settings.metric_rules import KeepBest
from runner.system.files import find_runner_file, new_runner_file, read_json, remove, write_json

LEASE = "evaluating.json"
"""File in model_dir that names the checkpoint that the evaluator is reading; there is at most one evaluator."""


@dataclasses.dataclass(frozen=True)
class Keep:
    """The reasons to keep a checkpoint; one of them is enough.

    Attributes:
      newest: keep this many of the newest checkpoints; None or 0: all.
      best: keep a number of the best by a metric; None: none.
      every_hours: keep one permanently every N hours, counted from the first save, which is not kept for this reason;
        None: none.
    """

    newest: int | None = 5
    best: KeepBest | None = None
    every_hours: float | None = None


def note_evaluation(path: str | os.PathLike[str], best: KeepBest | None, metrics: Mapping[str, float]) -> None:
    """Write the results of an evaluation with `note_metrics`, and check that they have the metric of `best`.

    Args:
      path: path of the checkpoint.
      best: the metric by which checkpoints are kept; None: no check.
      metrics: metric name (eval/accuracy) -> value.

    Raises:
      ValueError: `metrics` are results of the evaluation that `best` names, but lack its metric.
    """
    note_metrics(path, metrics)
    if best is None or best.metric is None:
        return
    evaluation = best.metric.rpartition("/")[0]
    evaluated = {name.rpartition("/")[0] for name in metrics}
    if best.metric not in metrics and evaluation in evaluated:
        raise ValueError(unknown_metric("checkpoint.keep_best.metric", best.metric, metrics))


def note_metrics(path: str | os.PathLike[str], metrics: Mapping[str, float]) -> None:
    """Add the results of an evaluation to the file of results of the checkpoint `path`. If the checkpoint has been
    deleted, do nothing.
    """
    path = os.fspath(path)
    if os.path.exists(f"{path}.index"):  # else it was deleted meanwhile
        file = new_runner_file(Path(f"{path}{manifest.METRICS}"))
        write_json(file, {**metrics_of(path), **metrics})


def metrics_of(path: str | os.PathLike[str]) -> dict[str, float]:
    """Return metric name (eval/accuracy) -> value, of all evaluations of the checkpoint `path`."""
    file = find_runner_file(Path(f"{os.fspath(path)}{manifest.METRICS}"))
    results = read_json(file) or {}
    return {name: float(value) for name, value in results.items() if isinstance(value, int | float)}


def best_of(model_dir: Path, best: KeepBest) -> tuple[int, float] | None:
    """Return (global step, value of the metric) of the best checkpoint; None: no checkpoint was evaluated by it."""
    ranked = _find_best(model_dir, layout.list_names(model_dir), best)
    if not ranked:
        return None
    name = ranked[0]
    step = layout.step_of(name) or 0
    return step, metrics_of(model_dir / name)[str(best.metric)]


@contextlib.contextmanager
def lease(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep the checkpoint `path` from being deleted inside this context, which an evaluator enters to read it. The
    checkpoint may have been deleted just before.
    """
    file = Path(path).parent / LEASE
    write_json(file, {"checkpoint": Path(path).name})
    try:
        yield
    finally:
        remove(file)


def release(model_dir: str | os.PathLike[str]) -> None:
    """End the lease of an evaluator that was killed."""
    remove(Path(model_dir) / LEASE)


def expire(model_dir: Path, latest: str, keep: Keep) -> None:
    """Write the state file with `latest` as the latest checkpoint, and delete the files of checkpoints that `keep` does
    not keep.

    Incomplete checkpoints do not count towards `keep.newest`. They are deleted once that many complete ones are newer.
    A checkpoint without a manifest that the state file does not name was put there by the user and is not deleted. If
    all checkpoints are kept, nothing is deleted.

    Args:
      model_dir: the folder of the checkpoints.
      latest: name of the latest checkpoint.
      keep: the reasons to keep a checkpoint.
    """
    state = layout.read_state(model_dir)
    groups = _list_own_groups(model_dir, state)
    first_save = _find_first_save(model_dir, state, groups)
    if not keep.newest:  # all are kept
        there = [name for name in state.names if (model_dir / f"{name}.index").exists()]
        before = [name for name in there if name != latest]
        layout.write_state(model_dir, [*before, latest], first_save)
        return
    ordered = _sort_by_age(model_dir, groups, state, latest)
    complete_names = [name for name in ordered if manifest.what_is_missing(model_dir / name) is None]
    reasons = _find_reasons(model_dir, complete_names, keep, first_save)
    kept = [name for name in complete_names if reasons[name]]
    # The state file before files are deleted, so that it never names a checkpoint that is gone.
    layout.write_state(model_dir, kept, first_save)
    # How many checkpoints in `ordered` are older than the newest complete ones. Of these, incomplete ones are deleted.
    num_outlived = 0
    if len(complete_names) >= keep.newest:
        oldest_of_the_newest = complete_names[-keep.newest]
        num_outlived = ordered.index(oldest_of_the_newest)
    for position, name in enumerate(ordered):
        is_recent_and_incomplete = name not in complete_names and position >= num_outlived
        if name not in kept and not is_recent_and_incomplete:
            _delete(model_dir, name, groups[name])


def _list_own_groups(model_dir: Path, state: layout.State) -> dict[str, list[str]]:
    """Return name -> files, for each checkpoint that a run wrote, or that the state file names."""
    own = {}
    for name, files in layout.groups(model_dir).items():
        is_incomplete = f"{name}.index" not in files
        has_manifest = any(manifest.MANIFEST in file for file in files)
        if name in state.names or is_incomplete or has_manifest:
            own[name] = files
    return own


def _delete(model_dir: Path, name: str, files: Iterable[str]) -> None:
    """Delete the files of a checkpoint, as `layout.groups` lists them."""
    # The index first: if this process is killed meanwhile, what is left is no checkpoint.
    for file in sorted(files, key=lambda file: file != f"{name}.index"):
        (model_dir / file).unlink(missing_ok=True)


def why_kept(model_dir: Path, keep: Keep) -> dict[str, list[str]]:
    """Return name -> reasons why the checkpoint is kept, as readable texts, for each complete checkpoint.

    The next save deletes a checkpoint without a reason, unless the user put it there.
    """
    state = layout.read_state(model_dir)
    groups = layout.groups(model_dir)
    complete_names = []
    for name in _sort_by_age(model_dir, groups, state, state.latest):
        has_step = layout.step_of(name) is not None
        if has_step and manifest.what_is_missing(model_dir / name) is None:
            complete_names.append(name)
    first_save = _find_first_save(model_dir, state, groups)
    return _find_reasons(model_dir, complete_names, keep, first_save)


def _find_first_save(model_dir: Path, state: layout.State, groups: Iterable[str]) -> float:
    """Return the time of the first save: the time in the state file, else the time of the oldest checkpoint."""
    if state.began is not None:
        return state.began
    times = [manifest.time_of(model_dir / name) or math.inf for name in groups]
    return min(times, default=math.inf)


def _sort_by_age(model_dir: Path, groups: Iterable[str], state: layout.State, latest: str | None) -> list[str]:
    """Return the names of checkpoints in the order in which they were saved, `latest` last.

    The state file has this order. Times are less reliable, because clocks jump; steps are wrong after a rollback to an
    earlier step, when new checkpoints must outlive abandoned ones with higher steps. Checkpoints that the state file
    does not name are placed among the others by their times.
    """
    times = {name: manifest.time_of(model_dir / name) or 0.0 for name in groups}
    ordered = [name for name in state.names if name in times and name != latest]
    unnamed = times.keys() - {*ordered, latest}

    def time_and_step(name: str) -> tuple[float, int]:
        return times[name], layout.step_of(name) or 0

    for name in sorted(unnamed, key=time_and_step):
        later = [position for position, other in enumerate(ordered) if times[other] > times[name]]
        position = later[0] if later else len(ordered)
        ordered.insert(position, name)
    if latest in times:
        ordered.append(str(latest))
    return ordered


def _find_reasons(model_dir: Path, complete_names: list[str], keep: Keep, first_save: float) -> dict[str, list[str]]:
    """Return name -> reasons why the checkpoint is kept, for each of `complete_names`.

    Args:
      model_dir: the folder of the checkpoints.
      complete_names: names of the complete checkpoints, oldest first.
      keep: the reasons to look for.
      first_save: the time of the first save, in seconds since 1970.
    """
    leased = str((read_json(model_dir / LEASE) or {}).get("checkpoint"))
    times = {name: manifest.time_of(model_dir / name) or 0.0 for name in complete_names}
    reasons: dict[str, list[str]] = {name: [] for name in complete_names}

    def keep_for(reason: str, names: Iterable[str]) -> None:
        for name in names:
            if name in reasons:  # what an evaluator reads may have been deleted just before
                reasons[name].append(reason)

    if keep.newest:
        keep_for(f"last {keep.newest}", complete_names[-keep.newest :])
    else:
        keep_for("all are kept", complete_names)
    if keep.best is not None:
        keep_for(f"best {keep.best.metric}", _find_best(model_dir, complete_names, keep.best))
    if keep.every_hours is not None:
        keep_for(f"every {keep.every_hours:g} h", _find_hourly(times, keep.every_hours, first_save))
    keep_for("being evaluated", [leased])
    return reasons


def _find_best(model_dir: Path, candidates: list[str], best: KeepBest) -> list[str]:
    """Return the names of the checkpoints to keep for their metric, best first; of equal ones, the older first."""
    if best.metric is None:
        return []
    values = {name: metrics_of(model_dir / name).get(best.metric, math.nan) for name in candidates}
    return rank_by(values, best.metric, best.mode)[: best.max]


def _find_hourly(times: Mapping[str, float], hours: float, first_save: float) -> list[str]:
    """Return the names of the checkpoints to keep permanently: the first of each period of `hours`, counted from the
    first save, except for the first period. tf.compat.v1.train.Saver does the same.

    Args:
      times: name -> time in seconds since 1970.
      hours: length of a period.
      first_save: the time of the first save.
    """
    chosen = []
    last_period = 0
    for name in sorted(times, key=lambda name: times[name]):
        # Period 0 is the first. A checkpoint at the very end of a period belongs to it.
        passed = (times[name] - first_save) / (hours * 3600)
        period = math.ceil(passed) - 1
        if period > last_period:
            chosen.append(name)
            last_period = period
    return chosen
