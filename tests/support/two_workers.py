"""Two workers in one process, which do the same one after the other and tell each other what they have found."""

from __future__ import annotations

from collections.abc import Sequence

from runner.distribute.collectives import Collectives


class Worker(Collectives):
    """One of two workers. Both may speak for all, as the second alone has heard both.

    Args:
      index: 0: the chief.
      of_chief: the texts of the chief, which are given to the other.
    """

    num_workers = 2

    def __init__(self, index: int, of_chief: Sequence[str] = ()) -> None:
        self.worker_index = index
        self._of_chief = iter(of_chief)
        self.said: list[str] = []

    def gather(self, value: float) -> list[float]:
        return [0.0, 1.0]  # so that they tell each other all of it

    def gather_texts(self, text: str) -> list[str]:
        self.said.append(text)
        return [next(self._of_chief, text), text]


def two_workers() -> tuple[Worker, Worker]:
    chief = Worker(0)
    return chief, Worker(1, chief.said)
