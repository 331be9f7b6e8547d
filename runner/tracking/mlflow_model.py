"""The code with which MLflow runs an exported model. Each model contains a copy, so this package is not needed there.

`mlflow.pyfunc.load_model(uri).predict(...)` takes the inputs of the signature `serving_default` by name, as a dict of
arrays `[batch, ...]` or a DataFrame of columns; or, if there is one input, an array. It returns a dict of arrays
`[batch, ...]`.
"""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np


class ServedModel(mlflow.pyfunc.PythonModel):
    """A SavedModel that answers by its default signature."""

    def load_context(self, context: Any) -> None:
        import tensorflow as tf  # imported here, because logging the model does not need it

        self._model = tf.saved_model.load(context.artifacts["saved_model"], tags=["serve"])
        self._signature = self._model.signatures["serving_default"]
        self._specs = self._signature.structured_input_signature[1]
        self._tensor = tf.constant

    # No type hints, because MLflow 3.17 would take them for a signature.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        if isinstance(model_input, np.ndarray | list):
            (name,) = self._specs
            model_input = {name: model_input}
        inputs = {}
        for name, spec in self._specs.items():
            inputs[name] = self._tensor(_array(model_input[name]), spec.dtype)
        outputs = self._signature(**inputs)
        return {name: value.numpy() for name, value in outputs.items()}


def _array(value: Any) -> Any:
    """Return a column whose cells are lists as one array."""
    array = np.asarray(value)
    has_lists = array.dtype == np.dtype(object) and array.size > 0 and not isinstance(array.flat[0], str | bytes)
    if not has_lists:
        return array
    return np.stack([np.asarray(cell) for cell in array])


mlflow.models.set_model(ServedModel())
