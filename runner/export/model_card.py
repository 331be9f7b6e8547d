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
from importlib import metadata
from pathlib import Path
from typing import Any

import tensorflow as tf

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

Metric = tuple[str, float, int | None]

_VERSION = "version."
"""Beginning of the tags with versions."""


@dataclass(frozen=True)
class Recorded:
    """What is recorded of the model in a checkpoint.

    Attributes:
      name: that of its run; '': not recorded.
      params: dotted key -> value, of the config with which it was trained.
      tags: those of the start that trained it: versions and commit.
      datasets: the facts of its inputs, as in the journal.
      metrics: (name, value, global step); a checkpoint whose name has no step: None.
    """

    name: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[Mapping[str, Any]] = ()
    metrics: Sequence[Metric] = ()


def recorded_of(checkpoint: Path) -> Recorded:
    """Return what the run in the folder of a checkpoint has recorded of it."""
    folder = checkpoint.parent
    step = layout.step_of(checkpoint.name)
    journals = Journals(folder)
    events = journals.events_of("chief")
    saved = _time_of_save(events, checkpoint.name)
    start = _newest(_starts(folder), saved)
    evaluated = retention.metrics_of(checkpoint)
    metrics = [(name, value, step) for name, value in evaluated.items()]
    if step is not None:
        metrics += _metrics_of_training(folder, step)
    return Recorded(
        name=start.get("name", ""),
        params=start.get("params", {}),
        tags=start.get("tags", {}),
        datasets=_datasets([*events, *journals.events_of("evaluator")], saved, evaluated),
        metrics=metrics,
    )


def _time_of_save(events: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return when the checkpoint of this name was saved; infinity if no event says so."""
    saves = [event for event in events if event["event"] == "checkpoint"]
    return max((save["time"] for save in saves if Path(str(save.get("path"))).name == name), default=math.inf)


def _starts(folder: Path) -> list[dict[str, Any]]:
    """Return the lines about the starts that trained."""
    bounds = starts_and_ends(folder)
    return [line for line in bounds if line["event"] == RUN_STARTED and line["command"] in TRAINING_RUNS]


def _newest(lines: Iterable[dict[str, Any]], until: float) -> dict[str, Any]:
    """Return the last line written until a time; {}: there is none."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.get("time", 0.0) <= until:
            found = line
    return found


def _datasets(events: Iterable[dict[str, Any]], saved: float, metrics: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the facts of the inputs of a checkpoint: that of training, and those of the evaluations with metrics.

    Args:
      events: those of the processes that train and evaluate.
      saved: the time at which the checkpoint was saved. A later start may train on other data.
      metrics: names of the metrics of its evaluations.
    """
    datasets = [event for event in events if event["event"] == DATASET]
    contexts = sorted({name.partition("/")[0] for name in metrics})
    found = [_newest([line for line in datasets if line["context"] == "train"], saved)]
    found += [_newest([line for line in datasets if line["context"] == context], math.inf) for context in contexts]
    return [line for line in found if line]


def _metrics_of_training(folder: Path, step: int) -> list[Metric]:
    """Return the last metrics of training up to a step, of those near the end of the journal."""
    path = journal_path(folder)
    size = path.stat().st_size if path.exists() else 0
    # A long run logs gigabytes, and may export after each evaluation: only the last block of it is read.
    lines, _ = read_journal(path, max(0, size - BLOCK_BYTES))
    found: dict[str, Metric] = {}
    for line in lines:
        if line.get("step", math.inf) <= step:
            for name, value in line.get("metrics", {}).items():
                is_of_the_model = name.startswith("train/") and not name.endswith("_per_sec")
                if is_of_the_model:
                    found[name] = (name, value, line["step"])
    return list(found.values())


# --- as text --------------------------------------------------------------------------------------------------------


def card_of(checkpoint: str | None, signatures: Mapping[str, Any], tags: Sequence[str]) -> str:
    """Return the text of a model card, in Markdown.

    Args:
      checkpoint: path of the exported checkpoint; None: the model has its initial values.
      signatures: name -> SignatureDef.
      tags: tags of the graph that a reader loads.
    """
    recorded = recorded_of(Path(checkpoint)) if checkpoint is not None else Recorded()
    parts = [
        f"# {recorded.name or 'A model'}, {_state(checkpoint)}",
        f"A SavedModel, exported by estimator-runner {metadata.version('estimator-runner')} with TensorFlow "
        f"{tf.__version__} and Python {platform.python_version()}.",
        _origin(recorded),
        f"## Load it\n\n{_lines_that_load(signatures, tags)}",
        *(_signature(name, signature) for name, signature in sorted(signatures.items())),
        _data(recorded.datasets),
        _metrics(recorded.metrics),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _state(checkpoint: str | None) -> str:
    if checkpoint is None:
        return "initial values"
    name = Path(checkpoint).name
    step = layout.step_of(name)
    return f"checkpoint {name}" if step is None else f"step {step}"


def _lines_that_load(signatures: Mapping[str, Any], tags: Sequence[str]) -> str:
    name = DEFAULT if DEFAULT in signatures else min(signatures)
    return (
        "Where this file is, with TensorFlow alone:\n\n"
        "```python\n"
        "import tensorflow as tf\n"
        f'model = tf.saved_model.load(".", tags={json.dumps(tags)})\n'
        f"answer = model.signatures[{json.dumps(name)}]  # a function of the inputs below, by name; it returns a dict\n"
        "```"
    )


def _origin(recorded: Recorded) -> str:
    """Return the table of what the model was made with."""
    rows = []
    model_fn = recorded.params.get("model.fn")
    if model_fn:
        rows.append(["model_fn", f"`{model_fn}`"])
    commit = recorded.tags.get("mlflow.source.git.commit")
    if commit:
        is_dirty = recorded.tags.get("git.dirty") == "true"
        rows.append(["commit", f"`{commit}`{' with uncommitted changes' if is_dirty else ''}"])
    versions = [
        f"{tag.removeprefix(_VERSION)} {version}" for tag, version in recorded.tags.items() if tag.startswith(_VERSION)
    ]
    if versions:
        rows.append(["trained with", ", ".join(versions)])
    return _table(["", ""], rows)


def _signature(name: str, signature: Any) -> str:
    """Return the section of a signature: a row for each input and output."""
    rows = []
    for part, infos in (("input", signature.inputs), ("output", signature.outputs)):
        for key, info in sorted(infos.items()):
            rows.append([part, f"`{key}`", _kind(info), _shape(info)])
    return f"## Signature `{name}`\n\n{_table(['', 'name', 'dtype', 'shape'], rows)}"


def _kind(info: Any) -> str:
    dtype = tf.as_dtype(info.dtype).name if info.dtype else ""
    encoding = info.WhichOneof("encoding")
    words = {"name": "", "coo_sparse": "sparse", "composite_tensor": "composite"}
    return f"{dtype} {words.get(encoding, '')}".strip()


def _shape(info: Any) -> str:
    if info.tensor_shape.unknown_rank:
        return "any"
    sizes = ["any" if size.size < 0 else str(size.size) for size in info.tensor_shape.dim]
    return f"[{', '.join(sizes)}]"


def _data(datasets: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with the inputs, and nothing if none is known."""
    rows = []
    for dataset in datasets:
        profile = dataset["profile"]
        sizes = [profile.get(key, "") for key in ("num_examples", "num_batches", "batch_size")]
        rows.append([dataset["context"], f"`{dataset['name']}`", f"`{dataset['digest']}`", *sizes, _files(dataset)])
    head = ["input of", "name", "digest", "examples", "batches", "batch size", "files"]
    return f"## Data\n\n{_table(head, rows)}" if rows else ""


def _files(dataset: Mapping[str, Any]) -> str:
    files = dataset["source"].get("files") or []
    return f"{len(files)} ({format_bytes(sum(file.get('bytes', 0) for file in files))})" if files else ""


def _metrics(metrics: Sequence[Metric]) -> str:
    rows = [[f"`{name}`", f"{value:.6g}", "" if step is None else step] for name, value, step in metrics]
    return f"## Metrics\n\n{_table(['metric', 'value', 'step'], rows)}" if rows else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown; '' without rows."""
    lines = [_row(row) for row in rows]
    return "\n".join([_row(head), _row(["---"] * len(head)), *lines]) if lines else ""


def _row(cells: Iterable[Any]) -> str:
    texts = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(texts)} |"
