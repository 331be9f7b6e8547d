"""MultiHead, which joins several heads on one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic import summaries
from runner.classic.heads import base, checks, metrics
from runner.export.outputs import PredictOutput
from runner.model_fn import ModeKeys
from runner.tf_private.tf_estimator import static_size


class MultiHead(base.Head):
    """A head for several tasks. Each of its heads has its own logits and labels, and their losses are added.

    Logits are a dict head name -> logits, or one float tensor `[batch, sum of the heads' logits_dimensions]`, which is
    split in the heads' order. Labels are a dict head name -> labels. Predictions have keys `(head name, key)`, and
    metrics have names `<metric>/<head name>`.

    Args:
      heads: heads with different names.
      head_weights: factor of each head's loss; None: 1 for each.

    Raises:
      ValueError: there are no heads, a head has no name or the name of another, or head_weights has another length.
    """

    def __init__(self, heads: Sequence[base.Head], head_weights: Sequence[float] | None = None) -> None:
        if not heads:
            raise ValueError(f"MultiHead(heads={heads}): at least one head is required.")
        if head_weights and len(head_weights) != len(heads):
            raise ValueError(f"MultiHead: there are {len(heads)} heads, but {len(head_weights)} head_weights.")
        names = [head.name for head in heads]
        if None in names or len(set(names)) < len(names):
            raise ValueError(f"MultiHead: heads need different names, but have {names}.")
        self._heads = {str(head.name): head for head in heads}
        self._head_weights = tuple(head_weights or [1.0] * len(heads))

    @property
    def name(self) -> str:
        return "_".join(self._heads)

    @property
    def logits_dimension(self) -> int:
        return sum(head.logits_dimension for head in self._heads.values())

    @property
    def loss_reduction(self) -> str:
        reductions = {head.loss_reduction for head in self._heads.values()}
        if len(reductions) > 1:
            raise ValueError(f"MultiHead: all heads must have the same loss_reduction, not {sorted(reductions)}.")
        return reductions.pop()

    def loss(
        self,
        labels: Any,
        logits: Any,
        features: Any = None,
        mode: str | None = None,
        regularization_losses: base.Losses = None,
    ) -> tf.Tensor:
        labels = self._checked_names("labels", labels)
        losses = self._losses(labels, self._logits_by_head(logits), features, mode)
        weighted = [loss * weight for loss, weight in zip(losses.values(), self._head_weights, strict=True)]
        return base.with_regularization(tf.add_n(weighted), regularization_losses)

    def _losses(self, labels: Any, logits: Any, features: Any, mode: str | None) -> dict[str, tf.Tensor]:
        losses: dict[str, tf.Tensor] = {}
        for name, head in self._heads.items():
            losses[name] = head.loss(labels[name], logits[name], features=features, mode=mode)
        return losses

    def loss_weight(self, labels: Any, logits: Any, features: Any) -> Any:
        """Return the first head's `loss_weight`, which all heads share, if all heads sum their losses; else None."""
        labels = self._checked_names("labels", labels)
        logits = self._logits_by_head(logits)
        if not all(checks.is_sum(head.loss_reduction) for head in self._heads.values()):
            return None
        name, head = next(iter(self._heads.items()))
        return head.loss_weight(labels[name], logits[name], features)

    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[Any, tf.Tensor]:
        logits_by_head = self._logits_by_head(logits)
        predictions: dict[Any, tf.Tensor] = {}
        for name, head in self._heads.items():
            for key, value in head.predictions(logits_by_head[name], keys).items():
                predictions[name, key] = value
        return predictions

    def metrics(self, regularization_losses: base.Losses = None) -> dict[str, Any]:
        metric_by_name = {f"loss/{name}": metrics.mean(f"loss/{name}") for name in self._heads}
        if regularization_losses is not None:
            metric_by_name[self._key("regularization_loss")] = metrics.mean("regularization_loss")
        for head in self._heads.values():
            metric_by_name |= head.metrics()
        return metric_by_name

    def update_metrics(
        self,
        eval_metrics: dict[str, Any],
        features: Any,
        logits: Any,
        labels: Any,
        mode: str | None = None,
        regularization_losses: base.Losses = None,
    ) -> dict[str, Any]:
        labels = self._checked_names("labels", labels)
        logits = self._logits_by_head(logits)
        num_examples = tf.shape(next(iter(logits.values())))[0]
        for name, loss in self._losses(labels, logits, features, mode).items():
            weight = self._heads[name].loss_weight(labels[name], logits[name], features)
            if weight is None:  # the head's loss is a mean over examples
                weight = num_examples
            metrics.add(eval_metrics[f"loss/{name}"], loss, weights=weight)
        if regularization_losses is not None:
            name = self._key("regularization_loss")
            metrics.add(eval_metrics[name], tf.add_n(list(regularization_losses)), weights=num_examples)
        for name, head in self._heads.items():
            head.update_metrics(eval_metrics, features, logits[name], labels[name])
        return eval_metrics

    def export_outputs(self, predictions: Mapping[Any, tf.Tensor]) -> dict[str, Any]:
        """Return the outputs of each head as `<head>/<signature>`, its default also as `<head>`, and `predict` with all
        predictions.
        """
        exported: dict[str, Any] = {}
        all_predictions: dict[str, Any] = {}
        for name, head in self._heads.items():
            predictions_of_head = {key: value for (owner, key), value in predictions.items() if owner == name}
            outputs = head.export_outputs(predictions_of_head)
            # The first head's default becomes that of all.
            exported.setdefault(base.DEFAULT_SIGNATURE, outputs[base.DEFAULT_SIGNATURE])
            for key, output in outputs.items():
                signature = name if key == base.DEFAULT_SIGNATURE else f"{name}/{key}"
                exported[signature] = output
            all_predictions |= {f"{name}/{key}": value for key, value in predictions_of_head.items()}
        return {**exported, "predict": PredictOutput(all_predictions)}

    def _summarise(self, labels: Any, logits: Any, features: Any) -> None:
        labels = self._checked_names("labels", labels)
        losses = self._losses(labels, self._logits_by_head(logits), features, ModeKeys.TRAIN)
        for name, loss in losses.items():
            summaries.scalar(f"loss/{name}", loss)

    def _summary_key(self, metric: str) -> str:
        return metric

    def _logits_by_head(self, logits: Any) -> Mapping[str, tf.Tensor]:
        """Return head name -> its logits, from such a dict or from one tensor with the logits of all heads."""
        if isinstance(logits, Mapping):
            return self._checked_names("logits", logits)
        logits = tf.convert_to_tensor(logits)
        sizes = [head.logits_dimension for head in self._heads.values()]
        if static_size(logits, -1) not in (None, sum(sizes)):
            raise ValueError(
                f"MultiHead: logits have the shape {logits.shape}; the last axis must have the size of all heads, "
                f"{' + '.join(map(str, sizes))} = {sum(sizes)}."
            )
        return dict(zip(self._heads, tf.split(logits, sizes, axis=-1), strict=True))

    def _checked_names(self, what: str, values: Any) -> Mapping[str, Any]:
        """Return `values` if they are a dict with the name of each head. `what` is their name, for messages."""
        if not isinstance(values, Mapping):
            raise ValueError(
                f"MultiHead: {what} must be a dict with the keys {', '.join(self._heads)}, not {type(values).__name__}."
            )
        missing = [name for name in self._heads if name not in values]
        if missing:
            raise ValueError(
                f"MultiHead: {what} lack the keys {', '.join(missing)}. They have: {', '.join(map(str, values))}."
            )
        return values
