"""`tf.contrib.predictor`: call a SavedModel with arrays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class Predictor:
    """A signature of a SavedModel. A call takes a dict input name -> values, and returns a dict output name -> array.

    Attributes:
      feed_tensors: input name -> TensorSpec.
      fetch_tensors: output name -> TensorSpec.
    """

    def __init__(self, export_dir: str, signature_def_key: str | None, tags: Any) -> None:
        if isinstance(tags, str):
            tags = tags.split(",")
        self._model = tf.saved_model.load(export_dir, None if tags is None else list(tags))
        name = signature_def_key or tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
        if name not in self._model.signatures:
            raise ValueError(
                f"Got signature_def_key {name!r}. Available signatures are {sorted(self._model.signatures)}."
            )
        self._function = self._model.signatures[name]
        self.feed_tensors: Mapping[str, Any] = self._function.structured_input_signature[1]
        self.fetch_tensors: Mapping[str, Any] = self._function.structured_outputs

    def __call__(self, input_dict: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(input_dict) - set(self.feed_tensors))
        if unknown:
            raise ValueError(f"Got unexpected keys in input_dict: {unknown}; expected {sorted(self.feed_tensors)}.")
        inputs = {name: tf.constant(value, self.feed_tensors[name].dtype) for name, value in input_dict.items()}
        outputs = self._function(**inputs)
        return {name: value.numpy() for name, value in outputs.items()}


def from_saved_model(
    export_dir: str, signature_def_key: str | None = None, signature_def: Any = None, input_names: Any = None,
    output_names: Any = None, tags: Any = None, graph: Any = None, config: Any = None,
) -> Predictor:  # fmt: skip
    """Return a Predictor for a SavedModel.

    Args:
      export_dir: folder of the SavedModel.
      signature_def_key: name of the signature; None: `serving_default`.
      signature_def: not supported; must be None.
      input_names: not supported; must be None.
      output_names: not supported; must be None.
      tags: tags of the graph in the SavedModel, separated by commas; None: the only graph.
      graph: ignored.
      config: ignored; it configured a session.
    """
    del graph, config
    if signature_def is not None or input_names is not None or output_names is not None:
        raise ValueError(
            "from_saved_model: signature_def, input_names and output_names are not supported. Use signature_def_key."
        )
    return Predictor(export_dir, signature_def_key, tags)


def from_estimator(
    estimator: Any, serving_input_receiver_fn: Any, output_key: str | None = None, graph: Any = None, config: Any = None
) -> Predictor:
    """Return a Predictor for an Estimator's latest checkpoint.

    Args:
      estimator: the Estimator.
      serving_input_receiver_fn: as in `Estimator.export_saved_model`.
      output_key: name of the signature; None: `serving_default`.
      graph: ignored.
      config: ignored; it configured a session.
    """
    del graph, config
    with tempfile.TemporaryDirectory() as folder:
        exported = estimator.export_saved_model(folder, serving_input_receiver_fn)
        return Predictor(os.fsdecode(exported), output_key, None)
