"""SavedModels: graph, signatures, inputs of requests, and the exporters that write them during training.

`saved_model` writes a SavedModel with the values of its variables. `graph` builds its graph by calling model_fn.
`receivers` makes the placeholders that requests fill (`ServingInputReceiver`), and `outputs` the signatures of
`EstimatorSpec.export_outputs`. `session_values` holds values that no checkpoint has: those of a new model, or those
that a Scaffold's saver restores by its own code. `model_card` says what is known of a model, in a file of its folder.
`exporters` has the exporters of an EvalSpec: latest, final and best.
"""
