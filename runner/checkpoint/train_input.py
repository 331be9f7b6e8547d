"""The training input while it is read, and what a checkpoint holds of it: a resumed run reads the very next example."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import re
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from runner.checkpoint import reader
from runner.data.inputs import InputPipeline, check_examples
from runner.run_config import DrawnSeed
from runner.system.console import format_bytes
from runner.tf_private import datasets
from runner.types import plain_params

_log = logging.getLogger(__name__)


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
    def open(cls, input_fn: Any, pipeline: InputPipeline, latest: str | None, saved: Mapping[str, Any]) -> TrainInput:
        """Open the input at the example that follows the last one before the checkpoint `latest`.

        It begins at the beginning of the data if the checkpoint belongs to another input, or if the input was read to
        its end. It does so, too, if the processes now divide the data in another way, because positions in one division
        mean nothing in another.

        Args:
          input_fn: an input function or an Input.
          pipeline: its data.
          latest: path of the checkpoint; None: the input is read from its beginning.
          saved: the fields of the InputPosition in the checkpoint; empty if it has none.
        """
        position = InputPosition.at_start(source_of(input_fn, pipeline), pipeline)
        if latest is None or not saved:
            return cls(pipeline, pipeline.open(), position)
        saved_position = InputPosition(**saved)
        position.passes = saved_position.passes
        is_at_end = saved_position.ended and not _has_more(saved_position, pipeline)
        if saved_position.source != position.source:
            if not saved_position.ended:
                _log.info("The training input differs from that of %s, so it starts from its beginning.", latest)
        elif is_at_end:
            return cls(pipeline, pipeline.open(), position, was_at_its_end=True)
        elif _is_divided_alike(saved_position, pipeline):
            position.elements = saved_position.elements
            return cls(pipeline, _continued(pipeline, position, saved_position, latest), position)
        else:
            _log.warning(
                "%s was trained on %s, and this run reads %s: the input starts from its beginning and repeats some "
                "examples of this epoch. Set shard=examples before training to resume at the next example with any "
                "number of workers.",
                latest, _parts(saved_position.num_pipelines), _parts(pipeline.num_pipelines),
            )  # fmt: skip
        _count_anew(position, saved_position, latest, says=pipeline.is_chief)
        return cls(pipeline, pipeline.open(), position)

    @property
    def ended(self) -> bool:
        """Whether the data has been read to its end."""
        return self.position.ended

    @property
    def num_steps_read(self) -> int:
        return self.position.elements // self.pipeline.division.elements_per_step

    def may_end_within(self, num_steps: int) -> bool:
        return not self._is_end_known or self.remaining_steps < num_steps

    def advance(self, num_steps: int, examples: int, data_ended: bool, repeated_steps: int = 0) -> bool:
        """Note how much a loop has read, and return whether the data has ended.

        Args:
          num_steps, examples, data_ended, repeated_steps: as in `runner.programs.train_loop.LoopResult`.

        Raises:
          ValueError: as in `check_examples`.
        """
        position, num_batches = self.position, num_steps + repeated_steps
        check_examples(self.pipeline, num_batches, examples, are_first=position.elements == 0)
        read = position.elements + num_steps * self.pipeline.division.elements_per_step
        # The last step of the data may read fewer elements than a step takes. Count only elements that exist, so that
        # training with a larger max_epochs continues at the right element.
        position.elements = min(read, position.size) if position.size >= 0 else read
        self.remaining_steps -= num_steps
        was_at_its_end = data_ended and not num_steps and self._is_resumed
        self._is_resumed = False  # only the first loop of a run tells whether it resumed there
        if was_at_its_end and position.num_epochs is None:
            # The checkpoint was saved at the end of data of unknown size: read the data again, as a new call does.
            self.iterator = self.pipeline.open()
            self.position = InputPosition.at_start(position.source, self.pipeline)
        elif data_ended or self.remaining_steps <= 0:
            position.ended = True
        return self.ended

    def as_extra(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the position beside the variables; `open` reads it."""
        return dataclasses.asdict(self.position)


def _continued(pipeline: InputPipeline, position: InputPosition, saved: InputPosition, latest: str) -> Any:
    """Return an iterator at `position`, and note there how many elements its dataset skips.

    If the checkpoint `latest` holds only a count, that many elements are read again and dropped.

    Args:
      saved: the position in the checkpoint.
    """
    if pipeline.service is not None and pipeline.service.job_name is not None:
        # Other runs may share the job of the tf.data service, so this run reads the elements that are left.
        return pipeline.open()
    same_passes = saved.num_epochs == pipeline.num_epochs
    if pipeline.why_no_state is None and same_passes and reader.has_iterator(latest, pipeline.pipeline_index):
        position.skipped = saved.skipped
        return _restored(pipeline, latest, saved.skipped)
    # Do not open a second iterator to skip: two iterators of a dataset would share the state of its shuffle.
    say = _log.warning if pipeline.is_chief else _log.debug
    say("Reading %d batches again, to continue where %s stopped.", position.elements, latest)
    if saved.seed not in (None, pipeline.seed) and datasets.shuffle_buffers(pipeline.given):
        say(
            "The batches were shuffled with run.seed=%d, and now with %d: some examples of this epoch may be seen "
            "twice, others not at all.",
            saved.seed, pipeline.seed,
        )  # fmt: skip
    position.skipped = position.elements
    return pipeline.open(position.elements)


def _restored(pipeline: InputPipeline, latest: str, skipped: int) -> Any:
    """Return an iterator restored from `latest`, whose dataset skips `skipped` elements.

    Raises:
      ValueError: the dataset is not built like the saved one.
    """
    errors = []
    # A second iterator over the dataset is harmless here: the restored state includes the shuffles that they share.
    for alike in _prefetching_alike(pipeline):
        iterator = alike.open(skipped)
        try:
            reader.restore_iterator(latest, pipeline.pipeline_index, iterator)
            return iterator
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _prefetching_alike(pipeline: InputPipeline) -> Iterator[InputPipeline]:
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
    parts = saved.num_pipelines
    return parts == pipeline.num_pipelines and (parts == 1 or saved.shard == pipeline.shard)


def _has_more(saved: InputPosition, pipeline: InputPipeline) -> bool:
    """Report whether the number of passes was raised since the input was read to its end."""
    counted = saved.num_epochs
    if pipeline.num_epochs is None and counted is not None and pipeline.remaining_steps() == math.inf:
        return True  # the input ended because of num_epochs, which is no longer set
    return (pipeline.num_epochs or 1) > (counted or 1)


def _count_anew(position: InputPosition, saved: InputPosition, latest: str, *, says: bool) -> None:
    """Add the passes up to `saved`, the position in the checkpoint, to `position`; warn if they overrun a limit."""
    if saved.size > 0:
        position.passes += saved.elements / saved.size * (saved.num_epochs or 1)
    if position.num_epochs and saved.elements and says:
        _log.warning(
            "train.max_epochs=%d is overrun by the %s before %s, because the input starts from its beginning.",
            position.num_epochs,
            f"{position.passes:.3g} passes" if position.passes else f"{saved.elements} batches", latest,
        )  # fmt: skip


def _parts(number: int) -> str:
    return f"{number} parts of the input, one per worker" if number > 1 else "the undivided input"


def source_of(input_fn: Any, pipeline: InputPipeline) -> str:
    """Return a text that identifies a training input across processes: `<module>.<function> <settings> [<code>]`.

    `<settings>` is a digest of the function's bound arguments, the fields of `Input` and the element spec. It is a
    digest because params may be too long or too private for a checkpoint. A module-level function is identified by its
    name alone, so that its code may change. Lambdas and local functions share names, so they have a digest of their
    code, too.
    """
    settings = [plain_params(getattr(input_fn, "params", None))]
    settings += [getattr(input_fn, name, None) for name in ("batch_size", "shuffle_seed")]
    settings += ["first_batch_only"] if getattr(input_fn, "first_batch_only", False) else []
    fn, bound = getattr(input_fn, "fn", input_fn), ""
    while isinstance(fn, functools.partial):
        keywords = {name: _named(value) for name, value in fn.keywords.items()}
        bound += repr((tuple(map(_named, fn.args)), keywords))
        fn = fn.func
    # The repr contains an address, which differs in each process.
    details = _ADDRESS.sub("", repr((bound, *settings, pipeline.element_spec)))
    name, *code = _name_and_code(fn)
    return " ".join([name, _digest(details), *code])


def _name_and_code(fn: Any) -> list[str]:
    """Return [qualified name] of a function, and for a lambda or local function also a digest of its code."""
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
    code = getattr(fn, "__code__", None)
    if code is None or "<" not in name:
        return [name]
    return [name, _digest(_facts(code))]


def _named(value: Any) -> Any:
    """Return a bound argument. For a lambda or local function, return [name, digest of its code] instead."""
    name_and_code = _name_and_code(value)
    return name_and_code if len(name_and_code) > 1 else value


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _digest(text: str) -> str:
    # Not Python's `hash`, which differs in each process.
    return f"{zlib.crc32(text.encode()):08x}"


def _facts(constant: Any) -> str:
    """Return a text for a code object or one of its constants. It is the same in all processes with the same version of
    Python.
    """
    if isinstance(constant, types.CodeType):
        inner = ", ".join(map(_facts, constant.co_consts))
        return f"code({constant.co_code.hex()}, {constant.co_names}, {inner})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_facts, constant))})"
    if isinstance(constant, frozenset):  # its order depends on the hash seed
        return f"{{{', '.join(sorted(map(_facts, constant)))}}}"
    return repr(constant)


def state_is_exact(pipeline: InputPipeline) -> bool:
    """Report whether an iterator over `pipeline.dataset` can be saved and yields the same examples once restored.

    After `shuffle().batch().repeat()` with a smaller last batch, it does not: between that batch and the next epoch,
    the state of the shuffle is in no iterator, and after a restore TensorFlow 2.21 repeats the order of the first
    epoch. `shuffle().repeat().batch()` and `drop_remainder=True` are exact. A stage is told by its text, which has no
    fixed format; if TensorFlow changes it, this function returns True.
    """
    if pipeline.why_no_state is not None:
        return False
    stages = map(repr, datasets.stages(pipeline.given))
    repeated = itertools.dropwhile(lambda stage: not stage.startswith("<_RepeatDataset"), stages)
    batched = itertools.dropwhile(lambda stage: not ("BatchDataset" in stage and "shape=(None" in stage), repeated)
    return not any(stage.startswith("<_ShuffleDataset") for stage in batched)


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
        self._choice, self._pipeline = choice, pipeline
        is_exact = state_is_exact(pipeline)
        self.is_saved = choice != "counted" and is_exact
        self._is_measured = choice == "counted"
        self._say = _log.info if pipeline.is_chief else _log.debug
        if choice == "saved" and not is_exact and pipeline.is_chief:
            _log.warning(
                "checkpoint.input_state=saved has no effect: %s. Checkpoints hold a count of the batches read.",
                pipeline.why_no_state or "after shuffle().batch().repeat() with a smaller last batch, a restored "
                "iterator yields other examples; use drop_remainder=True, or repeat() before batch()",
            )  # fmt: skip
        key = "input.train.prefetch_to_device" if pipeline.prefetch is not None else "checkpoint.input_state=counted"
        is_counted = choice == "counted" or pipeline.prefetch is not None
        if is_counted and (reason := self._why_not_repeatable()) and pipeline.is_chief:
            _log.warning("%s: a resumed run reads the input again, and may read other examples: %s.", key, reason)

    def is_kept(self, num_bytes: int, variable_bytes: int) -> bool:
        """Report whether to keep an input state that has been written for a checkpoint.

        Called in the thread that writes. Once a state is larger than the variables, the answer is the same for all
        later states, because a shuffle buffer stays full once it is filled.

        Args:
          num_bytes: size of this process's state. Other processes that read their own data have about the same.
          variable_bytes: size of the variables in bytes.
        """
        total = num_bytes * self._pipeline.num_pipelines
        if self._is_measured or total <= max(variable_bytes, _SMALL_BYTES):
            return self.is_saved
        self._is_measured = True
        buffers = datasets.shuffle_buffers(self._pipeline.given)
        size = f"{format_bytes(total)} ({', '.join(f'shuffle({buffer})' for buffer in buffers) or 'no shuffle'})"
        reason = self._why_not_repeatable()
        if self._choice == "auto" and reason is None:
            self.is_saved = False
            self._say(
                "The state of the training input takes %s, the variables take %s: checkpoints hold a count of the "
                "batches read instead of the state, and a resumed run reads these batches again "
                "(checkpoint.input_state=saved keeps the state).", size, format_bytes(variable_bytes),
            )  # fmt: skip
        else:
            self._say(
                "Each checkpoint holds the state of the training input (%s) and the variables (%s)%s.",
                size, format_bytes(variable_bytes),
                "" if reason is None else f". Reading the input again may yield other examples: {reason}",
            )  # fmt: skip
        return self.is_saved

    def _why_not_repeatable(self) -> str | None:
        """Return why reading the input again may yield other examples; None: it yields the same."""
        if isinstance(self._pipeline.seed, DrawnSeed) and datasets.shuffle_buffers(self._pipeline.given):
            return "each process draws a new shuffle seed; set RunConfig(tf_random_seed=...)"
        return datasets.why_not_repeatable(self._pipeline.given)
