"""Facts about an input, found without reading its data: name, digest, size."""

from __future__ import annotations

import glob
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.data.inputs import Input, InputPipeline
from runner.system.redaction import masked
from runner.system.user_frames import without_partials
from runner.tracking.plain_values import leaves
from runner.types import plain_params

MAX_FILES = 1000
"""Largest number of files whose size and modification time are recorded."""

_GENERAL_NAMES = ("input_fn", "train_input_fn", "eval_input_fn", "__call__")


def dataset_facts(input_fn: Any, pipeline: InputPipeline, context: str) -> dict[str, Any]:
    """Return the fields of a `dataset` event in the run's journal, those of `runner.tracking.tracker.DatasetFacts`.

    The digest covers the function's name and source, its params, the element spec, and the sizes and modification
    times of the files that the params name. Data that the function gets from elsewhere may change without changing the
    digest.

    Args:
      input_fn: the input function, a partial of it, or an Input.
      pipeline: the input pipeline that was built from it.
      context: what the input is used for: train, eval, eval_<name>, predict.
    """
    fn, params = (input_fn.fn, input_fn.params) if isinstance(input_fn, Input) else (input_fn, None)
    params = plain_params(params)
    files, function = list(_files(params)), pipeline.name
    at = f"input.{context.replace('eval_', 'eval.', 1)}.params"
    source = {"input_fn": function, "params": None, "files": files}
    if isinstance(params, Mapping):
        source["params"] = masked(params, at=at)
    described = json.dumps([source, _source_of(fn), str(pipeline.element_spec)], default=str, sort_keys=True)
    return {
        "context": context,
        "name": _name(function, files),
        "digest": hashlib.sha256(described.encode("utf-8", "replace")).hexdigest()[:8],
        "source": source,
        "profile": _size(pipeline),
    }


def _name(function: str, files: list[dict[str, Any]]) -> str:
    """Return a readable name of the data: its file's if there is one, else the function's."""
    if len(files) == 1:
        return Path(files[0]["path"]).name
    parts = [part for part in function.split(".") if part not in (*_GENERAL_NAMES, "<locals>", "<lambda>")]
    return parts[-1] if parts else function


def _size(pipeline: InputPipeline) -> dict[str, Any]:
    """Return the element spec, the batch size, and the numbers of batches and examples, as far as they are known."""
    batches, size = int(pipeline.given.cardinality()), pipeline.global_batch_size
    found: dict[str, Any] = {"element_spec": str(pipeline.element_spec)}
    if size:
        found["batch_size"] = size
    if batches == tf.data.INFINITE_CARDINALITY:
        found["num_batches"] = "without end"
    elif batches >= 0:
        found["num_batches"] = batches
        if size:
            found["num_examples"] = f"{batches * size} at most"  # not exact: the last batch may be smaller
    return found


def _files(params: Any) -> Iterator[dict[str, Any]]:
    """Yield path, size and modification time of the files that `params` name, by path or pattern."""
    texts = [text for _, text in leaves("", params) if isinstance(text, str) and text] if params else []
    found = (path for text in texts if "://" not in text for path in sorted(glob.glob(text)))
    for path in (one for one, _ in zip((Path(each) for each in found), range(MAX_FILES), strict=False)):
        if path.is_file():
            stat = path.stat()
            yield {"path": str(path), "bytes": stat.st_size, "modified": round(stat.st_mtime)}


def _source_of(fn: Any) -> str:
    try:
        return inspect.getsource(without_partials(fn))
    except (OSError, TypeError):
        return ""
