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
    is_decided = model.classic != "auto" and model.keras == "keras3"
    if not any(key == "model.fn" for key, _, _ in config.functions()) or is_decided:
        return config, ""
    uses, imports_keras = _uses(config)
    classic, why = _first(uses, _CLASSIC), ""
    is_classic = bool(classic) if model.classic == "auto" else model.classic
    keras, needed = model.keras, _first(uses, _OF_TF_KERAS)
    if keras == "auto":
        needed = needed or (_first(uses, ("keras",)) if is_classic and not imports_keras else None)
        keras = "legacy" if needed is not None else "keras3"
        if legacy_keras.VARIABLE in env:
            keras = "legacy" if legacy_keras.is_asked_for(env) else "keras3"
    if keras == "legacy" and not legacy_keras.is_installed():
        raise NotFound(
            f"model.fn={model.fn} needs Keras 2 ({needed or 'model.keras=legacy'}), the package tf_keras, which is not "
            f"installed: {legacy_keras.installation()}"
        )
    if is_classic or keras == "legacy":
        what = ["the names of tf.estimator and tf.layers are there (model.classic=true)"] if is_classic else []
        what += ["tf.keras is Keras 2 (model.keras=legacy)"] if keras == "legacy" else []
        found = filter(None, dict.fromkeys((classic, needed)))
        uses_them = " and ".join(found)
        why = f"Model: {', '.join(what)}{uses_them and f': it uses {uses_them}'}."
    decided = dataclasses.replace(model, classic=is_classic, keras=keras)
    return dataclasses.replace(config, model=decided), why


def environment(model: ModelConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with TF_USE_LEGACY_KERAS set so that TensorFlow, when it is imported, provides `model.keras`."""
    if model.keras == "auto":
        return dict(env)
    return {**env, legacy_keras.VARIABLE: "1" if model.keras == "legacy" else "0"}


def _first(uses: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((use for used, use in uses.items() for name in names if f"{used}.".startswith(f"{name}.")), None)


def _uses(config: Config) -> tuple[dict[str, str], bool]:
    """Return the TensorFlow names in the files of the user's functions.

    Returns:
      (name without `compat.v1` -> its first use in words, whether one of the files imports the package `keras` itself).
    """
    waiting: list[Path | None] = [user_code.locate(*function).file for function in config.functions()]
    uses: dict[str, str] = {}
    imports_keras = False
    read: set[Path] = set()
    while waiting and len(read) < _MAX_FILES:
        file = waiting.pop(0)
        if file is None or file in read:
            continue
        read.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # a file with a mistake is reported when it is imported, with a better message
        imports_keras = imports_keras or bool(source_names.uses(tree, "keras"))
        for one in source_names.uses(tree):
            uses.setdefault(one.api_name, f"tf.{one.api_name} in {os.path.relpath(file)}, line {one.line}")
        waiting += source_names.imported_files(tree, file, [Path.cwd()])
    return uses, imports_keras
