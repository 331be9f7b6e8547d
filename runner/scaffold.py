"""What of a `tf.compat.v1.train.Scaffold` has an effect: how a model begins."""

from __future__ import annotations

import logging
from typing import Any

from runner.trace_session import TraceSession

_log = logging.getLogger(__name__)

_WITHOUT_EFFECT = ("ready_op", "ready_for_local_init_op", "saver")


def initialise(scaffold: Any, session: TraceSession, *, is_new: bool) -> None:
    """Runs `init_op` and `init_fn` on a new model and `local_init_op` on any; says what of the scaffold has no effect.

    The variables have their initial values, or those of a checkpoint, before that.

    Raises:
      ValueError: an operation depends on a batch.
    """
    if scaffold is None:
        return
    without_effect = [name for name in _WITHOUT_EFFECT if getattr(scaffold, name) is not None]
    if without_effect:
        _log.warning(
            "EstimatorSpec.scaffold: its %s has no effect: the runner makes variables, restores and saves by itself.",
            ", ".join(without_effect),
        )
    with session.entered():
        if is_new and scaffold.init_op is not None:
            session.run(scaffold.init_op, feed_dict=scaffold.init_feed_dict)
        if is_new and scaffold.init_fn is not None:
            scaffold.init_fn(session)
        if scaffold.local_init_op is not None:
            session.run(scaffold.local_init_op, feed_dict=scaffold.local_init_feed_dict)
