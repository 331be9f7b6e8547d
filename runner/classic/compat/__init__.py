"""Make sources written for tf.estimator or TensorFlow 1 run on today's TensorFlow.

`names` lists every public name of tf.estimator 2.15, and `estimator_paths` its private modules. `old_modules` makes
modules of such tables, also of contrib's; `install` sets them on TensorFlow. `tf1_imports` lets `import tensorflow`
mean tensorflow.compat.v1 in sources written for TensorFlow 1, `tf1_operators` gives tensors the operators of TensorFlow
1 while a model_fn is called, and `tf1_queues` makes datasets of the queues of an input_fn. `check` reports what in a
source is unchanged, changed and unsupported; `differences` has the texts of its findings, and `source`,
`installed_names`, `packages` and `python2` find what it judges.
"""
