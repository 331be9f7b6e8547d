"""A script for tf.estimator, as its users wrote them: a small MLP of tf.layers, `train` twice, each call timed.

Runs as it stands on TensorFlow 2.15, and as `python -m runner.classic estimator_script.py` on today's.
"""

import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1


def input_fn():
    rng = np.random.default_rng(1)
    features = rng.normal(size=[320, 16]).astype(np.float32)
    labels = features @ rng.normal(size=[16, 1]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    return dataset.repeat().batch(32, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def model_fn(features, labels, mode):
    hidden = tf1.layers.dense(features, 16, activation=tf.nn.relu)
    predictions = tf1.layers.dense(hidden, 1)
    loss = tf1.losses.mean_squared_error(labels, predictions)
    train_op = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def main():
    estimator = tf.estimator.Estimator(model_fn, tempfile.mkdtemp(), tf.estimator.RunConfig(tf_random_seed=1))
    for _ in range(2):
        started, used = time.perf_counter(), time.process_time()
        estimator.train(input_fn, steps=int(sys.argv[1]))
        print(f"train took {time.perf_counter() - started} s, {time.process_time() - used} s of CPU", flush=True)


if __name__ == "__main__":
    main()
