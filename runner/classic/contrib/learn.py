"""What of `tf.contrib.learn` programs of tf.estimator used beside it: modes, RunConfig, the ends of sequences."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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


def select_last_activations(activations: Any, sequence_lengths: Any) -> tf.Tensor:
    """Return what a network gave at the end of each sequence, `[batch, units]`, of `[batch, time, units]`.

    TensorFlow 1.15, contrib/learn/python/learn/estimators/rnn_common.py. Args: sequence_lengths: None: all are full.
    """
    if sequence_lengths is None:
        return activations[:, -1]
    batch, time, units = tf.unstack(tf.shape(activations))
    ends = tf.range(batch) * time + tf.cast(sequence_lengths, tf.int32) - 1
    return tf.gather(tf.reshape(activations, [-1, units]), ends)
