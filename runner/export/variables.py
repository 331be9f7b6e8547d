"""The values of an exported model's variables: those of a checkpoint, or of a new model that begins with another's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint import warm_start
from runner.checkpoint.reader import Reader, numbered
from runner.export.graph import ExportGraph
from runner.programs.ema import averages_in
from runner.programs.model import check_shapes
from runner.run_config import RunConfig
from runner.tracing.variable_request import VariableSpec

v1 = tf.compat.v1
_log = logging.getLogger(__name__)


def values_of(
    graphs: Sequence[ExportGraph], checkpoint: str | None, config: RunConfig, *, trains: bool
) -> dict[str, Any]:
    """Name -> value of each variable that one of `graphs` has.

    Args:
      checkpoint: its path; None: the model is new, and begins with what `config.warm_start` names.
      config: whether weights or their moving averages are exported.
      trains: one of the graphs goes on with training, for which the weights are what they are.

    Raises:
      ValueError: the checkpoint lacks a variable that model_fn asks for, or has it in another shape; there are no
        averages to export.
    """
    specs = {name: spec for graph in graphs for name, spec in graph.specs.items()}
    names = dict.fromkeys(name for graph in graphs for name in graph.variables)
    if checkpoint is None:
        return _new_values(graphs, config, specs)
    reader = Reader(checkpoint)
    renamed = numbered(reader, {name: spec.shape for name, spec in specs.items()})
    check_shapes(reader, {name: spec.shape for name, spec in specs.items() if name not in renamed})
    averaged: dict[str, str] = {}
    if config.ema_decay is not None and not trains:
        averaged = averages_in(reader, specs, config.ema_decay, "export")
        _log.info("Exported are the moving averages of the weights (ema_decay=%s).", config.ema_decay)
    sources = {name: renamed.get(name, averaged.get(name, name)) for name in names}
    values = reader.get_many(dict.fromkeys(sources.values()))
    return {name: values[source] for name, source in sources.items()}


def _new_values(graphs: Sequence[ExportGraph], config: RunConfig, specs: Mapping[str, VariableSpec]) -> dict[str, Any]:
    """Initial values, and over them those of the checkpoint of the warm start."""
    values: dict[str, Any] = {}
    for exported in graphs:
        new = {name: variable for name, variable in exported.variables.items() if name not in values}
        with exported.graph.as_default(), v1.Session(graph=exported.graph, config=_on_cpu()) as session:
            initial = tf.nest.map_structure(lambda variable: variable.initial_value, new)
            values |= {name: _joined(value, specs[name]) for name, value in session.run(initial).items()}

    def initial_value(name: str) -> np.ndarray:
        spec = specs[name]
        found: np.ndarray = values.get(name, np.zeros(spec.shape, spec.dtype.as_numpy_dtype))  # one is not exported
        return found

    if config.warm_start is not None:
        loaded = warm_start.load(config.warm_start, specs, initial_value).values
        values |= {name: value for name, value in loaded.items() if name in values}
    return values


def _joined(value: Any, spec: VariableSpec) -> Any:
    """A variable, or one of the parts that it was divided into, as it is saved."""
    if not isinstance(value, list):
        return value
    axis = next(axis for axis, size in enumerate(spec.shape) if value[0].shape[axis] != size)
    return np.concatenate(value, axis)


def _on_cpu() -> Any:
    """A session that takes no memory of a GPU: it only hands values on."""
    return v1.ConfigProto(device_count={"GPU": 0}, allow_soft_placement=True)
