"""Names of metrics and predictions, which scripts import from private modules of tf.estimator."""

from __future__ import annotations

_THRESHOLD = "positive_threshold_%g"


class MetricKeys:
    """Keys in the results of `evaluate`. Those with a `%` are format strings: AUC_AT_CLASS % 3."""

    LOSS = "loss"
    LOSS_MEAN = "average_loss"
    LOSS_REGULARIZATION = "regularization_loss"
    ACCURACY = "accuracy"
    ACCURACY_BASELINE = "accuracy_baseline"
    PRECISION = "precision"
    RECALL = "recall"
    AUC = "auc"
    AUC_PR = "auc_precision_recall"
    LABEL_MEAN = "label/mean"
    PREDICTION_MEAN = "prediction/mean"
    ACCURACY_AT_THRESHOLD = f"accuracy/{_THRESHOLD}"
    PRECISION_AT_THRESHOLD = f"precision/{_THRESHOLD}"
    RECALL_AT_THRESHOLD = f"recall/{_THRESHOLD}"
    PROBABILITY_MEAN_AT_CLASS = "probability_mean/class%d"
    AUC_AT_CLASS = "auc/class%d"
    AUC_PR_AT_CLASS = "auc_precision_recall/class%d"
    PROBABILITY_MEAN_AT_NAME = "probability_mean/%s"
    AUC_AT_NAME = "auc/%s"
    AUC_PR_AT_NAME = "auc_precision_recall/%s"


class PredictionKeys:
    """Keys in the dicts that `predict` yields."""

    CLASSES = "classes"
    CLASS_IDS = "class_ids"
    ALL_CLASSES = "all_classes"
    ALL_CLASS_IDS = "all_class_ids"
    LOGISTIC = "logistic"
    LOGITS = "logits"
    PREDICTIONS = "predictions"
    PROBABILITIES = "probabilities"
