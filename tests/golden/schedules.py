"""Learning rates that follow the global step, each with a variable of its own; gradients in model_fn's own hands."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


def warmed_up(rate, step):
    """Grows over five steps, then is the rate of the schedule."""
    done = tf.cast(step, tf.float32) / 5.0
    return tf.cond(step < 5, lambda: rate * done, lambda: tf.identity(rate))


def rates(step):
    return {
        "exponential": tf.train.exponential_decay(0.1, step, 4, 0.7, staircase=True),
        "polynomial": tf.train.polynomial_decay(0.1, step, 6, 0.01, power=2.0, cycle=True),
        "piecewise": tf.train.piecewise_constant(step, [3, 9], [0.1, 0.05, 0.01]),
        "piecewise_decay": tf.train.piecewise_constant_decay(step, [5], [0.1, 0.02]),
        "cosine": tf.train.cosine_decay(0.1, step, 15, alpha=0.1),
        "restarts": tf.train.cosine_decay_restarts(0.1, step, 4, t_mul=1.5),
        "linear_cosine": tf.train.linear_cosine_decay(0.1, step, 15),
        "noisy": tf.train.noisy_linear_cosine_decay(0.1, step, 15, initial_variance=0.0),
        "natural": tf.train.natural_exp_decay(0.1, step, 3, 0.5),
        "inverse": tf.train.inverse_time_decay(0.1, step, 3, 0.5),
        "warm": warmed_up(tf.train.exponential_decay(0.1, step, 4, 0.7), step),
    }


def model_fn(features, labels, mode):
    step = tf.train.get_global_step()
    losses, updates, metrics = [], [], {}
    for name, rate in rates(step).items():
        with tf.variable_scope(name):
            weights = tf.get_variable("weights", [4, 1])
            predictions = tf.matmul(features, weights)
        losses.append(tf.reduce_mean(tf.square(predictions - labels)))
        metrics[name] = tf.metrics.mean_squared_error(labels, predictions)
        metrics["rate/" + name] = tf.metrics.mean(rate)
        optimizer = tf.train.GradientDescentOptimizer(rate)
        gradients, variables = zip(*optimizer.compute_gradients(losses[-1], [weights]), strict=True)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        updates.append(optimizer.apply_gradients(list(zip(gradients, variables, strict=True))))
        tf.summary.scalar("norm/" + name, norm)
    loss = tf.add_n(losses)
    with tf.control_dependencies(updates):
        train_op = tf.assign_add(step, 1)
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, metrics)
