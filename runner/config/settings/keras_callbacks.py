"""Classes of Keras's callbacks that do here what a key does: `train.hooks` and Estimators refuse them by name."""

from __future__ import annotations

from collections.abc import Mapping

from runner.config.mistakes import NotAllowed

INSTEAD: Mapping[str, str] = {
    "EarlyStopping": "set train.early_stopping.metric (TrainSpec(early_stopping=...))",
    "ReduceLROnPlateau": "set train.reduce_lr_on_plateau.metric (TrainSpec(reduce_lr_on_plateau=...))",
    "LearningRateScheduler": (
        "give the optimizer a schedule: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.001, 10000))"
    ),
    "ModelCheckpoint": "checkpoints are always written: set checkpoint.save_steps, checkpoint.keep_best.metric",
    "OrbaxCheckpoint": "checkpoints are always written: set checkpoint.save_steps, checkpoint.keep_best.metric",
    "BackupAndRestore": "a run always resumes from its last checkpoint: set checkpoint.save_steps",
    "TensorBoard": "events are always written (tracking.tensorboard=true), every train.summary_steps",
    "SwapEMAWeights": "evaluations use the averages of use_ema=True of the optimizer, or of train.ema_decay",
    "TerminateOnNaN": "set train.nan=stop, which is the default, or train.nan=rollback",
    "ProgbarLogger": "set run.progress",
    "CallbackList": "name each of its callbacks",
}
"""Name of the class, in keras and in tf_keras -> what to write instead."""

ROOTS = ("keras", "tf_keras")
"""The packages whose classes they are. `tensorflow.keras` is one of the two under another name."""


def check_class(what: str, name: str) -> None:
    """Check that a class of Keras is no callback that a key replaces.

    Args:
      what: where it is named, for the message.
      name: dotted name of the class.

    Raises:
      NotAllowed: it is.
    """
    root = name.partition(".")[0]
    of_keras = root in ROOTS or name.startswith(("tensorflow.keras.", "tf.keras."))
    kind = name.rpartition(".")[2]
    if of_keras and kind in INSTEAD:
        raise NotAllowed(f"{what}: the runner does not call the callback {kind} of Keras. Instead, {INSTEAD[kind]}.")
