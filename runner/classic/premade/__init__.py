"""The premade estimators: those of tf.estimator in `estimators`, those of tf.compat.v1.estimator in `v1`.

`signatures` is the table of their arguments. `model_fns` has their model functions, which add up the logits of a
model's parts and pass them to a head. `logits` has these parts: linear, network, baseline. `layers` makes variables
with tf.estimator's names, so that TensorFlow 2.15 and the runner can read each other's checkpoints.
"""
