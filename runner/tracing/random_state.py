"""Replace random operations that keep state in a kernel by stateless ones, while a model_fn is traced.

`tf.random.uniform`, `tf.nn.dropout` and others keep the state of their generator in the kernel, so no checkpoint
contains it. Here each of them becomes its stateless counterpart, with the same distribution. Its seed is derived from
the run's seed, the operation (its `seed=`, else its position in the trace), the replica and the time: the global step
in TRAIN, the number of the batch in EVAL and PREDICT. Every iteration of a loop and every call of a tf.function draws
new numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.tf_private import random_ops
from runner.tf_private.replaced import replaced

v1 = tf.compat.v1

_PHILOX = 1
_MAX_PARTS = 1_000_003
"""More than the expected number of iterations of any loop, and of micro-batches of any step."""


# By the graph of a branch, loop or function inside a traced graph. Such a graph has one stream, whichever `Stream`
# first draws in it: a tf.function of the user's module outlives the trace that first calls it.
_in_inner_graphs: weakref.WeakKeyDictionary[Any, _StreamInGraph] = weakref.WeakKeyDictionary()


class Stream:
    """The random numbers of one replica in one trace.

    Args:
      graph: the graph that is traced; None: a step that runs eagerly, which draws the same numbers as a traced one.
      identity: distinguishes this stream from all others: seed, mode, replica.
      time: makes an int64 scalar, in `graph`, that differs in each step; called at most once.
    """

    def __init__(self, graph: Any, identity: str, time: Callable[[], tf.Tensor]) -> None:
        self.graph = graph
        self._identity = _number_of(identity)
        self._time = time
        self._in_own_graph: _StreamInGraph | None = None

    def seed(self, operation: int | None) -> Any:
        """Return the seed `[2]` of one operation in the traced graph; None if it cannot be computed there.

        Args:
          operation: the operation's own seed. Two operations with the same seed draw the same numbers, as in TensorFlow
            (scripts use this to shuffle two tensors in the same order). None: the operation's position distinguishes
            it.
        """
        graph = None if tf.executing_eagerly() else v1.get_default_graph()
        stream_in_graph = self._find_in(graph)
        if stream_in_graph is None:
            return None
        # These texts are hashed, so another word in them would change what all models draw.
        name = f"place {next(stream_in_graph.operation_numbers)}" if operation is None else f"seed {operation}"
        return stream_in_graph.identity_and_time + tf.constant([_number_of(name), 0], tf.int64)

    def _find_in(self, graph: Any) -> _StreamInGraph | None:
        """Return the stream for operations of `graph`; None: it cannot be computed there."""
        if graph is self.graph:
            if self._in_own_graph is None:
                self._in_own_graph = _StreamInGraph(self._begin(), itertools.count())
            return self._in_own_graph
        if self.graph is None:
            # `graph` is that of a function that an eager step traces. It is kept for later steps, and the time of this
            # step would be frozen into it.
            return None
        if graph not in _in_inner_graphs:
            stream = self._begin_inside(graph)
            if stream is None:
                return None
            _in_inner_graphs[graph] = stream
        return _in_inner_graphs[graph]

    def _begin(self) -> tf.Tensor:
        """Make the identity and the time of the stream, int64 `[2]`, in its own graph and outside of any branch."""
        scope = contextlib.nullcontext() if self.graph is None else _outside_of_branches(self.graph)
        with scope:
            return tf.stack([tf.constant(self._identity, tf.int64), self._time()])

    def _begin_inside(self, graph: Any) -> _StreamInGraph | None:
        """Return the stream in a branch, loop or function of the traced graph; None: it cannot be computed there."""
        if not getattr(graph, "is_control_flow_graph", False):
            # A tf.function is traced once, but each call must draw other numbers: each call gets a value of its own.
            value = random_ops.call_time_value(graph, _stream_of_call, tf.TensorSpec([2], tf.int64))
            return None if value is None else _StreamInGraph(value, itertools.count())
        around = self._find_in(graph.outer_graph)
        iteration = random_ops.loop_counter(graph)
        if around is None or iteration is None:  # without an iteration it is a branch, which captures the stream around
            return around
        with _outside_of_branches(graph):
            identity, time = tf.unstack(around.identity_and_time)
            number = tf.cast(iteration, tf.int64) + 1
            return _StreamInGraph(tf.stack([identity, moment(time, number)]), around.operation_numbers)


class _StreamInGraph(NamedTuple):
    """A stream as operations of one graph use it.

    Attributes:
      identity_and_time: int64 `[2]`, a tensor of the graph or of one around it.
      operation_numbers: numbers the operations there that have no seed of their own.
    """

    identity_and_time: tf.Tensor
    operation_numbers: Iterator[int]


def moment(time: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return the time of one part of a step, such as a micro-batch or a loop iteration, an int64 scalar.

    Args:
      time: the time of the step, an int64 scalar.
      number: the index of the part.
    """
    return time * _MAX_PARTS + number


class _OfThread(threading.local):
    stream: Stream | None = None


_of_thread = _OfThread()


def stateless_random_ops() -> contextlib.AbstractContextManager[None]:
    """Replace random operations that keep state by stateless ones inside this context, where `drawing_from` applies."""

    def replace(name: str, arguments: Mapping[str, Any], operation: int | None) -> Any:
        stream = _of_thread.stream
        if stream is None or _is_eager_beside_trace(stream) or _is_vectorized():
            return NotImplemented  # TensorFlow then makes its own operation
        seed = stream.seed(operation)
        if seed is None:
            return NotImplemented
        return _SAMPLERS[name](seed, arguments)

    return random_ops.replaced_random_ops(_SAMPLERS, replace)


def drawing_from(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    """Draw from `stream` in this thread inside this context, for the trace of one replica. None: random operations are
    not replaced, because they are not part of the step.
    """
    return replaced(_of_thread, "stream", stream)


def _stream_of_call() -> tf.Tensor:
    """Return the stream of one call of a tf.function, derived from the caller's stream and the position of the call."""
    seed = next_seed()
    if seed is None:  # a tf.function of the user's module, called outside of a trace
        return tf.random.uniform([2], tf.int64.min, tf.int64.max, tf.int64)
    return seed


def next_seed() -> tf.Tensor | None:
    """Return the seed `[2]`, int64, of one random operation of the replica that is traced in this thread; None: none
    is.
    """
    stream = _of_thread.stream
    if stream is None or _is_eager_beside_trace(stream):
        return None
    return stream.seed(None)


def _is_eager_beside_trace(stream: Stream) -> bool:
    """Report whether the draw runs eagerly beside a trace, as for an initial value."""
    return tf.executing_eagerly() and stream.graph is not None


@contextlib.contextmanager
def _outside_of_branches(graph: Any) -> Iterator[None]:
    """Add operations to `graph` inside this context that belong to no branch or scope, so that all branches can use
    them.
    """
    with graph.as_default(), tf.control_dependencies(None), v1.name_scope(None), v1.name_scope("runner_random"):
        yield


def _is_vectorized() -> bool:
    """Report whether this is the body of tf.vectorized_map, in which a stateless operation would draw the same for
    each row.
    """
    return bool(re.search(r"(^|/)loop_body(_\d+)?(/|$)", tf.get_current_name_scope()))


def _number_of(text: str) -> int:
    # Not Python's `hash`, which differs in each process: a resumed run must draw the same numbers.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# --- the stateless counterparts ---------------------------------------------------------------------------------


_Sampler = Callable[[tf.Tensor, Mapping[str, Any]], tf.Tensor]
"""Stateless counterpart of a random operation: from a seed and the operation's arguments by name to what it draws."""


def _philox(seed: tf.Tensor) -> dict[str, Any]:
    """Return the arguments that tell an operation to draw by the Philox algorithm, from `seed`."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return {"key": key, "counter": counter, "alg": _PHILOX}


def _by_philox(operation: Callable[..., tf.Tensor], *names: str) -> _Sampler:
    """Return a stateless counterpart of a random operation, which gets the arguments `names` of that operation."""

    def sample(seed: tf.Tensor, args: Mapping[str, Any]) -> tf.Tensor:
        return operation(**_philox(seed), **_only(args, *names))

    return sample


def _shuffle(seed: tf.Tensor, args: Mapping[str, Any]) -> tf.Tensor:
    shuffled = tf.raw_ops.StatelessShuffle(**_philox(seed), value=args["value"])
    return tf.stop_gradient(shuffled, name=args["name"])  # like RandomShuffle, which has no seed input


def _multinomial(seed: tf.Tensor, args: Mapping[str, Any]) -> tf.Tensor:
    return tf.raw_ops.StatelessMultinomial(seed=seed, **_only(args, "logits", "num_samples", "output_dtype", "name"))


def _gamma(seed: tf.Tensor, args: Mapping[str, Any]) -> tf.Tensor:
    alpha = tf.convert_to_tensor(args["alpha"])
    shape = tf.concat([args["shape"], tf.shape(alpha)], 0)
    return tf.raw_ops.StatelessRandomGammaV3(**_philox(seed), shape=shape, alpha=alpha, name=args["name"])


def _poisson(seed: tf.Tensor, args: Mapping[str, Any]) -> tf.Tensor:
    rate = tf.convert_to_tensor(args["rate"])
    shape = tf.concat([args["shape"], tf.shape(rate)], 0)
    return tf.raw_ops.StatelessRandomPoisson(seed=seed, shape=shape, lam=rate, **_only(args, "dtype", "name"))


def _only(args: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: args[name] for name in names}


_uniform = _by_philox(tf.raw_ops.StatelessRandomUniformV2, "shape", "dtype", "name")
_uniform_int = _by_philox(tf.raw_ops.StatelessRandomUniformIntV2, "shape", "minval", "maxval", "name")
_normal = _by_philox(tf.raw_ops.StatelessRandomNormalV2, "shape", "dtype", "name")
_truncated_normal = _by_philox(tf.raw_ops.StatelessTruncatedNormalV2, "shape", "dtype", "name")

_SAMPLERS: Mapping[str, _Sampler] = {
    "random_uniform": _uniform,
    "random_uniform_int": _uniform_int,
    "random_standard_normal": _normal,
    "truncated_normal": _truncated_normal,
    "random_shuffle": _shuffle,
    "multinomial": _multinomial,
    "random_gamma": _gamma,
    "random_poisson_v2": _poisson,
}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy, TensorFlow and Keras inside this context; restore the state of Python and NumPy afterwards.

    Kernels of operations and functions are kept, unless one of them may have drawn random numbers: it would not start
    over.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes no larger seed
    random_ops.set_seed(seed)
    try:
        with random_ops.without_keras2_generator():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
