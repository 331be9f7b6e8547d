"""Gradients that model_fn computes and uses by itself: those that reach a write are of the global batch.

An optimizer of TensorFlow or Keras sums the gradients of the replicas when it applies them. A model_fn that does
something to its gradients before that (clips them, adds them up over steps) or writes to its variables itself would use
those of its own replica. So the gradients are summed where they are computed, if what follows from them is written to a
variable. Which calls these are is known from the trace of discovery, in which one replica runs alone.

A gradient that only enters a loss (a penalty, an inner step of meta-learning) stays that of the replica.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private.graphs import is_assignment, is_optimizer_update, nodes_called_by
from runner.tf_private.replaced import replaced
from runner.tf_private.v1 import gradients_given_to

v1 = tf.compat.v1

Pairs = list[tuple[Any, Any]]
"""(gradient, variable)."""


class GradientCalls:
    """The calls for gradients with respect to variables that model_fn makes in the graph of one trace, in their order.

    Args:
      graph: the graph; calls in its branches and loops are not among them. None: nothing is done with any call.
    """

    def __init__(self, graph: Any = None) -> None:
        self._graph = graph
        self._number = 0

    def gradients(self, gradients: list[Any], sources: Sequence[Any]) -> list[Any]:
        """Return what a call returns.

        Args:
          gradients: what TensorFlow has computed: tensors, IndexedSlices or None.
          sources: with respect to what; one for each gradient.
        """
        # Only gradients with respect to variables count, which are what has a method `assign`.
        places = [place for place, source in enumerate(sources) if hasattr(source, "assign")]
        if v1.get_default_graph() is not self._graph or not places:
            return gradients
        pairs = [(gradients[place], sources[place]) for place in places]
        of_call = self.of_call(self._number, pairs)
        self._number += 1
        returned = list(gradients)
        for place, gradient in zip(places, of_call, strict=True):
            returned[place] = gradient
        return returned

    def of_call(self, number: int, pairs: Pairs) -> list[Any]:
        """Return the gradients of the call with this number."""
        return [gradient for gradient, _ in pairs]

    def given_to_optimizer(self, pairs: Iterable[tuple[Any, Any]]) -> Pairs:
        """Return (gradient, variable) pairs for an optimizer that sums the gradients over the replicas itself."""
        return list(pairs)

    def reaching(self, writes: Iterable[tf.Operation]) -> frozenset[int]:
        """Return the numbers of the calls whose gradients must be those of the global batch.

        Args:
          writes: all operations of the trace that write to variables of the model.
        """
        return frozenset()

    def watching_optimizers(self) -> contextlib.AbstractContextManager[None]:
        """Let optimizers of `tf.compat.v1` inside this context get what `given_to_optimizer` returns."""
        own = v1.train.Optimizer.apply_gradients

        def apply_gradients(optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            return own(optimizer, self.given_to_optimizer(grads_and_vars), *args, **kwargs)

        return replaced(v1.train.Optimizer, "apply_gradients", apply_gradients)


_NO_CALLS = GradientCalls()


class _OfThread(threading.local):
    calls = _NO_CALLS


_of_thread = _OfThread()


class FoundCalls(GradientCalls):
    """The calls of the trace of discovery, which finds those whose gradients reach a write to a variable."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        # Reference of a tensor that a call returned -> number of the call.
        self._call_of: dict[Any, int] = {}
        # Reference of the copy that an optimizer got -> tensor that model_fn gave to the optimizer.
        self._given: dict[Any, tf.Tensor] = {}

    def of_call(self, number: int, pairs: Pairs) -> list[Any]:
        marked = [_copied(gradient) for gradient, _ in pairs]
        for tensor in _tensors(marked):
            self._call_of[tensor.ref()] = number
        return marked

    def given_to_optimizer(self, pairs: Iterable[tuple[Any, Any]]) -> Pairs:
        if v1.get_default_graph() is not self._graph:
            return list(pairs)
        marked_pairs = []
        for gradient, variable in pairs:
            marked = _copied(gradient)
            for given, own in zip(_tensors([marked]), _tensors([gradient]), strict=True):
                self._given[given.ref()] = own
            marked_pairs.append((marked, variable))
        return marked_pairs

    def reaching(self, writes: Iterable[tf.Operation]) -> frozenset[int]:
        numbers: set[int] = set()
        seen: set[Any] = set()
        waiting: list[tf.Tensor] = []
        for write in writes:
            waiting += write.inputs
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            given = self._given.get(tensor.ref())
            if given is None:  # not the gradient of an optimizer
                if tensor.ref() in self._call_of:
                    numbers.add(self._call_of[tensor.ref()])
                else:
                    waiting += tensor.op.inputs
            elif given.ref() not in self._call_of:
                # model_fn changed the gradient between the call and the optimizer. One that it did not change needs no
                # sum here: the optimizer sums it over the replicas.
                waiting.append(given)
        return frozenset(numbers)


class SummedCalls(GradientCalls):
    """The calls of one replica in the trace of all.

    Args:
      graph: as in GradientCalls.
      numbers: of the calls whose gradients are to be those of the global batch.
      all_reduce: returns the pairs with the gradients of the global batch.
    """

    def __init__(self, graph: Any, numbers: frozenset[int], all_reduce: Callable[[Pairs], Pairs]) -> None:
        super().__init__(graph)
        self._numbers = numbers
        self._all_reduce = all_reduce

    def of_call(self, number: int, pairs: Pairs) -> list[Any]:
        if number not in self._numbers:
            return super().of_call(number, pairs)
        return [gradient for gradient, _ in self._all_reduce(pairs)]


def writes_in(operations: Iterable[tf.Operation], handles: Container[str]) -> Iterator[tf.Operation]:
    """Yield those of `operations` that write to a variable, or call a function that does.

    Args:
      handles: names of the tensors that stand for the handles of the variables.
    """
    for operation in operations:
        uses_variable = any(tensor.name in handles for tensor in operation.inputs)
        if not uses_variable:
            continue
        kinds = [operation.type, *(node.op for node in nodes_called_by(operation))]
        if any(is_assignment(kind) or is_optimizer_update(kind) for kind in kinds):
            yield operation


def gradients_given_to_calls() -> contextlib.AbstractContextManager[None]:
    """Pass the gradients that are computed inside this context to the GradientCalls of `calls_of_model_fn`, which may
    replace them.
    """

    def give(gradients: list[Any], sources: Sequence[Any]) -> list[Any]:
        return _of_thread.calls.gradients(gradients, sources)

    return gradients_given_to(give)


def is_computed_by_model_fn() -> bool:
    """Report whether a gradient that is being computed in this thread is one that model_fn asked for."""
    return _of_thread.calls is not _NO_CALLS


def calls_of_model_fn(calls: GradientCalls) -> contextlib.AbstractContextManager[None]:
    """Pass to `calls` the gradients that model_fn computes, which runs inside this context, in this thread."""
    return replaced(_of_thread, "calls", calls)


def _copied(gradient: Any) -> Any:
    """Return a copy of a gradient, None of None. TensorFlow may use the gradient itself on the way to another one; only
    what model_fn computes from it depends on the copy.
    """
    if gradient is None:
        return None
    with v1.name_scope("runner/"):  # otherwise the copy takes a name from model_fn, by which hooks may fetch
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.identity(gradient)
        indices = tf.identity(gradient.indices)
        values = tf.identity(gradient.values)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _tensors(gradients: Iterable[Any]) -> list[tf.Tensor]:
    """Return the tensors of gradients: of IndexedSlices the values and indices, and nothing of None."""
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors
