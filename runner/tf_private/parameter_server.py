"""Parameter servers: variables and lookups on them, and the coordinator's reports of lost workers."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

# UninitializedVariable: see runner.tf_private.variables.
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from runner.tf_private.replaced import all_replaced

# The type that tf.distribute returns for a variable that is partitioned over parameter servers. When it moves: make
# a variable under a ParameterServerStrategy with a partitioner and take its type.
ShardedVariable = tf.__internal__.distribute.ShardedVariable

# --- parameter servers ------------------------------------------------------------------------------------------------


def partitioner_of(strategy: tf.distribute.Strategy) -> Callable[..., Any] | None:
    """Return the partitioner of a ParameterServerStrategy; None: variables are not partitioned.

    Private: `extended._variable_partitioner`. When it moves: have build_strategy hand the partitioner on.
    """
    return strategy.extended._variable_partitioner


def tasks_of(strategy: tf.distribute.Strategy) -> Mapping[str, Sequence[str]]:
    """Return task type -> addresses of the cluster of a ParameterServerStrategy.

    Private: `_cluster_resolver`; the public `cluster_resolver` of this strategy is None in TensorFlow 2.21.
    """
    return strategy._cluster_resolver.cluster_spec().as_dict()


def traced_before_scheduled(strategy: tf.distribute.Strategy) -> None:
    """Allow tracing `strategy.run` outside of a scheduled function; the trace is scheduled later, inside another
    function.

    Private: `extended._allow_run_without_coordinator`, which TensorFlow's tests set. Without it each trace logs that it
    may run on the coordinator. When it moves: leave this out.
    """
    strategy.extended._allow_run_without_coordinator = True


def variable_on(
    device: str, strategy: tf.distribute.Strategy, name: str, shape: tf.TensorShape, dtype: tf.DType, trainable: bool
) -> tf.Variable:
    """Return a variable of `strategy` on `device` with this shape and dtype, without a value; assign it on that device.

    A tf.Variable made in `strategy.scope()` would be wrapped, partitioned and placed round-robin, whatever its size.

    Private: `UninitializedVariable(distribute_strategy=)`; Keras and v1 optimizers read the variable's strategy before
    they put their state beside it.
    """
    with tf.init_scope(), tf.compat.v1.name_scope(None), tf.device(device):
        return UninitializedVariable(
            name=name, shape=shape, dtype=dtype, trainable=trainable, distribute_strategy=strategy
        )


def anonymous_variable(shape: Any, dtype: Any) -> tf.Tensor:
    """Return the handle (resource scalar) of a new variable on the device of the graph; it is freed with the handle.

    Private: `context.anonymous_name`, with which an operation makes a new resource each time it runs. When it moves:
    use a new name for each request, and DestroyResourceOp at its end.
    """
    return tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=context.anonymous_name())


class _Noticed:
    """Replaces the method that puts a request back into the queue, and records its calls. All users of a strategy
    share one.
    """

    def __init__(self, put_back: Callable[[Any], None]) -> None:
        self.arguments: list[Any] = []
        self._put_back = put_back

    def __call__(self, closure: Any) -> None:
        self.arguments.append(closure._args)
        self._put_back(closure)


def repeated_requests(coordinator: tf.distribute.experimental.coordinator.ClusterCoordinator) -> list[Any]:
    """Return a list that grows by the arguments of each request that is repeated because its worker, or the connection
    to it, was lost. A strategy always has the same list.

    Private: `_cluster.closure_queue.put_back`, and `_args` of its argument. When they move: return an empty list.
    Repetition then shows only in the global step, which exceeds the number of requested steps.
    """
    queue = coordinator._cluster.closure_queue
    if not isinstance(queue.put_back, _Noticed):
        queue.put_back = _Noticed(queue.put_back)
    return queue.put_back.arguments


class LossInALine(logging.Filter):
    """A log filter that replaces TensorFlow's pages of errors about a lost worker by one line.

    Private: the texts of `cluster_coordinator`. When they change: TensorFlow's own lines appear again.

    Args:
      log: the logger for the line.
    """

    LOST = "Worker %s failed with %r:%s"
    INTERRUPTED = "Remote function on worker %s failed with %r:%s"
    WAITING = "Cluster update failed with error: %s. Retrying..."
    RAISED = " /job:worker/task:%d encountered the following error when processing"

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        values = record.args if isinstance(record.args, tuple) else ()
        worker = ""
        if values:
            worker = f"worker:{str(values[0]).rpartition(':')[2]}"
        if text == self.LOST:
            self._log.warning("%s was lost. Its request is repeated by this worker or another one.", worker)
        elif text.startswith(self.INTERRUPTED):
            self._log.warning("%s could not be reached for a moment. Its request is repeated.", worker)
        elif text.startswith(self.RAISED):
            # UnavailableError is raised as well, and reported then
            return not isinstance(values[1], tf.errors.UnavailableError)
        else:
            return text != self.WAITING
        return False


def say_losses_in_a_line(log: logging.Logger) -> None:
    """Filter TensorFlow's log in this process by `LossInALine`."""
    logger = logging.getLogger("tensorflow")
    earlier = [own for own in logger.filters if isinstance(own, LossInALine)]
    for own in earlier:
        logger.removeFilter(own)
    logger.addFilter(LossInALine(log))


def remote_variables() -> contextlib.AbstractContextManager[None]:
    """Make Keras 3 correct with variables on parameter servers, while a step is traced inside this context.

    `keras.Variable.assign_add` and `assign_sub` become one operation each. Keras 3.15 reads, adds and assigns, so of
    2000 updates of `optimizer.iterations` by two workers only 1217 counted.

    Does nothing without Keras 3.
    """
    if "keras" not in sys.modules:
        return contextlib.nullcontext()
    from keras import Variable

    def in_one_operation(method: str) -> Callable[[Any, Any], Any]:
        def update(self: Any, value: Any) -> Any:
            getattr(self.value, method)(tf.cast(value, self.value.dtype), read_value=False)
            return self

        return update

    return all_replaced(*((Variable, name, in_one_operation(name)) for name in ("assign_add", "assign_sub")))


def lookup_by_rows(params: Any, ids: Any) -> tf.Tensor:
    """Return rows `ids` (integers `[...]`) of a variable, which may be partitioned: `[..., row shape]`."""
    parts = params.variables if isinstance(params, ShardedVariable) else [params]
    return tf.compat.v1.nn.embedding_lookup(parts, ids, "div")


@tf.experimental.dispatch_for_api(
    tf.compat.v1.nn.embedding_lookup,
    {"params": ShardedVariable},
    {"params": list[ShardedVariable]},  # type: ignore[valid-type]
)
def _lookup_in_sharded(
    params: Any,
    ids: Any,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: float | None = None,
) -> tf.Tensor:
    """Look up consecutive rows in a partitioned variable, the order in which it is divided and saved.

    The default of `tf.compat.v1.nn.embedding_lookup` and its relatives is partition_strategy="mod". TensorFlow passes
    it on, so ids would select wrong rows.
    """
    sharded = params if isinstance(params, ShardedVariable) else params[0]
    return tf.compat.v1.nn.embedding_lookup(sharded.variables, ids, "div", name, validate_indices, max_norm)
