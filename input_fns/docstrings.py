"""Docstrings of installed packages: real texts without a download. The class is the package that a text comes from."""

from __future__ import annotations

import functools
import importlib.util
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from input_fns._batches import batches_of_arrays

# A docstring after a `def` or `class`. The module ast would be exact, but takes ten times as long.
DOCSTRING = re.compile(r':\n\s+[rR]?"""(.+?)"""', re.DOTALL)
MIN_WORDS, MOST_OF_A_FILE = 12, 10
ALIASES = ("np", "pd", "tf", "plt", "mpl", "sp", "scikit-learn")


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of ({"text": string `[batch]`}, labels int64 `[batch]`: the package's index in params.packages).

    TRAIN shuffles its texts anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out texts.
    PREDICT has no labels. A fifth of each package's files is held out, so no file is in both parts. Names of the
    packages are removed from the texts, so that a model must learn their topics and style.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      packages: names of installed packages. Their files are read, not imported.
      texts_per_package: the most docstrings of each package to train on; a quarter as many are held out.
      batch_size, shuffle_seed, batch_across_epochs: as for input_fns.digits.

    Raises:
      ValueError: a package is not installed.
    """
    packages = list(params["packages"])
    is_held_out = mode != "train"
    count = params["texts_per_package"] // (4 if is_held_out else 1)
    texts = [read_docstrings(package, is_held_out, count) for package in packages]
    labels = np.repeat(np.arange(len(packages)), [len(one) for one in texts])
    names = re.compile(rf"(?i)\b({'|'.join([*packages, *ALIASES])})\b")
    features = {"text": np.array([names.sub(" ", text) for one in texts for text in one])}
    arrays = features if mode == "infer" else (features, labels)
    return batches_of_arrays(arrays, len(labels), mode, params, config, num_epochs)


@functools.cache
def read_docstrings(package: str, is_held_out: bool, count: int) -> tuple[str, ...]:
    """Return up to `count` different docstrings of functions and classes, from one of the two parts of the package's
    files.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"params.packages has {package!r}, which is not installed here.")
    root = Path(spec.submodule_search_locations[0])
    # Order and split depend only on names, so that they are the same on every machine.
    files = {zlib.crc32(str(path.relative_to(root)).encode()): path for path in root.rglob("*.py")}
    found: dict[str, None] = {}
    for number, path in sorted(files.items()):
        if (number % 5 == 0) == is_held_out and "tests" not in path.parts:
            texts = [text for text in DOCSTRING.findall(path.read_text("utf-8")) if len(text.split()) >= MIN_WORDS]
            found |= dict.fromkeys(texts[:MOST_OF_A_FILE])
        if len(found) >= count:
            break
    return tuple(found)[:count]
