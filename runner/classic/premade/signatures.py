"""The signatures of TensorFlow 2.15's premade estimators, from which their constructors are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

Signatures = Mapping[str, Callable[..., dict[str, Any]]]

_MEAN = "sum_over_batch_size"
_SUM = tf.compat.v1.losses.Reduction.SUM

# Each entry is a lambda with the signature of a constructor. A call returns the arguments by name, and raises TypeError
# for missing and unknown ones. Constructors of tf.compat.v1.estimator also take partitioners, and sum the losses of a
# batch by default. `warm_start_from` of DNNLinearCombinedEstimator is the only argument that 2.15 did not have.
# fmt: off
V2_SIGNATURES: Signatures = {
    "LinearEstimator": lambda self, head, feature_columns, model_dir=None, optimizer="Ftrl", config=None,
        sparse_combiner="sum", warm_start_from=None: locals(),
    "LinearClassifier": lambda self, feature_columns, model_dir=None, n_classes=2, weight_column=None,
        label_vocabulary=None, optimizer="Ftrl", config=None, warm_start_from=None, loss_reduction=_MEAN,
        sparse_combiner="sum": locals(),
    "LinearRegressor": lambda self, feature_columns, model_dir=None, label_dimension=1, weight_column=None,
        optimizer="Ftrl", config=None, warm_start_from=None, loss_reduction=_MEAN, sparse_combiner="sum": locals(),
    "DNNEstimator": lambda self, head, hidden_units, feature_columns, model_dir=None, optimizer="Adagrad",
        activation_fn=tf.nn.relu, dropout=None, config=None, warm_start_from=None, batch_norm=False: locals(),
    "DNNClassifier": lambda self, hidden_units, feature_columns, model_dir=None, n_classes=2, weight_column=None,
        label_vocabulary=None, optimizer="Adagrad", activation_fn=tf.nn.relu, dropout=None, config=None,
        warm_start_from=None, loss_reduction=_MEAN, batch_norm=False: locals(),
    "DNNRegressor": lambda self, hidden_units, feature_columns, model_dir=None, label_dimension=1, weight_column=None,
        optimizer="Adagrad", activation_fn=tf.nn.relu, dropout=None, config=None, warm_start_from=None,
        loss_reduction=_MEAN, batch_norm=False: locals(),
    "DNNLinearCombinedEstimator": lambda self, head, model_dir=None, linear_feature_columns=None,
        linear_optimizer="Ftrl", dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None,
        dnn_activation_fn=tf.nn.relu, dnn_dropout=None, config=None, batch_norm=False, linear_sparse_combiner="sum",
        *, warm_start_from=None: locals(),
    "DNNLinearCombinedClassifier": lambda self, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=tf.nn.relu,
        dnn_dropout=None, n_classes=2, weight_column=None, label_vocabulary=None, config=None, warm_start_from=None,
        loss_reduction=_MEAN, batch_norm=False, linear_sparse_combiner="sum": locals(),
    "DNNLinearCombinedRegressor": lambda self, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=tf.nn.relu,
        dnn_dropout=None, label_dimension=1, weight_column=None, config=None, warm_start_from=None,
        loss_reduction=_MEAN, batch_norm=False, linear_sparse_combiner="sum": locals(),
    "BaselineEstimator": lambda self, head, model_dir=None, optimizer="Ftrl", config=None: locals(),
    "BaselineClassifier": lambda self, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None,
        optimizer="Ftrl", config=None, loss_reduction=_MEAN: locals(),
    "BaselineRegressor": lambda self, model_dir=None, label_dimension=1, weight_column=None, optimizer="Ftrl",
        config=None, loss_reduction=_MEAN: locals(),
}
V1_SIGNATURES: Signatures = {
    "LinearEstimator": lambda self, head, feature_columns, model_dir=None, optimizer="Ftrl", config=None,
        partitioner=None, sparse_combiner="sum", warm_start_from=None: locals(),
    "LinearClassifier": lambda self, feature_columns, model_dir=None, n_classes=2, weight_column=None,
        label_vocabulary=None, optimizer="Ftrl", config=None, partitioner=None, warm_start_from=None,
        loss_reduction=_SUM, sparse_combiner="sum": locals(),
    "LinearRegressor": lambda self, feature_columns, model_dir=None, label_dimension=1, weight_column=None,
        optimizer="Ftrl", config=None, partitioner=None, warm_start_from=None, loss_reduction=_SUM,
        sparse_combiner="sum": locals(),
    "DNNEstimator": lambda self, head, hidden_units, feature_columns, model_dir=None, optimizer="Adagrad",
        activation_fn=tf.nn.relu, dropout=None, input_layer_partitioner=None, config=None, warm_start_from=None,
        batch_norm=False: locals(),
    "DNNClassifier": lambda self, hidden_units, feature_columns, model_dir=None, n_classes=2, weight_column=None,
        label_vocabulary=None, optimizer="Adagrad", activation_fn=tf.nn.relu, dropout=None,
        input_layer_partitioner=None, config=None, warm_start_from=None, loss_reduction=_SUM,
        batch_norm=False: locals(),
    "DNNRegressor": lambda self, hidden_units, feature_columns, model_dir=None, label_dimension=1, weight_column=None,
        optimizer="Adagrad", activation_fn=tf.nn.relu, dropout=None, input_layer_partitioner=None, config=None,
        warm_start_from=None, loss_reduction=_SUM, batch_norm=False: locals(),
    "DNNLinearCombinedEstimator": lambda self, head, model_dir=None, linear_feature_columns=None,
        linear_optimizer="Ftrl", dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None,
        dnn_activation_fn=tf.nn.relu, dnn_dropout=None, input_layer_partitioner=None, config=None, batch_norm=False,
        linear_sparse_combiner="sum", *, warm_start_from=None: locals(),
    "DNNLinearCombinedClassifier": lambda self, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=tf.nn.relu,
        dnn_dropout=None, n_classes=2, weight_column=None, label_vocabulary=None, input_layer_partitioner=None,
        config=None, warm_start_from=None, loss_reduction=_SUM, batch_norm=False,
        linear_sparse_combiner="sum": locals(),
    "DNNLinearCombinedRegressor": lambda self, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=tf.nn.relu,
        dnn_dropout=None, label_dimension=1, weight_column=None, input_layer_partitioner=None, config=None,
        warm_start_from=None, loss_reduction=_SUM, batch_norm=False, linear_sparse_combiner="sum": locals(),
    "BaselineEstimator": lambda self, head, model_dir=None, optimizer="Ftrl", config=None: locals(),
    "BaselineClassifier": lambda self, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None,
        optimizer="Ftrl", config=None, loss_reduction=_SUM: locals(),
    "BaselineRegressor": lambda self, model_dir=None, label_dimension=1, weight_column=None, optimizer="Ftrl",
        config=None, loss_reduction=_SUM: locals(),
}
# fmt: on
