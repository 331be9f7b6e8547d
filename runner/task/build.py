"""Build the objects that run a command from its checked config; only this file knows both."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.checkpoint.retention import Keep
from runner.checkpoint.vocabulary import Vocabulary
from runner.config import user_code
from runner.config.metric_names import evaluation_of, mode_of
from runner.config.mistakes import NotAllowed
from runner.config.schema import (
    CLUSTER_STRATEGIES,
    EVALUATING_COMMANDS,
    UNRECORDED_COMMANDS,
    Config,
    DataOptionsConfig,
    EvalStrategyConfig,
    HookConfig,
    InputBlock,
    RunSettings,
    StrategyConfig,
    WarmStartConfig,
    eval_key,
)
from runner.config.settings.step_range import parse_step_range
from runner.config.strategy_validation import check_min_workers
from runner.data.inputs import Input
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.devices import configure_devices
from runner.distribute.grpc_server import kept_local
from runner.distribute.strategy import build_parameter_server, build_strategy, split_cpu
from runner.estimator.estimator import Estimator
from runner.estimator.specs import EvalSpec, TrainSpec
from runner.export.exporters import BestExporter, Exporter, FinalExporter, LatestExporter, better
from runner.export.receivers import receiver_fn_of_spec
from runner.hooks.builtin_hooks import split_hooks
from runner.hooks.hook import TimeLimit
from runner.model_fn import ModeKeys, declared_arguments
from runner.model_fn import user_code as user_code_called
from runner.remote.mirror import known_folder
from runner.run_config import RunConfig, WarmStart
from runner.system.console import Progress
from runner.task.unread_params import UnreadParams
from runner.tracking.journal import Journal
from runner.tracking.run_end import generation_in

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """The objects of a config, ready to run.

    Attributes:
      train_spec: None if the command does not train.
      eval_specs: empty if it does not evaluate.
      predict_input: None if it does not predict.
      hooks: native hooks of the command; the specs contain them already.
      exporters: exporters during training; the specs contain them already.
      receiver_fn: returns the receiver of an exported model's requests; None if nothing is exported.
      unread_params: reports params that the user's functions never read.
    """

    estimator: Estimator
    unread_params: UnreadParams
    train_spec: TrainSpec | None = None
    eval_specs: tuple[EvalSpec, ...] = ()
    predict_input: Input | None = None
    hooks: tuple[Any, ...] = ()
    exporters: tuple[Exporter, ...] = ()
    receiver_fn: Callable[[], Any] | None = None


def build_job(
    config: Config, journal: Journal, progress: Progress, hooks: tuple[Any, ...] = (), cluster: Cluster = ALONE
) -> Job:
    """Import the user's functions and build what the command needs.

    Args:
      config: the config.
      journal: receives the events of the Estimator.
      progress: shows the run on the screen.
      hooks: native hooks of training and of each evaluation and prediction.
      cluster: this process's place.

    Raises:
      UserCodeError: a function does not exist. Errors of the user's modules pass through.
      ValueError: the strategy cannot be built here.
    """
    functions, run_config = _functions_and_run_config(config, cluster, journal)
    model_fn = functions["model.fn"]
    if config.model.classic is True:
        model_fn = importlib.import_module("runner.classic.compat.tf1_operators").as_classic(model_fn)
    unread = UnreadParams(config, cluster, journal)
    hooks = (*hooks, unread)
    params: Mapping[str, Any] = config.model.params
    if params and "params" not in declared_arguments(model_fn):
        _log.info("%s has no argument 'params', so model.params is not used (%s).", config.model.fn, ", ".join(params))
        params = {}
    estimator = Estimator(
        model_fn,
        model_dir=config.model_dir,
        config=run_config,
        params=unread.watch("model.params", params) if params else params,
        journal=journal,
        progress=progress,
    )
    config = _watched_inputs(config, unread)
    train_fn, predict_fn = functions.get("input.train.fn"), functions.get("input.predict.fn")
    train_spec = None
    if train_fn is not None:
        train_spec = _build_train_spec(config, train_fn, (*hooks, *_build_train_hooks(config, functions)))
    predict_input = None if predict_fn is None else build_input(config.input.predict, predict_fn)
    receiver_fn = _build_receiver_fn(config, functions, estimator) if config.exports else None
    exporters = _build_exporters(config, receiver_fn) if receiver_fn and config.command != "export" else ()
    evaluates = config.command in EVALUATING_COMMANDS
    eval_specs = tuple(_build_eval_specs(config, functions, hooks, exporters)) if evaluates else ()
    return Job(estimator, unread, train_spec, eval_specs, predict_input, hooks, exporters, receiver_fn)


def _watched_inputs(config: Config, unread: UnreadParams) -> Config:
    """Return `config` with inputs whose params `unread` watches."""

    def watched(key: str, block: Any) -> Any:
        return dataclasses.replace(block, params=unread.watch(f"{key}.params", block.params))

    inputs = dataclasses.replace(
        config.input,
        train=watched("input.train", config.input.train),
        eval={name: watched(eval_key(name), block) for name, block in config.input.evals.items()},
    )
    return dataclasses.replace(config, input=inputs)


def _functions_and_run_config(
    config: Config, cluster: Cluster, journal: Journal
) -> tuple[Mapping[str, Any], RunConfig]:
    """Return (config key -> user function, the RunConfig)."""

    def functions() -> Mapping[str, Any]:
        return {key: user_code.load(key, name, default) for key, name, default in config.functions()}

    configure_devices(config.run)
    # Import the user's modules before a device is used, because they may configure TensorFlow (memory growth).
    if not cluster.tasks:
        loaded = functions()
        configure_tensorflow(config.run)
        return loaded, build_run_config(config, cluster)
    # TensorFlow 2.21 requires that collective ops are configured at program startup: before a module uses a device.
    configure_tensorflow(config.run)
    journal.event("joining")
    with journal.phase("rendezvous"), kept_local(cluster):
        run_config = build_run_config(config, cluster)
    journal.event("joined")
    check_min_workers(config, run_config.num_replicas_in_sync // cluster.num_workers)
    return functions(), run_config


def build_run_config(config: Config, cluster: Cluster = ALONE) -> RunConfig:
    """Return the RunConfig that `run`, `train`, `checkpoint` and the strategies describe.

    Args:
      cluster: this process's place in it. With several processes, this function returns when all have connected.
    """
    # Done once, before either strategy uses a device: TensorFlow cannot split devices afterwards.
    split_cpu(config.strategy.virtual_devices or config.eval_strategy.virtual_devices)
    # An evaluator evaluates alone.
    is_alone = cluster.is_evaluator and config.strategy.name in (*CLUSTER_STRATEGIES, "tpu")
    strategy = _build_strategy(StrategyConfig() if is_alone else config.strategy, cluster)
    as_trained = config.eval_strategy.name in (None, "default")
    best = config.checkpoint.keep_best
    return RunConfig.from_config(
        config,
        save_checkpoints_secs=None if config.checkpoint.save_steps else config.checkpoint.save_secs,
        steps_per_loop=None if config.train.steps_per_loop == "auto" else config.train.steps_per_loop,
        tensorboard=config.tracking.tensorboard and config.command not in UNRECORDED_COMMANDS,
        profile_steps=None if config.run.profile is None else parse_step_range(config.run.profile),
        check_numerics=config.run.debug == "nan",
        check_replicas=config.run.debug == "replicas",
        keep_best=best if best.metric is not None else None,
        warm_start=_build_warm_start(config.train.warm_start),
        cluster=cluster,
        has_evaluator=config.cluster.evaluator and not cluster.is_evaluator,
        generation=generation_in(os.environ),
        export_dir=config.export.dir and known_folder(config.export.dir, config.run.local_dir),
        train_distribute=strategy,
        eval_distribute=config.eval_strategy.name if as_trained else _build_strategy(config.eval_strategy),
    )


def build_input(block: InputBlock, fn: Any) -> Input:
    """Return the Input that a block of `input` describes."""
    return Input(
        fn,
        params=block.params,
        batch_size=block.batch_size,
        shard=block.shard,
        shuffle_seed=block.shuffle_seed,
        options=_build_options(block.options),
    )


def _build_options(settings: DataOptionsConfig) -> tf.data.Options | None:
    """Return the tf.data.Options that the config sets; None: it sets none, and those of the input function apply."""
    if settings == DataOptionsConfig():
        return None
    options = tf.data.Options()
    for place, names, given in (
        (options, ("deterministic",), settings),
        (options.threading, ("private_threadpool_size", "max_intra_op_parallelism"), settings),
        (options.autotune, ("enabled", "ram_budget", "cpu_budget"), settings.autotune),
    ):
        for name in names:
            if (value := getattr(given, name)) is not None:  # setting None would remove the function's own value
                setattr(place, name, value)
    return options


def configure_tensorflow(run: RunSettings) -> None:
    """Configure TensorFlow for the whole process, before anything uses it."""
    if run.deterministic:
        tf.config.experimental.enable_op_determinism()


def _build_receiver_fn(config: Config, functions: Mapping[str, Any], estimator: Estimator) -> Callable[[], Any]:
    """Return the receiver function of an exported model. Built here, so that mistakes are found before training."""
    if config.export.receiver_fn is not None:
        given: Callable[[], Any] = functions["export.receiver_fn"]
        return given
    key, block = config.export_input
    modes = {"input.predict": ModeKeys.PREDICT, "input.train": ModeKeys.TRAIN}
    spec = estimator.features_spec(build_input(block, functions[f"{key}.fn"]), modes.get(key, ModeKeys.EVAL))
    return receiver_fn_of_spec(spec)


def _build_exporters(config: Config, receiver_fn: Callable[[], Any]) -> tuple[Exporter, ...]:
    keep, best = config.export.keep, config.export.best
    metric = (best.metric or "eval/loss").partition("/")[2]
    is_better = better(metric, mode_of(metric, best.mode))
    builders: Mapping[str, Callable[[], Exporter]] = {
        "final": lambda: FinalExporter("final", receiver_fn),
        "latest": lambda: LatestExporter("latest", receiver_fn, exports_to_keep=keep),
        "best": lambda: BestExporter("best", receiver_fn, compare_fn=is_better, exports_to_keep=keep),
    }
    return tuple(builders[name]() for name in config.export.exporters or ())


def _build_train_spec(config: Config, fn: Any, hooks: tuple[Any, ...]) -> TrainSpec:
    train, is_overfit = config.train, config.run.debug == "overfit"
    block = config.input.train
    train_input = dataclasses.replace(
        build_input(block, fn),
        first_batch_only=is_overfit,
        prefetch_to_device=block.prefetch_to_device,
        service=block.service if block.service.address else None,
    )
    return TrainSpec(
        train_input,
        train.max_steps,
        hooks,
        early_stopping=train.early_stopping,
        max_epochs=train.max_epochs,
        reduce_lr_on_plateau=train.reduce_lr_on_plateau,
    )


def _build_train_hooks(config: Config, functions: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the training hooks of the config. Raises: as `_build_hooks`."""
    if config.train.max_secs is not None:
        yield TimeLimit(config.train.max_secs)
    yield from _build_hooks("train.hooks", config.train.hooks, functions)


def _build_hooks(of: str, hooks: Sequence[HookConfig], functions: Mapping[str, Any]) -> Iterator[Any]:
    """Yield new hooks, described by the config.

    Args:
      of: the key of their list.
      hooks: their descriptions.
      functions: config key -> user function.

    Raises:
      TypeError: an object is not a hook, or does not accept its params.
    """
    for place, settings in enumerate(hooks):
        key = f"{of}[{place}].fn"
        if key not in functions:  # of an evaluator, which does not train
            continue
        try:
            with user_code_called():
                hook = functions[key](**settings.params)
            split_hooks([hook])
        except (TypeError, NotAllowed) as error:
            error.add_note(f"{key}={settings.fn}, called with params {settings.params}")
            raise
        yield hook


def _build_eval_specs(
    config: Config, functions: Mapping[str, Any], hooks: tuple[Any, ...], exporters: Sequence[Exporter] = ()
) -> list[EvalSpec]:
    first, metric = next(iter(config.input.evals), ""), config.export.best.metric
    of_best = evaluation_of(metric) if metric else first
    return [
        EvalSpec(
            build_input(block, functions[f"{eval_key(name)}.fn"]),
            steps=config.eval.steps,
            name=config.eval.recorded_name(name) or None,
            # Own ones for each evaluation: what a hook keeps is of one.
            hooks=(*hooks, *_build_hooks("eval.hooks", config.eval.hooks, functions)),
            start_delay_secs=config.eval.start_delay_secs,
            throttle_secs=config.eval.throttle_secs,
            at_start=config.eval.at_start,
            # The first evaluation has all exporters but best, which follows the evaluation of its metric.
            exporters=[one for one in exporters if name == (of_best if one.name == "best" else first)],
        )
        for name, block in config.input.evals.items()
    ]


def build_keep(config: Config) -> Keep:
    """Return which checkpoints to keep."""
    settings = config.checkpoint
    return Keep(settings.keep_max, settings.keep_best, settings.keep_every_hours)


def _build_warm_start(settings: WarmStartConfig) -> WarmStart | None:
    if settings.checkpoint is None:
        return None
    vocabularies = {name: Vocabulary(**dataclasses.asdict(one)) for name, one in settings.vocabularies.items()}
    return WarmStart(settings.checkpoint, settings.include, settings.rename, vocabularies)


def _build_strategy(strategy: EvalStrategyConfig, cluster: Cluster = ALONE) -> Any:
    """Build a strategy from its settings; null ones keep `build_strategy`'s defaults."""
    options = {name: value for name, value in dataclasses.asdict(strategy).items() if value is not None}
    if strategy.name == "parameter_server":  # for predict and dry_run, which need whole variables
        return build_parameter_server(cluster.tasks, options.get("partitioner")) if cluster.tasks else None
    return build_strategy(**options)
