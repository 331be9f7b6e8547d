"""Which files an input function reads. Shared by the shipped ones."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_CHUNK = 1 << 20


def find_files(params: Mapping[str, Any]) -> list[str]:
    """The files that `params.files` names: a path or glob, or a list of these; each file once.

    In the order given, a glob's by name. All of tf.io.gfile's file systems work.

    Raises:
      ValueError: `files` is not given, or one of them is not there, matches nothing or is a directory.
    """
    given = params.get("files")
    patterns = [os.fspath(path) for path in ([given] if isinstance(given, str | os.PathLike) else given or [])]
    if not patterns:
        raise ValueError("params.files is not set. Give a path, a glob such as 'data/train-*.csv', or a list of them.")
    files: list[str] = []
    for pattern in patterns:
        # A path first: a file may have glob characters in its name.
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
    """This pipeline's files, and (n, i): of each of them it reads every n-th record from the i-th on.

    (1, 0) where there are at least as many files as pipelines. Where there are fewer, each reads its records of all.
    """
    if input_context is None or input_context.num_input_pipelines == 1:
        return files, (1, 0)
    pipelines, mine = input_context.num_input_pipelines, input_context.input_pipeline_id
    if len(files) >= pipelines:
        return files[mine::pipelines], (1, 0)
    return files, (pipelines, mine)


def check_compressed(file: str) -> None:
    """Read a .gz file through, and refuse one that is damaged or cut off.

    TensorFlow names no file where it cannot unpack one, and takes one that is cut off for complete.

    Raises:
      ValueError: naming the file.
    """
    try:
        with tf.io.gfile.GFile(file, "rb") as raw, gzip.open(raw) as stream:
            while stream.read(_CHUNK):
                pass
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file}: is cut off or damaged, or no gzip file ({error}).") from error


def shown(files: list[str]) -> str:
    """The files for a message: three of them, and how many more there are."""
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def compressions(files: list[str]) -> list[str]:
    """tf.data's compression_type of each: GZIP for names in .gz, else none."""
    return ["GZIP" if file.endswith(".gz") else "" for file in files]
