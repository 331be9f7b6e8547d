"""The training input while it is read, and what a checkpoint holds of it: a resumed run reads the very next example."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

from runner.data.input_identity import source_of
from runner.data.inputs import InputPipeline, check_examples
from runner.tf_private import datasets

_log = logging.getLogger(__name__)


class SavedIterators(Protocol):
    """The iterators whose states a checkpoint holds: a `runner.checkpoint.reader.Reader`.

    Attributes:
      path: path of the checkpoint.
    """

    path: str

    def has_iterator(self, worker: int) -> bool:
        """Report whether the checkpoint holds the state of the iterator of `worker`."""
        ...

    def restore_iterator(self, worker: int, iterator: tf.data.Iterator) -> None:
        """Restore that state into `iterator`. Raises: ValueError: its dataset is not built like the saved one."""
        ...


@dataclasses.dataclass
class InputPosition:
    """The position of one process in its training input.

    Attributes:
      source: identifies the input; see `source_of`.
      ended: the input was read to its end; a resumed run starts from its beginning.
      elements: number of elements read since the beginning of the dataset.
      num_epochs: number of passes for which the input was opened; None: not limited by passes.
      num_pipelines: number of processes that read different data; 1 if there is one process or all read the same.
      skipped: how many of `elements` the iterator's dataset left out with `skip`. The state of such an iterator can
        only be restored into an iterator whose dataset also has a `skip` stage.
      shard: `InputPipeline.shard`, how the processes divide the data.
      seed: the seed of the chief's input; None: not known.
      size: number of elements of all passes; negative: not known, or infinite.
      passes: number of passes over other forms of the input, as far as known.
    """

    source: str
    ended: bool = False
    elements: int = 0
    num_epochs: int | None = None
    num_pipelines: int = 1
    skipped: int = 0
    shard: str = ""
    seed: int | None = None
    size: int = -1
    passes: float = 0.0

    @classmethod
    def at_start(cls, source: str, pipeline: InputPipeline) -> InputPosition:
        """Return the position before the first element of `pipeline`."""
        copied = {name: getattr(pipeline, name) for name in ("num_epochs", "num_pipelines", "shard", "seed")}
        return cls(source, size=int(pipeline.given.cardinality()), **copied)


@dataclasses.dataclass(eq=False)
class TrainInput:
    """The training input while it is read.

    Attributes:
      pipeline: the dataset, and its division over the replicas.
      iterator: iterator over `pipeline.dataset`.
      position: the position of the iterator, as stored in checkpoints.
      was_at_its_end: the checkpoint was written at the end of this input, and no passes were added to it since: the
        iterator is at the beginning.
      remaining_steps: steps to the end of the data; infinite if it has no end, or the end is not known.
    """

    pipeline: InputPipeline
    iterator: Any
    position: InputPosition
    was_at_its_end: bool = False

    def __post_init__(self) -> None:
        # The position counts elements, not steps, because a step of a run with another number of replicas reads another
        # number of elements.
        steps = self.pipeline.remaining_steps(self.position.elements)
        self._is_end_known = steps is not None
        self.remaining_steps = math.inf if steps is None else steps
        self._is_resumed = self.position.elements > 0

    @classmethod
    def open(
        cls,
        pipeline: InputPipeline,
        checkpoint: SavedIterators | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> TrainInput:
        """Open the input at the example that follows the last one before a checkpoint.

        It begins at the beginning of the data if the checkpoint belongs to another input, or if the input was read to
        its end. It does so, too, if the processes now divide the data in another way, because positions in one division
        mean nothing in another.

        Args:
          pipeline: the data.
          checkpoint: the checkpoint; None: the input is read from its beginning.
          saved: the fields of the InputPosition in the checkpoint; None: it has none.
        """
        position = InputPosition.at_start(source_of(pipeline), pipeline)
        if checkpoint is None or saved is None:
            return cls(pipeline, pipeline.open(), position)
        checkpoint_path = checkpoint.path
        saved_position = InputPosition(**saved)
        position.passes = saved_position.passes
        is_at_end = saved_position.ended and not _has_more(saved_position, pipeline)
        if saved_position.source != position.source:
            if not saved_position.ended:  # after the end of an input, another one is expected
                _log.info(
                    "The training input differs from that of %s, so it starts from its beginning.", checkpoint_path
                )
        elif is_at_end:
            return cls(pipeline, pipeline.open(), position, was_at_its_end=True)
        elif _is_divided_alike(saved_position, pipeline):
            position.elements = saved_position.elements
            return cls(pipeline, _open_after(pipeline, position, saved_position, checkpoint), position)
        else:
            _log.warning(
                "%s was trained on %s, and this run reads %s: the input starts from its beginning and repeats some "
                "examples of this epoch. Set shard=examples before training to resume at the next example with any "
                "number of workers.",
                checkpoint_path, _describe_parts(saved_position.num_pipelines), _describe_parts(pipeline.num_pipelines),
            )  # fmt: skip
        _add_earlier_passes(position, saved_position, checkpoint_path, says=pipeline.is_chief)
        return cls(pipeline, pipeline.open(), position)

    @property
    def ended(self) -> bool:
        """Whether the data has been read to its end."""
        return self.position.ended

    @property
    def is_empty(self) -> bool:
        """Whether the data of this process has ended without an element."""
        service = self.pipeline.service
        if service is not None and service.job_name is not None:
            return False  # another run may have read all of it
        return self.position.elements == 0 and (self.ended or self.remaining_steps <= 0)

    @property
    def num_steps_read(self) -> int:
        return self.position.elements // self.pipeline.division.elements_per_step

    def may_end_within(self, num_steps: int) -> bool:
        return not self._is_end_known or self.remaining_steps < num_steps

    def advance(self, num_steps: int, examples: int, data_ended: bool, repeated_steps: int = 0) -> bool:
        """Note how much a loop has read, and return whether the data has ended.

        Args:
          num_steps, data_ended, repeated_steps: as in `runner.programs.train_loop.LoopResult`.
          examples: the number of examples of these steps, over all replicas of all workers.

        Raises:
          ValueError: as in `check_examples`.
        """
        position = self.position
        num_batches = num_steps + repeated_steps
        check_examples(self.pipeline, num_batches, examples, are_first=position.elements == 0)
        elements_read = position.elements + num_steps * self.pipeline.division.elements_per_step
        is_size_known = position.size >= 0
        if is_size_known:
            # The last step of the data may read fewer elements than a step takes. Count only elements that exist, so
            # that training with a larger max_epochs continues at the right element.
            elements_read = min(elements_read, position.size)
        position.elements = elements_read
        self.remaining_steps -= num_steps
        resumed_at_end = data_ended and not num_steps and self._is_resumed
        self._is_resumed = False  # only the first loop of a run tells whether the run resumed at the end
        if resumed_at_end and position.num_epochs is None:
            # The checkpoint was saved at the end of data of unknown size: read the data again, as a new call does.
            self.iterator = self.pipeline.open()
            self.position = InputPosition.at_start(position.source, self.pipeline)
        elif data_ended or self.remaining_steps <= 0:
            position.ended = True
        return self.ended

    def as_extra(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the position beside the variables; `open` reads it."""
        return dataclasses.asdict(self.position)


def _open_after(
    pipeline: InputPipeline, position: InputPosition, saved: InputPosition, checkpoint: SavedIterators
) -> Any:
    """Return an iterator at `position`, and note there how many elements its dataset skips.

    If the checkpoint holds only a count, that many elements are read again and dropped.

    Args:
      saved: the position in the checkpoint.
    """
    if pipeline.service is not None and pipeline.service.job_name is not None:
        # Other runs may share the job of the tf.data service, so this run reads the elements that are left.
        return pipeline.open()
    same_passes = saved.num_epochs == pipeline.num_epochs
    if pipeline.why_no_state is None and same_passes and checkpoint.has_iterator(pipeline.pipeline_index):
        position.skipped = saved.skipped
        return _restore_iterator(pipeline, checkpoint, saved.skipped)
    # Do not open a second iterator to skip: two iterators of a dataset would share the state of its shuffle.
    log = _log.warning if pipeline.is_chief else _log.debug
    log("Reading %d batches again, to continue where %s stopped.", position.elements, checkpoint.path)
    if saved.seed not in (None, pipeline.seed) and datasets.shuffle_buffers(pipeline.given):
        log(
            "The batches were shuffled with run.seed=%d, and now with %d: some examples of this epoch may be seen "
            "twice, others not at all.",
            saved.seed, pipeline.seed,
        )  # fmt: skip
    position.skipped = position.elements
    return pipeline.open(position.elements)


def _restore_iterator(pipeline: InputPipeline, checkpoint: SavedIterators, skipped: int) -> Any:
    """Return an iterator restored from `checkpoint`, whose dataset skips `skipped` elements.

    Raises:
      ValueError: the dataset is not built like the saved one.
    """
    errors = []
    # A second iterator over the dataset is harmless here: the restored state includes the shuffles that they share.
    for variant in _vary_prefetch(pipeline):
        iterator = variant.open(skipped)
        try:
            checkpoint.restore_iterator(pipeline.pipeline_index, iterator)
            return iterator
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _vary_prefetch(pipeline: InputPipeline) -> Iterator[InputPipeline]:
    """Yield `pipeline`, then a copy with a prefetch stage at its end, then a copy to which TensorFlow adds none.

    TensorFlow 2.21 adds a prefetch stage to a dataset that it may tune (`inject_prefetch`), and the saved state then
    includes it. With one of the three, a state can be restored even if `autotune.enabled` has changed since.
    """
    yield pipeline
    yield dataclasses.replace(pipeline, dataset=pipeline.dataset.prefetch(1))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    yield dataclasses.replace(pipeline, dataset=pipeline.dataset.with_options(options))


def _is_divided_alike(saved: InputPosition, pipeline: InputPipeline) -> bool:
    """Report whether the processes divide the data as they did when the input was at `saved`."""
    if saved.num_pipelines != pipeline.num_pipelines:
        return False
    return pipeline.num_pipelines == 1 or saved.shard == pipeline.shard


def _has_more(saved: InputPosition, pipeline: InputPipeline) -> bool:
    """Report whether the number of passes was raised since the input was read to its end."""
    was_limited = saved.num_epochs is not None
    if was_limited and pipeline.num_epochs is None and pipeline.remaining_steps() == math.inf:
        return True  # the input ended because of num_epochs, which is no longer set
    return (pipeline.num_epochs or 1) > (saved.num_epochs or 1)


def _add_earlier_passes(position: InputPosition, saved: InputPosition, latest: str, *, says: bool) -> None:
    """Add the passes up to `saved`, the position in the checkpoint, to `position`; warn if they overrun a limit."""
    if saved.size > 0:
        position.passes += saved.elements / saved.size * (saved.num_epochs or 1)
    if position.num_epochs and saved.elements and says:
        overrun = f"{saved.elements} batches"
        if position.passes:
            overrun = f"{position.passes:.3g} passes"
        _log.warning(
            "train.max_epochs=%d is overrun by the %s before %s, because the input starts from its beginning.",
            position.num_epochs, overrun, latest,
        )  # fmt: skip


def _describe_parts(number: int) -> str:
    if number > 1:
        return f"{number} parts of the input, one per worker"
    return "the undivided input"
