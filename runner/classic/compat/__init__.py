"""Make sources written for tf.estimator or TensorFlow 1 run on today's TensorFlow.

`names` lists every public name of tf.estimator 2.15, and `install` sets them on TensorFlow; `module_paths` imports its
private modules. `tf1_imports` gives TensorFlow 1 to sources written for it, `tf1_operators` the operators of its
tensors. `check` reads a source and reports what works; `differences` has its findings.
"""
