"""The heads of tf.estimator: loss, predictions, metrics and exported outputs from a model's logits.

`base` has Head, whose `create_estimator_spec` a model_fn calls to make its EstimatorSpec. `classification`,
`multi_label` and `regression` define labels, losses and metrics; `multi_head` joins several heads on one model.
`checks` checks logits, labels and weights, and reduces losses. `metrics` makes the Keras metrics. The table that maps
`tf.estimator.BinaryClassHead` and the like to these classes is in compat/names.py.
"""
