"""What of `tf.contrib.learn` programs of tf.estimator used beside it: modes and RunConfig."""

from __future__ import annotations

from typing import Any

from runner.classic import run_config
from runner.model_fn import ModeKeys as _ModeKeys


class ModeKeys:
    """`tf.estimator.ModeKeys`, whose PREDICT was INFER there."""

    TRAIN, EVAL, INFER = _ModeKeys.TRAIN, _ModeKeys.EVAL, _ModeKeys.PREDICT

    @classmethod
    def validate(cls, key: str) -> None:
        """Raises: ValueError: it is no mode."""
        if key not in (cls.TRAIN, cls.EVAL, cls.INFER):
            raise ValueError(f"Invalid mode {key}.")


class RunConfig(run_config.RunConfig):
    """`tf.estimator.RunConfig`; arguments are given by name.

    Args: master, num_cores, log_device_placement, gpu_memory_fraction, evaluation_master: of a session; taken and not
      used.
    """

    def __init__(
        self,
        master: str | None = None,
        num_cores: int = 0,
        log_device_placement: bool = False,
        gpu_memory_fraction: float = 1.0,
        evaluation_master: str = "",
        **kwargs: Any,
    ) -> None:
        del master, num_cores, log_device_placement, gpu_memory_fraction, evaluation_master
        super().__init__(**kwargs)
