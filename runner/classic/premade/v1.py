"""The premade estimators of tf.compat.v1.estimator.

They differ from those of tf.estimator: an optimizer given by name is one of tf.compat.v1.train, losses are summed over
the batch, optimizer state has other names in checkpoints, and variables are divided into parts by the arguments
`partitioner` and `input_layer_partitioner`, often only one: `dnn/logits/kernel/part_0`. Checkpoints have them whole.
"""

from __future__ import annotations

from runner.classic.premade.estimators import Premade
from runner.classic.premade.model_fns import V1


class LinearEstimator(Premade, family=V1):
    """Like tf.estimator.LinearEstimator, but an optimizer given by name is one of tf.compat.v1.train."""


class LinearClassifier(LinearEstimator, family=V1):
    """Like tf.estimator.LinearClassifier, with the optimizers of this module's LinearEstimator."""


class LinearRegressor(LinearEstimator, family=V1):
    """Like tf.estimator.LinearRegressor, with the optimizers of this module's LinearEstimator."""


class DNNEstimator(Premade, family=V1):
    """Like tf.estimator.DNNEstimator, but an optimizer given by name is one of tf.compat.v1.train, with the learning
    rate 0.05.
    """


class DNNClassifier(DNNEstimator, family=V1):
    """Like tf.estimator.DNNClassifier, with the optimizers of this module's DNNEstimator."""


class DNNRegressor(DNNEstimator, family=V1):
    """Like tf.estimator.DNNRegressor, with the optimizers of this module's DNNEstimator."""


class DNNLinearCombinedEstimator(Premade, family=V1):
    """Like tf.estimator.DNNLinearCombinedEstimator, but optimizers given by name are those of tf.compat.v1.train."""


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator, family=V1):
    """Like tf.estimator.DNNLinearCombinedClassifier, but optimizers given by name are those of tf.compat.v1.train."""


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator, family=V1):
    """Like tf.estimator.DNNLinearCombinedRegressor, but optimizers given by name are those of tf.compat.v1.train."""


class BaselineEstimator(Premade, family=V1):
    """Like tf.estimator.BaselineEstimator, but an optimizer given by name is one of tf.compat.v1.train."""


class BaselineClassifier(BaselineEstimator, family=V1):
    """Like tf.estimator.BaselineClassifier, with the optimizers of this module's BaselineEstimator."""


class BaselineRegressor(BaselineEstimator, family=V1):
    """Like tf.estimator.BaselineRegressor, with the optimizers of this module's BaselineEstimator."""
