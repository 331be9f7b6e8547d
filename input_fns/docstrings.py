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

# What follows a `def` or `class`. The module ast is exact, and takes ten times as long.
DOCSTRING = re.compile(r':\n\s+[rR]?"""(.+?)"""', re.DOTALL)
MIN_WORDS, MOST_OF_A_FILE = 12, 10
ALIASES = ("np", "pd", "tf", "plt", "mpl", "sp", "scikit-learn")


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Batches of ({"text": string `[batch]`}, labels int64 `[batch]`: the place of the package in params.packages).

    TRAIN shuffles its texts anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out texts.
    PREDICT has no labels. A fifth of each package's files is held out, so no file is in both parts. The names of the
    packages are taken out of the texts: what is left is what they write about, and how.

    num_epochs: TRAIN ends after so many; None: it does not (train.max_epochs).

    Params:
      packages: names of installed packages. Their files are read; none of them is imported.
      texts_per_package: at most so many docstrings of each package to train on, and a quarter as many held out.
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
    """Return up to `count` docstrings of functions and classes, each once, of one of the two parts of the files."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"params.packages has {package!r}, which is no package that is installed here.")
    root = Path(spec.submodule_search_locations[0])
    # The names decide the order and the part, so that both are the same on every machine.
    files = {zlib.crc32(str(path.relative_to(root)).encode()): path for path in root.rglob("*.py")}
    found: dict[str, None] = {}
    for number, path in sorted(files.items()):
        if (number % 5 == 0) == is_held_out and "tests" not in path.parts:
            texts = [text for text in DOCSTRING.findall(path.read_text("utf-8")) if len(text.split()) >= MIN_WORDS]
            found |= dict.fromkeys(texts[:MOST_OF_A_FILE])
        if len(found) >= count:
            break
    return tuple(found)[:count]
