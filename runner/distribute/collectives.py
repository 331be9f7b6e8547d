"""Agreement between the workers of a cluster, by small sums in which every worker takes part.

A clock, a signal, a file or a hook may differ between workers. If one worker acted on it alone, the others would wait
in a collective forever. Therefore all workers agree first, at the same points of the program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.cluster import Cluster
from runner.distribute.errors import OF_A_LOST_PEER, PeerLost
from runner.distribute.reductions import local_replica
from runner.distribute.strategy import is_parameter_server

_SUM = tf.distribute.ReduceOp.SUM

# Vectors are padded to this length, or to a larger power of two, because TensorFlow traces one function for each
# length. The vectors include the losses of loops, whose lengths differ.
_LEAST_SIZE = 16

# No timeout: the other workers wait in a sum while one writes a checkpoint or evaluates. Heartbeats detect lost peers.
_PATIENT_SECS = 1e9

_WORD = np.dtype("<u4")
"""As what bytes are added."""

_LOST = tuple(getattr(tf.errors, name) for name in OF_A_LOST_PEER)
# Words in the errors about a peer that ended while others waited for it; TensorFlow 2.21 has no error code for them.
_LOST_WORDS = ("Collective ops is aborted", "onnection reset", "Socket closed", "coordination service", "heartbeat")


class Collectives:
    """Communication between the workers that train together; this base class is for a single process.

    All workers must call the same methods in the same order, because TensorFlow derives the key of a collective from
    the number of collectives before it. So if something ends a loop on one worker (summaries, session hooks), it must
    end the loop on all workers.
    """

    num_workers = 1
    worker_index = 0
    is_chief = True

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the workers, element by element in float64.

        Args:
          values: every worker must pass the same number of values. Without values, the call is a barrier.
        """
        return list(values)

    def part(self) -> None:
        """Wait until no worker needs this process any more, which may end then. All workers must call this together."""

    def any(self, flag: bool) -> bool:
        """Report whether `flag` is set on any worker."""
        return flag

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the chief's values. All workers must pass the same number of values."""
        return list(values)

    def broadcast_text(self, text: str) -> str:
        """Return the chief's text on all workers."""
        return text

    def gather(self, value: float) -> list[float]:
        """Return the value of each worker, in their order."""
        return [value]

    def gather_texts(self, text: str) -> list[str]:
        """Return the text of each worker, in their order."""
        return [text]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each worker, in their order."""
        return [data]

    def gather_arrays(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return the arrays of each worker by their names, in the order of the workers.

        Args:
          arrays: NumPy arrays of any dtype that TensorFlow has, strings as objects. Each worker may have other names
            and shapes.
        """
        if self.num_workers == 1:
            return [dict(arrays)]
        return [_unpacked(data) for data in self.gather_bytes(_packed(arrays))]

    def differing_texts(self, text: str) -> list[str]:
        """Return the text of each worker, in their order, if they are not all the same; else []. This is cheap if they
        are.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
        # 48 bits: a sum of such numbers is exact in float64.
        digests = self.gather(int.from_bytes(digest, "big"))
        if len(set(digests)) == 1:
            return []
        return self.gather_texts(text)

    def sum_in_graph(self, value: tf.Tensor) -> tf.Tensor:
        """Return `value` (numeric, the same shape on all workers) summed over the workers; inside a tf.function."""
        return value

    def noticing_lost_peers(self) -> contextlib.AbstractContextManager[None]:
        """Turn TensorFlow's errors about a lost peer into PeerLost inside this context."""
        return contextlib.nullcontext()

    def tell_waits(self, listener: Callable[[float], None] | None) -> None:
        """From now on, call `listener` with the seconds of each sum, in which this worker waits for the slowest.

        Args:
          listener: None: call nobody any more.
        """


SINGLE_PROCESS = Collectives()


class CoordinatorCollectives(Collectives):
    """The collectives of a coordinator of parameter servers: there is one trainer, but other processes can be lost."""

    @contextlib.contextmanager
    def noticing_lost_peers(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.UnavailableError as error:
            named = re.search(r"/job:ps/replica:\d+/task:(\d+)", error.message)
            which = f" (ps:{named[1]})" if named else ""
            raise PeerLost(f"A parameter server was lost{which}, and with it the variables that it held") from error


class WorkerCollectives(Collectives):
    """The workers of a MultiWorkerMirroredStrategy. A sum takes about 1 ms on one host."""

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
        resolver = strategy.cluster_resolver
        me = Cluster(resolver.task_type or "worker", resolver.task_id or 0, resolver.cluster_spec().as_dict())
        self.num_workers = me.num_workers
        self.worker_index = me.worker_index
        self.is_chief = me.is_chief
        self._strategy = strategy
        self._patient = tf.distribute.experimental.CommunicationOptions(timeout_seconds=_PATIENT_SECS)
        self._functions: dict[int, Callable[[tf.Tensor], tf.Tensor]] = {}
        self._listener: Callable[[float], None] | None = None

    def tell_waits(self, listener: Callable[[float], None] | None) -> None:
        self._listener = listener

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._sum_array(values).tolist()

    def _sum_array(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the sums over the workers, float64 `[values]`. All workers must call this together. The listener of
        `tell_waits` is told how long it took.
        """
        size = max(_LEAST_SIZE, 1 << (len(values) - 1).bit_length())
        padded = np.zeros(size)
        padded[: len(values)] = values
        if size not in self._functions:
            sum_of_size = functools.partial(self._sum, options=self._patient)
            self._functions[size] = tf.function(sum_of_size, autograph=False)
        began = time.perf_counter()
        with self.noticing_lost_peers():
            total: np.ndarray = self._functions[size](tf.constant(padded, tf.float64)).numpy()
        if self._listener is not None:
            self._listener(time.perf_counter() - began)
        return total[: len(values)]

    def part(self) -> None:
        # TensorFlow (2.21) has done a worker's part in a sum before its last message has left the process. If the
        # process ends at once, another worker gets "Socket closed" in place of the sum. Hence two sums: the first says
        # that all workers are here. A worker that loses a peer in the second one needs nothing of it any more.
        self.sum([])
        with contextlib.suppress(PeerLost):
            self.sum([])

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def broadcast(self, values: Sequence[float]) -> list[float]:
        own = values if self.is_chief else [0.0] * len(values)
        return self.sum(own)

    def broadcast_text(self, text: str) -> str:
        own = text if self.is_chief else ""
        return self.gather_texts(own)[0]

    def gather(self, value: float) -> list[float]:
        mine = [0.0] * self.num_workers
        mine[self.worker_index] = value
        return self.sum(mine)

    def gather_texts(self, text: str) -> list[str]:
        return [data.decode() for data in self.gather_bytes(text.encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = [int(size) for size in self.gather(len(data))]
        lengths = [-(-size // _WORD.itemsize) for size in sizes]  # in words, rounded up
        begin = sum(lengths[: self.worker_index])
        end = begin + lengths[self.worker_index]
        padding = bytes(-len(data) % _WORD.itemsize)
        # Each worker fills its own part, so that the sum has the bytes of all, one after the other. A number of 32 bits
        # is exact in float64.
        words = np.zeros(sum(lengths))
        words[begin:end] = np.frombuffer(data + padding, _WORD)
        together = self._sum_array(words).astype(_WORD)
        ends = np.cumsum(lengths)[:-1]
        parts = np.split(together, ends)
        return [part.tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]

    def sum_in_graph(self, value: tf.Tensor) -> tf.Tensor:
        return self._sum(value, None)

    def _sum(self, value: tf.Tensor, options: Any) -> tf.Tensor:
        def of_replica() -> tf.Tensor:
            # Without the identity the value, an argument of a tf.function, has no device, and all_reduce fails with
            # "destinations can not be empty".
            mine = tf.identity(value) if local_replica() == 0 else tf.zeros_like(value)  # on the replica's device
            return tf.distribute.get_replica_context().all_reduce(_SUM, mine, options)

        total = self._strategy.run(of_replica)
        return self._strategy.experimental_local_results(total)[0]

    @contextlib.contextmanager
    def noticing_lost_peers(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            if is_loss_of_peer(error):
                raise PeerLost(f"a worker of the cluster was lost: {_find_reason(error)}") from error
            raise


def check_evaluation(training: Any, evaluation: Any) -> None:
    """Check that a RunConfig uses at most one strategy of several processes: TensorFlow can join them for one only.

    Args:
      training: the strategy of training, or None.
      evaluation: the strategy of evaluation, or None.

    Raises:
      ValueError: evaluation has a strategy of several processes that is not the strategy object of training.
    """
    if not isinstance(evaluation, tf.distribute.Strategy) or evaluation is training:
        return
    if is_parameter_server(evaluation) or collectives_of(evaluation).num_workers > 1:
        raise ValueError(
            f"RunConfig(eval_distribute={type(evaluation).__name__}): TensorFlow can join processes for one strategy "
            "only. Use None or the same object as train_distribute, or a strategy of one process; or evaluate in "
            "another program."
        )


def collectives_of(strategy: tf.distribute.Strategy | None) -> Collectives:
    """Return the collectives of the processes that train with `strategy`; for workers, one object for all who ask."""
    if is_parameter_server(strategy):
        return CoordinatorCollectives()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        of_workers = _build_for_workers(strategy)
        if of_workers.num_workers > 1:
            return of_workers
    return SINGLE_PROCESS


@functools.cache
def _build_for_workers(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> WorkerCollectives:
    # Each object traces the functions of its sums anew, which took a twentieth of the start of two workers.
    return WorkerCollectives(strategy)


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays with their names, dtypes and shapes as bytes, in messages of TensorFlow."""
    message = tf.compat.v1.NameAttrList()
    for name, array in arrays.items():
        tensor = tf.make_tensor_proto(array, tf.as_dtype(array.dtype))
        message.attr[name].tensor.CopyFrom(tensor)
    packed: bytes = message.SerializeToString()
    return packed


def _unpacked(data: bytes) -> dict[str, np.ndarray]:
    message = tf.compat.v1.NameAttrList.FromString(data)
    return {name: tf.make_ndarray(value.tensor) for name, value in message.attr.items()}


def is_loss_of_peer(error: BaseException) -> bool:
    """Report whether TensorFlow raised `error` because another process or its connection ended."""
    if isinstance(error, _LOST):
        return True
    return isinstance(error, tf.errors.OpError) and _tells_of_loss(str(error))


def _find_reason(error: tf.errors.OpError) -> str:
    """Return the line of TensorFlow's message that says what happened to the peer."""
    lines = str(error.message).splitlines()
    for line in lines:
        if _tells_of_loss(line):
            return line
    return lines[0] if lines else ""


def _tells_of_loss(text: str) -> bool:
    return any(words in text for words in _LOST_WORDS)
