"""Which checkpoints stay: the newest, the best by a metric, and one every so many hours. Plain Python.

What an evaluation said of a checkpoint lies beside it, in `model.ckpt-<step>.metrics.json`: it is there after a restart
and goes with it. All else follows from the times in the manifests and from that of the first save, which the state file
remembers: the first checkpoint goes as others do.

Another process may evaluate a checkpoint while this one expires: a lease keeps it until its metrics are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.checkpoint import layout, manifest
from runner.config.metric_names import rank_by, unknown_metric
from runner.run_config import KeepBest, RunConfig
from runner.system.files import read_json, write_json

LEASE = "evaluating.json"
"""In model_dir: which checkpoint the evaluator reads. There is one evaluator, and so one lease."""


@dataclasses.dataclass(frozen=True)
class Keep:
    """What stays; a checkpoint needs one reason.

    Attributes:
      newest: so many; None or 0: all.
      best: so many by a metric; None: none.
      every_hours: one in so many hours, counted from the first save, which is not one of them; None: none.
    """

    newest: int | None = 5
    best: KeepBest | None = None
    every_hours: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Keep:
        return cls(config.keep_checkpoint_max, config.keep_best, config.keep_checkpoint_every_n_hours)


def note_evaluation(path: str | os.PathLike[str], best: KeepBest | None, metrics: Mapping[str, float]) -> None:
    """As `note_metrics`, where the best by `best` stay. Raises: ValueError: this evaluation has no such metric."""
    note_metrics(path, metrics)
    if best is None:
        return
    evaluation = best.metric.rpartition("/")[0]
    if best.metric not in metrics and evaluation in {name.rpartition("/")[0] for name in metrics}:
        raise ValueError(unknown_metric("checkpoint.keep_best.metric", best.metric, metrics))


def note_metrics(path: str | os.PathLike[str], metrics: Mapping[str, float]) -> None:
    """Writes down what an evaluation found of the checkpoint `path`, beside what others found."""
    if os.path.exists(f"{os.fspath(path)}.index"):  # else it is gone meanwhile
        write_json(Path(f"{os.fspath(path)}{manifest.METRICS}"), {**metrics_of(path), **metrics})


def metrics_of(path: str | os.PathLike[str]) -> dict[str, float]:
    """What evaluations found of the checkpoint `path`, by the names of the journal (eval/accuracy)."""
    noted = read_json(Path(f"{os.fspath(path)}{manifest.METRICS}")) or {}
    return {name: float(value) for name, value in noted.items() if isinstance(value, int | float)}


@contextlib.contextmanager
def lease(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps the checkpoint `path` while another process trains and saves; it may have gone just before."""
    file = Path(path).parent / LEASE
    write_json(file, {"checkpoint": Path(path).name})
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def release(model_dir: str | os.PathLike[str]) -> None:
    """Ends the lease of a process that was killed."""
    (Path(model_dir) / LEASE).unlink(missing_ok=True)


def expire(model_dir: Path, latest: str, keep: Keep) -> None:
    """Makes `latest` the latest and removes every file of the checkpoints that nothing keeps.

    Half-written and damaged ones do not count, and go when their age comes. A checkpoint that has no manifest and that
    the state file does not name was put there by somebody else and stays.
    """
    state = layout.read_state(model_dir)
    groups = {
        name: files
        for name, files in layout.groups(model_dir).items()
        if name in state.names or f"{name}{manifest.MANIFEST}" in files or f"{name}.index" not in files
    }
    began = _began(model_dir, state, groups)
    if not keep.newest:
        before = [name for name in state.names if name != latest and (model_dir / f"{name}.index").exists()]
        layout.write_state(model_dir, [*before, latest], began)
        return
    ordered = _by_age(model_dir, groups, latest)
    whole = [name for name in ordered if manifest.what_is_missing(model_dir / name) is None]
    kept = {name for name, reasons in _reasons(model_dir, whole, groups, keep, began).items() if reasons}
    layout.write_state(model_dir, [name for name in whole if name in kept], began)
    limit = ordered.index(whole[-keep.newest]) if len(whole) >= keep.newest else 0
    for age, name in enumerate(ordered):
        if name not in kept and (name in whole or age < limit):
            for file in sorted(groups[name], key=lambda file: file != f"{name}.index"):
                (model_dir / file).unlink(missing_ok=True)


def why_kept(model_dir: Path, keep: Keep) -> dict[str, list[str]]:
    """Name of each complete checkpoint -> the reasons for which it stays, in words; none: it goes with the next save.

    (Or it is there because somebody else wrote it, or because it was kept for what another evaluation has beaten.)
    """
    state, groups = layout.read_state(model_dir), layout.groups(model_dir)
    whole = [
        name
        for name in _by_age(model_dir, groups, state.latest)
        if layout.step_of(name) is not None and manifest.what_is_missing(model_dir / name) is None
    ]
    return _reasons(model_dir, whole, groups, keep, _began(model_dir, state, groups))


def _began(model_dir: Path, state: layout.State, groups: Mapping[str, list[str]]) -> float:
    """When the first checkpoint was saved; where nobody has noted it, the oldest one that there is."""
    if state.began is not None:
        return state.began
    return min((manifest.time_in(model_dir, name, files) for name, files in groups.items()), default=math.inf)


def _by_age(model_dir: Path, groups: Mapping[str, list[str]], latest: str | None) -> list[str]:
    """Names, the oldest first and `latest` last.

    By time, so that what is saved after going back to an earlier step outlives the abandoned ones.
    """
    ages = {
        name: (name == latest, manifest.time_in(model_dir, name, files), layout.step_of(name) or 0)
        for name, files in groups.items()
    }
    return sorted(groups, key=lambda name: ages[name])


def _reasons(
    model_dir: Path, whole: list[str], groups: Mapping[str, list[str]], keep: Keep, began: float
) -> dict[str, list[str]]:
    """Args: whole: the complete ones by age. began: the time of the first save. Returns: name -> why it stays."""
    leased = str((read_json(model_dir / LEASE) or {}).get("checkpoint"))
    times = {name: manifest.time_in(model_dir, name, groups[name]) for name in whole}
    kept = [
        (f"last {keep.newest}" if keep.newest else "all are kept", whole[-keep.newest :] if keep.newest else whole),
        (f"best {keep.best.metric if keep.best else ''}", _best(model_dir, whole, keep.best)),
        (f"every {keep.every_hours or 0:g} h", _hourly(times, keep.every_hours, began)),
        ("being evaluated", [leased]),
    ]
    return {name: [reason for reason, names in kept if name in names] for name in whole}


def _best(model_dir: Path, whole: list[str], best: KeepBest | None) -> list[str]:
    """The best first; of equal ones the older."""
    if best is None:
        return []
    values = {name: metrics_of(model_dir / name).get(best.metric, math.nan) for name in whole}
    return rank_by(values, best.metric, best.mode)[: best.max]


def _hourly(times: Mapping[str, float], hours: float | None, began: float) -> list[str]:
    """The first of each so many hours after the first save, as a v1 Saver keeps them: one an hour on average, also
    where saves do not divide hours.
    """
    if hours is None:
        return []
    chosen, last = [], 0
    for name in sorted(times, key=lambda name: times[name]):
        passed = math.ceil((times[name] - began) / (hours * 3600)) - 1
        if passed > last:
            chosen.append(name)
            last = passed
    return chosen
