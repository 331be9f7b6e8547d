"""TF 1's random operations, whose kernels have a state: replacing them, and setting seeds without dropping all
kernels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

# All random operations of TF 1 get their seed from it. When it moves: see replaced_random_ops.
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import gen_candidate_sampling_ops, gen_image_ops, gen_nn_ops, gen_random_ops, script_ops

from runner.tf_private.replaced import Overlay, all_replaced

# Modules with the eager functions of the operations in KERNEL_RANDOM.
_EAGER_OPERATIONS = (gen_random_ops, gen_candidate_sampling_ops, gen_image_ops, gen_nn_ops)

# Operations with a generator in their kernel. Datasets such as RandomDataset are omitted: models have none.
KERNEL_RANDOM = frozenset(
    {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal",
     "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RandomCrop", "Multinomial",
     "UniformCandidateSampler", "LogUniformCandidateSampler", "LearnedUnigramCandidateSampler",
     "FixedUnigramCandidateSampler", "ThreadUnsafeUnigramCandidateSampler", "AllCandidateSampler",
     "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2", "FractionalMaxPool", "FractionalAvgPool"}
)  # fmt: skip

# Operations that draw from a tf.random.Generator and advance its state, which is in a variable.
GENERATOR_RANDOM = frozenset(
    {"RngReadAndSkip", "RngSkip", "StatefulUniform", "StatefulUniformInt", "StatefulUniformFullInt",
     "StatefulStandardNormalV2", "StatefulTruncatedNormal", "StatefulRandomBinomial"}
)  # fmt: skip


def call_time_value(graph: Any, closure: Callable[[], Any], spec: tf.TensorSpec) -> tf.Tensor | None:
    """Return a tensor in the function `graph` whose value `closure` computes at each call; None: `graph` is not a
    function.

    Private: `FuncGraph.capture_call_time_value`, which passes the request on to the outermost function;
    `FuncGraph._function_captures` avoids that. Before each call, `get_by_ref_snapshot` asks for the type only; an error
    is allowed there.
    """
    if not hasattr(graph, "capture_call_time_value"):
        return None
    key = object()
    tensor: tf.Tensor = graph.capture_call_time_value(closure, spec, key)

    def value_at_call() -> list[Any]:
        if sys._getframe(1).f_code.co_name == "get_by_ref_snapshot":
            raise RuntimeError("the value is known only when the function is called")
        return [closure()]

    closures = graph._function_captures.by_ref_external
    value_at_call.output_spec = closures[key].output_spec  # type: ignore[attr-defined]
    closures[key] = value_at_call
    return tensor


def loop_counter(graph: Any) -> tf.Tensor | None:
    """Return the number of earlier iterations of the tf.while_loop whose body or condition is `graph`, an int32 scalar;
    None: it is of no loop.

    Private: `WhileBodyFuncGraph` and `WhileCondFuncGraph`, whose first argument is the counter. While they are traced,
    TensorFlow has not listed the arguments yet, but they are their first operations.
    """
    if type(graph).__name__ not in ("WhileBodyFuncGraph", "WhileCondFuncGraph"):
        return None
    counter = graph.get_operations()[0].outputs[0]
    assert counter.op.type == "Placeholder" and counter.dtype == tf.int32 and counter.shape.rank == 0, counter
    return counter


def replaced_random_ops(
    names: Iterable[str], replace: Callable[[str, Mapping[str, Any], int | None], Any]
) -> contextlib.AbstractContextManager[None]:
    """Let `replace` return the result in place of random operations of TF 1, inside this context.

    Args:
      names: functions of `gen_random_ops`.
      replace: called with the function's name, its arguments by name, and the op seed that the caller gave (None:
        none). Returns the result; NotImplemented: make the operation as usual.

    Private: the functions of `gen_random_ops`, which all public samplers call, right after `random_seed.get_seed`.
    """
    get_seed = random_seed.get_seed
    last_given = threading.local()

    def noted_seed(op_seed: Any) -> Any:
        last_given.seed = op_seed
        return get_seed(op_seed)

    def sampler_of(name: str) -> Callable[..., Any]:
        make = getattr(gen_random_ops, name)
        signature = inspect.signature(make)

        def sampler(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            drawn = replace(name, arguments.arguments, getattr(last_given, "seed", None))
            if drawn is NotImplemented:
                return make(*args, **kwargs)
            return drawn

        return sampler

    samplers = [(gen_random_ops, name, sampler_of(name)) for name in names]
    return all_replaced((random_seed, "get_seed", noted_seed), *samplers)


def noticing_draws(on_draw: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Call `on_draw` whenever this thread is about to run, eagerly, an operation that a TensorFlow 1 session would run
    anew at each `run`, inside this context. The input function's result then is not one constant.

    Such operations are those of KERNEL_RANDOM, and Python functions (`tf.py_function`, `tf.numpy_function`, `py_func`).

    Private: the modules in `_EAGER_OPERATIONS`, through which the public functions make random operations;
    `script_ops.py_func_common` and `_internal_py_func`, by which Python functions run. When they move: AttributeError.
    """
    thread = threading.get_ident()

    def make_noticed(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and threading.get_ident() == thread:
            on_draw()
        # `on_draw` may have begun a graph: then the operation is made in it.
        return make(*args, **kwargs)

    # Operations have functions in snake case: RandomUniformInt is made by `random_uniform_int`.
    names = [re.sub("(?<!^)(?=[A-Z])", "_", kind).lower() for kind in KERNEL_RANDOM]
    functions: list[tuple[Any, str]] = []
    for module in _EAGER_OPERATIONS:
        functions += [(module, name) for name in names if hasattr(module, name)]
    functions += [(script_ops, "py_func_common"), (script_ops, "_internal_py_func")]
    replacements = []
    for module, name in functions:
        make = getattr(module, name)
        replacements.append((module, name, functools.partial(make_noticed, make)))
    return all_replaced(*replacements)


@contextlib.contextmanager
def without_keras2_generator() -> Iterator[None]:
    """Make Keras 2 draw the seeds of layers from Python's `random`, as if no seed had been set, inside this context.

    `tf_keras.utils.set_random_seed` leaves a generator from which each layer draws its seed, so initial values of a
    second model would differ from the first's. A call of it by model_fn itself applies until the end of this context.

    Private: `tf_keras.src.backend._SEED_GENERATOR`, one per thread. When it moves: nothing is replaced, and initial
    values of scripts that call `set_random_seed` depend on what ran before.
    """
    generators: Any = getattr(sys.modules.get("tf_keras.src.backend"), "_SEED_GENERATOR", None)
    before = getattr(generators, "generator", None)
    if before is None:
        yield
        return
    generators.generator = None
    try:
        yield
    finally:
        generators.generator = before


# --- kernels of eager operations --------------------------------------------------------------------------------


def set_seed(seed: int) -> None:
    """Set the global seed like tf.random.set_seed, which also drops the kernels of all eager operations and functions.

    Kernels take long to build again. So they are dropped only if an operation has run whose kernel may keep random
    state.

    Private: as in `graphs.kernels_kept`, which it respects, and in `_Watch`. When they move: tf.random.set_seed.
    """
    eager = context.context()
    kernels_are_kept = "_set_global_seed" in vars(eager)  # `graphs.kernels_kept` has replaced it on the object
    if not tf.executing_eagerly() or kernels_are_kept or not _watchable(eager):
        tf.random.set_seed(seed)
    elif _watch().may_have_state(eager):
        tf.random.set_seed(seed)
        _watch().forget()
    else:  # what tf.random.set_seed does, but for dropping the kernels
        eager._seed = seed
        eager._rng = random.Random(seed)


def _watchable(eager: Any) -> bool:
    """Report whether all private names exist by which `set_seed` knows what has run."""
    named = all(hasattr(eager, name) for name in ("_seed", "_rng", "call_function", "get_function_def"))
    return named and all(hasattr(module, "pywrap_tfe") for module in _EAGER_OPERATIONS)


class _Watch:
    """Records the eager operations and functions that ran since kernels were dropped and may keep a random state.

    Private: `pywrap_tfe` in the modules `gen_*_ops` (used by tf.raw_ops, too), by which operations run eagerly, and
    `Context.call_function`, which runs a function. Both are replaced permanently. When they move: `_watchable` returns
    False.
    """

    KEPT = 1000
    """Drop kernels after at most this many seeds, since unused ones take memory. An evaluation sets about ten."""

    def __init__(self) -> None:
        self._drew = True  # what ran before the watch began is not known
        self._num_seeds_with_kernels = 0  # seeds that were set since kernels were dropped
        self._called: set[bytes] = set()  # functions that ran since then, by name
        self._draws: dict[bytes, bool] = {}  # function -> whether it has a random operation with a state
        for module in _EAGER_OPERATIONS:
            execute = module.pywrap_tfe.TFE_Py_FastPathExecute
            noted = functools.partial(self._execute, execute)
            module.pywrap_tfe = Overlay(module.pywrap_tfe, TFE_Py_FastPathExecute=noted)
        eager = context.context()
        call_function = eager.call_function

        def noted_call(name: bytes, *args: Any) -> Any:
            self._called.add(name)
            return call_function(name, *args)

        eager.call_function = noted_call

    def _execute(self, execute: Callable[..., Any], ctx: Any, operation: str, *args: Any) -> Any:
        self._drew = self._drew or operation in KERNEL_RANDOM
        return execute(ctx, operation, *args)

    def may_have_state(self, eager: Any) -> bool:
        """Report whether a kernel may have a random state, or has been kept for too many seeds."""
        self._num_seeds_with_kernels += 1
        if self._drew or self._num_seeds_with_kernels > self.KEPT:
            return True
        return any(self._function_draws(eager, name) for name in list(self._called))

    def forget(self) -> None:
        """Start again after kernels were dropped."""
        self._drew = False
        self._num_seeds_with_kernels = 0
        self._called.clear()

    def _function_draws(self, eager: Any, name: bytes) -> bool:
        """Report whether a function contains a random operation with a state. A deleted function has no kernel any
        more.
        """
        if name not in self._draws:
            self._draws[name] = False  # for recursive functions
            self._draws[name] = any(self._node_draws(eager, node) for node in _nodes_of(eager, name))
        return self._draws[name]

    def _node_draws(self, eager: Any, node: Any) -> bool:
        if node.op in KERNEL_RANDOM:
            return True
        return any(self._function_draws(eager, called.encode()) for called in functions_of(node))


def _nodes_of(eager: Any, name: bytes) -> Sequence[Any]:
    """Return the nodes of a function; none if it was deleted.

    It may be deleted between two lines of code, because other threads delete iterators.
    """
    if not eager.has_function(name):
        return ()
    try:
        nodes: Sequence[Any] = eager.get_function_def(name).node_def
    except tf.errors.NotFoundError:
        return ()
    return nodes


def functions_of(node: Any) -> list[str]:
    """Return the names of the functions that a NodeDef calls, including its type, which may name one."""
    attributes = node.attr.values()
    names = [attribute.func.name for attribute in attributes if attribute.HasField("func")]
    for attribute in attributes:
        names += [function.name for function in attribute.list.func]
    return [*names, node.op]


_watch = functools.cache(_Watch)
