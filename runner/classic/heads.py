"""The heads of tf.estimator: what is done with the logits of a model."""

from runner.classic.heads_base import Head
from runner.classic.heads_classes import BinaryClassHead, MultiClassHead
from runner.classic.heads_labels import MultiLabelHead
from runner.classic.heads_multi import MultiHead
from runner.classic.heads_regression import LogisticRegressionHead, PoissonRegressionHead, RegressionHead

__all__ = [
    "Head",
    "BinaryClassHead",
    "MultiClassHead",
    "MultiLabelHead",
    "RegressionHead",
    "PoissonRegressionHead",
    "LogisticRegressionHead",
    "MultiHead",
]
