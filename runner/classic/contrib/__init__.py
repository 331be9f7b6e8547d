"""`tf.contrib` of TensorFlow 1.15, as far as programs of tf.estimator used it.

`names` lists every name that is served: where it is, or what to use instead. `modules` makes `tf.contrib` and
`tensorflow.contrib` of that list, as packages that look a name up when it is used. Most of layers, framework, metrics
and slim is the package tf_slim; what it does not have is here, a file for each part of contrib.
"""
