"""Where the training input stands, so that a resumed run continues at the very next example."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from runner import checkpoints
from runner.inputs import Feed
from runner.iterators import iterate

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Position:
    """Where one process stands in its training input.

    Attributes:
      source: what tells this input from another one.
      ended: it was read to its end; who continues starts from its beginning.
      elements: elements of the dataset read since its beginning.
      num_epochs: passes over the examples that it was opened for; None: nobody counts.
      num_pipelines: processes that read data of their own; 1: one, or all the same.
    """

    source: str
    ended: bool = False
    elements: int = 0
    num_epochs: int | None = None
    num_pipelines: int = 1

    @classmethod
    def at_start(cls, source: str, feed: Feed) -> Position:
        """Before the first element of `feed`."""
        return cls(source, num_epochs=feed.num_epochs, num_pipelines=feed.num_pipelines)

    def as_extra(self) -> dict[str, Any]:
        """For the checkpoint; `continued` reads it."""
        return dataclasses.asdict(self)


def source_of(input_fn: Any, feed: Feed) -> str:
    """Tells one training input from another, across processes: the function with what is bound to it, its settings."""
    settings = (getattr(input_fn, name, None) for name in ("params", "batch_size", "shuffle_seed"))
    fn, bound = getattr(input_fn, "fn", input_fn), ""
    while isinstance(fn, functools.partial):
        bound += repr((fn.args, fn.keywords))
        fn = fn.func
    line = getattr(getattr(fn, "__code__", None), "co_firstlineno", "")
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}:{line}"
    # A digest, as params may be long and may hold what does not belong in a checkpoint.
    details = repr((bound, *settings, feed.element_spec))
    return f"{name} {zlib.crc32(details.encode()):08x}"


def was_read_to_its_end(source: str, latest: str | None, num_epochs: int | None = None) -> bool:
    """Whether the checkpoint `latest` was written at the end of this input, after at least `num_epochs` passes."""
    saved: Mapping[str, Any] = {} if latest is None else checkpoints.Reader(latest).extra().get("input") or {}
    return bool(saved) and saved["ended"] and saved["source"] == source and not _has_more(saved, num_epochs)


def continued(feed: Feed, source: str, latest: str | None) -> tuple[Any, Position]:
    """The iterator over `feed.dataset`, at the example that follows the last one of the checkpoint `latest`.

    It starts at the beginning where there is no checkpoint, where that one was trained on another input, or where the
    input had been read to its end. So it does where another number of processes had each read a part of its own: parts
    that were divided otherwise have no place in common. Where the checkpoint holds a count and no state, what was read
    is read again.

    Args:
      source: tells this input from another one, across processes.
    """
    saved: Mapping[str, Any] = {} if latest is None else checkpoints.Reader(latest).extra().get("input") or {}
    start, worker = Position.at_start(source, feed), feed.pipeline
    if latest is None or not saved:
        return iterate(feed.dataset), start
    parts = saved.get("num_pipelines", 1)
    if parts != feed.num_pipelines and not saved["ended"]:
        _log.warning(
            "%s was trained on %s, and now it is %s: the input starts from its beginning, and some examples of this "
            "epoch are seen again. With shard=examples it would go on at the next one.",
            latest, _parts(parts), _parts(feed.num_pipelines),
        )  # fmt: skip
        return iterate(feed.dataset), start
    if saved["source"] != source:
        if not saved["ended"]:
            _log.info("The training input is another one than that of %s: it starts from its beginning.", latest)
        return iterate(feed.dataset), start
    if saved["ended"] and not _has_more(saved, feed.num_epochs):
        return iterate(feed.dataset), start
    position = dataclasses.replace(start, elements=saved["elements"])
    same_passes = saved.get("num_epochs") == feed.num_epochs
    by_one_process = isinstance(feed.dataset, tf.data.Dataset)  # else workers read it, each on its own
    if by_one_process and same_passes and checkpoints.has_iterator(latest, worker):
        iterator = iterate(feed.dataset)
        checkpoints.restore_iterator(latest, worker, iterator)
        return iterator, position
    # One iterator of a dataset and no more: they share the state of its shuffle.
    say = _log.warning if feed.is_chief else _log.debug
    say("Reading %d batches again, to continue where %s stopped.", position.elements, latest)
    return iterate(feed.dataset.skip(position.elements)), position


def _parts(number: int) -> str:
    return f"{number} parts of the input, one a worker" if number > 1 else "the undivided input"


def _has_more(saved: Mapping[str, Any], num_epochs: int | None) -> bool:
    """Whether an input that was read to its end has further passes now."""
    return (num_epochs or 1) > (saved.get("num_epochs") or 1)


def state_is_exact(feed: Feed) -> bool:
    """Whether the saved state of an iterator over `feed.dataset` leads to the same examples.

    Not for shuffle().batch().repeat() with a smaller last batch: between that batch and the next epoch the state of
    the shuffle is in no iterator, and TensorFlow 2.21 goes through the first epoch's order again after a restore.
    `shuffle().repeat().batch()` and `drop_remainder=True` are exact. The stages are read from `__debug_string__`,
    which is for people; should it change, resuming falls back to what iterators save.
    """
    if not isinstance(feed.dataset, tf.data.Dataset):
        return False  # workers read it, each on its own
    debug_string = getattr(feed.given, "__debug_string__", lambda: "")()
    stages = [line.lstrip("-<") for line in debug_string.splitlines()]
    repeated = itertools.dropwhile(lambda stage: not stage.startswith("_RepeatDataset"), stages)
    batched = itertools.dropwhile(lambda stage: not ("BatchDataset" in stage and "shape=(None" in stage), repeated)
    return not any(stage.startswith("_ShuffleDataset") for stage in batched)
