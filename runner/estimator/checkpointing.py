"""The checkpoints of one call of `Estimator.train`: when to write them, waiting for the disk, and their log lines."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.checkpoint.async_saver import Saved, Saver
from runner.checkpoint.equal_replicas import check_equal
from runner.checkpoint.retention import Keep
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.data.input_state import InputState
from runner.estimator.context import EstimatorContext
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import Every, Run
from runner.remote.mirror import remote_dir
from runner.remote.note import Note
from runner.system.console import format_bytes
from runner.system.files import write_atomically
from runner.tracing.meta_graph import meta_graph
from runner.types import StepResult

_log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints that one call of `Estimator.train` writes.

    Args:
      context: the Estimator's settings.
      setup: the training setup.
      listeners: `tf.compat.v1.train.CheckpointSaverListener`s, called on the chief around each save.
      on_written: called with the path of each checkpoint that was written and verified.

    Attributes:
      every: the cadence of saving.
      saved_step: step of the last checkpoint, or the step at which the run began.
      latest: path of the last checkpoint.
    """

    def __init__(
        self,
        context: EstimatorContext,
        setup: TrainSetup,
        listeners: Sequence[Any],
        on_written: Callable[[str], None],
    ) -> None:
        config = setup.config
        collectives = context.collectives
        self.every = Every(config.save_checkpoints_steps, config.save_checkpoints_secs or None)
        self.latest = setup.latest
        self.saved_step: int | None = None
        self._context = context
        self._setup = setup
        self._listeners: list[Any] = []
        if collectives.is_chief:
            self._listeners = [*listeners, *setup.overrides.listeners]
        self._asynchronous: bool | str = config.save_checkpoints_asynchronously
        if self._listeners:
            # A listener's `after_save` expects the files of its checkpoint, so every save is waited for.
            self._asynchronous = False
        pipeline = setup.input.pipeline
        self._input_state = InputState(config.checkpoint_input_state, pipeline)
        keeps_input = self._input_state.is_kept
        keep = Keep(config.keep_checkpoint_max, config.keep_best, config.keep_checkpoint_every_n_hours)
        meta = self._write_graph()
        writer = CheckpointWriter(
            context.model_dir,
            keep,
            written=on_written,
            keeps_input=keeps_input,
            meta_graph=meta,
            is_mirrored=remote_dir(context.model_dir) is not None,
        )
        # A worker on another host has a folder of its own, without the chief's checkpoints: see `Saver`.
        is_apart = Note.read(Path(context.model_dir)).worker > 0
        self._saving = Saver(writer, collectives, inputs_differ=pipeline.num_pipelines > 1, is_apart=is_apart)
        self._saved_at = time.monotonic()
        self._is_logged = False

    def begin(self, step: int, extra: Mapping[str, Any]) -> None:
        """Write the first checkpoint of a new run, and start the cadence.

        Listeners are called for this checkpoint, or for the one that the run resumes from, as in tf.estimator. A
        listener cannot stop the run here.

        Args:
          step: the current global step.
          extra: facts to store in the checkpoint beside the variables.
        """
        self.tell_listeners("before_save", step)
        if self.latest is None:
            self.write(step, extra, asynchronous=True)
        self.tell_listeners("after_save", step)
        # Also for a run that resumes: it has written nothing here, and its cadence starts now.
        self.saved_step = step
        self._saved_at = time.monotonic()

    def _write_graph(self) -> bytes:
        """Write `graph.pbtxt`, and return the contents of `.meta` files. On other processes than the chief, and if the
        config asks for no graph, write nothing and return b"".
        """
        config = self._setup.config
        trace = self._setup.program.trace.one_replica
        is_written = self._context.is_chief and config.checkpoint_save_graph_def
        if not is_written or config.eager:  # an eager step has no graph
            return b""
        try:
            graph = meta_graph(trace, self._setup.model.store, self._setup.model.keys, trace.outputs[0].spec.train_op)
        except (TypeError, ValueError, tf.errors.OpError) as error:  # only tools need it, the run does not
            _log.warning("The graph of the step is not written beside checkpoints: %s", error)
            return b""
        # As tf.io.write_graph would, but in C: for 60 layers that took more than a second.
        write_atomically(Path(self._context.model_dir, "graph.pbtxt"), str(graph.graph_def))
        return bytes(graph.SerializeToString())

    def is_due(self, result: StepResult) -> bool:
        """Report whether the cadence asks for a checkpoint after these steps."""
        return self.every.due(result.first_step - 1, result.last_step, time.monotonic() - self._saved_at)

    def save(self, run: Run, extra: Mapping[str, Any], check: Callable[..., bool], *, asynchronous: bool) -> str | None:
        """Write a checkpoint of the current step. Listeners are called before and after it, and may stop the run.

        Returns:
          Its path; None: it was not written, because `check`, called with the run and the values, returned False.
        """
        self.tell_listeners("before_save", run.global_step)
        # After `before_save`, in which a listener may still assign variables.
        values = self._setup.model.values_by_key()
        if not check(run, values):
            return None
        path = self.write(run.global_step, extra, values, asynchronous=asynchronous, is_logged=True)
        for listener in self.tell_listeners("after_save", run.global_step):
            run.request_stop(f"{type(listener).__name__} requested it")
        return path

    def write(
        self,
        step: int,
        extra: Mapping[str, Any],
        values: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool,
        is_logged: bool = False,
        is_evaluated: bool = False,
    ) -> str:
        """Write a checkpoint and return its path.

        Args:
          step: the global step.
          extra: facts to store in the checkpoint beside the variables.
          values: the values by key; None: those of the variables.
          asynchronous: return as soon as the values are copied, if config and listeners allow that. False: return when
            the checkpoint is durable.
          is_logged: report the checkpoint on the screen and in the journal.
          is_evaluated: the checkpoint replaces one with the same values, which has been evaluated.

        Raises:
          ReplicasDifferError: `check_replicas` is set, and a variable is not the same on all replicas.
        """
        self.settle()  # only one checkpoint is written at a time
        if self._setup.config.check_replicas:
            check_equal(self._setup.model.store, self._context.collectives, step)
        train_input = self._setup.input
        iterators = {}
        if self._input_state.is_saved:
            iterators[train_input.pipeline.pipeline_index] = train_input.iterator
        # After `settle`, which logs the previous checkpoint as that one was to be logged.
        self._is_logged = is_logged

        def begin_save(values: Mapping[str, Any]) -> str:
            snapshot = Snapshot(step, values, extra)
            in_background = asynchronous and bool(self._asynchronous)
            if in_background and self._asynchronous == "auto":
                # At the first save the memory that a step needs is not known; its gradients may be as large as the
                # variables.
                is_first = self.saved_step is None
                in_background = self._saving.fits(snapshot, snapshot.bytes if is_first else None)
            with self._context.journal.phase("save"):
                return self._saving.begin(snapshot, iterators, asynchronous=in_background, is_evaluated=is_evaluated)

        path = self._setup.model.save(begin_save, values)
        self.saved_step = step
        self._saved_at = time.monotonic()
        self.latest = path
        self.poll()  # logs a save that was waited for
        return path

    def wait(self) -> None:
        """Wait until the last checkpoint is durable on all workers. All workers must call this together.

        Raises:
          The error because of which the checkpoint could not be written, as in `settle`.
        """
        self.settle()
        self._context.collectives.sum([])  # a barrier: without values, a sum only waits for all workers

    def settle(self) -> None:
        """Wait until the last checkpoint is durable on this worker.

        Raises:
          The error because of which the checkpoint could not be written.
        """
        self.poll()
        if self._saving.is_busy:
            with self._context.journal.phase("save"):
                saved = self._saving.wait()
            self._log(saved)

    def settle_before(self, error: Exception) -> None:
        """Wait for the checkpoint that is being written before `error` is raised; add a note if writing fails, too."""
        try:
            self.settle()
        except Exception as other:
            error.add_note(f"The last checkpoint could not be written either: {other}")

    def poll(self) -> None:
        """Log the last checkpoint once it is durable."""
        self._log(self._saving.poll())

    def _log(self, saved: Saved | None) -> None:
        if saved is None or not self._is_logged or not self._context.collectives.is_chief:
            return
        self._context.journal.event("checkpoint", **saved.facts)
        waited = saved.copy_secs + saved.input_secs
        what_waited = f"; training waited {waited:.3f} s for it" if saved.asynchronous else ""
        _log.info(
            "Saved %s: %s in %.2f s%s",
            os.path.basename(saved.path),
            format_bytes(saved.bytes),
            waited + saved.write_secs,
            what_waited,
        )

    def tell_listeners(self, method: str, *step: int) -> list[Any]:
        """Call a method of each listener, and return the listeners that answered True.

        v1's listeners are called with the traced graph as default.
        """
        session = self._setup.session_hooks.session
        arguments: tuple[Any, ...] = ()
        if step:  # `begin` has no arguments
            arguments = (session, *step)
        agreed = []
        for listener in self._listeners:
            is_v1 = isinstance(listener, tf.compat.v1.train.CheckpointSaverListener)
            with session.entered() if is_v1 else contextlib.nullcontext():
                answer = getattr(listener, method)(*arguments)
            if answer:
                agreed.append(listener)
        return agreed
