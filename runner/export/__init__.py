"""SavedModels: the graph, its signatures and what they read, and the exporters that write them.

`saved_model` writes one, with the values of its variables; `graph` builds its functions from a traced model_fn,
`outputs` the signatures of `EstimatorSpec.export_outputs`, `receivers` what is served (`ServingInputReceiver`).
`exporters` are the objects of an EvalSpec: latest, final, best.
"""
