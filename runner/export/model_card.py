"""The model card of an export, `README.md` in its folder: what it was made of, how good it is, what it takes, how to
load it.

It says what is recorded beside the model's checkpoint: in the journals of its run, and of its evaluations. What is not
recorded is left out.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

import runner
from runner.checkpoint import retention
from runner.checkpoint_files import layout
from runner.config.schema import TRAINING_RUNS
from runner.export.outputs import DEFAULT
from runner.system.console import format_bytes
from runner.tracking.journal import (
    BLOCK_BYTES,
    DATASET,
    RUN_STARTED,
    Journals,
    journal_path,
    read_journal,
    starts_and_ends,
)
from runner.tracking.tracker import points_of

Metric = tuple[str, float, int | None]
"""(name, value, global step); the step is None if the name of the checkpoint has none."""

_VERSION = "version."
"""Beginning of the tags with versions."""


@dataclass(frozen=True)
class Recorded:
    """What is recorded of the model in a checkpoint.

    Attributes:
      name: the name of its run; '': not recorded.
      params: dotted key -> value, of the config with which it was trained.
      tags: the tags of the start that trained it: versions and commit.
      datasets: the facts of its inputs, as in the journal.
      metrics: those of the evaluations of the checkpoint, and then the last ones of training.
    """

    name: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[Mapping[str, Any]] = ()
    metrics: Sequence[Metric] = ()


def recorded_of(checkpoint: str | None) -> Recorded:
    """Return what the run in the folder of a checkpoint has recorded of the checkpoint; an empty Recorded for None."""
    if checkpoint is None:
        return Recorded()
    folder = Path(checkpoint).parent
    name = Path(checkpoint).name
    step = layout.step_of(name)
    journals = Journals(folder)
    events = journals.events_of("chief")
    saved = _time_of_save(events, name)
    start = _start_of(folder, saved)
    evaluated = retention.metrics_of(checkpoint)
    metrics: list[Metric] = [(metric, value, step) for metric, value in evaluated.items()]
    if step is not None:
        metrics += _metrics_of_training(folder, step)
    events += journals.events_of("evaluator")
    datasets = _datasets(events, saved, evaluated)
    return Recorded(start.get("name", ""), start.get("params", {}), start.get("tags", {}), datasets, metrics)


def _time_of_save(events: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return when the checkpoint of this name was saved; infinity if no event says so."""
    found = math.inf
    for event in events:
        saved = Path(str(event.get("path"))).name
        if event["event"] == "checkpoint" and saved == name:
            found = event["time"]
    return found


def _start_of(folder: Path, saved: float) -> Mapping[str, Any]:
    """Return the line about the start that trained what was saved at a time; {}: there is none."""
    found: Mapping[str, Any] = {}
    for line in starts_and_ends(folder):
        has_trained = line["event"] == RUN_STARTED and line["command"] in TRAINING_RUNS
        if has_trained and line["time"] <= saved:
            found = line
    return found


def _datasets(events: Iterable[dict[str, Any]], saved: float, metrics: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the facts of the inputs of a checkpoint: that of training, and those of the evaluations with metrics.

    Args:
      events: those of the processes that train and evaluate.
      saved: the time at which the checkpoint was saved. A later start may train on other data.
      metrics: names of the metrics of its evaluations.
    """
    evaluations = {name.partition("/")[0] for name in metrics}  # of metrics such as eval/loss
    train: list[Mapping[str, Any]] = []
    evals: dict[str, Mapping[str, Any]] = {}
    for event in events:
        if event["event"] != DATASET:
            continue
        context = event["context"]
        if context == "train" and event["time"] <= saved:
            train = [event]
        if context in evaluations:
            evals[context] = event
    return [*train, *evals.values()]


def _metrics_of_training(folder: Path, step: int) -> list[Metric]:
    """Return the last metrics of training up to a step, of those near the end of the journal."""
    path = journal_path(folder)
    size = path.stat().st_size if path.exists() else 0
    # A long run logs gigabytes, and may export after each evaluation: only the last block of it is read.
    lines, _ = read_journal(path, max(0, size - BLOCK_BYTES))
    found: dict[str, Metric] = {}
    for line in lines:
        for point in points_of(line):
            is_of_training = point.name.startswith("train/") and not point.name.endswith("_per_sec")
            if is_of_training and point.step <= step:
                found[point.name] = (point.name, point.value, point.step)
    return list(found.values())


# --- as text --------------------------------------------------------------------------------------------------------


def card_of(checkpoint: str | None, signatures: Mapping[str, Any], tags: Sequence[str]) -> str:
    """Return the text of a model card, in Markdown.

    Args:
      checkpoint: path of the exported checkpoint; None: the model has its initial values.
      signatures: name -> SignatureDef.
      tags: tags of the graph that a reader loads.
    """
    recorded = recorded_of(checkpoint)
    name = recorded.name or "A model"
    python = platform.python_version()
    ours = f"estimator-runner {runner.__version__}"
    parts = [f"# {name}, {_state(checkpoint)}"]
    parts.append(f"A SavedModel, exported by {ours} with TensorFlow {tf.__version__} and Python {python}.")
    parts.append(_origin(recorded))
    parts.append(_lines_that_load(signatures, tags))
    for name in sorted(signatures):
        parts.append(_signature(name, signatures[name]))
    parts.append(_data(recorded.datasets))
    parts.append(_metrics(recorded.metrics))
    return "\n\n".join(filter(None, parts)) + "\n"


def _state(checkpoint: str | None) -> str:
    if checkpoint is None:
        return "initial values"
    name = Path(checkpoint).name
    step = layout.step_of(name)
    return f"checkpoint {name}" if step is None else f"step {step}"


def _lines_that_load(signatures: Mapping[str, Any], tags: Sequence[str]) -> str:
    name = DEFAULT if DEFAULT in signatures else min(signatures, default="")
    lines = ["import tensorflow as tf", f'model = tf.saved_model.load(".", tags={json.dumps(tags)})']
    if name:
        called = "takes the inputs below by name"
        lines.append(f"answer = model.signatures[{json.dumps(name)}]  # {called}")
    code = "\n".join(lines)
    return f"## Load it\n\nIn the folder of this file, with TensorFlow alone:\n\n```python\n{code}\n```"


def _origin(recorded: Recorded) -> str:
    """Return the table of what the model was made with."""
    rows = []
    model_fn = recorded.params.get("model.fn")
    if model_fn:
        rows.append(["model_fn", f"`{model_fn}`"])
    commit = recorded.tags.get("mlflow.source.git.commit")
    if commit:
        rows.append(["commit", f"`{commit}`"])
    if recorded.tags.get("git.dirty") == "true":
        rows.append(["", "with changes that were not committed"])
    versions = []
    for tag, version in recorded.tags.items():
        if tag.startswith(_VERSION):
            versions.append(f"{tag.removeprefix(_VERSION)} {version}")
    if versions:
        rows.append(["trained with", ", ".join(versions)])
    return _table("", ["made of", ""], rows)


def _signature(name: str, signature: Any) -> str:
    """Return the section of a signature: a row for each input and output."""
    rows = []
    for part, infos in (("input", signature.inputs), ("output", signature.outputs)):
        for key, info in sorted(infos.items()):
            rows.append([part, f"`{key}`", _kind(info), _shape(info)])
    return _table(f"## Signature `{name}`", ["", "name", "dtype", "shape"], rows)


def _kind(info: Any) -> str:
    dtype = tf.as_dtype(info.dtype).name if info.dtype else ""
    encoding = info.WhichOneof("encoding")
    words = {"name": "", "coo_sparse": "sparse", "composite_tensor": "composite"}
    return f"{dtype} {words.get(encoding, '')}".strip()


def _shape(info: Any) -> str:
    if info.tensor_shape.unknown_rank:
        return "any"
    sizes = []
    for axis in info.tensor_shape.dim:
        sizes.append("any" if axis.size < 0 else str(axis.size))
    return f"[{', '.join(sizes)}]"


def _data(datasets: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with the inputs, and nothing if none is known."""
    rows = []
    for dataset in datasets:
        profile = dataset["profile"]
        name = f"`{dataset['name']}`"
        digest = f"`{dataset['digest']}`"
        sizes = [profile.get(key) for key in ("num_examples", "num_batches", "batch_size")]
        rows.append([dataset["context"], name, digest, *sizes, _files(dataset)])
    head = ["input of", "name", "digest", "examples", "batches", "batch size", "files"]
    return _table("## Data", head, rows)


def _files(dataset: Mapping[str, Any]) -> str:
    files = dataset["source"].get("files")
    if not files:
        return ""
    size = sum(file.get("bytes", 0) for file in files)
    return f"{len(files)} ({format_bytes(size)})"


def _metrics(metrics: Sequence[Metric]) -> str:
    rows = [[f"`{name}`", f"{value:.6g}", step] for name, value, step in metrics]
    return _table("## Metrics", ["metric", "value", "step"], rows)


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a heading, if it is not '', and a table; '' without rows."""
    if not rows:
        return ""
    lines = [_row(head), _row(["---"] * len(head))]
    for row in rows:
        lines.append(_row(row))
    return "\n".join([heading, "", *lines]).lstrip()


def _row(cells: Iterable[Any]) -> str:
    texts = [_cell(cell) for cell in cells]
    return f"| {' | '.join(texts)} |"


def _cell(value: Any) -> str:
    """Return a value as the text of a cell; nothing of what is not known."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
