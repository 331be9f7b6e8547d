"""`tf.contrib` of TensorFlow 1.15, as far as tf.estimator programs used it.

`names` lists every supported name and where it is, and for others what to use instead. `modules` makes `tf.contrib` and
`tensorflow.contrib`, packages that look a name up when it is used. Most of layers, framework, metrics and slim comes
from the package tf_slim; the rest is here, one file per part of contrib.
"""
