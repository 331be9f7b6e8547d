"""The premade estimators of tf.estimator; those of tf.compat.v1.estimator are in `v1`.

The classes have their arguments from the table in `signatures`, and their model functions from `model_fns`.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

from runner.classic.estimator import Estimator
from runner.classic.heads.classification import binary_or_multi_class_head
from runner.classic.heads.regression import RegressionHead
from runner.classic.premade import model_fns
from runner.classic.premade.logits import Deep, Wide
from runner.classic.premade.model_fns import V2, Family, ModelFn

_log = logging.getLogger(__name__)

_HEAD = ("n_classes", "label_dimension", "weight_column", "label_vocabulary", "loss_reduction")


class Premade(Estimator):
    """An estimator whose constructor is made from the table of signatures.

    Args:
      family: has the signature under the name of the class; None: a user's subclass.
    """

    def __init_subclass__(cls, family: Family | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if family is not None:
            cls.__init__ = _constructor(cls, family)  # type: ignore[method-assign]


def _constructor(cls: type, family: Family) -> Callable[..., None]:
    """Return the constructor for `cls`, made from the signature of its name in the family.

    A classifier or regressor makes its head, and passes the other arguments on to the class with any head, which makes
    the model_fn.
    """
    signature: Any = family.signatures[cls.__name__]
    signature.__name__, signature.__module__ = "__init__", cls.__module__
    signature.__qualname__ = f"{cls.__qualname__}.__init__"  # the name in Python's messages about arguments

    @functools.wraps(signature)  # so that `inspect.signature` returns the table's signature
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature(*args, **kwargs)
        parent: Any = super(cls, given.pop("self"))
        if "head" not in given:
            of_head = {name: given.pop(name) for name in _HEAD if name in given}
            make = binary_or_multi_class_head if "n_classes" in of_head else RegressionHead
            parent.__init__(make(**of_head), **given)
            return
        for name in ("partitioner", "input_layer_partitioner"):
            if given.get(name) is not None:
                _log.warning("%s has no effect: the strategy places variables, see strategy.partitioner.", name)
        model_fn = _MODEL_FNS[cls.__name__](types.SimpleNamespace(**given), family)
        warm_start_from = given.get("warm_start_from")
        parent.__init__(model_fn, given["model_dir"], given["config"], warm_start_from=warm_start_from)

    return __init__


def _linear(given: Any, family: Family) -> ModelFn:
    wide = Wide(given.feature_columns, given.sparse_combiner)
    return model_fns.linear_model_fn(given.head, wide, given.optimizer, family)


def _dnn(given: Any, family: Family) -> ModelFn:
    deep = Deep(given.hidden_units, given.feature_columns, given.activation_fn, given.dropout, given.batch_norm)
    return model_fns.dnn_model_fn(given.head, deep, given.optimizer, family)


def _dnn_linear_combined(given: Any, family: Family) -> ModelFn:
    wide = Wide(given.linear_feature_columns, given.linear_sparse_combiner)
    deep = Deep(
        given.dnn_hidden_units or (), given.dnn_feature_columns, given.dnn_activation_fn, given.dnn_dropout,
        given.batch_norm,
    )  # fmt: skip
    return model_fns.combined_model_fn(given.head, wide, given.linear_optimizer, deep, given.dnn_optimizer, family)


# Class -> function from its arguments to the model_fn.
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
      feature_columns: dense and categorical columns.
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.2), an optimizer, or a function that makes
        one; None: Ftrl with the smaller of 0.2 and 1 / sqrt(number of columns).
      sparse_combiner: how to combine the weights of several values of a categorical column: sum, mean, sqrtn.
      Others: as in Estimator.
    """


class LinearClassifier(LinearEstimator, family=V2):
    """A linear model of two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see LinearEstimator.
    """


class LinearRegressor(LinearEstimator, family=V2):
    """A linear model of numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see LinearEstimator.
    """


class DNNEstimator(Premade, family=V2):
    """A network with any head.

    Args:
      head: computes loss, predictions and metrics from the logits.
      hidden_units: sizes of the hidden layers.
      feature_columns: dense columns; embedding_column or indicator_column make categorical ones dense.
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.001, SGD 0.01), an optimizer, or a function
        that makes one.
      activation_fn: activation of the hidden layers: a function, or a name of tf.nn.
      dropout: share of the units of each hidden layer to drop in training; None: none.
      batch_norm: normalize the values of each hidden layer over the batch.
      Others: as in Estimator.
    """


class DNNClassifier(DNNEstimator, family=V2):
    """A network for two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see DNNEstimator.
    """


class DNNRegressor(DNNEstimator, family=V2):
    """A network for numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see DNNEstimator.
    """


class DNNLinearCombinedEstimator(Premade, family=V2):
    """A linear model and a network with any head; each has an optimizer of its own.

    Args:
      linear_feature_columns, dnn_feature_columns: one may be empty; that part is then not there.
      linear_optimizer: as in LinearEstimator; by name its learning rate is the smaller of 0.005 and
        1 / sqrt(number of columns).
      dnn_optimizer: as in DNNEstimator; by name its learning rate is 0.001.
      Others: see LinearEstimator and DNNEstimator.

    Raises:
      ValueError: neither has columns.
    """


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator, family=V2):
    """A linear model and a network for two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see DNNLinearCombinedEstimator.
    """


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator, family=V2):
    """A linear model and a network for numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see DNNLinearCombinedEstimator.
    """


class BaselineEstimator(Premade, family=V2):
    """Predicts the same for every example, with any head.

    Args:
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.3), an optimizer, or a function that makes
        one.
      Others: see Estimator.
    """


class BaselineClassifier(BaselineEstimator, family=V2):
    """Predicts the frequency of each class. Args: see BaselineEstimator, BinaryClassHead and MultiClassHead."""


class BaselineRegressor(BaselineEstimator, family=V2):
    """Predicts the mean of the labels. Args: see BaselineEstimator and RegressionHead."""
