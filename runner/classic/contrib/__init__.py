"""The parts of TensorFlow 1.15's `tf.contrib` that tf.estimator programs used.

`names` lists where each supported name is defined, and what to use instead of the others; compat/old_modules.py makes
`tf.contrib` and `tensorflow.contrib` of it. Most of layers, framework, metrics and slim comes from the package tf_slim;
the rest is here, in one file per part of contrib.
"""
