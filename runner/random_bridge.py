"""Private names of TensorFlow that random operations need; used nowhere else. As in runner/bridge.py, each says what to
do when it moves, and tests/test_bridge.py names it.

Tested with TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

# Where all random operations of TF 1 get their seed. When it moves: see replaced_random_ops.
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import gen_random_ops


def call_time_value(graph: Any, closure: Callable[[], Any], spec: tf.TensorSpec) -> tf.Tensor | None:
    """A tensor of the function `graph`, with the value that `closure` gives where it is called; None: no function.

    Private: `FuncGraph.capture_call_time_value`, and `FuncGraph._function_captures`: TensorFlow would hand the request
    on to the outermost function. `get_by_ref_snapshot` asks before each call for the type alone, and may fail.
    """
    if not hasattr(graph, "capture_call_time_value"):
        return None
    key = object()
    tensor: tf.Tensor = graph.capture_call_time_value(closure, spec, key)

    def value_at_call() -> list[Any]:
        if sys._getframe(1).f_code.co_name == "get_by_ref_snapshot":
            raise RuntimeError("known at the call only")
        return [closure()]

    closures = graph._function_captures.by_ref_external
    value_at_call.output_spec = closures[key].output_spec  # type: ignore[attr-defined]
    closures[key] = value_at_call
    return tensor


def loop_counter(graph: Any) -> tf.Tensor | None:
    """How many iterations of the tf.while_loop with the body `graph` came before this one; None for other graphs.

    Private: `WhileBodyFuncGraph`, whose first argument the counter is. It is found before TensorFlow lists the
    arguments: they are the first operations of the body.
    """
    if type(graph).__name__ != "WhileBodyFuncGraph":
        return None
    counter = graph.get_operations()[0].outputs[0]
    assert counter.op.type == "Placeholder" and counter.dtype == tf.int32 and counter.shape.rank == 0, counter
    return counter


@contextlib.contextmanager
def replaced_random_ops(
    names: Iterable[str], replace: Callable[[str, Mapping[str, Any], int | None], Any]
) -> Iterator[None]:
    """While entered, `replace` is asked first whenever a random operation of TF 1 is to be made.

    Args:
      names: functions of `gen_random_ops`.
      replace: called with the name of the function, its arguments by name, and the seed that the operation was given
        (None: none); NotImplemented makes the operation as it is.

    Private: the functions of `gen_random_ops`, which all public samplers call, right after `random_seed.get_seed`.
    """
    get_seed, given = random_seed.get_seed, threading.local()

    def noted_seed(op_seed: Any) -> Any:
        given.seed = op_seed
        return get_seed(op_seed)

    def replaced(name: str, make: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
        def sampler(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            result = replace(name, arguments.arguments, getattr(given, "seed", None))
            return make(*args, **kwargs) if result is NotImplemented else result

        return sampler

    functions = {name: getattr(gen_random_ops, name) for name in names}
    try:
        random_seed.get_seed = noted_seed
        for name, function in functions.items():
            setattr(gen_random_ops, name, replaced(name, function, inspect.signature(function)))
        yield
    finally:
        random_seed.get_seed = get_seed
        for name, function in functions.items():
            setattr(gen_random_ops, name, function)
