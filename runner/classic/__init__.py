"""The classic API on the runner: `tf.estimator`, `tf.compat.v1.estimator` and `tf.layers` of TensorFlow 2.15, and
`tf.contrib` of 1.15.

    import runner.classic             # once, before TensorFlow's names are used
    import tensorflow.compat.v1 as tf

After this import, these names exist and run on the runner's engine. The import does not import TensorFlow. If tf_keras
is installed and TensorFlow has not been imported yet, `tf.keras` becomes Keras 2, which such code expects;
TF_USE_LEGACY_KERAS=0 in the environment keeps Keras 3.
"""

from __future__ import annotations

from runner.classic.compat import install

install.install()
