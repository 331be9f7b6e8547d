"""Write a SavedModel: the graph of model_fn, the values of a checkpoint, and the files of its lookup tables.

The format is that of tf.estimator. `tf.saved_model.load`, `tf.compat.v1.saved_model.load`, `saved_model_cli` and
TensorFlow Serving can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint import warm_start
from runner.checkpoint.reader import Reader, keys_in
from runner.export import model_card
from runner.export.graph import ExportGraph, Receiver, build_graph
from runner.export.outputs import DEFAULT
from runner.export.session_values import Piece, SessionValues, read_in_parts
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.ema import averages_in
from runner.programs.model import check_shapes
from runner.remote.mirror import local_folder, writing
from runner.run_config import RunConfig
from runner.system.files import MODEL_CARD_FILE
from runner.tf_private.replaced import Overlay
from runner.tf_private.tensor_bundle import Entry, write_in_parts
from runner.tracing.adapted_layers import ADAPTED
from runner.tracing.variable_request import VariableSpec

v1 = tf.compat.v1
_log = logging.getLogger(__name__)

TAGS = {ModeKeys.TRAIN: ["train"], ModeKeys.EVAL: ["eval"], ModeKeys.PREDICT: ["serve"]}
"""Mode -> tags of its graph in a SavedModel."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A SavedModel that was written.

    Attributes:
      path: its folder.
      signatures: signature name -> names of its inputs and outputs as readable text: "x, y -> z".
      tensors: "inputs" and "outputs" -> name -> [dtype, shape with -1 for any size], for the dense tensors of the
        default signature. {} if there is no default signature.
    """

    path: str
    signatures: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Sequence[Any]]]


TEMPORARY = "temp-"
_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class Source:
    """The model to export, and where its values come from.

    Attributes:
      model_call: calls model_fn: (features, labels, mode) -> EstimatorSpec.
      checkpoint: path of the checkpoint; None: a new model with initial values, or those of `config.warm_start`.
      config: has the seed. Moving averages that training kept are exported instead of the weights.
    """

    model_call: Callable[..., EstimatorSpec]
    checkpoint: str | None
    config: RunConfig


def write_saved_model(
    base: str,
    receiver_fns: Mapping[str, Callable[[], Receiver]],
    source: Source,
    *,
    assets_extra: Mapping[str, str] | None = None,
    as_text: bool = False,
) -> Written:
    """Write a SavedModel, with a model card, to `<base>/<seconds since 1970>`. The folder appears only when it is
    complete.

    Args:
      base: parent folder, or a URL of an object store, to whose local folder it is written.
      receiver_fns: mode -> receiver function. Each mode gives a graph, with the tag train, eval or serve.
      source: the model and its values.
      assets_extra: path below `assets.extra` in the SavedModel -> file to copy there; None: no files.
      as_text: write saved_model.pbtxt instead of saved_model.pb.

    Raises:
      ValueError: `base` is a URL that cannot be written to, there is no receiver function, model_fn's result cannot
        be exported, the checkpoint lacks a variable, or a file of `assets_extra` does not exist.
    """
    base = local_folder("export_saved_model(export_dir_base=", base)
    writing(base)
    modes = [mode for mode in TAGS if receiver_fns.get(mode) is not None]
    if not modes:
        raise ValueError(
            f"nothing to export: give a receiver function for at least one of the modes {', '.join(map(repr, TAGS))}."
        )
    extra = {os.fsdecode(name): os.fsdecode(file) for name, file in (assets_extra or {}).items()}
    for name, file in extra.items():
        if not tf.io.gfile.exists(file):
            raise ValueError(f"assets_extra[{name!r}]={file!r}: there is no such file.")
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"assets_extra[{name!r}]: must be a relative path below assets.extra.")
    is_new, temporary = source.checkpoint is None, _temporary_folder(base)
    adapted = {} if source.checkpoint is None else Reader(source.checkpoint).extra().get(ADAPTED, {})
    try:
        with _without_advice():
            graphs = {
                mode: build_graph(
                    source.model_call,
                    receiver_fns[mode],
                    mode,
                    seed=source.config.seed,
                    with_initial_values=is_new,
                    adapted=adapted,
                )
                for mode in modes
            }
            builder = v1.saved_model.Builder(temporary)
            for mode, graph in graphs.items():
                _add(builder, graph, TAGS[mode], is_first=mode == modes[0])
            builder.save(as_text)
            exported = list(graphs.values())
            parts = values_of(exported, source.checkpoint, source.config, trains=ModeKeys.TRAIN in modes)
            parts = itertools.chain(parts, _values_of_saveables(exported, source.checkpoint))
        write_in_parts(Path(temporary) / "variables" / "variables", parts)
        signatures: dict[str, Any] = {}
        for graph in graphs.values():
            signatures |= graph.signatures
        card = model_card.card_of(source.checkpoint, signatures, TAGS[modes[-1]])
        Path(temporary, MODEL_CARD_FILE).write_text(card, encoding="utf-8")
        for name, file in extra.items():
            target = os.path.join(temporary, "assets.extra", name)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(file, target)
        path = _published(temporary, base)
    except BaseException:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)
        raise
    described = {
        name: f"{', '.join(sorted(one.inputs))} -> {', '.join(sorted(one.outputs))}" for name, one in signatures.items()
    }
    return Written(path, described, _tensors(signatures.get(DEFAULT)))


def _add(builder: Any, exported: ExportGraph, tags: Sequence[str], *, is_first: bool) -> None:
    given: dict[str, Any] = {
        "assets_collection": exported.assets,
        "clear_devices": True,  # a serving host may have other devices than this one
        "main_op": exported.init_op,
        "strip_default_attrs": True,
    }
    with exported.graph.as_default():
        if exported.saver_def is None:
            saver = v1.train.Saver(dict(exported.variables), sharded=True, allow_empty=True)
        else:
            saver = v1.train.Saver(saver_def=exported.saver_def)
        # The builder would read the values from a session. `write_in_parts` writes them instead.
        saver = Overlay(saver, save=lambda *args, **kwargs: None)
        if is_first:
            builder.add_meta_graph_and_variables(None, tags, dict(exported.signatures), saver=saver, **given)
        else:
            builder.add_meta_graph(tags, dict(exported.signatures), saver=saver, **given)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence TensorFlow's deprecation warnings about session APIs, which this module must use."""
    logger = logging.getLogger("tensorflow")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tensors(signature: Any) -> dict[str, dict[str, Sequence[Any]]]:
    """Return `Written.tensors` for a SignatureDef; {} for None."""
    parts = {"inputs": signature.inputs, "outputs": signature.outputs} if signature is not None else {}
    return {
        part: {
            name: [tf.as_dtype(info.dtype).name, [size.size for size in info.tensor_shape.dim]]
            for name, info in sorted(infos.items())
            if info.WhichOneof("encoding") == "name"
        }
        for part, infos in parts.items()
    }


# --- values ----------------------------------------------------------------------------------------------------------


def values_of(
    graphs: Sequence[ExportGraph], checkpoint: str | None, config: RunConfig, *, trains: bool
) -> Iterator[Sequence[Entry]]:
    """Return an iterator over parts of the variables' values, each a list of entries of a bundle.

    A part is read when the iterator reaches it. If the model is new, or if the user's saver overrides `restore`, a
    session holds all values until the iterator ends.

    Args:
      graphs: the exported graphs.
      checkpoint: path of the checkpoint; None: a new model with initial values, or those of `config.warm_start`.
      config: has `ema_decay`.
      trains: one of the graphs is a training graph, which needs the weights, not their averages.

    Raises:
      ValueError: the checkpoint lacks a variable or has it in another shape, or has no averages to export.
    """
    names = dict.fromkeys(name for graph in graphs for name in graph.variables)
    if checkpoint is None:
        specs = {name: spec for graph in graphs for name, spec in graph.specs.items()}
        return map(_entries, _new_values(graphs, config, specs))
    reader = Reader(checkpoint)
    _check_keys(reader, graphs)
    if graphs[0].restore is not None:
        return map(_entries, graphs[0].restore(reader.path, _found_by_name(reader, graphs[0]), names))
    sources: dict[str, str] = {}
    for graph in graphs:
        sources |= _sources_in(reader, graph, config, trains=trains)
    return reader.entries_in_parts({name: sources[name] for name in names})


def _values_of_saveables(graphs: Sequence[ExportGraph], checkpoint: str | None) -> Iterator[Sequence[Entry]]:
    """Yield the values of what the receiver functions put into SAVEABLE_OBJECTS: those of the checkpoint, or where it
    has none those that the initializers of tables give.
    """
    reader = None if checkpoint is None else Reader(checkpoint)
    written = set[str]()
    for graph in graphs:
        missing = {key: tensor for key, tensor in graph.saveables.items() if key not in written}
        written.update(missing)
        there = [key for key in missing if reader is not None and reader.has(key)]
        if reader is not None and there:
            yield from reader.entries_in_parts({key: key for key in there})
        new = {key: tensor for key, tensor in missing.items() if key not in there}
        if new:
            with v1.Session(graph=graph.graph) as session:
                session.run(graph.init_op)
                values = session.run(new)
            yield _entries(values)  # after the session, inside which operations are not eager


def _entries(values: Mapping[str, Any]) -> Sequence[Entry]:
    return [Entry(name, "", value) for name, value in values.items()]


def _check_keys(reader: Reader, graphs: Sequence[ExportGraph]) -> None:
    """Check that each variable has the same key in the checkpoint in all graphs, because a SavedModel holds only one
    value of it.

    Raises:
      ValueError: a variable has different keys, or there are several graphs and a saver overrides `restore`.
    """
    keys = ((graph, _renamed(reader, graph)) for graph in graphs)
    sources = [{name: reader.key(one.get(name, name)) for name in graph.variables} for graph, one in keys]
    differ = [
        name for one in sources for name, key in one.items() if any(other.get(name, key) != key for other in sources)
    ]
    if differ or (len(graphs) > 1 and any(graph.restore is not None for graph in graphs)):
        raise ValueError(
            f"the savers of model_fn's Scaffolds read {', '.join(dict.fromkeys(differ)) or 'variables'} under "
            "different keys in different modes, but a SavedModel holds only one value of each variable. Export each "
            "mode on its own: export_saved_model(..., experimental_mode=)."
        )


def _found_by_name(reader: Reader, graph: ExportGraph) -> Iterator[Mapping[str, Any]]:
    """Return an iterator over dicts name -> value, of those variables of a graph that the checkpoint has."""
    renamed = _renamed(reader, graph)
    there = {name: renamed.get(name, name) for name in graph.specs if reader.has(renamed.get(name, name))}
    check_shapes(reader, {name: graph.specs[name].shape for name in there}, (), renamed)
    return reader.in_parts(there)


def _sources_in(reader: Reader, graph: ExportGraph, config: RunConfig, *, trains: bool) -> dict[str, str]:
    """Return variable name -> name in the checkpoint of the value to export, for each variable of one graph. This is a
    moving average if training kept one and `trains` is False.
    """
    renamed = _renamed(reader, graph)
    check_shapes(reader, {name: spec.shape for name, spec in graph.specs.items()}, (), renamed)
    averaged = {} if trains else averages_in(reader, graph.specs, config.ema_decay, "export")
    if averaged:
        _log.info("Exporting the moving averages of the weights.")
    return {name: averaged.get(name) or renamed.get(name, name) for name in graph.variables}


def _renamed(reader: Reader, graph: ExportGraph) -> dict[str, str]:
    """Return variable name -> its name in the checkpoint, for variables that have another name there."""
    return keys_in(reader, {name: spec.shape for name, spec in graph.specs.items()}, graph.keys)


def _new_values(
    graphs: Sequence[ExportGraph], config: RunConfig, specs: Mapping[str, VariableSpec]
) -> Iterator[Mapping[str, Any]]:
    """Return an iterator over dicts name -> value: initial values, or those of the warm start."""
    owners: dict[str, SessionValues] = {}
    with contextlib.ExitStack() as held:
        for exported in graphs:
            with exported.graph.as_default():  # `initial_value` can only be read inside the graph
                pieces = {
                    name: [Piece(part, part.initializer, part.initial_value) for part in _parts_of(variable)]
                    for name, variable in exported.variables.items()
                    if name not in owners
                }
            values = SessionValues(exported.graph, pieces, specs)
            held.callback(values.close)
            values.initialize()
            owners |= dict.fromkeys(pieces, values)

        if config.warm_start is not None:
            warm_start.load(config.warm_start, specs, _Started(owners, specs))
        return read_in_parts(owners, held.pop_all())


class _Started:
    """Sets the values of a warm start in sessions; those of variables that are not exported are left out."""

    def __init__(self, owners: Mapping[str, SessionValues], specs: Mapping[str, VariableSpec]) -> None:
        self._owners, self._specs = owners, specs

    def assign(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in self._owners:
                self._owners[name].assign({name: np.asarray(value, self._specs[name].dtype.as_numpy_dtype)})

    def read(self, path: str, entries: Mapping[str, tuple[str, tf.DType]]) -> None:
        for part in Reader(path).in_parts({name: key for name, (key, _) in entries.items() if name in self._owners}):
            self.assign(part)

    def update(self, name: str, places: np.ndarray, values: tf.Tensor) -> None:
        if name in self._owners:
            value = np.array(self._owners[name].read([name])[name])
            value[tuple(places.T)] = values.numpy()
            self.assign({name: value})


def _parts_of(variable: Any) -> Sequence[Any]:
    """Return the list of parts of a partitioned variable, or a list that holds only `variable`."""
    return variable if isinstance(variable, list) else [variable]


# --- folders ------------------------------------------------------------------------------------------------------


def exports_in(base: str) -> list[str]:
    """Return the paths of the complete exports in `base`, oldest first; an empty list if the folder does not exist."""
    if not tf.io.gfile.isdir(base):
        return []
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(base)]
    return [os.path.join(base, name) for name in sorted((name for name in names if name.isdigit()), key=int)]


def _temporary_folder(base: str) -> str:
    """Return an unused path `<base>/temp-<seconds since 1970>`; the number will be the name of the export."""
    taken = [int(os.path.basename(path)) for path in exports_in(base)]
    stamp = max(int(time.time()), max(taken, default=0) + 1)
    for attempt in range(_ATTEMPTS):
        temporary = os.path.join(base, f"{TEMPORARY}{stamp + attempt}")
        if not tf.io.gfile.exists(temporary) and not tf.io.gfile.exists(os.path.join(base, str(stamp + attempt))):
            return temporary
    raise RuntimeError(f"{base} has {_ATTEMPTS} unfinished exports. Delete the folders {TEMPORARY}* in it.")


def _published(temporary: str, base: str) -> str:
    """Rename the folder of a complete export to its number and return the new path.

    TensorFlow Serving, which watches `base`, thus never sees an incomplete export.
    """
    stamp = int(os.path.basename(temporary).removeprefix(TEMPORARY))
    while tf.io.gfile.exists(os.path.join(base, str(stamp))):
        stamp += 1
    final = os.path.join(base, str(stamp))
    tf.io.gfile.rename(temporary, final)
    return final
