"""A script for tf.estimator, as its users wrote them: a table of many rows; prints its steps per second.

Runs as it stands on TensorFlow 2.15, and as `python -m runner.classic table_script.py` on today's; with two workers if
TF_CONFIG says so. Arguments: rows of the table; "ids" or "column", which is how they are looked up; steps; model_dir.
"""

import logging
import os
import sys
import time

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
ROWS, KIND, STEPS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
IDS, WIDTH = 2048, 64
EACH = max(1, STEPS // 20)


def input_fn(input_context=None):
    num, index = (input_context.num_input_pipelines, input_context.input_pipeline_id) if input_context else (1, 0)
    rng = np.random.RandomState(index)
    size = IDS // num
    ids = rng.randint(0, ROWS, [16, size])
    labels = rng.randn(16, size).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(({"id": ids}, labels)).repeat().prefetch(2)


def model_fn(features, labels, mode):
    if KIND == "column":
        column = tf.feature_column.categorical_column_with_identity("id", ROWS)
        vectors = tf1.feature_column.input_layer(features, [tf.feature_column.embedding_column(column, WIDTH)])
    else:
        initial = tf1.random_normal_initializer(stddev=0.1)
        vectors = tf.nn.embedding_lookup(tf1.get_variable("table", [ROWS, WIDTH], initializer=initial), features["id"])
    loss = tf.reduce_mean((tf.reduce_sum(vectors, 1) - labels) ** 2)
    train_op = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class Logged(logging.Handler):
    """Keeps the times at which speeds are logged."""

    def __init__(self):
        super().__init__()
        self.times = []

    def emit(self, record):
        if "global_step/sec: " in record.getMessage():
            self.times.append(time.perf_counter())


def main():
    logged = Logged()
    tf1.logging.set_verbosity(tf1.logging.INFO)
    tf.get_logger().handlers[:] = [logged]
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else None
    config = tf.estimator.RunConfig(
        tf_random_seed=1,
        train_distribute=strategy,
        save_summary_steps=None,
        log_step_count_steps=EACH,
        save_checkpoints_steps=10**9,
    )
    estimator = tf.estimator.Estimator(model_fn, sys.argv[4], config)
    train = tf.estimator.TrainSpec(input_fn, max_steps=STEPS)
    tf.estimator.train_and_evaluate(estimator, train, tf.estimator.EvalSpec(input_fn, steps=1))
    # Steps of one loop are logged together, at its end; the first loops are short. Only the chief logs.
    times = logged.times
    ends = [n for n in range(len(times)) if n + 1 == len(times) or times[n + 1] - times[n] > 0.01]
    if ends:
        first = next((n for n in ends[:-1] if n >= 3), 0)
        print("steps per second:", EACH * (ends[-1] - first) / (times[ends[-1]] - times[first]), flush=True)


if __name__ == "__main__":
    main()
