"""`tf.contrib.lookup`: the functions had moved into TensorFlow before contrib went, and are there still."""

from __future__ import annotations

from runner.tf_private import tf_estimator

tables = tf_estimator.lookup_tables()
