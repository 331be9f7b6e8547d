"""What the workers of a cluster agree on: small sums over all of them, which every worker takes part in.

Whatever depends on a clock, a signal, a file or a hook differs between workers, and a worker that acted on its own
would leave the others waiting in a collective. So it is agreed here first, at the same places on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.cluster import Cluster
from runner.distribute.errors import OF_A_LOST_PEER, PeerLost
from runner.distribute.reductions import local_replica
from runner.distribute.strategy import is_parameter_server

_SUM = tf.distribute.ReduceOp.SUM

# A sum is of so many numbers, or of a larger power of two: each size is a function to trace, and the losses of a loop,
# of which there are others in every loop, are summed too.
_FEWEST = 16

# Sums wait for whoever writes a checkpoint or evaluates alone; that a peer is gone, its heartbeat tells.
_PATIENT_SECS = 1e9

_LOST = tuple(getattr(tf.errors, name) for name in OF_A_LOST_PEER)
# TensorFlow 2.21 has no code of its own for these: a peer that ends while it is waited for.
_LOST_WORDS = ("Collective ops is aborted", "onnection reset", "Socket closed", "coordination service", "heartbeat")


class Collectives:
    """How the workers of a cluster agree. This is a single process: what it thinks is agreed.

    Every worker calls the same methods in the same order.
    """

    num_workers, worker_index, is_chief = 1, 0, True

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the workers, element by element in float64, of as many values on each.

        No values: all have met here.
        """
        return list(values)

    def any(self, flag: bool) -> bool:
        """Report whether `flag` is set on any worker."""
        return flag

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the chief's values, which are as many as those of each worker."""
        return list(values)

    def broadcast_text(self, text: str) -> str:
        """Return the chief's text."""
        return text

    def sum_in_graph(self, value: tf.Tensor) -> tf.Tensor:
        """Return `value` (the same shape on all workers) summed over the workers; for use inside a tf.function."""
        return value

    def noticing_lost_peers(self) -> contextlib.AbstractContextManager[None]:
        """While entered, what TensorFlow raises when a peer has gone is raised as PeerLost."""
        return contextlib.nullcontext()


SINGLE_PROCESS = Collectives()


class CoordinatorCollectives(Collectives):
    """The coordinator of parameter servers: it agrees with nobody, and its variables are in other processes."""

    @contextlib.contextmanager
    def noticing_lost_peers(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.UnavailableError as error:
            named = re.search(r"/job:ps/replica:\d+/task:(\d+)", error.message)
            which = f" (ps:{named[1]})" if named else ""
            raise PeerLost(f"a parameter server was lost{which}, and with it the variables that it held") from error


class WorkerCollectives(Collectives):
    """The workers of a MultiWorkerMirroredStrategy. A sum takes about 1 ms on one host."""

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
        resolver = strategy.cluster_resolver
        me = Cluster(resolver.task_type or "worker", resolver.task_id or 0, resolver.cluster_spec().as_dict())
        self.num_workers, self.worker_index, self.is_chief = me.num_workers, me.worker_index, me.is_chief
        self._strategy = strategy
        self._patient = tf.distribute.experimental.CommunicationOptions(timeout_seconds=_PATIENT_SECS)
        self._functions: dict[int, Callable[[tf.Tensor], tf.Tensor]] = {}

    def sum(self, values: Sequence[float]) -> list[float]:
        size = max(_FEWEST, 1 << (len(values) - 1).bit_length())
        padded = np.zeros(size)
        padded[: len(values)] = values
        if size not in self._functions:
            sum_of_size = functools.partial(self._sum, options=self._patient)
            self._functions[size] = tf.function(sum_of_size, autograph=False)
        with self.noticing_lost_peers():
            total: list[float] = self._functions[size](tf.constant(padded, tf.float64)).numpy().tolist()
        return total[: len(values)]

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def broadcast(self, values: Sequence[float]) -> list[float]:
        return self.sum(values if self.is_chief else [0.0] * len(values))

    def broadcast_text(self, text: str) -> str:
        codes = text.encode() if self.is_chief else b""
        (length,) = self.broadcast([len(codes)])
        agreed = self.broadcast(list(codes) if self.is_chief else [0.0] * int(length))
        return bytes(map(int, agreed)).decode()

    def sum_in_graph(self, value: tf.Tensor) -> tf.Tensor:
        return self._sum(value, None)

    def _sum(self, value: tf.Tensor, options: Any) -> tf.Tensor:
        def of_replica() -> tf.Tensor:
            # Without the identity the value, an argument of a tf.function, has no device, and all_reduce fails with
            # "destinations can not be empty".
            mine = tf.identity(value) if local_replica() == 0 else tf.zeros_like(value)  # on the replica's device
            return tf.distribute.get_replica_context().all_reduce(_SUM, mine, options)

        return self._strategy.experimental_local_results(self._strategy.run(of_replica))[0]

    @contextlib.contextmanager
    def noticing_lost_peers(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            if is_loss_of_peer(error):
                raise PeerLost(f"a worker of the cluster was lost: {_reason(error)}") from error
            raise


def check_evaluation(training: Any, evaluation: Any) -> None:
    """Checks the strategies of a RunConfig. Several processes are joined for one strategy.

    Raises: ValueError: evaluation has one of several processes that is not that of training.
    """
    if not isinstance(evaluation, tf.distribute.Strategy) or evaluation is training:
        return
    if is_parameter_server(evaluation) or collectives_of(evaluation).num_workers > 1:
        raise ValueError(
            f"RunConfig(eval_distribute={type(evaluation).__name__}): processes are joined for one strategy. Give the "
            "object that is train_distribute, None (which means that), or a strategy of one process; or evaluate in a "
            "program of its own."
        )


def collectives_of(strategy: tf.distribute.Strategy | None) -> Collectives:
    """How the processes that train with `strategy` agree."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        together = WorkerCollectives(strategy)
        return together if together.num_workers > 1 else SINGLE_PROCESS
    return CoordinatorCollectives() if is_parameter_server(strategy) else SINGLE_PROCESS


def is_loss_of_peer(error: BaseException) -> bool:
    """Whether TensorFlow raised `error` because another process ended, or its connection did."""
    if isinstance(error, _LOST):
        return True
    return isinstance(error, tf.errors.OpError) and any(words in str(error) for words in _LOST_WORDS)


def _reason(error: tf.errors.OpError) -> str:
    """The line of TensorFlow's message that says what happened."""
    lines = str(error.message).splitlines()
    return next((line for line in lines if any(words in line for words in _LOST_WORDS)), lines[0] if lines else "")
