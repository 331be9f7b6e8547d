"""The end of a loop: each worker's findings become what all do next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner.distribute.collectives import SINGLE_PROCESS, Collectives, collectives_of, is_loss_of_peer
from runner.estimator.loop_boundary import Boundary
from tests.support.messages import Messages


class Workers:
    """Agreements of threads: a sum waits for all of them."""

    def __init__(self, count: int) -> None:
        self.barrier, self.values = threading.Barrier(count, timeout=60), [np.zeros(0)] * count

    def run(self, functions: Sequence[Callable[[Any], Any]]) -> list[Any]:
        results: list[Any] = [None] * len(functions)

        def call(worker: int) -> None:
            results[worker] = functions[worker](Together(self, worker))

        threads = [threading.Thread(target=call, args=(worker,)) for worker in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return results


class Together(Collectives):
    def __init__(self, workers: Workers, worker: int) -> None:
        self._workers, self.worker_index = workers, worker
        self.num_workers, self.is_chief = len(workers.values), worker == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        self._workers.values[self.worker_index] = np.array(values, np.float64)
        self._workers.barrier.wait()
        total = np.sum(self._workers.values, 0).tolist()
        self._workers.barrier.wait()
        return list(total)


def agreed(*found: Boundary) -> list[Boundary]:
    return Workers(len(found)).run([boundary.agreed for boundary in found])


def test_alone_what_is_found_is_what_is_next() -> None:
    found = Boundary(7, True, "enough", False)
    assert found.agreed(SINGLE_PROCESS) == found


def test_the_chief_decides_on_the_length_and_on_saving() -> None:
    chief, worker = agreed(Boundary(7, True, None, False), Boundary(100, False, None, False))
    assert chief == worker == Boundary(7, True, None, False)


def test_a_worker_alone_does_not_save() -> None:
    assert agreed(Boundary(7, False, None, False), Boundary(1, True, None, False))[1].saves is False


def test_anybody_stops_all_and_the_others_say_who_it_was(messages: Messages) -> None:
    going_on, stopping = Boundary(7, False, None, False), Boundary(7, False, "SIGTERM", True)
    chief, second, third = agreed(going_on, going_on, stopping)
    assert chief.stop_reason == second.stop_reason and third.stop_reason == "SIGTERM"
    messages.same("stop_reason", str(chief.stop_reason))
    assert all(one.interrupted for one in (chief, second, third))
    messages.same("stop_reason", str(agreed(stopping, going_on)[1].stop_reason))


def test_strategies_of_one_process_have_nobody_to_agree_with() -> None:
    assert collectives_of(None) is SINGLE_PROCESS
    assert collectives_of(tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])) is SINGLE_PROCESS


@pytest.mark.parametrize(
    "error, is_loss",
    [
        (tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed"), True),
        (tf.errors.InternalError(None, None, "Collective ops is aborted by: failed to connect"), True),
        (tf.errors.CancelledError(None, None, "cancelled"), True),
        (tf.errors.InvalidArgumentError(None, None, "indices[2] = 51 is not in [0, 50)"), False),
        (ValueError("Socket closed"), False),
    ],
)
def test_errors_that_tell_of_a_lost_peer(error: Exception, is_loss: bool) -> None:
    assert is_loss_of_peer(error) is is_loss
