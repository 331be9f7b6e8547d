"""`run.debug=replicas`: at each save, are the variables the same on all replicas of all workers?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from runner.distribute.collectives import Collectives
from runner.tracing.variable_store import VariableStore


class ReplicasDifferError(RuntimeError):
    """Raised before a save if a variable does not have one value.

    Attributes:
      is_clear: True: the text says enough, so no traceback is shown.
    """

    is_clear = True


def check_equal(store: VariableStore, collectives: Collectives, step: int) -> None:
    """Compare the variables that belong in a checkpoint, bit by bit. All workers must call this together.

    Raises:
      ReplicasDifferError: one differs; the first is named.
    """
    if store.num_replicas == 1 or store.has_one_copy:
        return
    names = [name for name, spec in store.saved_specs.items() if not spec.is_of_replica]
    # Of each variable, the digests of this worker's copies.
    own_digests = [_compute_digests(store.copies(name)) for name in names]
    of_chief = collectives.broadcast([digests[0] for digests in own_digests])
    differs_here = []
    for digests, first_of_chief in zip(own_digests, of_chief, strict=True):
        is_different = set(digests) != {first_of_chief}
        differs_here.append(float(is_different))
    # Each worker counts once for a variable, so the sum is a number of workers.
    for name, number in zip(names, collectives.sum(differs_here), strict=True):
        if number:
            raise ReplicasDifferError(
                f"run.debug=replicas: at step {step} the variable {name!r} is not the same on all replicas, and no "
                f"checkpoint was written. It differs on {number:g} of {collectives.num_workers} workers from the first "
                "replica of the chief. A write that model_fn makes on some replicas only, or an operation that is not "
                "deterministic, can be the reason."
            )


def _compute_digests(copies: Sequence[Any]) -> list[float]:
    """Return a number for the value of each copy, which float64 holds exactly."""
    numbers = []
    for copy in copies:
        digest = hashlib.blake2b(copy.numpy().tobytes(), digest_size=6).digest()
        numbers.append(float(int.from_bytes(digest, "little")))
    return numbers
