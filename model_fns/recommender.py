"""A recommender: a vector for each user and each item, whose product says how much the one likes the other."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Predicts ratings.

    Args:
      features: `user` and `item`, int64 [batch], from 0 to num_users and num_items.
      labels: float32 [batch], the ratings.
      params: num_users, num_items, dimension (of the vectors), mean_rating, learning_rate.
    """
    user, item = features["user"], features["item"]
    # On parameter servers each server has a part of the rows, and a step fetches and updates those of its batch alone.
    user_vectors = keras.layers.Embedding(params.num_users, params.dimension, _small(1), name="user_vectors")
    item_vectors = keras.layers.Embedding(params.num_items, params.dimension, _small(2), name="item_vectors")
    user_habits = keras.layers.Embedding(params.num_users, 1, "zeros", name="user_habits")
    item_habits = keras.layers.Embedding(params.num_items, 1, "zeros", name="item_habits")
    taste = tf.reduce_sum(user_vectors(user) * item_vectors(item), axis=1)
    rating = params.mean_rating + taste + user_habits(user)[:, 0] + item_habits(item)[:, 0]
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"user": user, "item": item, "rating": rating})

    return EstimatorSpec(
        mode,
        loss=tf.square(rating - labels),  # per example
        # Adagrad: each row has a step size of its own, which falls as the row is trained.
        optimizer=keras.optimizers.Adagrad(params.learning_rate, initial_accumulator_value=1e-6),
        eval_metric_ops={
            "rmse": _rmse(labels, rating),
            "baseline_rmse": _rmse(labels, tf.fill(tf.shape(labels), params.mean_rating)),
        },
    )


def _small(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.1, seed=seed)


def _rmse(labels: tf.Tensor, predicted: tf.Tensor) -> keras.Metric:
    """Return the root of the mean squared error over all examples of an evaluation."""
    metric = keras.metrics.RootMeanSquaredError()
    metric.update_state(labels, predicted)
    return metric
