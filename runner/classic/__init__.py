"""The classic API on the runner: `tf.estimator`, `tf.compat.v1.estimator` and `tf.layers` of TensorFlow 2.15, and
`tf.contrib` of 1.15.

    import runner.classic             # first, and once
    import tensorflow.compat.v1 as tf

From then on these names resolve, on the engine of this package. TensorFlow itself is imported by whoever uses it.
Where tf_keras is installed and TensorFlow has not been imported yet, `tf.keras` is Keras 2, as it was for such code;
TF_USE_LEGACY_KERAS=0 in the environment keeps Keras 3.
"""

from __future__ import annotations

from runner.classic.compat import install

install.install()
