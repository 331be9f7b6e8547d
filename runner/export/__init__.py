"""SavedModels: the graph, its signatures and what they read, and the exporters that write them.

`saved_model` writes one; `graph` builds its functions from a traced model_fn, `outputs` the signatures of
`EstimatorSpec.export_outputs`, `receivers` what is served (`ServingInputReceiver`), `variables` the values it holds.
`exporters` are the objects of an EvalSpec: latest, final, best.
"""
