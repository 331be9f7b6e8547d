"""Checks, made when a model_fn is traced, that the model supports the training settings."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.strategy import is_parameter_server
from runner.model_fn import EstimatorSpec
from runner.programs import learning_rate
from runner.programs.mixed_precision import HALF, computes_in
from runner.run_config import RunConfig

_log = logging.getLogger(__name__)


def check_training(spec: EstimatorSpec, config: RunConfig, num_replicas: int, graph: tf.Graph) -> None:
    """Check the settings of `config` against the return value of model_fn, and warn of those that have no effect.

    Raises:
      ValueError: the model does not support a setting; the message names the setting and the reason.
    """
    if config.precision != "float32" and not computes_in(graph, HALF):
        _log.warning(
            "train.precision=%s has no effect: model_fn computes nothing in half precision. The setting applies to "
            "Keras 3 layers without a dtype of their own.",
            config.precision,
        )
    on_servers = is_parameter_server(config.train_distribute)
    if on_servers:
        _check_asynchronous(config)
    if config.jit and (on_servers or config.place.num_workers > 1):
        raise ValueError(
            "train.jit=true works in one process only, not with several workers or parameter servers. Set "
            "train.jit=false."
        )
    if spec.optimizer is None:
        _check_train_op(spec, config, num_replicas)
        return
    _check_loss_is_scaled(spec.optimizer, config, graph)
    rate = learning_rate.in_words(config)
    if rate is not None:
        _log.info("%s", rate)


def _check_train_op(spec: EstimatorSpec, config: RunConfig, num_replicas: int) -> None:
    """Raise ValueError for what works with `optimizer=` only, as model_fn returned a train_op."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        reason = field.metadata.get("needs_optimizer")
        if isinstance(reason, Mapping):  # one for each value that needs it
            reason = reason.get(value)
        if not reason or value == field.default:
            continue
        key = field.metadata["key"]
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        raise ValueError(
            f"{key}={shown}: model_fn returned train_op=, which {reason}. Return EstimatorSpec(optimizer=...) "
            f"instead, or unset {key}."
        )
    if num_replicas > 1 and spec.loss_weight is not None:
        raise ValueError(
            f"EstimatorSpec(train_op=..., loss_weight=...) on {num_replicas} replicas: the gradient is summed "
            "inside train_op, before loss_weight is known. Return optimizer= instead of train_op=."
        )


def _check_loss_is_scaled(optimizer: Any, config: RunConfig, graph: tf.Graph) -> None:
    """Raise ValueError if the optimizer expects a scaled loss, and the loss is not scaled."""
    is_wrapped = hasattr(optimizer, "inner_optimizer")
    if is_wrapped and config.precision != "mixed_float16" and computes_in(graph, (tf.float16,)):
        raise ValueError(
            "The optimizer is in a LossScaleOptimizer, as compile() puts it where layers compute in float16, and "
            f"with train.precision={config.precision} the loss is not scaled. Set train.precision=mixed_float16, "
            "and remove the dtype policy from model_fn; or, to train without a scale, compile with "
            "auto_scale_loss=False."
        )


def check_update(optimizer: Any, owners: Sequence[Any], config: RunConfig, num_replicas: int) -> None:
    """Check that an update by an optimizer of Keras 3 is the same on any number of replicas.

    Args:
      optimizer: the optimizer, of any kind.
      owners: the `keras.Variable`s that it updates, None for variables of others.
      config: the RunConfig.
      num_replicas: the number of replicas, over all workers.

    Raises:
      ValueError: it is not.
    """
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps and num_replicas > 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps} of {type(optimizer).__name__} works on one replica only: Keras "
            f"updates in a branch, where {num_replicas} replicas cannot add up their gradients. Set "
            f"train.gradient_accumulation={steps} with batches {steps} times as large, and remove it from the "
            "optimizer."
        )
    frequency = getattr(optimizer, "ema_overwrite_frequency", None)
    if frequency and is_parameter_server(config.train_distribute):
        raise ValueError(
            f"ema_overwrite_frequency={frequency} of {type(optimizer).__name__} does not work with "
            "strategy=parameter_server: a worker would overwrite the weights while others update them. Remove it: "
            "evaluations show the averages without it, too."
        )
    overwritten = [owner.path for owner in owners if getattr(owner, "overwrite_with_gradient", False)]
    if overwritten:
        _check_gradients_are_whole(overwritten, config, num_replicas)


def _check_gradients_are_whole(overwritten: Sequence[str], config: RunConfig, num_replicas: int) -> None:
    """Check that no setting changes gradients that Keras writes into variables: `overwritten` has their names."""
    why = ""
    if num_replicas > 1:
        why = f"{num_replicas} replicas"
    elif config.gradient_accumulation > 1:
        why = f"train.gradient_accumulation={config.gradient_accumulation}"
    elif config.clip_global_norm is not None:
        why = f"train.clip_global_norm={config.clip_global_norm}"
    if why:
        raise ValueError(
            f"{', '.join(overwritten)}: Keras writes the 'gradient' of such a variable into it, as float8 layers have "
            f"them for their scales, and with {why} that is another value. Train float8 layers on one replica and "
            "without these settings."
        )


def check_feeds(feeds: Sequence[tf.Tensor]) -> None:
    """Check that hooks feed no placeholder of a step that consists of several programs.

    Args:
      feeds: the placeholders that hooks feed.

    Raises:
      ValueError: there are any.
    """
    if feeds:
        raise ValueError(
            f"A hook feeds {feeds[0].name!r} (SessionRunArgs(feed_dict=...)), but with train.gradient_accumulation, "
            "train.jit or train.precision=mixed_float16 a step consists of several programs, which hooks cannot feed. "
            "Unset these keys, or pass the value through input_fn."
        )


def check_part(fetches: Sequence[object], config: RunConfig, meets_others: bool) -> None:
    """Check that a hook can run operations on a batch between steps, without the rest of a step.

    Raises:
      ValueError: the settings of the run do not allow that.
    """
    if config.gradient_accumulation > 1 or config.jit or config.precision == "mixed_float16":
        reason = (
            "train.gradient_accumulation, train.jit or train.precision=mixed_float16, a step consists of several "
            "programs"
        )
    elif is_parameter_server(config.train_distribute):
        reason = "strategy=parameter_server, the workers have the batches"
    elif meets_others:
        reason = "several workers, all of them would have to do so at once"
    else:
        return
    raise ValueError(
        f"session.run({list(fetches)!r}) in a hook needs a batch, but between steps it cannot be computed: with "
        f"{reason}. Add the operations to train_op, ordered by tf.control_dependencies, or request tensors in "
        "before_run: SessionRunArgs(fetches)."
    )


def _check_asynchronous(config: RunConfig) -> None:
    """Raise ValueError for settings that do not work with asynchronous workers."""
    if config.nan == "rollback":
        setting = "train.nan=rollback"
        reason = "other workers have already trained on later batches"
    elif config.precision == "mixed_float16":
        setting = "train.precision=mixed_float16"
        reason = (
            "one worker would change the loss scale while another uses it; use mixed_bfloat16, which needs no scale"
        )
    else:
        return
    raise ValueError(f"{setting} does not work with strategy=parameter_server: {reason}.")
