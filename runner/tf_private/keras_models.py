"""Private names of Keras 3 and tf_keras that `model_to_estimator` needs.

Written for Keras 3.15 and tf_keras 2.21.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from runner.tf_private.legacy_keras import keras_2_of_graphs
from runner.tf_private.replaced import EnteredOnce, Overlay, replaced


def compile_arguments(model: Any) -> Mapping[str, Any]:
    """Return the arguments of `model.compile` as they were given: objects, functions, strings.

    Private: `Model._compile_config`, in Keras 3 and tf_keras. `get_compile_config()` returns them serialized, which
    loses user functions. When it moves: use that.
    """
    return model._compile_config.config


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Make tf_keras behave as in a tf.function, in a graph of wrap_function, inside this context.

    Otherwise it takes such a graph for a TensorFlow 1 graph: it makes layers of other classes and changes the base
    classes of existing ones, which breaks models that were made eagerly, and it cannot make functional models.

    Private: `version_utils.should_use_v2`, `base_layer_utils.is_in_tf_function`. When they move: look for code that
    tests whether a graph's name begins with "wrapped_function". `Model._create_counter_variable`,
    `scale_loss_for_distribution` and `Sequential._build_graph_network_for_inferred_shape`: see below.
    """
    from tf_keras.src.engine import base_layer_utils, sequential, training
    from tf_keras.src.utils import losses_utils, version_utils

    with (
        keras_2_of_graphs(is_eager_outside=True),
        replaced(version_utils, "should_use_v2", lambda: True),
        replaced(base_layer_utils, "is_in_tf_function", lambda: True),
        # The counters are for `fit`, which is not called.
        replaced(training.Model, "_create_counter_variable", lambda self, value: None),
        # It would build layers outside of the name scope of the model around them. In tf.estimator it did nothing.
        replaced(sequential.Sequential, "_build_graph_network_for_inferred_shape", lambda self, *args: None),
        # `compile` would enter the strategy's scope, which fails inside a replica.
        replaced(training.Model, "distribute_strategy", property(_entered_strategy)),
        # tf_keras divides losses by the number of replicas, for optimizers that sum; the runner weights gradients
        # itself.
        replaced(losses_utils, "scale_loss_for_distribution", lambda loss: loss),
    ):
        yield


def _entered_strategy(model: Any) -> Any:
    """Return the current strategy with a `scope` that does nothing."""
    return Overlay(tf.distribute.get_strategy(), scope=contextlib.nullcontext)


as_in_a_function = EnteredOnce(_patched)
