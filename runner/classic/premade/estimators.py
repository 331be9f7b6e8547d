"""The premade estimators of tf.estimator; those of tf.compat.v1.estimator are in `v1`.

The constructors are made from the table in `signatures`, and the model functions come from `model_fns`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from runner.classic.estimator import Estimator
from runner.classic.heads.classification import binary_or_multi_class_head
from runner.classic.heads.regression import RegressionHead
from runner.classic.premade import model_fns
from runner.classic.premade.logits import Deep, Wide
from runner.classic.premade.model_fns import V2, Family, ModelFn

_ARGUMENTS_OF_HEADS = ("n_classes", "label_dimension", "weight_column", "label_vocabulary", "loss_reduction")


class Premade(Estimator):
    """Base class of premade estimators. The constructor of a subclass is made from the table of signatures.

    Args:
      family: its table has the signature under the name of the subclass. None: the subclass is a user's, and inherits
        or defines its constructor.
    """

    def __init_subclass__(cls, family: Family | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if family is not None:
            cls.__init__ = _constructor(cls, family)  # type: ignore[method-assign]


def _constructor(cls: type, family: Family) -> Callable[..., None]:
    """Return the constructor of `cls`, with the signature in `family.signatures`.

    The constructor of a classifier or regressor makes the head and calls the constructor of the parent class, such as
    DNNEstimator, which takes a head and makes the model_fn.
    """
    signature: Any = family.signatures[cls.__name__]
    signature.__name__ = "__init__"
    signature.__module__ = cls.__module__
    signature.__qualname__ = f"{cls.__qualname__}.__init__"  # the name in Python's messages about arguments

    @functools.wraps(signature)  # so that `inspect.signature` returns the table's signature
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature(*args, **kwargs)
        parent: Any = super(cls, given.pop("self"))
        if "head" not in given:
            head_arguments = {name: given.pop(name) for name in _ARGUMENTS_OF_HEADS if name in given}
            make_head = binary_or_multi_class_head if "n_classes" in head_arguments else RegressionHead
            parent.__init__(make_head(**head_arguments), **given)
            return
        for name in ("partitioner", "input_layer_partitioner"):  # only tf.compat.v1.estimator has them
            given.setdefault(name, None)
        model_fn = _MODEL_FNS[cls.__name__](types.SimpleNamespace(**given), family)
        warm_start_from = given.get("warm_start_from")
        parent.__init__(model_fn, given["model_dir"], given["config"], warm_start_from=warm_start_from)

    return __init__


def _linear(given: Any, family: Family) -> ModelFn:
    wide = Wide(given.feature_columns, given.sparse_combiner, given.partitioner)
    return model_fns.linear_model_fn(given.head, wide, given.optimizer, family)


def _dnn(given: Any, family: Family) -> ModelFn:
    deep = Deep(
        given.hidden_units, given.feature_columns, given.activation_fn, given.dropout, given.batch_norm,
        given.input_layer_partitioner,
    )  # fmt: skip
    return model_fns.dnn_model_fn(given.head, deep, given.optimizer, family)


def _dnn_linear_combined(given: Any, family: Family) -> ModelFn:
    wide = Wide(given.linear_feature_columns, given.linear_sparse_combiner, given.input_layer_partitioner)
    deep = Deep(
        given.dnn_hidden_units or (), given.dnn_feature_columns, given.dnn_activation_fn, given.dnn_dropout,
        given.batch_norm, given.input_layer_partitioner,
    )  # fmt: skip
    return model_fns.combined_model_fn(given.head, wide, given.linear_optimizer, deep, given.dnn_optimizer, family)


# Name of a class that takes a head -> function from its arguments to the model_fn.
_MODEL_FNS: dict[str, Callable[[Any, Family], ModelFn]] = {
    "LinearEstimator": _linear,
    "DNNEstimator": _dnn,
    "DNNLinearCombinedEstimator": _dnn_linear_combined,
    "BaselineEstimator": lambda given, family: model_fns.baseline_model_fn(given.head, given.optimizer, family),
}


class LinearEstimator(Premade, family=V2):
    """A linear model with any head.

    Args:
      head: computes loss, predictions and metrics from the logits.
      feature_columns: dense and categorical feature columns.
      model_dir: as in Estimator.
      optimizer: the name of an optimizer (Adagrad, Adam, Ftrl, RMSProp, SGD), which then has the learning rate 0.2; an
        optimizer; or a function that makes one. None: Ftrl with the smaller of 0.2 and 1 / sqrt(number of columns).
      config: as in Estimator.
      sparse_combiner: how to combine the weights of several values of a categorical column: sum, mean or sqrtn.
      warm_start_from: as in Estimator.
    """


class LinearClassifier(LinearEstimator, family=V2):
    """A linear classifier.

    Args:
      n_classes: number of classes, at least 2.
      weight_column: as in BinaryClassHead and MultiClassHead.
      label_vocabulary: as in BinaryClassHead and MultiClassHead.
      loss_reduction: as in BinaryClassHead and MultiClassHead.
      Others: as in LinearEstimator.
    """


class LinearRegressor(LinearEstimator, family=V2):
    """A linear regressor.

    Args:
      label_dimension: as in RegressionHead.
      weight_column: as in RegressionHead.
      loss_reduction: as in RegressionHead.
      Others: as in LinearEstimator.
    """


class DNNEstimator(Premade, family=V2):
    """A network of dense layers with any head.

    Args:
      head: computes loss, predictions and metrics from the logits.
      hidden_units: sizes of the hidden layers.
      feature_columns: dense feature columns. Put embedding_column or indicator_column around categorical ones.
      model_dir: as in Estimator.
      optimizer: the name of an optimizer (Adagrad, Adam, Ftrl, RMSProp, SGD), which then has the learning rate 0.001
        (SGD: 0.01); an optimizer; or a function that makes one.
      activation_fn: activation of the hidden layers: a function, or the name of one in tf.nn.
      dropout: probability with which units of a hidden layer are dropped in training; None: no dropout.
      config: as in Estimator.
      warm_start_from: as in Estimator.
      batch_norm: normalize the values of each hidden layer over the batch, after the activation.
    """


class DNNClassifier(DNNEstimator, family=V2):
    """A network that classifies.

    Args:
      n_classes: number of classes, at least 2.
      weight_column: as in BinaryClassHead and MultiClassHead.
      label_vocabulary: as in BinaryClassHead and MultiClassHead.
      loss_reduction: as in BinaryClassHead and MultiClassHead.
      Others: as in DNNEstimator.
    """


class DNNRegressor(DNNEstimator, family=V2):
    """A network that predicts numbers.

    Args:
      label_dimension: as in RegressionHead.
      weight_column: as in RegressionHead.
      loss_reduction: as in RegressionHead.
      Others: as in DNNEstimator.
    """


class DNNLinearCombinedEstimator(Premade, family=V2):
    """A linear model and a network, whose logits are added, with any head. Each of the two has its own optimizer.

    Args:
      linear_feature_columns: feature columns of the linear model; if there are none, the linear model is left out.
      dnn_feature_columns: feature columns of the network; if there are none, the network is left out.
      linear_optimizer: as in LinearEstimator, but an optimizer given by name has the smaller of the learning rates
        0.005 and 1 / sqrt(number of columns).
      dnn_optimizer: as in DNNEstimator, but every optimizer given by name has the learning rate 0.001.
      Others: as in LinearEstimator and DNNEstimator, with the prefix `linear_` or `dnn_` added to the name.

    Raises:
      ValueError: there are no feature columns, or dnn_feature_columns but no dnn_hidden_units.
    """


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator, family=V2):
    """A linear model and a network that together classify.

    Args:
      n_classes: number of classes, at least 2.
      weight_column: as in BinaryClassHead and MultiClassHead.
      label_vocabulary: as in BinaryClassHead and MultiClassHead.
      loss_reduction: as in BinaryClassHead and MultiClassHead.
      Others: as in DNNLinearCombinedEstimator.
    """


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator, family=V2):
    """A linear model and a network that together predict numbers.

    Args:
      label_dimension: as in RegressionHead.
      weight_column: as in RegressionHead.
      loss_reduction: as in RegressionHead.
      Others: as in DNNLinearCombinedEstimator.
    """


class BaselineEstimator(Premade, family=V2):
    """A model that ignores the features and learns one prediction for all examples, with any head.

    Args:
      head: computes loss, predictions and metrics from the logits.
      optimizer: the name of an optimizer (Adagrad, Adam, Ftrl, RMSProp, SGD), which then has the learning rate 0.3; an
        optimizer; or a function that makes one.
      Others: as in Estimator.
    """


class BaselineClassifier(BaselineEstimator, family=V2):
    """A model that learns the frequency of each class and predicts it for all examples.

    The arguments are those of BaselineEstimator without `head`, and those of BinaryClassHead and MultiClassHead.
    """


class BaselineRegressor(BaselineEstimator, family=V2):
    """A model that learns the mean of the labels and predicts it for all examples.

    The arguments are those of BaselineEstimator without `head`, and those of RegressionHead.
    """
