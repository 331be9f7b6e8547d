"""SavedModels: graph, signatures, request receivers, and the exporters that write them.

`saved_model` writes a SavedModel with the values of its variables. `graph` builds its functions from a traced model_fn,
`outputs` the signatures of `EstimatorSpec.export_outputs`, and `receivers` what requests fill (`ServingInputReceiver`).
`session_values` holds values that are in no checkpoint: those of a new model, or of a saver's own `restore`.
`exporters` are the objects of an EvalSpec: latest, final, best.
"""
