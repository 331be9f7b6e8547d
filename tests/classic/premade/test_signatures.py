"""The constructors of the premade estimators are those of TensorFlow 2.15: names, order, kinds and defaults."""

from __future__ import annotations

import inspect
import pickle

import pytest
import tensorflow as tf

import runner.classic  # noqa: F401
from tests.support.messages import Messages

V2, V1 = tf.estimator, tf.compat.v1.estimator

# Those of TensorFlow 2.15, but for `warm_start_from` of DNNLinearCombinedEstimator; RELU is tf.nn.relu.
SIGNATURES = {
    (V2, "BaselineClassifier"): (
        "(model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, optimizer='Ftrl', config=None, "
        "loss_reduction='sum_over_batch_size')"
    ),
    (V2, "BaselineEstimator"): "(head, model_dir=None, optimizer='Ftrl', config=None)",
    (V2, "BaselineRegressor"): (
        "(model_dir=None, label_dimension=1, weight_column=None, optimizer='Ftrl', config=None, "
        "loss_reduction='sum_over_batch_size')"
    ),
    (V2, "DNNClassifier"): (
        "(hidden_units, feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, "
        "optimizer='Adagrad', activation_fn=RELU, dropout=None, config=None, warm_start_from=None, "
        "loss_reduction='sum_over_batch_size', batch_norm=False)"
    ),
    (V2, "DNNEstimator"): (
        "(head, hidden_units, feature_columns, model_dir=None, optimizer='Adagrad', activation_fn=RELU, dropout=None, "
        "config=None, warm_start_from=None, batch_norm=False)"
    ),
    (V2, "DNNRegressor"): (
        "(hidden_units, feature_columns, model_dir=None, label_dimension=1, weight_column=None, optimizer='Adagrad', "
        "activation_fn=RELU, dropout=None, config=None, warm_start_from=None, loss_reduction='sum_over_batch_size', "
        "batch_norm=False)"
    ),
    (V2, "DNNLinearCombinedClassifier"): (
        "(model_dir=None, linear_feature_columns=None, linear_optimizer='Ftrl', dnn_feature_columns=None, "
        "dnn_optimizer='Adagrad', dnn_hidden_units=None, dnn_activation_fn=RELU, dnn_dropout=None, n_classes=2, "
        "weight_column=None, label_vocabulary=None, config=None, warm_start_from=None, "
        "loss_reduction='sum_over_batch_size', batch_norm=False, linear_sparse_combiner='sum')"
    ),
    (V2, "DNNLinearCombinedEstimator"): (
        "(head, model_dir=None, linear_feature_columns=None, linear_optimizer='Ftrl', dnn_feature_columns=None, "
        "dnn_optimizer='Adagrad', dnn_hidden_units=None, dnn_activation_fn=RELU, dnn_dropout=None, config=None, "
        "batch_norm=False, linear_sparse_combiner='sum', *, warm_start_from=None)"
    ),
    (V2, "DNNLinearCombinedRegressor"): (
        "(model_dir=None, linear_feature_columns=None, linear_optimizer='Ftrl', dnn_feature_columns=None, "
        "dnn_optimizer='Adagrad', dnn_hidden_units=None, dnn_activation_fn=RELU, dnn_dropout=None, label_dimension=1, "
        "weight_column=None, config=None, warm_start_from=None, loss_reduction='sum_over_batch_size', "
        "batch_norm=False, linear_sparse_combiner='sum')"
    ),
    (V2, "LinearClassifier"): (
        "(feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, optimizer='Ftrl', "
        "config=None, warm_start_from=None, loss_reduction='sum_over_batch_size', sparse_combiner='sum')"
    ),
    (V2, "LinearEstimator"): (
        "(head, feature_columns, model_dir=None, optimizer='Ftrl', config=None, sparse_combiner='sum', "
        "warm_start_from=None)"
    ),
    (V2, "LinearRegressor"): (
        "(feature_columns, model_dir=None, label_dimension=1, weight_column=None, optimizer='Ftrl', config=None, "
        "warm_start_from=None, loss_reduction='sum_over_batch_size', sparse_combiner='sum')"
    ),
    (V1, "BaselineClassifier"): (
        "(model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, optimizer='Ftrl', config=None, "
        "loss_reduction='weighted_sum')"
    ),
    (V1, "BaselineEstimator"): "(head, model_dir=None, optimizer='Ftrl', config=None)",
    (V1, "BaselineRegressor"): (
        "(model_dir=None, label_dimension=1, weight_column=None, optimizer='Ftrl', config=None, "
        "loss_reduction='weighted_sum')"
    ),
    (V1, "DNNClassifier"): (
        "(hidden_units, feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, "
        "optimizer='Adagrad', activation_fn=RELU, dropout=None, input_layer_partitioner=None, config=None, "
        "warm_start_from=None, loss_reduction='weighted_sum', batch_norm=False)"
    ),
    (V1, "DNNEstimator"): (
        "(head, hidden_units, feature_columns, model_dir=None, optimizer='Adagrad', activation_fn=RELU, dropout=None, "
        "input_layer_partitioner=None, config=None, warm_start_from=None, batch_norm=False)"
    ),
    (V1, "DNNRegressor"): (
        "(hidden_units, feature_columns, model_dir=None, label_dimension=1, weight_column=None, optimizer='Adagrad', "
        "activation_fn=RELU, dropout=None, input_layer_partitioner=None, config=None, warm_start_from=None, "
        "loss_reduction='weighted_sum', batch_norm=False)"
    ),
    (V1, "DNNLinearCombinedClassifier"): (
        "(model_dir=None, linear_feature_columns=None, linear_optimizer='Ftrl', dnn_feature_columns=None, "
        "dnn_optimizer='Adagrad', dnn_hidden_units=None, dnn_activation_fn=RELU, dnn_dropout=None, n_classes=2, "
        "weight_column=None, label_vocabulary=None, input_layer_partitioner=None, config=None, warm_start_from=None, "
        "loss_reduction='weighted_sum', batch_norm=False, linear_sparse_combiner='sum')"
    ),
    (V1, "DNNLinearCombinedEstimator"): (
        "(head, model_dir=None, linear_feature_columns=None, linear_optimizer='Ftrl', dnn_feature_columns=None, "
        "dnn_optimizer='Adagrad', dnn_hidden_units=None, dnn_activation_fn=RELU, dnn_dropout=None, "
        "input_layer_partitioner=None, config=None, batch_norm=False, linear_sparse_combiner='sum', *, "
        "warm_start_from=None)"
    ),
    (V1, "DNNLinearCombinedRegressor"): (
        "(model_dir=None, linear_feature_columns=None, linear_optimizer='Ftrl', dnn_feature_columns=None, "
        "dnn_optimizer='Adagrad', dnn_hidden_units=None, dnn_activation_fn=RELU, dnn_dropout=None, label_dimension=1, "
        "weight_column=None, input_layer_partitioner=None, config=None, warm_start_from=None, "
        "loss_reduction='weighted_sum', batch_norm=False, linear_sparse_combiner='sum')"
    ),
    (V1, "LinearClassifier"): (
        "(feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, optimizer='Ftrl', "
        "config=None, partitioner=None, warm_start_from=None, loss_reduction='weighted_sum', sparse_combiner='sum')"
    ),
    (V1, "LinearEstimator"): (
        "(head, feature_columns, model_dir=None, optimizer='Ftrl', config=None, partitioner=None, "
        "sparse_combiner='sum', warm_start_from=None)"
    ),
    (V1, "LinearRegressor"): (
        "(feature_columns, model_dir=None, label_dimension=1, weight_column=None, optimizer='Ftrl', config=None, "
        "partitioner=None, warm_start_from=None, loss_reduction='weighted_sum', sparse_combiner='sum')"
    ),
}


def id_of(case: object) -> str:
    return f"v1.{case[1]}" if case[0] is V1 else case[1]  # type: ignore[index]


@pytest.fixture(params=SIGNATURES, ids=id_of)
def case(request: pytest.FixtureRequest) -> tuple[type, str]:
    module, name = request.param
    return getattr(module, name), SIGNATURES[request.param]


def test_the_signature_of_a_class_is_that_of_2_15(case: tuple[type, str]) -> None:
    cls, expected = case
    signature = inspect.signature(cls)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    relu = signature.parameters.get("activation_fn", signature.parameters.get("dnn_activation_fn"))
    assert relu is None or relu.default is tf.nn.relu
    shown = str(inspect.Signature(plain))
    assert shown.replace(str(tf.nn.relu), "RELU") == expected
    assert inspect.signature(cls.__init__).parameters.keys() == {"self", *signature.parameters}  # type: ignore[misc]


def test_a_class_is_found_by_its_name_and_inherits_from_the_one_with_any_head(case: tuple[type, str]) -> None:
    cls, _ = case
    base = cls.__name__.replace("Classifier", "Estimator").replace("Regressor", "Estimator")
    module = V1 if cls.__module__.endswith(".v1") else V2
    assert cls is getattr(module, cls.__name__)
    assert cls.__qualname__ == cls.__name__ and pickle.loads(pickle.dumps(cls)) is cls
    assert issubclass(cls, getattr(module, base)) and issubclass(cls, V2.Estimator)
    assert inspect.getdoc(cls)


def test_arguments_that_are_missing_or_unknown_are_refused_in_the_words_of_python(messages: Messages) -> None:
    with messages.raised(TypeError):
        V2.DNNClassifier([3])
    with messages.raised(TypeError):
        V1.LinearRegressor([], colour="red")
    with messages.raised(TypeError):
        V2.BaselineEstimator(1, 2, 3, 4, 5)


def test_a_subclass_calls_the_constructor_of_its_parent() -> None:
    class Small(V2.DNNClassifier):  # type: ignore[name-defined]
        def __init__(self, columns: object, **kwargs: object) -> None:
            super().__init__([3], columns, n_classes=3, **kwargs)

    column = tf.feature_column.numeric_column("x")
    model = Small([column], model_dir=None)
    assert isinstance(model, V2.DNNClassifier | V2.DNNEstimator) and not isinstance(model, V1.DNNEstimator)
