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
    estimator = Estimator(
        model_fn,
        model_dir=config.model_dir,
        config=run_config,
        params=_params_for(model_fn, config, unread),
        journal=journal,
        progress=progress,
    )
    config = _with_watched_inputs(config, unread)
    train_spec = None
    train_fn = functions.get("input.train.fn")
    if train_fn is not None:
        train_hooks = (*hooks, *_build_train_hooks(config, functions))
        train_spec = _build_train_spec(config, train_fn, train_hooks)
    predict_input = None
    predict_fn = functions.get("input.predict.fn")
    if predict_fn is not None:
        predict_input = build_input(config.input.predict, predict_fn)
    receiver_fn = None
    exporters: tuple[Exporter, ...] = ()
    if config.exports:
        receiver_fn = _build_receiver_fn(config, functions, estimator)
        if config.command != "export":
            exporters = _build_exporters(config, receiver_fn)
    eval_specs: tuple[EvalSpec, ...] = ()
    if config.command in EVALUATING_COMMANDS:
        eval_specs = tuple(_build_eval_specs(config, functions, hooks, exporters))
    return Job(estimator, unread, train_spec, eval_specs, predict_input, hooks, exporters, receiver_fn)


def _params_for(model_fn: Any, config: Config, unread: UnreadParams) -> Mapping[str, Any]:
    """Return the params of the model, which `unread` watches; {} if the model_fn takes none."""
    params = config.model.params
    if not params:
        return params
    if "params" not in declared_arguments(model_fn):
        _log.info("%s has no argument 'params', so model.params is not used (%s).", config.model.fn, ", ".join(params))
        return {}
    return unread.watch("model.params", params)


def _with_watched_inputs(config: Config, unread: UnreadParams) -> Config:
    """Return `config` with inputs whose params `unread` watches."""

    def with_watched_params(key: str, block: Any) -> Any:
        return dataclasses.replace(block, params=unread.watch(f"{key}.params", block.params))

    train = with_watched_params("input.train", config.input.train)
    evals = {}
    for name, block in config.input.evals.items():
        evals[name] = with_watched_params(eval_key(name), block)
    return dataclasses.replace(config, input=dataclasses.replace(config.input, train=train, eval=evals))


def _functions_and_run_config(
    config: Config, cluster: Cluster, journal: Journal
) -> tuple[Mapping[str, Any], RunConfig]:
    """Return (config key -> user function, the RunConfig)."""
    configure_devices(config.run)
    # Import the user's modules before a device is used, because they may configure TensorFlow (memory growth).
    if not cluster.tasks:
        functions = _load_functions(config)
        configure_tensorflow(config.run)
        return functions, build_run_config(config, cluster)
    # TensorFlow 2.21 requires that collective ops are configured at program startup: before a module uses a device.
    configure_tensorflow(config.run)
    journal.event("joining")
    with journal.phase("rendezvous"), kept_local(cluster):
        run_config = build_run_config(config, cluster)
    journal.event("joined")
    check_min_workers(config, run_config.num_replicas_in_sync // cluster.num_workers)
    return _load_functions(config), run_config


def _load_functions(config: Config) -> dict[str, Any]:
    return {key: user_code.load(key, name, default) for key, name, default in config.functions()}


def build_run_config(config: Config, cluster: Cluster = ALONE) -> RunConfig:
    """Return the RunConfig that `run`, `train`, `checkpoint` and the strategies describe.

    Args:
      cluster: this process's place in it. With several processes, this function returns when all have connected.
    """
    # Done once, before either strategy uses a device: TensorFlow cannot split devices afterwards.
    split_cpu(config.strategy.virtual_devices or config.eval_strategy.virtual_devices)
    strategy_settings: EvalStrategyConfig = config.strategy
    if cluster.is_evaluator and config.strategy.name in (*CLUSTER_STRATEGIES, "tpu"):
        strategy_settings = StrategyConfig()  # an evaluator evaluates alone
    strategy = _build_strategy(strategy_settings, cluster)
    save_secs = config.checkpoint.save_secs
    if config.checkpoint.save_steps:  # which come first, if both are set
        save_secs = None
    steps_per_loop = config.train.steps_per_loop
    if steps_per_loop == "auto":
        steps_per_loop = None
    profile_steps = None
    if config.run.profile is not None:
        profile_steps = parse_step_range(config.run.profile)
    keep_best = None
    if config.checkpoint.keep_best.metric is not None:
        keep_best = config.checkpoint.keep_best
    warm_start = _build_warm_start(config.train.warm_start)
    export_dir = config.export.dir
    if export_dir:
        export_dir = known_folder(export_dir, config.run.local_dir)
    eval_strategy: Any = config.eval_strategy.name
    if eval_strategy not in (None, "default"):  # None and "default" need no strategy object
        eval_strategy = _build_strategy(config.eval_strategy)
    return RunConfig.from_config(
        config,
        save_checkpoints_secs=save_secs,
        steps_per_loop=steps_per_loop,
        tensorboard=config.tracking.tensorboard and config.command not in UNRECORDED_COMMANDS,
        profile_steps=profile_steps,
        check_numerics=config.run.debug == "nan",
        check_replicas=config.run.debug == "replicas",
        keep_best=keep_best,
        warm_start=warm_start,
        cluster=cluster,
        has_evaluator=config.cluster.evaluator and not cluster.is_evaluator,
        generation=generation_in(os.environ),
        export_dir=export_dir,
        train_distribute=strategy,
        eval_distribute=eval_strategy,
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
    _set_given(options, settings, "deterministic")
    _set_given(options.threading, settings, "private_threadpool_size", "max_intra_op_parallelism")
    _set_given(options.autotune, settings.autotune, "enabled", "ram_budget", "cpu_budget")
    return options


def _set_given(options: Any, settings: Any, *names: str) -> None:
    """Set those options that the settings have."""
    for name in names:
        value = getattr(settings, name)
        if value is not None:  # setting None would remove the function's own value
            setattr(options, name, value)


def configure_tensorflow(run: RunSettings) -> None:
    """Configure TensorFlow for the whole process, before anything uses it."""
    if run.deterministic:
        tf.config.experimental.enable_op_determinism()


def _build_receiver_fn(config: Config, functions: Mapping[str, Any], estimator: Estimator) -> Callable[[], Any]:
    """Return the receiver function of an exported model. Built here, so that mistakes are found before training."""
    if config.export.receiver_fn is not None:
        receiver_fn: Callable[[], Any] = functions["export.receiver_fn"]
        return receiver_fn
    # An exported model takes the features of this input, which may be input.predict, input.train or an evaluation's.
    key, block = config.export_input
    modes = {"input.predict": ModeKeys.PREDICT, "input.train": ModeKeys.TRAIN}
    mode = modes.get(key, ModeKeys.EVAL)
    spec = estimator.features_spec(build_input(block, functions[f"{key}.fn"]), mode)
    return receiver_fn_of_spec(spec)


def _build_exporters(config: Config, receiver_fn: Callable[[], Any]) -> tuple[Exporter, ...]:
    keep = config.export.keep
    best = config.export.best
    metric = (best.metric or "eval/loss").partition("/")[2]
    is_better = better(metric, mode_of(metric, best.mode))
    builders: Mapping[str, Callable[[], Exporter]] = {
        "final": lambda: FinalExporter("final", receiver_fn),
        "latest": lambda: LatestExporter("latest", receiver_fn, exports_to_keep=keep),
        "best": lambda: BestExporter("best", receiver_fn, compare_fn=is_better, exports_to_keep=keep),
    }
    return tuple(builders[name]() for name in config.export.exporters or ())


def _build_train_spec(config: Config, fn: Any, hooks: tuple[Any, ...]) -> TrainSpec:
    block = config.input.train
    service = None
    if block.service.address:
        service = block.service
    train_input = dataclasses.replace(
        build_input(block, fn),
        first_batch_only=config.run.debug == "overfit",
        prefetch_to_device=block.prefetch_to_device,
        service=service,
    )
    train = config.train
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


def _build_hooks(key_of_list: str, hooks: Sequence[HookConfig], functions: Mapping[str, Any]) -> Iterator[Any]:
    """Yield new hooks, described by the config.

    Args:
      key_of_list: the config key of their list.
      hooks: their descriptions.
      functions: config key -> user function.

    Raises:
      TypeError: an object is not a hook, or does not accept its params.
    """
    for index, settings in enumerate(hooks):
        key = f"{key_of_list}[{index}].fn"
        if key not in functions:  # an evaluator does not load the hooks of training
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
    specs = []
    for name, block in config.input.evals.items():
        eval_input = build_input(block, functions[f"{eval_key(name)}.fn"])
        # Own ones for each evaluation: what a hook keeps is of one.
        own_hooks = tuple(_build_hooks("eval.hooks", config.eval.hooks, functions))
        own_exporters = [exporter for exporter in exporters if name == _evaluation_before(exporter, config)]
        spec = EvalSpec(
            eval_input,
            steps=config.eval.steps,
            name=config.eval.recorded_name(name) or None,
            hooks=(*hooks, *own_hooks),
            start_delay_secs=config.eval.start_delay_secs,
            throttle_secs=config.eval.throttle_secs,
            at_start=config.eval.at_start,
            exporters=own_exporters,
        )
        specs.append(spec)
    return specs


def _evaluation_before(exporter: Exporter, config: Config) -> str:
    """Return the name of the evaluation that an exporter follows: of `best` that of its metric, else the first."""
    metric = config.export.best.metric
    if exporter.name == "best" and metric:
        return evaluation_of(metric)
    return next(iter(config.input.evals), "")


def build_keep(config: Config) -> Keep:
    """Return which checkpoints to keep."""
    settings = config.checkpoint
    return Keep(settings.keep_max, settings.keep_best, settings.keep_every_hours)


def _build_warm_start(settings: WarmStartConfig) -> WarmStart | None:
    if settings.checkpoint is None:
        return None
    vocabularies = {}
    for name, vocabulary in settings.vocabularies.items():
        vocabularies[name] = Vocabulary(**dataclasses.asdict(vocabulary))
    return WarmStart(settings.checkpoint, settings.include, settings.rename, vocabularies)


def _build_strategy(strategy: EvalStrategyConfig, cluster: Cluster = ALONE) -> Any:
    """Build a strategy from its settings; null ones keep `build_strategy`'s defaults."""
    options = {name: value for name, value in dataclasses.asdict(strategy).items() if value is not None}
    if strategy.name != "parameter_server":
        return build_strategy(**options)
    if not cluster.tasks:  # for predict and dry_run, which need whole variables
        return None
    return build_parameter_server(cluster.tasks, options.get("partitioner"))
