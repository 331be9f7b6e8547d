"""The GPUs of this machine, divided over the jobs of a sweep that run at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runner.config.schema import ConfigError, SweepConfig
from runner.launch.environment.gpus import VISIBLE
from runner.system import console
from runner.system.standard_streams import say


class DevicePool:
    """The GPUs of this machine, of which each job of a sweep gets some of its own.

    Args:
      names: the GPUs, as CUDA_VISIBLE_DEVICES names them.
      per_job: number of GPUs of a job; 0: jobs see what this process sees.
    """

    def __init__(self, names: Sequence[str] = (), per_job: int = 0) -> None:
        self._names = list(names)
        self._free = list(names)
        self._per_job = per_job
        self._free_changed = threading.Condition()

    @classmethod
    def of_sweep(cls, settings: SweepConfig, names: Sequence[str]) -> DevicePool:
        """Return the pool that `sweep.devices_per_job` asks for.

        Raises:
          ConfigError: a job is to have more GPUs than there are.
        """
        number = len(names)
        counted = console.counted(number, "GPU")
        per_job = settings.devices_per_job
        if per_job == "auto":
            per_job = 0
            # One job at a time has all of them anyway.
            if settings.parallel > 1 and number:
                per_job = number // settings.parallel
                if not per_job:
                    say(
                        f"sweep.parallel={settings.parallel} jobs share {counted}: each sees all of them. Set "
                        f"sweep.parallel={number} to give each job a GPU of its own."
                    )
        if per_job > number:
            raise ConfigError(
                f"sweep.devices_per_job={per_job}, but there are {counted} "
                f"({VISIBLE}, or those of this machine). Set sweep.devices_per_job={number} at most."
            )
        return cls(names, per_job)

    @property
    def is_divided(self) -> bool:
        """Report whether jobs get GPUs of their own."""
        return self._per_job > 0

    @contextmanager
    def lent(self) -> Iterator[dict[str, str]]:
        """Yield the variables with which a job sees its GPUs; wait until enough are free. They are free again after."""
        if not self.is_divided:
            yield {}
            return
        with self._free_changed:
            self._free_changed.wait_for(lambda: len(self._free) >= self._per_job)
            taken = self._free[: self._per_job]
            del self._free[: self._per_job]
        try:
            yield {VISIBLE: ",".join(taken)}
        finally:
            with self._free_changed:
                # In their order, so that a job after another one has the same GPUs.
                free = {*self._free, *taken}
                self._free = [name for name in self._names if name in free]
                self._free_changed.notify_all()
