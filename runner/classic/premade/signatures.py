"""The signatures of TensorFlow 2.15's premade estimators, from which their constructors are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

Signatures = Mapping[str, Callable[..., dict[str, Any]]]

# Class -> the arguments of its constructor in tf.estimator. `warm_start_from` of DNNLinearCombinedEstimator is the only
# one that 2.15 did not have.
_ARGUMENTS: Mapping[str, str] = {
    "LinearEstimator": """head, feature_columns, model_dir=None, optimizer="Ftrl", config=None, sparse_combiner="sum",
        warm_start_from=None""",
    "LinearClassifier": """feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None,
        optimizer="Ftrl", config=None, warm_start_from=None, loss_reduction=REDUCTION, sparse_combiner="sum" """,
    "LinearRegressor": """feature_columns, model_dir=None, label_dimension=1, weight_column=None, optimizer="Ftrl",
        config=None, warm_start_from=None, loss_reduction=REDUCTION, sparse_combiner="sum" """,
    "DNNEstimator": """head, hidden_units, feature_columns, model_dir=None, optimizer="Adagrad", activation_fn=RELU,
        dropout=None, config=None, warm_start_from=None, batch_norm=False""",
    "DNNClassifier": """hidden_units, feature_columns, model_dir=None, n_classes=2, weight_column=None,
        label_vocabulary=None, optimizer="Adagrad", activation_fn=RELU, dropout=None, config=None, warm_start_from=None,
        loss_reduction=REDUCTION, batch_norm=False""",
    "DNNRegressor": """hidden_units, feature_columns, model_dir=None, label_dimension=1, weight_column=None,
        optimizer="Adagrad", activation_fn=RELU, dropout=None, config=None, warm_start_from=None,
        loss_reduction=REDUCTION, batch_norm=False""",
    "DNNLinearCombinedEstimator": """head, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=RELU,
        dnn_dropout=None, config=None, batch_norm=False, linear_sparse_combiner="sum", *, warm_start_from=None""",
    "DNNLinearCombinedClassifier": """model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=RELU,
        dnn_dropout=None, n_classes=2, weight_column=None, label_vocabulary=None, config=None, warm_start_from=None,
        loss_reduction=REDUCTION, batch_norm=False, linear_sparse_combiner="sum" """,
    "DNNLinearCombinedRegressor": """model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl",
        dnn_feature_columns=None, dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=RELU,
        dnn_dropout=None, label_dimension=1, weight_column=None, config=None, warm_start_from=None,
        loss_reduction=REDUCTION, batch_norm=False, linear_sparse_combiner="sum" """,
    "BaselineEstimator": """head, model_dir=None, optimizer="Ftrl", config=None""",
    "BaselineClassifier": """model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, optimizer="Ftrl",
        config=None, loss_reduction=REDUCTION""",
    "BaselineRegressor": """model_dir=None, label_dimension=1, weight_column=None, optimizer="Ftrl", config=None,
        loss_reduction=REDUCTION""",
}
# Constructors of tf.compat.v1.estimator also take a partitioner: beginning of a class's name -> arguments for `config`.
_CONFIG_OF_V1 = {"Linear": "config=None, partitioner=None", "DNN": "input_layer_partitioner=None, config=None"}


def _signature(arguments: str, reduction: str) -> Callable[..., dict[str, Any]]:
    """Return a function with the signature of a constructor, which returns the arguments by name.

    It is made of source, as by collections.namedtuple, so that Python itself refuses missing and unknown arguments.
    """
    return eval(f"(lambda self, {arguments}: locals())", {"RELU": tf.nn.relu, "REDUCTION": reduction})


def _of_v1(name: str, arguments: str) -> str:
    config = next((config for family, config in _CONFIG_OF_V1.items() if name.startswith(family)), "config=None")
    return arguments.replace("config=None", config)


V2_SIGNATURES: Signatures = {
    name: _signature(arguments, "sum_over_batch_size") for name, arguments in _ARGUMENTS.items()
}
V1_SIGNATURES: Signatures = {  # which sum the losses of a batch by default
    name: _signature(_of_v1(name, arguments), tf.compat.v1.losses.Reduction.SUM)
    for name, arguments in _ARGUMENTS.items()
}
