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
from runner.distribute.collectives import SINGLE_PROCESS, Collectives
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
    """The position of one process in its training input. A checkpoint holds that of the chief.

    Attributes:
      source: identifies the input; see `source_of`.
      ended: the input was read to its end; a resumed run starts from its beginning.
      elements: number of elements read since the beginning of the dataset. If the workers' data ends at different
        steps, it goes on growing after the end of this process's own data, as that of the others.
      ahead: for each worker, how many elements it has read more than the chief, a number below 0 if it has read fewer.
        They differ once max_epochs was raised after some data had ended. Empty: all have read as many.
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
    ahead: list[int] = dataclasses.field(default_factory=list)

    def ahead_of_chief(self, worker: int) -> int:
        """Return how many elements `worker` has read more than the chief."""
        return self.ahead[worker] if self.ahead else 0

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
        # The same on all workers, also on one that has no data, since they act on it together.
        self._is_resumed = self.position.elements > 0 or any(self.position.ahead)

    @classmethod
    def open(
        cls,
        pipeline: InputPipeline,
        checkpoint: SavedIterators | None = None,
        saved: Mapping[str, Any] | None = None,
        collectives: Collectives = SINGLE_PROCESS,
    ) -> TrainInput:
        """Open the input at the example that follows the last one before a checkpoint. All workers call this together.

        It begins at the beginning of the data if the checkpoint belongs to another input, or if the input was read to
        its end. It does so, too, if the processes now divide the data in another way, because positions in one division
        mean nothing in another.

        Args:
          pipeline: the data.
          checkpoint: the checkpoint; None: the input is read from its beginning.
          saved: the fields of the InputPosition in the checkpoint; None: it has none.
          collectives: communication between the workers that train together.
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
            _locate(pipeline, position, saved_position, collectives)
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
        # Where data ends at different steps, the checkpoint's number holds for workers with more data than the chief's.
        is_end_common = position.size >= 0 and not self.pipeline.division.ends_together
        if is_end_common:
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


def _locate(pipeline: InputPipeline, position: InputPosition, saved: InputPosition, collectives: Collectives) -> None:
    """Set in `position` how many elements this process has read, and how far other workers are ahead of the chief.

    As long as the number of passes stays the same, each worker has read as many elements since the last start, if those
    after the end of its data are counted. With more passes, the data of a worker that had ended goes on, so only
    elements that existed count.

    Args:
      saved: the position in the checkpoint.
    """
    position.ahead = saved.ahead
    position.elements = saved.elements + saved.ahead_of_chief(pipeline.pipeline_index)
    same_passes = saved.num_epochs == pipeline.num_epochs
    # A tf.data service deals its elements to whoever asks, so no worker has a size of its own. The coordinator of
    # parameter servers counts what all workers have read together.
    reads_own_data = pipeline.num_pipelines > 1 and collectives.num_workers > 1
    if same_passes or not reads_own_data or pipeline.service is not None:
        return
    with pipeline.reading():
        saved_passes = pipeline.build_given(saved.num_epochs)
        position.elements = _count_up_to(position.elements, saved_passes)
    elements_of_workers = collectives.gather(position.elements)
    position.ahead = [int(elements - elements_of_workers[0]) for elements in elements_of_workers]


def _count_up_to(limit: int, dataset: tf.data.Dataset) -> int:
    """Return the number of elements of `dataset`, at most `limit`. It is read only if its size is not known."""
    limited = dataset.take(limit)
    size = int(limited.cardinality())
    if size >= 0:
        return size

    def add_one(count: tf.Tensor, *_: Any) -> tf.Tensor:
        return count + 1

    add_one = tf.autograph.experimental.do_not_convert(add_one)
    return int(limited.reduce(tf.constant(0, tf.int64), add_one))


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
        # Workers differ in what they have skipped as in what they have read: both began when max_epochs was raised.
        position.skipped = saved.skipped + saved.ahead_of_chief(pipeline.pipeline_index)
        return _restore_iterator(pipeline, checkpoint, position.skipped)
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
        elements = min(saved.elements, saved.size)  # those of other workers may have gone on
        position.passes += elements / saved.size * (saved.num_epochs or 1)
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
