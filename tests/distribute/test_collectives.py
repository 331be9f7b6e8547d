"""Sums over workers, of any number of values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.distribute.collectives import WorkerCollectives


class OneWorker(tf.distribute.OneDeviceStrategy):
    """A strategy of one worker, which counts the functions that are traced with it."""

    def __init__(self) -> None:
        super().__init__("/cpu:0")
        self.traces = 0

    @property
    def cluster_resolver(self) -> Any:
        cluster = tf.train.ClusterSpec({"worker": ["localhost:1"]})
        return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=0)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return super().run(*args, **kwargs)


def test_sums_of_ever_other_lengths_are_a_few_functions() -> None:
    """The losses of a loop are summed, and the number of its steps is another each time."""
    strategy = OneWorker()
    together = WorkerCollectives(strategy)
    for length in (0, 1, 15, 16, 17, *range(600, 1000, 37), 1000, 1024):
        values = [float(number) for number in range(length)]
        assert together.sum(values) == values
    assert strategy.traces == 3  # of 16, 32 and 1024 values


def test_a_strategy_of_workers_without_a_cluster_is_one_worker() -> None:
    class Alone(OneWorker):
        @property
        def cluster_resolver(self) -> Any:  # TensorFlow's own, where there is no TF_CONFIG
            return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))

    together = WorkerCollectives(Alone())
    assert (together.num_workers, together.worker_index, together.is_chief) == (1, 0, True)
