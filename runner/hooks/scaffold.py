"""The Scaffold that model_fn returns: the checkpoint keys of its Saver, and the operations that it runs first."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.hooks.trace_session import TraceSession
from runner.tf_private import v1 as v1_bridge
from runner.tf_private.graphs import object_graph_of
from runner.tracing.variable_store import GLOBAL_STEP, RequestedVariables

v1 = tf.compat.v1
_log = logging.getLogger(__name__)

_OBJECTS = (tf.train.Checkpoint, v1.train.Checkpoint)


class ModelScaffold:
    """A `tf.compat.v1.train.Scaffold` in one mode, with the Saver that tf.estimator would have used.

    Args:
      scaffold: the scaffold of the EstimatorSpec; None: there is none, and every method has no effect.
      graph: the graph of this mode, whose collection SAVERS is used if the Scaffold has no saver.
      requested: the variables that model_fn requested in it.

    Attributes:
      saver: the saver that restores in this mode, and saves in TRAIN; None: the runner's own checkpoints are used
        alone.
      keys: variable name -> key in a checkpoint, for variables that the saver stores under a key other than their name:
        the path of an object if it is a `tf.train.Checkpoint`.
      objects: (serialized object graph, keys) of a `tf.train.Checkpoint`; both are empty for any other saver.

    Raises:
      ValueError: there are several savers, or the saver cannot restore.
    """

    def __init__(self, scaffold: Any, graph: Any, requested: RequestedVariables) -> None:
        self._scaffold = scaffold or v1.train.Scaffold()
        self.saver = _find_saver(scaffold, graph)
        self._keys_in_saver: Mapping[str, str] = {}  # name of a variable -> its key
        if isinstance(self.saver, v1.train.Saver):
            self._keys_in_saver = v1_bridge.names_in_saver(self.saver)
        self.objects: tuple[bytes, dict[str, str]] = (b"", {})
        if isinstance(self.saver, _OBJECTS):
            self.objects = self._describe_objects(graph, requested)
        _, keys_of_objects = self.objects
        all_keys = {**self._keys_in_saver, **keys_of_objects}
        self.keys = {name: key for name, key in all_keys.items() if name != key}

    @property
    def restores(self) -> bool:
        """Report whether the saver's `restore` is the user's own."""
        is_known = self.saver is None or isinstance(self.saver, _OBJECTS)
        return not is_known and _function_of(self.saver, "restore") is not v1.train.Saver.restore

    @property
    def runs(self) -> bool:
        """Report whether the Scaffold runs anything before the first batch, other than reading a checkpoint."""
        names = ("local_init_op", "ready_op", "ready_for_local_init_op")
        return self.restores or any(getattr(self._scaffold, name, None) is not None for name in names)

    def not_in_saver(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that the saver does not store."""
        if not self._keys_in_saver:
            return []
        return [name for name in names if name not in self._keys_in_saver]

    def _describe_objects(self, graph: Any, requested: RequestedVariables) -> tuple[bytes, dict[str, str]]:
        """Return (serialized object graph, variable name -> its key in a checkpoint) of a `tf.train.Checkpoint`."""
        names = {id(v1.train.get_global_step(graph)): GLOBAL_STEP}
        for name, (variable, owner) in requested.requests.items():
            names[id(variable)] = name
            if owner is not None:
                names[id(owner)] = name
        with graph.as_default():
            return object_graph_of(self.saver, lambda variable: names.get(id(variable)))

    def restore(self, session: TraceSession, path: str) -> None:
        """Call the saver's `restore` with the checkpoint `path`, if the user has overridden it.

        Otherwise there is nothing to do: the runner has already read the values by the saver's keys.
        """
        if self.saver is not None and self.restores:
            with session.entered():
                self.saver.restore(session, path)

    def begin(self, session: TraceSession) -> None:
        """Run `init_op` and `init_fn` on a new model.

        Raises:
          ValueError: one of them depends on a batch.
        """
        scaffold = self._scaffold
        with session.entered():
            if scaffold.init_op is not None:
                session.run(scaffold.init_op, feed_dict=scaffold.init_feed_dict)
            if scaffold.init_fn is not None:
                scaffold.init_fn(session)

    def begin_local(self, session: TraceSession) -> None:
        """Check `ready_for_local_init_op`, run `local_init_op`, and check `ready_op`.

        Raises:
          RuntimeError: the model is not ready.
          ValueError: an operation depends on a batch.
        """
        scaffold = self._scaffold
        with session.entered():
            _check_ready(session, scaffold.ready_for_local_init_op, "ready_for_local_init_op")
            if scaffold.local_init_op is not None:
                session.run(scaffold.local_init_op, feed_dict=scaffold.local_init_feed_dict)
            _check_ready(session, scaffold.ready_op, "ready_op")

    def warn_in_training(self, names: Sequence[str], keep_checkpoint_max: int | None) -> None:
        """Log each setting of the Scaffold that has no effect in training, or not the same as in tf.estimator.

        Args:
          names: names of the model's variables.
          keep_checkpoint_max: the value in the RunConfig.
        """
        if type(self._scaffold).finalize is not v1.train.Scaffold.finalize:
            _log.warning(
                "EstimatorSpec.scaffold: finalize() of %s is not called. Pass its settings to the constructor.",
                type(self._scaffold).__name__,
            )
        if self.saver is None or isinstance(self.saver, _OBJECTS):
            return
        if _function_of(self.saver, "save") is not v1.train.Saver.save:
            _log.warning(
                "EstimatorSpec.scaffold: save() of its saver, a %s, is not called, because the runner writes "
                "checkpoints. Use a CheckpointSaverListener to run code around each save.",
                type(self.saver).__name__,
            )
        not_stored = self.not_in_saver(names)
        keys_of_others = set(self.keys.values())
        # The runner stores a variable that the saver leaves out under its name, unless the saver has given that key to
        # another variable.
        lost = [name for name in not_stored if name in keys_of_others]
        if lost:
            _log.warning(
                "EstimatorSpec.scaffold: its saver stores other variables under the keys %s. The variables of these "
                "names are therefore not saved, and training cannot resume. Give the saver different keys.",
                ", ".join(lost),
            )
        kept = [name for name in not_stored if name not in lost]
        if kept:
            _log.info(
                "EstimatorSpec.scaffold: its saver does not store %s; the runner's checkpoints contain them anyway.",
                ", ".join(kept),
            )
        max_to_keep = getattr(getattr(self.saver, "saver_def", None), "max_to_keep", None)
        if max_to_keep is not None and max_to_keep != (keep_checkpoint_max or 0):
            _log.warning(
                "EstimatorSpec.scaffold: max_to_keep=%s of its saver is ignored; RunConfig(keep_checkpoint_max=%s) "
                "applies.",
                max_to_keep,
                keep_checkpoint_max,
            )


def _find_saver(scaffold: Any, graph: Any) -> Any:
    """Return the saver of a scaffold, else that of the graph's collection; None: there is none.

    Raises:
      ValueError: there are several savers, or the saver cannot restore.
    """
    saver = getattr(scaffold, "saver", None)
    savers = graph.get_collection(v1.GraphKeys.SAVERS)
    if saver is None and savers:
        if len(savers) > 1:
            raise ValueError(
                f"the collection tf.GraphKeys.SAVERS has {len(savers)} savers. Choose one: "
                "EstimatorSpec(scaffold=tf.train.Scaffold(saver=...))."
            )
        saver = savers[0]
    if saver is not None and not callable(getattr(saver, "restore", None)):
        raise ValueError(
            f"EstimatorSpec.scaffold: its saver {saver!r} has no method restore. Use a "
            "tf.compat.v1.train.Saver or a tf.train.Checkpoint."
        )
    return saver


def _function_of(saver: Any, method: str) -> Any:
    """Return the function behind a method, by which one of TensorFlow is known; None: there is none."""
    return getattr(getattr(saver, method, None), "__func__", None)


def _check_ready(session: TraceSession, ready_op: Any, name: str) -> None:
    """Raise an error if a readiness operation of a Scaffold returns names of variables that are not ready."""
    if ready_op is None:
        return
    names = session.run(ready_op)
    if names is not None and np.size(names) and names.dtype != np.int32:
        shown = ", ".join(map(_text_of, names.ravel()))
        raise RuntimeError(f"EstimatorSpec.scaffold: its {name} reports that the model is not ready: {shown}.")


def _text_of(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
