"""All of tf.metrics, and all of tf.losses."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.dataset(
        data.numbers(data.EXAMPLES, 4), (data.numbers(data.EXAMPLES, 3, phase=1.0).argmax(1)).astype("int64"), mode
    )


def metrics_of(labels, logits):
    one_hot = tf.one_hot(labels, 3)
    probabilities = tf.nn.softmax(logits)
    positive, chance = tf.cast(tf.equal(labels, 1), tf.float32), probabilities[:, 1]
    guess = chance > 0.34
    classes, top = tf.argmax(logits, 1), tf.nn.top_k(logits, 2).indices
    top = tf.cast(top, tf.int64)
    thresholds, k = [0.2, 0.34, 0.5], 2
    weights = tf.cast(labels + 1, tf.float32)
    column = tf.expand_dims(labels, 1)
    m = tf.metrics
    return {
        "accuracy": m.accuracy(labels, classes, weights),
        "auc": m.auc(positive, chance, num_thresholds=50),
        "auc_pr": m.auc(positive, chance, curve="PR", summation_method="careful_interpolation"),
        "average_precision_at_k": m.average_precision_at_k(column, logits, k),
        "false_negatives": m.false_negatives(positive, guess),
        "false_negatives_at_thresholds": m.false_negatives_at_thresholds(positive, chance, thresholds),
        "false_positives": m.false_positives(positive, guess),
        "false_positives_at_thresholds": m.false_positives_at_thresholds(positive, chance, thresholds),
        "mean": m.mean(logits),
        "mean_absolute_error": m.mean_absolute_error(one_hot, probabilities),
        "mean_cosine_distance": m.mean_cosine_distance(
            tf.nn.l2_normalize(one_hot, 1), tf.nn.l2_normalize(probabilities, 1), dim=1
        ),
        "mean_iou": m.mean_iou(labels, classes, 3),
        "mean_per_class_accuracy": m.mean_per_class_accuracy(labels, classes, 3),
        "mean_relative_error": m.mean_relative_error(one_hot, probabilities, normalizer=one_hot + 1.0),
        "mean_squared_error": m.mean_squared_error(one_hot, probabilities, tf.expand_dims(weights, 1)),
        "mean_tensor": m.mean_tensor(logits),
        "percentage_below": m.percentage_below(chance, 0.34),
        "precision": m.precision(positive, guess),
        "precision_at_k": m.precision_at_k(column, logits, k, class_id=1),
        "precision_at_thresholds": m.precision_at_thresholds(positive, chance, thresholds),
        "precision_at_top_k": m.precision_at_top_k(column, top),
        "recall": m.recall(positive, guess),
        "recall_at_k": m.recall_at_k(column, logits, k),
        "recall_at_thresholds": m.recall_at_thresholds(positive, chance, thresholds),
        "recall_at_top_k": m.recall_at_top_k(column, top),
        "root_mean_squared_error": m.root_mean_squared_error(one_hot, probabilities),
        "sensitivity_at_specificity": m.sensitivity_at_specificity(positive, chance, 0.6),
        "sparse_average_precision_at_k": m.sparse_average_precision_at_k(column, logits, k),
        "sparse_precision_at_k": m.sparse_precision_at_k(column, logits, k),
        "specificity_at_sensitivity": m.specificity_at_sensitivity(positive, chance, 0.6),
        "true_negatives": m.true_negatives(positive, guess),
        "true_negatives_at_thresholds": m.true_negatives_at_thresholds(positive, chance, thresholds),
        "true_positives": m.true_positives(positive, guess),
        "true_positives_at_thresholds": m.true_positives_at_thresholds(positive, chance, thresholds),
    }


def add_losses(labels, logits):
    one_hot = tf.one_hot(labels, 3)
    probabilities = tf.nn.softmax(logits)
    positive = tf.cast(tf.equal(labels, 1), tf.float32)
    tf.losses.absolute_difference(one_hot, probabilities, weights=0.5)
    tf.losses.compute_weighted_loss(tf.square(logits), weights=0.01, reduction=tf.losses.Reduction.MEAN)
    tf.losses.cosine_distance(one_hot, tf.nn.l2_normalize(probabilities, 1), axis=1)
    tf.losses.hinge_loss(positive, logits[:, 1])
    tf.losses.huber_loss(one_hot, probabilities, delta=0.3)
    tf.losses.log_loss(one_hot, probabilities)
    tf.losses.mean_pairwise_squared_error(one_hot, probabilities)
    tf.losses.mean_squared_error(one_hot, probabilities, reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE)
    tf.losses.sigmoid_cross_entropy(one_hot, logits, label_smoothing=0.1)
    tf.losses.softmax_cross_entropy(one_hot, logits)
    tf.losses.sparse_softmax_cross_entropy(labels, logits, weights=tf.cast(labels + 1, tf.float32))
    tf.losses.add_loss(0.01 * tf.reduce_sum(tf.abs(logits)))


def model_fn(features, labels, mode):
    logits = tf.layers.dense(features, 3, kernel_regularizer=lambda weights: 0.02 * tf.reduce_sum(weights**2))
    add_losses(labels, logits)
    losses = tf.losses.get_losses()
    assert len(losses) == 12 and len(tf.losses.get_regularization_losses()) == 1
    loss = tf.add_n(losses) + tf.losses.get_regularization_loss()
    train_op = tf.train.GradientDescentOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    metrics = metrics_of(labels, logits) if mode == tf.estimator.ModeKeys.EVAL else None
    return tf.estimator.EstimatorSpec(mode, {"logits": logits}, loss, train_op, metrics)
