"""The heads of tf.estimator: loss, predictions, metrics and exported outputs from a model's logits.

`base` has Head, whose `create_estimator_spec` a model_fn calls to make its EstimatorSpec. `classification`,
`multi_label` and `regression` define labels, losses and metrics; `multi_head` joins several heads on one model.
`checks` checks logits, labels and weights, and reduces losses. `metrics` makes the Keras metrics. compat/names.py maps
`tf.estimator.BinaryClassHead` to its place.
"""
