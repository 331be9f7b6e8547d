"""Find the files of the shipped input functions, and divide them among workers."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_CHUNK = 1 << 20


def find_files(params: Mapping[str, Any]) -> list[str]:
    """Return the files that `params.files` names: a path or glob, or a list of these; each file once.

    Files are in the given order, those of a glob sorted by name. All file systems of tf.io.gfile work.

    Raises:
      ValueError: `files` is not set, or one of them does not exist, matches nothing or is a directory.
    """
    given = params.get("files")
    patterns = [os.fspath(path) for path in ([given] if isinstance(given, str | os.PathLike) else given or [])]
    if not patterns:
        raise ValueError("params.files is not set. Give a path, a glob such as 'data/train-*.csv', or a list of them.")
    files: list[str] = []
    for pattern in patterns:
        # Try the path itself first: file names may contain glob characters.
        found = [pattern] if tf.io.gfile.exists(pattern) else sorted(tf.io.gfile.glob(pattern))
        if not found:
            raise ValueError(f"params.files: no file matches {pattern!r} (looked from {os.getcwd()}).")
        files += found
    for file in files:
        if tf.io.gfile.isdir(file):
            raise ValueError(f"params.files: {file!r} is a directory. Give its files, such as '{file.rstrip('/')}/*'.")
    return list(dict.fromkeys(files))


def divide_files(
    files: list[str], input_context: tf.distribute.InputContext | None
) -> tuple[list[str], tuple[int, int]]:
    """Return (files of this pipeline, (n, i)): it reads every n-th record of each file, starting from record i.

    If there are at least as many files as pipelines, (n, i) is (1, 0); else each pipeline reads some records of all
    files.
    """
    if input_context is None or input_context.num_input_pipelines == 1:
        return files, (1, 0)
    pipelines, mine = input_context.num_input_pipelines, input_context.input_pipeline_id
    if len(files) >= pipelines:
        return files[mine::pipelines], (1, 0)
    return files, (pipelines, mine)


def check_compressed(file: str) -> None:
    """Read through a .gz file and check that it is whole.

    TensorFlow does not name the file when unpacking fails, and treats a truncated one as complete.

    Raises:
      ValueError: the file is damaged or truncated; the message names it.
    """
    try:
        with tf.io.gfile.GFile(file, "rb") as raw, gzip.open(raw) as stream:
            while stream.read(_CHUNK):
                pass
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file}: is cut off or damaged, or no gzip file ({error}).") from error


def shown(files: list[str]) -> str:
    """Return the names of three files for a message, and the number of others."""
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def compressions(files: list[str]) -> list[str]:
    """Return tf.data's compression_type of each file: "GZIP" for names in .gz, else ""."""
    return ["GZIP" if file.endswith(".gz") else "" for file in files]
