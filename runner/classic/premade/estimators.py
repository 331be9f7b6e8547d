"""The premade estimators of tf.estimator; those of tf.compat.v1.estimator are in `v1`.

The classes have their arguments from the table in `signatures`, and their model functions from `model_fns`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from runner.classic.estimator import Estimator
from runner.classic.heads.base import Head
from runner.classic.heads.classification import binary_or_multi_class_head
from runner.classic.heads.regression import RegressionHead
from runner.classic.premade.logits import Deep, Wide
from runner.classic.premade.model_fns import (
    V2,
    Family,
    ModelFn,
    baseline_model_fn,
    combined_model_fn,
    dnn_model_fn,
    linear_model_fn,
)
from runner.classic.premade.signatures import V2_SIGNATURES, Signatures

_log = logging.getLogger(__name__)

_HEAD = ("n_classes", "label_dimension", "weight_column", "label_vocabulary", "loss_reduction")


def premade(family: Family, signatures: Signatures) -> Callable[[type], type]:
    """Give a class the constructor that `signatures` has under its name.

    A classifier or a regressor makes the head of its arguments, and hands the others on to the class with any head,
    which makes the model_fn.
    """

    def decorated(cls: Any) -> Any:
        signature = signatures[cls.__name__]
        signature.__name__, signature.__module__ = "__init__", cls.__module__
        signature.__qualname__ = f"{cls.__qualname__}.__init__"  # Python's messages about arguments begin with it

        @functools.wraps(signature)  # so that `inspect.signature` gives the entry of the table
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
            model_fn = _MODEL_FNS[cls.__name__](family, **given)
            warm_start_from = given.get("warm_start_from")
            parent.__init__(model_fn, given["model_dir"], given["config"], warm_start_from=warm_start_from)

        cls.__init__ = __init__
        return cls

    return decorated


def _linear(
    family: Family, *, head: Head, feature_columns: Any, sparse_combiner: str, optimizer: Any, **others: Any
) -> ModelFn:
    return linear_model_fn(head, Wide(feature_columns, sparse_combiner), optimizer, family)


def _dnn(
    family: Family, *, head: Head, hidden_units: Sequence[int], feature_columns: Any, activation_fn: Any,
    dropout: float | None, batch_norm: bool, optimizer: Any, **others: Any,
) -> ModelFn:  # fmt: skip
    return dnn_model_fn(
        head, Deep(hidden_units, feature_columns, activation_fn, dropout, batch_norm), optimizer, family
    )


def _dnn_linear_combined(
    family: Family, *, head: Head, linear_feature_columns: Any, linear_sparse_combiner: str, linear_optimizer: Any,
    dnn_hidden_units: Sequence[int] | None, dnn_feature_columns: Any, dnn_activation_fn: Any,
    dnn_dropout: float | None, batch_norm: bool, dnn_optimizer: Any, **others: Any,
) -> ModelFn:  # fmt: skip
    wide = Wide(linear_feature_columns, linear_sparse_combiner)
    deep = Deep(dnn_hidden_units or (), dnn_feature_columns, dnn_activation_fn, dnn_dropout, batch_norm)
    return combined_model_fn(head, wide, linear_optimizer, deep, dnn_optimizer, family)


def _baseline(family: Family, *, head: Head, optimizer: Any, **others: Any) -> ModelFn:
    return baseline_model_fn(head, optimizer, family)


_MODEL_FNS: dict[str, Callable[..., ModelFn]] = {
    "LinearEstimator": _linear,
    "DNNEstimator": _dnn,
    "DNNLinearCombinedEstimator": _dnn_linear_combined,
    "BaselineEstimator": _baseline,
}


@premade(V2, V2_SIGNATURES)
class LinearEstimator(Estimator):
    """A linear model with any head.

    Args:
      head: what is done with the logits.
      feature_columns: dense and categorical ones.
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.2), an optimizer, or a function that makes
        one; None: Ftrl with the smaller of 0.2 and 1 / sqrt(number of columns).
      sparse_combiner: how the weights of several values of a categorical column are joined: sum, mean, sqrtn.
      Others: see Estimator.
    """


@premade(V2, V2_SIGNATURES)
class LinearClassifier(LinearEstimator):
    """A linear model of two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see LinearEstimator.
    """


@premade(V2, V2_SIGNATURES)
class LinearRegressor(LinearEstimator):
    """A linear model of numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see LinearEstimator.
    """


@premade(V2, V2_SIGNATURES)
class DNNEstimator(Estimator):
    """A network with any head.

    Args:
      head: what is done with the logits.
      hidden_units: sizes of the hidden layers.
      feature_columns: dense ones; embedding_column or indicator_column make categorical ones dense.
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.001, of SGD 0.01), an optimizer, or a
        function that makes one.
      activation_fn: of the hidden layers: a function, or the name of one of tf.nn.
      dropout: in training, the share of the units of each hidden layer that is left out.
      batch_norm: the values of each hidden layer are normalised over the batch.
      Others: see Estimator.
    """


@premade(V2, V2_SIGNATURES)
class DNNClassifier(DNNEstimator):
    """A network for two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see DNNEstimator.
    """


@premade(V2, V2_SIGNATURES)
class DNNRegressor(DNNEstimator):
    """A network for numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see DNNEstimator.
    """


@premade(V2, V2_SIGNATURES)
class DNNLinearCombinedEstimator(Estimator):
    """A linear model and a network with any head; each has an optimizer of its own.

    Args:
      linear_feature_columns, dnn_feature_columns: one may be empty; that part is then not there.
      linear_optimizer: as in LinearEstimator; by name its learning rate is the smaller of 0.005 and
        1 / sqrt(number of columns).
      dnn_optimizer: as in DNNEstimator; by name its learning rate is 0.001.
      Others: see LinearEstimator and DNNEstimator.

    Raises: ValueError: neither has columns.
    """


@premade(V2, V2_SIGNATURES)
class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A linear model and a network for two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see DNNLinearCombinedEstimator.
    """


@premade(V2, V2_SIGNATURES)
class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """A linear model and a network for numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see DNNLinearCombinedEstimator.
    """


@premade(V2, V2_SIGNATURES)
class BaselineEstimator(Estimator):
    """Predicts the same for every example, with any head.

    Args:
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.3), an optimizer, or a function that makes
        one.
      Others: see Estimator.
    """


@premade(V2, V2_SIGNATURES)
class BaselineClassifier(BaselineEstimator):
    """Predicts the frequency of each class. Args: see BaselineEstimator, BinaryClassHead and MultiClassHead."""


@premade(V2, V2_SIGNATURES)
class BaselineRegressor(BaselineEstimator):
    """Predicts the mean of the labels. Args: see BaselineEstimator and RegressionHead."""
