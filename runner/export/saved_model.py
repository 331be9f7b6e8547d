"""Writes a SavedModel: the graph of model_fn, the values of a checkpoint, the files that its tables are filled from.

It is in the format that tf.estimator wrote, which `tf.saved_model.load`, `tf.compat.v1.saved_model.load`,
`saved_model_cli` and TensorFlow Serving read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint import warm_start
from runner.checkpoint.reader import Reader, numbered
from runner.export.graph import ExportGraph, Receiver, build_graph
from runner.export.outputs import DEFAULT
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.ema import averages_in
from runner.programs.model import check_shapes
from runner.run_config import RunConfig
from runner.tf_private.replaced import Overlay
from runner.tf_private.tensor_bundle import Entry, write_in_parts
from runner.tracing.variable_request import VariableSpec

v1 = tf.compat.v1
_log = logging.getLogger(__name__)

TAGS = {ModeKeys.TRAIN: ["train"], ModeKeys.EVAL: ["eval"], ModeKeys.PREDICT: ["serve"]}
"""Mode -> the tags by which its graph is found in a SavedModel."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A SavedModel that was written.

    Attributes:
      signatures: name -> its inputs and outputs, as a person reads them.
      tensors: of the default signature: "inputs" and "outputs" -> name -> [dtype, shape with -1]; those that are dense.
    """

    path: str
    signatures: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Sequence[Any]]]


TEMPORARY = "temp-"
_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the values of an exported model come from.

    Attributes:
      model_call: (features, labels, mode) -> spec.
      checkpoint: its path; None: the model is new, and begins with what `config.warm_start` names.
      config: the seed, and whether weights or their moving averages are exported.
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
    """Writes `base`/<seconds since 1970>. It is whole from the moment that it is there.

    Args:
      receiver_fns: mode -> what receives its inputs; a graph each, tagged train, eval or serve.
      assets_extra: path below `assets.extra` -> the file that is copied there.
      as_text: saved_model.pbtxt in place of saved_model.pb.

    Raises:
      ValueError: no mode, or what `build_graph` raises; the checkpoint lacks a variable; a file is not there.
    """
    modes = [mode for mode in TAGS if receiver_fns.get(mode) is not None]
    if not modes:
        raise ValueError(
            f"no receiver function is given for any of the modes {', '.join(map(repr, TAGS))}: there is nothing to "
            "export."
        )
    extra = assets_extra or {}
    _check_extra(extra)
    is_new, temporary = source.checkpoint is None, _temporary_folder(base)
    try:
        with _without_advice():
            graphs = {
                mode: build_graph(
                    source.model_call, receiver_fns[mode], mode, seed=source.config.seed, with_initial_values=is_new
                )
                for mode in modes
            }
            builder = v1.saved_model.Builder(temporary)
            for mode, graph in graphs.items():
                _add(builder, graph, TAGS[mode], is_first=mode == modes[0])
            builder.save(as_text)
            parts = values_of(list(graphs.values()), source.checkpoint, source.config, trains=ModeKeys.TRAIN in modes)
        write_in_parts(Path(temporary) / "variables" / "variables", parts)
        for name, file in extra.items():
            target = os.path.join(temporary, "assets.extra", name)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(file, target)
        path = _published(temporary, base)
    except BaseException:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)
        raise
    signatures = {name: one for graph in graphs.values() for name, one in graph.signatures.items()}
    described = {
        name: f"{', '.join(sorted(one.inputs))} -> {', '.join(sorted(one.outputs))}" for name, one in signatures.items()
    }
    return Written(path, described, _tensors(signatures.get(DEFAULT)))


def _add(builder: Any, exported: ExportGraph, tags: Sequence[str], *, is_first: bool) -> None:
    given: dict[str, Any] = {
        "assets_collection": exported.assets,
        "clear_devices": True,  # a serving host need not have the devices of this one
        "main_op": exported.init_op,
        "strip_default_attrs": True,
    }
    with exported.graph.as_default():
        saver = v1.train.Saver(dict(exported.variables), sharded=True, allow_empty=True)
        # The builder would take the values out of a session. They are written beside it, from where they are.
        saver = Overlay(saver, save=lambda *args, **kwargs: None)
        if is_first:
            builder.add_meta_graph_and_variables(None, tags, dict(exported.signatures), saver=saver, **given)
        else:
            builder.add_meta_graph(tags, dict(exported.signatures), saver=saver, **given)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keeps TensorFlow from advising against sessions, once for each of their names."""
    logger = logging.getLogger("tensorflow")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tensors(signature: Any) -> dict[str, dict[str, Sequence[Any]]]:
    """What a request of this signature holds, and what it is answered with; nothing where there is no signature."""
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
    """Return the value of each variable that one of `graphs` has, in parts that are read when they are asked for.

    They are one part where the model is new, and where a Scaffold's saver has a `restore` of its own.

    Args:
      checkpoint: its path; None: the model is new, and begins with what `config.warm_start` names.
      config: whether weights or their moving averages are exported.
      trains: one of the graphs goes on with training, for which the weights are what they are.

    Raises:
      ValueError: the checkpoint lacks a variable that model_fn asks for, or has it in another shape; there are no
        averages to export.
    """
    names = dict.fromkeys(name for graph in graphs for name in graph.variables)
    if checkpoint is None:
        specs = {name: spec for graph in graphs for name, spec in graph.specs.items()}
        return _at_once(names, _new_values(graphs, config, specs))
    reader = Reader(checkpoint)
    if config.ema_decay is not None and not trains:
        _log.info("Exported are the moving averages of the weights (ema_decay=%s).", config.ema_decay)
    _check_keys(graphs)
    if graphs[0].restore is not None:
        return _at_once(names, _restored(reader, graphs[0], graphs[0].restore))
    sources: dict[str, str] = {}
    for graph in graphs:
        sources |= _sources_in(reader, graph, config, trains=trains)
    return reader.entries_in_parts({name: sources[name] for name in names})


def _at_once(names: Iterable[str], values: Mapping[str, Any]) -> Iterator[Sequence[Entry]]:
    return iter([[Entry(name, "", values[name]) for name in names]])


def _check_keys(graphs: Sequence[ExportGraph]) -> None:
    """Check that a variable has one value in all graphs: a SavedModel has no place for two."""
    sources = [{name: graph.keys.get(name, name) for name in graph.variables} for graph in graphs]
    differ = [
        name for one in sources for name, key in one.items() if any(other.get(name, key) != key for other in sources)
    ]
    if differ or (len(graphs) > 1 and any(graph.restore is not None for graph in graphs)):
        raise ValueError(
            f"the savers of model_fn's Scaffolds read {', '.join(dict.fromkeys(differ)) or 'variables'} in one mode "
            "otherwise than in another, and a SavedModel has one value for each. Export the modes one by one: "
            "export_saved_model(..., experimental_mode=)."
        )


def _restored(
    reader: Reader, graph: ExportGraph, restore: Callable[[str, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Name -> value of each variable of one graph, as the `restore` of its Scaffold's saver leaves it."""
    renamed = _renamed(reader, graph)
    there = {name: renamed.get(name, name) for name in graph.specs if reader.has(renamed.get(name, name))}
    check_shapes(reader, {name: graph.specs[name].shape for name in there}, keys=renamed)
    values = reader.get_many(dict.fromkeys(there.values()))
    return restore(reader.path, {name: values[key] for name, key in there.items()})


def _sources_in(reader: Reader, graph: ExportGraph, config: RunConfig, *, trains: bool) -> dict[str, str]:
    """Name of each variable of one graph -> its name in the checkpoint."""
    renamed = _renamed(reader, graph)
    check_shapes(reader, {name: spec.shape for name, spec in graph.specs.items()}, keys=renamed)
    averaged: dict[str, str] = {}
    if config.ema_decay is not None and not trains:
        averaged = averages_in(reader, graph.specs, config.ema_decay, "export")
    return {name: renamed.get(name, averaged.get(name, name)) for name in graph.variables}


def _renamed(reader: Reader, graph: ExportGraph) -> dict[str, str]:
    """Name of a variable -> its name in the checkpoint, where that is another: by the keys that a saver has."""
    known = {name: spec.shape for name, spec in graph.specs.items() if name not in graph.keys}
    return {**numbered(reader, known), **graph.keys}


def _new_values(graphs: Sequence[ExportGraph], config: RunConfig, specs: Mapping[str, VariableSpec]) -> dict[str, Any]:
    """Initial values, and over them those of the checkpoint of the warm start."""
    values: dict[str, Any] = {}
    on_cpu = v1.ConfigProto(device_count={"GPU": 0}, allow_soft_placement=True)  # sessions only hand values on
    for exported in graphs:
        new = {name: variable for name, variable in exported.variables.items() if name not in values}
        with exported.graph.as_default(), v1.Session(graph=exported.graph, config=on_cpu) as session:
            initial = tf.nest.map_structure(lambda variable: variable.initial_value, new)
            values |= {name: _joined(value, specs[name]) for name, value in session.run(initial).items()}

    def initial_value(name: str) -> np.ndarray:
        spec = specs[name]
        found: np.ndarray = values.get(name, np.zeros(spec.shape, spec.dtype.as_numpy_dtype))  # one is not exported
        return found

    if config.warm_start is not None:

        def take(loaded: Mapping[str, np.ndarray]) -> None:
            values.update({name: value for name, value in loaded.items() if name in values})

        warm_start.load(config.warm_start, specs, initial_value, take)
    return values


def _joined(value: Any, spec: VariableSpec) -> Any:
    """A variable, or one of the parts that it was divided into, as it is saved."""
    if not isinstance(value, list):
        return value
    axis = next(axis for axis, size in enumerate(spec.shape) if value[0].shape[axis] != size)
    return np.concatenate(value, axis)


# --- folders ------------------------------------------------------------------------------------------------------


def exports_in(base: str) -> list[str]:
    """Paths of the whole exports in `base`, the oldest first; none where there is no such folder."""
    if not tf.io.gfile.isdir(base):
        return []
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(base)]
    return [os.path.join(base, name) for name in sorted((name for name in names if name.isdigit()), key=int)]


def _temporary_folder(base: str) -> str:
    """A path that is not there yet, whose name says what the export will be called."""
    taken = [int(os.path.basename(path)) for path in exports_in(base)]
    stamp = max(int(time.time()), max(taken, default=0) + 1)
    for attempt in range(_ATTEMPTS):
        temporary = os.path.join(base, f"{TEMPORARY}{stamp + attempt}")
        if not tf.io.gfile.exists(temporary) and not tf.io.gfile.exists(os.path.join(base, str(stamp + attempt))):
            return temporary
    raise RuntimeError(f"{base} has {_ATTEMPTS} exports that are under way: remove its folders {TEMPORARY}*.")


def _published(temporary: str, base: str) -> str:
    """Gives a whole export its name: TensorFlow Serving, which watches `base`, never sees half of one."""
    stamp = int(os.path.basename(temporary).removeprefix(TEMPORARY))
    while tf.io.gfile.exists(os.path.join(base, str(stamp))):
        stamp += 1
    final = os.path.join(base, str(stamp))
    tf.io.gfile.rename(temporary, final)
    return final


def _check_extra(files: Mapping[str, str]) -> None:
    for name, file in files.items():
        if not tf.io.gfile.exists(file):
            raise ValueError(f"assets_extra[{name!r}]={file}: there is no such file.")
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"assets_extra[{name!r}]: name a path below the folder assets.extra.")
