"""The premade estimators of tf.compat.v1.estimator: v1 optimizers, losses summed over the batch.

Their checkpoints have other names than those of tf.estimator. The arguments `partitioner` and `input_layer_partitioner`
have no effect, and say so: the strategy places variables (`strategy.partitioner`).
"""

from __future__ import annotations

from runner.classic.estimator import Estimator
from runner.classic.premade.estimators import premade
from runner.classic.premade.model_fns import V1
from runner.classic.premade.signatures import V1_SIGNATURES


@premade(V1, V1_SIGNATURES)
class LinearEstimator(Estimator):
    """Args: see tf.estimator.LinearEstimator; a name as the optimizer means one of tf.compat.v1.train."""


@premade(V1, V1_SIGNATURES)
class LinearClassifier(LinearEstimator):
    """Args: see tf.estimator.LinearClassifier and LinearEstimator."""


@premade(V1, V1_SIGNATURES)
class LinearRegressor(LinearEstimator):
    """Args: see tf.estimator.LinearRegressor and LinearEstimator."""


@premade(V1, V1_SIGNATURES)
class DNNEstimator(Estimator):
    """Args: see tf.estimator.DNNEstimator; a name as the optimizer means one of tf.compat.v1.train, rate 0.05."""


@premade(V1, V1_SIGNATURES)
class DNNClassifier(DNNEstimator):
    """Args: see tf.estimator.DNNClassifier and DNNEstimator."""


@premade(V1, V1_SIGNATURES)
class DNNRegressor(DNNEstimator):
    """Args: see tf.estimator.DNNRegressor and DNNEstimator."""


@premade(V1, V1_SIGNATURES)
class DNNLinearCombinedEstimator(Estimator):
    """Args: see tf.estimator.DNNLinearCombinedEstimator; a name as an optimizer means one of tf.compat.v1.train."""


@premade(V1, V1_SIGNATURES)
class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """Args: see tf.estimator.DNNLinearCombinedClassifier and DNNLinearCombinedEstimator."""


@premade(V1, V1_SIGNATURES)
class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """Args: see tf.estimator.DNNLinearCombinedRegressor and DNNLinearCombinedEstimator."""


@premade(V1, V1_SIGNATURES)
class BaselineEstimator(Estimator):
    """Args: see tf.estimator.BaselineEstimator; a name as the optimizer means one of tf.compat.v1.train."""


@premade(V1, V1_SIGNATURES)
class BaselineClassifier(BaselineEstimator):
    """Args: see tf.estimator.BaselineClassifier and BaselineEstimator."""


@premade(V1, V1_SIGNATURES)
class BaselineRegressor(BaselineEstimator):
    """Args: see tf.estimator.BaselineRegressor and BaselineEstimator."""
