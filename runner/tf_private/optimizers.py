"""Private state of Keras optimizers, and the names of TensorFlow's optimizer slots.

Written for Keras 3.15 and tf_keras 2.21. When a name moves, `tests/classic/test_keras_named.py` fails with the name of
its case.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state

from runner.tf_private import graphs
from runner.tf_private.replaced import replaced

v1 = tf.compat.v1


def made_apart(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, called so that its variables do not become part of the traced model.

    Keras optimizers keep their learning rate in a variable. Variable creators are per thread, so it is called in
    another one.

    Private: `GLOBAL_STATE_TRACKER`, Keras 3's name counters, replaced so that this optimizer does not count.
    """

    def create(next_creator: Any, **kwargs: Any) -> Any:
        # Without `next_creator`, which would make a variable of the model.
        value = kwargs["initial_value"]
        if callable(value):
            value = value()
        if tf.is_tensor(value):
            value = tf.get_static_value(value)
        if value is None:
            raise ValueError(
                "an optimizer of Keras keeps its learning rate in a variable, whose initial value cannot be a tensor "
                "of the graph. Give it a schedule of keras.optimizers.schedules, or give an optimizer of "
                "tf.compat.v1.train."
            )
        with futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(tf.Variable, value, dtype=kwargs.get("dtype"), trainable=False).result()

    with replaced(global_state, "GLOBAL_STATE_TRACKER", threading.local()), graphs.creator_scope(create):
        return make()


def schedule_of(optimizer: Any) -> Callable[[tf.Tensor], Any] | None:
    """Return a Keras optimizer's learning rate as a function (int64 scalar step -> float scalar); None: it is a number.

    Private: `_learning_rate` of Keras 3 and tf_keras; `_hyper` of tf_keras's legacy optimizers. In `_hyper` the rate
    may be a tensor of the graph, on which `get_config` fails, so it is replaced by a number.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, tf.Variable) or hasattr(rate, "assign"):
        return None
    hyper = getattr(optimizer, "_hyper", {})
    if isinstance(hyper, Mapping) and "learning_rate" in hyper:
        rate = hyper["learning_rate"]
    if tf.is_tensor(rate):
        hyper["learning_rate"] = 0.0
        return lambda step: rate
    if not callable(rate):
        return None
    is_schedule = hasattr(rate, "get_config")
    return rate if is_schedule else lambda step: rate()


def forget_earlier_step(optimizer: Any) -> None:
    """Unset the `iterations` of an optimizer of Keras 2 if they are the global step of an earlier model.

    Private: `_iterations` and `_weights` of tf_keras's legacy optimizers: their setter of `iterations` refuses a second
    variable.
    """
    step = v1.train.get_global_step()
    counter = getattr(optimizer, "_iterations", None)
    if step is None or counter is None or counter is step or counter.name != step.name:
        return
    optimizer._weights = [weight for weight in optimizer._weights if weight is not counter]
    optimizer._iterations = None


def begin_update(optimizer: Any) -> Any:
    """Return the learning rate of a Keras optimizer's next update; None: it has no such attribute.

    Private: `_compute_current_learning_rate` of tf_keras, by which an update first sets the variable that holds the
    rate of a schedule. When it moves: call the schedule with `iterations`.
    """
    if hasattr(optimizer, "_compute_current_learning_rate"):
        optimizer._compute_current_learning_rate()
    return getattr(optimizer, "learning_rate", None)


def average_kept_by(optimizer: Any, variable: tf.Variable) -> Any:
    """Return the moving average that an optimizer with `use_ema=True` keeps of a variable: a `keras.Variable` of Keras
    3, or a variable of tf_keras. None: it keeps none of this variable.

    Private: `_model_variables_moving_average` of both, and the index there of a variable: by `_var_key`, in
    `_trainable_variables_indices` of Keras 3 and `_index_dict` of tf_keras.
    """
    if not getattr(optimizer, "use_ema", False):
        return None
    is_keras_3 = hasattr(optimizer, "_trainable_variables_indices")
    indices = optimizer._trainable_variables_indices if is_keras_3 else optimizer._index_dict
    index = indices.get(optimizer._var_key(variable))
    if index is None:
        return None
    return optimizer._model_variables_moving_average[index]


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of a Keras 3 or tf_keras optimizer: its counter, its learning rate, its slots.

    A legacy optimizer of tf_keras has a method of this name; in tf_keras it is a list that can be called, too.
    """
    variables = optimizer.variables
    if not isinstance(variables, Sequence):
        variables = variables()
    return list(variables)


def renewed_in(optimizer: Any, scope: str) -> Any:
    """Return a v1 optimizer like `optimizer`, without state, which makes its variables other than slots in the name
    scope `scope`.

    Private: `_create_slots`, which every v1 optimizer overrides, since TF 1; `_slots` and `_non_slot_dict`, the state,
    which cannot be copied in a graph.
    """
    renewed = copy.copy(optimizer)
    renewed._slots = {}
    renewed._non_slot_dict = {}
    create_slots = renewed._create_slots

    def create(var_list: Sequence[Any]) -> None:
        with v1.name_scope(f"{scope}/"):
            create_slots(var_list)

    renewed._create_slots = create
    return renewed
