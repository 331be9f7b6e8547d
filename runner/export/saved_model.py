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
      LeaseLostError: another run has taken over the URL.
    """
    base = local_folder("export_saved_model(export_dir_base=", base)
    writing(base)  # for a URL: takes its lease, and sends the folder from now on
    wanted: dict[str, Callable[[], Receiver]] = {}
    for mode in TAGS:
        receiver_fn = receiver_fns.get(mode)
        if receiver_fn is not None:
            wanted[mode] = receiver_fn
    if not wanted:
        raise ValueError(
            f"nothing to export: give a receiver function for at least one of the modes {', '.join(map(repr, TAGS))}."
        )
    extra = _checked_assets_extra(assets_extra or {})
    temporary = _temporary_folder(base)
    try:
        graphs = _write_graphs_and_values(temporary, wanted, source, as_text)
        signatures: dict[str, Any] = {}
        for graph in graphs:
            signatures |= graph.signatures
        # The card loads the graph of the last mode in the order of TAGS: that of PREDICT if there is one.
        last_mode = list(wanted)[-1]
        card = model_card.card_of(source.checkpoint, signatures, TAGS[last_mode])
        Path(temporary, MODEL_CARD_FILE).write_text(card, encoding="utf-8")
        for name, file in extra.items():
            target = os.path.join(temporary, "assets.extra", name)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(file, target)
        path = _publish(temporary, base)
    except BaseException:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)
        raise
    described: dict[str, str] = {}
    for name, signature in signatures.items():
        inputs = ", ".join(sorted(signature.inputs))
        outputs = ", ".join(sorted(signature.outputs))
        described[name] = f"{inputs} -> {outputs}"
    return Written(path, described, _tensors(signatures.get(DEFAULT)))


def _checked_assets_extra(assets_extra: Mapping[str, str]) -> dict[str, str]:
    """Return `assets_extra` as text; raise ValueError of `write_saved_model`."""
    extra = {os.fsdecode(name): os.fsdecode(file) for name, file in assets_extra.items()}
    for name, file in extra.items():
        if not tf.io.gfile.exists(file):
            raise ValueError(f"assets_extra[{name!r}]={file!r}: there is no such file.")
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"assets_extra[{name!r}]: must be a relative path below assets.extra.")
    return extra


def _write_graphs_and_values(
    folder: str, receiver_fns: Mapping[str, Callable[[], Receiver]], source: Source, as_text: bool
) -> list[ExportGraph]:
    """Write the graph of each mode and the values of its variables, and return the graphs.

    Args:
      folder: folder of the SavedModel.
      receiver_fns: mode -> receiver function, of the modes to export.
      source: as in `write_saved_model`.
      as_text: as in `write_saved_model`.
    """
    adapted: Mapping[str, Any] = {}
    if source.checkpoint is not None:
        adapted = Reader(source.checkpoint).extra().get(ADAPTED, {})
    with _without_advice():
        graphs: dict[str, ExportGraph] = {}
        for mode, receiver_fn in receiver_fns.items():
            graphs[mode] = build_graph(
                source.model_call,
                receiver_fn,
                mode,
                seed=source.config.seed,
                with_initial_values=source.checkpoint is None,
                adapted=adapted,
            )
        builder = v1.saved_model.Builder(folder)
        for number, (mode, graph) in enumerate(graphs.items()):
            _add_graph(builder, graph, TAGS[mode], is_first=number == 0)
        builder.save(as_text)
        exported = list(graphs.values())
        of_variables = values_of(exported, source.checkpoint, source.config, trains=ModeKeys.TRAIN in graphs)
        of_saveables = _values_of_saveables(exported, source.checkpoint)
    write_in_parts(Path(folder) / "variables" / "variables", itertools.chain(of_variables, of_saveables))
    return exported


def _add_graph(builder: Any, exported: ExportGraph, tags: Sequence[str], *, is_first: bool) -> None:
    """Add a graph to TensorFlow's SavedModel builder, without the values of its variables.

    Args:
      builder: the builder.
      exported: the graph.
      tags: its tags in the SavedModel.
      is_first: the builder has no graph yet. It adds the first one by another method.
    """
    settings: dict[str, Any] = {
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
            builder.add_meta_graph_and_variables(None, tags, dict(exported.signatures), saver=saver, **settings)
        else:
            builder.add_meta_graph(tags, dict(exported.signatures), saver=saver, **settings)


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
    if signature is None:
        return {}
    return {"inputs": _dense_tensors(signature.inputs), "outputs": _dense_tensors(signature.outputs)}


def _dense_tensors(infos: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return name -> [dtype, shape] of those TensorInfos that are of dense tensors."""
    tensors: dict[str, Sequence[Any]] = {}
    for name, info in sorted(infos.items()):
        if info.WhichOneof("encoding") == "name":
            shape = [size.size for size in info.tensor_shape.dim]
            tensors[name] = [tf.as_dtype(info.dtype).name, shape]
    return tensors


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
    names: dict[str, None] = {}  # an ordered set: the names of all variables, in the order of the graphs
    for graph in graphs:
        names |= dict.fromkeys(graph.variables)
    if checkpoint is None:
        specs: dict[str, VariableSpec] = {}
        for graph in graphs:
            specs.update(graph.specs)
        return map(_entries, _new_values(graphs, config, specs))
    reader = Reader(checkpoint)
    _check_keys(reader, graphs)
    # `_check_keys` has made sure that a graph whose saver overrides `restore` is the only one.
    first = graphs[0]
    if first.restore is not None:
        restored = first.restore(reader.path, _found_by_name(reader, first), names)
        return map(_entries, restored)
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
        of_checkpoint: dict[str, str] = {}
        new: dict[str, tf.Tensor] = {}
        for key, tensor in graph.saveables.items():
            if key in written:
                continue
            written.add(key)
            if reader is not None and reader.has(key):
                of_checkpoint[key] = key
            else:
                new[key] = tensor
        if reader is not None and of_checkpoint:
            yield from reader.entries_in_parts(of_checkpoint)
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
    keys_of: dict[str, set[str]] = {}
    for graph in graphs:
        renamed = _renamed(reader, graph)
        for name in graph.variables:
            key = reader.key(renamed.get(name, name))
            keys_of.setdefault(name, set()).add(key)
    differ = [name for name, keys in keys_of.items() if len(keys) > 1]
    several_restore = len(graphs) > 1 and any(graph.restore is not None for graph in graphs)
    if differ or several_restore:
        raise ValueError(
            f"the savers of model_fn's Scaffolds read {', '.join(differ) or 'variables'} under different keys in "
            "different modes, but a SavedModel holds only one value of each variable. Export each mode on its own: "
            "export_saved_model(..., experimental_mode=)."
        )


def _found_by_name(reader: Reader, graph: ExportGraph) -> Iterator[Mapping[str, Any]]:
    """Return an iterator over dicts name -> value, of those variables of a graph that the checkpoint has."""
    renamed = _renamed(reader, graph)
    keys: dict[str, str] = {}
    shapes: dict[str, Any] = {}
    for name, spec in graph.specs.items():
        key = renamed.get(name, name)
        if reader.has(key):
            keys[name] = key
            shapes[name] = spec.shape
    check_shapes(reader, shapes, (), renamed)
    return reader.in_parts(keys)


def _sources_in(reader: Reader, graph: ExportGraph, config: RunConfig, *, trains: bool) -> dict[str, str]:
    """Return variable name -> name in the checkpoint of the value to export, for each variable of one graph. This is a
    moving average if training kept one and `trains` is False.
    """
    renamed = _renamed(reader, graph)
    check_shapes(reader, _shapes_of(graph), (), renamed)
    averaged = {} if trains else averages_in(reader, graph.specs, config.ema_decay, "export")
    if averaged:
        _log.info("Exporting the moving averages of the weights.")
    return {name: averaged.get(name) or renamed.get(name, name) for name in graph.variables}


def _renamed(reader: Reader, graph: ExportGraph) -> dict[str, str]:
    """Return variable name -> its name in the checkpoint, for variables that have another name there."""
    return keys_in(reader, _shapes_of(graph), graph.keys)


def _shapes_of(graph: ExportGraph) -> dict[str, Any]:
    return {name: spec.shape for name, spec in graph.specs.items()}


def _new_values(
    graphs: Sequence[ExportGraph], config: RunConfig, specs: Mapping[str, VariableSpec]
) -> Iterator[Mapping[str, Any]]:
    """Return an iterator over dicts name -> value: initial values, or those of the warm start."""
    owners: dict[
        str, SessionValues
    ] = {}  # variable name -> the session with its value, that of the first graph that has it
    # The sessions are closed here after an error, and else when the iterator that is returned ends.
    with contextlib.ExitStack() as open_sessions:
        for exported in graphs:
            pieces: dict[str, list[Piece]] = {}
            with exported.graph.as_default():  # `initial_value` can only be read inside the graph
                for name, variable in exported.variables.items():
                    if name not in owners:
                        pieces[name] = _pieces_of(variable)
            values = SessionValues(exported.graph, pieces, specs)
            open_sessions.callback(values.close)
            values.initialize()
            owners |= dict.fromkeys(pieces, values)

        if config.warm_start is not None:
            adapted: dict[str, Any] = {}
            for exported in graphs:
                adapted.update(exported.adapted)
            warm_start.load(config.warm_start, specs, _WarmStartedValues(owners, specs), adapted)
        return read_in_parts(owners, open_sessions.pop_all())


class _WarmStartedValues:
    """Sets the values of a warm start in sessions; those of variables that are not exported are left out.

    Args:
      owners: variable name -> the session that holds its value.
      specs: variable name -> spec.
    """

    def __init__(self, owners: Mapping[str, SessionValues], specs: Mapping[str, VariableSpec]) -> None:
        self._owners = owners
        self._specs = specs

    def assign(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in self._owners:
                dtype = self._specs[name].dtype.as_numpy_dtype
                self._owners[name].assign({name: np.asarray(value, dtype)})

    def read(self, path: str, entries: Mapping[str, tuple[str, tf.DType]]) -> None:
        keys = {name: key for name, (key, _) in entries.items() if name in self._owners}
        for part in Reader(path).in_parts(keys):
            self.assign(part)

    def update(self, name: str, places: np.ndarray, values: tf.Tensor) -> None:
        if name in self._owners:
            value = np.array(self._owners[name].read([name])[name])
            value[tuple(places.T)] = values.numpy()
            self.assign({name: value})


def _pieces_of(variable: Any) -> list[Piece]:
    """Return the parts of a partitioned variable, which is a list of them, or `variable` as its only part."""
    parts = variable if isinstance(variable, list) else [variable]
    return [Piece(part, part.initializer, part.initial_value) for part in parts]


# --- folders ------------------------------------------------------------------------------------------------------


def exports_in(base: str) -> list[str]:
    """Return the paths of the complete exports in `base`, oldest first; an empty list if the folder does not exist."""
    if not tf.io.gfile.isdir(base):
        return []
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(base)]
    stamps = [name for name in names if name.isdigit()]
    return [os.path.join(base, stamp) for stamp in sorted(stamps, key=int)]


def _temporary_folder(base: str) -> str:
    """Return an unused path `<base>/temp-<seconds since 1970>`; the number will be the name of the export."""
    # Larger than all numbers of exports, because programs take the largest for the newest.
    taken = [int(os.path.basename(path)) for path in exports_in(base)]
    first = max(int(time.time()), max(taken, default=0) + 1)
    for stamp in range(first, first + _ATTEMPTS):
        temporary = os.path.join(base, f"{TEMPORARY}{stamp}")
        final = os.path.join(base, str(stamp))
        if not tf.io.gfile.exists(temporary) and not tf.io.gfile.exists(final):
            return temporary
    raise RuntimeError(f"{base} has {_ATTEMPTS} unfinished exports. Delete the folders {TEMPORARY}* in it.")


def _publish(temporary: str, base: str) -> str:
    """Rename the folder of a complete export to its number and return the new path.

    TensorFlow Serving, which watches `base`, thus never sees an incomplete export.
    """
    stamp = int(os.path.basename(temporary).removeprefix(TEMPORARY))
    while tf.io.gfile.exists(os.path.join(base, str(stamp))):
        stamp += 1
    final = os.path.join(base, str(stamp))
    tf.io.gfile.rename(temporary, final)
    return final
