"""Every private name of TensorFlow, Keras and tf_keras that the runner uses, one file a subsystem, and nothing else.

Written against TensorFlow 2.21, Keras 3.15 and tf_keras 2.21. Beside each name stands why no public one serves, and
what to do when it moves. `tests/tf_private/test_private_names.py` fails first, and by name, when one is gone.

`replaced` puts something in the place of an attribute of theirs for the length of a trace; nothing else does.

`legacy_keras` is free of TensorFlow, for the rooms that run before it is imported. This room imports none of ours.
"""
