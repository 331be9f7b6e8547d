"""The premade estimators of tf.compat.v1.estimator: v1 optimizers, losses summed over the batch.

Their checkpoints have other names than those of tf.estimator. The arguments `partitioner` and `input_layer_partitioner`
have no effect, and say so: the strategy places variables (`strategy.partitioner`).
"""

from __future__ import annotations

from runner.classic.premade.estimators import Premade
from runner.classic.premade.model_fns import V1


class LinearEstimator(Premade, family=V1):
    """Args: see tf.estimator.LinearEstimator; a name as the optimizer means one of tf.compat.v1.train."""


class LinearClassifier(LinearEstimator, family=V1):
    """Args: see tf.estimator.LinearClassifier and LinearEstimator."""


class LinearRegressor(LinearEstimator, family=V1):
    """Args: see tf.estimator.LinearRegressor and LinearEstimator."""


class DNNEstimator(Premade, family=V1):
    """Args: see tf.estimator.DNNEstimator; a name as the optimizer means one of tf.compat.v1.train, rate 0.05."""


class DNNClassifier(DNNEstimator, family=V1):
    """Args: see tf.estimator.DNNClassifier and DNNEstimator."""


class DNNRegressor(DNNEstimator, family=V1):
    """Args: see tf.estimator.DNNRegressor and DNNEstimator."""


class DNNLinearCombinedEstimator(Premade, family=V1):
    """Args: see tf.estimator.DNNLinearCombinedEstimator; a name as an optimizer means one of tf.compat.v1.train."""


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator, family=V1):
    """Args: see tf.estimator.DNNLinearCombinedClassifier and DNNLinearCombinedEstimator."""


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator, family=V1):
    """Args: see tf.estimator.DNNLinearCombinedRegressor and DNNLinearCombinedEstimator."""


class BaselineEstimator(Premade, family=V1):
    """Args: see tf.estimator.BaselineEstimator; a name as the optimizer means one of tf.compat.v1.train."""


class BaselineClassifier(BaselineEstimator, family=V1):
    """Args: see tf.estimator.BaselineClassifier and BaselineEstimator."""


class BaselineRegressor(BaselineEstimator, family=V1):
    """Args: see tf.estimator.BaselineRegressor and BaselineEstimator."""
