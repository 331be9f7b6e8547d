"""Every column of tf.feature_column, by input_layer and by linear_model."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data

COLOURS = ["red", "green", "blue"]
CITIES = ["Bern", "Oslo", "Riga", "Rome"]


def input_fn(mode):
    count = data.EXAMPLES
    features = {
        "age": data.numbers(count, 1) * 40 + 40,
        "size": data.numbers(count, 2, phase=1.0),
        "bucket": [[number % 5] for number in range(count)],
        "colour": [[[*COLOURS, "pink"][number % 4]] for number in range(count)],
        "city": [[[*CITIES, "Kyiv"][number * 3 % 5]] for number in range(count)],
        "home": [[CITIES[number * 7 % 4]] for number in range(count)],
        "code": [[f"code-{number * number % 11}"] for number in range(count)],
        "tags": [[COLOURS[number % 3], COLOURS[number * 5 % 3]] for number in range(count)],
        "weights": data.numbers(count, 2, phase=2.0),
    }
    labels = (data.numbers(count, 1, phase=3.0) > 0).astype("float32")
    return data.dataset(features, labels, mode)


def model_fn(features, labels, mode, params):
    fc = tf.feature_column
    age = fc.numeric_column("age", normalizer_fn=lambda value: value / 80.0)
    bucketized = fc.bucketized_column(fc.numeric_column("age"), [18.0, 30.0, 60.0])
    size = fc.numeric_column("size", shape=2)
    identity = fc.categorical_column_with_identity("bucket", 5)
    colour = fc.categorical_column_with_vocabulary_list("colour", COLOURS, num_oov_buckets=1)
    city, home = (
        fc.categorical_column_with_vocabulary_file(key, params["vocabulary"], 4, num_oov_buckets=1)
        for key in ("city", "home")
    )
    code = fc.categorical_column_with_hash_bucket("code", 7)
    crossed = fc.crossed_column([bucketized, "colour"], 13)
    tags = fc.weighted_categorical_column(fc.categorical_column_with_vocabulary_list("tags", COLOURS), "weights")
    dense = [
        age,
        size,
        bucketized,
        fc.indicator_column(identity),
        fc.indicator_column(tags),
        fc.embedding_column(colour, 3),
        fc.embedding_column(crossed, 2, combiner="sqrtn"),
        *fc.shared_embedding_columns([city, home], 2),
    ]
    sparse = [identity, colour, code, crossed, tags, bucketized, size]
    with tf.variable_scope("deep"):
        net = tf.layers.dense(fc.input_layer(features, dense), 4, activation=tf.nn.relu)
        logits = tf.layers.dense(net, 1)
    logits += fc.linear_model(features, sparse)
    loss = tf.losses.sigmoid_cross_entropy(labels, logits)
    metrics = {"auc": tf.metrics.auc(labels, tf.sigmoid(logits))}
    step = tf.train.get_global_step()
    deep = tf.train.AdagradOptimizer(0.1).minimize(loss, var_list=tf.trainable_variables("deep"))
    wide = tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001).minimize(
        loss, var_list=tf.trainable_variables("linear_model")
    )
    with tf.control_dependencies([deep, wide]):
        train_op = tf.assign_add(step, 1).op
    return tf.estimator.EstimatorSpec(mode, {"logits": logits}, loss, train_op, metrics)
