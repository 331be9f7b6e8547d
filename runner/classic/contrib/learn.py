"""The names of `tf.contrib.learn` that tf.estimator programs used: ModeKeys, RunConfig, select_last_activations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.classic import run_config
from runner.model_fn import ModeKeys as _ModeKeys


class ModeKeys:
    """`tf.estimator.ModeKeys` with its former name INFER for PREDICT."""

    TRAIN = _ModeKeys.TRAIN
    EVAL = _ModeKeys.EVAL
    INFER = _ModeKeys.PREDICT

    @classmethod
    def validate(cls, key: str) -> None:
        """Check that `key` is a mode.

        Raises:
          ValueError: it is not.
        """
        if key not in (cls.TRAIN, cls.EVAL, cls.INFER):
            raise ValueError(f"Invalid mode {key}.")


class RunConfig(run_config.RunConfig):
    """`tf.estimator.RunConfig` with keyword arguments.

    Args:
      **kwargs: as in `tf.estimator.RunConfig`.
      Others: ignored; they configured a session.
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
    """Return the activations of each sequence's last step, `[batch, units]`.

    As in TensorFlow 1.15, contrib/learn/python/learn/estimators/rnn_common.py.

    Args:
      activations: `[batch, time, units]`.
      sequence_lengths: integers `[batch]`; None: all sequences have the full length.
    """
    if sequence_lengths is None:
        return activations[:, -1]
    batch, time, units = tf.unstack(tf.shape(activations))
    ends = tf.range(batch) * time + tf.cast(sequence_lengths, tf.int32) - 1
    return tf.gather(tf.reshape(activations, [-1, units]), ends)
