"""The names of tf.estimator on today's TensorFlow, and what old sources need beside names.

`names` lists every public name of 2.15 and `install` puts them on TensorFlow; `module_paths` serves the modules that
were not public. `tf1_imports` gives TensorFlow 1 to sources written for it, `tf1_operators` the operators of its
tensors. `check` reads a source and says what works; `differences` are its answers.
"""
