"""The heads of tf.estimator: loss, predictions, metrics and exported outputs from the logits of a model.

`base` has Head, what all of them share: a model_fn calls `create_estimator_spec` and returns its EstimatorSpec.
`classification`, `multi_label` and `regression` say what a label is, what a wrong prediction costs, and what is
measured; `multi_head` joins several heads on one model. `checks` checks logits, labels and weights, and reduces losses;
`metrics` makes the Keras metrics. compat/names.py says where `tf.estimator.BinaryClassHead` is.
"""
