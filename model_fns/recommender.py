"""A recommender with a vector for each user and item, whose dot product predicts the rating."""

from __future__ import annotations

import keras
import tensorflow as tf

import runner
from runner import EstimatorSpec, ModeKeys, Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Predict ratings.

    Args:
      features: `user` and `item`, int64 `[batch]`, below num_users and num_items.
      labels: float32 `[batch]`, the ratings.
      mode: one of ModeKeys.
      params: num_users, num_items, dimension (of the vectors), mean_rating, learning_rate.
    """
    user, item = features["user"], features["item"]
    # With parameter servers, each has some of the rows, and a step only fetches and updates the rows of its batch.
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
        # Adagrad gives each row its own step size, which decreases the more the row is trained.
        optimizer=keras.optimizers.Adagrad(params.learning_rate, initial_accumulator_value=1e-6),
        eval_metric_ops={
            "rmse": _rmse(labels, rating),
            "baseline_rmse": _rmse(labels, tf.fill(tf.shape(labels), params.mean_rating)),
        },
    )


def retrieval_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Predict which item of a batch a user liked: the items of all other examples are the wrong ones.

    Args:
      features, labels, mode: as in `model_fn`; what is rated above the mean was liked, other ratings do not count.
      params: num_users, num_items, dimension, mean_rating, learning_rate.
    """
    user, item = features["user"], features["item"]
    queries = keras.layers.Embedding(params.num_users, params.dimension, _small(1), name="user_vectors")(user)
    items = keras.layers.Embedding(params.num_items, params.dimension, _small(2), name="item_vectors")(item)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"user": user, "item": item, "score": tf.reduce_sum(queries * items, 1)})

    # On several replicas, the items of all of them: as many wrong ones as on one replica.
    scores = tf.matmul(queries, runner.all_gather(items), transpose_b=True)
    rows = tf.shape(queries)[0]
    right = runner.replica_offset(rows) + tf.range(rows)
    is_liked = tf.cast(labels > params.mean_rating, tf.float32)
    return EstimatorSpec(
        mode,
        loss=tf.nn.sparse_softmax_cross_entropy_with_logits(right, scores) * is_liked,
        loss_weight=is_liked,
        optimizer=keras.optimizers.Adagrad(params.learning_rate, initial_accumulator_value=1e-6),
    )


def _small(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.1, seed=seed)


def _rmse(labels: tf.Tensor, predicted: tf.Tensor) -> keras.Metric:
    """Return a metric: the root mean squared error over all examples of an evaluation."""
    metric = keras.metrics.RootMeanSquaredError()
    metric.update_state(labels, predicted)
    return metric
