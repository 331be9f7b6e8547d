"""Whether a checkpoint holds the state of the training input's iterator, or only the number of batches read."""

from __future__ import annotations

import itertools
import logging
import os

from runner.data.inputs import InputPipeline
from runner.run_config import DrawnSeed
from runner.system.console import format_bytes
from runner.system.standard_streams import LATER_JOB
from runner.tf_private import datasets

_log = logging.getLogger(__name__)


def state_is_exact(pipeline: InputPipeline) -> bool:
    """Report whether an iterator over `pipeline.dataset` can be saved and yields the same examples once restored.

    After `shuffle().batch().repeat()` with a smaller last batch, it does not: between that batch and the next epoch,
    the state of the shuffle is in no iterator, and after a restore TensorFlow 2.21 repeats the order of the first
    epoch. `shuffle().repeat().batch()` and `drop_remainder=True` are exact. A stage is told by its text, which has no
    fixed format; if TensorFlow changes it, this function returns True.
    """
    if pipeline.why_no_state is not None:
        return False

    def is_no_repeat(stage: str) -> bool:
        return not stage.startswith("<_RepeatDataset")

    def is_no_uneven_batch(stage: str) -> bool:
        return "BatchDataset" not in stage or "shape=(None" not in stage

    # From the end of the pipeline to its source.
    stages = map(repr, datasets.stages(pipeline.given))
    from_repeat_on = itertools.dropwhile(is_no_repeat, stages)
    from_batch_on = itertools.dropwhile(is_no_uneven_batch, from_repeat_on)
    return not any(stage.startswith("<_ShuffleDataset") for stage in from_batch_on)


_SMALL_BYTES = 1 << 20
"""A state of up to this size is always saved: writing it takes a few milliseconds, less than reading the input again.
The buffers that tf.data adds on its own can take 100 kB."""


class InputState:
    """Decides whether a checkpoint holds the state of the training input's iterator or only the number of batches read.

    Args:
      choice: `checkpoint.input_state`: saved, counted or auto. auto: saved, but counted once a state is larger than the
        variables, if reading the input again yields the same examples.
      pipeline: the training input.

    Attributes:
      is_saved: the next checkpoint shall hold the state.
    """

    def __init__(self, choice: str, pipeline: InputPipeline) -> None:
        self._choice = choice
        self._pipeline = pipeline
        is_exact = state_is_exact(pipeline)
        self.is_saved = choice != "counted" and is_exact
        self._is_decided = choice == "counted"
        if choice == "saved" and not is_exact and pipeline.is_chief:
            _log.warning(
                "checkpoint.input_state=saved has no effect: %s. Checkpoints hold a count of the batches read.",
                pipeline.why_no_state or "after shuffle().batch().repeat() with a smaller last batch, a restored "
                "iterator yields other examples; use drop_remainder=True, or repeat() before batch()",
            )  # fmt: skip
        if pipeline.prefetch is not None:
            self._warn_if_not_repeatable("input.train.prefetch_to_device")
        elif datasets.has_file_cache(pipeline.given):
            self._warn_if_not_repeatable("Dataset.cache with a file")
        elif choice == "counted":
            self._warn_if_not_repeatable("checkpoint.input_state=counted")

    def is_kept(self, num_bytes: int, variable_bytes: int) -> bool:
        """Report whether to keep an input state that has been written for a checkpoint. Log the decision once.

        The first state that is larger than the variables decides `is_saved` for all later checkpoints.

        Called in the thread that writes. Once a state is larger than the variables, the answer is the same for all
        later states, because a shuffle buffer stays full once it is filled.

        Args:
          num_bytes: size of this process's state. Other processes that read their own data have about the same.
          variable_bytes: size of the variables in bytes.
        """
        total = num_bytes * self._pipeline.num_pipelines
        if self._is_decided or total <= max(variable_bytes, _SMALL_BYTES):
            return self.is_saved
        self._is_decided = True
        shuffles = [f"shuffle({buffer})" for buffer in datasets.shuffle_buffers(self._pipeline.given)]
        size = f"{format_bytes(total)} ({', '.join(shuffles) or 'no shuffle'})"
        reason = self._why_not_repeatable()
        says_it = self._pipeline.is_chief and LATER_JOB not in os.environ
        level = logging.INFO if says_it else logging.DEBUG
        if self._choice == "auto" and reason is None:
            self.is_saved = False
            _log.log(
                level,
                "The state of the training input takes %s, the variables take %s: checkpoints hold a count of the "
                "batches read instead of the state, and a resumed run reads these batches again "
                "(checkpoint.input_state=saved keeps the state).", size, format_bytes(variable_bytes),
            )  # fmt: skip
        else:
            why = ""
            if reason is not None:
                why = f". Reading the input again may yield other examples: {reason}"
            _log.log(
                level,
                "Each checkpoint holds the state of the training input (%s) and the variables (%s)%s.",
                size, format_bytes(variable_bytes), why,
            )  # fmt: skip
        return self.is_saved

    def _warn_if_not_repeatable(self, key: str) -> None:
        """Warn that the setting `key`, by which only a count is saved, may cost a resumed run the same examples."""
        reason = self._why_not_repeatable()
        if reason is not None and self._pipeline.is_chief:
            _log.warning("%s: a resumed run reads the input again, and may read other examples: %s.", key, reason)

    def _why_not_repeatable(self) -> str | None:
        """Return why reading the input again may yield other examples; None: it yields the same."""
        if isinstance(self._pipeline.seed, DrawnSeed) and datasets.shuffle_buffers(self._pipeline.given):
            return "each process draws a new shuffle seed; set RunConfig(tf_random_seed=...)"
        return datasets.why_not_repeatable(self._pipeline.given)
