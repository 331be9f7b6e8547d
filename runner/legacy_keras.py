"""Whether `tf.keras` is Keras 2, the package tf_keras: the environment says it when TensorFlow is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

VARIABLE = "TF_USE_LEGACY_KERAS"


def is_asked_for(env: Mapping[str, str]) -> bool:
    """Whether TensorFlow 2.21 would make it Keras 2 in this environment."""
    return env.get(VARIABLE) in ("1", "true", "True")


def is_installed() -> bool:
    return importlib.util.find_spec("tf_keras") is not None
