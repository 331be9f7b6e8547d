"""Facts about an input, found without reading its data: name, digest, size."""

from __future__ import annotations

import glob
import hashlib
import inspect
import itertools
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

_GENERAL_NAMES = ("input_fn", "train_input_fn", "eval_input_fn", "__call__", "<locals>", "<lambda>")


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
    fn = input_fn
    params = None
    if isinstance(input_fn, Input):
        fn = input_fn.fn
        params = input_fn.params
    params = plain_params(params)
    files = list(_list_files(params))
    function = pipeline.name
    params_key = f"input.{context.replace('eval_', 'eval.', 1)}.params"
    source = {"input_fn": function, "params": None, "files": files}
    if isinstance(params, Mapping):
        source["params"] = masked(params, at=params_key)
    text = json.dumps([source, _source_of(fn), str(pipeline.element_spec)], default=str, sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return {
        "context": context,
        "name": _choose_name(function, files),
        "digest": digest[:8],
        "source": source,
        "profile": _describe_size(pipeline),
    }


def _choose_name(function: str, files: list[dict[str, Any]]) -> str:
    """Return a readable name of the data: its file's if there is one, else the function's."""
    if len(files) == 1:
        return Path(files[0]["path"]).name
    specific_parts = [part for part in function.split(".") if part not in _GENERAL_NAMES]
    if not specific_parts:
        return function
    return specific_parts[-1]


def _describe_size(pipeline: InputPipeline) -> dict[str, Any]:
    """Return the element spec, the batch size, and the numbers of batches and examples, as far as they are known."""
    batches = int(pipeline.given.cardinality())
    size = pipeline.global_batch_size
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


def _list_files(params: Any) -> Iterator[dict[str, Any]]:
    """Yield path, size and modification time of the files that `params` name, by path or pattern."""
    if not params:
        return
    for path in itertools.islice(_list_paths(params), MAX_FILES):
        if path.is_file():
            stat = path.stat()
            yield {"path": str(path), "bytes": stat.st_size, "modified": round(stat.st_mtime)}


def _list_paths(params: Any) -> Iterator[Path]:
    """Yield what there is in the file system of what `params` name."""
    for _, text in leaves("", params):
        if not isinstance(text, str) or not text or "://" in text:
            continue
        for path in sorted(glob.glob(text)):
            yield Path(path)


def _source_of(fn: Any) -> str:
    try:
        return inspect.getsource(without_partials(fn))
    except (OSError, TypeError):
        return ""
