"""The premade estimators: `estimators` has those of tf.estimator, `v1` those of tf.compat.v1.estimator.

`signatures` is the table of their arguments. `model_fns` has their model functions, which add the logits of `logits`
and hand them to a head; `layers` makes the variables under the names that tf.estimator gave them. `column_specs` makes
feature columns of a config.
"""
