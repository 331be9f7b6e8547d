"""Detect for which TensorFlow a model was written, from its source and without importing it.

The result decides two keys: `model.classic`, which provides tf.estimator and tf.layers (removed from TensorFlow), and
`model.keras`, which says whether `tf.keras` is Keras 2 or 3.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from runner.config import source_names, user_code
from runner.config.mistakes import NotFound
from runner.config.schema import Config, ModelConfig
from runner.tf_private import legacy_keras

_CLASSIC = ("estimator", "layers", "nn.rnn_cell", "tpu.CrossShardOptimizer", "keras.estimator")
_OF_TF_KERAS = ("layers", "nn.rnn_cell", "keras.layers.DenseFeatures", "keras.experimental", "keras.estimator")
_MAX_FILES = 200


def resolved(config: Config, env: Mapping[str, str]) -> tuple[Config, str]:
    """Return `config` with the `auto` in `model.classic` and `model.keras` decided, and a line with the reason.

    Args:
      config: the config.
      env: the environment; its TF_USE_LEGACY_KERAS decides if the source does not.

    Returns:
      (config, line). The line is '' if TensorFlow's defaults apply.

    Raises:
      ConfigError: the model needs Keras 2, which is not installed.
    """
    model = config.model
    needs_no_source = model.classic != "auto" and model.keras == "keras3"
    if not any(key == "model.fn" for key, _, _ in config.functions()) or needs_no_source:
        return config, ""
    uses, imports_keras = _find_uses(config)
    classic_use = _first_use_of(uses, _CLASSIC)
    is_classic = model.classic
    if is_classic == "auto":
        is_classic = classic_use is not None
    keras_use = _first_use_of(uses, _OF_TF_KERAS)
    is_undecided = model.keras == "auto" and keras_use is None
    if is_undecided and is_classic and not imports_keras:
        # What was written for tf.estimator means Keras 2 by `tf.keras`, unless it imports the package keras as well.
        keras_use = _first_use_of(uses, ("keras",))
    keras = _decide_keras(model.keras, keras_use, env)
    if keras == "legacy" and not legacy_keras.is_installed():
        raise NotFound(
            f"model.fn={model.fn} needs Keras 2 ({keras_use or 'model.keras=legacy'}), the package tf_keras, which is "
            f"not installed: {legacy_keras.installation()}"
        )
    decided = dataclasses.replace(model, classic=is_classic, keras=keras)
    return dataclasses.replace(config, model=decided), _reason(decided, classic_use, keras_use)


def _decide_keras(wanted: str, use: str | None, env: Mapping[str, str]) -> str:
    """Return the value of `model.keras` in place of auto: legacy or keras3.

    Args:
      wanted: the value in the config.
      use: the first use of what only Keras 2 has; None: there is none.
      env: the environment.
    """
    if wanted != "auto":
        return wanted
    is_legacy = use is not None
    if legacy_keras.VARIABLE in env:
        is_legacy = legacy_keras.is_asked_for(env)
    return "legacy" if is_legacy else "keras3"


def _reason(model: ModelConfig, *uses: str | None) -> str:
    """Return the line that says what is provided for a model, and for which of its `uses`; '': nothing."""
    provided = []
    if model.classic:
        provided.append("the names of tf.estimator and tf.layers are there (model.classic=true)")
    if model.keras == "legacy":
        provided.append("tf.keras is Keras 2 (model.keras=legacy)")
    if not provided:
        return ""
    found = [use for use in dict.fromkeys(uses) if use]
    line = f"Model: {', '.join(provided)}"
    if found:
        line += f": it uses {' and '.join(found)}"
    return f"{line}."


def environment(model: ModelConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with TF_USE_LEGACY_KERAS set so that TensorFlow, when it is imported, provides `model.keras`."""
    if model.keras == "auto":
        return dict(env)
    asks_for_keras_2 = "1" if model.keras == "legacy" else "0"
    return {**env, legacy_keras.VARIABLE: asks_for_keras_2}


def _first_use_of(uses: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first use of one of `names`, or of a name below it; None if there is none."""
    for used, use in uses.items():
        if any(f"{used}.".startswith(f"{name}.") for name in names):
            return use
    return None


def _find_uses(config: Config) -> tuple[dict[str, str], bool]:
    """Return the TensorFlow names in the files of the user's functions.

    Returns:
      (name without `compat.v1` -> its first use in words, whether one of the files imports the package `keras` itself).
    """
    files_to_read: list[Path | None] = [user_code.locate(*function).file for function in config.functions()]
    uses: dict[str, str] = {}
    imports_keras = False
    read_files: set[Path] = set()
    while files_to_read and len(read_files) < _MAX_FILES:
        file = files_to_read.pop(0)
        if file is None or file in read_files:
            continue
        read_files.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # a file with a mistake is reported when it is imported, with a better message
        imports_keras = imports_keras or bool(source_names.uses(tree, "keras"))
        for use in source_names.uses(tree):
            uses.setdefault(use.api_name, f"tf.{use.api_name} in {os.path.relpath(file)}, line {use.line}")
        files_to_read += source_names.imported_files(tree, file, [Path.cwd()])
    return uses, imports_keras
