"""A premade estimator: wide and deep, with its own names, slots and metrics."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import columns

input_fn = columns.input_fn


def estimator(model_dir, **config):
    fc = tf.feature_column
    age = fc.numeric_column("age", normalizer_fn=lambda value: value / 80.0)
    buckets = fc.bucketized_column(fc.numeric_column("age"), [18.0, 30.0, 60.0])
    code = fc.categorical_column_with_hash_bucket("code", 7)
    return tf.estimator.DNNLinearCombinedClassifier(
        model_dir=model_dir,
        linear_feature_columns=[buckets, code, fc.crossed_column([buckets, "colour"], 13)],
        linear_optimizer=tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
        dnn_feature_columns=[age, fc.embedding_column(code, 3)],
        dnn_optimizer=tf.train.AdagradOptimizer(0.1),
        dnn_hidden_units=[6, 4],
        config=tf.estimator.RunConfig(**config),
    )
