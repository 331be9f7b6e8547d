"""Private names of Keras 3 and tf_keras that `model_to_estimator` needs.

Written against Keras 3.15 and tf_keras 2.21. tests/classic/test_keras_models.py fails first, and by name, when one
moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from runner.tf_private.legacy_keras import tf_keras_of_graphs
from runner.tf_private.replaced import EnteredOnce, Overlay, replaced


def compile_arguments(model: Any) -> Mapping[str, Any]:
    """What `model.compile` was called with, as it was given: objects, functions, strings.

    Private: `Model._compile_config`, in Keras 3 and in tf_keras. `get_compile_config()` gives the same serialised,
    which functions of the user's own do not survive. When it moves: use that.
    """
    arguments: Mapping[str, Any] = model._compile_config.config
    return arguments


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """While entered, tf_keras behaves as in a tf.function, though the graph is one of wrap_function.

    It takes that for TensorFlow 1, and would make layers of another class, and change the base of classes for that:
    models that were made eagerly would be broken by it. Functional models cannot be made at all.
    Private: `version_utils.should_use_v2`, `base_layer_utils.is_in_tf_function`. When they move: they are what looks
    for graphs whose name begins with "wrapped_function". `Model._create_counter_variable` and
    `scale_loss_for_distribution`: see below.
    """
    from tf_keras.src.engine import base_layer_utils, training
    from tf_keras.src.utils import losses_utils, version_utils

    with (
        tf_keras_of_graphs(is_eager_outside=True),
        replaced(version_utils, "should_use_v2", lambda: True),
        replaced(base_layer_utils, "is_in_tf_function", lambda: True),
        # `fit` counts its batches in variables: nobody calls it.
        replaced(training.Model, "_create_counter_variable", lambda self, value: None),
        # `compile` would enter the scope of the strategy, which has been entered, and not from within a replica.
        replaced(training.Model, "distribute_strategy", property(_entered_strategy)),
        # Losses are divided by the number of replicas, for optimizers that sum: the runner weights gradients itself.
        replaced(losses_utils, "scale_loss_for_distribution", lambda loss: loss),
    ):
        yield


def _entered_strategy(model: Any) -> Any:
    """Return the strategy of the trace, whose scope is left as it is."""
    return Overlay(tf.distribute.get_strategy(), scope=contextlib.nullcontext)


as_in_a_function = EnteredOnce(_patched)
