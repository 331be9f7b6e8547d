"""TPUEstimator off TPUs: its spec, with metrics and a host call, and an input function that ends in get_next()."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(params, mode):
    assert params["batch_size"] == data.BATCH
    return tf.data.make_one_shot_iterator(data.regression(mode)).get_next()


def metric_fn(labels, predictions):
    return {"error": tf.metrics.mean_absolute_error(labels, predictions)}


def host_call(loss):
    return tf.reduce_mean(loss)


def model_fn(features, labels, mode, params):
    assert params["batch_size"] == data.BATCH
    weights = tf.get_variable("weights", [4, 1])
    predictions = tf.matmul(features, weights)
    loss = tf.losses.mean_squared_error(labels, predictions)
    optimizer = tf.train.MomentumOptimizer(0.05, 0.5)
    return tf.estimator.tpu.TPUEstimatorSpec(
        mode,
        predictions={"y": predictions},
        loss=loss,
        train_op=optimizer.minimize(loss, tf.train.get_global_step()),
        eval_metrics=(metric_fn, [labels, predictions]),
        host_call=(host_call, [tf.reshape(loss, [1])]),
    )


def estimator(model_dir, **config):
    return tf.estimator.tpu.TPUEstimator(
        model_fn,
        model_dir,
        tf.estimator.tpu.RunConfig(tpu_config=tf.estimator.tpu.TPUConfig(iterations_per_loop=5), **config),
        params={},
        use_tpu=False,
        train_batch_size=data.BATCH,
        eval_batch_size=data.BATCH,
    )
