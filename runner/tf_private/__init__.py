"""Every private name of TensorFlow, Keras and tf_keras that the runner uses, one file per subsystem, and nothing else.

README.md lists them with the reason why no public name serves, and the versions; the docstring or comment of each says
what to do when it moves. `tests/tf_private/test_private_names.py` fails with its name when it does.

`replaced` is the only way to replace one of their attributes during a trace. `legacy_keras` does not import TensorFlow,
so that the command line can use it. This package imports no other package of the runner.
"""
