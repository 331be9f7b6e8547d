"""The numbers of training that are means over several steps, from one multiple of `train.log_steps` to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runner.distribute.collectives import Collectives

WINDOW = "window"
"""The key, among the facts that a checkpoint stores beside the variables, of the sums since the last multiple."""


class TrainWindow:
    """Adds the numbers of steps, and cuts the sums where a point is due: at each multiple of `every`.

    A checkpoint between two multiples holds the sums so far, so the points of a resumed run are those of an undisturbed
    one.

    Args:
      names: the numbers of a step, the same on all workers.
      every: number of global steps from one point to the next; None: there are no points.

    Attributes:
      names: the numbers of a step.
    """

    def __init__(self, names: Sequence[str], every: int | None) -> None:
        self.names = names
        self._every = every
        self._sums = self._nothing()  # all sums, then all weights

    def _nothing(self) -> np.ndarray:
        return np.zeros(2 * len(self.names))

    def cut(self, steps: np.ndarray, rows: np.ndarray, *, has_first_point: bool) -> tuple[list[int], np.ndarray]:
        """Add steps, and return the sums at each step at which a point is due.

        Args:
          steps: the global step after each of the steps, ascending.
          rows: float64 `[steps, 2 * names]`: the numbers of each step, and then their weights.
          has_first_point: a point is due at the first of these steps, too. It ends no sum.

        Returns:
          (the places in `steps` of those with a point, float64 `[points, 2 * names]`).
        """
        if self._every is None:
            return [], np.zeros([0, rows.shape[1]])
        # A step that changed nothing (its loss scale was too large) has the number of the step before it.
        is_last_of_number = np.append(steps[1:] != steps[:-1], True)
        ends = np.flatnonzero((steps % self._every == 0) & is_last_of_number)
        with_rest = np.concatenate([self._sums[None], rows])  # what was added before is one row more
        sums = _sums_up_to(with_rest, ends + 2)
        first_left = ends[-1] + 2 if len(ends) else 0
        left = with_rest[first_left:]
        self._sums = _sums_up_to(left, np.array([len(left)]))[0] if len(left) else self._nothing()
        places = ends.tolist()
        if has_first_point and 0 not in places:
            return [0, *places], np.concatenate([rows[:1], sums])
        return places, sums

    def state(self, collectives: Collectives) -> dict[str, Any]:
        """Return the sums since the last multiple, over all workers, as values that JSON can hold: `restore` reads
        them. All workers must call this together.
        """
        if self._every is None:
            return {}
        if collectives.num_workers > 1:
            totals = np.array(collectives.sum(self._sums.tolist()))
            # As after a resume, so that the sums of a resumed run are the same to the last bit.
            self._sums = totals if collectives.is_chief else self._nothing()
        sums, weights = np.split(self._sums, 2)
        numbers = {name: [sums[n], weights[n]] for n, name in enumerate(self.names) if weights[n]}
        return {"every": self._every, "numbers": numbers}

    def restore(self, state: Mapping[str, Any], *, is_chief: bool) -> None:
        """Go on with the sums of a checkpoint; the chief has those of all workers.

        Args:
          state: as `state` returned it; empty: the checkpoint has none. Sums that were cut at other steps are left out.
          is_chief: this worker is the chief.
        """
        self._sums = self._nothing()
        is_cut_alike = bool(state) and state["every"] == self._every
        if not is_chief or not is_cut_alike:
            return
        number_of = {name: number for number, name in enumerate(self.names)}
        for name, (total, weight) in state["numbers"].items():
            if name in number_of:
                self._sums[[number_of[name], len(self.names) + number_of[name]]] = total, weight


def _sums_up_to(rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sums of rows[:ends[0]], rows[ends[0]:ends[1]] and so on: float64 `[ends, columns]`.

    Each sum is added up row by row, so that it does not depend, to the last bit, on the length of loops.
    """
    lengths = np.diff(ends, prepend=0)
    longest = max(lengths, default=0)
    is_row = np.arange(longest) < lengths[:, None]
    padded = np.zeros([len(ends), longest, rows.shape[1]])
    padded[is_row] = rows[: ends[-1]] if len(ends) else rows[:0]
    return np.cumsum(padded, axis=1)[:, -1] if longest else padded.sum(axis=1)
